"""Rules of thumb against an exhaustive search: what a rule loses in step time, by the planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from course_lib.bench.questions.context import EFFICIENCY, h100
from course_lib.planner.catalog import model
from course_lib.planner.result import Estimate
from course_lib.planner.search import search

PUBLISHED_TFLOPS = 400


class Rule(NamedTuple):
    """A rule of thumb for a model on a number of H100, as arguments of configure.

    ``amended`` are the arguments of a rule that loses less. ``batch`` fixes the step where a
    published run has one. What is left open is searched: micro-batch, recomputation and chunks.
    """

    name: str
    gpus: int
    degrees: Mapping[str, Any]
    amended: Mapping[str, Any]
    batch: Mapping[str, Any]


def _degrees(tp: int, pp: int, cp: int, zero: int | None) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "cp": cp, "zero": zero}


RULES = {
    "7B": Rule("llama-2-7b", 8, _degrees(1, 1, 1, 3), _degrees(1, 1, 1, 1), {}),
    "13B": Rule("llama-2-13b", 32, _degrees(8, 1, 1, 3), _degrees(2, 1, 1, 1), {}),
    "70B": Rule("llama-3-70b", 64, _degrees(8, 1, 1, 3), _degrees(8, 2, 1, 1), {}),
    "180B": Rule("falcon-180b", 128, _degrees(8, 4, 1, 2), _degrees(8, 4, 1, 1), {}),
    "405B": Rule(
        "llama-3-405b",
        16384,
        _degrees(8, 16, 1, None),
        _degrees(8, 16, 4, 1),
        {"seq": 8192, "global_batch": 2048},
    ),
    "405B, 128k": Rule(
        "llama-3-405b",
        16384,
        _degrees(8, 16, 16, None),
        _degrees(8, 16, 32, 1),
        {"seq": 131072, "global_batch": 128},
    ),
}


def best(case: str, *, overlap_tp: bool, **fixed: Any) -> Estimate:
    """Return the fastest plan that fits with what is ``fixed``.

    ``overlap_tp``: most of TP's communication is hidden behind products.
    """
    rule = RULES[case]
    arguments = {"overlap_tp": overlap_tp, **rule.batch, **fixed}
    return search(model(rule.name), h100(), rule.gpus, top=1, **arguments).plans[0]


def degrees(plan: Estimate) -> str:
    """Return the degrees above 1, ZeRO, schedule, micro-batch and recomputation in words."""
    one = plan.configuration
    sizes = {axis: getattr(one, axis) for axis in ("tp", "pp", "cp", "dp")}
    words = [f"{axis.upper()} {size}" for axis, size in sizes.items() if size > 1]
    words.append(f"ZeRO-{one.zero}")
    if one.pp > 1:
        words.append(f"{one.schedule} with {one.chunks} chunks")
    return ", ".join([*words, f"micro-batch {one.micro_batch}", f"recompute {one.recompute}"])


def published_seconds() -> float:
    """Return the seconds of a step of Llama 3 405B on 16,384 H100 at the published 400 TFLOP/s.

    Its degrees are the degrees of the rule (arXiv:2407.21783, table 4).
    """
    plan = best("405B", overlap_tp=False, **RULES["405B"].degrees)
    return plan.step_seconds * plan.tflops_per_gpu / PUBLISHED_TFLOPS


def text() -> Iterator[str]:
    """Yield what each rule loses, with TP's communication exposed and hidden."""
    yield f"4. Rules of thumb against a search, H100 at {EFFICIENCY:.0%} of its peak"
    for overlap_tp in (False, True):
        yield f"TP {'hidden' if overlap_tp else 'exposed'}: seconds per step, loss against the best"
        for case, rule in RULES.items():
            least = best(case, overlap_tp=overlap_tp)
            for name, fixed in (("rule", rule.degrees), ("amended", rule.amended), ("best", {})):
                one = best(case, overlap_tp=overlap_tp, **fixed) if fixed else least
                loss = one.step_seconds / least.step_seconds - 1
                yield f"{case:<11}{name:<8}{one.step_seconds:>7.2f}{loss:>7.1%}  {degrees(one)}"
    seconds = published_seconds()
    yield f"405B by the rule at the published {PUBLISHED_TFLOPS} TFLOP/s: {seconds:.2f} s"
