"Findings: known events of logs, silence on healthy ones, golden numbers, slow twins of rolling statistics."

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from reproductions.traces import HELD_OUT, score_rules
from stabilitylab import compare_runs, diagnose, read_runs
from stabilitylab.cases.logs import log_case
from stabilitylab.detect.layers.activations import find_activation_explosion
from stabilitylab.detect.loss.divergence import find_divergence
from stabilitylab.detect.loss.spike_rules import RULES
from stabilitylab.detect.loss.spikes import find_loss_spikes
from stabilitylab.detect.metrics import find_length_bias, rank_correlation
from stabilitylab.run.record import new_run
from stabilitylab.run.rolling import before, level_and_noise
from stabilitylab.run.scalars import Samples, make_scalars


def run_of(**series):
    return new_run(
        make_scalars(
            {
                n: Samples(
                    np.arange(len(x)) if not isinstance(x, tuple) else x[0],
                    np.asarray(x if not isinstance(x, tuple) else x[1], float),
                )
                for n, x in series.items()
            }
        )
    )


# file, what must be found: (kind, lowest and highest onset, severities)
EVENTS = [
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-off.out",
        [("loss_spike", 2, 4, "warning error"), ("divergence", 30, 62, "error")],
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_ds_3d_gpt2_perf_n16-ds-on.out",
        [("loss_spike", 2, 4, "warning")],
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_gpt2_base_n8_dp1_tp4_pp8-1809562.out",
        [("loss_spike", 30, 30, "warning"), ("loss_scale_collapse", 10, 30, "info")],
    ),
    (
        "megatron_text/bigscience-workshop__bigscience__meg_gpt2_perf_n16-1999618.out",
        [("loss_scale_collapse", 1, 4, "error")],
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_131219-tiu2ucrv__output.log",
        [("overfitting", 1750, 1750, "warning")],
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_151253-ac8o3s1d__output.log",
        [("loss_spike", 2010, 2010, "warning")],
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240608_112503-5ihm0269__output.log",
        [("loss_spike", 2010, 2010, "warning")],
    ),
    (
        "nanogpt_text/bdytx5__grokking__run-20240607_131201-3t18j1do__output.log",
        [("divergence", 480, 2000, "error")],
    ),
    ("llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11679031.log", [("non_finite", 1, 1, "error")]),
    (
        "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11685414.log",
        [("grad_norm_explosion", 1017, 1017, "info")],
    ),
    (
        "hf_trainer_state/P4P4N1CK__whisper-large-v2-japanese-5k-steps__final__trainer_state.json",
        [("overfitting", 1000, 1000, "warning")],
    ),
    (
        "parameter_golf/openai__parameter-golf__2026-03-31_LegendreGPT__train.log",
        [("loss_spike", 38820, 38820, "warning")],
    ),
    (
        "megatron_golden_json/NVIDIA__Megatron-LM__mixtral_8x7b_release__golden_values_dev_dgx_h100.json",
        [("loss_spike", 3800, 3850, "warning")],
    ),
    (
        "deepspeed_chat/microsoft__DeepSpeedExamples__step3_rlhf__globalBatchSize64.log",
        [("loss_spike", 100, 100, "warning"), ("loss_scale_collapse", 0, 100, "info")],
    ),
    (
        "tensorboard_export/TurkHukuk__hukukbert__run-.-tag-train_grad_norm.csv",
        [("grad_norm_explosion", 0, 19300, "info")],
    ),
]
HEALTHY = [
    "megatron_text/zetsunozomi__Pier-LLM-Pretraining__exp_find_checkpoint_wrong.o54745",
    "megatron_golden_json/NVIDIA__Megatron-LM__gpt3_15b_8t_release__golden_values_lts_dgx_a100.json",
    "megatron_golden_json/NVIDIA__Megatron-LM__bert_release__golden_values_dev_dgx_h100.json",
    "wandb_csv/gradio-app__trackio__logs.csv",
    "hf_trainer_state/CoralReefFish__whisper-tiny-nbaiLab__trainer_state.json",
    "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11685414.log",
    "llmc_stdout/HectorFCardenas__llm.c__gpt2_train.11672114.log",
    "llmc_mainlog/KellerJordan__modded-nanogpt__2024-10-13_llmc__main.log",
    "modded_nanogpt/KellerJordan__modded-nanogpt__2024-06-06_AdamW__f66d43d7-e449-4029-8adf-e8537bab49ea.log",
    "torchtitan_losses/pytorch__torchtitan__llama3_cuda.txt",
    "torchtitan_losses/pytorch__torchtitan__llama3_rocm_mi350x.txt",
    "torchtitan_losses/pytorch__torchtitan__qwen3_moe_cuda.txt",
    "torchtitan_losses/pytorch__torchtitan__qwen3_moe_rocm_mi350x.txt",
]


