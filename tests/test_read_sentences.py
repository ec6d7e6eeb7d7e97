"""What the general reader takes from sentences, settings, bars and tables; all texts are written here."""

# ruff: noqa: E501 - lines of logs are as long as their writers make them

import json

import numpy as np
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.freetext.lines import parse_any_line
from stabilitylab.read.freetext.named_numbers import mask_timestamps, named_numbers
from stabilitylab.read.freetext.words import candidate_lines, is_evaluation, meaning
from stabilitylab.read.runs import read_log
from stabilitylab.read.scan import Scan
from stabilitylab.read.shapes import Piece

SENTENCES = {
    "Loss at step 100: 3.2": {"step": "100", "Loss": "3.2"},
    "Cost after iteration 100: 0.693": {"iteration": "100", "Cost": "0.693"},
    "Loss after 3 epochs: 0.024": {"epochs": "3", "Loss": "0.024"},
    "training loss of epoch 3 is 0.52": {"epoch": "3", "training loss": "0.52"},
    "After 100 steps, loss = 0.5": {"steps": "100", "loss": "0.5"},
    "Test Accuracy: 89.86  Loss: 0.3443": {"Test Accuracy": "89.86", "test Loss": "0.3443"},
    "Train: 36 [ 200/390 ( 51%)]  Loss: 7.350": {"epoch": "36", "Loss": "7.350"},
    "Test: [  0/100]  loss: 0.7 (0.8)": {"Test": "0", "test loss": "0.7", "test loss avg": "0.8"},
    "12/02 10:11:12 - INFO - Epoch(val)  [1][  50/70]  loss: 3.1": {"Epoch": "1", "val loss": "3.1"},
    "crf_loss/transition:0, shape=(31, 31)": {"shape": "31"},
}


@pytest.mark.parametrize("line", SENTENCES)
def test_numbers_of_a_sentence_get_their_names(line):
    found = {
        m.name: line[m.start : m.end] for m in named_numbers(line.encode()) if m.name and m.kind != "total"
    }
    assert found == SENTENCES[line]


@pytest.mark.parametrize("name", ["FED_LOSS_NUM_CLASSES", "loss_reduction", "loss shape", "score_thresh"])
def test_settings_are_no_losses_and_no_measures(name):
    assert meaning(name) == "setting"


@pytest.mark.parametrize("name", ["训练损失", "验证损失", "train/success_rate", "win_rate"])
def test_losses_and_shares_in_other_words(name):
    assert meaning(name) in ("loss", "metric")
    assert is_evaluation(name) == name.startswith("验证")


def test_settings_alone_are_refused(tmp_path):
    lines = "FED_LOSS_NUM_CLASSES: 50\nscore_thresh: 0.05\nWEIGHT_DECAY: 0.0001\n"
    (tmp_path / "config.log").write_text(lines * 3)
    with pytest.raises(InputError, match="no training metric"):
        read_log(tmp_path / "config.log")


def test_bars_of_a_test_are_no_restarts(tmp_path):
    lines = []
    for epoch in range(4):
        lines += [f"Epoch: [{epoch}][{i}/200]  Loss {3 - epoch / 2 - i / 900:.4f}" for i in range(0, 200, 20)]
        lines += [f"Test: [{i}/60]  Loss {3.5 - epoch / 2:.4f}" for i in range(0, 60, 20)]
    (tmp_path / "train.log").write_text("\n".join(lines))
    log = read_log(tmp_path / "train.log")
    assert log.segment.values.max() == 0
    assert log.loss.dropna("step").step.values.tolist() == list(range(0, 800, 20))
    assert log.val_loss.dropna("step").step.values[[0, -1]].tolist() == [180, 780]


def test_a_mean_that_begins_anew_each_epoch_is_marked(tmp_path):
    rng = np.random.default_rng(1)
    lines, plain = [], []
    for epoch in range(6):
        loss = 2 - 0.1 * epoch + rng.normal(0, 0.2, 20)
        mean = np.cumsum(loss) / np.arange(1, 21)
        lines += [f"Epoch {epoch} [{i}/20] loss {mean[i]:.4f}\n" for i in range(20)]
        plain += [f"Epoch {epoch} [{i}/20] loss {loss[i]:.4f}\n" for i in range(20)]
    (tmp_path / "mean.log").write_text("".join(lines))
    (tmp_path / "plain.log").write_text("".join(plain))
    assert read_log(tmp_path / "mean.log").attrs["running_means"] == {"loss": [20, 40, 60, 80, 100]}
    assert "running_means" not in read_log(tmp_path / "plain.log").attrs


def test_lines_that_cannot_tell_are_the_only_ones_left_out():
    "Against the reading of every line: no line is left out that holds a record with a point in it."
    rng = np.random.default_rng(0)
    words = [
        "loss",
        "epoch",
        "of",
        "the",
        "batch",
        "lr",
        "acc",
        "val_loss",
        "nan",
        "step",
        "x1",
        "Iter",
        "CeLoss",
    ]
    lines = []
    for _ in range(3000):
        chosen = list(rng.choice(words, rng.integers(1, 6)))
        for _ in range(rng.integers(0, 3)):
            number = str(rng.choice(["7", "12/99", "0.5", "1e-3", "3.", ".25", "-4.5e+02", "inf"]))
            chosen.insert(rng.integers(0, len(chosen) + 1), number)
        lines.append(str(rng.choice([" ", ": ", "=", " | "])).join(chosen))
    piece = Piece(("\n".join(lines) + "\n").encode())
    kept = candidate_lines(piece)
    assert 0.3 < kept.mean() < 1
    for number in np.flatnonzero(~kept):
        found = [m for m in named_numbers(piece.line(number)) if m.name]
        assert all(m.is_integer for m in found), piece.line(number)
        assert not any(meaning(m.name) in ("step", "epoch") for m in found), piece.line(number)


