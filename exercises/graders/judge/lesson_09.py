"""Lesson 09, context parallelism: what the exercises give, and what they expect."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.cp.blockwise import PLAIN
from course_lib.cp.blockwise import merge as merge_into
from course_lib.grading.answers import NotRight, shown
from course_lib.grading.compare import agrees
from course_lib.grading.draw import Draw
from course_lib.grading.exercise import Answer, Case, Function, Instance, Wrong
from course_lib.grading.graders.by_hand import by_hand
from course_lib.grading.graders.runner import lesson_09 as runner
from course_lib.grading.ranked import OnRanks
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial, ranks_of
from course_lib.model import causal_attention

# --- 09-2 ----------------------------------------------------------------------------------------


def _chunks(*numbers: int, chunk: int) -> list[int]:
    """Return the positions of the chunks with these numbers."""
    return [place for each in numbers for place in range(each * chunk, (each + 1) * chunk)]


def _positions(rank: int, n: int, chunk: int) -> list[int]:
    return _chunks(rank, 2 * n - 1 - rank, chunk=chunk)


def _ranks(
    sizes: tuple[int, ...], low: int, high: int
) -> Callable[[random.Random], list[Instance]]:
    """Draw all ranks of one sequence, with ``low`` to ``high`` positions per chunk."""

    def draw(rng: random.Random) -> list[Instance]:
        n, chunk = rng.choice(sizes), rng.randint(low, high)
        return [{"rank": rank, "n": n, "chunk": chunk} for rank in range(n)]

    return draw


def _as_list(value: Any) -> list[int]:
    value = value.tolist() if hasattr(type(value), "tolist") else value
    if isinstance(value, str | dict) or not hasattr(type(value), "__iter__"):
        raise NotRight(f"expected positions, such as [0, 1, 6, 7], got {shown(value)}")
    found = list(value)
    for each in found:
        if isinstance(each, bool) or not hasattr(each, "__index__"):
            raise NotRight(f"expected whole numbers, got {shown(each)}")
    return [int(each) for each in found]


POSITIONS = Function(
    id="09-2",
    title="the positions of zig-zag",
    names=("positions",),
    mistakes=(
        Wrong(
            lambda rank, n, chunk: _chunks(2 * rank, 2 * rank + 1, chunk=chunk),
            "This is the contiguous layout: two neighboring chunks.",
        ),
        Wrong(
            lambda rank, n, chunk: [rank, 2 * n - 1 - rank],
            "These are the numbers of the chunks; return the positions in them.",
        ),
        Wrong(
            lambda rank, n, chunk: _chunks(rank, 2 * n - rank, chunk=chunk),
            "The last chunk is number 2n - 1: chunks are counted from 0.",
        ),
        Wrong(
            lambda rank, n, chunk: _chunks(rank, n - 1 - rank, chunk=chunk),
            "There are 2n chunks: each rank holds two of them.",
        ),
        Wrong(
            lambda rank, n, chunk: list(range(rank, 2 * n * chunk, n)),
            "This is the striped layout: every n-th position.",
        ),
        Wrong(
            lambda rank, n, chunk: _chunks(rank, n + rank, chunk=chunk),
            "These are chunks r and n + r, so the last rank computes more than the first. Count "
            "the second chunk from the end.",
        ),
        Wrong(
            lambda rank, n, chunk: (
                _chunks(rank, chunk=chunk) + _chunks(2 * n - 1 - rank, chunk=chunk)[::-1]
            ),
            "The positions are right, but the late ones descend: return them in ascending order.",
        ),
        Wrong(
            lambda rank, n, chunk: _chunks(2 * n - 1 - rank, rank, chunk=chunk),
            "The chunks are right, but the early one comes first.",
        ),
        Wrong(lambda rank, n, chunk: _chunks(rank, chunk=chunk), "The late chunk is missing."),
    ),
    reference=_positions,
    normal=_as_list,
    drawn=(
        Case("two ranks", _ranks((2,), 2, 5)),
        Case("three, five or six ranks", _ranks((3, 5, 6), 2, 5)),
        Case("seven to eleven ranks", _ranks((7, 9, 10, 11), 3, 7)),
        Case("chunks of one position", _ranks((3, 4, 5, 6), 1, 1)),
        Case("one rank", lambda rng: [{"rank": 0, "n": 1, "chunk": rng.randint(2, 4) + more}
                                      for more in (0, 40_000)]),
    ),
    refused=("course_lib.cp.layout:positions", "course_lib.cp.layout:ZIGZAG.chunks"),
)  # fmt: skip


# --- 09-3 ----------------------------------------------------------------------------------------


class _Pair:
    """(out, lse), equal to another pair up to rounding. An error of lse is one of the weights."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Pair):
            return False
        largest = other.lse.nan_to_num(posinf=0, neginf=0).abs().amax().item()
        terms = 16 + 2 * int(largest)
        return agrees(self.out, other.out, terms) and agrees(self.lse, other.lse, 16)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        dtype = "" if self.out.dtype == self.lse.dtype == torch.float32 else f" ({self.out.dtype})"
        return f"out {_digits(self.out)}, lse {_digits(self.lse)}{dtype}"


