"""Links between the pages, as the site's builder wants them: its own warnings come minutes later."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

NBS = Path(__file__).resolve().parent.parent / "nbs"
PAGES = sorted(page for page in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in page.parts)


def texts(page: Path, code: bool = False) -> Iterator[str]:
    "The cells of prose of a page, with or without what is marked as code in them."
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            yield text if code else re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def broken_links(page: Path) -> list[str]:
    "Links to a file that is not there; a page is linked as its notebook."
    links = [link for text in texts(page) for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    files = [
        link.partition("#")[0] for link in links if not re.match(r"https?://|mailto:|#|attachment:", link)
    ]
    return [file for file in files if not (page.parent / file).exists()]


def test_links_lead_somewhere():
    wrong = {str(page.relative_to(NBS)): broken_links(page) for page in PAGES}
    assert not (wrong := {page: links for page, links in wrong.items() if links}), wrong


def test_promises_name_tests_that_exist():
    page = "".join(texts(NBS / "explain" / "promises.ipynb", code=True))
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    tests = Path(__file__).parent
    gone = [name for file, name in named if f"def {name}(" not in (tests / file).read_text(encoding="utf-8")]
    assert len(named) > 12 and gone == []


def test_the_rules_find_what_they_look_for(tmp_path):
    prose = ["# A\n", "[b](b.html) [c](page.ipynb#x) [d](https://e.org) `[f](g)`\n"]
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": prose}]}))
    assert broken_links(page) == ["b.html"]
