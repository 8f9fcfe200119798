"""The planner beside the tour: equal bytes on each axis and equal bubbles for the small model.

The tour's own test runs every row on ranks and proves its formulas equal to the ledger and the
meters, so nothing is launched here. Memory is compared in test_planner_exact.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest

from course_lib import compose
from course_lib.formulas.moves import wire_of
from course_lib.model import ModelConfig
from course_lib.planner import Configuration, Model
from course_lib.planner.catalog import FP32, FP64, Dtype, Experts
from course_lib.planner.communication import stage_moves, step_moves
from course_lib.planner.configuration import stages_of
from course_lib.planner.estimate import rank_moves
from course_lib.planner.pipeline import StageSeconds, pipeline
from course_lib.schedule import Costs, make, simulate
from course_lib.tour.technique import JOB
from course_lib.tour.techniques import TECHNIQUES
from course_lib.tour.techniques.compose import FIVE, PLAN_5D
from course_lib.tour.techniques.ep import EXPERTS, TOP_K, exact

ROWS = {row.name: row for row in TECHNIQUES}
TWO_STEPS = replace(JOB, steps=2)  # the routes of the second step: the reference trains one
FLOAT32 = replace(Configuration(), dtype=FP32, seq=JOB.seq_len, global_batch=JOB.sequences)
SP = {"tp": 4, "sequence_parallel": True}


@dataclass(frozen=True)
class Toy:
    """A row of the tour as the planner's configuration."""

    plan: dict[str, Any] = field(default_factory=dict)
    experts: bool = False

    @property
    def configuration(self) -> Configuration:
        plan = replace(FLOAT32, **self.plan)
        rows = plan.global_batch // plan.dp
        return replace(
            plan,
            micro_batch=rows // self.plan.get("micro_batch", 1),
            dtype=FP64 if self.experts else FP32,
        )

    @property
    def model(self) -> Model:
        return toy(JOB.config, FP64 if self.experts else FP32, self.experts)


def toy(config: ModelConfig, dtype: Dtype, experts: bool = False) -> Model:
    """The tour's model, as the planner describes one."""
    return Model(
        name="toy",
        family=config.family,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        ffn=config.ffn,
        vocab=config.vocab,
        max_seq_len=config.max_seq_len,
        head_dim=config.head_dim,
        tied=config.tied,
        dtype=dtype,
        experts=Experts(EXPERTS, TOP_K, config.ffn) if experts else None,
    )


def in_parts(parts: int, **plan: Any) -> Toy:
    """A row whose replicas cut their rows into micro-batches."""
    return Toy({**plan, "micro_batch": parts})


TOYS = {
    "serial": Toy(),
    "dp-naive": Toy({"dp": 4}),
    "dp-accumulated": in_parts(2, dp=4),
    "zero-1": Toy({"dp": 4, "zero": 1}),
    "zero-2": in_parts(2, dp=4, zero=2),
    "zero-3": Toy({"dp": 4, "zero": 3}),
    "tp": Toy({"tp": 4}),
    "sp": Toy({**SP, "gather_again": False}),
    "sp-again": Toy(SP),
    "sp-recomputed": Toy({**SP, "gather_again": False, "recompute": "full"}),
    "cp-ring": Toy({"cp": 4}),
    "pp-gpipe": in_parts(4, pp=4, schedule="gpipe"),
    "pp-1f1b": in_parts(4, pp=4, schedule="1f1b"),
    "pp-interleaved": in_parts(4, pp=2, schedule="interleaved", chunks=2),
    "pp-zb-h1": in_parts(4, pp=4, schedule="zb-h1"),
    "pp-zb-v": in_parts(4, pp=2, schedule="zb-v", chunks=2),
    "ep-4": Toy({"dp": 4, "ep": 4}, experts=True),
    "ep-2": Toy({"dp": 4, "ep": 2}, experts=True),
    "3d": in_parts(4, tp=2, dp=2, pp=2, sequence_parallel=True, gather_again=False),
    "4d": in_parts(4, tp=2, cp=2, dp=2, pp=2, zero=1, sequence_parallel=True, gather_again=False),
    "5d": replace(
        in_parts(4, tp=2, cp=2, dp=2, pp=2, ep=2, sequence_parallel=True, gather_again=False),
        experts=True,
    ),
}


def sent(model: Model, plan: Configuration) -> dict[str, Fraction]:
    """Bytes that all ranks together send, by axis: each rank of pp stands for tp x cp x dp."""
    total: dict[str, Fraction] = {}
    of_stages = stage_moves(model, plan)
    for rank in range(plan.pp):
        own = [
            moves
            for (owner, _), moves in zip(stages_of(model, plan), of_stages, strict=True)
            if owner == rank
        ]
        for axis, moves in rank_moves(plan, own, step_moves(model, plan, rank)).items():
            total[axis] = total.get(axis, Fraction(0)) + wire_of(moves) * plan.world // plan.pp
    return {axis: one for axis, one in total.items() if one}


@pytest.mark.parametrize("name", [name for name, row in TOYS.items() if not row.experts])
def test_the_planner_sends_the_bytes_of_the_tour(name):
    row = TOYS[name]
    assert sent(row.model, row.configuration) == ROWS[name].formula(JOB)


@pytest.mark.parametrize("name", [name for name, row in TOYS.items() if row.experts])
def test_experts_of_even_routes_send_the_bytes_of_the_formula(name):
    row = TOYS[name]
    sizes = {"dp": 4, "ep": row.plan["ep"]} if name != "5d" else FIVE
    plan = PLAN_5D if name == "5d" else replace(compose.Plan(), experts=PLAN_5D.experts)
    even = compose.wire_bytes(
        exact(JOB).config, sizes, plan, JOB.sequences // sizes["dp"], JOB.seq_len
    )
    assert sent(row.model, row.configuration) == even
    of_run = ROWS[name].formula(TWO_STEPS)
    assert {axis: one for axis, one in even.items() if axis != "ep"} == {
        axis: one for axis, one in of_run.items() if axis != "ep"
    }


@pytest.mark.parametrize("name", [name for name in TOYS if name.startswith("pp-")])
def test_the_planner_waits_as_long_as_the_simulator(name):
    plan = TOYS[name].configuration
    schedule = make(plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
    whole = simulate(schedule, Costs())
    found = pipeline(
        plan.schedule,
        plan.pp,
        plan.micro_batches,
        [StageSeconds(1.0, 1.0, 1.0)] * schedule.stages,
        chunks=plan.chunks,
    )
    assert (found.of_total, found.of_ideal) == (whole.bubble_of_total, whole.bubble_of_ideal)
    assert (found.seconds, found.work) == (whole.makespan, whole.work)


def test_every_row_of_the_tour_is_planned_or_there_is_a_reason():
    """A new row must be added to TOYS, or here."""
    same_bytes = {"dp-bucketed", "dp-overlapped"}  # as dp-naive
    not_a_ring = {"cp-gather", "cp-ulysses", "cp-ulysses-ring"}  # the planner's CP is a ring
    references = {name for name, row in ROWS.items() if row.name.startswith("serial-")}
    inference = {name for name, row in ROWS.items() if row.lesson == "13"}  # planned by --serve
    assert set(TOYS) | same_bytes | not_a_ring | references | inference == set(ROWS)
