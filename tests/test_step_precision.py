"What 16 bits take from a step, against slow twins; attention inputs of others' models; the command's errors."

import json

import numpy as np
import pytest
import torch

from stabilitylab.cases.samples import sample
from stabilitylab.numerics.accumulation.audit import audit_accumulation, sequence_gradients
from stabilitylab.numerics.accumulation.denominators import compare_denominators, microbatch_window
from stabilitylab.numerics.accumulation.weights import DENOMINATORS
from stabilitylab.numerics.rounding.attention_range import attention_inputs, scale_overflows
from stabilitylab.replay.find_setup import setup_of
from stabilitylab.replay.rounded_step import step_precision
from stabilitylab.replay.snapshot import load_batch, load_snapshot
from stabilitylab.replay.step import replay
from tests.command import command


def test_lost_updates_and_products_of_a_recorded_step():
    out = command("precision", sample(), "--step", "352", "--json")
    assert out.returncode == 0, out.stderr
    told = json.loads(out.stdout)
    setup = setup_of(sample())
    snapshot, batch = load_snapshot(sample(), 352, setup), load_batch(sample(), 352)
    after = replay(snapshot, batch, record=False)
    for row in told["updates"]:
        before, new = snapshot.model[row["param"]].bfloat16(), after.weights[row["param"]]
        moved = new != snapshot.model[row["param"]]
        still = (before.float() + (new - snapshot.model[row["param"]])).bfloat16() == before
        assert np.isclose(row["lost"], (still & moved).sum() / moved.sum(), atol=1e-6), row
    model, _ = snapshot.build()
    x = batch.parts[0]["tokens"]
    seen = {}
    for i, b in enumerate(model.blocks):
        b.attn.register_forward_pre_hook(lambda m, a, i=i: seen.update({i: a[0].detach()}))
    model(x)
    for i, (row, b) in enumerate(zip(told["attention"], model.blocks, strict=False)):
        q, k = (
            p(seen[i]).view(*x.shape, b.attn.n_head, -1).transpose(1, 2).double()
            for p in (b.attn.q_proj, b.attn.k_proj)
        )
        assert row["module"] == f"blocks.{i}.attn" and np.isclose(
            row["product_max"], (q @ k.mT).abs().max().item(), rtol=1e-5
        )


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_queries_and_keys_of_hugging_face_models(kind):
    transformers = pytest.importorskip("transformers")
    shape = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, attn_implementation="sdpa"
    )
    config = {
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, attn_implementation="sdpa"
        ),
        "llama": lambda: transformers.LlamaConfig(**shape, intermediate_size=64, num_key_value_heads=2),
        "bert": lambda: transformers.BertConfig(**shape, intermediate_size=64),
    }[kind]()
    model, x = transformers.AutoModel.from_config(config).eval(), torch.randint(64, (3, 7))
    inputs = attention_inputs(model, lambda: model(x))
    assert (
        len(inputs) == 2
        and all(q.shape == (3, 4, 7, 8) and k.shape[0] == 3 and k.shape[1] in (2, 4) for _, q, k in inputs)
        and len({n for n, _, _ in inputs}) == 2
    )
    table = scale_overflows(inputs)
    name, q, k = inputs[0]
    assert np.isclose(
        table.product_max[name],
        (q.double() @ k.double().repeat_interleave(4 // k.shape[1], 1).mT).abs().max().item(),
    )


@pytest.mark.parametrize("microbatch, ranks", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_dealt_sequences_equal_an_audit_of_the_same_window(microbatch, ranks):
    g = torch.Generator().manual_seed(0)
    model, lengths = torch.nn.Linear(6, 5), [3, 9, 1, 4, 7, 2, 8, 5] * 2
    data = [(torch.randn(n, 6, generator=g), torch.randint(5, (n,), generator=g)) for n in lengths]

    def one(m, b):
        return torch.nn.functional.cross_entropy(m(b[0]), b[1], reduction="none")[None], torch.ones(
            1, len(b[1]), dtype=torch.bool
        )

    def padded(m, b):
        n = max(len(y) for _, y in b)
        rows = [one(m, s)[0][0] for s in b]
        return torch.stack([torch.nn.functional.pad(r, (0, n - len(r))) for r in rows]), torch.stack(
            [torch.arange(n) < len(r) for r in rows]
        )

    parts, window = sequence_gradients(model, [data], one), microbatch_window(lengths, microbatch, ranks)
    table = compare_denominators(parts, window)
    steps = len(lengths) // (microbatch * ranks)
    dealt = [
        data[(s * ranks + r) * microbatch : (s * ranks + r + 1) * microbatch]
        for r in range(ranks)
        for s in range(steps)
    ]
    for d in DENOMINATORS:
        told = audit_accumulation(model, dealt, padded, d, ranks=ranks)
        assert np.allclose(
            [told.cosine, told.norm_ratio], table.loc[d, ["cosine", "norm_ratio"]].astype(float), rtol=1e-5
        ), (d, told)


def test_bad_input_is_told_and_code_2():
    for arguments, words in (
        (["nowhere", "--step", "1"], "nowhere"),
        ([sample(), "--step", "7"], "300-399"),
        ([sample(), "--step", "351", "--format", "fp4"], "bf16"),
    ):
        out = command("precision", *arguments)
        assert out.returncode == 2 and words in out.stderr and out.stdout == "", arguments
        assert "Traceback" not in out.stderr, arguments


def test_weights_that_are_bf16_themselves_lose_what_their_update_was_before_rounding(tmp_path):
    from stabilitylab import Recorder

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=10) as recorder:
        for _ in range(2):
            x = recorder.batch(torch.randn(4, 16, dtype=torch.bfloat16))
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    told = step_precision(tmp_path / "run", 1)
    assert told.updates.lost["weight"] > 0.9
