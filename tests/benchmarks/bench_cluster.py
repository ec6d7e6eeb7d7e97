"""A folder of runs diagnosed by one and by two warm workers, and a trial of short arms.

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
from stabilitylab.trial.settings import Recipe
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


def seconds_with(client, folder):
    "Seconds of a diagnosis of a folder: by the clock, of the processor of this process, and of each worker."
    before, here, begin = client.run(time.process_time), time.process_time(), time.perf_counter()
    diagnosed(folder, client)
    clock, here = time.perf_counter() - begin, time.process_time() - here
    after = client.run(time.process_time)
    return clock, here, [after[worker] - before[worker] for worker in before]


def print_ratios(folder, few, n_rounds):
    """One and two workers in turn, after a folder from which both import what they need.

    On processors that do nothing else the clock shows the larger of this process and the busiest worker, and
    their sum where nothing overlaps; on others the division of the work says what two workers are worth."""
    with (
        make_cluster("local:1") as single,
        make_cluster("local:2") as double,
        Client(single) as one,
        Client(double) as two,
    ):
        for client, n_workers in ((one, 1), (two, 2)):
            client.wait_for_workers(n_workers)
            assert len(client.ncores()) == n_workers
            diagnosed(few, client)
        for _ in range(n_rounds):
            (clock_one, here_one, (alone,)), (clock_two, here_two, both) = (
                seconds_with(client, folder) for client in (one, two)
            )
            print(
                f"clock {clock_one:.1f} and {clock_two:.1f} s: {clock_one / clock_two:.2f} times as fast;",
                end=" ",
            )
            print(f"processor, here {here_one:.1f} and {here_two:.1f} s, one worker {alone:.1f} s,", end=" ")
            print(
                f"two {both[0]:.1f} and {both[1]:.1f} s: the busier one {alone / max(both):.2f} times less,",
                end=" ",
            )
            print(f"{sum(both) / max(both):.2f} of their own sum; load {os.getloadavg()[0]:.0f}", flush=True)


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
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, n_runs in (("few", 4), ("many", options.runs)):
            (folder / part).mkdir()
            write_runs(folder / part, n_runs, options.steps)
        print(f"{options.runs} runs of {options.steps:,} steps, one and two workers in turn")
        print_ratios(folder / "many", folder / "few", options.rounds)
    print(f"four arms, two seeds, 30 steps: {trial_seconds():.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
