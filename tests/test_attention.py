"The streaming statistics of attention against a slow twin that writes the matrix out in float64."

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from stabilitylab.probe.attention.call import AttentionCall
from stabilitylab.probe.attention.heads import attention_statistics

NAMES = [
    "attn_logit_max",
    "attn_entropy",
    "attn_entropy_rel",
    "attn_lse",
    "attn_lse_max",
    "mean_distance",
    "null_weight",
    "sink_score",
    "sink_uniform",
    "sink_share",
    "first_score",
    "sink_value_ratio",
    "sink_cosine",
    "rows",
    "blind_rows",
    "broken_rows",
    "nonfinite_count",
]


def who_sees(call):
    "Visibility and added bias, (batch, head, query, key), pair by pair from the definitions."
    b, h, n, _ = call.q.shape
    m = call.k.shape[2]
    seen, bias = torch.ones(b, h, n, m, dtype=torch.bool), torch.zeros(b, h, n, m, dtype=torch.float64)
    query, key = torch.arange(n)[:, None] + call.offset, torch.arange(m)[None]
    left, right = call.window
    for given, rule in (
        (call.causal, lambda: key <= query),
        (left is not None, lambda: key >= query - left),
        (right is not None, lambda: key <= query + right),
    ):
        if given:
            seen &= rule()
    for mask in call.masks:
        if mask.dtype == torch.bool:
            seen &= mask
        else:
            shown = mask > -9999.0
            seen &= shown
            bias = bias + torch.where(shown, mask.double(), 0.0)
    if call.documents is not None:
        own = call.documents[:, call.offset : call.offset + n]
        seen &= (own[:, :, None] == call.documents[:, None])[:, None]
    if call.mask_mod is not None or call.score_mod is not None:
        index = [
            torch.arange(s).view([-1 if a == i else 1 for a in range(4)]) for i, s in enumerate((b, h, n, m))
        ]
        if call.mask_mod is not None:
            seen &= call.mask_mod(*index)
    return seen, bias


