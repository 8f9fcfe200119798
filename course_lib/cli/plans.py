"""groups and schedule: what can be known before any rank starts."""

from __future__ import annotations

import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from course_lib.cli.app import AsJson, app
from course_lib.cli.show import console, print_json
from course_lib.cli.status import Status
from course_lib.layout import DEFAULT_ORDER

if TYPE_CHECKING:
    from rich.text import Text

    from course_lib.schedule import Costs, Schedule
    from course_lib.schedule.simulate import Factor
    from course_lib.view import Picture

COLOURS = ("default", "cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")
MOST_PAIRS = 2**18  # of `course schedule`: seconds and some hundred MB
MOST_PLANNED = {"zb-h1": 2**15, "zb-h2": 2**15, "zb-v": 2**15, "searched": 2**12}  # ten seconds
MOST_SCORED = 2**14  # ZB-V, with two stages a rank, is made beside it
MOST_RANKS = 2**20  # of `course groups`: more would fill the memory with lists

Size = Annotated[int, typer.Option(min=1, help="Ranks on this axis.")]


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
        print_json({"order": order, "world": layout.world, "sizes": sizes, **members})
    else:
        console().print(_coloured(drawing(layout, per_node)), soft_wrap=True)
    return 0


def _coloured(text: str) -> Text:
    """Return the drawing with colored coordinates, so that groups show; the text is the same."""
    from rich.text import Text

    result = Text(text)
    for line in re.finditer(r"^ {6}(?:tp|cp|dp|pp)( .*)$", text, re.MULTILINE):
        for number in re.finditer(r"\d+", line[1]):
            colour = COLOURS[int(number[0]) % len(COLOURS)]
            result.stylize(colour, line.start(1) + number.start(), line.start(1) + number.end())
    return result


@app.command()
def schedule(
    name: Annotated[str | None, typer.Argument(help="1f1b, say; a wrong one lists all.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pipeline ranks p; default: 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Default: 8.")] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Stages a rank holds; default: 1 or 2.")
    ] = None,
    f: Annotated[float, typer.Option("--f", help="Cost of a forward, on one stage.")] = 1.0,
    b: Annotated[float | None, typer.Option("--b", help="Of a backward; default: 2 F.")] = None,
    i: Annotated[float | None, typer.Option("--i", help="Of its half for the input.")] = None,
    w: Annotated[float | None, typer.Option("--w", help="Of its half for the weights.")] = None,
    comm: Annotated[float, typer.Option(help="Delay of a P2P transfer between ranks.")] = 0.0,
    stage_cost: Annotated[
        str | None, typer.Option(help="Factors of the stages' costs: 1,1,2,1; F:I:W as 1:1:2.")
    ] = None,
    speed: Annotated[
        str | None, typer.Option(help="Speeds of the ranks: 1,1,0.5,1; 0.5 takes twice as long.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most (stage, micro-batch) pairs a rank may keep.")
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Beside 1F1B, ZB-H1, ZB-V and a lower bound.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw the picture into this file.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A schedule of your own: CSV, one row per rank, cells such as 0F0."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Draw and simulate a pipeline schedule and its bubble.

    "searched" makes one for the given costs and --limit.
    """
    from course_lib.schedule import Costs, drawing, scored, simulate, validate
    from course_lib.schedule import score as score_of

    costs = Costs.make(f, b, i, w, comm, _factors(stage_cost))
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    with Status("making the schedule") as status:
        made, costs = _schedule(name, file, sizes, costs, _numbers("--speed", speed), limit)
        if limit is not None:
            validate(made, peak=[limit] * made.ranks)
        pairs = made.ranks * made.microbatches
        if score and pairs > MOST_SCORED:
            raise ValueError(
                f"--score with {made.ranks} ranks x {made.microbatches} micro-batches: the "
                f"schedules beside it are made for {MOST_SCORED:,} pairs at most; take fewer "
                "micro-batches"
            )
        status.say("simulating")
        simulation = simulate(made, costs)
        points = score_of(made, costs) if score else None
        if png is not None:
            status.say("drawing")
            _save_png(import_module("course_lib.view").schedule_picture(simulation), png)
    if as_json:
        print_json(simulation.as_dict() | ({"score": points} if points else {}))
        return 0
    width = max(60, shutil.get_terminal_size((80, 24)).columns)
    print(drawing(simulation, width))
    if points is not None:
        print(scored(made.name, points))
    if png is not None:
        print(f"The picture is in {png}.")
    return 0


def _numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """``1,0.5`` as numbers."""
    if text is None:
        return None
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"expected numbers separated by commas, got {option} {text}") from None


def _factors(text: str | None) -> tuple[Factor, ...] | None:
    """``1,1:1:2`` as factors of stages: a number, or three for F, I and W."""
    if text is None:
        return None
    found: list[Factor] = []
    for one in text.split(","):
        numbers = _numbers("--stage-cost", one.replace(":", ","))
        assert numbers is not None
        found.append(numbers[0] if len(numbers) == 1 else cast("Factor", numbers))
    return tuple(found)


def _schedule(
    name: str | None,
    file: Path | None,
    sizes: dict[str, int | None],
    costs: Costs,
    speeds: tuple[float, ...] | None,
    limit: int | None,
) -> tuple[Schedule, Costs]:
    """The schedule called ``name`` or the legal one in ``file``; costs with ``speeds`` in them."""
    from course_lib.schedule import SCHEDULES, check_sizes

    given = {key: size for key, size in sizes.items() if size is not None}
    check_sizes(**given)
    if (name is None) == (file is None):
        raise ValueError(
            f"give either the name of a schedule ({', '.join(SCHEDULES)}, searched) or --file with "
            "your own"
        )
    if file is not None:
        own = _schedule_in(file, given)
        return own, costs if speeds is None else costs.on_ranks(speeds, own.placement)
    assert name is not None
    return _named(name.lower(), given, costs, speeds, limit)


def _named(
    name: str,
    given: dict[str, int],
    costs: Costs,
    speeds: tuple[float, ...] | None,
    limit: int | None,
) -> tuple[Schedule, Costs]:
    """The schedule called ``name``, made for the costs given; never one too large to hold."""
    from course_lib.schedule import looped, make, placement, searched, v_shape
    from course_lib.schedule.named import CHUNKS

    p, m = given.get("stages", 4), given.get("microbatches", 8)
    chunks = given.get("chunks", CHUNKS.get(name, 1))
    most = MOST_PLANNED.get(name, MOST_PAIRS)
    if p * chunks * m > most:
        raise ValueError(
            f"{p} ranks x {chunks} chunks x {m} micro-batches are more than the {most:,} (stage, "
            f"micro-batch) pairs of {name} simulated here"
        )
    if name == "searched":
        where = v_shape(p) if chunks == 2 else looped(p, chunks)
    else:
        where = placement(name, p, chunks)
    if speeds is not None:
        costs = costs.on_ranks(speeds, where)
    if name == "searched":
        return searched(where, m, costs, limit), costs
    return make(name, p, m, chunks, costs), costs


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
