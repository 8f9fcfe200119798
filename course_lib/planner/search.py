"""All legal configurations of a model on a number of GPUs, the fastest first, and why.

The search is best-first. Each plan starts with a bound of its step time: FLOPs and exposed
communication of one micro-batch, spread evenly over the stages, and the bubble of equal stages.
The plan with the lowest bound is looked at more closely: it is dropped if it does not fit, then
estimated with the bubble by formula, then with the simulated bubble. A plan whose simulated step
is the lowest number left is the next best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, NamedTuple

from course_lib.planner.catalog import Model
from course_lib.planner.communication import stage_moves
from course_lib.planner.compare import behind
from course_lib.planner.configuration import (
    RECOMPUTE,
    STEP_TOKENS,
    Configuration,
    check_counts,
    configure,
)
from course_lib.planner.estimate import RESERVE, estimate
from course_lib.planner.hardware import Hardware
from course_lib.planner.memory import exceeds, memory
from course_lib.planner.result import Estimate
from course_lib.planner.timing import rates, stage_seconds
from course_lib.schedule.named import CHUNKS, V_SHAPED

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved")
MOST_CHUNKS = 8
MICRO_BATCHES = (1, 2, 4, 8, 16)
WHOLE_BACKWARD = ("naive", "gpipe", "1f1b", "interleaved")  # their bubble has a lower bound
PAIRED = ("dualpipe-v",)  # hides the tokens of experts
SAFETY = 0.97  # of bounds: stages are never quite equal, and the simulation is rounded


class Candidate(NamedTuple):
    """A legal plan: ``base`` with another micro-batch, ZeRO stage and recomputation."""

    base: Configuration
    micro_batch: int
    zero: int
    recompute: str

    @property
    def plan(self) -> Configuration:
        """The configuration."""
        return replace(
            self.base, micro_batch=self.micro_batch, zero=self.zero, recompute=self.recompute
        )


@dataclass(frozen=True)
class Found:
    """The best plans, fastest first; ``reasons`` says why each is behind the first ("" for it).

    ``legal`` counts the configurations that are possible, ``examined`` those whose memory was
    computed, ``estimated`` those whose step was simulated. ``advice`` says what to change if there
    is no plan.
    """

    model: Model
    hardware: Hardware
    gpus: int
    legal: int
    examined: int
    estimated: int
    schedules: tuple[str, ...]
    plans: tuple[Estimate, ...]
    reasons: tuple[str, ...]
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what ``course plan --search --json`` prints."""
        return {
            "legal": self.legal,
            "examined": self.examined,
            "estimated": self.estimated,
            "schedules": list(self.schedules),
            "advice": self.advice,
            "plans": [
                {**plan.as_dict(), "behind": reason}
                for plan, reason in zip(self.plans, self.reasons, strict=True)
            ],
        }


def search(
    model: Model,
    hardware: Hardware,
    gpus: int,
    *,
    top: int = 10,
    reserve: float = RESERVE,
    generation: str | None = None,
    **fixed: Any,
) -> Found:
    """Return the ``top`` plans that fit, by step time; ``fixed`` arguments of configure stay.

    Plans that take equally long are ordered as :func:`candidates` yields them. Raises ValueError if
    no configuration is legal.
    """
    space = list(candidates(model, gpus, **fixed))
    if not space:
        configure(model, gpus, **fixed)  # says what is wrong with the fixed arguments
        raise ValueError(
            f"no configuration of {model.name} on {gpus} GPUs is legal with what is fixed; fix less"
        )
    bounds = _Bounds(model, hardware, generation)
    waiting = [(bounds.of(one), index, 0) for index, one in enumerate(space)]
    heapify(waiting)
    limit = hardware.capacity_bytes * (1 - reserve)
    examined = 0
    exact: dict[int, Estimate] = {}
    plans: list[Estimate] = []
    while waiting and len(plans) < top:
        seconds, index, level = heappop(waiting)
        plan = space[index].plan
        if level == 2:
            plans.append(exact[index])
        elif level == 1:
            exact[index] = estimate(model, hardware, plan, reserve=reserve, generation=generation)
            heappush(waiting, (exact[index].step_seconds, index, 2))
        else:
            examined += 1
            if not exceeds(model, plan, limit):
                heappush(waiting, (max(seconds, SAFETY * bounds.closer(plan)), index, 1))
    reasons = tuple(behind(one, plans[0]) if one is not plans[0] else "" for one in plans)
    return Found(
        model=model,
        hardware=hardware,
        gpus=gpus,
        legal=len(space),
        examined=examined,
        estimated=len(exact),
        schedules=(fixed["schedule"],) if fixed.get("schedule") else SCHEDULES,
        plans=tuple(plans),
        reasons=reasons,
        advice="" if plans else _advice(model, hardware, space, limit),
    )


def _advice(model: Model, hardware: Hardware, space: list[Candidate], limit: float) -> str:
    """Say what the smallest plan needs: one with ZeRO-3, or without data ranks."""
    size, most = min(one.micro_batch for one in space), max(one.zero for one in space)
    small = [one for one in space if one.micro_batch == size and one.zero in (0, most)]
    least = min(memory(model, one.plan).total for one in small or space)
    return (
        f"No plan fits: the smallest needs {least / 1e9:.1f} GB per GPU, and {limit / 1e9:.1f} GB "
        f"of {hardware.name} are free. Take more GPUs, a shorter sequence or a smaller batch."
    )


