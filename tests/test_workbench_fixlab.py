"""The fix lab without a browser: a trial whose arms are stopped, added and opened while it goes on."""

import time

import pytest
import torch

from stabilitylab import Recorder
from stabilitylab.cases.registry import sample
from stabilitylab.detect.diagnose import diagnose
from stabilitylab.investigation.opening import open_recordings
from stabilitylab.investigation.plan import first_step
from stabilitylab.names.errors import InputError
from stabilitylab.run.job import JobState
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.trial.settings import recipe_of
from stabilitylab.trial.start import Start
from stabilitylab.trial.trial import Trial
from stabilitylab.workbench.fixlab import FixLab, choices
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.tabs import Workbench
from stabilitylab.workbench.view_fixlab import FixLabView


def until(view: FixLabView, is_so: object, seconds: float = 400) -> None:
    "Polls the trial until something is so."
    end = time.monotonic() + seconds
    while not is_so():
        view.work.poll()
        assert time.monotonic() < end, view.work.says.value  # a hang; a busy machine takes minutes
        time.sleep(0.1)


def opened() -> FixLabView:
    "The view on the sample, with one fix ticked."
    state, _ = open_state(sample())
    state.visible = "fixlab"
    view = FixLabView(state)
    for box in view.offers.boxes:
        box.tick.value = box.choice.name == "lower_lr"
    return view


def tick(view: FixLabView, name: str) -> None:
    "Ticks one more fix, offered or not."
    known = {box.choice.name: box for box in view.offers.boxes}
    if name in known:
        known[name].tick.value = True
    else:
        view.offers.offer(name)


@pytest.mark.slow  # trains in processes
def test_an_arm_is_stopped_another_added_and_both_are_told():
    view = opened()
    view.lab.seeds, view.lab.length = 1, 5000  # more than any machine trains meanwhile
    view.work.start()
    base, fixed, null = "unchanged", "lower_lr:factor=0.045", "another order"
    assert view.arms.lines.keys() == {base, fixed, null}
    until(view, lambda: all(view.arms.lines[name].bar.value > 0 for name in (base, fixed)))
    assert view.arms.picture.png and view.arms.picture.panels[0]["series"][0]["name"] == base
    assert not view.work.stop.disabled and view.arms.lines[base].stop.layout.visibility == "hidden"
    view.stop(fixed)
    view.stop(null)  # else it takes the place of the stopped arm
    until(view, lambda: view.arms.lines[fixed].stop.disabled)
    assert "stopped" in view.arms.lines[fixed].words.value and not view.lab.now.ended
    seen = view.lab.n_taken
    until(view, lambda: view.lab.n_taken > seen)  # the other arm goes on
    tick(view, "placebo")
    view.add()
    assert "placebo" in view.arms.lines
    until(view, lambda: view.arms.lines["placebo"].bar.value > 0)
    view.arms.open("placebo")
    assert view.shared.name == "trial: placebo, seed 0" and view.shared.visible == "overview"
    assert view.shared.run["scalars"].sizes["step"] > 0
    view.end()
    assert view.lab.now.ended and view.work.stop.disabled and "Stopped" in view.work.says.value
    view.shared.show("lm_high_lr")
    view.shared.visible = "fixlab"
    assert view.arms.lines  # the trial is still there after its arm was looked at


@pytest.mark.slow  # trains in processes
def test_a_finished_trial_gives_a_verdict_and_its_call():
    view = opened()
    view.lab.seeds, view.lab.length = 1, 6
    view.work.start()
    until(view, lambda: view.lab.now.ended)
    assert "All arms are done" in view.work.says.value
    assert "lower_lr" in view.arms.verdict.value and "from one seed" in view.arms.verdict.value
    assert "steps=6, seeds=1" in view.call.call
    assert [line.bar.value for line in view.arms.lines.values()] == [1.0, 1.0, 1.0]


