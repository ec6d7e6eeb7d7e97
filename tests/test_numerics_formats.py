"Format functions against casts of ml_dtypes, numpy and torch; stochastic rounding and its standard error."

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from stabilitylab.numerics.formats import (
    NUMBER_FORMATS,
    _rounded,
    _rounded_bits,
    number_format,
    quantise,
    spacing,
    stochastic_round,
)
from stabilitylab.numerics.kernels import compile_c

CASTS = {
    "bf16": (ml_dtypes.bfloat16, torch.bfloat16),
    "fp16": (np.float16, torch.float16),
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, torch.float8_e5m2),
}


def every_value(name):
    "All numbers of a format as float32, NaNs and infinities with them."
    cast = np.dtype(CASTS[name][0])
    n = 1 << 8 * cast.itemsize
    return np.arange(n).astype(f"u{cast.itemsize}").view(cast).astype(np.float32)


def dense_sample():
    "Float32 bit patterns over the whole range, and each midpoint of bf16 and fp16 with its neighbours."
    bits = np.arange(0, 1 << 32, 2003, dtype=np.uint64).astype(np.uint32).view(np.float32)
    half = [v[:-1] / 2 + v[1:] / 2 for v in (np.unique(x[np.isfinite(x)]) for x in map(every_value, CASTS))]
    ties = np.concatenate(half).astype(np.float32)
    return np.concatenate(
        [bits, ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    )


def same(a, b):
    "Equal in value and in the sign of zero, NaN equal to NaN."
    a, b = np.asarray(a), np.asarray(b)
    return ((a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b)).all()


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
def test_quantise_is_the_cast(name):
    ours, (ml, th) = dense_sample(), CASTS[name]
    assert same(quantise(every_value(name), name), every_value(name))
    got = quantise(ours, name)
    assert same(got, ours.astype(ml).astype(np.float32))
    inside = (
        abs(ours) <= 464 if name == "fp8_e4m3" else np.full(ours.shape, True)
    )  # beyond it torch saturates at 448, ml_dtypes gives NaN
    assert same(got[inside], torch.tensor(ours).to(th).float().numpy()[inside])
    assert same(quantise(torch.tensor(ours), name).numpy(), got)


def test_float64_is_rounded_once():
    x = 1 + 1 / 256 + 2.0**-40  # float32 would take it to the tie, and the tie to 1
    assert (
        quantise([x], "bf16").tolist()
        == [1 + 1 / 128]
        == quantise(torch.tensor([x], dtype=torch.float64), "bf16").tolist()
    )


def test_tf32_against_exact_arithmetic():
    x = dense_sample()
    x = x[np.isfinite(x) & (abs(x) < 1e38)]
    unit = spacing(x, "tf32").astype(np.float64)
    assert same(quantise(x, "tf32"), np.copysign(np.rint(x / unit) * unit, x).astype(np.float32))


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_the_way_taken_on_a_gpu_gives_the_same(name):
    x, f = dense_sample(), number_format(name)
    t = torch.tensor(x[abs(x) <= 2.0**126])
    assert same(_rounded(t, f).numpy(), quantise(t, name).numpy())
    if f.exponent_bits == 8:
        assert same(_rounded_bits(torch.tensor(x), f).numpy(), quantise(x, name))


@pytest.mark.parametrize("name", CASTS)
def test_spacing_is_the_distance_of_the_next_number(name):
    v = every_value(name)
    v = np.unique(v[np.isfinite(v)])
    up = v[v >= 0]
    assert same(spacing(up[:-1], name), np.diff(up))
    f = number_format(name)
    assert (v.max(), up[1], v[np.searchsorted(v, 1.0) + 1] - 1) == (f.max, f.min_subnormal, f.eps)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
@pytest.mark.parametrize("torch_side", [False, True])
def test_stochastic_rounding_is_unbiased(name, torch_side):
    f, n = NUMBER_FORMATS[name], 1_000_000
    rng = torch.Generator().manual_seed(3) if torch_side else np.random.default_rng(3)
    for value in [1.001, -3.3, f.min_subnormal * 0.3, f.min_normal * 1.013]:
        x = np.full(n, value, np.float32)
        value = float(x[0])
        got = stochastic_round(torch.tensor(x) if torch_side else x, name, rng)
        got = np.asarray(got, np.float64)
        low = float(np.floor(value / (u := float(spacing([value], name)[0]))) * u)
        assert set(np.unique(got)) == {low, low + u}
        assert abs(got.mean() - value) < 4.5 * got.std() / n**0.5


@pytest.mark.parametrize("name", CASTS)
def test_stochastic_rounding_keeps_numbers_of_the_format(name):
    v = every_value(name)
    assert same(stochastic_round(v, name), v)
    assert same(stochastic_round(torch.tensor(v), name).numpy(), v)


def test_shapes_and_no_change_of_the_input():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)[:, ::2]
    before = x.copy()
    for f in NUMBER_FORMATS:
        assert (
            quantise(x, f).shape == stochastic_round(x, f).shape == x.shape
            and quantise(np.float32(1.7), f).shape == ()
        )
    assert same(x, before)
    t = torch.tensor(x, requires_grad=True).transpose(0, 2)
    for f in NUMBER_FORMATS:
        assert same(quantise(t, f).numpy(), quantise(x.T, f))


def test_a_user_without_a_home_takes_the_slower_way(monkeypatch):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert compile_c("int one(void) { return 1; }", "one") is None
