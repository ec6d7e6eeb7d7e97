"""The calls that views offer: each is run as it stands, without the workbench."""

from pathlib import Path

from stabilitylab.workbench.call import run_lines
from stabilitylab.workbench.state import open_state

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
