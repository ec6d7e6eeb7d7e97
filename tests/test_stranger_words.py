"Sentences that were untrue of programs which nobody here had written."

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

from stabilitylab import Recorder, diagnose, read_runs
from stabilitylab.cli.main import _each_warning_once
from stabilitylab.detect.context import at_step, loss_span, run_context
from stabilitylab.detect.facts.evidence import evidence
from stabilitylab.detect.facts.jump_facts import _total
from stabilitylab.detect.findings import Finding, Findings, explain
from stabilitylab.detect.layers.parameters import (
    find_grad_below_epsilon,
    find_lost_updates,
    find_no_gradient,
    find_wide_init,
)
from stabilitylab.detect.likely_cause import MostLikely, most_likely, ranked_causes
from stabilitylab.detect.loss.trend import find_not_learning
from stabilitylab.detect.non_finite import find_first_non_finite
from stabilitylab.fixes.training import Training
from stabilitylab.investigation import plan
from stabilitylab.knowledge.remedies import REMEDIES_SHOWN, choose_remedies
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.modes import flushes_denormals, rng_state
from stabilitylab.numerics.rounding.loss_cast import find_loss_cast
from stabilitylab.replay.blame import blame
from stabilitylab.replay.examine import controls
from stabilitylab.replay.rounded_step import StepPrecision, _attention, _casts, _regimes
from stabilitylab.replay.samples import cut_to
from stabilitylab.replay.state import Batch, Setup, Snapshot
from stabilitylab.replay.swap import SwapTest, swap_test
from stabilitylab.replay.swap_table import decide
from stabilitylab.replay.user_code import faults_in_one_line, theirs
from stabilitylab.report import content
from stabilitylab.report.content import run_sentences, step_to_replay
from stabilitylab.report.step import replay_text, step_text
from stabilitylab.report.terminal import run_text
from stabilitylab.run.curves import IN_ENVIRONMENT, TRAINED_BESIDE, noted_at
from stabilitylab.run.record import open_run
from stabilitylab.run.recording import opened
from stabilitylab.trial import start
from stabilitylab.trial.arm import Arm, run_arm
from stabilitylab.trial.start import Start
from stabilitylab.trial.suggest import _evidence_of, suggest
from tests.test_detect_decisions import run_of


def test_a_loss_around_zero_that_changes_its_sign_is_not_said_to_learn_nothing():
    rng = np.random.default_rng(0)
    loss = 1e-8 * rng.standard_normal(250)
    loss[50::7] = 0.1 * rng.standard_normal(len(loss[50::7]))
    assert find_not_learning(run_of(loss=loss)) == []
    assert find_not_learning(run_of(loss=3 + loss)) != []


def test_a_loss_that_came_back_to_a_little_above_its_first_value_began_at_that_value():
    loss = np.r_[491.8, 2.2e5, 3.1e13, 3.2e13, np.full(396, 498.2)]
    (still,) = find_not_learning(run_of(loss=loss))
    assert (still.evidence["first"], still.evidence["drop"]) == (491.8, 0.0)
    assert still.evidence["best"] == pytest.approx(498.2)


GRADIENTS = [[0.15, 0.26, 0.12], [0.16, 0.29, 0.13], [0.17, 0.30, 0.14], [1.15, 0.64, 1.27]]


def swapped(last_losses, updates=0.02, last_update=0.002):
    "A swap test of four states and three batches; the last state has a larger gradient."
    loss = [[0.694, 0.690, 0.692], [0.694, 0.694, 0.692], [0.692, 0.697, 0.693], last_losses]
    update = np.full((4, 3), updates)
    update[-1] = last_update
    cells = {"grad_norm": np.array(GRADIENTS), "loss": np.array(loss), "update_norm": update}
    verdict, by, evidence = decide(cells, 2.0)
    return SwapTest(verdict, by, xr.Dataset({n: (("state", "batch"), v) for n, v in cells.items()}), evidence)


def test_a_state_that_has_learned_is_not_bad_for_its_larger_gradient():
    swap = swapped([0.655, 0.674, 0.653])
    assert swap.verdict == "neither"
    assert "is 3.98 times that of earlier states" in swap.words and "is not bad" in swap.words
    assert swapped([0.655, 0.72, 0.653]).verdict == "bad state"  # one batch is worse
    assert swapped([0.655, 0.674, 0.653], last_update=2.0).verdict == "bad state"  # the optimizer's doing


def state_of(loss, n_in=3):
    "A linear model with a loss."
    torch.manual_seed(0)
    setup = Setup(lambda: torch.nn.Linear(n_in, 1), loss)
    return Snapshot(setup, setup.model().state_dict())


def test_a_model_that_does_not_divide_by_the_items_it_is_given_has_samples_of_its_own_losses():
    part = {"x": torch.randn(4, 3), "num_items_in_batch": torch.tensor(4)}
    ignoring = blame(state_of(lambda m, b: m(b["x"]).square().mean()), Batch([part]))
    dividing = blame(state_of(lambda m, b: m(b["x"]).square().sum() / b["num_items_in_batch"]), Batch([part]))
    assert not ignoring.attrs["is_part"] and dividing.attrs["is_part"]
    assert ignoring.attrs["loss"] == pytest.approx(dividing.attrs["loss"], rel=1e-5)
    assert ignoring.loss.mean() == pytest.approx(ignoring.attrs["loss"], rel=1e-5)


def test_entries_without_a_loss_of_their_own_are_no_samples():
    "A sequence to sequence model, time first: one step alone has nothing to predict."

    model = state_of(lambda m, b: m(b[:-1]).square()[b[1:, :, 0] > 0].mean())
    times = torch.rand(6, 4, 3) - 0.2 * torch.arange(4)[:, None]
    with pytest.raises(InputError, match="no finite loss alone, though the batch has one"):
        blame(model, Batch([times]))


