"""The views Attention, Environment and Report without a browser: what they say of what there is."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from nbclient import NotebookClient
from nbformat import reads

from stabilitylab import Recorder
from stabilitylab.cases.registry import sample
from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.investigation.opening import suspect_step
from stabilitylab.names.errors import InputError
from stabilitylab.names.words import FINDING_KINDS
from stabilitylab.plot.attention import linear_below, plot_heads_over_steps, signed_ticks
from stabilitylab.plot.heads import head_map, head_picture
from stabilitylab.probe.environment import environment
from stabilitylab.replay.snapshot import replayable_steps
from stabilitylab.run.job import JobState
from stabilitylab.run.record import new_run, save_run
from stabilitylab.run.recording import BoxIndex
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.state import open_state, run_action
from stabilitylab.workbench.tabs import Workbench, views, views_without_data
from stabilitylab.workbench.view_attention import AttentionView
from stabilitylab.workbench.view_environment import (
    EnvironmentView,
    _differing_rows,
    between_runs,
    command_words,
)
from stabilitylab.workbench.view_fixlab import FixLabView
from stabilitylab.workbench.view_overview import Overview
from stabilitylab.workbench.view_replay import ReplayView
from stabilitylab.workbench.view_report import ReportView, report_files
from stabilitylab.workbench.view_rounding import RoundingState

STEPS = np.arange(60)
GROWN = np.broadcast_to(10.0 ** (STEPS / 10 - 1), (2, 2, 60)).T.copy()  # 0.1 to 80,000


def recorded(logit: np.ndarray, **attrs: object) -> xr.DataTree:
    "A run whose heads had these logits."
    unit = {"long_name": "largest attention logit", "units": "1"}
    tables = {"attn_logit_max": logit, "attn_entropy_rel": np.full_like(logit, 0.5)}
    cells = {name: (("step", "layer", "head"), table, unit) for name, table in tables.items()}
    names = {"module": ("layer", ["h.0.attn", "h.1.attn"]), "role": ("layer", ["self", "self"])}
    group = xr.Dataset(cells, {"step": STEPS, "layer": [0, 1], "head": [0, 1]} | names)
    run = new_run(make_scalars({"loss": Samples(STEPS, 3 - STEPS / 100)}), attention=group)
    run.attrs |= attrs
    return run


def opened(view: str, source: object) -> object:
    "The state of a workbench on which a view is seen."
    state, _ = open_state(source)
    state.visible = view
    return state


def test_growth_beside_negative_logits_is_seen():
    logit = GROWN.copy()
    logit[:4, 0] = -0.05
    drawn = plot_heads_over_steps(recorded(logit)["attention"].to_dataset().attn_logit_max, log=True)
    shades = [float(drawn.images[0].norm(value)) for value in (-0.05, 0.1, 10, 1000, 80_000)]
    assert 0 <= min(shades) < shades[1] and shades[-1] == pytest.approx(1, abs=0.02)
    assert np.diff(shades)[1:].min() > 0.1  # a linear scale would leave 0.0001 for 0.1 to 10
    ticks = signed_ticks(logit)
    assert 0 in ticks and ticks.max() == 1e4 and (np.diff(ticks) > 0).all()
    assert linear_below(GROWN) == 0 and 0 < linear_below(logit) < 1


def test_pictures_of_heads_stand_values_that_are_not_finite():
    for bad in (np.nan, np.inf, -np.inf):
        logit = GROWN.copy()
        logit[10:20, 1, 1] = bad
        data = recorded(logit)["attention"].to_dataset()
        png, [panel] = head_map(data.attn_logit_max)
        assert png and (panel["y0"], panel["y1"]) == (4, 0)
        assert head_picture(data, "attn_logit_max", 15, 1, 1)
    everywhere = recorded(np.full_like(GROWN, np.nan))["attention"].to_dataset()
    assert head_map(everywhere.attn_logit_max)[0] and head_picture(everywhere, "attn_logit_max", 15, 1, 1)


@pytest.mark.slow  # records three runs
def test_the_chosen_head_stays_while_its_run_grows_and_goes_with_another_run():
    state = opened("attention", {"first": recorded(GROWN), "second": recorded(-GROWN)})
    view = AttentionView(state)
    assert view.aspect.value == "" and view.aspect.index == 0  # and not blank
    view.picture.clicked = {"x": 30.0, "y": 3.2, "finding": -1, "n": 1}
    view.aspect.value = "entropy"
    state.update(recorded(2 * GROWN))
    assert view.look.row == 3 and "200" in view.words.value and view.aspect.value == "entropy"
    assert "no black box" in view.work.says.value and view.work.go.layout.display == "none"
    state.show("second")
    assert view.look.row == -1 and "Click a head" in view.words.value and view.aspect.value == "entropy"


def test_the_attention_of_a_head_is_fetched_given_up_or_refused():
    run = recorded(GROWN, source=str(sample()))  # whose black box can replay steps
    view = AttentionView(opened("attention", {"run": run}))
    view.picture.clicked = {"x": 59.0, "y": 0.2, "finding": -1, "n": 1}
    assert not view.work.go.disabled and view.work.stop.layout.display == "none"
    view.work.start()
    assert (
        view.work.go.disabled
        and view.work.stop.layout.display == ""
        and "Running the batch" in view.work.says.value
    )
    view.work.cancel()
    assert view.work.job is None and not view.work.go.disabled and view.work.says.value == ""
    view.work.start()
    view.work.show(JobState("failed", "failed", 0.0, None, "this setup has no model"))
    assert "this setup has no model" in view.work.says.value and not view.work.go.disabled
    view.work.start()
    weights = np.eye(40).tolist()
    told = {"weights": weights, "module": "h.0.attn", "head": 0, "tokens": [str(i) for i in range(40)]}
    view.work.show(JobState("done", "done", 1.0, told))
    assert bytes(view.head.value[:4]) == b"\x89PNG" and view.head.layout.display == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train.py", "--lr", "1e-3", "--name", "a b"], "python train.py --lr 1e-3 --name 'a b'"),
        (["-c"], "python -c …"),
        (["-m", "x"], "python -m … x"),
        (["/usr/bin/torchrun", "train.py"], "/usr/bin/torchrun train.py"),
        (["/env/ipykernel_launcher.py", "-f", "kernel.json"], "a notebook (Jupyter kernel)"),
        ([""], "an interactive Python"),
    ],
)
def test_what_was_run_is_said(command, words):
    assert command_words(command) == words


def test_runs_are_set_side_by_side_and_a_setting_is_escaped():
    first = {"version_torch": "2.7.0", "command": ["a.py"], "deterministic": False, "strange": "<b>"}
    runs = {
        "a": recorded(GROWN, environment=first),
        "b": recorded(GROWN, environment=json.dumps(first | {"version_torch": "2.13.0"})),
        "c": recorded(GROWN),
        "d": recorded(GROWN, environment="{not json"),
    }
    assert between_runs(runs) == (["a", "b"], [["PyTorch", "2.7.0", "2.13.0"]])
    said = EnvironmentView(opened("environment", runs), here=lambda: first).tables.value
    assert "&lt;b&gt;" in said and "python a.py" in said and "runs on the same" in said
    for name in ("c", "d"):
        bare = opened("environment", {name: runs[name]})
        assert "does not say what it ran on" in EnvironmentView(bare, here=dict).tables.value


def test_a_page_can_only_ask_for_what_is_in_the_list():
    bench = Workbench(recorded(GROWN))
    picture = bench.tabs.children[0].picture
    for name in ("grow", "__init__", "show"):
        with pytest.raises(InputError, match="undo"):
            run_action(bench.state, name)
        with pytest.raises(InputError, match="undo or redo"):
            picture.wish = {"what": name, "n": 1}


def test_a_run_whose_snapshots_lie_lower_can_be_chosen(monkeypatch):
    run = open_state(sample())[0].run
    bench = Workbench({"late": run, "early": run.copy()})
    bench.state.visible = "fixlab"
    view = bench.tabs.children[bench._names.index("fixlab")]
    monkeypatch.setattr(BoxIndex, "steps", property(lambda index: [120, 121]))
    monkeypatch.setattr(BoxIndex, "starts", property(lambda index: [120]))
    box = view.controls["step"]
    before = box.min
    bench.chooser.value = "early"
    assert before > 121 and (box.min, box.value, box.max) == (120, 120, 121)


@pytest.mark.slow  # runs a notebook
def test_the_notebook_of_the_screen_runs_and_finds_the_same(monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # as in a kernel of a reader, which shows its figures
    state = opened("report", sample())
    state.x_range, state.selected = (300, 360), 0
    view = ReportView(state)
    assert "300 to 360" in view.about.value and "screen_html" in view.call.call
    (_, _, page), (_, kind, notebook) = report_files(state, "2026-01-01 12:00")
    assert kind == "application/x-ipynb+json" and b"2026-01-01 12:00" in page and b"identity" in page
    done = NotebookClient(reads(notebook.decode(), 4), timeout=120).execute()
    outputs = [cell.outputs for cell in done.cells if cell.cell_type == "code"]
    same = outputs[0][-1]["data"]["text/plain"]
    then, now = (part.split(":")[1].strip(" {}'") for part in same.split(","))
    assert then == now and len(then) == 12
    assert all(found.kind in outputs[1][-1]["data"]["text/html"] for found in state.findings)
    assert any("image/png" in one.get("data", {}) for one in outputs[2])
    assert state.findings[0].kind in str(outputs[3])


def test_a_record_in_memory_has_a_page_and_says_why_it_has_no_notebook():
    state = opened("report", {"made": recorded(GROWN)})
    view = ReportView(state)
    view.make.start()
    assert view.files.value.count("<a download") == 1 and "save_run" in view.files.value
    assert "handed over in memory" in view.about.value


def test_a_record_with_a_chunk_that_was_cut_off_opens_without_it_and_says_so(tmp_path):
    save_run(recorded(GROWN), tmp_path / "run")
    files = [file for file in (tmp_path / "run" / "scalars" / "loss").rglob("*") if file.is_file()]
    chunk = max(files, key=lambda file: file.name.startswith(("c", "0")))
    chunk.write_bytes(chunk.read_bytes()[:20])
    bench = Workbench(tmp_path / "run")
    skipped = " ".join(bench.state.run.attrs["skipped"])
    assert "loss of scalars" in skipped and "loss" not in bench.state.series
    assert "Left out: " in bench.tabs.children[0].detail.value


def test_a_black_box_that_was_cut_off_leaves_the_rest_to_be_seen(tmp_path):
    shutil.copytree(sample(), tmp_path / "run")
    index = tmp_path / "run" / "blackbox" / "index.json"
    index.write_text(index.read_text()[:100])
    with pytest.raises(InputError, match="copy the record anew"):
        replayable_steps(tmp_path / "run")
    state = opened("fixlab", tmp_path / "run")
    view = FixLabView(state)
    assert (
        "no black box" in view.notice.value
        and view.work.go.disabled
        and "a small proxy" in view.controls["origin"].options
    )


def test_the_report_has_the_cause_then_the_replay_then_the_screen():
    state, _ = open_state(str(sample()))
    check = {"is_exact": True, "is_step": True, "words": "the replay is the recorded step"}
    swap = {"verdict": "bad state", "words": "the state is out of line"}
    numbers = {"loss": 3.5, "recorded_loss": 3.5, "grad_norm": 1.0, "update_norm": 0.5}
    state.replays = {352: {"step": 352, "check": check, "swap": swap, **numbers}}
    view = ReportView(state)
    state.visible = "report"
    assert "of step 352" in view.about.value
    page = report_files(state, "2026-01-01 12:00")[0][2].decode()
    parts = ["Most likely cause:", "Replay of step 352", "bad state", "On the screen", "The whole run"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places) and page.count("Most likely cause:") == 1
    state.show(state.name)
    assert not state.replays and "Replay of step" not in report_files(state, "")[0][2].decode()


@pytest.mark.slow
def test_tabs_without_data_are_grey_and_kinds_are_explained(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Recorder(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss)
    state, _ = open_state(str(tmp_path / "run"))
    assert {"attention", "runs"} <= set(views_without_data(state))
    listing = Overview(open_state(str(sample()))[0]).listing.value
    assert f'title="{FINDING_KINDS["divergence"]}"' in listing


def test_the_checkpoints_tab_is_grey_where_there_is_none(tmp_path):
    save_run(recorded(GROWN), tmp_path / "run")
    assert "checkpoints" in views_without_data(open_state(str(tmp_path / "run"))[0])
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "last.pt")
    assert "checkpoints" not in views_without_data(open_state(str(tmp_path / "run"))[0])


def test_a_workbench_shows_again_what_was_seen(tmp_path):
    (tmp_path / "b.log").write_text("".join(f"step {i} loss {3 / (i + 1):.3f}\n" for i in range(40)))
    shutil.copy(tmp_path / "b.log", tmp_path / "a.log")
    file = tmp_path / "seen.json"
    state = Workbench([tmp_path / "a.log", tmp_path / "b.log"], remember=file).state
    state.show("b.log")
    state.step, state.x_range, state.log, state.visible = 7.0, (3, 9), True, "series"
    again = Workbench([tmp_path / "a.log", tmp_path / "b.log"], remember=file)
    assert (again.state.name, again.state.step, again.state.log) == ("b.log", 7.0, True)
    assert again.state.x_range == (3, 9) and again.tabs.titles[again.tabs.selected_index] == "Series"
    for text in ("{", '["x"]', '{"step": "far", "x_range": [9, 3], "name": "gone", "selected": 99}'):
        file.write_text(text)  # what cannot be shown is left out
        other = Workbench([tmp_path / "a.log", tmp_path / "b.log"], remember=file).state
        assert (other.name, other.step, other.x_range, other.selected) == ("a.log", None, (), -1)
    assert not list(tmp_path.glob("*.view.json"))  # nothing is kept without being asked


def test_replay_and_precision_begin_at_the_step_that_the_command_replays():
    "A failure at a step that was not kept was answered with the last step of the run."
    kept = [*range(8), *range(40, 150)]
    findings = Findings([Finding("divergence", "error", 9, 149, evidence={})])
    look = RoundingState()
    look.open(SimpleNamespace(run=recorded(GROWN), steps=kept), findings)
    assert look.step == 7
    state = open_state(str(sample()))[0]
    assert ReplayView(state).look.step == suspect_step(sample())


@pytest.mark.parametrize("view", views(), ids=lambda view: view.name)
def test_every_tab_has_its_view(view):
    "A view that cannot be built is shown as an error in its tab, which no other test would see."
    view.build(open_state(sample())[0])


def test_a_flag_that_was_not_recorded_is_not_said_to_differ():
    here = environment()
    older = {
        name: value for name, value in here.items() if name not in ("cudnn_tf32", "deterministic_warn_only")
    }
    assert not _differing_rows(older, here)
    changed = older | {"deterministic": not here["deterministic"], "device": ["a GPU"]}
    assert {name for name, *_ in _differing_rows(changed, here)} == {"deterministic", "device"}
