"""The links that the group of an axis spans, and seconds on them by the alpha-beta model.

A step of a ring takes alpha + bytes / beta: Hockney 1994, doi:10.1016/S0167-8191(06)80021-9, as
:mod:`course_lib.comm.alpha_beta`. Ranks are placed in the order tp-cp-dp-pp, tp fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from course_lib.formulas.moves import Move
from course_lib.planner.configuration import Configuration
from course_lib.planner.hardware import Hardware, Link


@dataclass(frozen=True)
class Span:
    """A group of ``inside`` x ``nodes`` GPUs: so many in each of so many nodes."""

    inside: int
    nodes: int

    @property
    def link(self) -> str:
        """ "node", "network" or "node+network"."""
        if self.nodes == 1:
            return "node"
        return "network" if self.inside == 1 else "node+network"


def axis_span(axis: str, configuration: Configuration, gpus_per_node: int) -> Span:
    """Return the span of the groups of ``axis``, named as in the ledger."""
    c = configuration
    data = c.cp * c.dp
    stride, size = {
        "tp": (1, c.tp),
        "tp_kv": (1, c.tp),
        "cp": (c.tp, c.cp),
        "dp": (c.tp * c.cp, c.dp),
        "dp_cp": (c.tp, data),
        "ep": (c.tp, c.ep),
        "edp": (c.tp * c.ep, data // c.ep),
        "pp": (c.tp * data, c.pp),
    }[axis]
    return span(stride, size, gpus_per_node, c.world)


@lru_cache(maxsize=4096)
def span(stride: int, size: int, gpus_per_node: int, world: int) -> Span:
    """Return the span of the worst group of ``size`` ranks, each ``stride`` after the one before.

    ``world`` counts all ranks. A group that has unequal shares of its nodes counts as a ring over
    the network.
    """
    worst = Span(size, 1)
    for first in range(0, min(world, gpus_per_node * stride * size), stride * size):
        for start in {first, first + stride - 1}:
            shares = Counter((start + at * stride) // gpus_per_node for at in range(size))
            even = len(set(shares.values())) == 1
            here = Span(shares[start // gpus_per_node], len(shares)) if even else Span(1, size)
            worst = max(worst, here, key=lambda one: (one.nodes, -one.inside))
        if (first + stride * size) % gpus_per_node == 0:
            break
    return worst


def seconds(moves: Iterable[Move], over: Span, hardware: Hardware) -> float:
    """Return the seconds of ``moves``, one after another, on the links of ``over``."""
    return sum(move.calls * _call_seconds(move, over, hardware) for move in moves)


def _call_seconds(move: Move, over: Span, hardware: Hardware) -> float:
    """Return the seconds of one call: inside the node, then between nodes on a share of the data.

    An all-gather or reduce-scatter of S bytes takes (L-1) steps of S/L inside a node of L members
    and (N-1) steps of S/LN between N nodes; an all-reduce is both, an all-to-all sends to each peer
    on the link to it.
    """
    if move.n == 1:
        return 0.0
    if move.n != over.inside * over.nodes:  # some members of the group
        over = Span(move.n, 1) if over.nodes == 1 else Span(1, move.n)
    payload, inside, nodes = float(move.payload), over.inside, over.nodes
    if hardware.emulated and nodes > 1:
        inside, nodes = 1, move.n
    if move.op == "send":  # the slowest of a line of neighbors decides
        return _steps(1, payload, hardware.node if nodes == 1 else hardware.network)
    if move.op == "all_to_all":
        each = payload / move.n
        near = _steps(inside - 1, each, hardware.node)
        return near + _steps(inside * (nodes - 1), each, hardware.network)
    whole = payload * move.n if move.op == "all_gather" else payload
    once = _steps(inside - 1, whole / inside, hardware.node)
    once += _steps(nodes - 1, whole / inside / nodes, hardware.network)
    return 2 * once if move.op == "all_reduce" else once


def _steps(number: int, message: float, link: Link) -> float:
    """Return the seconds of ``number`` messages of ``message`` bytes, one after another."""
    return number * (link.latency + message / (link.bandwidth * link.efficiency))
