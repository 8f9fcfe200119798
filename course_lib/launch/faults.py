"""The errors that a launch raises, with a report on every rank."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from course_lib.launch.places import below_launcher, is_library, source, standing, where
from course_lib.launch.task import Frame, Outcome, Raised
from course_lib.launch.travel import text_of, unpack

CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")
REPEATS = 3  # equal frames in a row that are shown one by one, as Python does
LONGEST = 40  # lines of one traceback
PARTS = 5  # exceptions of a group
PASSED = {
    "timeout": "",
    "start": ", in which not every rank began",
    "cpu": " of CPU time",
    "blocked": ", in which all ranks waited for each other",
    "total": "",
}
LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "socket timeout")


class RankError(RuntimeError):
    """Raised when a run did not return on every rank.

    ``rank`` is the rank at fault (None for a deadline or an interrupt). ``kind`` is one of
    "raised", "exit", "died", "function", "result", "deadline", "interrupted", "server".
    ``report`` is the whole text. ``standing`` has one line per other rank, with its place in the
    code. ``exception`` is the exception of the rank at fault, if it could be sent. ``outputs``
    has the printed output of each rank.
    """

    def __init__(
        self,
        report: str,
        *,
        kind: str,
        rank: int | None = None,
        standing: Mapping[int, str] | None = None,
        exception: BaseException | None = None,
    ) -> None:
        super().__init__(report)
        self.report = report
        self.kind = kind
        self.rank = rank
        self.standing = dict(standing or {})
        self.exception = exception
        self.outputs: list[str] = []

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of a traceback through the launcher."""
        return [
            f"{type(self).__name__}: {line}" if not i else line
            for i, line in enumerate(self.report.splitlines())
        ]


class RankDeadline(RankError):
    """Raised when not every rank had returned before a limit of the run had passed.

    ``limit`` is "timeout", or the name of one of the Limits, and ``seconds`` its length.
    ``starved``: the ranks waited for a processor most of the time, so that the machine may be the
    reason.
    """

    limit = "timeout"
    seconds = 0.0
    starved = False


class RankInterrupted(RankError, KeyboardInterrupt):
    """Raised when the user interrupted the run."""


@dataclass
class Standing:
    """The state of every rank at the moment when the run ends in an error."""

    n: int
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    died: Mapping[int, int | None] = field(default_factory=dict)  # wait status, None: unknown
    stacks: Mapping[int, list[Frame]] = field(default_factory=dict)
    checked: bool = False  # whether the run compared its collectives

    def culprit(self) -> int | None:
        """Return the rank at fault: not a rank that only lost its connection to another rank."""
        failed = [rank for rank, outcome in self.outcomes.items() if outcome.kind != "returned"]
        own = [rank for rank in failed if not lost_connection(self.outcomes[rank])]
        if own:
            first = min(own, key=lambda rank: self.outcomes[rank].at)
            said = _headline(self.outcomes[first])  # the lowest of the ranks with the same error
            return min(rank for rank in own if _headline(self.outcomes[rank]) == said)
        if self.died:
            return min(self.died, key=lambda rank: (not self.stacks.get(rank), rank))
        return min(failed, key=lambda rank: self.outcomes[rank].at) if failed else None

    def of(self, rank: int, culprit: int | None = None) -> str:
        """Return one line about one rank."""
        outcome = self.outcomes.get(rank)
        if rank in self.died:
            return f"rank {rank} {_ending(self.died[rank])}{_at(self.stacks.get(rank))}"
        if outcome is None:
            frames = self.stacks.get(rank)
            unknown = "starting, no line of yours yet" if frames else "unknown (no answer)"
            return f"rank {rank} was at: {standing(frames or []) or unknown}"
        if outcome.kind == "returned":
            return f"rank {rank} had returned"
        frames = outcome.error.frames if outcome.error else []
        if lost_connection(outcome):
            return f"rank {rank} lost its connection to another rank{_at(frames)}"
        first = self.outcomes.get(culprit) if culprit is not None else None
        if first is not None and _headline(first) == _headline(outcome):
            return f"rank {rank} failed in the same way{_at(frames)}"
        return f"rank {rank} failed too: {_headline(outcome)}{_at(frames)}"

    def others(self, culprit: int | None = None) -> dict[int, str]:
        """Return one line for every rank except the rank at fault."""
        return {rank: self.of(rank, culprit) for rank in range(self.n) if rank != culprit}


def failure(known: Standing) -> RankError:
    """Return the error for a run in which at least one rank failed or died."""
    culprit = known.culprit()
    assert culprit is not None
    others = known.others(culprit)
    outcome = known.outcomes.get(culprit)
    exception = None
    if culprit in known.died:
        kind = "died"
        lines = [known.of(culprit), *_frame_lines(known.stacks.get(culprit, []))]
        lines.append(_advice(known.died[culprit], known.checked))
    else:
        assert outcome is not None
        kind = outcome.kind
        lines = _outcome_lines(culprit, outcome)
        exception = _exception(outcome)
    report = "\n".join([*lines, *others.values()])
    return RankError(report, kind=kind, rank=culprit, standing=others, exception=exception)


def deadline(
    known: Standing, seconds: float, limit: str = "timeout", starved: bool = False
) -> RankDeadline:
    """Return the error for a run of which a limit has passed, after ``seconds``."""
    late = known.n - len(known.outcomes)
    others = known.others()
    head = (
        f"deadline: {late} of {known.n} ranks had not returned after {seconds:g} s{PASSED[limit]}. "
        "A rank waits forever if another rank does not make the same call. If the run only needs "
        "more time, give a larger timeout."
    )
    error = RankDeadline("\n".join([head, *others.values()]), kind="deadline", standing=others)
    error.limit, error.seconds, error.starved = limit, seconds, starved
    return error


