"""Arithmetic, one-dimensional optimizers and models at their start: what can be made again at once

These results need no long training: closed forms, simulators, or gradients at initialisation. Each
function measures, compares with its oracle and returns a `Result`.

Limits: R2b's cosines depend on the texts drawn; their oracle is a range. R10 is a statement about
the first step only.
"""

import itertools
import math
from functools import partial

import numpy as np
import pandas as pd
import torch

from reproductions.recipes import held_out, over_seeds
from reproductions.results import Check, Result
from stabilitylab.cases.states import next_token_losses
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.fixes.registry import fix
from stabilitylab.fixes.training import Training, grad_norm
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.numerics.accumulation.audit import audit_accumulation
from stabilitylab.numerics.accumulation.weights import (
    TokenMeanAccumulator,
    effective_share,
    make_window,
    mean_of_means_bias,
    token_weights,
)
from stabilitylab.numerics.formats import quantise
from stabilitylab.numerics.rounding.attention_range import (
    attention_scale_overflow,
    distinct_positions,
    simulate_loss_scale,
)
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

# 16 bits
# R2: between 1.6562 and 1.7344 bf16 has eleven numbers, those of the IDEFICS memo. R4b: entries of 23 at
# head dimension 128 overflow fp16 where the scale comes after the product. R4c: Adam's epsilon of 1e-8 is
# zero in fp16, so rows without a gradient become NaN. R16: bf16 counts exactly to 256.

MEMO = "1.6562 1.6641 1.6719 1.6797 1.6875 1.6953 1.7031 1.7109 1.7188 1.7266 1.7344"


def eleven_values() -> Result:
    "R2: the losses that a bf16 log can show."
    between = np.linspace(1.65625, 1.734375, 20_001).astype("f4")
    shown = [f"{value:.4f}" for value in np.unique(quantise(between, "bf16"))]
    finer = len(np.unique(quantise(between, "fp16")))
    checks = (
        Check("values of bf16", shown, "the eleven of the memo, digit by digit", shown == MEMO.split()),
        Check("values of fp16", finer, "81", finer == 81),
    )
    return Result("R2", checks, "every number from 1.65625 to 1.734375")


def inside_scale() -> Result:
    "R4b: the scale before or after the product of queries and keys."
    checks = []
    for entry, format, outside, inside in ((22.0, "fp16", 0, 0), (23.0, "fp16", 1, 0), (23.0, "bf16", 0, 0)):
        vector = torch.full((1, 128), entry)
        got = attention_scale_overflow(vector, vector, format)
        measured = [got.outside, got.inside]
        what = f"overflow of entries {entry:g} in {format}, scaled after and before"
        checks.append(Check(what, measured, f"{outside} and {inside}", measured == [outside, inside]))
    native = (torch.full((128,), 23.0).half() * torch.full((128,), 23.0).half()).sum()
    checks.append(Check("torch's own fp16 sum of 128 products of 23", float(native), "inf", native.isinf()))
    return Result("R4b", tuple(checks), "head dimension 128, all entries alike")


def _rows_lost(eps: float, dtype: torch.dtype) -> float:
    "Share of embedding rows that are NaN after one step of Adam, two of ten rows having a gradient."
    table = torch.nn.Embedding(10, 4, dtype=dtype)
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-3, eps=eps, foreach=False)
    table(torch.tensor([1, 2])).float().sum().backward()
    optimizer.step()
    return float(table.weight.isnan().any(1).float().mean())


def fp16_epsilon() -> Result:
    "R4c: what Adam's epsilon does to rows without a gradient."
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    expected = {("fp16", 1e-8): 0.8, ("fp16", 1e-7): 0.0, ("bf16", 1e-8): 0.0, ("fp32", 1e-8): 0.0}
    checks = []
    for (kind, eps), share in expected.items():
        got = _rows_lost(eps, kinds[kind])
        what = f"rows lost in {kind} with epsilon {eps:g}"
        checks.append(Check(what, got, f"{share:g}", math.isclose(got, share, abs_tol=1e-6)))
    return Result("R4c", tuple(checks), "ten rows, two of them in the batch, one step of torch's AdamW")


