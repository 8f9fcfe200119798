"""``course doctor``: is this machine ready, and if not, what to do or where else to go.

Only the standard library is imported at the top, so that ``python3 -m course_lib.doctor`` also
answers on a machine where nothing could be installed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)
TORCH = (2, 11)  # from
INSTALL = "make setup (without make: python3 -m pip install -e . in a virtual environment)"
ROUTES = {
    "local": "this machine is ready: make lab",
    "colab": "you are on Colab: docs/colab.md says what works there",
    "wsl2": "install WSL2 and clone the course inside it: ranks need Linux or macOS",
    "devcontainer": "open the course in its devcontainer (.devcontainer/): Docker is here",
    "colab-instead": "follow docs/colab.md, which needs a browser only",
}


@dataclass(frozen=True)
class Check:
    """One line: ``status`` is ok, warn (slower, or a part is missing) or fail."""

    name: str
    status: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All checks and the route to take."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether the course runs here: nothing failed."""
        return all(check.status != "fail" for check in self.checks)

    @property
    def take(self) -> str:
        """local, colab, devcontainer or wsl2: where to take the course."""
        if sys.platform == "win32":
            return "wsl2"
        if self.ok:
            return "colab" if _on_colab() else "local"
        return "devcontainer" if shutil.which("docker") else "colab"

    @property
    def advice(self) -> str:
        """``take`` in words."""
        if self.take == "colab" and not _on_colab():
            return "mend what failed above, or " + ROUTES["colab-instead"]
        if self.take == "devcontainer":
            return "mend what failed above, or " + ROUTES["devcontainer"]
        return ROUTES[self.take]

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        checks = [asdict(check) for check in self.checks]
        return {"checks": checks, "ok": self.ok, "take": self.take, "advice": self.advice}


def _on_colab() -> bool:
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


def examine(say: Callable[[str], object] = lambda text: None) -> Report:
    """Make every check. One that raises has failed, with the error as its value.

    ``say`` is called with the name of each check before it is made.
    """
    return Report([_run(check, say) for check in CHECKS])


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """The report as (status, rest of the line); what is no check has an empty status."""
    for check in report.checks:
        yield check.status, f"  {check.name:<14} {check.value}"
        if check.fix:
            yield "", f"      fix: {check.fix}"
    yield "", f"\n{report.advice}"


def show(report: Report, console: Any) -> None:
    """Print the report on a rich ``console``."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for status, rest in lines(report):
        head = f"[{colours[status]}]{status:<4}[/]" if status else ""
        console.print(head + _escape(rest), soft_wrap=True)  # a fix must stay on one line


def main(arguments: Sequence[str]) -> int:
    """``python3 -m course_lib.doctor [--json]``: the verb where nothing is installed yet."""
    if unknown := [argument for argument in arguments if argument != "--json"]:
        print(f"{unknown[0]}: the doctor takes --json and nothing else.", file=sys.stderr)
        return 2
    report = examine()
    if arguments:
        print(json.dumps(report.as_dict()))
    else:
        print("\n".join(f"{status:<4}{rest}" if status else rest for status, rest in lines(report)))
    return 0 if report.ok else 3


def _escape(text: str) -> str:
    """Square brackets are markup to rich."""
    return text.replace("[", r"\[")


def _run(check: Callable[[], Check], say: Callable[[str], object]) -> Check:
    name = check.__name__.removeprefix("check_").replace("_", " ")
    say(f"checking {name}")
    try:
        return check()
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Check(name, "fail", what, FIXES.get(name, INSTALL))


def check_python() -> Check:
    """Python 3.11 or newer."""
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Check("python", "fail", version, "install Python 3.11 or newer, then " + INSTALL)
    return Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}")


def check_packages() -> Check:
    """Everything that pyproject.toml asks for is installed."""
    wanted = [re.split(r"[^\w.-]", text)[0] for text in _requirements()]
    missing = [name for name in wanted if not _is_installed(name)]
    if missing:
        return Check("packages", "fail", "missing: " + ", ".join(missing), INSTALL)
    return Check("packages", "ok", f"all {len(wanted)} found")


def _requirements() -> list[str]:
    """What the installed course asks for, the development extras left out."""
    required = metadata.requires("parallel-training-course") or []
    return [text for text in required if "extra ==" not in text]


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def check_torch() -> Check:
    """torch imports, and is new enough for the course."""
    import torch

    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH:
        wanted = f"use torch {TORCH[0]}.{TORCH[1]} or newer"
        return Check("torch", "warn", f"{version}, older than the course wants", wanted)
    return Check("torch", "ok", version)


def check_kernelspec() -> Check:
    """Jupyter's kernel ``python3`` is this very Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Check("kernelspec", "fail", "there is no kernel python3", FIXES["kernelspec"])
    if not _is_this_python(program):
        value = f"kernel python3 starts {program}, not {sys.executable}"
        return Check("kernelspec", "fail", value, FIXES["kernelspec"])
    return Check("kernelspec", "ok", "kernel python3 is this Python")


