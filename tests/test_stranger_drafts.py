"Drafts of programs that nobody here had written, as far as they can be made without running one."

import argparse
import ast
import enum
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import NamedTuple

import accelerate
import numpy as np
import pytest
import torch
from torch import nn

from stabilitylab import Recorder
from stabilitylab.cli.main import main
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.likely_cause import ranked_causes
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.pytree import container_kind
from stabilitylab.probe.draft import loop_code, setup_template
from stabilitylab.probe.draft.loop_setup import clip_code, known_arguments, scale_of_clipped
from stabilitylab.probe.draft.loop_source import Source, relevant
from stabilitylab.probe.draft.loop_values import Keeper, LoopValues, kept_values, restored
from stabilitylab.probe.draft.name_sources import resolved_lines
from stabilitylab.probe.draft.python_source import Draft, cast_source, model_source, optimizer_source
from stabilitylab.probe.draft.running_script import local_modules
from stabilitylab.probe.draft.setup_template import call_source
from stabilitylab.probe.draft.trainer_code import prepared
from stabilitylab.replay.examine import examine
from stabilitylab.replay.retrace import retrace
from stabilitylab.replay.script import clip_scaled, definitions
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.state import Setup
from stabilitylab.replay.user_code import function_at, theirs
from stabilitylab.run.curves import CLIPPED_SCALED, TRAINED_BESIDE
from stabilitylab.run.record import open_run
from stabilitylab.trial import start as trial_start
from tests.command import command


class Actor(nn.Module):
    "Keeps none of its arguments."

    def __init__(self, n_state, width, spread, n_action=2):
        super().__init__()
        self.body = nn.Linear(n_state, width)


class Agent:
    "Builds its networks from what it is given, and from values of its own."

    def __init__(self, n_state, scale, spread=0.6):
        scale = 2 * scale
        self.width = 8
        self.policy = Actor(n_state, self.width, spread, n_action=scale)

    def update(self):
        return known_arguments(Actor, ["n_state", "width", "spread", "n_action"], sys._getframe())


def test_a_model_that_an_agent_builds_has_what_the_agent_was_given():
    n_state, scale = 6, 3
    agent = Agent(n_state, scale)
    # what the constructor changes before it builds is not known afterwards
    assert agent.update() == {"n_state": 6, "width": 8, "spread": 0.6}


def test_a_tensor_that_the_script_computed_is_kept_and_not_computed_again(tmp_path, monkeypatch):
    labels = torch.randint(0, 7, (1600,))
    main = SimpleNamespace(labels=labels, table=nn.Parameter(torch.ones(2000)))
    monkeypatch.setitem(sys.modules, "__main__", main)
    draft = Draft()
    source = loop_code.ValueSources(draft, nn.Linear(2, 1))("labels", labels)
    assert source == "kept_values(__file__)['labels']" and not draft.uses_script
    assert loop_code.ValueSources(draft, nn.Linear(2, 1))("table", main.table) is None
    box = SimpleNamespace(folder=tmp_path / "blackbox", model=None, optimizers=[])
    recorder = SimpleNamespace(path=tmp_path)
    monkeypatch.setattr(setup_template, "_draft_or_note", lambda *_: f"labels = {source}\n")
    setup_template.write_setup(recorder, box, None)
    assert torch.equal(kept_values(str(tmp_path / "replay_setup.py"))["labels"], labels)


class Policy(nn.Module):
    "Its spread is a tensor, and neither a parameter nor a buffer."

    def __init__(self):
        super().__init__()
        self.layer, self.spread = nn.Linear(3, 1), torch.full((2,), 0.6)

    def forward(self, x):
        return (self.layer(x).square() / self.spread.sum()).mean()


@pytest.mark.slow
def test_a_tensor_that_the_loop_sets_on_the_model_comes_back_with_a_snapshot_or_is_named(tmp_path):
    torch.manual_seed(0)
    setup = Setup(Policy, lambda model, x: model(x), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    model = setup.model()
    optimizer = setup.optimizer(model)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=3) as recorder:
        for step in range(8):
            model.spread = torch.full((2,), 0.6 - 0.3 * (step > 4))
            loss = model(recorder.batch(torch.randn(4, 3)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    checks = {n: check_setup(tmp_path / "run", n, setup, retrace(tmp_path / "run", n, setup)) for n in (5, 7)}
    assert checks[7].is_exact and not checks[5].is_step
    assert "an attribute that the loop sets" in checks[5].words


class Mixer(nn.Module):
    "Keeps what it computes from its arguments, and tensors of three kinds."

    def __init__(self, width, twice, kind=torch.relu):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Sequential(Actor(width, 3, 0.1), nn.ReLU())])
        self.scale, self.kind = nn.Parameter(torch.ones(width)), kind
        self.register_buffer("count", torch.tensor(2 * twice))
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)

    def forward(self, x):
        return self.layers[1][0].body(self.kind(self.layers[0](x) * self.scale + self.shift)) * self.count


