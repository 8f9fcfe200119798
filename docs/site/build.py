"""``make site``: stage README, lessons, exercises, plans and API pages, and build them with Sphinx.

The pages keep their places, so that links that work in the repository work on the site too. A
link without a target is a warning, and a warning fails the build.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT))
STAGED, OUT = ROOT / "out" / "site-source", ROOT / "out" / "site"
FOLDERS = ("notebooks", "exercises")
API = (  # the library, in the order in which it imports, launch and view
    "schedule",
    "ledger",
    "layout",
    "trace",
    "mesh",
    "comm",
    "model",
    "data",
    "recompute",
    "dp",
    "zero",
    "tp",
    "sp",
    "cp",
    "ep",
    "pp",
    "checkpoint",
    "compose",
    "inference",
    "launch",
    "view",
)
MAP = """# The course on a page

[![Each technique, when to use it, and what it costs](course-map.png)](course-map.pdf)
"""


def stage() -> None:
    """Copy every page into ``STAGED``, and write the index and the API pages."""
    shutil.rmtree(STAGED, ignore_errors=True)
    (STAGED / "_static").mkdir(parents=True)
    shutil.copy(HERE / "conf.py", STAGED)
    shutil.copy(HERE / "course.css", STAGED / "_static")
    for pattern in ("*.md", "LICENSE", "CITATION.cff", "docs/*.*", ".devcontainer/*"):
        for file in ROOT.glob(pattern):
            target = STAGED / file.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(file, target)
    for folder in FOLDERS:
        (STAGED / folder).mkdir()
        for file in sorted((ROOT / folder).glob("[0-9]*.ipynb")):
            (STAGED / folder / file.name).write_text(_page(file), encoding="utf-8")
    (STAGED / "api").mkdir()
    for name in API:
        (STAGED / "api" / f"{name}.rst").write_text("\n".join(_api_page(name)))
    (STAGED / "docs" / "the-map.md").write_text(MAP)
    (STAGED / "README.md").rename(STAGED / "index.md")
    with open(STAGED / "index.md", "a", encoding="utf-8") as index:
        index.write("\n".join(_contents()))


def _page(file: Path) -> str:
    """Return a notebook whose folded cells are folded on the site too."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"].setdefault("tags", []).append("hide-input")
    return json.dumps(notebook)


def _api_page(name: str) -> Iterator[str]:
    heading = f"``course_lib.{name}``"
    yield from (heading, "=" * len(heading), "")
    module = import_module(f"course_lib.{name}")
    places = (f"{module.__name__}.", "course_lib.formulas.")
    own = [
        public
        for public, value in vars(module).items()
        if not public.startswith("_") and f"{getattr(value, '__module__', '')}.".startswith(places)
    ]
    yield from (f".. automodule:: {module.__name__}", f"   :members: {', '.join(own)}", "")


def _contents() -> Iterator[str]:
    """Yield the tables of contents of the sidebar."""
    lessons = [f"notebooks/{file.stem}" for file in sorted(STAGED.glob("notebooks/*.ipynb"))]
    exercises = [f"exercises/{file.stem}" for file in sorted(STAGED.glob("exercises/*.ipynb"))]
    plans = [f"docs/{file.stem}" for file in sorted(STAGED.glob("docs/*.md"))]
    for caption, pages in {
        "Lessons": lessons,
        "Plans": plans,
        "Exercises": exercises,
        "Library": [f"api/{name}" for name in API],
        "Project": ["CONTRIBUTING", "CHANGELOG"],
    }.items():
        yield from ("", "```{toctree}", ":hidden:", f":caption: {caption}", ":maxdepth: 1", "")
        yield from (*pages, "```", "")


if __name__ == "__main__":
    stage()
    sys.exit(build_main(["-W", "--keep-going", "-q", "-E", str(STAGED), str(OUT)]))
