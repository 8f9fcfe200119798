"""`course bench plans`: the step of each level of the plan arena, simulated and measured.

On padded ranks with emulated links, the plan with the shortest simulated step and the middle one
run as often as ``rounds`` says. The ratio of the measured to the simulated step is 1 on a machine
that is idle and has a core for every rank: arithmetic and gloo come on top of the padding.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from course_lib.bench.rounds import Say, quiet
from course_lib.grading.plans import LEVELS, ranks


def measure(rounds: int = 3, say: Say = quiet) -> dict[str, Any]:
    """Return, by level, simulated and median measured seconds of the best and the middle plan."""
    found: dict[str, Any] = {}
    for which in LEVELS:
        say(f"level {which.number}: search")
        plans, _ = which.search()
        free = replace(which, limit_bytes=10**12)  # uneven routing may exceed the limit
        for name, one in (("best", plans[0]), ("middle", plans[len(plans) // 2])):
            plan = one.configuration
            simulated = which.predict(plan).step_seconds
            measured = []
            for number in range(rounds):
                say(f"level {which.number}, {name} plan: round {number + 1} of {rounds}")
                measured.append(ranks.run_plan(free, plan).seconds)
            found[f"level {which.number}, {name}"] = {
                "simulated_seconds": simulated,
                "measured_seconds": median(measured),
                "measured_over_simulated": median(measured) / simulated,
            }
    return found


def text(result: dict[str, Any]) -> str:
    """Return the table that the command prints."""
    lines = [f"{'':20}{'simulated':>11}{'measured':>11}{'ratio':>8}"]
    for name, one in result.items():
        lines.append(
            f"{name:20}{one['simulated_seconds']:>9.3f} s{one['measured_seconds']:>9.3f} s"
            f"{one['measured_over_simulated']:>8.2f}"
        )
    ratios = [one["measured_over_simulated"] for one in result.values()]
    return "\n".join([*lines, f"median ratio {median(ratios):.2f}"])
