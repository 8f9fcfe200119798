"""The serial twin: a small decoder in plain torch that every parallel version is compared with.

Two families. ``llama``: RMSNorm, rotary positions (RoPE), grouped-query attention, SwiGLU, no
biases. ``gpt``: LayerNorm, learned positions, an MLP of two matrices with GELU, biases. Both
add what attention and MLP return to their input (pre-norm residuals).

Letters in names: ``x_BSD`` has the dimensions B, S, D in this order.
  B sequences (batch)   S positions of a sequence   D hidden size      V vocabulary
  H query heads         G key and value heads       K size of a head   F inner size of the MLP
  R = K/2 pairs of a head that RoPE rotates

The parts are made to be cut: projections are separate ``nn.Linear``; attention and MLP read the
number of heads off their input, so that a linear may return a share of them; a block runs alone
on ``(x_BSD, positions_S)``; :meth:`Decoder.stage` is a slice for a pipeline; ``Attention.core``
may be replaced. Positions are passed, never counted, because a rank may hold any part of a
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAMILIES = ("llama", "gpt")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
IGNORE_INDEX = -100  # a target that counts for nothing


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. The default is small enough for one core and cuts by 2, 4 and 8.

    ``kv_heads`` < ``heads`` is grouped-query attention. ``ffn`` is the inner size of the MLP.
    ``vocab`` is 256 for byte tokens; more is allowed for padding. ``dropout`` is the share of
    elements dropped from the embedding and from what attention and MLP return.
    Raises ValueError that names the field when sizes do not fit.
    """

    family: str = "llama"
    layers: int = 4
    hidden: int = 64
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 192
    max_seq_len: int = 128
    vocab: int = 256
    tied: bool = False
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}: choose one of {', '.join(FAMILIES)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype}: choose one of {', '.join(map(str, DTYPES))}")
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "max_seq_len", "vocab"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={size!r}: a whole number, 1 or more, is wanted")
        self._check_heads()
        if self.vocab < 256:
            raise ValueError(f"vocab={self.vocab}: byte tokens need 256 or more")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: a share from 0 up to, not including, 1")
        if self.rope_base <= 1 or self.norm_eps <= 0:
            raise ValueError(
                f"rope_base={self.rope_base} must be above 1 and norm_eps={self.norm_eps} above 0"
            )

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}: every head takes "
                "hidden / heads features; choose a divisor"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: each key and value "
                "head serves heads / kv_heads query heads; choose a divisor"
            )
        if self.family == "llama" and self.head_dim % 2:
            raise ValueError(
                f"hidden={self.hidden} / heads={self.heads} gives heads of {self.head_dim} "
                "features: RoPE rotates pairs, so that an even number is wanted"
            )

    @property
    def head_dim(self) -> int:
        """Features of one head, K."""
        return self.hidden // self.heads


def tiny_config(**changes: Any) -> ModelConfig:
    """The model of the tour and of most lessons: the default config with ``changes``."""
    return replace(ModelConfig(), **changes)


# --- positions and attention ---------------------------------------------------------------


def rotary_angles(positions_S: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Angles by which RoPE turns each pair of features: ``position * base ** (-2 r / K)``, (S, R).

    Computed in float32 at least, float64 in a float64 model: bfloat16 cannot tell position 257
    from 258. Source: Su et al. 2021, RoFormer.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    pairs_R = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=dtype) / head_dim
    return positions_S.to(dtype)[:, None] * base**-pairs_R


def rotate(x_BSHK: Tensor, angles_SR: Tensor) -> Tensor:
    """Turn feature r and feature r + K/2 of every head as one point in the plane.

    Dot products of two rotated vectors depend on the difference of their positions alone.
    """
    cos_S1R, sin_S1R = angles_SR.cos()[:, None], angles_SR.sin()[:, None]
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


