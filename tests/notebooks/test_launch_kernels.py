"""The launcher and the life of kernels: two at once, one killed, one started by Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from nbclient.exceptions import DeadKernelError

SERVER = """\
from course_lib.launch.local import fork_server
import json
world = World(3)
print(json.dumps({"directory": str(fork_server().directory),
                  "pids": [fork_server().process.pid, *world.run(os.getpid)]}))
"""
HANG = "run(lambda: dist.recv(torch.ones(1)), n=2)"


def is_gone(pid: int) -> bool:
    """Whether the process has ended; it may not have been reaped, that is its parent's task."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds: float = 15) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_importing_warms_the_server_in_a_kernel_only(notebook):
    cell = notebook.cell("from course_lib.launch import local; len(local._server)")
    assert cell.value == "1"
    code = "import course_lib.launch.local as local; print(len(local._server))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "0"


def test_two_kernels_at_once(notebook, open_notebook):
    # The other one was started where Slurm and torchrun have left their variables.
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    other = open_notebook(env={**os.environ, **slurm, "RANK": "1", "WORLD_SIZE": "8"})
    notebooks = [notebook, other]
    source = "run(lambda: dist.get_rank() + base, n=4)"
    results: dict[int, str] = {}

    def work(index: int) -> None:
        notebooks[index].cell(f"base = {10 * index}")
        for _ in range(3):
            cell = notebooks[index].cell(source)
            results[index] = cell.value or cell.error

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "[0, 1, 2, 3]", 1: "[10, 11, 12, 13]"}


def test_a_killed_kernel_leaves_no_process_and_no_directory(open_notebook):
    notebook = open_notebook()
    found = json.loads(notebook.cell(SERVER).text)
    assert Path(found["directory"]).exists()
    server = psutil.Process(found["pids"][0])
    busy: list[int] = []
    threading.Thread(target=kill_when_busy, args=(notebook.pid, server, busy)).start()
    with pytest.raises(DeadKernelError):
        notebook.cell(HANG)
    assert len(busy) == 5
    assert wait_until(lambda: all(is_gone(pid) for pid in [*found["pids"], *busy]))
    other = open_notebook()
    other.assert_usable()
    assert not Path(found["directory"]).exists()


def children(process: psutil.Process) -> list[psutil.Process]:
    """Processes that it started and that still run."""
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def kill_when_busy(kernel: int, server: psutil.Process, busy: list[int]) -> None:
    """Kill the kernel with -9 once five ranks run: three kept, two that hang."""
    wait_until(lambda: len(children(server)) == 5)
    time.sleep(0.3)
    busy += [child.pid for child in children(server)]
    os.kill(kernel, signal.SIGKILL)


def test_a_killed_server_is_said_and_replaced(notebook):
    notebook.cell("from course_lib.launch.local import fork_server\nserver = fork_server().process")
    cell = notebook.cell(
        "def f(pid):\n    os.kill(pid, signal.SIGKILL)\n    time.sleep(30)\nrun(f, server.pid, n=2)"
    )
    assert "fork server that starts the ranks was killed" in cell.error
    notebook.assert_usable()
    notebook.cell("server = fork_server().process; server.kill(); server.wait()")
    notebook.assert_usable()


def test_children_of_a_rank_end_with_it(notebook):
    source = (
        "def f():\n"
        "    import subprocess\n"
        "    return subprocess.Popen(['sleep', '600']).pid\n"
        "print(*run(f, n=2))"
    )
    pids = [int(word) for word in notebook.cell(source).text.split()]
    assert len(pids) == 2
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))
