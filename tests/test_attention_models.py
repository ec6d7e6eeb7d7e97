"Unmodified models: what is caught equals their own weights, the twin, and their other implementations."

import logging
import warnings

import numpy as np
import pytest
import torch
from test_attention import NAMES, assert_same
from torch import nn
from torch.nn import functional as F

from stabilitylab.probe.attention.heads import attention_statistics
from stabilitylab.probe.attention.report import (
    AttentionProbe,
    attention_report,
    head_weights,
    watch_attention,
)
from stabilitylab.probe.attention.stream import attention_sums, usable_rows

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="transformers|torch")

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 50,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
GPT2 = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
UPCAST = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
WHISPER = PAIR | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20}
VIT = {k: v for k, v in SMALL.items() if not k.startswith(("vocab", "max"))} | {
    "image_size": 16,
    "patch_size": 8,
}
GEMMA = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}
OSS = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 1}
GEMMA3 = GROUPED | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MLA = SMALL | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
MLA |= {"v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
MLA |= {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1}
MODERN = SMALL | {"pad_token_id": 1, "global_attn_every_n_layers": 2, "local_attention": 8}
JAMBA = GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
JAMBA |= {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4}
SDPA, FLEX = "sdpa", "flex_attention"
MODELS = {  # name -> config class, model class, settings, inputs, other implementations than eager
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", GPT2, "text", [SDPA]),
    "GPT-2 upcast": ("GPT2Config", "GPT2LMHeadModel", GPT2 | UPCAST, "text", [SDPA]),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", SMALL | {"num_key_value_heads": 2}, "text", [SDPA, FLEX]),
    "Mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        SMALL | {"num_key_value_heads": 2, "sliding_window": 4},
        "text",
        [SDPA, FLEX],
    ),
    "BLOOM": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "text",
        [],
    ),
    "T5": ("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}, "pair", [SDPA]),
    "BART": ("BartConfig", "BartForConditionalGeneration", PAIR, "pair", [SDPA, FLEX]),
    "Marian": ("MarianConfig", "MarianMTModel", PAIR, "pair", [SDPA, FLEX]),
    "BERT": ("BertConfig", "BertForMaskedLM", SMALL, "text", [SDPA, FLEX]),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER, "sound", [SDPA, FLEX]),
    "ViT": ("ViTConfig", "ViTModel", VIT, "image", [SDPA, FLEX]),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", GEMMA | {"query_pre_attn_scalar": 8}, "text", [FLEX]),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED, "text", []),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED, "text", [SDPA]),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3, "text", [SDPA]),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", GROUPED, "text", []),
    "OLMo 2": ("Olmo2Config", "Olmo2ForCausalLM", GROUPED, "text", []),
    "StableLM": ("StableLmConfig", "StableLmForCausalLM", GROUPED, "text", []),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA, "text", [SDPA]),
    "Falcon": ("FalconConfig", "FalconForCausalLM", SMALL | {"multi_query": True}, "text", [SDPA]),
    "RoBERTa": ("RobertaConfig", "RobertaForMaskedLM", SMALL | {"pad_token_id": 1}, "text", []),
    "ModernBERT": ("ModernBertConfig", "ModernBertForMaskedLM", MODERN, "text", []),
    "Jamba": ("JambaConfig", "JambaForCausalLM", JAMBA, "text", []),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", OSS | {"num_experts_per_tok": 1}, "text", []),
}


def batch_of(kind):
    g = torch.Generator().manual_seed(3)
    ids = lambda n: torch.randint(3, 50, (2, n), generator=g)  # noqa: E731 - one line, used twice
    padding = torch.ones(2, 11, dtype=torch.long)
    padding[0, :3] = 0
    if kind == "text":
        return {"input_ids": ids(11), "attention_mask": padding, "use_cache": False}
    if kind == "pair":
        given = {"input_ids": ids(11), "decoder_input_ids": ids(7), "attention_mask": padding}
        return given | {"use_cache": False}
    if kind == "sound":
        sound = torch.randn(2, 8, 20, generator=g)
        return {"input_features": sound, "decoder_input_ids": ids(7), "use_cache": False}
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}


def make(name, implementation):
    config, model, settings, kind, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**settings)
    cls = getattr(transformers, model)
    return cls._from_config(config, attn_implementation=implementation).eval(), batch_of(kind)


