"""Each detector of a record: the module and step of a planted fault, and nothing where a part is missing.

Records are tables of a few modules: a fault is written into one of them at step 30, so what has to be named
is known without a model.
"""

import numpy as np
import pytest
import xarray as xr

from stabilitylab.detect.context import at_step, loss_span, run_context
from stabilitylab.detect.cross_run import compare_runs
from stabilitylab.detect.diagnose import DETECTORS, _load
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.detect.layers.activations import (
    find_dead_units,
    find_massive_activation,
    find_overflow,
    find_underflow,
    typical_magnitude,
)
from stabilitylab.detect.layers.attention import (
    attention_leads,
    find_logged_attention_logits,
    find_logged_entropy_collapse,
)
from stabilitylab.detect.layers.parameters import (
    find_grad_below_epsilon,
    find_large_steps,
    find_lost_updates,
    find_no_gradient,
    find_param_grad_explosion,
)
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.detect.loss.components import find_component_spikes
from stabilitylab.detect.loss.spike_rules import RULES
from stabilitylab.detect.loss.trend import find_level_shift, find_not_learning
from stabilitylab.detect.non_finite import find_first_non_finite
from stabilitylab.detect.relations import (
    drop_explained_rises,
    grad_norm_and_loss,
    hardware_and_spikes,
    high_learning_rate,
    join_spikes_to_divergence,
    layer_leads,
    resume_spikes,
)
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_events, make_scalars

STEPS, NAMES = np.arange(0, 60, 2), ["a", "b", "c", "d"]
KINDS = ["embed", "attn.q", "mlp.fc1", "block"]
UNITS = {"long_name": "made", "units": "1"}


def planted(usual, fault, columns=(1,), shape=()):
    "The usual value everywhere; from step 30 on the fault in some columns."
    values = np.full((len(STEPS), len(NAMES), *shape), usual, float)
    for column in columns:
        values[STEPS >= 30, column] = fault
    return values


def group(label, **values):
    "A group of the record; a variable with a third dimension counts binary exponents."
    exponent = np.arange(-126, 128)
    dims = {name: ("step", label, "exponent")[: np.ndim(v)] for name, v in values.items()}
    coords = {"step": STEPS, label: NAMES, "kind": (label, KINDS), "layer": (label, [0, 0, 1, 1])}
    if any("exponent" in d for d in dims.values()):
        coords["exponent"] = exponent
    return xr.Dataset({n: (dims[n], np.asarray(v, float), UNITS) for n, v in values.items()}, coords)


def exponents(low_columns, begin=0):
    "Gradients of size one, and of 2^-20 in some modules from a record on."
    counts = np.zeros((len(STEPS), len(NAMES), 254))
    counts[:, :, 126] = 1
    for column in low_columns:
        counts[begin:, column, 126], counts[begin:, column, 106] = 0.2, 0.8
    return counts


SCALE = make_scalars({"loss_scale": Samples(STEPS, np.full(len(STEPS), 1024.0))})
LOWER = {"dtypes": dict.fromkeys(NAMES, "bfloat16")}
DEAD = planted(0.1, 1.0, (2,))
FAULTS = {  # name -> (detector, its group, variables it needs, other parts of the record, (onset, modules))
    "dead units": (find_dead_units, "sampled_activations", {"zero_frac": DEAD}, {}, (30, ("c",))),
    "overflow": (
        find_overflow,
        "activations",
        {"absmax": planted(1, 50_000)},
        {"scalars": SCALE},
        (30, ("b",)),
    ),
    "underflow": (
        find_underflow,
        "sampled_activations",
        {"grad_exponents": exponents([3], 2)},
        {"scalars": SCALE},
        (int(STEPS[2]), ("d",)),
    ),
    "massive": (
        find_massive_activation,
        "activations",
        {"absmax": planted(1, 5000, (3,))},
        {"sampled_activations": group("module", exponents=exponents([]))},
        (30, ("d",)),
    ),
    "not finite": (
        find_first_non_finite,
        "activations",
        {"nonfinite_count": planted(0, 3, (1, 2))},
        {},
        (30, ("b", "c")),
    ),
    "gradient not finite": (
        find_first_non_finite,
        "gradients",
        {"nonfinite_count": planted(0, 3, (1, 2))},
        {},
        (30, ("c", "b")),
    ),
    "gradient explodes": (
        find_param_grad_explosion,
        "gradients",
        {"grad_norm": planted(1, 40, (2,))},
        {},
        (30, ("c",)),
    ),
    "below epsilon": (
        find_grad_below_epsilon,
        "optimizer",
        {"below_eps_frac": planted(0.9, 0.9) * [1, 0, 1, 0]},
        {},
        (0, ("c",)),
    ),
    "no gradient": (
        find_no_gradient,
        "gradients",
        {"grad_norm": planted(1, 1) * [1, 1, 0, 1], "nonfinite_count": planted(0, 0)},
        {"attrs": {"trainable": NAMES}},
        (0, ("c",)),
    ),
    "lost updates": (
        find_lost_updates,
        "sampled_updates",
        {"lost_frac": planted(0.9, 0.9) * [0, 0, 1, 0]},
        {"attrs": LOWER},
        (0, ("c",)),
    ),
}


