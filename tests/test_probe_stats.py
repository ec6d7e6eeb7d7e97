"Every sum equals a slow float64 twin, with and without the compiled kernel."

import numpy as np
import pytest
import torch

from stabilitylab.probe import stats
from stabilitylab.probe.detail import _sorted_bins
from stabilitylab.probe.stats import (
    AdamRule,
    _adam_torch,
    _add_torch,
    adam_sums,
    add_sums,
    join_pieces,
    statistics,
    whole_rows,
)

NAN, INF = float("nan"), float("inf")
SHAPES = [(0,), (1,), (15,), (16,), (17,), (3, 5), (70000,), (2, 20000), (4, 3, 33)]


def twin(x):
    "The statistics in numpy, float64."
    a = x.detach().to(torch.float64).numpy().ravel()
    f = a[np.isfinite(a)]
    if not f.size:
        return dict.fromkeys(("absmax", "rms", "mean", "std"), np.nan) | {"nonfinite_count": a.size or np.nan}
    return {
        "absmax": np.abs(f).max(),
        "rms": np.sqrt((f**2).mean()),
        "mean": f.mean(),
        "std": f.std(),
        "nonfinite_count": a.size - f.size,
    }


def check(x):
    for add in (add_sums, _add_torch):
        out = torch.zeros(5, dtype=torch.float64)
        add(x, out)
        for k, want in twin(x).items():
            np.testing.assert_allclose(
                statistics(out.numpy())[k],
                want,
                rtol=1e-6,
                atol=1e-300 if k != "mean" and k != "std" else 1e-6 * abs(out[3].item()),
                err_msg=f"{add.__name__} {k}",
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_equal_the_twin(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    check(x)
    if x.numel() > 3:
        x.view(-1)[[0, 1, -1]] = torch.tensor([NAN, INF, -INF], dtype=dtype)
        check(x)
    check(torch.full_like(x, NAN))
    check(torch.full_like(x, 1e-40))
    check(torch.full_like(x, -3e38) if dtype in (torch.float32, torch.bfloat16) else x)


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


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_one_pass_equals_what_the_optimizer_did(cls, amsgrad):
    torch.manual_seed(1)
    w = torch.nn.Parameter(torch.randn(301, 43))
    opt = cls([w], lr=3e-3, weight_decay=0.1 if cls is torch.optim.AdamW else 0.0, eps=1e-3, amsgrad=amsgrad)
    for i in range(4):
        before = w.detach().clone()
        w.grad = torch.randn_like(w) * 10.0**-i
        opt.step()
    s, g = opt.state[w], w.grad.double()
    args = (
        w.grad,
        w.detach(),
        s["exp_avg"],
        s["exp_avg_sq"],
        s.get("max_exp_avg_sq"),
        AdamRule(s["step"], 3e-3, (0.9, 0.999), 1e-3, opt.param_groups[0]["weight_decay"]),
    )
    v = s["exp_avg_sq"].double() / (1 - 0.999**4)
    top = s.get("max_exp_avg_sq", s["exp_avg_sq"]).double() / (1 - 0.999**4)
    want = [
        g.numel(),
        g.square().sum(),
        g.abs().max(),
        0,
        w.double().square().sum(),
        w.abs().max(),
        0,
        0,
        (w.detach().double() - before.double()).square().sum(),
        (g.square() / v.clamp_min(1e-6)).sum(),
        (g.abs() < 1e-3).sum(),
        (top.sqrt() < 1e-3).sum(),
    ]
    for f in (adam_sums, _adam_torch):
        np.testing.assert_allclose(
            f(*args).numpy(), [float(torch.as_tensor(x).detach()) for x in want], rtol=2e-4
        )


def test_non_finite_gradient_and_state_are_counted():
    g, w, m, v = torch.randn(4, 5000)
    g[3], w[1], m[2], v[7] = NAN, INF, NAN, INF
    v = v.abs()
    for f in (adam_sums, _adam_torch):
        out = f(g, w, m, v, None, AdamRule(3, 1e-3, (0.9, 0.95), 1e-8))
        assert out[[3, 6, 7]].tolist() == [1, 1, 2] and torch.isfinite(out).all()


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("STABILITYLAB_KERNEL", "0")
    stats.kernel.cache_clear()
    assert stats.kernel() is None
    check(torch.randn(100))
    stats.kernel.cache_clear()


def test_exponents_sorted_are_exponents_counted():
    "What a GPU takes under `use_deterministic_algorithms`, where its histogram raises."
    exponent = torch.randint(0, 256, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    exponent[:9] = torch.tensor([0] * 5 + [255] * 4)
    for part in (exponent, exponent[:0], exponent[:1]):
        assert torch.equal(_sorted_bins(part), torch.bincount(part, minlength=256))


def test_rows_in_pieces_join_to_the_rows_of_whole_tensors():
    pieces = torch.tensor([[[3.0, 6, 14, 3, 0], [2, -9, 41, 5, 1]]], dtype=torch.float64)
    assert join_pieces(pieces).tolist() == [[5, -3, 55, 5, 1]]
    step = torch.arange(24.0, dtype=torch.float64).reshape(2, 12)
    whole = whole_rows({0: step, 1: pieces[0, 0]})
    assert whole[0][[0, 2, 5, 11]].tolist() == [12, 14, 17, 34] and whole[1] is not None
    assert whole[1].shape == (5,)
