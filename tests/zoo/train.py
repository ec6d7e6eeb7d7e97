"One plain training loop with planted faults and with cures: it knows nothing of the trial's code."

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.zoo.models import ARCHS


@dataclass(frozen=True)
class Recipe:
    "Everything that a run is trained with; a cure is another value of a field."

    arch: str
    steps: int = 160
    lr: float | None = None  # None: the one that suits the architecture
    warmup: int = 10
    clip: float = 0.0  # 0: none
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    options: dict = field(default_factory=dict)  # of the model
    scales: dict = field(default_factory=dict)  # part of a parameter's name -> factor of its first value
    group_lr: dict = field(default_factory=dict)  # part of a parameter's name -> factor of its rate
    dtype: str = "float32"
    amp: str = ""  # 'float16' with a GradScaler, or 'bfloat16'
    scale: float = 65536.0  # first loss scale
    fault: str = ""  # name of a function of FAULTS, from step `at` on
    at: int = 100
    size: float = 1.0  # of the fault
    micro: int = 1  # micro-batches a step
    token_mean: bool = False
    lr_factor: float = 1.0  # from `cure_at` on
    rewarm: int = 0  # steps of a second warm-up from `cure_at` on
    cure_at: int = 0
    skip: str = ""  # 'fault' (its batches), 'sigma' or 'non_finite'
    update_clip: bool = False
    zclip: bool = False
    z: float = 0.0
    cap: float = 0.0

    def to_dict(self) -> dict:
        "The fields that differ from their defaults."
        default = asdict(Recipe(self.arch))
        return {k: v for k, v in asdict(self).items() if k == "arch" or v != default[k]}


# --- faults: (recipe, step) -> whether it is on; what each changes stands beside its name


def _poison(batch: dict, recipe: Recipe, step: int, generator: torch.Generator) -> dict:
    "Batches that a loader should not have served."
    bad = dict(batch)
    targets = batch["targets"]
    match recipe.fault:
        case "labels" if step < recipe.at + 3:
            if targets.is_floating_point():
                bad["targets"] = 100 * targets
            else:
                bad["targets"] = torch.full_like(targets, int(targets.max()))
                bad["targets"][:] = 7 if targets.max() > 7 else 1
        case "inputs" if step < recipe.at + 2:
            bad["x"] = recipe.size * batch["x"]
        case "shift":
            bad = _shifted(batch)
        case "repeat" if step < recipe.at + 40:
            bad = ARCHS[recipe.arch].batch(torch.Generator().manual_seed(7))
    return bad


def _shifted(batch: dict) -> dict:
    "Another task from one step on."
    out = dict(batch)
    if "x" in batch:
        out["x"] = batch["x"].flip(-1) * 1.0
    else:
        out["tokens"], out["targets"] = (127 - batch[k] for k in ("tokens", "targets"))
    return out


