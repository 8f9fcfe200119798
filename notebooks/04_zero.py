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
#     lesson: '04'
# ---

# %% [markdown]
# # 04 ZeRO: no rank needs to store everything
#
# *40 minutes to read and run, 70 to build.* Training 7.5 billion parameters with AdamW in mixed precision takes 120 GB,
# even without activations. On 64 GPUs of 80 GB, data parallelism still runs out of memory, because every GPU stores all
# 120 GB. ZeRO splits weights, gradients and optimizer state into shards, one per rank. You need lesson 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *ZeRO-2 sends as much as plain data parallelism.*
# 2. *ZeRO-3 on n ranks divides a rank's memory by n.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## 16 bytes per parameter, on every rank
# The ZeRO paper counts 2 bytes per parameter for the weight, 2 for its gradient and 12 for AdamW: a float32 copy of the
# weight and two moments. (Frameworks that sum gradients in float32 need 2 more.) Data parallelism (DP) replicates all
# 16 bytes. Each stage of ZeRO shards one more part, here over four ranks:
#
# ```
#               weights   gradients   optimizer
#   DP          ########  ########    ################################################   everything on every rank
#   stage 1     ########  ########    ############                                       1/n of the optimizer state
#   stage 2     ########  ##          ############                                       ... and 1/n of the gradients
#   stage 3     ##        ##          ############                                       ... and 1/n of the weights
# ```
#
# | symbol | meaning |
# |---|---|
# | n | ranks |
# | M | micro-batches per step |
#
# A rank that stores a quarter of the optimizer state can update a quarter of the weights. Which gradients does it
# need, and which ranks need the updated weights?
#
# You will train this model on four ranks. Its *root* is everything outside the blocks. What do you predict?

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 16, 4, 4
CONFIG = tiny_config(layers=6, hidden=128, kv_heads=8, ffn=384, max_seq_len=SEQ)

model = build_model(CONFIG)
P = sum(p.numel() for p in model.parameters())
BLOCK = sum(p.nbytes for p in model.blocks[0].parameters())
print(f"{P:,} parameters of 4 bytes, in {CONFIG.layers} blocks of {BLOCK:,} bytes and a root")

# %%
predicted_gb = None  # GB per rank in stage 1: 7.5 billion parameters, mixed precision, 64 ranks
predicted_stage_1 = None  # bytes that a rank sends in stage 1, divided by those of DP
predicted_stage_2_m4 = None  # the same ratio for stage 2, with 4 micro-batches per step
predicted_stage_3 = None  # the same ratio for stage 3, with one micro-batch
predicted_peak = None  # stage 3's peak memory on 4 ranks, divided by DP's

# %% [markdown]
# We recompute table 1 of the ZeRO paper. 1 GB is 1e9 bytes.

# %%
from course_lib.trace import StateBytes

PRINTED = {  # n: stages 1, 2 and 3, as the paper prints them
    1: (120, 120, 120),
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}


def mixed(stage, parameters, n):
    """Bytes that a rank stores: 2 + 2 + 12 per parameter, each sharded from its stage on."""
    return StateBytes(
        parameters=2 * parameters // (n if stage >= 3 else 1),
        gradients=2 * parameters // (n if stage >= 2 else 1),
        optimizer=12 * parameters // (n if stage >= 1 else 1),
    )


print("7.5 billion parameters, GB per rank\nranks   stage 1   stage 2   stage 3")
for n, printed in PRINTED.items():
    ours = [mixed(stage, 7_500_000_000, n).total / 1e9 for stage in (1, 2, 3)]
    print(f"{n:5}" + "".join(f"{gigabytes:10.2f}" for gigabytes in ours))
    assert all(abs(a - b) < 0.06 for a, b in zip(ours, printed, strict=True))
print(f"your prediction for stage 1 on 64: {predicted_gb}")

# %% [markdown]
# With more ranks, stage 1 approaches 4 bytes per parameter and stage 2 approaches 2, but stage 3 has no such floor.
# Which stage fits 70 billion parameters into 80 GB, and on how many ranks? Move the sliders.

# %% jupyter={"source_hidden": true}
from course_lib.view import memory_plot
from course_lib.view.moved import picture_sliders


def memory(ranks, billions):
    states = {
        "DP" if stage == 0 else f"stage {stage}": mixed(stage, billions * 10**9, ranks)
        for stage in range(4)
    }
    fit = [name for name, state in states.items() if state.total <= 80e9]
    note = f"What fits into 80 GB: {', '.join(fit) or 'nothing'}."
    title = f"{billions} billion parameters on {ranks} ranks, mixed precision with AdamW"
    return memory_plot(states, title=title, note=note)


memory(ranks=64, billions=7)

# %%
picture_sliders(
    memory,
    ranks=[64, 1, 2, 4, 8, 16, 32, 128, 256, 512, 1024],
    billions=[7, 1, 13, 30, 70, 175, 405],
)

# %% [markdown]
# ## An all-reduce has two halves
# An all-reduce gives every rank the sum of all gradients. A rank that updates a quarter of the weights needs only a
# quarter of this sum. A reduce-scatter delivers exactly that: it adds the tensors of all ranks and leaves one shard of
# the sum on each rank. An all-gather then gives every rank all shards. We compare these two with an all-reduce:

