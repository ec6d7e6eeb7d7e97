"""Exports and folders of trackers, several files of one run, and crashes behind rows, all written here."""

import json
import sqlite3
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from stabilitylab.names.errors import InputError
from stabilitylab.read.files import ReadOptions
from stabilitylab.read.groups import continuations, stem_without_counter
from stabilitylab.read.runs import read_log, read_runs
from stabilitylab.read.tracker_servers import _server, server_runs

STEPS = np.arange(0, 200, 10)
LOSS = 3 / (1 + STEPS / 50)


def loss_of(run):
    "Steps and values of the loss of a record."
    table = run["scalars"].to_dataset()
    return table.step.values.tolist(), table.loss.values.tolist()


def text(first, last, every=1):
    "A console log with the loss of some steps."
    return "".join(f"step {i} loss {3 / (1 + i / 50):.4f}\n" for i in range(first, last, every))


def mlflow_run(root, name="careful-ant-7", status=3):
    "A run of MLflow's file store."
    (root / "metrics" / "val").mkdir(parents=True)
    (root / "params").mkdir()
    (root / "params" / "lr").write_text("0.001")
    (root / "meta.yaml").write_text(f"run_name: {name}\nstatus: {status}\nend_time: 1700000999000\n")
    rows = (f"{1700000000000 + step} {loss} {step}" for step, loss in zip(STEPS, LOSS, strict=True))
    (root / "metrics" / "loss").write_text("\n".join(rows) + "\n")
    (root / "metrics" / "val" / "loss").write_text("1700000000100 2.5 100\n")


def test_mlruns(tmp_path):
    for name in ("a1", "b2"):
        mlflow_run(tmp_path / "mlruns" / "0" / name)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("name: Default\n")
    runs = read_runs(tmp_path / "mlruns")
    assert sorted(runs) == ["0/a1", "0/b2"]
    assert loss_of(runs["0/a1"])[0] == STEPS.tolist()
    assert loss_of(runs["0/b2"])[1] == LOSS.tolist()
    assert runs["0/a1"].attrs["format"] == "mlflow"
    assert runs["0/a1"]["scalars"].val_loss.dropna("step").values.tolist() == [2.5]


def test_one_run_of_mlflow_and_one_of_its_files(tmp_path):
    mlflow_run(tmp_path / "run", status=4)
    runs = read_runs(tmp_path / "run")
    assert list(runs) == ["run"]
    assert "error" in runs["run"]["events"].event_kind.values.tolist()
    one = read_log(tmp_path / "run" / "metrics" / "loss")
    assert one.attrs["format"] == "mlflow"
    assert one.loss.values.tolist() == LOSS.tolist()
    assert str(one.time.values[0])[:10] == "2023-11-14"
    assert runs["run"].attrs["source"] == str(tmp_path / "run")
    (tmp_path / "other.log").write_text(text(0, 9))
    with pytest.raises(InputError, match="holds records"):
        read_runs(tmp_path / "other.log", format="mlflow")


def long_rows(names, run="Run", time="timestamp"):
    "The header and rows of an export with two runs."
    rows = [",".join(f'"{name}"' for name in names)]
    for name, shift in (("calm", 0), ("wild", 1)):
        for step, loss in zip(STEPS, LOSS, strict=True):
            cells = {run: name, time: 1700000000000 + step, "step": step, "value": loss + shift}
            rows.append(",".join(f'"{cells.get(column, "loss")}"' for column in names))
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("names", "run", "time"),
    [
        (("Run", "Run ID", "metric", "step", "timestamp", "value"), "Run", "timestamp"),
        (("run.hash", "metric.name", "step", "value", "time"), "run.hash", "time"),
        (("experimentKey", "metricName", "step", "value", "timestamp"), "experimentKey", "timestamp"),
    ],
)
def test_tables_with_a_row_a_value(tmp_path, names, run, time):
    (tmp_path / "chart.csv").write_text(long_rows(names, run, time))
    runs = read_runs(tmp_path / "chart.csv")
    assert list(runs) == ["calm", "wild"]
    assert loss_of(runs["wild"]) == (STEPS.tolist(), (LOSS + 1).tolist())
    in_folder = read_runs(tmp_path)
    assert list(in_folder) == ["chart.csv/calm", "chart.csv/wild"]
    with pytest.raises(InputError, match="2 runs"):
        read_log(tmp_path / "chart.csv")


