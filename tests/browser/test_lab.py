"""A lesson in a real JupyterLab in a real browser: open it, run all, look at what is shown."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest

ROOT = Path(__file__).parents[2]
LESSON = "00_start_here.ipynb"
PICTURE = ROOT / "out" / "browser" / "00_start_here.png"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = 60  # seconds until JupyterLab is up; a loaded machine takes 20
RUN_ALL = 90  # seconds for all cells; 10 on an idle machine

# Resolves when the notebook is on screen and its kernel answers.
OPEN = """async path => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = await app.commands.execute('docmanager:open', {path, factory: 'Notebook'});
  await panel.context.ready;
  await panel.sessionContext.ready;
  window.lesson = panel;
}"""
# Not awaited: its promise may resolve before the last output is drawn.
RUN = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
CELLS = """() => window.lesson.content.widgets
  .filter(cell => cell.model.type === 'code')
  .map(cell => ({
    count: cell.model.executionCount,
    running: cell.model.executionState === 'running',
    outputs: cell.model.outputs.toJSON(),
  }))"""
CLEAR = "() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')"


@pytest.fixture
def lab(need, tmp_path) -> Iterator[str]:
    """The address of a JupyterLab of this Python on a copy of the lesson, with its token."""
    need(CHROMIUM, "chromium (apt-get install chromium)")
    try:
        import playwright  # noqa: F401
    except ImportError:
        need(False, "playwright (pip install -e '.[dev]')")
    (tmp_path / "course").mkdir()
    shutil.copy(ROOT / "notebooks" / LESSON, tmp_path / "course")
    token = secrets.token_hex(16)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(lab_command(tmp_path, token), stdout=log, stderr=log,
                                  env=environment(tmp_path))  # fmt: skip
        try:
            yield address(server, tmp_path) + f"?token={token}"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def lab_command(folder: Path, token: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        f"--notebook-dir={folder / 'course'}",
        f"--IdentityProvider.token={token}",
        "--ServerApp.port=0",
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=",
    ]


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the user's Jupyter: neither settings nor kernels nor running servers."""
    private = {
        "JUPYTER_CONFIG_DIR": folder / "config",
        "JUPYTER_DATA_DIR": folder / "data",
        "JUPYTER_RUNTIME_DIR": folder / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
    }
    return {**os.environ, **{name: str(path) for name, path in private.items()}}


def address(server: subprocess.Popen, folder: Path) -> str:
    """Waits for the file in which the server says on which free port it listens."""
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and server.poll() is None:
        for path in (folder / "runtime").glob("jpserver-*.json"):
            try:
                told = json.loads(path.read_text())
                with urllib.request.urlopen(told["url"] + "api", timeout=5):
                    return told["url"] + "lab"
            except (ValueError, URLError, OSError):
                pass  # half written, or not listening yet
        time.sleep(0.2)
    pytest.fail("JupyterLab did not start:\n" + (folder / "log").read_text()[-2000:])


def finished(cells: list[dict]) -> bool:
    return all(cell["count"] and not cell["running"] for cell in cells)


def run_all(page) -> list[dict]:
    """Run the open notebook and return its code cells when the last has ended."""
    page.evaluate(CLEAR)
    page.evaluate(RUN)
    deadline = time.monotonic() + RUN_ALL
    cells = page.evaluate(CELLS)
    while time.monotonic() < deadline:
        cells = page.evaluate(CELLS)
        errors = [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
        if errors or finished(cells):
            break
        page.wait_for_timeout(300)
    return cells


def test_run_all_in_jupyterlab(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
            ],
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.goto(lab, timeout=READY * 1000)
        page.wait_for_function("() => window.jupyterapp", timeout=READY * 1000)
        page.evaluate(OPEN, LESSON)
        cells = run_all(page)
        errors = [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
        assert not errors
        assert finished(cells), "cells still running: " + str([c["count"] for c in cells])
        text = json.dumps([cell["outputs"] for cell in cells])
        assert "[rank 3] hello from rank 3 of 4" in text
        assert "rank 2 raised ValueError" in text
        picture = page.locator(".jp-OutputArea-output img").first
        picture.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 400
        box = picture.bounding_box()
        assert box is not None
        assert box["width"] > 400
        PICTURE.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(PICTURE))
        browser.close()
