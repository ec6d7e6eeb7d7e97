"The arrows between the rooms of the package, the top level, and what `import stabilitylab` may cost."

import ast
import collections
import configparser
import graphlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stabilitylab"
ROOMS = [
    "names",
    "numerics",
    "run",
    "read",
    "checkpoint",
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
    "investigation",
    "workbench",
    "mcp",
    "cli",
]
TRIAL = {
    "names",
    "run",
    "numerics",
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
    "numerics": {"names"},
    "run": {"names", "numerics"},
    "read": {"names", "run"},
    "checkpoint": {"names", "run", "numerics"},
    "knowledge": {"names"},
    "detect": {"names", "run", "numerics", "knowledge"},
    "plot": {"names", "run", "numerics", "detect"},
    "probe": {"names", "run", "numerics", "detect"},
    "replay": {"names", "run", "numerics", "checkpoint", "probe"},
    "models": {"names"},
    "fixes": {"names", "knowledge", "numerics", "models"},
    "trial": TRIAL,
    "cases": TRIAL | {"trial", "read"},  # a failing run for what any of them finds
    "report": {"names", "run", "plot", "detect", "knowledge", "trial"},
    "investigation": {"names", "run", "read", "detect", "replay", "trial", "report"},  # the whole loop
    "workbench": set(ROOMS) - {"cli", "mcp", "workbench"},
    "mcp": set(ROOMS) - {"workbench", "mcp", "cli"},
    "cli": set(ROOMS) - {"workbench", "cli"},
}
OWNERS = {
    "matplotlib": {"plot"},
    "ipywidgets": {"workbench"},
    "traitlets": {"workbench"},
    "anywidget": {"workbench"},
}
DEVELOPMENT = {"nbdev", "fastcore", "execnb", "ghapi", "fastgit"}  # never needed to run the package
TOP = {
    "nbs",
    "stabilitylab",
    "tests",
    "data_samples",
    "settings.ini",
    "README.md",
    "setup.py",
    "MANIFEST.in",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    ".pre-commit-config.yaml",
    "LICENSE",
    ".ci",
    ".gitignore",
    ".gitattributes",
    ".git-blame-ignore-revs",
}


def imported(node, package):
    "The modules that one statement imports, as absolute names; `package` is the one in which it stands."
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package[: len(package) - node.level + 1] if node.level else ()
    return [".".join((*above, *([node.module] if node.module else [])))]


def imports(path, nodes=ast.walk):
    "Every module that the file imports, wherever the import stands; with other `nodes`, only some of them."
    package = ("stabilitylab", *path.relative_to(PACKAGE).parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [name for node in nodes(tree) for name in imported(node, package)]


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py" and p.parent != PACKAGE)


def broken_arrows(path):
    "Why the imports of a module are against the design, one line each."
    room = path.relative_to(PACKAGE).parts[0]
    if room not in ROOMS:
        return [f"{room} is not a room of DESIGN.md"]
    wrong = []
    for name in imports(path):
        parts = name.split(".")
        to = parts[1] if parts[0] == "stabilitylab" and len(parts) > 1 else room
        if to in ROOMS and to != room and to not in MAY[room]:
            wrong.append(f"{room} may not import {name}")
        if room not in OWNERS.get(parts[0], ROOMS):
            wrong.append(f"{parts[0]} belongs to {OWNERS[parts[0]]}")
        if parts[0] in DEVELOPMENT:
            wrong.append(f"{name} is a development tool")
    return wrong


def test_arrows():
    wrong = [f"{path.relative_to(ROOT)}: {why}" for path in MODULES for why in broken_arrows(path)]
    assert not wrong, "\n".join(wrong)


def test_an_arrow_against_the_design_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "names").mkdir()
    module = tmp_path / "names" / "a.py"
    module.write_text("from ..trial import b\nimport matplotlib\nimport nbdev.export\nfrom . import c\n")
    assert broken_arrows(module) == [
        "names may not import stabilitylab.trial",
        "matplotlib belongs to {'plot'}",
        "nbdev.export is a development tool",
    ]


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


def test_no_folder_has_too_many_modules_to_look_through():
    folders = collections.Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder): n for folder, n in folders.items() if n > 25} == {}


def test_pages_of_the_tables_exist():
    "The tables of `tests/pages.py` follow when a page moves."
    from tests.pages import LOOSE, SLOWEST

    gone = [name for name in (*LOOSE, *SLOWEST) if not (ROOT / name).exists()]
    assert not gone, f"tests/pages.py names pages that are not there: {gone}"


