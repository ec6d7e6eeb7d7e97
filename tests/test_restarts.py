"Rollbacks, restart markers, messages of the GPU, hangs, slow runs and skipped steps, as in the notes."

import datetime
import json

import numpy as np
import pytest

from stabilitylab import compare_runs, diagnose, read_runs
from stabilitylab.detect.metrics import find_loss_scale_collapse
from stabilitylab.detect.rollbacks import rollback_ledger
from stabilitylab.detect.skipping import clipped_share
from stabilitylab.detect.speed import find_hang
from stabilitylab.read.text import message_events
from stabilitylab.run.curves import Curve, loss_curve, rolled_back_at, surviving
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_events, make_scalars
from tests.logs.make import FOLDER, LOGS


def loss_at(step):
    return 1.6 + 1.5 * np.exp(-step / 400)


def rolled_back(shape, n=11, every=250, last=5000, seed=0):
    "A run like that of the memo: eleven divergences, each ended by a rollback to a checkpoint a way back."
    rng, steps, losses, onsets, at = np.random.default_rng(seed), [], [], [], 0
    for number in range(n):
        onset, length, top = 600 + 350 * number, int(rng.integers(25, 120)), rng.uniform(1, 5)
        up = top * (np.arange(length) + 1) / length if shape == "climbs" else np.full(length, top)
        steps += [*range(at, onset + length)]
        losses += [*loss_at(np.arange(at, onset)), *(loss_at(np.arange(onset, onset + length)) + up)]
        onsets.append(onset)
        at = (onset - 60) // every * every
    steps += [*range(at, last)]
    losses += [*loss_at(np.arange(at, last))]
    values = np.array(losses) + rng.normal(0, 0.02, len(losses))
    return new_run(make_scalars({"loss": Samples(np.array(steps), values)})), onsets


@pytest.mark.parametrize("shape", ["climbs", "jumps"])
def test_a_divergence_that_a_rollback_ended_did_not_recover(shape):
    run, onsets = rolled_back(shape)
    found = diagnose(run)
    lost = [f for f in found if f.kind in ("loss_spike", "divergence") and "rolled_back_to" in f.evidence]
    assert len(lost) == 11 and all(f.severity == "error" for f in lost)
    assert all(f.evidence.get("recovery", "none") == "none" for f in lost)
    for f, onset in zip(sorted(lost, key=lambda f: f.onset), onsets, strict=True):
        assert onset <= f.onset <= onset + 25 and f.evidence["rolled_back_to"] < onset
    assert not [f for f in found if f.kind == "loss_spike" and f.severity == "warning"]


def test_the_ledger_counts_what_was_repeated_and_the_path_has_no_abandoned_step():
    run, onsets = rolled_back("jumps")
    table = rollback_ledger(run)
    assert len(table) == table.attrs["rollbacks"] == 11 and (table.outcome == "passed").all()
    assert (abs(table.onset - onsets) <= 2).all() and table.attrs["checkpoint_interval"] == 250
    loss = loss_curve(run)
    assert table.attrs["steps_repeated"] == len(loss.step) - 5000
    path = surviving(loss)
    assert path.step.tolist() == list(range(5000)) and path.value.max() < 3.3
    (note,) = [f for f in diagnose(run).of("restart") if "rollbacks" in f.evidence]
    assert note.severity == "info" and note.evidence["rollbacks"] == 11


def test_surviving_records_are_those_that_no_later_attempt_repeats():
    rng = np.random.default_rng(0)
    for _ in range(50):
        step, segment, at = [], [], 0
        for number in range(int(rng.integers(1, 5))):
            length = int(rng.integers(5, 40))
            step += range(at, at + length)
            segment += [number] * length
            at = int(rng.integers(3, at + length))
        curve = Curve(
            "loss", np.array(step), np.arange(len(step)) * 1.0, np.array(segment, np.int32), None, 0, 0
        )
        starts = [i for i in range(1, len(step)) if segment[i] != segment[i - 1]]
        slow = [i for i in range(len(step)) if not any(j > i and step[j] <= step[i] for j in starts)]
        assert surviving(curve).value.astype(int).tolist() == slow
        for i in range(len(step)):
            first = next((j for j in starts if j > i and step[j] <= step[i]), None)
            assert rolled_back_at(curve, i) == first


