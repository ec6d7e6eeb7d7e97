"The lattice test on full series printed with few decimals, and on series that went through bf16 or fp16."

import numpy as np
import pytest

from stabilitylab.numerics.formats import lattice, quantise


def loss(seed, n):
    "A made loss curve in float32: a power law with noise, its level, length and noise drawn from `seed`."
    rng = np.random.default_rng(seed)
    t = np.arange(1, n + 1)
    return (
        rng.uniform(0.5, 4)
        + rng.uniform(0.5, 8) * t ** -rng.uniform(0.1, 0.6)
        + rng.normal(size=n) * rng.choice([0.01, 0.03, 0.1])
    ).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("decimals", [None, 3, 4, 5, 6])
def test_no_false_positive_on_float32(decimals):
    series = {seed: loss(seed, 50 + seed % 500).astype(float) for seed in range(1000)}
    assert [
        s for s, x in series.items() if lattice(x if decimals is None else np.round(x, decimals)).fmt
    ] == []


def test_counts_are_no_lattice():
    assert lattice(524288 * np.arange(1.0, 200)).fmt is None and lattice(2.0 ** np.arange(5, 17)).fmt is None
    assert lattice([]).n_values == 0 and lattice([np.nan, np.inf]).fmt is None


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
@pytest.mark.parametrize("decimals", [None, 4, 6])
def test_every_rounded_series_is_found(fmt, decimals):
    missed = []
    for s in range(200):
        x = quantise(loss(s, 50 + s), fmt).astype(float)
        if decimals:
            x = np.array([float(f"{v:.{decimals}f}") for v in x])
        if lattice(x).fmt != fmt:
            missed.append((s, len(np.unique(x)), lattice(x)))
    assert not missed, (len(missed), missed[:3])
