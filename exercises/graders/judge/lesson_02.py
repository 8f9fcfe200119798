"""Lesson 02, collectives from messages: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from course_lib.comm.alpha_beta import crossing
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_02 as runner
from course_lib.grading.placed import bytes_of
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import TRIALS, Given, Look, Mistake, Trial
from course_lib.mesh import Link

SENT, FIRST, SECOND = "sent in turn 1", "sums of turn 1", "sums of turn 2"
STORED, ARRIVED = "rank 0 before the all-gather", "arrives at rank 0 in turns 3 and 4"
BYTES = "bytes that a rank sends"


# --- 02-2 ----------------------------------------------------------------------------------------


def _links(*sizes: int, first: int = 1) -> Callable[[random.Random], list[Instance]]:
    """Draw the ``first`` numbers of ranks and two of the others with one link. The first number
    also gets links with another alpha or beta."""

    def draw(rng: random.Random) -> list[Instance]:
        alphas = [alpha / 1e6 for alpha in rng.sample(range(2, 90), 2)]
        betas = [beta * 1e8 for beta in rng.sample(range(5, 400), 2)]
        pairs = [(n, alphas[0], betas[0]) for n in (*sizes[:first], *rng.sample(sizes[first:], 2))]
        pairs += [(sizes[0], alphas[1], betas[0]), (sizes[0], alphas[0], betas[1])]
        return [{"n": n, "link": Link(alpha, beta)} for n, alpha, beta in pairs]

    return draw


def _as_bytes(value: Any) -> float:
    if isinstance(value, Tensor):
        raise NotRight("expected a plain number, got a tensor: call .item()")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise NotRight(f"expected a number of bytes, got {shown(value)}")
    return float(value)


def _at(link: Link, more: float, fewer: float) -> float:
    """Return the bytes at which ``more`` alphas take as long as ``fewer`` times S / beta."""
    return link.alpha * link.beta * more / fewer


def _levels(n: int) -> int:
    return ceil(log2(n))


def _right(n: int, link: Link) -> float:
    """Return the right size, because crossing itself is refused while a call is judged."""
    return _at(link, n - 1 - _levels(n), _levels(n) - (n - 1) / n)


CROSSING_MISTAKES: Mapping[str, Callable[[int, Link], float]] = {
    "In a turn of the ring a rank sends S/n bytes, not S.": (
        lambda n, link: _at(link, n - 1 - _levels(n), _levels(n) - (n - 1))
    ),
    "The ring has two halves, and a rank sends in both: 2(n-1)/n S in all.": (
        lambda n, link: _at(link, 2 * (n - 1) - 2 * _levels(n), 2 * _levels(n) - (n - 1) / n)
    ),
    "Messages go up the tree and down again: 2 ceil(log2 n) in a row.": (
        lambda n, link: _at(link, 2 * (n - 1) - _levels(n), _levels(n) - 2 * (n - 1) / n)
    ),
    "A tree of 5 ranks has 3 levels: round log2 n up.": (
        lambda n, link: _at(link, n - 1 - log2(n), log2(n) - (n - 1) / n)
    ),
    "A tree of 5 ranks has 3 levels: round log2 n up, not down.": (
        lambda n, link: _at(link, n - 1 - int(log2(n)), int(log2(n)) - (n - 1) / n)
    ),
    "n.bit_length() is one too large for a power of two: a tree of 4 ranks has 2 levels. "
    "(n - 1).bit_length() is right.": (
        lambda n, link: _at(link, n - 1 - n.bit_length(), n.bit_length() - (n - 1) / n)
    ),
    "A ring of n ranks has n-1 turns in each half, not n.": (
        lambda n, link: _at(link, n - _levels(n), _levels(n) - 1)
    ),
    "alpha / beta is no number of bytes: multiply seconds by bytes per second.": (
        lambda n, link: _right(n, link) / link.beta**2
    ),
    "This is one message, S/n; expected the whole S.": lambda n, link: _right(n, link) / n,
    "This is the crossing of 4 ranks: it depends on n.": (
        lambda n, link: 0.8 * link.alpha * link.beta
    ),
    "The fraction is upside down: more alphas give a larger S.": (
        lambda n, link: _at(link, _levels(n) - (n - 1) / n, n - 1 - _levels(n))
    ),
    "These are numbers of 4 bytes; expected bytes.": lambda n, link: _right(n, link) / 4,
    "S is cut off to whole bytes: return the result of the division.": (
        lambda n, link: int(_right(n, link))
    ),
}


def _from_four(formula: Callable[[int, Link], float]) -> Callable[[int, Link], float]:
    return lambda n, link: formula(n, link) if n > 3 else 0.0


CROSSING = Function(
    id="02-2",
    title="the size where ring and tree are equal",
    names=("crossing",),
    mistakes=tuple(
        Wrong(formula, message)
        for message, wrong in CROSSING_MISTAKES.items()
        for formula in (wrong, _from_four(wrong))
    ),
    reference=crossing,
    refused=("course_lib.comm.alpha_beta:crossing",),
    normal=_as_bytes,
    relative=1e-9,
    drawn=(
        Case("a power of two", _links(4, 8, 16, 32, 64)),
        Case("another number of ranks", _links(5, 6, 7, 9, 12, 24, 100)),
        Case("a thousand ranks and more", _links(2500, 1000, 1024, 4096, 16_384)),
        Case("two and three ranks", _links(2, 3, 4, 5, 10, first=2)),
    ),
)


INT, WHOLE = torch.int64, 2**58

# --- messages ------------------------------------------------------------------------------------


def _sent_to(given: Given, observed: Observed) -> list[int]:
    """Return the coordinate of the receiver of each message in order; -1 is outside the axis."""
    peers = [call.ranks[call.peer] for call in observed.calls
             if call.op == "send" and call.peer is not None]  # fmt: skip
    return [given.group.index(peer) if peer in given.group else -1 for peer in peers]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "no rank"


def _payload(observed: Observed) -> int:
    return sum(call.payload for call in observed.calls if call.op == "send")


def _values(trial: Trial, draw: Draw, *shape: int) -> Tensor:
    """Draw values of the trial's dtype; whole numbers are too large for a float32."""
    return draw.integers(-WHOLE, WHOLE, *shape) if trial.dtype == INT else draw.tensor(*shape)


