"""False alarms and recall against every limit, halved and doubled: `make calibrate` writes `calibration.csv`.

Runs are the written log cases, our own logs, the labelled traces, records of layer faults, pairs of runs
that share their data, and healthy curves; with `--real` (`make calibrate REAL=1`) also the real logs beside
the project, of which only the runs with other findings are counted, as they have no label: no name and no
value of them is stored. A limit that a run never read cannot change its findings, so only the detectors
that read it run again.
"""

import argparse
import csv
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xarray as xr

from nbs.explain.reproductions.traces import HELD_OUT, KINDS, make_trace
from stabilitylab import read_runs
from stabilitylab.cases.layers import LAYER_CASES
from stabilitylab.cases.logs import LOG_CASES, log_case
from stabilitylab.detect import diagnose as detection
from stabilitylab.detect.cross_run import compare_runs
from stabilitylab.detect.findings import Finding
from stabilitylab.detect.limits import LIMITS, limit, limits_read, use_limits
from stabilitylab.names.errors import InputError
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from tests.logs.make import FOLDER, LOGS

TABLE = Path(__file__).with_name("calibration.csv")
REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "real_logs"
COLUMNS = ("limit", "value", "tried", "planted", "found", "false_alarms", "runs_changed", "real_changed")
LOSS_KINDS = {"loss_spike", "resume_spike", "divergence", "slow_rise", "level_shift"}
SMALL = 300_000  # bytes of a real log that is read


Label = Callable[
    [Finding], object
]  # the planted event that a finding is of, "follows", or None: a false alarm


class Judged:
    "One run, what each detector found in it and which limits it read."

    def __init__(self, run: xr.DataTree, label: Label, planted: int, is_real: bool = False):
        self.run, self.label, self.planted, self.is_real = run, label, planted, is_real
        self.stages = []
        for find in self.detectors():
            with limits_read() as reads:
                findings = find(run)
            self.stages.append((find, findings, frozenset(reads)))
        with limits_read() as reads:
            self.findings = self.related([f for _, findings, _ in self.stages for f in findings])
        self.reads = frozenset(reads).union(*(reads for _, _, reads in self.stages))

    def detectors(self) -> list[Callable]:
        return [detection._load(name) for name in detection.DETECTORS]

    def related(self, findings: list[Finding]) -> list[Finding]:
        for relation in detection._RELATIONS:
            findings = detection._load(relation)(self.run, findings)
        return detection.finish(findings, self.run)

    def with_limit(self, name: str) -> list[Finding]:
        "The findings inside `use_limits`; those of detectors that do not read the limit are kept."
        if name not in self.reads or limit(name) == LIMITS[name].value:
            return self.findings
        again = [find(self.run) if name in reads else old for find, old, reads in self.stages]
        return self.related([f for findings in again for f in findings])

    def score(self, findings: list[Finding]) -> tuple[int, int]:
        "How many planted events were found, and false alarms."
        hits = {self.label(f) for f in findings} - {None, "follows"}
        alarms = [f for f in findings if f.severity != "info" and self.label(f) is None]
        return len(hits), 0 if self.is_real else len(alarms)


class JudgedPair(Judged):
    "Two runs, and what they share."

    def detectors(self) -> list[Callable]:
        return [lambda runs: list(compare_runs(runs))]

    def related(self, findings: list[Finding]) -> list[Finding]:
        return findings


def curve_run(loss: np.ndarray) -> xr.DataTree:
    return new_run(make_scalars({"loss": Samples(np.arange(len(loss)), loss)}))


def case_label(case, onset: int | None = None) -> Label:
    "Of a case with a kind, and kinds that follow from it."

    def label(f: Finding):
        is_near = onset is None or (f.onset is not None and -case.early <= f.onset - onset <= case.late)
        if f.kind == case.kind:
            return "planted" if is_near else None
        return "follows" if f.kind in case.also else None

    return label


def log_cases(seed: int) -> Iterator[Judged]:
    for name, case in LOG_CASES.items():
        label = case_label(case, case.onset_at(seed))
        yield Judged(log_case(name, seed), label, bool(case.kind))


def own_logs() -> Iterator[Judged]:
    "Three of the forms, since all hold one run: a spike, of the gradient norm too, and a lost loss."
    kinds = ("loss_spike", "grad_norm_explosion", "non_finite")
    for name in ("nanogpt", "megatron", "wandb_csv"):
        (run,) = read_runs(FOLDER / LOGS[name][0]).values()
        judged = Judged(run, lambda f: f.kind if f.kind in kinds else None, 0)
        judged.planted = judged.score(judged.findings)[0]  # tests/test_own_logs.py says which each form holds
        yield judged


def layer_faults() -> Iterator[Judged]:
    "Small models with a fault, recorded; kinds that no case is about are not judged."
    judged = {case.kind for case in LAYER_CASES.values() if case.kind} | {"update_rms_excess"}
    for case in LAYER_CASES.values():

        def label(f: Finding, case=case):
            if f.kind == case.kind and f.modules:
                return "planted" if case.module in f.modules[0] else None
            return None if f.kind in judged and f.kind not in case.also else "follows"

        yield Judged(case.build(0), label, bool(case.kind))


def shared_data() -> Iterator[Judged]:
    "Two runs with so many spikes at the same steps; a single one in common is chance."
    for common in (0, 1, 2, 3, 4, 6):
        runs = {}
        for name in ("a", "b"):
            rng = np.random.default_rng([common, ord(name)])
            loss = 3 - np.arange(3000) / 3000 + rng.normal(0, 0.02, 3000)
            loss[[400, 800, 1200, 1700, 2200, 2800][:common]] += 0.5
            loss[rng.integers(100, 2900, 6)] += 0.4  # of its own
            runs[name] = curve_run(loss)
        has_enough = common >= 3
        yield JudgedPair(runs, lambda f, ok=has_enough: f.kind if ok else None, has_enough)


def traces(seed: int) -> Iterator[Judged]:
    for kind in (*KINDS, *HELD_OUT):
        trace = make_trace(kind, seed)

        def label(f: Finding, onsets=trace.onsets):
            if f.kind not in LOSS_KINDS or f.severity == "info":
                return None
            near = [onset for onset in onsets if f.onset - 60 <= onset <= f.end + 60]
            return near[0] if near else None

        yield Judged(curve_run(trace.value), label, len(trace.onsets))


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
    "What a reader would notice: findings, their steps, modules and lists, and the first remedies."

    def noticed(f: Finding) -> tuple:
        steps, remedies = (f.onset, f.end, f.evidence.get("steps")), [row["name"] for row in f.remedies[:3]]
        return f.kind, f.severity, str(steps), f.series, f.modules, remedies

    return sorted(map(noticed, findings))


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
    judged = [*log_cases(0), *own_logs(), *traces(0), *layer_faults(), *shared_data(), *healthy(6)]
    judged += real_logs() if chosen.real else ()
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
