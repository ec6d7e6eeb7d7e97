"Lightning's callback: a step of the optimizer is a step of the record, and its draft replays it."

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stabilitylab import LightningCallback, diagnose, open_run
from stabilitylab.cli.main import main
from stabilitylab.names.errors import InputError
from stabilitylab.replay.retrace import QUANTITIES
from stabilitylab.replay.state import files_at
from stabilitylab.run.curves import SOFTMAX_TWICE, noted_at
from stabilitylab.run.recording import opened

ROOT = str(Path(__file__).resolve().parent.parent)

PROGRAM = """
from types import SimpleNamespace

import torch
from torch import nn

from stabilitylab.probe.lightning import LightningCallback


class Module(nn.Module):
    automatic_optimization = True

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, x):
        return self.inner(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": (self(x) - y).square().mean()}


class Loop:
    "Lightning's order of hooks; the last step of an epoch has a micro-batch too few, as there."

    precision_plugin, gradient_clip_algorithm = SimpleNamespace(), None
    lightning_module = None

    def __init__(self, callback, share, clip, precision):
        self.callback, self.accumulate_grad_batches = callback, share
        self.gradient_clip_val, self.precision, self.global_step = clip, precision, 0

    def fit(self, module, batches):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        self.optimizers = [optimizer]
        share = self.accumulate_grad_batches
        self.callback.on_train_start(self, module)
        for i, batch in enumerate(batches):
            self.callback.on_train_batch_start(self, module, batch, i)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16-mixed"):
                outputs = module.training_step(batch, i)
            outputs = {"loss": outputs["loss"] / share}  # as Lightning hands it to callbacks
            self.callback.on_before_backward(self, module, outputs["loss"])
            outputs["loss"].backward()
            if (i + 1) % share == 0 or i + 1 == len(batches):
                if self.gradient_clip_val:
                    nn.utils.clip_grad_norm_(module.parameters(), self.gradient_clip_val)
                optimizer.step()
                optimizer.zero_grad()
                self.global_step += 1
            self.callback.on_train_batch_end(self, module, outputs, batch, i)
        self.callback.on_train_end(self, module)


def run(share, clip, precision):
    torch.manual_seed(0)
    module = Module(width=7)
    batches = [(torch.randn(4, 5), torch.randn(4, 1)) for _ in range(5)]
    Loop(LightningCallback("run", snapshot_every=3), share, clip, precision).fit(module, batches)


if __name__ == "__main__":
    run(SETTINGS)
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["1, None, '32-true'", "2, 0.3, '32-true'", "2, 0.3, 'bf16-mixed'"])
def test_the_draft_replays_the_last_step(tmp_path, capsys, settings):
    (tmp_path / "train.py").write_text(PROGRAM.replace("SETTINGS", settings))
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    assert main(["replay", str(tmp_path / "run"), "--json", "--no-swap", "--no-samples"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["is_exact"] and not check["missing"], check


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Recorder")
@pytest.mark.parametrize("last", [torch.nn.Softmax(-1), torch.nn.Identity()])
def test_a_loss_of_probabilities_is_noted_before_backward(tmp_path, last):
    "Lightning and the Trainer hand the loss to `recorder.step` without its graph."
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), last)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trainer = SimpleNamespace(
        global_step=0, optimizers=[optimizer], precision="32-true", gradient_clip_val=None,
        precision_plugin=SimpleNamespace(), lightning_module=module, accumulate_grad_batches=1,
    )  # fmt: skip
    module.automatic_optimization = True
    callback = LightningCallback(tmp_path / "run")
    callback.on_train_start(trainer, module)
    for step in range(2):
        loss = torch.nn.functional.cross_entropy(module(torch.randn(6, 3)), torch.arange(6) % 4)
        callback.on_before_backward(trainer, module, loss)
        loss.backward()
        optimizer.step()
        trainer.global_step = step + 1
        callback.on_train_batch_end(trainer, module, loss.detach())
    callback.on_train_end(trainer, module)
    noted = noted_at(open_run(tmp_path / "run"), SOFTMAX_TWICE)
    assert (noted is not None) == isinstance(last, torch.nn.Softmax)


@pytest.mark.parametrize(
    ("trains", "why"),
    [
        ({"precision_plugin": SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))}, "under a loss scaler"),
        ({"world_size": 2}, "on 2 ranks"),
    ],
)
def test_a_manual_step_that_cannot_be_replayed_says_why_there_are_no_batches(tmp_path, trains, why):
    module = torch.nn.Linear(3, 4)
    module.automatic_optimization = False
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    words = {
        "global_step": 0, "optimizers": [optimizer], "precision": "32-true", "gradient_clip_val": None,
        "precision_plugin": SimpleNamespace(), "lightning_module": module, "accumulate_grad_batches": 1,
    }  # fmt: skip
    trainer = SimpleNamespace(**words | trains)
    callback = LightningCallback(tmp_path / "run", snapshot_every=100)
    with pytest.warns(UserWarning, match="optimizes by itself"):
        callback.on_train_start(trainer, module)
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, module, None)
    callback.on_train_end(trainer, module)
    with pytest.raises(InputError, match=rf"automatic_optimization = False.*{why}.*cannot be replayed"):
        _ = opened(tmp_path / "run").box()


MANUAL = """
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.probe.lightning import LightningCallback