def _total(given: Given) -> Tensor:
    return torch.stack(given["x"]).sum(0)


def _outputs(table: Mapping[str, Callable[[Given], Any]]) -> tuple[Mistake, ...]:
    """Return mistakes from a table of messages and outputs."""
    return tuple(Mistake(why, {"outputs": compute}) for why, compute in table.items())


# --- 02-3 ----------------------------------------------------------------------------------------


def _any_shape(trial: Trial, draw: Draw) -> Any:
    shape = () if trial.n == 3 and draw.call else draw.shape()
    return [{"x": _values(trial, draw, *shape)} for _ in range(trial.n)]


def _messages(given: Given, ranks: list[Observed]) -> str:
    """Expect n-1 messages in all, each with the whole x."""
    n, size = given.n, bytes_of(given["x"][0])
    received = [to for rank in ranks for to in _sent_to(given, rank)]
    if len(received) != n - 1:
        return (
            f"expected n-1 = {n - 1} messages on {n} ranks, got {len(received)}: each rank but 0 "
            "needs x once"
        )
    payloads = {call.payload for rank in ranks for call in rank.calls}
    if payloads != {size}:
        return f"expected messages of {size:,} bytes, the whole x, got {min(payloads):,} bytes"
    return ""


def _rounds(given: Given, ranks: list[Observed]) -> str:
    """Expect ceil(log2 n) messages one after another, when a rank sends one at a time."""
    round_of, waiting = {0: 0}, [0]
    while waiting:
        rank = waiting.pop()
        for number, peer in enumerate(_sent_to(given, ranks[rank]), 1):
            if peer not in round_of:
                round_of[peer] = round_of[rank] + number
                waiting.append(peer)
    last, needed = max(round_of, key=round_of.__getitem__), ceil(log2(given.n))
    if round_of[last] <= needed:
        return ""
    return (
        f"rank {last} has x only after {round_of[last]} messages one after another; a tree of "
        f"{given.n} ranks needs {needed}: let every rank that has x send it in each round"
    )


TREE = OnRanks(
    id="02-3",
    title="a broadcast by a tree",
    names=("tree_broadcast",),
    trials=(
        *TRIALS,
        Trial(5, dtype=INT, name="five ranks, whole numbers"),
        Trial(7, dtype=torch.bfloat16, name="seven ranks"),
    ),
    act=runner.on_axis,
    draw=_any_shape,
    expected=lambda given: {"outputs": given["x"][0]},
    mistakes=_outputs(
        {
            "every rank returned its own x: nothing arrived, or the result of comm.recv was not "
            "used": lambda given: given["x"],
            "every rank has the x of the last rank: expected that of rank 0": (
                lambda given: given["x"][-1]
            ),
            "this is the sum over the ranks: expected the x of rank 0": _total,
        }
    ),
    only=("send", "recv"),
    looks=(
        Look("wire", "messages", _messages),
        Look("wire", "one after another", _rounds),
    ),
    hang="A receive waits until its source sends: in the round of step, the ranks from step to "
    "2 * step - 1 receive from axis.rank - step",
    refused=(
        "course_lib.comm.from_messages:tree_broadcast",
        "course_lib.comm.from_messages:tree_all_reduce",
    ),
)


# --- 02-4 ----------------------------------------------------------------------------------------

LARGE = 16_384  # elements; 64 kB


