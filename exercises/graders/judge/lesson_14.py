"""Lesson 14, the decision: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import permutations, product
from math import inf, isfinite, prod
from numbers import Real
from typing import Any

from course_lib.grading.answers import NotRight, shown
from course_lib.grading.exercise import Case, Function, Instance, Wrong

# --- 14-1 ----------------------------------------------------------------------------------------

Model = Mapping[str, float]
Sizes = Mapping[str, int]
AXES = ("tp", "pp", "cp", "dp", "ep")
RESERVE = 0.92  # of a GPU's memory
SLOWER = 1.1  # times the fastest layout that an answer may take
FLOPS, NODE, NETWORK = 400e12, 200e9, 25e9  # of a GPU; bytes per second inside and between nodes


def needed(model: Model, layout: Sizes) -> float:
    """Bytes on the fullest GPU: 18 per parameter with ZeRO-1, and saved activations under 1F1B."""
    tp, pp, cp, dp, ep = (layout[axis] for axis in AXES)
    dense = model["dense"] / (tp * pp)
    experts = model["experts"] * model["expert"] / (tp * pp * ep)
    state = 6 * (dense + experts) + 12 * (dense + experts * ep) / (dp * cp)
    one = 34 * model["seq"] * model["hidden"] * model["layers"] / (tp * cp * pp)
    return state + min(pp, model["batch"] / dp) * one


def seconds(model: Model, layout: Sizes, per_node: int) -> float:
    """Seconds of a step in which only dp overlaps, with backward."""
    tp, pp, cp, dp, ep = (layout[axis] for axis in AXES)
    tokens = model["batch"] * model["seq"] / (dp * cp)  # that a GPU of this replica reads
    active = model["dense"] + model["top_k"] * model["expert"]
    work = 6 * tokens * (active + model["layers"] * model["seq"] * model["hidden"]) / (tp * pp)
    computing = work / FLOPS
    one = 2 * tokens * model["hidden"]  # bytes of an activation of these tokens
    layers, data = model["layers"] / pp, dp * cp
    routed = NODE if tp * ep <= per_node else NETWORK
    summed = NODE if tp * data <= per_node else NETWORK
    own = (model["dense"] + model["experts"] * model["expert"] / ep) / (tp * pp)
    return (
        computing * (1 + (pp - 1) * dp / model["batch"])
        + layers * one * 8 * (tp - 1) / tp / NODE
        + layers * one * 6 * (cp - 1) / tp / NETWORK
        + layers * one * 4 * model["top_k"] * (ep - 1) / ep / tp / routed
        + (2 * one / tp / NETWORK if pp > 1 else 0)
        + max(0, 6 * (data - 1) / data * own / summed - computing * 2 / 3)
    )


def divisors(n: int) -> list[int]:
    """The divisors of n."""
    return [d for d in range(1, n + 1) if n % d == 0]


def unfit(model: Model, gpus: int, per_node: int, memory: float, layout: Sizes) -> str:
    """Say which rule a layout breaks, or return ""."""
    tp, pp, cp, dp, ep = (layout[axis] for axis in AXES)
    if tp * pp * cp * dp != gpus:
        return f"tp x pp x cp x dp is {tp * pp * cp * dp}, but there are {gpus} GPUs: use them all"
    if model["heads"] % tp:
        return f"tp={tp} does not divide {model['heads']} heads"
    if per_node % tp and gpus > per_node:
        return f"tp={tp} does not divide the {per_node} GPUs of a node: some groups cross nodes"
    if model["layers"] % pp:
        return f"pp={pp} does not divide {model['layers']} layers"
    if model["batch"] % dp:
        return f"dp={dp} does not divide {model['batch']} sequences"
    if cp > 1 and model["seq"] % (2 * cp):
        return f"2 cp = {2 * cp} does not divide the {model['seq']} tokens of a sequence"
    if ep > 1 and not model["experts"]:
        return f"ep={ep}, but this model has no experts: leave ep out"
    if (model["experts"] or 1) % ep:
        return f"ep={ep} does not divide {model['experts']} experts"
    if dp * cp % ep:
        return f"ep={ep} does not divide dp x cp = {dp * cp}: it uses these ranks"
    if (bytes_ := needed(model, layout)) > RESERVE * memory:
        return (
            f"the fullest GPU needs {bytes_ / 1e9:.1f} GB, but a layout may use at most "
            f"{RESERVE * memory / 1e9:.1f} GB, which is {RESERVE:.0%} of its memory"
        )
    return ""


def layouts(model: Model, gpus: int, per_node: int, memory: float) -> Iterator[dict[str, int]]:
    """All layouts that break no rule."""
    degrees = divisors(gpus)
    experts = divisors(int(model["experts"]) or 1)
    for tp, pp, cp in product(degrees, degrees, degrees):
        if gpus % (tp * pp * cp) == 0:
            for ep in experts:
                sizes = (tp, pp, cp, gpus // (tp * pp * cp), ep)
                layout = dict(zip(AXES, sizes, strict=True))
                if not unfit(model, gpus, per_node, memory, layout):
                    yield layout


def _fastest(model: Model, gpus: int, per_node: int, memory: float) -> dict[str, int] | None:
    """The fastest layout that breaks no rule, or None."""
    return _found(tuple(model.items()), gpus, per_node, memory)


@cache
def _found(
    model: tuple[tuple[str, float], ...], gpus: int, per_node: int, memory: float
) -> dict[str, int] | None:
    sizes = dict(model)
    return min(
        layouts(sizes, gpus, per_node, memory),
        key=lambda layout: seconds(sizes, layout, per_node),
        default=None,
    )


def _layout(value: Any) -> dict[str, int] | None:
    """A layout with all axes; those that are left out have size 1."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not set(value) <= set(AXES) or not value:
        raise NotRight(
            f"expected a dict with sizes of {', '.join(AXES)}, or None, got {shown(value)}"
        )
    for axis, size in value.items():
        whole = isinstance(size, int | float) and not isinstance(size, bool) and size == size // 1
        if not whole or size < 1:
            raise NotRight(f"expected {axis} to be a whole number from 1, got {shown(size)}")
    return {axis: int(value.get(axis, 1)) for axis in AXES}


