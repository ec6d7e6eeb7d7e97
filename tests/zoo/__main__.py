"`make zoo`: records every row, scores cause and cure, writes the table; `confirm` reruns the cures."

import argparse
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import log, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.zoo.peers import ask, peer_summary, write_log
from tests.zoo.rows import ROWS, split
from tests.zoo.train import harm, train, with_cure

TABLE = Path(__file__).with_name("zoo.json")
SEEDS, T_95 = 4, 3.182  # seeds of a rerun, and Student's t of three degrees of freedom
LEAST = 0.02  # a smaller gain, as a share of the loss, is no cure
# what the answer said before causes had names: the first words of its sentence -> ids that it may stand for
SENTENCES = {
    "The learning rate is too high": ("rate_too_high", "no_warmup"),
    "The learning rate was raised": ("rate_raised",),
    "Gradients overflow in fp16": ("fp16_overflow",),
    "The task may be trivial": ("wrong_mask",),
    "Nothing reaches the weights": ("dead_network", "eps_too_large"),
    "The training data changed": ("data_shift",),
    "An exploding gradient took": ("no_clipping",),
    "The loss weighs tokens": ("token_imbalance",),
    "A fault of the machine": ("bit_flip",),
}


def _quiet() -> None:
    "One thread and no warnings, in every process."
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


def record(name: str, folder: Path, seed: int = 0) -> Path:
    "The record of a row, made where it is not there."
    path = Path(folder) / f"{name.replace(' ', '_')}_{seed}"
    if not path.exists():
        try:
            train(ROWS[name].recipe, seed, path=path)
        except RuntimeError:  # as of a processor without the kernel; half a record is none
            shutil.rmtree(path, ignore_errors=True)
            raise
    return path


def score(name: str, folder: Path, seed: int = 0, swap: bool = False) -> dict:
    "What the product says of a row, where asked with its swap test; `failed` where it can't be trained here."
    _quiet()
    try:
        path = record(name, folder, seed)
    except RuntimeError as error:
        return {"failed": str(error).split(". ")[0]}
    return _answer(name, path, swap)


def _answer(name: str, path: Path, swap: bool) -> dict:
    "The cause that is named for a record, its first three fixes, and whether both are right."
    from stabilitylab.detect.diagnose import diagnose
    from stabilitylab.detect.likely_cause import most_likely
    from stabilitylab.investigation.opening import open_recordings, with_swap_test
    from stabilitylab.trial.suggest import suggest

    recording = next(iter(open_recordings(str(path)).values()))
    findings = diagnose(recording)
    began = time.monotonic()
    findings = with_swap_test(recording, findings) if swap else findings
    likely = most_likely(findings)
    told = likely.to_dict() if likely else {}
    ids = (told["id"],) if told.get("id") else _old_ids(told.get("cause", ""))
    fixes = [s.name for s in suggest(findings, recording.run) if not s.is_control][:3]
    row, known = ROWS[name], stored().get(name, {})
    cures = [cure for cure, value in known.get("cures", {}).items() if value["confirmed"]]
    return {
        "cause": row.cause,
        "said": " ".join(ids) or told.get("cause", ""),
        "rivals": [rival.get("id", rival.get("cause")) for rival in told.get("rivals", [])],
        "fixes": fixes,
        "cause_first": row.cause in ids if row.cause else not ids,
        "cure_in_three": bool(set(fixes) & set(cures)) if cures else None,
        "is_quiet": not likely and not fixes,
        "swap": findings.attrs.get("swap", {}) | ({"seconds": time.monotonic() - began} if swap else {}),
        "expected": findings.attrs.get("evidence", {}).get("swap_seconds", (None,))[0],
        "kinds": [f"{f.kind}:{f.severity[0]}@{f.onset}" for f in findings],
    }


def _old_ids(cause: str) -> tuple[str, ...]:
    "The ids that a sentence without one may stand for."
    return next((ids for words, ids in SENTENCES.items() if cause.startswith(words)), ())


def stored() -> dict:
    "The stored table: name -> architecture, cause, cures, recipe."
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def _gain(recipe: object, name: str, base: list[float]) -> dict:
    "How much a cure lowers the held-out loss after the fault, in logarithms, with its interval."
    gains = [log(b / harm(recipe, train(with_cure(recipe, name), seed))) for seed, b in enumerate(base)]
    mean, half = float(np.mean(gains)), T_95 * float(np.std(gains, ddof=1)) / sqrt(len(gains))
    interval = [round(mean - half, 4), round(mean + half, 4)]
    return {"gain": round(mean, 4), "interval": interval, "confirmed": interval[0] > LEAST}