def test_samples_are_found_in_arrays_and_refused_where_the_gradient_is_zero():
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    of_arrays = state_of(lambda m, b: m(torch.from_numpy(b[0])).square().mean())
    assert len(blame(of_arrays, Batch([(rows, rows)]))) == 5
    seen = np.array([[1, 0, 0], [2, 3, 4]])  # two samples of one token and of three

    def over_tokens(model, batch):
        ids = torch.from_numpy(batch[0])
        return model(ids)[ids > 0].square().mean()

    table = torch.nn.Embedding(5, 2)
    by_tokens = Snapshot(Setup(lambda: torch.nn.Embedding(5, 2), over_tokens), table.state_dict())
    assert blame(by_tokens, Batch([(seen, seen)])).tokens.tolist() == [1, 3]
    with pytest.raises(InputError, match="gradient of this batch is zero"):
        blame(state_of(lambda m, b: m(b).sum() * 0), Batch([torch.ones(2, 3)]))
    with pytest.raises(InputError, match="sparse tensor"):
        blame(of_arrays, Batch([(torch.eye(3).to_sparse(), torch.ones(3, 3))]))


@pytest.mark.parametrize(("rms", "n"), [(0.2, 0), (3e-9, 1), (0.0, 0)])
def test_zeros_of_inactive_units_are_not_below_epsilon(rms, n):
    run = run_of([1.0] * 20)
    coordinates = {"step": np.arange(20), "param": ["mlp.weight"], "kind": ("param", ["mlp"])}
    rows = ("step", "param")
    run["optimizer"] = xr.DataTree(xr.Dataset({"below_eps_frac": (rows, np.full((20, 1), 0.6))}, coordinates))
    gradients = {"rms": (rows, np.full((20, 1), rms)), "grad_norm": (rows, np.full((20, 1), rms * 10))}
    run["gradients"] = xr.DataTree(xr.Dataset(gradients, coordinates))
    run.attrs["eps"] = 1e-9
    assert len(find_grad_below_epsilon(run)) == n


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "accused"), [((10,) * 4, "reused_batches"), ((1,) * 20 + (20,), "repeated_data")]
)
def test_a_loop_that_means_to_take_several_steps_on_a_batch_is_no_loader_that_repeats_itself(
    tmp_path, lengths, accused
):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=10) as recorder:
        for length in lengths:
            data = torch.randn(8, 6), torch.randn(8, 1)
            for _ in range(length):
                x, y = recorder.batch(data)
                loss = (model(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                recorder.step(loss)
    (run,) = read_runs(tmp_path / "run").values()
    facts = diagnose(run).attrs["evidence"]
    accusing = {"reused_batches", "repeated_data"} & {cause.id for cause in ranked_causes(facts)}
    assert accusing == {accused}
    assert ("same_batch" in facts) == (accused == "repeated_data")
    if accused == "reused_batches":
        box = opened(tmp_path / "run").box()
        ids = {row["step"]: row["batch_id"] for row in box.batches}
        # the batches beside the suspect one are others; of the jumps only those that were kept are known
        assert len({ids[step] for step in (*controls(tmp_path / "run", 35)[1], 35)}) == 4
        assert "first" not in ranked_causes(facts)[0].words


@pytest.mark.parametrize(
    ("kept", "words", "n"),
    [
        ([30, 40, *range(50, 70)], "batches of steps 40, 50 to 69, repeated", 21),
        ([*range(40, 60), *range(65, 70)], "batches of steps 40 to 59, repeated", 20),
    ],
)
def test_a_trial_is_not_dealt_the_bad_batch_alone(monkeypatch, kept, words, n):
    box = SimpleNamespace(steps=kept)
    monkeypatch.setattr(start, "opened", lambda path: SimpleNamespace(box=lambda: box))
    monkeypatch.setattr(start, "setup_of", lambda *_: SimpleNamespace(batches=None))
    begun = start.Start("run", 40)
    assert words in begun.words and begun.n_recorded == n


def test_labels_as_numbers_are_no_outputs_of_the_model():
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(5, 3), torch.randn(8, 5), torch.randint(0, 3, (8,))

    def dice(model, batch):
        shares, wanted = model(x).softmax(1), torch.nn.functional.one_hot(y, 3).float()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss += 1 - 2 * (shares * wanted).sum() / (shares.sum() + wanted.sum())
        return loss

    cast = find_loss_cast(model, None, dice)
    assert cast.place == "none" and cast.logits_fmt == "" and cast.steps.operation[0] in ("addmm", "mm")


def test_a_forward_pass_that_changes_its_inputs_in_place_is_given_the_batch_as_it_was_kept():
    "A graph network moved the coordinates of its batch: each further use of the batch had another loss."
    batch = [torch.ones(4, 3), {"rows": np.ones((4, 3), "float32")}]

    def moving(model, given):
        given[0].add_(1)
        given[1]["rows"] += 1
        return model(given[0]).square().mean()

    setup = Setup(lambda: torch.nn.Linear(3, 1), moving)
    model = setup.model()
    assert setup.loss(model, batch) == setup.loss(model, batch)
    assert batch[0].eq(1).all() and (batch[1]["rows"] == 1).all()
    assert not blame(state_of(moving), Batch([batch])).attrs["draws"]


def test_a_swap_test_that_cannot_tell_names_what_disagrees():
    loss = np.array([[1.0, 1.1, 2.9], [1.1, 1.0, 3.0], [1.0, 1.1, 2.2]])
    flat = np.array([[1.0, 1.1, 1.0], [1.1, 1.0, 1.1], [1.0, 1.1, 1.0]])
    cells = {"grad_norm": flat, "loss": loss * [1, 1, 0.85], "update_norm": flat}

    def words(cells):
        verdict, by, evidence = decide(cells, 2.0)
        data = xr.Dataset({name: (("state", "batch"), values) for name, values in cells.items()})
        return verdict, SwapTest(verdict, by, data, evidence).words

    assert words(cells) == (
        "cannot tell",
        "the loss is out of line, but the gradient norm and the norm of the update are not",
    )
    broken = {name: values * np.nan for name, values in cells.items()}
    assert words(broken) == ("cannot tell", "the controls are not finite numbers above 0")


def test_what_fails_in_evaluation_mode_alone_is_said_to():
    def other_in_evaluation(model, batch):
        if not model.training:
            raise ValueError("too many values")
        return model(batch).square().mean()

    state = state_of(other_in_evaluation)
    state = replace(state, setup=theirs(state.setup))
    words = r"`setup.loss` failed in evaluation mode, in .*too many values"
    with pytest.raises(InputError, match=words), faults_in_one_line():
        blame(state, Batch([torch.ones(4, 3)]))
    casts, left_out = _casts(state, state.build()[0], torch.ones(4, 3), "bf16")
    assert not casts and len(left_out) == 2
    assert all(why == "in evaluation mode the program fails: too many values" for why in left_out.values())


def precision_of(**fields):
    "What `stabilitylab precision` prints of made results."
    cast = {"place": "logits", "fmt": "bf16", "loss": 1.43, "exact_loss": 1.42, "logits_fmt": "", "fix": "-"}
    made = StepPrecision("run", 3, "bf16", {}, None, {}, None)
    return step_text(made.to_dict() | {"casts": {"as recorded": cast}} | fields)


def test_a_loss_in_evaluation_mode_says_what_the_step_had_where_that_is_another_number():
    assert "exact 1.42 (evaluation mode);" in precision_of(loss=1.421)
    assert "exact 1.42 (evaluation mode; the step had 41.5);" in precision_of(loss=41.5)
    of_two = precision_of(loss=2.85, micro_batches=2)
    assert "(first of 2 micro-batches, evaluation mode; the step had 2.85)" in of_two
    of_sum = precision_of(loss=2.85, micro_batches=2, is_sum=True)
    assert "; the step had 2.85, the sum over all of them)" in of_sum


def test_an_epsilon_that_is_zero_in_fp16_is_told():
    gradients = {"a": torch.tensor([0.1, 0.0]).half(), "b": torch.tensor([0.1, 0.0])}
    half = {"a": 1e-8}
    assert _regimes(None, None, gradients, half)["a"].regime == "zero"
    assert _regimes(None, None, gradients, half, is_fused=True)["a"].regime == "no effect"
    assert _regimes(None, None, gradients, {"b": 1e-8})["b"].regime == "no effect"
    rows = [{"param": "b", "ratio": 3.0, "eps": 1e-8, "regime": "shrinks", "advice": "-", "below": 0.0}]
    zero = {
        "param": "a",
        "ratio": float("inf"),
        "eps": 0.0,
        "regime": "zero",
        "advice": "raise eps",
        "below": 0.0,
    }
    assert "epsilon    0 in the format of a; raise eps" in precision_of(eps=[*rows, zero], loss=1.42)


def weights_gone(dtype, eps, gradient=0.5, steps=1):
    "A record whose weight was not finite after its first step."
    run = run_of([0.86] * steps)
    axes, where = ("step", "param"), {"step": np.arange(steps), "param": ["table.weight"]}
    ones = np.ones((steps, 1))
    run["weights"] = xr.DataTree(xr.Dataset({"nonfinite_count": (axes, 121 * ones)}, where))
    gradients = {"grad_norm": (axes, gradient * ones), "nonfinite_count": (axes, 0 * ones)}
    run["gradients"] = xr.DataTree(xr.Dataset(gradients, where))
    run.attrs |= {"dtypes": {"table.weight": dtype}, "eps": eps}
    (finding,) = find_first_non_finite(run)
    return explain(finding), most_likely(Findings([finding])).cause


def test_weights_that_a_step_broke_are_no_loss_that_became_nan():
    words, cause = weights_gone("float16", 1e-8)
    assert "epsilon of 1e-08 is 0 in fp16" in words and "later step" not in words
    assert cause.startswith("Adam's epsilon is 0 in fp16")
    for dtype, eps in (("float16", 1e-4), ("float32", 1e-8), ("float32", None)):
        words, cause = weights_gone(dtype, eps, steps=3)
        assert "the step of the optimizer made it" in words and "every later step had some" in words
        assert cause.startswith("The optimizer's step made weights")
    assert "gradient was finite" not in weights_gone("float16", 1e-8, gradient=np.nan)[0]


def test_a_parameter_of_a_module_that_is_never_called_is_a_note():
    run = run_of(np.linspace(3, 2, 20))
    params, modules = ["used.weight", "spare.weight", "cut.weight"], ["used", "spare", "cut"]
    steps = {"step": np.arange(20)}
    norms = np.tile([1.0, 0.0, 0.0], (20, 1))
    gradients = {"grad_norm": (("step", "param"), norms), "nonfinite_count": (("step", "param"), 0 * norms)}
    run["gradients"] = xr.DataTree(xr.Dataset(gradients, steps | {"param": params}))
    rms = np.tile([1.0, np.nan, 1.0], (20, 1))
    outputs = {"rms": (("step", "module"), rms), "nonfinite_count": (("step", "module"), 0 * rms)}
    run["activations"] = xr.DataTree(xr.Dataset(outputs, steps | {"module": modules}))
    run.attrs["trainable"] = params
    lost, uncalled = find_no_gradient(run)
    assert (lost.severity, lost.modules) == ("warning", ("cut.weight",))
    assert (uncalled.severity, uncalled.modules) == ("info", ("spare.weight",))
    assert "1 parameter of a module that the forward pass never calls gets no gradient" in explain(uncalled)


def test_a_slow_machine_is_explained_only_where_nothing_else_is_to_be():
    slow, spike = Finding("throughput_drop", "warning", 3, 9), Finding("loss_spike", "warning", 5)
    text = run_text(run_of([3.0, 2.0]), Findings([slow, spike]))
    assert "stabilitylab explain loss_spike" in text and "explain throughput_drop" not in text
    assert "explain throughput_drop" in run_text(run_of([3.0, 2.0]), Findings([slow]))


def test_a_warning_of_a_program_that_is_built_several_times_is_printed_once():
    with pytest.warns(FutureWarning) as printed, _each_warning_once():
        for _ in range(3):
            with warnings.catch_warnings():  # as libraries do: Python forgets what it has shown
                warnings.simplefilter("always")
                for text in ("deprecated", "another"):
                    warnings.warn(text, FutureWarning, stacklevel=1)
                # what a library warns of was printed when the run trained
                warnings.warn_explicit("old", FutureWarning, "/lib/site-packages/theirs/unet.py", 7)
    assert [str(each.message) for each in printed] == ["deprecated", "another"]


def test_the_shape_of_one_sample_is_no_warning(recwarn):
    "A Q network's loss squeezes its batch of one, and PyTorch warned of the shapes at every replay."

    def loss(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]).squeeze(), batch[1])

    setup = Setup(lambda: torch.nn.Linear(3, 1), loss, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))
    state = Snapshot(setup, setup.model().state_dict())
    assert len(blame(state, Batch([(torch.randn(4, 3), torch.randn(4))]))) == 4
    assert not [w for w in recwarn if "target size" in str(w.message)]


