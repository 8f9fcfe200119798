"""What a decoder is made of: positions, attention, MLP, block, embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.model.config import ModelConfig, accumulation_dtype


def rotary_angles(positions_S: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Angles by which RoPE turns each pair of features: ``position * base ** (-2 r / K)``, (S, R).

    ``positions_S`` may be (B, S), each sequence's own, and then the angles are (B, S, R).
    Computed in float32 at least, float64 in a float64 model: bfloat16 cannot tell position 257
    from 258. Source: Su et al. 2021, RoFormer.
    """
    dtype = accumulation_dtype(dtype)
    pairs_R = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=dtype) / head_dim
    return positions_S.to(dtype)[..., None] * base**-pairs_R


def rotate(x_BSHK: Tensor, angles_SR: Tensor) -> Tensor:
    """Turn feature r and feature r + K/2 of every head as one point in the plane.

    Dot products of two rotated vectors depend on the difference of their positions alone.
    """
    cos_S1R, sin_S1R = angles_SR.cos().unsqueeze(-2), angles_SR.sin().unsqueeze(-2)
    first_BSHR, second_BSHR = x_BSHK.to(angles_SR.dtype).chunk(2, dim=-1)
    turned_BSHK = torch.cat(
        (
            first_BSHR * cos_S1R - second_BSHR * sin_S1R,
            first_BSHR * sin_S1R + second_BSHR * cos_S1R,
        ),
        dim=-1,
    )
    return turned_BSHK.to(x_BSHK.dtype)


def causal_attention(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Softmax attention, (B, S, H, K): row i of S sees rows 0..i. Query head h uses head h*G//H.

    The rows must hold all positions of the sequence in ascending order; whoever holds other rows
    puts another function in :attr:`Attention.core`.
    """
    y_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BSGK.transpose(1, 2),
        v_BSGK.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
    )
    return y_BHSK.transpose(1, 2)


AttentionCore = Callable[[Tensor, Tensor, Tensor], Tensor]
Linears = Iterable[Callable[..., Tensor]]
Columns = Callable[[Tensor, Linears], list[Tensor]]  # x, linears that all read x -> outputs
Run = Callable[..., Tensor]  # function, its tensors -> its result


def each_linear(x: Tensor, linears: Linears) -> list[Tensor]:
    """Return the output of every linear for the same input ``x``."""
    return [linear(x) for linear in linears]


def call(function: Callable[..., Tensor], *tensors: Any) -> Tensor:
    """Return ``function(*tensors)``."""
    return function(*tensors)


def identity(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


class Attention(nn.Module):
    """``o(core(rope(q(x)), rope(k(x)), v(x)))`` with x (B, S, D); RoPE in the llama family only.

    Two fields may be set to compute the same in another way. ``core`` maps q (B, S, H, K), k and
    v (B, S, G, K) to (B, S, H, K). ``columns`` applies q, k and v to x: tensor parallelism sets it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_features = config.kv_heads * config.head_dim
        self.q = _linear(config, config.hidden, config.hidden)
        self.k = _linear(config, config.hidden, kv_features)
        self.v = _linear(config, config.hidden, kv_features)
        self.o = _linear(config, config.hidden, config.hidden)
        self.core: AttentionCore = causal_attention
        self.columns: Columns = each_linear

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        # -1 heads: as many as the linear returned; under tensor parallelism that is a shard
        head_dim = self.config.head_dim
        q_BSHK, k_BSGK, v_BSGK = (
            y.unflatten(-1, (-1, head_dim)) for y in self.columns(x_BSD, (self.q, self.k, self.v))
        )
        if self.config.family == "llama":
            angles_SR = rotary_angles(
                positions_S, head_dim, self.config.rope_base, self.config.dtype
            )
            q_BSHK, k_BSGK = rotate(q_BSHK, angles_SR), rotate(k_BSGK, angles_SR)
        y_BSHK = self.core(q_BSHK, k_BSGK, v_BSGK)
        return self.o(y_BSHK.flatten(-2))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the MLP of the llama family. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = _linear(config, config.hidden, config.ffn)
        self.up = _linear(config, config.hidden, config.ffn)
        self.down = _linear(config, config.ffn, config.hidden)
        self.columns: Columns = each_linear  # as in Attention

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = self.columns(x_BSD, (self.gate, self.up))
        return self.down(F.silu(gate_BSF) * up_BSF)


class MLP(nn.Module):
    """``fc_out(gelu(fc_in(x)))``, the MLP of the gpt family."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc_in = _linear(config, config.hidden, config.ffn)
        self.fc_out = _linear(config, config.ffn, config.hidden)
        self.columns: Columns = each_linear  # as in Attention

    def forward(self, x_BSD: Tensor) -> Tensor:
        (h_BSF,) = self.columns(x_BSD, (self.fc_in,))
        return self.fc_out(F.gelu(h_BSF))


class Block(nn.Module):
    """One layer: ``x + attn(attn_norm(x))``, then ``x + ffn(ffn_norm(x))``; x is (B, S, D).

    ``layer`` is its number in the whole model, from 0. ``run`` calls :meth:`residuals`:
    recomputation sets this field, so that hooks of the block run once.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.attn_norm = norm_of(config)
        self.attn = Attention(config)
        self.ffn_norm = norm_of(config)
        self.ffn: nn.Module = SwiGLU(config) if config.family == "llama" else MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.run: Run = call

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        return self.run(self.residuals, x_BSD, positions_S)

    def residuals(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        """Add attention and MLP to x (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attn(self.attn_norm(x_BSD), positions_S))
        return x_BSD + self.dropout(self.ffn(self.ffn_norm(x_BSD)))


class Embedding(nn.Module):
    """Tokens (B, S) to x (B, S, D). ``position`` is None in the llama family.

    ``own_rows`` selects the positions of the rows that ``token`` returns: see :class:`Decoder`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden, dtype=config.dtype)
        self.position = (
            nn.Embedding(config.max_seq_len, config.hidden, dtype=config.dtype)
            if config.family == "gpt"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        tokens_BS: Tensor,
        positions_S: Tensor,
        own_rows: Callable[[Tensor], Tensor] = identity,
    ) -> Tensor:
        x_BSD = self.token(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position(own_rows(positions_S))
        return self.dropout(x_BSD)


def _linear(config: ModelConfig, features_in: int, features_out: int) -> nn.Linear:
    bias = config.family == "gpt"
    return nn.Linear(features_in, features_out, bias=bias, dtype=config.dtype)


def norm_of(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.family == "llama" else nn.LayerNorm
    return kind(config.hidden, eps=config.norm_eps, dtype=config.dtype)
