"""Rounding, sinks, repeats and the loader: what small trainings show of causes

Each function trains what a published result needs, at the smallest size at which its sign and order of
magnitude held, and holds the numbers against their oracle. What was scaled down stands in the settings
of its result.

Limits: Two or three seeds show a sign, not a distribution. Settings that were made smaller than the
original's are named in each result.
"""

import itertools
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from torch.nn import functional as F

from reproductions.recipes import (
    Recipe,
    flushed_denormals,
    held_out,
    mean_over,
    over_seeds,
    start_training,
    train_lm,
)
from reproductions.results import Check, Result
from stabilitylab.cases.states import TriggerReader, trained_reader, trigger_batch
from stabilitylab.fixes.training import grad_norm
from stabilitylab.models.parts import ModelConfig

# R5: spikes of rounding
# Addition modulo 31, all 961 pairs in each batch, once in float32 and once in float64.


def _addition(dtype: torch.dtype, seed: int, steps: int, modulus: int = 31) -> tuple[np.ndarray, np.ndarray]:
    "Loss and share of samples whose probability is exactly 1, at each step."
    torch.manual_seed(seed)
    a, b = torch.meshgrid(torch.arange(modulus), torch.arange(modulus), indexing="ij")
    pairs = [F.one_hot(part.flatten(), modulus) for part in (a, b)]
    x, y = torch.cat(pairs, 1).to(dtype), (a + b).flatten() % modulus
    widths = (2 * modulus, 128, 128, modulus)
    layers = [torch.nn.Linear(m, n) for m, n in itertools.pairwise(widths)]
    net = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2, betas=(0.9, 0.95))
    losses, ones, rows = [], [], torch.arange(len(y))
    for _ in range(steps):
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        ones.append(float((logits.detach().softmax(1)[rows, y] == 1).double().mean()))
    return np.array(losses), np.array(ones)


def _leaps(loss: np.ndarray, start: int = 300, level: float = 1e-3, apart: int = 100) -> np.ndarray:
    "Steps at which a loss that had been low leaps above a level."
    is_leap = (loss[start + 1 :] > level) & (loss[start:-1] <= level)
    at = start + np.flatnonzero(is_leap)
    return at[np.diff(at, prepend=-1000) > apart]


def rounding_spikes() -> Result:
    "R5: spikes in float32, none in float64."
    seeds, steps = (0, 1, 2), 2000
    single = {seed: _addition(torch.float32, seed, steps) for seed in seeds}
    double = {seed: _addition(torch.float64, seed, steps) for seed in seeds}
    counts = {"float32": [len(_leaps(single[s][0])) for s in seeds]}
    counts["float64"] = [len(_leaps(double[s][0])) for s in seeds]
    leads = [
        int(_leaps(loss)[0]) - int(np.argmax(ones > 0.01))
        for loss, ones in single.values()
        if len(_leaps(loss))
    ]
    checks = (
        Check("spikes in float32, by seed", counts["float32"], "1 or more each", min(counts["float32"]) >= 1),
        Check("spikes in float64, by seed", counts["float64"], "0 each", max(counts["float64"]) == 0),
        Check(
            "steps from 1 % exactly right to the first spike",
            leads,
            "positive",
            bool(leads) and min(leads) > 0,
        ),
    )
    shown = np.arange(0, steps, 8)
    runs = {"float32": single[0][0], "float64": double[0][0]}
    lines = {name: [shown, np.maximum(loss[::8], 1e-16)] for name, loss in runs.items()}
    curves = {"x": "step", "y": "loss [nats]", "log": "y", "lines": lines}
    settings = "MLP of 62-128-128-31, Adam 1e-2, β₂ 0.95, 2000 steps (3500 in the original)"
    return Result("R5", checks, settings, seeds, curves)


# R6: the sink
# One attention layer on a task with little to read, with three ways to make weights of scores.


def _on_the_flag(model: TriggerReader, seed: int) -> tuple[float, float]:
    "Weight on the first position at queries without a trigger, and the error over the variance."
    x, wanted, fires = trigger_batch(torch.Generator().manual_seed(1000 + seed), 256)
    with torch.no_grad():
        weights, _ = model.weights(x)
        error = F.mse_loss(model(x), wanted) / wanted.var()
    first = weights[..., 0].mean(1)
    is_idle = ~fires
    is_idle[:, 0] = False
    return float(first[is_idle].mean()), float(error)


def _reader_outcome(kind: str, seed: int) -> tuple[float, float]:
    "The same of a reader that was trained."
    return _on_the_flag(trained_reader(kind, 1500, seed, 3e-3), seed)