def test_a_trial_that_tries_nothing_names_what_was_found(monkeypatch):
    "Dead units that the loss did not show: nothing was said to be found."
    monkeypatch.setattr(plan, "cause_of", lambda findings, run: None)
    recording = SimpleNamespace(run=run_of([3.0, 2.0]))
    for severity, words in (
        ("warning", "What was found (dead units) is no failure of the loss: nothing is tried"),
        ("info", "Nothing"),
    ):
        (note,) = plan.plan_trial(recording, Findings([Finding("dead_units", severity, 5)])).notes
        assert words in note


@pytest.mark.parametrize(
    ("id", "cures", "n"), [("softmax_twice", (), 1), ("rate_too_high", ("lower_lr",), 0)]
)
def test_a_trial_says_that_only_a_change_of_the_program_mends_the_cause(id, cures, n):
    "A sigmoid in front of the loss with its own: the trial offered LoRA and another epsilon without a word."
    cause = MostLikely("Wrong.", (), ("Hand over the logits",), id=id, cures=cures)
    notes = plan._beyond_fixes(cause)
    assert len(notes) == n and all("What to do about it: Hand over the logits." in note for note in notes)


class Checks(torch.nn.Module):
    "A weight that one step makes NaN, and a forward pass that refuses such a weight."

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        if not self.weight.isfinite().all():
            raise RuntimeError("all elements of input should be between 0 and 1")
        return self.weight * batch