def bf16_positions() -> Result:
    "R16: how many positions bf16 tells apart."
    exact = [n for n in range(1, 600) if distinct_positions(n) == n][-1] - 1
    last = quantise(np.array([8190.0, 8191.0]), "bf16").tolist()
    distinct = distinct_positions(8192)
    checks = (
        Check("last position that is exact with all before it", exact, "256", exact == 256),
        Check("different values of 0 to 8191", distinct, "897", distinct == 897),
        Check("8190 and 8191", last, "both 8192", last == [8192.0, 8192.0]),
    )
    return Result("R16", checks, "whole numbers rounded to bf16")


# Accumulation
# R2b: a token of a micro-batch with n of nbar tokens on average counts nbar/n times too much. The loss is
# off by minus the covariance of length and loss over the mean length, so its sign follows the data.


def _audited(lengths: list[int], step: object, seed: int = 0):
    "The audit of a loop over random texts of these lengths."
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig.plain(vocab=64, seq=128, d_model=32, n_layer=2, n_head=2))
    window = [torch.randint(64, (1, n + 1)) for n in lengths]
    return audit_accumulation(model, window, next_token_losses, step)


def _token_mean(model: torch.nn.Module, window: list) -> float:
    "A loop that sums and divides once."
    accumulate = TokenMeanAccumulator(model)
    for tokens in window:
        accumulate.backward(next_token_losses(model, tokens)[0].sum(), tokens.shape[1] - 1)
    return accumulate.finish().loss


def accumulation() -> Result:
    "R2b: the mean of means against the token mean."
    weights = token_weights(make_window([6, 2]), "microbatch_mean")
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 16), 2, 120).astype(int).tolist()
    short, many = _audited([6, 2], "microbatch_mean"), _audited(lengths, "microbatch_mean")
    equal, mended = _audited([8] * 4, "microbatch_mean"), _audited(lengths, _token_mean)
    each = many.sequences.groupby("step", sort=False).agg({"tokens": "sum", "loss": "mean"})
    gap = many.candidates.loss["microbatch_mean"] - many.true_loss
    formula = mean_of_means_bias(each.tokens.to_numpy(), each.loss.to_numpy())
    error = float(np.linalg.norm([mended.norm_ratio - 1, mended.factor - 1]))
    checks = (
        Check(
            "weights of a token of (6, 2)",
            weights[[0, -1]].tolist(),
            "1/12 and 1/4",
            np.allclose(weights[[0, -1]], [1 / 12, 1 / 4]),
        ),
        Check(
            "effective share of tokens of (6, 2)",
            effective_share(np.array([6, 2])),
            "3/4",
            effective_share(np.array([6, 2])) == 0.75,
        ),
        Check("cosine to the true gradient, (6, 2)", short.cosine, "0.6 to 0.97", 0.6 < short.cosine < 0.97),
        Check("cosine, 16 log-normal lengths", many.cosine, "0.6 to 0.97", 0.6 < many.cosine < 0.97),
        Check("cosine, equal lengths", equal.cosine, "1", abs(equal.cosine - 1) < 1e-6),
        Check("error of the mended loop", error, "below 1e-6", error < 1e-6),
        Check("gap of the losses less the formula", gap - formula, "0", abs(gap - formula) < 1e-6),
    )
    return Result("R2b", checks, "random tokens, 2 layers of width 32, one text a micro-batch")


# Adam on one dimension
# R7: minimising θ²/2 with a learning rate of 0.01, 200 times below the limit of gradient descent. With β₂
# = 0.999 the second moment forgets too slowly: the preconditioned curvature passes its limit of 38/lr
# hundreds of steps before the peak, RMS_t passes 2.3 only a few steps before it.


def adam_on_a_parabola(
    beta2: float,  # decay of the second moment
    steps: int = 30_000,  # to take
    lr: float = 0.01,  # learning rate
    clips: bool = False,  # divide the rate by RMS_t where that is above 1
) -> np.ndarray:  # (step, 3): loss, RMS_t, 1/sqrt(v)
    "Adam on θ²/2 from θ = 1, with β₁ = 0.9 and ε = 1e-15."
    theta, first, second, beta1, eps = 1.0, 0.0, 0.0, 0.9, 1e-15
    seen = np.zeros((steps, 3))
    for t in range(1, steps + 1):
        gradient = theta
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        root = math.sqrt(second / (1 - beta2**t))
        ratio = abs(gradient) / max(root, eps)
        seen[t - 1] = theta * theta / 2, ratio, 1 / (root + eps)
        rate = lr / max(1.0, ratio) if clips else lr
        theta -= rate * first / (1 - beta1**t) / (root + eps)
    return seen


