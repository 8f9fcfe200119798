"""Ranks that torchrun has started: the same script joins them instead of starting its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.launch.surroundings import Seat, first_host, seat

SCRIPT = """\
import json, os, sys, time
import torch, torch.distributed as dist
from course_lib import comm
from course_lib.launch import World, RankError, available_ranks, is_reporter, run
from course_lib.mesh import Link, Links, make_mesh

def work(a):
    mesh = make_mesh(dp=2)
    x = torch.ones(2) * dist.get_rank() + a
    dist.all_reduce(x)
    return x.tolist(), dist.get_world_size(), mesh.tp.size, os.getpid()

def raw():
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_world_size()

def big():
    return torch.full((2_500_000,), float(dist.get_rank()))

def fail():
    if dist.get_rank() == 1:
        raise ValueError("boom")

def unequal():
    mesh = make_mesh()
    comm.all_reduce(torch.ones(2 + mesh.rank), mesh.dp)

def slow():
    mesh = make_mesh()
    comm.all_reduce(torch.ones(2), mesh.dp)
    return mesh.trace.spans[0].duration >= 0.02

found = {"available": available_ranks()}
results = run(work, 1.0, n=2)
found["two"] = [result[:2] for result in results]
found["ledgers"] = [ledger.rank for ledger in results.ledgers]
found["here"] = os.getpid() in [pid for *_, pid in run(lambda: (0, 0, 0, os.getpid()), n=4)]
found["raw"] = run(raw, n=2, init=False)
found["big"] = [x[-1].item() for x in run(big, n=4)]
with World(4) as world:
    found["slow"] = world.run(slow, links=Links(Link(0.01, 1e9), Link(0.01, 1e9)))
    found["kept"] = [world.run(lambda: dist.get_rank()), world.run(lambda: dist.get_world_size())]
try:
    run(work, 1.0, n=8)
except ValueError as error:
    found["too many"] = str(error)
try:
    run(fail, n=4)
except RankError as error:
    found["failed"] = error.report.splitlines()[0]
try:
    run(unequal, n=2, checked=True)
except RankError as error:
    found["checked"] = "the ranks of axis dp do not agree" in str(error)
found["after"] = run(lambda: dist.get_rank(), n=3)
if is_reporter():
    print(json.dumps(found))
"""
EXPECTED = {
    "available": 4,
    "two": [[[3.0, 3.0], 2], [[3.0, 3.0], 2]],
    "ledgers": [0, 1],
    "here": True,
    "raw": [2, 2],
    "big": [0.0, 1.0, 2.0, 3.0],
    "kept": [[0, 1, 2, 3], [4, 4, 4, 4]],
    "too many": "expected at most 4 ranks, as many as the launcher started, got n=8; start the "
    "launcher with 8 ranks or choose a smaller n",
    "failed": "rank 1 raised ValueError: boom",
    "slow": [True] * 4,
    "checked": True,
    "after": [0, 1, 2],
}
STUCK = """\
import sys, time
import torch.distributed as dist
from course_lib.launch import run

def stuck():
    if dist.get_rank() == 1:
        if sys.argv[1] == "raise":
            raise ValueError("boom")
        time.sleep(60)
    dist.barrier()

run(stuck, n=4, timeout=20 if sys.argv[1] == "raise" else 2)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def on_one_node(n: int) -> list[str]:
    port = f"--master-port={free_port()}"
    return torchrun(f"--nproc-per-node={n}", "--master-addr=127.0.0.1", port)


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_four_ranks_of_torchrun(script):
    command = [*on_one_node(4), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == EXPECTED  # rank 0 alone has printed


def test_two_nodes_of_two_ranks(script):
    port = free_port()
    address = ["--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1"]
    nodes = [
        subprocess.Popen(
            torchrun(
                "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=2", *address, str(script)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        outs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outs[0][1][-3000:]
    assert json.loads(outs[0][0]) == EXPECTED
    assert outs[1][0] == ""


def test_a_slurm_step_of_four_tasks(script):
    step = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "this-host",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(4)
    ]
    try:
        outs = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0] * 4, outs[0][1][-3000:]
    assert json.loads(outs[0][0]) == EXPECTED
    assert [out for out, _ in outs[1:]] == [""] * 3


@pytest.mark.parametrize(
    ("how", "first"),
    [("raise", "rank 1 raised ValueError: boom"), ("hang", "deadline: 4 of 4 ranks")],
)
def test_stuck_ranks_learn_of_it_and_end(tmp_path, how, first):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    command = [*on_one_node(4), str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert first in done.stderr
    for rank in (0, 2, 3):
        assert f"rank {rank} was at: barrier, stuck.py line 10" in done.stderr


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "3",
}


def test_the_seat_of_a_process():
    assert seat({}) is None
    assert seat({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    assert seat(TORCHRUN) == Seat(3, 4, 3, 4, "10.0.0.1", 29400, hosted=False)
    agent = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert seat({**TORCHRUN, **agent}) == Seat(3, 4, 1, 2, "10.0.0.1", 29400, hosted=True)
    step = seat(STEP)
    assert step == Seat(5, 8, 1, 4, "gpu07", 15_000 + 17 * 64 + 3, hosted=False)
    assert not step.one_machine
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        seat({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE, .* got 'x'"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS, .* got 'x'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK, .* got ''"),
        ({**STEP, "SLURM_PROCID": "1.5"}, "SLURM_PROCID, .* got '1.5'"),
    ],
)
def test_a_variable_that_is_no_number_is_named(environ, name):
    with pytest.raises(ValueError, match=f"environment variable {name}"):
        seat(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script: one process of its own
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty
    ],
)
def test_a_slurm_job_is_not_yet_a_step_of_many(environ):
    assert seat(environ) is None


def test_first_hosts():
    assert first_host("login1") == "login1"
    assert first_host("gpu[07-09,12],login1") == "gpu07"
    assert first_host("n[1-2]-ib,n[4]-ib") == "n1-ib"
