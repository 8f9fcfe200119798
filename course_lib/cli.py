"""``course``: the command line. Each verb imports what it needs when it is called, torch last.

Exit codes: 0 done, 1 a check failed, 2 bad input, 3 this machine lacks something, 130 interrupted.
Bad input is one sentence on stderr. With ``--json`` stdout holds the data and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from course_lib.layout import DEFAULT_ORDER

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from course_lib.grading.run import Grade
    from course_lib.schedule import Schedule
    from course_lib.view import Picture

ROOT = Path(__file__).resolve().parent.parent
FAILED, BAD_INPUT, ENVIRONMENT, INTERRUPTED = 1, 2, 3, 130
COLOURS = ("default", "cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")
MOST_PAIRS = 2**18  # of `course schedule`: seconds and some hundred MB
MOST_RANKS = 2**20  # of `course groups`: more would fill the memory with lists

Number = Annotated[str, typer.Argument(metavar="NN", help="Number of the lesson, such as 03.")]
ExerciseId = Annotated[str, typer.Argument(metavar="EX", help="Exercise: 03-2, or 2.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the data alone, as JSON.")]
Rounds = Annotated[int, typer.Option(min=1, max=10_000, help="How often each case is timed.")]
Size = Annotated[int, typer.Option(min=1, help="Ranks on this axis.")]


class Verbs(TyperGroup):
    """Runs a verb; an interrupt and a closed pipe end it without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """The exit code of the verb (None counts as 0)."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return _fail("Interrupted.", INTERRUPTED)
        except BrokenPipeError:  # the reader of our output had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return code


PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}
app = typer.Typer(cls=Verbs, help="Parallel training, built and measured on real ranks.", **PLAIN)
bench = typer.Typer(help="Measure speed on this machine, ours beside torch's.", **PLAIN)
app.add_typer(bench, name="bench")


@app.command()
def doctor(as_json: AsJson = False) -> int:
    """Is this machine ready? Every check with its fix."""
    from course_lib import doctor as examination

    report = examination.examine()
    if as_json:
        _print_json(report.as_dict())
    else:
        examination.show(report, _console())
    return 0 if report.ok else ENVIRONMENT


@app.command()
def tour(
    out: Annotated[str, typer.Option(help="Folder for the pictures and tour.json.")] = "out/tour",
    as_json: AsJson = False,
) -> int:
    """The main job: train on 4 ranks with each technique, and compare with one process."""
    if not out.strip():
        raise ValueError("--out is empty: give a folder, such as --out out/tour")
    _make_folder(Path(out), "--out")
    return import_module("course_lib.tour.job").run_tour(out=Path(out), as_json=as_json)


@app.command()
def lab(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the server.")] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    rest: Annotated[
        list[str] | None, typer.Argument(help="A notebook, or after -- options of JupyterLab.")
    ] = None,
) -> int:
    """Open JupyterLab on the course, with the kernel of this very Python."""
    command = lab_command(port, browser, rest or [])
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this Python's kernel before one of the user's
    sys.stdout.flush()
    os.execv(command[0], command)


# JupyterLab would ask the internet for news and updates, and the learner whether it may.
LAB_STAYS_HOME = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
)


def lab_command(port: int | None, browser: bool, rest: list[str]) -> list[str]:
    """The command that ``course lab`` becomes. Raises ValueError when ``rest`` names no file."""
    _course()
    if rest and not rest[0].startswith("-") and not Path(rest[0]).exists():
        raise ValueError(f"there is no notebook {rest[0]!r}; options of JupyterLab go after --")
    command = [sys.executable, "-m", "jupyterlab", f"--notebook-dir={ROOT}", *LAB_STAYS_HOME]
    if port is not None:
        command.append(f"--ServerApp.port={port}")
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers; Jupyter refuses root otherwise
        command.append("--allow-root")
    return command + rest


@app.command()
def groups(
    world: Annotated[int | None, typer.Option(min=1, help="Ranks; default: the product.")] = None,
    tp: Size = 1,
    cp: Size = 1,
    dp: Annotated[int | None, typer.Option(min=1, help="Default: what is left.")] = None,
    pp: Size = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel, a divisor of dp x cp.")] = 1,
    order: Annotated[str, typer.Option(help="Axes, the fastest first.")] = DEFAULT_ORDER,
    per_node: Annotated[int, typer.Option(min=1, help="Ranks a node, for the drawing.")] = 8,
    as_json: AsJson = False,
) -> int:
    """Which ranks form the groups of each axis, without starting any."""
    from course_lib.layout import drawing, make_layout, rank_groups

    layout = make_layout(world, order, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
    if layout.world > MOST_RANKS:
        raise ValueError(f"{layout.world:,} ranks are more than the {MOST_RANKS:,} listed here")
    if as_json:
        sizes = {axis: layout.sizes[axis] for axis in layout.order}
        members = rank_groups(order, layout.world, tp=tp, cp=cp, dp=dp, pp=pp, ep=ep)
        _print_json({"order": order, "world": layout.world, "sizes": sizes, **members})
    else:
        _console().print(_coloured(drawing(layout, per_node)), soft_wrap=True)
    return 0


@app.command()
def schedule(
    name: Annotated[str | None, typer.Argument(help="1f1b, say; a wrong one lists all.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks p; default: 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Default: 8.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages a rank holds; default: 1.")] = None,
    f: Annotated[float, typer.Option("--f", help="Cost of a forward, on one stage.")] = 1.0,
    b: Annotated[float | None, typer.Option("--b", help="Of a backward; default: 2 F.")] = None,
    i: Annotated[float | None, typer.Option("--i", help="Of its half for the input.")] = None,
    w: Annotated[float | None, typer.Option("--w", help="Of its half for the weights.")] = None,
    comm: Annotated[float, typer.Option(help="Delay of a hop between ranks.")] = 0.0,
    png: Annotated[Path | None, typer.Option(help="Draw the picture into this file.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A schedule of your own: CSV, a row a rank, cells as 0F0.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Simulate a pipeline schedule: when each rank works, the bubble, what is in flight."""
    from course_lib.schedule import Costs, drawing, simulate

    costs = Costs.make(f, b, i, w, comm)
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    simulation = simulate(_schedule(name, file, sizes), costs)
    if png is not None:
        _save_png(import_module("course_lib.view").schedule_picture(simulation), png)
    if as_json:
        _print_json(simulation.as_dict())
        return 0
    print(drawing(simulation, max(60, shutil.get_terminal_size((80, 24)).columns)))
    if png is not None:
        print(f"The picture is in {png}.")
    return 0


