"""01-4: measure a step on real ranks and say which limit binds.

Time is the machine's own: a clock of each rank that runs while it computes, sends or waits for
another, and only then. So a busy laptop does not decide what a learner is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from course_lib import comm
from course_lib.grading.answers import shown
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Axis, Mesh

EVEN, SLOW_LINK, LATE = range(3)  # situations
# (seconds of computing of rank 0, of the others, seconds that the link takes, what binds)
SITUATIONS = {
    EVEN: (0.10, 0.10, 0.02, "compute"),
    SLOW_LINK: (0.015, 0.015, 0.12, "network"),
    LATE: (0.15, 0.005, 0.03, "compute"),
}
TWO, FOUR, STRAGGLER, ONE = range(4)
TRIALS = (Trial(2, EVEN), Trial(4, SLOW_LINK), Trial(3, LATE), Trial(1, EVEN))
LIMITS = ("compute", "network")


@dataclass
class Machine:
    """What the answer measures: this rank's computing, a slow link, and the clock of both."""

    axis: Axis
    computing: float  # seconds of this rank
    sending: float  # seconds of the whole gradient
    gradient: Tensor
    clock: float = 0.0

    def now(self) -> float:
        """Seconds on this rank's clock."""
        return self.clock

    def compute(self) -> None:
        """This rank's part of the step."""
        self.clock += self.computing

    def barrier(self) -> None:
        """Wait until every rank is here."""
        own = torch.tensor([self.clock], dtype=torch.float64)
        self.clock = comm.all_reduce_max(own, self.axis).item()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over the ranks; it begins when the last rank comes."""
        total = comm.all_reduce(x, self.axis)
        self.barrier()
        self.clock += self.sending * x.numel() / self.gradient.numel()
        return total


def _elements(seed: int) -> int:
    """Of the gradient: the same on all ranks."""
    return 2000 + 4 * (seed % 500)


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, float, float]:
    """The gradient, the seconds that this rank computes, the seconds that the link takes."""
    first, others, link, _ = SITUATIONS[trial.size]
    gradient = torch.full((_elements(seed),), float(rank + 1))
    return gradient, (others if rank else first), (link if trial.n > 1 else 0.0)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    gradient, computing, sending = inputs
    axis = mesh.world
    return answers[0](Machine(axis, computing, sending, gradient), gradient, axis)


def _pair(value: Any) -> tuple[float, str] | None:
    """(bytes, limit), or None where it is no such pair."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    sent, limit = value
    if isinstance(sent, bool) or not isinstance(sent, Real) or not isinstance(limit, str):
        return None
    return float(sent), limit


def _found(seen: Seen) -> str:
    """Bytes and limit, on every rank."""
    for rank, value in enumerate(seen.values):
        pair = _pair(value)
        if pair is None:
            return f"rank {rank} returned {shown(value)}; a pair (bytes, limit) is wanted"
        if pair[1] not in LIMITS:
            return f'rank {rank} says {shown(pair[1])}; it is "compute" or "network"'
    return _bytes_wrong(seen) or _limit_wrong(seen)


def _bytes_wrong(seen: Seen) -> str:
    n, size = seen.trial.n, 4 * _elements(seen.seed)
    right = float(wire("all_reduce", size, n))
    got = float(seen.values[0][0])
    if all(abs(float(value[0]) - right) < 0.01 for value in seen.values):
        return ""
    known = (
        (size, "that is the gradient itself; a rank sends 2(n-1)/n of it"),
        (right / 2, "an all-reduce has two halves, and each sends (n-1)/n of the gradient"),
        (2 * size, "a rank's own piece stays where it is: 2(n-1)/n, not 2"),
        (right / 4, "these are elements; each has 4 bytes"),
        (right * n, "that is what all ranks send together; one rank's bytes are wanted"),
    )
    said = next((text for wrong, text in known if abs(got - wrong) < 0.01), "")
    return f"rank 0 says {got:,g} bytes for a gradient of {size:,} on {n} ranks" + (
        f": {said}" if said else ""
    )


def _limit_wrong(seen: Seen) -> str:
    limits = [value[1] for value in seen.values]
    *_, right = SITUATIONS[seen.trial.size]
    if len(set(limits)) > 1:
        told = ", ".join(f"rank {rank}: {limit}" for rank, limit in enumerate(limits))
        return (
            f"the ranks disagree ({told}): a step is as long as its slowest rank; take the maximum "
            "over the ranks"
        )
    if limits[0] == right:
        return ""
    if seen.trial.size == LATE:
        return (
            "rank 0 computes five times as long as the link takes, and every rank says network: an "
            "all-reduce that others begin early contains the wait for the rank that is late; let "
            "all begin it together"
        )
    return (
        f"every rank says {limits[0]}: what takes longer binds, by machine.now(), and that is the "
        "other one"
    )


