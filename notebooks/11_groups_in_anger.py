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
#     lesson: '11'
# ---

# %% [markdown]
# # 11 Groups in anger: which rank may send, when, and in which order
#
# *40 minutes to read and run, 60 to build.* A run on four ranks hangs. Rank 0 waits for rank 1, rank 1 for rank 3,
# rank 3 for rank 2, and rank 2 for rank 0. Each rank makes exactly the calls that it should make. In this lesson you
# cause this hang and find it. You also see how groups delay each other, and how two groups add up the wrong numbers
# without an error. You need lessons 00, 02 and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *Axes with groups of their own do not disturb each other.*
# 2. *A rank needs to make only the groups that it is in.*
# 3. *A scheduler that sends whatever is ready, TP before PP before DP, is safe.*

# %%
vote_1 = None
vote_2 = None
vote_3 = None

# %% [markdown]
# ## Four ranks in four groups
# Every rank is in several groups at once. Here TP = 2 and DP = 2:
#
# ```
#          tp
#     0 -------- 1        tp: groups (0 1) and (2 3)
#     |          |        dp: groups (0 2) and (1 3)
#  dp |          | dp
#     |          |
#     2 -------- 3
#          tp
# ```
#
# TP splits each layer, so its ranks wait for every all-reduce before they continue. In this lesson these calls are
# small. The all-reduces of DP are large buckets of gradients that no rank needs before the optimizer step.
#
# | symbol | meaning |
# |---|---|
# | n | ranks in a group |
# | alpha, beta | a link's seconds per message, and bytes per second |
#
# An emulated link with an alpha of 0.5 ms and a beta of 400 kB/s carries both kinds of call. What do you predict?

# %%
import torch

from course_lib import comm
from course_lib.comm.alpha_beta import ring_seconds
from course_lib.mesh import Conditions, Link, Links, make_mesh, sub_axis

LINK = Link(alpha=0.0005, beta=400_000)
BUCKET, SMALL = torch.ones(5_000), torch.ones(1_000)  # float32
bucket_ms, small_ms = (1e3 * ring_seconds(x.nbytes, 2, LINK) for x in (BUCKET, SMALL))

print(f"between two ranks a bucket takes {bucket_ms:.0f} ms, a small call {small_ms:.0f} ms")

# %%
predicted_one_group = None  # ms for two small calls started behind a bucket, all on one group
predicted_own_groups = None  # ms if the bucket has a group of its own
predicted_shared = None  # ms on groups of their own that share one link
predicted_new_groups = None  # new_group calls of each rank: 64 ranks, TP 8, PP 4, DP 2
predicted_sums = None  # two ranks sum 1 + 1 and 100 + 100, their groups made in opposite orders

# %% [markdown]
# ## One group is one queue
# We start the all-reduce of a bucket and then make two small calls. First, all calls use one group. Then `sub_axis`
# gives the bucket a second group of the *same* two ranks. In the third run, these groups share one link.

# %%
from course_lib.launch import run
from course_lib.view import timeline


def two_kinds(separate):
    everyone = make_mesh().dp
    gradients = sub_axis(everyone, 2, "gradients") if separate else everyone
    comm.barrier(everyone)
    everyone.trace.clear()
    bucket = comm.start_all_reduce(BUCKET, gradients)
    for _ in range(2):
        comm.all_reduce(SMALL, everyone)
    bucket.wait()


# %% jupyter={"source_hidden": true}
# Measure the three runs: ms until the second small call has finished.
def small_calls(traces):
    """ms from the start of all to the end of the last small call, slowest rank."""
    spans = [span for trace in traces for span in trace.spans]
    ends = [span.end for span in spans if span.payload == SMALL.nbytes]
    return 1e3 * (max(ends) - min(span.start for span in spans))


WAYS = {
    "one group": (False, Links(LINK, LINK)),
    "own groups": (True, Links(LINK, LINK)),
    "own groups, one link": (True, Links(LINK, LINK, shared=True)),
}
FORMULAS = dict(
    zip(WAYS, (bucket_ms + 2 * small_ms, 2 * small_ms, bucket_ms + 2 * small_ms), strict=True)
)
PREDICTED = dict(
    zip(WAYS, (predicted_one_group, predicted_own_groups, predicted_shared), strict=True)
)


