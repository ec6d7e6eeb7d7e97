"Trials survive what happens to child processes; the command answers in the agreed form."

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.cases.registry import sample
from stabilitylab.fixes.registry import apply_all, fix
from stabilitylab.fixes.training import Training
from stabilitylab.names.errors import InputError
from stabilitylab.read.runs import read_runs
from stabilitylab.report.trial import trial_text, trial_words
from stabilitylab.trial.arm import Arm, ArmCurve, arm_of, null_arm, scaled_to
from stabilitylab.trial.outcome import detectable_gain, failure_bound, judge, paired_interval
from stabilitylab.trial.settings import recipe_of
from stabilitylab.trial.start import Start
from stabilitylab.trial.tasks import STOPPED, EndedEarly
from stabilitylab.trial.trial import Trial, TrialResult
from stabilitylab.trial.verdict import verdicts_of
from tests.command import command

START = Start(str(sample()), 300)


def made(arm: str, seed: int, loss: np.ndarray) -> ArmCurve:
    "A curve of an arm."
    return ArmCurve(arm, seed, np.arange(len(loss)), loss)


def held(seed: int, at: int, until: str) -> Training:
    "The run of the sample, which stays before step `at` until there is a file `until`."
    training = START.build(seed)
    batches = training.batches

    def later(step: int) -> list:
        while step >= at and not Path(until).exists():
            time.sleep(0.02)
        return batches(step)

    training.batches = later
    return training


@pytest.mark.slow  # trains in processes
def test_a_killed_arm_is_named_and_goes_on_where_it_was(tmp_path):
    how, go_on = {"steps": 120, "seeds": 1, "folder": tmp_path}, tmp_path / "go_on"
    start = Start(function="tests.test_trial:held", arguments={"at": 360, "until": str(go_on)})
    trial = Trial(start, ["lower_lr:factor=0.1"], **how, workers=1)
    trial.poll()
    log = tmp_path / "arm-0" / "seed-0" / "metrics.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and (not log.is_file() or len(log.read_text().splitlines()) < 52):
        time.sleep(0.05)
    (job,) = trial._jobs.values()
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    state = trial.poll()
    assert any("SIGKILL" in note for note in trial.notes)
    assert not state.failed and len(trial._jobs) == 1  # it is begun again by itself
    trial.cancel()
    before = len(log.read_text().splitlines())
    go_on.touch()
    again = Trial(start, ["lower_lr:factor=0.1"], **how, workers=2)
    result = again.run(progress=False)
    assert result.complete and before >= 50
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    assert [row["step"] for row in lines].count(300) == 1  # the first steps were not taken twice
    (base, _) = result.curves
    assert list(base.step) == list(range(300, 420))


def test_not_finite_is_an_outcome_and_not_a_fault():
    arms = [Arm(), Arm(({"name": "a"},))]
    good = np.linspace(3, 2, 40) + 0.01 * np.random.default_rng(0).standard_normal(40)
    bad = np.r_[good[:20], [np.nan] * 3]
    curves = [
        made(arm.name, seed, loss) for arm, loss in zip(arms, (bad, good), strict=True) for seed in range(3)
    ]
    base, fixed = verdicts_of(arms, curves)
    assert base.diverged == 3 and base.final_loss == [np.inf] * 3
    assert fixed.verdict == "helps" and fixed.effect < -0.5 and np.isfinite(fixed.effect)


def test_interval_against_student_and_the_bootstrap_of_scipy():
    from scipy import stats

    d = np.random.default_rng(1).normal(-0.2, 0.1, 12)
    low, high = paired_interval(d)
    student = stats.t.interval(0.95, len(d) - 1, d.mean(), d.std(ddof=1) / len(d) ** 0.5)
    boot = stats.bootstrap(
        (d,), np.mean, confidence_level=0.95, method="percentile", rng=0
    ).confidence_interval
    assert low == pytest.approx(min(student[0], boot.low), abs=5e-3)
    assert high == pytest.approx(max(student[1], boot.high), abs=5e-3)


def test_an_arm_that_only_postpones_does_not_help():
    arms = [Arm(), Arm(({"name": "later"},))]

    def failing(at: int, seed: int) -> np.ndarray:
        loss = 2 + 0.01 * np.random.default_rng(seed).standard_normal(100)
        loss[at:] += 1
        return loss

    curves = [made("unchanged", s, failing(40, s)) for s in range(3)]
    curves += [made("later", s, failing(70, s + 9)) for s in range(3)]
    told = verdicts_of(arms, curves)[1]
    assert told.verdict == "does not help" and 25 <= told.postponed <= 35


