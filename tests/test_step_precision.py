"What 16 bits take from a step, against slow twins; attention inputs of others' models; the command's errors."

import json
import runpy

import numpy as np
import pytest
import torch

from stabilitylab import Recorder
from stabilitylab.cases.registry import sample
from stabilitylab.cli.main import main
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.accumulation.audit import (
    audit_accumulation,
    compare_denominators,
    microbatch_window,
    sequence_gradients,
)
from stabilitylab.numerics.accumulation.weights import DENOMINATORS
from stabilitylab.numerics.rounding.attention_range import attention_inputs, scale_overflows
from stabilitylab.replay.rounded_step import step_precision
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.snapshot import load_batch, load_snapshot
from stabilitylab.replay.step import replay
from stabilitylab.report.step import step_text
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


PRINTING = """
from dataclasses import replace

from stabilitylab.cases.registry import sample
from stabilitylab.replay.setup_file import setup_of

setup = setup_of(sample())

def build():
    print("a layer")
    print("a layer")
    return setup.model()

def make():
    return replace(setup, model=build)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "precision"])
def test_what_a_program_prints_is_no_part_of_the_answer_and_printed_once(tmp_path, capsys, name):
    (tmp_path / "own.py").write_text(PRINTING)
    setup = f"{tmp_path / 'own.py'}:make"
    assert main([name, str(sample()), "--step", "352", "--setup", setup, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and err.count("a layer") == 1


def test_bad_input_is_told_and_code_2():
    for arguments, words in (
        (["nowhere", "--step", "1"], "nowhere"),
        ([sample(), "--step", "7"], "300-399"),
        ([sample(), "--step", "351", "--format", "fp4"], "bf16"),
    ):
        out = command("precision", *arguments)
        assert out.returncode == 2 and words in out.stderr and out.stdout == "", arguments
        assert "Traceback" not in out.stderr, arguments


@pytest.mark.slow
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


PROGRAM = """
import torch
from torch import nn
from stabilitylab.replay.state import Setup


class Attention(nn.Module):
    def __init__(self, makes_float32=False):
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.makes_float32 = makes_float32

    def forward(self, x):
        weights = (self.q(x) @ self.k(x).mT / 8**0.5).softmax(-1)
        noise = torch.zeros(8, 8) if self.makes_float32 else 0 * self.q.weight
        return self.out(weights @ x @ noise.cos())


def loss(model, x):
    return model(x).square().mean()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def setup():
    return Setup(Attention, loss, adam)


def setup_of_another_loss():
    return Setup(Attention, lambda model, batch: 3 * loss(model, batch), adam)


def setup_of_float32():
    return Setup(lambda: Attention(makes_float32=True), loss, adam)
"""


@pytest.mark.slow
def test_float_inputs_and_a_gradient_that_is_zero_but_for_rounding(tmp_path):
    "Float inputs met 16-bit weights as a fault of this program; eps was to be lowered for the bias of a key."
    (tmp_path / "program.py").write_text(PROGRAM)
    names = runpy.run_path(str(tmp_path / "program.py"))
    torch.manual_seed(0)
    model = names["Attention"]()
    optimizer, run = names["adam"](model), tmp_path / "run"
    with Recorder(model, optimizer, run, snapshot_every=2) as recorder:
        for _ in range(4):
            loss = names["loss"](model, recorder.batch(torch.randn(3, 5, 8)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    precision = step_precision(run, 3, f"{tmp_path / 'program.py'}:setup")
    assert set(precision.casts) == {"as recorded", "with weights in bf16"} and not precision.left_out
    other = step_precision(run, 3, f"{tmp_path / 'program.py'}:setup_of_another_loss")
    assert not precision.warning and "  warning    this replay is not the recorded step" in step_text(
        other.to_dict()
    )
    bias, weight = precision.eps["k.bias"], precision.eps["k.weight"]
    assert precision.micro_batches == 1 and "micro-batches" not in step_text(precision.to_dict())
    assert bias.ratio < 10 and bias.regime == "no gradient" and "leave eps" in bias.advice
    epsilon = step_text(precision.to_dict()).partition("epsilon")[2].partition("\n")[0]
    assert weight.regime == "no effect" and "k.bias" not in epsilon
    # where the loss itself makes float32 tensors there is a reason, and the rest of the answer
    precision = step_precision(run, 3, f"{tmp_path / 'program.py'}:setup_of_float32")
    assert set(precision.casts) == {"as recorded"} and len(precision.updates)
    words = step_text(precision.to_dict())
    reason = "with weights in bf16: left out: the program makes tensors of another format itself"
    assert reason in words and "same dtype" in words


def test_attention_of_encoder_layers_is_that_of_training(tmp_path):
    "PyTorch's own encoder hides the call from a mode, and in evaluation takes a path of its own."
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    inputs = attention_inputs(model, lambda: model(torch.randn(3, 5, 8)))
    assert [name for name, _, _ in inputs] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(q.shape == k.shape == (3, 2, 5, 4) for _, q, k in inputs)
    attention = model.layers[0].self_attn
    x = torch.randn(3, 5, 8)
    ((_, q, k), *_) = attention_inputs(model, lambda: model(x))
    projected = torch.nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    for part, got in zip(projected.chunk(3, -1), (q, k), strict=False):
        assert torch.allclose(part.view(3, 5, 2, 4).transpose(1, 2), got, atol=1e-6)


def test_attention_of_another_model_is_not_counted():
    "The reference model of a preference loss: its calls stood there under no name."
    model, reference = (torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
    x = torch.randn(3, 5, 8)

    def loss():
        large = 1e3 * x
        return sum(m(v, v, v, need_weights=False)[0].sum() for m, v in ((model, x), (reference, large)))

    inputs = attention_inputs(model, loss)
    assert len(inputs) == 1 and inputs[0][1].abs().max() < 100


def recorded(path, loss_of, spoil=False):
    "A record of two steps of a linear layer, and a file with its setup; the second batch may hold a NaN."
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(model, optimizer, path / "run", snapshot_every=10) as recorder:
        for step in range(2):
            x = recorder.batch(torch.randn(8, 4) * (float("nan") if spoil and step else 1.0))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    lines = (
        "import numpy as np\nimport torch\nfrom stabilitylab import Setup\n",
        f"def loss_of(model, x):\n    {loss_of}\n",
        "def setup():\n    model = lambda: torch.nn.Linear(4, 1, bias=False)",
        "    return Setup(model, loss_of, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01))\n",
    )
    (path / "mine.py").write_text("\n".join(lines))
    return path / "run", f"{path}/mine.py:setup"


@pytest.mark.slow
def test_a_step_of_nan_has_nothing_to_round(tmp_path):
    run, setup = recorded(tmp_path, "return model(x).square().mean()", spoil=True)
    with pytest.raises(InputError, match="the loss of step 1 is nan"):
        step_precision(run, 1, setup)


@pytest.mark.slow
def test_a_loss_that_uses_numpy_is_left_out_in_16_bits(tmp_path):
    counted = "y = model(x); n = np.sum(y.detach().numpy() < 1e9); return y.square().sum() / float(n)"
    run, setup = recorded(tmp_path, counted)
    answer = step_precision(run, 1, setup)
    assert any("it cannot run so" in why and "BFloat16" in why for why in answer.left_out.values())
