"""Katas 16b-4 to 16b-6: the 1F1B loop, a ZeRO-1 step, ring attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_lib.cp.blockwise import PLAIN
from course_lib.grading.compare import agrees
from course_lib.grading.draw import Draw
from course_lib.grading.graders.judge import lesson_04, lesson_07, lesson_09
from course_lib.grading.graders.runner import lesson_16b as runner
from course_lib.grading.graders.runner.lesson_04 import after
from course_lib.grading.runner import Observed
from course_lib.grading.trials import Given, Look, Mistake, Trial, outside

# --- 16b-4 ---------------------------------------------------------------------------------------


def _in_order(given: Given, ranks: list[Observed]) -> str:
    why = (
        "rank r begins with min(p - 1 - r, m) forwards, then takes a forward and a backward in "
        "turn, and ends with the backwards that are left"
    )
    found, _, _ = lesson_07.in_order(given, ranks).partition(":")
    return found and f"{found}: {why}"


def _dropped(given: Given, ranks: list[Observed]) -> str:
    """Expect no input of a stage to live after its backward, but for the last one."""
    for rank, observed in enumerate(ranks[1:], 1):  # rank 0 has its inputs from the caller
        most = min(given.n - rank, len(given["micro-batches"][0]))
        if (got := observed.values[runner.INPUTS]) > most + 1:
            return (
                f"expected rank {rank} to store the activations of {most} micro-batches at most, "
                f"but the inputs of {got} are alive: drop x, y and the graph of the loss after "
                "the backward of a micro-batch"
            )
    return ""


def _weighted(given: Given, own: float, before: float) -> list[Tensor]:
    """Return the gradients of the step times ``own``, plus those before it times ``before``."""
    step = lesson_07.gradients_of(given, before=False)
    both = zip(step, given.expected[lesson_07.runner.GRADIENT], strict=True)
    return [own * new + before * (total - new) for new, total in both]


def _wrong_weights(message: str, weigh: Callable[[Given, int], list[Tensor]]) -> Mistake:
    """``weigh`` gets the number of micro-batches."""
    return Mistake(
        message,
        {lesson_07.runner.GRADIENT: lambda given: weigh(given, len(given["micro-batches"][0]))},
    )


LOOP = replace(
    lesson_07.STEP,
    id="16b-4",
    title="the 1F1B loop",
    names=("one_f_one_b",),
    act=runner.one_f_one_b,
    trials=(
        Trial(2, beside=2, size=5, dtype=torch.float64),
        Trial(4, size=6, name="four ranks, then one micro-batch"),
        Trial(3, size=2, name="three ranks, two micro-batches"),
        Trial(1, size=3),
    ),
    looks=(
        Look("wire", "messages in the group", outside),
        Look("gradients", "forwards and backwards in the order of 1F1B", _in_order, one_rank=True),
        *lesson_07.STEP.looks[1:],
        Look("peak", "inputs dropped after their backward", _dropped),
    ),
    mistakes=(
        *(
            replace(each, message=each.message.replace("the expected one", "the oldest in flight"))
            for each in lesson_07.STEP.mistakes
        ),
        _wrong_weights(
            "the loss of a micro-batch counts 1/p: expected 1/m, for the mean over micro-batches",
            lambda given, m: _weighted(given, m / given.n, 1),
        ),
        _wrong_weights(
            "what .grad held before the step is divided by m too: divide each loss instead",
            lambda given, m: _weighted(given, 1, 1 / m),
        ),
    ),
    refused=(*runner.SENDERS, "course_lib.schedule.named:one_f_one_b"),
)


# --- 16b-5 ---------------------------------------------------------------------------------------


def _step_inputs(trial: Trial, draw: Draw) -> Any:
    """As in 04-3, with moderate gradients: AdamW divides by them."""
    return [
        {**own, "gradients": own["gradients"].clamp(-2, 2), "rule": runner.AdamW}
        for own in lesson_04.step_inputs(trial, draw)
    ]


def _wrong_adamw(message: str, step: int, slip: str) -> Mistake:
    return Mistake(
        message, {after(step): lambda given: lesson_04.after_steps(given, slip=slip)[after(step)]}
    )


def _own_state(given: Given, ranks: list[Observed]) -> str:
    """Expect the state to have the moments of one shard, and at most its weights and gradient."""
    shard = -(-len(given["weights"][0]) // given.n)
    for rank, observed in enumerate(ranks):
        sizes: Sequence[int] = observed.values["state"]
        if not sizes:
            return f"expected rank {rank} to store its moments in state, got no tensor there"
        if max(sizes) > shard or sum(sizes) > 4 * shard + 4:
            return (
                f"expected the tensors in state to have the {shard} elements of one shard on rank "
                f"{rank}, got tensors of {', '.join(map(str, sizes))} elements in memory: store "
                "the moments of the own shard only, and clone what is a view of a larger tensor"
            )
    return _own_moments(given, ranks)


def _own_moments(given: Given, ranks: list[Observed]) -> str:
    """Expect no rank to have the moments of another shard in the place of its own."""
    update, weights = runner.AdamW(given["rate"][0]), given["weights"][0]
    for gradients in torch.stack(given["gradients"]).sum(0):
        weights = update(weights, gradients)
    m, pad = update.moments[0], -len(weights) % given.n
    shards, by_front = (F.pad(m, way).chunk(given.n) for way in ((0, pad), (pad, 0)))
    for rank, observed in enumerate(ranks):
        stored = observed.values["moments"]
        others = [shard for shard in (*shards, by_front[rank]) if shard is not shards[rank]]
        if not _any_of(stored, [shards[rank]]) and _any_of(stored, others):
            return (
                f"rank {rank} has the moments of another shard: expected shard {rank} of "
                f"{given.n} of the flat parameter, with its padding at the end"
            )
    return ""


def _any_of(stored: Sequence[Tensor], shards: Sequence[Tensor]) -> bool:
    return any(agrees(x, shard, 256) for x in stored for shard in shards)


ZERO_1 = replace(
    lesson_04.STEP,
    id="16b-5",
    title="a ZeRO-1 step",
    names=("zero1_step",),
    act=runner.zero_1,
    draw=_step_inputs,
    trials=(
        Trial(2, beside=2, dtype=torch.float64, strided=True),
        Trial(3),
        Trial(4, name=lesson_04.PADDED),
        Trial(1),
    ),
    mistakes=(
        *lesson_04.STEP.mistakes,
        _wrong_adamw("the moments are not divided by 1 - beta**t", 1, "uncorrected"),
        _wrong_adamw(
            "the weight decay is in the gradient, as in Adam: AdamW takes it off the weights",
            1,
            "coupled",
        ),
        _wrong_adamw("the weight decay is not multiplied by lr", 1, "decay without lr"),
        _wrong_adamw(
            "the weight decay is applied after the update: apply it before", 1, "decay last"
        ),
        _wrong_adamw("eps is inside the square root: add it after", 1, "eps inside"),
        _wrong_adamw("eps is added before v is divided by 1 - beta**t", 1, "eps first"),
        _wrong_adamw("the moments of the first step are lost: store them in state", 2, "forgets"),
        _wrong_adamw(
            "t is 1 in every step: store it in state, and add 1 in each step", 2, "t stays 1"
        ),
    ),
    looks=(
        Look("peak", "state of the own shard only", _own_state, one_rank=True),
        lesson_04.STEP.looks[1],
    ),
    refused=runner.SENDERS,
)


# --- 16b-6 ---------------------------------------------------------------------------------------


def _sequence(trial: Trial, draw: Draw) -> Any:
    """Unequal shards. In the second call the scores of a query are near 100 or near -120."""
    lengths = [draw.size(1, 4) for _ in range(trial.n)]
    batch, heads, features = draw.size(1, 2), draw.size(1, 3), draw.size(2, 5)
    whole = {name: draw.normal(batch, sum(lengths), heads, features) for name in "qkv"}
    if draw.call:
        whole["k"][..., 0] = features**0.5
        whole["q"][:, ::2, :, 0], whole["q"][:, 1::2, :, 0] = 100, -120
    shards = {name: x.split(lengths, 1) for name, x in whole.items()}
    return [
        {name: each[rank].clone() for name, each in shards.items()} | {"lengths": lengths}
        for rank in range(trial.n)
    ], whole


def _attention(given: Given) -> dict[str, list[Tensor]]:
    found = zip(("outputs", runner.LSE), PLAIN.forward(*given.whole.values(), True), strict=True)
    return {name: list(x.split(given["lengths"][0], 1)) for name, x in found}


def _unscaled(given: Given) -> list[Tensor]:
    factor = given.whole["q"].shape[-1] ** 0.5
    ranks = [{**own, "q": own["q"] * factor} for own in given.ranks]
    whole = {**given.whole, "q": given.whole["q"] * factor}
    return _attention(replace(given, ranks=ranks, whole=whole))["outputs"]


def _equal_shards(given: Given) -> list[Tensor]:
    """Return the outputs with a mask that takes each shard to be as long as the rank's own."""
    found = []
    for rank, q in enumerate(given["q"]):
        s, blocks = q.shape[1], given["k"][: rank + 1]
        keys = torch.cat([source * s + torch.arange(x.shape[1]) for source, x in enumerate(blocks)])
        hidden = keys > (rank * s + torch.arange(s))[:, None]
        scores = torch.einsum("bshk,bthk->bhst", q, torch.cat(blocks, 1)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(torch.einsum("bhst,bthk->bshk", weights, torch.cat(given["v"][: rank + 1], 1)))
    return found


def _largest(given: Given, sign: int) -> list[Tensor]:
    """Return the largest score of each row, or the log-sum-exp without it."""
    q, k, _ = given.whole.values()
    scores = torch.einsum("bshk,bthk->bsht", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    most = scores.masked_fill(future[:, None], -torch.inf).amax(-1)
    shards = most.split(given["lengths"][0], 1)
    if sign > 0:
        return list(shards)
    return [lse - m for lse, m in zip(given.expected[runner.LSE], shards, strict=True)]


def _not_finite(given: Given, ranks: list[Observed], name: str) -> str:
    got = [rank.values[name] for rank in ranks]
    if all(x.isfinite().all() for x in got if isinstance(x, Tensor)):
        return ""
    if given["q"][0].abs().max() < 50:
        return (
            "not a number: a row of scores is -inf throughout; a query sees its own key, and none "
            "of the blocks of later ranks"
        )
    return (
        "not a number: exponentials of large scores overflow, and all of a row may underflow; "
        "subtract the largest score of the row so far, and begin with -inf"
    )


def _overlap(given: Given, ranks: list[Observed]) -> str:
    """Expect products on a block while the next one is in flight."""
    for rank, seen in enumerate(ranks):
        messages = sum(call.op == "recv" for call in seen.calls) // (given.n - 1)
        for turn in range(min(rank + 1, given.n - 1)):
            got = sum(
                begun >= (turn + 1) * messages and waited <= turn * messages
                for begun, waited in seen.values["products"]
            )
            # A product over one key is no matrix product.
            if got < (2 if given["lengths"][0][rank - turn] > 1 else 1):
                return (
                    f"rank {rank}, turn {turn}: expected both matrix products on one block while "
                    f"the next one is in flight, got {got or 'none'}: start the exchange, compute, "
                    "then wait"
                )
    return ""


RING = replace(
    lesson_09.RING,
    id="16b-6",
    act=runner.ring_attention,
    draw=_sequence,
    expected=_attention,
    trials=(
        Trial(2, beside=2, dtype=torch.float64, strided=True),
        Trial(3),
        Trial(4),
        Trial(1),
    ),
    mistakes=(
        *lesson_09.RING.mistakes,
        lesson_09.wrong_ring(
            "the causal mask compares positions inside the blocks: add the position where each "
            "block begins",
            other=True,
            later=True,
        ),
        Mistake(
            "the log-sum-exp lacks the largest score, which was subtracted",
            {runner.LSE: lambda given: _largest(given, -1)},
        ),
        Mistake(
            "this is the largest score: add the logarithm of the sum",
            {runner.LSE: lambda given: _largest(given, 1)},
        ),
        Mistake("the scores are not divided by sqrt(K)", {"outputs": _unscaled}),
        Mistake(
            "the causal mask takes all shards to be equally long: the positions of rank r begin at "
            "sum(lengths[:r])",
            {"outputs": _equal_shards},
        ),
    ),
    explain=_not_finite,
    looks=(
        lesson_09.RING.looks[0],
        Look("wire", "messages in the group", outside),
        Look("wire", "the next block is in flight during the products", _overlap),
    ),
    terms=1024,
    hang="A rank whose queries need no more blocks must still pass on the blocks that other ranks "
    "wait for, and a block that arrives has the length of another rank's shard",
    refused=(*runner.SENDERS, *lesson_09.RING.refused),
)

EXERCISES = (LOOP, ZERO_1, RING)