def fastest(separate, links, tries=3):
    """The traces of the best of several runs: a busy machine delays messages."""
    found = [run(two_kinds, separate, n=2, links=links).traces for _ in range(tries)]
    return min(found, key=small_calls)


queued = {name: fastest(*way) for name, way in WAYS.items()}
print(f"{'two small calls behind a bucket':34}{'formula':>9}{'measured':>10}   predicted")
for name, traces in queued.items():
    print(f"{name:34}{FORMULAS[name]:6.0f} ms{small_calls(traces):7.0f} ms   {PREDICTED[name]}")

# %%
timeline(
    queued["one group"],
    title="One group is one queue: the small calls wait behind the bucket",
    conditions=Conditions(links=Links(LINK, LINK)),
)

# %%
timeline(
    queued["own groups"],
    title="Two groups: the small calls pass the bucket",
    conditions=Conditions(links=Links(LINK, LINK)),
)

# %% [markdown]
# On one group, the small calls wait for the bucket, because a group carries its calls one after another, in the order
# in which they were started. PyTorch does this with NCCL, and so do our emulated links. Therefore each axis gets a
# group of its own, even if two axes have the same ranks.
#
# The last line of the table shows what groups cannot do. When both groups send over one link, the small calls wait
# again. A group separates queues, not wires. Often the wires are separate too, with TP on NVLink and DP on network
# cards.
#
# ## When two axes share a wire
# Here is the backward pass of four layers. Each layer has two halves of 30 ms (padded by sleep), and each half ends
# with an all-reduce on tp. After each layer, a bucket is sent on dp. All axes of a rank share one link.
# Look at the first call on tp after each bucket.

# %% jupyter={"source_hidden": true}
# Run the step on separate links, on one link, and on one link with priorities.
from contextlib import nullcontext

LAYERS, PACE = 4, {"B": 0.030}


def backward(piece_bytes=None):
    mesh = make_mesh(tp=2)
    comm.barrier(mesh.world)
    mesh.trace.clear()
    held = piece_bytes and comm.Priorities(mesh.tp, mesh.dp, piece_bytes=piece_bytes)
    buckets = []
    with held or nullcontext():
        for layer in reversed(range(LAYERS)):
            for half in ("mlp", "attn"):
                with mesh.compute("B", label=half):
                    pass
                comm.all_reduce(SMALL, mesh.tp)
            gradients = BUCKET * (mesh.rank + layer)
            buckets.append(
                comm.start_all_reduce_flat([gradients], mesh.dp, label=f"bucket {layer}")
            )
        return [bucket.wait().sum().item() for bucket in buckets]


APART, SHARED = Links(LINK, LINK), Links(LINK, LINK, shared=True)
PIECE = 10_000  # bytes; up to 11,600 fit into a gap of 30 ms
steps = {
    "links apart": run(backward, n=4, pace=PACE, links=APART),
    "one link, at once": run(backward, n=4, pace=PACE, links=SHARED),
    "one link, held and split": run(backward, PIECE, n=4, pace=PACE, links=SHARED),
}
assert list(steps["one link, at once"]) == list(steps["one link, held and split"])
timeline(
    steps["one link, at once"].traces[:2],
    title="One link: the next call on tp waits behind each bucket",
    conditions=Conditions(PACE, SHARED),
)

# %% [markdown]
# A bucket takes 51 ms, but the next half computes for only 30 ms. The call on tp therefore waits another 21 ms,
# although no rank needs the bucket yet.
#
# > **Box: priorities.** P3 and ByteScheduler split large tensors and send urgent pieces first. `comm.Priorities` does this
# > for groups: it *holds* a bucket back until the program computes, and *splits* it into pieces that finish before the
# > next urgent call. For a gap of T seconds this means 2(n-1) alpha + 2(n-1)/n · bytes/beta ≤ T. You build both parts in
# > exercises 11-2 and 11-4. On GPUs there are three settings:
# >
# > | what is shared | setting | effect |
# > |---|---|---|
# > | the GPU's scheduler | `is_high_priority_stream` in `ProcessGroupNCCL.Options` | a hint to start this group's waiting kernels first |
# > | the network | `trafficClass` in `ncclConfig_t`; `NCCL_IB_TC` overrides it | the network can treat a communicator's packets differently |
# > | processors (SMs) | `maxCTAs` in `ncclConfig_t` | an NCCL kernel uses at most so many thread blocks |
#
# **The table that grows.** The same step in three ways:

