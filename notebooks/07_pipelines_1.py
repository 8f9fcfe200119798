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
# *45 minutes to read and run, 55 to build.* Give each of four GPUs a quarter of the layers and train. The step takes
# as long as on one GPU with enough memory, because at any moment one GPU computes and three wait. This lesson wins
# most of that time back. You need lesson 00.
#
# Vote first: `"true"`, `"false"` or `"only if ..."`. GPipe and 1F1B are two schedules; the *bubble* is the time in which
# a rank waits.
#
# 1. *1F1B has a smaller bubble than GPipe.*
# 2. *More micro-batches make a step faster.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Four ranks, as slow as one
# Our decoder has four blocks, and each of four ranks stores one as its **stage**. Rank 0 also has the embedding, and
# rank 3 the LM head. Forward (F) runs from rank 0 to rank 3, and backward (B) the other way:
#
# ```
#             rank 0     x     rank 1     x     rank 2     x     rank 3
# tokens --> [stage 0] -----> [stage 1] -----> [stage 2] -----> [stage 3] --> loss
#            [       ] <----- [       ] <----- [       ] <----- [       ]
#                      dL/dx            dL/dx            dL/dx
# ```
#
# We send eight sequences through these stages, one after the other. B takes twice as long as F, because each matrix
# product of the forward needs two products in the backward.

# %%
import torch

from course_lib import comm, ledger, pp
from course_lib.data import batch
from course_lib.launch import run
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
from course_lib.trace import SavedActivations, state_bytes
from course_lib.view import schedule_picture, show_source, timeline

P, M, SEQ = 4, 8, 64
CONFIG = tiny_config(max_seq_len=SEQ)
TOKENS, TARGETS = batch(0, seed=0, batch_size=M, seq_len=SEQ)  # a micro-batch is one sequence
COSTS = Costs.make(f=1, b=2)
schedules = {name: make(name, P, M) for name in ("naive", "gpipe", "1f1b")}
simulated = {name: simulate(schedule, COSTS) for name, schedule in schedules.items()}
schedule_picture(simulated["naive"])

# %% [markdown]
# The dotted area is bubble. Each rank waits three quarters of the time, because it needs the results of other ranks.
# Two ranks can work at the same time only on different sequences. So we split the batch into **micro-batches**, and
# while rank 1 computes the first one, rank 0 starts the second. In which order should a rank run its forwards and
# backwards?
#
# | symbol | meaning |
# |---|---|
# | p | ranks, and stages |
# | m | micro-batches in a step |
# | r | a rank, 0 to p-1 |
# | F, B | forward and backward of one micro-batch on one stage, or their times |
#
# Predict a step with p = 4 and m = 8 in which F takes 20 ms and B 40 ms:

# %%
F, B = 0.020, 0.040  # seconds
print(f"a micro-batch is 1 sequence of {SEQ} tokens; between two stages")
print(f"its activations are 1 x {SEQ} x {CONFIG.hidden} elements of 4 bytes")

# %%
predicted_gpipe_ms = None  # a step, when all forwards come first, then all backwards
predicted_bubble_of_total = None  # GPipe: the fraction of that time in which a rank waits, 0 to 1
predicted_peak_gpipe = None  # micro-batches whose activations rank 0 stores at once
predicted_peak_1f1b = None  # the same, when backwards start as early as they can
predicted_bytes = None  # bytes that all four ranks together send in a step
predicted_ratio = None  # rank 0's saved activations on 4 ranks of 1F1B, divided by one rank's

# %% [markdown]
# ## One micro-batch, there and back
# Two ranks show the mechanism. Autograd does not see the network, so rank 1 makes the received x a *leaf* that requires
# a gradient. After its backward it sends `x.grad` to rank 0, which continues backward from there. Computation is
# *paced*: it is padded by sleep to 20 and 40 ms, because ranks on a laptop share its cores.

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
difference = (torch.cat(list(results)) - one_process).abs().max()
print(f"largest difference from the gradients of one process: {difference:.1e}")
print(ledger.table(results.ledgers))  # of both ranks
timeline(results.traces, conditions=Conditions(PACE), title="One micro-batch through two stages")