def test_history_of_a_metric_as_json(tmp_path):
    pairs = list(zip(STEPS.tolist(), LOSS.tolist(), strict=True))
    history = {
        "metrics": [{"key": "loss", "value": v, "timestamp": 1700000000000, "step": s} for s, v in pairs]
    }
    comet = [{"metricName": "loss", "metricValue": str(v), "timestamp": 1, "step": s} for s, v in pairs]
    values = [{"step": s, "timestamp": "2026-01-01T00:00:00", "value": v} for s, v in pairs]
    trackio = {"project": "p", "run": "calm", "metric": "loss", "values": values}
    for number, said in enumerate((history, comet, trackio)):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(said))
        log = read_log(path)
        assert (log.attrs["format"], log.step.values.tolist()) == ("long_table", STEPS.tolist()), number
        assert log.loss.values.tolist() == LOSS.tolist()


def test_a_cut_export_is_read_as_far_as_it_goes(tmp_path):
    whole = long_rows(("Run", "metric", "step", "timestamp", "value"))
    (tmp_path / "cut.csv").write_text(whole[: len(whole) - 40])
    assert list(read_runs(tmp_path / "cut.csv")) == ["calm", "wild"]


def test_scalars_of_clearml(tmp_path):
    curve = {"name": "train", "x": STEPS.tolist(), "y": LOSS.tolist()}
    (tmp_path / "scalars.json").write_text(
        json.dumps({"loss": {"train": curve, "val": {"x": [100], "y": [2.5]}}})
    )
    log = read_log(tmp_path / "scalars.json")
    assert (log.attrs["format"], log.loss.dropna("step").values.tolist()) == ("clearml_json", LOSS.tolist())
    assert log.val_loss.dropna("step").values.tolist() == [2.5]


def test_database_of_trackio(tmp_path):
    with closing(sqlite3.connect(tmp_path / "p.db")) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        for number, (step, loss) in enumerate(zip(STEPS.tolist(), LOSS.tolist(), strict=True)):
            values = json.dumps({"loss": loss, "grad_norm": "Infinity" if step == 50 else 1.0})
            row = (number, "2026-01-01T00:00:00", "calm", step, values)
            database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?)", row)
        database.commit()
    log = read_log(tmp_path / "p.db")
    assert log.loss.values.tolist() == LOSS.tolist()
    assert np.isinf(log.grad_norm.values).sum() == 1


def test_database_of_mlflow(tmp_path):
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute(
            "CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, run_uuid TEXT, step INTEGER,"
            " is_nan INTEGER)"
        )
        database.execute("CREATE TABLE runs (run_uuid TEXT, name TEXT)")
        database.executemany("INSERT INTO runs VALUES (?, ?)", [("u1", "calm"), ("u2", "wild")])
        for run in ("u1", "u2"):
            rows = [
                ("loss", loss, 1700000000000 + s, run, s, s == 50)
                for s, loss in zip(STEPS.tolist(), LOSS, strict=True)
            ]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.commit()
    runs = read_runs(tmp_path / "mlflow.db")
    assert list(runs) == ["calm", "wild"]
    logged = runs["calm"]["scalars"].to_dataset()
    assert logged.logged_nan.values.sum() == 1
    assert logged.loss.values[-1] == LOSS[-1]


def test_a_database_of_something_else_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("CREATE TABLE other (a INTEGER)")
        database.execute("CREATE VIEW metrics AS SELECT a AS run_name, a AS step, a AS metrics FROM other")
        database.commit()
    with pytest.raises(InputError, match="table `metrics`"):
        read_runs(tmp_path / "x.db")


