"""The pictures of the home page, the README and the tour, taken from the sample in a real JupyterLab.

`make pictures` writes them anew into `nbs/images`. No test: its name keeps it out of `make test`.
"""

import io
from pathlib import Path

from PIL import Image
from test_loop import FIXLAB, number, tab, ticked
from test_view_overview import SESSION, shown

TAKEN = Path(__file__).resolve().parents[2] / "nbs" / "images"
WIDTH, COLOURS = 1600, 256  # pixels: twice what the page shows; colours of a picture that is mostly plain
VIEWS = ".jupyter-widgets.jupyter-widget-tab"
DRAWN = (  # whether every picture that can be seen is there
    "[...document.querySelectorAll('.stl-figure > div[role]')].every("
    "f => !f.offsetParent || f.dataset.drawn || f.querySelector('img').naturalWidth > 0)"
)


def taken(page, name):
    "One view as a small PNG, without the notebook around it, once its pictures are there."
    page.mouse.move(2, 2)
    page.wait_for_function(DRAWN)
    page.wait_for_timeout(1500)
    picture = Image.open(io.BytesIO(page.locator(VIEWS).first.screenshot())).convert("RGB")
    size = (WIDTH, round(picture.height * WIDTH / picture.width))
    small = picture.resize(size, Image.Resampling.LANCZOS).quantize(COLOURS, dither=Image.Dither.NONE)
    TAKEN.mkdir(exist_ok=True)
    small.save(TAKEN / f"{name}.png", optimize=True)


def test_pictures(notebook):
    page, errors = notebook("pictures", SESSION, "1 + 1")
    page.keyboard.press("Control+b")  # the list of files away
    page.set_viewport_size({"width": 1280, "height": 1500})
    shown(page)
    page.click('button:has-text("Show why")')
    page.wait_for_selector('.stl-detail h3:text("lr too high")', timeout=30_000)
    taken(page, "overview")
    page.click('button:has-text("Show what changed first")')
    page.wait_for_selector('.stl-layers-view p:has-text("blocks.")', timeout=60_000)
    taken(page, "layers")
    tab(page, "Fix lab")
    ticked(page, "lower_lr", "weight_decay (control)")
    number(page, "Seeds", 3)
    number(page, "Steps", 100)
    page.click(f'{FIXLAB} button:has-text("Train")')
    page.wait_for_selector(f'{FIXLAB} :text("All arms are done.")', timeout=600_000)
    taken(page, "fix_lab")
    assert not errors, errors
