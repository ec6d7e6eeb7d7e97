"Each extra of settings.ini: absent, one line names the pip command; present, none does."

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USES = {  # extra -> (package that is blocked, what needs it)
    "hf": ("transformers", "from stabilitylab.probe.hf import RecorderCallback; RecorderCallback('run')"),
    "cluster": ("distributed", "from stabilitylab.run.cluster import as_client; as_client('no address')"),
    "slurm": (
        "dask_jobqueue",
        "from stabilitylab.run.cluster import job_script; print(job_script('slurm:cores=1,memory=1GB'))",
    ),
    "remote": ("fsspec", "from stabilitylab.read.runs import read_runs; read_runs('memory://b/train.log')"),
    "lab": (
        "jupyterlab",
        "from stabilitylab.cli.main import main; sys.exit(main(['lab', '.', '--notebook', 'x.ipynb']))",
    ),
    "trackers": (
        "tensorboard",
        """
import torch
from stabilitylab import Recorder
model = torch.nn.Linear(2, 1)
with Recorder(model, torch.optim.SGD(model.parameters(), 0.1), 'run', report_to='tensorboard') as recorder:
    loss = model(torch.ones(2)).sum()
    loss.backward()
    recorder.step(loss)
""",
    ),
    "agent": ("mcp", "from stabilitylab.cli.main import main; sys.exit(main(['mcp']))"),
}
PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if {blocked!r} and name.partition('.')[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util, subprocess
find_spec, subprocess.call = importlib.util.find_spec, lambda *command: 0  # nothing is opened
importlib.util.find_spec = lambda name, *more: None if name == {blocked!r} else find_spec(name, *more)
{use}
"""


def what_is_said(extra, blocked, folder):
    "What a process prints that uses an extra."
    program = PROGRAM.format(blocked=blocked, use=USES[extra][1])
    plain = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=plain, cwd=folder, text=True, timeout=120, **how).stdout


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("extra", USES)
def test_an_extra_is_named_where_it_is_absent(extra, tmp_path):
    command = f"pip install 'stabilitylab[{extra}]'"
    absent = [line for line in what_is_said(extra, USES[extra][0], tmp_path).splitlines() if command in line]
    assert len(absent) == 1
    assert command not in what_is_said(extra, "", tmp_path)


def test_every_extra_has_a_row():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    ends = "_requirements"
    extras = {name.removesuffix(ends) for name in settings["DEFAULT"] if name.endswith(ends)}
    assert extras - {"dev"} == set(USES)