def noisy(level: float, seed: int, n: int = 60) -> np.ndarray:
    "A flat loss with a standard deviation of 0.02 nats."
    return level + 0.02 * np.random.default_rng(seed).standard_normal(n)


def test_an_arm_that_only_stops_failing_is_not_said_to_do_nothing():
    "The unchanged run goes far beyond its initial loss; the arm stays there and learns nothing."
    arms = [Arm(), Arm(({"name": "still"},)), null_arm(60)]
    ends = {"unchanged": 14.0, "still": 5.01, "another order": 14.0}
    curves = [
        made(arm, seed, np.linspace(5, ends[arm], 60) + noisy(0, 7 * i + seed))
        for i, arm in enumerate(ends)
        for seed in range(3)
    ]
    base, still, null = verdicts_of(arms, curves, 5.0)
    assert (base.diverged, still.diverged, still.rescued) == (3, 0, 3)
    assert still.verdict == "can't tell yet" and still.decided_by == "prevented"
    words = trial_words(TrialResult(Start(function="a:b"), 60, [base, still, null], curves, True))
    assert "still prevents the failure on 3 of 3 seeds (p <= 1/" in words and "lowers no loss" in words
    assert "hold together" not in words  # one interval


def test_a_state_that_had_failed_is_compared_with_the_recorded_level():
    "Recorded: 2 nats, then 3.2 from before the start. No curve rises, and the unchanged run has failed."
    recorded = np.r_[np.linspace(5, 2, 60), noisy(2, 0), noisy(3.2, 1, 20)]
    arms = [Arm(), *(Arm(({"name": name},)) for name in ("back", "nothing", "half")), null_arm(60)]
    levels = {"unchanged": 3.2, "back": 2.0, "nothing": 3.2, "half": 2.8, "another order": 3.2}
    curves = [
        made(arm, s, noisy(level, 7 * i + s))
        for i, (arm, level) in enumerate(levels.items())
        for s in range(3)
    ]
    base, back, nothing, half, null = verdicts_of(arms, curves, 5.0, failure_bound(recorded))
    assert (base.diverged, back.diverged, nothing.diverged, half.diverged) == (3, 0, 3, 3)
    assert back.verdict == "helps" and back.rescued == 3 and back.decided_by == "failures"
    assert nothing.verdict != "helps" and half.decided_by == "lessened"
    words = trial_words(TrialResult(Start(function="a:b"), 60, [base, back, half, null], curves, True))
    assert "3 of 3 seeds (p <= 1/102 if the fix did nothing, corrected for 3 arms)" in words
    assert "half lessens the failure" in words and "does not help" not in words
    assert "The intervals of the 2 arms hold together with 95 % (Bonferroni over 3)." in words
    assert "another order of the same batches, nothing else changed: the final loss changes by" in words


def test_an_effect_that_excludes_zero_is_never_said_to_be_none():
    for shift in np.linspace(-0.3, 0.3, 61):
        for diverged in ((0, 0), (3, 3), (1, 3), (3, 1)):
            differences = shift + np.array([-0.002, 0.0, 0.002])
            low, high = paired_interval(differences)
            verdict, _ = judge(differences, 3.0, diverged)
            assert verdict != "helps" or judge(differences, 3.0, diverged, n_arms=9)[0] != "does not help"
            assert verdict != "does not help" or low <= 0 <= high, (shift, diverged)


def test_a_fix_that_never_acted_says_so():
    rng = np.random.default_rng(0)
    losses = [4 + rng.normal(0, 0.1, 60) for _ in range(3)]
    arms = [Arm(), arm_of("skip_above"), arm_of("clip_norm"), null_arm(60)]
    moved = {"clip_norm": -0.5, "another order": 1e-12}
    curves = [
        made(arm.name, seed, losses[seed] + moved.get(arm.name, 0.0)) for arm in arms for seed in range(3)
    ]
    verdicts = verdicts_of(arms, curves)
    assert [verdict.acted for verdict in verdicts] == [True, False, True, True]
    result = TrialResult(START, 60, verdicts, curves, True)
    words = trial_words(result)
    assert words.count("skip_above never acted: every loss is that of the run unchanged") == 1
    assert "skip_above does not help" not in words and verdicts[1].to_dict()["acted"] is False
    (line,) = [line for line in trial_text(result).splitlines() if line.startswith("skip_above")]
    assert "never acted" in line


