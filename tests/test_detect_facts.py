"""The facts of a record and the ranks that differ, on small arrays whose answer is known by construction.

Each test changes one number of an ordinary record and holds what is told of it, and what is not.
"""

import numpy as np
import pytest
import xarray as xr

from stabilitylab.detect.context import scales_its_loss
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.facts.evidence import _step_of_test, evidence
from stabilitylab.detect.findings import Finding
from stabilitylab.detect.likely_cause import ranked_causes
from stabilitylab.detect.ranks import find_odd_rank
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars

N = 60
MODULES = {"embed": "embed", "q": "attn.q", "fc1": "mlp.fc1", "head": "lm_head"}
SHAPES = {"embed.weight": (10, 4), "q.weight": (4, 4), "fc1.weight": (4, 4), "head.weight": (10, 4)}
UNITS = {"long_name": "made", "units": "1"}


def table(label, variables, step=None):
    "A group of a record: variables of (step, module or param)."
    names = list(MODULES) if label == "module" else list(SHAPES)
    step = np.arange(len(next(iter(variables.values())))) if step is None else step
    coords = {"step": step, label: names, "kind": (label, list(MODULES.values())), "layer": (label, [0] * 4)}
    return xr.Dataset({name: (("step", label), v, UNITS) for name, v in variables.items()}, coords)


def ordinary(n=N):
    "Arrays of an ordinary record, by group: a steady loss at ln(10) / 2, and batches that differ."
    each, batch = np.ones((n, 4)), 1 + 0.01 * (np.arange(n) % 7)[:, None]
    return {
        "scalars": {"loss": np.full(n, np.log(10) / 2), "lr": np.full(n, 0.001)},
        "activations": {
            "absmax": 2 * each,
            "in_absmax": batch * each,
            "in_rms": batch * each,
            "nonfinite_count": 0 * each,
        },
        "gradients": {"grad_norm": each.copy()},
        "weights": {"weight_norm": 5 * each, "nonfinite_count": 0 * each},
        "updates": {"update_norm": 0.01 * each, "update_ratio": 0.002 * each},
    }


def record_of(data, step=None, **attrs):
    "The record of such arrays."
    step = np.arange(len(data["scalars"]["loss"])) if step is None else step
    groups = {
        name: table("module" if name == "activations" else "param", variables, step)
        for name, variables in data.items()
        if name != "scalars"
    }
    scalars = make_scalars({name: Samples(step, np.asarray(v)) for name, v in data["scalars"].items()})
    return new_run(scalars, attrs={"shapes": SHAPES, "eps": 1e-8, "optimizer": "AdamW"} | attrs, **groups)


def facts_of(data, *names, step=None, **attrs):
    "Those facts of the record, the values with three digits."
    facts = evidence(record_of(data, step, **attrs))
    return [(float(f"{facts[name][0]:.3g}"), facts[name][1]) if name in facts else None for name in names]


@pytest.mark.parametrize("level", [0.0, -1.0])
@pytest.mark.parametrize("group", ["scalars", "gradients", "weights", "updates"])
def test_numbers_that_are_zero_or_negative_break_no_fact(group, level):
    "`diagnose` of a run whose loss fell to exactly 0 ended in a ZeroDivisionError."
    for first in (0, 10, 30, 50):
        data = ordinary()
        data[group] = {name: values.copy() for name, values in data[group].items()}
        for values in data[group].values():
            values[first:] = level
        facts = evidence(record_of(data))
        assert "end_over_best" not in facts or facts["end_over_best"][0] > 0


def test_a_momentum_next_to_one_is_the_cause_and_not_a_batch():
    "SGD with a momentum of 0.999: `A bad batch at step 140: its labels are the suspect`."
    data, loss = ordinary(200), np.full(200, 1.0) + 0.01 * np.sin(np.arange(200))
    loss[[60, 90, 120, 150]] = 9.0
    data["scalars"]["loss"] = loss
    causes = {}
    for momentum, dampening in ((0.9, 0.0), (0.999, 0.0), (0.999, 0.9)):
        run = record_of(data, optimizer=["SGD"], momentum=momentum, dampening=dampening)
        ranked = ranked_causes(evidence(run, diagnose(run)))
        causes[momentum, dampening] = [cause.id for cause in ranked]
        assert "bad_labels" not in causes[momentum, dampening]
    assert causes[0.999, 0.0][0] == "momentum_too_high"
    assert [ids for ids in causes.values() if "momentum_too_high" in ids] == [causes[0.999, 0.0]]


