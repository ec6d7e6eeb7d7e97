"Logs, records and checkpoints at addresses: what is fetched, what is read in parts, and what is never said."

import functools
import http.server
import json
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.cli.main import main
from stabilitylab.names.errors import InputError, MissingExtra
from stabilitylab.names.files import RemoteFile, shown_address
from stabilitylab.read.runs import read_log, read_runs
from stabilitylab.run.record import new_run, save_run
from stabilitylab.run.scalars import Samples, make_scalars, series
from tests.scale import long_lines

LOSS = [round(3 - i / 50, 4) for i in range(24)]


class _Ranges(http.server.SimpleHTTPRequestHandler):
    "Files of a folder, with ranges of bytes; what was sent is counted."

    def do_GET(self):
        span = self.headers.get("Range")
        local = Path(self.translate_path(self.path))
        if span is None:
            self.server.sent += local.stat().st_size if local.is_file() else 0
            super().do_GET()
            return
        data = local.read_bytes()
        first, last = (int(number) for number in span.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.server.sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def end_headers(self):
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *_):
        "Nothing on stderr."


@pytest.fixture
def web(tmp_path):
    "A folder, its address and its server."
    pytest.importorskip("aiohttp")
    handler = functools.partial(_Ranges, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.sent = 0
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}", server
    server.shutdown()
    server.server_close()


@pytest.fixture
def store():
    "An object store in memory."
    memory = fsspec.filesystem("memory")
    yield memory
    memory.store.clear()


def _losses(runs: dict) -> list:
    "Of the only run."
    (run,) = runs.values()
    return series(run["scalars"].to_dataset(), "loss").values.tolist()


