"The trackers themselves: what a recorder reports there comes back, and their servers are read by address."

import contextlib
import json
import socket
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from stabilitylab import diagnose, open_run, read_log, read_runs
from stabilitylab.cli.main import main
from stabilitylab.names.errors import InputError

TRAIN = """
import torch

from stabilitylab import Recorder


def train(path, report_to, bad=17, steps=31, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Recorder(model, optimizer, path, report_to=report_to, **options) as recorder:
        for step in range(steps):
            loss = model(torch.randn(16, 8)).square().mean() * (float("nan") if step == bad else 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def served(command, folder, port, **environment):
    "A server that answers, ended afterwards."
    import os

    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5).read()
                break
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            time.sleep(0.25)
        else:
            pytest.fail("the server does not answer: " + (folder / "server.log").read_text()[-2000:])
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


def same_as_record(table, record, names=("loss", "grad_norm", "lr")):
    "Whether every reported step has the record's values."
    assert {0, 10, 17, 20, 30} <= set(table.step.values.tolist())
    for name in names:
        np.testing.assert_allclose(table[name], record[name].sel(step=table.step), rtol=1e-6, equal_nan=True)


def test_wandb_and_trackio_beside_a_run_of_the_loop(run_program, tmp_path):
    source = (
        TRAIN
        + """
import json

import trackio
import wandb

own = wandb.init(project="gpt", name="mine")
train("run", {"wandb": None, "trackio": "gpt"})
own.log({"metric": 1.0}, step=3)  # the run of the loop is as it was
own.finish()
alerts = trackio.Api().runs("gpt")[0].alerts()
print(json.dumps([[alert["title"], alert["level"], alert["step"]] for alert in alerts]))
"""
    )
    printed, errors = run_program(source)
    assert "Recorder(" not in errors
    record = open_run(tmp_path / "run")["scalars"]
    alerts = json.loads(printed.splitlines()[-1])
    assert ["error", "error", 17] in alerts and any(title == "non_finite" for title, _, _ in alerts)
    same_as_record(read_log(tmp_path / "trackio" / "gpt.db"), record)
    runs = read_runs(tmp_path / "wandb")
    tables = [run["scalars"].to_dataset() for run in runs.values()]
    ours = next(table for table in tables if "loss" in table)
    theirs = next(table for table in tables if "metric" in table)
    same_as_record(ours, record)
    assert theirs.step.values.tolist() == [3]


def test_mlflow_server(run_program, python, tmp_path, capsys):
    port = free_port()
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), *store]
    source = (
        TRAIN
        + """
import mlflow

mlflow.set_experiment("gpt")
with mlflow.start_run(run_name="mine"):
    mlflow.log_metric("loss", 3.0)
    mlflow.log_metric("loss", 2.0)
    train("run", "mlflow")
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("gpt").experiment_id
ours = next(run for run in client.search_runs([experiment]) if run.info.run_name == "run")
parent = client.get_run(ours.data.tags["mlflow.parentRunId"])
assert parent.info.run_name == "mine" and ours.info.status == "FINISHED"
assert "first non-finite value" in ours.data.tags["stabilitylab.error.step_17"]
assert "stabilitylab.non_finite.step_17" in ours.data.tags
print(experiment, ours.info.run_id)
"""
    )
    base = f"http://127.0.0.1:{port}"
    with served(command, tmp_path, port):
        printed, errors = run_program(source, MLFLOW_TRACKING_URI=base)
        assert "Recorder(" not in errors
        experiment, run_id = printed.splitlines()[-1].split()
        record = open_run(tmp_path / "run")["scalars"]
        same_as_record(read_log(f"{base}/#/experiments/{experiment}/runs/{run_id}"), record)
        runs = read_runs(f"{base}/#/experiments/gpt")
        assert set(runs) == {"mine", "run"}
        assert runs["mine"]["scalars"].loss.values.tolist() == [3.0, 2.0]  # logged without a step
        assert set(read_runs(base)) == {"mine", "run"}
        assert "non_finite" in diagnose(runs["run"]).kinds
        assert main(["diagnose", f"{base}/#/experiments/{experiment}/runs/{run_id}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["format"] == "mlflow"
        with pytest.raises(InputError, match=r"no experiment 'x'; allowed: .*gpt"):
            read_runs(f"{base}/#/experiments/x")
        with pytest.raises(InputError, match=r"Run with id=.* not found"):
            read_runs(f"{base}/#/experiments/1/runs/{'0' * 32}")
    with pytest.raises(InputError, match="is the server running"):
        read_runs(base)
    _, errors = run_program(
        TRAIN + 'train("later", "mlflow")', MLFLOW_TRACKING_URI=base, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0"
    )
    assert errors.count("Recorder(") == 1 and "reporting to mlflow missing" in errors
    assert open_run(tmp_path / "later")["scalars"].step.size == 31


def test_trackio_dashboard(run_program, python, tmp_path, monkeypatch):
    run_program(TRAIN + 'train("run", {"trackio": "gpt"}); train("other", {"trackio": "two"}, steps=3)')
    record, port = open_run(tmp_path / "run")["scalars"], free_port()
    folder = {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        "GRADIO_SERVER_PORT": str(port),
    }
    source = "import trackio; trackio.show(open_browser=False, block_thread=True, server_port=PORT)"
    with served([python, "-c", source.replace("PORT", str(port))], tmp_path, port, **folder):
        base = f"http://127.0.0.1:{port}"
        same_as_record(read_log(f"{base}/?project=gpt"), record)
        with pytest.raises(InputError, match=r"names no project; allowed: .*gpt, two"):
            read_runs(base)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    same_as_record(read_log("trackio://gpt"), record)
