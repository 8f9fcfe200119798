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
# *50 minutes to read and run, 70 to build.* In lesson 03 four ranks held four equal copies of weights, gradients and
# AdamW's moments. Here each copy is split into four shards with one owner each: first the optimizer state, then the
# gradients, then the weights. You count the bytes that each step saves and sends. You need lesson 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *ZeRO-2 sends as much as plain data parallelism.*
# 2. *ZeRO-3 on n ranks divides a rank's memory by n.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# Training in mixed precision with AdamW stores 16 bytes per parameter: 2 of weights and 2 of gradients (bfloat16),
# and 12 of optimizer state: a float32 master copy of the weight and two moments, 4 each. Data parallelism stores all
# of it on every rank.
#
# ```
#               weights   gradients   optimizer
#   DP          ########  ########    ################################################   on every rank
#   stage 1     ########  ########    ############                                       1/n of the optimizer
#   stage 2     ########  ##          ############                                       ... and of the gradients
#   stage 3     ##        ##          ############                                       ... and of the weights
# ```
#
# A rank that owns a quarter of the optimizer's state can update a quarter of the weights. Which gradients does it
# need, and which ranks need the updated weights?

# %% [markdown]
# ## Predict
# The model that you will train on four ranks; its root is embedding, last norm and head. Fill in what you can.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 16, 4, 4
CONFIG = tiny_config(layers=6, hidden=128, kv_heads=8, ffn=384, max_seq_len=SEQ)

model = build_model(CONFIG)
P = sum(p.numel() for p in model.parameters())
BLOCK = sum(p.nbytes for p in model.blocks[0].parameters())
print(f"{P:,} parameters of 4 bytes, in {CONFIG.layers} blocks of {BLOCK:,} bytes and a root")

# %%
predicted_gb = None  # GB a rank keeps in stage 1: 7.5 billion parameters, mixed precision, 64 ranks
predicted_stage_1 = None  # bytes that a rank sends in stage 1, divided by those of DP
predicted_stage_2_m4 = None  # the same of stage 2, when the step has 4 micro-batches
predicted_stage_3 = None  # the same of stage 3, one micro-batch
predicted_peak = None  # stage 3's fullest moment on 4 ranks, divided by DP's

# %% [markdown]
# ## The paper's table
# Table 1 of the ZeRO paper, computed anew. "GB" is 1e9 bytes.

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
    """What a rank keeps: 2 + 2 + 12 bytes a parameter, each cut from its stage on."""
    return StateBytes(
        parameters=2 * parameters // (n if stage >= 3 else 1),
        gradients=2 * parameters // (n if stage >= 2 else 1),
        optimizer=12 * parameters // (n if stage >= 1 else 1),
    )


print("7.5 billion parameters, GB a rank\nranks   stage 1   stage 2   stage 3")
for n, printed in PRINTED.items():
    ours = [mixed(stage, 7_500_000_000, n).total / 1e9 for stage in (1, 2, 3)]
    print(f"{n:5}" + "".join(f"{gigabytes:10.2f}" for gigabytes in ours))
    assert all(abs(a - b) < 0.06 for a, b in zip(ours, printed, strict=True))
print(f"your prediction for stage 1 on 64: {predicted_gb}")

# %% [markdown]
# Stage 1 never goes below 4 bytes per parameter, however many ranks there are, and stage 2 never below 2; only stage
# 3 has no floor. A study note gives plain data parallelism "~90 GB" here, with 60 for the optimizer: that is 8 bytes,
# the moments alone. The float32 master weights make it 120.
#
# ## One all-reduce, cut in two
# A reduce-scatter sums the ranks' tensors and leaves one shard of the sum on each rank. An all-gather gives every
# rank all shards. One after the other they are an all-reduce, and the owner's step fits between them.

# %%
import torch

from course_lib import comm, dp, zero
from course_lib.launch import run
from course_lib.mesh import make_mesh


def cut_in_two():
    mesh = make_mesh()
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**mesh.dp.rank
    piece = comm.reduce_scatter(gradient, mesh.dp)
    both = comm.all_gather(piece, mesh.dp)
    halves = mesh.ledger.wire_bytes()
    whole = comm.all_reduce(gradient, mesh.dp)
    assert torch.equal(both, whole)
    return {
        "own": piece.tolist(),
        "gathered": both.tolist(),
        "bytes": (int(halves), int(mesh.ledger.wire_bytes() - halves)),
    }


