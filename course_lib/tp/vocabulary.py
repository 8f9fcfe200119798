"""Embedding, head and cross-entropy with the vocabulary cut: no rank ever holds all logits.

The vocabulary is padded to V' = t * ceil(V / t). Rank r has the rows r V'/t .. (r+1) V'/t - 1.
Source: Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from course_lib import comm
from course_lib.comm.operators import Move
from course_lib.mesh import Axis
from course_lib.model import IGNORE_INDEX
from course_lib.tp.linear import apply_weight
from course_lib.tp.shards import own_part


def padded_rows(vocab: int, n: int) -> int:
    """Rows of the vocabulary on each of ``n`` ranks, padding included."""
    return -(-vocab // n)


def _own_rows(weight_VD: Tensor, axis: Axis) -> nn.Parameter:
    """This rank's rows; those beyond the vocabulary are zeros and never get a gradient.

    Beside the notes of own_part it leaves ``tp_rows`` = V: on another number of ranks the padding
    is another one.
    """
    missing = padded_rows(len(weight_VD), axis.size) * axis.size - len(weight_VD)
    padded = F.pad(weight_VD.detach(), (0, 0, 0, missing)).requires_grad_(weight_VD.requires_grad)
    part = own_part(padded, axis, dim=0)
    part.tp_rows = len(weight_VD)  # type: ignore[attr-defined]
    return part


class VocabEmbedding(nn.Module):
    """Rows of this rank's tokens, zeros for the others; ``leave`` adds the ranks' parts up."""

    def __init__(self, embedding: nn.Embedding, axis: Axis, leave: Move = comm.reduce_from) -> None:
        super().__init__()
        self.axis, self.leave = axis, leave
        self.vocab = embedding.num_embeddings
        self.weight = _own_rows(embedding.weight, axis)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """tokens (B, S) to x (B, S, D), or to what ``leave`` makes of it.

        Raises IndexError for a token outside the vocabulary: see :func:`_refuse_outside`.
        """
        _refuse_outside(
            (tokens_BS < 0) | (tokens_BS >= self.vocab), tokens_BS, self.vocab, self.axis
        )
        rows_BS, is_mine_BS = _in_own_rows(tokens_BS, len(self.weight), self.axis)
        x_BSD = F.embedding(rows_BS, self.weight).masked_fill(~is_mine_BS[..., None], 0.0)
        return self.leave(x_BSD, self.axis)


class VocabHead(nn.Module):
    """Logits of this rank's tokens, (B, S, V'/t), in which padding is minus infinity."""

    def __init__(self, linear: nn.Linear, axis: Axis, enter: Move = comm.copy_to) -> None:
        super().__init__()
        if linear.bias is not None:
            raise ValueError("a head with a bias has no vocabulary-parallel form here: drop it")
        self.axis: Axis = axis
        self.enter: Move = enter
        self.vocab: int = linear.out_features
        self.weight: nn.Parameter = _own_rows(linear.weight, axis)

    def forward(self, x: Tensor) -> Tensor:
        """x as it is outside the region, to logits (B, S, V'/t)."""
        logits_BSVt = apply_weight(self.enter(x, self.axis), self.weight)
        real = min(max(self.vocab - self.axis.rank * len(self.weight), 0), len(self.weight))
        if real == len(self.weight):
            return logits_BSVt
        padding_Vt = torch.arange(len(self.weight), device=x.device) >= real
        return logits_BSVt.masked_fill(padding_Vt, -torch.inf)


def loss_sum(
    logits_BSVt: Tensor,
    targets_BS: Tensor,
    axis: Axis,
    vocab: int,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over tokens, and how many count: as :func:`course_lib.model.loss_sum`.

    A token's loss is log(sum_v exp(z_v - max)) + max - z_target. Three all-reduces of one number
    a token (max, sum, the target's logit), in float32 at least. Backward needs none:
    dz = softmax - onehot, each rank for its own columns. Raises IndexError for a target outside
    the ``vocab`` words, those of the padding among them.
    """
    outside_BS = ((targets_BS < 0) | (targets_BS >= vocab)) & (targets_BS != ignore_index)
    _refuse_outside(outside_BS, targets_BS, vocab, axis)
    logits_TVt, targets_T = logits_BSVt.flatten(0, -2), targets_BS.flatten()
    loss = _VocabCrossEntropy.apply(logits_TVt, targets_T, axis, ignore_index)
    return loss, (targets_T != ignore_index).sum()


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TVt: Tensor, targets_T: Tensor, axis: Axis, ignore_index: int):
        z_TVt = logits_TVt.to(torch.promote_types(logits_TVt.dtype, torch.float32))
        rows_T, is_mine_T = _in_own_rows(targets_T, z_TVt.shape[1], axis)
        max_T = comm.all_reduce_max(z_TVt.amax(1), axis)
        exp_TVt = (z_TVt - max_T[:, None]).exp()
        sum_T = comm.all_reduce(exp_TVt.sum(1), axis)
        own_T = z_TVt.gather(1, rows_T[:, None])[:, 0].masked_fill(~is_mine_T, 0.0)
        target_T = comm.all_reduce(own_T, axis)
        counts_T = targets_T != ignore_index
        ctx.save_for_backward(exp_TVt.div_(sum_T[:, None]), rows_T, is_mine_T, counts_T)
        ctx.dtype = logits_TVt.dtype
        return (sum_T.log() + max_T - target_T).masked_fill(~counts_T, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        softmax_TVt, rows_T, is_mine_T, counts_T = ctx.saved_tensors
        dz_TVt = softmax_TVt.clone()
        onehot_T = is_mine_T.to(dz_TVt.dtype)
        dz_TVt.scatter_add_(1, rows_T[:, None], -onehot_T[:, None])
        dz_TVt.mul_((gradient * counts_T)[:, None])
        return dz_TVt.to(ctx.dtype), None, None, None


def _in_own_rows(tokens: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Each token as a row of this rank (0 where it is not here), and whether it is here."""
    local = tokens - axis.rank * rows
    is_mine = (local >= 0) & (local < rows)
    return local.masked_fill(~is_mine, 0), is_mine


def _refuse_outside(outside: Tensor, numbers: Tensor, vocab: int, axis: Axis) -> None:
    """Raise IndexError where ``outside`` says that a token or target is no word, as one process
    does: else no rank would have its row, and zeros would go for an embedding or a logit.

    On a GPU without waiting for the device, as torch's own embedding: the assertion stops it later.
    """
    if outside.is_cuda:
        torch._assert_async(~outside.any(), f"a token or target is outside 0..{vocab - 1}")
    elif outside.any():
        raise IndexError(
            f"axis {axis.name}, rank {axis.rank}: token or target {int(numbers[outside][0])} is "
            f"outside the vocabulary of {vocab} words, 0..{vocab - 1}; build the model with a "
            "larger one, or mask what should not count with IGNORE_INDEX (targets only)"
        )
