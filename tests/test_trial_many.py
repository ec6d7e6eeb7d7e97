"Arms as one model, sweeps, loss scalers and clusters: the same numbers as one arm by itself."

import builtins
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stabilitylab.fixes.registry import apply_all, fix
from stabilitylab.names.errors import InputError
from stabilitylab.run.cluster import as_client
from stabilitylab.trial.arm import Arm, ArmCurve, arm_of, read_curve, run_arm
from stabilitylab.trial.batched import BatchedTraining, forward_signature, train_batched
from stabilitylab.trial.settings import Recipe, proxy_training
from stabilitylab.trial.sweep import Point, Sweep, SweepResult, lr_sensitivity, points_of, sweep
from stabilitylab.trial.trial import Trial

TINY = {"d_model": 16, "n_layer": 1, "n_head": 2, "seq": 16, "batch": 4, "steps": 12}
START = Recipe(**TINY).start


def tiny(seed=0, fixes=(), **recipe):
    "A small training with some fixes."
    training = proxy_training(seed=seed, **(TINY | recipe))
    apply_all(training, [fix(name, **parameters) for name, parameters in fixes])
    return training


CASES = {
    "rates": [{"lr": lr} for lr in (1e-3, 1e-2, 1e-1)],
    "seeds": [{"seed": seed} for seed in range(3)],
    "clipping": [{"clip": clip} for clip in (None, 0.1, 1.0)],
    "moments": [{"betas": (0.9, 0.99), "eps": 1e-6}, {"betas": (0.8, 0.95)}, {"weight_decay": 1.0}],
    "step hooks": [{"fixes": [("zclip", {"warmup": 2})]}, {"fixes": [("skip_above", {})]}, {}],
    "micro-batches": [{"micro_batches": 2, "lr": lr} for lr in (1e-3, 1e-2)],
    "the same insertion": [{"fixes": [("qk_norm", {})], "lr": lr} for lr in (1e-3, 1e-2)],
    "tied": [{"tied": True, "lr": lr} for lr in (1e-3, 1e-2)],
    "bf16 passes": [{"precision": "bf16", "lr": lr} for lr in (1e-3, 1e-2)],
}


@pytest.mark.parametrize("name", CASES)
def test_a_bundle_is_its_arms_one_by_one(name):
    single, rows = ([tiny(**case) for case in CASES[name]] for _ in range(2))
    bundle = BatchedTraining(rows)
    rtol = 2e-2 if name == "bf16 passes" else 2e-5
    for _ in range(6):
        for one, many in zip([t.run_step() for t in single], bundle.run_step(), strict=True):
            assert many.loss == pytest.approx(one.loss, rel=rtol)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=10 * rtol)
            assert many.skipped == one.skipped and many.step == one.step
    if name != "bf16 passes":
        for a, b in zip(single, rows, strict=True):
            for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


def test_what_shapes_the_pass_is_another_shape():
    def with_loss(share):
        training = tiny()
        plain = training.loss
        training.loss = training.measure = lambda model, batch: share * plain(model, batch)
        return training

    shapes = [tiny(), tiny(n_layer=2), tiny(tied=True), tiny(fixes=[("qk_norm", {})]), with_loss(1.0)]
    assert len({forward_signature(t) for t in [*shapes, with_loss(2.0)]}) == 6
    assert (
        forward_signature(tiny(lr=1e-3, clip=None, seed=4))
        == forward_signature(tiny())
        == forward_signature(tiny(betas=(0, 0)))
    )
    assert forward_signature(with_loss(1.0)) == forward_signature(with_loss(1.0))
    with pytest.raises(InputError, match="compared by"):
        BatchedTraining([tiny(fixes=[("z_loss", {})]), tiny(fixes=[("z_loss", {})])])


def lanes_in(folder, arms, steps=12, start=START):
    "What `train_batched` takes."
    made = [arm_of(arm) for arm in arms]
    rows = [{"start": start.to_dict(), "arm": arm.to_dict(), "seed": 0, "steps": steps} for arm in made]
    return [row | {"folder": str(folder / str(place))} for place, row in enumerate(rows)]


