"""Conditions of the detectors that made failures do not reach: a small series each, whose answer is known.

Each test holds one decision: what a rule asks besides its limit. `make mutants` turns such conditions round.
"""

import numpy as np
import pytest
import xarray as xr

from stabilitylab.detect.cross_run import compare_runs
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.layers.activations import typical_magnitude
from stabilitylab.detect.layers.growth import sustained_growth
from stabilitylab.detect.layers.parameters import find_grad_below_epsilon, find_lost_updates
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.detect.loss.components import component_losses
from stabilitylab.detect.loss.divergence import find_divergence
from stabilitylab.detect.loss.spike_rules import RULES
from stabilitylab.detect.loss.spikes import find_loss_spikes
from stabilitylab.detect.loss.trend import find_level_shift, find_not_learning
from stabilitylab.detect.metrics import find_quantized_loss, find_throughput_drop
from stabilitylab.detect.policy import policy_series
from stabilitylab.detect.restarts import find_broken_resume, find_changed_settings
from stabilitylab.detect.settings import find_lr_jump
from stabilitylab.detect.speed import find_creeping_steps, find_hang
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

rng = np.random.default_rng


def run_of(restarts=(), **series):
    "A record of series with steps 0, 1, 2, ...; None where a value was not logged."
    samples = {}
    for name, value in series.items():
        value = np.asarray(value, float)
        samples[name] = Samples(np.arange(len(value)), value)
    return new_run(make_scalars(samples, restarts=np.array(restarts, np.int64)))


def noisy(level, n=None, sd=0.01, seed=0):
    "A level, or a curve of levels, with Gaussian noise."
    level = np.full(n, float(level)) if n else np.asarray(level, float)
    return level + sd * rng(seed).normal(size=len(level))


def test_an_early_bump_of_many_records_is_a_spike_although_the_run_began_higher():
    loss = noisy(np.concatenate([np.full(10, 6.0), np.full(190, 3.0)]))
    loss[60:85] += 2  # below the start, within the first history, but no record or two
    long_bump = find_loss_spikes(run_of(loss=loss))
    loss[61:85] -= 2
    one_record = find_loss_spikes(run_of(loss=loss))
    assert [f.severity for f in long_bump if f.onset == 60] == ["warning"]
    assert not [f for f in one_record if f.severity != "info"]


def test_a_small_bump_is_a_note_only_where_it_came_back():
    returned = noisy(3, 400, sd=0.02)
    returned[300:310] += 0.3
    stayed = noisy(3, 400, sd=0.02)
    stayed[300:] += 0.3
    for loss, severity in ((returned, "info"), (stayed, "error")):
        assert [f.severity for f in find_loss_spikes(run_of(loss=loss)) if f.onset == 300] == [severity]


def test_a_rise_of_its_last_records_alone_is_no_divergence():
    loss = noisy(np.linspace(4, 2, 300))
    loss[-2:] += 2
    assert not [f for f in find_divergence(run_of(loss=loss)) if f.severity != "info"]


def test_a_lone_record_is_told_from_a_pair_of_records_of_the_same_height():
    heavy = 2 + 0.1 * rng(3).standard_t(2.2, size=600).clip(-3, 9)
    lone = heavy.copy()
    lone[500] = lone[:500].max() * 0.98
    assert not [f for f in find_loss_spikes(run_of(loss=lone)) if f.onset == 500 and "note" not in f.evidence]


def test_kl_and_entropy_without_a_reward_are_no_policy():
    series = {"kl": noisy(0.5, 80), "entropy": noisy(2, 80), "loss": noisy(3, 80)}
    assert policy_series(run_of(**series)) == {}
    assert set(policy_series(run_of(reward=noisy(1, 80), **series))) >= {"reward", "entropy"}


def test_the_rule_of_the_median_deviation_flags_what_lies_above_and_nothing_below():
    loss = noisy(3, 300, sd=0.02)
    loss[200], loss[250] = 4.0, 2.0
    flags = RULES["mad"].flags(loss)
    assert flags[200] and not flags[250]


