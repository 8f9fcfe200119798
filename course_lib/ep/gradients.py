"""Which gradients are summed over which ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from torch import Tensor, nn

from course_lib import comm
from course_lib.ep.decoder import moe_layers
from course_lib.mesh import Axis


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those of the experts that this rank holds: their gradients are summed over ``mesh.edp``."""
    return [p for layer in moe_layers(model) for p in layer.experts.parameters()]


def shared_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All others, routers and shared experts among them: summed over ``mesh.dp_cp``."""
    experts = set(expert_parameters(model))
    return [p for p in model.parameters() if p not in experts]


class Sync(Protocol):
    """What sums gradients over one axis, as those of data parallelism do."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Wrap every backward but the last of a step."""

    def finish(self) -> None:
        """Once, after the last backward."""


class ExpertSync:
    """Two syncs as one: ``make`` (such as dp.Overlapped) for the shared and for the experts'."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Iterable[nn.Parameter], Axis], Sync],
        *,
        ep: Axis,
        edp: Axis,
        data: Axis,
    ) -> None:
        self.model, self.ep, self.axis = model, ep, data
        self.syncs = (
            make(shared_parameters(model), data),
            make(expert_parameters(model), edp),
        )

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A backward inside sends tokens, but no gradients of parameters."""
        with ExitStack() as both:
            for sync in self.syncs:
                both.enter_context(sync.accumulate())
            yield

    def finish(self) -> None:
        """Call it once per step, after the last backward."""
        for sync in self.syncs:
            sync.finish()

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most ``max_norm``; return the norm before.

        By the norm of its own experts alone each rank would scale the shared ones by another
        factor. Raises ValueError where gradients are not in ``.grad``, as under ZeRO.
        """
        held = comm.held_gradients(self.model.parameters())
        return comm.clip_grad_norm(held, [self.ep], max_norm)