def test_a_rate_far_too_high_comes_before_a_recurrence_that_is_not_clipped():
    "A GRU at 50 times its rate: `Gradients explode through the recurrence`, beside the rate at 7 to 7."
    facts = {"recurrent": 1.0, "grad_jumps": 13.0, "lone_event": 0.0, "early_update": 0.6, "early_rise": 3.3}
    for rate, first in ((0.5, "rate_too_high"), (0.01, "no_clipping")):
        rates = {"rate": rate, "adam_rate": rate, "rate_excess": rate / 0.02}
        numbers = {name: (value, 0) for name, value in (facts | rates).items()}
        assert ranked_causes(numbers)[0].id == first


def test_an_ordinary_record_has_no_events_and_its_levels():
    facts = evidence(record_of(ordinary()))
    assert not {"loss_jump", "input_nonfinite", "scaled", "first_nonfinite", "skipped"} & set(facts)
    told = {name: round(value, 6) for name, (value, _) in facts.items()}
    assert told["fall"] == 0 and told["nonfinite"] == 0 and told["embeds"] == 1 and told["recurrent"] == 0
    assert told["first_over_chance"] == 0.5 and told["end_near_chance"] == 0.5 and told["logit_std"] == 0
    assert told["zero_grads"] == 0 and told["weight_moved"] <= 0 and told["grad_jumps"] == 0
    assert told["same_inputs"] == 0 and told["rate_at_start"] == 1 and told["early_update"] == 0.002
    assert told["update_per_rate"] == pytest.approx(0.02 / (0.001 * np.sqrt(112)), rel=1e-4)


def test_a_batch_that_is_served_again_is_counted_and_an_input_of_zeros_is_none():
    data = ordinary()
    data["activations"]["in_rms"][30:36] = 1.5
    assert facts_of(data, "same_inputs") == [(5, 30)]
    data["activations"]["in_rms"][:] = 0
    assert facts_of(data, "same_inputs") == [(0, 0)]


def test_the_largest_input_is_set_against_those_before_it_from_the_twenty_first_on():
    data = ordinary()
    data["activations"]["in_absmax"][40] = 8.48
    peak, jump = facts_of(data, "input_peak", "input_jump")
    assert peak == (8.0, 40) and jump == (8.23, 40)
    short = {group: {name: v[:20] for name, v in variables.items()} for group, variables in data.items()}
    assert facts_of(short, "input_peak") == [None]


@pytest.mark.parametrize(
    ("group", "name", "at", "value", "expected"),
    [
        ("activations", "absmax", 0, 2, (3, 40)),  # nothing else is wrong
        ("weights", "nonfinite_count", 39, 1, None),  # the weights were broken first
        ("activations", "absmax", 39, 2e4, None),  # values had grown before
        ("scalars", "loss", 30, np.nan, None),  # the loss was lost before
    ],
)
def test_an_input_that_is_no_number_is_told_where_all_was_well_before(group, name, at, value, expected):
    data = ordinary()
    data["activations"]["nonfinite_count"][40:, 0] = 3
    data[group][name][at] = value
    assert facts_of(data, "input_nonfinite") == [expected]
    if name != "loss":
        del data[group][name]
        assert facts_of(data, "input_nonfinite") == [None]


@pytest.mark.parametrize(
    ("later", "inputs", "expected"),
    [
        (2, np.nan, (500, 40)),  # only that batch is out of range
        (500, np.nan, None),  # the module itself changed
        (2, 1, None),  # what came in was recorded and ordinary
    ],
)
def test_an_output_of_the_first_module_out_of_range_for_one_step_is_its_batch(later, inputs, expected):
    data = ordinary()
    data["activations"]["absmax"][40, 0], data["activations"]["absmax"][41:, 0] = 1000, later
    data["activations"]["in_absmax"][:] = inputs
    assert facts_of(data, "output_jump") == [expected]


@pytest.mark.parametrize(("norm", "expected"), [(0.0, (1, 30)), (2.0, None), (np.nan, None)])
def test_a_loss_that_is_nan_without_any_gradient_is_dated(norm, expected):
    data = ordinary()
    data["scalars"]["grad_norm"] = np.full(N, 2.0)
    data["scalars"]["loss"][30], data["scalars"]["grad_norm"][30] = np.nan, norm
    assert facts_of(data, "nan_without_gradient") == [expected]


def test_no_input_is_to_blame_where_every_value_is_finite_or_the_first_step_was_none():
    data = ordinary()
    assert facts_of(data, "input_nonfinite") == [None]
    data["activations"]["nonfinite_count"][0, 0] = 3
    assert facts_of(data, "input_nonfinite") == [None]


