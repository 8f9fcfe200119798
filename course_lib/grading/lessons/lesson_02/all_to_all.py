"""02-5: all-to-all from messages, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import agrees, difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_02.messages import (
    REFUSAL,
    left_alone,
    made_of_messages,
    sent_to,
)
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial, unwaited
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 3), Trial(4, 500), Trial(3, 2), Trial(1, 4))


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor]:
    """On four ranks a row is a matrix, and in double precision: [n, ...] of any dtype."""
    generator = torch.Generator().manual_seed(seed + rank)
    if trial.n == 4:
        return (torch.randn(4, trial.size, 2, generator=generator, dtype=torch.float64),)
    return (torch.randn(trial.n, trial.size, generator=generator),)


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    return answers[0](inputs[0])


def _given(seen: Seen) -> list[Tensor]:
    return [_inputs(seen.trial, rank, seen.seed)[0] for rank in range(seen.trial.n)]


@made_of_messages
def _swapped(seen: Seen) -> str:
    """Row s of the result of rank r is row r of rank s."""
    given, n = torch.stack(_given(seen)), seen.trial.n
    wanted = [given[:, rank] for rank in range(n)]
    says = difference("outputs", seen.values, wanted)
    if not says or n == 1 or any(not _alike(seen.values[r], wanted[r]) for r in range(n)):
        return says
    return f"{_mistake(seen.values, given)}{says}"


def _alike(value: Any, wanted: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == wanted.shape


def _mistake(values: Sequence[Tensor], given: Tensor) -> str:
    """The classic mistake that gives these results; given[s, r] is row r of rank s."""
    n = len(given)
    if all(agrees(value, given[rank]) for rank, value in enumerate(values)):
        return "every rank gives its own x back, nothing was exchanged: "
    own = list(range(n))
    if all(agrees(value, given[own, own]) for value in values):
        return "each rank sent its own row to everybody; rank r is to get row r of each: "
    off = [[s for s in range(n) if not agrees(values[r][s], given[s, r])] for r in range(n)]
    if all(rows == [rank] for rank, rows in enumerate(off)):
        return "the row that stays on its rank is missing: it needs no message, but a copy: "
    if all(_same_rows(values[r], given[:, r]) for r in range(n)):
        return "these are the right rows in another order; row s is what rank s has sent: "
    return ""


def _same_rows(value: Tensor, wanted: Tensor) -> bool:
    return all(any(agrees(row, one) for one in value) for row in wanted)


def _peers(seen: Seen) -> str:
    """One message to every other rank."""
    n = seen.trial.n
    for rank, observed in enumerate(seen.ranks):
        peers = sent_to(observed)
        if sorted(peers) != [other for other in range(n) if other != rank]:
            named = ", ".join(map(str, peers)) or "nobody"
            return f"rank {rank} sent to {named}; one message to every other rank is wanted"
    return unwaited(seen)


def _bytes(seen: Seen) -> str:
    """(n-1)/n S: to each other rank its row."""
    n, row = seen.trial.n, _given(seen)[0][0].nbytes
    for rank, observed in enumerate(seen.ranks):
        sent = sum(call.payload for call in observed.calls if call.op == "send")
        if sent != (n - 1) * row:
            return (
                f"rank {rank} sent {sent:,} bytes for x of {n * row:,}; (n-1)/n S are "
                f"{(n - 1) * row:,}: send each rank its row, not all of x"
            )
    return ""


def _in_one_batch(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    others = [other for other in range(n) if other != rank]
    operations = [dist.P2POp(dist.isend, x[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, result[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return result


def _without_waiting(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(row) for row in x]
    rows[rank] = x[rank].clone()
    for other in range(n):
        if other != rank:
            dist.isend(x[other], other)
            dist.irecv(rows[other], other)
    return torch.stack(rows)


def _lower_rank_first(x: Tensor) -> Tensor:
    """Blocking calls alone: of each pair the lower rank sends first."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [row.clone() for row in x]
    for other in range(n):
        if rank < other:
            dist.send(x[other], other)
            dist.recv(rows[other], other)
        elif rank > other:
            dist.recv(rows[other], other)
            dist.send(x[other], other)
    return torch.stack(rows)


