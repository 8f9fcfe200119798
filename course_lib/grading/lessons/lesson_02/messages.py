"""What the exercises on ranks of this lesson ask alike: messages alone, and x left as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer
from course_lib.grading.ranked import Observed, Seen, Trial, unwaited
from course_lib.mesh import Mesh

REFUSAL = "raised PermissionError: this is what you are asked to write"


def drawn(trial: Trial, rank: int, seed: int) -> tuple[Tensor]:
    """x of ``trial.size`` elements, another one on each rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    return (torch.randn(trial.size, generator=generator),)


def on_world(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """What the answer gives for x among all ranks."""
    return answers[0](inputs[0], mesh.world)


def given_to(seen: Seen) -> list[Tensor]:
    """x of each rank, as :func:`drawn`."""
    return [drawn(seen.trial, rank, seen.seed)[0] for rank in range(seen.trial.n)]


def made_of_messages(look: Callable[[Seen], str]) -> Callable[[Seen], str]:
    """``look``, which counts only where no collective of torch did the work.

    What is wrong has one more cause where messages were not waited for.
    """

    def honest(seen: Seen) -> str:
        for rank, observed in enumerate(seen.ranks):
            if others := sorted({call.op for call in observed.calls} - {"send", "recv"}):
                return f"rank {rank} called {', '.join(others)}: use send and recv alone"
        says, why = look(seen), unwaited(seen)
        return f"{why} ({says})" if says and why else says

    return honest


def sent_to(observed: Observed) -> list[int]:
    """The peers of all messages that a rank sent, in order."""
    return [call.peer for call in observed.calls if call.op == "send" and call.peer is not None]


def left_alone(given: Callable[[Seen], list[Tensor]]) -> Callable[[Seen], str]:
    """Whether x is on every rank what ``given`` says that it was."""

    def look(seen: Seen) -> str:
        after = [rank.inputs[0] for rank in seen.ranks]
        if difference("inputs", after, given(seen)):
            return "x was written: a collective of the course leaves the caller's tensor as it is"
        return ""

    return look
