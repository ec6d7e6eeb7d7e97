"""Logs of many writers: each is made here with a known loss and known steps, and comes back as it is."""

# ruff: noqa: E501 - lines of logs are as long as their writers make them

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.base import LogData
from stabilitylab.read.groups import concatenate_segments, segment_chains
from stabilitylab.read.runs import read_log, read_runs
from stabilitylab.run.curves import loss_name
from stabilitylab.run.scalars import Samples, series
from tests.scale import long_lines

N = 24
LOSS = [round(6.5 * math.exp(-i / 9) + 0.31 + 0.07 * math.sin(5 * i), 4) for i in range(N)]
CHATTER = "Loading checkpoint shards: 100%|####| 2/2 [00:03<00:00, 1.62s/it]\nmodel has 124.4M parameters\nseed: 42\n"


def over_epochs(line: str, per_epoch: int = 6, first: int = 1) -> str:
    "One line a loss; `e` counts epochs, `i` the records in an epoch from 1, `k` all of them from 1."
    lines = []
    for k, loss in enumerate(LOSS):
        e, i = divmod(k, per_epoch)
        average = sum(LOSS[: k + 1]) / (k + 1)
        lines.append(
            line.format(
                e=e + first, i=i + 1, j=i, k=k + 1, n=per_epoch, loss=loss, avg=average, lr=1e-3 / (k + 1)
            )
        )
    return "\n".join(lines) + "\n"


ALL = list(range(1, N + 1))
TENS = [10 * k for k in ALL]
# name -> (text, steps)
WRITERS = {
    "marian": (over_epochs("[2024-05-01 10:00:{k:02d}] Ep. {e} : Up. {k}0 : Sen. 12,{k:03d} : Cost {loss} : Time 46.81s : 11311.91 words/s : gNorm 1.2019"), TENS),
    "opennmt": (over_epochs("[2024-05-01 10:00:00,123 INFO] Step {k}0/ 5000; acc:  24.85; ppl: 83.17; xent: {loss}; lr: 0.00020; 4828/6680 tok/s;    237 sec"), TENS),
    "joeynmt": (over_epochs("2024-05-01 10:00:00,123 - INFO - joeynmt.training - Epoch   {e}, Step:      {k}0, Batch Loss:    {loss}, Batch Acc: 0.1000, Tokens per Sec:    12011, Lr: 0.000300"), TENS),
    "sockeye": (over_epochs("[INFO:sockeye.training] Epoch[{e}] Batch [{k}0] Speed: 25.1 samples/sec 1431.20 tokens/sec perplexity=12.3 ce={loss}"), TENS),
    "espnet": (over_epochs("[host] 2024-05-01 10:00:00,1 (trainer:702) INFO: {e}epoch:train:{k}0-{k}9batch: iter_time=0.1, loss={loss}, acc=0.3, optim_step_time=0.05"), None),
    "nemo": (over_epochs("Epoch {e}:  10%|#  | {i}/{n} [00:10<01:30,  1.04it/s, v_num=1, reduced_train_loss={loss}, global_step={k}.0, consumed_samples=64.0]"), ALL),
    "verl": (over_epochs("(TaskRunner pid=1234) step:{k} - actor/pg_loss:{loss} - actor/grad_norm:0.3 - critic/rewards/mean:0.5"), ALL),
    "keras": (over_epochs("Epoch {e}/4\n{i}/{n} [====>....] - ETA: 3s - loss: {loss} - accuracy: 0.5"), None),
    "mmengine": (over_epochs("2024/05/01 10:00:00 - mmengine - INFO - Epoch(train)  [{e}][{i}/{n}]  lr: {lr:.4e}  eta: 0:12:01  time: 0.31  data_time: 0.01  memory: 5431  loss: {loss}  loss_cls: 0.3"), ALL),
    "detectron2": (over_epochs("[05/01 10:00:00 d2.utils.events]:  eta: 0:12:01  iter: {k}9  total_loss: {loss}  loss_cls: 0.44  time: 0.31  last_time: 0.3  data_time: 0.01  lr: 0.001  max_mem: 3412M"), [10 * k + 9 for k in ALL]),
    "imagenet": (over_epochs("Epoch: [{e}][{j}/{n}]\tTime  0.21 ( 0.40)\tData  0.00 ( 0.10)\tLoss {loss:.4e} ({avg:.4e})\tAcc@1  10.00 ( 11.20)\tAcc@5  30.00 ( 29.10)", first=0), [k - 1 for k in ALL]),
    "mnist": (over_epochs("Train Epoch: {e} [{i}00/600 (10%)]\tLoss: {loss}"), [100 * k for k in ALL]),
    "paddle": (over_epochs("[2024/05/01 10:00:00] ppocr INFO: epoch: [{e}/4], global_step: {k}0, lr: 0.001000, acc: 0.1, loss: {loss}, avg_reader_cost: 0.1 s, eta: 0:12:01"), TENS),
    "kohya": (over_epochs("steps:   2%|2  | {k}0/5000 [00:10<09:30,  1.04it/s, avr_loss={loss}]\r").replace("\r\n", "\r"), TENS),
    "caffe": (over_epochs("I0613 19:56:16.097921  1860 solver.cpp:228] Iteration {k}0, loss = {loss}\nI0613 19:56:16.097978  1860 solver.cpp:244]     Train net output #0: loss = 9.1 (* 1 = 9.1 loss)"), TENS),
    "tensorflow": (over_epochs("INFO:tensorflow:loss = {loss}, step = {k}0 (3.417 sec)"), TENS),
    "stable-baselines": (over_epochs("-----------------------------\n| time/            |        |\n|    total_timesteps | {k}0 |\n| train/           |        |\n|    loss          | {loss} |\n|    std           | 0.9 |\n-----------------------------"), TENS),
    "table": ("epoch  train_loss  valid_loss  accuracy  time\n" + over_epochs("{k}      {loss}     9.5     0.25     00:12"), ALL),
    "ultralytics": (over_epochs("\n      Epoch    GPU_mem   total_loss   cls_loss   Instances       Size\n      {k}/24      1.2G      {loss}      2.2      12        640: 100%|####| 10/10 [00:01<00:00]"), ALL),
    "header": (over_epochs("[step={k}0/1000,epoch=0]\n    train/CrossEntropyLoss={loss}\n    optim/total_grad_norm=0.81"), TENS),
    "tensor": (over_epochs("epoch {e} step {k} loss tensor({loss}, device='cuda:0', grad_fn=<NllLossBackward0>)"), ALL),
    "chinese": (over_epochs("第{e}轮 步数：{k} 损失：{loss} 学习率：0.001"), ALL),
    "german": (over_epochs("Schritt {k} | Verlust {loss} | Genauigkeit 0.3"), ALL),
    "russian": (over_epochs("Эпоха {e}, шаг {k}, потери: {loss}"), ALL),
    "train-and-val": (over_epochs("step {k:5d} | train {loss} | val 7.5 | 4s"), ALL),
    "thousands": (over_epochs("step 1,{k:03d} loss {loss} tokens 12,345,678"), [1000 + k for k in ALL]),
    "colours": (over_epochs("\x1b[32mINFO\x1b[0m step \x1b[1m{k}\x1b[0m loss \x1b[33m{loss}\x1b[0m"), ALL),
    "epochs-only": (over_epochs("Epoch {k}/24 done in 12.1s: train loss {loss}, val loss 7.1, best val loss 7.0"), ALL),
    "json-in-text": (over_epochs('2024-05-01 10:00:00 INFO train.py:58 {{"step": {k}, "loss": {loss}, "lr": 0.001}}'), ALL),
    "batches": (over_epochs("| epoch   {e} |   {i}/ {n} batches | lr 20.00 | ms/batch 181.56 | loss  {loss} | ppl  1009.16"), ALL),
    "log4j": (over_epochs("24/05/01 10:00:00 INFO Optimizer: [Iteration {k}] Score at iteration {k} is {loss}; loss {loss}"), ALL),
}  # fmt: skip


