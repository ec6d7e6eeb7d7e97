"Small logs of our own in the forms that a blind draw of strangers' logs broke: one test a class."

import json

import numpy as np

from stabilitylab import diagnose, read_log, read_runs
from stabilitylab.detect.likely_cause import most_likely
from stabilitylab.run.curves import loss_name, scalars_of
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars, series


def run_of(**series):
    "A record with these series at steps 0, 1, …"
    n = len(next(iter(series.values())))
    return new_run(
        make_scalars({name: Samples(np.arange(n), np.asarray(v, float)) for name, v in series.items()})
    )


def found(run, kind):
    "The severities of the findings of a kind."
    return [f.severity for f in diagnose(run) if f.kind == kind]


def falling(n=200, seed=0):
    "A loss that falls from 4 to 2 with noise."
    return 2 + 2 * np.exp(-np.arange(n) / 40) + 0.02 * np.random.default_rng(seed).normal(size=n)


def test_a_sum_of_losses_called_total_is_the_loss(tmp_path):
    log = tmp_path / "train.out"
    loss = falling(120)
    lines = [f"[epoch: {i // 40}/3, iter: {i % 40 * 25}/1000] total: {v:.6f} " for i, v in enumerate(loss)]
    log.write_text("training samples = 28709\n" + "\n".join(lines))
    data = read_log(log)
    assert loss_name(data) == "loss" and len(series(data, "loss")) == 120
    log.write_text("\n".join(f"shard {i} done, total: {100 + i}" for i in range(120)))  # a count
    try:
        assert loss_name(read_log(log)) is None
    except ValueError as error:
        assert "no training metric" in str(error)


def test_records_that_name_their_run_are_runs_of_their_own(tmp_path):
    log = tmp_path / "metrics.jsonl"
    rows = [
        {"run_id": run, "kind": "train_epoch", "epoch": e, "train_loss": scale / (e + 1)}
        for run, scale in (("pilot", 1.0), ("wide", 40.0))
        for e in range(12)
    ]
    log.write_text("\n".join(json.dumps(row) for row in [*rows, {"run_id": "pilot", "note": "bench"}]))
    runs = read_runs(log)
    assert len(runs) == 2 and all(len(series(scalars_of(r), loss_name(r))) == 12 for r in runs.values())
    log.write_text("\n".join(json.dumps(row) for row in rows[:12]))
    assert len(read_runs(log)) == 1


def test_the_iteration_counts_a_table_and_a_critic_that_rises_with_the_return_is_well(tmp_path):
    log = tmp_path / "log.txt"
    n = 120
    critic = 0.005 + 0.0005 * np.arange(n) * (1 + 0.05 * np.random.default_rng(1).normal(size=n))
    names = ["Iteration", "Critic_Steps", "Critic_Loss", "Actor_Steps", "Actor_Loss", "Train_Return"]
    rows = [
        [50 * i, 300 + 14000 * i, f"{c:.6f}", 1400 + 70000 * i, f"{-2 + 0.01 * (i % 5):.4f}", 800 + 20.5 * i]
        for i, c in enumerate(critic)
    ]
    log.write_text("\n".join("".join(f"{cell!s:<25}" for cell in row) for row in [names, *rows]))
    run = next(iter(read_runs(log).values()))
    step = series(scalars_of(run), loss_name(run)).step.values
    assert (step[0], step[-1]) == (0, 50 * (n - 1))
    assert not [f for f in diagnose(run) if f.severity != "info"]


def test_one_position_of_a_late_bar_is_no_step_of_many_records(tmp_path):
    log = tmp_path / "train_log.txt"
    bar = "100%|##########| 7/7 [10:00<00:00,  6.27it/s]\n"  # too few steps for any interval
    dicts = [
        {"loss": round(float(v), 4), "learning_rate": 1e-5, "epoch": round(0.2151 * (i + 1), 2)}
        for i, v in enumerate(falling(13))
    ]
    log.write_text(bar + "\n".join(map(str, dicts)) + "\n")
    step = series(read_log(log), "loss").step.values
    assert step.tolist() == list(range(1, 14))


def test_a_few_gradients_that_are_no_numbers_are_a_note_where_the_loss_stays_one():
    loss, norm = falling(), np.ones(200)
    norm[[0, 1, 5]] = np.nan
    assert found(run_of(loss=loss, grad_norm=norm), "non_finite") == ["info"]
    many = np.where(np.arange(200) % 4 == 0, np.nan, norm)
    assert found(run_of(loss=loss, grad_norm=many), "non_finite") == ["warning"]
    lost = np.where(np.arange(200) > 150, np.nan, loss)
    last = np.where(np.arange(200) == 150, np.inf, np.ones(200))
    assert "warning" in found(run_of(loss=lost, grad_norm=last), "non_finite")
    at_end = np.where(np.arange(200) == 198, np.inf, np.ones(200))
    assert found(run_of(loss=loss, grad_norm=at_end), "non_finite") == ["warning"]


def test_a_mean_that_falls_back_within_one_record_is_no_running_mean():
    loss = 0.02 + 0.4 * np.exp(-np.arange(700) / 60)  # smooth, as of a full batch
    loss[552:556] = [16.8, 2.0, 17.9, 4.6]
    loss[556:] = 0.14 + 0.3 * np.exp(-np.arange(144) / 5)
    run = run_of(mean_loss=loss)
    assert "warning" in found(run, "loss_spike") + found(run, "divergence")
    assert most_likely(diagnose(run)) is not None


def test_the_rate_of_another_run_in_the_same_file_has_not_jumped():
    step = np.r_[np.arange(100), np.arange(60)]
    rate = np.r_[np.full(100, 1e-6), np.full(60, 5e-4)]
    loss = np.r_[falling(100), falling(60, 1)]
    table = make_scalars({"loss": Samples(step, loss), "lr": Samples(step, rate)})
    assert found(new_run(table), "lr_jump") == []
    resumed = np.r_[np.arange(100), np.arange(95, 155)]  # goes back a little: a resume
    table = make_scalars({"loss": Samples(resumed, loss), "lr": Samples(resumed, rate)})
    assert found(new_run(table), "lr_jump") == ["warning"]
