"""`make gpu`: everything that only a CUDA device can say, in one go; "no device here" where there is none.

Each subject runs in a process of its own, and one that fails costs its own lines. The results are printed and
written to `--out`, as text and as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SUBJECTS = {  # name: arguments of `python -m`
    "the same numbers as on the host": ["tests.gpu.same"],
    "recorder, 10 M parameters": ["tests.benchmarks.bench_recorder", "--device", "cuda", "--steps", "50"],
    "recorder, 163 M parameters": [
        "tests.benchmarks.bench_recorder", "--device", "cuda", "--steps", "15", "--width", "768",
        "--layers", "12", "--seq", "1024", "--vocab", "50304", "--peers", "naive hook",
    ],
    "replay": ["tests.benchmarks.bench_replay", "--device", "cuda"],
    "rounding": ["tests.benchmarks.bench_numerics", "--device", "cuda"],
}  # fmt: skip


def main() -> int:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "stabilitylab-gpu")
    parser.add_argument("--seconds", type=float, default=300, help="that a subject may take")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no device here: nothing was measured")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    results = {"about": about, "subjects": {}}
    print(about, flush=True)
    paths = f"{os.getcwd()}:{os.environ.get('PYTHONPATH', '')}"
    for name, words in SUBJECTS.items():
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words], capture_output=True, text=True, check=False,
                timeout=args.seconds, env=os.environ | {"PYTHONPATH": paths},
            )  # fmt: skip
            code, text = done.returncode, done.stdout + (done.stderr if done.returncode else "")
        except subprocess.TimeoutExpired:
            code, text = -1, f"more than {args.seconds:.0f} s"
        seconds = time.monotonic() - begin
        print(
            f"\n== {name}: {'done' if not code else f'ended with {code}'}, {seconds:.0f} s\n{text}",
            flush=True,
        )
        results["subjects"][name] = {"code": code, "seconds": seconds, "text": text}
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"written to {args.out / 'results.json'}")
    return int(any(subject["code"] for subject in results["subjects"].values()))


if __name__ == "__main__":
    sys.exit(main())
