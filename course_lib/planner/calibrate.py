"""Hardware with your own measurements: bandwidth, latency and efficiency from a TOML file.

.. code-block:: toml

    node.bandwidth = "370 GB/s"      # per GPU and direction, as measured in a ring
    node.latency = "5 us"
    network.bandwidth = "400 Gb/s"
    efficiency.bf16 = 0.55           # share of the peak that the kernels reach

Every key is optional. Bandwidths and latencies are strings with a unit.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.planner.configuration import suggestion
from course_lib.planner.hardware import Hardware, Link

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
PREFIXES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
RATES = {f"{prefix}B/s": size for prefix, size in PREFIXES.items()}
RATES |= {f"{prefix}b/s": size / 8 for prefix, size in PREFIXES.items()}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
FASTEST, SLOWEST = 1e14, 1e6  # accepted bytes per second
LEAST = 0.01  # accepted share of a peak
LONGEST = 1.0  # accepted seconds of latency
LINKS = ("node", "network")


def calibrated(hardware: Hardware, path: Path) -> Hardware:
    """Return ``hardware`` with the values of the file at ``path``.

    Raises ValueError for a file that cannot be read, an unknown key, a number without a unit or
    one that no machine has.
    """
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--calibrate {path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--calibrate {path}: this is no TOML file ({error}); write lines such as "
            'node.bandwidth = "370 GB/s"'
        ) from None
    _known("", rows, [*LINKS, "efficiency", "memory_bandwidth"])
    given: dict[str, Any] = {"source": f"{hardware.source}; calibrated by {path.name}"}
    for name in LINKS:
        if name in rows:
            given[name] = _link(name, _table(name, rows[name]), getattr(hardware, name))
    if "efficiency" in rows:
        shares = _table("efficiency", rows["efficiency"])
        _known("efficiency.", shares, hardware.peak)
        given["efficiency"] = _shares(shares, hardware)
    if "memory_bandwidth" in rows:
        given["memory_bandwidth"] = rate("memory_bandwidth", rows["memory_bandwidth"])
    return replace(hardware, **given)


def rate(name: str, given: object) -> float:
    """Return bytes per second of "370 GB/s" or "400 Gb/s" (bits); ValueError naming ``name``."""
    found = _quantity(name, given, RATES, '"370 GB/s" (bytes) or "400 Gb/s" (bits)')
    if not SLOWEST <= found <= FASTEST:
        raise ValueError(f"expected {name} from 1 MB/s to 100 TB/s, got {given!r}")
    return found


def delay(name: str, given: object) -> float:
    """Return seconds of "5 us"; ValueError naming ``name``."""
    found = _quantity(name, given, TIMES, '"5 us"')
    if not 0 <= found <= LONGEST:
        raise ValueError(f"expected {name} from 0 to 1 s, got {given!r}")
    return found


def _quantity(name: str, given: object, units: Mapping[str, float], example: str) -> float:
    """Return a number times its unit."""
    parts = re.fullmatch(r"\s*([-+\d.eE]+)\s*([^\d\s].*?)?\s*", str(given))
    try:
        number = float(parts[1]) if parts else None
    except ValueError:
        number = None
    if parts is None or number is None:
        raise ValueError(f"expected a number with a unit for {name}, got {given!r}; {example}")
    if parts[2] is None:
        raise ValueError(f"{name} = {given} has no unit; write {example}")
    if parts[2] not in units:
        raise ValueError(f"{name} = {given!r} has the unknown unit {parts[2]}; write {example}")
    return number * units[parts[2]]


def _link(name: str, row: Mapping[str, object], link: Link) -> Link:
    _known(f"{name}.", row, ["bandwidth", "latency"])
    readers = {"bandwidth": rate, "latency": delay}
    given = {key: readers[key](f"{name}.{key}", row[key]) for key in row}
    if "bandwidth" in given:
        given["efficiency"] = 1.0  # a measured bandwidth is reached in full
    return replace(link, **given)


def _shares(given: Mapping[str, object], hardware: Hardware) -> dict[str, float]:
    """Return the efficiencies; a given one replaces the numbers of all software generations."""
    found = dict(hardware.efficiency)
    for name in given:
        own = "bf16" if name == "fp16" else name  # as Hardware.efficiency_of
        found = {key: one for key, one in found.items() if key.partition("@")[0] != own}
        found[own] = _share(name, given[name])
    return found


def _share(name: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not LEAST <= given <= 1:
        raise ValueError(
            f"expected efficiency.{name} from {LEAST} to 1, such as 0.55, got {given!r}"
        )
    return float(given)


def _table(name: str, given: object) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        example = "efficiency.bf16" if name == "efficiency" else f"{name}.bandwidth"
        raise ValueError(f"expected a key such as {example}, got {name} = {given!r}")
    return given


def _known(prefix: str, row: Mapping[str, object], keys: Any) -> None:
    for key in row:
        if key not in keys:
            raise ValueError(
                f"the calibration file has the unknown key {prefix}{key}; "
                f"{suggestion(key, [*keys])}"
            )
