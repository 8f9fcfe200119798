"""Describe a rank's place in the code, from its stack: "all_reduce, cell 14 line 7"."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from course_lib.launch.task import Frame

COLLECTIVES = frozenset(
    """all_reduce all_gather all_gather_into_tensor all_gather_object all_gather_single
    all_to_all all_to_all_single all_to_all_v barrier broadcast broadcast_object_list
    gather gather_object reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single
    scatter scatter_object_list send recv isend irecv exchange batch_isend_irecv
    monitored_barrier new_group init_process_group init_device_mesh make_mesh
    send_object_list recv_object_list ring""".split()
)
WAITS = COLLECTIVES | {"wait", "_engine_run_backward"}  # where a rank waits for others
PACKAGE = Path(__file__).resolve().parents[1]
_ROOTS = [Path(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib", "stdlib")]
SITE = {*_ROOTS, *(root.resolve() for root in _ROOTS)}  # a virtual environment may be a link
GRADERS = PACKAGE.parent / "exercises" / "graders"
CALLER = str(PACKAGE / "launch" / "rank.py")
ENTRY = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x")


def parse_stacks(text: str) -> list[Frame]:
    """Return the relevant stack of a faulthandler dump, innermost frame last.

    After a crash this is the stack of the thread that crashed, else the stack of the main thread,
    which faulthandler writes last. Empty if there is no dump.
    """
    stacks: list[list[Frame]] = []
    crashed: list[Frame] | None = None
    for line in text.splitlines():
        if head := THREAD.match(line):
            stacks.append([])
            if head["current"] == "Current thread":
                crashed = stacks[-1]
        elif stacks and (entry := ENTRY.match(line)):
            frame = Frame(entry["file"], int(entry["line"]), entry["function"])
            stacks[-1].insert(0, frame)
    if "Fatal Python error" in text and crashed is not None:
        return crashed
    return stacks[-1] if stacks else []


def stack_of_thread(ident: int) -> list[Frame]:
    """Return the stack of a thread of this process, innermost frame last."""
    top = sys._current_frames().get(ident)
    frames = traceback.extract_stack(top) if top is not None else []
    return [Frame(frame.filename, frame.lineno or 0, frame.name) for frame in frames]


def cell_number(filename: str) -> int | None:
    """Return the execution count of the notebook cell with this file name, None for a file."""
    if old_style := re.match(r"<ipython-input-(\d+)-", filename):
        return int(old_style[1])
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(filename) if name_of is not None else None
    number = re.search(r"\d+", named[1]) if named else None
    return int(number[0]) if number else None


def cell_names() -> dict[str, str]:
    """Return the name, such as "cell 14", of every cell that was run, by its file name."""
    numbers = {name: cell_number(name) for name in list(linecache.cache)}
    return {name: f"cell {number}" for name, number in numbers.items() if number is not None}


def is_cell(filename: str) -> bool:
    """Return whether Jupyter or IPython gave this file name to a cell."""
    return cell_number(filename) is not None or "ipykernel_" in filename


def place_name(filename: str) -> str:
    """Return the name of a file in a report: "cell 14", or a path without directories of users."""
    number = cell_number(filename)
    if number is not None:
        return f"cell {number}"
    if is_cell(filename):
        return "a cell"
    path = Path(filename)
    for root in (PACKAGE.parent, *SITE):
        if path.is_relative_to(root) and (root != PACKAGE.parent or path.is_relative_to(PACKAGE)):
            return path.relative_to(root).as_posix()
    return path.name


def is_library(filename: str) -> bool:
    """Return whether a file belongs to torch, Python or the course, not to the learner."""
    if is_cell(filename):
        return False
    if filename.startswith("<frozen"):
        return True
    path = Path(filename)
    return any(path.is_relative_to(root) for root in (PACKAGE, GRADERS, *SITE))


def source(frame: Frame) -> str:
    """Return a frame's line of source, "" if it is not available."""
    linecache.checkcache(frame.filename)
    return linecache.getline(frame.filename, frame.line).strip()


def where(frame: Frame) -> str:
    """Return a frame as "cell 14 line 7"."""
    return f"{place_name(frame.filename)} line {frame.line}"


def below_launcher(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames of the called function, without the frames of the launcher above it."""
    ours = [index for index, frame in enumerate(frames) if frame.filename == CALLER]
    return frames[ours[-1] + 1 :] if ours else frames


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the learner's innermost frame: in a cell if there is one, else in a file."""
    cells = [frame for frame in frames if is_cell(frame.filename)]
    own = cells or [frame for frame in frames if not is_library(frame.filename)]
    return own[-1] if own else None


def collective(frames: Iterable[Frame]) -> str:
    """Return the name of the collective that these frames call, "" if they call none."""
    for frame in frames:
        if is_library(frame.filename) and frame.function in COLLECTIVES:
            return frame.function
    return ""


def waits(frames: Sequence[Frame]) -> bool:
    """Return whether a rank with this stack, which does not compute, waits for other ranks."""
    frames = below_launcher(frames)
    own = own_frame(frames)
    within = frames if own is None else frames[frames.index(own) + 1 :]
    if any(is_library(frame.filename) and frame.function in WAITS for frame in within):
        return True
    return own is not None and "wait(" in source(own)


def standing(frames: Sequence[Frame]) -> str:
    """Return a rank's place: "all_reduce, cell 14 line 7: comm.all_reduce(x, mesh.dp)".

    Empty if the stack has neither a frame of the learner nor a collective.
    """
    frames = below_launcher(frames)
    own = own_frame(frames)
    if own is None:
        return collective(frames)
    within = frames[frames.index(own) + 1 :]
    called = collective(within)
    text = source(own)
    return f"{called}, " * bool(called) + where(own) + f": {text}" * bool(text)
