"""Block size and layout of ring attention: one turn takes the longer of compute and transfer.

c is the block of a rank, in tokens; F the FLOP/s of attention; B the bytes per second of a link.
A turn computes 4 c^2 FLOPs per feature of the queries, half of it under a causal mask with zig-zag
shards, and sends K and V: 4 c bytes per feature of K (Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from course_lib.formulas.moves import ring
from course_lib.planner.hardware import hardware

LAYOUTS = ("contiguous", "zig-zag", "striped")
# zhuzilin/ring-flash-attention, README: 8 H800, 8k tokens per GPU, the heads of Llama 3.1 8B;
# forward, and forward with backward.
PUBLISHED = {"contiguous": (0.521, 0.539), "zig-zag": (0.852, 0.902), "striped": (0.744, 0.829)}
TILE = 128  # positions of a tile: a kernel skips a tile only if all of it is masked
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128  # Llama 3 70B
BACKWARD = Fraction(5, 2)  # FLOPs of a fused backward over those of a forward: 5 products, not 2


def turn_tiles(layout: str, n: int, block: int) -> list[int]:
    """Return the tiles that the busiest of ``n`` ranks computes in each turn."""
    t = block // TILE
    half, causal = t // 2, t * (t + 1) // 2

    def tiles(rank: int, source: int) -> int:
        if layout == "striped":
            return causal
        if layout == "contiguous":
            return causal if source == rank else t * t * (source < rank)
        own, theirs = (rank, 2 * n - 1 - rank), (source, 2 * n - 1 - source)
        return sum(
            half * (half + 1) // 2 if mine == its else half * half * (its < mine)
            for mine in own
            for its in theirs
        )

    return [max(tiles(rank, (rank - turn) % n) for rank in range(n)) for turn in range(n)]


def share_of_ideal(layout: str, n: int, block: int) -> float:
    """Return one process's tiles divided by n, over the tiles of the turns."""
    t = n * block // TILE
    return t * (t + 1) / 2 / n / sum(turn_tiles(layout, n, block))


def compute_seconds(block: float, *, causal: bool = True, gpu: str = "h100") -> float:
    """Return the seconds of one turn's attention in forward at the peak of ``gpu``."""
    flops = 4 * block**2 * HEADS * HEAD_DIM * (0.5 if causal else 1.0)
    return flops / hardware(gpu).peak["bf16"]


def transfer_seconds(block: float, link: str, kv_heads: int, gpu: str = "h100") -> float:
    """Return the seconds in which K and V of ``block`` tokens cross a ``link`` of ``gpu``."""
    one = getattr(hardware(gpu), link)
    return 2 * 2 * block * kv_heads * HEAD_DIM / (one.bandwidth * one.efficiency)


def smallest_block(
    link: str,
    kv_heads: int,
    *,
    causal: bool = True,
    backward: bool = False,
    gpu: str = "h100",
) -> float:
    """Return the block in tokens from which on a turn hides its transfer, latency left out."""
    compute = compute_seconds(1, causal=causal, gpu=gpu)
    block = transfer_seconds(1, link, kv_heads, gpu) / compute
    return block * float(_backward_bytes() / BACKWARD) if backward else block


def _backward_bytes() -> Fraction:
    """Return the ratio of bytes sent in a backward and a forward turn: K, V and sums in fp32."""
    passes = ring(2, 4, 2)
    return sum((move.wire for move in passes.backward), Fraction(0)) / passes.forward[0].wire


def h800_block() -> float:
    """Return the smallest block of the published runs: Llama 3.1 8B has 8 KV heads for 32."""
    return smallest_block("node", HEADS * 8 // 32, backward=True, gpu="h800")


def curves_by_block() -> dict[str, dict[float, float]]:
    """Return milliseconds of a turn by the block in tokens."""
    blocks = [2.0**n for n in range(8, 17)]
    return {
        "compute, causal": {c: 1e3 * compute_seconds(c) for c in blocks},
        "K and V of 64 heads by network": {
            c: 1e3 * transfer_seconds(c, "network", HEADS) for c in blocks
        },
        "8 heads by network": {c: 1e3 * transfer_seconds(c, "network", KV_HEADS) for c in blocks},
        "8 heads by NVLink": {c: 1e3 * transfer_seconds(c, "node", KV_HEADS) for c in blocks},
    }


def text() -> Iterator[str]:
    """Yield the shares by layout, and the smallest block by link and heads."""
    yield "2. Ring attention: shares of ideal on 8 ranks, blocks of 8,192 tokens"
    yield f"{'':<12}{'counted':>9}{'published forward':>19}{'with backward':>15}"
    for layout in LAYOUTS:
        forward, both = PUBLISHED[layout]
        counted = share_of_ideal(layout, 8, 8192)
        yield f"{layout:<12}{counted:>9.1%}{forward:>19.1%}{both:>15.1%}"
    yield "smallest block in tokens that hides the transfer, H100 at its peak"
    yield (
        f"{'link':<9}{'KV heads':>9}{'full':>9}{'causal':>9}{'backward':>10}{'ranks at 128k':>15}"
    )
    for link in ("node", "network"):
        for kv_heads in (HEADS, KV_HEADS):
            full = smallest_block(link, kv_heads, causal=False)
            causal = smallest_block(link, kv_heads)
            backward = smallest_block(link, kv_heads, backward=True)
            yield (
                f"{link:<9}{kv_heads:>9}{full:>9,.0f}{causal:>9,.0f}{backward:>10,.0f}"
                f"{131072 / backward:>15.1f}"
            )
    yield f"H800, 8 of 32 heads, causal, by NVLink: {h800_block():,.0f} tokens"