def test_a_counter_that_begins_anew_abandons_nothing():
    step = np.tile(np.arange(300), 3)
    curve = Curve("loss", step, step * 1.0, np.repeat([0, 1, 2], 300).astype(np.int32), None, 0, 0)
    assert len(surviving(curve).step) == 900 and rolled_back_at(curve, 100) is None


MARKERS = {
    b"  Continuing training from global step 1500": 1500,
    b"Resuming training from runs/out/checkpoint-1500": 1500,
    b"Loading states from /fsx/m4/opt_step-3750/accelerator_state": 3750,
    b"Resumed from checkpoint: output/step_500": 500,
    b"[Rank 0] Loading checkpoint from /ckpt/global_step1000/mp_rank_00_model_states.pt": 1000,
    b"Restoring states from the checkpoint path at logs/epoch=3-step=1500.ckpt": 1500,
    b"Loaded checkpoint /ckpt/checkpoint_1_3500.pt (epoch 1 @ 3500 updates)": 3500,
    b"Loading best model from out/checkpoint-1500 (score: 0.31).": None,
    b"loading the data of step one": None,
}


@pytest.mark.parametrize("line", MARKERS)
def test_a_line_that_names_the_state_it_loads_is_a_restart(line):
    hits = [hit for hit in message_events(line) if hit.event == "checkpoint_load"]
    assert [int(line[slice(*hit.step)]) for hit in hits] == ([MARKERS[line]] if MARKERS[line] else [])


def bump_after(steps, resumed, width=15, height=0.5):
    rng = np.random.default_rng(0)
    rise = np.where(steps >= resumed, height * np.exp(-np.abs(steps - resumed) / width), 0)
    return 2 + np.exp(-steps / 300) + rise + rng.normal(0, 0.02, len(steps))


def test_the_bump_after_a_marker_is_of_the_resume(tmp_path):
    steps = np.arange(2500)
    lines = [f"step: {s} loss: {loss:.4f}" for s, loss in zip(steps, bump_after(steps, 1500), strict=True)]
    for marker in ("Loading states from /fsx/opt_step-1500/accelerator_state", "nothing"):
        (tmp_path / "train.log").write_text("\n".join([*lines[:1500], marker, *lines[1500:]]))
        ((_, run),) = read_runs(tmp_path / "train.log").items()
        kinds = [f.kind for f in diagnose(run) if f.onset == 1500]
        assert kinds == ["loss_spike" if marker == "nothing" else "resume_spike"]


def test_a_trainer_that_prints_no_steps_has_its_restart_at_the_record(tmp_path):
    steps = np.arange(10, 2510, 10)
    rows = [
        str({"loss": round(float(loss), 4), "learning_rate": 1e-4, "epoch": round(s / 1000, 3)})
        for s, loss in zip(steps, bump_after(steps, 1510, 40, 2.0), strict=True)
    ]
    marker = "  Continuing training from global step 1500"
    (tmp_path / "train.out").write_text("\n".join([*rows[:150], marker, *rows[150:]]))
    ((_, run),) = read_runs(tmp_path / "train.out").items()
    assert run["scalars"].sizes["step"] == 250 and run["events"].event_step.values.tolist() == [150]
    (bump,) = diagnose(run).of("resume_spike")
    assert bump.onset == 151 and bump.evidence["resumed_at"] == 150


def resumed_twice(ratio_moves):
    rng, steps = np.random.default_rng(0), np.r_[0:400, 300:700, 600:1000]
    since = np.r_[np.full(400, 999), np.arange(400), np.arange(400)]
    loss = 2 + np.exp(-steps / 150) + 0.6 * np.exp(-since / 12) + rng.normal(0, 0.02, len(steps))
    ratio = 0.3 - 0.15 * ((since < 50) & ratio_moves) + rng.normal(0, 0.01, len(steps))
    columns = {"loss": loss, "image_to_text_ratio": ratio, "lr_ratio": ratio}
    return new_run(make_scalars({name: Samples(steps, value) for name, value in columns.items()}))


