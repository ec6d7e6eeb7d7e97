"""Attention written by hand in many styles, and models drawn from transformers' list: right, or refused.

The truth is the softmax as PyTorch's own kernels see it, below all that the watch looks at, in float64.
"""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitylab.probe.attention.call import ScoreBlock, biased_logits, products, visible
from stabilitylab.probe.attention.heads import attention_statistics
from stabilitylab.probe.attention.report import watch_attention

ALLOWED, HIDDEN = 1e-5, -1e4


class Softmaxes(TorchDispatchMode):
    "Keeps what every softmax of PyTorch's own kernels is given."

    def __init__(self):
        super().__init__()
        self.scores = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kinds = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
        if func in kinds and args[0].ndim >= 2:
            self.scores.append(args[0].detach().double())
        return func(*args, **(kwargs or {}))


def differences(call, got, x):
    "How far a call lies from the scores of one softmax: entropy, logits, largest logit, hidden keys."
    (b, h, n, _), m = call.q.shape, call.k.shape[2]
    piece = ScoreBlock(slice(0, b), slice(0, call.k.shape[1]), slice(0, n), slice(0, m))
    mask = visible(call, piece)
    mask = torch.ones(b, h, n, m, dtype=torch.bool) if mask is None else mask.expand(b, h, n, m)
    x = x.reshape(b, h, n, -1)[..., :m]
    shown = x > HIDDEN
    rows = shown.any(-1, keepdim=True)
    p = x.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num()
    entropy = -torch.special.xlogy(p, p).sum((0, 2, 3)) / rows.sum((0, 2, 3))
    raw, both = products(call, piece), mask & shown
    seen, size = biased_logits(call, piece, raw.clone()), both.sum(-1, keepdim=True).clamp(min=1)
    apart = (seen - x).masked_fill(~both, 0)
    if call.scores is None:  # the weights do not know a shift of a row
        apart = (apart - apart.sum(-1, keepdim=True) / size).masked_fill(~both, 0)
    top = (raw if call.scores is None else x).masked_fill(~mask, -torch.inf).amax((0, 2, 3))
    largest = (top - torch.as_tensor(got.attn_logit_max)).abs() / top.abs().clamp(min=1)
    return {
        "entropy": float((entropy - torch.as_tensor(got.attn_entropy)).abs().max()),
        "logits": float(apart.abs().max() / x.masked_fill(~both, 0).abs().max().clamp(min=1)),
        "largest": float(largest.max()),
        "hidden": int(((mask != shown) & rows).sum()),
    }


def judged(model, batch):
    "(worst difference of each attention that was caught, what was refused)."
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with Softmaxes() as softmaxes, math_only:
        watch = watch_attention(model, batch, measure=lambda call: (call, attention_statistics(call)))
    worst = []
    for caught in watch.caught:
        call, got = caught.statistics
        pairs = math.prod(call.q.shape[:3])
        columns = {call.k.shape[2], call.k.shape[2] + (call.sinks is not None)}
        fits = [x for x in softmaxes.scores if x.numel() in {pairs * c for c in columns}]
        found = [differences(call, got, x) for x in fits]
        worst.append(min((max(d.values()) for d in found), default=math.inf))
    return worst, watch.unrecognised()


class Hand(nn.Module):
    "One attention whose arithmetic is handed in."

    def __init__(self, attend, heads=4, width=32):
        super().__init__()
        self.num_heads, self.attend = heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.qkv.weight.data.mul_(4)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def later(q):
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)


def written_mask(q, k, v):
    s = q @ k.mT * q.shape[-1] ** -0.5
    s[:, :, later(q)] = -math.inf
    return s.softmax(-1) @ v


def written_through_a_view(q, k, v):
    s = q @ k.mT / 8
    s[..., 3:5, 0].mul_(9)
    return s.softmax(-1) @ v


def clamped_in_place(q, k, v):
    s = (q @ k.mT / 3).clamp_(max=2.0)
    return s.masked_fill(later(q), -1e9).softmax(-1) @ v


def temperature_by_head(q, k, v):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    temperature = torch.linspace(1, 9, q.shape[1])[:, None, None]
    s = torch.einsum("bhid,bhjd->bhij", q, k) * temperature
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


def row_maximum_first(q, k, v):
    s = q @ k.mT
    return ((s - s.amax(-1, keepdim=True)) * 0.3).softmax(-1) @ v


def row_maximum_after_a_temperature(q, k, v):
    s = q @ k.mT * torch.linspace(1, 9, q.shape[1])[:, None, None]
    return (s - s.amax(-1, keepdim=True)).softmax(-1) @ v


def keys_times_queries(q, k, v):
    s = (k @ q.mT).transpose(-2, -1) / 64
    return s.masked_fill(later(q), -math.inf).softmax(-1) @ v


def softmax_over_the_other_axis(q, k, v):
    return (k @ q.mT / 64).softmax(-2).mT @ v


def fill_before_scores(q, k, v):
    s = (q @ k.mT) * torch.tensor(0.125)
    return torch.where(later(q), torch.tensor(-1e30), s).softmax(-1) @ v


def where_as_a_method(q, k, v):
    return (q @ k.mT / 8).where(~later(q), torch.tensor(-1e30)).softmax(-1) @ v


def mask_that_multiplies(q, k, v):
    s, seen = q @ k.mT / math.sqrt(v.size(-1)), (~later(q)).float()
    return (s * seen + -1e4 * (1 - seen)).softmax(-1) @ v


