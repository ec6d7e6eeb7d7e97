"Small logs of our own in the forms that a blind draw of strangers' logs broke: one test a class."

import json
import re

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


def epochs_of_bars(form, n_epochs, n_batches, redraws=1, seed=0):
    "Lines of bars that show the mean since the epoch began, and those means of whole epochs."
    rng, lines, means = np.random.default_rng(seed), [], []
    for epoch in range(1, n_epochs + 1):
        losses = 1 + 3 / epoch + 0.3 * rng.normal(size=n_batches * redraws)
        mean = np.cumsum(losses) / np.arange(1, len(losses) + 1)
        for i, loss in enumerate(mean):
            line = form.format(e=epoch, E=n_epochs, i=i // redraws + 1, n=n_batches, loss=loss)
            lines += [f"Epoch {epoch}/{n_epochs}", line] if "step" in form and i == 0 else [line]
        means.append(float(f"{mean[-1]:.4f}"))
    return lines, means


def test_bars_of_many_short_epochs_give_one_loss_an_epoch(tmp_path):
    log = tmp_path / "train_log.txt"
    forms = (
        "[fold_0] {e:03d}/{E}:  50%|█████     | {i}/{n} [00:07<00:02,  2.95s/it, loss={loss:.4f}]",
        "{e}/{E}: 50%|#####     | {i}/{n} [00:07<00:02, 1.95it/s, lr=0.001, loss={loss:.4f}]",
        "Epoch {e}/{E}:  50%|█████     | {i}/{n} [00:07<00:02,  2.95s/it, loss={loss:.4f}]",
    )
    for form in forms:
        lines, means = epochs_of_bars(form, 60, 4, redraws=3)
        log.write_text("\n".join(lines * 2))  # two folds
        runs = read_log(log)
        loss = series(runs, loss_name(runs))
        assert np.allclose(loss.values, means * 2) and loss.step.values[0] == 4, form
        assert len(np.unique(loss.segment)) == 2 and not [f for f in diagnose(runs) if f.severity != "info"]
    form = forms[0]  # each batch's own loss is kept: no mean begins anew
    lines = [
        form.format(e=e, E=60, i=i, n=4, loss=2 + 0.1 * np.sin(7.3 * i + e))
        for e in range(1, 61)
        for i in range(1, 5)
    ]
    log.write_text("\n".join(lines))
    assert len(series(read_log(log), "loss")) == 240 == series(read_log(log), "loss").step.values[-1]


def test_keras_bars_give_the_mean_of_each_epoch_where_epochs_outnumber_batches(tmp_path):
    log = tmp_path / "training_log.txt"
    for form in (
        "\x1b[1m{i}/{n}\x1b[0m \x1b[32m==\x1b[0m\x1b[37m=\x1b[0m \x1b[1m2s\x1b[0m 3s/step - loss: {loss:.4f}",
        "{i}/{n} [====>.....] - ETA: 3s - loss: {loss:.4f} - accuracy: 0.5000",
    ):
        lines, _ = epochs_of_bars(form, 20, 9)
        ends = [at for at, line in enumerate(lines) if "9/9" in line]
        for epoch, at in reversed(list(enumerate(ends))):  # the last bar of an epoch, with its validation
            done = (
                f"9/9 [==========] - 30s 3s/step - acc: 0.5 - loss: {9 / (epoch + 1):.4f} - val_loss: 2.5000"
            )
            lines.insert(at + 1, done)
        log.write_text("\n".join(lines))
        loss = series(read_log(log), "loss")
        assert np.allclose(loss.values, [float(f"{9 / e:.4f}") for e in range(1, 21)]), form
        assert loss.step.values.tolist() == [9 * e for e in range(1, 21)]
    log.write_text("\n".join(epochs_of_bars(form, 3, 90)[0]))  # few long epochs: the bars are the trajectory
    assert len(series(read_log(log), "loss")) == 270


def test_a_table_of_one_row_without_names_is_a_history(tmp_path):
    loss = np.round(falling(60), 6)
    for name, row, expected in (
        ("losses.csv", "," + ",".join(map(str, loss)), "loss"),
        ("train_loss.csv", "\t".join(map(str, loss)) + "\n", "loss"),
        ("val_losses.csv", ",".join(map(str, loss)), "val_loss"),
        ("train_loss.csv", ",0\n" + "\n".join(f"{i},{v}" for i, v in enumerate(loss)), "loss"),  # of pandas
    ):
        (tmp_path / name).write_text(row)
        data = read_log(tmp_path / name)
        assert np.allclose(series(scalars_of(data), expected).values, loss), name
    (tmp_path / "losses.csv").write_text("epoch,loss,lr,acc\n7,0.5,0.001,0.9\n")  # one record with its names
    assert series(read_log(tmp_path / "losses.csv"), "loss").values.tolist() == [0.5]


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "C:\\projects\\long name\\segmentation\\train_everything.py", line 318, in <module>',
    "    main(parse_arguments(sys.argv[1:]), resume_from_checkpoint=True)",
    '  File "C:\\Program Files\\Python312\\Lib\\encodings\\cp1252.py", line 19, in encode',
    "    return codecs.charmap_encode(input,self.errors,encoding_table)[0]",
    "UnicodeEncodeError: 'charmap' codec can't encode character '\\u2713' in position 1: it maps to nothing",
)


