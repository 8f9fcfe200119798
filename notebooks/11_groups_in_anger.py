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
# *50 minutes to read and run, 60 to build.* Every rank of a large run is in several groups at once. Here they disturb
# each other: on one queue, on one link, and in an order in which no rank can continue. You measure all three, let
# urgent calls pass, and read the reports of runs that hang or return wrong sums. You need lessons 00, 02 and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Axes with groups of their own do not disturb each other.*
# 2. *A rank needs to make only the groups that it is in.*
# 3. *A scheduler that sends whatever is ready, TP before PP before DP, is safe.*

# %%
vote_1 = None
vote_2 = None
vote_3 = None

# %% [markdown]
# ## The question
# Four ranks, TP = 2 and DP = 2. TP's all-reduces are small, and the ranks wait until each has finished. DP's are
# large buckets of gradients that no rank needs before the optimizer step.
#
# ```
#          tp
#     0 -------- 1        tp: groups (0 1) and (2 3)
#     |          |        dp: groups (0 2) and (1 3)
#  dp |          | dp
#     |          |        no two groups share two ranks,
#     2 -------- 3        and yet all of them hang together
#          tp
# ```
#
# ## Predict
# An emulated link of 0.5 ms per message and 400 kB/s carries both kinds of call. Fill in what you can.

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
# ## One group for everything
# A bucket is started, then two small calls are made. First all on one group, then the bucket on a second group of the
# *same* two ranks. Look at when the second small call has finished.

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
queued = {
    name: run(two_kinds, kind, n=2, links=links).traces for name, (kind, links) in WAYS.items()
}
print(f"{'two small calls behind a bucket':34}{'formula':>9}{'measured':>10}   predicted")
for name, traces in queued.items():
    print(f"{name:34}{FORMULAS[name]:6.0f} ms{small_calls(traces):7.0f} ms   {PREDICTED[name]}")

# %%
timeline(
    queued["one group"],
    title="One group is one queue: small calls stand behind the bucket",
    conditions=Conditions(links=Links(LINK, LINK)),
)

# %%
timeline(
    queued["own groups"],
    title="Groups of their own: small calls pass the bucket",
    conditions=Conditions(links=Links(LINK, LINK)),
)

# %% [markdown]
# A group carries its calls one after another, in the order in which they were started: nccl does so, and our emulated
# links. (gloo promises the order of matching alone, and works on two at a time.) This is the reason to give each axis
# its own group, even where two axes have the same ranks: `make_mesh` does.
#
# The third line of the table: separate groups do not help on *one* link. In the first two cases each axis has its own
# link, as with NVLink inside a node and network cards between nodes. A group isolates the queue, but not the wire.

# %% [markdown]
# ## Axes side by side
# Backward of four layers on four ranks: two halves per layer, each followed by an all-reduce of tp; after each layer
# a bucket is sent on dp. Compute is padded by sleep to 30 ms. Each axis has its own link. There is a lane for each
# axis of each rank.

# %%
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
steps = {"links apart": run(backward, n=4, pace=PACE, links=APART)}
timeline(
    steps["links apart"].traces,
    title="Two axes at once: tp's calls pass while a bucket of dp is in flight",
    conditions=Conditions(PACE, APART),
)

# %% [markdown]
# ## The same step on one link
# Now all axes of a rank share one link, which carries one transfer at a time. (It is the simplest model, and harsher
# than a network card, which interleaves packets. On a GPU, work in one CUDA stream waits in this way.) Look at the
# first call of tp in each layer.

# %%
steps["one link, at once"] = run(backward, n=4, pace=PACE, links=SHARED)
timeline(
    steps["one link, at once"].traces[:2],
    title="One link, buckets leave at once: the next call of tp stands behind each",
    conditions=Conditions(PACE, SHARED),
)

# %% [markdown]
# A 51 ms bucket that was started first delays a call for which all ranks wait, although no rank waits for the bucket.
#
# ## TP before PP before DP
# Two remedies, known from P3 and ByteScheduler: *hold* the bucket back until the link has a gap, and *split* it into
# pieces that fit into a gap. `Priorities` does both. The heart of it:

# %%
from course_lib.view import show_source

show_source(comm.Priorities.hold, comm.Priorities.gap)

# %% [markdown]
# tp is the highest axis, dp the lowest. Whenever the program has waited for a call it continues to compute. That is a
# gap, and one held call of a lower axis is sent in it, the highest axis first. Waiting for a held call first sends
# all held calls of higher axes, then all held calls of its own axis. Messages (send, recv) are never held, because
# another rank waits for each.
#
# A piece should finish before the next urgent call, within a gap of 30 ms.