# %% jupyter={"source_hidden": true}
# At once: each layer but the first waits for the part of a bucket that B did not hide.
# Held and split: of eight pieces, five are hidden by compute and three are exposed.
from course_lib.view.summary import read, summarize

b, s, big = PACE["B"], small_ms / 1e3, bucket_ms / 1e3
compute = 2 * LAYERS * (b + s)
expected = {
    "links apart": compute + big,
    "one link, at once": compute + (LAYERS - 1) * (big - b) + big,
    "one link, held and split": compute + 3 * ring_seconds(PIECE, 2, LINK),
}
print(
    f"{'per step':24}{'formula':>10}{'measured':>10}{'exposed':>10}{'calls':>7}{'bytes per rank':>16}"
)
for name, result in steps.items():
    seen, ledger = summarize(read(result.traces)[0]), result.ledgers[0]
    calls, sent = (ledger.calls(axis) for axis in ("tp", "dp")), int(ledger.wire_bytes())
    print(f"{name:24}{1e3 * expected[name]:7.0f} ms{1e3 * seen.makespan:7.0f} ms", end="")
    print(f"{1e3 * seen.exposed:7.0f} ms{sum(calls):7}{sent:16,}")

# %% [markdown]
# With priorities ("held and split"), the step sends the same bytes in more calls. By the formula it is 36 ms faster
# than "at once".
#
# ## What a clock may not decide
# A common claim: a scheduler should send whatever is ready, `if tp_ready: ... elif pp_ready: ... elif dp_ready: ...`.
# But each rank decides alone what is ready. Suppose that on ranks 1 and 2 the buckets are ready before the calls on
# tp. Each rank waits for its first call before it starts the second:


# %%
def by_what_is_ready(wait=True):
    mesh = make_mesh(tp=2)
    bucket_is_ready = mesh.rank in (1, 2)
    order = [mesh.dp, mesh.tp] if bucket_is_ready else [mesh.tp, mesh.dp]
    if wait:
        return [comm.all_reduce(torch.ones(1), axis).item() for axis in order]
    handles = [comm.start_all_reduce(torch.ones(1), axis) for axis in order]
    return [handle.wait().item() for handle in handles]


# %%
from course_lib.launch import RankError


def report(fn, *args, **conditions):
    try:
        print("returned", list(run(fn, *args, **conditions)))
    except RankError as error:
        print(error.exception or error)


report(by_what_is_ready, n=4, timeout=2)

# %% [markdown]
# The report shows only the deadline and the line at which each rank waited. With `checked=True`, each rank reports
# the rank for which it waits, and the ring from the beginning is found before any deadline:

# %%
report(by_what_is_ready, n=4, checked=True)

# %% [markdown]
# A rank is stuck if it waits for a rank that is stuck or has returned. Exercise 11-3 turns this sentence into code.
#
# One rule prevents such rings: **all ranks start their calls on overlapping groups in one order.** The order must
# come from the program or from a schedule that all ranks share, and never from a clock.
#
# ## Started, but not waited for
# Is it enough to start both calls before waiting for either? gloo runs started calls side by side, so here it is enough:

# %%
report(by_what_is_ready, False, n=4)
report(by_what_is_ready, False, n=4, checked=True)

