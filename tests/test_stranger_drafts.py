"Drafts of programs that nobody here had written, as far as they can be made without running one."

import sys
from types import SimpleNamespace

import torch
from torch import nn

from stabilitylab import Recorder
from stabilitylab.probe.draft import setup_template
from stabilitylab.probe.draft.loop_setup import known_arguments
from stabilitylab.probe.draft.loop_values import kept_values
from stabilitylab.probe.draft.python_source import Draft
from stabilitylab.replay.retrace import retrace
from stabilitylab.replay.setup_check import check_setup
from stabilitylab.replay.state import Setup


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
    source = setup_template._LoopValues(draft, nn.Linear(2, 1))("labels", labels)
    assert source == "kept_values(__file__)['labels']" and not draft.uses_script
    assert setup_template._LoopValues(draft, nn.Linear(2, 1))("table", main.table) is None
    box = SimpleNamespace(folder=tmp_path / "blackbox", model=None, optimizers=[])
    recorder = SimpleNamespace(path=tmp_path, box=box)
    monkeypatch.setattr(setup_template, "_draft_or_note", lambda *_: f"labels = {source}\n")
    setup_template.write_setup(recorder, None)
    assert torch.equal(kept_values(str(tmp_path / "replay_setup.py"))["labels"], labels)


class Policy(nn.Module):
    "Its spread is a tensor, and neither a parameter nor a buffer."

    def __init__(self):
        super().__init__()
        self.layer, self.spread = nn.Linear(3, 1), torch.full((2,), 0.6)

    def forward(self, x):
        return (self.layer(x).square() / self.spread.sum()).mean()


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
