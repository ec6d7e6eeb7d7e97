"Our own small logs, one in each text, JSON and CSV form: steps, values and findings as they were made."

import json

import numpy as np
import pytest

from stabilitylab import diagnose
from stabilitylab.read.recognise import formats
from stabilitylab.read.runs import read_runs
from tests.command import command
from tests.logs.make import FOLDER, LOGS, LOST, RUN, SPIKE

ELSEWHERE = {  # formats without a text of a loss curve -> where they are read from files of our own
    "tensorboard": "test_read_binary.py",
    "wandb_offline": "test_read_binary.py",
    "torch_curves": "test_read_binary.py",
    "parquet": "test_read_trackers.py",
    "tracker_db": "test_read_trackers.py",
    "numpy": "test_read_numbers.py",
    "kernel": "test_crash.py",
    "crash_text": "test_crash.py",
    "deepspeed_chat": "its page: several ranks in one file, and no loss of the engine",
    "ultralytics": "its page: rows are epochs",
    "ultralytics_console": "its page: bars that are drawn again and again",
}
NAN_IS_MISSING = {"golden_json"}  # a NaN there stands for a value that was not reported


def read(name):
    (run,) = read_runs(FOLDER / LOGS[name][0]).values()
    return run


def truth(name, series):
    "Steps and values of a series, as the form can say them."
    steps = np.arange(len(RUN.step)) if name == "numbers" else RUN.step
    return steps, getattr(RUN, series)


def test_every_form_of_text_has_a_log():
    assert {one.name for one in formats()} == {*LOGS, *ELSEWHERE}
    assert all((FOLDER / file).stat().st_size < 36_000 for file, _, _ in LOGS.values())


def test_the_files_are_what_the_script_writes():
    for file, text, _ in LOGS.values():
        assert (FOLDER / file).read_text(encoding="utf-8") == text(), file


@pytest.mark.parametrize("name", LOGS)
def test_a_log_says_what_was_written(name):
    scalars = read(name)["scalars"]
    assert scalars.attrs["format"] == name
    for series in LOGS[name][2]:
        steps, values = truth(name, series)
        np.testing.assert_array_equal(scalars.step, steps, err_msg=series)
        np.testing.assert_allclose(scalars[series], values, rtol=1e-12, err_msg=series)


@pytest.mark.parametrize("name", LOGS)
def test_what_was_planted_is_found_and_nothing_else(name):
    steps, _ = truth(name, "lr")
    planted = {"loss_spike": steps[SPIKE]}
    if "grad_norm" in LOGS[name][2]:
        planted["grad_norm_explosion"] = steps[SPIKE]
    if name not in NAN_IS_MISSING:
        planted["non_finite"] = RUN.step[LOST] if name != "numbers" else LOST
    found = diagnose(read(name))
    assert {finding.kind: finding.onset for finding in found} == planted and len(found) == len(planted)


def test_the_command_reads_each_of_them():
    for name, (file, _, _) in LOGS.items():
        told = command("diagnose", FOLDER / file, "--json")
        assert told.returncode == 0 and told.stderr == "", name
        assert json.loads(told.stdout)["format"] == name