for rank, seen in enumerate(run(cut_in_two, n=RANKS)):
    print(f"rank {rank}: {seen}")

# %% [markdown]
# Look at `bytes`: reduce-scatter and all-gather together, then the all-reduce. Both are 2(n-1)/n S. So stage 1 sends
# no more than DP: it gathers *weights* after the step, while DP gathers gradients before it.
#
# ## Who owns what
# Parameters are concatenated into one flat parameter, padded to a multiple of n, and split into equal shards. A shard
# may begin or end inside a tensor:


# %%
def owners():
    mesh = make_mesh()
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    names = {p: name for name, p in layer.named_parameters()}
    flat = zero.FlatParameter(list(layer.parameters()), mesh.dp, "all")
    own = [
        f"{names[p]}[{begin}:{begin + len(run)}]"
        for p, begin, run in flat.parameter_slices(flat.shard.detach())
    ]
    return f"{flat.elements} elements, padded to {len(flat.full_F)}; mine: {', '.join(own)}"


for rank, mine in enumerate(run(owners, n=RANKS)):
    print(f"rank {rank}: {mine}")

# %% [markdown]
# Rank 3 owns two elements and one of padding. This works because AdamW treats every element alike: an optimizer that
# needs the norm of a full matrix (LAMB, Adafactor) cannot be sharded this way.
#
# ## Stage 1: build it
# `step` runs the optimizer on the rank's own shards, and `refresh` gathers the others. In the source, names end in
# `_F` for a full flat parameter and in `_f` for a shard. In float32 a shard *is* a view of the parameters' memory; in
# bfloat16 it is the float32 master copy, which no other rank stores.

# %%
from course_lib.view import show_source

show_source(zero.Zero1.finish, zero.Zero1.refresh)
print()
show_source(zero.FlatParameter.start_gather, zero.FlatParameter.start_reduce)

# %% [markdown]
# ## Stage 2: gradients leave at once
# Stage 1 accumulates full gradients and scatters them once per step. Stage 2 scatters a bucket as soon as backward
# has filled it, and frees it: a rank never holds all gradients. Autograd calls `_ready` when a gradient is computed.

# %%
show_source(zero.Zero2._ready, zero.Zero2._send_next, zero.Zero2.accumulate)

# %% [markdown]
# The price: nothing can be added to a freed gradient. So *every* micro-batch scatters its gradients, and the sum
# grows in the shard. (FSDP2's `set_requires_gradient_sync(False)` keeps full gradients instead: DP's bytes again,
# without the memory that stage 2 saves.)
#
# ## Stage 3: weights come and go
# The weights of a block are needed twice: in its forward and in its backward. Stage 3 gathers them before each, and
# frees them after. Between the two a parameter has a shape and no memory.
#
# | event | noticed by | what happens |
# |---|---|---|
# | forward of a block begins | forward pre-hook | its weights are there; the gather of the *next* block starts (prefetch) |
# | forward ends | forward hook | freed, if `reshard_after_forward` says so (as in FSDP2) |
# | backward begins | hook on the outputs | gathered again; the gather of the block *before* starts |
# | backward ends | its inputs' gradient | freed; its reduce-scatter starts |

# %%
show_source(zero.Zero3._before_forward, zero.Zero3._before_backward, zero.Zero3._after_backward)

# %% [markdown]
# `reshard_after_forward`, as in FSDP2, says which blocks are freed between forward and backward. By default these are
# all but the root (embedding, last norm, head) and the last block, which backward needs again at once. A block that
# stays gathered saves one of two gathers.
#
# ## Measure: the same losses, other bytes
# Four steps in each of the four ways. Losses and weights must be equal; bytes sent and state stored must match the
# formulas. Here everything is float32: 4 bytes of weights, 4 of gradients, 8 of moments.

# %%
from course_lib.data import batch
from course_lib.trace import PeakLiveBytes, SavedActivations, state_bytes

