"""The same numbers, no host that waits, and no tensor in the wrong place on a CUDA device that is not there.

`tests/device/shadow.py` says what such a device holds and what it cannot say; `make gpu` measures a real one.
"""

import json
import os

import numpy as np
import pytest
import torch
from test_fixes import FROZEN, NAMES, make, training_for
from torch.nn.attention import SDPBackend, sdpa_kernel

from stabilitylab.cases.registry import sample
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.numerics.pytree import map_tensors
from stabilitylab.probe import stats
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.snapshot import load_batch, load_snapshot
from stabilitylab.replay.step import replay
from stabilitylab.run.record import open_run
from stabilitylab.trial.arm import Arm, run_arm
from stabilitylab.trial.start import Start
from tests.device.shadow import CUDA, DEVICE, Event, Shadow, device

TOKENS = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))
MADE = {"step_time", "time"}  # differ from run to run


def adamw(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **more)


RUNS = {  # optimizer, micro-batches, clip, autocast, options of the Recorder
    "plain": (adamw, 1, None, None, {}),
    "full": (lambda m: adamw(m, amsgrad=True), 1, 1.0, None, {"level": "full"}),
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), 2, 0.5, None, {"every_n": 2}),
    "attention": (adamw, 1, None, None, {"attention_every": 2}),
    "autocast": (adamw, 2, None, torch.bfloat16, {}),
    "light": (lambda m: adamw(m, foreach=True), 1, None, None, {"level": "light"}),
}


def record(folder, where, kind):
    "A short recorded run, and what made the host wait in each step."
    make_optimizer, micro, clip, autocast, options = RUNS[kind]
    torch.manual_seed(0)
    model, tokens = (
        LanguageModel(ModelConfig.plain(d_model=32, n_layer=1, seq=16)).to(where),
        TOKENS.to(where),
    )
    optimizer, waits = make_optimizer(model), []
    with Recorder(model, optimizer, folder, merge=False, **options) as recorder:
        for _ in range(3):
            before = len(DEVICE.waits)
            for part in tokens.chunk(micro):
                with torch.autocast(torch.device(where).type, autocast, enabled=autocast is not None):
                    loss = model(part, part) / micro
                loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss.detach())
            waits.append(DEVICE.waits[before:])
    return open_run(folder).load(), waits


@pytest.mark.slow  # every operator passes through Python
@pytest.mark.parametrize("kind", RUNS)
def test_the_recorder_never_waits_and_records_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "kernel", lambda: None)  # the compiled sums read another way
    monkeypatch.setattr("stabilitylab.probe.detail.kernel", lambda: None)
    with sdpa_kernel(SDPBackend.MATH):
        on_host, _ = record(tmp_path / "host", "cpu", kind)
    with device() as seen:
        on_device, waits = record(tmp_path / "device", CUDA, kind)
    assert seen.copies and not any(seen.copies), "copies under way at the end, or none at all"
    # attention is measured apart, every so many steps, and waits then
    looks = range(0, 3, RUNS[kind][4].get("attention_every", 3)) if kind == "attention" else ()
    assert [wait for step, asked in enumerate(waits) if step not in looks for wait in asked] == []
    assert all(waits[step] for step in looks)
    assert on_device.groups == on_host.groups and "skipped" not in on_device.attrs
    is_rounded = RUNS[kind][3] is not None  # autocast has other lists of operators for each device
    for group in on_host.groups:
        for name, series in on_host[group].to_dataset().data_vars.items():
            if name in MADE or series.dtype == object:
                continue
            assert (np.isfinite(series.values).any()) == np.isfinite(on_device[group][name].values).any(), (
                name
            )
            if group == "/attention":  # adds in another order
                np.testing.assert_allclose(
                    on_device[group][name].values, series.values, rtol=1e-6, err_msg=name
                )
            elif not is_rounded and not np.issubdtype(series.dtype, np.datetime64):
                np.testing.assert_array_equal(
                    on_device[group][name].values, series.values, err_msg=f"{group}/{name}"
                )