@pytest.mark.parametrize("since", [4, 16])
def test_lost_updates_are_dated_from_the_first_step_at_which_most_were_lost(since):
    steps = np.arange(40)
    lost = np.where(steps[:, None] >= since, 0.9, 0.1) * np.ones(2)
    coords = {
        "step": steps,
        "param": ["a", "b"],
        "kind": ("param", ["mlp", "mlp"]),
        "layer": ("param", [0, 1]),
    }
    units = {"long_name": "made", "units": "1"}
    run = new_run(sampled_updates=xr.Dataset({"lost_frac": (("step", "param"), lost, units)}, coords))
    run.attrs["dtypes"] = {"a": "bfloat16", "b": "bfloat16"}
    (finding,) = find_lost_updates(run)
    assert finding.onset == since


def test_the_typical_magnitude_is_the_binade_of_the_median_entry():
    share = np.zeros(254)
    share[126 - 3], share[126 + 2], share[126 + 5] = 0.3, 0.4, 0.3  # 2^-3, 2^2 (holds the median), 2^5
    exponents = xr.DataArray(share, dims="exponent", coords={"exponent": np.arange(-126, 128)})
    assert float(typical_magnitude(exponents)) == pytest.approx(2**2.5)


@pytest.mark.parametrize(("end", "kinds"), [(2.32, ["not_learning"]), (1.6, [])])
def test_a_loss_that_rises_and_only_comes_back_to_the_untrained_one_has_learned_nothing(end, kinds):
    rise = 0.8 * np.exp(-np.arange(240) / 20) * (np.arange(240) > 0)
    loss = noisy(0, 240, sd=0.03) + np.linspace(2.38, end, 240) + rise
    found = find_not_learning(run_of(loss=loss))
    assert [f.kind for f in found if f.kind == "not_learning"] == kinds
    assert all(f.evidence["first"] == loss[0] for f in found)
    # where a log begins later, its first record is not that of an untrained model
    late = find_not_learning(new_run(make_scalars({"loss": Samples(np.arange(2, 242), loss)})))
    assert "not_learning" not in {f.kind for f in late}


@pytest.mark.parametrize(("level", "is_guess"), [(0.69, True), (1.39, True), (1.1, False), (6.0, False)])
def test_a_loss_that_rests_at_a_guess_between_two_classes_may_be_that_of_a_discriminator(level, is_guess):
    (finding,) = find_not_learning(run_of(loss=noisy(level, 200, sd=0.005)))
    assert ("discriminator" in finding.evidence.get("note", "")) == is_guess


def test_a_flat_loss_is_a_warning_where_the_noise_allows_it_and_a_note_else():
    calm = find_not_learning(run_of(loss=noisy(6, 200, sd=0.05)))
    wild = find_not_learning(run_of(loss=noisy(6, 40, sd=3.0)))
    assert [f.severity for f in calm] == ["warning"]
    assert all(f.severity == "info" and "note" in f.evidence for f in wild)


@pytest.mark.parametrize(("val_rise", "level", "n"), [(0.0, 2.0, 1), (0.5, 2.0, 0), (0.0, -2.0, 0)])
def test_a_level_shift_needs_a_validation_that_stayed_and_a_loss_above_zero(val_rise, level, n):
    shape = np.where(np.arange(600) < 300, 0.0, 0.5)
    loss = noisy(level + shape, sd=0.01)
    validation = noisy(level + val_rise / 0.5 * shape, sd=0.005, seed=1)
    assert len(find_level_shift(run_of(loss=loss, val_loss=validation))) == n


def test_a_setting_that_only_one_pass_logged_is_no_change():
    lr = np.r_[np.full(50, np.nan), np.full(50, 1e-4)]
    both = np.r_[np.full(50, 1e-3), np.full(50, 1e-4)]
    loss = noisy(3, 100)
    assert not find_changed_settings(run_of(restarts=[50], loss=loss, lr=lr))
    assert not find_changed_settings(run_of(restarts=[50], loss=loss, lr=both[:50]))
    assert len(find_changed_settings(run_of(restarts=[50], loss=loss, lr=both))) == 1


