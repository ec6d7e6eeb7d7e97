"Where a trial starts, and what it skips, when the data are the cause."

from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.investigation import plan
from stabilitylab.investigation.plan import _early_end, _first_step, _late_start, aimed
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.trial.suggest import Suggestion, _evidence_of, unsuited

NEEDS = [
    (["norm", "other"], "rms_norm", True),
    (["norm", "other"], "normformer", False),
    (["norm", "block"], "normformer", True),
    (["norm", "block"], "qk_norm", False),
    (["attn.q", "block"], "qk_norm", True),
]


def run(starts=(0, 60, 100), steps=(*range(20), *range(60, 80), *range(100, 160))):
    "A recording with these snapshots and batches."
    box = SimpleNamespace(starts=list(starts), steps=list(steps))
    before = lambda onset: max((s for s in starts if s < onset), default=starts[0])  # noqa: E731
    return SimpleNamespace(box=lambda: box, snapshot_before=before, run=None)


def cause(family="data", step=100):
    "A cause of a family at a step."
    return SimpleNamespace(family=family, step=step)


@pytest.mark.parametrize(
    ("family", "step", "starts", "first"),
    [
        ("data", 100, (0, 60, 100), 100),
        ("data", 101, (0, 60, 100), 100),
        ("data", 100, (0, 60), 60),
        ("rate", 100, (0, 60, 100), 60),
    ],
)
def test_a_trial_of_bad_data_starts_right_before_the_bad_batch(family, step, starts, first):
    assert _first_step(run(starts), step, cause(family, step)) == first
    assert _first_step(run(starts), step, None) in (60, 100)


def test_a_bad_batch_that_is_the_last_one_kept_is_no_start():
    last = run(starts=(0, 60, 100), steps=(*range(60, 80), 100))
    assert _first_step(last, 100, cause()) == 60


def test_a_snapshot_whose_batch_was_not_kept_is_no_start():
    assert _first_step(run(steps=range(60, 80)), 100, cause()) == 60


@pytest.mark.parametrize(
    ("start", "swap", "kind", "skipped"),
    [
        (100, {"bad_in_a_row": 3}, "loss_spike", {"count": 3, "after": 0}),
        (60, {"bad_in_a_row": 3}, "loss_spike", {"count": 3, "after": 40}),
        (101, {"bad_in_a_row": 3}, "loss_spike", {"count": 2, "after": 0}),
        (100, {}, "loss_spike", {"count": 8, "after": 0}),
        (100, {}, "divergence", {"count": 1, "after": 0}),
        (103, {"bad_in_a_row": 3}, "loss_spike", {}),  # they lie behind
    ],
)
def test_the_batches_that_are_bad_are_skipped_and_no_others(monkeypatch, start, swap, kind, skipped):
    monkeypatch.setattr(plan, "cause_of", lambda findings, run: cause())
    found = Findings([Finding(kind, "warning", onset=100, end=107)], {"swap": swap})
    skip = aimed(Suggestion("skip_batches", 1.0, []), found, run(), start)
    assert skip.parameters == skipped
    clip = Suggestion("clip_norm", 1.0, [])
    assert aimed(clip, found, run(), start) == clip


@pytest.mark.parametrize(
    ("step", "onset", "in_data", "is_late"),
    [
        (60, 100, False, False),
        (100, 100, False, True),
        (100, 100, True, False),
        (120, 100, True, True),
        (0, 0, False, False),
        (100, None, False, False),
    ],
)
def test_a_start_is_late_only_where_the_state_is_bad_already(step, onset, in_data, is_late):
    assert bool(_late_start(step, onset, in_data)) == is_late


@pytest.mark.parametrize(
    ("excess", "early", "factor", "words"),
    [
        (0.5, 0.2, None, ""),
        (15.0, 0.0, 0.033, "15 times the largest usual: they go to half"),
        (15.0, 0.1, 0.033, "15 times the largest usual: they go to half"),
        (2.5, 0.34, 0.029, "the first steps go from 0.34 to 0.01 times the weights after them"),
    ],
)
def test_a_rate_far_beyond_the_usual_is_lowered_to_a_usual_one(excess, early, factor, words):
    facts = {"rate_excess": (excess, 4), "early_update": (early, 4)}
    rate = {"loss": Samples(np.arange(9), np.full(9, 2.0)), "lr": Samples(np.arange(9), np.full(9, 0.1))}
    for severity in ("info", "error")[: 1 + (early > 0.25)]:  # an error shows itself at which rate it began
        findings = Findings([Finding("divergence", severity, 4, 8)], {"evidence": facts})
        in_run = _evidence_of("lower_lr", findings, new_run(make_scalars(rate)))
        assert in_run.parameters.get("factor") == factor and words in in_run.reason


@pytest.mark.parametrize(("kinds", "name", "is_fit"), NEEDS)
def test_a_fix_needs_the_modules_that_it_changes(kinds, name, is_fit):
    coordinates = {"step": [0, 1], "module": [f"m{i}" for i in range(len(kinds))], "kind": ("module", kinds)}
    run = new_run()
    run["activations"] = xr.DataTree(
        xr.Dataset({"absmax": (("step", "module"), np.ones((2, len(kinds))))}, coordinates)
    )
    assert (not unsuited(name, {}, run)) == is_fit


@pytest.mark.parametrize(("length", "words"), [(40, "--steps 41 or more reach it"), (41, "")])
def test_arms_that_end_before_the_failure_say_so(length, words):
    failure = Findings([Finding("loss_spike", "warning", 100, 110)])
    notes = _early_end(SimpleNamespace(step=60), failure, length)
    assert words in "".join(notes) and bool(words) == bool(notes)