def candidates(model: Model, gpus: int, **fixed: Any) -> Iterator[Candidate]:
    """Yield every legal plan, simple ones first: all degrees, ZeRO stages, chunks, micro-batches.

    Limits: the schedules above (naive, gpipe and zb-h2 only if they are fixed), interleaved with up
    to 8 chunks; micro-batches of 1, 2, 4, 8 and 16 sequences; no selective recomputation with fused
    attention, which has nothing to recompute. All plans have one global batch, by default about
    4 Mi tokens.
    """
    fixed = {name: value for name, value in fixed.items() if value is not None}
    check_counts({"gpus": gpus, **fixed})
    seq = fixed.setdefault("seq", model.max_seq_len)
    batch = fixed.setdefault("global_batch", common_batch(gpus, seq))
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    experts = model.experts.number if model.experts else 1

    def choices(name: str, every: Any) -> list[Any]:
        return [fixed[name]] if name in fixed else list(every)

    tps = choices("tp", (n for n in divisors if model.heads % n == 0))
    pps = choices("pp", (n for n in divisors if n <= model.layers))
    cps = choices("cp", (n for n in divisors if seq % (2 * n) == 0 or n == 1))
    eps = choices("ep", (n for n in divisors if experts % n == 0))
    fused = fixed.get("fused_attention", True)
    recompute = choices("recompute", ("none", "full") if fused else RECOMPUTE)
    for tp, pp, cp in product(tps, pps, cps):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or batch % dp or fixed.get("dp", dp) != dp:
            continue
        zeros = choices("zero", range(4) if dp * cp > 1 else (0,))
        sizes = [n for n in choices("micro_batch", MICRO_BATCHES) if batch % (dp * n) == 0]
        variants = list(product(sizes, zeros, recompute))
        for ep, (schedule, chunks) in product(eps, _schedules(pp, model.layers, fixed)):
            own = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep}
            own |= {"micro_batch": 1, "zero": zeros[0], "schedule": schedule, "chunks": chunks}
            try:
                base = configure(model, gpus, **{**fixed, **own})
            except ValueError:
                continue
            yield from (Candidate(base, *variant) for variant in variants)


def _schedules(
    pp: int, layers: int, fixed: dict[str, Any]
) -> Iterator[tuple[str | None, int | None]]:
    """Yield schedules and their chunks."""
    if pp == 1 or "schedule" in fixed or "chunks" in fixed:
        yield (fixed.get("schedule") if pp > 1 else "1f1b"), fixed.get("chunks")
        return
    for name in SCHEDULES:
        if name != "interleaved" and CHUNKS.get(name, 1) * pp <= layers:
            yield name, CHUNKS.get(name, 1)
    for chunks in range(2, min(MOST_CHUNKS, layers // pp) + 1):
        yield "interleaved", chunks


def common_batch(gpus: int, seq: int) -> int:
    """Return about 4 Mi tokens in sequences, a number that as many degrees as possible divide."""
    target = max(1, round(STEP_TOKENS / seq))
    unit = gpus
    while unit > target and unit % 2 == 0:
        unit //= 2
    return max(1, round(target / unit)) * unit


@dataclass
class _Bounds:
    """Seconds that a step takes at least."""

    model: Model
    hardware: Hardware
    generation: str | None

    @cached_property
    def known(self) -> dict[tuple[Any, ...], float]:
        """Seconds of a micro-batch by degrees."""
        return {}

    def of(self, one: Candidate) -> float:
        """Return the bound: the mean stage m times, and (p-1)/v times more where W is not split."""
        base = one.base
        key = (base.tp, base.cp, base.ep, one.micro_batch, one.recompute, base.schedule in PAIRED)
        if key not in self.known:
            self.known[key] = self._micro_batch(one.plan)
        rounds: float = base.global_batch // base.dp // one.micro_batch
        if base.schedule in WHOLE_BACKWARD:
            rounds += (base.pp - 1) / base.chunks
        return SAFETY * rounds * self.known[key] / base.pp

    def closer(self, plan: Configuration) -> float:
        """Return the seconds of a step with the bubble by formula, or with none for a V shape."""
        looped = replace(plan, schedule="interleaved") if plan.schedule in V_SHAPED else plan
        found = estimate(
            self.model, self.hardware, looped, generation=self.generation, simulated=False
        )
        if looped is plan:
            return found.step_seconds
        paired = found.parts.get("ep", 0.0) if plan.schedule in PAIRED else 0.0
        return found.step_seconds - found.parts["bubble"] - paired

    def _micro_batch(self, plan: Configuration) -> float:
        """Return the seconds of a micro-batch on all stages: the model as one stage."""
        whole = replace(
            plan, schedule="1f1b", pp=1, chunks=1, dp=plan.dp * plan.pp, stage_layers=None
        )
        rate = rates(self.hardware, whole, self.generation)
        moves = stage_moves(self.model, whole)
        (stage,) = stage_seconds(self.model, self.hardware, whole, moves, rate)
        hidden = stage.exposed.get("ep", (0.0,)) if plan.schedule in PAIRED else ()
        return stage.total.total - sum(hidden)
