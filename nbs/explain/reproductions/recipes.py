"""What reproductions and open experiments train: a small language model on the sources of Python's library

A comparison is worth something where both arms differ in one thing only. A `Recipe` holds everything
that a training here depends on; `train_lm` takes it, a seed, and fixes of the registry, and gives back
the curve, the loss on held-out text and the model.

Limits: Byte-level text and a fraction of a million parameters. Effects that need width, depth or
billions of tokens do not show; which ones is said beside each result.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from stabilitylab.fixes.registry import Fix, apply_all
from stabilitylab.fixes.training import Training
from stabilitylab.models.attention import Attention
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import byte_batches, stdlib_bytes

# Settings

SMALL = ModelConfig(vocab=128, seq=32, d_model=64, n_layer=3, n_head=4)  # 0.17 M parameters


@dataclass(frozen=True)
class Recipe:
    "Everything that a training depends on, its seed aside."

    config: ModelConfig = field(default=SMALL)  # of the model
    lr: float = 1e-3  # peak learning rate
    steps: int = 150  # of the optimizer
    warmup: int = 30  # steps of linear warm-up
    clip: float | None = 1.0  # largest gradient norm; None: none
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.1  # of AdamW
    z_loss: float = 0.0  # factor of the squared log Z
    batch: int = 16  # sequences a step


@dataclass(frozen=True)
class Trained:
    "What a training came to."

    loss: np.ndarray  # (step,) training loss, nats
    grad_norm: np.ndarray  # (step,) L2 norm before clipping
    val_loss: float  # on held-out text at the end, nats
    model: torch.nn.Module  # in its last state


def rate_at(
    recipe: Recipe,  # of the training
    step: int,  # from 0
) -> float:  # learning rate
    "Linear warm-up, then a cosine to 3 % of the peak."
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.03 + 0.97 * (1 + math.cos(math.pi * share)) / 2)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    "Numbers too small for a normal float are 0 inside: saturated softmaxes make many, and each is slow."
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


# Training

_TEXT_BYTES, _HELD_OUT = 1_000_000, 100_000


@cache
def _text() -> np.ndarray:
    "The text of all trainings."
    return stdlib_bytes(_TEXT_BYTES)


@cache
def held_out(
    seq: int = 32,  # tokens a sequence
) -> list[tuple[torch.Tensor, torch.Tensor]]:  # four batches of inputs and targets (16, seq)
    "Text that no training sees, the same for every arm and seed."
    return list(byte_batches(_text()[-_HELD_OUT:], 4, 16, seq, seed=12345))


@torch.no_grad()
def validation_loss(
    model: torch.nn.Module,  # of text
) -> float:  # mean over the held-out batches, nats
    "The loss on held-out text."
    batches = held_out(model.config.seq)
    return float(np.mean([model(x, y).item() for x, y in batches]))


def _z_regularised(
    factor: float,  # of the squared log Z
) -> Callable:  # (model, (tokens, targets)) -> loss
    "Cross-entropy plus z-loss."

    def loss(model: torch.nn.Module, part: tuple) -> torch.Tensor:  # part: inputs and targets
        "The loss with z-loss of one micro-batch."
        logits = model(part[0]).float()
        log_z = logits.logsumexp(-1)
        chosen = logits.gather(-1, part[1][..., None])[..., 0]
        return (log_z - chosen).mean() + factor * log_z.square().mean()

    return loss


def start_training(
    recipe: Recipe,  # of the training
    seed: int = 0,  # of weights and batches
    model: torch.nn.Module | None = None,  # to go on with; None: a fresh one
) -> Training:  # before its first step
    "Model, optimizer, batches and schedule of a recipe."
    torch.manual_seed(seed)
    model = LanguageModel(recipe.config) if model is None else model
    batches = list(byte_batches(_text()[:-_HELD_OUT], recipe.steps, recipe.batch, recipe.config.seq, seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.lr, recipe.betas, recipe.eps, recipe.weight_decay
    )

    def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:  # step: the one that comes
        "Sets the rate of a step."
        for group in optimizer.param_groups:
            group["lr"] = rate_at(recipe, step)

    plain = _z_regularised(0.0)
    loss = _z_regularised(recipe.z_loss) if recipe.z_loss else plain
    return Training(
        model,
        optimizer,
        loss,
        lambda step: [batches[step % len(batches)]],
        schedule,
        recipe.clip,
        seed=seed,
        measure=None if loss is plain else plain,
    )


def train_lm(
    recipe: Recipe,  # of the training
    seed: int = 0,  # of weights and batches
    fixes: tuple[Fix, ...] = (),  # applied before the first step
    after_step: Callable | None = None,  # (training) -> None
    model: torch.nn.Module | None = None,  # to go on with; None: a fresh one
) -> Trained:  # at the end
    "Train a small language model."
    with flushed_denormals():
        training = start_training(recipe, seed, model)
        apply_all(training, list(fixes))
        steps = []
        for _ in range(recipe.steps):
            steps.append(training.run_step())
            if after_step is not None:
                after_step(training)
        val_loss = validation_loss(training.model)
    loss = np.array([s.loss for s in steps])
    return Trained(loss, np.array([s.grad_norm for s in steps]), val_loss, training.model)


def over_seeds(
    run: Callable,  # (seed) -> anything
    seeds: Iterable[int],  # to run
) -> list:  # one a seed
    "What one arm gives with each seed."
    return [run(seed) for seed in seeds]


def mean_over(
    rows: Iterable,  # of `over_seeds`
    read: Callable,  # (row) -> number
) -> float:
    "The mean of what is read from each row."
    return float(np.mean([read(row) for row in rows]))


# Measured on the trained model


@dataclass(frozen=True)
class AttentionExtremes:
    "What the attention of a model has come to, on held-out text."

    logit_max: float  # largest attention logit of all heads
    entropy: float  # mean attention entropy of all rows, nats
    sink_share: float  # share of heads whose best-fed position gets more than 0.3


@torch.no_grad()
def _weights_and_logits(attn: Attention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    "Attention weights (batch, head, query, key) and the largest visible logit of one layer, without a cap."
    rows, length, _ = x.shape
    by_head = (rows, length, attn.n_head, -1)
    q = attn.q_norm(attn.q_proj(x).view(by_head).transpose(1, 2))
    k = attn.k_norm(attn.k_proj(x).view(by_head).transpose(1, 2))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1), logits.max()


@torch.no_grad()
def attention_extremes(
    model: LanguageModel,  # with learned or no positions
) -> AttentionExtremes:  # over all layers and heads
    "Largest logit, mean entropy and share of sinks."
    inputs: list[torch.Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    handles = [layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for layer in layers]
    model(held_out(model.config.seq)[0][0])
    for handle in handles:
        handle.remove()
    seen = [_weights_and_logits(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    weights = torch.stack([one for one, _ in seen])  # (layer, batch, head, query, key)
    received = weights.mean(1).mean(-2)  # (layer, head, key), over all queries
    return AttentionExtremes(
        float(max(largest for _, largest in seen)),
        float(torch.special.entr(weights).sum(-1).mean()),
        float((received.amax(-1) > 0.3).float().mean()),
    )


def rate_sensitivity(
    finals: dict[float, float],  # learning rate -> final loss; what is not finite counts as `start`
    start: float,  # loss at initialisation, nats
) -> float:  # nats; 0 where every rate ends alike
    "How far the final loss is from the best one, on average over rates (Wortsman et al., 2309.14322)."
    capped = [min(loss, start) if math.isfinite(loss) else start for loss in finals.values()]
    return float(np.mean(capped) - min(capped))
