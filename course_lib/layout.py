"""The coordinates of ranks on the axes, and the resulting groups. Does not import torch.

``order="tp-cp-dp-pp"`` names the axes from fastest to slowest: neighboring ranks differ in the
first axis. Expert parallelism subdivides data (and context) parallelism, so ``ep`` is not a factor
of the world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "tp-cp-dp-pp"
NODES = 8  # nodes that a drawing shows; of the rest it shows the count
NODE_RANKS = 64  # ranks of one node that it shows
GROUP_ROWS = 3  # lines of groups that it shows
WIDTH = 80  # characters of its longest line


@dataclass(frozen=True)
class Layout:
    """The layout of ``world`` ranks. ``order`` is from fastest to slowest axis."""

    order: tuple[str, ...]
    sizes: Mapping[str, int]
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis: its digits in a mixed-radix number."""
        if not 0 <= rank < self.world:
            raise ValueError(f"expected a rank from 0 to {self.world - 1}, got rank {rank}")
        coordinates = {}
        for axis in self.order:
            rank, coordinates[axis] = divmod(rank, self.sizes[axis])
        return coordinates

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on ``axes``, sorted by first rank."""
        unknown = set(axes) - set(self.order)
        if unknown:
            raise ValueError(
                f"expected axes of {self.order}, got the unknown axis {sorted(unknown)}"
            )
        others = set(self.order) - set(axes)
        steps = self._ranks_along(set(axes))
        return [[first + step for step in steps] for first in self._ranks_along(others)]

    def _ranks_along(self, axes: set[str]) -> list[int]:
        """Return the ranks with coordinate 0 on all other axes, ascending."""
        ranks, stride = [0], 1
        for axis in self.order:
            size = self.sizes[axis]
            if axis in axes:  # all ranks so far are below stride, so the list stays ascending
                ranks = [step * stride + rank for step in range(size) for rank in ranks]
            stride *= size
        return ranks

    def expert_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ep groups (blocks of dp·cp) and the groups with the same experts (edp)."""
        ep_groups, edp_groups = [], []
        for group in self.groups("dp", "cp"):
            blocks = [group[start : start + self.ep] for start in range(0, len(group), self.ep)]
            ep_groups += blocks
            edp_groups += [list(ranks) for ranks in zip(*blocks, strict=True)]
        return sorted(ep_groups), sorted(edp_groups)


def make_layout(
    world: int | None = None,
    order: str = DEFAULT_ORDER,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
) -> Layout:
    """Return a checked layout; ``dp`` defaults to ``world`` divided by the other sizes.

    Raises ValueError that names the axis if the product of the sizes is not ``world``, if the
    order names an axis twice or not at all (an axis of size 1 may be absent), or if ep does not
    divide dp x cp.
    """
    given = {"tp": tp, "cp": cp, "dp": 1 if dp is None else dp, "pp": pp, "ep": ep}
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"expected a whole number of 1 or more for {axis}, got {axis}={size!r}"
            )
    others = tp * cp * pp
    if world is None:
        world = others * (dp or 1)
    dp = _data_parallel_size(world, dp, others, f"tp={tp} x cp={cp} x pp={pp}")
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    names = _complete_order(order, sizes)
    if dp * cp % ep:
        raise ValueError(
            f"expected ep to divide dp x cp = {dp * cp}, because ranks with different data share "
            f"the experts, got ep={ep}; choose a divisor"
        )
    return Layout(order=names, sizes={axis: sizes[axis] for axis in names}, ep=ep)


def _data_parallel_size(world: int, dp: int | None, others: int, product: str) -> int:
    """Return ``dp``, by default the world divided by the ``others`` ranks of a replica."""
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"expected a world of 1 or more ranks, got {world!r}")
    if dp is None and world % others:
        raise ValueError(
            f"expected {product} = {others} to divide the world of {world} ranks; choose sizes "
            "with a product that divides it"
        )
    if dp is not None and others * dp != world:
        raise ValueError(
            f"expected sizes with a product of {world} ranks, got {product} x dp={dp} = "
            f"{others * dp}; leave dp out to compute it"
        )
    return world // others