class Adversaries(nn.Module):
    "The order of a GAN's steps; the discriminator steps at every second batch, by its index."

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Linear(6, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.trainer.optimizers
        ones, zeros = torch.ones(len(batch), 1), torch.zeros(len(batch), 1)
        z = torch.randn(len(batch), 3)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), ones)
        first.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.generator.parameters(), 0.05)
        first.step()
        fakes = self.discriminator(self.generator(z).detach())
        loss = F.binary_cross_entropy_with_logits(self.discriminator(batch), ones)
        loss = loss + F.binary_cross_entropy_with_logits(fakes, zeros)
        second.zero_grad()
        loss.backward()
        if batch_idx % 2 == 0 or self.trainer.current_epoch > 0:
            second.step()


class Loop:
    "Lightning's order of hooks with manual optimization."

    precision, precision_plugin, accumulate_grad_batches = "32-true", SimpleNamespace(), 1
    gradient_clip_val, global_step, current_epoch = None, 0, 0

    def fit(self, module, callback, batches):
        self.optimizers = [
            torch.optim.Adam(module.generator.parameters(), 0.01),
            torch.optim.SGD(module.discriminator.parameters(), 0.1),
        ]
        module.trainer = self
        callback.on_train_start(self, module)
        for i, batch in enumerate(batches):
            callback.on_train_batch_start(self, module, batch, i)
            outputs = module.training_step(batch, i)
            callback.on_train_batch_end(self, module, outputs, batch, i)
            for group in self.optimizers[1].param_groups:  # a schedule
                group["lr"] *= 0.9
        callback.on_train_end(self, module)


if __name__ == "__main__":
    torch.manual_seed(0)
    batches = torch.randn(8, 4, 5)
    Loop().fit(Adversaries(), LightningCallback("run", snapshot_every=4), batches)
"""
MANUAL_FAULTS = {  # what is changed in the program after the run -> what the replay says of it
    ("        first.step()", "        pass"): ("own step left out", "generator"),
    ("batch_idx % 2 == 0 or", "True or"): ("own step added", "discriminator"),
    ("loss = loss + F", "loss = loss + loss.detach() * 0 + 3 * F"): ("own step", "discriminator"),
    ("        second.zero_grad()", "        loss = 2 * loss; second.zero_grad()"): (
        "own loss factor", "2 times"
    ),
}  # fmt: skip


# a target network, which the step copies every third step and no optimizer holds
COUNTED = """
from types import SimpleNamespace

import torch
from torch import nn

from stabilitylab.probe.lightning import LightningCallback


class Values(nn.Module):
    automatic_optimization = True

    def __init__(self):
        super().__init__()
        self.net, self.target = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            wanted = self.target(batch).max(1).values + batch_idx
        return (self(batch).max(1).values - wanted).square().mean()