def made_by(lines, draft):
    "What the lines of a draft return."
    names = {}
    source = "\n".join(
        [*sorted(draft.imports), "import torch", "def make():", *(f"    {line}" for line in lines)]
    )
    exec(source, names)
    return names["make"]()


def test_a_model_whose_arguments_nothing_shows_is_put_together_from_its_parts():
    model, draft, x = Mixer(4, 3), Draft(), torch.randn(2, 4)
    lines, words = loop_code.model_lines(draft, model, None)
    copy = made_by("\n".join(lines).split("\n"), draft)
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(x), model(x)) and "from its parts" in words
    assert [name for name, _ in copy.named_parameters()] == [name for name, _ in model.named_parameters()]
    # two names of one weight would be two weights, and an open file has no source
    model.layers[0].weight = model.layers[1][0].body.weight
    assert "TODO" in str(loop_code.model_lines(Draft(), model, None)[0])
    model = Mixer(4, 3)
    model.log = sys.stderr
    assert "TODO" in str(loop_code.model_lines(Draft(), model, None)[0])


class Task(nn.Module):
    "What a configuration file builds: a network, and an optimizer still without its parameters."

    def __init__(self, net, optimizer, schedule):
        super().__init__()
        self.net, self.hparams = net, {"optimizer": optimizer, "schedule": schedule}


def test_what_a_configuration_file_gives_a_task_is_written_down():
    optimizer = functools.partial(torch.optim.Adam, lr=0.1)
    schedule = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=3)
    task, draft = Task(Mixer(4, 1), optimizer, schedule), Draft()
    source, missing = model_source(draft, task)
    copy = made_by([*f"return {source}".split("\n")], draft)
    assert not missing and not draft.unseen
    assert isinstance(copy.net, Mixer) and copy.hparams["optimizer"].keywords == {"lr": 0.1}
    assert copy.hparams["schedule"].func is torch.optim.lr_scheduler.ReduceLROnPlateau


class Kind(enum.Enum):
    NOISE = enum.auto()


def test_arrays_and_members_of_an_enumeration_have_a_source():
    draft = Draft()
    for value in (np.linspace(0, 1, 1000), np.float32(0.1), Kind.NOISE):
        names = {}
        source = draft.literal(value)
        exec("\n".join([*draft.imports, "import torch", f"value = {source}"]), names)
        assert np.array_equal(names["value"], value) and type(names["value"]) is type(value)
    assert draft.literal(np.zeros(1001)) is None


class Column(NamedTuple):
    name: str
    size: int = 4


def drawn(shape, loc=0.0, scale=1.0):
    return loc + scale * torch.ones(shape)


def test_tuples_with_names_partial_functions_and_accelerators_have_a_source():
    "Columns of a table of a recommender; the noise levels and the Accelerator of a diffusion model."
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=3, cpu=True)
    values = ([Column("age", 9), Column("town")], functools.partial(drawn, (2,), scale=3.0), accelerator)
    copies = []
    for value in values:
        draft, names = Draft(), {}
        source = draft.literal(value)
        exec("\n".join([*draft.imports, "import torch", f"value = {source}"]), names)
        copies.append(names["value"])
    columns, noise, again = copies
    assert columns == values[0] and type(columns[0]) is Column
    assert torch.equal(noise(loc=1.0), torch.tensor([4.0, 4.0]))
    assert (again.gradient_accumulation_steps, again.mixed_precision) == (3, "no")
    assert Draft().literal(functools.partial(lambda x: x, 1)) is None


def test_what_cannot_be_kept_with_a_batch_is_not_asked_to_be_given_to_it():
    source = Draft().literal
    keeper = Keeper(lambda name, value: source(value), LoopValues({}))
    scope = {"server": threading.Lock(), "hidden": torch.zeros(2, requires_grad=True)}
    assert keeper.name_lines("server", scope)[1] == [
        "`server`, a lock of the loop: write the line that makes it into `loss`"
    ]
    assert keeper.name_lines("hidden", scope)[1] == [
        "`hidden`, a Tensor of the loop: give it to `recorder.batch`"
    ]