BUCKET = BLOCK  # bytes: about a block


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def make(way, model, axis, **options):
    """(what sends gradients, what steps): with ZeRO one and the same."""
    if way == "dp":
        return dp.Overlapped(model.parameters(), axis, BUCKET), adam(model.parameters())
    if way == "zero 3":
        z = zero.Zero3(model, list(model.blocks), axis, adam, **options)
    else:
        kind = zero.Zero1 if way == "zero 1" else zero.Zero2
        z = kind(model.parameters(), axis, adam, BUCKET)
    return z, z


def state_of(model, optimizer):
    """Between two steps, gradients gone: parameters, shards and optimizer, each storage once."""
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
        mesh.ledger.clear()  # the ledger keeps the last step alone
        with PeakLiveBytes(buffers) as live, SavedActivations(model, buffers) as saved:
            total = dp.train_step(model.loss_sum, [rows(step, mesh)], sync, optimizer)
        losses.append(total.item())
        meters.append((live.peak, list(live.timeline)))
    sent = mesh.ledger.wire_bytes()  # before stage 3 gathers once more, to be looked at
    optimizer.zero_grad()
    peak, line = min(meters[1:])  # the backend may free a little late
    return {
        "losses": losses,
        "sent": sent,
        "weights": weights_of(model, optimizer),
        "state": state_of(model, optimizer),
        "activations": saved.peak,
        "peak": state + peak,
        "line": [(when, state + size) for when, size in line],
        "elements": [flat.elements for flat in getattr(optimizer, "flats", [])],
    }


STAGE = {"zero 1": 1, "zero 2": 2, "zero 3": 3}
WAYS = ["dp", *STAGE]
runs = {way: run(train, way, n=RANKS) for way in WAYS}


# %%
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


print(f"{'':8}{'last loss':>10}{'bytes sent':>12}{'formula':>12}{'of DP':>7}", end="")
print(f"{'state kept':>13}{'formula':>12}")
base = runs["dp"]
for way, result in runs.items():
    sent, state = result[0]["sent"], result[0]["state"]
    print(f"{way:8}{result[0]['losses'][-1]:10.4f}{int(sent):12,}", end="")
    print(f"{int(sent_formula(way)):12,}{float(sent / sent_formula('dp')):7.2f}", end="")
    print(f"{state:13,}{state_formula(way):12,}")
    assert sent == sent_formula(way)
    assert 0 <= state - state_formula(way) < 1000
    for rank, one in enumerate(result):
        assert torch.allclose(one["weights"], base[0]["weights"], atol=1e-4), rank
        assert max(abs(a - b) for a, b in zip(one["losses"], base[0]["losses"], strict=True)) < 1e-5
print(f"\nyour predictions: stage 1 {predicted_stage_1}, stage 3 {predicted_stage_3}")

# %% [markdown]
# Equal losses. State is some bytes above the formula: AdamW stores one counter of 4 bytes for each tensor or flat
# parameter, and stage 3 one element for each flat parameter that is freed. Stage 3 sends less than 1.5 times DP's
# bytes here, because the root and the last block stay gathered.
#
# Stage 1 and stage 2 store the same state *between* steps. The memory that stage 2 saves is visible only during a
# step:

# %%
from course_lib.view import live_plot

picture = live_plot(
    {way: runs[way][0]["line"] for way in WAYS},
    title="All that is alive on rank 0 during one step",
    note="State between steps is included.",
    stretched=True,
)
picture

# %% [markdown]
# Each line begins at the stored state. In backward DP climbs by a full set of gradients, and by the buckets in
# flight. Stage 1 climbs by one set too, from half the height. Stage 2 climbs less: only shards stay. Stage 3 starts
# at a quarter, and its teeth are blocks that are gathered and freed.

# %%
print(
    f"{'':8}{'peak':>12}{'of DP':>7}{'explained':>12}   state + activations + gradients, gathered"
)
for way in WAYS:
    one = runs[way][0]
    line = f"{way:8}{one['peak']:12,}{one['peak'] / base[0]['peak']:7.2f}"
    if way in STAGE:
        moving = zero.peak_bytes(STAGE[way], one["elements"], RANKS)
        line += f"{one['state'] + one['activations'] + moving:12,}"
        assert moving <= one["peak"] - one["state"] <= 1.25 * (moving + one["activations"])
    print(line)
