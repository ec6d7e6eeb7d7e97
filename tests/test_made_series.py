"""What is told of runs made from seeds, as the tables in git say: a change of a detector is a change of them.

`python -m tests.test_made_series` writes the tables anew; their diff is then read line by line.
"""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import xarray as xr

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.likely_cause import most_likely
from tests.made.layers import CHANGES, changed
from tests.made.series import RUNS, made

FOLDER = Path(__file__).parent / "made"
COLUMNS = ("seed", "kind", "severity", "onset", "end", "message")
GROUPS = 48
FAST = 12  # of the groups of series
SLOW = (pytest.mark.slow, pytest.mark.findings)


def rows_of(seed: int, make: Callable[[int], xr.DataTree]) -> list[dict[str, str]]:
    "The findings of one run, and the cause that stands first."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = diagnose(make(seed))
    rows = [(seed, f.kind, f.severity, f.onset, f.end, f.explanation) for f in findings]
    likely = most_likely(findings)
    if likely is not None:
        rivals = "; ".join(str(rival) for rival in likely.to_dict().get("rivals", ()))
        rows.append((seed, "cause", likely.confidence, "", "", f"{likely.cause} {rivals}".strip()))
    return [dict(zip(COLUMNS, map(str, row), strict=True)) for row in rows]


def check(file: str, seeds: range, make: Callable[[int], xr.DataTree]) -> None:
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        expected = list(csv.DictReader(lines))
    for seed in seeds:
        assert rows_of(seed, make) == [row for row in expected if row["seed"] == str(seed)], seed


@pytest.mark.parametrize("group", [pytest.param(g, marks=SLOW if g >= FAST else []) for g in range(GROUPS)])
def test_the_findings_of_made_series_are_those_of_the_table(group):
    check("series.csv", range(group, RUNS, GROUPS), made)


@pytest.mark.slow
@pytest.mark.findings
@pytest.mark.parametrize("group", range(GROUPS))
def test_the_findings_of_changed_records_are_those_of_the_table(group):
    check("layers.csv", range(group, CHANGES, GROUPS), changed)


def write(file: str, seeds: int, make: Callable[[int], xr.DataTree]) -> None:
    with (FOLDER / file).open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for seed in range(seeds) for row in rows_of(seed, make))


if __name__ == "__main__":
    write("series.csv", RUNS, made)
    write("layers.csv", CHANGES, changed)
