"""Lesson 14: wrong and right answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, permutations
from typing import Any

import numpy as np
from attack import Attacks

from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.graders.judge import lesson_14 as judge

AXES = ("tp", "pp", "cp", "dp", "ep")
Layout = dict[str, int]


class _Remembers:
    """Right once: calls with equal arguments at ``places`` return the result of the first."""

    def __init__(self, answer: Answer, *places: int) -> None:
        self.answer, self.places = answer, places
        self.known: dict[Any, Any] = {}

    def __call__(self, *given: Any) -> Any:
        key = tuple(str(given[place]) for place in self.places)
        return self.known.setdefault(key, self.answer(*given))


# --- 14-1
def _sizes(model: Mapping[str, Any], gpus: int) -> Iterator[Layout]:
    """All products, legal or not."""
    degrees = judge.divisors(gpus)
    for tp in degrees:
        for pp in judge.divisors(gpus // tp):
            for cp in judge.divisors(gpus // tp // pp):
                dp = gpus // (tp * pp * cp)
                for ep in judge.divisors(model["experts"] or 1):
                    yield dict(zip(AXES, (tp, pp, cp, dp, ep), strict=True))


def _choose(
    model: dict[str, Any],
    gpus: int,
    per_node: int,
    memory: float,
    *,
    without: str = "",
    best: Callable[[Any, Layout, int], float] = judge.seconds,
    room: float = 0.92,
    only: Callable[[Layout], bool] = lambda layout: True,
    need: Callable[[Any, Layout], float] = judge.needed,
    worst: bool = False,
) -> Layout | None:
    """Right, or with a mistake: ``without`` one of the rules, or by another measure."""
    found = []
    for layout in _sizes(model, gpus):
        tp, pp, cp, dp, ep = layout.values()
        rules = {
            "heads": model["heads"] % tp == 0,
            "node": per_node % tp == 0 or gpus <= per_node,
            "small node": per_node % tp == 0,
            "layers": model["layers"] % pp == 0,
            "batch": model["batch"] % dp == 0,
            "sequence": cp == 1 or model["seq"] % (2 * cp) == 0,
            "ep": dp * cp % ep == 0,
            "memory": need(model, layout) <= room * memory,
        }
        if without != "small node":
            del rules["small node"]
        else:
            del rules["node"]
        if all(kept for rule, kept in rules.items() if rule != without) and only(layout):
            found.append(layout)
    pick = max if worst else min
    return pick(found, key=lambda one: best(model, one, per_node)) if found else None


def _chooser(**mistake: Any) -> Answer:
    return lambda *given: _choose(*given, **mistake)


def _note_with_states(model: Any, gpus: int, per_node: int, memory: float) -> Layout:
    """The note's function that counts 18 bytes per parameter."""
    return judge._note({**model, "dense": 9 * model["dense"]}, gpus, per_node, memory)


def _always(model: Any, gpus: int, per_node: int, memory: float) -> Layout:
    """Never None: what needs the least."""
    fits = _choose(model, gpus, per_node, memory)
    return fits or _choose(
        model, gpus, per_node, math.inf, best=lambda model, one, node: judge.needed(model, one)
    )  # type: ignore[return-value]


def _changes(model: Any, gpus: int, per_node: int, memory: float) -> Any:
    found = _choose(dict(model), gpus, per_node, memory)
    model["batch"] = 1
    return found


def _idle(model: Any, gpus: int, per_node: int, memory: float) -> Any:
    """Leaves GPUs idle: the largest power of two."""
    return _choose(model, 2 ** int(math.log2(gpus)), per_node, memory)


def _shown_only(model: Any, gpus: int, per_node: int, memory: float) -> Any:
    """Knows the 20 clusters and takes the note's way otherwise."""
    for row in judge.CASES:
        known = judge._instance(*row)
        if list(known.values()) == [model, gpus, per_node, memory]:
            return _choose(model, gpus, per_node, memory)
    return judge._note(model, gpus, per_node, memory)


