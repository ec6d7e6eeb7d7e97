"A real JupyterLab on a free port and a Chromium page on it, for every view's test."

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items):
    "A browser takes seconds a test: all of them are slow."
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    "(url, token, folder) of a running JupyterLab."
    if not shutil.which("chromium"):
        pytest.skip("SKIPPED: no chromium, so the browser tests did not run")
    folder, token = tmp_path_factory.mktemp("lab"), secrets.token_hex(12)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    settings = folder / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        '{"fetchNews": "false", "checkForUpdates": false}'
    )
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_PATH": str(ROOT / "stabilitylab/workbench"),  # the launcher's tile, as a wheel installs it
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    with (
        open(folder / "lab.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder) as server,
    ):
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5)
                    break
                except OSError:
                    assert time.monotonic() < end and server.poll() is None, (folder / "lab.log").read_text()[
                        -2000:
                    ]
                    time.sleep(0.3)
            yield f"http://127.0.0.1:{port}", token, folder
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def browser_alone():
    "A Chromium, for pages without JupyterLab."
    if not shutil.which("chromium"):
        pytest.skip("SKIPPED: no chromium, so the browser tests did not run")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        yield b
        b.close()


@pytest.fixture(scope="session")
def browser(lab, browser_alone):
    "The same Chromium, once JupyterLab runs."
    return browser_alone


def has_begun(page):
    "Whether the first cell runs or has run."
    from playwright.sync_api import TimeoutError as NotYet

    try:
        page.wait_for_selector('.jp-InputPrompt:not(:text-is("[ ]:"))', timeout=8_000)
    except NotYet:
        return False
    return True


def run_all(page):
    "Runs all cells of the notebook that is open."
    # JupyterLab asks which kernel to take, or says that it was not ready; on a busy machine at any moment
    answer = page.locator(".jp-Dialog button.jp-mod-accept").first
    page.add_locator_handler(answer, lambda button: button.click())
    for _ in range(5):  # on a busy machine the first wish is lost while the kernel still connects
        page.click(".jp-Notebook .jp-Cell")
        page.click('text="Run"')
        page.click('.lm-Menu-itemLabel:text-is("Run All Cells")')
        if has_begun(page):
            break


@pytest.fixture
def run_cells():
    "`run_all`, for a test that opens its notebook itself."
    return run_all


@pytest.fixture
def notebook(lab, browser):
    "A function that opens a notebook of these cells in a page and runs them all; (page, console errors)."
    import nbformat

    url, token, folder = lab
    pages = []

    def open_cells(name, *cells):
        nb = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(c) for c in cells],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        nbformat.write(nb, folder / f"{name}.ipynb")
        scale = float(os.environ.get("SCREEN_SCALE", "1"))  # pixels of the screen in one of the page
        page = browser.new_page(viewport={"width": 1400, "height": 1000}, device_scale_factor=scale)
        errors = []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.goto(f"{url}/lab/workspaces/{name}/tree/{name}.ipynb?token={token}&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
        pages.append(page)
        run_all(page)
        return page, errors

    yield open_cells
    for p in pages:
        p.close()