def calls_of(model, batch):
    watch = watch_attention(model, batch, measure=lambda call: call)
    assert watch.unrecognised() == []
    return [c.statistics for c in watch.caught]


def own_weights(out):
    "The attention weights that a model returns, by role."
    parts = {
        k: getattr(out, k, None) or () for k in ("attentions", "encoder_attentions", "decoder_attentions")
    }
    return {
        "self": [a for p in parts.values() for a in p],
        "cross": list(getattr(out, "cross_attentions", ()) or ()),
    }


@pytest.mark.parametrize("name", MODELS)
def test_what_is_caught_are_the_weights_that_the_model_returns(name):
    model, batch = make(name, "eager")
    calls = calls_of(model, batch)
    with torch.no_grad():
        theirs = own_weights(model(**batch, output_attentions=True))
    for role, weights in theirs.items():
        mine = [c for c in calls if c.role == role]
        assert len(mine) == len(weights)
        for call, want in zip(mine, weights, strict=True):
            assert call.source == "eager" and call.scores is None
            sums = attention_sums(call)
            rows = usable_rows(sums.peak, sums.total, sums.count)
            np.testing.assert_allclose(sums.column, (want.double() * rows[..., None]).sum(2), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_model_equals_the_twin(name):
    model, batch = make(name, "eager")
    for call in calls_of(model, batch):
        got = assert_same(call)
        if name == "gpt-oss":
            assert (got.null_weight > 0).all()
    record = attention_report(model, batch)["attention"]
    assert record.attrs["unrecognised"] == [] and np.isfinite(record.attn_entropy).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "other"), [(n, o) for n, m in MODELS.items() for o in m[4]])
def test_implementations_of_one_model_agree(name, other):
    eager, batch = make(name, "eager")
    model, _ = make(name, other)
    model.load_state_dict(eager.state_dict())
    for a, b in zip(calls_of(eager, batch), calls_of(model, batch), strict=True):
        a, b = attention_statistics(a), attention_statistics(b)
        for field in NAMES:
            if field not in (
                "rows",
                "blind_rows",
            ):  # padded queries see nothing in one, everything in another
                np.testing.assert_allclose(
                    getattr(a, field), getattr(b, field), rtol=2e-3, atol=2e-4, err_msg=field
                )


def detr(config, model, **options):
    "A detector of two layers with a small ResNet, and a batch of two images of which one is padded."
    stages = {"hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage1", "stage2"]}
    backbone = transformers.ResNetConfig(embedding_size=8, **stages)
    sizes = {k: v for k, v in PAIR.items() if "ffn" in k or "layers" in k or "heads" in k}
    given = {"backbone_config": backbone, "d_model": 32, "num_queries": 5, **sizes, **options}
    config = getattr(transformers, config)(use_timm_backbone=False, backbone=None, **given)
    torch.manual_seed(0)
    model = getattr(transformers, model)._from_config(config, attn_implementation="eager").eval()
    seen = torch.ones(2, 32, 32).long()
    seen[0, 16:] = 0
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "pixel_mask": seen}


def test_a_detector_reads_its_image_by_cross_attention():
    model, batch = detr("DetrConfig", "DetrForObjectDetection")
    calls = calls_of(model, batch)
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    decoder = [x for pair in zip(out.decoder_attentions, out.cross_attentions, strict=True) for x in pair]
    assert [c.role for c in calls] == ["self"] * 2 + ["self", "cross"] * 2
    for call, want in zip(calls, [*out.encoder_attentions, *decoder], strict=True):
        sums = attention_sums(call)
        rows = usable_rows(sums.peak, sums.total, sums.count)
        np.testing.assert_allclose(sums.column, (want.double() * rows[..., None]).sum(2), atol=1e-5)


def test_an_attention_that_samples_places_is_listed():
    model, batch = detr("DeformableDetrConfig", "DeformableDetrForObjectDetection", num_feature_levels=2)
    watch = watch_attention(model, batch)
    assert [c.module for c in watch.caught] == [f"model.decoder.layers.{i}.self_attn" for i in (0, 1)]
    listed = [f"model.{part}.layers.{i}" for part in ("decoder", "encoder") for i in (0, 1)]
    assert [name.rsplit(".", 2)[0] for name in watch.unrecognised()] == listed


