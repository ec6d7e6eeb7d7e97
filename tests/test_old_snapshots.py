"A slow failure still has a state from before it: a few old snapshots stay, at ever longer distances."

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stabilitylab.probe.recorder import Recorder
from stabilitylab.probe.retention import BoxLimits, RetainedFiles, thinned
from stabilitylab.replay.snapshot import replayable_steps


def _kept(limits, n_snapshots, first=0, pins=()):
    "Steps of the snapshots that a box of files without content keeps, after each one that is written."
    history = []

    class Box(RetainedFiles):
        def write(self):
            pass

    from pathlib import Path

    box = Box(Path("/nonexistent"), limits)
    for number in range(n_snapshots):
        step = first + number * limits.every
        entry = {"file": f"snapshot-{step}.pt", "step": step, "bytes": 1, "pinned": False}
        box.add("snapshots", entry)
        if number in pins:
            box.pin(step)
        history.append([row["step"] for row in sorted(box.index["snapshots"], key=lambda row: row["step"])])
    return history


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 50),
    st.integers(1, 4),
    st.integers(2, 6),
    st.integers(1, 400),
    st.sampled_from([0, 7, 10**6]),
)
def test_the_first_and_the_newest_stay_and_the_number_is_bounded(every, keep, old, n, first):
    limits = BoxLimits(every=every, keep=keep, old=old)
    for number, kept in enumerate(_kept(limits, n, first)):
        assert kept[0] == first and len(kept) <= keep + old
        assert kept[-keep:] == [first + every * i for i in range(max(0, number + 1 - keep), number + 1)]


@pytest.mark.parametrize("old", [3, 5])
def test_whenever_a_run_fails_some_state_lies_well_before_it(old):
    "For an onset at any share of the run, the nearest snapshot before it, as a share of the steps so far."
    limits, losses = BoxLimits(every=1, keep=2, old=old), []
    for now, kept in enumerate(_kept(limits, 600)):
        if now < 50:
            continue
        ages = now - np.array(kept)
        ratios = (ages[:-1] + 1) / (ages[1:] + 1)
        losses.append(ratios[: old - 1].max() / (now + 1) ** (1 / old))
    # one factor from age to age would be the root of the run's length; online thinning stays near it
    assert max(losses) < 4.0 and np.median(losses) < 2.0


def test_a_linear_rule_would_fail_this():
    "Keeping the newest alone loses every state from before a slow failure."
    logarithmic = thinned(list(range(1000)), 4, 1001)
    newest = list(range(996, 1000))
    ages = [1001 - step for step in logarithmic]
    assert logarithmic[0] == 0 and ages[0] / ages[-1] > 100
    assert 1001 - newest[0] < 10


def test_pinned_states_stay_beside_the_old_ones():
    limits = BoxLimits(every=10, keep=1, old=2, max_pinned=2)
    kept = _kept(limits, 60, pins={20, 40})[-1]
    assert {0, 200, 400, 590} <= set(kept) and len(kept) <= 1 + 2 + 2


@pytest.mark.slow
def test_a_record_of_a_slow_failure_replays_a_step_from_before_it(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(
        model, optimizer, tmp_path / "r", snapshot_every=2, keep_snapshots=2, old_snapshots=3
    ) as recorder:
        for _ in range(80):
            x = recorder.batch(torch.randn(8, 4))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    steps = replayable_steps(tmp_path / "r")
    early, middle = [step for step in steps if step < 20], [step for step in steps if 20 <= step < 76]
    assert steps[0] == 0 and early and middle and steps[-1] == 79
    box = sorted(int(path.stem.rpartition("-")[2]) for path in (tmp_path / "r").rglob("snapshot-*.pt"))
    assert box[0] == 0 and len(box) <= 5


def test_of_many_pinned_states_the_first_stays():
    "The first event tells how a failure began."
    limits = BoxLimits(every=10, keep=1, old=0, max_pinned=3)
    assert _kept(limits, 60, pins={7, 20, 30, 40, 50})[-1] == [70, 400, 500, 590]


def test_a_box_that_may_pin_nothing_pins_nothing():
    limits = BoxLimits(every=10, keep=1, old=1, max_pinned=0)
    assert 200 not in _kept(limits, 60, pins={20})[-1]
