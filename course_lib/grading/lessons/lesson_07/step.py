"""07-5: one rank's part of a pipeline step, whatever its row, held to one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.compare import agrees, difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_07 import step_answers as answers
from course_lib.grading.lessons.lesson_07.toy import (
    RATE,
    ROWS,
    WIDTH,
    Batches,
    Row,
    batches,
    flat,
    gradients_of,
    mean_square,
    serial,
    stages,
)
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial, unwaited
from course_lib.mesh import Mesh
from course_lib.schedule import one_f_one_b
from course_lib.trace import SavedActivations

TWO, FOUR, ONE = range(3)
TRIALS = (Trial(2, 4), Trial(4, 8), Trial(1, 3))  # size: micro-batches
GOES_ON = "backward must go on with the gradient that arrives"


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Row, nn.Module, Batches]:
    return _row(trial, rank), stages(trial, seed)[rank], batches(trial, seed)


def _row(trial: Trial, rank: int) -> Row:
    """1F1B; on two ranks GPipe that goes back from the last micro-batch to the first."""
    if trial.n == 2:
        return [("F", mb) for mb in range(trial.size)] + [
            ("B", mb) for mb in reversed(range(trial.size))
        ]
    return [(action.op, action.mb) for action in one_f_one_b(trial.n, trial.size).rows[rank]]


def _act(given: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    row, stage, pairs = inputs
    optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)
    done: list[str] = []  # F and B of this stage, as they came
    watching = stage.register_forward_hook(lambda *call: _note(done, call[-1]))
    with SavedActivations(stage, [tensor for pair in pairs for tensor in pair]) as saved:
        loss = given[0](row, stage, pairs, mean_square, mesh.world)
    watching.remove()
    if isinstance(loss, Tensor):
        loss = loss.detach()  # a tensor with its graph does not travel
    complete = all(p.grad is not None for p in stage.parameters())
    gradients = gradients_of([stage])[0].clone() if complete else None
    optimizer.step()
    weights = flat(stage.parameters()).detach()
    return {
        "loss": loss,
        "gradients": gradients,
        "weights": weights,
        "saved": saved.peak,
        "done": done,
    }


def _note(done: list[str], y: Tensor) -> None:
    """A forward has been, and a backward will be when the gradient of its output is there."""
    done.append("F")
    if y.requires_grad:
        y.register_hook(lambda _: done.append("B"))


def _in_order(seen: Seen) -> str:
    """Forwards and backwards came as the row has them."""
    for rank, value in enumerate(seen.values):
        wanted = "".join(op for op, _ in _row(seen.trial, rank))
        if (came := "".join(value["done"])) != wanted:
            return (
                f"rank {rank} did {came or 'nothing with its stage'} where its row says {wanted}: "
                "do the actions of `row` in its order, whatever the schedule"
            )
    return ""


def _loss(seen: Seen) -> str:
    """The last rank returns the step's loss."""
    losses = serial(seen.trial, seen.seed).losses
    right, last, m = torch.stack(losses).mean(), seen.trial.n - 1, seen.trial.size
    got = seen.values[last]["loss"]
    if isinstance(got, bool) or not isinstance(got, int | float | Tensor):
        return f"rank {last} returned a {type(got).__name__}; the loss of the step is wanted"
    value = torch.as_tensor(got).detach().float().squeeze()
    if agrees(value, right):
        return ""
    said = f"rank {last} returned the loss {_number(value)} where {_number(right)} is right"
    if agrees(value, m * right):
        return (
            f"your loss is exactly {m} times too large ({said}): each micro-batch's loss is a "
            f"mean, and its share of the step's loss is 1/{m}"
        )
    if agrees(value, losses[-1]) or agrees(value, losses[-1] / m):
        return f"only the last micro-batch is in the loss: add up all {m} ({said})"
    if agrees(value, _fed_with_the_batch(seen)):
        return f"every stage was given the batch, not the output of the stage before ({said})"
    return said


def _number(value: Tensor) -> str:
    return f"{value.item():.4g}" if value.numel() == 1 else f"of shape {list(value.shape)}"


