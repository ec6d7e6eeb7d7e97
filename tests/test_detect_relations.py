"""What one finding makes of another: small lists of findings, whose answer is known.

Each row changes one thing that a rule asks for, and holds what is told with it and without.
"""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from stabilitylab.detect.diagnose import finish
from stabilitylab.detect.experts import find_expert_collapse
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.layers.attention import (
    find_attention_sink,
    find_entropy_collapse,
    find_non_finite_attention,
)
from stabilitylab.detect.layers.parameters import find_wide_init
from stabilitylab.detect.likely_cause import _fits, most_likely
from stabilitylab.detect.loss.components import component_losses
from stabilitylab.detect.loss.evaluations import (
    evaluations_at_plateau,
    find_worse_evaluations,
    objective_type,
)
from stabilitylab.detect.loss.spikes import (
    Spike,
    _finding_of,
    _is_bad_batch,
    _is_early_low,
    _is_low_record,
    _is_tail_end,
)
from stabilitylab.detect.loss.trend import (
    _plateau_to_the_end,
    find_leak,
    find_level_shift,
    find_not_learning,
    find_zero_loss,
)
from stabilitylab.detect.metrics import (
    find_grad_norm_explosion,
    find_length_bias,
    find_loss_scale_collapse,
    find_quantized_loss,
    rank_correlation,
)
from stabilitylab.detect.relations import (
    drop_explained_not_learning,
    grad_norm_and_loss,
    high_learning_rate,
    join_spikes_to_divergence,
    layer_leads,
    loss_events,
    resume_spikes,
    warnings_before,
)
from stabilitylab.detect.restarts import find_logged_crashes, split_runs
from stabilitylab.detect.rollbacks import _rates
from stabilitylab.detect.settings import changes_and_events, find_setting_effects, loss_after_jump, warmup_end
from stabilitylab.detect.severity import lower_severity
from stabilitylab.detect.skipping import clipped_share
from stabilitylab.detect.speed import find_memory_growth
from stabilitylab.read.crash.incidents import Crash
from stabilitylab.run.curves import attempts, curve
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

STEPS = np.arange(400)


def run_of(**series):
    "A record of a loss and other series, with attributes where a value is no array."
    series = {"loss": np.full(400, 3.0)} | series
    samples = {n: Samples(STEPS[: len(v)], v) for n, v in series.items() if isinstance(v, np.ndarray)}
    attrs = {n: v for n, v in series.items() if not isinstance(v, np.ndarray)}
    return new_run(make_scalars(samples), attrs=attrs)


def finding(kind, onset=100, end=None, severity="warning", modules=(), series="", **evidence):
    "A finding that lasts to its end, or one step."
    return Finding(kind, severity, onset, onset if end is None else end, modules, evidence, series=series)


def spike(onset=100, **changes):
    evidence = {"recovery": "none", "peak": 9.0} | changes.pop("evidence", {})
    return finding("loss_spike", onset, **{"end": 399, "severity": "error"} | changes, **evidence)


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        ({}, True),
        ({"evidence": {"recovery": "partial"}}, True),
        ({"evidence": {"recovery": "slow"}}, False),
        ({"evidence": {"only_in": "aux_loss"}}, False),
        ({"evidence": {"rolled_back_to": 90}}, False),
        ({"end": 300}, False),
    ],
)
def test_a_divergence_begins_with_a_spike_of_the_loss_that_stayed(changes, joined):
    divergence = finding("divergence", 150, 399, "error")
    told = join_spikes_to_divergence(run_of(), [spike(**changes), divergence])
    assert [f.onset for f in told if f.kind == "divergence"] == [100 if joined else 150]


def test_only_a_spike_begins_a_divergence_and_a_plateau_beside_one_is_no_finding():
    other = finding("resume_spike", 100, 399, recovery="none", peak=9.0)
    flat, part = finding("plateau", 200, 399), finding("plateau", 200, 399, only_in="aux_loss")
    told = join_spikes_to_divergence(run_of(), [other, flat, part, finding("divergence", 150, 399, "error")])
    assert [(f.kind, f.onset) for f in told] == [("resume_spike", 100), ("plateau", 200), ("divergence", 150)]
    undone = finding("divergence", 150, 399, "error", rolled_back_to=100)
    assert join_spikes_to_divergence(run_of(), [spike(), undone, flat]) == [spike(), undone, flat]


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        (finding("quantized_loss", distinct=5), False),
        (finding("quantized_loss", distinct=500), True),
        (finding("quantized_loss", distinct=5, modules=("head",)), True),
        (finding("resume_spike", severity="error"), False),
        (finding("resume_spike", severity="warning"), True),
        (finding("loss_spike", severity="error"), True),
    ],
)
def test_a_loss_that_is_coarse_or_was_lost_at_a_resume_is_not_told_as_not_learning(other, is_told):
    told = drop_explained_not_learning(run_of(), [other, finding("not_learning")])
    assert [f.kind for f in told] == [other.kind, *["not_learning"] * is_told]


