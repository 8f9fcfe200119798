"""Data parallelism: every rank has the whole model and different rows of the batch.

The gradient of a mean over all tokens is the sum of the ranks' gradients, when every rank divides
its summed loss by the number of tokens of *all* ranks (:func:`global_tokens`). So gradients are
summed here, never averaged: an average over ranks is wrong as soon as ranks have different numbers
of tokens.

Three classes compute the same sum, with the same interface (:class:`GradientSync`):

* :class:`Naive`: after backward, one all-reduce per parameter.
* :class:`Bucketed`: after backward, one all-reduce per flat bucket. Fewer alphas.
* :class:`Overlapped`: a bucket is sent as soon as backward has filled it, while backward continues
  towards the first layer, as torch's DistributedDataParallel does (Li et al. 2020,
  arXiv:2006.15704).

A step: ``with sync.accumulate():`` around every backward but the last, then the last backward,
then ``sync.finish()``, and only then clip and step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.aliases import aliases
from course_lib.comm.flat import BUCKET_BYTES
from course_lib.formulas.dp import wire_bytes  # noqa: F401  its formula is exported
from course_lib.mesh import Axis

if not TYPE_CHECKING:  # mypy would take every name for an alias
    __getattr__ = aliases(__name__)

Batch = tuple[Tensor, Tensor]  # tokens (B, S) and targets (B, S)
LossSum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # -> summed loss, number of tokens


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that get a gradient, each once, in order; ValueError if none does."""
    found = list(dict.fromkeys(p for p in parameters if p.requires_grad))
    if not found:
        raise ValueError("no parameter requires a gradient: there is nothing to sum")
    return found


def broadcast_parameters(model: nn.Module, axis: Axis) -> None:
    """Copy the parameters and buffers of coordinate 0 to every rank."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(comm.broadcast(tensor, axis))


def global_tokens(targets: Iterable[Tensor], axis: Axis, ignore_index: int = -100) -> Tensor:
    """Count this step's targets that are not ignored, over all ranks; int64.

    One all-reduce of one number, tagged as control. Raises ValueError when there is none.
    """
    count = torch.stack([(target != ignore_index).sum() for target in targets]).sum()
    total = comm.all_reduce(count, axis, control=True)
    if total == 0:
        raise ValueError(
            f"every target on axis {axis.name} is {ignore_index}: there is no loss to average"
        )
    return total


class Sync(Protocol):
    """The methods that :func:`train_step` calls to sum the gradients."""

    axis: Axis

    def accumulate(self) -> AbstractContextManager[None]:
        """Run a backward that is not the last of a step inside."""

    def finish(self) -> None:
        """Complete the sum; call it once, after the last backward."""

    def clip(self, max_norm: float) -> Tensor:
        """Scale the global norm down to ``max_norm``; return the norm before."""


class Optimizer(Protocol):
    """The methods of an optimizer that :func:`train_step` calls; torch.optim's have them."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


class GradientSync:
    """After :meth:`finish`, every ``parameter.grad`` is the sum over the axis.

    A parameter that this rank did not use counts as zeros, so that all ranks make the same calls.
    If *no* rank used it, its gradient is zeros where one process would have None, and an optimizer
    with weight decay or momentum still changes it. Freeze such a parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis) -> None:
        self.parameters = trainable(parameters)
        self.axis = axis

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run a backward inside that only adds to this rank's gradients and sends nothing."""
        yield

    def finish(self) -> None:
        """Complete the sums; call it once, after the last backward of a step."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        """Scale the summed gradients to a norm of at most ``max_norm``; return the norm before.

        Call it after :meth:`finish`: then every rank has the same gradients and sends nothing.
        Raises ValueError for parameters without a gradient, and for sharded ones.
        """
        return comm.clip_grad_norm(comm.held_gradients(self.parameters), [], max_norm)


class Naive(GradientSync):
    """One all-reduce per parameter, after backward."""

    def finish(self) -> None:
        """Sum every gradient in a call of its own."""
        for parameter in self.parameters:
            parameter.grad = comm.all_reduce(_gradient(parameter), self.axis)


class Bucketed(GradientSync):
    """One all-reduce per bucket of about ``bucket_bytes``, after backward."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], axis: Axis, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(parameters, axis)
        # Backward fills gradients from the last parameter to the first.
        self.buckets = comm.by_dtype_and_size(self.parameters[::-1], bucket_bytes)

    def _start(self, number: int) -> comm.Handle:
        gradients = [_gradient(parameter) for parameter in self.buckets[number]]
        return comm.start_all_reduce_flat(gradients, self.axis, label=f"bucket {number}")

    def finish(self) -> None:
        """Sum bucket by bucket."""
        for number, bucket in enumerate(self.buckets):
            _view_as_gradients(bucket, self._start(number).wait())


