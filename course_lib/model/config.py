"""The sizes of a decoder, and which of them fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

FAMILIES = ("llama", "gpt")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, softmax and angles in a model of ``dtype``: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. The default is small enough for one core and cuts by 2, 4 and 8.

    ``kv_heads`` < ``heads`` is grouped-query attention. ``ffn`` is the inner size of the MLP.
    ``vocab`` is 256 for byte tokens; more is allowed for padding. ``dropout`` is the fraction of
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
                raise ValueError(f"expected a whole number of 1 or more, got {name}={size!r}")
        self._check_heads()
        if self.vocab < 256:
            raise ValueError(f"vocab={self.vocab}: byte tokens need 256 or more")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"expected 0 <= dropout < 1, got dropout={self.dropout}")
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
                "features: RoPE rotates pairs; choose an even number"
            )

    @property
    def head_dim(self) -> int:
        """Features of one head, K."""
        return self.hidden // self.heads


def tiny_config(**changes: Any) -> ModelConfig:
    """The model of the tour and of most lessons: the default config with ``changes``."""
    return replace(ModelConfig(), **changes)