@pytest.mark.parametrize(
    ("event", "severity"),
    [
        (finding("non_finite", 105, series="loss"), "warning"),
        (finding("non_finite", 105, series="lr"), "info"),
        (finding("non_finite", 105, series="loss", severity="info"), "info"),
        (finding("plateau", 105, series="loss"), "info"),
        (finding("divergence", 105), "warning"),
        (finding("divergence", 95), "info"),
        (finding("divergence", 300), "info"),
    ],
)
def test_growth_is_a_warning_where_the_loss_went_wrong_during_it_or_soon_after(event, severity):
    growth = finding("grad_norm_explosion", 100, 110, "info", doubling_steps=5.0)
    assert grad_norm_and_loss(run_of(), [growth, event])[0].severity == severity
    for same in (growth.with_(modules=("q",)), growth.with_(kind="memory_growth")):
        assert grad_norm_and_loss(run_of(), [same, event])[0].severity == "info"


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, 98),
        ({"kind": "divergence"}, 98),
        ({"kind": "plateau"}, None),
        ({"severity": "info"}, None),
        ({"modules": ("q",)}, None),
        ({"onset": 97}, None),
        ({"onset": 98}, 98),
        ({"onset": None, "end": None}, None),
    ],
)
def test_a_loss_event_names_the_last_warning_before_it(changes, warned):
    run = run_of()
    kinds = {"event_kind": ("event", np.array(["warning", "warning", "error"], object))}
    texts = {"event_text": ("event", np.array(["grad norm"] * 3, object))}
    run["events"] = xr.DataTree(xr.Dataset(kinds | texts | {"event_step": ("event", [98, 150, 99])}))
    (told,) = warnings_before(run, [finding("loss_spike").with_(**changes)])
    assert told.evidence.get("warned") == warned
    assert told.evidence.get("warning_lead_steps") == (None if warned is None else (told.onset - 98) or None)


@pytest.mark.parametrize(
    ("changes", "lead"),
    [
        ({}, 20),
        ({"modules": ()}, None),
        ({"kind": "plateau"}, None),
        ({"onset": 121, "end": 121}, None),
        ({"onset": None, "end": None}, None),
    ],
)
def test_a_sign_in_a_layer_leads_the_next_event_of_the_loss_itself(changes, lead):
    sign = finding("activation_explosion", modules=("q",)).with_(**changes)
    of_layers = finding("non_finite", 110, modules=("q",))
    told = layer_leads(run_of(), [sign, of_layers, finding("loss_spike", 120)])
    assert told[0].evidence.get("lead_steps") == lead
    assert loss_events([sign, of_layers, finding("loss_spike", 120)]) == [120]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["restart", "resume_spike"]),
        ({"evidence": {"only_in": "aux_loss"}}, ["restart", "loss_spike", "divergence"]),
        ({"onset": 110}, ["restart", "loss_spike", "divergence"]),
        ({"evidence": {"recovery": "slow"}}, ["restart", "loss_spike", "divergence"]),
        ({"onset": 102, "evidence": {"recovery": "fast"}}, ["restart", "resume_spike", "divergence"]),
    ],
)
def test_a_spike_right_after_a_restart_is_of_the_restart_and_its_divergence_too(changes, kinds):
    findings = [finding("restart", 100, severity="info"), spike(**{"onset": 101} | changes)]
    told = resume_spikes(run_of(), [*findings, finding("divergence", 120, 399, "error")])
    assert [f.kind for f in told] == kinds
    earlier = finding("divergence", 50, 399, "error")
    assert earlier in resume_spikes(run_of(), [*findings, earlier])


@pytest.mark.parametrize(
    ("lr", "blamed"),
    [
        (np.linspace(1e-4, 1e-3, 400), True),
        (np.linspace(1e-3, 1e-4, 400), False),
        (np.full(400, 1e-3), False),
        (np.zeros(400), False),
        (np.linspace(1e-4, 1e-3, 8), False),
    ],
)
def test_a_rate_that_rises_where_the_loss_is_lost_is_blamed(lr, blamed):
    for event, is_lost in ((spike(300), True), (spike(300, severity="warning"), False)):
        told = high_learning_rate(run_of(lr=lr), [event])
        assert ("lr_too_high" in [f.kind for f in told]) == (blamed and is_lost)


@pytest.mark.parametrize(
    ("onset", "severity", "lead"),
    [(100, "warning", 0), (150, "error", 50), (99, "error", None), (390, "error", None), (150, "info", None)],
)
def test_a_jump_of_the_rate_is_followed_by_a_loss_event_within_reach(onset, severity, lead):
    jump, event = finding("lr_jump"), finding("loss_spike", onset, severity=severity)
    run = run_of(lr=np.full(400, 1e-3))
    assert loss_after_jump(run, [jump, event])[0].evidence.get("lead_steps") == lead
    assert loss_after_jump(run, [jump.with_(severity="info"), event])[0].evidence == {}


RISING = np.r_[np.linspace(0.1, 1, 50), np.full(350, 1.0)]


@pytest.mark.parametrize(
    ("lr", "attrs", "expected"),
    [
        (RISING, {"warmup_steps": 200}, 200),
        (RISING, {}, None),
        (RISING, {"warmup_steps": 0}, None),
        (RISING, {"warmup_steps": "none"}, None),
        (RISING, {"config": {"optim.warmup_steps": 100}}, 100),
        (RISING[40:], {"warmup_steps": 200}, None),  # it began near its highest
        (np.r_[0.0, np.ones(100)], {"warmup_steps": 200}, None),  # at once
        (RISING[:4], {"warmup_steps": 200}, None),
    ],
)
def test_a_warmup_has_an_end_where_a_rate_rises_and_a_length_is_set(lr, attrs, expected):
    end = warmup_end(run_of(lr=lr, **attrs))
    assert (None if end is None else end.expected) == expected
    if end is not None:
        assert end.reached == 49 and end.factor == pytest.approx(expected / 49)


@pytest.mark.parametrize(
    ("onset", "end", "told_end"), [(9, 5, 9), (5, 9, 9), (5, None, 5), (None, 7, 7), (None, None, None)]
)
def test_a_finding_ends_no_earlier_than_it_begins(onset, end, told_end):
    (told,) = finish([finding("restart").with_(onset=onset, end=end)])
    assert (told.onset, told.end) == (onset, told_end)


def test_words_and_remedies_that_a_finding_brings_stay():
    own = finding("loss_spike", recovery="none", peak=9.0, baseline=3.0, height=6.0, z=9.0, records=1)
    remedy = {"name": "wait", "source": "ours", "reported": "unclear"}
    (told,) = finish([own.with_(explanation="It rose.", remedies=(remedy,))])
    assert told.explanation == "It rose." and told.remedies == (remedy,)
    (told,) = finish([own])
    assert "9" in told.explanation and told.remedies and remedy not in told.remedies


