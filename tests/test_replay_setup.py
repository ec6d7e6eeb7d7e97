"A replay that is not the step says so: planted faults of the setup, of the loop and of the user's code."

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stabilitylab.cli.main import main
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.likely_cause import ranked_causes
from stabilitylab.names.errors import InputError
from stabilitylab.probe.environment import _fp32_backends, arithmetic, set_arithmetic
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay import faults, setup_check, setup_file
from stabilitylab.replay.examine import examine
from stabilitylab.replay.retrace import QUANTITIES, Retraced, retrace
from stabilitylab.replay.setup_check import _may_be_rounding, _rounded, check_setup
from stabilitylab.replay.setup_file import checked
from stabilitylab.replay.snapshot import load_batch, load_snapshot, replayable_steps
from stabilitylab.replay.state import Setup
from stabilitylab.replay.step import replay
from stabilitylab.replay.user_code import load_setup
from stabilitylab.run.curves import COMPILED, noted_at
from stabilitylab.run.recording import opened


class Net(nn.Module):
    "Two layers, dropout, heads that leave no trace in the shapes."

    def __init__(self, width=8, heads=2, dropout=0.1):
        super().__init__()
        self.fc1, self.fc2, self.heads = nn.Linear(6, width), nn.Linear(width, 1), heads
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.fc1(x).view(len(x), self.heads, -1).softmax(-1).flatten(1)
        return self.fc2(self.drop(hidden))[:, 0]


def mean_loss(model, part):
    return ((model(part["x"]) - part["y"]).square() * part["mask"]).mean()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def schedule(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)


SETUP = Setup(Net, mean_loss, adam, schedule, clip=0.1)


def part_of(step, micro=0):
    generator = torch.Generator().manual_seed(10 * step + micro)
    x = torch.randn(4, 6, generator=generator)
    return {"x": x, "y": x.sum(1), "mask": (torch.rand(4, generator=generator) > 0.3).float()}


def record(path, steps=5, parts=1, after=None, setup=SETUP, every=10, loss_of=None, note=None, **options):
    "A recorded loop; `after(step, model)` runs behind the optimizer's step."
    torch.manual_seed(0)
    model = setup.model()
    optimizer = setup.optimizer(model)
    with Recorder(model, optimizer, path, snapshot_every=every, merge=False, **options) as recorder:
        for step in range(steps):
            if setup.schedule is not None:
                setup.schedule(optimizer, step)
            total = 0.0
            for micro in range(parts):
                part = recorder.batch(part_of(step, micro))
                loss = setup.loss(model, part) / parts
                loss.backward()
                total += loss.item()
            if setup.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(total if loss_of is None else loss_of(total))
            if note is not None:
                recorder.guard.note(note, aloud=False)
            if after is not None:
                after(step, model)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return record(tmp_path_factory.mktemp("record") / "run")


@pytest.mark.slow
def test_the_right_setup_is_exact_and_everything_is_compared(path):
    check = check_setup(path, 3, SETUP)
    assert check.is_step and check.is_exact and check.fault == "" and check.missing == ()
    assert {c.name for c in check.checks} >= {"parameters", "loss", "grad_norm", "lr", "update_norm"}
    assert {c.state for c in check.checks} == {"equal"}
    assert json.loads(json.dumps(check.to_dict()))["words"] == check.words


def test_without_a_schedule_the_recorded_settings_are_used(path):
    assert check_setup(path, 4, replace(SETUP, schedule=None)).is_exact
    snapshot = load_snapshot(path, 3, replace(SETUP, schedule=None))
    _, optimizer = snapshot.build()
    snapshot.setup.schedule(optimizer, 3)
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def late(optimizer, step):
    schedule(optimizer, max(step - 1, 0))


def constant(optimizer, step):
    schedule(optimizer, 0 if step == 0 else 17)


def no_mask(model, part):
    return (model(part["x"]) - part["y"]).square().mean()


def frozen():
    model = Net()
    model.fc1.bias.requires_grad_(False)
    return model


def partial_adam(model):
    return torch.optim.AdamW([{"params": model.fc1.parameters()}, {"params": []}], lr=1e-2)