def scale_of_64_as_a_tensor(q, k, v):
    return ((q @ k.mT) / torch.tensor([64.0])).softmax(-1) @ v


def bias_plus_scaled_product(q, k, v):
    bias = -torch.arange(q.shape[2]).float().expand(q.shape[2], -1)
    return torch.add(bias, q @ k.mT, alpha=0.125).softmax(-1) @ v


def scales_before_and_after_a_bias(q, k, v):
    bias = -torch.arange(q.shape[2]).flip(0).float()
    return ((q / 2) @ (k / 2).mT).mul_(0.5).add_(bias).mul_(4).softmax(-1) @ v


def capped(q, k, v):
    s = 5 * torch.tanh(q @ k.mT / 15)
    return s.masked_fill_(later(q), torch.finfo(s.dtype).min).softmax(-1) @ v


def into_a_buffer(q, k, v):
    s = torch.empty(*q.shape[:3], k.shape[2])
    torch.matmul(q, k.mT, out=s)
    torch.mul(s, 0.25, out=s)
    return s.softmax(-1) @ v


def queries_in_chunks(q, k, v):
    return torch.cat([((part @ k.mT) * 0.125).softmax(-1) @ v for part in q.split(5, 2)], 2)


def one_head_after_the_other(q, k, v):
    heads = [torch.softmax(q[:, i] @ k[:, i].mT * 0.7, 2) @ v[:, i] for i in range(q.shape[1])]
    return torch.stack(heads, 1)


def exponentials_by_hand(q, k, v):
    e = (q @ k.mT / 3 - 2).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


def products_by_broadcast(q, k, v):
    return ((q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / 8).softmax(-1) @ v


STYLES = {  # how it is written -> how many attentions are caught; 0: refused
    written_mask: 1,
    written_through_a_view: 1,
    clamped_in_place: 1,
    temperature_by_head: 1,
    row_maximum_first: 1,
    row_maximum_after_a_temperature: 0,
    keys_times_queries: 1,
    softmax_over_the_other_axis: 0,
    fill_before_scores: 1,
    where_as_a_method: 1,
    mask_that_multiplies: 1,
    scale_of_64_as_a_tensor: 1,
    bias_plus_scaled_product: 1,
    scales_before_and_after_a_bias: 1,
    capped: 1,
    into_a_buffer: 1,
    queries_in_chunks: 3,
    one_head_after_the_other: 4,
    exponentials_by_hand: 0,
    products_by_broadcast: 0,
}


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_attention_by_hand_is_right_or_refused(style):
    torch.manual_seed(1)
    model, x = nn.ModuleDict({"attention": Hand(style)}), torch.randn(2, 12, 32)
    model.forward = lambda x: model["attention"](x)
    worst, refused = judged(model, x)
    assert len(worst) == STYLES[style]
    assert all(w <= ALLOWED for w in worst), worst
    assert bool(refused) == (STYLES[style] == 0)


def test_a_lost_row_maximum_is_the_reason_of_the_refusal():
    model = nn.ModuleDict({"attention": Hand(row_maximum_after_a_temperature)})
    model.forward = lambda x: model["attention"](x)
    _, refused = judged(model, torch.randn(2, 12, 32))
    assert "subtracted from each row" in " ".join(refused)


# ── models drawn by name from transformers' own list (random.Random(19).shuffle of the sorted names) ──

SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "emb_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_local_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **{"vocab_size": 60, "image_size": 32, "patch_size": 8, "num_channels": 3, "sliding_window": 4},
    **{"attention_window": 4, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
}
DRAWN = (  # model, its implementations
    [(name, "eager") for name in ("data2vec-text", "mobilevit", "splinter", "minimax_m2", "afmoe")]
    + [(name, "eager") for name in ("phimoe", "gemma3_text", "mt5", "funnel", "doge", "canine", "diffllama")]
    + [(name, "eager") for name in ("beit", "gpt_oss", "led", "longt5", "xlnet", "openai-gpt", "falcon")]
    + [(name, "sdpa") for name in ("phimoe", "gemma3_text", "qwen2", "persimmon", "beit", "falcon")]
)


def small(name, implementation):
    "A small random model of a family, and a batch that it takes."
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    if name not in MODEL_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {name}")
    kind, generator = CONFIG_MAPPING[name], torch.manual_seed(0)
    base = kind()
    known = set(vars(base)) | set(kind.attribute_map)
    sizes = {k: v for k, v in SIZES.items() if k in known and isinstance(getattr(base, k, None), int)}
    if getattr(base, "num_key_value_heads", 0) == getattr(base, "num_attention_heads", 1):
        sizes["num_key_value_heads"] = 4
    config = kind(**sizes)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    named = MODEL_MAPPING_NAMES[name]
    cls = getattr(transformers, named if isinstance(named, str) else named[0])
    model = cls._from_config(config, attn_implementation=implementation).eval()
    for p in model.parameters():
        p.data.mul_(3 if p.ndim > 1 else 1)
    takes = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 50, (2, 12), generator=generator)
    if "input_ids" not in takes:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    seen = torch.ones(2, 12, dtype=torch.long)
    seen[0, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": seen}
    return model, batch | ({"decoder_input_ids": ids[:, :7]} if "decoder_input_ids" in takes else {})


@pytest.mark.slow  # builds 25 models
@pytest.mark.parametrize(("name", "implementation"), DRAWN)
def test_a_model_drawn_by_name_is_right_or_refused(name, implementation):
    model, batch = small(name, implementation)
    worst, refused = judged(model, batch)
    assert all(w <= ALLOWED for w in worst), worst
    assert worst or refused
