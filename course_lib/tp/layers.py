"""The layers of tensor parallelism, each built from its single-process layer, and the loss.

==============  ==========================  =======================  ==============================
layer           holds                       forward                  backward
==============  ==========================  =======================  ==============================
ColumnLinear    W_FtD: F/t output features  y_Ft = x_D W_FtD^T       dx_D = dy_Ft W_FtD, partial
RowLinear       W_DFt: F/t input features   leave(x_Ft W_DFt^T)      dx_Ft = leave'(dy_D) W_DFt
VocabEmbedding  W_VtD: V'/t tokens          leave(rows, or zeros)    gradients of its rows
VocabHead       W_VtD: V'/t tokens          logits_Vt of enter(x_D)  dx_D = enter'(dy_Vt W_VtD)
==============  ==========================  =======================  ==============================

A prime marks the backward of an operator. How x enters and leaves is an argument
(:class:`course_lib.comm.Region`): ``comm.copy_to`` and ``comm.reduce_from`` are Megatron's f and g;
sequence parallelism passes another pair. Several column linears may read one
input (q, k and v; gate and up). It enters once for all of them, in ``Region.columns``, which
attention and MLP call with their linears.

The vocabulary is padded to V' = t * ceil(V / t). Rank r has the rows r V'/t .. (r+1) V'/t - 1, and
no rank ever holds all logits. Source: Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.comm import Held, Region, ShardSpec
from course_lib.comm.collectives import check_equal_shards
from course_lib.comm.operators import Move, Product, apply_weight
from course_lib.formulas.parameters import padded_rows
from course_lib.mesh import Axis, sub_axis
from course_lib.model import IGNORE_INDEX, accumulation_dtype


def identity(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x``: the ``enter`` of a column linear whose input has entered the region already."""
    return x


REGION = Region(enter=comm.copy_to, leave=comm.reduce_from, rows=identity)


class ColumnLinear(nn.Module):
    """``linear`` with this rank's shard of the output features and of the bias.

    ``kv_group`` is the KV replication group: neighboring ranks that store the same key and value
    heads, where there are fewer heads than ranks. Each rank computes the gradient from its own
    queries only, so the gradients must be summed over the group (:func:`sum_shared_gradients`).
    """

    def __init__(
        self,
        linear: nn.Linear,
        axis: Axis,
        enter: Move = identity,
        kv_group: Axis | None = None,
    ) -> None:
        super().__init__()
        spec = ShardSpec(axis, 0, kv_group if kv_group and kv_group.size > 1 else None)
        features = linear.out_features
        check_equal_shards(f"out_features={features}", features, "ColumnLinear", axis, spec.shards)
        self.axis, self.enter = axis, enter
        self.weight = comm.take_shard(linear.weight, spec)
        self.bias = None if linear.bias is None else comm.take_shard(linear.bias, spec)

    def forward(self, x: Tensor, product: Product = F.linear) -> Tensor:
        """Return (..., F/t) of x (..., D). A region may give another ``product`` of the weight."""
        return apply_weight(self.enter(x, self.axis), self.weight, self.bias, product)


class RowLinear(nn.Module):
    """``linear`` with this rank's shard of the input features; its bias is replicated.

    The bias is added after the sum: before it, every rank would add it, t times in all.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, leave: Move = comm.reduce_from) -> None:
        super().__init__()
        features = linear.in_features
        check_equal_shards(f"in_features={features}", features, "RowLinear", axis)
        self.axis, self.leave = axis, leave
        self.weight = comm.take_shard(linear.weight, ShardSpec(axis, 1))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) of x (..., F/t)."""
        y = self.leave(F.linear(x, self.weight), self.axis)
        return y if self.bias is None else y + self.bias


# --- key and value heads that several ranks store ------------------------------------------------


