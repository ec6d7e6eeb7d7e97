"`stabilitylab watch`: one event once, its updates, and the webhook against a local server."

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from stabilitylab.cli.main import main
from stabilitylab.cli.watch import Watcher, Webhook


@pytest.fixture
def server():
    "An address, what was posted there, and the status that it answers."
    posts, status = [], [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *_):
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/hook", posts, status
    http.shutdown()
    http.server_close()


def _bursts(log, loss, size=10):
    "What each look gives as the log grows: (number, is_update, kind, severity)."
    watcher, told = Watcher(log), []
    for start in range(0, len(loss), size):
        with open(log, "a") as f:
            f.writelines(f"step {start + i} loss {v:.4f}\n" for i, v in enumerate(loss[start : start + size]))
        told += [(e.number, e.is_update, e.finding.kind, e.finding.severity) for e in watcher.look()]
    return told


def _noisy(n=400):
    return 2 + 0.02 * np.random.default_rng(0).normal(size=n) + 2 * np.exp(-np.arange(n) / 30)


@pytest.mark.slow
@pytest.mark.parametrize("after", [230, 400])
def test_one_jump_is_one_event_whatever_it_turns_out_to_be(tmp_path, after):
    loss = _noisy()
    loss[200:after] += 3
    told = [row for row in _bursts(tmp_path / "train.log", loss) if row[2] in ("loss_spike", "divergence")]
    assert len({number for number, *_ in told}) == 1
    assert [is_update for _, is_update, *_ in told] == [False] + [True] * (len(told) - 1)
    assert len(told) == len(set(told)) and len(told) <= 4  # each state once


@pytest.mark.slow
def test_a_second_spike_far_from_the_first_is_an_event_of_its_own(tmp_path):
    loss = _noisy()
    loss[150:155] += 3
    loss[300:305] += 3
    numbers = {row[0] for row in _bursts(tmp_path / "train.log", loss) if row[2] == "loss_spike"}
    assert len(numbers) == 2


def _watch_once(log, url, monkeypatch):
    "The command over a whole log, ended after its second look."
    looks = iter([False, True])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    import argparse

    from stabilitylab.cli.watch import _run_watch

    args = argparse.Namespace(path=str(log), format=None, every=0.01, webhook=url)
    return _run_watch(args, lambda: next(looks))


def test_the_webhook_is_sent_each_event_once_as_json(tmp_path, server, monkeypatch, capsys):
    url, posts, _ = server
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {i} loss {4 - i / 100:.4}\n" for i in range(60)) + "step 60 loss nan\n")
    assert _watch_once(log, url, monkeypatch) == 0
    (content_type, body), *rest = [p for p in posts if p[1]["finding"]["kind"] == "non_finite"]
    assert content_type == "application/json" and not rest
    assert body["source"] == str(log) and body["is_update"] is False and body["finding"]["onset"] == 60
    assert "non_finite" in body["text"] and "non_finite" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["refused", "500"])
def test_a_webhook_that_fails_is_told_once_and_the_watch_goes_on(
    tmp_path, server, monkeypatch, capsys, fault
):
    url, _, status = server
    status[0] = 500
    url = url if fault == "500" else "http://127.0.0.1:9/hook"
    log = tmp_path / "train.log"
    log.write_text("".join(f"step {i} loss {4 - i / 100:.4}\n" for i in range(60)) + "step 60 loss nan\n")
    assert _watch_once(log, url, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert "non_finite" in out and err.count("webhook failed") == 1 and "Traceback" not in err
    hook = Webhook(url, "x")
    event = Watcher(log).look()[0]
    assert not hook.post(event) and not hook.post(event)
    assert capsys.readouterr().err.count("webhook failed") == 1


def test_a_webhook_that_is_no_web_address_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "x.log"), "--webhook", "file:///etc/passwd"]) == 2
    assert "http" in capsys.readouterr().err
