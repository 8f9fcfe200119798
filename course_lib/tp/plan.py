"""A plan as data: which module of the serial model becomes what. ``*`` stands for one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.operators import Region
from course_lib.mesh import Axis
from course_lib.model import Decoder, ModelConfig
from course_lib.tp.dropout import RankDropout
from course_lib.tp.linear import ColumnLinear, RowLinear, as_it_is, key_value_sharers
from course_lib.tp.vocabulary import VocabEmbedding, VocabHead, loss_sum

CUT_MODULES = (ColumnLinear, RowLinear, VocabEmbedding, VocabHead)
REGION = Region(enter=comm.copy_to, leave=comm.reduce_from, rows=as_it_is)


@dataclass(frozen=True)
class Cut:
    """All that an entry of a plan may use to make its module.

    ``sharers`` are the ranks that hold the same head of keys and values.
    """

    axis: Axis
    region: Region
    sharers: Axis


Entry = Callable[[Any, Cut], nn.Module]  # the serial module, how to cut -> what takes its place


def column(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Some output features; the input has entered at the module around it."""
    return ColumnLinear(linear, cut.axis)


def key_value(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Some heads of keys or values, or one that neighbours hold too."""
    return ColumnLinear(linear, cut.axis, sharers=cut.sharers)


def row(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Some input features, and the way out of the region."""
    return RowLinear(linear, cut.axis, cut.region.leave)


def enters(module: nn.Module, cut: Cut) -> nn.Module:
    """The first argument of the module enters the region, once for all linears in it."""

    def enter(_: nn.Module, args: tuple) -> tuple:
        return cut.region.enter(args[0], cut.axis), *args[1:]

    module.register_forward_pre_hook(enter)
    return module


def embedding(module: nn.Embedding, cut: Cut) -> nn.Module:
    """Some rows of the vocabulary, and the way out of the region."""
    return VocabEmbedding(module, cut.axis, cut.region.leave)


def head(linear: nn.Linear, cut: Cut) -> nn.Module:
    """Some rows of the vocabulary, and the way into the region."""
    return VocabHead(linear, cut.axis, cut.region.enter)


def own_rows(module: nn.Module, cut: Cut) -> nn.Module:
    """Positions of the rows that a rank holds outside the region."""

    def rows(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (cut.region.rows(args[0], cut.axis),)

    module.register_forward_pre_hook(rows)
    return module


def dropout(module: nn.Dropout, cut: Cut) -> nn.Module:
    """Outside the region. Ranks that hold the same there drop the same; other rows, others."""
    return module if cut.region.rows is as_it_is else RankDropout(module.p, cut.axis)


ENDS: Mapping[str, Entry] = {
    "embedding.token": embedding,
    "embedding.dropout": dropout,
    "head": head,
}
ATTENTION: Mapping[str, Entry] = {
    "blocks.*.attn": enters,
    "blocks.*.attn.q": column,
    "blocks.*.attn.k": key_value,
    "blocks.*.attn.v": key_value,
    "blocks.*.attn.o": row,
}
LLAMA: Mapping[str, Entry] = {
    **ENDS,
    **ATTENTION,
    "blocks.*.ffn": enters,
    "blocks.*.ffn.gate": column,
    "blocks.*.ffn.up": column,
    "blocks.*.ffn.down": row,
    "blocks.*.dropout": dropout,
}
GPT: Mapping[str, Entry] = {
    **ENDS,
    "embedding.position": own_rows,
    **ATTENTION,
    "blocks.*.ffn": enters,
    "blocks.*.ffn.fc_in": column,
    "blocks.*.ffn.fc_out": row,
    "blocks.*.dropout": dropout,
}


def plan_for(model: Decoder) -> Mapping[str, Entry]:
    """The plan of the model's family; of a stage of a pipeline, the part that it has."""
    plan = LLAMA if model.config.family == "llama" else GPT
    ends = {"embedding": model.embedding, "head": model.head}
    absent = tuple(name for name, module in ends.items() if module is None)
    return {key: entry for key, entry in plan.items() if not key.startswith(absent)}


def parallelize(
    model: Decoder, axis: Axis, region: Region = REGION, plan: Mapping[str, Entry] | None = None
) -> Decoder:
    """Cut the serial ``model`` in place: every rank keeps its share of the same weights.

    ``plan`` left out is :func:`plan_for` of the model. Call it before an optimizer takes the
    parameters, and on every rank of the world (it makes groups, as ``make_mesh`` does).
    Raises ValueError for sizes that the axis does not divide, for a key that matches nothing, and
    for modules that are cut already.
    """
    plan = plan_for(model) if plan is None else plan
    check(model.config, axis, plan)
    tied = bool(
        model.embedding and model.head and model.head.weight is model.embedding.token.weight
    )
    if tied and ("head" in plan) != ("embedding.token" in plan):
        raise ValueError("plan: embedding.token and head share one weight; cut both or neither")
    places = [(name, entry) for key, entry in plan.items() for name in _matches(key, model)]
    if done := [name for name, _ in places if isinstance(model.get_submodule(name), CUT_MODULES)]:
        raise ValueError(
            f"{len(done)} modules of the model, the first of them {done[0]}, are cut over tensor "
            "parallel ranks already: parallelize a serial model, once"
        )
    cut = Cut(axis, region, key_value_sharers(axis, model.config.kv_heads))
    for name, entry in places:
        parent, _, own_name = name.rpartition(".")
        serial = model.get_submodule(name)
        setattr(model.get_submodule(parent), own_name, entry(serial, cut).train(serial.training))
    model.own_rows = lambda positions_S: region.rows(positions_S, axis)
    if isinstance(model.head, VocabHead):
        model.cross_entropy = partial(loss_sum, axis=axis, vocab=model.head.vocab)
        if tied:
            model.head.weight = model.embedding.token.weight  # type: ignore[union-attr]
    return model


def check(config: ModelConfig, axis: Axis, plan: Mapping[str, Entry]) -> None:
    """Raises ValueError where ``config`` cannot be cut by the axis as ``plan`` says."""
    n, cuts_ffn = axis.size, any(".ffn" in key for key in plan)
    for name, size in (("heads", config.heads), ("ffn", config.ffn if cuts_ffn else 0)):
        if size % n:
            raise ValueError(
                f"{name}={size} is not divisible by the {n} ranks of axis {axis.name}: every rank "
                f"takes {name} / {n} of them; choose another {name} or number of ranks"
            )


def _matches(key: str, model: nn.Module) -> list[str]:
    """Names of the modules that ``key`` stands for; ValueError when there is none."""
    parts = key.split(".")
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if _fits(parts, name.split("."))]
    if not found:
        nearest = get_close_matches(key, names, n=3, cutoff=0.3) or names[:3]
        raise ValueError(
            f"plan: {key!r} matches no module of the model; near it are {', '.join(nearest)}"
        )
    return found


def _fits(parts: list[str], name: list[str]) -> bool:
    return len(parts) == len(name) and all(
        part in ("*", own) for part, own in zip(parts, name, strict=True)
    )