def sinks() -> Result:
    "R6: softmax makes a sink, a learned logit or ReLU does not need one."
    seeds, kinds = (0, 1, 2), ("softmax", "learned sink", "relu")
    rows = {kind: np.array(over_seeds(partial(_reader_outcome, kind), seeds)) for kind in kinds}
    weight = {kind: found[:, 0].tolist() for kind, found in rows.items()}
    error = {kind: float(found[:, 1].mean()) for kind, found in rows.items()}
    checks = (
        Check(
            "weight on the flag, softmax, by seed",
            weight["softmax"],
            "above 0.9",
            min(weight["softmax"]) > 0.9,
        ),
        Check(
            "with a learned sink logit",
            weight["learned sink"],
            "below 0.3",
            max(weight["learned sink"]) < 0.3,
        ),
        Check("with ReLU attention", weight["relu"], "below 0.1", max(weight["relu"]) < 0.1),
        Check(
            "error over variance: softmax, learned, ReLU",
            list(error.values()),
            "learned within 0.05 of softmax",
            abs(error["learned sink"] - error["softmax"]) < 0.05,
        ),
    )
    lines = {kind: [[0, 1, 2], values] for kind, values in weight.items()}
    curves = {"x": "seed", "y": "weight on the first position", "log": "", "lines": lines}
    return Result(
        "R6", checks, "one layer, 2 heads, width 32, 16 positions, 1500 steps of Adam 3e-3", seeds, curves
    )


# R11: repeats
# A trained model meets batches that repeat a short string, and one of random characters that it predicts
# no better.


