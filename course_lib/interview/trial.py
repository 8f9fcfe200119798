"""The game of lesson 15: votes on claims, their checks and the verdicts.

In the lesson::

    trial.hear("memory", vote_1, vote_2, vote_3, vote_4)
    trial.show(3)
    trial.contradiction("C01")
    trial.tally(vote_1, ..., vote_25)
"""

from __future__ import annotations

from collections import Counter
from textwrap import fill

from course_lib.interview.calibration import vote_of
from course_lib.interview.claims import VOTES, Claim, find, number, table, values_in_words

WIDTH, INDENT = 96, 4 * " "
ROW = "{:14}{:>8}{:>15}{:>10}"
RIGHT, WRONG, NONE = "right", "wrong", "none"


def claims() -> list[Claim]:
    """Return the claims of the lesson; the first has the number 1."""
    return [table().claim(name) for names in table().lesson.values() for name in names]


def marked(n: int, vote: object) -> str:
    """Return whether a vote on claim ``n`` is "right" or "wrong", or "none" for None.

    Raises ValueError for a vote that is not "true", "false", "only if ..." or None.
    """
    if vote is None:
        return NONE
    try:
        return RIGHT if vote_of(vote) == VOTES[claims()[n - 1].verdict] else WRONG
    except ValueError as error:
        raise ValueError(f"vote_{n}: {error}, got {vote!r}") from None


def hear(subject: str, *votes: object) -> None:
    """Run the checks of the claims of ``subject`` and print each verdict beside the vote.

    Raises ValueError for an unknown subject, or if the number of votes is not that of the claims.
    """
    ids = table().lesson.get(subject)
    if ids is None:
        raise ValueError(f"expected a subject of {', '.join(table().lesson)}, got {subject!r}")
    if len(votes) != len(ids):
        raise ValueError(f"expected {len(ids)} votes on {subject}, got {len(votes)}")
    given = dict(zip(ids, votes, strict=True))
    for n, claim in enumerate(claims(), 1):
        if claim.id in given:
            vote, mark = given[claim.id], marked(n, given[claim.id])
            said = mark if vote is None else f"{vote}, {mark}"
            print(f"{n:<4}{claim.verdict}, by {claim.by} (your vote: {said})")
            _print(INDENT + values_in_words(claim))
            _print(INDENT + claim.statement())


def show(n: int) -> None:
    """Print the code of the check of claim ``n``."""
    from course_lib.view import show_source

    show_source(find(claims()[n - 1].check))


def tally(*votes: object) -> None:
    """Print how many claims of each verdict the votes, in the order of the claims, settle right."""
    verdicts = [claim.verdict for claim in claims()]
    marks = [marked(n, vote) for n, vote in enumerate(votes, 1)]
    counts = Counter(zip(verdicts, marks, strict=True))
    print(ROW.format("verdict", "claims", "settled right", "no vote"))
    for verdict in VOTES:
        right, none = counts[verdict, RIGHT], counts[verdict, NONE]
        print(ROW.format(verdict, verdicts.count(verdict), right, none))
    print(ROW.format("all", len(verdicts), marks.count(RIGHT), marks.count(NONE)))


def contradiction(name: str) -> None:
    """Print claims that cannot all be right, what each says, and what decides."""
    one = next(each for each in table().contradictions if each.id == name)
    *sides, decides = one.run()
    for claim, side in zip(map(table().claim, one.claims), sides, strict=True):
        _print(f'"{claim.claim}" says {number(side)} {one.unit}.')
    _print(f"{INDENT}Computed: {number(decides)} {one.unit}. {one.statement()}")


def _print(text: str) -> None:
    print(fill(text, WIDTH, subsequent_indent=INDENT, break_on_hyphens=False))
