"""Decoding through a pipeline: groups of requests alternate so that all stages are busy.

A token passes through all stages in order, and the next token needs this one. A single batch
therefore keeps one stage of p busy. With g groups of requests, stage r works on group k while
stage r+1 works on group k-1. Time advances in ticks; a round has max(g, p) of them:

    in tick t rank r runs iteration t - r:  group (t - r) mod max(g, p), if there is such a group

so that the share of busy stages is g / max(g, p): 1/p with one group, 1 with p groups or more.
Each tick ends with one batch of messages: activations to the next stage, and the tokens of the
finished iteration from the last stage to all others, so that every rank's scheduler agrees. All
ranks post this batch in the same tick. Messages therefore cannot wait in the wrong order, not even
on nccl.

More groups raise throughput but do not lower latency: a token takes max(g, p) ticks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from course_lib import comm, pp
from course_lib.inference.cache import Cache
from course_lib.inference.replica import Served, forward_span, sharing_experts
from course_lib.inference.sampling import Chooser, chooser
from course_lib.inference.scheduler import NOTHING, Scheduler, Work
from course_lib.mesh import Mesh
from course_lib.model import Decoder


def cut(model: Decoder, mesh: Mesh) -> Decoder:
    """The stage of ``model`` that this rank of ``mesh.pp`` serves, as even as can be."""
    layers = pp.partition(len(model.blocks), mesh.pp.size)
    first = sum(layers[: mesh.pp.rank])
    return model.stage(first, first + layers[mesh.pp.rank])


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


class Iterations:
    """The work of each iteration, read from the scheduler in the same order on every rank."""

    def __init__(self, scheduler: Scheduler, stages: int) -> None:
        self.scheduler, self.stages = scheduler, stages
        self.period = max(scheduler.groups, stages)
        self.works: dict[int, Work] = {}

    def group(self, iteration: int) -> int:
        """The group of an iteration; no group has it if the result is ``groups`` or more."""
        return iteration % self.period

    def work(self, iteration: int) -> Work:
        """Return the work of an iteration, from its first call until its tokens are recorded."""
        if iteration < 0 or self.group(iteration) >= self.scheduler.groups:
            return NOTHING
        if iteration not in self.works:
            self.works[iteration] = self.scheduler.next_work(self.group(iteration))
        return self.works[iteration]

    def over(self, tick: int) -> Work:
        """Return the work that the last stage has finished in this tick."""
        return self.works.pop(tick - self.stages + 1, NOTHING)


@torch.no_grad()
def serve_pipeline(stage: Stage, scheduler: Scheduler) -> Served:
    """Run until every request has its tokens; all ranks of ``mesh.pp`` return them."""
    axis = stage.mesh.pp
    scheduler.check_fits(stage.model.config, stage.cache.slots)
    iterations, served = Iterations(scheduler, axis.size), Served(scheduler.tokens)
    x_BSD = None
    try:
        while not scheduler.done:
            tick = served.steps
            iteration = tick - axis.rank
            work = iterations.work(iteration)
            y = stage.step(work, x_BSD, iterations.group(iteration)) if work else None
            # The previous rank has just finished the iteration that this rank runs next.
            coming = iterations.work(iteration + 1) if axis.rank > 0 else NOTHING
            over = iterations.over(tick)
            x_BSD, tokens_B = _exchange(stage, y, coming, over)
            if tokens_B is not None:
                scheduler.record(over, tokens_B.tolist())
                served.stamp(over)
            served.steps += 1
    finally:
        stage.cache.leave()
    return served


def _exchange(
    stage: Stage, y: Tensor | None, coming: Work, over: Work
) -> tuple[Tensor | None, Tensor | None]:
    """Exchange the messages of a tick: (x of the next iteration, tokens of the finished one)."""
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