# %% [markdown]
# The run returned, but checked mode refuses it, because it is not safe on GPUs. An NCCL call is a kernel that
# occupies part of the GPU until its partners have joined. Two such kernels may each occupy the resources that the
# other needs. NCCL's guide therefore requires that the calls of all communicators *run* in one order, the same on all
# ranks. Starting them in one order is not enough, because each group has its own CUDA stream. Since version 2.26,
# `NCCL_LAUNCH_ORDER_IMPLICIT=1` (off by default) runs them in the order in which the program starts them.
#
# ## Groups made in different orders
# How do two ranks agree which group is which? They count: each `new_group` gets the next number as its name, whatever
# its members are. Below, rank 1 makes its two groups in the other order, but both ranks use them in the same order:


# %%
def made_in_opposite_orders():
    everyone = make_mesh().dp
    names = ["activations", "gradients"]
    if everyone.rank == 1:
        names.reverse()
    return {name: sub_axis(everyone, 2, name) for name in names}


def two_sums():
    axes = made_in_opposite_orders()
    activation = comm.start_all_reduce(torch.tensor([1.0]), axes["activations"])
    gradient = comm.start_all_reduce(torch.tensor([100.0]), axes["gradients"])
    return [activation.wait().item(), gradient.wait().item()]


def one_after_the_other():
    axes = made_in_opposite_orders()
    comm.all_reduce(torch.tensor([1.0]), axes["activations"])
    comm.all_reduce(torch.tensor([100.0]), axes["gradients"])


names = run(lambda: {k: a.group.group_name for k, a in made_in_opposite_orders().items()}, n=2)
print("torch's names:", *names)
print("right is [2.0, 200.0]; your prediction:", predicted_sums)
report(two_sums, n=2)

# %% [markdown]
# Activations were added to gradients, and no error was raised. If the program waits for each call, the same mistake
# is a hang. Both ranks then wait at the *same* line, but in different groups:

# %%
report(one_after_the_other, n=2, timeout=2)

# %% [markdown]
# The report does not say why. Checked mode compares the groups before they are made:

# %%
report(two_sums, n=2, checked=True)

# %% [markdown]
# These lines for 64 GPUs with TP 8, PP 4 and DP 2 look correct. Each rank makes its own groups:
#
# ```python
# tp_ranks = [rank - tp_rank + i for i in range(8)];  tp_group = dist.new_group(tp_ranks)
# pp_ranks = [rank + i * 8 for i in range(4)];        pp_group = dist.new_group(pp_ranks)
# ```
#
# They contain two mistakes. The pp list begins at the rank itself instead of the first rank of its group.
# And *every* rank must call `new_group` for *every* group, member or not, in one order. With
# `use_local_synchronization=True` only members call, but overlapping groups still need one order.

# %%
from course_lib.layout import make_layout

layout = make_layout(64, "tp-pp-dp", tp=8, pp=4, dp=2)
print("rank 63's pp group: these lines", [63 + i * 8 for i in range(4)], end="; ")
print("right", next(group for group in layout.groups("pp") if 63 in group))
counts = {axis: len(layout.groups(axis)) for axis in ("tp", "pp", "dp")}
print(f"new_group calls of each rank: {counts}, {sum(counts.values())}", end="; ")
print("your prediction:", predicted_new_groups)

# %% [markdown]
# ## The same in PyTorch
# The loop makes all groups on all ranks in one order, and each rank keeps its own. `init_device_mesh` does this for a
# mesh. Rank r sends 10^r, so the digits of a sum show which ranks took part.

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

GROUPS = {axis: make_layout(4, tp=2).groups(axis) for axis in ("tp", "dp")}


def in_pytorch():
    dist.init_process_group("gloo")
    rank, mine, sums = dist.get_rank(), {}, {}
    for name, groups in GROUPS.items():
        for ranks in groups:  # also groups of other ranks
            group = dist.new_group(ranks, group_desc=name)
            if rank in ranks:
                mine[name] = group
    for name, group in mine.items():
        x = torch.tensor([10.0**rank])
        dist.all_reduce(x, group=group)
        sums[name] = x.item()
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: dist.get_process_group_ranks(devices.get_group(name)) for name in GROUPS}
    dist.destroy_process_group()
    return sums, groups