def tall_peaks(
    loss: np.ndarray,  # (step,)
    least: float = 1e-9,  # height of a peak
    decades: float = 4,  # above the lowest level since the peak before
    width: int = 60,  # steps whose highest value is the level, more than those between zero crossings
) -> list[int]:  # their steps
    "Peaks that rise by decades."
    padded = np.r_[np.full(width - 1, loss[0]), loss]
    top = np.lib.stride_tricks.sliding_window_view(padded, width).max(1)
    found, low, at = [], math.inf, 0
    while at < len(loss):
        low = min(low, top[at])
        if top[at] > least and top[at] > low * 10**decades:
            found.append(at + int(np.argmax(loss[at : at + 200])))
            at, low = found[-1] + 200, math.inf
        at += 1
    return found


def adam_spikes() -> Result:
    "R7: spikes without noise, data or depth."
    runs = {beta2: adam_on_a_parabola(beta2) for beta2 in (0.999, 0.99, 0.9)}
    peaks = {beta2: tall_peaks(seen[:, 0]) for beta2, seen in runs.items()}
    loss, ratio, inverse = runs[0.999].T
    is_crossing = np.flatnonzero((inverse[1:] > 38 / 0.01) & (inverse[:-1] <= 38 / 0.01)) + 1
    leads = [peak - int(is_crossing[is_crossing < peak].max()) for peak in peaks[0.999]]
    late = [
        peak - int(np.flatnonzero(ratio[peak - 30 : peak + 1] > 2.3)[0] + peak - 30) for peak in peaks[0.999]
    ]
    bare = tall_peaks(runs[0.99][:, 0], width=1)
    clipped = adam_on_a_parabola(0.999, clips=True)[:, 0]
    tall = tall_peaks(clipped)
    heights = float(np.median(loss[peaks[0.999]])), float(np.median(clipped[tall])) if tall else 0.0
    checks = (
        Check("spikes with β₂ 0.999", len(peaks[0.999]), "25", len(peaks[0.999]) == 25),
        Check("step of the first", peaks[0.999][0], "14083", peaks[0.999][0] == 14083),
        Check("spikes with β₂ 0.99, troughs of the bare loss", len(bare), "140", 110 <= len(bare) <= 170),
        Check("spikes with β₂ 0.9", len(peaks[0.9]), "0", len(peaks[0.9]) == 0),
        Check(
            "lead of the curvature, steps",
            [min(leads), max(leads)],
            "120 to 830, each to a third",
            min(leads) >= 80 and max(leads) <= 1107,
        ),
        Check(
            "lead of RMS_t > 2.3, steps", [min(late), max(late)], "1 to 8", min(late) >= 1 and max(late) <= 8
        ),
        Check("spikes with update clipping", len(tall), "fewer than without", len(tall) < len(peaks[0.999])),
        Check("median height, without and with it", list(heights), "taller with it", heights[1] > heights[0]),
    )
    window = np.arange(peaks[0.999][0] - 300, peaks[0.999][0] + 100, 2)
    shown = {"loss, β₂ = 0.999": np.maximum(loss, 1e-16), "RMS_t": np.maximum(ratio, 1e-16)}
    lines = {name: [window, values[window]] for name, values in shown.items()}
    curves = {"x": "step", "y": "loss; RMS_t", "log": "y", "lines": lines}
    return Result("R7", checks, "θ²/2 from 1, lr 0.01, β₁ 0.9, ε 1e-15, 30,000 steps", (), curves)


# The loss scale
# R9: from 2³² the scale falls by halves until the largest gradient fits, then it saws: up after each
# window of clean steps, down at the next overflow. One broken batch costs one halving, a lasting one the
# run.


