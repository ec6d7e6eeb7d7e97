"A recorder in strangers' programs: whatever fails in it, the training is that of the bare loop, bit for bit."

import copy
import functools
import gc
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run

ROOMS = "blackbox detail hooks kinds optimizers params recorder retention rows scalars settings slots stats"
INSIDE = [*ROOMS.split(" "), "updates", "writer", "probes"]
# the contract itself: what the user calls, and the guard that everything else stands behind
OUTSIDE = {"Recorder.__init__", "Recorder.__enter__", "Recorder.__exit__", "Recorder.step", "Recorder.batch"}
OUTSIDE |= {
    "as_list",
    "model_itself",
    "recorder_options",
    "RecorderOptions.__init__",
    "RecorderOptions.__post_init__",
}
OUTSIDE |= {"Level.__init__", "read_entry", "pack_batches"}  # not while a program trains
OUTSIDE |= {"SkippedSteps._hold_safely", "SkippedSteps._release_safely", "StepLoss._look_safely"}
OUTSIDE |= {"kernel"}


def guest(model, optimizer, path, **options):
    "A recorder that leaves its parts, which is quicker than a Zarr record and read alike."
    return Recorder(model, optimizer, path, merge=False, **options)


class Net(nn.Module):
    "Two layers with a norm, dropout, and its loss."

    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.drop, self.fc2 = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Dropout(0.1),
            nn.Linear(16, 8),
        )

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.norm(self.fc1(x)))))