def test_a_kernel_with_numbers_that_nobody_knows_is_listed():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def hidden(module, query, key, value, attention_mask, scaling=None, **kwargs):
        with torch._C.DisableTorchFunction():
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    class Biased(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (4, -1)).transpose(1, 2)
            bias = torch.zeros(1, 4, x.shape[1], x.shape[1])
            attend = ALL_ATTENTION_FUNCTIONS["hidden_biased"]
            return attend(self, q, q, q, None, position_bias=bias)[0].flatten(2)

    ALL_ATTENTION_FUNCTIONS.register("hidden_biased", hidden)
    try:
        watch = watch_attention(nn.ModuleDict({"attn": Biased()})["attn"], torch.randn(2, 5, 32))
        assert not watch.caught and "position_bias" in " ".join(watch.unrecognised())
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["hidden_biased"]


def test_a_hidden_kernel_of_the_registry_is_read_from_its_arguments():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def hidden(module, query, key, value, attention_mask, scaling=None, **kwargs):
        "Stands for a flash kernel: nothing of it is seen from outside."
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        with torch._C.DisableTorchFunction():
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("hidden_kernel", hidden)
    try:
        want, batch = make("Llama", "sdpa")
        model, _ = make("Llama", "hidden_kernel")
        before = dict(ALL_ATTENTION_FUNCTIONS)
        batch = {"input_ids": batch["input_ids"]}
        watch = watch_attention(model, batch)
        assert {c.source for c in watch.caught} == {"registry"} and watch.unrecognised() == []
        assert dict(ALL_ATTENTION_FUNCTIONS) == before
        for a, b in zip(watch.caught, watch_attention(want, batch).caught, strict=True):
            np.testing.assert_allclose(a.statistics.attn_entropy, b.statistics.attn_entropy, rtol=1e-5)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["hidden_kernel"]


class ByHand(nn.Module):
    "Attention as nanoGPT writes it without a fused kernel."

    def __init__(self, heads=4):
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = heads, nn.Linear(32, 96), nn.Linear(32, 32)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, 2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.shape[-1] ** 0.5)
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.dropout(F.softmax(att, dim=-1), 0.1, self.training)
        return self.c_proj((att @ v).transpose(1, 2).reshape(b, t, c))


class ByKernel(ByHand):
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


def test_code_in_the_manner_of_nanogpt():
    torch.manual_seed(0)
    hand, kernel, x = ByHand(), ByKernel(), torch.randn(2, 20, 32)
    kernel.load_state_dict(hand.state_dict())
    (a,), (b,) = calls_of(nn.ModuleDict({"attn": hand})["attn"], x), calls_of(kernel, x)
    assert a.source == "eager" and b.source == "sdpa" and a.v is not None
    for call in (a, b):
        assert_same(call)
    np.testing.assert_allclose(
        attention_statistics(a).attn_entropy, attention_statistics(b).attn_entropy, rtol=1e-5
    )


