"""Each limit decides: what is found a little below it and a little above, where nothing else would decide.

The numbers here are those of the runs, not of the table: a limit halved or doubled fails its row.
"""

import numpy as np
import pytest
import xarray as xr

from stabilitylab import compare_runs, diagnose
from stabilitylab.detect.context import loss_span, run_context
from stabilitylab.detect.layers.activations import find_activation_explosion
from stabilitylab.detect.layers.growth import first_crossings
from stabilitylab.detect.layers.parameters import (
    find_misaligned_shape,
    find_update_rms_excess,
    find_wide_init,
)
from stabilitylab.detect.limits import LIMITS
from stabilitylab.detect.loss.divergence import find_divergence, find_slow_rise, smoothed_shape
from stabilitylab.detect.loss.evaluations import find_overfitting, is_smooth
from stabilitylab.detect.loss.spikes import find_loss_spikes
from stabilitylab.detect.loss.trend import find_leak, find_level_shift, find_not_learning
from stabilitylab.detect.metrics import find_grad_norm_explosion, find_throughput_drop
from stabilitylab.detect.relations import layer_leads
from stabilitylab.detect.restarts import find_changed_settings, find_resumed_segments
from stabilitylab.run.curves import Curve, loss_curve
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars


def run_of(attrs=None, groups=None, **series):
    "A record of series, each as values or as (steps, values)."
    pairs = {n: x if isinstance(x, tuple) else (np.arange(len(x)), x) for n, x in series.items()}
    samples = {n: Samples(np.asarray(step), np.asarray(x, float)) for n, (step, x) in pairs.items()}
    return new_run(make_scalars(samples) if samples else None, attrs=attrs or {}, **(groups or {}))


def noise(n, sd=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sd, n)


def words(findings, *names):
    "What the one finding says under these names; None where there is none."
    if not findings:
        return None
    values = tuple(f"{findings[0].severity}" if n == "severity" else findings[0].evidence[n] for n in names)
    return values[0] if len(values) == 1 else values


def columns(dims, labels, **values):
    "A group of a record."
    units = {"long_name": "made", "units": "1"}
    first = next(iter(values.values()))
    coords = {"step": np.arange(len(first)), dims: labels, "kind": (dims, ["block"] * len(labels))}
    coords["layer"] = (dims, np.arange(len(labels)))
    return xr.Dataset({n: (("step", dims), np.asarray(x, float), units) for n, x in values.items()}, coords)


def spike(height, sd=0.01, records=6, level=2.0, at=300, n=600, seed=0):
    "The severity of high records in a level loss with noise."
    loss = level + noise(n, sd, seed)
    loss[at : at + records] = level + height
    found = [f for f in find_loss_spikes(run_of(loss=loss)) if f.onset <= at <= f.end]
    return found[0].severity if found else None


def grad_norm(factor, sd=0.3):
    norm = np.exp(noise(400, sd))
    norm[300] = factor
    return words(find_grad_norm_explosion(run_of(grad_norm=norm)), "severity")


def grad_norm_events(apart):
    norm = np.exp(noise(400, 0.1))
    norm[[300, 300 + apart]] = 50
    (found,) = find_grad_norm_explosion(run_of(grad_norm=norm))
    return len(found.evidence["steps"])


def printed(decimals):
    "Three last digits above a level that is printed with so many decimals."
    digit = 10.0**-decimals
    loss = np.full(400, 100 * digit)
    loss[300:306] = 103 * digit
    return bool(find_loss_spikes(run_of(loss=np.round(loss, decimals))))


def recovery(steps):
    "The word for a spike that came back after so many steps, ten between two records."
    step = np.arange(2000) * 10
    loss = 2 + noise(2000, 0.01) + 1.0 * ((step >= 8000) & (step < 8000 + steps))
    return words([f for f in find_loss_spikes(run_of(loss=(step, loss))) if f.onset == 8000], "recovery")


