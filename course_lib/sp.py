"""Sequence parallelism (Megatron): outside the regions of tensor parallelism the ranks share rows.

Korthikanti et al. 2022, arXiv:2205.05198. Tensor parallelism leaves norms, dropout and residuals
whole on every rank. Here each rank holds S/t of the positions there, x_BScD. Where x enters a
region it is gathered, where it leaves, the partial sums are scattered:

========  ========================  ========================
          forward                   backward
========  ========================  ========================
enter     all-gather over S         reduce-scatter over S
leave     reduce-scatter over S     all-gather over S
========  ========================  ========================

An all-reduce is a reduce-scatter and an all-gather, so the bytes are those of tensor parallelism.
What is new: parameters that are used on rows (norms, biases after a sum, positions) have on each
rank the gradient of its rows only: :func:`sum_gradients`.

Two variants. With :data:`REGION` autograd keeps the gathered input of each region, whole on every
rank. With :data:`GATHER_AGAIN` it keeps this rank's rows and gathers them once more in backward:
less memory, 1.25 times the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.comm import Held
from course_lib.comm.operators import Region
from course_lib.ledger import wire
from course_lib.mesh import Axis
from course_lib.model import ModelConfig
from course_lib.recompute import kept_at_ends as kept_at_serial_ends
from course_lib.recompute import kept_by_block

S = 1  # the dim of x_BSD that is cut


def enter(x_BScD: Tensor, axis: Axis) -> Tensor:
    """All-gather; backward adds up what the ranks' different uses give, each rank for its rows."""
    return comm.gather_from_sequence(x_BScD, axis, S)


def leave(x_BSD: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter of partial sums; backward gathers."""
    if x_BSD.shape[S] % axis.size:
        raise ValueError(
            f"a sequence of {x_BSD.shape[S]} positions cannot be cut into {axis.size} equal parts "
            f"for the ranks of axis {axis.name}: pad or shorten the sequence, or choose another "
            "number of ranks"
        )
    return comm.reduce_scatter_to(x_BSD, axis, S)


def own_rows(positions_S: Tensor, axis: Axis) -> Tensor:
    """The positions of this rank's rows."""
    return comm.own_shard(positions_S, axis)


REGION = Region(enter, leave, own_rows)


class _Again:
    """The gather that backward makes, one for all the linears that read x (q, k and v)."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.travelling: comm.Handle | None = None

    def start(self, x_BScD: Tensor) -> comm.Handle:
        """Begin it, unless another linear has."""
        if self.travelling is None:
            self.travelling = comm.start_all_gather(x_BScD, self.axis, S)
        return self.travelling


class _EnterAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BScD: Tensor, again: _Again):
        ctx.again = again
        return comm.all_gather(x_BScD, again.axis, S)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_BSD: Tensor):
        ctx.again.travelling = None  # dx is complete: every linear has had x
        return comm.reduce_scatter(dx_BSD, ctx.again.axis, S), None


class _GatheringLinear(torch.autograd.Function):
    """``x weight^T + bias``, of which backward keeps this rank's rows of x alone."""

    @staticmethod
    def forward(ctx, x_BSD: Tensor, weight: Tensor, bias: Tensor | None, x_BScD: Tensor, again):
        ctx.save_for_backward(weight, x_BScD)
        ctx.again = again
        return F.linear(x_BSD, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BSF: Tensor):
        weight_FD, x_BScD = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        travelling = ctx.again.start(x_BScD) if wants_weight else None
        dx_BSD = dy_BSF @ weight_FD if wants_x else None  # while the rows travel
        dy_TF = dy_BSF.flatten(0, 1)
        dw_FD = dy_TF.t() @ travelling.wait().flatten(0, 1) if travelling else None
        return dx_BSD, dw_FD, dy_TF.sum(0) if wants_bias else None, None, None


def enter_again(x_BScD: Tensor, axis: Axis) -> Tensor:
    """:func:`enter`, but the linears keep this rank's rows and gather them again in backward."""
    if axis.size == 1 or not torch.is_grad_enabled():
        return enter(x_BScD, axis)
    again, rows = _Again(axis), x_BScD.detach()
    x_BSD = _EnterAgain.apply(x_BScD, again)
    x_BSD.product = lambda x, weight, bias: _GatheringLinear.apply(x, weight, bias, rows, again)
    return x_BSD


GATHER_AGAIN = Region(enter_again, leave, own_rows)


def sum_gradients(held: Iterable[Held], axis: Axis) -> None:
    """Add up the gradients of what is not cut: each rank has them for its own rows only.

    One flat all-reduce; call it once a step, after the last backward and what sums or shards over
    data parallelism. Forgetting it is the classic mistake: the ranks' norms drift apart and the
    loss still falls.
    """
    whole = [one for one in held if getattr(one.parameter, "tp_dim", None) is None]
    comm.sum_gradients(whole, axis)


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
    """Bytes a rank sends for activations and for what is not cut, per optimizer step.

    A layer has 2 all-gathers and 2 reduce-scatters of x_BSD in every forward (``forwards=2`` with
    full recomputation) and in backward, 2 gathers more with ``again``; embedding and head have 2
    and 2, one gather more with ``again``. A layer has 2 ``regions``, attention and MLP; 1 where
    something that is not cut, such as experts, is in the MLP's place.
    Then one all-reduce of the gradients of what is not cut.
    Under ZeRO over ``shards`` ranks each sums the runs that it holds: then it is the average over
    these ranks. Loss and shared key and value heads are tensor parallelism's own.
    All parameters are trained: what is frozen is not summed, and where early ones are frozen
    backward ends sooner; so that less is sent.
    """
    size = sequences * seq_len * config.hidden * config.dtype.itemsize
    scatters = regions * config.layers * (forwards + 1) + 2
    gathers = scatters + (regions * config.layers + 1 if again else 0)
    return (
        gathers * wire("all_gather", size // n, n)
        + scatters * wire("reduce_scatter", size, n)
        + wire("all_reduce", whole_parameters(config) * config.dtype.itemsize, n) / shards
    )


def whole_parameters(config: ModelConfig) -> int:
    """Parameters that every rank of the axis holds: norms; gpt: biases after a sum, positions."""
    if config.family == "llama":
        return (2 * config.layers + 1) * config.hidden
    norms, row_biases = 2 * (2 * config.layers + 1), 2 * config.layers
    return (norms + row_biases + config.max_seq_len) * config.hidden


def kept_per_block(
    config: ModelConfig, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Bytes that a rank keeps of one block: a share of everything, what has entered whole.

    With ``again`` a share of that too. A mask takes one byte here: see tp.RankDropout.
    """
    kept = kept_by_block(config, sequences, seq_len)
    keys_values = kept.keys_values // min(n, config.kv_heads)
    entered = kept.entered // n if again else kept.entered
    shared = kept.outside + kept.inside + kept.masks // config.dtype.itemsize
    return shared // n + entered + keys_values + kept.tables


def kept_at_ends(
    config: ModelConfig, sequences: int, seq_len: int, n: int, *, again: bool = False
) -> int:
    """Bytes that a rank keeps before the first block and after the last: a share of rows, and
    whole what has entered the head. Tensor parallelism keeps its part of the vocabulary beside."""
    ends = kept_at_serial_ends(config, sequences, seq_len)
    shared = ends.positions + ends.norm + ends.mask // config.dtype.itemsize
    return shared // n + (ends.entered // n if again else ends.entered)