def record(name, change=lambda data: data):
    detector, where, variables, others, _ = FAULTS[name]
    label = "module" if "activations" in where else "param"
    parts = {"scalars": None} | {where: change(group(label, **variables))} | others
    scalars, attrs = parts.pop("scalars"), parts.pop("attrs", None)
    return detector, new_run(scalars, attrs=attrs or {}, **parts)


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_module_and_step_are_named(name):
    detector, run = record(name)
    (finding,) = detector(run)
    assert (finding.onset, finding.modules) == FAULTS[name][-1]


@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_found_where_a_part_is_missing(name):
    detector, _, variables, others, _ = FAULTS[name]
    assert detector(new_run()) == []
    for part in others:
        left = {key: value for key, value in others.items() if key != part}
        where = group("module" if "activations" in FAULTS[name][1] else "param", **variables)
        run = new_run(left.get("scalars"), attrs=left.get("attrs") or {}, **{FAULTS[name][1]: where})
        assert detector(run) == [], part
    for variable in variables:
        _, run = record(name, lambda data, gone=variable: data.rename({gone: "other"}))
        assert detector(run) == [], variable
    assert detector(record(name, lambda data: data.isel(step=slice(0)))[1]) == []


def test_a_record_of_any_one_group_passes_every_detector():
    for name in FAULTS:
        _, run = record(name)
        for detector in DETECTORS:
            _load(detector)(run)


def series(**values):
    step = np.arange(len(next(iter(values.values()))))
    return new_run(make_scalars({name: Samples(step, np.asarray(v, float)) for name, v in values.items()}))


def test_logged_attention_needs_growth_and_no_validation():
    grows = np.r_[np.full(50, 10.0), np.full(50, 500.0)]
    assert find_logged_attention_logits(series(attn_logit_max=grows))[0].onset == 50
    assert find_logged_attention_logits(series(val_attn_logit_max=grows)) == []
    assert find_logged_attention_logits(series(attn_logit_max=grows / grows * 500)) == []  # always so
    assert find_logged_attention_logits(series(attn_logit_max=[500.0])) == []
    falls = np.r_[np.full(50, 3.0), np.full(50, 0.01)]
    (finding,) = find_logged_entropy_collapse(series(attn_entropy=falls))
    assert finding.onset == 50 and finding.evidence["start"] == 3
    assert find_logged_entropy_collapse(series(attn_entropy=-falls)) == []
    assert find_logged_entropy_collapse(series(attn_entropy=np.r_[falls[:99], 3.0])) != []  # one record back
    assert find_logged_entropy_collapse(series(attn_entropy=np.r_[falls[:50], 0.01, falls[:49]])) == []


def finding(kind, onset, end=None, severity="warning", modules=(), **evidence):
    return Finding(kind, severity, onset, end or onset, modules, evidence=evidence)


LOSS = series(loss=2 - np.arange(100) / 100)
SPIKE, LOST = finding("loss_spike", 50, recovery="fast"), finding("divergence", 60, 99, "error")


