"The tests of an S3 store, with moto's server: its boto3 wants an older python-dateutil than `.venv` has."

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_logs_records_and_checkpoints_in_an_s3_store(python):
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_remote_s3.py"]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0 and "skipped" not in last, done.stdout[-3000:] + done.stderr[-2000:]