class TalkingHeads(ByHand):
    "Mixes the scores of its heads before the softmax: a step that no description covers."

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, 2))
        att = F.conv2d((q @ k.mT) / 8**0.5, torch.eye(4)[..., None, None] + 0.1)
        return self.c_proj((att.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


def test_a_step_that_is_not_understood_is_measured_from_the_scores_and_says_so():
    torch.manual_seed(0)
    model, x = TalkingHeads(), torch.randn(2, 10, 32)
    (call,) = calls_of(model, x)
    assert call.source == "eager scores"
    got, weights = attention_statistics(call), call.scores.double().softmax(-1)
    np.testing.assert_allclose(
        got.attn_entropy, -torch.xlogy(weights, weights).sum(-1).mean((0, 2)), rtol=1e-5
    )


def test_torch_transformer_with_and_without_its_fast_path():
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, batch_first=True, dropout=0.0)
    src, tgt = torch.randn(2, 9, 32), torch.randn(2, 6, 32)
    batch = {"src": src, "tgt": tgt, "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6)}
    batch["src_key_padding_mask"] = torch.zeros(2, 9).bool()
    batch["src_key_padding_mask"][0, 6:] = True
    trained = calls_of(model.train(), batch)
    assert [c.role for c in trained] == ["self"] * 2 + ["self", "cross"] * 2
    for call in trained:
        assert_same(call)
    for a, b in zip(trained, calls_of(model.eval(), batch), strict=True):
        np.testing.assert_allclose(
            attention_statistics(a).attn_entropy, attention_statistics(b).attn_entropy, rtol=1e-4
        )


@pytest.mark.parametrize("options", [{}, {"bias_k": True}, {"zero": True}, {"kdim": True}])
def test_multihead_attention_and_its_options(options):
    torch.manual_seed(0)
    sizes = {"kdim": 24, "vdim": 20} if "kdim" in options else {}
    added = {"add_bias_kv": "bias_k" in options, "add_zero_attn": "zero" in options}
    layer = nn.MultiheadAttention(32, 4, batch_first=True, **added, **sizes).eval()
    q = torch.randn(2, 5, 32)
    k, v = (torch.randn(2, 7, 24), torch.randn(2, 7, 20)) if sizes else (torch.randn(2, 7, 32),) * 2
    hidden = torch.zeros(2, 7).bool()
    hidden[1, 5:] = True
    batch = {"query": q, "key": k, "value": v, "key_padding_mask": hidden, "average_attn_weights": False}
    (call,) = calls_of(layer, batch)
    assert call.role == "cross"
    assert_same(call)
    with torch.no_grad():
        _, weights = layer(**batch)
    np.testing.assert_allclose(attention_sums(call).column, weights.sum(2), atol=1e-5)


def test_x_transformers():
    x_transformers = pytest.importorskip("x_transformers")
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    for options in (
        {},
        {"attn_flash": True},
        {"alibi_pos_bias": True},
        {"rotary_pos_emb": True, "attn_kv_heads": 2},
    ):
        torch.manual_seed(0)
        layers = x_transformers.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        model = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers).eval()
        calls = calls_of(model, ids)
        assert len(calls) == 2
        for call in calls:
            assert_same(call)
    torch.manual_seed(0)
    pair = x_transformers.XTransformer(
        dim=32,
        enc_num_tokens=50,
        enc_depth=1,
        enc_heads=4,
        enc_max_seq_len=32,
        dec_num_tokens=50,
        dec_depth=1,
        dec_heads=4,
        dec_max_seq_len=32,
    ).eval()
    assert [c.role for c in calls_of(pair, (ids, ids[:, :8]))] == ["self", "self", "cross"]


def trained(model, steps, probe=None, wrap=lambda m: m):
    "Losses of a short training run."
    torch.manual_seed(1)
    run, optimizer = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, losses = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0)), []
    for step in range(steps):
        if probe is not None:
            probe.arm(step)
        loss = run(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gpt2(checkpointing=False):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | {"use_cache": False})).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_are_bit_identical_and_recomputation_counts_once(checkpointing):
    bare = trained(gpt2(checkpointing), 4)
    model = gpt2(checkpointing)
    probe = AttentionProbe(model)
    assert trained(model, 4, probe) == bare
    data = probe.take()
    assert dict(data.sizes) == {"step": 4, "layer": 2, "head": 4} and data.attrs["unrecognised"] == []
    assert not np.array_equal(data.attn_entropy[0], data.attn_entropy[3])
    probe.remove()


class Small(nn.Module):
    "A language model of one layer that answers as Hugging Face's do."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn, self.head = nn.Embedding(50, 32), ByKernel(), nn.Linear(32, 50)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.attn(self.embed(input_ids)))
        labels = input_ids if labels is None else labels
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")


def test_under_compile():
    bare = trained(Small(), 3, wrap=compiled)
    model = Small()
    probe = AttentionProbe(model)
    assert trained(model, 3, probe, wrap=compiled) == bare
    assert dict(probe.take().sizes) == {"step": 3, "layer": 1, "head": 4}
    record = attention_report(compiled(model), {"input_ids": torch.ones(1, 5).long()})
    assert record["attention"].sizes["layer"] == 1


def test_under_ddp(tmp_path):
    bare, store = trained(Small(), 3), torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Small()
        probe = AttentionProbe(model)
        assert trained(model, 3, probe, wrap=nn.parallel.DistributedDataParallel) == bare
        got = probe.take()
        assert got.module.values.tolist() == ["attn"] and dict(got.sizes) == {
            "step": 3,
            "layer": 1,
            "head": 4,
        }
    finally:
        torch.distributed.destroy_process_group()


