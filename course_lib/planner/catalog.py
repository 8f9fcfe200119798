"""The models of the catalog (models.toml), each with its source, and models of your own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

FAMILIES = ("gpt", "llama")
# Above these a size is a mistake, and the plan would take minutes.
LARGEST = {
    "layers": 10_000,
    "hidden": 2**20,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "ffn": 2**24,
    "vocab": 2**24,
    "max_seq_len": 2**28,
}
MOST_EXPERTS = 2**16
T = TypeVar("T")


@dataclass(frozen=True)
class Dtype:
    """The name and size of a number format; replaces ``torch.dtype`` in the formulas."""

    name: str
    itemsize: int


FP8, BF16, FP16 = Dtype("fp8", 1), Dtype("bf16", 2), Dtype("fp16", 2)
FP32, FP64 = Dtype("fp32", 4), Dtype("fp64", 8)
DTYPES = {dtype.name: dtype for dtype in (FP8, BF16, FP16, FP32, FP64)}


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. ``ffn`` is the inner size of one, ``shared`` counts those that
    every token visits. The first ``dense_layers`` layers have an MLP instead. With
    ``router_bias`` the router adds a number per expert, which balances the load."""

    number: int
    top_k: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    router_bias: bool = False


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
    """The sizes of a decoder, under the names that the formulas use.

    ``family``: "gpt" has LayerNorm, GELU, biases and learned positions, "llama" RMSNorm, SwiGLU
    and RoPE. ``max_seq_len`` is the sequence length of training unless a plan says otherwise.
    Where a published model departs from its family, ``attention_bias``, ``mlp_bias`` and
    ``positions`` (learned) say so; ``block_norms`` is 1 if attention and MLP read one norm.
    ``published`` is the parameter count as the source prints it, such as "18.4B".
    Raises ValueError that names the field when sizes do not fit.
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
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    positions: bool | None = None
    block_norms: int = 2
    head_bias: bool = False
    published: str = ""
    published_active: str = ""
    source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}: choose one of {', '.join(FAMILIES)}")
        _check_sizes(self, LARGEST)
        if self.latent is None:
            _check_heads(self)
        if self.experts is not None:
            _check_experts(self.experts)


def models() -> list[str]:
    """Return the names in the catalog."""
    return list(_catalog())


def model(name: str) -> Model:
    """Return a model of the catalog; ValueError with the nearest names if there is none."""
    return look_up("model", name, _catalog())


def look_up(kind: str, name: str, found: Mapping[str, T]) -> T:
    """Return the entry ``name``; ValueError with the nearest names if there is none."""
    if name in found:
        return found[name]
    asked = name.lower()
    near = [one for one in found if asked and asked in one][:3]
    near = near or get_close_matches(asked, found, n=3, cutoff=0.45)
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(found)}"
    raise ValueError(f"no {kind} is called {name!r}; {advice}")


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
    """Return a model of these sizes; ValueError that names the field when they do not fit.

    ``ffn``, also of an expert, is 4 hidden for gpt and about 8/3 hidden for llama. A gpt model has
    dropout, whose masks take memory, as in Megatron-LM.
    """
    _check_size("hidden", hidden, LARGEST["hidden"])  # before they are divided
    _check_size("heads", heads, LARGEST["heads"])
    _check_size("experts", experts, MOST_EXPERTS, least=0)
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
        dropout=0.1 if family == "gpt" else 0.0,
        tied=family == "gpt",
        experts=Experts(experts, top_k, inner) if experts else None,
        source="sizes given by the reader",
    )


def _check_sizes(sizes: object, largest: Mapping[str, int]) -> None:
    for name, most in largest.items():
        _check_size(name, getattr(sizes, name), most)


def _check_size(name: str, size: object, most: int, least: int = 1) -> None:
    if type(size) is not int or not least <= size <= most:
        raise ValueError(f"expected a whole number from {least} to {most:,}, got {name}={size!r}")


def _check_heads(sizes: Model) -> None:
    hidden, heads, kv_heads = sizes.hidden, sizes.heads, sizes.kv_heads
    if hidden % heads:
        raise ValueError(
            f"heads={heads} does not divide hidden={hidden}: every head takes hidden / heads "
            "features; choose a divisor"
        )
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads={kv_heads} does not divide heads={heads}: each key and value head serves "
            "heads / kv_heads query heads; choose a divisor"
        )
    if sizes.family == "llama" and sizes.head_dim % 2:
        raise ValueError(
            f"hidden={hidden} / heads={heads} gives heads of {sizes.head_dim} features: RoPE "
            "rotates pairs; choose an even number"
        )


def _check_experts(experts: Experts) -> None:
    _check_sizes(experts, {"number": MOST_EXPERTS, "top_k": MOST_EXPERTS, "ffn": LARGEST["ffn"]})
    if experts.top_k > experts.number:
        raise ValueError(
            f"expected top_k of at most the number of experts, got top_k={experts.top_k} and "
            f"experts={experts.number}; choose fewer experts per token or more experts"
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