def test_a_copy_is_told_from_a_run_that_parted():
    loss = noisy(np.linspace(4, 2, 300))
    other = loss.copy()
    other[200:] += 0.01 * rng(5).normal(size=100)
    copies = compare_runs({"a": run_of(loss=loss), "b": run_of(loss=loss)})
    parted = compare_runs({"a": run_of(loss=loss), "b": run_of(loss=other)})
    assert [f.evidence["is_copy"] for f in copies if "is_copy" in f.evidence] == [True]
    assert [f.evidence["is_copy"] for f in parted if "is_copy" in f.evidence] == [False]
    assert [f.evidence["same_until"] for f in parted if "same_until" in f.evidence] == [199]


@pytest.mark.parametrize(("norm", "where"), [("full", "head"), ("few", "anywhere"), ("half", "anywhere")])
def test_a_witness_of_few_values_says_nothing_of_where_a_loss_was_cast(norm, where):
    loss = np.float32(np.linspace(3.4, 3.2, 400) + 0.02 * rng(0).normal(size=400))
    coarse = np.float32(np.asarray((loss.view(np.uint32) + 0x8000) & 0xFFFF0000, np.uint32).view(np.float32))
    full, few = rng(1).normal(1, 0.1, 400), np.resize([0.123456, 0.234567, 0.7654321], 400)
    grad = {"full": full, "few": few, "half": np.float16(full)}[norm]
    (finding,) = find_quantized_loss(run_of(loss=coarse, grad_norm=np.float32(grad)))
    words = finding.evidence["likely_cast"]
    assert ("grad_norm" in words or "head" in words) == (where == "head"), words


@pytest.mark.parametrize(("n", "told"), [(100, 1), (50, 0)])
def test_a_slow_stretch_needs_records_before_it_and_in_it(n, told):
    times = np.where(np.arange(n) < n // 2, 0.5, 1.5)
    assert len(find_throughput_drop(run_of(loss=noisy(3, n), step_time=times))) == told


@pytest.mark.parametrize(("usual", "severity"), [(0.5, "warning"), (0.003, "info")])
def test_a_step_of_milliseconds_that_became_slow_is_a_note(usual, severity):
    times = usual * np.where(np.arange(400) < 200, 1, 3) * np.exp(noisy(0, 400))
    (finding,) = find_throughput_drop(run_of(loss=noisy(3, 400), step_time=times))
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("device", "last", "severity"),
    [("cpu", 250, "info"), ("cpu", 400, "warning"), ("cuda", 250, "warning"), (None, 250, "warning")],
)
def test_a_slow_stretch_of_a_cpu_that_came_back_is_a_note(device, last, severity):
    at = np.arange(400)
    times = np.where((at >= 200) & (at < last), 1.5, 0.5) * np.exp(noisy(0, 400))
    run = run_of(loss=noisy(3, 400), step_time=times)
    run.attrs |= {} if device is None else {"device": device}
    (finding,) = diagnose(run).of("throughput_drop")
    assert finding.severity == severity
    assert ("other work on the machine" in finding.explanation) == (severity == "info")


@pytest.mark.parametrize("name", ["step_time", "throughput"])
def test_a_slow_stretch_is_told_in_the_unit_that_was_logged(name):
    times = np.where(np.arange(400) < 200, 0.5, 1.5) * np.exp(noisy(0, 400))
    logged = times if name == "step_time" else 1e4 / times
    run = run_of(loss=noisy(3, 400), **{name: logged})
    (finding,) = diagnose(run).of("throughput_drop")
    usual, slow = (0.5, 1.5) if name == "step_time" else (2e4, 1e4 / 1.5)
    assert finding.evidence[f"usual_{name}"] == pytest.approx(usual, rel=0.05)
    assert finding.evidence[f"slow_{name}"] == pytest.approx(slow, rel=0.05)
    assert ("took" in finding.explanation) == (name == "step_time")
    creeping = np.linspace(0.5, 1.2, 400) * np.exp(0.001 * noisy(0, 400, sd=1))
    logged = creeping if name == "step_time" else 1e4 / creeping
    (finding,) = diagnose(run_of(loss=noisy(3, 400), **{name: logged})).of("throughput_drop")
    assert finding.evidence[f"first_{name}"] == pytest.approx(logged[:40].mean(), rel=0.02)


