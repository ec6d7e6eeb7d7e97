"Probes of a live model against slow twins: positions, padding, vocabulary, forgetting, repetition, memory."

import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitylab.models.decoder import LanguageModel, TranslationModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.probe.checks.forgetting import forgetting, longest_that_fits, repetition
from stabilitylab.probe.checks.invariants import check_training
from stabilitylab.probe.checks.positions import padding_influence, position_reliance, shift_invariance
from stabilitylab.probe.checks.vocabulary import check_vocabulary, sizes_to_take

TOKENS = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(0))


def language_model(**options):
    torch.manual_seed(0)
    return LanguageModel(
        ModelConfig(**({"vocab": 32, "seq": 16, "d_model": 16, "n_layer": 2} | options))
    ).eval()


def test_a_shift_equals_a_table_that_was_rolled():
    "The twin moves the rows of the table, not the indices."
    model = language_model()
    table = shift_invariance(model, lambda: model(TOKENS), shifts=(3,))
    twin, kept = copy.deepcopy(model), {}
    twin.pos_embed.weight.data = model.pos_embed.weight.data.roll(-3, 0)
    for name, one in (("at 0", model), ("at 3", twin)):
        handle = one.blocks[1].register_forward_hook(lambda _, x, y, name=name: kept.__setitem__(name, y))
        with torch.no_grad():
            kept[f"logits {name}"] = one(TOKENS)
        handle.remove()
    ratios = [
        float((kept["at 3"][i, j] - kept["at 0"][i, j]).norm() / kept["at 0"][i, j].norm())
        for i in range(2)
        for j in range(6)
    ]
    assert math.isclose(table.loc[3, "blocks.1"], np.mean(ratios), rel_tol=1e-4)
    p, q = (kept[f"logits {name}"].double().softmax(-1) for name in ("at 0", "at 3"))
    assert math.isclose(table.loc[3, "output"], float((p * (p / q).log()).sum(-1).mean()), rel_tol=1e-4)
    assert not model.pos_embed._forward_pre_hooks


class WithIds(nn.Module):
    "A model that takes `position_ids`, as Hugging Face has them: rotary or added."

    def __init__(self, is_rotary):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False)])
        self.is_rotary = is_rotary

    def forward(self, input_ids, position_ids=None):
        ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.embed(input_ids)
        angle = ids[..., None] * torch.exp(-torch.arange(0, 16, 2) / 4.0)
        turn = torch.polar(torch.ones_like(angle), angle)
        if not self.is_rotary:
            return self.head(x + angle.repeat(1, 1, 2).sin())
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        return self.head((turned @ turned.mT).softmax(-1) @ self.layers[0](x))


def test_position_ids_are_moved_and_rotary_ones_do_not_matter():
    absolute, rotary = (
        shift_invariance(m, lambda m=m: m(TOKENS), shifts=(1, 100)) for m in (WithIds(False), WithIds(True))
    )
    assert absolute.attrs["has_absolute"] and rotary.attrs["has_absolute"]
    assert (absolute.output > 1e-3).all() and (rotary.output.abs() < 1e-6).all()


def test_masked_padding_changes_nothing_and_a_mask_bug_is_found():
    torch.manual_seed(0)
    model = TranslationModel(ModelConfig(vocab=32, seq=32, d_model=16, n_layer=2)).eval()
    right = padding_influence(lambda n, v: model(F.pad(TOKENS, (0, n), value=v), TOKENS), (1, 5, 20))
    assert right.masked.all() and len(right) == 3
    other = padding_influence(lambda n, v: model(F.pad(TOKENS, (n, 0), value=v), TOKENS), (1,))
    assert not other.masked.any()  # padding on the left moves the positions
    unmasked = padding_influence(lambda n, v: model(F.pad(TOKENS, (0, n), value=v), TOKENS), (1, 5), (7, 9))
    base, padded = model(TOKENS, TOKENS), model(F.pad(TOKENS, (0, 5), value=9), TOKENS)
    rows = [(padded - base)[i, j].norm().item() for i in range(2) for j in range(6)]
    sizes = [base[i, j].norm().item() for i in range(2) for j in range(6)]
    assert math.isclose(unmasked.change.iloc[-1], max(rows) / np.mean(sizes), rel_tol=1e-4)


def changed_vocabulary(rows, tied=False, new=0):
    "A model and the same with other rows of embedding and head, and new random ones behind."
    model = language_model(tied=tied)
    other = copy.deepcopy(model)
    weight = model.embed.weight.data
    extra = weight[:new].roll(1, 1)
    other.embed.weight = nn.Parameter(torch.cat([weight[rows], extra]))
    head = model.lm_head.weight.data
    other.lm_head.weight = nn.Parameter(torch.cat([head[rows], extra]))
    return model, other