def related(relate, *findings, run=LOSS):
    return [(f.kind, f.severity, f.evidence.get("lead_steps")) for f in relate(run, list(findings))]


def test_signs_in_the_attention_are_set_against_the_next_loss_event():
    grown = finding("attention_logit_growth", 40, severity="info", peak=500.0)
    assert related(attention_leads, grown, SPIKE)[0] == ("attention_logit_growth", "warning", 10)
    late = finding("attention_logit_growth", 55, severity="info", peak=500.0)
    assert related(attention_leads, late, SPIKE)[0] == ("attention_logit_growth", "info", None)
    huge = finding("attention_logit_growth", 40, peak=20_000.0)
    assert related(attention_leads, huge, LOST)[0] == ("attention_logit_growth", "error", 20)
    assert related(attention_leads, huge, SPIKE)[0] == ("attention_logit_growth", "warning", 10)
    assert related(attention_leads, grown, LOST)[0] == ("attention_logit_growth", "warning", 20)
    usual = finding("attention_sink", 40, severity="info")
    grew = finding("attention_sink", 45, severity="info", grew=True)
    long_ago = finding("attention_sink", 10, severity="info", grew=True)
    assert [s for _, s, _ in related(attention_leads, usual, grew, long_ago, SPIKE)[:3]] == [
        "info",
        "warning",
        "info",
    ]
    assert (
        related(attention_leads, finding("attention_logit_growth", None, severity="info", peak=1.0), SPIKE)[
            0
        ][2]
        is None
    )


def test_signs_in_the_layers_are_set_against_the_next_loss_event():
    blown = finding("activation_explosion", 40, modules=("a",))
    assert related(layer_leads, blown, SPIKE)[0][2] == 10
    assert related(layer_leads, finding("activation_explosion", 40), SPIKE)[0][2] is None
    assert related(layer_leads, finding("activation_explosion", 52, modules=("a",)), SPIKE)[0][2] is None
    assert related(layer_leads, finding("dead_units", 40, modules=("a",)), SPIKE)[0][2] is None
    rms = finding("update_rms_excess", 10, severity="info", modules=("a",), chance=0.01, steps=[10, 45, 52])
    assert related(layer_leads, rms, SPIKE)[0] == ("update_rms_excess", "warning", 5)
    by_chance = finding("update_rms_excess", 45, severity="info", modules=("a",), chance=0.4, steps=[45])
    assert related(layer_leads, by_chance, SPIKE)[0] == ("update_rms_excess", "info", None)


def test_what_came_before_the_loss_is_part_of_its_event():
    norm = finding("grad_norm_explosion", 45, severity="info", steps=[45])
    assert related(grad_norm_and_loss, norm, SPIKE)[0] == ("grad_norm_explosion", "warning", 5)
    assert related(grad_norm_and_loss, norm, SPIKE.with_(severity="info"))[0][1] == "info"
    for step, severity in ((30, "info"), (51, "warning"), (52, "info")):
        other = finding("grad_norm_explosion", step, severity="info", steps=[step])
        assert related(grad_norm_and_loss, other, SPIKE)[0][1] == severity, step
    xid = hardware_and_spikes(LOSS, [finding("hardware_error", 20), SPIKE])[0]
    assert (xid.evidence["near"], xid.evidence["near_step"]) == ("loss_spike", 50)
    for other in (finding("hardware_error", None), finding("hardware_error", 300)):
        assert "near" not in hardware_and_spikes(LOSS, [other, SPIKE])[0].evidence