FAULTS = {
    "schedule off": {"schedule": late},
    "other schedule": {"schedule": constant},
    "optimizer": {"optimizer": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2)},
    "clipping": {"clip": None},
    "model": {"model": lambda: Net(heads=4)},
    "batch key": {"loss": no_mask},
    "frozen": {"model": frozen},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_setup_is_named(path, fault):
    check = check_setup(path, 3, replace(SETUP, **FAULTS[fault]))
    assert (check.fault, check.is_step) == (fault, False), check.words
    assert check.words.startswith("this replay is not the recorded step")
    assert fault != "clipping" or check.evidence["clip"] == 0.1


@pytest.mark.slow
def test_a_record_without_settings_says_that_the_schedule_is_missing(tmp_path):
    path = record(tmp_path / "run")
    index = json.loads((path / "blackbox" / "index.json").read_text())
    index.pop("crc32c")
    del index["settings"]
    (path / "blackbox" / "index.json").write_text(json.dumps(index))
    assert check_setup(path, 3, replace(SETUP, schedule=None)).fault == "schedule"
    assert check_setup(path, 3, SETUP).is_exact


def test_weights_that_change_outside_of_the_step(tmp_path):
    def average(step, model):
        if step == 2:
            model.fc1.weight.data.mul_(0.5)

    path = record(tmp_path / "run", after=average)
    assert check_setup(path, 2, SETUP).is_exact
    check = check_setup(path, 4, SETUP)
    assert check.fault == "outside" and check.evidence["before"] == 3


def test_weight_decay_that_no_norm_shows_at_first(path):
    "Loaded groups bring the recorded decay; a schedule that changes it is found by the last bits."

    def other(optimizer, step):
        schedule(optimizer, step)
        optimizer.param_groups[0]["weight_decay"] = 0.0

    assert check_setup(path, 3, replace(SETUP, schedule=other)).fault == "setting"


@pytest.mark.slow
def test_accumulation(tmp_path):
    path = record(tmp_path / "run", parts=4)
    assert check_setup(path, 2, SETUP).is_exact
    check = check_setup(path, 2, replace(SETUP, reduction="sum"))
    assert check.fault == "accumulation" and "4 times" in check.words


def test_another_logged_loss_is_no_fault(tmp_path):
    path = record(tmp_path / "run", parts=2, loss_of=lambda loss: 3 * loss)
    check = check_setup(path, 2, SETUP)
    assert check.is_step and check.fault == "other loss"


@pytest.mark.slow
def test_a_batch_that_the_loop_takes_in_slices_is_replayed_whole(tmp_path):
    "The gradients agree up to rounding, the loss handed over is that of the last slice."
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = adam(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=10) as recorder:
        for step in range(4):
            part = recorder.batch(part_of(step))
            for at in range(4):
                loss = mean_loss(model, {name: rows[at : at + 1] for name, rows in part.items()}) / 4
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss.detach())
    setup = Setup(lambda: Net(dropout=0.0), mean_loss, adam)
    check = check_setup(tmp_path / "run", 3, setup)
    assert check.fault == "other loss" and check.is_step
    # a step that was begun and never ended, as one is killed in, has no norms to compare
    way = retrace(tmp_path / "run", 3, setup)
    way.steps[-1].recorded.pop("grad_norm")
    assert check_setup(tmp_path / "run", 3, setup, way).fault == "unrecorded"


def test_a_kernel_that_adds_in_a_changing_order_is_noise(path):
    "As cuDNN's gradients of weights: the loss is the same to the last bit, a gradient is not."

    def noisy(model, part):
        model.fc1.weight.register_hook(lambda grad: grad * (1 + 3e-6 * next(order)))
        return mean_loss(model, part)

    order = iter(random.Random(0).random, None)
    check = check_setup(path, 3, replace(SETUP, loss=noisy))
    assert check.fault == "noise" and check.is_step and not check.is_exact


@pytest.mark.slow
def test_a_replay_with_a_loss_scaler_gives_it_to_its_own_recorder(tmp_path, recwarn):
    torch.manual_seed(0)
    model = Net()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=64.0)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2, scaler=scaler) as recorder:
        for step in range(3):
            loss = mean_loss(model, recorder.batch(part_of(step)))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(loss.detach())
    snapshot = load_snapshot(tmp_path / "run", 2, Setup(Net, mean_loss, adam))
    again = replay(snapshot, load_batch(tmp_path / "run", 2, snapshot.setup))
    assert again.loss == float(loss) and not [w for w in recwarn if "GradScaler" in str(w.message)]


