"""A plan as data: module names (``*`` matches one name) and the functions that replace them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import nn

from course_lib.comm import Region
from course_lib.mesh import Axis
from course_lib.model import Attention, Decoder, ModelConfig
from course_lib.model.layers import MLP, SwiGLU
from course_lib.tp.layers import (
    REGION,
    ColumnLinear,
    RankDropout,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    identity,
    key_value_group,
    loss_sum,
)

SHARDED = (ColumnLinear, RowLinear, VocabEmbedding, VocabHead)


@dataclass(frozen=True)
class Cut:
    """The values that an entry of a plan needs to make its module.

    ``kv_group`` is the KV replication group: the ranks that store the same key and value head.
    """

    axis: Axis
    region: Region
    kv_group: Axis

    @property
    def by_rows(self) -> bool:
        """Whether ranks hold different rows outside the regions, as in sequence parallelism."""
        return self.region.rows is not identity


Entry = Callable[[Any, Cut], nn.Module]  # (module, cut) -> its replacement


def column(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Shard the output features; :func:`enters` of the module around it handles the input."""
    return ColumnLinear(linear, cut.axis)


def key_value(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Shard the key or value heads; with fewer heads than ranks, neighbors store the same one."""
    return ColumnLinear(linear, cut.axis, kv_group=cut.kv_group)


def row(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Shard the input features; the output leaves the region."""
    return RowLinear(linear, cut.axis, cut.region.leave)


def enters(module: Attention | SwiGLU | MLP, cut: Cut) -> nn.Module:
    """Make the input of ``module`` enter the region, once for all linears that read it."""
    module.columns = partial(cut.region.columns, axis=cut.axis)
    return module


def embedding(module: nn.Embedding, cut: Cut) -> nn.Module:
    """Shard the vocabulary; the output leaves the region."""
    return VocabEmbedding(module, cut.axis, cut.region.leave)


def head(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Shard the vocabulary; the input enters the region."""
    return VocabHead(linear, cut.axis, cut.region)


def dropout(module: nn.Dropout, cut: Cut) -> nn.Module:
    """Draw one mask per rank where ranks hold different rows; keep plain dropout elsewhere."""
    return RankDropout(module.p, cut.axis) if cut.by_rows else module


SHARED: Mapping[str, Entry] = {  # by both families
    "embedding.token": embedding,
    "embedding.dropout": dropout,
    "head": head,
    "blocks.*.attn": enters,
    "blocks.*.attn.q": column,
    "blocks.*.attn.k": key_value,
    "blocks.*.attn.v": key_value,
    "blocks.*.attn.o": row,
    "blocks.*.ffn": enters,
}
LLAMA: Mapping[str, Entry] = {
    **SHARED,
    "blocks.*.ffn.gate": column,
    "blocks.*.ffn.up": column,
    "blocks.*.ffn.down": row,
    "blocks.*.dropout": dropout,
}
GPT: Mapping[str, Entry] = {
    **SHARED,
    "blocks.*.ffn.fc_in": column,
    "blocks.*.ffn.fc_out": row,
    "blocks.*.dropout": dropout,
}


def plan_for(model: Decoder) -> Mapping[str, Entry]:
    """Return the plan of the model's family; a pipeline stage may lack embedding and head."""
    plan = LLAMA if model.config.family == "llama" else GPT
    optional = {"embedding": model.embedding, "head": model.head}
    absent = tuple(name for name, module in optional.items() if module is None)
    return {key: entry for key, entry in plan.items() if not key.startswith(absent)}


def parallelize(
    model: Decoder, axis: Axis, region: Region = REGION, plan: Mapping[str, Entry] | None = None
) -> Decoder:
    """Shard the single-process ``model`` in place, by ``plan`` or else by :func:`plan_for` of it.

    All ranks must start from the same weights. Call it before you make the optimizer, on every rank
    of the world, because it makes process groups. Raises ValueError for sizes that the axis does
    not divide, for a key that matches no module, and for modules that are sharded already.
    """
    plan = plan_for(model) if plan is None else plan
    check(model.config, axis, plan)
    tied = bool(
        model.embedding and model.head and model.head.weight is model.embedding.token.weight
    )
    if tied and ("head" in plan) != ("embedding.token" in plan):
        raise ValueError("plan: embedding.token and head share one weight; shard both or neither")
    places = [(name, entry) for key, entry in plan.items() for name in _matches(key, model)]
    if twice := [name for name, _ in places if isinstance(model.get_submodule(name), SHARDED)]:
        raise ValueError(
            f"{len(twice)} modules of the model, the first of them {twice[0]}, are sharded over "
            "tensor parallel ranks already: parallelize a full model, once"
        )
    cut = Cut(axis, region, key_value_group(axis, model.config.kv_heads))
    for name, entry in places:
        parent, _, own_name = name.rpartition(".")
        module = model.get_submodule(name)
        setattr(model.get_submodule(parent), own_name, entry(module, cut).train(module.training))
    model.own_rows = lambda positions_S: region.rows(positions_S, axis)
    if isinstance(model.head, VocabHead):
        model.cross_entropy = partial(loss_sum, axis=axis, vocab=model.head.vocab)
        if tied:
            model.head.weight = model.embedding.token.weight  # type: ignore[union-attr]
    return model


def check(config: ModelConfig, axis: Axis, plan: Mapping[str, Entry]) -> None:
    """Raise ValueError if the axis does not divide the heads, or the ffn where ``plan`` has it."""
    n, shards_ffn = axis.size, any(".ffn" in key for key in plan)
    for name, size in (("heads", config.heads), ("ffn", config.ffn if shards_ffn else 0)):
        if size % n:
            raise ValueError(
                f"{name}={size} is not divisible by the {n} ranks of axis {axis.name}: every rank "
                f"takes {name} / {n} of them; choose another {name} or number of ranks"
            )


def _matches(key: str, model: nn.Module) -> list[str]:
    """Return the names of the modules that ``key`` matches; ValueError when there is none."""
    pattern = re.escape(key).replace(r"\*", "[^.]+")
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not found:
        nearest = get_close_matches(key, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"plan: {key!r} matches no module of the model; near it are {', '.join(nearest)}"
        )
    return found
