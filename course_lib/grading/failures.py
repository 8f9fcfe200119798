"""A launch that failed, as the sentence of a verdict."""

from __future__ import annotations

import re

from course_lib.launch import RankDeadline, RankError

DEAF = (
    ". Every rank waits for a message: either no rank has sent one, or the handle that isend "
    "returned was dropped before its wait(), and its message was lost"
)
NO_PEER = re.compile(r"not part of group|<--> \[none\]")  # torch's words; gloo's, to itself
GLOBAL = (
    "the peer of a message is a global rank, also with group=: dist.get_global_rank(group, r) "
    "gives that of group rank r"
)
PASSED = {
    "cpu": " after {:g} s of computing",
    "blocked": ", because every rank that still runs waits for another rank",
    "total": " after {:g} s",
}


def places(error: RankDeadline) -> set[str]:
    """Return the different places at which the ranks were, without their source lines."""
    return {text.split("was at: ")[-1].split(",")[0] for text in error.standing.values()}


def starved(error: RankError) -> bool:
    """Return whether the machine was too busy to start the ranks, or to let them compute."""
    if not isinstance(error, RankDeadline):
        return False
    return error.limit == "start" or (error.limit == "total" and error.starved)


def said(error: RankError) -> str:
    """Return the report of a launch as the sentence of a verdict.

    It has no cell numbers, because the official run numbers cells differently.
    """
    return re.sub(r"\bcell \d+ line", "line", _said(error))


def _said(error: RankError) -> str:
    if isinstance(error, RankDeadline):
        places = "; ".join(error.standing.values())
        waits = [line for line in error.standing.values() if re.search(r"was at: \S*send\b", line)]
        if len(waits) == len(error.standing):
            return (
                "every rank waits in send: a send returns only when the other side receives, so "
                "they wait forever; start both at once, or let half of the ranks receive first "
                f"({places})"
            )
        heard = [line for line in error.standing.values() if re.search(r"was at: \S*recv", line)]
        why = DEAF if len(heard) == len(error.standing) else ""
        passed = PASSED[error.limit].format(error.seconds)
        return f"the answer had not returned{passed}: {places}{why}"
    lines = error.report.splitlines()
    own = [line.strip() for line in lines[1:] if re.match(r"  (cell|line)", line)]
    if "(SIGABRT)" in lines[0]:  # the backend aborts after mismatched calls, without a message
        own.append("the calls of the ranks do not match: compare calls, peers and shapes by rank")
    if NO_PEER.search(lines[0]):
        own.append(GLOBAL)
    return ", ".join([lines[0], *own[-1:]])
