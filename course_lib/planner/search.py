"""All legal configurations of a model on a number of GPUs, the fastest first, and why.

The search is exact. It drops what does not fit, computes a lower bound of the step time of each
plan that is left, and estimates plans in the order of their bounds until the bound exceeds the
slowest plan of the list.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.compare import behind
from course_lib.planner.configuration import RECOMPUTE, STEP_TOKENS, Configuration, configure
from course_lib.planner.estimate import RESERVE, estimate
from course_lib.planner.flops import hardware_flops
from course_lib.planner.hardware import Hardware
from course_lib.planner.memory import memory
from course_lib.planner.result import Estimate

SCHEDULES = ("1f1b", "interleaved")
MOST_CHUNKS = 8
MOST_MICRO_BATCH = 16
SAFETY = 0.98  # of the bound: the simulated bubble is rounded


@dataclass(frozen=True)
class Found:
    """The best plans, fastest first; ``reasons`` says why each is behind the first ("" for it).

    ``legal`` counts the configurations that are possible, ``fitting`` those that fit, ``estimated``
    those whose step was estimated. ``advice`` says what to change if there is no plan.
    """

    model: Model
    hardware: Hardware
    gpus: int
    legal: int
    fitting: int
    estimated: int
    schedules: tuple[str, ...]
    plans: tuple[Estimate, ...]
    reasons: tuple[str, ...]
    advice: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what ``course plan --search --json`` prints."""
        return {
            "legal": self.legal,
            "fitting": self.fitting,
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

    Plans that take equally long are ordered by their degrees. Raises ValueError if no
    configuration is legal.
    """
    legal = 0
    fitting: list[tuple[float, tuple[Any, ...], Configuration]] = []
    limit = hardware.capacity_bytes * (1 - reserve)
    least = float("inf")
    for plan in configurations(model, gpus, **fixed):
        legal += 1
        need = memory(model, plan).total
        least = min(least, need)
        if need <= limit:
            fitting.append((bound(model, hardware, plan), order(plan), plan))
    if not legal:
        raise ValueError(
            f"no configuration of {model.name} on {gpus} GPUs is legal with what is fixed; fix less"
        )
    fitting.sort()
    best: list[tuple[float, tuple[Any, ...], int, Estimate]] = []
    estimated = 0
    for least_seconds, key, plan in fitting:
        if len(best) >= top and least_seconds > best[-1][0]:
            break
        one = estimate(model, hardware, plan, reserve=reserve, generation=generation)
        estimated += 1
        insort(best, (one.step_seconds, key, estimated, one))
        del best[top:]
    plans = tuple(one for *_, one in best)
    reasons = tuple(behind(one, plans[0]) if one is not plans[0] else "" for one in plans)
    advice = "" if plans else _advice(hardware, least, limit)
    schedules = (fixed["schedule"],) if fixed.get("schedule") else SCHEDULES
    return Found(
        model, hardware, gpus, legal, len(fitting), estimated, schedules, plans, reasons, advice
    )


def _advice(hardware: Hardware, least: float, limit: float) -> str:
    return (
        f"No plan fits: the smallest needs {least / 1e9:.1f} GB per GPU, and {limit / 1e9:.1f} GB "
        f"of {hardware.name} are free. Take more GPUs, a shorter sequence or a smaller batch."
    )


def order(plan: Configuration) -> tuple[Any, ...]:
    """Return what orders plans that take equally long: the simpler one first."""
    return (
        plan.tp * plan.cp * plan.pp * plan.ep,
        plan.tp,
        plan.pp,
        plan.cp,
        plan.ep,
        plan.zero,
        plan.chunks,
        plan.micro_batch,
        RECOMPUTE.index(plan.recompute),
        plan.schedule,
    )


def configurations(model: Model, gpus: int, **fixed: Any) -> Iterator[Configuration]:
    """Yield every legal configuration: all degrees, ZeRO stages, chunks and micro-batches.

    Limits: 1F1B and interleaved (or the fixed schedule) with up to 8 chunks; micro-batches of 1, 2,
    4, 8 and 16 sequences. All plans have one global batch, by default about 4 Mi tokens.
    """
    fixed = {name: value for name, value in fixed.items() if value is not None}
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
    micro_batches = choices("micro_batch", (2**n for n in range(MOST_MICRO_BATCH.bit_length())))
    recompute = choices("recompute", RECOMPUTE)
    for tp, pp, cp in product(tps, pps, cps):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or batch % dp or fixed.get("dp", dp) != dp:
            continue
        zeros = choices("zero", range(4) if dp * cp > 1 else (0,))
        inner = product(eps, zeros, list(_schedules(pp, model.layers, fixed)), micro_batches)
        for ep, zero, (schedule, chunks), micro_batch in inner:
            if dp * cp % ep or batch % (dp * micro_batch):
                continue
            for again in recompute:
                own = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "zero": zero}
                own |= {"micro_batch": micro_batch, "recompute": again}
                named = {"schedule": schedule, "chunks": chunks}
                try:
                    yield configure(model, gpus, **{**fixed, **own, **named})
                except ValueError:
                    continue


def _schedules(
    pp: int, layers: int, fixed: dict[str, Any]
) -> Iterator[tuple[str | None, int | None]]:
    """Yield schedules and their chunks."""
    if pp == 1 or "schedule" in fixed or "chunks" in fixed:
        yield fixed.get("schedule"), fixed.get("chunks")
        return
    yield "1f1b", 1
    for chunks in range(2, min(MOST_CHUNKS, layers // pp) + 1):
        yield "interleaved", chunks


def common_batch(gpus: int, seq: int) -> int:
    """Return about 4 Mi tokens in sequences, a number that as many degrees as possible divide."""
    target = max(1, round(STEP_TOKENS / seq))
    unit = gpus
    while unit > target and unit % 2 == 0:
        unit //= 2
    return max(1, round(target / unit)) * unit


def bound(model: Model, hardware: Hardware, plan: Configuration) -> float:
    """Return seconds that a step takes at least: its FLOPs, and the bubble of equal stages."""
    name = plan.dtype.name
    speed = hardware.peak[name] * hardware.efficiency_of(name) * plan.world
    compute = hardware_flops(model, plan) / speed
    return SAFETY * compute * (1 + (plan.pp - 1) / plan.micro_batches / plan.chunks)
