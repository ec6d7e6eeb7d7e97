"The tile in JupyterLab's launcher: it opens a notebook whose cells show the workbench."

import os
import shutil

DIVERGED = "".join(
    f"iter {i}: loss {4 / (i + 1) if i < 60 else 9:.4f}, time 10.00ms, mfu 0.31%\n" for i in range(80)
)


def test_the_tile_opens_a_notebook_with_the_workbench(lab, browser, run_cells):
    url, token, folder = lab
    (folder / "failed").mkdir()
    (folder / "failed" / "train.log").write_text(DIVERGED)
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{url}/lab/workspaces/tile/tree/failed?token={token}&reset")
    tile = page.locator('.jp-LauncherCard[title="Unstable run"]')
    tile.wait_for(timeout=90_000)
    assert tile.inner_text().strip() == "Unstable run" and tile.locator("img").count() == 1
    page.screenshot(path=folder / "tile.png")
    tile.click()
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
    assert sorted(path.name for path in (folder / "failed").glob("*.ipynb")) == ["Untitled.ipynb"]
    line = page.locator(".jp-Cell .cm-line", has_text='run = ""')
    line.click()
    page.keyboard.press("Home")
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    page.keyboard.type("train.log")
    run_cells(page)
    page.wait_for_selector(
        ".jp-OutputArea-output >> text=/divergence|loss_spike|Most likely/", timeout=60_000
    )
    page.screenshot(path=folder / "workbench.png")
    keep = os.environ.get("KEEP_PICTURES")
    if keep:
        shutil.copy(folder / "tile.png", keep)
        shutil.copy(folder / "workbench.png", keep)
    page.close()
    assert errors == []
