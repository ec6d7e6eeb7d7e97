"""Forms of lines that strangers' programs have: heads with marks, histories, rounded counts, bars that serve twice."""

# ruff: noqa: E501 - lines of logs are as long as their writers make them

import numpy as np
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.recognise import recognise
from stabilitylab.read.runs import read_log


def written(folder, text, name="run.log"):
    "The log of a text."
    (folder / name).write_text(text)
    return read_log(folder / name)


def steps_of(log, name):
    "The steps of a series."
    return log[name].dropna("step").step.values.tolist()


def test_a_head_that_begins_with_a_mark_names_its_columns(tmp_path):
    rows = "".join(f"{25 * i:<7}{2.5 * i:<13.6f}{81220.5 - 900 * i:<9.1f}0.0005\n" for i in range(30))
    log = written(tmp_path, "#Iters Seconds TrainingLoss LearningRate\n" + rows)
    assert log.loss.values.tolist() == [81220.5 - 900 * i for i in range(30)]
    assert steps_of(log, "loss") == [25 * i for i in range(30)]


def test_rounded_counts_are_spaced_evenly_where_that_fits(tmp_path):
    def shown(step):
        return str(step) if step < 1000 else f"{step / 1000:.0f}K"

    lines = [f"INFO step:{shown(200 * i)} smpl:{shown(6400 * i)} loss:{5 / i:.3f}\n" for i in range(1, 80)]
    log = written(tmp_path, "".join(lines))
    assert steps_of(log, "loss") == [200 * i for i in range(1, 80)]
    assert log.smpl.values[[0, -1]].tolist() == [6000, 506000]


def test_counts_in_millions(tmp_path):
    lines = [f"frames {1.5 * i:.1f}M | step {i / 10:.1f}M | loss {3 / i:.4f}\n" for i in range(1, 30)]
    log = written(tmp_path, "".join(lines))
    assert steps_of(log, "loss") == [100_000 * i for i in range(1, 30)]


@pytest.mark.parametrize("form", ["[===] {i}/{n} Loss: {loss:.4f}", "step {i}/{n} - loss: {loss:.4f}"])
def test_a_bar_that_serves_training_and_evaluation_is_two_series(tmp_path, form):
    lines = []
    for epoch in range(4):
        lines.append(f"Epoch {epoch + 1}/4")
        lines += [form.format(i=i, n=60, loss=2 - epoch / 4 - i / 900) for i in range(10, 70, 10)]
        lines += [form.format(i=i, n=20, loss=3 - epoch / 4) for i in (10, 20)]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert log.loss.dropna("step").values.max() < 2
    assert log.val_loss.dropna("step").values.min() > 2
    assert steps_of(log, "loss") == list(range(10, 250, 10))
    assert log.segment.values.max() == 0


def test_full_bars_count_nothing(tmp_path):
    lines = []
    for epoch in range(5):
        lines += [f"Epoch: {epoch}", f" [=== 391/391 ==>] Step: {70 + epoch}ms | Loss: {2 / (epoch + 1):.3f}"]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert steps_of(log, "loss") == [0, 1, 2, 3, 4]


def test_the_curve_of_each_fold_is_the_loss_and_its_result_is_not(tmp_path):
    lines = []
    for fold in range(3):
        lines.append(f"===== fold: {fold} training =====")
        lines += [f"Epoch {e} - avg_train_loss: {5 / e + fold / 10:.4f}  time: 9s" for e in range(1, 11)]
        lines += [f"===== fold: {fold} result =====", "MSE loss: 2.1880"]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert log.loss.attrs["log_name"] == "avg_train_loss"
    assert log.segment.values.max() == 2
    assert steps_of(log, "loss") == list(range(1, 11)) * 3


def test_folds_without_steps_are_numbered_from_their_beginning(tmp_path):
    lines = []
    for fold in (1, 2):
        lines.append(f"Running fold {fold}/2")
        lines += [f"train loss {5 / n:.4f}" for n in range(1, 13)]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert steps_of(log, "loss") == list(range(1, 13)) * 2
    assert log.segment.values.max() == 1


def test_a_history_at_the_end_is_the_loss_where_no_line_has_one(tmp_path):
    text = (
        "12:01:07 sizes: [299, 299, 3]\n12:09:41 {'val_loss': [3.3, 3.5, 4.0], 'loss': [1.16, 0.93, 0.71]}\n"
    )
    log = written(tmp_path, text)
    assert log.loss.values.tolist() == [1.16, 0.93, 0.71]
    assert log.val_loss.values.tolist() == [3.3, 3.5, 4.0]
    lines = "".join(f"epoch {e} loss {3 / e:.4f}\n" for e in range(1, 6))
    assert written(tmp_path, lines + text).loss.values.tolist() == [round(3 / e, 4) for e in range(1, 6)]


