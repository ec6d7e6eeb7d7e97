"What a model keeps beside its tensors comes back with a snapshot or is named as the reason; scripted parts."

import pytest
import torch
from torch import nn

from stabilitylab import Recorder, open_run
from stabilitylab.names.errors import InputError
from stabilitylab.probe.blackbox import changed_attributes, plain_attributes
from stabilitylab.replay.retrace import retrace
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.snapshot import load_snapshot
from stabilitylab.replay.state import Setup
from stabilitylab.replay.user_code import faults_in_one_line, load_setup


class Counting(nn.Module):
    "Its output hangs on how often it was called."

    def __init__(self, counts):
        super().__init__()
        self.counts, self.layer = counts, nn.Linear(3, 1)

    def forward(self, x):
        factor = self.counts["calls"] if isinstance(self.counts, dict) else self.counts
        if isinstance(self.counts, dict):
            self.counts["calls"] += 1
        else:
            self.counts += 1
        return self.layer(x).mean() * factor


def recorded(folder, make):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, folder, snapshot_every=3) as recorder:
        for _ in range(8):
            loss = model(recorder.batch(torch.randn(4, 3)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    return Setup(make, lambda model, batch: model(batch), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


@pytest.mark.slow
def test_a_counter_of_the_model_is_in_its_snapshots(tmp_path):
    setup = recorded(tmp_path / "run", lambda: Counting(1))
    assert check_setup(tmp_path / "run", 7, setup, retrace(tmp_path / "run", 7, setup)).is_exact
    states = {step: load_snapshot(tmp_path / "run", step, setup) for step in (0, 3, 5)}
    assert {step: state.build()[0].counts for step, state in states.items()} == {0: 1, 3: 4, 5: 6}
    assert states[5].attributes == {"": {"counts": 6}} and states[0].attributes == {}


@pytest.mark.slow
def test_what_no_snapshot_can_keep_is_named(tmp_path):
    setup = recorded(tmp_path / "run", lambda: Counting({"calls": 1}))
    check = check_setup(tmp_path / "run", 7, setup, retrace(tmp_path / "run", 7, setup))
    assert check.fault == "memory" and not check.is_step
    assert "something outside the state dict of the model" in check.words and "heads" not in check.words


def test_only_plain_values_that_changed_are_kept():
    model = Counting(1)
    before = plain_attributes(model)
    model.eval()  # the mode is no attribute of its own
    model.counts, model.added, model.table = 2, 3, [1]
    assert changed_attributes(before, plain_attributes(model)) == {"": {"counts": 2}}


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.eager = nn.Linear(3, 4)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))

    def forward(self, x):
        return self.scripted(self.eager(x)).sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scripted_parts_are_left_out_by_name_and_the_rest_is_recorded(tmp_path):
    model = Partly()
    twin = Partly()
    twin.load_state_dict(model.state_dict())
    batches = [torch.randn(2, 3) for _ in range(4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for x in batches:
        twin(x).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    with Recorder(model, optimizers[0], tmp_path / "run", snapshot_every=2) as recorder:
        for x in batches:
            loss = model(recorder.batch(x))
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            recorder.step(loss)
    run = open_run(tmp_path / "run").load()
    assert run["activations"].module.values.tolist() == ["eager"]
    assert "scripted.0.weight" in run["gradients"].param.values
    texts = " ".join(run["events"].event_text.values.tolist())
    assert "no activations of scripted: scripted modules take no Python hooks" in texts
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.slow
def test_a_state_dict_that_the_loop_put_in_place_is_not_what_a_snapshot_keeps(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    model = make()
    model.state_dict = lambda *args, **named: {"0.weight": model[0].weight}  # as loops do that save adapters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(4):
            loss = model(recorder.batch(torch.randn(4, 3))).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    setup = Setup(
        make, lambda model, batch: model(batch).mean(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    check = check_setup(tmp_path / "run", 3, setup, retrace(tmp_path / "run", 3, setup))
    assert check.is_exact and check.fault == ""


OLD_DRAFT = """
import torch
from stabilitylab import Setup

def loss(model, batch):
    loop, batch = batch["loop"], batch["batch"]
    return model(batch)

def setup(path):
    return Setup(lambda: torch.nn.Linear(3, 1), loss)
"""


def test_a_draft_of_an_earlier_version_says_what_to_write(tmp_path):
    file = tmp_path / "old_setup.py"
    file.write_text(OLD_DRAFT)
    setup = load_setup(str(file), tmp_path)
    with pytest.raises(InputError, match=r"write `def loss\(model, batch, loop\):`"), faults_in_one_line():
        setup.loss(torch.nn.Linear(3, 1), torch.randn(2, 3))
