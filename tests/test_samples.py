"""The runs in data_samples/: few files, and the record opened together with the logs beside it."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stabilitylab.cases.lm_high_lr import CONFIG, replay_setup
from stabilitylab.cases.registry import sample
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.investigation.opening import suspect_step
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.probe.blackbox import pack_batches
from stabilitylab.read.runs import read_runs
from stabilitylab.replay.snapshot import load_batch, load_snapshot, replayable_steps
from stabilitylab.report.content import replay_command
from stabilitylab.run.record import open_run, pack_run, unpack_run


@pytest.fixture
def copy(tmp_path):
    "A copy of the sample run that may be changed."
    return shutil.copytree(sample("lm_high_lr"), tmp_path / "run")


def test_a_run_is_few_files_and_all_are_small():
    folder = sample().parent
    for run in (path for path in folder.iterdir() if path.is_dir()):
        assert sum(path.is_file() for path in run.rglob("*")) <= 20, run
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 30 * 2**20


def test_samples_of_a_clone_are_found_beside_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.setattr("stabilitylab.__file__", str(tmp_path / "site-packages/stabilitylab/__init__.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run this in its folder"):
        sample("mine")
    (tmp_path / "clone/data_samples/mine").mkdir(parents=True)
    (tmp_path / "clone/nbs").mkdir()
    monkeypatch.chdir(tmp_path / "clone/nbs")
    assert sample("mine") == tmp_path / "clone/data_samples/mine"


def test_record_and_logs_are_read_together():
    (run,) = read_runs(sample()).values()
    table = run["scalars"].to_dataset()
    assert run.attrs["also_in"] == ["metrics.csv", "metrics.jsonl", "train.log"]
    own = open_run(sample())["scalars"].to_dataset()
    added = set(table.data_vars) - set(own.data_vars)
    assert "mfu" in added  # nanoGPT prints it, the recorder does not know it
    for name in own.data_vars:
        np.testing.assert_array_equal(table[name], own[name])
        assert table[name].attrs == own[name].attrs


def test_another_runs_log_is_left_out_with_the_reason(copy):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    other = "".join(json.dumps(row | {"loss": row["loss"] + 1, "z_loss": 0.5}) + "\n" for row in rows)
    (copy / "other.jsonl").write_text(other)
    (run,) = read_runs(copy).values()
    assert "losses" in run.attrs["left_out"]["other.jsonl"] and "z_loss" not in run["scalars"]


def test_a_packed_run_is_the_run(copy):
    packed = open_run(copy).load()
    assert open_run(unpack_run(copy)).load().identical(packed)
    before = sample() / "record.zip"
    assert pack_run(copy).read_bytes() == before.read_bytes()


@pytest.mark.slow  # every batch of the sample
def test_batches_are_packed_once_more_without_loss(copy):
    steps = replayable_steps(copy)
    first = load_batch(copy, steps[0])
    pack_batches(copy)
    again = load_batch(copy, steps[0])
    assert replayable_steps(copy) == steps == list(range(300, 400))
    assert again.ids == first.ids and (again.parts[0]["tokens"] == first.parts[0]["tokens"]).all()


def plain_gpt_loss(weights: dict, tokens: torch.Tensor, targets: torch.Tensor, n_head: int) -> torch.Tensor:
    "The loss of the sample's model, written out once more from its weights."

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"])

    def heads(x, name):
        return F.linear(x, weights[f"{name}.weight"]).view(*x.shape[:2], n_head, -1).transpose(1, 2)

    positions = torch.arange(tokens.shape[1])
    x = F.embedding(tokens, weights["embed.weight"]) + F.embedding(positions, weights["pos_embed.weight"])
    for block in (f"blocks.{i}" for i in range(3)):
        y = norm(x, f"{block}.norm1")
        q, k, v = (heads(y, f"{block}.attn.{name}_proj") for name in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.linear(y, weights[f"{block}.attn.out_proj.weight"])
        y = F.gelu(F.linear(norm(x, f"{block}.norm2"), weights[f"{block}.fc1.weight"]))
        x = x + F.linear(y, weights[f"{block}.fc2.weight"])
    logits = F.linear(norm(x, "norm"), weights["lm_head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sample_matrices() -> dict[str, torch.Tensor]:
    "Embeddings and linear layers of the sample in the order in which they are created, drawn as it does."
    torch.manual_seed(0)
    modules = {"embed": torch.nn.Embedding(128, 64), "pos_embed": torch.nn.Embedding(64, 64)}
    for block in (f"blocks.{i}" for i in range(3)):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            modules[f"{block}.attn.{name}"] = torch.nn.Linear(64, 64, bias=False)
        modules[f"{block}.fc1"] = torch.nn.Linear(64, 256, bias=False)
        modules[f"{block}.fc2"] = torch.nn.Linear(256, 64, bias=False)
    modules["lm_head"] = torch.nn.Linear(64, 128, bias=False)
    for module in modules.values():
        torch.nn.init.normal_(module.weight, std=0.02)
    return {f"{name}.weight": module.weight for name, module in modules.items()}


def test_the_model_of_the_sample_starts_from_the_same_draws():
    want = sample_matrices()
    torch.manual_seed(0)
    model = LanguageModel(CONFIG)
    weights = dict(model.named_parameters())
    assert [name for name in weights if "norm" not in name] == list(want)
    assert all(torch.equal(weights[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("step", [300, 301])
def test_steps_of_the_sample_replay_to_the_bits_of_a_twin(step):
    setup = replay_setup(sample())
    snapshot, batch = load_snapshot(sample(), step, setup), load_batch(sample(), step)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in snapshot.model.items()}
    (micro,) = batch.parts
    loss = plain_gpt_loss(weights, micro["tokens"], micro["targets"], n_head=4)
    model = setup.model()
    model.load_state_dict(snapshot.model)
    assert list(model.state_dict()) == list(weights)
    again = setup.loss(model, micro)
    assert again.item() == loss.item()
    loss.backward(), again.backward()
    assert all(torch.equal(p.grad, weights[name].grad) for name, p in model.named_parameters())
    recorded = open_run(sample())["scalars"].to_dataset().loss.sel(step=step)
    assert again.item() == pytest.approx(float(recorded), rel=1e-5)


def test_a_replay_without_a_step_looks_at_the_step_of_the_command_that_diagnose_names():
    path = sample("lm_high_lr")
    run = open_run(path)
    assert f"--step {suspect_step(path)}" in replay_command(run, diagnose(run), str(path))