def _set_older_flags():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def _set_newer_flags():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.benchmark = True


@pytest.mark.slow
@pytest.mark.parametrize("set_flags", [_set_older_flags, _set_newer_flags])
def test_a_replay_takes_the_flags_of_the_run(tmp_path, set_flags):
    before = arithmetic()
    set_flags()
    in_run = arithmetic()
    try:
        path = record(tmp_path / "run")
    finally:
        set_arithmetic({"fp32_precision": dict.fromkeys(_fp32_backends(), "none")})
        set_arithmetic(before)
    assert arithmetic() == before != in_run
    flags_within = []

    def noting(model, part):
        flags_within.append(arithmetic())
        return mean_loss(model, part)

    assert check_setup(path, 2, replace(SETUP, loss=noting)).is_exact
    within = in_run | {"deterministic_warn_only": True}
    assert flags_within and all(flags == within for flags in flags_within) and arithmetic() == before


@pytest.mark.slow
def test_random_numbers_that_a_compiled_run_drew_otherwise_are_named(tmp_path):
    path = record(tmp_path / "run", note=COMPILED)

    def other_draws(model, part):
        torch.rand(1)
        return mean_loss(model, part)

    check = check_setup(path, 2, replace(SETUP, loss=other_draws))
    assert check.fault == "compiled dropout" and not check.is_step
    check = check_setup(path, 2, replace(SETUP, loss=lambda model, part: mean_loss(model, part) * 1.00001))
    assert "the run was compiled" in check.words and check.is_step


@pytest.mark.slow
def test_dropout_inside_of_cudnn_is_named(tmp_path, monkeypatch):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 4, 2, dropout=0.5), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.rnn(x)[0])[:, 0]

    recurrent = replace(SETUP, model=Recurrent)
    path = record(tmp_path / "run", setup=recurrent)
    setup = replace(recurrent, loss=lambda model, part: mean_loss(model, part) * 1.001)
    assert "cuDNN" not in check_setup(path, 2, setup).words
    monkeypatch.setattr(setup_check, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(setup_check, "recorded_device", lambda run: "cuda")
    assert "the dropout inside rnn is drawn from a state of cuDNN" in check_setup(path, 2, setup).words


def test_a_second_optimizer_that_the_recorder_does_not_know(tmp_path):
    torch.manual_seed(0)
    model = Net()
    known, unknown = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.fc1, model.fc2))
    with Recorder(model, known, tmp_path / "run", snapshot_every=10, merge=False) as recorder:
        for step in range(4):
            loss = mean_loss(model, recorder.batch(part_of(step)))
            loss.backward()
            known.step()
            unknown.step()
            model.zero_grad()
            recorder.step(loss)
    one = Setup(Net, mean_loss, lambda m: torch.optim.SGD(m.fc1.parameters(), lr=0.1))
    check = check_setup(tmp_path / "run", 2, one)
    assert check.fault == "second optimizer" and "fc2.weight" in check.words


def two_optimizers(model):
    return [
        torch.optim.SGD(model.fc1.parameters(), lr=0.1),
        torch.optim.AdamW(model.fc2.parameters(), lr=1e-2),
    ]


