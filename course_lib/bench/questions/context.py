"""Whether context parallelism is needed when attention stores no scores: what the planner says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from course_lib.planner.catalog import model
from course_lib.planner.configuration import configure
from course_lib.planner.estimate import RESERVE, estimate
from course_lib.planner.hardware import Hardware, hardware
from course_lib.planner.result import Estimate

# The share of the H100's peak in the planner's calibration of 2024, rounded. It is fixed here, so
# that the page does not change with every new row of published runs.
EFFICIENCY = 0.58
LENGTHS = (8192, 32768, 131072, 524288)
# GPUs, tokens per step and degrees: Llama 3's own for 405B (arXiv:2407.21783, table 4).
RUNS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "70B": ("llama-3-70b", 64, 2**22, {"tp": 8, "pp": 1, "zero": 3}),
    "405B": ("llama-3-405b", 16384, 2**24, {"tp": 8, "pp": 16, "zero": 1}),
}
CHUNKS = 7  # of the interleaved schedule
RINGS = (1, 2, 4, 8, 16, 32)


@cache
def h100() -> Hardware:
    """Return the H100 of the catalog at ``EFFICIENCY``."""
    return replace(hardware("h100"), efficiency={"bf16@2024": EFFICIENCY})


def free_bytes() -> float:
    """Return the bytes of an H100 that a plan may use."""
    return (1 - RESERVE) * hardware("h100").capacity_bytes


@cache
def planned(
    run: str, seq: int, recompute: str, cp: int = 1, chunks: int = 1, tokens: int | None = None
) -> Estimate:
    """Return the estimate of a step of ``tokens``; each replica has one sequence at least."""
    name, gpus, usual, degrees = RUNS[run]
    tokens = usual if tokens is None else tokens
    dp = gpus // (degrees["tp"] * degrees["pp"] * cp)
    batch = max(dp, tokens // seq)
    plan = configure(
        model(name),
        gpus,
        cp=cp,
        chunks=chunks,
        seq=seq,
        recompute=recompute,
        global_batch=batch,
        **degrees,
    )
    return estimate(model(name), h100(), plan)


def smallest_ring(run: str, seq: int, recompute: str) -> int | None:
    """Return the smallest CP with which the plan fits, whatever its batch; None if none does."""
    _, gpus, _, degrees = RUNS[run]
    replicas = gpus // (degrees["tp"] * degrees["pp"])
    fitting = (cp for cp in RINGS if cp <= replicas and planned(run, seq, recompute, cp).fits)
    return next(fitting, None)


def layer_inputs(run: str, seq: int) -> float:
    """Return the bytes of the layer inputs of one sequence in all layers, 1/TP of the rows each."""
    name, _, _, degrees = RUNS[run]
    return 2 * seq * model(name).hidden * model(name).layers / degrees["tp"]


def sequence_seconds(run: str, seq: int) -> float:
    """Return the seconds from the first forward to the last backward of one sequence, no CP."""
    one = planned(run, seq, "full", tokens=1)
    return one.step_seconds - one.parts.get("dp", 0.0) - one.parts["optimizer"]


def curves_by_length() -> dict[str, dict[float, float]]:
    """Return GB per GPU by thousand (1,024) tokens per sequence, without CP."""
    found = {
        f"{run}, recompute {recompute}": {
            seq / 1024: planned(run, seq, recompute).memory.total / 1e9
            for seq in (8192, 16384, 32768, 65536, 131072, 262144, 524288)
        }
        for run, recompute in (("70B", "none"), ("70B", "full"), ("405B", "full"))
    }
    found["free on an H100 of 80 GB"] = {seq / 1024: free_bytes() / 1e9 for seq in LENGTHS}
    return found


def text() -> Iterator[str]:
    """Yield memory without CP, the smallest CP that fits, and what CP does to the step."""
    yield "3. Context parallelism: GB per GPU without it, and the smallest CP that fits"
    yield (
        f"{'run':<6}{'tokens':>8} {'recompute':<10}{'states':>7}{'saved':>8}{'total':>8}"
        f"{'CP':>5}{'micro-batches':>15}{'bubble':>8}{'step, s':>9}"
    )
    for run in RUNS:
        for seq in LENGTHS:
            for recompute in ("none", "selective", "full"):
                one = planned(run, seq, recompute)
                ring = smallest_ring(run, seq, recompute)
                saved = one.memory.activations / 1e9
                total = one.memory.total / 1e9
                yield (
                    f"{run:<6}{seq:>8,} {recompute:<10}{total - saved:>7.1f}{saved:>8.1f}"
                    f"{total:>8.1f}{ring or '-':>5}{one.configuration.micro_batches:>15}"
                    f"{one.bubble_of_total:>8.1%}{one.step_seconds:>9.1f}"
                )
    size = layer_inputs("70B", LENGTHS[-1]) / 1e9
    yield f"inputs of all layers, 70B at {LENGTHS[-1]:,} tokens: {size:.1f} GB"
    yield "seconds of one sequence on one replica, full recomputation, no CP"
    for run in RUNS:
        for seq in LENGTHS:
            yield f"{run:<6}{seq:>8,}{sequence_seconds(run, seq):>9.1f}"
    yield "405B at 131,072 tokens, 128 sequences per step, full recomputation, 7 chunks, by CP"
    for cp in (1, 2, 4, 8, 16):
        one = planned("405B", 131072, "full", cp, CHUNKS)
        yield f"cp={cp:<3}{one.bubble_of_total:>8.1%}{one.step_seconds:>9.1f} s{one.mfu:>8.1%} MFU"
