"""The conditions of a run: padded compute time, emulated links, checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Link:
    """A network link: ``alpha`` seconds per message, ``beta`` bytes per second."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta <= 0:
            raise ValueError(
                "expected alpha of 0 or more seconds and beta above 0 bytes per second, got "
                f"Link(alpha={self.alpha}, beta={self.beta})"
            )


@dataclass(frozen=True)
class Links:
    """Emulated links: ``inside`` a node of ``ranks_per_node`` ranks, and ``between`` nodes.

    Each axis has its own links. If they are ``shared``, a rank has one link inside the node and
    one between nodes, and the transfers of all its axes queue on them.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 8
    shared: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(
                f"expected ranks_per_node of 1 or more, got ranks_per_node={self.ranks_per_node}"
            )

    def link(self, ranks: tuple[int, ...]) -> Link:
        """Return the slowest link between any two of the global ``ranks``."""
        return self.between if self.crosses(ranks) else self.inside

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Return whether the global ``ranks`` are on more than one node."""
        return len({rank // self.ranks_per_node for rank in ranks}) > 1


# Seconds by operation ("F") or by operation and pipeline stage (("F", 2)), which has priority.
Pace = Mapping[Any, float]


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run.

    ``pace`` pads operations by sleep to a fixed time in seconds, e.g. ``{"F": 0.02, "B": 0.04}``;
    a stage on slower hardware may have another time, e.g. ``{("F", 2): 0.04}``. ``links`` slows
    communication down to the given links. ``checked`` compares the operation, shape and dtype of
    every call across the ranks before the call, and every axis before its groups are made; it also
    finds ranks that would wait for each other forever.
    """

    pace: Pace = field(default_factory=dict)
    links: Links | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for op, seconds in self.pace.items():
            of_stage = isinstance(op, tuple) and [type(part) for part in op] == [str, int]
            if not (isinstance(op, str) or of_stage):
                raise ValueError(
                    f"expected a pace of an operation or (operation, stage), got pace of {op!r}"
                )
            if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= 0:
                raise ValueError(
                    f"expected 0 or more seconds as the pace of {op!r}, got {seconds!r}"
                )

    def pace_of(self, op: str, stage: int | None = None) -> float:
        """Return the padded time of ``op`` in seconds; 0 if it is not padded."""
        everywhere = self.pace.get(op, 0.0)
        return everywhere if stage is None else self.pace.get((op, stage), everywhere)
