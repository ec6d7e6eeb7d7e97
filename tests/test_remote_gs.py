"Logs and checkpoints in Google's store: an emulator, started here, answers as Google does."

import os
import socket

import pytest
import torch

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.names.errors import InputError
from stabilitylab.names.files import _file_system
from stabilitylab.read.runs import read_runs
from tests.stores import put_checkpoint, read_logs

emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
# read when gcsfs is imported: with it, the kind of a bucket is asked for by gRPC, which no emulator answers
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
gcsfs = pytest.importorskip("gcsfs", reason="the extra `remote` is not installed")


@pytest.fixture
def bucket(monkeypatch, unused_port):
    "A store with an empty bucket, and the ranges of bytes that were asked for."
    server = emulator.create_server("127.0.0.1", unused_port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{unused_port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    _file_system.cache_clear()
    ranges, call = [], gcsfs.GCSFileSystem._request

    async def counted(self, method, *args, headers=None, **kwargs):
        ranges.append((method, (headers or {}).get("Range")))
        return await call(self, method, *args, headers=headers, **kwargs)

    monkeypatch.setattr(gcsfs.GCSFileSystem, "_request", counted)
    yield gcsfs.GCSFileSystem(), ranges
    server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()
    _file_system.cache_clear()


@pytest.fixture
def unused_port():
    "A port that nothing listens at."
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_log_and_a_folder(bucket, capsys):
    store, _ = bucket
    read_logs(lambda path, data: store.pipe(f"bucket/{path}", data), "gs://bucket", capsys)


def test_a_checkpoint_is_read_in_parts(bucket, tmp_path):
    store, ranges = bucket
    tensors = put_checkpoint(lambda path, data: store.pipe(f"bucket/{path}", data), tmp_path)
    ckpt = open_checkpoint("gs://bucket/model.safetensors")
    ranges.clear()
    assert torch.equal(ckpt["layers.7.weight"].load(), tensors["layers.7.weight"])
    (span,) = [span for method, span in ranges if span]
    first, last = map(int, span.removeprefix("bytes=").split("-"))
    assert last - first + 1 == 40_000
    assert len(scan_checkpoint("gs://bucket/model.safetensors", progress=False)) == 20


def test_what_is_not_there_is_one_sentence(bucket):
    with pytest.raises(InputError, match="check the spelling"):
        read_runs("gs://bucket/gone.log")
