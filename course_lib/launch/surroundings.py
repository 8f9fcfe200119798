"""Detect how this process was started: by a Jupyter kernel, torchrun, srun or a user."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass


def in_kernel() -> bool:
    """Return whether this process is a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@dataclass(frozen=True)
class Seat:
    """The rank of this process in a world that a launcher started.

    It is rank ``rank`` of ``size``, and ``local_rank`` of ``local_size`` on this machine. The
    rendezvous store is at ``address``:``port``. ``hosted``: the launcher hosts the store; if not,
    rank 0 has to.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosted: bool

    @property
    def one_machine(self) -> bool:
        """Return whether all ranks can connect over the loopback interface."""
        return self.local_size == self.size or self.address in ("127.0.0.1", "localhost", "::1")


def seat(environ: Mapping[str, str]) -> Seat | None:
    """Return the rank that torchrun or srun gave to this process; None without a launcher.

    SLURM_PROCID alone is not enough, because it is also set in a batch script and under
    ``srun --pty jupyter lab``. Only a *step* of more than one task has several ranks.
    Raises ValueError when the variables of a launcher contradict one another.
    """
    if _whole(environ, "WORLD_SIZE", 1) > 1 and "RANK" in environ:
        return _torchrun_seat(environ)
    if _whole(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in environ:
        return _slurm_seat(environ)
    return None


def _whole(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"expected a whole number in the environment variable {name}, which a launcher such "
            f"as torchrun or srun sets, got {text!r}; unset it to start ranks from here"
        ) from None


def _torchrun_seat(environ: Mapping[str, str]) -> Seat:
    missing = {"MASTER_ADDR", "MASTER_PORT"} - set(environ)
    if missing:
        raise ValueError(
            f"expected {' and '.join(sorted(missing))} in the environment, because RANK and "
            "WORLD_SIZE are set; start the script with torchrun, or unset RANK and WORLD_SIZE to "
            "start ranks from here"
        )
    rank, size = _whole(environ, "RANK"), _whole(environ, "WORLD_SIZE")
    return Seat(
        rank,
        size,
        _whole(environ, "LOCAL_RANK", rank),
        _whole(environ, "LOCAL_WORLD_SIZE", size),
        environ["MASTER_ADDR"],
        _whole(environ, "MASTER_PORT"),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm_seat(environ: Mapping[str, str]) -> Seat:
    size, nodes = (
        _whole(environ, "SLURM_STEP_NUM_TASKS"),
        _whole(environ, "SLURM_STEP_NUM_NODES", 1),
    )
    first = first_host(environ.get("SLURM_STEP_NODELIST", "localhost"))
    address = environ.get("MASTER_ADDR", "127.0.0.1" if nodes == 1 else first)
    # Every task of a step computes the same port; other steps of the job compute other ports.
    step = _whole(environ, "SLURM_JOB_ID") * 64 + _whole(environ, "SLURM_STEP_ID")
    port = _whole(environ, "MASTER_PORT", 15_000 + step % 15_000)
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    local_size = size if nodes == 1 else int(tasks[0]) if tasks else 1
    rank, local = _whole(environ, "SLURM_PROCID"), _whole(environ, "SLURM_LOCALID")
    return Seat(rank, size, local, local_size, address, port, hosted=False)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[07-09,12],login1`` gives ``gpu07``."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes
