"""A folder of runs diagnosed by one process and by one and two warm workers, and a trial of short arms.

Goal: two workers at least 1.7 times as fast as one on work of a minute."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from distributed import Client

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.read.runs import read_runs
from stabilitylab.run.cluster import make_cluster, map_on
from stabilitylab.trial.recipe import Recipe
from stabilitylab.trial.trial import Trial


def write_runs(folder, n_runs, n_steps):
    "Logs of healthy runs."
    for number in range(n_runs):
        generator = np.random.default_rng(number)
        loss = 3 + 4 * np.exp(-np.arange(n_steps) / 500) + generator.normal(0, 0.05, n_steps)
        lines = [
            f"iter {step}: loss {value:.4f}, time 101.25ms, mfu 30.1%\n" for step, value in enumerate(loss)
        ]
        (Path(folder) / f"run-{number}.log").write_text("".join(lines))


def diagnosed(folder, client=None):
    "Findings of every run."
    runs = read_runs(folder, client=client)
    return dict(zip(runs, map_on(client, diagnose, list(runs.values())), strict=True))


def seconds_with(folder, n_workers):
    """Seconds of the second of two diagnoses of a folder on new workers: the first one imports.

    By the clock, and of the processor: of this process, and of the busiest worker. On processors that do
    nothing else the clock shows at least the larger of both, and their sum where nothing overlaps."""
    with make_cluster(f"local:{n_workers}") as cluster, Client(cluster) as client:
        list(map_on(client, abs, range(8 * n_workers)))
        diagnosed(folder / "few", client)
        before, here, begin = client.run(time.process_time), time.process_time(), time.perf_counter()
        diagnosed(folder / "many", client)
        clock, here = time.perf_counter() - begin, time.process_time() - here
        after = client.run(time.process_time)
        return clock, here, max(after[worker] - before[worker] for worker in before)


def trial_seconds():
    "Seconds of four arms with two seeds each, 30 steps: mostly what begins an arm."
    start = Recipe(d_model=64, n_layer=4, seq=16, batch=4, steps=100).start
    begin = time.perf_counter()
    Trial(start, ["lower_lr:factor=0.3", "placebo", "lower_lr:factor=0.1"], 30, 2).run(progress=False)
    return time.perf_counter() - begin


def main(argv=()):
    "Print the figures."
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--runs", type=int, default=60)
    arguments.add_argument("--steps", type=int, default=100_000)
    options = arguments.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, n_runs in (("few", 4), ("many", options.runs)):
            (folder / part).mkdir()
            write_runs(folder / part, n_runs, options.steps)
        begin = time.perf_counter()
        diagnosed(folder / "many")
        here = time.perf_counter() - begin
        (one, here_one, busiest_one), (two, here_two, busiest_two) = (
            seconds_with(folder, n_workers) for n_workers in (1, 2)
        )
    load = os.getloadavg()[0]
    print(f"{options.runs} runs of {options.steps:,} steps, load {load:.1f}: this process {here:.1f} s,")
    print(f"one worker {one:.1f} s, two {two:.1f} s: {one / two:.2f} and {here / two:.2f} times as fast")
    alone, workers = (here_one + busiest_one) / (here_two + busiest_two), busiest_one / busiest_two
    print(f"processor, one and two workers: here {here_one:.1f} and {here_two:.1f} s, ", end="")
    print(f"busiest worker {busiest_one:.1f} and {busiest_two:.1f} s: {workers:.2f} times as fast,")
    print(f"{alone:.2f} with this process if nothing overlaps")
    print(f"four arms, two seeds, 30 steps: {trial_seconds():.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
