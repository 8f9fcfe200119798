"""Lesson 12, several axes at once: what the exercises give, and what they expect."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from operator import index
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_12 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial
from course_lib.layout import DEFAULT_ORDER, Layout, make_layout
from course_lib.ledger import wire

# --- 12-2 ----------------------------------------------------------------------------------------

Sizes = Mapping[str, int]
FLAGS = ("cut", "expert", "ends", "sharded")


def _holders(sizes: Sizes, cut: bool, expert: bool, ends: bool, sharded: bool,
             *, without: str = "") -> int:  # fmt: skip
    """The right number, or the one ``without`` a reason."""
    data = sizes["dp"] * (1 if without == "cp" else sizes["cp"])
    data //= sizes["ep"] if expert and without != "ep" else 1
    tp = 1 if cut or without == "tp" else sizes["tp"]
    return (
        tp
        * (1 if sharded or without == "data" else data)
        * (2 if ends and without != "ends" else 1)
    )


def _without(reason: str) -> Callable[..., int]:
    return lambda *given: _holders(*given, without=reason)


def _sum_of_reasons(sizes: Sizes, cut: bool, expert: bool, ends: bool, sharded: bool) -> int:
    data = sizes["dp"] * sizes["cp"] // (sizes["ep"] if expert else 1)
    return (0 if cut else sizes["tp"]) + (0 if sharded else data) + (2 if ends else 0)


def _some(**fixed: bool) -> Callable[[random.Random], list[Instance]]:
    """Draw meshes, and all possible combinations of the flags that are not ``fixed``; the last
    one on one rank per stage too."""

    def draw(rng: random.Random) -> list[Instance]:
        free = [flag for flag in FLAGS if flag not in fixed]
        found = []
        for values in product((False, True), repeat=len(free)):
            flags = {**dict(zip(free, values, strict=True)), **fixed}
            if not (flags["expert"] and (flags["ends"] or flags["cut"])):
                ep, tp, dp = rng.choice((2, 3)), rng.choice((2, 3, 4, 8)), rng.choice((5, 7))
                sizes = {"tp": tp, "cp": ep * rng.choice((1, 2)), "dp": dp, "ep": ep}
                found.append({"sizes": sizes, **{flag: flags[flag] for flag in FLAGS}})
        return [*found, {**found[-1], "sizes": dict.fromkeys(sizes, 1)}]

    return draw


def _whole(value: Any) -> int:
    try:
        return int(value) if isinstance(value, float) and value == int(value) else index(value)
    except (TypeError, ValueError, OverflowError):
        raise NotRight(f"expected a whole number of ranks, got {shown(value)}") from None


HOLDERS = Function(
    id="12-2",
    title="which ranks hold a copy",
    names=("holders",),
    mistakes=(
        Wrong(_without("tp"), "tp replicates a weight that it does not shard: tp copies."),
        Wrong(
            lambda sizes, cut, *flags: _holders(sizes, not cut, *flags),
            "cut is used the wrong way round: a weight that tp shards has no copies on tp.",
        ),
        Wrong(_without("ends"), "Two stages store a tied embedding and the same gradient of it."),
        Wrong(
            _without("data"),
            "Without ZeRO every rank that has reduced a gradient stores all of it.",
        ),
        Wrong(_without("ep"), "Ranks of ep have different experts: use data, which respects that."),
        Wrong(_without("cp"), "Ranks of cp sum the same gradients too: use data."),
        Wrong(
            lambda *given: 1 if given[-1] else _holders(*given),
            "ZeRO shards over the data ranks alone: tp and the other stage still have copies.",
        ),
        Wrong(_sum_of_reasons, "Multiply the reasons to be a copy: do not add them."),
    ),
    reference=_holders,
    normal=_whole,
    drawn=(
        Case("matrices and norms", _some(expert=False, ends=False, sharded=False)),
        Case("a tied embedding", _some(expert=False, ends=True, sharded=False)),
        Case("experts", _some(cut=False, ends=False, sharded=False)),
        Case("shards of ZeRO", _some(sharded=True)),
    ),
)


# --- 12-3 ----------------------------------------------------------------------------------------

AXES = ("tp", "dp", "pp")


def _sent(layers: int, hidden: int, tokens: int, sizes: Sizes, *, mistake: str = "",
          ) -> dict[str, Fraction]:  # fmt: skip
    """The right bytes, or those with a ``mistake``."""
    t, d, p = (sizes[axis] for axis in AXES)
    size = 1 if mistake == "elements" else 4
    activations = size * hidden * tokens * (d if mistake == "all tokens" else 1)
    gradients = Fraction(size * 12 * hidden**2 * layers, 1 if mistake == "not sharded" else t * p)

    def reduced(payload: Fraction | int, n: int) -> Fraction:
        return (
            Fraction(payload * (n > 1))
            if mistake == "payload"
            else payload * wire("all_reduce", 1, n)
        )

    calls = (2 if mistake == "forward" else 4) * (layers if mistake == "layers" else layers // p)
    hops = (p if mistake == "hops" else p - 1) * (p > 1)
    both = 1 if mistake == "one way" else 2
    found = {
        "tp": t * d * p * calls * reduced(activations, t),
        "dp": t * d * p * reduced(gradients, d),
        "pp": Fraction(d * (1 if mistake == "one of tp" else t) * hops * both * activations),
    }
    return (
        {axis: sent / (t * d * p) for axis, sent in found.items()} if mistake == "rank" else found
    )


def _with(mistake: str) -> Callable[..., dict[str, Fraction]]:
    return lambda *given: _sent(*given, mistake=mistake)


def _on(*axes: str) -> Callable[[random.Random], list[Instance]]:
    """Draw meshes in which these axes are larger than 1."""

    def draw(rng: random.Random) -> list[Instance]:
        found = []
        for _ in range(3):
            sizes = {axis: rng.choice((2, 3, 4, 5)) if axis in axes else 1 for axis in AXES}
            layers = sizes["pp"] * rng.randint(2, 5)
            hidden, tokens = 12 * rng.randint(2, 9), rng.randint(5, 400)
            given = {"layers": layers, "hidden": hidden, "tokens": tokens, "sizes": sizes}
            found.append(given)
        return [*found, given | {"tokens": 1}, given | {"layers": sizes["pp"]}]

    return draw


def _by_axis(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or set(value) != set(AXES):
        raise NotRight(f'expected {{"tp": bytes, "dp": bytes, "pp": bytes}}, got {shown(value)}')
    for axis, sent in value.items():
        if isinstance(sent, bool) or not hasattr(type(sent), "__float__"):
            raise NotRight(f"expected the bytes of {axis} to be a number, got {shown(sent)}")
    return {axis: float(value[axis]) for axis in AXES}


SENT = Function(
    id="12-3",
    title="bytes on each axis",
    names=("sent",),
    mistakes=(
        Wrong(_with("layers"), "A rank has layers / pp layers: it all-reduces in those only."),
        Wrong(
            _with("not sharded"), "tp and pp have divided the gradients: a rank reduces its shard."
        ),
        Wrong(_with("all tokens"), "tokens are those of one replica: do not multiply them by dp."),
        Wrong(
            _with("payload"),
            "These are the bytes handed to the calls: an all-reduce sends 2(n-1)/n of them.",
        ),
        Wrong(_with("one way"), "The gradients of the activations cross each boundary back."),
        Wrong(
            _with("one of tp"),
            "Every rank of tp sends the full activations to the next stage: count all of them.",
        ),
        Wrong(_with("hops"), "There are pp - 1 boundaries, not pp."),
        Wrong(_with("rank"), "This is the average per rank: give all ranks together."),
        Wrong(_with("forward"), "Two all-reduces forward and two backward: four per layer."),
        Wrong(_with("elements"), "These are elements: each has 4 bytes."),
    ),
    reference=_sent,
    normal=_by_axis,
    relative=1e-9,
    refused=("course_lib.formulas.compose:wire_bytes",),
    drawn=(
        Case("tp alone", _on("tp")),
        Case("dp alone", _on("dp")),
        Case("pp alone", _on("pp")),
        Case("tp and dp", _on("tp", "dp")),
        Case("all three", _on("tp", "dp", "pp")),
    ),
)


# --- 12-4 and 12-5 -------------------------------------------------------------------------------


def _mesh(tp: int = 1, dp: int = 1, pp: int = 1, **more: Any) -> Trial:
    sizes = {"tp": tp, "dp": dp, "pp": pp}
    larger = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    name = ", ".join(larger) or "one rank"
    return Trial(tp * dp * pp, order=DEFAULT_ORDER, sizes=sizes, name=name, **more)


def _layout(trial: Trial) -> Layout:
    return make_layout(trial.n, trial.order, **trial.sizes)


def _on_an_end(layout: Layout, rank: int) -> bool:
    return layout.coordinates(rank)["pp"] in (0, layout.sizes["pp"] - 1)


Squares = list[dict[str, float]]  # by rank and kind


def _shards(trial: Trial, draw: Draw) -> Any:
    """The coordinates at which ranks store the same tensor decide its values."""
    layout = _layout(trial)
    shapes = {"cut": draw.shape(), "copied": (draw.size(3, 9),), "tied": draw.shape()}
    known: dict[Any, Tensor] = {}
    ranks = []
    for rank in range(trial.n):
        at = layout.coordinates(rank)
        same = {"cut": (at["tp"], at["pp"]), "copied": at["pp"], "tied": at["tp"]}
        if not _on_an_end(layout, rank):
            del same["tied"]
        for kind, place in same.items():
            known.setdefault((kind, place), draw.normal(*shapes[kind], scale=3))
        ranks.append({"gradients": {k: known[k, place].clone() for k, place in same.items()}})
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in known.values()))
    share = draw.random.uniform(1.5, 4) if draw.call else 0.25  # left alone, or clipped
    for rank in ranks:
        rank["max_norm"] = share * norm
    return ranks, norm


def _clipped(given: Given) -> dict[str, Any]:
    factor = min(1.0, given["max_norm"][0] / given.whole)
    kinds = ("cut", "copied", "tied")
    scaled = {
        f"gradient {kind!r}": [
            own[kind] * factor if kind in own else None for own in given["gradients"]
        ]
        for kind in kinds
    }
    return {"norm": torch.tensor(given.whole, dtype=given.trial.dtype)} | scaled


def _squares(given: Given) -> Squares:
    return [
        {kind: float(g.double().square().sum()) for kind, g in own.items()}
        for own in given["gradients"]
    ]


def _norms(
    axes: Sequence[str] = ("tp", "pp"),
    copied: str = "tp",
    tied: str = "stages",
    of: Callable[[float, Given], float] = lambda square, given: math.sqrt(square),
) -> Callable[[Given], list[Tensor]]:
    """The norm by rank with these axes summed and these shares of the copies."""

    def norms(given: Given) -> list[Tensor]:
        layout, squares = _layout(given.trial), _squares(given)
        sizes = {**layout.sizes, "stages": min(2, layout.sizes["pp"]), "": 1}
        share = {"cut": 1, "copied": sizes[copied], "tied": sizes[tied]}

        def total(rank: int) -> float:
            members = next(g for g in layout.groups(*axes) if rank in g) if axes else [rank]
            return sum(value / share[k] for one in members for k, value in squares[one].items())

        found = [of(total(rank), given) for rank in range(given.n)]
        return [torch.tensor(norm, dtype=given.trial.dtype) for norm in found]

    return norms


def _sum_of_norms(given: Given) -> Tensor:
    norms = [math.sqrt(sum(own.values())) for own in _squares(given)]
    return torch.tensor(sum(norms), dtype=given.trial.dtype)


def _scaled(factor: Callable[[float], float]) -> dict[str, Callable[[Given], Any]]:
    """The gradients scaled by another factor of max_norm / norm."""

    def of(kind: str) -> Callable[[Given], Any]:
        return lambda given: [
            own[kind] * factor(given["max_norm"][0] / given.whole) if kind in own else None
            for own in given["gradients"]
        ]

    return {f"gradient {kind!r}": of(kind) for kind in ("cut", "copied")}


def _scalars(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        for call in observed.calls:
            if call.payload > 32:
                return (
                    f"expected only scalars from rank {rank}, got {call.op} of {call.payload} "
                    "bytes: each rank squares its own elements, and only the sum is sent"
                )
        if len(observed.calls) > 6:
            return (
                f"rank {rank} made {len(observed.calls)} calls for one norm: one on each axis is "
                "enough"
            )
    return ""


CLIP = OnRanks(
    id="12-4",
    title="clip across two axes",
    names=("clip",),
    trials=(
        _mesh(tp=2, pp=2),
        _mesh(tp=2, pp=3, strided=True, dtype=torch.float64),
        _mesh(tp=2),
        _mesh(pp=3),
        _mesh(),
    ),
    axes=("outputs", "gradients"),
    act=runner.clip,
    draw=_shards,
    expected=_clipped,
    in_place=("gradients",),
    terms=64,
    mistakes=(
        Mistake(
            "every rank counts all elements that it stores, copies too: divide the square of what "
            "k ranks store by k",
            {"norm": _norms(copied="", tied="")},
        ),
        Mistake(
            '"copied" is counted on every rank of tp: it is one weight, stored tp.size times',
            {"norm": _norms(copied="")},
        ),
        Mistake(
            '"tied" is counted on both stages: it is one weight, stored twice',
            {"norm": _norms(tied="")},
        ),
        Mistake(
            '"tied" is divided by pp.size: only the first and the last stage store it',
            {"norm": _norms(tied="pp")},
        ),
        Mistake(
            "the squares are averaged over the ranks: sum them",
            {"norm": _norms(of=lambda square, given: math.sqrt(square / given.n))},
        ),
        Mistake(
            "each rank takes its own norm: sum the squares over tp and pp, or each rank scales by "
            "another factor",
            {"norm": _norms(axes=(), copied="", tied="")},
        ),
        Mistake(
            "the squares are not summed over tp and pp: each rank would scale by another factor",
            {"norm": _norms(axes=())},
        ),
        Mistake(
            "the squares are summed over tp alone: the gradients of the other stages are missing",
            {"norm": _norms(axes=("tp",))},
        ),
        Mistake(
            "the squares are summed over pp alone: the other shards of tp are missing",
            {"norm": _norms(axes=("pp",))},
        ),
        Mistake(
            "this is the squared norm: take the root",
            {"norm": _norms(of=lambda square, given: square)},
        ),
        Mistake(
            "norms were added: add squares, and take the root at the end", {"norm": _sum_of_norms}
        ),
        Mistake(
            "this is max_norm: return the norm before clipping, also if it is smaller",
            {"norm": lambda g: torch.tensor(g["max_norm"][0], dtype=g.trial.dtype)},
        ),
        Mistake(
            "the gradients are unchanged although the norm is above max_norm: scale them in place, "
            "with mul_",
            _scaled(lambda factor: 1.0 if factor < 1 else math.nan),
        ),
        Mistake(
            "a norm below max_norm must leave the gradients unchanged: only ever scale down",
            _scaled(lambda factor: factor if factor > 1 else math.nan),
        ),
        Mistake(
            "the factor is squared: scale by max_norm / norm",
            _scaled(lambda factor: factor**2),
        ),
    ),
    looks=(Look("wire", "only scalars are sent", _scalars),),
    refused=("course_lib.comm.held:grad_norm", "course_lib.comm.held:clip_grad_norm"),
)


def _partial(trial: Trial, draw: Draw) -> list[dict[str, Any]]:
    """The rank's own part of each gradient."""
    layout = _layout(trial)
    shapes = {kind: draw.shape() for kind in ("matrix", "norm", "expert", "tied")}
    return [
        {
            "gradients": {
                kind: draw.tensor(*shape)
                for kind, shape in shapes.items()
                if kind != "tied" or _on_an_end(layout, rank)
            },
            **{axis: layout.sizes[axis] for axis in AXES},
        }
        for rank in range(trial.n)
    ]


