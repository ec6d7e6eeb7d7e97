"Every costly statistic equals a slow float64 twin, with and without the compiled kernel."

import ml_dtypes
import numpy as np
import pytest
import torch

from stabilitylab.probe.detail import (
    EXPONENTS,
    RANGES,
    _detail_torch,
    channel_maxima,
    count_lost_updates,
    detail_statistics,
    merge_details,
    tensor_detail,
    top_channel,
)

NAN, INF = float("nan"), float("inf")
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
SHAPES = [(), (0,), (1,), (15,), (17,), (3, 5), (70000,), (2, 66000), (4, 3, 33)]


def twin(x):
    "The statistics in numpy, float64; range by casting."
    a = x.detach().float().numpy().ravel()
    f = a[np.isfinite(a)]
    d = f.astype(np.float64)
    with np.errstate(all="ignore"):
        c = d - d.mean() if d.size else d
        kurtosis = (c**4).mean() / (c**2).mean() ** 2 if d.size and (c**2).mean() > 0 else np.nan
        e = np.frexp(f)[1] - 1 if f.size else np.zeros(0, int)
        e = np.where((f == 0) | (e < -126), -127, e)
        e = np.concatenate([e, np.full(a.size - f.size, 128)])
        cast = {n: f.astype(t).astype(np.float32) for n, t in TYPES.items()}
        return {
            "kurtosis": kurtosis,
            "zero_frac": (f == 0).mean() if f.size else np.nan,
            "exponents": np.array([(e == k).sum() for k in EXPONENTS]) / (a.size or np.nan),
            "overflow_frac": [(~np.isfinite(cast[n])).mean() if f.size else np.nan for n in RANGES],
            "underflow_frac": [
                (cast[n] == 0)[f != 0].mean() if (f != 0).any() else 0.0 if f.size else np.nan for n in RANGES
            ],
        }


def check(x):
    want = twin(x)
    for f in (tensor_detail, _detail_torch):
        got = detail_statistics(f(x).numpy())
        for k in want:
            np.testing.assert_allclose(got[k], want[k], rtol=1e-6, atol=1e-12, err_msg=f"{f.__name__} {k}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_details_equal_the_twin(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp2(torch.randint(-40, 20, shape).float())).to(dtype)
    check(x)
    check(torch.randn(shape).to(dtype) + 3)
    if x.numel() > 3:
        x.view(-1)[[0, 1, -1]] = torch.tensor([NAN, INF, -INF], dtype=dtype)
        check(x)
    check(torch.full_like(x, NAN))
    check(torch.zeros_like(x))
    check(torch.full_like(x, INF))
    if x.numel() > 3 and dtype != torch.float16:
        x = torch.randn(shape) * 1e-40
        check(x.to(dtype))
        check((torch.randn(shape).clamp(-3, 3) * 1e38).to(dtype))


def test_edges_of_every_format():
    edges = torch.tensor(
        [
            464.0,
            464.001,
            448.0,
            65504.0,
            65519.99,
            65520.0,
            61439.9,
            61440.0,
            2.0**-25,
            2.0**-25 * 1.001,
            2.0**-10,
            2.0**-17,
            2.0**-133,
            2.0**-134,
            3.3961775e38,
            3.396e38,
            1e-45,
            0.0,
        ]
    )
    for x in edges:
        check(x[None])
        check(-x[None])


def test_views_that_are_not_contiguous():
    x = torch.randn(6, 7, 24)
    for view in (
        x.transpose(0, 2),
        x[..., ::2],
        x[:, 2:5],
        x[..., 8:16],
        x.unflatten(-1, (4, 3, 2))[..., 1, :],
        x[0, 0, 0].expand(5, 5),
        x[::2],
        x.mT,
    ):
        check(view)


def test_merged_pieces_are_the_whole():
    torch.manual_seed(1)
    x = torch.randn(1000) * torch.linspace(0.1, 9, 1000) + torch.linspace(-50, 50, 1000)
    x[3] = NAN
    got, want = (
        detail_statistics(
            merge_details([tensor_detail(p).numpy() for p in (x[:10], x[10:10], x[10:600], x[600:])])
        ),
        twin(x),
    )
    for k in want:
        np.testing.assert_allclose(got[k], want[k], rtol=1e-6, err_msg=k)


def test_channels_and_lost_updates():
    torch.manual_seed(2)
    x = torch.randn(3, 7, 11)
    x[0, 0, 4] = -99
    x[1, 1, 5] = NAN
    a = np.abs(np.nan_to_num(x.double().numpy())).reshape(-1, 11).max(0)
    np.testing.assert_allclose(top_channel(channel_maxima(x)).numpy(), [99, np.sort(a)[5], 4], rtol=1e-6)
    w, u = torch.randn(5000), torch.randn(5000) * torch.exp2(-torch.rand(5000) * 16)
    u[::7] = 0
    b = w.numpy().astype(ml_dtypes.bfloat16)
    lost = (
        (b.astype(np.float64) - u.double().numpy()).astype(np.float32).astype(ml_dtypes.bfloat16) == b
    ) & (u.numpy() != 0)
    assert count_lost_updates(w, u).tolist() == [(u != 0).sum().item(), lost.sum()] and lost.sum() > 100
