"The view Layers in a real JupyterLab: click a cell, see its module, show some rows only."

from test_view_overview import SESSION, shot, shown

MAP = ".stl-figure canvas:visible"


def row_at(page, height):
    "The module that the pointer names at this share of the picture's height."
    box = page.locator(MAP).first.bounding_box()
    page.mouse.move(2, 2)
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + height * box["height"])
    return page.locator(".stl-readout:visible").first.inner_text()


def redrawn(page, act):
    "Does it and waits until the map is another one."
    drawn = "document.querySelector('.stl-figure canvas:is([data-seen])').parentElement.dataset.drawn"
    page.locator(MAP).first.evaluate("canvas => { canvas.dataset.seen = 1; }")
    before = page.evaluate(drawn)
    act()
    page.wait_for_function(f"{drawn} !== {before!r}", timeout=60_000)


def test_click_a_cell(notebook):
    page, errors = notebook("layers", SESSION, "1 + 1")
    shown(page)
    page.click('.lm-TabBar-tabLabel:text-is("Layers")')
    page.wait_for_function(
        "[...document.querySelectorAll('.stl-figure canvas')]"
        ".filter(c => c.offsetWidth > 300 && c.width > 300).length === 1",
        timeout=30_000,
    )
    page.wait_for_timeout(500)
    box = page.locator(MAP).first.bounding_box()
    page.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 0.3 * box["height"])
    page.wait_for_selector('p:has-text("absmax") code', timeout=30_000)
    page.wait_for_selector('img.widget-image[src^="blob:"]', timeout=30_000)
    page.wait_for_timeout(500)
    shot(page, "layers")
    assert "embed" in row_at(page, 0.09)
    name = page.locator('.widget-text:has(label:text-is("Name")) input:visible').first
    name.fill("blocks.1.")
    redrawn(page, lambda: name.press("Enter"))
    assert all("blocks.1." in row_at(page, height) for height in (0.25, 0.5, 0.7))
    kind = page.locator('.widget-dropdown:has(label:text-is("Kind")) select:visible').first
    redrawn(page, lambda: kind.select_option("norm"))
    assert all("blocks.1.norm" in row_at(page, height) for height in (0.3, 0.6))
    shot(page, "layers-filtered")
    assert not errors, errors
