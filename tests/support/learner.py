"""What a learner does with a notebook in JupyterLab: open it, run it, type, press, look, save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

PICTURES = Path(__file__).parents[2] / "out" / "browser"
RUN_ALL = 120  # seconds for all cells of a notebook; 30 on an idle machine
ONE_CELL = 60  # seconds for one cell; a check may take 5, a loaded machine more
RUN = ".jp-NotebookPanel:not(.lm-mod-hidden) [data-command='notebook:run-cell-and-select-next']"

# Resolves when the notebook is on screen and its kernel answers.
OPEN = """async path => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = await app.commands.execute('docmanager:open', {path, factory: 'Notebook'});
  window.lesson = panel;
  await panel.context.ready;
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Error(`${path}: no kernel; does a dialog ask?`)), 60000));
  await Promise.race([panel.sessionContext.ready, late]);
}"""
CLEAR = "() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')"
# Not awaited: its promise may resolve before the last output is drawn.
RUN_ALL_CELLS = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
CELLS = """() => window.lesson.content.widgets.map((cell, index) => ({
  index,
  kind: cell.model.type,
  course: cell.model.getMetadata('course') ?? {},
  source: cell.model.sharedModel.getSource(),
  count: cell.model.executionCount ?? null,
  running: cell.model.executionState === 'running',
  outputs: cell.model.outputs ? cell.model.outputs.toJSON() : [],
}))"""
# The kernel goes with its notebook: its ranks would keep memory, its widgets ids.
CLOSE = """async () => {
  await window.lesson.context.save();
  await window.lesson.sessionContext.shutdown();
  window.lesson.close();
}"""

Cell = dict[str, Any]


class Learner:
    """One browser page with one open notebook; cells are numbered from 0, as JupyterLab does."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def open(self, path: str) -> None:
        """Open the notebook ``path``, relative to the folder that JupyterLab shows."""
        self.page.evaluate(OPEN, path)

    def close(self) -> None:
        """Save the notebook and end its kernel."""
        self.page.evaluate(CLOSE)

    def cells(self) -> list[Cell]:
        """All cells as they are now."""
        return self.page.evaluate(CELLS)

    def find(self, ex: str, role: str) -> int:
        """The number of the one cell with that role in that exercise."""
        wanted = {"ex": ex, "role": role}
        (cell,) = (c for c in self.cells() if c["course"].items() >= wanted.items())
        return cell["index"]

    def at(self, number: int) -> Locator:
        """The cell on the page."""
        return self.page.locator(f".jp-Notebook-cell[data-windowed-list-index='{number}']")

    def run_all(self) -> list[Cell]:
        """Run the notebook afresh; its cells, when the last has ended or one has failed."""
        self.page.evaluate(CLEAR)
        self.page.evaluate(RUN_ALL_CELLS)
        deadline = time.monotonic() + RUN_ALL
        while time.monotonic() < deadline:
            cells = self.cells()
            if errors(cells) or finished(cells):
                return cells
            self.page.wait_for_timeout(300)
        raise TimeoutError(f"cells ran {RUN_ALL} s: {[cell['count'] for cell in self.cells()]}")

    def type(self, number: int, source: str) -> None:
        """Replace what stands in a code cell, key by key."""
        self.at(number).locator(".cm-content").click()
        keys = self.page.keyboard
        keys.press("Control+a")
        keys.press("Backspace")
        for line, text in enumerate(source.splitlines()):
            if line:
                keys.press("Enter")
                keys.press("Shift+Home")  # the indent that the editor guessed gives way
            keys.type(text)
        typed = self.cells()[number]["source"]
        assert typed == source, f"typed {source!r}, there is {typed!r}"

    def press_run(self, number: int) -> Cell:
        """Select a cell and click Run in the toolbar; the cell, when it has ended."""
        before = self.cells()[number]["count"]
        prompt = self.at(number).locator(".jp-InputPrompt")
        prompt.scroll_into_view_if_needed()
        prompt.click()
        self.page.locator(RUN).click()
        deadline = time.monotonic() + ONE_CELL
        while time.monotonic() < deadline:
            cell = self.cells()[number]
            if cell["count"] not in (None, before) and not cell["running"]:
                return cell
            self.page.wait_for_timeout(100)
        raise TimeoutError(f"cell {number} ran {ONE_CELL} s")

    def save(self) -> None:
        """Ctrl+S, and wait until the file is written."""
        self.page.keyboard.press("Control+s")
        self.page.wait_for_function("() => !window.lesson.context.model.dirty")

    def theme(self, name: str) -> None:
        """Change the colors of JupyterLab: "JupyterLab Light" or "JupyterLab Dark"."""
        now = "document.body.dataset.jpThemeName"
        if self.page.evaluate(f"() => {now}") == name:
            return
        self.page.evaluate(
            "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", name
        )
        self.page.wait_for_function(f"name => {now} === name", arg=name)
        self.page.wait_for_timeout(300)  # its style sheet fades in

    def screenshot(self, name: str, shown: Locator) -> None:
        """Scroll ``shown`` into view and store the page as a picture."""
        shown.scroll_into_view_if_needed()
        self.page.wait_for_timeout(300)
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(PICTURES / f"{name}.png"))


def errors(cells: list[Cell]) -> list[dict]:
    """The outputs that are errors."""
    return [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]


def finished(cells: list[Cell]) -> bool:
    """Whether all code cells among these have been run."""
    return all(cell["count"] and not cell["running"] for cell in cells if cell["kind"] == "code")