@pytest.mark.slow
def test_snapshots_and_batches_come_back(tmp_path):
    torch.manual_seed(0)
    with device():
        model = LanguageModel(ModelConfig.plain(d_model=32, n_layer=1, seq=16)).to(CUDA)
        optimizer, tokens = adamw(model), TOKENS.to(CUDA)
        with Recorder(model, optimizer, tmp_path, snapshot_every=2, merge=False) as recorder:
            for _ in range(3):
                loss = model(recorder.batch(tokens), tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss.detach())
        after = {name: weight.host.clone() for name, weight in model.state_dict().items()}
    assert recorder.off is None
    kept = load_batch(tmp_path, 2).parts[0]
    assert type(kept) is torch.Tensor and torch.equal(kept, TOKENS)
    state = torch.load(tmp_path / "blackbox" / "snapshot-2.pt", weights_only=True, mmap=False)
    weights = state["model"]
    assert weights.keys() == after.keys() and all(type(weight) is torch.Tensor for weight in weights.values())


def test_the_device_is_as_strict_as_one():
    with device() as seen:
        x, host = torch.arange(4.0, device=CUDA), torch.empty(4, pin_memory=True)
        host.copy_(x, non_blocking=True)
        event = Event()
        event.record()
        assert host.isnan().all() and not event.query() and not seen.waits
        event.synchronize()
        assert host.tolist() == [0, 1, 2, 3]
        for ask in (
            lambda: x[x > 1],
            lambda: x.nonzero(),
            lambda: float(x.sum()),
            lambda: x.cpu(),
            lambda: x.tolist(),
        ):
            n = len(seen.waits)
            ask()
            assert len(seen.waits) == n + 1
        for wrong in (lambda: x + torch.ones(4), lambda: torch.stack([x[0], torch.tensor(1.0)]), x.data_ptr):
            with pytest.raises(RuntimeError, match=r"same device|address"):
                wrong()
        assert isinstance(x.new_zeros(2), Shadow) and (x + torch.tensor(1.0)).device == CUDA


def moved(name, where):
    "A training two steps old whose model and batches lie there, with a fix applied, and three steps of it."
    training = training_for(name, steps=0)
    training.model.to(where)
    learned = [p for p in training.model.parameters() if p.requires_grad]
    training.optimizer = torch.optim.AdamW(learned, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-7)
    batches = training.batches
    training.batches = lambda step: map_tensors(lambda t: t.to(where), batches(step))
    training.states.clear()
    training.keep()
    losses = [training.run_step().loss for _ in range(2)]
    log = make(name).apply(training)
    losses += [training.run_step().loss for _ in range(3)]
    del log
    return losses


@pytest.mark.slow  # trains twice
@pytest.mark.parametrize("name", NAMES if os.environ.get("EVERY_FIX") else NAMES[::6])  # all once: 68 s
def test_a_fix_trains_on_the_device_as_on_the_host(name):
    with sdpa_kernel(SDPBackend.MATH):
        expected = moved(name, "cpu")
    with device():
        losses = moved(name, CUDA)
    if name in ("autocast", *FROZEN):  # lists of operators differ
        np.testing.assert_allclose(losses, expected, rtol=2e-2)
    else:
        assert losses == expected


@pytest.mark.slow
def test_a_step_replays_on_the_device():
    setup = setup_of(sample())
    snapshot, batch = load_snapshot(sample(), 300, setup), load_batch(sample(), 300, setup)
    with sdpa_kernel(SDPBackend.MATH):
        on_host = replay(snapshot, batch)
    with device():
        on_device = replay(snapshot, batch, device="cuda:0")
    assert on_device.loss == on_host.loss and on_device.grad_norm == on_host.grad_norm
    for name, weight in on_host.weights.items():
        assert torch.equal(on_device.weights[name].host, weight), name


@pytest.mark.slow  # two steps of the sample, twice
def test_an_arm_trains_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr("stabilitylab.replay.device.devices", lambda: ["cuda:0", "cpu"])
    start, folders = Start(str(sample()), 300).to_dict(), [tmp_path / "host", tmp_path / "device"]
    with sdpa_kernel(SDPBackend.MATH):
        run_arm(start, Arm().to_dict(), 0, 2, str(folders[0]))
    with device():
        run_arm(start, Arm().to_dict(), 0, 2, str(folders[1]), device="auto")
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    losses = [[row["loss"] for row in arm if "loss" in row] for arm in rows]
    assert losses[0] == losses[1] and len(losses[0]) == 2