@pytest.mark.slow
def test_all_optimizers_and_their_schedules_are_restored(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizers = two_optimizers(model)
    rates = [
        torch.optim.lr_scheduler.StepLR(one, 1, gamma)
        for one, gamma in zip(optimizers, (0.9, 0.5), strict=True)
    ]
    with Recorder(model, optimizers, tmp_path / "run", snapshot_every=3, merge=False) as recorder:
        for step in range(6):
            loss = mean_loss(model, recorder.batch(part_of(step)))
            loss.backward()
            for one in (*optimizers, *rates):
                one.step()
            model.zero_grad()
            recorder.step(loss)
    setup = Setup(Net, mean_loss, two_optimizers)
    for step in (2, 5):
        assert check_setup(tmp_path / "run", step, setup).is_exact
    with pytest.raises(ValueError, match="the snapshot has 2; allowed"):
        load_snapshot(tmp_path / "run", 4, replace(setup, optimizer=lambda m: two_optimizers(m)[0]))


def test_another_width_is_refused_by_name(path):
    with pytest.raises(ValueError, match=r"another width.*fc1.weight is \(8, 6\)"):
        check_setup(path, 3, replace(SETUP, model=lambda: Net(width=12)))


@pytest.mark.slow
def test_old_and_light_records_say_what_cannot_be_checked(tmp_path):
    path = record(tmp_path / "run", level="light")
    check = check_setup(path, 3, SETUP)
    assert check.is_step and {"update_norm", "weight_norm"} <= set(check.missing)


@pytest.mark.slow
def test_no_verdict_on_top_of_another_step(path, tmp_path):
    bad = replace(SETUP, loss=no_mask)
    found = examine(path, 4, bad)
    told = found.to_dict()
    assert not found.check.is_step and found.swap is None and found.samples is None
    assert "swap" not in told and "samples" not in told and told["check"]["fault"] == "batch key"
    good = examine(path, 4, SETUP).to_dict()
    assert good["check"]["is_step"] and "swap" in good and len(good["samples"]) == 4


def test_a_rounding_of_another_processor_is_let_pass_and_nothing_larger(path, monkeypatch):
    from stabilitylab.replay import retrace

    def elsewhere(size):
        return replace(SETUP, loss=lambda model, part: mean_loss(model, part) * (1 + size))

    assert check_setup(path, 3, elsewhere(1e-4)).fault != "rounding"  # on the same machine it is a fault
    monkeypatch.setattr(retrace, "environment", lambda: {"cpu": "another", "version_torch": "0"})
    check = check_setup(path, 3, elsewhere(1e-4))
    assert check.fault == "rounding" and check.is_step and "cpu" in check.words and not check.is_exact
    assert not check_setup(path, 3, elsewhere(2e-2)).is_step
    assert check_setup(path, 3, replace(SETUP, schedule=late)).fault == "schedule off"


def test_gradients_are_measured_before_clipping(path):
    snapshot = load_snapshot(path, 3, SETUP)
    again = replay(snapshot, load_batch(path, 3))
    assert again.clipped_grad_norm == pytest.approx(0.1, rel=1e-4) and again.grad_norm > 0.11
    assert again.run["scalars"].grad_norm.item() == pytest.approx(again.grad_norm, rel=1e-6)


TRAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width, self.fc = width, nn.Linear(6, width)
    def forward(self, x):
        return self.fc(x).square().mean()

if __name__ == "__main__":
    from stabilitylab import Recorder
    torch.manual_seed(0)
    model = Net(width=4)
    groups = [{"params": [model.fc.weight], "weight_decay": 0.3}, {"params": [model.fc.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with Recorder(model, optimizer, "run", snapshot_every=50) as recorder:
        for step in range(8):
            batch = recorder.batch({"x": torch.randn(4, 6)})
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
"""


def command(capsys, *arguments):
    "Exit code, output and errors of `stabilitylab replay`."
    code = main(["replay", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    "A folder with a training script that was run, and a record with the draft of a setup."
    folder = tmp_path_factory.mktemp("project")
    root = Path(__file__).resolve().parent.parent
    (folder / "train.py").write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n" + TRAIN)
    subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)
    return folder


@pytest.mark.slow  # trains a stranger's project
def test_the_draft_replays_to_the_last_bit_from_any_folder(project, capsys):
    draft = (project / "run" / "replay_setup.py").read_text()
    assert "from train import Net" in draft and "width=4" in draft and "'weight_decay': 0.3" in draft
    code, out, error = command(
        capsys, project / "run", "--step", 7, "--setup", f"{project}/run/replay_setup.py:setup", "--json"
    )
    assert code == 0, error
    assert json.loads(out)["exact"] is True and json.loads(out)["check"]["missing"] == []


SETUP_FILE = """
from stabilitylab import Setup
from train import Net
import torch

def optimizer(model):
    groups = [{"params": [model.fc.weight]}, {"params": [model.fc.bias]}]
    return torch.optim.AdamW(groups, lr=1e-2)

def loss(model, batch):
    return model(batch["x"])

def wrong_key(model, batch):
    return model(batch["inputs"])

def setup():
    return Setup(lambda: Net(4), loss, optimizer)

def with_path(path):
    return setup()

made = setup()

def instance():
    return Setup(Net(4), loss, optimizer)

def key(path):
    return Setup(lambda: Net(4), wrong_key, optimizer)

def fault():
    return Setup(lambda: Net(4 / 0), loss, optimizer)

def nothing():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words",
    [
        ("made", "setup.py, line 22) is a Setup, not a function"),
        ("instance", "setup.py, line 25"),
        (
            "key",
            "line 14 (`return model(batch[\"inputs\"])`): KeyError: 'inputs'; the recorded batch has x",
        ),
        ("fault", "setup.py, line 31"),
        ("nothing", "returns a NoneType"),
        ("missing", "has no missing"),
    ],
)
def test_faults_of_the_user_are_told_as_theirs(project, capsys, name, words):
    (project / "setup.py").write_text(SETUP_FILE)
    code, out, error = command(capsys, project / "run", "--step", 3, "--setup", f"{project}/setup.py:{name}")
    assert (code, out) == (2, "") and words in error and "Traceback" not in error, error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["setup", "with_path"])
def test_setup_with_the_path_or_without(project, name):
    (project / "setup.py").write_text(SETUP_FILE)
    setup = load_setup(f"{project}/setup.py:{name}", project / "run")
    assert check_setup(project / "run", 5, setup).is_exact
    assert replayable_steps(project / "run") == list(range(8))


def test_the_command_shows_the_table_and_no_verdict(project, capsys):
    lines = SETUP_FILE.replace('model(batch["x"])', 'model(batch["x"]) * 2')
    (project / "other_setup.py").write_text(lines)
    code, out, _ = command(capsys, project / "run", "--step", 3, "--setup", f"{project}/other_setup.py")
    assert code == 0 and "not the recorded step" in out and "differs (step 0)" in out
    assert "swap test" not in out and "samples" not in out


def test_the_page_names_tests_that_there_are():
    folder = Path(__file__).parent
    page = (folder.parent / "nbs" / "explain" / "what_a_replay_checks.ipynb").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    others = ("test_strangers.py", "test_setup_faults.py", "test_probe_lightning.py")
    files = [*folder.glob("test_replay*.py"), *(folder / name for name in others)]
    known = set(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in files)))
    assert len(named) > 20 and named <= known, named - known