def wandb_folder(root, parts):
    "A folder of Weights & Biases without its binary file."
    files = root / "files"
    files.mkdir(parents=True)
    history = [{"_step": i, "_timestamp": 1.7e9 + i, "loss": v} for i, v in enumerate(LOSS.tolist())]
    said = {
        "wandb-history.jsonl": "\n".join(map(json.dumps, history)),
        "wandb-summary.json": json.dumps({"_step": 19, "loss": LOSS[-1], "_runtime": 3}),
        "output.log": text(0, 200, 10) + "Traceback (most recent call last):\n  f\nValueError: bad batch\n",
        "wandb-metadata.json": json.dumps({"program": "train.py", "gpu": "H100", "gpu_count": 8}),
        "config.yaml": "lr:\n  value: 0.001\n",
        "requirements.txt": "torch==2.0\n",
    }
    for part in parts:
        (files / part).write_text(said[part])


def test_folder_of_wandb(tmp_path):
    every = ("wandb-history.jsonl", "wandb-summary.json", "output.log", "wandb-metadata.json", "config.yaml")
    wandb_folder(tmp_path / "wandb" / "run-20260101_000000-aa", (*every, "requirements.txt"))
    wandb_folder(tmp_path / "wandb" / "run-20260102_000000-bb", ("output.log", "wandb-summary.json"))
    wandb_folder(tmp_path / "wandb" / "run-20260103_000000-cc", ("wandb-summary.json",))
    runs = read_runs(tmp_path / "wandb")
    assert [name[-2:] for name in runs] == ["aa", "bb", "cc"]
    first, second, third = runs.values()
    assert loss_of(first) == (list(range(20)), LOSS.tolist())
    assert first.attrs["crashes"][0]["name"] == "ValueError"
    assert loss_of(second)[0] == STEPS.tolist()
    assert loss_of(third) == ([19], [LOSS[-1]])
    inner = read_runs(tmp_path / "wandb" / "run-20260101_000000-aa" / "files")
    assert len(inner) == 1
    assert loss_of(next(iter(inner.values())))[1] == LOSS.tolist()


def test_a_run_that_was_resumed_in_another_file_is_one(tmp_path):
    (tmp_path / "slurm-123.out").write_text(
        text(0, 100) + "slurmstepd: error: *** JOB 123 CANCELLED DUE TO TIME LIMIT ***\n"
    )
    (tmp_path / "slurm-124.out").write_text(text(90, 200))
    (tmp_path / "other.out").write_text(text(0, 150))
    runs = read_runs(tmp_path)
    assert sorted(runs) == ["other.out", "slurm-123.out"]
    run = runs["slurm-123.out"]
    assert loss_of(run)[0] == [*range(100), *range(90, 200)]
    assert run["scalars"].segment.values.tolist() == [0] * 100 + [1] * 110
    assert run.attrs["also_in"] == ["slurm-124.out"]
    assert [crash["died"] for crash in run.attrs.get("crashes", [])] in ([False], [])


def test_a_file_that_goes_on_without_a_repeated_step_is_a_pass(tmp_path):
    (tmp_path / "train.log").write_text(text(0, 100))
    (tmp_path / "train_1.log").write_text(text(100, 150))
    (tmp_path / "train_resume.log").write_text(text(150, 200))
    (run,) = read_runs(tmp_path).values()
    assert loss_of(run)[0] == list(range(200))
    assert np.unique(run["scalars"].segment.values).tolist() == [0, 1, 2]
    assert (run["scalars"].attrs["lines"], run["scalars"].attrs["lines_used"]) == (200, 200)


def test_runs_of_a_sweep_stay_apart(tmp_path):
    for seed in range(3):
        (tmp_path / f"seed_{seed}.log").write_text(text(0, 100 + 50 * seed, 1 + seed))
    (tmp_path / "broken.log").write_text("nothing here\n")
    runs = read_runs(tmp_path)
    assert sorted(runs) == ["seed_0.log", "seed_1.log", "seed_2.log"]
    assert "broken.log" in next(iter(runs.values())).attrs["left_out"]


