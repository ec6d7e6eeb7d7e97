"""Build the site: the notebooks as a reader wants them, rendered by Sphinx into `_docs/`.

`build.py readme` writes README.md from nbs/index.ipynb. `build.py PART …` renders into `_part/` only the
pages whose path holds one of these words, with the home page: to look at what is being written.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.docs.entries import (
    BASE,
    HTML,
    ROOT,
    SITE,
    SOURCE,
    WORKERS,
    entry_of,
    linked,
    public_pages,
    wrong_links,
)
from tests.docs.finish import finish
from tests.docs.indexes import write_indexes, write_search, write_twins
from tests.docs.signatures import described

LONGEST = 12  # lines of code that an explanation shows unfolded
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs a kernel, which a page does not have


def shown(cell):
    "A cell as a reader sees it, or None: exported code as what is said of its names, hidden code not at all."
    if cell.cell_type != "code":
        return cell if cell.source.strip() else None
    options = set(re.findall(r"^#\|\s*(.*?)\s*$", cell.source, re.M))
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip()
    if "export" in options:
        said = described(source)
        return nbformat.v4.new_markdown_cell(said) if said else None
    if options & {"hide", "exporti"} or any(o.startswith("default_exp") for o in options) or not source:
        return None
    cell.source = source
    cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
    if "hide_input" in options:
        cell.metadata["tags"] = ["remove-input"]
    return cell


def page(nb):
    "One notebook as Sphinx takes it."
    nb.cells = level_headings(without_empty_sections([c for c in map(shown, nb.cells) if c is not None]))
    nb.metadata = {
        "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return nb


def heading_level(cell):
    "The level of the heading with which a cell begins; 9 where it begins with none."
    heading = re.match(r"(#+) ", cell.source) if cell.cell_type == "markdown" else None
    return len(heading[1]) if heading else 9


def without_empty_sections(cells):
    "Cells without headings that have nothing below them, since what stood there is not shown."
    kept = []
    for cell in reversed(cells):
        is_bare = heading_level(cell) < 9 and "\n" not in cell.source.strip()
        below = heading_level(kept[-1]) if kept else 0
        if not is_bare or below > heading_level(cell):
            kept.append(cell)
    return kept[::-1]


def level_headings(cells):
    "Headings that go down one level at a time, as documents must; those of one level stay on one."
    above: list[tuple[int, int]] = []  # (level in the notebook, level on the page) of the open sections
    for c in cells:
        if c.cell_type != "markdown":
            continue
        lines, fenced = [], False
        for line in c.source.split("\n"):
            fenced ^= line.startswith("```")
            m = None if fenced else re.match(r"(#+) ", line)
            if m:
                while above and above[-1][0] >= len(m[1]):
                    above.pop()
                above.append((len(m[1]), above[-1][1] + 1 if above else 1))
                line = "#" * above[-1][1] + line[len(m[1]) :]
            lines.append(line)
        c.source = "\n".join(lines)
    return cells


def fold_long_code(nb):
    "Folds the longer cells of an explanation, so that its pictures stand near the text; a click shows them."
    for cell in nb.cells:
        if cell.cell_type == "code" and cell.source.count("\n") >= LONGEST:
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]


def unrendered():
    "Pages on which a table or a formula is still text, or that need the network to be drawn."
    wrong = []
    for file in sorted(HTML.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.S)
        if re.search(r"\|\s*[-—–:]+\s*\|", prose):
            wrong.append(f"{file.relative_to(HTML)}: a table as text")
        formulas = re.sub(r"<[^>]+>", "", " ".join(re.findall(r"<math\b.*?</math>", text, flags=re.S)))
        if re.search(r"frac|sqrt|\\", formulas):
            wrong.append(f"{file.relative_to(HTML)}: a formula as text")
        if re.search(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="https?://', text):
            wrong.append(f"{file.relative_to(HTML)}: loads from elsewhere")
    return wrong


def processed(only):
    "The notebooks as Sphinx takes them; an entry a page."
    entries, names = [], public_pages()
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        name = path.relative_to(ROOT / "nbs").with_suffix("").as_posix()
        is_wanted = not only or name == "index" or any(word in name for word in only)
        if not is_wanted or ".ipynb_checkpoints" in path.parts:
            continue
        nb = page(nbformat.read(path, 4))
        if name.startswith("explain/"):
            fold_long_code(nb)
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, name, names if not only else {})
                cell.source = cell.source.replace('="images/', '="_images/')
        target = SOURCE / path.relative_to(ROOT / "nbs")
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, target)
        entries.append(entry_of(name, nb))
    return sorted(entries, key=lambda e: (e.name == "index", e.name))


def build(only=()):
    "Render the site, or the pages whose paths hold one of these words; a warning of Sphinx is an error."
    site = ROOT / "_part" if only else SITE
    for d in (ROOT / "_build", site):
        shutil.rmtree(d, ignore_errors=True)
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = {"cwd": ROOT, "check": True, "env": os.environ | env}
    entries = processed(only)
    shutil.copytree(ROOT / "nbs" / "images", SOURCE / "images")
    entries = write_indexes(entries, only)
    strict = [] if only else ["-W", "--keep-going"]
    where = ["-j", str(WORKERS), "-b", "html", "-c", Path(__file__).parent, SOURCE, HTML]
    subprocess.run([sys.executable, "-m", "sphinx", "-q", *strict, *where], **run)
    for picture in (ROOT / "nbs" / "images").iterdir():  # those that HTML of ours names
        if picture.is_file():
            shutil.copy(picture, HTML / "_images")
    finish(HTML)
    write_twins(entries)
    write_search()
    wrong = [] if only else unrendered() + wrong_links(HTML, BASE)
    if wrong:
        sys.exit("pages that show Markdown, load from elsewhere, or link to nothing:\n" + "\n".join(wrong))
    HTML.rename(site)  # built one folder deeper, because myst-nb writes beside its output
    print(f"{len(list(site.rglob('*.html')))} pages in {site.name}/index.html")


def readme_text():
    "README.md as it must be: the markdown and the outputs of nbs/index.ipynb."
    nb, parts = (
        nbformat.read(ROOT / "nbs" / "index.ipynb", 4),
        ["<!-- Written from nbs/index.ipynb by tests/docs/build.py readme; edit the notebook. -->"],
    )
    for c in nb.cells:
        if c.cell_type == "raw" or re.search(r"^#\|\s*hide", c.source, re.M):
            continue
        if c.cell_type == "markdown":
            text = re.sub(r'(srcset="|src="|\]\()(?=images/)', r"\1nbs/", c.source.strip())
            parts.append(re.sub(r"\]\((?=[\w/]+\.ipynb)", "](nbs/", text))
        else:
            source = re.sub(r"^#\|.*\n?", "", c.source, flags=re.M).strip()
            text = "\n".join(
                o.get("text", o.get("data", {}).get("text/plain", "")).rstrip() for o in c.outputs
            )
            parts += [f"```python\n{source}\n```"] + ([f"```text\n{text}\n```"] if text.strip() else [])
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        (ROOT / "README.md").write_text(readme_text(), encoding="utf-8")
    else:
        build(sys.argv[1:])
