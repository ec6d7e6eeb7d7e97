"Trackers that fail, hang or fall behind: the training and the record stay what they are, with one warning."

import threading
import warnings

import numpy as np
import pytest
import torch

from stabilitylab import Recorder, open_run
from stabilitylab.names.errors import InputError
from stabilitylab.probe import trackers


def train(path, report_to=None, steps=31, bad=None, **options):
    "Weights after some steps, and the warnings of the recorder."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Recorder(model, optimizer, path, report_to=report_to, **options) as recorder:
            for step in range(steps):
                loss = model(torch.randn(16, 8)).square().mean() * (float("nan") if step == bad else 1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
    texts = [str(w.message) for w in caught if "Recorder(" in str(w.message)]
    return [p.detach().clone() for p in model.parameters()], texts


def row(**parts):
    "A tracker that takes everything, but for the parts given."
    ways = {"open": lambda record, where, active: [], "log": lambda *args: None, "alert": lambda *args: None}
    return trackers._Tracker("", **(ways | {"close": lambda client: None} | parts))


def fail(*args):
    raise OSError(28, "No space left on device")


def leave(*args):
    raise SystemExit(1)


PARTS = ["log", *(pytest.param(part, marks=pytest.mark.slow) for part in ("open", "alert", "close"))]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", [fail, leave])
def test_a_broken_client_is_one_warning(tmp_path, monkeypatch, part, fault):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", row(**{part: fault}))
    plain, _ = train(tmp_path / "plain", bad=20)
    reported, texts = train(tmp_path / "run", "wandb", bad=20)
    for ours, theirs in zip(reported, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    about = [text for text in texts if "wandb" in text]
    assert len(about) == 1 and "reporting to wandb missing" in about[0], texts
    assert open_run(tmp_path / "run")["scalars"].step.size == 31


@pytest.mark.slow
def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch):
    release, seen = threading.Event(), []
    monkeypatch.setattr(trackers, "_AT_END", 0.2)
    monkeypatch.setattr(trackers, "_WAITING", 5)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", row(log=lambda *args: release.wait(60)))
    monkeypatch.setitem(trackers.TRACKERS, "wandb", row(log=lambda client, step, *args: seen.append(step)))
    _, texts = train(tmp_path / "run", ["mlflow", "wandb"], steps=20, report_every=1)
    release.set()
    assert sum("mlflow does not keep up" in text for text in texts) == 1
    assert sum("mlflow was still busy" in text for text in texts) == 1
    assert not any("wandb" in text and "missing" in text for text in texts)
    assert seen and open_run(tmp_path / "run")["scalars"].step.size == 20


@pytest.mark.slow
def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    gone = trackers._Tracker("no_such_package", *[fail] * 4)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", gone)
    _, texts = train(tmp_path / "run", "wandb", steps=3)
    assert len(texts) == 1 and "pip install 'stabilitylab[trackers]'" in texts[0]


@pytest.mark.slow
def test_what_is_reported(tmp_path):
    steps, told = {}, []

    def mine(step, values, events):
        steps.setdefault(step, {}).update(values)
        told.extend(events)

    train(tmp_path / "run", mine, bad=17, report_every=5, report_select="^gradients/grad_norm/0")
    run = open_run(tmp_path / "run")
    scalars, gradients = run["scalars"], run["gradients"]
    assert {0, 5, 10, 15, 17, 20, 25, 30} <= set(steps) and 3 not in steps
    for step in (0, 5, 17, 30):
        assert steps[step]["loss"] == pytest.approx(float(scalars.loss.sel(step=step)), nan_ok=True)
    ours = steps[5]["gradients/grad_norm/0.weight"]
    assert ours == pytest.approx(float(gradients.grad_norm.sel(step=5, param="0.weight")), rel=1e-6)
    assert {name for name in steps[5] if "/" in name} == {
        "gradients/grad_norm/0.weight",
        "gradients/grad_norm/0.bias",
    }
    first = next(event for event in told if event.kind == "error")
    assert first.step == 17 and "first non-finite value" in first.text
    assert any(event.kind == "non_finite" and event.severity == "error" for event in told)


@pytest.mark.slow
def test_tensorboard_reads_back(tmp_path):
    pytest.importorskip("tensorboard")
    from stabilitylab import read_log

    train(tmp_path / "run", {"tensorboard": str(tmp_path / "events")}, bad=17)
    table = read_log(tmp_path / "events")
    record = open_run(tmp_path / "run")["scalars"]
    assert {0, 10, 17, 20, 30} <= set(table.step.values.tolist())
    for name in ("loss", "grad_norm", "lr"):
        theirs = record[name].sel(step=table.step)
        np.testing.assert_allclose(table[name], theirs, rtol=1e-6, equal_nan=True)
    texts = (tmp_path / "events").glob("*")
    assert any(b"first non-finite value" in path.read_bytes() for path in texts)


def test_wrong_arguments(tmp_path):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match="tensorboard, wandb, mlflow, trackio"):
        Recorder(model, None, tmp_path, report_to="tensorbord")
    with pytest.raises(InputError, match="1 or more"):
        Recorder(model, None, tmp_path, report_every=0)


def test_off_by_default(tmp_path):
    before = set(threading.enumerate())
    with Recorder(torch.nn.Linear(1, 1), None, tmp_path / "run") as recorder:
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert recorder.recording.reports is None and new == {"stabilitylab-writer"}