def test_an_update_that_is_large_for_its_rate_counts_unless_its_gradient_was():
    data = ordinary()
    data["updates"]["update_norm"][40] *= 5
    assert facts_of(data, "update_peak", "grad_at_peak") == [(5, 40), (1, 40)]
    data["gradients"]["grad_norm"][40] *= 5
    assert facts_of(data, "update_peak")[0][0] == 1
    # momentum: the steps behind a large gradient are large too, and no larger than its own
    data["updates"]["update_norm"][41:44] *= [[4.9], [4.0], [3.0]]
    assert facts_of(data, "update_peak")[0][0] == 1
    data["updates"]["update_norm"][43] *= 2
    assert facts_of(data, "update_peak")[0][1] == 43
    data["scalars"]["lr"][:] = 0
    assert facts_of(data, "update_peak") == [None]


def test_a_weight_that_moved_by_more_than_its_update_was_written_to():
    data = ordinary()
    data["weights"]["weight_norm"][30:, 2] += 0.51
    assert facts_of(data, "weight_moved", "weight_moved_steps") == [(0.1, 30), (1, 30)]
    step = np.arange(N) + 5 * (np.arange(N) >= 30)  # steps between were not recorded
    assert facts_of(data, "weight_moved", step=step)[0][0] == 0
    data["weights"]["nonfinite_count"][30:, 2] = 1  # its norm counts finite entries only
    assert facts_of(data, "weight_moved")[0][0] == 0
    del data["updates"]["update_norm"]
    assert facts_of(data, "weight_moved") == [None]


def test_a_part_that_outgrows_the_others_is_measured_against_them():
    data = ordinary()
    data["activations"]["absmax"][30:, 3] *= 30
    assert facts_of(data, "head_growth", "head_alone", "qk_growth") == [(30, None), (30, None), (1, None)]
    data["activations"]["absmax"][30:, 1] *= 10
    assert facts_of(data, "head_growth", "head_alone", "qk_growth") == [(30, None), (3, None), (10, None)]
    short = {group: {name: v[:19] for name, v in variables.items()} for group, variables in data.items()}
    assert facts_of(short, "head_growth") == [None]


def test_a_parameter_without_a_gradient_is_dated_and_told_apart_from_one_that_began_so():
    data = ordinary()
    data["gradients"]["grad_norm"][20:, 1] = 0
    assert facts_of(data, "zero_grads", "zero_at_first") == [(0.25, 18), (0, 0)]
    data["gradients"]["grad_norm"][:, 1] = 0
    assert facts_of(data, "zero_grads", "zero_at_first") == [(0.25, 0), (0.25, 0)]


@pytest.mark.parametrize(("optimizer", "excess"), [("AdamW", 2.5), ("SGD", 0.004)])
def test_a_rate_is_excessive_for_an_adam_only(optimizer, excess):
    data = ordinary()
    data["scalars"]["lr"][:] = 0.05
    of_adam = (0.05, 0) if optimizer == "AdamW" else None
    facts = facts_of(data, "rate_excess", "rate", "adam_rate", optimizer=optimizer)
    assert facts == [(excess, 0), (0.05, 0), of_adam]
    data["scalars"]["lr"][:] = np.nan
    assert facts_of(data, "rate_excess", "rate", "rate_at_start", optimizer=optimizer) == [None] * 3


def test_early_updates_are_the_second_largest_of_matrices_and_need_five_steps():
    data = ordinary()
    data["updates"]["update_ratio"][[3, 7]] = [[0.5] * 4, [0.4] * 4]
    assert facts_of(data, "early_update", "head_update", "qk_update") == [(0.4, 3), (1, None), (1, None)]
    assert facts_of(data, "head_step", "qk_step") == [(0.5, None), (0.5, None)]
    data["updates"]["update_ratio"][:16] = np.nan
    assert facts_of(data, "early_update") == [None]
    vectors = {name: (4,) for name in SHAPES}
    assert facts_of(ordinary(), "early_update", shapes=vectors) == [None]
    lone = vectors | {"head.weight": (10, 4)}  # no other matrix to compare it with
    assert facts_of(ordinary(), "early_update", "head_update", shapes=lone) == [(0.002, 0), None]


@pytest.mark.parametrize(
    ("scale", "expected"), [(np.full(N, 1.0), None), (2.0 ** (1 + np.arange(N) % 3), (2, None))]
)
def test_a_loss_scale_of_one_scales_nothing(scale, expected):
    data = ordinary()
    data["scalars"]["loss_scale"] = scale
    assert facts_of(data, "scaled") == [expected]