def test_a_loss_that_is_always_the_placeholder_is_none(tmp_path):
    lines = [f"Epoch {e} Loss: -1.0 precision: {e / 20:.3f}\n" for e in range(1, 12)]
    log = written(tmp_path, "".join(lines))
    assert not [name for name in log.data_vars if "loss" in name]
    assert log.precision.size == 11


def test_brackets_of_an_array_are_no_json(tmp_path):
    text = "[[255 255 255]\n [255 255 255]]\n" + "".join(f"epoch {e} loss {3 / e:.4f}\n" for e in range(1, 9))
    log = written(tmp_path, text + "[done]\n")
    assert log.attrs["format"] == "generic"
    assert log.loss.size == 8


def test_the_label_of_a_bar_says_nothing_of_the_message_behind_it(tmp_path):
    bar = "Validation: |          | 0/? [00:00<?, ?it/s]"
    lines = [
        f"{bar}[12/09/24 14:03:{e:02d}] INFO  Epoch {e}: v_loss {4 / e:.3e}  loss {5 / e:.3e}\n"
        for e in range(1, 9)
    ]
    log = written(tmp_path, "".join(lines))
    assert np.allclose(log.loss.values, [5 / e for e in range(1, 9)], rtol=1e-3)
    bars = "".join(f"Test: 100%|##| 9/9 [00:01<00:00, 5.1it/s] loss: {3 / e:.4f}\n" for e in range(1, 9))
    assert "loss" not in written(tmp_path, bars).data_vars


def test_a_mean_is_the_loss_of_a_table_that_has_no_other(tmp_path):
    rows = "".join(f"{i},{0.1 * i:.2f},{3 / (i + 1):.4f}\n" for i in range(20))
    log = written(tmp_path, "step,copper_loss,mean_loss\n" + rows, "metrics.csv")
    assert log.loss.attrs["log_name"] == "mean_loss"
    log = written(tmp_path, "name,copper_loss,mean_loss\n" + rows, "runs.csv")
    assert "loss" not in log.data_vars  # a row a run: nothing counts


def test_a_bar_is_no_table(tmp_path):
    text = (
        "  0%|          | 0/500 [00:00<?, ?it/s]\n\n"
        + "Epoch 99, train loss: 0.012:  20%|##  | 100/500 [00:09<00:36, 11.0it/s]\n"
    )
    (tmp_path / "out.log").write_text(
        text + "Epoch 148, train loss: 0.009:  30%|##  | 149/500 [00:14<00:36, 11.0it/s]\n"
    )
    assert recognise(tmp_path / "out.log").name == "generic"
    assert read_log(tmp_path / "out.log").loss.dropna("step").values.tolist() == [0.012, 0.009]


def test_sizes_of_a_model_are_no_history(tmp_path):
    (tmp_path / "run.log").write_text(
        "loss weights: [1, 2, 3]\nshape: [0.5, 0.25, 0.25]\nbetas: [0.9, 0.95, 0.99]\n"
    )
    with pytest.raises(InputError, match="no training metric"):
        read_log(tmp_path / "run.log")


def test_lines_that_a_program_logs_twice_are_one_record(tmp_path):
    lines = []
    for i in range(20):
        record = f"Train Epoch: [0][{20 * i}/400]  Loss {3 - i / 20:.4f} ({3 - i / 40:.4f})"
        lines += [f"[2025/01/30 01:22:{i:02d}] - {record}", record]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert steps_of(log, "loss") == list(range(0, 400, 20))
    lines = []
    for i in range(1, 21):
        record = f"[{1000 * i:6d}] | gnorm  8.33 lr  0.000125 | loss {6 - i / 20:.3f}"
        lines += [f"INFO:tensorflow:{record}", f"I1212 15:09:{i:02d}.226866 128529 train.py:471] {record}"]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert steps_of(log, "loss") == [1000 * i for i in range(1, 21)]
    assert log.loss.size == 20


def test_records_that_happen_to_agree_are_all_kept(tmp_path):
    lines = [f"step {i} loss {0.5 if i % 2 else 0.25}\n" for i in range(30)]
    assert written(tmp_path, "".join(lines)).loss.size == 30
    lines = [f"round done, loss {1 / (1 + i // 10):.2f}\n" for i in range(30)]  # it stands ten times in a row
    assert written(tmp_path, "".join(lines)).loss.size == 30


