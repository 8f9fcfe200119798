"""One JupyterLab and one browser for all tests here; each test has its own page and course."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
           "--disable-background-networking")  # fmt: skip


@pytest.fixture(scope="session")
def shown(tmp_path_factory) -> Path:
    """The folder that JupyterLab shows: a course without a learner's work."""
    root = tmp_path_factory.mktemp("course")
    for folder in ("notebooks", "exercises"):
        (root / folder).mkdir()
        for path in (ROOT / folder).glob("*.ipynb"):
            shutil.copy(path, root / folder)
    return root


@pytest.fixture(scope="session")
def lab(need, shown, tmp_path_factory) -> Iterator[str]:
    """The address of a JupyterLab of this Python on ``shown``."""
    need(CHROMIUM, "chromium (apt-get install chromium)")
    try:
        import playwright  # noqa: F401
    except ImportError:
        need(False, "playwright (pip install -e '.[dev]')")
    from jupyter_lab import serving

    with serving(tmp_path_factory.mktemp("private"), shown) as address:
        yield address


@pytest.fixture(scope="session")
def browser(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture
def learner(lab, browser):
    """Somebody before an empty JupyterLab."""
    from learner import Learner

    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(f"{lab}&reset", timeout=60_000)
    page.wait_for_function("() => window.jupyterapp", timeout=60_000)
    yield Learner(page)
    page.close()


@pytest.fixture
def begin(shown, monkeypatch, capsys) -> Callable[[str], Path]:
    """``begin("00")`` is `course start 00`; it returns the learner's exercise file."""
    from course_lib import cli
    from course_lib.cli import place

    def start(lesson: str) -> Path:
        monkeypatch.setattr(place, "ROOT", shown)
        assert cli.main(["start", lesson]) == 0
        (path,) = (shown / "work" / "exercises").glob(f"{lesson}_*.ipynb")
        return path

    return start
