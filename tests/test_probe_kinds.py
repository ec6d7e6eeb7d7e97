"Kinds and layers of modules under the naming of other projects."

from collections import Counter

import pytest
import torch
from probe_models import NAMES, tiny

from stabilitylab.probe.kinds import module_kinds, param_kinds, qkv_layout, split_qkv

pytest.importorskip("transformers")
SEPARATE = {"attn.q", "attn.k", "attn.v", "attn.out", "mlp.fc1", "mlp.fc2"}
FUSED = {"attn.qkv", "attn.out", "mlp.fc1", "mlp.fc2"}


@pytest.mark.parametrize("name", NAMES)
def test_every_block_has_its_parts_once_a_layer(name):
    model, _ = tiny(name)
    kinds = module_kinds(model)
    stacks = 2 if name in ("t5", "whisper") else 1
    found = Counter(kinds.values())
    for k in FUSED if name in ("gpt2", "bloom") else SEPARATE:
        for layer in (0, 1):
            assert found[k, layer] == stacks, (k, layer)
    if stacks == 2:
        assert all(found[f"cross_attn.{r}", 1] == 1 for r in ("q", "k", "v", "out"))
    kinds_only = {k for k, _ in kinds.values()}
    assert {"norm", "lm_head", "conv" if name in ("vit",) else "embed"} <= kinds_only
    assert set(param_kinds(model)) == {n for n, _ in model.named_parameters()}


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def built(config, **settings):
    import transformers

    made = getattr(transformers, config)(**(SMALL | settings))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize(
    "config, settings, heads",
    [
        ("Phi3Config", dict(num_key_value_heads=2), (4, 2, False)),
        ("FalconConfig", dict(multi_query=True, new_decoder_architecture=False), (4, 1, False)),
        ("FalconConfig", dict(new_decoder_architecture=True, num_kv_heads=2), (4, 2, True)),
        ("FalconConfig", dict(multi_query=False, new_decoder_architecture=False), (4, 4, True)),
        ("GPTNeoXConfig", dict(), (4, 4, True)),
        ("GPTBigCodeConfig", dict(n_embd=32, n_layer=2, n_head=4, multi_query=True), (4, 1, False)),
    ],
    ids=["phi3", "falcon-7b", "falcon-40b", "falcon-rw", "neox", "bigcode"],
)
def test_fused_projections_are_split_by_the_configuration(config, settings, heads):
    "The parts are those that the model itself makes: changing the columns of v changes no attention weights."
    model = built(config, **settings)
    name = next(n for n, (kind, _) in module_kinds(model).items() if kind == "attn.qkv")
    layout = qkv_layout(name, model)
    assert (layout.heads, layout.kv_heads, layout.is_grouped) == heads
    fused = model.get_submodule(name)
    width = fused.weight.shape[0] if isinstance(fused, torch.nn.Linear) else fused.weight.shape[1]
    columns = torch.arange(float(width))
    parts = {k: v.flatten().long() for k, v in split_qkv(columns, layout).items()}
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(width))
    model.config._attn_implementation = "eager"
    ids, before = torch.arange(3, 15)[None], None
    model.eval()
    for part, moves in (("v", False), ("k", True), ("q", True)):
        with torch.no_grad():
            before = model(ids, output_attentions=True).attentions[0].clone()
            keep = fused.weight.detach().clone()
            weight = fused.weight if isinstance(fused, torch.nn.Linear) else fused.weight.T
            weight[parts[part]] += torch.randn_like(weight[parts[part]])
            after = model(ids, output_attentions=True).attentions[0]
            fused.weight.copy_(keep)
        assert torch.equal(before, after) != moves, part


def test_unknown_layouts_stay_whole():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.gqa_qkv = torch.nn.Linear(8, 24), torch.nn.Linear(8, 12)

    model = torch.nn.ModuleDict({"attn": Own()})
    assert qkv_layout("attn.qkv", model).width == 24 and qkv_layout("attn.gqa_qkv", model) is None


@pytest.mark.parametrize(
    "config, settings, wanted",
    [
        ("MambaConfig", dict(), {"ssm.in", "ssm.x", "ssm.dt", "ssm.out", "conv"}),
        ("MixtralConfig", dict(num_key_value_heads=2, num_local_experts=4), {"router", "attn.q"}),
        ("Phi3Config", dict(num_key_value_heads=2), {"mlp.gate_up", "mlp.fc2"}),
        (
            "DeepseekV3Config",
            dict(
                num_key_value_heads=4,
                n_routed_experts=4,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=2,
                first_k_dense_replace=1,
                moe_intermediate_size=16,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
            {"attn.latent", "attn.q", "attn.kv", "attn.out", "router"},
        ),
    ],
    ids=["mamba", "mixtral", "phi3", "deepseek"],
)
def test_newer_parts_have_their_kinds(config, settings, wanted):
    model = built(config, **settings)
    kinds = {kind for kind, _ in module_kinds(model).values()}
    assert wanted <= kinds, wanted - kinds
    if config == "MambaConfig":
        assert "attn.qkv" not in kinds
