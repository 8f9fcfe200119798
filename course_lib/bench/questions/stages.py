"""Zero bubble on unequal stages: schedules simulated with one slow rank.

Each rank has LAYERS / RANKS layers, or as many as its speed allows. Time 1 is a forward of the
equal share of layers at full speed; F = I = W, and messages take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from course_lib.schedule import Costs, lower_bound, make, placement, searched, simulate, v_shape

RANKS, MICRO_BATCHES, LAYERS = 4, 12, 32
SPEEDS = (1.0, 0.8, 0.5, 1 / 3)
PLACES = {"first": 0, "middle": 1, "last": RANKS - 1}
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "searched")


class Row(NamedTuple):
    """Makespans by schedule; ``bound`` is the lower bound of a V-shaped placement.

    ``busiest`` is the working time of the rank that works longest, ``perfect`` the time if all
    ranks finished their work at the same moment.
    """

    speed: float
    place: str
    layers: tuple[int, ...]
    makespans: dict[str, float]
    bound: float
    busiest: float
    perfect: float

    def saved(self, name: str) -> float:
        """Return the share of 1F1B's time that schedule ``name`` saves."""
        return 1 - self.makespans[name] / self.makespans["1f1b"]


def evened(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the layers of each rank, one after another to the rank that would end first."""
    layers = [0] * RANKS
    for _ in range(LAYERS):
        rank = min(range(RANKS), key=lambda rank: ((layers[rank] + 1) / speeds[rank], rank))
        layers[rank] += 1
    return tuple(layers)


def row(speed: float, place: str, *, moved: bool, schedules: Sequence[str] = SCHEDULES) -> Row:
    """Return the makespans with a rank of ``speed`` at ``place``; ``moved`` layers even it out."""
    speeds = [1.0] * RANKS
    speeds[PLACES[place]] = speed
    layers = evened(speeds) if moved else (LAYERS // RANKS,) * RANKS
    makespans = {}
    for name in schedules:
        ranks = v_shape(RANKS) if name == "searched" else placement(name, RANKS)
        costs = _costs(ranks, layers, speeds)
        if name == "searched":
            schedule = searched(ranks, MICRO_BATCHES, costs)
        else:
            schedule = make(name, RANKS, MICRO_BATCHES, costs=costs)
        makespans[name] = simulate(schedule, costs).makespan
    unit = 3 * MICRO_BATCHES * RANKS / LAYERS  # of one layer at full speed, in the whole step
    v = v_shape(RANKS)
    return Row(
        speed,
        place,
        layers,
        makespans,
        bound=lower_bound(v, MICRO_BATCHES, _costs(v, layers, speeds)),
        busiest=unit * max(n / s for n, s in zip(layers, speeds, strict=True)),
        perfect=unit * LAYERS / sum(speeds),
    )


def _costs(ranks: Sequence[int], layers: Sequence[int], speeds: Sequence[float]) -> Costs:
    """Return the costs of the stages on ``ranks``: a rank's layers, split evenly over them."""
    factors = []
    for stage, rank in enumerate(ranks):
        stages, before = ranks.count(rank), ranks[:stage].count(rank)
        own = layers[rank] // stages + (before < layers[rank] % stages)
        factors.append(own * RANKS / LAYERS)
    return Costs(per_stage=tuple(factors)).on_ranks(speeds, ranks)


@cache
def rows() -> tuple[Row, ...]:
    """Return all speeds, places and both ways to divide the layers."""
    return tuple(
        row(speed, place, moved=moved)
        for moved in (False, True)
        for speed in SPEEDS
        for place in PLACES
        if speed < 1 or (place == "middle" and not moved)
    )


def curves_by_speed() -> dict[str, dict[float, float]]:
    """Return the time of a step over the perfect time, by the speed of the middle rank."""
    found: dict[str, dict[float, float]] = {}
    for moved, how in ((False, "equal layers"), (True, "layers by speed")):
        for speed in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 1 / 3):
            one = row(speed, "middle", moved=moved, schedules=("1f1b", "zb-v"))
            for name, seconds in one.makespans.items():
                found.setdefault(f"{name.upper()}, {how}", {})[speed] = seconds / one.perfect
    return found


def text() -> Iterator[str]:
    """Yield the table of the time that each schedule saves against 1F1B."""
    names = SCHEDULES[1:]
    yield (
        f"1. Zero bubble on unequal stages: {RANKS} ranks, {MICRO_BATCHES} micro-batches, "
        f"{LAYERS} layers"
    )
    yield (
        f"{'speed':>6} {'slow':<7}{'layers':<13}{'1f1b':>7}{'bound':>7}{'busiest':>8}"
        f"{'perfect':>8}   time saved against 1f1b: " + ", ".join(names)
    )
    for one in rows():
        saved = "".join(f"{one.saved(name):>8.1%}" for name in names)
        yield (
            f"{one.speed:>6.2f} {one.place:<7}{'-'.join(map(str, one.layers)):<13}"
            f"{one.makespans['1f1b']:>7.2f}{one.bound:>7.2f}{one.busiest:>8.2f}"
            f"{one.perfect:>8.2f}{saved}"
        )