def test_a_rise_is_reported_once():
    rise = finding("slow_rise", 40, 55)
    assert related(drop_explained_rises, rise, SPIKE)[0][0] == "loss_spike"
    for other in (finding("loss_spike", 56), finding("loss_spike", 39), SPIKE.with_(severity="info")):
        assert len(related(drop_explained_rises, rise, other)) == 2
    behind_a_rollback = finding("slow_rise", 30, 30, peak_step=55)
    assert related(drop_explained_rises, behind_a_rollback, SPIKE)[0][0] == "loss_spike"
    still = finding("not_learning", 0, 99)
    never_back = finding("loss_spike", 30, 99, recovery="none", peak=9.0, grad_norm_lead_steps=2)
    (joined,) = (
        f for f in join_spikes_to_divergence(LOSS, [still, never_back, LOST]) if f.kind != "loss_spike"
    )
    assert (
        joined.onset == 30 and joined.evidence["peak"] == 9 and joined.evidence["grad_norm_lead_steps"] == 2
    )
    came_back = finding("loss_spike", 30, 40, recovery="fast", peak=9.0)
    too_short = finding("loss_spike", 30, 70, recovery="none", peak=9.0)
    for other in (came_back, too_short):
        assert join_spikes_to_divergence(LOSS, [other, LOST])[1].onset == 60
    assert join_spikes_to_divergence(LOSS, [still]) == [still]


def test_a_fast_spike_after_a_restart_is_the_restart():
    def resumed(spike, *restarts):
        return resume_spikes(LOSS, [spike, *(finding("restart", at, severity="info") for at in restarts)])[0]

    wide = finding("loss_spike", 50, 53, recovery="fast")
    assert (resumed(wide, 48).kind, resumed(wide, 48).severity) == ("resume_spike", "warning")
    assert resumed(wide, 48).evidence["resumed_at"] == 48
    assert resumed(wide).kind == resumed(wide, 40).kind == resumed(wide, 51).kind == "loss_spike"
    assert resumed(wide.with_(evidence={"recovery": "slow"}), 48).kind == "loss_spike"
    lost = wide.with_(evidence={"recovery": "none"})
    assert resumed(lost, 49).kind == "resume_spike" and resumed(lost, 46).kind == "loss_spike"
    low = resumed(wide.with_(severity="info"), 48)  # a bump that is no alarm is the restart's, too
    assert (low.kind, low.severity) == ("resume_spike", "info")
    assert resumed(wide.with_(evidence={"recovery": "fast", "only_in": "x"}), 48).kind == "loss_spike"
    assert resumed(SPIKE, 50).severity == "info" and resumed(SPIKE, 48).severity == "warning"
    assert resumed(finding("loss_spike", 3, 6, recovery="fast"), 1).severity == "info"


def test_the_learning_rate_is_named_only_where_it_was_high():
    def lr(values, *findings):
        run = series(loss=2 - np.arange(100) / 100, lr=values)
        return [
            f.evidence["rising"] for f in high_learning_rate(run, list(findings)) if f.kind == "lr_too_high"
        ]

    lost = finding("divergence", 60, 99, "error")
    assert lr(np.linspace(0, 1, 100), lost) == [True]
    assert lr(np.r_[np.linspace(0, 1, 50), np.linspace(1, 0.9, 50)], lost) == [False]
    assert lr(np.r_[np.linspace(0, 1, 20), np.linspace(1, 0.1, 80)], lost) == []
    assert lr(np.ones(100), lost) == [] and lr(np.zeros(100), lost) == []
    assert lr(np.linspace(0, 1, 100), lost.with_(severity="warning")) == []
    assert lr(np.linspace(0, 1, 100), finding("slow_rise", 60, 99, "error")) == []


def test_the_context_of_a_run_is_what_its_settings_say():
    names = ["blocks.0.w", "blocks.1.w", "head"]
    shapes = {"shapes": {name: [8, 8] for name in names}}
    resumed = [finding("restart", 5, severity="info")]
    for attrs, findings, traits in (
        (shapes | {"trainable": names}, [], ()),
        (shapes | {"trainable": names[:1]}, [], ("frozen",)),
        (shapes | {"trainable": names[:2]}, [], ()),
        ({"trainable": names[:1]}, [], ()),
        ({"shapes": {"blocks.0.lora_A": [8, 8]}}, [], ("lora",)),
        ({}, resumed, ("resumed",)),
    ):
        run = new_run(LOSS["scalars"].to_dataset(), attrs=attrs)
        assert run_context(run, findings).traits == traits, attrs
    for attrs, precision in (
        ({"dtypes": {"a": "bfloat16", "b": "bfloat16", "c": "float32"}}, "bf16"),
        ({"mixed_precision": "torch.float16"}, "fp16"),
        ({"bf16": True}, "bf16"),
        ({"bf16": False}, ""),
    ):
        assert run_context(new_run(attrs=attrs), []).precision == precision
    assert run_context(new_run(attrs={"optimizer": ["AdamW", "SGD"]}), []).optimizer == "adamw"
    span, context = loss_span(LOSS), run_context(LOSS, [])
    phases = [at_step(context, span, step).phase for step in (None, 2, 30, 80)]
    assert phases == ["", "start", "middle", "late"] and at_step(context, None, 2).phase == ""
    assert loss_span(series(loss=[1.0, 2.0])) is None


