"""Swapped positions, frozen backbones, free mixtures and rare tokens, each in a training of seconds"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import nn

from reproductions.vision import VisionLanguageModel, picture_task
from stabilitylab.models.decoder import LanguageModel, LayerMix, TranslationModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import copy_task, translation_task
from stabilitylab.probe.checks.invariants import gradient_curvature


def _trained(
    model: nn.Module,
    batch_at: Callable[[int], dict],
    steps: range,
    rate: float,
    clip: float = np.inf,
    is_bf16: bool = False,
) -> list[float]:
    "The losses of some steps of AdamW."
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trainable, lr=rate), []
    for step in steps:
        optimizer.zero_grad()
        # one context a step: a context around all of them keeps the first step's weights in bf16
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = model(**batch_at(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


class Swapped(NamedTuple):
    "Losses around a swap of positions, nats."

    before: float  # of the trained model
    after: float  # right after the swap
    later: float  # after as many further steps as `fresh` took
    fresh: float  # of a model that had these positions from the start


def swapped_positions(
    positions: str = "rope",  # of the model that takes the weights over, as in `ModelConfig`
    steps: int = 120,  # before the swap; half as many after it
    seed: int = 0,  # of the weights
) -> Swapped:
    "What a trained model loses when its absolute positions are replaced."
    task = copy_task(length=5, vocab=16, batch=16)

    def model_with(
        kind: str,  # of positions, as in `ModelConfig`
    ) -> LanguageModel:
        "A model with these positions, drawn anew."
        torch.manual_seed(seed)
        shape: dict[str, Any] = {"vocab": 16, "seq": 16, "d_model": 32, "n_layer": 2, "n_head": 2}
        return LanguageModel(ModelConfig(**shape, positions=kind))

    trained, other, fresh = model_with("learned"), model_with(positions), model_with(positions)
    _trained(trained, task.at, range(steps), 5e-3)
    # the table of positions has no place in the other model; everything else goes over
    fitting = {name: w for name, w in trained.state_dict().items() if name in other.state_dict()}
    other.load_state_dict(other.state_dict() | fitting)
    with torch.no_grad():
        before, after = (float(model(**task.at(10_000))) for model in (trained, other))
    more = range(steps, steps + steps // 2)
    later, new = (_trained(model, task.at, more, 5e-3) for model in (other, fresh))
    return Swapped(before, after, float(np.mean(later[-5:])), float(np.mean(new[-5:])))


def frozen_losses(
    steps: int = 20,  # of the new layers, under autocast to bf16
    adapted: int = 0,  # steps of other text on the whole language model beforehand, in the same format
    pretrained_first: bool = False,  # a pretrained layer right behind the embedding
    seed: int = 0,  # of the new layers
    rate: float = 1e-2,  # of the new layers
) -> list[float]:  # one a step, nats
    "The losses of new layers between frozen ones."
    torch.manual_seed(seed)
    model = VisionLanguageModel(gate=1.0, pretrained_first=pretrained_first)
    task = picture_task(batch=16)

    def text_at(
        step: int,  # from 0 on
    ) -> dict:
        "Text that is no caption: captions read backwards, without their pictures."
        batch = task.at(10_000 + step)
        words = torch.cat([batch["tokens"], batch["targets"][:, -1:]], dim=1).flip(1)
        return {"tokens": words[:, :-1], "targets": words[:, 1:]}

    model.language.requires_grad_(True)
    _trained(model.language, text_at, range(adapted), 1e-3, is_bf16=True)
    model.language.requires_grad_(False)
    return _trained(model, task.at, range(steps), rate, is_bf16=True)


def _change_mix(mix: LayerMix, prior: tuple[float, ...], first: int) -> None:
    "Sets the weights of a mixture, and takes layers out of it for good."
    is_mixed = torch.arange(len(mix.logits)) >= first
    with torch.no_grad():
        mix.logits.copy_((torch.tensor(prior) if prior else mix.logits) * is_mixed)
    mix.logits.register_hook(lambda gradient: gradient * is_mixed)


def _without_positions(mix: LayerMix, inputs: tuple, table: torch.Tensor) -> tuple:
    "What a mixture is given, with positions only behind the embedding."
    embedded, *layers = inputs[0]
    return ([embedded - table[: embedded.shape[1]], *layers],)


def mixture_weights(
    steps: int = 60,  # of training; weights are taken at their beginning and at their end
    n_layer: int = 3,  # of the encoder and of the decoder
    seed: int = 0,  # of the weights
    prior: tuple[float, ...] = (),  # weights at the beginning, one a layer; (): equal ones
    first: int = 0,  # layer that is mixed; 1: without the embedding
    moves_positions: bool = False,  # the mixture gets the embedding without positions
) -> xr.DataArray:  # dims (step, decoder, layer); layer 0 is the embedding
    "The weights that a small translator learns for the layers of its encoder."
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab": 23, "seq": 32, "d_model": 32, "n_head": 2, "positions": "learned"}
    model = TranslationModel(ModelConfig(**shape, n_layer=n_layer, mixing="free"))
    mixes = [mix for mix in (model.mix, *model.more_mixes) if mix is not None]

    table = dict(model.named_parameters())["encoder_in.pos_embed.weight"]
    for mix in mixes:
        _change_mix(mix, prior, first)
        if moves_positions:
            mix.register_forward_pre_hook(partial(_without_positions, table=table))

    def weights() -> list[list[float]]:
        "Those of all layers of the decoder."
        return [mix.weights().tolist() for mix in mixes]

    start = weights()
    _trained(model, translation_task(words=10, batch=16).at, range(steps), 5e-3)
    return xr.DataArray([start, weights()], dims=("step", "decoder", "layer"), coords={"step": [0, steps]})


class TakenStep(NamedTuple):
    "A step and what was foretold of it."

    ratio: float  # curvature along the step times rate / 2, before it
    rise: float  # of the loss of the same batch, nats


def taken_step(
    rate: float,  # of gradient descent, > 0
    seed: int = 0,  # of the weights
) -> TakenStep:
    "One step of a small model that copies, with the curvature before it."
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab": 16, "seq": 16, "d_model": 16, "n_layer": 2, "n_head": 2}
    model, batch = LanguageModel(ModelConfig(**shape)), copy_task(length=5, vocab=16).at(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    ratio = gradient_curvature(model, lambda m: m(**batch), optimizer)["ratio"]
    before = model(**batch)
    before.backward()
    optimizer.step()
    with torch.no_grad():
        return TakenStep(ratio, float(model(**batch) - before))


def rare_token_loss(
    clip: float,  # threshold of the gradient norm, > 0
    steps: int = 100,  # of AdamW
    seed: int = 0,  # of the weights
) -> tuple[float, float]:  # mean loss of the commonest quarter of the tokens and of the rarest, nats
    "What a clip leaves to rare and to common tokens."
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"vocab": 64, "seq": 16, "d_model": 16, "n_layer": 1, "n_head": 2}
    model = LanguageModel(ModelConfig(**shape, positions="learned"))
    chance = 1 / np.arange(1, 65)
    successor = torch.from_numpy(np.random.default_rng(0).permutation(64))

    def batch_at(
        step: int,  # from 0 on; seeds the draw
    ) -> dict:
        "Tokens by Zipf's law."
        draw = np.random.default_rng([7, step]).choice(64, (8, 16), p=chance / chance.sum())
        tokens = torch.from_numpy(draw)
        return {"tokens": tokens, "targets": successor[tokens]}

    _trained(model, batch_at, range(steps), 1e-2, clip)
    tokens = torch.arange(64).view(4, 16)
    with torch.no_grad():
        logits = model(tokens).flatten(0, 1)
    losses = F.cross_entropy(logits, successor[tokens].flatten(), reduction="none")
    return losses[:16].mean().item(), losses[48:].mean().item()
