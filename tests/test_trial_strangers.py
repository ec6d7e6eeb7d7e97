"A trial on code that nobody here wrote: what it does otherwise is followed, or said before training."

import json
import re
import sys

import numpy as np
import pytest
import torch
import xarray as xr

from stabilitylab import Recorder
from stabilitylab.cli.main import main
from stabilitylab.detect.findings import Finding
from stabilitylab.fixes.registry import apply_all, fix
from stabilitylab.investigation.loop import _cleared, _no_failure
from stabilitylab.investigation.plan import _late_start
from stabilitylab.names.errors import InputError
from stabilitylab.replay.user_code import _forget, function_at
from stabilitylab.run.curves import NOT_CLEARED
from stabilitylab.trial.arm import Arm, ArmCurve, arm_of, with_unique_names
from stabilitylab.trial.batched import why_not_batched
from stabilitylab.trial.outcome import outcome
from stabilitylab.trial.start import Start
from stabilitylab.trial.suggest import failure_onset
from stabilitylab.trial.trial import Trial, TrialResult, unfit_arms
from stabilitylab.trial.verdict import verdicts_of
from tests.test_detect_decisions import run_of

pytestmark = pytest.mark.slow  # trials of other people's programs

SETUP = """
import torch
from stabilitylab import Setup

def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum() / batch["num_items_in_batch"]

def made(**more):
    model = lambda: torch.nn.Linear(4, 1)
    return Setup(model, loss, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **more)

def setup(path):
    return made(clip=clip)

def unclipped(path):
    print("number of parameters: 5")
    return made()

def averaged(path):
    return made(clip=clip, reduction="mean")

def broken(path):
    return Setup(lambda: torch.nn.Linear(4, 1), lambda model, batch: batch["z"], made().optimizer)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A record of a loop that adds up the losses of two micro-batches and clips with a function of its own."
    place = tmp_path_factory.mktemp("stranger")
    (place / "code.py").write_text(SETUP)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, optimizer, place / "run", snapshot_every=10) as recorder:
        for step in range(40):
            total = 0.0
            optimizer.param_groups[0]["lr"] = 0.1 if step < 25 else 0.2
            for _ in range(2):
                x = torch.randn(8, 4) * (30.0 if step == 15 else 1.0)
                batch = recorder.batch({"x": x, "y": x.sum(1, keepdim=True), "num_items_in_batch": 16})
                loss = (model(batch["x"]) - batch["y"]).square().sum() / batch["num_items_in_batch"]
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(total)
    return place


def start_of(run, function="setup"):
    "A start at the first step that was kept."
    return Start(str(run / "run"), 20, f"{run / 'code.py'}:{function}")


def recorded_loss(run, step):
    "What the loop itself told."
    from stabilitylab import open_run

    return float(open_run(run / "run")["scalars"]["loss"].sel(step=step))


def test_losses_that_are_added_up_and_clipped_by_a_function_come_back(run):
    training = start_of(run).build(0)
    for step in range(20, 30):  # from the second on the update counts, and with it clipping and rate
        assert training.run_step().loss == pytest.approx(recorded_loss(run, step), rel=1e-6)
    assert why_not_batched(training)  # such a loop cannot be one of a bundle
    with pytest.raises(InputError, match="divided by its tokens already"):
        apply_all(start_of(run).build(0), [fix("token_mean")])


def test_rates_that_the_loop_set_come_back_and_leave_room_for_fixes(run):
    training = start_of(run).build(0)
    apply_all(training, [fix("lower_lr", factor=0.5), fix("weight_decay", weight_decay=0.3)])
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    rates = []
    for _ in range(20, 28):
        training.run_step()
        rates.append([group["lr"] for group in training.optimizer.param_groups])
    assert rates == [[0.05, 0.05]] * 5 + [[0.1, 0.1]] * 3
    assert training.optimizer.param_groups[0]["weight_decay"] == 0.3


def test_a_setup_of_another_training_is_told_before_its_verdicts(run, capsys):
    assert start_of(run).compare().is_step and not start_of(run, "averaged").compare().is_step
    words = ["trial", str(run / "run"), "--setup", f"{run / 'code.py'}:unclipped", "--fix", "placebo"]
    assert main([*words, "--seeds", "1", "--steps", "1", "--json", "--step", "20"]) == 0
    out = capsys.readouterr()
    told = json.loads(out.out)["words"]  # what the user's code prints does not spoil it
    assert "is not the recorded step" in told and "Correct the setup first" in told
    assert "number of parameters" in out.err


def test_a_loss_that_fails_is_told_before_anything_is_trained(run, capsys):
    words = ["trial", str(run / "run"), "--setup", f"{run / 'code.py'}:broken", "--fix", "placebo"]
    assert main([*words, "--step", "20"]) == 2
    out = capsys.readouterr()
    assert not out.out and "`setup.loss` failed" in out.err and "Traceback" not in out.err


@pytest.mark.parametrize("name", ["drop_repeats", "token_mean"])
def test_a_fix_that_fails_on_the_batches_is_told_before_anything_is_trained(run, name):
    why = unfit_arms(start_of(run), [arm_of(name), arm_of("placebo")])
    assert list(why) == [name] and re.search("is not accepted|it needs a training that", why[name])


def test_two_settings_of_one_fix_are_two_arms_and_the_same_arm_twice_is_refused(run, tmp_path):
    arms = with_unique_names([arm_of("clip_norm:max_norm=0.1"), arm_of("clip_norm:max_norm=0.2")])
    assert [arm.name for arm in arms] == ["clip_norm:max_norm=0.1", "clip_norm:max_norm=0.2"]
    assert not unfit_arms(start_of(run), arms)
    result = Trial(start_of(run), arms, steps=2, seeds=1, folder=tmp_path).run(progress=False)
    assert result.complete and [arm.parameters.get("max_norm") for arm in result.arms] == [None, 0.1, 0.2]
    with pytest.raises(InputError, match="each once"):
        Trial(start_of(run), [arms[0], arms[0]], steps=2, seeds=1)


@pytest.mark.parametrize("words", ["lower_lr:factor=abc", "lower_lr:factor=null", "lower_lr:factor=true"])
def test_a_parameter_that_is_no_number_is_refused_with_its_range(words):
    with pytest.raises(InputError, match=r"`factor`=.* is not accepted; allowed: 0\.0001 to 1\.0"):
        arm_of(words)


def test_a_run_with_warnings_alone_is_tried_before_the_loss_tells():
    def found(kind, severity, onset):
        return Finding(kind, severity, onset, explanation="")

    early, spike = found("grad_below_epsilon", "warning", 0), found("loss_spike", "warning", 160)
    error = found("activation_explosion", "error", 90)
    assert failure_onset([early, spike]) == 160 and failure_onset([early]) is None
    assert failure_onset([early, spike, error]) == 90


def test_a_run_that_does_not_fail_again_is_told():
    def result(loss, first=3.0):
        curves = [ArmCurve("unchanged", seed, np.arange(60), loss) for seed in range(2)]
        return TrialResult(Start(step=0), 60, verdicts_of([Arm()], curves, first), curves, True)

    noise = 0.01 * np.random.default_rng(0).standard_normal(60)
    (told,) = _no_failure(result(2 + noise))
    assert "failed on no seed within 60 steps, so" in told
    (told,) = _no_failure(result(3.05 + noise))
    assert "within 60 steps, though it ends above its initial loss on 2 of 2, so" in told
    assert not _no_failure(result(2 + noise + (np.arange(60) > 40)))
    record = run_of(loss=np.linspace(3, 2.8, 200))
    assert _cleared(record, result(2 + noise)) == []
    events = {"event_kind": ["note"], "event_step": [0], "event_text": [NOT_CLEARED]}
    record["events"] = xr.DataTree(xr.Dataset({name: ("event", row) for name, row in events.items()}))
    (told,) = _cleared(record, result(2 + noise))
    assert "ends at 1.999" in told and "was at 2.943 after the same 60 steps" in told


def test_a_run_that_left_with_its_first_step_and_knows_nothing_has_failed():
    noise = np.random.default_rng(0).standard_normal((3, 90))
    arms = [Arm(), Arm(({"name": "low"},)), Arm(({"name": "none"},))]
    curves = [ArmCurve("unchanged", s, np.arange(150, 240), 90 + 20 * noise[s]) for s in range(3)]
    curves += [ArmCurve("low", s, np.arange(150, 240), 2.9 + 0.1 * noise[s]) for s in range(3)]
    curves += [ArmCurve("none", s, np.arange(150, 153), np.array([2.6, np.inf, np.nan])) for s in range(3)]
    base, low, none = verdicts_of(arms, curves, start_loss=4.8)
    assert (base.diverged, low.diverged, none.diverged) == (3, 0, 3)
    assert low.verdict == "helps" and low.rescued == 3 and none.verdict == "does not help"
    assert outcome(curves[0], 4.8).onset == 150 and not outcome(curves[3], 2.85).diverged


def test_a_state_behind_the_failure_is_said():
    (told,) = _late_start(step=200, onset=150, is_in_data=False)
    assert "began at step 150" in told and "step 200" in told and "keep_snapshots" in told
    assert not any(_late_start(step=100, onset=onset, is_in_data=False) for onset in (150, None))
    # a bad batch does not spoil the state that it is given to
    assert not _late_start(step=150, onset=150, is_in_data=True)
    assert _late_start(step=150, onset=150, is_in_data=False)
    assert _late_start(step=151, onset=150, is_in_data=True)


def project(place, width):
    "A folder with a module `model` and a setup in a folder below it, as the Recorder drafts one."
    (place / "run").mkdir(parents=True)
    (place / "model.py").write_text(f"WIDTH = {width}\n")
    draft = place / "run" / "replay_setup.py"
    lines = ["import sys", f"sys.path.append({str(place)!r})", "from model import WIDTH"]
    draft.write_text("\n".join([*lines, "def width():", "    return WIDTH", ""]))
    return f"{draft}:width"


def test_modules_of_one_name_in_two_projects_are_not_mixed_up(tmp_path):
    first, second = project(tmp_path / "a", 3), project(tmp_path / "b", 5)
    _forget()  # what an earlier test brought along
    path = list(sys.path)
    widths = [function_at(where)() for where in (first, second, second, first)]
    assert widths == [3, 5, 5, 3]
    _forget()
    assert sys.path == path and "model" not in sys.modules
