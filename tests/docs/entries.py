"""Pages of the site as data: title, line, picture, plots, Markdown; and the check of their links."""

import ast
import base64
import hashlib
import html
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE, HTML, SITE = ROOT / "_build" / "site", ROOT / "_build" / "html", ROOT / "_docs"
NAME, BASE, WORKERS = "stabilitylab", "/stabilitylab/", 2
WORDS = re.compile(r"```\{(?:index|toctree)\}.*?```\n*", re.S)  # directives that are no text
EXTERNAL = Path(__file__).with_name("links.txt")  # addresses that were looked at, one a line
LINES, COLUMNS = 7, 46  # of an output that stands for a picture on a card
CARD = 0.6  # height of a picture on a card over its width
WIDEST = 8_000  # characters of one output in a Markdown twin


@dataclass
class Entry:
    "A page as its index, the gallery and its twin need it."

    name: str  # docname, without suffix
    title: str
    description: str
    picture: str = ""  # file in `_images`, '' where the page draws nothing
    excerpt: str = ""  # first lines of its first output
    text: str = ""  # the whole page as Markdown
    is_tall: bool = False  # whether a card shows the upper part of its picture
    plots: list[tuple[str, str, str]] = field(default_factory=list)  # (function, call, file in `_images`)


def module_path(name: str) -> str:
    "The module of a page of the library: its name without folder and numbers."
    return "/".join(re.sub(r"^\d+_", "", part) for part in name.split("/")[1:])


def public_pages() -> dict[str, str]:
    "Public names of the package, and the page that exports each."
    import stabilitylab

    pages = (
        p.relative_to(ROOT / "nbs").with_suffix("").as_posix() for p in (ROOT / "nbs/api").rglob("*.ipynb")
    )
    modules = {module_path(name): name for name in pages}
    homes = {n: getattr(stabilitylab, n).__module__.partition(".")[2] for n in stabilitylab.__all__}
    return {n: modules[m.replace(".", "/")] for n, m in homes.items() if m.replace(".", "/") in modules}


def linked(text: str, name: str, pages: dict[str, str]) -> str:
    "Markdown of a page in which the names of public functions lead to their pages; not in code and headings."

    def link(found: re.Match) -> str:
        page = pages.get(found[1])
        if page is None or page == name:
            return found[0]
        return f"[`{found[1]}`]({os.path.relpath(page, os.path.dirname(name))}.ipynb#{anchor(found[1])})"

    lines, fenced = [], False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        is_text = not fenced and not line.startswith(("#", "    "))
        lines.append(re.sub(r"(?<![\[`\w])`(\w+)`(?![`\]\w])", link, line) if is_text else line)
    return "\n".join(lines)


def anchor(name: str) -> str:
    "The anchor of a heading that is a name."
    return name.lower().replace("_", "-")


def image_of(output: dict) -> str:
    "The name that myst-nb gives the picture of an output; '' where there is none."
    png = "".join(output.get("data", {}).get("image/png", ""))
    return f"{hashlib.sha256(base64.b64decode(png)).hexdigest()}.png" if png else ""


def is_tall(png: bytes) -> bool:
    "Whether a picture is higher than the place for it on a card."
    width, height = Image.open(io.BytesIO(png)).size
    return height > CARD * width


def text_of(output: dict) -> str:
    "An output as text: Markdown where there is any."
    data = output.get("data", {})
    text = data.get("text/markdown") or data.get("text/plain") or output.get("text", "")
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(text))


def plot_calls(source: str) -> Iterator[tuple[str, str]]:
    "(function, call) of the plots that a cell draws."
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a line for the shell
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id.startswith("plot_")
        ):
            yield node.func.id, ast.get_source_segment(source, node)


def picture_of_view(name: str, title: str) -> Path | None:
    "The picture of a view of the workbench in JupyterLab, for the page of that view."
    if not name.startswith("api/workbench/"):
        return None
    view = title.lower().removesuffix(" view").replace(" ", "_")
    files = (ROOT / "nbs" / "images" / f"{stem}.png" for stem in (view, f"view_{view}"))
    return next((file for file in files if file.is_file()), None)


