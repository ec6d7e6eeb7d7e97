"""Each experiment as a list of arms that differ in one thing

An arm is a recipe, or a recipe with fixes of the registry. All arms of an experiment share their seeds,
so they share first weights (where the shapes agree) and batches, and their differences can be paired.

Limits: Each experiment fixes what it does not vary at one value; another rate, depth or length may
answer otherwise.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from reproductions.experiments import Outcome
from reproductions.recipes import (
    SMALL,
    Recipe,
    Trained,
    attention_extremes,
    flushed_denormals,
    held_out,
    rate_sensitivity,
    start_training,
    train_lm,
    validation_loss,
)
from reproductions.vlm import frozen_vlm as frozen_vlm
from stabilitylab.detect.loss.spikes import out_of_range
from stabilitylab.fixes.registry import Fix, fix
from stabilitylab.fixes.training import grad_norm
from stabilitylab.models.decoder import LanguageModel, TranslationModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import Task, translation_task

# Language models
# Measured at the end: loss on held-out text, the largest attention logit, the number of records out of
# range and the largest gradient norm behind warm-up.

_SEEDS = (0, 1, 2)
Arm = tuple[Recipe, tuple[Fix, ...]]  # recipe and fixes


def _measures(trained: Trained, warmup: int) -> dict[str, float]:
    "What is told of one training."
    with flushed_denormals():
        logit = attention_extremes(trained.model).logit_max
    return {
        "validation loss": trained.val_loss,
        "largest logit": logit,
        "spikes": float(len(out_of_range(trained.loss)[0])),
        "largest gradient norm": float(trained.grad_norm[warmup:].max()),
    }


def _trained(arms: dict[str, Arm], settings: str) -> Outcome:
    "All arms with all seeds."
    found: dict[str, dict[str, list[float]]] = {}
    for label, (recipe, remedies) in arms.items():
        rows = [_measures(train_lm(recipe, seed, remedies), recipe.warmup) for seed in _SEEDS]
        for row in rows:
            for name, value in row.items():
                found.setdefault(label, {}).setdefault(name, []).append(value)
    return Outcome(found, "validation loss", _SEEDS, settings)


_HIGH = Recipe(lr=3e-2)  # a rate that is too high


def non_cures() -> Outcome:
    "Remedies that were reported as failed, beside some that were reported to work."
    arms: dict[str, Arm] = {
        "unchanged": (_HIGH, ()),
        "no weight decay": (replace(_HIGH, weight_decay=0.0), ()),
        "weight decay 1": (replace(_HIGH, weight_decay=1.0), ()),
        "norm behind outputs": (replace(_HIGH, config=replace(SMALL, norm_place="peri")), ()),
        "clip at 0.3": (replace(_HIGH, clip=0.3), ()),
        "eps 1e-6": (replace(_HIGH, eps=1e-6), ()),
        "soft-cap 50": (replace(_HIGH, config=replace(SMALL, cap=50.0)), ()),
        "qk-clip 100": (_HIGH, (fix("qk_clip"),)),
        "qk-norm": (replace(_HIGH, config=replace(SMALL, qk_norm="ln")), ()),
        "a third of the rate": (replace(_HIGH, lr=1e-2), ()),
    }
    return _trained(arms, "3 layers of width 64, rate 3e-2, 150 steps of 16 x 32 bytes")


def beta2() -> Outcome:
    "Decays of the second moment at two rates."
    arms: dict[str, Arm] = {}
    for rate in (3e-3, 3e-2):
        for decay in (0.95, 0.9, 0.99, 0.999):
            recipe = Recipe(lr=rate, betas=(0.9, decay))
            arms[f"rate {rate:g}, β₂ {decay:g}"] = (recipe, ())
    return _trained(arms, "3 layers of width 64, 150 steps; all compared with the first arm")


def warmup_lengths() -> Outcome:
    "Steps of warm-up at a high rate, with the norm before and behind each branch."
    arms: dict[str, Arm] = {}
    for place in ("pre", "post"):
        for steps in (30, 1, 10, 100):
            recipe = Recipe(replace(SMALL, norm_place=place), lr=1e-2, warmup=steps)
            arms[f"{place}-norm, {steps}"] = (recipe, ())
    return _trained(arms, "3 layers of width 64, rate 1e-2, 150 steps; all compared with the first arm")


def embedding_norm() -> Outcome:
    "A LayerNorm behind the embedding, small and usual embeddings, and GLM's shrinking."
    small = replace(SMALL, init_std=0.002)
    arms: dict[str, Arm] = {
        "unchanged": (_HIGH, ()),
        "embedding norm": (replace(_HIGH, config=replace(SMALL, embed_norm=True)), ()),
        "embedding scaled": (replace(_HIGH, config=replace(SMALL, embed_scale=True)), ()),
        "gradient shrunk to 0.1": (_HIGH, (fix("embedding_shrink"),)),
        "std 0.002": (replace(_HIGH, config=small), ()),
        "std 0.002, embedding norm": (replace(_HIGH, config=replace(small, embed_norm=True)), ()),
    }
    return _trained(arms, "3 layers of width 64, rate 3e-2, 150 steps")


def stable_adamw() -> Outcome:
    "Update clipping at a high rate, with a slow and a fast second moment."
    arms: dict[str, Arm] = {}
    for decay in (0.95, 0.999):
        recipe = replace(_HIGH, betas=(0.9, decay), clip=None)
        arms[f"β₂ {decay:g}"] = (recipe, ())
        arms[f"β₂ {decay:g}, update clipping"] = (recipe, (fix("update_clip"),))
        arms[f"β₂ {decay:g}, gradient clipping"] = (replace(recipe, clip=1.0), ())
    return _trained(arms, "3 layers of width 64, rate 3e-2, 150 steps; all compared with the first arm")


def natural_sinks() -> Outcome:
    "The share of heads with a sink before and after training."
    found: dict[str, dict[str, list[float]]] = {"untrained": {}, "trained": {}}
    for seed in _SEEDS:
        torch.manual_seed(seed)
        models = {"untrained": LanguageModel(SMALL)}
        models["trained"] = train_lm(Recipe(lr=3e-3, steps=400), seed).model
        for label, model in models.items():
            found[label].setdefault("share of heads", []).append(attention_extremes(model).sink_share)
            found[label].setdefault("validation loss", []).append(validation_loss(model))
    return Outcome(
        found, "share of heads", _SEEDS, "3 layers of width 64, 400 steps at 3e-3; a sink gets more than 0.3"
    )


# Depth and width
# Three shapes with 0.2 million parameters in their blocks; what is compared is the sensitivity to the
# learning rate.


def depth_width() -> Outcome:
    "Sensitivity to the rate of flat, usual and deep models."
    shapes, rates = {"4 x 64": (4, 64), "1 x 128": (1, 128), "12 x 36": (12, 36)}, (1e-3, 1e-2, 1e-1)
    found: dict[str, dict[str, list[float]]] = {}
    for label, (layers, width) in shapes.items():
        config = replace(SMALL, n_layer=layers, d_model=width)
        found[label] = {"sensitivity": [_sensitivity(config, rates, seed) for seed in _SEEDS]}
    settings = "layers x width, rates 1e-3, 1e-2 and 1e-1, 100 steps; compared with the first arm"
    return Outcome(found, "sensitivity", _SEEDS, settings)


def _sensitivity(config: ModelConfig, rates: tuple[float, ...], seed: int) -> float:
    "How far the loss is from the best one, over rates."
    ends = {rate: train_lm(Recipe(config, lr=rate, steps=100), seed).val_loss for rate in rates}
    return rate_sensitivity(ends, float(np.log(config.vocab)))


# Other models
# A translator with eight kinds of positions; a model whose embeddings were changed by LoRA before it is
# fine-tuned. New layers between frozen ones stand in `vlm.py`.


def _fit(
    model: torch.nn.Module, task: Task, lr: float, steps: int, forward: Callable, warmup: int = 30
) -> list[float]:
    "Train on a task; the gradient norms."
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    norms = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup)
        loss = forward(model, task.at(step))
        optimizer.zero_grad()
        loss.backward()
        norms.append(grad_norm(model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return norms


@torch.no_grad()
def _translated(model: TranslationModel, task: Task) -> dict[str, float]:
    "Loss, share of right tokens, and what an output tells about which input it belongs to."
    batches = [task.at(10_000 + i) for i in range(4)]
    logits = [model(batch["source"], batch["tokens"]) for batch in batches]
    targets = torch.cat([batch["targets"].flatten() for batch in batches])
    flat = torch.cat([one.flatten(0, 1) for one in logits])
    counts = targets >= 0
    p = flat[counts].softmax(-1)
    information = torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(-1).mean()
    return {
        "validation loss": float(F.cross_entropy(flat[counts], targets[counts])),
        "wrong tokens": float((flat[counts].argmax(-1) != targets[counts]).float().mean()),
        "information": float(information),
    }


def positions() -> Outcome:
    "A tiny translator with every kind of positions."
    kinds = ("learned", "sinusoidal", "shaw", "t5", "rope", "rope_qkv", "alibi", "none")
    found: dict[str, dict[str, list[float]]] = {}
    for kind in kinds:
        for seed in _SEEDS:
            task = translation_task(seed=seed)
            torch.manual_seed(seed)
            config = ModelConfig(
                vocab=task.vocab, seq=task.seq, d_model=48, n_layer=2, n_head=4, positions=kind
            )
            model = TranslationModel(config)
            _fit(model, task, 3e-3, 200, lambda m, batch: m(**batch))
            for name, value in _translated(model, task).items():
                found.setdefault(kind, {}).setdefault(name, []).append(value)
    settings = "2 + 2 layers of width 48, toy translation with distant word order, 200 steps at 3e-3"
    return Outcome(found, "validation loss", _SEEDS, settings)


def _anisotropy(model: LanguageModel) -> float:
    "Mean cosine of two rows of the embedding: 0 where they point everywhere."
    rows = F.normalize(model.embed.weight.detach(), dim=1)
    n = len(rows)
    return float(((rows @ rows.T).sum() - n) / (n * (n - 1)))


_UPPER = torch.arange(128)
_UPPER[ord("a") : ord("z") + 1] -= 32  # every small letter becomes its capital


def in_capitals(part: tuple) -> tuple[torch.Tensor, ...]:
    "A batch of text in capitals."
    return tuple(_UPPER[tokens] for tokens in part)


def _low_rank_changes(model: LanguageModel) -> dict[str, torch.Tensor]:
    "What the low-rank changes add to the weight of each module."
    changes = {}
    for name, module in model.named_modules():
        low_rank = getattr(module, "low_rank", None)
        if low_rank is not None:
            product = low_rank.factor * (low_rank.up @ low_rank.down).detach()  # (outputs, inputs)
            changes[name] = product.T if isinstance(module, torch.nn.Embedding) else product
    return changes


def _tune(model: LanguageModel, recipe: Recipe, seed: int, lora: dict | None = None) -> list[float]:
    "Go on with text in capitals, with all parameters or with LoRA that is merged at the end; gradient norms."
    training = start_training(recipe, seed, model)
    source = training.batches
    training.batches = lambda step: [in_capitals(part) for part in source(step)]
    book = None if lora is None else fix("lora", rank=4, **lora).apply(training)
    norms = [training.run_step().grad_norm for _ in range(recipe.steps)]
    if book is not None:
        changes = _low_rank_changes(model)
        book.undo()
        with torch.no_grad():
            for name, change in changes.items():
                model.get_submodule(name).weight.add_(change)
    return norms


def _tuned(base: dict, lora: dict | None, seed: int) -> dict[str, float]:
    "What full fine-tuning comes to, behind LoRA or behind nothing."
    model = LanguageModel(SMALL)
    model.load_state_dict(base)
    if lora is not None:
        _tune(model, Recipe(lr=1e-2, steps=100), seed, lora)
    turned = _anisotropy(model)
    norms = _tune(model, Recipe(lr=3e-3, steps=150, warmup=10), seed + 100)
    with torch.no_grad():
        capitals = [in_capitals(part) for part in held_out(SMALL.seq)]
        losses = [float(model(x, y)) for x, y in capitals]
    return {
        "validation loss": float(np.mean(losses)),
        "loss on the old text": validation_loss(model),
        "cosine of embeddings before": turned,
        "largest gradient norm": max(norms),
    }


def lora_embeddings() -> Outcome:
    "Full fine-tuning behind LoRA on embeddings, on linear layers, and behind nothing."
    found: dict[str, dict[str, list[float]]] = {}
    lora = {
        "full only": None,
        "LoRA on linear layers first": {"targets": "linear"},
        "LoRA on embeddings first": {"targets": "embedding"},
        "LoRA on embeddings, alpha 64": {"targets": "embedding", "alpha": 64.0},
    }
    for seed in _SEEDS:
        base = train_lm(Recipe(lr=3e-3, steps=200), seed).model.state_dict()
        for label, settings in lora.items():
            for name, value in _tuned(base, settings, seed).items():
                found.setdefault(label, {}).setdefault(name, []).append(value)
    told = (
        "3 layers of width 64; 200 steps before, 100 of LoRA at 1e-2 on upper-case text, 150 of all at 3e-3"
    )
    return Outcome(found, "validation loss", _SEEDS, told)
