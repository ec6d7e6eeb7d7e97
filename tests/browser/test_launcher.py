"The tile in JupyterLab's launcher: it opens a notebook whose cells show the workbench."

import json
import os
import shutil

from stabilitylab.cli.lab import _write_notebook

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


def test_lab_runs_its_cell_and_shows_again_what_was_seen(lab, browser):
    url, token, folder = lab
    (folder / "again").mkdir()
    (folder / "again" / "train.log").write_text(DIVERGED)
    file = _write_notebook(folder / "again" / "workbench.ipynb", [str(folder / "again" / "train.log")])
    for view in ("Overview", "Environment"):
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(f"{url}/lab/workspaces/again-{view}/tree/again/{file.name}?token={token}&reset")
        page.wait_for_selector(
            ".jp-OutputArea-output >> text=/Most likely/", timeout=90_000, state="attached"
        )
        chosen = page.locator(".lm-TabBar-tab.lm-mod-current:visible", has_text=view)
        chosen.first.wait_for(timeout=30_000)
        page.locator(".stl-workbench .lm-TabBar-tab", has_text="Environment").first.click()
        page.wait_for_function("() => true")
        for _ in range(100):
            if (folder / "again" / "workbench.view.json").exists():
                break
            page.wait_for_timeout(100)
        page.screenshot(path=folder / f"again-{view}.png")
        keep = os.environ.get("KEEP_PICTURES")
        if keep:
            shutil.copy(folder / f"again-{view}.png", keep)
        page.close()
    foreign = json.loads(file.read_text())
    foreign["cells"][0]["source"] = ["open('ran.txt', 'w').write('1')"]
    (folder / "again" / "foreign.ipynb").write_text(json.dumps(foreign))
    page = browser.new_page()
    page.goto(f"{url}/lab/workspaces/foreign/tree/again/foreign.ipynb?token={token}&reset")
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
    page.wait_for_timeout(1000)
    page.close()
    assert not (folder / "again" / "ran.txt").exists()  # no other code runs by being opened