def findings_of(path):
    (run,) = read_runs(path).values()
    return diagnose(run)


@pytest.mark.parametrize("file, events", EVENTS, ids=[f.split("/")[1][:70] for f, _ in EVENTS])
def test_real_events_are_found(real_logs, file, events):
    found = findings_of(real_logs / file)
    for kind, low, high, severities in events:
        assert [
            f for f in found if f.kind == kind and low <= f.onset <= high and f.severity in severities.split()
        ], (file, kind, [(f.kind, f.onset, f.severity) for f in found])


@pytest.mark.parametrize("file", HEALTHY, ids=[f.split("/")[1][:70] for f in HEALTHY])
def test_healthy_real_logs_raise_no_alarm(real_logs, file):
    assert [f for f in findings_of(real_logs / file) if f.severity != "info"] == [], file


def test_the_ten_largest_spikes_of_a_real_pretraining_run(real_logs):
    found = [
        f
        for f in findings_of(real_logs / "torch_curves/qiuzh20__gated_attention__3T-baseline.pt")
        if f.kind == "loss_spike"
    ]
    for step, peak in (
        (53380, 10.367),
        (282952, 9.031),
        (129964, 8.766),
        (297952, 8.553),
        (187304, 8.099),
        (33271, 7.842),
        (223461, 6.436),
        (42456, 4.078),
        (124918, 4.069),
        (315014, 3.127),
    ):
        hits = [
            f for f in found if step - 2000 <= f.onset <= step + 2000 and f.evidence["peak"] > 0.999 * peak
        ]
        assert hits, (step, peak)
    assert not [f for f in found if f.evidence.get("recovery") == "none"]


def test_duplicated_lines_give_no_spike(real_logs):
    found = findings_of(real_logs / "nanogpt_text/bdytx5__grokking__run-20240607_131201-3t18j1do__output.log")
    assert not [f for f in found if f.kind == "loss_spike" and f.severity != "info"]


MORE = [pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10)]  # a hundred and eighty curves


@pytest.mark.parametrize("block", [0, *MORE])
def test_healthy_curves_raise_no_alarm(block):
    for seed in range(block * 20, block * 20 + 20):
        r, i = np.random.default_rng(seed), np.arange(5000)
        high, low, tau, p, s = (
            r.uniform(4, 11),
            r.uniform(0.5, 3),
            r.uniform(50, 1500),
            r.uniform(0.2, 0.6),
            r.uniform(0.005, 0.15),
        )
        base = low + (high - low) * (np.exp(-i / tau) if seed % 2 else (1 + i / tau * 5) ** -p)
        loss = base + r.normal(0, s, 5000) * (1 if seed % 3 else base / low)
        found = diagnose(
            run_of(
                loss=loss,
                grad_norm=np.exp(r.normal(0, 0.2, 5000)),
                lr=np.minimum(1, (i + 1) / 200) * 5e-4 * (1 + np.cos(np.pi * i / 5000)),
            )
        )
        assert [f for f in found if f.severity != "info"] == [], seed


def test_default_rule_beats_the_published_ones():
    scores = score_rules(10)
    ours = scores.loc["default"]
    assert ours.precision >= 0.98 and ours.recall >= 0.9
    for name, other in scores.drop("default").iterrows():
        assert ours.recall > other.recall, name
        assert ours.precision >= other.precision or other.recall < 0.5 * ours.recall, name