def failing_training(seed=0, lr=float("inf")):
    "A training whose first step leaves a weight that is not finite, at an infinite rate."
    model = Checks()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Training(model, optimizer, lambda m, batch: m(batch).square().sum(), lambda step: [torch.ones(1)])


def test_an_arm_whose_program_fails_on_weights_that_are_not_finite_has_diverged(tmp_path):
    start = Start(function="tests.test_stranger_words:failing_training").to_dict()
    threads = torch.get_num_threads()
    result = run_arm(start, Arm().to_dict(), 0, 8, str(tmp_path / "arm"))
    # an arm sets both for its own steps; hypothesis refused to run in a process whose denormals were 0
    assert not flushes_denormals() and torch.get_num_threads() == threads
    assert result["non_finite"] and result["steps"] < 8
    rows = [json.loads(line) for line in (tmp_path / "arm/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] != rows[-1]["loss"] and len(rows) == 2


def test_an_epsilon_that_fp16_turns_to_zero_is_tried_as_one_that_it_holds():
    "The default of the fix, 1e-15, was refused, so the cure of such a run was never tried."
    finding = Finding("non_finite", "error", 0, evidence={"cause": "epsilon", "eps": 1e-8})
    of_run = _evidence_of("adam_eps", [finding], run_of([0.86]))
    assert of_run.parameters == {"eps": 1e-4} and "1e-08 is 0 in fp16" in of_run.reason
    other = Finding("divergence", "error", 0)
    assert not _evidence_of("adam_eps", [other], run_of([0.86])).parameters


def test_samples_weigh_by_their_labels_where_the_model_ignores_the_items_it_is_given():
    "A tagger: `0.385 of the loss`, and `their mean loss is 4.378` of a loss of 0.59."
    labels = torch.tensor([[1, 1, 0, 1], [1, -100, -100, -100], [0, 1, -100, -100]])
    part = {"x": torch.randn(3, 4, 3), "labels": labels, "num_items_in_batch": torch.tensor(7)}

    def tagged(model, batch):
        counts = batch["labels"] >= 0
        return (model(batch["x"])[..., 0] - batch["labels"]).square()[counts].mean()

    state = state_of(tagged)
    table = blame(state, Batch([part]))
    assert not table.attrs["is_part"] and table.tokens.tolist() == [4, 1, 2]
    assert table.attrs["loss"] == pytest.approx(float(tagged(state.build()[0], part)), rel=1e-5)


def test_samples_of_a_loss_that_takes_a_gradient_itself():
    def penalised(model, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()

    assert len(blame(state_of(penalised), Batch([torch.randn(4, 3)]))) == 4
    state = state_of(penalised)
    assert _attention(state, Batch([torch.randn(4, 3)])) is None  # no attention, and no fault of the loss
    setup = theirs(state.setup)
    state = replace(state, setup=setup)
    _, left_out = _casts(state, state.build()[0], torch.randn(4, 3), "bf16")
    assert set(left_out.values()) == {"its loss takes a gradient itself"}


def test_a_part_of_the_loss_is_told_beside_the_whole():
    rows = [{"sample": i, "loss": 0.4, "grad_norm": 1.0, "share": 0.5, "cosine": 0.9} for i in range(2)]
    step = {"run": "run", "step": 1, "loss": 2.33, "recorded_loss": None, "grad_norm": 1, "update_norm": 1}
    of_loss = {"samples": rows, "samples_are_parts": True, "samples_loss": 2.331}
    assert "0: 50% of the gradient, 0.4 of the loss of 2.331;" in replay_text(step | of_loss)


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "bad draw"), (1e3, "bad batch")])
def test_a_batch_whose_random_numbers_alone_are_out_of_line_is_not_bad(scale, verdict):
    "A flow model drew a time next to 1, where its loss is 100 times the usual: `bad batch`."

    def loss(model, x):
        return ((model(x) - 1) / torch.rand(())).square().mean()

    setup = Setup(lambda: torch.nn.Linear(3, 1), loss, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))
    torch.manual_seed(0)
    states = [Snapshot(setup, setup.model().state_dict(), step=i, name=f"state {i}") for i in range(4)]
    found = {}
    for seed in range(300):
        torch.manual_seed(seed)
        found[seed] = float(torch.rand(()))
    usual = [seed for seed in found if 0.6 < found[seed] < 0.9][:4]
    rare = min(found, key=lambda seed: found[seed]) if scale == 1 else usual[3]
    batches = []
    for seed, factor in zip([*usual[:3], rare], [1, 1, 1, scale], strict=True):
        x = factor * torch.randn(8, 3)
        torch.manual_seed(seed)
        batches.append(Batch([x], rng=[rng_state()]))
    swap = swap_test(states, batches, progress=False)
    assert swap.verdict == verdict and ("its samples are ordinary" in swap.words) is (verdict == "bad draw")
    assert bool(swap.bad_in_a_row) is (verdict == "bad batch")


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "bad loop value"), (1e3, "bad batch")])
def test_a_batch_whose_target_network_alone_changed_is_not_bad(scale, verdict):
    "A Q network's target network was replaced 50 steps before: `bad batch; 10 or more batches in a row are`."

    def loss(model, x, loop):
        return (model(x) - x @ loop["target"]).square().mean()

    setup = Setup(lambda: torch.nn.Linear(3, 1), loss, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))
    torch.manual_seed(0)
    states = [Snapshot(setup, setup.model().state_dict(), step=i, name=f"state {i}") for i in range(4)]
    target, factors = torch.ones(3, 1), [1, 1, 1, scale, scale]
    new = 30 * target if scale == 1 else target
    values = [target, target, target, new, new]  # the batch before the suspect one has the new one, too
    parts = [
        {"batch": f * torch.randn(8, 3), "loop": {"target": t}} for f, t in zip(factors, values, strict=True)
    ]
    swap = swap_test(states, [Batch([part]) for part in parts], progress=False)
    assert swap.verdict == verdict and ("a target network" in swap.words) is (verdict == "bad loop value")


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "small batch"), (1e3, "bad batch")])
def test_the_small_last_batch_of_an_epoch_is_not_bad(scale, verdict):
    "The last 16 of 2,000 samples: a noisy gradient, called a bad batch."

    def loss(model, part):
        x, y = part
        return (model(x) - y).square().mean()

    setup = Setup(lambda: torch.nn.Linear(3, 1), loss, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3))
    torch.manual_seed(2)
    zeros = {name: torch.zeros_like(t) for name, t in setup.model().state_dict().items()}
    states = [Snapshot(setup, zeros, step=i, name=f"state {i}") for i in range(4)]
    batches = [Batch([(torch.randn(256, 3), torch.randn(256, 1))]) for _ in range(4)]
    last = Batch([(torch.randn(8, 3), scale * torch.randn(8, 1))])
    swap = swap_test(states, [*batches, last], progress=False)
    assert swap.verdict == verdict and ("smaller than the others" in swap.words) is (verdict == "small batch")
    assert swap_test(states, [*batches, batches[0]], progress=False).verdict == "neither"


