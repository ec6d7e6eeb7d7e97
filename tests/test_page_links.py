"""Links between the pages, as the site's builder wants them: its own warnings come minutes later."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

NBS = Path(__file__).resolve().parent.parent / "nbs"
PAGES = sorted(page for page in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in page.parts)


def texts(page: Path) -> Iterator[str]:
    "The cells of prose of a page, without their code blocks."
    for cell in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            yield re.sub(r"```.*?```|`[^`\n]*`", "", "".join(cell["source"]), flags=re.S)


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


def test_the_rules_find_what_they_look_for(tmp_path):
    prose = ["# A\n", "[b](b.html) [c](page.ipynb#x) [d](https://e.org) `[f](g)`\n"]
    page = tmp_path / "page.ipynb"
    page.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": prose}]}))
    assert broken_links(page) == ["b.html"]