def key_value_group(axis: Axis, kv_heads: int) -> Axis:
    """Return the KV replication group: the ranks of ``axis`` that store this rank's KV head.

    It is this rank alone if there is a head for every rank. It makes process groups, so every rank
    of the world must call it, once. Raises ValueError if neither number divides the other.
    """
    shards = min(kv_heads, axis.size)
    if kv_heads % shards or axis.size % shards:
        raise ValueError(
            f"kv_heads={kv_heads} on axis {axis.name} of {axis.size} ranks: one must divide the "
            "other, so that each rank has whole heads or shares one; choose another number of "
            "ranks"
        )
    return sub_axis(axis, axis.size // shards, f"{axis.name}_kv")


def sum_shared_gradients(held: Iterable[Held]) -> None:
    """Add up the gradients of key and value weights over each KV replication group.

    Each rank of the group used the head for its own queries only. Call it once per step, after the
    last backward and the sum (or ZeRO's reduce-scatter) over data parallelism. If every rank has a
    head of its own, it does nothing.
    """
    by_group: dict[Axis, list[Held]] = {}
    for one in held:
        spec = comm.shard_spec(one.parameter)
        if spec is not None and spec.kv_group is not None:
            by_group.setdefault(spec.kv_group, []).append(one)
    for group, shared in by_group.items():
        comm.sum_gradients(shared, group)


# --- the vocabulary ------------------------------------------------------------------------------


def _take_vocab_shard(weight_VD: Tensor, axis: Axis) -> nn.Parameter:
    """Return this rank's rows. Rows of padding are zeros and never receive a gradient.

    The spec records V without padding, because another number of ranks needs other padding.
    """
    vocab = len(weight_VD)
    missing = padded_rows(vocab, axis.size) * axis.size - vocab
    padded = F.pad(weight_VD.detach(), (0, 0, 0, missing)).requires_grad_(weight_VD.requires_grad)
    return comm.take_shard(padded, ShardSpec(axis, 0, unpadded=vocab))


class VocabEmbedding(nn.Module):
    """Look up the tokens that this rank owns, zeros for the others; ``leave`` sums over ranks."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, leave: Move = comm.reduce_from) -> None:
        super().__init__()
        self.axis, self.leave = axis, leave
        self.vocab = embedding.num_embeddings
        self.weight = _take_vocab_shard(embedding.weight, axis)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return x (B, S, D) of tokens (B, S); where ``leave`` scatters it, this rank's rows.

        Raises IndexError for a token outside the vocabulary: see :func:`_refuse_outside`.
        """
        outside_BS = (tokens_BS < 0) | (tokens_BS >= self.vocab)
        _refuse_outside(outside_BS, tokens_BS, self.vocab, self.axis)
        rows_BS, is_mine_BS = _in_own_rows(tokens_BS, len(self.weight), self.axis)
        x_BSD = F.embedding(rows_BS, self.weight).masked_fill(~is_mine_BS[..., None], 0.0)
        return self.leave(x_BSD, self.axis)


class VocabHead(nn.Module):
    """Compute the logits of this rank's shard of the vocabulary; padding gets minus infinity."""

    def __init__(self, linear: nn.Linear, axis: Axis, region: Region = REGION) -> None:
        super().__init__()
        if linear.bias is not None:
            raise ValueError("a head with a bias has no vocabulary-parallel form here: drop it")
        self.axis: Axis = axis
        self.region: Region = region
        self.vocab: int = linear.out_features
        self.weight: nn.Parameter = _take_vocab_shard(linear.weight, axis)

    def product(self, x: Tensor, product: Product = F.linear) -> Tensor:
        """Return this rank's logits of x, which has entered the region."""
        return apply_weight(x, self.weight, None, product)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, S, V'/t) of x, which has not entered the region."""
        (logits_BSVt,) = self.region.columns(x, [self.product], self.axis)
        real = min(max(self.vocab - self.axis.rank * len(self.weight), 0), len(self.weight))
        if real == len(self.weight):
            return logits_BSVt
        padding_Vt = torch.arange(len(self.weight), device=x.device) >= real
        return logits_BSVt.masked_fill(padding_Vt, -torch.inf)


def loss_sum(
    logits_BSVt: Tensor, targets_BS: Tensor, axis: Axis, vocab: int
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and the token count, as :func:`course_lib.model.loss_sum`.

    A token's loss is log(sum_v exp(z_v - max)) + max - z_target. Three all-reduces of one number
    per token (max, sum, the target's logit), in float32 at least. Backward needs none:
    dz = softmax - onehot, each rank for its own columns. Raises IndexError for a target outside
    0..``vocab`` - 1; the rows of padding are outside.
    """
    outside_BS = ((targets_BS < 0) | (targets_BS >= vocab)) & (targets_BS != IGNORE_INDEX)
    _refuse_outside(outside_BS, targets_BS, vocab, axis)
    logits_TVt, targets_T = logits_BSVt.flatten(0, -2), targets_BS.flatten()
    loss = _VocabCrossEntropy.apply(logits_TVt, targets_T, axis)
    return loss, (targets_T != IGNORE_INDEX).sum()


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TVt: Tensor, targets_T: Tensor, axis: Axis) -> Tensor:
        z_TVt = logits_TVt.to(accumulation_dtype(logits_TVt.dtype))
        rows_T, is_mine_T = _in_own_rows(targets_T, z_TVt.shape[1], axis)
        max_T = comm.all_reduce_max(z_TVt.amax(1), axis)
        exp_TVt = (z_TVt - max_T[:, None]).exp()
        sum_T = comm.all_reduce(exp_TVt.sum(1), axis)
        own_T = z_TVt.gather(1, rows_T[:, None])[:, 0].masked_fill(~is_mine_T, 0.0)
        target_T = comm.all_reduce(own_T, axis)
        counts_T = targets_T != IGNORE_INDEX
        ctx.save_for_backward(exp_TVt.div_(sum_T[:, None]), rows_T, is_mine_T, counts_T)
        ctx.dtype = logits_TVt.dtype
        return (sum_T.log() + max_T - target_T).masked_fill(~counts_T, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        softmax_TVt, rows_T, is_mine_T, counts_T = ctx.saved_tensors
        dz_TVt = softmax_TVt.clone()
        onehot_T = is_mine_T.to(dz_TVt.dtype)
        dz_TVt.scatter_add_(1, rows_T[:, None], -onehot_T[:, None])
        dz_TVt.mul_((gradient * counts_T)[:, None])
        return dz_TVt.to(ctx.dtype), None, None


def _in_own_rows(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, or 0, and whether this rank owns the token."""
    local = tokens - axis.rank * rows
    is_mine = (local >= 0) & (local < rows)
    return local.masked_fill(~is_mine, 0), is_mine


def _refuse_outside(outside: Tensor, numbers: Tensor, vocab: int, axis: Axis) -> None:
    """Raise IndexError for a token or target outside the vocabulary, as one process does.

    Without the check no rank would own its row, and zeros would replace the embedding or logit. On
    a GPU the check is an asynchronous assertion, as in torch's embedding: it does not wait.
    """
    if outside.is_cuda:
        torch._assert_async(~outside.any(), f"a token or target is outside 0..{vocab - 1}")
    elif outside.any():
        raise IndexError(
            f"axis {axis.name}, rank {axis.rank}: token or target {int(numbers[outside][0])} is "
            f"outside the vocabulary of {vocab} words, 0..{vocab - 1}; build the model with a "
            "larger one, or mask what should not count with IGNORE_INDEX (targets only)"
        )


# --- dropout --------------------------------------------------------------------------------------


class RankDropout(nn.Module):
    """Dropout with a different mask on each rank of the axis.

    Outside a region of plain tensor parallelism, ranks hold equal activations and must drop the
    same elements. ``nn.Dropout`` does that if all ranks called ``torch.manual_seed`` with one
    number. In sequence parallelism they hold different rows, and equal masks would drop the same
    positions of every shard. Here each rank draws a seed from torch's global stream, which is equal
    on all ranks, and combines it with its rank. Recomputation that restores the stream repeats the
    mask.
    """

    def __init__(self, p: float, axis: Axis) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"expected 0 <= p < 1, got p={p}")
        self.p, self.axis = p, axis

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with a fraction p of its elements dropped, the others scaled by 1/(1-p)."""
        if not self.training or self.p == 0:
            return x
        seed = int(torch.randint(2**31, ())) * self.axis.size + self.axis.rank
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.p
        return x * kept / (1 - self.p)
