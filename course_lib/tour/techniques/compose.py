"""The tour's rows of composition: one model on three, four and five axes at once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from course_lib import compose, ep, sp
from course_lib.compose import Experts, Plan
from course_lib.formulas.held import (
    COUNT_BYTES,
    COUNTER_BYTES,
    peak_saved_bytes,
    sharded_state_bytes,
)
from course_lib.mesh import make_mesh
from course_lib.model import parameter_sizes
from course_lib.recompute import saved_outside_blocks
from course_lib.tour.technique import Job, Report, Technique, adam
from course_lib.tour.techniques.compose_reference import (
    EXPERTS_REFERENCE,
    MICRO_BATCHES,
    REFERENCE,
    Place,
    every_load,
    every_place,
    load_at,
    pairs_leaving,
)
from course_lib.tour.techniques.ep import COEFFICIENT, EXPERTS, TOP_K, exact, experts_model
from course_lib.tour.techniques.pp import slices
from course_lib.tp import formulas
from course_lib.trace.memory import SavedActivations

Sizes = dict[str, Any]  # size by axis
THREE = {"tp": 2, "dp": 2, "pp": 2}
FOUR = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
FIVE = {**FOUR, "ep": 2}
PLAN_3D = Plan(region=sp.REGION, micro_batches=MICRO_BATCHES)
PLAN_4D = Plan(region=sp.REGION, zero=1, micro_batches=MICRO_BATCHES)
PLAN_5D = Plan(
    region=sp.REGION,
    micro_batches=MICRO_BATCHES,
    experts=Experts(EXPERTS, TOP_K, coefficient=COEFFICIENT),
)


def train_composed(job: Job, sizes: Sizes, plan: Plan) -> Report:
    """Parallelize the model with one call, and train it with another."""
    mesh = make_mesh(**sizes)
    model = experts_model(job) if plan.experts else job.model()
    trainer = compose.parallelize(model, mesh, plan, adam)
    losses = []
    for step in range(job.steps):
        tokens, targets = job.rows(step, mesh.dp)
        mesh.count_from_here()
        with SavedActivations(*trainer.stages.values()) as saved:
            losses.append(float(trainer.step(tokens, targets).loss))
    return Report(losses, trainer.state_bytes, saved.peak)


# --- formulas ------------------------------------------------------------------------------------


def sent(job: Job, sizes: Sizes, plan: Plan) -> dict[str, Fraction]:
    """Return the bytes that all ranks together send in one step, by axis."""
    leaving = sum(map(pairs_leaving, every_load(job))) if plan.experts else None
    if plan.experts:
        job = exact(job)
    rows = job.sequences // sizes["dp"]
    return compose.wire_bytes(job.config, sizes, plan, rows, job.seq_len, leaving=leaving)


def state(job: Job, sizes: Sizes, plan: Plan) -> int:
    """Return the state bytes of the rank whose stage stores the most.

    With ZeRO, a part is one flat parameter; else each of its tensors has a counter in Adam.
    """
    job = exact(job) if plan.experts else job
    n = sizes.get("cp", 1) * sizes["dp"]
    found = [0] * sizes["pp"]
    for part in compose.part_sizes(job.config, sizes, plan):
        held = sum(part.elements)
        if plan.zero:
            found[part.stage] += sharded_state_bytes(plan.zero, [held], n, job.config.dtype)
        else:
            found[part.stage] += 4 * held * job.width
    if not plan.zero:
        for stage, tensors in enumerate(tensors_of_stages(job, sizes, plan)):
            found[stage] += COUNTER_BYTES * tensors
    return max(found)


def tensors_of_stages(job: Job, sizes: Sizes, plan: Plan) -> list[int]:
    """Return the number of tensors per stage. An expert has as many as an MLP, a router has one."""
    mlp = 3 if job.config.family == "llama" else 4
    more = 1 + (plan.experts.number // sizes["ep"] - 1) * mlp if plan.experts else 0
    stages = slices(job, plan.schedule_for(sizes["pp"]))
    return [len(parameter_sizes(job.config, *at)) + (at[1] - at[0]) * more for at in stages]


def peak(job: Job, sizes: Sizes, plan: Plan) -> int:
    """Return the peak bytes of saved activations, of the rank with the highest peak.

    A stage saves the activations of a micro-batch from its F to the end of its B: of its blocks as
    in sequence parallelism, and of the embedding or the LM head. Ring attention saves as much as
    one process with shorter sequences. With experts, the bytes depend on the micro-batch and on
    the tokens of the rank.
    """
    schedule = plan.schedule_for(sizes["pp"])
    job = exact(job) if plan.experts else job
    layers = [range(*at) for at in slices(job, schedule)]
    outside = saved_outside_blocks_by_stage(job, sizes)
    block = saved_by_block(job, sizes, plan)

    def fullest(rank: int, place: Place) -> int:
        def whole(stage: int, mb: int) -> int:
            saved = outside.get(stage, 0) + len(layers[stage]) * block
            if plan.experts:
                saved += sum(saved_by_experts(job, sizes, at, mb, place) for at in layers[stage])
            return saved

        most = peak_saved_bytes(schedule.rows[rank], whole)
        return most + COUNT_BYTES * (rank + 1 == schedule.ranks)

    places = every_place() if plan.experts else [(0, 0, 0)]
    return max(fullest(rank, place) for rank in range(schedule.ranks) for place in places)


def micro_shape(job: Job, sizes: Sizes) -> tuple[int, int]:
    """Return the sequences per micro-batch and the positions per rank of cp."""
    return job.sequences // sizes["dp"] // MICRO_BATCHES, job.seq_len // sizes.get("cp", 1)


def saved_outside_blocks_by_stage(job: Job, sizes: Sizes) -> dict[int, int]:
    """Return the saved bytes of embedding and LM head per micro-batch, by stage."""
    sequences, rows = micro_shape(job, sizes)
    tokens, t = sequences * rows, sizes["tp"]
    both = sp.saved_outside_blocks(job.config, sequences, rows, t)
    both += formulas.saved_by_vocabulary(job.config, tokens, t)
    positions = saved_outside_blocks(job.config, sequences, rows).positions // t
    first = formulas.saved_by_embedding(tokens) + positions
    return {0: first, sizes["pp"] - 1: both - first}


def saved_by_block(job: Job, sizes: Sizes, plan: Plan) -> int:
    """Return the saved bytes per block and micro-batch, without those of the experts."""
    sequences, rows = micro_shape(job, sizes)
    kept = sp.saved_per_block(job.config, sequences, rows, sizes["tp"])
    if plan.experts is None:
        return kept
    tokens, inner = sequences * rows, (4 if job.config.family == "llama" else 2) * job.config.ffn
    return kept - tokens * (job.config.hidden + inner // sizes["tp"]) * job.width


def saved_by_experts(job: Job, sizes: Sizes, layer: int, mb: int, place: Place) -> int:
    """Return the saved bytes of a layer's router and experts."""
    d, c, t = place
    sequences, rows = micro_shape(job, sizes)
    tokens = sequences * rows // sizes["tp"]
    load = load_at(job, mb, layer, d, t)
    return ep.saved_per_layer(job.config, tokens, load, c, TOP_K)


