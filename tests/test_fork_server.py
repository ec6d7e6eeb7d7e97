"Jobs as forks of a process that has imported what they need."

import os
import signal
import sys
import time

import pytest

from stabilitylab.run.fork_server import can_fork
from stabilitylab.run.job import Job

pytestmark = pytest.mark.skipif(not can_fork(), reason="no fork server on this system")
WARM = ["json.tool"]


def slept(seconds: float) -> list:
    "What a child is: its group, its parent, whether the module was there before."
    was_there = "json.tool" in sys.modules
    time.sleep(seconds)
    return [os.getpgrp(), os.getppid(), was_there, os.environ.get("WORDS", "")]


def broken() -> None:
    "Ends badly."
    print("before", file=sys.stderr)
    raise OSError("no disk")


def begun(seconds=0.0):
    "A warm job that sleeps."
    return Job.of("tests.test_fork_server:slept", warm=WARM, seconds=seconds)


def server_of(job):
    "The process of the server that forks a job."
    return job.process._server.process


def test_each_job_is_a_process_of_its_own_from_one_server():
    jobs = [begun() for _ in range(3)]
    answers = [job.wait(60).result for job in jobs]
    assert len({group for group, *_ in answers}) == 3 and {parent for _, parent, *_ in answers} == {
        server_of(jobs[0]).pid
    }
    assert all(was_there for *_, was_there, _ in answers)


def test_what_a_child_raises_is_the_error_and_the_server_goes_on():
    failed = Job.of("tests.test_fork_server:broken", warm=WARM).wait(60)
    assert failed.phase == "failed" and failed.error == "OSError: no disk" and not failed.was_killed
    assert "before" in failed.stderr and begun().wait(60).phase == "done"


def test_a_killed_child_is_said_to_be_and_the_others_go_on():
    killed, cancelled, other = begun(60), begun(60), begun(0.3)
    os.kill(killed.process.pid, signal.SIGKILL)
    cancelled.cancel()
    state = killed.wait(60)
    assert state.was_killed and "SIGKILL" in state.error and cancelled.poll().phase == "cancelled"
    assert other.wait(60).phase == "done" and not cancelled.folder.exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(cancelled.process.pid, 0)


def test_where_the_server_is_killed_its_children_end_and_the_next_job_has_another():
    job = begun(60)
    pid, server = job.process.pid, server_of(job)
    os.kill(server.pid, signal.SIGKILL)
    assert job.wait(60).was_killed
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    again = begun()
    assert again.wait(60).phase == "done" and server_of(again).pid != server.pid


def test_another_environment_has_another_server(monkeypatch):
    first = begun(1)  # it goes on while its server is replaced
    monkeypatch.setenv("WORDS", "told")
    second = begun()
    assert [job.wait(60).result[-1] for job in (first, second)] == ["", "told"]
    assert server_of(first).pid != server_of(second).pid
    server_of(first).wait(60)  # it ends with its last child
    assert server_of(second).poll() is None


def test_after_a_server_that_ended_the_next_job_begins_one():
    job = begun()
    job.wait(60)
    job.process._server.stop()
    assert begun().wait(60).phase == "done"
