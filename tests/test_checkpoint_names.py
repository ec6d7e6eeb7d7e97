"""The parameters behind numbers of an optimizer: never a wrong name, and each that shapes allow to know."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from stabilitylab.checkpoint.diff import diff_checkpoints
from stabilitylab.checkpoint.open import open_checkpoint, optimizer_names
from stabilitylab.cli.main import main


def trained(model, optimizer, shape=(3, 4)):
    "A model after one step, and its optimizer."
    model(torch.randn(*shape)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def written(path, model, optimizer, **how):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path, **how)
    return open_checkpoint(path)


def truth(model, optimizer):
    "Tensor of the checkpoint -> its name, from the live optimizer."
    names = {id(p): name for name, p in model.named_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"optimizer.state.{number}.{what}": f"{what} of {names[id(p)]}"
        for number, p in enumerate(held)
        for what in optimizer.state.get(p, {})
    }


def certain(groups, shapes, model):
    "The slow twin: every way to choose places in order, and the places that are the same in all of them."
    found = {}
    for group in groups:
        ways = [
            places
            for places in itertools.combinations(range(len(model)), len(group))
            if all(shapes[one] in (None, model[at][1]) for one, at in zip(group, places, strict=True))
        ]
        if not ways:
            return None
        for place, one in enumerate(group):
            at = {way[place] for way in ways}
            found[one] = model[at.pop()][0] if len(at) == 1 else ""
    named = [name for name in found.values() if name]
    return found if len(set(named)) == len(named) else None


@pytest.mark.parametrize("seed", range(12))
def test_names_equal_a_slow_twin_and_are_never_wrong(seed, tmp_path):
    rng = np.random.default_rng(seed)
    widths = rng.choice([4, 6], 5)
    widths[0] = 4
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b, bias=bool(rng.integers(2))) for a, b in itertools.pairwise(map(int, widths))]
    model = nn.Sequential(*layers)
    params = list(model.parameters())
    for p in params:
        p.requires_grad_(bool(rng.random() < 0.8))
    group_of = rng.integers(0, 2, len(params))
    groups = [{"params": [p for p, g in zip(params, group_of, strict=True) if g == k]} for k in (0, 1)]
    groups = [group for group in groups if group["params"]]
    model[-1].requires_grad_(True)
    _, optimizer = trained(model, torch.optim.AdamW(groups))
    found = optimizer_names(written(tmp_path / "a.pt", model, optimizer))
    real = truth(model, optimizer)
    assert found.names.keys() | found.unknown.keys() == real.keys()
    assert {tensor: real[tensor] for tensor in found.names} == found.names

    numbers = iter(range(len(params)))
    held = [[next(numbers) for _ in group["params"]] for group in groups]
    flat = [p for group in groups for p in group["params"]]
    shapes = {n: tuple(p.shape) if p in optimizer.state else None for n, p in enumerate(flat)}
    listed = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    twin = certain(held, shapes, listed) or {}
    told = {int(tensor.split(".")[2]): name.split(" of ")[1] for tensor, name in found.names.items()}
    assert told == {one: name for one, name in twin.items() if name and shapes[one] is not None}


def test_the_usual_optimizers_are_named_whole(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2)
    )
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    made = {
        "adamw": torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0}]),
        "sgd": torch.optim.SGD(model.parameters(), momentum=0.9),
        "adafactor": torch.optim.Adafactor(model.parameters()),
        "named": torch.optim.Adam(list(model.named_parameters())[::-1]),
    }
    for name, optimizer in made.items():
        trained(model, optimizer, (3, 4, 3))
        for legacy in (False, True):
            path = tmp_path / f"{name}-{legacy}.pt"
            ckpt = written(path, model, optimizer, _use_new_zipfile_serialization=not legacy)
            found = optimizer_names(ckpt)
            assert found.names == truth(model, optimizer) and not found.unknown, (name, found)
    assert found.how == ("names in the optimizer's groups",)


def test_the_number_stays_where_it_cannot_be_known(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    path, state = tmp_path / "a.pt", optimizer.state_dict()
    cases = {
        "no weights": state,
        "groups are not in": {"model": model.state_dict(), "state": state["state"]},
        "do not follow": {"model": {"w": torch.ones(9)}, "optimizer": state},
        "several parts": {
            "a": model.state_dict(),
            "b": {"x": torch.ones(2, 4), "y": torch.ones(2)},
            "opt": state,
        },
        "param": {"model": model.state_dict(), "optimizer": state | {"param_groups": "none"}},
    }
    for words, saved in cases.items():
        torch.save(saved, path)
        found = optimizer_names(open_checkpoint(path))
        assert not found.names and len(found.unknown) >= 4, (words, found)
        if words != "param":
            assert all(words in why for why in found.unknown.values()), (words, found)
    torch.save({"model": model.state_dict(), "ema": model.state_dict(), "opt": state}, path)
    assert len(optimizer_names(open_checkpoint(path)).names) == 6


def test_states_are_compared_by_parameter_and_told_by_the_commands(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    first = trained(model, torch.optim.Adam(model.parameters()))[1]
    written(tmp_path / "a.pt", model, first)
    turned = torch.optim.Adam(list(model.named_parameters())[::-1])
    turned.load_state_dict(turned.state_dict())
    for p in model.parameters():
        turned.state[p] = {what: value.clone() for what, value in first.state[p].items()}
    written(tmp_path / "b.pt", model, turned)
    table = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt", progress=False)
    assert len(table) == 24 and (table.change == 0).all() and not table.attrs["only_a"]
    assert ("optimizer.state.0.exp_avg", "optimizer.state.5.exp_avg") in table.attrs["renamed"]

    assert main(["scan", str(tmp_path / "a.pt")]) == 0
    assert "exp_avg of 1.weight" in capsys.readouterr().out
    assert main(["scan", str(tmp_path / "a.pt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["names"]["optimizer.state.2.exp_avg"] == "exp_avg of 1.weight" and told["unnamed"] == {}
    assert main(["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--all"]) == 0
    assert "exp_avg of 1.weight" in capsys.readouterr().out
    torch.save(first.state_dict(), tmp_path / "o.pt")
    assert main(["scan", str(tmp_path / "o.pt")]) == 0
    out = capsys.readouterr().out
    assert "18 tensors keep their number: the checkpoint holds no weights" in out