def _flat(trial: Trial, draw: Draw) -> list[dict[str, Tensor]]:
    """Pieces that are equal or uneven, and in the second call some that are empty."""
    n = trial.n
    length = LARGE + n * draw.size(1, 9) if trial.size else n * draw.size(2, 9) + 1
    if draw.call and not trial.strided:
        length = length + n // 2 if trial.size else draw.size(1, max(n - 1, 2))
    parts = [_values(trial, draw, length) for _ in range(n)]
    if trial.dtype == INT:  # a small sum of large numbers
        parts[-1] = draw.integers(-9, 9, length) - sum(parts[:-1])
    return [{"x": part} for part in parts]


def _rounds_off(given: Given, ranks: list[Observed], name: str) -> str:
    total, got = _total(given).double(), [rank.values[name] for rank in ranks]
    most = WHOLE / 2**20  # a float32 rounds off less
    if given.trial.dtype == INT and all(
        isinstance(x, Tensor) and x.shape == total.shape and (x - total).abs().max() < most
        for x in got
    ):
        return "the sums of whole numbers are rounded: add in the dtype of x, without a float"
    return ""


def _ring(
    given: Given,
    *,
    start: int,
    halves: int = 2,
    adds: Callable[[int, int], bool] = lambda turn, n: turn < n - 1,
) -> list[Tensor]:
    """Return what a ring gives in which rank r begins with piece r + start."""
    n = given.n
    pieces = [list(x.flatten().tensor_split(n)) for x in given["x"]]
    for turn in range(halves * (n - 1)):
        leaving = [(rank + start - turn) % n for rank in range(n)]
        messages = [pieces[rank][leaving[rank]] for rank in range(n)]
        for rank in range(n):
            into, got = leaving[rank - 1], messages[rank - 1]
            pieces[rank][into] = pieces[rank][into] + got if adds(turn, n) else got
    return [torch.cat(each).view_as(given["x"][0]) for each in pieces]


RINGS: Mapping[str, dict[str, Any]] = {
    "one shard is right on each rank: the second half, n-1 turns that copy the sums, is missing": {
        "halves": 1
    },
    "each shard comes from one rank only: in the first n-1 turns, add the shard that arrives to "
    "your own, and begin the second half with the shard that you summed last": {
        "adds": lambda turn, n: False
    },
    "shards were added in the second half too: in its turns the sum that arrives replaces your own "
    "shard": {"adds": lambda turn, n: True},
}


def _ring_messages(given: Given, ranks: list[Observed]) -> str:
    """Expect 2(n-1) messages to one neighbor; empty ones may be left out."""
    n, length = given.n, given["x"][0].numel()
    for rank, observed in enumerate(ranks):
        sends = _sent_to(given, observed)
        if set(sends) not in ({(rank + 1) % n}, {(rank - 1) % n}):
            return (
                f"expected messages from rank {rank} to one neighbor, got messages to ranks "
                f"{_listed(sorted(set(sends)))}: in a ring each rank sends to the next one"
            )
        if len(sends) != 2 * (n - 1) and (length >= n or len(sends) > 2 * (n - 1)):
            return (
                f"expected 2(n-1) = {2 * (n - 1)} messages from rank {rank}, got {len(sends)}: "
                "a rank sends one shard in each turn"
            )
    return ""


