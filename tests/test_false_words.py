"Sentences that were untrue once: each with the planted case that told them."

import numpy as np
import pytest
import torch
import xarray as xr

import stabilitylab as sl
from stabilitylab import Recorder, diagnose
from stabilitylab.detect.activations import find_overflow
from stabilitylab.detect.divergence import find_divergence
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars


def run_of(loss, **attrs):
    return new_run(make_scalars({"loss": Samples(np.arange(len(loss)), np.asarray(loss, float))}, **attrs))


def trained(path, n, first=0):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, optimizer, path, first_step=first) as recorder:
        for _ in range(n):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)


def test_a_start_that_goes_on_where_the_one_before_ended_did_not_go_back(tmp_path):
    trained(tmp_path / "run", 10)
    trained(tmp_path / "run", 10, first=10)
    (found,) = [f for f in diagnose(sl.open_run(tmp_path / "run")) if f.kind == "restart"]
    assert found.onset == 10 and found.evidence == {"after": 9, "steps_repeated": 0}
    assert "went back" not in found.explanation and "after step 9" in found.explanation


@pytest.mark.parametrize("every", [1, 10])
def test_two_records_in_the_other_order_are_no_restart(tmp_path, every):
    numbers = list(range(200))
    numbers[100], numbers[101] = numbers[101], numbers[100]
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {i * every} loss {3 / (i + 10) + 1:.4f}\n" for i in numbers))
    run = sl.read_log(path)
    assert "restart" not in diagnose(run).kinds and run.step.values[100] == 100 * every
    resumed = [*range(150), *range(120, 200)]
    path.write_text("".join(f"step {i * every} loss {3 / (i + 10) + 1:.4f}\n" for i in resumed))
    (found,) = [f for f in diagnose(sl.read_log(path)) if f.kind == "restart"]
    assert found.evidence["before"] == 149 * every and found.evidence["steps_repeated"] == 30 * every


def correlated(n, rho, seed):
    "Noise of 2 to 20 % whose records remember each other."
    rng = np.random.default_rng(seed)
    noise, size = rng.normal(size=n), rng.choice([0.02, 0.05, 0.1, 0.2])
    for i in range(1, n):
        noise[i] = rho * noise[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return 2 * (1 + size * noise)


def test_few_records_of_noise_are_no_divergence():
    runs = [correlated(n, rho, seed) for n in (12, 16, 24) for rho in (0, 0.5, 0.8) for seed in range(15)]
    errors = [f for loss in runs for f in find_divergence(run_of(loss)) if f.severity == "error"]
    assert len(errors) <= 0.05 * len(runs)  # 7 % without `_chance_walk`


def test_few_records_that_diverge_are_told():
    told = 0
    for seed in range(30):
        n, rng = 16, np.random.default_rng(seed)
        after = np.arange(n) - n // 2
        grown = (np.full(n, 6.5), 2.3 + 0.6 * after, 2.3 * 1.25**after)[seed % 3]
        loss = np.where(after >= 0, grown, 2 + 2 * np.exp(-np.arange(n) / 3))
        found = find_divergence(run_of(loss * (1 + 0.03 * rng.normal(size=n))))
        told += any(f.severity == "error" for f in found)
    assert told >= 29


def large_activations(peak, **attrs):
    values = np.ones((20, 1))
    values[12:] = peak
    coords = {"step": np.arange(20), "module": ["a"], "kind": ("module", ["block"]), "layer": ("module", [0])}
    table = {"absmax": (("step", "module"), values, {"long_name": "absmax", "units": "1"})}
    series = {n: Samples(np.arange(20), np.full(20, x)) for n, x in (("loss", 1.0), ("loss_scale", 65536.0))}
    return new_run(make_scalars(series), attrs=attrs, activations=xr.Dataset(table, coords))


def test_the_range_of_fp16_is_no_limit_of_a_bf16_run():
    assert find_overflow(large_activations(40_000.0))  # a scaled loss: fp16
    assert find_overflow(large_activations(1e5))[0].severity == "error"
    assert not find_overflow(large_activations(40_000.0, bf16=True))
    assert not find_overflow(large_activations(40_000.0, dtypes={"a.weight": "bfloat16"}))
    assert find_overflow(large_activations(1e5, bf16=True), "fp16")[0].severity == "error"  # when asked


def test_the_layers_view_shows_the_start_that_went_on(tmp_path):
    pytest.importorskip("ipywidgets")
    from stabilitylab.workbench.state import open_state
    from stabilitylab.workbench.view_layers import LayersView, _module_words

    trained(tmp_path / "run", 10)
    trained(tmp_path / "run", 10, first=5)
    run = sl.open_run(tmp_path / "run")
    state, _ = open_state(tmp_path / "run")
    view = LayersView(state)
    shown, table = view.look.of(view.shared.run), run["activations"].to_dataset()[view.look.statistic[1]]
    assert shown.step.values.tolist() == list(range(15))
    for step in range(15):
        segment = int(step >= 5)
        recorded = table.values[(table.step.values == step) & (table.segment.values == segment)]
        np.testing.assert_array_equal(shown.sel(step=step).values, recorded[0])
    view.look.module = str(table[shown.dims[1]].values[0])
    view.look.step = 7.0
    words = _module_words(view.look, view.look.history(view.shared.run))
    assert f"{float(shown.sel(step=7).values[0]):.4g}" in words