def test_bloom_grad_norm_leads_its_loss_by_one_step():
    "BLOOM tr8-104B, experiment 11, steps 11446-11448, with a quiet made history before them."
    rng = np.random.default_rng(0)
    step = np.arange(11246, 11449)
    (spike,) = find_loss_spikes(
        run_of(
            loss=(step, np.r_[3.09 + rng.normal(0, 0.02, 200), 3.0626, 3.1143, 7.7123]),
            grad_norm=(step, np.r_[13000 * np.exp(rng.normal(0, 0.15, 200)), 12953, 262623, 254699]),
        )
    )
    assert spike.onset == 11448 and spike.evidence["grad_norm_lead_steps"] == 1


def test_bloom_never_recovered():
    "BLOOM tr8-104B, experiment 1: 6.44, then 11.4 at 7010, 7.16 at 7220, never back."
    rng, step = np.random.default_rng(0), np.arange(6000, 7500)
    loss = 6.44 + rng.normal(0, 0.03, 1500)
    after = step >= 7010
    loss[after] = 7.16 + 4.24 * np.exp(-(step[after] - 7010) / 40) + rng.normal(0, 0.03, after.sum())
    found = diagnose(run_of(loss=(step, loss)))
    assert (
        found[0].kind in ("divergence", "loss_spike")
        and found[0].severity == "error"
        and found[0].onset == 7010
    )


def test_glm_loss_scale_collapses_thirty_steps_before_its_loss():
    "GLM-130B: the loss scale collapses near step 33710, the loss explodes at 33740."
    rng, step = np.random.default_rng(0), np.arange(33000, 33800)
    scale = np.where(step < 33710, 2.0**15, 2.0 ** np.maximum(0, 15 - (step - 33709)))
    loss = 2.5 + rng.normal(0, 0.02, 800) + np.where(step >= 33740, 3.0, 0)
    found = diagnose(run_of(loss=(step, loss), loss_scale=(step, scale)))
    (collapse,) = found.of("loss_scale_collapse")
    spikes = [f for f in found if f.kind in ("loss_spike", "divergence")]
    assert collapse.severity == "error" and min(f.onset for f in spikes) - collapse.onset == 30


def test_recoveries():
    rng, x = np.random.default_rng(0), np.arange(8000)
    for tau, word in ((20, "fast"), (500, "slow")):
        loss = 2 + rng.normal(0, 0.02, 8000) + np.where(x >= 3000, 2 * np.exp(-(x - 3000) / tau), 0)
        assert [
            f.evidence["recovery"] for f in find_loss_spikes(run_of(loss=loss)) if f.severity != "info"
        ] == [word]
    stays = 2 + rng.normal(0, 0.02, 8000) + np.where(x >= 3000, 1 + np.exp(-(x - 3000) / 20.0), 0)
    assert diagnose(run_of(loss=stays))[0].kind == "divergence"


def test_slow_twins():
    x = np.random.default_rng(1).normal(0, 1, 400)
    for stat, f in (("median", np.median), ("mean", np.mean), ("std", np.std)):
        got = before(x, 50, 8, stat)
        want = [np.nan if i < 8 else f(x[max(0, i - 50) : i]) for i in range(400)]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    before(x, 50)[:] = 0  # what is kept for the next who asks is not what this one was given
    assert before(x, 50)[-1] == np.median(x[-51:-1])
    level, noise = level_and_noise(x, 64, 16)
    med = np.array([np.median(x[max(0, i - 8) : i]) if i >= 8 else np.nan for i in range(400)])
    np.testing.assert_allclose(level, med)
    i = 300
    assert noise[i] == pytest.approx(
        max(
            1.4826 * np.median(np.abs(x - med)[i - 64 : i]),
            1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(x, prepend=x[0]))[i - 64 : i]),
        )
    )
    skip, out = RULES["skipstep"].flags(x), []
    for i in range(400):
        h = x[max(0, i - 128) : i]
        out.append(len(h) >= 64 and x[i] > h.mean() + 6 * h.std(ddof=1))
    assert skip.tolist() == out


