"""Under what conditions a run is made: pace, emulated links, checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Link:
    """A network link: ``alpha`` seconds a message, ``beta`` bytes a second."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta <= 0:
            raise ValueError(
                f"Link(alpha={self.alpha}, beta={self.beta}): alpha is seconds, 0 or more; "
                "beta is bytes per second, more than 0"
            )


@dataclass(frozen=True)
class Links:
    """Emulated links: ``inside`` a node of ``ranks_per_node`` ranks, and ``between`` nodes.

    Each axis has links of its own, unless they are ``shared``: then the transfers of all axes of
    a rank queue on its one link inside the node and its one link out of it.
    """

    inside: Link
    between: Link
    ranks_per_node: int = 8
    shared: bool = False

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={self.ranks_per_node}: at least 1 is wanted")

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link class that a group of global ``ranks`` needs."""
        return self.between if self.crosses(ranks) else self.inside

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Whether global ``ranks`` are on more than one node."""
        return len({rank // self.ranks_per_node for rank in ranks}) > 1


# Seconds by operation ("F") or by operation and stage of a pipeline (("F", 2)), which comes first.
Pace = Mapping[Any, float]


@dataclass(frozen=True)
class Conditions:
    """Under what conditions a run is made.

    ``pace`` gives a fixed time in seconds to an operation, e.g. ``{"F": 0.02, "B": 0.04}``, and
    may give another one to a stage whose hardware is slower, e.g. ``{("F", 2): 0.04}``;
    ``links`` slows communication down to the links given; ``checked`` compares every call's
    operation, shape and dtype across the ranks before it is made, and every axis before its groups
    are, and finds ranks that would wait for one another for ever.
    """

    pace: Pace = field(default_factory=dict)
    links: Links | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for op, seconds in self.pace.items():
            of_stage = isinstance(op, tuple) and [type(part) for part in op] == [str, int]
            if not (isinstance(op, str) or of_stage):
                raise ValueError(f"pace of {op!r}: an operation or (operation, stage) is wanted")
            if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= 0:
                raise ValueError(f"pace of {op!r} is {seconds!r}: seconds are wanted, 0 or more")

    def pace_of(self, op: str, stage: int | None = None) -> float:
        """How many seconds ``op`` takes at least; 0 where it is not paced."""
        everywhere = self.pace.get(op, 0.0)
        return everywhere if stage is None else self.pace.get((op, stage), everywhere)