def _misfit(args: Instance, got: dict[str, int] | None) -> str:
    best = _fastest(**args)
    if got is None:
        return f"expected a layout, because {_said(best)} fits, got None" if best else ""
    if fault := unfit(layout=got, **args):
        return f"got {_said(got)}: {fault}"
    took, least = (
        seconds(args["model"], layout, args["per_node"]) for layout in (got, best or got)
    )
    if took > SLOWER * least:
        return f"got {_said(got)}: a step takes {took:.3g} s, but {least:.3g} s with {_said(best)}"
    return ""


def _said(layout: Sizes | None) -> str:
    sizes = {axis: size for axis, size in (layout or {}).items() if size > 1}
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "dp=1"


def _model(
    dense: float, layers: int, heads: int, hidden: int, seq: int, batch: int,
    experts: int = 0, expert: float = 0, top_k: int = 0,
) -> dict[str, float]:  # fmt: skip
    return {
        "dense": int(dense), "experts": experts, "expert": int(expert), "top_k": top_k,
        "layers": layers, "heads": heads, "hidden": hidden, "seq": seq, "batch": batch,
    }  # fmt: skip


MODELS = {
    "GPT-2 XL": _model(1.56e9, 48, 25, 1600, 1024, 960),
    "GPT-J": _model(6.05e9, 28, 16, 4096, 2048, 480),
    "7B": _model(6.74e9, 32, 32, 4096, 4096, 480),
    "13B": _model(13.0e9, 40, 40, 5120, 4096, 480),
    "15B": _model(15.5e9, 40, 48, 6144, 8192, 480),
    "33B": _model(32.5e9, 60, 52, 6656, 2048, 960),
    "70B": _model(70.6e9, 80, 64, 8192, 8192, 480),
    "175B": _model(175e9, 96, 96, 12288, 2048, 1536),
    "180B": _model(180e9, 80, 232, 14848, 2048, 1536),
    "8B, 128k": _model(8.03e9, 32, 32, 4096, 131_070, 32),
    "70B, 128k": _model(70.6e9, 80, 64, 8192, 131072, 32),
    "8 experts": _model(1.6e9, 32, 32, 4096, 4096, 960, 8, 5.64e9, 2),
    "64 experts": _model(1.3e9, 27, 16, 2048, 4096, 1920, 64, 0.23e9, 1),
}
CASES = (  # model, GPUs, GPUs per node, GB per GPU
    ("GPT-2 XL", 4, 8, 16), ("7B", 4, 4, 80), ("13B", 4, 8, 80),
    ("GPT-2 XL", 12, 4, 16), ("15B", 12, 8, 64), ("13B", 12, 6, 80),
    ("7B", 20, 8, 40), ("13B", 20, 4, 40), ("13B", 20, 10, 16),
    ("GPT-J", 8, 8, 16), ("33B", 64, 8, 40), ("70B", 32, 8, 80), ("70B", 64, 8, 80),
    ("70B", 64, 4, 80), ("175B", 8, 8, 80), ("180B", 128, 8, 80),
    ("8B, 128k", 32, 8, 80), ("70B, 128k", 128, 8, 141),
    ("8 experts", 32, 8, 80), ("64 experts", 24, 6, 16),
)  # fmt: skip