@pytest.mark.parametrize(
    ("severity", "evidence", "n"),
    [("warning", {"note": "x"}, 1), ("info", {}, 1), ("info", {"note": "near zero"}, 0)],
)
def test_a_note_that_says_why_nobody_has_to_act_has_no_remedies(severity, evidence, n):
    basis = {"recovery": "fast", "peak": 9.0, "baseline": 3.0, "height": 6.0, "z": 9.0, "records": 1}
    (told,) = finish([finding("loss_spike", severity=severity, **basis, **evidence)])
    assert bool(told.remedies) == bool(n)


def test_the_end_of_a_run_comes_first_and_a_crash_that_ended_nothing_does_not():
    warned, ended = (
        finding("loss_spike", 5, severity="error"),
        finding("crash", 9, severity="info", ended=True),
    )
    earlier, fake = finding("crash", 7, severity="info"), finding("plateau", 3, severity="info", ended=True)
    ranked = Findings([fake, earlier, warned, ended])
    assert list(ranked) == [ended, warned, fake, earlier]
    assert ranked == Findings([ended, warned, fake, earlier]) and ranked != list(ranked)
    assert ranked != Findings([ended, warned, fake])


@pytest.mark.parametrize(
    ("series", "modules", "stays", "names", "is_end"),
    [
        ("loss", (), True, [], True),
        ("train_loss", (), True, [], True),
        ("perplexity", (), True, [], True),
        ("lr", (), True, ["loss"], True),
        ("", ("q",), True, [], True),
        ("loss", (), False, [], False),
        ("", ("q",), False, [], False),
        ("loss_scale", (), True, [], False),
        ("val_loss", (), True, [], False),
        ("lr", (), True, [], False),
        ("grad_norm", (), True, [], None),
        ("grad_norm", (), False, [], False),
        ("loss", (), True, ["grad_norm"], True),
    ],
)
def test_what_stays_no_number_ends_a_run_where_it_is_its_loss_or_a_module(
    series, modules, stays, names, is_end
):
    bad = finding("non_finite", series=series, modules=modules, stays=stays, names=names)
    whole = {"ends_it": True}
    assert _fits(bad, whole, {}) == bool(is_end)
    assert _fits(bad, {"of_gradient": True}, {}) == (is_end is None)


SWAP = {"swap_seconds": (60.0, 37)}


@pytest.mark.parametrize(
    ("attrs", "has_command", "words"),
    [
        ({"evidence": SWAP, "source": "run"}, True, "with `--swap`"),
        ({"evidence": SWAP}, False, "with `--swap`"),
        ({"evidence": {}, "source": "run"}, False, None),
        ({"evidence": SWAP, "source": "run", "swap": {"verdict": "batch"}}, False, None),
        ({"evidence": SWAP, "source": "run", "swap": {"left_out": "no time"}}, True, "not run: no time"),
    ],
)
def test_the_swap_test_is_offered_until_it_was_run(attrs, has_command, words):
    likely = most_likely(Findings([finding("loss_spike").with_(explanation="It rose.")], attrs))
    assert bool(likely.test) == has_command and ("--step 37" in likely.test) == has_command
    swap = [line for line in likely.missing if "swap test" in line]
    assert all(line.startswith("whether batch or state is out of line at step 37") for line in swap)
    assert len(swap) == bool(words) and all(words in line for line in swap)


@pytest.mark.parametrize(
    ("died", "outside", "severity", "ended"),
    [
        (True, False, "error", True),
        (True, True, "info", "outside"),
        (False, True, "info", False),
        (False, False, "info", False),
    ],
)
def test_a_crash_from_outside_is_no_error_and_an_attempt_that_failed_ended_nothing(
    died, outside, severity, ended
):
    for followed in (0, 3):
        cause = "time limit" if outside else "exception"
        crash = Crash(cause, "ValueError", "ValueError: x", 7, followed, None, died=died, outside=outside)
        (told,) = find_logged_crashes(run_of(crashes=[crash.to_dict()]))
        assert (told.severity, told.evidence["ended"], bool(told.remedies)) == (severity, ended, died)
        assert told.evidence["followed"] == (followed or None)


TURN = np.where(STEPS < 200, 5.0, 1.0)


@pytest.mark.parametrize(
    ("loads", "n"),
    [
        ([np.full(400, 5.0), TURN, TURN], 1),
        ([np.full(400, 5.0), TURN[:300], TURN[:300]], 0),  # not of the same steps
        ([np.full(400, 5.0), TURN - 2, TURN], 0),  # below zero: no counts
        ([TURN * 0, TURN * 0], 0),
        ([TURN], 0),
    ],
)
@pytest.mark.filterwarnings("error")
def test_experts_share_tokens_where_their_counts_are_of_the_same_steps(loads, n):
    loads[0] = loads[0] * (1 + 99 * (STEPS >= 200))
    series = {f"expert_{i}_tokens": load for i, load in enumerate(loads)}
    assert len(find_expert_collapse(run_of(**series))) == n


@pytest.mark.parametrize(
    ("name", "series", "n"),
    [
        ("max_vio", np.where(STEPS < 200, 0.2, 5), 1),
        ("dead_experts", np.where(STEPS < 200, 0.1, 0.9), 1),
        ("dead_experts", np.where(STEPS < 200, 0.1, 9), 0),  # a number of experts, no share
        ("load_imbalance", np.where(STEPS < 200, -1.0, 9), 0),
        ("max_vio", np.where(STEPS < 10, 0.2, 5)[:15], 0),
        ("other", np.where(STEPS < 200, 0.2, 5), 0),
    ],
)
def test_a_router_is_judged_by_what_trainers_log_of_it(name, series, n):
    assert len(find_expert_collapse(run_of(**{name: series.astype(float)}))) == n


