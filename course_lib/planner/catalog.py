"""The models of the catalog (models.toml), each with its source, and models of your own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

FAMILIES = ("gpt", "llama")


@dataclass(frozen=True)
class Dtype:
    """A number format, as far as sizes go; stands in for ``torch.dtype`` in the formulas."""

    name: str
    itemsize: int


FP8, BF16, FP16 = Dtype("fp8", 1), Dtype("bf16", 2), Dtype("fp16", 2)
FP32, FP64 = Dtype("fp32", 4), Dtype("fp64", 8)
DTYPES = {dtype.name: dtype for dtype in (FP8, BF16, FP16, FP32, FP64)}


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. ``ffn`` is the inner size of one, ``shared`` counts those that
    every token visits. The first ``dense_layers`` layers have an MLP instead."""

    number: int
    top_k: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class LatentAttention:
    """The low-rank projections of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Ranks of the latent vectors of q and of K and V, and features of a head without and with RoPE,
    and of a value.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder. It has the attributes that the formulas read of a model's config.

    ``family``: "gpt" has LayerNorm, GELU, biases and learned positions, "llama" RMSNorm, SwiGLU
    and RoPE. ``max_seq_len`` is the sequence length of training unless a plan says otherwise.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_seq_len: int
    head_dim: int
    tied: bool = False
    dropout: float = 0.0
    dtype: Dtype = BF16
    experts: Experts | None = None
    latent: LatentAttention | None = None
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def models() -> list[str]:
    """Return the names in the catalog."""
    return list(_catalog())


def model(name: str) -> Model:
    """Return a model of the catalog; ValueError with the nearest names if there is none."""
    found = _catalog()
    if name not in found:
        near = get_close_matches(name, found, n=3, cutoff=0.3) or list(found)
        raise ValueError(f"no model is called {name!r}; did you mean {' or '.join(near)}?")
    return found[name]


def custom_model(
    family: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    experts: int = 0,
    top_k: int = 2,
    max_seq_len: int = 2048,
    name: str = "custom",
) -> Model:
    """Return a model of these sizes. ``ffn`` is 4 hidden for gpt, about 8/3 hidden for llama."""
    default = 4 * hidden if family == "gpt" else -(-8 * hidden // (3 * 256)) * 256
    inner = default if ffn is None else ffn
    return Model(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        ffn=inner,
        vocab=vocab,
        max_seq_len=max_seq_len,
        head_dim=hidden // heads,
        tied=family == "gpt",
        experts=Experts(experts, top_k, inner) if experts else None,
        source="sizes given by the reader",
    )


@cache
def _catalog() -> dict[str, Model]:
    text = Path(__file__).with_name("models.toml").read_text(encoding="utf-8")
    return {name: _model(name, dict(row)) for name, row in tomllib.loads(text).items()}


def _model(name: str, row: dict[str, Any]) -> Model:
    if "experts" in row:
        row["experts"] = Experts(**row["experts"])
    if "latent" in row:
        row["latent"] = LatentAttention(**row["latent"])
    row.setdefault("kv_heads", row["heads"])
    row.setdefault("head_dim", row["hidden"] // row["heads"])
    return Model(name=name, **row)
