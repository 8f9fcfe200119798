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
# *50 minutes to read and run.* A model that is too large for one GPU is cut by layers, and each rank
# holds one piece. You will write such a schedule down cell by cell, have it refused, correct it, run it on four real
# ranks, and measure what it wastes in time and what it costs in memory. You need lesson 00 (`run`, ranks, the ledger)
# and nothing else.
#
# Vote first. Write `"true"`, `"false"` or `"only if ..."`; `None` means no vote. The last section settles both.
#
# 1. *1F1B has a smaller bubble than GPipe.*
# 2. *More micro-batches make a step faster.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# Cut a decoder of four blocks into four **stages**, one block each. Rank 0 also has the embedding, rank 3 the final
# norm and the head. Forward (F) goes from rank 0 to rank 3, backward (B) from rank 3 to rank 0:
#
# ```
#             rank 0     x     rank 1     x     rank 2     x     rank 3
# tokens --> [stage 0] -----> [stage 1] -----> [stage 2] -----> [stage 3] --> loss
#            [       ] <----- [       ] <----- [       ] <----- [       ]
#                      dL/dx            dL/dx            dL/dx
# ```
#
# Forward, the **activations** x travel, backward the gradient of the loss with respect to them. While rank 3 works,
# rank 0 has nothing to do. So the batch is cut into m **micro-batches**, and rank 0 begins the second one while
# rank 1 has the first. In which order should each rank do its forwards and backwards? How long does it wait all the
# same, and how much must it remember?

# %% [markdown]
# ## Predict
# p = 4 ranks, m = 8 micro-batches. On every rank a forward takes 20 ms and a backward 40 ms. Fill in what you can.

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
print(f"its activations are 1 x {SEQ} x {CONFIG.hidden} numbers of 4 bytes")

# %%
predicted_naive_ms = None  # a step, when one micro-batch after the other goes all the way
predicted_gpipe_ms = None  # a step, when all forwards come first, then all backwards
predicted_bubble_of_total = None  # GPipe: the share of that time in which a rank waits, 0 to 1
predicted_peak_gpipe = None  # micro-batches whose activations rank 0 keeps at once
predicted_peak_1f1b = None  # the same, when backwards begin as early as they can
predicted_bytes = None  # what all four ranks together send in a step
predicted_messages = None  # messages between ranks to serve one token

# %% [markdown]
# ## One message, live
# The whole mechanism, on two ranks. Rank 0 sends its output. Rank 1 receives it as a *leaf* that wants a gradient:
# autograd knows nothing of the network. After its backward, rank 1 sends the gradient of that leaf back, and rank 0
# continues backward from there. Forward and backward are paced (filled up by sleep to 20 and 40 ms): four ranks on
# a small machine would otherwise fight for its cores. The processes, the messages and the waiting are real.

# %%
PACE = {"F": F, "B": B}


def two_stages():
    mesh = make_mesh(pp=2)
    model = build_model(CONFIG, seed=0)
    tokens, targets = TOKENS[:1], TARGETS[:1]
    stage = model.stage(0, 2) if mesh.pp.rank == 0 else model.stage(2, 4)
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
            loss = loss_sum(stage(x), targets)[0] / targets.numel()
        with mesh.compute("B", stage=1, mb=0):
            loss.backward()
        comm.send(x.grad, mesh.pp, to=0)
    return torch.cat([p.grad.flatten() for p in stage.parameters()])


halves = run(two_stages, n=2, pace=PACE)
whole = build_model(CONFIG, seed=0)
total, count = whole.loss_sum(TOKENS[:1], TARGETS[:1])
(total / count).backward()
one_process = torch.cat([p.grad.flatten() for p in whole.parameters()])
print(
    f"largest difference from one process: {(torch.cat(list(halves)) - one_process).abs().max():.1e}"
)
print(ledger.table(halves.ledgers))  # of both ranks
timeline(halves.traces, conditions=Conditions(PACE), title="One micro-batch through two stages")