def test_the_running_script_under_the_name_of_multiprocessing_is_no_other_module(monkeypatch, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("")
    main = SimpleNamespace(__file__=str(file))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    monkeypatch.setitem(sys.modules, "beside", SimpleNamespace(__file__=str(tmp_path / "beside.py")))
    assert sorted(local_modules()) == ["__main__", "beside"]


def test_looking_for_the_owner_of_a_model_does_not_run_code_of_what_the_program_holds():
    class Warns:
        def __getattribute__(self, name):
            warnings.warn("asked", stacklevel=1)
            return super().__getattribute__(name)

    old, held = Warns(), Agent(6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert held.update()["width"] == 8 and type(old) is Warns
        assert known_arguments(Actor, ["width"], sys._getframe()) == {"width": 8}


def test_parts_of_a_batch_that_are_alike_are_named_once():
    assert call_source([Kind.NOISE] * 32)[1] == "a list of 32 × Kind"


BUILT_IN_BRANCHES = """
layers, widths = [], []
kind = "wide"
if kind == "narrow":
    assert kind != "wide", "never"
    width = 2
else:
    print("wide")
    width = 4
if kind == "wide":
    print("layers follow")
    for n in range(3):
        layers += [width + n]
for n in range(2):
    widths.append(n)

def train(model):
    model.backward()

for epoch in range(9):
    train(layers)
    layers.append(epoch)
for epoch in range(9):
    layers[0].backward()
    layers.append(epoch)
"""


def test_a_list_that_a_script_fills_in_a_branch_and_a_loop_is_whole_and_nothing_is_trained(tmp_path):
    (tmp_path / "branches.py").write_text(BUILT_IN_BRANCHES)
    built = definitions(tmp_path / "branches.py", "branches_of_a_stranger")
    assert built.layers == [4, 5, 6] and built.widths == [0, 1]


def test_a_field_that_is_called_like_a_line_of_the_script_does_not_run_that_line(tmp_path):
    "A data class of a reward model had a field `tokenizer`: its class body loaded the default one."
    (tmp_path / "reward.py").write_text(
        "from dataclasses import dataclass\n"
        "tokenizer = 1 / 0\n"
        "width = 7\n"
        "@dataclass\n"
        "class Collator:\n"
        "    tokenizer: str\n"
        "    size: int = width\n"
    )
    made = definitions(tmp_path / "reward.py", "reward_of_a_stranger").Collator("words")
    assert (made.tokenizer, made.size) == ("words", 7)


ROOT = str(Path(__file__).resolve().parent.parent)
CLOSURE = """
import torch
from torch import nn

from stabilitylab import Recorder

torch.manual_seed(0)
model = nn.Linear(3, 1)
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
OUTSIDE
with Recorder(model, optimizer, "run", snapshot_every=2) as recorder:
    for step in range(5):
        x, y = recorder.batch((torch.randn(6, 3), torch.randn(6, 1)))
        INSIDE
        recorder.step(optimizer.step(closure))
"""
CLOSED = """def closure():
    optimizer.zero_grad()
    out = model(x)
    loss = criterion(out, y)
    loss.backward()
    return loss
"""
STEP = """out = model(x)
loss = criterion(out, y)
loss.backward()
optimizer.step()
return loss
"""
ADAM = "Adam(model.parameters(), lr=0.1)"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["INSIDE", "OUTSIDE", "a function"])
def test_the_loss_of_a_closure_or_of_a_function_is_written_out(tmp_path, capsys, place):
    "An example of L-BFGS was replayed by `model(*batch)`, which failed in the model's own loop."
    lines = indent(CLOSED, "        ").lstrip() if place == "INSIDE" else CLOSED
    text = CLOSURE.replace(place, lines)
    if place == "a function":  # that takes the step, within the `with` of the Recorder
        taken = "def closure(x, y):\n    optimizer.zero_grad()\n" + indent(STEP, "    ")
        text = text.replace("OUTSIDE", taken).replace("LBFGS(model.parameters(), lr=0.5, max_iter=3)", ADAM)
        text = text.replace("optimizer.step(closure)", "closure(x, y)")
    text = text.replace("OUTSIDE", "").replace("INSIDE", "")
    (tmp_path / "train.py").write_text(text)
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    assert main(["replay", str(tmp_path / "run"), "--step", "3", "--json", "--no-swap"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["is_exact"] and not check["missing"], check


NET = """
import torch
import torch.nn.functional as F
from torch import nn

from stabilitylab import Recorder


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.2)

    def forward(self, x):
        return self.b(self.drop(torch.tanh(self.a(x))))


torch.manual_seed(0)
model = Net()
"""
EPOCH = """
def epoch(ARGUMENTS):
    for _ in range(5):
        x = recorder.batch(torch.randn(6, 4))
        out = model(x)
        loss = F.mse_loss(out, x) + weight * out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(loss)


optimizer = torch.optim.Adam(model.parameters(), 0.01)
recorder = Recorder(model, optimizer, "run", snapshot_every=4)
for weight in (0.0, 0.3, 0.6):
    epoch(ARGUMENTS)
recorder.close()
"""
OF_TWO = """
decoder = nn.Linear(4, 4)
both = nn.ModuleList([model, decoder])
optimizer = torch.optim.Adam(both.parameters(), 0.01)
with Recorder(both, optimizer, "run", snapshot_every=4) as recorder:
    for _ in range(10):
        x = recorder.batch(torch.randn(6, 4))
        back = decoder(model(x))
        loss = F.mse_loss(back, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(loss)
"""
STEPPING = """
class Stepper:
    def __init__(self):
        self.optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


stepper = Stepper()
with Recorder(model, stepper.optimizer, "run", snapshot_every=4) as recorder:
    for _ in range(10):
        batch = recorder.batch((torch.randn(6, 4), torch.randn(6, 4)))
        loss = stepper.step(batch)
        recorder.step(loss)
"""
SHAPES = {
    "a method called step that is given the batch": STEPPING,
    "a number that the function is given": EPOCH.replace("ARGUMENTS", "weight"),
    "a number that the script sets in its loop": EPOCH.replace("ARGUMENTS", ""),
    "a part that the loop calls model": OF_TWO,
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_is_replayed_with(tmp_path, capsys, shape):
    "Numbers were those of the first epoch, a part was taken for the model, a batch for a closure."
    (tmp_path / "train.py").write_text(NET + SHAPES[shape])
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environment, check=True)
    assert main(["replay", str(tmp_path / "run"), "--step", "9", "--json", "--no-swap"]) == 0
    check = json.loads(capsys.readouterr().out)["check"]
    assert check["is_exact"] and not check["missing"], check


def test_what_the_head_of_a_method_reads_is_there_when_its_class_is_made(tmp_path):
    "A buffer of experiences named its own tuple in an annotation: the replay could not import the script."
    (tmp_path / "buffer.py").write_text(
        "from collections import namedtuple\n"
        "Experience = namedtuple('Experience', 'state reward')\n"
        "size = 3\n"
        "never = 1 / 0\n"
        "class Buffer:\n"
        "    def append(self, experience: Experience, most=size) -> Experience:\n"
        "        return experience, most, never\n"
        "    class Entry(Experience):\n"
        "        pass\n"
    )
    buffer = definitions(tmp_path / "buffer.py", "buffer_of_a_stranger").Buffer
    assert buffer.append.__annotations__["return"]._fields == ("state", "reward")
    assert buffer.append.__defaults__ == (3,) and buffer.Entry(1, 2).reward == 2


class Rotary(nn.Module):
    "A model in bf16 whose table of frequencies is float32 whatever the format of its weights."

    def __init__(self, width=3):
        super().__init__()
        self.head = nn.Linear(width, 1)
        self.register_buffer("inv_freq", torch.linspace(0.1, 1, width), persistent=False)


def test_the_draft_of_a_model_in_bf16_leaves_the_buffers_that_are_in_float32():
    "A reward model was replayed with its rotary frequencies rounded: another processor was blamed."
    model = Rotary()
    model.head.bfloat16()
    source = cast_source(draft := Draft(), model, "Rotary()")
    names = {"Rotary": Rotary, "torch": torch}
    exec("\n".join([*draft.imports, f"model = {source}"]), names)
    assert names["model"].head.weight.dtype == torch.bfloat16
    assert torch.equal(names["model"].inv_freq, model.inv_freq)
    assert cast_source(Draft(), model.bfloat16(), "Rotary()") == "Rotary().to(torch.bfloat16)"
    assert cast_source(Draft(), Rotary(), "Rotary()") == "Rotary()"


def test_what_the_script_looks_up_by_a_string_is_imported():
    "A time series program made `eval(args.model).Model(args)`: the draft did not import the module."
    scope = {"args": argparse.Namespace(model="Mixer"), "Mixer": Mixer, "factor": 2}
    for text in ("eval(args.model)(3, factor)", "globals()[args.model](3, factor)"):
        statement = ast.parse(f"model = {text}").body
        values = loop_code.ValueSources(Draft(), nn.Module())
        lines, missing = resolved_lines(statement, dict(scope), nn.Module(), values, {}, {}, set())
        assert lines[-1] == "model = Mixer(3, factor)" and not missing
        assert any("Mixer" in line for line in values.draft.imports)


class Rays(nn.Module):
    "As a module of Lightning that reads what Lightning's own calls set."

    def setup(self, stage):
        self.white = stage == "fit"

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return self.optimizer

    def forward(self, x):
        return x * self.white

    def training_step(self, batch, batch_idx):
        return self(batch) * self.optimizer.param_groups[0]["lr"]


class PlainRays(nn.Module):
    setup, configure_optimizers = Rays.setup, Rays.configure_optimizers

    def forward(self, x):
        return x

    def training_step(self, batch, batch_idx):
        return self(batch)


def test_a_lightning_module_is_prepared_where_its_step_reads_what_lightning_sets():
    model = Rays()
    for line in prepared(model):
        exec(line, {"model": model})
    assert model.training_step(torch.ones(1), 0) == 0.1
    assert prepared(PlainRays()) == []


class LoggedRays(PlainRays):
    def log(self, name, value):
        raise RuntimeError("no Trainer")

    log_dict = log

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self(batch)


def test_a_lightning_module_without_its_trainer_logs_nothing():
    model = LoggedRays()
    for line in prepared(model):
        exec(line, {"model": model})
    assert model.training_step(torch.ones(1), 0) == 1


class Duel:
    "A trainer whose critic is recorded; the loss needs its generator."

    def __init__(self, critic, generator):
        self.critic, self.generator = critic, generator
        self.steps = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator)]

    def penalty(self, real, made):
        between = (real + made).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def critic_step(self, real, recorder):
        made = self.generator(torch.randn(len(real), 2))
        loss = self.critic(made).mean() - self.critic(real).mean() + self.penalty(real, made)
        self.steps[0].zero_grad()
        loss.backward()
        self.steps[0].step()
        recorder.step(loss)
        self.steps[1].zero_grad()
        (-self.critic(self.generator(torch.randn(4, 2))).mean()).backward()
        self.steps[1].step()

    def generator_step(self, real, recorder):
        made = self.generator(torch.randn(len(real), 2))
        gap = self.critic(made.detach()).mean() - self.critic(real).mean()
        self.steps[0].zero_grad()
        gap.backward()
        self.steps[0].step()
        loss = -self.critic(made).mean()
        self.steps[1].zero_grad()
        loss.backward()
        self.steps[1].step()
        recorder.step(loss)

    def critic_epoch(self, data, recorder):
        for real in data:
            self.critic_step(recorder.batch(real), recorder)

    def generator_epoch(self, data, recorder):
        for real in data:
            self.generator_step(recorder.batch(real), recorder)


def fought(path, monkeypatch, part):
    "The replay of a step of one part of a duel."
    here = sys.modules[__name__]
    monkeypatch.setattr(loop_code, "local_modules", lambda: ["__main__", __name__])
    torch.manual_seed(0)
    duel = Duel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(2, 3))
    optimizer = duel.steps[part == "generator"]
    with Recorder(getattr(duel, part), optimizer, path, snapshot_every=3) as recorder:
        getattr(duel, f"{part}_epoch")(torch.randn(6, 4, 3), recorder)
    monkeypatch.setitem(sys.modules, __name__, here)
    return examine(path, 5, swap=False)