@pytest.mark.parametrize(("other", "verdict"), [(5.5, "combination"), (15.4, "neither")])
def test_only_this_batch_in_this_state_is_said_where_no_other_batch_is_out_of_line_there(other, verdict):
    "A reward model whose gradients had begun to scatter: another batch had 15.4 in that state."
    gradients = [[1.0, 0.9, 0.9, 1.0, 1.0], [1.5, 1.3, 1.3, 1.6, 1.5], [2.3, 2.0, 2.0, 2.3, 2.8]]
    losses = [[0.676, 0.684, 0.685, 0.674, 0.683], [0.628, 0.648, 0.647, 0.626, 0.635]]
    losses += [[0.574, 0.607, 0.600, 0.571, 0.579], [0.344, 0.406, 0.359, 0.341, 0.236]]
    cells = {"grad_norm": np.array([*gradients, [5.1, 5.7, other, 5.5, 19.1]]), "loss": np.array(losses)}
    assert decide(cells, 2.0)[0] == verdict


def test_a_step_of_fewer_micro_batches_is_cut_like_one_of_fewer_samples():
    part = torch.arange(6.0).reshape(3, 2)
    four, two = Batch([part] * 4, rng=[None] * 4), Batch([part, part[:2]])
    cut = cut_to(four, two)
    assert [len(p) for p in cut.parts] == [3, 2] and len(cut.rng) == 2
    assert cut_to(two, four) is None and cut_to(four, four) is None
    assert cut_to(Batch([part, part[:2]]), Batch([part[:2], part])) is None  # neither is the smaller one


def test_a_loss_that_scatters_says_which_fall_would_show():
    "A flow model's median loss fell from 8.6 to 1.8: `a fall of a few hundredths would not show`."
    loss = np.exp(np.random.default_rng(0).normal(0, 1.5, 60))
    (found,) = find_not_learning(run_of(loss=np.where(np.arange(60) % 7 == 3, 40 * loss, loss)))
    bound = found.evidence["note"].removeprefix("The records scatter so widely that a fall of less than ")
    assert found.severity == "info" and float(bound.split()[0]) > 1


def weights_of(std, shape, kind="mlp.fc1"):
    "A record of the first step of one matrix."
    run = run_of([1.0] * 3)
    coordinates = {"step": np.arange(3), "param": ["fc.weight"], "kind": ("param", [kind])}
    norm = np.full((3, 1), std * np.sqrt(np.prod(shape)))
    run["weights"] = xr.DataTree(xr.Dataset({"weight_norm": (("step", "param"), norm)}, coordinates))
    run.attrs["shapes"] = {"fc.weight": list(shape)}
    return run


@pytest.mark.parametrize(("factor", "severity"), [(1.0, "info"), (1.3, "warning")])
def test_the_initialization_that_is_meant_for_relu_is_a_note(factor, severity):
    (found,) = find_wide_init(weights_of(factor * np.sqrt(2 / 32), (64, 32)))
    assert found.severity == severity
    assert explain(found).endswith("before a ReLU.") is (severity == "info")


