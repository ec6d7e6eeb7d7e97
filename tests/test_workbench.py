"""The workbench without a browser: what it says of logs with little in them, and its zoom history."""

import asyncio
import itertools
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from stabilitylab.detect.findings import Finding
from stabilitylab.detect.likely_cause import MostLikely
from stabilitylab.replay.examine import controls
from stabilitylab.run.job import ThreadJob
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench import view_accumulation, view_overview
from stabilitylab.workbench.state import WorkbenchState, open_state
from stabilitylab.workbench.tabs import Workbench
from stabilitylab.workbench.view_accumulation import AccumulationView
from stabilitylab.workbench.view_overview import Overview
from stabilitylab.workbench.view_replay import ReplayView

DATA = Path(__file__).resolve().parent.parent / "data_samples"
LOGS = {
    "empty": "",
    "words": "starting up\nloading data\n",
    "header": "step,loss\n",
    "one step": "step,loss\n0,2.5\n",
    "only NaN": "step,loss\n0,nan\n1,nan\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_poor_log_is_shown_or_refused_in_words(name, tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(LOGS[name])
    bench = Workbench(path)
    if bench.state is None:
        assert "cannot be shown" in bench.widget.value
        return
    overview = bench.tabs.children[0]
    assert isinstance(overview, Overview), overview.value
    if bench.state.series:
        assert overview.picture.sheet and all(panel["x_ticks"] for panel in overview.picture.panels)
    else:
        assert "has no series" in overview.detail.value
    assert "out of the ordinary" not in overview.detail.value


def test_every_zoom_can_be_undone_and_done_again():
    samples = {"loss": Samples(range(100), [3 - i / 100 for i in range(100)])}
    state, _ = open_state(new_run(make_scalars(samples)))
    spans = [(0, 50), (10, 20), (12, 15)]
    for span in spans:
        state.x_range = span
    for span in reversed([(), *spans[:-1]]):
        state.undo()
        assert tuple(state.x_range) == span
    state.undo()
    assert state.x_range == ()
    for span in spans:
        state.redo()
        assert tuple(state.x_range) == span
    state.undo()
    state.x_range = (1, 2)
    state.redo()
    assert tuple(state.x_range) == (1, 2)


def test_a_state_without_runs_has_no_series():
    assert WorkbenchState().series == ()


def test_runs_of_one_name_are_kept_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.csv").write_text(
            "step,loss\n" + "".join(f"{i},{3 - i}\n" for i in range(9))
        )
    state, follower = open_state([tmp_path / "a" / "train.csv", tmp_path / "b" / "train.csv"])
    assert len(state.runs) == 2 and follower is None


def test_the_looks_of_a_curve_are_drawn_and_undone():
    steps = range(200)
    samples = {
        "loss": Samples(steps, [3 - i / 100 for i in steps]),
        "val_loss": Samples(steps, [3.1 - i / 100 for i in steps]),
        "tokens": Samples(steps, [1000.0 * i for i in steps]),
    }
    state, _ = open_state(new_run(make_scalars(samples)))
    view = Overview(state)
    assert view.controls.along.options == ("step", "tokens")
    assert [entry["name"] for entry in view.picture.legend][:2] == ["loss", "val_loss"]
    seen = [view.picture.panels]

    def drawn():
        "The names of what is drawn, once the picture is another one."
        assert view.picture.panels not in seen
        seen.append(view.picture.panels)
        return [one["name"] for panel in view.picture.panels for one in panel["series"]]

    view.controls.smooth.value = 21
    assert "loss-smooth" in drawn()
    view.controls.along.value = "tokens"
    drawn()
    view.picture.hidden = ["val_loss"]
    assert "val_loss" not in drawn() and state.hidden == ("val_loss",)
    view.picture.lifted = {"range": [1.5, 2.5], "n": 1}
    drawn()
    assert view.picture.panels[0]["y0"] == 1.5 and view.picture.panels[0]["y1"] == 2.5
    state.undo()
    assert state.y_range == () and view.picture.panels[0]["y1"] > 2.9
    state.redo()
    view.picture.brushed = {"range": [], "n": 2}
    assert state.y_range == () and state.x_range == ()


def test_a_growing_folder_is_followed(tmp_path):
    text = "step,loss\n" + "".join(f"{i},{3 - i / 50}\n" for i in range(60))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "train.csv").write_text(text)
    bench = Workbench(tmp_path)
    first = bench.state.name
    assert not bench.live.disabled and not bench.poll() and len(bench.state.runs) == 1
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "train.csv").write_text(text.replace("59,1.82", "59,1.7"))
    with open(tmp_path / "a" / "train.csv", "a") as log:
        log.write("60,nan\n61,nan\n62,nan\n")
    assert bench.poll() and len(bench.chooser.options) == len(bench.state.runs) == 2
    assert bench.state.name == first and bench.state.run["scalars"].sizes["step"] == 63
    assert "non_finite" in [found.kind for found in bench.state.findings]