REDUCED = {"matrix": ("dp",), "norm": ("tp", "dp"), "expert": (), "tied": ("dp", "pp")}


def _over(kind: str, *axes: str) -> Callable[[Given], list[Any]]:
    """That gradient summed over ``axes``, on each rank that has it."""

    def summed(given: Given) -> list[Any]:
        layout, own = _layout(given.trial), given["gradients"]
        found = []
        for rank in range(given.n):
            ranks = next(r for r in layout.groups(*axes) if rank in r) if axes else [rank]
            parts = [own[one][kind] for one in ranks if kind in own[one]]
            found.append(torch.stack(parts).sum(0) if kind in own[rank] else None)
        return found

    return summed


REASONS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "matrix": (
        ((), "is this rank's own: sum it over dp, whose ranks have other tokens"),
        (("tp", "dp"), "is summed over tp too, whose ranks have other shards of the matrix"),
        (("tp",), "is summed over tp, whose ranks have other shards of the matrix, not over dp"),
        (("dp", "pp"), "is summed over pp too: other stages have other layers"),
        (("tp", "dp", "pp"), "is summed over all ranks: only those of dp have this shard"),
    ),
    "norm": (
        ((), "is this rank's own: sum it over dp and over tp"),
        (("dp",), "lacks the sum over tp, whose ranks have other rows of one replicated weight"),
        (("tp",), "lacks the sum over dp, whose ranks have other tokens"),
        (("tp", "dp", "pp"), "is summed over pp too: other stages have other norms"),
    ),
    "expert": (
        (
            ("dp",),
            "is summed over dp: no other rank has these experts, and all their tokens were sent "
            "here",
        ),
        (("tp", "dp", "pp"), "is summed over all ranks: no other rank has these experts"),
    ),
    "tied": (
        ((), "is this rank's own: sum it over dp and with the other stage that has it"),
        (("dp",), "lacks the other stage's part: the embedding is one weight on two stages"),
        (("pp",), "lacks the sum over dp, whose ranks have other tokens"),
        (("tp", "dp", "pp"), "is summed over tp too, whose ranks have other rows of it"),
        (("tp", "pp"), "is summed over tp, whose ranks have other rows of it, not over dp"),
    ),
}