OTHER_PROCESSOR = """
from dataclasses import replace
from stabilitylab.cases.registry import sample
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.retrace import retrace
from stabilitylab.replay.setup_check import check_setup

path, setup = sample(), setup_of(sample())
good, bad = check_setup(path, 351, setup), check_setup(path, 351, replace(setup, schedule=None))
print(good.fault, good.is_step, bad.fault, bad.is_step)
"""


@pytest.mark.slow  # starts a process
def test_the_sample_is_replayed_on_another_processor_although_its_state_magnifies_rounding():
    # kernels without wide vectors add in another order, which two steps of this run make a percent of
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESSOR],
        env=os.environ | other,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["rounding", "True", "schedule", "False"]


def unfinished(path):
    "A record that was cut between the batch of step 3 and the end of the step, as by a kill."
    torch.manual_seed(0)
    model = SETUP.model()
    optimizer = SETUP.optimizer(model)
    with Recorder(model, optimizer, path, snapshot_every=10, merge=False) as recorder:
        for step in range(4):
            schedule(optimizer, step)
            loss = mean_loss(model, recorder.batch(part_of(step)))
            if step < 3:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), SETUP.clip)
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss.item())
    return path


def test_a_step_of_which_nothing_was_recorded_cannot_be_checked(tmp_path):
    check = check_setup(unfinished(tmp_path / "run"), 3, SETUP)
    assert check.fault == "unrecorded" and "cannot be checked" in check.words
    assert check.is_step and not check.is_exact and {"loss", "grad_norm"} <= set(check.missing)


@pytest.mark.slow
def test_a_gradient_of_zero_without_a_loss_is_no_check(tmp_path):
    flat = replace(SETUP, loss=lambda model, part: 0 * mean_loss(model, part))
    path = record(tmp_path / "run", setup=flat, loss_of=lambda total: None)
    check = check_setup(path, 3, flat)
    assert (check.fault, check.is_exact) == ("unrecorded", False) and "above 0" in check.words


@pytest.mark.slow
def test_nothing_is_said_of_a_loss_that_was_not_recorded(tmp_path):
    path = record(tmp_path / "run", loss_of=lambda total: None)
    check = check_setup(path, 3, replace(SETUP, loss=lambda m, part: 3 * mean_loss(m, part)))
    assert check.fault == "gradient alone" and "no loss was recorded" in check.words
    assert "loss agrees" not in check.words


