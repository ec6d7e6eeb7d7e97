"""The calls that views offer: each is run as it stands, without the workbench."""

from pathlib import Path

import matplotlib.pyplot as plt

from stabilitylab.plot.loss import DRAWN
from stabilitylab.workbench.parts import run_lines
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_layers import LayersView
from stabilitylab.workbench.view_runs import RunsView

SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "lm_high_lr"

LOG = "".join(f"step {i}: loss {3 - i / 50:.3f} lr 1.0e-3\n" for i in range(60))


def ran(call):
    "The names that a call leaves."
    names = {}
    exec(call, names)
    return names


def test_the_lines_read_every_run_again(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.log").write_text(LOG.replace("loss 3", f"loss {len(folder)}"))
    sources = [tmp_path, [str(tmp_path / "one" / "train.log"), tmp_path / "two" / "train.log"]]
    for source in sources:
        state, _ = open_state(source)
        assert len(state.runs) == 2
        for name, run in state.runs.items():
            again = ran("\n".join(run_lines(state, name)))["run"]
            assert again["scalars"].identical(run["scalars"]), name


def test_a_run_that_came_later_is_read_from_its_place(tmp_path):
    path = Path(tmp_path) / "train.log"
    path.write_text(LOG)
    state, _ = open_state(path)
    (run,) = state.runs.values()
    state.grow({"an arm": run})
    assert ran("\n".join(run_lines(state, "an arm")))["run"]["scalars"].identical(run["scalars"])


def test_runs_and_layers_offer_calls_that_run(tmp_path):
    for place, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.log").write_text(LOG.replace("loss 3", f"loss {3 + place}"))
    state, _ = open_state(tmp_path)
    view, state.visible = RunsView(state), "runs"
    state.x_range = (10.0, 40.0)
    view.picture.hidden = [next(iter(state.runs))]
    names = ran(view.call.call)
    shown = plt.gca()
    assert [line.get_gid() for line in shown.lines] == [f"{DRAWN}{list(state.runs)[1]}"]
    assert shown.get_xlim() == (10, 40) and list(names["runs"]) == list(state.runs)

    state, _ = open_state(SAMPLE)
    view, state.visible = LayersView(state), "layers"
    view.look.find, state.x_range = "blocks.1", (100.0, 200.0)
    table = ran(view.call.call)["table"]
    shown = view.look.of(state.run)
    assert list(table.module.values) == list(shown.module.values) and 0 < table.sizes["module"] < 40
    assert table.step.values.min() >= 100 and table.step.values.max() <= 200
    assert len(plt.gcf().axes) == 2, "no colour bar"
    view.look.rows = (2, 5)  # brushed
    table = ran(view.call.call)["table"]
    assert list(table.module.values) == list(shown.module.values[2:5])
    plt.close("all")
