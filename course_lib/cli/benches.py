"""bench: ours beside torch's, measured on this machine."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from course_lib.cli.app import AsJson, benches
from course_lib.cli.show import print_json

Rounds = Annotated[int, typer.Option(min=1, max=10_000, help="How often each case is timed.")]


@benches.command("launch")
def bench_launch(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """How long it takes to start ranks: cold, warm and fresh, kept."""
    return _run_bench("launch", rounds, as_json)


@benches.command("dp")
def bench_dp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """A step of data parallelism beside torch's DDP."""
    return _run_bench("dp", rounds, as_json)


@benches.command("zero")
def bench_zero(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """ZeRO beside torch's ZeroRedundancyOptimizer and FSDP2: time, bytes and peak memory."""
    return _run_bench("zero", rounds, as_json)


@benches.command("tp")
def bench_tp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """Tensor and sequence parallelism beside torch's DTensor: time and bytes; rings on a link."""
    return _run_bench("tp", rounds, as_json)


@benches.command("pp")
def bench_pp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """GPipe and 1F1B beside torch's, and paced steps beside simulated ones."""
    return _run_bench("pp", rounds, as_json)


@benches.command("cp")
def bench_cp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """Our context-parallel attentions beside torch's ring, zig-zag beside contiguous."""
    return _run_bench("cp", rounds, as_json)


@benches.command("ep")
def bench_ep(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """A layer with experts by all-to-all, beside gathering all tokens and holding all experts."""
    return _run_bench("ep", rounds, as_json)


@benches.command("wire")
def bench_wire(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """Bytes that really moved over loopback beside the bytes of the formula."""
    return _run_bench("wire", rounds, as_json)


def _run_bench(name: str, rounds: int, as_json: bool) -> int:
    benchmark = import_module(f"course_lib.bench.{name}")
    result = benchmark.measure(rounds)
    if as_json:
        print_json(result)
    else:
        print(benchmark.text(result))
    return 0
