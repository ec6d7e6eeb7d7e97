"Why a run died: the first cause in the words of many programs, alone and among the records of a log."

import pytest

from stabilitylab import diagnose, read_runs
from stabilitylab.read.crash.evidence import evidence_in
from stabilitylab.read.crash.incidents import crash_in_text

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
ENDS = {  # the end of a log -> (cause, words of its exception, signal or message; rank; how many followed)
    TRACE + "KeyError: 'input_ids'": ("exception", "KeyError", None, 0),
    TRACE + "KeyboardInterrupt": ("stopped by hand", "KeyboardInterrupt", None, 0),
    TRACE + "AssertionError": ("exception", "AssertionError", None, 0),
    TRACE + "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory": (
        "out of GPU memory",
        "XlaRuntimeError",
        None,
        0,
    ),
    TRACE + "OSError: [Errno 122] Disk quota exceeded": ("disk full", "OSError", None, 0),
    TRACE + "RuntimeError: HIP out of memory. Tried to allocate 20 MiB": (
        "out of GPU memory",
        "RuntimeError",
        None,
        0,
    ),
    TRACE + "RuntimeError: CUDA error: device-side assert triggered": ("GPU error", "RuntimeError", None, 0),
    TRACE + "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.": (
        "out of memory",
        "RuntimeError",
        None,
        0,
    ),
    "".join(
        f"[rank{r}]: {line}\n" for r in (5, 2, 7) for line in (TRACE + "ValueError: bad shape").splitlines()
    )
    + "E0321 02:07:26.090 1 api.py:833] failed (exitcode: 1)\n"
    + TRACE
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:": ("exception", "ValueError", 5, 2),
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)\n"
    "[rank3]:[E ProcessGroupNCCL.cpp:684] To avoid data inconsistency, we go down.\n"
    "Fatal Python error: Aborted": ("communication failed", "Watchdog", 3, 0),
    "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 main.py\n"
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.": (
        "out of memory",
        "OOM",
        None,
        0,
    ),
    "slurmstepd: error: *** JOB 77 ON n3 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
    + TRACE
    + "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15": (
        "time limit",
        "TIME LIMIT",
        None,
        0,
    ),
    "=>> PBS: job killed: walltime 3630 exceeded limit 3600": ("time limit", "TIME LIMIT", None, 0),
    "Segmentation fault (core dumped)": ("memory access", "SIGSEGV", None, 0),
    "Killed": ("killed", "SIGKILL", None, 0),
    "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.": ("GPU error", "Xid", None, 0),
    "Detected KeyboardInterrupt, attempting graceful shutdown ...": ("stopped by hand", "SIGINT", None, 0),
    "[2026-02-20 20:27:14,902] [INFO] [launch.py:319] exits with return code = -9": (
        "killed",
        "SIGKILL",
        None,
        0,
    ),
    "train.py: error: unrecognized arguments: --lrr 3": ("bad command", "command", None, 0),
    "bash: line 3: torchrun: command not found": ("bad command", "command", None, 0),
    "terminate called after throwing an instance of 'c10::Error'\n  what(): no\nAborted (core dumped)": (
        "aborted",
        "check",
        None,
        0,
    ),
    "\x1b[36m(TaskRunner pid=7)\x1b[0m "
    + TRACE.replace("\n", "\n\x1b[36m(TaskRunner pid=7)\x1b[0m ")
    + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    + TRACE
    + "ray.exceptions.RayTaskError(OutOfMemoryError): ray::TaskRunner.run()": (
        "out of GPU memory",
        "OutOfMemoryError",
        None,
        0,
    ),
    TRACE
    + "FileNotFoundError: x\n\nDuring handling of the above exception, another exception occurred:\n\n"
    + TRACE
    + "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.": (
        "exception",
        "FileNotFoundError",
        None,
        0,
    ),
}


