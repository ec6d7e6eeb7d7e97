"""What a user does with the curves of several runs in a real JupyterLab.

Smoothing, tokens and time, scales, zooms and their undo, the legend, the keyboard, a sorted table of runs, a
folder that grows, and a small model in place of a log.
"""

import json
import os

import numpy as np
from test_loop import FIXLAB, tab
from test_view_overview import SRC, shot, shown

OPEN = "from stabilitylab import Workbench\nbench = Workbench({folder!r}, every=0.3)\nbench"
MIRROR = """
import asyncio
import json
import ipywidgets as widgets

told = widgets.HTML()
told.add_class("told")
view, state = bench.tabs.children[0], bench.state


def panel_words(panel):
    kept = {name: panel[name] for name in ("left", "top", "width", "height", "x0", "x1", "y0", "y1", "log")}
    labels = [series["label"] for series in panel["series"]]
    return kept | {"labels": labels, "alphas": [line["alpha"] for line in panel["lines"]]}


def say():
    panels = [panel_words(panel) for panel in view.picture.panels]
    told.value = json.dumps({"panels": panels, "step": state.step, "run": state.name})


def later(change):  # behind what the page is sent first
    asyncio.get_running_loop().call_soon(say)


view.picture.observe(later, names=["panels"])
state.observe(later, names=["step", "name"])
say()
told
"""
TOLD, BOX = ".told .widget-html-content", ".stl-figure > div"
MOST = 120  # steps


def rows(first, last, top, up):
    "Lines of a log whose learning rate rises to `top`, and whose loss rises from step `up` on."
    steps = np.arange(first, last)
    loss = np.where(steps < up, 3 - steps / 100 + 0.05 * (-1.0) ** steps, 2.5 * 1.05 ** (steps - up))
    rate = 1e-3 * (top / 1e-3) ** (np.minimum(steps, MOST) / MOST)
    names = ("step", "loss", "lr", "tokens", "timestamp")
    columns = (steps, loss, rate, 1000 * steps, 1.7e9 + 60 * steps)
    told = zip(*(column.tolist() for column in columns), strict=True)
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in told)


def holds(page, condition):
    "Waits until the picture in the kernel is so; gives what it is."
    known = f"JSON.parse(document.querySelector('{TOLD}')?.textContent || 'null')"
    page.wait_for_function(
        f"(() => {{ const told = {known}; return told && ({condition}); }})()", timeout=60_000
    )
    return json.loads(page.inner_text(TOLD))


def acts(page, act, condition):
    "Does it, and waits until the picture is so, in the kernel and on the page; gives what it is."
    before = page.evaluate(SRC)
    act()
    told = holds(page, condition)
    page.wait_for_function(f"{SRC} !== {before!r}", timeout=60_000)
    return told


def at(page, panel, step, height):
    "Where a step lies on the screen, and a share of the panel's height from its top."
    figure = page.locator(BOX).first
    figure.scroll_into_view_if_needed()
    box = figure.bounding_box()
    across = panel["left"] + (step - panel["x0"]) / (panel["x1"] - panel["x0"]) * panel["width"]
    down = panel["top"] + height * panel["height"]
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def drag(page, *places):
    "Presses at the first place and lets go at the last one."
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=4)
    page.mouse.up()


def read_at(page, panel, step, *words):
    "Holds the pointer over a step until its values say this."
    for _ in range(100):
        page.mouse.move(2, 2)
        page.mouse.move(*at(page, panel, step, 0.5))
        said = page.locator(".stl-readout").first.inner_text()
        if all(word in said for word in words):
            return
        page.wait_for_timeout(100)
    raise AssertionError(said)


def looks(page):
    "Smoothing, what the axis counts, and its scale."
    handle = page.locator('.widget-hslider:has(label:text-is("Mean of")) .noUi-handle').first
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    panel = holds(page, "told.panels[0].labels.includes('mean of 21')")["panels"][0]
    is_pale = min(panel["alphas"]) < 0.5  # the raw curve stays behind
    assert is_pale and len(panel["labels"]) == 2, panel
    read_at(page, panel, 60, "mean of 21", "2.5")
    along = page.locator('.widget-dropdown:has(label:text-is("Along")) select').first
    along.select_option("tokens")
    read_at(page, panel, 60, "step 60 · 60,000 tokens")
    along.select_option("time")
    read_at(page, panel, 60, "step 60 · 60 minutes since the first record")
    shot(page, "smooth-time")
    along.select_option("step")
    acts(page, lambda: page.click('button:text-is("log")'), "told.panels[0].log")
    return acts(page, lambda: page.click('button:text-is("linear")'), "!told.panels[0].log")["panels"][0]


