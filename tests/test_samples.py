"""The runs in data_samples/: few files, and the record opened together with the logs beside it."""

import json
import shutil

import numpy as np
import pytest

from stabilitylab.cases.samples import sample
from stabilitylab.probe.blackbox import pack_batches
from stabilitylab.read.runs import read_runs
from stabilitylab.replay.snapshot import load_batch, replayable_steps
from stabilitylab.run.record import open_run, pack_run, unpack_run


@pytest.fixture
def copy(tmp_path):
    "A copy of the sample run that may be changed."
    return shutil.copytree(sample("lm_high_lr"), tmp_path / "run")


def test_a_run_is_few_files_and_all_are_small():
    folder = sample().parent
    for run in (path for path in folder.iterdir() if path.is_dir()):
        assert sum(path.is_file() for path in run.rglob("*")) <= 20, run
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 30 * 2**20


def test_record_and_logs_are_read_together():
    (run,) = read_runs(sample()).values()
    table = run["scalars"].to_dataset()
    assert run.attrs["also_in"] == ["metrics.csv", "metrics.jsonl", "train.log"]
    own = open_run(sample())["scalars"].to_dataset()
    added = set(table.data_vars) - set(own.data_vars)
    assert "mfu" in added  # nanoGPT prints it, the recorder does not know it
    for name in own.data_vars:
        np.testing.assert_array_equal(table[name], own[name])
        assert table[name].attrs == own[name].attrs


def test_another_runs_log_is_left_out_with_the_reason(copy):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    other = "".join(json.dumps(row | {"loss": row["loss"] + 1, "z_loss": 0.5}) + "\n" for row in rows)
    (copy / "other.jsonl").write_text(other)
    (run,) = read_runs(copy).values()
    assert "losses" in run.attrs["left_out"]["other.jsonl"] and "z_loss" not in run["scalars"]


def test_a_packed_run_is_the_run(copy):
    packed = open_run(copy).load()
    assert open_run(unpack_run(copy)).load().identical(packed)
    before = sample() / "record.zip"
    assert pack_run(copy).read_bytes() == before.read_bytes()


@pytest.mark.slow  # every batch of the sample
def test_batches_are_packed_once_more_without_loss(copy):
    steps = replayable_steps(copy)
    first = load_batch(copy, steps[0])
    pack_batches(copy)
    again = load_batch(copy, steps[0])
    assert replayable_steps(copy) == steps == list(range(300, 400))
    assert again.ids == first.ids and (again.parts[0]["tokens"] == first.parts[0]["tokens"]).all()