class Loop:
    precision, precision_plugin, accumulate_grad_batches = "32-true", SimpleNamespace(), 1
    gradient_clip_val, global_step, current_epoch = None, 0, 0

    def fit(self, module, callback, batches):
        optimizer = torch.optim.Adam(module.net.parameters(), 0.01)
        self.optimizers, self.lightning_module, module.trainer = [optimizer], module, self
        callback.on_train_start(self, module)
        for i, batch in enumerate(batches):
            callback.on_train_batch_start(self, module, batch, i)
            loss = module.training_step(batch, i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.global_step += 1
            callback.on_train_batch_end(self, module, loss, batch, i)
        callback.on_train_end(self, module)


if __name__ == "__main__":
    torch.manual_seed(0)
    Loop().fit(Values(), LightningCallback("run", snapshot_every=4), torch.randn(16, 4, 5))
"""


@pytest.mark.slow
def test_a_step_that_reads_the_counters_of_the_trainer_is_replayed(tmp_path, capsys):
    "A Q-network whose target was copied every tenth step was replayed with a copy at every step."
    (tmp_path / "train.py").write_text(COUNTED)
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    findings = diagnose(open_run(tmp_path / "run"))
    (copied,) = [f for f in findings if f.kind == "no_gradient"]
    assert copied.severity == "info" and copied.evidence == {"set_otherwise": 2}
    assert copied.modules == ("target.weight", "target.bias")
    for step in (12, 14):
        assert main(["replay", str(tmp_path / "run"), "--step", str(step), "--json", "--no-swap"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["check"]["is_exact"] and not result["check"]["missing"], result["check"]
        assert len(result["samples"]) == 4


@pytest.fixture(scope="module")
def manual_run(tmp_path_factory):
    "The folder in which the program above was recorded."
    folder = tmp_path_factory.mktemp("manual")
    (folder / "train.py").write_text(MANUAL)
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment, check=True)
    return folder


def replayed(folder, capsys, *words):
    "The answer of a replay."
    assert main(["replay", str(folder / "run"), "--json", "--no-samples", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_manual_step_is_replayed_to_the_last_bit(manual_run, capsys):
    answer = replayed(manual_run, capsys, "--step", "7")
    check = answer["check"]
    assert check["is_exact"] and check["fault"] == "" and not check["missing"], check
    assert answer["loss"] is None and answer["exact"] is None
    assert [row["name"] for row in check["checks"]] == ["parameters", *QUANTITIES[1:]]
    assert answer["swap"]["verdict"] == "neither", answer["swap"]
    loop = files_at(manual_run / "run", "batches", 7)[0]["batch"]["loop"]
    assert loop == {"batch_idx": 7, "global_step": 0, "current_epoch": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), MANUAL_FAULTS)
def test_a_manual_step_that_is_another_one_is_told(manual_run, capsys, old, new):
    assert MANUAL.count(old) == 1
    (manual_run / "train.py").write_text(MANUAL.replace(old, new))
    try:
        check = replayed(manual_run, capsys, "--step", "5", "--no-swap")["check"]
    finally:
        (manual_run / "train.py").write_text(MANUAL)
    fault, words = MANUAL_FAULTS[old, new]
    assert not check["is_step"] and check["fault"] == fault and words in check["words"], check


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["replay", "run", "--precision", "bf16"], ["precision", "run"], ["trial", "run", "--fix", "lower_lr"]],
)
def test_what_needs_a_loss_says_so_of_a_manual_step(manual_run, capsys, monkeypatch, words):
    monkeypatch.chdir(manual_run)
    assert main(words) == 2
    assert "trials need one" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_itself(tmp_path, package):
    pl = pytest.importorskip(package)
    from torch.utils.data import DataLoader, TensorDataset

    if not issubclass(LightningCallback, pl.Callback):
        pytest.skip("the other package was imported first")

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        accumulate_grad_batches=2, callbacks=[LightningCallback(tmp_path / "run", snapshot_every=1)],
    )  # fmt: skip
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 3)
    first = net.inner(x[:4]).square().mean().item()  # two micro-batches of two samples make the first step
    trainer.fit(net, DataLoader(TensorDataset(x), 2))
    losses = open_run(tmp_path / "run")["scalars"].loss.values
    assert losses.size == 2 and abs(losses[0] - first) < 1e-6
    assert "clip=None,  # the trainer does not clip" in (tmp_path / "run/replay_setup.py").read_text()
