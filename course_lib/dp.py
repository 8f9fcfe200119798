"""Data parallelism: every rank holds the whole model and other rows of the batch.

The one law: the gradient of a mean over all tokens is the sum of the ranks' gradients, when every
rank divides its summed loss by the number of tokens of *all* ranks (:func:`global_tokens`). So
gradients are summed here, never averaged: an average over ranks is wrong as soon as ranks hold
different numbers of tokens.

Three ways to the same sum, with the same interface (:class:`GradientSync`):

* :class:`Naive`: after backward, one all-reduce for each parameter.
* :class:`Bucketed`: after backward, one all-reduce for each flat bucket. Fewer alphas.
* :class:`Overlapped`: a bucket leaves as soon as backward has filled it, while backward goes on
  towards the first layer; what torch's DistributedDataParallel does (Li et al. 2020,
  arXiv:2006.15704).

A step: ``with sync.accumulate():`` around every backward but the last, then the last backward,
then ``sync.finish()``, and only then clip and step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from course_lib import comm
from course_lib.mesh import Axis

BUCKET_BYTES = 12 * 2**20  # `course bench dp` times smaller and larger ones beside it
Batch = tuple[Tensor, Tensor]  # tokens (B, S) and targets (B, S)
LossSum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # -> summed loss, number of tokens


def wire_bytes(parameter_bytes: int, n: int) -> Fraction:
    """Bytes a rank sends per optimizer step: 2(n-1)/n times the bytes of trainable parameters.

    The same for all three ways and for any number of micro-batches. A tied weight counts once.
    """
    return Fraction(2 * (n - 1) * parameter_bytes, n)


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that get a gradient, each once, in order. Raises ValueError when none does."""
    found = list(dict.fromkeys(p for p in parameters if p.requires_grad))
    if not found:
        raise ValueError("no parameter requires a gradient: there is nothing to keep in step")
    return found


def start_equal(model: nn.Module, axis: Axis) -> None:
    """Give every rank the parameters and buffers of coordinate 0."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(comm.broadcast(tensor, axis))


def global_tokens(targets: Iterable[Tensor], axis: Axis, ignore_index: int = -100) -> Tensor:
    """How many tokens count in ``targets`` (this step's micro-batches) over all ranks, int64.

    One all-reduce of one number, tagged as control.
    """
    count = torch.stack([(target != ignore_index).sum() for target in targets]).sum()
    total = comm.all_reduce(count, axis, control=True)
    if total == 0:
        raise ValueError(f"no token of any rank of axis {axis.name} counts: nothing to average")
    return total


class Sync(Protocol):
    """What :func:`train_step` asks of whatever sums the gradients."""

    axis: Axis

    def accumulate(self) -> AbstractContextManager[None]:
        """Around every backward but the last of a step."""

    def finish(self) -> None:
        """Once, after the last backward."""

    def clip(self, max_norm: float) -> Tensor:
        """Bring the global norm down to ``max_norm``; the norm before."""


class Optimizer(Protocol):
    """What :func:`train_step` asks of an optimizer; those of torch.optim have it."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Update the parameters."""


class GradientSync:
    """Leaves the sum over the axis in every ``parameter.grad`` when :meth:`finish` returns.

    A parameter that this rank did not use counts as zeros, so that all ranks make the same calls.
    One that *no* rank used then has a gradient of zeros where one process would have none: an
    optimizer with weight decay or momentum moves it all the same. Freeze such a parameter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], axis: Axis) -> None:
        self.parameters = trainable(parameters)
        self.axis = axis

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A backward in here only adds to this rank's own gradients: nothing is sent."""
        yield

    def finish(self) -> None:
        """Call it once after the last backward of a step."""
        raise NotImplementedError

    def clip(self, max_norm: float) -> Tensor:
        """Scale the summed gradients to a norm of at most ``max_norm``; return the norm before.

        Call it after :meth:`finish`: then every rank has the same gradients and sends nothing.
        Raises ValueError for parameters without a gradient, and for sharded ones.
        """
        return comm.clip_grad_norm(comm.held_gradients(self.parameters), [], max_norm)


class Naive(GradientSync):
    """One all-reduce for each parameter, after backward."""

    def finish(self) -> None:
        """Sum every gradient, one call each."""
        for parameter in self.parameters:
            parameter.grad = comm.all_reduce(_gradient(parameter), self.axis)


class Bucketed(GradientSync):
    """One all-reduce for each bucket of about ``bucket_bytes``, after backward."""

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
            _adopt(bucket, self._start(number).wait())


class Overlapped(Bucketed):
    """Each bucket leaves from a hook, as soon as backward has filled it.

    Buckets leave in one fixed order on all ranks, even where backward fills them in another:
    ranks that issued collectives in different orders would add different buckets together.
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
        """Called by autograd when ``parameter.grad`` is complete for this backward."""
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
        """A backward in here only adds to this rank's own gradients: nothing is sent."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def send_all(self) -> None:
        """Let every bucket leave that has not: there will be no further backward in this step.

        For a pipeline, which knows when a stage has had its last backward while others go on.
        """
        while len(self._in_flight) < len(self.buckets):
            self._in_flight.append(self._start(len(self._in_flight)))

    def finish(self) -> None:
        """Send what unused parameters kept back, and wait for every bucket in flight."""
        self.send_all()
        for bucket, handle in zip(self.buckets, self._in_flight, strict=True):
            _adopt(bucket, handle.wait())
        self._await_all()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _adopt(bucket: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Gradients become views into the flat sum: nothing is copied back."""
    for parameter, gradient in zip(bucket, comm.unflatten(flat, bucket), strict=True):
        parameter.grad = gradient


def train_step(
    loss_sum: LossSum,
    micro_batches: Sequence[Batch],
    sync: Sync,
    optimizer: Optimizer,
    max_norm: float | None = None,
) -> Tensor:
    """One optimizer step on this rank's ``micro_batches``; the mean loss over all tokens.

    ``loss_sum`` is the model's (summed loss, number of tokens) of one micro-batch.
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
