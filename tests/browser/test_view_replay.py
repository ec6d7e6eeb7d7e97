"""The views Replay and Checkpoints in a real JupyterLab.

Click the spike, replay its batch, see the culprit, stop a job; compare two checkpoints.
"""

from pathlib import Path

from test_view_overview import choose_finding, shot, shown
from waiting import written

ROOT = Path(__file__).resolve().parents[2]
RUN = str(ROOT / "data_samples" / "lm_high_lr")
SESSION = f"from stabilitylab import Workbench\nbench = Workbench({RUN!r})\nbench"
VIEW = ".stl-replay-view"


def start(page):
    "Clicks Replay until the job runs: while the view is being filled, a busy page loses the first click."
    from playwright.sync_api import TimeoutError as NotYet

    for _ in range(3):
        page.click(f'{VIEW} button:has-text("Replay")')
        try:
            page.wait_for_selector(f'{VIEW} button:has-text("Stop"):not([disabled])', timeout=8_000)
            return
        except NotYet:
            continue


def test_click_the_spike_and_see_the_culprit(notebook, tmp_path):
    page, errors = notebook(
        "replay",
        SESSION,
        "print('ready')",
    )
    shown(page)
    choose_finding(page, "divergence")
    page.click('.jupyter-widget-tab .lm-TabBar-tab:has-text("Replay")')
    page.wait_for_function(
        f"(document.querySelector('{VIEW} .stl-figure img') || {{}}).naturalWidth > 500", timeout=60_000
    )
    page.wait_for_function(
        f"document.querySelector('{VIEW} input[type=number]').value === '337'", timeout=30_000
    )  # the onset of the finding
    page.wait_for_timeout(500)
    shot(page, "replay-open")
    box = page.locator(f"{VIEW} .stl-figure img").bounding_box()
    left, right = 0.55 / 7.5, 1 - 0.15 / 7.5  # the panel in the picture: steps 299.5 to 399.5
    page.mouse.click(
        box["x"] + box["width"] * (left + (right - left) * (352 - 299.5) / 100),
        box["y"] + box["height"] * 0.4,
    )
    page.wait_for_function(
        f"document.querySelector('{VIEW} input[type=number]').value === '352'", timeout=30_000
    )
    chosen = f"[...document.querySelectorAll('{VIEW} select')[0].selectedOptions].map(o => o.text).join()"
    page.wait_for_function(f"{chosen} === '308,318,327'", timeout=60_000)  # states from before the onset
    page.wait_for_selector(
        f'{VIEW} .stl-foresight p:has-text("Replays 2 steps from the snapshot at step 350")'
    )
    page.click(f'{VIEW} .stl-setup-panel button:has-text("Check")')
    page.wait_for_selector(f'{VIEW} .stl-setup p:has-text("This setup is the run")', timeout=90_000)
    shot(page, "replay-checked")
    box = page.locator(f"{VIEW} .stl-setup-panel input[type=text]")
    box.fill("gone.py")
    box.press("Enter")
    page.wait_for_selector(f'{VIEW} .stl-setup p.bad:has-text("No file is at gone.py")', timeout=30_000)
    box.fill("")
    box.press("Enter")
    page.wait_for_selector(f'{VIEW} .stl-setup p:has-text("brings its own setup")', timeout=30_000)
    start(page)
    page.wait_for_selector(f'{VIEW} h3:text("bad state")', timeout=180_000)
    page.wait_for_selector(f'{VIEW} h3:text("Samples")')
    words = page.inner_text(VIEW)
    assert (
        "Step 352 again: loss 3." in words
        and "of the gradient" in words
        and page.locator(f"{VIEW} .text span").count() >= 64
    )
    seen = f"[...document.querySelectorAll('{VIEW} img')].filter(i => i.offsetParent && i.naturalWidth)"
    page.wait_for_function(f"{seen}.length === 3", timeout=60_000)
    shot(page, "replay-done")
    heights = page.evaluate(f"{seen}.map(i => i.getBoundingClientRect().height)")
    assert len(heights) == 3 and min(heights) > 60, heights  # the loss, the matrix, the samples
    box.fill(f"{written(tmp_path)}:never")  # a replay that goes on until it is stopped
    box.press("Enter")
    page.wait_for_selector(f'{VIEW} .stl-setup p:has-text("Nothing in it is marked TODO")', timeout=30_000)
    start(page)
    page.click(f'{VIEW} button:has-text("Stop"):not([disabled])')
    page.wait_for_selector(f'{VIEW} p.bad:text("stopped")', timeout=30_000)
    assert not errors, errors


def test_two_checkpoints_are_compared(notebook):
    page, errors = notebook(
        "checkpoints",
        SESSION,
        "1 + 1",
    )
    shown(page)
    page.click('.jupyter-widget-tab .lm-TabBar-tab:has-text("Checkpoints")')
    page.click('button:has-text("Compare A with B")')
    page.wait_for_selector('td:text("blocks.0.norm1.weight")', timeout=120_000)
    table = ".stl-checkpoints-view table"
    page.wait_for_selector(f'{table} td:text-is("exp_avg of blocks.1.fc2.weight")', timeout=10_000)
    head = page.locator(f'{table} th:text-is("max_change")')
    assert "largest change" in head.get_attribute("title")
    column = "rows => [...rows].slice(1).map(row => Number(row.cells[2].textContent))"
    for direction in ("ascending", "descending"):
        head.click()
        page.wait_for_selector(f'{table} th[aria-sort="{direction}"]', timeout=10_000)
        seen = page.locator(f"{table} tr").evaluate_all(column)
        known = [value for value in seen if value == value]
        assert len(known) > 80 and known == sorted(known, reverse=direction == "descending")
    tall = page.locator(".stl-checkpoints-view .tall")
    assert tall.evaluate("box => box.scrollHeight > box.clientHeight + 100")
    page.wait_for_selector('.stl-checkpoints-view pre:has-text("diff_checkpoints(")', state="attached")
    shot(page, "checkpoints")
    assert not errors, errors
