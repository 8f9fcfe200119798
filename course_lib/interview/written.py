"""Texts as data: one TOML per language, with the same ids and the same names in braces."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
FOLDER = Path(__file__).parent


@cache
def written(name: str, language: str = "en") -> dict[str, Any]:
    """Return the texts of ``<name>_<language>.toml`` in this folder, such as "quiz" in "en".

    Raises ValueError for a language that these texts do not have.
    """
    if language not in (known := languages(name)):
        raise ValueError(f"expected a language of {', '.join(known)}, got {language!r}")
    return tomllib.loads((FOLDER / f"{name}_{language}.toml").read_text(encoding="utf-8"))


def languages(name: str) -> list[str]:
    """Return the languages that the texts ``name`` have."""
    return [each for each in LANGUAGES if (FOLDER / f"{name}_{each}.toml").exists()]
