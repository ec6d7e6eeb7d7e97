"""A task in which most queries have nothing to read, and what three softmaxes make of it

After Ran-Milo (2603.11487): a position whose trigger is set must give the mean of the positions before
it, every other position must give zero. One attention layer without a residual path can only do so if a
query can read nothing. How it does that depends on the softmax: `softmax1` has one logit more, fixed at
0, whose weight is dropped; `learned sink` learns that logit for each head. Task and layer are those of
`stabilitylab.cases.states`. `python -m reproductions sinks --store` trains every softmax with three seeds
in about three minutes.

Limits: A task made to need a sink shows how one comes about, not how often large language models
need theirs.
"""

import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch.nn import functional as F

from reproductions.stored import FOLDER
from stabilitylab.cases.states import TriggerReader, trained_reader, trigger_batch
from stabilitylab.names.encode import to_json
from stabilitylab.names.files import write_atomic
from stabilitylab.probe.attention.report import attention_report, head_weights

SOFTMAXES = ("softmax", "softmax1", "learned sink")
_FLAGS = (1.0, 4.0)  # as large as the numbers, and much easier to find
_STORED = FOLDER / "sinks.json"


@dataclass(frozen=True)
class SinkArm:
    "What one softmax learned with one seed."

    softmax: str  # one of SOFTMAXES
    seed: int  # of the weights and the batches
    flag: float  # value of the first position's flag and of the trigger
    first: float  # mean weight of position 0 from queries that are not triggered; the head with most
    null: float  # mean weight that goes to no position from the same queries; the head with most
    sinks: float  # share of the heads whose first position receives more than 0.3
    error: float  # mean squared error over the mean square of the targets

    def to_dict(self) -> dict:
        "The arm as a dict."
        return asdict(self)


def measured_arm(
    model: TriggerReader,  # trained
    seed: int,  # that it was trained with
    flag: float,  # likewise
) -> SinkArm:
    "What a layer does with the queries that have nothing to read."
    x, y, fires = trigger_batch(torch.Generator().manual_seed(1000 + seed), 256, flag=flag)
    with torch.no_grad():
        error = float(F.mse_loss(model(x), y) / y.square().mean())
    heads = attention_report(model, x)["attention"].isel(step=0, layer=0)
    is_idle, first, null = ~fires[:32, 1:], [], []
    for head in range(2):
        weights = torch.stack(
            [torch.as_tensor(head_weights(model, x[:32], 0, head, i).values) for i in range(32)]
        )[:, 1:]
        first.append(float(weights[..., 0][is_idle].mean()))
        null.append(float(1 - weights.sum(-1)[is_idle].mean()))
    sinks = float((heads.first_score > 0.3).mean())
    numbers = [round(number, 4) for number in (max(first), max(null), sinks, error)]
    return SinkArm(model.kind, seed, flag, *numbers)


def make_sink_arms(
    seeds: int = 3,  # for each softmax
    steps: int = 1500,  # of Adam, for each arm
) -> list[SinkArm]:  # one for each flag, softmax and seed
    "Trains every arm."
    arms = []
    for flag, softmax, seed in product(_FLAGS, SOFTMAXES, range(seeds)):
        model = trained_reader(softmax, steps, seed, lr=3e-3, flag=flag, sink=0.0)
        arms.append(measured_arm(model, seed, flag))
    return arms


def store_sink_arms(
    arms: list[SinkArm],  # of `make_sink_arms`
    steps: int = 1500,  # that each was trained
) -> Path:  # the file
    "Stores the arms in place of the older ones."
    write_atomic(_STORED, to_json({"steps": steps, "arms": [arm.to_dict() for arm in arms]}, indent=1) + "\n")
    return _STORED


def sink_arms() -> list[SinkArm]:  # one for each flag, softmax and seed
    "The stored arms."
    return [SinkArm(**row) for row in json.loads(_STORED.read_text(encoding="utf-8"))["arms"]]
