"""The views Precision and Accumulation in a real JupyterLab.

A rounded log is named, a step is measured, sliders move weights and the gradient's cosine.
"""

import json

import numpy as np
from test_view_overview import shot, shown
from waiting import written

from stabilitylab.cases.registry import sample
from stabilitylab.numerics.formats import quantise

PRECISION, MEANS = ".stl-precision-view", ".stl-accumulation-view"


def open_tab(page, title):
    page.click(f'.jupyter-widget-tab .lm-TabBar-tab:has-text("{title}")')


def test_a_step_is_measured(notebook, tmp_path):
    page, errors = notebook(
        "precision",
        f"from stabilitylab import Workbench\nbench = Workbench({str(sample())!r})\nbench",
        "print('ready')",
    )
    shown(page)
    open_tab(page, "Precision")
    page.wait_for_selector(f'{PRECISION} b:text("Not rounded to 16 bits")', timeout=60_000)
    page.wait_for_function(
        "q => [...document.querySelectorAll(q)].every(i => i.naturalWidth > 500)",
        arg=f"{PRECISION} img",
        timeout=60_000,
    )
    page.wait_for_timeout(500)
    setup = page.locator(f'{PRECISION} input[placeholder^="Setup"]')
    setup.fill(f"{written(tmp_path)}:never")  # works until it is cancelled
    setup.press("Enter")
    page.click(f'{PRECISION} button:has-text("Measure the step")')
    page.wait_for_selector(f'{PRECISION} i:text("working")', timeout=60_000)
    page.click(f'{PRECISION} button:has-text("Cancel"):not([disabled])')
    page.wait_for_selector(f'{PRECISION} div:text-is("cancelled")', timeout=60_000)
    setup.fill("")
    setup.press("Enter")
    page.click(f'{PRECISION} button:has-text("Measure the step"):not([disabled])')
    page.wait_for_selector(f'{PRECISION} h3:text("Where the loss is rounded")', timeout=180_000)
    words = page.inner_text(PRECISION)
    assert (
        "the outputs of the model are bf16 numbers" in words
        and "blocks.2.attn" in words
        and "RMS(g)/ε" in words
    )
    room = page.locator(f"{PRECISION} img").nth(1)
    before = room.get_attribute("src")
    page.wait_for_timeout(500)
    shot(page, "precision")
    room.scroll_into_view_if_needed()
    shot(page, "precision-room")
    handle = page.locator(f"{PRECISION} .noUi-handle").nth(1)
    handle.focus()
    page.keyboard.press("PageUp")
    page.wait_for_function(
        "([q, old]) => document.querySelectorAll(q)[1].src !== old",
        arg=[f"{PRECISION} img", before],
        timeout=30_000,
    )
    assert not errors, errors


def test_a_rounded_log_is_named(notebook, tmp_path):
    rng = np.random.default_rng(0)
    loss = quantise((1.70 - 0.01 * np.arange(400) / 400 + rng.normal(0, 0.004, 400)).astype("f4"), "bf16")
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps({"step": i, "loss": float(v)}) + "\n" for i, v in enumerate(loss))
    )
    page, errors = notebook(
        "rounded",
        f"from stabilitylab import Workbench\nbench = Workbench({str(tmp_path / 'log.jsonl')!r})\nbench",
        "1 + 1",
    )
    shown(page)
    open_tab(page, "Precision")
    page.wait_for_selector(f'{PRECISION} p.bad:text("Rounded to bf16.")', timeout=60_000)
    assert "The spacing at the last value is 0.007812" in page.inner_text(
        PRECISION
    ) and "no black box" in page.inner_text(PRECISION)
    page.wait_for_timeout(500)
    shot(page, "rounded")
    assert not errors, errors


HELD = """
import threading
import stabilitylab.workbench.view_accumulation as accumulation

kept, is_first = accumulation.text_gradients, [True]


def waiting(model, tokens, heard):
    "The gradients; the first time nothing but a share that stays, until it is cancelled."
    while is_first[0]:
        try:
            heard(0.5)
        except BaseException:
            is_first[0] = False
            raise
        threading.Event().wait(0.02)
    return kept(model, tokens, heard)


accumulation.text_gradients = waiting
"""


def test_sliders_move_weights_and_cosine(notebook):
    page, errors = notebook(
        "accumulation",
        f"from stabilitylab import Workbench\nbench = Workbench({str(sample())!r})\nbench",
        HELD,
    )
    shown(page)
    open_tab(page, "Accumulation")
    page.wait_for_selector(f'{MEANS} p:has-text("64 texts in 64 accumulation steps")', timeout=60_000)
    page.click(f'{MEANS} button:has-text("Measure gradients")')
    page.click(f'{MEANS} .widget-vbox button:has-text("Cancel"):not([disabled]) >> nth=0', timeout=60_000)
    page.click(f'{MEANS} button:has-text("Measure gradients"):not([disabled])', timeout=60_000)
    page.wait_for_selector(f'{MEANS} td:text("microbatch mean")', timeout=120_000)

    def cosine():
        return float(page.locator(f'{MEANS} tr:has(td:text-is("microbatch mean")) td').nth(1).inner_text())

    alone = cosine()
    page.wait_for_timeout(500)
    shot(page, "accumulation")
    handle = page.locator(f"{MEANS} .noUi-handle").nth(1)
    handle.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(f'{MEANS} p:has-text("64 texts in 4 accumulation steps")', timeout=30_000)
    assert alone < cosine() < 1
    assert not errors, errors