class Overlapped(Bucketed):
    """A hook sends each bucket as soon as backward has filled it.

    All ranks send the buckets in one fixed order, even where backward fills them in another: ranks
    that issued collectives in different orders would add different buckets together.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], axis: Axis, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        super().__init__(parameters, axis, bucket_bytes)
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._accumulating = False
        self._in_flight: list[comm.Handle] = []
        self._missing: list[set[nn.Parameter]] = []
        self._await_all()
        self._hooks = comm.on_gradient(self.parameters, self._ready)

    def _await_all(self) -> None:
        self._in_flight.clear()
        self._missing = [set(bucket) for bucket in self.buckets]

    def _ready(self, parameter: nn.Parameter) -> None:
        """Send the buckets that are full; autograd calls it when ``parameter.grad`` is complete."""
        if self._accumulating:
            return
        if len(self._in_flight) > self._bucket_of[parameter]:
            raise RuntimeError(
                "a second backward after its gradients were sent: put every backward but the last "
                "of a step into `with sync.accumulate():`, and call finish() after the last"
            )
        self._missing[self._bucket_of[parameter]].discard(parameter)
        while len(self._in_flight) < len(self.buckets) and not self._missing[len(self._in_flight)]:
            self._in_flight.append(self._start(len(self._in_flight)))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run a backward inside that only adds to this rank's gradients and sends nothing."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def send_all(self) -> None:
        """Send every bucket that was not sent: this step has no further backward.

        For a pipeline, in which one stage ends its last backward while others still compute.
        """
        while len(self._in_flight) < len(self.buckets):
            self._in_flight.append(self._start(len(self._in_flight)))

    def finish(self) -> None:
        """Send the buckets that wait for unused parameters, then wait for every bucket."""
        self.send_all()
        for bucket, handle in zip(self.buckets, self._in_flight, strict=True):
            _view_as_gradients(bucket, handle.wait())
        self._await_all()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _view_as_gradients(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Make the gradients views into the flat sum, without a copy."""
    for parameter, gradient in zip(bucket, comm.unflatten(flat, bucket), strict=True):
        parameter.grad = gradient


def train_step(
    loss_sum: LossSum,
    micro_batches: Sequence[Batch],
    sync: Sync,
    optimizer: Optimizer,
    max_norm: float | None = None,
) -> Tensor:
    """Do one optimizer step on this rank's ``micro_batches``; return the mean loss of all tokens.

    ``loss_sum`` returns the model's (summed loss, number of tokens) of one micro-batch.
    """
    if not micro_batches:
        raise ValueError("a step needs at least one micro-batch")
    tokens = global_tokens([targets for _, targets in micro_batches], sync.axis)
    optimizer.zero_grad()
    total = torch.zeros((), device=tokens.device)
    for index, (inputs, targets) in enumerate(micro_batches):
        loss = loss_sum(inputs, targets)[0] / tokens
        if index + 1 < len(micro_batches):
            with sync.accumulate():
                loss.backward()
        else:
            loss.backward()
        total = total + loss.detach()
    sync.finish()
    if max_norm is not None:
        sync.clip(max_norm)
    optimizer.step()
    return comm.all_reduce(total, sync.axis, control=True)