def entry_of(name: str, nb: nbformat.NotebookNode) -> Entry:
    "A processed notebook as an entry."
    heading = nb.cells[0].source
    title = re.search(r"^# (.*)", heading, re.M)
    said = re.search(r"^> (.*)", heading, re.M)
    entry = Entry(name, title[1] if title else name, said[1] if said else "")
    parts = []
    for cell in nb.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        if "remove-input" not in cell.metadata.get("tags", []):
            parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            image, text = image_of(output), text_of(output).rstrip()
            if image:
                if not entry.picture:
                    entry.picture = image
                    entry.is_tall = is_tall(base64.b64decode("".join(output["data"]["image/png"])))
                entry.plots += [(*call, image) for call in plot_calls(cell.source)]
                parts.append("(a figure)")
            elif "text/markdown" in output.get("data", {}):
                parts.append(text)
            elif text.strip():
                if entry.excerpt.count("\n") < 2:  # one line would leave a card empty
                    entry.excerpt = text
                parts.append(f"```text\n{text[:WIDEST]}\n```")
    if view := picture_of_view(name, entry.title):
        entry.picture, entry.is_tall = view.name, is_tall(view.read_bytes())
    entry.text = "\n\n".join(parts) + "\n"
    headings = [heading for heading in re.findall(r"^##+ (.*)", entry.text, re.M) if heading != "Limits"]
    calls = re.findall(r"^##+ .*\n\n```python\n(.*)\n```", entry.text, re.M)
    if entry.excerpt.count("\n") < 2 and (calls or len(headings) > 1):
        entry.excerpt = "\n".join(calls or headings)
    return entry


def plain(text: str) -> str:
    "A line of Markdown as a line of HTML."
    text = html.escape(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text), quote=False)
    text = re.sub(r"(?<!\w)\*([^*`]+)\*(?!\w)", r"<i>\1</i>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def card(entry: Entry, folder: str) -> str:
    "An entry of an index: its picture, or the first lines of what it prints, its title and its line."
    up = "../" * (folder.count("/") + 1)
    link = entry.name.removeprefix(folder + "/")
    rows = [line[:COLUMNS] for line in entry.excerpt.splitlines() if line.strip()][:LINES]
    seen = f'<pre aria-hidden="true">{html.escape(chr(10).join(rows))}</pre>' if rows else ""
    if entry.picture:
        part = ' class="upper"' if entry.is_tall else ""
        seen = f'<img src="{up}_images/{entry.picture}"{part} alt="" loading="lazy">'
    line = f"<span>{plain(entry.description)}</span>"
    return f'<a class="card-link" href="{link}.html">{seen}<b>{plain(entry.title)}</b>{line}</a>'


def cards(entries: list[Entry], folder: str) -> str:
    "Cards side by side, as a block of HTML."
    return '<div class="cards">\n' + "\n".join(card(entry, folder) for entry in entries) + "\n</div>"


def first_plots(entries: list[Entry]) -> dict[str, tuple[Entry, str, str]]:
    "Every plot once, from the page that exports it where there is one: name -> (page, call, picture)."
    plots = {}
    for entry in sorted(entries, key=lambda e: not e.name.startswith("api/plot")):
        for function, call, image in entry.plots:
            plots.setdefault(function, (entry, call, image))
    return dict(sorted(plots.items()))


class _Links(HTMLParser):
    "What a page links to, loads, and the anchors that it has."

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value and tag != "base":
                self.links.append(value)
            elif key in ("id", "name") and value:
                self.anchors.add(value)


def read_links(site: Path) -> dict[Path, _Links]:
    "Links and anchors of every page."
    pages = {}
    for path in sorted(set(site.rglob("*.html")) - set(site.glob("_static/**/*.html"))):
        pages[path] = reader = _Links()
        reader.feed(path.read_text(encoding="utf-8"))
    return pages


def wrong_links(site: Path, base: str) -> list[str]:
    "Links of a built site to a page or an anchor that is not there, and to addresses not in the list."
    pages, wrong = read_links(site), []
    lines = EXTERNAL.read_text(encoding="utf-8").splitlines()
    checked = {line for line in lines if not line.startswith("#")}
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in dict.fromkeys(page.links):
            if re.match(r"(mailto|data|javascript):", link):
                continue
            if re.match(r"https?://", link):
                if link.partition("#")[0] not in checked:
                    wrong.append(f"{name}: {link} is not in tests/docs/links.txt: look at it, then add it")
                continue
            file, _, anchor = unquote(link).partition("#")
            file = file.partition("?")[0]
            target = site / file.removeprefix(base) if file.startswith(base) else path.parent / file
            target = (target if file else path).resolve()
            if not target.exists():
                wrong.append(f"{name}: {link} leads nowhere")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                wrong.append(f"{name}: {link} has no such heading")
    return wrong
