"The view Layers in a real JupyterLab: click a cell, see its module, zoom both views."

from test_view_overview import SESSION, shot, shown


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
    box = page.locator(".stl-figure canvas:visible").first.bounding_box()
    page.mouse.click(box["x"] + 0.8 * box["width"], box["y"] + 0.3 * box["height"])
    page.wait_for_selector('p:has-text("absmax") code', timeout=30_000)
    page.wait_for_selector('img.widget-image[src^="blob:"]', timeout=30_000)
    page.wait_for_timeout(500)
    shot(page, "layers")
    assert not errors, errors
