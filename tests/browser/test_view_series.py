"The view Series in a real JupyterLab: a click on a row draws that series, a click on a heading sorts."

from test_loop import tab
from test_view_overview import SESSION, shot, shown

VIEW = ".stl-series-view"
FIRST = f"document.querySelector('{VIEW} tr:nth-child(2) td').innerText"


def test_a_click_draws_a_series_and_a_heading_sorts(notebook):
    page, errors = notebook("series", SESSION, "1 + 1")
    shown(page)
    tab(page, "Series")
    page.wait_for_selector(f'{VIEW} td:has-text("divergence at step 337")')
    shot(page, "series-open")
    page.click(f'{VIEW} td:text-is("update_norm")')
    page.wait_for_selector(f'{VIEW} p:has-text("Overview draws update_norm.")')
    before = page.evaluate(FIRST)
    page.click(f'{VIEW} th:text-is("records")')
    page.wait_for_function(f"{FIRST} !== {before!r}")
    shot(page, "series-sorted")
    tab(page, "Overview")
    page.wait_for_selector('.stl-overview-view :text("update_norm")')
    shot(page, "series-drawn")
    assert not errors, errors
