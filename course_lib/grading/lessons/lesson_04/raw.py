"""04-5: gather, use, free: stage 3 in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import comm
from course_lib.grading.exercise import Answer, Wrong
from course_lib.grading.lessons.lesson_04.layers import (
    act,
    gradients,
    inputs,
    kept_shards,
    layer_backward,
    layer_forward,
    outputs,
    peak,
    sent_bytes,
)
from course_lib.grading.ranked import RankCase, Ranked, Trial
from course_lib.mesh import make_mesh

TWO, FOUR, THREE, ONE = range(4)
TRIALS = (Trial(2, 2), Trial(4, 12), Trial(3, 3), Trial(1, 2))  # size: layers
REFUSAL = "this is what you are asked to write"
Shards = Sequence[Tensor]
Result = tuple[Tensor, list[Tensor]]


def _gathered(shard: Tensor, width: int) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts)[: width * width].view(width, width)


def _padded(gradient: Tensor, shard: Tensor) -> Tensor:
    full = torch.zeros(len(shard) * dist.get_world_size())
    full[: gradient.numel()] = gradient.flatten()
    return full


def _scattered(gradient: Tensor, shard: Tensor) -> Tensor:
    """Pieces by all-to-all, added by their owner."""
    pieces = _padded(gradient, shard)
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return received.view(-1, len(shard)).sum(0)


def _native(gradient: Tensor, shard: Tensor) -> Tensor:
    mine = torch.empty_like(shard)
    dist.reduce_scatter(mine, list(_padded(gradient, shard).chunk(dist.get_world_size())))
    return mine


def _run(
    shards: Shards,
    x: Tensor,
    dy: Tensor,
    *,
    gather: Answer = _gathered,
    scatter: Answer = _native,
    order: int = -1,
) -> Result:
    """Right, or with another way to gather or to scatter."""
    width, passed = x.shape[1], [x]
    for shard in shards:
        passed.append(layer_forward(passed[-1], gather(shard, width)))
    found = []
    for layer in reversed(range(len(shards))):
        weight = gather(shards[layer], width)
        dy, dw = layer_backward(passed[layer], passed[layer + 1], weight, dy)
        found.append(scatter(dw, shards[layer]))
        del weight, dw
    return passed[-1], found[::order]


def _right_keeps_last(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """The last layer stays; gradients by all-to-all and a local sum."""
    width, passed, weight = x.shape[1], [x], x
    for shard in shards:
        weight = _gathered(shard, width)
        passed.append(layer_forward(passed[-1], weight))
    found: list[Tensor] = []
    for layer in range(len(shards) - 1, -1, -1):
        if layer < len(shards) - 1:
            weight = _gathered(shards[layer], width)
        dy, dw = layer_backward(passed[layer], passed[layer + 1], weight, dy)
        found.insert(0, _scattered(dw, shards[layer]))
    return passed[-1], found


def _but(**mistake: object) -> Answer:
    return lambda shards, x, dy: _run(shards, x, dy, **mistake)  # type: ignore[arg-type]


def _keeps_all(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """Data parallelism in disguise: everything is gathered once, and stays."""
    width, passed = x.shape[1], [x]
    weights = [_gathered(shard, width) for shard in shards]
    for weight in weights:
        passed.append(layer_forward(passed[-1], weight))
    found = []
    for layer in reversed(range(len(shards))):
        dy, dw = layer_backward(passed[layer], passed[layer + 1], weights[layer], dy)
        found.append(_native(dw, shards[layer]))
    return passed[-1], found[::-1]


def _gathers_all_first(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """The right bytes, all weights alive at once, forward and backward."""
    width, passed = x.shape[1], [x]
    weights = [_gathered(shard, width) for shard in shards]
    for weight in weights:
        passed.append(layer_forward(passed[-1], weight))
    del weights
    again, found = [_gathered(shard, width) for shard in shards], []
    for layer in reversed(range(len(shards))):
        dy, dw = layer_backward(passed[layer], passed[layer + 1], again[layer], dy)
        found.append(_native(dw, shards[layer]))
    return passed[-1], found[::-1]


def _scatters_last(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    """Full gradients of all layers wait for the end."""
    y, whole = _run(shards, x, dy, scatter=lambda dw, shard: dw)
    return y, [_native(dw, shard) for dw, shard in zip(whole, shards, strict=True)]


def _forward_only(shards: Shards, x: Tensor, dy: Tensor) -> Result:
    y, _ = _run(shards, x, dy)
    return y, [torch.zeros_like(shard) for shard in shards]


def _piece(dw: Tensor, shard: Tensor) -> Tensor:
    return _padded(dw, shard).chunk(dist.get_world_size())[dist.get_rank()].clone()


def _all_reduced(dw: Tensor, shard: Tensor) -> Tensor:
    dist.all_reduce(dw)
    return _piece(dw, shard)


def _whole_sum(dw: Tensor, shard: Tensor) -> Tensor:
    dist.all_reduce(dw)
    return dw


def _neighbour(dw: Tensor, shard: Tensor) -> Tensor:
    n = dist.get_world_size()
    pieces = _padded(dw, shard).chunk(n)
    return _native(torch.cat([*pieces[1:], pieces[0]]), shard)


def _own_weights(shard: Tensor, width: int) -> Tensor:
    """Nothing is gathered: the rest of the layer is zeros."""
    full = torch.zeros(dist.get_world_size(), len(shard))
    full[dist.get_rank()] = shard
    return full.flatten()[: width * width].view(width, width)


def _backwards(shard: Tensor, width: int) -> Tensor:
    """Joined from the last rank to the first."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts[::-1])[: width * width].view(width, width)


