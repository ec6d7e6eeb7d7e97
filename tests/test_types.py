"mypy over the package has no complaint."

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_mypy_has_no_complaint():
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", ".mypy_cache"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[:4000] + answer.stderr
