"""Run a plan on real ranks: compare it with one process, and measure bytes, memory and time.

Compute is padded by sleep before the forward and the backward of each block, and the links are
emulated; groups, messages and waiting are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from course_lib import comm, compose, ep, zero
from course_lib.compose import Experts, Plan
from course_lib.data import batch
from course_lib.grading.plans.levels import Level, Pace
from course_lib.launch import run
from course_lib.ledger import wire_bytes_by_axis
from course_lib.mesh import Links, Mesh, make_mesh
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.planner import Configuration
from course_lib.trace import Trace
from course_lib.trace.memory import SavedActivations, State

STEPS = 2  # the second one after an update, with padded compute
TOLERANCE = 1e-9  # relative, in float64: sums in another order, and nothing else


@dataclass(frozen=True)
class Job:
    """The training job of a level: ``sequences`` of ``seq_len`` tokens per step."""

    config: ModelConfig
    sequences: int
    seq_len: int
    experts: Experts | None = None


@dataclass(frozen=True)
class Ran:
    """The measurements of a run.

    ``off``: the largest relative difference between a loss, or the norm of the whole gradient, and
    the value of one process. ``sent``: bytes that the busiest rank sent in the last step, by axis.
    ``state_bytes``: bytes per rank between steps. ``saved_bytes``: peak bytes per rank that were
    saved for backward. ``seconds``: duration of the last step.
    """

    off: float
    sent: Mapping[str, Fraction]
    state_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    seconds: float
    traces: Sequence[Trace] = field(default=(), repr=False, compare=False)

    @property
    def same(self) -> bool:
        """Whether losses and gradient norms equal the losses and norms of one process."""
        return self.off < TOLERANCE

    @property
    def most_bytes(self) -> int:
        """Bytes of state and saved activations on the rank that needs most."""
        return max(sum(two) for two in zip(self.state_bytes, self.saved_bytes, strict=True))


class OutOfMemory(MemoryError):
    """A rank exceeded its memory limit while it saved activations for backward."""


class _Limited(SavedActivations):
    """The meter of saved activations, with a limit of ``room`` bytes."""

    def __init__(self, room: float, *state: State) -> None:
        super().__init__(*state)
        self.room = room

    def _pack(self, tensor: Tensor) -> Any:
        saved = super()._pack(tensor)
        if self.now > self.room:
            raise OutOfMemory(
                f"it saved {self.now:,} bytes of activations, but the limit leaves "
                f"{max(self.room, 0):,.0f} bytes beside the state"
            )
        return saved


@dataclass(frozen=True)
class _OfRank:
    losses: list[float]
    norms: list[float]
    state_bytes: int
    saved_bytes: int
    seconds: float


def run_plan(which: Level, plan: Configuration) -> Ran:
    """Run ``plan`` under the conditions of a level: its limit, its links, its padding."""
    sizes, how = which.in_library(plan)
    return trial(
        which.job,
        sizes,
        how,
        limit=which.limit_bytes,
        pace=which.pace(plan),
        links=which.links,
    )


def trial(
    job: Job,
    sizes: Mapping[str, int],
    plan: Plan,
    *,
    limit: float = inf,
    pace: Pace | None = None,
    links: Links | None = None,
    timeout: float = 120,
) -> Ran:
    """Train two steps on tp x cp x dp x pp ranks, and compare with one process.

    ``pace`` pads forward and backward in the last step, and each W of a split backward in all
    steps. Raises RankError with :class:`OutOfMemory` if state and saved activations of a rank
    exceed ``limit`` bytes.
    """
    pace = pace or Pace((0.0, 0.0), (0.0, 0.0), {})
    n = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    results = run(
        _train, job, dict(sizes), plan, limit, pace,
        n=n, pace=dict(pace.weights), links=links, timeout=timeout,
    )  # fmt: skip
    losses, norms = _reference(job)
    pairs = [
        (got, right)
        for rank in results
        for got, right in zip([*rank.losses, *rank.norms], [*losses, *norms], strict=True)
    ]
    return Ran(
        off=max(abs(got - right) / abs(right) for got, right in pairs),
        sent={
            axis: max(ledger.wire_bytes(axis) for ledger in results.ledgers)
            for axis in wire_bytes_by_axis(results.ledgers)
        },
        state_bytes=tuple(rank.state_bytes for rank in results),
        saved_bytes=tuple(rank.saved_bytes for rank in results),
        seconds=max(rank.seconds for rank in results),
        traces=results.traces,
    )


def _train(
    job: Job,
    sizes: dict[str, Any],
    plan: Plan,
    limit: float,
    pace: Pace,
) -> _OfRank:
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(_model(job), mesh, plan, _optimizer)
    sharded = [o for o in trainer.optimizers if isinstance(o, zero.Zero3)]
    gathered = [buffer for one in sharded for buffer in one.buffers]  # neither state nor saved
    losses, norms, seconds, saved_bytes = [], [], 0.0, 0
    for step in range(STEPS):
        rows = batch(
            step,
            seed=0,
            batch_size=job.sequences,
            seq_len=job.seq_len,
            dp_rank=mesh.dp.rank,
            dp_size=mesh.dp.size,
        )
        comm.barrier(mesh.world)
        mesh.count_from_here()
        mesh.trace.clear()
        with ExitStack() as stack:
            room = limit - trainer.state_bytes.total
            saved = stack.enter_context(_Limited(room, *trainer.stages.values(), gathered))
            if step + 1 == STEPS:
                _pad(stack, trainer.stages.values(), mesh, pace)
            start = time.perf_counter()
            done = trainer.step(*rows)
            seconds, saved_bytes = time.perf_counter() - start, saved.peak
        losses.append(float(done.loss))
        norms.append(float(done.norm))
    return _OfRank(losses, norms, trainer.state_bytes.total, saved_bytes, seconds)


def _pad(
    stack: ExitStack,
    stages: Iterable[Decoder],
    mesh: Mesh,
    pace: Pace,
) -> None:
    """Make each block and the LM head sleep before its forward and before its backward."""
    for stage in stages:
        padded = [(block, *pace.block) for block in stage.blocks]
        padded += [(stage.head, *pace.head)] if stage.head is not None else []
        for module, forward, backward in padded:
            before = [
                module.register_forward_pre_hook(_sleeps(mesh, forward)),
                module.register_full_backward_pre_hook(_sleeps(mesh, backward)),
            ]
            for hook in before:
                stack.callback(hook.remove)


def _sleeps(mesh: Mesh, seconds: float) -> Callable[..., None]:
    return lambda *_: mesh.trace.sleep(seconds)


def _reference(job: Job) -> tuple[list[float], list[float]]:
    """Return losses and gradient norms of one process that trains on the whole batch."""
    model, losses, norms = _model(job), [], []
    optimizer = _optimizer(model.parameters())
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=job.sequences, seq_len=job.seq_len)
        optimizer.zero_grad()
        total, count = model.loss_sum(tokens, targets)
        loss = total / count
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        optimizer.step()
    return losses, norms


def _model(job: Job) -> Decoder:
    model = build_model(job.config, seed=0)
    if job.experts is not None:
        ep.add_experts(model, job.experts.number, job.experts.top_k)
    return model


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)
