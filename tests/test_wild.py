"""Logs of strangers: for each, whether it opens, and whether values and steps are right."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.runs import read_runs
from stabilitylab.run.curves import loss_name, scalars_of
from stabilitylab.run.scalars import series, series_names

WILD = Path(__file__).resolve().parent.parent.parent / "shared" / "real_logs" / "wild"
if not WILD.exists():
    WILD = Path(__file__).resolve().parents[3] / "shared" / "real_logs" / "wild"
pytestmark = pytest.mark.skipif(
    not (WILD / "truth.json").exists(), reason="the logs of strangers (shared/real_logs/wild) are not here"
)

# least share of the files that must be right
OPENED, VALUES, STEPS = 0.95, 0.90, 0.90


@dataclass(frozen=True)
class Score:
    "What became of one file."

    file: str
    opened: bool
    values: bool | None  # None: nothing to compare with
    steps: bool | None
    got: str  # what was read, in words


def is_near(got: float, true: float | str) -> bool:
    "Whether two numbers are one, to the digits that a log prints; 'nan' is a number here."
    true = float(true)
    if math.isnan(true) or math.isnan(got):
        return math.isnan(true) and math.isnan(got)
    return math.isclose(got, true, rel_tol=1e-4, abs_tol=1e-12)


def values_are_right(value: np.ndarray, true: dict) -> bool:
    "Whether count, first, last, lowest and highest of a series are the true ones."
    finite = value[np.isfinite(value)]
    if len(value) != true["records"] or not len(finite):
        return False
    got = {"first": value[0], "last": value[-1], "lowest": finite.min(), "highest": finite.max()}
    return all(is_near(got[name], true[name]) for name in got if name in true)


def score(entry: dict) -> Score:
    "The score of one file of `truth.json`."
    try:
        runs = read_runs(WILD / entry["file"])
    except InputError as error:
        return Score(entry["file"], False, None, None, str(error)[:100])
    run = next(iter(runs.values()))
    names = series_names(scalars_of(run))
    events = run["events"].sizes.get("event", 0) if "events" in run.children else 0
    name = loss_name(run) or (names[0] if names else None)
    if name is None:
        return Score(entry["file"], events > 0, None, None, f"no series, {events} events")
    curve = series(scalars_of(run), name)
    value, step = curve.values, curve.step.values
    got = f"{run.attrs['format']}: {name} ({curve.attrs['log_name']}) n={len(value)} "
    got += f"{value[0]:.6g}..{value[-1]:.6g} "
    finite = value[np.isfinite(value)]
    lowest, highest = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
    got += f"[{lowest:.6g}, {highest:.6g}] steps {step[0]}..{step[-1]} of {len(names)} series"
    values = values_are_right(value, entry["loss"]) if "loss" in entry else None
    steps = None
    if "steps" in entry:
        passes = [curve.segment.values == k for k in np.unique(curve.segment.values)]
        low, high = entry["steps"]
        steps = step.min() == low and (step.max() == high or step[passes[-1]].max() == high)
    return Score(entry["file"], True, values, steps, got)


def table(scores: list[Score]) -> str:
    "One line a file."
    marks = {True: "yes", False: "NO", None: "-"}
    rows = [f"{'file':44} open val  step  read"]
    for one in scores:
        row = f"{one.file:44} {marks[one.opened]:4} {marks[one.values]:4} {marks[one.steps]:5} {one.got}"
        rows.append(row)
    return "\n".join(rows)


def share(answers: list[bool | None]) -> float:
    "The share of right answers among those that can be compared."
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known)


def shares(entries: list[dict], scores: list[Score]) -> tuple[float, float, float]:
    "The shares of files opened (those with metrics), with right values, and with right steps."
    pairs = list(zip(entries, scores, strict=True))
    values = [s.values if s.opened else False for e, s in pairs if "loss" in e]
    steps = [s.steps if s.opened else False for e, s in pairs if "steps" in e]
    return share([s.opened for e, s in pairs if e["kind"] == "metrics"]), share(values), share(steps)


def all_scores() -> tuple[list[dict], list[Score]]:
    "The entries of `truth.json` and their scores."
    entries = json.loads((WILD / "truth.json").read_text(encoding="utf-8"))
    return entries, [score(entry) for entry in entries]


@pytest.mark.slow  # real logs
def test_logs_of_strangers_are_read():
    entries, scores = all_scores()
    opened, values, steps = shares(entries, scores)
    assert opened >= OPENED, table(scores)
    assert values >= VALUES, table(scores)
    assert steps >= STEPS, table(scores)


if __name__ == "__main__":
    entries, scores = all_scores()
    print(table(scores))
    print("opened, values, steps: {:.0%} {:.0%} {:.0%}".format(*shares(entries, scores)), file=sys.stderr)
