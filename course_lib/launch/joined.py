"""The engine for ranks that torchrun or srun has started: this process *is* a rank.

Every process of the world makes the same calls of ``run`` in the same order. A run on n ranks
uses the first n; the other processes wait for the results. Each rank writes its outcome into a
store, so that every process sees a failure. A rank that is blocked in a collective cannot be
unblocked: its watch thread prints the report and ends the process. The launcher that started the
process then ends the other processes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib.launch import faults
from course_lib.launch.clock import offset_to_rank_0
from course_lib.launch.local import free_port, loopback
from course_lib.launch.places import stack_of_thread
from course_lib.launch.rank import call, device_of, enter, init_group, inside_rank, raised
from course_lib.launch.surroundings import Seat, in_kernel, seat
from course_lib.launch.task import Outcome, Task
from course_lib.mesh import rank_context

GRACE = 0.4  # seconds for the other ranks to finish or fail, after a rank has failed
POLL = 0.005  # seconds between two reads of the store
ANSWER = 2.0  # seconds for the watch threads of blocked ranks to store their stacks
PIECE = 4 * 2**20  # bytes per value in the store, whose limit is 8 MB
MEET = timedelta(seconds=120)  # time limit for the rendezvous at the start

_joined: list[JoinedWorld] = []


def joined_world() -> JoinedWorld | None:
    """Return the world that a launcher started; None where ``run`` starts its own ranks."""
    if inside_rank() or in_kernel():
        return None
    if not _joined and (here := seat(os.environ)) is not None:
        _joined[:] = [JoinedWorld(here)]
    return _joined[0] if _joined else None


def available_ranks() -> int | None:
    """Return the number of ranks that a launcher has started; None if ``run`` starts the ranks."""
    here = None if inside_rank() or in_kernel() else seat(os.environ)
    return here.size if here else None


def is_reporter() -> bool:
    """Return whether this process prints and writes files: in a joined world, only rank 0 does."""
    here = None if inside_rank() or in_kernel() else seat(os.environ)
    return here is None or here.rank == 0


class JoinedWorld:
    """The world of a process that a launcher started as one of its ranks."""

    def __init__(self, here: Seat) -> None:
        self.seat = here
        self.runs = 0
        if here.one_machine:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback()
        torch.set_num_threads(1)
        self.meet = self._connect(host=here.rank == 0 and not here.hosted)
        self.talk = self._connect(host=False)  # a rendezvous blocks the other connection

    def _connect(self, host: bool) -> dist.Store:
        here = self.seat
        store = dist.TCPStore(
            here.address, here.port, None, host, timeout=MEET, wait_for_workers=False
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"course/{restart}", store)

    def call(self, fn: Callable, args: tuple, task: Task, timeout: float) -> list[Outcome]:
        """Call ``fn(*args)`` on the first ``task.n`` ranks; return all outcomes everywhere."""
        self._check(task)
        self.runs += 1
        hook = sys.excepthook  # every init_process_group wraps it once more
        board = Board(dist.PrefixStore(f"run{self.runs}", self.talk), self.seat, task.n, timeout)
        try:
            if self.seat.rank < task.n:
                with board.watch():
                    outcome = self._attempt(fn, args, task, board)
                board.publish(outcome)
            return board.collect()
        finally:
            board.leave()
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook

    def _check(self, task: Task) -> None:
        if task.n > self.seat.size:
            raise ValueError(
                f"expected at most {self.seat.size} ranks, as many as the launcher started, got "
                f"n={task.n}; start the launcher with {task.n} ranks or choose a smaller n"
            )
        if task.device == "cuda" and torch.cuda.device_count() < self.seat.local_size:
            raise ValueError(
                f'device="cuda" needs one GPU per rank, but this machine has '
                f"{self.seat.local_size} ranks and {torch.cuda.device_count()} GPUs: leave device "
                "out to use the CPU"
            )

    def _attempt(self, fn: Callable, args: tuple, task: Task, board: Board) -> Outcome:
        try:
            return self._perform(fn, args, task, board)
        except Exception as error:  # every process must also see errors around the call
            return raised(error)

    def _perform(self, fn: Callable, args: tuple, task: Task, board: Board) -> Outcome:
        here = self.seat
        device = device_of(task.device, here.local_rank)
        enter(task, here.rank, device)
        rank_context().sockets.ignore_open()  # those of the stores
        if not task.init:
            with self._environ(task.n, board):
                return call(fn, args)
        meet = dist.PrefixStore(f"run{self.runs}/group", self.meet)
        init_group(meet, here.rank, task.n, device)
        offset = 0.0 if here.one_machine else offset_to_rank_0(here.rank, task.n)
        outcome = call(fn, args)
        if outcome.trace is not None:
            outcome.trace.shift(offset)
        return outcome

    @contextlib.contextmanager
    def _environ(self, n: int, board: Board) -> Iterator[None]:
        """Set the environment of a world of the first ``n`` ranks, with a new port."""
        before = dict(os.environ)
        if self.seat.rank == 0:
            board.store.set("port", str(free_port()))
        board.store.wait(["port"], MEET)
        here = {"RANK": self.seat.rank, "LOCAL_RANK": self.seat.local_rank, "WORLD_SIZE": n}
        os.environ.update({name: str(value) for name, value in here.items()})
        os.environ.update(
            MASTER_ADDR=self.seat.address, MASTER_PORT=board.store.get("port").decode()
        )
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class Board:
    """The outcomes of one run in a store that all processes read."""

    def __init__(self, store: dist.Store, here: Seat, n: int, timeout: float) -> None:
        self.store = store
        self.seat = here
        self.n = n
        self.timeout = timeout
        self.end = time.monotonic() + timeout
        self.outcomes: dict[int, Outcome] = {}
        self.stacks: dict[int, list] = {}

    def pin(self, name: str, value: Any) -> None:
        """Store a value of any size: first its chunks, then the number of chunks."""
        data = pickle.dumps(value)
        pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
        for index, piece in enumerate(pieces):
            self.store.set(f"{name}/{index}", piece)  # type: ignore[arg-type]  # bytes do
        self.store.set(name, str(len(pieces)))

    def read(self, name: str) -> Any:
        """Return the value stored under ``name``, None if there is none yet."""
        if not self.store.check([name]):
            return None
        count = int(self.store.get(name))
        return pickle.loads(b"".join(self.store.get(f"{name}/{index}") for index in range(count)))

    def publish(self, outcome: Outcome) -> None:
        """Store this rank's outcome."""
        self.outcomes[self.seat.rank] = outcome
        self.pin(f"outcome{self.seat.rank}", outcome)

    def look(self) -> bool:
        """Read new outcomes and stacks; return whether every rank has stored its outcome."""
        for rank in range(self.n):
            if rank not in self.outcomes:
                outcome = self.read(f"outcome{rank}")
                if outcome is not None:
                    self.outcomes[rank] = outcome
            if rank not in self.outcomes and rank not in self.stacks:
                stack = self.read(f"stack{rank}")
                if stack is not None:
                    self.stacks[rank] = stack
        return len(self.outcomes) == self.n

    def failed(self) -> bool:
        """Return whether the outcome of any rank is a failure."""
        return any(outcome.kind != "returned" for outcome in self.outcomes.values())

    def collect(self) -> list[Outcome]:
        """Wait for every outcome and return them by rank; raises RankError if a rank failed."""
        while not self.look() and not self.failed() and time.monotonic() < self.end:
            time.sleep(POLL)
        if len(self.outcomes) < self.n or self.failed():
            raise self.fault()
        return [self.outcomes[rank] for rank in range(self.n)]

    def fault(self) -> faults.RankError:
        """Wait until every rank has stored an outcome or a stack; return the error."""
        end = time.monotonic() + GRACE + ANSWER
        while not self.look() and time.monotonic() < end:
            if len(self.outcomes) + len(self.stacks) >= self.n:
                break
            time.sleep(POLL)
        known = faults.Standing(self.n, self.outcomes, {}, self.stacks)
        return faults.failure(known) if self.failed() else faults.deadline(known, self.timeout)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Run a thread that ends this process if it is blocked after another rank has failed."""
        out = threading.Event()
        ident = threading.get_ident()
        thread = threading.Thread(target=self._watch, args=(out, ident), daemon=True)
        thread.start()
        try:
            yield
        finally:
            out.set()
            thread.join()

    def _watch(self, out: threading.Event, ident: int) -> None:
        while not out.wait(0.1):
            self.look()
            if self.failed() or time.monotonic() >= self.end:
                break
        if out.wait(GRACE if self.failed() else 0.0):
            return
        self.stacks[self.seat.rank] = stack_of_thread(ident)
        self.pin(f"stack{self.seat.rank}", self.stacks[self.seat.rank])
        fault = self.fault()
        if self.seat.rank == min(self.stacks):
            print(fault.report, file=sys.stderr, flush=True)
        self.leave()
        os._exit(1)

    def leave(self) -> None:
        """Count this process as done with the store; the host of the store waits for the others.

        After a failure every process waits for at most 2 s. If one closed its connections, or its
        launcher ended the rest, before the others had read the report, they would not print it.
        """
        with contextlib.suppress(Exception):
            self.store.add("read", 1)
            hosting = self.seat.rank == 0 and not self.seat.hosted
            patience = ANSWER if self.failed() or len(self.outcomes) < self.n else MEET.seconds
            end = time.monotonic() + (patience if hosting or patience == ANSWER else 0)
            while time.monotonic() < end and self.store.add("read", 0) < self.seat.size:
                time.sleep(POLL)
