"""Early warning on the zoo: lead in steps over trainscope's detectors, and false alarms, on the same runs.

Both watch the same training. An alarm at or after the step of the fault is a detection; one before it, or
on a healthy run, is false. Detectors of trainscope: its own on the loss (`changepoint`, the default,
`z_score`, `percentile`), and the crossings that its report calls early-warning signals (gradient norm,
concentration of the router; the kurtosis cannot cross by its defaults, which record it every fifth step).

Two tables: its detectors by their defaults, and each at the most sensitive setting that is as quiet as ours
on the fit half (`matched`). `--folder` keeps the runs, so that a change of a detector needs no training.
"""

import argparse
import json
import logging
import math
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.zoo.rows import ROWS, split

GAP = 20  # steps within which alarms are one event, for everybody
DEFAULTS = {"changepoint": 6.0, "z_score": 3.5, "percentile": 1.0, "grad_norm": 3.0, "router": 3.0}
SETTINGS = {  # of each detector, from sensitive to quiet
    "changepoint": [4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500],
    "z_score": [2, 2.25, 2.5, 2.75, 3, 3.1, 3.2, 3.3, 3.4, 3.5, 3.75, 4, 5, 6, 8],
    "percentile": [5, 2, 1, 0.5, 0.1, 0],
    "grad_norm": [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 50],
    "router": [2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50],
}


class Watched(NamedTuple):
    "What a run gives to the detectors."

    steps: int
    ours: list[list]  # [step, words] of each warning
    losses: list[float]
    norms: list[float]  # gradient norms as trainscope recorded them
    shares: list[float]  # largest share of an expert, [] without a router


def trainscope_is_there():
    "Whether the peer is installed."
    try:
        import trainscope  # noqa: F401
    except ImportError:
        return False
    return True


def record_row(name, folder, seed=0):
    "The folder of a run that both recorded, made where it is not there; None: it cannot be trained here."
    path = Path(folder) / f"{name.replace(' ', '_')}_{seed}"
    done = path / "done.json"
    if done.exists():
        return path
    import torch
    from trainscope import TrainScope
    from trainscope.core.config import TrainScopeConfig

    from tests.zoo.train import train

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")

    def observe(model, optimizer):
        config = TrainScopeConfig(run_dir=str(path), run_name="peer", track_memory=False)
        return TrainScope(model, optimizer, config).attach().step

    try:
        result = train(ROWS[name].recipe, seed, path / "ours", observe)
    except RuntimeError:  # as of a processor without the kernel
        return None
    done.write_text(json.dumps(result))
    return path


def our_warnings(name, record):
    "[step, words] of the warnings of a record, from its stored statistics as the writer had them."
    from stabilitylab import open_run
    from stabilitylab.probe.rows import StepRow
    from stabilitylab.probe.warning import _IDLE_SHARES, _WATCHED, WarningDetector
    from tests.zoo.train import build

    run = open_run(record)
    steps = run["scalars"].step.values
    keys = [*_WATCHED, *_IDLE_SHARES, "updates/update_ratio"]
    tables = {}
    for key in keys:
        group, variable = key.split("/")
        if group in run.children and variable in run[group].data_vars and group != "attention":
            tables[key] = run[group][variable].reindex(step=steps).values
    of_dim = {"module": "activations", "param": "updates"}
    dims = {dim: list(map(str, run[group][dim].values)) for dim, group in of_dim.items()}
    params = dict(build(ROWS[name].recipe).named_parameters())
    matrices = np.array([params[p].ndim > 1 for p in dims["param"]])
    coarse = np.full(len(matrices), ROWS[name].recipe.dtype != "float32")
    series = {k: v.values for k, v in run["scalars"].data_vars.items() if v.dims == ("step",)}
    detector, found = WarningDetector(dims, matrices, coarse), []
    for i, step in enumerate(steps):
        seen = {key: table[i] for key, table in tables.items() if np.isfinite(table[i]).any()}
        columns = {k: v for k, v in seen.items() if not k.startswith("sampled")}
        sampled = {k: v for k, v in seen.items() if k.startswith("sampled")}
        scalars = {k: float(v[i]) for k, v in series.items() if k != "update_norm" or np.isfinite(v[i])}
        warning = detector.see(StepRow(int(step), 0.0, columns, scalars, sampled, None, None))
        found += [[warning.step, warning.words()]] if warning else []
    return found


def watched(name, folder, seed=0):
    "A run as both saw it; None where it cannot be trained here."
    path = record_row(name, folder, seed)
    if path is None:
        return None
    from trainscope.io.writer import read_arrow_rows_sync

    losses = json.loads((path / "done.json").read_text())["loss"]
    norms = [row["grad_norm_before_clip"] for row in read_arrow_rows_sync(path / "peer" / "global.arrow")]
    router, largest = path / "peer" / "moe.arrow", {}
    for row in read_arrow_rows_sync(router) if router.exists() else []:
        largest[row["step"]] = max(largest.get(row["step"], 0.0), *row["shares"])
    shares = [largest[step] for step in sorted(largest)]
    return Watched(len(losses), our_warnings(name, path / "ours"), losses, norms, shares)


def crossing(values, sigma):
    "trainscope's `first_crossing_step` at another number of standard deviations: [] or [step]."
    if len(values) < 50:
        return []
    base = sorted(values[:40])
    median = base[20]
    spread = sorted(abs(v - median) for v in base)[20]
    above = [math.isfinite(v) and v > median + sigma * 1.4826 * spread for v in values]
    return next(([i] for i in range(40, len(values) - 2) if all(above[i : i + 3])), [])


