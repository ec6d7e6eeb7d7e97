"A training, a state and a loop small enough for the calls of the table of notes"

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from reproductions.vision import VisionLanguageModel, picture_task
from stabilitylab.fixes.registry import apply_all, fix
from stabilitylab.fixes.training import Training
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import copy_task, model_loss
from stabilitylab.names.errors import bad_input
from stabilitylab.replay.state import Batch, Setup, Snapshot


def _loud_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    "The loss, a thousand times as large."
    return 1000 * model_loss(model, batch)


def note_training(
    frozen: bool = False,  # a model of pictures with frozen parts
    steps: int = 2,  # that it has taken
    loud: bool = False,  # a loss a thousand times as large: gradients beyond every clip
    **config: Any,  # fields of the `ModelConfig`
) -> Training:
    "A tiny training, some steps old, with its states kept."
    torch.manual_seed(0)
    model: nn.Module
    if frozen:
        model, task = VisionLanguageModel(pretrain_steps=0), picture_task(batch=4)
    else:
        shape: dict[str, Any] = {"vocab": 16, "d_model": 16, "n_layer": 2, "n_head": 2, "seq": 16}
        model = LanguageModel(
            ModelConfig(**shape | {"bias": True, "embed_scale": True, "dropout": 0.1} | config)
        )
        task = copy_task(length=5, vocab=16, batch=4)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-7)
    loss = _loud_loss if loud else model_loss
    training = Training(model, optimizer, loss, lambda step: [task.at(2 * step), task.at(2 * step + 1)])
    training.keep()
    for _ in range(steps):
        training.run_step()
    return training


@cache
def _untreated(frozen: bool, loud: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    "Losses and weights of the same training, three steps further without a fix."
    training = note_training(frozen, loud=loud)
    losses = [training.run_step().loss for _ in range(3)]
    return losses, {name: p.detach().clone() for name, p in training.model.named_parameters()}


def _is_another(training: Training, losses: list[float], frozen: bool, loud: bool) -> bool:
    "Whether a treated training took another path than the untreated one."
    plain, weights = _untreated(frozen, loud)
    now = dict(training.model.named_parameters())
    if losses != plain or now.keys() != weights.keys():
        return True
    return any(p.shape != weights[n].shape or not torch.equal(p, weights[n]) for n, p in now.items())


def tried(
    name: str,  # name of a fix
    frozen: bool = False,  # use a model with frozen parameters
    loud: bool = False,  # use gradients that exceed every clipping threshold
    keeps_path: bool = False,  # expect the fix to be exact: losses and weights equal to those without it
    **parameters: object,  # parameters of the fix
) -> pd.DataFrame:  # part, what, before, after; empty if the expectation fails; attrs: three losses
    "The changes that a fix makes in a three-step training whose losses it must, or must not, change."
    training = note_training(frozen, loud=loud)
    log = fix(name, **parameters).apply(training)
    losses = [training.run_step().loss for _ in range(3)]
    table = log.table()
    is_as_said = _is_another(training, losses, frozen, loud) != keeps_path
    table = table if is_as_said and np.isfinite(losses).all() else table.iloc[:0]
    table.attrs["losses"] = losses
    return table


def learned(
    steps: int = 60,  # number of AdamW steps
    **config: Any,  # fields of `ModelConfig`
) -> float:  # decrease of the loss, nats
    "How far a small model with this configuration lowers its loss on a copying task."
    training = note_training(steps=0, dropout=0.0, **config)
    losses = [training.run_step().loss for _ in range(steps)]
    return losses[0] - float(np.mean(losses[-5:]))


def _copying(bf16: bool = False, **config: Any) -> nn.Module:
    "A small model that copies, in the format asked for."
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab": 16, "d_model": 16, "n_layer": 2, "n_head": 2, "seq": 16}
    model = LanguageModel(ModelConfig(**shape | config))
    return model.bfloat16() if bf16 else model


def _token_losses(model: nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    "The loss of every token, and whether it counts."
    logits, targets = model(batch["tokens"]), batch["targets"]
    counts = targets != -100
    losses = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return losses.view_as(targets), counts


def note_state(
    steps: int = 0,  # of AdamW behind it
) -> tuple[Snapshot, Batch]:
    "A state to go back to, and the batch that comes next."
    setup = Setup(
        _copying, model_loss, lambda m: torch.optim.AdamW(m.parameters(), 1e-2), token_loss=_token_losses
    )
    training = note_training(steps=steps, dropout=0.0, embed_scale=False, bias=False)
    state = Snapshot(setup, training.model.state_dict(), training.optimizer.state_dict(), step=steps)
    return state, Batch(training.batches(steps), step=steps)


def bad_combination() -> tuple[list[Snapshot], list[Batch]]:  # the suspect ones last
    "States and batches, out of line only where the last two meet: a token whose row has overflowed."
    states, batches = (
        [note_state(steps)[0] for steps in range(3)],
        [note_state(steps)[1] for steps in range(3)],
    )
    for state in states:  # a decay of that row would be a large step at every batch
        cast(dict, state.optimizer)["param_groups"][0]["weight_decay"] = 0.0
    with torch.no_grad():
        states[-1].model["embed.weight"][15] = 1e30
    for batch, token in zip(batches, (14, 14, 15), strict=True):
        for tokens in (part["tokens"] for part in batch.parts):
            tokens[tokens == 15] = 14
            tokens[:, :2] = token
    return states, batches


def _autocast_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    "The loss, of a forward pass under autocast to bf16."
    with torch.autocast("cpu", torch.bfloat16):
        return model_loss(model, batch)


def note_loop(
    # 'bf16': weights that lose a small decay; 'autocast': the same under autocast; 'decay': norms decay and
    # one matrix does not
    fault: str = "",
) -> tuple[nn.Module, torch.optim.Optimizer, dict, Callable]:  # model, optimizer, batch, loss
    "A small model, optimizer, batch and loss for checks of a training loop."
    if fault not in ("", "bf16", "autocast", "decay"):
        raise bad_input("fault", fault, "'', bf16, autocast, decay")
    model, batch = _copying(fault in ("bf16", "autocast")), copy_task(length=5, vocab=16, batch=4).at(0)
    first, *others = model.parameters()
    weight_decay = 0.0 if fault == "decay" else 0.1
    groups: list[dict] = [{"params": [first], "weight_decay": weight_decay}, {"params": others}]
    loss = _autocast_loss if fault == "autocast" else model_loss
    return model, torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1), batch, loss


def bundle(
    *names: str,  # names of fixes
) -> pd.DataFrame:  # columns fix and changes (number of changes), one row per fix
    "The changes made by several fixes applied together to a small training of two steps."
    training = note_training()
    logs = apply_all(training, [fix(name) for name in names])
    for _ in range(2):
        training.run_step()
    return pd.DataFrame([{"fix": log.fix.name, "changes": len(log.table())} for log in logs])
