"Loss, gradient and clip by the frequency of tokens, against one backward pass a token."

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.models.tasks import model_loss
from stabilitylab.replay.rare_tokens import frequency_bands, losses_by_frequency
from stabilitylab.replay.state import Batch, Setup, Snapshot

EDGES = {"commonest 50 %": 0.0, "50 to 80 %": 0.5, "80 to 95 %": 0.8, "rarest 5 %": 0.95}


def token_loss(model, part):
    logits, targets = model(part["tokens"]), part["targets"]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return losses.view_as(targets), targets != -100


def build():
    torch.manual_seed(3)
    config = ModelConfig(vocab=40, seq=8, d_model=16, n_layer=1, n_head=2, positions="learned", dropout=0.2)
    return LanguageModel(config)


def zipf_parts(seed, rows=3):
    chance = 1 / np.arange(1, 41)
    draw = np.random.default_rng(seed).choice(40, (rows, 9), p=chance / chance.sum())
    tokens = torch.from_numpy(draw)
    targets = tokens[:, 1:].clone()
    targets[0, :2] = -100
    return {"tokens": tokens[:, :-1], "targets": targets}


def band_by_hand(counts, token):
    "The share of the text that is made of strictly commoner tokens, against the edges."
    before = sum(n for n in counts.values() if n > counts[token]) / sum(counts.values())
    return [name for name, edge in EDGES.items() if before >= edge - 1e-12][-1]


def by_hand(model, steps, clip):
    "The table, from one backward pass for every single token."
    model.eval()
    counts = Counter(t for s in steps for p in s for t in p["targets"][p["targets"] >= 0].tolist())
    params = list(model.parameters())
    rows, total = {}, 0.0
    for step in steps:
        gradients, members = {}, []
        for part in step:
            n = int((part["targets"] >= 0).sum())
            for i, j in (part["targets"] >= 0).nonzero().tolist():
                loss = token_loss(model, part)[0][i, j]
                grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]).double()
                band = band_by_hand(counts, int(part["targets"][i, j]))
                gradients[band] = gradients.get(band, 0) + grad / n / len(step)
                members.append((band, float(loss.detach())))
        whole = sum(gradients.values())
        total = total + whole
        for band, loss in members:
            row = rows.setdefault(band, {"loss": [], "kept": [], "gradient": 0.0})
            row["loss"].append(loss)
            row["kept"].append(min(1.0, clip / float(whole.norm())))
        for band, gradient in gradients.items():
            rows[band]["gradient"] = rows[band]["gradient"] + gradient
    return {
        band: (
            len(row["loss"]),
            np.mean(row["loss"]),
            float(row["gradient"] @ total / (total @ total)),
            np.mean(row["kept"]),
        )
        for band, row in rows.items()
    }


def test_bands_equal_a_slow_twin():
    steps = [[zipf_parts(0, rows=5), zipf_parts(1, rows=3)], [zipf_parts(2, rows=5)]]
    setup = Setup(build, model_loss, token_loss=token_loss, clip=0.9)
    snapshot = Snapshot(setup, build().state_dict())
    table = losses_by_frequency(snapshot, [Batch(step) for step in steps])
    expected = by_hand(build(), steps, clip=0.9)
    assert len(expected) >= 3 and set(table.index) == set(expected)
    got = table.loc[list(expected), ["tokens", "loss", "grad_share", "kept"]].to_numpy()
    assert np.allclose(got, list(expected.values()), atol=1e-5)
    assert abs(table.grad_share.sum() - 1) < 1e-9 and abs(table.loss_share.sum() - 1) < 1e-9
    assert np.isclose((table.weight * table.tokens).sum(), table.tokens.sum())


def test_a_model_that_only_knows_common_tokens():
    "After some steps on text by Zipf's law the rare tokens have the larger loss, and bands say so."
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        optimizer.zero_grad()
        model_loss(model, zipf_parts(step + 10, rows=8)).backward()
        optimizer.step()
    snapshot = Snapshot(Setup(build, model_loss, token_loss=token_loss), model.state_dict())
    table = losses_by_frequency(snapshot, [zipf_parts(step, rows=8) for step in range(500, 506)])
    assert table.loss.is_monotonic_increasing and "kept" not in table
    assert table.loss.iloc[-1] > 1.5 * table.loss.iloc[0]


def test_a_loss_that_is_divided_by_the_tokens_of_the_step_weighs_all_alike():
    parts = [zipf_parts(0) | {"num_items_in_batch": 37}, zipf_parts(1, rows=2) | {"num_items_in_batch": 37}]
    n_tokens = sum(int((part["targets"] >= 0).sum()) for part in parts)
    setup = Setup(build, model_loss, token_loss=token_loss)
    table = losses_by_frequency(Snapshot(setup, build().state_dict()), [Batch(parts)])
    assert np.allclose(table.weight, n_tokens / 37)


def test_ids_behind_the_end_of_counts_do_not_occur_in_that_text():
    snapshot = Snapshot(Setup(build, model_loss, token_loss=token_loss), build().state_dict())
    table = losses_by_frequency(snapshot, [zipf_parts(0)], counts=torch.tensor([5, 5]))
    assert table.index.tolist() == ["commonest 50 %", "rarest 5 %"] and table.ids["commonest 50 %"] <= 2
    assert frequency_bands(torch.tensor([1, 0])).tolist() == [0, 3]


def test_what_is_missing_is_refused_in_words():
    without = Snapshot(Setup(build, model_loss), build().state_dict())
    with pytest.raises(ValueError, match="token_loss"):
        losses_by_frequency(without, [zipf_parts(0)])
    other = Setup(build, model_loss, token_loss=lambda m, p: (torch.zeros(2, 3), torch.ones(2, 3)))
    with pytest.raises(ValueError, match="token ids of the shape"):
        losses_by_frequency(Snapshot(other, build().state_dict()), [zipf_parts(0)])