def fired(run, detector, setting):
    "Steps of the alarms of one of trainscope's detectors at a setting."
    if detector in ("grad_norm", "router"):
        return crossing(run.norms if detector == "grad_norm" else run.shares, setting)
    from trainscope.core.detectors import make_detector

    options = (
        {"lower": setting, "upper": 100 - setting} if detector == "percentile" else {"threshold": setting}
    )
    test = make_detector({"name": detector} | options)
    return [i for i, v in enumerate(run.losses) if math.isfinite(v) and test.update(v) is not None]


def alarms(runs, settings):
    "Name -> detector -> steps of its alarms."
    return {
        name: {"ours": [step for step, _ in run.ours]}
        | {detector: fired(run, detector, setting) for detector, setting in settings.items()}
        for name, run in runs.items()
    }


def events_of(steps):
    "The first step of each event."
    first, last = [], -math.inf
    for step in sorted(steps):
        if step - last > GAP:
            first.append(step)
        last = step
    return first


def fault_at(name):
    "The step of the fault; 0 where it is there from the beginning, None on a healthy run."
    row = ROWS[name]
    late = row.recipe.fault not in ("", "imbalance", "leak")
    return None if not row.cause else row.recipe.at if late else 0


def false_alarms(runs, told, detector):
    "Events before a fault or on healthy runs, and the steps in which they could be."
    count = steps = 0
    for name, run in runs.items():
        at = fault_at(name)
        end = run.steps if at is None else at
        count += len(events_of(s for s in told[name][detector] if s < end))
        steps += end
    return count, steps


def matched(runs):
    "Detector -> its most sensitive setting that is as quiet as ours on these runs, if it has one."
    allowed, _ = false_alarms(runs, alarms(runs, {}), "ours")
    settings = {}
    for detector, values in SETTINGS.items():
        quiet = [v for v in values if false_alarms(runs, alarms(runs, {detector: v}), detector)[0] <= allowed]
        settings |= {detector: quiet[0]} if quiet else {}
    return settings


def lead(ours, theirs, end):
    "Steps by which ours is first; who is silent is as late as the end of the run; None: both are silent."
    return (
        None
        if ours is None and theirs is None
        else (end if theirs is None else theirs) - (end if ours is None else ours)
    )


def compared(runs, told, rivals):
    "Name -> (step of ours, the first rival and its step, lead)."
    rows = {}
    for name, run in runs.items():
        at = fault_at(name)
        if at is not None:
            after = {d: [s for s in steps if s >= at] for d, steps in told[name].items()}
            first = {d: min(steps) for d, steps in after.items() if steps}
            theirs = min(((s, d) for d, s in first.items() if d in rivals), default=(None, ""))
            rows[name] = (first.get("ours"), *theirs[::-1], lead(first.get("ours"), theirs[0], run.steps))
    return rows


def summary(rows):
    "Median, least, and how often ours is first, level, or later."
    leads = [row[3] for row in rows.values() if row[3] is not None]
    counts = [sum(v > 0 for v in leads), sum(v == 0 for v in leads), sum(v < 0 for v in leads)]
    if not leads:
        return "silent"
    both = [row[3] for row in rows.values() if row[0] is not None and row[2] is not None]
    middle = f"median {statistics.median(leads):+.0f}, least {min(leads):+d}"
    of_both = (
        f"{statistics.median(both):+.0f} over the {len(both)} that both tell" if both else "none told by both"
    )
    return f"{middle} ({of_both}); earlier, level, later: {counts}; of {len(leads)}"


def show(runs, title, settings):
    "The tables of some runs."
    told = alarms(runs, settings)
    print(f"\n{title}: {len(runs)} runs\n")
    print("| detector | setting | false alarms | per 1,000 steps | tells | lead of ours |")
    print("|---|---|---|---|---|---|")
    for detector in ("ours", *settings):
        count, steps = false_alarms(runs, told, detector)
        rows = compared(runs, told, {detector})
        tells = sum(row[2 if detector != "ours" else 0] is not None for row in rows.values())
        words = "" if detector == "ours" else summary(rows)
        rate = 1000 * count / max(1, steps)
        cells = [detector, settings.get(detector, ""), f"{count} in {steps}", f"{rate:.1f}"]
        print("| " + " | ".join(map(str, [*cells, f"{tells} of {len(rows)}", words])) + " |")
    rows = compared(runs, told, set(settings))
    print(f"\nfirst of all of them: {summary(rows)}")
    print("\n| run | cause | fault | ours | trainscope's first | lead |\n|---|---|---|---|---|---|")
    for name, (ours, rival, step, steps) in rows.items():
        cells = [name, ROWS[name].cause, fault_at(name), ours, f"{rival} {step}" if rival else None, steps]
        print("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")


def main(argv=()):
    "Print the tables."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where runs are kept; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="of the runs that are not of the fit half")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    options = parser.parse_args(argv)
    if not trainscope_is_there():
        print("skipped: trainscope not installed")
        return
    sides, runs = split(), {}
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(options.workers) as pool:
        for seed, chosen in (
            (0, [n for n in options.rows if sides[n] == "fit"]),
            (options.seed, [n for n in options.rows if sides[n] != "fit"]),
        ):
            work = partial(watched, folder=options.folder or temporary, seed=seed)
            runs |= dict(zip(chosen, pool.map(work, chosen), strict=True))
    fit = {name: run for name, run in runs.items() if run and sides[name] == "fit"}
    other = {name: run for name, run in runs.items() if run and sides[name] != "fit"}
    for settings, words in (
        (DEFAULTS, "defaults of trainscope"),
        (matched(fit), "as quiet as ours on the fit half"),
    ):
        show(fit, f"Fit half (limits were chosen here), {words}", settings)
        if other:
            show(other, f"Held out and blind, {words}", settings)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
