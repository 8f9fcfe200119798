"""09-5: Ulysses' all-to-all, there and back, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import agrees, difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.grading.wire import WireCall, WireCalls
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import causal_attention

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 4), Trial(4, 8), Trial(3, 3), Trial(1, 2))  # size: heads
BATCH, ROWS, HEAD = 2, 3, 4  # sequences, positions of a rank, features of a head
REFUSAL = "this is what you are asked to write"
Move = Callable[[Tensor], Tensor]


def _whole(trial: Trial, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, of all positions and heads."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, trial.n * ROWS, trial.size, HEAD)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Tensor, ...]:
    return tuple(x.chunk(trial.n, 1)[rank].clone() for x in _whole(trial, seed))


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """There, attention, back; its backward by the same two; and the calls of one way each."""
    to_heads, to_rows = answers
    *qkv, dy = (x.clone() for x in inputs)
    with WireCalls() as there:
        first = to_heads(inputs[0])
    if not isinstance(first, Tensor):
        return {"there": first}
    shape = (BATCH, mesh.world.size * ROWS, qkv[0].shape[2] // mesh.world.size, HEAD)
    if first.shape != shape:
        return {"there": first.detach().clone(), "calls there": there.calls}
    with WireCalls() as back:
        returned = to_rows(first.detach().clone())
    found: dict[str, Any] = {
        "there": first.detach().clone(),
        "back": returned,
        "calls there": there.calls,
        "calls back": back.calls,
    }
    if not isinstance(returned, Tensor) or returned.shape != qkv[0].shape:
        return found
    leaves = [to_heads(x).detach().clone().requires_grad_() for x in qkv]
    y = causal_attention(*leaves)
    found["y"] = to_rows(y.detach().contiguous())
    y.backward(to_heads(dy).detach())
    found["gradients"] = [
        to_rows(leaf.grad.contiguous()) for leaf in leaves if leaf.grad is not None
    ]
    return found


@cache
def _serial(trial: Trial, seed: int) -> list[Tensor]:
    """The output and the gradients of q, k and v in one process."""
    *qkv, dy = _whole(trial, seed)
    leaves = [x.requires_grad_() for x in qkv]
    y = causal_attention(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _there(seen: Seen) -> str:
    n = seen.trial.n
    whole = _whole(seen.trial, seen.seed)[0]
    got = [value["there"] for value in seen.values]
    says = difference("outputs of to_heads", got, list(whole.chunk(n, 2)))
    if not says or n == 1:
        return says
    for mistaken, message in (
        (list(whole.chunk(n, 1)), "to_heads gives x back: nothing was exchanged"),
        (
            [whole[:, :, rank::n] for rank in range(n)],
            "rank r has every n-th head; it is to have neighbours, as chunk gives them",
        ),
        (
            [torch.cat(x.chunk(n, 1)[::-1], 1) for x in whole.chunk(n, 2)],
            "the positions are joined in another order than that of the ranks",
        ),
        (list(whole.chunk(n, 2))[::-1], "rank r has the heads of rank n - 1 - r"),
        (_torn(whole, n), _TORN),
        (_flat(whole, n), _FLAT),
    ):
        if not difference("", got, mistaken):
            return f"{message} ({says})"
    return says


_TORN = (
    "positions of other ranks stand where other sequences belong: join what came along dim 1, "
    "torch.cat(list(received), 1)"
)
_FLAT = (
    "all_to_all_single cuts along dim 0: x has its sequences there, and heads are to be cut; "
    "stack the pieces first"
)


def _torn(whole: Tensor, n: int) -> list[Tensor]:
    """The pieces read as if they were already joined."""
    shape = (BATCH, n * ROWS, whole.shape[2] // n, HEAD)
    pieces = [torch.stack(heads.chunk(n, 1)) for heads in whole.chunk(n, 2)]
    return [received.reshape(shape) for received in pieces]


def _flat(whole: Tensor, n: int) -> list[Tensor]:
    """The memory of x cut into n runs."""
    shape = (BATCH, n * ROWS, whole.shape[2] // n, HEAD)
    runs = [x.contiguous().view(-1).chunk(n) for x in whole.chunk(n, 1)]
    return [torch.cat([run[rank] for run in runs]).view(shape) for rank in range(n)]


def _back(seen: Seen) -> str:
    n = seen.trial.n
    rows = list(_whole(seen.trial, seen.seed)[0].chunk(n, 1))
    if any("back" not in value for value in seen.values):
        return f"to_heads is wrong, and to_rows is not looked at: {_there(seen)}"
    got = [value["back"] for value in seen.values]
    says = difference("outputs of to_rows", got, rows)
    if says and n > 1 and all(_permuted(one, right) for one, right in zip(got, rows, strict=True)):
        return f"these are the right numbers in the wrong heads: join along dim 2, heads ({says})"
    return says


def _permuted(one: Any, right: Tensor) -> bool:
    """Whether every position has its own numbers, in another order."""
    if not isinstance(one, Tensor) or one.shape != right.shape:
        return False
    return agrees(one.flatten(2).sort(-1).values, right.flatten(2).sort(-1).values)


def _attention(seen: Seen) -> str:
    got = [value.get("y") for value in seen.values]
    return difference(
        "outputs", got, list(_serial(seen.trial, seen.seed)[0].chunk(seen.trial.n, 1))
    )


def _gradients(seen: Seen) -> str:
    for place, name in enumerate("qkv"):
        right = list(_serial(seen.trial, seen.seed)[1 + place].chunk(seen.trial.n, 1))
        got = [value["gradients"][place] if "gradients" in value else None for value in seen.values]
        if says := difference(f"gradients of {name}", got, right):
            return says
    return ""


def _calls(seen: Seen) -> str:
    """One all-to-all each way, as large as x; or its messages."""
    n, payload = seen.trial.n, _inputs(seen.trial, 0, seen.seed)[0].nbytes
    for rank, value in enumerate(seen.values):
        for name in ("there", "back"):
            calls = value.get(f"calls {name}", [])
            if says := _said(calls, payload, n):
                which = "to_heads" if name == "there" else "to_rows"
                return f"{which}: rank {rank} {says}"
    return ""


def _said(calls: Sequence[WireCall], payload: int, n: int) -> str:
    others = sorted({call.op for call in calls} - {"all_to_all", "send", "recv"})
    if others:
        return f"called {', '.join(others)}; all_to_all sends (n-1)/n of x, and nothing in vain"
    sent = sum(call.payload if call.op == "send" else 0 for call in calls)
    exchanged = sum(call.payload for call in calls if call.op == "all_to_all")
    if exchanged not in (0, payload) or sent not in (0, payload * (n - 1) // n):
        return f"handed over {exchanged + sent:,} bytes; x has {payload:,}, and goes once"
    return "" if exchanged or sent else "sent nothing"


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        given = _inputs(seen.trial, rank, seen.seed)
        if not all(map(torch.equal, observed.inputs, given)):
            return f"rank {rank} wrote into what it was given: x stays as it is"
    return ""


# --- answers -------------------------------------------------------------------------------------


def _swap(x: Tensor, split: int, join: int, *, back: bool = False) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, split))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    parts = list(received)
    return torch.cat(parts[::-1] if back else parts, join)


def _to_heads(x: Tensor) -> Tensor:
    return _swap(x, 2, 1)


def _to_rows(x: Tensor) -> Tensor:
    return _swap(x, 1, 2)


def _lists_to_heads(x: Tensor) -> Tensor:
    """By messages, the own piece copied."""
    return torch.cat(_messages(x.chunk(dist.get_world_size(), 2)), 1)


def _lists_to_rows(x: Tensor) -> Tensor:
    return torch.cat(_messages(x.chunk(dist.get_world_size(), 1)), 2)


def _messages(pieces: Sequence[Tensor]) -> list[Tensor]:
    rank = dist.get_rank()
    leaving = [piece.contiguous() for piece in pieces]
    arriving = [torch.empty_like(piece) for piece in leaving]
    arriving[rank] = leaving[rank].clone()
    others = [other for other in range(len(leaving)) if other != rank]
    operations = [dist.P2POp(dist.isend, leaving[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, arriving[other], other) for other in others]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return arriving


def _permuted_to_heads(x: Tensor) -> Tensor:
    """With reshapes and permutations alone."""
    n = dist.get_world_size()
    batch, rows, heads, features = x.shape
    pieces = x.reshape(batch, rows, n, heads // n, features).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.permute(1, 0, 2, 3, 4).reshape(batch, n * rows, heads // n, features)


def _permuted_to_rows(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    batch, positions, heads, features = x.shape
    pieces = x.reshape(batch, n, positions // n, heads, features).transpose(0, 1).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    rows = received.permute(1, 2, 0, 3, 4)
    return rows.reshape(batch, positions // n, n * heads, features)


def _gathered(x: Tensor) -> list[Tensor]:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    return every


def _gathers_heads(x: Tensor) -> Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat(_gathered(x), 1).chunk(n, 2)[rank]


def _gathers_rows(x: Tensor) -> Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat(_gathered(x), 2).chunk(n, 1)[rank]


def _memory_as_it_lies(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    received = torch.empty_like(x)
    dist.all_to_all_single(received.view(-1), x.view(-1))
    return received.view(x.shape[0], n * x.shape[1], x.shape[2] // n, x.shape[3])


def _not_joined(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, 2))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.view(x.shape[0], n * x.shape[1], x.shape[2] // n, x.shape[3])


def _every_nth(x: Tensor) -> Tensor:
    n = dist.get_world_size()
    pieces = torch.stack([x[:, :, rank::n] for rank in range(n)])
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _rows_in_stripes(x: Tensor) -> Tensor:
    """Back, with heads of all ranks by turns."""
    n = dist.get_world_size()
    pieces = torch.stack(x.chunk(n, 1))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.stack(list(received), 3).flatten(2, 3)


def _twice(x: Tensor) -> Tensor:
    return _to_heads(_to_rows(_to_heads(x)))


def _spoilt(x: Tensor) -> Tensor:
    moved = _to_heads(x)
    x.zero_()
    return moved


def _strided(x: Tensor) -> Tensor:
    """Hands over pieces that are no memory of their own."""
    n = dist.get_world_size()
    pieces = x.unflatten(2, (n, -1)).movedim(2, 0)
    received = torch.empty(pieces.shape)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)


def _by_comm(x: Tensor) -> Tensor:
    return comm.all_to_all(x, make_mesh().world, 2, 1)


SWAP = Ranked(
    id="09-5",
    title="Ulysses' all-to-all in raw PyTorch",
    names=("to_heads", "to_rows"),
    hints=(
        "Before: few positions of all heads. After: all positions of few heads. Which piece of x "
        "does rank r want, and where does what comes from rank s belong?",
        "Cut x along heads into n pieces, stack them so that piece r is pieces[r], exchange, and "
        "join what came along positions, in rank order. Back: cut along positions, join along "
        "heads.",
        "pieces = torch.stack(x.chunk(n, 2)); received = torch.empty_like(pieces); "
        "dist.all_to_all_single(received, pieces); return torch.cat(list(received), 1). Back: "
        "chunk(n, 1) and cat(..., 2).",
    ),
    wrong=(
        Wrong((lambda x: None, _to_rows), words="from rank 0, got a NoneType"),
        Wrong((lambda x: x, lambda x: x), words="nothing was exchanged"),
        Wrong((_gathers_heads, _to_rows), words="to_heads: rank 0 called all_gather"),
        Wrong((_to_heads, _gathers_rows), words="to_rows: rank 0 called all_gather"),
        Wrong((_memory_as_it_lies, _to_rows), words="all_to_all_single cuts along dim 0"),
        Wrong((_not_joined, _to_rows), words="join what came along dim 1"),
        Wrong((_every_nth, _to_rows), words="rank r has every n-th head"),
        Wrong((lambda x: _swap(x, 2, 1, back=True), _to_rows), words="in another order than that"),
        Wrong((lambda x: _swap(x, 2, 2), _to_rows), words="got shape"),
        Wrong((_to_heads, _to_heads), words="expected outputs of to_rows of shape"),
        Wrong(
            (_to_heads, lambda x: _swap(x, 1, 2, back=True)),
            words="the right numbers in the wrong heads",
        ),
        Wrong((_to_heads, _rows_in_stripes), words="the right numbers in the wrong heads"),
        Wrong((_to_heads, lambda x: None), words="from rank 0, got a NoneType"),
        Wrong((_twice, _to_rows), words="and goes once"),
        Wrong((_spoilt, _to_rows), words="wrote into what it was given"),
        Wrong((_strided, _to_rows), words="contiguous"),
        Wrong((_by_comm, _to_rows), words=REFUSAL),
    ),
    right=(
        (_to_heads, _to_rows),
        (_permuted_to_heads, _permuted_to_rows),
        (_lists_to_heads, _lists_to_rows),
    ),
    stub=(lambda x: None, lambda x: None),
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "to_heads, two ranks", TWO, _there),
        RankCase("outputs", "to_rows brings it back, two ranks", TWO, _back),
        RankCase("outputs", "attention between them, four ranks", FOUR, _attention),
        RankCase("gradients", "by the same two, four ranks", FOUR, _gradients),
        RankCase("outputs", "to_heads, three ranks, one head each", THREE, _there),
        RankCase("outputs", "one rank", ONE, _there),
        RankCase("outputs", "x is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "one all-to-all each way", FOUR, _calls),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