# %%
import torch

from course_lib import comm, dp, zero
from course_lib.launch import run
from course_lib.mesh import make_mesh


def two_halves():
    mesh = make_mesh()
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**mesh.dp.rank
    shard = comm.reduce_scatter(gradient, mesh.dp)
    gathered = comm.all_gather(shard, mesh.dp)
    halves = mesh.ledger.wire_bytes()
    full = comm.all_reduce(gradient, mesh.dp)
    assert torch.equal(gathered, full)
    return {
        "own": shard.tolist(),
        "gathered": gathered.tolist(),
        "bytes": (int(halves), int(mesh.ledger.wire_bytes() - halves)),
    }


for rank, seen in enumerate(run(two_halves, n=RANKS)):
    print(f"rank {rank}: {seen}")

# %% [markdown]
# The two halves return what the all-reduce returns, and they send the same 24 bytes. So the optimizer step can take
# place between them without more traffic, and the second half then carries weights instead of gradients. This is stage
# 1.
#
# ## Stage 1: each rank updates its shard
# Tensors have different sizes, but the shards must be equal. So we concatenate the parameters of each bucket into one
# *flat parameter*, pad it to a multiple of n, and split it:


# %%
def owners():
    mesh = make_mesh()
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    names = {p: name for name, p in layer.named_parameters()}
    flat = zero.FlatParameter(list(layer.parameters()), mesh.dp, "all")
    own = [
        f"{names[p]}[{begin}:{begin + len(values)}]"
        for p, begin, values in flat.parameter_slices(flat.shard.detach())
    ]
    return f"{flat.elements} elements, padded to {len(flat.full_F)}; mine: {', '.join(own)}"


for rank, mine in enumerate(run(owners, n=RANKS)):
    print(f"rank {rank}: {mine}")

# %% [markdown]
# A shard may begin or end inside a tensor. AdamW still computes the right update, because it treats every element
# alike. In the code, `full_F` is the full flat parameter and `shard_f` one rank's shard. After backward, `finish`
# reduce-scatters the gradients. After the optimizer step, `refresh` gathers the weights:

# %%
from course_lib.view import show_source

show_source(zero.Zero1.finish, zero.Zero1.refresh)
print()
show_source(zero.FlatParameter.start_gather, zero.FlatParameter.start_reduce)

# %% [markdown]
# ## Stage 2: gradients are sent during backward
# Stage 1 stores all gradients until backward ends. Stage 2 reduce-scatters a bucket as soon as backward has filled it,
# and then frees it. Autograd calls `_ready` when it has computed a gradient, and `collect` copies it into its bucket:

# %%
show_source(zero.Zero2._ready, zero.Zero2._send_next, zero.Zero2.accumulate)

# %% [markdown]
# Freeing the buckets has a price: the next micro-batch finds no full gradient to add to. So *every* micro-batch
# reduce-scatters its gradients, and the sum accumulates in the shard.
#
# ## Stage 3: one block's weights at a time
# A block needs its weights in its forward and in its backward. Stage 3 gathers them before each and frees them
# afterwards. While one block computes, the gather of the next one already runs (*prefetch*). Parameters that are
# gathered together are a *unit*: here each block, and the root. The code shows the last two rows of this table:
#
# | event | what happens |
# |---|---|
# | forward of a unit begins | wait for its weights; start to gather the next unit |
# | forward ends | free the weights, if `reshard_after_forward` says so |
# | backward begins | wait for its weights, gathered again; start to gather the unit before |
# | backward ends | free the weights; start to reduce-scatter the gradients |

# %%
show_source(zero.Zero3._before_backward, zero.Zero3._after_backward)

# %% [markdown]
# By default, our `Zero3` frees all units after forward except the root and the last block, because backward needs these
# two first. A unit that stays gathered saves one of its two gathers.
#
# ## The same losses, different bytes
# We train four steps in each way. Losses and weights must agree up to rounding. Here everything is float32: 4 bytes per
# weight, 4 per gradient and 8 for the moments.

# %% jupyter={"source_hidden": true}
# Train for four steps; measure what a rank sends and stores.
from course_lib.data import batch
from course_lib.trace import PeakLiveBytes, SavedActivations, state_bytes

BUCKET = BLOCK  # bytes: about a block


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def make(way, model, axis, **options):
    """Return what sends the gradients and what steps; with ZeRO this is one object."""
    if way == "dp":
        return dp.Overlapped(model.parameters(), axis, BUCKET), adam(model.parameters())
    if way == "zero 3":
        z = zero.Zero3(model, list(model.blocks), axis, adam, **options)
    else:
        kind = zero.Zero1 if way == "zero 1" else zero.Zero2
        z = kind(model.parameters(), axis, adam, BUCKET)
    return z, z


def state_of(model, optimizer):
    """Return the bytes of parameters, shards and optimizer between two steps, without gradients."""
    if not isinstance(optimizer, zero.Sharded):
        return state_bytes(model, optimizer).total
    shards = [flat.shard for flat in optimizer.every_flat]
    return state_bytes([model, *shards], optimizer.optimizer).total


