"""What exercise 03-4 trains, and how it looks at what came out.

The model is a sum of towers, one bucket each and all of one size. A rank that uses its towers in
another order gets the same gradients, but its hooks fire in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer
from course_lib.grading.ranked import Seen, Trial
from course_lib.grading.wire import WireCalls
from course_lib.ledger import wire
from course_lib.mesh import Mesh

TOWERS, WIDTH, ROWS = 3, 6, 4  # rows of a micro-batch
Bucket = Sequence[nn.Parameter]


@dataclass(frozen=True)
class Task:
    """What a rank does in a trial: how many steps of how many micro-batches, in which order."""

    rank: int
    seed: int
    steps: int
    micro_batches: int
    order: tuple[int, ...]  # the towers that it uses, first to last

    def order_in(self, step: int) -> tuple[int, ...]:
        """The same in every step, but for a tower left out: the second step uses it too."""
        return tuple(range(TOWERS)) if len(self.order) < TOWERS and step == 1 else self.order


@dataclass
class Run:
    """What came out of it on one rank."""

    gradients: list[Tensor]  # flat, of each step
    weights: Tensor  # flat, after the last step
    early: int  # calls made when the first step's last gradient was complete
    calls: list[int]  # made in each step
    in_backward: int = 0  # calls made before the first step's finish
    waited: int = 0  # for how many of them a rank had waited by then


def task(trial: Trial, rank: int, seed: int) -> Task:
    """Trial.size is the number of micro-batches.

    Three steps where several of these, or a tower that a rank does not use, may leave something
    behind for the next step.
    """
    order = tuple(range(TOWERS))
    if trial.n == 4 and rank % 2:
        order = order[::-1]
    if trial.n == 3 and rank == 1:
        order = (0, 2)
    return Task(rank, seed, 3 if trial.size > 1 or trial.n == 3 else 1, trial.size, order)


def towers_of(seed: int) -> list[Bucket]:
    """The parameters of each tower: in backward the second is complete before the first."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDTH, WIDTH), (WIDTH,))
    return [
        [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for _ in range(TOWERS)
    ]


def loss_of(towers: Sequence[Bucket], own: Task, step: int, micro_batch: int) -> Tensor:
    """The summed loss of a micro-batch."""
    number = (own.rank * 8 + step) * 8 + micro_batch
    generator = torch.Generator().manual_seed(own.seed + 1 + number)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randn(ROWS, generator=generator)
    for tower in own.order_in(step):
        first, second = towers[tower]
        y = y - torch.tanh(x @ first) @ second
    return (y**2).sum()


def flat(tensors: Sequence[Tensor | None]) -> Tensor:
    """All of them in one; a gradient that is not there as NaN."""
    nothing = torch.full((1,), torch.nan)
    return torch.cat([nothing if t is None else t.detach().flatten() for t in tensors])


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD shows a wrong factor, which Adam would hide."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Run:
    """Runs in a rank: trains with the answer, the class ``Overlapped`` of the exercise."""
    own: Task = inputs[0]
    towers = towers_of(own.seed)
    parameters = [p for tower in towers for p in tower]
    optimizer = optimizer_of(parameters)
    done = Run([], torch.empty(0), 0, [])
    with WireCalls() as wire_calls:
        last = towers[own.order[0]][0]  # backward completes the first tower last
        last.register_post_accumulate_grad_hook(
            lambda _: setattr(done, "early", done.early or len(wire_calls.calls))
        )
        sync = answers[0](towers[::-1], mesh.dp)
        for step in range(own.steps):
            before = len(wire_calls.calls)
            optimizer.zero_grad()
            rows = ROWS * own.micro_batches * mesh.dp.size
            losses = [loss_of(towers, own, step, mb) / rows for mb in range(own.micro_batches)]
            with sync.accumulate():
                for loss in losses[:-1]:
                    loss.backward()
            losses[-1].backward()
            if step == 0:  # the trace has a span for each call that was waited for
                done.in_backward, done.waited = len(wire_calls.calls), len(mesh.trace.spans)
            sync.finish()
            done.gradients.append(flat([p.grad for p in parameters]))
            done.calls.append(len(wire_calls.calls) - before)
            optimizer.step()
    done.weights = flat(parameters)
    return done


def twin(seen: Seen) -> Run:
    """One process that does what all ranks do together."""
    tasks = [task(seen.trial, rank, seen.seed) for rank in range(seen.trial.n)]
    towers = towers_of(seen.seed)
    parameters = [p for tower in towers for p in tower]
    optimizer = optimizer_of(parameters)
    gradients = []
    for step in range(tasks[0].steps):
        optimizer.zero_grad()
        own = [_mean_loss(towers, each, step, len(tasks)) for each in tasks]
        torch.stack(own).sum().backward()
        gradients.append(flat([p.grad for p in parameters]))
        optimizer.step()
    return Run(gradients, flat(parameters), 0, [])


def _mean_loss(towers: Sequence[Bucket], own: Task, step: int, n: int) -> Tensor:
    losses = [loss_of(towers, own, step, mb) for mb in range(own.micro_batches)]
    return torch.stack(losses).sum() / (ROWS * own.micro_batches * n)


def own_gradients(seen: Seen, *, first_only: bool = False) -> list[Tensor]:
    """Each rank's own gradient of the first step: [towers, elements of a tower]."""
    found = []
    for rank in range(seen.trial.n):
        own, towers = task(seen.trial, rank, seen.seed), towers_of(seen.seed)
        parameters = [p for tower in towers for p in tower]
        rows = ROWS * own.micro_batches * seen.trial.n
        count = 1 if first_only else own.micro_batches
        losses = [loss_of(towers, own, 0, mb) / rows for mb in range(count)]
        gradients = torch.autograd.grad(
            torch.stack(losses).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        found.append(flat(gradients).view(TOWERS, -1))
    return found


def _in_firing_order(seen: Seen) -> list[Tensor]:
    """What comes out when each rank sends a bucket as soon as it is full."""
    own = own_gradients(seen)
    orders = [task(seen.trial, rank, seen.seed).order[::-1] for rank in range(seen.trial.n)]
    sums = [
        torch.stack([gradient[order[k]] for gradient, order in zip(own, orders, strict=True)])
        for k in range(TOWERS)
    ]
    mixed = [torch.empty_like(gradient) for gradient in own]
    for k, total in enumerate(sums):
        for gradient, order in zip(mixed, orders, strict=True):
            gradient[order[k]] = total.sum(0)
    return [gradient.flatten() for gradient in mixed]


def _first_bucket_empty(seen: Seen) -> list[Tensor]:
    """What comes out when any full bucket makes the next in order leave."""
    own = own_gradients(seen)
    for gradient in own[1::2]:
        gradient[-1] = 0  # the last tower is bucket 0
    return [torch.stack(own).sum(0).flatten()] * seen.trial.n


def _complete_too_soon(seen: Seen) -> list[Tensor]:
    """What comes out when all buckets leave at the first hook of the last backward."""
    sent = own_gradients(seen, first_only=True)
    for gradient, own in zip(sent, own_gradients(seen), strict=True):
        gradient[-1, -WIDTH:] = own[-1, -WIDTH:]  # that hook's own gradient is complete
    return [torch.stack(sent).sum(0).flatten()] * seen.trial.n


def _added_to_own(seen: Seen) -> list[Tensor]:
    own = own_gradients(seen)
    return [(gradient + torch.stack(own).sum(0)).flatten() for gradient in own]


def _mistakes(seen: Seen) -> list[tuple[Callable[[], list[Tensor]], str]]:
    n = seen.trial.n
    found: list[tuple[Callable[[], list[Tensor]], str]] = [
        (
            lambda: [gradient.flatten() for gradient in own_gradients(seen)],
            "every rank still has its own gradients: nothing arrived in p.grad",
        ),
        (
            lambda: [torch.stack(own_gradients(seen, first_only=True)).sum(0).flatten()] * n,
            "only the first micro-batch was sent: inside accumulate() no bucket leaves, nor does "
            "any count as complete",
        ),
        (
            lambda: _complete_too_soon(seen),
            "gradients counted as complete inside accumulate(), so that the first hook after it "
            "sent every bucket",
        ),
        (
            lambda: _added_to_own(seen),
            "the sum was added to the rank's own gradient, which it has to replace",
        ),
    ]
    if n == 4:
        found += [
            (
                lambda: _in_firing_order(seen),
                "each rank sent its buckets in the order in which its own hooks filled them, so "
                "that different buckets were added together",
            ),
            (
                lambda: _first_bucket_empty(seen),
                "where bucket 2 was full first, bucket 0 left in its stead, before any of its own "
                "gradients was complete",
            ),
        ]
    return found


def gradients(seen: Seen) -> str:
    """The gradients of the first step are the sums over the ranks."""
    wanted = [twin(seen).gradients[0]] * seen.trial.n
    got = [value.gradients[0] for value in seen.values]
    if any(value.shape != wanted[0].shape for value in got):
        return (
            "a parameter that a rank did not use still has no gradient there: its bucket has to "
            "travel all the same, with zeros, and bring the sum of the others"
        )
    says = difference("gradients", got, wanted)
    if not says or seen.trial.n == 1:
        return says
    for mistaken, message in _mistakes(seen):
        if not difference("gradients", got, mistaken()):
            return f"{message} ({says})"
    return _left_early(got[0], wanted[0]) + says


def in_every_step(seen: Seen) -> str:
    """The gradients of all steps, of which the later ones show what the first left behind."""
    if says := gradients(seen):
        return says
    for step, wanted in enumerate(twin(seen).gradients):
        got = [value.gradients[step] for value in seen.values]
        if says := difference("gradients", got, [wanted] * seen.trial.n):
            return (
                f"step 1 is right and step {step + 1} is not: is all reset in finish? Begin anew "
                "with every bucket, also with those that no hook sent, and with zeros for what "
                f"this rank did not use ({says})"
            )
    return ""


def _left_early(got: Tensor, wanted: Tensor) -> str:
    """The mistake of sending a bucket when its first gradient is there."""
    parts = got.view(TOWERS, -1).split([WIDTH * WIDTH, WIDTH], 1)
    right = wanted.view(TOWERS, -1).split([WIDTH * WIDTH, WIDTH], 1)
    if not parts[0].any() and not difference("", [parts[1]], [right[1]]):
        return "a bucket left before all of its gradients were complete: "
    return ""


def weights(seen: Seen) -> str:
    """After three steps of two micro-batches the weights are those of one process."""
    says = difference("weights", [value.weights for value in seen.values], [twin(seen).weights] * 2)
    if says and not gradients(seen):
        return f"the first step is right and a later one is not: is all reset in finish? {says}"
    return says


def calls(seen: Seen) -> str:
    """A call for each bucket, of the bytes of an all-reduce."""
    n = seen.trial.n
    payload = sum(p.nbytes for tower in towers_of(seen.seed) for p in tower)
    right = wire("all_reduce", payload, n)
    for rank, observed in enumerate(seen.ranks):
        if len(observed.calls) != TOWERS:
            return f"rank {rank} made {len(observed.calls)} calls for {TOWERS} buckets"
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent != right:
            return (
                f"rank {rank} sent {float(sent):,g} bytes for gradients of {payload:,}; an "
                f"all-reduce sends 2(n-1)/n of them, {float(right):,g}"
            )
    return ""


def once_a_step(seen: Seen) -> str:
    """Accumulated micro-batches send nothing."""
    for rank, value in enumerate(seen.values):
        if value.calls != [TOWERS] * len(value.calls):
            made = ", ".join(map(str, value.calls))
            return (
                f"rank {rank} made {made} calls in steps of {seen.trial.size} micro-batches; "
                f"{TOWERS} buckets leave once a step, after the last micro-batch"
            )
    return ""


def while_backward_runs(seen: Seen) -> str:
    """When the last gradient is complete, all buckets but the last are on their way."""
    early = min(value.early for value in seen.values)
    if early < TOWERS - 1:
        return (
            f"when backward completed its last gradient, {early} of {TOWERS} buckets had left: all "
            "but the last were full and could have been on their way"
        )
    if waited := max(value.waited for value in seen.values):
        return (
            f"before backward returned, a rank had waited for {waited} of {TOWERS} buckets: while "
            "a hook waits, backward stands still; only finish may wait"
        )
    return ""


def none_waits_in_vain(seen: Seen) -> str:
    """On the ranks whose last hook fills bucket 0, all buckets leave from that hook."""
    sent = min(value.in_backward for value in seen.values)
    if sent >= TOWERS:
        return ""
    return (
        f"when backward returned, {sent} of {TOWERS} buckets had left on a rank where bucket 0 was "
        "full last: with it those that waited for it may leave too"
    )