def test_arms_that_became_nan_alike_are_not_called_idle():
    rng = np.random.default_rng(0)
    losses = [np.r_[4 + rng.normal(0, 0.1, 20), np.full(40, np.nan)] for _ in range(3)]
    arms = [Arm(), arm_of("lower_lr"), null_arm(60)]
    curves = [made(arm.name, seed, losses[seed]) for arm in arms for seed in range(3)]
    verdicts = verdicts_of(arms, curves)
    assert verdicts[1].acted
    words = trial_words(TrialResult(START, 60, verdicts, curves, True))
    assert "never acted" not in words and "above the initial loss or no numbers" in words


def test_what_a_fix_counts_in_steps_fits_into_the_trial(tmp_path):
    trial = Trial(
        START, ["warmup", "warmup:steps=50", "stable_spam", "qk_norm"], 40, folder=tmp_path, device="cpu"
    )
    assert trial.arms[1].name == "warmup:steps=8,shape=linear"  # beside another of its kind
    taken = {arm.fixes[0]["name"]: arm.fixes[0]["parameters"] for arm in reversed(trial.arms[1:])}
    assert taken["warmup"]["steps"] == 8 and taken["stable_spam"]["interval"] == 16
    assert trial.arms[2].fixes[0]["parameters"]["steps"] == 50  # what a user chose stays
    assert trial.notes[0] == "In warmup, steps is 8 instead of 100, as the trial has 40 steps"
    assert trial.add("decay_to_zero").fixes[0]["parameters"]["steps"] == 40


@pytest.mark.slow  # reads 340 recorded batches
def test_what_is_skipped_of_a_record_never_comes_with_any_seed(tmp_path):
    start = Start(str(sample()), 300)
    tokens = lambda part: part["tokens"].numpy().tobytes()  # noqa: E731
    plain = start.build(0)
    recorded = [tokens(part) for step in range(300, 400) for part in plain.batches(step)]
    for seed in (0, 1):
        training = start.build(seed)
        apply_all(training, [fix("shuffle", block=64), fix("skip_batches", count=40)])
        dealt = {tokens(part) for step in range(300, 420) for part in training.batches(step)}
        assert dealt == set(recorded[40:]) - set(recorded[:40]) and len(dealt) == 60
    training = start.build(0)
    apply_all(training, [fix("skip_batches", count=2, after=10)])
    dealt = {tokens(part) for step in range(300, 398) for part in training.batches(step)}
    assert dealt == set(recorded) - set(recorded[10:12])
    with pytest.raises(InputError, match=r"1\.\.99"):
        fix("skip_batches", count=100).apply(start.build(0))
    trial = Trial(start, ["skip_batches", "zclip", "adagc:warmup=5"], 40, folder=tmp_path, device="cpu")
    assert trial.arms[1].fixes[0]["parameters"]["count"] == 50
    assert [arm.fixes[0]["parameters"]["most"] for arm in trial.arms[2:]] == [0, 0]
    assert "In skip_batches, count is 50 instead of 200" in trial.notes[0]


def test_losses_capped_on_both_sides_cannot_be_compared():
    "The unchanged run ends at 4.9 and the arm at 25,904, both above the initial loss of 4.8."
    arms = [Arm(), Arm(({"name": "far"},)), Arm(({"name": "near"},))]
    levels = {"unchanged": 4.9, "far": 25_904.0, "near": 4.95}
    curves = [made(arm, s, noisy(level, s)) for arm, level in levels.items() for s in range(3)]
    verdicts = verdicts_of(arms, curves, 4.8)
    words = trial_words(TrialResult(Start(function="a:b"), 60, verdicts, curves, True))
    assert [verdict.capped for verdict in verdicts] == [3, 3, 3]
    assert "near cannot be compared" in words and "+0" not in words and "far does not help: it" not in words


def test_losses_capped_on_both_sides_show_no_gain_where_failures_decide_nothing():
    "It said 'so far +0, +0 to +0; a gain of 0.007 would show; 1 more seed would probably decide'."
    arms, ends = (
        [Arm(), Arm(({"name": "fix"},))],
        {"unchanged": (4.85, 90.0, 90.0), "fix": (4.85, 4.85, 90.0)},
    )
    curves = [made(arm, s, noisy(level, s)) for arm in ends for s, level in enumerate(ends[arm])]
    verdicts = verdicts_of(arms, curves, 4.8)
    words = trial_words(TrialResult(Start(function="a:b"), 60, verdicts, curves, True))
    assert verdicts[1].capped == 3 and verdicts[1].diverged < verdicts[0].diverged
    assert "fix cannot be compared" in words and "would show" not in words and "+0" not in words