def test_a_run_that_grows_is_drawn_again_and_stays_the_one_that_is_shown(tmp_path):
    line = "{},{}\n"
    for place, name in enumerate(("a.csv", "b.csv", "c.csv")):
        rows = (line.format(i, 3 + place - i / 50) for i in range(60))
        (tmp_path / name).write_text("step,loss\n" + "".join(rows))
    bench = Workbench(tmp_path)
    bench.state.show("b.csv")
    bench.state.visible = "runs"  # whose table puts the worst run first
    before = bench.tabs.children[0].picture.panels[0]["x1"]
    with open(tmp_path / "b.csv", "a") as log:
        log.write("".join(line.format(i, 4 - i / 50) for i in range(60, 120)))
    assert bench.poll() and bench.state.name == bench.chooser.value == "b.csv"
    assert before < 65 and bench.tabs.children[0].picture.panels[0]["x1"] > 115
    seen = []
    bench.state.observe(seen.append, names=["runs"])
    assert not bench.poll() and not seen


def measuring(monkeypatch):
    "A view whose measurement waits halfway until it is let go."
    go, told = threading.Event(), view_accumulation.token_loss
    calls = itertools.count()

    def held(model, text):
        if next(calls) == 32:
            assert go.wait(60)
        return told(model, text)

    monkeypatch.setattr(view_accumulation, "token_loss", held)
    state, _ = open_state(new_run(make_scalars({"loss": Samples(range(9), [2.0] * 9)})))
    return AccumulationView(state), go


def stopped(view, go, is_there):
    "Starts a measurement, stops it once something is so, lets it go and waits for its end."

    async def cancelled():
        view.panel.start()
        while not is_there():
            await asyncio.sleep(0.01)
        assert view.panel.job is not None and not view.panel.stop.disabled
        view.panel.cancel()
        go.set()
        while view.panel.job is not None:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(cancelled(), 60))


def test_measured_gradients_show_how_far_they_are_and_can_be_cancelled(monkeypatch):
    view, go = measuring(monkeypatch)
    stopped(view, go, lambda: view.panel.bar.value == 0.5)
    assert view.look.gradients is None and view.panel.stop.disabled and not view.panel.go.disabled


def test_a_measurement_that_ended_before_it_heard_of_the_stop_is_not_shown(monkeypatch):
    view, go = measuring(monkeypatch)
    monkeypatch.setattr(ThreadJob, "report", lambda self, share: None)
    stopped(view, go, lambda: True)
    assert view.look.gradients is None and view.panel.stop.disabled and not view.panel.go.disabled


def asked(view):
    "The steps that a replay is compared with."
    return {name: view.look.options()[name] for name in ("states", "batches")}


@pytest.mark.slow
def test_a_replay_compares_with_the_controls_of_its_step_unless_the_user_chose():
    path = DATA / "lm_high_lr"
    view = ReplayView(open_state(path)[0])
    view.look.step = 320
    late = {name: {"index": view.controls[name].index} for name in ("states", "batches")}
    view.look.step = 351
    usual = dict(zip(("states", "batches"), controls(path, 351), strict=True))
    assert usual["states"] != controls(path, 320)[0] and asked(view) == usual
    for name, message in late.items():  # the page still had the choice of the former step
        view.controls[name].set_state(message)
    assert asked(view) == usual and list(view.controls["states"].value) == usual["states"]
    view.controls["states"].set_state({"index": [0, 2]})
    assert asked(view) == usual | {"states": view.look.steps[:3:2]}
    view.controls["batches"].set_state({"index": []})
    assert asked(view)["batches"] == []
    view.look.step = 350
    assert asked(view) == dict(zip(usual, controls(path, 350), strict=True))


@pytest.mark.slow
def test_what_moved_first_is_shown_although_the_picture_stands_at_later_steps():
    bench = Workbench(DATA / "lm_high_lr")
    overview, state = bench.tabs.children[0], bench.state
    overview.choose(state.findings.kinds.index("lr_too_high"))
    assert state.x_range[0] > 218
    overview.go_to_layers()
    assert state.finding.kind == "activation_explosion" and state.finding.onset == 218
    assert state.visible == "layers" and state.x_range == ()


def test_show_why_leads_to_the_problem_where_the_reasons_are_of_the_layers_or_the_swap_test():
    plateau = Finding("plateau", "warning", 10, explanation="It stayed.")
    findings = [Finding("restart", "info", 99), plateau, Finding("loss_spike", "warning", 101)]
    likely = MostLikely("The batch was out of range.", ("The swap test says so.",), ("Skip it",), step=100)
    assert view_overview._finding_of(likely, findings) == 2
    assert view_overview._finding_of(replace(likely, because=("It stayed.",)), findings) == 1
    assert view_overview._finding_of(likely, findings[:1]) == -1
