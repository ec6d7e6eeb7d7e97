"""The workbench without a browser: what it says of logs with little in them, and its zoom history."""

import pytest

from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.state import WorkbenchState, open_state
from stabilitylab.workbench.tabs import Workbench
from stabilitylab.workbench.view_overview import Overview

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
        assert overview.picture.png
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
