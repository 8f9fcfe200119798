"""System design: answer a proposal with the limits that it breaks, or with its smallest margin.

In a notebook::

    from course_lib.interview import design

    print(design.case("dense-180b").text)
    design.answer("dense-180b", "tp=8 pp=4 dp=4 zero=2")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.interview import mistakes
from course_lib.interview.cases import CASES, Case, find
from course_lib.interview.lines import folded
from course_lib.interview.mistakes import COMPUTING, Tried
from course_lib.interview.proposal import read
from course_lib.interview.units import show
from course_lib.interview.written import written
from course_lib.planner.parameters import parameters
from course_lib.planner.serve import Serving
from course_lib.planner.text import number

AT_LEAST = ("mfu", "throughput")
TIMES = 2  # above this, a value is said to be so many times its limit
UNITS = {"memory": "byte", "ttft": "s", "tpot": "s", "throughput": "token/s"}  # others: shares


@dataclass(frozen=True, repr=False)
class Described:
    """A case in words; a notebook shows the text. ``hint`` says how to write a proposal."""

    case: Case
    title: str
    text: str
    hint: str

    def __repr__(self) -> str:
        return folded(f"{self.title}\n\n{self.text}\n\n{self.hint}")


@dataclass(frozen=True)
class FollowUp:
    """A question that an interviewer asks next, with its answer."""

    ask: str
    answer: str


@dataclass(frozen=True)
class Margin:
    """A quantity of a proposal beside its limit, in bytes, seconds, tokens/s or as a share of 1."""

    name: str
    value: float
    limit: float

    @property
    def unit(self) -> str:
        """The unit of value and limit."""
        return UNITS.get(self.name, "share")

    @property
    def used(self) -> float:
        """The used share of the limit; above 1 the limit is broken."""
        if self.name not in AT_LEAST:
            return self.value / self.limit
        return self.limit / self.value if self.value else float("inf")

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        return self.used <= 1

    def as_dict(self) -> dict[str, Any]:
        """Return the margin with its unit."""
        own = {"name": self.name, "value": self.value, "limit": self.limit, "unit": self.unit}
        return own | {"used": self.used, "holds": self.holds}


@dataclass(frozen=True, repr=False)
class Answer:
    """What an interviewer says to a proposal; a notebook shows ``message``.

    ``margins``: the one nearest to its limit first; empty if the layout is impossible. ``mistake``:
    id of the recognized mistake. ``result``: the planner's Estimate or Serving.
    """

    case: Case
    proposal: str
    message: str
    follow_up: FollowUp
    margins: tuple[Margin, ...] = ()
    mistake: str | None = None
    result: Any = None

    @property
    def broken(self) -> list[str]:
        """The names of the broken limits, the worst first; "layout" if it is impossible."""
        return [one.name for one in self.margins if not one.holds] if self.margins else ["layout"]

    @property
    def holds(self) -> bool:
        """Whether nothing breaks."""
        return not self.broken

    def __repr__(self) -> str:
        return folded(self.message)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for the score sheet."""
        return {
            "proposal": self.proposal,
            "holds": self.holds,
            "broken": self.broken,
            "mistake": self.mistake,
            "margins": [one.as_dict() for one in self.margins],
        }


def case(id: str, language: str = "en") -> Described:
    """Return the case ``id`` in words; ValueError with the nearest ids if there is none."""
    found, said = find(id), written("design", language)
    own = said["cases"][id]
    names = said["loop"]["and"].join(
        said["loop"]["machines"].format(
            gpus=f"{n:,}", hardware=one.name.upper(), nodes=n // one.gpus_per_node
        )
        for one, n in found.machines
    )
    sizes = found.model
    words = {
        "machines": names,
        "per_node": found.per_node,
        "model": sizes.name,
        "billions": f"{parameters(sizes) / 1e9:.0f}",
        "layers": sizes.layers,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "experts": sizes.experts.number if sizes.experts else 0,
        "top_k": sizes.experts.top_k if sizes.experts else 0,
        **{name: f"{value:,}" for name, value in found.fixed.items()},
        **{name: shown(value, UNITS.get(name, "share")) for name, value in found.limits.items()},
        "memory": shown(found.memory_limit, "byte"),
    }
    kind = "serving" if found.serving else "training"
    text = f"{own['text']}\n{said['limits-of'][kind]}".format_map(words)
    return Described(found, own["title"], text, said["hints"][kind])


def cases(language: str = "en") -> list[Described]:
    """Return all cases in words."""
    return [case(one.id, language) for one in CASES]


def answer(
    of: str | Case, proposal: str, before: Answer | None = None, language: str = "en"
) -> Answer:
    """Return the answer to ``proposal`` for a case, compared with the one ``before``.

    Raises ValueError with one sentence if the proposal cannot be read.
    """
    found = find(of) if isinstance(of, str) else of
    said, given = written("design", language), read(found, proposal, language)
    wrong = mistakes.layout(found, given)
    if wrong is None:
        try:
            tried = Tried(found, given, found.run(given))
        except ValueError as error:
            wrong = "impossible", {"why": str(error)}
    if wrong is not None:
        return _impossible(found, proposal, said, *wrong)
    return _answer(tried, proposal, before, said)


def shown(value: float, unit: str) -> str:
    """Return ``value`` with its unit: "59.6 GB", "18.2 %", "8.23 ms"."""
    if unit == "share":
        return f"{100 * value:,.1f}".removesuffix(".0") + " %"
    if unit == "s":
        size, name = (value, "s") if value >= 1 else (1e3 * value, "ms")
        return f"{size:,.0f} {name}" if size >= 100 else f"{size:.3g} {name}"
    return f"{value / 1e9:.1f} GB" if unit == "byte" else show(value, unit)


