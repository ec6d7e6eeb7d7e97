"""The script of the picture in a page of its own: what it reads off the points and which gestures it sends.

A page without JupyterLab takes a second; the tests of the views drive the same script inside JupyterLab.
"""

import base64
import json

import numpy as np
import pytest

from stabilitylab.detect.findings import Finding, Findings
from stabilitylab.plot.findings import Look
from stabilitylab.plot.picture import RunPicture
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
from stabilitylab.workbench.parts import PictureWidget

PAGE = """
<style>%(css)s</style><div id="place" style="width: 900px"></div>
<script type="module">
const script = new Blob([%(script)s], { type: 'text/javascript' });
const bytes = (text) => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
const findings = ['4 loss spike, step 400', '5 divergence, steps 402 to 500'];
const state = { marks: [{ x: 400, index: 3, findings }], alt: 'loss', cursor: null, png: bytes(%(png)s) };
state.panels = %(panels)s.map(p => ({ ...p, series: p.series.map(s => ({ ...s, xy: bytes(s.xy) })) }));
const heard = {};
window.renew = () => heard['change:panels']();
window.choose = (x) => { state.chosen = x; heard['change:chosen'](); };
window.legend = (entries) => { state.legend = entries; heard['change:legend'](); };
window.sent = [];
const model = {
  get: (name) => state[name],
  set: (name, value) => {
    state[name] = value;
    window.sent.push([name, value]);
    (heard['change:' + name] || (() => 0))();
  },
  save_changes: () => 0,
  on: (name, act) => { heard[name] = act; },
};
const { default: widget } = await import(URL.createObjectURL(script));
widget.render({ model, el: document.getElementById('place') });
window.ready = true;
</script>
"""


@pytest.fixture(scope="module")
def panels():
    "A picture of a loss that ends in NaN, with the place of its panel."
    values = np.r_[np.linspace(3, 2, 500), [np.nan]]
    learning_rate = np.full(501, 1e-3)
    samples = {"loss": Samples(np.arange(501), values), "lr": Samples(np.arange(501), learning_rate)}
    findings = Findings([Finding("loss_spike", "warning", 400, 410)])
    return RunPicture()(new_run(make_scalars(samples)), findings)


@pytest.fixture
def page(browser_alone, panels):
    "The script on this picture, and the panel of the loss."
    png, places = panels
    coded = [
        p | {"series": [s | {"xy": base64.b64encode(s["xy"]).decode()} for s in p["series"]]} for p in places
    ]
    tab = browser_alone.new_page(viewport={"width": 1000, "height": 900})
    tab.set_content(
        PAGE
        % {
            "css": PictureWidget._css,
            "script": json.dumps(str(PictureWidget._esm)),
            "png": json.dumps(base64.b64encode(png).decode()),
            "panels": json.dumps(coded),
        }
    )
    tab.wait_for_function("window.ready && document.querySelector('img').naturalWidth > 0", timeout=30_000)
    yield tab
    tab.close()


def at(page, panel, step, height=0.5):
    "Where a step lies on the screen."
    box = page.locator("img").bounding_box()
    share = panel["left"] + (step - panel["x0"]) / (panel["x1"] - panel["x0"]) * panel["width"]
    down = panel["top"] + height * panel["height"]
    return box["x"] + share * box["width"], box["y"] + down * box["height"]


def last_sent(page, name):
    "The value that the script sent last under this name."
    return page.evaluate("name => window.sent.filter(([n]) => n === name).at(-1)?.[1]", name)


def test_values_stand_under_the_pointer(page, panels):
    panel = panels[1][0]
    page.mouse.move(*at(page, panel, 250))
    words = page.inner_text(".stl-readout")
    step = int(words.split("\n")[0].removeprefix("step "))
    assert abs(step - 250) <= 1 and "lr" in words and "0.001" in words
    assert f"{3 - step / 499:.3f}" in words, words
    assert page.locator(".stl-dots i").count() == 2
    page.mouse.move(*at(page, panel, 500))
    assert "NaN" in page.inner_text(".stl-readout")
    page.evaluate("window.renew()")
    assert not page.locator(".stl-readout").is_visible() and page.locator(".stl-dots i").count() == 0


