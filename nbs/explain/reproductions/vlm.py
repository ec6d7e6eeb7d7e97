"""New gated layers between frozen ones, forward in float32 and in bf16: the note of the vision-language model

The note: bf16 mixed precision, frozen backbones, only the new layers are trained; activations and gradients
surge many steps before the loss, most of all behind the output projections; LayerNorm on queries and keys
stopped it, and most else did not. Here all of it at several rates, each arm with the same seeds.

Limits: 2 + 2 layers of width 64 and one head, 120 steps. The note's models were 10,000 times as large.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import nn

from reproductions.experiments import Outcome
from reproductions.recipes import flushed_denormals
from reproductions.vision import CAPTION_WORDS, GatedBlock, VisionLanguageModel, picture_task
from stabilitylab.fixes.training import grad_norm
from stabilitylab.models.parts import ModelConfig

_SEEDS = (0, 1, 2)
_STEPS, _WARMUP = 120, 20
_WIDTH = 64


def _norms_after_projections(model: VisionLanguageModel) -> None:
    "A LayerNorm behind both output projections of the new layers."
    for block in model.new:
        block.cross_attn.out_proj = nn.Sequential(block.cross_attn.out_proj, nn.LayerNorm(_WIDTH))
        block.fc2 = nn.Sequential(block.fc2, nn.LayerNorm(_WIDTH))


def _unfrozen_norms(model: VisionLanguageModel) -> None:
    "The LayerNorms of the frozen language model train, too."
    for module in model.language.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)


def _nothing(model: VisionLanguageModel) -> None:
    "The model as it is."


@dataclass(frozen=True)
class _Arm:
    "One way to train the new layers."

    rate: float = 1e-2  # peak learning rate
    is_bf16: bool = True  # whether the forward pass runs under autocast to bf16
    config: dict = field(default_factory=dict)  # switches of the new layers
    change: Callable = _nothing  # (model) -> None, before the first step
    adam: dict = field(default_factory=dict)  # arguments of AdamW
    batch: int = 32  # pictures a step


@dataclass
class _Growth:
    "The largest values of the new layers' tensors, step by step."

    projections: list[float] = field(default_factory=list)  # behind fc2 and out_proj
    inputs: list[float] = field(default_factory=list)  # queries, keys and values
    logits: list[float] = field(default_factory=list)  # of attention

    def __post_init__(self):
        self.now: dict = {}

    def watch(self, blocks: list[GatedBlock]) -> None:
        "Keep the outputs of the blocks' layers."
        for i, block in enumerate(blocks):
            attn = block.cross_attn
            parts = {"out": attn.out_proj, "fc2": block.fc2, "v": attn.v_proj}
            for name, module in (parts | {"q": attn.q_norm, "k": attn.k_norm}).items():
                module.register_forward_hook(partial(self._keep, (i, name)))

    def _keep(self, key: tuple, _module: nn.Module, _args: tuple, out: torch.Tensor) -> None:
        "One output of this step."
        self.now[key] = out.detach().float()

    def end_step(self) -> None:
        "The maxima of this step."
        largest = {key: float(x.abs().max()) for key, x in self.now.items()}
        self.projections.append(max(v for (_, name), v in largest.items() if name in ("out", "fc2")))
        self.inputs.append(max(v for (_, name), v in largest.items() if name in ("q", "k", "v")))
        layers = {i for i, _ in self.now}
        pairs = [(self.now[i, "q"], self.now[i, "k"]) for i in layers]
        self.logits.append(max(float((q @ k.mT).abs().max()) / q.shape[-1] ** 0.5 for q, k in pairs))


@cache
def _batches(rows: int, seed: int) -> list[dict]:
    "The batches of one seed, the same for every arm."
    task = picture_task(rows, seed=seed)
    return [task.at(step) for step in range(_STEPS)]


def _train(arm: _Arm, seed: int) -> dict[str, float]:
    "One training; what it came to."
    batches = _batches(arm.batch, seed)
    torch.manual_seed(seed)
    shape = {
        "vocab": len(CAPTION_WORDS),
        "seq": 8,
        "d_model": _WIDTH,
        "n_layer": 2,
        "n_head": 1,
        "bias": True,
    }
    model = VisionLanguageModel(ModelConfig(**(shape | arm.config)), gate=1.0)
    arm.change(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **({"lr": arm.rate, "betas": (0.9, 0.95)} | arm.adam))
    growth, losses, norms = _Growth(), [], []
    growth.watch(model.new)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = arm.rate * min(1.0, (step + 1) / _WARMUP)
        with torch.autocast("cpu", torch.bfloat16, enabled=arm.is_bf16):
            loss = model(**batches[step])
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(grad_norm(trained))
        growth.end_step()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return _read(np.array(losses), np.array(norms), growth)


def _first(flags: np.ndarray) -> float:
    "The first step at which something holds; the number of steps where it never does."
    return float(np.argmax(flags)) if flags.any() else float(len(flags))


def _read(losses: np.ndarray, norms: np.ndarray, growth: _Growth) -> dict[str, float]:
    "What is told of one training."
    projections, inputs = np.array(growth.projections), np.array(growth.inputs)
    usual = np.median(norms[5:_WARMUP])
    surge = _first((norms > 10 * usual) | (projections > 10 * projections[0]))
    end = float(np.mean(losses[-20:]))
    return {
        "training loss at the end": end,
        "above the loss at the start": float(not end < losses[0]),
        "largest attention logit": growth.logits[-1],
        "largest gradient norm": float(norms[_WARMUP:].max()),
        "growth behind O and FC2": float(projections[-20:].max() / projections[0]),
        "growth of Q, K and V": float(inputs[-20:].max() / inputs[0]),
        "step of the surge": surge,
        "step of the loss": _first(losses > losses[:_WARMUP].min() + 0.3),
    }


def _arms() -> dict[str, _Arm]:
    "All arms; the first is the note's run at the usual rate."
    arms = {}
    for rate in (1e-2, 3e-2, 1e-1):
        for is_bf16 in (True, False):
            for norm in ("none", "ln"):
                label = f"{'bf16' if is_bf16 else 'fp32'}, rate {rate:g}" + ", qk-norm" * (norm == "ln")
                arms[label] = _Arm(rate, is_bf16, {"qk_norm": norm})
    others = {
        "L2 norm of Q and K": _Arm(config={"qk_norm": "l2"}),
        "RMSNorm": _Arm(config={"norm": "rms"}),
        "no biases": _Arm(config={"bias": False}),
        "norms of the frozen model train": _Arm(change=_unfrozen_norms),
        "LayerNorm behind O and FC2": _Arm(change=_norms_after_projections),
        "weight decay 1": _Arm(adam={"weight_decay": 1.0}),
        "β₂ 0.99": _Arm(adam={"betas": (0.9, 0.99)}),
        "ε 1e-4": _Arm(adam={"eps": 1e-4}),
        "half the rate": _Arm(rate=5e-3),
        "twice the batch": _Arm(batch=64),
    }
    return arms | {f"bf16, rate 0.01, {name}": arm for name, arm in others.items()}


def frozen_vlm() -> Outcome:
    "New gated layers between frozen ones, in two formats, at three rates, with what the note tried."
    table: dict[str, dict[str, list[float]]] = {}
    with flushed_denormals():
        for label, arm in _arms().items():
            for seed in _SEEDS:
                for name, value in _train(arm, seed).items():
                    table.setdefault(label, {}).setdefault(name, []).append(value)
    settings = (
        "frozen parts of 2 layers of width 64, new layers with one head and gates from 1, 120 steps;"
        " compared with the first arm"
    )
    return Outcome(table, "training loss at the end", _SEEDS, settings)