def weights_of(model, optimizer):
    if isinstance(optimizer, zero.Zero3):
        with optimizer.gathered():
            return torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rows(step, mesh):
    share = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
    return batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, **share)


def train(way):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync, optimizer = make(way, model, mesh.dp)
    buffers = getattr(optimizer, "buffers", [])  # what stage 3 gathers into
    losses, meters = [], []  # (peak, bytes alive over time) of each step
    for step in range(STEPS):
        optimizer.zero_grad()
        state = state_of(model, optimizer)
        mesh.ledger.clear()  # count the last step only
        with (
            mesh.kernel_bytes() as kernel,
            PeakLiveBytes(buffers) as live,
            SavedActivations(model, buffers) as saved,
        ):
            total = dp.train_step(model.loss_sum, [rows(step, mesh)], sync, optimizer)
        losses.append(total.item())
        meters.append((live.peak, list(live.timeline)))
    sent = mesh.ledger.wire_bytes()  # before weights_of gathers once more
    optimizer.zero_grad()
    peak, line = min(meters[1:])  # the backend may free a little late
    return {
        "losses": losses,
        "sent": sent,
        "kernel": None if kernel.by_axis is None else kernel.by_axis.get("dp", 0),
        "weights": weights_of(model, optimizer),
        "state": state_of(model, optimizer),
        "activations": saved.peak,
        "peak": state + peak,
        "line": [(when, state + size) for when, size in line],
        "elements": [flat.elements for flat in getattr(optimizer, "flats", [])],
    }


# %%
STAGE = {"zero 1": 1, "zero 2": 2, "zero 3": 3}
WAYS = ["dp", *STAGE]
runs = {way: run(train, way, n=RANKS) for way in WAYS}


def sent_formula(way, micro_batches=1):
    if way == "dp":
        return dp.wire_bytes(4 * P, RANKS)
    elements = runs[way][0]["elements"]
    once = (0, CONFIG.layers) if way == "zero 3" else ()  # the root and the last block
    return zero.wire_bytes(
        STAGE[way], elements, RANKS, micro_batches=micro_batches, gathered_once=once
    )


def state_formula(way):
    if way == "dp":
        return 12 * P
    return zero.state_bytes(STAGE[way], runs[way][0]["elements"], RANKS)


print(f"{'':8}{'last loss':>10}{'sent: formula':>15}{'kernel':>12}{'of DP':>7}", end="")
print(f"{'state':>13}{'formula':>12}")
base = runs["dp"]
for way, result in runs.items():
    one, sent = result[0], sent_formula(way)
    kernel = "no count" if one["kernel"] is None else f"{one['kernel']:,}"
    print(f"{way:8}{one['losses'][-1]:10.4f}{int(sent):15,}{kernel:>12}", end="")
    print(f"{float(sent / sent_formula('dp')):7.2f}{one['state']:13,}{state_formula(way):12,}")
    assert one["sent"] == sent
    assert one["kernel"] is None or sent <= one["kernel"] <= 1.02 * sent
    assert 0 <= one["state"] - state_formula(way) < 1000
    for rank, other in enumerate(result):
        assert torch.allclose(other["weights"], base[0]["weights"], atol=1e-4), rank
        assert (
            max(abs(a - b) for a, b in zip(other["losses"], base[0]["losses"], strict=True)) < 1e-5
        )
print(f"\nyour predictions: stage 1 {predicted_stage_1}, stage 3 {predicted_stage_3}")

# %% [markdown]
# The kernel counts up to 0.2 % more than the formula, because it also sees headers and control messages. Stage 3's two
# gathers and one reduce-scatter would be 1.5 times the bytes of DP. The factor is only 1.40, because the root and the
# last block are gathered once. Stages 1 and 2 differ only during a step:

# %%
from course_lib.view import live_plot

picture = live_plot(
    {way: runs[way][0]["line"] for way in WAYS},
    title="Memory of rank 0 during one step",
    note="State between steps is included.",
    stretched=True,
)
picture

# %% [markdown]
# Each line begins at the stored state. During backward, DP adds all gradients and a copy of them in the buckets that it
# sends. (PyTorch's DDP stores this copy too, unless `gradient_as_bucket_view=True`.) Stage 1 needs no copy, and stage 2
# adds less, because it frees its buckets. The small peaks of stage 3 are blocks that are gathered and freed. The peaks
# in numbers:

# %%
for way in WAYS:
    one = runs[way][0]
    print(f"{way:8}peak {one['peak']:12,} bytes,{one['peak'] / base[0]['peak']:5.2f} of DP")
    if way in STAGE:
        moving = zero.peak_bytes(STAGE[way], one["elements"], RANKS)
        assert moving <= one["peak"] - one["state"] <= 1.25 * (moving + one["activations"])
print(f"your prediction for stage 3: {predicted_peak}")

# %% [markdown]
# The peak of stage 3 is more than a quarter of DP's. While a block's gradient is reduced, that gradient and the next
# blocks are in memory in full, and activations are not sharded.
#
# ## Micro-batches, and what Llama 3 does
# DP and stage 1 communicate once per step, stages 2 and 3 in every micro-batch:


