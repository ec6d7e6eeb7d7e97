"`stabilitylab diagnose` on every real log: strict JSON and a page, or 2 and a line if there is nothing."

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from stabilitylab.cli.main import main
from stabilitylab.read.recognise import formats

pytestmark = pytest.mark.slow  # three hundred files

REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "real_logs"
NO_LOGS = ("MANIFEST.md", "README.md", "truth.json")
FOLDERS = sorted(p for p in REAL.iterdir() if p.is_dir() and p.name != "checkpoints") if REAL.is_dir() else []
NOTHING = ("header_only", "run-g9dvvkua", "colossal_dreambooth")  # a header or settings, and no value at all
BINARY = {"tensorboard": "tensorboard", "wandb_offline": "wandb"}  # folder -> format that reads it


def diagnose(*args):
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["diagnose", *map(str, args)])
    return code, out.getvalue(), err.getvalue()


def unread(path):
    needs = BINARY.get(path.name if path.is_dir() else path.parent.name)
    return needs and not any(
        needs in f.name and f.name not in ("tensorboard_csv", "tensorboard_json", "wandb_csv")
        for f in formats()
    )


def logs(folder):
    "Every log in a folder, and the folder as a whole."
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in NO_LOGS)
    return [folder, *sorted(path for path in files if "checkpoints" not in path.parts)]


def draw3():
    "Entry of `truth.json` by its folder; `nothing` says why a log holds nothing to see."
    truth = REAL / "draw3" / "truth.json"
    return {entry["folder"]: entry for entry in json.loads(truth.read_text())} if truth.is_file() else {}


def may_be_empty(path):
    "Header or settings alone: named above, a drawn log whose truth says so, or a file beside the drawn one."
    if any(name in path.name for name in NOTHING):
        return True
    entry = next((entry for name, entry in draw3().items() if name in path.parts), None)
    return entry is not None and bool(entry["nothing"] or path.name != Path(entry["path"]).name)


def check(path, page):
    "One log or folder, read by the command."
    code, out, err = diagnose(path, "--json", "--html", page)
    if "LFS_POINTER" in path.name:
        assert code == 2 and err.count("\n") == 1 and "git lfs pull" in err
        return
    if code == 2 and may_be_empty(path):
        assert err.count("\n") == 1 and path.name in err
        return
    assert code == 0 and err == ""
    told = json.loads(out, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    for run in told.get("runs", [told]):
        assert run["format"] and run["source"]
        for f in run["findings"]:
            assert f["explanation"].endswith(".") and (f["onset"] is None or f["onset"] <= f["end"])
    text = page.read_text(encoding="utf-8")
    assert "</html>" in text and "<script" not in text and len(text) < 2_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_diagnose(folder, tmp_path, subtests):
    for path in logs(folder):
        with subtests.test(msg=str(path.relative_to(REAL))):
            if unread(path):
                pytest.skip(f"SKIPPED: no reader for {path.name} yet")
            check(path, tmp_path / "r.html")


@pytest.mark.parametrize("name", [name for name, entry in draw3().items() if not entry["nothing"]])
def test_a_drawn_log_with_a_loss_opens(name, tmp_path):
    check(REAL / "draw3" / name, tmp_path / "r.html")


@pytest.mark.skipif(bool(FOLDERS), reason="the real logs are here")
def test_real_logs_are_absent():
    pytest.skip("SKIPPED: ../shared/real_logs is absent, so the command was not run on real logs")
