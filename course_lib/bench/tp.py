"""`course bench tp`: compare our tensor and sequence parallelism with torch's DTensor.

All contestants run in the same four processes. Each computes forward and backward of its own copy
of the same four blocks, until every gradient is ready for an optimizer. ``dtensor again`` is a
second DTensor: its ratio to the first is the noise. DTensor has one PrepareModuleInput for the
linears that share an input, so that it sends as few bytes as we do. The last part compares our
sequence parallelism with collectives and with rings between products, for wider blocks on an
emulated slow link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib import comm, sp, tp
from course_lib.bench.rounds import Say, Times, interleave, quiet, ratios, slowest_rank, timed
from course_lib.comm.operators import Region
from course_lib.grading.wire import WireCalls
from course_lib.launch import World
from course_lib.mesh import Link, Links, Mesh, make_mesh
from course_lib.model import ModelConfig, build_model

CONFIG = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=8, ffn=1024, max_seq_len=128)
WIDE = replace(
    CONFIG, layers=2, hidden=512, ffn=2048, max_seq_len=256
)  # products long enough to overlap
BATCH, RANKS = 4, 4
SLOW = Link(alpha=1e-4, beta=100e6)  # WIDE's gathers take about as long as its products
ALARM = 1.25
PEERS = {"tp": "dtensor tp", "sp": "dtensor sp"}
Step = Callable[[int], None]
Make = Callable[[Mesh], Step]


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return median ratios to DTensor and bytes, then rings and collectives on a slow link."""
    deadline = 120 + 20 * rounds
    with World(RANKS) as world:
        sent = world.run(sent_in_a_step)[0]
        ran = world.run(_time_ranks, rounds, _CONTESTANTS, say, timeout=deadline)
        times, links = slowest_rank(list(ran)), Links(SLOW, SLOW)
        ran = world.run(_time_ranks, rounds, _ON_A_SLOW_LINK, say, timeout=deadline, links=links)
        slow_times = slowest_rank(list(ran))
    return {
        "ranks": RANKS,
        "rounds": rounds,
        "milliseconds": _milliseconds(times),
        "ratio": {
            name: ratios(times, PEERS[name[:2]])[name] for name in times if name[:2] in PEERS
        },
        "noise": ratios(times, "dtensor tp")["dtensor again"],
        "bytes": sent,
        "slow": {
            "link": f"{SLOW.beta / 1e6:.0f} MB/s",
            "milliseconds": _milliseconds(slow_times),
            "rings_to_plain": ratios(slow_times, "sp")["sp rings"],
        },
    }


def sent_in_a_step() -> dict[str, float]:
    """Return the bytes that this rank sends per step, counted below comm and DTensor."""
    mesh, sent = make_mesh(tp=RANKS), {}
    for name, make in _CONTESTANTS.items():
        step = make(mesh)
        with WireCalls() as counted:
            step(0)
        sent[name] = float(sum(call.wire(RANKS) for call in counted.calls))
    return sent


def text(result: dict) -> str:
    """Return the result as two tables."""
    lines = [
        f"Tensor parallelism and DTensor: {result['ranks']} ranks, 4 blocks, forward and "
        f"backward, {result['rounds']} rounds",
        f"{'':<16}{'ms':>8}{'to DTensor':>12}{'bytes per rank':>16}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["ratio"].get(name)
        shown = "1" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:<16}{milliseconds:>8.1f}{shown:>12}{result['bytes'][name]:>16,.0f}")
    lines.append(f"A second DTensor takes {result['noise']:.2f} of the first: this is the noise.")
    slow = result["slow"]
    lines.append(
        f"On an emulated link of {slow['link']}: "
        + ", ".join(f"{name} {ms:.1f} ms" for name, ms in slow["milliseconds"].items())
        + f"; rings take {slow['rings_to_plain']:.2f} of the time of collectives."
    )
    lines += [
        f"{name} takes more than {ALARM} times as long as DTensor: check it"
        for name in ("tp", "sp")
        if result["ratio"][name] > ALARM
    ]
    return "\n".join(lines)


