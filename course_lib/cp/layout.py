"""Which positions of a sequence each rank holds, and what its queries may see of the others' keys.

A sequence of S positions is cut into equal chunks, numbered in order. n ranks hold:

* ``CONTIGUOUS``: rank i chunk i of n. Under a causal mask the last rank then computes nearly n
  times as much as the first, and everybody waits for it.
* ``ZIGZAG``: rank i chunks i and 2n-1-i of 2n, an early and a late one: equal work for all.

Positions are all that a layout decides: tokens, targets and the positions that RoPE turns by
are indexed with the same numbers (:func:`shard`), so that they cannot disagree.

Letters: S positions of the whole sequence, s = S/n those of one rank, B sequences.
Source: zig-zag as in zhuzilin/ring-flash-attention and Llama 3 (arXiv:2407.21783, 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from course_lib.mesh import Axis


@dataclass(frozen=True)
class SequenceLayout:
    """``chunks(rank, n)`` are the numbers of the chunks that a rank holds, ascending.

    Every rank holds ``per_rank`` of them, so that the sequence is cut into ``per_rank * n``.
    """

    name: str
    per_rank: int
    chunks: Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class Nested(SequenceLayout):
    """See :func:`nested`."""

    ring: SequenceLayout
    heads: int


CONTIGUOUS = SequenceLayout("contiguous", 1, lambda rank, n: (rank,))
ZIGZAG = SequenceLayout("zigzag", 2, lambda rank, n: (rank, 2 * n - 1 - rank))


def nested(ring: SequenceLayout, heads: int) -> Nested:
    """The layout of a grid: ``ring`` cuts the sequence for every run of ``heads`` neighbours, who
    cut their part once more, contiguously. Rank i ``heads`` + j has piece j of part i.

    With zig-zag and 4 ranks in runs of 2: of 8 chunks run 0 has 0 1 6 7 and run 1 has 2 3 4 5, so
    that the ranks have (0, 1), (6, 7), (2, 3), (4, 5).
    """

    def chunks(rank: int, n: int) -> tuple[int, ...]:
        run, place = divmod(rank, heads)
        of_run = [chunk * heads + i for chunk in ring.chunks(run, n // heads) for i in range(heads)]
        return tuple(of_run[place * ring.per_rank : (place + 1) * ring.per_rank])

    return Nested(f"{ring.name} in runs of {heads}", ring.per_rank, chunks, ring, heads)


def in_order(layout: SequenceLayout, n: int) -> bool:
    """Whether the shards of ranks 0, 1, ... put one behind the other are the sequence."""
    return [c for rank in range(n) for c in layout.chunks(rank, n)] == list(
        range(layout.per_rank * n)
    )


@dataclass(frozen=True)
class Part:
    """The rows of a rank's queries and of a block of keys between which attention is computed.

    ``causal``: row i of the queries sees rows 0..i of the keys; else every query sees every key.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs that is."""
        queries, keys = (rows.stop - rows.start for rows in (self.queries, self.keys))
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def visible(layout: SequenceLayout, n: int, mine: int, theirs: int, rows: int) -> Part | None:
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
        return Part(everything, everything, causal=True)
    my_chunks, their_chunks = layout.chunks(mine, n), layout.chunks(theirs, n)
    too_early = sum(chunk < their_chunks[0] for chunk in my_chunks)
    seen = sum(chunk < my_chunks[-1] for chunk in their_chunks)
    size = rows // layout.per_rank
    if seen == 0:
        return None
    return Part(slice(too_early * size, rows), slice(0, seen * size), causal=False)


def view_of(axis: Axis, layout: SequenceLayout, rows: int) -> Callable[[int], Part | None]:
    """:func:`visible` for this rank: a function of whose keys they are."""
    if rows % layout.per_rank:
        raise ValueError(
            f"axis {axis.name}, rank {axis.rank}: {rows} positions a rank are no "
            f"{layout.per_rank} equal chunks of the {layout.name} layout; cut sequences with "
            "shard(tokens, targets, axis, layout)"
        )
    return lambda whose: visible(layout, axis.size, axis.rank, whose, rows)


def pairs(layout: SequenceLayout, seq_len: int, n: int) -> list[int]:
    """(query, key) pairs that each rank computes, for one head of one sequence."""
    rows = shard_length(layout, seq_len, n)
    parts = [[visible(layout, n, mine, theirs, rows) for theirs in range(n)] for mine in range(n)]
    return [sum(part.pairs for part in of_rank if part) for of_rank in parts]


def imbalance(layout: SequenceLayout, seq_len: int, n: int) -> Fraction:
    """Work of the busiest rank over the mean: contiguous 2 - (s+1)/(S+1), zig-zag 1."""
    work = pairs(layout, seq_len, n)
    return Fraction(max(work) * n, sum(work))


def shard_length(layout: SequenceLayout, seq_len: int, n: int, axis: str = "cp") -> int:
    """Positions of one rank, S/n. Raises ValueError when the chunks cannot be equal."""
    pieces = layout.per_rank * n
    if seq_len % pieces or seq_len < 1:
        raise ValueError(
            f"axis {axis}: {seq_len} positions cannot be cut into the {pieces} equal chunks that "
            f"the {layout.name} layout gives {n} ranks; pad the sequence to "
            f"{max(1, -(-seq_len // pieces)) * pieces} (targets of the padding: IGNORE_INDEX)"
        )
    return seq_len // n


def positions(seq_len: int, axis: Axis, layout: SequenceLayout) -> Tensor:
    """The positions that this rank holds, (s), ascending, int64."""
    size = shard_length(layout, seq_len, axis.size, axis.name) // layout.per_rank
    chunk_p = torch.tensor(layout.chunks(axis.rank, axis.size), device=axis.context.device)
    row_r = torch.arange(size, device=axis.context.device)
    return (chunk_p[:, None] * size + row_r).flatten()


def shard(
    tokens_BS: Tensor, targets_BS: Tensor, axis: Axis, layout: SequenceLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's (tokens_Bs, targets_Bs, positions_s) of sequences that every rank holds whole.

    Targets are made before cutting: the next token of a chunk's last one is on another rank.
    """
    mine_s = positions(tokens_BS.shape[1], axis, layout)
    return tokens_BS[:, mine_s], targets_BS[:, mine_s], mine_s
