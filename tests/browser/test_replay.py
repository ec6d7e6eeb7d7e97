"The views Replay and Checkpoints in a real JupyterLab: click the divergence, replay its batch, see the culprit; compare two checkpoints."
from pathlib import Path

from test_overview import place, shot, shown

ROOT = Path(__file__).resolve().parents[2]


def test_click_the_divergence_and_replay_it(notebook):
    page, errors = notebook('replay', f"from stabilitylab import Workbench\nbench = Workbench({str(ROOT/'data_samples'/'lm_high_lr')!r})\nbench", "1 + 1")
    shown(page)
    page.mouse.click(*place(page, 0.86, 0.3))
    page.wait_for_selector('.stl-detail h3:text("divergence")', timeout=30_000)
    page.click('.lm-TabBar-tabLabel:text-is("Replay")')
    page.wait_for_selector('.widget-readout:text-is("337")', timeout=30_000)
    page.click('button:has-text("Replay")')
    page.wait_for_selector('h3:text("neither"), h3:text("bad state")', timeout=120_000)
    page.wait_for_selector('img.widget-image[src^="blob:"]', timeout=30_000); page.wait_for_timeout(500); shot(page, 'replay')
    page.click('.lm-TabBar-tabLabel:text-is("Checkpoints")')
    page.click('button:has-text("Compare A with B")')
    page.wait_for_selector('td:text("blocks.0.norm1.weight")', timeout=120_000); shot(page, 'checkpoints')
    assert not errors, errors
