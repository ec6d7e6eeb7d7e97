"""How often the swap test tells a planted cause: 100 seeded runs of each kind, trained under clipping.

Shuffled labels and huge inputs are bad batches; a burst of the learning rate and broken weights are bad
states. Half of the runs are a classifier under SGD, half a small language model under AdamW; huge inputs are
all of the former.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

KINDS = {  # planted -> the verdict that is right
    "shuffled labels": "bad batch",
    "huge inputs": "bad batch",
    "learning rate burst": "bad state",
    "broken weights": "bad state",
    "nothing": "neither",
}
DISTANCES = (64, 32, 16)  # steps from a control state to the suspect one, as `controls` chooses them
BURST = 3  # steps at the end of the run that a burst may take


class Classifier(nn.Sequential):
    "Three layers on 16 numbers, 8 classes."

    def __init__(self):
        super().__init__(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))


@dataclass(frozen=True)
class Base:
    "A healthy run: its setup, the states it passed, and a maker of batches."

    setup: object
    states: dict  # step -> Snapshot
    ordinary: object  # (generator) -> a micro-batch
    last: int


def classifier_base(seed):
    "Blobs that overlap a little."
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 16, generator=generator)

    def ordinary(generator):
        y = torch.randint(8, (32,), generator=generator)
        return {"x": centres[y] + 1.5 * torch.randn(32, 16, generator=generator), "y": y}

    def loss(model, part):
        return F.cross_entropy(model(part["x"]), part["y"])

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Classifier, loss, optimizer, ordinary


def language_base(seed):
    "Patterns of five tokens, shifted, with some noise."
    from stabilitylab.models.decoder import LanguageModel
    from stabilitylab.models.parts import ModelConfig

    config = ModelConfig.plain(vocab=32, seq=16, d_model=16, n_layer=1, n_head=2)
    pattern = torch.arange(17) % (5 + seed % 3)

    def ordinary(generator):
        x = pattern + torch.randint(24, (8, 1), generator=generator)
        noise = torch.rand(x.shape, generator=generator) < 0.02
        x = torch.where(noise, torch.randint(32, x.shape, generator=generator), x)
        return {"x": x[:, :-1], "y": x[:, 1:]}

    def loss(model, part):
        return model(part["x"], part["y"])

    def optimizer(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    return lambda: LanguageModel(config), loss, optimizer, ordinary


@cache
def base(family, seed, steps=150):
    "A healthy run under clipping."
    from stabilitylab.replay.state import Setup

    torch.manual_seed(seed)
    make, loss, optimizer, ordinary = (classifier_base if family == "classifier" else language_base)(seed)
    setup = Setup(make, loss, optimizer, clip=1.0)
    generator = torch.Generator().manual_seed(seed + 1)
    model = setup.model()
    trained, states = (model, setup.optimizer(model)), {}
    for step in range(steps):
        if steps - step in (*DISTANCES, *range(1, BURST + 1)):
            states[step] = snapshot(setup, trained, step)
        train(setup, trained, ordinary(generator))
    states[steps] = snapshot(setup, trained, steps)
    return Base(setup, states, ordinary, steps)


def train(setup, trained, part):
    "One step under clipping."
    model, optimizer = trained
    optimizer.zero_grad()
    setup.loss(model, part).backward()
    nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
    optimizer.step()


def snapshot(setup, trained, step):
    "A state to go back to."
    from copy import deepcopy

    from stabilitylab.replay.state import Snapshot

    model, optimizer = (deepcopy(part.state_dict()) for part in trained)
    return Snapshot(setup, model, optimizer, step=step, name=f"state {step}")


def number(generator, low, high):
    "A random number between two, evenly in its logarithm."
    return low * (high / low) ** float(torch.rand((), generator=generator))


def bad_batch(kind, part, generator):
    "A batch with a planted fault."
    if kind == "shuffled labels":
        y = part["y"].flatten()
        return part | {"y": y[torch.randperm(len(y), generator=generator)].view_as(part["y"])}
    if kind == "huge inputs":
        return part | {"x": part["x"] * number(generator, 30, 3000)}
    return part


def bad_state(kind, run, generator):
    "The suspect state, with a planted fault."
    from dataclasses import replace

    if kind == "learning rate burst":
        length = 1 + int(torch.randint(BURST, (), generator=generator))
        model, optimizer = run.states[run.last - length].build()
        for group in optimizer.param_groups:
            group["lr"] *= number(generator, 30, 300)
        for _ in range(length):
            train(run.setup, (model, optimizer), run.ordinary(generator))
        return replace(snapshot(run.setup, (model, optimizer), run.last), name=f"state {run.last}")
    suspect = run.states[run.last]
    if kind != "broken weights":
        return suspect
    names = [name for name, t in suspect.model.items() if t.ndim == 2]
    chosen = [name for name in names if torch.rand((), generator=generator) < 0.5] or names[-1:]
    size = number(generator, 2, 20)
    noise = {name: torch.randn(suspect.model[name].shape, generator=generator) for name in chosen}
    broken = {name: suspect.model[name] + size * suspect.model[name].std() * noise[name] for name in chosen}
    return replace(suspect, model=suspect.model | broken)


def planted(kind, seed, bases=10):
    "The swap test of one planted case."
    from stabilitylab.replay.state import Batch
    from stabilitylab.replay.swap import swap_test

    family = "classifier" if seed % 2 == 0 or kind == "huge inputs" else "language"
    run = base(family, 1000 + seed // 2 % bases)
    generator = torch.Generator().manual_seed(seed)
    controls = [run.states[run.last - apart] for apart in DISTANCES]
    parts = [run.ordinary(generator) for _ in range(5)]
    parts[-1] = bad_batch(kind, parts[-1], generator)
    states = [*controls, bad_state(kind, run, generator)]
    batches = [Batch([part], name=f"batch {run.last - 4 + i}") for i, part in enumerate(parts)]
    return swap_test(states, batches, progress=False)


def table(runs, kinds=KINDS):
    "Kind -> how often each verdict was given."
    return {kind: Counter(planted(kind, seed).verdict for seed in range(runs)) for kind in kinds}


def main(argv=()):
    "Print the table."
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--runs", type=int, default=100)
    options = arguments.parse_args(argv)
    torch.set_num_threads(1)
    for kind, told in table(options.runs).items():
        right, unsure = told[KINDS[kind]], told["cannot tell"]
        wrong = {verdict: n for verdict, n in told.items() if verdict not in (KINDS[kind], "cannot tell")}
        words = f"right {right:3} of {options.runs}, cannot tell {unsure:2}, else {wrong}"
        print(f"{kind:20} {KINDS[kind]:10} {words}")


if __name__ == "__main__":
    main()
