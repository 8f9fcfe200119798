"""The loop of a server: ask the scheduler for work, run it, record the tokens.

:class:`Replica` is one model, whole or cut by tensor parallelism, with experts shared out or not.
Data parallelism is one replica on each rank, each with its own requests (:func:`share`); replicas
send nothing. Only shared experts tie replicas together: then every replica takes every step, with
or without work, because an all-to-all waits for all ranks.

Pace: a step of a paced run takes ``pace["F"]``, whatever it holds (the weights are read once),
and ``pace["token"]`` for each token in it; ``pace["F", 2]`` is that of stage 2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.ep import ExpertParallelMoE
from course_lib.inference.cache import Cache
from course_lib.inference.sampling import Chooser, chooser
from course_lib.inference.scheduler import NOTHING, Request, Scheduler, Work
from course_lib.mesh import Axis, Mesh
from course_lib.model import Decoder
from course_lib.trace.spans import Sleep


@dataclass
class Served:
    """What came out: ``tokens`` of each request by its number, and when each was known.

    ``times`` are seconds on the clock of the trace, from the ``start`` of the loop.
    """

    tokens: dict[int, list[int]]
    start: float = field(default_factory=time.perf_counter)
    times: dict[int, list[float]] = field(default_factory=dict)
    steps: int = 0

    def stamp(self, work: Work) -> None:
        """Note that the tokens of ``work`` are known."""
        now = time.perf_counter() - self.start
        for number in work.requests:
            self.times.setdefault(number, []).append(now)

    @property
    def throughput(self) -> float:
        """Tokens per second, from the start to the last token."""
        stamps = [stamp for own in self.times.values() for stamp in own]
        return len(stamps) / max(stamps) if stamps else 0.0

    @property
    def latency(self) -> float:
        """Seconds from one token of a request to the next, on average over all."""
        gaps = [later - earlier for own in self.times.values() for earlier, later in pairwise(own)]
        return sum(gaps) / len(gaps) if gaps else 0.0


class Replica:
    """A full model, not a stage, with its cache. ``choose`` left out is greedy."""

    def __init__(
        self, model: Decoder, mesh: Mesh, slots: int, choose: Chooser | None = None
    ) -> None:
        if model.embedding is None or model.head is None:
            raise ValueError("this is a stage, not a model: serve stages with serve_pipeline")
        self.model, self.mesh = model, mesh
        self.cache = self.make_cache(slots)
        self.choose = choose or chooser(model)

    def make_cache(self, slots: int) -> Cache:
        """Return the cache of this kind of replica: all of it on every rank."""
        if self.mesh.cp.size > 1:
            raise ValueError(
                f"axis cp has {self.mesh.cp.size} ranks, and this replica would hold the whole "
                "cache on each: take ContextReplica"
            )
        return Cache(self.model, slots)

    def step(self, work: Work) -> Tensor:
        """One forward, and the next token of each request, (B)."""
        with forward_span(self.mesh, work):
            logits_BSV = self.model(*self.cache.open(work))
        return self.choose(logits_BSV[:, -1], work)


def sharing_experts(model: nn.Module) -> Axis | None:
    """Return all ranks that send tokens to each other's experts; None without such ranks."""
    layers = (module for module in model.modules() if isinstance(module, ExpertParallelMoE))
    return next((layer.data for layer in layers), None)


@contextmanager
def forward_span(
    mesh: Mesh, work: Work, stage: int | None = None, mb: int | None = None
) -> Iterator[None]:
    """Measure a forward; in a paced run its arithmetic takes what its tokens take.

    What it sends takes its own time on top: the pace is that of one rank's device.
    """
    trace, tokens = mesh.trace, len(work.slots) * work.width
    step, each = (mesh.conditions.pace_of(op, stage) for op in ("F", "token"))
    seconds = step + tokens * each if work else 0.0
    first, start = len(trace.spans), time.perf_counter()
    with trace.span("F", stage=stage, mb=mb, label="prefill" * work.is_prefill):
        yield
        sent = sum(span.duration for span in trace.spans[first:] if span.is_comm)
        time.sleep(max(start + seconds + sent - time.perf_counter(), 0.0))
    if seconds:
        trace.sleeps.append(Sleep(seconds, time.perf_counter() - start - sent))


@torch.no_grad()
def serve(replica: Replica, scheduler: Scheduler) -> Served:
    """Run until every request has its tokens; with shared experts, until all replicas are done."""
    scheduler.check_fits(replica.model.config, replica.cache.slots)
    if scheduler.groups > 1:
        raise ValueError(
            f"expected a scheduler of 1 group, got {scheduler.groups}: groups alternate in a "
            "pipeline; one model serves one group"
        )
    served, others = Served(scheduler.tokens), sharing_experts(replica.model)
    try:
        while _anyone_busy(scheduler, others):
            work = NOTHING if scheduler.done else scheduler.next_work()
            if work or others is not None:  # else the next request is still to come
                scheduler.record(work, replica.step(work).tolist())
                served.stamp(work)
            served.steps += 1
    finally:
        replica.cache.leave()
    return served


def _anyone_busy(scheduler: Scheduler, others: Axis | None) -> bool:
    """Whether a step is needed here, or by a replica that shares experts (one number, control)."""
    if others is None:
        return not scheduler.done
    busy = torch.tensor(int(not scheduler.done), device=others.context.device)
    return bool(comm.all_reduce(busy, others, control=True))


def share(requests: Sequence[Request], axis: Axis) -> list[Request]:
    """The requests that this replica of data parallelism answers: every n-th."""
    return list(requests[axis.rank :: axis.size])
