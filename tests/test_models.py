"The small models: every choice builds, learns and is deterministic; positions and masks mean what they say."

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stabilitylab.models.decoder import LanguageModel, TranslationModel
from stabilitylab.models.parts import CHOICES, ModelConfig, rotate, t5_buckets
from stabilitylab.models.tasks import (
    copy_task,
    model_loss,
    text_task,
    translation_task,
)
from stabilitylab.names.errors import InputError

SHAPE = dict(vocab=43, d_model=16, n_layer=2, n_head=2, seq=24)
SINGLE = [(field, value) for field, values in CHOICES.items() for value in values]


@pytest.mark.parametrize("field, value", SINGLE)
@pytest.mark.parametrize("build", [LanguageModel, TranslationModel])
def test_every_choice_builds_steps_and_is_the_same_again(build, field, value):
    def run():
        torch.manual_seed(0)
        model = build(ModelConfig(**SHAPE | {field: value}))
        task = (
            translation_task(longest=3, batch=4) if build is TranslationModel else copy_task(8, 43, batch=4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(3):
            loss = model_loss(model, task.at(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        missing = [n for n, p in model.named_parameters() if p.grad is None]
        return losses, missing

    first, missing = run()
    assert first == run()[0] and all(map(math.isfinite, first))
    assert all("attn" in n and field == "norm_place" for n in missing), missing


@pytest.mark.parametrize(
    "place, norm", list(itertools.product(("pre", "post", "peri", "after", "b2t"), ("ln", "rms")))
)
def test_the_loss_starts_near_the_log_of_the_vocabulary(place, norm):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=128, d_model=32, norm_place=place, norm=norm))
    loss = model(torch.randint(128, (4, 32)), torch.randint(128, (4, 32))).item()
    assert abs(loss - math.log(128)) < 0.25


@pytest.mark.parametrize("positions", CHOICES["positions"])
def test_a_causal_model_does_not_see_ahead(positions):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(**SHAPE | {"positions": positions, "registers": 2}))
    a = torch.randint(43, (2, 10))
    b = a.clone()
    b[:, 6:] = (b[:, 6:] + 1) % 43
    torch.testing.assert_close(model(a)[:, :6], model(b)[:, :6], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(model(a)[:, 6:], model(b)[:, 6:])


@pytest.mark.parametrize("positions", ["none", "t5", "alibi", "rope", "rope_qkv", "shaw"])
def test_relative_positions_do_not_know_where_they_start(positions):
    torch.manual_seed(0)
    from stabilitylab.models.attention import Attention

    attention = Attention(ModelConfig(**SHAPE | {"positions": positions}), causal=False)
    x = torch.randn(1, 6, 16)
    hidden = torch.cat([torch.randn(1, 4, 16), x], dim=1)
    valid = torch.tensor([[False] * 4 + [True] * 6])
    torch.testing.assert_close(attention(hidden, None, valid)[:, 4:], attention(x), rtol=1e-4, atol=1e-5)


def test_rotation_is_a_rotation_of_complex_numbers():
    x = torch.randn(1, 1, 7, 8, dtype=torch.float64).float()
    z = torch.complex(x[..., :4].double(), x[..., 4:].double()).numpy()
    angle = np.arange(7)[:, None] * 1e4 ** (-np.arange(4) / 4)
    want = z * np.exp(1j * angle)
    got = rotate(x).double().numpy()
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-5)


def test_t5_buckets_grow_with_the_distance():
    far = -torch.arange(0, 400)
    buckets = t5_buckets(far, both_ways=False)
    assert (buckets.diff() >= 0).all() and buckets[0] == 0 and buckets[-1] == 31
    both = t5_buckets(torch.arange(-300, 301), both_ways=True)
    assert both.min() == 0 and both.max() == 31 and (both[:300] < 16).all() and (both[301:] >= 16).all()


def test_tied_models_have_one_tensor_and_capped_logits_are_bounded():
    model = LanguageModel(ModelConfig(**SHAPE | {"tied": True, "output_cap": 5.0, "init_std": 2.0}))
    assert model.lm_head.weight is model.embed.weight
    assert model(torch.zeros(1, 4, dtype=torch.long)).abs().max() <= 5


@pytest.mark.slow  # 600 steps
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_small_translator_learns(positions):
    torch.manual_seed(0)
    model = TranslationModel(
        ModelConfig(vocab=15, d_model=32, n_layer=1, n_head=2, seq=16, positions=positions)
    )
    task = translation_task(words=6, longest=1, batch=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(600):
        optimizer.zero_grad()
        loss = model_loss(model, task.at(step))
        loss.backward()
        optimizer.step()
    assert loss < 0.3 * math.log(6)


def test_tasks_are_functions_of_the_step():
    for make in (text_task, copy_task, translation_task):
        a, b, c = make(seed=1), make(seed=1), make(seed=2)
        one, two, other = a.at(7), b.at(7), c.at(7)
        assert all(torch.equal(one[k], two[k]) for k in one)
        assert not all(one[k].shape == other[k].shape and torch.equal(one[k], other[k]) for k in one)
        known = one["tokens"].max() < a.vocab and one["tokens"].shape[1] <= a.seq
        assert known and one["targets"].max() < a.vocab


def test_the_loss_is_the_mean_over_targets_that_count():
    model = LanguageModel(ModelConfig(**SHAPE))
    tokens = torch.randint(43, (3, 8))
    targets = tokens.clone()
    targets[1] = -100
    logits = model(tokens)
    want = F.cross_entropy(logits[[0, 2]].flatten(0, 1), targets[[0, 2]].flatten())
    torch.testing.assert_close(model(tokens, targets), want)


@pytest.mark.parametrize(
    "bad",
    [
        {"norm": "batch"},
        {"dropout": 1.0},
        {"n_layer": 0},
        {"d_model": 15},
        {"registers": -1},
        {"decoder_positions": "x"},
    ],
)
def test_bad_configurations_are_told(bad):
    with pytest.raises(InputError, match=f"`{next(iter(bad))}`"):
        ModelConfig(**SHAPE | bad)