print(f"your prediction for stage 3: {predicted_peak}")

# %% [markdown]
# "Explained" counts all activations at the fullest moment. Activations are largest when backward begins, gradients
# when it ends. So the figure is a little too large, or too small by the one gradient that autograd holds at that
# moment.
#
# The peak is not a quarter: activations are not sharded, and a few blocks are gathered at that moment.
#
# ## The price of stage 2: micro-batches
# DP and stage 1 communicate once per step. Stages 2 and 3 communicate in every micro-batch.


# %%
def bytes_sent(counts):
    """By way and number of micro-batches, all in one launch."""
    mesh, sent = make_mesh(), {}
    for way in WAYS:
        model = build_model(CONFIG, seed=0)
        sync, optimizer = make(way, model, mesh.dp)
        for count in counts:
            cut = list(zip(*(part.chunk(count) for part in rows(0, mesh)), strict=True))
            mesh.ledger.clear()
            dp.train_step(model.loss_sum, cut, sync, optimizer)
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
# With P parameters of b bytes and M micro-batches, stage 2 sends (M+1)(n-1)/n Pb, stage 3 up to 3M(n-1)/n Pb. That is
# why ZeRO-2 and a pipeline (lesson 07) do not mix well: a pipeline needs many micro-batches.
#
# ## Who waits
# The step below is *paced*, as in lesson 03: a block takes 15 ms forward and 30 ms backward, and the link carries 100 MB/s.
# Exposed is the time in which ranks wait with nothing to compute.

# %%
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


slow = {"pace": PACE, "links": NETWORK}
paced = {way: run(one_step, way, n=RANKS, **slow) for way in WAYS}
paced["no prefetch"] = run(without_prefetch, n=RANKS, **slow)


def exposed_by(traces):
    """Seconds a rank, without the two control messages of a step (token count and loss)."""
    spans, _ = read(traces)
    return summarize([span for span in spans if span.label != "control"]).exposed


exposed = {way: exposed_by(result.traces) for way, result in paced.items()}
print("exposed:", ", ".join(f"{way} {1e3 * seconds:.0f} ms" for way, seconds in exposed.items()))

# %%
timeline(
    paced["zero 3"].traces,
    title="Stage 3: the next block is gathered while this one computes",
    conditions=Conditions(PACE, NETWORK),
)

# %% [markdown]
# For a closer look open `zero3.json`, which is in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "zero3.json"
perfetto(paced["zero 3"].traces, path, title="ZeRO-3")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# Look at the lower line of a rank: gathers under the forward, gathers and reduce-scatters in turn under the backward.
# Stage 1 sends less and waits longer: all of its messages come after backward. (They need not: Megatron-LM's
# distributed optimizer hides its reduce-scatters in backward and its gathers in the next forward.) Bytes are one
# price; the moment when they are sent is another.
#
# ## A checkpoint that forgets the ranks
# Every rank saves its shards; the file contains full tensors by name. So a run of stage 3 on four ranks can continue
# as stage 1 on two, or in one process.

# %%
import tempfile

from course_lib import checkpoint


def two_steps(way, path, saves):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0 if saves else 1)
    sync, optimizer = make(way, model, mesh.dp)
    if not saves:
        checkpoint.load(path, model, optimizer, mesh)
    losses = []
    for step in range(4):
        if saves and step == 2:
            checkpoint.save(path, model, optimizer, mesh)
        if saves or step >= 2:
            total = dp.train_step(model.loss_sum, [rows(step, mesh)], sync, optimizer)
            losses.append(total.item())
    return losses[-2:]


with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/after_two_steps"
    went_on = run(two_steps, "zero 3", path, True, n=4)[0]
    print("stage 3, 4 ranks, never stopped:", *(f"{loss:.5f}" for loss in went_on))
    for way, n in (("zero 1", 2), ("dp", 1)):
        again = run(two_steps, way, path, False, n=n)[0]
        print(f"loaded as {way} on {n}:".ljust(32), *(f"{loss:.5f}" for loss in again))
        assert max(abs(a - b) for a, b in zip(again, went_on, strict=True)) < 1e-4

# %% [markdown]
# ## Move it
# The picture of one case; below it the same with sliders (in Jupyter). Which stage is the first to fit 80 GB with 70 billion
# parameters, and on how many ranks?