def interrupted(known: Standing) -> RankInterrupted:
    """Return the error for a run that was interrupted."""
    others = known.others()
    head = "interrupted: the ranks were stopped; the next run starts fresh ranks."
    return RankInterrupted("\n".join([head, *others.values()]), kind="interrupted", standing=others)


def server_gone() -> RankError:
    """Return the error for a fork server that was killed."""
    report = (
        "the fork server that starts the ranks was killed, by a user or by the system because "
        "memory ran out; the next run starts a new server."
    )
    return RankError(report, kind="server")


def unreadable(rank: int, error: Exception) -> RankError:
    """Return the error for a result that this process cannot unpickle."""
    what = f"{type(error).__name__}: {text_of(error)}"
    report = f"rank {rank} returned a value that cannot be rebuilt here: {what}"
    return RankError(report, kind="result", rank=rank)


def lost_connection(outcome: Outcome) -> bool:
    """Return whether a rank failed only because another rank had ended."""
    text = outcome.error.message.lower() if outcome.error else ""
    return any(words in text for words in LOST)


def _at(frames: list[Frame] | None) -> str:
    place = standing(frames) if frames else ""
    return f", at: {place}" if place else ""


def _headline(outcome: Outcome) -> str:
    if outcome.error is None:
        return outcome.hint
    return _said(outcome.error)


def _said(error: Raised) -> str:
    return error.name + (f": {error.message}" if error.message else "")


def _outcome_lines(rank: int, outcome: Outcome) -> list[str]:
    if outcome.kind == "result":
        what = f"rank {rank} finished, but {outcome.hint}"
        return [f"{what}. Return tensors, numbers, strings, or lists and dicts of these."]
    if outcome.kind == "function":
        what = f"rank {rank} could not rebuild the function or its arguments: {_headline(outcome)}"
        return [what]
    if outcome.kind == "exit":
        what = f"rank {rank} called sys.exit; a function that runs on ranks must return"
        return [what, *_traceback(outcome.error)]
    return [f"rank {rank} raised {_headline(outcome)}", *_traceback(outcome.error)]


def _traceback(error: Raised | None) -> list[str]:
    if error is None:
        return []
    lines = []
    if error.cause is not None:
        how = "from" if error.direct else "while handling"
        lines = [f"  {how} {_said(error.cause)}", *_traceback(error.cause)]
    for number, part in enumerate(error.parts[:PARTS], 1):
        lines.append(f"  sub-exception {number}: {_said(part)}")
        lines += [f"  {line}" for line in _traceback(part)]
    if len(error.parts) > PARTS:
        lines.append(f"  ... and {len(error.parts) - PARTS} more sub-exceptions")
    return [*_frame_lines(error.frames), *lines]


def _frame_lines(frames: list[Frame]) -> list[str]:
    """Return the frames below the launcher's own frames, with their source, in at most 40 lines."""
    lines: list[str] = []
    shown = below_launcher(frames)
    for library, group in groupby(shown, key=lambda frame: is_library(frame.filename)):
        some = _folded(group)
        if library and len(some) > 3:
            some[1:-1] = [f"  ... {len(some) - 2} more lines inside libraries ..."]
        lines += some
    if len(lines) > LONGEST:
        half = LONGEST // 2
        lines[half:-half] = [f"  ... {len(lines) - LONGEST} more lines ..."]
    return lines


def _folded(frames: Iterable[Frame]) -> list[str]:
    """Return one line per frame; equal frames in a row, as in a recursion, are shown once."""
    lines = []
    for frame, group in groupby(frames):
        count = len(list(group))
        lines += [_frame_line(frame)] * (count if count <= REPEATS else 1)
        if count > REPEATS:
            lines.append(f"  [the line above, {count - 1} more times]")
    return lines


def _frame_line(frame: Frame) -> str:
    text = source(frame)
    return f"  {where(frame)}, in {frame.function}" + f":  {text}" * bool(text)


def _ending(status: int | None) -> str:
    if status is None:
        return "ended without an error message"
    if (signum := status & 0x7F) != 0:
        return f"was ended by signal {signum} ({_signal_name(signum)})"
    return f"left the process with exit code {status >> 8}"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "a real-time signal"


def _advice(status: int | None, checked: bool) -> str:
    signum = (status or 0) & 0x7F
    if signum == signal.SIGABRT:
        how = (
            "; checked=True sees only calls through course_lib.comm, not direct calls of "
            "torch.distributed."
            if checked
            else ", or run with checked=True to compare the calls of course_lib.comm on all ranks."
        )
        return (
            "The backend aborts a rank that receives a message of an unexpected size. Compare "
            f"shapes and dtypes across the ranks{how}"
        )
    if signum == signal.SIGKILL:
        return (
            "A user killed it, or the system did because memory ran out. In the second case, use "
            "fewer ranks or smaller tensors."
        )
    if signum and _signal_name(signum) not in CRASHES:
        return "A user, another process or the function itself sent this signal: no code crashed."
    if signum:
        return (
            "Compiled code crashed in this rank. Look at your last line in the list above, and "
            "undo the last change there."
        )
    return "The rank called os._exit. A function that runs on ranks must return or raise."


def _exception(outcome: Outcome) -> BaseException | None:
    try:
        return unpack(outcome.exception) if outcome.exception else None
    except Exception:
        return None
