"""Limits that do not depend on the load of the machine: what stops a run, and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.launch import Limits, RankDeadline, RankError, begun, limits, run
from course_lib.launch.limits import Meter, Thread
from course_lib.mesh import make_mesh

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's /proc"),
]
GRADED = Limits(cpu=2, blocked=2, total=60, start=120)
BUSY = 24


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """A machine with 24 busy processes of another kind, in the scheduler's view as near as ranks.

    Linux gives each session the same share, so each process has a session of its own.
    """
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    command = [sys.executable, "-c", spin]
    spinning = [subprocess.Popen(command, start_new_session=True) for _ in range(BUSY)]
    yield
    for process in spinning:
        process.kill()
    for process in spinning:
        process.wait()


def right():
    make_mesh(dp=2, tp=2)
    begun()
    x = torch.ones(1000)
    for _ in range(50):
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x.sum().item()


def slow_to_begin():
    time.sleep(3)
    begun()
    return 3


def sleeps():
    begun()
    time.sleep(3 if dist.get_rank() == 1 else 0)
    dist.barrier()
    return 3


def deadlock():
    make_mesh(dp=2, tp=2)
    begun()
    dist.recv(torch.zeros(3), (dist.get_rank() + 1) % 4)


def waits_for_a_handle():
    begun()
    if dist.get_rank():
        dist.all_reduce(torch.zeros(3), async_op=True).wait()


def loops():
    begun()
    while dist.get_rank() == 2:
        pass
    dist.barrier()


def leaves():
    begun()
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def mismatch():
    begun()
    dist.all_reduce(torch.ones(7 if dist.get_rank() == 1 else 70_000))


def sleeps_for_ever():
    begun()
    time.sleep(600)


def passes(fn, value):
    assert list(run(fn, n=4, limits=GRADED)) == [value] * 4


def stopped(fn, limit, places, limits=GRADED):
    with pytest.raises(RankDeadline) as caught:
        run(fn, n=4, limits=limits)
    error = caught.value
    assert error.limit == limit
    assert error.seconds == getattr(limits, limit)
    for rank, place in enumerate(places):
        assert place in error.standing[rank]
    return error


@pytest.mark.parametrize(("fn", "value"), [(right, 1000), (slow_to_begin, 3), (sleeps, 3)])
def test_what_ends_by_itself_is_not_stopped(fn, value):
    passes(fn, value)


def test_ranks_that_wait_for_each_other_are_stopped():
    before = time.monotonic()
    stopped(deadlock, "blocked", ["was at: recv, test_limits.py line"] * 4)
    places = ["rank 0 had returned", *["async_op=True).wait()"] * 3]
    stopped(waits_for_a_handle, "blocked", places)
    assert time.monotonic() - before < 20, "not only after the total"


def test_an_endless_loop_is_stopped():
    error = stopped(loops, "cpu", ["barrier", "barrier", "while dist.get_rank() == 2", "barrier"])
    assert "after 2 s of CPU time" in error.report


def test_sleep_is_stopped_after_the_total():
    error = stopped(sleeps_for_ever, "total", ["time.sleep"] * 4, replace(GRADED, total=4))
    assert not error.starved


def test_ranks_that_never_begin_are_stopped():
    never = replace(GRADED, start=1)
    stopped(lambda: time.sleep(600), "start", ["time.sleep"] * 4, never)


def test_a_busy_machine_changes_nothing(busy):
    passes(right, 1000)
    stopped(deadlock, "blocked", ["was at: recv"] * 4)
    stopped(loops, "cpu", ["barrier", "barrier", "while dist.get_rank() == 2", "barrier"])
    for fn, words in ((leaves, "exit code 3"), (mismatch, "(SIGABRT)")):
        with pytest.raises(RankError) as caught:
            run(fn, n=4, limits=GRADED)
        assert caught.value.kind == "died"
        assert caught.value.report.startswith("rank 1 ")
        assert words in caught.value.report.splitlines()[0]


def test_a_machine_too_busy_to_compute_is_told_from_sleep(busy):
    short = Limits(cpu=50, blocked=2, total=4, start=120)
    assert stopped(loops, "total", [], short).starved


def test_what_counts_as_waiting(monkeypatch):
    """A rank that waits for a processor does not wait for another rank."""
    clock, table = [100.0], {}
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(limits, "threads", lambda pid: dict(table))
    monkeypatch.setattr(limits, "cpu_seconds", lambda pid: 0.0)
    meter = Meter(Limits(cpu=5, blocked=2, total=60, start=10))
    assert meter.passed([0]) == ""
    meter.pids = {0: 1}

    def later(main: Thread, loop: Thread) -> str:
        clock[0] += 0.5
        table.update({"1": main, "2": loop})
        return meter.passed([0])

    def main(cpu, state="S", delay=0.0):
        return Thread("python", state, 0, cpu, delay)

    def gloo(slices, state="S"):
        return Thread("gloo_tcp_loop", state, slices, 0.0, 0.0)

    for count in range(10):  # it computes from time to time
        assert later(main(0.1 * count), gloo(100 * count)) == ""
    for _ in range(20):  # it waits for a processor
        assert later(main(0.9, "R"), gloo(900)) == ""
    for count in range(20):  # it waited for one between two looks
        assert later(main(0.9, delay=0.4 * (count + 1)), gloo(900)) == ""
    for _ in range(20):  # gloo's thread waits for one
        assert later(main(0.9, delay=8), gloo(900, "R")) == ""
    # It asks the store for a key again and again.
    found = [later(main(0.9 + 0.01 * n, delay=8), gloo(1000 + n)) for n in range(5)]
    assert found == ["", "", "", "blocked", "blocked"]
