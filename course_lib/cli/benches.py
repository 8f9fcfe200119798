"""bench: ours beside torch's, measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from course_lib.cli.app import AsJson, benches
from course_lib.cli.show import print_json
from course_lib.cli.status import Status

Rounds = Annotated[int, typer.Option(min=1, max=10_000, help="How often each case is timed.")]

# Each is a module of course_lib.bench with measure(rounds, say=...) -> dict and text(dict) -> str.
BENCHES = {
    "launch": "How long it takes to start ranks: cold, warm and fresh, kept.",
    "comm": "One call of comm beside bare torch.distributed, at 1 kB and 1 MB.",
    "dp": "A step of data parallelism beside torch's DDP.",
    "zero": "ZeRO beside torch's ZeroRedundancyOptimizer and FSDP2: time, bytes and peak memory.",
    "tp": "Tensor and sequence parallelism beside torch's DTensor: time, bytes; rings on a link.",
    "pp": "Pipeline schedules beside torch's, and paced steps beside simulated ones.",
    "cp": "Our context-parallel attentions beside torch's ring, zig-zag beside contiguous.",
    "ep": "A layer with experts by all-to-all, beside gathering all tokens, and all experts.",
    "inference": "Layouts of eight paced ranks that decode: throughput and latency by requests.",
    "groups": "Buckets of dp that make room for all-reduces of tp on one link, or do not.",
    "plans": "Steps of the plan arena on padded ranks beside their simulation.",
    "wire": "Bytes that the kernel counted beside the bytes of the formula.",
}


def _verb(name: str) -> Callable[..., int]:
    def bench(rounds: Rounds = 20, as_json: AsJson = False) -> int:
        with Status("importing torch") as status:
            benchmark = import_module(f"course_lib.bench.{name}")
            result = benchmark.measure(rounds, say=status.say)
        if as_json:
            print_json(result)
        else:
            print(benchmark.text(result))
        return 0

    return bench


for _name, _help in BENCHES.items():
    benches.command(_name, help=_help)(_verb(_name))