def test_every_log_is_in_exactly_one_run():
    rng = np.random.default_rng(0)
    from stabilitylab.read.base import LogData
    from stabilitylab.run.scalars import Samples

    for _ in range(50):
        logs = []
        for first in rng.integers(0, 300, rng.integers(1, 6)):
            step = np.arange(first, first + rng.integers(1, 200), rng.integers(1, 20))
            logs.append(LogData({"loss": Samples(step, np.ones(len(step)))} if rng.random() < 0.9 else {}))
        found = continuations(logs)
        assert sorted(number for chain in found for number in chain) == list(range(len(logs)))


@pytest.mark.parametrize(
    "name", ["train.log", "train_1.log", "train-2.log", "train.log.1", "train (3).log", "train_resumed.log"]
)
def test_names_of_one_family(name):
    assert stem_without_counter(name) == "train.log"


def test_crash_at_the_end_of_rows(tmp_path):
    trace = "Traceback (most recent call last):\n  File 'a.py', line 3, in f\nRuntimeError: CUDA error\n"
    rows = "".join(
        json.dumps({"step": int(s), "loss": float(v)}) + "\n" for s, v in zip(STEPS, LOSS, strict=True)
    )
    table = "step,loss\n" + "".join(f"{s},{v}\n" for s, v in zip(STEPS, LOSS, strict=True))
    for name, said in (("log.jsonl", rows), ("log.csv", table)):
        (tmp_path / name).write_text(said + trace)
        (run,) = read_runs(tmp_path / name).values()
        (crash,) = run.attrs["crashes"]
        assert (crash["name"], crash["step"], crash["died"]) == ("RuntimeError", 190, True)
        assert loss_of(run)[1] == LOSS.tolist()
        (tmp_path / name).write_text(said)
        (run,) = read_runs(tmp_path / name).values()
        assert "crashes" not in run.attrs


def test_of_two_attempts_the_last_one_ended_the_run(tmp_path):
    head = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\n"
    first = head + "    def f(\n         ^\nSyntaxError: invalid syntax\n"
    last = head + "RuntimeError: write failed\n"
    (tmp_path / "train.err").write_text(first + last)
    (run,) = read_runs(tmp_path / "train.err").values()
    told = [(crash["name"], crash["died"]) for crash in run.attrs["crashes"]]
    assert told == [("SyntaxError", False), ("RuntimeError", True)]


@pytest.fixture
def asked():
    "Two servers: the second sends everybody on to the first; who asked each, by port."
    said = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            said.setdefault(self.server.server_port, []).append(self.headers["Authorization"])
            is_first = self.server is servers[0]
            self.send_response(200 if is_first else 302)
            if not is_first:
                self.send_header("Location", f"http://127.0.0.1:{servers[0].server_port}{self.path}")
            self.end_headers()
            self.wfile.write(b"2.0 of something else")

        def log_message(self, *args):
            pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Answer) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [server.server_port for server in servers], said
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("names_it", [True, False])
def test_credentials_of_the_environment_go_to_the_server_that_it_names_and_to_no_other(
    asked, names_it, monkeypatch
):
    (first, second), said = asked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{second if names_it else 1}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    for port in (first, second):
        assert server_runs(f"http://127.0.0.1:{port}/", ReadOptions()) is None
    assert said[second] == ["Bearer secret" if names_it else None]
    assert said[first] == [None, None]  # asked by itself, and by the redirect


def test_a_space_learns_only_the_token_in_its_address(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    page = "huggingface.co/spaces/some_one/runs"
    assert _server(f"https://{page}")[0].headers == {}
    assert _server(f"https://ann:hf_x@{page}")[0].headers == {"Authorization": "Bearer hf_x"}
