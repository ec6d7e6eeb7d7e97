"Spoilt inputs for every reader; `python -m tests.fuzz.run [COUNT]` counts what was read, refused and wrong."

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.pickles import read_pickle
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.names.errors import InputError
from stabilitylab.read.base import to_dataset
from stabilitylab.read.recognise import recognise
from stabilitylab.read.runs import read_runs
from stabilitylab.report.terminal import run_json
from tests.fuzz import seeds

SLOWEST = 5.0  # seconds an input may take


def samples_of(path: Path) -> None:
    "A log as far as its series; what makes a table of them is the same for every format."
    recognise(path).read(path)


def read_one(path: Path) -> None:
    "A log as far as its table of series."
    chosen = recognise(path)
    to_dataset(chosen.read(path), str(path), chosen.name)


def tell_one(path: Path) -> None:
    "A log as far as the JSON of its findings."
    for run in read_runs(path).values():
        json.dumps(run_json(run, diagnose(run)), allow_nan=False)


def open_one(path: Path) -> None:
    "A checkpoint, with every value that it claims to hold."
    for tensor in open_checkpoint(path).tensors.values():
        if tensor.nbytes < 2**24:
            tensor.load()


def pickle_one(path: Path) -> None:
    "A pickle alone."
    read_pickle(path.read_bytes(), "fuzzed.pkl")


def inputs(count: int, seed: int) -> Iterator[tuple[str, Callable, str, bytes]]:
    "(kind, reader, file name, bytes), the cheap readers more often."
    chance = random.Random(seed)
    texts = [(f"{name}.log", data) for name, data in seeds.text_seeds().items()]
    tables = [(f"{n}.{'csv' if 'csv' in n else 'json'}", data) for n, data in seeds.table_seeds().items()]
    logs = texts + tables + list(seeds.binary_seeds().items())
    groups = [
        ("log", samples_of, logs, 50),
        ("table", read_one, logs, 4),
        ("diagnosis", tell_one, logs, 1),
        ("checkpoint", open_one, list(seeds.checkpoint_seeds().items()), 20),
        ("pickle", pickle_one, [("a.pkl", data) for data in seeds.pickle_seeds()], 25),
    ]
    weights = [weight for *_, weight in groups]
    for _ in range(count):
        kind, reader, good, _ = chance.choices(groups, weights)[0]
        name, data = chance.choice(good)
        yield kind, reader, name, seeds.spoil(data, chance)


def fuzz(
    count: int,  # inputs
    seed: int = 0,  # of the random changes
    keep: Path | None = None,  # folder for the inputs that went wrong
    seconds: float = float("inf"),  # after which it ends, whatever the count
) -> Counter:  # (kind, outcome) -> how often; an outcome other than 'read' and 'refused' is a fault
    "Spoilt inputs, one after the other in this process."
    outcomes, begin = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (kind, reader, name, data) in enumerate(inputs(count, seed)):
            path = Path(folder) / name
            path.write_bytes(data)
            outcome = _outcome(reader, path)
            outcomes[kind, outcome] += 1
            if keep and outcome not in ("read", "refused"):
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{seed}-{i}-{name}").write_bytes(data)
            path.unlink()
            if time.monotonic() - begin > seconds:
                break
    return outcomes


def _outcome(reader: Callable, path: Path) -> str:
    "What became of one input."
    begin = time.process_time()
    try:
        reader(path)
        told = "read"
    except InputError as e:
        told = _of_refusal(str(e))
    except Exception as e:
        last = e.__traceback__
        while last.tb_next:
            last = last.tb_next
        place = f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}"
        told = f"{type(e).__name__} at {place}: {str(e)[:80]}"
    took = time.process_time() - begin
    return f"took {took:.0f} s" if took > SLOWEST else told


def _of_refusal(text: str) -> str:
    "A refusal is one line; one that only passes on the fault of a reader counts as that fault."
    if len(text.splitlines()) > 1 or not text.isprintable():
        return "a message that is not one line"
    return (
        f"fault told as refusal: {text.split('could not be read: ')[1][:90]}"
        if "could not be read: " in text
        else "refused"
    )


def main() -> int:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    outcomes = fuzz(args.count, args.seed, args.keep, args.seconds)
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{count:8,} {kind:10} {outcome}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{outcomes.total():8,} inputs, largest memory {memory:.2f} GB")
    return int(memory > 1 or any(outcome not in ("read", "refused") for _, outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