def test_a_record_from_the_middle_of_a_run_says_nothing_of_its_start():
    assert facts_of(ordinary(), "fall", "first_over_chance", step=np.arange(N) + 500) == [None, None]


def test_a_first_loss_that_no_such_logits_can_give_is_no_cross_entropy():
    data = ordinary()
    data["scalars"]["loss"][:] = 9.0
    assert facts_of(data, "first_over_chance") == [None]
    shapes = SHAPES | {"tied.weight": (10, 4)}  # whose outputs are not recorded
    assert facts_of(data, "first_over_chance", shapes=shapes) == [(3.91, 0)]
    data["activations"]["absmax"][:] = 4.0  # ln(10) + 2 * 4 is above 9
    assert facts_of(data, "first_over_chance") == [(3.91, 0)]


def test_without_activations_a_loss_far_above_chance_may_be_a_sum_over_the_batch():
    "A compiled classifier summed its loss over 32 images: its weights were called 32 times too wide."
    data = ordinary()
    del data["activations"]
    data["scalars"]["loss"][:] = 32 * np.log(10)
    assert facts_of(data, "first_over_chance", "logit_std") == [None, None]
    data["scalars"]["loss"][:] = np.log(10)
    assert facts_of(data, "first_over_chance", "end_near_chance") == [(1.0, 0), (0.0, N - 1)]


def test_a_jump_of_the_loss_has_what_came_before_it():
    data = ordinary()
    for group, name, at, factor in [
        ("scalars", "loss", 40, 4),
        ("scalars", "lr", 38, 3),
        ("gradients", "grad_norm", 39, 20),
        ("activations", "in_absmax", 40, 6),
        ("updates", "update_norm", 38, 9),
    ]:
        data[group][name][at] *= factor
    names = ("loss_jump", "back_at_once", "lone_event", "rate_rise", "grad_before", "update_before")
    assert facts_of(data, *names) == [(4, 40), (1, 41), (1, 40), (3, 38), (20, 39), (3, 38)]
    jump, forward = facts_of(data, "input_jump", "forward_jump")
    assert jump[0] == pytest.approx(6.2, abs=0.3) and jump[1] == 40 and forward == (1, 40)
    data["gradients"]["grad_norm"][55] *= 100
    assert facts_of(data, "lone_event", "grad_jumps") == [(0, 40), (2, 39)]
    data["gradients"]["grad_norm"][39:41] = np.nan
    assert facts_of(data, "grad_jump") == [None]


def test_a_loss_that_dipped_before_its_jump_had_learned_another_task():
    data = ordinary()
    data["scalars"]["loss"][31:46] /= 4
    data["scalars"]["loss"][46:] *= 0.99
    dip, low = facts_of(data, "dip", "low_before")
    assert dip == (0.253, 33) and low == (0.253, 46)
    plain = ordinary()
    plain["scalars"]["loss"][46] *= 4
    assert facts_of(plain, "dip", "low_before") == [(1, 46), (1, 46)]
    plain["scalars"]["loss"][46:] = np.nan
    assert facts_of(plain, "dip", "low_before", "nonfinite") == [None, None, (0.233, None)]


@pytest.mark.parametrize("level", [0.0, -2.0])
def test_a_loss_around_zero_has_no_ratio_to_its_level(level):
    data = ordinary()
    data["scalars"]["loss"][:] = level + 1e-8 * np.sin(np.arange(len(data["scalars"]["loss"])))
    data["scalars"]["loss"][46] = 3.0
    if level == 0:
        data["scalars"]["loss"][31:46] = 0.0
    assert facts_of(data, "loss_jump", "low_before", "end_over_low") == [None, None, None]
    assert evidence(record_of(data))["event_step"] == (46, 46)


@pytest.mark.parametrize(
    ("group", "name"), [(g, n) for g, v in ordinary().items() for n in v if n not in ("loss", "update_norm")]
)
def test_a_record_without_one_variable_tells_the_rest(group, name):
    data = ordinary()
    data["scalars"]["loss"][40] *= 4
    full = evidence(record_of(data))
    del data[group][name]
    rest = evidence(record_of({key: variables for key, variables in data.items() if variables}))
    assert all(rest[fact] == full[fact] for fact in ("loss_jump", "fall", "nonfinite", "event_step"))