# %% [markdown]
# The wide `recv` boxes are waiting: while one rank computes, the other has nothing to do.

# %% [markdown]
# ## A schedule is a list of rows
# Each rank runs a row of actions from left to right. The cell `0F3` means stage 0, forward, micro-batch 3. Rows contain
# no times: an action starts when its rank is free and its inputs have arrived. F needs the F of the previous stage. B
# needs the F of its own stage and the B of the next one.
#
# Some rows never finish. In the next cell, rank 0 alternates F and B from the start, but rank 1 runs two forwards
# first. Rank 1 then waits for the second forward of rank 0, and rank 0 waits for a backward of rank 1:

# %%
waiting = """
0F0 0B0 0F1 0B1
1F0 1F1 1B0 1B1
"""


def typed(text, name="typed"):
    return from_rows([line.split() for line in text.strip().splitlines()], name)


try:
    validate(typed(waiting))
except ValueError as error:
    print(str(error).replace("; ", "\n  "))

# %% [markdown]
# ## GPipe: all forwards, then all backwards
# In GPipe, each rank runs all its forwards first, so no forward of rank 0 waits for a gradient:

# %%
schedule_picture(simulated["gpipe"])

# %% [markdown]
# Rank 0 computes for m(F+B). In between it waits (p-1)F, until its last micro-batch has passed the other stages, and
# (p-1)B, until the first gradient has come back. Every other rank waits as long in total. Therefore
#
# $$\text{step} = (m+p-1)(F+B), \qquad \text{bubble} = (p-1)(F+B)$$
#
# A percentage needs a base, and two are in use:
#
# | base | share | used by |
# |---|---|---|
# | **of total** time, (m+p-1)(F+B) | (p-1)/(m+p-1) | [GPipe](https://arxiv.org/abs/1811.06965), this course |
# | **of ideal** time, m(F+B) | (p-1)/m | Megatron-LM |

# %%
print(f"{'p':>3}{'m':>5}{'of total':>11}{'formula':>9}{'of ideal':>11}{'formula':>9}")
for p, m in ((4, 1), (4, 4), (4, 8), (4, 32), (8, 8), (8, 32)):
    simulation = simulate(make("gpipe", p, m), COSTS)
    print(
        f"{p:3}{m:5}{simulation.bubble_of_total:11.1%}{(p - 1) / (m + p - 1):9.1%}"
        f"{simulation.bubble_of_ideal:11.1%}{(p - 1) / m:9.1%}"
    )

# %% [markdown]
# ## 1F1B: the same bubble, less memory
# The gray steps under each rank count the micro-batches **in flight**. Their forward is done and their backward is
# not, so their activations are stored. Under GPipe their number grows to m on every rank.
#
# One forward, one backward (1F1B) frees activations sooner, because it runs each backward as early as it can. Rank r
# starts with p-1-r forwards and then alternates F and B.

# %%
schedule_picture(simulated["1f1b"])

# %%
print(f"{'':8}{'step':>6}{'bubble of total':>17}{'of ideal':>10}   in flight by rank")
for name, simulation in simulated.items():
    shares = f"{simulation.bubble_of_total:17.1%}{simulation.bubble_of_ideal:10.1%}"
    in_flight = schedules[name].peak_in_flight()
    print(f"{name:8}{simulation.makespan:6.0f}{shares}   {in_flight}")

# %% [markdown]
# Step and bubble are the same as for GPipe, and the idle time has only moved. But rank r has at most p-r micro-batches
# in flight instead of m. In a running notebook, move the slider to m = 16. Rank 0 has 4 in flight:

# %%
from course_lib.view.sliders import schedule_sliders

