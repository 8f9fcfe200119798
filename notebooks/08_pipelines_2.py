# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
#   course:
#     lesson: '08'
# ---

# %% [markdown]
# # 08 Pipelines II: interleaved, zero bubble, DualPipe-V
#
# *45 minutes to read and run, 65 to build.* On four ranks, a 1F1B step of eight micro-batches takes 33 units of time,
# and each rank works for 24 of them. The only remedy in lesson 07 was more micro-batches. In this lesson we
# save 7.5 of the 9 idle units with the same batch. You need lesson 07.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *Interleaving with v chunks per rank divides the bubble by v and costs nothing.*
# 2. *With a zero-bubble schedule no rank ever waits.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## A bet: how short can the step be?
# This is the step to beat, with F = 1 and B = 2:

# %%
import torch

from course_lib import comm, pp
from course_lib.data import batch
from course_lib.launch import run
from course_lib.mesh import Conditions, make_mesh
from course_lib.model import build_model, loss_sum, tiny_config
from course_lib.schedule import (
    Costs,
    bubble,
    from_rows,
    looped,
    lower_bound,
    make,
    makespan,
    predicted_bubble,
    searched,
    simulate,
    v_shape,
)
from course_lib.trace import SavedActivations, overshoot, state_bytes
from course_lib.view import schedule_picture, show_source, timeline

P, M, SEQ = 4, 8, 32
CONFIG = tiny_config(layers=8, max_seq_len=SEQ)
TOKENS, TARGETS = batch(0, seed=0, batch_size=M, seq_len=SEQ)
MICRO_BATCHES = list(zip(TOKENS.chunk(M), TARGETS.chunk(M), strict=True))
NAMES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
schedules = {name: make(name, P, M) for name in NAMES}