# %%
def bytes_sent(counts):
    """Return the bytes that a rank sends, by way and number of micro-batches."""
    mesh, sent = make_mesh(), {}
    for way in WAYS:
        model = build_model(CONFIG, seed=0)
        sync, optimizer = make(way, model, mesh.dp)
        for count in counts:
            split = list(zip(*(part.chunk(count) for part in rows(0, mesh)), strict=True))
            mesh.ledger.clear()
            dp.train_step(model.loss_sum, split, sync, optimizer)
            sent[way, count] = mesh.ledger.wire_bytes()
    return sent


sent = run(bytes_sent, (1, 2, 4), n=RANKS)[0]
print(f"{'micro-batches':15}" + "".join(f"{way:>9}" for way in WAYS) + "   bytes sent, DP = 1")
for count in (1, 2, 4):
    shares = [float(sent[way, count] / sent["dp", 1]) for way in WAYS]
    print(f"{count:<15}" + "".join(f"{share:9.2f}" for share in shares))
    assert all(sent[way, count] == sent_formula(way, count) for way in WAYS)
print(f"your prediction for stage 2 with 4: {predicted_stage_2_m4}")

# %% [markdown]
# Stage 2 sends (M+1)/2 times the bytes of DP, and stage 3 up to 3M/2 times. A pipeline (lesson 07) needs many
# micro-batches. Hence a common claim: *ZeRO-2 and ZeRO-3 never go with a pipeline.* That is not true. Llama 3 combined
# a pipeline with sharded optimizer state, gradients and weights, but did not reshard the weights after forward.
# torchtitan does the same by default, and PyTorch's pipelines reduce gradients once per step. What would each choice
# cost Llama 3 405B on 16,384 GPUs with 50 GB/s each?

# %%
weights = 405e9 / (8 * 16)  # per rank: tp = 8, pp = 16
gathered, gradients = 2 * weights / 1e9, 4 * weights / 1e9  # GB: bfloat16, summed in float32
dp_ranks, micro_batches, link = 128, 2048 // 128, 50  # micro-batches of one sequence; GB/s
choices = {  # gathers, reduce-scatters per step, GB stored besides the shards
    "reshard after forward": (2 * micro_batches, micro_batches, 0),
    "keep until the backward": (micro_batches, micro_batches, gathered),
    "keep for the step": (1, 1, gathered + gradients),
}
print(f"{'weights and gradients':25}{'GB sent':>8}{'seconds':>9}{'GB stored':>11}")
for choice, (gathers, reduces, stored) in choices.items():
    sent_gb = (dp_ranks - 1) / dp_ranks * (gathers * gathered + reduces * gradients)
    print(f"{choice:25}{sent_gb:8.0f}{sent_gb / link:9.1f}{stored:11.1f}")
compute = 6 * 405e9 * 2**24 / (16_384 * 400e12)  # FLOPs of 16 M tokens at 400 TFLOP/s per GPU
print(f"the step itself: {compute:.1f} s")

# %% [markdown]
# In the first two rows the messages take longer than the step, or nearly as long. In the last row they take 0.4 s, but
# full weights and gradients need 19 GB. Stage 1 sends and stores as much, and it is the highest stage that our
# `compose` package accepts with a pipeline.
#
# ## How much communication is hidden
# In the next run a block takes 15 ms forward and 30 ms backward, padded by sleep. An emulated link carries 100 MB/s.
# The *exposed* time is when a rank waits for messages and computes nothing.

# %% jupyter={"source_hidden": true}
# Measure a step of each way with padded compute and emulated links.
from course_lib.mesh import Conditions, Link, Links
from course_lib.trace.blocks import MeasuredBlocks
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

PACE = {"F": 0.015, "B": 0.030}
LINK = Link(alpha=0.0002, beta=100e6)
NETWORK = Links(inside=LINK, between=LINK)


def one_step(way, **options):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync, optimizer = make(way, model, mesh.dp, **options)
    with MeasuredBlocks(model.blocks, mesh.trace, mesh.conditions.pace):
        for step in range(2):  # the first step warms up; the second stays in the trace
            comm.barrier(mesh.dp)
            mesh.trace.clear()
            dp.train_step(model.loss_sum, [rows(step, mesh)], sync, optimizer)


def without_prefetch():
    one_step("zero 3", prefetch=False)


def exposed_by(traces):
    """Seconds per rank, without the two control messages of a step (token count and loss)."""
    spans, _ = read(traces)
    return summarize([span for span in spans if span.label != "control"]).exposed


slow = {"pace": PACE, "links": NETWORK}
paced = {way: run(one_step, way, n=RANKS, **slow) for way in WAYS}
paced["no prefetch"] = run(without_prefetch, n=RANKS, **slow)
exposed = {way: exposed_by(result.traces) for way, result in paced.items()}
print("exposed:", ", ".join(f"{way} {1e3 * seconds:.0f} ms" for way, seconds in exposed.items()))

# %%
timeline(
    paced["zero 3"].traces,
    title="Stage 3: the next block is gathered while this one computes",
    conditions=Conditions(PACE, NETWORK),
)

