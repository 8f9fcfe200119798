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
#     lesson: '07'
# ---

# %% [markdown]
# # 07 Pipelines I: naive, GPipe, 1F1B
#
# *45 minutes to read and run, 55 to build.* A model that is too large for one GPU is split by layers, and each rank
# holds one stage. You will write down which rank does what and in which order, see it refused, correct it, run it on
# four real ranks, and measure its time and memory. You need lesson 00 (`run`, ranks, the ledger).
#
# Vote first: `"true"`, `"false"` or `"only if ..."`; the end settles both. GPipe and 1F1B are two such orders, and the
# *bubble* is the time in which a rank only waits.
#
# 1. *1F1B has a smaller bubble than GPipe.*
# 2. *More micro-batches make a step faster.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# Split a decoder of four blocks into four **stages**, one block each. Rank 0 also has the embedding, rank 3 the final
# norm and the LM head. Forward (F) goes from rank 0 to rank 3, backward (B) from rank 3 to rank 0:
#
# ```
#             rank 0     x     rank 1     x     rank 2     x     rank 3
# tokens --> [stage 0] -----> [stage 1] -----> [stage 2] -----> [stage 3] --> loss
#            [       ] <----- [       ] <----- [       ] <----- [       ]
#                      dL/dx            dL/dx            dL/dx
# ```
#
# While rank 3 works, rank 0 has nothing to do. So the batch is split into m **micro-batches**, and rank 0 begins the
# second while rank 1 has the first. In which order should a rank do its forwards and backwards? How long must it
# still wait, and how much must it store?

# %% [markdown]
# ## Predict
# p = 4 ranks, m = 8 micro-batches; a forward takes 20 ms on every rank, a backward 40 ms. Fill in what you can; `None`
# means no prediction.

# %%
from statistics import median

import torch

from course_lib import comm, ledger, pp
from course_lib.data import batch
from course_lib.launch import RankError, run
from course_lib.mesh import Conditions, make_mesh
from course_lib.model import build_model, loss_sum, tiny_config
from course_lib.schedule import (
    Costs,
    bubble,
    from_rows,
    make,
    makespan,
    predicted_bubble,
    simulate,
    validate,
)
from course_lib.trace import SavedActivations, overshoot, state_bytes
from course_lib.view import schedule_picture, timeline

P, M, SEQ = 4, 8, 64
F, B = 0.020, 0.040  # seconds
CONFIG = tiny_config(max_seq_len=SEQ)
TOKENS, TARGETS = batch(0, seed=0, batch_size=M, seq_len=SEQ)  # a micro-batch is one sequence
print(f"a micro-batch is 1 sequence of {SEQ} tokens; between two stages")
print(f"its activations are 1 x {SEQ} x {CONFIG.hidden} elements of 4 bytes")

# %%
predicted_naive_ms = None  # a step, when one micro-batch after the other goes all the way
predicted_gpipe_ms = None  # a step, when all forwards come first, then all backwards
predicted_bubble_of_total = None  # GPipe: the fraction of that time in which a rank waits, 0 to 1
predicted_peak_gpipe = None  # micro-batches whose activations rank 0 saves at once
predicted_peak_1f1b = None  # the same, when backwards begin as early as they can
predicted_bytes = None  # what all four ranks together send in a step
predicted_messages = None  # messages between ranks to serve one token

# %% [markdown]
# ## One message, live
# This is the full mechanism, on two ranks. Rank 0 sends its output. Rank 1 receives it as a *leaf* that requires a
# gradient, because autograd does not see the network. After its backward, rank 1 sends the gradient of that leaf
# back, and rank 0 continues backward from there. Forward and backward are paced (padded by sleep), so that ranks do
# not compete for the cores of a small machine. Processes, messages and waiting are real.

# %%
PACE = {"F": F, "B": B}


def two_stages():
    mesh = make_mesh(pp=2)
    model = build_model(CONFIG, seed=0)
    tokens, targets = TOKENS[:1], TARGETS[:1]
    stage = model.stage(0, 2) if mesh.pp.rank == 0 else model.stage(2, 4)  # blocks 0, 1 or 2, 3
    stage(tokens if mesh.pp.rank == 0 else torch.zeros(1, SEQ, CONFIG.hidden))  # warms up
    comm.barrier(mesh.pp)  # fresh ranks do not start in the same moment
    mesh.trace.clear()
    mesh.ledger.clear()
    if mesh.pp.rank == 0:
        with mesh.compute("F", stage=0, mb=0):
            y = stage(tokens)
        comm.send(y, mesh.pp, to=1)
        gradient = comm.recv(y, mesh.pp, source=1)  # like y: its shape and dtype
        with mesh.compute("B", stage=0, mb=0):
            y.backward(gradient)
    else:
        x = comm.recv(torch.empty(1, SEQ, CONFIG.hidden), mesh.pp, source=0).requires_grad_()
        with mesh.compute("F", stage=1, mb=0):
            loss = loss_sum(stage(x), targets)[0] / targets.numel()  # the mean over tokens
        with mesh.compute("B", stage=1, mb=0):
            loss.backward()
        comm.send(x.grad, mesh.pp, to=0)
    return torch.cat([p.grad.flatten() for p in stage.parameters()])


results = run(two_stages, n=2, pace=PACE)
reference = build_model(CONFIG, seed=0)
total, count = reference.loss_sum(TOKENS[:1], TARGETS[:1])
(total / count).backward()
one_process = torch.cat([p.grad.flatten() for p in reference.parameters()])
print(
    f"largest difference from one process: {(torch.cat(list(results)) - one_process).abs().max():.1e}"
)
print(ledger.table(results.ledgers))  # of both ranks
timeline(results.traces, conditions=Conditions(PACE), title="One micro-batch through two stages")