def test_tokens_at_the_sinks():
    torch.manual_seed(0)
    model, batch = make("BART", "sdpa")
    record = attention_report(model, batch)["attention"].isel(step=0)
    cross = record.isel(layer=np.flatnonzero(record.role.values == "cross"))
    assert cross.length.values.tolist() == [11, 11] and np.isin(cross.sink_token, batch["input_ids"]).all()
    own = record.isel(layer=np.flatnonzero([m.startswith("model.decoder") for m in record.module.values]))
    own = own.isel(layer=np.flatnonzero(own.role.values == "self"))
    assert own.length.values.tolist() == [7, 7] and np.isin(own.sink_token, batch["decoder_input_ids"]).all()


def test_head_weights_are_those_of_the_model():
    model, batch = make("gpt-oss", "eager")
    with torch.no_grad():
        want = model(**batch, output_attentions=True).attentions[1][1, 2]
    np.testing.assert_allclose(head_weights(model, batch, 1, 2, sequence=1), want, atol=1e-5)
    with pytest.raises(ValueError, match=r"`head`=9 .* 0\.\.3"):
        head_weights(model, batch, 1, 9)


def test_a_model_that_fails_leaves_nothing_behind():
    class Broken(ByHand):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("no")

    model = nn.Sequential(Broken())
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    with pytest.raises(RuntimeError, match="no"):
        watch_attention(model, torch.randn(1, 4, 32))
    assert hooks() == 0 and torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("options", [{}, {"cap": 0.02}, {"sink": "learned"}, {"sink": "plus_one"}], ids=str)
def test_our_reference_models_are_measured_with_their_options(options, monkeypatch):
    from stabilitylab.models import attention
    from stabilitylab.models.decoder import LanguageModel
    from stabilitylab.models.parts import ModelConfig

    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=50, seq=24, d_model=32, n_layer=2, n_head=4, **options))
    tokens = torch.randint(0, 50, (2, 24))
    got = attention_report(model, tokens)["attention"].isel(step=0)
    taken = []

    def keep(q, k, v, bias=None, causal=False, **kwargs):
        taken.append((q, k, kwargs | {"bias": bias, "causal": causal}))
        return attend(q, k, v, bias, causal, **kwargs)

    attend = attention.attend
    monkeypatch.setattr(attention, "attend", keep)
    model(tokens)
    assert len(taken) == 2
    for layer, (q, k, kwargs) in enumerate(taken):
        known = {name: kwargs.get(name) for name in ("bias", "causal", "scale", "cap")}
        z = attention.attention_logits(q.double(), k.double(), **known)
        sink = kwargs.get("sink")
        slot = torch.full((*z.shape[:-1], 1), -torch.inf).double()
        slot = slot if sink is None else sink.double().reshape(1, -1, 1, 1).expand_as(slot)
        p = torch.cat([z, slot], -1).softmax(-1)
        null = p[..., -1].mean((0, 2)).detach()
        np.testing.assert_allclose(got.null_weight[layer], null, rtol=1e-5, atol=1e-12)
        first = p[..., 0].mean((0, 2)).detach()
        np.testing.assert_allclose(got.first_score[layer], first, rtol=1e-5)


def test_the_largest_logit_of_scores_that_are_not_understood_carries_their_scale():
    torch.manual_seed(0)
    model, x = TalkingHeads(), torch.randn(2, 10, 32)
    (call,) = calls_of(model, x)
    got = attention_statistics(call)
    np.testing.assert_allclose(got.attn_logit_max, call.scores.double().amax((0, 2, 3)), rtol=1e-6)
    assert not got.nonfinite_count.any()


class BiasThenScale(ByHand):
    "Multiplies scores and bias by the scale at once, as Falcon does with ALiBi."

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(c, 2))
        hidden = torch.full((t, t), -torch.inf).triu(1)
        bias = -torch.arange(t).flip(0) * torch.ones(self.n_head, 1, 1)
        self.logits = (q @ k.mT) * 0.125
        att = ((q @ k.mT + bias) * 0.125 + hidden).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(b, t, c))


def test_a_scale_after_a_bias_is_a_scale_of_both():
    torch.manual_seed(0)
    model, x = BiasThenScale(), 3 * torch.randn(2, 10, 32)
    (call,) = calls_of(model, x)
    assert call.source == "eager" and call.scale == 0.125
    assert_same(call)
    seen = model.logits.detach().double().masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    np.testing.assert_allclose(attention_statistics(call).attn_logit_max, seen.amax((0, 2, 3)), rtol=1e-5)
