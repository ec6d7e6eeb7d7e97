"Slow independent twins of the equations behind the fixes, in float64 or written out entry by entry."

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.fixes.attention_override import relaxed_attention
from stabilitylab.fixes.optimizers import Adafactor, orthogonal
from stabilitylab.fixes.precision import GridRounding
from stabilitylab.fixes.registry import fix
from stabilitylab.fixes.submodules import attention_layers
from stabilitylab.fixes.training import Training, grad_norm
from stabilitylab.models.attention import attend
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import copy_task, model_loss
from stabilitylab.names.errors import InputError


def on_gradients(gradients, optimizer=None):
    "A training whose steps have these gradients, rows of an array."
    rows = [torch.tensor(g, dtype=torch.float32) for g in gradients]
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(len(rows[0])))
    make = optimizer or (lambda p: torch.optim.SGD(p, lr=1.0))
    loss = lambda model, g: (model.w * g).sum()  # noqa: E731 - its gradient is g
    return Training(model, make(model.parameters()), loss, lambda step: [rows[step]])


def walk(training, n):
    "The weights behind each step."
    out = []
    for _ in range(n):
        training.run_step()
        out.append(training.model.w.detach().double().numpy().copy())
    return np.array(out)


def draws(n, width=3, seed=0, jumps=()):
    "Gradients around one, and some jumps."
    rows = np.random.default_rng(seed).normal(1.0, 0.2, (n, width)).astype(np.float32).astype(float)
    for step in jumps:
        rows[step] *= 40
    return rows


def test_zclip_is_its_equation():
    rows = draws(60, jumps=(40, 41))
    seen = on_gradients(rows)
    fix("zclip", warmup=25, most=1e6).apply(seen)
    got = -np.diff(np.vstack([np.zeros(3), walk(seen, 60)]), axis=0)
    mean = var = 0.0
    warm = []
    for row, moved in zip(rows, got, strict=True):
        norm = float(np.linalg.norm(row))
        kept = norm
        if len(warm) == 25:
            z = (norm - mean) / math.sqrt(var)
            if z > 2.5:
                kept = mean + 2.5 * math.sqrt(var) / (z / 2.5)
            var = 0.97 * var + 0.03 * (kept - mean) ** 2
            mean = 0.97 * mean + 0.03 * kept
        else:
            warm.append(norm)
            mean, var = np.mean(warm), np.var(warm)
        np.testing.assert_allclose(moved, row * kept / norm, rtol=2e-5, atol=1e-6)


def test_agc_is_its_equation():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(5, 4))
    model.add_module("head", nn.Linear(4, 3))
    with torch.no_grad():
        model.body.weight[0] = 0.0  # a unit whose weights count as `eps`
    parts = dict(model.named_parameters())
    wanted = {
        name: torch.randn_like(p)
        * torch.tensor([0.001, 1.0, 10.0, 0.1])[: len(p)].view(-1, *[1] * (p.dim() - 1))
        for name, p in parts.items()
    }
    loss = lambda model, _: sum((p * wanted[name]).sum() for name, p in model.named_parameters())  # noqa: E731
    start = {name: p.detach().clone() for name, p in parts.items()}
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, lambda step: [None])
    fix("agc", ratio=0.02).apply(training)
    training.run_step()
    for name, p in parts.items():
        units = [...] if p.dim() == 1 else range(len(p))
        for unit in units:
            weight, grad = start[name][unit].double(), wanted[name][unit].double()
            most = 0.02 * max(float(weight.norm()), 1e-3)
            is_clipped = float(grad.norm()) > most and not name.startswith("head")
            factor = most / float(grad.norm()) if is_clipped else 1.0
            torch.testing.assert_close(
                (start[name] - p.detach())[unit].double(), grad * factor, rtol=1e-4, atol=1e-6
            )


