"""Numbers of the questions on pipelines."""

from __future__ import annotations

from functools import cache
from typing import Any

from course_lib.formulas import pp
from course_lib.interview.concepts.numbers import about
from course_lib.planner import configure, estimate, hardware, model
from course_lib.schedule import Costs, Simulation, make, predicted_bubble, simulate

P, M = 8, 32  # stages and micro-batches of most questions
THIRDS = Costs.make(f=1, i=1, w=1)


@cache
def _simulated(
    name: str, p: int = P, m: int = M, speeds: tuple[float, ...] | None = None
) -> Simulation:
    """Return the simulation with F = I = W = 1 per rank; a chunk costs its part of it."""
    schedule = make(name, p, m)
    chunk = p / schedule.stages
    costs = Costs.make(f=chunk, i=chunk, w=chunk)
    return simulate(schedule, costs.on_ranks(speeds, schedule.placement) if speeds else costs)


def _share(value: float) -> Any:
    return about(value, "share")


def bubble() -> dict[str, Any]:
    """8 stages: what each remedy does to the bubble."""
    total = predicted_bubble("1f1b", P, M)
    return {
        "p": P,
        "less": P - 1,
        "m": M,
        "slots": M + P - 1,
        "bubble": _share(total),
        "ideal": _share(total / (1 - total)),
        "many": 4 * M,
        "bubble_many": _share(predicted_bubble("1f1b", P, 4 * M)),
        "few": P,
        "bubble_few": _share(predicted_bubble("1f1b", P, P)),
        "v": 4,
        "bubble_v": _share(predicted_bubble("interleaved", P, M, 4)),
        "boundaries": pp.stage_boundaries(make("1f1b", P, M)),
        "boundaries_v": pp.stage_boundaries(make("interleaved", P, M, 4)),
        "bubble_h1": _share(predicted_bubble("zb-h1", P, M, costs=THIRDS)),
        "peak": max(make("1f1b", P, M).peak_in_flight()),
        "peak_h2": max(make("zb-h2", P, M).peak_in_flight()),
    }


def memory() -> dict[str, Any]:
    """GPipe and 1F1B: 8 stages, and Falcon 180B with tp=8, pp=4 on 128 H100 GPUs."""
    config = model("falcon-180b")
    plans = {
        name: estimate(
            config,
            hardware("h100"),
            configure(config, 128, tp=8, pp=4, schedule=name),
            simulated=False,
        )
        for name in ("gpipe", "1f1b")
    }
    assert _simulated("gpipe").makespan == _simulated("1f1b").makespan
    peaks = {name: make(name, P, M).peak_in_flight() for name in ("gpipe", "1f1b")}
    falcon = plans["1f1b"].configuration
    return {
        "p": P,
        "m": M,
        "bubble": _share(_simulated("1f1b").bubble_of_total),
        "peak_gpipe": max(peaks["gpipe"]),
        "peak": max(peaks["1f1b"]),
        "last": min(peaks["1f1b"]),
        "pp": falcon.pp,
        "falcon_m": falcon.micro_batches,
        "gpipe": about(plans["gpipe"].memory.activations, digits=2),
        "one": about(plans["1f1b"].memory.activations, digits=2),
        "double": 2 * M,
        "bubble_double": _share(predicted_bubble("1f1b", P, 2 * M)),
    }


def interleaving() -> dict[str, Any]:
    """8 stages, 32 micro-batches, 4 chunks per rank."""
    v = 4
    one, thin = make("1f1b", P, M), make("interleaved", P, M, v)
    share = predicted_bubble("1f1b", P, M)
    thin_share = predicted_bubble("interleaved", P, M, v)
    return {
        "p": P,
        "less": P - 1,
        "m": M,
        "v": v,
        "stages": thin.stages,
        "ideal": _share(share / (1 - share)),
        "ideal_v": _share(thin_share / (1 - thin_share)),
        "total": _share(share),
        "total_v": _share(thin_share),
        "boundaries": pp.stage_boundaries(one),
        "boundaries_v": pp.stage_boundaries(thin),
        "peak": max(one.peak_in_flight()),
        "peak_v": max(thin.peak_in_flight()),
        "memory": f"{max(thin.peak_in_flight()) / v / max(one.peak_in_flight()):.2f}",
    }


def zero_bubble() -> dict[str, Any]:
    """4 stages and 8 micro-batches with F = I = W = 1."""
    p, m = 4, 8
    found = {name: _simulated(name, p, m) for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")}
    assert found["zb-v"].schedule.stages == 2 * p
    return {
        "p": p,
        "m": m,
        "work": round(found["1f1b"].work),
        "step": round(found["1f1b"].makespan),
        "step_h1": round(found["zb-h1"].makespan),
        "step_h2": round(found["zb-h2"].makespan),
        "span_h2": round(found["zb-h2"].span),
        "span_v": round(found["zb-v"].span),
        "gap": round(found["1f1b"].makespan - found["1f1b"].work),
        "gap_h1": round(found["zb-h1"].makespan - found["zb-h1"].work),
        "peak": max(found["zb-h1"].schedule.peak_in_flight()),
        "peak_h2": max(found["zb-h2"].schedule.peak_in_flight()),
    }


def slow_stage() -> dict[str, Any]:
    """4 stages and 8 micro-batches, one GPU at half speed; 80 layers to move."""
    p, m, speeds = 4, 8, (1.0, 1.0, 0.5, 1.0)
    layers = model("llama-3-70b").layers
    even, moved = layers // p, (23, 23, 11, 23)
    assert sum(moved) == layers
    work = tuple(count / even for count in moved)
    schedule = make("1f1b", p, m)
    costs = Costs.make(f=1, i=1, w=1, per_stage=work).on_ranks(speeds, schedule.placement)
    times = {
        name: _simulated(name, p, m, speeds).makespan
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    }
    return {
        "p": p,
        "m": m,
        "equal": round(_simulated("1f1b", p, m).makespan),
        "slow": round(times["1f1b"]),
        "busy": round(_simulated("1f1b", p, m, speeds).work),
        "gpipe": round(times["gpipe"]),
        "interleaved": round(times["interleaved"]),
        "h1": round(times["zb-h1"]),
        "v": round(times["zb-v"]),
        "layers": layers,
        "even": even,
        "fewer": moved[2],
        "more": moved[0],
        "moved": about(simulate(schedule, costs).makespan, "count"),
    }
