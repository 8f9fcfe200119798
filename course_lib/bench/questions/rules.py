"""Rules of thumb against an exhaustive search: what a rule loses in step time, by the planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from course_lib.bench.questions.context import EFFICIENCY, h100
from course_lib.planner.catalog import model
from course_lib.planner.result import Estimate
from course_lib.planner.search import search


class Rule(NamedTuple):
    """A rule of thumb for a model on a number of H100, as arguments of configure.

    ``batch`` fixes the step where a published run has one; the rule leaves the rest to the search:
    micro-batch, recomputation, chunks, and ZeRO's stage unless it says it.
    """

    name: str
    gpus: int
    words: str
    degrees: Mapping[str, Any]
    batch: Mapping[str, Any]


RULES = {
    "7B": Rule("llama-2-7b", 8, "FSDP", {"tp": 1, "pp": 1, "cp": 1, "zero": 3}, {}),
    "13B": Rule("llama-2-13b", 32, "TP 8, FSDP", {"tp": 8, "pp": 1, "cp": 1, "zero": 3}, {}),
    "70B": Rule("llama-3-70b", 64, "TP 8, FSDP", {"tp": 8, "pp": 1, "cp": 1, "zero": 3}, {}),
    "180B": Rule(
        "falcon-180b", 128, "TP 8, PP 4, ZeRO-2", {"tp": 8, "pp": 4, "cp": 1, "zero": 2}, {}
    ),
    "405B": Rule(
        "llama-3-405b",
        16384,
        "TP 8, PP 16",
        {"tp": 8, "pp": 16, "cp": 1},
        {"seq": 8192, "global_batch": 2048},
    ),
    "405B, 128k": Rule(
        "llama-3-405b",
        16384,
        "TP 8, PP 16, CP 16",
        {"tp": 8, "pp": 16, "cp": 16},
        {"seq": 131072, "global_batch": 128},
    ),
}


class Verdict(NamedTuple):
    """The best plan under a rule, and the best of all."""

    rule: Estimate
    best: Estimate

    @property
    def loss(self) -> float:
        """What the rule's step takes longer, as a share of the best step."""
        return self.rule.step_seconds / self.best.step_seconds - 1


def verdict(case: str, *, overlap_tp: bool) -> Verdict:
    """Return both plans; ``overlap_tp``: most of TP's communication is hidden behind products."""
    rule = RULES[case]

    def best(**degrees: Any) -> Estimate:
        found = search(
            model(rule.name),
            h100(),
            rule.gpus,
            top=1,
            overlap_tp=overlap_tp,
            **rule.batch,
            **degrees,
        )
        return found.plans[0]

    return Verdict(best(**rule.degrees), best())


def degrees(plan: Estimate) -> str:
    """Return the degrees above 1, ZeRO, chunks and micro-batch of ``plan`` in words."""
    one = plan.configuration
    sizes = [f"{axis} {getattr(one, axis)}" for axis in ("tp", "pp", "cp", "dp")]
    words = [size.upper() for size in sizes if not size.endswith(" 1")]
    words += (
        [f"ZeRO-{one.zero}", f"{one.chunks} chunks"] if one.chunks > 1 else [f"ZeRO-{one.zero}"]
    )
    return ", ".join([*words, f"micro-batch {one.micro_batch}", f"recompute {one.recompute}"])


def text() -> Iterator[str]:
    """Yield what each rule loses, with TP's communication exposed and hidden."""
    yield f"4. Rules of thumb against a search, H100 at {EFFICIENCY:.0%} of its peak"
    for overlap_tp in (False, True):
        yield f"TP {'hidden' if overlap_tp else 'exposed'}: seconds by rule, by search, loss"
        for case in RULES:
            found = verdict(case, overlap_tp=overlap_tp)
            yield (
                f"{case:<11}{found.rule.step_seconds:>8.2f}{found.best.step_seconds:>8.2f}"
                f"{found.loss:>7.1%}"
            )
            yield f"{'':<11}rule: {degrees(found.rule)}"
            yield f"{'':<11}best: {degrees(found.best)}"
