"""The schedule arena: rows that somebody wrote, judged, run on real ranks, and remembered.

A level says where the stages live, what an action costs and how much a rank may keep. ``play``
refuses rows with a reason for every illegal move; legal ones are simulated, scored and run on
ranks, whose gradients must be those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from course_lib import comm, pp
from course_lib.data import batch
from course_lib.grading.progress import in_work
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import Decoder, build_model, loss_sum, tiny_config
from course_lib.schedule import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    looped,
    lower_bound,
    make,
    makespan,
    score,
    scored,
    searched,
    simulate,
    v_shape,
    write_csv,
)
from course_lib.schedule.data import as_rows
from course_lib.schedule.simulate import Simulation
from course_lib.schedule.validate import reasons

SEQ = 16
CLOSE = 1e-5  # float32 sums in another order; a mistake is far larger
HALF = Costs(0.5, 0.5, 0.5)  # two stages a rank, the same model
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Level:
    """What to schedule. ``limit`` is the most pairs of stage and micro-batch in flight."""

    number: int
    title: str
    task: str
    placement: tuple[int, ...]
    microbatches: int
    limit: int
    costs: Costs
    reference: Callable[[], Schedule]

    @property
    def ranks(self) -> int:
        """How many rows are wanted."""
        return max(self.placement) + 1

    @cached_property
    def par(self) -> float:
        """The makespan of the reference, which keeps to the limit."""
        return simulate(self.reference(), self.costs).makespan

    @property
    def bound(self) -> float:
        """No order takes less, whatever its memory."""
        return lower_bound(self.placement, self.microbatches, self.costs)

    def __str__(self) -> str:
        """The level as a learner needs it."""
        homes = ", ".join(f"{stage} on rank {home}" for stage, home in enumerate(self.placement))
        return (
            f"Level {self.number}, {self.title}: {self.task}\n"
            f"  stages: {homes}; {self.microbatches} micro-batches; at most {self.limit} in flight "
            f"on a rank\n  par {self.par:g}, bound {self.bound:g}"
        )


def _search(placement: tuple[int, ...], m: int, costs: Costs, limit: int) -> Callable[[], Schedule]:
    return lambda: searched(placement, m, costs, limit)


SLOW = Costs().on_ranks((1, 1, 0.5, 1), looped(4))
FAR = Costs(comm=0.5)
LEVELS = (
    Level(1, "two ranks", "whole backwards will do, and four micro-batches.",
          looped(2), 4, 4, Costs(), lambda: make("1f1b", 2, 4)),
    Level(2, "no memory to waste", "the same with two in flight; now split B into I and W.",
          looped(2), 4, 2, Costs(), lambda: make("zb-h1", 2, 4)),
    Level(3, "four ranks", "the memory of 1F1B's first rank, on all of them.",
          looped(4), 8, 4, Costs(), lambda: make("zb-h1", 4, 8)),
    Level(4, "the V", "two half stages a rank, there and back, in the memory of 1F1B.",
          v_shape(4), 8, 8, HALF, lambda: make("zb-v", 4, 8)),
    Level(5, "three quarters of it", "the same V with six half stages in flight.",
          v_shape(4), 8, 6, HALF, _search(v_shape(4), 8, HALF, 6)),
    Level(6, "few micro-batches", "the V with four of them.",
          v_shape(4), 4, 8, HALF, _search(v_shape(4), 4, HALF, 8)),
    Level(7, "a slow rank", "rank 2 takes twice as long for everything.",
          looped(4), 8, 4, SLOW, _search(looped(4), 8, SLOW, 4)),
    Level(8, "slow messages", "a hop takes half a forward; eight may be in flight.",
          looped(4), 8, 8, FAR, _search(looped(4), 8, FAR, 8)),
)  # fmt: skip


def level(number: int) -> Level:
    """The level of that number. Raises ValueError that says which there are."""
    for one in LEVELS:
        if one.number == number:
            return one
    raise ValueError(f"there is no level {number!r}; the levels are 1 to {len(LEVELS)}")


@dataclass(frozen=True)
class Attempt:
    """What became of somebody's rows. ``reasons`` is empty where they are legal."""

    level: Level
    name: str
    reasons: list[str]
    simulation: Simulation | None = None
    points: dict[str, Any] | None = None
    off: float | None = None  # largest difference of a gradient from one process
    measured: float | None = None  # makespan on paced ranks, in the unit of the costs

    @property
    def ok(self) -> bool:
        """Whether it counts: legal, run, and gradients right."""
        return self.off is not None and self.off < CLOSE

    @property
    def stars(self) -> int:
        """0 not legal; 1 legal; 2 no longer than 1F1B; 3 par; 4 shorter than par."""
        if not self.ok or self.points is None:
            return 0
        took, par = self.points["makespan"], self.level.par
        if took < par - 1e-9:
            return 4
        beside = self.points["beside"]["1f1b"]["makespan"]
        return 3 if took <= par + 1e-9 else 2 if took <= beside + 1e-9 else 1

    def __str__(self) -> str:
        """The reasons, or the score and what the ranks said."""
        if self.reasons:
            count = f"{len(self.reasons)} illegal move{'s' * (len(self.reasons) != 1)}"
            return "\n".join([f"{count}:", *(f"  {reason}" for reason in self.reasons)])
        assert self.points is not None
        lines = [scored(self.name, self.points)]
        if self.off is not None:
            said = "equal one process" if self.ok else "are WRONG"
            lines.append(f"On {self.level.ranks} ranks: gradients {said} (off by {self.off:.0e}).")
        if self.measured is not None:
            lines.append(
                f"Paced: {self.measured:.2f} measured, {self.points['makespan']:.2f} simulated."
            )
        lines.append(f"Par {self.level.par:g}: {'*' * self.stars or 'no star yet'}")
        return "\n".join(lines)