def test_adagc_is_its_equation():
    rows = draws(30, jumps=(20,))
    seen = on_gradients(rows)
    fix("adagc", warmup=5).apply(seen)
    got = -np.diff(np.vstack([np.zeros(3), walk(seen, 30)]), axis=0)
    gamma = None
    for step, (row, moved) in enumerate(zip(rows, got, strict=True)):
        norm = np.linalg.norm(row)
        if step < 5:
            share = min(1, 1 / norm)
            gamma = norm * share if gamma is None else min(gamma, norm * share)
        else:
            share = min(1, 1.05 * gamma / norm)
            gamma = 0.98 * gamma + 0.02 * norm * share
        np.testing.assert_allclose(moved, row * share, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adagc", "stable_spam"])
def test_running_norms_follow_their_parameter(name):
    "The first parameter has no gradient in every third step; the second one's steps are those without it."
    settings = {"adagc": {"warmup": 2}, "stable_spam": {}}[name]
    rows = torch.tensor(draws(12, jumps=(9,)), dtype=torch.float32)

    def weights(with_other: bool) -> torch.Tensor:
        model = nn.Module()
        model.other = nn.Parameter(torch.zeros(3))
        model.w = nn.Parameter(torch.zeros(3))

        def loss(model, part):
            step, grad = part
            used = with_other and step % 3
            return (model.w * grad).sum() + (1e-3 * (model.other * grad).sum() if used else 0.0)

        seen = Training(model, torch.optim.SGD(model.parameters(), 1.0), loss, lambda s: [(s, rows[s])])
        fix(name, **settings).apply(seen)
        for _ in range(12):
            seen.run_step()
        return model.w.detach()

    torch.testing.assert_close(weights(True), weights(False), rtol=1e-4, atol=1e-5)


def test_redraw_by_fan_in_counts_the_area_of_the_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 128, 3, groups=2), nn.Flatten(), nn.Linear(128, 10))
    model[0].weight.data.mul_(50)
    seen = Training(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m(b).mean(), lambda s: [])
    fix("redraw", rule="fan_in", divide=False).apply(seen)
    assert float(model[0].weight.detach().std()) == pytest.approx(1 / (32 * 9) ** 0.5, rel=0.03)
    assert float(model[2].weight.detach().std()) == pytest.approx(1 / 128**0.5, rel=0.06)


@pytest.mark.parametrize("name", ["drop_repeats", "curriculum"])
@pytest.mark.parametrize("part", [torch.randn(4, 3, 8, 8), torch.randn(4, 5)], ids=["images", "a table"])
def test_fixes_of_tokens_refuse_images_and_tables_at_once(name, part):
    model = nn.Flatten()
    model.w = nn.Parameter(torch.zeros(1))
    seen = Training(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: m.w.sum(), lambda s: [part])
    with pytest.raises(InputError, match="whole numbers"):
        fix(name).apply(seen)


def stepping(batches):
    "A training that takes no step: its batches are what counts."
    model = torch.nn.Linear(1, 1)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.0), None, batches, step=10)


@pytest.mark.parametrize(
    "others", [["shuffle"], ["batch_warmup"], ["larger_batch"], ["shuffle", "batch_warmup"]]
)
@pytest.mark.parametrize("is_last", [True, False])
def test_skipped_batches_never_come_whatever_else_changes_their_order(others, is_last):
    training = stepping(lambda step: [torch.full((8,), step)])
    fixes = [fix(name, **({"block": 64} if name == "shuffle" else {})) for name in others]
    before = training.batches
    logs = [each.apply(training) for each in [*fixes, fix("skip_batches", count=5)][:: 1 if is_last else -1]]
    came = {int(part[0]) for step in range(10, 74) for part in training.batches(step)}
    assert came.isdisjoint(range(10, 15)) and len(came) >= 64
    for log in reversed(logs):
        log.undo()
    assert training.batches is before


@pytest.mark.parametrize("name", ["zclip", "adagc"])
def test_what_clips_besides_is_left_to_the_run_where_that_is_asked(name):
    model = torch.nn.Linear(4, 1, bias=False)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.0), None, lambda step: [])
    for most, norm in ((1.0, 1.0), (0.0, 6.0)):
        log = fix(name, most=most).apply(training)
        model.weight.grad = torch.full((1, 4), 3.0)
        training.hooks[-1].after_backward(training)
        assert math.isclose(grad_norm(model.parameters()), norm, rel_tol=1e-4)
        log.undo()


