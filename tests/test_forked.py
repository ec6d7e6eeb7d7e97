"Jobs in forked processes: fresh state, exit codes, an end with the process that asked for them."

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from stabilitylab.run import forked
from stabilitylab.run.job import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SKIPPED: forks are for Linux")
HERE = "tests.test_forked"


def about(name=""):
    "Who calls, and what it would draw."
    print("said to the output")
    drawn = [random.random(), float(np.random.random())]  # noqa: NPY002
    imported = "xml.dom.minidom" in sys.modules
    __import__("xml.dom.minidom")
    return {
        "ids": [os.getpid(), os.getppid()],
        "drawn": drawn,
        "imported": imported,
        "is": os.environ.get(name),
    }


def sleeps(file):
    "Writes its number, and sleeps."
    Path(file).write_text(str(os.getpid()))
    time.sleep(60)


def raises():
    "What a bad job does."
    raise KeyError("no such thing")


def begin(function, **arguments):
    return Job.forked(f"{HERE}:{function}", arguments, ("numpy",))


def number_in(file):
    "What `sleeps` wrote, once it is there."
    end = time.monotonic() + 60
    while not (file.is_file() and file.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    return int(file.read_text())


def is_alive(pid):
    "Whether a process runs; one that only waits for its parent does not."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid):
    "Whether it ends soon."
    end = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


@pytest.mark.slow
def test_each_begins_fresh_and_draws_numbers_of_its_own():
    first, second = (begin("about").wait().result for _ in range(2))
    assert (
        first["ids"][1] == second["ids"][1] and first["ids"][0] != second["ids"][0]
    )  # one parent, two children
    assert not first["imported"] and not second["imported"]  # what the first imported, it took with it
    assert all(a != b for a, b in zip(first["drawn"], second["drawn"], strict=True))


@pytest.mark.slow
def test_the_environment_and_the_folder_are_those_of_now(monkeypatch, tmp_path):
    before = begin("about", name="OF_THE_TEST").wait().result
    monkeypatch.setenv("OF_THE_TEST", "set")
    monkeypatch.chdir(tmp_path)
    after = begin("about", name="OF_THE_TEST").wait().result
    assert (before["is"], after["is"]) == (None, "set") and before["ids"][1] != after["ids"][1]


def test_an_error_is_the_error_of_a_job():
    forked_job, child = begin("raises").wait(), Job.of(f"{HERE}:raises").wait()
    assert forked_job.error == child.error == "KeyError: 'no such thing'" and not forked_job.was_killed
    assert "no such thing" in forked_job.stderr


def test_one_that_is_killed_says_so_and_one_that_is_cancelled_ends(tmp_path):
    killed, cancelled = (begin("sleeps", file=str(tmp_path / name)) for name in ("killed", "cancelled"))
    pids = [number_in(tmp_path / name) for name in ("killed", "cancelled")]
    assert killed.process.pid == pids[0]
    os.kill(pids[0], signal.SIGKILL)
    state = killed.wait()
    assert state.was_killed and "SIGKILL" in state.error
    cancelled.cancel()
    assert cancelled.poll().phase == "cancelled" and ends(pids[1]) and not cancelled.folder.exists()


def test_one_that_is_cancelled_before_it_begins_never_does(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_TEST", "a parent that still imports")
    job = begin("sleeps", file=str(tmp_path / "pid"))
    job.cancel()
    assert begin("about").wait().phase == "done"  # the next of the same parent: it had its turn
    assert not (tmp_path / "pid").exists()


def test_where_the_parent_of_all_is_killed_another_takes_its_place(tmp_path):
    job = begin("sleeps", file=str(tmp_path / "pid"))
    pid = number_in(tmp_path / "pid")
    job.process._forker.process.kill()
    assert job.wait().was_killed and ends(pid)
    assert begin("about").wait().phase == "done"


def test_a_request_that_came_as_the_parent_went_is_made_again(monkeypatch):
    begin("about").wait()
    monkeypatch.setattr(forked._Forker, "ask", lambda self, *request: self.close() is None)  # nobody heard it
    job = begin("about")
    monkeypatch.undo()
    assert job.wait().phase == "done" and job.process._tries == 2


def test_no_child_outlives_who_asked_for_it(tmp_path):
    code = f"""
import time
from stabilitylab.run.job import Job
job = Job.forked("{HERE}:sleeps", {{"file": {str(tmp_path / "pid")!r}}}, ())
time.sleep(60)
"""
    owner = subprocess.Popen([sys.executable, "-c", code])
    pid = number_in(tmp_path / "pid")
    owner.kill()
    owner.wait()
    assert ends(pid)