# %%
from course_lib.view import memory_plot


def memory(ranks, billions):
    states = {
        "DP" if stage == 0 else f"stage {stage}": mixed(stage, billions * 10**9, ranks)
        for stage in range(4)
    }
    fit = [name for name, state in states.items() if state.total <= 80e9]
    note = f"In 80 GB fit: {', '.join(fit) or 'none'}; activations come on top."
    title = f"{billions} billion parameters on {ranks} ranks, mixed precision with AdamW"
    return memory_plot(states, title=title, note=note)


memory(ranks=64, billions=7)

# %%
from course_lib.view.moved import picture_sliders

picture_sliders(
    memory,
    ranks=[64, 1, 2, 4, 8, 16, 32, 128, 256, 512, 1024],
    billions=[7, 1, 13, 30, 70, 175, 405],
)

# %% [markdown]
# ## The same in PyTorch
# `ZeroRedundancyOptimizer` is stage 1 with full tensors instead of equal shards. It broadcasts each tensor from its
# owner, after DDP's all-reduce of all gradients, and so sends half more bytes. `fully_shard` (FSDP2) is stage 3, with
# one shard of each *tensor*, split along its first dim. Both average gradients over the ranks, so the loss is the
# plain mean.

# %%
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def in_pytorch(way):
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    model = build_model(CONFIG, seed=0)
    if way == "zero 1":
        net = DDP(model)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=3e-3)
    else:
        devices = init_device_mesh("cpu", (n,))
        for block in model.blocks:
            fully_shard(block, mesh=devices, reshard_after_forward=block is not model.blocks[-1])
        net = fully_shard(model, mesh=devices)
        optimizer = adam(net.parameters())
    share = {"dp_rank": rank, "dp_size": n}
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, **share)
        optimizer.zero_grad()
        F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    inner = optimizer.optim if way == "zero 1" else optimizer
    state = state_bytes(net, inner).total
    whole = [p.full_tensor() if way == "zero 3" else p for p in model.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole])
    dist.destroy_process_group()
    return weights, state


for way in ("zero 1", "zero 3"):
    theirs = run(in_pytorch, way, n=RANKS, init=False)
    apart = max((weights - runs[way][0]["weights"]).abs().max().item() for weights, _ in theirs)
    assert apart < 1e-4
    kept = [state for _, state in theirs]
    print(f"{way}: weights differ from ours by {apart:.1e}; state kept by ranks, bytes: {kept}")
    print(f"        ours: {[one['state'] for one in runs[way]]}")

# %% [markdown]
# Full tensors cannot be divided evenly: look at the ranks of torch's stage 1.
#
# ## Break it and diagnose
# Of the six runs below one is correct (its cause is `"correct"`) and five are faulty.
#
# - **twice**: gradients are divided by the number of ranks once more after they arrived
# - **double**: the norm for clipping is taken of full gradients, and its square summed over the ranks once more
# - **shifted**: one rank puts the padding in front, so that its gradient is one element off
# - **late**: every rank gathers *before* its optimizer steps
# - **stale**: one rank gathers into a copy that its model never sees
#
# The table shows the ledger and, after one step, where weights differ from those of one process: a line for each rank
# that computes, a column for each owner. `.` is right, `x` is wrong. The norm is what clipping uses; one process has
# 1. Name for each run the cause, the collective in which it shows (`"reduce_scatter"`, `"all_gather"`, or for a norm
# `"all_reduce"`), and the rank (a number, or `"all"`). Another SEED draws other runs.

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
# The loss falls in all six runs, and the bytes are equal: neither helps.
#
# - **A column is wrong** (all ranks agree, one owner is off): that owner made a wrong step, from a wrong shard of the
#   gradient. Look at its reduce-scatter: *shifted*.
# - **A row is wrong but for its own column**: that rank's model never received the gathered weights: *stale*.
# - **Only the diagonal is right**: no rank has the others' new weights, because they were gathered too early: *late*.
# - **Everything is wrong, all ranks agree**: look at the norm. 1/n of the right one: *twice*. √n times: *double*, and
#   clipping makes every step too short.
#
# Owner by reader is the picture to draw when a sharded run goes wrong.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# Look again at the runs that are wrong; `lab.reveal()` shows the causes.
#
# ## When not to use it
# - **The model fits.** Stage 1 sends no extra bytes and is worth having; stages 2 and 3 save memory that you do not
#   need.
# - **With a pipeline, stages 2 and 3.** They send again for every micro-batch. Use stage 1 with a pipeline.
# - **A slow link and few tokens.** Stage 3 sends 1.5 times the bytes, and ranks wait for weights, unlike gradients: a
#   block of h hidden units needs 12h² of them for every micro-batch, however few tokens it has.
# - **Activations fill the memory.** ZeRO does not shard them: recomputation and lessons 05, 06 and 09 reduce them.
# - **Optimizers that need full matrices.** They need another partition: full tensors, each with one owner.
#
# ## The table that grows
# State, peak and bytes are from the steps above, exposed from the paced step. Code is the lines of the library behind
# each way, without comm.

