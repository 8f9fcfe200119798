"""The planner's memory of the toy model equals the tour's formulas, which its run holds to meters.

``tests/ranks/test_tour.py`` runs the rows and fails when a meter differs from a formula by a byte.
"""

from dataclasses import replace

import pytest

from course_lib.planner.catalog import DTYPES, Experts, Model
from course_lib.planner.configuration import Configuration
from course_lib.planner.exact import exact_memory
from course_lib.tour.technique import JOB
from course_lib.tour.techniques import TECHNIQUES
from course_lib.tour.techniques import ep as ep_rows
from course_lib.tour.techniques.compose_reference import every_place, load_at
from course_lib.tour.techniques.zero import BUCKET_BYTES

SIZES = "family layers hidden heads kv_heads ffn vocab max_seq_len head_dim tied dropout"
TOY = Model(name="toy", **{name: getattr(JOB.config, name) for name in SIZES.split()})
ROUTED = replace(TOY, experts=Experts(ep_rows.EXPERTS, ep_rows.TOP_K, TOY.ffn))
ROWS = {row.name: row for row in TECHNIQUES}
BY_ROWS = {"sequence_parallel": True, "gather_again": False}
PLANS = {
    "serial": {},
    "dp-naive": {"dp": 4, "micro_batch": 2},
    "dp-bucketed": {"dp": 4, "micro_batch": 2},
    "dp-overlapped": {"dp": 4, "micro_batch": 2},
    "dp-accumulated": {"dp": 4, "micro_batch": 1},
    "zero-1": {"dp": 4, "zero": 1, "micro_batch": 2},
    "zero-2": {"dp": 4, "zero": 2, "micro_batch": 1},
    "zero-3": {"dp": 4, "zero": 3, "micro_batch": 2},
    "tp": {"tp": 4},
    "sp": {"tp": 4, **BY_ROWS},
    "sp-again": {"tp": 4, "sequence_parallel": True},
    "sp-recomputed": {"tp": 4, "recompute": "full", **BY_ROWS},
    "pp-gpipe": {"pp": 4, "schedule": "gpipe", "micro_batch": 2},
    "pp-1f1b": {"pp": 4, "micro_batch": 2},
    "pp-interleaved": {"pp": 2, "schedule": "interleaved", "chunks": 2, "micro_batch": 2},
    "pp-zb-h1": {"pp": 4, "schedule": "zb-h1", "micro_batch": 2},
    "pp-zb-v": {"pp": 2, "schedule": "zb-v", "chunks": 2, "micro_batch": 2},
    "cp-ring": {"cp": 4},
    "ep-4": {"dp": 4, "ep": 4, "micro_batch": 2},
    "ep-2": {"dp": 4, "ep": 2, "micro_batch": 2},
    "3d": {"tp": 2, "dp": 2, "pp": 2, "micro_batch": 1, **BY_ROWS},
    "4d": {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "zero": 1, "micro_batch": 1, **BY_ROWS},
    "5d": {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2, "micro_batch": 1, **BY_ROWS},
}
# A configuration cannot say which attention cp has; decoding trains nothing.
WITHOUT = {"cp-gather", "cp-ulysses", "cp-ulysses-ring", "serial-decode", "inference"}
WITHOUT |= {"serial-moe", "serial-moe-4"}  # a loop over experts, which no rank runs


def test_every_row_is_planned():
    assert PLANS.keys() | WITHOUT == ROWS.keys()


def loads(name: str, ep: int) -> list[dict]:
    """The load of the experts as each rank of a stage sees it, for rows with experts."""
    if name == "5d":
        return [
            {"load": lambda layer, mb, d=d, t=t: load_at(JOB, mb, layer, d, t), "ep_rank": c}
            for d, c, t in every_place()
        ]
    if name not in ("ep-4", "ep-2"):
        return [{}]
    return [
        {
            "load": lambda layer, mb, at=rank // ep * ep: ep_rows.loads(JOB, ep, at)[layer],
            "ep_rank": rank % ep,
        }
        for rank in range(ep_rows.RANKS)
    ]


@pytest.mark.parametrize("name", PLANS)
def test_memory_of_the_tour_to_the_byte(name):
    routed = name in ("ep-4", "ep-2", "5d")
    base = Configuration(
        global_batch=JOB.sequences,
        micro_batch=JOB.sequences,
        seq=JOB.seq_len,
        dtype=DTYPES["fp64" if routed else "fp32"],
    )
    plan = replace(base, **PLANS[name])
    more = {"bucket_bytes": BUCKET_BYTES} if name in ("zero-1", "zero-2") else {}
    found = [
        exact_memory(ROUTED if routed else TOY, plan, stage, **more, **load)
        for stage in range(plan.pp)
        for load in loads(name, plan.ep)
    ]
    states = max(held.weights + held.gradients + held.optimizer for held in found)
    assert states == ROWS[name].state_formula(JOB)
    activations = max(held.activations for held in found)
    assert activations == ROWS[name].peak_activation_formula(JOB)
