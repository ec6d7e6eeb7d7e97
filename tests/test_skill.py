"The skill for coding agents: its commands parse, and its keys are in the answers."

import json
import re
import shlex

import pytest

from stabilitylab.cases.registry import sample
from stabilitylab.cli.main import make_parser
from tests.command import command
from tests.notebooks import ROOT

FOLDER = ROOT / "stabilitylab" / "cli" / "agent_skill"
TEXTS = {
    file.relative_to(FOLDER).as_posix(): file.read_text(encoding="utf-8") for file in FOLDER.rglob("*.md")
}
COMMANDS = sorted({call for text in TEXTS.values() for call in re.findall(r"`stabilitylab ([^`]+)`", text)})


def test_the_head_names_the_skill():
    head = re.match(r"---\nname: ([a-z-]{1,64})\ndescription: (.{1,1024})\n---\n", TEXTS["SKILL.md"])
    assert head and head[1] == "stabilitylab"
    references = set(re.findall(r"references/\w+\.md", TEXTS["SKILL.md"]))
    assert references == set(TEXTS) - {"SKILL.md"}


@pytest.mark.parametrize("call", COMMANDS)
def test_a_command_parses_as_it_stands(call):
    words = shlex.split(call.replace(" N", " 3").replace("MINUTES", "5"))
    try:
        assert make_parser().parse_args(words).func
    except SystemExit as done:  # `--list` prints and ends
        assert done.code == 0


@pytest.mark.slow
def test_the_keys_are_in_the_answers():
    answer = json.loads(command("diagnose", sample("lm_high_lr"), "--json").stdout)
    plan = json.loads(command("trial", sample("lm_high_lr"), "--plan", "--json").stdout)
    of_answer = {
        "most_likely",
        "findings",
        "replay",
        "n_steps",
        "first_step",
        "last_step",
        "format",
        "source",
    }
    of_finding = {"kind", "severity", "onset", "end", "modules", "evidence", "explanation", "remedies"}
    assert of_answer <= set(answer) and of_finding == set(answer["findings"][0])
    assert {"name", "source", "reported"} <= set(answer["findings"][0]["remedies"][0])
    assert {"cause", "because", "next", "confidence", "rivals", "cures"} <= set(answer["most_likely"])
    assert {"start", "arms", "unfit"} <= set(plan) and {"fix", "parameters", "why"} <= set(plan["arms"][0])


def test_it_is_written_and_nothing_else_is_lost(tmp_path):
    assert command("skill", "--to", tmp_path).returncode == 0
    written = {file.relative_to(tmp_path / "stabilitylab").as_posix() for file in tmp_path.rglob("*.md")}
    assert written == set(TEXTS)
    assert command("skill", "--to", tmp_path).returncode == 0  # an older one of the same name is renewed
    (tmp_path / "stabilitylab" / "SKILL.md").write_text("my own notes")
    refused = command("skill", "--to", tmp_path)
    assert refused.returncode == 2 and "holds something else" in refused.stderr
    assert (tmp_path / "stabilitylab" / "SKILL.md").read_text() == "my own notes"
    assert command("skill").stdout == TEXTS["SKILL.md"]
