"""Where a rank stands, in words: "all_reduce, cell 14 line 7", from a stack."""

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
    all_to_all all_to_all_single all_to_all_v barrier broadcast broadcast_object_list gather
    gather_object reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single scatter
    scatter_object_list send recv isend irecv exchange batch_isend_irecv monitored_barrier
    new_group init_process_group init_device_mesh make_mesh send_object_list recv_object_list
    ring""".split()
)
PACKAGE = Path(__file__).resolve().parents[1]
SITE = [Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib", "stdlib")]
CALLER = str(PACKAGE / "launch" / "rank.py")
ENTRY = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
THREAD = re.compile(r"^(?P<current>Current thread|Thread) 0x")


def parse_stacks(text: str) -> list[Frame]:
    """The stack that matters in a faulthandler dump, innermost frame last.

    After a crash it is the thread that crashed; else the main thread, which is written last.
    Empty when there is no dump.
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
    """The stack of a thread of this process, innermost frame last."""
    top = sys._current_frames().get(ident)
    frames = traceback.extract_stack(top) if top is not None else []
    return [Frame(frame.filename, frame.lineno or 0, frame.name) for frame in frames]


def cell_number(filename: str) -> int | None:
    """The execution count of the notebook cell whose code has this file name."""
    if old_style := re.match(r"<ipython-input-(\d+)-", filename):
        return int(old_style[1])
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(filename) if name_of is not None else None
    number = re.search(r"\d+", named[1]) if named else None
    return int(number[0]) if number else None


def cell_names() -> dict[str, str]:
    """The file names of all cells that were run, and what to call them: "cell 14"."""
    numbers = {name: cell_number(name) for name in list(linecache.cache)}
    return {name: f"cell {number}" for name, number in numbers.items() if number is not None}


def is_cell(filename: str) -> bool:
    """Whether the file name is one that Jupyter or IPython gives to a cell."""
    return cell_number(filename) is not None or "ipykernel_" in filename


def place_name(filename: str) -> str:
    """What to call a file in a report: "cell 14", or a path that holds no machine's name."""
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
    """Whether a frame is torch's, Python's or ours, and not the learner's."""
    if is_cell(filename):
        return False
    if filename.startswith("<frozen"):
        return True
    path = Path(filename)
    return any(path.is_relative_to(root) for root in (PACKAGE, *SITE))


def source(frame: Frame) -> str:
    """The line of source that a frame stands on, if it is known here."""
    linecache.checkcache(frame.filename)
    return linecache.getline(frame.filename, frame.line).strip()


def where(frame: Frame) -> str:
    """A frame as "cell 14 line 7"."""
    return f"{place_name(frame.filename)} line {frame.line}"


def below_launcher(frames: Sequence[Frame]) -> Sequence[Frame]:
    """The frames of what was called: those that made the call in the rank are left out."""
    ours = [index for index, frame in enumerate(frames) if frame.filename == CALLER]
    return frames[ours[-1] + 1 :] if ours else frames


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """The learner's innermost line: in a cell if there is one, else in a file of theirs."""
    cells = [frame for frame in frames if is_cell(frame.filename)]
    own = cells or [frame for frame in frames if not is_library(frame.filename)]
    return own[-1] if own else None


def collective(frames: Iterable[Frame]) -> str:
    """The collective that these frames are in, by the name that was called; "" if in none."""
    for frame in frames:
        if is_library(frame.filename) and frame.function in COLLECTIVES:
            return frame.function
    return ""


def standing(frames: Sequence[Frame]) -> str:
    """Where a rank stands: "all_reduce, cell 14 line 7: comm.all_reduce(x, mesh.dp)".

    Empty when no frame is the learner's and none a collective.
    """
    frames = below_launcher(frames)
    own = own_frame(frames)
    if own is None:
        return collective(frames)
    within = frames[frames.index(own) + 1 :]
    called = collective(within)
    text = source(own)
    return f"{called}, " * bool(called) + where(own) + f": {text}" * bool(text)