# %% [markdown]
# Read the wide `recv` boxes: rank 1 waits for rank 0 during the whole forward of rank 0, and rank 0 waits for forward
# *and* backward of rank 1. Two ranks, and at any moment only one of them works.

# %% [markdown]
# ## A schedule is a list of rows
# Each rank does a row of actions from left to right. The cell `0F3` means stage 0, forward, micro-batch 3. Times are
# not written down: an action starts when its rank is free and what it needs has arrived. It follows what is needed:
#
# - F of stage s needs F of stage s-1 for the same micro-batch;
# - B of stage s needs F of stage s and, unless s is the last stage, B of stage s+1.
#
# Here is a drawing from a study note on model parallelism, titled "naive pipeline", with four micro-batches:
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
# The dots hide the backwards of three ranks. Fill them in the order that GPU 0 shows, and the rows are legal:

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
# So the drawing has three mistakes. The backwards of GPU 1 and 2 are missing. GPU 0 begins B3 in column t8, in which
# GPU 3 begins it too, though three other ranks must do B3 first: the wait is six columns, not three. And this is not
# the naive way at all: it is GPipe. The formula that the note gives with it, (P-1)/(M+P-1), is right, and fits the
# corrected picture: 3/7.

# %% [markdown]
# ## Naive
# Naive is this: a micro-batch goes all the way forward and back before the next one starts. One rank works, p-1 wait.
# From here on B takes twice as long as F, as it does for matrix products: one product forward, two backward.

# %%
COSTS = Costs.make(f=1, b=2)
schedules = {name: make(name, P, M) for name in ("naive", "gpipe", "1f1b")}
simulated = {name: simulate(schedule, COSTS) for name, schedule in schedules.items()}
schedule_picture(simulated["naive"])

# %% [markdown]
# The dotted ground is the **bubble**: time in which a rank has nothing to do. The micro-batches have gained nothing.

# %% [markdown]
# ## GPipe
# All forwards, then all backwards. As soon as rank 1 has the first micro-batch, rank 0 goes on with the second.

# %%
schedule_picture(simulated["gpipe"])

# %% [markdown]
# Count on rank 0. It works m(F+B). It waits while its last forward travels to the end, (p-1)F, and until the first
# backward is back, (p-1)B. Every other rank waits as long, some of it before its first forward. So
#
# $$\text{step} = (m+p-1)(F+B), \qquad \text{bubble} = (p-1)(F+B)$$
#
# A share needs a base, and two are in use:
#
# | base | share | who uses it |
# |---|---|---|
# | **of total** time, m+p-1 | (p-1)/(m+p-1) | Huang et al. (GPipe), this course's pictures |
# | **of ideal** time, m | (p-1)/m | Narayanan et al. 2021 (Megatron-LM) |
#
# The second may exceed 100 %. Comparing a number of one kind with one of the other is a common mistake.

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
# Look at the grey steps under each rank of GPipe. They are what is **in flight**: micro-batches that have had their
# forward but not yet their backward. Their activations must be kept, and on every rank they grow to m.
#
# One forward, one backward (1F1B) does each backward as early as it can. Rank r starts with p-1-r forwards, then
# alternates F and B, then does the backwards that are left.

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
# Step and bubble are those of GPipe. The idle time has only moved. What changed is the memory: rank r keeps at most
# p-r micro-batches instead of m. Rank 0 needs p because its first backward cannot come before its first micro-batch has
# gone to the end and back; a shorter row of first forwards would only make it wait.
#
# ## Try it
# Sliders are seen in a running notebook; the picture above is their first setting. Three things to try: (1) switch
# between GPipe and 1F1B with m at 16: which of the numbers in the sentence below changes? (2) Find the smallest m that
# brings the bubble of 4 ranks under 10 % of total. (3) Let a hop take 1: which schedule suffers more, and why?

# %%
from course_lib.view.sliders import schedule_sliders

schedule_sliders("1f1b", P, M)

