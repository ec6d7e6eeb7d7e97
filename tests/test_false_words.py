"Sentences that were untrue once: each with the planted case that told them."

import ast
import os
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

import stabilitylab as sl
from stabilitylab import Recorder, diagnose
from stabilitylab.cases.registry import sample
from stabilitylab.detect.context import LossSpan, at_step, run_context
from stabilitylab.detect.facts.evidence import evidence
from stabilitylab.detect.findings import Finding, Findings, explain
from stabilitylab.detect.layers.activations import find_overflow
from stabilitylab.detect.layers.parameters import (
    find_grad_below_epsilon,
    find_no_gradient,
    find_param_grad_explosion,
    find_wide_init,
)
from stabilitylab.detect.likely_cause import MostLikely, missing_measures, most_likely, ranked_causes
from stabilitylab.detect.loss.divergence import find_divergence
from stabilitylab.detect.non_finite import find_first_non_finite
from stabilitylab.investigation.opening import suspect_step
from stabilitylab.knowledge.remedies import RunContext, choose_remedies
from stabilitylab.names.errors import InputError
from stabilitylab.probe.draft import setup_template
from stabilitylab.probe.draft.loop_code import LoopCode
from stabilitylab.probe.guard import Guard
from stabilitylab.probe.kinds import module_kinds
from stabilitylab.replay.blame import blame
from stabilitylab.replay.setup_check import Check, SetupCheck
from stabilitylab.replay.setup_file import setup_of
from stabilitylab.replay.state import Batch, Setup, Snapshot
from stabilitylab.replay.swap import swap_test
from stabilitylab.replay.user_code import load_setup
from stabilitylab.report import content
from stabilitylab.report.content import replay_command, run_sentences, step_to_replay
from stabilitylab.report.step import replay_text
from stabilitylab.report.terminal import finding_to_explain
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.trial.trial import Trial


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


@pytest.mark.slow
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


def test_records_of_noise_are_no_divergence_not_even_in_a_note():
    runs = [correlated(n, rho, seed) for n in (40, 80, 200) for rho in (0, 0.5, 0.8) for seed in range(15)]
    notes = [f for loss in runs for f in find_divergence(run_of(loss)) if f.severity == "info"]
    assert len(notes) <= 0.05 * len(runs)  # 29 % without `_level_noise`


@pytest.mark.parametrize(("records", "noise"), [(700, 0.01), (2500, 0.2)])
def test_a_rise_that_only_many_records_show_is_still_noted(records, noise):
    step, rng = np.arange(records) / records, np.random.default_rng(0)
    loss = 2 + 4 * np.exp(-step / 0.1) + 1.5 * np.maximum(step - 0.6, 0) + noise * rng.normal(size=records)
    assert [f.kind for f in find_divergence(run_of(loss))] == ["divergence"]


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


def test_an_output_that_is_infinite_is_an_overflow_and_no_number():
    (found,) = diagnose(large_activations(np.inf)).of("overflow")
    assert found.onset == 12 and found.severity == "error" and found.evidence["share"] is None
    assert "became infinite" in found.explanation and "e+30" not in found.explanation


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("at_loss", "every", "said", "order"),
    [
        (200, 1, "The loss rose at the same step, 200.", {"lead_steps": 0}),
        (205, 1, "The loss followed 5 steps later, at step 205.", {"lead_steps": 5}),
        (199, 10, "The loss rose first, 10 steps before it.", {"lag_steps": 10}),
    ],
)
def test_a_gradient_norm_says_once_when_the_loss_rose(at_loss, every, said, order):
    rng, n = np.random.default_rng(0), 400
    loss, norm = 2 + 0.02 * rng.normal(size=n), 1 + 0.05 * rng.normal(size=n)
    loss[at_loss : at_loss + 3] += 2
    norm[200:202] *= 40
    series = {name: Samples(np.arange(n) * every, x) for name, x in (("loss", loss), ("grad_norm", norm))}
    (found,) = [f for f in diagnose(new_run(make_scalars(series))) if f.kind == "grad_norm_explosion"]
    assert found.explanation.endswith(said) and found.explanation.count("The loss") == 1
    assert {name: found.evidence.get(name) for name in order} == order


def linear_setup():
    return Setup(
        lambda: torch.nn.Linear(4, 1),
        lambda model, x: (model(x) - 1).square().mean(),
        lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    )


def taken_states(setup, n):
    "States of a run of its own loss, each with a moment of Adam."
    torch.manual_seed(0)
    model = setup.model()
    optimizer = setup.optimizer(model)
    states = []
    for step in range(n):
        optimizer.zero_grad()
        setup.loss(model, torch.randn(8, 4)).backward()
        optimizer.step()
        held = [deepcopy(part.state_dict()) for part in (model, optimizer)]
        states.append(Snapshot(setup, *held, step=step + 1, name=f"state {step + 1}"))
    return states


def test_the_swap_verdict_sees_an_update_that_is_out_of_line():
    setup = linear_setup()
    states = taken_states(setup, 4)
    for held in states[-1].optimizer["state"].values():
        held["exp_avg"] *= 1e4  # loss and gradient stay what they were
    batches = [Batch([torch.randn(8, 4)], name=f"batch {i}") for i in range(4)]
    swap = swap_test(states, batches, progress=False)
    assert (swap.verdict, swap.decided_by, swap.bad_in_a_row) == ("bad state", "update_norm", 0)
    assert swap.table.update_norm.values[-1].min() > 100 * swap.table.update_norm.values[:-1].max()


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 0), (1, 2), (0, 8)])
def test_the_swap_verdict_counts_bad_batches_in_a_row(before, after):
    setup = linear_setup()
    torch.manual_seed(1)
    scales = [1] * (4 - before) + [1e3] * (before + 1), [1e3] * after + [1]
    given, later = ([Batch([s * torch.randn(64, 4)]) for s in part] for part in scales)
    swap = swap_test(taken_states(setup, 3), given, progress=False, later=later)
    assert swap.verdict.startswith("bad batch") and swap.bad_in_a_row == before + 1 + after
    is_open = before == 2 or after == 8  # what was run ends before the row may
    count = f"{before + 1 + after}{' or more' if is_open else ''} batches in a row are"
    assert (count in swap.words) is (before + after > 0) and swap.to_dict()["words"] == swap.words


