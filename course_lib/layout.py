"""What a rank is, on paper: coordinates on the axes, and the groups that follow. No torch.

``order="tp-cp-dp-pp"`` names the axes from fastest to slowest: neighbouring ranks differ in the
first-named axis. Expert parallelism is a sub-division of data (and context) parallelism, so
``ep`` is no factor of the world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "tp-cp-dp-pp"
NODE_RANKS = 64  # ranks of one node that a drawing shows
GROUP_ROWS = 3  # lines of groups that a drawing shows before it says how many more there are


@dataclass(frozen=True)
class Layout:
    """How ``world`` ranks are laid out. ``order`` is from fastest to slowest axis."""

    order: tuple[str, ...]
    sizes: Mapping[str, int]
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of ``rank`` on each axis: its digits in a mixed-radix number."""
        if not 0 <= rank < self.world:
            raise ValueError(
                f"rank {rank} is not one of the {self.world} ranks 0..{self.world - 1}"
            )
        coordinates = {}
        for axis in self.order:
            rank, coordinates[axis] = divmod(rank, self.sizes[axis])
        return coordinates

    def groups(self, *axes: str) -> list[list[int]]:
        """Ranks that differ only on ``axes``: each group ascending, sorted by first rank."""
        unknown = set(axes) - set(self.order)
        if unknown:
            raise ValueError(f"unknown axis {sorted(unknown)}; this layout has {self.order}")
        others = set(self.order) - set(axes)
        steps = self._ranks_along(set(axes))
        return [[first + step for step in steps] for first in self._ranks_along(others)]

    def _ranks_along(self, axes: set[str]) -> list[int]:
        """The ranks whose coordinates on all other axes are 0, ascending."""
        ranks, stride = [0], 1
        for axis in self.order:
            size = self.sizes[axis]
            if axis in axes:  # all ranks so far are below stride, so this keeps them ascending
                ranks = [step * stride + rank for step in range(size) for rank in ranks]
            stride *= size
        return ranks

    def expert_groups(self) -> tuple[list[list[int]], list[list[int]]]:
        """The ep groups (blocks of dp·cp) and the groups that share the same experts (edp)."""
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
    """Check the sizes and the order, and fill in ``dp`` (what is left of ``world``).

    Raises ValueError that names the axis when sizes do not multiply to ``world``, when the order
    names an axis twice or not at all (one of size 1 may be absent), or when ep does not fit.
    """
    given = {"tp": tp, "cp": cp, "dp": 1 if dp is None else dp, "pp": pp, "ep": ep}
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {axis} has size {size!r}: a size is a whole number, 1 or more")
    others = tp * cp * pp
    if world is None:
        world = others * (dp or 1)
    dp = _data_parallel_size(world, dp, others, f"tp={tp} x cp={cp} x pp={pp}")
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    names = _complete_order(order, sizes)
    if dp * cp % ep:
        raise ValueError(
            f"ep={ep} does not divide dp x cp = {dp * cp}: experts are spread over the ranks that "
            "hold different data; choose a divisor"
        )
    return Layout(order=names, sizes={axis: sizes[axis] for axis in names}, ep=ep)


def _data_parallel_size(world: int, dp: int | None, others: int, product: str) -> int:
    """``dp``, or what is left of the world when ``others`` ranks hold one replica."""
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"a world of {world!r} ranks: a whole number, 1 or more, is wanted")
    if dp is None and world % others:
        raise ValueError(
            f"{world} ranks cannot be divided by {product} = {others}; "
            "choose sizes whose product divides the world"
        )
    if dp is not None and others * dp != world:
        raise ValueError(
            f"{product} x dp={dp} = {others * dp}, but the world has {world} ranks; "
            "leave dp out to let it be what is left"
        )
    return world // others


