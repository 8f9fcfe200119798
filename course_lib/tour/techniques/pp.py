"""The tour's rows of pipelines."""

from __future__ import annotations

from fractions import Fraction

from course_lib import pp
from course_lib.formulas.held import adam_state_bytes, peak_saved_bytes
from course_lib.mesh import make_mesh
from course_lib.model import parameter_sizes
from course_lib.recompute import ID_BYTES, saved_by_stage
from course_lib.schedule import Schedule, make
from course_lib.tour.technique import Job, Report, Technique, adam
from course_lib.trace.memory import SavedActivations, state_bytes

RANKS, MICRO_BATCHES = 4, 4


def train_pipeline(job: Job, schedule: Schedule) -> Report:
    """Train with the stages of each rank, which performs its row of ``schedule``."""
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
    """Return the bytes that all ranks together send in one step, by axis.

    At each stage boundary, activations are sent forward and gradients backward.
    """
    config = job.config
    activation_bytes = job.sequences * job.seq_len * config.hidden * job.width
    tied_bytes = config.vocab * config.hidden * job.width if config.tied else 0
    return {"pp": Fraction(pp.wire_bytes(schedule, activation_bytes, tied_bytes))}


def slices(job: Job, schedule: Schedule) -> list[tuple[int, int]]:
    """Return the first block of each stage, and the first block after it."""
    layers = pp.partition(job.config.layers, schedule.stages)
    return [(sum(layers[:stage]), sum(layers[: stage + 1])) for stage in range(len(layers))]


def pipeline_state_bytes(job: Job, schedule: Schedule) -> int:
    """Return the state bytes of the rank whose stages store the most."""
    config, layers = job.config, slices(job, schedule)

    def of_rank(rank: int) -> int:
        stages = schedule.stages_of(rank)
        sizes = [size for stage in stages for size in parameter_sizes(config, *layers[stage])]
        if config.tied and len(stages) > 1 and {0, schedule.stages - 1} <= set(stages):
            sizes.remove(
                config.vocab * config.hidden
            )  # the tied embedding and LM head are on one rank
        return adam_state_bytes(sizes, job.width)

    return max(map(of_rank, range(schedule.ranks)))


def pipeline_peak_bytes(job: Job, schedule: Schedule) -> int:
    """Return the peak bytes of saved activations, of the rank with the highest peak.

    From its F to the end of its B or I, a micro-batch saves as much on a stage as in one process.
    From the end of I to W it saves :func:`pp.saved_for_wgrad`. The first stage also saves tokens
    and the last stage targets, both of the whole batch.
    """
    sequences = job.sequences // schedule.microbatches
    of_a_slice = (job.config, sequences, job.seq_len)
    kept = [saved_by_stage(*of_a_slice, *layers) for layers in slices(job, schedule)]
    halved = [pp.saved_for_wgrad(*of_a_slice, *layers) for layers in slices(job, schedule)]
    ids = ID_BYTES * job.sequences * job.seq_len

    def fullest(rank: int) -> int:
        return peak_saved_bytes(
            schedule.rows[rank],
            lambda stage, mb: kept[stage],
            waiting=lambda stage: halved[stage],
            once={0: ids, schedule.stages - 1: ids},
        )

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
        "Each rank has a quarter of the layers. Four micro-batches go forward through all stages, "
        "then backward; only activations and their gradients are sent.",
    ),
    pipeline(
        "1f1b",
        "07",
        "The same messages, but each backward runs as early as possible, so that later ranks save "
        "fewer activations.",
    ),
    pipeline(
        "interleaved",
        "08",
        "Each of two ranks has every second layer. A micro-batch passes each rank twice and "
        "crosses three stage boundaries instead of one, and the ranks wait half as long.",
        ranks=2,
    ),
    pipeline(
        "zb-h1",
        "08",
        "Split backward: no rank waits for the weight gradients, so they are computed when a rank "
        "would be idle.",
    ),
    pipeline(
        "zb-v",
        "08",
        "The same with a V-shaped placement of two stages per rank: the first and the last stage "
        "are on one rank, and no message is sent at the bottom of the V.",
        ranks=2,
    ),
]
