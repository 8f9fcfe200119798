"""A plan as data: which module of the serial model becomes what. ``*`` stands for one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from torch import Tensor, nn

from course_lib import comm
from course_lib.comm.operators import Region
from course_lib.mesh import Axis
from course_lib.model import Decoder, ModelConfig
from course_lib.tp.dropout import RankDropout
from course_lib.tp.linear import ColumnLinear, KeyValueLinear, RowLinear, as_it_is
from course_lib.tp.vocabulary import VocabEmbedding, VocabHead, loss_sum

REGION = Region(enter=comm.copy, leave=comm.reduce, rows=as_it_is)


@dataclass(frozen=True)
class Cut:
    """All that an entry of a plan may use to make its module."""

    axis: Axis
    region: Region
    config: ModelConfig


Entry = Callable[[nn.Module, Cut], nn.Module]


def column(linear: nn.Module, cut: Cut) -> nn.Module:
    """Some output features; the input has entered at the module around it."""
    return ColumnLinear(linear, cut.axis)  # type: ignore[arg-type]


def key_value(linear: nn.Module, cut: Cut) -> nn.Module:
    """Some heads of keys or values."""
    return KeyValueLinear(linear, cut.axis, cut.config.kv_heads)  # type: ignore[arg-type]


def row(linear: nn.Module, cut: Cut) -> nn.Module:
    """Some input features, and the way out of the region."""
    return RowLinear(linear, cut.axis, cut.region.leave)  # type: ignore[arg-type]


def enters(module: nn.Module, cut: Cut) -> nn.Module:
    """The first argument of the module enters the region, once for all linears in it."""

    def enter(_: nn.Module, args: tuple) -> tuple:
        return cut.region.enter(args[0], cut.axis), *args[1:]

    module.register_forward_pre_hook(enter)
    return module


def embedding(module: nn.Module, cut: Cut) -> nn.Module:
    """Some rows of the vocabulary, and the way out of the region."""
    return VocabEmbedding(module, cut.axis, cut.region.leave)  # type: ignore[arg-type]


def head(module: nn.Module, cut: Cut) -> nn.Module:
    """Some rows of the vocabulary, and the way into the region."""
    return enters(VocabHead(module, cut.axis, as_it_is), cut)  # type: ignore[arg-type]


def own_rows(module: nn.Module, cut: Cut) -> nn.Module:
    """Positions of the rows that a rank holds outside the region."""

    def rows(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (cut.region.rows(args[0], cut.axis),)

    module.register_forward_pre_hook(rows)
    return module


ATTENTION: Mapping[str, Entry] = {
    "blocks.*.attn": enters,
    "blocks.*.attn.q": column,
    "blocks.*.attn.k": key_value,
    "blocks.*.attn.v": key_value,
    "blocks.*.attn.o": row,
}
ENDS: Mapping[str, Entry] = {"embedding.token": embedding, "head": head}
LLAMA: Mapping[str, Entry] = {
    **ENDS,
    **ATTENTION,
    "blocks.*.ffn": enters,
    "blocks.*.ffn.gate": column,
    "blocks.*.ffn.up": column,
    "blocks.*.ffn.down": row,
}
GPT: Mapping[str, Entry] = {
    **ENDS,
    "embedding.position": own_rows,
    **ATTENTION,
    "blocks.*.ffn": enters,
    "blocks.*.ffn.fc_in": column,
    "blocks.*.ffn.fc_out": row,
}
PLANS = {"llama": LLAMA, "gpt": GPT}


def parallelize(
    model: Decoder, axis: Axis, region: Region = REGION, plan: Mapping[str, Entry] | None = None
) -> Decoder:
    """Cut the serial ``model`` in place: every rank keeps its share of the same weights.

    Without ``plan``, that of the model's family; a stage of a pipeline has only its part of it.
    Call it before an optimizer takes the parameters, and on every rank of the axis.
    Raises ValueError for sizes that the axis does not divide, and for a key that matches nothing.
    """
    check(model.config, axis)
    if plan is None:
        absent = {"embedding": model.embedding, "head": model.head}
        gone = tuple(name for name, module in absent.items() if module is None)
        plan = {key: entry for key, entry in PLANS[model.config.family].items()
                if not key.startswith(gone)}  # fmt: skip
    embedded, headed = model.embedding, model.head
    tied = bool(embedded and headed and headed.weight is embedded.token.weight)
    cut = Cut(axis, region, model.config)
    for key, entry in plan.items():
        for name in _matches(key, model):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], entry(model.get_submodule(name), cut))
    if tied:
        model.head.weight = model.embedding.token.weight  # type: ignore[union-attr]
    if isinstance(model.head, VocabHead):
        model.cross_entropy = partial(loss_sum, axis=axis)
    if region.rows is not as_it_is:  # ranks hold other rows: they must drop other elements
        for module in list(model.modules()):
            dropout = getattr(module, "dropout", None)
            if isinstance(dropout, nn.Dropout):
                module.dropout = RankDropout(dropout.p, axis)
    return model


def check(config: ModelConfig, axis: Axis) -> None:
    """Raises ValueError where ``config`` cannot be cut by the axis."""
    n = axis.size
    for name, size in (("heads", config.heads), ("ffn", config.ffn)):
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
        nearest = get_close_matches(key, names, n=3, cutoff=0.3)
        raise ValueError(
            f"plan: {key!r} matches no module of the model; near it are {', '.join(nearest)}"
        )
    return found


def _fits(parts: list[str], name: list[str]) -> bool:
    return len(parts) == len(name) and all(
        part in ("*", own) for part, own in zip(parts, name, strict=True)
    )
