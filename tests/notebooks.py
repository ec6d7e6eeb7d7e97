"""Notebooks are the source: three commands.

`run PATH …` runs them and stores their outputs, `small PATH …` stores their pictures in fewer bytes, `check`
looks whether notebooks and modules are clean.
"""

import base64
import io
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
from execnb.nbio import read_nb, write_nb
from execnb.shell import CaptureShell
from nbdev.clean import clean_nb
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent


def tool(name):
    "Run one of nbdev's commands on this checkout."
    subprocess.run(
        [Path(sys.executable).with_name(name)],
        cwd=ROOT,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def small_picture(png):
    "A picture (base64 of a PNG) in a palette of 256 colours: a third of the bytes, and no eye sees it."
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    if picture.mode == "P":
        return png
    is_opaque = picture.mode == "RGB" or picture.getchannel("A").getextrema() == (255, 255)
    # the median cut is the finer one, and cannot do shades of alpha
    method = Image.Quantize.MEDIANCUT if is_opaque else Image.Quantize.FASTOCTREE
    source, out = picture.convert("RGB") if is_opaque else picture, io.BytesIO()
    source.quantize(256, method=method, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    smaller = base64.b64encode(out.getvalue()).decode()
    return smaller if len(smaller) < len(png) else png


def shrink(nb):
    "Store every picture of a notebook small."
    for cell in nb.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = small_picture("".join(data["image/png"]))


def run_one(path):
    "Execute one notebook, keep its outputs, clean it."
    os.chdir(path.parent)
    pd.set_option("display.max_colwidth", None)  # a page shows the text of a table whole; so in pages.py
    CaptureShell(path=path.parent).execute(path, dest=path, exc_stop=True)
    nb = read_nb(path)
    clean_nb(nb, clear_all=False)
    shrink(nb)
    write_nb(nb, path)


def pages(paths):
    "The notebooks at or below some paths."
    found = (p for path in paths for p in ([path] if path.is_file() else sorted(path.rglob("*.ipynb"))))
    return [p for p in found if ".ipynb_checkpoints" not in p.parts]


def small(paths):
    "`shrink` for every notebook at or below `paths`."
    for path in pages(paths):
        nb = read_nb(path)
        shrink(nb)
        write_nb(nb, path)


def run(paths):
    "`run_one` for every notebook at or below `paths`, each in a fresh process, then export."
    for p in pages(paths):
        print(p.relative_to(ROOT), flush=True)
        subprocess.run(
            [sys.executable, __file__, "one", p],
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
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
    elif sys.argv[1] == "small":
        small([(ROOT / p).resolve() for p in sys.argv[2:] or ["nbs"]])
    elif sys.argv[1] == "one":
        run_one(Path(sys.argv[2]))
    else:
        check()