@pytest.mark.parametrize(
    ("tokens", "weight", "n", "told"),
    [
        (300, 0.1, 400, 1),
        (300, 0.0, 400, 0),
        (5, 0.1, 400, 0),  # the lengths hardly differ
        (300, 0.1, 20, 0),
    ],
)
def test_a_loss_follows_the_number_of_tokens_where_these_differ(tokens, weight, n, told):
    noise = np.random.default_rng(0).normal(size=(2, 400))
    loss = 3 + 0.05 * noise[0] + weight * noise[1]
    run = run_of(loss=loss[:n], tokens_per_step=(1000 + tokens * noise[1])[:n])
    assert len(find_length_bias(run)) == told
    assert not find_length_bias(run_of(loss=loss)) and not find_length_bias(run_of(loss=loss[:0]))


@pytest.mark.filterwarnings("error")
def test_a_constant_series_orders_nothing():
    ascending, constant = np.arange(5.0), np.ones(5)
    assert np.isnan(rank_correlation(constant, ascending)) and np.isnan(rank_correlation(ascending, constant))
    assert rank_correlation(ascending, ascending**3) == pytest.approx(1)


@pytest.mark.parametrize(
    ("series", "attrs", "clip"),
    [
        ({}, {"max_grad_norm": 0.5}, 0.5),
        ({}, {"max_grad_norm": 0}, None),
        ({}, {"max_grad_norm": "none"}, None),
        ({}, {"config": {"trainer.clip_grad": 2}}, 2),
        ({"clip": np.full(400, 0.7)}, {}, 0.7),
        ({"clip": np.full(400, np.nan)}, {}, None),
        ({"clipped_grad_norm": np.linspace(0.1, 0.9, 400)}, {}, 0.9),
    ],
)
def test_the_clip_is_that_of_the_settings_or_of_a_series(series, attrs, clip):
    share = clipped_share(run_of(grad_norm=np.linspace(0, 2, 400), **series, **attrs))
    assert (None if share is None else share.clip) == (None if clip is None else pytest.approx(clip))