def _schedule(name: str | None, file: Path | None, sizes: dict[str, int | None]) -> Schedule:
    """The schedule called ``name``, or the legal one in ``file``; never one too large to hold."""
    from course_lib.schedule import SCHEDULES, check_sizes, make

    given = {key: size for key, size in sizes.items() if size is not None}
    check_sizes(**given)
    if (name is None) == (file is None):
        raise ValueError(
            f"give either the name of a schedule ({', '.join(SCHEDULES)}) or --file with your own"
        )
    if file is not None:
        return _schedule_in(file, given)
    assert name is not None
    ranks, microbatches, chunks = ({"stages": 4, "microbatches": 8, "chunks": 1} | given).values()
    if ranks * chunks * microbatches > MOST_PAIRS:
        raise ValueError(
            f"{ranks} ranks x {chunks} chunks x {microbatches} micro-batches are more than the "
            f"{MOST_PAIRS:,} (stage, micro-batch) pairs simulated here"
        )
    return make(name.lower(), ranks, microbatches, chunks)


def _schedule_in(file: Path, given: dict[str, int]) -> Schedule:
    """The legal schedule in ``file``; sizes that were given must be its own."""
    from course_lib.schedule import ScheduleError, read_csv, validate

    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"--file {file}: this is no text file") from None
    except OSError as error:
        raise ValueError(f"--file {file}: cannot be read ({error.strerror})") from None
    try:
        schedule = read_csv(text, file.stem)
        validate(schedule)
    except ScheduleError as error:
        raise ValueError(f"{file.name}: {error}") from None
    own = {
        "stages": schedule.ranks,
        "microbatches": schedule.microbatches,
        "chunks": schedule.stages // schedule.ranks,
    }
    for key, size in given.items():
        if own[key] != size:
            raise ValueError(f"--{key} {size}: {file.name} has {own[key]}; leave the option out")
    return schedule


