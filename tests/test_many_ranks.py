"Ranks under every layout give the record of one process; a rank that differs, or is lost, is named."

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run
from tests.scale.ranks import LAYOUTS, Job, Member, Tower

pytestmark = pytest.mark.slow  # starts processes

HEALTHY = {layout: Job(layout, 4, 2, 4) for layout in LAYOUTS}
FAULTS = {  # what is told of a bad rank
    ("ddp", "gradient"): "grad_norm_explosion",
    ("ddp", "input"): "bad_batch_values",
    ("ddp", "time"): "throughput_drop",
    ("ddp", "kill"): "crash",
    ("tp", "gradient"): "grad_norm_explosion",
    ("pp", "input"): "bad_batch_values",
    ("pp", "kill"): "crash",
}
BAD = {pair: Job(pair[0], 4 if pair[0] == "ddp" else 6, 2, 20, pair[1], 2, 8, delay=0.3) for pair in FAULTS}
LAUNCH = """
import json, sys
from pathlib import Path
from tests.scale.ranks import Job, launch
for name, job in json.loads(sys.argv[1]).items():
    print(launch(Job(**job), Path(name), every_n=0, flush_seconds=0.3), flush=True)
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    "The folder of each job's record; all are forked from one process."
    folder = tmp_path_factory.mktemp("ranks")
    jobs = {folder / "-".join(["healthy", layout]): job for layout, job in HEALTHY.items()}
    jobs |= {folder / "-".join(pair): job for pair, job in BAD.items()}
    request = json.dumps({str(path): dataclasses.asdict(job) for path, job in jobs.items()})
    command = [sys.executable, "-W", "ignore", "-c", LAUNCH, request]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    codes = map(json.loads, done.stdout.splitlines())
    return folder, dict(zip((path.name for path in jobs), codes, strict=True))


def twin(path, layout):
    "The record of one process that is given the batches of all ranks."
    job = HEALTHY[layout]
    sources = job.world // (job.inner if layout in ("tp", "pp") else 1)
    torch.manual_seed(0)
    model = Tower(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    member = object.__new__(Member)
    member.job = Job("ddp", 1, 1, job.steps)
    with Recorder(model, optimizer, path, every_n=0) as recorder:
        for step in range(job.steps):
            parts = []
            for member.rank in range(sources):
                parts.append(member.batch(step))
            x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    return open_run(path).load()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_record_of_one_process(records, tmp_path, layout):
    folder, codes = records
    assert codes[f"healthy-{layout}"] == [0] * 4
    run, want = open_run(folder / f"healthy-{layout}").load(), twin(tmp_path / "one", layout)
    assert "live" not in os.listdir(folder / f"healthy-{layout}")
    for name in ("loss", "grad_norm", "weight_norm", "update_norm"):
        np.testing.assert_allclose(run["scalars"][name], want["scalars"][name], rtol=1e-4, err_msg=name)
    for group in ("gradients", "weights", "updates", "optimizer"):
        assert sorted(run[group].param.values) == sorted(want[group].param.values)
        for name, wanted in want[group].data_vars.items():
            got = run[group][name].sel(param=want[group].param)
            np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-5, err_msg=f"{group}/{name}")
    modules = want["activations"].module
    for name in ("rms", "absmax", "in_rms", "nonfinite_count"):
        got, wanted = run["activations"][name].sel(module=modules), want["activations"][name]
        # the first layer of every stage has statistics of its input
        got = got.where(wanted.notnull()) if name == "in_rms" and layout == "pp" else got
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-6, err_msg=name)
    assert run["ranks"].step_time.notnull().all() and run["ranks"].sizes["rank"] == 4
    is_seen = run["rank_activations"].rms.notnull().all("step").sum("rank")
    assert (is_seen == (2 if layout == "pp" else 4)).all()
    assert not [f for f in diagnose(run) if f.evidence.get("rank") is not None]


@pytest.mark.parametrize("pair", FAULTS, ids="-".join)
def test_a_bad_rank_is_named(records, pair):
    folder, codes = records
    job, name = BAD[pair], "-".join(pair)
    assert set(codes[name]) == ({-9, 1} if job.fault == "kill" else {0})
    told = [f for f in diagnose(open_run(folder / name)) if f.evidence.get("rank") is not None]
    onset = job.fault_step - (job.fault == "kill")
    assert [(f.kind, f.evidence["rank"], f.onset) for f in told] == [(FAULTS[pair], job.bad_rank, onset)]
    assert f"ank {job.bad_rank}" in told[0].explanation
