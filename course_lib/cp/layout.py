"""Which positions of a sequence each rank holds, and which keys of other ranks its queries see.

A sequence of S positions is split into equal chunks, numbered in order. With n ranks:

* ``CONTIGUOUS``: rank i holds chunk i of n. Under a causal mask the last rank computes nearly n
  times as much as the first, and all ranks wait for it.
* ``ZIGZAG``: rank i holds chunks i and 2n-1-i of 2n, an early and a late one: equal work on all
  ranks.

A layout decides positions only. :func:`shard` selects tokens, targets and the positions for RoPE
with the same indices, so they cannot disagree. :class:`PositionsCheck` checks a model's positions.

Letters: S positions of the whole sequence, s = S/n those of one rank, B sequences.
Source: zig-zag as in zhuzilin/ring-flash-attention and Llama 3 (arXiv:2407.21783, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.mesh import Axis


@dataclass(frozen=True)
class SequenceLayout:
    """``chunks(rank, n)`` returns the numbers of the chunks that a rank holds, ascending.

    Every rank holds ``per_rank`` chunks, so the sequence is split into ``per_rank * n``.
    """

    name: str
    per_rank: int
    chunks: Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Nested(SequenceLayout):
    """The layout that :func:`nested` returns: ``ring`` over groups of ``heads`` neighbors."""

    ring: SequenceLayout
    heads: int


CONTIGUOUS = SequenceLayout("contiguous", 1, lambda rank, n: (rank,))
ZIGZAG = SequenceLayout("zigzag", 2, lambda rank, n: (rank, 2 * n - 1 - rank))


def nested(ring: SequenceLayout, heads: int) -> Nested:
    """Return the layout for USP, two-dimensional context parallelism.

    ``ring`` splits the sequence over groups of ``heads`` neighboring ranks. Each group splits its
    shard again, contiguously: rank i ``heads`` + j has chunk j of group i's shard.

    With zig-zag and 4 ranks in groups of 2: of 8 chunks group 0 has 0 1 6 7 and group 1 has
    2 3 4 5, so the ranks have (0, 1), (6, 7), (2, 3), (4, 5).
    """

    def chunks(rank: int, n: int) -> tuple[int, ...]:
        group, place = divmod(rank, heads)
        held = [chunk * heads + i for chunk in ring.chunks(group, n // heads) for i in range(heads)]
        return tuple(held[place * ring.per_rank : (place + 1) * ring.per_rank])

    return Nested(f"{ring.name} in groups of {heads}", ring.per_rank, chunks, ring, heads)


def in_order(layout: SequenceLayout, n: int) -> bool:
    """Whether the shards of ranks 0, 1, ..., concatenated, are the sequence in order."""
    held = [chunk for rank in range(n) for chunk in layout.chunks(rank, n)]
    return held == list(range(len(held)))


@dataclass(frozen=True)
class Tile:
    """Rows of a rank's queries and rows of a block of keys between which attention is computed.

    ``causal``: row i of the queries sees rows 0..i of the keys; else every query sees every key.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs to compute."""
        queries, keys = (rows.stop - rows.start for rows in (self.queries, self.keys))
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def visible(layout: SequenceLayout, n: int, mine: int, theirs: int, rows: int) -> Tile | None:
    """What the queries of rank ``mine`` see of the keys of rank ``theirs``; each has ``rows``.

    None when they see nothing. A chunk sees all of every earlier chunk and, causally, itself.
    Chunks are held in order, so a rank's own block is an ordinary causal one. Of another rank's
    block, the query chunks that come after its first chunk see the key chunks that come before
    my last: with both layouts that is a rectangle without any mask, half the block in zig-zag.

    Zig-zag, n = 2, 8 positions, so that rank 0 holds 0 1 6 7 (chunks 0 and 3) and rank 1 holds
    2 3 4 5 (chunks 1 and 2). Queries of rank 0 on keys of rank 1: chunk 0 comes before all of
    them (``too_early`` = 1), chunk 3 after both (``seen`` = 2): rows 2..3 see rows 0..3. Queries
    of rank 1 on keys of rank 0: none is too early, and of the keys chunk 0 alone comes before
    chunk 2 (``seen`` = 1): rows 0..3 see rows 0..1. Both are 8 pairs, and nothing is masked:

        key       0 1 6 7   2 3 4 5
        query 0   x . . .   . . . .
              1   x x . .   . . . .
              6   x x x .   x x x x
              7   x x x x   x x x x
              2   x x . .   x . . .
              3   x x . .   x x . .
              4   x x . .   x x x .
              5   x x . .   x x x x
    """
    everything = slice(0, rows)
    if mine == theirs:
        return Tile(everything, everything, causal=True)
    my_chunks, their_chunks = layout.chunks(mine, n), layout.chunks(theirs, n)
    too_early = sum(chunk < their_chunks[0] for chunk in my_chunks)
    seen = sum(chunk < my_chunks[-1] for chunk in their_chunks)
    size = rows // layout.per_rank
    if seen == 0:
        return None
    return Tile(slice(too_early * size, rows), slice(0, seen * size), causal=False)


def visible_here(axis: Axis, layout: SequenceLayout, rows: int) -> Callable[[int], Tile | None]:
    """Return :func:`visible` for this rank's queries, as a function of the keys' source rank."""
    if rows % layout.per_rank:
        raise ValueError(
            f"axis {axis.name}, rank {axis.rank}: expected {layout.per_rank} equal chunks of the "
            f"{layout.name} layout, got {rows} positions per rank; split sequences with "
            "shard(tokens, targets, axis, layout)"
        )
    return lambda source: visible(layout, axis.size, axis.rank, source, rows)


def pairs(layout: SequenceLayout, seq_len: int, n: int) -> list[int]:
    """Count the (query, key) pairs that each rank computes, for one head of one sequence."""
    rows = shard_length(layout, seq_len, n)
    tiles = [[visible(layout, n, mine, theirs, rows) for theirs in range(n)] for mine in range(n)]
    return [sum(tile.pairs for tile in of_rank if tile) for of_rank in tiles]


def imbalance(layout: SequenceLayout, seq_len: int, n: int) -> Fraction:
    """Return the busiest rank's work over the mean: contiguous 2 - (s+1)/(S+1), zig-zag 1."""
    work = pairs(layout, seq_len, n)
    return Fraction(max(work) * n, sum(work))


