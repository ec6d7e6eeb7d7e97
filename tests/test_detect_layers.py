"Detectors on records of real, small failures with a known cause."

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn import functional as F

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.findings import explain
from stabilitylab.detect.non_finite import find_first_non_finite
from stabilitylab.models.decoder import LanguageModel
from stabilitylab.models.parts import ModelConfig
from stabilitylab.probe.attention.layers import find_ignored_by_mixture
from stabilitylab.probe.recorder import Recorder
from stabilitylab.run.record import new_run, open_run

TOKENS = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))


def record(path, steps=24, at=None, std=0.02, eps=1e-8, width=32, freeze=None):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.plain(d_model=width, n_layer=2, seq=16, init_std=std, n_head=2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=eps)
    with Recorder(model, opt, path, merge=False) as rec:
        for i in range(steps):
            if i == at:
                with torch.no_grad():
                    model.blocks[1].fc2.weight.mul_(1000)
            loss = model(TOKENS, TOKENS)
            if freeze:
                loss = loss.detach() + 0 * loss + model.embed.weight.square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    return diagnose(open_run(path))


def test_the_module_that_was_blown_up_is_named(tmp_path):
    (f,) = record(tmp_path / "r", at=12).of("activation_explosion")
    assert (
        f.onset == 12
        and f.modules[0].startswith("blocks.1")
        and f.severity == "error"
        and "fc2" in " ".join(f.modules)
    )


@pytest.mark.slow
def test_a_healthy_run_is_silent(tmp_path):
    found = record(tmp_path / "r", width=32)
    assert found.kinds == [] or set(found.kinds) <= {"misaligned_shape"}


class Tagger(nn.Module):
    "A table of words, a frozen projection and a head of three classes."

    def __init__(self, words=101, width=64, tied=False):
        super().__init__()
        self.embed, self.middle = nn.Embedding(words, width), nn.Linear(width, width + 4)
        self.middle.requires_grad_(False)
        self.lm_head = nn.Linear(width, words if tied else 3, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x)
        return self.lm_head(hidden + self.middle(hidden)[..., : hidden.shape[-1]])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_only_matrices_that_are_multiplied_and_trained_want_sides_of_8(tmp_path, tied):
    torch.manual_seed(0)
    model = Tagger(tied=tied)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with Recorder(model, opt, tmp_path / "run", merge=False) as rec:
        for _ in range(3):
            x = torch.randint(0, 101, (4, 8))
            loss = F.cross_entropy(model(x).flatten(0, 1), (x % 3).flatten())
            loss.backward()
            opt.step()
            opt.zero_grad()
            rec.step(loss)
    found = diagnose(open_run(tmp_path / "run")).of("misaligned_shape")
    assert [f.modules for f in found] == ([("embed.weight",)] if tied else [])


@pytest.mark.slow
def test_causes_by_construction(tmp_path):
    assert "init_std_too_large" in record(tmp_path / "a", 3, std=0.5).kinds
    assert "grad_below_epsilon" in record(tmp_path / "b", 3, eps=1.0).kinds
    assert "misaligned_shape" in record(tmp_path / "c", 3, width=68).kinds
    assert "no_gradient" in record(tmp_path / "d", 3, freeze=True).kinds


@pytest.mark.slow
def test_sampled_rules_name_the_cause(tmp_path):
    def fixed(path, change, dtype=torch.float32, lr=1e-3):
        torch.manual_seed(0)
        model = LanguageModel(ModelConfig.plain(d_model=32, n_layer=2, seq=16, n_head=2)).to(dtype)
        opt = torch.optim.AdamW(model.parameters(), lr=lr)
        change(model)
        with Recorder(model, opt, path, every_n=4, merge=False) as rec:
            for _ in range(13):
                loss = model(TOKENS, TOKENS)
                loss.backward()
                opt.step()
                opt.zero_grad()
                rec.step(loss)
        return diagnose(open_run(path))

    def massive(model):
        model.pos_embed.weight.data[0, 3] = 500.0

    def dead(model):
        model.blocks[1].fc2.weight.data.zero_()
        model.blocks[1].fc2.weight.requires_grad_(False)

    healthy = set(fixed(tmp_path / "0", lambda m: None).kinds)
    assert not healthy & {
        "overflow",
        "underflow",
        "massive_activation",
        "dead_units",
        "update_lost_to_rounding",
    }
    (f,) = fixed(tmp_path / "a", massive).of("massive_activation")
    assert f.modules == ("blocks.0", "blocks.1") and f.onset == 0 and "channel 3" in f.explanation
    (f,) = fixed(tmp_path / "b", dead).of("dead_units")
    assert f.modules == ("blocks.1.fc2",)
    assert "update_lost_to_rounding" in fixed(tmp_path / "c", lambda m: None, torch.bfloat16, 1e-6).kinds


def _nan_weight(model):
    model.blocks[1].fc1.weight.data[0, 0] = torch.nan


def _nan_input(model):
    model.blocks[1].fc1.register_forward_pre_hook(lambda _, inputs: (inputs[0] * torch.nan,))