def test_a_learning_rate_that_is_nan_throughout_raises_nothing():
    assert not find_lr_jump(run_of(loss=noisy(3, 60), lr=np.full(60, np.nan)))


@pytest.mark.parametrize(
    ("rates", "step", "factor"),
    [
        ([1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 90, 90], 12, 30),  # the small one before it is beside the point
        ([1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 15, 15], 6, 3),  # of alike ones the first
        (
            [4, 5, 2, 6, 3, 5, 6, 2, 5, 3, 2, 6, 200, 100],
            12,
            200 / 6,
        ),  # the rate moves
        ([4, 5, 2, 6, 3, 5, 6, 2, 5, 3, 2, 6, 30, 20], None, None),
    ],
)
def test_a_jump_of_the_rate_is_the_first_large_one(rates, step, factor):
    findings = find_lr_jump(run_of(loss=noisy(3, len(rates)), lr=rates))
    assert [(f.onset, f.evidence["factor"]) for f in findings] == ([] if step is None else [(step, factor)])


@pytest.mark.parametrize("scatter", [0.0, 0.05, 0.3])
def test_a_rate_that_is_another_one_in_each_step_does_not_jump(scatter):
    "Such as one that a loop multiplies by the length of each sequence."
    rate = 30 * np.exp(noisy(0, 500, sd=scatter))
    rate[250:] *= 4.0
    jumped = bool(find_lr_jump(run_of(loss=noisy(3, 500), lr=rate)))
    assert jumped == (scatter < 0.2) and not find_lr_jump(run_of(loss=noisy(3, 250), lr=rate[:250]))


@pytest.mark.parametrize(("level", "severity"), [(0.0, "info"), (-0.01, "info"), (0.05, "warning")])
def test_spikes_of_a_loss_that_changes_its_sign_again_and_again_are_notes(level, severity):
    loss = noisy(level, 400)
    loss[200:204] += 0.3
    loss[:2] = abs(loss[:2])  # begins above zero
    assert {f.severity for f in diagnose(run_of(loss=loss)) if f.kind == "loss_spike"} == {severity}


def test_a_jump_is_no_growth():
    step, noise = np.arange(120), 0.05 * rng(0).normal(size=120)
    grows = np.exp(np.where(step < 60, 0, np.minimum(0.2 * (step - 60), 4)) + noise)
    jumps = np.exp(np.where(step < 60, 0, np.where(step < 64, 0.1 * (step - 60), 4)) + noise)
    assert sustained_growth(step, grows).onset in range(55, 65) and sustained_growth(step, jumps) is None


@pytest.mark.parametrize("work", [np.full(400, np.nan), np.array([1.0, 2.0])])
@pytest.mark.filterwarnings("error")
def test_a_batch_size_without_enough_values_excuses_no_creeping_steps(work):
    times = np.linspace(0.5, 1.2, 400) * np.exp(0.001 * noisy(0, 400, sd=1))
    run = run_of(loss=noisy(3, 400), step_time=times, batch_size=work)
    assert [f.kind for f in find_creeping_steps(run)] == ["throughput_drop"]


