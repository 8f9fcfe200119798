"""A notebook's ranks where there is no network but loopback, and where the host has no address."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

DRIVER = """\
import fcntl, socket, struct, sys
kind = sys.argv[1]
if kind == "net":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # ip link set lo up
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
    assert [name for _, name in socket.if_nameindex()][0] == "lo"
else:
    socket.sethostname("no-such-host.invalid")
import nbformat
from nbclient import NotebookClient
source = '''
import torch, torch.distributed as dist
from course_lib.launch import run
def f():
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x)
    group = dist.new_group([0, 1])
    return x.tolist()
def raw():
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()
print(run(f, n=4), run(raw, n=2, init=False))
'''
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
NotebookClient(book, kernel_name="python3", timeout=90).execute()
print("".join(out["text"] for out in book.cells[0].outputs))
"""
UNSHARE = {"net": "--net", "host": "--uts"}


def isolated(kind: str) -> list[str] | None:
    """The command that isolates a process from the ``kind``; None if that is not permitted."""
    for more in ([], ["--map-root-user"]):
        command = ["unshare", *more, UNSHARE[kind]]
        try:
            done = subprocess.run([*command, "true"], capture_output=True, timeout=20)
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return command
    return None


@pytest.mark.parametrize("kind", ["net", "host"])
def test_ranks_in_a_notebook_need_only_loopback(kind, need):
    command = isolated(kind)
    need(command, f"unshare {UNSHARE[kind]} is not permitted here")
    driver = [sys.executable, "-c", textwrap.dedent(DRIVER), kind]
    done = subprocess.run([*(command or []), *driver], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    # TCPStore warns before it that it asked for a host name in vain.
    assert done.stdout.strip().splitlines()[-1] == f"{[[6.0, 6.0]] * 4} [2, 2]"