schedule_sliders("1f1b", P, M)

# %% [markdown]
# > **Box: weight stashing.** PipeDream introduced 1F1B and never drained the pipeline. Each rank updated its weights
# > after every backward, so there was no bubble after the start. To run a backward with the weights of its forward,
# > rank r stored one version of its weights per micro-batch in flight, p-r in all. Rank 0 thus stored as many weights
# > as the full model has. Each gradient then changed weights that had received p-1-r updates since that forward. Megatron-LM and
# > PyTorch drain the pipeline before each optimizer step. They accept the bubble and get the gradients of one
# > process.

# %% [markdown]
# ## The table that grows: three schedules on four ranks
# To run a schedule, the engine takes the next action of its row, waits for the input, computes, and posts one batch of
# messages: send this result, receive the next input.

# %%
from course_lib.pp.engine import Engine

show_source(Engine._do, Engine._forward, Engine._backward)

# %% [markdown]
# You know these steps: `detach().requires_grad_()` makes the leaf, `backward(output, gradient)` continues backward, and
# `x.grad` is sent back. To free the memory of y, the engine saves only its gradient edge. The names with `defer` belong
# to lesson 08.
#
# The loss of a micro-batch is the sum over its tokens, divided by the tokens of the *whole* batch. Only then do the
# gradients of all micro-batches add up to the gradient of the batch.

# %%
MICRO_BATCHES = list(zip(TOKENS.chunk(M), TARGETS.chunk(M), strict=True))


def scaled_loss(logits, targets):
    return loss_sum(logits, targets)[0] / TARGETS.numel()