def mixed(n=400):
    "Many series of one run, most of them with one thing wrong, and each of these in its own place."
    at = np.arange(400)
    fall = 3 * np.exp(-at / 60)
    loss = noisy(2 + fall, sd=0.02)
    loss[200:215] += 1.5
    loss[320:] += np.linspace(0, 3, 80)
    halvings = np.maximum(16 - np.maximum(at - 210, 0) // 4, 0)
    accuracy = noisy(np.where(at < 200, 0.8, 0.4))
    series = {
        "loss": loss,
        "val_loss": noisy(2 + fall + 0.002 * at),
        "aux_loss": noisy(np.where(at % 150 == 20, 5, 1)),
        "grad_norm": np.exp(noisy(0, 400, sd=0.1)) * np.where((at >= 196) & (at < 200), 30, 1),
        "lr": np.where(at < 195, 1e-3, 4e-3),
        "loss_scale": 2.0**halvings,
        "skipped": (at % 7 == 0) * (at > 200),
        "step_time": np.where(at < 250, 0.5, 1.5) * np.exp(noisy(0, 400)),
        "data_time": np.full(400, 0.4),
        "tokens_per_step": noisy(1000, 400, sd=50, seed=3),
        "batch_size": np.full(400, 32),
        "z_loss": noisy(np.where(at < 300, 10, 1)),
        "memory": noisy(10 + at / 20, sd=0.001),
        "accuracy": np.where(at % 10, np.nan, accuracy),
        "output_information": np.where(at < 300, 1, 1e-4),
        "log_z": noisy(1 + at / 10, sd=0.1),
        "attn_entropy": noisy(2 * np.exp(-at / 30), sd=0.001),
        "max_vio": noisy(np.where(at < 200, 0.2, 5)),
        "expert_0_load": noisy(np.where(at < 200, 0.5, 0.99), sd=0.001),
        "expert_1_load": noisy(np.where(at < 200, 0.5, 0.01), sd=0.001),
    }
    return {name: value[:n] for name, value in series.items()}


def policy_of():
    "What a policy logs beside its loss: its reward collapses, and groups of answers have one reward."
    at = np.arange(400)
    return {
        "reward": noisy(np.minimum(at / 100, 2) * (at < 300), sd=0.05),
        "reward_std": np.where(at < 300, 0.5, 0),
        "entropy": noisy(2 * np.exp(-at / 50) + 0.05, sd=0.001),
        "kl": np.where(at == 200, 9, 0.01),
        "clip_frac": np.full(400, 0.1),
        "completions_clipped_ratio": np.where(at < 250, 0.1, 0.8),
    }


def rows(run):
    "The findings as 'kind series severity onset end', each with its leads where it has some."
    text = []
    for f in diagnose(run):
        leads = [
            f"{k}={f.evidence[k]}" for k in ("lead_steps", "lag_steps", "loss_followed") if k in f.evidence
        ]
        text.append(" ".join([f.kind, f.series or "-", f.severity, str(f.onset), str(f.end), *leads]))
    return text


MIXED = [
    "loss_scale_collapse loss_scale error 214 274",
    "output_collapse - error 300 399 lead_steps=26",
    "loss_spike loss error 326 399",
    "loss_scale_collapse skipped warning 0 399",
    "non_finite accuracy warning 1 399",
    "attention_entropy_collapse attn_entropy warning 90 399 lead_steps=110",
    "memory_growth memory warning 100 399",
    "lr_jump lr warning 195 195 lead_steps=5 loss_followed=True",
    "grad_norm_explosion grad_norm warning 196 199 lead_steps=4",
    "loss_spike loss warning 200 212",
    "expert_collapse max_vio warning 202 399",
    "throughput_drop step_time warning 250 399",
    "z_loss_collapse z_loss warning 300 303",
    "lr_too_high lr warning 326 399",
    "loss_spike aux_loss info 20 170",
    "divergence loss info 324 399",
]
POLICY = [
    "loss_scale_collapse loss_scale error 214 274",
    "output_collapse - error 300 399",
    "loss_scale_collapse skipped warning 0 399",
    "non_finite accuracy warning 1 399",
    "attention_entropy_collapse attn_entropy warning 90 399",
    "memory_growth memory warning 100 399",
    "lr_jump lr warning 195 195",
    "policy_step_too_large kl warning 200 200",
    "expert_collapse max_vio warning 202 399",
    "throughput_drop step_time warning 250 399",
    "answers_cut completions_clipped_ratio warning 252 399",
    "z_loss_collapse z_loss warning 300 303",
    "reward_collapse reward warning 302 399",
    "zero_advantage reward_std warning 302 399",
    "grad_norm_explosion grad_norm info 196 199",
    "loss_spike loss info 200 212",
    "environment_change completions_clipped_ratio info 250 399",
    "slow_rise loss info 312 399",
    "divergence loss info 324 399",
    "loss_spike loss info 326 399",
]
NONE = "non_finite accuracy warning 1 {}"
SHORT = {
    19: [NONE.format(18)],
    49: [NONE.format(48)],
    199: [
        "data_stall data_time warning 0 198",
        "non_finite accuracy warning 1 198",
        "memory_growth memory warning 49 198",
        "attention_entropy_collapse attn_entropy warning 90 198",
        "lr_jump lr warning 195 195",
        "grad_norm_explosion grad_norm info 196 198",
    ],
}


@pytest.mark.filterwarnings("error")
def test_each_fault_of_a_run_with_many_is_told_once_and_in_its_place():
    assert rows(run_of(**mixed())) == MIXED


@pytest.mark.filterwarnings("error")
def test_faults_of_a_policy_are_told_and_its_loss_is_no_alarm():
    assert rows(run_of(**mixed(), **policy_of())) == POLICY


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("n", SHORT)
def test_a_short_log_tells_what_so_few_records_can_show(n):
    assert rows(run_of(**mixed(n))) == SHORT[n]


@pytest.mark.filterwarnings("error")
def test_series_without_a_number_are_told_as_such_and_change_nothing_else():
    nothing = {name: np.full(400, np.nan) for name in mixed() | policy_of()}
    told = rows(run_of(**nothing | {"loss": mixed()["loss"]}))
    assert [row for row in told if "non_finite" not in row] == rows(run_of(loss=mixed()["loss"]))
    told = rows(run_of(**mixed() | {"loss": nothing["loss"]}))
    assert "non_finite loss error 0 399" in told
    of_loss = (" loss ", "aux_loss", "lr_too_high", "lead_steps")
    assert set(told) >= {row for row in MIXED if not any(word in row for word in of_loss)}


@pytest.mark.parametrize(
    ("name", "at", "value", "severity"),
    [
        ("loss", 0, np.nan, "warning"),
        ("loss", 3, np.nan, "warning"),
        ("loss", slice(10, 40), np.nan, "error"),  # to the end
        ("loss", slice(0, 25), np.nan, "error"),  # most of it
        ("aux_loss", slice(10, 40), np.nan, "error"),
        ("loss_scale", slice(10, 40), np.nan, "warning"),  # no loss
        ("aux_loss", 0, np.nan, "warning"),
        ("lr", 0, np.nan, "info"),  # nothing was measured yet
        ("lr", 3, np.nan, "warning"),
        ("explained_variance", 3, np.nan, "info"),  # divides by a variance that was zero
        ("explained_variance", 3, np.inf, "warning"),
        ("grad_norm", 3, np.nan, "info"),  # a step that was left out
        ("grad_norm", [3, 4, 5, 6], np.nan, "warning"),
        ("grad_norm", 38, np.nan, "warning"),  # too near the end to tell
        ("grad_z", 3, np.nan, None),  # a z-score without a history
    ],
)
def test_how_much_a_value_that_is_no_number_matters(name, at, value, severity):
    series = noisy(1, 40)
    series[at] = value
    findings = diagnose(run_of(**{"loss": noisy(3, 40), name: series})).of("non_finite")
    assert [f.severity for f in findings] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("name", "entropy", "told"),
    [
        ("entropy", 2 * np.exp(-np.arange(200) / 20), True),
        ("entropy_loss", -2 * np.exp(-np.arange(200) / 20), True),  # its negative, as one trainer logs it
        ("entropy", np.linspace(2, -1, 200), False),  # of continuous actions: it passes zero
        ("entropy", np.full(200, 0.005), False),  # nothing is left to fall
        ("entropy", np.full(200, 2.0), False),
    ],
)
def test_an_entropy_collapses_where_it_is_one_of_choices(name, entropy, told):
    reward = noisy(np.minimum(np.arange(200) / 100, 1))
    series = {"loss": noisy(0.1, 200), "reward": reward, name: entropy}
    kinds = diagnose(run_of(**series)).kinds
    assert ("policy_entropy_collapse" in kinds) == told
    assert "policy_entropy_collapse" not in diagnose(run_of(**series, std=np.full(200, 0.1))).kinds