# %% [markdown]
# <details><summary>What you should have seen</summary>
#
# (1) Only the peak in flight: 16 becomes 4. (2) m = 27: (p-1)/(m+p-1) = 3/30 is exactly 10 %, so it takes 28.
# (3) 1F1B: in its alternating part, two neighbours wait for each other's message in turn, so that a hop delays every
# pair of F and B. In GPipe messages travel one way at a time, and a hop is paid p-1 times each way.
#
# </details>

# %% [markdown]
# ## Build: one engine, any rows
# The engine of the library does not know what GPipe is. It takes the next action of its row, waits for the input,
# computes, and posts one batch of messages: send this result, receive what I need next.

# %%
import inspect
import textwrap

from course_lib.pp.engine import Engine


def show(*functions):
    for function in functions:
        print(textwrap.dedent(inspect.getsource(function)))


show(Engine._do, Engine._forward, Engine._backward)

# %% [markdown]
# You know every line: `detach().requires_grad_()` makes the leaf, `backward(output, gradient)` continues from a
# received gradient, and `x.grad` is what travels back. `self.kept` are the micro-batches in flight.
#
# Each micro-batch's loss must be its *share* of the step's loss: the sum over its tokens, divided by the tokens of the
# whole batch. Then gradients simply add up.

# %%
MICRO_BATCHES = list(zip(TOKENS.chunk(M), TARGETS.chunk(M), strict=True))


def share(logits, targets):
    return loss_sum(logits, targets)[0] / TARGETS.numel()


