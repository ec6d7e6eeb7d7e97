"Zoom and click of the Layers view: 200 modules, 10,000 steps."

import time

import numpy as np
import xarray as xr

from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_layers import LayersView


def main(modules=200, n=10_000):
    rng = np.random.default_rng(0)
    table = xr.Dataset(
        {"absmax": (("step", "module"), np.exp(rng.normal(0, 0.3, (n, modules))).astype("f4"))},
        {"step": np.arange(n), "module": [f"blocks.{i}.mlp.fc1" for i in range(modules)]},
    )
    run = xr.DataTree.from_dict(
        {
            "/scalars": make_scalars({"loss": Samples(np.arange(n), 3 + rng.normal(0, 0.05, n))}),
            "/activations": table,
        }
    )
    state, _ = open_state(run)
    state.visible = "layers"
    view, times = LayersView(state), {"zoom": [], "click": []}
    for i in range(12):
        begin = time.perf_counter()
        state.x_range = (1000 + 100 * i, 7000 + 100 * i)
        times["zoom"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        view.picture.clicked = {"x": 3000.0 + i, "y": 10.0 + i, "n": i + 1}
        times["click"].append(time.perf_counter() - begin)
    print(
        f"{modules} modules x {n:,} steps: "
        + ", ".join(
            f"{k} {1e3 * np.median(v):.0f} ms median, {1e3 * max(v):.0f} slowest" for k, v in times.items()
        )
        + " (goal <= 150)"
    )
