"""Whether rows travelled as all-to-alls of those that are wanted, whatever steers them."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.grading.wire import WireCall


def wrongly_sent(calls: Sequence[WireCall], leaving: int, arriving: int) -> str:
    """What was sent in place of two all-to-alls, of ``leaving`` and of ``arriving`` bytes.

    Empty where these two are there, and beside them only what is small: counts, numbers.
    """
    rest = [(call.op, call.payload) for call in calls]
    missing = False
    for wanted in (("all_to_all", leaving), ("all_to_all", arriving)):
        if wanted in rest:
            rest.remove(wanted)
        else:
            missing = True
    if not missing and sum(payload for _, payload in rest) <= leaving / 2:
        return ""
    made = [f"{call.op} of {call.payload} bytes" for call in calls]
    return ", ".join(made) or "nothing"
