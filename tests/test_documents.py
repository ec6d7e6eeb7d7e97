"A README, a changelog or the description of a package is no run, unless it quotes one."

import json

import pytest
from command import command

README = """# tiny-gpt

A small model. Training takes an hour on one GPU.

## Training

```sh
python train.py --lr 3e-4 --steps 400
```

- the loss at step 400 is 2.1, and 2.4 with dropout
- a loss of 3.0 at step 100 is too high: lower the rate

{quoted}

See [the paper](https://example.org/paper) for the losses of step 200 and step 300.
"""
EXCERPT = "```\n" + "".join(f"step {i}: loss {4 / i:.4f}, lr 0.001\n" for i in range(1, 9)) + "```"
TRACEBACK = "```\nTraceback (most recent call last):\n  File 'train.py', line 3\nValueError: bad rate\n```"
TABLE = "| Setting | Loss |\n|---|---|\n| warm-up | 2.10 |\n| none | 2.45 |\n| cosine | 2.31 |"
METADATA = "Metadata-Version: 2.4\nName: tiny\n\n" + README.format(quoted=TRACEBACK)
REPORTED = "Title\n=====\n\n.. code-block:: text\n\n   Traceback (most recent call last):\n   ValueError: 3\n"


@pytest.mark.parametrize("quoted", ["", TRACEBACK, TABLE], ids=["plain", "traceback", "table"])
@pytest.mark.parametrize("name", ["README.md", "train.log", "output"])
def test_a_document_without_a_run_is_refused_whatever_its_name(tmp_path, quoted, name):
    path = tmp_path / name
    path.write_text(README.format(quoted=quoted))
    answer = command("diagnose", path)
    assert answer.returncode == 2 and "is a document with no run in it" in answer.stderr
    assert ("--format crash_text" in answer.stderr) == (quoted is TRACEBACK)


@pytest.mark.parametrize("text", [METADATA, REPORTED], ids=["metadata", "rst"])
def test_descriptions_of_packages_and_restructured_text_are_documents(tmp_path, text):
    path = tmp_path / "notes"
    path.write_text(text)
    assert "is a document with no run in it" in command("diagnose", path).stderr
    assert command("diagnose", path, "--format", "crash_text").returncode == 0


def test_an_excerpt_in_a_document_is_read_and_says_what_it_is(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(README.format(quoted=EXCERPT))
    answer = json.loads(command("diagnose", path, "--json").stdout)
    assert answer["n_steps"] == 8 and answer["document_lines"] == len(path.read_text().splitlines())
    for options in ([], ["--brief"]):
        words = command("diagnose", path, *options).stdout.split()  # a long path breaks lines anywhere
        assert "quoted in a document" in " ".join(words)


def test_a_log_that_prints_markdown_among_its_steps_is_a_log(tmp_path):
    path = tmp_path / "grpo.log"
    path.write_text("".join(f"step {i}: loss {4 / i:.4f}\n## Answer\n**{i}**\n" * 3 for i in range(1, 99)))
    answer = json.loads(command("diagnose", path, "--json").stdout)
    assert "document_lines" not in answer and answer["last_step"] == 98