def _complete_order(order: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    names = order.split("-")
    for name in names:
        if name not in AXES:
            raise ValueError(
                f"order {order!r} names {name!r}; the axes are {', '.join(AXES)}, "
                f"joined by '-', the fastest first, for example {DEFAULT_ORDER!r}"
            )
        if names.count(name) > 1:
            raise ValueError(f"order {order!r} names axis {name} more than once")
    for axis in AXES:
        if axis not in names:
            if sizes[axis] > 1:
                raise ValueError(
                    f"order {order!r} leaves out axis {axis}, which has size {sizes[axis]}; "
                    f"only an axis of size 1 may be absent"
                )
            names.append(axis)
    return tuple(names)


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
    """The groups of every axis, without any process: ``{"tp": [[0, 1], ...], ...}``.

    Keys: tp, cp, dp, pp; mp (tp x pp, Megatron's model-parallel group: one whole copy of the
    model); dp_cp (ranks that average the same gradients); with ep > 1 also ep and edp.
    """
    layout = make_layout(world, order, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    groups = {axis: layout.groups(axis) for axis in AXES}
    groups["mp"] = layout.groups("tp", "pp")
    groups["dp_cp"] = layout.groups("dp", "cp")
    if ep > 1:
        groups["ep"], groups["edp"] = layout.expert_groups()
    return groups


def drawing(layout: Layout, per_node: int = 8, nodes: int = 8, width: int = 80) -> str:
    """The layout as text: the ranks node by node with their coordinates, then the groups.

    ``per_node`` ranks share a node; of more than ``nodes`` nodes the rest is left out, and the
    text says so. No line is longer than ``width`` characters (60 at least).
    """
    least = {"per_node": 1, "nodes": 1, "width": 60}
    for name, value in {"per_node": per_node, "nodes": nodes, "width": width}.items():
        if value < least[name]:
            raise ValueError(f"{name} is {value}: it must be {least[name]} or more")
    sizes = " x ".join(f"{axis}={size}" for axis, size in layout.sizes.items())
    all_nodes = -(-layout.world // per_node)
    lines = [
        f"{_count(layout.world, 'rank')}: {sizes}",
        f"{_count(all_nodes, 'node')} of {per_node}, the axis that varies fastest named first",
    ]
    for node in range(min(nodes, all_nodes)):
        ranks = range(node * per_node, min((node + 1) * per_node, layout.world))
        lines += ["", f"node {node}", *_node_lines(layout, ranks, width)]
    if all_nodes > nodes:
        lines += ["", f"... and {_count(all_nodes - nodes, 'more node')}, not drawn"]
    lines += ["", "groups"]
    named = {axis: layout.groups(axis) for axis in layout.order}
    named["mp"] = layout.groups("tp", "pp")
    if layout.ep > 1:
        named["ep"], named["edp"] = layout.expert_groups()
    for name, groups in named.items():
        lines += _group_lines(name, groups, per_node, width)
    return "\n".join(lines)


def _node_lines(layout: Layout, ranks: range, width: int) -> list[str]:
    """A line of ranks and a line for each axis larger than 1, cut into blocks of ``width``."""
    cell = len(str(layout.world - 1)) + 2
    columns = (width - 8) // cell
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


def _group_lines(name: str, groups: list[list[int]], per_node: int, width: int) -> list[str]:
    """How many groups, how large, whether they stay inside a node, and the first of them."""
    count = _count(len(groups), "group")
    if len(groups[0]) == 1:
        return [f"{name:>4}  {count} of 1: no communication"]
    across = sum(group[0] // per_node != group[-1] // per_node for group in groups)
    where = {0: "each inside one node", len(groups): "across nodes"}
    where_text = where.get(across, f"{across:,} of them across nodes")
    room = width - 6
    rows = [""]
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
    """``[0 4 8 12]``; a group too long for one line is cut in the middle."""
    text = "[" + " ".join(map(str, group)) + "]"
    if len(text) <= room:
        return text
    return f"[{' '.join(map(str, group[:6]))} ... {group[-1]}]"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