def _instance(name: str, gpus: int, per_node: int, gb: float) -> Instance:
    return {"model": MODELS[name], "gpus": gpus, "per_node": per_node, "memory": int(gb * 1e9)}


def _variants(name: str, gpus: int, per_node: int, gb: float) -> Callable[..., list[Instance]]:
    """The shown case, and two with another model, memory and batch on as many GPUs."""

    def draw(rng: random.Random) -> list[Instance]:
        shown_one = _instance(name, gpus, per_node, gb)
        return [shown_one, *(_other(rng, shown_one) for _ in range(2))]

    return draw


def _other(rng: random.Random, given: Instance) -> Instance:
    model = dict(given["model"])
    fits = 1 if _fastest(**given) else 0.1
    model["dense"] = int(model["dense"] * fits * rng.uniform(0.5, 1.5))
    model["expert"] = int(model["expert"] * rng.uniform(0.5, 1.5))
    layers = (27, 33) if model["experts"] else (30, 36, 42, 60, 64, 96)
    model["layers"] = rng.choice((int(model["layers"]), *layers))
    model["heads"] = rng.choice((int(model["heads"]), 20, 24, 36, 48, 60))
    model["batch"] = rng.choice((int(model["batch"]), 2 * int(model["batch"]), 42, 50, 66, 90, 210))
    scales = (0.5, 1, 1.5, 2, 3)
    if model["seq"] > 2**16:  # an odd number of pairs of tokens: cp=2 has no equal chunks
        model["seq"], scales = int(model["seq"]) + 2, (1, 1, 1.5)
    elif rng.random() < 0.3:
        model["seq"] = int(model["seq"]) - 1
    memory = int(given["memory"] * rng.choice(scales))
    return {**given, "model": model, "memory": memory}


def _note(model: Model, gpus: int, per_node: int, memory: float) -> dict[str, int]:
    """The function to be repaired."""
    if 2 * (model["dense"] + model["experts"] * model["expert"]) < memory:
        return {"dp": gpus, "tp": 1, "pp": 1}
    per_node = 8
    nodes = gpus // per_node
    if nodes == 1:
        return {"dp": 1, "tp": gpus, "pp": 1}
    return {"dp": 1, "tp": per_node, "pp": nodes}