def confirm(name: str) -> dict:
    "The row of the table: cures that a plain rerun confirmed, and those that it did not."
    _quiet()
    row, recipe = ROWS[name], ROWS[name].recipe
    base = [harm(recipe, train(recipe, seed)) for seed in range(SEEDS)] if row.tried else []
    cures = {}
    for cure in row.tried:
        try:
            cures[cure] = _gain(recipe, cure, base)
        except TypeError:  # the architecture has no such option
            cures[cure] = {"gain": None, "interval": None, "confirmed": False}
    return {"arch": recipe.arch, "cause": row.cause, "cures": cures, "recipe": recipe.to_dict()}


def _each(names: list[str], work: object, workers: int) -> Iterator[tuple[str, dict]]:
    "(name, result) of each row, in processes of their own."
    with ProcessPoolExecutor(workers) as pool:
        yield from zip(names, pool.map(work, names), strict=True)


def summary(scores: dict[str, dict]) -> dict[str, str]:
    "Side of the split -> cause first, cure in the first three, false causes on healthy runs."
    sides, lines = split(), {}
    for side in ("fit", "held out", "blind"):
        mine = {name: row for name, row in scores.items() if sides[name] == side}
        failing = [row for row in mine.values() if row["cause"]]
        curable = [row for row in failing if row["cure_in_three"] is not None]
        healthy = [row for row in mine.values() if not row["cause"]]
        lines[side] = (
            f"cause first {sum(r['cause_first'] for r in failing)}/{len(failing)}, "
            f"cure in three {sum(r['cure_in_three'] for r in curable)}/{len(curable)}, "
            f"healthy not quiet {sum(not r['is_quiet'] for r in healthy)}/{len(healthy)}"
        )
    return lines


def _ask_peers(python: str | None, names: list[str], record_of: Callable[[str], Path]) -> dict:
    "Peer -> name of a row -> what it told of its log, with a line a peer printed; nothing without a Python."
    if not python:
        return {}
    with TemporaryDirectory() as folder:
        logs = [write_log(record_of(name), Path(folder) / f"{name}.csv") for name in names]
        answers = ask(python, logs)
    for line in peer_summary(answers, {name: ROWS[name].cause for name in names}):
        print(line)
    return {"peers": answers}


def main() -> int:
    "Score the zoo, or confirm its cures."
    parser = argparse.ArgumentParser("python -m tests.zoo", description=__doc__)
    parser.add_argument("command", nargs="?", default="score", choices=("score", "confirm"))
    parser.add_argument("names", nargs="*", help="rows; all where none is given")
    parser.add_argument("--folder", help="where the records are kept; default: a temporary folder")
    parser.add_argument(
        "--side", choices=("fit", "held out", "blind"), help="show the rows of this half only"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the runs; the rules were set on 0")
    parser.add_argument("--swap", action="store_true", help="with the swap test where it is cheap")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="also ask runmedic and trainscope, which it imports"
    )
    parser.add_argument("--out", default="zoo_scores.json", help="where the table of scores is written")
    args = parser.parse_args()
    names = args.names or list(ROWS)
    if args.command == "confirm":
        for name, row in _each(names, confirm, args.workers):
            table = {n: r for n, r in stored().items() if n in ROWS} | {name: row}
            TABLE.write_text(json.dumps({n: table[n] for n in ROWS if n in table}, indent=1) + "\n")
            print(name, {c: v["gain"] for c, v in row["cures"].items() if v["confirmed"]}, flush=True)
        return 0
    with TemporaryDirectory() as temporary:
        work = partial(score, folder=Path(args.folder or temporary), seed=args.seed, swap=args.swap)
        scores = {}
        for name, row in _each(names, work, args.workers):
            if "failed" in row:
                print(f"not trained here: {name}: {row['failed']}", flush=True)
                continue
            scores[name] = row
            if args.side in (None, split()[name]):
                mark = "ok  " if row["cause_first"] else "MISS"
                print(
                    f"{mark} {name:18} {row['cause']:22} said: {row['said'][:60]:60} {row['fixes']}",
                    flush=True,
                )
        made = partial(record, folder=work.keywords["folder"], seed=args.seed)
        answers = _ask_peers(args.peers, list(scores), made)
    Path(args.out).write_text(json.dumps(scores | answers, indent=1) + "\n")
    for side, line in summary(scores).items():
        print(f"{side}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