def test_a_log_behind_a_web_address(web, capsys):
    folder, address, _ = web
    (folder / "train.log").write_text(long_lines.text(""))
    secret = address.replace("http://", "http://me:word@") + "/train.log?signature=abc"
    assert main(["diagnose", secret, "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["source"] == [address + "/train.log"]
    assert "word" not in out.out + out.err and "signature" not in out.out + out.err


SECRETS = ("KEYINTHEADDRESS", "PASSWORDINTHEADDRESS", "SIGNATUREINTHEADDRESS", "TOKENINTHEENVIRONMENT")


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose", "train.log", "--json", "--html", "report.html", "--markdown", "report.md"],
        ["diagnose", "train.log", "--brief"],
        ["diagnose", "train.log", "train.log"],
        ["diagnose", "gone.log", "--json"],
        ["diagnose", "noise.bin"],
        ["scan", "model.safetensors", "--json"],
        ["scan", "cut.safetensors"],
        ["scan", "gone.pt"],
        ["diff", "model.safetensors", "other.safetensors", "--json"],
        ["diff", "model.safetensors", "gone.pt"],
        ["trial", "train.log", "--plan", "--json"],
        ["preflight", "train.log", "--json"],
    ],
    ids=" ".join,
)
def test_no_command_says_a_credential(web, tmp_path, monkeypatch, capfd, words):
    folder, address, _ = web
    (folder / "train.log").write_text(long_lines.text(""))
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 8)
    save_file({"w": torch.ones(3, 4)}, folder / "model.safetensors")
    save_file({"w": torch.zeros(3, 4)}, folder / "other.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, SECRETS[3])
    secret = address.replace("http://", f"http://{SECRETS[0]}:{SECRETS[1]}@")
    files = [
        f"{secret}/{word}?signature={SECRETS[2]}" if (folder / word).is_file() or "gone" in word else word
        for word in words[1:]
    ]
    main([words[0], *files])
    said = capfd.readouterr()
    pages = [path.read_text(encoding="utf-8") for path in out.rglob("*") if path.is_file()]
    texts = [said.out, said.err, *pages]
    assert any(mark in "".join(texts) for mark in (address.rpartition("/")[2], "noise.bin", '"start"'))
    assert len(pages) == 2 * ("--html" in words)
    assert not [mark for mark in SECRETS for text in texts if mark in text]


def test_a_folder_in_a_store_is_fetched_without_weights_and_black_box(store):
    for name in ("a/train.log", "b/train.log"):
        store.pipe(f"/bucket/{name}", long_lines.text("").encode())
    store.pipe("/bucket/a/model.safetensors", b"0" * 1000)
    store.pipe("/bucket/a/blackbox/index.json", b"{}")
    runs = read_runs("memory://bucket")
    assert len(runs) == 2
    copies = {run.attrs["source"] for run in runs.values()}
    assert all(source.startswith("memory://bucket") for source in copies)
    assert read_log("memory://bucket/a/train.log").attrs["source"] == "memory://bucket/a/train.log"
    with pytest.raises(InputError, match="`memory://bucket` holds 2 runs"):
        read_log("memory://bucket")


def test_a_record_in_a_store(store, tmp_path):
    samples = Samples(np.arange(24), np.array(LOSS))
    save_run(new_run(make_scalars({"loss": samples})), tmp_path / "run")
    store.put(str(tmp_path / "run"), "/bucket/run", recursive=True)
    assert _losses(read_runs("memory://bucket/run")) == LOSS


def test_of_a_record_behind_a_web_address_weights_and_black_box_are_not_sent(web):
    folder, address, server = web
    samples = Samples(np.arange(24), np.array(LOSS))
    save_run(new_run(make_scalars({"loss": samples})), folder / "run")
    size = sum(file.stat().st_size for file in (folder / "run").rglob("*") if file.is_file())
    (folder / "run" / "model.safetensors").write_bytes(bytes(10**6))
    (folder / "run" / "blackbox").mkdir()
    (folder / "run" / "blackbox" / "index.json").write_bytes(bytes(10**6))
    assert _losses(read_runs(f"{address}/run/")) == LOSS
    assert 0 < server.sent <= size


def _weights(path: Path) -> dict:
    "Two tensors, one of a megabyte."
    tensors = {"large": torch.randn(512, 512), "small": torch.arange(6.0).reshape(2, 3)}
    save_file(tensors, path)
    return tensors


def test_only_the_ranges_of_a_checkpoint_that_are_asked_for_are_sent(web):
    folder, address, server = web
    tensors = _weights(folder / "model.safetensors")
    ckpt = open_checkpoint(f"{address}/model.safetensors")
    assert torch.equal(ckpt["small"].load(), tensors["small"])
    assert server.sent < 1000
    assert torch.equal(ckpt["large"].load(), tensors["large"])


def test_the_scan_of_a_checkpoint_in_a_store_is_that_of_its_copy(store, tmp_path):
    _weights(tmp_path / "model.safetensors")
    store.put(str(tmp_path / "model.safetensors"), "/bucket/model.safetensors")
    here, there = (
        scan_checkpoint(p) for p in (tmp_path / "model.safetensors", "memory://bucket/model.safetensors")
    )
    assert here.equals(there)


REFUSED = {  # address -> what the message says
    "memory://bucket/nothing.log": "spelling",
    "memory://bucket/cut.safetensors": "cut or forged",
    "memory://bucket/model.pt": ".safetensors",
}


@pytest.mark.parametrize("address", REFUSED)
def test_what_cannot_be_opened_is_refused_in_one_line(store, address):
    store.pipe("/bucket/cut.safetensors", b"\xff" * 8)
    store.pipe("/bucket/model.pt", b"PK")
    with pytest.raises(InputError, match=REFUSED[address]):
        (read_runs if address.endswith(".log") else open_checkpoint)(address)


def test_a_server_without_ranges_is_refused(store, monkeypatch):
    store.pipe("/bucket/a.bin", bytes(100))
    monkeypatch.setattr(type(store), "cat_file", lambda self, path, start=None, end=None: bytes(100))
    with pytest.raises(InputError, match="no ranges"):
        RemoteFile("memory://bucket/a.bin").read(0, 8)


def test_the_error_of_a_store_is_not_quoted(store, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("key AKIA123 is wrong")

    monkeypatch.setattr(type(store), "info", refuse)
    with pytest.raises(InputError, match="PermissionError") as error:
        read_runs("memory://me:word@bucket/x.log")
    assert "AKIA123" not in str(error.value) and "word" not in str(error.value)
    assert error.value.__cause__ is None


def test_without_the_extra_the_message_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtra, match=r"stabilitylab\[remote\]"):
        read_runs("gs://bucket/train.log")
    assert main(["diagnose", "gs://bucket/train.log"]) == 2
    assert "stabilitylab[remote]" in capsys.readouterr().err


def test_a_shown_address_has_no_secret():
    assert shown_address("s3://key:secret@bucket/a?token=1#2") == "s3://bucket/a"
    assert shown_address("runs/a.log") == "runs/a.log"
