"""`course bench zero`: compare our ZeRO stages with torch's ZeroRedundancyOptimizer and FSDP2.

All contestants run in the same four processes. Each trains its own copy of a model with 4.2 M
parameters with AdamW on the same batches. Bytes are counted below torch's own calls, as gloo sends
them (its reduce-scatter runs an all-reduce). Peak is the maximum of live bytes on a rank during a
step: parameters, gradients, optimizer state, buffers and activations together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from course_lib import zero
from course_lib.bench.rounds import Say, Times, interleave, quiet, ratios, slowest_rank, timed
from course_lib.data import batch
from course_lib.grading.wire import WireCalls
from course_lib.launch import World
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, ModelConfig, build_model
from course_lib.trace import PeakLiveBytes

RANKS = 4
CONFIG = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=8, ffn=1024, max_seq_len=64)
PEERS = {"zero 1": "zero redundancy", "zero 2": "zero redundancy", "zero 3": "fsdp2"}
Step = Callable[[int], None]


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return ms, bytes sent and peak bytes per training step, and their ratios to the peers."""
    with World(RANKS) as world:
        by_rank = world.run(_time_ranks, rounds, say, timeout=120 + 10 * rounds)
        say("bytes and peak memory")
        sizes = world.run(_sizes, timeout=120)
    return {"rounds": rounds} | summary(slowest_rank(list(by_rank)), list(sizes))


def summary(times: Times, sizes: list[dict[str, tuple[float, int]]]) -> dict:
    """Combine the seconds by contestant with each rank's (bytes sent, peak bytes)."""
    sent = {name: sizes[0][name][0] for name in times}
    peak = {name: max(rank[name][1] for rank in sizes) for name in times}
    return {
        "ranks": RANKS,
        "parameters": sum(p.numel() for p in build_model(CONFIG).parameters()),
        "milliseconds": {name: 1e3 * sorted(t)[len(t) // 2] for name, t in times.items()},
        "bytes": sent,
        "peak": peak,
        "ratio": {
            name: {
                "time": ratios(times, peer)[name],
                "bytes": sent[name] / sent[peer],
                "peak": peak[name] / peak[peer],
            }
            for name, peer in PEERS.items()
        },
        "noise": ratios(times, "fsdp2")["fsdp2 again"],
    }


def text(result: dict) -> str:
    """Return the result as a table."""
    lines = [
        f"ZeRO and torch's: {result['ranks']} ranks, "
        f"{result['parameters'] / 1e6:.1f} M parameters, {result['rounds']} rounds",
        f"{'':<16}{'ms/step':>10}{'MB sent':>10}{'peak MB':>10}   to its peer: time, bytes, peak",
    ]
    for name, milliseconds in result["milliseconds"].items():
        line = f"{name:<16}{milliseconds:>10.1f}"
        line += f"{result['bytes'][name] / 1e6:>10.1f}{result['peak'][name] / 1e6:>10.1f}"
        if name in PEERS:
            shown = ", ".join(f"{value:.2f}" for value in result["ratio"][name].values())
            line += f"   {PEERS[name]}: {shown}"
        lines.append(line)
    lines.append(
        "The ratio of 'fsdp2 again' to 'fsdp2', the noise of this measurement, is "
        f"{result['noise']:.2f}."
    )
    return "\n".join(lines)


def _time_ranks(rounds: int, say: Say) -> dict[str, list[float]]:
    mesh = make_mesh()
    contestants = {name: timed(make(mesh), mesh) for name, make in _CONTESTANTS.items()}
    return interleave(contestants, rounds, say=say)


def _sizes() -> dict[str, tuple[float, int]]:
    """Return (bytes that gloo sends, peak live bytes) of this rank per step, by contestant."""
    mesh = make_mesh()
    return {name: _size(make, mesh) for name, make in _CONTESTANTS.items()}


def _size(make: Callable[[Mesh], Step], mesh: Mesh) -> tuple[float, int]:
    with PeakLiveBytes() as live:  # from the start, because these tensors are resized later
        step, peaks = make(mesh), []
        for number in range(3):
            live.peak = live.now
            step(number)
            peaks.append(live.peak)
    with WireCalls() as wire:
        step(3)
    inside = {"reduce_scatter": 2}  # gloo runs an all-reduce
    sent = sum(call.wire(RANKS) * inside.get(call.op, 1) for call in wire.calls)
    return float(sent), min(peaks[1:])  # gloo may free a buffer a moment late


def _inputs(step: int, mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(
        step % 4, seed=0, batch_size=RANKS, seq_len=64, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size
    )


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _ours(make_zero: Callable[[Decoder, Mesh], zero.Sharded]) -> Callable[[Mesh], Step]:
    def make(mesh: Mesh) -> Step:
        model = build_model(CONFIG)
        z = make_zero(model, mesh)

        def step(number: int) -> None:
            z.zero_grad()
            total, count = model.loss_sum(*_inputs(number, mesh))
            (total / (count * mesh.dp.size)).backward()
            z.finish()
            z.step()

        return step

    return make


def _theirs(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> Step:
    def step(number: int) -> None:
        tokens, targets = _inputs(number, mesh)
        optimizer.zero_grad()
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def _zero_redundancy(views: bool) -> Callable[[Mesh], Step]:
    """Return it with its defaults, or with every option that avoids a copy (``views``)."""

    def make(mesh: Mesh) -> Step:
        model = DistributedDataParallel(build_model(CONFIG), gradient_as_bucket_view=views)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=views, lr=1e-3
        )
        return _theirs(model, optimizer, mesh)

    return make


def _fsdp2(mesh: Mesh) -> Step:
    model = build_model(CONFIG)
    devices = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=devices, reshard_after_forward=block is not model.blocks[-1])
    fully_shard(model, mesh=devices)
    return _theirs(model, _adam(list(model.parameters())), mesh)


_CONTESTANTS: dict[str, Callable[[Mesh], Step]] = {
    "zero redundancy": _zero_redundancy(views=False),
    "same, views": _zero_redundancy(views=True),
    "zero 1": _ours(lambda model, mesh: zero.Zero1(model.parameters(), mesh.dp, _adam)),
    "zero 2": _ours(lambda model, mesh: zero.Zero2(model.parameters(), mesh.dp, _adam)),
    "fsdp2": _fsdp2,
    "zero 3": _ours(lambda model, mesh: zero.Zero3(model, list(model.blocks), mesh.dp, _adam)),
    "fsdp2 again": _fsdp2,
}