def _traffic(given: Given, ranks: list[Observed]) -> str:
    """Each rank hands to each axis only what must be reduced there."""
    layout = _layout(given.trial)
    for rank, observed in enumerate(ranks):
        own = given["gradients"][rank]
        for axis in AXES:
            kinds = [k for k, axes in REDUCED.items() if axis in axes and k in own]
            most = sum(bytes_of(own[kind]) for kind in kinds) * (layout.sizes[axis] > 1)
            group = next(tuple(r) for r in layout.groups(axis) if rank in r)
            calls = [
                call
                for call in observed.calls
                if (call.op == "send") == (axis == "pp") and (axis == "pp" or call.ranks == group)
            ]
            sent = sum(call.payload for call in calls) * (layout.sizes[axis] > 1)
            if sent > most:
                return (
                    f"expected rank {rank} to reduce {most} bytes over {axis} "
                    f"({', '.join(kinds) or 'nothing'}), got {sent} bytes"
                )
        known = [next(tuple(r) for r in layout.groups(axis) if rank in r) for axis in AXES[:2]]
        for call in observed.calls:
            if call.peer is None and len(call.ranks) > 1 and call.ranks not in known:
                return (
                    f"rank {rank} made {call.op} of {call.payload} bytes on ranks "
                    f"{list(call.ranks)}: only two stages have the tied gradient, and the others "
                    "must not take part"
                )
    return ""