@pytest.mark.parametrize(("name", "is_share"), [("expert_{}_load", True), ("expert_{}_norm", False)])
def test_experts_are_compared_by_what_counts_tokens(name, is_share):
    loads = {name.format(i): np.where(np.arange(200) < 100, 5.0, 5.0 + 4000 * (i == 3)) for i in range(4)}
    collapses = diagnose(run_of(loss=noisy(3, 200), **loads)).of("expert_collapse")
    assert len(collapses) == is_share


@pytest.mark.parametrize(("sd", "is_learning"), [(0.02, True), (1.5, False)])
def test_a_first_record_far_above_all_others_was_learned_unless_noise_reaches_it(sd, is_learning):
    loss = np.abs(noisy(2, 200, sd=sd))
    loss[0] = 5.5
    assert ("not_learning" not in diagnose(run_of(loss=loss)).kinds) == is_learning


@pytest.mark.parametrize("sd", [0, 0.05])
def test_a_negative_number_in_every_record_is_no_loss_and_a_negative_loss_is(sd):
    findings = diagnose(run_of(loss=noisy(-2, 200, sd=sd))).of("not_learning")
    assert len(findings) == bool(sd)


@pytest.mark.parametrize("name", ["critic_loss", "td_loss", "dqn_loss"])
def test_a_loss_of_a_policy_is_known_by_its_own_name(name):
    loss = noisy(2 + np.exp(-np.arange(400) / 60), sd=0.02)
    loss[200:212] += 1
    assert [f.severity for f in diagnose(run_of(**{name: loss})).of("loss_spike")] == ["info"]
    assert [f.severity for f in diagnose(run_of(train_loss=loss)).of("loss_spike")] == ["warning"]