def _by_rule_of_thumb(model: Any, gpus: int, per_node: int, memory: float) -> Any:
    """tp as large as a node allows, then pp until it fits."""
    tp = max(d for d in judge.divisors(math.gcd(gpus, per_node)) if model["heads"] % d == 0)
    for pp in judge.divisors(gpus // tp):
        layout = {"tp": tp, "pp": pp, "cp": 1, "dp": gpus // tp // pp, "ep": 1}
        if not judge.unfit(model, gpus, per_node, memory, layout):
            return layout
    return None


def _ep_without_experts(*given: Any) -> Any:
    """Takes ep=2 for every model without experts, as 2 divides 0."""
    found = _choose(*given)
    if found and not given[0]["experts"] and found["dp"] * found["cp"] % 2 == 0:
        found["ep"] = 2
    return found


def _sparse(*given: Any) -> Any:
    """Right too: names the axes that are larger than 1, and dp."""
    found = _choose(*given)
    return found and {axis: n for axis, n in found.items() if n > 1 or axis == "dp"}


def _simplest(*given: Any) -> Any:
    """Right too: of the layouts that are at most 9 percent slower, the one with fewest axes."""
    model, gpus, per_node, memory = given
    best = _choose(*given)
    if best is None:
        return None
    least = judge.seconds(model, best, per_node)
    close = [
        layout
        for layout in judge.layouts(model, gpus, per_node, memory)
        if judge.seconds(model, layout, per_node) <= 1.09 * least
    ]
    return min(close, key=lambda one: sum(n > 1 for n in one.values()))


def _by_floats(*given: Any) -> Any:
    found = _choose(*given)
    return found and {axis: float(n) for axis, n in found.items()}


# --- 14-2
def _replayed(shards: int, units: Sequence[Any], prefetch: bool, reshard: bool) -> int:
    """Right too: plays allocations and frees in order, with a dict of what is in memory."""
    live, most = {"shards": shards}, 0

    def computes() -> None:
        nonlocal most
        most = max(most, sum(live.values()))

    n = len(units)
    for k, (weights, saved) in enumerate(units):
        live[f"w{k}"] = weights
        live[f"a{k}"] = saved
        if prefetch and k + 1 < n:
            live[f"w{k + 1}"] = units[k + 1][0]
        computes()
        if reshard:
            del live[f"w{k}"]
    for k in reversed(range(n)):
        live[f"w{k}"] = live[f"g{k}"] = units[k][0]
        if prefetch and reshard and k:
            live[f"w{k - 1}"] = units[k - 1][0]
        computes()
        for name in "wga":
            del live[f"{name}{k}"]
    return most


def _backward_alone(shards: int, units: Sequence[Any], prefetch: bool, reshard: bool) -> int:
    """Right too, because backward has more in memory than forward."""
    saved = list(accumulate(s for _, s in units))
    weights = list(accumulate(w for w, _ in units))
    live = []
    for k, (own, _) in enumerate(units):
        ahead = units[k - 1][0] if k and prefetch and reshard else 0
        live.append(saved[k] + (own if reshard else weights[k]) + own + ahead)
    return shards + max(live)


def _forward_alone(shards: int, units: Sequence[Any], prefetch: bool, reshard: bool) -> int:
    return judge._peak(shards, units, prefetch, reshard, gradient=False)


def _last_moment(shards: int, units: Sequence[Any], prefetch: bool, reshard: bool) -> int:
    """Takes the backward of the last unit for the peak."""
    weights, saved = zip(*units, strict=True)
    full = weights[-1] if reshard else sum(weights)
    ahead = weights[-2] if prefetch and reshard and len(units) > 1 else 0
    return shards + sum(saved) + full + weights[-1] + ahead


def _largest_unit(shards: int, units: Sequence[Any], prefetch: bool, reshard: bool) -> int:
    """Takes the backward of the unit with the largest weights for the peak."""
    k = max(range(len(units)), key=lambda at: units[at][0])
    return max(judge._peak(shards, units[: k + 1], False, reshard), 0) + (
        units[k - 1][0] if prefetch and reshard and k else 0
    )


# --- 14-3
def _by_groups(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> list[str]:
    """Right too: makes all groups with numpy and tries all orders, as a text."""
    best: tuple[float, list[str]] = (math.inf, [])
    for order in permutations(sizes):
        shape = [sizes[axis] for axis in reversed(order)]
        ranks = np.arange(math.prod(shape)).reshape(shape)
        total = 0.0
        for place, axis in enumerate(reversed(order)):
            nodes = np.moveaxis(ranks, place, -1).reshape(-1, sizes[axis]) // per_node
            total += sent[axis] * bool((nodes != nodes[:, :1]).any())
        best = min(best, (total, list(order)))
    return best[1]


def _fits(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> list[str]:
    """Greedy: the heaviest axis that still fits in the node, then the rest."""
    order, stride, left = [], 1, sorted(sizes, key=lambda axis: -sent[axis])
    while left:
        axis = next((axis for axis in left if stride * sizes[axis] <= per_node), left[-1])
        left.remove(axis)
        order.append(axis)
        stride *= sizes[axis]
    return order


def _by_members(
    *, first: bool = False, size_only: bool = False, count: bool = False, last: bool = False
) -> Answer:
    """The best order by a wrong test of what crosses."""

    def place(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> list[str]:
        def cost(order: Sequence[str]) -> float:
            total, stride = 0.0, 1
            for axis in order:
                n = sizes[axis]
                if first:  # the group of rank 0 alone
                    bad = (n - 1) * stride // per_node > 0
                elif size_only:  # ignores the stride
                    bad = n > per_node
                elif last:  # by the stride alone
                    bad = stride >= per_node
                else:
                    bad = axis in judge.crossing(order, sizes, per_node)
                total += bad * (1 if count else sent[axis])
                stride *= n
            return total

        return list(min(permutations(sizes), key=cost))

    return place


def _most(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> list[str]:
    return list(
        max(permutations(sizes), key=lambda order: judge._sent(order, sizes, sent, per_node))
    )


def _by_density(sizes: Mapping[str, int], sent: Mapping[str, float], per_node: int) -> list[str]:
    return sorted(sizes, key=lambda axis: -sent[axis] / sizes[axis])


# --- 14-4
def _one_by_one(
    parts: Mapping[str, float], links: Mapping[str, str], saved: float, free: float
) -> tuple[str, float]:
    """Right too: changes a copy of the table and adds it up."""
    tables = {"none": dict(parts)}
    slow = {axis for axis, link in links.items() if link == "network"}
    tables["network"] = {k: v / 2 if k in slow else v for k, v in parts.items()}
    tables["chunks"] = {**parts, "bubble": parts["bubble"] / 2, "pp": 2 * parts["pp"]}
    tables["overlap"] = {**parts, "dp": max(0.0, parts["dp"] - parts["backward"])}
    if saved <= free:
        both = parts["forward"] + parts["backward"]
        bubble = parts["bubble"] * both / (both + parts["recompute"])
        tables["no recompute"] = {**parts, "recompute": 0.0, "bubble": bubble}
    steps = {name: math.fsum(table.values()) for name, table in tables.items()}
    name = min(steps, key=lambda one: steps[one])
    return name, steps[name]


def _named(change: str) -> Answer:
    return lambda *given: (change, judge.times(*given)[change])


def _two_changes(*given: Any) -> tuple[str, float]:
    """Makes all changes that help at once."""
    found = judge.times(*given)
    saved = sum(max(0.0, found["none"] - after) for after in found.values())
    return judge._helped(*given)[0], found["none"] - saved


def _rounded(*given: Any) -> tuple[str, float]:
    name, after = _one_by_one(*given)
    return name, round(after, 1)


ATTACKS = {
    "14-1": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected a layout, because"),
            Wrong(lambda *given: 8, words="expected a dict with sizes of tp, pp, cp, dp, ep"),
            Wrong(lambda *given: {"tp": 1, "fsdp": 8}, words="expected a dict with sizes of"),
            Wrong(lambda *given: {"tp": 0, "pp": 4}, words="expected tp to be a whole number"),
            Wrong(judge._note, words="choose("),
            Wrong(_note_with_states, words="choose("),
            Wrong(_by_rule_of_thumb, words="choose("),
            Wrong(_chooser(without="heads"), words="heads"),
            Wrong(_chooser(without="node"), words="GPUs of a node: some groups cross nodes"),
            Wrong(_chooser(without="layers"), words="layers"),
            Wrong(_chooser(without="batch"), words="sequences"),
            Wrong(_chooser(without="sequence"), words="tokens of a sequence"),
            Wrong(_chooser(without="ep"), words="it uses these ranks"),
            Wrong(_chooser(without="memory"), words="the fullest GPU needs"),
            Wrong(_chooser(without="small node"), words="choose("),
            Wrong(_ep_without_experts, words="this model has no experts"),
            Wrong(_chooser(room=1.0), words="which is 92% of its memory"),
            Wrong(_chooser(room=0.8), words="choose("),
            Wrong(_chooser(only=lambda layout: layout["cp"] == 1), words="choose("),
            Wrong(_chooser(only=lambda layout: layout["ep"] == 1), words="choose("),
            Wrong(_chooser(only=lambda layout: layout["dp"] == 1), words="choose("),
            Wrong(_chooser(only=lambda layout: layout["pp"] == 1), words="choose("),
            Wrong(_chooser(only=lambda layout: layout["tp"] in (1, 2, 4, 8)), words="choose("),
            Wrong(_chooser(best=lambda *given: judge.needed(*given[:2])), words="s with"),
            Wrong(_chooser(best=lambda model, one, node: one["tp"] * one["pp"]), words="choose("),
            Wrong(_chooser(worst=True), words="s with"),
            Wrong(
                _chooser(need=lambda model, one: judge.needed({**model, "seq": 0}, one)),
                words="the fullest GPU needs",
            ),
            Wrong(
                _chooser(need=lambda model, one: judge.needed({**model, "batch": one["dp"]}, one)),
                words="the fullest GPU needs",
            ),
            Wrong(_always, words="the fullest GPU needs"),
            Wrong(_idle, words="use them all"),
            Wrong(_shown_only, words="choose("),
            Wrong(_changes, words="changed its argument model"),
            Wrong(_Remembers(_choose, 1, 2), words="choose("),
            Wrong(_Remembers(_choose, 1, 2, 3), words="choose("),
            Wrong(_Remembers(_choose, 0), words="choose("),
        ),
        right=(_choose, _sparse, _simplest, _by_floats),
    ),
    "14-2": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected a number of bytes"),
            Wrong(lambda *given: str(judge._peak(*given)), words="expected a number of bytes"),
            Wrong(lambda *given: judge._peak(*given) + 1, words="expected "),
            Wrong(_forward_alone, words="unsharded gradient"),
            Wrong(_last_moment, words="peak("),
            Wrong(_largest_unit, words="peak("),
            Wrong(
                lambda shards, units, *rest: judge._peak(shards, units[::-1], *rest),
                words="peak(",
            ),
            Wrong(lambda *given: judge._peak(*given) / 2**30, words="expected "),
            Wrong(_Remembers(judge._peak, 0, 2, 3), words="peak("),
            Wrong(_Remembers(judge._peak, 1), words="peak("),
            Wrong(
                lambda shards, units, *rest: judge._peak(shards, [units.pop()], *rest),
                words="changed its argument units",
            ),
        ),
        right=(
            _replayed,
            _backward_alone,
            lambda *given: float(_replayed(*given)),
            lambda *given: Decimal(_replayed(*given)),
        ),
    ),
    "14-3": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected a list of axes"),
            Wrong(lambda sizes, *rest: list(sizes)[:-1], words="once, got"),
            Wrong(lambda sizes, *rest: [*sizes, "tp"], words="once, got"),
            Wrong(lambda sizes, *rest: list(sizes), words="place("),
            Wrong(lambda sizes, *rest: ["tp", "cp", "dp", "pp"], words="place("),
            Wrong(
                lambda sizes, *rest: [a for a in ("tp", "cp", "dp", "pp") if a in sizes],
                words="place(",
            ),
            Wrong(lambda *given: judge._placed(*given)[::-1], words="place("),
            Wrong(_fits, words="place("),
            Wrong(_by_density, words="place("),
            Wrong(_by_members(first=True), words="place("),
            Wrong(_by_members(size_only=True), words="place("),
            Wrong(_by_members(count=True), words="place("),
            Wrong(_by_members(last=True), words="place("),
            Wrong(_most, words="place("),
            Wrong(lambda sizes, sent, per_node: judge._placed(sizes, sent, 8), words="place("),
            Wrong(_Remembers(judge._placed, 0, 2), words="place("),
        ),
        right=(
            _by_groups,
            _by_members(),
            lambda *given: "-".join(_by_groups(*given)),
            lambda *given: tuple(_by_groups(*given)),
        ),
    ),
    "14-4": Attacks(
        wrong=(
            Wrong(lambda *given: None, words="expected (change, seconds)"),
            Wrong(lambda *given: judge._helped(*given)[0], words="expected (change, seconds)"),
            Wrong(lambda *given: judge._helped(*given)[::-1], words="expected (change, seconds)"),
            Wrong(lambda *given: ("buy", 1.0), words="expected one of none"),
            Wrong(_named("network"), words="helps("),
            Wrong(_named("chunks"), words="helps("),
            Wrong(_named("overlap"), words="helps("),
            Wrong(_named("none"), words="helps("),
            Wrong(_two_changes, words="helps("),
            Wrong(_rounded, words="helps("),
            Wrong(_Remembers(_one_by_one, 1), words="helps("),
        ),
        right=(
            _one_by_one,
            lambda *given: list(_one_by_one(*given)),
            lambda *given: (_one_by_one(*given)[0].upper(), np.float64(_one_by_one(*given)[1])),
            lambda *given: (_one_by_one(*given)[0], Fraction(_one_by_one(*given)[1])),
        ),
    ),
}
