"""The overview in a real JupyterLab.

Values under the pointer, flags, zooms and their undo, keys, series, saved data, a growing log, two themes.
"""

import os
from pathlib import Path

from tests.zoo.train import Recipe, train

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "data_samples" / "lm_high_lr")
SESSION = f"from stabilitylab import Workbench\nbench = Workbench({RUN!r})\nbench"
SRC = "document.querySelector('.stl-figure > div').dataset.drawn"


def shot(page, name):
    if folder := os.environ.get("SHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


def changes(page, act):
    "Does `act` and waits until the picture is another one."
    before = page.evaluate(SRC)
    act()
    page.wait_for_function(f"{SRC} !== {before!r}", timeout=60_000)
    page.wait_for_timeout(400)


def place(page, x, y):
    box = page.locator(".stl-figure > div").first.bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def drag(page, x0, x1, y=0.3):
    page.mouse.move(*place(page, x0, y))
    page.mouse.down()
    page.mouse.move(*place(page, (x0 + x1) / 2, y), steps=4)
    page.mouse.move(*place(page, x1, y), steps=4)
    page.mouse.up()


def shown(page):
    page.wait_for_selector(".stl-figure > div[data-drawn]", timeout=120_000)
    page.wait_for_function("document.querySelector('.stl-figure canvas').width > 500")
    page.wait_for_timeout(1000)
    warned = page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
    assert not warned.count(), warned.first.inner_text()


WHERE = """
picture = bench.tabs.children[0].picture
panel, kinds = picture.panels[0], [f.kind for f in bench.state.findings]
at = bench.state.findings[kinds.index("divergence")].onset
share = panel["left"] + (at - panel["x0"]) / (panel["x1"] - panel["x0"]) * panel["width"]
print("FLAG", share, panel["top"])
"""


def opened(notebook, name):
    "The overview of the sample run, and where the flag of its divergence stands."
    page, errors = notebook(name, SESSION, WHERE)
    shown(page)
    page.wait_for_selector('.jp-OutputArea-output pre:has-text("FLAG")', timeout=120_000)
    words = page.locator('.jp-OutputArea-output pre:has-text("FLAG")').first.inner_text().split()
    return page, errors, (float(words[1]), float(words[2]) - 0.01)


def test_values_flags_and_undo(notebook):
    page, errors, flag = opened(notebook, "values")
    page.mouse.move(*place(page, 0.5, 0.3))
    page.wait_for_selector(".stl-readout:visible", timeout=10_000)
    said = page.inner_text(".stl-readout")
    assert "step" in said and "loss" in said and "lr" in said, said
    shot(page, "readout")
    changes(page, lambda: page.mouse.click(*place(page, *flag)))
    page.wait_for_selector('.stl-detail h3:text("divergence")', timeout=30_000)
    assert "diverged from" in page.inner_text('.stl-detail:has(h3:text("divergence"))')
    shot(page, "clicked")
    changes(page, lambda: page.keyboard.press("z"))
    changes(page, lambda: page.keyboard.press("y"))
    changes(page, lambda: page.click('button:has-text("Show all steps")'))
    page.locator(".stl-figure > div").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".stl-readout:visible", timeout=10_000)
    page.click('button:has-text("Export")')
    page.wait_for_selector('a[download="data.csv"]', timeout=60_000)
    with page.expect_download(timeout=30_000) as saved:
        page.click('a[download="data.csv"]')
    assert Path(saved.value.path()).read_text().startswith("step,loss")
    assert not errors, errors


def test_brush_keys_series_and_themes(notebook):
    page, errors, _ = opened(notebook, "overview")
    shot(page, "light")
    changes(page, lambda: drag(page, 0.3, 0.6))
    shot(page, "brushed")
    changes(page, lambda: page.keyboard.press("+"))
    changes(page, lambda: page.click('button:has-text("Show all steps")'))
    changes(page, lambda: page.click('button:text-is("log")'))
    changes(page, lambda: page.locator(".widget-select-multiple select").first.select_option(["loss", "lr"]))
    changes(page, lambda: page.click('.stl-findings tr:has-text("lr too high")'))
    page.wait_for_selector('.stl-detail h3:text("lr too high")', timeout=30_000)
    changes(page, lambda: page.evaluate("(() => { document.body.dataset.jpThemeLight = 'false' })()"))
    page.click('text="Settings"')
    page.click('.lm-Menu-itemLabel:text-is("Theme")')
    page.click('.lm-Menu-itemLabel:text-is("JupyterLab Dark")')
    page.wait_for_function("document.body.dataset.jpThemeName === 'JupyterLab Dark'")
    page.wait_for_timeout(1500)
    shot(page, "dark")
    assert not errors, errors


def test_a_growing_log_is_followed(notebook, tmp_path):
    log = tmp_path / "train.log"
    line = "step {}: loss {:.4f} lr 1.0e-3\n"
    log.write_text("".join(line.format(i, 4 - i / 100) for i in range(100)))
    page, errors = notebook(
        "follow",
        f"from stabilitylab import Workbench\nbench = Workbench({str(log)!r}, every=0.3)\nbench",
        "1 + 1",
    )
    shown(page)
    page.click('button:has-text("Follow")')

    def grow():
        with open(log, "a") as f:
            f.write("".join(line.format(i, 3 + i / 50) for i in range(100, 200)))

    changes(page, grow)
    page.wait_for_selector('.stl-findings tr:has-text("divergence")', timeout=30_000)
    assert not errors, errors


def choose_finding(page, words):
    "Selects the finding of this kind in the list."
    page.locator(f'.stl-findings tr:has-text("{words}")').first.click()
    page.wait_for_selector(f'.stl-detail h3:text("{words}")', timeout=30_000)


def test_a_remedy_opens_its_fix_and_a_narrow_page_has_the_findings_first(notebook):
    page, errors = notebook("try_fix", SESSION, "1 + 1")
    shown(page)
    choose_finding(page, "divergence")
    side, picture = page.locator(".stl-findings"), page.locator(".stl-figure").first
    page.set_viewport_size({"width": 900, "height": 1000})
    page.wait_for_function(
        "document.querySelector('.stl-findings').getBoundingClientRect().bottom"
        " < document.querySelector('.stl-figure').getBoundingClientRect().top"
    )
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.wait_for_timeout(1000)
    assert side.bounding_box()["x"] > picture.bounding_box()["x"] + picture.bounding_box()["width"]
    page.click('.stl-detail button:has-text("Try larger_batch")')
    page.wait_for_selector('.stl-fixlab-view label:has-text("larger_batch")', timeout=60_000)
    assert not errors, errors


def test_the_swap_test_is_offered_with_its_cost_and_its_verdict_stands_beside_the_cause(notebook, tmp_path):
    run = tmp_path / "labels"
    train(Recipe("mlp", fault="labels", lr=3e-3, steps=120), path=run)
    page, errors = notebook("swap", SESSION.replace(RUN, str(run)), "1 + 1")
    shown(page)
    page.wait_for_selector('button:has-text("Swap test, about")', timeout=60_000)
    shot(page, "swap_offered")
    page.click('button:has-text("Swap test, about")')
    page.wait_for_selector('.stl-replay-view :text("bad batch")', timeout=300_000)
    shot(page, "swap_replay")
    page.click('.lm-TabBar-tab:has-text("Overview")')
    page.wait_for_selector('.stl-likely:has-text("Swap test of step 100")', timeout=60_000)
    assert not page.locator('button:visible:has-text("Swap test, about")').count()
    shot(page, "swap_told")
    assert not errors, errors
