"Setups with one planted fault each, beside a record made without it: none is accepted, most are named."

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.names.errors import InputError
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay import explanations
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.state import Setup

VOCAB, ROWS, LENGTH = 11, 4, 6


class Net(nn.Module):
    "A tiny language model whose arguments leave no trace in its shapes."

    def __init__(self, recipe):
        super().__init__()
        self.heads = recipe.heads
        self.wte, self.drop = nn.Embedding(VOCAB, 8), nn.Dropout(recipe.dropout)
        self.norm, self.fc = nn.LayerNorm(8, eps=recipe.norm_eps), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, VOCAB, bias=False)
        if recipe.tied:
            self.lm_head.weight = self.wte.weight
        self.fc.requires_grad_(not recipe.frozen)

    def forward(self, x):
        hidden = self.fc(self.norm(self.wte(x))).unflatten(-1, (self.heads, -1))
        return self.lm_head(self.drop(hidden.softmax(-1).flatten(-2)))


@dataclass(frozen=True)
class Recipe:
    "All that a loop and a setup say; a fault is a difference of two."

    heads: int = 2
    dropout: float = 0.1
    norm_eps: float = 1e-5
    tied: bool = True
    frozen: bool = False
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    smoothing: float = 0.0
    ignore: int = -100
    kind: str = "mean"
    by_hand: str = ""  # 'sum' or 'mean': reduced without torch's argument
    shift: bool = False
    is_eval: bool = False
    seed: int | None = None
    neighbour: bool = False
    scale: float = 1.0  # of the gradient, not of the loss
    aux: float = 0.0
    z_loss: float = 0.0
    parts: int = 1
    summed: bool = False
    clip: float | None = None
    value: float | None = None
    optimizer: str = "AdamW"
    decay: float | None = None  # set before every step
    betas: tuple | None = None
    eps: float | None = None
    lr: float | None = None
    late: bool = False
    partial: bool = False
    clears: bool = True  # the gradients of each step
    average: bool = False  # of the weights, in place, behind a step
    second_rate: float | None = None  # of the last group

    def logits(self, model, x):
        if self.is_eval:
            model.eval()
        if self.seed is not None:
            torch.manual_seed(self.seed)
        autocast = nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)
        with autocast:
            return model(x)

    def loss(self, model, part):
        logits, y = self.logits(model, part["x"]), part["y"]
        if self.shift:
            logits, y = logits[:, :-1], y[:, 1:]
        logits, y = logits.flatten(0, 1), y.flatten()
        if self.by_hand:
            each = F.cross_entropy(logits.float(), y, reduction="none")
            loss = each.sum() if self.by_hand == "sum" else each.mean()
        else:
            words = {"reduction": self.kind, "label_smoothing": self.smoothing, "ignore_index": self.ignore}
            loss = F.cross_entropy(logits.float(), y, **words)
        loss = loss + self.aux * model.fc.weight.square().sum()
        loss = loss + self.z_loss * logits.float().logsumexp(-1).square().mean()
        if self.scale != 1:
            loss.register_hook(lambda gradient: gradient * self.scale)
        return loss

    def model(self):
        return Net(self).to(self.dtype)

    def make_optimizer(self, model):
        cls, params = getattr(torch.optim, self.optimizer), list(model.parameters())
        last = [] if self.partial else params[-1:]
        words = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return cls([{"params": params[:-1]}, {"params": last}], lr=1e-2, weight_decay=0.1, **words)

    def schedule(self, optimizer, step):
        step = max(step - 1, 0) if self.late else step
        for group in optimizer.param_groups:
            group["lr"] = self.lr or 1e-2 / (1 + step)
            given = {"weight_decay": self.decay, "betas": self.betas, "eps": self.eps}
            group |= {key: value for key, value in given.items() if value is not None}
        if self.second_rate is not None:
            optimizer.param_groups[-1]["lr"] = self.second_rate

    def clipping(self):
        if self.value is not None:
            return lambda model: nn.utils.clip_grad_value_(model.parameters(), self.value)
        return self.clip

    def setup(self):
        reduction = "sum" if self.summed else "mean"
        return Setup(
            self.model, self.loss, self.make_optimizer, self.schedule, self.clipping(), reduction=reduction
        )


def part_of(step, micro=0):
    generator = torch.Generator().manual_seed(10 * step + micro)
    x = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return {"x": x, "y": torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)}


