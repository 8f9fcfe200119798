"""``course bench launch``: the time until ranks have run their first all-reduce.

*Cold* is the first run of a new Python process that has imported the launcher. *Fresh* is a run on
new ranks with a warm fork server, from the call to the results, with ``init_process_group`` and
one all-reduce. *Kept* is the same call on the ranks of a World that has run before.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from course_lib.bench.rounds import Say, quiet
from course_lib.launch import World, run

SIZES = (2, 4, 8)
AIMS = {"cold_s": 3.0, "fresh_s": 0.15, "kept_s": 0.020}  # seconds; fresh and kept on 4 ranks
COLD = """\
import time
from course_lib.bench.launch import all_reduce_once
from course_lib.launch import run
start = time.perf_counter()
run(all_reduce_once, n=4)
print(time.perf_counter() - start)
"""


def all_reduce_once() -> float:
    """Run one all-reduce, the work of every measured run."""
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def measure(rounds: int = 20, say: Say = quiet) -> dict[str, Any]:
    """Return seconds, as medians of ``rounds`` runs (cold: of 3 at most).

    The keys are ``{"rounds":, "cold_s":, "fresh_s": {"2":, "4":, "8":}, "kept_s": {...}}``.
    """
    if rounds < 1:
        raise ValueError(f"expected at least 1 round, got rounds={rounds}")
    say("cold starts")
    cold = median(_cold() for _ in range(min(rounds, 3)))
    run(all_reduce_once, n=2)  # the server is warm from here on
    fresh, kept = {}, {}
    for n in SIZES:
        say(f"{n} ranks")
        fresh[str(n)] = median(_timed(partial(run, all_reduce_once, n=n)) for _ in range(rounds))
        with World(n) as world:
            world.run(all_reduce_once)
            again = partial(world.run, all_reduce_once)
            kept[str(n)] = median(_timed(again) for _ in range(rounds))
    return {"rounds": rounds, "cold_s": cold, "fresh_s": fresh, "kept_s": kept}


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cold() -> float:
    done = subprocess.run(
        [sys.executable, "-c", COLD], capture_output=True, text=True, timeout=300, check=True
    )
    return float(done.stdout)


def text(result: dict[str, Any]) -> str:
    """Return the times as a table, with the aims."""
    lines = [
        f"seconds until the results of one all-reduce have arrived, median of {result['rounds']}",
        f"cold start, 4 ranks      {result['cold_s']:7.3f}   aim {AIMS['cold_s']:g} or less",
    ]
    for kind, key in (("fresh ranks", "fresh_s"), ("kept ranks", "kept_s")):
        for n, seconds in result[key].items():
            aim = f"   aim {AIMS[key]:g} or less" if n == "4" else ""
            lines.append(f"{kind + ', n=' + n:24} {seconds:7.3f}{aim}")
    return "\n".join(lines)
