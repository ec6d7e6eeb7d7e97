"Losses of strangers: folds without steps, heavy tails, lone batches, adversaries, too much noise."

import numpy as np
import pytest

from stabilitylab import diagnose
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars


def run_of(loss, **others):
    series = {"loss": loss, **others}
    return new_run(make_scalars({name: Samples(np.arange(len(v)), v) for name, v in series.items()}))


def alarms(run):
    return [f.kind for f in diagnose(run) if f.severity != "info"]


def fold(n, rng, tau=20.0):
    return 0.34 + 0.42 * np.exp(-np.arange(n) / tau) + rng.normal(0, 0.003, n)


@pytest.mark.parametrize("lengths", [[500] * 10, [130, 190, 240], [400, 160]])
def test_folds_without_steps_are_one_note(lengths):
    rng = np.random.default_rng(len(lengths))
    found = diagnose(run_of(np.concatenate([fold(n, rng) for n in lengths])))
    assert [f.kind for f in found if f.severity != "info"] == []
    (told,) = [f for f in found if f.kind == "restart"]
    assert told.evidence["steps"] == np.cumsum(lengths)[:-1].tolist()
    assert "more run" in told.explanation and "folds" in told.explanation


def test_a_collapse_to_the_start_that_does_not_fall_as_the_start_did_is_an_alarm():
    rng = np.random.default_rng(1)
    loss = np.r_[fold(600, rng), 0.34 + 0.42 * np.exp(-np.arange(600) / 300)]
    assert set(alarms(run_of(loss))) & {"loss_spike", "divergence", "slow_rise"}
    stays = np.r_[fold(600, rng), 0.76 + rng.normal(0, 0.003, 600)]
    assert "divergence" in alarms(run_of(stays))


@pytest.mark.parametrize("scatter", [0.1, 0.3])
def test_a_heavy_tail_is_no_spike_and_a_spike_above_it_is(scatter):
    rng = np.random.default_rng(2)
    loss = 0.3 + 2 * np.exp(-np.arange(6000) / 900)
    loss = loss * np.exp(rng.normal(0, scatter, 6000))
    assert alarms(run_of(loss)) == []
    spiked = loss.copy()
    spiked[4000:4012] *= 40
    assert "loss_spike" in alarms(run_of(spiked))


def test_one_batch_in_a_memorised_set_is_a_note():
    rng = np.random.default_rng(3)
    loss = 1.5 * np.exp(-np.arange(250) / 12) + np.abs(rng.normal(0, 1e-4, 250))
    loss[178], loss[197] = 0.036, 0.074
    assert alarms(run_of(loss)) == []
    loss[197:204] = 1.2
    assert "loss_spike" in alarms(run_of(loss))


def test_nan_in_many_series_at_once_is_one_finding_that_begins_with_the_loss():
    lost = 2 + np.exp(-np.arange(100) / 20)
    lost[60:] = np.nan
    parts = {f"layer_{i}_loss": lost for i in range(12)}
    late = lost.copy()
    late[60:80] = 2.0
    found = [f for f in diagnose(run_of(lost, **parts, val_loss=late)) if f.kind == "non_finite"]
    assert [(f.onset, f.series) for f in found] == [(60, "loss"), (80, "val_loss")]
    assert found[0].severity == "error" and found[0].evidence["others"] == 12
    assert "12 more series are so too" in found[0].explanation


def test_a_loss_beside_an_adversary_is_quiet_until_it_runs_away():
    rng = np.random.default_rng(4)
    loss = 3 + 2 * np.exp(-np.arange(800) / 60) + rng.normal(0, 0.05, 800)
    loss[500:520] += 2
    assert alarms(run_of(loss)) == ["loss_spike"]
    beside = {"d_adv_loss": loss * 0.2, "rec_loss": loss * 0.5}
    assert alarms(run_of(loss, **beside)) == []
    loss[600:700] = 300.0
    assert alarms(run_of(loss, **beside)) == ["loss_spike"]


def test_what_noise_hides_is_not_said_to_have_failed():
    rng = np.random.default_rng(5)
    flat = 2.3 + rng.normal(0, 0.02, 400)
    assert alarms(run_of(flat)) == ["not_learning"]
    assert alarms(run_of(0.45 + rng.normal(0, 0.25, 400).clip(-0.4))) == []
    assert alarms(run_of(np.full(400, -1.0))) == [] and alarms(run_of(np.full(400, 2.3))) == ["not_learning"]
    at_once = 1 + rng.normal(0, 0.12, 160)
    at_once[0] = 16.3
    assert alarms(run_of(at_once)) == []


def test_one_high_record_of_a_coarse_log_came_back_at_once():
    rng = np.random.default_rng(6)
    step = 1000 * np.arange(400)
    loss = 2 + np.exp(-np.arange(400) / 60) + rng.normal(0, 0.01, 400)
    loss[300] = 4.0
    run = new_run(make_scalars({"loss": Samples(step, loss)}))
    (spike,) = [f for f in diagnose(run) if f.kind == "loss_spike"]
    assert spike.severity == "warning" and spike.evidence["recovery"] == "fast"


def test_many_runs_and_many_slow_stretches_are_told_once():
    rng = np.random.default_rng(7)
    step = np.tile(np.arange(200), 6)
    runs = np.concatenate([fold(200, rng) for _ in range(6)])
    found = diagnose(new_run(make_scalars({"loss": Samples(step, runs)})))
    assert [f.evidence for f in found if f.kind == "restart"] == [{"count": 5}]
    time = np.full(6000, 1.0) + rng.normal(0, 0.01, 6000)
    for first in range(800, 6000, 1000):
        time[first : first + 60] = 3.0
    (slow,) = [f for f in diagnose(run_of(fold(6000, rng), step_time=time)) if f.kind == "throughput_drop"]
    assert slow.evidence["count"] == 6 and "6 such stretches" in slow.explanation


def test_what_nobody_has_to_act_on_has_no_remedies():
    rng = np.random.default_rng(8)
    loss = fold(3000, rng)
    loss[[700, 1500, 2100]] += 0.06
    (note,) = [f for f in diagnose(run_of(loss)) if f.kind == "loss_spike"]
    assert note.severity == "info" and "from one batch" in note.explanation and note.remedies == ()
    loss[2500:2540] += 0.5
    alarm = next(f for f in diagnose(run_of(loss)) if f.severity != "info")
    assert alarm.kind == "loss_spike" and alarm.remedies