def read(which: Level, text: str) -> tuple[Schedule | None, list[str]]:
    """The rows of ``text``, one line a rank, and everything that is wrong with them."""
    lines = [line.replace(",", " ").split() for line in text.strip().splitlines()]
    lines = [line for line in lines if line]
    problems: list[str] = []
    rows: list[list[Action]] = []
    for rank, cells in enumerate(lines):
        rows.append([])
        for place, cell in enumerate(cells):
            try:
                rows[-1].append(Action.parse(cell))
            except ScheduleError as error:
                problems.append(f"rank {rank}, cell {place}: {error}")
    if len(rows) != which.ranks:
        problems.append(f"there are {len(rows)} rows; {which.ranks} ranks have one each")
    if problems:
        return None, problems
    schedule = Schedule("yours", as_rows(rows), which.placement)
    if schedule.microbatches != which.microbatches:
        problems.append(
            f"the last micro-batch is {schedule.microbatches - 1}; the level has "
            f"{which.microbatches}, numbered from 0"
        )
    problems += reasons(schedule, peak=[which.limit] * which.ranks)
    return (None if problems else schedule), problems


def play(
    number: int,
    rows: str,
    name: str = "you",
    *,
    on_ranks: bool = True,
    unit: float = 0.0,
    board: Path | None = None,
) -> Attempt:
    """Judge ``rows`` in a level. ``unit`` seconds for a cost of 1 paces the ranks; 0 does not.

    An attempt that counts is written to ``board``; left out, to the learner's own in work/, and
    nowhere when the notebook lies elsewhere.
    """
    which = level(number)
    schedule, problems = read(which, rows)
    if schedule is None:
        return Attempt(which, name, problems)
    attempt = Attempt(
        which, name, [], simulate(schedule, which.costs), score(schedule, which.costs)
    )
    if on_ranks:
        off, measured = _on_ranks(schedule, which.costs, unit)
        attempt = replace(attempt, off=off, measured=measured)
    board = _own_board() if board is None else board
    if attempt.ok and board is not None:
        _note(attempt, board)
    return attempt


# --- on ranks -------------------------------------------------------------------------------


def _model(stages: int) -> Decoder:
    return build_model(tiny_config(layers=stages, max_seq_len=SEQ), seed=0)


