"The three lines a framework of the page `beside_your_tracker`, as they stand there."

import json
import re
from pathlib import Path

import pytest

from stabilitylab import open_run
from stabilitylab.replay.snapshot import replayable_steps

PAGE = Path(__file__).resolve().parent.parent.parent / "nbs/howto/beside_your_tracker.ipynb"
DATA = """
import torch

torch.manual_seed(0)
x, y = torch.randn(80, 5), torch.randn(80, 1)
"""
TRAINER = (
    DATA
    + """
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 1)

    def forward(self, x, labels):
        return {"loss": (self.inner(x) - labels).square().mean()}


model = Model()
data = [{"x": a, "labels": b} for a, b in zip(x, y)]
args = TrainingArguments("out", max_steps=10, report_to=[], use_cpu=True, disable_tqdm=True)
"""
)
LIGHTNING = (
    DATA
    + """
import functools

import lightning
from torch.utils.data import DataLoader, TensorDataset

quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
Trainer = functools.partial(lightning.Trainer, max_steps=10, **quiet)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        return (self.inner(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
)
ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(x, y), 4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
"""
)
PROGRAMS = {  # what stands in the lines of the page -> what comes before and after them
    "RecorderCallback": (TRAINER, "trainer.train()"),
    "LightningCallback": (LIGHTNING, "trainer.fit(Net(), DataLoader(TensorDataset(x, y), 8))"),
    "accelerator.accumulate": (ACCELERATE, ""),
}


def lines_of(word):
    "The block of the page that holds a word."
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if word in block)


@pytest.mark.parametrize("word", PROGRAMS)
def test_the_lines_of_the_page_record_a_run(run_program, tmp_path, word):
    before, after = PROGRAMS[word]
    _, errors = run_program(f"{before}\n{lines_of(word)}\n{after}\n")
    assert "Recorder(" not in errors, errors
    loss = open_run(tmp_path / "record")["scalars"].loss
    assert loss.size == 10 and loss.notnull().all()
    assert len(replayable_steps(tmp_path / "record")) == 10
