"""False alarms and recall against every limit, halved and doubled: `make calibrate` writes `calibration.csv`.

Runs are the written log cases, the labelled traces and healthy curves; with `--real` also the real logs
beside the project, of which only the runs with other findings are counted, as most have no label. A limit
that a run never read cannot change its findings, so only the detectors that read it run again.
"""

import argparse
import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr

from stabilitylab import read_runs
from stabilitylab.cases.logs import LOG_CASES, log_case
from stabilitylab.cases.traces import HELD_OUT, KINDS, make_trace
from stabilitylab.detect import diagnose as detection
from stabilitylab.detect.findings import Finding
from stabilitylab.detect.limits import LIMITS, limits_read, use_limits
from stabilitylab.names.errors import InputError
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

TABLE = Path(__file__).with_name("calibration.csv")
REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "real_logs"
COLUMNS = ("limit", "value", "tried", "planted", "found", "false_alarms", "runs_changed", "real_changed")
LOSS_KINDS = {"loss_spike", "resume_spike", "divergence", "slow_rise", "level_shift"}
SMALL = 300_000  # bytes of a real log that is read


class Judged:
    "One run, what each detector found in it and which limits it read."

    def __init__(self, run: xr.DataTree, is_right, planted: int, is_real: bool = False):
        self.run, self.is_right, self.planted, self.is_real = run, is_right, planted, is_real
        self.stages = []
        for name in detection.DETECTORS:
            with limits_read() as reads:
                findings = detection._load(name)(run)
            self.stages.append((name, findings, frozenset(reads)))
        with limits_read() as reads:
            self.findings = self.related([f for _, findings, _ in self.stages for f in findings])
        self.reads = frozenset(reads).union(*(reads for _, _, reads in self.stages))

    def related(self, findings: list[Finding]) -> list[Finding]:
        for relation in detection._RELATIONS:
            findings = detection._load(relation)(self.run, findings)
        return findings

    def with_limit(self, name: str) -> list[Finding]:
        "The findings inside `use_limits`; those of detectors that do not read the limit are kept."
        if name not in self.reads:
            return self.findings
        again = [detection._load(d)(self.run) if name in reads else old for d, old, reads in self.stages]
        return self.related([f for findings in again for f in findings])

    def score(self, findings: list[Finding]) -> tuple[int, int]:
        "How many planted events were found, and false alarms."
        hits = {self.is_right(f) for f in findings} - {None, "follows"}
        alarms = [f for f in findings if f.severity != "info" and self.is_right(f) is None]
        return len(hits), 0 if self.is_real else len(alarms)


def curve_run(loss: np.ndarray) -> xr.DataTree:
    return new_run(make_scalars({"loss": Samples(np.arange(len(loss)), loss)}))


def log_cases(seed: int) -> Iterator[Judged]:
    for name, case in LOG_CASES.items():
        onset = case.onset_at(seed)

        def is_right(f: Finding, case=case, onset=onset):
            is_near = onset is None or (f.onset is not None and -case.early <= f.onset - onset <= case.late)
            if f.kind == case.kind:
                return "planted" if is_near else None
            return "follows" if f.kind in case.also else None

        yield Judged(log_case(name, seed), is_right, bool(case.kind))


def traces(seed: int) -> Iterator[Judged]:
    for kind in (*KINDS, *HELD_OUT):
        trace = make_trace(kind, seed)

        def is_right(f: Finding, onsets=trace.onsets):
            if f.kind not in LOSS_KINDS or f.severity == "info":
                return None
            near = [onset for onset in onsets if f.onset - 60 <= onset <= f.end + 60]
            return near[0] if near else None

        yield Judged(curve_run(trace.value), is_right, len(trace.onsets))


def healthy(seeds: int) -> Iterator[Judged]:
    for seed in range(seeds):
        rng, i = np.random.default_rng(seed), np.arange(2000)
        low, fall, tau = rng.uniform(0.5, 3), rng.uniform(3, 8), rng.uniform(50, 700)
        noise = rng.uniform(0.005, 0.15)
        yield Judged(curve_run(low + fall * np.exp(-i / tau) + rng.normal(0, noise, 2000)), lambda f: None, 0)


def real_logs() -> Iterator[Judged]:
    for path in sorted(REAL.rglob("*")) if REAL.is_dir() else ():
        if not path.is_file() or path.stat().st_size > SMALL or path.suffix in (".md", ".safetensors"):
            continue
        try:
            runs = read_runs(path)
        except InputError:
            continue
        for run in runs.values():
            yield Judged(detection.as_run(run), lambda f: None, 0, is_real=True)


def key(findings: list[Finding]) -> list[tuple]:
    return sorted((f.kind, f.severity, str(f.onset), str(f.end), f.series) for f in findings)


def row(name: str, tried: float, judged: list[Judged]) -> dict:
    "The counts over all runs with one limit changed."
    with use_limits({name: tried}):
        findings = [(j, j.with_limit(name)) for j in judged]
    scores = [j.score(f) for j, f in findings]
    changed = [j.is_real for j, f in findings if f is not j.findings and key(f) != key(j.findings)]
    planted = sum(j.planted for j in judged)
    counts = (planted, sum(s[0] for s in scores), sum(s[1] for s in scores), changed.count(False))
    of_real = changed.count(True) if any(j.is_real for j in judged) else ""
    return dict(zip(COLUMNS, (name, LIMITS[name].value, tried, *counts, of_real), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="the real logs too (minutes)")
    parser.add_argument("--only", nargs="+", default=list(LIMITS), help="print these, store nothing")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    judged = [*log_cases(0), *traces(0), *healthy(6), *(real_logs() if chosen.real else ())]
    print(f"{len(judged)} runs", flush=True)
    rows = []
    for name in chosen.only:
        value = LIMITS[name].value
        for tried in (
            value,
            *(max(1, round(value * f)) if isinstance(value, int) else value * f for f in (0.5, 2)),
        ):
            rows.append(row(name, tried, judged))
        print(*rows[-2].values(), "|", *rows[-1].values(), flush=True)
    if chosen.only != list(LIMITS):
        return
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