class Twin:
    "One head's sums, row by row."

    def __init__(self, call, documents):
        self.call, self.documents = call, documents
        self.seen, self.bias = who_sees(call)

    def head(self, head):
        out = {
            k: [] for k in ["entropy", "relative", "lse", "far", "null", "score", "uniform", "first", "ratio"]
        }
        out |= dict(top=-math.inf, blind=0, broken=0, nonfinite=0, best=(-1.0, 0, 0))
        for sequence in range(self.call.q.shape[0]):
            self.sequence(head, sequence, out)
        return out

    def scores(self, head, sequence):
        call = self.call
        kv = head // (call.q.shape[1] // call.k.shape[1])
        raw = call.q[sequence, head].double() @ call.k[sequence, kv].double().T * call.factor
        made = raw if not call.softcap else call.softcap * torch.tanh(raw / call.softcap)
        if call.score_mod is not None:
            n, m = raw.shape
            index = (
                torch.tensor(sequence),
                torch.tensor(head),
                torch.arange(n)[:, None],
                torch.arange(m)[None],
            )
            made = call.score_mod(made, *index)
        return raw, made + self.bias[sequence, head], kv

    def sequence(self, head, sequence, out):
        call, seen = self.call, self.seen[sequence, head]
        raw, made, kv = self.scores(head, sequence)
        n, m = raw.shape
        shown = raw[seen]
        out["nonfinite"] += int((~torch.isfinite(shown)).sum())
        if len(shown):
            top = math.nan if shown.isnan().any() else float(shown.max())
            out["top"] = math.nan if math.isnan(top) or math.isnan(out["top"]) else max(top, out["top"])
        weights, counts = torch.zeros(n, m, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
        for i in range(n):
            row = made[i][seen[i]]
            if not len(row):
                out["blind"] += 1
                continue
            if row.isnan().any() or (row == math.inf).any() or (row == -math.inf).all():
                out["broken"] += 1
                continue
            counts[i] = True
            lse = torch.logsumexp(row, 0)
            p = torch.exp(row - lse)
            out["entropy"].append(float(-torch.xlogy(p, p).sum()))
            if len(row) > 1:
                out["relative"].append(out["entropy"][-1] / math.log(len(row)))
            whole = lse if call.sinks is None else torch.logaddexp(lse, call.sinks[head].double())
            out["lse"].append(float(whole))
            out["null"].append(float(1 - torch.exp(lse - whole)))
            far = (torch.arange(m)[seen[i]] - i - call.offset).abs()
            out["far"].append(float((p * far).sum()))
            weights[i, seen[i]] = torch.exp(row - whole)
        self.columns(head, kv, sequence, weights, seen & counts[:, None], out)

    def columns(self, head, kv, sequence, weights, seen, out):
        n_seen = seen.sum(0).double()
        received = weights.sum(0) / n_seen.clamp(min=1)
        even = (seen.double() / seen.sum(1, keepdim=True).clamp(min=1)).sum(0) / n_seen.clamp(min=1)
        for document in self.documents[sequence].unique():
            at = ((self.documents[sequence] == document) & (n_seen > 0)).nonzero()[:, 0]
            if not len(at):
                continue
            good = at[n_seen[at] >= 0.25 * n_seen[at].max()]
            best = int(good[(received[good] >= received[good].max() - 1e-6).nonzero()[0, 0]])
            out["score"].append(float(received[best]))
            out["uniform"].append(float(even[best]))
            out["first"].append(float(received[at[0]]))
            if self.call.v is not None:
                norm = self.call.v[sequence, kv].double().norm(dim=-1)
                out["ratio"].append(float(norm[best] / norm[n_seen > 0].mean()))
            if out["score"][-1] > out["best"][0]:
                queries = self.call.q[sequence, head][self.seen[sequence, head][:, best]].double()
                key = self.call.k[sequence, kv, best].double()[None]
                out["best"] = out["score"][-1], float(torch.cosine_similarity(queries, key, -1).mean()), best


def twin(call, documents=None):
    "Every statistic of `attention_statistics`, (head,)."
    if documents is None:
        documents = torch.zeros(call.k.shape[0], call.k.shape[2], dtype=torch.long)
    slow = Twin(call, documents)
    heads = [slow.head(h) for h in range(call.q.shape[1])]
    mean = lambda x: np.mean(x) if len(x) else math.nan  # noqa: E731 - a mean that is NaN for nothing
    rows = [
        {
            "attn_logit_max": x["top"],
            "attn_entropy": mean(x["entropy"]),
            "attn_entropy_rel": mean(x["relative"]),
            "attn_lse": mean(x["lse"]),
            "attn_lse_max": max(x["lse"], default=-math.inf),
            "mean_distance": mean(x["far"]),
            "null_weight": mean(x["null"]),
            "sink_score": mean(x["score"]),
            "sink_uniform": mean(x["uniform"]),
            "sink_share": mean(np.array(x["score"]) > 0.3),
            "first_score": mean(x["first"]),
            "sink_value_ratio": mean(x["ratio"]),
            "sink_cosine": x["best"][1] if x["score"] else math.nan,
            "rows": len(x["entropy"]),
            "blind_rows": x["blind"],
            "broken_rows": x["broken"],
            "nonfinite_count": x["nonfinite"],
        }
        for x in heads
    ]
    return {name: np.array([row[name] for row in rows]) for name in NAMES}


def assert_near(got, want, skip=()):
    "Every statistic, up to the last bits."
    for name in NAMES:
        if name not in skip:
            np.testing.assert_allclose(getattr(got, name), want[name], rtol=1e-5, atol=1e-9, err_msg=name)


def assert_same(call, documents=None, skip=(), **options):
    "The statistics of a call, after they were found equal to the twin's."
    got = attention_statistics(call, **options)
    assert_near(got, twin(call, documents), skip)
    return got


def inputs(n=13, m=13, scale=1.0, dtype=torch.float32, heads=4, kv=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, heads, n, 8, generator=g), torch.randn(2, kv, m, 8, generator=g)
    v = torch.randn(2, kv, m, 5, generator=g)
    return (q * scale).to(dtype), (k * scale).to(dtype), v.to(dtype)


ORDER = torch.ones(13, 13, dtype=torch.bool).tril()
PADDED = torch.ones(2, 1, 1, 13, dtype=torch.bool)
PADDED[0, ..., :4] = False
PADDED[1, ..., 9:] = False
PACKED = torch.tensor([[0] * 5 + [1] * 8, [0] * 2 + [1] * 6 + [2] * 5])
OWN = (PACKED[:, :, None] == PACKED[:, None])[:, None]
ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])[None, :, None, None] * -(
    (torch.arange(13)[:, None] - torch.arange(13)).abs().float()
)
RELATIVE = torch.randn(1, 4, 13, 13, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["compiled", "operators"])
def way(request, monkeypatch):
    "The compiled pass over tiles, and what a machine without a compiler does."
    if request.param == "operators":
        monkeypatch.setattr("stabilitylab.probe.attention.stream.tile_kernel", lambda dtype: None)


def hide(mask, value):
    return torch.zeros(mask.shape).masked_fill(~mask, value)


VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, None)},
    "two-sided window": {"window": (3, 2)},
    "padded": {"masks": (PADDED & ORDER,)},
    "padded on the right": {"masks": (PADDED,)},
    "float mask of -inf": {"masks": (hide(PADDED & ORDER, -math.inf),)},
    "float mask of -10,000": {"masks": (hide(PADDED & ORDER, -1e4),)},
    "least number and a relative bias": {
        "masks": (hide(PADDED & ORDER, torch.finfo(torch.float32).min), RELATIVE)
    },
    "ALiBi": {"causal": True, "masks": (ALIBI,)},
    "T5 bias": {"scale": 1.0, "masks": (RELATIVE,)},
    "learned sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "softmax plus one": {"sinks": torch.zeros(4)},
    "capped": {"causal": True, "softcap": 2.0},
    "capped, sinks, bias": {"masks": (hide(ORDER, -math.inf), ALIBI), "softcap": 2.0, "sinks": torch.ones(4)},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 5)},
    "score_mod": {"causal": True, "score_mod": lambda s, b, h, i, j: s * 0.5 + 0.1 * (j - i)},
}