def flat(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def train(name, p=P):
    mesh = make_mesh(pp=p)
    schedule = make(name, p, M)
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
loss = scaled_loss(model(TOKENS), TARGETS)
loss.backward()
reference = flat(model.parameters())

runs = {name: run(train, name, n=P) for name in schedules}
print(f"{'':10}{'loss':>10}{'|gradient|':>12}{'largest difference':>20}")
print(f"{'reference':10}{loss:10.6f}{reference.norm():12.6f}")
for name, results in runs.items():
    gradients = torch.cat([rank["gradients"] for rank in results])  # in the order of the stages
    difference = (gradients - reference).abs().max().item()
    assert difference < 1e-5
    print(f"{name:10}{results[-1]['loss']:10.6f}{gradients.norm():12.6f}{difference:20.1e}")

# %% [markdown]
# All three schedules give the gradients of one process, up to rounding.
#
# **Sent.** Activations cross p-1 stage boundaries, and gradients of the same size cross them back: 2(p-1) · batch ·
# sequence · hidden elements. The Linux kernel also counts gloo's headers, 144 bytes per message:

# %%
from course_lib.trace.traffic import HEADER_BYTES

activation_bytes = TOKENS.numel() * CONFIG.hidden * 4
for name, results in runs.items():
    formula = pp.wire_bytes(schedules[name], activation_bytes)
    messages = sum(each.calls("pp", "send") for each in results.ledgers)
    print(f"{name:6} formula {formula:,} bytes, {messages} messages;", end=" ")
    if results.kernel_bytes is None:
        print("no count by the kernel here")
    else:
        kernel = sum(map(sum, results.kernel_bytes["pp"]))
        assert formula <= kernel <= formula + HEADER_BYTES * messages
        print(f"kernel {kernel:,} = formula + {kernel - formula:,}")
print(f"your prediction: {predicted_bytes}")

# %% [markdown]
# **Stored.** These are the micro-batches in flight and the bytes saved for backward, both at their peak:

# %%
print(f"{'':6}{'in flight at most':^27}   {'bytes saved for backward, peak':^39}")
names = [f"{name:>9}" for name in runs], [f"{name:>13}" for name in runs]
print(f"{'rank':6}{''.join(names[0])}   {''.join(names[1])}")
for rank in range(P):
    flights = "".join(f"{results[rank]['in flight']:9}" for results in runs.values())
    saved = {name: results[rank]["activations"] for name, results in runs.items()}
    print(f"{rank:<6}{flights}   {''.join(f'{each:13,}' for each in saved.values())}")
    assert saved["gpipe"] == M * saved["naive"]
    assert saved["1f1b"] == (P - rank) * saved["naive"]
print(f"your predictions for rank 0: GPipe {predicted_peak_gpipe}, 1F1B {predicted_peak_1f1b}")

# %% [markdown]
# GPipe stores exactly m times as much as naive, and 1F1B p-r times.
#
# **A pipeline does not reduce the activation memory of rank 0.** Under 1F1B, rank 0 has a p-th of the layers but p
# micro-batches in flight: the activations of *all* layers for one micro-batch. One rank that runs one micro-batch after
# the other stores just as much. Here are 1, 2 and 4 ranks measured, and GPT-3 by formula (without FlashAttention):

# %%
by_ranks = {p: run(train, "1f1b", p, n=p) for p in (1, 2, P)}
for p, results in by_ranks.items():
    one = results[0]
    print(f"p = {p}: rank 0 has state {one['state']:9,}, activations {one['activations']:9,} bytes")
ratio = by_ranks[P][0]["activations"] / by_ranks[1][0]["activations"]
assert 0.9 < ratio <= 1
print(f"4 ranks against 1: {ratio:.2f}; your prediction {predicted_ratio}\n")

L, H, HEADS, S = 96, 12288, 96, 2048  # GPT-3; a micro-batch is one sequence
per_layer = S * H * (34 + 5 * HEADS * S / H)  # bytes; Korthikanti et al. 2022, table 2
for p in (1, 8, 32):
    state = 16 * 12 * L * H**2 / p  # bytes: weights, gradients, AdamW in mixed precision
    in_flight = make("1f1b", p, 64).peak_in_flight()[0]
    activations = in_flight * L / p * per_layer
    print(
        f"GPT-3, p = {p:2}: rank 0 has state {state / 1e9:5,.0f} GB, activations {activations / 1e9:.0f} GB"
    )

# %% [markdown]
# The state of a rank shrinks with p, but the activations of rank 0 do not. To reduce them, shard each layer (lessons
# 05 and 06), recompute, or make micro-batches smaller.
#
# **Waited.** Now we measure a step, with F padded to 20 ms and B to 40 ms:


# %%
def paced_step(name):
    mesh = make_mesh(pp=P)
    schedule = make(name, P, M)
    stages = pp.make_stages(build_model(CONFIG, seed=0), schedule, mesh.pp.rank)
    for one in (make("gpipe", P, M), schedule):  # the first step warms up
        comm.barrier(mesh.pp)
        mesh.trace.clear()
        pp.run(one, stages, mesh, MICRO_BATCHES, scaled_loss)


def faster_of_two(name):
    tries = [run(paced_step, name, n=P, pace=PACE) for _ in range(2)]
    return min(tries, key=lambda results: makespan(pp.measured_rows(results.traces)))


STEP = {"naive": M * P * (F + B), "gpipe": (M + P - 1) * (F + B), "1f1b": (M + P - 1) * (F + B)}
in_seconds = {
    name: simulate(schedule, Costs.make(f=F, b=B)) for name, schedule in schedules.items()
}
paced = {name: faster_of_two(name) for name in schedules}
measured = {name: pp.measured_rows(results.traces) for name, results in paced.items()}

print(f"{'':8}{'step in ms':^32}{'bubble, share of total':^32}")
print(f"{'':8}" + 2 * f"{'formula':>10}{'simulated':>11}{'measured':>11}")
for name in schedules:
    step = f"{1e3 * STEP[name]:10.0f}{1e3 * in_seconds[name].makespan:11.0f}"
    share = f"{predicted_bubble(name, P, M):10.3f}{in_seconds[name].bubble_of_total:11.3f}"
    print(f"{name:8}{step}{1e3 * makespan(measured[name]):11.0f}", end="")
    print(f"{share}{bubble(measured[name])[0]:11.3f}")
print(f"your predictions: GPipe {predicted_gpipe_ms} ms, bubble {predicted_bubble_of_total}")

# %% [markdown]
# The measured steps are longer, because messages take time and a busy machine wakes sleeping ranks late. Here is 1F1B
# as it ran:

# %%
timeline(
    pp.stage_traces(paced["1f1b"].traces),
    overlay=in_seconds["1f1b"].spans,
    conditions=Conditions(PACE),
    title="1F1B on four ranks: measured, and simulated above it",
)

# %% [markdown]
# Here are the rows of the table, each with the largest values of all ranks. Data parallelism is computed: activations
# for a quarter of the batch, bytes by formula.

# %% jupyter={"source_hidden": true}
model = build_model(CONFIG, seed=0)
optimizer = torch.optim.AdamW(model.parameters())
with SavedActivations(model, [TOKENS, TARGETS]) as full:
    loss = scaled_loss(model(TOKENS), TARGETS)
loss.backward()
optimizer.step()
state = state_bytes(model, optimizer)
with SavedActivations(model, [TOKENS, TARGETS]) as quarter:
    scaled_loss(model(TOKENS[: M // P]), TARGETS[: M // P])
all_reduced = int(ledger.wire("all_reduce", state.gradients, P))
rows = {
    "one process, full batch": (state.total, full.peak, 0, 0.0),
    "one process, 8 micro-batches": (state.total, by_ranks[1][0]["activations"], 0, 0.0),
    "data parallel, 4 ranks": (state.total, quarter.peak, all_reduced, 0.0),
}
for name, results in runs.items():
    sent = max(int(each.wire_bytes()) for each in results.ledgers)
    stored = [max(each[kind] for each in results) for kind in ("state", "activations")]
    rows[f"{name}, 4 ranks"] = (*stored, sent, bubble(measured[name])[0])
print(f"{'':30}{'state':>11}{'activations':>13}{'bytes sent':>12}{'bubble of total':>17}")
for name, (total, activations, sent, waits) in rows.items():
    print(f"{name:30}{total:11,}{activations:13,}{sent:12,}{waits:17.1%}")

# %% [markdown]
# Compared with one process, the state falls to less than a third. The price is the bubble.

# %% [markdown]
# ## The same in PyTorch
# `PipelineStage` wraps one rank's stage, and a schedule object runs it:

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
# We gave `Schedule1F1B` the *mean* loss of a micro-batch, and it divides all gradients by m. That is our loss only if
# all micro-batches have the same number of tokens.

# %% [markdown]
# ## Break it and diagnose
# Five runs of 1F1B train on sequences of different lengths. The LM head uses the embedding's weight (*tied*), so rank 0
# and the last rank store a copy each. One run is `"correct"`, and the others have one fault each:
#
# - **forgotten**: each micro-batch's mean loss counts in full, without 1/m
# - **mean of means**: the mean loss is divided by m, as in PyTorch above
# - **tied**: the gradients of the two copies are not added up
# - **lost**: one rank sends back zeros for one micro-batch
#
# For each letter enter the cause, the call that is missing or wrong (`"all_reduce"`, `"send"`, None) and the rank (0
# for *tied*, `"all"`, None for the correct run). Length, angle and "off" compare gradients with the single-process
# reference, "copies apart" compares the two copies.

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
# Differences below 1e-5 are rounding.
#
# - **All ranks off, about the right length**: *mean of means*. Tokens of short sequences count more.
# - **About m times too long**: *forgotten*. AdamW hides it, because it divides a gradient by its usual size.
# - **First and last rank off, copies apart**: *tied*.
# - **Loss right, all ranks before rank r off**: *lost*, at rank r. The last rank is off too, because its tied weight
#   includes the first rank's gradient.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it, and both claims settled
# - **The model fits.** Data parallelism has no bubble.
# - **The batch is small.** Its sequences limit m. With m = p = 4 the bubble is 43 % of the time.
# - **The stages are unequal.** The slowest one sets the speed:

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
# A pipeline sends few messages, only to neighbors, so it can cross the slow links between nodes.
#
# **Claim 1: false.** A common table says of 1F1B: "alternates F and B in the steady state, frees activations early;
# improvement of the bubble: significant". It is right about the memory. The bubble is smaller than the naive one, but
# with equal m GPipe's is just as small. If transfers take time, 1F1B's bubble is even larger, because neighbors that
# alternate wait for each other:

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
# So 1F1B helps indirectly: it has memory for a larger m.
#
# **Claim 2: only if the micro-batches stay large enough.** With a fixed batch, a larger m means smaller micro-batches,
# and each has fixed costs, such as launching kernels. Say 5 ms per forward, beside 160 ms of work to divide:

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
# The step takes 3(m+p-1)(fixed + work/m), which is shortest near this square root.

# %% [markdown]
# ## Cheat-sheet
# For equal stages, free messages and B = 2F:


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
    print("rank 0 under 1F1B: 1/p of the state, activations of all layers for one micro-batch")
    print("loss of a micro-batch: the sum over its tokens / the tokens of the batch\n")


cheat_sheet(4, 8)
cheat_sheet(8, 32)

# %% [markdown]
# ## Exit questions
# **1.** p = 8, m = 32. What is the bubble, on both bases?
#
# <details><summary>Answer</summary>
#
# 7/39 = 17.9 % of total, 7/32 = 21.9 % of ideal.
#
# </details>
#
# **2.** At the same m, what does 1F1B gain over GPipe, and how can that shorten the step?
#
# <details><summary>Answer</summary>
#
# Memory: rank r stores min(m, p-r) micro-batches instead of m. So m can grow, and the bubble shrinks.
#
# </details>
#
# **3.** The model gets twice as many layers. What happens to the bytes on the pp axis?
#
# <details><summary>Answer</summary>
#
# They stay the same, because there are still p-1 stage boundaries.
#
# </details>
#
# **4.** Rank 1 hangs in `send` to rank 2, and rank 2 in `send` to rank 1. How do you fix this?
#
# <details><summary>Answer</summary>
#
# Post both messages as one batch (`batch_isend_irecv`).
#
# </details>
#
# **5.** The activations of rank 0 do not fit. Does 1F1B on twice as many ranks help?
#
# <details><summary>Answer</summary>
#
# No. Rank 0 then has half as many layers, but twice as many micro-batches in flight.
#
# </details>

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/07_pipelines_1.ipynb) take about 55 minutes.

# %% course={"role": "given"}
import math

import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "07-1"}
# ## 07-1 1F1B by hand
# p = 3 ranks, m = 5 micro-batches, stage r on rank r. A forward takes 1, a backward 2, a message no time. Draw the
# three rows on paper, from time 0 on, each action as early as it can start, and fill in the table. A row is a text of
# ten cells, separated by spaces; rank 2 does `2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4`. Type shares as fractions: `1/3`.

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
    # "in flight at most, by rank": None,  # a list of three numbers: micro-batches in flight at once
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
# The check judges what your rows do: `validate` must find them legal, `simulate` (F takes 1, B takes 2) must find a
# step as short as 1F1B's, and no rank may have more micro-batches in flight.


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
# **Sources.** Next: lesson 08.
# - Harlap et al. 2018, [PipeDream](https://arxiv.org/abs/1806.03377): 1F1B and weight stashing.
# - Narayanan et al. 2021, [Megatron-LM](https://arxiv.org/abs/2104.04473), section 2.2: 1F1B as you ran it.
# - Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198), section 4: activation memory.
