"""12-3: what each axis of a mesh sends, from shapes alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.ledger import wire

Sizes = Mapping[str, int]
AXES = ("tp", "dp", "pp")
Sent = dict[str, Fraction]


def _sent(
    layers: int,
    hidden: int,
    tokens: int,
    sizes: Sizes,
    *,
    all_layers: bool = False,
    uncut: bool = False,
    all_tokens: bool = False,
    payload: bool = False,
    one_way: bool = False,
    one_of_tp: bool = False,
    hops: int = -1,
    a_rank: bool = False,
    forward: bool = False,
    elements: bool = False,
) -> Sent:
    """Right, or with a mistake."""
    t, d, p = (sizes[axis] for axis in AXES)
    size = 1 if elements else 4
    activations = size * hidden * tokens * (d if all_tokens else 1)
    gradients = size * 12 * hidden**2 * layers // (1 if uncut else t * p)

    def reduced(moved: int, n: int) -> Fraction:
        return Fraction(moved * (n > 1)) if payload else wire("all_reduce", moved, n)

    calls = (2 if forward else 4) * (layers if all_layers else layers // p)
    pipes = d * (1 if one_of_tp else t)
    found = {
        "tp": t * d * p * calls * reduced(activations, t),
        "dp": t * d * p * reduced(gradients, d),
        "pp": Fraction(pipes * max(p + hops, 0) * (p > 1) * activations * (1 if one_way else 2)),
    }
    return {axis: moved / (t * d * p) for axis, moved in found.items()} if a_rank else found


def _but(**mistake: Any) -> Callable[..., Sent]:
    return lambda *given: _sent(*given, **mistake)


def _rank_by_rank(layers: int, hidden: int, tokens: int, sizes: Sizes) -> dict[str, float]:
    """Adds up over the ranks."""
    found = dict.fromkeys(AXES, 0.0)
    t, d, p = (sizes[axis] for axis in AXES)
    x = 4 * tokens * hidden
    for stage in range(p):
        for _ in range(t * d):
            found["tp"] += 8 * (layers / p) * (t - 1) / t * x
            found["dp"] += 2 * (d - 1) / d * 48 * hidden**2 * layers / p / t
            found["pp"] += x * ((stage > 0) + (stage < p - 1))
    return found


def _on(*axes: str) -> Callable[[random.Random], list[Instance]]:
    """Draws meshes in which these axes are larger than 1."""

    def draw(rng: random.Random) -> list[Instance]:
        found = []
        for _ in range(3):
            sizes = {axis: rng.choice((2, 3, 4)) if axis in axes else 1 for axis in AXES}
            layers = sizes["pp"] * rng.randint(2, 5)
            hidden, tokens = 12 * rng.randint(2, 9), rng.randint(5, 400)
            given = {"layers": layers, "hidden": hidden, "tokens": tokens, "sizes": sizes}
            found.append(given)
        return found

    return draw


def _by_axis(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or set(value) != set(AXES):
        raise NotRight(f'{{"tp": bytes, "dp": bytes, "pp": bytes}} is wanted, not {shown(value)}')
    for axis, moved in value.items():
        if isinstance(moved, bool) or not isinstance(moved, Real):
            raise NotRight(f"the bytes of {axis} are {shown(moved)}: a number is wanted")
    return {axis: float(value[axis]) for axis in AXES}


SENT = Function(
    id="12-3",
    title="bytes on each axis",
    names=("sent",),
    hints=(
        "Do one rank first: which layers, which share of the gradients and which tokens has it? "
        "Then how many ranks send that.",
        "tp: 4 layers/pp all-reduces of 4 T h bytes. dp: one of 48 h² layers / (tp pp) bytes. pp: "
        "each of the tp dp chains of stages has pp - 1 hops, two transfers each.",
        "With n = t d p ranks: tp n * 4 (layers/p) * 2 (t-1)/t * 4 T h; dp n * 2 (d-1)/d * 48 h² "
        "layers / (t p); pp t d (p-1) * 2 * 4 T h.",
    ),
    wrong=(
        Wrong(_but(all_layers=True), "A rank has layers / pp layers: its tp group sums in those."),
        Wrong(
            _but(uncut=True), "tp and pp have divided the gradients of a rank: dp sends its share."
        ),
        Wrong(
            _but(all_tokens=True),
            "tokens are those of one replica already: do not multiply them by dp.",
        ),
        Wrong(
            _but(payload=True),
            "These are the bytes handed to the calls: an all-reduce sends 2(n-1)/n of them.",
        ),
        Wrong(_but(one_way=True), "Gradients of the activations come back over each hop."),
        Wrong(
            _but(one_of_tp=True),
            "Every rank of tp sends the activations whole to the next stage: count all of them.",
        ),
        Wrong(_but(hops=0), "There are pp - 1 hops, not pp."),
        Wrong(_but(a_rank=True), "This is the average of one rank: all ranks together are wanted."),
        Wrong(_but(forward=True), "Two all-reduces forward and two backward: four a layer."),
        Wrong(_but(elements=True), "These are numbers: each has 4 bytes."),
        Wrong(lambda *given: list(_sent(*given).values()), words="is wanted, not"),
        Wrong(lambda *given: {**_sent(*given), "pp": None}, words="a number is wanted"),
    ),
    right=(_rank_by_rank, lambda *given: {axis: float(v) for axis, v in _sent(*given).items()}),
    stub=lambda layers, hidden, tokens, sizes: None,
    reference=_sent,
    normal=_by_axis,
    relative=1e-9,  # bytes are exact
    refused=("course_lib.compose.formulas:wire_bytes",),
    drawn=(
        Case("tp alone", _on("tp")),
        Case("dp alone", _on("dp")),
        Case("pp alone", _on("pp")),
        Case("tp and dp", _on("tp", "dp")),
        Case("all three", _on("tp", "dp", "pp")),
    ),
)
