"`diagnose --swap`: runs the code of a run only when asked, and its verdict is evidence."

import json
import re
import time

import pytest
import torch

from stabilitylab import Recorder, Setup, batch_of, snapshot_of
from stabilitylab.cases.registry import sample
from stabilitylab.cli.main import main
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.facts import evidence
from stabilitylab.detect.findings import Findings
from stabilitylab.detect.likely_cause import missing_measures, most_likely, ranked_causes
from stabilitylab.investigation.opening import open_recordings, swap_facts, with_swap_test
from stabilitylab.mcp.server import Tools
from stabilitylab.replay import examine, swap
from stabilitylab.run.record import open_run
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_overview import Overview
from stabilitylab.workbench.view_replay import ReplayView
from tests.test_zoo import JUMP, ORDINARY
from tests.zoo.__main__ import score
from tests.zoo.train import Recipe, train

SETUP = """
from pathlib import Path
import torch
from stabilitylab.replay.state import Setup
(Path(__file__).parents[1] / "was_run").touch()
def setup(path):
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=0.03)
    return Setup(lambda: torch.nn.Linear(16, 4), loss, adamw)
"""


@pytest.fixture
def recorded(tmp_path):
    "60 steps of a linear classifier; the labels of step 50 are turned around."
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    path = tmp_path / "run"
    with Recorder(model, optimizer, path, snapshot_every=10) as recorder:
        for step in range(60):
            x = torch.randn(32, 16)
            batch = {"x": x, "y": x[:, :4].argmin(1) if step == 50 else x[:, :4].argmax(1)}
            recorder.batch(batch)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    (path / "replay_setup.py").write_text(SETUP)
    return path


@pytest.mark.parametrize("same", [True, False])
def test_a_swap_of_equal_batches_says_that_it_can_tell_nothing_of_them(same):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
    setup = Setup(
        lambda: torch.nn.Linear(4, 2),
        lambda model, batch: model(batch["x"]).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
    )
    states = [snapshot_of(setup, model.state_dict()) for _ in range(3)]
    batches = [batch_of({"x": x if same else x + 0.01 * i}) for i in range(4)]
    words = swap.swap_test(states, batches, progress=False).words
    assert ("all batches of the test are the same" in words) == same


