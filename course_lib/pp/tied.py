"""A tied embedding with copies on two ranks: in the first stage, and as LM head in the last one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.model import Decoder
from course_lib.schedule import Schedule


@contextmanager
def summed_gradient(
    schedule: Schedule, stages: Mapping[int, Decoder], pp: Axis, sum_tied: bool = True
) -> Iterator[list[int]]:
    """Run a step inside; then both copies have the sum of what the step added to each.

    Yields this rank's stages whose gradients are complete only after that. In a V-shaped placement
    these are the two that share one embedding, and nothing is sent; otherwise the one with a copy.
    Without ``sum_tied`` the copies of two ranks are left to the caller.
    """
    first, last = schedule.placement[0], schedule.placement[-1]
    outer = [stage for stage in stages if stage in (0, schedule.stages - 1)]
    weight = _tied_weight(stages[outer[0]]) if outer else None
    if weight is None or (first != last and not sum_tied):
        yield []
        return
    if first == last:
        yield outer
        return
    before, weight.grad = weight.grad, None  # only what this step adds is summed
    yield outer
    step = _sum_of_both(weight.grad, pp, other=first + last - pp.rank)
    weight.grad = step if before is None else before.add_(step)


def _tied_weight(stage: Decoder) -> Tensor | None:
    """Return the stage's copy of the embedding, if it has one that is tied and trained."""
    module = stage.head if stage.embedding is None else stage.embedding.token
    if module is None or not stage.config.tied or not module.weight.requires_grad:
        return None
    return module.weight


def _sum_of_both(gradient: Tensor | None, pp: Axis, other: int) -> Tensor:
    """Do an all-reduce over two ranks, in place: each sends its gradient to the other.

    Without it the copies differ from the first step on.
    """
    assert gradient is not None, "backward has reached both copies"
    return gradient.add_(comm.exchange(gradient, pp, to=other, source=other))
