"""Requests, and the scheduler that chooses which of them take part in the next forward.

A *slot* is a place in the cache. One request occupies it from admission to its last token. In each
iteration the scheduler returns either the *prefill* of one new request (its whole prompt, which
also yields its first token) or the *decode* of one token for every running request. Requests of any
length therefore come and go while others run: continuous batching (Yu et al. 2022, Orca, OSDI).

The scheduler sends nothing. It is a function of the requests and the tokens alone, so ranks that
record the same tokens in the same order agree on every iteration. Arrival times are counted in
iterations because all ranks count them alike, while their clocks differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from course_lib.model import ModelConfig


@dataclass(frozen=True)
class Request:
    """A ``prompt`` that is continued by at most ``max_new_tokens`` tokens; ``number`` names it.

    The scheduler sees it from iteration ``arrives`` on (counted from 0).
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrives: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(
                f"request {self.number} has an empty prompt: the first token must follow from "
                "something; give at least one token"
            )
        if self.max_new_tokens < 1:
            raise ValueError(
                f"request {self.number}: expected max_new_tokens of 1 or more, got "
                f"{self.max_new_tokens}"
            )
        if self.arrives < 0:
            raise ValueError(
                f"request {self.number}: expected arrives of 0 or more, got {self.arrives}; "
                "iterations count from 0, when the request is there at once"
            )

    @property
    def kv_positions(self) -> int:
        """Positions that its keys and values occupy: the last token is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


def make_requests(
    prompts: Iterable[Sequence[int]], max_new_tokens: int | Sequence[int]
) -> list[Request]:
    """Requests numbered from 0; ``max_new_tokens`` is one number for all, or one for each."""
    given = [tuple(map(int, prompt)) for prompt in prompts]
    wanted = max_new_tokens
    each = [wanted] * len(given) if isinstance(wanted, int) else list(wanted)
    if len(each) != len(given):
        raise ValueError(f"{len(each)} values of max_new_tokens for {len(given)} prompts")
    return [Request(number, given[number], each[number]) for number in range(len(given))]


@dataclass(frozen=True)
class Work:
    """One forward of B requests: S ``tokens`` of each, the first at position ``starts``."""

    slots: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    starts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.slots)

    @property
    def width(self) -> int:
        """S: the length of the prompt, or 1."""
        return len(self.tokens[0]) if self.tokens else 1

    @property
    def is_prefill(self) -> bool:
        """Whether it begins a request."""
        return bool(self.starts) and self.starts[0] == 0

    @property
    def end(self) -> int:
        """One more than the largest position."""
        return max(self.starts, default=0) + self.width

    def tokens_BS(self, device: torch.device | str = "cpu") -> Tensor:
        """The tokens as a tensor, (0, 1) where there is no work."""
        flat = [token for row in self.tokens for token in row]
        tokens = torch.tensor(flat, dtype=torch.int64, device=device)
        return tokens.view(len(self.slots), self.width)

    def positions_BS(self, device: torch.device | str = "cpu") -> Tensor:
        """The position of each token in its sequence."""
        starts_B = torch.tensor(self.starts, dtype=torch.int64, device=device)
        return starts_B[:, None] + torch.arange(self.width, device=device)


NOTHING = Work()


class Scheduler:
    """The waiting requests, the running request of each slot, and every token so far.

    At most ``slots`` requests run at once. In a pipeline they form ``groups``, which alternate so
    that all stages are busy. First come, first served; an iteration without requests has no work.
    A request ends early at the token ``stop``. Raises ValueError when ``groups`` does not divide
    ``slots`` and when two requests have the same number.
    """

    def __init__(
        self, requests: Iterable[Request], slots: int, *, groups: int = 1, stop: int | None = None
    ) -> None:
        self.waiting = deque(sorted(requests, key=lambda request: request.arrives))
        self.iteration = 0  # how many have begun
        if groups < 1 or slots < 1 or slots % groups:
            raise ValueError(
                f"slots={slots} in groups={groups}: each group takes slots / groups requests; "
                "choose a divisor"
            )
        self.slots, self.groups, self.stop = slots, groups, stop
        self.running: dict[int, Request] = {}  # by slot
        self.tokens: dict[int, list[int]] = {request.number: [] for request in self.waiting}
        if len(self.tokens) < len(self.waiting):
            raise ValueError("two requests have the same number: give each its own")

    @property
    def done(self) -> bool:
        """Whether every request has its tokens."""
        return not self.waiting and not self.running

    def check_fits(self, config: ModelConfig, slots: int) -> None:
        """Raise ValueError for what the model or its cache of ``slots`` cannot serve."""
        if self.slots > slots:
            raise ValueError(f"a scheduler of {self.slots} slots, but the cache has {slots}")
        for request in self.waiting:
            if request.kv_positions > config.max_seq_len:
                raise ValueError(
                    f"request {request.number}: a prompt of {len(request.prompt)} and "
                    f"{request.max_new_tokens} new tokens take {request.kv_positions} positions, "
                    f"but the model was built for max_seq_len={config.max_seq_len}; shorten one of "
                    "them"
                )
            bad = [token for token in request.prompt if not 0 <= token < config.vocab]
            if bad:
                raise ValueError(
                    f"request {request.number}: token {bad[0]} is outside the vocabulary of "
                    f"{config.vocab}"
                )

    def next_work(self, group: int = 0) -> Work:
        """Return the next work of ``group``, whose last tokens must have been recorded."""
        share = self.slots // self.groups
        mine = range(group * share, (group + 1) * share)
        free = [slot for slot in mine if slot not in self.running]
        active = [slot for slot in mine if slot in self.running]
        self.iteration += 1
        arrived = self.waiting and self.waiting[0].arrives < self.iteration
        if arrived and free and self.admits(active):
            request = self.running[free[0]] = self.waiting.popleft()
            return Work((free[0],), (request.number,), (request.prompt,), (0,))
        running = [self.running[slot] for slot in active]
        tokens = [self.tokens[request.number] for request in running]
        return Work(
            tuple(active),
            tuple(request.number for request in running),
            tuple((own[-1],) for own in tokens),
            tuple(len(r.prompt) + len(own) - 1 for r, own in zip(running, tokens, strict=True)),
        )

    def admits(self, active: Sequence[int]) -> bool:
        """Whether a request may join the requests in the slots ``active``: always."""
        return True

    def record(self, work: Work, tokens: Sequence[int]) -> None:
        """Append the token of each request of ``work``; a complete request leaves its slot."""
        for slot, number, token in zip(work.slots, work.requests, tokens, strict=True):
            own = self.tokens[number]
            own.append(int(token))
            if len(own) == self.running[slot].max_new_tokens or token == self.stop:
                del self.running[slot]


class StaticScheduler(Scheduler):
    """Static batching: a slot stays empty until the last request of its batch is over.

    It is the baseline that continuous batching improves on.
    """

    def admits(self, active: Sequence[int]) -> bool:
        """Only while the batch is being filled: before any request has a second token."""
        return all(len(self.tokens[self.running[slot].number]) == 1 for slot in active)
