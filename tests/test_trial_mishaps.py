"What is left when a trial is stopped, killed, started twice, or finds no room."

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stabilitylab.cases.registry import sample
from stabilitylab.investigation.loop import _unfinished
from stabilitylab.names.errors import InputError, bad_input
from stabilitylab.names.files import Scratch
from stabilitylab.trial.start import Start
from stabilitylab.trial.trial import Trial, _why_unfit

pytestmark = pytest.mark.slow  # trials in processes that are stopped or killed

START = Start(str(sample()), 300)
HOLD = """
import fcntl, sys, time
def hold(place):
    with open(place, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(100)
    open(place + ".survived", "w").close()
"""
PARENT = """
import sys, time
from pathlib import Path
from stabilitylab.run.job import Job
place = sys.argv[1]
job = Job.of("hold:hold", place=place)
output = job.folder / "output.txt"
while "held" not in output.read_text():
    assert not job.poll().ended, job.poll()
    time.sleep(0.05)
print(job.folder, flush=True)
time.sleep(100)
"""


def test_a_job_whose_parent_is_killed_ends_and_the_next_one_sweeps_its_folder(tmp_path, monkeypatch):
    (tmp_path / "hold.py").write_text(HOLD)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    here = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)]),
        "TMPDIR": str(scratch),
    }
    place = tmp_path / "lock"
    words = [sys.executable, "-c", PARENT, str(place)]
    with subprocess.Popen(words, env=here, stdout=subprocess.PIPE, text=True) as parent:
        folder = Path(parent.stdout.readline().strip())
        parent.send_signal(signal.SIGKILL)
    assert folder.is_dir() and folder.parent == scratch
    with open(place) as lock:  # blocks until the job is gone
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert not Path(f"{place}.survived").exists()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    Scratch("job").remove()
    assert not list(scratch.iterdir())


def test_one_trial_at_a_time_in_a_folder(tmp_path):
    first = Trial(START, ["placebo"], steps=3, seeds=1, folder=tmp_path, workers=1)
    first.poll()  # its first arm trains
    with pytest.raises(InputError, match="no other trial trains"):
        Trial(START, ["placebo"], steps=3, seeds=1, folder=tmp_path)
    first.cancel()
    assert Trial(START, ["placebo"], steps=3, seeds=1, folder=tmp_path).run(progress=False).complete


def test_a_trial_that_was_stopped_says_where_it_can_go_on():
    trial = Trial(START, ["placebo"], steps=3, seeds=1)
    trial.cancel()
    trial.poll()
    (told,) = _unfinished(trial, trial.result(), False)
    assert str(trial.folder) in told and "--folder" in told
    place = trial.folder
    del trial
    again = Trial(START, ["placebo"], steps=3, seeds=1, folder=place).run(progress=False)
    assert again.complete and not _unfinished(None, again, True)
    for file in sorted(place.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    place.rmdir()


def test_no_room_for_any_arm_is_one_line(tmp_path):
    trial = Trial(START, ["placebo"], steps=3, seeds=1, folder=tmp_path)
    for arm in ("arm-0", "arm-1"):  # as a disk without room: nothing can be written there
        (tmp_path / arm).write_text("")
    with pytest.raises(InputError, match=r"no arm could be trained: .*seed 0: .*Error"):
        _unfinished(trial, trial.run(progress=False), True)


def test_a_temporary_folder_goes_with_the_trial():
    trial = Trial(START, ["placebo"], steps=3, seeds=1)
    place = trial.folder
    assert place.is_dir()
    del trial
    assert not place.exists()


def test_a_fix_that_changes_nothing_says_what_it_needs():
    nothing = bad_input("fix", "normformer", "a training on which it changes something")
    assert _why_unfit(nothing) == "it needs a training on which it changes something"
    assert _why_unfit(bad_input("count", 9, "1..3")) == "`count`=9 is not accepted; allowed: 1..3"