@pytest.mark.slow
def test_the_other_network_of_a_trainer_is_kept_with_each_batch(tmp_path, monkeypatch):
    "A critic with a penalty on its gradient: the draft left the generator out, and was refused."
    result = fought(tmp_path / "run", monkeypatch, "critic")
    assert result.exact and result.check.is_step and not result.left_out
    assert result.samples.attrs["draws"]  # a sample alone is given noise of its own


@pytest.mark.slow
def test_a_network_that_is_trained_between_the_batch_and_the_loss_is_kept_as_the_loss_saw_it(
    tmp_path, monkeypatch
):
    "The step of a generator through a critic that had taken a step of its own was never that of the record."
    result = fought(tmp_path / "run", monkeypatch, "generator")
    assert result.exact and result.check.is_step


class Normed(nn.Module):
    "A layer with spectral norm: each pass moves the vector of its power iteration."

    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Linear(width, width)
        self.weight_u = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x):
        weight = self.body.weight
        with torch.no_grad():
            self.weight_u.copy_(nn.functional.normalize(weight @ (weight.T @ self.weight_u), dim=0))
        return nn.functional.linear(x, weight / (weight.T @ self.weight_u).norm(), self.body.bias)


class Play:
    "A trainer that runs its generator once more before the batch, as for the step of a discriminator."

    def __init__(self, generator):
        self.generator, self.step = generator, torch.optim.SGD(generator.parameters(), lr=0.1)

    def epoch(self, data, recorder):
        for noise in data:
            with torch.no_grad():
                self.generator(2 * noise)
            noise = recorder.batch(noise)
            loss = (self.generator(noise) - 1).square().mean()
            self.step.zero_grad()
            loss.backward()
            self.step.step()
            recorder.step(loss)


