"""What exercise 04-5 computes, whole and in one process, and how it looks at what came out."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from course_lib.grading.compare import difference
from course_lib.grading.exercise import Answer
from course_lib.grading.ranked import Seen, Trial
from course_lib.ledger import wire
from course_lib.mesh import Mesh
from course_lib.zero import padded

WIDTH, ROWS = 31, 2  # of a layer: 961 elements, which 2 and 4 do not divide


def layer_forward(x: Tensor, weight: Tensor) -> Tensor:
    """y = tanh(x @ W)."""
    return torch.tanh(x @ weight)


def layer_backward(x: Tensor, y: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dW) of :func:`layer_forward`, from dy."""
    dz = dy * (1 - y * y)
    return dz @ weight.T, x.T @ dz


def _weights(trial: Trial, seed: int) -> Tensor:
    """[layers, WIDTH, WIDTH]; trial.size is the number of layers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(trial.size, WIDTH, WIDTH, generator=generator) / 4


def shards_of(weights: Tensor, rank: int, n: int) -> list[Tensor]:
    """Rank's shards of each layer: flat, zeros at the end."""
    flat = weights.flatten(1)
    full = torch.nn.functional.pad(flat, (0, padded(flat.shape[1], n) - flat.shape[1]))
    return [piece.clone() for piece in full.chunk(n, 1)[rank]]


def _rows(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed + 1 + rank)
    return torch.randn(ROWS, WIDTH, generator=own), torch.randn(ROWS, WIDTH, generator=own)


def inputs(trial: Trial, rank: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """This rank's shards, its x and its dy."""
    return shards_of(_weights(trial, seed), rank, trial.n), *_rows(rank, seed)


def act(answers: Sequence[Answer], inputs: tuple[Any, ...], mesh: Mesh) -> Any:
    """Runs in a rank."""
    return answers[0](*inputs)


def _whole(seen: Seen, rank: int) -> tuple[Tensor, Tensor]:
    """y of this rank's rows, and the gradients [layers, WIDTH, WIDTH] that they give."""
    weights, (x, dy) = _weights(seen.trial, seen.seed), _rows(rank, seen.seed)
    passed = [x]
    for weight in weights:
        passed.append(layer_forward(passed[-1], weight))
    gradients = []
    for layer in reversed(range(len(weights))):
        dy, gradient = layer_backward(passed[layer], passed[layer + 1], weights[layer], dy)
        gradients.append(gradient)
    return passed[-1], torch.stack(gradients[::-1])


def outputs(seen: Seen) -> str:
    """y, of the rank's own rows."""
    got = []
    for rank, value in enumerate(seen.values):
        if not isinstance(value, tuple | list) or len(value) != 2:
            return f"rank {rank} returned a {type(value).__name__}; (y, gradients) is wanted"
        got.append(value[0])
    n = seen.trial.n
    says = difference("outputs", got, [_whole(seen, rank)[0] for rank in range(n)])
    if says and n > 1 and not difference("", got, [x for x, _ in _all_rows(seen)]):
        return f"y is x: no layer was run ({says})"
    return says


def _all_rows(seen: Seen) -> list[tuple[Tensor, Tensor]]:
    return [_rows(rank, seen.seed) for rank in range(seen.trial.n)]


def gradients(seen: Seen) -> str:
    """The own shards of the gradients, summed over the ranks, layer by layer."""
    if says := outputs(seen):
        return says
    n, layers = seen.trial.n, seen.trial.size
    for rank, (_, found) in enumerate(seen.values):
        count = len(found) if isinstance(found, list | tuple) else None
        if count != layers or not all(isinstance(each, Tensor) for each in found):
            return f"rank {rank}: gradients are a list of {layers} tensors, one for each layer"
        shape = list(seen.ranks[rank].inputs[0][0].shape)
        for each in found:
            if list(each.shape) != shape:
                return (
                    f"rank {rank} returned a gradient of shape {list(each.shape)}; a shard has "
                    f"{shape}, padding included"
                )
    got = [torch.cat(list(found)) for _, found in seen.values]
    own = [_whole(seen, rank)[1] for rank in range(n)]
    total = torch.stack(own).sum(0)
    wanted = [torch.cat(shards_of(total, rank, n)) for rank in range(n)]
    says = difference("gradients", got, wanted)
    if not says or n == 1:
        return says
    mistakes = [
        (
            [torch.cat(shards_of(own[rank], rank, n)) for rank in range(n)],
            "these are the pieces of each rank's own gradient: nothing was summed",
        ),
        ([each / n for each in wanted], "the sum over the ranks is wanted, not the average"),
        (
            [torch.cat(shards_of(total.flip(0), rank, n)) for rank in range(n)],
            "the layers are in the order of backward: gradients[l] belongs to layer l",
        ),
        (
            [torch.cat(shards_of(total, (rank + 1) % n, n)) for rank in range(n)],
            "these are the shards of another rank",
        ),
        (
            [torch.cat(shards_of(total.mT, rank, n)) for rank in range(n)],
            "dW is transposed: dW = x.T @ dz",
        ),
    ]
    for mistaken, message in mistakes:
        if not difference("", got, mistaken):
            return f"{message} ({says})"
    return says


def sent_bytes(seen: Seen) -> str:
    """Two gathers (one for the last layer, if it is kept) and one reduce-scatter for a layer."""
    n, layers = seen.trial.n, seen.trial.size
    size = 4 * padded(WIDTH * WIDTH, n)
    gather, scatter = wire("all_gather", size // n, n), wire("reduce_scatter", size, n)
    most = layers * (2 * gather + scatter)
    for rank, observed in enumerate(seen.ranks):
        sent = sum((call.wire(n) for call in observed.calls), Fraction(0))
        if sent not in (most, most - gather):
            ops = ", ".join(sorted({call.op for call in observed.calls}))
            return (
                f"rank {rank} sent {float(sent):,g} bytes by {ops}; for each layer two gathers and "
                f"one reduce-scatter are {float(most):,g} (a gather less where the last layer is "
                "kept)"
            )
    return ""


def peak(seen: Seen) -> str:
    """Never all weights at once, nor all full gradients."""
    limit = 4 * seen.trial.size * WIDTH * WIDTH
    for rank, observed in enumerate(seen.ranks):
        if observed.peak >= limit:
            return (
                f"rank {rank} had {observed.peak:,} bytes alive that it made; the weights of all "
                f"{seen.trial.size} layers together are {limit:,}: let a layer's weights and full "
                "gradient go before the next one's come"
            )
    return ""


def kept_shards(seen: Seen) -> str:
    """The shards are only read."""
    for rank, observed in enumerate(seen.ranks):
        before = inputs(seen.trial, rank, seen.seed)[0]
        if difference("", [torch.stack(observed.inputs[0])], [torch.stack(before)]):
            return f"rank {rank}'s shards of the weights were written: they are only read here"
    return ""
