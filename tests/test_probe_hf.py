"The Trainer's callback: its losses, its gradients and its black box beside the Trainer's own log."

import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from stabilitylab.probe.hf import RecorderCallback
from stabilitylab.run.record import open_run

CONFIG = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)


def data(n=32):
    "Sequences whose labels are masked to different lengths."
    rng = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        t = torch.randint(0, 64, (16,), generator=rng)
        labels = t.clone()
        labels[: 1 + i % 13] = -100
        out.append({"input_ids": t, "labels": labels})
    return out


def trainer(path, callbacks, micro=4, **kw):
    torch.manual_seed(0)
    args = TrainingArguments(
        str(path / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=micro,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
        **{"save_strategy": "no"} | kw,
    )
    return Trainer(GPT2LMHeadModel(GPT2Config(**CONFIG)), args, train_dataset=data(), callbacks=callbacks)


@pytest.mark.slow  # a Trainer run a case
@pytest.mark.parametrize("micro", [1, 4])
def test_losses_and_norms_are_those_of_the_log(tmp_path, micro):
    t = trainer(tmp_path, [RecorderCallback(tmp_path / "r", snapshot_every=2, every_n=2)], micro)
    t.train()
    plain = trainer(tmp_path, [], micro)
    plain.train()
    assert all(
        a.equal(b)
        for a, b in zip(t.model.state_dict().values(), plain.model.state_dict().values(), strict=False)
    )
    run = open_run(tmp_path / "r").load()
    log = [h for h in t.state.log_history if "loss" in h]
    np.testing.assert_allclose(run["scalars"].loss, [h["loss"] for h in log], atol=1e-4)
    np.testing.assert_allclose(run["scalars"].grad_norm, [h["grad_norm"] for h in log], rtol=1e-4)
    np.testing.assert_allclose(run["scalars"].lr, [h["learning_rate"] for h in log], rtol=1e-6)
    assert (
        run["sampled_activations"].step.values.tolist() == [0, 2] and run["activations"].rms.notnull().all()
    )
    batches = sorted((tmp_path / "r" / "blackbox").glob("batch-3-*.pt"))
    assert len(batches) == micro
    assert {"input_ids", "labels"} <= set(torch.load(batches[0], weights_only=True)["batch"])
    assert not t.model._forward_hooks and not t.model._forward_pre_hooks


@pytest.mark.slow  # two Trainer runs
def test_a_resumed_run_goes_on_counting(tmp_path):
    t = trainer(tmp_path, [RecorderCallback(tmp_path / "r")], save_strategy="steps", save_steps=2)
    t.args.max_steps = 2
    t.train()
    t = trainer(tmp_path, [RecorderCallback(tmp_path / "r")])
    t.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    s = open_run(tmp_path / "r")["scalars"]
    assert s.step.values.tolist() == [0, 1, 2, 3] and s.segment.values.tolist() == [0, 0, 1, 1]


WITHOUT = """
import sys
sys.modules['transformers'] = None
from stabilitylab.probe.hf import RecorderCallback
try: RecorderCallback('x')
except Exception as e: print(e)
"""


@pytest.mark.slow  # starts a process
def test_without_transformers_it_says_what_to_install():
    said = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True).stdout
    assert "transformers" in said and "stabilitylab[hf]" in said, said
