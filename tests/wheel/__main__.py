"""`python -m tests.wheel [--python PROGRAM] [--require SPEC ...]`: builds, installs and tries the wheel.

The wheel is built twice by way of the source archive, in two folders; both must have one hash. Then it is
installed in an empty environment with what it requires and nothing else, and `smoke.py` runs there. The
versions are those of `constraints.txt`, or, with `--require torch==2.6.0`, those that are asked for and the
newest of the others. The environment is removed afterwards.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def git(*words: str) -> str:
    "What a command of git prints."
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def sources(folder: Path) -> None:
    "The files of the working tree that git knows, all with the same rights."
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
            target.chmod(0o644)


def build(folder: Path) -> Path:
    "A wheel by way of the source archive, as `python -m build` makes it, dated by the last commit."
    sources(folder / "source")
    epoch = {"SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "-o",
        str(folder / "dist"),
        str(folder / "source"),
        **epoch,
    )
    return next((folder / "dist").glob("*.whl"))


def run(*words: str, **more: str) -> None:
    "A command, quiet unless it fails."
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, env=plain | more, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(words)}\n{(done.stdout + done.stderr)[-3000:]}")


def sha256(file: Path) -> str:
    "Of its bytes."
    return hashlib.sha256(file.read_bytes()).hexdigest()


def installed(folder: Path, wheel: Path, program: str, require: list[str]) -> Path:
    "Python of an empty environment that has the wheel."
    run(program, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    pins = () if require else ("--constraint", str(ROOT / "constraints.txt"))
    run(*pip, *pins, *(require or ["torch"]))
    run(*pip, *pins, *require, str(wheel))
    return python


def main() -> None:
    "The command."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter; the running one if not given"
    )
    parser.add_argument("--require", nargs="*", default=[], help="versions in place of constraints.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stabilitylab-wheel-") as name:
        folder = Path(name)
        wheels = [build(folder / part) for part in ("first", "second")]
        hashes = {sha256(wheel) for wheel in wheels}
        if len(hashes) > 1:
            sys.exit(f"failed: two builds, two hashes: {sorted(hashes)}")
        print(
            f"{wheels[0].name}: {wheels[0].stat().st_size:,} bytes, twice sha256 {hashes.pop()}", flush=True
        )
        python = installed(folder / "env", wheels[0], args.python, args.require)
        smoke = (str(python), "-I", str(Path(__file__).with_name("smoke.py")))
        sample = str(ROOT / "data_samples" / "lm_high_lr")
        plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        sys.exit(subprocess.run([*smoke, sample], check=False, env=plain).returncode)


if __name__ == "__main__":
    main()
