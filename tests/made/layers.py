"Records of real runs with changes drawn from a seed: a part is missing, grows, vanishes or is not finite."

import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import xarray as xr

from stabilitylab.cases.registry import sample
from stabilitylab.investigation.opening import open_recordings
from tests.zoo.pack import RECORDS

CHANGES = 144  # seeds 0 to 143
BASES = ("lm_high_lr", "gpt_output", "moe_cold", "conv_bf16", "lstm_moments", "rnn")


@cache
def base(name: str) -> xr.DataTree:
    "The record of one run, in memory."
    with TemporaryDirectory() as folder:
        path = Path(folder)
        if name == "lm_high_lr":
            path = Path(sample(name))
        else:
            with tarfile.open(RECORDS / f"{name}.tar.xz") as archive:
                archive.extractall(path, filter="data")
        (recording,) = open_recordings(str(path)).values()
        run = recording.run.load()
    run.attrs.pop("source", None)
    return run


def _change(rng: np.random.Generator, value: np.ndarray, kind: str) -> np.ndarray:
    "Values, (steps, ...), of which some columns, or all, change from a step on."
    value = value.astype(float)
    rows = value[int(rng.integers(0, len(value))) :]
    chosen = rng.choice(value.shape[1], size=int(rng.integers(1, 4))) if value.ndim > 1 else slice(None)
    where = (slice(None), chosen) if value.ndim > 1 and rng.random() < 0.7 else (slice(None),)
    growth = np.exp(np.linspace(0, rng.choice([2, 8, 40]), len(rows))).reshape(-1, *[1] * (value.ndim - 1))
    match kind:
        case "grows":
            rows[where] *= growth
        case "jumps":
            rows[where] *= 10.0 ** rng.choice([-30, -6, -2, 1, 3, 30])
        case "once":
            rows[:1] *= 1e4
        case "zero" | "one" | "nan":
            rows[where] = {"zero": 0, "one": 1, "nan": np.nan}[kind]
    return value


KINDS = ("grows", "jumps", "zero", "one", "nan", "once") * 3 + ("no variable", "no step", "few steps")
# variables that the detectors read most, drawn four times as often as the others
READ = [
    "absmax",
    "in_absmax",
    "nonfinite_count",
    "in_nonfinite_count",
    "grad_nonfinite_count",
    "rms",
    "grad_norm",
    "weight_norm",
    "update_norm",
    "update_ratio",
    "update_rms",
    "below_eps_frac",
    "lost_frac",
    "zero_frac",
    "channel_ratio",
    "loss",
    "lr",
    "attn_logit_max",
    "attn_entropy",
    "sink_score",
    "router_max_share",
]


def changed(seed: int) -> xr.DataTree:
    "The record of one seed."
    rng = np.random.default_rng(seed)
    run = base(BASES[seed % len(BASES)]).copy()
    for _ in range(int(rng.integers(2, 6))):
        group = rng.choice([name for name in run.children if run[name].data_vars and name != "events"])
        data = run[group].to_dataset()
        names = sorted(map(str, data.data_vars))
        often = [name for name in names if name in READ]
        variable = rng.choice(often if often and rng.random() < 0.8 else names)
        kind = rng.choice(KINDS)
        if kind == "no variable":
            data = data.drop_vars(variable)
        elif kind in ("no step", "few steps"):
            data = data.isel(step=slice(0 if kind == "no step" else int(rng.choice([1, 2, 12, 60]))))
        elif (
            data[variable].dims[:1] == ("step",) and data.sizes["step"] and data[variable].dtype.kind in "fiu"
        ):
            data = data.assign(
                {variable: data[variable].copy(data=_change(rng, data[variable].values, kind))}
            )
        run[group] = xr.DataTree(data)
    return run