def recorded(recipe, path):
    "Five steps of a loop that does as a recipe says."
    torch.manual_seed(0)
    setup = recipe.setup()
    model = setup.model()
    optimizer = setup.optimizer(model)
    divisor = 1 if recipe.summed else recipe.parts
    with Recorder(model, optimizer, path, snapshot_every=10, merge=False) as recorder:
        for step in range(5):
            setup.schedule(optimizer, step)
            total = 0.0
            for micro in range(recipe.parts):
                part = recorder.batch(part_of(step, micro))
                used = part_of(step + 1, micro) if recipe.neighbour else part
                loss = setup.loss(model, used) / divisor
                loss.backward()
                total += loss.item()
            if callable(setup.clip):
                setup.clip(model)
            elif setup.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
            optimizer.step()
            if recipe.clears:
                optimizer.zero_grad()
            recorder.step(total)
            if recipe.average and step == 2:
                model.fc.weight.data.mul_(0.9)
    return path


BF16, FP16 = torch.bfloat16, torch.float16
# name -> (the recipe of the run, what is another in the setup, the faults that name it)
FAULTS = {
    "summed micro-batches": ({"parts": 3}, {"summed": True}, "accumulation"),
    "averaged micro-batches": ({"parts": 3, "summed": True}, {"summed": False}, "accumulation"),
    "clip missing": ({"clip": 0.1}, {"clip": None}, "clipping"),
    "clip of another norm": ({"clip": 0.1}, {"clip": 0.5}, "clipping"),
    "clip of an odd norm": ({"clip": 0.0137}, {"clip": None}, "clipping"),
    "clip of an odd norm under SGD": (
        {"clip": 0.0137, "optimizer": "SGD"},
        {"clip": None},
        "clipping",
    ),
    "clip that was not there": ({}, {"clip": 0.1}, "no clipping"),
    "clip by value missing": ({"value": 0.01}, {"value": None}, "clipping"),
    "clip by norm instead of value": ({"value": 0.01}, {"value": None, "clip": 0.5}, "clipping"),
    "clip by value instead of norm": ({"clip": 0.1}, {"value": 0.01}, "clipping"),
    "autocast missing": ({"autocast": BF16}, {"autocast": None}, "autocast"),
    "autocast that was not there": ({}, {"autocast": BF16}, "autocast"),
    "autocast to another format": ({"autocast": BF16}, {"autocast": FP16}, "autocast"),
    "loss scale that nobody divides": ({"scale": 65536.0}, {"scale": 1.0}, "multiple"),
    "backward twice": ({"scale": 2.0}, {"scale": 1.0}, "multiple"),
    "schedule off by one": ({}, {"late": True}, "schedule off"),
    "another schedule": ({}, {"lr": 0.003}, "other schedule"),
    "loss summed": ({}, {"kind": "sum"}, "reduction"),
    "loss averaged": ({"kind": "sum"}, {"kind": "mean"}, "reduction"),
    "loss summed by hand": ({}, {"by_hand": "sum"}, "reduction"),
    "loss averaged by hand": ({"by_hand": "sum"}, {"by_hand": "mean"}, "reduction"),
    "label smoothing missing": ({"smoothing": 0.1}, {"smoothing": 0.0}, "loss argument"),
    "label smoothing of another size": ({"smoothing": 0.15}, {"smoothing": 0.05}, "loss argument"),
    "label smoothing that was not there": ({}, {"smoothing": 0.1}, "loss argument"),
    "ignored label missing": ({"ignore": 0}, {"ignore": -100}, "loss argument"),
    "ignored label that was not there": ({}, {"ignore": 1}, "loss argument"),
    "labels not shifted": ({"shift": True}, {"shift": False}, "labels"),
    "weight decay": ({}, {"decay": 0.0}, "setting"),
    "betas": ({}, {"betas": (0.9, 0.95)}, "setting"),
    "epsilon of Adam": ({}, {"eps": 1e-6}, "setting"),
    "rate of one group": ({}, {"second_rate": 0.02}, "setting"),
    "another optimizer": ({}, {"optimizer": "NAdam"}, "refused"),
    "gradients that are not cleared": ({"clears": False}, {}, "not cleared"),
    "an average of weights": ({"average": True}, {"average": False}, "outside"),
    "a group left out": ({}, {"partial": True}, "refused"),
    "dropout off": ({}, {"dropout": 0.0}, "dropout or mode"),
    "dropout on": ({"dropout": 0.0}, {"dropout": 0.1}, "dropout or mode"),
    "another dropout": ({"dropout": 0.3}, {"dropout": 0.1}, "dropout"),
    "evaluation mode": ({}, {"is_eval": True}, "mode or dropout"),
    "training mode": ({"is_eval": True}, {"is_eval": False}, "mode or dropout"),
    "a seed of the setup": ({}, {"seed": 3}, "seed"),
    "the next batch": ({"neighbour": True}, {"neighbour": False}, "other batch"),
    "a frozen layer": ({"frozen": True}, {"frozen": False}, "frozen"),
    "a layer that is not frozen": ({}, {"frozen": True}, "frozen"),
    "weights that are tied no more": ({}, {"tied": False}, "tied or refused"),
    "another number of heads": ({}, {"heads": 4}, "model"),
    "epsilon of a normalisation": ({}, {"norm_eps": 1e-3}, "model"),
    "model in bfloat16": ({}, {"dtype": BF16}, "parameters"),
    "a penalty missing": ({"aux": 0.01}, {"aux": 0.0}, "model"),
    "a z-loss missing": ({"z_loss": 1e-4}, {"z_loss": 0.0}, "model"),
}
GENERAL = ("model", "gradient", "settings", "outside")  # what is said where nothing cheap fits