def loss_scale() -> Result:
    "R9: a scaler's arithmetic."
    largest = 0.003
    scale, _ = simulate_loss_scale(np.full(6000, largest), "megatron")
    fits = scale * largest <= 65504
    first = int(np.argmax(fits))
    needed = math.ceil(math.log2(2.0**32 * largest / 65504))
    saw = np.flatnonzero(np.diff(scale) > 0)
    once, lost = np.full(300, largest), np.full(300, largest)
    once[200], lost[200:] = np.inf, np.inf
    (one, one_skipped), (many, _) = (simulate_loss_scale(g, "torch") for g in (once, lost))
    halvings = int((np.diff(one) < 0).sum())
    steps = np.arange(300)
    runs = [new_run(make_scalars({"loss_scale": Samples(steps, values)})) for values in (one, many)]
    found = [diagnose(run).of("loss_scale_collapse") for run in runs]
    said = [one[0].severity if one else "" for one in found]
    checks = (
        Check(
            "halvings until the first finite step",
            int((np.diff(scale[: first + 1]) < 0).sum()),
            f"⌈log₂(2³²·max|g|/65504)⌉ = {needed}",
            (np.diff(scale[: first + 1]) < 0).sum() == needed,
        ),
        Check(
            "steps between rises of the saw",
            np.unique(np.diff(saw)).tolist(),
            "about the window of 1000",
            len(saw) > 1 and all(1000 <= gap <= 1010 for gap in np.diff(saw)),
        ),
        Check(
            "halvings and skipped steps after one broken batch",
            [halvings, int(one_skipped[100:].sum())],
            "one each",
            halvings == 1 and one_skipped[100:].sum() == 1,
        ),
        Check(
            "severity of one halving, and of a lasting overflow",
            said,
            "info and error",
            said[0] in ("", "info") and said[1] == "error",
        ),
    )
    curve = {"one broken batch": [steps, one], "lasting": [steps, many]}
    curves = {"x": "step", "y": "loss scale", "log": "y", "lines": curve}
    return Result("R9", checks, f"largest gradient {largest:g}; scalers of Megatron-LM and torch", (), curves)


# At the start of a training
# R10: the smaller the embedding, the larger the gradient of the first block, as the norm behind the
# embedding divides by it. R15: GLM's shrinking keeps the output and scales the embedding's gradient by
# exactly its share.

_WIDE = ModelConfig(vocab=128, seq=128, d_model=128, n_layer=4, n_head=4)


def _at_start(std: float, seed: int) -> dict[str, float]:
    "Gradient norms of a fresh model whose embeddings have this standard deviation."
    torch.manual_seed(seed)
    model = LanguageModel(_WIDE)
    for table in (model.embed, model.pos_embed):
        torch.nn.init.normal_(table.weight, std=std)
    model(*held_out(128)[0]).backward()
    first = model.blocks[0].attn
    share = sum(float(table.weight.grad.square().sum()) for table in (model.embed, model.pos_embed))
    whole = grad_norm(model.parameters())
    inner = grad_norm([getattr(first, name).weight for name in ("q_proj", "k_proj", "v_proj")])
    return {"all": whole, "first block": inner, "share of the embedding": share / whole**2}


def embedding_scale() -> Result:
    "R10: gradients at the start against the size of the embedding."
    stds, seeds = (0.002, 0.02, 0.1, 1.0), (0, 1, 2)
    rows = {std: pd.DataFrame(over_seeds(partial(_at_start, std), seeds)) for std in stds}
    means = {std: found.mean().to_dict() for std, found in rows.items()}
    checks = []
    for name in ("all", "first block", "share of the embedding"):
        series = [means[std][name] for std in stds]
        is_falling = all(a > b for a, b in itertools.pairwise(series))
        checks.append(Check(f"{name}, at embeddings of {stds}", series, "falling", is_falling))
    ratio = means[0.02]["first block"] / means[1.0]["first block"]
    checks.append(Check("first block, 0.02 over 1.0", ratio, "above 20", ratio > 20))
    table = pd.DataFrame(means).T
    lines = {str(name): [list(stds), table[name].tolist()] for name in table}
    curves = {"x": "std of the embedding", "y": "gradient norm; share", "log": "xy", "lines": lines}
    return Result("R10", tuple(checks), "4 layers of width 128 at initialisation, one batch", seeds, curves)


