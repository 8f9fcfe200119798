"""The whole decoder and slices of it, its loss, and weights that follow from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.model.config import ModelConfig, accumulation_dtype
from course_lib.model.layers import Block, Embedding, identity, norm_of

IGNORE_INDEX = -100  # a target that counts for nothing
LossSum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # x, targets -> summed loss, tokens


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head; or a slice of these, where what it lacks is None.

    ``forward`` takes tokens (B, S) where there is an embedding, else x (B, S, D), and returns
    logits (B, S, V) where there is a head, else x. Build a whole one with :func:`build_model`.
    Two fields may be set, by tensor parallelism: ``cross_entropy`` is :func:`loss_sum` unless the
    vocabulary is sharded, and ``own_rows`` selects from (S,) positions those of which x has rows
    between blocks, which are all positions unless ranks divide them.
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
        self.cross_entropy: LossSum = loss_sum
        self.own_rows: Callable[[Tensor], Tensor] = identity

    def forward(self, x: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """``positions_S`` left out means 0..S-1; (B, S) gives each sequence its own.

        Raises ValueError when S exceeds max_seq_len.
        """
        seq_len = x.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(
                f"{seq_len} positions, but the model was built for max_seq_len="
                f"{self.config.max_seq_len}; shorten the sequence or build with a larger one"
            )
        if positions_S is None:
            positions_S = torch.arange(seq_len, device=x.device)
        if self.embedding is not None:
            x = self.embedding(x, positions_S, self.own_rows)
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
                f"stage of blocks {first} up to {end}: expected 0 <= first < end <= {layers}; a "
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
        stage.cross_entropy, stage.own_rows = self.cross_entropy, self.own_rows
        return stage


def loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over tokens, and how many tokens that were (two scalar tensors).

    Not the mean: ranks may hold different numbers of tokens, and the mean over all tokens is
    (sum of sums) / (sum of counts), not the mean of the ranks' means. Targets of
    ``IGNORE_INDEX`` count for nothing. Computed in float32 at least.
    """
    dtype = accumulation_dtype(logits_BSV.dtype)
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
        raise ValueError(f"expected a seed from 0 to 2**32 - 1, got seed={seed}")
    with torch.random.fork_rng(devices=[]):  # torch's own initialisation draws numbers too
        embedding = Embedding(config)
        blocks = [Block(config, layer) for layer in range(config.layers)]
        head = nn.Linear(config.hidden, config.vocab, bias=False, dtype=config.dtype)
    if config.tied:
        head.weight = embedding.token.weight
    model = Decoder(config, embedding, blocks, norm_of(config), head)
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
