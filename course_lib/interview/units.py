"""Read an answer such as "12.5 GB" or "35 %", and write a value with a unit.

GB is 1e9 bytes and GiB is 2**30 bytes. A value is a number in the base unit of its question: bytes,
seconds, FLOPs, bytes per second, tokens per second, a share of 1, or a count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from math import isfinite
from types import MappingProxyType
from typing import Any
from unicodedata import normalize

# The base unit of a question, and what pint calls it. Shares and counts need no pint.
UNITS = {
    "byte": "databyte",
    "byte/s": "databyte/second",
    "s": "second",
    "flop": "flop",
    "token/s": "token/second",
    "share": "",
    "count": "",
}
EXAMPLES = {
    "byte": "12.5 GB",
    "byte/s": "50 GB/s",
    "s": "3.5 days",
    "flop": "1.2e21 FLOPs",
    "token/s": "12,000 tokens/s",
    "share": "35 %",
    "count": "64",
}
LONGEST = 80  # characters of an answer
ENGLISH: Mapping[str, str] = MappingProxyType({})
MULTIPLES = {"k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "g": 1e9, "b": 1e9}
MULTIPLES |= {"bn": 1e9, "billion": 1e9, "t": 1e12, "trillion": 1e12}
MULTIPLES |= {"ten-thousand": 1e4, "hundred-million": 1e8}  # as other languages count
MULTIPLE = re.compile(  # before a unit; a letter alone may be the unit
    r"(?i:thousand|million|bn|billion|trillion|ten-thousand|hundred-million)\b|[kKMB](?=\s+\S)"
)
NUMBER = re.compile(
    r"(?P<digits>[+-]?(?:\d[\d,_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"
    r"(?:\s*(?:\^|\*\*)\s*(?P<exponent>[+-]?\d{1,3}))?"
    r"(?:\s*(?:x|×|·|⋅|\*)\s*10\s*(?:\^|\*\*)\s*(?P<power>[+-]?\d{1,3}))?"
    r"(?:\s*/\s*(?P<over>\d{1,9}(?:\.\d+)?))?"
)
GROUPED = re.compile(r"[+-]?\d{1,3}(?:[,_]\d{3})+(?:\.\d*)?(?:[eE].*)?")
NOUNS = set(
    "gpu rank micro-batch micro-batche microbatch microbatche stage request parameter token group "
    "copy copie layer node sequence replica param shard weight a100 h100 h200 b200".split()
)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
BEFORE = re.compile(r"(?i)(?:about|approx\.?|approximately|roughly|[~≈=])\s*")
LABEL = re.compile(r"(?i)(?:zero|stage|layout|option|rank|tp|pp|dp|cp|ep|m)[-\s=:#]*(?=\d)")
SPACED = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?!\d)")  # 12 500
EACH = re.compile(r"(?i)\s*(?:(?:/|\bper|\bon each)\s*(?:gpu|rank|device)|\beach)$")
GPU_TIME = re.compile(
    r"(?i)\b(?:[abh]\d+[- ]?)?(?:gpu)?[-·* ]?(?=(?:h|hours?|d|days?|s|seconds?)$)"
)
BYTES = re.compile(
    r"(?:(kilo|mega|giga|tera|peta|exa|[kmgtpe])|(kibi|mebi|gibi|tebi|pebi|exbi|[kmgtpe]i))?"
    r"(b|bytes?|bits?)",
    re.IGNORECASE,
)
FLOPS = re.compile(r"([kmgtpezy]?)(?:flops?|operations?)", re.IGNORECASE)


class Unreadable(ValueError):
    """An answer that is no number, or has a unit of another quantity.

    ``key`` is the id of its sentence in the texts, ``got`` what was written.
    """

    def __init__(self, key: str, got: str) -> None:
        super().__init__(f"{key}: {got!r}")
        self.key, self.got = key, got[:40]


class UnitMissing(Unreadable):
    """An answer that is a number without its unit."""


def read(text: str, unit: str, words: Mapping[str, str] = ENGLISH) -> float:
    """Return the value of an answer, in the base unit ``unit``.

    ``words`` are units of another language, with the English for each.
    Raises UnitMissing if a unit is needed and there is none, Unreadable for anything else that is
    no value of this quantity.
    """
    written = _plain(text, words)
    if unit == "count" and (label := LABEL.match(written)):  # ZeRO-2, layout 1
        written = written[label.end() :]
    found = NUMBER.match(written) if len(written) <= LONGEST else None
    if found is None:
        raise Unreadable("number", text.strip())
    value = _value(found, written, unit)
    if not isfinite(value):
        raise Unreadable("finite", written)
    return value


def half_step(text: str, words: Mapping[str, str] = ENGLISH) -> float:
    """Return half a step of the last digit that was written, as a share of the number.

    "160 GB" has two digits and means 155 to 165 GB: half a step is 5/160. 0 for fewer than two
    digits, and for an answer that :func:`read` refuses.
    """
    found = NUMBER.match(_plain(text, words)[:LONGEST])
    if found is None or found["over"]:
        return 0.0
    digits = Decimal(re.sub("[,_]", "", re.split("[eE]", found["digits"])[0]))
    _, written, exponent = (digits if "." in found["digits"] else digits.normalize()).as_tuple()
    if len(written) < 2 or not digits or not isinstance(exponent, int):
        return 0.0
    return float(Decimal(5).scaleb(exponent - 1) / abs(digits))


def _plain(text: str, words: Mapping[str, str]) -> str:
    """Return an answer in English and in ASCII digits: full width and 10⁹ are rewritten."""
    powers = re.sub(
        r"(?<=\d)[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda power: "^" + power[0].translate(SUPERSCRIPTS), text
    )
    plain = normalize("NFKC", powers).replace("\u200b", "").strip()
    for word, english in words.items():
        plain = plain.replace(word, english).strip()
    plain = re.sub(" +", " ", plain.rstrip(".!?。").strip("()#$ "))
    if before := BEFORE.match(plain):
        plain = plain[before.end() :]
    return SPACED.sub(lambda number: number[0].replace(" ", ""), plain, count=1)


def _value(found: re.Match[str], written: str, unit: str) -> float:
    """Return the number that was matched, in the base unit."""
    value, rest = _number(found), written[found.end() :].strip()
    if unit == "count":
        return value * _multiple(rest)
    if unit == "share":
        return _share(value, rest, written)
    if unit == "byte":
        rest = EACH.sub("", rest)
    if multiple := MULTIPLE.match(rest):  # 1.5 million GPU hours
        value, rest = value * MULTIPLES[multiple[0].lower()], rest[multiple.end() :].strip()
    if not rest:
        raise UnitMissing("number", written)
    return _converted(value, rest, unit)


def _number(found: re.Match[str]) -> float:
    """Return the number that was matched; a comma only separates thousands."""
    digits = found["digits"]
    if re.search("[,_]", digits) and not GROUPED.fullmatch(digits):
        raise Unreadable("decimal-point", digits)
    try:
        value = float(re.sub("[,_]", "", digits)) ** int(found["exponent"] or 1)
        value *= 10.0 ** int(found["power"] or 0)
    except (OverflowError, ZeroDivisionError):
        raise Unreadable("finite", found[0]) from None
    if found["over"]:
        if not float(found["over"]):
            raise Unreadable("finite", found[0])
        value /= float(found["over"])
    if not isfinite(value):
        raise Unreadable("finite", found[0])
    return value


def _multiple(rest: str) -> float:
    """Return the factor of "70 B" or "64 GPUs"; a noun counts 1."""
    head, _, rest = (
        rest.partition(" ") if rest.split(" ")[0].lower() in MULTIPLES else ("", "", rest)
    )
    factor = MULTIPLES.get(head.lower(), 1.0)
    if rest and rest.lower().replace(" ", "-").removesuffix("s") not in NOUNS:
        raise Unreadable("count", rest)
    return factor


def _share(value: float, rest: str, words: str) -> float:
    """Return the share of 1; a number above 1 needs its percent sign."""
    if rest.lower() in ("%", "percent", "per cent", "pct"):
        return value / 100
    if rest:
        raise Unreadable("share", words)
    if abs(value) > 1:
        raise UnitMissing("share", words)
    return value


def _converted(value: float, rest: str, unit: str) -> float:
    """Return ``value`` of the written unit ``rest`` in the base unit."""
    from pint import DimensionalityError, UndefinedUnitError

    words = re.sub(r"\s+per\s+", "/", rest)
    words = GPU_TIME.sub("", words)
    parts = [_spelled(part.strip(), unit) for part in words.split("/")]
    try:
        if len(parts) > 2 or not all(re.fullmatch(r"[^\W\d_]+|%", part) for part in parts):
            raise ValueError
        found = value * _registry().parse_units(parts[0])
        for part in parts[1:]:
            found = found / _registry().parse_units(part)
        return float(found.to(UNITS[unit]).magnitude)
    except DimensionalityError:
        key = "quantity"
    except (UndefinedUnitError, ValueError, AttributeError, TypeError):
        key = "unknown-unit"
    raise Unreadable(key, rest)


def _spelled(word: str, unit: str) -> str:
    """Return the name that pint has for a unit as people write it: gb, Gbit, TFLOPS, tok."""
    if match := BYTES.fullmatch(word):
        decimal, binary, name = match[1] or "", match[2] or "", match[3]
        bits = name.lower().startswith("bit") or (name == "b" and len(decimal) == 1 < len(word))
        bits = bits and not (name == "b" and decimal.islower())  # gb is taken as GB
        prefix = f"{binary[0].upper()}i" if binary else decimal[:1].upper()
        return ("k" if prefix == "K" else prefix) + ("databit" if bits else "databyte")
    if match := FLOPS.fullmatch(word):
        prefix = match[1].upper()
        return ("k" if prefix == "K" else prefix) + "flop"
    return {"ops": "flop", "tok": "token", "toks": "token", "sec": "second", "secs": "second"}.get(
        word, word
    )


@cache
def _registry() -> Any:
    """Return pint's units, with FLOPs and tokens, and with bytes that are not dimensionless.

    pint takes long to import, so it is imported here.
    """
    from pint import UnitRegistry

    registry: Any = UnitRegistry()
    registry.define("databit = [data]")
    registry.define("databyte = 8 databit")
    registry.define("flop = [operation]")
    registry.define("token = [token]")
    return registry


PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
TIMES = ((172800, 86400, "days"), (7200, 3600, "hours"), (120, 60, "minutes"), (1, 1, "s"))
SHORT = ((1e-3, 1e-3, "ms"), (0, 1e-6, "us"))


def show(value: float, unit: str, words: Mapping[str, str] = ENGLISH) -> str:
    """Return ``value`` in a unit that suits, with four digits: "12.5 GB", "35.4 %", "3.2 days".

    ``words`` replace "days", "hours", "minutes" and "bytes" in another language.
    """
    if unit == "share":
        return f"{100 * value:.4g} %"
    if unit == "flop":
        return f"{value:.4g} FLOPs"
    if unit == "token/s":
        return f"{value:,.0f} tokens/s"
    if unit == "s":
        size, name = next((s, n) for least, s, n in (*TIMES, *SHORT) if abs(value) >= least)
        return f"{_digits(value / size)} {words.get(name, name)}"
    if unit == "count":
        return _digits(value)
    size, prefix = next(((s, p) for s, p in PREFIXES if abs(value) >= s), (1.0, ""))
    name = "B" if prefix else f" {words.get('bytes', 'bytes')}"
    return f"{_digits(value / size)} {prefix}{name}{'/s' if unit == 'byte/s' else ''}".replace(
        "  ", " "
    )


def _digits(value: float) -> str:
    """Return a number with thousands separators; of a fraction, four digits."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
