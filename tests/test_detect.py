"Findings: known events of logs, silence on healthy ones, golden numbers, slow twins of rolling statistics."

from pathlib import Path

import numpy as np
import pytest

from stabilitylab import compare_runs, diagnose, read_runs
from stabilitylab.cases.traces import HELD_OUT, score_rules
from stabilitylab.detect.metrics import find_length_bias, rank_correlation
from stabilitylab.detect.spike_rules import RULES
from stabilitylab.detect.spikes import find_loss_spikes
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
    from stabilitylab.detect.limits import LIMITS
    from stabilitylab.detect.phrase import MODULE_PHRASES, PHRASES
    from stabilitylab.names.findings import FINDING_KINDS

    rooms = Path(stabilitylab.detect.__path__[0]), Path(stabilitylab.probe.__path__[0])
    code = "".join(p.read_text(encoding="utf-8") for room in rooms for p in room.glob("*.py"))
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