def shard_length(layout: SequenceLayout, seq_len: int, n: int, axis: str = "cp") -> int:
    """Return S/n, the positions per rank. Raises ValueError when chunks cannot be equal."""
    chunks = layout.per_rank * n
    if seq_len % chunks or seq_len < 1:
        raise ValueError(
            f"axis {axis}: {seq_len} positions cannot be split into the {chunks} equal chunks that "
            f"the {layout.name} layout needs for {n} ranks; pad the sequence to "
            f"{max(1, -(-seq_len // chunks)) * chunks} (targets of the padding: IGNORE_INDEX)"
        )
    return seq_len // n


def positions(seq_len: int, axis: Axis, layout: SequenceLayout) -> Tensor:
    """Return the positions that this rank holds, (s), ascending, int64."""
    size = shard_length(layout, seq_len, axis.size, axis.name) // layout.per_rank
    chunk_p = torch.tensor(layout.chunks(axis.rank, axis.size), device=axis.context.device)
    row_r = torch.arange(size, device=axis.context.device)
    return (chunk_p[:, None] * size + row_r).flatten()


def shard(
    tokens_BS: Tensor, targets_BS: Tensor, axis: Axis, layout: SequenceLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (tokens_Bs, targets_Bs, positions_s) of sequences that all ranks hold.

    Targets are made before the split: the next token of a chunk's last one is on another rank.
    """
    own_s = positions(tokens_BS.shape[1], axis, layout)
    return tokens_BS[:, own_s], targets_BS[:, own_s], own_s


class PositionsCheck:
    """Before each attention, check that the positions are those that this rank holds.

    A model that is called without positions counts 0..s-1 on every rank: RoPE and mask would be
    wrong, and the loss would still fall. On a GPU the comparison waits for the device, so there
    only the first forward of each length is checked.
    """

    def __init__(self, axis: Axis, layout: SequenceLayout, max_seq_len: int) -> None:
        self.axis, self.layout, self.max_seq_len = axis, layout, max_seq_len
        self.expected: dict[int, Tensor] = {}  # by number of rows

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        given_s = args[1]
        rows = given_s.shape[-1]
        if rows not in self.expected:
            self._check_length(rows * self.axis.size)
            own_s = positions(rows * self.axis.size, self.axis, self.layout)
            self.expected[rows] = own_s.to(given_s.device)
        elif given_s.device.type != "cpu":
            return
        if not torch.equal(given_s, self.expected[rows]):
            raise ValueError(
                f"axis {self.axis.name}, rank {self.axis.rank}: expected this rank's positions in "
                f"the {self.layout.name} layout, {_brief(self.expected[rows])}, got "
                f"{_brief(given_s)}: call model(tokens, positions), both from "
                "cp.shard(tokens, targets, axis, layout) with this axis and layout, and "
                "model.cross_entropy(logits, targets)"
            )

    def _check_length(self, seq_len: int) -> None:
        if seq_len > self.max_seq_len:
            raise ValueError(
                f"axis {self.axis.name}: {self.axis.size} ranks hold {seq_len} positions "
                f"together, but the model was built for max_seq_len={self.max_seq_len}; shorten "
                "the sequence or build with a larger one"
            )


def _brief(positions_s: Tensor) -> str:
    """Write consecutive positions as ranges: ``0..5 42..47``, the first four."""
    ranges: list[list[int]] = []
    for position in positions_s.flatten().tolist():
        if ranges and position == ranges[-1][1] + 1:
            ranges[-1][1] = position
        else:
            ranges.append([position, position])
    shown = " ".join(f"{first}..{last}" for first, last in ranges[:4])
    return shown if len(ranges) <= 4 else f"{shown} ..."