# %% [markdown]
# Read the wide `recv` boxes: rank 1 waits for the forward of rank 0, rank 0 for forward *and* backward of rank 1. Only
# one of them works at any moment.

# %% [markdown]
# ## A schedule is a list of rows
# Each rank does a row of actions from left to right. The cell `0F3` means stage 0, forward, micro-batch 3. Times are
# not written down: an action starts when its rank is free and its inputs have arrived.
#
# - F of stage s needs F of stage s-1 for the same micro-batch;
# - B of stage s needs F of stage s and, unless s is the last stage, B of stage s+1.
#
# Here is a drawing from a study note on model parallelism, titled "naive pipeline":
#
# ```
# time    t1    t2    t3    t4    t5    t6    t7    t8
# GPU 0:  [F0]  [F1]  [F2]  [F3]  idle  idle  idle  [B3][B2][B1][B0]
# GPU 1:  idle  [F0]  [F1]  [F2]  [F3]  idle  idle  idle ...
# GPU 2:  idle  idle  [F0]  [F1]  [F2]  [F3]  idle  idle ...
# GPU 3:  idle  idle  idle  [F0]  [F1]  [F2]  [F3]  [B3]...
# ```
#
# Typed as rows, it is refused:

# %%
note = """
0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
1F0 1F1 1F2 1F3
2F0 2F1 2F2 2F3
3F0 3F1 3F2 3F3 3B3
"""


def typed(text, name="typed"):
    return from_rows([line.split() for line in text.strip().splitlines()], name)


try:
    validate(typed(note))
except ValueError as error:
    print(f"refused: {error}")

# %% [markdown]
# The dots hide the backwards of three ranks. Fill them in as GPU 0 has them, and the rows are legal. (In the picture
# `transfer` is the time of a P2P transfer between stages, *makespan* the length of the step; the gray comes later.)

# %%
complete = """
0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0
2F0 2F1 2F2 2F3 2B3 2B2 2B1 2B0
3F0 3F1 3F2 3F3 3B3 3B2 3B1 3B0
"""
corrected = typed(complete, "the note's drawing, completed")
validate(corrected)
shown = simulate(corrected, Costs.make(f=1, b=1))  # the note draws all boxes equally wide
first_backward = [next(span.start for span in row if span.op == "B") for row in shown.rows]
for rank, start in enumerate(first_backward):
    print(f"rank {rank} can begin its first backward in column t{start + 1:.0f}")
schedule_picture(shown)

# %% [markdown]
# So the drawing has three mistakes. Backwards are missing. GPU 0 begins B3 in column t8, together with GPU 3, though
# three other ranks must do B3 first: it waits six columns, not three. And this is not the naive way: it is GPipe.

# %% [markdown]
# ## Naive
# Naive is this: a micro-batch goes all the way forward and back before the next one starts. From here on B takes twice
# as long as F, as matrix products do: one forward, two backward.

# %%
COSTS = Costs.make(f=1, b=2)
schedules = {name: make(name, P, M) for name in ("naive", "gpipe", "1f1b")}
simulated = {name: simulate(schedule, COSTS) for name, schedule in schedules.items()}
schedule_picture(simulated["naive"])

# %% [markdown]
# The dotted area is the **bubble**. The micro-batches have gained nothing.

# %% [markdown]
# ## GPipe
# All forwards, then all backwards: here the oldest first. The note's newest first takes as long.

# %%
schedule_picture(simulated["gpipe"])

# %% [markdown]
# Count on rank 0. It works m(F+B). It waits while its last forward passes through the other stages, (p-1)F, and until
# the first backward arrives, (p-1)B. Every other rank waits as long, partly at the start and at the end of the step.
# So
#
# $$\text{step} = (m+p-1)(F+B), \qquad \text{bubble} = (p-1)(F+B)$$
#
# A percentage needs a base, and two are in use. Do not compare one kind with the other; the share of ideal may exceed
# 100 %.
#
# | base | share | who uses it |
# |---|---|---|
# | **of total** time, (m+p-1)(F+B) | (p-1)/(m+p-1) | Huang et al. (GPipe), this course's pictures |
# | **of ideal** time, m(F+B) | (p-1)/m | Narayanan et al. 2021 (Megatron-LM) |

# %%
print(f"{'p':>3}{'m':>5}{'of total':>11}{'formula':>9}{'of ideal':>11}{'formula':>9}")
for p, m in ((4, 1), (4, 4), (4, 8), (4, 32), (8, 8), (8, 32)):
    simulation = simulate(make("gpipe", p, m), COSTS)
    print(
        f"{p:3}{m:5}{simulation.bubble_of_total:11.1%}{(p - 1) / (m + p - 1):9.1%}"
        f"{simulation.bubble_of_ideal:11.1%}{(p - 1) / m:9.1%}"
    )

# %% [markdown]
# ## 1F1B
# The gray steps under each rank of GPipe show the micro-batches **in flight**: they have had their forward but not
# yet their backward. Their activations must be stored, and their number grows to m.
#
# One forward, one backward (1F1B) does each backward as early as it can. Rank r starts with p-1-r forwards, then
# alternates F and B, then does the backwards that are left. On rank 0 that is F0 to F2, then the pairs from F3 B0 on.

# %%
schedule_picture(simulated["1f1b"])

# %%
print(f"{'':8}{'step':>6}{'bubble of total':>17}{'of ideal':>10}   in flight by rank")
for name, simulation in simulated.items():
    print(
        f"{name:8}{simulation.makespan:6.0f}{simulation.bubble_of_total:17.1%}{simulation.bubble_of_ideal:10.1%}"
        f"   {schedules[name].peak_in_flight()}"
    )

