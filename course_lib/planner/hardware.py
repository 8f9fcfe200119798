"""The GPUs of the catalog (hardware.toml), each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from course_lib.planner.catalog import look_up


@dataclass(frozen=True)
class Link:
    """``bandwidth`` in bytes per second per GPU and direction, ``latency`` in seconds per step.

    ``efficiency`` is the share of the bandwidth that NCCL takes a ring to reach.
    """

    bandwidth: float
    latency: float
    efficiency: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, and nodes of ``gpus_per_node`` of them.

    ``capacity_bytes`` of a GPU, as torch reports it; ``memory_bandwidth`` in bytes per second;
    ``peak`` in FLOP/s, dense, by the name of the number format; a format that the GPU lacks, or
    whose peak is unknown, is left out. ``node`` is the link inside a node, ``network`` the
    one between nodes. ``efficiency``: share of the peak that the kernels reach, by number format,
    and where that comes from.
    """

    name: str
    capacity_bytes: float
    memory_bandwidth: float
    gpus_per_node: int
    peak: Mapping[str, float]
    node: Link
    network: Link
    efficiency: Mapping[str, float]
    source: str


def hardware_names() -> list[str]:
    """Return the names in the catalog."""
    return list(_catalog())


def hardware(name: str) -> Hardware:
    """Return hardware of the catalog; ValueError with the nearest names if there is none."""
    return look_up("hardware", name, _catalog())


@cache
def _catalog() -> dict[str, Hardware]:
    text = Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8")
    return {name: _hardware(name, dict(row)) for name, row in tomllib.loads(text).items()}


def _hardware(name: str, row: dict[str, Any]) -> Hardware:
    row["node"], row["network"] = Link(**row["node"]), Link(**row["network"])
    row.setdefault("efficiency", {})
    return Hardware(name=name, **row)
