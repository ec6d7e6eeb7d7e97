"""Files of bare numbers, arrays, Parquet tables: what they are taken for, and what other readers get."""

import json
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.recognise import recognise
from stabilitylab.read.runs import read_log, read_runs

LOSSES = [3 * 0.98**i + 0.01 * (i % 3) for i in range(60)]


def as_lines(form="{:.6f}\n"):
    "The losses as text."
    return "".join(form.format(value) for value in LOSSES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train_losses.txt", as_lines()),
        ("losses.csv", "losses\n" + as_lines()),
        ("run.csv", "loss\n" + as_lines()),
        ("run.tsv", '"train_loss"\n' + as_lines()),
        ("loss.csv", "0\n" + as_lines()),
        ("loss.txt", as_lines("{:.6f},\n")),
        ("loss.log", as_lines("{:.6f} ")),
        ("loss_list.txt", str(LOSSES)),
        ("loss_tensors.txt", "[" + as_lines("tensor({:.6f}, device='cuda:0'), ") + "]"),
        ("loss.json", json.dumps(LOSSES)),
        ("run.json", json.dumps({"train_loss": LOSSES})),
    ],
)
def test_a_list_of_losses_is_the_loss_by_the_number_of_the_record(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    log = read_log(tmp_path / name)
    assert log.loss.values == pytest.approx(LOSSES, abs=1e-6)
    assert log.loss.step.values.tolist() == list(range(60))
    assert log.attrs["step_is"].startswith("number of the record")


def test_numbers_that_nothing_calls_losses_are_values(tmp_path):
    (tmp_path / "run.txt").write_text(as_lines())
    log = read_log(tmp_path / "run.txt")
    assert list(log.data_vars)[:1] == ["value"]
    assert "loss_is" not in log.attrs


def test_validation_is_told_apart_and_a_logged_nan_stays(tmp_path):
    (tmp_path / "val_losses.txt").write_text("2.5\nnan\n1.5\n")
    assert np.isnan(read_log(tmp_path / "val_losses.txt").val_loss.values[1])


@pytest.mark.parametrize(
    "text",
    [
        "0 3.5\n1 2.5\n2 1.5\n3 1.25\n",  # two columns
        "3\n5\n8\n13\n",  # counts
        "3.5\n2.5\n",  # too few
        "epoch 1\n3.5\n2.5\n1.5\nsaved\n",  # words between
        "0,5\n0,25\n0,125\n",  # commas that may be points
    ],
)
def test_what_is_more_than_a_list_is_left_to_other_readers(tmp_path, text):
    (tmp_path / "run.txt").write_text(text)
    with suppress(InputError):
        assert recognise(tmp_path / "run.txt").name != "numbers"


def test_lists_of_a_folder_need_a_name_that_says_loss(tmp_path):
    (tmp_path / "weights.txt").write_text(as_lines())
    (tmp_path / "train_loss.txt").write_text(as_lines())
    np.save(tmp_path / "labels.npy", np.array(LOSSES))
    assert list(read_runs(tmp_path)) == ["train_loss.txt"]


def test_arrays(tmp_path):
    np.save(tmp_path / "train_losses.npy", np.array(LOSSES, dtype=np.float32)[:, None])
    assert read_log(tmp_path / "train_losses.npy").loss.values == pytest.approx(LOSSES, rel=1e-6)
    np.savez(tmp_path / "history.npz", loss=LOSSES, val_loss=LOSSES, seed=3)
    assert read_log(tmp_path / "history.npz").val_loss.values.tolist() == LOSSES
    np.save(tmp_path / "table.npy", np.ones((10, 4)))
    with pytest.raises(InputError, match="one dimension"):
        read_log(tmp_path / "table.npy")
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(InputError, match="without pickled objects"):
        read_log(tmp_path / "objects.npy")


def test_a_parquet_table_is_read_as_its_csv(tmp_path, monkeypatch):
    table = pd.DataFrame({"step": range(0, 600, 10), "train/loss": LOSSES, "lr": 1e-4})
    table.to_csv(tmp_path / "run.csv", index=False)
    path = tmp_path / "run.parquet"
    path.write_bytes(b"PAR1" + b"\x15" * 64 + b"PAR1")
    monkeypatch.setattr(pd, "read_parquet", lambda path: table)
    got, true = read_log(path), read_log(tmp_path / "run.csv")
    assert got.loss.values.tolist() == true.loss.values.tolist() == LOSSES
    assert got.loss.step.values.tolist() == true.loss.step.values.tolist()

    def nothing_installed(path):
        raise ImportError("no engine")

    monkeypatch.setattr(pd, "read_parquet", nothing_installed)
    with pytest.raises(InputError, match="pip install pyarrow"):
        read_log(path)