@pytest.mark.parametrize(("lowest", "spread", "n"), [(1.0, 0, 0), (-1.0, 0, 0), (1.0, 1, 1)])
def test_a_loss_scale_below_zero_is_none(lowest, spread, n):
    scale = 2.0 ** np.where(STEPS < 100, 16, np.maximum(16 - spread * (STEPS - 100) // 5, 4))
    scale[0] *= lowest
    assert len(find_loss_scale_collapse(run_of(loss_scale=scale))) == n
    norms = np.where(STEPS < 100, 1.0, 5.0)
    for norm, keys in ((norms, 2), (norms[:50], 0), (np.where(STEPS < 120, np.nan, 5), 0)):
        for told in find_loss_scale_collapse(run_of(loss_scale=scale, grad_norm=norm)):
            assert sum(key.startswith("grad_norm") for key in told.evidence) == keys


UP = np.linspace(1.0, 3.0, 400)
BUMP = 3 + 0.3 * np.exp(-(((STEPS - 200) / 40) ** 2))
LEVELS = {"baseline": 1.0, "peak": 3.0, "final": 3.0}


@pytest.mark.parametrize(
    ("kind", "extra", "loss", "attrs", "is_lowered"),
    [
        ("divergence", {}, UP, {}, True),
        ("loss_spike", {"recovery": "none"}, UP, {}, True),
        ("loss_spike", {"recovery": "fast"}, UP, {}, False),
        ("slow_rise", {"stays": True}, UP, {}, True),
        ("slow_rise", {}, UP, {}, False),
        ("plateau", {"stays": True}, UP, {}, False),
        ("divergence", {}, UP[::-1], {}, False),
        ("divergence", {}, UP, {"optimizer": "AdamW"}, False),
    ],
)
def test_what_climbs_throughout_is_maximised_unless_an_optimizer_lowers_it(
    kind, extra, loss, attrs, is_lowered
):
    rise = finding(kind, 100, 399, "error", series="loss", **LEVELS | extra)
    (told,) = lower_severity(run_of(loss=loss, **attrs), [rise])
    assert (told.severity == "info") == is_lowered


@pytest.mark.parametrize(
    ("kind", "recovery", "name", "loss", "is_lowered"),
    [
        ("loss_spike", "fast", "avg_loss", BUMP, True),
        ("loss_spike", "none", "avg_loss", BUMP, False),
        ("divergence", "fast", "avg_loss", BUMP, False),
        ("loss_spike", "fast", "train_loss", BUMP, False),
        ("loss_spike", "fast", "avg_loss", BUMP + 0.1 * (-1.0) ** STEPS, False),
    ],
)
def test_a_rise_of_a_running_mean_that_came_back_is_a_note(kind, recovery, name, loss, is_lowered):
    run = new_run(make_scalars({name: Samples(STEPS, loss)}))
    rise = finding(kind, 150, 250, series=name, recovery=recovery, **LEVELS | {"peak": 9.0})
    (told,) = lower_severity(run, [rise])
    assert (told.severity == "info") == is_lowered


@pytest.mark.parametrize(
    ("kind", "first", "last", "evidence", "is_lowered"),
    [
        ("loss_spike", 100, 250, {}, True),
        ("loss_spike", 100, 250, {"recovery": "none"}, False),
        ("loss_spike", 100, 250, {"peak": 2.0}, False),
        ("loss_spike", 100, 120, {}, False),
        ("loss_spike", 310, 399, {}, False),
        ("slow_rise", 100, 250, {}, False),
    ],
)
def test_a_rise_at_the_end_is_a_note_where_a_longer_one_of_its_height_came_back(
    kind, first, last, evidence, is_lowered
):
    other = finding(kind, first, last, series="loss", **LEVELS | {"recovery": "slow"} | evidence)
    rise = finding("divergence", 300, 399, "error", series="loss", **LEVELS)
    told = lower_severity(run_of(loss=UP[::-1]), [other, rise])[1]
    assert (told.severity == "info") == is_lowered


HIGH = np.where((STEPS >= 300) & (STEPS < 350), 100.0, 3.0)
ONCE = np.where(STEPS == 300, 100.0, 3.0)


@pytest.mark.parametrize(
    ("kind", "loss", "peak", "beside", "is_lowered"),
    [
        ("loss_spike", ONCE, 100.0, "discriminator_loss", True),
        ("loss_spike", ONCE, 100.0, "other_loss", False),
        ("loss_spike", HIGH, 9.0, "discriminator_loss", True),
        ("loss_spike", HIGH, 100.0, "discriminator_loss", False),
        ("plateau", ONCE, 100.0, "discriminator_loss", False),
    ],
)
def test_a_loss_whose_goal_moves_is_a_note_unless_it_ran_away(kind, loss, peak, beside, is_lowered):
    run = run_of(loss=loss, **{beside: np.full(400, 1.0)})
    event = finding(kind, 300, 349, series="loss", **LEVELS | {"peak": peak, "recovery": "fast"})
    (told,) = lower_severity(run, [event])
    assert (told.severity == "info") == is_lowered


@pytest.mark.parametrize(
    ("before", "steps", "kind", "is_lowered"),
    [
        (5.0, np.arange(200), "loss_spike", True),
        (3.0, np.arange(200), "loss_spike", False),
        (5.0, np.arange(150, 350), "loss_spike", False),  # the earlier attempt began later
        (5.0, np.arange(200), "level_shift", False),
    ],
)
def test_a_restart_as_high_as_the_attempt_before_is_another_attempt(before, steps, kind, is_lowered):
    values = np.r_[np.full(200, before), np.full(200, 5.0)]
    samples = Samples(np.r_[steps, np.arange(100, 300)], values)
    run = new_run(make_scalars({"loss": samples}, restarts=np.array([200], np.int64)))
    event = finding(kind, 100, 299, series="loss", baseline=3.0, peak=5.0, peak_step=250)
    (told,) = lower_severity(run, [event])
    assert (told.severity == "info") == is_lowered


@pytest.mark.parametrize(
    ("kind", "baseline", "is_lowered"),
    [
        ("divergence", 100.0, True),
        ("slow_rise", 100.0, True),
        ("divergence", 5.0, False),
        ("plateau", 100.0, False),
    ],
)
def test_a_small_rise_of_a_loss_beyond_all_nats_drifts(kind, baseline, is_lowered):
    rise = finding(kind, 300, 399, series="loss", baseline=baseline, final=baseline + 50)
    (told,) = lower_severity(run_of(loss=np.linspace(1000, 100, 400)), [rise])
    assert (told.severity == "info") == is_lowered


RECORD = Spike(50, 50, 1, 3.0, 0.1, 5.0, 50, 10.0, "fast", 1, None)


@pytest.mark.parametrize(
    ("changes", "is_bad", "is_low", "is_early", "is_tail"),
    [
        ({"peak": 3.3, "z": 3.0}, True, True, True, True),
        ({"recovery": "slow", "peak": 3.3, "z": 3.0}, False, False, False, False),
        ({"records": 3, "peak": 3.3, "z": 3.0}, False, False, False, False),
        ({"records": 2, "peak": 3.3, "z": 3.0}, True, False, True, False),
        ({"peak": 9.0, "z": 60.0}, False, False, False, False),
        ({"peak": -0.1, "z": 3.0, "baseline": -1.0}, False, False, False, True),
        ({"first": 300, "peak": 3.3, "z": 3.0}, True, True, False, True),
    ],
)
def test_a_record_that_was_back_at_once_is_low_early_or_in_the_tail(
    changes, is_bad, is_low, is_early, is_tail
):
    spike = replace(RECORD, **changes)
    series = curve(run_of(loss=np.r_[np.full(40, 6.0), np.full(360, 3.0)]), "loss")
    assert _is_bad_batch(spike, False, False) == is_bad
    assert _is_bad_batch(spike, True, False) == (spike.recovery == "fast")
    assert _is_low_record(spike, 6.0) == is_low and not _is_low_record(spike, 0.0)
    assert _is_early_low(spike, series) == is_early
    assert _is_tail_end(spike, np.inf) == is_tail and not _is_tail_end(spike, 0.0)


def test_a_high_record_is_a_bad_batch_where_noise_multiplies_the_loss():
    wide = replace(RECORD, noise=1.0, peak=6.0, z=3.0)
    assert _is_bad_batch(wide, False, True) and not _is_bad_batch(wide, False, False)
    assert not _is_bad_batch(replace(wide, noise=0.1), False, True)


SCORE = np.where(STEPS < 200, 0.8, 0.4) + 0.001 * (STEPS % 3)


@pytest.mark.parametrize(
    ("name", "score", "loss", "n"),
    [
        ("accuracy", SCORE, UP[::-1], 1),
        ("accuracy_loss", SCORE, UP[::-1], 0),
        ("other", SCORE, UP[::-1], 0),
        ("accuracy", SCORE[::-1], UP[::-1], 0),
        ("accuracy", np.where(STEPS < 360, 0.7 + STEPS / 4000, 0.4), UP[::-1], 0),  # just now
        ("accuracy", SCORE, UP, 0),  # the loss got worse as well
        ("accuracy", SCORE, UP[::-1][:15], 0),
    ],
)
def test_a_score_is_worse_where_it_fell_long_ago_while_the_loss_went_on_falling(name, score, loss, n):
    rare = np.where(STEPS % 10, np.nan, score)
    assert len(find_worse_evaluations(run_of(loss=loss, **{name: rare}))) == n


def test_a_score_at_every_record_is_of_batches_and_an_adversary_has_no_worse_ones():
    assert not find_worse_evaluations(run_of(loss=UP[::-1], accuracy=SCORE))
    rare = np.where(STEPS % 10, np.nan, SCORE)
    assert not find_worse_evaluations(run_of(loss=UP[::-1], accuracy=rare, discriminator_loss=UP))


@pytest.mark.parametrize(
    ("kind", "to_the_end", "names"),
    [("plateau", True, ["accuracy"]), ("plateau", False, None), ("slow_rise", True, None)],
)
def test_a_plateau_to_the_end_names_the_scores_that_rise_with_it(kind, to_the_end, names):
    rare = np.where(STEPS % 10, np.nan, 0.2 + STEPS / 800)
    flat = finding(kind, 100, 399, series="loss", to_the_end=to_the_end)
    (told,) = evaluations_at_plateau(run_of(accuracy=rare), [flat])
    assert told.evidence.get("scores_rising") == names


def attention(heads=4, steps=6, **changes):
    "A record whose attention is spread evenly over 32 keys, with variables of (step, layer, head)."
    ordinary = {
        "attn_entropy_rel": 0.9,
        "sink_score": 0.05,
        "sink_uniform": 1 / 32,
        "sink_position": 0.0,
        "sink_token": 7.0,
        "sink_value_ratio": 1.0,
        "length": 32.0,
        "nonfinite_count": 0.0,
        "rows": 32.0,
    }
    dims, units = ("step", "layer", "head"), {"long_name": "made", "units": "1"}
    values = {n: np.broadcast_to(changes.get(n, v), (steps, 1, heads)) for n, v in ordinary.items()}
    coords = {"step": np.arange(steps), "module": ("layer", ["attn"]), "role": ("layer", ["self"])}
    coords |= {"layer": [0], "head": np.arange(heads)}
    table = xr.Dataset({n: (dims, v.astype(float), units) for n, v in values.items()}, coords)
    run = run_of()
    run["attention"] = xr.DataTree(table)
    return run


LATE = (np.arange(6) >= 2)[:, None, None]
ONLY = (np.arange(6) == 2)[:, None, None]


@pytest.mark.parametrize(("when", "n"), [(LATE, 1), (ONLY, 0), (LATE & False, 0)])
def test_heads_collapse_or_sink_where_they_still_do_at_the_end(when, n):
    sharp = find_entropy_collapse(attention(attn_entropy_rel=np.where(when, 0.01, 0.9)))
    sinks = find_attention_sink(attention(sink_score=np.where(when, 0.9, 0.05)))
    assert [f.onset for f in sharp] == [2] * n == [f.onset for f in sinks]
    assert all(f.evidence["grew"] and f.evidence["token"] == 7 for f in sinks)


@pytest.mark.parametrize(("token", "told"), [(7.0, 7), (0.0, 0), (-1.0, None), (np.nan, None)])
def test_a_sink_names_its_token_where_it_is_known(token, told):
    (sink,) = find_attention_sink(attention(sink_score=0.9, sink_token=token))
    assert sink.evidence.get("token") == told and not sink.evidence["grew"]


def test_attention_that_is_no_number_is_told_with_its_steps():
    (bad,) = find_non_finite_attention(attention(nonfinite_count=np.where(LATE, 3.0, 0.0)))
    assert (bad.onset, bad.end, bad.evidence["count"]) == (2, 5, 48)
    assert not find_non_finite_attention(attention()) and not find_non_finite_attention(run_of())
    assert not find_attention_sink(attention(steps=0)) and not find_entropy_collapse(attention(steps=0))
    assert not find_non_finite_attention(attention(steps=0))


@pytest.mark.parametrize(
    ("changes", "interval", "start", "has_level"),
    [
        ({}, 1, 1, True),
        ({"first": 1}, 10, 10, True),  # its one record before is a mean of ten steps
        ({"first": 1}, 1, 10, False),
        ({"first": 1}, 10, 0, False),  # the first record is one step
        ({"first": 0}, 10, 10, False),
        ({"first": 1, "recovery": "none"}, 10, 10, False),
    ],
)
def test_a_spike_has_a_level_before_it_where_records_stand_for_many_steps(
    changes, interval, start, has_level
):
    spike = replace(RECORD, **changes)
    loss = np.where(np.arange(100) == spike.first, 5.0, 3.0)
    samples = Samples(start + interval * np.arange(100), loss)
    told = _finding_of(curve(new_run(make_scalars({"loss": samples})), "loss"), spike, None)
    assert (told.severity == "warning") == (has_level and spike.recovery == "fast")
    assert ("note" not in told.evidence) == has_level


@pytest.mark.parametrize(
    ("level", "beside", "moving"), [(0.01, "reward", "policy"), (3.0, "reward", ""), (0.01, "lr", "")]
)
def test_a_loss_near_zero_beside_a_reward_is_of_a_policy(level, beside, moving):
    run = run_of(loss=np.full(400, level), **{beside: np.full(400, 0.5)})
    assert objective_type(run).moving == moving


def test_a_component_without_enough_numbers_is_left_out():
    ordinary = {"text_loss": np.full(400, 2.0)}
    none, few = np.full(400, np.nan), np.where(STEPS < 10, 1.0, np.nan)
    run = run_of(**ordinary, image_loss=none, audio_loss=few, negative_loss=np.full(400, -1.0))
    assert [c.name for c in component_losses(run)] == ["loss", "text_loss"]


def test_the_rate_at_a_resume_is_that_of_the_last_attempt_over_its_step():
    steps, rates = np.r_[0:20, 10:20, 10:20], np.r_[np.full(20, 3.0), np.full(10, 2.0), np.full(10, 1.0)]
    rates[20] = 2.5  # of the attempt before at the step from which this one goes on
    restarts = np.array([20, 30], np.int64)
    whole = make_scalars({"loss": Samples(steps, rates), "lr": Samples(steps, rates)}, restarts=restarts)
    loss, lr = curve(whole, "loss"), curve(whole, "lr")
    third = attempts(loss)[-1]
    assert _rates(lr, third, loss) == (2.5, 1.0)
    for kept in (lr.segment < 2, lr.segment == 2):  # nothing logged of this attempt, or of those before
        part = lr._replace(step=lr.step[kept], value=lr.value[kept], segment=lr.segment[kept])
        assert np.isnan(_rates(part, third, loss)).all()


@pytest.mark.parametrize(
    ("kind", "shape", "n"),
    [("mlp.fc1", (64, 64), 1), ("attn.q", (64, 64), 1), ("embed", (64, 64), 0), ("mlp.fc1", (64,), 0)],
)
def test_only_matrices_of_a_block_are_too_wide_at_the_start(kind, shape, n):
    coords = {"step": [0], "param": ["w"], "kind": ("param", [kind]), "layer": ("param", [0])}
    units = {"long_name": "made", "units": "1"}
    weights = xr.Dataset({"weight_norm": (("step", "param"), [[640.0]], units)}, coords)
    scalars = make_scalars({"loss": Samples(STEPS, UP)})
    assert len(find_wide_init(new_run(scalars, attrs={"shapes": {"w": shape}}, weights=weights))) == n
    late = weights.assign_coords(step=[5])
    assert not find_wide_init(new_run(scalars, attrs={"shapes": {"w": shape}}, weights=late))


@pytest.mark.parametrize(("again", "level", "n"), [(0, None, 2), (150, 1.3, 1), (0, 1.3, 2), (0, 1.0, 1)])
def test_a_log_holds_another_run_where_the_steps_begin_anew(again, level, n):
    fall = 1 + 4 * np.exp(-np.arange(200) / 30)
    resumed = fall if level is None else np.full(200, level)
    samples = Samples(np.r_[0:200, again : again + 200], np.r_[fall, resumed])
    run = new_run(make_scalars({"loss": samples}, restarts=np.array([200], np.int64)))
    assert len(split_runs(curve(run, "loss"))) == n


LEAKED = np.r_[np.linspace(9, 0.1, 8), np.full(392, 0.002)]


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 1),
        ({"val_loss": np.full(400, 0.002)}, 1),
        ({"val_loss": np.full(400, 3.0)}, 0),  # it learned the training data by heart
        ({"loss": LEAKED / 9}, 0),  # so few answers are learned in no time
        ({"loss": LEAKED / 9, "perplexity": np.exp(LEAKED / 9)}, 1),
        ({"loss": LEAKED[8:]}, 0),  # the log begins in the middle
        ({"loss": np.r_[LEAKED[:20], np.full(380, 3.0)]}, 0),  # for some records only
        ({"loss": np.r_[LEAKED[:20], -0.1, LEAKED[21:]]}, 0),  # no likelihood goes below zero
        ({"loss": np.r_[np.full(100, 9.0), LEAKED[:300]]}, 0),  # it took its time
        ({"loss": np.full(400, 3.0)}, 0),
        ({"loss": "not logged", "mse_loss": LEAKED}, 0),
    ],
)
def test_a_text_whose_loss_is_zero_almost_at_once_leaks(changes, n):
    told = find_leak(run_of(**{"loss": LEAKED} | changes))
    assert [f.evidence["records_until"] for f in told] == [8] * n