def _digits(x: Tensor) -> str:
    if x.dim():
        return f"[{', '.join(map(_digits, x))}]"
    return f"{x.item():.{7 if x.dtype == torch.float32 else 12}g}"


def _as_pair(value: Any) -> _Pair:
    try:
        out, lse = value
    except (TypeError, ValueError):
        raise NotRight(f"expected a pair (out, lse), got {shown(value)}") from None
    for name, each, shape in (("out", out, "rows, features"), ("lse", lse, "rows")):
        if not isinstance(each, Tensor):
            raise NotRight(f"expected {name} to be a tensor, got {shown(each)}")
        if each.dim() != shape.count(",") + 1:
            raise NotRight(f"expected {name} of shape [{shape}], got {list(each.shape)}")
    return _Pair(out.detach(), lse.detach())


def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.sigmoid(lse_2 - lse_1)[:, None]
    return out_1 + (out_2 - out_1) * weight, torch.logaddexp(lse_1, lse_2)


def _wrong(message: str, *, out: Answer | None = None, lse: Answer | None = None) -> Wrong:
    """Return a mistake in ``out``, in ``lse``, or in both."""
    return Wrong(
        lambda *given: (
            out(*given) if out else _merge(*given)[0],
            lse(*given) if lse else _merge(*given)[1],
        ),
        message,
    )


