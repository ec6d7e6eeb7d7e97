"""Small models trained for seconds to minutes, each comparison over several seeds

Each function trains what a published result needs, at the smallest size at which its sign and order of
magnitude held, and holds the numbers against their oracle. What was scaled down stands in the settings
of its result.

Limits: Two or three seeds show a sign, not a distribution. Settings that were made smaller than the
original's are named in each result.
"""

import itertools
import math
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np
import pandas as pd
import torch

from reproductions.recipes import (
    SMALL,
    Recipe,
    Trained,
    attention_extremes,
    flushed_denormals,
    held_out,
    mean_over,
    over_seeds,
    rate_sensitivity,
    train_lm,
)
from reproductions.results import Check, Result
from stabilitylab.fixes.training import Training
from stabilitylab.models.parts import ModelConfig
from stabilitylab.numerics.formats import quantise, stochastic_round

# R1: learning rates
# Seven learning rates over three decades, with and without a LayerNorm on queries and keys. The
# sensitivity is the mean distance of the final loss from the best one. The effect needs time to grow:
# after 150 steps of 32 bytes the largest logits differed by a factor of 8 at a rate of 1e-2, and the
# sensitivities by 1.2.

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def _over_rates(config: ModelConfig, seed: int = 0) -> dict[float, tuple[float, float, float]]:
    "Validation loss, largest logit and mean entropy at every rate."
    ends = {}
    for rate in RATES:
        trained = train_lm(Recipe(replace(config, seq=64), lr=rate, steps=300), seed)
        with flushed_denormals():
            seen = attention_extremes(trained.model)
        ends[rate] = trained.val_loss, seen.logit_max, seen.entropy
    return ends


def attention_logits() -> Result:
    "R1: attention logits and the loss against the learning rate."
    arms = {"plain": _over_rates(SMALL), "qk-norm": _over_rates(replace(SMALL, qk_norm="ln"))}
    start = math.log(SMALL.vocab)
    losses = {arm: pd.DataFrame(ends).loc[0].to_dict() for arm, ends in arms.items()}
    spread = {arm: rate_sensitivity(finals, start) for arm, finals in losses.items()}
    high = [rate for rate in RATES if rate >= 1e-2]
    ratios = [arms["plain"][rate][1] / arms["qk-norm"][rate][1] for rate in high]
    grows = [arms["plain"][rate][1] for rate in RATES]
    checks = (
        Check(
            "largest logit, plain over qk-norm, at rates from 1e-2 on",
            ratios,
            "each above 20",
            min(ratios) > 20,
        ),
        Check(
            "largest logit at the highest over that at the lowest rate",
            grows[-1] / grows[0],
            "above 1000",
            grows[-1] > 1000 * grows[0],
        ),
        Check(
            "least mean entropy of the plain arm, nats",
            min(e[2] for e in arms["plain"].values()),
            "below 0.5",
            min(e[2] for e in arms["plain"].values()) < 0.5,
        ),
        Check(
            "least mean entropy with qk-norm, nats",
            min(e[2] for e in arms["qk-norm"].values()),
            "above 1",
            min(e[2] for e in arms["qk-norm"].values()) > 1,
        ),
        Check(
            "sensitivity to the rate, plain and qk-norm",
            [spread["plain"], spread["qk-norm"]],
            "ratio above 1.5",
            spread["plain"] > 1.5 * spread["qk-norm"],
        ),
    )
    lines = {arm: [list(RATES), list(finals.values())] for arm, finals in losses.items()}
    curves = {"x": "learning rate", "y": "validation loss [nats]", "log": "x", "lines": lines}
    settings = "3 layers of width 64 (0.17 M parameters, not 0.84 M), 300 steps of 16 x 64 bytes"
    return Result("R1", checks, settings, (0,), curves)


# R3: weights in bf16
# The same training three times: float32 weights, bf16 weights rounded to nearest after each step, and bf16
# weights rounded stochastically.


