"Logs and checkpoints on a hub of models: a server on this machine answers what huggingface_hub asks."

import http.server
import json
import re
import threading
from urllib.parse import unquote, urlsplit

import pytest
import torch

from stabilitylab.checkpoint.open import open_checkpoint
from stabilitylab.checkpoint.scan import scan_checkpoint
from stabilitylab.names.errors import InputError
from stabilitylab.names.files import _file_system
from stabilitylab.read.runs import read_runs
from tests.scale import long_lines
from tests.stores import put_checkpoint, read_logs

hub = pytest.importorskip("huggingface_hub", reason="the extra `remote` is not installed")
constants = pytest.importorskip("huggingface_hub.constants")  # not an attribute of the package

COMMIT, TOKEN = "0" * 40, "hf_TOKENINTHEENVIRONMENT"


class _Hub(http.server.BaseHTTPRequestHandler):
    "One repository of models, `team/run`: its commit, its tree, what lies at a path, and bytes of its files."

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        tree = re.fullmatch(r"/api/models/team/run/tree/\w+(?:/(.*))?", path)
        file = re.fullmatch(r"/team/run/resolve/\w+/(.*)", path)
        if not path.startswith(("/api/models/team/run", "/team/run/")):
            self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif tree:
            self.answer(json.dumps(self.entries(tree[1] or "")).encode())
        elif file:
            self.content(self.server.files[file[1]])
        else:
            self.answer(json.dumps({"_id": "1", "id": "team/run", "sha": COMMIT, "siblings": []}).encode())

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = (
            json.loads(body)["paths"]
            if body.startswith("{")
            else [unquote(part.partition("=")[2]) for part in body.split("&") if part.startswith("paths=")]
        )
        known = {entry["path"]: entry for folder in self.folders() for entry in self.entries(folder)}
        self.answer(json.dumps([known[path] for path in wanted if path in known]).encode())

    def folders(self) -> set:
        "Every folder of the repository, the root as ''."
        parts = [name.split("/")[:-1] for name in self.server.files]
        return {""} | {"/".join(part[:n]) for part in parts for n in range(1, len(part) + 1)}

    def entries(self, folder: str) -> list:
        "What lies below a folder, at any depth."
        below = folder + "/" if folder else ""
        files = [
            {"type": "file", "path": name, "size": len(data), "oid": "1" * 40}
            for name, data in self.server.files.items()
        ]
        folders = [{"type": "directory", "path": name, "oid": "2" * 40} for name in self.folders() if name]
        return [entry for entry in files + folders if entry["path"].startswith(below)]

    def content(self, data: bytes) -> None:
        "A file, or a range of its bytes."
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = data[int(span[1]) : int(span[2]) + 1] if span else data
        self.server.sent += len(part) if self.command == "GET" else 0
        extra = {"ETag": '"1"', "X-Repo-Commit": COMMIT}
        if span:
            extra["Content-Range"] = f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(data)}"
        self.answer(part, 206 if span else 200, extra)

    def answer(self, body: bytes, status: int = 200, extra: dict | None = None) -> None:
        "Sends it."
        self.server.tokens.add(self.headers.get("Authorization"))
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (extra or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        "Nothing on stderr."


@pytest.fixture
def server(monkeypatch):
    "The server; its `files` are those of the repository."
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    made.files, made.sent, made.tokens = {}, 0, set()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    # read from HF_ENDPOINT when the package is imported, which another test may have done
    address = f"http://127.0.0.1:{made.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    hub.HfFileSystem.clear_instance_cache()
    _file_system.cache_clear()
    yield made
    made.shutdown()
    made.server_close()
    hub.HfFileSystem.clear_instance_cache()
    _file_system.cache_clear()


def test_a_log_and_a_folder_of_runs(server, capsys):
    printed = read_logs(server.files.__setitem__, "hf://team/run", capsys, weights=100_000)
    assert server.sent < 20_000  # weights beside a log are not fetched
    assert TOKEN not in printed
    assert f"Bearer {TOKEN}" in server.tokens  # it was sent, and is in no message


def test_a_checkpoint_is_read_in_parts(server, tmp_path):
    tensors = put_checkpoint(server.files.__setitem__, tmp_path)
    ckpt = open_checkpoint("hf://team/run/model.safetensors")
    assert torch.equal(ckpt["layers.7.weight"].load(), tensors["layers.7.weight"])
    assert server.sent < 0.1 * len(server.files["model.safetensors"])
    assert len(scan_checkpoint("hf://team/run/model.safetensors", progress=False)) == 20


def test_what_is_not_there_is_one_sentence_without_the_token(server):
    server.files["train.log"] = long_lines.text("").encode()
    for address in ("hf://team/run/gone.log", "hf://team/gone/train.log"):
        with pytest.raises(InputError, match="check the spelling") as error:
            read_runs(address)
        assert TOKEN not in str(error.value) and len(str(error.value).splitlines()) == 1
