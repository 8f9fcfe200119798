"""`course bench dp`: compare our three gradient syncs with torch's DistributedDataParallel.

All contestants run in the same four processes. Each trains its own copy of a model with 4.2 M
parameters on the same batches. ``ddp again`` is a second DDP: its ratio to the first is the noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from course_lib import dp
from course_lib.bench.rounds import Say, interleave, quiet, ratios, slowest_rank, timed
from course_lib.data import batch
from course_lib.launch import World
from course_lib.mesh import Mesh, make_mesh
from course_lib.model import Decoder, ModelConfig, build_model

CONFIG = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=8, ffn=1024, max_seq_len=64)
ALARM = 1.25
PEER = "ddp"


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return median ratios to DDP and median ms per training step on 4 ranks."""
    with World(4) as world:
        by_rank = world.run(_time_ranks, rounds, say, timeout=120 + 10 * rounds)
    times = slowest_rank(list(by_rank))
    return {
        "ranks": 4,
        "rounds": rounds,
        "parameters": sum(p.numel() for p in build_model(CONFIG).parameters()),
        "ratio_to_ddp": ratios(times, PEER),
        "milliseconds": {name: 1e3 * sorted(t)[len(t) // 2] for name, t in times.items()},
    }


def text(result: dict) -> str:
    """Return the result as a table."""
    lines = [
        f"Data parallelism and torch's DDP: {result['ranks']} ranks, "
        f"{result['parameters'] / 1e6:.1f} M parameters, {result['rounds']} rounds",
        f"{'':<16}{'ms per step':>12}{'to DDP':>10}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["ratio_to_ddp"].get(name)
        shown = "1" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:<16}{milliseconds:>12.1f}{shown:>10}")
    if result["ratio_to_ddp"]["overlapped"] > ALARM:
        lines.append(f"overlapped takes more than {ALARM} times as long as DDP: check it")
    lines.append("The ratio of 'ddp again' to 'ddp' is the noise of this measurement.")
    return "\n".join(lines)


def _time_ranks(rounds: int, say: Say) -> dict[str, list[float]]:
    mesh = make_mesh()
    contestants = {name: timed(make(mesh), mesh) for name, make in _CONTESTANTS.items()}
    return interleave(contestants, rounds, say=say)


def _inputs(step: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    return batch(
        step % 4, seed=0, batch_size=4, seq_len=64, dp_rank=mesh.dp.rank, dp_size=mesh.dp.size
    )


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)  # the same small cost for all contestants


def _ours(
    make_sync: Callable[[Decoder, Mesh], dp.GradientSync],
) -> Callable[[Mesh], Callable[[int], None]]:
    def make(mesh: Mesh) -> Callable[[int], None]:
        model = build_model(CONFIG)
        sync, optimizer = make_sync(model, mesh), _optimizer(model)

        def step(number: int) -> None:
            tokens, targets = _inputs(number, mesh)
            optimizer.zero_grad()
            total, count = model.loss_sum(tokens, targets)
            (total / (count * mesh.dp.size)).backward()
            sync.finish()
            optimizer.step()

        return step

    return make


def _ddp(mesh: Mesh) -> Callable[[int], None]:
    model = build_model(CONFIG)
    parallel = DistributedDataParallel(model)
    optimizer = _optimizer(model)

    def step(number: int) -> None:
        tokens, targets = _inputs(number, mesh)
        optimizer.zero_grad()
        logits = parallel(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def _overlapped(mib: int) -> Callable[[Mesh], Callable[[int], None]]:
    """Return a contestant with another bucket size than the default."""
    return _ours(lambda model, mesh: dp.Overlapped(model.parameters(), mesh.dp, mib * 2**20))


_CONTESTANTS: dict[str, Callable[[Mesh], Callable[[int], None]]] = {
    PEER: _ddp,
    "overlapped": _ours(lambda model, mesh: dp.Overlapped(model.parameters(), mesh.dp)),
    **{f"{mib} MiB buckets": _overlapped(mib) for mib in (2, 4, 25)},
    "bucketed": _ours(lambda model, mesh: dp.Bucketed(model.parameters(), mesh.dp)),
    "naive": _ours(lambda model, mesh: dp.Naive(model.parameters(), mesh.dp)),
    "ddp again": _ddp,
}