@pytest.mark.parametrize(
    ("attrs", "scale", "expected"),
    [
        ({"bf16": True}, 8.0, False),
        ({"bf16": True, "fp16": True}, 8.0, True),  # one of them is of the file, and the scale is at work
        ({"fp16": True}, 1.0, False),
        ({}, 8.0, True),
    ],
)
def test_a_loss_is_scaled_where_its_scale_moves_off_one_and_no_setting_says_bf16(attrs, scale, expected):
    scalars = make_scalars({"loss_scale": Samples(np.arange(30), np.full(30, scale))})
    assert scales_its_loss(new_run(scalars, attrs=attrs)) == expected


def ranks_of(values=None, gradients=None, modules=("a", "b"), **times):
    "A record of ranks: (step, module, rank) values, and (step, rank) times."
    first = next(v for v in (values, gradients, *times.values()) if v is not None)
    coords = {"step": np.arange(len(first)), "rank": np.arange(first.shape[-1])}
    named = {"rms": values, "grad_rms": gradients}
    layers = {n: (("step", "module", "rank"), v, UNITS) for n, v in named.items() if v is not None}
    groups = {"rank_activations": xr.Dataset(layers, coords | {"module": list(modules)})} if layers else {}
    series = {name: (("step", "rank"), v, UNITS) for name, v in times.items()}
    return new_run(**groups, ranks=xr.Dataset(series, coords))


def told(run):
    return [(f.kind, f.evidence["rank"], f.modules, f.onset) for f in find_odd_rank(run)]


def test_the_rank_with_other_values_is_named_with_the_module_that_came_first():
    values = np.ones((30, 2, 4))
    assert told(ranks_of(values)) == []
    values[10:, 1, 2] = 50
    assert told(ranks_of(values)) == [("activation_explosion", 2, ("b",), 10)]
    values[10:, 0, 2] = 50  # what the first module is given is its batch
    assert told(ranks_of(values)) == [("bad_batch_values", 2, ("a",), 10)]


def test_gradients_are_told_by_themselves_or_where_they_came_before_the_values():
    values, gradients = np.ones((30, 2, 4)), np.ones((30, 2, 4))
    gradients[10:, :, 1] = 50
    backward = ("grad_norm_explosion", 1, ("b",), 10)
    assert told(ranks_of(gradients=gradients)) == [backward]
    values[12:, 1, 1] = 50
    assert told(ranks_of(values, gradients)) == [("activation_explosion", 1, ("b",), 12), backward]
    values[10:, 1, 1] = 50
    assert told(ranks_of(values, gradients)) == [("activation_explosion", 1, ("b",), 10)]


def test_a_slow_rank_is_set_beside_ranks_with_the_same_modules():
    loss, times, wait = np.ones((30, 4)), np.full((30, 4), 0.2), np.full((30, 4), 0.02)
    wait[:, 3] = 0.15
    run = ranks_of(loss=loss, step_time=times, data_time=wait)
    assert told(run) == [("throughput_drop", 3, (), 0)]
    assert told(ranks_of(loss=loss, data_time=wait)) == []
    values = np.ones((30, 2, 4))
    values[:, 1, :2] = values[:, 0, 2:] = np.nan  # two stages of two ranks: none can be told the slow one
    assert told(ranks_of(values, loss=loss, step_time=times, data_time=wait)) == []


def test_the_loss_of_a_rank_is_told_where_its_values_are_not():
    loss = np.ones((30, 4))
    loss[5:, 1] = 9
    assert told(ranks_of(loss=loss)) == [("bad_batch_values", 1, (), 5)]
    values = np.ones((30, 2, 4))
    values[5:, 0, 1] = 50
    assert told(ranks_of(values, loss=loss)) == [("bad_batch_values", 1, ("a",), 5)]


@pytest.mark.parametrize(("optimizer", "n"), [("SGD", 1), ("AdamW", 0), (["SGD", "AdamW"], 0)])
def test_an_optimizer_without_moments_is_told(optimizer, n):
    assert facts_of(ordinary(), "moments", optimizer=optimizer) == [(0, None) if n else None]


@pytest.mark.parametrize(
    ("spans", "step"),
    [
        ([], 60),  # nothing was found: the jump itself
        ([("warning", 50, 70)], 60),
        ([("warning", 75, 80)], 60),  # begins shortly after it
        ([("error", 179, 179), ("warning", 101, 121)], 101),
        ([("info", 50, 70), ("warning", 101, 121)], 101),  # a note is no problem
    ],
)
def test_the_swap_test_is_offered_at_a_step_at_which_something_was_found(spans, step):
    "The jump that the facts look at was a small one at step 60; the findings began at step 101."
    findings = [Finding("loss_spike", severity, first, last) for severity, first, last in spans]
    assert _step_of_test(60, findings) == step
