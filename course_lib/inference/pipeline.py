"""Decoding through a pipeline: groups of requests take turns, so that all stages are busy.

A token needs all stages one after the other and the next token needs this one: a single batch
keeps one stage of p busy. With g groups of requests, stage r works on group k while stage r+1
works on group k-1. Time goes in ticks; a round has max(g, p) of them:

    in tick t rank r does turn t - r:  group (t - r) mod max(g, p), if there is such a group

so that the share of busy stages is g / max(g, p): 1/p with one group, 1 with p groups or more.
Each tick ends with one batch of messages: activations to the next stage, and the tokens of the turn
that is over from the last stage to all others, who keep the same book. One batch, posted by all
in the same tick: nothing can wait in the wrong order, on nccl neither.

More groups give throughput, not latency: a token takes max(g, p) ticks.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import count

import torch
from torch import Tensor

from course_lib import comm, pp
from course_lib.inference.book import NOTHING, Book, Work, check_fits
from course_lib.inference.cache import Cache
from course_lib.inference.choice import Chooser, chooser
from course_lib.inference.replica import Served, forward_span, sharing_experts
from course_lib.mesh import Mesh
from course_lib.model import Decoder, ModelConfig

TOKEN_BYTES = 8


def cut(model: Decoder, mesh: Mesh) -> Decoder:
    """The stage of ``model`` that this rank of ``mesh.pp`` serves, as even as can be."""
    layers = pp.partition(len(model.blocks), mesh.pp.size)
    first = sum(layers[: mesh.pp.rank])
    return model.stage(first, first + layers[mesh.pp.rank])


def busy_share(groups: int, stages: int) -> Fraction:
    """Of the ticks of a round, how many a stage works."""
    return Fraction(groups, max(groups, stages))


def pipeline_bytes(config: ModelConfig, tokens: int, chosen: int, stages: int) -> Fraction:
    """Bytes of all ranks together: ``tokens`` go p-1 hops, the ``chosen`` ones to p-1 ranks."""
    row = config.hidden * config.dtype.itemsize
    return Fraction((stages - 1) * (tokens * row + chosen * TOKEN_BYTES))


class Stage:
    """One rank's stage with the cache of its layers; ``slots`` are those of all groups."""

    def __init__(
        self, model: Decoder, mesh: Mesh, slots: int, choose: Chooser | None = None
    ) -> None:
        if mesh.cp.size > 1:
            raise ValueError("cp with pp: prompts are not cut over cp in a pipeline; drop one axis")
        if sharing_experts(model) is not None:
            raise ValueError(
                "experts shared by replicas with pp: every tick of one pipeline would wait for the "
                "same tick of all others; keep all experts of a stage on each replica"
            )
        self.model, self.mesh = model, mesh
        self.cache = Cache(model, slots)
        self.choose = choose or chooser(model)

    def step(self, work: Work, x_BSD: Tensor | None, group: int) -> Tensor:
        """x_BSD for the next stage; on the last one the tokens, (B)."""
        tokens_BS, positions_BS = self.cache.open(work)
        with forward_span(self.mesh, work, stage=self.mesh.pp.rank, mb=group):
            y = self.model(tokens_BS if x_BSD is None else x_BSD, positions_BS)
        return y if self.model.head is None else self.choose(y[:, -1], work)


class Turns:
    """What each turn does, read from the book in the order of the turns, on every rank alike."""

    def __init__(self, book: Book, stages: int) -> None:
        self.book, self.stages = book, stages
        self.period = max(book.groups, stages)
        self.works: dict[int, Work] = {}

    def group(self, turn: int) -> int:
        """Whose turn it is; a group that does not exist if the number is ``groups`` or more."""
        return turn % self.period

    def work(self, turn: int) -> Work:
        """A turn's work, from when it is first asked for until its tokens are recorded."""
        if turn < 0 or self.group(turn) >= self.book.groups:
            return NOTHING
        if turn not in self.works:
            self.works[turn] = self.book.next_work(self.group(turn))
        return self.works[turn]

    def over(self, tick: int) -> Work:
        """What the last stage has done in this tick."""
        return self.works.pop(tick - self.stages + 1, NOTHING)


@torch.no_grad()
def serve_pipeline(stage: Stage, book: Book) -> Served:
    """Run until every request of ``book`` has its tokens; all ranks of ``mesh.pp`` return them."""
    axis, config = stage.mesh.pp, stage.model.config
    check_fits(book.waiting, config)
    if book.slots > stage.cache.slots:
        raise ValueError(f"a book of {book.slots} slots, but the cache has {stage.cache.slots}")
    turns, served = Turns(book, axis.size), Served(book.tokens)
    x_BSD = None
    try:
        for tick in count():
            if book.done:
                break
            turn = tick - axis.rank
            work = turns.work(turn)
            y = stage.step(work, x_BSD, turns.group(turn)) if work else None
            # The rank before has just done the turn that is this rank's next one.
            coming = turns.work(turn + 1) if axis.rank > 0 else NOTHING
            over = turns.over(tick)
            x_BSD, tokens_B = _swap(stage, y, coming, over)
            if tokens_B is not None:
                book.record(over, tokens_B.tolist())
                served.stamp(over)
            served.steps += 1
    finally:
        stage.cache.leave()
    return served


def _swap(
    stage: Stage, y: Tensor | None, coming: Work, over: Work
) -> tuple[Tensor | None, Tensor | None]:
    """The batch of messages of a tick: (x of the next turn, tokens of the turn that is over)."""
    axis, device = stage.mesh.pp, stage.cache.device
    is_last = axis.rank == axis.size - 1
    to = range(axis.size - 1) if is_last else [axis.rank + 1]
    sends = [(y, rank) for rank in to if y is not None]
    receives = []
    if coming:
        shape = len(coming.slots), coming.width, stage.model.config.hidden
        dtype = stage.model.config.dtype
        receives.append((torch.empty(shape, dtype=dtype, device=device), axis.previous))
    if over and not is_last:
        like = torch.empty(len(over.slots), dtype=torch.int64, device=device)
        receives.append((like, axis.size - 1))
    received = comm.start_exchange(axis, sends, receives).wait()
    x_BSD = received[0] if coming else None
    if is_last:
        return x_BSD, y
    return x_BSD, received[-1] if over else None