def _complete_order(order: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    names = order.split("-")
    for name in names:
        if name not in AXES:
            raise ValueError(
                f"expected an order of the axes {', '.join(AXES)}, joined by '-', the fastest "
                f"first, such as {DEFAULT_ORDER!r}, got {order!r} with {name!r}"
            )
        if names.count(name) > 1:
            raise ValueError(f"order {order!r} names axis {name} more than once")
    absent = tuple(axis for axis in AXES if axis not in names)
    for axis in absent:
        if sizes[axis] > 1:
            raise ValueError(
                f"expected axis {axis} of size {sizes[axis]} in the order, got {order!r}; only "
                "an axis of size 1 may be absent"
            )
    return (*names, *absent)


def rank_groups(
    order: str = DEFAULT_ORDER,
    world: int | None = None,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int | None = None,
    pp: int = 1,
    ep: int = 1,
) -> dict[str, list[list[int]]]:
    """Return the groups of every axis, without a process: ``{"tp": [[0, 1], ...], ...}``.

    Keys: tp, cp, dp, pp; mp (tp x pp, Megatron's model-parallel group: one complete copy of the
    model); dp_cp (ranks over which gradients are summed); with ep > 1 also ep and edp.
    """
    layout = make_layout(world, order, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    groups = {axis: layout.groups(axis) for axis in AXES}
    groups["mp"] = layout.groups("tp", "pp")
    groups["dp_cp"] = layout.groups("dp", "cp")
    if ep > 1:
        groups["ep"], groups["edp"] = layout.expert_groups()
    return groups


def drawing(layout: Layout, per_node: int = 8) -> str:
    """Return the layout as text: the ranks node by node with their coordinates, then the groups.

    ``per_node`` ranks share a node. Of a large world only the first nodes and groups are drawn; the
    text has the number of the others. Raises ValueError for ``per_node`` below 1.
    """
    if per_node < 1:
        raise ValueError(f"expected per_node to be 1 or more, got per_node={per_node}")
    sizes = " x ".join(f"{axis}={size}" for axis, size in layout.sizes.items())
    all_nodes = -(-layout.world // per_node)
    lines = [
        f"{_count(layout.world, 'rank')}: {sizes}",
        f"{_count(all_nodes, 'node')} of {per_node} ranks, the axis that varies fastest first",
    ]
    for node in range(min(NODES, all_nodes)):
        ranks = range(node * per_node, min((node + 1) * per_node, layout.world))
        lines += ["", f"node {node}", *_node_lines(layout, ranks)]
    if all_nodes > NODES:
        lines += ["", f"... and {_count(all_nodes - NODES, 'more node')}, not drawn"]
    lines += ["", "groups"]
    named = {axis: layout.groups(axis) for axis in layout.order}
    named["mp"] = layout.groups("tp", "pp")
    if layout.ep > 1:
        named["ep"], named["edp"] = layout.expert_groups()
    for name, groups in named.items():
        lines += _group_lines(name, groups, per_node)
    return "\n".join(lines)


def _node_lines(layout: Layout, ranks: range) -> list[str]:
    """Return a line of ranks and a line per axis larger than 1, in blocks of WIDTH."""
    cell = len(str(layout.world - 1)) + 2
    columns = (WIDTH - 8) // cell
    lines = []
    for start in range(0, min(len(ranks), NODE_RANKS), columns):
        block = ranks[start : min(start + columns, NODE_RANKS)]
        where = [layout.coordinates(rank) for rank in block]
        lines.append(f"{'rank':>8}" + "".join(f"{rank:>{cell}}" for rank in block))
        for axis in layout.order:
            if layout.sizes[axis] > 1:
                cells = "".join(f"{coordinates[axis]:>{cell}}" for coordinates in where)
                lines.append(f"{axis:>8}" + cells)
    if len(ranks) > NODE_RANKS:
        lines.append(f"    ... and {_count(len(ranks) - NODE_RANKS, 'more rank')}")
    return lines


def _group_lines(name: str, groups: list[list[int]], per_node: int) -> list[str]:
    """Return the count, size and location of the groups of an axis, and the first groups."""
    count = _count(len(groups), "group")
    if len(groups[0]) == 1:
        return [f"{name:>4}  {count} of 1: no communication"]
    across = sum(group[0] // per_node != group[-1] // per_node for group in groups)
    where = {0: "each inside one node", len(groups): "across nodes"}
    where_text = where.get(across, f"{across:,} of them across nodes")
    room, rows = WIDTH - 6, [""]
    for shown, group in enumerate(groups):
        text = _group_text(group, room)
        if rows[-1] and len(rows[-1]) + 1 + len(text) > room:
            rows.append("")
        if len(rows) > GROUP_ROWS:
            rows[-1] = f"... and {_count(len(groups) - shown, 'more group')}"
            break
        rows[-1] = f"{rows[-1]} {text}".strip()
    heading = f"{name:>4}  {count} of {len(groups[0]):,}, {where_text}"
    return [heading, *(" " * 6 + row for row in rows)]


def _group_text(group: list[int], room: int) -> str:
    """Return ``[0 4 8 12]``; the middle of a group too long for one line is left out."""
    text = "[" + " ".join(map(str, group)) + "]"
    if len(text) <= room:
        return text
    return f"[{' '.join(map(str, group[:6]))} ... {group[-1]}]"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