def test_three_steps_as_large_as_the_weights_are_needed():
    def steps(ratio, count, kinds=("attn.q",) * 4, shapes=None):
        values = np.full((10, 4), 0.01)
        values[2 : 2 + count] = ratio
        data = xr.Dataset(
            {"update_ratio": (("step", "param"), values, UNITS)},
            {"step": np.arange(10), "param": NAMES, "kind": ("param", list(kinds))},
        )
        attrs = {"shapes": dict(zip(NAMES, shapes, strict=True))} if shapes else {}
        return [f.onset for f in find_large_steps(new_run(updates=data, attrs=attrs))]

    assert steps(0.9, 4) == [2] and steps(0.9, 2) == [] and steps(0.1, 4) == []
    assert steps(0.9, 4, ("attn.q", "embed", "embed", "norm")) == []
    # biases that begin at zero move by all they have
    assert steps(0.9, 4, shapes=[[4]] * 4) == [] and steps(0.9, 4, shapes=[[4, 4]] * 4) == [2]


def kinds_of(detector, **values):
    return [(f.kind, f.severity, f.onset) for f in detector(series(**values))]


def test_a_level_shift_is_one_of_the_training_loss_alone():
    rise = 0.5 * (np.arange(1000) >= 500) + np.random.default_rng(0).normal(0, 0.005, 1000)
    stays, follows = np.full(1000, 2.0), 2 + 0.5 * (np.arange(1000) >= 500)
    assert len(find_level_shift(series(loss=2 + rise, val_loss=stays))) == 1
    assert find_level_shift(series(loss=2 + rise, val_loss=follows)) == []
    assert find_level_shift(series(loss=np.maximum(rise, 0), val_loss=stays)) == []  # from zero


def test_a_loss_that_stands_still():
    noise = np.random.default_rng(0).normal(0, 1, 400)
    assert kinds_of(find_not_learning, loss=3 + 1e-4 * noise) == [("not_learning", "warning", 0)]
    assert kinds_of(find_not_learning, loss=3 + 0.5 * noise) == [("not_learning", "info", 0)]
    halts = np.r_[np.linspace(4, 3, 30), np.full(80, 3.0), np.linspace(3, 2, 40)]
    assert kinds_of(find_not_learning, loss=halts) == []  # too short
    assert [kind for kind, _, _ in kinds_of(find_not_learning, loss=np.repeat(halts, 3))] == ["plateau"]


def test_only_problems_and_the_end_of_the_run_are_causes():
    assert most_likely(Findings([finding("crash", 5, severity="info", ended=None)])) is None
    assert (
        most_likely(Findings([finding("crash", 5, severity="info", ended=True, cause="disk full")]))
        is not None
    )
    assert most_likely(Findings([finding("restart", 5, severity="info", ended=True)])) is None


def test_runs_that_part_are_no_copies():
    loss = np.random.default_rng(0).normal(3, 0.1, 300)
    parted = np.r_[loss[:200], loss[200:] + 0.01]
    for other, is_copy, last in ((loss, True, 299), (parted, False, 199)):
        (shared,) = compare_runs({"a": series(loss=loss), "b": series(loss=other)})
        assert (shared.evidence["is_copy"], shared.onset) == (is_copy, last)


