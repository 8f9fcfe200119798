"""The fork server: a process that has imported torch once and forks ranks from then on.

It is started with one socket, the control. Each message on it asks for one family of ranks and
carries file descriptors: first the family's own socket, then one connection per rank. On the
family's socket the server tells how its ranks ended and is told which signals to send. When the
other side closes it, by will or by dying, the server kills that family: nobody is orphaned.
Only the server ever signals a rank, and only before it has reaped it: no pid is mistaken.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from multiprocessing.connection import Connection

from course_lib.launch.preload import preload

EVENT = struct.Struct("ii")  # to the server: rank, signal. From it: rank, wait status.
REQUEST = struct.Struct("i")  # how many ranks
READY = b"ready"
MAX_RANKS = 128  # a message carries at most 253 descriptors


class Family:
    """The ranks of one launch."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.ranks: dict[int, int] = {}  # pid to rank, of those not yet reaped

    def kill(self, signum: int = signal.SIGKILL, rank: int | None = None) -> None:
        """Send a signal to one rank or to all."""
        for pid, its_rank in self.ranks.items():
            if rank in (None, its_rank):
                os.kill(pid, signum)

    def tell(self, pid: int, status: int) -> None:
        """Report how a rank ended, if anyone still listens."""
        rank = self.ranks.pop(pid)
        try:
            self.link.send_bytes(EVENT.pack(rank, status))
        except OSError:
            pass


class Server:
    """The loop: requests, signals to send, ends to report."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.families: list[Family] = []
        self.selector = selectors.DefaultSelector()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.selector.register(self.wake_read, selectors.EVENT_READ, self.reap)
        self.selector.register(control, selectors.EVENT_READ, self.start)
        self.owner = os.getppid()

    def serve(self) -> None:
        """Work until the owner is gone."""
        while os.getppid() == self.owner:
            for key, _ in self.selector.select(timeout=1.0):
                key.data()
        self.end()

    def end(self) -> None:
        """Kill every rank and leave."""
        for family in self.families:
            family.kill()
        os._exit(0)

    def start(self) -> None:
        """Fork the ranks that one message asks for."""
        data, fds, _, _ = socket.recv_fds(self.control, REQUEST.size, MAX_RANKS + 1)
        if not data:
            self.end()
        family = Family(Connection(fds[0]))
        for rank, fd in enumerate(fds[1:]):
            pid = os.fork()
            if pid == 0:
                self.become_rank(fd, [family.link.fileno(), *fds[1:]])
            family.ranks[pid] = rank
        for fd in fds[1:]:
            os.close(fd)
        self.families.append(family)
        self.selector.register(family.link, selectors.EVENT_READ, lambda: self.obey(family))

    def become_rank(self, fd: int, inherited: list[int]) -> None:
        """In the child: let go of everything that is the server's, and never return."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.selector.close()
            for other in [family.link.fileno() for family in self.families] + inherited:
                if other != fd:
                    os.close(other)
            self.control.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            from course_lib.launch.rank import serve_rank  # preloaded

            serve_rank(Connection(fd))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def obey(self, family: Family) -> None:
        """Pass signals on; kill the family when its owner has closed its socket."""
        try:
            rank, signum = EVENT.unpack(family.link.recv_bytes())
            family.kill(signum, rank)
        except (EOFError, OSError):
            self.selector.unregister(family.link)
            family.kill()
            family.link.close()
            self.families.remove(family)

    def reap(self) -> None:
        """Collect the ranks that have ended and report them."""
        os.read(self.wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for family in self.families:
                if pid in family.ranks:
                    family.tell(pid, status)


def main(control_fd: int) -> None:
    """Import everything, say so, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    preload()
    server = Server(control)
    control.sendall(READY)
    server.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
