"Sentences that were wrong of programs seen for the first time: one test a class."

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from stabilitylab.cases.registry import sample
from stabilitylab.detect.findings import Finding, Findings, evidence_words, explain
from stabilitylab.detect.layers.parameters import not_shown
from stabilitylab.detect.likely_cause import _is_older, most_likely, ranked_causes
from stabilitylab.detect.settings import loss_after_jump
from stabilitylab.investigation.opening import _why_none
from stabilitylab.names.errors import InputError
from stabilitylab.replay.faults import FAULTS
from stabilitylab.replay.rounded_step import step_precision
from stabilitylab.replay.swap_table import _highest_words, decide
from stabilitylab.report.terminal import run_text
from tests.test_detect_decisions import run_of


@pytest.mark.parametrize(("count", "words"), [(1, "at step 25"), (3, "from step 25 on")])
def test_a_single_value_that_is_no_number_is_dated_at_its_step(count, words):
    evidence = {"count": count, "of": 40}
    finding = Finding("non_finite", "warning", 25, end=25, series="loss", evidence=evidence)
    assert explain(finding).startswith(f"{count} of 40 values of loss") and words in explain(finding)


@pytest.mark.parametrize(
    ("last", "count", "is_told"),
    [(3.13, 4, True), (2.6, 4, False), (3.13, 3, True), (3.13, 2, False), (2.70, 3, False)],
)
def test_a_batch_whose_loss_is_highest_from_every_state_is_not_like_the_others(last, count, is_told):
    others = np.array([[2.575, 2.552, 2.526, 2.621], [2.522, 2.491, 2.445, 2.56]])[:, :count]
    loss = np.column_stack([others, [last, last]])  # two others have no range to speak of
    words = _highest_words(xr.Dataset({"loss": (("state", "batch"), loss)}))
    assert ("highest loss from every state" in words) == is_told


@pytest.mark.parametrize(("first", "is_cause"), [(0.085, False), (1.02, True)])
def test_a_task_is_trivial_only_where_the_loss_began_as_a_cross_entropy_does(first, is_cause):
    facts = {"embeds": (1.0, None), "end_over_chance": (0.01, 45), "first_over_chance": (first, 0)}
    assert ("wrong_mask" in [cause.id for cause in ranked_causes(facts)]) == is_cause


@pytest.mark.parametrize(("rise", "is_older"), [(42, True), (0, False)])
def test_a_lack_from_the_start_is_no_cause_of_a_later_rise(rise, is_older):
    lack = Finding("no_gradient", "warning", 0, modules=("eps",))
    assert _is_older(lack, [lack, Finding("divergence", "info", rise, end=49)]) == is_older


@pytest.mark.parametrize(("spike", "blames_batches"), [(26, False), (3, True)])
def test_a_single_record_after_a_jump_of_the_rate_is_no_sign_of_a_batch(spike, blames_batches):
    jump = Finding("lr_jump", "warning", 25)
    evidence = {"steps": [spike], "note": evidence_words("bad batches")}
    run = run_of(loss=np.ones(60), lr=np.where(np.arange(60) < 25, 1e-3, 3e-2))
    _, single = loss_after_jump(run, [jump, Finding("loss_spike", "info", spike, evidence=evidence)])
    assert ("note" in single.evidence) == blames_batches


PROGRAM = """
from dataclasses import replace
import torch
from stabilitylab.cases.registry import sample
from stabilitylab.replay.setup_file import setup_of

def constant(model, batch):
    return torch.ones(1)

def left_open(model, batch):
    return model(batch["tokens"]).mean() / accelerator.num_processes

def of_constant():
    return replace(setup_of(sample("lm_high_lr")), loss=constant)

def of_left_open():
    return replace(setup_of(sample("lm_high_lr")), loss=left_open)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "words"), [("of_constant", "depends on no parameter"), ("of_left_open", "'accelerator' is not")]
)
def test_a_loss_that_no_parameter_reaches_and_a_draft_left_open_are_told_as_such(tmp_path, setup, words):
    (tmp_path / "program.py").write_text(PROGRAM)
    with pytest.raises(InputError, match=words):
        step_precision(sample("lm_high_lr"), 337, f"{tmp_path / 'program.py'}:{setup}")


def test_a_record_whose_batches_could_not_be_kept_says_why():
    box = SimpleNamespace(lost={0: "a batch holds objects"})
    assert "a batch holds objects" in _why_none(SimpleNamespace(box=lambda: box))
    box.lost = {}
    assert _why_none(SimpleNamespace(box=lambda: box)) == "it holds none"


def test_a_model_in_another_mode_may_also_be_one_without_dropout():
    assert "set dropout to 0" in FAULTS["mode"].format(words="evaluation")


def shrinking(*findings):
    "Findings of a run whose weights shrank, as the record itself shows."
    return Findings(list(findings), attrs={"evidence": {"halved_in": (14.0, 14)}})


def test_a_slow_machine_is_no_evidence_of_a_cause_and_is_not_explained_beside_one():
    slow, small = Finding("throughput_drop", "warning", 24), Finding("grad_below_epsilon", "warning", 3)
    jump = Finding("grad_norm_explosion", "warning", 10)
    likely = most_likely(shrinking(slow))
    assert likely.id == "weights_shrink" and not likely.because
    assert "stabilitylab explain" not in run_text(run_of([2.0, 1.9]), shrinking(slow))
    text = run_text(run_of([2.0, 1.9]), shrinking(slow, small, jump))
    assert "stabilitylab explain grad_norm_explosion" in text


@pytest.mark.parametrize(("scale", "verdict"), [(1e-9, "neither"), (1.0, "bad state")])
def test_gradients_that_cancel_to_rounding_make_no_bad_state(scale, verdict):
    "Every second batch has a gradient next to none, and the last state more of it."
    norms = np.array([[scale, 1.0, scale, 1.0, 1.0]] * 3 + [[11 * scale, 1.0, 15 * scale, 1.0, 1.0]])
    table = {"grad_norm": norms, "loss": np.ones((4, 5)), "update_norm": np.ones((4, 5))}
    assert decide(table, 2.0)[0] == verdict


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        ("conv1", "loss", 0),
        ("blocks.0.attn", "loss", 1),
        ("conv1", "perplexity", 0),
        ("conv1", "grad_norm", 1),
    ],
)
def test_what_a_record_cannot_show_is_what_its_model_and_loop_have(module, name, count):
    run = run_of(**{name: [1.0] * 3})
    coordinates = {"step": np.arange(3), "module": [module], "kind": ("module", ["other"])}
    rms = {"rms": (("step", "module"), np.ones((3, 1)))}
    ratio = {"update_ratio": (("step", "param"), np.ones((3, 1)))}
    run["activations"] = xr.DataTree(xr.Dataset(rms, coordinates))
    run["updates"] = xr.DataTree(xr.Dataset(ratio, {"step": np.arange(3), "param": ["w"]}))
    assert len(not_shown(run)) == count + 1  # samples always
    assert any("no loss was recorded" in phrase for phrase in not_shown(run)) is (name == "grad_norm")