def _share(targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, some: loss_sum(y, some)[0] / targets.numel()


def one_step(schedule: Schedule) -> dict[str, Tensor]:
    """Runs in a rank: its gradients by name. The first of two steps warms up."""
    mesh, m = make_mesh(pp=schedule.ranks), schedule.microbatches
    tokens, targets = batch(0, seed=0, batch_size=m, seq_len=SEQ)
    cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
    model = _model(schedule.stages)
    stages = pp.cut(model, schedule, mesh.pp.rank)
    for _ in range(2):
        for p in pp.parameters(stages):
            p.grad = None
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.run(schedule, stages, mesh, cut, _share(targets))
    mine = {id(p) for p in pp.parameters(stages)}
    return {
        name: p.grad for name, p in model.named_parameters() if id(p) in mine and p.grad is not None
    }


def _serial(schedule: Schedule) -> dict[str, Tensor]:
    model = _model(schedule.stages)
    tokens, targets = batch(0, seed=0, batch_size=schedule.microbatches, seq_len=SEQ)
    _share(targets)(model(tokens), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _on_ranks(schedule: Schedule, costs: Costs, unit: float) -> tuple[float, float | None]:
    """The largest difference of a gradient from one process; the paced makespan, if paced."""
    pace = None
    if unit:
        in_seconds = replace(costs, f=costs.f * unit, i=costs.i * unit, w=costs.w * unit)
        pace = pp.pace_of(in_seconds, schedule)
    results = run(one_step, schedule, n=schedule.ranks, pace=pace)
    got = {name: gradient for rank in results for name, gradient in rank.items()}
    right = _serial(schedule)
    if got.keys() != right.keys():
        return float("inf"), None
    off = max(float(torch.max(torch.abs(got[name] - right[name]))) for name in right)
    return off, makespan(pp.measured_rows(results.traces)) / unit if unit else None


# --- the leaderboard ------------------------------------------------------------------------


def _own_board() -> Path | None:
    here = Path.cwd() / "notebook"
    return ROOT / "work" / ".course" / "arena.json" if in_work(here, ROOT) else None


def _entries(board: Path) -> list[dict[str, Any]]:
    """What is written; a file that cannot be read is put aside."""
    if not board.exists():
        return []
    try:
        return list(json.loads(board.read_text(encoding="utf-8"))["attempts"])
    except (ValueError, KeyError, TypeError):
        board.replace(board.with_suffix(".unreadable.json"))
        return []


def _note(attempt: Attempt, board: Path) -> None:
    assert attempt.points is not None
    assert attempt.simulation is not None
    entry = {
        "level": attempt.level.number,
        "name": attempt.name,
        "makespan": attempt.points["makespan"],
        "span": attempt.points["span"],
        "peak": attempt.points["peak"],
        "rows": write_csv(attempt.simulation.schedule),
    }
    entries = _entries(board)
    if entry not in entries:
        board.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"attempts": [*entries, entry]}, indent=1)
        board.write_text(text, encoding="utf-8")


def leaderboard(number: int, board: Path | None = None) -> str:
    """The best of each name in a level, shortest first, then by span, then by memory."""
    which = level(number)
    board = _own_board() if board is None else board
    found = [] if board is None else [e for e in _entries(board) if e["level"] == number]
    best: dict[str, tuple[float, float, float]] = {}
    for e in found:
        key = (e["makespan"], e["span"], e["peak"])
        best[e["name"]] = min(key, best.get(e["name"], key))
    best["(par)"] = _key(score(which.reference(), which.costs))
    lines = [f"Level {number}, {which.title}:   makespan     span   in flight"]
    for name, (took, span, peak) in sorted(best.items(), key=lambda pair: pair[1]):
        lines.append(f"  {name[:24]:<26}{took:>9.2f}{span:>9.2f}{peak:>12.2f}")
    return "\n".join([*lines, f"  (bound){which.bound:>28.2f}"])


def _key(points: dict[str, Any]) -> tuple[float, float, float]:
    return points["makespan"], points["span"], points["peak"]