def test_data_driven_spikes_and_copies():
    def noisy(seed, at):
        x = 3 - np.arange(3000) / 3000 + np.random.default_rng(seed).normal(0, 0.02, 3000)
        x[at] += 0.5
        return x

    at = [400, 800, 1200, 1700, 2200, 2800]
    assert compare_runs({"a": run_of(loss=noisy(0, at)), "b": run_of(loss=noisy(1, at))}).kinds == [
        "data_driven_spike"
    ]
    assert (
        len(compare_runs({"a": run_of(loss=noisy(0, at)), "b": run_of(loss=noisy(1, [500, 900, 1300]))})) == 0
    )
    parted = noisy(0, at)
    parted[1500:] += 0.1
    found = compare_runs([run_of(loss=noisy(0, at)), run_of(loss=parted)])
    assert found.of("environment_change")[0].evidence["same_until"] == 1499


def test_smaller_learning_rates_only_delay_the_divergence_of_g4():
    """BLOOM-104B, experiments 7 to 10: 6e-5, 3e-5, 3e-5 and 1e-5 all diverged, the smaller ones later.

    The shape is made, the order is the published one.
    """
    onsets = []
    for lr, at in ((6e-5, 700), (3e-5, 1200), (3e-5, 1250), (1e-5, 2200)):
        i, rng = np.arange(3000), np.random.default_rng(at)
        loss = 3 + 5 * np.exp(-i / 150) + rng.normal(0, 0.03, 3000) + np.clip((i - at) * 0.01, 0, 4)
        found = [f for f in diagnose(run_of(loss=loss, lr=np.full(3000, lr))) if f.kind == "divergence"]
        assert len(found) == 1 and abs(found[0].onset - at) < 100, (lr, at, found)
        onsets.append(found[0].onset)
    assert onsets == sorted(onsets)


def test_our_rule_finds_most_on_shapes_that_nothing_was_tuned_on():
    scores = score_rules(10, kinds=HELD_OUT, first=1000)
    ours, others = scores.loc["default"], scores.drop("default")
    assert ours.recall > others.recall.max() and ours.precision > 0.95
    assert not (others.precision[others.recall > 0.5] > ours.precision).any()


def test_tied_lengths_share_their_rank():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    for distinct in (2, 3, 10, 500):
        x, y = rng.integers(0, distinct, 500), rng.integers(0, distinct, 500)
        y += x
        assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    tokens = np.where(rng.random(2000) < 0.05, 512.0, 4096.0)  # two lengths, the short one rare
    loss = 2 + 0.3 * (tokens == 512) + rng.normal(0, 0.05, 2000)
    (found,) = find_length_bias(run_of(loss=loss, tokens_per_step=tokens))
    rest = loss - before(loss, 32, 8)
    known = np.isfinite(rest)
    assert found.evidence["rank_correlation"] == pytest.approx(
        spearmanr(tokens[known], rest[known]).statistic
    )


def test_every_threshold_is_read_and_every_phrase_has_its_kind():
    import re

    import stabilitylab.detect
    import stabilitylab.probe
    from stabilitylab.detect.findings import MODULE_PHRASES, PHRASES
    from stabilitylab.detect.limits import LIMITS
    from stabilitylab.names.words import FINDING_KINDS

    rooms = Path(stabilitylab.detect.__path__[0]), Path(stabilitylab.probe.__path__[0])
    code = "".join(p.read_text(encoding="utf-8") for room in rooms for p in room.rglob("*.py"))
    read = set(re.findall(r'(?:limit|records_in_share|columns_above)\((?:[^()]|\([^()]*\))*?"(\w+)"\)', code))
    assert read == set(LIMITS)
    assert set(PHRASES) | set(MODULE_PHRASES) <= set(FINDING_KINDS)


