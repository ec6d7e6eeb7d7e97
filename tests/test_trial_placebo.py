"How often a verdict is wrong: placebos with noise of their own, healthy and failing, with heavy tails."

import numpy as np
import pytest

from stabilitylab.numerics.modes import fast_arithmetic
from stabilitylab.trial.arm import Arm, ArmCurve, null_arm
from stabilitylab.trial.batched import BatchedTraining
from stabilitylab.trial.outcome import failure_chance, outcome
from stabilitylab.trial.settings import proxy_training
from stabilitylab.trial.verdict import verdicts_of

ARMS = [Arm(), Arm(({"name": "placebo"},))]
TINY = {"d_model": 16, "n_layer": 1, "n_head": 2, "seq": 16, "batch": 4, "clip": None}
STATED = 0.05  # of a placebo that is said to help or to harm: 2.5 % each way


@fast_arithmetic()
def real_pool(lr, seeds=24, steps=60):
    "Losses of one recipe under many seeds: (seed, step)."
    schedule = ((0, 1.0), (1, 1.0))
    bundle = BatchedTraining(
        [proxy_training(seed=s, lr=lr, steps=steps, schedule=schedule, **TINY) for s in range(seeds)]
    )
    return np.array([[done.loss for done in bundle.run_step()] for _ in range(steps)]).T


def made_pool(tail, seeds=64, steps=60):
    "Curves of which some fail, and end anywhere."
    rng = np.random.default_rng(5)
    loss = 2.5 - 0.3 * np.arange(steps) / steps + 0.03 * rng.standard_normal((seeds, steps))
    fails = rng.random(seeds) < 0.6
    loss[fails, steps // 2 :] += (0.4 + 0.4 * np.exp(tail * rng.standard_normal(fails.sum())))[:, None]
    loss[:, 0] = 4.85
    return loss


def wrong_verdicts(pool, seeds, trials, rng):
    "Shares of placebo trials that are said to help and to harm; every arm has other runs of the same recipe."
    said = []
    for _ in range(trials):
        chosen = rng.choice(len(pool), 2 * seeds, replace=False)
        curves = [
            ArmCurve(ARMS[at >= seeds].name, at % seeds, np.arange(pool.shape[1]), pool[row])
            for at, row in enumerate(chosen)
        ]
        said.append(verdicts_of(ARMS, curves)[1].verdict)
    return said.count("helps") / trials, said.count("harms") / trials


@pytest.mark.slow  # many trials
@pytest.mark.parametrize("lr", [0.01, 0.3, 2.0], ids=["healthy", "rough", "failing"])
def test_a_placebo_on_real_runs(lr):
    pool = real_pool(lr)
    for seeds in (3, 5):
        helps, harms = wrong_verdicts(pool, seeds, 500, np.random.default_rng(seeds))
        assert helps + harms <= STATED, (seeds, helps, harms)


@pytest.mark.slow  # many trials
@pytest.mark.parametrize("tail", [0.3, 1.0, 2.5])
def test_a_placebo_on_failures_with_heavy_tails(tail):
    pool = made_pool(tail)
    share = np.mean([outcome(ArmCurve("", 0, np.arange(60), loss)).diverged for loss in pool])
    assert 0.4 < share < 0.75  # where most wrong verdicts are possible
    for seeds in (3, 4, 6):
        helps, harms = wrong_verdicts(pool, seeds, 200, np.random.default_rng(seeds))
        assert helps + harms <= STATED, (seeds, helps, harms)


def test_failures_are_told_apart_by_chance_as_seldom_as_is_said():
    "By simulation: how often the probability is below a level, for any rate of failure."
    rng = np.random.default_rng(0)
    for n_null, n_arm in ((3, 3), (6, 3), (5, 5)):
        chance = np.array(
            [
                [failure_chance((arm, n_arm), (null, n_null)) for null in range(n_null + 1)]
                for arm in range(n_arm + 1)
            ]
        )
        for rate in (0.1, 0.3, 0.5, 0.7, 0.9):
            arm, null = rng.binomial(n_arm, rate, 20_000), rng.binomial(n_null, rate, 20_000)
            for level in (0.0125, 0.025, 0.1):
                assert (chance[arm, null] <= level).mean() <= level + 0.004, (n_null, rate, level)


def test_healthy_curves_have_not_left():
    rng = np.random.default_rng(0)
    for steps in (20, 60, 300):
        flat = 2.5 + 0.1 * rng.standard_normal((200, steps)) * (1 + 3 * (rng.random((200, steps)) < 0.02))
        left = sum(outcome(ArmCurve("", 0, np.arange(steps), loss)).diverged for loss in flat)
        assert left <= 2


def correlated(rho, shape, rng):
    "Noise with a standard deviation of 1 and a correlation from step to step."
    fresh = rng.standard_normal((*shape[:-1], shape[-1] + 100))
    noise = fresh.copy()
    for step in range(1, noise.shape[-1]):
        noise[..., step] = rho * noise[..., step - 1] + (1 - rho**2) ** 0.5 * fresh[..., step]
    return noise[..., 100:]


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.5, 0.8, 0.9])
def test_autocorrelated_losses_are_not_failures(rho):
    "Three arms that do nothing on a flat loss, then the first one with a gain of 25 %."
    rng, n_trials = np.random.default_rng(7), 60
    arms = [Arm(), *(Arm(({"name": name},)) for name in "abc"), null_arm(100)]
    failed, family, denied = 0, 0, 0
    for _ in range(n_trials):
        loss = 2.5 + 0.25 * correlated(rho, (5, 3, 100), rng)
        told = judged(arms, loss)
        failed += told[0].diverged > 0
        family += any(arm.verdict in ("helps", "harms", "does not help") for arm in told[1:4])
        loss[1] *= 0.75
        denied += judged(arms, loss)[1].verdict == "does not help"
    assert failed <= STATED * n_trials and denied <= STATED * n_trials, (failed, denied)
    assert family <= 2 * STATED * n_trials, family  # sixty trials of a share of at most 5 %