def composed(
    name: str, sentence: str, sizes: Sizes, plan: Plan, reference: str = "serial"
) -> Technique:
    """Return a row of lesson 12."""
    return Technique(
        name=name,
        lesson="12",
        sentence=sentence,
        mesh=sizes,
        train=lambda job: train_composed(job, sizes, plan),
        formula=lambda job: sent(job, sizes, plan),
        state_formula=lambda job: state(job, sizes, plan),
        peak_activation_formula=lambda job: peak(job, sizes, plan),
        reference=reference,
    )


COMPOSED = [
    composed(
        "3d",
        "On eight ranks, each rank stores half of every matrix in half of the layers, and trains "
        "on half of the batch in four micro-batches. Most bytes are sent between the two ranks of "
        "tp.",
        THREE,
        PLAN_3D,
    ),
    composed(
        "4d",
        "On sixteen ranks, each rank also has half of every sequence, and the optimizer state is "
        "sharded over the four ranks with different data.",
        FOUR,
        PLAN_4D,
    ),
    EXPERTS_REFERENCE,
    composed(
        "5d",
        "On the same sixteen ranks, the two ranks of cp share 8 experts per layer. Tokens are sent "
        "between them, gradients of experts between the two ranks of dp.",
        FIVE,
        PLAN_5D,
        REFERENCE,
    ),
]