def test_a_precision_that_does_not_exist_is_refused_before_anything_runs(path, monkeypatch):
    monkeypatch.setattr(
        "stabilitylab.replay.setup_check.retrace", lambda *_: pytest.fail("the comparison ran")
    )
    with pytest.raises(ValueError, match=r"fp4.*bf16_autocast"):
        examine(path, 3, SETUP, precisions=["fp4"])


SCRIPT = """
import argparse, sys
from torch import nn
from stabilitylab import Recorder, Setup

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
args = parser.parse_args()

class Net(nn.Linear):
    def __init__(self):
        super().__init__(args.width, 1)

model = Net()
with Recorder(model, [], sys.argv[0] + ".never") as recorder:
    raise RuntimeError("this script trains when it is imported")
"""


def test_an_edit_within_the_same_second_is_an_edit(tmp_path, monkeypatch):
    "Python's cache knows a file by its size and its second; a page that mended its setup got the old one."
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mended.py"
    text = "import torch\nfrom stabilitylab import Setup\ndef setup(path):\n"
    text += "    return Setup(lambda: torch.nn.Linear(1, 1), lambda m, x: m(x).sum(), reduction='{}')\n"
    reductions = []
    for reduction in ("sum ", "mean"):
        file.write_text(text.format(reduction.strip()) + " " * (4 - len(reduction.strip())))
        os.utime(file, (1e9, 1e9))
        reductions.append(load_setup(f"{file}:setup", tmp_path).reduction)
    assert reductions == ["sum", "mean"]