@pytest.mark.slow
def test_vectors_of_a_spectral_norm_that_passes_between_steps_move_are_kept(tmp_path, monkeypatch):
    "A GAN's generator is run for its discriminator, too: replays were exact at snapshots alone."
    here = sys.modules[__name__]
    torch.manual_seed(0)
    play = Play(Normed())
    with Recorder(play.generator, play.step, tmp_path / "run", snapshot_every=4) as recorder:
        play.epoch(torch.randn(8, 3, 4), recorder)
    monkeypatch.setitem(sys.modules, __name__, here)
    result = examine(tmp_path / "run", 7, swap=False)
    assert result.exact and result.check.is_step and result.check.fault == ""
    check = {each.name: each.recorded for each in result.check.checks}
    assert result.to_dict()["update_norm"] == pytest.approx(check["update_norm"])


def test_packages_of_a_folder_in_the_path_are_not_imported_again(tmp_path, monkeypatch):
    "A trial loads a setup several times: a package with C code beside the program failed at the second."
    (tmp_path / "site").mkdir()
    (tmp_path / "site/once_only.py").write_text(
        "import sys\nassert not hasattr(sys, '_once'), 'twice'\nsys._once = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "own.py").write_text("value = 1\n")
    draft = tmp_path / "replay_setup.py"
    draft.write_text(
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(tmp_path / 'site')!r}]\nimport once_only, own\n"
        "from stabilitylab import Setup\ndef setup(path): return Setup(None, None)\n"
    )
    try:
        first = function_at(str(draft)).__globals__["own"]
        assert function_at(str(draft)).__globals__["own"] is not first
    finally:
        vars(sys).pop("_once", None)