def _touch_state(recipe: Recipe, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    "What a bad resume or a bit flip does before a step."
    if step != recipe.at:
        return
    states = optimizer.state.values()
    if recipe.fault == "moments_lost":
        for state in states:
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
    if recipe.fault == "moments_scaled":
        for state in states:
            state["exp_avg_sq"].mul_(recipe.size)
    if recipe.fault == "bit_flip":
        with torch.no_grad():
            matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
            matrices[len(matrices) // 2].view(-1)[5] = recipe.size


def rate(recipe: Recipe, step: int) -> float:
    "The learning rate of a step."
    lr = recipe.lr or ARCHS[recipe.arch].lr
    lr *= min(1.0, (step + 1) / recipe.warmup) if recipe.warmup else 1.0
    if recipe.fault == "rate" and step >= recipe.at:
        lr *= recipe.size
    if step >= recipe.cure_at:
        lr *= recipe.lr_factor
        if recipe.rewarm:
            lr *= min(1.0, (step - recipe.cure_at + 1) / recipe.rewarm)
    return lr


def build(recipe: Recipe, seed: int = 0) -> torch.nn.Module:
    "The model with its planted first weights."
    torch.manual_seed(seed)
    model = ARCHS[recipe.arch].model(**recipe.options)
    with torch.no_grad():
        for name, p in model.named_parameters():
            for part, factor in recipe.scales.items():
                if part in name:
                    p.add_(factor) if name.endswith("bias") else p.mul_(factor)
    return model.to(getattr(torch, recipe.dtype))


def optimizer_of(recipe: Recipe, model: torch.nn.Module) -> torch.optim.Optimizer:
    "AdamW, a group for each factor of the rate."
    groups: dict[float, list] = {}
    for name, p in model.named_parameters():
        factor = next((f for part, f in recipe.group_lr.items() if part in name), 1.0)
        groups.setdefault(factor, []).append(p)
    lr = recipe.lr or ARCHS[recipe.arch].lr
    rows = [{"params": ps, "lr": lr, "factor": factor} for factor, ps in sorted(groups.items())]
    return torch.optim.AdamW(rows, lr=lr, betas=recipe.betas, eps=recipe.eps, weight_decay=0.0)


def parts_of(recipe: Recipe, step: int, generator: torch.Generator) -> list[dict]:
    "The micro-batches of a step."
    arch = ARCHS[recipe.arch]
    parts = [arch.batch(generator) for _ in range(recipe.micro)]
    if recipe.fault == "imbalance":
        for part in parts[1:]:  # all but the first count few tokens, and noisy ones
            part["targets"][:, 2:] = -100
            part["targets"][:, :2] = torch.randint(0, 128, part["targets"][:, :2].shape, generator=generator)
    if recipe.fault == "leak":
        parts = [p | {"targets": p["tokens"].clone()} for p in parts]
    if step >= recipe.at:
        parts = [_poison(part, recipe, step, generator) for part in parts]
    return parts


def _is_faulty(recipe: Recipe, step: int) -> bool:
    "Whether the loader serves a bad batch here."
    length = {"labels": 3, "inputs": 2, "repeat": 40}.get(recipe.fault, 0)
    return recipe.at <= step < recipe.at + length


@torch.no_grad()
def _held_out(recipe: Recipe, model: torch.nn.Module, batches: list[dict]) -> float:
    "The loss on clean batches in the format of the run."
    arch = ARCHS[recipe.arch]
    losses = [float(arch.loss(model, _cast(b, recipe))) for b in batches]
    return sum(losses) / len(losses)


def _cast(batch: dict, recipe: Recipe) -> dict:
    "Floating inputs in the type of the weights."
    dtype = getattr(torch, recipe.dtype)
    return {k: v.to(dtype) if v.is_floating_point() and k != "targets" else v for k, v in batch.items()}


def _update_clip(optimizer: torch.optim.Optimizer) -> list[float]:
    "StableAdamW: each tensor's gradient divided by its RMS_t where that is above 1."
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p)
            if p.grad is None or not state:
                continue
            b2, t = group["betas"][1], float(state["step"]) + 1
            v = (b2 * state["exp_avg_sq"] + (1 - b2) * p.grad.square()) / (1 - b2**t)
            rms = (p.grad / (v.sqrt() + 1e-12)).square().mean().sqrt().item()
            if rms > 1:
                p.grad.div_(rms)
    return []


def _norm(model: torch.nn.Module) -> float:
    "L2 norm of all gradients."
    grads = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(grads).norm())


def _skips(recipe: Recipe, step: int, norm: float, norms: list[float]) -> bool:
    "Whether a cure leaves this step out."
    if recipe.skip == "fault":
        return _is_faulty(recipe, step)
    if recipe.skip == "non_finite":
        return not math.isfinite(norm)
    if recipe.skip == "sigma" and len(norms) >= 20:
        recent = np.array(norms[-50:])
        return not norm <= recent.mean() + 6 * recent.std()
    return False


def _limit(recipe: Recipe, norm: float, norms: list[float]) -> float:
    "The largest norm of the gradient that a step may use; 0: any."
    if recipe.zclip and len(norms) >= 20:
        recent = np.array(norms[-50:])
        return float(recent.mean() + 2.5 * recent.std())
    return recipe.clip


