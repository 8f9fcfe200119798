"""``course doctor``: check whether this machine is ready, and name a fix or an alternative.

Only the standard library is imported at the top, so that ``python3 -m course_lib.doctor`` also
runs on a machine where no package could be installed.
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
TORCH = (2, 11)  # the oldest version that the course supports
INSTALL = "make setup (without make: python3 -m pip install -e . in a virtual environment)"
ROUTES = {
    "local": "this machine is ready: make lab",
    "colab": "you are on Colab: docs/colab.md says what works there",
    "wsl2": "install WSL2 and clone the course inside it: ranks need Linux or macOS",
    "devcontainer": "open the course in its devcontainer (.devcontainer/): Docker is installed",
    "colab-instead": "follow docs/colab.md, which needs a browser only",
}


@dataclass(frozen=True)
class Check:
    """One line of the report: ``status`` is ok, warn (slower, or incomplete) or fail."""

    name: str
    status: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and where to take the course."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether the course runs here: no check failed."""
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
            return "fix the failed checks above, or " + ROUTES["colab-instead"]
        if self.take == "devcontainer":
            return "fix the failed checks above, or " + ROUTES["devcontainer"]
        return ROUTES[self.take]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        checks = [asdict(check) for check in self.checks]
        return {"checks": checks, "ok": self.ok, "take": self.take, "advice": self.advice}


def _on_colab() -> bool:
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ


def examine(say: Callable[[str], object] = lambda text: None) -> Report:
    """Run every check. A check that raises has failed, with the error as its value.

    ``say`` is called with the name of each check before it runs.
    """
    return Report([_run(check, say) for check in CHECKS])


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the report as (status, rest of the line); other lines have an empty status."""
    for check in report.checks:
        yield check.status, f"  {check.name:<14} {check.value}"
        if check.fix:
            yield "", f"      fix: {check.fix}"
    yield "", f"\n{report.advice}"


def show(report: Report, console: Any) -> None:
    """Print the report on a rich ``console``."""
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for status, rest in lines(report):
        head = f"[{colors[status]}]{status:<4}[/]" if status else ""
        console.print(head + _escape(rest), soft_wrap=True)  # a fix must stay on one line


def main(arguments: Sequence[str]) -> int:
    """Run ``python3 -m course_lib.doctor [--json]``, for a machine without the packages."""
    if unknown := [argument for argument in arguments if argument != "--json"]:
        print(f"expected no option except --json, got {unknown[0]}.", file=sys.stderr)
        return 2
    report = examine()
    if arguments:
        print(json.dumps(report.as_dict()))
    else:
        print("\n".join(f"{status:<4}{rest}" if status else rest for status, rest in lines(report)))
    return 0 if report.ok else 3


def _escape(text: str) -> str:
    """Escape square brackets, which are markup in rich."""
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
    """Check for Python 3.11 or newer."""
    version = platform.python_version()
    if sys.version_info < PYTHON:
        return Check("python", "fail", version, "install Python 3.11 or newer, then " + INSTALL)
    return Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}")


def check_packages() -> Check:
    """Check that all requirements of pyproject.toml are installed."""
    wanted = [re.split(r"[^\w.-]", text)[0] for text in _requirements()]
    missing = [name for name in wanted if not _is_installed(name)]
    if missing:
        return Check("packages", "fail", "missing: " + ", ".join(missing), INSTALL)
    return Check("packages", "ok", f"all {len(wanted)} found")


def _requirements() -> list[str]:
    """Return the requirements of the installed course, without the development extras."""
    required = metadata.requires("parallel-training-course") or []
    return [text for text in required if "extra ==" not in text]


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def check_torch() -> Check:
    """Check that torch can be imported and is new enough."""
    import torch

    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < TORCH:
        wanted = f"use torch {TORCH[0]}.{TORCH[1]} or newer"
        return Check("torch", "warn", f"{version}, older than the course supports", wanted)
    return Check("torch", "ok", version)


def check_kernelspec() -> Check:
    """Check that Jupyter's kernel ``python3`` runs this Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Check("kernelspec", "fail", "there is no kernel python3", FIXES["kernelspec"])
    if not _is_this_python(program):
        value = f"kernel python3 starts {program}, expected {sys.executable}"
        return Check("kernelspec", "fail", value, FIXES["kernelspec"])
    return Check("kernelspec", "ok", "kernel python3 is this Python")


def _is_this_python(program: str) -> bool:
    """Compare folders: python, python3 and python3.11 of one environment are the same Python.

    Links are not followed, because in every environment they lead to the same program. Jupyter
    replaces a bare ``python`` by the Python that it runs on.
    """
    if os.sep not in program:
        return program.startswith("python")
    return os.path.normpath(os.path.dirname(program)) == os.path.dirname(sys.executable)


def check_ranks() -> Check:
    """Check that two ranks start and compute the sum 1 + 2."""
    from course_lib.launch import run

    sums = list(run(_sum_of_ranks, n=2, timeout=60))
    if sums != [3.0, 3.0]:
        return Check("ranks", "fail", f"expected all_reduce of [3.0, 3.0], got {sums}", INSTALL)
    return Check("ranks", "ok", "2 ranks, all_reduce correct")


def _sum_of_ranks() -> float:
    import torch

    from course_lib.comm import all_reduce
    from course_lib.mesh import make_mesh

    mesh = make_mesh()
    return float(all_reduce(torch.tensor([mesh.dp.rank + 1.0]), mesh.dp))


def check_cores() -> Check:
    """Check the cores of this process, and report torch's threads."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    noun = "core" if cores == 1 else "cores"
    value = f"{cores} {noun}, torch uses {torch.get_num_threads()} threads (1 in each rank)"
    if cores < 2:
        return Check(
            "cores", "warn", value, "use 2 cores: with 1 core the lessons take twice as long"
        )
    return Check("cores", "ok", value)


def check_memory() -> Check:
    """Check the free memory; 4 ranks with torch need about 2 GB."""
    import psutil

    free = psutil.virtual_memory().available / 1e9
    if free < 2.5:
        return Check("memory", "warn", f"{free:.1f} GB free", "close programs: 4 ranks need 2.5 GB")
    return Check("memory", "ok", f"{free:.1f} GB free")


def check_shared_memory() -> Check:
    """Check the space in /dev/shm; without it, results use a temporary folder."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", "ok", "no /dev/shm here: a temporary folder is used")
    free = shutil.disk_usage(folder).free / 1e6
    if free < 128:
        fix = "in Docker: --shm-size=1g; without it the course works a little slower"
        return Check("shared memory", "warn", f"{free:,.0f} MB free in /dev/shm", fix)
    return Check("shared memory", "ok", f"{free:,.0f} MB free in /dev/shm")


def check_gpu() -> Check:
    """Report CUDA and NCCL; the course needs neither."""
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", "ok", "no GPU; the course does not need one")
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    value = f"{count} x {name}, nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Check("gpu", "ok", value + ("" if count > 1 else "; one GPU: ranks use gloo"))


def check_loopback() -> Check:
    """Check the loopback connection, over which the ranks communicate."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address, timeout=5) as client:
            peer, _ = server.accept()
            with peer:
                client.sendall(b"ping")
                if peer.recv(4) != b"ping":
                    return Check("loopback", "fail", "bytes were lost", FIXES["loopback"])
    return Check("loopback", "ok", "127.0.0.1 answers")


def check_write_access() -> Check:
    """Check write access to the course's folder and the temporary folder."""
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
    "ranks": "read the error; course doctor --json shows all checks in full",
    "write access": "clone the course into a folder that you own, or change this folder's owner",
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