@pytest.mark.parametrize("tied", [False, True])
def test_trimmed_and_added_tokens(tied):
    kept = list(range(0, 32, 2))
    ids = [kept.index(i) if i in kept else -1 for i in range(32)]
    model, other = changed_vocabulary(kept, tied, new=3)
    text = 2 * (TOKENS // 2)
    table = check_vocabulary(model, other, ids, lambda m, t: m(t), text)
    assert table.ok["what was tied is tied"] == (not tied)
    assert table.drop("what was tied is tied").ok.all()
    if tied:
        other.lm_head.weight = other.embed.weight
        assert check_vocabulary(model, other, ids, lambda m, t: m(t), text).ok.all()


def test_a_row_one_off_and_a_long_row_are_found():
    kept = list(range(31))
    model, other = changed_vocabulary([*kept[1:], 31], new=1)
    table = check_vocabulary(model, other, [*kept, -1])
    assert not table.ok["kept rows of the embedding are the same"]
    assert (
        "31 of 31 kept rows are others, first id 0" in table.found["kept rows of the embedding are the same"]
    )
    model, other = changed_vocabulary(kept, new=2)
    other.embed.weight.data[-1] *= 50
    table = check_vocabulary(model, other, [*kept, -1])
    assert "1 of 2 outside" in table.found["new rows are like old ones"] and table.ok.iloc[0]


def test_sizes_to_take_are_the_next_multiples():
    table = sizes_to_take(None, range(1, 200))
    assert table["size"].tolist() == [n for n in range(1, 200) if n % 8]
    assert all(
        take % 8 == 0 and 0 < take - size < 8 for size, take in zip(table["size"], table["take"], strict=True)
    )
    assert sizes_to_take(language_model(n_head=8)).empty


def test_forgetting_leaves_all_as_it_was_and_equals_a_twin():
    model = language_model(vocab=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(x, x.roll(-1, 1)) for x in torch.randint(0, 32, (7, 2, 6))]

    def loss(model, batch):
        return model(*batch)

    loss(model, batches[0]).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    result = forgetting(model, optimizer, loss, batches[1], batches[2:], [batches[0]], clip=0.1)
    assert all(torch.equal(v, before[0][k]) for k, v in model.state_dict().items())
    state = optimizer.state_dict()["state"]
    assert all(torch.equal(state[i]["exp_avg"], s["exp_avg"]) for i, s in before[1]["state"].items())
    twin = copy.deepcopy(model)
    own = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    own.load_state_dict(before[1])
    loss(twin, batches[1]).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    own.step()
    with torch.no_grad():
        change = float(loss(twin, batches[0])) - float(loss(model, batches[0]))
    assert math.isclose(result.change, change, abs_tol=1e-5) and math.isclose(
        result.grad_norm, norm, rel_tol=1e-4
    )
    assert json.loads(json.dumps(result.to_dict()))["ordinary"] == list(result.ordinary)


def test_repetition_equals_a_twin_that_looks_back():
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 5, 40).tolist() for _ in range(3)]
    table = repetition(samples, samples[:1], longest=4)
    for n in range(1, 5):
        shares = []
        for ids in samples:
            grams = ["-".join(map(str, ids[i : i + n])) for i in range(40 - n + 1)]
            shares.append(np.mean([gram in grams[:i] for i, gram in enumerate(grams)]))
        assert math.isclose(table.share[n], np.mean(shares)) and math.isclose(table.reference[n], shares[0])
    assert repetition([[1, 2, 3] * 5]).attrs["loops"] == [15]


def test_memory_grows_with_the_length_and_the_fit_is_named():
    model = language_model(seq=512)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def peak(length, capacity=None):
        batch = (torch.zeros(2, length, dtype=torch.long),) * 2
        return longest_that_fits(
            model, optimizer, lambda m, b: m(*b), lambda n: tuple(x[:, :n] for x in batch), length, capacity
        )

    small, large = peak(128).peak[0], peak(512).peak[0]
    activations = 2 * 512 * 16 * 4 * 2 * 8  # bytes: both layers, at least eight tensors of the stream's size
    assert large - small > activations * 0.5
    table = peak(512, capacity=(small + large) / 2)
    assert table.fits.tolist() == [False] * (len(table) - 1) + [True] and table.length[0] == 512
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and not optimizer.state


def test_a_step_in_place_does_not_count_the_parameters_twice():
    from stabilitylab.probe.checks.forgetting import _at_rest, _LiveBytes

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    sizes = [4 * tensor.numel() for tensor in _at_rest(model, optimizer)]
    with _LiveBytes(_at_rest(model, optimizer)) as live, torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        assert live.live == live.peak == sum(sizes)
        kept = model.weight * 2
        assert live.live == sum(sizes) + 4 * kept.numel()


def test_a_check_of_training_leaves_statistics_and_frozen_parts_as_they_were():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).train()
    model[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(8, 4)
    check_training(model, torch.optim.AdamW(model.parameters()), batch, lambda m, b: m(b).square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [False, True, True]


def test_a_loss_that_fails_does_not_leave_a_model_without_positions():
    class Positioned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.nn.Embedding(4, 4)

    model, losses = Positioned(), iter([1.0])
    before = model.positions.weight.detach().clone()
    with pytest.raises(StopIteration):
        position_reliance(model, lambda: torch.tensor(next(losses)))
    assert torch.equal(model.positions.weight, before)
