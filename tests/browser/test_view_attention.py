"""The views Attention and Environment in a real JupyterLab.

A head is chosen on a map whose logits have both signs, a further look is drawn, the machine and the command
are told; a run without recorded attention says how to record it.
"""

from test_view_overview import RUN, shot, shown

HEADS, MACHINE = ".stl-attention-view", ".stl-environment-view"
SESSION = f"""
import numpy as np
import xarray as xr
from stabilitylab import Workbench, read_runs
from stabilitylab.run.record import new_run
from stabilitylab.run.scalars import Samples, make_scalars
step = np.arange(80)
logit = np.broadcast_to(10.0 ** (step / 13 - 1), (4, 3, 80)).T.copy()
logit[:5, 0, 2] = -0.3
unit = {{"long_name": "largest attention logit", "units": "1"}}
tables = {{"attn_logit_max": logit, "attn_entropy_rel": 1 / (1 + abs(logit))}}
cells = {{name: (("step", "layer", "head"), table, unit) for name, table in tables.items()}}
names = {{"module": ("layer", ["h.0.attn", "h.1.attn", "h.2.attn"]), "role": ("layer", ["self"] * 3)}}
group = xr.Dataset(cells, {{"step": step, "layer": range(3), "head": range(4)}} | names)
run = new_run(make_scalars({{"loss": Samples(step, 3 - step / 100)}}), attention=group)
started = {{"python": "3.9.0", "command": ["train.py", "--lr", "0.1"], "device": ["A100"] * 8}}
run.attrs["environment"] = started
bench = Workbench({{"heads": run, "bare": next(iter(read_runs({RUN!r}).values()))}})
bench"""


def open_tab(page, title):
    page.click(f'.jupyter-widget-tab .lm-TabBar-tab:has-text("{title}")')


def test_a_head_is_chosen_and_the_machine_is_told(notebook):
    page, errors = notebook("heads", SESSION, "1 + 1")
    shown(page)
    open_tab(page, "Attention")
    image = page.locator(f'{HEADS} .stl-figure img[src^="blob:"]')
    image.wait_for(timeout=60_000)
    select = f'{HEADS} .widget-dropdown:has(label:text-is("{{}}")) select'
    assert page.locator(select.format("Also draw")).evaluate("s => s.selectedOptions[0].text") == "nothing"
    page.wait_for_function(f"document.querySelector('{HEADS} .stl-figure img').naturalWidth > 500")
    box = image.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.7 * box["height"])
    page.wait_for_selector(
        f'{HEADS} p:has-text("h.2.attn, head"):has-text("attn logit max is")', timeout=30_000
    )
    page.locator(select.format("Also draw")).select_option("entropy against logit")
    page.wait_for_function(
        "q => [...document.querySelectorAll(q)].filter(i => i.offsetWidth > 300).length === 2",
        arg=f"{HEADS} img.widget-image",
        timeout=30_000,
    )
    assert "no black box" in page.inner_text(HEADS)
    page.wait_for_timeout(300)
    shot(page, "attention")
    open_tab(page, "Environment")
    command = f'{MACHINE} code:text-is("python train.py --lr 0.1")'
    page.wait_for_selector(command, timeout=60_000)
    page.wait_for_selector(f'{MACHINE} h3:text("Different here")', timeout=60_000)
    assert "8 × A100" in page.inner_text(MACHINE) and "Between the runs" in page.inner_text(MACHINE)
    shot(page, "environment")
    page.locator('.widget-dropdown:has(label:text-is("Run")) select').select_option("bare")
    # the other run is there before its tab is clicked
    page.wait_for_selector(command, state="detached", timeout=60_000)
    open_tab(page, "Attention")
    page.wait_for_selector(f'{HEADS} code:has-text("attention_every=100")', timeout=60_000)
    assert not errors, errors
