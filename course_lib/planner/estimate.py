"""The estimate of a step: combine memory, traffic, bubble and seconds of a configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from course_lib.formulas.moves import Move
from course_lib.ledger import wire
from course_lib.planner.catalog import Model
from course_lib.planner.communication import StageMoves, StepMoves, stage_moves, step_moves
from course_lib.planner.configuration import Configuration, outer_ranks, stages_of
from course_lib.planner.flops import hardware_flops, step_flops
from course_lib.planner.hardware import Hardware
from course_lib.planner.links import axis_span, seconds
from course_lib.planner.memory import memory, state_bytes
from course_lib.planner.parameters import active_parameters, parameters, parameters_per_rank
from course_lib.planner.pipeline import pipeline
from course_lib.planner.result import AxisTraffic, Estimate, Memory
from course_lib.planner.timing import Stage, assumptions, exposed_data, rates, stage_seconds

RESERVE = 0.08  # of the capacity: NCCL, CUDA context, fragmentation
REMEDY = {
    "weights": "raise tp, pp or ep, or use zero=3",
    "gradients": "raise tp or pp, or use zero=2",
    "optimizer": "raise tp, pp or dp, or use zero=1",
    "activations": "raise tp or cp, lower micro_batch, or recompute",
}


def estimate(
    model: Model,
    hardware: Hardware,
    configuration: Configuration,
    *,
    reserve: float = RESERVE,
    generation: str | None = None,
    simulated: bool = True,
) -> Estimate:
    """Return the estimate of an optimizer step of ``model`` on ``hardware``.

    ``reserve`` is the share of the capacity that must stay free. ``generation`` is the year of the
    software, which selects the efficiency. ``simulated=False`` uses the formula of the bubble where
    there is one, for a search over many plans. Raises ValueError when the GPU lacks the number
    format.
    """
    plan = configuration
    rate = rates(hardware, plan, generation)
    of_stages, owners = stage_moves(model, plan), [rank for rank, _ in stages_of(model, plan)]
    of_ranks = {rank: step_moves(model, plan, rank) for rank in outer_ranks(model, plan)}
    stages = stage_seconds(model, hardware, plan, of_stages, rate)
    onward = of_stages[0].onward
    found = pipeline(
        plan.schedule,
        plan.pp,
        plan.micro_batches,
        [stage.total for stage in stages],
        chunks=plan.chunks,
        message=seconds(onward, axis_span("pp", plan, hardware.gpus_per_node), hardware),
        simulated=simulated,
    )
    busiest = [stage for stage, rank in zip(stages, owners, strict=True) if rank == found.rank]
    first = [stage for stage, rank in zip(stages, owners, strict=True) if rank == owners[0]]
    exposed = exposed_seconds(plan, busiest)
    for axis, waits in exposed_data(hardware, plan, of_ranks[owners[0]], first).items():
        exposed[axis] += waits
    for axis in {axis for step in of_ranks.values() for axis in step.sums}:
        over = axis_span(axis, plan, hardware.gpus_per_node)
        exposed[axis] += max(
            seconds(step.sums.get(axis, ()), over, hardware) for step in of_ranks.values()
        )
    parts = {
        "compute": plan.micro_batches
        * sum(stage.compute.total - stage.elementwise for stage in busiest),
        "elementwise": plan.micro_batches * sum(stage.elementwise for stage in busiest),
        "bubble": found.bubble,
        **exposed,
        "optimizer": max(optimizer_seconds(model, hardware, plan, rank) for rank in of_ranks),
    }
    step = sum(parts.values())
    held = memory(model, plan)
    per_gpu = step_flops(model, plan) / plan.world / step
    peak = hardware.peak[plan.dtype.name]
    return Estimate(
        model=model,
        hardware=hardware,
        configuration=plan,
        memory=held,
        communication=_traffic(hardware, plan, owners, of_stages, of_ranks, exposed),
        bubble_of_total=found.of_total,
        bubble_of_ideal=found.of_ideal,
        bubble_by_formula=found.by_formula,
        step_seconds=step,
        tflops_per_gpu=per_gpu / 1e12,
        mfu=per_gpu / peak,
        mfu_full_attention=step_flops(model, plan, "full") / plan.world / step / peak,
        hfu=hardware_flops(model, plan) / plan.world / step / peak,
        fits=held.total <= (1 - reserve) * hardware.capacity_bytes,
        headroom_bytes=(1 - reserve) * hardware.capacity_bytes - held.total,
        parameters=parameters(model),
        active_parameters=active_parameters(model),
        reasons=tuple(_reasons(held, hardware, reserve)),
        assumptions=(*_efficiency(hardware, plan, rate.products), *assumptions(model, plan)),
        parts=parts,
    )


def optimizer_seconds(model: Model, hardware: Hardware, plan: Configuration, rank: int) -> float:
    """Return the seconds of the optimizer on pipeline rank ``rank``, bound by memory bandwidth.

    Per parameter it reads and writes the optimizer state, reads a gradient and writes a weight.
    """
    held, data = parameters_per_rank(model, plan, rank), plan.dp * plan.cp
    own = held.dense + held.experts * 1.0
    if plan.zero:
        own = held.dense / data + held.experts * plan.ep / data
    one = state_bytes(1, recipe=plan.recipe, dtype=plan.dtype)
    return own * (2 * one.optimizer + one.gradients + one.weights) / hardware.memory_bandwidth


def exposed_seconds(plan: Configuration, stages: Sequence[Stage]) -> dict[str, float]:
    """Return the exposed seconds of a step by axis, of a rank with ``stages``."""
    found: dict[str, float] = defaultdict(float)
    for stage in stages:
        for axis, both in stage.exposed.items():
            found[axis] += plan.micro_batches * sum(both)
    return found


def _traffic(
    hardware: Hardware,
    plan: Configuration,
    owners: Sequence[int],
    of_stages: Sequence[StageMoves],
    of_ranks: Mapping[int, StepMoves],
    exposed: Mapping[str, float],
) -> dict[str, AxisTraffic]:
    """Return what the busiest rank does on each axis in a step."""
    most: dict[str, tuple[float, list[Move]]] = {}
    for rank, step in of_ranks.items():
        own = [moves for owner, moves in zip(owners, of_stages, strict=True) if owner == rank]
        for axis, moves in rank_moves(plan, own, step).items():
            sent = sum(
                move.calls * float(move.payload) * _factor(move.op, move.n) for move in moves
            )
            if axis not in most or sent > most[axis][0]:
                most[axis] = sent, moves
    found = {}
    for axis, (sent, moves) in most.items():
        over = axis_span(axis, plan, hardware.gpus_per_node)
        found[axis] = AxisTraffic(
            calls=sum(move.calls for move in moves),
            payload_bytes=sum(move.calls * float(move.payload) for move in moves),
            wire_bytes=sent,
            seconds=seconds(moves, over, hardware),
            exposed_seconds=exposed.get(axis, 0.0),
            link=over.link,
        )
    return found


@lru_cache(maxsize=4096)
def _factor(op: str, n: int) -> float:
    """Return the bytes that a rank sends per byte of payload; exact sums take too long here."""
    return float(wire(op, 1, n))


def rank_moves(
    plan: Configuration, stages: Iterable[StageMoves], step: StepMoves
) -> dict[str, list[Move]]:
    """Return the calls of a rank with ``stages`` in a step, by axis."""
    found: dict[str, list[Move]] = defaultdict(list)
    for stage in stages:
        for axis, passes in stage.passes.items():
            found[axis] += [m.times(plan.micro_batches) for part in passes for m in part]
        found["pp"] += [m.times(plan.micro_batches) for m in (*stage.onward, *stage.back)]
    for axis, data in step.data.items():
        found[axis] += data.moves
    for axis, sums in step.sums.items():
        found[axis] += sums
    return {axis: moves for axis, moves in found.items() if moves}


def _reasons(held: Memory, hardware: Hardware, reserve: float) -> Iterator[str]:
    """Yield why the plan does not fit: the missing bytes, and the largest part."""
    free = (1 - reserve) * hardware.capacity_bytes
    if held.total <= free:
        return
    parts = {name: getattr(held, name) for name in REMEDY}
    largest = max(parts, key=lambda name: parts[name])
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    yield (
        f"The plan needs {held.total / 1e9:.1f} GB on a GPU ({listed}), "
        f"{(held.total - free) / 1e9:.1f} GB more than the {free / 1e9:.1f} GB that "
        f"{hardware.name} leaves after a reserve of {100 * reserve:.0f} %."
    )
    yield f"The largest part is {largest}: {REMEDY[largest]}."


def _efficiency(hardware: Hardware, plan: Configuration, rate: float) -> Iterator[str]:
    """Yield the speed of the products, and whether published runs gave it."""
    name = plan.dtype.name
    format_ = "bf16" if name == "fp16" else name
    calibrated = any(key.partition("@")[0] == format_ for key in hardware.efficiency)
    yield (
        f"Matrix products reach {100 * rate / hardware.peak[name]:.0f} % of the dense {name} peak "
        f"of {hardware.name}, {hardware.peak[name] / 1e12:,.0f} TFLOP/s"
        + ("." if calibrated else ": a guess, because no published run was used for it.")
    )