CHOOSE = Function(
    id="14-1",
    title="a chooser that holds",
    names=("choose",),
    stub=_note,
    reference=_fastest,
    normal=_layout,
    fault=_misfit,
    drawn=tuple(
        Case(
            f"{name} on {gpus} GPUs of {gb} GB, {per_node} per node",
            _variants(name, gpus, per_node, gb),
        )
        for name, gpus, per_node, gb in CASES
    ),
)


# --- 14-2 ----------------------------------------------------------------------------------------

Units = Sequence[tuple[int, int]]  # bytes of weights and of saved activations


def _peak(
    shards: int, units: Units, prefetch: bool, reshard: bool,
    *, gradient: bool = True, saved: bool = True, forward: bool = True, following: bool = False,
    freed: bool = True, own: bool = True, stays: bool = False, again: bool = False,
) -> int:  # fmt: skip
    """The largest sum of what is in memory while a unit computes, or what a mistake computes."""
    weights, activations = (list(column) for column in zip(*units, strict=True))
    moments = []
    for k in range(len(units)):
        held = sum(activations[: k + 1] if freed else activations) * saved
        full = weights[k] if reshard else sum(weights if stays else weights[: k + 1])
        full = full if own else 0
        ahead = weights[k + 1] if prefetch and k + 1 < len(units) else 0
        behind = weights[k - 1] if prefetch and (reshard or again) and k > 0 else 0
        moments.append(held + full + ahead)
        if not forward:
            moments.pop()
        moments.append(held + full + weights[k] * gradient + (ahead if following else behind))
    return shards + max(moments)


def _sum(shards: int, units: Units, prefetch: bool, reshard: bool) -> int:
    return shards + sum(2 * weights + saved for weights, saved in units)


def _sum_of_maxima(shards: int, units: Units, prefetch: bool, reshard: bool) -> int:
    weights, saved = zip(*units, strict=True)
    full = max(weights) if reshard else sum(weights)
    return shards + sum(saved) + full + max(weights) * (1 + (prefetch and reshard))


def _units(prefetch: bool, reshard: bool, *shapes: str) -> Callable[..., list[Instance]]:
    def draw(rng: random.Random) -> list[Instance]:
        drawn = [_model_of(rng, shape, prefetch, reshard) for shape in shapes]
        first, last = drawn[0], drawn[-1]
        return [*drawn, {**first, "shards": 1000}, {**first, "units": last["units"]}]

    return draw