# %% [markdown]
# While a block computes, the next one is gathered. Only the first gathers and the last reduce-scatters have nothing to
# hide behind. Without prefetch every gather adds to the wait. Our stage 1 sends fewer bytes but waits longer,
# because it sends all of them after backward. Megatron-LM's stage 1 can hide them behind backward and the next forward.
#
# ## The same in PyTorch
# `fully_shard`, known as FSDP2, is stage 3 with one shard per tensor. It averages gradients over the ranks, so each
# rank computes its own mean loss.

# %%
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def in_pytorch():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    model = build_model(CONFIG, seed=0)
    devices = init_device_mesh("cpu", (n,))
    for block in model.blocks:
        fully_shard(block, mesh=devices, reshard_after_forward=block is not model.blocks[-1])
    fully_shard(model, mesh=devices)
    optimizer = adam(model.parameters())
    for step in range(STEPS):
        share = {"dp_rank": rank, "dp_size": n}
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, **share)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    state = state_bytes(model, optimizer).total
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return weights, state


theirs = run(in_pytorch, n=RANKS, init=False)
apart = max((weights - runs["zero 3"][0]["weights"]).abs().max().item() for weights, _ in theirs)
assert apart < 1e-4
print(f"weights differ from ours by {apart:.1e}")
print(f"state stored by ranks, bytes: {[state for _, state in theirs]}")
print(f"ours:                         {[one['state'] for one in runs['zero 3']]}")

# %% [markdown]
# The weights agree, and the states differ by less than 200 bytes. The deep dive is
# [04b FSDP in practice](04b_fsdp_in_practice.ipynb).
#
# ## Break it and diagnose
# One of the six runs is correct, and five are faulty:
#
# - **twice**: every rank divides its gradients by the number of ranks a second time
# - **double**: the squared gradient norm is summed over the ranks, although every rank already has the full norm
# - **shifted**: one rank puts the padding in front, so that its gradient is shifted by one element
# - **late**: every rank gathers *before* its optimizer steps
# - **stale**: one rank gathers into a copy that its model never uses
#
# The grid on the right compares the weights after one step with those of one process: a row per rank, a column per
# owner of a shard, `x` where they differ. The gradient norm is divided by that of one process. For each run, name the
# cause, the collective that shows it (`"reduce_scatter"`, `"all_gather"`, or `"all_reduce"` for a norm), and the rank,
# or `"all"`.

# %%
SEED = 4
diagnosis = {  # such as ("late", "all_gather", "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
    "F": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "twice": ("reduce_scatter", "all"),
    "double": ("all_reduce", "all"),
    "shifted": ("reduce_scatter", range(RANKS)),
    "late": ("all_gather", "all"),
    "stale": ("all_gather", range(RANKS)),
}
lab = Lab("04", SEED, FAULTS)
CLIP = 2.0  # the first gradient is longer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def a_step(z, lab_run, rank):
    """The step after backward, with the fault."""
    z.finish()
    (flat,) = z.flats
    if lab_run.has("twice"):
        flat.shard.grad /= z.axis.size
    if lab_run.has("shifted", rank):
        flat.shard.grad = flat.shard.grad.roll(1)
    held = z.held_gradients()
    norm = comm.grad_norm(held, [z.axis])
    if lab_run.has("double"):
        norm = (norm**2 * z.axis.size).sqrt()  # every rank adds the full norm
    comm.clip_grad_norm(held, [z.axis], CLIP, norm)
    if lab_run.has("late"):
        z.refresh()
        z.optimizer.step()
        return norm.item()
    before = flat.full_F.clone()
    z.step()
    if lab_run.has("stale", rank):
        own = flat.shard.detach().clone()
        flat.full_F.copy_(before)
        flat.shard.data.copy_(own)
    return norm.item()


def trained(lab_run):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    z = zero.Zero1(model.parameters(), mesh.dp, sgd)  # one flat for all
    losses, norms = [], []
    for step in range(8):
        z.zero_grad()
        mesh.ledger.clear()
        total, count = model.loss_sum(*rows(step, mesh))
        (total / (count * mesh.dp.size)).backward()
        norms.append(a_step(z, lab_run, mesh.rank))
        losses.append((total / count).item())
        if step == 0:
            first = z.flats[0].full_F[: z.flats[0].elements].clone()
    return {"losses": losses, "norm": norms[0], "first": first}


def wrong_owners(weights, right):
    shard = zero.padded(len(right), RANKS) // RANKS
    return "".join(
        "x" if (a - b).abs().max() > 1e-6 else "."
        for a, b in zip(weights.split(shard), right.split(shard), strict=True)
    )