@functools.cache
def variant_and_twin(variant, dtype, scale):
    "A call and what the twin says of it; once for both ways and all sizes of a tile."
    call = AttentionCall(*inputs(scale=scale, dtype=dtype), **VARIANTS[variant])
    return call, twin(call)


OTHERS = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64)]


@pytest.mark.slow
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, *OTHERS], ids=str)
def test_every_variant_equals_the_twin(dtype, subtests):
    for variant, scale in itertools.product(VARIANTS, (1.0, 40.0)):
        call, want = variant_and_twin(variant, dtype, scale)
        for size in (None, 40, 300):
            with subtests.test(variant=variant, scale=scale, size=size):
                assert_near(attention_statistics(call, size=size), want)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_grouped_heads(kv):
    q, k, v = inputs(kv=kv)
    for size in (None, 30):
        assert_same(AttentionCall(q, k, v, causal=True), size=size)


@pytest.mark.usefixtures("way")
def test_packed_documents_are_found_in_the_mask():
    q, k, v = inputs()
    for causal in (True, False):
        mask = OWN & ORDER if causal else OWN
        told = assert_same(AttentionCall(q, k, v, causal=causal, documents=PACKED), PACKED)
        found = assert_same(AttentionCall(q, k, v, masks=(mask,)), PACKED)
        assert told.documents == found.documents == 5
        np.testing.assert_array_equal(told.sinks_at, found.sinks_at)


@pytest.mark.usefixtures("way")
def test_cross_attention_and_a_cache():
    q, k, v = inputs(n=7)
    assert_same(AttentionCall(q, k, v, role="cross"), size=50)
    assert_same(AttentionCall(q, k, v, role="cross", masks=(PADDED,)), size=50)
    assert_same(AttentionCall(q, k, v, causal=True, offset=6), size=50)


@pytest.mark.usefixtures("way")
def test_nan_inf_and_blind_rows():
    q, k, v = inputs()
    q[0, 1, 3, 2], k[1, 0, 5, 1], q[1, 3, 12, 0] = math.nan, math.inf, -math.inf
    blind = ORDER.clone()
    blind[:3] = False
    for size in (None, 40):
        for variant in ({"causal": True}, {}, {"masks": (PADDED & ORDER,)}, {"masks": (blind,)}):
            # a cosine with an infinite key is NaN in both, by another path
            got = assert_same(AttentionCall(q, k, v, **variant), size=size, skip=("sink_cosine",))
            assert got.broken_rows.sum() and got.nonfinite_count.sum()
    q, k, v = inputs()
    nothing = assert_same(AttentionCall(q, k, v, masks=(torch.zeros(13, 13, dtype=torch.bool),)))
    assert nothing.documents == 0 and np.isnan(nothing.attn_entropy).all()
    assert (nothing.attn_logit_max == -math.inf).all() and (nothing.blind_rows == 26).all()


@pytest.mark.usefixtures("way")
def test_what_is_hidden_does_not_matter():
    q, k, v = inputs()
    call = AttentionCall(q, k, v, masks=(PADDED & ORDER,))
    dirty = k.clone()
    dirty[0, :, :4], dirty[1, :, 9:] = math.nan, math.inf
    want, got = attention_statistics(call), attention_statistics(AttentionCall(q, dirty, v, masks=call.masks))
    for name in NAMES:
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 17, 256, 1000, 4096])
def test_lengths(length):
    g = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, 1, length, 16, generator=g) for _ in range(3))
    got = assert_same(AttentionCall(q, k, v, causal=True))
    if length == 1:
        assert got.sink_score[0] == got.sink_uniform[0] == 1


def test_float32_is_as_good_where_it_is_chosen():
    q, k, v = inputs(n=200, m=200, heads=4, kv=2)
    assert_same(AttentionCall(q, k, v, causal=True), dtype=torch.float32)


@pytest.mark.usefixtures("way")
def test_sharp_heads_keep_their_digits():
    q = torch.eye(16)[None, None] * 6
    got = assert_same(AttentionCall(q, q, q, scale=0.5))
    assert 0 < got.attn_entropy[0] < 1e-4


def test_uniform_attention_is_no_sink():
    for length, want in ((8, 0.34), (64, 0.074)):
        z = torch.zeros(1, 1, length, 4)
        got = attention_statistics(AttentionCall(z, z, causal=True))
        assert abs(got.first_score[0] - want) < 0.001 and abs(got.first_score - got.first_uniform) < 1e-6
