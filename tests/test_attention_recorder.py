"Attention through the Recorder: the same bits, every group, faults that end nothing, and the findings."

import logging
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import byte_batches, stdlib_bytes
from stabilitylab.probe.attention.report import attention_report
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run, save_run

logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
GROUPS = {"scalars", "activations", "gradients", "weights", "updates", "optimizer", "attention"}
TOKENS = torch.randint(0, 32, (4, 25), generator=torch.Generator().manual_seed(0))


class Checkpointed(LanguageModel):
    "The small language model, its blocks computed again in the backward pass."

    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks:
            block.forward = self.again(block.forward)

    @staticmethod
    def again(forward):
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def small(kind=LanguageModel):
    torch.manual_seed(0)
    return kind(ModelConfig.plain(vocab=32, seq=24, d_model=32, n_layer=2, n_head=4, dropout=0.1))


def trained(path, every, model=None, steps=6, wrap=lambda m: m, amp=False, first=0, look=None, **more):
    "Losses of a short recorded run."
    model = model or small()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    more = {"merge": False} | more  # parts are written sooner than a Zarr record, and read alike
    with Recorder(
        model, optimizer, path, attention_every=every, first_step=first, flush_seconds=0.01, **more
    ) as recorder:
        run = wrap(model)
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                loss = run(TOKENS[:, :-1], TOKENS[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
            losses.append(loss.item())
            if look is not None:
                look(step, recorder)
    return losses


def compiled(**options):
    def wrap(model):
        torch._dynamo.reset()
        return torch.compile(model, backend="aot_eager", **options)

    return wrap


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"amp": True}, id="autocast"),
        pytest.param({"kind": Checkpointed}, id="checkpointing"),
        pytest.param({"wrap": compiled(), "level": "light"}, id="compile", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits_and_every_group(tmp_path, options):
    kind = options.pop("kind", LanguageModel)
    bare = trained(tmp_path / "bare", 0, small(kind), **options)
    assert trained(tmp_path / "r", 2, small(kind), **options) == bare
    run = open_run(tmp_path / "r")
    groups = {"scalars", "activations", "attention"} if "level" in options else GROUPS
    assert set(run.children) >= groups and run["scalars"].sizes["step"] == 6
    heads = run["attention"]
    assert dict(heads.sizes) == {"step": 3, "layer": 2, "head": 4} and heads.step.values.tolist() == [0, 2, 4]
    assert np.isfinite(heads.attn_entropy).all() and np.isfinite(heads.stream_median).all()


@pytest.mark.slow
def test_the_record_says_what_the_report_says(tmp_path):
    model = small().eval()
    report = attention_report(model, TOKENS[:, :-1])["attention"]
    trained(tmp_path / "r", 1, model, steps=1)
    got = open_run(tmp_path / "r")["attention"]
    for name in report.data_vars:
        np.testing.assert_allclose(got[name], report[name], rtol=1e-6, err_msg=name)
    assert got.module.values.tolist() == report.module.values.tolist()


@pytest.mark.slow
def test_it_grows_can_be_read_meanwhile_and_is_continued(tmp_path):
    seen = []

    def look(step, recorder):
        if step == 5:
            recorder.recording.writer.close()
            seen.append(open_run(tmp_path / "r")["attention"].step.values.tolist())

    trained(tmp_path / "r", 2, look=look, merge=True)
    assert seen == [[0, 2, 4]]
    trained(tmp_path / "r", 3, first=6, merge=True)
    run = open_run(tmp_path / "r")
    assert run["attention"].step.values.tolist() == [0, 2, 4, 6, 9]
    assert run["attention"].segment.values.tolist() == [0, 0, 0, 1, 1]
    again = open_run(save_run(run.load(), tmp_path / "copy"))
    np.testing.assert_array_equal(again["attention"].attn_entropy, run["attention"].attn_entropy)


@pytest.mark.slow  # starts a process
def test_a_killed_run_keeps_what_was_flushed(tmp_path):
    code = f"""
import os, sys, time
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
from test_attention_recorder import trained
from stabilitylab.run.record import open_run
def written():
    try: return open_run({str(tmp_path / "r")!r})["attention"].step.values.tolist()[:2] == [0, 2]
    except Exception: return False
def look(step, recorder):
    time.sleep(0.05)
    end = time.monotonic() + 60
    while step == 5 and not written() and time.monotonic() < end: time.sleep(0.05)
    if step == 5: os._exit(9)
trained({str(tmp_path / "r")!r}, 2, look=look)
"""
    path = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, timeout=120)
    run = open_run(tmp_path / "r")
    assert ended.returncode == 9 and run["attention"].step.values.tolist()[:2] == [0, 2]
    assert "activations" in run.children