def data(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loop(model, optimizer, recorder=None, steps=4, scalars=None):
    "A plain loop; the loss of every step."
    losses = []
    for step in range(steps):
        x = data(step)
        if recorder is not None:
            recorder.batch(x)
        loss = (model(x) - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss, **(scalars or {}))
    return losses


def fresh(make=None):
    torch.manual_seed(0)
    model = Net()
    make = make or (lambda params: torch.optim.AdamW(params, lr=1e-2))
    return model, make(list(model.parameters()))


def state_of(model):
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def bare(make=None):
    "What the loop does without a recorder."
    model, optimizer = fresh(make)
    torch.manual_seed(1)
    return loop(model, optimizer), state_of(model)


def watched(path, make=None, **options):
    "What it does with one, and the record."
    model, optimizer = fresh(make)
    torch.manual_seed(1)
    with guest(model, optimizer, path, **options) as recorder:
        losses = loop(model, optimizer, recorder)
    return losses, state_of(model), recorder


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def notes(path):
    run = open_run(path).load()
    if "events" not in run.children:
        return []
    kinds, texts = run["events"].event_kind.values, run["events"].event_text.values
    return [text for kind, text in zip(kinds, texts, strict=True) if kind == "note"]


def inner_functions():
    "Every function and method of the rooms that run inside a training loop, by its qualified name."
    found = {}
    for name in INSIDE:
        module = import_module(f"stabilitylab.probe.{name}")
        for value in vars(module).values():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            owned = vars(value).items() if inspect.isclass(value) else ()
            methods = [(value, key, f) for key, f in owned if inspect.isfunction(f)]
            alone = [(module, value.__name__, value)] if inspect.isfunction(value) else []
            for owner, key, function in [*methods, *alone]:
                if function.__qualname__ not in OUTSIDE:
                    found[f"{name}.{function.__qualname__}"] = owner, key, function
    return found


FUNCTIONS = inner_functions()
OPTIONS = dict(level="full", snapshot_every=2, on_nonfinite="skip")


def break_it(monkeypatch, owner, key, function, error):
    "Let one function raise, under every name that it was imported by."

    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(owner, key, broken)
    for name in INSIDE:
        module = import_module(f"stabilitylab.probe.{name}")
        for alias, value in list(vars(module).items()):
            if value is function:
                monkeypatch.setattr(module, alias, broken)


@pytest.mark.slow  # a training for every function of the recorder
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fault_inside_never_reaches_the_loop(tmp_path, monkeypatch, name):
    want = bare()
    break_it(monkeypatch, *FUNCTIONS[name], RuntimeError("planted"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = watched(tmp_path / "r", **OPTIONS)
    assert same(got, want)
    assert len(said) < 12, [str(w.message) for w in said]


@pytest.mark.slow
def test_most_functions_were_reached(tmp_path, monkeypatch):
    "The injection is real: a fault in the middle of the work is told and leaves a gap that the record names."
    for name, words in (
        ("hooks.OutputReader.look", "activations of fc1 missing from step 0"),
        ("updates.StepUpdates.read", "updates of fc1.weight missing"),
        ("params.GradientSums.read", "gradients of fc1.weight missing"),
        ("updates.ParamDetails.take", "costly statistics missing"),
    ):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            break_it(patch, *FUNCTIONS[name], RuntimeError("planted"))
            watched(tmp_path / name, level="full")
        assert words in str(said[0].message) and any(words in note for note in notes(tmp_path / name)), name


def test_one_module_fails_and_the_others_are_recorded(tmp_path, monkeypatch):
    from stabilitylab.probe.hooks import OutputReader

    look = OutputReader.look

    def only_norm(self, row, args, out):
        if self.rows.names[row] == "norm":
            raise ValueError("planted")
        look(self, row, args, out)

    monkeypatch.setattr(OutputReader, "look", only_norm)
    with pytest.warns(UserWarning, match="activations of norm missing from step 0 on: ValueError: planted"):
        watched(tmp_path / "r")
    rms = open_run(tmp_path / "r")["activations"].rms
    assert rms.sel(module="norm").isnull().all() and rms.sel(module="fc2").notnull().all()


def test_warnings_that_are_errors_stop_nobody(tmp_path, monkeypatch):
    break_it(monkeypatch, *FUNCTIONS["hooks.OutputReader.look"], RuntimeError("planted"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(watched(tmp_path / "r"), bare())


class Halved(torch.optim.AdamW):
    "A subclass that changes the update."

    def step(self, closure=None):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for p, old in zip(
                (p for group in self.param_groups for p in group["params"]), before, strict=True
            ):
                p.copy_(old + 0.5 * (p - old))


class Own:
    "An optimizer that is no `torch.optim.Optimizer`."

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None


class NoInit(torch.optim.Optimizer):
    "A subclass that never calls the base's `__init__`."

    def __init__(self, params):
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}

    step, zero_grad = Own.step, Own.zero_grad


@pytest.mark.slow
@pytest.mark.parametrize("make", [Halved, Own, NoInit], ids=lambda c: c.__name__)
def test_updates_are_what_the_parameters_did(tmp_path, make):
    model, optimizer = fresh(make)
    torch.manual_seed(1)
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with guest(model, optimizer, tmp_path / "r", level="full") as recorder:
            for step in range(3):
                before = state_of(model)
                (model(data(step)) - data(step)).square().mean().backward()
                optimizer.step()
                moved.append([float((a - b).norm()) for a, b in zip(state_of(model), before, strict=True)])
                optimizer.zero_grad()
                recorder.step(0.0)
    assert recorder.off is None
    got = open_run(tmp_path / "r")["updates"].update_norm.values
    np.testing.assert_allclose(got, moved, rtol=1e-5)


def test_a_closure(tmp_path):
    def train(recorder=None):
        torch.manual_seed(0)
        model = Net().eval()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        with recorder(model, optimizer) if recorder else open(os.devnull) as rec:
            for step in range(3):

                def closure(step=step):
                    optimizer.zero_grad()
                    loss = (model(data(step)) - data(step)).square().mean()
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
                if recorder:
                    rec.step(loss)
        return state_of(model), rec

    want, _ = train()
    got, recorder = train(lambda m, o: guest(m, o, tmp_path / "r", level="full"))
    assert all(map(torch.equal, got, want)) and recorder.off is None
    run = open_run(tmp_path / "r")
    assert (run["updates"].update_norm.values > 0).all() and not notes(tmp_path / "r")


def test_optimizers_in_turn_keep_their_own_gradients(tmp_path):
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(one, two)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.2)
    with guest(model, [first, second], tmp_path / "r") as recorder:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            want = float(two.weight.grad.norm())
            second.step()
            (3 * model(torch.ones(2, 4)).sum()).backward()  # adds to gradients that nobody steps any more
            first.step()
            model.zero_grad()
            recorder.step(1.0)
    got = float(open_run(tmp_path / "r")["gradients"].grad_norm.sel(param="1.weight")[-1])
    assert abs(got / want - 1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "averaged", "func", "trace", "export"])
def test_the_model_can_be_copied_and_transformed(tmp_path, how):
    def copies(model):
        if how == "deepcopy":
            copy.deepcopy(model)(data(0))
        elif how == "pickle":
            pickle.loads(pickle.dumps(model))(data(0))
        elif how == "torch.save":
            torch.save(model, io.BytesIO())
        elif how == "averaged":
            torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
        elif how == "func":
            params = dict(model.named_parameters())
            torch.func.grad(lambda p: torch.func.functional_call(model, p, data(0)).sum())(params)
            torch.func.vmap(model, randomness="different")(data(0)[None])
        elif how == "trace":
            torch.jit.trace(model, data(0), check_trace=False)
        else:
            torch.export.export(model, (data(0),))

    def train(recorder=None):
        model, optimizer = fresh()
        torch.manual_seed(1)
        if recorder is None:
            copies(model)
            return loop(model, optimizer), state_of(model)
        with recorder(model, optimizer) as rec:
            copies(model)
            return loop(model, optimizer, rec), state_of(model)

    want = train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Recorder")
        assert same(train(lambda m, o: guest(m, o, tmp_path / "r", snapshot_every=2)), want)
    counts = open_run(tmp_path / "r")["activations"]
    assert counts.rms.notnull().all() and not notes(tmp_path / "r")


@pytest.mark.slow  # starts a process
def test_a_pickle_loads_without_this_package(tmp_path):
    layer = nn.Linear(2, 2)
    with guest(layer, torch.optim.SGD(layer.parameters(), lr=0.1), tmp_path / "r"):
        torch.save(layer, tmp_path / "m.pt")
    code = (
        "import sys, torch; sys.modules['stabilitylab'] = None; "
        f"print(torch.load({str(tmp_path / 'm.pt')!r}, weights_only=False)(torch.ones(1, 2)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "[1, 2]" in done.stdout, done.stderr


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(tmp_path, fullgraph):
    def train(recorder=None):
        torch._dynamo.reset()
        model, optimizer = fresh()
        torch.manual_seed(1)
        if recorder is None:
            return loop(torch.compile(model, backend="aot_eager", fullgraph=fullgraph), optimizer), state_of(
                model
            )
        with recorder(model, optimizer) as rec:
            call = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
            return loop(call, optimizer, rec), state_of(model)

    want = train()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = train(lambda m, o: guest(m, o, tmp_path / "r"))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    run, told = open_run(tmp_path / "r"), [str(w.message) for w in said if "Recorder" in str(w.message)]
    assert run["gradients"].grad_norm.notnull().all() and run["updates"].update_norm.notnull().all()
    if fullgraph:
        assert len(told) == 1 and "compiled as one graph" in told[0]
    else:
        assert run["activations"].rms.notnull().all() and not told


@pytest.mark.slow
@pytest.mark.parametrize("given", ["the compiled model", "the model itself"])
def test_a_model_that_was_compiled_before_keeps_its_graph_and_its_parameters_are_recorded(tmp_path, given):
    torch._dynamo.reset()
    model, optimizer = fresh()
    call = torch.compile(model, backend="aot_eager")
    with (
        pytest.warns(UserWarning, match="make the Recorder first, then compile"),
        guest(call if given == "the compiled model" else model, optimizer, tmp_path / "r") as recorder,
    ):
        loss = call(data(0)).square().mean()
        loss.backward()
        want = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        recorder.step(loss)
    run = open_run(tmp_path / "r")
    assert abs(float(run["scalars"].grad_norm[0]) / want - 1) < 1e-5 and "activations" not in run.children
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_compiled_model_that_was_let_go_does_not_cost_the_activations(tmp_path):
    model, optimizer = fresh()
    gc.disable()
    try:
        compiled = torch.compile(model, backend="aot_eager")
        vars(compiled)["itself"] = [compiled]  # as Dynamo's own references: only the collector can free it
        del compiled
        with guest(model, optimizer, tmp_path / "r") as recorder:
            loop(model, optimizer, recorder)
    finally:
        gc.enable()
    assert open_run(tmp_path / "r")["activations"].rms.notnull().all()


def test_reading_a_parametrized_weight_does_not_advance_it(tmp_path):
    def train(recorder=None):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if recorder is None:
            return loop(model, optimizer), state_of(model)
        with recorder(model, optimizer) as rec:
            return loop(model, optimizer, rec), state_of(model)

    assert same(train(lambda m, o: guest(m, o, tmp_path / "r", level="full")), train())
    run = open_run(tmp_path / "r")
    assert "0" in run["activations"].module.values and run["activations"].in_rms.notnull().all()


def test_complex_tensors_are_measured_by_their_magnitude(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, dtype=torch.complex64)
    with guest(model, optimizer, tmp_path / "r", level="full") as recorder:
        out = model(x)
        out.abs().square().mean().backward()
        want = float(model.weight.grad.abs().square().sum().sqrt())
        before = model.weight.detach().clone()
        optimizer.step()
        recorder.step(out)
    run, moved = open_run(tmp_path / "r"), float((model.weight.detach() - before).abs().square().sum().sqrt())
    assert not notes(tmp_path / "r")[1:], notes(tmp_path / "r")
    assert abs(float(run["gradients"].grad_norm.sel(param="weight")[0]) / want - 1) < 1e-5
    assert abs(float(run["updates"].update_norm.sel(param="weight")[0]) / moved - 1) < 1e-4
    assert abs(float(run["activations"].absmax[0, 0]) / float(out.detach().abs().max()) - 1) < 1e-5


def test_an_evaluation_with_gradients_is_told_apart(tmp_path):
    model, optimizer = fresh()
    with guest(model, optimizer, tmp_path / "r") as recorder:
        for step in range(2):
            want = float(model.fc1(data(step)).detach().square().mean().sqrt())
            model(data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            model(100 * data(9)).square().mean()
            model.train()
            recorder.step(0.0)
    got = float(open_run(tmp_path / "r")["activations"].rms.sel(module="fc1")[-1])
    assert got < 3 * want


def test_values_of_every_kind(tmp_path):
    model, optimizer = fresh()
    odd = {
        "val/loss": 2.0,
        "step": 7,
        "time": 1.5,
        "segment": 3,
        "phase": "warmup",
        "aux": None,
        "per_sample": torch.arange(4.0, requires_grad=True),
        "count": np.int64(3),
        "z": torch.tensor(3 + 4j),
        "object": object(),
        "empty": torch.zeros(0),
    }
    with guest(model, optimizer, tmp_path / "r") as recorder:
        loop(model, optimizer, recorder, scalars=odd)
    assert recorder.off is None
    scalars = open_run(tmp_path / "r")["scalars"].to_dataset()
    assert scalars.step.values.tolist() == [0, 1, 2, 3] and scalars.segment.values.tolist() == [0] * 4
    found = {
        name: float(scalars[name][0]) for name in ("val_loss", "own_step", "own_segment", "per_sample", "z")
    }
    assert found == {"val_loss": 2.0, "own_step": 7.0, "own_segment": 3.0, "per_sample": 1.5, "z": 5.0}
    told = " ".join(notes(tmp_path / "r"))
    assert "`phase`" in told and "`object`" in told and "`per_sample` has shape" in told


def test_a_loss_that_is_not_handed_over_is_the_models_own(tmp_path):
    class Whole(Net):
        def forward(self, x):
            return (super().forward(x) - x).square().mean()

    torch.manual_seed(0)
    model = Whole()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with guest(model, optimizer, tmp_path / "r") as recorder:
        for step in range(3):
            parts = [model(x) for x in data(step).chunk(2)]
            for part in parts:
                (part / 2).backward()
            losses.append(sum(float(part) for part in parts) / 2)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step()
    np.testing.assert_allclose(open_run(tmp_path / "r")["scalars"].loss.values, losses, rtol=1e-5)


def test_a_forgotten_scaler_is_noticed(tmp_path):
    model, optimizer = fresh()
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    with (
        pytest.warns(UserWarning, match="GradScaler that was not given"),
        guest(model, optimizer, tmp_path / "r") as recorder,
    ):
        for step in range(3):
            loss = (model(data(step)) - data(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(loss)
    np.testing.assert_allclose(open_run(tmp_path / "r")["scalars"].grad_norm.values, norms, rtol=1e-4)


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, monkeypatch):
    from stabilitylab.run.record import LiveStore

    append, is_full, refused = LiveStore.append, [True], threading.Event()

    def append_where_there_is_room(self, *args):
        if is_full[0]:
            refused.set()
            raise OSError(28, "No space left on device")
        append(self, *args)

    monkeypatch.setattr(LiveStore, "append", append_where_there_is_room)
    model, optimizer = fresh(None)
    told = pytest.warns(UserWarning, match="tried again while training goes on.*No space left")
    with told, guest(model, optimizer, tmp_path / "r", flush_seconds=0.001) as recorder:
        loop(model, optimizer, recorder)
        assert refused.wait(60)  # the disk has room again only after it was asked in vain
        is_full[0] = False
    assert open_run(tmp_path / "r")["scalars"].step.values.tolist() == [0, 1, 2, 3]


@pytest.mark.slow  # starts a process
def test_without_with_nothing_is_lost(tmp_path):
    code = f"""
import torch
from stabilitylab.probe.recorder import Recorder
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder(model, optimizer, {str(tmp_path / "r")!r}).__enter__()
for step in range(5):
    loss = model(torch.ones(1, 2)).sum(); loss.backward(); optimizer.step(); recorder.step(loss)
raise RuntimeError("the loop's own fault")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "the loop's own fault" in done.stderr and "stabilitylab-writer" not in done.stderr
    run = open_run(tmp_path / "r").load()
    assert run["scalars"].sizes["step"] == 5 and "the loop's own fault" in run["events"].event_text.values[-1]


def test_step_before_with_starts_the_recording(tmp_path):
    model, optimizer = fresh()
    recorder = guest(model, optimizer, tmp_path / "r")
    with pytest.warns(UserWarning, match="`step` came before `with`"):
        recorder.step(torch.tensor(loop(model, optimizer, steps=1)[0]))
    loop(model, optimizer, recorder, steps=3)
    recorder.close()
    run = open_run(tmp_path / "r")
    assert run["scalars"].sizes["step"] == 4 and run["activations"].rms[1:].notnull().all()


def test_a_step_after_the_end_of_a_record_begins_no_new_one(tmp_path):
    "It began a second segment, with the words `step` came before `with`, and `diagnose` told of a restart."
    model, optimizer = fresh()
    recorder = guest(model, optimizer, tmp_path / "r")
    loop(model, optimizer, recorder, steps=3)
    recorder.close()
    with pytest.warns(UserWarning, match="came after the end of the record"):
        loop(model, optimizer, recorder, steps=2)
    recorder.close()
    run = open_run(tmp_path / "r")
    assert run["scalars"].sizes["step"] == 3 and set(run["scalars"].segment.values) == {0}


LOOP_WITHOUT_WITH = """
import torch
from stabilitylab import Recorder
model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder(model, optimizer, {path!r}, snapshot_every=2)
for step in range(5):
    loss = model(recorder.batch(torch.ones(1, 2))).sum()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); recorder.step(loss)
{end}
"""


@pytest.mark.parametrize("end", ["recorder.close()", ""])
def test_a_loop_without_with_is_recorded_from_its_first_step_and_says_nothing(tmp_path, end):
    code = LOOP_WITHOUT_WITH.format(path=str(tmp_path / "r"), end=end)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr
    run = open_run(tmp_path / "r")
    assert run["scalars"].sizes["step"] == 5 and run["activations"].rms.notnull().all()
    assert (tmp_path / "r" / "live").exists() is (not end)  # at the end of a program nothing can be merged


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "no events"])
def test_a_torn_part_is_left_out(tmp_path, damage):
    model, optimizer = fresh()
    recorder = guest(model, optimizer, tmp_path / "r", flush_seconds=0.001)
    with recorder:
        for _ in range(3):
            loop(model, optimizer, recorder, steps=2)
            before = recorder.recording.store.n
            while recorder.recording.store.n == before and recorder.recording.writer.pending.rows:
                pass
    parts = sorted((tmp_path / "r" / "live").glob("part-*.npz"))
    whole = parts[0].read_bytes()
    damaged = {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "noise": os.urandom(500),
        "no events": b"PK\x05\x06",
    }
    steps = open_run(tmp_path / "r")["scalars"].sizes["step"]
    parts[0].write_bytes(damaged[damage])
    run = open_run(tmp_path / "r").load()
    assert run["scalars"].sizes["step"] < steps == 6
    assert any("is left out, it is torn" in note for note in notes(tmp_path / "r"))


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = fresh()
    model, optimizer = accelerator.prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Recorder")
        with guest(model, optimizer, tmp_path / "r") as recorder:
            for step in range(3):
                loss = model(data(step)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
    assert (open_run(tmp_path / "r")["updates"].update_norm.values > 0).all()


def test_the_page_names_tests_that_exist():
    folder = Path(__file__).parent
    page = (folder.parent / "nbs" / "explain" / "what_the_recorder_survives.ipynb").read_text()
    files = ("test_guest.py", "test_probe_kinds.py", "test_strangers.py")
    sources = (folder / name for name in files)
    tests = {
        name for path in sources for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20 and named <= tests, named - tests