correct = next(lab_run for lab_run in lab if lab_run.has("correct"))
truth = run(trained, correct, n=1)[0]
print("   loss first and last   gradient norm   reduce_scatter    all_gather   owners 0123")
for lab_run in lab:
    result = run(trained, lab_run, n=RANKS)
    first, last = (sum(one["losses"][at] for one in result) / RANKS for at in (0, -1))
    own = result.ledgers[0]
    sent = [int(own.wire_bytes(op=op)) for op in ("reduce_scatter", "all_gather")]
    norm = result[0]["norm"] / truth["norm"]
    line = f"{first:12.3f}{last:9.3f}{norm:12.2f} of 1{sent[0]:17,}{sent[1]:14,}"
    print(f"{lab_run.letter}{line}", end="")
    for rank, one in enumerate(result):
        line = f"rank {rank}: {wrong_owners(one['first'], truth['first'])}"
        print(f"   {line}" if rank == 0 else f"{'':69}{line}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **A column is wrong.** All ranks agree, so one owner made a wrong step from a wrong gradient: *shifted*.
# - **A row is wrong except for its own column.** This rank's model never received the gathered weights: *stale*.
# - **Only the diagonal is right.** No rank has the new weights of the others: *late*.
# - **Everything is wrong, and all ranks agree.** The norm decides: 1/n of the right one is *twice*, √n times is
#   *double*.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **The model fits.** Stage 1 sends no extra bytes, but stages 2 and 3 save memory that you do not need.
# - **The link is slow and the batch small.** Stage 3 gathers as many bytes for one token as for a million.
# - **Activations fill the memory.** These stages do not shard them; lessons 05, 06 and 09 do.
#
# **Claim 1: only if a step has one micro-batch** and all messages have the same precision. With M micro-batches,
# stage 2 sends (M+1)/2 times as much.
#
# **Claim 2: false.** Only the state between steps is divided by n. Activations and gathered blocks are not.

# %%
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# **The table that grows.** Exposed time is from the padded step.

# %%
heads = f"{'state':>12}{'activations':>13}{'peak':>12}{'bytes sent':>12}{'exposed':>10}"
print(f"{'per rank':8}{heads}")
for way, result in runs.items():
    one, sent = result[0], int(result[0]["sent"])
    print(f"{way:8}{one['state']:12,}{one['activations']:13,}{one['peak']:12,}{sent:12,}", end="")
    print(f"{1e3 * exposed[way]:7.0f} ms")

# %% [markdown]
# **Cheat-sheet.** A parameter takes 16 bytes, all messages are in bfloat16, and every unit is gathered twice.


# %%
def cheat_sheet(billions, n):
    parameters, counts = billions * 10**9, (1, 8)
    sent_words = {
        0: "gradients: all-reduce, once",
        1: "gradients: reduce-scatter, once; weights: all-gather, once",
        2: "the reduce-scatter in every micro-batch",
        3: "gather, gather, reduce-scatter in every micro-batch",
    }
    plain = dp.wire_bytes(2 * parameters, n)
    print(f"{billions} billion parameters on {n} ranks; GB stored, and GB sent for M = 1 and M = 8")
    print(f"{'':9}{'stored':>8}{'M = 1':>9}{'of DP':>7}{'M = 8':>9}{'of DP':>7}")
    for stage, words in sent_words.items():
        line = (
            f"{f'stage {stage}' if stage else 'DP':9}{mixed(stage, parameters, n).total / 1e9:8.2f}"
        )
        for count in counts:
            sent = plain
            if stage:  # the formula is for 4 bytes per element; here each element has 2
                sent = zero.wire_bytes(stage, [parameters], n, micro_batches=count) / 2
            line += f"{float(sent) / 1e9:9.1f}{float(sent / plain):7.2f}"
        print(f"{line}   {words}")


cheat_sheet(billions=7, n=64)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/04_zero.ipynb) take 70 minutes.

# %% course={"role": "given"}
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import comm

# %% [markdown] course={"ex": "04-1"}
# ## 04-1 Shards, memory and traffic, by hand
# Ten minutes, on paper; no code.
#
# **Shards.** A model has three tensors: a of 5 elements, b of 2 and c of 3. They are concatenated in this order and
# sharded over four ranks.
#
# - `flat`: places in the flat tensor, padding included
# - `owners`: which tensors the shard of rank 0, 1, 2 and 3 takes elements from, such as `"a b bc abc"`
# - `padding`: places of padding in the shard of each rank, such as `[1, 0, 0, 1]`
#
# **Memory.** A model has 2 billion parameters and is trained in mixed precision with AdamW. Each parameter has 2 bytes
# of weight, 2 of gradient and 12 of optimizer state. Activations do not count. Each answer is a list: [DP, stage 1,
# stage 2, stage 3].
#
# - `kept, GB`: GB that a rank stores, on 8 ranks
# - `kept, 1000 ranks`: bytes per parameter that a rank stores, on 1000 ranks
#
# **Traffic.** The same model is trained on 8 ranks. Weights and gradients are sent in 2 bytes each, and stage 3 frees
# all weights between forward and backward.
#
# - `sent, GB`: GB that a rank sends in a step with one micro-batch
# - `sent, 4 micro-batches`: the same with four micro-batches

# %% course={"ex": "04-1", "role": "answer"}
# BEGIN SOLUTION
table = {
    "flat": 12,
    "owners": "a ab bc c",
    "padding": [0, 0, 0, 2],
    "kept, GB": [32, 11, 7.5, 4],
    "kept, 1000 ranks": [16, 4.012, 2.014, 0.016],
    "sent, GB": [7, 7, 7, 10.5],
    "sent, 4 micro-batches": [7, 7, 17.5, 42],
}
# STUB
# table = {
#     "flat": None,
#     "owners": None,  # four words in one text
#     "padding": None,  # four numbers, such as [1, 0, 0, 1]
#     "kept, GB": None,  # DP, stage 1, stage 2, stage 3
#     "kept, 1000 ranks": None,
#     "sent, GB": None,
#     "sent, 4 micro-batches": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "04-1", "role": "answer"}
# - `aaa aab bcc c..`: each shard has three places, and the last two places are padding.
# - Stage 1 stores 4 + 12/8 bytes per parameter, stage 2 2 + 14/8, stage 3 16/8. With 1000 ranks almost only the
#   replicated bytes are left in stages 1 and 2.
# - One reduce-scatter or all-gather of the 4 GB sends 7/8 of them, 3.5 GB. DP and stage 1 make two per step, stage 2
#   makes M + 1, and stage 3 makes 3M.