def _too_large(model):
    model.blocks[1].fc1.weight.data.mul_(1e38)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, module, cause",
    [
        (_nan_weight, "blocks.1.fc1", {"cause": "weight"}),
        (_nan_input, "blocks.1.fc1", {"cause": "input", "code": "blocks.1"}),
        (_too_large, "norm", {"cause": "overflow"}),
    ],
)
def test_the_first_bad_output_is_a_leaf_with_its_cause(tmp_path, change, module, cause):
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=128, seq=16, d_model=32, n_layer=2, n_head=4, bias=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, tmp_path / "r", merge=False) as rec:
        for step in range(6):
            if step == 4:
                change(model)
            loss = model(TOKENS, TOKENS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step(loss)
    run = open_run(tmp_path / "r")
    (finding,) = [f for f in diagnose(run).of("non_finite") if f.modules]
    assert finding.onset == 4 and finding.modules[0] == module
    assert {name: finding.evidence.get(name) for name in cause} == cause
    assert "blocks.1" not in finding.modules[:1]  # the block itself is not finite, too


def _failed(path, change, autocast=False, late=4):
    "A run whose weights are changed before it begins, and whose last token comes from step `late` on."
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab=128, seq=16, d_model=32, n_layer=2, n_head=4))
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Recorder(model, optimizer, path, merge=False) as rec:
        for step in range(6):
            tokens = TOKENS % 100
            if step >= late:
                tokens = tokens.clone()
                tokens[0, 3] = 127
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.step(loss)
    (finding,) = [f for f in diagnose(open_run(path)).of("non_finite") if f.modules]
    return finding


def _patched(value):
    def change(model):
        model.embed.weight[127] = value

    return torch.no_grad()(change)


@pytest.mark.slow
def test_a_patched_row_that_is_too_large_is_named_when_its_token_comes(tmp_path):
    "The row was wrong from the beginning; the norm behind it overflows at step 4, when its token comes."
    finding = _failed(tmp_path / "r", _patched(1e30))
    assert finding.onset == 4 and finding.modules[0] == "blocks.0.norm1"
    named = {name: finding.evidence[name] for name in ("cause", "row", "row_param", "row_value")}
    assert named == {"cause": "row", "row": 127, "row_param": "embed.weight", "row_value": 1e30}
    assert "row 127 of embed.weight" in finding.explanation and "1e+30" in finding.explanation


@pytest.mark.slow
@pytest.mark.parametrize("late, modules", [(4, ("embed.weight",)), (0, ("embed", "embed.weight"))])
def test_a_row_of_nan_is_named_before_its_token_comes_and_when_it_does(tmp_path, late, modules):
    finding = _failed(tmp_path / "r", _patched(torch.nan), late=late)
    assert finding.onset == 0 and finding.modules[0] == modules[0]
    assert finding.evidence["cause"] == "row" and finding.evidence["row"] == 127
    assert "row 127 of embed.weight" in finding.explanation and "NaN" in finding.explanation


def _beyond_fp16(model):
    model.blocks[1].fc1.weight.data[3, 5] = 70_000.0


def test_a_weight_that_fp16_cannot_hold_is_named_with_its_value(tmp_path):
    finding = _failed(tmp_path / "r", _beyond_fp16, autocast=True)
    assert finding.onset == 0 and finding.modules[0] == "blocks.1.fc1"
    assert finding.evidence["cause"] == "cast" and finding.evidence["weight_absmax"] == 70_000
    assert "70,000" in finding.explanation and "65,504" in finding.explanation


def test_without_inputs_the_leaf_is_named_and_no_cause():
    "As other recorders write it: outputs only, the block before its parts."
    names = ["h.2", "h.2.fc1", "h.2.fc2", "norm"]
    counts = np.zeros((5, 4))
    counts[3:] = [7, 5, 7, 7]
    labels = {"step": range(5), "module": names, "kind": ("module", ["block", "mlp.fc1", "mlp.fc2", "norm"])}
    labels["layer"] = ("module", [2, 2, 2, -1])
    counted = ("step", "module"), counts, {"long_name": "values that are not finite", "units": "1"}
    (finding,) = find_first_non_finite(
        new_run(activations=xr.Dataset({"nonfinite_count": counted}, coords=labels))
    )
    assert finding.modules == ("h.2.fc1", "h.2.fc2", "norm", "h.2") and "cause" not in finding.evidence


def _mixture():
    "One weight that grows and three that vanish, the third near zero by chance at the beginning."
    step = np.arange(0, 5000, 100)
    fall = 0.3 * np.exp(-np.maximum(step - 2000, 0)[:, None] / np.array([700, 500, 400]))
    table = np.column_stack([0.3 + 2.2 * step / 5000, fall * [1, -1, 1]])
    table[0, 3] = 1e-6
    return xr.DataArray(table, dims=("step", "layer"), coords={"step": step})


@pytest.mark.parametrize("is_turned", [False, True])
def test_layers_that_a_mixture_switched_off_are_told_since_the_last_time(is_turned):
    weights = _mixture()
    (finding,) = find_ignored_by_mixture(weights.T if is_turned else weights, "decoder.3.mix")
    spread = np.abs(weights).max("layer") / np.abs(weights).min("layer")
    first = next(step for step in weights.step.values[1:] if spread.sel(step=slice(step, None)).min() >= 100)
    assert first > 2000 and (finding.onset, finding.end) == (first, 4900)
    assert finding.evidence["ignored"] == [1, 2, 3] and finding.modules == ("decoder.3.mix",)
    words = "The mixture decoder.3.mix hardly reads 3 of 4 layers (1, 2 and 3, counted from 0)"
    assert explain(finding).startswith(words)
    assert not find_ignored_by_mixture(weights.isel(step=slice(1, 20)))


def test_a_mixture_without_a_name_and_with_a_zero_is_told_in_words():
    (finding,) = find_ignored_by_mixture(xr.DataArray([1.0, 0.0, 0.2], dims="layer"))
    words = "Hardly read: 1 of 3 layers (1, counted from 0); the mixing weights are 0 to 1 in size."
    assert explain(finding) == words and finding.evidence["ratio"] in (np.inf, "inf")
    assert not find_ignored_by_mixture(xr.DataArray([np.nan, 0.1, 0.2], dims="layer"))