def _rounder(kind: str, lost: list[float]):
    "What is done to the weights after each step; the share of lost updates goes into a list."
    before: dict[int, torch.Tensor] = {}

    def after_step(training: Training) -> None:  # that just took a step
        "Rounds the weights and counts those that did not move."
        moved = total = 0
        for i, p in enumerate(training.model.parameters()):
            if kind == "nearest":
                new = quantise(p.data, "bf16")
            elif kind == "stochastic":
                new = stochastic_round(p.data, "bf16")
            else:
                new = p.data
            if i in before:
                moved += int((before[i] != new).sum())
                total += new.numel()
            before[i] = new.clone()
            p.data = new
        if total:
            lost.append(1 - moved / total)

    return after_step


def bf16_weights() -> Result:
    "R3: the loss that rounding to nearest costs, and that stochastic rounding does not."
    ends: dict[tuple[str, float], list[float]] = {}
    lost: dict[str, list[float]] = {}
    seeds = (0, 1)
    for rate in (3e-4, 3e-3):
        for kind in ("float32", "nearest", "stochastic"):
            for seed in seeds:
                shares: list[float] = []
                recipe = Recipe(lr=rate, steps=300, weight_decay=0.0)
                trained = train_lm(recipe, seed, after_step=_rounder(kind, shares))
                ends.setdefault((kind, rate), []).append(trained.val_loss)
                lost[f"{kind} {rate:g}"] = shares
    mean = {key: float(np.mean(values)) for key, values in ends.items()}
    gap = {rate: mean["nearest", rate] - mean["float32", rate] for rate in (3e-4, 3e-3)}
    other = mean["stochastic", 3e-4] - mean["float32", 3e-4]
    late = {kind: float(np.mean(lost[f"{kind} 0.0003"][-75:])) for kind in ("nearest", "float32")}
    checks = (
        Check(
            "loss of rounding to nearest less float32, nats, rate 3e-4",
            gap[3e-4],
            "above 0.02",
            gap[3e-4] > 0.02,
        ),
        Check(
            "loss of stochastic rounding less float32, nats",
            other,
            "within a quarter of that",
            abs(other) < gap[3e-4] / 4,
        ),
        Check(
            "updates lost in the last quarter, nearest", late["nearest"], "above 0.5", late["nearest"] > 0.5
        ),
        Check(
            "updates lost in the last quarter, float32", late["float32"], "below 0.1", late["float32"] < 0.1
        ),
        Check("gap at a rate of 3e-3, nats", gap[3e-3], "smaller", gap[3e-3] < gap[3e-4] / 2),
    )
    steps = np.arange(1, 300)
    lines = {kind: [steps[::6], np.array(lost[f"{kind} 0.0003"])[::6]] for kind in ("float32", "nearest")}
    curves = {"x": "step", "y": "share of updates lost", "log": "", "lines": lines}
    settings = "3 layers of width 64, 300 steps (400 of width 96 in the original), no weight decay"
    return Result("R3", checks, settings, seeds, curves)


# R8: z-loss, and R13: warm-up


def _log_z(trained: Trained) -> float:
    "Mean log Z on held-out text."
    with torch.no_grad():
        logits = trained.model(held_out(trained.model.config.seq)[0][0])
    return float(logits.float().logsumexp(-1).mean())


def z_loss_dose() -> Result:
    "R8: how much z-loss moves log Z within a short training."
    doses, seeds = (0.0, 1e-4, 1e-3, 1e-2, 1e-1), (0, 1)
    config = replace(SMALL, qk_norm="ln")
    recipes = {dose: Recipe(config, lr=3e-3, z_loss=dose) for dose in doses}
    rows = {dose: over_seeds(partial(train_lm, recipe), seeds) for dose, recipe in recipes.items()}
    log_z = [mean_over(rows[dose], _log_z) for dose in doses]
    loss = [mean_over(rows[dose], attrgetter("val_loss")) for dose in doses]
    is_falling = all(a > b for a, b in itertools.pairwise(log_z))
    checks = (
        Check("log Z at 0, 1e-4, 1e-3, 1e-2 and 1e-1", log_z, "falling", is_falling),
        Check(
            "change at 1e-4",
            (log_z[0] - log_z[1]) / log_z[0],
            "down, by less than 5 %",
            0 < log_z[0] - log_z[1] < 0.05 * log_z[0],
        ),
        Check("log Z at 1e-1", log_z[-1], "below 0.3", abs(log_z[-1]) < 0.3),
        Check("validation losses", loss, "nothing: two seeds tell no sign of a difference so small"),
    )
    lines = {"log Z": [[1e-5, *doses[1:]], log_z]}
    curves = {"x": "factor of the z-loss (1e-5 stands for 0)", "y": "mean log Z", "log": "x", "lines": lines}
    return Result("R8", checks, "3 layers of width 64, qk-norm, rate 3e-3, 150 steps", seeds, curves)