def test_limits_are_few_have_a_source_and_stand_in_the_calibration():
    import csv

    from stabilitylab.detect.limits import LIMITS

    assert len(LIMITS) <= 80
    assert all(row.unit and row.meaning and row.source for row in LIMITS.values())
    with (Path(__file__).parent / "calibration.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["limit"] for row in rows} == set(LIMITS), "run `make calibrate`"
    as_they_are = [row for row in rows if row["tried"] == row["value"]]
    assert all(float(row["value"]) == LIMITS[row["limit"]].value for row in as_they_are), (
        "run `make calibrate`"
    )


def test_limits_of_one_call_hold_for_that_call_and_stand_in_its_findings():
    from stabilitylab.detect.limits import limit
    from stabilitylab.names.errors import InputError

    loss = 2 + np.random.default_rng(0).normal(0, 0.01, 400)
    loss[300:310] += 0.3
    spike = next(f for f in diagnose(run_of(loss=loss)).of("loss_spike") if f.onset == 300)
    assert spike.limits["spike_sigma"] == 7 and "limits" not in spike.to_dict()
    assert not diagnose(run_of(loss=loss), limits={"spike_sigma": 1000}).of("loss_spike")
    assert limit("spike_sigma") == 7
    for wrong in ({"no_such_limit": 1}, {"spike_sigma": float("nan")}, {"history": "long"}):
        with pytest.raises(InputError, match="allowed"):
            diagnose(run_of(loss=loss), limits=wrong)


def growing(n=3000, every=1, decades=4, onset=1000, last=2000, seed=0):
    "A gradient norm that grows by so many decades over `last` steps; the loss rises before it ends."
    rng, step = np.random.default_rng(seed), np.arange(n) * every
    norm = (0.6 + 3 * np.exp(-step / 60)) * np.exp(rng.normal(0, 0.2, n))
    norm *= 10 ** (decades * np.clip((step - onset) / last, 0, 1))
    loss = 2 + 3 * np.exp(-step / 200) + rng.normal(0, 0.02, n)
    loss += np.clip((step - onset - 0.8 * last) / 100, 0, 4)
    columns = {"loss": loss, "grad_norm": norm}
    return new_run(make_scalars({name: Samples(step, value) for name, value in columns.items()}))


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("decades", [4, 11])
def test_growth_before_the_failure_has_onset_doubling_time_and_lead(every, decades):
    found = diagnose(growing(4000 // every, every, decades))
    (growth,) = found.of("grad_norm_explosion")
    (divergence,) = found.of("divergence")
    assert growth.severity == "warning" and abs(growth.onset - 1000) <= max(40, 2 * every)
    assert growth.evidence["doubling_steps"] == pytest.approx(2000 * np.log10(2) / decades, rel=0.05)
    assert growth.evidence["lead_steps"] == divergence.onset - growth.onset > 1400
    assert f"{growth.evidence['lead_steps']:,} steps later" in growth.explanation


def test_growth_without_a_loss_event_is_an_alarm_only_beyond_a_hundredfold():
    for decades, severity in ((1.5, "info"), (3, "warning")):
        run = growing(decades=decades)
        run["scalars"]["loss"] = ("step", 2 + 3 * np.exp(-np.arange(3000) / 200))
        (growth,) = diagnose(run).of("grad_norm_explosion")
        assert growth.severity == severity and "lead_steps" not in growth.evidence


def test_norms_of_healthy_runs_do_not_grow():
    rng, i = np.random.default_rng(0), np.arange(3000)
    warm = np.minimum((i + 1) / 250, 1)
    for norm in (warm * 50, 0.3 * 5 ** (i / 3000), np.where(i < 1500, 1.0, 60.0), 8 / (1 + i / 50)):
        columns = {"loss": 2 + 3 * np.exp(-i / 200), "grad_norm": norm * np.exp(rng.normal(0, 0.3, 3000))}
        run = new_run(make_scalars({name: Samples(i, value) for name, value in columns.items()}))
        assert not [f for f in diagnose(run) if "doubling_steps" in f.evidence]


def test_a_module_that_exploded_says_how_it_grew():
    step, modules = np.arange(400), ["blocks.0", "blocks.1"]
    absmax = np.stack([np.exp2(np.maximum(0, step - 150) / 20), np.ones(400)], axis=1)
    labels = {"step": step, "module": modules, "kind": ("module", ["block"] * 2), "layer": ("module", [0, 1])}
    activations = xr.Dataset({"absmax": (("step", "module"), absmax)}, coords=labels)
    found = find_activation_explosion(xr.DataTree.from_dict({"activations": activations}))
    assert found[0].modules == ("blocks.0",) and abs(found[0].evidence["growth_onset"] - 150) <= 5
    assert found[0].evidence["doubling_steps"] == pytest.approx(20, rel=0.02)


def noise_of(kind, n, rng):
    "White, heavy-tailed or one-sided noise, or one with a memory."
    if kind == "memory":
        e = rng.normal(0, 0.1, n)
        return np.convolve(e, 0.7 ** np.arange(n))[:n]
    return {
        "white": rng.normal(0, 0.1, n),
        "tails": 0.1 * rng.standard_t(3, n),
        "one-sided": np.abs(rng.normal(0, 0.3, n)),
    }[kind]


def test_noise_alone_is_no_lost_run_and_a_short_divergence_is_one():
    errors = dict.fromkeys(("white", "tails", "one-sided", "memory"), 0)
    for kind in errors:
        for n in (12, 13, 14, 16, 60, 100, 200):
            for seed in range(30):
                loss = 2 + noise_of(kind, n, np.random.default_rng([n, seed]))
                errors[kind] += any(f.severity == "error" for f in find_divergence(run_of(loss=loss)))
    assert sum(errors.values()) <= 20 and errors["white"] == 0, errors  # 94 and 5 without `_wander`
    found = 0
    for n in (12, 16, 24, 40):
        for seed in range(20):
            i, rng = np.arange(n), np.random.default_rng([7, n, seed])
            loss = 2 + 2 * np.exp(-i / 2) + rng.normal(0, 0.1, n) + 0.3 * np.clip(i - n // 2, 0, None)
            found += any(f.severity == "error" for f in find_divergence(run_of(loss=loss)))
    assert found >= 0.95 * 80


def test_high_records_that_lie_together_are_one_spike():
    rng, i = np.random.default_rng(0), np.arange(400)
    quiet = 2 + 3 * np.exp(-i / 60) + rng.normal(0, 0.02, 400)
    for high, last in ((range(200, 206), 205), ((200, 202, 204), 204), ((200, 203), 203)):
        loss, norm = quiet.copy(), 0.5 * np.exp(rng.normal(0, 0.1, 400))
        loss[list(high)] += rng.uniform(1, 3, len(high))
        norm[list(high)] *= 50
        found = diagnose(run_of(loss=loss, grad_norm=norm))
        (spike,) = found.of("loss_spike")
        assert (spike.onset, spike.end, spike.evidence["recovery"]) == (200, last, "fast")
        (explosion,) = found.of("grad_norm_explosion")
        assert explosion.evidence["lead_steps"] == 0 and "at the same step, 200" in explosion.explanation
    apart = quiet.copy()
    apart[[200, 300]] += 2
    assert len(diagnose(run_of(loss=apart)).of("loss_spike")) == 2


def test_a_loss_scale_of_one_is_no_fp16():
    for scale, told in ((1.0, []), (65536.0, ["overflow"])):
        run = run_of(loss=np.linspace(3, 2, 40), loss_scale=np.full(40, scale))
        labels = {"step": np.arange(40), "module": ["h.0"], "kind": ("module", ["block"])}
        labels["layer"] = ("module", [0])
        absmax = xr.Dataset({"absmax": (("step", "module"), np.full((40, 1), 9e4))}, coords=labels)
        found = diagnose(
            xr.DataTree.from_dict({"scalars": run["scalars"].to_dataset(), "activations": absmax})
        )
        assert found.of("overflow").kinds == told


def test_what_only_one_loss_of_several_shows_says_so():
    (spike,) = diagnose(log_case("one dataset spikes")).of("loss_spike")
    assert spike.series == "pairs_loss" and spike.severity == "info" and spike.evidence["z"] > 25
    assert spike.explanation.startswith("Only in pairs_loss, not in loss and text_loss: the loss jumped")
    (plateau,) = diagnose(log_case("one dataset stands still")).of("plateau")
    assert plateau.series == "pairs_loss" and plateau.evidence["names"] == ["loss", "text_loss"]
    assert plateau.evidence["share_of_run"] > 0.3
    healthy = {name: 2 + 3 * np.exp(-np.arange(1500) / 200) + 0.1 * k for k, name in enumerate("ab")}
    run = run_of(loss=healthy["a"], a_loss=healthy["a"], b_loss=healthy["b"])
    assert not [f for f in diagnose(run) if "only_in" in f.evidence]


@pytest.mark.parametrize("ahead", [-4, 0, 3])
def test_which_came_first_z_loss_or_loss(ahead):
    rng, t = np.random.default_rng(0), np.arange(1500) - 700
    loss = 2 + 3 * np.exp(-np.arange(1500) / 200) + rng.normal(0, 0.02, 1500)
    z_loss = 0.01 * np.exp(rng.normal(0, 0.05, 1500)) * np.where((t >= -ahead) & (t < 25), 0.1, 1)
    found = diagnose(run_of(loss=loss + np.where((t >= 0) & (t < 30), 1, 0), z_loss=z_loss))
    (collapse,) = found.of("z_loss_collapse")
    words = {
        -4: "The loss rose first, 4 steps before it",
        0: "at the same step",
        3: "The loss rose 3 steps after",
    }
    assert words[ahead] in collapse.explanation


def loss_of(n, seed):
    "A loss that falls and settles, one value a step."
    return 2 + 2 * np.exp(-np.arange(n) / 90) + np.random.default_rng(seed).normal(0, 0.01, n)


@pytest.mark.parametrize("height, effect", [(0.12, "higher"), (0.0, "same")])
def test_a_rate_that_was_tripled_for_a_hundred_records_tells_what_the_loss_did(height, effect):
    step, loss = 10 * np.arange(800), loss_of(800, 3)
    raised = (step >= 5000) & (step < 6000)
    columns = {"loss": loss + height * raised, "lr": 1e-4 * np.where(raised, 3, 1)}
    found = diagnose(run_of(**{name: (step, values) for name, values in columns.items()}))
    (jump,) = found.of("lr_jump")
    assert (jump.onset, jump.end, jump.evidence["until"]) == (5000, 5999, 6000)
    assert jump.evidence["effect"] == effect and f"the loss {'was' if height else 'went'}" in jump.explanation
    assert ("loss_followed" in jump.evidence) == bool(height) and not found.of("slow_rise")


@pytest.mark.parametrize("jumping", [("code",), ("code", "wiki"), ("code", "wiki", "books")])
def test_a_spike_of_the_mean_names_the_datasets_that_jumped(jumping):
    step, names = 50 * np.arange(800), ("wiki", "books", "code")
    parts = {name: loss_of(800, seed) for seed, name in enumerate(names)}
    spike = 0.6 * ((step >= 30000) & (step < 30200))
    parts = {name: part + spike * (name in jumping) for name, part in parts.items()}
    columns = {"loss": sum(parts.values()) / 3} | {f"{name}_loss": part for name, part in parts.items()}
    found = diagnose(run_of(**{name: (step, values) for name, values in columns.items()}))
    (told,) = [f for f in found.of("loss_spike") if "only_in" not in f.evidence]
    calm = sorted(set(names) - set(jumping))
    assert told.onset == 30000 and ("did not" in told.explanation) == bool(calm)
    assert ("stayed" in told.evidence) == bool(calm)
    if calm:
        assert sorted(told.evidence["jumped_too"]) == sorted(f"{name}_loss" for name in jumping)
        assert sorted(told.evidence["stayed"]) == [f"{name}_loss" for name in calm]


def test_a_table_with_time_stamps_has_a_clock(tmp_path):
    for seed, (name, seconds) in enumerate((("fast", 1.2), ("slow", 12.5))):
        times = pd.Timestamp("2025-03-04T01:00:00") + pd.to_timedelta(seconds * np.arange(300), "s")
        table = pd.DataFrame({"step": np.arange(300), "loss": loss_of(300, seed), "time": times.astype(str)})
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    (slow,) = compare_runs(read_runs(tmp_path)).of("throughput_drop")
    assert slow.evidence["names"] == ["slow.csv"] and abs(slow.evidence["sister_factor"] - 12.5 / 1.2) < 0.5