# %% [markdown]
# Step and bubble are those of GPipe: the idle time has only moved. What changed is the memory: rank r stores at most
# p-r micro-batches instead of m.
#
# ## Try it
# Sliders work in a running notebook only; the picture above is their first setting. (1) Switch between GPipe and 1F1B
# with m at 16: which numbers change? (2) Find the smallest m that brings the bubble of 4 ranks under 10 % of total.

# %%
from course_lib.view.sliders import schedule_sliders

schedule_sliders("1f1b", P, M)

# %% [markdown]
# <details><summary>What you should have seen</summary>
#
# (1) Only the peak in flight: 16 becomes 4. (2) m = 28: with 27, 3/30 is exactly 10 %.
#
# </details>

# %% [markdown]
# ## Build: one engine, any rows
# The library's engine does not know what GPipe is. It takes the next action of its row, waits for the input,
# computes, and posts one batch of messages: send this result, receive the next input.

# %%
from course_lib.pp.engine import Engine
from course_lib.view import code_lines, show_source

show_source(Engine._do, Engine._forward, Engine._backward)

# %% [markdown]
# You know the lines: `detach().requires_grad_()` makes the leaf, `backward(output, gradient)` continues from a
# received gradient, `x.grad` is sent back. (`get_gradient_edge` keeps the graph of an output without the output; I,
# W, `deferred` and `_deferring` are lesson 08's: skip them.) `self.saved` holds the activations in flight.
#
# Each micro-batch's loss must be scaled to its part of the step's loss: the sum over its tokens, divided by the tokens of the
# whole batch. Then gradients simply add up.

# %%
MICRO_BATCHES = list(zip(TOKENS.chunk(M), TARGETS.chunk(M), strict=True))


def scaled_loss(logits, targets):
    return loss_sum(logits, targets)[0] / TARGETS.numel()