def test_a_click_is_a_step_and_a_flag_its_finding(page, panels):
    panel = panels[1][0]
    page.mouse.click(*at(page, panel, 250))
    assert abs(last_sent(page, "clicked")["x"] - 250) < 1 and last_sent(page, "clicked")["finding"] == -1
    page.mouse.click(*at(page, panel, 400, -0.02))
    assert last_sent(page, "clicked")["finding"] == 3


def test_a_flag_names_the_findings_that_share_it(page, panels):
    page.mouse.move(*at(page, panels[1][0], 400, -0.02))
    assert page.inner_text(".stl-readout").split("\n") == [
        "4 loss spike, step 400",
        "5 divergence, steps 402 to 500",
    ]
    page.mouse.move(*at(page, panels[1][0], 250))
    assert page.inner_text(".stl-readout").startswith("step ")


def test_the_selected_step_has_a_line(page, panels):
    panel = panels[1][0]
    line = page.locator(".stl-chosen")
    assert not line.is_visible()
    page.evaluate("window.choose(250)")
    assert abs(line.bounding_box()["x"] - at(page, panel, 250)[0]) < 2
    page.evaluate("window.choose(9999)")  # outside of what is shown
    assert not line.is_visible()


def test_brush_pan_wheel_and_keys(page, panels):
    panel = panels[1][0]
    page.mouse.move(*at(page, panel, 100))
    page.mouse.down()
    page.mouse.move(*at(page, panel, 200), steps=3)
    band, picture = (page.locator(what).bounding_box() for what in (".stl-band", "img"))
    assert abs(band["y"] - picture["y"]) < 2 and abs(band["height"] - picture["height"]) < 2
    assert abs(band["x"] - at(page, panel, 100)[0]) < 3
    page.mouse.up()
    assert np.allclose(last_sent(page, "brushed")["range"], (100, 200), atol=1.5)
    page.keyboard.down("Shift")
    page.mouse.move(*at(page, panel, 100))
    page.mouse.down()
    page.mouse.move(*at(page, panel, 200), steps=3)
    page.mouse.up()
    page.keyboard.up("Shift")
    wanted = panel["x0"] - 100, panel["x1"] - 100
    assert np.allclose(last_sent(page, "brushed")["range"], wanted, atol=2)
    page.mouse.move(*at(page, panel, 300))
    seen = page.evaluate("window.sent.filter(([n]) => n === 'brushed').length")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("count => window.sent.filter(([n]) => n === 'brushed').length > count", arg=seen)
    first, last = last_sent(page, "brushed")["range"]
    assert np.isclose(last - first, 0.8 * (panel["x1"] - panel["x0"])) and first < 300 < last
    page.keyboard.press("z")
    assert last_sent(page, "wish")["what"] == "undo"
    page.keyboard.press("ArrowRight")
    assert page.locator(".stl-readout").is_visible() and last_sent(page, "cursor") > 0
    page.keyboard.press("Escape")
    assert last_sent(page, "brushed")["range"] == []


def test_an_upright_drag_and_the_legend(page, panels):
    panel = panels[1][0]
    page.mouse.move(*at(page, panel, 250, 0.2))
    page.mouse.down()
    page.mouse.move(*at(page, panel, 252, 0.7), steps=3)
    band = page.locator(".stl-band.upright").bounding_box()
    assert abs(band["y"] - at(page, panel, 250, 0.2)[1]) < 3
    assert abs(band["y"] + band["height"] - at(page, panel, 250, 0.7)[1]) < 3
    page.mouse.up()
    low, high = last_sent(page, "lifted")["range"]
    tall = panel["y1"] - panel["y0"]
    assert np.allclose((low, high), (panel["y0"] + 0.3 * tall, panel["y0"] + 0.8 * tall), atol=0.02 * tall)
    assert last_sent(page, "brushed") is None and last_sent(page, "clicked") is None
    entries = [
        {"name": "loss", "label": "loss", "colour": "#0072b2"},
        {"name": "lr", "label": "lr", "colour": "#666666"},
    ]
    page.evaluate("entries => window.legend(entries)", entries)
    page.click('.stl-legend button:has-text("lr")')
    assert last_sent(page, "hidden") == ["lr"] and page.locator(".stl-legend .off").inner_text() == "lr"
    page.click('.stl-legend button:has-text("lr")')
    assert last_sent(page, "hidden") == [] and page.locator(".stl-legend .off").count() == 0


