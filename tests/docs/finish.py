"""What is mended in pages after Sphinx: tables of pandas, maps of colours in the dark theme, the side bar."""

import os
import re
from pathlib import Path

from bs4 import BeautifulSoup
from bs4.element import Tag
from PIL import Image

from stabilitylab.names.words import FINDING_KINDS

TABLE = re.compile(r'<table border="1" class="dataframe.*?</table>', re.S)
NUMBER = re.compile(r"[-+−]?[\d.,]+(e[-+]?\d+)?\s*%?|nan|inf|-inf|NaN|<NA>|None|True|False|[-–…]|", re.I)
CODE = re.compile(r"`([^`]+)`")
IMAGE = re.compile(r'<img (?=[^>]*src="[^"]*_images/([^"/]+)")')
ANY_TABLE = re.compile(r"<table.*?</table>", re.S)
CELL = re.compile(r"(<td[^>]*>)(" + "|".join(FINDING_KINDS) + r")(?=</td>)")
OF_KINDS = re.compile(r"<th[^>]*>(?:<p>)?(?:event_)?(?:kind|finding|sign)\b")  # heads a column of findings
FIELD = re.compile(  # of the side bar: a caption and the pages below it
    r'<p[^>]*class="caption"[^>]*>\s*<span class="caption-text">([^<]*)</span>\s*</p>\s*'
    r'<ul class="([^"]*)\bnav bd-sidenav">(.*?)</ul>',
    re.S,
)
MOST_OPEN = 30  # pages of a section whose fields all stand open


def folded(text: str) -> str:
    "A page whose side bar shows the fields of a long section closed, but for the one of the page."
    n_pages = sum(field[3].count("<li") for field in FIELD.finditer(text))

    def one_field(field: re.Match) -> str:
        is_open = n_pages <= MOST_OPEN or "current" in field[2]
        opening = f"<details{' open' if is_open else ''}><summary>{field[1]}</summary>"
        return f'{opening}<ul class="{field[2]}nav bd-sidenav">{field[3]}</ul></details>'

    return FIELD.sub(one_field, text)


def is_coloured(file: Path) -> bool:
    "Whether a picture is a map of colours rather than lines on white, so that it must not be inverted."
    hues = Image.open(file).convert("HSV").resize((80, 80))
    return sum(saturation > 64 for _, saturation, _ in hues.get_flattened_data()) > 0.3 * 80 * 80


def name_index(head: list[Tag]) -> None:
    "Writes the names of an index, which pandas puts in a row of their own, into the empty corner above."
    if len(head) < 2:
        return
    names, above = (row.find_all("th") for row in (head[-1], head[-2]))
    if len(names) != len(above) or not names[0].text.strip():
        return
    pairs = list(zip(names, above, strict=True))
    if any(name.text.strip() and corner.text.strip() for name, corner in pairs):
        return
    for name, corner in pairs:
        if name.text.strip():
            corner.string = name.text.strip()
    head.pop().decompose()


def tidy(html: str) -> str:
    "A table of pandas as a reader wants it: columns of text at the left, names in backticks as code."
    soup = BeautifulSoup(html, "html.parser")
    head = soup.thead.find_all("tr") if soup.thead else []
    name_index(head)
    rows = [row.find_all("td") for row in soup.tbody.find_all("tr")] if soup.tbody else []
    names = head[-1].find_all("th") if head else []
    for place, column in enumerate(zip(*rows, strict=False)):
        if not all(NUMBER.fullmatch(cell.text.strip()) for cell in column):
            name = names[place - len(rows[0])] if len(names) >= len(rows[0]) else column[0]
            for cell in (*column, name):
                cell["class"] = "text"
    for cell in (cell for row in rows for cell in row if cell.string and "`" in cell.string):
        marked = CODE.sub(r"<code>\1</code>", cell.decode_contents())
        cell.clear()
        cell.append(BeautifulSoup(marked, "html.parser"))
    return str(soup)


def linked(table: str, up: str) -> str:
    "A table whose findings lead to their symptoms; a word such as restart is one below a heading only."
    to_symptom = rf'\1<a href="{up}symptoms/\2.html">\2</a>'
    is_of_kinds = OF_KINDS.search(table) is not None
    return CELL.sub(lambda m: m.expand(to_symptom) if is_of_kinds or "_" in m[2] else m[0], table)


def finished(text: str, up: str, coloured: set[str]) -> str:
    "A page with side bar folded, tables tidied, findings linked to their symptoms, maps of colours marked."
    text = TABLE.sub(lambda table: tidy(table[0]), text)
    text = ANY_TABLE.sub(lambda table: linked(table[0], up), folded(text))
    return IMAGE.sub(lambda image: image[0] + ("data-coloured " if image[1] in coloured else ""), text)


def finish(site: Path) -> None:
    "Mends every page of a built site."
    coloured = {file.name for file in (site / "_images").glob("*.png") if is_coloured(file)}
    for file in site.rglob("*.html"):
        up = os.path.relpath(site, file.parent) + "/"
        text = file.read_text(encoding="utf-8")
        mended = finished(text, up.removeprefix("./"), coloured)
        if mended != text:
            file.write_text(mended, encoding="utf-8")