def overfitting(rise, measured=40, sd=0.0):
    "Training falls throughout; validation ends so much above its best, which is half-way."
    half = measured // 2
    val = np.r_[np.linspace(2, 1, half), np.full(measured - half, 1.0 + rise)] + noise(measured, sd).clip(
        -1.5 * sd, 1.5 * sd
    )
    step = np.linspace(0, 399, measured).astype(int)
    return bool(find_overfitting(run_of(loss=np.linspace(3, 1, 400), val_loss=(step, val))))


def late_validation(measured):
    "Validation is best at the first measurement and rises from there."
    val = (np.linspace(0, 399, measured).astype(int), 1 + np.arange(measured) * 0.5)
    return bool(find_overfitting(run_of(loss=np.linspace(3, 1, 400), val_loss=val)))


def divergence(n=None, level=1.0, rise=3.0):
    "A loss that falls to a level and then rises for good."
    n = n or 400
    fall, up = n // 2, n - n // 2
    loss = np.r_[np.linspace(3 * level, level, fall), level * (1 + rise * np.linspace(0.2, 1, up))]
    return words(find_divergence(run_of(loss=loss)), "severity")


def flat(n):
    return [f.kind for f in find_not_learning(run_of(loss=3 + noise(n, 0.0001)))] == ["not_learning"]


def falls_little(start, share=0.015):
    loss = start * np.linspace(1, 1 - share, 400)
    return [f.kind for f in find_not_learning(run_of(loss=loss))] == ["not_learning"]


def slow_stretches(apart, count=2):
    "Stretches of slow steps; how many findings they are."
    times = np.ones(200 + count * (60 + apart))
    for i in range(count):
        at = 150 + i * (60 + apart)
        times[at : at + 60] = 4
    return len(find_throughput_drop(run_of(step_time=times)))


def other_lr(gap):
    "A learning rate that is another one after a restart so many steps later."
    scalars = make_scalars(
        {
            "lr": Samples(
                np.r_[np.arange(0, 100, 2), 98 + gap + np.arange(0, 100, 2)], np.repeat([1.0, 0.5], 50)
            )
        }
    )
    segment = np.repeat([0, 1], 50)
    return bool(find_changed_settings(new_run(scalars.assign_coords(segment=("step", segment)))))