@pytest.mark.parametrize(
    ("loss", "n"),
    [
        (np.r_[np.linspace(4, 2, 2000), np.full(4000, 2.0)], 1),
        (np.r_[np.linspace(4, 2, 7000), np.full(5000, 2.0)], 0),  # less than half of it
        (np.r_[np.linspace(4, 2, 800), np.full(1600, 2.0)], 0),  # too few steps
        (np.r_[np.linspace(0.4, 0.05, 2000), np.full(4000, 0.05)], 0),  # nowhere to go
        (np.r_[np.linspace(2.4, 2, 2000), np.full(4000, 2.0)], 0),  # it had hardly fallen before
        (np.linspace(4, 2, 6000), 0),
    ],
)
def test_a_loss_that_stood_still_to_the_end_had_fallen_and_could_fall(loss, n):
    samples = Samples(np.arange(len(loss)), loss)
    assert len(_plateau_to_the_end(curve(new_run(make_scalars({"loss": samples})), "loss"))) == n


@pytest.mark.parametrize(
    ("changes", "restart", "n"),
    [
        ({}, None, 1),
        ({"loss": np.full(150, 3.0)}, None, 0),  # too short to judge
        ({}, 350, 0),  # restarts tell of their changes
        ({"loss": np.full(400, np.nan)}, None, 0),
    ],
)
def test_a_setting_is_judged_where_the_loss_around_it_is_long_and_of_one_attempt(changes, restart, n):
    series = {"loss": np.full(400, 3.0), "batch_size": np.where(STEPS < 100, 32.0, 64.0)} | changes
    samples = {name: Samples(STEPS[: len(v)], v) for name, v in series.items()}
    restarts = np.array([] if restart is None else [restart], np.int64)
    assert len(find_setting_effects(new_run(make_scalars(samples, restarts=restarts)))) == n