def _save_png(picture: Picture, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ValueError(f"--png {path}: cannot be written ({error.strerror})") from None


@app.command("list")
def list_lessons(as_json: AsJson = False) -> int:
    """The lessons, their exercises, and how far you are."""
    from course_lib.grading import desk

    found = desk.lessons(_course())
    if as_json:
        entries = [
            {
                "lesson": lesson.number,
                "title": lesson.title,
                "exercises": {ex: vars(entry) for ex, entry in lesson.exercises.items()},
            }
            for lesson in found
        ]
        _print_json({"lessons": entries})
        return 0
    for lesson in found:
        done = sum(entry.done for entry in lesson.exercises.values())
        count = len(lesson.exercises)
        state = f"{done} of {count} exercises done" if count else "no exercises"
        print(f"{lesson.number}  {lesson.title}  ({state})")
    return 0


@app.command()
def start(
    number: Number,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set your files aside, begin anew.")
    ] = False,
) -> int:
    """Copy a lesson and its exercises into work/, where they are yours."""
    from course_lib.grading import desk

    root = _course()
    for path, what in desk.start(root, desk.lesson_number(root, number), fresh):
        print(f"{what:<6} {path.relative_to(root)}")
    return 0


@app.command()
def check(
    number: Number,
    ex: Annotated[
        str | None, typer.Argument(metavar="EX", help="Only this one: 03-2, or 2.")
    ] = None,
) -> int:
    """Check your answers in work/exercises; says what is wrong first."""
    from course_lib.grading import desk, report, run

    root = _course()
    number = desk.lesson_number(root, number)
    only = desk.exercise_id(root, number, ex).id if ex is not None else None
    result = run.grade(desk.own_file(root, number), root, only=only)
    _note_attempts(root, [result])
    print("\n".join(report.score_lines(result)))
    return 0 if result.ok else FAILED


@app.command()
def hint(number: Number, ex: ExerciseId) -> int:
    """The next rung of the hints to an exercise; there are three."""
    from course_lib.grading import desk

    root = _course()
    exercise = desk.exercise_id(root, desk.lesson_number(root, number), ex)
    rungs = desk.hint(root, exercise)
    for rung, text in enumerate(rungs, 1):
        print(f"hint {rung} of {len(exercise.hints)}: {text}")
    return 0


@app.command()
def solution(
    number: Number,
    ex: ExerciseId,
    yes: Annotated[bool, typer.Option("--yes", help="Without an attempt.")] = False,
) -> int:
    """The solution of an exercise, once you have tried it."""
    from course_lib.grading import desk

    root = _course()
    exercise = desk.exercise_id(root, desk.lesson_number(root, number), ex)
    print(desk.solution(root, exercise, yes))
    return 0


@app.command()
def grade(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Notebooks to grade.")],
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table as CSV.")] = False,
    as_junit: Annotated[bool, typer.Option("--junit", help="Print JUnit XML.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw the same parameters again.")] = None,
) -> int:
    """The official grade: your answers in a pristine notebook and a fresh kernel."""
    from course_lib.grading import report, run

    if as_json + as_csv + as_junit > 1:
        raise ValueError("give one of --json, --csv and --junit")
    root = _course()
    grades, bad = [], []
    for file in files:
        try:
            grades.append(run.grade(file, root, seed=seed))
        except ValueError as error:  # the other files are still graded
            bad.append(str(error))
    _note_attempts(root, grades)
    if as_json and grades:
        _print_json(report.as_json(grades, several=len(files) > 1))
    elif as_csv or as_junit:
        print((report.as_csv if as_csv else report.as_junit)(grades), end="")
    else:
        print("\n\n".join(map(report.as_text, grades)), end="\n" if grades else "")
    if bad:
        raise ValueError("; ".join(bad))
    return 0 if all(each.ok for each in grades) else FAILED