# %%
from course_lib.view import code_lines
from course_lib.zero.flat import OneReduceScatter, ShardedFlatParameter
from course_lib.zero.stage3 import make_units

shared = (dp.global_tokens, dp.train_step)
sharded = (*shared, zero.FlatParameter, OneReduceScatter, zero.Sharded)
code = {
    "dp": code_lines(dp.Overlapped, dp.Bucketed, dp.GradientSync, *shared),
    "zero 1": code_lines(zero.Zero1, *sharded),
    "zero 2": code_lines(zero.Zero2, zero.Zero1, *sharded),
    "zero 3": code_lines(zero.Zero3, zero.Unit, ShardedFlatParameter, make_units, *sharded),
}
heads = f"{'state':>12}{'activations':>13}{'peak':>12}{'bytes sent':>12}{'exposed':>10}{'code':>6}"
print(f"{'a rank':8}{heads}")
for way, result in runs.items():
    one, sent = result[0], int(result[0]["sent"])
    print(f"{way:8}{one['state']:12,}{one['activations']:13,}{one['peak']:12,}{sent:12,}", end="")
    print(f"{1e3 * exposed[way]:7.0f} ms{code[way]:6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if a step has one micro-batch.** A study note says that stage 2's bytes are those of DDP. With M
# micro-batches they are (M+1)/2 times as many, because freed gradients cannot wait for the next micro-batch.
#
# **Claim 2: false.** It divides the state by n. Activations, the gathered blocks and the gradients in flight are not
# divided. The same note's "90/N GB" is 120/N, and only between steps.

# %%
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# P parameters, b = 2 bytes each, n ranks, M micro-batches; everything below is computed from the library's formulas.


# %%
def cheat_sheet(billions, n, micro_batches):
    bf16 = {"dtype": torch.bfloat16}
    elements = [billions * 10**9]
    print(f"{billions} billion parameters, bfloat16, {n} ranks, {micro_batches} micro-batch(es)")
    print("gradients are reduced in float32, as ZeRO does it here, DP's too; GB\n")
    print(f"{'':9}{'state':>11}{'sent per step':>15}{'of DP':>7}   sharded        sent")
    words = {
        0: ("nothing", "gradients: all-reduce, once"),
        1: ("optimizer", "gradients: reduce-scatter, once; weights: all-gather, once"),
        2: ("+ gradients", "the reduce-scatter in every micro-batch"),
        3: ("+ weights", "gather, gather, reduce-scatter in every micro-batch"),
    }
    plain = dp.wire_bytes(4 * elements[0], n)
    for stage, (what, messages) in words.items():
        sent, state = plain, 14 * elements[0]
        if stage:
            state = zero.state_bytes(stage, elements, n, **bf16)
            sent = zero.wire_bytes(stage, elements, n, micro_batches=micro_batches, **bf16)
        name = f"stage {stage}" if stage else "DP"
        print(
            f"{name:9}{state / 1e9:11.1f}{float(sent) / 1e9:15.1f}{float(sent / plain):7.2f}",
            end="",
        )
        print(f"   {what:13}  {messages}")


cheat_sheet(billions=7, n=64, micro_batches=1)
print()
cheat_sheet(billions=7, n=64, micro_batches=8)

# %% [markdown]
# State here is weights and optimizer; gradients are temporary. Stage 1 is even cheaper than DP in this precision: it
# sends sums in float32 and gathers weights in bfloat16. A DP that sums in bfloat16, as in lesson 01's table, sends
# half of this, 27.6 GB, and less than stage 1.

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/04_zero.ipynb), each on its own: a table by hand (10 minutes), the bounds of a shard
# (5); and on real ranks a step of stage 1 (10), buckets sent during backward (25), and stage 3 in raw PyTorch (20).

