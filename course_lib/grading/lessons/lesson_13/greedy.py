"""13-5: a greedy loop under tensor parallelism, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (
    Trial(2, 12),
    Trial(4, 6),
    Trial(3, 8),
    Trial(1, 24),
)  # size: tokens of the vocabulary a rank
BATCH, HIDDEN, INNER, NEW = 3, 8, 4, 6  # INNER: features of the MLP on a rank
REFUSAL = "this is what you are asked to write"
Weights = tuple[Tensor, Tensor, Tensor, Tensor]


@cache
def _whole(trial: Trial, seed: int) -> tuple[Tensor, Weights]:
    """The first tokens, and embedding, up, down and head as nn.Linear keeps them."""
    generator = torch.Generator().manual_seed(seed)
    vocab, inner = trial.n * trial.size, trial.n * INNER

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens_B = torch.randint(vocab, (BATCH,), generator=generator)
    weights = drawn(vocab, HIDDEN), drawn(inner, HIDDEN), drawn(HIDDEN, inner), drawn(vocab, HIDDEN)
    return tokens_B, weights


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    tokens, (embedding, up, down, head) = _whole(trial, seed)
    n = trial.n
    own = up.chunk(n, 0)[rank], down.chunk(n, 1)[rank], head.chunk(n, 0)[rank]
    return tokens.clone(), embedding.clone(), *(x.clone() for x in own), NEW


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    return answers[0](*inputs)


def _serial(
    tokens: Tensor, weights: Weights, *, relu: bool = True, residuals: int = 1, least: bool = False
) -> Tensor:
    """(B, NEW): what one process chooses; or what it would with a mistake."""
    embedding, up, down, head = weights
    chosen = []
    for _ in range(NEW):
        x = embedding[tokens]
        h = x @ up.T
        y = residuals * x + (h.relu() if relu else h) @ down.T
        z = y @ head.T
        tokens = z.argmin(1) if least else z.argmax(1)
        chosen.append(tokens)
    return torch.stack(chosen, 1)


def _tokens(seen: Seen) -> str:
    first, weights = _whole(seen.trial, seen.seed)
    n, got = seen.trial.n, seen.values
    wanted = _serial(first, weights)
    says = difference("tokens", got, [wanted] * n)
    if not says or n == 1:
        return says
    n_times = _serial(first, weights, residuals=n)
    shifted = torch.cat((first[:, None], wanted[:, :-1]), 1)
    for mistaken, message in (
        (n_times, f"all {n} ranks added x before the sum, so that y has it {n} times"),
        (_serial(first, weights, residuals=0), "x itself is missing from y = x + ..."),
        (_serial(first, weights, relu=False), "relu is missing"),
        (shifted, "the token that was given is no new one: begin with what follows it"),
        (wanted[:, -1], "the last token alone; all new ones are wanted"),
        (wanted.T, "tokens by step; (B, new) is wanted: a row for each request"),
    ):
        if not difference("tokens", got, [mistaken.contiguous()] * n):
            return f"{message} ({says})"
    tensors = [one for one in got if isinstance(one, Tensor)]
    if len(tensors) == n and any(not torch.equal(one, tensors[0]) for one in tensors):
        return (
            "ranks took different tokens: from there on each answers another question. Sum y "
            f"before the head, and choose one token for all ({says})"
        )
    return says


def _calls(seen: Seen) -> str:
    row = BATCH * HIDDEN * 4
    for rank, observed in enumerate(seen.ranks):
        sums = [call for call in observed.calls if (call.op, call.payload) == ("all_reduce", row)]
        rest = sum(call.payload for call in observed.calls) - row * len(sums)
        if len(sums) != NEW:
            return (
                f"rank {rank} made {len(sums)} all_reduces of {row} bytes for {NEW} new tokens: "
                "one sum of y a token"
            )
        if rest > 16 * BATCH * NEW:
            return (
                f"rank {rank} gave {rest} bytes beside these to the network; a logit and a token "
                f"of each request are at most {16 * BATCH * NEW}: do not gather the logits"
            )
    return ""


def _left_alone(seen: Seen) -> str:
    for rank, observed in enumerate(seen.ranks):
        wanted = _inputs(seen.trial, rank, seen.seed)
        if not all(map(torch.equal, observed.inputs[:-1], wanted[:-1])):
            return f"rank {rank} wrote into what it was given"
    return ""


def _loop(
    tokens: Tensor,
    embedding: Tensor,
    up: Tensor,
    down: Tensor,
    head: Tensor,
    new: int,
    *,
    mistake: str = "",
) -> Any:
    """Right, or with a ``mistake``."""
    n, rank = dist.get_world_size(), dist.get_rank()
    chosen = []
    for _ in range(new):
        x = embedding[tokens]
        h = x @ up.T
        part = (h if mistake == "no relu" else h.relu()) @ down.T
        if mistake == "x in the sum":
            part = part + x
        if mistake != "no sum":
            dist.all_reduce(part)
        y = part if mistake in ("x in the sum", "no x") else x + part
        z = y @ head.T
        if mistake == "gathers":
            every = [torch.empty_like(z) for _ in range(n)]
            dist.all_gather(every, z.contiguous())
            next_B = torch.cat(every, 1).argmax(1)
        else:
            next_B = _best(z, rank, n, mistake)
        chosen.append(tokens if mistake == "shifted" else next_B)
        tokens = next_B
    if mistake == "last":
        return chosen[-1]
    return torch.stack(chosen, 0 if mistake == "by step" else 1)


def _best(z: Tensor, rank: int, n: int, mistake: str) -> Tensor:
    best, token = z.max(1)
    if mistake != "no offset":
        token = token + rank * z.shape[1]
    if mistake == "own best":
        return token % (n * z.shape[1])
    pair = torch.stack((best, token.float()), 1)
    pairs = [torch.empty_like(pair) for _ in range(n)]
    dist.all_gather(pairs, pair)
    stacked = torch.stack(pairs)
    return stacked[..., 1].gather(0, stacked[..., 0].argmax(0)[None])[0].long()


def _but(mistake: str) -> Answer:
    return lambda *given: _loop(*given, mistake=mistake)


def _right_by_reductions(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """Two reductions choose; the table is filled in place."""
    out = tokens.new_empty(len(tokens), new)
    for step in range(new):
        y = torch.relu(embedding[tokens] @ up.mT) @ down.mT
        dist.all_reduce(y)
        z = (y + embedding[tokens]) @ head.mT
        most = z.amax(1)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        own = z.argmax(1) + dist.get_rank() * len(head)
        tokens = own.masked_fill(z.amax(1) < most, len(embedding))
        dist.all_reduce(tokens, op=dist.ReduceOp.MIN)
        out[:, step] = tokens
    return out


def _x_on_one_rank(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    """x is added before the sum, on rank 0 alone: once."""
    rank, n, chosen = dist.get_rank(), dist.get_world_size(), []
    for _ in range(new):
        x = embedding[tokens]
        y = (x @ up.T).relu() @ down.T + x * (rank == 0)
        dist.all_reduce(y)
        tokens = _best(y @ head.T, rank, n, "")
        chosen.append(tokens)
    return torch.stack(chosen, 1)


def _by_comm(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    axis, chosen = make_mesh().world, []
    for _ in range(new):
        x = embedding[tokens]
        y = x + comm.all_reduce((x @ up.T).relu() @ down.T, axis)
        tokens = comm.all_gather(y @ head.T, axis, dim=1).argmax(1)
        chosen.append(tokens)
    return torch.stack(chosen, 1)


def _in_place(
    tokens: Tensor, embedding: Tensor, up: Tensor, down: Tensor, head: Tensor, new: int
) -> Tensor:
    chosen = _loop(tokens, embedding, up, down, head, new)
    tokens.copy_(chosen[:, -1])
    return chosen


GREEDY = Ranked(
    id="13-5",
    title="a greedy loop in raw PyTorch",
    names=("generate",),
    hints=(
        "Two things must be the same on all ranks before the next token: y, and the token. Which "
        "message makes each so?",
        "part = relu(x upᵀ) downᵀ; all_reduce it; y = x + part. Then the largest of the own "
        "logits and its number in the whole vocabulary, all_gather, and the winner.",
        "best, token = (y @ head.T).max(1); pair = torch.stack((best, (token + rank * "
        "len(head)).float()), 1); dist.all_gather(pairs, pair); take the token beside the largest "
        "of torch.stack(pairs)[..., 0].",
    ),
    wrong=(
        Wrong(lambda *given: None, words="from rank 0, got a NoneType"),
        Wrong(_but("no sum"), words="tokens are wrong on"),
        Wrong(_but("own best"), words="ranks took different tokens"),
        Wrong(_but("no offset"), words="tokens are wrong on"),
        Wrong(_but("x in the sum"), words="ranks added x before the sum"),
        Wrong(_but("no x"), words="x itself is missing"),
        Wrong(_but("no relu"), words="relu is missing"),
        Wrong(_but("shifted"), words="begin with what follows it"),
        Wrong(_but("last"), words="the last token alone"),
        Wrong(_but("by step"), words="a row for each request"),
        Wrong(_but("gathers"), words="do not gather the logits"),
        Wrong(_in_place, words="wrote into what it was given"),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_loop, _right_by_reductions, _x_on_one_rank),
    stub=lambda tokens, embedding, up, down, head, new: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "two ranks", TWO, _tokens),
        RankCase("outputs", "four ranks", FOUR, _tokens),
        RankCase("outputs", "three ranks", THREE, _tokens),
        RankCase("outputs", "one rank", ONE, _tokens),
        RankCase("outputs", "what is given is left alone", FOUR, _left_alone, later=True),
        RankCase("wire", "a sum and a choice a token", FOUR, _calls),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