class Attention(nn.Module):
    """``o(core(rope(q(x)), rope(k(x)), v(x)))`` with x (B, S, D); RoPE in the llama family only.

    ``core`` maps q (B, S, H, K), k and v (B, S, G, K) to (B, S, H, K); replace it to compute the
    same attention in another way.
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

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        # -1 heads: as many as the linear returned, which under tensor parallelism is a share
        head_dim = self.config.head_dim
        q_BSHK = self.q(x_BSD).unflatten(-1, (-1, head_dim))
        k_BSGK = self.k(x_BSD).unflatten(-1, (-1, head_dim))
        v_BSGK = self.v(x_BSD).unflatten(-1, (-1, head_dim))
        if self.config.family == "llama":
            angles_SR = rotary_angles(
                positions_S, head_dim, self.config.rope_base, self.config.dtype
            )
            q_BSHK, k_BSGK = rotate(q_BSHK, angles_SR), rotate(k_BSGK, angles_SR)
        y_BSHK = self.core(q_BSHK, k_BSGK, v_BSGK)
        return self.o(y_BSHK.flatten(-2))


# --- MLP, block, embedding -----------------------------------------------------------------


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, the MLP of the llama family. Source: Shazeer 2020."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = _linear(config, config.hidden, config.ffn)
        self.up = _linear(config, config.hidden, config.ffn)
        self.down = _linear(config, config.ffn, config.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.silu(self.gate(x_BSD)) * self.up(x_BSD)
        return self.down(h_BSF)


class MLP(nn.Module):
    """``fc_out(gelu(fc_in(x)))``, the MLP of the gpt family."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc_in = _linear(config, config.hidden, config.ffn)
        self.fc_out = _linear(config, config.ffn, config.hidden)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = F.gelu(self.fc_in(x_BSD))
        return self.fc_out(h_BSF)