def test_lanes_write_what_single_arms_write_and_say_who_trained_alone(tmp_path):
    arms = ["unchanged", "lower_lr:factor=0.5", "adam_beta2:beta2=0.9", "qk_norm", "z_loss"]
    told = train_batched(lanes_in(tmp_path, arms))
    assert told["together"] == 3 and sum(told["alone"].values()) == 2
    assert any("compared by" in why for why in told["alone"])
    for place, arm in enumerate(arms):
        run_arm(START.to_dict(), arm_of(arm).to_dict(), 0, 12, str(tmp_path / f"single-{place}"))
        ours, single = (read_curve(tmp_path / name, "", 0) for name in (str(place), f"single-{place}"))
        np.testing.assert_allclose(ours.loss, single.loss, rtol=2e-5)
        assert list(ours.step) == list(range(12)) and ours.state_bytes == single.state_bytes


def broken(seed=0, at=6, **recipe):
    "A training whose loss is not finite from one step on, for rates above 0.05."
    training = proxy_training(seed=seed, **recipe)
    batches = training.batches

    def spoilt(step):
        if step == at and recipe["lr"] > 0.05:
            for parameter in training.model.parameters():
                parameter.data.fill_(float("nan"))
        return batches(step)

    training.batches = spoilt
    return training


def unlabelled(seed=0, **recipe):
    "A training whose batches of four steps in a row have no loss, and no gradient that is not a number."
    training = proxy_training(seed=seed, **recipe)
    plain = training.loss
    training.loss = training.measure = lambda model, batch: (
        plain(model, batch) + (float("nan") if 8 <= training.step < 12 else 0.0)
    )
    return training


@pytest.mark.parametrize("steps", [10, 12, 16])
def test_batches_without_labels_end_no_arm_and_are_no_divergence(tmp_path, steps):
    from stabilitylab.trial.outcome import outcome
    from stabilitylab.trial.start import Start

    start = Start(function="tests.test_trial_many:unlabelled", arguments=dict(TINY, lr=1e-3))
    run_arm(start.to_dict(), arm_of("unchanged").to_dict(), 0, steps, str(tmp_path / "arm"))
    curve = read_curve(tmp_path / "arm", "unchanged", 0)
    assert len(curve.loss) == steps and np.isnan(curve.loss).sum() == min(steps - 8, 4)
    assert not outcome(curve).diverged and np.isfinite(outcome(curve).final)


def test_an_arm_that_is_not_finite_leaves_the_others(tmp_path):
    from stabilitylab.trial.start import Start

    start = Start(function="tests.test_trial_many:broken", arguments=dict(TINY, at=6))
    rows = []
    for place, lr in enumerate((1e-3, 1e-1, 1e-2)):
        one = Start(function=start.function, arguments=start.arguments | {"lr": lr})
        rows += [lanes_in(tmp_path / f"{place}", ["unchanged"], start=one)[0]]
    assert train_batched(rows)["together"] == 3
    curves = [read_curve(row["folder"], "", 0) for row in rows]
    assert [len(curve.loss) for curve in curves] == [12, 9, 12]
    assert np.isfinite(curves[0].loss).all() and np.isfinite(curves[2].loss).all()
    done = json.loads((tmp_path / "1" / "0" / "done.json").read_text())
    assert done == {"steps": 9, "non_finite": True}


@pytest.mark.slow  # trains in processes
def test_a_sweep_goes_on_where_it_was_stopped_and_refuses_another(tmp_path):
    axes = {"n_layer": (1, 2), "lr": (1e-3, 1e-2)}
    first = Sweep(START, axes, steps=12, seeds=2, folder=tmp_path, workers=2)
    first.run(progress=False)
    again = Sweep(START, axes, steps=12, seeds=2, folder=tmp_path, workers=2)
    assert again.poll().ended  # nothing is left to do
    result = again.result()
    assert result.complete and len(result.table()) == 8
    told = result.sensitivity()
    assert list(told.n_layer) == [1, 2] and (told.sensitivity >= 0).all() and (told.low <= told.high).all()
    with pytest.raises(InputError, match="`folder`"):
        Sweep(START, axes, steps=13, seeds=2, folder=tmp_path)