def _was_sent(seen: Seen) -> str:
    """The gradient went through the network on every rank."""
    size = 4 * _elements(seen.seed)
    for rank, observed in enumerate(seen.ranks):
        sums = [call for call in observed.calls if call.op == "all_reduce"]
        if not any(call.payload == size for call in sums):
            return (
                f"rank {rank} never all-reduced the gradient of {size:,} bytes: measure what a "
                "step sends"
            )
    return ""


def _measure(
    machine: Machine,
    gradient: Tensor,
    axis: Axis,
    *,
    now: Callable[[], float] | None = None,
    together: bool = True,
    maximum: bool = True,
    swapped: bool = False,
    share: Callable[[int], float] = lambda n: 2 * (n - 1) / n,
) -> tuple[float, str]:
    """Right, or with a mistake."""
    now = now or machine.now
    start = now()
    machine.compute()
    computed = now() - start
    if together:
        machine.barrier()
    start = now()
    machine.all_reduce(gradient)
    times = torch.tensor([computed, now() - start])
    if maximum:
        times = comm.all_reduce_max(times, axis)
    longer = (times[0] > times[1]).item() != swapped
    return share(axis.size) * gradient.nbytes, "compute" if longer else "network"


def _right_by_minimum(machine: Machine, gradient: Tensor, axis: Axis) -> list[Any]:
    """No barrier: who comes last does not wait, so that the shortest all-reduce is the true one."""
    times = [machine.now()]
    machine.compute()
    times.append(machine.now())
    machine.all_reduce(gradient)
    times.append(machine.now())
    mine = torch.tensor([times[1] - times[0], times[1] - times[2]])
    computed, sent = comm.all_reduce_max(mine, axis).tolist()
    n = axis.size
    return [gradient.numel() * 4 * 2 * (n - 1) / n, LIMITS[computed < -sent]]


def _but(**mistake: Any) -> Answer:
    return lambda machine, gradient, axis: _measure(machine, gradient, axis, **mistake)


def _always(limit: str) -> Answer:
    return lambda machine, gradient, axis: (
        2 * (axis.size - 1) / axis.size * gradient.nbytes,
        limit,
    )


def _other_word(*given: Any) -> tuple[float, str]:
    return _measure(*given)[0], "communication"


def _of_a_piece(machine: Machine, gradient: Tensor, axis: Axis) -> tuple[float, str]:
    """Sends a quarter of the gradient and multiplies."""
    start = machine.now()
    machine.compute()
    computed = machine.now() - start
    machine.barrier()
    start = machine.now()
    machine.all_reduce(gradient[: len(gradient) // 4])
    times = torch.tensor([computed, 4 * (machine.now() - start)])
    longest = comm.all_reduce_max(times, axis)
    n = axis.size
    return 2 * (n - 1) / n * gradient.nbytes, LIMITS[int(longest[0] <= longest[1])]


LIMIT = Ranked(
    id="01-4",
    title="which limit binds",
    names=("limit",),
    hints=(
        "Two times are wanted: of compute() on the slowest rank, and of the all-reduce when nobody "
        "is late for it.",
        "Take the time of compute(). A barrier lets all ranks begin the all-reduce together: take "
        "its time. Then the maximum of both over the ranks, so that all say the same.",
        "t = machine.now(); machine.compute(); a = machine.now() - t; machine.barrier(); the same "
        "for machine.all_reduce(gradient), b; longest = comm.all_reduce_max(torch.tensor([a, b]), "
        "axis). The bytes: 2 * (n - 1) / n * gradient.nbytes.",
    ),
    wrong=(
        Wrong(lambda *given: None, words="a pair (bytes, limit) is wanted"),
        Wrong(_other_word, words='it is "compute" or "network"'),
        Wrong(_but(share=lambda n: 1.0), words="that is the gradient itself"),
        Wrong(_but(share=lambda n: (n - 1) / n), words="two halves"),
        Wrong(_but(share=lambda n: 2.0), words="not 2"),
        Wrong(_but(share=lambda n: (n - 1) / n / 2), words="these are elements"),
        Wrong(_but(share=lambda n: 2.0 * (n - 1)), words="not 2"),
        Wrong(_but(swapped=True), words="what takes longer binds"),
        Wrong(_but(now=time.perf_counter), words="by machine.now()"),
        Wrong(_but(together=False), words="the wait for the rank that is late"),
        Wrong(_but(maximum=False), words="the ranks disagree"),
        Wrong(_but(together=False, maximum=False), words="the ranks disagree"),
        Wrong(_always("compute"), words="what takes longer binds"),
        Wrong(_always("network"), words="what takes longer binds"),
        Wrong(_of_a_piece, words="never all-reduced the gradient"),
    ),
    right=(_measure, _right_by_minimum),
    stub=lambda machine, gradient, axis: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks, much computing", TWO, _found),
        RankCase("outputs", "four ranks, a slow link", FOUR, _found),
        RankCase("outputs", "three ranks, one is late", STRAGGLER, _found),
        RankCase("outputs", "one rank", ONE, _found),
        RankCase("wire", "the gradient is sent", FOUR, _was_sent),
    ),
)
