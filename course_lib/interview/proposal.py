"""Read a proposal in the notation of ``course plan``: "tp=8 pp=4 dp=4 zero=1 recompute=full"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any
from unicodedata import normalize

from course_lib.interview.cases import Case
from course_lib.interview.written import written
from course_lib.planner.configuration import COUNTS, MOST, RECOMPUTE
from course_lib.schedule.named import SCHEDULES

NUMBERS = {
    False: ("tp", "pp", "cp", "dp", "ep", "zero", "chunks", "microbatch"),
    True: ("tp", "pp", "cp", "dp", "batch"),
}
WORDS: dict[bool, dict[str, Iterable[str]]] = {
    False: {"schedule": SCHEDULES, "recompute": RECOMPUTE, "overlap_tp": ("on", "off")},
    True: {"dtype": ("bf16", "fp8")},
}
ALIASES = {"micro_batch": "microbatch", "mbs": "microbatch", "stage_layers": "layers"}
ALIASES |= {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep"}
PLANNER = {"microbatch": "micro_batch", "layers": "stage_layers"}  # its names of these keys
ZERO = 3  # the highest stage
MOST_STAGES = 1000
LONGEST = 400  # characters


def read(case: Case, text: str, language: str = "en") -> dict[str, Any]:
    """Return the arguments of a proposal for ``case``.

    Raises ValueError with one sentence in ``language`` for an unknown key, a value that cannot be
    read and a key that the case fixes to another value.
    """
    said = written("design", language)["reading"]
    found: dict[str, Any] = {}
    for key, value in _settings(text, said):
        known = (*NUMBERS[case.serving], *WORDS[case.serving])
        known += () if case.serving else ("layers",)
        if key in case.fixed:
            if value.replace(",", "") != str(case.fixed[key]):
                raise ValueError(said["fixed"].format(key=key, value=f"{case.fixed[key]:,}"))
            continue
        if key not in known:
            near = get_close_matches(key, [*known, *case.fixed], n=2, cutoff=0.5)
            kind = "near" if near else "unknown"
            names = ", ".join(near or known)
            raise ValueError(said[kind].format(key=key[:40], names=names))
        if key in found:
            raise ValueError(said["twice"].format(key=key))
        found[key] = _value(case, key, value, said)
    if case.serving and "batch" not in found:
        raise ValueError(said["batch"])
    return {PLANNER.get(key, key): value for key, value in found.items()}


def _settings(text: str, said: dict[str, str]) -> Iterable[tuple[str, str]]:
    """Yield keys and values; "tp8", "--tp 8" and full-width signs count as "tp=8"."""
    plain = normalize("NFKC", text).strip().strip("`'\"").lower()
    if not plain:
        raise ValueError(said["empty"])
    if len(plain) > LONGEST:
        raise ValueError(said["long"].format(most=LONGEST))
    plain = re.sub(r"--([a-z_-]+)[ =]+", r"\1=", plain)
    plain = re.sub(r"\b(tp|pp|cp|dp|ep|zero)-?(\d+)\b", r"\1=\2", plain)  # tp8, zero-1
    plain = re.sub(r"\s*=\s*", "=", plain)
    for part in re.split(r"[\s;、]+|,(?=\s*[a-z])", plain):
        if not part.strip(","):
            continue
        key, equals, value = part.strip(",").partition("=")
        key = key.replace("-", "_")
        if not equals or not key or not value or "=" in value:
            raise ValueError(said["form"].format(part=part[:40]))
        yield ALIASES.get(key, key), value


def _value(case: Case, key: str, value: str, said: dict[str, str]) -> Any:
    """Return the value of ``key``."""
    shown = value[:40]
    if key == "layers":
        return _layers(value, said)
    if key in (choices := WORDS[case.serving]):
        if value not in choices[key]:
            names = ", ".join(choices[key])
            raise ValueError(said["choice"].format(key=key, names=names, value=shown))
        return value == "on" if key == "overlap_tp" else value
    least, most = (0, ZERO) if key == "zero" else (1, COUNTS.get(key, MOST))
    if not re.fullmatch(r"[+-]?[0-9]{1,12}", value) or not least <= int(value) <= most:
        raise ValueError(said["number"].format(key=key, least=least, most=f"{most:,}", value=shown))
    return int(value)


def _layers(text: str, said: dict[str, str]) -> tuple[int, ...]:
    """Return the counts of "7,8x14,7": 7, then 14 stages of 8, then 7."""
    found: list[int] = []
    for piece in text.split(","):
        part = re.fullmatch(r"(\d{1,4})(?:x(\d{1,3}))?", piece)
        if part is None or len(found) > MOST_STAGES:
            raise ValueError(said["layers"].format(value=text[:40]))
        found += [int(part[1])] * int(part[2] or 1)
    return tuple(found)
