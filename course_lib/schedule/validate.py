"""Validation of a schedule: every action once, every dependency met, no deadlock, peak memory.

The messages are written for the author of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from course_lib.schedule.data import OPS, Action, Schedule, ScheduleError, in_flight


def validate(schedule: Schedule, peak: Sequence[int] | None = None) -> None:
    """Raise ScheduleError, with rank, cell and reason, for the first error.

    ``peak``, if given, is the most (stage, micro-batch) pairs that each rank may have in flight.
    """
    first = next(_problems(schedule, peak), None)
    if first is not None:
        raise ScheduleError(first)


def reasons(schedule: Schedule, peak: Sequence[int] | None = None) -> list[str]:
    """Return all errors of the first kind that occurs; [] if the schedule is legal.

    The kinds are: invalid cells, repeated actions, missing actions, a wrong order within a row, a
    deadlock, too much in flight. An error of one kind makes the later kinds meaningless.
    """
    return list(_problems(schedule, peak))


def _problems(schedule: Schedule, peak: Sequence[int] | None) -> Iterator[str]:
    """Yield the errors kind by kind, up to the first kind that has any."""
    for kind in (_cells, _twice, _missing, _own_order, _deadlocks):
        found = False
        for problem in kind(schedule):
            found = True
            yield problem
        if found:
            return
    if peak is not None:
        yield from _peaks(schedule, peak)


def before(action: Action, stages: int) -> Iterator[Action]:
    """Yield the actions that must end before ``action`` starts, on any rank.

    The backward of the next stage is named B here; a schedule that splits it has I in its place.
    """
    op, stage, mb = action.op, action.stage, action.mb
    if op == "F" and stage > 0:
        yield Action("F", stage - 1, mb)
    elif op in ("B", "I"):
        yield Action("F", stage, mb)
        if stage + 1 < stages:
            yield Action("B", stage + 1, mb)
    elif op == "W":
        yield Action("I", stage, mb)


def settled(action: Action) -> tuple[Action, ...]:
    """Return what :func:`before` may name once ``action`` has ended: itself, and after I also B.

    I computes the gradient that the stage before waits for; no stage waits for W.
    """
    if action.op == "I":
        return action, Action("B", action.stage, action.mb)
    return (action,)


def progress(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, place, action) in an order in which all actions can be done.

    Each rank does its row from left to right until an input is missing, and continues when that
    input is computed, so the total time is linear. Raises ScheduleError on a deadlock.
    """
    done: set[Action] = set()
    places = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        row = schedule.rows[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            missing = next((a for a in before(action, schedule.stages) if a not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, places[rank], action
            places[rank] += 1
            for fact in settled(action):
                done.add(fact)
                ready += waiting.pop(fact, [])
    stuck = {rank: place for rank, place in enumerate(places) if place < len(schedule.rows[rank])}
    if stuck:
        raise ScheduleError(_deadlock(schedule, stuck, done))


def _cells(schedule: Schedule) -> Iterator[str]:
    """Check each cell: a known action, on a stage of this rank."""
    for rank, row in enumerate(schedule.rows):
        if not row:
            yield f"rank {rank} has nothing to do; every rank holds a stage"
        for place, action in enumerate(row):
            where = f"rank {rank}, cell {place}: {action}"
            if action.op not in OPS or action.mb < 0:
                yield (
                    f"{where} is no action: the operation is one of {', '.join(OPS)}, "
                    "micro-batches are numbered from 0"
                )
            elif not 0 <= action.stage < schedule.stages:
                yield (
                    f"{where} is on stage {action.stage}, but the stages are "
                    f"0..{schedule.stages - 1}"
                )
            elif schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                yield f"{where} is on stage {action.stage}, which is on rank {owner}"


def _twice(schedule: Schedule) -> Iterator[str]:
    """Find actions that are done a second time."""
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            if action in seen:
                yield (
                    f"rank {rank}, cell {place}: {action} is done a second time (first in cell "
                    f"{seen[action]}); its gradient would count twice"
                )
            seen.setdefault(action, place)


def _missing(schedule: Schedule) -> Iterator[str]:
    """Check for F once, and either B once or I and W once, per stage and micro-batch."""
    seen = {
        action: (rank, place)
        for rank, row in enumerate(schedule.rows)
        for place, action in enumerate(row)
    }
    for stage, rank in enumerate(schedule.placement):
        for mb in range(schedule.microbatches):
            if problem := _incomplete(seen, rank, stage, mb):
                yield problem


def _incomplete(seen: dict[Action, tuple[int, int]], rank: int, stage: int, mb: int) -> str:
    """Return what is missing or too much for one stage and micro-batch; "" if nothing."""
    has = {op for op in "FBIW" if Action(op, stage, mb) in seen}
    if has in ({"F", "B"}, {"F", "I", "W"}):
        return ""
    where = f"rank {rank}: micro-batch {mb} on stage {stage}"
    if not has and (other := next((a for a in seen if a.mb == mb), None)):
        return (
            f"{where} has neither forward nor backward, but rank {seen[other][0]}, cell "
            f"{seen[other][1]}, has {other}; every stage does every micro-batch"
        )
    if "F" not in has:
        return f"{where} has no forward ({stage}F{mb} is missing)"
    if "B" in has:
        extra = ", ".join(f"{stage}{op}{mb}" for op in "IW" if op in has)
        return (
            f"{where} has a whole backward ({stage}B{mb}) and also {extra}: it is either B, or I "
            "and W"
        )
    missing = ", ".join(f"{stage}{op}{mb}" for op in "IW" if op not in has)
    if missing == f"{stage}I{mb}, {stage}W{mb}":
        return f"{where} has no backward ({stage}B{mb} is missing)"
    return f"{where} has half a backward ({missing} is missing)"


def _own_order(schedule: Schedule) -> Iterator[str]:
    """Check that the inputs from the same rank come before an action, without a simulation."""
    for rank, row in enumerate(schedule.rows):
        place_of = {fact: place for place, action in enumerate(row) for fact in settled(action)}
        for place, action in enumerate(row):
            for first in before(action, schedule.stages):
                if place_of.get(first, -1) > place:
                    yield (
                        f"rank {rank}, cell {place}: {action} comes before "
                        f"{row[place_of[first]]} (cell {place_of[first]}), which it needs"
                    )


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    try:
        for _ in progress(schedule):
            pass
    except ScheduleError as error:
        yield str(error)


def _deadlock(schedule: Schedule, stuck: dict[int, int], done: set[Action]) -> str:
    """Describe the circle of ranks that wait for each other, from the lowest rank on."""
    rank, told, lines = min(stuck), set(), []
    while rank in stuck and rank not in told:
        told.add(rank)
        action = schedule.rows[rank][stuck[rank]]
        missing = next(a for a in before(action, schedule.stages) if a not in done)
        owner = schedule.placement[missing.stage]
        lines.append(
            f"rank {rank} is at cell {stuck[rank]}, {action}, and waits for "
            f"{_where(missing, owner, schedule.rows[owner])}"
        )
        rank = owner
    return "deadlock: no rank can continue; " + "; ".join(lines)


def _where(missing: Action, owner: int, row: Sequence[Action]) -> str:
    """Return the cell of its owner's ``row`` that has a B, or the I in its place."""
    for place, action in enumerate(row):
        if missing in settled(action):
            return f"{action} of rank {owner}, which has it in cell {place}"
    return f"{missing}, which rank {owner} does not have in its row"


def _peaks(schedule: Schedule, peak: Sequence[int]) -> Iterator[str]:
    if len(peak) != schedule.ranks:
        raise ValueError(f"expected one peak for each of {schedule.ranks} ranks, got {len(peak)}")
    for rank, (found, allowed) in enumerate(zip(schedule.peak_in_flight(), peak, strict=True)):
        if found > allowed:
            place = _first_above(schedule.rows[rank], allowed)
            yield (
                f"rank {rank}, cell {place}: {schedule.rows[rank][place]} makes {allowed + 1} in "
                f"flight, {allowed} are allowed (the row's peak is {found}); do a backward before "
                "this forward"
            )


def _first_above(row: Sequence[Action], allowed: int) -> int:
    """Return the first cell of ``row`` with more than ``allowed`` in flight."""
    return next(place for place, now in enumerate(in_flight(row)) if now > allowed)
