"Accumulation: every planted denominator is recovered, the accumulator gives the full-batch gradient alone and in two processes."
import itertools
import os
import socket

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch.nn import functional as F

from stabilitylab.fixes.accumulate import TokenMeanAccumulator
from stabilitylab.models.lm import DecoderLM, LMConfig
from stabilitylab.replay.accumulation import Lengths, audit_accumulation, token_weights

CONFIG = LMConfig(vocab=32, seq=24, d_model=16, n_layer=1, n_head=2)


def loss_sum(model, s): return F.cross_entropy(model(s[:, :-1]).flatten(0, 1), s[:, 1:].flatten(), reduction='sum'), s.shape[1] - 1


def windows(sizes, seed=0):
    torch.manual_seed(seed)
    return [[torch.randint(32, (1, n + 1)) for n in ns] for ns in sizes]


SIZES = {'one each': ((6,), (2,), (11,), (19,)), 'two each': ((6, 3), (2, 14), (20, 9), (5, 1)), 'uneven': ((4, 17, 8), (12,), (3, 3), (21,))}


def planted(reduction, ranks, padding, shift):
    "A training step of a foreign project, written the way such steps are: with a fixed choice of denominators."
    def step(model, window):
        K, per_rank = len(window), len(window)//ranks
        counts = [sum(s.shape[1] - 1 for s in m) for m in window]
        longest = [max(s.shape[1] - 1 for s in m) for m in window]
        def denominator(i):
            n = len(window[i])*longest[i] if padding else counts[i] + (len(window[i]) if shift else 0)
            if reduction == 'token mean': return sum(len(m)*t if padding else c + (len(m) if shift else 0) for m, t, c in zip(window, longest, counts))
            if reduction == 'rank token mean': return ranks*sum(counts[j] for j in range(i % ranks, K, ranks))
            return n*{'micro mean': K, 'forgot the division': 1, 'rank mean of means': ranks*per_rank}[reduction]
        logged = 0.
        for i, m in enumerate(window):
            total = sum(loss_sum(model, s)[0] for s in m)
            (total/denominator(i)).backward(); logged += float(total.detach())/denominator(i)
        return logged
    return step


MATRIX = [(r, ranks, p, s) for r, ranks, p, s in itertools.product(('token mean', 'micro mean', 'forgot the division', 'rank token mean', 'rank mean of means'), (1, 2), (False, True), (False, True)) if not (p and s) and not (r.startswith('rank') and (ranks == 1 or p or s))]


@pytest.mark.parametrize('sizes', SIZES)
@pytest.mark.parametrize('reduction, ranks, padding, shift', MATRIX, ids=lambda v: str(v))
def test_the_planted_denominator_is_recovered(sizes, reduction, ranks, padding, shift):
    model = DecoderLM(CONFIG)
    told = audit_accumulation(model, windows(SIZES[sizes]), loss_sum, ranks, training_step=planted(reduction, ranks, padding, shift))
    weights = token_weights(Lengths(tuple(SIZES[sizes]), 0, ranks))
    base = {'token mean': 'padding counted, one denominator' if padding else 'token mean', 'micro mean': 'padding counted' if padding else 'labels counted before the shift' if shift else 'mean of micro-batch means',
        'forgot the division': 'padding counted' if padding else 'labels counted before the shift' if shift else 'mean of micro-batch means', 'rank token mean': 'mean of rank token means', 'rank mean of means': 'mean of micro-batch means'}[reduction]
    def shape(k): return weights[k]/np.linalg.norm(weights[k])
    assert told['residual'] < 1e-3 and np.allclose(shape(told['found']), shape(base), atol=1e-6), (told['found'], base) # schemes with equal weights are one
    if reduction == 'forgot the division' and told['found'] == base: assert np.isclose(told['scale'], 4, rtol=1e-3)
    same = np.allclose(weights[base], weights['token mean']) # one sequence a micro-batch has no padding
    assert told['right'] == (reduction == 'token mean' and not shift and (not padding or same))


