"""A tied embedding with two copies on two ranks: the first stage's table, the last one's head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.model import Decoder
from course_lib.schedule import Schedule


@contextmanager
def summed(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, apart: bool = True
) -> Iterator[list[int]]:
    """Around a step: afterwards both copies have the sum of what the step added to each.

    Gives those stages of this rank whose gradients are complete only then. In a V these are the
    two that share one embedding, and nothing is sent; else the one that has a copy. Without
    ``apart`` the copies of two ranks are left for the caller to sum.
    """
    first, last = schedule.placement[0], schedule.placement[-1]
    ends = [stage for stage in stages if stage in (0, schedule.stages - 1)]
    weight = _tied_weight(stages[ends[0]]) if ends else None
    if weight is None or (first != last and not apart):
        yield []
        return
    if first == last:
        yield ends
        return
    before, weight.grad = weight.grad, None  # only what this step adds is summed
    yield ends
    _sum_tied_gradient(weight, pp, other=first + last - pp.rank)
    if before is not None:
        weight.grad = before.add_(weight.grad)  # type: ignore[arg-type]


def _tied_weight(stage: Decoder) -> Tensor | None:
    end = stage.head if stage.embedding is None else stage.embedding.token
    if end is None or not stage.config.tied or not end.weight.requires_grad:
        return None
    return end.weight


def _sum_tied_gradient(weight: Tensor, pp: Axis, other: int) -> None:
    """An all-reduce of two ranks: each sends its gradient to the other.

    Without it the copies drift apart from the first step on.
    """
    assert weight.grad is not None
    weight.grad += comm.exchange(weight.grad, pp, to=other, source=other)