# %%
GAP = PACE["B"]
fits = (GAP / 2 - LINK.alpha) * 2 * LINK.beta  # 2(n-1) alpha + 2(n-1)/n bytes/beta = GAP, n = 2
PIECE = 10_000
print(f"up to {fits:,.0f} bytes fit into a gap; we take {PIECE:,}, half a bucket")
steps["one link, held and split"] = run(backward, PIECE, n=4, pace=PACE, links=SHARED)
timeline(
    steps["one link, held and split"].traces[:2],
    title="One link, buckets held and split: pieces are sent behind compute",
    conditions=Conditions(PACE, SHARED),
)

# %% [markdown]
# For a trace viewer: open `held_and_cut.json`, in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "held_and_cut.json"
perfetto(steps["one link, held and split"].traces, path, title="one link, held and split")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# Same sums, same bytes, more calls. The formula for *at once*: every half takes B and a small call; each layer but
# the first waits for the part of a bucket that B did not hide, and the last bucket is exposed. *Held and split*: eight
# pieces, and one is sent in each gap after the first bucket's start. Five of these gaps have computing in them and
# hide a piece; three pieces are exposed.

# %%
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
assert list(steps["one link, at once"]) == list(steps["one link, held and split"])

# %% [markdown]
# (`course bench groups` times it on a model that trains.) Three axes: with tied embeddings the gradient of the
# vocabulary is summed over pp, as a collective. Two of these and three buckets of dp are started, then one call of tp
# is waited for, then the others. The order in which they were sent:


# %%
def three_axes():
    mesh = make_mesh(tp=2, pp=2)
    with comm.Priorities(mesh.tp, mesh.pp, mesh.dp, piece_bytes=10**6):
        buckets = [comm.start_all_reduce(SMALL, mesh.dp) for _ in range(3)]
        tied = [comm.start_all_reduce(SMALL, mesh.pp) for _ in range(2)]
        comm.all_reduce(SMALL, mesh.tp)  # a gap: the first on pp
        tied[0].wait()  # a gap below pp: the first on dp
        for handle in (*tied, *buckets):
            handle.wait()


left = [[record.axis for record in ledger.records] for ledger in run(three_axes, n=8).ledgers]
print(" ".join(left[0]))
assert left == [left[0]] * 8  # on every rank

# %% [markdown]
# dp was started first and sent last. The order is the same on every rank. The next section shows why that matters.
#
# ## What a clock may not decide
# A study note writes a scheduler: `if tp_ready: ... elif pp_ready: ... elif dp_ready: ...`. Each rank finds out for
# itself what is *ready*. Say that ranks 1 and 2 computed a little faster, and their buckets are ready before tp is:


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
# No error, only a deadline, and `was at:` for each rank. Draw it: 0 waits for 1 on tp, 1 for 3 on dp, 3 for 2 on tp,
# 2 for 0 on dp. This is a ring through four groups, no two of which share two ranks. No single rank has made a
# mistake.
#
# With `checked=True` waiting ranks report it, and the ring is found before any deadline:

# %%
report(by_what_is_ready, n=4, checked=True)

# %%
from course_lib.comm.instruments import watch

show_source(watch.stuck, watch.awaited)

# %% [markdown]
# A rank is stuck if it waits for a rank that is stuck or has returned. Start with all waiting ranks, and remove each
# one that waits for no rank of the set, until nothing changes. The remaining ranks will wait for ever.
#
# The rule that keeps you safe: **calls on groups that overlap are started in one order on all ranks.** `Priorities`
# obeys it: its next call depends on the calls for which the program has waited, and all ranks run the same program.
# It never reads a clock.
#
# ## Only started, not waited for?
# If a program starts both calls before it waits for either, gloo runs them side by side:

# %%
report(by_what_is_ready, False, n=4)
report(by_what_is_ready, False, n=4, checked=True)

# %% [markdown]
# It returned, and checked mode still refuses. On cards it is not safe: an nccl call is a kernel that occupies part of
# the GPU until its partners have joined. Two of them started in opposite orders may each occupy the resources that
# the other needs. NCCL's guide therefore requires all calls of a device, on all communicators, in one order that is
# the same on all ranks. Before version 2.26 you had to arrange it with streams; since then
# `NCCL_LAUNCH_ORDER_IMPLICIT=1` (off by default) uses the order in which the program starts them. You must still make
# this order the same on all ranks. A test on gloo does not prove that a program is right for nccl; checked mode
# enforces nccl's rule.
#
# ## Groups made wrongly
# How do two ranks agree which group is which? By counting. Each `new_group` takes the next number as its name,
# whatever its members. Rank 1 makes its two groups in the order of first use, and uses gradients first:


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
# A wrong sum, without an error: activations were added to gradients. If the program waits for each call, the same
# mistake is a hang instead. Look where both ranks wait: at the *same* line.