def test_columns_that_count_under_other_names(tmp_path):
    rows = "".join(f"{n * 2048},{n},{np.sin(n):.4f}\n" for n in range(1, 40))
    (tmp_path / "a.csv").write_text("TimestepsSoFar,Episode,AverageReturn\n" + rows)
    assert read_log(tmp_path / "a.csv").step.values[[0, -1]].tolist() == [2048, 39 * 2048]
    rows = "".join(
        f"{epoch},{batch},{2 / (1 + epoch):.4f}\n" for epoch in range(3) for batch in range(0, 100, 10)
    )
    (tmp_path / "b.csv").write_text("epoch,batch,loss\n" + rows)
    log = read_log(tmp_path / "b.csv")
    assert (np.diff(log.step.values) > 0).all()
    assert log.segment.values.max() == 0


def test_validation_rows_that_count_epochs_stay_beside_their_training(tmp_path):
    rows = []
    for epoch in range(1, 5):
        rows += [{"loss": 3 / epoch, "step": epoch * 50 - 50 + i} for i in range(0, 50, 10)]
        rows.append({"accuracy/top1": 50 + epoch, "step": epoch})
    (tmp_path / "scalars.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = read_log(tmp_path / "scalars.json")
    assert log.segment.values.max() == 0
    assert log.accuracy_top1.dropna("step").step.values.tolist() == [40, 90, 140, 190]


def test_lines_of_a_program_beside_those_of_deepspeed(tmp_path):
    lines = [
        "[2025-10-28 20:50:31,653] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    ]
    for step in range(1, 20):
        lines.append(
            f"[2025-10-28 20:50:33,186] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped=1, lr=[1e-05]"
        )
        lines.append(f"[Step {step}/100] Loss: {5 / step:.4f} | Global Tokens/s: 1829.88")
    (tmp_path / "zero.out").write_text("\n".join(lines) + "\n")
    log = read_log(tmp_path / "zero.out")
    assert log.loss.dropna("step").step.values.tolist() == list(range(1, 20))
    assert "overflow" in log.event_kind.values


def test_rows_of_deepxde_and_epochs_of_ultralytics(tmp_path):
    rows = "".join(
        f"{i}000      [{1 / (i + 1):.2e}, 5.00e-01]    [2.0e-02, 3.0e-01]    []  \n" for i in range(9)
    )
    (tmp_path / "pinn.txt").write_text(
        "Training model...\n\nStep  Train loss  Test loss  Test metric\n" + rows
    )
    log = read_log(tmp_path / "pinn.txt")
    assert log.attrs["format"] == "deepxde"
    assert np.allclose(log.loss.values, [round(1 / (i + 1), 4) + 0.5 for i in range(9)], atol=5e-3)
    header = "epoch,time,train/box_loss,train/cls_loss,metrics/mAP50(B),val/box_loss,val/cls_loss\n"
    (tmp_path / "results.csv").write_text(header + "1,9,1.5,2.5,0.1,1,2\n2,18,1.25,2.25,0.2,1,1\n")
    log = read_log(tmp_path / "results.csv")
    assert (log.loss.values.tolist(), log.step.values.tolist()) == ([4.0, 3.5], [1, 2])
    assert log.val_loss.values.tolist() == [3.0, 2.0]


def test_lines_of_one_layout_are_read_once_and_names_with_digits_stay_apart():
    "Against the reading of every line by itself."
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(400):
        word = str(rng.choice(["loss", "batch", "x1_loss", "x2_loss"]))
        lines.append(f"  {word}_{rng.integers(1, 9)}: {rng.integers(100, 999)}")
        lines.append(f"  {word}: {rng.integers(10, 99)}")
    text = [line.encode() for line in lines]
    scan = Scan(parse_any_line, max_shapes=0).feed(b"\n".join(text) + b"\n")
    assert scan.parser.hits_by_layout
    expected = {}
    for line in text:
        for hit in parse_any_line(line):
            for name, start, end in hit.fields:
                expected.setdefault(name, []).append(float(line[start:end]))
    assert {name: column.value.tolist() for name, column in scan.samples().items()} == expected


@pytest.mark.parametrize("line", ["is=100 steps", "after 100 steps", "100 steps done", "= 100 steps"])
def test_a_count_behind_a_number_without_a_name_is_kept(line):
    piece = Piece(f"{line}\nsize=100 steps\n".encode())
    assert candidate_lines(piece).tolist() == [True, False]
    assert [meter.name for meter in named_numbers(line.encode())] == ["steps"]
    assert [meter.name for meter in named_numbers(b"size=100 steps")] == ["size"]


@pytest.mark.parametrize(
    "source", ["data/v1.2-x/train.py:58", 'a/b3.py", line 3', "a1.b.train.py:990", "src/net7.cpp(100)"]
)
def test_a_source_line_is_masked_with_its_path(source):
    line = f"at {source} loss 2.5".encode()
    masked = mask_timestamps(line)
    assert masked.replace(b"\0", b"") == b"at  loss 2.5" and len(masked) == len(line)
