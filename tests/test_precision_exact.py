"Published constants and closed forms of 16-bit training: exact oracles, slow twins, and two robust runs."

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stabilitylab.detect.skipping import read_loss_scale
from stabilitylab.numerics.formats import debias, lattice, quantise, stochastic_round
from stabilitylab.numerics.rounding.attention_range import (
    Scaler,
    attention_scale_overflow,
    distinct_positions,
    find_scale_cause,
    loss_rounding,
    simulate_loss_scale,
)
from stabilitylab.numerics.rounding.loss_cast import (
    adam_eps,
    decay_holds,
    find_loss_cast,
    lost_updates,
    sum_limit,
)

MEMO = "1.6562 1.6641 1.6719 1.6797 1.6875 1.6953 1.7031 1.7109 1.7188 1.7266 1.7344"


def test_eleven_values_are_every_bf16_number_of_the_range():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    inside = np.unique(every[(every >= 1.65625) & (every <= 1.734375)].numpy())
    assert (
        " ".join(f"{v:.4f}" for v in inside) == MEMO and lattice(np.array(MEMO.split(), float)).fmt == "bf16"
    )


def test_a_few_large_entries_do_not_hide_that_epsilon_dominates_the_others():
    g = np.r_[np.zeros(50), np.full(60, 1e-10), np.full(40, 1e-4)]
    assert adam_eps(g).regime == "dominates" and adam_eps(g).ratio > 1000 and adam_eps(g).below == 0.6
    assert adam_eps(np.where(g < 1e-8, 0, g))[1:] == (0.0, 1e-8, "no effect", "leave eps as it is")


