"""Texts as data: one TOML per language, with the same ids and the same names in braces."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")


@cache
def written(name: str, language: str = "en") -> dict[str, Any]:
    """Return the texts of ``<name>_<language>.toml`` in this folder, such as "quiz" in "en".

    Raises ValueError for a language that these texts do not have.
    """
    folder = Path(__file__).parent
    known = [each for each in LANGUAGES if (folder / f"{name}_{each}.toml").exists()]
    if language not in known:
        raise ValueError(f"expected a language of {', '.join(known)}, got {language!r}")
    return tomllib.loads((folder / f"{name}_{language}.toml").read_text(encoding="utf-8"))
