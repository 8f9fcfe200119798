"""The private directory of one launching process: rendezvous files, rank output, stacks.

The owner locks a file in the directory. The kernel releases the lock when the owner ends, even if
it is killed. A directory with a free lock is therefore stale, and the next start removes it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # without fork there are no locks, and stale directories are not removed
    fcntl = None  # type: ignore[assignment]

PREFIX = "course-run-"
ROOM = 256 * 2**20  # bytes that must be free in /dev/shm: containers often have 64 MB


def parents() -> list[Path]:
    """Return the directories in which run directories can be made, best first."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [place for place in places if place.is_dir() and os.access(place, os.W_OK | os.X_OK)]


def _has_room(place: Path) -> bool:
    return shutil.disk_usage(place).free >= ROOM


def make_run_dir() -> Path:
    """Make and lock this process's run directory; it is removed when the process ends."""
    places = parents()
    place = next((place for place in places if _has_room(place)), places[-1])
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    if fcntl is not None:
        fcntl.flock(lock, fcntl.LOCK_EX)
    # It becomes visible only after it is locked, so that a sweep cannot remove it.
    final = hidden.with_name(hidden.name.removeprefix("."))
    hidden.rename(final)
    atexit.register(_remove, final, os.getpid())
    return final


def _remove(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner must not remove it
        shutil.rmtree(directory, ignore_errors=True)


def sweep() -> list[Path]:
    """Remove the run directories of this user's ended processes; return the removed paths."""
    swept = []
    for place in parents():
        for directory in place.glob(f"{PREFIX}*"):
            if _is_stale(directory):
                shutil.rmtree(directory, ignore_errors=True)
                swept.append(directory)
    return swept


def _is_stale(directory: Path) -> bool:
    if fcntl is None:
        return False
    try:
        if directory.stat().st_uid != os.getuid():
            return False
        lock = os.open(directory / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)