def _by_comm(shard: Tensor, width: int) -> Tensor:
    return comm.all_gather(shard, make_mesh().dp)[: width * width].view(width, width)


RAW = Ranked(
    id="04-5",
    title="gather, use, free, in raw PyTorch",
    names=("sharded_pass",),
    hints=(
        "Write a helper that makes a whole W from a shard. Where is it called, and what may not "
        "outlive the use of W?",
        "Forward: for each shard gather W, compute, keep only x and y. Backward, from the "
        "last layer: gather W again, layer_backward, pad dW like the weights, reduce-scatter it; "
        "only the shard stays.",
        "parts = [torch.empty_like(shard) for _ in range(n)]; dist.all_gather(parts, shard); W = "
        "torch.cat(parts)[: d * d].view(d, d). Then flat = F.pad(dW.flatten(), (0, n * len(shard) "
        "- d * d)); mine = torch.empty_like(shard); dist.reduce_scatter(mine, "
        "list(flat.chunk(n))).",
    ),
    wrong=(
        Wrong(lambda shards, x, dy: None, words="(y, gradients) is wanted"),
        Wrong(lambda shards, x, dy: (x, list(shards)), words="y is x: no layer was run"),
        Wrong(_but(gather=_own_weights), words="outputs are wrong on every rank"),
        Wrong(_but(gather=_backwards), words="outputs are wrong on every rank"),
        Wrong(_forward_only, words="gradients are wrong on every rank"),
        Wrong(_but(scatter=_piece), words="nothing was summed"),
        Wrong(
            _but(scatter=lambda dw, shard: _native(dw, shard) / dist.get_world_size()),
            words="not the average",
        ),
        Wrong(_but(scatter=lambda dw, shard: _native(dw.T, shard)), words="dW is transposed"),
        Wrong(_but(scatter=_whole_sum), words="a shard has"),
        Wrong(_but(scatter=_neighbour), words="shards of another rank"),
        Wrong(_but(order=1), words="gradients[l] belongs to layer l"),
        Wrong(_but(scatter=_all_reduced), words="for each layer two gathers"),
        Wrong(_keeps_all, words="for each layer two gathers"),
        Wrong(_gathers_all_first, words="let a layer's weights"),
        Wrong(_scatters_last, words="let a layer's weights"),
        Wrong(_but(gather=_by_comm), words=REFUSAL),
    ),
    right=(_run, _right_keeps_last),
    stub=lambda shards, x, dy: None,
    trials=TRIALS,
    inputs=inputs,
    act=act,
    looks=(
        RankCase("outputs", "two ranks, two layers", TWO, outputs),
        RankCase("gradients", "two ranks, two layers", TWO, gradients),
        RankCase("gradients", "four ranks, twelve layers", FOUR, gradients),
        RankCase("gradients", "three ranks", THREE, gradients),
        RankCase("gradients", "one rank", ONE, gradients),
        RankCase("weights", "shards are only read", FOUR, kept_shards, later=True),
        RankCase("wire", "bytes", FOUR, sent_bytes),
        RankCase("peak", "never all at once", FOUR, peak),
    ),
    refused=("course_lib.comm.transfer:issue",),
)