# %% course={"ex": "04-1", "role": "check"}
from course_lib.grading import check

check("04-1", table)

# %% [markdown] course={"ex": "04-2"}
# ## 04-2 The bounds of a shard
# A flat tensor of `elements` is padded at its end until `n` equal shards fit, with as little padding as possible. Which
# *elements* does a rank own? Write the one line that is missing. A shard may hold only padding: then begin and end are
# both `elements`.


# %% course={"ex": "04-2", "role": "answer"}
def bounds(elements, n, rank):
    """Return (begin, end): this rank owns the elements flat[begin:end], without padding."""
    shard = -(-elements // n)  # places in a shard: rounded up
    # BEGIN SOLUTION
    return min(rank * shard, elements), min((rank + 1) * shard, elements)
    # END SOLUTION


# %% course={"ex": "04-2", "role": "check"}
from course_lib.grading import check

check("04-2", bounds)

# %% [markdown] course={"ex": "04-3"}
# ## 04-3 A step of stage 1
# Every rank has the same flat weights [P], and its own flat gradients [P]. Write the step: each rank updates its own
# shard with the sum of all ranks' gradients, and every rank gets all new weights. P need not be a multiple of n, so pad
# with zeros at the end: `F.pad(x, (0, k))` appends k zeros to x.
#
# `update` is the optimizer. It stores a moment as long as its shard, and it treats every element alike.
#
# The check compares the weights after three steps on one to four ranks; in one case a rank has only padding. It also
# checks that `update` is called once per step with one shard, and that the bytes sent are those of one all-reduce of
# the padded gradients. Do not write to `weights` and `gradients`.


# %% course={"ex": "04-3", "role": "answer"}
def sharded_step(weights, gradients, update, axis):
    """The new weights [P], the same on every rank of ``axis``.

    ``update(shard, gradient)`` returns the new shard; call it once, with 1-D tensors of equal
    length. ``comm.reduce_scatter(x, axis)`` gives this rank's shard of the sum of all x, and
    ``comm.all_gather(x, axis)`` all ranks' x in rank order.
    """
    # BEGIN SOLUTION
    pad = -len(weights) % axis.size
    gradient = comm.reduce_scatter(F.pad(gradients, (0, pad)), axis)
    shard = F.pad(weights, (0, pad)).chunk(axis.size)[axis.rank]
    return comm.all_gather(update(shard, gradient), axis)[: len(weights)]
    # END SOLUTION


# %% course={"ex": "04-3", "role": "check"}
from course_lib.grading import check

check("04-3", sharded_step)

# %% [markdown] course={"ex": "04-4"}
# ## 04-4 Gradients are sent while backward runs
# The class below is stage 2 without its two most important methods. `shards[k]` is this rank's shard of bucket k, and
# the optimizer updates only these shards.
#
# - Autograd calls `ready` when a parameter's gradient of one backward is computed. If the bucket is now full,
#   reduce-scatter it, add this rank's shard of the sum to `shards[k].grad`, and free the full gradients:
#   `p.grad = None`.
# - A step may have several micro-batches, each with a backward of its own. Every backward sends its buckets.
# - `step` updates the shards, gathers them into all parameters, and resets the shards' gradients.
#
# Each loss is already divided by the global number of tokens, so sum the gradients. Backward fills the buckets in the
# same order on all ranks, and `ready` may wait until its reduce-scatter has finished.
#
# The check trains two models in turn, on one to four ranks. It compares the shards' gradients, the weights after two
# steps, and the calls and bytes. The gradients of all buckets must never be in memory at the same time.


# %% course={"ex": "04-4", "role": "answer"}
class Zero2:
    """Stage 2 over ``axis``. ``buckets`` are lists of parameters, the first to be complete first.

    A step: a backward for each micro-batch, then ``step()``.
    """

    def __init__(self, buckets, axis, make_optimizer):
        self.buckets, self.axis = buckets, axis
        self.bucket_of = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        self.missing = [set(bucket) for bucket in buckets]  # parameters without a gradient yet
        self.shards = [
            nn.Parameter(self.padded(bucket).chunk(axis.size)[axis.rank].clone())
            for bucket in buckets
        ]
        self.optimizer = make_optimizer(self.shards)
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def padded(self, tensors):
        """Return all elements of ``tensors`` in one flat tensor, padded with zeros to n shards."""
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % self.axis.size))

    def ready(self, parameter):
        """``parameter.grad`` is complete for this backward; ``bucket_of`` says where it belongs."""
        # BEGIN SOLUTION
        k = self.bucket_of[parameter]
        bucket, shard = self.buckets[k], self.shards[k]
        self.missing[k].discard(parameter)
        if self.missing[k]:
            return
        piece = comm.reduce_scatter(self.padded([p.grad for p in bucket]), self.axis)
        shard.grad = piece if shard.grad is None else shard.grad + piece
        for p in bucket:
            p.grad = None
        self.missing[k] = set(bucket)
        # END SOLUTION

    def step(self):
        """Update this rank's shards, then give every parameter its new value, on all ranks.

        A parameter gets new values by ``p.data = values.view_as(p)``.
        """
        # BEGIN SOLUTION
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            full = comm.all_gather(shard, self.axis)
            sizes = [p.numel() for p in bucket]
            for p, values in zip(bucket, full[: sum(sizes)].split(sizes), strict=True):
                p.data = values.view_as(p)
        # END SOLUTION


