"Code on a page for readers can be copied as it stands: nothing that a reader sees needs a hidden cell."

import ast
import builtins
import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.docs.build import without_empty_sections
from tests.docs.finish import finished

NBS = Path(__file__).resolve().parent.parent / "nbs"
FOLDERS = ("tutorials", "howto", "explain")
PAGES = [NBS / "index.ipynb", *(page for name in FOLDERS for page in sorted((NBS / name).glob("*.ipynb")))]
KNOWN = set(dir(builtins)) | {"__file__", "__name__"}


def cells(page: Path) -> Iterator[tuple[bool, str]]:
    "(whether a reader sees it, source) of each cell of code."
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith(("%", "!")):
            yield not source.startswith(("#| hide\n", "#| hide_input\n")), source


def names(tree: ast.AST) -> tuple[set[str], set[str]]:
    "(names that code gives, names that it needs)."
    given, needed = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                given |= {(a.asname or a.name).partition(".")[0] for a in node.names}
            case ast.FunctionDef() | ast.ClassDef():
                given.add(node.name)
            case ast.arg():
                given.add(node.arg)
            case ast.ExceptHandler():
                given.add(node.name or "")
            case ast.Name(ctx=ast.Load()):
                needed.add(node.id)
            case ast.Name():
                given.add(node.id)
    return given, needed


def missing(page: Path) -> set[str]:
    "Names that a visible cell needs and only hidden ones give."
    seen, wanted = set(), set()
    for is_seen, source in cells(page):
        if is_seen:
            given, needed = names(ast.parse(source))
            seen |= given
            wanted |= needed
    return wanted - seen - KNOWN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_reader_sees_runs_by_itself(page):
    assert not missing(page), f"{page.name}: import or make these in a cell that can be seen"


def test_a_page_does_not_begin_with_housekeeping():
    begin = {page.stem: next((s for seen, s in cells(page) if seen), "") for page in PAGES}
    assert not [
        name for name, source in begin.items() if source.startswith(("torch.manual_seed", "xr.set_options"))
    ]


def checks(page: Path) -> list[str]:
    "The checks that a reader sees: on these pages they stand in hidden cells."
    trees = (ast.parse(source) for is_seen, source in cells(page) if is_seen)
    return [ast.unparse(n) for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Assert)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_checks_are_hidden(page):
    assert not checks(page), f"{page.name}: move the check to a cell that begins with `#| hide`"


def test_a_hidden_import_is_found(tmp_path):
    page = tmp_path / "page.ipynb"
    code = ["#| hide\nimport torch\nx = 1", "torch.ones(x)\nfor i in range(3):\n    print(i)"]
    page.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in code]}))
    assert missing(page) == {"torch", "x"}


def test_a_check_that_is_seen_is_found(tmp_path):
    page = tmp_path / "page.ipynb"
    code = ["#| hide\nassert x", "if x:\n    assert x > 1"]
    page.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source} for source in code]}))
    assert checks(page) == ["assert x > 1"]


TABLE = """<table border="1" class="dataframe">
<thead><tr><th></th><th>lost</th><th>what</th></tr><tr><th>kind</th><th></th><th></th></tr></thead>
<tbody><tr><th>a</th><td>1.5e-3</td><td>see `recovery`</td></tr>
<tr><th>b</th><td>NaN</td><td>divergence</td></tr></tbody>
</table>"""


def test_tables_of_a_built_page_are_tidied():
    page = finished(TABLE + '<img alt="" src="../_images/map.png">', "../", {"map.png"})
    head, _, body = page.partition("<tbody>")
    assert head.count("<tr>") == 1 and "<th>kind</th>" in head and '<th class="text">what</th>' in head
    assert "<th>lost</th>" in head and "<td>1.5e-3</td>" in body and "<td>NaN</td>" in body
    assert '<td class="text">see <code>recovery</code></td>' in body
    assert '<a href="../symptoms/divergence.html">divergence</a>' in body and "<img data-coloured " in page


def test_a_section_of_which_nothing_is_shown_has_no_heading():
    texts = ["# Page", "## Empty", "### Empty too", "## Kept", "Text.", "## Text within\n\nText.", "## Last"]
    cells = [nbformat.v4.new_markdown_cell(text) for text in texts]
    cells.insert(4, nbformat.v4.new_code_cell("1"))
    shown = [cell.source for cell in without_empty_sections(cells)]
    assert shown == ["# Page", "## Kept", "1", "Text.", "## Text within\n\nText."]
