"Alarms that nobody would act on are notes, with the reason; what needs a person stays an alarm."

import numpy as np
import pytest

from stabilitylab import compare_runs, diagnose
from stabilitylab.detect.diagnose import DETECTORS
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.likely_cause import fitted_to_cause
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

N = 1200


def run_of(loss, log_name="loss", step=None, **others):
    step = np.arange(len(loss)) if step is None else step
    made = make_scalars({name: Samples(step, v) for name, v in {"loss": loss, **others}.items()})
    made.loss.attrs["log_name"] = log_name
    return new_run(made)


def alarms(run):
    return [f.kind for f in diagnose(run) if f.severity != "info"]


def falling(seed=0, n=N, low=1.0, high=3.0, noise=0.02):
    rng = np.random.default_rng(seed)
    return low + (high - low) * np.exp(-np.arange(n) / 150) + rng.normal(0, noise, n)


def bump(value, at=700, width=12, height=1.0):
    value = value.copy()
    value[at : at + width] += height
    return value


def test_a_plain_spike_is_an_alarm():
    assert alarms(run_of(bump(falling()))) == ["loss_spike"]


@pytest.mark.parametrize("name", ["actor/pg_loss", "Critic_Loss", "loss_G", "td_loss"])
def test_losses_whose_goal_moves_are_notes(name):
    assert alarms(run_of(bump(falling()), name)) == []
    rising = falling(noise=0.05)[::-1].copy()
    assert alarms(run_of(rising, name)) == []
    assert alarms(run_of(rising)) != []


def test_a_policy_loss_whose_scatter_grows_is_an_alarm():
    rng = np.random.default_rng(0)
    scatter = np.where(np.arange(N) < 700, 0.2, 1.2)
    assert "loss_spike" in alarms(run_of(rng.normal(0, 1, N) * scatter, "act_loss"))


def test_a_preference_loss_is_a_likelihood():
    run = run_of(bump(falling()), "loss", reward_margin=falling(1), reward_chosen=falling(2))
    assert alarms(run) == ["loss_spike"]


@pytest.mark.parametrize("epochs", [6, 12])
def test_a_mean_that_begins_anew_is_quiet_and_a_real_rise_of_it_is_told(epochs):
    per = N // epochs
    rng, epoch = np.random.default_rng(epochs), np.repeat(np.arange(epochs), per)
    batch = 3 * np.exp(-epoch / 4) + 1 + rng.normal(0, 0.3, N)

    def running(x):
        return np.concatenate([np.cumsum(part) / np.arange(1, per + 1) for part in np.split(x, epochs)])

    assert alarms(run_of(running(batch), "Loss", epoch=epoch.astype(float))) == []
    worse = batch + 4.0 * (epoch == epochs - 2)
    assert "loss_spike" in alarms(run_of(running(worse), "Loss", epoch=epoch.astype(float)))