def test_the_tokens_of_a_sample_are_counted_or_not_told():
    lengths = [1, 47, 20, 5]
    ids = torch.randint(1, 9, (4, 48))
    for row, length in enumerate(lengths):
        ids[row, length + 1 :] = -100

    def loss(model, batch):
        logits = model(batch["ids"].clamp(min=0)[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    setup = Setup(lambda: torch.nn.Embedding(9, 9), loss)
    state = Snapshot(setup, setup.model().state_dict())
    table = blame(state, Batch([{"ids": ids}]))
    assert table.tokens.tolist() == lengths and table.share.sum() == pytest.approx(1)
    batch_model, _ = state.build()
    loss(batch_model, {"ids": ids}).backward()
    assert table.attrs["grad_norm"] == pytest.approx(float(batch_model.weight.grad.norm()), rel=1e-5)
    assert "tokens" not in blame(state, Batch([{"ids": ids[1:2].expand(3, -1)}]))  # nothing tells them


def test_a_recorded_run_is_not_told_to_record_its_layers():
    unexplained = [Finding("slow_rise", "error", 10)]
    recorded = Findings(unexplained, {"evidence": {"loss_jump": (1.0, 10)}})
    for findings, source, is_asked in ((Findings(unexplained), "log", True), (recorded, "record", False)):
        likely = most_likely(findings)
        assert likely.cause == f"Can't tell yet: the {source} shows what happened, not why."
        assert any("Record the next run" in action for action in likely.next) is is_asked


def test_a_suggested_command_carries_the_setup_that_was_given():
    run = sl.open_run(sample())
    command = replay_command(run, diagnose(run), str(sample()), "my folder/setup.py:make")
    assert command.endswith("--step 337 --setup 'my folder/setup.py:make'")
    assert "--setup" not in replay_command(run, diagnose(run), str(sample()))


def test_weights_that_turned_nan_are_no_flipped_bit(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for step in range(60):
            x = torch.randn(8, 4) * (float("nan") if step == 50 else 1.0)
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    likely = most_likely(diagnose(sl.open_run(tmp_path / "run")))
    assert likely is None or (likely.id != "bit_flip" and "no update changed it" not in likely.cause)


def _kinds(path, factor, loss_of):
    "Kinds of the findings of a short run; its outputs are those of its last matrix, times a factor."

    class Last(torch.nn.Linear):
        def forward(self, x):
            return factor * super().forward(x)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.ReLU(), Last(8, 40))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, path, snapshot_every=0) as recorder:
        for _ in range(45):
            x = torch.rand(16, 40)
            loss = loss_of(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    return {finding.kind for finding in diagnose(sl.open_run(path))}


@pytest.mark.slow
def test_only_a_loss_that_its_outputs_allow_is_told_far_above_a_guess(tmp_path):
    def summed(outputs, x):
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, x, reduction="sum")

    def wide(outputs, x):
        return torch.nn.functional.cross_entropy(outputs, x.argmax(1))

    assert "init_too_large" not in _kinds(tmp_path / "summed", 1, summed)
    assert "init_too_large" in _kinds(tmp_path / "wide", 200, wide)


def _epochs(path, launches, epochs, size=20):
    "A log of launches that count batches of an epoch below a line with its number, months between them."
    lines, hour = [], 0
    for _ in range(launches):
        for epoch in range(1, epochs + 1):
            lines.append(f"2025-0{1 + hour // 24}-01 00:00:00 - INFO - Epoch {epoch}/{epochs}")
            for batch in range(1, size + 1):
                loss, second = 3 - 0.01 * (size * epoch + batch), 60 * epoch + batch
                time = f"2025-0{1 + hour // 24}-01 00:{second // 60:02}:{second % 60:02}"
                lines.append(f"{time} - INFO - Batch {batch}/{size} | Energy: 1.5 | Loss: {loss:.4f}")
        hour += 24
    path.write_text("\n".join(lines))
    return path


def test_launches_in_one_file_begin_again_and_are_no_hang(tmp_path):
    run = sl.read_log(_epochs(tmp_path / "train.log", 5, 6))
    assert int(run.loss.step.max()) <= 6 * 20 and len(np.unique(run.loss.segment)) == 5
    kinds = {finding.kind for finding in diagnose(run)}
    assert "throughput_drop" not in kinds and "restart" in kinds
    once = sl.read_log(_epochs(tmp_path / "once.log", 1, 6))
    assert int(once.loss.step.max()) == 6 * 20


@pytest.mark.parametrize("banner", ["", "***** Running training *****", "===== Training started ====="])
def test_a_pause_before_a_banner_of_a_launch_is_no_hang(banner, tmp_path):
    lines = []
    for step in range(1, 400):
        lines += [f"2025-03-0{1 + step // 200} 00:00:00 {banner}"] if step in (1, 200) and banner else []
        loss, second = 3 * 0.995**step, step % 200
        day, clock = 1 + step // 200, f"00:{second // 60:02}:{second % 60:02}"
        lines.append(f"2025-03-0{day} {clock} step {step} loss {loss:.4f}")
    (tmp_path / "train.log").write_text("\n".join(lines))
    hangs = [f for f in diagnose(sl.read_log(tmp_path / "train.log")) if f.kind == "throughput_drop"]
    assert bool(hangs) == (not banner)


def test_a_perplexity_is_not_called_the_loss(tmp_path):
    noise = np.random.default_rng(0).random(300)
    value = 100 * 0.99 ** np.arange(300) + 20 + noise
    value[200:230] *= 4
    (tmp_path / "train.log").write_text("\n".join(f"step {i} | ppl {v:.3f}" for i, v in enumerate(value)))
    findings = diagnose(sl.read_log(tmp_path / "train.log"))
    words = [f.explanation for f in findings]
    assert words and not any("loss" in sentence for sentence in words)
    assert "The perplexity jumped at step 200, from" in words[0]
    broken = Findings([Finding("non_finite", "error", 9, evidence={"stays": True}, series="perplexity")])
    assert most_likely(Findings(list(broken), {"loss": "perplexity"})).cause.startswith(
        "The perplexity became"
    )


def test_a_generator_is_not_told_to_learn_nothing(tmp_path):
    noise = np.random.default_rng(0).normal(size=(2, 400))
    rows = [f"{i},{0.7 + 0.01 * g:.4f},{1.3 + 0.01 * d:.4f}" for i, (g, d) in enumerate(noise.T)]
    for names, is_flat in (("Gen Loss,Disc Loss", False), ("Loss,Other Loss", True)):
        (tmp_path / "log.csv").write_text("\n".join([f"Step,{names}", *rows]))
        kinds = {finding.kind for finding in diagnose(sl.read_log(tmp_path / "log.csv"))}
        assert ("not_learning" in kinds) == is_flat


def test_a_loss_that_falls_to_its_last_record_did_not_diverge():
    falling = [4.62, 4.57, 4.51, 4.42, 4.33, 4.26, 4.18, 4.12, 4.07, 3.98, 3.93, 3.87, 3.754, 3.762]
    assert find_divergence(run_of(falling)) == []


def test_levels_that_are_smoothed_are_told_so():
    (found,) = [f for f in diagnose(run_of([2.0] * 30 + [6.0] * 30)) if f.kind == "divergence"]
    assert f"smoothed over {found.evidence['window']} records" in found.explanation


def test_a_minimised_loss_is_never_told_to_be_maximised():
    rising = [7.286, 19.178, 30.269, 38.984, 46.83, 62.964, 77.671, 107.01, 149.068, 200.487]
    (of_log,) = [f for f in diagnose(run_of(rising)) if f.kind == "divergence"]
    run = run_of(rising)
    run.attrs["optimizer"] = ["SGD"]  # as a Recorder has it
    (recorded,) = [f for f in diagnose(run) if f.kind == "divergence"]
    assert "maximised" in of_log.explanation and of_log.severity == "info"
    assert "maximised" not in recorded.explanation and recorded.severity == "error"


@pytest.mark.parametrize(
    ("loss", "verb"),
    [([2.4, 5.489, 2.447, 2.46, 2.37, 2.31, 2.3], "jumped"), ([1, 3, 5, 7, 9, 11, 13], "climbed")],
)
def test_after_a_single_record_no_usual_noise_is_told(loss, verb):
    (found,) = [f for f in diagnose(run_of(loss)) if f.kind == "loss_spike"]
    assert "usual noise" not in found.explanation and f"The loss {verb} from" in found.explanation


def test_the_optimizer_is_blamed_for_what_it_was_not_given_only():
    without = Finding("no_gradient", "warning", modules=("a",), evidence={"without_optimizer": 1})
    unused = Finding("no_gradient", "warning", 0, modules=("b",), evidence={"n": 1})
    for found, is_blamed in (([unused], False), ([without], True), ([unused, without], True)):
        told = most_likely(Findings(found)).next
        assert any("Give the optimizer every trainable parameter" in words for words in told) is is_blamed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Recorder")
@pytest.mark.parametrize(
    ("kind", "name"), [("gradients", None), ("gradients", "0.weight"), ("activations", "0")]
)
def test_gradients_that_the_recorder_could_not_read_are_not_absent(tmp_path, kind, name):
    guard = Guard("run")
    guard.failed(kind, name, RuntimeError("no such kernel"))
    (_, text), *_ = guard.take_news()
    trained(tmp_path / "run", 6)
    run = sl.open_run(tmp_path / "run")
    run["gradients"].grad_norm[:] = np.nan
    assert [finding.kind for finding in find_no_gradient(run)]
    columns = {"event_step": [0], "event_kind": ["note"], "event_text": [text]}
    run["events"] = xr.DataTree(xr.Dataset({name: ("event", values) for name, values in columns.items()}))
    assert bool(find_no_gradient(run)) is (kind == "activations")


class Normed(torch.nn.Module):
    "A linear layer, with or without batch norm."

    def __init__(self, is_normed):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.norm = torch.nn.BatchNorm1d(1) if is_normed else torch.nn.Identity()

    def forward(self, x):
        return self.norm(self.linear(x))


class Blocks(torch.nn.Module):
    "Named as ResNets, SqueezeNets and transformers name theirs."

    def __init__(self):
        super().__init__()
        self.layer4 = torch.nn.Sequential(Normed(False), Normed(False))
        self.fire9 = torch.nn.ModuleDict(
            {"squeeze": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())}
        )
        self.h = torch.nn.Sequential(Normed(False), Normed(False))
        self.hidden = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])