def test_axes_are_checked_before_anything_is_trained():
    for axes in ({}, {"lr": ()}, {"adam_beta2.beta3": (1,)}, {"no.such": (1,)}):
        with pytest.raises(InputError, match="`axes`"):
            points_of(START, axes)
    with pytest.raises(InputError, match="`beta2`"):
        points_of(START, {"adam_beta2.beta2": (2.0,)})
    names = [one["name"] for p in points_of(START, {"lr_times": (0.3, 1, 3)}) for one in p.arm.fixes]
    assert names == ["lower_lr", "raise_lr"]


def test_sensitivity_against_its_definition():
    "With the figures of a sweep over seven rates: 2.49 ... 2.96."
    final, first = [2.49, 2.35, 2.30, 2.63, float("nan"), 9.0], 4.85
    by_hand = sum(min(f, first) if f == f else first for f in final) / 6 - 2.30
    assert lr_sensitivity(final, first) == pytest.approx(by_hand)


def test_a_sweep_from_the_middle_of_a_run_is_capped_at_the_loss_before_training():
    levels = {"lr=0.1": 0.553, "lr=1": 0.552, "lr=3": 0.56}  # all above the loss of the state: 0.53
    points = [Point({"lr": float(label[3:])}, START, Arm()) for label in levels]
    curves = [ArmCurve(p.label, 0, np.arange(10), np.r_[0.53, np.full(9, levels[p.label])]) for p in points]
    swept = SweepResult({"lr": [0.1, 1.0, 3.0]}, points, 10, curves, bounds=(3.48, None))
    assert swept.sensitivity().sensitivity[0] == pytest.approx(np.mean(list(levels.values())) - 0.552)


@pytest.mark.slow  # trains in processes
def test_a_sweep_whose_points_cannot_train_says_why(tmp_path):
    with pytest.raises(InputError, match="d_model"):
        sweep(START, {"d_model": (15,)}, steps=2, progress=False, workers=1)


# --- loss scalers


def scaled(seed=0):
    "A training with a loss scaler, as fp16 needs it."
    training = tiny(seed=seed)
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return training


def test_a_scaler_changes_nothing_where_nothing_overflows_and_grows():
    plain, ours = tiny(), scaled()
    for _ in range(5):
        assert ours.run_step().loss == pytest.approx(plain.run_step().loss, rel=1e-6)
    assert ours.scaler.get_scale() == 2.0**21


def test_a_step_that_overflows_is_left_out_and_halves_the_scale():
    training = scaled()
    training.run_step()
    before = [p.detach().clone() for p in training.model.parameters()]
    plain = training.loss
    training.loss = training.measure = lambda model, batch: (
        plain(model, batch) + model.lm_head.weight.sum() * float("inf")
    )
    assert training.run_step().skipped and training.scaler.get_scale() == 2.0**19
    assert all(torch.equal(p, q) for p, q in zip(before, training.model.parameters(), strict=True))
    training.loss = plain
    assert not training.run_step().skipped


def test_a_scaler_goes_through_save_and_resume(tmp_path):
    training = scaled()
    losses = [training.run_step().loss for _ in range(4)]
    torch.save(training.state_dict(), tmp_path / "state.pt")
    through = [training.run_step().loss for _ in range(4)]
    other = scaled()
    other.scaler = torch.amp.GradScaler("cpu")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.scaler.get_scale() == 2.0**21 and losses != through
    assert [other.run_step().loss for _ in range(4)] == through


def test_a_fix_for_the_scale_takes_the_place_of_the_scaler():
    training = scaled()
    book = fix("loss_scaling", start=1024.0).apply(training)
    assert training.scaler is None and np.isfinite(training.run_step().loss)
    book.undo()
    assert training.scaler is not None


