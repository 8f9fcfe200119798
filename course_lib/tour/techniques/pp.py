"""The tour's rows of pipelines."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from course_lib import pp
from course_lib.mesh import make_mesh
from course_lib.model import parameter_sizes
from course_lib.recompute import ID_BYTES, kept_by_stage
from course_lib.schedule import Schedule, make
from course_lib.tour.technique import Job, Report, Technique, adam, adam_state_bytes
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, MICRO_BATCHES = 4, 4


def train_pipeline(job: Job, schedule: Schedule) -> Report:
    """Each rank holds a share of the layers and does its row of ``schedule``."""
    mesh = make_mesh(pp=schedule.ranks)
    stages = pp.cut(job.model(), schedule, mesh.pp.rank)
    optimizer = adam(pp.parameters(stages))
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        m = schedule.microbatches
        cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
        mesh.ledger.clear()
        with SavedActivations(*stages.values()) as saved:
            loss = pp.train_step(schedule, stages, mesh, cut, optimizer)
        losses.append(float(loss))
    return Report(losses, state_bytes(stages.values(), optimizer), saved.peak)


def pipeline_bytes(job: Job, schedule: Schedule) -> dict[str, Fraction]:
    """All ranks together, one step: activations there, gradients back, over every boundary."""
    config = job.config
    activation_bytes = job.sequences * job.seq_len * config.hidden * job.width
    tied_bytes = config.vocab * config.hidden * job.width if config.tied else 0
    return {"pp": Fraction(pp.wire_bytes(schedule, activation_bytes, tied_bytes))}


def slices(job: Job, schedule: Schedule) -> list[tuple[int, int]]:
    """First block of each stage, and the first after it."""
    layers = pp.partition(job.config.layers, schedule.stages)
    return [(sum(layers[:stage]), sum(layers[: stage + 1])) for stage in range(len(layers))]


def pipeline_state_bytes(job: Job, schedule: Schedule) -> int:
    """Of the rank whose stages hold the most."""
    config, ends = job.config, slices(job, schedule)

    def of_rank(rank: int) -> int:
        stages = schedule.stages_of(rank)
        sizes = [size for stage in stages for size in parameter_sizes(config, *ends[stage])]
        if config.tied and len(stages) > 1 and {0, schedule.stages - 1} <= set(stages):
            sizes.remove(config.vocab * config.hidden)  # both ends on one rank share the table
        return adam_state_bytes(sizes, job.width)

    return max(map(of_rank, range(schedule.ranks)))


def pipeline_peak_bytes(job: Job, schedule: Schedule) -> int:
    """Of the rank that keeps the most at the fullest moment of its row of F and B.

    A stage keeps what one process would of a micro-batch, from its F to the end of its B. The
    first stage keeps tokens too and the last one targets, those of the whole batch at once.
    """
    sequences = job.sequences // schedule.microbatches
    kept = [
        kept_by_stage(job.config, sequences, job.seq_len, *ends) for ends in slices(job, schedule)
    ]
    ids = ID_BYTES * job.sequences * job.seq_len
    ends = {0, schedule.stages - 1}

    def fullest(rank: int) -> int:
        in_flight: Counter[int] = Counter()  # micro-batches by stage
        peak = 0
        for action in schedule.rows[rank]:
            in_flight[action.stage] += action.op == "F"
            now = sum(kept[stage] * count for stage, count in in_flight.items())
            peak = max(peak, now + ids * sum(in_flight[stage] > 0 for stage in ends))
            in_flight[action.stage] -= action.op == "B"
        return peak

    return max(map(fullest, range(schedule.ranks)))


def pipeline(name: str, sentence: str) -> Technique:
    """A row of lesson 07, on four ranks."""
    schedule = make(name, RANKS, MICRO_BATCHES)
    return Technique(
        name=f"pp-{name}",
        lesson="07",
        sentence=sentence,
        mesh={"pp": RANKS},
        train=lambda job: train_pipeline(job, schedule),
        formula=lambda job: pipeline_bytes(job, schedule),
        state_formula=lambda job: pipeline_state_bytes(job, schedule),
        peak_activation_formula=lambda job: pipeline_peak_bytes(job, schedule),
    )


PIPELINES = [
    pipeline(
        "gpipe",
        "Every rank holds one layer in four; four micro-batches go forward through all, then "
        "back, and only activations travel.",
    ),
    pipeline(
        "1f1b",
        "The same messages, but each backward comes as early as it can, so that later ranks keep "
        "fewer activations.",
    ),
]
