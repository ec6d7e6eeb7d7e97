"""`python -I smoke.py SAMPLE`: the main job with nothing but the wheel and what it requires.

Runs in the environment that `python -m tests.wheel` made; imports nothing of the repository. SAMPLE is
`data_samples/lm_high_lr`. Ends with 1 and one line where something is missing.
"""

import importlib
import importlib.util
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ABSENT = ("jupyterlab", "transformers", "accelerate", "distributed", "s3fs", "gcsfs", "aiohttp")


def expect(is_met: bool, what: str) -> None:
    "Ends the program where something is not as it should be."
    if not is_met:
        sys.exit(f"failed: {what}")


def command(*words: str, code: int = 0) -> str:
    "What `stabilitylab WORDS` prints; it starts in a process of its own."
    program = Path(sys.executable).with_name("stabilitylab")
    done = subprocess.run([str(program), *words], capture_output=True, text=True)
    expect(done.returncode == code, f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr[-600:]}")
    expect("Traceback" not in done.stderr, f"`{' '.join(words)}` wrote a traceback")
    return done.stdout + done.stderr * (code != 0)


def is_alone() -> str:
    "The package is the installed one, and no extra is there."
    package = importlib.import_module("stabilitylab")
    expect("site-packages" in str(package.__file__), f"{package.__file__} is not the installed package")
    present = [name for name in ABSENT if importlib.util.find_spec(name)]
    expect(not present, f"installed without having been asked for: {present}")
    return "no extra is installed"


def imports_every_module() -> str:
    "Every module is imported; none needs an extra for that."
    package = importlib.import_module("stabilitylab")
    names = [module.name for module in pkgutil.walk_packages(package.__path__, "stabilitylab.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return f"{len(names)} modules imported"


def helps() -> str:
    "Each command explains itself."
    listed = command("--help").split("COMMAND\n")[-1]
    commands = [line.split()[0] for line in listed.splitlines() if line.startswith("    ") and line[4] != " "]
    for name in commands:
        expect(command(name, "--help").startswith("usage:"), f"`{name} --help`")
    return f"{len(commands)} commands explain themselves"


def diagnoses(sample: Path) -> str:
    "The log, the record and the table of the sample have their findings and a report."
    words = []
    for path in (sample / "train.log", sample / "metrics.csv", sample):
        told = json.loads(command("diagnose", str(path), "--json"))
        expect(bool(told["findings"]), f"no finding in {path.name}")
        words.append(f"{path.name} {len(told['findings'])}")
    page = Path("report.html")
    command("diagnose", str(sample), "--html", str(page))
    expect("<html" in page.read_text(encoding="utf-8"), "report.html")
    return "findings: " + ", ".join(words)


def checks(sample: Path) -> str:
    "A whole sample is whole; one with a changed byte is not."
    command("check", str(sample))
    shutil.copytree(sample, "changed")
    data = bytearray(Path("changed/record.zip").read_bytes())
    data[len(data) // 2] ^= 255
    Path("changed/record.zip").write_bytes(bytes(data))
    command("check", "changed", code=1)
    return "a whole record and a damaged one are told apart"


def replays(sample: Path) -> str:
    "A step replays, and a trial is planned."
    command("replay", str(sample), "--step", "352")
    plan = json.loads(command("trial", str(sample), "--plan", "--json"))
    expect(len(plan["arms"]) > 1, "a trial of no arm")
    return f"step 352 replayed, {len(plan['arms'])} arms planned"


def records() -> str:
    "A training loop is recorded and opens again."
    import torch

    from stabilitylab import Recorder

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    with Recorder(model, optimizer, "run") as recorder:
        for _ in range(8):
            loss = model(recorder.batch(torch.randn(8, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    expect(json.loads(command("diagnose", "run", "--json"))["n_steps"] == 8, "8 steps of a new record")
    return "8 steps recorded and opened"


def names_extras(sample: Path) -> str:
    "What needs an extra says in one sentence which."
    from stabilitylab.probe.hf import RecorderCallback
    from stabilitylab.run.cluster import as_client

    calls: dict[str, Callable[[], object]] = {
        "hf": lambda: RecorderCallback("run-hf"),
        "cluster": lambda: as_client("tcp://127.0.0.1:1"),
        "remote": lambda: sys.exit(command("diagnose", "s3://bucket/train.log", code=2)),
        "lab": lambda: sys.exit(command("lab", str(sample / "train.log"), code=2)),
    }
    for extra, call in calls.items():
        try:
            call()
        except (ImportError, ValueError, SystemExit) as error:
            told = str(error).strip()
        else:
            told = ""
        is_said = f"stabilitylab[{extra}]" in told and len(told.splitlines()) == 1
        expect(is_said, f"the extra `{extra}` is not named in one line: {told[-600:]!r}")
    return f"{len(calls)} missing extras are named"


def main() -> None:
    "Each part and the seconds it took."
    sample = Path(sys.argv[1]).resolve()
    parts: list[Callable[[], str]] = [
        is_alone,
        helps,
        lambda: diagnoses(sample),
        lambda: checks(sample),
        lambda: replays(sample),
        records,
        lambda: names_extras(sample),
        imports_every_module,
    ]
    import torch

    print(f"  Python {sys.version.split()[0]}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for part in parts:
            begin = time.perf_counter()
            print(f"  {part()} ({time.perf_counter() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
