"""`python -m tests.scale [NAME ...] [--share S]`: large inputs, each in a process of its own.

The files are made in a temporary folder, one subject after the other, and removed. `--share 0.1` makes them a
tenth as large; what the disk cannot hold is made smaller, and the line says so.
"""

import argparse
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

GIGABYTE = 10**9
N_TENSORS, CHECKPOINT_BYTES = 150_000, 20 * GIGABYTE


LINES: dict[str, Callable[[int], str]] = {  # name of a log -> the text of one of its records
    "train.log": lambda i: f"iter {i}: loss {2 + 1 / (1 + i):.4f}, time 92.59ms, mfu 0.34%\n",
    "metrics.csv": lambda i: f"{i},{2 + 1 / (1 + i):.4f},0.0003\n",
    "metrics.jsonl": lambda i: f'{{"step": {i}, "loss": {2 + 1 / (1 + i):.4f}, "lr": 0.0003}}\n',
}
HEADS = {"metrics.csv": "step,loss,lr\n"}


def make_log(folder: Path, share: float, name: str = "train.log") -> str:
    "A log of nanoGPT, or the same as a table, 10 GB at the full share."
    wanted = int(10 * GIGABYTE * share)
    size = min(wanted, int(0.6 * shutil.disk_usage(folder).free))
    step, block = 0, 100_000
    with open(folder / name, "w") as file:
        file.write(HEADS.get(name, ""))
        while file.tell() < size:
            file.write("".join(map(LINES[name], range(step, step + block))))
            step += block
    return f"{size / GIGABYTE:.2f} GB, {step:,} records"


def read_log(folder: Path) -> str:
    "Its findings."
    from stabilitylab.detect.diagnose import diagnose
    from stabilitylab.read.runs import read_runs

    (run,) = read_runs(next(folder.iterdir())).values()
    return f"{run['scalars'].sizes['step']:,} steps, {len(diagnose(run))} findings"


def make_record(folder: Path, share: float) -> str:
    "A record of three series, 5,000,000 steps at the full share."
    import numpy as np

    from stabilitylab.run.record import new_run, save_run
    from stabilitylab.run.scalars import Samples, make_scalars

    n = int(5_000_000 * share)
    step, noise = np.arange(n), np.random.default_rng(0).normal(0, 0.02, (3, n))
    levels = {"loss": 2 + 3 / (1 + step / 1000), "grad_norm": np.ones(n), "lr": np.full(n, 3e-4)}
    values = zip(levels.items(), noise, strict=True)
    series = {name: Samples(step, level + row * (name != "lr")) for (name, level), row in values}
    save_run(new_run(make_scalars(series)), folder / "run")
    return f"{n:,} steps x 3 series"


def read_record(folder: Path) -> str:
    "Its findings."
    from stabilitylab.detect.diagnose import diagnose
    from stabilitylab.run.record import open_run

    return f"{len(diagnose(open_run(folder / 'run')))} findings"


def make_checkpoint(folder: Path, share: float) -> str:
    "A sparse safetensors file of float32 zeros, 150,000 tensors and 20 GB at the full share."
    n = int(N_TENSORS * share)
    each = CHECKPOINT_BYTES // N_TENSORS // 4 * 4
    header = {
        f"model.layers.{i // 8}.{i % 8}.weight": {
            "dtype": "F32", "shape": [each // 4], "data_offsets": [i * each, (i + 1) * each]
        }
        for i in range(n)
    }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + n * each)
    return f"{n:,} tensors, {n * each / GIGABYTE:.1f} GB (sparse)"


def read_checkpoint(folder: Path) -> str:
    "Its statistics."
    from stabilitylab.checkpoint.scan import scan_checkpoint

    table = scan_checkpoint(folder / "model.safetensors")
    return f"{len(table):,} rows"


def make_runs(folder: Path, share: float) -> str:
    "A folder of logs, 2,000 runs of 200 records at the full share."
    n = int(2000 * share)
    for run in range(n):
        lines = (
            f"iter {i}: loss {2 + 1 / (1 + i) + run / n:.4f}, time 92.59ms, mfu 0.34%\n" for i in range(200)
        )
        (folder / f"run-{run:04d}").mkdir()
        (folder / f"run-{run:04d}" / "train.log").write_text("".join(lines))
    return f"{n:,} runs of 200 records"


def read_runs_of(folder: Path) -> str:
    "The findings of each run."
    from stabilitylab.detect.diagnose import diagnose
    from stabilitylab.read.runs import read_runs

    runs = read_runs(folder)
    return f"{len(runs):,} runs, {sum(len(diagnose(run)) for run in runs.values())} findings"


SUBJECTS: dict[str, tuple[Callable[[Path, float], str], Callable[[Path], str], float]] = {
    "checkpoint": (make_checkpoint, read_checkpoint, 0.512),  # what makes it, what reads it, goal in GB
    "runs": (make_runs, read_runs_of, 2.0),
    "record": (make_record, read_record, 2.0),
    "log": (make_log, read_log, 2.0),
    "table": (partial(make_log, name="metrics.csv"), read_log, 2.0),
    "lines": (partial(make_log, name="metrics.jsonl"), read_log, 2.0),
}


def child(name: str, folder: Path) -> None:
    "Opens a subject; prints what came, what it cost and the largest resident memory."
    limit = int(0.6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    # what needs more ends here, and no other program; files that are mapped do not count
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    begin, processor = time.perf_counter(), time.process_time()
    words = SUBJECTS[name][1](folder)
    clock, spent = time.perf_counter() - begin, time.process_time() - processor
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{words}; {clock:.0f} s ({spent:.0f} s of the processor), largest memory {memory:.2f} GB")


def main() -> None:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SUBJECTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the full size")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.names[0], Path(args.child))
        return
    for name in args.names or SUBJECTS:
        make, _, goal = SUBJECTS[name]
        with tempfile.TemporaryDirectory(prefix="stabilitylab-scale-") as folder:
            print(f"{name}: {make(Path(folder), args.share)}", flush=True)
            command = [sys.executable, "-m", "tests.scale", name, "--child", folder]
            done = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": os.getcwd()})
            end = f"; it ended with {done.returncode}, missed" if done.returncode else ""
            print(f"  goal {goal} GB{end}", flush=True)


if __name__ == "__main__":
    main()