SCENE = """
<style>%(css)s</style><div id="place" style="width: 600px"></div>
<script type="module">
const script = new Blob([%(script)s], { type: 'text/javascript' });
const bytes = (text) => new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer);
const read = (o) => Array.isArray(o) ? o.map(read) : o === null || typeof o !== 'object' ? o
  : o.bytes !== undefined ? bytes(o.bytes)
  : Object.fromEntries(Object.entries(o).map(([name, value]) => [name, read(value)]));
const state = { marks: [], alt: 'loss', cursor: null, png: null, sheet: %(sheet)s, panels: read(%(panels)s) };
const set = (name, value) => { state[name] = value; };
const model = { get: (name) => state[name], set, save_changes: () => 0, on: () => 0 };
const { default: widget } = await import(URL.createObjectURL(script));
widget.render({ model, el: document.getElementById('place') });
window.ready = true;
</script>
"""


def coded(thing):
    "Data with its bytes as words, for a page without a kernel."
    if isinstance(thing, bytes):
        return {"bytes": base64.b64encode(thing).decode()}
    if isinstance(thing, dict):
        return {name: coded(value) for name, value in thing.items()}
    return [coded(one) for one in thing] if isinstance(thing, list) else thing


@pytest.mark.parametrize("sharp", [1, 2])
def test_a_scene_has_as_many_pixels_as_the_screen(browser_alone, sharp):
    steps = np.arange(400)
    samples = {"loss": Samples(steps, np.full(400, 2.0)), "tokens": Samples(steps, 1000.0 * steps)}
    run, look = new_run(make_scalars(samples)), Look(along="tokens")
    sheet, panels = RunPicture().scene(run, Findings([]), names=["loss"], look=look)
    tab = browser_alone.new_page(viewport={"width": 900, "height": 700}, device_scale_factor=sharp)
    script = {"css": PictureWidget._css, "script": json.dumps(str(PictureWidget._esm))}
    tab.set_content(SCENE % (script | {"sheet": json.dumps(sheet), "panels": json.dumps(coded(panels))}))
    tab.wait_for_function("window.ready && document.querySelector('[data-drawn]')", timeout=30_000)
    wide, tall, shown = tab.evaluate(
        "(c => [c.width, c.height, c.clientWidth])(document.querySelector('canvas'))"
    )
    assert (wide, shown) == (600 * sharp, 600) and tall == round(600 * sharp * sheet["ratio"])
    share = panels[0]["left"] + 0.5 * panels[0]["width"]
    column = [share * wide, panels[0]["top"] * tall, panels[0]["height"] * tall]
    pixels = "([x, y, tall]) => [...document.querySelector('canvas').getContext('2d')"
    seen = tab.evaluate(pixels + ".getImageData(x, y, 1, tall).data]", column)
    away = np.abs(np.array(seen).reshape(-1, 4)[:, :3] - [0, 114, 178]).sum(1)
    # a level line: a stroke of 1.5 pixels of the page, so of twice as many pixels on a dense screen
    assert sharp <= (away < 200).sum() <= 2 * sharp
    box = tab.locator("canvas").bounding_box()
    tab.mouse.move(box["x"] + share * box["width"], box["y"] + 0.4 * box["height"])
    said = tab.inner_text(".stl-readout").split("\n")[0]
    step = int(said.split(" · ")[0].removeprefix("step "))
    assert abs(step - 200) <= 2 and f"{1000 * step:,} tokens" in said, said
    tab.close()