def test_means_that_the_reader_marked_are_quiet():
    rng, per = np.random.default_rng(3), 150
    batch = 2 + 2 * np.exp(-np.arange(N) / 400) + rng.normal(0, 0.3, N)
    running = np.concatenate([np.cumsum(part) / np.arange(1, per + 1) for part in np.split(batch, N // per)])
    running[per * 4] += 0.5
    run = run_of(running)
    assert "loss_spike" in alarms(run)
    run["scalars"].attrs["running_means"] = {"loss": list(range(per, N, per))}
    assert alarms(run) == []


def test_next_to_nothing_is_a_note_and_a_return_to_the_start_is_not():
    tiny = 6 * np.exp(-np.arange(N) / 60) + 0.0005 * np.exp(np.random.default_rng(0).normal(0, 0.1, N))
    assert alarms(run_of(bump(tiny, height=0.004))) == []
    assert alarms(run_of(bump(tiny, height=5.0))) == ["loss_spike"]


def test_a_resumed_log_that_lost_its_loss_is_one_alarm_and_one_high_record_is_none():
    # an independent reading of a public log of this form calls it a broken resume
    loss = 13.5 + np.random.default_rng(0).normal(0, 0.4, 300)
    loss[0] = 1.4
    step = 47_700 + 10 * np.arange(300)
    lr = np.linspace(1e-4, 2e-4, 300)
    assert alarms(run_of(loss, step=step, lr=lr)) == ["resume_spike"]
    loss = 1.4 + np.random.default_rng(0).normal(0, 0.04, 300)
    loss[1] = 2.0
    assert alarms(run_of(loss, step=step, lr=lr)) == []


def test_fresh_runs_in_one_log_are_no_spikes():
    first, second = falling(0, 400), falling(1, 400) * 0.95
    log = Samples(np.r_[np.arange(400), np.arange(400)], np.r_[first, second])
    run = new_run(make_scalars({"loss": log}))
    assert not [f for f in diagnose(run) if f.kind in ("loss_spike", "resume_spike") and f.severity != "info"]


def test_what_is_maximised_is_a_note_and_a_loss_that_is_lost_is_not():
    i, noise = np.arange(400), np.random.default_rng(0).normal(0, 0.2, 400)
    assert alarms(run_of(8 + 75 * (1 - np.exp(-i / 200)) + noise)) == []
    lost = np.where(i < 60, 8 - i / 15, 4 + 9 * (1 - np.exp(-(i - 60) / 10))) + noise
    assert "divergence" in alarms(run_of(lost))


def test_a_counter_that_begins_anew_is_no_resume_and_one_that_goes_back_a_little_is():
    rng, i = np.random.default_rng(0), np.arange(600)
    loss = 2 + np.exp(-np.arange(1000) / 400) + rng.normal(0, 0.01, 1000)
    loss[600:620] += 0.5
    for first, told in ((0, []), (400, ["resume_spike"])):
        steps = np.r_[i, first + np.arange(400)]
        assert alarms(new_run(make_scalars({"loss": Samples(steps, loss)}))) == told


def test_a_sum_above_all_nats_that_drifts_is_a_note_and_one_that_is_lost_is_not():
    rng, i = np.random.default_rng(0), np.arange(400)
    base = 95 + 80 * np.exp(-i / 60) + rng.normal(0, 2, 400)
    assert alarms(run_of(base + 14 * np.clip((i - 320) / 40, 0, 1))) == []
    assert "divergence" in alarms(run_of(base + 60 * np.clip((i - 320) / 40, 0, 1)))


def test_every_lowered_alarm_says_why():
    for run in (run_of(bump(falling()), "critic_loss"), run_of(bump(falling()), "loss_D")):
        (note,) = diagnose(run).of("loss_spike")
        assert note.severity == "info" and "does not measure success" in note.explanation


def test_shared_spikes_of_gradient_norms_and_no_more_by_chance():
    def norms(seed, at):
        norm = np.exp(0.1 * np.clip(np.random.default_rng(seed).normal(0, 1, 20_000), -3, 3))
        norm[at] *= 5
        return new_run(make_scalars({"grad_norm": Samples(np.arange(20_000), norm)}))

    rng = np.random.default_rng(0)
    places = np.sort(rng.choice(np.arange(200, 20_000, 40), 58, replace=False))
    a, b = np.r_[places[:8], places[8:29]], np.r_[places[:8], places[29:58]]  # 29 and 37, 8 in common
    runs = {"a": norms(1, np.sort(a)), "b": norms(2, np.sort(b))}
    (found,) = compare_runs(runs)
    assert found.series == "grad_norm" and found.evidence["count"] == 8 and found.evidence["p_value"] < 1e-8
    assert found.evidence["spikes_of_each"] == [29, 37] and "a and b" in found.explanation
    others = [norms(seed, rng.choice(np.arange(200, 20_000), 33, replace=False)) for seed in range(3, 15)]
    assert len(compare_runs(others)) == 0


def test_many_runs_that_share_are_one_finding_that_names_them():
    at = [400, 900, 1500, 2100, 2700]

    def spiky(seed):
        rng = np.random.default_rng(seed)
        loss = 3 - np.arange(3000) / 3000 + rng.normal(0, 0.02, 3000)
        loss[at] += 0.5
        return run_of(loss)

    (found,) = compare_runs({f"run{i}": spiky(i) for i in range(6)})
    assert found.evidence["runs"] == 6 and found.evidence["steps"] == at
    assert "run0, run1, run2, run3 and 2 more" in found.explanation


@pytest.mark.parametrize(
    ("norm", "share", "named"), [(1e-9, 0.0, []), (1e-9, 1.0, ["b.k.weight"]), (1e-3, 0.0, ["b.k.bias"])]
)
def test_a_bias_whose_gradient_is_rounding_is_not_said_to_be_below_epsilon(norm, share, named):
    import xarray as xr

    from stabilitylab.detect.layers.parameters import find_grad_below_epsilon

    labels = {
        "step": np.arange(9),
        "param": ["b.k.weight", "b.k.bias"],
        "kind": ("param", ["attn.k", "attn.k"]),
        "layer": ("param", [0, 0]),
    }

    def table(name, of_weight, of_bias):
        "A variable of the weight and of the bias, the same at every step."
        values = np.tile([of_weight, of_bias], (9, 1))
        units = {"long_name": "made", "units": "1"}
        return xr.Dataset({name: (("step", "param"), values, units)}, coords=labels)

    groups = {"optimizer": table("below_eps_frac", share, 1.0), "gradients": table("grad_norm", 1.0, norm)}
    findings = find_grad_below_epsilon(new_run(**groups))
    assert [list(finding.modules) for finding in findings] == [named] * bool(named)


def test_the_rules_of_a_record_are_among_the_detectors():
    rules = {"find_first_non_finite", "find_without_optimizer", "find_large_steps"}
    assert rules <= {name.split(":")[1] for name in DETECTORS}


def test_a_mean_that_begins_anew_in_every_fold_is_quiet():
    "The steps of every fold begin at 0 again; the first record of an epoch is no jump."
    rng = np.random.default_rng(2)
    records, step, begins = [], [], []
    for _fold in range(4):
        for epoch in range(12):
            mean = np.cumsum(rng.normal(0.6 - 0.01 * epoch, 0.05, 40)) / np.arange(1, 41)
            records.append(mean)
            step.append(40 * epoch + np.arange(40))
            begins.append(40 * epoch)
    records[30][0] += 0.3
    run = run_of(np.concatenate(records), step=np.concatenate(step))
    run["scalars"].attrs["running_means"] = {"loss": begins[1:]}
    assert alarms(run) == []
    records[30] += 0.3  # the epoch as a whole is high
    raised = run_of(np.concatenate(records), step=np.concatenate(step))
    raised["scalars"].attrs["running_means"] = {"loss": begins[1:]}
    assert "loss_spike" in alarms(raised)


def shifts(rise, noise, seed):
    "The level shifts told of a loss with an additional `rise`."
    rng = np.random.default_rng(seed)
    loss = np.linspace(1.0, 0.9, len(rise)) + rise + rng.normal(0, noise, len(rise))
    validation = Samples(np.arange(0, len(rise), 200), np.full(len(rise) // 200, 0.9))
    made = make_scalars({"loss": Samples(np.arange(len(rise)), loss), "val_loss": validation})
    return [f for f in diagnose(new_run(made)) if f.kind == "level_shift"]


@pytest.mark.parametrize("seed", range(4))
def test_a_shift_is_told_from_a_slow_rise_in_noise(seed):
    n = 12_000
    slow = 0.2 * np.clip((np.arange(n) - 6000) / 800, 0, 1)
    abrupt = 0.2 * (np.arange(n) >= 6000)
    assert shifts(slow, 0.15, seed) == shifts(slow, 0.05, seed) == []
    (found,) = shifts(abrupt, 0.05, seed)
    assert found.severity == "warning" and abs(found.onset - 6000) < 300


def test_a_restart_of_another_attempt_is_no_jump():
    "One attempt stood at 6.7, another at 1.7; what begins at 6.5 and stays goes on from the first."
    rng = np.random.default_rng(0)
    first, low = np.linspace(7.5, 6.7, 10), 1.7 + rng.normal(0, 0.02, 60)
    again, last = np.linspace(6.5, 4.5, 20), 1.7 + rng.normal(0, 0.02, 60)
    step = np.concatenate([np.arange(10), np.arange(60), np.arange(30, 50), np.arange(10, 70)])
    (note,) = [
        f
        for f in diagnose(run_of(np.r_[first, low, again, last], step=step))
        if f.kind in ("loss_spike", "resume_spike") and f.onset == 30
    ]
    assert note.severity == "info" and "attempt" in note.evidence["note"]
    healed = np.r_[
        np.linspace(6.5, 4.5, 4), 1.7 + rng.normal(0, 0.02, 26)
    ]  # it comes down: a jump of this run
    step = np.concatenate([np.arange(10), np.arange(60), np.arange(30, 60), np.arange(60, 120)])
    jump = [
        f for f in diagnose(run_of(np.r_[first, low, healed, last], step=step)) if f.kind == "resume_spike"
    ]
    assert {f.severity for f in jump} == {"warning"}


def test_a_record_below_the_beginning_soon_after_it_is_a_note():
    loss = falling(noise=0.01)
    soon, later = loss.copy(), loss.copy()
    soon[100] += 0.6
    later[700] += 0.6
    assert alarms(run_of(soon)) == []
    assert alarms(run_of(later)) == ["loss_spike"]


def test_the_end_of_a_tail_of_single_records_is_a_note_and_what_stands_out_of_it_is_not():
    rng, n = np.random.default_rng(0), 20_000
    loss = np.linspace(2.8, 2.3, n) + 0.1 * rng.normal(0, 1, n)
    places = np.arange(400, n - 400, 400)
    loss[places] += np.linspace(0.3, 1.05, len(places))  # a batch now and then, up to ten deviations
    assert alarms(run_of(loss)) == []
    loss[10_050] += 4.0
    assert alarms(run_of(loss)) == ["loss_spike"]
    plain = np.linspace(2.8, 2.3, n) + 0.1 * rng.normal(0, 1, n)
    plain[10_050] += 1.3
    assert alarms(run_of(plain)) == ["loss_spike"]


@pytest.mark.parametrize(("rising", "at", "n"), [(False, 100, 1), (True, 100, 2), (False, 70, 2)])
def test_a_rate_that_only_was_high_when_a_bad_batch_came_is_no_finding(rising, at, n):
    facts = {
        "loss_jump": (5.0, 100),
        "event_step": (100.0, 100),
        "back_at_once": (0.9, 103),
        "grad_before": (1.1, 99),
        "input_jump": (300.0, 100),
        "update_before": (1.0, 99),
    }
    rise = Finding("loss_spike", "error", 100, explanation="The loss jumped.")
    rate = Finding("lr_too_high", "warning", at, evidence={"rising": rising, "lr_at_onset": 0.005})
    assert len(fitted_to_cause(Findings([rise, rate], {"evidence": facts}))) == n
    assert len(fitted_to_cause(Findings([rise, rate], {"evidence": {}}))) == 2
