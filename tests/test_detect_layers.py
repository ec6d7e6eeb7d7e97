"Detectors on records of real, small failures with a known cause."

import numpy as np
import pytest
import torch
import xarray as xr

from stabilitylab.detect.diagnose import diagnose
from stabilitylab.detect.non_finite import find_first_non_finite
from stabilitylab.models.config import ModelConfig
from stabilitylab.models.decoder import LanguageModel
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


def test_a_healthy_run_is_silent(tmp_path):
    found = record(tmp_path / "r", width=32)
    assert found.kinds == [] or set(found.kinds) <= {"misaligned_shape"}


def test_causes_by_construction(tmp_path):
    assert "init_std_too_large" in record(tmp_path / "a", 3, std=0.5).kinds
    assert "grad_below_epsilon" in record(tmp_path / "b", 3, eps=1.0).kinds
    assert "misaligned_shape" in record(tmp_path / "c", 3, width=36).kinds
    assert "no_gradient" in record(tmp_path / "d", 3, freeze=True).kinds


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
