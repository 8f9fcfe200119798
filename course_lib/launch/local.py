"""The engine for one machine: this process's fork server, and the ranks that it forks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.launch.ranks import Ranks
from course_lib.launch.rundir import make_run_dir, sweep
from course_lib.launch.server import EVENT, READY, REQUEST
from course_lib.launch.spawned import SpawnedRanks

START = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);from course_lib.launch import server;"
START += "server.main(int(sys.argv[2]))"
PATIENCE = 180.0  # seconds for the server to import torch, even on a very busy machine


def loopback() -> str:
    """Return the name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def rank_environ() -> dict[str, str]:
    """Return the environment of ranks: this process's own, loopback only, one thread per rank."""
    environ = dict(os.environ)
    environ.update(GLOO_SOCKET_IFNAME=loopback(), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # TCPStore resolves host names
    environ["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"  # macOS: the server has one thread
    return environ


def new_environ() -> dict[str, str]:
    """Return the environment of one run, with a new rendezvous address for raw PyTorch."""
    return {**rank_environ(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ForkServer:
    """This process's end of a fork server, which imports torch in the background."""

    def __init__(self) -> None:
        sweep()
        self.owner = os.getpid()
        self.directory = make_run_dir()
        self.lock = threading.Lock()
        self.ready = False
        self.control, theirs = socket.socketpair()
        with theirs, open(self.directory / "server.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt of the notebook must not reach it
                env=rank_environ(),
            )

    def alive(self) -> bool:
        """Return whether this process can still request ranks from the server."""
        return self.owner == os.getpid() and self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait for the imports of the server; raises RuntimeError if it did not start."""
        self.control.settimeout(PATIENCE)
        try:
            self.ready = self.ready or self.control.recv(len(READY)) == READY
        except OSError:
            self.ready = False
        self.control.settimeout(None)
        if not self.ready:
            said = (self.directory / "server.log").read_text(errors="replace").strip()
            self.close()
            raise RuntimeError(f"the fork server for the ranks did not start. It printed:\n{said}")

    def fork(self, n: int) -> tuple[Connection, list[Connection]]:
        """Fork ``n`` ranks; return their link to the server and a connection to each rank."""
        pairs = [socket.socketpair() for _ in range(n + 1)]
        with self.lock:
            self.wait_ready()
            theirs = [pair[1].fileno() for pair in pairs]
            socket.send_fds(self.control, [REQUEST.pack(n)], theirs)
        for pair in pairs:
            pair[1].close()
        link, *connections = [Connection(pair[0].detach()) for pair in pairs]
        return link, connections

    def close(self) -> None:
        """End the server and every rank that it forked."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)


_server: list[ForkServer] = []
_starting = threading.Lock()  # two threads must not start two servers


def fork_server() -> ForkServer:
    """Return this process's fork server; start it if necessary, without waiting for its imports."""
    with _starting:
        if _server and not _server[0].alive():
            _server.pop().close()
        if not _server:
            _server[:] = [ForkServer()]
        return _server[0]


def warm_up() -> None:
    """Wait until the fork server is ready, so that the next ``run`` starts without a delay."""
    if hasattr(os, "fork"):
        server = fork_server()
        with server.lock:
            server.wait_ready()


def _forget(server: ForkServer) -> None:
    with _starting:
        if server in _server:
            _server.remove(server)
            server.close()


class ForkedRanks(Ranks):
    """Ranks forked by the server, in 15 ms per rank."""

    def __init__(self, server: ForkServer, directory: Path, n: int) -> None:
        self.link, connections = server.fork(n)
        super().__init__(directory, connections)

    def waitables(self) -> list[Connection | int]:
        """Return the one link on which the server reports ended ranks."""
        return [self.link]

    def read_ends(self) -> None:
        """Collect the wait statuses of ended ranks. Raises EOFError if the server has ended."""
        while self.link.poll():
            rank, status = EVENT.unpack(self.link.recv_bytes())
            self.statuses[rank] = status

    def signal(self, rank: int, signum: int) -> None:
        """Ask the server to send a signal to one rank."""
        with contextlib.suppress(OSError):  # the server has ended, and so has the rank
            self.link.send_bytes(EVENT.pack(rank, signum))

    def close(self) -> None:
        """Close the link, upon which the server kills the ranks."""
        self.link.close()
        super().close()


def start_ranks(n: int) -> Ranks:
    """Return ``n`` new ranks: forked where processes can fork, else spawned."""
    if not hasattr(os, "fork"):
        return SpawnedRanks(_ranks_directory(_spawn_directory()), n)
    server = fork_server()
    try:
        return _fork_ranks(server, n)
    except OSError:  # the server has just been killed
        _forget(server)
        return _fork_ranks(fork_server(), n)


def _fork_ranks(server: ForkServer, n: int) -> Ranks:
    return ForkedRanks(server, _ranks_directory(server.directory), n)


def _ranks_directory(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="ranks-", dir=parent))


@functools.cache
def _spawn_directory() -> Path:
    sweep()
    return make_run_dir()