@pytest.mark.slow
def test_a_batch_that_is_not_finite_at_the_very_first_step_is_blamed(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for step in range(6):
            x = torch.randn(4, 3)
            x[1, 1] = float("nan") if step == 0 else 0.0
            loss = model(recorder.batch(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    cause = most_likely(diagnose(read_runs(tmp_path / "run")["run"]))
    assert cause.id == "bad_inputs" and cause.step == 0


PRECISION = {
    "run": "r",
    "step": 49,
    "format": "bf16",
    "micro_batches": 1,
    "loss": 1.0,
    "casts": {},
    "eps": [],
}
PRECISION |= {"attention": None, "left_out": {}, "warning": ""}


def test_lost_updates_of_a_step_with_a_low_rate_are_told_as_such():
    "At the end of a cosine, with a rate of 0.1 % of the highest, all updates are lost in bf16."
    update = {"param": "fc.bias", "lost": 1.0, "kept": 0.0, "kept_stochastic": 0.0}
    rows = [update | {"kept_stochastic_sd": 26.8}, update | {"param": "fc.weight", "kept_stochastic_sd": 0.2}]
    result = PRECISION | {"updates": rows}
    text = step_text(result | {"rate_share": 0.0011})
    assert "learning rate is 0.11% of its highest" in text and text.count("one draw cannot tell") == 1
    assert "highest" not in step_text(result | {"rate_share": 0.4}) and "2680" not in text


@pytest.mark.parametrize(("dtype", "n"), [("bfloat16", 1), ("float32", 0)])
def test_weights_in_bf16_that_never_move_lose_their_updates(dtype, n):
    "A short run in bf16 with a rate from 0 on: the one sampled step had no update, and nothing was told."
    run = run_of(loss=[3.0] * 20, lr=np.r_[0.0, np.full(19, 1e-5)])
    coordinates = {
        "step": np.arange(20),
        "param": ["norm.weight", "fc.weight"],
        "kind": ("param", ["norm", "mlp"]),
    }
    table = lambda name, *row: xr.DataTree(  # noqa: E731
        xr.Dataset({name: (("step", "param"), np.tile(np.array(row), (20, 1)))}, coordinates)
    )
    run["gradients"], run["updates"] = table("grad_norm", 0.1, 0.1), table("update_norm", 0.0, 1e-4)
    first = {"step": [0], "param": coordinates["param"], "kind": coordinates["kind"]}
    run["sampled_updates"] = xr.DataTree(
        xr.Dataset({"lost_frac": (("step", "param"), np.full((1, 2), np.nan))}, first)
    )
    run.attrs["dtypes"] = dict.fromkeys(coordinates["param"], dtype)
    found = find_lost_updates(run)
    assert len(found) == n and all(f.modules == ("norm.weight",) and f.onset == 1 for f in found)
    run.attrs["shapes"] = {"norm.weight": [8], "fc.weight": [8, 8]}
    assert [f.severity for f in [*found, *find_lost_updates(run)]] == ["warning", "info"] * n


@pytest.mark.parametrize("kinds", [["conv", "other"], ["attn.q", "mlp.fc1"], None])
def test_reports_about_attention_are_not_told_of_a_model_without_it(kinds):
    "The critic of a GAN that did not learn was told of relative positions."
    run = run_of([1.0] * 3)
    if kinds is not None:
        coordinates = {"step": np.arange(3), "module": ["a", "b"], "kind": ("module", kinds)}
        rms = (("step", "module"), np.ones((3, 2)))
        run["activations"] = xr.DataTree(xr.Dataset({"rms": rms}, coordinates))
    rows = choose_remedies("output_collapse", run_context(run, []))
    names, told = [row["name"] for row in rows], kinds != ["conv", "other"]
    at = names.index("Absolute and relative positions together")
    assert (at < REMEDIES_SHOWN) is told and "attention" not in rows[at].get("fits", [])


def test_the_columns_of_lost_updates_stand_below_each_other_whatever_the_names():
    names = ["fc.bias", "model.layers.0.post_attention_layernorm.weight"]
    row = {"lost": 1.0, "kept": 0.0, "kept_stochastic": 0.0, "kept_stochastic_sd": 0.1}
    rows = [row | {"param": name} for name in names]
    text = step_text(PRECISION | {"updates": rows})
    lines = [line for line in text.splitlines() if "100.0%" in line]
    assert len({line.index("100.0%") for line in lines}) == 1 and len(lines) == 2


def facts_of_a_run_away(**more):
    "Of a loss that jumped at step 75 to four times chance, with gradients that had grown before."
    facts = dict(
        loss_jump=15.3, event_step=75.0, event_over_chance=4.01, forward_jump=0.99, back_at_once=0.77
    )
    facts |= dict(grad_jump=9.1, grad_before=3.25, update_before=2.05)
    facts |= dict(low_before=0.165, end_over_low=5.5)
    return {name: (value, 75) for name, value in (facts | more).items()}


def test_a_jump_after_gradients_that_had_grown_is_no_bad_batch_and_one_beyond_chance_no_repeated_data():
    causes = {cause.id for cause in ranked_causes(facts_of_a_run_away())}
    assert not {"bad_labels", "repeated_data"} & causes
    ordinary = facts_of_a_run_away(grad_before=1.2, event_over_chance=1.1)
    assert {"bad_labels", "repeated_data"} <= {cause.id for cause in ranked_causes(ordinary)}
    # data that an agent gathers itself change as it learns, and have no labels
    assert not {"bad_labels", "repeated_data", "data_shift"} & {
        cause.id for cause in ranked_causes(ordinary | {"own_data": (1.0, 0)})
    }


class Corridor:
    action_space = (-1, 1)

    def reset(self):
        return torch.zeros(3)

    def step(self, action):
        return torch.randn(3) + action


class Simulator(Corridor):
    "It describes no actions, and is not named as an environment."

    action_space = None


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Corridor, Simulator])
def test_a_loop_that_acts_in_an_environment_is_noted(tmp_path, kind):
    world, model = kind(), torch.nn.Linear(3, 1)
    with Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as recorder:
        for _ in range(3):
            loss = model(world.step(1)).square().mean()
            loss.backward()
            recorder.step(loss)
    assert (noted_at(open_run(tmp_path / "run"), IN_ENVIRONMENT) == 0) is (kind is Corridor)


@pytest.mark.parametrize(("onset", "chosen"), [(0, {"own-15", "own-25"}), (40, {"own-25"})])
def test_first_weights_are_not_blamed_for_a_network_that_died_later(onset, chosen):
    run = run_of(loss=np.linspace(3.0, 2.9, 200))
    context = at_step(run_context(run, []), loss_span(run), onset)
    assert {row["id"] for row in choose_remedies("dead_network", context)} == chosen


def test_noise_next_to_none_makes_no_multiple():
    evidence = {"baseline": 0.0, "peak": 1.0, "peak_step": 3, "recovery": "fast", "duration": 1}
    words = [explain(Finding("loss_spike", "warning", 3, evidence=evidence | {"z": z})) for z in (8.0, 4e6)]
    assert [text.count("usual noise") for text in words] == [1, 0]


@pytest.mark.parametrize(
    ("end", "late", "severity"), [(1.0, 20.0, "info"), (2.9, 20.0, "warning"), (1.0, 900.0, "warning")]
)
def test_a_gradient_that_outgrew_its_early_range_while_the_loss_fell_is_a_note(end, late, severity):
    norm, sizes = np.where(np.arange(400) < 150, 1.0, 20.0), {"param": ["w"], "step": range(400)}
    norm[300:] = late
    table = xr.Dataset({"grad_norm": (("step", "param"), norm[:, None])}, sizes)
    run = run_of(loss=np.linspace(3, end, 400) + 0.02 * np.sin(np.arange(400) * 2.4))
    run["gradients"] = xr.DataTree(table)
    (explosion,) = (f for f in diagnose(run) if f.kind == "grad_norm_explosion" and f.modules)
    assert explosion.severity == severity
    assert ("went on falling all the same" in explosion.explanation) is (severity == "info")


def test_parameters_without_a_gradient_leave_the_norm_of_all_gradients_known():
    table = xr.DataArray(np.array([[3.0, np.nan, 4.0], [np.nan, np.nan, 1.0], [np.nan] * 3]))
    assert np.allclose(_total(table, np.array([True, True, True])), [5.0, 1.0, np.nan], equal_nan=True)
    assert np.isnan(_total(table, np.array([False, False, False]))).all()


@pytest.mark.parametrize(
    ("note", "severity"), [("", "error"), (TRAINED_BESIDE, "info"), (IN_ENVIRONMENT, "info")]
)
def test_the_rise_of_a_loss_that_runs_through_another_trained_network_is_a_note(note, severity):
    value = np.r_[np.linspace(1.0, 0.8, 40), np.linspace(0.8, 2.2, 80)] + 0.02 * np.sin(np.arange(120) * 2.4)
    run = run_of(loss=value)
    run.attrs["optimizer"] = "Adam"
    if note:
        events = {"event_kind": ["note"], "event_step": [0], "event_text": [f"{note}: netD"]}
        run["events"] = xr.DataTree(xr.Dataset({name: ("event", row) for name, row in events.items()}))
    rises = [f for f in diagnose(run) if f.kind in ("divergence", "slow_rise", "level_shift")]
    assert rises and {f.severity for f in rises} == {severity}


def test_scaled_gradients_that_are_clipped_are_the_cause():
    assert [c.id for c in ranked_causes({"clipped_scaled": (1.0, 0)}) if c.is_alone] == [
        "scaled_gradients_clipped"
    ]


def test_a_loop_that_makes_its_inputs_float32_is_measured_with_weights_in_16_bits():
    setup = Setup(lambda: torch.nn.Linear(3, 1), lambda model, x: model(x.float()).square().mean())
    torch.manual_seed(0)
    model = setup.model()
    state = Snapshot(setup, model.state_dict())
    casts, left_out = _casts(state, model, torch.randn(4, 3), "bf16")
    assert not left_out and casts["with weights in bf16"].fmt == "bf16"


def classified(path, scale=1.0, last=torch.nn.Identity, decay=0.0, gamma=1.0):
    "A record of a small classifier, with the ordinary mistakes as arguments."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4), last())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    with Recorder(model, optimizer, path, merge=False) as recorder:
        for _ in range(60):
            x = torch.randn(32, 8)
            loss = torch.nn.functional.cross_entropy(model(scale * x), x[:, :4].argmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            recorder.step(loss)
    return open_run(path)


MISTAKES = {
    "softmax_twice": {"last": lambda: torch.nn.Softmax(-1)},
    "rate_gone": {"gamma": 0.6},
    "weights_shrink": {"decay": 50.0},
    "inputs_not_scaled": {"scale": 3000.0},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Recorder")
@pytest.mark.parametrize("name", MISTAKES)
def test_an_ordinary_mistake_of_a_loop_is_the_first_cause(tmp_path, name):
    run = classified(tmp_path / "run", **MISTAKES[name])
    assert ranked_causes(evidence(run))[0].id == name


def test_a_loop_without_a_mistake_has_none_of_these_causes(tmp_path, recwarn):
    usual = {"decay": 0.1, "gamma": 0.9, "scale": 3.0, "last": lambda: torch.nn.LogSoftmax(-1)}
    run = classified(tmp_path / "run", **usual)
    assert not {cause.id for cause in ranked_causes(evidence(run))} & set(MISTAKES) and not len(recwarn)


@pytest.mark.parametrize(("scale", "is_raw"), [(1, True), (255, False)])
def test_pixels_that_were_not_divided_are_named_where_the_first_layer_is_a_convolution(
    tmp_path, scale, is_raw
):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    largest = []
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(6):
            pixels = torch.randint(256, (4, 1, 8, 8)) / scale
            largest.append(float(pixels.max()))
            optimizer.zero_grad()
            loss = model(pixels).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    run = open_run(tmp_path / "run")
    assert run["activations"].in_absmax.sel(module="0").values == pytest.approx(largest)
    facts = evidence(run)
    assert ("input_bytes" in facts) is is_raw
    assert [c.id for c in ranked_causes(facts)] == (["inputs_not_scaled"] if is_raw else [])
    flat = facts | {"noted not_learning": (1.0, 0)}
    assert any(c.is_alone for c in ranked_causes(flat)) is is_raw  # with a flat loss


def test_evidence_of_a_record_without_shapes_or_with_an_infinite_rate(tmp_path):
    run = classified(tmp_path / "run")
    del run.attrs["shapes"]  # as old records lack them
    run["scalars"].lr[:] = np.inf
    assert not {"input_rms", "rate_gone"} & set(evidence(run))


def dying(path, n, at, **options):
    "A record of a loop that dies of its own exception."
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, optimizer, path, snapshot_every=5, **options) as recorder:
        for step in range(n):
            x, y = recorder.batch((torch.randn(8, 4), torch.full((8,), 2 if step == at else 1)))
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)