def told(path, capsys, *options):
    "The most likely cause as JSON."
    assert main(["diagnose", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["most_likely"]


@pytest.mark.slow
def test_code_of_a_run_is_executed_only_where_it_was_asked_for(recorded, capsys):
    plain = told(recorded, capsys)
    too_dear = told(recorded, capsys, "--swap", "--swap-seconds", "0")
    assert not (recorded.parent / "was_run").exists()
    assert plain["test"].endswith("--step 50") and "--swap" in plain["missing"][-1] and "swap" not in plain
    assert "the limit is 0 s" in too_dear["swap"]["left_out"] and "not run" in too_dear["missing"][-1]
    asked = told(recorded, capsys, "--swap")
    assert (recorded.parent / "was_run").exists()
    assert asked["swap"]["verdict"] == "bad batch" and asked["because"][0].startswith("the swap test")
    assert "test" not in asked and asked["id"] == "bad_labels"
    assert main(["diagnose", str(recorded), "--swap"]) == 0
    assert "Swap test of step 50: bad batch" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tool_of_an_agent_hands_its_verdict_to_later_answers(recorded):
    tools = Tools([recorded.parent])
    before = tools.diagnose("run", brief=False)["most_likely"]
    assert not (recorded.parent / "was_run").exists() and "swap" not in before
    tools.replay("run", step=50, what="swap")
    assert tools.diagnose("run", brief=False)["most_likely"]["swap"]["verdict"] == "bad batch"


@pytest.mark.slow
def test_overview_offers_the_swap_test_with_its_cost_and_takes_its_verdict(recorded):
    state, _ = open_state(recorded)
    overview, replayed = Overview(state), ReplayView(state)
    assert re.fullmatch(r"Batch or state\? Swap test, about \d+ s", overview.swap.description)
    assert overview.swap.layout.display != "none" and "Swap test of step" not in overview.likely.value
    assert not (recorded.parent / "was_run").exists()
    overview.swap.click()
    assert state.visible == "replay" and (replayed.look.step, replayed.look.samples) == (50, False)
    while not replayed.work.poll():
        time.sleep(0.05)
    assert state.findings.attrs["swap"]["verdict"] == "bad batch"
    words = re.sub("<[^>]+>", "", overview.likely.value)  # without the terms that are explained
    assert "Swap test of step 50: the batch is out of line" in words
    assert overview.swap.layout.display == "none"


@pytest.mark.slow
def test_a_setup_that_fails_is_said_and_changes_no_cause(recorded, capsys):
    plain = told(recorded, capsys)
    (recorded / "replay_setup.py").write_text("raise RuntimeError('no such data')")
    broken = told(recorded, capsys, "--swap")
    assert broken["id"] == plain["id"] and "no such data" in broken["swap"]["left_out"]


def test_a_verdict_moves_the_causes_of_its_side_and_only_these():
    labels = ORDINARY | {"back_at_once": (0.9, 104)}
    before = {c.id: c.score for c in ranked_causes(labels)}
    batch = {c.id: c.score for c in ranked_causes(labels | swap_facts("bad batch", 3, 101))}
    state = {c.id: c.score for c in ranked_causes(labels | swap_facts("bad state", 0, 101))}
    assert batch["bad_labels"] > before["bad_labels"] > state["bad_labels"]
    assert swap_facts("neither", 0, 101) == swap_facts("bad batch and bad state", 2, 101) == {}
    assert "bad_batch" not in batch  # said only where nothing else can be
    assert [c.id for c in ranked_causes(JUMP | swap_facts("bad state", 0, 101))] == ["bad_state"]
    row = ORDINARY | {"back_at_once": (0.1, 141)} | swap_facts("bad batch", 9, 101)
    assert "9 or more batches in a row are out of line" in ranked_causes(row)[0].evidence


def test_a_loss_far_below_chance_blames_no_labels():
    near_zero = ORDINARY | {"back_at_once": (0.9, 104), "event_over_chance": (0.01, 101)}
    sure = {c.id: c.score for c in ranked_causes(near_zero | {"event_over_chance": (1.8, 101)})}
    assert {c.id: c.score for c in ranked_causes(near_zero)}["bad_labels"] < sure["bad_labels"]


def test_a_rate_that_rose_right_before_is_the_cause_of_a_bad_state():
    state = JUMP | swap_facts("bad state", 0, 101) | {"rate_rise": (60.0, 98)}
    named = ranked_causes(state)[0]
    assert (named.id, named.step) == ("rate_raised", 98)
    assert "60 times at step 98" in named.words and "state of step 101 is bad because" in named.words
    assert ranked_causes(state | {"rate_rise": (1.1, 98)})[0].id == "bad_state"


def test_values_that_are_no_numbers_blame_the_batch_and_not_its_labels():
    broken = {"input_nonfinite": (1024.0, 100), "nonfinite": (0.4, None), "loss_jump": (float("inf"), 100)}
    named = ranked_causes(ORDINARY | broken | {"back_at_once": (0.9, 104)})[0]
    assert (named.id, named.step) == ("bad_inputs", 100) and "NaN or infinite" in named.words


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["conv", "mlp"])  # of a convolution no input is recorded
def test_a_batch_of_nan_is_named(arch, tmp_path):
    train(Recipe(arch, fault="inputs", size=float("nan"), steps=120), path=tmp_path / "run")
    findings = diagnose(open_run(tmp_path / "run"))
    likely = most_likely(findings)
    assert (likely.id, likely.step, likely.cures[0]) == ("bad_inputs", 100, "skip_batches")
    assert (
        arch == "conv" or "the batch held such values" in next(f for f in findings if f.modules).explanation
    )


@pytest.mark.slow
def test_a_replayed_bad_state_says_that_the_rate_was_raised(tmp_path):
    train(Recipe("mlp", fault="rate", size=60, steps=110), path=tmp_path / "run")
    test = examine.examine(tmp_path / "run", 101, samples=False).swap
    assert test.verdict == "bad state" and "rose 60 times at step 100" in test.to_dict()["words"]


@pytest.mark.slow
def test_a_new_task_is_no_bad_state_for_states_that_had_learned_little(tmp_path):
    "The gradients of this young run grow as it learns, so its states are no suspects for that."
    train(Recipe("mlp", fault="shift", steps=110), path=tmp_path / "run")
    assert examine.examine(tmp_path / "run", 100, samples=False).swap.verdict != "bad state"


def test_wide_logits_name_the_initialisation_of_a_classifier_of_tokens_only():
    wide = {"logit_std": (2.9, 0), "first_over_chance": (1.8, 0), "embeds": (1.0, None)}
    assert [c.id for c in ranked_causes(wide)] == ["init_too_wide"]
    assert ranked_causes(wide | {"embeds": (0.0, None)}) == []


@pytest.mark.slow
def test_the_draft_of_a_zoo_run_is_swapped_and_the_batch_is_blamed(tmp_path):
    scored = score("mlp labels", tmp_path, swap=True)
    assert scored["swap"]["verdict"] == "bad batch" and scored["cause_first"]
    assert scored["swap"]["seconds"] > 0


def test_the_estimate_counts_the_states_and_batches_that_the_test_takes():
    distances = sorted({examine._FAR >> halved for halved in range(3)}, reverse=True)
    assert (*distances, 0) == evidence._BACK
    states, batches = len(distances) + 1, len(distances) + 2  # the suspect ones among them
    assert states * batches + swap._LATER * len(distances) == evidence._CELLS


def test_a_jump_that_cannot_be_replayed_is_named_as_such():
    (recording,) = open_recordings(sample()).values()
    findings = Findings([], {"evidence": {"swap_seconds": (1.0, 44)}})
    why = with_swap_test(recording, findings).attrs["swap"]["left_out"]
    assert why.startswith("step 44 cannot be replayed; allowed: one of 300-399") and "`step`" not in why


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (
            {"input_jump": 1.0, "forward_jump": 1.0, "update_before": 1.0},
            "inputs, activations and the update before it are ordinary, so its labels are the suspect",
        ),
        ({"forward_jump": 1.0}, "activations are ordinary, so its inputs or labels are the suspect"),
        ({"update_before": 1.0}, "the update before it is ordinary, so its inputs or labels are the suspect"),
        ({}, "at step 100: its inputs or labels are the suspect"),
    ],
)
def test_only_what_was_measured_of_a_batch_is_called_ordinary(measured, words):
    facts = {"loss_jump": 5.0, "event_step": 100.0, "back_at_once": 0.9} | measured
    causes = ranked_causes({name: (value, 100) for name, value in facts.items()})
    assert words in next(cause.words for cause in causes if cause.id == "bad_labels")


def test_of_token_ids_no_size_is_missed():
    facts = {"loss_jump": (5.0, 100)}
    assert any("values of the batches" in words for words in missing_measures(facts))
    assert not any(
        "values of the batches" in words for words in missing_measures(facts | {"embeds": (1.0, None)})
    )