def _bytes_of(text: str, rows: int, seq: int) -> torch.Tensor:
    "A batch that says one string over and over."
    codes = np.frombuffer(text.encode(), np.uint8)
    row = np.tile(codes, -(-(seq + 1) // len(codes)))[: seq + 1]
    return torch.from_numpy(np.tile(row, (rows, 1)).astype(np.int64))


def _norm_and_loss(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    "Gradient norm and loss of one batch."
    model.zero_grad(set_to_none=True)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return grad_norm(model.parameters()), float(loss.detach())


def repeats() -> Result:
    "R11: gradients of repeated n-grams."
    seeds = (0, 1)
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in seeds:
        model = train_lm(Recipe(lr=3e-3, steps=300), seed).model
        rng = np.random.default_rng(seed)
        usual = torch.cat([held_out()[0][0][:, :1], held_out()[0][1]], 1)
        noise = torch.from_numpy(rng.integers(32, 127, (16, 33)))
        batches = {"usual": usual, "x": _bytes_of("x", 16, 32), "backslash": _bytes_of("\\", 16, 32)}
        batches |= {"g4OD": _bytes_of("g4OD", 16, 32), "random characters": noise}
        for name, tokens in batches.items():
            found.setdefault(name, []).append(_norm_and_loss(model, tokens))
    norms = {name: mean_over(rows, itemgetter(0)) for name, rows in found.items()}
    losses = {name: mean_over(rows, itemgetter(1)) for name, rows in found.items()}
    checks = [
        Check(
            f"gradient norm of {name!r} over that of usual text",
            norms[name] / norms["usual"],
            "above 5",
            norms[name] > 5 * norms["usual"],
        )
        for name in ("x", "backslash", "g4OD")
    ]
    is_more = norms["g4OD"] > 1.5 * norms["random characters"]
    what = "gradient norms of 'g4OD' and of random characters"
    checks.append(
        Check(what, [norms["g4OD"], norms["random characters"]], "the first 1.5 times the second", is_more)
    )
    told = [losses["g4OD"], losses["random characters"]]
    checks.append(Check("their losses, nats", told, "nothing: they tell that the loss does not explain it"))
    return Result(
        "R11", tuple(checks), "3 layers of width 64, 300 steps at 3e-3 (400 in the original)", seeds
    )


# R12: what the loader does to the loss
# R12: after a restart the loader emits mostly the hard stratum for 50 steps; the mean loss jumps and the
# loss of each stratum stays flat. R12b: after a restart the same 100 batches come twenty times, then fresh
# ones; the training loss falls below validation and leaps back.


def _strata(seed: int, steps: int, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    "Losses of the two strata (step, 2) and the mean loss, as the loader mixes text and random bytes."
    recipe = Recipe(lr=1e-3, steps=steps)
    training, rng = start_training(recipe, seed), np.random.default_rng(seed)
    source, each, mean = training.batches, [], []

    def mixed(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:  # from 0
        "The batch of a step with its share of noise."
        ((x, y),) = source(step)
        hard = round(float(shares[step]) * len(x))
        noise = torch.from_numpy(rng.integers(0, 128, (hard, x.shape[1] + 1)))
        x, y = x.clone(), y.clone()
        x[:hard], y[:hard] = noise[:, :-1], noise[:, 1:]
        return [(x, y)]

    training.batches = mixed
    for step in range(steps):
        ((x, y),) = mixed(step)
        hard = round(float(shares[step]) * len(x))
        with torch.no_grad():
            each.append(
                [float(training.model(x[part], y[part])) for part in (slice(hard), slice(hard, None))]
            )
        mean.append(training.run_step().loss)
    return np.array(each), np.array(mean)


def resume_mixture() -> Result:
    "R12: a jump of the mean that no stratum shows."
    seeds, at, width = (0, 1), 150, 50
    jumps, parts = [], []
    for seed in seeds:
        shares = np.full(220, 0.25)
        shares[at : at + width] = 0.75
        each, mean = _strata(seed, 220, shares)
        before, during = slice(at - 40, at), slice(at, at + width)
        jumps.append(float(mean[during].mean() - mean[before].mean()))
        parts.append([float(each[during, k].mean() - each[before, k].mean()) for k in range(2)])
        composition = 0.5 * float(each[before, 0].mean() - each[before, 1].mean())
    largest = float(np.abs(parts).max())
    checks = (
        Check("jump of the mean loss, nats, by seed", jumps, "above 0.5", min(jumps) > 0.5),
        Check(
            "largest change of a stratum's loss, nats",
            largest,
            "below a fifth of the jump",
            largest < min(jumps) / 5,
        ),
        Check(
            "share of the jump that the mixture explains",
            composition / jumps[-1],
            "0.8 to 1.2",
            0.8 < composition / jumps[-1] < 1.2,
        ),
    )
    steps = np.arange(100, 220)
    lines = {
        "mean": [steps, mean[100:]],
        "random bytes": [steps, each[100:, 0]],
        "text": [steps, each[100:, 1]],
    }
    curves = {"x": "step", "y": "loss [nats]", "log": "", "lines": lines}
    return Result(
        "R12",
        checks,
        "3 layers of width 64; a quarter of each batch is random bytes, three quarters for 50 steps",
        seeds,
        curves,
    )


def repeated_data() -> Result:
    "R12b: twenty passes over a hundred batches, then fresh ones."
    fresh, again, passes = 200, 100, 20
    config = ModelConfig(vocab=128, seq=32, d_model=64, n_layer=2, n_head=4)
    total = fresh + again * passes + 200
    training = start_training(Recipe(config, lr=1e-3, steps=fresh + again + 200, warmup=30), 0)
    source, resumed = training.batches, fresh + again * passes

    def looped(step: int) -> list:  # from 0
        "The batch of a step: fresh, again and again, or fresh again."
        if step < fresh:
            return source(step)
        return source(fresh + (step - fresh) % again if step < resumed else step - resumed + fresh + again)

    training.batches = looped
    training.schedule = lambda optimizer, step: None
    losses, validation, at = [], [], []
    with flushed_denormals():
        for step in range(total):
            losses.append(training.run_step().loss)
            if step % 50 == 0:
                with torch.no_grad():
                    values = [float(training.model(x, y)) for x, y in held_out(32)]
                validation.append(float(np.mean(values)))
                at.append(step)
    loss, held = np.array(losses), np.array(validation)
    before, low, after = (
        float(np.mean(loss[s]))
        for s in (slice(fresh - 40, fresh), slice(resumed - 50, resumed), slice(resumed + 5, resumed + 55))
    )
    val = [float(np.interp(step, at, held)) for step in (resumed - 25, resumed + 100)]
    checks = (
        Check(
            "training loss before, at the end of the repeats, after, nats",
            [before, low, after],
            "falls by 0.1 or more, then leaps by more than 0.1",
            before - low > 0.1 and after - low > 0.1,
        ),
        Check(
            "change of validation over the leap, nats",
            val[1] - val[0],
            "within a third of the leap, to either side",
            abs(val[1] - val[0]) < (after - low) / 3,
        ),
    )
    lines = {"training": [np.arange(total)[::20], loss[::20]], "validation": [at, held]}
    curves = {"x": "step", "y": "loss [nats]", "log": "", "lines": lines}
    return Result("R12b", checks, "2 layers of width 64, 32 bytes, 2400 steps at 1e-3", (0,), curves)
