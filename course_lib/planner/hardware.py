"""The GPUs of the catalog (hardware.toml), each with its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from course_lib.planner.catalog import DTYPES, look_up

NOT_CALIBRATED = 0.5  # the efficiency where no published run has been used; a guess


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
    one between nodes. ``efficiency``: share of the peak that the kernels reach, by number format
    and software generation, as in ``{"bf16@2021": 0.6, "bf16@2024": 0.5}``.

    ``emulated``: a cluster of padded ranks with the launcher's emulated links. There a collective
    that leaves a node takes all its steps on the network, and only the gradients of plain DP and
    what ZeRO-2 and 3 send hide behind compute.
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
    emulated: bool = False

    def peak_of(self, dtype: str) -> float:
        """Return the peak of ``dtype`` in FLOP/s; ValueError if the GPU does not have it."""
        if dtype not in self.peak:
            raise ValueError(
                f"{self.name} has no {dtype} peak in the catalog; choose dtype "
                f"{' or '.join(name for name in self.peak if name in DTYPES)}"
            )
        return self.peak[dtype]

    def efficiency_of(self, dtype: str, generation: str | None = None) -> float:
        """Return the share of the peak that kernels of ``dtype`` reach when no rank waits.

        ``generation`` is the year of the software, by default the newest. fp16 counts as bf16.
        ``NOT_CALIBRATED`` where no published run of this GPU and number format was used.
        Raises ValueError for a generation that is not known.
        """
        name = "bf16" if dtype == "fp16" else dtype
        known = {key.partition("@")[2]: key for key in self.efficiency if key.startswith(name)}
        if generation is None:
            return self.efficiency[known[max(known)]] if known else NOT_CALIBRATED
        if not known or "" in known:  # a guess, or measured by the reader
            raise ValueError(
                f"the {name} efficiency of {self.name} belongs to no software generation; leave "
                f"out generation={generation!r}"
            )
        if generation not in known:
            raise ValueError(
                f"expected the software generation of {name} on {self.name} to be one of "
                f"{', '.join(sorted(known))}, got {generation!r}"
            )
        return self.efficiency[known[generation]]


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