# %% course={"role": "given"}
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import comm

# %% [markdown] course={"ex": "04-1"}
# ## 04-1 Who owns, keeps and sends what, by hand
# Ten minutes, on paper; no code.
#
# **Shards.** A model has three tensors: a of 5 elements, b of 2 and c of 3. They are concatenated in this order and
# sharded over four ranks.
#
# - `flat`: places in the flat tensor, padding included
# - `owners`: which tensors rank 0, 1, 2 and 3 own a part of, such as `"a b bc abc"`
# - `padding`: places of padding in the shard of each rank, such as `[1, 0, 0, 1]`
#
# **Kept.** 2 billion parameters in mixed precision with AdamW: 2 bytes of weights, 2 of gradients, 12 of optimizer state
# each. Activations do not count. Lists are [DP, stage 1, stage 2, stage 3].
#
# - `kept, GB`: what a rank keeps, on 8 ranks
# - `kept, 1000 ranks`: the same per parameter, in bytes, on 1000 ranks
#
# **Sent.** The same model on 8 ranks; weights and gradients are sent in 2 bytes each, and stage 3 keeps no weights
# gathered between forward and backward.
#
# - `sent, GB`: what a rank sends in a step with one micro-batch
# - `sent, 4 micro-batches`: the same with four

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
# - `aaa aab bcc c..`: shards of three places, the last two of them padding.
# - Stage 1 stores 4 + 12/8 bytes per parameter, stage 2 2 + 14/8, stage 3 16/8. With 1000 ranks almost only the
#   replicated bytes are left in stages 1 and 2.
# - One reduce-scatter or all-gather of the 4 GB sends 7/8 of them, 3.5 GB. DP and stage 1 have two per step, stage 2
#   M + 1, stage 3 3M.

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
    """(begin, end): the own elements are flat[begin:end], padding left out."""
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
# shard, with the sum of all ranks' gradients, and every rank gets all new weights. n need not divide P: pad with
# zeros at the end.
#
# `update` is the optimizer: it keeps a moment of the size that it is given, and treats every element alike.
#
# The check looks at the weights after three steps on one to four ranks (once a rank has only padding), at one shard
# for `update` per step, and at the bytes sent: as many as one all-reduce of the padded gradients. `weights` and
# `gradients` must not change. `F.pad(x, (0, k))` puts k zeros behind x.


