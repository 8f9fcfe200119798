"""Where the course lies, and folders to write to."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def course_folder() -> Path:
    """The folder of the course. Raises OSError when only the package is installed."""
    if not (ROOT / "notebooks").is_dir():
        raise OSError(
            "the lessons are not beside the installed package; clone the course and install it "
            "there with pip install -e ."
        )
    return ROOT


def make_folder(path: Path, option: str) -> None:
    """Make sure that ``path`` is a folder that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot make this folder ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: this folder cannot be written to")