def train(  # noqa: C901, PLR0912, PLR0915 - one loop, to be read from top to bottom
    recipe: Recipe,
    seed: int = 0,
    path: str | Path | None = None,
    observe: Callable | None = None,  # (model, optimizer) -> f(loss), called before each optimizer step
    on_warning: str | None = None,  # of the recorder
) -> dict:
    "Train a recipe; its losses, and with a path its record."
    from stabilitylab import Recorder

    arch, model = ARCHS[recipe.arch], build(recipe, seed)
    optimizer = optimizer_of(recipe, model)
    scaler = (
        torch.amp.GradScaler("cpu", recipe.scale, growth_interval=20) if recipe.amp == "float16" else None
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    clean_draw = torch.Generator().manual_seed(5)
    clean = [arch.batch(clean_draw) for _ in range(4)]
    if recipe.fault == "shift":
        clean = [_shifted(b) for b in clean]
    losses, held, norms = [], [], []
    recorder = None
    if path is not None:
        recorder = Recorder(
            model,
            optimizer,
            path,
            snapshot_every=20,
            every_n=10,
            flush_seconds=3600.0,
            scaler=scaler,
            on_warning=on_warning,
        ).__enter__()
    see = observe(model, optimizer) if observe else None  # called between the backward pass and the step
    for step in range(recipe.steps):
        _touch_state(recipe, step, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step) * group["factor"]
        parts = [_cast(p, recipe) for p in parts_of(recipe, step, generator)]
        optimizer.zero_grad()
        counts = [
            int((p["targets"] >= 0).sum()) if not p["targets"].is_floating_point() else 1 for p in parts
        ]
        loss_value = 0.0
        for part, count in zip(parts, counts, strict=True):
            if recorder:
                recorder.batch(part)
            share = count / max(1, sum(counts)) if recipe.token_mean else 1 / len(parts)
            with torch.autocast("cpu", getattr(torch, recipe.amp or "bfloat16"), enabled=bool(recipe.amp)):
                loss = arch.loss(model, part, recipe.z, recipe.cap)
            scaled = loss if scaler is None else scaler.scale(loss)
            (share * scaled).backward()
            loss_value += share * float(loss.detach())
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = _norm(model)
        if see:
            see(loss_value)
        if recipe.update_clip:
            _update_clip(optimizer)
        limit = _limit(recipe, norm, norms)
        if limit:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if _skips(recipe, step, norm, norms):
            if scaler is not None:
                scaler.update()
        elif scaler is not None:
            scaler.step(optimizer), scaler.update()
        else:
            optimizer.step()
        norms += [norm] if math.isfinite(norm) else []
        losses.append(loss_value)
        extra = {"grad_norm": norm}
        if step % 10 == 0:
            held.append((step, _held_out(recipe, model, clean)))
        if hasattr(model, "moe"):
            extra["router_max_share"] = float(max(m.shares.max() for m in model.moe))
        if recorder:
            recorder.step(loss_value, **extra)
    if recorder:
        recorder.__exit__(None, None, None)
    return {"loss": losses, "held": held}


def harm(recipe: Recipe, result: dict) -> float:
    "Mean held-out loss after the fault began; what is not finite counts as ten times the first loss."
    begin = recipe.at if recipe.fault and recipe.fault not in ("imbalance", "leak") else 0
    first = result["held"][0][1]
    worst = 10 * first if math.isfinite(first) else 100.0
    after = [min(v, worst) if math.isfinite(v) else worst for s, v in result["held"] if s >= begin]
    return sum(after) / len(after)


def with_cure(recipe: Recipe, name: str) -> Recipe:
    "The recipe with one cure in force from the fault on."
    values = dict(CURES[name])
    changes = copy.deepcopy(asdict(recipe))
    if recipe.fault in ("rate", "moments_lost", "moments_scaled", "shift"):
        changes["cure_at"] = recipe.at
    for key, value in values.items():
        changes[key] = value
    return Recipe(**changes)


CURES = {  # fix of the registry -> fields of the recipe
    "lower_lr": {"lr_factor": 0.1},
    "warmup": {"warmup": 60, "rewarm": 60},
    "clip_norm": {"clip": 1.0},
    "zclip": {"zclip": True},
    "skip_sigma": {"skip": "sigma"},
    "skip_non_finite": {"skip": "non_finite"},
    "skip_batches": {"skip": "fault"},
    "redraw": {"scales": {}},
    "activation": {"options": {"leak": 0.1}},
    "adam_eps": {"eps": 1e-8},
    "adam_beta2": {"betas": (0.9, 0.95)},
    "update_clip": {"update_clip": True},
    "autocast": {"amp": "bfloat16"},
    "weight_type": {"dtype": "float32"},
    "qk_norm": {"options": {"qk_norm": "ln"}},
    "soft_cap_output": {"cap": 30.0},
    "soft_cap_attention": {"options": {"cap": 50.0}},
    "z_loss": {"z": 1e-3},
    "token_mean": {"token_mean": True},
    "embedding_norm": {"options": {"embed_norm": True}},
    "loss_scaling": {"scale": 1024.0},
    "rollback": {"fault": "", "at": 100},
}