@pytest.mark.slow
def test_what_cannot_be_tried_is_said():
    view = opened()
    for box in view.offers.boxes:
        box.tick.value = False
    view.work.start()
    assert "`arms`" in view.work.says.value and "tick a fix" in view.work.says.value
    trial = Trial(Start(str(sample()), 300), ["lower_lr"], steps=5)
    with pytest.raises(InputError, match="lower_lr"):
        trial.stop("unchanged")
    with pytest.raises(InputError, match="different names"):
        trial.add("lower_lr")
    state, _ = open_state({"log": new_run(make_scalars({"loss": Samples(range(50), [2.0] * 50)}))})
    state.visible = "fixlab"
    bare = FixLabView(state)
    assert "no black box" in bare.notice.value and bare.work.go.disabled and bare.call.call == ""


@pytest.mark.slow
def test_the_arms_of_a_trial_are_runs_of_the_chooser():
    bench = Workbench(sample())
    more = new_run(make_scalars({"loss": Samples(range(5), [2.0] * 5)}))
    bench.state.runs = bench.state.runs | {"trial: placebo, seed 0": more}
    assert "trial: placebo, seed 0" in bench.chooser.options
    bench.chooser.value = "trial: placebo, seed 0"
    assert bench.state.run is more


@pytest.mark.slow  # trains in processes
def test_a_log_without_a_black_box_trains_from_a_proxy():
    log = sample() / "metrics.csv"
    state, _ = open_state(log)
    state.visible = "fixlab"
    view = FixLabView(state)
    assert view.controls["origin"].value == "choose …" and view.work.go.disabled and view.lab.path == str(log)
    view.controls["origin"].value = "a small proxy"
    assert (
        view.origin.maker.job is not None
        and not view.work.stop.disabled
        and "Training small models" in view.origin.words.value
    )
    view.end()
    assert (
        view.origin.maker.job is None
        and view.controls["origin"].value == "choose …"
        and view.work.stop.disabled
    )
    view.controls["origin"].value = "a small proxy"
    made = recipe_of(state.run, None, steps=12).recipe.start
    told = {"words": ["It shows."], "start": made.to_dict(), "steps": 12}
    view.origin.maker.show(JobState("done", "done", 1.0, told))
    assert (
        "It shows." in view.origin.words.value
        and not view.work.go.disabled
        and view.controls["length"].value == 12
    )
    assert "proxy_training" in view.plan.value and view.controls["step"].layout.display == "none"
    for box in view.offers.boxes:
        box.tick.value = box.choice.name == "lower_lr"
    view.controls["seeds"].value = 1
    view.work.start()
    until(view, lambda: view.lab.now.ended)
    assert "lower_lr" in view.arms.verdict.value and view.lab.result.arms[1].final_loss


def test_a_proxy_that_fails_or_does_not_show_the_symptom_is_told():
    state, _ = open_state(sample() / "metrics.csv")
    state.visible = "fixlab"
    view = FixLabView(state)
    for answer, words in [
        (JobState("failed", "failed", 0.0, None, "no loss in this log"), "no loss in this log"),
        (JobState("done", "done", 1.0, {"words": ["It does not show."], "start": None}), "does not show"),
    ]:
        view.controls["origin"].value = "a small proxy"
        view.origin.maker.show(answer)
        assert words in view.origin.words.value and view.work.go.disabled and view.plan.value == ""
        view.controls["origin"].value = "choose …"


@pytest.mark.slow
def test_a_lab_starts_where_the_command_does_and_skips_the_bad_batches(tmp_path):
    "A run that only warned, of a bad batch, began its trials at step 0."
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Recorder(model, optimizer, tmp_path / "run", snapshot_every=20) as recorder:
        for step in range(80):
            x = recorder.batch(torch.randint(0, 9, (64,)))
            loss = torch.nn.functional.cross_entropy(model(x), (x + 1 + 3 * (step in (60, 61))) % 9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    recording = next(iter(open_recordings(tmp_path / "run").values()))
    findings = diagnose(recording)
    lab = FixLab()
    lab.open(recording, findings)
    assert lab.step == first_step(recording, findings) == 60
    offered = {choice.name: choice for choice in choices(findings, recording)}
    skip = offered["skip_batches"]
    assert [skip.parameters[name]["default"] for name in ("count", "after")] == [2, 0]
