"Commands that README and the how-to pages show, run as they are written there, as text and as JSON."

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.command import command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "nbs/tutorials/test_a_fix.ipynb",
    *sorted((ROOT / "nbs/howto").glob("*.ipynb")),
]
# of the commands; `watch` and `lab` do not end, and trials have tests in files of their own
RUN = ("diagnose", "check", "formats", "replay", "scan", "precision", "preflight", "audit-accumulation")
AUDITED = """
import torch
from torch.nn import functional as F

def pieces():
    model = torch.nn.Linear(4, 3)
    def token_loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses[None], torch.ones(1, len(batch[1]), dtype=torch.bool)
    def step(model, window):
        losses = [F.cross_entropy(model(x), y) / len(window) for x, y in window]
        sum(losses).backward()
        return float(sum(losses).detach())
    window = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (6, 2, 9)]
    return {"model": model, "microbatches": window, "token_loss": token_loss, "step": step}
"""


def written(page):
    "The commands of a page, without their comments."
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    lines = re.findall(r"^\s*!?stabilitylab (.+)$", text, re.MULTILINE)
    return [line.partition("#")[0].strip() for line in lines]


COMMANDS = list(dict.fromkeys(line for page in PAGES for line in written(page)))


ELSEWHERE = ("http://", "trackio://", "wandb/", "runs/")  # of trackers, whose tests make them
HERE = [
    line
    for line in COMMANDS
    if (line.split()[0] in RUN or line.endswith("--list")) and not any(place in line for place in ELSEWHERE)
]


@pytest.fixture
def places(tmp_path, monkeypatch):
    "The files that the pages speak of."
    sample = ROOT / "data_samples" / "lm_high_lr"
    folder = tmp_path / "path" / "to"
    folder.mkdir(parents=True)
    for run in (folder / "run", tmp_path / "run", tmp_path / "RUN"):
        shutil.copytree(sample, run, dirs_exist_ok=True)
    shutil.copy(sample / "train.log", folder / "train.log")
    (tmp_path / "mine.py").write_text(AUDITED)
    save_file({"weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_show_commands():
    assert len(COMMANDS) >= 15 and len(HERE) >= 4, COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("line", HERE)
def test_a_command_of_a_page_works_as_it_is_written(places, line):
    if re.search(
        r" (RUN|run) ", line
    ):  # runs of those pages, for which the sample stands: a step that it has
        line = re.sub(r"--step \d+", "--step 352", line)
    done = command(*line.split())
    assert done.returncode in (0, 1), done.stderr  # 1: something was found
    assert "fault of this program" not in done.stdout + done.stderr and done.stdout.strip()
    if "--json" in line or "--html" in line:
        return
    done = command(*line.split(), "--json")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout) is not None