def costs_of(schedule, unit=1.0, **more):
    """F = I = W = ``unit`` for all stages of a rank together, whatever their number."""
    per_stage = unit / (schedule.stages // schedule.ranks)
    return Costs(per_stage, per_stage, per_stage, **more)


simulated = {name: simulate(each, costs_of(each)) for name, each in schedules.items()}
schedule_picture(simulated["1f1b"], title="1F1B: every rank waits for 9 of 33 units")

# %% [markdown]
# Every rank waits for (p-1)(F+B) = 9 units.
#
# | symbol | meaning |
# |---|---|
# | p, m | ranks, and micro-batches in a step |
# | v | stages per rank, called chunks |
# | F, B | forward and backward of a micro-batch on a rank, or their times |
# | I, W | input gradient and weight gradient, the two parts of B |
#
# All schedules run the same model, so a stage of half the size costs half. Messages take no time at first.

# %%
predicted_interleaved = None  # the step with two stages of half the size on each rank
predicted_sends = None  # how many times as many messages it sends
predicted_zb_h1 = None  # the step when other ranks wait for the input gradient only
predicted_saved = None  # fraction of a block's saved activations that are stored until W
predicted_best = None  # the shortest step that any order can reach, one stage per rank

# %% [markdown]
# ## Interleaved: thinner stages
# Give each rank v thin stages. With v = 2, rank 0 has the stages 0 and 4, rank 1 has 1 and 5, and so on. A thin stage
# takes half the time, so the next rank starts sooner, and the first gradient comes back sooner:

# %%
schedule_picture(
    simulated["interleaved"], title="Interleaved: thin stages start sooner; 28.5 instead of 33"
)

# %% [markdown]
# Micro-batches run in rounds of p: four pass the first stages, then the same four pass the second stages, in paler
# boxes. A rank still waits for p-1 forwards and backwards, but these are 1/v as long:
#
# $$\text{bubble} = (p-1)\,\frac{F+B}{v}, \qquad \text{of ideal} = \frac{p-1}{mv}, \qquad \text{of total} = \frac{p-1}{mv+p-1}$$
#
# The price is memory and messages. Rank 0 stores up to 11 thin forwards, as much as 5.5 full ones, where 1F1B stores 4.
# Activations cross pv-1 stage boundaries instead of p-1:

# %%
print(f"{'chunks':>6}{'step':>7}{'bubble: of total':>18}{'formula':>9}{'of ideal':>10}", end="")
print(f"{'in flight, micro-batches':>26}{'boundaries':>12}")
for chunks in (1, 2, 4):
    schedule = make("interleaved", P, M, chunks)
    found = simulate(schedule, costs_of(schedule))
    formula = predicted_bubble("interleaved", P, M, chunks)
    print(f"{chunks:6}{found.makespan:7.2f}{found.bubble_of_total:18.1%}{formula:9.1%}", end="")
    print(f"{found.bubble_of_ideal:10.1%}{max(schedule.peak_in_flight()) / chunks:26.2f}", end="")
    print(f"{pp.stage_boundaries(schedule):12}")
    assert abs(formula - found.bubble_of_total) < 1e-9
print(f"your predictions: step {predicted_interleaved}, messages {predicted_sends} times as many")

# %% [markdown]
# ## A backward in two operations: I and W
# The backward of a linear layer, y = x · weightᵀ, receives dy and computes two products of the same size:
#
# - **I**, the input gradient (dgrad): dx = dy · weight. The previous stage waits for it.
# - **W**, the weight gradient (wgrad): dweight = dyᵀ · x. Only the optimizer needs it.
#
# So a rank can send dx as soon as I is done, and run W later. (In the Zero Bubble paper, our I is called B.)
#
# `pp.DeferredWeightGradients` does this without a change to the model. Inside its `with` block, it intercepts each
# product with a weight. Autograd sees the weight as a constant, so backward computes I alone. `run` computes W later,
# from the saved x and dy of each linear. Here is one block:

# %%
whole, block = (build_model(CONFIG, seed=0).stage(2, 3) for _ in range(2))
generator = torch.Generator().manual_seed(0)
x, dy = (torch.randn(1, SEQ, CONFIG.hidden, generator=generator) for _ in range(2))
whole(x).backward(dy)  # the full backward, for comparison

later = pp.DeferredWeightGradients(pp.weights_of(block))
x.requires_grad_()
with SavedActivations(block) as saved:
    with later:
        y = block(x)  # F
    before = saved.now
    with later:
        y.backward(dy)  # I
    del y
    between = saved.now
    waiting = [name.split(".")[-2] for name, p in block.named_parameters() if p.grad is None]
    later.run()  # W
    after = saved.now

print("no gradient before W:", *waiting)  # the names of linears
formula = pp.saved_for_wgrad(CONFIG, 1, SEQ, 2, 3)
print(
    f"bytes after forward {before:,}; between I and W {between:,}, formula {formula:,}; after W {after}"
)
print(f"fraction {between / before:.2f}; your prediction {predicted_saved}")
assert between == formula
assert after == 0
pairs = zip(whole.parameters(), block.parameters(), strict=True)
assert all(torch.equal(one.grad, other.grad) for one, other in pairs)

# %% [markdown]
# The norms have their gradients after I, and only the linears wait for W. But their x and dy take three quarters of
# what forward had saved, so a deferred W costs memory. We therefore count a micro-batch as *in flight* from its F to
# its W.
#
# Does the previous rank now start sooner? In the folded cell, two ranks run one micro-batch, with 30 ms for each F,
# I and W:

# %% jupyter={"source_hidden": true}
# One micro-batch on two ranks, with a full and with a split backward.
from contextlib import nullcontext

PACE = {"F": 0.03, "B": 0.06, "I": 0.03, "W": 0.03}


def two_stages(split):
    mesh = make_mesh(pp=2)
    rank, stage = mesh.pp.rank, build_model(CONFIG, seed=0).stage(*((0, 4), (4, 8))[mesh.pp.rank])
    like = torch.zeros(1, SEQ, CONFIG.hidden)
    stage(TOKENS[:1] if rank == 0 else like)  # warms up
    comm.barrier(mesh.pp)
    mesh.trace.clear()
    later = pp.DeferredWeightGradients(pp.weights_of(stage)) if split else nullcontext()
    x = TOKENS[:1] if rank == 0 else comm.recv(like, mesh.pp, source=0).requires_grad_()
    with mesh.compute("F", stage=rank, mb=0), later:
        y = stage(x)
        if rank == 1:
            y = loss_sum(y, TARGETS[:1])[0] / SEQ
    if rank == 0:
        comm.send(y, mesh.pp, to=1)
    dy = comm.recv(like, mesh.pp, source=1) if rank == 0 else None
    with mesh.compute("I" if split else "B", stage=rank, mb=0), later:
        y.backward(dy)
    if rank == 1:
        comm.send(x.grad, mesh.pp, to=0)
    if split:
        with mesh.compute("W", stage=rank, mb=0):
            later.run()
    return torch.cat([p.grad.flatten() for p in stage.parameters()])


full, separate = (run(two_stages, split, n=2, pace=PACE) for split in (False, True))
for name, results in (("full B", full), ("I, then W", separate)):
    rows = pp.measured_rows(results.traces)
    back = next(span.start for span in rows[0] if span.op in "BI")
    print(f"{name:10} rank 0 goes on after {1e3 * back:4.0f} ms, all done after", end="")
    print(f"{1e3 * makespan(rows):5.0f} ms")
assert all(torch.equal(a, b) for a, b in zip(full, separate, strict=True))
print("gradients equal to the last bit")
timeline(separate.traces, conditions=Conditions(PACE), title="Rank 1 sends dx before it computes W")

# %% [markdown]
# W of rank 1 runs beside I of rank 0, so the step is one W shorter.
#
# ## ZB-H1 and ZB-H2: W fills the gaps
# When should a rank run its Ws? ZB-H1 keeps 1F1B's order of F and I. A W runs in
# two cases: where the rank would otherwise wait, and before a forward pass that would bring more than p micro-batches
# in flight. The remaining Ws run at the end, where 1F1B waits:

# %%
schedule_picture(simulated["zb-h1"], title="ZB-H1: W fills the gap at the end; 27 instead of 33")

# %% [markdown]
# The gap at the start remains, because no rank has a W to run before its first I. ZB-H2 fills it with forwards of later
# micro-batches:

# %%
schedule_picture(
    simulated["zb-h2"], title="ZB-H2: no rank waits between its first action and its last"
)

# %%
print(f"{'':12}{'step':>6}{'of total':>10}{'longest rank':>14}{'waits in it':>13}   in flight")
for name in ("1f1b", "zb-h1", "zb-h2"):
    found = simulated[name]
    waits = 1 - found.work / found.span
    print(f"{name:12}{found.makespan:6.1f}{found.bubble_of_total:10.1%}{found.span:14.1f}", end="")
    print(f"{waits:13.1%}   {schedules[name].peak_in_flight()}")
    if name != "1f1b":
        assert abs(predicted_bubble(name, P, M) - waits) < 1e-9
least = lower_bound(looped(P), M, Costs())
print(
    f"\nno order of one stage per rank takes less than {least:.0f}; your prediction {predicted_best}"
)
print(f"your prediction for ZB-H1: {predicted_zb_h1}")

# %% [markdown]
# ZB-H2 stores 7 micro-batches per rank instead of 4, yet its step is no shorter. Both schedules reach the bound: rank 3
# cannot start before (p-1)F, and then it works for m(F+I+W). What ZB-H2 shortens is the **span** (*longest rank*), the
# time from a rank's own first action to its own last one. Its picture is a parallelogram.
#
# ## The optimizer's barrier decides
# Is a shorter span worth anything? If each rank updates its own weights and starts the next batch, the parallelograms
# of two steps fit together. If all ranks must meet first, for example to compute a gradient norm for clipping, they do
# not fit. We simulate five steps in a row:


# %%
def in_a_row(schedule, steps):
    """The rows of several steps, one after the other, on other micro-batches."""
    m = schedule.microbatches
    rows = [
        [f"{a.stage}{a.op}{a.mb + m * step}" for step in range(steps) for a in row]
        for row in schedule.rows
    ]
    return from_rows(rows, schedule.name)


STEPS = 5
print(f"{'a step takes':12}{'with a barrier':>16}{'without':>9}{'work':>6}")
for name, schedule in schedules.items():
    costs, one = costs_of(schedule), simulated[name]
    many = simulate(in_a_row(schedule, STEPS), costs).makespan
    print(f"{name:12}{one.makespan:16.2f}{(many - one.makespan) / (STEPS - 1):9.2f}{one.work:6.0f}")

# %% [markdown]
# "Zero bubble" refers to the column *without*: without a barrier, a step of ZB-H2 or ZB-V takes 24 units, and the ranks
# compute in all of them. The
# authors do remove the barrier. Each rank updates its weights at once and, in the rare case that the step had to be
# clipped, undoes the update later.
#
# ## A V-shaped placement: ZB-V and DualPipe-V
# ZB-V has the short span of ZB-H2, but no rank stores more micro-batches than rank 0 under 1F1B. Each rank has two thin
# stages again, but the second ones are placed in reverse order, so rank 0 has the first stage and the last one. A
# micro-batch ends where it began, and its backward starts there without a message. Every rank has an early stage, whose
# activations are stored for a long time, and a late one, whose activations are freed soon. So all ranks have equally
# many micro-batches in flight.

# %%
schedule_picture(simulated["zb-v"], title="ZB-V: no rank waits within its span, with 1F1B's memory")

# %% [markdown]
# Follow micro-batch 0 from rank 0 to rank 3 in yellow boxes and back in paler ones. On rank 0, its pale I follows at
# once.
#
# DeepSeek's DualPipe feeds micro-batches in from both ends, so every rank has two stages, and all parameters are stored
# twice. DualPipe-V is one half of DualPipe, folded into the same V, and stores them once. In its steady state it pairs
# a forward with a *full* backward, so that the messages of one hide behind the computation of the other.

# %%
schedule_picture(
    simulated["dualpipe-v"],
    title="DualPipe-V: forwards and full backwards in pairs, with some gaps",
)

# %% [markdown]
# ## All schedules: memory against bubble
# The solid lines show the best schedule that a search found within each memory. No order can beat the dotted bounds.

# %% jupyter={"source_hidden": true}
# Memory and bubble of each schedule, of the best that a search finds, and the bounds.
from course_lib.view.trade import trade_plot


def point(schedule):
    """(micro-batches in flight, bubble of total time): of all stages of the fullest rank."""
    chunks = schedule.stages // schedule.ranks
    found = simulate(schedule, costs_of(schedule))
    return max(schedule.peak_in_flight()) / chunks, found.bubble_of_total


def floor(placement):
    chunks = len(placement) // P
    costs = Costs(1 / chunks, 1 / chunks, 1 / chunks)
    return 1 - 3 * M / lower_bound(placement, M, costs)


points = {name: point(make(name, P, M)) for name in ("gpipe", *NAMES)}
lines = {
    "best found, one stage per rank": [point(searched(looped(P), M, limit=k)) for k in range(2, 9)],
    "best found, two in a V": [point(searched(v_shape(P), M, limit=k)) for k in range(4, 17, 2)],
}
floors = {"bound, one stage": floor(looped(P)), "bound, V": floor(v_shape(P))}
aside, high = point(make("naive", P, M))
trade_plot(
    points,
    lines,
    floors,
    title=f"p = {P}, m = {M}: ZB-V has the least bubble at 1F1B's memory",
    note=f"Naive is off the picture: {aside:.0f} in flight, {high:.0%}.",
)

# %% [markdown]
# ZB-H2 needs more memory than ZB-H1 and is no lower, because this picture counts total time, with a barrier.
#
# ## Six schedules on four ranks
# Do real ranks behave like the simulation? If a row contains W, the engine of lesson 07 runs F and I inside
# `DeferredWeightGradients`. W itself is one more action:

# %%
from course_lib.pp.engine import Engine

show_source(Engine._weights, pp.DeferredWeightGradients.run)

# %% [markdown]
# The folded cell runs all schedules. On each rank, F, I and W take 30 ms each:

# %% jupyter={"source_hidden": true}
# Run the six schedules, paced, and compare with the simulation and with one process. About 12 seconds.
UNIT = 0.030


def scaled_loss(logits, targets):
    return loss_sum(logits, targets)[0] / TARGETS.numel()


def named(model, stages):
    mine = set(pp.parameters(stages))
    return {name: p for name, p in model.named_parameters() if p in mine}


def paced_step(schedule):
    mesh = make_mesh(pp=P)
    model = build_model(CONFIG, seed=0)
    stages = pp.make_stages(model, schedule, mesh.pp.rank)
    optimizer = torch.optim.AdamW(pp.parameters(stages))
    pp.run(schedule, stages, mesh, MICRO_BATCHES, scaled_loss)  # warms up
    optimizer.zero_grad()
    comm.barrier(mesh.pp)
    mesh.trace.clear()
    mesh.ledger.clear()
    with SavedActivations(*stages.values(), [TOKENS, TARGETS]) as saved:
        outcome = pp.run(schedule, stages, mesh, MICRO_BATCHES, scaled_loss)
    gradients = {name: p.grad.clone() for name, p in named(model, stages).items()}
    optimizer.step()
    return {
        "gradients": gradients,
        "in flight": outcome.peak_in_flight,
        "activations": saved.peak,
        "state": state_bytes(stages.values(), optimizer).total,
    }


def paced(schedule, costs):
    return run(paced_step, schedule, n=P, pace=pp.pace_of(costs, schedule))


runs = {name: paced(each, costs_of(each, UNIT)) for name, each in schedules.items()}
model = build_model(CONFIG, seed=0)
scaled_loss(model(TOKENS), TARGETS).backward()
reference = {name: p.grad for name, p in model.named_parameters()}
measured = {name: pp.measured_rows(results.traces) for name, results in runs.items()}

print(
    f"{'':12}{'step in ms':^20}{'bubble of total':^20}{'in':>7}{'bytes sent':>12}{'gradients':>11}"
)
print(f"{'':12}{'simulated':>10}{'measured':>10}{'simulated':>10}{'measured':>10}", end="")
print(f"{'flight':>7}{'':12}{'off by':>11}")
activation = TOKENS.numel() * CONFIG.hidden * 4
for name, results in runs.items():
    schedule, found = schedules[name], simulated[name]
    off = max(
        (gradient - reference[key]).abs().max().item()
        for rank in results
        for key, gradient in rank["gradients"].items()
    )
    sent = sum(each.wire_bytes("pp") for each in results.ledgers)
    print(
        f"{name:12}{1e3 * UNIT * found.makespan:10.0f}{1e3 * makespan(measured[name]):10.0f}",
        end="",
    )
    print(f"{found.bubble_of_total:10.3f}{bubble(measured[name])[0]:10.3f}", end="")
    print(f"{max(rank['in flight'] for rank in results):7}{int(sent):12,}{off:11.1e}")
    assert off < 1e-5
    assert sent == pp.wire_bytes(schedule, activation)
    assert [rank["in flight"] for rank in results] == schedule.peak_in_flight()
late = max(overshoot(results.traces) for results in runs.values())
print(f"sleeps took up to {late:.1%} longer than asked on this machine")

# %% [markdown]
# All six compute the gradients of one process, up to rounding. With two stages per rank, two in flight are as large as
# one micro-batch. The measured steps are longer than the simulated ones, because each message takes a millisecond or
# two and sleeps end late. Here is ZB-V as it ran:

# %%
timeline(
    pp.stage_traces(runs["zb-v"].traces),
    overlay=simulate(schedules["zb-v"], costs_of(schedules["zb-v"], UNIT)).spans,
    title="ZB-V on four ranks: measured, and simulated above it",
)

# %% [markdown]
# **The table that grows.** For the fullest rank, in one step. In the V, rank 0 stores both the embedding and the LM
# head:

# %%
print(
    f"{'fullest rank':14}{'state':>11}{'activations':>13}{'bytes sent':>12}{'bubble of total':>17}"
)
for name, results in runs.items():
    sent = max(int(each.wire_bytes()) for each in results.ledgers)
    state, saved = (max(rank[key] for rank in results) for key in ("state", "activations"))
    print(f"{name:14}{state:11,}{saved:13,}{sent:12,}{bubble(measured[name])[0]:17.1%}")

# %% [markdown]
# ## The same in PyTorch
# Several stages per rank are a list of `PipelineStage`s. `ScheduleZBVZeroBubble` expects the V-shaped placement:

# %%
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as in_torch

KINDS = {
    "interleaved": in_torch.ScheduleInterleaved1F1B,
    "zb-v": in_torch.ScheduleZBVZeroBubble,
}


def mean_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_pytorch(name):
    dist.init_process_group("gloo")
    model, schedule = build_model(CONFIG, seed=0), make(name, P, M)
    modules = pp.make_stages(model, schedule, dist.get_rank())  # number of the stage -> its module
    pipeline_stages = [
        PipelineStage(module, stage, schedule.stages, torch.device("cpu"))
        for stage, module in modules.items()
    ]
    first, last = 0 in modules, schedule.stages - 1 in modules
    KINDS[name](pipeline_stages, n_microbatches=M, loss_fn=mean_loss).step(
        *([TOKENS] if first else []), target=TARGETS if last else None
    )
    gradients = {key: p.grad for key, p in named(model, modules).items()}
    dist.destroy_process_group()
    return gradients


for name in KINDS:
    theirs = run(in_pytorch, name, n=P, init=False)
    apart = max(
        (gradient - ours["gradients"][key]).abs().max().item()
        for their, ours in zip(theirs, runs[name], strict=True)
        for key, gradient in their.items()
    )
    print(f"{name:12} gradients of torch's and ours differ by {apart:.1e} at most")
    assert apart < 1e-5

# %% [markdown]
# ## Break it and diagnose
# Five runs of ZB-H1, with 20 ms per action. One is `"correct"`. In the others one rank has a fault:
#
# - **lost W**: it loses the W of one micro-batch
# - **W twice**: it runs one W twice
# - **whole B**: it sends dx only after W is done
# - **delays all W**: it runs all Ws at the end
#
# Name cause and rank of each run, such as `("lost W", 2)` or `("correct", None)`. *Gradient* is g·s / s·s for a rank's
# gradient g and the gradient s of one process; it is 1 where they agree. *First* is the start of a rank's first
# backward.

# %%
SEED = 1

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.grading.lab import Lab

FAULTS = {
    "correct": (None,),
    "lost W": (range(P),),
    "W twice": (range(P),),
    "whole B": (range(1, P),),
    "delays all W": (range(P),),
}
lab = Lab("08", SEED, FAULTS, fields=("cause", "rank"))


def rows_of(lab_run):
    rows = [[str(action) for action in row] for row in schedules["zb-h1"].rows]
    if lab_run.has("whole B"):
        row = rows[lab_run.rank]
        rows[lab_run.rank] = [cell.replace("I", "B") for cell in row if "W" not in cell]
    if lab_run.has("delays all W"):
        rows[lab_run.rank].sort(key=lambda cell: "W" in cell)  # stable: the rest stays in order
    return from_rows(rows, "zb-h1, perhaps")


def examined(lab_run, schedule):
    weights, marked, rank = Engine._weights, lab_run.pick(range(M)), make_mesh(pp=P).pp.rank

    def faulty_weights(engine, stage, mb, given):
        if mb == marked and lab_run.has("lost W"):
            engine.deferred.pop((stage, mb))
            return
        mine = pp.parameters(engine.stages)
        before = [0 if p.grad is None else p.grad.clone() for p in mine]
        weights(engine, stage, mb, given)
        if mb == marked:
            for p, old in zip(mine, before, strict=True):
                p.grad += p.grad - old

    if lab_run.has("lost W", rank) or lab_run.has("W twice", rank):
        Engine._weights = faulty_weights
    try:
        return paced_step(schedule)
    finally:
        Engine._weights = weights


def beside_reference(gradients):
    inner = {
        key: ((g * reference[key]).sum(), reference[key].square().sum())
        for key, g in gradients.items()
    }
    return (sum(gs for gs, _ in inner.values()) / sum(ss for _, ss in inner.values())).item()


print(f"{'':3}{'step':>8}   {'gradient, by rank':27}{'first, ms by rank':24}in flight")
for lab_run in lab:
    schedule = rows_of(lab_run)
    pace = pp.pace_of(costs_of(schedule, 0.020), schedule)
    results = run(examined, lab_run, schedule, n=P, pace=pace)
    rows = pp.measured_rows(results.traces)
    ratios = [beside_reference(rank["gradients"]) for rank in results]
    first = [next(span.start for span in row if span.op in "BI") for row in rows]
    print(f"{lab_run.letter:3}{1e3 * makespan(rows):5.0f} ms  ", end="")
    print("".join(f"{x:6.3f}" for x in ratios) + "   ", end="")
    print("".join(f"{1e3 * x:5.0f}" for x in first), end="    ")
    print([rank["in flight"] for rank in results])

# %%
diagnosis = {
    "A": (None, None),
    "B": (None, None),
    "C": (None, None),
    "D": (None, None),
    "E": (None, None),
}
lab.grade(diagnosis)

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **lost W** and **W twice**: one rank's gradient is below or above 1. The others are right, because that rank still
#   sends dx.
# - **whole B**: all gradients are right, but the step is longer. From the last rank to rank 0, the first backwards
#   start one I (20 ms) apart, but I and W (40 ms) apart from a faulty rank to the next. That rank stores less, because
#   it defers no W.
# - **delays all W**: the faulty rank stores all eight micro-batches.
# </details>

# %% [markdown]
# ## When not to use it, and both claims settled
# - **Many micro-batches.** With m much larger than p, the bubble of 1F1B is small already.
# - **Little W.** With frozen weights or LoRA, W is too short to fill gaps.
# - **Unequal stages.** No order makes up for a rank with more work than the others. Move layers instead.
# - **Slow messages.** In this table, a transfer takes up to half of F:

# %%
print(f"{'P2P takes':12}" + "".join(f"{name:>13}" for name in NAMES))
for transfer in (0, 0.1, 0.25, 0.5):
    steps = []
    for name in NAMES:
        costs = costs_of(schedules[name], comm=transfer)
        steps.append(simulate(make(name, P, M, costs=costs), costs).makespan)
    print(f"{transfer:<12}" + "".join(f"{step:13.2f}" for step in steps))

# %% [markdown]
# In the last line, only ZB-H2 loses little (1.5 units), because its additional forwards fill the time of the transfers.
#
# **Claim 1: false.** The bubble is divided by v if p divides m. But rank 0 stores 1 + (p-1)/(pv) times as much as under
# 1F1B, and messages cross pv-1 stage boundaries instead of p-1.

# %%
more = max(schedules["interleaved"].peak_in_flight()) / 2 / max(schedules["1f1b"].peak_in_flight())
print(
    f"in flight {more:.3f} times; 1 + (p-1)/(pv) = {1 + (P - 1) / (2 * P):.3f}; your vote: {vote_1}"
)

# %% [markdown]
# **Claim 2: only if** W is long enough to fill the gaps, messages take no time, memory is large enough, and ranks need
# not meet at the optimizer. For a model of 1.5B parameters, Qi et al. measured a W of half of F (table 9):

# %%
times = Costs(f=18.522, i=18.086, w=9.337, comm=0.601)  # ms
for name in ("1f1b", "zb-h1", "zb-h2"):
    found = simulate(make(name, 8, 24), times)
    print(f"{name:6} bubble {found.bubble_of_total:.1%} of total")
print(f"your vote: {vote_2}")

# %% [markdown]
# Table 5 of the paper has the same three values.
#
# **Cheat-sheet.** For F = I = W; *of total* is with a barrier, *of span* without:


# %%
def cheat_sheet(p, m):
    print(f"p = {p} ranks, m = {m} micro-batches")
    print(
        f"{'':12}{'step':>7}{'of total':>10}{'of span':>9}{'in flight':>11}{'boundaries':>12}",
        end="",
    )
    print("   waits in its span")
    words = {
        "gpipe": "(p-1)(F+I+W)",
        "1f1b": "(p-1)(F+I+W)",
        "interleaved": "(p-1)(F+I+W)/v",
        "zb-h1": "(p-1)(F+I-W)",
        "zb-h2": "(p-1)(F+I-2W), not below 0",
        "zb-v": "0 at F = I = W",
        "dualpipe-v": "(p-1)F/2 at F = I = W",
    }
    for name, formula in words.items():
        schedule = make(name, p, m)
        found = simulate(schedule, costs_of(schedule))
        chunks = schedule.stages // p
        in_flight = max(schedule.peak_in_flight()) / chunks
        print(f"{name:12}{found.makespan:7.1f}{found.bubble_of_total:10.1%}", end="")
        print(f"{1 - found.work / found.span:9.1%}{in_flight:11.1f}", end="")
        print(f"{pp.stage_boundaries(schedule):12}   {formula}")


cheat_sheet(p=4, m=8)
print()
cheat_sheet(p=8, m=32)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/08_pipelines_2.ipynb) take 65 minutes. Then beat these schedules in [the
# arena](08b_schedule_arena.ipynb).

# %% course={"role": "given"}
import torch
import torch.distributed as dist

# %% [markdown] course={"ex": "08-1"}
# ## 08-1 Where W goes, by hand
# Fifteen minutes, on paper; no code. ZB-H1 on p = 3 ranks with m = 4 micro-batches, stage r on rank r. F, I and W take
# 1 each, and messages take no time. The order of F and I is that of 1F1B:
#
# ```
# rank 0   0F0 0F1 0F2 0I0 0F3 0I1 0I2 0I3
# rank 1   1F0 1F1 1I0 1F2 1I1 1F3 1I2 1I3
# rank 2   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3
# ```
#
# Insert the Ws, oldest first. A rank runs a W where it would otherwise wait for its next F or I. It also runs one
# before an F that would be its fourth micro-batch in flight (from F to W). The remaining Ws run at the end. Every
# action starts as early as it can.
#
# - `row 0`, `row 1`, `row 2`: the rows, twelve cells each
# - `start of 0I0`: when rank 0 begins its first I
# - `step`: when the last action ends
# - `in flight at most, by rank`: three numbers
# - `bubble of total`: the fraction of the step in which a rank waits, such as `2/9`
# - `step of 1F1B`: the step of 1F1B with the same p and m, where a full backward takes 2
# - `W at once`: the step if every rank runs each W right after its I

# %% course={"ex": "08-1", "role": "answer"}
# BEGIN SOLUTION
filled = {
    "row 0": "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
    "row 1": "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
    "row 2": "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    "start of 0I0": 5,
    "step": 14,
    "in flight at most, by rank": [3, 3, 3],
    "bubble of total": 1 / 7,
    "step of 1F1B": 18,
    "W at once": 16,
}
# STUB
# filled = {
#     "row 0": None,  # what rank 0 does, as a text of twelve cells
#     "row 1": None,
#     "row 2": None,
#     "start of 0I0": None,
#     "step": None,
#     "in flight at most, by rank": None,  # three numbers
#     "bubble of total": None,
#     "step of 1F1B": None,
#     "W at once": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "08-1", "role": "answer"}
# Every rank waits for two units before its first I. Compare the rows: on rank r, W of micro-batch k comes after I of
# micro-batch k + r. With W at once the first I still comes early, but no W is left to fill the gaps: m(F+I+W) +
# (p-1)(F+I).

# %% course={"ex": "08-1", "role": "check"}
from course_lib.grading import check

check("08-1", filled)

# %% [markdown] course={"ex": "08-2"}
# ## 08-2 The warm-up of interleaving
# Interleaved 1F1B on p ranks with v chunks each: how many forwards does a rank run before it begins to alternate one
# forward and one backward? Micro-batches run in rounds of p (m is a multiple of p). A round passes all chunks before
# the next one begins, in backward too.
#
# - Every rank first runs all chunks but the last for the first round.
# - Each rank further from the end needs *two* more forwards, one for the way to the last rank and one for the way back.
#   In 1F1B it needs one more.
# - A rank has no more than m v forwards.
#
# Write the one line, for v of 2 or more. An example: with p = 4, v = 2 and m = 8, rank 3 begins to alternate after four
# forwards.


# %% course={"ex": "08-2", "role": "answer"}
def warm_up(p: int, v: int, m: int, rank: int) -> int:
    """Forwards of ``rank`` before it alternates; m is a multiple of p."""
    # BEGIN SOLUTION
    return min((v - 1) * p + 2 * (p - 1 - rank), m * v)
    # END SOLUTION


# %% course={"ex": "08-2", "role": "check"}
from course_lib.grading import check

check("08-2", warm_up)

# %% [markdown] course={"ex": "08-3"}
# ## 08-3 A linear's split backward
# y = x · weightᵀ + bias, as in `F.linear(x, weight, bias)`. Write its backward, which computes the gradient of x at
# once, and the gradients of weight and bias on request. Return `(dx, later)`, where `later()` computes and returns
# `(dweight, dbias)`. A second `later()` returns the same values or raises an error.
#
# x may be (T, D) or (B, S, D); dy has the same dims with F features at the end; weight is (F, D). The gradients of
# weight and bias sum over all positions, and have the dtype of the inputs. x and dy must not change, and no autograd
# is needed.


# %% course={"ex": "08-3", "role": "answer"}
def split_backward(x, weight, dy):
    """(dx, later): dx has the shape of ``x``; ``later()`` gives (dweight (F, D), dbias (F,))."""
    # BEGIN SOLUTION
    dx = dy @ weight

    def later():
        x_TD, dy_TF = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy_TF.T @ x_TD, dy_TF.sum(0)

    return dx, later
    # END SOLUTION


# %% course={"ex": "08-3", "role": "check"}
from course_lib.grading import check

check("08-3", split_backward)

# %% [markdown] course={"ex": "08-4"}
# ## 08-4 The rows of ZB-H1
# Write the schedule for any p and any m of at least p, stage r on rank r. A row is a list of cells such as `"0F3"`,
# `"0I3"`, `"0W3"`.
#
# Your rows are judged by their simulation at F = I = W: `validate` finds them legal, every backward is split, the
# step is as short as possible, and no rank has more than p in flight, from F to W. You choose the order.
#
# You need no simulation: the rows of exercise 08-1 show a rule that uses only ranks and micro-batches.


# %% course={"ex": "08-4", "role": "answer"}
def rows_of_zb_h1(p: int, m: int) -> list[list[str]]:
    """One list for each of ``p`` ranks, with ``3 * m`` cells such as "0F3", "0I3", "0W3"."""
    # BEGIN SOLUTION
    rows = []
    for rank in range(p):
        row = [f"{rank}F{mb}" for mb in range(p - rank)]
        for mb in range(m):
            row.append(f"{rank}I{mb}")
            if mb >= rank:
                row.append(f"{rank}W{mb - rank}")
            if mb + p - rank < m:
                row.append(f"{rank}F{mb + p - rank}")
        rows.append(row + [f"{rank}W{mb}" for mb in range(m - rank, m)])
    return rows
    # END SOLUTION


# %% course={"ex": "08-4", "role": "check"}
from course_lib.grading import check

check("08-4", rows_of_zb_h1)

# %% [markdown] course={"ex": "08-5"}
# ## 08-5 Send early, in raw PyTorch
# Write the backward of one micro-batch on one rank, with torch and `torch.distributed` alone. The default group exists.
# Rank r holds stage r and has run its forward.
#
# 1. Receive the gradient of y.
# 2. Send the gradient of x *before* you compute the gradient of any weight or bias.
# 3. Add the gradients of the parameters to their `.grad`.
#
# The function is called for several micro-batches, one after the other.
#
# `torch.autograd.grad(y, inputs, dy)` computes the gradients of `inputs` alone and returns them.
# `retain_graph=True` keeps the graph for a second call.
#
# The check runs on one to four ranks. It compares the gradients of all weights and biases, expects one message per
# micro-batch with the right peer and bytes, and expects no gradient of a weight or bias before the message is sent.


# %% course={"ex": "08-5", "role": "answer"}
def backward_in_halves(x, y, parameters, dy):
    """Leaves the gradients in ``parameters``; returns nothing.

    x           this stage's input; requires a gradient, except on rank 0
    y           its output, with its graph
    parameters  the stage's weights, a list; p.grad is None before the first micro-batch
    dy          the gradient of y on the last rank; None on the others, which receive it from
                rank + 1: a tensor of the shape of y
    """
    # BEGIN SOLUTION
    rank, leaving = dist.get_rank(), None
    if dy is None:
        dy = torch.empty(y.shape)
        dist.recv(dy, rank + 1)
    if rank > 0:
        (dx,) = torch.autograd.grad(y, [x], dy, retain_graph=True)
        dx = dx.contiguous()
        leaving = dist.isend(dx, rank - 1)
    gradients = torch.autograd.grad(y, parameters, dy)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient if p.grad is None else p.grad + gradient
    if leaving is not None:
        leaving.wait()
    # END SOLUTION


# %% [markdown] course={"ex": "08-5", "role": "answer"}
# The second call repeats the computation between y and each weight: gradients of inner activations are computed
# twice. The library's split avoids that: every linear stores its x and dy, and W is one product each.

# %% course={"ex": "08-5", "role": "check"}
from course_lib.grading import check

check("08-5", backward_in_halves)

# %% [markdown]
# **Exit questions.** Answer, then unfold.
#
# **1.** p = 8, m = 16, v = 4. What is the bubble of interleaving, on both bases?
#
# <details><summary>Answer</summary>
# 7/64 = 10.9 % of ideal, 7/71 = 9.9 % of total.
# </details>
#
# **2.** Why can W not fill the gap at the start of a step?
#
# <details><summary>Answer</summary>
# A W needs its I, and the rank waits for its first I. Only forwards can fill this gap.
# </details>
#
# **3.** You replace ZB-H1 with ZB-H2, but the step takes as long as before. What in the training loop explains this?
#
# <details><summary>Answer</summary>
# All ranks meet between two steps, most likely to compute the gradient norm. ZB-H2 shortens only the span.
# </details>
#
# **4.** All Ws run at the end of the step. What goes wrong?
#
# <details><summary>Answer</summary>
# The gradients are right, but x and dy of all linears stay in memory, and memory grows with m, as in GPipe.
# </details>
#
# **5.** Why does rank 0 have the last stage in a V, and what must you watch?
#
# <details><summary>Answer</summary>
# The first stage stores a micro-batch longest and the last one shortest, so all ranks need the same memory for
# activations. But the embedding and the LM head share a rank, so its stages should have fewer blocks.
# </details>
#
# **Sources.** Next: lesson 09 shards the sequence.
# - Narayanan et al. 2021, on interleaving: [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), section 2.2.
# - Qi et al. 2023, *Zero Bubble*: [arXiv:2401.10241](https://arxiv.org/abs/2401.10241).
# - DeepSeek-AI 2024, on DualPipe: [arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.2.1.
# - Qi et al. 2025, on DualPipe-V: [DualPipe could be better without the
#   Dual](https://huggingface.co/blog/ufotalent/cut-in-half).
