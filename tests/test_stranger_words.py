"Sentences that were untrue of programs which nobody here had written."

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

from stabilitylab import Recorder, diagnose, read_runs
from stabilitylab.detect.layers.parameters import find_grad_below_epsilon
from stabilitylab.detect.likely_cause import ranked_causes
from stabilitylab.names.errors import InputError
from stabilitylab.numerics.rounding.loss_cast import find_loss_cast
from stabilitylab.replay.blame import blame
from stabilitylab.replay.state import Batch, Setup, Snapshot
from stabilitylab.replay.swap import SwapTest, _decide
from stabilitylab.trial import start
from tests.test_detect_decisions import run_of

GRADIENTS = [[0.15, 0.26, 0.12], [0.16, 0.29, 0.13], [0.17, 0.30, 0.14], [1.15, 0.64, 1.27]]


def swapped(last_losses, updates=0.02, last_update=0.002):
    "A swap test of four states and three batches; the last state has a larger gradient."
    loss = [[0.694, 0.690, 0.692], [0.694, 0.694, 0.692], [0.692, 0.697, 0.693], last_losses]
    update = np.full((4, 3), updates)
    update[-1] = last_update
    cells = {"grad_norm": np.array(GRADIENTS), "loss": np.array(loss), "update_norm": update}
    verdict, by, evidence = _decide(cells, 2.0)
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


@pytest.mark.parametrize(("rms", "n"), [(0.2, 0), (3e-9, 1)])
def test_zeros_of_inactive_units_are_not_below_epsilon(rms, n):
    run = run_of([1.0] * 20)
    coordinates = {"step": np.arange(20), "param": ["mlp.weight"], "kind": ("param", ["mlp"])}
    rows = ("step", "param")
    run["optimizer"] = xr.DataTree(xr.Dataset({"below_eps_frac": (rows, np.full((20, 1), 0.6))}, coordinates))
    gradients = {"rms": (rows, np.full((20, 1), rms)), "grad_norm": (rows, np.full((20, 1), rms * 10))}
    run["gradients"] = xr.DataTree(xr.Dataset(gradients, coordinates))
    run.attrs["eps"] = 1e-9
    assert len(find_grad_below_epsilon(run)) == n


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