@pytest.mark.parametrize(("length", "flat", "n"), [(6000, 4000, 1), (6000, 2000, 0), (2000, 1500, 0)])
def test_a_plateau_to_the_end_is_most_of_a_long_run(length, flat, n):
    level = np.r_[np.linspace(4, 2, length - flat), np.full(flat, 2.0)]
    findings = diagnose(run_of(loss=noisy(level, sd=0.005))).of("plateau")
    assert sum(bool(f.evidence.get("to_the_end")) for f in findings) == n


@pytest.mark.parametrize(
    ("scale", "ends"),
    [
        (np.r_[np.full(100, 4096.0), 2.0 ** -np.arange(160), np.zeros(40)], [("error", 259)]),
        (np.r_[np.full(100, 4096.0), np.zeros(200)], []),  # switched off: it did not halve
        (np.zeros(300), []),
    ],
)
def test_a_loss_scale_that_is_halved_to_zero_collapsed(scale, ends):
    findings = diagnose(run_of(loss=noisy(3, 300), loss_scale=scale)).of("loss_scale_collapse")
    assert [(f.severity, f.end) for f in findings] == ends


@pytest.mark.parametrize("sign", [1, -1])
def test_a_log_z_that_drifts_down_is_reported_with_its_sign(sign):
    series = sign * np.r_[np.full(50, 1.0), np.linspace(1, 80, 50), np.full(50, 75.0)]
    (drift,) = diagnose(run_of(log_z=series)).of("output_logit_drift")
    assert [drift.evidence[name] for name in ("start", "peak", "last")] == [sign, 80 * sign, 75 * sign]
    assert (
        f"from {sign} to {80 * sign} and ended at {75 * sign}; its magnitude passed 50" in drift.explanation
    )


@pytest.mark.parametrize("level", [2.3, -1.0])
def test_a_constant_loss_is_not_learned_unless_it_is_negative(level):
    kinds = diagnose(run_of(loss=np.full(200, level))).kinds
    assert kinds == (["not_learning"] if level > 0 else [])


