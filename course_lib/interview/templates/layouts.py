"""Questions on ranks, groups and degrees."""

from __future__ import annotations

from random import Random

from course_lib.interview.questions import Draw, Template
from course_lib.layout import Layout, make_layout
from course_lib.planner.configuration import Configuration

ORDER, REVERSED = "tp-cp-dp-pp", "pp-dp-cp-tp"


def _degrees(rng: Random) -> dict[str, int]:
    return {
        "tp": rng.choice((2, 4, 8)),
        "cp": rng.choice((2, 4)),
        "dp": rng.choice((2, 4, 8)),
        "pp": rng.choice((2, 4, 8)),
    }


def _layout(degrees: dict[str, int], order: str = ORDER) -> Layout:
    return make_layout(None, order, **degrees)


def _rank(layout: Layout, at: dict[str, int]) -> int:
    return next(rank for rank in range(layout.world) if layout.coordinates(rank) == at)


def rank_at(rng: Random) -> Draw:
    """Ask for the global rank of coordinates."""
    degrees = _degrees(rng)
    at = {axis: rng.randrange(1, size) for axis, size in degrees.items()}
    value = _rank(_layout(degrees), at)
    mistakes = {
        "slowest-first": _rank(_layout(degrees, REVERSED), at),
        "no-cp": _rank(_layout(degrees | {"cp": 1}), at | {"cp": 0}),
        "no-pp": _rank(_layout(degrees), at | {"pp": 0}),
    }
    strides = _strides(degrees)
    given = degrees | {f"{axis}_at": number for axis, number in at.items()}
    return Draw(given, value, mistakes, {f"{axis}_by": size for axis, size in strides.items()})


def _strides(degrees: dict[str, int]) -> dict[str, int]:
    """Return how far apart neighbors of each axis are."""
    layout = _layout(degrees)
    groups = {axis: layout.groups(axis)[0] for axis in degrees}
    return {axis: members[1] - members[0] for axis, members in groups.items()}


def coordinate(rng: Random) -> Draw:
    """Ask for the pipeline stage of a rank."""
    degrees = _degrees(rng)
    layout = _layout(degrees)
    rank = rng.randrange(layout.world // degrees["pp"], layout.world)
    mistakes = {
        "slowest-first": _layout(degrees, REVERSED).coordinates(rank)["pp"],
        "one-more": layout.coordinates(rank)["pp"] + 1,
        "coordinate-of-dp": layout.coordinates(rank)["dp"],
    }
    by = _strides(degrees)["pp"]
    return Draw(degrees | {"rank": rank}, layout.coordinates(rank)["pp"], mistakes, {"by": by})


def degree(rng: Random) -> Draw:
    """Ask for dp of a cluster."""
    degrees = _degrees(rng)
    world = _layout(degrees).world
    others = {axis: size for axis, size in degrees.items() if axis != "dp"}

    def left(without: str) -> int:
        sizes = {axis: size for axis, size in others.items() if axis != without}
        return make_layout(world, ORDER, **sizes).sizes["dp"]

    mistakes = {f"no-{axis}": left(axis) for axis in others}
    value = make_layout(world, ORDER, **others).sizes["dp"]
    model_gpus = world // value
    return Draw(others | {"world": world}, value, mistakes, {"others": model_gpus})


def stride(axis: str) -> Template:
    """Ask for the distance of neighbors in a group of ``axis``."""

    def draw(rng: Random) -> Draw:
        degrees = _degrees(rng)
        strides = _strides(degrees)
        reverse = _layout(degrees, REVERSED).groups(axis)[0]
        mistakes = {
            "no-cp": _strides_without("cp", degrees, axis),
            "slowest-first": reverse[1] - reverse[0],
            "neighbors": strides["tp"],
        }
        members = ", ".join(map(str, _layout(degrees).groups(axis)[0]))
        return Draw(degrees, strides[axis], mistakes, {"members": members})

    return Template(f"layouts-stride-{axis}", "11", "count", draw, 0)


def _strides_without(lost: str, degrees: dict[str, int], axis: str) -> int:
    return _strides({name: size for name, size in degrees.items() if name != lost})[axis]


def groups(rng: Random) -> Draw:
    """Ask for the number of groups of tp."""
    degrees = _degrees(rng)
    layout = _layout(degrees)
    mistakes = {
        "group-size": degrees["tp"],
        "no-pp": len(layout.groups("tp")) // degrees["pp"],
        "no-cp": len(layout.groups("tp")) // degrees["cp"],
        "world": layout.world,
    }
    return Draw(degrees, len(layout.groups("tp")), mistakes, {"world": layout.world})


def micro_batches(rng: Random) -> Draw:
    """Ask for the micro-batches per step of a replica."""
    degrees = _degrees(rng) | {"cp": 1}
    size = rng.choice((2, 4, 8))
    m = rng.choice((8, 16, 32))
    batch = m * size * degrees["dp"]
    plan = Configuration(
        tp=degrees["tp"], dp=degrees["dp"], pp=degrees["pp"], micro_batch=size, global_batch=batch
    )
    mistakes = {
        "no-dp": Configuration(micro_batch=size, global_batch=batch).micro_batches,
        "no-micro-batch": plan.sequences,
        "world-divides": batch / (plan.world * size),
    }
    given = {axis: degrees[axis] for axis in ("tp", "dp", "pp")}
    given |= {"size": size, "batch": batch}
    return Draw(given, plan.micro_batches, mistakes, {"sequences": plan.sequences})


def replicas_of_experts(rng: Random) -> Draw:
    """Ask how many ranks of dp x cp have the same experts."""
    degrees = _degrees(rng) | {"tp": 2, "pp": 2, "dp": rng.choice((4, 8, 16))}
    ep = rng.choice((2, 4))
    layout = make_layout(None, ORDER, ep=ep, **degrees)
    shards, copies = layout.expert_groups()
    mistakes = {
        "group-size": len(shards[0]),
        "no-cp": len(copies[0]) / degrees["cp"],
        "no-ep": degrees["dp"] * degrees["cp"],
        "world-divides": layout.world // ep,
    }
    given = degrees | {"ep": ep}
    return Draw(given, len(copies[0]), mistakes, {"data": degrees["dp"] * degrees["cp"]})


TEMPLATES = (
    Template("layouts-rank", "11", "count", rank_at, 0),
    Template("layouts-stage", "11", "count", coordinate, 0),
    Template("layouts-dp", "11", "count", degree, 0),
    stride("dp"),
    stride("pp"),
    Template("layouts-groups", "11", "count", groups, 0),
    Template("layouts-micro-batches", "12", "count", micro_batches, 0),
    Template("layouts-experts", "12", "count", replicas_of_experts, 0),
)