def _ring_bytes(given: Given, ranks: list[Observed]) -> str:
    """Expect 2(n-1)/n S from each rank if pieces are equal, and 2(n-1) S from all in any case."""
    n, x = given.n, given["x"][0]
    size, sent = bytes_of(x), [_payload(rank) for rank in ranks]
    low, high = (2 * (size - piece * x.element_size()) for piece in
                 (-(-x.numel() // n), x.numel() // n))  # fmt: skip
    for rank, payload in enumerate(sent):
        if not low <= payload <= high:
            return (
                f"expected 2(n-1)/n S = {2 * (n - 1) / n * size:,g} bytes from rank {rank} for x "
                f"of {size:,}, got {payload:,}: send shards of x, not all of it"
            )
    if sum(sent) != 2 * (n - 1) * size:
        return (
            f"expected 2(n-1) S = {2 * (n - 1) * size:,} bytes from all ranks, got {sum(sent):,}: "
            "in each turn every shard is sent once, and none is padded"
        )
    return ""


def _ring_peak(given: Given, ranks: list[Observed]) -> str:
    size = bytes_of(given["x"][0])
    worst = max(observed.peak for observed in ranks)
    if worst <= 3 * size or size < 4 * LARGE:
        return ""
    return (
        f"expected at most 3 times x ({3 * size:,} bytes) alive at once, got {worst:,}: a ring "
        "needs no copy of every rank's x"
    )


RING = OnRanks(
    id="02-4",
    title="a ring all-reduce from send and recv",
    names=("ring_all_reduce",),
    trials=(
        *TRIALS[:2],
        Trial(3, dtype=INT, name="three ranks, whole numbers"),
        TRIALS[3],
        Trial(4, size=LARGE),
        Trial(5, dtype=torch.bfloat16, name="five ranks"),
    ),
    act=runner.on_axis,
    draw=_flat,
    expected=lambda given: {"outputs": _total(given)},
    mistakes=(
        *_outputs(
            {
                "every rank returned its own x: nothing was added": lambda given: given["x"],
                "every rank has the x of rank 0: this is a broadcast": lambda given: given["x"][0],
                "this is the average over the ranks: expected the sum": (
                    lambda given: _total(given) / given.n
                ),
            }
        ),
        *(  # whichever piece a ring begins with
            Mistake(why, {"outputs": partial(_ring, start=start, **wrong)})
            for why, wrong in RINGS.items()
            for start in (0, -1)
        ),
    ),
    explain=_rounds_off,
    only=("send", "recv"),
    looks=(
        Look("wire", "messages and peers", _ring_messages),
        Look("wire", "bytes", _ring_bytes),
        Look("peak", "memory", _ring_peak),
    ),
    hang="In each turn a rank sends to one neighbor and receives from the other one",
    refused=tuple(
        f"course_lib.comm.from_messages:{half}_{name}"
        for half, names in (
            ("ring", ("reduce_scatter", "all_gather", "all_reduce")),
            ("tree", ("reduce", "broadcast", "all_reduce")),
        )
        for name in names
    ),
)


# --- 02-5 ----------------------------------------------------------------------------------------


def _rows(trial: Trial, draw: Draw) -> Any:
    shape = draw.shape()[1:]  # of a row: from no dimension to two
    return [{"x": _values(trial, draw, trial.n, *shape)} for _ in range(trial.n)]


def _exchanged(given: Given) -> list[Tensor]:
    return [torch.stack([x[rank] for x in given["x"]]) for rank in range(given.n)]


def _own_unset(given: Given) -> list[Tensor]:
    found = _exchanged(given)
    for rank, rows in enumerate(found):
        rows[rank] = float("nan")
    return found


def _as_they_arrive(given: Given) -> list[Tensor]:
    n = given.n
    return [
        torch.stack([given["x"][(rank - turn) % n][rank] for turn in range(n)]) for rank in range(n)
    ]


def _one_each(given: Given, ranks: list[Observed]) -> str:
    for rank, observed in enumerate(ranks):
        peers = _sent_to(given, observed)
        if sorted(peers) != [other for other in range(given.n) if other != rank]:
            return (
                f"expected one message from rank {rank} to every other rank, got messages to "
                f"{_listed(peers)}"
            )
    return ""


def _row_bytes(given: Given, ranks: list[Observed]) -> str:
    n, row = given.n, bytes_of(given["x"][0][0])
    for rank, observed in enumerate(ranks):
        if (sent := _payload(observed)) != (n - 1) * row:
            return (
                f"expected (n-1)/n S = {(n - 1) * row:,} bytes from rank {rank} for x of "
                f"{n * row:,}, got {sent:,}: send each rank its row, not all of x"
            )
    return ""


ALL_TO_ALL = OnRanks(
    id="02-5",
    title="all-to-all in raw torch.distributed",
    names=("all_to_all",),
    trials=(
        Trial(2),
        Trial(4, dtype=torch.float64),
        Trial(3, dtype=INT, name="three ranks, whole numbers"),
        Trial(5, dtype=torch.bfloat16, name="five ranks"),
        Trial(1),
    ),
    act=runner.on_default_group,
    draw=_rows,
    expected=lambda given: {"outputs": _exchanged(given)},
    mistakes=(
        *_outputs(
            {
                "every rank returned its own x: nothing was exchanged": lambda given: given["x"],
                "each rank sent its own row to all others: rank r needs row r of each": (
                    lambda given: torch.stack([x[rank] for rank, x in enumerate(given["x"])])
                ),
                "these are the right rows in another order: row s is the row that rank s sent": (
                    _as_they_arrive
                ),
            }
        ),
        Mistake(
            "the row that stays on its rank is missing: it needs no message, but a copy",
            {"outputs": _own_unset},
            unset=True,
        ),
    ),
    only=("send", "recv"),
    looks=(
        Look("wire", "messages and peers", _one_each),
        Look("wire", "bytes", _row_bytes),
    ),
    hang="Each rank starts one message to every other rank and one from it",
    refused=tuple(  # all of comm that sends, because the answer is to be raw torch
        f"course_lib.comm.{name}"
        for name in ("transfer:issue", "p2p:start_exchange", "p2p:start_send", "p2p:start_recv")
    ),
)

EXERCISES = (by_hand("02-1"), CROSSING, TREE, RING, ALL_TO_ALL)