def _of_vectors(x: Tensor) -> Tensor:
    """Into buffers of float32, as long as a row of a matrix."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty(x.shape[1]) for _ in range(n)]
    rows[rank] = x[rank].clone()
    others = [other for other in range(n) if other != rank]
    operations = [dist.P2POp(dist.isend, x[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, rows[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return torch.stack(rows)


def _turn_by_turn(
    x: Tensor, *, sends: str = "row", keeps_own: bool = True, in_order: bool = True
) -> Tensor:
    """n-1 turns; in turn t a rank sends to the rank t above and hears from the one t below."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = [torch.zeros_like(row) for row in x]
    arrived = [x[rank].clone()]
    if keeps_own:
        rows[rank] = x[rank].clone()
    for turn in range(1, n):
        to, source = (rank + turn) % n, (rank - turn) % n
        out = {"row": x[to], "own": x[rank], "all": x}[sends].contiguous()
        into = torch.empty_like(out)
        operations = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        rows[source] = into[rank] if sends == "all" else into
        arrived.append(rows[source])
    return torch.stack(rows if in_order else arrived)


def _send_first(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()
    for other in range(n):
        if other != rank:
            dist.send(x[other], other)
    for other in range(n):
        if other != rank:
            dist.recv(result[other], other)
    return result


def _through_rank_0(x: Tensor) -> Tensor:
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        result = torch.empty_like(x)
        dist.recv(result, 0)
        return result
    every = [x.clone() for _ in range(n)]
    for other in range(1, n):
        dist.recv(every[other], other)
    for other in range(1, n):
        dist.send(torch.stack([rows[other] for rows in every]), other)
    return torch.stack([rows[0] for rows in every])


def _collective(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x)
    return result


def _gathered(x: Tensor) -> Tensor:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return torch.stack([rows[dist.get_rank()] for rows in every])


def _by_comm(x: Tensor) -> Tensor:
    world = make_mesh().world
    rows = [(x[other], other) for other in range(world.size) if other != world.rank]
    received = comm.start_exchange(world, rows, rows).wait() if rows else []
    received.insert(world.rank, x[world.rank])
    return torch.stack(received)


def _as_arguments(x: Tensor) -> Tensor:
    """As a study note has it: send with async_op, which send has not."""
    dist.send(x[0], dst=0, async_op=True)  # type: ignore[call-arg]
    return x


ALL_TO_ALL = Ranked(
    id="02-5",
    title="all-to-all in raw torch.distributed",
    names=("all_to_all",),
    hints=(
        "Which rows of x leave the rank, and which row stays? Who sends the row that is to stand "
        "in row s of your result?",
        "For each other rank: an isend of x[other], an irecv into row `other` of the result. Start "
        "all of them, then wait. The own row is copied.",
        "result = x.clone(); for every other rank dist.P2POp(dist.isend, x[other], other) and "
        "dist.P2POp(dist.irecv, result[other], other); dist.batch_isend_irecv(operations), then "
        "wait() for each. Alone there are no operations.",
    ),
    wrong=(
        Wrong(lambda x: x, words="nothing was exchanged"),
        Wrong(lambda x: None, words="from rank 0, got a NoneType"),
        Wrong(lambda x: _turn_by_turn(x, keeps_own=False), words="it needs no message, but a copy"),
        Wrong(lambda x: _turn_by_turn(x, in_order=False), words="the right rows in another order"),
        Wrong(lambda x: _turn_by_turn(x, sends="own"), words="its own row to everybody"),
        Wrong(lambda x: _turn_by_turn(x, sends="all"), words="send each rank its row, not all"),
        Wrong(lambda x: _turn_by_turn(x).T, words="expected "),
        Wrong(_of_vectors, words="compare calls, peers and shapes by rank"),
        Wrong(_without_waiting, words="started 2 messages and waited for 0 of them"),
        Wrong(_send_first, words="every rank waits in send"),
        Wrong(_through_rank_0, words="one message to every other rank is wanted"),
        Wrong(_collective, words="called all_to_all: use send and recv alone"),
        Wrong(_gathered, words="called all_gather: use send and recv alone"),
        Wrong(_by_comm, words=REFUSAL),
        Wrong(_as_arguments, words="unexpected keyword argument 'async_op'"),
        Wrong(lambda x: x.copy_(_turn_by_turn(x)), words="x was written"),
    ),
    right=(_in_one_batch, _lower_rank_first, _turn_by_turn),
    stub=lambda x: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _swapped),
        RankCase("outputs", "four ranks", FOUR, _swapped),
        RankCase("outputs", "three ranks", THREE, _swapped),
        RankCase("outputs", "x is left as it is", FOUR, left_alone(_given), later=True),
        RankCase("outputs", "one rank", ONE, _swapped),
        RankCase("wire", "messages and peers", FOUR, _peers),
        RankCase("wire", "bytes", FOUR, _bytes),
    ),
    refused=tuple(  # of comm, all that sends: the answer is to be torch's own words
        f"course_lib.comm.{name}"
        for name in ("transfer:issue", "p2p:start_exchange", "p2p:start_send", "p2p:start_recv")
    ),
)