def with_mesh():
    mesh = make_mesh(tp=2)
    axes = {"tp": mesh.tp, "dp": mesh.dp}
    x = torch.tensor([10.0**mesh.rank])
    sums = {name: comm.all_reduce(x, axis).item() for name, axis in axes.items()}
    return sums, {name: list(axis.ranks) for name, axis in axes.items()}


theirs, ours = run(in_pytorch, n=4, init=False), run(with_mesh, n=4)
assert list(theirs) == list(ours)
for rank, (sums, groups) in enumerate(theirs):
    print(f"rank {rank}: {groups}, sums {sums}, as ours")

# %% [markdown]
# ## Break it and diagnose
# Five runs on four ranks, one of them `"correct"`. Each makes two groups for every pair of tp, `acts` and `norms`, starts
# a sum on both and waits. Then it calls on tp, then on dp. Correct sums begin with 3 and 300 on ranks 0 and 1, and
# with 7 and 700 on ranks 2 and 3.
#
# - **creation**: one rank made `norms` before `acts`
# - **order**: two ranks call on dp before tp
# - **axis**: one rank calls on dp instead of tp, and then on dp again
# - **skipped**: one rank skips its last call, on dp
#
# For each run, enter the cause, the axis and the faulty rank (of two, the lower one), or None if correct. The axis is
# `"norms"` for groups made in the wrong order. Otherwise it is the axis of the call that came too early, in place of
# another, or not at all. One run leaves two suspects, and CHECKED = True shows which is faulty.

# %%
SEED = 11
CHECKED = False
diagnosis = {  # such as ("skipped", "dp", 2), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "creation": ("norms", range(4)),
    "order": ("dp", range(2)),
    "axis": ("dp", range(4)),
    "skipped": ("dp", range(4)),
}
lab = Lab("11", SEED, FAULTS, fields=("cause", "axis", "rank"))


def observed(lab_run):
    mesh = make_mesh(tp=2)
    names = ["norms", "acts"] if lab_run.has("creation", mesh.rank) else ["acts", "norms"]
    pair = {name: sub_axis(mesh.tp, 2, name) for name in names}
    x = torch.tensor([1.0 + mesh.rank])

    def on_tp():
        return comm.all_reduce(x, mesh.tp).item()

    def on_dp():
        return comm.all_reduce(x, mesh.dp).item()

    first = comm.start_all_reduce(x, pair["acts"])
    second = comm.start_all_reduce(100 * x, pair["norms"])
    values = [first.wait().item(), second.wait().item()]
    calls = [on_tp, on_dp]
    if lab_run.has("order") and mesh.rank in (lab_run.rank, 3 - lab_run.rank):
        calls = [on_dp, on_tp]
    if lab_run.has("axis", mesh.rank):
        calls = [on_dp, on_dp]
    if lab_run.has("skipped", mesh.rank):
        calls = [on_tp]
    return values + [call() for call in calls]


for lab_run in lab:
    print(f"--- {lab_run.letter}")
    try:
        result = run(observed, lab_run, n=4, timeout=2, checked=CHECKED)
        for rank, values in enumerate(result):
            print(f"rank {rank}: {values}")
    except RankError as error:
        print(error.exception or error)

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **It returns, and a pair has mixed sums**: *creation*. Checked mode lists the group
#   that each rank was about to make, and one differs.
# - **All four wait, two at tp, two at dp**: *order*. tp is due first, so the ranks at dp called too early.
# - **One has returned, three wait**: *axis*. The rank that returned got a call on dp from its partner, which then waits at
#   dp again. That partner is the faulty rank.
# - **Three have returned, one waits at dp**: *skipped*. The faulty rank is its partner on dp.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **Priorities on separate links.** No call delays another there, and each further piece costs alphas.
# - **A group for everything.** All ranks must make each group, and each NCCL communicator takes GPU memory.
# - **Checked mode in a long run.** Each call waits for all its ranks, so turn it on only to find a fault.
#
# **Claim 1: only if** their links are separate and all ranks start their calls in one order. A group separates
# queues, but axes can still share a wire or a GPU's processors, and opposite orders can block forever.
#
# **Claim 2: only if** it uses `use_local_synchronization=True`. By default groups are named by counting, so a rank that
# skips another rank's group counts wrongly afterwards.
#
# **Claim 3: false.** Ranks that decide differently what is ready can block each other forever.