def test_a_loss_of_the_run_unchanged_that_is_capped_is_said_to_count_as_the_initial_one():
    "498.153 stood beside 1.693 with an effect of -490.1, from the initial loss of 491.8."
    arms, levels = [Arm(), Arm(({"name": "fix"},))], {"unchanged": 498.0, "fix": 1.7}
    curves = [made(arm, s, noisy(levels[arm], s)) for arm in levels for s in range(3)]
    for start, is_said in ((491.8, True), (600.0, False)):
        verdicts = verdicts_of(arms, curves, start)
        words = trial_words(TrialResult(Start(function="a:b"), 60, verdicts, curves, True))
        assert ("On 3 of 3 seeds the loss of the run unchanged is capped at the initial" in words) == is_said
        assert verdicts[1].effect == pytest.approx(1.7 - min(start, 498.0), abs=2.0)


@pytest.mark.slow  # trains in processes
def test_a_real_placebo_is_bit_for_bit_the_run_unchanged():
    result = Trial(START, ["placebo"], steps=3, seeds=2).run(progress=False)
    for seed in range(2):
        a, b = (
            next(c for c in result.curves if c.arm == arm and c.seed == seed)
            for arm in ("unchanged", "placebo")
        )
        assert np.array_equal(a.loss, b.loss)
    assert result.arms[1].effect == 0 and result.arms[1].verdict == "does not help"
    assert not np.array_equal(result.curves[0].loss, result.curves[1].loss)  # another seed, another order


@pytest.mark.slow  # trains in processes
def test_the_command_prints_the_agreed_json(tmp_path):
    words = ["trial", str(sample()), "--fix", "weight_decay", "--steps", "3", "--seeds", "2", "--json"]
    page = tmp_path / "report.html"
    out = command(*words, "--html", page)
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout)
    assert {"start", "arms", "words"} <= set(told)
    wanted = {
        "fix",
        "parameters",
        "seeds",
        "final_loss",
        "diverged",
        "verdict",
        "effect",
        "interval",
        "side_effects",
    }
    assert all(wanted <= set(arm) for arm in told["arms"])
    assert told["arms"][0]["fix"] == "unchanged" and told["arms"][1]["fix"] == "weight_decay"
    html = page.read_text()
    assert "<h2>Trial</h2>" in html and "weight_decay" in html and "<script" not in html


def test_bad_input_is_one_line():
    for words, said in (
        (["--fix", "nothing_like_it"], "--fix 'nothing_like_it'"),
        (["--fix", "lower_lr:factor=7000"], "`factor`=7000"),
        (["--seeds", "0"], "--seeds 0 "),
        (["--step", "7"], "--step 7 "),
    ):
        out = command("trial", sample(), *words)
        assert out.returncode == 2 and said in out.stderr, words
        assert len(out.stderr.strip().splitlines()) == 1, words


def test_words_of_a_command_line_make_arms():
    assert arm_of("z_loss + qk_norm:kind=rms").parameters["qk_norm"]["kind"] == "rms"
    with pytest.raises(ValueError, match="both take"):
        Trial(START, ["lower_lr+raise_lr"], steps=1, seeds=1).start.build(0)
        from stabilitylab.fixes.registry import apply_all, fix

        apply_all(START.build(0), [fix("lower_lr"), fix("raise_lr")])


@pytest.mark.parametrize(
    "name, parameter, value", [("skip_sigma", "least", 8), ("update_filter", "window", 16)]
)
def test_what_a_fix_waits_for_comes_within_a_trial(name, parameter, value):
    arm, words = scaled_to(arm_of(name), 40)
    assert arm.fixes[0]["parameters"][parameter] == value and f", {parameter} is {value} instead" in words[0]


@pytest.mark.parametrize("precision, taken", [("16-mixed", "fp16"), ("16", "fp16"), ("bf16-mixed", "bf16")])
def test_the_precision_of_lightning_is_understood(tmp_path, precision, taken):
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {i}: loss {3 - i / 100:.4f}\n" for i in range(60)))
    run = next(iter(read_runs(log).values()))
    assert recipe_of(run, {"precision": precision}).recipe.precision == taken


