"""`course bench cp`: our context-parallel attentions beside torch's private ring.

All contestants live in the same processes and do forward and backward of one layer's causal
attention on their own shard of the same sequence, float32, with the same CPU kernel. ``torch ring
again`` is a second one: its ratio to the first is the noise. torch balances with the same two
chunks a rank; its K and V go by one all-gather, its gradients by all-to-all, all the way home.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from course_lib import cp
from course_lib.bench.rounds import Say, Times, interleave, quiet, ratios, slowest_rank, timed
from course_lib.launch import World
from course_lib.mesh import Axis, Mesh, make_mesh
from course_lib.model import AttentionCore

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 1, 2048, 8, 2, 64
WORLDS = (2, 4)
ALARM = 1.25
PEER = "torch ring"
Make = Callable[[Mesh], Callable[[int], None]]


def measure(rounds: int = 20, say: Say = quiet) -> dict:
    """Median ratios to torch's ring and to the contiguous ring, and milliseconds, by ranks."""
    return {
        "rounds": rounds,
        "shape": {
            "sequences": BATCH,
            "positions": SEQ,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        },
        "worlds": [_measure_world(n, rounds, say) for n in WORLDS],
    }


def _measure_world(n: int, rounds: int, say: Say) -> dict:
    with World(n) as world:
        times = slowest_rank(list(world.run(_time_ranks, rounds, say, timeout=120 + 20 * rounds)))
    return {
        "ranks": n,
        "milliseconds": {name: 1e3 * median(seconds) for name, seconds in times.items()},
        "ratio_to_torch": ratios(times, PEER),
        "zigzag_to_contiguous": ratios(times, "ring contiguous")["ring zigzag"],
        "busiest_rank_to_contiguous": max(cp.pairs(cp.ZIGZAG, SEQ, n))
        / max(cp.pairs(cp.CONTIGUOUS, SEQ, n)),
    }


def text(result: dict) -> str:
    """The result as a table for each number of ranks."""
    shape = result["shape"]
    lines = [
        f"Context parallelism beside torch's ring: attention of {shape['positions']} positions, "
        f"{shape['heads']} heads, {shape['kv_heads']} of K and V, {result['rounds']} rounds"
    ]
    for world in result["worlds"]:
        lines += ["", f"{world['ranks']} ranks{'':<11}{'ms':>10}{'to torch':>10}"]
        for name, milliseconds in world["milliseconds"].items():
            ratio = world["ratio_to_torch"].get(name)
            shown = "1" if ratio is None else f"{ratio:.2f}"
            lines.append(f"{name:<18}{milliseconds:>10.1f}{shown:>10}")
        lines.append(
            f"zig-zag takes {world['zigzag_to_contiguous']:.2f} of contiguous; its busiest rank "
            f"has {world['busiest_rank_to_contiguous']:.2f} of the work"
        )
        if world["ratio_to_torch"]["ring zigzag"] > ALARM:
            lines.append(f"ring zigzag takes more than {ALARM} times as long as torch's: wrong")
    return "\n".join([*lines, "", f"'{PEER} again' against '{PEER}' is the noise."])


def torch_ring(axis: Axis, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """(out, dq, dk, dv) by torch's private ring attention; shards of the zig-zag layout."""
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    out, lse = torch_cp._templated_ring_attention(
        axis.group,
        2,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        query=q,
        key=k,
        value=v,
        is_causal=True,
        dropout_p=0.0,
    )
    gradients = torch_cp._templated_ring_attention_backward(
        axis.group,
        2,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad_out=dout,
        grad_out_name="grad_out",
        query=q,
        key=k,
        value=v,
        out=out,
        logsumexp=lse,
        is_causal=True,
        dropout_p=0.0,
    )
    return [x.transpose(1, 2) for x in (out, *gradients)]


def _time_ranks(rounds: int, say: Say) -> Times:
    mesh = make_mesh(cp=torch.distributed.get_world_size())
    contestants = {name: timed(make(mesh), mesh) for name, make in _CONTESTANTS.items()}
    return interleave(contestants, rounds, say=lambda text: say(f"{mesh.cp.size} ranks, {text}"))


def _inputs(mesh: Mesh) -> list[Tensor]:
    """q, k, v and the gradient of the output, of this rank."""
    rows = SEQ // mesh.cp.size
    generator = torch.Generator().manual_seed(mesh.rank)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(BATCH, rows, h, HEAD_DIM, generator=generator) for h in heads]


def _ours(core_on: Callable[[Axis], AttentionCore]) -> Make:
    def make(mesh: Mesh) -> Callable[[int], None]:
        *qkv, dout = _inputs(mesh)
        qkv = [x.requires_grad_() for x in qkv]
        core = core_on(mesh.cp)

        def step(number: int) -> None:
            torch.autograd.grad(core(*qkv), qkv, dout)

        return step

    return make


def _torchs(mesh: Mesh) -> Callable[[int], None]:
    inputs = _inputs(mesh)

    def step(number: int) -> None:
        torch_ring(mesh.cp, *inputs)

    return step


def _with_layout(attention: Callable[..., Tensor], layout: cp.SequenceLayout) -> Make:
    return _ours(lambda axis: partial(attention, axis=axis, layout=layout))


def _grid(axis: Axis) -> AttentionCore:
    """Runs of two neighbours share out heads; two ranks are one run, and a ring of one."""
    heads, ring = cp.split_axis(axis, 2)
    both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=ring)
    return partial(both, axis=axis, layout=cp.nested(cp.ZIGZAG, 2))


_CONTESTANTS: dict[str, Make] = {
    PEER: _torchs,
    "ring zigzag": _with_layout(cp.ring_attention, cp.ZIGZAG),
    "ring contiguous": _with_layout(cp.ring_attention, cp.CONTIGUOUS),
    "gather zigzag": _with_layout(cp.gather_attention, cp.ZIGZAG),
    "ulysses": _with_layout(cp.ulysses_attention, cp.CONTIGUOUS),
    "ulysses x ring": _ours(_grid),
    f"{PEER} again": _torchs,
}