def test_spam_is_its_equation_over_a_reset():
    rows = draws(30, jumps=(8, 9))
    seen = on_gradients(rows, lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99)))
    fix("spam", threshold=50.0, interval=12, warmup=4).apply(seen)
    got = walk(seen, 30)
    w, m, v, t = np.zeros(3), np.zeros(3), np.zeros(3), 0
    for step, g in enumerate(rows.copy()):
        large = (v > 0) & (g**2 > 50 * v)
        g[large] = np.sign(g[large]) * np.sqrt(50 * v[large])
        if step and step % 12 == 0:
            m, v, t = np.zeros(3), np.zeros(3), 0
        rate = 0.1 * (
            (1 - math.cos(math.pi * (step % 12 + 1) / 5)) / 2 if step >= 12 and step % 12 < 4 else 1
        )
        t += 1
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        w = w - rate * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        np.testing.assert_allclose(got[step], w, rtol=2e-4, atol=1e-5)


def test_update_clip_is_stable_adamw():
    rows = draws(40, jumps=(30,))
    make = lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.999), weight_decay=0.2)  # noqa: E731
    seen = on_gradients(rows, make)
    fix("update_clip").apply(seen)
    got = walk(seen, 40)
    w, m, v = np.zeros(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(rows, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        second = v / (1 - 0.999**t)
        rate = 0.1 / max(1, math.sqrt(np.mean(g**2 / np.maximum(second, 1e-16))))
        w = w - rate * 0.2 * w - rate * m / (1 - 0.9**t) / (np.sqrt(second) + 1e-8)
        np.testing.assert_allclose(got[t - 1], w, rtol=2e-4, atol=1e-5)


def test_adafactor_of_a_matrix_is_its_equation():
    rng = np.random.default_rng(0)
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = Adafactor([weight], lr=0.1)
    w, rows, columns = np.zeros((4, 3)), np.zeros(4), np.zeros(3)
    for t in range(1, 8):
        g = rng.normal(size=(4, 3)).astype(np.float32) * (30 if t == 6 else 1)
        weight.grad = torch.from_numpy(g)
        optimizer.step()
        beta, square = 1 - t**-0.8, g.astype(float) ** 2 + 1e-30
        rows = beta * rows + (1 - beta) * square.mean(1)
        columns = beta * columns + (1 - beta) * square.mean(0)
        u = g / np.sqrt(rows[:, None] * columns[None] / rows.mean())
        w = w - 0.1 * u / max(1, math.sqrt((u**2).mean()))
        np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_muon_makes_singular_values_near_one_and_keeps_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    got = orthogonal(matrix) / max(1, shape[0] / shape[1]) ** 0.5
    inside = u.t() @ got @ v.t()
    assert (inside.diagonal() - 1).abs().max() < 0.4
    assert (inside - torch.diag(inside.diagonal())).abs().max() < 1e-4


def test_skip_sigma_uses_the_values_before_and_the_unbiased_deviation():
    rng = np.random.default_rng(1)
    norms = np.abs(rng.normal(1, 0.1, 80))
    norms[[50, 60, 61]] = [2.5, 1.42, 9.0]
    seen = on_gradients(norms[:, None])
    fix("skip_sigma", sigma=4.0, window=20, least=10).apply(seen)
    seen.loss = lambda model, g: (model.w * g).sum()
    seen.measure = seen.loss
    walk(seen, 80)
    want = []
    for t in range(80):
        past = norms[max(0, t - 20) : t].astype(np.float32).astype(float)
        if len(past) >= 10 and norms[t] > past.mean() + 4 * past.std(ddof=1):
            want.append(t)
    assert {50, 61} <= set(want) and set(want) <= set(seen.hooks[0].skipped)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_z_loss_gradient(reduction):
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 1, -100, 2, 3, 4, -100])
    model = nn.Module()
    model.w = nn.Parameter(logits.clone())
    loss = lambda model, batch: F.cross_entropy(model.w, targets, reduction=reduction)  # noqa: E731
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1.0), loss, lambda s: [None])
    fix("z_loss", weight=0.3).apply(training)
    training.loss(model, None).backward()
    p, z = logits.softmax(1), logits.logsumexp(1)
    counted = (targets != -100).double()[:, None]
    want = (p - F.one_hot(targets.clamp(min=0), 5)) * counted + 0.3 * 2 * z[:, None] * p * counted
    want = want / (5 if reduction == "mean" else 1)
    torch.testing.assert_close(model.w.grad, want, rtol=1e-6, atol=1e-7)