def test_no_module_imports_itself_through_others():
    "Pages run in a process that has imported everything, so they would not see it."
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    graph = {name: set(imports(path, lambda tree: tree.body)) & set(files) for name, path in files.items()}
    assert sum(map(len, graph.values())) > len(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises with the ring


def test_import_is_light():
    heavy = ("torch", "matplotlib", "ipywidgets", "xarray")
    code = f"import sys, stabilitylab; print(*(m for m in {heavy} if m in sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    ).stdout
    assert out.split() == [], f"import stabilitylab pulls in {out}"


def test_public_names_exist():
    import stabilitylab

    for name in stabilitylab.__all__:
        assert getattr(stabilitylab, name) is not None, name


def test_a_public_name_stands_in_one_module():
    places = collections.defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("__init__.py", "_modidx.py"):
            continue
        found = re.search(
            r"^__all__ = (\[.*?\])$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        for name in ast.literal_eval(found[1]) if found else ():
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def without_private(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def exported_cells() -> list[tuple[Path, set[str], set[str]]]:
    "Of each cell that exports: its room's page, the names, and the words of its annotations."
    cells = []
    for page in sorted((ROOT / "nbs" / "api").rglob("*.ipynb")):
        for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] != "code" or not re.match(r"#\|\s*export\s*$", source, re.MULTILINE):
                continue
            body = ast.parse(source).body
            defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
            assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
            annotated = [node.target for node in body if isinstance(node, ast.AnnAssign)]
            names = {
                node.id
                for target in assigned + annotated
                for node in ast.walk(target)
                if isinstance(node, ast.Name)
            }
            if defined | names:
                cells.append((page, defined | names, annotation_words(body)))
    return cells


def annotation_words(body: list[ast.stmt]) -> set[str]:
    "The words of all annotations and base classes of some definitions."
    words: set[str] = set()
    for node in (child for statement in body for child in ast.walk(statement)):
        parts = [
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "bases", ()),
        ]
        words.update(
            word for part in parts if part is not None for word in re.findall(r"\w+", ast.unparse(part))
        )
    return words


def words_by_room() -> dict[str, set[str]]:
    "The words of the code of every room, of its pages as of its modules; `guide` is that of all other pages."
    words: dict[str, set[str]] = collections.defaultdict(set)
    for page in (ROOT / "nbs").rglob("*.ipynb"):
        parts = page.relative_to(ROOT / "nbs").parts
        room = parts[1] if parts[0] == "api" else "guide"
        for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            text = (
                text
                if cell["cell_type"] == "code"
                else " ".join(re.findall(r"`(\w+)", text)) * (room == "guide")
            )
            words[room].update(re.findall(r"\w+", text))
    for path in (PACKAGE / "__init__.py", *(ROOT / "nbs" / "explain").rglob("*.py")):
        words["guide"].update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def test_what_a_room_exports_is_used_outside_it():
    "A name for the room alone stands in a cell that begins with `#| exporti`: then it is in no `__all__`."
    cells, words = exported_cells(), words_by_room()
    assert len(cells) > 300
    used_in = collections.defaultdict(set)
    for room, known in words.items():
        for name in known:
            used_in[name].add(room)
    shown = [
        (names, types, used_in_other_rooms(page, without_private(names), used_in))
        for page, names, types in cells
    ]
    public = set().union(*(names for names, _, is_used in shown if is_used))
    size = -1
    # a type that a public name takes or gives is public as well, also where a private base class takes it
    while size != len(public):
        size = len(public)
        public |= set().union(*(types for names, types, _ in shown if names & public))
    for_the_room_alone = {
        page.stem: without_private(names)
        for page, names, _ in cells
        if without_private(names) and not names & public
    }
    assert for_the_room_alone == {}, "begin these cells with `#| exporti`"


def used_in_other_rooms(page: Path, names: set[str], used_in: dict[str, set[str]]) -> bool:
    "Whether another room, or a page that is no module, calls one of a cell's names."
    room = page.relative_to(ROOT / "nbs" / "api").parts[0]
    return any(used_in[name] - {room} for name in names)


LONGEST = 60  # lines of an exporting cell


def is_too_long(source: str) -> bool:
    "Whether a cell exports more lines than a reader takes in at once; one class or table may be longer."
    if not re.search(r"^#\s*\|\s*exporti?\b", source, re.MULTILINE) or len(source.splitlines()) <= LONGEST:
        return False
    body = ast.parse(source).body
    return len(body) > 1 or not isinstance(body[0], ast.ClassDef | ast.Assign | ast.AnnAssign)


def test_each_cell_of_a_page_has_a_name_of_its_own():
    "`nbdev_update` writes an edit into the first of two, whichever it is."
    twice = []
    for page in sorted((ROOT / "nbs").rglob("*.ipynb")):
        names = [cell["id"] for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]]
        twice += [f"{page.relative_to(ROOT)}: {name}" for name in {*names} if names.count(name) > 1]
    assert not twice, twice


def test_exporting_cells_are_short():
    long = []
    for page in sorted((ROOT / "nbs").rglob("*.ipynb")):
        for number, cell in enumerate(json.loads(page.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "code" and is_too_long("".join(cell["source"])):
                long.append(f"{page.relative_to(ROOT)}: cell {number}")
    assert not long, f"split by subject, at most {LONGEST} lines a cell:\n" + "\n".join(long)


def test_a_long_cell_is_seen():
    long = "\n".join(f"    {n},  # a row" for n in range(LONGEST))
    assert is_too_long(f"#| export\nx = 1\ntable = (\n{long}\n)")
    assert is_too_long(f"#| exporti\ndef f():\n    return (\n{long}\n)")
    assert not is_too_long(f"#| export\ntable = (\n{long}\n)")
    assert not is_too_long(f"table = (\n{long}\n)\nx = 1")


def test_requirements_are_what_is_imported():
    "Each requirement is imported by some module, and each imported library is required."
    settings = configparser.ConfigParser()
    settings.read(ROOT / "settings.ini")
    names = {
        group: set(re.findall(r"(?:^|\s)([A-Za-z][\w.-]*)", settings["DEFAULT"][f"{group}requirements"]))
        for group in ("", "lab_", "hf_", "cluster_", "remote_", "agent_", "trackers_")
    }
    distribution_of = importlib.metadata.packages_distributions()
    every = {name.split(".")[0] for path in MODULES for name in imports(path)}
    foreign = {name for name in every if name not in sys.stdlib_module_names and name != "stabilitylab"}
    used = {distribution.lower() for name in foreign for distribution in distribution_of.get(name, [name])}
    required = {name.lower() for name in names[""]}
    assert required - used == set(), "required, and imported by no module"
    optional = {name.lower() for group in names if group for name in names[group]}
    with_torch = {"triton"}  # a requirement of PyTorch's CUDA builds, absent from the others
    assert used - required - optional == with_torch, "imported, and not required"