@pytest.mark.slow
def test_a_fault_ends_the_measuring_with_one_warning(tmp_path, monkeypatch):
    bare = trained(tmp_path / "bare", 0)

    def broken(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr("stabilitylab.probe.attention.report.AttentionWatch.unrecognised", broken)
    with pytest.warns(UserWarning, match="attention missing from step 0 on: RuntimeError: no memory") as told:
        assert trained(tmp_path / "r", 1) == bare
    assert len(told) == 1
    run = open_run(tmp_path / "r")
    assert set(run.children) >= GROUPS - {"attention"} and "attention" not in run.children
    assert any("no memory" in str(text) for text in run["events"].event_text.values)


@pytest.mark.slow  # compiles
def test_a_model_in_one_graph_trains_on_and_its_attention_is_that_of_the_plain_model(tmp_path):
    wrap = compiled(fullgraph=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = trained(tmp_path / "r", 2, wrap=wrap)
    assert len(losses) == 6 and np.isfinite(losses).all()
    assert sum("activations missing" in str(w.message) for w in told) == 1
    trained(tmp_path / "plain", 2)
    compiled_heads, heads = (open_run(tmp_path / name)["attention"] for name in ("r", "plain"))
    for name in ("attn_logit_max", "attn_entropy", "sink_score"):
        np.testing.assert_array_equal(compiled_heads[name], heads[name])


@pytest.mark.slow
def test_a_model_without_attention(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="no attention that is recognised") as told,
        Recorder(model, optimizer, tmp_path / "r", attention_every=1) as recorder,
    ):
        for _ in range(3):
            loss = model(torch.ones(2, 4)).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    assert len(told) == 1 and "attention" not in open_run(tmp_path / "r").children


def test_the_option_is_checked():
    with pytest.raises(ValueError, match=r"`attention_every`=-1.*0 or more"):
        Recorder(small(), None, "nowhere", attention_every=-1)


def language_model(path, seed, lr, steps):
    "A small language model on the standard library's source, recorded with its attention."
    torch.manual_seed(seed)
    model = LanguageModel(ModelConfig.plain(vocab=128, seq=48, d_model=48, n_layer=2, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 20))
    batches = byte_batches(stdlib_bytes(200_000), steps, batch=4, seq=48, seed=seed)
    with Recorder(model, optimizer, path, attention_every=10, level="light", merge=False) as recorder:
        for x, y in batches:
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            recorder.step(loss)
    return open_run(path)


OF_ATTENTION = ("attention_logit_growth", "attention_entropy_collapse", "attention_sink", "output_collapse")


MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.parametrize("seed", [0, *MORE])
def test_healthy_runs_raise_no_alarm(tmp_path, seed):
    found = diagnose(language_model(tmp_path / "r", seed, 3e-3, 120))
    assert not found.of(*OF_ATTENTION, "massive_activation").at_least("warning")
    assert not found.of("attention_logit_growth", "attention_entropy_collapse")


def test_a_planted_learning_rate_is_found_with_its_onset(tmp_path):
    run = language_model(tmp_path / "r", 0, 1e-1, 60)
    found = diagnose(run).of("attention_logit_growth")
    logits = run["attention"].attn_logit_max.max(("layer", "head"))
    assert len(found) == 1 and found[0].severity != "info"
    assert found[0].onset == int(logits.step[(logits >= 100).values.argmax()]) > 0
    assert set(found[0].modules) <= set(run["attention"].module.values)