def test_only_the_place_in_a_stack_of_blocks_is_a_layer():
    layers = {name: layer for name, (_, layer) in module_kinds(Blocks()).items()}
    assert layers["layer4.1.linear"] == layers["fire9.squeeze.0"] == -1
    assert layers["h.1.linear"] == layers["hidden.1"] == 1
    told = []
    for layer in (-1, 1):
        fields = {"what": "The output", "kind": "conv", "ratio": 10.3, "n": 1, "layer": layer}
        told.append(explain(Finding("activation_explosion", "error", 7, modules=("a",), evidence=fields)))
    assert "a (conv) reached" in told[0] and "a (conv, layer 1) reached" in told[1]


def test_a_second_optimizer_is_no_flipped_bit(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), rate) for rate in (1e-4, 0.1))
    with Recorder(model, first, tmp_path / "run") as recorder:
        for _ in range(12):
            for optimizer in (first, second):
                optimizer.zero_grad()
                loss = (model(torch.randn(8, 4)) - 3).pow(2).mean()
                loss.backward()
                optimizer.step()
            recorder.step(loss)
    (first_cause, *_) = ranked_causes(evidence(sl.open_run(tmp_path / "run")))
    assert first_cause.id == "unseen_writer" and "flipped" not in first_cause.words


def test_a_weight_that_leaves_zero_moved_by_its_update(tmp_path):
    trained(tmp_path / "run", 6)
    run = sl.open_run(tmp_path / "run")
    assert evidence(run)["weight_moved"][0] == pytest.approx(0, abs=1e-3)
    moved = run["updates"].update_norm.values.copy()
    moved[0] = 0.0
    run["weights"].weight_norm[:] = np.cumsum(moved * (1 + 1e-6), axis=0)  # by rounding more than each update
    assert evidence(run)["weight_moved"][0] < 0.2


def test_gradients_below_epsilon_name_no_cause_of_a_loss_that_is_well():
    facts = {"rate_excess": (1.5, 0), "early_update": (0.13, 0), "rate": (0.03, 0)}
    assert ranked_causes(facts)[0].id == "rate_too_high"
    below = Finding("grad_below_epsilon", "warning", 0, modules=("weight",), evidence={"n": 1, "share": 0.55})
    risen = Finding("divergence", "error", 3, 9, evidence={"baseline": 1.0, "final": 3.0}, series="loss")
    assert most_likely(Findings([below], {"evidence": facts})) is None
    assert most_likely(Findings([below, risen], {"evidence": facts})).id == "rate_too_high"
    facts |= {"early_rise": (2.7, 3)}  # the loss itself rose
    assert most_likely(Findings([below], {"evidence": facts})).id == "rate_too_high"