def _milliseconds(times: Times) -> dict[str, float]:
    return {name: 1e3 * median(seconds) for name, seconds in times.items()}


def _time_ranks(rounds: int, makes: dict[str, Make], say: Say) -> Times:
    mesh = make_mesh(tp=RANKS)
    contestants = {name: timed(make(mesh), mesh) for name, make in makes.items()}
    return interleave(contestants, rounds, say=say)


def _step(blocks: nn.ModuleList, seq_len: int, finish: Callable[[], None]) -> Step:
    """Return a step: forward and backward through ``blocks`` from the same ``seq_len`` rows."""
    config: ModelConfig = blocks[0].config  # type: ignore[assignment]
    torch.manual_seed(0)
    x_BSD = torch.randn(BATCH, seq_len, config.hidden)
    positions_S = torch.arange(config.max_seq_len)

    def step(_: int) -> None:
        y_BSD = x_BSD.clone().requires_grad_()
        for block in blocks:
            y_BSD = block(y_BSD, positions_S)
        blocks.zero_grad()
        y_BSD.square().mean().backward()
        finish()

    return step


def _ours(region: Region, config: ModelConfig = CONFIG, *, rings: bool = False) -> Make:
    def make(mesh: Mesh) -> Step:
        model = build_model(config)
        plan = tp.plan_for(model)
        tp.parallelize(model, mesh.tp, region, tp.overlapped(plan) if rings else plan)
        blocks = model.blocks
        if region == tp.REGION:
            return _step(blocks, config.max_seq_len, lambda: None)

        def finish() -> None:
            sp.sum_gradients(comm.held_gradients(blocks.parameters()), mesh.tp)

        return _step(blocks, config.max_seq_len // RANKS, finish)

    return make


def _dtensor(outside: Any) -> Make:
    """Return the same blocks by torch; ``outside`` is the placement between the linears."""
    inside = Replicate()
    plan: dict[str, Any] = {
        "attn": PrepareModuleInput(
            input_layouts=(outside, None), desired_input_layouts=(inside, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(outside,), desired_input_layouts=(inside,)),
        **{name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v")},
        **{name: ColwiseParallel() for name in ("ffn.gate", "ffn.up")},
        **{name: RowwiseParallel(output_layouts=outside) for name in ("attn.o", "ffn.down")},
    }
    by_rows = outside == Shard(1)
    if by_rows:
        norms = ("attn_norm", "ffn_norm")
        plan |= {name: SequenceParallel(use_local_output=True) for name in norms}

    def make(_: Mesh) -> Step:
        blocks = build_model(CONFIG).blocks
        device_mesh = init_device_mesh("cpu", (RANKS,))
        for block in blocks:
            parallelize_module(block, device_mesh, plan)
        rows = CONFIG.max_seq_len // (RANKS if by_rows else 1)
        return _step(blocks, rows, partial(_whole_norms, blocks))

    return make


def _whole_norms(blocks: nn.ModuleList) -> None:
    """Sum the gradients of norms, which DTensor leaves as partial sums."""
    for parameter in blocks.parameters():
        gradient: Tensor | None = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            parameter.grad = gradient.redistribute(placements=[Replicate()])


_CONTESTANTS: dict[str, Make] = {
    "dtensor tp": _dtensor(Replicate()),
    "tp": _ours(tp.REGION),
    "dtensor sp": _dtensor(Shard(1)),
    "sp": _ours(sp.REGION),
    "sp again": _ours(sp.GATHER_AGAIN),
    "sp rings": _ours(sp.REGION, rings=True),
    "dtensor again": _dtensor(Replicate()),
}
_ON_A_SLOW_LINK: dict[str, Make] = {
    "sp": _ours(sp.REGION, WIDE),
    "sp rings": _ours(sp.REGION, WIDE, rings=True),
}
