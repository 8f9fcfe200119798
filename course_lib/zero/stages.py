"""ZeRO stages 1 and 2: every rank computes with all parameters and updates its shard of them.

g = sum over the ranks of their gradients, split into n shards. Rank r receives g_r, updates its
shard w_r of the weights with it, and gathers the other ranks' shards:

    g_r = reduce_scatter(gradient_F);   w_r = optimizer(w_r, g_r);   w_F = all_gather(w_r)

This is data parallelism with its all-reduce split in two and the optimizer in between: the same
bytes, and 1/n of the optimizer state per rank. Stage 2 shards the gradients too: it sends a bucket
as soon as backward has filled it, and stores only this rank's shard of the sum. The price is one
reduce-scatter per micro-batch, where stage 1 has one per step: :func:`course_lib.zero.wire_bytes`.
Source: Rajbhandari et al. 2019 (ZeRO), arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from course_lib import comm
from course_lib.comm.flat import BUCKET_BYTES
from course_lib.mesh import Axis
from course_lib.zero.flat import FlatParameter
from course_lib.zero.sharded import MakeOptimizer, Sharded


class Zero1(Sharded):
    """Optimizer state in shards; gradients accumulate in full, with one reduce-scatter per step."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        axis: Axis,
        make_optimizer: MakeOptimizer,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        trained = list(dict.fromkeys(p for p in parameters if p.requires_grad))  # tied: once
        # Backward fills gradients from the last parameter to the first.
        buckets = comm.by_dtype_and_size(trained[::-1], bucket_bytes)
        flats = [FlatParameter(bucket, axis, f"bucket {i}") for i, bucket in enumerate(buckets)]
        super().__init__(flats, axis, make_optimizer)

    def _ready(self, parameter: nn.Parameter) -> None:
        """Move the gradient into its bucket."""
        if parameter.grad is not None:
            self._flat_of[parameter].collect(parameter)

    def finish(self) -> None:
        """Reduce-scatter every bucket, one after the other."""
        for flat in self.flats:
            self._reduction.start(flat)
        self._reduction.wait()

    def refresh(self) -> None:
        """Gather all shards, so that every rank has all updated parameters."""
        for handle in [flat.start_gather() for flat in self.flats]:
            handle.wait()


class Zero2(Zero1):
    """Gradients in shards too: a full bucket has memory until its reduce-scatter is finished.

    All ranks send the buckets in one fixed order, even where backward fills them in another: ranks
    that issued collectives in different orders would add different buckets together.
    """

    _sent = 0  # how many buckets of this backward were sent

    def _ready(self, parameter: nn.Parameter) -> None:
        flat = self._flat_of[parameter]
        if flat in self.flats[: self._sent]:
            raise RuntimeError(
                "a second backward after its gradients were sent: put every backward but the last "
                "of a step into a `with z.accumulate():` of its own, and call finish() after the "
                "last"
            )
        flat.collect(parameter)
        while self._sent < len(self.flats) and self.flats[self._sent].complete:
            self._send_next()

    def _send_next(self) -> None:
        self._reduction.start(self.flats[self._sent])
        self._sent += 1

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run one backward that is not the last inside; its gradients are scattered and freed."""
        yield
        self._flush()

    def _flush(self) -> None:
        """Send the buckets that wait for unused parameters, before the next backward."""
        while self._sent < len(self.flats):
            self._send_next()
        self._sent = 0

    def finish(self) -> None:
        """Send the buckets that wait for unused parameters, and wait for the last bucket."""
        self._flush()
        self._reduction.wait()

    def reset(self) -> None:
        """Drop the state of an interrupted step: see :meth:`Sharded.reset`."""
        self._sent = 0
        super().reset()