def judged(arms, loss):
    "The verdicts on losses (arm, seed, step)."
    steps = np.arange(loss.shape[-1])
    pairs = [(arm, seed) for arm in range(len(arms)) for seed in range(loss.shape[1])]
    return verdicts_of(arms, [ArmCurve(arms[i].name, seed, steps, loss[i, seed]) for i, seed in pairs])


def test_failures_are_still_seen_in_correlated_noise():
    "A jump by ten deviations and a slow rise to it, in noise with a correlation of 0.8."
    rng, steps = np.random.default_rng(1), np.arange(120)
    for rise in (np.where(steps > 70, 2.5, 0.0), np.clip((steps - 60) / 40, 0, 1) * 2.5):
        loss = 2.5 + 0.25 * correlated(0.8, (60, 120), rng) + rise
        share = np.mean([outcome(ArmCurve("", 0, steps, row), correlation=0.8).diverged for row in loss])
        assert share > 0.9, share


def test_one_wild_seed_does_not_hide_a_rescue():
    "The unchanged run fails on every seed, once at 29 nats; the fix keeps all three."
    rng = np.random.default_rng(0)
    healthy = 2.4 + 0.03 * rng.standard_normal((6, 100))
    failed = healthy[:3].copy()
    failed[:, 60:] += np.array([0.8, 1.0, 27.0])[:, None]
    curves = [ArmCurve("unchanged", s, np.arange(300, 400), failed[s]) for s in range(3)]
    curves += [ArmCurve("placebo", s, np.arange(300, 400), healthy[3 + s]) for s in range(3)]
    told = verdicts_of(ARMS, curves, start_loss=4.85)[1]
    assert told.verdict == "helps" and told.decided_by == "failures" and told.rescued == 3
    assert told.effect > -2.5  # 29 counts as 4.85, the loss before training


def test_controls_that_repeat_the_run_do_not_widen_the_intervals_of_the_others():
    "A placebo, another order and an arm that never acted: one arm is judged, as if it stood alone."
    rng = np.random.default_rng(3)
    loss = 2.5 + 0.05 * rng.standard_normal((5, 3, 100))
    loss[1] -= 0.2
    loss[2] = loss[0]  # the placebo trains on the batches of the run
    loss[3] = loss[0]  # a clip that is never reached
    fixes = [Arm(({"name": "lower_lr"},)), Arm(({"name": "placebo"},)), Arm(({"name": "clip_norm"},))]
    alone = judged([Arm(), fixes[0]], loss[:2])
    together = judged([Arm(), *fixes, null_arm(100)], loss)
    assert [arm.n_arms for arm in together] == [1] * 5 and not together[3].acted
    assert together[1].interval == pytest.approx(alone[1].interval, abs=1e-4)
    loss[3, 0, -1] += 1e-3  # one loss of one seed differs: it has acted, and is judged
    assert judged([Arm(), *fixes, null_arm(100)], loss)[1].n_arms == 2