def test_token_mean_is_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    batch = copy_task(length=5, vocab=16, batch=8).at(0)
    batch["targets"][:4, 3:] = -100
    batch["targets"][:, 5] = 1
    halves = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
    got = {}
    for name, parts, fixed in (("whole", [batch], False), ("naive", halves, False), ("exact", halves, True)):
        training = Training(
            model, torch.optim.SGD(model.parameters(), lr=0.0), model_loss, lambda s, p=parts: p
        )
        if fixed:
            fix("token_mean").apply(training)
        training.run_step()
        got[name] = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    error = {k: float((got[k] - got["whole"]).norm() / got["whole"].norm()) for k in ("naive", "exact")}
    assert error["exact"] < 1e-6 and error["naive"] > 0.1


@pytest.mark.parametrize("shift", [0, 1])
def test_token_mean_counts_what_the_loss_compares_with(shift):
    "Labels under a name of their own, shifted inside the loss or not."
    torch.manual_seed(0)
    model = nn.Linear(4, 7)
    x, answers = torch.randn(8, 6, 4), torch.randint(0, 7, (8, 6))
    answers[:4, :5] = -1

    def loss(model, batch):
        logits, labels = model(batch["x"]), batch["answers"][:, shift:]
        return F.cross_entropy(logits[:, : 6 - shift].flatten(0, 1), labels.flatten(), ignore_index=-1)

    whole = {"x": x, "answers": answers}
    halves = [{key: value[i : i + 4] for key, value in whole.items()} for i in (0, 4)]
    grads = []
    for parts in ([whole], halves):
        seen = Training(model, torch.optim.SGD(model.parameters(), 0.0), loss, lambda s, p=parts: p)
        if len(parts) > 1:
            fix("token_mean").apply(seen)
        seen.run_step()
        grads.append(model.weight.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7)


def test_shrink_keeps_the_forward_pass_and_a_tenth_of_the_gradient():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    batch = copy_task(length=5, vocab=16, batch=8).at(0)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.0), model_loss, lambda s: [batch])
    before = training.run_step()
    table, other = model.embed.weight.grad.clone(), model.lm_head.weight.grad.clone()
    fix("embedding_shrink", share=0.1).apply(training)
    after = training.run_step()
    assert abs(after.loss - before.loss) < 1e-6
    torch.testing.assert_close(model.embed.weight.grad, 0.1 * table, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(model.lm_head.weight.grad, other, rtol=1e-4, atol=1e-8)


def test_stochastic_rounding_has_the_right_mean_and_only_neighbours():
    hook = GridRounding("stochastic", 0)
    x = torch.full((200_000,), 1 + 0.3 * 2**-7)
    y = hook.rounded(x)
    assert set(y.unique().tolist()) == {1.0, 1 + 2**-7}
    share = (y > 1).double().mean().item()
    assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / len(x))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_everything_on_is_its_equation(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4).double()
    bias, sink = torch.randn(3, 5, 5).double(), torch.randn(3).double()
    extra = tuple(torch.randn(2, 3, 4).double())
    got = attend(q, k, v, bias=bias, causal=causal, cap=2.0, sink=sink, extra=extra).numpy()
    for b in range(2):
        for h in range(3):
            for i in range(5):
                z = [
                    2 * math.tanh(float(q[b, h, i] @ k[b, h, j]) / 2 / 2) + float(bias[h, i, j])
                    for j in range(5)
                ]
                z = [(-math.inf if causal and j > i else value) for j, value in enumerate(z)]
                z.append(2 * math.tanh(float(q[b, h, i] @ extra[0][h]) / 2 / 2))
                weights = np.exp([*z, float(sink[h])])
                weights = (weights / weights.sum())[:-1]
                want = weights @ np.vstack([v[b, h].numpy(), extra[1][h].numpy()])
                np.testing.assert_allclose(got[b, h, i], want, rtol=1e-6)


def test_qk_clip_shares_between_heads_of_one_group():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.0), model_loss, lambda s: [None])
    fix("qk_clip", limit=10.0, alpha=0.25).apply(training)
    hook, part = training.hooks[0], attention_layers(model)[0]
    q, k = part.source("q").weight.clone(), part.source("k").weight.clone()
    hook._clip(part, torch.tensor([40.0, 5.0]))
    torch.testing.assert_close(part.source("q").weight[:8], q[:8] * 0.25**0.25)
    torch.testing.assert_close(part.source("k").weight[:8], k[:8] * 0.25**0.75)
    assert torch.equal(part.source("q").weight[8:], q[8:]) and torch.equal(part.source("k").weight[8:], k[8:])
    hook._clip(part, torch.tensor([math.nan, math.inf]))
    assert torch.isfinite(part.source("q").weight).all()