def test_a_setup_may_import_a_script_that_trains(tmp_path, monkeypatch):
    (tmp_path / "my_training.py").write_text(SCRIPT)
    lines = ["from my_training import Net", "from stabilitylab import Setup"]
    lines += ["def setup():", "    return Setup(Net, lambda model, batch: model(batch).mean())"]
    (tmp_path / "setup_of_mine.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["stabilitylab", "replay", "run", "--step", "3"])
    (tmp_path / "run").mkdir()
    setup = load_setup(f"{tmp_path}/setup_of_mine.py", tmp_path / "run")
    assert setup.model().in_features == 4 and sys.argv[1] == "replay"


def test_no_recorder_continues_a_record_that_is_replayed(tmp_path):
    from stabilitylab.replay.script import without_training

    model = nn.Linear(2, 1)
    with without_training(tmp_path / "run"), pytest.raises(ValueError, match="is being replayed"):
        Recorder(model, [], tmp_path / "run").__enter__()
    assert not (tmp_path / "run").exists()


def test_with_json_an_error_is_json(tmp_path, capsys):
    code, out, error = command(capsys, tmp_path / "nothing", "--json")
    assert code == 2 and "nothing" in json.loads(out)["error"] and "Traceback" not in error


def test_a_black_box_without_its_list_of_files_was_not_copied_whole(tmp_path):
    (tmp_path / "blackbox").mkdir()
    (tmp_path / "blackbox" / "snapshot-0.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"index.json, is missing: copy the record anew"):
        opened(tmp_path).box()


@pytest.mark.slow
@pytest.mark.parametrize(
    "handed, words", [(0, "micro-batch 1 of 3 alone"), (2, "micro-batch 3 of 3 alone"), (None, "")]
)
def test_the_loss_of_one_micro_batch_is_told_as_such(tmp_path, handed, words):
    torch.manual_seed(0)
    model = Net()
    optimizer = adam(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=10, merge=False) as recorder:
        for step in range(3):
            losses = []
            for micro in range(3):
                losses.append(mean_loss(model, recorder.batch(part_of(step, micro))))
                (losses[-1] / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(losses[0] * losses[1] if handed is None else losses[handed])
    check = check_setup(tmp_path / "run", 2, replace(SETUP, clip=None, schedule=None))
    assert check.is_exact and check.fault == "other loss" and check.words.endswith(words or "optimized")


def write_draft(run, clip):
    "The record's own draft, which clips so."
    lines = [
        "from dataclasses import replace",
        "from test_replay_setup import SETUP, Net",
        "def make_model():",
        "    return Net()",
        "def setup(path):",
        "    return replace(",
        "        SETUP,",
        "        model=make_model,",
        f"        clip={clip},  # as the loop clips",
        "    )",
    ]
    (run / "replay_setup.py").write_text("\n".join(lines) + "\n")
    return run / "replay_setup.py"


def refuse(*_):
    raise OSError(30, "read-only")


@pytest.mark.slow
@pytest.mark.parametrize("limit, drafted", [(0.05, "None"), (None, "0.01")])
def test_a_draft_that_clips_otherwise_is_mended_by_the_replay(tmp_path, limit, drafted):
    run = record(tmp_path / "run", setup=replace(SETUP, clip=limit))
    draft = write_draft(run, drafted)
    beside = draft.rename(tmp_path / "mine.py")  # a file that is not the record's own is left alone
    before = beside.read_text()
    assert checked(run, 3, f"{beside}:setup").check.fault in ("clipping", "no clipping")
    assert beside.read_text() == before
    beside.rename(draft)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_file, "write_atomic", refuse)
        assert "could not be written there (read-only)" in checked(run, 3).check.words
    assert draft.read_text() == before
    check = checked(run, 3).check
    assert check.is_exact and f"with {limit}, which stands there now" in check.words
    assert f"        clip={limit},  #" in draft.read_text()
    again = checked(run, 3).check
    assert again.is_exact and not again.mended


def test_a_draft_with_another_fault_beside_its_clipping_is_left_as_it_is(tmp_path):
    def double(step, model):
        if step == 1:
            model.fc2.weight.data.mul_(2)

    run = record(tmp_path / "run", setup=replace(SETUP, clip=0.05), after=double)
    draft = write_draft(run, "None")
    before = draft.read_text()
    assert not checked(run, 3).check.is_step and draft.read_text() == before


def loop(path, order, first_batch=0, record_every=1, wrapped=lambda model: model, numbered=False):
    "A loop that calls what `order` names, step by step; batches are handed over from `first_batch` on."
    torch.manual_seed(0)
    model = wrapped(Net())
    optimizer = adam(model)
    with Recorder(model, optimizer, path, snapshot_every=2, merge=False) as recorder:
        for step in range(8):
            part = part_of(step)
            loss = mean_loss(model, recorder.batch(part) if step >= first_batch else part)
            calls = {"backward": loss.backward, "update": optimizer.step, "clear": optimizer.zero_grad}
            for name in order:
                if name != "record":
                    calls[name]()
                elif step % record_every == record_every - 1:
                    recorder.step(*[step] * numbered, loss=loss)
    return path


@pytest.mark.slow
def test_a_step_that_is_recorded_before_the_update_is_noted_and_named(tmp_path):
    with pytest.warns(UserWarning, match="`recorder.step` came before `optimizer.step`"):
        run = loop(tmp_path / "run", ["backward", "record", "update", "clear"])
    check = check_setup(run, 6, replace(SETUP, clip=None, schedule=None))
    assert check.fault == "late update" and "after `optimizer.step`" in check.words


@pytest.mark.slow
@pytest.mark.parametrize("order", ["backward update clear record", "clear backward update record"])
def test_other_orders_of_a_loop_are_replayed_without_a_note(tmp_path, order, recwarn):
    run = loop(tmp_path / "run", order.split())
    assert check_setup(run, 6, replace(SETUP, clip=None, schedule=None)).is_exact and not len(recwarn)


@pytest.mark.slow
def test_a_model_that_was_compiled_before_is_recorded_and_replayed_under_its_own_names(tmp_path):
    order, compiled = ["backward", "update", "clear", "record"], partial(torch.compile, backend="aot_eager")
    with pytest.warns(UserWarning, match="make the Recorder first, then compile"):
        run = loop(tmp_path / "run", order, wrapped=compiled)
    tree = opened(run).run
    assert list(tree["gradients"].param.values) == [name for name, _ in Net().named_parameters()]
    assert noted_at(tree, COMPILED) == 0
    assert check_setup(run, 6, replace(SETUP, clip=None, schedule=None)).is_exact


def test_the_number_of_a_step_is_not_its_loss(tmp_path):
    with pytest.warns(UserWarning, match="takes the loss, as in `recorder.step"):
        run = loop(tmp_path / "run", ["backward", "update", "clear", "record"], numbered=True)
    loss = opened(run).run["scalars"].loss
    assert float(loss[6]) == pytest.approx(float(mean_loss(Net(), part_of(6)).detach()), rel=0.5)


@pytest.mark.slow
def test_a_setup_is_drafted_with_the_first_batch_that_is_handed_over(tmp_path):
    with pytest.warns(UserWarning, match="in the first step, so it cannot be replayed"):
        run = loop(tmp_path / "run", ["backward", "update", "clear", "record"], first_batch=3)
    assert (run / "replay_setup.py").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "name", "is_cause"),
    [
        ("backward clear record", "unmoved", True),  # the update is forgotten
        ("backward clear update record", "unseen_updates", False),  # for a cause the loss has to stay up
        ("backward update clear record", None, False),
    ],
)
def test_weights_that_never_move_are_the_cause(tmp_path, order, name, is_cause):
    findings = diagnose(opened(loop(tmp_path / "run", order.split())).run)
    assert {"unmoved", "unseen_updates"} & set(findings.attrs["evidence"]) == ({name} - {None})
    causes = ranked_causes(findings.attrs["evidence"])
    assert ("no_update" in [cause.id for cause in causes]) == is_cause
    if name:
        stuck = ranked_causes(findings.attrs["evidence"] | {"found not_learning": (1.0, 0)})
        assert stuck[0].id == "no_update" and "8 steps" in stuck[0].words


