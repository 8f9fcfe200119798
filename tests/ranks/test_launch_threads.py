"""Runs that several threads of the launching process ask for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from course_lib.launch import World, run

RUNS = 4


def answer(thread: int, index: int) -> tuple[int, int, int]:
    time.sleep(0.002 * (index % 3))
    return thread, index, dist.get_rank()


def in_threads(call: Callable[[int, int], Any]) -> dict[tuple[int, int], Any]:
    """What ``call(thread, index)`` returned or raised, asked by three threads at once."""
    found: dict[tuple[int, int], Any] = {}

    def ask(thread: int) -> None:
        for index in range(RUNS):
            try:
                found[thread, index] = call(thread, index)
            except Exception as error:
                found[thread, index] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


EXPECTED = {
    (thread, index): [(thread, index, 0), (thread, index, 1)]
    for thread in range(3)
    for index in range(RUNS)
}


def test_threads_share_a_world_in_turn():
    with World(2, timeout=20) as world:
        assert in_threads(lambda *which: world.run(answer, *which)) == EXPECTED


def test_closing_waits_for_the_run_under_way():
    world = World(2, timeout=20)
    pids = world.run(os.getpid)
    found: list[Any] = []
    began = threading.Event()

    def slow() -> None:
        began.set()
        found.append(world.run(lambda: (time.sleep(0.5), os.getpid())[1]))

    thread = threading.Thread(target=slow)
    thread.start()
    began.wait()
    time.sleep(0.1)
    world.close()
    thread.join()
    assert found == [pids]


def test_threads_each_run_on_fresh_ranks():
    assert in_threads(lambda *which: run(answer, *which, n=2, timeout=20)) == EXPECTED


def test_threads_start_one_server():
    code = (
        "import threading\n"
        "from course_lib.launch import local\n"
        "found = []\n"
        "ask = lambda: found.append(local.fork_server())\n"
        "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(len(set(found)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "1", out.stderr
