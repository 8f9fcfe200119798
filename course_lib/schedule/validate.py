"""Is a schedule legal? Every action once, every dependency met, no deadlock, memory kept.

The reasons are written for the person who wrote the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from course_lib.schedule.data import OPS, Action, Schedule, ScheduleError, in_flight


def validate(schedule: Schedule, peak: Sequence[int] | None = None) -> None:
    """Raise ScheduleError, with rank and cell and reason, at the first thing that is wrong.

    ``peak``, if given, is the most (stage, micro-batch) pairs that each rank may keep in flight.
    """
    first = next(_problems(schedule, peak), None)
    if first is not None:
        raise ScheduleError(first)


def reasons(schedule: Schedule, peak: Sequence[int] | None = None) -> list[str]:
    """Everything that is wrong, of the first kind of which there is any; [] where it is legal.

    Kinds: cells that are none, actions twice, actions missing, a wrong order within a row, a
    deadlock, too much in flight. What is wrong of one kind makes the later ones meaningless.
    """
    return list(_problems(schedule, peak))


def _problems(schedule: Schedule, peak: Sequence[int] | None) -> Iterator[str]:
    """Kind by kind, up to the first kind that has any."""
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
    """What must be over before ``action`` may start, on whatever rank.

    Backward of the next stage is named B here; a schedule that splits it has I in its place.
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
    """What is over once ``action`` is: itself, and after I also B in the eyes of other stages.

    I computes the gradient that the stage before waits for; nobody waits for W.
    """
    if action.op == "I":
        return action, Action("B", action.stage, action.mb)
    return (action,)


def progress(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, place, action) in an order in which all actions can be done.

    Each rank goes through its row from left to right; it is taken up again when something it
    waits for is done, so that the whole takes linear time. Raises ScheduleError on a deadlock.
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
    """Every cell by itself: a known action, on a stage that lives on this rank."""
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
                home = schedule.placement[action.stage]
                yield f"{where} is on stage {action.stage}, which lives on rank {home}"


def _twice(schedule: Schedule) -> Iterator[str]:
    """What is done a second time."""
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
    """F once, and then either B once or I and W once, for every stage and micro-batch."""
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
    has = {op for op in "FBIW" if Action(op, stage, mb) in seen}
    if has in ({"F", "B"}, {"F", "I", "W"}):
        return ""
    who = f"rank {rank}: micro-batch {mb} on stage {stage}"
    if not has and (other := next((a for a in seen if a.mb == mb), None)):
        return (
            f"{who} has neither forward nor backward, but rank {seen[other][0]}, cell "
            f"{seen[other][1]}, has {other}; every stage does every micro-batch"
        )
    if "F" not in has:
        return f"{who} has no forward ({stage}F{mb} is missing)"
    if "B" in has:
        extra = ", ".join(f"{stage}{op}{mb}" for op in "IW" if op in has)
        return (
            f"{who} has a whole backward ({stage}B{mb}) and also {extra}: it is either B, or I "
            "and W"
        )
    missing = ", ".join(f"{stage}{op}{mb}" for op in "IW" if op not in has)
    if missing == f"{stage}I{mb}, {stage}W{mb}":
        return f"{who} has no backward ({stage}B{mb} is missing)"
    return f"{who} has half a backward ({missing} is missing)"


def _own_order(schedule: Schedule) -> Iterator[str]:
    """What an action needs from its own rank must stand before it: seen without simulating."""
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
    """Who waits for whom, from the lowest rank that is stuck until the circle closes."""
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
    return "deadlock: nobody can go on; " + "; ".join(lines)


def _where(missing: Action, owner: int, row: Sequence[Action]) -> str:
    """In which cell of its owner's ``row`` a B is, or the I that stands for it."""
    for place, action in enumerate(row):
        if missing in settled(action):
            return f"{action} of rank {owner}, which has it in cell {place}"
    return f"{missing}, which rank {owner} does not have in its row"


def _peaks(schedule: Schedule, peak: Sequence[int]) -> Iterator[str]:
    if len(peak) != schedule.ranks:
        raise ValueError(f"peak has {len(peak)} numbers, one for each of {schedule.ranks} ranks")
    for rank, (found, allowed) in enumerate(zip(schedule.peak_in_flight(), peak, strict=True)):
        if found > allowed:
            place = _first_above(schedule.rows[rank], allowed)
            yield (
                f"rank {rank}, cell {place}: {schedule.rows[rank][place]} makes {allowed + 1} in "
                f"flight, {allowed} are allowed (the row's peak is {found}); do a backward before "
                "this forward"
            )


def _first_above(row: Sequence[Action], allowed: int) -> int:
    """The first cell of ``row`` after which more than ``allowed`` are in flight."""
    return next(place for place, now in enumerate(in_flight(row)) if now > allowed)