def squared(model, part, divisor=1, reduce=torch.mean):
    return reduce((model(part["x"]) - part["y"]).pow(2)) / divisor


@pytest.mark.parametrize(("divisor", "scale"), [(1, 1), (4, 4)])
def test_losses_of_samples_compare_with_the_recorded_one(divisor, scale):
    "Four micro-batches; the loss of each is divided by four, or it is not."
    torch.manual_seed(0)
    setup = Setup(lambda: Normed(False), partial(squared, divisor=divisor), reduction="sum")
    state = Snapshot(setup, setup.model().state_dict())
    parts = [{"x": torch.randn(5, 4), "y": torch.randn(5, 1)} for _ in range(4)]
    model, _ = state.build()
    own = torch.cat([(model(part["x"]) - part["y"]).pow(2).flatten() for part in parts])
    recorded = float(own.detach().mean())  # what a loop hands over
    table = blame(state, Batch(parts), recorded_loss=recorded)
    assert np.allclose(table.loss, own.detach(), rtol=1e-5) and not table.attrs["is_part"]
    assert table.attrs["loss"] == pytest.approx(
        recorded * 4 / divisor, rel=1e-5
    ) and table.share.sum() == pytest.approx(1)


def test_a_summed_loss_is_one_of_parts():
    torch.manual_seed(0)
    setup = Setup(lambda: Normed(False), partial(squared, reduce=torch.sum))
    state = Snapshot(setup, setup.model().state_dict())
    part = {"x": torch.randn(5, 4), "y": torch.randn(5, 1)}
    table = blame(state, Batch([part]))
    model, _ = state.build()
    loss = squared(model, part, reduce=torch.sum)
    loss.backward()
    assert table.attrs["is_part"] and table.loss.sum() == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    assert table.attrs["grad_norm"] == pytest.approx(norm, rel=1e-5) and not table.attrs["draws"]
    rows = [row | {"sample": i} for i, row in enumerate(table.to_dict("records"))]
    assert "of the loss" in samples_line(rows, samples_are_parts=True) and "of the loss" not in samples_line(
        rows
    )


def test_a_number_within_a_thousandth_is_not_said_to_be_rounding_beside_one_that_differs():
    rows = [("weight_norm", 27.1, 27.10001, "rounding"), ("update_norm", 0.1, 0.2, "differs")]
    checks = tuple(Check(name, 1, was, now, state) for name, was, now, state in rows)
    check = SetupCheck(1, 0, False, False, "model", {}, checks)
    step = {"run": "run", "step": 1, "loss": 1.0, "recorded_loss": None, "grad_norm": 1.0, "update_norm": 1.0}
    text = replay_text(step | {"check": check.to_dict()})
    assert "27.1  within 0.1% (step 1)" in text and "0.2  differs (step 1)" in text


def samples_line(rows, **result):
    "What the command prints of samples."
    step = {"run": "run", "step": 1, "loss": 1.0, "recorded_loss": None, "grad_norm": 1.0, "update_norm": 1.0}
    lines = replay_text(step | {"samples": rows} | result).splitlines()
    return next(line for line in lines if line.startswith("  samples"))


def test_a_share_of_hardly_anything_is_no_negative_zero():
    shares = (0.9, -1e-5, -2e-5)
    line = samples_line([{"sample": at, "loss": 1.0, "share": share} for at, share in enumerate(shares)])
    assert "median share 0.0% of 3; 2 point the other way" in line


SIGNS = [1] * 9 + [-1] * 7


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0.5 * sign, 1.0, sign) for sign in SIGNS], "as each has the same gradient or its negative)"),
        ([(1 / 16, 1.0, 1.0)] * 16, "no sample stands out, as each has the same gradient)"),
        ([(1 / 16, 4.0, 0.25)] * 16, "the shares are equal in size, so no"),  # of orthogonal ones
        ([(1 / 16, 1.0 + at, 1.0) for at in range(16)], "the shares are equal in size"),  # of unlike weights
        ([(0.5 * sign * (1 + 0.01 * (at == 3)), 1.0, sign) for at, sign in enumerate(SIGNS)], "1.5 times"),
        ([(0.1 if at == 3 else 0.06, 1.0, 1.0) for at in range(16)], ""),  # one stands out
        ([(0.5, 1.0, 1.0)] * 2, ""),  # both are named
        ([(0.0, 0.0, "nan")] * 16, ""),
    ],
)
def test_samples_that_share_one_gradient_are_said_to_do_so(rows, words):
    "The three largest of 16 equal shares were named as if they were the heaviest."
    keys = ("sample", "loss", "share", "grad_norm", "cosine")
    line = samples_line([dict(zip(keys, (at, 0.7, *row), strict=True)) for at, row in enumerate(rows)])
    assert words in line and bool(words) == ("stands out" in line)


def test_samples_of_a_gradient_that_is_not_finite_have_no_share():
    rows = [{"sample": at, "loss": 1.0, "grad_norm": "inf", "share": "nan", "cosine": "nan"} for at in (0, 1)]
    line = samples_line(rows)
    assert (
        line.split("samples")[1].strip()
        == "the gradient of the batch is not finite, so none of its 2 has a share"
    )
    rows[1]["loss"] = "nan"
    assert samples_line(rows).endswith("has a share; taken alone, the loss of sample 1 is not finite")


def test_samples_that_are_not_the_batch_are_left_out_or_told():
    torch.manual_seed(0)
    setup = Setup(lambda: Normed(True), squared)
    state = Snapshot(setup, setup.model().state_dict())
    batch = Batch([{"x": 9 * torch.randn(5, 4), "y": torch.randn(5, 1)}])
    step_loss = float(squared(setup.model().train(), batch.parts[0]).detach())
    with pytest.raises(InputError, match="batch norm makes a sample's output depend"):
        blame(state, batch, step_loss=step_loss)
    rows = [{"sample": i, "share": share, "loss": 1.0} for i, share in enumerate([0.9, 0.8, -0.7])]
    told = samples_line(rows, samples_loss=0.5)
    assert "1 point the other way" in told
    assert "one by one, in evaluation mode, their mean loss is 0.5" in told
    assert "evaluation" not in samples_line(rows, samples_loss=1.001)