@pytest.mark.slow
def test_a_recorded_scaler_is_used_in_a_trial(tmp_path):
    from stabilitylab.probe.recorder import Recorder
    from stabilitylab.trial.start import Start

    source = tmp_path / "setup_of_run.py"
    source.write_text(
        "import torch\nfrom stabilitylab.replay.state import Setup\n"
        "def setup(path):\n"
        "    make = lambda: torch.nn.Linear(4, 2)\n"
        "    loss = lambda m, b: (m(b['x']) - b['y']).square().mean()\n"
        "    return Setup(make, loss, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))\n"
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=4, scaler=scaler) as recorder:
        for step in range(8):
            batch = {"x": torch.randn(3, 4), "y": torch.ones(3, 2) * (1e38 if step == 2 else 1)}
            recorder.batch(batch)
            loss = (model(batch["x"]) - batch["y"]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.step(loss.item())
    training = Start(str(tmp_path / "run"), 4, f"{source}:setup").build(0)
    assert training.scaler is not None and training.scaler.get_scale() in (2.0**14, 2.0**15)
    for _ in range(4):
        training.run_step()
    for p, q in zip(training.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# --- clusters


@pytest.fixture(scope="module")
def cluster():
    "Two workers of their own processes."
    distributed = pytest.importorskip("distributed", reason="SKIPPED: distributed is absent")
    made = distributed.LocalCluster(n_workers=2, processes=True, threads_per_worker=1, dashboard_address=None)
    with made, distributed.Client(made) as client:
        yield client


@pytest.mark.slow  # trains in processes
def test_a_trial_on_a_cluster_is_the_trial_of_one_machine(cluster, tmp_path):
    arms = ["lower_lr:factor=0.3", "placebo"]
    here = Trial(START, arms, steps=12, seeds=2, workers=2).run(progress=False)
    there = Trial(START, arms, steps=12, seeds=2, folder=tmp_path, client=cluster).run(progress=False)
    assert there.complete
    for a, b in zip(here.curves, there.curves, strict=True):
        assert (a.arm, a.seed) == (b.arm, b.seed) and np.array_equal(a.loss, b.loss)


@pytest.mark.slow  # trains in processes
def test_a_sweep_on_a_cluster(cluster, tmp_path):
    found = sweep(START, {"lr": (1e-3, 1e-2)}, 12, 2, progress=False, folder=tmp_path, client=cluster)
    assert found.complete and found.together == 4


def held(seed=0, at=0, until="", **recipe):
    "A training that stays before step `at` until there is a file `until`."
    training = proxy_training(seed=seed, **recipe)
    batches = training.batches

    def later(step):
        while step >= at and not Path(until).exists():
            time.sleep(0.02)
        return batches(step)

    training.batches = later
    return training


@pytest.mark.slow  # trains in processes
def test_a_killed_worker_loses_nothing(cluster, tmp_path):
    from stabilitylab.trial.start import Start

    go_on = tmp_path / "go_on"
    how = {"steps": 120, "at": 60, "until": str(go_on)}
    start = Start(function="tests.test_trial_many:held", arguments=TINY | how)
    trial = Trial(start, ["lower_lr:factor=0.3"], steps=120, seeds=1, folder=tmp_path, client=cluster)
    log, end = tmp_path / "arm-0" / "seed-0" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < end and (not log.is_file() or log.read_text().count("\n") < 55):
        trial.poll()
        time.sleep(0.05)
    pids = list(cluster.run(os.getpid).values())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    go_on.touch()
    result = trial.run(progress=False, budget=2)
    assert result.complete and [len(curve.loss) for curve in result.curves] == [120, 120]
    assert log.read_text().count('"step": 0,') == 1  # it went on from step 50, and not from the first
    assert set(cluster.run(os.getpid).values()).isdisjoint(pids)


def test_without_distributed_the_message_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def absent(name, *more):
        if name == "distributed":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(InputError, match=r"stabilitylab\[cluster\]"):
        as_client("tcp://nowhere:1")


@pytest.mark.slow  # trains in processes
def test_what_fails_on_a_worker_is_told(cluster, tmp_path):
    start = Recipe(**TINY).start
    trial = Trial(start, [Arm(({"name": "unfreeze", "parameters": {}},))], 4, 1, tmp_path, client=cluster)
    heard = []
    trial.run(progress=False, budget=1, on_progress=heard.append)
    failed = [(ended.arm, ended.why) for ended in trial.poll().failed]
    assert [arm for arm, _ in failed] == ["unfreeze"] and "no frozen parameter" in failed[0][1]