def test_weights_equal_a_slow_twin():
    sizes, ranks = SIZES['uneven'], 2
    w = token_weights(Lengths(sizes, 0, ranks)); i = 0
    for k, m in enumerate(sizes):
        for n in m:
            mates = [j for j in range(len(sizes)) if j % ranks == k % ranks]
            want = {'token mean': 1/sum(map(sum, sizes)), 'mean of micro-batch means': 1/(4*sum(m)), 'mean of rank token means': 1/(2*sum(sum(sizes[j]) for j in mates)), 'mean of rank means of means': 1/(2*len(mates)*sum(m)), 'mean of sequence means': 1/(7*n), 'padding counted': 1/(4*len(m)*max(m)), 'labels counted before the shift': 1/(4*(sum(m) + len(m)))}
            for name, x in want.items(): assert np.isclose(w.loc[i, name], x), name
            i += 1


def test_the_bias_is_the_covariance_of_lengths_and_losses():
    "L_naive - L_full = -Cov(n, mean loss)/mean n, over micro-batches."
    model, window = DecoderLM(CONFIG), windows(SIZES['one each'])
    told = audit_accumulation(model, window, loss_sum)
    with torch.no_grad(): n, mean = np.array([(s[0].shape[1] - 1, float(loss_sum(model, s[0])[0])/(s[0].shape[1] - 1)) for s in window]).T
    gap = told['schemes'].loc['mean of micro-batch means', 'logged_loss'] - told['true_loss']
    assert np.isclose(gap, -np.cov(n, mean, bias=True)[0, 1]/n.mean(), rtol=1e-4)
    equal = audit_accumulation(model, windows(((7,), (7,), (7,))), loss_sum)
    assert equal['schemes'].loc['mean of micro-batch means', 'relative_error'] < 1e-6 and equal['effective_tokens'] == 1


@pytest.mark.parametrize('scaled', [False, True])
def test_the_accumulator_gives_the_full_gradient(scaled):
    model, window = DecoderLM(CONFIG), windows(SIZES['uneven'])
    total, count = map(sum, zip(*(loss_sum(model, s) for m in window for s in m)))
    (total/count).backward(); full = [p.grad.clone() for p in model.parameters()]; model.zero_grad()
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.) if scaled else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.)
    acc = TokenMeanAccumulator(model.parameters(), scaler)
    for m in window: acc.backward(*(lambda pairs: (sum(p[0] for p in pairs), sum(p[1] for p in pairs)))([loss_sum(model, s) for s in m]))
    loss = acc.finish()
    if scaled: scaler.unscale_(optimizer)
    error = torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), full)]).norm()/torch.cat([g.flatten() for g in full]).norm()
    assert error < 1e-6 and abs(loss - float((total/count).detach())) < 1e-6*loss


def _rank(rank, port, out):
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.distributed.init_process_group('gloo', rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(DecoderLM(CONFIG))
    acc = TokenMeanAccumulator(model.parameters(), average_over=2); acc.unit = 32
    for m in windows(SIZES['two each'])[rank::2]:
        total, count = map(sum, zip(*(loss_sum(model, s) for s in m)))
        acc.backward(total, count)
    loss = acc.finish()
    if rank == 0: torch.save({'loss': loss, 'grads': [p.grad for p in model.parameters()]}, out)
    torch.distributed.destroy_process_group()


def test_two_ddp_processes_give_the_full_gradient(tmp_path):
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path/'out.pt')), nprocs=2)
    got = torch.load(tmp_path/'out.pt', weights_only=True)
    torch.manual_seed(0)
    model = DecoderLM(CONFIG)
    total, count = map(sum, zip(*(loss_sum(model, s) for m in windows(SIZES['two each']) for s in m)))
    (total/count).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (torch.cat([g.flatten() for g in got['grads']]) - want).norm()/want.norm() < 1e-6 and abs(got['loss'] - float((total/count).detach())) < 1e-6