# %%
print(
    f"small calls behind a bucket on one link: {small_calls(queued['own groups, one link']):.0f} ms"
)
print(f"your votes: {vote_1}, {vote_2}, {vote_3}")

# %% [markdown]
# **Cheat-sheet.** The largest piece that fits into 1 ms, and how many groups a job makes.


# %%
def cheat_sheet():
    print("make    all groups, on all ranks, in one order; one group per axis, even of equal ranks")
    print("call    overlapping groups in one order on all ranks, started calls too")
    print(
        "send    urgent calls first: tp, pp, dp; hold and split the rest; never decide by a clock"
    )
    print("find    a hang: look for a ring of waiting ranks or a returned rank; use checked=True\n")
    print(f"{'largest piece for a gap of 1 ms':36}{'2 ranks':>10}{'8 ranks':>10}{'64 ranks':>10}")
    for said, link in {
        "5 us, 300 GB/s": Link(5e-6, 300e9),
        "10 us, 50 GB/s": Link(10e-6, 50e9),
    }.items():
        sizes = [(1e-3 / (2 * (n - 1)) - link.alpha) * n * link.beta for n in (2, 8, 64)]
        cells = [f"{size / 1e6:7.1f} MB" if size > 0 else "none" for size in sizes]
        print(f"{said:36}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"\n{'new_group calls of every rank':36}{'tp':>6}{'pp':>6}{'dp':>6}{'all':>7}")
    for world, sizes in {64: (8, 4, 2), 512: (8, 8, 8), 4096: (8, 16, 32)}.items():
        tp, pp, dp = sizes
        counts = [world // size for size in sizes]
        said = f"{world:,} ranks, TP {tp}, PP {pp}, DP {dp}"
        print(f"{said:36}{counts[0]:6}{counts[1]:6}{counts[2]:6}{sum(counts):7,}")


cheat_sheet()

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/11_groups_in_anger.ipynb) take 60 minutes.

# %% course={"role": "given"}
from collections import deque

import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "11-1"}
# ## 11-1 Queues, sums and rings, by hand
# Ten minutes, on paper; no code. Two ranks, and a link of 1 ms per message and 1,000 bytes per ms. An all-reduce
# between two ranks takes the latency of 2 messages and sends its bytes once over the link.
#
# At 0 ms a bucket of 50,000 bytes is started. At 10 ms a small call of 4,000 bytes is made.
#
# - `alone`: ms that the bucket and the small call take by themselves: [bucket, small]
# - `one group`: the ms at which the small call has finished, if both are on one group
# - `own groups`: the same on two groups, each with its own link
# - `one link`: the same on two groups that share one link
# - `held`: now the bucket is held on the shared link and cut into 5 pieces. One piece is sent when the small call,
#   made at 10 ms, has finished. The rank computes 20 ms and makes a second small call. When have the first small
#   call, the first piece and the second small call finished? Three numbers
#
# Groups:
#
# - `new_group`: how often each of 64 ranks calls it for TP 8, PP 4, DP 2
# - `rank 0`, `rank 1`: two ranks sum a and g on two groups. Rank 0 has a = 1, g = 10; rank 1 has a = 2, g = 20. Rank
#   1 made the groups in the other order. Each rank starts both sums before it waits for any. What does each rank get
#   as [a, g]?
#
# Four ranks, tp groups (0 1) and (2 3), dp groups (0 2) and (1 3); each makes one call on tp and one on dp and waits for each:
#
# - `ring`: ranks 0 and 3 begin with tp, 1 and 2 with dp. For which rank does each wait? Four numbers, by rank
# - `one alone`: rank 0 begins with dp, all others with tp. How many ranks never finish?

