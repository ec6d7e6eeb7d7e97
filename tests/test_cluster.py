"Scans and diagnoses on the workers of a cluster: what this process alone says, also where workers die."

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from dask import config as dask_config

from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.cli.main import main
from stabilitylab.detect.cross_run import _common_steps
from stabilitylab.names.errors import InputError, MissingExtra
from stabilitylab.read.runs import read_runs
from stabilitylab.run.cluster import as_client, job_script, make_cluster, map_on, n_workers
from stabilitylab.trial.settings import Recipe
from stabilitylab.trial.sweep import Sweep

distributed = pytest.importorskip("distributed", reason="SKIPPED: distributed is absent")
PATIENCE = 600  # seconds for a new worker: some of a processor alone, minutes of a busy machine
WORDS = "slurm:jobs=8,cores=4,memory=16GB,walltime=02:00:00,queue=gpu,directive=--gres=gpu:1"


@pytest.fixture(scope="module")
def client():
    "Two workers of their own processes."
    with make_cluster("local:2") as cluster, distributed.Client(cluster) as client:
        yield client


def loss_log(path, seed, at=None):
    "A log of 400 steps; from step `at` on its loss is NaN."
    loss = 3 + np.exp(-np.arange(400) / 100) + np.random.default_rng(seed).normal(0, 0.01, 400)
    loss[at:] = np.nan if at is not None else loss[at:]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"iter {step}: loss {value:.4f}\n" for step, value in enumerate(loss)))


@pytest.fixture
def folder(tmp_path):
    "Five runs, one of which fails, and a file that is no log."
    for number in range(5):
        loss_log(tmp_path / f"run-{number}" / "train.log", number, 300 if number == 3 else None)
    (tmp_path / "noise.log").write_bytes(bytes(range(256)) * 40)
    return tmp_path


def test_groups_hold_every_item_once_and_are_of_one_size():
    from stabilitylab.run.cluster import _groups

    generator = np.random.default_rng(0)
    for n_items, n_groups in ((0, 4), (1, 4), (3, 16), (100, 16), (1000, 7)):
        sizes = generator.pareto(2, n_items)
        groups = _groups(list(range(n_items)), n_groups, sizes)
        assert [item for group in groups for item in group] == list(range(n_items))
        assert all(groups) and len(groups) <= n_groups
        most = max(sizes, default=0) + 1 + (sizes.sum() + n_items) / n_groups
        assert all(sum(sizes[group] + 1) <= most + 1e-9 for group in groups)


def test_common_steps_are_those_of_numpy():
    for a, b in (([1, 2, 5], [1, 2, 5]), ([1, 2, 2], [1, 2, 2]), ([3, 1], [3, 1]), ([1, 2, 3], [2, 3, 4])):
        a, b = np.array(a), np.array(b)
        for ours, numpys in zip(_common_steps(a, b), np.intersect1d(a, b, return_indices=True), strict=True):
            assert np.array_equal(ours, numpys)


def test_words_that_name_no_workers_are_one_sentence(capsys):
    for words in ("local:none", "local:0", "ssh:host", "slurm:cores=2", "slurm:jobs=0,cores=2,memory=1GB"):
        with pytest.raises(InputError, match="`client`="):
            make_cluster(words)
    with pytest.raises(InputError, match="no job script"):
        job_script("local:2")
    assert (
        main(["cluster", "local:2", "--dry-run"]) == 2
        and main(["scan", "x.pt", "--scheduler", "local:x"]) == 2
    )
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_dry_run_prints_the_script_and_submits_nothing(monkeypatch, capsys, tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["cluster", WORDS, "--dry-run"]) == 0
    script = capsys.readouterr().out
    for line in ("-p gpu", "--cpus-per-task=4", "-t 02:00:00", "--gres=gpu:1"):
        assert f"#SBATCH {line}\n" in script
    assert "--nworkers 4" in script and "--nthreads 1" in script and "dask_worker tcp://" in script
    assert not ran.exists()


