"""The code of a rank: prepare the process, then serve calls until shutdown."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import cloudpickle
import numpy
import torch
import torch.distributed as dist

from course_lib.comm.instruments import installed
from course_lib.launch.limits import Begun
from course_lib.launch.task import Birth, Frame, Outcome, Raised, Task
from course_lib.launch.travel import pack, text_of, unpack, what_cannot_return
from course_lib.mesh import RankContext, enter_rank, rank_context

FOREVER = timedelta(days=1)  # the launching process enforces the deadline, not the backend
_birth: list[Birth] = []
_launcher: list[Connection] = []


def inside_rank() -> bool:
    """Return whether this process is a rank that a launch started."""
    return bool(_birth)


def begun() -> None:
    """Tell the launching process that the limits of the run count from now on; see Limits."""
    for launcher in _launcher:
        launcher.send_bytes(cloudpickle.dumps(Begun(os.getpid())))


def serve_rank(connection: Connection) -> None:
    """Read the rank's number, then run tasks until the launching process closes the connection.

    After each outcome the rank waits here with its sockets open. If it closed them, a neighbor
    could fail first and be reported as the rank at fault.
    """
    birth: Birth = unpack(connection.recv_bytes())
    _birth[:] = [birth]
    _launcher[:] = [connection]
    threading.Thread(target=_end_with_owner, args=(connection.fileno(),), daemon=True).start()
    with open(birth.file("stack"), "a") as stacks:
        _prepare(birth, stacks)
        while True:
            try:
                task: Task = unpack(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # skip the destructors, because a backend may hang in them
            outcome = perform(task, birth)
            flush()
            connection.send_bytes(cloudpickle.dumps(outcome))


def _end_with_owner(fd: int) -> None:
    """End this process when the launching process closes its end or dies."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, 0)  # hang-up is always reported
        poll.poll()
        os._exit(0)


def _prepare(birth: Birth, stacks: io.TextIOBase) -> None:
    """Redirect output and stacks to files, use one thread and seed the random generators."""
    out = os.open(birth.file("out"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(
            encoding="utf-8", errors="replace", line_buffering=True
        )
    faulthandler.enable(file=stacks)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks)
    torch.set_num_threads(1)
    random.seed()
    numpy.random.seed()


def flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def perform(task: Task, birth: Birth) -> Outcome:
    """Run one task and return its outcome."""
    try:
        _enter(task, birth)
        device = device_of(task.device, birth.rank)
        if task.init and not dist.is_initialized():
            store = dist.FileStore(f"{birth.directory}/store", birth.n)
            init_group(store, birth.rank, birth.n, device)
        elif task.init:
            _drop_groups()
    except Exception as error:
        return raised(error)
    enter(task, birth.rank, device)
    try:
        fn, args = unpack(task.call)
    except Exception as error:
        return raised(error, kind="function")
    return call(fn, args)


def enter(task: Task, rank: int, device: torch.device) -> None:
    """Leave in this process what a run needs: a fresh context, with the instruments asked for."""
    instruments = installed(task.conditions, device, task.cells, task.run)
    context = RankContext(rank, task.conditions, device, task.cells, task.n, instruments)
    enter_rank(context)


def call(fn: Any, args: tuple) -> Outcome:
    """Call ``fn(*args)`` in the entered rank and return the outcome."""
    sockets = rank_context().sockets
    sockets.restart()
    try:
        value = fn(*args)
        sent = sockets.sent()  # before the value is packed: fn's groups may go with it
        for instrument in rank_context().instruments:
            instrument.returned()
    except SystemExit as error:
        return raised(error, kind="exit")
    except BaseException as error:
        return raised(error)
    context = rank_context()
    try:
        data = pack(value)
    except Exception:
        return Outcome("result", hint=what_cannot_return(value), at=time.time())
    return Outcome(
        "returned", data, ledger=context.ledger, trace=context.trace, sent=sent, at=time.time()
    )


def _enter(task: Task, birth: Birth) -> None:
    """Copy the launching process's directory, import path and environment."""
    if os.environ != task.environ:
        os.environ.clear()
        os.environ.update(task.environ)
    os.environ.update(RANK=str(birth.rank), LOCAL_RANK=str(birth.rank), WORLD_SIZE=str(birth.n))
    sys.path[:] = task.path
    os.chdir(task.cwd)


def device_of(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank: the CPU, or the GPU with its local rank as number."""
    if kind != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def init_group(store: dist.Store, rank: int, n: int, device: torch.device) -> None:
    """Make the default group: gloo, plus nccl for tensors on a GPU."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=FOREVER)


def _drop_groups() -> None:
    """Destroy the groups that earlier runs made in this rank, because sockets are limited.

    A backend has one thread per group, which wakes a hundred times per second until no reference
    to the group exists. Reference cycles of earlier runs are therefore collected first.
    """
    gc.collect()
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


def raised(error: BaseException, kind: str = "raised") -> Outcome:
    """Return the outcome of a call that ended in an exception."""
    try:
        exception = cloudpickle.dumps(error)
    except Exception:
        exception = b""
    return Outcome(kind, error=describe(error), at=time.time(), exception=exception)


def describe(error: BaseException, seen: tuple[BaseException, ...] = ()) -> Raised:
    """Return an exception as plain data, with its causes except those already ``seen`` above."""
    seen = (*seen, error)
    frames = [
        Frame(entry.filename, entry.lineno or 0, entry.name)
        for entry in traceback.extract_tb(error.__traceback__)
    ]
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    if any(cause is above for above in seen):
        cause = None
    before = describe(cause, seen) if cause is not None else None
    direct = error.__cause__ is not None
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    parts = [describe(each, seen) for each in inside]
    return Raised(type(error).__name__, text_of(error), frames, before, direct, parts)