def _model_of(rng: random.Random, shape: str, prefetch: bool, reshard: bool) -> Instance:
    """Units of equal sizes, or with a large one in front, at the end or in the middle."""
    count = 1 if shape == "one" else rng.randint(4, 9)
    weights = [rng.randint(50, 400)] * count
    saved = [rng.randint(20, 90)] * count
    if shape != "equal":
        weights = [rng.randint(50, 120) for _ in weights]
        saved = [rng.randint(5, 20) for _ in saved]
    large = {"front": 0, "second": 1, "middle": count // 2, "end": -1}
    if shape in large:
        weights[large[shape]] = rng.randint(900, 2000)
        if shape in ("front", "second"):
            saved[-1] = rng.randint(1, 4)
    if shape == "pair":
        weights[1], weights[2] = rng.randint(500, 600), rng.randint(1500, 1700)
        saved[2:] = [rng.randint(300, 500) for _ in saved[2:]]
    return {
        "shards": rng.randint(100, 900),
        "units": list(zip(weights, saved, strict=True)),
        "prefetch": prefetch,
        "reshard": reshard,
    }


def _as_bytes(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise NotRight(f"expected a number of bytes, got {shown(value)}")
    return float(value)


PEAK = Function(
    id="14-2",
    title="the peak of a step",
    names=("peak",),
    mistakes=(
        Wrong(_sum, "This is the sum of all allocations: they are not in memory together."),
        Wrong(
            _sum_of_maxima, "This adds maxima of different moments: add up one moment at a time."
        ),
        Wrong(
            lambda shards, units, *rest: _peak(0, units, *rest),
            "The shards of weights, gradients and optimizer are in memory all the time.",
        ),
        Wrong(
            partial(_peak, gradient=False),
            "In backward the unsharded gradient of the unit is in memory too.",
        ),
        Wrong(partial(_peak, saved=False), "The saved activations are missing."),
        Wrong(
            partial(_peak, freed=False),
            "When unit k computes in backward, the later units have freed their activations.",
        ),
        Wrong(
            lambda shards, units, prefetch, reshard: _peak(shards, units, False, reshard),
            "The weights that are gathered ahead take memory while the unit before them computes.",
        ),
        Wrong(
            lambda shards, units, prefetch, reshard: _peak(shards, units, prefetch, True),
            "Without resharding, the weights of a unit stay in memory from its forward until the "
            "end of its backward.",
        ),
        Wrong(
            partial(_peak, stays=True),
            "Without resharding, the weights of a unit are freed at the end of its backward.",
        ),
        Wrong(
            partial(_peak, again=True),
            "Backward without resharding gathers nothing: all weights are still in memory.",
        ),
        Wrong(
            lambda shards, units, prefetch, reshard: _peak(shards, units, True, reshard),
            "Without prefetch, only the weights of one unit are gathered.",
        ),
        Wrong(
            partial(_peak, following=True),
            "Backward goes from the last unit to the first: it gathers unit k-1 ahead, not k+1.",
        ),
        Wrong(
            partial(_peak, own=False), "The weights of the unit that computes are unsharded too."
        ),
        Wrong(
            lambda shards, units, *rest: _peak(shards, units[:-1] or units, *rest),
            "The last unit is left out.",
        ),
        Wrong(
            lambda shards, units, *rest: _peak(
                shards, [(max(w for w, _ in units), s) for _, s in units], *rest
            ),
            "The units have different sizes: take each one's own.",
        ),
    ),
    reference=_peak,
    normal=_as_bytes,
    relative=1e-9,
    drawn=(
        Case("one unit at a time", _units(False, True, "equal", "front", "middle", "end", "one")),
        Case(
            "the next unit ahead",
            _units(True, True, "equal", "front", "second", "middle", "end", "pair"),
        ),
        Case("weights stay after forward", _units(False, False, "equal", "middle", "front", "end")),
        Case("weights stay, gathered ahead", _units(True, False, "equal", "second", "end", "one")),
    ),
)


# --- 14-3 ----------------------------------------------------------------------------------------


def crossing(order: Sequence[str], sizes: Sizes, per_node: int) -> set[str]:
    """The axes of which at least one group has ranks in two nodes; ``order`` is fastest first."""
    crosses = _crosses(tuple(sizes[axis] for axis in order), per_node)
    return {axis for axis, does in zip(order, crosses, strict=True) if does}


@cache
def _crosses(sizes: tuple[int, ...], per_node: int) -> tuple[bool, ...]:
    world, stride, found = prod(sizes), 1, []
    for n in sizes:
        firsts = (rank for rank in range(world) if rank // stride % n == 0)
        found.append(any(r // per_node != (r + (n - 1) * stride) // per_node for r in firsts))
        stride *= n
    return tuple(found)


def _sent(order: Sequence[str], sizes: Sizes, sent: Mapping[str, float], per_node: int) -> float:
    return sum(sent[axis] for axis in crossing(order, sizes, per_node))


def _placed(sizes: Sizes, sent: Mapping[str, float], per_node: int) -> list[str]:
    return min(
        (list(order) for order in permutations(sizes)),
        key=lambda order: _sent(order, sizes, sent, per_node),
    )


def _names(value: Any) -> list[str]:
    names = value.split("-") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise NotRight(f"expected a list of axes, the fastest first, got {shown(value)}")
    return names


def _misplaced(args: Instance, got: list[str]) -> str:
    if sorted(got) != sorted(args["sizes"]):
        return f"expected each of {', '.join(args['sizes'])} once, got {shown(got)}"
    mine, best = (_sent(order, **args) for order in (got, _placed(**args)))
    if mine <= best * (1 + 1e-9):
        return ""
    crosses = ", ".join(
        axis for axis in args["sizes"] if axis in crossing(got, args["sizes"], args["per_node"])
    )
    return (
        f"in the order {'-'.join(got)}, {crosses} cross nodes and send {mine:g} GB there; another "
        f"order sends {best:g} GB"
    )


def _by_bytes(sizes: Sizes, sent: Mapping[str, float], per_node: int) -> list[str]:
    return sorted(sizes, key=lambda axis: -sent[axis])


def _clusters(*rows: tuple[tuple[int, ...], int]) -> Callable[[random.Random], list[Instance]]:
    """Clusters with these sizes of the axes, in any order, each with other bytes."""

    def draw(rng: random.Random) -> list[Instance]:
        drawn = [_cluster(rng, *row) for row in rows]
        return [each | {"sent": _gigabytes(rng, each["sizes"])} for each in drawn for _ in range(4)]

    return draw


def _cluster(rng: random.Random, sizes: Sequence[int], per_node: int) -> Instance:
    names, sizes = rng.sample(("tp", "cp", "dp", "pp"), len(sizes)), rng.sample(sizes, len(sizes))
    return {
        "sizes": (found := dict(zip(names, sizes, strict=True))),
        "sent": _gigabytes(rng, found),
        "per_node": per_node,
    }


def _gigabytes(rng: random.Random, sizes: Sizes) -> dict[str, float]:
    return {axis: rng.randint(10, 99) * 10 ** rng.randint(0, 2) / 10 for axis in sizes}


PLACE = Function(
    id="14-3",
    title="axes on nodes",
    names=("place",),
    stub=lambda sizes, sent, per_node: list(sizes),
    mistakes=(
        Wrong(
            _by_bytes,
            "Do not sort by bytes: an axis that does not fit into a node crosses nodes in every "
            "place, and in the first place it makes other axes cross too.",
        ),
        Wrong(
            lambda *given: _by_bytes(*given)[::-1],
            "This order is reversed: the first axis of the list varies fastest.",
        ),
        Wrong(
            lambda sizes, sent, per_node: sorted(sizes, key=lambda axis: sizes[axis]),
            "The sizes alone do not decide: an axis that sends little may cross nodes.",
        ),
    ),
    reference=_placed,
    normal=_names,
    fault=_misplaced,
    drawn=(
        Case("nodes of eight", _clusters(((8, 4, 4), 8), ((2, 4, 8), 8), ((2, 2, 2, 8), 8))),
        Case("the largest axis does not fit", _clusters(((16, 2, 4), 8), ((8, 2, 2), 4))),
        Case(
            "nodes of four, six and twelve",
            _clusters(((2, 2, 6), 4), ((3, 2, 4), 6), ((3, 4, 5), 12)),
        ),
        Case(
            "sizes that do not divide a node",
            _clusters(((3, 4, 2), 8), ((5, 2, 3), 8), ((6, 3, 2), 4)),
        ),
        Case("four axes, some of size one", _clusters(((2, 4, 1, 6), 8), ((3, 2, 2, 4), 12))),
    ),
)


# --- 14-4 ----------------------------------------------------------------------------------------

Parts = Mapping[str, float]
COMPUTE = ("forward", "backward", "recompute")
CHANGES = ("none", "network", "no recompute", "chunks", "overlap")


def times(
    parts: Parts, links: Mapping[str, str], saved: float, free: float, *, mistake: str = ""
) -> dict[str, float]:
    """The step after each change; infinite where it is impossible."""
    step = sum(parts.values())
    computing = sum(parts[name] for name in COMPUTE)
    across = [axis for axis, link in links.items() if link == "network" or mistake == "all links"]
    share = parts["recompute"] / computing * (mistake != "bubble stays")
    less = parts["recompute"] + parts["bubble"] * share
    hidden = parts["dp"] if mistake == "all hidden" else min(parts["dp"], parts["backward"])
    if mistake == "hidden behind all":
        hidden = min(parts["dp"], computing)
    more = 0 if mistake == "chunks are free" else parts["pp"]
    fits = saved <= free or mistake == "no memory"
    return {
        "network": step - sum(parts[axis] for axis in across) / 2,
        "no recompute": step - less if fits else inf,
        "chunks": step - parts["bubble"] / 2 + more,
        "overlap": step - hidden,
        "none": step,
    }


def _helped(*given: Any, mistake: str = "") -> tuple[str, float]:
    found = times(*given, mistake=mistake)
    best = min(CHANGES, key=lambda change: found[change])
    return best, found[best]


def _largest(
    parts: Parts, links: Mapping[str, str], saved: float, free: float
) -> tuple[str, float]:
    """Change what takes longest, whatever is left of it."""
    options = {
        "network": sum(parts[axis] for axis, link in links.items() if link == "network"),
        "no recompute": parts["recompute"], "chunks": parts["bubble"], "overlap": parts["dp"],
    }  # fmt: skip
    change = max(options, key=lambda name: options[name])
    return change, times(parts, links, saved, free)[change]


def _table(rng: random.Random, kind: str) -> Instance:
    """A table of parts in which ``kind`` decides, by at least 3 percent of the step."""
    while True:
        made = _parts(rng, kind)
        found = times(**made)
        best, after = _helped(*made.values())
        apart = min(abs(found[name] - after) for name in CHANGES if name != best)
        if best == RIGHT[kind] and (apart > 0.03 * found["none"] or best == "none"):
            return made


RIGHT = {
    "slow network": "network",
    "recomputation": "no recompute",
    "no room": "overlap",
    "bubble": "chunks",
    "dear chunks": "overlap",
    "hidden": "overlap",
    "longer than backward": "overlap",
    "partly hidden": "network",
    "through the bubble": "no recompute",
    "nothing": "none",
}


def _parts(rng: random.Random, kind: str) -> Instance:
    forward = rng.uniform(1, 3)
    parts = {
        "forward": forward,
        "backward": 2 * forward,
        "recompute": forward * rng.choice((0, 0.3, 1)),
        "bubble": rng.uniform(0.05, 1),
        "tp": rng.uniform(0.1, 1),
        "cp": rng.uniform(0, 0.3),
        "pp": rng.uniform(0.02, 0.3),
        "dp": rng.uniform(0.1, 1.5),
    }
    saved, free = rng.uniform(10, 30), rng.uniform(30, 60)
    links = {axis: rng.choice(("node", "network")) for axis in ("tp", "cp", "pp", "dp")}
    match kind:
        case "slow network":
            parts |= {"cp": rng.uniform(2, 5), "recompute": 0}
            links |= {"cp": "network", "tp": "node"}
        case "recomputation":
            parts |= {"recompute": forward, "dp": 0.2}
        case "no room":
            parts |= {"recompute": forward, "dp": 0.8 * forward}
            saved, free = free, saved
        case "bubble":
            parts |= {"bubble": 2 * forward, "pp": 0.1, "recompute": 0}
        case "dear chunks":
            parts |= {"bubble": forward, "pp": 0.4 * forward, "dp": 0.3 * forward, "recompute": 0}
            links |= {"tp": "node", "pp": "node"}
        case "hidden":
            parts |= {"dp": 1.9 * forward, "recompute": 0}
            links |= {"dp": "network", "tp": "node"}
        case "longer than backward":
            parts |= {"dp": rng.uniform(2.4, 2.9) * forward, "recompute": 0}
            links |= {"dp": "node", "tp": "node"}
        case "partly hidden":
            parts |= {"dp": rng.uniform(5, 9) * forward, "recompute": 0}
            links |= {"dp": "network"}
        case "through the bubble":
            parts |= {"recompute": forward, "bubble": 1.8 * forward, "dp": 1.1 * forward, "pp": 0.1}
            links |= {"dp": "node"}
        case "nothing":
            parts |= {"recompute": 0, "dp": 0.0, "cp": 0.0, "bubble": 0.2, "pp": 0.3}
            links |= dict.fromkeys(links, "node")
    rounded = {name: round(value, 2) for name, value in parts.items()}
    return {"parts": rounded, "links": links, "saved": round(saved, 1), "free": round(free, 1)}


def _tables(*kinds: str) -> Callable[[random.Random], list[Instance]]:
    return lambda rng: [_table(rng, kind) for kind in kinds]


def _change(value: Any) -> tuple[str, float]:
    pair = list(value) if isinstance(value, tuple | list) and len(value) == 2 else None
    if pair is None or not isinstance(pair[0], str):
        raise NotRight(f"expected (change, seconds), got {shown(value)}")
    name = " ".join(pair[0].split()).lower()
    if name not in CHANGES:
        raise NotRight(f"expected one of {', '.join(CHANGES)}, got {shown(pair[0])}")
    if isinstance(pair[1], bool) or not isinstance(pair[1], Real) or not isfinite(pair[1]):
        raise NotRight(f"expected the seconds of the new step, got {shown(pair[1])}")
    return name, float(pair[1])


def _mistaken(mistake: str) -> Callable[..., tuple[str, float]]:
    return lambda *given: _helped(*given, mistake=mistake)


def _never_none(*given: Any) -> tuple[str, float]:
    found = times(*given)
    best = min(CHANGES[1:], key=lambda change: found[change])
    return best, found[best]


def _saving(*given: Any) -> tuple[str, float]:
    change, after = _helped(*given)
    return change, sum(given[0].values()) - after


BOTTLENECK = Function(
    id="14-4",
    title="what helps most",
    names=("helps",),
    mistakes=(
        Wrong(_saving, "These are the seconds that the change saves: return the new step."),
        Wrong(
            lambda *given: (_helped(*given)[0], sum(given[0].values())),
            "These are the seconds of the old step: return the new one.",
        ),
        Wrong(
            _mistaken("no memory"),
            "Without recomputation, the activations need saved GB, but only free GB are free: the "
            "change is possible only if saved <= free.",
        ),
        Wrong(
            _mistaken("bubble stays"),
            "Without recomputation the bubble shrinks too, in proportion to forward + backward + "
            "recompute.",
        ),
        Wrong(
            _mistaken("all links"),
            'A faster network only helps axes whose entry in links is "network".',
        ),
        Wrong(
            _mistaken("all hidden"),
            "Backward can hide only as many seconds of dp as it takes itself: the rest stays "
            "exposed.",
        ),
        Wrong(
            _mistaken("hidden behind all"),
            "Gradients exist only in backward: forward and recomputation hide none of them.",
        ),
        Wrong(_mistaken("chunks are free"), "Two chunks per rank double pp."),
        Wrong(_never_none, 'If no change makes the step shorter, return "none".'),
        Wrong(
            _largest,
            "Do not choose by the largest part: compare the whole new step of each change.",
        ),
    ),
    reference=_helped,
    normal=_change,
    relative=1e-6,
    drawn=(
        Case(
            "the network",
            _tables("slow network", "partly hidden", "hidden", "longer than backward"),
        ),
        Case("memory decides", _tables("recomputation", "no room", "through the bubble")),
        Case("the bubble", _tables("bubble", "dear chunks", "through the bubble")),
        Case(
            "all of them",
            _tables("nothing", "bubble", "slow network", "recomputation", "partly hidden"),
        ),
    ),
)

EXERCISES = (CHOOSE, PEAK, PLACE, BOTTLENECK)