def _relative(message: str, top: Callable[[Tensor, Tensor], Any], *, lse: bool = True) -> Wrong:
    """Return the mistake of a merge with exponentials relative to ``top``."""

    def sums(lse_1: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
        return (lse_1 - top(lse_1, lse_2)).exp(), (lse_2 - top(lse_1, lse_2)).exp()

    def merged(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Tensor:
        a, b = sums(lse_1, lse_2)
        return (a[:, None] * out_1 + b[:, None] * out_2) / (a + b)[:, None]

    def added(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> Tensor:
        return top(lse_1, lse_2) + sum(sums(lse_1, lse_2)).log()

    return _wrong(message, out=merged, lse=added if lse else None)


FAR = (
    "exp of this difference is infinite where lse_2 is far larger: subtract the larger of the two."
)


Ranges = tuple[tuple[float, float], ...]


def _blocks(
    low: float, high: float, *, apart: Ranges = ((0.1, 4), (5, 10)), empty: bool = False,
    wide: bool = False,
) -> Callable[[random.Random], list[Instance]]:  # fmt: skip
    """Draw attentions on two blocks. ``low`` and ``high`` bound lse, per row; ``apart`` bounds the
    distance of the lse of the two blocks in one row after the other, and it is 0 in the last row.
    ``empty`` rows see no key of the first block. ``wide`` is float64 with gaps between elements."""

    def draw(rng: random.Random) -> list[Instance]:
        found = []
        dtype = torch.float64 if wide else torch.float32
        for rows, features in ((1, rng.randint(2, 4)), (rng.randint(2, 4), 1), (4, 2)):
            values = Draw(0, rng.randrange(2**31), dtype)
            middle = torch.tensor([rng.uniform(low, high) for _ in range(rows)], dtype=dtype)
            bounds = [apart[(row + rows) % len(apart)] for row in range(rows)]
            far = [rng.uniform(*each) * rng.choice((-1, 1)) for each in bounds]
            far[-1] *= rows == 1
            lse_1, lse_2 = middle, middle + torch.tensor(far, dtype=dtype)
            out_1, out_2 = values.normal(2, features, rows).mT if wide else values.normal(
                2, rows, features)  # fmt: skip
            if empty:
                out_1[: (rows + 1) // 2], lse_1[: (rows + 1) // 2] = 0.0, -torch.inf
            found.append({"out_1": out_1, "lse_1": lse_1, "out_2": out_2, "lse_2": lse_2})
        return found

    return draw


MERGE = Function(
    id="09-3",
    title="merge two partial attentions",
    names=("merge",),
    mistakes=(
        _wrong(
            "This is the mean of the outputs: the block with the larger sum weighs more.",
            out=lambda out_1, lse_1, out_2, lse_2: (out_1 + out_2) / 2,
        ),
        _wrong(
            "This is the sum of the outputs: the weights add up to 1.",
            out=lambda out_1, lse_1, out_2, lse_2: out_1 + out_2,
        ),
        _wrong(
            "The weights of the two blocks are exchanged.",
            out=lambda out_1, lse_1, out_2, lse_2: _merge(out_2, lse_1, out_1, lse_2)[0],
        ),
        _wrong(
            "out is right. lse: add the sums of exponentials, not their logarithms.",
            lse=lambda out_1, lse_1, out_2, lse_2: lse_1 + lse_2,
        ),
        _wrong(
            "out is right. lse: this is the larger of the two, not the logarithm of the sum.",
            lse=lambda out_1, lse_1, out_2, lse_2: torch.maximum(lse_1, lse_2),
        ),
        _wrong(
            "out is right. lse: the mean of two logarithms is not the logarithm of the sum.",
            lse=lambda out_1, lse_1, out_2, lse_2: (lse_1 + lse_2) / 2,
        ),
        _wrong(
            "The outputs are weighted by the logarithms: the weights are their exponentials.",
            out=lambda out_1, lse_1, out_2, lse_2: (
                out_1 + (out_2 - out_1) * (lse_2 / (lse_1 + lse_2))[:, None]
            ),
        ),
        _wrong(
            "The outputs are already divided by their own sums: divide by the new sum too.",
            out=lambda out_1, lse_1, out_2, lse_2: (
                lse_1.exp()[:, None] * out_1 + lse_2.exp()[:, None] * out_2
            ),
        ),
        Wrong(lambda *given: given[2:], "This is the second block alone."),
        _relative(
            "exp of a large lse is infinite or 0 in float32: take exp of differences only.",
            lambda lse_1, lse_2: torch.zeros_like(lse_1),
        ),
        _relative(
            "One maximum for all rows: exp is 0 in a row far below it. Take one per row.",
            lambda lse_1, lse_2: torch.maximum(lse_1.max(), lse_2.max()),
        ),
        _relative(FAR, lambda lse_1, lse_2: lse_1),
        _relative(FAR, lambda lse_1, lse_2: lse_1, lse=False),
    ),
    reference=_merge,
    normal=_as_pair,
    drawn=(
        Case("two blocks", _blocks(-2, 2)),
        Case("rows that see no key of the first block", _blocks(-2, 2, empty=True)),
        Case("lse beyond the range of exp", _blocks(150, 300)),
        Case("lse far below zero", _blocks(-300, -150)),
        Case("rows with lse far from each other", _blocks(-400, 400)),
        Case("blocks with lse far from each other", _blocks(-100, 100, apart=((100, 300),))),
        Case("float64, with gaps between elements", _blocks(-2, 2, apart=((10, 28),), wide=True)),
    ),
    refused=("course_lib.cp.blockwise:merge",),
)


# --- 09-4 ----------------------------------------------------------------------------------------


def _sequence(trial: Trial, draw: Draw) -> Any:
    """On three ranks one sequence, one position per rank and, in the second call, one head."""
    least = trial.n == 3
    groups, group, features = draw.size(1, 2), draw.size(1, 3), draw.size(2, 5)
    groups, group = (1, 1) if least and draw.call else (groups, group)
    batch, rows = (1, 3) if least else (draw.size(1, 3), trial.n * draw.size(2, 4))
    shapes = {"q": (batch, groups * group, rows, features)}
    shapes |= dict.fromkeys("kv", (batch, rows, groups, features))
    whole = {name: draw.normal(*shape) for name, shape in shapes.items()}
    whole["q"] = whole["q"].transpose(1, 2)
    return [
        {name: x.chunk(trial.n, 1)[rank].clone() for name, x in whole.items()}
        for rank in range(trial.n)
    ], whole


def _ring(
    given: Given,
    *,
    own: bool = True,
    other: bool = False,
    later: bool = False,
    turns: int = 99,
    late: int = 0,
    backward: bool = False,
    add: str = "merge",
) -> list[Tensor]:
    """Return each rank's output with a mistake. ``own`` and ``other`` say which blocks get the
    causal mask; in a turn the answer takes the block for that of ``late`` ranks before."""
    found = []
    for rank, q in enumerate(given["q"]):
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for turn in range(min(given.n, turns)):
            source = (rank + turn if backward else rank - turn) % given.n
            taken = (rank - turn - late) % given.n
            if taken > rank and not later:
                continue
            causal = own if taken == rank else other
            block = PLAIN.forward(q, given["k"][source], given["v"][source], causal)
            if add == "merge":
                merge_into(out, lse, *block)
            else:
                out = out + block[0] if add == "sum" else block[0]
        found.append(out)
    return found


def wrong_ring(message: str, **mistake: Any) -> Mistake:
    return Mistake(message, {"outputs": lambda given: _ring(given, **mistake)})


SOURCE = "in turn t rank r has the block of rank (r - t) mod n, not of another rank"


def _block(given: Given, rank: int = 0) -> int:
    return int(given["k"][rank].nbytes + given["v"][rank].nbytes)


def _messages(given: Given, ranks: list[Observed]) -> str:
    for rank, seen in enumerate(ranks):
        following = (rank + 1) % given.n
        sent = sum(_block(given, other) for other in ranks_of(given) if other != following)
        if others := sorted({call.op for call in seen.calls} - {"send", "recv"}):
            return (
                f"expected rank {rank} to send messages only, got {', '.join(others)}: the ring "
                "sends each block from a rank to the next"
            )
        sends = [call for call in seen.calls if call.op == "send"]
        peers = sorted({call.ranks[call.peer] for call in sends if call.peer is not None})
        if peers != [seen.values["next"]]:
            to = f"messages to ranks {', '.join(map(str, peers))}" if peers else "no message"
            return f"expected rank {rank} to send to the next rank of the axis only, got {to}"
        got = sum(call.payload for call in sends)
        if got != sent:
            return (
                f"expected rank {rank} to send {sent:,} bytes, K and V of all ranks but the "
                f"next one, got {got:,} bytes"
            )
    return ""


def _attended(given: Given, ranks: list[Observed]) -> str:
    for rank, seen in enumerate(ranks):
        if (got := len(seen.values["blocks"])) != rank + 1:
            return (
                f"expected rank {rank} to call attend {rank + 1} times, got {got}: its queries see "
                "its own block and those of earlier ranks"
            )
    return ""


def _ahead(given: Given, ranks: list[Observed]) -> str:
    block = _block(given)
    for rank, seen in enumerate(ranks):
        for turn, (sent, received) in enumerate(seen.values["blocks"]):
            place = f"rank {rank}, turn {turn}"
            if sent // block < min(turn + 1, given.n - 1):
                return (
                    f"{place}: expected the next exchange to be started before attend, got none: "
                    "start it, call attend, and then wait"
                )
            if received // block > turn:
                return (
                    f"{place}: the next block was waited for before attend was called on this one: "
                    "start the exchange, call attend, and then wait"
                )
    return ""


RING = OnRanks(
    id="09-4",
    title="ring attention forward",
    names=("ring_attention",),
    act=runner.ring,
    draw=_sequence,
    expected=lambda given: {
        "outputs": list(causal_attention(*given.whole.values()).chunk(given.n, 1))
    },
    terms=64,
    mistakes=(
        wrong_ring(
            "each rank attended to its own block alone: the blocks of earlier ranks are missing",
            turns=1,
        ),
        wrong_ring("queries saw keys of later ranks: only pass these blocks on", later=True),
        wrong_ring("no score is masked: a query sees no later position", later=True, own=False),
        wrong_ring("the causal mask was used on blocks of earlier ranks too", other=True),
        wrong_ring("the own block needs the causal mask: a query sees no later key", own=False),
        wrong_ring("the blocks' outputs are summed: weigh them by their log-sum-exp", add="sum"),
        wrong_ring("only the last block is in the result: merge all blocks", add="last"),
        wrong_ring(SOURCE, late=1),
        wrong_ring(SOURCE, late=-1),
        wrong_ring(
            "blocks are sent to the previous rank: send them to the next one", backward=True
        ),
    ),
    looks=(
        Look("wire", "messages to the next rank, K and V only", _messages),
        Look("wire", "blocks attended to", _attended),
        Look("wire", "the next block is in flight during attend", _ahead),
    ),
    hang="A rank whose queries need no more blocks must still pass on the blocks that other ranks "
    "wait for",
    refused=(
        "course_lib.cp.ring:RingAttention.forward",
        "course_lib.cp.gather:GatherAttention.forward",
        "course_lib.cp.blockwise:attend",
        "course_lib.comm.p2p:ring",
    ),
)


# --- 09-5 ----------------------------------------------------------------------------------------

ROWS, HEADS = 1, 2  # dimensions
SHARDED = {"outputs of to_rows": "q", "outputs of attention between them": "y",
           "gradients of q": "dq", "gradients of k": "dk", "gradients of v": "dv"}  # fmt: skip


def _heads(trial: Trial, draw: Draw) -> Any:
    """On three ranks one sequence, and one position and, in the second call, one head per rank."""
    least = trial.n == 3
    groups, group, features = draw.size(1, 2), draw.size(1, 3), draw.size(1, 5)
    groups, group = (1, 1) if least and draw.call else (groups, group)
    batch, rows = (1, 3) if least else (draw.size(2, 3), trial.n * draw.size(1, 4))
    heads = dict.fromkeys(("q", "dy"), groups * group) | dict.fromkeys("kv", groups)
    whole = {
        name: draw.normal(batch, rows, trial.n * heads[name], features)
        for name in ("q", "k", "v", "dy")
    }
    return [
        {name: x.chunk(trial.n, ROWS)[rank].contiguous() for name, x in whole.items()}
        for rank in range(trial.n)
    ], whole


def _attention(given: Given) -> dict[str, Any]:
    leaves = [given.whole[name].clone().requires_grad_() for name in "qkv"]
    y = causal_attention(*leaves)
    dq, dk, dv = torch.autograd.grad(y, leaves, given.whole["dy"])
    whole = {"q": given.whole["q"], "y": y.detach(), "dq": dq, "dk": dk, "dv": dv}
    found = {name: list(whole[key].chunk(given.n, ROWS)) for name, key in SHARDED.items()}
    return {"outputs of to_heads": list(whole["q"].chunk(given.n, HEADS)), **found}


ORDER = "the heads are in the wrong order: join the received shards along dim 2"


def _joined(name: str, message: str, change: Callable[[Tensor, int], Any]) -> Mistake:
    """Return a mistake in what function ``name`` joins: ``change(x, n)`` is its result by rank."""
    return Mistake(message, {f"outputs of {name}": lambda given: list(
        change(given.whole["q"], given.n))})  # fmt: skip


def _torn(x: Tensor, n: int) -> list[Tensor]:
    """Read the stacked shards that arrived as if they were joined."""
    shape = (x.shape[0], x.shape[1], x.shape[2] // n, x.shape[3])
    return [torch.stack(heads.chunk(n, ROWS)).reshape(shape) for heads in x.chunk(n, HEADS)]


def _flat(x: Tensor, n: int) -> list[Tensor]:
    """Split the memory of x in place of its heads."""
    shape = (x.shape[0], x.shape[1], x.shape[2] // n, x.shape[3])
    runs = [rows.reshape(-1).chunk(n) for rows in x.chunk(n, ROWS)]
    return [torch.cat([run[rank] for run in runs]).view(shape) for rank in range(n)]


def _by_rank(x: Tensor, n: int) -> list[Tensor]:
    """Return the heads of each rank, of one rank's rows: [n, rows of the rank, ...]."""
    return [torch.stack(rows.chunk(n, HEADS)) for rows in x.chunk(n, ROWS)]


def _ways(given: Given, ranks: list[Observed]) -> str:
    for rank, seen in enumerate(ranks):
        for name, size, calls in seen.values["ways"]:
            exchanged = [payload for op, payload in calls if op == "all_to_all"]
            sent = sum(payload for op, payload in calls if op == "send")
            others = {op for op, _ in calls} - {"all_to_all", "send", "recv"}
            by_messages = not exchanged and sent == size * (given.n - 1) // given.n
            if others or not ((exchanged == [size] and not sent) or by_messages):
                made = ", ".join(f"{op} of {payload:,} bytes" for op, payload in calls)
                return (
                    f"{name}: expected one all_to_all of {size:,} bytes, which is x, from rank "
                    f"{rank}, got {made or 'no network operation'}"
                )
    return ""


ULYSSES = OnRanks(
    id="09-5",
    title="Ulysses' all-to-all in raw PyTorch",
    names=("to_heads", "to_rows"),
    axes=("outputs", "gradients"),
    trials=(Trial(2), Trial(4, dtype=torch.float64, strided=True), Trial(3), Trial(1)),
    act=runner.ulysses,
    draw=_heads,
    expected=_attention,
    terms=64,
    mistakes=(
        _joined("to_heads", "no rank exchanged anything", lambda x, n: x.chunk(n, ROWS)),
        _joined(
            "to_heads",
            "rank r has every n-th head: it needs neighboring heads, as chunk gives them",
            lambda x, n: [x[:, :, rank::n] for rank in range(n)],
        ),
        _joined(
            "to_heads",
            "the positions are not joined in the order of the ranks",
            lambda x, n: [torch.cat(y.chunk(n, ROWS)[::-1], ROWS) for y in x.chunk(n, HEADS)],
        ),
        _joined("to_heads", "the heads of rank n - 1 - r", lambda x, n: x.chunk(n, HEADS)[::-1]),
        _joined("to_heads", "join the received shards along dim 1, the positions", _torn),
        _joined("to_heads", "all_to_all_single splits along dim 0: stack the shards first", _flat),
        _joined(
            "to_rows",
            f"{ORDER}, one rank after the other",
            lambda x, n: [torch.stack(list(y), 3).flatten(2, 3) for y in _by_rank(x, n)],
        ),
        _joined(
            "to_rows",
            f"{ORDER}, in the order of the ranks",
            lambda x, n: [torch.cat(list(y)[::-1], HEADS) for y in _by_rank(x, n)],
        ),
    ),
    looks=(Look("wire", "one all-to-all each way", _ways),),
    refused=("course_lib.comm.transfer:issue",),
)  # fmt: skip


EXERCISES = (by_hand("09-1"), POSITIONS, MERGE, RING, ULYSSES)