@pytest.mark.parametrize("text", ENDS, ids=[text.splitlines()[-1][:50] for text in ENDS])
def test_the_first_cause_is_named(text, tmp_path):
    cause, name, rank, followed = ENDS[text]
    crash = crash_in_text(text.encode())
    assert (crash.cause, crash.rank, crash.followed) == (cause, rank, followed)
    assert name in f"{crash.name} {crash.message}"
    records = "".join(f"step {step} loss {3 - step / 50:.3f}\n" for step in range(60))
    for i, (content, step) in enumerate([(records + text + "\n", 59), (text + "\n", None)]):
        path = tmp_path / f"{i}.log"
        path.write_text(content)
        ((_, run),) = read_runs(path).items()
        found = diagnose(run)
        assert found[0].kind == "crash" and found[0].evidence["cause"] == cause
        assert found[0].onset == step
        assert (found[0].severity == "info") == (cause in ("time limit", "stopped by hand", "cancelled"))


def test_an_attempt_that_failed_is_no_alarm(tmp_path):
    records = "".join(f"step {step} loss {3 - step / 500:.3f}\n" for step in range(600))
    (tmp_path / "a.log").write_text(TRACE + "ValueError: no data\n" + "starting again\n" * 50 + records)
    ((_, run),) = read_runs(tmp_path / "a.log").items()
    (found,) = diagnose(run).of("crash")
    assert found.severity == "info" and not found.evidence["ended"]


def test_output_kept_back_does_not_hide_the_death(tmp_path):
    lines = [f"step {step} loss {3 - step / 500:.3f}\n" for step in range(600)]
    (tmp_path / "a.log").write_text(
        "".join(lines[:500]) + TRACE + "ValueError: no data\n" + "".join(lines[500:])
    )
    ((_, run),) = read_runs(tmp_path / "a.log").items()
    (found,) = diagnose(run).of("crash")
    assert (found.severity, found.onset) == ("error", 599)


def test_words_of_a_healthy_log_are_no_crash():
    assert (
        crash_in_text(
            ["step 3 error: 0.5 signal 0.2", "Killed 3 zombies", "saved without errors", "exit code 0"]
        )
        is None
    )


WILD = {  # file -> what its crash must say
    "uno_train.log": ("out of GPU memory", 0),
    "longlive.log": ("exception", 3),
    "layoutlm_nohup.out": ("exception", None),
    "mlm_incons_nohup.out": ("out of GPU memory", None),
    "mindspore_train.log": ("exception", None),
    "logicrl_grpo.log": ("exception", None),
    "openvla_slurm.out": ("cancelled", None),  # five jobs in one file; the last was cancelled
    "llamafactory_train.out": ("exception", 0),
    "minphi3_dpo.log": ("stopped by hand", None),
}


@pytest.mark.parametrize("name", WILD)
def test_every_crash_of_the_wild_sample_is_named_first(real_logs, name):
    path = real_logs / "wild" / name
    if not path.exists():
        pytest.skip("the wild sample is not there")
    ((_, run),) = read_runs(path).items()
    first = diagnose(run)[0]
    cause, rank = WILD[name]
    assert (first.kind, first.evidence["cause"], first.evidence.get("rank")) == ("crash", cause, rank)


def test_a_message_that_could_not_be_logged_ends_nothing():
    trace = 'Traceback (most recent call last):\n  File "/x/logging/__init__.py", line 377, in getMessage\n'
    trace += "    msg = msg % self.args\nTypeError: not all arguments converted\n"
    assert not evidence_in(f"10it [00:07]--- Logging error ---\n{trace}Call stack:\n".encode())
    assert evidence_in(trace.encode())


def test_a_traceback_with_names_in_chinese_is_told_once():
    frame = '  File "/训练/模型训练主程序.py", line 3, in 主函数\n    主函数()\n'
    text = f"step 1\nTraceback (most recent call last):\n{frame}ValueError: 错误错误错误 in CUDA\nbye\n"
    (evidence,) = evidence_in(text.encode())
    assert evidence.where == "模型训练主程序.py:3 in 主函数" and evidence.has_traceback