# %% course={"ex": "11-1", "role": "answer"}
# BEGIN SOLUTION
table = {
    "alone": [52, 6],
    "one group": 58,
    "own groups": 16,
    "one link": 58,
    "held": [16, 28, 42],
    "new_group": 56,
    "rank 0": [21, 12],
    "rank 1": [12, 21],
    "ring": [1, 3, 0, 2],
    "one alone": 0,
}
# STUB
# table = {
#     "alone": None,  # two numbers, such as [1, 2]
#     "one group": None,
#     "own groups": None,
#     "one link": None,
#     "held": None,  # three numbers
#     "new_group": None,
#     "rank 0": None,  # two numbers
#     "rank 1": None,
#     "ring": None,  # four ranks
#     "one alone": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "11-1", "role": "answer"}
# - 2 · 1 + 50 = 52 and 2 · 1 + 4 = 6. Behind the bucket: 52 + 6. Beside it: 10 + 6.
# - A piece of 10,000 bytes takes 12 ms: 16 + 12 = 28. Compute ends at 36, the link is free: 36 + 6.
# - 64/8 + 64/4 + 64/2.
# - Rank 0's first group is a, rank 1's first is g: 1 + 20. The second: 10 + 2.
# - Rank 2 meets rank 3 on tp, then rank 0 on dp; then rank 0 meets rank 1 on tp. An order that differs is not yet a ring.

# %% course={"ex": "11-1", "role": "check"}
from course_lib.grading import check

check("11-1", table)

# %% [markdown] course={"ex": "11-2"}
# ## 11-2 The piece that fits
# Compute the largest piece of a bucket whose ring all-reduce finishes within a gap. Return its number of float32
# elements (4 bytes each), an integer, and 0 if even an empty piece takes longer. Times are in microseconds, and
# `beta` is in bytes per microsecond. `ranks` is 2 or more.


