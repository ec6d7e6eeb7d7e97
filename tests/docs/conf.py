"Sphinx settings of the site; metadata come from settings.ini."

from configparser import ConfigParser
from html import escape
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_ini = ConfigParser()
_ini.read(Path(__file__).resolve().parent.parent.parent / "settings.ini", encoding="utf-8")
project, version, author = _ini["DEFAULT"]["lib_name"], _ini["DEFAULT"]["version"], _ini["DEFAULT"]["author"]
copyright, release = f"{_ini['DEFAULT']['copyright']} · version {version}", version
extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # tables and mathematics in outputs too
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]
html_theme, html_title = "pydata_sphinx_theme", "stabilitylab"
html_static_path, html_css_files, html_extra_path = ["static"], ["site.css"], ["extra"]
html_favicon = "static/favicon.svg"
html_sidebars = {name: [] for name in ("index", "gallery", "changes")}
html_show_sourcelink, html_copy_source = False, False
html_theme_options = {
    "logo": {"text": "stabilitylab"},
    "show_prev_next": True,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "pygments_dark_style": "github-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_nav_level": 1,
    "navigation_depth": 3,
}
pygments_style = "default"


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    "A formula within a line."
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _display(translator: HTML5Translator, node: nodes.math_block) -> None:
    "A formula on a line of its own."
    translator.body.append(f"<div class='math'>{convert(node.astext(), display='block')}</div>")
    raise nodes.SkipNode


def _head(app: Sphinx, name: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    "What a search engine shows of a page, and where its Markdown twin is."
    if name == "search":
        for script in ("symptom_words.js", "symptoms.js"):
            app.add_js_file(script)
    if doctree is None:
        return
    for kind in (nodes.block_quote, nodes.paragraph):
        said = next(iter(doctree.findall(kind)), None)
        if said is not None:
            line = escape(" ".join(said.astext().split())[:300], quote=True)
            context["metatags"] += f'<meta name="description" content="{line}">'
            break
    twin = f"{name.rpartition('/')[2]}.md"
    context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{twin}">'


def setup(app: Sphinx) -> dict:
    "Formulas as MathML, which browsers draw by themselves: nothing is loaded from elsewhere."
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    app.connect("html-page-context", _head)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
