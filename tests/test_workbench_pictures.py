"""What the pictures of Overview, Runs and Layers hold: curves of modules, rings, rows, colours."""

from pathlib import Path

import numpy as np
import pytest

from stabilitylab.plot.runs import RUN_COLOURS
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_layers import LayersView
from stabilitylab.workbench.view_overview import Overview
from stabilitylab.workbench.view_runs import RunsView

SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "lm_high_lr"


@pytest.fixture(scope="module")
def sample():
    "The sample run, opened once."
    return open_state(SAMPLE)[0].runs


def found(state, kind):
    "The index of the finding of this kind."
    return [one.kind for one in state.findings].index(kind)


@pytest.mark.slow
def test_a_finding_of_a_module_draws_its_curve_until_another_is_chosen(sample):
    state, _ = open_state(sample)
    view = Overview(state)
    view.choose(found(state, "activation_explosion"))
    (drawn,) = (
        one for panel in view.picture.panels for one in panel["series"] if "blocks.0.fc2" in one["name"]
    )
    step, value = np.frombuffer(drawn["xy"], float).reshape(2, -1)
    truth = state.run["activations"]["absmax"].sel(module="blocks.0.fc2").sel(step=slice(*state.x_range))
    assert np.array_equal(step, truth.step.values) and np.allclose(value, truth.values)
    view.choose(found(state, "divergence"))
    assert not any("blocks" in one["name"] for panel in view.picture.panels for one in panel["series"])


def test_a_ring_in_the_map_is_its_finding_and_rows_are_drawn_up(sample):
    state, _ = open_state(sample)
    view, state.visible = LayersView(state), "layers"
    index = found(state, "activation_explosion")
    panel = view.picture.panels[0]
    assert str(index + 1) in [one["words"] for one in panel["words"]]
    row = panel["rows"].index("blocks.0.fc2")
    view.picture.clicked = {"x": float(state.findings[index].onset), "y": row + 0.5, "finding": -1, "n": 1}
    assert state.selected == index and view.look.module == "blocks.0.fc2"
    every = panel["rows"]
    view.picture.lifted = {"range": [2.2, 8.9], "n": 1}
    shown = view.picture.panels[0]
    assert shown["rows"] == every[2:9] and shown["map"]["rows"] == 7
    view.picture.lifted = {"range": [1.1, 1.2], "n": 2}
    assert view.picture.panels[0]["rows"] == every[3:4]
    view.picture.brushed = {"range": [], "n": 3}
    assert view.picture.panels[0]["rows"] == every


def test_a_run_keeps_its_colour_and_the_worst_stands_first():
    step = np.arange(600)
    noise = np.random.default_rng(0).normal(0, 0.02, (3, 600))
    calm, left = 4 - step / 300, np.where(step < 400, 4 - step / 300, 2.7 + (step - 400) / 100)
    values = {"a": calm + noise[0], "b": calm + noise[1], "bad": left + noise[2]}
    runs = {name: new_run(make_scalars({"loss": Samples(step, value)})) for name, value in values.items()}
    state, _ = open_state(runs)
    view, state.visible = RunsView(state), "runs"
    first = view.picture.legend[0]
    assert (first["name"], first["colour"]) == ("bad", RUN_COLOURS[2])
    colours = {one["name"]: one["colour"] for one in view.picture.panels[0]["series"]}
    assert colours == dict(zip(values, RUN_COLOURS[:3], strict=True))
    assert view.picture.panels[0]["lines"][-1]["colour"] == RUN_COLOURS[2]  # drawn last, so above the others
    view.picture.hidden = ["a"]
    kept = {one["name"]: one["colour"] for one in view.picture.panels[0]["series"]}
    assert kept == {name: colours[name] for name in ("b", "bad")}