@pytest.fixture(scope="module")
def record_of(tmp_path_factory):
    "One record a recipe, made once."
    paths = {}

    def make(recipe):
        if recipe not in paths:
            paths[recipe] = recorded(recipe, tmp_path_factory.mktemp("faults") / "run")
        return paths[recipe]

    return make


def fault_of(record_of, name, step=3):
    "What the check says of a planted fault: (its key, whether the replay is accepted)."
    run, other, _ = FAULTS[name]
    recipe = Recipe(**run)
    try:
        check = check_setup(record_of(recipe), step, replace(recipe, **other).setup())
    except InputError as error:
        return "refused", False, str(error)
    return check.fault, check.is_step, check.words


FAST = (
    "summed micro-batches",
    "clip of another norm",
    "autocast missing",
    "loss summed by hand",
    "label smoothing missing",
    "betas",
    "weights that are tied no more",
    "another number of heads",
)
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_not_accepted_and_is_named(record_of, name):
    fault, is_accepted, words = fault_of(record_of, name)
    assert not is_accepted, words
    expected = FAULTS[name][2]
    assert fault == expected or fault in expected.split(" or "), words


def other_optimizer(model):
    "The class and the groups of the run, with settings of nobody."
    params = list(model.parameters())
    groups = [{"params": params[:-1]}, {"params": params[-1:], "weight_decay": 7.0}]
    return torch.optim.Adam(groups, lr=3.0, betas=(0.1, 0.2), eps=1.0)


def test_settings_that_the_record_brings_are_no_fault(record_of):
    recipe = Recipe()
    setup = replace(recipe.setup(), schedule=None, optimizer=other_optimizer)
    check = check_setup(record_of(recipe), 3, setup)
    assert check.is_exact and check.fault == ""


def test_what_the_table_measures():
    named = [name for name, (_, _, faults) in FAULTS.items() if faults not in GENERAL]
    assert len(FAULTS) >= 40 and len(named) >= 0.7 * len(FAULTS)


def test_a_step_that_agrees_only_when_it_is_taken_again(record_of):
    "Nothing of the setup is blamed for what its first call does."
    recipe = Recipe()
    setup, calls = recipe.setup(), []

    def loss(model, batch):
        "The recorded one, but for the first call."
        calls.append(1)
        return setup.loss(model, batch) * (1.5 if len(calls) == 1 else 1.0)

    check = check_setup(record_of(recipe), 3, replace(setup, loss=loss))
    assert check.fault == "second time" and not check.is_step


@pytest.mark.parametrize(
    ("label", "mark", "fits"), [(-100, -100, True), (-100, -1, False), (7, -1, False), (2, 2, True)]
)
def test_no_other_mark_is_tried_that_leaves_a_label_which_is_no_class(label, mark, fits):
    "On a GPU such a label is an assertion that ends the process's use of the device."
    assert explanations._fits(torch.zeros(4, 3), torch.tensor([0, 1, 2, label]), mark) == fits
