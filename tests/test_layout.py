"The arrows between the rooms of the package, the top level, and what `import stabilitylab` may cost."

import ast
import configparser
import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stabilitylab"
ROOMS = [
    "names",
    "run",
    "numerics",
    "read",
    "checkpoint",
    "measure",
    "rounding",
    "accumulate",
    "knowledge",
    "detect",
    "plot",
    "probe",
    "replay",
    "models",
    "fixes",
    "trial",
    "cases",
    "report",
    "workbench",
    "cli",
]
TRIAL = {
    "names",
    "run",
    "numerics",
    "measure",
    "detect",
    "knowledge",
    "replay",
    "checkpoint",
    "models",
    "fixes",
    "probe",
}
MAY = {
    "names": set(),
    "run": {"names"},
    "numerics": {"names"},
    "read": {"names", "run"},
    "checkpoint": {"names", "run", "numerics"},
    "measure": {"names", "run", "numerics"},
    "rounding": {"names", "numerics"},
    "accumulate": {"names", "numerics"},
    "knowledge": {"names"},
    "detect": {"names", "run", "numerics", "measure", "knowledge"},
    "plot": {"names", "run", "numerics", "measure", "detect"},
    "probe": {"names", "run", "numerics", "measure", "detect"},
    "replay": {"names", "run", "numerics", "checkpoint", "rounding", "probe", "measure"},
    "models": {"names"},
    "fixes": {"names", "knowledge", "numerics", "models"},
    "trial": TRIAL,
    "cases": TRIAL | {"trial", "read", "rounding", "accumulate"},  # a failing run for what any of them finds
    "report": {"names", "run", "measure", "plot", "detect", "knowledge", "trial"},
    "workbench": set(ROOMS) - {"cli", "workbench"},
    "cli": set(ROOMS) - {"workbench", "cli"},
}
OWNERS = {
    "matplotlib": {"plot"},
    "ipywidgets": {"workbench"},
    "traitlets": {"workbench"},
    "anywidget": {"workbench"},
}
TOP = {
    "nbs",
    "stabilitylab",
    "tests",
    "data_samples",
    "settings.ini",
    "README.md",
    "setup.py",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "CONTRIBUTING.md",
    "LICENSE",
    ".ci",
    ".gitignore",
    ".gitattributes",
    ".git-blame-ignore-revs",
}


def imports(path):
    "Every module that the file imports, as an absolute name, wherever the import stands."
    package = ("stabilitylab", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (
                ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))
                if node.level
                else node.module
            )


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py" and p.parent != PACKAGE)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    room = path.relative_to(PACKAGE).parts[0]
    assert room in ROOMS, f"{room} is not a room of DESIGN.md"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "stabilitylab" and len(parts) > 1 and parts[1] in ROOMS and parts[1] != room:
            assert parts[1] in MAY[room], f"{room} may not import {name}"
        if parts[0] in OWNERS:
            assert room in OWNERS[parts[0]], (
                f"{parts[0]} belongs to {OWNERS[parts[0]]}; {path.name} imports it"
            )
        assert parts[0] not in {"nbdev", "fastcore", "execnb", "ghapi", "fastgit"}, (
            f"{path.name}: {name} is a development tool"
        )


def test_rooms_only_import_upwards():
    for room, may in MAY.items():
        assert all(ROOMS.index(m) < ROOMS.index(room) for m in may), room


def test_top_level_holds_only_what_the_design_names():
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a git checkout")
    tracked = {
        line.split("/")[0]
        for line in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    }
    assert tracked <= TOP, tracked - TOP


def test_every_module_has_its_notebook():
    for p in MODULES:
        if p.name == "__init__.py":
            continue
        source = re.search(r"File to edit: (\S+\.ipynb)\.", p.read_text(encoding="utf-8"))
        assert source, f"{p} is not exported from a notebook"
        assert (p.parent / source[1]).resolve().is_file() or (PACKAGE / source[1]).resolve().is_file(), (
            f"{p}: {source[1]} is gone"
        )


def test_import_is_light():
    heavy = ("torch", "matplotlib", "ipywidgets", "xarray")
    code = f"import sys, stabilitylab; print(*(m for m in {heavy} if m in sys.modules))"
    begin = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert out.split() == [], f"import stabilitylab pulls in {out}"
    assert time.perf_counter() - begin < 30  # a hang, not a benchmark: that is in tests/benchmarks


def test_public_names_exist():
    import stabilitylab

    for name in stabilitylab.__all__:
        assert getattr(stabilitylab, name) is not None, name


def test_requirements_are_what_is_imported():
    "Each requirement is imported by some module, and each imported library is required."
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    names = {
        group: set(re.findall(r"(?:^|\s)([A-Za-z][\w.-]*)", settings["DEFAULT"][f"{group}requirements"]))
        for group in ("", "lab_", "hf_", "cluster_")
    }
    distribution_of = importlib.metadata.packages_distributions()
    every = {name.split(".")[0] for path in MODULES for name in imports(path)}
    foreign = {name for name in every if name not in sys.stdlib_module_names and name != "stabilitylab"}
    used = {distribution.lower() for name in foreign for distribution in distribution_of.get(name, [name])}
    required = {name.lower() for name in names[""]}
    assert required - used == set(), "required, and imported by no module"
    optional = {name.lower() for group in ("lab_", "hf_", "cluster_") for name in names[group]}
    assert used - required - optional == set(), "imported, and not required"