def test_sigma_reparam_follows_the_largest_singular_value():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    task = copy_task(length=5, vocab=16, batch=8)
    training = Training(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), model_loss, lambda s: [task.at(s)]
    )
    fix("sigma_reparam", keep=False).apply(training)
    for _ in range(10):
        training.run_step()
    q = attention_layers(model)[0].source("q")
    gain = q.parametrizations.weight[0].gain
    assert abs(float(torch.linalg.svdvals(q.weight.detach())[0]) / float(gain.detach().abs()) - 1) < 0.05


def test_lion_is_its_equation():
    rows = draws(6, jumps=(3,))
    seen = on_gradients(rows, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2))
    fix("other_optimizer", kind="lion").apply(seen)
    got, w, momentum = walk(seen, 6), np.zeros(3), np.zeros(3)
    for row, now in zip(rows, got, strict=True):
        w = w * (1 - 0.1 * 0.2) - 0.1 * np.sign(0.9 * momentum + 0.1 * row)
        momentum = 0.99 * momentum + 0.01 * row
        np.testing.assert_allclose(now, w, rtol=1e-5)


def test_mars_is_its_equation():
    rows = draws(6, jumps=(3,))
    seen = on_gradients(rows, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0))
    fix("other_optimizer", kind="mars").apply(seen)
    got, w, m, v, before = walk(seen, 6), np.zeros(3), 0.0, 0.0, rows[0]
    for step, (row, now) in enumerate(zip(rows, got, strict=True), start=1):
        c = row + 0.025 * 0.95 / 0.05 * (row - before)
        c, before = c / max(1.0, np.linalg.norm(c)), row
        m, v = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c**2
        w = w - 0.1 * (m / (1 - 0.95**step)) / (np.sqrt(v / (1 - 0.99**step)) + 1e-8)
        np.testing.assert_allclose(now, w, rtol=1e-4)


def test_schedule_free_takes_its_gradients_between_the_fast_point_and_the_mean():
    rows, rates = draws(6), [0.1, 0.2, 0.1, 0.1, 0.4, 0.1]
    seen = on_gradients(rows, lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5))
    seen.schedule = lambda optimizer, step: optimizer.param_groups[0].update(lr=rates[step])
    fix("other_optimizer", kind="schedule_free").apply(seen)
    got, v, total, highest = walk(seen, 6), 0.0, 0.0, 0.0
    x = y = z = np.zeros(3)
    for step, (row, rate, now) in enumerate(zip(rows, rates, got, strict=True), start=1):
        v = 0.99 * v + 0.01 * row**2
        z = z - rate * (row / (np.sqrt(v / (1 - 0.99**step)) + 1e-8) + 0.5 * y)
        highest = max(highest, rate)
        total += highest**2
        x = x + highest**2 / total * (z - x)
        y = 0.1 * z + 0.9 * x
        np.testing.assert_allclose(now, y, rtol=1e-4, atol=1e-6)


def test_kahan_keeps_what_rounding_takes_and_nearest_loses_it():
    ends = {}
    for rounding in ("kahan", "nearest"):
        seen = on_gradients(np.full((400, 2), 1e-3))
        with torch.no_grad():
            seen.model.w.fill_(4.0)
        fix("bf16_weights", rounding=rounding).apply(seen)
        ends[rounding] = walk(seen, 400)[-1]
    assert (ends["nearest"] == 4.0).all()
    np.testing.assert_allclose(ends["kahan"], 4.0 - 0.4, atol=0.02)  # a step of bf16 there is 1/64


def test_gates_by_channel_multiply_each_channel_by_its_own():
    config = ModelConfig(vocab=8, n_layer=1, d_model=8, n_head=2)
    torch.manual_seed(0)
    model = LanguageModel(config)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, lambda step: [])
    (layer,) = attention_layers(model)
    x, seen = torch.randn(1, 3, 8), {}
    handle = layer.roles["out"].register_forward_pre_hook(lambda module, inputs: seen.update(plain=inputs[0]))
    fix("gated_attention", kind="channel").apply(training)
    gate = layer.module.head_gate
    with torch.no_grad():
        gate.weight.normal_()
    layer.roles["out"].register_forward_pre_hook(lambda module, inputs: seen.update(gated=inputs[0]))
    layer.module(x)
    handle.remove()
    expected = seen["plain"] * 2 * torch.sigmoid(x @ gate.weight.t())
    torch.testing.assert_close(seen["gated"], expected)