@pytest.mark.parametrize("died_at", [None, 300])
def test_a_gap_in_which_the_program_died_is_no_hang(died_at):
    clock = 1.7e9 + 12.0 * np.arange(400) + 9000 * (np.arange(400) > 300)
    run = new_run(make_scalars({"loss": Samples(np.arange(400), np.linspace(3, 2, 400), None, clock)}))
    events = xr.Dataset(
        {
            "event_kind": ("event", np.array(["checkpoint_save"], object)),
            "event_step": ("event", [10]),
            "event_text": ("event", np.array([""], object)),
        }
    )
    run["events"] = xr.DataTree(events)
    run.attrs["crashes"] = [{"step": died_at}] if died_at else []
    assert bool(find_hang(run)) is (died_at is None)


@pytest.mark.parametrize("n", [1, 2])
def test_a_bump_at_each_of_several_resumes_says_how_many_there_are(n):
    steps = np.r_[0:400, 300:700, 600:1000][: 400 + 400 * n]
    since = np.r_[np.full(400, 999), np.arange(400), np.arange(400)][: len(steps)]
    loss = 2 + np.exp(-steps / 150) + 0.6 * np.exp(-since / 12) + rng(0).normal(0, 0.02, len(steps))
    bumps = diagnose(new_run(make_scalars({"loss": Samples(steps, loss)}))).of("resume_spike")
    assert [f.evidence.get("recurs") for f in bumps] == ([2, 2] if n == 2 else [None])


def test_components_are_judged_beside_a_loss_that_measures_prediction():
    losses = {"loss": noisy(3, 300), "text_loss": noisy(2, 300), "image_loss": noisy(1, 300)}
    assert [c.name for c in component_losses(run_of(**losses))] == ["loss", "text_loss", "image_loss"]
    adversaries = {"g_loss": noisy(2, 300), "d_loss": noisy(1, 300)}
    assert component_losses(run_of(**adversaries)) == [] == component_losses(run_of(lr=noisy(1, 300)))


@pytest.mark.parametrize(("n", "severities"), [(40, ["error"]), (15, [])])
def test_a_resume_that_lost_its_loss_needs_records_enough(n, severities):
    steps = np.arange(50_000, 50_000 + 10 * n, 10)
    loss = np.r_[2.0, noisy(np.full(n - 1, 14.0))]
    run = new_run(make_scalars({"loss": Samples(steps, loss)}))
    assert [f.severity for f in find_broken_resume(run)] == severities


@pytest.mark.parametrize(("name", "is_size"), [("activation_norm", True), ("activation_count", False)])
def test_only_a_size_explodes(name, is_size):
    grown = np.r_[np.full(100, 1.0), np.geomspace(1, 1e4, 200)]
    findings = diagnose(run_of(loss=noisy(3, 300), **{name: noisy(grown, sd=0.001)}))
    assert bool(findings.of("activation_explosion")) is is_size


def test_what_to_do_next_is_said_once():
    logs = [
        {"loss": np.r_[noisy(np.linspace(3, 2, 200)), np.full(100, np.nan)]},
        {"loss": noisy(np.r_[np.linspace(3, 2, 200), np.linspace(2, 6, 100)])},
        {
            "loss": noisy(np.linspace(3, 0.5, 300)),
            "val_loss": noisy(np.r_[np.linspace(3, 2, 100), np.linspace(2, 4, 200)]),
        },
        {"loss": noisy(10.8, 300)},
    ]
    for log in logs:
        likely = most_likely(diagnose(run_of(**log)))
        assert likely is not None and likely.next and len(set(likely.next)) == len(likely.next)


def test_of_parameters_that_are_alike_the_first_are_named_on_every_machine():
    names = [f"layer.{i:02d}.weight" for i in range(40)]
    coords = {"step": np.arange(30), "param": names, "kind": ("param", ["mlp.fc1"] * 40)}
    coords["layer"] = ("param", list(range(40)))
    share = np.where(np.arange(40) % 3 == 0, 0.9, 1.0)
    below = (("step", "param"), np.tile(share, (30, 1)), {"long_name": "made", "units": "1"})
    run = new_run(attrs={"optimizer": "AdamW"}, optimizer=xr.Dataset({"below_eps_frac": below}, coords))
    (finding,) = find_grad_below_epsilon(run)
    alike = [name for name, value in zip(names, share, strict=True) if value == 1]
    assert list(finding.modules) == alike[: len(finding.modules)]
