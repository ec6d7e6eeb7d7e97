"Run notebooks and store their outputs (`run PATH`), or check that notebooks and modules are clean (`check`)."

import os
import subprocess
import sys
from pathlib import Path

from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from nbdev.clean import clean_nb

ROOT = Path(__file__).resolve().parent.parent


def tool(name):
    "Run one of nbdev's commands on this checkout."
    subprocess.run(
        [Path(sys.executable).with_name(name)],
        cwd=ROOT,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def run_one(path):
    "Execute one notebook, keep its outputs, clean it."
    os.chdir(path.parent)
    CaptureShell(path=path.parent).execute(path, dest=path, exc_stop=True)
    nb = read_nb(path)
    clean_nb(nb, clear_all=False)
    write_nb(nb, path)


def run(paths):
    "`run_one` for every notebook at or below `paths`, each in a fresh process, then export."
    for p in [
        n
        for path in paths
        for n in ([path] if path.is_file() else sorted(path.rglob("*.ipynb")))
        if ".ipynb_checkpoints" not in n.parts
    ]:
        print(p.relative_to(ROOT), flush=True)
        subprocess.run(
            [sys.executable, __file__, "one", p],
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    tool("nbdev_export")


def uncommitted():
    "Lines of `git status`, one a file."
    command = ["git", "status", "--porcelain", "--", "nbs", "stabilitylab", "README.md"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def check():
    "Exit with the list of files that `nbdev_export` or `nbdev_clean` would still change."
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        return print("not a git checkout: the clean-notebook gate was skipped")
    before = {
        p: p.read_bytes()
        for d in ("nbs", "stabilitylab")
        for p in (ROOT / d).rglob("*")
        if p.suffix in (".ipynb", ".py")
    }
    tool("nbdev_export")
    tool("nbdev_clean")
    dirty = [str(p.relative_to(ROOT)) for p, b in before.items() if not p.exists() or p.read_bytes() != b]
    dirty += [
        str(p.relative_to(ROOT))
        for d in ("nbs", "stabilitylab")
        for p in (ROOT / d).rglob("*")
        if p.suffix in (".ipynb", ".py") and p not in before and "__pycache__" not in p.parts
    ]
    if dirty:
        sys.exit("not clean, run nbdev_export and nbdev_clean: " + ", ".join(dirty))
    changed = uncommitted()
    print("notebooks and modules are clean" + (f" (uncommitted: {len(changed)} files)" if changed else ""))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run([(ROOT / p).resolve() for p in sys.argv[2:] or ["nbs"]])
    elif sys.argv[1] == "one":
        run_one(Path(sys.argv[2]))
    else:
        check()