@pytest.mark.parametrize(
    ("kind", "peak", "is_told"),
    [("slow_rise", 150, False), ("slow_rise", 350, True), ("slow_rise", None, True), ("plateau", 150, True)],
)
def test_a_slow_rise_within_a_change_is_the_change(kind, peak, is_told):
    change = finding("environment_change", 100, 300, effect="higher", changed="lr", settings=["lr"])
    rise = finding(kind, 120, 200, **({} if peak is None else {"peak_step": peak}))
    told = changes_and_events(run_of(), [change, rise])
    assert [f.kind for f in told] == ["environment_change", *[kind] * is_told]


@pytest.mark.parametrize(
    ("series", "change", "end"),
    [
        ({}, {}, 199),
        ({"lr": np.where(STEPS < 100, 1.0, 9.0)}, {}, 100),  # it stayed
        ({}, {"count": 2}, 100),
        ({}, {"onset": None}, 100),
        ({"lr": np.full(400, np.nan)}, {}, 100),
        ({"loss": np.full(400, np.nan)}, {}, 100),
    ],
)
def test_a_jump_of_the_rate_that_was_taken_back_has_an_end(series, change, end):
    run = run_of(**{"lr": np.where((STEPS >= 100) & (STEPS < 200), 9.0, 1.0)} | series)
    jump = finding("lr_jump", 100, count=2) if "count" in change else finding("lr_jump", 100)
    (told,) = changes_and_events(run, [jump.with_(onset=None) if "onset" in change else jump])
    assert told.end == end