def _is_this_python(program: str) -> bool:
    """Compares folders: python, python3 and python3.11 of one environment are one Python.

    Links are not followed, since those of every environment lead to the same program. Jupyter
    itself replaces a bare ``python`` by the Python that it runs on.
    """
    if os.sep not in program:
        return program.startswith("python")
    return os.path.normpath(os.path.dirname(program)) == os.path.dirname(sys.executable)


def check_ranks() -> Check:
    """Two ranks start and agree on a sum: 1 + 2."""
    from course_lib.launch import run

    sums = list(run(_sum_of_ranks, n=2, timeout=60))
    if sums != [3.0, 3.0]:
        return Check("ranks", "fail", f"all_reduce gave {sums} instead of [3.0, 3.0]", INSTALL)
    return Check("ranks", "ok", "2 ranks, all_reduce correct")


def _sum_of_ranks() -> float:
    import torch

    from course_lib.comm import all_reduce
    from course_lib.mesh import make_mesh

    mesh = make_mesh()
    return float(all_reduce(torch.tensor([mesh.dp.rank + 1.0]), mesh.dp))


def check_cores() -> Check:
    """Cores this process may use, and the threads that torch would take for one rank."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    noun = "core" if cores == 1 else "cores"
    value = f"{cores} {noun}, torch uses {torch.get_num_threads()} threads (1 in each rank)"
    if cores < 2:
        return Check(
            "cores", "warn", value, "give it 2 cores: with 1 the lessons take twice as long"
        )
    return Check("cores", "ok", value)


def check_memory() -> Check:
    """4 ranks with torch take about 2 GB."""
    import psutil

    free = psutil.virtual_memory().available / 1e9
    if free < 2.5:
        return Check("memory", "warn", f"{free:.1f} GB free", "close programs: 4 ranks want 2.5 GB")
    return Check("memory", "ok", f"{free:.1f} GB free")


def check_shared_memory() -> Check:
    """Room in /dev/shm; without it results pass through a temporary folder."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "ok", "no /dev/shm here: a temporary folder serves")
    free = shutil.disk_usage(folder).free / 1e6
    if free < 128:
        fix = "in Docker: --shm-size=1g; the course also works without, a little slower"
        return Check("shared memory", "warn", f"{free:,.0f} MB free in /dev/shm", fix)
    return Check("shared memory", "ok", f"{free:,.0f} MB free in /dev/shm")


def check_gpu() -> Check:
    """CUDA and NCCL, neither of which is needed."""
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", "ok", "none, and none is needed")
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    value = f"{count} x {name}, nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Check("gpu", "ok", value + ("" if count > 1 else "; one card: ranks use gloo"))


def check_loopback() -> Check:
    """A connection to this machine itself, over which the ranks talk."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address, timeout=5) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"ping")
                if peer.recv(4) != b"ping":
                    return Check("loopback", "fail", "bytes got lost", FIXES["loopback"])
    return Check("loopback", "ok", "127.0.0.1 answers")


def check_write_access() -> Check:
    """out/ and work/ in the course, and the temporary folder."""
    for folder in (ROOT, Path(tempfile.gettempdir())):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            value = f"{folder}: {error.strerror}"
            return Check("write access", "fail", value, FIXES["write access"])
    return Check("write access", "ok", "the course's folder and the temporary folder")


FIXES = {
    "kernelspec": f"{sys.executable} -m ipykernel install --sys-prefix --name python3",
    "loopback": "bring the loopback interface up (ip link set lo up), or allow it in the firewall",
    "ranks": "read the error; course doctor --json shows the other checks in full",
    "write access": "clone the course where you may write, or change the owner of this folder",
}

CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_kernelspec,
    check_ranks,
    check_cores,
    check_memory,
    check_shared_memory,
    check_gpu,
    check_loopback,
    check_write_access,
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