def _fed_with_the_batch(seen: Seen) -> Tensor:
    """The loss of somebody whose last stage takes x of the micro-batch."""
    stage = stages(seen.trial, seen.seed)[-1]
    with torch.no_grad():
        losses = [mean_square(stage(x), t) for x, t in batches(seen.trial, seen.seed)]
    return torch.stack(losses).mean()


def _gradients(seen: Seen) -> str:
    """Every stage has the gradients that it has in one process."""
    right, m = serial(seen.trial, seen.seed).gradients, seen.trial.size
    got = [value["gradients"] for value in seen.values]
    missing = next((rank for rank, gradient in enumerate(got) if gradient is None), None)
    if missing is not None:
        return f"parameters of rank {missing} have no gradient: backward never came to its stage"
    says = difference("gradients", got, right)
    if not says:
        return ""
    if not difference("gradients", got, [m * gradient for gradient in right]):
        return f"{says}: each micro-batch's loss is a mean and counts 1/{m}"
    if not difference("gradients", got, _last_alone(seen)):
        return f"only the last micro-batch's gradients are left: gradients add up ({says})"
    if seen.trial.n > 1 and not difference("gradients", got[:-1], _from_ones(seen)):
        return f"a stage begins its backward anew, as if from y.sum(): {GOES_ON} ({says})"
    if seen.trial.n > 1 and agrees(got[-1], right[-1]):
        return (
            f"on the last rank gradients are right, and wrong before it: {GOES_ON}, for the same "
            f"micro-batch, and hands back that of its own input ({says})"
        )
    return says


def _last_alone(seen: Seen) -> list[Tensor]:
    """What is left where every backward begins by throwing away the gradients."""
    parts = stages(seen.trial, seen.seed)
    x, target = batches(seen.trial, seen.seed)[_row(seen.trial, 0)[-1][1]]
    (mean_square(nn.Sequential(*parts)(x), target) / seen.trial.size).backward()
    return gradients_of(parts)


def _from_ones(seen: Seen) -> list[Tensor]:
    """Of all ranks but the last: the gradients of the sum of the stage's outputs."""
    parts = stages(seen.trial, seen.seed)[:-1]
    x = torch.cat([x for x, _ in batches(seen.trial, seen.seed)])
    for part in parts:
        y = part(x)
        y.sum().backward()
        x = y.detach()
    return gradients_of(parts)


def _weights(seen: Seen) -> str:
    right = serial(seen.trial, seen.seed).weights
    says = difference("weights", [value["weights"] for value in seen.values], right)
    return f"{says}: leave the weights to the optimizer, which steps after you" if says else ""


def _messages(seen: Seen) -> str:
    """m activations to the next rank, m gradients to the previous one, and nothing else."""
    n, m, size = seen.trial.n, seen.trial.size, 4 * ROWS * WIDTH
    for rank, observed in enumerate(seen.ranks):
        others = sorted({call.op for call in observed.calls} - {"send", "recv"})
        if others:
            return (
                f"rank {rank} called {', '.join(others)}: neighbours send to each other, no other "
                "call is needed"
            )
        sends = [call for call in observed.calls if call.op == "send"]
        for peer in sorted({call.peer for call in sends if call.peer is not None}):
            if abs(peer - rank) > 1:
                return f"rank {rank} sent to rank {peer}: a stage talks to its neighbours only"
        for peer, what in ((rank + 1, "activations"), (rank - 1, "gradients")):
            count = sum(call.peer == peer for call in sends)
            if count != (m if 0 <= peer < n else 0):
                return f"rank {rank} sent {count} messages to rank {peer}; {m} {what} are wanted"
        odd = next((call.payload for call in sends if call.payload != size), None)
        if odd is not None:
            return f"rank {rank} sent a message of {odd} bytes; activations have {size}"
    return unwaited(seen)


def _kept(seen: Seen) -> str:
    """Rank r holds p-r micro-batches' activations, not m."""
    n, m = seen.trial.n, seen.trial.size
    for rank, value in enumerate(seen.values):
        one, allowed = _saved_by_one(seen, rank), min(n - rank, m)
        if value["saved"] > (allowed + 0.5) * one:
            return (
                f"rank {rank} held the activations of {value['saved'] / one:.0f} micro-batches at "
                f"once; with this row it needs {allowed}: do the actions in the order of the row, "
                "and let go of a micro-batch when its backward is done"
            )
    return ""