def margins(tried: Tried) -> tuple[Margin, ...]:
    """Return all margins, the one nearest to its limit first; memory that does not fit leads."""
    result, limits = tried.result, tried.case.limits
    if isinstance(result, Serving):
        values = {
            "memory": result.weights_bytes + result.kv_bytes,
            "ttft": result.ttft_seconds,
            "tpot": result.tpot_seconds,
            "throughput": result.tokens_per_second,
        }
    else:
        step, parts = result.step_seconds, result.parts
        sent = sum(each for name, each in parts.items() if name not in COMPUTING)
        values = {
            "memory": result.memory.total,
            "exposed": sent / step,
            "bubble": parts["bubble"] / step,
            "mfu": result.mfu,
        }
    room = {"memory": values["memory"] + result.headroom_bytes, **limits}
    found = [Margin(name, value, room[name]) for name, value in values.items()]
    return tuple(sorted(found, key=lambda one: (one.name != "memory" or one.holds, -one.used)))


def _shown(words: Mapping[str, Any]) -> dict[str, str]:
    """Return the words as text; the end of a name says the unit."""
    units = {"_bytes": "byte", "_share": "share", "_seconds": "s"}
    found = {}
    for name, value in words.items():
        unit = next((unit for end, unit in units.items() if name.endswith(end)), "")
        if unit:
            found[name] = shown(value, unit)
        else:
            found[name] = (
                number(value, 2)
                if isinstance(value, float)
                else (f"{value:,}" if isinstance(value, int) else str(value))
            )
    return found


def _impossible(
    case: Case, proposal: str, said: Mapping[str, Any], id: str, words: Mapping[str, Any]
) -> Answer:
    """Return the answer to a layout that cannot run."""
    texts, own = _shown(words), said["mistakes"][id]
    message = f"{said['answer']['impossible']}\n{own['why'].format_map(texts)}"
    return Answer(case, proposal, message, _follow_up(own, texts), (), id)


def _follow_up(own: Mapping[str, str], texts: Mapping[str, str]) -> FollowUp:
    return FollowUp(own["ask"].format_map(texts), own["answer"].format_map(texts))


def _answer(tried: Tried, proposal: str, before: Answer | None, said: Mapping[str, Any]) -> Answer:
    """Return the answer to a layout that runs."""
    found, words, loop = margins(tried), mistakes.words(tried), said["answer"]
    words["largest"] = said["parts"].get(words["largest"], words["largest"])
    broken = [one.name for one in found if not one.holds]
    mistake = mistakes.recognized(tried, broken)
    nearest = found[0]
    facts = _line(nearest, said)
    lines = []
    if broken:
        lines.append(loop["breaks"].format(count=len(broken), all=len(found), worst=facts))
    else:
        lines.append(loop["holds"].format(smallest=facts))
    own = said["limits"][nearest.name]
    if mistake is not None:
        own, words = said["mistakes"][mistake[0]], words | mistake[1]
        lines.append(own["why"].format_map(_shown(words)))
    lines += [f"- {_line(one, said)}" for one in found[1:]]
    lines.append(_facts(tried, said))
    if before is not None:
        lines.append(_compared(tried, found, before, said))
    follow_up = _follow_up(own, _shown(words))
    name = mistake[0] if mistake else None
    return Answer(tried.case, proposal, "\n".join(lines), follow_up, found, name, tried.result)


def _line(one: Margin, said: Mapping[str, Any]) -> str:
    """Return a margin in words."""
    loop, least = said["answer"], one.name in AT_LEAST
    if one.holds:
        kind, share = "left", 1 - one.used
    elif least:
        kind, share = "short", 1 - 1 / one.used
    else:
        kind, share = ("times" if one.used > TIMES else "over"), one.used - 1
    return str(
        loop["at-least" if least else "at-most"].format(
            name=said["limits"][one.name]["name"],
            value=shown(one.value, one.unit),
            limit=shown(one.limit, one.unit),
            left=loop[kind].format(share=shown(share, "share"), times=f"{one.used:.3g}"),
        )
    )


def _facts(tried: Tried, said: Mapping[str, Any]) -> str:
    """Return what else the planner says of a proposal."""
    kind = "facts-serving" if tried.case.serving else "facts-training"
    words = mistakes.words(tried)
    if not tried.case.serving:
        words["step_seconds"] = tried.result.step_seconds
    return str(said["answer"][kind].format_map(_shown(words)))


def _compared(
    tried: Tried, found: tuple[Margin, ...], before: Answer, said: Mapping[str, Any]
) -> str:
    """Return what changed since the proposal before."""
    loop = said["answer"]
    if not before.margins:
        return str(loop["before-impossible"])
    old = {one.name: one for one in before.margins}
    changes = [
        loop["change"].format(
            name=said["limits"][one.name]["name"],
            old=shown(old[one.name].value, one.unit),
            new=shown(one.value, one.unit),
        )
        for one in found
        if shown(old[one.name].value, one.unit) != shown(one.value, one.unit)
    ]
    if not changes:
        return str(loop["same"])
    now, then = (
        (sum(not one.holds for one in each), max(one.used for one in each))
        for each in (found, before.margins)
    )
    better = "better" if now < then else "worse"
    return str(loop[better].format(changes=loop["comma"].join(changes)))