# %% course={"ex": "04-4", "role": "check"}
from course_lib.grading import check

check("04-4", Zero2)

# %% [markdown] course={"ex": "04-5"}
# ## 04-5 Gather, use, free, in raw PyTorch
# Run forward and backward of a chain of layers in stage 3, with `torch.distributed` alone. `course_lib` raises an error
# here, and autograd is not needed. The default process group exists already. A layer is y = tanh(x @ W), with W [d, d];
# the two functions below compute it and its backward. A rank has only its *shard* of each W: W is flattened, padded
# with zeros at the end, and split into n equal shards.
#
# Gather a layer's weights before its forward and again before its backward, and free them after each. Of each layer's
# dW, sum over the ranks and store only this rank's shard. (The last layer may stay gathered from forward to backward.)
#
# The check compares y, the gradients and the bytes on one to four ranks. Do not overwrite an argument. The weights of
# all layers must never be in memory at the same time.
#
# You can use `dist.all_gather(parts, shard)` and `dist.reduce_scatter(mine, parts)`, where `parts` is a list of n
# tensors. Both fill their first argument.


# %% course={"ex": "04-5", "role": "given"}
def layer_forward(x, W):
    """y = tanh(x @ W)."""
    return torch.tanh(x @ W)


def layer_backward(x, y, W, dy):
    """(dx, dW) of the layer, from dy."""
    dz = dy * (1 - y * y)
    return dz @ W.T, x.T @ dz


# %% course={"ex": "04-5", "role": "answer"}
def sharded_pass(shards, x, dy):
    """Return (y, gradients) for this rank's rows x [rows, d]; dy [rows, d] is the gradient of y.

    ``shards`` lists this rank's shard of each layer's weight, first layer first, all of one length.
    ``gradients`` lists this rank's shard of each layer's dW, summed over the ranks, likewise.
    """
    # BEGIN SOLUTION
    n, d = dist.get_world_size(), x.shape[1]

    def gather(shard):
        parts = [torch.empty_like(shard) for _ in range(n)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)[: d * d].view(d, d)

    inputs = [x]
    for shard in shards:
        inputs.append(layer_forward(inputs[-1], gather(shard)))
    gradients = []
    for layer in reversed(range(len(shards))):
        shard = shards[layer]
        dy, dW = layer_backward(inputs[layer], inputs[layer + 1], gather(shard), dy)
        mine = torch.empty_like(shard)
        flat = F.pad(dW.flatten(), (0, n * len(shard) - d * d))
        dist.reduce_scatter(mine, list(flat.chunk(n)))
        gradients.append(mine)
    return inputs[-1], gradients[::-1]
    # END SOLUTION


# %% course={"ex": "04-5", "role": "check"}
from course_lib.grading import check

check("04-5", sharded_pass)

# %% [markdown]
# **Exit questions.** Answer, then unfold.
#
# **1.** You have 13 billion parameters of 16 bytes and 16 ranks of 40 GB. Which stage is the first that fits?
#
# <details><summary>Answer</summary>
# Stage 1 stores 61.75 GB and stage 2 37.4 GB. Stage 2 fits, but leaves only 2.6 GB for activations.
# </details>
#
# **2.** Why does stage 1 send no more than data parallelism?
#
# <details><summary>Answer</summary>
# Both make a reduce-scatter and an all-gather; stage 1 has the optimizer step between them.
# </details>
#
# **3.** Where does the 1.5 of stage 3 come from, and when is it less, or more?
#
# <details><summary>Answer</summary>
# Two gathers and one reduce-scatter are three halves of an all-reduce. It is less when blocks stay gathered, and M
# times as much with M micro-batches.
# </details>
#
# **4.** Stage 2 has the right losses with one micro-batch and wrong ones with four. Where do you look?
#
# <details><summary>Answer</summary>
# Is the shard's gradient replaced instead of added to? Is `p.grad` not freed, so that it is sent again?
# </details>
#
# **5.** One rank's checkpoint is lost. What is lost in stage 3, and what in stage 1?
#
# <details><summary>Answer</summary>
# In stage 3, 1/n of everything. In stage 1, 1/n of the optimizer state; every rank has the weights.
# </details>
#
# **Sources.** Next: lesson 05.
# - Rajbhandari et al. 2019, *ZeRO*: [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), table 1.
# - Llama 3: [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2 and table 4.