@pytest.mark.parametrize("dtype,fmt", [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_lost_updates_against_a_torch_loop(dtype, fmt):
    g = torch.Generator().manual_seed(0)
    w, u = torch.randn(300, generator=g).to(dtype), 1e-3 * torch.randn(300, generator=g)
    u[:20] = 0
    lost = [float((a.float() + b).to(dtype)) == float(a) for a, b in zip(w, u, strict=False) if b != 0]
    assert lost_updates({"w": w}, {"w": u}, fmt).lost["w"] == pytest.approx(np.mean(lost))


def test_sums_and_decays_against_torch():
    for dtype, fmt, stop in ((torch.bfloat16, "bf16", 256), (torch.float16, "fp16", 2048)):
        x = torch.zeros((), dtype=dtype)
        for _ in range(5000):
            x += 1
        assert x.item() == stop == sum_limit(1, fmt)
    v = torch.arange(128, 256).to(torch.bfloat16)
    assert all(
        decay_holds(b, "bf16") == ((v.double() * b).to(torch.bfloat16) == v).double().mean().item()
        for b in (0.9, 0.95, 0.99, 0.999)
    )
    assert [float(torch.tensor(b).bfloat16()) for b in (0.9, 0.95, 0.99, 0.999)] == [
        float(quantise(b, "bf16")) for b in (0.9, 0.95, 0.99, 0.999)
    ]


def test_products_inside_and_outside_against_fp16_tensors():
    for a in (22.0, 23.0):
        q = torch.full((1, 128), a, dtype=torch.float16)
        outside, inside = (q @ q.T), (q * 128**-0.25) @ (q * 128**-0.25).T
        found = attention_scale_overflow(q, q)
        assert bool(found.outside) == bool(outside.isinf().any()) and bool(found.inside) == bool(
            inside.isinf().any()
        )
        assert float(inside) == pytest.approx(found.logit_max, rel=2e-3)


def test_fp16_adam_state_makes_untouched_rows_nan():
    emb = torch.nn.Parameter(torch.ones(10, 4, dtype=torch.float16))
    for eps, share in ((1e-8, 0.8), (1e-7, 0.0)):
        g = torch.zeros_like(emb)
        g[:2] = 1e-1
        m, v = 0.1 * g, 0.001 * g * g
        update = m / (v.sqrt() + torch.tensor(eps, dtype=torch.float16))
        assert update.isnan().any(1).float().mean().item() == pytest.approx(share)
        assert (adam_eps(g, eps, "fp16").regime == "zero") == bool(share)


def test_positions_against_torch():
    assert [len(torch.arange(n).to(torch.bfloat16).unique()) for n in (256, 1024, 8192)] == [
        distinct_positions(n) for n in (256, 1024, 8192)
    ] and distinct_positions(8192) == 897


def test_loss_rounding_grows_with_a_shift():
    torch.manual_seed(0)
    x, y = torch.randn(2000, 500), torch.randint(500, (2000,))
    errors = [loss_rounding(x + s, y).mean_error["cross-entropy"] for s in (0, 50, 100, 200)]
    assert errors == sorted(errors) and errors[0] < 0.03 and 0.2 < errors[3] < 0.6


def test_scale_against_torch_grad_scaler():
    rng = np.random.default_rng(0)
    bad = rng.random(300) < 0.05
    p = torch.nn.Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=7)
    ours, seen = simulate_loss_scale(np.where(bad, np.inf, 0.0), Scaler(2.0**16, 7))[0], []
    for b in bad:
        seen.append(scaler.get_scale())
        scaler.scale(p.sum()).backward()
        if b:
            p.grad.fill_(float("inf"))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert np.array_equal(ours, seen)


def test_history_never_calls_a_sawtooth_a_collapse():
    rng = np.random.default_rng(1)
    for _ in range(50):
        g = np.full(2000, 1e-4)
        g[rng.choice(np.arange(100, 2000), 5, replace=False)] = np.inf
        told = read_loss_scale(simulate_loss_scale(g)[0], g)
        assert told.verdict in ("sawtooth",) or told.most_within >= 4


def test_cast_is_found_in_a_language_model_and_under_autocast():
    from stabilitylab.models.decoder import LanguageModel
    from stabilitylab.models.parts import ModelConfig

    torch.manual_seed(0)
    model, x = (
        LanguageModel(ModelConfig.plain(vocab=32, seq=16, d_model=32, n_layer=1, n_head=2)),
        torch.randint(32, (4, 16)),
    )
    assert find_loss_cast(model, x, lambda m, b: m(b, b)).place == "none"
    low = find_loss_cast(model.bfloat16(), x, lambda m, b: m(b, b))
    assert (
        low.place == "none"
        and low.logits_fmt == "bf16"
        and low.steps.operation.iloc[0] in ("mm", "addmm", "bmm")
    )
    cast = find_loss_cast(model, x, lambda m, b: F.cross_entropy(m(b).flatten(0, 1), b.flatten()))
    assert cast.place == "logits" and cast.fmt == "bf16" and 0 < abs(cast.loss - cast.exact_loss) < 0.05

    def auto(m, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(m(b).flatten(0, 1), b.flatten())

    assert find_loss_cast(model.float(), x, auto).logits_fmt == "bf16"


def test_fp16_activation_that_overflows_is_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.fill_(1e5)
    found = find_scale_cause(model, lambda m: m(torch.ones(2, 4)).mean())
    assert found.cause in ("activations", "gradients") and (
        found.cause != "activations" or found.module == "1"
    )


def test_debiased_windows_cover_the_truth():
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(200):
        true, sigma = rng.uniform(1.1, 1.9), rng.uniform(0.4, 3) / 128
        d = debias(quantise(true + sigma * rng.standard_normal(400), "bf16"), 400, "bf16")
        hits.append(abs(d.mean[0] - true) < 2 * d.sd[0] + d.bias[0])
    assert np.mean(hits) > 0.93


def test_pure_bf16_weights_stall_and_stochastic_rounding_does_not():
    "Least squares with small steps: rounding to nearest stops, stochastic rounding follows float32."
    rng = np.random.default_rng(0)
    true, w = (
        rng.normal(1, 0.3, 256).astype(np.float32),
        {k: np.zeros(256, np.float32) for k in ("fp32", "nearest", "stochastic")},
    )
    for _t in range(3000):
        for k in w:
            new = w[k] - np.float32(1e-3) * (w[k] - true)
            w[k] = (
                new
                if k == "fp32"
                else quantise(new, "bf16")
                if k == "nearest"
                else stochastic_round(new, "bf16", rng)
            )
    error = {k: float(((v - true) ** 2).mean()) for k, v in w.items()}
    assert error["nearest"] > 10 * error["stochastic"] and abs(error["stochastic"] - error["fp32"]) < 0.01


@pytest.mark.slow  # trains to the spikes
@pytest.mark.parametrize("seed", [0])
def test_slingshot_spikes_are_a_matter_of_precision(seed):
    "Modular addition, full-batch Adam: spikes in float32, none in float64."
    spikes = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(seed)
        p = 31
        a, b = torch.meshgrid(torch.arange(p), torch.arange(p), indexing="ij")
        x = torch.cat([F.one_hot(a.flatten(), p), F.one_hot(b.flatten(), p)], 1).to(dtype)
        y = (a + b).flatten() % p
        net = torch.nn.Sequential(
            torch.nn.Linear(2 * p, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, p),
        ).to(dtype)
        opt, losses = torch.optim.Adam(net.parameters(), 1e-2, betas=(0.9, 0.95)), []
        for _ in range(1500):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        late = np.array(losses[300:])
        spikes[dtype] = int(((late[1:] > 1e-3) & (late[:-1] <= 1e-3)).sum())
    assert spikes[torch.float32] >= 1 and spikes[torch.float64] == 0


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_how_far_one_draw_of_stochastic_rounding_may_be_off(fmt):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(20, generator=generator) * 0.05
    u = torch.randn(20, generator=generator) * 1e-5
    draws = [lost_updates({"w": w}, {"w": u}, fmt, seed).loc["w"] for seed in range(400)]
    kept = np.array([draw.kept_stochastic for draw in draws])
    sd = draws[0].kept_stochastic_sd
    assert kept.std() == pytest.approx(sd, rel=0.15)
    assert abs(kept.mean() - 1) < 4 * sd / np.sqrt(len(draws))
