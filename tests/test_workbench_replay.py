"""The view Replay without a browser: setups are found, drafted, checked; calls run as they stand."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from stabilitylab import diagnose, open_run
from stabilitylab.detect.settings import rate_at
from stabilitylab.names.errors import InputError
from stabilitylab.probe.environment import environment
from stabilitylab.probe.recorder import Recorder
from stabilitylab.replay import setup_file
from stabilitylab.replay.setup_file import checked
from stabilitylab.run.curves import curve
from stabilitylab.run.job import JobState, report_progress
from stabilitylab.run.recording import Recording
from stabilitylab.workbench import setup_panel
from stabilitylab.workbench.fixlab import choices
from stabilitylab.workbench.setup_panel import SetupPanel
from stabilitylab.workbench.state import open_state
from stabilitylab.workbench.view_environment import EnvironmentView
from stabilitylab.workbench.view_replay import ReplayView

DATA = Path(__file__).resolve().parent.parent / "data_samples"
SETUP = """
import torch
from stabilitylab import Setup


def setup():
    return Setup(
        lambda: torch.nn.Linear(4, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
"""


@pytest.fixture
def run(tmp_path):
    "A record with a black box and without a setup."
    torch.manual_seed(0)
    model, path = nn.Linear(4, 1), tmp_path / "run"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Recorder(model, optimizer, path, snapshot_every=3) as recorder:
        for _ in range(6):
            loss = model(recorder.batch(torch.randn(8, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    (path / "replay_setup.py").unlink()
    return path


def in_this_process(panel):
    "What the child process of a check would tell, without the seconds of its imports."
    try:
        told = checked(panel.path, panel.step(), panel.chosen).to_dict()
        panel.work.show(JobState("done", "done", 1.0, told))
    except InputError as error:
        panel.work.show(JobState("failed", "failed", 0.0, None, str(error)))


def test_ordinary_mistakes_with_a_setup_are_told_with_their_place(run, tmp_path):
    panel = SetupPanel(lambda: 4)
    panel.open(run)
    assert panel.check.disabled and panel.draft.layout.display == ""
    mine = tmp_path / "mine.py"
    panel.where.value = str(mine)
    assert "No file is at" in panel.says.value and panel.check.disabled
    faults = {
        "SyntaxError": ("def setup(:\n", "mine.py, line 1"),
        "wrong name": (SETUP.replace("def setup", "def make"), "has no setup"),
        "no Setup": ("def setup():\n    return 3\n", "returns a int"),
        "their line": (SETUP.replace("model(batch)", "model(batch['x'])"), "mine.py, line 9"),
        "other loss": (SETUP.replace(".square()", ".abs()"), "not the run's"),
        "other rate": (
            SETUP.replace("lambda model: torch.optim.AdamW", "lambda model: torch.optim.SGD"),
            "SGD",
        ),
    }
    for name, (text, words) in faults.items():
        mine.write_text(text)
        panel.where.value = ""
        panel.where.value = str(mine)
        assert not panel.check.disabled, name
        in_this_process(panel)
        assert words in panel.says.value and "This setup is the run&#39;s" not in panel.says.value, (
            name,
            panel.says.value,
        )
        assert panel.stop.disabled and panel.bar.layout.visibility == "hidden"
    mine.write_text(SETUP)
    in_this_process(panel)
    assert panel.answer["check"]["is_exact"] and "This setup is the run's" in panel.says.value
    panel.where.value = str(run)
    assert panel.answer is None


@pytest.mark.slow
def test_a_draft_is_offered_once_and_never_written_over(run):
    view = ReplayView(open_state(run)[0])
    assert view.look.steps == list(range(6)) and view.panel.draft.layout.display == ""
    view.panel.write()
    file = run / "replay_setup.py"
    assert view.panel.chosen == str(file) and "TODO_YourModel()" in view.panel.says.value
    file.write_text(SETUP)
    view.panel.write()
    assert file.read_text() == SETUP and "replay_setup.py is there" in view.panel.says.value
    (file).rename(run.parent / "replay_setup.py")
    view.panel.open(run)
    assert "lies beside the record" in view.panel.says.value and view.panel.draft.layout.display == "none"


def held_check(path, step, setup):
    "A check that stays at its fourth step until it is ended."

    def heard(words=None, share=None):
        report_progress(words, share)
        if words and "step 4" in words:
            time.sleep(120)

    setup_file.report_progress = heard  # this runs in a child process of its own
    return setup_file.check_work(path, step, setup)


@pytest.mark.slow  # replays in a process
def test_a_check_shows_how_far_it_is_and_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(setup_panel, "_WORK", "tests.test_workbench_replay:held_check")
    view = ReplayView(open_state(DATA / "lm_high_lr")[0])
    panel, seen = view.panel, []

    async def cancelled():
        panel.begin()
        while "step 4" not in panel.says.value:
            await asyncio.sleep(0.05)
        seen.append((panel.bar.value, panel.says.value, panel.bar.layout.visibility))
        panel.cancel()
        await panel.work._task

    asyncio.run(asyncio.wait_for(cancelled(), 300))
    ((share, words, shown),) = seen
    assert 0 < share < 1 and "of 38" in words and shown == "visible"
    assert "cancelled" in panel.says.value and not panel.check.disabled and panel.stop.disabled


@pytest.mark.slow  # replays in processes
def test_nothing_of_a_failure_is_left_when_another_replay_begins(run):
    view = ReplayView(open_state(run)[0])
    view.work.go.click()
    while not view.work.poll():
        pass
    assert "missing" in view.texts["head"].value and view.work.bar.value == 0 and view.work.says.value == ""
    assert view.work.bar.layout.visibility == "hidden" and not view.work.go.disabled
    view.work.start()
    assert view.texts["head"].value == "" and view.work.bar.layout.visibility == "visible"
    view.work.cancel()
    view.controls["step"].value = 5
    view.open_run()
    assert view.texts["head"].value == ""


@pytest.mark.slow
def test_another_machine_is_told_before_the_replay(run):
    state, _ = open_state(run)
    view = ReplayView(state)
    assert "should be reproduced to the last bit" in view.texts["foresight"].value
    state.run.attrs["environment"] = {"cpu": "another one", "processor": "XYZ"}
    view.controls["step"].value = 4
    words = view.texts["foresight"].value
    assert "will hardly be reproduced" in words and "XYZ" in words and "Step 3 has a snapshot" in words


@pytest.mark.slow
def test_a_step_that_is_not_there_becomes_the_nearest(run):
    rows = json.loads((run / "blackbox" / "index.json").read_text())
    rows.pop("crc32c")
    rows["batches"] = [row for row in rows["batches"] if row["step"] not in (1, 2)]
    (run / "blackbox" / "index.json").write_text(json.dumps(rows))
    view = ReplayView(open_state(run)[0])
    assert view.look.steps == [0, 3, 4, 5]
    view.controls["step"].value = 2
    assert view.controls["step"].value == view.look.step == 3


@pytest.mark.slow
def test_the_call_of_a_replay_runs_as_it_stands(run):
    (run / "replay_setup.py").write_text(SETUP)
    view = ReplayView(open_state(run)[0])
    view.controls["step"].value = 4
    for name in ("swap", "samples", "ablate"):
        view.controls[name].value = False
    view.controls["precisions"].value = ("bf16",)
    names = {}
    exec(view.call.call, names)
    found = names["found"]
    assert found.check.is_exact and found.step == 4 and found.swap is None and found.samples is None
    view.look.result = found.to_dict()
    assert view.call.call.endswith("plot_precision(found.precision)")
    exec(view.call.call, names)


@pytest.mark.slow
def test_a_replay_stands_beside_its_own_step_only(run):
    view = ReplayView(open_state(run)[0])
    view.look.step, view._replayed = 3, 3
    view.look.step = 4  # while the replay of step 3 still runs
    view._notice_end(JobState("failed", "failed", 0.0, None, "its setup is gone"))
    assert view.look.result == {} and view.texts["head"].value == ""
    view.look.step = 3
    assert "its setup is gone" in view.texts["head"].value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "is_exact"),
    [
        ({}, True),
        ({"threads": 7}, True),  # a replay takes the threads of the run
        ({"version_numpy": "0.1", "python": "3.0"}, True),  # neither adds the sums of a step
        ({"threads": 7, "version_torch": "0.1"}, False),
        ({"cpu": "another one"}, False),
    ],
)
def test_environment_and_replay_say_the_same_of_this_machine(run, changed, is_exact):
    state, _ = open_state(run)
    here = environment()
    state.run.attrs["environment"] = here | changed
    state.visible = "environment"
    table = EnvironmentView(state, here=lambda: here).tables.value
    foresight = ReplayView(state).texts["foresight"].value
    assert ("to the last bit" in foresight and "will hardly be" not in foresight) is is_exact
    assert ("may differ from the record" not in table) is is_exact
    assert ("None of it decides" in table) is (is_exact and bool(changed))
    assert ("runs on the same" in table) is (not changed)


def test_overview_and_fix_lab_name_the_same_logits_and_rates():
    run = open_run(DATA / "lm_high_lr")
    findings = diagnose(run)
    offered = choices(findings, Recording(DATA / "lm_high_lr", run))
    reasons = " ".join(reason for choice in offered for reason in choice.reasons)
    told = {finding.kind: finding for finding in findings}
    growth, rate = told["attention_logit_growth"], told["lr_too_high"]
    grown = re.search(r"grew from \S+ to [\d.]+ \w+", growth.explanation)[0]
    assert f"largest attention logit {grown}" in reasons
    assert f"was {rate_at(curve(run, 'lr'), growth.onset):.3g} at step {growth.onset}, where" in reasons
    assert rate.evidence["lr_at_onset"] == rate_at(curve(run, "lr"), rate.onset)
    assert f"its highest is {rate.evidence['highest_lr']:.3g}" in reasons and "it failed at" not in reasons
