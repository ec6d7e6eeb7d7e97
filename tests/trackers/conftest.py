"What these tests need beside `.venv`; where it is not there, they say so and are skipped."

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def python():
    "The Python that has the trackers."
    path = ROOT / ".venv/trackers/bin/python"
    if not path.exists():
        pytest.skip("no trackers: `make .venv/.trackers` installs MLflow, W&B, trackio and Lightning")
    return path


@pytest.fixture
def run_program(python, tmp_path):
    "Runs a program among the trackers, without network and without an account; gives what it printed."

    def run(source, **environment):
        (tmp_path / "program.py").write_text(source)
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "HOME": str(tmp_path)}
        own |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [python, "program.py"],
            cwd=tmp_path,
            env=os.environ | own | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout, done.stderr

    return run
