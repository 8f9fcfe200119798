"""08-5: in raw torch, a backward in two halves whose first half is sent before the second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import comm
from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.ranked import RankCase, Ranked, Seen, Trial
from course_lib.mesh import Mesh, make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 2), Trial(4, 3), Trial(3, 1), Trial(1, 2))  # size: micro-batches
ROWS, WIDTH, HIDDEN = 5, 8, 12  # all different: a weight's gradient is known by its shape
SHAPES = {(HIDDEN, WIDTH), (WIDTH, HIDDEN)}
REFUSAL = "this is what you are asked to write"


def _stages(trial: Trial, seed: int) -> list[nn.Sequential]:
    """The pieces of a small model, one for each rank."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        for _ in range(trial.n)
    ]
    with torch.no_grad():  # so large that gradients do not fade on their way to rank 0
        for p in (p for stage in made for p in stage.parameters()):
            p.normal_(0, 1.2 / p.shape[-1] ** 0.5, generator=generator)
    return made


def _batches(trial: Trial, seed: int) -> list[tuple[Tensor, Tensor]]:
    """(input of the first stage, gradient of the last one's output) of each micro-batch."""
    generator = torch.Generator().manual_seed(seed + 1)
    draw = torch.randn
    return [
        (draw(ROWS, WIDTH, generator=generator), draw(ROWS, WIDTH, generator=generator))
        for _ in range(trial.size)
    ]


def _inputs(trial: Trial, rank: int, seed: int) -> tuple[Any, ...]:
    """The own stage; of each micro-batch its input and, on the last rank, dy."""
    stages = _stages(trial, seed)
    before = nn.Sequential(*stages[:rank])
    with torch.no_grad():
        pairs = [
            (before(x).clone(), dy.clone() if rank == trial.n - 1 else None)
            for x, dy in _batches(trial, seed)
        ]
    return stages[rank], pairs


