"An audit recovers the planted denominator; the accumulator equals the full batch, scaled, in two processes."

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitylab import TokenMeanAccumulator, audit_accumulation
from stabilitylab.numerics.accumulation.weights import (
    DENOMINATORS,
    effective_share,
    make_window,
    mean_of_means_bias,
    token_weights,
)

VOCAB = 11


class Tiny(nn.Module):
    "Embedding, one layer, a head: enough for gradients that differ between sequences."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.drop, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.Linear(16, 16),
            nn.Dropout(0.3),
            nn.Linear(16, VOCAB),
        )

    def forward(self, ids):
        return self.head(self.drop(torch.tanh(self.mix(self.embed(ids)))))


def microbatch(lengths, pad_to, seed):
    "Token ids and labels of sequences of these lengths, padded on the right; n ids have n - 1 targets."
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (len(lengths), pad_to), generator=g)
    labels = ids.clone()
    for i, n in enumerate(lengths):
        labels[i, n:] = -100
    return {"ids": ids, "labels": labels}


def token_loss(model, mb):
    logits, labels = model(mb["ids"])[:, :-1], mb["labels"][:, 1:]
    loss = F.cross_entropy(
        logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="none", ignore_index=-100
    ).view(labels.shape)
    return loss, labels != -100


def loop(kind, ranks, steps, all_parts):
    "A hand-written training step with the planted mistake; written apart from the library's formulas."
    per_step = [
        sum(int((m["labels"][:, 1:] != -100).sum()) for m in all_parts[k::steps]) for k in range(steps)
    ]
    total = sum(per_step)

    def step(model, parts):
        own = sum(int((m["labels"][:, 1:] != -100).sum()) for m in parts)
        for k, m in enumerate(parts):
            loss, mask = token_loss(model, m)
            s, n = (loss * mask).sum(), mask.sum()
            by_seq = (loss * mask).sum(1) / mask.sum(1)
            value = {
                "token_mean": s * ranks / total,
                "microbatch_mean": s / n / steps,
                "step_mean": s * ranks / per_step[k] / steps,
                "rank_mean": s / own,
                "sequence_mean": by_seq.sum() * ranks / sum(len(p["ids"]) for p in all_parts),
                "sequence_mean_by_microbatch": by_seq.mean() / steps,
                "padded_mean": (loss * mask).mean() / steps,
                "unshifted_mean": s / (m["labels"] != -100).sum() / steps,
            }[kind]
            value.backward()

    return step


@pytest.mark.parametrize("kind", DENOMINATORS)
@pytest.mark.parametrize("ranks,steps,pad", list(itertools.product((1, 2, 3), (1, 2, 4), (0, 5))))
def test_planted_denominator_is_recovered(kind, ranks, steps, pad):
    rng = np.random.default_rng(ranks * 100 + steps * 10 + pad)
    lengths = [rng.integers(3, 15, rng.integers(1, 4)) for _ in range(ranks * steps)]
    parts = [microbatch(n, max(n) + pad, i) for i, n in enumerate(lengths)]
    found = audit_accumulation(Tiny(), parts, token_loss, loop(kind, ranks, steps, parts), ranks=ranks)
    assert kind == found.denominator or kind in found.alike, (found.words, found.candidates)
    assert found.residual < 1e-4 and abs(found.factor - 1) < 1e-4


@pytest.mark.parametrize(
    "name,factor",
    {
        "not divided by the accumulation steps": 3,
        "divided by the accumulation steps once more": 1 / 3,
        "summed over ranks instead of averaged": 2,
        "averaged over ranks once more": 1 / 2,
    }.items(),
)
@pytest.mark.parametrize("kind", ["token_mean", "microbatch_mean"])
def test_planted_factor_is_named(kind, name, factor):
    parts = [microbatch(n, 14, i) for i, n in enumerate([[5, 9], [4], [13, 3], [8], [6, 6, 7], [12]])]
    right = loop(kind, 2, 3, parts)

    def step(model, own):
        right(model, own)
        for p in model.parameters():
            p.grad *= factor

    found = audit_accumulation(Tiny(), parts, token_loss, step, ranks=2)
    assert (
        found.denominator == kind
        and found.factor == pytest.approx(factor, rel=1e-4)
        and name in found.factor_names
    )


def test_labels_counted_before_the_shift_over_the_window():
    parts = [microbatch(n, 14, i) for i, n in enumerate([[5, 9], [4], [13, 3]])]
    count = sum(int((m["labels"] != -100).sum()) for m in parts)

    def step(model, own):
        for m in own:
            loss, mask = token_loss(model, m)
            ((loss * mask).sum() / count).backward()

    found = audit_accumulation(Tiny(), parts, token_loss, step)
    assert found.denominator == "token_mean" and found.factor_names == ["labels counted before the shift"]


