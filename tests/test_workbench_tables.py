"""The views Checkpoints, Precision and Accumulation without a browser: mistakes are told, calls run."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.cli.main import main
from stabilitylab.numerics.formats import quantise
from stabilitylab.run.job import JobState
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_accumulation import AccumulationView
from stabilitylab.workbench.view_checkpoints import CheckpointsView, checkpoints_below
from stabilitylab.workbench.view_rounding import PrecisionView


def ran(call):
    "What the last line of a call gives, when it is run as it stands."
    *lines, last = call.splitlines()
    names = {}
    exec("\n".join(lines), names)
    return eval(last, names)


@pytest.fixture
def folder(tmp_path):
    "A log, a checkpoint with its optimizer, a later one, and one that was half written."
    torch.manual_seed(0)
    (tmp_path / "train.csv").write_text("step,loss\n" + "".join(f"{i},{3 - i / 50}\n" for i in range(60)))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    for name in ("a", "b"):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / f"{name}.pt")
    half = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(half[: len(half) // 2])
    return tmp_path


def answered(child, capsys):
    "Runs the command of a button in this process and shows what it gives: no seconds for a child's imports."
    try:
        code = main([str(part) for part in child.arguments()])
        out, err = capsys.readouterr()
    except SystemExit as end:
        code, (out, err) = end.code, capsys.readouterr()
    good = code in child.codes
    child.show(JobState("done" if good else "failed", "", 1.0, out if good else None, "" if good else err))


def test_checkpoints_are_named_explained_and_called(folder, capsys):
    view = CheckpointsView(open_state(folder / "train.csv")[0])
    assert view.look.below == [] and "No checkpoint lies below" in view.notice.value
    view = CheckpointsView(open_state(folder)[0])
    view.look.folder, view.look.below = str(folder), checkpoints_below(folder)
    view.look.a, view.look.b = "a.pt", "b.pt"
    answered(view.scan, capsys)
    assert "exp_avg of 1.weight" in view.out.value and "state.2" not in view.out.value
    assert "largest magnitude" in view.columns.value
    assert {"model.0.weight", "exp_avg of 1.weight"} <= set(ran(view.call.call).index)
    answered(view.diff, capsys)
    table = ran(view.call.call)
    assert "max_change" in view.columns.value and "exp_avg of 1.bias" in set(table.index)
    assert (table.change > 0).all()


def test_ordinary_mistakes_with_checkpoints_are_told(folder, capsys):
    view = CheckpointsView(open_state(folder)[0])
    view.look.folder = str(folder)
    for typed, words in {"": "choose or type one", "gone.pt": "nothing is there"}.items():
        view.look.a = typed
        view.scan.start()
        assert words in view.scan.says.value and view.scan.job is None
    view.look.a = "a.pt"
    answered(view.scan, capsys)
    assert view.out.value
    view.look.a = "half.pt"
    answered(view.scan, capsys)
    assert "copy it again" in view.scan.says.value and not view.out.value and not view.call.call
    view.look.a = "train.csv"
    answered(view.scan, capsys)
    assert "no checkpoint that is known" in view.scan.says.value
    torch.save({"lr": 1.0}, folder / "empty.pt")
    view.look.a = "empty.pt"
    answered(view.scan, capsys)
    assert "it holds no tensors" in view.scan.says.value
    assert view.scan.bar.layout.visibility == "hidden"


def test_the_sample_names_every_tensor_of_its_optimizer():
    from stabilitylab.cases.registry import sample

    table = scan_checkpoint(sample() / "checkpoints" / "step-000320.pt", "optimizer", progress=False)
    assert set(table.index) == set(table.attrs["names"]) and not table.attrs["unnamed"]


@pytest.mark.parametrize("is_rounded", [False, True])
def test_the_call_of_a_grid_runs_and_draws_what_is_seen(is_rounded, tmp_path):
    rng = np.random.default_rng(0)
    loss = 1.70 - 0.01 * np.arange(300) / 300 + rng.normal(0, 0.004, 300)
    loss = quantise(loss.astype("f4"), "bf16") if is_rounded else loss
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": float(v)}) + "\n" for i, v in enumerate(loss)))
    state, _ = open_state(path)
    state.visible = "precision"
    view = PrecisionView(state)
    state.x_range = (50, 200)
    axes = ran(view.grid_call.call)
    step = axes.lines[0].get_xdata()
    assert (step.min(), step.max()) == (50, 200) and ("bf16" in view.grid_call.call) == is_rounded
    assert "no black box" in view.notice.value and view.body.layout.display == "none"
    plt.close("all")


@pytest.mark.slow
def test_a_step_is_measured_and_called(capsys):
    from stabilitylab.cases.registry import sample

    view = PrecisionView(open_state(sample())[0])
    view.look.step = 10_000
    assert view.look.step == view.look.steps[-1]
    view.look.step = 300
    answered(view.child, capsys)
    found = ran(view.step_call.call)
    assert found.to_dict()["step"] == view.look.result["step"] == 300
    view.look.setup = "gone.py:setup"
    answered(view.child, capsys)
    assert "gone.py" in view.child.says.value and not view.tables.value and not view.step_call.call


LOOP = """
import torch
from torch.nn import functional as F


def pieces():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))

    def token_loss(model, part):
        losses = F.cross_entropy(model(part[:, :-1]).transpose(1, 2), part[:, 1:], reduction="none")
        return losses, torch.ones_like(losses, dtype=torch.bool)

    parts = [torch.randint(9, (2, n)) for n in (5, 9)]
    return {"model": model, "microbatches": parts, "token_loss": token_loss}
"""


def test_weights_and_audits_are_called(tmp_path, capsys):
    (tmp_path / "train.csv").write_text("step,loss\n0,2\n1,1\n")
    state, _ = open_state(tmp_path / "train.csv")
    state.visible = "accumulation"
    view = AccumulationView(state)
    view.look.micro, view.look.scheme = 4, "microbatch_mean"
    axes = ran(view.call.call)
    true = view.look.weights()[1]
    drawn = np.concatenate(
        [line.get_ydata() for line in axes.lines] + [c.get_offsets()[:, 1] for c in axes.collections]
    )
    assert np.isin(np.round(view.look.weights()[0][true > 0] / true[true > 0], 9), np.round(drawn, 9)).all()
    plt.close("all")
    view.child.start()
    assert "FILE.py:FUNCTION" in view.child.says.value and view.child.job is None
    file = tmp_path / "loop.py"
    file.write_text(LOOP)
    view.look.script = f"{file}:pieces"
    answered(view.child, capsys)
    assert view.verdict.value
    assert isinstance(ran(view.audit_call.call).candidates, pd.DataFrame)
    view.look.script = f"{file}:nothing"
    answered(view.child, capsys)
    assert "has no nothing" in view.child.says.value and not view.verdict.value
