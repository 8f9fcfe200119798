"""Sequence parallelism: outside the tensor-parallel regions each rank stores S/t of the positions.

Megatron's, by Korthikanti et al. 2022, arXiv:2205.05198. Tensor parallelism replicates norms,
dropout and residuals on every rank. Here each rank stores x_BScD. x is gathered where it enters a
region; the partial sums are reduce-scattered where it leaves:

========  ========================  ========================
          forward                   backward
========  ========================  ========================
enter     all-gather over S         reduce-scatter over S
leave     reduce-scatter over S     all-gather over S
========  ========================  ========================

An all-reduce is a reduce-scatter and an all-gather, so sequence parallelism sends as many bytes as
tensor parallelism if autograd saves the gathered inputs. One sum is new. The gradient of a
replicated parameter (norm, row bias, positions) covers only this rank's rows, so it must be summed
over the axis (:func:`sum_gradients`).

Two variants. With :data:`REGION` autograd saves the gathered input of each region, all of it on
every rank. With :data:`GATHER_AGAIN` it saves this rank's rows and gathers them once more in
backward: less memory, 1.25 times the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm, recompute
from course_lib.comm import Held
from course_lib.comm.collectives import check_equal_shards
from course_lib.comm.operators import Region
from course_lib.ledger import wire
from course_lib.mesh import Axis
from course_lib.model import ModelConfig
from course_lib.recompute import saved_by_block

S = 1  # the dim of x_BSD that the ranks divide


def enter(x_BScD: Tensor, axis: Axis) -> Tensor:
    """All-gather. Backward sums the gradients of all ranks; each rank receives its rows."""
    return comm.gather_from_sequence(x_BScD, axis, S)


def leave(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter of partial sums; backward gathers."""
    positions = x_BSD.shape[S]
    check_equal_shards(f"a sequence of {positions} positions", positions, "leave", axis)
    return comm.reduce_scatter_to(x_BSD, axis, S)


def own_rows(positions_S: Tensor, axis: Axis) -> Tensor:
    """Return the positions of this rank's rows."""
    return comm.own_shard(positions_S, axis)


REGION = Region(enter, leave, own_rows)


class _Again:
    """The gather in backward, one for all the linears that read x (q, k and v)."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.in_flight: comm.Handle | None = None

    def start(self, x_BScD: Tensor) -> comm.Handle:
        """Start it, unless another linear has."""
        if self.in_flight is None:
            self.in_flight = comm.start_all_gather(x_BScD, self.axis, S)
        return self.in_flight


class _EnterAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BScD: Tensor, again: _Again) -> Tensor:
        ctx.again = again
        return comm.all_gather(x_BScD, again.axis, S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BSD: Tensor) -> tuple[Any, ...]:
        ctx.again.in_flight = None  # dx is complete: every linear has used x
        return comm.reduce_scatter(dx_BSD, ctx.again.axis, S), None


class _GatheringLinear(torch.autograd.Function):
    """``x weight^T + bias``, which saves this rank's rows of x alone."""

    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, x_BScD: Tensor, again: _Again
    ) -> Tensor:
        ctx.save_for_backward(weight, x_BScD)
        ctx.again = again
        return F.linear(x_BSD, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSF: Tensor) -> tuple[Any, ...]:
        weight_FD, x_BScD = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        gathered = ctx.again.start(x_BScD) if wants_weight else None
        dx_BSD = dy_BSF @ weight_FD if wants_x else None  # during the gather
        dy_TF = dy_BSF.flatten(0, 1)
        dw_FD = dy_TF.t() @ gathered.wait().flatten(0, 1) if gathered else None
        return dx_BSD, dw_FD, dy_TF.sum(0) if wants_bias else None, None, None