@pytest.mark.parametrize(
    ("weight", "n", "told"),
    [(0.3, 3000, 1), (0.2, 3000, 0), (0.3, 240, 0)],  # strong and certain; too weak; by chance
)
def test_a_loss_follows_its_lengths_strongly_and_not_by_chance(weight, n, told):
    noise = np.random.default_rng(3).normal(size=(2, n))
    samples = {"loss": 3 + noise[0] + weight * noise[1], "tokens_per_step": 1000 + 300 * noise[1]}
    run = new_run(make_scalars({name: Samples(np.arange(n), v) for name, v in samples.items()}))
    assert len(find_length_bias(run)) == told


@pytest.mark.parametrize(
    ("validation", "n"),
    [
        (np.full(600, 2.0), 1),
        (np.where(np.isin(np.arange(600), [250, 350]), 2.0, np.nan), 0),  # two evaluations
        (np.where(np.arange(600) > 310, 2.0, np.nan), 0),  # none before
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_shift_needs_a_validation_on_either_side(validation, n, sign):
    rng = np.random.default_rng(0)
    loss = 2 + 0.5 * (np.arange(600)[::sign] >= 300) + rng.normal(0, 0.01, 600)
    samples = {"loss": Samples(np.arange(600), loss), "val_loss": Samples(np.arange(600), validation)}
    assert len(find_level_shift(new_run(make_scalars(samples)))) == n


@pytest.mark.parametrize(
    ("skipped", "loss", "is_whole"), [(1, False, True), (0, False, False), (1, True, False)]
)
def test_a_log_of_skipped_steps_alone_is_of_a_run_that_skipped_all(skipped, loss, is_whole):
    scale = 2.0 ** np.maximum(16 - np.maximum(STEPS - 100, 0) // 40, 4)
    series = {"loss_scale": scale, "skipped": np.full(400, float(skipped))}
    series |= {"loss": np.full(400, 3.0)} if loss else {}
    run = new_run(make_scalars({name: Samples(STEPS, v) for name, v in series.items()}))
    (told,) = find_loss_scale_collapse(run)
    assert (told.evidence["all_steps_skipped"], told.severity == "error") == (is_whole, is_whole)


@pytest.mark.parametrize("norm", [np.ones(2), np.zeros(400)])
def test_a_gradient_norm_without_a_range_explodes_nowhere(norm):
    assert find_grad_norm_explosion(run_of(grad_norm=norm)) == []


@pytest.mark.parametrize("n", [30, 400])
def test_few_records_show_no_number_format(n):
    loss = np.float32(3 + 0.5 * np.random.default_rng(0).normal(size=n))
    coarse = ((loss.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    assert len(find_quantized_loss(run_of(loss=coarse.astype(float)))) == (n == 400)
    assert not find_quantized_loss(run_of(loss=np.full(n, 0.333984375)))  # one number of bf16


ENDED = np.where(STEPS < 200, 3.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["leak_suspected"]),
        ({"grad_norm": np.where(STEPS < 200, 1.0, np.nan)}, ["non_finite"]),
        ({"grad_norm": np.ones(400)}, ["leak_suspected"]),
        ({"loss": np.where(STEPS == 100, 0.0, ENDED)}, []),  # often zero: of a rare event
        ({"loss": np.where(STEPS < 397, 3.0, 0.0)}, []),  # a few records
        ({"loss": ENDED / 100}, []),  # it was small before
        ({"loss": np.where(STEPS < 3, 3.0, 0.0)}, []),  # too little before
        ({"loss": np.full(400, 3.0)}, []),
    ],
)
def test_a_loss_that_is_zero_to_the_end_was_no_small_number_before(changes, kinds):
    told = find_zero_loss(run_of(**{"loss": ENDED} | changes))
    assert [f.kind for f in told] == kinds and all(f.onset == 200 for f in told)


@pytest.mark.parametrize(("level", "sd", "severity"), [(10.8, 3.0, "warning"), (3.0, 0.15, "info")])
def test_a_flat_loss_near_a_guess_is_judged_by_longer_windows(level, sd, severity):
    loss = level + sd * np.random.default_rng(0).normal(size=400)
    assert [f.severity for f in find_not_learning(run_of(loss=loss))] == [severity]


@pytest.mark.parametrize(("name", "n"), [("loss", 1), ("mse_loss", 0)])
def test_a_high_loss_in_nats_that_fell_by_hardly_a_fiftieth_did_not_learn(name, n):
    loss = np.linspace(10, 9.85, 400) + 1e-3 * np.random.default_rng(0).normal(size=400)
    run = new_run(make_scalars({name: Samples(STEPS, loss)}))
    assert [f.kind for f in find_not_learning(run)] == ["not_learning"] * n


@pytest.mark.parametrize(("n", "told"), [(400, 1), (40, 0)])
def test_a_memory_grows_over_records_enough(n, told):
    assert len(find_memory_growth(run_of(memory=np.linspace(10, 20, n)))) == told