class Block(nn.Module):
    """One layer: ``x + attn(attn_norm(x))``, then ``x + ffn(ffn_norm(x))``; x is (B, S, D).

    ``layer`` is its number in the whole model, from 0.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.attn_norm = _norm(config)
        self.attn = Attention(config)
        self.ffn_norm = _norm(config)
        self.ffn: nn.Module = SwiGLU(config) if config.family == "llama" else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attn(self.attn_norm(x_BSD), positions_S))
        return x_BSD + self.dropout(self.ffn(self.ffn_norm(x_BSD)))


class Embedding(nn.Module):
    """Tokens (B, S) to x (B, S, D). ``position`` is None in the llama family."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden, dtype=config.dtype)
        self.position = (
            nn.Embedding(config.max_seq_len, config.hidden, dtype=config.dtype)
            if config.family == "gpt"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        x_BSD = self.token(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position(positions_S)
        return self.dropout(x_BSD)


def _linear(config: ModelConfig, features_in: int, features_out: int) -> nn.Linear:
    bias = config.family == "gpt"
    return nn.Linear(features_in, features_out, bias=bias, dtype=config.dtype)


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.family == "llama" else nn.LayerNorm
    return kind(config.hidden, eps=config.norm_eps, dtype=config.dtype)


CrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits, targets -> sum, count


# --- the whole, and slices of it -----------------------------------------------------------


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; or a slice of these, where what it lacks is None.

    ``forward`` takes tokens (B, S) where there is an embedding, else x (B, S, D), and returns
    logits (B, S, V) where there is a head, else x. Build a whole one with :func:`build_model`.
    ``cross_entropy`` is :func:`loss_sum`, unless whoever cuts the vocabulary puts another there.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding | None,
        blocks: Iterable[Block],
        norm: nn.Module | None,
        head: nn.Linear | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.cross_entropy: CrossEntropy = loss_sum

    def forward(self, x: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """``positions_S`` left out means 0..S-1. Raises ValueError when S exceeds max_seq_len."""
        seq_len = x.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"{seq_len} positions, but the model was built for max_seq_len="
                f"{self.config.max_seq_len}; shorten the sequence or build with a larger one"
            )
        if positions_S is None:
            positions_S = torch.arange(seq_len, device=x.device)
        if self.embedding is not None:
            x = self.embedding(x, positions_S)
        for block in self.blocks:
            x = block(x, positions_S)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)

    def loss_sum(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of this batch: see :func:`loss_sum`. Divide for the mean over tokens."""
        return self.cross_entropy(self(tokens_BS), targets_BS)

    def stage(self, first: int, end: int) -> Decoder:
        """A slice with blocks ``first``..``end - 1``; it shares modules and weights with this.

        It has the embedding when ``first`` is 0 and norm and head when ``end`` is the number of
        layers, so that consecutive slices hold everything once. Meant for whole models.
        """
        layers = len(self.blocks)
        if not 0 <= first < end <= layers:
            raise ValueError(
                f"stage of blocks {first} up to {end}: 0 <= first < end <= {layers} is wanted; a "
                "stage has at least one block, and end is the first block after it"
            )
        last = end == layers
        stage = Decoder(
            self.config,
            self.embedding if first == 0 else None,
            list(self.blocks)[first:end],  # type: ignore[arg-type]
            self.norm if last else None,
            self.head if last else None,
        )
        stage.cross_entropy = self.cross_entropy
        return stage


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over tokens, and how many tokens that were (two scalar tensors).

    Not the mean: ranks may hold different numbers of tokens, and the mean over all tokens is
    (sum of sums) / (sum of counts), not the mean of the ranks' means. Targets of
    ``IGNORE_INDEX`` count for nothing. Computed in float32 at least.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    total = F.cross_entropy(
        logits_BSV.flatten(0, 1).to(dtype),
        targets_BS.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return total, (targets_BS != IGNORE_INDEX).sum()


def build_model(config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> Decoder:
    """A whole model whose weights follow from ``config`` and ``seed`` alone.

    The global random state is neither read nor changed. Numbers are drawn in float32 on the CPU,
    so that all dtypes and devices start from the same weights (up to rounding).
    Raises ValueError for a seed outside 0..2**32 - 1.
    """
    if not 0 <= seed < 2**32:  # torch silently drops the bits above
        raise ValueError(f"seed={seed}: a whole number from 0 to 2**32 - 1 is wanted")
    with torch.random.fork_rng(devices=[]):  # torch's own initialisation draws numbers too
        embedding = Embedding(config)
        blocks = [Block(config, layer) for layer in range(config.layers)]
        head = nn.Linear(config.hidden, config.vocab, bias=False, dtype=config.dtype)
    if config.tied:
        head.weight = embedding.token.weight
    model = Decoder(config, embedding, blocks, _norm(config), head)
    _initialize(model, seed)
    return model.to(device)


EMBEDDING_STD = 0.02  # small logits: the first loss is close to ln(vocab)
RESIDUAL_ENDS = ("attn.o.weight", "ffn.down.weight", "ffn.fc_out.weight")


@torch.no_grad()
def _initialize(model: Decoder, seed: int) -> None:
    """Normal weights of variance 1/fan_in, biases 0, norm weights 1.

    What is added to the residual stream is scaled by 1/sqrt(2 layers) more, so that its variance
    does not grow with depth. Source: Radford et al. 2019 (GPT-2).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if parameter.dim() < 2:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        std = parameter.shape[1] ** -0.5
        if name.startswith(("embedding.", "head.")):
            std = EMBEDDING_STD
        elif name.endswith(RESIDUAL_ENDS):
            std /= math.sqrt(2 * model.config.layers)
        draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(draw * std)


# --- counting without building -------------------------------------------------------------


def block_parameter_count(config: ModelConfig) -> int:
    """Parameters of one block, from shapes alone."""
    hidden, kv_features = config.hidden, config.kv_heads * config.head_dim
    attention = 2 * hidden * hidden + 2 * hidden * kv_features
    if config.family == "llama":
        return attention + 3 * hidden * config.ffn + 2 * hidden
    biases = 2 * hidden + 2 * kv_features + config.ffn + hidden
    return attention + 2 * hidden * config.ffn + biases + 2 * 2 * hidden


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, from shapes alone; a tied embedding counts once."""
    embeddings = config.vocab * config.hidden * (1 if config.tied else 2)
    final_norm = config.hidden
    if config.family == "gpt":
        embeddings += config.max_seq_len * config.hidden
        final_norm += config.hidden
    return embeddings + config.layers * block_parameter_count(config) + final_norm