# %% course={"ex": "04-3", "role": "answer"}
def sharded_step(weights, gradients, update, axis):
    """The new weights [P], the same on every rank of ``axis``.

    ``update(shard, gradient)`` returns the new shard; call it once, with 1-D tensors of equal
    length. ``comm.reduce_scatter(x, axis)`` gives this rank's piece of the sum of all x, and
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
# ## 04-4 Gradients leave while backward runs
# The class below is stage 2 without its two most important methods. `shards[k]` is this rank's shard of bucket k, and
# the optimizer updates only these shards.
#
# - Autograd calls `ready` when a parameter's gradient of one backward is computed. When that fills a bucket, the
#   bucket is sent, this rank's shard of the sum is added to `shards[k].grad`, and the full gradients are freed:
#   `p.grad = None`.
# - A step may have several micro-batches, each with a backward of its own. Every one sends its buckets.
# - `step` updates the shards, gathers them into all parameters, and resets the shards' gradients.
#
# Losses are divided already: gradients are summed. Backward completes the buckets in one order on all ranks, and `ready` may
# wait for what it sends.
#
# The check trains two models in turn, on one to four ranks. It looks at the shards' gradients, at the weights after
# two steps, and at calls and bytes. The gradients of all buckets must never be alive at once.


# %% course={"ex": "04-4", "role": "answer"}
class Zero2:
    """Stage 2 over ``axis``. ``buckets`` are lists of parameters, the first to be complete first.

    A step: a backward for each micro-batch, then ``step()``.
    """

    def __init__(self, buckets, axis, make_optimizer):
        self.buckets, self.axis = buckets, axis
        self.bucket_of = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        self.missing = [set(bucket) for bucket in buckets]  # whose gradient has not come yet
        self.shards = [
            nn.Parameter(self.padded(bucket).chunk(axis.size)[axis.rank].clone())
            for bucket in buckets
        ]
        self.optimizer = make_optimizer(self.shards)
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def padded(self, tensors):
        """All elements of ``tensors`` in one flat tensor, zeros behind them up to n shards."""
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
        """Update the own shards; then every parameter has its new value, on all ranks.

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
# Forward and backward of a chain of layers in stage 3, with `torch.distributed` alone: `course_lib` refuses here, and
# autograd is not needed. The default process group exists already. Layer l is y = tanh(x @ W), W [d, d]; the two
# functions below compute it and its backward. A rank has only its *shard* of each W: W flattened, padded with zeros
# at the end, and split into n equal shards.
#
# Gather a layer's weights before its forward and again before its backward, and free them after each. Of each layer's
# dW only this rank's shard of the sum over the ranks stays. (The last layer may stay gathered from forward to
# backward.)
#
# The check compares y, the gradients and the bytes on one to four ranks. No argument may be overwritten, and the
# weights of all layers must never be alive at once.
#
# Of use: `dist.all_gather(parts, shard)` and `dist.reduce_scatter(mine, parts)`, where `parts` is a list of n tensors. Both fill
# their first argument.


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
    """(y, gradients) of this rank's rows x [rows, d], whose output has the gradient dy [rows, d].

    ``shards`` are the own shards of the layers' weights, first layer first, all of one length.
    ``gradients`` is a list like it: the own shard of each layer's dW, summed over the ranks.
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
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** 13 billion parameters, mixed precision with AdamW, 16 ranks of 40 GB. Which stage is the first whose state fits?
#
# <details><summary>Answer</summary>
# DP 208 GB; stage 1 52 + 9.75 = 61.75; stage 2 26 + 11.4 = 37.4: it fits, with 2.6 GB for activations, which is not enough
# for training. Stage 3: 13 GB.
# </details>
#
# **2.** Why does stage 1 send no more than data parallelism?
#
# <details><summary>Answer</summary>
# An all-reduce is a reduce-scatter and an all-gather. Stage 1 does both, with the step between them: the second half
# sends weights instead of gradients.
# </details>
#
# **3.** Where does the 1.5 of stage 3 come from, and when is it less, or more?
#
# <details><summary>Answer</summary>
# Three halves of an all-reduce instead of two: gather, gather, reduce-scatter. It is less with blocks that stay
# gathered, and M times as much with M micro-batches. With gradients in float32 but weights in bfloat16, two of the
# three halves send half the bytes.
# </details>
#
# **4.** Losses are right with one micro-batch, and wrong with four, in stage 2 alone. What do you look at?
#
# <details><summary>Answer</summary>
# The shard's gradient: was it replaced instead of added to? And `p.grad` after a send: a gradient that is not freed
# is sent again.
# </details>
#
# **5.** One rank's checkpoint of stage 3 is lost. What is lost, and what would have been lost in stage 1?
#
# <details><summary>Answer</summary>
# In stage 3 one n-th of everything: no other rank has those weights. In stage 1 one n-th of the moments (and of the
# master weights); the weights that the model computes with are replicated on every rank.
# </details>
#
# ## Sources and what next
# - Rajbhandari et al. 2019, *ZeRO*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054): table 1 and sections 5 and 7.
# - Zhao et al. 2023, *PyTorch FSDP*, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277): prefetch, and which units
#   stay gathered.
# - Megatron Core, [distributed
#   optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html): stage 1 in production.
# - [FSDP2's design notes](https://github.com/pytorch/torchtitan/blob/main/docs/fsdp.md): why one shard for each tensor.
# - The library: `course_lib/zero`, whose formulas are in `formulas.py`.
#
# Next: a gathered block must fit, and ranks must wait for it. Lesson 05 (tensor parallelism) never gathers it: every
# rank computes with its shard.