def flat(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def train(name):
    mesh = make_mesh(pp=P)
    schedule = make(name, P, M)
    stages = pp.cut(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    optimizer = torch.optim.AdamW(pp.parameters(stages))
    with SavedActivations(*stages.values(), [TOKENS, TARGETS]) as saved:
        outcome = pp.run(schedule, stages, mesh, MICRO_BATCHES, share)
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
    loss = share(model(TOKENS), TARGETS)
loss.backward()
serial = flat(model.parameters())

runs = {name: run(train, name, n=P) for name in schedules}
print(f"{'':10}{'loss':>10}{'|gradient|':>12}{'largest difference':>20}")
print(f"{'serial':10}{loss:10.6f}{serial.norm():12.6f}")
for name, results in runs.items():
    gradients = torch.cat(
        [rank["gradients"] for rank in results]
    )  # stage after stage: the order of the model
    difference = (gradients - serial).abs().max().item()
    assert difference < 1e-5
    print(f"{name:10}{results[-1]['loss']:10.6f}{gradients.norm():12.6f}{difference:20.1e}")

# %% [markdown]
# Equal to one process that takes the batch whole, up to rounding. The order of the work changed; what is computed did
# not: no weight is touched before the last backward (the *flush*).

# %% [markdown]
# ## What was sent
# Each of the p-1 borders is crossed by the activations of all micro-batches forward and by gradients of the same size
# back: 2(p-1) · batch · sequence · hidden numbers, whatever the schedule, and however deep the stages are.

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
# ## What was kept
# The same runs, on every rank: how many micro-batches were in flight, and the bytes that autograd had saved for
# backward at its fullest moment.

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
# Naive has one in flight, so its column is what one micro-batch costs a stage. GPipe keeps exactly m times that on
# every rank, 1F1B exactly p-r times. **This is the difference between GPipe and 1F1B.** Double the batch, and GPipe's
# column doubles while that of 1F1B stays. The last rank costs more for each micro-batch because of the head's logits;
# under 1F1B it is the rank that keeps the fewest.

# %% [markdown]
# ## Measured
# Now the clock. The ranks are paced to F = 20 ms and B = 40 ms; the engine, the messages and the waiting are the
# same as before. Formula, simulation and measurement stand side by side.


# %%
def paced_step(name):
    mesh = make_mesh(pp=P)
    schedule = make(name, P, M)
    stages = pp.cut(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    for one in (make("gpipe", P, M), schedule):  # the first step warms up
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.run(one, stages, mesh, MICRO_BATCHES, share)


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
# What is measured takes longer: messages are not free, and a busy machine wakes a sleeping rank late, for which its
# neighbours wait too. Here is 1F1B as it ran, with the simulated one as outlines above each rank:

# %%
timeline(
    pp.stage_traces(paced["1f1b"].traces),
    overlay=in_seconds["1f1b"].spans,
    conditions=Conditions(PACE),
    title="1F1B on four ranks: measured, and simulated above it",
)

# %% [markdown]
# ## Serving one token
# Without a backward there are only messages forward. One token, four stages, the same pace:


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
# p-1 transfers of one hidden vector, tiny ones. (To generate on, the last rank also tells the first which token came
# out.) But the token is not served sooner: the stages work one after the other. The note recommends tensor parallelism
# with pipelines for serving, "to minimise latency"; pipelines do not. They make
# the model fit, and with several requests under way all stages work.

# %% [markdown]
# ## The same in PyTorch
# `PipelineStage` wraps one rank's piece, the schedule object runs it. Cutting is up to you: `model.stage` is a slice of
# our decoder. Only the first rank is given tokens, only the last one targets.

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
# `Schedule1F1B` takes the *mean* loss of each micro-batch and divides all gradients by m at the end. That equals our
# loss only while all micro-batches have the same number of tokens.

# %% [markdown]
# ## Break it and diagnose
# Three runs on a batch in which some sequences are short: their last targets count for nothing. One is healthy. In
# one the 1/m was **forgotten**: each micro-batch's mean loss was taken whole. One takes the **mean of means**, as
# above. Which is which?

# %%
diagnosis = {"A": None, "B": None, "C": None}  # "healthy", "forgotten", "mean of means"

# %% jupyter={"source_hidden": true}
RAGGED, RAGGED_TARGETS = batch(0, seed=0, batch_size=M, seq_len=SEQ, shortest=8)
COUNT = int((RAGGED_TARGETS >= 0).sum())
PATIENTS = {"A": "mean of means", "B": "forgotten", "C": "healthy"}
LOSSES = {
    "healthy": lambda y, t: loss_sum(y, t)[0] / COUNT,
    "mean of means": lambda y, t: loss_sum(y, t)[0] / (t >= 0).sum() / M,
    "forgotten": lambda y, t: loss_sum(y, t)[0] / (t >= 0).sum(),
}


def patient(illness):
    mesh = make_mesh(pp=P)
    schedule = make("1f1b", P, M)
    stages = pp.cut(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    cut = list(zip(RAGGED.chunk(M), RAGGED_TARGETS.chunk(M), strict=True))
    outcome = pp.run(schedule, stages, mesh, cut, LOSSES[illness])
    return outcome.loss.item(), flat(pp.parameters(stages))


model = build_model(CONFIG, seed=0)
total, count = model.loss_sum(RAGGED, RAGGED_TARGETS)
(total / count).backward()
right = flat(model.parameters())
print(f"{'':8}{'loss':>9}{'|gradient| / serial':>21}{'angle to serial':>17}")
print(f"{'serial':8}{total / count:9.4f}{1:21.4f}{0:15.1f}°")
for name, illness in PATIENTS.items():
    results = run(patient, illness, n=P)
    gradient = torch.cat([one for _, one in results]).double()
    cosine = torch.dot(gradient, right.double()) / gradient.norm() / right.double().norm()
    angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
    print(f"{name:8}{results[-1][0]:9.4f}{gradient.norm() / right.norm():21.4f}{angle:15.1f}°")

# %% [markdown]
# <details><summary>Which is which</summary>
#
# - **C is healthy**: length and direction are those of one process.
# - **B forgot 1/m**: its gradient is about m = 8 times too long. With equal lengths it would be exactly 8 times; AdamW
#   would hide it, because it divides a gradient by its own size.
# - **A takes the mean of means**: nearly the right length, but another direction. Tokens of short sequences count
#   more. No loss curve would show you that; only the comparison with one process does.
#
# </details>

# %%
for name, illness in PATIENTS.items():
    said = diagnosis[name]
    print(
        f"{name}:", "no diagnosis" if said is None else "right" if said == illness else "look again"
    )

# %% [markdown]
# **Both send first.** In the alternating part of 1F1B, rank 0 has an activation for rank 1 at the same time as rank 1
# has a gradient for rank 0. Written as a plain `send` and then `recv` on both:


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
# Each send waits for a receive that stands behind the other send. That is why the engine posts send and receive as one
# batch (`batch_isend_irecv` in torch). Do not trust a version that works: whether a lone send waits depends on
# backend and size of the message.
#
# **Rows that wait for each other.** Rank 0 has forgotten its first forwards and alternates at once, rank 1
# wants two forwards before its first backward. No batching helps here. `validate` sees it without a rank:

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
# - **The model fits.** Then data parallelism has no bubble, and ZeRO (lesson 04) saves memory without one.
# - **The batch is small.** m is at most the sequences of a batch divided by its data-parallel ranks. Large runs have many
#   ranks and few sequences for each: m gets near p, and the bubble near half.
# - **The stages are unequal.** The slowest one sets the pace for all. Head and embedding, or a number of layers that p
#   does not divide, are enough:

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
# Where it shines: its messages are few and go to one neighbour only, and the work of other micro-batches can hide
# them. So it is the axis that is laid across the slow links between nodes.
#
# ## The table that grows
# Every lesson adds its rows; each number is that of the fullest rank. State is parameters, gradients and AdamW's
# moments. The row of lesson 03 is computed: the whole state, a quarter of the batch, one ring all-reduce.

# %%
import ast

from course_lib.pp.mail import Mail
from course_lib.schedule import gpipe, naive, one_f_one_b


def code_lines(*objects):
    """Lines of code without comments and docstrings."""
    lines = 0
    for one in objects:
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        lines += len(ast.unparse(tree).splitlines())
    return lines


model = build_model(CONFIG, seed=0)
optimizer = torch.optim.AdamW(model.parameters())
share(model(TOKENS), TARGETS).backward()
optimizer.step()
state = state_bytes(model, optimizer)
with SavedActivations(model, [TOKENS, TARGETS]) as quarter:
    share(model(TOKENS[: M // P]), TARGETS[: M // P])
all_reduced = ledger.wire("all_reduce", state.gradients, P)

ENGINE = (Engine, pp.run, Mail, pp.messages)
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
# Code lines are the rows plus the engine, which all three share. State falls to about a quarter: what data parallelism could not do. The price is the bubble.
#
# ## The claims settled
# **Claim 1: false.** The note's table says that 1F1B improves the bubble "significantly". With equal stages and free
# messages its bubble is that of GPipe; with slow messages it is larger:

# %%
sizes = [(p, m) for p in range(1, 9) for m in range(1, 33)]
differing = 0
for p, m in sizes:
    one, other = (simulate(make(name, p, m), COSTS) for name in ("gpipe", "1f1b"))
    differing += abs(one.makespan - other.makespan) > 1e-9
print(f"{len(sizes)} sizes simulated, steps of different length: {differing}; your vote: {vote_1}")

slow = {n: simulate(schedules[n], Costs.make(f=1, b=2, comm=1)).makespan for n in ("gpipe", "1f1b")}
print(f"when a hop takes 1, p = {P}, m = {M}: GPipe {slow['gpipe']:.0f}, 1F1B {slow['1f1b']:.0f}")

keeps = max(schedules["1f1b"].peak_in_flight())
small, large = predicted_bubble("gpipe", P, keeps), predicted_bubble("1f1b", P, 4 * M)
print(f"room for {keeps} micro-batches: GPipe runs m = {keeps}, bubble {small:.1%};")
print(f"1F1B may run any m, say {4 * M}, bubble {large:.1%}")

# %% [markdown]
# What it gives is room: with the memory for p micro-batches, GPipe must stop at m = p, while 1F1B may take any m.
# The smaller bubble comes from the larger m (and so from a larger batch, or smaller micro-batches).
#
# **Claim 2: only if the micro-batches stay large enough.** Keep the batch and cut it finer. If an action had no fixed
# cost, finer would always be faster. Give every forward a fixed cost of 5 ms (launching kernels, small matrix products
# that fill no GPU) and share out 160 ms of work; backwards take twice that:

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
# The bubble falls all the way, the step does not. If m grows *with* the batch, each step takes longer and each token
# less. For memory, the same question: GPipe keeps the whole batch however finely it is cut, 1F1B keeps p/m of it.
#
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** p = 8, m = 32. What is the bubble, on both bases?
#
# <details><summary>Answer</summary>
#
# 7/39 = 17.9 % of total time, 7/32 = 21.9 % of ideal time. The lines for (8, 32) are in the table above.
#
# </details>
#
# **2.** A colleague replaces GPipe by 1F1B with the same m. The step is no faster. What did he gain, and how does he
# turn it into time?
#
# <details><summary>Answer</summary>
#
# Memory: rank r keeps min(m, p-r) micro-batches instead of m. He can raise m with the batch, or drop recomputation
# of activations if memory had forced it.
#
# </details>
#
# **3.** The model gets twice as many layers, the hidden size and p stay. What happens to the bytes on the pp axis?
#
# <details><summary>Answer</summary>
#
# Nothing: p-1 borders, each crossed by batch · sequence · hidden numbers, twice. The hidden size counts, depth does not. So
# "independent of the model's size", as the note says, holds for depth only.
#
# </details>
#
# **4.** Why does rank 0 of 1F1B begin with p-1 forwards before it alternates? What happens with p-2, and with p?
#
# <details><summary>Answer</summary>
#
# Its first backward can start only when the first micro-batch has come back. With one forward less it waits in every
# round where it could have computed. With one more it keeps one micro-batch more and gains nothing, unless messages
# take long: then the extra ones hide them. The cell below has the numbers.
#
# </details>
#
# **5.** A run hangs in its first step, before any timeout. Rank 1 stands in `send` to rank 2, rank 2 in `send` to rank 1.
# Data on both ranks is fine. What is wrong, and what is the repair?
#
# <details><summary>Answer</summary>
#
# Both send first. Post the send and the receive as one batch (`batch_isend_irecv`), or let one of two neighbours
# receive first.
#
# </details>
#
# The numbers for answer 4: 1F1B where every rank begins with more or fewer forwards.


# %%
def with_more_first_forwards(extra):
    rows = []
    for rank in range(P):
        first = max(0, P - 1 - rank + extra)
        row = [f"{rank}F{mb}" for mb in range(first)]
        for mb in range(M - first):
            row += [f"{rank}F{first + mb}", f"{rank}B{mb}"]
        rows.append(row + [f"{rank}B{mb}" for mb in range(M - first, M)])
    return from_rows(rows)


for extra in (-1, 0, 1, 2):
    schedule = with_more_first_forwards(extra)
    free, slow = (simulate(schedule, Costs.make(f=1, b=2, comm=hop)).makespan for hop in (0, 1))
    print(
        f"{extra:+} forwards at first: step {free:.0f}, {slow:.0f} when a hop takes 1; "
        f"in flight {schedule.peak_in_flight()}"
    )

# %% [markdown]
# ## Sources and what to read next
# - Huang et al. 2018, *GPipe*, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965): section 2 has the schedule and
#   the bubble of total. It also recomputes activations in backward and keeps only the inputs of each stage, which
#   shrinks what is in flight at the price of a second forward.
# - Narayanan et al. 2018, *PipeDream*, [arXiv:1806.03377](https://arxiv.org/abs/1806.03377): where 1F1B comes from. It
#   has no flush: old versions of the weights are kept instead, and gradients are *not* those of one process.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): 1F1B with the flush, as you ran it, and the bubble of ideal
#   in section 2.2. Read its interleaved schedule next: it gives each rank several smaller stages.
#
# Next: lesson 08 takes the bubble itself apart, with several stages a rank and a backward in two halves.