class GatherAgain(Region):
    """The linears save this rank's rows of x and gather them again in backward."""

    def columns(
        self, x: Tensor, linears: Iterable[Callable[..., Tensor]], axis: Axis
    ) -> list[Tensor]:
        """Gather ``x`` once for all ``linears``, which must take a ``product``."""
        if axis.size == 1 or not torch.is_grad_enabled():
            return super().columns(x, linears, axis)
        again, rows = _Again(axis), x.detach()
        x_BSD = _EnterAgain.apply(x, again)

        def product(x_BSD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _GatheringLinear.apply(x_BSD, weight, bias, rows, again)

        return [linear(x_BSD, product) for linear in linears]


GATHER_AGAIN = GatherAgain(enter, leave, own_rows)


def sum_gradients(held: Iterable[Held], axis: Axis) -> None:
    """Add up the gradients of replicated parameters: each rank has them for its own rows only.

    One flat all-reduce. Call it once per step, after the last backward and the sum (or ZeRO's
    reduce-scatter) over data parallelism. Forgetting it is the classic mistake: the norm weights
    of the ranks drift apart and the loss still falls.
    """
    replicated = [one for one in held if not comm.is_sharded(one.parameter, axis)]
    comm.sum_gradients(replicated, axis)


# --- what it costs, from shapes alone; n is the size of the axis -----------------------------


def wire_bytes(
    config: ModelConfig,
    sequences: int,
    seq_len: int,
    n: int,
    *,
    again: bool = False,
    forwards: int = 1,
    shards: int = 1,
    regions: int = 2,
) -> Fraction:
    """Return the bytes per rank and optimizer step for activations and replicated parameters.

    A layer has 2 all-gathers and 2 reduce-scatters of x_BSD in every forward (``forwards=2`` with
    full recomputation) and in backward, 2 gathers more with ``again``; embedding and head have 2
    and 2, one gather more with ``again``. A layer has 2 ``regions``, attention and MLP; 1 where
    experts replace the MLP. Then one all-reduce of the gradients of replicated parameters.
    Under ZeRO over ``shards`` ranks each sums its shards: then it is the average over these ranks.
    ``tp.formulas`` counts the loss and the key and value heads that several ranks hold.
    All parameters are trained; with frozen ones fewer bytes are sent.
    """
    size = sequences * seq_len * config.hidden * config.dtype.itemsize
    scatters = regions * config.layers * (forwards + 1) + 2
    gathers = scatters + (regions * config.layers + 1 if again else 0)
    return (
        gathers * wire("all_gather", size // n, n)
        + scatters * wire("reduce_scatter", size, n)
        + wire("all_reduce", replicated_parameters(config) * config.dtype.itemsize, n) / shards
    )


def replicated_parameters(config: ModelConfig) -> int:
    """Return how many parameters are replicated: norms; gpt: biases after a sum, positions."""
    if config.family == "llama":
        return (2 * config.layers + 1) * config.hidden
    norms, row_biases = 2 * (2 * config.layers + 1), 2 * config.layers
    return (norms + row_biases + config.max_seq_len) * config.hidden


def saved_per_block(
    config: ModelConfig, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Return the bytes that a rank saves for one block: the gathered input, 1/n of all else.

    With ``again`` 1/n of the input too. A mask takes one byte here: see tp.RankDropout.
    """
    saved = saved_by_block(config, sequences, seq_len)
    keys_values = saved.keys_values // min(n, config.kv_heads)
    entered = saved.entered // n if again else saved.entered
    divided = saved.outside + saved.inside + saved.masks // config.dtype.itemsize
    return divided // n + entered + keys_values + saved.rope_cache


def saved_outside_blocks(
    config: ModelConfig, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Return the bytes that a rank saves for embedding and LM head, without the vocabulary's.

    1/n of the rows, and the gathered input of the head; with ``again`` 1/n of that too.
    ``tp.formulas.saved_by_vocabulary`` counts the rest.
    """
    saved = recompute.saved_outside_blocks(config, sequences, seq_len)
    divided = saved.positions + saved.norm + saved.mask // config.dtype.itemsize
    return divided // n + (saved.entered // n if again else saved.entered)


def saved_bytes(
    config: ModelConfig, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Return the bytes that a rank saves in one forward, without the vocabulary's."""
    shape = config, sequences, seq_len, n
    blocks = config.layers * saved_per_block(*shape, again=again)
    return blocks + saved_outside_blocks(*shape, again=again)