def test_a_draft_is_always_python(tmp_path, monkeypatch):
    code = LoopCode(["inp = *batch", "return model(inp)"])
    monkeypatch.setattr(setup_template, "loop_code", lambda *arguments: code)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=2) as recorder:
        loss = model(recorder.batch(torch.randn(8, 4))).mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    draft = (tmp_path / "run" / "replay_setup.py").read_text()
    assert "own_loss(model(batch))" in draft and ast.parse(draft)
    notes = sl.open_run(tmp_path / "run")["events"].event_text.values.tolist()
    assert any("lacks the loop's code" in note and "inp = *batch" in note for note in notes), notes


def test_a_setup_runs_where_the_program_ran(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "width.txt").write_text("3")
    source = f"""
import os
from pathlib import Path
import torch
from stabilitylab import Setup
WORKING_DIRECTORY = {str(there)!r}
WIDTH = int(Path("width.txt").read_text())
def model():
    return torch.nn.Linear(int(Path("width.txt").read_text()), WIDTH)
def setup(path):
    assert path.is_absolute()
    return Setup(model, lambda model, batch: model(batch).sum())
"""
    (tmp_path / "own.py").write_text(source)
    before = os.getcwd()
    made = load_setup(str(tmp_path / "own.py"), "run").model()
    assert made.weight.shape == (3, 3) and os.getcwd() == before
    (tmp_path / "own.py").write_text(source.replace(str(there), str(tmp_path / "gone")))
    with pytest.raises(InputError, match="No such file"):  # the folder is gone: paths begin where one is
        load_setup(str(tmp_path / "own.py"), "run")


def test_a_bias_that_the_loss_cancels_is_no_part_that_does_not_train():
    "The last bias of a Wasserstein critic: the run was told to look for a detach or an unused branch."
    params = ["critic.4.weight", "critic.4.bias", "unused.weight", "unused.bias"]

    def run(norms):
        data = xr.Dataset(
            {
                "grad_norm": (("step", "param"), np.tile(norms, (20, 1)).astype(float)),
                "nonfinite_count": (("step", "param"), np.zeros((20, 4))),
            },
            coords={"step": np.arange(20), "param": params},
        )
        tree = run_of(np.linspace(3, 2, 20))
        tree["gradients"] = xr.DataTree(data)
        tree.attrs["trainable"] = params
        return tree

    (finding,) = find_no_gradient(run([1, 0, 1, 1]))
    assert (finding.severity, finding.modules) == ("info", ("critic.4.bias",))
    words = explain(finding)
    assert "1 bias gets no gradient while the weights beside get one" in words
    assert most_likely(Findings([finding])) is None
    lost, cancelled = find_no_gradient(run([1, 0, 0, 0]))
    assert (lost.severity, lost.modules) == ("warning", ("unused.weight", "unused.bias"))
    assert cancelled.modules == ("critic.4.bias",)


def test_an_unused_pooler_is_no_part_that_should_train():
    "A healthy fine-tuning of sentences was told that part of its model does not train."
    params = ["encoder.weight", "pooler.dense.weight", "carpooler.weight"]
    data = xr.Dataset(
        {
            "grad_norm": (("step", "param"), np.tile([1.0, 0.0, 0.0], (20, 1))),
            "nonfinite_count": (("step", "param"), np.zeros((20, 3))),
        },
        coords={"step": np.arange(20), "param": params},
    )
    tree = run_of(np.linspace(3, 2, 20))
    tree["gradients"], tree.attrs["trainable"] = xr.DataTree(data), params
    lost, pooler = find_no_gradient(tree)
    assert (lost.severity, lost.modules) == ("warning", ("carpooler.weight",))
    assert (pooler.severity, pooler.modules) == ("info", ("pooler.dense.weight",))
    assert "1 parameter of the pooler gets no gradient" in explain(pooler)


