"Peak memory of reading a Megatron log of one gigabyte, in a process of its own."

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from .bench_read_text import lines

CHILD = """
import resource, sys, time
from stabilitylab.read.runs import read_log
begin = time.perf_counter(); run = read_log(sys.argv[1]); wall = time.perf_counter() - begin
print(run.sizes['step'], f'{wall:.1f}', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024)
"""


def shifted(text, by):
    "The same lines, counted on."
    return re.sub(rb"iteration +(\d+)", lambda m: b"iteration %8d" % (int(m[1]) + by), text)


def main(size=1e9, n=100_000):
    text = lines("megatron", n, np.random.default_rng(0)).encode()
    with tempfile.TemporaryDirectory() as d:
        with open(path := Path(d) / "train.log", "wb") as f:
            k = 0
            while f.tell() < size:
                f.write(shifted(text, k * n))
                k += 1
        steps, wall, peak = subprocess.run(
            [sys.executable, "-c", CHILD, str(path)], check=True, capture_output=True, text=True
        ).stdout.split()
        print(
            f"{path.stat().st_size / 1e9:.2f} GB, {int(steps):,} records: {float(wall):.1f} s, "
            f"peak memory {int(peak) / 1e9:.2f} GB (goal 1)"
        )
