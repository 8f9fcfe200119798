"""`course bench cp`: compare our context-parallel attentions with torch's private ring.

All contestants run in the same processes. They compute forward and backward of one layer's causal
attention on their own shard of the same sequence, in float32 with the same CPU kernel. ``torch
ring again`` is a second torch ring: its ratio to the first is the noise. Torch balances the load
with the same two chunks per rank. It sends K and V by one all-gather, and their gradients by
all-to-all to the ranks that own them.
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
    """Return median ratios to torch's ring and to the contiguous ring, and ms, by world size."""
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
    """Return the result as a table per world size."""
    shape = result["shape"]
    lines = [
        f"Context parallelism and torch's ring: attention of {shape['positions']} positions, "
        f"{shape['heads']} heads, {shape['kv_heads']} KV heads, {result['rounds']} rounds"
    ]
    for world in result["worlds"]:
        lines += ["", f"{world['ranks']} ranks{'':<11}{'ms':>10}{'to torch':>10}"]
        for name, milliseconds in world["milliseconds"].items():
            ratio = world["ratio_to_torch"].get(name)
            shown = "1" if ratio is None else f"{ratio:.2f}"
            lines.append(f"{name:<18}{milliseconds:>10.1f}{shown:>10}")
        lines.append(
            f"zig-zag takes {world['zigzag_to_contiguous']:.2f} of the time of contiguous; its "
            f"busiest rank has {world['busiest_rank_to_contiguous']:.2f} of the work"
        )
        if world["ratio_to_torch"]["ring zigzag"] > ALARM:
            lines.append(f"ring zigzag takes more than {ALARM} times as long as torch's: check it")
    return "\n".join([*lines, "", f"The ratio of '{PEER} again' to '{PEER}' is the noise."])


def torch_ring(axis: Axis, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return (out, dq, dk, dv) of torch's private ring attention, for zig-zag shards."""
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
    """Return q, k, v and the gradient of the output of this rank."""
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
    """Return USP attention: pairs of neighboring ranks split the heads, a ring joins the pairs."""
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