@pytest.mark.slow  # waits for the queue's command
def test_every_job_is_submitted_with_that_script(monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text(
        f'#!/bin/sh\ncat "$1" >> {tmp_path}/script\necho x >> {tmp_path}/jobs\necho "Submitted batch job 1"\n'
    )
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    for name in ("sbatch", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with make_cluster(WORDS.replace("jobs=8", "jobs=3")) as cluster, distributed.Client(cluster) as client:
        end, jobs = time.monotonic() + PATIENCE, tmp_path / "jobs"
        while time.monotonic() < end and not (jobs.is_file() and jobs.read_text().count("x") == 3):
            time.sleep(0.05)
        assert jobs.read_text().count("x") == 3 and n_workers(client) == 12  # none has begun, all are counted
        assert (tmp_path / "script").read_text().count("#SBATCH --gres=gpu:1") == 3


@pytest.mark.slow  # starts workers
def test_a_scan_says_the_same_and_names_what_is_damaged(client, tmp_path):
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {f"blocks.{i}.w": torch.randn(30 + i, 40, generator=generator) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    here, there = (
        scan_checkpoint(tmp_path / "model.safetensors", progress=False, client=which)
        for which in (None, client)
    )
    pd.testing.assert_frame_equal(here, there)
    assert {name: list(counts) for name, counts in here.attrs["exponents"].items()} == {
        name: list(counts) for name, counts in there.attrs["exponents"].items()
    }
    torch.save(tensors, tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(content)
    here, there = (scan_checkpoint(tmp_path / "damaged.pt", progress=False, client=w) for w in (None, client))
    pd.testing.assert_frame_equal(here, there)
    assert here.attrs["left_out"] == there.attrs["left_out"] and len(here.attrs["left_out"]) == 1


@pytest.mark.slow  # starts workers
def test_a_folder_is_read_and_diagnosed_the_same(client, folder, capsys):
    here, there = read_runs(folder), read_runs(folder, client=client)
    assert list(here) == list(there) and all(here[name].identical(there[name]) for name in here)
    assert "noise.log" in next(iter(there.values())).attrs["left_out"]
    said = []
    for more in ([], ["--scheduler", client.scheduler.address]):
        assert main(["diagnose", str(folder), "--json", *more]) == 0
        said.append(capsys.readouterr().out)
    as_client(client.scheduler.address).close()
    assert said[0] == said[1] and said[0].count('"non_finite"') >= 1


def ends_its_worker_once(number, folder):
    "Kills the process that calls, the first time that 7 comes."
    mark = Path(folder) / "killed"
    if number == 7 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def ends_every_worker(number):
    "Kills the process that calls."
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def is_slow_in_one(number, folder):
    "The process that calls; the first one to come takes its time."
    first = Path(folder) / "first"
    if not first.exists():
        first.write_text(str(os.getpid()))
    if first.read_text() == str(os.getpid()):
        time.sleep(0.3)
    return number, os.getpid()


def refuses(number, folder):
    "An error of the input; each call leaves a line."
    with open(Path(folder) / "calls", "a") as calls:
        calls.write("x")
    raise InputError(f"number {number} is refused")


@pytest.mark.slow  # starts workers
def test_a_worker_that_dies_or_is_slow_changes_nothing(client, tmp_path):
    assert list(map_on(client, ends_its_worker_once, range(40), str(tmp_path))) == [n**2 for n in range(40)]
    client.wait_for_workers(2, timeout=PATIENCE)
    client.run(ends_every_worker, 0)  # both have imported this module
    answers = list(map_on(client, is_slow_in_one, range(32), str(tmp_path)))
    assert [number for number, _ in answers] == list(range(32))
    slow = (tmp_path / "first").read_text()
    shares = [str(pid) == slow for _, pid in answers]
    assert 0 < sum(shares) < 16  # the other one takes what is left


@pytest.mark.slow  # starts workers
def test_what_kills_every_worker_is_named_and_bad_input_is_not_tried_again(client, tmp_path, monkeypatch):
    scheduler = client.cluster.scheduler
    monkeypatch.setattr(scheduler, "allowed_failures", 0)  # each costs the start of a worker
    with pytest.raises(InputError, match="every worker that began ends_every_worker"):
        list(map_on(client, ends_every_worker, [1]))
    client.wait_for_workers(2, timeout=PATIENCE)
    with pytest.raises(InputError, match="number 5 is refused"):
        list(map_on(client, refuses, [5], str(tmp_path)))
    assert (tmp_path / "calls").read_text() == "x"


@pytest.mark.slow  # starts workers
def test_a_worker_that_takes_long_to_begin_anew_is_not_given_up(tmp_path):
    begins = f"import pathlib, time; mark = pathlib.Path({str(tmp_path / 'first')!r})"
    begins += "; time.sleep(3 * mark.exists()); mark.touch()"
    dask_config.update_defaults({"distributed": {"deploy": {"lost-worker-timeout": "1s"}}})  # of Dask 15 s
    with (
        dask_config.set({"distributed.worker.preload": [begins]}),
        make_cluster("local:1") as cluster,
        distributed.Client(cluster) as client,
    ):
        assert list(map_on(client, ends_its_worker_once, [7], str(tmp_path))) == [49]


def test_how_long_a_lost_worker_is_waited_for_may_be_set():
    with dask_config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        with pytest.raises(InputError):
            make_cluster("slurm:jobs=0,cores=2,memory=1GB")
        assert dask_config.get("distributed.deploy.lost-worker-timeout") == "1h"


@pytest.mark.slow  # trains on workers
def test_a_sweep_on_a_cluster_goes_on_where_it_was_stopped(client, tmp_path):
    start = Recipe(d_model=16, n_layer=1, n_head=2, seq=16, batch=4, steps=12).start
    axes = {"lr": (1e-3, 1e-2), "n_layer": (1, 2)}
    first = Sweep(start, axes, 12, 1, folder=tmp_path, client=client)
    while not (state := first.poll()).done and not state.ended:
        time.sleep(0.02)
    first.cancel()
    again = Sweep(start, axes, 12, 1, folder=tmp_path, client=client)
    kept = len([task for task, why in again.ended.items() if not why])
    result = again.run(progress=False)
    assert kept >= 1 and result.complete and len(result.table()) == 4


@pytest.mark.slow  # starts a process with workers
def test_workers_that_are_kept_serve_the_next_commands(folder, capsys):
    code = "import sys; from stabilitylab.cli.main import main\nif __name__ == '__main__': sys.exit(main())"
    program = folder / "program.py"
    program.write_text(code)
    command = [sys.executable, str(program), "cluster", "local:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kept:
        address = kept.stdout.readline().strip()
        assert as_client(address) is as_client(address)  # connected once
        assert n_workers(as_client(address)) == 1
        assert main(["diagnose", str(folder), "--scheduler", address, "--fail-on", "error"]) == 1
        as_client(address).close()
        assert as_client(address).status == "running"  # a closed one is not handed out
        as_client(address).close()
        kept.send_signal(signal.SIGINT)
        assert kept.wait(PATIENCE) == 0
    assert "run-3" in capsys.readouterr().out


def test_slurm_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(MissingExtra, match=r"stabilitylab\[slurm\]"):
        job_script(WORDS)
