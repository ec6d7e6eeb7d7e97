"""Faults put into a batch, a state, a bit, and whether the tests of replay name them

A replayed step answers two questions: was it the batch or the state, and was it the machine. Both tests
are held here against faults that were planted.

Limits: A second device is played by a second run. On real hardware harmless repeats differ too;
`noise_floor` measures by how much.
"""

from copy import deepcopy
from dataclasses import replace

import torch

from reproductions.results import Check, Result
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import byte_batches, stdlib_bytes
from stabilitylab.replay.resume import rerun_verdict
from stabilitylab.replay.state import Batch, Setup, Snapshot
from stabilitylab.replay.step import replay
from stabilitylab.replay.swap import swap_test

_SHAPE = ModelConfig.plain(vocab=128, seq=32, d_model=32, n_layer=2, n_head=2)
_SETUP = Setup(
    lambda: LanguageModel(_SHAPE),
    lambda model, part: model(part["tokens"], part["targets"]),
    lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
)


def _batch(x: torch.Tensor, y: torch.Tensor, name: str) -> Batch:
    "One micro-batch."
    return Batch([{"tokens": x, "targets": y}], name=name)


def _states_and_batches(
    seed: int = 0,  # of weights and batches
) -> tuple[list[Snapshot], list[Batch]]:  # three states of one training, four usual batches
    "States of a short training, and text that it has not seen."
    torch.manual_seed(seed)
    model = LanguageModel(_SHAPE)
    optimizer, states = _SETUP.optimizer(model), []
    data = list(byte_batches(stdlib_bytes(200_000), 154, 16, 32, seed))
    for step, (x, y) in enumerate(data[:150]):
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 in (110, 130, 150):
            kept = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
            states.append(Snapshot(_SETUP, *kept, step=step + 1, name=f"step {step + 1}"))
    return states, [_batch(x, y, f"usual {i}") for i, (x, y) in enumerate(data[150:])]


# R17: batch and state
# The poison batch says one letter over and over. The broken state has a head whose weights are thirty
# times as large. For the combination the last state has a NaN in the embedding of a token that occurs in
# the suspect batch only, as Adam leaves it in fp16 (R4c).


def _poison() -> Batch:
    "One letter, again and again."
    tokens = torch.full((16, 32), ord("x"))
    return _batch(tokens, tokens, "one letter")


def _changed(state: Snapshot, name: str, factor: float, row: int | None = None) -> Snapshot:
    "A state with a weight, or one row of it, multiplied."
    model = deepcopy(state.model)
    (model[name] if row is None else model[name][row]).mul_(factor)
    return replace(state, model=model, name=f"{state.name}, changed")


def _rare(batch: Batch, token: int = 1) -> Batch:
    "A usual batch in which one token is another that occurs nowhere else."
    part = {name: tensor.clone() for name, tensor in batch.parts[0].items()}
    part["tokens"][:, 5] = token
    return Batch([part], name="rare token")


def batch_and_state() -> Result:
    "R17: whether the swap test names what was planted."
    seeds, said = (0, 1, 2), {"bad batch": [], "bad state": [], "combination": [], "neither": []}
    for seed in seeds:
        states, usual = _states_and_batches(seed)
        broken = [*states[:2], _changed(states[2], "lm_head.weight", 30.0)]
        tests = {
            "bad batch": (states, [*usual[:3], _poison()]),
            "bad state": (broken, usual),
            "combination": (_with_trap(states), [*usual[:3], _rare(usual[3])]),
            "neither": (states, usual),
        }
        for planted, (rows, columns) in tests.items():
            said[planted].append(swap_test(rows, columns, progress=False).verdict)
    checks = tuple(
        Check(f"said of a planted {planted}, by seed", found, planted, set(found) == {planted})
        for planted, found in said.items()
    )
    return Result("R17", checks, "2 layers of width 32, three states and four batches each", seeds)


def _with_trap(states: list[Snapshot]) -> list[Snapshot]:
    "The last state with an embedding that only one token meets."
    return [*states[:-1], _changed(states[-1], "embed.weight", float("nan"), row=1)]


# R18: a flipped bit
# The highest bit of one weight's exponent flips: once, as a passing fault, or on every repeat of one
# device.


def _flipped(state: Snapshot, batch: Batch, entry: int) -> float:
    "The loss with the top bit of one weight's exponent flipped."
    model = deepcopy(state.model)
    model["blocks.0.fc1.weight"].view(-1).view(torch.int32)[entry] ^= 1 << 30
    return replay(replace(state, model=model), batch, record=False).loss


def bit_flip() -> Result:
    "R18: what repeats of a step say of a flipped bit."
    seeds, said = (0, 1, 2), {"passing": [], "of one device": [], "none": []}
    for seed in seeds:
        states, usual = _states_and_batches(seed)
        good = replay(states[-1], usual[0], record=False).loss
        again = replay(states[-1], usual[0], record=False).loss
        bad, once_more = (_flipped(states[-1], usual[0], 7 + seed) for _ in range(2))
        said["passing"].append(rerun_verdict(bad, good).verdict)
        said["of one device"].append(rerun_verdict(bad, once_more, good).verdict)
        said["none"].append(rerun_verdict(good, again, good).verdict)
    told = {"passing": "transient fault", "of one device": "persistent fault of this device"}
    told["none"] = "reproducible everywhere"
    checks = tuple(
        Check(f"said of a fault: {planted}", found, told[planted], set(found) == {told[planted]})
        for planted, found in said.items()
    )
    return Result("R18", checks, "bit 30 of one float32 weight, 2 layers of width 32", seeds)