def embedding_shrink() -> Result:
    "R15: the same output, a share of the gradient."

    def measured(share: float | None) -> tuple[torch.Tensor, ...]:  # share of the gradient; None: no fix
        "Loss, and gradients of embedding and head."
        torch.manual_seed(0)
        model = LanguageModel(_WIDE)
        training = Training(model, torch.optim.AdamW(model.parameters()), lambda m, b: m(*b), lambda step: [])
        if share is not None:
            fix("embedding_shrink", share=share).apply(training)
        loss = model(*held_out(128)[0])
        loss.backward()
        return loss.detach(), model.embed.weight.grad, model.lm_head.weight.grad

    (loss, table, head), (shrunk, small, same) = measured(None), measured(0.1)
    ulps = abs(float(loss - shrunk)) / float(torch.finfo(torch.float32).eps * loss)
    off = float((small - 0.1 * table).norm() / (0.1 * table).norm())
    other = float((same - head).norm() / head.norm())
    checks = (
        Check("change of the loss, in spacings", ulps, "at most 2", ulps <= 2),
        Check("gradient of the table less a share of 0.1 of it", off, "0, to 1e-4", off < 1e-4),
        Check("change of the head's gradient", other, "0, to 1e-5", other < 1e-5),
    )
    return Result("R15", checks, "4 layers of width 128 at initialisation, one batch, share 0.1")


# The least entropy
# R14: a row of T logits whose distance from their mean is s has at least the entropy
# $\log(1+(T-1)b)+\frac{s\sqrt{T(T-1)}\,b}{1+(T-1)b}$ with $b=e^{-s\sqrt{T/(T-1)}}$. It is reached by one
# logit above all others.


def least_entropy(
    spread: float,  # distance of the logits from their mean, >= 0
    length: int,  # how many logits, > 1
) -> float:  # nats
    "The lower bound of the entropy of a softmax."
    b = math.exp(-spread * math.sqrt(length / (length - 1)))
    rest = 1 + (length - 1) * b
    return math.log(rest) + spread * math.sqrt(length * (length - 1)) * b / rest


def _lowest_found(spread: float, length: int, seeds: tuple[int, ...]) -> float:
    "The lowest entropy that gradient descent finds on the sphere of rows, from several starts."
    lowest = math.inf
    for seed in seeds:
        torch.manual_seed(seed)
        row = torch.randn(length, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([row], lr=0.05)
        for _ in range(400):
            centred = row - row.mean()
            p = (spread * centred / centred.norm()).softmax(0)
            entropy = torch.special.entr(p).sum()
            optimizer.zero_grad()
            entropy.backward()
            optimizer.step()
        lowest = min(lowest, float(entropy.detach()))
    return lowest


def entropy_bound() -> Result:
    "R14: the bound, its values, and that nothing falls below it."
    checks, seeds = [], (0, 1, 2)
    for spread, told in ((1.0, 4.1437), (10.0, 0.0292)):
        bound, found = least_entropy(spread, 64), _lowest_found(spread, 64, seeds)
        checks.append(Check(f"bound at spread {spread:g}", bound, f"{told}", abs(bound - told) < 5e-5))
        is_least = -1e-9 <= found - bound < 0.02
        checks.append(
            Check("lowest entropy found there, less the bound", found - bound, "0 to 0.02", is_least)
        )
    return Result("R14", tuple(checks), "rows of 64 logits, 400 steps of Adam from 3 starts", seeds)


# A public log
# G1: three lines of BLOOM's 104B trial, with a quiet history made up before them. The gradient norm is
# found one step before the loss.


def gradient_leads() -> Result:
    "G1: which moved first in BLOOM's log."
    rng = np.random.default_rng(0)
    loss = np.r_[3.08 + rng.normal(0, 0.02, 200), 3.0626, 3.1143, 7.7123]
    norm = np.r_[13000 * np.exp(rng.normal(0, 0.1, 200)), 12953, 262623, 254699]
    step = np.arange(11448 - 202, 11449)
    found = diagnose(new_run(make_scalars({"loss": Samples(step, loss), "grad_norm": Samples(step, norm)})))
    led = [f.evidence["lead_steps"] for f in found.of("grad_norm_explosion") if "lead_steps" in f.evidence]
    spikes = [f.onset for f in found.of("loss_spike", "divergence")]
    checks = (
        Check("step of the loss event", spikes, "11448", spikes == [11448]),
        Check("steps by which the gradient norm leads", led, "1", led == [1]),
    )
    return Result("G1", checks, "three public records behind 200 made ones")