class _Events(TorchDispatchMode):
    """What a backward does, in order: W for a weight's gradient, send for a message."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        space, name = func.namespace, func._schema.name.split("::")[-1]
        if space == "c10d" and name == "send":
            self.events.append("send")
        elif name == "mm" and tuple(result.shape) in SHAPES:
            self.events.append("W")
        return result


def _act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    stage, pairs = inputs
    parameters = list(stage.parameters())
    done = []
    for x, dy in pairs:
        if mesh.world.rank > 0:
            x.requires_grad_()
        y = stage(x)
        with _Events() as seen:
            answers[0](x, y, parameters, dy)
        done.append(seen.events)
        x.grad = None  # it does not travel
        x.requires_grad_(False)
    return {
        "gradients": [None if p.grad is None else p.grad.detach().clone() for p in parameters],
        "events": done,
    }


@cache
def _serial(trial: Trial, seed: int) -> list[list[Tensor]]:
    """The gradients of each stage, of all micro-batches."""
    stages = _stages(trial, seed)
    for x, dy in _batches(trial, seed):
        nn.Sequential(*stages)(x).backward(dy)
    return [[_grad(p) for p in stage.parameters()] for stage in stages]


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradients(seen: Seen) -> str:
    """Every stage has the gradients that it has in one process."""
    found = [value["gradients"] for value in seen.values]
    for rank, gradients in enumerate(found):
        if any(gradient is None for gradient in gradients):
            return (
                f"weights of rank {rank} have no gradient: torch.autograd.grad returns gradients, "
                "and leaves .grad alone"
            )
    got = [_flat(gradients) for gradients in found]
    says = difference("gradients", got, list(map(_flat, _serial(seen.trial, seen.seed))))
    if says and seen.trial.size > 1 and not difference("", got, _last_alone(seen)):
        return f"only the last micro-batch is left: add to what .grad holds ({says})"
    if says and seen.trial.n > 1 and not difference("", got[-1:], _right_of_last(seen)):
        return (
            "gradients are right on the last rank and wrong before it: a stage goes on with the "
            f"gradient that arrives, and hands back that of its own input ({says})"
        )
    return says


def _right_of_last(seen: Seen) -> list[Tensor]:
    return [_flat(_serial(seen.trial, seen.seed)[-1])]


def _last_alone(seen: Seen) -> list[Tensor]:
    """The gradients of the last micro-batch."""
    stages = _stages(seen.trial, seen.seed)
    x, dy = _batches(seen.trial, seen.seed)[-1]
    nn.Sequential(*stages)(x).backward(dy)
    return [_flat([_grad(p) for p in stage.parameters()]) for stage in stages]


def _early(seen: Seen) -> str:
    """On every rank but the first the message leaves before any W."""
    for rank, value in enumerate(seen.values):
        for mb, events in enumerate(value["events"]):
            if rank > 0 and "W" in events and "W" in events[: _place(events, "send")]:
                return (
                    f"rank {rank} computed the gradient of a weight before it sent that of its "
                    f"input (micro-batch {mb}: {' '.join(events)}): the rank before it waits"
                )
            weights = events.count("W")
            if weights > 2:
                return (
                    f"rank {rank} computed {weights} gradients of its two weights for one "
                    "micro-batch: each once"
                )
    return ""


def _place(events: Sequence[str], what: str) -> int:
    return events.index(what) if what in events else len(events)


def _messages(seen: Seen) -> str:
    """One message for each micro-batch, to the rank before."""
    n, m, size = seen.trial.n, seen.trial.size, 4 * ROWS * WIDTH
    for rank, observed in enumerate(seen.ranks):
        wanted = []
        for _ in range(m):
            wanted += [("recv", rank + 1, size)] * (rank < n - 1)
            wanted += [("send", rank - 1, size)] * (rank > 0)
        made = [(call.op, call.peer, call.payload) for call in observed.calls]
        if made != wanted:
            said = ", ".join(f"{op} {peer}: {payload} bytes" for op, peer, payload in made[:4])
            return (
                f"rank {rank} did {said or 'nothing'}{', ...' if len(made) > 4 else ''}; for each "
                f"micro-batch one message of {size} bytes from rank + 1 and one to rank - 1 are "
                "wanted, where there are such ranks"
            )
    return ""


def _receive(y: Tensor, dy: Tensor | None) -> Tensor:
    if dy is None:
        dy = torch.empty(y.shape)
        dist.recv(dy, dist.get_rank() + 1)
    return dy


def _add(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient if p.grad is None else p.grad + gradient


def _halves(
    x: Tensor,
    y: Tensor,
    parameters: Sequence[Tensor],
    dy: Tensor | None,
    *,
    receive: Callable[..., Tensor] = _receive,
    add: Callable[..., None] = _add,
    handed: Callable[..., Tensor] = lambda dx, dy, y: dx,
    peer: Callable[[int], int] = lambda rank: rank - 1,
    retain: bool = True,
) -> None:
    """Right, or with a mistake."""
    rank, dy = dist.get_rank(), receive(y, dy)
    leaving = None
    if rank > 0:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=retain)
        message = handed(dx, dy, y).detach().contiguous()
        leaving = dist.isend(message, peer(rank))
    add(parameters, torch.autograd.grad(y, list(parameters), dy))
    if leaving is not None:
        leaving.wait()


def _but(**mistake: Any) -> Answer:
    return lambda x, y, parameters, dy: _halves(x, y, parameters, dy, **mistake)


def _by_backward(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """With torch.autograd.backward and a send that waits."""
    dy = _receive(y, dy)
    if x.requires_grad:
        torch.autograd.backward(y, dy, inputs=[x], retain_graph=True)
        assert x.grad is not None
        dist.send(x.grad, dist.get_rank() - 1)
    torch.autograd.backward(y, dy, inputs=list(parameters))


def _whole(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """An ordinary backward, and then the message."""
    y.backward(_receive(y, dy))
    if x.requires_grad:
        dist.send(_grad(x), dist.get_rank() - 1)


def _weights_first(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    dy = _receive(y, dy)
    _add(parameters, torch.autograd.grad(y, list(parameters), dy, retain_graph=True))
    if x.requires_grad:
        dist.send(torch.autograd.grad(y, [x], dy)[0], dist.get_rank() - 1)


def _twice(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """Sends early, and then a whole backward beside the gradients of the weights."""
    dy = _receive(y, dy)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        dist.send(dx, dist.get_rank() - 1)
    torch.autograd.grad(y, list(parameters), dy, retain_graph=True)
    y.backward(dy)


def _by_comm(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    axis = make_mesh().world
    if dy is None:
        dy = comm.recv(y.detach(), axis, source=axis.rank + 1)
    if x.requires_grad:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        comm.send(dx, axis, to=axis.rank - 1)
    _add(parameters, torch.autograd.grad(y, list(parameters), dy))


def _broadcasts(x: Tensor, y: Tensor, parameters: Sequence[Tensor], dy: Tensor | None) -> None:
    """Every rank tells everybody: right, and far too much."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for source in reversed(range(n)):
        if rank == source:
            if rank > 0:
                (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
            else:
                dx = torch.zeros(y.shape)
            dist.broadcast(dx, source)
        else:
            got = torch.empty(y.shape)
            dist.broadcast(got, source)
            if source == rank + 1:
                dy = got
    _add(parameters, torch.autograd.grad(y, list(parameters), dy))


def _nothing_added(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    pass


def _overwritten(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def _ones(y: Tensor, dy: Tensor | None) -> Tensor:
    """Receives, and goes on as if from y.sum()."""
    got = _receive(y, dy)
    return got if dy is not None else torch.ones_like(got)


RAW = Ranked(
    id="08-5",
    title="send early, in raw PyTorch",
    names=("backward_in_halves",),
    hints=(
        "Which gradient does rank - 1 wait for? torch.autograd.grad computes the gradients of the "
        "inputs that you name, and no others.",
        "Receive dy unless you have it; grad(y, [x], dy) with retain_graph=True, because the graph "
        "is needed again; isend it to rank - 1; then grad(y, parameters, dy), added to p.grad.",
        "(dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True); leaving = dist.isend(dx, rank "
        "- 1); gradients = torch.autograd.grad(y, parameters, dy); p.grad = g if p.grad is None "
        "else p.grad + g; leaving.wait().",
    ),
    wrong=(
        Wrong(lambda x, y, parameters, dy: None, words="have no gradient"),
        Wrong(_but(add=_nothing_added), words="leaves .grad alone"),
        Wrong(_but(add=_overwritten), words="add to what .grad holds"),
        Wrong(_but(retain=False), words="backward through the graph a second time"),
        Wrong(_but(handed=lambda dx, dy, y: dy), words="hands back that of its own input"),
        Wrong(_but(handed=lambda dx, dy, y: y), words="hands back that of its own input"),
        Wrong(_but(receive=_ones), words="goes on with the gradient that arrives"),
        Wrong(_but(handed=lambda dx, dy, y: 2 * dx), words="wrong before it"),
        Wrong(_whole, words="before it sent that of its input"),
        Wrong(_weights_first, words="before it sent that of its input"),
        Wrong(_twice, words="gradients of its two weights for one micro-batch"),
        Wrong(_broadcasts, words="one message of 160 bytes"),
        Wrong(_by_comm, words=REFUSAL),
    ),
    right=(_halves, _by_backward),
    stub=lambda x, y, parameters, dy: None,
    trials=TRIALS,
    inputs=_inputs,
    act=_act,
    looks=(
        RankCase("gradients", "two ranks", TWO, _gradients),
        RankCase("gradients", "four ranks", FOUR, _gradients),
        RankCase("gradients", "three ranks, one micro-batch", THREE, _gradients),
        RankCase("gradients", "one rank", ONE, _gradients),
        RankCase("wire", "one message a micro-batch, peers and bytes", FOUR, _messages),
        RankCase("wire", "it leaves before any W", FOUR, _early),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