@pytest.mark.parametrize(("changed", "is_note"), [(range(30), True), (range(2, 30), False), ((), False)])
def test_a_target_network_of_many_parameters_is_no_forgotten_part(tmp_path, changed, is_note):
    "A target network was told to be forgotten by its optimizer, and to never move, as the likely cause."
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "target": torch.nn.ParameterList()})
    model["target"].extend([torch.nn.Parameter(torch.ones(2)) for _ in range(30)])
    optimizer = torch.optim.SGD(model["net"].parameters(), lr=0.1)
    with sl.Recorder(model, optimizer, tmp_path / "run") as recorder:
        for step in range(5):
            optimizer.zero_grad()
            loss = model["net"](torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            for at in changed:  # in place, past the counter of versions
                model["target"][at].data.fill_(float(step))
            recorder.step(loss)
    findings = [f for f in sl.diagnose(sl.open_run(tmp_path / "run")) if f.kind == "no_gradient"]
    told = {name for f in findings if f.severity == "warning" for name in f.modules}
    assert not told.intersection(f"target.{at}" for at in changed)
    assert bool(told) is not is_note
    assert any(f.evidence.get("set_otherwise") == len(changed) for f in findings) is bool(changed)


def test_rounding_noise_of_a_gradient_does_not_explode():
    "A bias that softmax cancels: its gradient of 1e-10 beside others of 1 was told to explode."
    steps = np.arange(30)
    grown = np.where(steps < 20, 1.0, 50.0)
    for scale, is_reported in ((1e-9, False), (1e-2, True)):
        norms = np.stack([np.ones(30), scale * grown], 1)
        data = xr.Dataset(
            {"grad_norm": (("step", "param"), norms)},
            coords={"step": steps, "param": ["w", "b"], "kind": ("param", ["other", "other"])},
        )
        tree = run_of(np.linspace(3, 2, 30))
        tree["gradients"] = xr.DataTree(data)
        assert bool(find_param_grad_explosion(tree)) is is_reported


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("factor", [1e15, 1e25, 1e36])
def test_statistics_whose_square_float32_cannot_hold_are_read_like_others(factor):
    "A rate that blew up: norms of 1e25 are recorded in float32, and their square was inf with a warning."
    run = sl.open_run(sample("lm_high_lr"))
    for name in ("gradients", "weights", "updates", "activations", "optimizer"):
        group = run.get(name)
        if group is None:
            continue
        data = group.to_dataset()
        for variable, values in data.data_vars.items():
            if values.dtype == np.float32:
                blown = values.copy()
                blown[-5:] = np.minimum(np.abs(values[-5:]) * factor, np.finfo(np.float32).max)
                data[variable] = blown
        run[name] = xr.DataTree(data)
    assert "grad_norm_explosion" in {f.kind for f in diagnose(run)}


def test_a_single_high_record_is_not_laid_on_its_batch():
    "A recurrent network: by the swap test neither batch nor state was bad alone, `bad batches` was told."
    loss = 2 + 0.01 * np.random.default_rng(0).standard_normal(200)
    loss[120] = 2.2
    (spike,) = [f for f in diagnose(run_of(loss)) if f.kind == "loss_spike"]
    assert "more often from one batch than from an unstable state" in spike.explanation
    assert "bad batches" not in spike.explanation


def test_a_raised_rate_is_no_bad_batch_no_repeated_data_and_no_lost_moments_of_sgd():
    "Of two strangers' runs: BERT under accelerate and an LSTM under SGD, both with a rate 30 times too high."
    jump = {"loss_jump": (1.6, 44), "event_step": (44.0, 44), "forward_jump": (16.6, 44)}
    facts = jump | {"update_before": (1.7, 40), "grad_jump": (9.0, 44), "weight_moved": (0.0, 0)}
    assert ranked_causes(facts)[0].id == "bad_inputs"
    raised = {"rate_rise": (29.3, 40), "rate_jump": (29.3, 40), "found lr_jump": (1.0, 40)}
    causes = ranked_causes(facts | raised | {"worse_after_rate": (1.5, 40), "rate_jump_lead": (4.0, 40)})
    assert [cause.id for cause in causes][:1] == ["rate_raised"]
    giant = {"update_peak": (1421.0, 68), "grad_at_peak": (2.2, 68)}
    assert "optimizer_state_reset" in [cause.id for cause in ranked_causes(giant)]
    assert ranked_causes(giant | {"moments": (0.0, None)}) == []
    dip = {"loss_jump": (1.3, 51), "low_before": (0.8, 51), "end_over_low": (9.0, 92), "dip": (0.8, 40)}
    assert "repeated_data" in [cause.id for cause in ranked_causes(dip)]
    assert "repeated_data" not in [cause.id for cause in ranked_causes(dip | {"rate_rise": (78.0, 50)})]


def test_the_recorded_level_of_another_loss_bounds_no_arm():
    "The record holds half of what is optimized: the loss of the last of two micro-batches."
    trial = SimpleNamespace(start=SimpleNamespace(next_loss=0.336), arms=[SimpleNamespace(name="unchanged")])
    curves = [SimpleNamespace(arm="unchanged", seed=0, loss=[loss]) for loss in (0.672, 0.35)]
    assert Trial._is_other_loss(trial, curves[:1]) and not Trial._is_other_loss(trial, curves[1:])


def clear_by_data(model, optimizer):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def clear_nothing(model, optimizer):
    pass


CLEARINGS = {
    "to None": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by hand": clear_by_data,
    "by the model": lambda model, optimizer: model.zero_grad(),
    "never": clear_nothing,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEARINGS)
@pytest.mark.parametrize("is_critic", [False, True], ids=["alone", "critic"])
@pytest.mark.filterwarnings("ignore:.*gradients are not cleared")
def test_gradients_that_are_never_cleared_are_the_cause_and_no_others(tmp_path, name, is_critic):
    "The loss of a generator leaves gradients in the critic, which are cleared before its own passes."
    torch.manual_seed(0)
    model, generator = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(8):
            CLEARINGS[name](model, optimizer)
            for _ in range(2):
                loss = model(torch.randn(4, 2)).square().mean()
                loss.backward()
            optimizer.step()
            recorder.step(loss)
            if is_critic:
                model(generator(torch.randn(4, 2))).mean().backward()
    causes = ranked_causes(evidence(sl.open_run(tmp_path / "run")))
    assert ("gradients_not_cleared" in [cause.id for cause in causes]) is (name == "never")


def test_a_closure_that_clears_its_gradients_is_no_fault(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with warnings.catch_warnings(action="error"), Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(8):
            x = torch.randn(4, 2)

            def closure(x=x):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            recorder.step(optimizer.step(closure))
    assert "gradients_kept" not in evidence(sl.open_run(tmp_path / "run"))


def params_of(run, group, **values):
    "A group of a run with values of its parameters: name -> dict of (step, param) arrays."
    names, kinds = values.pop("names"), values.pop("kinds", None)
    steps = np.arange(len(next(iter(values.values()))))
    kind = ("param", kinds or ["other"] * len(names))
    data = {key: (("step", "param"), np.asarray(rows, float)) for key, rows in values.items()}
    coords = {"step": steps, "param": np.array(names), "kind": kind}
    run[group] = xr.DataTree(xr.Dataset(data, coords=coords))
    return run


def below_epsilon(run):
    return [(f.modules, f.onset) for f in find_grad_below_epsilon(run)]


def test_a_bias_before_a_batch_norm_is_not_below_epsilon():
    "Its gradient of 1e-8 is what rounding leaves of a sum that cancels; the weight beside has one of 1."
    names, run = ["fc.weight", "fc.bias"], run_of(np.linspace(3, 2, 30))
    for bias, is_reported in ((1e-7, False), (1e-4, True)):
        norms = np.tile([0.1, bias], (30, 1))
        params_of(run, "gradients", names=names, grad_norm=norms, rms=norms / 4, nonfinite_count=0 * norms)
        params_of(run, "optimizer", names=names, below_eps_frac=np.tile([0.0, 0.9], (30, 1)))
        run.attrs["eps"] = 1e-4
        assert bool(below_epsilon(run)) is is_reported


def test_gradients_below_epsilon_begin_where_they_are_and_not_where_they_are_nan():
    names, run = ["q.weight"], run_of(np.linspace(3, 2, 30))
    late = (np.arange(30) > 11).astype(float)[:, None]
    norms = np.full((30, 1), 1e-9)
    params_of(run, "gradients", names=names, grad_norm=norms, rms=norms, nonfinite_count=0 * norms)
    params_of(run, "optimizer", names=names, below_eps_frac=late)
    assert below_epsilon(run) == [(("q.weight",), 12)]
    params_of(run, "gradients", names=names, grad_norm=norms, rms=norms, nonfinite_count=late)
    assert not below_epsilon(run)


@pytest.mark.parametrize(("n", "severity"), [(1, "info"), (4, "info"), (5, "warning"), (8, "warning")])
def test_gradients_below_epsilon_are_a_warning_where_most_parameters_have_them(n, severity):
    "Eight matrices; in n of them every entry is below epsilon."
    names, run = [f"{k}.weight" for k in range(8)], run_of(np.linspace(3, 2, 30))
    params_of(run, "optimizer", names=names, below_eps_frac=np.tile(np.arange(8.0) < n, (30, 1)))
    (finding,) = find_grad_below_epsilon(run)
    assert finding.severity == severity and f"(of {len(names)})" in explain(finding)


def test_a_run_that_became_slow_is_told_of_no_habit_that_is_slow_from_the_first_step():
    drop = Finding("throughput_drop", "warning", 60, 200, evidence={"factor": 3.0})
    early, later = (
        {row["id"] for row in choose_remedies(drop.kind, at_step(RunContext(), LossSpan(0, 300, True), step))}
        for step in (0, 60)
    )
    assert {"idefics-17", "mt-46"} <= early and not {"idefics-17", "mt-46"} & later


@pytest.mark.parametrize(("share", "is_told"), [(0.0, False), (1.0, True)])
def test_epsilon_is_lowered_only_where_gradients_are_below_it(share, is_told):
    "Adam's loss stands still; where all gradients were measured to be above epsilon, it is not the reason."
    run = run_of(np.full(30, 2.0))
    params_of(run, "optimizer", names=["q.weight"], below_eps_frac=np.full((30, 1), share))
    run.attrs["optimizer"] = "Adam"
    findings = [Finding("not_learning", "warning", 0, 29), *find_grad_below_epsilon(run)]
    rows = choose_remedies("not_learning", run_context(run, findings))
    assert ("own-4" in {row["id"] for row in rows}) is is_told


def test_what_follows_a_named_cause_is_not_offered_as_a_puzzle():
    "The weights shrink at step 10; gradients below epsilon come after it, and are told without a cure."
    below = Finding("grad_below_epsilon", "warning", 73, modules=("a",), evidence={"n": 1, "share": 1.0})
    named = MostLikely("The weights shrink.", (), (), step=10, confidence="high")
    assert finding_to_explain(Findings([below]), named) is None
    for cause in (None, replace(named, confidence="low"), replace(named, step=73)):
        assert finding_to_explain(Findings([below]), cause) == below


def test_weights_that_the_first_step_moved_were_not_drawn_too_wide():
    "A rate of 0.3 made a std of 0.3 of weights that began at 0.02."
    run = run_of(np.linspace(3, 2, 30))
    run.attrs["shapes"] = {"fc.weight": [32, 64]}
    for update, is_reported in ((13.0, False), (0.01, True)):
        one = {"names": ["fc.weight"], "kinds": ["mlp.fc1"]}
        params_of(run, "weights", weight_norm=np.full((30, 1), 13.6), **one)
        params_of(run, "updates", update_norm=np.full((30, 1), update), **one)
        assert bool(find_wide_init(run)) is is_reported


def test_parameters_whose_gradients_begin_at_zero_do_not_explode_beside_a_frozen_one():
    "Blocks that begin as the identity: their gradients grow from nothing, that of the whole model does not."
    late = np.where(np.arange(30) < 10, 1e-3, 2e-2)
    run = run_of(np.linspace(3, 2, 30))
    params_of(
        run,
        "gradients",
        names=["head", "block", "frozen"],
        grad_norm=np.stack([np.ones(30), late, np.full(30, np.nan)], 1),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (finding,) = find_param_grad_explosion(run)
    assert finding.severity == "info"


def test_one_parameter_is_named_and_not_given_as_an_example():
    one = Finding("no_gradient", "warning", 0, modules=("eps",), evidence={"n": 1})
    assert explain(one) == "1 parameter that should train gets no gradient: eps."
    two = Finding("no_gradient", "warning", 0, modules=("eps", "w"), evidence={"n": 2})
    assert explain(two) == "2 parameters that should train get no gradient, such as eps."


def test_one_bad_batch_is_not_told_as_several():
    loss = 3 + 0.01 * np.random.default_rng(0).standard_normal(80)
    loss[40] = 4.5
    (finding,) = [f for f in diagnose(run_of(loss)) if f.kind == "loss_spike"]
    assert "of them" not in explain(finding) and "Single records" not in explain(finding)


def test_a_loss_that_ends_at_its_lowest_has_not_diverged():
    "Four bad batches in a row just before the end, after which the loss was the lowest of the run."
    fall = 0.7 + 0.6 * np.exp(-np.arange(67) / 15)
    loss = fall + 0.005 * np.random.default_rng(0).standard_normal(67)
    loss[[10, 30, 62, 63, 64, 65]] = 1.5
    loss[66] = 0.69
    assert not find_divergence(run_of(loss))
    loss[66] = 1.5
    assert find_divergence(run_of(loss))


def test_a_batch_that_is_not_finite_is_not_blamed_on_the_container_that_passes_it_on():
    run, names = run_of(np.where(np.arange(30) < 20, 2.0, np.nan)), ["net", "net.0", "net.1"]
    bad = (np.arange(30) >= 20)[:, None]
    unknown = np.full((30, 1), np.nan)
    first = np.hstack([unknown, bad * 1.0, bad * 8.0])
    for in_count, cause in ((first, "batch"), (np.hstack([0 * bad, first[:, 1:]]), "input")):
        data = {"nonfinite_count": np.hstack([bad, bad, bad]) * 8.0, "in_nonfinite_count": in_count}
        coords = {"step": np.arange(30), "module": np.array(names), "kind": ("module", ["other"] * 3)}
        run["activations"] = xr.DataTree(
            xr.Dataset({k: (("step", "module"), v) for k, v in data.items()}, coords=coords)
        )
        findings = [f for f in find_first_non_finite(run) if "cause" in f.evidence]
        assert [f.evidence["cause"] for f in findings] == [cause]


def test_values_of_a_batch_that_are_nan_are_measured():
    facts = {"loss_jump": (9.0, 3), "update_before": (1.0, 3)}
    forward, values = "activations of that step", "values of the batches"
    assert [forward in words or values in words for words in missing_measures(facts)] == [True, True]
    (words,) = missing_measures(facts | {"input_nonfinite": (1.0, 3)})
    assert forward in words
    # a level that has the activations has the values as well, where the first module takes any
    assert not missing_measures(facts | {"forward_jump": (1.0, 3)})


def test_a_loop_that_hands_over_no_batch_is_told_at_once_and_afterwards(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match=r"call `recorder.batch\(batch\)` before each forward pass"),
        sl.Recorder(model, optimizer, tmp_path / "run", snapshot_every=5) as recorder,
    ):
        for _ in range(3):
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    for question in (suspect_step, setup_of):
        with pytest.raises(InputError, match="its loop handed over no batch"):
            question(tmp_path / "run")


def test_a_loss_of_pairs_is_not_taken_of_one_sample():
    "The chosen half of a batch beside the rejected one: `chunk` of one row failed."

    def of_pairs(model, part):
        chosen, rejected = model(part).chunk(2)
        return (rejected - chosen).exp().mean()

    torch.manual_seed(0)
    setup = Setup(lambda: torch.nn.Linear(3, 1), of_pairs, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    with pytest.raises(
        InputError, match="an entry of the first dimension, taken for a sample, fails alone though the batch"
    ):
        blame(Snapshot(setup, setup.model().state_dict()), Batch([torch.randn(4, 3)]))


class TimeFirst(torch.nn.Module):
    "A recurrent classifier whose inputs are (seq, batch), as many older programs have them."

    def __init__(self):
        super().__init__()
        self.table, self.rnn = torch.nn.Embedding(9, 6), torch.nn.GRU(6, 5)
        self.head = torch.nn.Linear(5, 4)

    def forward(self, tokens, hidden=None):
        return self.head(self.rnn(self.table(tokens), hidden)[0])


@pytest.mark.parametrize("kind", ["labels of a sequence", "shifted tokens", "with a state"])
def test_samples_lie_along_the_second_dimension_where_only_there_they_make_up_the_loss(kind):
    def loss(model, part):
        if kind == "labels of a sequence":
            return torch.nn.functional.cross_entropy(model(part[0])[-1], part[1])
        if kind == "shifted tokens":
            logits = model(part[:-1])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[1:].flatten() % 4)
        return torch.nn.functional.cross_entropy(model(*part).flatten(0, 1), part[0].flatten() % 4)

    torch.manual_seed(0)
    setup = Setup(TimeFirst, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    tokens = torch.randint(9, (7, 5))
    parts = {
        "labels of a sequence": (tokens, torch.arange(5) % 4),
        "shifted tokens": tokens,
        "with a state": (tokens, torch.randn(1, 5, 5)),
    }
    state = Snapshot(setup, setup.model().state_dict())
    table = blame(state, Batch([parts[kind]]))
    together = float(loss(state.build()[0], parts[kind]).detach())
    assert len(table) == 5 and table.share.sum() == pytest.approx(1)
    assert table.attrs["loss"] == pytest.approx(together, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "onset", "step"), [("not_learning", 0, 29), ("not_learning", 9, 9), ("non_finite", 0, 0)]
)
def test_what_holds_from_the_first_step_on_is_replayed_where_others_stand_before_it(kind, onset, step):
    findings = Findings([Finding(kind, "warning", onset, evidence={})])
    assert step_to_replay(findings, range(30)) == step
    assert step_to_replay(findings, []) == onset


@pytest.mark.parametrize(("first", "step"), [(0, 5), (2, 2)])
def test_an_event_is_replayed_rather_than_a_cause_at_the_first_step(first, step, monkeypatch):
    monkeypatch.setattr(content, "most_likely", lambda findings: SimpleNamespace(step=first))
    spike, high = Finding("loss_spike", "warning", 5), Finding("lr_too_high", "warning", first)
    assert step_to_replay(Findings([high, spike]), range(30)) == step
    assert step_to_replay(Findings([high]), range(30)) == first
    assert step_to_replay(Findings([high, spike]), []) == step


@pytest.mark.parametrize("kind", ["throughput_drop", "data_stall", "memory_growth"])
def test_a_slow_machine_is_no_reason_to_replay_a_step(kind):
    slow = Finding(kind, "warning", 12, evidence={})
    assert step_to_replay(Findings([slow]), range(30)) is None
    rise = Finding("divergence", "error", 20, evidence={})
    assert step_to_replay(Findings([slow, rise]), range(30)) == 20


def test_a_step_that_was_not_kept_is_not_the_one_that_is_replayed(monkeypatch):
    run, findings = (
        run_of(np.linspace(3, 2, 30)),
        Findings([Finding("loss_spike", "warning", 22, evidence={})]),
    )
    for steps, words in (([20, 22], "Replay the suspect step:"), ([10, 19], "Step 22 was not kept")):
        monkeypatch.setattr("stabilitylab.report.content._recorded_steps", lambda folder, steps=steps: steps)
        text = run_sentences(run, findings, "runs/mine")
        assert text.replay_words.startswith(words) and text.replay.endswith(f"--step {steps[-1]}")


@pytest.mark.parametrize(
    ("rate", "blown", "words"), [(50.0, 1.0, "its updates are 50 times"), (1.0, 50.0, "the state is")]
)
def test_a_state_whose_rate_alone_is_out_of_line_has_no_bad_weights(rate, blown, words):
    torch.manual_seed(0)
    setup = Setup(
        lambda: torch.nn.Linear(3, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    )
    weights = setup.model().state_dict()
    plain = torch.optim.SGD(setup.model().parameters(), lr=0.001).state_dict()
    raised = {**plain, "param_groups": [plain["param_groups"][0] | {"lr": 0.001 * rate}]}
    states = [Snapshot(setup, weights, plain) for _ in range(3)]
    states.append(Snapshot(setup, {name: blown * w for name, w in weights.items()}, raised))
    batches = [Batch([torch.randn(16, 3)]) for _ in range(4)]
    result = swap_test(states, batches, progress=False)
    assert result.verdict == "bad state" and words in result.words


def test_a_run_with_a_gradient_is_not_told_that_no_gradient_reaches_its_weights():
    loss = 3.7 + 0.001 * np.random.default_rng(0).standard_normal(100)
    for norm, is_possible in ((0.1, False), (0.0, True)):
        samples = {"loss": loss, "grad_norm": np.full(100, norm)}
        scalars = make_scalars({name: Samples(np.arange(100), values) for name, values in samples.items()})
        likely = most_likely(diagnose(new_run(scalars)))
        assert "learning rate is far too" in likely.cause and ("No gradient" in likely.cause) is is_possible


def test_a_loss_that_compares_pairs_is_not_measured_by_the_width_of_their_embeddings(tmp_path):
    "Contrastive, 128 pairs, 32 wide: its first loss was told as twice that of a guess among 32 classes."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(45):
            rows = torch.nn.functional.normalize(model(recorder.batch(3 * torch.randn(128, 48))), dim=-1)
            targets = torch.arange(128).roll(1)
            loss = torch.nn.functional.cross_entropy(12 * rows @ rows.T, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    run = sl.open_run(tmp_path / "run")
    assert run["scalars"].loss.values[0] > 2 * np.log(32)
    assert "first_over_chance" not in evidence(run)