def _course() -> Path:
    """The folder of the course. Raises OSError when only the package is installed."""
    if not (ROOT / "notebooks").is_dir():
        raise OSError(
            "the lessons are not beside the installed package; clone the course and install it "
            "there with pip install -e ."
        )
    return ROOT


def _note_attempts(root: Path, grades: list[Grade]) -> None:
    """Grades of the learner's own files in work/ are attempts; those of others are not."""
    from course_lib.grading.progress import Progress, in_work

    own = [each for each in grades if in_work(Path(each.file), root)]
    if own:
        progress = Progress(root)
        for each in own:
            for ex, score in each.scores.items():
                progress.attempt(ex, score.passed, score.total)
        progress.save()


@bench.command("launch")
def bench_launch(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """How long it takes to start ranks: cold, warm and fresh, kept."""
    return _run_bench("launch", rounds, as_json)


@bench.command("dp")
def bench_dp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """A step of data parallelism beside torch's DDP."""
    return _run_bench("dp", rounds, as_json)


@bench.command("pp")
def bench_pp(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """GPipe and 1F1B beside torch's, and paced steps beside simulated ones."""
    return _run_bench("pp", rounds, as_json)


@bench.command("wire")
def bench_wire(rounds: Rounds = 20, as_json: AsJson = False) -> int:
    """Bytes that really moved over loopback beside the bytes of the formula."""
    return _run_bench("wire", rounds, as_json)


def _run_bench(name: str, rounds: int, as_json: bool) -> int:
    benchmark = import_module(f"course_lib.bench.{name}")
    result = benchmark.measure(rounds)
    if as_json:
        _print_json(result)
    else:
        print(benchmark.text(result))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run ``course`` with ``argv`` and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = app(arguments or ["--help"], prog_name="course", standalone_mode=False)
    except Exception as error:
        return _explain(error)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """One sentence for what the user can mend; a defect of ours keeps its traceback."""
    if hasattr(error, "format_message"):  # click's own errors; typer may carry a copy of click
        where = getattr(getattr(error, "ctx", None), "command_path", "course")
        return _fail(f"{error.format_message()}; {where} --help says what it takes", BAD_INPUT)
    if isinstance(error, typer.Abort):
        return _fail("Interrupted.", INTERRUPTED)
    if isinstance(error, ValueError):
        return _fail(str(error), BAD_INPUT)
    if isinstance(error, ImportError | OSError):
        return _fail(f"{error}; course doctor says what is missing here", ENVIRONMENT)
    if isinstance(error, _rank_error()):
        print(error, file=sys.stderr)  # the report of the launcher: who failed, where others stood
        return FAILED
    raise error


def _rank_error() -> type[Exception] | tuple[()]:
    """The launcher's error, without importing torch where no launch was made."""
    faults = sys.modules.get("course_lib.launch.faults")
    return faults.RankError if faults else ()


def _fail(message: str, code: int) -> int:
    """Print ``message`` as one sentence on stderr."""
    sentence = " ".join(message.split()).replace(". ", "; ").replace(".;", ";").rstrip(".")
    print(f"{sentence}.", file=sys.stderr)
    return code


def _make_folder(path: Path, option: str) -> None:
    """Make sure that ``path`` is a folder that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot make this folder ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"{option} {path}: this folder cannot be written to")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)  # honours NO_COLOR, and is plain where stdout is no terminal


def _coloured(text: str) -> Text:
    """The coordinates in the drawing in colours, so that groups show; the text is the same."""
    from rich.text import Text

    result = Text(text)
    for line in re.finditer(r"^ {6}(?:tp|cp|dp|pp)( .*)$", text, re.MULTILINE):
        for number in re.finditer(r"\d+", line[1]):
            colour = COLOURS[int(number[0]) % len(COLOURS)]
            result.stylize(colour, line.start(1) + number.start(), line.start(1) + number.end())
    return result


def _print_json(data: object) -> None:
    print(json.dumps(data))


if __name__ == "__main__":
    sys.exit(main())