def test_half_of_the_entries_lie_below_the_typical_magnitude():
    for low, middle in ((0.4, 2**3.5), (0.6, 2**-19.5)):
        counts = np.zeros(254)
        counts[[126 - 20, 126 + 3]] = low, 1 - low
        shares = xr.DataArray(counts, {"exponent": np.arange(-126, 128)}, ["exponent"])
        assert float(typical_magnitude(shares)) == middle


def test_updates_are_lost_from_the_first_step_on_which_most_are():
    values = np.zeros((len(STEPS), len(NAMES)))
    values[STEPS >= 10, 2] = 0.9
    run = new_run(attrs=LOWER, sampled_updates=group("param", lost_frac=values))
    assert [f.onset for f in find_lost_updates(run)] == [10]


def test_a_median_rule_flags_what_stands_out():
    x = 2 + np.random.default_rng(0).normal(0, 0.01, 400)
    x[300] += 1
    assert np.flatnonzero(RULES["mad"].flags(x)).tolist() == [300]


@pytest.mark.parametrize("way, told", [("step", 1), ("ramp", 0), ("back", 1)])
def test_an_auxiliary_loss_that_moves_to_another_level_at_once_is_told(way, told):
    rng, step = np.random.default_rng(1), np.arange(2000)
    shares = {"step": step >= 1500, "ramp": np.clip((step - 1500) / 400, 0, 1), "back": step // 8 == 190}
    aux = 0.01 * (1 + 5 * shares[way]) + rng.normal(0, 0.0005, 2000)
    losses = {"loss": 2 + 5 * np.exp(-step / 200) + rng.normal(0, 0.02, 2000), "moe_aux_loss": aux}
    run = new_run(make_scalars({name: Samples(step, value) for name, value in losses.items()}))
    alone = [f for f in find_component_spikes(run) if f.evidence["only_in"] == "moe_aux_loss"]
    assert len(alone) == told
    if way == "step":
        assert alone[0].onset == 1500 and alone[0].evidence["recovery"] == "none"


@pytest.mark.parametrize(
    "dtype, cause", [("float16", "overflow"), ("bfloat16", "weight"), ("float32", "weight")]
)
def test_an_output_that_passes_the_range_it_was_computed_in_is_an_overflow(dtype, cause):
    "The recorder names the format of the first bad output: of fp16 autocast without a loss scale as well."
    labels = {"step": range(5), "module": ["a"], "kind": ("module", ["mlp.fc2"]), "layer": ("module", [0])}
    count = np.zeros((5, 1))
    count[3:] = 7
    about = {"long_name": "x", "units": "1"}
    table = {"nonfinite_count": (("step", "module"), count, about)}
    table["in_absmax"] = (("step", "module"), np.full((5, 1), 300.0), about)
    table["in_nonfinite_count"] = (("step", "module"), np.zeros((5, 1)), about)
    weights = xr.Dataset(
        {"absmax": (("step", "param"), np.full((5, 1), 4.0), about)},
        {"step": range(5), "param": ["a.weight"], "kind": ("param", ["mlp.fc2"]), "layer": ("param", [0])},
    )
    text = f"first non-finite value: output of a ({dtype}), 7 entries; before it: input absmax 300"
    run = new_run(
        attrs={"shapes": {"a.weight": [64, 64]}},
        activations=xr.Dataset(table, labels),
        weights=weights,
        events=make_events([("error", 3, text, None)]),
    )
    assert find_first_non_finite(run)[0].evidence["cause"] == cause


@pytest.mark.parametrize(("beside", "severity"), [((), "warning"), (("reward", "entropy", "kl"), "info")])
def test_a_gradient_that_grows_with_a_moving_target_is_a_note(beside, severity):
    "A healthy Q network: its gradients grew as its values did, and that was a warning."
    noise = np.random.default_rng(0).normal(size=len(STEPS))
    scalars = make_scalars({name: Samples(STEPS, 2 + 0.01 * noise) for name in ("loss", *beside)})
    run = new_run(scalars, gradients=group("param", grad_norm=planted(1, 40, (2,))))
    (finding,) = layer_leads(run, find_param_grad_explosion(run))
    assert finding.severity == severity and ("note" in finding.evidence) is (severity == "info")