def test_what_is_no_denominator_is_unknown():
    parts = [microbatch(n, 14, i) for i, n in enumerate([[5, 9], [4], [13, 3]])]

    def noisy(model, own):
        model.train()
        loop("token_mean", 1, 3, parts)(model, own)

    found = audit_accumulation(Tiny(), parts, token_loss, noisy)
    assert found.denominator == "unknown" and "Dropout" in found.words


def test_audit_leaves_the_model_as_it_was():
    model, parts = Tiny().train(), [microbatch([5, 9], 10, 0), microbatch([4], 6, 1)]
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.mix.eval()  # a frozen part
    before = {n: p.clone() for n, p in model.named_parameters()}
    audit_accumulation(model, parts, token_loss, loop("microbatch_mean", 1, 2, parts))
    assert (
        model.training
        and not model.mix.training
        and (model.head.weight.grad == 1).all()
        and model.mix.weight.grad is None
        and all(torch.equal(before[n], p) for n, p in model.named_parameters())
    )


def test_bias_formula_equals_two_plain_means():
    "The two sentences in closed form, and Cov(n, l) against means taken by hand."
    n = np.array([6, 2])
    w = token_weights(make_window(n.tolist()), "microbatch_mean")
    assert (
        (w * n).sum() == pytest.approx(1)
        and w[1] / w[0] == pytest.approx(3)
        and effective_share(n) == pytest.approx(0.75)
    )
    rng = np.random.default_rng(0)
    for _ in range(100):
        n, loss = rng.integers(1, 500, 8), rng.normal(2, 1, 8)
        token_mean = (n * loss).sum() / n.sum()
        assert mean_of_means_bias(n, loss) == pytest.approx(loss.mean() - token_mean, abs=1e-12)


def full_gradient(model, parts):
    "Gradient and loss of the token mean over all micro-batches in one batch."
    both = [token_loss(model, m) for m in parts]
    loss = sum((each * mask).sum() for each, mask in both) / sum(mask.sum() for _, mask in both)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulator_equals_the_full_batch(scaled):
    model, parts = (
        Tiny().eval(),
        [microbatch(n, 14, i) for i, n in enumerate([[5, 9], [4], [13, 3], [2, 2, 3]])],
    )
    loss, full = full_gradient(model, parts)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    collect = TokenMeanAccumulator(model, scaler)
    for _ in range(2):
        optimizer.zero_grad()
        for m in parts:
            each, mask = token_loss(model, m)
            collect.backward((each * mask).sum(), mask.sum())
        done = collect.finish()
        if scaled:
            scaler.unscale_(optimizer)
            scaler.update()
    error = (
        torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), full, strict=False)]).norm()
        / torch.cat([g.flatten() for g in full]).norm()
    )
    assert (
        error < 1e-6
        and done.loss == pytest.approx(loss, rel=1e-6)
        and done.tokens == 4 + 8 + 3 + 12 + 2 + 1 + 1 + 2
    )


def ddp_rank(rank, meet, queue):
    "One of two processes: three micro-batches a rank, DDP, one step."
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    try:
        parts = [microbatch(n, 14, i) for i, n in enumerate([[5, 9], [4], [13, 3], [2, 2, 3], [14], [3]])]
        plain = Tiny().eval()
        loss, full = full_gradient(plain, parts)
        model = nn.parallel.DistributedDataParallel(plain)
        collect, own = TokenMeanAccumulator(model), parts[rank * 3 : rank * 3 + 3]
        for i, m in enumerate(own):
            with model.no_sync() if i < 2 else torch.enable_grad():
                each, mask = token_loss(model, m)
                collect.backward((each * mask).sum(), mask.sum())
        done = collect.finish()
        error = (
            torch.cat([(p.grad - g).flatten() for p, g in zip(plain.parameters(), full, strict=False)]).norm()
            / torch.cat([g.flatten() for g in full]).norm()
        )
        queue.put((float(error), done.loss - loss, done.tokens))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow  # starts two processes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_accumulator_under_two_process_ddp(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=ddp_rank, args=(r, tmp_path / "meet", queue)) for r in range(2)]
    for w in workers:
        w.start()
    got = [queue.get(timeout=120) for _ in workers]
    for w in workers:
        w.join(60)
    assert all(error < 1e-6 and abs(gap) < 1e-6 and tokens == got[0][2] for error, gap, tokens in got), got


def test_sampled_coordinates_give_the_same_verdict():
    from stabilitylab.numerics.accumulation.audit import sequence_gradients

    parts = [microbatch([5, 9], 10, 0), microbatch([4], 6, 1)]
    every, few = (sequence_gradients(Tiny().eval(), [parts], token_loss, most) for most in (10**7, 400))
    assert every.share == 1 and few.share < 0.5 and every.each.shape[0] == few.each.shape[0] == 3