def loss_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    "Steps and values of the training loss of a log."
    table = read_log(path)
    curve = series(table, loss_name(table))
    return curve.step.values, curve.values


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_opens_with_its_loss_and_steps(tmp_path, name):
    text, steps = WRITERS[name]
    path = tmp_path / "train.log"
    path.write_text(CHATTER + text, encoding="utf-8")
    step, value = loss_of(path)
    assert value.tolist() == pytest.approx(LOSS, rel=1e-4)
    if steps is not None:
        assert step.tolist() == steps


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_other_encodings(tmp_path, encoding):
    path = tmp_path / "a.log"
    path.write_text(WRITERS["german"][0], encoding=encoding)
    step, value = loss_of(path)
    assert value.tolist() == LOSS and step.tolist() == ALL


def test_zero_bytes_of_a_crash_are_skipped(tmp_path):
    path = tmp_path / "a.log"
    text = WRITERS["batches"][0].encode()
    half = text.index(b"\n", len(text) // 2) + 1
    path.write_bytes(b"\0" * 5000 + text[:half] + b"\0" * 300 + text[half:])
    assert loss_of(path)[1].tolist() == LOSS


def test_metric_lines_one_in_ten_thousand(tmp_path):
    words = itertools.cycle(["the", "model", "said", "3", "of", "4", "answers", "were", "right", "today"])
    with open(tmp_path / "a.log", "w") as file:
        for k, loss in enumerate(LOSS[:6], 1):
            file.writelines(" ".join(itertools.islice(words, 7)) + "\n" for _ in range(10_000))
            file.write(f"[trainer] step {k} loss {loss}\n")
    step, value = loss_of(tmp_path / "a.log")
    assert value.tolist() == LOSS[:6] and step.tolist() == ALL[:6]


def test_ranks_are_apart(tmp_path):
    lines = [f"[rank{r}]: step {k} loss {loss + r}" for k, loss in enumerate(LOSS, 1) for r in (0, 1)]
    (tmp_path / "a.log").write_text("\n".join(lines) + "\n")
    step, value = loss_of(tmp_path / "a.log")
    assert value.tolist() == LOSS and step.tolist() == ALL


def test_validation_is_apart(tmp_path):
    text = over_epochs("[train] epoch {e} step {k} loss {loss}\n[valid] epoch {e} step {k} loss 9.5")
    (tmp_path / "a.log").write_text(text)
    table = read_log(tmp_path / "a.log")
    assert series(table, "loss").values.tolist() == LOSS
    assert set(series(table, "val_loss").values) == {9.5}


def test_settings_and_counts_are_no_series(tmp_path):
    text = "learning_rate: 0.001\nloss_scale_window: 1000\ntrain.py:692 started\nkl_loss_coef=0.001\n" * 3
    (tmp_path / "a.log").write_text(text)
    with pytest.raises(InputError, match="no training metric"):
        read_log(tmp_path / "a.log")


def test_no_loss_but_a_return(tmp_path):
    (tmp_path / "a.log").write_text(over_epochs("global step={k}, episodic return={loss}"))
    table = read_log(tmp_path / "a.log")
    assert loss_name(table) is None and series(table, "episodic_return").values.tolist() == LOSS


def test_runs_appended_to_one_file_are_passes(tmp_path):
    (tmp_path / "a.log").write_text(over_epochs("iteration index: {k}, batch loss: {loss}") * 3)
    table = read_log(tmp_path / "a.log")
    assert int(table.segment.max()) == 2


def test_a_user_names_step_and_loss(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(over_epochs("step {k} seen {k}00 loss {loss} quality 7.5"))
    table = read_log(path, step="seen", loss="quality")
    assert set(series(table, "loss").values) == {7.5}
    assert series(table, "loss").step.values.tolist() == [100 * k for k in ALL]
    with pytest.raises(InputError, match="quality"):
        read_log(path, loss="no such name")


@pytest.mark.parametrize("per_flush", [1, 4, 24])
def test_dicts_flushed_late_have_their_own_steps(tmp_path, per_flush):
    lines = []
    for k in ALL:
        lines.append(f" {k}%|#  | {10 * k}/1000 [00:10<16:30,  1.0it/s]\r")
        if k % per_flush == 0:
            for at in range(k - per_flush, k):
                lines.append(
                    f"{{'loss': {LOSS[at]}, 'learning_rate': 1e-05, 'epoch': {(at + 1) / 50:.2f}}}\n"
                )
    (tmp_path / "a.log").write_text("".join(lines))
    step, value = loss_of(tmp_path / "a.log")
    assert value.tolist() == LOSS and step.tolist() == TENS


def test_header_only_and_wrong_format(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss\n")
    with pytest.raises(InputError, match="header"):
        read_runs(tmp_path / "a.csv")
    (tmp_path / "a.log").write_text(WRITERS["german"][0])
    with pytest.raises(InputError, match="nanogpt"):
        read_runs(tmp_path / "a.log", "nanogpt")
    (tmp_path / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(InputError, match="scan"):
        read_runs(tmp_path / "x.safetensors")


def log(begin: int, end: int, name: str = "loss") -> LogData:
    "A log of one series."
    return LogData({name: Samples(np.arange(begin, end), np.ones(end - begin))})


def test_files_of_one_folder_become_runs():
    logs = [log(0, 9), log(5, 20), log(0, 9), log(0, 9, "accuracy")]
    assert sorted(itertools.chain.from_iterable(segment_chains(logs))) == [0, 1, 2, 3]
    assert segment_chains(logs[:3]) == [[0, 1], [2]]
    joined = concatenate_segments(logs[:2])
    assert joined.samples["loss"].step.tolist() == [*range(9), *range(5, 20)]
    assert np.all(np.diff(joined.samples["loss"].order) > 0)


@pytest.mark.parametrize("kind", long_lines.PIECES)
@pytest.mark.parametrize("place", [0, 8, N])
def test_a_long_line_hides_no_record(tmp_path, kind, place):
    line = long_lines.PIECES[kind](random.Random(0), 30_000)
    (tmp_path / "a.log").write_text(long_lines.text(line, place), encoding="utf-8")
    step, value = loss_of(tmp_path / "a.log")
    assert step.tolist() == list(range(N)) and value.tolist() == [round(3 - i / 50, 4) for i in range(N)]
