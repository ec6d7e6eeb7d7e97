"Shared by all tests: where the real logs are, and the same made-up inputs in every run."

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)  # `make fuzz` is for new ones
settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent
REAL_LOGS = ROOT.parent / "shared" / "real_logs"


@pytest.fixture(scope="session")
def real_logs():
    "The folder of real logs; a test that needs it says clearly that it was skipped where it is absent."
    if not REAL_LOGS.is_dir():
        pytest.skip("SKIPPED: ../shared/real_logs is absent, so the real logs were not checked")
    return REAL_LOGS


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call():
    "A job is forked from a process of the same environment, which the name of the test would change."
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup():
    "As before a test."
    os.environ.pop("PYTEST_CURRENT_TEST", None)
