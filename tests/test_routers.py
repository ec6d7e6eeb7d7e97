"The tokens that the routers of mixtures give to their experts, against counts by hand."

import contextlib
import math

import pytest
import torch

from stabilitylab.detect.experts import find_expert_collapse
from stabilitylab.probe.probes import RouterProbe
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import open_run

MIXTURES = {
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "Qwen3": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 16}),
    "OLMoE": ("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": 8, "eos_token_id": 1}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4}),
}
TINY_MIXTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 100,
    "num_experts_per_tok": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_the_tokens_of_each_expert_are_those_that_ran_through_it(name):
    "The twin: the best two of each token's scores, one token at a time."
    transformers = pytest.importorskip("transformers")
    config, model_class, own = MIXTURES[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**TINY_MIXTURE | own))
    ids = torch.randint(0, 100, (2, 9))
    probe, seen = RouterProbe(model), {}
    for module_name, module in model.named_modules():
        if module_name.endswith(("mlp.gate", "mlp.router")):
            module.register_forward_hook(
                lambda module, args, out, key=module_name: seen.update(
                    {
                        key: torch.nn.functional.linear(
                            args[0].reshape(-1, 32), module.weight, getattr(module, "bias", None)
                        )
                    }
                )
            )
    with torch.no_grad():
        model(ids)
    assert not probe.take()  # an evaluation does not count
    model(ids, labels=ids)
    scalars = {key: float(value) for key, value in probe.take().items()}
    assert len(seen) == 2
    for layer, (_, scores) in enumerate(sorted(seen.items())):
        tokens = [0] * scores.shape[1]
        for row in scores.tolist():
            for expert in sorted(range(len(row)), key=lambda i, row=row: -row[i])[:2]:
                tokens[expert] += 1
        shares = [n / sum(tokens) for n in tokens]
        effective = math.exp(-sum(s * math.log(s) for s in shares if s)) / len(shares)
        assert scalars[f"router_max_share_layer_{layer}"] == pytest.approx(max(shares), abs=1e-12)
        assert scalars[f"router_diversity_layer_{layer}"] == pytest.approx(effective, abs=1e-12)


@pytest.mark.slow
def test_deepseeks_router_chooses_by_its_corrected_scores():
    transformers = pytest.importorskip("transformers")
    more = {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
    }
    heads = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    size = {**TINY_MIXTURE, **more, **heads, "moe_intermediate_size": 16}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**size))
    gate = model.model.layers[1].mlp.gate
    with torch.no_grad():
        gate.e_score_correction_bias[:] = torch.tensor([2.0, 1.5, 0, 0, 0, 0, 0, 0])  # beats every sigmoid
    probe = RouterProbe(model)
    model(torch.randint(0, 100, (1, 8)), labels=torch.randint(0, 100, (1, 8)))
    counts = {key: float(value) for key, value in probe.take().items()}
    assert counts == {"router_max_share_layer_1": 0.5, "router_diversity_layer_1": pytest.approx(0.25)}


@pytest.mark.slow
def test_a_recorded_mixture_has_its_routers_in_the_record_and_trains_on_the_same_bits(tmp_path):
    "Two micro-batches a step; the collapse that is planted late is found with its layer."

    def train(recorder=None):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict(
            {
                "router": torch.nn.Linear(8, 4, bias=False),
                "experts": torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)),
            }
        )
        model.forward = lambda x: sum(
            p[..., None] * e(x)
            for p, e in zip(model["router"](x).softmax(-1).unbind(-1), model["experts"], strict=True)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        ticket = Recorder(model, optimizer, tmp_path) if recorder else contextlib.nullcontext()
        with ticket as active:
            for step in range(80):
                if step == 40:
                    with torch.no_grad():
                        model["router"].weight[2] = 50.0
                for _ in range(2):
                    tokens = torch.randn(32, 8)
                    model.forward(tokens.abs() if step >= 40 else tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if active is not None:
                    active.step(1.0)
        return [p.detach().clone() for p in model.parameters()]

    plain, recorded = train(), train(recorder=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    record = open_run(tmp_path)
    shares = record["scalars"]["router_max_share_router"]
    assert float(shares[:40].max()) < 1 and (shares[40:] == 1).all()
    (finding,) = find_expert_collapse(record)
    assert 40 <= finding.onset <= 44 and finding.severity == "warning"
