"""Early warning on the zoo: lead in steps over trainscope's detectors, and false alarms, on the same runs.

Both watch the same training. An alarm at or after the step of the fault is a detection; one before it, or
on a healthy run, is false. Detectors of trainscope: its own on the loss (`changepoint`, the default,
`z_score`, `percentile`), and the crossings that its report calls early-warning signals (gradient norm,
kurtosis of the first layers, concentration of the router). `--folder` keeps the result of each run.
"""

import argparse
import asyncio
import json
import logging
import math
import statistics
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.zoo.rows import ROWS, split

OF_LOSS = ("changepoint", "z_score", "percentile")
GAP = 20  # steps within which alarms are one event, for everybody


def trainscope_is_there():
    "Whether the peer is installed."
    try:
        import trainscope  # noqa: F401
    except ImportError:
        return False
    return True


def run_row(name, folder, seed=0):
    "Alarms of both on one run of the zoo: {'ours': [[step, words]], 'fired': {detector: [step]}}."
    stored = Path(folder) / f"{name.replace(' ', '_')}_{seed}.json"
    if stored.exists():
        return json.loads(stored.read_text())
    import torch
    from trainscope import TrainScope
    from trainscope.analysis import run_signal_signature
    from trainscope.core.config import TrainScopeConfig
    from trainscope.core.detectors import make_detector

    from stabilitylab.run.record import open_run
    from tests.zoo.train import train

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        scopes = []

        def observe(model, optimizer):
            config = TrainScopeConfig(run_dir=temporary, run_name="peer", track_memory=False)
            scopes.append(TrainScope(model, optimizer, config).attach())
            return scopes[0].step

        path = Path(temporary) / "ours"
        losses = train(ROWS[name].recipe, seed, path, observe, on_warning="note")["loss"]
        scopes[0].detach()
        signals = asyncio.run(run_signal_signature(Path(temporary) / "peer"))["first_steps"]
        run = open_run(path)
        ours = []
        if "events" in run.children:
            events = run["events"]
            told = events.event_kind.values == "warning"
            ours = [
                [int(s), str(t)]
                for s, t in zip(events.event_step[told], events.event_text[told], strict=True)
            ]
    fired = {}
    for rule in OF_LOSS:
        detector = make_detector({"name": rule})
        finite = [(i, v) for i, v in enumerate(losses) if math.isfinite(v)]
        fired[rule] = [i for i, v in finite if detector.update(v) is not None]
    fired |= {f"{signal} crossing": [step] for signal, step in signals.items() if signal != "loss"}
    result = {"ours": ours, "fired": fired, "steps": len(losses)}
    stored.write_text(json.dumps(result))
    return result


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


def alarms(result):
    "Detector -> steps of its alarms."
    return {"ours": [step for step, _ in result["ours"]]} | result["fired"]


def false_alarms(results, detector):
    "Events before a fault or on healthy runs, and the steps in which they could be."
    count = steps = 0
    for name, result in results.items():
        at = fault_at(name)
        end = result["steps"] if at is None else at
        count += len(events_of(s for s in alarms(result).get(detector, []) if s < end))
        steps += end
    return count, steps


def detections(name, result):
    "Detector -> step of its first alarm at or after the fault."
    at = fault_at(name)
    after = {d: [s for s in steps if s >= at] for d, steps in alarms(result).items()}
    return {d: min(steps) for d, steps in after.items() if steps}


def lead(ours, theirs, end):
    "Steps by which ours is first; who is silent is as late as the end of the run; None: both are silent."
    return (
        None
        if ours is None and theirs is None
        else (end if theirs is None else theirs) - (end if ours is None else ours)
    )


def compared(results, rivals):
    "Name -> (step of ours, the first rival and its step, lead)."
    rows = {}
    for name, result in results.items():
        if fault_at(name) is not None:
            first = detections(name, result)
            theirs = min(((s, d) for d, s in first.items() if d in rivals), default=(None, ""))
            rows[name] = (
                first.get("ours"),
                *theirs[::-1],
                lead(first.get("ours"), theirs[0], result["steps"]),
            )
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


def show(results, title):
    "The tables of some runs."
    names = ["ours", *sorted({d for r in results.values() for d in r["fired"]})]
    print(f"\n{title}: {len(results)} runs\n")
    print("| detector | false alarms | per 1,000 steps | lead of ours |\n|---|---|---|---|")
    rate = {}
    for detector in names:
        count, steps = false_alarms(results, detector)
        rate[detector] = 1000 * count / max(1, steps)
        words = "" if detector == "ours" else summary(compared(results, {detector}))
        print(f"| {detector} | {count} in {steps} | {rate[detector]:.1f} | {words} |")
    as_quiet = {d for d in names[1:] if rate[d] <= rate["ours"]}
    for words, rivals in (
        ("any of them", set(names[1:])),
        (f"as quiet as ours ({', '.join(sorted(as_quiet))})", as_quiet),
    ):
        if rivals:
            print(f"\nfirst of {words}: {summary(compared(results, rivals))}")
    print("\n| run | cause | fault | ours | trainscope's first | lead | over the quiet ones |")
    print("|---|---|---|---|---|---|---|")
    quiet = compared(results, as_quiet)
    for name, (ours, rival, step, steps) in compared(results, set(names[1:])).items():
        cells = [
            name,
            ROWS[name].cause,
            fault_at(name),
            ours,
            f"{rival} {step}" if rival else None,
            steps,
            quiet[name][3],
        ]
        print("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")


def main(argv=()):
    "Print the tables."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where results are kept; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    options = parser.parse_args(argv)
    if not options.folder and not trainscope_is_there():
        print("skipped: trainscope not installed")
        return
    sides = split()
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(options.workers) as pool:
        work = partial(run_row, folder=options.folder or temporary, seed=options.seed)
        results = dict(zip(options.rows, pool.map(work, options.rows), strict=True))
    for title, of in (
        ("fit half (limits were chosen here)", ("fit",)),
        ("held out and blind", ("held out", "blind")),
    ):
        part = {name: result for name, result in results.items() if sides[name] in of}
        if part:
            show(part, title)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
