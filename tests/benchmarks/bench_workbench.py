"First picture and zoom of the workbench on a run of a million steps, and twenty runs over each other."

import asyncio
import time

import numpy as np
import xarray as xr

from stabilitylab.plot.runs import runs_scene
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.tabs import Workbench


def long_run(n=1_000_000):
    rng, step = np.random.default_rng(0), np.arange(n)
    made = {
        "loss": 2 + 3 * np.exp(-step / 1e5) + 0.05 * rng.standard_normal(n),
        "grad_norm": np.exp(0.2 * rng.standard_normal(n)),
        "lr": 1e-3 * np.cos(step / n),
    }
    return xr.DataTree.from_dict({"/scalars": make_scalars({k: Samples(step, v) for k, v in made.items()})})


def taken(act):
    "Seconds that an act takes, by the clock and of the processor."
    clock, processor = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - clock, time.process_time() - processor


def told(zooms):
    "The times of zooms as words."
    clock, processor = 1e3 * np.array(zooms).T
    return (
        f"zoom {np.median(clock):.0f} ms median, {max(clock):.0f} ms slowest of {len(zooms)} (goal <= 150); "
        f"CPU {np.median(processor):.0f} ms median, {max(processor):.0f} slowest"
    )


async def measure(run):
    "Seconds of the first picture and of every zoom, in a running loop as in JupyterLab."
    start = time.perf_counter()
    bench = Workbench(run)
    first, zooms = time.perf_counter() - start, []
    while bench.state.busy:
        await asyncio.sleep(0.05)
    found = time.perf_counter() - start
    for i in range(15):
        zooms.append(taken(lambda i=i: bench.state.set_trait("x_range", (2e5 + 1e4 * i, 6e5 + 1e4 * i))))
    return first, found, zooms


def overlay(n_runs=20, n=50_000):
    "Seconds of the picture of many runs over each other, and the slowest of 15 zooms."
    rng, step = np.random.default_rng(0), np.arange(n)
    course = 2 + 3 * np.exp(-step / 1e4)
    runs = {
        f"run {i}": new_run(make_scalars({"loss": Samples(step, course + 0.05 * rng.standard_normal(n))}))
        for i in range(n_runs)
    }
    (first, _), zooms = taken(lambda: runs_scene(runs)), []
    for i in range(15):
        zooms.append(taken(lambda i=i: runs_scene(runs, (1e4 + 500 * i, 3e4 + 500 * i))))
    return first, zooms


def main():
    run = long_run()
    first, found, zooms = asyncio.run(measure(run))
    print("workbench, 1,000,000 steps x 3 series")
    print(f"  first picture {first:.2f} s (goal <= 1.5); findings beside it after {found:.1f} s")
    print("  " + told(zooms))
    first, zooms = overlay()
    print(f"20 runs x 50,000 steps over each other: {first:.2f} s (goal <= 2)")
    print("  " + told(zooms))


if __name__ == "__main__":
    main()