# %%
report(one_after_the_other, n=2, timeout=2)

# %% [markdown]
# Both wait for their activations, and the report alone does not say why. Checked mode compares an axis before its
# groups are made:

# %%
report(two_sums, n=2, checked=True)

# %% [markdown]
# Now read a study note's lines for 64 GPUs, TP 8, PP 4, DP 2. Each rank computes its own lists and makes its own groups:
#
# ```python
# tp_ranks = [rank - tp_rank + i for i in range(8)];  tp_group = dist.new_group(tp_ranks)
# pp_ranks = [rank + i * 8 for i in range(4)];        pp_group = dist.new_group(pp_ranks)
# ```
#
# Two mistakes. A rank's pp list begins at the rank itself, not at its group's first. And *every* rank must call
# `new_group` for *every* group, member or not, in one order. (With `use_local_synchronization=True` groups are named
# by their ranks and only members call; overlapping groups still need one order.)

# %%
from course_lib.layout import make_layout

layout = make_layout(64, "tp-pp-dp", tp=8, pp=4, dp=2)
print("rank 63's pp group: the note", [63 + i * 8 for i in range(4)], end="; ")
print("right", next(group for group in layout.groups("pp") if 63 in group))
counts = {axis: len(layout.groups(axis)) for axis in ("tp", "pp", "dp")}
print(f"new_group calls of each rank: {counts}, {sum(counts.values())}", end="; ")
print("your prediction:", predicted_new_groups)

# %% [markdown]
# ## The same in PyTorch
# Make all groups, on all ranks, in one order; keep your own. `init_device_mesh` does this for a mesh.

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

GROUPS = {axis: make_layout(4, tp=2).groups(axis) for axis in ("tp", "dp")}


def in_pytorch():
    dist.init_process_group("gloo")
    rank, mine, sums = dist.get_rank(), {}, {}
    for name, groups in GROUPS.items():
        for ranks in groups:  # those of others too
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
# Five runs on four ranks, one of them correct (its cause is `"correct"`). Each makes two groups for every pair of tp,
# `acts` and `norms`, starts a sum on both and waits; then it calls on tp, then on dp. Right sums of ranks 0 to 3
# begin with 3 and 300 for ranks 0 and 1, 7 and 700 for ranks 2 and 3.
#
# - **creation**: one rank made `norms` before `acts`
# - **order**: two ranks call on dp before tp
# - **axis**: one rank calls on dp where tp is due, and then on dp again
# - **skipped**: one rank skips its last call, on dp
#
# For each, name the cause, the axis (`"norms"` for the group made too early, else the axis of the call that came too
# early, in place of another or not at all) and the faulty rank (of two, the lower one); None if correct. One run
# leaves two suspects: then set CHECKED. Another SEED draws other runs.

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
# - **It returns, and a pair has mixed both kinds in its sums** (201 and 102, or 403 and 304): *creation*. Both ranks
#   of the pair show it; checked mode lists the group that each rank was about to make, and one differs.
# - **All four wait, two at tp, two at dp**: *order*. tp is due first, so the ranks at dp called too early.
# - **One has returned, three wait**: *axis*. The rank that returned got a call on dp from its partner, which then
#   waits at dp once more: that partner is the culprit. The others wait for it, directly or not.
# - **Three have returned, one waits at dp**: *skipped*. The culprit is its partner on dp, which has returned.
#
# Ask for each waiting rank: for which rank does it wait, and where is that rank? Follow the chain until it closes or
# ends at a rank that has returned.
# </details>

# %%
lab.grade(diagnosis)  # lab.reveal() shows what they have

# %% [markdown]
# ## When not to use it
# - **Priorities where links are apart.** TP on NVLink and DP on network cards do not share a link: priorities change
#   nothing.
# - **Priorities where the link is full.** They move the waiting and add no bandwidth.
# - **Priorities in a bubble.** A gap opens when the program has waited for a call of a higher axis. While a rank
#   waits for a message, no held call is sent, though the link may be idle.
# - **Pieces too small.** Each costs 2(n-1) alphas.
# - **A group for everything.** Each is made by all ranks, members or not.
# - **Checked mode in a long run.** Each call waits for all its ranks: turn it on to find a fault.
#
# ## The table that grows
# The step of four layers above; code is lines of the library, comm's collectives not counted.

# %%
from course_lib.view import code_lines