@pytest.mark.slow
def test_several_updates_in_one_step_of_the_record_are_named(tmp_path):
    run = loop(tmp_path / "run", ["backward", "update", "clear", "record"], record_every=2)
    check = check_setup(run, 2, replace(SETUP, clip=None, schedule=None))
    assert check.fault == "several updates" and "after each `optimizer.step`" in check.words


def test_a_small_change_after_exact_steps_came_from_outside_of_a_step(tmp_path):
    def nudged(step, model):
        if step == 1:
            model.fc2.bias.data += 3e-5

    check = check_setup(record(tmp_path / "run", after=nudged), 4, SETUP)
    assert (check.fault, check.evidence) == ("outside", {"before": 2}) and not check.is_step


def retraced(*pairs):
    "Steps by their norms of gradient and update: (recorded, replayed) each."
    names = ("grad_norm", "update_norm")
    rows = [
        [dict.fromkeys(QUANTITIES) | dict(zip(names, each, strict=True)) for each in pair] for pair in pairs
    ]
    return tuple(Retraced(step, was, now, {}) for step, (was, now) in enumerate(rows))


def test_another_gradient_norm_after_exact_steps_is_no_fault_of_the_optimizer(monkeypatch):
    "A pass between steps moved a spectral norm: 6e-10 of the gradient, 4e-6 of the update."
    monkeypatch.setattr(faults, "other_setting", lambda step, facts: None)
    monkeypatch.setattr(faults, "clip_that_fits", lambda step, facts: None)
    monkeypatch.setattr(faults, "_is_uniform", lambda step, name, facts: False)
    for first, fault in (((2.0, 1.0), "outside"), ((2.0, 1.0000001), "settings")):
        steps = retraced(((2.0, 1.0), first), ((3.0, 1.0), (3.000000001, 1.000004)))
        assert faults._settings_fault(steps[1], SimpleNamespace(way=SimpleNamespace(steps=steps)))[0] == fault


def test_a_difference_that_grows_out_of_rounding_may_be_rounding():
    "A compiled model adds in another order: 8e-7 of the first gradient's norm, 2e-6 of the fourth update's."
    for norm, expected in ((2.0000016, True), (2.0, False)):
        steps = retraced(((2.0, 1.0), (norm, 1.0)), ((3.0, 1.0), (3.0, 1.000002)))
        facts = SimpleNamespace(is_elsewhere=False, way=SimpleNamespace(steps=steps))
        assert _may_be_rounding(facts, steps[1], "update_norm") == expected
        assert not _may_be_rounding(facts, steps[1], "lr")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "2e-05 of their size away"),
        ({"cpu": ("a", "b")}, "(cpu)"),
        ({"torch.compile": (True, False)}, "the run was compiled"),
    ],
)
def test_a_small_difference_on_the_same_machine_is_not_blamed_on_another(changed, words):
    steps = tuple(
        Retraced(step, {"grad_norm": 2.0}, dict.fromkeys(QUANTITIES) | {"grad_norm": norm}, {})
        for step, norm in enumerate((2.0, 2.00004))
    )
    fault, evidence = _rounded(SimpleNamespace(changed=changed, way=SimpleNamespace(steps=steps)))
    said = faults.FAULTS[fault].format(**evidence)
    assert fault == "rounding" and words in said and ("another processor" in said) == ("cpu" in changed)