def _saved_by_one(seen: Seen, rank: int) -> int:
    """Bytes that autograd saves for one micro-batch on this rank's stage."""
    stage = stages(seen.trial, seen.seed)[rank]
    x, target = batches(seen.trial, seen.seed)[0]
    leaf = x if rank == 0 else x.clone().requires_grad_()
    with SavedActivations(stage, [x, target]) as saved:
        y = stage(leaf)
        if rank == seen.trial.n - 1:
            y = mean_square(y, target)
    return saved.peak


STEP = Ranked(
    id="07-5",
    title="one rank's step of a pipeline",
    names=("one_step",),
    hints=(
        "Autograd knows nothing of the network. What must a received tensor be, so that backward "
        "leaves a gradient there? And with what does a stage in the middle begin its backward?",
        "F: receive unless you are first, and make it a leaf with requires_grad_(); y = stage(x); "
        "the last rank takes its share of the loss, the others start_send y; keep (x, y) under mb. "
        "B: pop them; unless you are last receive a tensor like y; backward; unless you are first "
        "start_send x.grad.",
        "In B: x, y = kept.pop(mb); y.backward(None if last else comm.recv(y, axis, "
        "source=axis.rank + 1)); sends.append(comm.start_send(x.grad, axis, to=axis.rank - 1)) "
        "unless first. On the last rank y is loss(y, target) / len(micro_batches). At the end "
        "wait() for every handle in sends.",
    ),
    wrong=(
        Wrong(lambda *_: 0.0, words="rank 1 returned the loss 0 where"),
        Wrong(lambda *_: None, words="returned a NoneType; the loss of the step is wanted"),
        Wrong(answers.NoLeaf(), words="expected a tensor, got None"),
        Wrong(answers.WholeMean(), words="your loss is exactly 4 times too large"),
        Wrong(
            answers.OnlyTheReportIsMean(), words="each micro-batch's loss is a mean and counts 1/4"
        ),
        Wrong(
            answers.WithoutGradient(),
            words="grad can be implicitly created only for scalar outputs",
        ),
        Wrong(answers.Ones(), words="as if from y.sum()"),
        Wrong(answers.NewestFirst(), words="for the same micro-batch"),
        Wrong(answers.OutputBack(), words="hands back that of its own input"),
        Wrong(answers.ForwardOnly(), words="of rank 0 have no gradient"),
        Wrong(answers.Overwrites(), words="only the last micro-batch's gradients are left"),
        Wrong(answers.LastMicroBatch(), words="only the last micro-batch is in the loss"),
        Wrong(answers.FedWithTheBatch(), words="every stage was given the batch"),
        Wrong(answers.AllForwardsFirst(), words="rank 0 held the activations of 8 micro-batches"),
        Wrong(answers.KeepsGraphs(), words="rank 0 held the activations of 8 micro-batches"),
        Wrong(answers.PlainSend(), words="every rank waits in send"),
        Wrong(answers.TellsAllTheLoss(), words="called all_reduce"),
        Wrong(answers.ForgetsItsSends(), words="started 16 messages and waited for 8 of them"),
        Wrong(answers.InHalves(), words="sent 16 messages to rank 1; 8 activations are wanted"),
        Wrong(answers.moves_weights, words="nothing with its stage"),
        Wrong(answers.Always1F1B(), words="in its order, whatever the schedule"),
        Wrong(answers.StepsItself(), words="leave the weights to the optimizer"),
    ),
    right=(answers.Step(), answers.with_exchanges),
    stub=lambda *_: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("outputs", "loss on two ranks", TWO, _loss),
        RankCase("outputs", "loss on four ranks", FOUR, _loss),
        RankCase("gradients", "two ranks", TWO, lambda seen: _gradients(seen) or _in_order(seen)),
        RankCase("gradients", "four ranks", FOUR, _gradients),
        RankCase("gradients", "one rank", ONE, lambda seen: _loss(seen) or _gradients(seen)),
        RankCase("weights", "after a step, four ranks", FOUR, _weights),
        RankCase("wire", "messages, peers and bytes", FOUR, _messages),
        RankCase("peak", "activations kept", FOUR, _kept),
    ),
    refused=("course_lib.pp.engine:run", "course_lib.pp.engine:Engine.run"),
)