COMPLETE = OnRanks(
    id="12-5",
    title="fully reduced gradients, in raw PyTorch",
    names=("complete",),
    trials=(
        _mesh(tp=2, dp=2),
        _mesh(dp=2, pp=2, dtype=torch.float64),
        _mesh(tp=2, pp=2),
        _mesh(dp=2, pp=3),
        _mesh(pp=3, dtype=torch.bfloat16),
        _mesh(),
    ),
    axes=("gradients",),
    act=runner.complete,
    draw=_partial,
    expected=lambda given: {
        f"gradient {kind!r}": _over(kind, *axes)(given) for kind, axes in REDUCED.items()
    },
    in_place=("gradients",),
    mistakes=tuple(
        Mistake(f'"{kind}" {reason}', {f"gradient {kind!r}": _over(kind, *axes)})
        for kind, reasons in REASONS.items()
        for axes, reason in reasons
    ),
    looks=(Look("wire", "each gradient is sent on its own axes only", _traffic),),
    hang="the stages in the middle have no tied gradient: a collective over pp waits for them. A "
    "tensor to receive into has the shape and dtype of the gradient",
    refused=("course_lib.comm.transfer:issue",),
)

EXERCISES = (by_hand("12-1"), HOLDERS, SENT, CLIP, COMPLETE)