def soap_twin(gradients, lr, every, betas=(0.95, 0.95), eps=1e-8):
    "The algorithm of SOAP written out in float64: the weights after each step, from zeros."
    first, second = betas
    left, right = (np.zeros((n, n)) for n in gradients[0].shape)
    m = v = np.zeros(gradients[0].shape)
    w, out, bases = np.zeros(gradients[0].shape), [], None
    for t, g in enumerate(gradients):
        if t:
            m, turned = first * m + (1 - first) * g, bases[0].T @ g @ bases[1]
            v = second * v + (1 - second) * turned**2
            hat_m, hat_v = bases[0].T @ m @ bases[1] / (1 - first**t), v / (1 - second**t)
            w = w - lr * bases[0] @ (hat_m / (np.sqrt(hat_v) + eps)) @ bases[1].T
        left, right = second * left + (1 - second) * g @ g.T, second * right + (1 - second) * g.T @ g
        if bases is None:
            bases = [np.linalg.eigh(side)[1][:, ::-1] for side in (left, right)]
        elif t % every == 0:
            bases = [np.linalg.qr(side @ basis)[0] for side, basis in zip((left, right), bases, strict=True)]
        out.append(w)
    return np.array(out)


def test_soap_is_its_algorithm():
    gradients = np.random.default_rng(0).normal(size=(25, 4, 3))
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    model.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    loss = lambda model, g: (model.w * g).sum() + (model.b * g[0]).sum()  # noqa: E731 - their gradients
    training = Training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, lambda t: [torch.tensor(gradients[t])]
    )
    fix("other_optimizer", kind="soap").apply(training)
    weights = []
    for _ in range(25):
        training.run_step()
        weights.append(model.w.detach().numpy().copy())
    twin = soap_twin(gradients, 0.1, 10)
    assert np.allclose(weights, twin, atol=2e-4) and np.abs(twin[-1]).max() > 0.5
    adam = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain = torch.optim.AdamW([adam], lr=0.1, betas=(0.95, 0.95), weight_decay=0.0)
    for g in gradients:
        adam.grad = torch.tensor(g[0])
        plain.step()
    torch.testing.assert_close(model.b.detach(), adam.detach())  # a vector has no basis


def test_pb_relax_is_attention_whose_product_stays_small():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    hidden = torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.rand(6, 6) < 0.2, float("-inf"))
    hidden.fill_diagonal_(0)
    for bias, causal in ((None, True), (hidden, False), (None, False)):
        plain = F.scaled_dot_product_attention(q, k, v, bias, 0.0, causal)
        torch.testing.assert_close(relaxed_attention(q, k, v, 32.0, bias, causal), plain)
    wide = torch.full((1, 1, 2, 128), 60.0, dtype=torch.float16)  # q·k = 460,800: beyond fp16
    assert not torch.isfinite(attend(wide, wide, wide, inside=False, cap=1e9)).all()
    assert torch.isfinite(relaxed_attention(wide, wide, wide, 32.0)).all()
    with pytest.raises(InputError, match="plain softmax"):
        relaxed_attention(q, k, v, 32.0, cap=30.0)


def test_attention_in_fp32_is_that_of_upcast_heads():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=32, d_model=32, n_layer=1, n_head=2, seq=16)).bfloat16()
    task = copy_task(length=5, vocab=32, batch=4)
    training = Training(
        model, torch.optim.SGD(model.parameters(), lr=0.0), model_loss, lambda step: [task.at(step)]
    )
    seen = {}
    model.blocks[0].attn.out_proj.register_forward_pre_hook(lambda m, args: seen.update(out=args[0]))
    for role in "qkv":
        projection = getattr(model.blocks[0].attn, f"{role}_proj")
        projection.register_forward_hook(lambda m, args, out, role=role: seen.update({role: out}))
    fix("attention_fp32").apply(training)
    training.run_step()
    q, k, v = (seen[role].float().unflatten(-1, (2, 16)).transpose(1, 2) for role in "qkv")
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    assert model.config.positions != "rope" and torch.equal(seen["out"], exact.bfloat16())