def test_the_ratio_that_moves_with_the_bumps_is_the_first_suspect():
    from stabilitylab.detect.likely_cause import most_likely

    found = diagnose(resumed_twice(True))
    bumps = found.of("resume_spike")
    assert [f.evidence["mixture"] for f in bumps] == ["image_to_text_ratio"] * 2
    assert "order of the data" in most_likely(found).cause
    still = diagnose(resumed_twice(False))
    assert len(still.of("resume_spike")) == 2
    assert not any("mixture" in f.evidence for f in still.of("resume_spike"))
    assert "position and the mixture" in most_likely(still).next[0]


XIDS = [
    "Xid errors on instance: node-1, Error: May 19 07:08:57 node-1 kernel: [680111.6] NVRM: Xid "
    "(PCI:0000:10:1c): 63, pid=1850, Row Remapper: New row marked for remapping, reset gpu to activate",
    "[257087.812628] NVRM: Xid (PCI:0000:90:1c): 64, pid=7",
]
DOCUMENTS = (".json",)  # one JSON value: a line in it breaks it
BARE = ("long_table", "numbers")  # nothing but their numbers can stand in them
TEXTS = [
    n for n, (file, *_) in LOGS.items() if "." in file and not file.endswith(DOCUMENTS) and n not in BARE
]


