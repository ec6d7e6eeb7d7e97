"""The pictures of the home page, the README and the tour, taken from the sample in a real JupyterLab.

`make pictures` writes them anew into `nbs/images`. No test: its name keeps it out of `make test`.
"""

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from test_loop import FIXLAB, REPLAY, number, tab, ticked
from test_view_attention import SESSION as HEADS
from test_view_overview import RUN, SESSION, shown
from test_view_replay import start

TAKEN = Path(__file__).resolve().parents[2] / "nbs" / "images"
WIDTH, COLOURS = 1600, 256  # pixels: twice what the page shows; colours of a picture that is mostly plain
LOOP, SECONDS = ("overview", "layers", "replay", "fix_lab"), 4  # frames of the moving picture, each so long
FRAME = (1200, 900)  # pixels of a frame
VIEWS = ".jupyter-widgets.jupyter-widget-tab"
AROUND = 400  # pixels of the page above and below a view: bars, and the cell before it
DRAWN = (  # whether every picture that can be seen is there
    "[...document.querySelectorAll('.stl-figure > div[role]')].every("
    "f => !f.offsetParent || f.dataset.drawn || f.querySelector('img').naturalWidth > 0)"
)


def view(page):
    "The view without the notebook around it, once its pictures are there."
    page.mouse.move(2, 2)
    bounds = page.locator(VIEWS).first.bounding_box()
    page.set_viewport_size({"width": 1280, "height": max(1500, round(bounds["height"]) + AROUND)})
    page.wait_for_function(DRAWN)
    page.wait_for_timeout(1500)
    return Image.open(io.BytesIO(page.locator(VIEWS).first.screenshot())).convert("RGB")


def taken(page, name):
    "One view as a small PNG."
    picture = view(page)
    size = (WIDTH, round(picture.height * WIDTH / picture.width))
    small = picture.resize(size, Image.Resampling.LANCZOS).quantize(COLOURS, dither=Image.Dither.NONE)
    TAKEN.mkdir(exist_ok=True)
    small.save(TAKEN / f"{name}.png", optimize=True)


def film():
    "The moving picture of the home page from the pictures of the loop, each cut to its top."
    frames = []
    for name in LOOP:
        picture = Image.open(TAKEN / f"{name}.png").convert("RGB")
        height = round(picture.width * FRAME[1] / FRAME[0])
        canvas = Image.new("RGB", (picture.width, height), "white")
        canvas.paste(picture.crop((0, 0, picture.width, min(height, picture.height))))
        small = canvas.resize(FRAME, Image.Resampling.LANCZOS)
        frames.append(small.quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB"))
    settings = {"duration": SECONDS * 1000, "loop": 0, "lossless": True, "quality": 100, "method": 6}
    frames[0].save(TAKEN / "loop.webp", save_all=True, append_images=frames[1:], **settings)


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


VIEWED = ("Series", "Checkpoints", "Precision", "Accumulation", "Environment")  # one run, and no path
CALL = """(() => { const shown = [...document.querySelectorAll('.jupyter-widgets details pre')]
  .find(pre => pre.closest('.lm-Widget')?.offsetParent); return shown ? shown.textContent : ''; })()"""


def replayed(page):
    "Runs a step again, and takes the picture of the verdict."
    page.locator(f"{REPLAY} input[type=number]").first.fill("352")
    page.keyboard.press("Enter")
    start(page)
    page.wait_for_selector(f"{REPLAY} h3", timeout=900_000)
    taken(page, "replay")


@pytest.mark.timeout(3000)
def test_views(notebook):
    "Every other view for the gallery, and the calls that views offer to copy."
    page, errors = notebook("views", SESSION, "1 + 1")
    page.keyboard.press("Control+b")
    page.set_viewport_size({"width": 1280, "height": 1500})
    shown(page)
    calls = {"overview": page.evaluate(CALL)}
    for title in ("Layers", "Replay", "Fix lab", *VIEWED):
        tab(page, title)
        page.wait_for_timeout(4000)
        if title == "Replay":
            replayed(page)
        elif title in VIEWED:
            taken(page, f"view_{title.lower()}")
        calls[title.lower().replace(" ", "")] = page.evaluate(CALL)
    page.close()
    page, errors = notebook("heads", HEADS, "1 + 1")
    page.keyboard.press("Control+b")
    page.set_viewport_size({"width": 1280, "height": 1500})
    shown(page)
    tab(page, "Attention")
    page.wait_for_timeout(4000)
    taken(page, "view_attention")
    calls["attention"] = page.evaluate(CALL)
    table = json.dumps(calls, indent=1).replace(RUN, "path/to/run")
    (TAKEN / "views.json").write_text(table + "\n")
    assert not errors, errors


def test_the_moving_picture():
    "After the others, for it is made of their pictures."
    film()
