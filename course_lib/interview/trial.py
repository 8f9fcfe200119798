"""The game of lesson 15: votes on claims, their checks and the verdicts.

trial.hear("memory", vote_1, vote_2, vote_3, vote_4)
trial.tally(vote_1, ..., vote_25)
trial.contradiction("C01")
"""

from __future__ import annotations

from collections import Counter
from textwrap import fill

from course_lib.interview.calibration import vote_of
from course_lib.interview.claims import VOTES, number, table, values_in_words

WIDTH = 96
INDENT = 4 * " "
NO_VOTE = "no vote"
ROW = "{:14}{:>8}{:>14}{:>10}"


def marked(vote: object, verdict: str) -> str:
    """Return how a vote agrees with a verdict: "right", "wrong", or "no vote" for None.

    Raises ValueError for a vote that is not "true", "false", "only if ..." or None.
    """
    if vote is None:
        return NO_VOTE
    return "right" if vote_of(vote) == VOTES[verdict] else "wrong"


def hear(subject: str, *votes: object) -> None:
    """Run the checks of the claims of ``subject`` and print each verdict beside the vote.

    Raises ValueError for an unknown subject, or if the number of votes is not that of the claims.
    """
    lesson = table().lesson
    if subject not in lesson:
        raise ValueError(f"expected a subject of {', '.join(lesson)}, got {subject!r}")
    ids = lesson[subject]
    if len(votes) != len(ids):
        raise ValueError(f"expected {len(ids)} votes on {subject}, got {len(votes)}")
    numbers = {name: n for n, name in enumerate(_ids(), 1)}
    for name, vote in zip(ids, votes, strict=True):
        claim = table().claim(name)
        said = _said(vote, claim.verdict)
        print(f"{numbers[name]:<4}{claim.verdict}, by {claim.by} (your vote: {said})")
        for text in (values_in_words(claim), claim.statement()):
            print(fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))


def tally(*votes: object) -> None:
    """Print how many claims of each verdict the votes settled right, in the order of the claims."""
    verdicts = [table().claim(name).verdict for name in _ids()]
    marks = Counter(
        (verdict, marked(vote, verdict)) for vote, verdict in zip(votes, verdicts, strict=True)
    )
    print(ROW.format("verdict", "claims", "settled right", "no vote"))
    for verdict in VOTES:
        print(
            ROW.format(
                verdict, verdicts.count(verdict), marks[verdict, "right"], marks[verdict, NO_VOTE]
            )
        )
    right, none = (sum(marks[verdict, mark] for verdict in VOTES) for mark in ("right", NO_VOTE))
    print(ROW.format("all", len(verdicts), right, none))


def contradiction(name: str) -> None:
    """Print claims that cannot all be right, what each says, and what decides."""
    one = next(each for each in table().contradictions if each.id == name)
    *sides, decides = one.run()
    for claim, side in zip(map(table().claim, one.claims), sides, strict=True):
        print(fill(f'"{claim.claim}" says {number(side)}.', WIDTH, subsequent_indent=INDENT))
    text = f"Computed: {number(decides)} {one.unit}. {one.statement()}"
    print(fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))


def _ids() -> list[str]:
    return [name for names in table().lesson.values() for name in names]


def _said(vote: object, verdict: str) -> str:
    mark = marked(vote, verdict)
    return "none" if mark == NO_VOTE else f"{vote}, {mark}"
