"""Two plans beside each other, and a plan with other bandwidths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from course_lib.planner.catalog import Model
from course_lib.planner.configuration import Configuration, suggestion
from course_lib.planner.estimate import estimate
from course_lib.planner.hardware import Hardware
from course_lib.planner.result import Estimate

# Keys of a plan: whole numbers, names, and what is on or off.
NUMBERS = (
    "tp", "pp", "cp", "dp", "ep", "zero", "chunks", "micro_batch", "global_batch", "seq", "recipe",
    "gpus",
)  # fmt: skip
WORDS = ("schedule", "recompute", "dtype", "hardware")
SWITCHES = ("fused_attention", "overlap_tp")
SHIFT = 0.2  # of a bandwidth, more and less


def read_plan(text: str) -> dict[str, Any]:
    """Return the arguments in ``text``, such as "tp=8,pp=4,zero=1,schedule=1f1b".

    The keys are the arguments of :func:`configure`, ``gpus`` and ``hardware``; an empty text is
    the plan of the other arguments. Raises ValueError for an unknown key and a value that is no
    number.
    """
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if not equals or not value:
            raise ValueError(f"expected a plan such as tp=8,pp=4,zero=1, got {part!r} in {text!r}")
        known = (*NUMBERS, *WORDS, *SWITCHES)
        if key not in known:
            raise ValueError(
                f"the plan {text!r} has the unknown key {key}; {suggestion(key, known)}"
            )
        if key in found:
            raise ValueError(f"the plan {text!r} sets {key} twice; leave one of them out")
        if key in SWITCHES and value not in ("on", "off"):
            raise ValueError(f"expected {key}=on or {key}=off, got {value!r}")
        try:
            found[key] = int(value) if key in NUMBERS else value
        except ValueError:
            raise ValueError(f"expected a whole number for {key}, got {value!r}") from None
        if key in SWITCHES:
            found[key] = value == "on"
    return found


@dataclass(frozen=True)
class Difference:
    """A quantity of two plans. ``lower``: the smaller value is the better one."""

    name: str
    unit: str
    a: float
    b: float
    lower: bool = True

    @property
    def better(self) -> str:
        """Return "A", "B", or "" where they are equal to a tenth of a percent."""
        if abs(self.a - self.b) <= 1e-3 * max(abs(self.a), abs(self.b)):
            return ""
        return "A" if (self.a < self.b) == self.lower else "B"


@dataclass(frozen=True)
class Comparison:
    """The values of two estimates, which plan wins ("" if neither), and why."""

    differences: tuple[Difference, ...]
    winner: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return what ``course plan --compare --json`` prints beside the two estimates."""
        rows = {
            row.name: {"unit": row.unit, "a": row.a, "b": row.b, "better": row.better}
            for row in self.differences
        }
        return {"differences": rows, "winner": self.winner, "why": self.why}


def compare(a: Estimate, b: Estimate) -> Comparison:
    """Compare two estimates. A plan that fits wins, then the one with more tokens/s per GPU."""
    rows = [
        Difference(name, "GB", getattr(a.memory, name) / 1e9, getattr(b.memory, name) / 1e9)
        for name in ("weights", "gradients", "optimizer", "activations", "total")
    ]
    for axis in dict.fromkeys([*a.communication, *b.communication]):
        rows.append(Difference(f"{axis} sent", "GB", _sent(a, axis), _sent(b, axis)))
    for name in dict.fromkeys([*a.parts, *b.parts]):
        rows.append(
            Difference(name, "ms", 1e3 * a.parts.get(name, 0.0), 1e3 * b.parts.get(name, 0.0))
        )
    rows += [
        Difference("step", "ms", 1e3 * a.step_seconds, 1e3 * b.step_seconds),
        Difference(
            "tokens/s per GPU", "", a.tokens_per_gpu_second, b.tokens_per_gpu_second, lower=False
        ),
        Difference("MFU", "%", 100 * a.mfu, 100 * b.mfu, lower=False),
    ]
    return Comparison(tuple(rows), *_winner(a, b))


def _sent(estimate: Estimate, axis: str) -> float:
    """Return the GB that leave a GPU over ``axis``."""
    one = estimate.communication.get(axis)
    return one.wire_bytes / 1e9 if one else 0.0


def _winner(a: Estimate, b: Estimate) -> tuple[str, str]:
    """Return the name of the better plan, and a clause that says why."""
    if a.fits != b.fits:
        loser = b if a.fits else a
        return (
            "A" if a.fits else "B",
            f"the other plan needs {-loser.headroom_bytes / 1e9:.1f} GB more than there is",
        )
    speed = Difference("", "", a.tokens_per_gpu_second, b.tokens_per_gpu_second, lower=False)
    if not speed.better:
        return "", "they differ by less than 0.1 % in tokens/s per GPU"
    best, other = (a, b) if speed.better == "A" else (b, a)
    ratio = best.tokens_per_gpu_second / other.tokens_per_gpu_second - 1
    fitting = "" if a.fits else "neither fits; "
    return (
        speed.better,
        f"{fitting}{100 * ratio:.1f} % more tokens/s per GPU; the other plan {behind(other, best)}",
    )


def behind(plan: Estimate, best: Estimate) -> str:
    """Return why ``plan`` is slower than ``best``: the part of the step that differs most.

    Parts are compared in GPU seconds per token, so that the batches and worlds may differ.
    """
    costs = [
        {name: seconds * e.configuration.world / e.configuration.tokens for name, seconds in parts}
        for e, parts in ((plan, plan.parts.items()), (best, best.parts.items()))
    ]
    names = dict.fromkeys([*costs[0], *costs[1]])
    more = {name: costs[0].get(name, 0.0) - costs[1].get(name, 0.0) for name in names}
    if not more:
        return "is slower"
    name = max(more, key=lambda each: more[each])
    share = more[name] / sum(costs[1].values())
    if share < 5e-4:
        return "takes equally long"
    verb = "computes" if name in ("compute", "elementwise", "optimizer") else "waits"
    causes = {
        "compute": "",
        "elementwise": " in norms and activations",
        "bubble": " in the bubble",
        "optimizer": " in the optimizer",
    }
    cause = causes.get(name, f" for {name}")
    return f"{verb} {100 * share:.1f} % of the step longer{cause}"


def sensitivity(
    model: Model, hardware: Hardware, configuration: Configuration, **options: Any
) -> dict[str, float]:
    """Return by how much the step changes, as a share, with 20 % more or less bandwidth.

    Keys are "node +20%", "node -20%", "network +20%" and "network -20%"; ``options`` are those of
    :func:`estimate`. The bubble is that of the formula where there is one; zb-v, which takes
    long to simulate, counts as interleaved.
    """
    options["simulated"] = False
    if configuration.schedule == "zb-v":
        configuration = replace(configuration, schedule="interleaved")
    base = estimate(model, hardware, configuration, **options)
    used = {name for one in base.communication.values() for name in one.link.split("+")}
    found = {}
    for name in ("node", "network"):
        link = getattr(hardware, name)
        for sign, factor in (("+", 1 + SHIFT), ("-", 1 - SHIFT)):
            key = f"{name} {sign}{SHIFT:.0%}"
            if name not in used:
                found[key] = 0.0
                continue
            changed = replace(link, bandwidth=link.bandwidth * factor)
            shifted = estimate(
                model, replace(hardware, **{name: changed}), configuration, **options
            )
            found[key] = shifted.step_seconds / base.step_seconds - 1
    return found
