"""Recognize why a proposal breaks a limit: each mistake by name, with its numbers.

The sentences are in design_<language>.toml, by the same ids. Numbers are floats with the unit that
their name ends in: bytes, share, seconds; the texts show them with this unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, gcd
from typing import Any

from course_lib.interview.cases import Case
from course_lib.planner.configuration import RECIPES, Configuration, stages_of
from course_lib.planner.mixed import machines_of, mixed_stages
from course_lib.planner.parameters import parameters
from course_lib.planner.result import Estimate
from course_lib.planner.serve import Serving

COMPUTING = ("compute", "elementwise", "bubble", "optimizer")  # parts of a step that send nothing
DATA = ("dp", "dp_cp", "edp")
LONG = 32768  # tokens per sequence from which context parallelism is usual
UNEVEN = 1.15  # stages of two kinds differ by more
Words = dict[str, Any]


@dataclass(frozen=True)
class Tried:
    """A proposal that the planner can estimate, with its arguments and result."""

    case: Case
    given: Mapping[str, Any]
    result: Any  # Estimate or Serving: the case says which

    @property
    def plan(self) -> Configuration:
        """The configuration."""
        found: Configuration = self.result.configuration
        return found

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer state."""
        held = self.result.memory
        return float(held.total - held.activations)

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication by axis, as a share of the step."""
        parts, step = self.result.parts, self.result.step_seconds
        return {axis: each / step for axis, each in parts.items() if axis not in COMPUTING}

    @property
    def largest(self) -> str:
        """The axis with most exposed communication; "" if there is none."""
        return max(self.exposed, key=self.exposed.__getitem__, default="")

    def again(self, **changes: Any) -> Any:
        """Return the result with other arguments."""
        return self.case.run({**self.given, **changes})


@dataclass(frozen=True)
class Mistake:
    """``limits``: which broken limits it explains. ``applies`` and ``more`` words of its text."""

    id: str
    limits: str
    applies: Callable[[Tried], bool]
    more: Callable[[Tried], Words] = field(default=lambda _: {})


def layout(case: Case, given: Mapping[str, Any]) -> tuple[str, Words] | None:
    """Return the id and the words of what makes a layout impossible, if it is recognized."""
    tp, pp, cp, ep, rows = (given.get(k, 1) for k in ("tp", "pp", "cp", "ep", "micro_batch"))
    sizes, others = case.model, tp * pp * cp
    dp = given.get("dp") or max(1, case.gpus // others)
    experts = sizes.experts.number if sizes.experts else 0
    words = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "micro_batch": rows}
    words |= {"used": others * dp, "others": others, "gpus": case.gpus, "heads": sizes.heads}
    words |= {"experts": experts, "layers": sizes.layers, "sequences": case.global_batch or 0}
    words |= {"rows": dp * rows, "data": dp * cp, "stages": pp * given.get("chunks", 1)}
    words |= {"model": sizes.name, "idle": case.gpus - others * dp}
    training = not case.serving
    found = {
        "context-serving": not training and cp > 1,
        "heads": sizes.heads % tp != 0,
        "too-many-gpus": others * dp > case.gpus,
        "gpus-unused": others * dp < case.gpus and "dp" in given,
        "gpus-divide": case.gpus % others != 0,
        "layers": words["stages"] > sizes.layers,
        "no-experts": ep > 1 and not experts,
        "experts-divide": experts > 0 and experts % ep != 0,
        "ep-data": (dp * cp) % ep != 0,
        "dp-over-batch": training and dp > words["sequences"],
        "batch-divide": training and words["sequences"] % (dp * rows) != 0,
    }
    return next(((name, words) for name, applies in found.items() if applies), None)


def _switched(**changes: Any) -> Callable[[Tried], Words]:
    """Return the words with the numbers of the proposal after ``changes``."""

    def words(tried: Tried) -> Words:
        other: Estimate = tried.again(**changes)
        return {
            "other_bytes": other.memory.total,
            "other_share": other.mfu,
            "other_seconds": other.step_seconds,
            "times": tried.result.step_seconds / other.step_seconds,
        }

    return words


def _ep(tried: Tried) -> int:
    """Return the largest ep that is possible."""
    experts = tried.case.model.experts
    return gcd(experts.number, tried.plan.dp * tried.plan.cp) if experts else 1


def _uneven(tried: Tried) -> tuple[float, float]:
    """Return the seconds per micro-batch of the slowest and of the fastest pipeline rank."""
    plan, times = tried.plan, [0.0] * tried.plan.pp
    stages = mixed_stages(tried.case.model, tried.case.machines, plan)
    for stage, (rank, _) in zip(stages, stages_of(tried.case.model, plan), strict=True):
        times[rank] += stage.total.total
    return max(times), min(times)


def _is_uneven(tried: Tried) -> bool:
    """Return whether the layers were divided unevenly among GPUs of one kind."""
    if tried.plan.stage_layers is None or len(tried.case.machines) > 1:
        return False
    slowest, fastest = _uneven(tried)
    return slowest > UNEVEN * fastest


def _layers_of(tried: Tried) -> Words:
    """Return the fewest and most layers of a stage, and the numbers of an even division."""
    counts = tried.plan.stage_layers or ()
    found = {"fewest": min(counts), "most": max(counts)}
    return found | _switched(stage_layers=None)(tried)


def _straddles(tried: Tried) -> bool:
    """Return whether a pipeline rank has GPUs of two kinds."""
    machines = machines_of(tried.case.machines, tried.plan.pp)
    size = tried.plan.world // tried.plan.pp
    return any(
        number != size * sum(one.name == kind.name for one in machines)
        for kind, number in tried.case.machines
    )


def _reads_weights(tried: Tried) -> bool:
    """Return whether a token spends most of its time on reading the weights."""
    return bool(tried.result.decode["weights"] > tried.result.tpot_seconds / 2)


MISTAKES = (
    Mistake(
        "no-zero",
        "memory",
        lambda t: t.plan.zero == 0 and t.plan.dp * t.plan.cp > 1 and t.again(zero=1).fits,
        _switched(zero=1),
    ),
    Mistake(
        "no-ep",
        "memory",
        lambda t: t.plan.ep == 1 < _ep(t),
        lambda t: {"best": _ep(t)} | _switched(ep=_ep(t))(t),
    ),
    Mistake("no-cp", "memory bubble", lambda t: t.plan.seq >= LONG and t.plan.cp == 1),
    Mistake(
        "micro-batch",
        "memory",
        lambda t: t.plan.micro_batch > 1 and t.again(micro_batch=1).fits,
        _switched(micro_batch=1),
    ),
    Mistake(
        "gpipe",
        "memory",
        lambda t: t.plan.schedule in ("gpipe", "naive") and t.again(schedule="1f1b", chunks=1).fits,
        _switched(schedule="1f1b", chunks=1),
    ),
    Mistake("uneven-layers", "memory mfu", _is_uneven, _layers_of),
    Mistake("weights", "memory", lambda t: t.result.memory.weights > t.case.memory_limit),
    Mistake("states", "memory", lambda t: t.states > t.case.memory_limit),
    Mistake("activations", "memory", lambda t: t.states <= t.case.memory_limit),
    Mistake(
        "two-kinds-in-a-stage", "mfu", lambda t: len(t.case.machines) > 1 and _straddles(t)
    ),
    Mistake(
        "even-layers",
        "mfu bubble",
        lambda t: len(t.case.machines) > 1 and (ends := _uneven(t))[0] > UNEVEN * ends[1],
        lambda t: dict(zip(("slow_seconds", "fast_seconds"), _uneven(t), strict=True)),
    ),
    Mistake("tp-across-nodes", "exposed mfu", lambda t: t.plan.tp > t.case.per_node),
    Mistake(
        "zero-rounds",
        "exposed mfu",
        lambda t: t.plan.zero > 1 and t.plan.micro_batches > 1 and t.largest in DATA,
        _switched(zero=1),
    ),
    Mistake(
        "ep-across-nodes",
        "exposed mfu",
        lambda t: t.largest == "ep" and t.plan.tp * t.plan.ep > t.case.per_node,
    ),
    Mistake(
        "recompute",
        "mfu",
        lambda t: t.plan.recompute == "full",
        _switched(recompute="none"),
    ),
    Mistake(
        "no-pipeline",
        "bubble mfu",
        lambda t: t.plan.schedule == "naive" and t.plan.pp > 1,
        _switched(schedule="1f1b", chunks=1),
    ),
    Mistake(
        "few-micro-batches",
        "bubble mfu",
        lambda t: t.plan.pp > 1 and t.result.bubble_of_total > t.case.limits["bubble"],
    ),
    Mistake("tp-exposed", "exposed mfu", lambda t: t.largest == "tp"),
)  # fmt: skip
SERVED = (
    Mistake("serve-weights", "memory", lambda t: t.result.weights_bytes > t.case.memory_limit),
    Mistake("serve-cache", "memory", lambda t: t.result.weights_bytes <= t.case.memory_limit),
    Mistake("tp-across-nodes", "ttft tpot throughput", lambda t: t.plan.tp > t.case.per_node),
    Mistake(
        "prefill-batch",
        "ttft",
        lambda t: t.result.batch > 1 and t.again(batch=1).ttft_seconds <= t.case.limits["ttft"],
        lambda t: {"one_seconds": t.again(batch=1).ttft_seconds},
    ),
    Mistake("pp-latency", "tpot", lambda t: t.plan.pp > 1),
    Mistake(
        "batch-large",
        "tpot",
        lambda t: t.result.batch > 1 and t.again(batch=1).tpot_seconds <= t.case.limits["tpot"],
        lambda t: {"one_seconds": t.again(batch=1).tpot_seconds},
    ),
    Mistake("weights-read", "tpot", _reads_weights),
    Mistake(
        "batch-small",
        "throughput",
        _reads_weights,
        lambda t: {"twice": t.again(batch=2 * t.result.batch).tokens_per_second},
    ),
)  # fmt: skip


def recognized(tried: Tried, broken: list[str]) -> tuple[str, Words] | None:
    """Return the id and the words of the mistake behind the first of the ``broken`` limits."""
    known = SERVED if tried.case.serving else MISTAKES
    for limit in broken:
        for mistake in known:
            if limit in mistake.limits.split() and mistake.applies(tried):
                return mistake.id, mistake.more(tried)
    return None


def words(tried: Tried) -> Words:
    """Return the numbers that every text of a proposal may name."""
    plan, case = tried.plan, tried.case
    found: Words = {name: getattr(plan, name) for name in ("tp", "pp", "cp", "dp", "ep", "zero")}
    found |= {"gpus": case.gpus, "per_node": case.per_node, "limit_bytes": case.memory_limit}
    found |= {"nodes": max(1, plan.tp // case.per_node), "layers": case.model.layers}
    found |= _of_machine(case)
    if isinstance(result := tried.result, Serving):
        largest = max(result.decode, key=result.decode.__getitem__)
        return found | {
            "batch": result.batch,
            "requests": result.batch * plan.dp,
            "weights_bytes": result.weights_bytes,
            "cache_bytes": result.kv_bytes,
            "in_flight": result.requests_in_flight,
            "read_seconds": result.decode["weights"],
            "token_seconds": result.tpot_seconds,
            "first_seconds": result.ttft_seconds,
            "largest": largest,
        }
    held, experts = result.memory, case.model.experts
    return found | {
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "sequences": plan.sequences,
        "seq": plan.seq,
        "total_bytes": held.total,
        "weights_bytes": held.weights,
        "gradients_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
        "activations_bytes": held.activations,
        "states_bytes": tried.states,
        "largest": tried.largest,
        "largest_share": tried.exposed.get(tried.largest, 0.0),
        "bubble_share": result.parts["bubble"] / result.step_seconds,
        "mfu_share": result.mfu,
        "experts": experts.number if experts else 0,
        "span": plan.tp * plan.ep,
        "schedule": plan.schedule,
        "limit_share": (allowed := case.limits["bubble"]),
        "enough": ceil((plan.pp - 1) * (1 / allowed - 1) - 1e-9),
        **dict(
            zip(("weight_size", "gradient_size", "state_size"), RECIPES[plan.recipe], strict=True)
        ),
        "recipe": plan.recipe,
    }


def _of_machine(case: Case) -> Words:
    """Return the numbers of the slowest hardware, and of the model read in 16 bits."""
    machine = min((one for one, _ in case.machines), key=lambda one: one.peak_of("bf16"))
    size, bandwidth = 2.0 * parameters(case.model), machine.memory_bandwidth
    return {
        "node_gbs": round(machine.node.bandwidth / 1e9),
        "network_gbs": round(machine.network.bandwidth / 1e9),
        "link_ratio": round(machine.node.bandwidth / machine.network.bandwidth),
        "model_bytes": size,
        "memory_tbs": bandwidth / 1e12,
        "model_seconds": size / bandwidth,
        "balance": round(machine.peak_of("bf16") / bandwidth),
    }