def warmup() -> Result:
    "R13: a cold start against a hundred steps of warm-up."
    seeds, places = (0, 1, 2), ("pre", "post")
    ends: dict[tuple[str, int], list[float]] = {}
    for place in places:
        config = replace(SMALL, n_layer=4, norm_place=place)
        for steps in (1, 100):
            recipe = Recipe(config, lr=3e-3, warmup=steps, clip=None)
            ends[place, steps] = [train_lm(recipe, seed).val_loss for seed in seeds]
    gains = [cold - warm for cold, warm in zip(ends["pre", 1], ends["pre", 100], strict=True)]
    post = [cold - warm for cold, warm in zip(ends["post", 1], ends["post", 100], strict=True)]
    checks = (
        Check(
            "pre-norm: loss without less loss with warm-up, by seed",
            gains,
            "above 0.05 each",
            min(gains) > 0.05,
        ),
        Check(
            "spread of the warm runs, nats",
            float(np.ptp(ends["pre", 100])),
            "below 0.1",
            np.ptp(ends["pre", 100]) < 0.1,
        ),
        Check("post-norm: the same difference, by seed", post, "nothing: it depends on the seed"),
    )
    names = {
        ("pre", 1): "pre, none",
        ("pre", 100): "pre, 100",
        ("post", 1): "post, none",
        ("post", 100): "post, 100",
    }
    lines = {name: [list(seeds), ends[key]] for key, name in names.items()}
    curves = {"x": "seed", "y": "validation loss [nats]", "log": "", "lines": lines}
    return Result(
        "R13",
        checks,
        "4 layers of width 64 (6 in the original), rate 3e-3, no clipping, 150 steps",
        seeds,
        curves,
    )


# R10b: wide initial weights


def wide_init() -> Result:
    "R10b: initial weights of a third of the rule to six times it."
    factors, seeds = (0.34, 1.0, 3.41, 6.0), (0, 1)
    base = replace(SMALL, n_layer=4, init="two_fifths")
    recipes = {factor: Recipe(replace(base, init_factor=factor)) for factor in factors}
    rows = {factor: over_seeds(partial(train_lm, recipe), seeds) for factor, recipe in recipes.items()}
    loss = [mean_over(found, attrgetter("val_loss")) for found in rows.values()]
    first = [mean_over(found, lambda trained: trained.loss[0]) for found in rows.values()]
    norm = [mean_over(found, lambda trained: trained.grad_norm[0]) for found in rows.values()]
    is_finite = all(np.isfinite(trained.loss).all() for found in rows.values() for trained in found)
    checks = (
        Check(
            "validation loss at 1, 3.41 and 6 times the rule", loss[1:], "rising", loss[1] < loss[2] < loss[3]
        ),
        Check(
            "first loss at the four widths",
            first,
            "rising",
            all(np.diff(first) > -0.05) and first[-1] > first[0],
        ),
        Check("first gradient norm, 6 times over once", norm[3] / norm[1], "above 2", norm[3] > 2 * norm[1]),
        Check(
            "all losses finite",
            is_finite,
            "false: at 104B a width of 3.41 times the rule did not train",
            not is_finite,
        ),
    )
    lines = {str(f): [np.arange(0, 150, 3), found[0].loss[::3]] for f, found in rows.items()}
    curves = {"x": "step", "y": "loss [nats]", "log": "", "lines": lines}
    return Result(
        "R10b", checks, "4 layers of width 64 (8 of 96 in the original), rate 1e-3, 150 steps", seeds, curves
    )