def shift(windows=None, ramp=1, rise=0.5, n=4000):
    "A training loss that rises over `ramp` records and stays for some windows of 200; validation stays."
    i, window = np.arange(n), int(0.05 * n)
    up = np.clip((i - 1000) / ramp, 0, 1)
    if windows is not None:
        up *= i < 1000 + windows * window
    val = (np.arange(0, n, 50), np.full(n // 50, 2.0))
    return len(find_level_shift(run_of(loss=2 + rise * up + noise(n, 0.005), val_loss=val)))


def low_single(peak):
    "One high record in a loss that began at ten."
    loss = np.r_[np.geomspace(10, 0.3, 300), np.full(300, 0.3)] + noise(600, 0.003)
    loss[450] = peak
    return words([f for f in find_loss_spikes(run_of(loss=loss)) if f.onset == 450], "severity")


def slow_rise(share):
    i = np.arange(3000)
    loss = 2 + noise(3000, 0.01) + 2 * share * np.clip((i - 1000) / 500, 0, 1)
    return words(find_slow_rise(run_of(loss=loss)), "severity")


def runs_away(times):
    "The loss of an adversary that ends at so many times its start."
    loss = 1 + noise(600, 0.01) + (times - 1) * np.clip((np.arange(600) - 300) / 50, 0, 1)
    found = diagnose(run_of(loss=loss, discriminator_loss=np.ones(600))).of("divergence")
    return words(found, "severity")


def explosion(ratio):
    values = np.ones((60, 2))
    values[40:, 1] = ratio
    run = run_of(groups={"activations": columns("module", ["a", "b"], absmax=values)})
    return words(find_activation_explosion(run), "severity")


@pytest.mark.parametrize(
    ("large", "explodes"), [([96], False), ([60, 96], False), ([96, 97], True), ([159], True)]
)
def test_one_record_of_large_gradients_is_a_small_batch_and_no_explosion(large, explodes):
    gradient = np.full((160, 1), 1e-4)
    gradient[large] *= 15
    group = columns("module", ["out"], absmax=np.ones((160, 1)), grad_absmax=gradient)
    assert bool(find_activation_explosion(run_of(groups={"activations": group}))) is explodes


def test_logits_that_grow_by_learning_do_not_explode():
    logits = 0.16 * np.exp2((np.arange(60) - 20) / 4).clip(1, 40)
    for scale, onsets in ((1, []), (2, [34])):
        run = run_of(groups={"activations": columns("module", ["out"], absmax=scale * logits[:, None])})
        assert [f.onset for f in find_activation_explosion(run)] == onsets


def leak(start):
    loss = np.r_[start, 0.5, np.full(98, 0.001)]
    return bool(find_leak(run_of(loss=loss)))


def climbs(turns):
    "A loss that climbs from its first record with this much noise beside the climb."
    loss = 2 + np.linspace(0, 2, 600) + noise(600, turns)
    return words(diagnose(run_of(loss=loss)).of("divergence"), "severity")


def bad_batches(count):
    loss = 2 + noise(6000, 0.005)
    loss[200 : 200 + 60 * count : 60] += 0.3
    (found,) = [f for f in find_loss_spikes(run_of(loss=loss)) if f.severity == "info"]
    return found.evidence["count"], len(found.evidence["steps"])


def spikes(count):
    "So many spikes, each of which comes down over some fifty records."
    loss = 2 + noise(6000, 0.005)
    for i in range(count):
        loss[200 + 150 * i : 350 + 150 * i] += (1 + 0.01 * i) * np.exp(-np.arange(150) / 10)
    return len(find_loss_spikes(run_of(loss=loss)))


def loss_scale(halvings, last=None):
    "A scale halved so often in a row, or at long intervals down to `last`."
    scale = 2.0 ** np.r_[np.full(100, 16), 16 - np.arange(1, halvings + 1), np.full(100, 16 - halvings)]
    if last is not None:
        scale = last * 2.0 ** np.repeat(np.arange(8, -1, -1), 60)
    return words(diagnose(run_of(loss_scale=scale)).of("loss_scale_collapse"), "severity")


def grid(values):
    "A loss rounded to bf16 that takes so many values."
    loss = 4 + np.resize(np.arange(values), 400) * 2**-5
    return words(diagnose(run_of(loss=loss)).of("quantized_loss"), "severity")


def shared_spikes(n):
    "Three of eight spikes at the same records of two runs: the longer the runs, the less likely by chance."
    own = {"a": np.linspace(200, n - 100, 5).astype(int), "b": np.linspace(250, n - 150, 5).astype(int) + 13}
    runs = {}
    for seed, (name, at) in enumerate(own.items()):
        loss = 2 + noise(n + 32, 0.01, seed).clip(-0.02, 0.02)
        loss[np.r_[at, 500, 900, 1500]] += 0.5
        runs[name] = run_of(loss=loss)
    return compare_runs(runs).kinds == ["data_driven_spike"]


def size(parameters):
    return run_context(run_of(attrs={"shapes": {"w": [parameters // 1000, 1000]}}, loss=np.ones(20)), []).size


def early(at):
    "A value that is six times the first ones until `at`, then 30 times."
    values = np.ones((1000, 1))
    values[at:] = 6
    values[500:] = 30
    return int(first_crossings(values)[0][0])


def update_rms(peak, entries=8192, crossings=1):
    rms = np.ones((3000, 1))
    rms[100 : 100 + 2 * crossings : 2] = peak
    group = columns("param", ["w"], update_rms=rms)
    run = run_of(attrs={"shapes": {"w": [entries]}, "betas": [0.9, 0.95]}, groups={"optimizer": group})
    found = find_update_rms_excess(run)
    return len(found[0].evidence["steps"]) if found else 0


@pytest.mark.parametrize(("whole", "severity"), [(1.0, "info"), (9.0, "warning")])
def test_gradients_behind_a_layer_that_begins_at_zero_grow_without_harm(whole, severity):
    "A diffusion transformer learned: 13 times the early gradient of its first layer, of a norm that shrank."
    late = np.arange(60)[:, None] >= 40
    activations = columns("module", ["patch_in"], grad_absmax=1e-5 * np.where(late, 14.0, 1.0))
    gradients = columns("param", ["head.weight"], grad_norm=np.where(late, whole, 1.0))
    run = run_of(groups={"activations": activations, "gradients": gradients})
    assert [(f.onset, f.severity) for f in find_activation_explosion(run)] == [(40, severity)]


def test_the_ceiling_of_rms_is_that_of_the_step_not_of_the_row():
    group = columns("param", ["w"], update_rms=np.full((50, 1), 3.0))
    group = group.assign_coords(step=1000 + 10 * group.step)
    run = run_of(attrs={"shapes": {"w": [8192]}, "betas": [0.9, 0.95]}, groups={"optimizer": group})
    (finding,) = find_update_rms_excess(run)
    assert finding.evidence["ceiling"] == pytest.approx(0.05**-0.5)


def test_a_ratio_above_its_ceiling_is_not_an_excess():
    "Adam with weight decay: `RMS_t reached 2.54 (its ceiling is 1.00)` at the first step of a healthy run."
    rms = np.ones((50, 1))
    rms[0] = 2.54
    attrs = {"shapes": {"w": [8192]}, "betas": [0.9, 0.95]}
    assert not find_update_rms_excess(
        run_of(attrs=attrs, groups={"optimizer": columns("param", ["w"], update_rms=rms)})
    )
    rms[40] = 3.0
    (finding,) = find_update_rms_excess(
        run_of(attrs=attrs, groups={"optimizer": columns("param", ["w"], update_rms=rms)})
    )
    assert finding.onset == 40 and finding.evidence["peak"] == 3.0 < finding.evidence["ceiling"]


def lead(steps, crossings=1, n=400):
    "A spike of the loss so many steps after the last of `crossings` of the limit of RMS_t."
    rms = np.ones((n, 1))
    rms[300 - 20 * np.arange(crossings)] = 4
    loss = 2 + noise(n, 0.01)
    loss[300 + steps : 320 + steps] += 2
    group = columns("param", ["w"], update_rms=rms)
    run = run_of(
        attrs={"shapes": {"w": [8192]}, "betas": [0.9, 0.95]}, groups={"optimizer": group}, loss=loss
    )
    found = layer_leads(run, [*find_loss_spikes(run), *find_update_rms_excess(run)])
    return next(f.evidence.get("lead_steps") for f in found if f.kind == "update_rms_excess")


def side(entries, other=512):
    return bool(find_misaligned_shape(run_of(attrs={"shapes": {"w": [other, entries]}})))


def wide_modules(count):
    names = [f"blocks.{i}.w" for i in range(count)]
    group = columns("param", names, weight_norm=np.full((2, count), 100.0))
    group["kind"] = ("param", ["attn.q"] * count)
    (found,) = find_wide_init(
        run_of(attrs={"shapes": {n: [64, 64] for n in names}}, groups={"weights": group})
    )
    return len(found.modules), found.evidence.get("n", count)


def width(ratio):
    "Weights so many times as wide as the published rule."
    norm = ratio * np.sqrt(2 / (5 * 64)) * 64
    group = columns("param", ["w"], weight_norm=np.full((2, 1), norm))
    group["kind"] = ("param", ["attn.q"])
    return bool(find_wide_init(run_of(attrs={"shapes": {"w": [64, 64]}}, groups={"weights": group})))


def attention(**values):
    shape = (3, 2, 4)
    usual = {"attn_logit_max": 5, "attn_entropy_rel": 0.8, "sink_score": 0.1, "sink_uniform": 0.08}
    usual |= {"sink_position": 0, "sink_token": 7, "sink_value_ratio": 1, "nonfinite_count": 0, "rows": 64}
    units = {"long_name": "made", "units": "1"}
    full = {n: np.broadcast_to(np.asarray(v, float), shape) for n, v in (usual | values).items()}
    data = {n: (("step", "layer", "head"), v, units) for n, v in full.items()}
    data["length"] = ("step", "layer"), np.full(shape[:2], 64.0), units
    layers = {"stream_first": 3, "stream_second": 3, "stream_third": 2, "stream_median": 0.1}
    layers |= {"stream_position": 0, "stream_token": 7, "stream_channel": 1}
    for name, value in (layers | {n: v for n, v in values.items() if n in layers}).items():
        data[name] = ("step", "layer"), np.full(shape[:2], float(value)), units
    coords = {"step": [0, 10, 20], "module": ("layer", ["a", "b"]), "role": ("layer", ["self", "self"])}
    return diagnose(new_run(attention=xr.Dataset(data, coords))).kinds


def massive(value, median=0.1):
    return "massive_activation" in attention(stream_first=value, stream_median=median)


def logged_logit(peak):
    series = np.r_[np.full(50, 10.0), np.geomspace(10, peak, 50), np.full(50, peak)]
    return words(diagnose(run_of(attn_logit_max=series)).of("attention_logit_growth"), "severity", "passed")


def log_z(peak):
    series = np.r_[np.full(50, 1.0), np.linspace(1, peak, 50), np.full(50, peak)]
    return bool(diagnose(run_of(log_z=series)).of("output_logit_drift"))


def layer(cost):
    readings = [{"module": "h.0", "kind": "block", "cost": cost, "loss": 2.3, "grad_share": 0.1}]
    return bool(diagnose(new_run(attrs={"layer_readings": readings})).of("layer_ignored"))


def turns(window):
    "A running mean over so many records of white noise; 1 is the noise itself."
    return is_smooth(np.convolve(noise(4000), np.ones(window) / window, "valid"))


def short_mean(n):
    return is_smooth(np.cumsum(noise(n, 1, 3)))


def restarts(count):
    "So many runs in one log, each from its first step."
    scalars = make_scalars({"loss": Samples(np.arange(20 * (count + 1)), np.ones(20 * (count + 1)))})
    step, segment = np.tile(np.arange(20), count + 1), np.repeat(np.arange(count + 1), 20)
    return len(find_resumed_segments(new_run(scalars.assign_coords(step=step, segment=("step", segment)))))


def starts(step):
    "Whether a log that begins at this step shows the start of its run."
    return loss_span(run_of(loss=(step + np.arange(200), np.ones(200)))).shows_start


def window_of(n):
    return smoothed_shape(loss_curve(run_of(loss=np.ones(n)))).window


DECIDES = {  # limits -> what is looked at, {quantity: what is found}
    "grad_sigma": (grad_norm, {np.exp(1.3): None, np.exp(2.7): "info"}),
    "threefold": (lambda x: grad_norm(x, 0.02), {2.5: None, 4: "info"}),
    "grad_warning": (grad_norm, {700: "info", 1500: "warning"}),
    "near_records": (grad_norm_events, {8: 1, 15: 2}),
    "spike_sigma": (lambda x: spike(x / 100) is None, {5: True, 11: False}),
    "tail_sigma": (lambda x: spike(0.02 * x, 0.02), {20: "warning"}),
    "bump_sigma": (lambda x: spike(0.005 * x, 0.005), {20: "info", 40: "warning"}),
    "noise_floor": (lambda x: spike(x, 1e-5), {0.02: None, 0.045: "info"}),
    "most_decimals": (printed, {6: False, 9: True}),
    "outlier_records": (lambda n: spike(0.4, records=n), {2: "info", 3: "warning"}),
    "spike_height": (lambda x: spike(x, records=1), {0.4: "info", 0.7: "warning"}),
    "fast_steps": (recovery, {150: "fast", 300: "slow"}),
    "slow_steps": (recovery, {2000: "slow", 4500: "partial"}),
    "trend_sigma": (lambda x: overfitting(x / 10, 400, 0.1), {1.5: False, 4.5: True}),
    "level_share": (lambda x: overfitting(x, 400), {0.035: False, 0.08: True}),
    "median_records": (late_validation, {3: False, 5: True}),
    "least_records": (divergence, {8: None, 14: "error"}),
    "most_nats": (lambda x: divergence(level=x), {15: "error", 30: "warning"}),
    "least_long": (flat, {40: False, 60: True}),
    "hardly_loss": (falls_little, {4: False, 7: True}),
    "hardly_share": (lambda x: falls_little(8, x), {0.015: True, 0.03: False}),
    "long_records": (short_mean, {70: False, 150: True}),
    "most_alike": (lambda n: slow_stretches(200, n), {3: 3, 5: 1}),
    "gap_records": (other_lr, {5: True, 9: False}),
    "look_windows": (shift, {3: 0, 5: 1}),
    "abrupt_share": (lambda x: shift(ramp=x), {1: 1, 15: 1, 60: 0}),
    "slight_share": (low_single, {0.8: "info", 1.5: "warning"}),
    "rise_share": (slow_rise, {0.02: "info", 0.045: "warning"}),
    "tenfold": (runs_away, {7: "info", 15: "error"}),
    "explosion_factor": (lambda x: explosion(x) is None, {7: True, 15: False}),
    "huge_factor": (explosion, {70: "warning", 150: "error"}),
    "leak_language": (leak, {1.5: False, 3: True}),
    "climb_rank": (climbs, {0.01: "info", 0.4: "error"}),
    "most_steps": (bad_batches, {60: (60, 50)}),
    "most_reported": (spikes, {15: 15, 30: 21}),
    "halvings": (loss_scale, {3: "info", 5: "error"}),
    "scale_floor": (lambda x: loss_scale(0, x), {2: "info", 1: "error"}),
    "grid_values": (grid, {7: "info", 15: "warning"}),
    "shared_chance": (shared_spikes, {1900: False, 2700: True}),
    "large_model": (size, {5_000_000_000: "", 9_000_000_000: "large"}),
    "small_model": (size, {200_000_000: "small", 400_000_000: ""}),
    "early_records": (early, {70: -1, 150: 500}),
    "update_rms": (update_rms, {1.9: 0, 3: 1}),
    "update_entries": (lambda n: update_rms(4, n), {3000: 0, 6000: 1}),
    "most_crossings": (lambda n: update_rms(4, crossings=n), {1200: 1000}),
    "rms_lead": (lead, {6: 6, 12: None}),
    "rms_chance": (lambda n: lead(3, n), {1: 3, 4: None}),
    "aligned_sides": (side, {100: True, 104: False}),
    "tile_side": (lambda entries: side(100, entries), {32: False, 128: True}),
    "most_modules": (wide_modules, {12: (8, 12)}),
    "twofold": (width, {1.5: False, 3: True}),
    "massive_value": (lambda x: massive(x, 0.01), {70: False, 150: True}),
    "massive_ratio": (lambda x: massive(1500, 1500 / x), {700: False, 1500: True}),
    "attn_logit_clip": (lambda x: logged_logit(x) is not None, {70: False, 150: True}),
    "attn_logit_high": (logged_logit, {700: ("info", 100), 1500: ("warning", 1000)}),
    "attn_logit_lost": (lambda x: logged_logit(x)[1], {7000: 1000, 15000: 10000}),
    "log_z_far": (log_z, {40: False, 70: True}),
    "entropy_low_rel": (
        lambda x: "attention_entropy_collapse" in attention(attn_entropy_rel=x),
        {0.035: True, 0.07: False},
    ),
    "sink_epsilon": (
        lambda x: "attention_sink" in attention(sink_score=0.08 + 0.92 * x),
        {0.2: False, 0.45: True},
    ),
    "ignored_cost": (layer, {0.0007: True, 0.0015: False}),
    "smooth_turns": (turns, {1: False, 8: True}),
    "short_records": (starts, {15: True, 30: False}),
    "window_most": (window_of, {20_000: 400, 60_000: 500}),
}


@pytest.mark.parametrize("name", DECIDES)
def test_a_limit_decides(name):
    look, expected = DECIDES[name]
    assert {quantity: look(quantity) for quantity in expected} == expected


def test_the_table_names_limits():
    assert set(DECIDES) <= set(LIMITS)
    assert isinstance(loss_curve(run_of(loss=np.ones(20))), Curve)