def flat(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def train(name):
    mesh = make_mesh(pp=P)
    schedule = make(name, P, M)
    stages = pp.make_stages(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    optimizer = torch.optim.AdamW(pp.parameters(stages))
    with SavedActivations(*stages.values(), [TOKENS, TARGETS]) as saved:
        outcome = pp.run(schedule, stages, mesh, MICRO_BATCHES, scaled_loss)
    gradients = flat(pp.parameters(stages))
    optimizer.step()
    return {
        "gradients": gradients,
        "loss": outcome.loss.item(),
        "in flight": outcome.peak_in_flight,
        "activations": saved.peak,
        "state": state_bytes(stages.values(), optimizer).total,
    }


model = build_model(CONFIG, seed=0)
with SavedActivations(model, [TOKENS, TARGETS]) as saved:
    loss = scaled_loss(model(TOKENS), TARGETS)
loss.backward()
reference = flat(model.parameters())

runs = {name: run(train, name, n=P) for name in schedules}
print(f"{'':10}{'loss':>10}{'|gradient|':>12}{'largest difference':>20}")
print(f"{'reference':10}{loss:10.6f}{reference.norm():12.6f}")
for name, results in runs.items():
    gradients = torch.cat(
        [rank["gradients"] for rank in results]
    )  # stage after stage, as in the model
    difference = (gradients - reference).abs().max().item()
    assert difference < 1e-5
    print(f"{name:10}{results[-1]['loss']:10.6f}{gradients.norm():12.6f}{difference:20.1e}")

# %% [markdown]
# Equal to one process with the full batch, up to rounding: only the order of the work changed.

# %% [markdown]
# ## What was sent
# Over each of the p-1 stage boundaries, the ranks send the activations of all micro-batches forward and gradients of
# the same size back: 2(p-1) · batch · sequence · hidden elements, whatever the schedule.

# %%
activation_bytes = TOKENS.numel() * CONFIG.hidden * 4
print(ledger.table(runs["1f1b"].ledgers))
for name, results in runs.items():
    counted = sum(each.wire_bytes("pp") for each in results.ledgers)
    formula = pp.wire_bytes(schedules[name], activation_bytes)
    assert counted == formula
    print(
        f"{name:6} counted {int(counted):,} bytes, formula {formula:,}, your prediction {predicted_bytes}"
    )

# %% [markdown]
# ## What was saved for backward
# How many micro-batches were in flight, and the bytes that autograd had saved for backward at the fullest moment:

# %%
print(f"{'':6}{'in flight at most':^27}   {'bytes saved for backward, peak':^39}")
print(
    f"{'rank':6}"
    + "".join(f"{name:>9}" for name in runs)
    + "   "
    + "".join(f"{name:>13}" for name in runs)
)
for rank in range(P):
    print(
        f"{rank:<6}"
        + "".join(f"{results[rank]['in flight']:9}" for results in runs.values())
        + "   "
        + "".join(f"{results[rank]['activations']:13,}" for results in runs.values())
    )
for rank in range(P):
    assert runs["gpipe"][rank]["activations"] == M * runs["naive"][rank]["activations"]
    assert runs["1f1b"][rank]["activations"] == (P - rank) * runs["naive"][rank]["activations"]
print(
    f"your predictions for rank 0 in flight: GPipe {predicted_peak_gpipe}, 1F1B {predicted_peak_1f1b}"
)

# %% [markdown]
# GPipe stores exactly m times as much as naive, 1F1B exactly p-r times. **This is the difference between GPipe and
# 1F1B.** Double the batch, and GPipe's column doubles while 1F1B's stays. (The last rank saves more for each
# micro-batch: the head's logits.)

# %% [markdown]
# ## Measured
# Now the clock, with ranks paced to F = 20 ms and B = 40 ms: formula, simulation and measurement side by side.


# %%
def paced_step(name):
    mesh = make_mesh(pp=P)
    schedule = make(name, P, M)
    stages = pp.make_stages(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    for one in (make("gpipe", P, M), schedule):  # the first step warms up
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.run(one, stages, mesh, MICRO_BATCHES, scaled_loss)


STEP = {"naive": M * P * (F + B), "gpipe": (M + P - 1) * (F + B), "1f1b": (M + P - 1) * (F + B)}
in_seconds = {
    name: simulate(schedule, Costs.make(f=F, b=B)) for name, schedule in schedules.items()
}
paced = {name: run(paced_step, name, n=P, pace=PACE) for name in schedules}
measured = {name: pp.measured_rows(results.traces) for name, results in paced.items()}

print(f"{'':8}{'step in ms':^32}{'bubble, share of total':^32}")
print(f"{'':8}" + 2 * f"{'predicted':>10}{'simulated':>11}{'measured':>11}")
for name in schedules:
    print(
        f"{name:8}{1e3 * STEP[name]:10.0f}{1e3 * in_seconds[name].makespan:11.0f}{1e3 * makespan(measured[name]):11.0f}"
        f"{predicted_bubble(name, P, M):10.3f}{in_seconds[name].bubble_of_total:11.3f}{bubble(measured[name])[0]:11.3f}"
    )
late = max(overshoot(results.traces) for results in paced.values())
print(f"sleeps took up to {late:.1%} longer than asked on this machine")
print(
    f"your predictions: naive {predicted_naive_ms} ms, GPipe {predicted_gpipe_ms} ms, bubble {predicted_bubble_of_total}"
)

# %% [markdown]
# The measured step takes longer: messages are not free, and a busy machine wakes a sleeping rank late. Here is 1F1B
# as it ran, with the simulation as outlines above each rank:

# %%
timeline(
    pp.stage_traces(paced["1f1b"].traces),
    overlay=in_seconds["1f1b"].spans,
    conditions=Conditions(PACE),
    title="1F1B on four ranks: measured, and simulated above it",
)

# %% [markdown]
# For a closer look open `1f1b.json`, which is in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "1f1b.json"
perfetto(pp.stage_traces(paced["1f1b"].traces), path, title="1F1B, paced")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# ## Serving one token
# Without a backward there are only messages forward. One token, four stages, the same padded times:


# %%
def serve_one_token():
    mesh = make_mesh(pp=P)
    rank, stage = mesh.pp.rank, build_model(CONFIG, seed=0).stage(mesh.pp.rank, mesh.pp.rank + 1)
    for number in range(5):  # one token five times, one after the other
        comm.barrier(mesh.pp)
        mesh.ledger.clear()
        x = TOKENS[:1, :1]
        with torch.no_grad():
            if rank > 0:
                x = comm.recv(torch.empty(1, 1, CONFIG.hidden), mesh.pp, source=rank - 1)
            with mesh.compute("F", stage=rank, mb=number):
                x = stage(x)
            if rank + 1 < P:
                comm.send(x, mesh.pp, to=rank + 1)


served = run(serve_one_token, n=P, pace={"F": F})
messages = sum(each.calls("pp", "send") for each in served.ledgers)
sent = sum(each.wire_bytes("pp", "send") for each in served.ledgers)
rows = pp.measured_rows(served.traces)
latency = median(last.end - first.start for first, last in zip(rows[0], rows[-1], strict=True))
print(
    f"{messages} messages of {int(sent) // messages} bytes; p-1 = {P - 1}; your prediction {predicted_messages}"
)
print(
    f"a token took {1e3 * latency:.0f} ms; one rank with all four stages would take {1e3 * P * F:.0f} ms"
)

# %% [markdown]
# p-1 transfers of one hidden vector: tiny. But the token is not served sooner, because the stages work one after the
# other. The note recommends pipelines for serving "to minimize latency". They make the model fit, and with several
# requests in flight all stages work.

# %% [markdown]
# ## The same in PyTorch
# `PipelineStage` wraps one rank's stage, and the schedule object runs it. Only the first rank receives tokens, only
# the last one targets.

# %%
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def mean_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def in_pytorch():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module = build_model(CONFIG, seed=0).stage(rank, rank + 1)
    stage = PipelineStage(module, rank, P, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=M, loss_fn=mean_loss)  # divides gradients by M
    inputs = [TOKENS] if rank == 0 else []
    schedule.step(*inputs, target=TARGETS if rank == P - 1 else None)
    gradients = flat(module.parameters())
    dist.destroy_process_group()
    return gradients


theirs = run(in_pytorch, n=P, init=False)
apart = max(
    (one - ours["gradients"]).abs().max().item()
    for one, ours in zip(theirs, runs["1f1b"], strict=True)
)
assert apart < 1e-5
print(f"gradients of torch's 1F1B and ours differ by {apart:.1e} at most")

# %% [markdown]
# `Schedule1F1B` takes the *mean* loss of each micro-batch and divides all gradients by m. That is our loss only while
# all micro-batches have the same number of tokens.

# %% [markdown]
# ## Break it and diagnose
# Five runs of 1F1B, of a model whose LM head uses the embedding's weight (tied: rank 0 and the last rank have a copy
# each), on sequences of different length. One run is correct (its cause is `"correct"`):
#
# - **forgotten**: the 1/m was forgotten, each micro-batch's mean loss counts in full
# - **mean of means**: each is divided by its own tokens, then by m, as above
# - **tied**: the embedding and the LM head do not add up the gradients of their copies
# - **lost**: one rank sends zeros back, for one micro-batch
#
# For each name the cause, the call that is missing or wrong (`"all_reduce"`, `"send"`, or None) and the rank (a
# number, 0 for *tied*; `"all"`; None if correct). Length and angle compare the full gradient with that of one
# process, "off" each rank's, "ends" the two copies of the tied weight. Another SEED draws other runs.

# %%
SEED = 3
diagnosis = {  # such as ("forgotten", None, "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from dataclasses import replace

from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "forgotten": (None, "all"),
    "mean of means": (None, "all"),
    "tied": ("all_reduce", 0),
    "lost": ("send", range(1, P)),
}
lab = Lab("07", SEED, FAULTS)
TIED = replace(CONFIG, tied=True)
RAGGED, RAGGED_TARGETS = batch(0, seed=0, batch_size=M, seq_len=SEQ, shortest=8)
COUNT = int((RAGGED_TARGETS >= 0).sum())


def loses(stage, micro_batch):
    """Its gradient of the input of that micro-batch is zeros."""
    numbers = iter(range(M))

    def look(stage, inputs):
        if next(numbers) == micro_batch:
            inputs[0].register_hook(torch.zeros_like)

    stage.register_forward_pre_hook(look)


def trained(lab_run):
    mesh = make_mesh(pp=P)
    rank, schedule = mesh.pp.rank, make("1f1b", P, M)
    stages = pp.make_stages(build_model(TIED, seed=0), schedule, rank)
    micro_batches = list(zip(RAGGED.chunk(M), RAGGED_TARGETS.chunk(M), strict=True))
    if lab_run.has("lost", rank):
        loses(stages[rank], lab_run.pick(range(M)))

    def loss(y, t):
        own, forgotten = (t >= 0).sum(), lab_run.has("forgotten")
        by_own = forgotten or lab_run.has("mean of means")
        return loss_sum(y, t)[0] / (own * (1 if forgotten else M) if by_own else COUNT)

    outcome = pp.run(schedule, stages, mesh, micro_batches, loss, sum_tied=not lab_run.has("tied"))
    return outcome.loss.item(), flat(pp.parameters(stages)), embedding_gradient(stages[rank])


def embedding_gradient(stage):
    """The gradient of this stage's copy of the tied embedding; None without a copy."""
    module = stage.head if stage.embedding is None else stage.embedding.token
    return None if module is None else module.weight.grad


model = build_model(TIED, seed=0)
total, count = model.loss_sum(RAGGED, RAGGED_TARGETS)
(total / count).backward()
right = [flat(pp.parameters(pp.make_stages(model, make("1f1b", P, M), rank))) for rank in range(P)]
full_right = torch.cat(right).double()
print(
    f"{'':10}{'loss':>9}{'|gradient|, relative':>21}{'angle':>9}{'off, by rank':>22}{'copies apart':>26}"
)
print(f"{'reference':10}{total / count:9.4f}{1:21.4f}{0:8.1f}°")
for lab_run in lab:
    results = run(trained, lab_run, n=P)
    gradient = torch.cat([one for _, one, _ in results]).double()
    length = gradient.norm() / full_right.norm()
    cosine = torch.dot(gradient, full_right) / gradient.norm() / full_right.norm()
    angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
    pairs = zip((one for _, one, _ in results), right, strict=True)
    off = "".join(f"{(one - wanted).norm() / wanted.norm():9.0e}" for one, wanted in pairs)
    first, last = results[0][2], results[-1][2]
    copies_apart = ((first - last).norm() / last.norm()).item()
    print(
        f"{lab_run.letter:10}{results[-1][0]:9.4f}{length:21.4f}{angle:8.1f}°   {off}{copies_apart:13.0e}"
    )

# %% [markdown]
# <details><summary>How to read it</summary>
#
# Below 1e-5 is rounding.
#
# - **Nearly the right length, all ranks off**: *mean of means*. Tokens of short sequences count more. No loss curve would
#   show you that.
# - **About m times too long**: *forgotten*, m times what *mean of means* gives. AdamW, which divides a gradient by its
#   size, hides it.
# - **Only the first and the last rank are off, and apart**: *tied*. From now on the two copies differ.
# - **Loss right, ranks before one are off**: *lost*, by that rank: the ranks before it received no gradient. (The
#   last rank is off too, because its tied weight includes the first rank's gradient; but the two copies agree.)
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# Look again at the runs that are wrong; `lab.reveal()` shows the causes.
#
# **Both send first.** Where 1F1B alternates, rank 0 has an activation for rank 1 while rank 1 has a gradient for rank 0.
# With a plain `send` and then `recv` on both:


# %%
def both_send_first():
    mesh = make_mesh(pp=2)
    other = 1 - mesh.pp.rank
    mine = torch.ones(1, SEQ, CONFIG.hidden)
    comm.send(mine, mesh.pp, to=other)
    return comm.recv(mine, mesh.pp, source=other)


try:
    run(both_send_first, n=2, timeout=3)
except RankError as error:
    print(error)

# %% [markdown]
# Each send waits for a receive that comes after the other send. So the engine posts both as one batch
# (`batch_isend_irecv` in torch). Do not trust a version that works: whether a lone send waits depends on backend and
# message size.
#
# **Rows that wait for each other.** Rank 0 alternates at once, rank 1 needs two forwards first. No batching helps
# here, and `validate` finds it without a rank:

# %%
waiting = """
0F0 0B0 0F1 0B1
1F0 1F1 1B0 1B1
"""
try:
    validate(typed(waiting))
except ValueError as error:
    print(str(error).replace("; ", "\n  "))

# %% [markdown]
# ## When not to use it
# - **The model fits.** Then data parallelism has no bubble.
# - **The batch is small.** m is at most the sequences that a pipeline gets. With m near p the bubble is near half.
# - **The stages are unequal.** The slowest stage sets the speed of all:

# %%
even = simulate(schedules["1f1b"], COSTS)
for factor in (1.25, 1.5, 2.0):
    uneven = simulate(schedules["1f1b"], Costs(f=1, i=1, w=1, per_stage=(1, 1, 1, factor)))
    rest = 1 - even.work / uneven.makespan
    print(
        f"last stage {factor:4} times as slow: the step takes {uneven.makespan / even.makespan:.2f} times as long, "
        f"ranks 0 to 2 idle {rest:.0%} of it"
    )

# %% [markdown]
# Its strength: the messages are few and go to neighbors only, so a pipeline may cross the slow links between nodes.
#
# ## The table that grows
# Each lesson adds rows; each figure is from the fullest rank. State is parameters, gradients and AdamW's moments. The
# row of data parallelism (lesson 03) is computed: replicated state, a quarter of the batch, one all-reduce.

# %%
from course_lib.pp.exchange import P2PExchange
from course_lib.schedule import gpipe, naive, one_f_one_b

model = build_model(CONFIG, seed=0)
optimizer = torch.optim.AdamW(model.parameters())
scaled_loss(model(TOKENS), TARGETS).backward()
optimizer.step()
state = state_bytes(model, optimizer)
with SavedActivations(model, [TOKENS, TARGETS]) as quarter:
    scaled_loss(model(TOKENS[: M // P]), TARGETS[: M // P])
all_reduced = ledger.wire("all_reduce", state.gradients, P)

ENGINE = (Engine, pp.run, P2PExchange, pp.messages)
code = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
head = f"{'fullest rank, one step':24}{'state':>11}{'activations':>13}{'bytes sent':>12}"
print(head + f"{'bubble of total':>17}{'code lines':>12}")
print(f"{'one process':24}{state.total:11,}{saved.peak:13,}{0:12,}{0:17.1%}")
print(
    f"{'data parallel, 4 ranks':24}{state.total:11,}{quarter.peak:13,}{int(all_reduced):12,}{0:17.1%}"
)
for name, results in runs.items():
    sent = max(int(each.wire_bytes()) for each in results.ledgers)
    print(
        f"{name + ', 4 ranks':24}{max(r['state'] for r in results):11,}{max(r['activations'] for r in results):13,}"
        f"{sent:12,}{bubble(measured[name])[0]:17.1%}{code_lines(code[name], *ENGINE):12}"
    )

# %% [markdown]
# Code lines include the engine, which all three use. State falls to about a quarter, which data parallelism cannot
# do. The price is the bubble.

# %% [markdown]
# ## The claims settled
# **Claim 1: false.** The note says that 1F1B improves the bubble "significantly". With equal stages and free messages
# its bubble equals GPipe's. When a P2P transfer takes time, it is larger: where 1F1B alternates, two neighbors wait
# for each other in turn.

# %%
sizes = [(p, m) for p in range(1, 9) for m in range(1, 33)]
differing = 0
for p, m in sizes:
    one, other = (simulate(make(name, p, m), COSTS) for name in ("gpipe", "1f1b"))
    differing += abs(one.makespan - other.makespan) > 1e-9
print(f"{len(sizes)} sizes simulated, steps of different length: {differing}; your vote: {vote_1}")

slow = {n: simulate(schedules[n], Costs.make(f=1, b=2, comm=1)).makespan for n in ("gpipe", "1f1b")}
print(
    f"when a transfer takes 1, p = {P}, m = {M}: GPipe {slow['gpipe']:.0f}, 1F1B {slow['1f1b']:.0f}"
)

fits = max(schedules["1f1b"].peak_in_flight())
small, large = predicted_bubble("gpipe", P, fits), predicted_bubble("1f1b", P, 4 * M)
print(f"memory for {fits} micro-batches: GPipe runs m = {fits}, bubble {small:.1%};")
print(f"1F1B may run any m, say {4 * M}, bubble {large:.1%}")

# %% [markdown]
# The smaller bubble comes from the larger m for which 1F1B has memory: from a larger batch, or smaller micro-batches.
#
# **Claim 2: only if the micro-batches stay large enough.** Keep the batch and split it finer. Every action has a
# fixed cost (launching kernels). Say 5 ms per forward, beside 160 ms of work to divide; backwards take twice that:

# %%
FIXED, WORK = 5, 160  # ms of forward on a stage: for each micro-batch, and for the whole batch
finer = {}
for m in (1, 2, 4, 8, 16, 32, 64):
    simulation = simulate(make("1f1b", P, m), Costs.make(f=FIXED + WORK / m))
    finer[m] = simulation.makespan
    print(
        f"m = {m:2}: bubble {simulation.bubble_of_total:5.1%} of total, step {simulation.makespan:6.0f} ms"
    )
best = min(finer, key=finer.get)
print(
    f"fastest at m = {best}; sqrt((p-1) work / fixed) = {((P - 1) * WORK / FIXED) ** 0.5:.1f}; your vote: {vote_2}"
)

# %% [markdown]
# The bubble always falls, the step does not: (m+p-1)(fixed + work/m) is shortest at that root.
#
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** p = 8, m = 32. What is the bubble, on both bases?
#
# <details><summary>Answer</summary>
#
# 7/39 = 17.9 % of total time, 7/32 = 21.9 % of ideal time.
#
# </details>
#
# **2.** A colleague replaces GPipe by 1F1B with the same m. The step is no faster. What is the gain, and how does it
# become time?
#
# <details><summary>Answer</summary>
#
# Memory: rank r stores min(m, p-r) micro-batches instead of m. So m can grow with the batch.
#
# </details>
#
# **3.** The model gets twice as many layers; hidden size and p stay. What happens to the bytes on the pp axis?
#
# <details><summary>Answer</summary>
#
# Nothing: p-1 stage boundaries, each crossed twice by batch · sequence · hidden elements.
#
# </details>
#
# **4.** Why does rank 0 of 1F1B begin with p-1 forwards before it alternates? What happens with p-2, and with p?
#
# <details><summary>Answer</summary>
#
# Its first backward waits until the first micro-batch has come back. With one forward less it waits in every round
# where it could have computed. With one more it stores one micro-batch more and gains nothing, unless messages are
# slow: then the extra micro-batch hides a part of the wait. The cell below has the numbers.
#
# </details>
#
# **5.** A run hangs in its first step. Rank 1 waits in `send` to rank 2, rank 2 in `send` to rank 1. What is wrong,
# and what is the repair?
#
# <details><summary>Answer</summary>
#
# Both send first. Post send and receive as one batch (`batch_isend_irecv`), or let one of two neighbors receive
# first.
#
# </details>

# %%
one_more = make("1f1b", P + 1, M).rows[:P]  # as if another stage followed
one_less = make("1f1b", P - 1, M).rows + schedules["1f1b"].rows[-1:]
variants = {"p-2-r": one_less, "p-1-r": schedules["1f1b"].rows, "p-r": one_more}
for first, rows in variants.items():
    schedule = from_rows([[str(action) for action in row] for row in rows])
    free, slow = (
        simulate(schedule, Costs.make(f=1, b=2, comm=transfer)).makespan for transfer in (0, 1)
    )
    print(
        f"{first:6} forwards at first: step {free:.0f}, {slow:.0f} when a transfer takes 1; "
        f"in flight {schedule.peak_in_flight()}"
    )

# %% [markdown]
# ## Cheat-sheet
# Computed: equal stages, free messages, a backward takes two forwards.


# %%
def cheat_sheet(p, m):
    print(f"p = {p} stages, m = {m} micro-batches; a step of GPipe and 1F1B is (m+p-1)(F+B)")
    print(f"{'':8}{'step / F':>9}{'bubble of total':>17}{'of ideal':>10}{'in flight, by rank':>22}")
    for name in ("naive", "gpipe", "1f1b"):
        schedule = make(name, p, m)
        seen = simulate(schedule, COSTS)
        line = f"{seen.makespan:9.0f}{seen.bubble_of_total:17.1%}{seen.bubble_of_ideal:10.1%}"
        print(f"{name:8}{line}    {schedule.peak_in_flight()}")
    print(
        f"(p-1)/(m+p-1) = {(p - 1) / (m + p - 1):.1%} of total, (p-1)/m = {(p - 1) / m:.1%} of ideal"
    )
    print(
        f"sent, all ranks: 2(p-1) = {2 * (p - 1)} times batch x sequence x hidden elements, whatever m"
    )
    print("loss of a micro-batch: the sum over its tokens / the tokens of the batch\n")


cheat_sheet(4, 8)
cheat_sheet(8, 32)

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/07_pipelines_1.ipynb), about 55 minutes: trace 1F1B by hand (10), find the m that a
# limit on the bubble needs (5), write 1F1B as rows for any p and m (10), exchange two messages in raw PyTorch without
# a deadlock (10), and run one rank's row on real ranks, equal to one process (20).

# %% course={"role": "given"}
import math

import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "07-1"}
# ## 07-1 1F1B by hand
# p = 3 ranks, m = 5 micro-batches, stage r on rank r. A forward takes 1, a backward 2, a message no time. Draw the
# three rows on paper, from time 0 on, each action as early as it can start, and fill in the table. A row is a text of
# ten cells, parted by spaces; rank 2 does `2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4`. Type shares as fractions: `1/3`.

# %% course={"ex": "07-1", "role": "answer"}
traced = {
    # BEGIN SOLUTION
    "row 0": "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
    "row 1": "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
    "in flight at most, by rank": [3, 2, 1],
    "start of 0B0": 7,  # 2B0 runs from 3 to 5, 1B0 from 5 to 7
    "step": 21,  # (m+p-1)(F+B)
    "bubble of total": 2 / 7,
    "bubble of ideal": 2 / 5,
    # STUB
    # "row 0": None,  # what rank 0 does, as a text
    # "row 1": None,  # what rank 1 does
    # "in flight at most, by rank": None,  # a list of three numbers: micro-batches kept at once
    # "start of 0B0": None,  # the time at which rank 0 begins its first backward
    # "step": None,  # the time at which the last action ends
    # "bubble of total": None,  # the share of the step in which a rank waits
    # "bubble of ideal": None,  # the same waiting, as a share of the time without it
    # END SOLUTION
}

# %% course={"ex": "07-1", "role": "check"}
from course_lib.grading import check

check("07-1", traced)

# %% [markdown] course={"ex": "07-2"}
# ## 07-2 Micro-batches enough
# GPipe or 1F1B on p ranks with equal stages and free messages: what is the smallest m whose bubble is at most `percent`
# % of *total* time? One line will do. `enough(4, 30)` is 7: there the bubble is 3/10, and with m = 6 it is 3/9.


# %% course={"ex": "07-2", "role": "answer"}
def enough(p: int, percent: int) -> int:
    """The smallest number of micro-batches whose bubble is at most ``percent`` % of total time.

    ``p`` is 2 or more; ``percent`` is a whole number from 1 to 99.
    """
    # BEGIN SOLUTION
    return math.ceil((p - 1) * (100 - percent) / percent)
    # END SOLUTION


# %% course={"ex": "07-2", "role": "check"}
from course_lib.grading import check

check("07-2", enough)

# %% [markdown] course={"ex": "07-3"}
# ## 07-3 The rows of 1F1B
# Write the schedule for any p and m, also for m smaller than p. Stage r is on rank r. A row is a list of cells such as
# `"0F3"` (stage 0, forward, micro-batch 3), micro-batches are numbered from 0. `rows_of_1f1b(2, 3)` is
#
# ```python
# [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
#  ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
# ```
#
# Your rows are judged by what they do: `validate` finds them legal, `simulate` (F takes 1, B takes 2) finds the step as
# short as that of 1F1B, and no rank keeps more in flight.


# %% course={"ex": "07-3", "role": "answer"}
def rows_of_1f1b(p: int, m: int) -> list[list[str]]:
    """The rows of 1F1B: one list for each of ``p`` ranks, with ``2 * m`` cells such as "0F3"."""
    # BEGIN SOLUTION
    rows = []
    for rank in range(p):
        row, forwards, backwards = [], 0, 0
        while backwards < m:
            room = forwards - backwards < p - rank  # in flight now, and at most
            if room and forwards < m:
                row.append(f"{rank}F{forwards}")
                forwards += 1
            else:
                row.append(f"{rank}B{backwards}")
                backwards += 1
        rows.append(row)
    return rows
    # END SOLUTION


# %% course={"ex": "07-3", "role": "check"}
from course_lib.grading import check

check("07-3", rows_of_1f1b)

# %% [markdown] course={"ex": "07-4"}
# ## 07-4 An exchange that cannot deadlock
# In raw PyTorch: use `torch.distributed` (here `dist`) alone. Where 1F1B alternates, a rank has an activation for the
# next rank, which at the same time has a gradient for it. Write the function that both of them call: it sends `mine`
# to rank `peer`, and returns what `peer` sends, a new tensor of the shape and dtype of `like`.
#
# The check runs it on two, three and four ranks in a row that do as 1F1B does: each rank exchanges with the next rank,
# then with the previous one, several times. On four ranks, ranks 0 and 2 and ranks 1 and 3 also exchange. The default
# group exists, the tensors are contiguous, and only the two ranks of an exchange call the function. Each exchange
# sends and receives one message per rank, to and from `peer`, and waits for both; `mine` and `like` must not change.


# %% course={"ex": "07-4", "role": "answer"}
def swap(mine: torch.Tensor, like: torch.Tensor, peer: int) -> torch.Tensor:
    """Send ``mine`` to rank ``peer`` and return the tensor that ``peer`` sends.

    ``like`` only shows shape and dtype of what arrives; they may differ from those of ``mine``.
    """
    # BEGIN SOLUTION
    arriving = torch.empty_like(like)
    messages = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, arriving, peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return arriving
    # END SOLUTION


# %% course={"ex": "07-4", "role": "check"}
from course_lib.grading import check

check("07-4", swap)

# %% [markdown] course={"ex": "07-5"}
# ## 07-5 One rank's step of a pipeline
# Now the mechanism: forward and backward of all micro-batches on one rank, in the order of the given row. Rank r
# holds stage r. Two functions of the library move tensors:
#
# - `comm.recv(like, axis, source=rank)` waits for a message and returns it, a new tensor of the shape and dtype of
#   `like`;
# - `comm.start_send(x, axis, to=rank)` sends x and returns *at once* a handle; call its `wait()` before you return.
#
# Messages of two ranks arrive in the order in which they were sent. All micro-batches have the same shape, and so
# have all activations. The loss of the step is the mean over all micro-batches; `loss(y, target)` is the loss of one
# micro-batch.
#
# The rows are those of 1F1B and GPipe; p is 1 to 4, and the axis may be a part of the world. The check compares with
# one process: the loss, all gradients (backward adds them to what `.grad` holds), and the weights after the optimizer,
# which steps when you have returned. It also looks at the order of the actions, at the messages (2(p-1)m in total, to
# neighbors only), and at the saved activations: as many micro-batches as the row has in flight, p-r for 1F1B.


# %% course={"ex": "07-5", "role": "answer"}
def one_step(row, stage, micro_batches, loss, axis) -> float:
    """Do ``row`` and leave the gradients of the step's loss in ``stage.parameters()``.

    row            what this rank does: [("F", 0), ("F", 1), ("B", 0), ...], operation and micro-batch
    stage          this rank's module: y = stage(x); y has the shape of x
    micro_batches  [(x, target), ...]: x is the input of rank 0's stage (on the others it shows the
                   shape of what arrives), target is for the last rank's loss
    loss           loss(y, target): the mean over one micro-batch, a scalar tensor
    axis           axis.rank, and axis.size, the number of ranks

    Returns the step's loss on the last rank, 0.0 on the others.
    """
    # BEGIN SOLUTION
    first, last = axis.rank == 0, axis.rank == axis.size - 1
    kept, leaving, total = {}, [], 0.0
    for op, mb in row:
        x, target = micro_batches[mb]
        if op == "F":
            if not first:
                x = comm.recv(x, axis, source=axis.rank - 1).requires_grad_()
            y = stage(x)
            if last:
                y = loss(y, target) / len(micro_batches)
                total += y.item()
            else:
                leaving.append(comm.start_send(y, axis, to=axis.rank + 1))
            kept[mb] = x, y
        else:
            x, y = kept.pop(mb)
            gradient = None if last else comm.recv(y, axis, source=axis.rank + 1)
            y.backward(gradient)
            if not first:
                leaving.append(comm.start_send(x.grad, axis, to=axis.rank - 1))
    for handle in leaving:
        handle.wait()
    return total
    # END SOLUTION


# %% [markdown] course={"ex": "07-5", "role": "answer"}
# No send waits here, so no two can wait for each other. The library's engine posts send and receive of two actions as
# one batch instead: with nccl, messages that were posted one by one wait in a queue, and the other rank may wait for
# a later one.

# %% course={"ex": "07-5", "role": "check"}
from course_lib.grading import check

check("07-5", one_step)

# %% [markdown]
# ## Sources and what to read next
# - Huang et al. 2018, *GPipe*, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965): section 2 has the bubble of
#   total. It also recomputes activations in backward, which shrinks the memory in flight.
# - Harlap et al. 2018, *PipeDream*, [arXiv:1806.03377](https://arxiv.org/abs/1806.03377): where 1F1B comes from. It
#   does not wait for the last backward before a step, and its gradients are *not* those of one process.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): 1F1B as you ran it; section 2.2 has the bubble of ideal.
#
# Next: lesson 08 reduces the bubble itself, with several stages per rank and a split backward.