@pytest.mark.parametrize("line", XIDS, ids=["with the words of a watcher", "bare"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_message_of_the_driver_is_told_once_with_its_step(name, line, tmp_path):
    file, text, _ = LOGS[name]
    lines = text().split("\n")
    at = len(lines) * 2 // 3
    path = tmp_path / (FOLDER / file).name
    path.write_text("\n".join([*lines[:at], line, *lines[at:]]), encoding="utf-8")
    (run,), (plain,) = read_runs(path).values(), read_runs(FOLDER / file).values()
    assert run["scalars"].sizes["step"] == plain["scalars"].sizes["step"]
    (found,) = [f for f in diagnose(run) if f.kind in ("hardware_error", "crash")]
    assert found.kind == "hardware_error" and found.evidence["xid"] == (63 if "63" in line else 64)
    steps = plain["scalars"].step.values
    assert abs(np.searchsorted(np.unique(steps), found.onset) - len(np.unique(steps)) * 2 / 3) < 8


def test_a_kernel_log_beside_a_run_joins_it_by_time(tmp_path):
    begin = datetime.datetime(2023, 5, 19, 6, 0, 0)
    rows = [
        f"[{begin + datetime.timedelta(seconds=12 * s)}] iteration {s}/ 1000 | lm loss: {3 - s / 1000:.4f}"
        for s in range(1000)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    kernel = "May 19 07:08:57 node kernel: [6.1] NVRM: Xid (PCI:0000:10:1c): 63, pid=1, Row Remapper: row"
    (tmp_path / "dmesg.log").write_text(f"May 19 06:00:01 node kernel: [1.0] usb\n{kernel}\n")
    ((_, run),) = read_runs(tmp_path).items()
    (found,) = diagnose(run).of("hardware_error")
    assert found.onset == (3600 + 8 * 60 + 57) // 12 and run.attrs["also_in"] == ["dmesg.log"]
    assert found.evidence["action"] == "IGNORE" and "NVIDIA" in found.explanation


def clocked(seconds, **events):
    n = len(seconds) + 1
    clock = 1.7e9 + np.r_[0.0, np.cumsum(seconds)]
    samples = Samples(np.arange(n), 2 + np.exp(-np.arange(n) / 100), None, clock)
    return new_run(make_scalars({"loss": samples}), **events)


def test_hours_between_two_steps_are_a_hang_unless_a_restart_or_a_habit_explains_them():
    gap = np.full(600, 12.0)
    gap[300] = 9000
    (hang,) = find_hang(clocked(gap))
    assert (hang.severity, hang.onset, hang.end) == ("warning", 300, 301) and hang.evidence[
        "gap_hours"
    ] == 2.5
    assert not find_hang(clocked(gap, events=make_events([("checkpoint_load", 300, "loaded")])))
    often = np.full(600, 12.0)
    often[50::100] = 1800
    assert not find_hang(clocked(often))
    assert not find_hang(clocked(np.where(np.arange(600) == 300, 9000.0, 0.0)))  # a clock without a pace
    assert not find_hang(clocked(np.full(600, 12.0))) and not find_hang(clocked(np.full(600, 4000.0)))


def paced(seconds, level=2.0):
    i = np.arange(200)
    loss = level + np.exp(-i / 50)
    return new_run(make_scalars({"loss": Samples(i, loss), "step_time": Samples(i, np.full(200, seconds))}))


def test_a_run_ten_times_slower_than_its_sister_is_told_and_another_model_is_not():
    (slow,) = compare_runs({"a": paced(0.5), "b": paced(5.0)}).of("throughput_drop")
    assert slow.severity == "warning" and slow.evidence["names"] == ["b"] and slow.evidence["sister"] == "a"
    assert compare_runs({"a": paced(0.5), "b": paced(2.0)}).of("throughput_drop")[0].severity == "info"
    assert not compare_runs({"a": paced(0.5), "b": paced(5.0, level=4.0)}).of("throughput_drop")
    assert not compare_runs({"a": paced(0.5), "b": paced(0.6)}).of("throughput_drop")


@pytest.mark.parametrize("length", [60, 250, 900])
def test_a_slow_stretch_has_its_true_end(length):
    times = 1 + np.random.default_rng(0).normal(0, 0.02, 2000)
    times[700 : 700 + length] *= 3
    run = new_run(make_scalars({"step_time": Samples(np.arange(2000), times)}))
    (slow,) = diagnose(run).of("throughput_drop")
    assert (slow.onset, slow.end) == (700, 699 + length) and "to_the_end" not in slow.evidence


def test_a_loss_scale_at_its_minimum_is_a_collapse_and_the_norm_stands_in_it(tmp_path):
    line = "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding. Try"
    rows = [f"step {s} loss {3 - s / 500:.3f}" for s in range(300)]
    (tmp_path / "train.log").write_text("\n".join([*rows, line]))
    ((_, run),) = read_runs(tmp_path / "train.log").items()
    (floor,) = diagnose(run).of("loss_scale_collapse")
    assert floor.severity == "error" and floor.onset == 299 and "minimum" in floor.explanation
    scale = np.r_[np.full(500, 65536.0), 65536 / 2 ** np.arange(17), np.ones(50)]
    norm = np.r_[np.full(500, 1.0), np.geomspace(1, 1e4, 17), np.full(50, 1e4)]
    steps = np.arange(len(scale))
    run = new_run(make_scalars({"loss_scale": Samples(steps, scale), "grad_norm": Samples(steps, norm)}))
    (collapse,) = find_loss_scale_collapse(run)
    assert collapse.evidence["grad_norm_before"] == 1 and collapse.evidence["grad_norm_peak"] == 1e4


@pytest.mark.parametrize("seed", range(5))
def test_a_skip_rate_that_grows_is_told_and_a_steady_one_is_not(seed):
    rng, i = np.random.default_rng(seed), np.arange(5000)
    loss = Samples(i, 2 + np.exp(-i / 500) + rng.normal(0, 0.02, 5000))

    def alarms(skipped):
        run = new_run(make_scalars({"loss": loss, "skipped": Samples(i, skipped.astype(float))}))
        return [f for f in diagnose(run) if f.severity != "info"]

    (grows,) = alarms(rng.random(5000) < 0.12 * i / 5000)
    assert grows.kind == "grad_norm_explosion" and grows.evidence["skip_rate_now"] > 0.05
    total = np.cumsum(rng.random(5000) < 0.12 * i / 5000)
    assert len(alarms(total)) == 1
    assert not alarms(rng.random(5000) < 0.05) and not alarms(i % 2000 == 1999)
    assert not alarms((i < 300) & (rng.random(5000) < 0.5))  # the large norms of the start


def trainer_lines(first, last, every, per_epoch, bump, rng):
    "Records of Hugging Face's Trainer without a progress bar."
    lines = []
    for step in range(first + every, last + 1, every):
        loss = loss_at(step) + rng.normal(0, 0.02) + bump * np.exp(-(step - first) / (4 * every))
        lines.append(f"{{'loss': {loss:.4f}, 'learning_rate': 5e-05, 'epoch': {step / per_epoch:.2f}}}")
    return lines


@pytest.mark.parametrize("every, prefix", [(10, ""), (25, "[INFO|trainer.py:2128] 2024-05-01 10:00:00 >> ")])
def test_a_trainer_console_without_bars_counts_from_its_resumes(every, prefix, tmp_path):
    rng, path = np.random.default_rng(3), tmp_path / "train.log"
    lines = trainer_lines(0, 2000, every, 1000, 0.0, rng)
    for first, last in ((1500, 4000), (4000, 6000)):
        lines += [f"{prefix}  Continuing training from global step {first}"]
        lines += trainer_lines(first, last, every, 1000, 0.8, rng)
    path.write_text("\n".join(lines))
    (run,) = read_runs(path).values()
    want = [*range(0, 2000, every), *range(1500, 4000, every), *range(4000, 6000, every)]
    assert run["scalars"].step.values.tolist() == [step + every for step in want]
    (back,) = rollback_ledger(run).itertuples()
    assert (back.left, back.resumed, back.repeated) == (2000, 1500 + every, 500)
    assert 4000 in [f.evidence["resumed_at"] for f in diagnose(run).of("resume_spike")]


def test_a_rollback_before_any_jump_has_no_reason():
    steps = np.r_[0:150, 100:300, 100:500]
    loss = 2 + np.exp(-steps / 100) + np.random.default_rng(0).normal(0, 0.01, len(steps))
    loss[330:350] += 3  # steps 280 to 299 of the second attempt, which goes back to where the third begins
    ledger = rollback_ledger(new_run(make_scalars({"loss": Samples(steps, loss)})))
    assert ledger.reason.ne("").tolist() == [False, True] and ledger.onset.tolist()[1] == 280


def test_a_trainer_console_that_begins_with_a_resume_has_its_steps(tmp_path):
    lines = trainer_lines(5000, 7000, 10, 1000, 0.0, np.random.default_rng(4))
    (tmp_path / "a.log").write_text("\n".join(["  Continuing training from global step 5000", *lines]))
    (run,) = read_runs(tmp_path).values()
    assert run["scalars"].step.values[[0, -1]].tolist() == [5010, 7000]


@pytest.mark.parametrize("year", [2023, 2024])
@pytest.mark.parametrize("form", ["syslog", "journal"])
def test_a_kernel_log_joins_by_time_in_every_year_and_form(form, year, tmp_path):
    begin = datetime.datetime(year, 5, 19, 6, 0, 0)
    rows = [
        f"[{begin + datetime.timedelta(seconds=12 * s)}] iteration {s}/ 1000 | lm loss: {3 - s / 1000:.4f} |"
        for s in range(1000)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    words = "NVRM: Xid (PCI:0000:10:1c): 63, pid=1, Row Remapper: row"
    when = (begin + datetime.timedelta(seconds=4137)).replace(tzinfo=datetime.UTC)
    record = {"__REALTIME_TIMESTAMP": f"{int(when.timestamp() * 1e6)}", "MESSAGE": words}
    forms = {"syslog": f"May 19 07:08:57 node kernel: [6.1] {words}", "journal": json.dumps(record)}
    (tmp_path / "kernel.log").write_text(f"{forms[form]}\n")
    ((_, run),) = read_runs(tmp_path).items()
    (found,) = diagnose(run).of("hardware_error")
    assert found.onset == 4137 // 12 and found.evidence["message"].endswith("Row Remapper: row")


def test_a_message_that_several_watchers_print_is_told_once(tmp_path):
    lines = [f"iter {s}: loss {3 - s / 1000:.4f}, time 500.00ms, mfu 31.20%" for s in range(600)]
    watcher = XIDS[0].partition("Error: ")[2]
    lines[400:400] = [XIDS[0], watcher, watcher]
    lines[500:500] = [watcher]
    (tmp_path / "train.log").write_text("\n".join(lines))
    ((_, run),) = read_runs(tmp_path).items()
    found = diagnose(run).of("hardware_error")
    assert [f.onset for f in found] == [399, 496] and {f.evidence["count"] for f in found} == {2}


def test_checkpoints_that_a_log_names_are_the_interval_of_its_rollbacks(tmp_path):
    steps = [*range(0, 1400), *range(1200, 2600), *range(2400, 4000)]
    lines = []
    for s in steps:
        lines.append(f"iter {s}: loss {3 - s / 2000:.4f}, time 500.00ms, mfu 31.20%")
        lines += ["saving checkpoint to out"] * (s % 200 == 0)
    (tmp_path / "train.log").write_text("\n".join(lines))
    ((_, run),) = read_runs(tmp_path).items()
    assert rollback_ledger(run).attrs["checkpoint_interval"] == 200
    names = ("Saving model checkpoint to out/checkpoint-1500", "Saved state to run/step_1500/")
    assert all([h.event for h in message_events(n.encode())] == ["checkpoint_save"] for n in names)
    assert not message_events(b"Saved best model, val_loss improved: 0.21 at checkpoint-7")


def test_the_steps_gone_back_to_bound_the_interval_where_no_checkpoint_is_named():
    run, _ = rolled_back("climbs", n=3, every=250)
    resumed = rollback_ledger(run).resumed
    assert rollback_ledger(run).attrs["checkpoint_interval"] == np.gcd.reduce(resumed)


def test_the_percentage_of_clipped_steps_that_fairseq_logs_is_no_threshold(tmp_path):
    rows = [
        f"2021-11-20 06:00:00 | INFO | train_inner | epoch 001: {s} / 999 loss={3 - s / 900:.3f}, "
        f"num_updates={s}, gnorm={0.5 + s % 2:.3f}, clip={100 * (s % 2)}, wall={s}"
        for s in range(200)
    ]
    (tmp_path / "train.log").write_text("\n".join(rows))
    ((_, run),) = read_runs(tmp_path).items()
    assert clipped_share(run).share == 0.5 and np.isnan(clipped_share(run).clip)
    assert clipped_share(run, 1.0) == (1.0, 0.5, pytest.approx(1 / 1.5))


def test_a_console_of_dicts_has_its_own_steps_and_its_rollback(tmp_path):
    "Records of step 10, 20, …; the run went back to step 200 once."
    steps = [*range(10, 310, 10), *range(210, 400, 10)]
    lines = [
        f"{{'loss': {3 - step / 1000:.3f}, 'learning_rate': 0.0001, 'step': {step}}}\n" for step in steps
    ]
    (tmp_path / "train.out").write_text("".join(lines))
    (run,) = read_runs(tmp_path / "train.out").values()
    assert run["scalars"].step.values.tolist() == steps and "step" not in run["scalars"].data_vars
    assert [(finding.kind, finding.onset) for finding in diagnose(run)][:1] == [("restart", 210)]


def test_clipped_norms_that_are_nan_throughout_are_no_threshold():
    step = np.arange(50)
    norms = {"grad_norm": np.ones(50), "clipped_grad_norm": np.full(50, np.nan)}
    run = new_run(make_scalars({name: Samples(step, value) for name, value in norms.items()}))
    assert clipped_share(run) is None
