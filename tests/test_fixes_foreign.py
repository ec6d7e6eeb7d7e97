"Fixes on models of others: Hugging Face architectures from tiny configurations, PyTorch's own modules."

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stabilitylab.fixes.attention_logits import HeadNorm
from stabilitylab.fixes.registry import fix
from stabilitylab.fixes.submodules import (
    attention_layers,
    embedding_tables,
    norm_layers,
    require_output_layer,
    residual_projections,
)
from stabilitylab.fixes.training import Training
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.names.errors import InputError

pytestmark = pytest.mark.slow  # architectures of others, from tiny configurations

transformers = pytest.importorskip("transformers")


def _gpt2():
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _llama():
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def _bloom():
    config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2)
    return transformers.BloomForCausalLM(config)


def _opt():
    config = transformers.OPTConfig(
        vocab_size=32,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


def _neox():
    config = transformers.GPTNeoXConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return transformers.GPTNeoXForCausalLM(config)


def _ours_of_old():
    return LanguageModel(ModelConfig.plain(vocab=32, seq=16, d_model=16, n_layer=2, n_head=2))


MAKERS = {"gpt2": _gpt2, "llama": _llama, "bloom": _bloom, "opt": _opt, "neox": _neox, "older": _ours_of_old}
SDPA = ["gpt2", "llama", "opt", "neox", "older"]  # BLOOM writes its softmax out


def loss_of(model, batch):
    "The mean loss of a Hugging Face model or one of ours."
    if isinstance(model, LanguageModel):
        return model(batch["input_ids"], batch["labels"])
    logits = model(batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def training_of(name):
    "A tiny training of this architecture."
    torch.manual_seed(0)
    model = MAKERS[name]().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(0, 32, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-7)
    return Training(model, optimizer, loss_of, lambda step: [batch])


def values(training):
    "All tensors of the model, copied."
    return {k: v.clone() for k, v in training.model.state_dict().items()}


@pytest.mark.parametrize("name", MAKERS)
def test_parts_are_found(name):
    model = MAKERS[name]()
    parts = attention_layers(model)
    assert len(parts) == 2 and len(residual_projections(model)) == 4 and embedding_tables(model)
    assert len(norm_layers(model)) >= 5 and require_output_layer(model)[1].weight.shape[0] == 32
    assert all(p.n_head == {"llama": 4}.get(name, 2) and p.n_kv == 2 for p in parts)


@pytest.mark.parametrize("kind", ["ln", "rms", "l2"])
@pytest.mark.parametrize("name", MAKERS)
def test_qk_norm_bounds_the_queries_of_any_model(name, kind):
    training = training_of(name)
    before, keys = loss_of(training.model, training.batches(0)[0]).item(), set(training.model.state_dict())
    book = fix("qk_norm", kind=kind).apply(training)
    part, seen = attention_layers(training.model)[0], {}
    part.source("q").register_forward_hook(lambda m, i, o: seen.update(o=o.detach()))
    part.source("q").weight.data.mul_(100)
    loss_of(training.model, training.batches(0)[0])
    for role in "qk":
        heads = part.split(role, seen["o"]) if role == "q" or "qkv" in part.roles else None
        if heads is not None:
            bound = math.sqrt(part.head_dim) * 1.001
            assert (heads.norm(dim=-1) <= bound).all() and (heads.norm(dim=-1) > 0.5 * bound).all()
    if "qkv" in part.roles:  # values are left alone
        assert part.split("v", seen["o"]).norm(dim=-1).std() > 0
    assert keys < set(training.model.state_dict())
    part.source("q").weight.data.div_(100)
    training.run_step()
    gains = [m.norm.weight for m in training.model.modules() if isinstance(m, HeadNorm)]
    assert len(gains) == 4 and all(g.grad is not None for g in gains)
    book.undo()
    assert set(training.model.state_dict()) == keys and math.isfinite(before)


@pytest.mark.parametrize(
    "fixed", ["inside_scale", "soft_cap_attention", "gated_attention", "sigma_reparam", "lora"]
)
@pytest.mark.parametrize("name", SDPA)
def test_silent_insertions_into_any_model(name, fixed):
    if name == "gpt2" and fixed == "sigma_reparam":
        pytest.skip("covered by the equation: a Conv1D is parametrised like any matrix")
    training = training_of(name)
    batch = training.batches(0)[0]
    before = loss_of(training.model, batch)
    options = {"soft_cap_attention": {"cap": 1000.0}, "lora": {"rank": 2}}.get(fixed, {})
    book = fix(fixed, **options).apply(training)
    torch.testing.assert_close(loss_of(training.model, batch), before, rtol=1e-4, atol=1e-5)
    assert math.isfinite(training.run_step().loss)
    book.undo()
    assert not any("patch" in n for n, _ in training.model.named_modules())


@pytest.mark.parametrize("fixed", ["softmax_plus_one", "learned_sink", "key_value_bias"])
@pytest.mark.parametrize("name", SDPA)
def test_sinks_take_attention_away_in_any_model(name, fixed):
    training = training_of(name)
    batch = training.batches(0)[0]
    before, state = loss_of(training.model, batch).item(), values(training)
    book = fix(fixed).apply(training)
    assert loss_of(training.model, batch).item() != before
    book.undo()
    assert loss_of(training.model, batch).item() == before
    assert all(torch.equal(state[k], v) for k, v in training.model.state_dict().items())


@pytest.mark.parametrize("name", SDPA)
def test_qk_clip_halves_what_is_four_times_too_large(name):
    training = training_of(name)
    for group in training.optimizer.param_groups:
        group["lr"] = 0.0
    batch = training.batches(0)[0]
    for part in attention_layers(training.model):
        for role in "qk":
            for heads in part.weight_heads(role):
                heads.mul_(300)
    fix("qk_clip", limit=5.0).apply(training)
    parts = training.hooks[0].layers
    training.run_step()
    loss_of(training.model, batch)
    assert float(parts[0][1].largest.max()) <= 5.01  # later layers see another input behind a clipped one
    assert training.hooks[0].clipped > 0


def test_attention_that_is_written_out_is_refused_with_the_reason():
    training = training_of("bloom")
    training.model.config._attn_implementation = "eager"
    fix("soft_cap_attention").apply(training)
    with pytest.raises(InputError, match="scaled_dot_product_attention"):
        training.run_step()


def test_eager_attention_of_hugging_face_is_refused_with_the_way_out():
    training = training_of("llama")
    training.model.set_attn_implementation("eager")
    fix("soft_cap_attention").apply(training)
    with pytest.raises(InputError, match="attn_implementation='sdpa'"):
        training.run_step()


def test_fused_attention_of_pytorch_is_refused_and_its_other_parts_are_not():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(2, 5, 16)
    training = Training(
        model, torch.optim.AdamW(model.parameters()), lambda m, b: m(b).square().mean(), lambda s: [x]
    )
    with pytest.raises(InputError, match="cannot be entered"):
        fix("qk_norm").apply(training)
    for name in ("no_bias", "rms_norm", "update_clip", "lower_lr"):
        book = fix(name).apply(training)
        training.run_step()
        book.undo()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "fixed", ["z_loss", "loss_fp32", "no_bias", "rms_norm", "output_norm", "embedding_shrink", "redraw"]
)
def test_other_fixes_step_and_go_back(name, fixed):
    training = training_of(name)
    if fixed in ("no_bias", "rms_norm") and not any(
        isinstance(m, nn.LayerNorm) for m in training.model.modules()
    ):
        pytest.skip("a model without LayerNorms and biases")
    if fixed == "no_bias" and name == "older":
        pytest.skip("a model without biases")
    before = values(training)
    book = fix(fixed).apply(training)
    book.undo()
    assert all(torch.equal(before[k], v) for k, v in training.model.state_dict().items())
    fix(fixed).apply(training)
    assert math.isfinite(training.run_step().loss)


def test_the_built_in_loss_of_hugging_face_is_seen():
    training = training_of("gpt2")
    training.loss = training.measure = lambda model, batch: model(**batch).loss
    plain = training.loss(training.model, training.batches(0)[0])
    fix("z_loss", weight=0.1).apply(training)
    assert training.loss(training.model, training.batches(0)[0]) > plain + 0.1


def test_checkpointed_recomputation_goes_by_the_patch():
    training = training_of("gpt2")
    plain = training_of("gpt2")
    for one, checkpointed in ((training, True), (plain, False)):
        if checkpointed:
            one.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        fix("soft_cap_attention", cap=1.0).apply(one)
        one.run_step()
    for a, b in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