def test_the_running_mean_is_what_an_arm_is_measured_at():
    training = on_gradients(draws(12))
    rows = [torch.tensor(g, dtype=torch.float32) for g in draws(12)]
    fix("ema", decay=0.8).apply(training)
    weights, mean = np.zeros(3), np.zeros(3)
    for g in rows:
        told = training.run_step().loss
        assert math.isclose(told, float(mean @ g.numpy()), rel_tol=1e-4, abs_tol=1e-5)
        weights = weights - g.numpy()
        mean = 0.8 * mean + 0.2 * weights
        assert np.allclose(training.model.w.detach().numpy(), weights, rtol=1e-5)


def test_registers_are_seen_by_all_and_take_part_in_no_output():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=32, d_model=32, n_layer=2, n_head=2, seq=16))
    task = copy_task(length=5, vocab=32, batch=4)
    training = Training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, lambda step: [task.at(step)]
    )
    tokens = task.at(0)["tokens"]
    before = model(tokens)
    fix("registers", count=2).apply(training)
    block, registers = model.blocks[0], model.blocks[0].registers.tokens
    seen = {}
    block.attn.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    after = model(tokens)
    assert after.shape == before.shape and not torch.allclose(after, before)
    normed = block.norm1(registers)
    torch.testing.assert_close(seen["x"][:, :2], normed.expand(len(tokens), -1, -1))
    training.run_step()
    assert registers.grad.abs().sum(dim=1).min() > 0


def test_deepnorm_multiplies_the_stream_of_a_post_norm_model():
    torch.manual_seed(0)
    config = ModelConfig(vocab=32, d_model=32, n_layer=3, n_head=2, seq=16, norm_place="post")
    model, task = LanguageModel(config).double(), copy_task(length=5, vocab=32, batch=4)
    training = Training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, lambda step: [task.at(step)]
    )
    block = model.blocks[0]
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    alpha, beta = (2 * 3) ** 0.25, (8 * 3) ** -0.25
    small = {"v_proj", "out_proj", "fc1", "fc2"}
    twin = {
        n: p.detach() * (beta if n.split(".")[-2] in small and n.endswith("weight") else 1)
        for n, p in block.named_parameters()
    }
    plain = LanguageModel(config).double().blocks[0]
    plain.load_state_dict(twin | {n: b for n, b in block.state_dict().items() if n not in twin})
    fix("deepnorm").apply(training)
    y = plain.post_norm1(alpha * x + plain.attn(x, None, None))
    expected = plain.post_norm2(alpha * y + plain.mlp(y))
    torch.testing.assert_close(
        block(x), expected, rtol=1e-4, atol=1e-4
    )  # epsilon of the norms is not multiplied
    with pytest.raises(InputError, match="post-norm"):
        fix("deepnorm").apply(stepping_model())


def stepping_model():
    "A pre-norm model that a fix of post-norm models refuses."
    model, task = (
        LanguageModel(ModelConfig(vocab=32, d_model=32, n_layer=1, seq=16)),
        copy_task(length=5, vocab=32, batch=4),
    )
    return Training(
        model, torch.optim.SGD(model.parameters(), lr=0.1), model_loss, lambda step: [task.at(step)]
    )


def test_adamc_decays_all_but_the_output_layer_by_the_rate_over_its_highest():
    "Without gradients AdamW only decays: w·(1 - lr·λ·lr/lr_max), and the plain 1 - lr·λ for the head."
    model = LanguageModel(ModelConfig(vocab=16, d_model=16, n_layer=1, n_head=2, seq=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    loss = lambda model, batch: sum(p.sum() for p in model.parameters()) * 0  # noqa: E731
    training = Training(model, optimizer, loss, lambda step: [None])
    head, inner = model.get_parameter("lm_head.weight"), model.get_parameter("blocks.0.fc1.weight")
    fix("adamc").apply(training)
    expected = {head: head.detach().double(), inner: inner.detach().double()}
    for rate in (0.1, 0.02):
        for group in optimizer.param_groups:
            group["lr"] = rate
        training.run_step()
        expected = {
            head: expected[head] * (1 - rate * 0.5),
            inner: expected[inner] * (1 - rate * 0.5 * rate / 0.1),
        }
    for parameter, value in expected.items():
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-8)