def distance_loss(model, weight):
    "(a loss that was made elsewhere, in which `weight` is not what the loop calls so; the same as a lambda)."

    def inner(batch, *, power=2):
        return weight * (model(batch["x"]).abs() ** power).mean()

    return inner, lambda batch: weight * model(batch["x"]).abs().mean()


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_that_another_function_made_is_written_out_under_the_name_it_has_in_the_loop(tmp_path, which):
    torch.manual_seed(0)
    weight = torch.ones(2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of = distance_loss(model, 0.25)[which]
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(3):
            batch = recorder.batch({"x": torch.randn(4, 2) * weight})
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    assert examine(tmp_path / "run", 2, swap=False, samples=False).exact


def made_from(source, *lines):
    "The value of a source, after some imports."
    names = {"torch": torch, "np": np}
    exec("\n".join(lines), names)
    return eval(source, names)


def test_keys_that_are_numbers_of_numpy_have_a_source():
    source = Draft().literal({np.int64(3): [np.float32(0.5)]})
    assert made_from(source) == {3: [0.5]} and "np.int64" not in source
    assert Draft().literal({object(): 1}) is None


class Configured:
    "As diffusers makes its noise schedules: a configuration that is read like attributes, and may raise."

    config_name = "scheduler_config.json"

    def __init__(self, steps=1000):
        self.__dict__["_internal_dict"] = {"steps": steps, "_class_name": "Configured"}

    @property
    def config(self):
        return self._internal_dict

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __getattr__(self, name):
        if hasattr(dict, name):
            return self._internal_dict[name]
        raise AttributeError(name)


def test_an_object_that_its_configuration_makes_is_written_out(monkeypatch):
    monkeypatch.setitem(sys.modules, Configured.__module__, sys.modules[__name__])
    draft = Draft()
    source = draft.literal(Configured(7))
    assert source == "Configured.from_config({'steps': 7})"
    assert container_kind(Configured()) == ""


def test_a_value_that_a_loop_adds_to_is_set_before_it_and_its_own_variable_is_not_asked_for():
    text = """
for part in other: first += part
total = 0
for part in parts: total += part
"""
    for start, needed in ((0, {"total"}), (1, {"first", "total"})):
        statements = ast.parse("first = 1\n" * start + text).body
        kept = [ast.unparse(statement) for statement in relevant(statements, set(needed))]
        assert kept[-2:] == ["total = 0", "for part in parts:\n    total += part"]
        assert (kept[:1] == ["first = 1"]) is bool(start) and len(kept) == 2 + 2 * start


def test_a_draft_gives_what_it_imports_the_arguments_of_the_program(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--width", "8", "--api_key", "abc"])
    lines = setup_template._arguments_lines()
    assert "'--width', '8'" in lines and "abc" not in lines
    (tmp_path / "own_world.py").write_text("import sys\nWIDTH = sys.argv[2]\n")
    setup = tmp_path / "replay_setup.py"
    setup.write_text(f"import sys\n{lines}from own_world import WIDTH\ndef setup(path): return WIDTH\n")
    assert function_at(f"{setup}:setup")(None) == "8"
    script.write_text("import sys\nif sys.argv[1] == '--width':\n    import sys\nWIDTH = sys.argv[2]\n")
    lines += f"from stabilitylab.replay.script import definitions\ndefinitions({str(script)!r}, 'a_script')\n"
    setup.write_text(f"import sys\n{lines}import a_script\ndef setup(path): return a_script.WIDTH\n")
    assert function_at(f"{setup}:setup")(None) == "8"
    assert sys.argv[-1] == "abc"  # ours again
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert setup_template._arguments_lines() == ""


def test_an_object_that_cannot_be_written_whole_is_imported_from_the_file_that_made_it(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "own_register.py").write_text(
        "import torch\n"
        "class Data:\n"
        "    def __init__(self): self.graph, self.n = torch.eye(2).to_sparse(), 3\n"
        "dataset = Data()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "train.py")))
    register = importlib.import_module("own_register")
    draft = Draft()
    sources = loop_code.ValueSources(draft, nn.Linear(2, 1))
    assert sources("dataset", register.dataset) == "dataset"
    assert "from own_register import dataset" in draft.imports
    register.dataset.graph = None
    assert sources("dataset", register.dataset).startswith("stand_in(Data")


def test_a_loss_that_reports_to_a_tracker_reports_nothing_in_a_replay(monkeypatch):
    def refuse(*_args, **_named):
        raise RuntimeError("You must call init() before log()")

    tracker = SimpleNamespace(log=refuse)
    monkeypatch.setitem(sys.modules, "wandb", tracker)

    def loss(model, batch):
        tracker.log({"loss": 1.0})
        return model(batch).sum()

    setup = theirs(Setup(lambda: nn.Linear(2, 1), loss, None))
    assert setup.loss(nn.Linear(2, 1), torch.ones(1, 2)).requires_grad
    assert tracker.log is refuse


SCALED_LOOP = """
scaler.scale(loss).backward()
{unscale}
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
"""


@pytest.mark.parametrize(
    ("unscale", "enabled", "scale"),
    [("pass", True, 2.0**16), ("scaler.unscale_(optimizer)", True, 1.0), ("pass", False, 1.0)],
)
def test_a_loop_that_clips_before_it_unscales_is_seen_and_clipped_the_same_way(unscale, enabled, scale):
    model = nn.Linear(3, 1)
    scope = {"torch": torch, "scaler": torch.amp.GradScaler("cpu", enabled=enabled), "model": model}
    source = Source(ast.parse(SCALED_LOOP.format(unscale=unscale)).body, scope, 2)
    assert scale_of_clipped(source, scope) == scale
    text = clip_code(source, scope, model, lambda name, value: None)
    assert text == ("1.0" if scale == 1 else "lambda model: clip_scaled(model, 1.0, 65536.0)")
    model(torch.ones(1, 3)).sum().backward()
    clip_scaled(model, 1.0, 2.0**16)
    assert (
        abs(float(model.weight.grad.norm().square() + model.bias.grad.norm().square()) * 2.0**32 - 1) < 1e-4
    )


def test_another_network_that_the_loop_trains_and_scaled_clipping_are_noted():
    model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    scope = {
        "critic": critic,
        "teacher": nn.Linear(2, 1),
        "second": torch.optim.SGD(critic.parameters(), 0.1),
    }
    scope |= {"torch": torch, "scaler": torch.amp.GradScaler("cpu"), "model": model}
    source = Source(ast.parse(SCALED_LOOP.format(unscale="pass")).body, scope, 2)
    notes = []
    recorder = SimpleNamespace(guard=SimpleNamespace(note=lambda text, aloud=True: notes.append(text)))
    span = SimpleNamespace(source=source, scope=scope, loss=ast.Constant(0), statements=[])
    kept = {"c": "critic", "t": "teacher"}
    loop_code._note_faults(span, recorder, model, kept)
    assert notes[0].startswith(CLIPPED_SCALED) and notes[1:] == [f"{TRAINED_BESIDE}: critic"]
    scope["second"].add_param_group({"params": list(model.parameters())})  # one loss of both
    loop_code._note_faults(span, recorder, model, kept)
    assert len(notes) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "is_below"),
    [
        ("cost(model(x).softmax(1), y)", True),
        ("nn.functional.nll_loss(model(x).softmax(1), y)", True),
        ("cost(model(x).log_softmax(1), y)", False),
        ("cost(model(x).log_softmax(1), y) - 9", False),  # below 0, and nothing forbids it
        ("nn.functional.mse_loss(model(x)[:, 0], y.float()) - 9", False),
    ],
)
def test_a_likelihood_of_probabilities_that_are_no_logarithms_is_the_cause(
    tmp_path, monkeypatch, loss, is_below
):
    "A speaker recognizer gave `softmax` to NLLLoss: it learned slowly, and nothing was told."
    (tmp_path / "loop.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def train(model, optimizer, cost, recorder):\n"
        "    for _ in range(12):\n"
        "        x, y = recorder.batch((torch.randn(8, 4), torch.randint(0, 3, (8,))))\n"
        f"        loss = {loss}\n"
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n"
        "        recorder.step(loss)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("loop", None)
    loop, model = importlib.import_module("loop"), nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=5) as recorder:
        loop.train(model, optimizer, nn.NLLLoss(), recorder)
    causes = ranked_causes(diagnose(open_run(tmp_path / "run")).attrs["evidence"])
    assert ("no_log_probabilities" in [cause.id for cause in causes]) is is_below


class Counting(nn.Linear):
    "A layer that each of its passes changes."

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return super().forward(x) * self.passes


@pytest.mark.slow
@pytest.mark.parametrize(("judge", "is_exact"), [(lambda: nn.Linear(3, 1), True), (Counting, False)])
def test_a_network_that_steps_between_the_batch_and_the_backward_pass(tmp_path, judge, is_exact):
    torch.manual_seed(0)
    make = judge
    setup = Setup(
        lambda: nn.Linear(2, 3),
        lambda model, x, loop: -restored(make, loop["judge"])(model(x)).mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    model, judge = setup.model(), make()
    optimizer, beside = setup.optimizer(model), torch.optim.SGD(judge.parameters(), lr=0.5)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=4) as recorder:
        for _ in range(6):
            x = recorder.batch(torch.randn(8, 2))
            judged = judge(model(x).detach()).mean()
            beside.zero_grad()
            judged.backward()
            beside.step()
            loss = -judge(model(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    check = check_setup(tmp_path / "run", 5, setup, retrace(tmp_path / "run", 5, setup))
    assert check.is_exact is is_exact
    assert is_exact or "runs through judge, which the loop trains too" in check.words


def test_a_trial_of_several_optimizers_is_refused_with_a_way_out(tmp_path, monkeypatch):
    "Three networks with an optimizer each: `allowed: one optimizer` was all that was told."

    def two(model):
        return [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]

    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    optimizers = two(model)
    with Recorder(model, optimizers, tmp_path / "run", snapshot_every=2) as recorder:
        for _ in range(3):
            loss = model(recorder.batch(x)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            recorder.step(loss)
    setup = Setup(lambda: nn.Linear(3, 1), lambda model, batch: model(batch).square().mean(), two)
    monkeypatch.setattr(trial_start, "setup_of", lambda path, name: setup)
    with pytest.raises(ValueError, match="one that has the parameters of all of them, as groups"):
        trial_start._recorded_training(SimpleNamespace(path=tmp_path / "run", step=2, setup=""), 0, "cpu")


EXTENDS_ITS_PATH = """
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "src"))
from shared_by_scripts import *
from stabilitylab import Recorder

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x)

if __name__ == "__main__":
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(model, optimizer, sys.argv[1], snapshot_every=2) as recorder:
        for step in range(4):
            loss = model(recorder.batch(torch.ones(2, 4))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
"""


@pytest.mark.slow
def test_a_program_that_extends_its_path_is_imported_again(tmp_path):
    for name in ("src", "tools"):
        (tmp_path / name).mkdir()
    shared, script = tmp_path / "src" / "shared_by_scripts.py", tmp_path / "tools" / "train.py"
    shared.write_text("import torch\nfrom torch import nn\n")
    script.write_text(EXTENDS_ITS_PATH)
    subprocess.run([sys.executable, script, tmp_path / "run"], check=True, cwd=tmp_path)
    draft = (tmp_path / "run" / "replay_setup.py").read_text()
    folders = next(line for line in draft.splitlines() if line.startswith("sys.path["))
    assert ast.literal_eval(folders.partition("= ")[2]) == [str(script.parent), str(shared.parent)]
    assert "the replay is the recorded step" in command("replay", tmp_path / "run", "--no-swap").stdout
    shared.unlink()
    refused = command("replay", tmp_path / "run", "--no-swap")
    assert refused.returncode == 2 and "No module named 'shared_by_scripts'" in refused.stderr


def test_a_class_of_a_package_that_is_not_installed_is_told_by_the_package(tmp_path):
    "A record of Lightning replayed in an environment without it: `cannot import name 'LitAutoEncoder'`."
    text = "from package_that_nobody_has import Base\n\nclass Net(Base):\n    width = 3\n\n"
    (tmp_path / "lit.py").write_text(text + "def area():\n    return Net.width\n")
    script = definitions(tmp_path / "lit.py", "lit_of_a_stranger")
    for _ in range(2):  # whoever asks
        with pytest.raises(ModuleNotFoundError, match="No module named 'package_that_nobody_has'"):
            _ = script.Net
    with pytest.raises(ModuleNotFoundError, match="package_that_nobody_has"):
        script.area()


OF_DRAFTS = {  # what `replay_setup.py` of a record imports: records of earlier versions have it too
    "stabilitylab.probe.draft.loop_values": ("give_vectors", "kept_values", "restored"),
    "stabilitylab.probe.draft.model_parts": ("assembled",),
    "stabilitylab.probe.draft.setup_template": ("own_loss",),
    "stabilitylab.replay.script": ("clip_scaled", "definitions", "mixed", "stand_in", "weights_in"),
    "stabilitylab.replay.trainer": ("kept_model", "module_step", "trainer_like", "trainer_loss"),
}


@pytest.mark.parametrize("module", OF_DRAFTS)
def test_what_drafts_of_earlier_records_import_stays_where_it_was(module):
    assert all(callable(getattr(importlib.import_module(module), name)) for name in OF_DRAFTS[module])


def test_a_draft_imports_nothing_else_of_this_package():
    texts = [
        file.read_text()
        for file in Path(loop_code.__file__).parent.glob("*.*")
        if file.suffix in (".py", ".txt")
    ]
    written = re.findall(r'(?:"|^)from (stabilitylab\.[a-z_.]+) import', "\n".join(texts), re.MULTILINE)
    quoted = {module for module in written if f'"from {module} import' in "".join(texts)}
    assert quoted <= set(OF_DRAFTS) and "stabilitylab.replay.trainer" in quoted


@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_that_takes_two_gradients_a_step_is_refused_for_that(passes):
    class Sharp(torch.optim.Optimizer):
        def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
            super().__init__(params, {"rho": rho} | kwargs)
            self.base_optimizer = base_optimizer(self.param_groups, **kwargs)

        def first_step(self):
            "Climbs along the first gradient."

    if passes == 2:
        Sharp.second_step = lambda self: None
    model, draft = nn.Linear(2, 1), Draft()
    optimizer = Sharp(model.parameters(), torch.optim.SGD, rho=2.0, lr=0.1)
    call = optimizer_source(draft, optimizer, {id(p): name for name, p in model.named_parameters()})
    assert ("without_replay" in call) == (passes == 2)
    if passes == 2:
        names = {}
        exec("\n".join(draft.imports), names)
        with pytest.raises(InputError, match="Sharp evaluates the gradient more than once a step"):
            eval(call, names)