@pytest.mark.slow
def test_the_exception_that_ended_a_record_is_its_crash_until_the_run_goes_on(tmp_path):
    with pytest.raises(IndexError):
        dying(tmp_path / "run", 12, 9)
    (run,) = read_runs(tmp_path / "run").values()
    findings = diagnose(run)
    crash = next(f for f in findings if f.kind == "crash")
    assert crash.severity == "error" and crash.onset == 8 and "Target 2 is out of bounds" in crash.explanation
    assert step_to_replay(findings, range(10)) == 9  # its batch was kept
    assert not suggest(findings, run)  # no fix mends a program
    dying(tmp_path / "run", 6, None, first_step=9)
    (run,) = read_runs(tmp_path / "run").values()
    assert [f.severity for f in diagnose(run) if f.kind == "crash"] == ["info"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"on_nonfinite": "stop"}, {"on_warning": "stop"}])
def test_a_run_that_its_recorder_stopped_has_the_cause_of_what_it_saw(tmp_path, options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises((FloatingPointError, RuntimeError)),
        Recorder(model, optimizer, tmp_path / "run", snapshot_every=5, **options) as recorder,
    ):
        for step in range(120):
            x = torch.randn(8, 4)
            x[0] = torch.inf if step == 60 else x[0]
            loss = torch.nn.functional.mse_loss(model(recorder.batch(x)), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    (run,) = read_runs(tmp_path / "run").values()
    findings = diagnose(run)
    assert most_likely(findings).id == "bad_inputs"
    assert ("crash" in {f.kind for f in findings}) is ("on_nonfinite" in options)


@pytest.mark.parametrize(
    "peak_step, gradual, words",
    [
        (
            5,
            False,
            "The loss jumped at step 2, from 0.69 to 1.788 (795 times its usual noise) at step 5",
        ),
        (
            5,
            True,
            "The loss climbed from step 2 on, from 0.69 to 1.788 (795 times its usual noise) at step 5",
        ),
        (
            2,
            False,
            "The loss jumped from 0.69 to 1.788 (795 times its usual noise) at step 2; it was",
        ),
    ],
)
def test_steps_of_a_spike_that_are_counted_from_its_first_record_stand_beside_that_record(
    peak_step, gradual, words
):
    measured = {"baseline": 0.69, "peak": 1.788, "peak_step": peak_step, "z": 795.0, "recovery": "fast"}
    measured |= {"recovery_steps": 35, "grad_norm_lead_steps": 0} | ({"is_gradual": True} if gradual else {})
    spike = Finding("loss_spike", "warning", onset=2, end=36, evidence=measured)
    assert explain(spike).startswith(words)
    where = "at the same step" if peak_step == 2 else "at step 2"
    assert explain(spike).endswith(f"The gradient norm left its range {where}.")
    # many spikes have one sentence, and each its own first record
    assert "jumped from" in explain(spike.with_(evidence=measured | {"count": 2})) or gradual


class Warmed:
    "A schedule of a loop's own around its optimizer; without parameter groups and without a state."

    def __init__(self, optimizer, scale):
        self._optimizer, self.scale, self.count = optimizer, scale, 0

    def step_and_update(self):
        self.count += 1
        self._optimizer.param_groups[0]["lr"] = self.scale / self.count**0.5
        self._optimizer.step()


@pytest.mark.slow
def test_an_optimizer_in_a_class_of_the_loop_is_recorded_as_the_one_that_steps(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    warmed = Warmed(torch.optim.Adam(model.parameters()), 3.0)
    with warnings.catch_warnings(), Recorder(model, warmed, tmp_path / "run", snapshot_every=5) as recorder:
        warnings.simplefilter("error")
        for _ in range(12):
            batch = recorder.batch(torch.randn(8, 4))
            warmed._optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            warmed.step_and_update()
            recorder.step(loss)
    run = open_run(tmp_path / "run")
    findings = diagnose(run)
    assert "no_gradient" not in findings.kinds
    assert run["scalars"]["lr"].values[3] == pytest.approx(1.5)
    assert len(opened(tmp_path / "run").box().steps) == 12


def test_a_cause_without_a_finding_does_not_stand_beside_the_words_that_nothing_is_out_of_the_ordinary(
    monkeypatch,
):
    run = run_of(loss=np.linspace(3, 2, 60))
    assert run_sentences(run, Findings([])).verdict.startswith("nothing found")
    cause = SimpleNamespace(step=None, cause="The learning rate is too high for this run")
    monkeypatch.setattr(content, "most_likely", lambda _: cause)
    assert "nothing" not in run_sentences(run, Findings([])).verdict


def test_a_record_without_a_black_box_is_told_how_each_framework_gets_one(tmp_path):
    model = torch.nn.Linear(4, 1)
    with Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / "run") as recorder:
        recorder.step(model(torch.ones(2, 4)).sum())
    for call in ("RecorderCallback", "LightningCallback"):
        with pytest.raises(InputError, match=rf"{call}\(path, snapshot_every=100\)"):
            opened(tmp_path / "run").box()
