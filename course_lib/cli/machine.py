"""doctor, tour and lab: what the course does with this machine."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from course_lib.cli import place
from course_lib.cli.app import AsJson, app
from course_lib.cli.errors import ENVIRONMENT
from course_lib.cli.show import console, print_json
from course_lib.cli.status import Status


@app.command()
def doctor(as_json: AsJson = False) -> int:
    """Is this machine ready? Every check with its fix."""
    from course_lib import doctor as examination

    with Status("starting") as status:
        report = examination.examine(status.say)
    if as_json:
        print_json(report.as_dict())
    else:
        examination.show(report, console())
    return 0 if report.ok else ENVIRONMENT


@app.command()
def tour(
    out: Annotated[str, typer.Option(help="Folder for the pictures and tour.json.")] = "out/tour",
    as_json: AsJson = False,
) -> int:
    """Train on 4 ranks with each technique, beside one process."""
    if not out.strip():
        raise ValueError("--out is empty: give a folder, such as --out out/tour")
    place.make_folder(Path(out), "--out")
    return import_module("course_lib.tour.job").run_tour(out=Path(out), as_json=as_json)


@app.command()
def lab(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the server.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    rest: Annotated[
        list[str] | None, typer.Argument(help="A notebook, or after -- options of JupyterLab.")
    ] = None,
) -> int:
    """Open JupyterLab on the course, with the kernel of this Python."""
    rest = rest or []
    if not rest or rest[0].startswith("-"):
        rest = [f"--LabApp.default_url=/lab/tree/{_lesson_to_open().as_posix()}", *rest]
    command = lab_command(port, browser, rest)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this Python's kernel before one of the user's
    # JupyterLab's terminal then finds `course`, and it does not ask whether it may fetch news.
    _put_first("PATH", Path(sys.executable).parent, os.defpath)
    _put_first("JUPYTER_CONFIG_PATH", Path(__file__).with_name("jupyter"))
    sys.stdout.flush()
    os.execv(command[0], command)


def _put_first(variable: str, folder: Path, default: str = "") -> None:
    """Put ``folder`` first in a list of paths in the environment."""
    there = os.environ.get(variable, default)
    os.environ[variable] = os.pathsep.join([str(folder), *([there] if there else [])])


def _lesson_to_open() -> Path:
    """Return the path, below the course, of the learner's notebook that was saved last.

    Without any, start lesson 00 and return its notebook.
    """
    from course_lib.grading import desk

    root = place.course_folder()
    own = [path for folder in desk.FOLDERS for path in (root / "work" / folder).glob("*.ipynb")]
    last = max(own, key=lambda path: path.stat().st_mtime) if own else desk.start(root, "00")[0][0]
    return last.relative_to(root)


def lab_command(port: int | None, browser: bool, rest: list[str]) -> list[str]:
    """The command that ``course lab`` becomes. Raises ValueError when ``rest`` names no file."""
    place.course_folder()
    if rest and not rest[0].startswith("-") and not Path(rest[0]).exists():
        raise ValueError(f"there is no notebook {rest[0]!r}; options of JupyterLab go after --")
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={place.ROOT}"]
    if port is not None:
        command.append(f"--ServerApp.port={port}")
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers; Jupyter refuses root otherwise
        command.append("--allow-root")
    return command + rest