code = {"one link, held and split": code_lines(comm.Priorities)}
print(
    f"{'per rank and step':24}{'calls':>7}{'bytes sent':>12}{'step':>9}{'exposed':>10}{'code':>6}"
)
for name, result in steps.items():
    seen, ledger = summarize(read(result.traces)[0]), result.ledgers[0]
    calls = ledger.calls("tp") + ledger.calls("dp")
    line = f"{calls:7}{int(ledger.wire_bytes()):12,}{1e3 * seen.makespan:6.0f} ms"
    print(f"{name:24}{line}{1e3 * seen.exposed:7.0f} ms{code.get(name, 0):6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if their links are apart, and all ranks start their calls in one order.** A note says that groups
# keep axes from blocking each other. A group isolates a queue. The axes still share the wire, and opposite orders
# block for ever.
#
# **Claim 2: false.** Groups are named by counting: a rank that skips another rank's group counts wrongly from there
# on.
#
# **Claim 3: false.** Each rank decides alone what is ready. Two ranks that decide differently wait for each other.

# %%
print(
    f"small calls behind a bucket on one link: {small_calls(queued['own groups, one link']):.0f} ms"
)
print(f"your votes: {vote_1}, {vote_2}, {vote_3}")

# %% [markdown]
# ## Cheat-sheet
# Computed from the library's formulas: the largest piece that fits into a gap of 1 ms, and how many groups a job makes.


# %%
def cheat_sheet():
    print(
        "make    all groups, on all ranks, in one order; one group an axis, even of the same ranks"
    )
    print("call    overlapping groups in one order on all ranks, started calls too")
    print(
        "send    what ranks wait for first: tp, pp, dp; hold the rest, split it, never by a clock"
    )
    print(
        "find    hang: who waits for whom, back to a ring or to one that returned; checked=True\n"
    )
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
# ## Your turn
# [Five exercises](../exercises/11_groups_in_anger.ipynb), each on its own: queues, sums and rings by hand (10
# minutes); the piece that fits into a gap (5); which ranks never continue (15); a bucket that gives way on real ranks
# (15); and groups made right in raw PyTorch (15).

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
# The largest piece of a bucket with a ring all-reduce that finishes within a gap, in float32 elements (4 bytes each):
# an integer, 0 where even an empty piece takes longer. Times are in microseconds, `beta` in bytes per microsecond.
# `ranks` is 2 or more.


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
    """Sorted ranks of ``waits`` that wait for ever.

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
# Some small tensors are to be summed over tp, one after the other: wait for each. A bucket, of one dimension, is to
# be summed over dp. It gives way: send it in pieces of `most` elements (the last may be shorter), in order, and
# *start* one piece after each wait for a small call. Start the remaining pieces when there are no more small calls.
# Do not wait for a piece before the last small call has finished.
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
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** TP and DP have groups of their own, and each DP bucket still delays the next TP call. How?
#
# <details><summary>Answer</summary>
# They share a link. A group separates queues, not wires. Hold the buckets back and split them, or give DP another link.
# </details>
#
# **2.** Why does `Priorities` count the calls for which the program has waited, instead of checking whether the link
# is free?
#
# <details><summary>Answer</summary>
# Different ranks would see a free link at different times, and start their calls in different orders. The program is
# the same on all ranks of a group.
# </details>
#
# **3.** A run hangs. Both ranks of a group wait in the same line. What do you suspect?
#
# <details><summary>Answer</summary>
# That it is not the same group: groups made in different orders, or an axis confused with another. Run it checked.
# </details>
#
# **4.** A job passes on gloo and hangs on cards now and then. Name one cause from this lesson.
#
# <details><summary>Answer</summary>
# Calls on overlapping groups are started in different orders. gloo runs started calls side by side; on cards each
# call is a kernel that occupies its place until its partners have joined.
# </details>
#
# **5.** 4,096 ranks, TP 8, PP 16, DP 32. How many groups does rank 17 make, and how many is it in?
#
# <details><summary>Answer</summary>
# 512 + 256 + 128 = 896; it is in three.
# </details>
#
# ## Sources and what next
# - NVIDIA, *NCCL user guide*, [Using multiple NCCL communicators
#   concurrently](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html); discussed in
#   [nccl #195](https://github.com/NVIDIA/nccl/issues/195).
# - PyTorch, [`new_group`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group) and
#   [#25390](https://github.com/pytorch/pytorch/issues/25390): each rank made its own group alone.
# - [torchrec #4708](https://github.com/meta-pytorch/torchrec/pull/4708): one group is one queue, on cards.
# - Peng et al. 2019, *ByteScheduler*, [doi:10.1145/3341301.3359642](https://doi.org/10.1145/3341301.3359642); Jayarajan et al.
#   2019, *P3*, [arXiv:1905.03960](https://arxiv.org/abs/1905.03960): priorities and pieces.
# - Chandy, Misra and Haas 1983, [doi:10.1145/357360.357365](https://doi.org/10.1145/357360.357365): a rank that waits
#   for all others.
#
# Next: lesson 12 trains one model under all axes at once.