def test_right_answers_of_all_are_no_count_of_steps(tmp_path):
    lines = []
    for epoch in range(1, 30):
        right = 600 + 10 * epoch + 23 * (epoch % 3)
        lines += [f"epoch  {epoch:2d}", "", f"loss: {6 / epoch:.6f}", ""]
        lines += [f"test accuracy: {right / 10:.2f}%, ({right}/1000)", ""]
    log = written(tmp_path, "\n".join(lines) + "\n")
    assert steps_of(log, "loss") == list(range(1, 30))
    assert log.segment.values.max() == 0


CONSOLE = "\n      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
CLASSES = (
    "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|##| 4/4\n"
)


def drawn(epoch, rows, bar="100%|####| {share}/9 [00:01<00:00]", before="\r"):
    "The drawings of one epoch: the memory, three or four losses, labels and size, and the bar."
    cells = [f"{before}  {epoch}   1.5G  {row}   21   640: {bar}" for row in rows]
    return "".join(cell.format(share=share) for share, cell in enumerate(cells)) + "\n"


def test_the_last_drawing_of_a_row_is_the_epoch(tmp_path):
    def epoch(k):
        rows = [f"{9 + k}  8  7", f"{4 / k:.4g}  {2 / k:.4g}  0.5"]
        measured = f"    all   50   120   0.5   0.4   {k / 10}   0.2\n"
        return CONSOLE + drawn(f"{k}/4", rows, "100% ─── {share}/9 2it/s", "\r\x1b[K") + CLASSES + measured

    ended = CONSOLE + drawn("4/4", ["9 8 7", "0.75 0.25 0.5"], "40% ─── {share}/9 2it/s", "\r\x1b[K")
    log = written(tmp_path, "".join(map(epoch, (1, 2, 3))) + ended)
    assert log.attrs["format"] == "ultralytics_console"
    assert log.box_loss.dropna("step").values.tolist() == [4, 2, 1.333, 0.75]
    assert np.allclose(log.loss.dropna("step"), [6.5, 3.5, 2.4997, 1.5])
    assert steps_of(log, "loss") == [1, 2, 3, 4] and steps_of(log, "map50") == [1, 2, 3]
    assert log.map50.dropna("step").values.tolist() == [0.1, 0.2, 0.3]
    assert "instances" not in log


def test_a_row_whose_header_went_to_the_other_stream_is_known_by_its_cells(tmp_path):
    text = "".join(drawn(f"{k}/12", ["9 9 9", f"{k} 2 0.5"]) for k in range(1, 13))
    log = written(tmp_path, text, "job.err")
    assert log.loss.values.tolist() == [k + 2.5 for k in range(1, 13)]
    assert log.attrs["loss_is"] == "the sum box_loss + cls_loss + dfl_loss"
    assert {"box_loss", "cls_loss", "dfl_loss"} <= set(log)


def test_the_total_of_a_row_is_its_loss(tmp_path):
    head = "\n     Epoch   gpu_mem      GIoU       obj       cls     total   targets  img_size\n"
    text = "".join(head + drawn(f"{k}/4", ["9 9 9 27", f"{5 - k} 0.5 nan {6 - k}"]) for k in range(5))
    log = written(tmp_path, text)
    assert log.loss.values.tolist() == [6, 5, 4, 3, 2] and log.step.values.tolist() == [0, 1, 2, 3, 4]
    assert log.giou.values.tolist() == [5, 4, 3, 2, 1] and np.isnan(log.cls.values).all()
    assert log.attrs["loss_is"] == "total" and "targets" not in log


def test_the_stream_without_the_bars_has_the_measures_of_each_epoch(tmp_path):
    rows = "".join(f"{CONSOLE}      all   50   120   0.5   0.4   {k / 8}   0.25\n" for k in range(1, 7))
    log = written(tmp_path, rows + "\nValidating best.pt...\n     all   50   120   0.9   0.9   0.9   0.9\n")
    assert log.map50.values.tolist() == [k / 8 for k in range(1, 7)]
    assert log.step.values.tolist() == [1, 2, 3, 4, 5, 6] and set(log.recall.values) == {0.4}
    assert sum(log.attrs["skipped"].values()) == 1 and "loss" not in log


def test_two_trainings_in_one_console_are_two_segments(tmp_path):
    once = "".join(CONSOLE + drawn(f"{k}/3", ["9 9 9", f"{k} 2 0.5"]) for k in (1, 2, 3))
    log = written(tmp_path, once + once)
    assert (
        log.loss.values.tolist() == [3.5, 4.5, 5.5] * 2 and log.segment.values.tolist() == [0] * 3 + [1] * 3
    )
