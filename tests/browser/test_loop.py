"""The whole loop in a real JupyterLab.

The sample, its most likely cause, the layer that moved, the replay, a trial with growing curves to which an
arm is added and of which one is cancelled, the verdict, the report, and the page loaded anew.
"""

from pathlib import Path

from test_view_overview import SESSION, shot, shown
from waiting import written

REPLAY, FIXLAB = ".stl-replay-view", ".stl-fixlab-view"


def tab(page, words):
    page.click(f'.jupyter-widget-tab .lm-TabBar-tab:has-text("{words}")')


def ticked(page, *names):
    "Ticks these fixes and no other."
    page.wait_for_selector(f"{FIXLAB} .stl-choice", timeout=60_000)
    for box in page.locator(f"{FIXLAB} .stl-choice").all():
        mark = box.locator("input[type=checkbox]").first
        wanted = box.locator(".widget-checkbox span").first.inner_text() in names
        if mark.is_checked() != wanted:
            mark.click()


def number(page, label, value):
    "Types a number into a control."
    box = page.locator(f'{FIXLAB} .widget-inline-hbox:has(label:text-is("{label}")) input').first
    box.fill(str(value))
    box.press("Enter")


def saved(page, name):
    "Saves the notebook, and waits until the server has it."
    with page.expect_response(lambda answer: answer.request.method == "PUT" and name in answer.url):
        page.keyboard.press("Control+s")


def below(page, title):
    "Pixels from the button that begins the trial down to the one with this title."
    words = ('button:has-text("Train")', f'button[title^="{title}"]')
    begin, button = (page.locator(f"{FIXLAB} {part}").first.bounding_box() for part in words)
    return button["y"] - begin["y"]


def trained(page, folder):
    "A trial that is seen half done, gets a further arm and loses one, and its verdict."
    where = page.locator(f'{FIXLAB} .widget-text:has(label:text-is("Setup")) input')
    where.fill(f"{written(folder)}:stepwise")  # the arms wait where the test has to see them half done
    where.press("Enter")
    ticked(page, "qk_norm")
    number(page, "Seeds", 1)
    number(page, "Steps", 120)
    page.click(f'{FIXLAB} button:has-text("Train")')
    page.wait_for_selector(f'{FIXLAB} .stl-figure img[src^="blob:"]', timeout=120_000)
    first = page.evaluate(f"document.querySelector('{FIXLAB} .stl-figure img').src")
    height = below(page, "stop qk_norm")
    (folder / "first").touch()
    grown = f"document.querySelector('{FIXLAB} .stl-figure img').src !== '{first}'"
    page.wait_for_function(grown, timeout=120_000)
    ticked(page, "qk_norm", "lower_lr")
    page.click(f'{FIXLAB} button:has-text("Add"):not([disabled])')
    page.wait_for_selector(f'{FIXLAB} button[title^="stop lower_lr"]:not([disabled])', timeout=60_000)
    shot(page, "loop-growing")
    assert below(page, "stop qk_norm") == height  # a click is lost where the button moves under it
    page.click(f'{FIXLAB} button[title^="stop qk_norm"]')
    page.wait_for_selector(f'{FIXLAB} .widget-label:has-text("qk_norm"):has-text("stopped")', timeout=60_000)
    assert below(page, "stop qk_norm") == height
    (folder / "second").touch()
    page.wait_for_selector(f'{FIXLAB} tr.trial td:text-is("lower_lr:factor=0.045")', timeout=150_000)


def test_from_the_open_sample_to_a_verdict_that_outlives_a_reload(notebook, tmp_path):
    page, errors = notebook("loop", SESSION, "1 + 1")
    shown(page)
    assert "learning rate is too high" in page.inner_text(".stl-likely")
    page.click('button:has-text("Show why")')
    page.wait_for_selector('.stl-detail h3:text("lr too high")', timeout=30_000)
    page.click('button:has-text("Show what changed first")')
    page.wait_for_selector('.stl-layers-view p:has-text("blocks.")', timeout=60_000)
    shot(page, "loop-layer")

    tab(page, "Replay")
    page.click(f'{REPLAY} button:has-text("Replay")')
    page.wait_for_selector(f"{REPLAY} h3", timeout=180_000)

    tab(page, "Fix lab")
    trained(page, tmp_path)
    shot(page, "loop-verdict")
    page.wait_for_selector(f"{FIXLAB} p:has-text('from one seed')", timeout=90_000)

    tab(page, "Report")
    page.click('button:has-text("Make the report")')
    page.wait_for_selector('a[download="report.html"]', timeout=60_000)
    with page.expect_download(timeout=30_000) as got:
        page.click('a[download="report.html"]')
    text = Path(got.value.path()).read_text(encoding="utf-8")
    assert "lower_lr" in text and "identity" in text and "Trial" in text
    page.wait_for_selector('a[download="report.ipynb"]')

    saved(page, "loop.ipynb")
    page.reload()
    page.wait_for_selector(".jupyter-widget-tab .lm-TabBar-tab", timeout=90_000)
    tab(page, "Overview")
    shown(page)
    assert "learning rate is too high" in page.inner_text(".stl-likely")
    tab(page, "Fix lab")
    page.wait_for_selector(f'{FIXLAB} tr.trial td:text-is("lower_lr:factor=0.045")', timeout=60_000)
    shot(page, "loop-reloaded")
    page.locator(f'{FIXLAB} button:has-text("Open as a run")').last.click()
    opened = "[...document.querySelectorAll('select')].some(s => /lower_lr/.test(s.selectedOptions[0]?.text))"
    page.wait_for_function(opened, timeout=60_000)
    shown(page)
    shot(page, "loop-opened")
    assert not errors, errors
