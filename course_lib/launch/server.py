"""The fork server: a process that imports torch once and then forks ranks.

It is started with one socket, the control. Each message on it requests one family of ranks and
carries file descriptors: first the family's socket, then one connection per rank. On the family's
socket the server sends the wait status of each ended rank and receives the signals to send. When
the other side closes this socket or dies, the server kills the family, so that no rank is
orphaned. Only the server signals a rank, and only before it has reaped the rank, so that a signal
cannot reach another process with the same pid.
"""

from __future__ import annotations

import contextlib
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
REQUEST = struct.Struct("i")  # number of ranks
READY = b"ready"
MAX_RANKS = 128  # a message carries at most 253 descriptors


def kill_group(pid: int) -> None:
    """Kill a rank that has not been reaped, and the processes that it started."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def collect(pid: int) -> int | None:
    """Return the wait status of an ended child, else None; kill the processes that it started."""
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_group(pid)  # before it is reaped, because the system may reuse the pid afterwards
    done, status = os.waitpid(pid, os.WNOHANG)
    return status if done else None


class Family:
    """The ranks of one launch."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.ranks: dict[int, int] = {}  # rank by pid, for ranks that are not yet reaped

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to one rank, unless it has been reaped."""
        for pid, its_rank in self.ranks.items():
            if rank == its_rank:
                os.kill(pid, signum)

    def kill(self) -> None:
        """Kill every rank and the processes that it started."""
        for pid in self.ranks:
            kill_group(pid)

    def tell(self, pid: int, status: int) -> None:
        """Send the wait status of a rank, if the other side is still open."""
        rank = self.ranks.pop(pid)
        with contextlib.suppress(OSError):
            self.link.send_bytes(EVENT.pack(rank, status))


class Server:
    """The main loop: fork requested ranks, send signals, report ended ranks."""

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
        """Handle events until the owner has ended."""
        while os.getppid() == self.owner:
            for key, _ in self.selector.select(timeout=1.0):
                key.data()
        self.end()

    def end(self) -> None:
        """Kill every rank and exit."""
        for family in self.families:
            family.kill()
        os._exit(0)

    def start(self) -> None:
        """Fork the ranks that one message requests."""
        data, fds, _, _ = socket.recv_fds(self.control, REQUEST.size, MAX_RANKS + 1)
        if not data:
            self.end()
        family = Family(Connection(fds[0]))
        for rank, fd in enumerate(fds[1:]):
            pid = os.fork()
            if pid == 0:
                self.become_rank(fd, [family.link.fileno(), *fds[1:]])
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # the child does it too, because either may run first
            family.ranks[pid] = rank
        for fd in fds[1:]:
            os.close(fd)
        self.families.append(family)
        self.selector.register(family.link, selectors.EVENT_READ, lambda: self.obey(family))

    def become_rank(self, fd: int, inherited: list[int]) -> None:
        """In the child, close the server's descriptors and serve as a rank; never return."""
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.selector.close()
            for other in [each.link for each in self.families if not each.link.closed]:
                other.close()
            for number in inherited:
                if number != fd:
                    os.close(number)
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
        """Forward a signal; kill the family if its owner has closed the socket."""
        try:
            rank, signum = EVENT.unpack(family.link.recv_bytes())
            family.signal(rank, signum)
        except (EOFError, OSError):
            self.selector.unregister(family.link)
            family.kill()
            family.link.close()

    def reap(self) -> None:
        """Collect the ranks that have ended and report them."""
        os.read(self.wake_read, 4096)
        for family in self.families:
            for pid in list(family.ranks):
                if (status := collect(pid)) is not None:
                    family.tell(pid, status)
        self.families = [each for each in self.families if each.ranks or not each.link.closed]


def main(control_fd: int) -> None:
    """Import the modules, send ``READY`` and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    preload()
    server = Server(control)
    control.sendall(READY)
    server.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
