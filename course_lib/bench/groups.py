"""`course bench groups`: buckets of dp and all-reduces of tp on one link, with priorities or not.

Four ranks with tp = 2 and dp = 2 train a model of six layers. Each half layer is padded by sleep,
so that ranks do not compete for cores, and all axes of a rank share one emulated link.

* ``at once``: a bucket of two layers is sent when backward has filled it, and the next all-reduces
  of tp wait for it.
* ``whole``: a bucket waits for a gap and is sent in one call.
* ``in pieces``: a bucket is sent in pieces that fit into the gaps.

``at once again`` is a second ``at once``: its ratio to the first is the noise. Compute time and
links are emulated, and a shared link is slower than a network card (see
:mod:`course_lib.comm.instruments.links`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch

from course_lib import comm, dp, tp
from course_lib.bench.rounds import Say, interleave, quiet, ratios, slowest_rank, timed
from course_lib.data import batch
from course_lib.launch import World
from course_lib.mesh import Conditions, Link, Links, Mesh, make_mesh
from course_lib.model import ModelConfig, build_model
from course_lib.model.layers import MLP, Attention
from course_lib.trace import TOO_BUSY, overshoot
from course_lib.trace.blocks import MeasuredBlocks
from course_lib.view import Picture, timeline

CONFIG = ModelConfig(
    layers=6, hidden=128, heads=4, kv_heads=4, ffn=512, max_seq_len=16, family="gpt"
)
RANKS, BATCH, SEQ = 4, 4, 16
LAYER_BYTES = 12 * CONFIG.hidden**2 * 4 // 2  # linears of attention and MLP per rank of tp
LINK = Link(alpha=2e-4, beta=1e7)  # a bucket takes about 85 ms, an all-reduce of tp 4 ms
CONDITIONS = Conditions(pace={"F": 0.01, "B": 0.03}, links=Links(LINK, LINK, shared=True))
PEER = "at once"
PIECES = {  # bytes; None: no priorities
    PEER: None,
    "whole": 4 * LAYER_BYTES,
    "in pieces": 240_000,  # 24 ms: with an all-reduce of tp, less than half a layer's backward
    "at once again": None,
}


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Return median ms per step of each contestant, and median ratios to ``at once``."""
    with World(RANKS) as world:
        ran = world.run(
            _time_ranks,
            rounds,
            say,
            timeout=120 + 10 * rounds,
            pace=CONDITIONS.pace,
            links=CONDITIONS.links,
        )
        late = overshoot(_traces(world, PEER))
    times = slowest_rank(list(ran))
    return {
        "ranks": RANKS,
        "rounds": rounds,
        "bucket_bytes": 2 * LAYER_BYTES,
        "piece_bytes": PIECES["in pieces"],
        "milliseconds": {name: 1e3 * median(seconds) for name, seconds in times.items()},
        "ratio_to_at_once": ratios(times, PEER),
        "overshoot": late,
    }


def text(result: dict) -> str:
    """Return the result as a table."""
    lines = [
        f"Buckets of dp and all-reduces of tp on one link: {result['ranks']} ranks, buckets of "
        f"{result['bucket_bytes'] / 1e3:.0f} kB, pieces of {result['piece_bytes'] / 1e3:.0f} kB, "
        f"{result['rounds']} rounds",
        f"{'buckets are sent':<18}{'ms per step':>12}{'to at once':>12}",
    ]
    for name, milliseconds in result["milliseconds"].items():
        ratio = result["ratio_to_at_once"].get(name)
        shown = "1" if ratio is None else f"{ratio:.2f}"
        lines.append(f"{name:<18}{milliseconds:>12.1f}{shown:>12}")
    lines.append(
        "Compute is padded by sleep, links are emulated. The ratio of 'at once again' is the noise "
        "of this measurement."
    )
    if result["overshoot"] > TOO_BUSY:
        lines.append(
            "The machine was too busy: sleeps took more than 10 % too long. Compare the order, not "
            "the times."
        )
    return "\n".join(lines)


def picture(name: str) -> Picture:
    """Return the timeline of a measured step of contestant ``name``."""
    with World(RANKS) as world:
        traces = _traces(world, name)
    title = f"Buckets of dp sent {name}, all-reduces of tp on the same link"
    return timeline(traces, title=title, conditions=CONDITIONS)


def _traces(world: World, name: str) -> list:
    return world.run(one_step, name, pace=CONDITIONS.pace, links=CONDITIONS.links).traces


def one_step(name: str) -> None:
    """Run three warm-up steps, then one step that is traced. Called in a rank."""
    mesh = make_mesh(tp=2)
    step = _make(mesh, PIECES[name])
    for number in range(3):
        step(number)
    comm.barrier(mesh.world)
    mesh.trace.clear()
    step(3)


def _time_ranks(rounds: int, say: Say) -> dict[str, list[float]]:
    mesh = make_mesh(tp=2)
    contestants = {name: timed(_make(mesh, size), mesh) for name, size in PIECES.items()}
    return interleave(contestants, rounds, say=say)


def _make(mesh: Mesh, piece_bytes: int | None) -> Callable[[int], None]:
    """Return a step of tp and dp with padded compute, and with priorities for ``piece_bytes``."""
    model = tp.parallelize(build_model(CONFIG), mesh.tp)
    sync = dp.Overlapped(model.parameters(), mesh.dp, bucket_bytes=2 * LAYER_BYTES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    halves = [m for m in model.modules() if isinstance(m, Attention | MLP)]
    paced = MeasuredBlocks(halves, mesh.trace, mesh.conditions.pace)
    priorities = piece_bytes and comm.Priorities(mesh.tp, mesh.dp, piece_bytes=piece_bytes)

    def step(number: int) -> None:
        at = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
        rows = batch(number, seed=0, batch_size=BATCH, seq_len=SEQ, **at)
        with paced, priorities or nullcontext():
            dp.train_step(model.loss_sum, [rows], sync, optimizer)

    return step