# %% course={"ex": "11-2", "role": "answer"}
def elements_that_fit(gap, ranks, alpha, beta):
    """The most float32 elements whose all-reduce over ``ranks`` takes at most ``gap``.

    It takes 2(n-1) messages of ``alpha`` each, and 2(n-1)/n of its bytes at ``beta``.
    """
    # BEGIN SOLUTION
    left = gap - 2 * (ranks - 1) * alpha
    return max(0, left * beta * ranks // (2 * (ranks - 1) * 4))
    # END SOLUTION


# %% course={"ex": "11-2", "role": "check"}
from course_lib.grading import check

check("11-2", elements_that_fit)

# %% [markdown] course={"ex": "11-3"}
# ## 11-3 Which ranks never continue
# This is the decision of checked mode. `waits` is a dict from each rank that waits in a call to the ranks that have
# not joined that call yet. A rank that has returned makes no more calls. A rank in neither state computes, and may
# join at any time.
#
# A rank needs *all* ranks for which it waits. Return, sorted, the ranks that wait in a call and will never continue.


# %% course={"ex": "11-3", "role": "answer"}
def never(waits, returned):
    """Sorted ranks of ``waits`` that wait forever.

    ``waits`` maps a rank to a list of ranks, which may be empty; ``returned`` is a list of ranks.
    """
    # BEGIN SOLUTION
    stuck = {*waits, *returned}
    while free := [r for r, others in waits.items() if r in stuck and not stuck & {*others}]:
        stuck -= {*free}
    return sorted(stuck - {*returned})
    # END SOLUTION


# %% course={"ex": "11-3", "role": "check"}
from course_lib.grading import check

check("11-3", never)

# %% [markdown] course={"ex": "11-4"}
# ## 11-4 A bucket that gives way
# Sum some small tensors over tp, one after the other, and wait for each sum. Also sum a one-dimensional bucket over
# dp, which must give way to the small calls. Send it in pieces of `most` elements (the last may be shorter), in
# order, and *start* one piece after each wait for a small call. Start the remaining pieces when there are no more
# small calls. Do not wait for a piece before the last small call has finished.
#
# The check looks at the sums on two and four ranks and on one, at the order and the bytes of all calls, and at when
# you wait. `comm.all_reduce(x, axis)` waits; `comm.start_all_reduce(x, axis)` returns a handle with `wait()`;
# `comm.Priorities` refuses.


# %% course={"ex": "11-4", "role": "answer"}
def give_way(smalls, bucket, tp, dp, most):
    """(sums, total): a list of the small tensors' sums over ``tp``, and the bucket's over ``dp``."""
    # BEGIN SOLUTION
    pieces = deque(bucket.split(most))
    sums, handles = [], []
    for small in smalls:
        sums.append(comm.all_reduce(small, tp))
        if pieces:
            handles.append(comm.start_all_reduce(pieces.popleft(), dp))
    handles += [comm.start_all_reduce(piece, dp) for piece in pieces]
    return sums, torch.cat([handle.wait() for handle in handles])
    # END SOLUTION


# %% course={"ex": "11-4", "role": "check"}
from course_lib.grading import check

check("11-4", give_way)

# %% [markdown] course={"ex": "11-5"}
# ## 11-5 Groups made right, in raw PyTorch
# With `torch.distributed` alone: `course_lib` refuses. Each rank is given a dict from the names of axes to *all* groups of that
# axis, as lists of ranks. The content is the same on every rank; the order of the names, and of the lists, is not: each rank
# wrote them down as it first met them. Two axes may have the same groups.
#
# Make the groups with `dist.new_group` and return a dict from each name to this rank's group of that axis, a separate
# group for each axis.
#
# The check looks at sums over all returned groups, all started before the first wait: two ranks and three axes of the
# same groups, and four ranks in a 2 × 2 mesh.


# %% course={"ex": "11-5", "role": "answer"}
def make_groups(groups):
    """{name: this rank's group}. ``groups`` is {name: [[rank, ...], ...]}, each rank once a name."""
    # BEGIN SOLUTION
    mine = {}
    for name in sorted(groups):
        for ranks in sorted(groups[name]):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[name] = group
    return mine
    # END SOLUTION


# %% course={"ex": "11-5", "role": "check"}
from course_lib.grading import check

check("11-5", make_groups)

# %% [markdown]
# **Exit questions.** Answer, then unfold.
#
# **1.** TP and DP have groups of their own, but each DP bucket still delays the next TP call. Why?
#
# <details><summary>Answer</summary>
# They share a link. Hold the buckets back and split them, or give DP another link.
# </details>
#
# **2.** `Priorities` sends a piece when the program has waited for a call. Why not when the link is free?
#
# <details><summary>Answer</summary>
# Ranks would see a free link at different times and start their calls in different orders.
# </details>
#
# **3.** A run hangs, and both ranks of a group wait in the same line. What do you suspect?
#
# <details><summary>Answer</summary>
# They wait in different groups: groups were made in different orders, or one rank used the wrong axis.
# </details>
#
# **4.** A job passes on gloo and sometimes hangs on GPUs. Name one cause.
#
# <details><summary>Answer</summary>
# Calls on overlapping groups are started in different orders. gloo runs them side by side, but NCCL kernels occupy
# the GPU until their partners have joined.
# </details>
#
# **5.** 4,096 ranks, TP 8, PP 16, DP 32. How many groups does rank 17 make, and how many is it in?
#
# <details><summary>Answer</summary>
# 512 + 256 + 128 = 896, and it is in three.
# </details>
#
# **Sources.** Next: lesson 12 trains one model under all axes at once.
# - NVIDIA, *NCCL user guide*: [multiple communicators](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html),
#   [trafficClass and maxCTAs](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclconfig-t).
# - PyTorch: [`new_group`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group);
#   [TORCH_NCCL_HIGH_PRIORITY](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
# - CUDA, [stream priorities are a hint](https://nvidia.github.io/cuda-python/cuda-bindings/latest/module/generated/driver_v2/cuda.bindings._v2.driver.stream_create_with_priority.html).
# - [torchrec #4708](https://github.com/meta-pytorch/torchrec/pull/4708): one group is one queue, on GPUs.
# - Peng et al. 2019, *ByteScheduler*, [doi:10.1145/3341301.3359642](https://doi.org/10.1145/3341301.3359642); Jayarajan et
#   al. 2019, *P3*, [arXiv:1905.03960](https://arxiv.org/abs/1905.03960).