def zooms(page, panel):
    "An upright drag, a brush, a pan and the wheel, and what takes them back."
    tall, whole = panel["y1"] - panel["y0"], f"told.panels[0].y0 === {panel['y0']}"
    upright = at(page, panel, 60, 0.4), at(page, panel, 60, 0.9)
    lifted = acts(page, lambda: drag(page, *upright), f"!({whole})")["panels"][0]
    wanted = panel["y0"] + 0.1 * tall, panel["y0"] + 0.6 * tall
    assert np.allclose((lifted["y0"], lifted["y1"]), wanted, atol=0.02 * tall)
    acts(page, lambda: page.keyboard.press("z"), whole)
    acts(page, lambda: page.keyboard.press("y"), f"told.panels[0].y0 === {lifted['y0']}")
    acts(page, lambda: page.locator("button:has(.fa-undo)").first.click(), whole)
    level = at(page, panel, 40, 0.5), at(page, panel, 80, 0.5)
    near = acts(page, lambda: drag(page, *level), "told.panels[0].x1 < 100")["panels"][0]
    assert np.allclose((near["x0"], near["x1"]), (40, 80), atol=1)
    page.keyboard.down("Shift")
    level = at(page, near, 50, 0.5), at(page, near, 60, 0.5)
    moved = acts(page, lambda: drag(page, *level), f"told.panels[0].x0 < {near['x0'] - 5}")["panels"][0]
    page.keyboard.up("Shift")
    assert np.allclose((moved["x0"], moved["x1"]), (near["x0"] - 10, near["x1"] - 10), atol=1)
    page.mouse.move(*at(page, moved, 50, 0.5))
    page.keyboard.down("Control")
    wide = 0.8 * (moved["x1"] - moved["x0"])
    nearer = f"Math.abs(told.panels[0].x1 - told.panels[0].x0 - {wide}) < 0.1"
    acts(page, lambda: page.mouse.wheel(0, -100), nearer)
    page.keyboard.up("Control")
    acts(
        page,
        lambda: page.locator("button:has(.fa-undo)").first.click(),
        f"Math.abs(told.panels[0].x0 - {moved['x0']}) < 0.1",
    )
    acts(
        page,
        lambda: page.locator("button:has(.fa-repeat)").first.click(),
        f"told.panels[0].x0 > {moved['x0'] + 1}",
    )
    acts(
        page,
        lambda: page.click('button:has-text("Show all steps")'),
        f"told.panels[0].x1 === {panel['x1']} && {whole}",
    )


def legend_and_keys(page):
    "A series that is hidden and shown again, and a step that is chosen without a pointer."
    count = len(holds(page, "told.panels.length > 1")["panels"])
    acts(
        page,
        lambda: page.locator('.stl-legend button[title="hide lr"]').first.click(),
        f"told.panels.length === {count - 1}",
    )
    acts(
        page,
        lambda: page.locator('.stl-legend button[title="show lr"]').first.click(),
        f"told.panels.length === {count}",
    )
    page.locator(BOX).first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".stl-readout:visible", timeout=30_000)
    page.keyboard.press("Enter")
    panel, step = (told := holds(page, "told.step !== null"))["panels"][0], told["step"]
    middle, wide = (panel["x0"] + panel["x1"]) / 2, panel["x1"] - panel["x0"]
    assert abs(step - middle - 0.03 * wide) < 1
    page.wait_for_selector(".stl-chosen:visible", timeout=30_000)


def sorted_runs(page):
    "The table of runs, whose order a click on a heading turns and a click on a row keeps."
    tab(page, "Runs")
    table = ".stl-sortable:visible table"
    page.wait_for_selector(f'{table} td:text-is("low.jsonl")', timeout=60_000)
    page.wait_for_selector(".stl-sortable:visible p:not(:has-text('looked at'))", timeout=60_000)
    head, names = page.locator(f'{table} th:text-is("last loss")'), page.locator(f"{table} td:first-child")
    for direction, order in (
        ("ascending", ["low.jsonl", "high.jsonl"]),
        ("descending", ["high.jsonl", "low.jsonl"]),
    ):
        head.click()
        page.wait_for_selector(f'{table} th[aria-sort="{direction}"]', timeout=30_000)
        assert names.all_inner_texts() == order
    head.click()
    page.click(f'{table} td:text-is("low.jsonl")')
    holds(page, "told.run === 'low.jsonl'")
    page.wait_for_selector(f'{table} tr.chosen td:text-is("low.jsonl")', timeout=30_000)
    assert names.all_inner_texts() == ["low.jsonl", "high.jsonl"]
    shot(page, "runs-sorted")


def growing_folder(page, folder):
    "A file that comes later, and one that grows."
    page.click('button:has-text("Follow")')
    part = folder.parent / "part"
    part.write_text(rows(0, MOST, 1e-3, 999))
    os.replace(part, folder / "new.jsonl")
    page.wait_for_selector('.stl-sortable:visible td:text-is("new.jsonl")', timeout=60_000)
    tab(page, "Overview")
    holds(page, f"told.panels[0].x1 < {MOST + 20}")
    with open(folder / "low.jsonl", "a") as log:
        log.write(rows(MOST, 2 * MOST, 1e-3, 999))
    holds(page, f"told.panels[0].x1 > {1.9 * MOST}")
    page.click('button:has-text("Follow")')


def test_curves_runs_a_growing_folder_and_a_proxy(notebook, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "high.jsonl").write_text(rows(0, MOST, 5.0, 60))
    (folder / "low.jsonl").write_text(rows(0, MOST, 1e-3, 999))
    (folder / "hparams.yaml").write_text("num_hidden_layers: 1\nhidden_size: 32\n")
    page, errors = notebook("interactions", OPEN.format(folder=str(folder)), MIRROR)
    shown(page)
    tab(page, "Fix lab")
    origin = page.locator(f'{FIXLAB} .widget-dropdown:has(label:text-is("From")) select')
    origin.select_option("a small proxy")
    tab(page, "Overview")  # the proxy is made beside all this
    zooms(page, looks(page))
    legend_and_keys(page)
    tab(page, "Fix lab")
    page.wait_for_selector(f'{FIXLAB} div:text("proxy model was trained with the run")', timeout=180_000)
    page.wait_for_selector(f'{FIXLAB} button:has-text("Train"):not([disabled])', timeout=30_000)
    assert "appears at the run's own learning rate" in page.inner_text(FIXLAB)
    shot(page, "proxy")
    sorted_runs(page)
    growing_folder(page, folder)
    assert not errors, errors
