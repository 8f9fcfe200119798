"""The tour's rows of pipelines."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from course_lib import pp
from course_lib.mesh import make_mesh
from course_lib.model import parameter_sizes
from course_lib.recompute import ID_BYTES, saved_by_stage
from course_lib.schedule import Schedule, make
from course_lib.tour.technique import Job, Report, Technique, adam, adam_state_bytes
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, MICRO_BATCHES = 4, 4


def train_pipeline(job: Job, schedule: Schedule) -> Report:
    """Each rank holds a share of the layers and does its row of ``schedule``."""
    mesh = make_mesh(pp=schedule.ranks)
    stages = pp.make_stages(job.model(), schedule, mesh.pp.rank)
    optimizer = adam(pp.parameters(stages))
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        m = schedule.microbatches
        cut = list(zip(tokens.chunk(m), targets.chunk(m), strict=True))
        mesh.count_from_here()
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
    """Of the rank that keeps the most at the fullest moment of its row.

    A stage keeps what one process would of a micro-batch, from its F to the end of its B or I,
    and from I to W what :func:`pp.saved_for_wgrad` says. The first thing that I leaves to W, the
    gradient of the stage's output, is kept before anything is freed (of the last stage logits are
    freed first). The first stage keeps tokens too and the last one targets, those of the whole
    batch at once.
    """
    sequences = job.sequences // schedule.microbatches
    of_a_slice = (job.config, sequences, job.seq_len)
    kept = [saved_by_stage(*of_a_slice, *ends) for ends in slices(job, schedule)]
    halved = [pp.saved_for_wgrad(*of_a_slice, *ends) for ends in slices(job, schedule)]
    x_bytes = sequences * job.seq_len * job.config.hidden * job.width
    ids = ID_BYTES * job.sequences * job.seq_len
    ends = {0, schedule.stages - 1}

    def fullest(rank: int) -> int:
        whole: Counter[int] = Counter()  # micro-batches by stage, before B or I
        later: Counter[int] = Counter()  # and those that wait for W
        peak = 0
        for op, stage, _ in schedule.rows[rank]:
            whole[stage] += op == "F"
            now = sum(kept[at] * whole[at] + halved[at] * later[at] for at in list(whole))
            now += ids * sum(whole[at] > 0 for at in ends)
            peak = max(peak, now + x_bytes * (op == "I" and stage + 1 < schedule.stages))
            whole[stage] -= op in "BI"
            later[stage] += (op == "I") - (op == "W")
        return peak

    return max(map(fullest, range(schedule.ranks)))


def pipeline(name: str, lesson: str, sentence: str, ranks: int = RANKS) -> Technique:
    """A row on ``ranks`` ranks."""
    schedule = make(name, ranks, MICRO_BATCHES)
    return Technique(
        name=f"pp-{name}",
        lesson=lesson,
        sentence=sentence,
        mesh={"pp": ranks},
        train=lambda job: train_pipeline(job, schedule),
        formula=lambda job: pipeline_bytes(job, schedule),
        state_formula=lambda job: pipeline_state_bytes(job, schedule),
        peak_activation_formula=lambda job: pipeline_peak_bytes(job, schedule),
    )


PIPELINES = [
    pipeline(
        "gpipe",
        "07",
        "Every rank holds one layer in four; four micro-batches run forward through all, then "
        "backward, and ranks send only activations and their gradients.",
    ),
    pipeline(
        "1f1b",
        "07",
        "The same messages, but each backward runs as early as possible, so later ranks store "
        "fewer activations.",
    ),
    pipeline(
        "interleaved",
        "08",
        "Two ranks that hold every second layer each: a micro-batch passes both twice, over three "
        "stage boundaries instead of one, and ranks wait half as long.",
        ranks=2,
    ),
    pipeline(
        "zb-h1",
        "08",
        "A split backward: weight gradients, for which no rank waits, are computed where a rank "
        "would be idle.",
    ),
    pipeline(
        "zb-v",
        "08",
        "The same with two stages on each of two ranks in a V-shaped placement: the rank of the "
        "first stage has the last one too, and between those two nothing is sent.",
        ranks=2,
    ),
]