def powershell(lines, width):
    "The lines as Windows PowerShell shows an error stream on a console of that width."
    record = [
        "At line:1 char:1",
        "+ python train.py > train.log 2>&1",
        "+ " + "~" * min(30, width - 2),
        "    + CategoryInfo          : NotSpecified: (Traceback (most recent call last)::String) [], Remote",
        "    + FullyQualifiedErrorId : NativeCommandError",
        " ",
    ]
    shown = []
    for line in (f"python : {lines[0]}", *record, *lines[1:]):
        rest = ""
        for word in re.findall(r" +\S+ ?|\S+ ?", line):
            if len(rest) + len(word) > width and rest.strip():
                shown, rest = [*shown, rest], ""
            rest += word
            while len(rest) > width:
                shown, rest = [*shown, rest[:width]], rest[width:]
        shown.append(rest)
    return shown


def test_a_traceback_that_powershell_wrapped_is_whole_again(tmp_path):
    log, records = tmp_path / "train.log", [f"Epoch {e}: loss={3 / e:.4f}" for e in range(1, 31)]
    for width in (40, 79):
        shown = "\r\n".join([*records, *powershell(TRACEBACK, width), ""])
        for encoding in ("utf-16", "utf-8"):
            log.write_bytes(shown.encode(encoding))
            run = next(iter(read_runs(log).values()))
            crash = next(f for f in diagnose(run) if f.kind == "crash")
            assert crash.evidence["message"].endswith("it maps to nothing") and crash.onset == 30
            assert most_likely(diagnose(run)).cause.startswith(
                "The program failed at train_everything.py:318"
            )
            assert len(series(scalars_of(run), "loss")) == 30


def test_the_head_and_the_prompt_of_a_powershell_transcript_are_no_records(tmp_path):
    head = [
        "**********************",
        "Windows PowerShell transcript start",
        "Start time: 20260316223903",
        "Process ID: 11820",
        "PSVersion: 5.1.19041.4522",
        "BuildVersion: 10.0.19041.4522",
        "CLRVersion: 4.0.30319.42000",
        "SerializationVersion: 1.1.0.1",
        "**********************",
        "PS C:\\runs 2026\\gpt> python .\\train.py --lr 0.001 --seed 7",
    ]
    log, loss = tmp_path / "PowerShell_transcript.txt", falling(60)
    lines = [f"step {i} loss {v:.4f}" for i, v in enumerate(loss)]
    tail = [
        "PS C:\\runs 2026\\gpt> Stop-Transcript",
        "Windows PowerShell transcript end",
        "End time: 20260316231210",
    ]
    for encoding in ("utf-16", "utf-8-sig"):
        log.write_bytes("\r\n".join([*head, *lines, *tail, ""]).encode(encoding))
        data = read_log(log)
        names = [name for name in scalars_of(data).data_vars if not name.startswith("event_")]
        assert names == ["loss"] and len(series(data, "loss")) == 60
        assert series(data, "loss").step.values[-1] == 59 and not list(diagnose(data))
