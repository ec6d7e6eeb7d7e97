"Logs, records and checkpoints in an S3 store: a server of moto, started here, answers as Amazon does."

import urllib.request

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.names.errors import InputError
from stabilitylab.names.files import _file_system
from stabilitylab.read.runs import read_runs
from stabilitylab.run.record import new_run, save_run
from stabilitylab.run.scalars import Samples, make_scalars, series
from tests.scale import long_lines
from tests.stores import read_logs

moto = pytest.importorskip(
    "moto.server", reason="needs moto[server,s3], whose boto3 wants python-dateutil below 3"
)
s3fs = pytest.importorskip("s3fs", reason="the extra `remote` is not installed")

KEY, SECRET = "AKIATESTTESTTESTTEST", "secretsecretsecretsecret"


@pytest.fixture
def bucket(monkeypatch):
    "An empty bucket, and the requests that were made."
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    settings |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    _file_system.cache_clear()
    store = s3fs.S3FileSystem()
    store.mkdir("bucket")
    requests, call = [], s3fs.S3FileSystem._call_s3

    async def counted(self, method, *args, **kwargs):
        requests.append((method, kwargs.get("Range")))
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    yield store, requests
    empty = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(empty).close()
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
    _file_system.cache_clear()


def test_a_log_and_a_folder(bucket, capsys):
    store, _ = bucket
    printed = read_logs(lambda path, data: store.pipe(f"bucket/{path}", data), "s3://bucket", capsys)
    assert KEY not in printed


def test_weights_beside_a_log_are_not_fetched(bucket):
    store, requests = bucket
    store.pipe("bucket/run/train.log", long_lines.text("").encode())
    store.pipe("bucket/run/model.safetensors", b"0" * 100_000)
    requests.clear()
    read_runs("s3://bucket/run")
    assert sum(method == "get_object" for method, _ in requests) == 1


def test_a_record(bucket, tmp_path):
    store, _ = bucket
    samples = Samples(np.arange(24), np.linspace(3, 2, 24))
    save_run(new_run(make_scalars({"loss": samples})), tmp_path / "run")
    store.put(str(tmp_path / "run"), "bucket/run", recursive=True)
    (run,) = read_runs("s3://bucket/run").values()
    assert series(run["scalars"].to_dataset(), "loss").values.tolist() == samples.value.tolist()


def test_of_a_checkpoint_only_ranges_are_asked_for(bucket, tmp_path):
    store, requests = bucket
    tensors = {"large": torch.randn(512, 512), "small": torch.arange(6.0).reshape(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    store.put(str(tmp_path / "model.safetensors"), "bucket/model.safetensors")
    requests.clear()
    ckpt = open_checkpoint("s3://bucket/model.safetensors")
    assert torch.equal(ckpt["small"].load(), tensors["small"])
    spans = [span for method, span in requests if method == "get_object"]
    ends = [tuple(map(int, span.removeprefix("bytes=").split("-"))) for span in spans]
    assert spans and sum(last - first + 1 for first, last in ends) < 1000
    table = scan_checkpoint(ckpt, progress=False)
    copy = scan_checkpoint(tmp_path / "model.safetensors", progress=False)
    assert table.drop(columns="note").equals(copy.drop(columns="note"))


@pytest.mark.parametrize("address", ["s3://bucket/nothing.log", "s3://no-such-bucket/train.log"])
def test_what_is_not_there_is_refused_in_one_line_without_the_key(bucket, address):
    with pytest.raises(InputError) as refusal:
        read_runs(address)
    text = str(refusal.value)
    assert address in text and "\n" not in text and KEY not in text and SECRET not in text