def told_of_finals(by_arm, start_loss=None):
    "The words of a trial whose arms end at these losses, one a seed; arms and seeds without noise."
    nulls = {"unchanged": Arm(), "another order": null_arm(20)}
    arms = [nulls.get(name) or Arm(({"name": name},)) for name in by_arm]
    curves = [
        made(arm.name, seed, np.r_[start_loss or 9.0, np.full(20, final)])
        for arm, finals in zip(arms, by_arm.values(), strict=True)
        for seed, final in enumerate(finals)
    ]
    verdicts = verdicts_of(arms, curves, start_loss)
    result = TrialResult(Start(function="a:b"), 20, verdicts, curves, True)
    return trial_words(result), trial_text(result), verdicts


def test_an_effect_that_may_exceed_a_hundredth_is_not_called_smaller():
    "Of a stranger's trial: +1.2 % (+0.3 to +2.1) was told as an effect of less than 1 %."
    words, _, (_, arm) = told_of_finals({"unchanged": [5.6, 5.75], "lower_lr": [5.664, 5.822]})
    assert 0 < arm.interval[0] < 0.01 * 5.675 < arm.interval[1] and arm.decided_by == "raised"
    assert "less than 1 %" not in words.replace("more or less than 1 %", "")
    assert "lower_lr does not lower the final loss: it is 0.068 higher" in words
    words, _, (_, arm) = told_of_finals({"unchanged": [5.6, 5.75], "lower_lr": [5.61, 5.7601]})
    assert arm.decided_by == "small" and "has an effect of less than 1 %" in words


def test_seeds_beyond_what_is_counted_are_more_than_a_hundred():
    "Of a stranger's trial: about 2,000 seeds were needed and `100 more` was told."
    words, _, (_, arm) = told_of_finals({"unchanged": [0.5, 0.6], "lower_lr": [0.521, 0.5702]})
    assert arm.more_seeds == 100 and "more than 100 more seeds would probably decide" in words
    words, _, (_, arm) = told_of_finals({"unchanged": [3.0, 3.5], "lower_lr": [2.0, 3.0]})
    # with 4 seeds the half width, 3.18 of t times 0.354/√4, is less than 0.75 less 1 % of the loss
    assert arm.more_seeds == 2 and "; 2 more seeds would probably decide" in words


def test_chance_that_is_capped_is_not_called_zero():
    "Of a stranger's trial: losses above the first one are capped, and `+0: so much is chance` was told."
    finals = {"unchanged": [4.2, 4.3], "lower_lr": [4.25, 4.35], "another order": [4.22, 4.28]}
    words, text, verdicts = told_of_finals(finals, start_loss=4.1)
    assert [arm.capped for arm in verdicts[1:]] == [2, 2] and "so much is chance" not in words
    assert "capped there, so this trial does not tell what is chance" in words
    assert text.count("(capped)") == 2 and "+0.000" not in text


def test_seeds_that_are_one_run_are_told():
    "Of a stranger's program with a single batch: its two equal seeds were told as chance of +0."
    words, _, _ = told_of_finals(
        {"unchanged": [2.3, 2.3], "lower_lr": [2.4, 2.4], "another order": [2.3, 2.3]}
    )
    assert "so that all seeds are one run and the intervals do not tell what is chance" in words
    assert "so much is chance" not in words and "never acted" not in words


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_detectable_gain_is_found_in_four_of_five_trials(seeds):
    "It was found in 64 of 100 trials of three seeds, as a spread of few seeds is mostly too small."
    differences = np.random.default_rng(0).standard_normal((600, seeds))
    gain = np.median([detectable_gain(row, 0.0) for row in differences])
    helped = np.mean([judge(row - gain, 0.0, (0, 0))[0] == "helps" for row in differences])
    assert 0.74 < helped < 0.86, helped


def test_seeds_that_fail_alike_are_one_sentence_and_what_was_stopped_is_no_fault():
    curves = [made("unchanged", s, noisy(2, s)) for s in range(2)]
    (base,) = verdicts_of([Arm()], curves, 5.0)
    failed = [EndedEarly("far:lr=1", f"far:lr=1, seed {s}", "it diverged: NaN") for s in range(3)]
    failed.append(EndedEarly("slow", "slow, seed 1", STOPPED))
    failed.append(EndedEarly("near", "near, seed 0", "the child was killed"))
    result = TrialResult(Start(function="a:b"), 60, [base], curves, False, tuple(failed))
    assert result.stopped == ["slow, seed 1"] and len(result.faults) == 4
    words = trial_words(result)
    assert "Not all requested arms were trained: 1 stopped before the end, such as slow, seed 1." in words
    assert "far:lr=1 ended early on 3 seeds: it diverged: NaN." in words
    assert "near ended early on 1 seed: the child was killed." in words
