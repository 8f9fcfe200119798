"""ZeRO stages 1 and 2: every rank computes with all parameters and updates its share of them.

g = sum over the ranks of their gradients, cut into n shards; rank r keeps g_r, updates its shard
w_r of the weights with it, and gathers the others' shards:

    g_r = reduce_scatter(gradient_F);   w_r = optimizer(w_r, g_r);   w_F = all_gather(w_r)

That is data parallelism with its all-reduce cut in two and the optimizer in between: the same
bytes, and optimizer state divided by n. Stage 2 divides the gradients too: a bucket leaves as soon
as backward has filled it, and only the own shard of its sum stays. The price is a reduce-scatter
for each micro-batch, where stage 1 has one for the step: :func:`course_lib.zero.wire_bytes`.
Source: Rajbhandari et al. 2019 (ZeRO), arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from course_lib import comm
from course_lib.mesh import Axis
from course_lib.zero.flat import Flat
from course_lib.zero.sharded import MakeOptimizer, Sharded

BUCKET_BYTES = 12 * 2**20


class Zero1(Sharded):
    """Optimizer state in shards; gradients add up in full, and are scattered once a step."""

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
        flats = [Flat(bucket, axis, f"bucket {i}") for i, bucket in enumerate(buckets)]
        super().__init__(flats, axis, make_optimizer)

    def finish(self) -> None:
        """Reduce-scatter every bucket, one after the other."""
        for flat in self.flats:
            self._send(flat)
        self._land()

    def refresh(self) -> None:
        """Gather all shards: the parameters are whole and new."""
        for handle in [flat.start_gather() for flat in self.flats]:
            handle.wait()


class Zero2(Zero1):
    """Gradients in shards too: a full bucket lives only from its first gradient to its landing.

    Buckets leave in one fixed order on all ranks, even where backward fills them in another:
    ranks that issued collectives in different orders would add different buckets together.
    """

    _sent = 0  # buckets of this backward that have left

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
        self._send(self.flats[self._sent])
        self._sent += 1

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around one backward that is not the last: what it made is scattered and freed."""
        yield
        self._flush()

    def _flush(self) -> None:
        """Send what unused parameters kept back: the next backward starts anew."""
        while self._sent < len(self.flats):
            self._send_next()
        self._sent = 0

    def finish(self) -> None:
        """Send what unused parameters kept back, and wait for the last bucket."""
        self._flush()
        self._land()

    def reset(self) -> None:
        """Forget a step that broke off: see :meth:`Sharded.reset`."""
        self._sent = 0
        super().reset()
