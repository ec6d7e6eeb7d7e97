"Text logs against a hand-written loop of one regular expression a line that takes out the same values."

import functools
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from stabilitylab.read.recognise import recognise

N = rb"([-+]?[\d.]+(?:[eE][-+]?\d+)?|nan|inf)"
LOOPS = {
    "megatron": re.compile(
        rb"iteration\s+(\d+)/.*? consumed samples:\s+"
        + N
        + rb" .*?\(ms\): "
        + N
        + rb" .*?learning rate: "
        + N
        + rb" .*?batch size:\s+"
        + N
        + rb" .*?lm loss: "
        + N
        + rb" .*?loss scale: "
        + N
        + rb" .*?grad norm: "
        + N
        + rb" .*?zeros: "
        + N
        + rb" .*?skipped iterations:\s+"
        + N
        + rb" .*?nan iterations:\s+"
        + N
    ),
    "nanogpt": re.compile(rb"iter (\d+): loss " + N + rb", time " + N + rb"ms, mfu " + N),
    "llmc_main": re.compile(rb"s:(\d+) trl:" + N + rb" lr:" + N + rb" norm:" + N),
}


def lines(name, n, rng):
    "`n` lines of a format, with noise in every number."
    loss, norm = 3 + rng.normal(0, 0.1, n), np.abs(rng.normal(0, 0.3, n))
    if name == "megatron":
        return "".join(
            f" [2025-04-18 16:{i // 60 % 60:02d}:{i % 60:02d}] iteration {i:8d}/  500000 |"
            f" consumed samples: {i * 512:12d} | elapsed time per iteration (ms): {300 + i % 50 / 7:.1f} |"
            f" learning rate: {1e-4 * (1 - i / 9e6):.6E} | global batch size:   512 |"
            f" lm loss: {loss[i]:.6E} | loss scale: 1.0 | grad norm: {norm[i]:.3f} | num zeros: 0.0 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |\n"
            for i in range(n)
        )
    if name == "nanogpt":
        return "".join(
            f"iter {i}: loss {loss[i]:.4f}, time {1090 + norm[i]:.2f}ms, mfu 0.34%\n" for i in range(n)
        )
    return "".join(f"s:{i} trl:{loss[i]:.4f} lr:0.000600 norm:{norm[i]:.2f}\n" for i in range(n))


def loop(path, shape):
    "The values of every line that matches, one line at a time."
    out = []
    with open(path, "rb") as f:
        for line in f:
            if m := shape.search(line):
                out.append((int(m[1]), *map(float, m.groups()[1:])))
    return out


def read(path):
    "What the library makes of the file."
    return recognise(path).read(path)


def main():
    rng = np.random.default_rng(0)
    print(
        f"{'format':10} {'MB':>5} {'loop MB/s':>10} {'ours MB/s':>10} {'ratio':>6}"
        "   (goal 3; medians of 3, interleaved)"
    )
    with tempfile.TemporaryDirectory() as d:
        for name, n in (("megatron", 400_000), ("nanogpt", 1_000_000), ("llmc_main", 1_000_000)):
            (path := Path(d) / "log").write_text(lines(name, n, rng))
            mb, times = path.stat().st_size / 1e6, {"loop": [], "ours": []}
            for _ in range(3):
                for key, f in (
                    ("loop", functools.partial(loop, path, LOOPS[name])),
                    ("ours", functools.partial(read, path)),
                ):
                    begin = time.process_time()
                    result = f()
                    times[key].append(time.process_time() - begin)
                    del result  # millions of objects kept alive would slow the next one
            assert recognise(path).name == name
            a, b = (statistics.median(times[k]) for k in ("loop", "ours"))
            print(f"{name:10} {mb:5.0f} {mb / a:10.0f} {mb / b:10.0f} {a / b:6.2f}")
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
