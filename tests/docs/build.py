"""Build the site: nbdev processes the notebooks, Sphinx renders them into `_docs/`.

`build.py readme` writes README.md from nbs/index.ipynb.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent.parent
PROC, SOURCE, HTML, SITE = ROOT / "_proc", ROOT / "_build" / "site", ROOT / "_build" / "html", ROOT / "_docs"
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs a kernel, which a page does not have
SECTIONS = {  # folder of nbs -> (title of its index page, what stands there)
    "symptoms": (
        "Symptoms",
        "What you see, in the words that people type: what it is, what causes it, what to do.",
    ),
    "tutorials": ("Tutorials", "Whole jobs from start to end, on the runs that come with the project."),
    "howto": ("How-to guides", "One question each, for the moment when you have it."),
    "explain": ("Explanations", "What goes wrong in training runs, why, and what teams did about it."),
    "api": ("Library", "Every public function, with a lesson that checks and shows."),
}
ROOMS = {
    "names": "Names and units",
    "numerics": "Number formats",
    "numerics/rounding": "Rounding of a loss or a step",
    "numerics/accumulation": "Gradient accumulation",
    "run": "The record of a run",
    "read": "Reading runs",
    "read/freetext": "The general reader of lines",
    "read/crash": "Crash evidence",
    "read/logs": "Log formats",
    "checkpoint": "Checkpoints",
    "knowledge": "What teams reported",
    "detect": "Detectors",
    "detect/loss": "Detectors of the loss",
    "detect/layers": "Detectors of the layers",
    "plot": "Plots",
    "probe": "Recording a live run",
    "probe/attention": "Measuring attention",
    "probe/draft": "The draft of a replay",
    "replay": "Replaying a step",
    "models": "Reference models",
    "fixes": "Fixes",
    "trial": "Trials",
    "cases": "Runs that fail on purpose",
    "report": "Reports",
    "investigation": "The main loop",
    "workbench": "The workbench",
    "mcp": "For coding agents",
    "cli": "The command",
}


def front_matter(cells):
    "Title and description from the raw cell that nbdev puts first; the cell is taken out."
    raw = next((c for c in cells if c.cell_type == "raw" and c.source.lstrip().startswith("---")), None)
    if raw is None:
        return None, None
    cells.remove(raw)
    import yaml

    meta = yaml.safe_load(raw.source.strip().strip("-")) or {}
    return meta.get("title"), meta.get("description")


def field_comments(path, name):
    "What a dataclass of the module at a path says of its fields: name -> comment beside or above it."
    tree = ast.parse(text := path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    lines = text.splitlines() if path.is_file() else []
    comments = {}
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == name):
            continue
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                beside = lines[field.end_lineno - 1][field.end_col_offset :].strip()
                above = lines[field.lineno - 2].strip()
                said = beside or (above if above.startswith("#") else "")
                comments[field.target.id] = said.lstrip("# ").replace("|", "\\|")
    return comments


def module_of(page):
    "The module that a page of the library exports, as a path."
    parts = [re.sub(r"^\d+_", "", part) for part in page.relative_to(PROC / "api").with_suffix(".py").parts]
    return ROOT.joinpath("stabilitylab", *parts)


def signature_cell(cell, module):
    "A `show_doc` cell as markdown: heading, call, docstring, and a table of what goes in and comes out."
    text = "".join(o["data"].get("text/markdown", "") for o in cell.outputs if "data" in o)
    heading, code, rest = re.match(
        r"\s*(?:---\s*)?(#+ [^\n]*)\s*```python\s*(.*?)```(.*)", text, re.S
    ).groups()
    heading = re.sub(r"\s*\[?<?source.*$", "", heading)
    rows = [
        row for line in code.splitlines() for part in split_line(line.strip()) if (row := parameter_row(part))
    ]
    names = [r[0] for r in rows if r[0] != "returns"]
    if fields := field_comments(module, heading.lstrip("# ").strip("`")):
        rows = [(*row[:3], row[3] or fields.get(row[0], "")) for row in rows if row[0] != "returns"]
    call = (
        f"{heading.lstrip('# ')}({', '.join(names)})"
        if names != ["*args", "**kwargs"]
        else heading.lstrip("# ")
    )
    table = ["| | type | default | |", "|---|---|---|---|", *(table_line(*row) for row in rows)]
    body = [
        heading,
        f"```python\n{call}\n```",
        rest.strip().strip("*").strip(),
        "\n".join(table) if rows and names != ["*args", "**kwargs"] else "",
    ]
    return nbformat.v4.new_markdown_cell("\n\n".join(b for b in body if b))


def table_line(name, kind, default, comment):
    "One parameter, or what comes back, as a line of a table."
    first = "**returns**" if name == "returns" else f"`{name}`"
    shown = (f"`{part}`" if part else "" for part in (kind, default))
    return f"| {' | '.join((first, *shown, comment))} |"


def split_line(line):
    "A line of a signature as one parameter each; only parameters without a comment share a line."
    return [line] if " # " in line or line.startswith(")") else re.split(r", (?=\w+(?:[:=]|,|$))", line)


def parameter_row(line):
    "(name, type, default, comment) of one line of a signature, or None for its brackets."
    line, _, comment = line.partition(" # ")
    comment = re.sub(r"(?<!\\)\|", r"\\|", comment.strip())
    if line.startswith(")"):
        kind = line.lstrip(")->").rstrip(":")
        return ("returns", kind.replace("|", "\\|"), "", comment) if kind or comment else None
    m = re.match(r"(\w+)(?::([^=]*))?(?:=(.*))?$", line.rstrip().removesuffix(","))
    if not m or line.startswith("def ") or line.startswith("class "):
        return None
    name, kind, default = m[1], m[2] or "", m[3] or ""
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(kind.strip(), "")
    return (
        stars + name,
        "" if stars else kind.strip().replace("|", "\\|"),
        default.replace("|", "\\|"),
        comment,
    )


def page(nb, module):
    "One processed notebook as Sphinx takes it: titled, without option lines, signatures as text."
    cells = list(nb.cells)
    title, description = front_matter(cells)
    out = (
        []
        if title is None
        else [nbformat.v4.new_markdown_cell(f"# {title}" + (f"\n\n> {description}" if description else ""))]
    )
    for c in cells:
        if c.cell_type == "markdown" and c.source.startswith("<!-- WARNING"):
            continue
        if c.cell_type == "code":
            if c.source.rstrip().rsplit("\n", 1)[-1].startswith("show_doc("):
                c = signature_cell(c, module)
            else:
                options = re.findall(r"^#\|\s*(.*)$", c.source, re.M)
                c.source = re.sub(r"^#\|.*\n?", "", c.source, flags=re.M).strip()
                c.outputs = [o for o in c.outputs if WIDGET not in o.get("data", {})]
                if "echo: false" in options:
                    c.metadata["tags"] = [*c.metadata.get("tags", []), "remove-input"]
        if c.source.strip():
            out.append(c)
    nb.cells = level_headings(out)
    nb.metadata = {
        "kernelspec": {"name": "python3", "display_name": "python3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return nb


def level_headings(cells):
    "Headings that go down one level at a time, as documents must."
    last = 0
    for c in cells:
        if c.cell_type != "markdown":
            continue
        lines, fenced = [], False
        for line in c.source.split("\n"):
            fenced ^= line.startswith("```")
            m = None if fenced else re.match(r"(#+) ", line)
            if m:
                last = min(len(m[1]), last + 1)
                line = "#" * last + line[len(m[1]) :]
            lines.append(line)
        c.source = "\n".join(lines)
    return cells


def index_page(title, text, entries):
    "An index in MyST: title, sentence, and a table of contents that is shown on the page."
    body = "\n".join(entries)
    return f"# {title}\n\n{text}\n\n```{{toctree}}\n:maxdepth: 1\n\n{body}\n```\n"


def write_symptoms():
    "A page a symptom, with the phrases that people type as entries of the search; their names, in order."
    from stabilitylab.knowledge.symptoms import symptom, symptoms

    folder = SOURCE / "symptoms"
    folder.mkdir()
    for kind in symptoms().index:
        one = symptom(kind)
        entries = "\n".join(f"```{{index}} ! single: {phrase}\n```" for phrase in (one.title, *one.aliases))
        picture = ROOT / "nbs" / "images" / "symptoms" / f"{kind}.png"
        title, rest = one.markdown.split("\n", 1)
        drawn = f"\n![{one.looks}](../images/symptoms/{kind}.png)\n" if picture.is_file() else ""
        typed = f"\nPeople also write: {'; '.join(one.aliases)}.\n"
        pages = [f"- [{page_title(ROOT / 'nbs' / page)}](../{page})" for page in one.see]
        below = "\n## Read on\n\n" + "\n".join(pages) + "\n" if pages else ""
        text = f"{entries}\n\n{title}\n{drawn}{rest}{below}{typed}"
        (folder / f"{kind}.md").write_text(text, encoding="utf-8")
    return list(symptoms().index)


def page_title(path):
    "The heading of a notebook."
    cells = nbformat.read(path, 4).cells
    heading = re.search(r"^# (.*)", "\n".join(c.source for c in cells if c.cell_type == "markdown"), re.M)
    return heading[1].replace("`", "")


def write_indexes():
    "One index a section and a room, and the root."
    sections, written = [], write_symptoms()
    for name, (title, text) in SECTIONS.items():
        folder = SOURCE / name
        pages = sorted(p.stem for p in folder.glob("*.ipynb")) if folder.is_dir() else []
        pages = written if name == "symptoms" else pages
        rooms = [r for r in ROOMS if (folder / r).is_dir()] if name == "api" else []
        if not pages and not rooms:
            continue
        for r in rooms:
            entries = sorted(p.stem for p in (folder / r).glob("*.ipynb"))
            below = [s.removeprefix(r + "/") + "/index" for s in rooms if s.startswith(r + "/")]
            (folder / r / "index.md").write_text(
                index_page(
                    ROOMS[r], f"Modules of the room `stabilitylab.{r.replace('/', '.')}`.", entries + below
                ),
                encoding="utf-8",
            )
        (folder / "index.md").write_text(
            index_page(title, text, pages + [f"{r}/index" for r in rooms if "/" not in r]), encoding="utf-8"
        )
        sections.append(f"{name}/index")
    home = nbformat.read(SOURCE / "index.ipynb", 4)
    home.cells.append(
        nbformat.v4.new_markdown_cell("```{toctree}\n:hidden:\n\n" + "\n".join(sections) + "\n```")
    )
    nbformat.write(home, SOURCE / "index.ipynb")


def unrendered():
    "Pages on which a table is still text, or that need the network to be drawn."
    wrong = []
    for file in sorted(HTML.rglob("*.html")):
        text = file.read_text(encoding="utf-8")
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", text, flags=re.S)
        if re.search(r"\|\s*[-—–:]+\s*\|", prose):
            wrong.append(f"{file.relative_to(HTML)}: a table as text")
        if re.search(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="https?://', text):
            wrong.append(f"{file.relative_to(HTML)}: loads from elsewhere")
    return wrong


def build():
    "Render the site; every Sphinx warning is an error."
    for d in (PROC, ROOT / "_build", SITE):
        shutil.rmtree(d, ignore_errors=True)
    run = {
        "cwd": ROOT,
        "check": True,
        "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    }
    subprocess.run(
        [sys.executable, "-c", "from nbdev.serve import proc_nbs; proc_nbs(n_workers=0)"], **run
    )  # what nbdev_proc_nbs does, without its `pip install -e .`
    for p in sorted(PROC.rglob("*.ipynb")):
        target = SOURCE / p.relative_to(PROC)
        target.parent.mkdir(parents=True, exist_ok=True)
        module = module_of(p) if p.is_relative_to(PROC / "api") else p
        nbformat.write(page(nbformat.read(p, 4), module), target)
    shutil.copytree(ROOT / "nbs" / "images", SOURCE / "images")
    write_indexes()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-b",
            "html",
            "-c",
            Path(__file__).parent,
            SOURCE,
            HTML,
        ],
        **run,
    )
    if wrong := unrendered():
        sys.exit("pages that show Markdown, or load from elsewhere:\n" + "\n".join(wrong))
    HTML.rename(SITE)  # built one folder deeper, because myst-nb writes beside its output
    shutil.rmtree(PROC, ignore_errors=True)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.name}/index.html")


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
            parts.append(c.source.strip().replace("](images/", "](nbs/images/"))
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
        build()
