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
#     lesson: '02'
# ---

# %% [markdown]
# # 02 Collectives from send and receive: ring, tree, alpha-beta
#
# *45 minutes to read and run, 60 to build.* In a ring of ranks, each sends a tensor to the next rank and then
# receives one from the previous rank. This program of two lines looks harmless, but it hangs forever. We repair it and
# build an all-reduce in two ways. Then two numbers predict which way is faster. You need lesson 00.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *A ring all-reduce takes the same time however many ranks take part.*
# 2. *Eight A100 GPUs all-reduce 620 GB over NVLink with 600 GB/s in about a second.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Four ranks that wait forever
# Here are the two lines in raw PyTorch, on four ranks. `run` gives up after three seconds:

# %%
import random
import time
from statistics import median

import torch
import torch.distributed as dist

from course_lib import comm, ledger
from course_lib.launch import RankError, run
from course_lib.mesh import Conditions, Link, Links, make_mesh
from course_lib.view import fit_plot, show_source, timeline

RANKS = 4


def all_send_first():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank))
    dist.send(x, dst=(rank + 1) % n)
    dist.recv(x, src=(rank - 1) % n)


try:
    run(all_send_first, n=RANKS, timeout=3)
except RankError as error:
    print(error)

# %% [markdown]
# All four ranks wait in `send`. With gloo, the library that PyTorch uses between CPUs, a send blocks until the other
# rank receives, even for a few bytes. So no rank ever reaches its `recv`. With NCCL on GPUs, short messages may get
# through, but do not rely on that. The repair is to start both messages first and to wait afterwards, as in `exchange`:

# %%
show_source(comm.exchange)


def pass_on():
    axis = make_mesh().world
    return comm.exchange(torch.tensor(axis.rank), axis, axis.next, axis.previous).item()


run(pass_on, n=RANKS)

# %% [markdown]
# Each rank has received the number of the previous rank.
#
# ## Six collectives
# A **collective** is a call that all ranks of a group make together. Broadcast copies, reduce adds, gather joins and
# scatter splits; *all* means that every rank gets the result. In the next cell, 30 is the third number of rank 1, and
# 1111 is the sum of all first numbers. For `all_gather`, a rank contributes only its first number.


# %%
def six():
    axis = make_mesh().world
    x = torch.tensor([1, 2, 3, 4]) * 10**axis.rank
    total = comm.tree_reduce(x, axis)  # all ranks call it; the sum is on rank 0 alone
    return {
        "before": x,
        "broadcast": comm.broadcast(x, axis),
        "reduce": total if axis.rank == 0 else None,
        "all_gather": comm.all_gather(x[:1], axis),
        "reduce_scatter": comm.reduce_scatter(x, axis),
        "all_reduce": comm.all_reduce(x, axis),
        "all_to_all": comm.all_to_all(x, axis),
        "two halves": comm.all_gather(comm.reduce_scatter(x, axis), axis),
    }


ends = run(six, n=RANKS)
print((" " * 16 + "".join(f"{f'rank {rank}':24}" for rank in range(RANKS))).rstrip())
for name in list(ends[0])[:-1]:
    held = ("-" if one[name] is None else " ".join(map(str, one[name].tolist())) for one in ends)
    print(f"{name:16}" + "".join(f"{text:24}" for text in held).rstrip())
for one in ends:
    assert torch.equal(one["two halves"], one["all_reduce"])
print("\nreduce_scatter, then all_gather, is all_reduce")

# %% [markdown]
# All-to-all is a transposition: rank r ends with number r of every rank. The last line shows that an all-reduce has two
# halves. Lessons 04 and 06 use them separately.
#
# ## Two plans for an all-reduce
# How can messages make an all-reduce? Here are two plans:
#
# ```
#   ring: quarters, every rank sends in every turn       tree: the whole vector, in pairs
#
#         rank 0 -----> rank 1                           round 1    0 <--- 1    2 <--- 3     add
#           ^              |                             round 2    0 <-------- 2            add
#           |              v                             round 3    0 --------> 2            copy
#         rank 3 <----- rank 2                           round 4    0 ---> 1    2 ---> 3     copy
#
#         6 turns: 3 that add, 3 that copy
# ```
#
# | symbol | meaning |
# |---|---|
# | n | ranks |
# | S | bytes of the vector on each rank |
# | m | bytes of one message |
# | alpha | seconds per message, however short it is |
# | beta | bytes per second of a link |
#
# Predict for S = 1,000,000 bytes and a slow link with alpha = 20 ms and beta = 12.5 MB/s:

# %%
predicted_ring_bytes = None  # what a rank sends in the ring
predicted_tree_bytes = None  # what rank 0 sends in the tree
predicted_ring_ms = None  # the ring on that link
predicted_tree_ms = None  # the tree on that link
predicted_crossing = None  # bytes of the vector from which on the ring is faster there
predicted_alpha = None  # microseconds that a short message takes between two ranks of this machine

# %% [markdown]
# The ring splits the vector into n shards. In each turn a rank sends one shard to the next rank and receives another
# from the previous rank, which it sends on in the next turn. In the first n-1 turns a rank adds its own values to the
# shard that arrives, and in the last n-1 turns it only copies. Rank r begins with shard r-1, so it ends the first half
# with the sum of shard r:

# %%
show_source(comm.ring_reduce_scatter, comm.ring_all_gather, comm.ring_all_reduce)

# %% [markdown]
# The folded cell records every number that a rank receives. Rank 0 first sends its last shard, 4. Follow it down the
# diagonal:

# %% jupyter={"source_hidden": true}
# Record every tensor that torch receives during a ring all-reduce.
from torch.utils._python_dispatch import TorchDispatchMode


class Listening(TorchDispatchMode):
    """Keeps every tensor that torch is asked to receive into."""

    def __init__(self):
        super().__init__()
        self.arrived = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name == "c10d::recv_":
            self.arrived += args[0]
        return function(*args, **(kwargs or {}))


def traced():
    axis = make_mesh().world
    x = torch.tensor([1, 2, 3, 4]) * 10**axis.rank
    with Listening() as network:
        total = comm.ring_all_reduce(x, axis)
    return {"arrived": [shard.item() for shard in network.arrived], "total": total.tolist()}


trace = run(traced, n=RANKS)
print(f"{'arrives at':12}" + "".join(f"{f'rank {rank}':>8}" for rank in range(RANKS)))
for turn in range(2 * (RANKS - 1)):
    print(f"turn {turn + 1:<7}" + "".join(f"{one['arrived'][turn]:8}" for one in trace))
print("\nend, on every rank:", trace[0]["total"])
assert all(one["total"] == trace[0]["total"] for one in trace)

# %% [markdown]
# Rank 1 receives 4 and adds its 40. Rank 2 receives 44 and adds 400, and so on. After three turns each rank has the
# full sum of one shard, and then ranks only copy.
#
# In each pair of the tree, the higher rank sends its partial sum to the lower rank. At last rank 0 has the total, and
# the same tree copies it back:

# %%
show_source(comm.tree_reduce, comm.tree_broadcast)

# %% [markdown]
# ## What each rank sends
# Each rank of the ring sends 2(n-1) messages of S/n bytes, in all 2(n-1)/n S. In the tree each message has S bytes.
# Every rank except 0 sends its sum once, and every rank sends the total to the ranks that it received from. We run both
# on the slow link. The messages are real, the library delays them, and the operating system's kernel counts their
# bytes:

# %%
from dataclasses import replace

S = 1_000_000
LINK = Link(alpha=0.020, beta=12.5e6)
SLOW = Links(inside=LINK, between=LINK)
WAYS = {"ring": comm.ring_all_reduce, "tree": comm.tree_all_reduce}


def once(way):
    mesh = make_mesh()
    x = torch.ones(S // 4)
    for _ in range(2):  # the first one warms up
        comm.barrier(mesh.world)
        mesh.ledger.clear()
        mesh.trace.clear()
        with mesh.kernel_bytes() as kernel:
            WAYS[way](x, mesh.world)
    return None if kernel.by_axis is None else kernel.by_axis["world"]


def tree_messages(rank):
    children = [step for step in (1, 2) if rank % (2 * step) == 0 and rank + step < RANKS]
    return (rank > 0) + len(children)


runs = {way: run(once, way, n=RANKS, links=SLOW) for way in WAYS}
formulas = {
    "ring": [int(ledger.wire("all_reduce", S, RANKS))] * RANKS,
    "tree": [tree_messages(rank) * S for rank in range(RANKS)],
}
print(
    f"{'bytes sent':14}" + "".join(f"{f'rank {rank}':>11}" for rank in range(RANKS)) + "     total"
)
for way, result in runs.items():
    for name, sent in (("formula", formulas[way]), ("kernel", list(result))):
        counts = [f"{'no count' if size is None else f'{size:,}':>11}" for size in sent]
        total = "" if None in sent else f"{sum(sent):10,}"
        print(f"{way} {name:9}" + "".join(counts) + total)
    for own, formula, kernel in zip(result.ledgers, formulas[way], result, strict=True):
        assert own.wire_bytes() == formula
        assert kernel is None or formula <= kernel <= 1.02 * formula
messages = {way: [own.calls(op="send") for own in result.ledgers] for way, result in runs.items()}
print(f"messages sent by ranks 0 to 3: {messages}")
print(f"you predicted {predicted_ring_bytes} in the ring, {predicted_tree_bytes} in the tree")

# %% [markdown]
# The kernel counts a little more than the formula, because gloo adds a header to each message. The totals are nearly
# equal. But the ring spreads them evenly, and in the tree ranks 0 and 2 send twice as much as the others.
#
# In each box of these timelines, a rank waits for a message and receives it:


# %%
def receiving(result):
    """The receives of each rank in order, numbered."""
    for one in result.traces:
        waits = [span for span in one.spans if span.op == "recv"]
        yield from (replace(span, label=f"{turn}") for turn, span in enumerate(waits, 1))


timeline(
    receiving(runs["ring"]),
    conditions=Conditions(links=SLOW),
    title="Ring: six messages one after another, each a quarter",
)

# %%
timeline(
    receiving(runs["tree"]),
    conditions=Conditions(links=SLOW),
    title="Tree: four messages one after another, each the whole vector",
)

# %% [markdown]
# The ring needs more messages in a row, but each takes less time. In the tree, rank 3 waits for all four messages: two
# to rank 0, one to rank 2, and the last to itself.
#
# ## Two numbers predict the time
# In the usual model, the time of one message has two parts:
#
# $$T(m) = \alpha + \frac{m}{\beta}$$
#
# To measure alpha and beta of your machine, two ranks send each other messages of 64 bytes to 17 MB. We fit a line to
# the fastest time of each size:

# %% jupyter={"source_hidden": true}
# Measure alpha and beta between two ranks.
from course_lib.comm.alpha_beta import crossing, fit_link, ring_seconds, tree_seconds

SIZES = [64 * 4**k for k in range(10)]


def ping_pong(repeats):
    axis = make_mesh().world
    order = random.Random(0)  # the same on both ranks
    seconds = {size: [] for size in SIZES}
    for _ in range(repeats):
        for size in order.sample(SIZES, len(SIZES)):
            x = torch.ones(size // 4)
            start = time.perf_counter()
            for _ in range(2):
                for sender in (0, 1):
                    if axis.rank == sender:
                        comm.send(x, axis, to=1 - sender)
                    else:
                        comm.recv(x, axis, source=sender)
            seconds[size].append((time.perf_counter() - start) / 4)  # four messages
    return {size: min(times) for size, times in seconds.items()}


one_way = run(ping_pong, 60, n=2)[0]
mine = fit_link(one_way)
print(
    f"this machine: alpha = {1e6 * mine.alpha:.0f} microseconds, beta = {mine.beta / 1e9:.2f} GB/s"
)
print(f"1 message of {S:,} bytes: {1e3 * (mine.alpha + S / mine.beta):.2f} ms")
print(f"1,000 messages of {S // 1000:,}: {1e3 * 1000 * (mine.alpha + S / 1000 / mine.beta):.2f} ms")
print(f"your prediction of alpha: {predicted_alpha}")

# %%
fit_plot(
    {"one message between two ranks": one_way},
    {"one message between two ranks": lambda size: mine.alpha + size / mine.beta},
    title="alpha and beta of this machine",
)

# %% [markdown]
# On the left the line is flat, because alpha is nearly all of the time. So the same bytes take far longer in short
# messages, and lesson 03 packs gradients into buckets.
#
# For an all-reduce we count the messages that wait for one another, and the bytes of each:
#
# $$T_{ring} = 2(n-1)\left(\alpha + \frac{S}{n\,\beta}\right) \qquad
# T_{tree} = 2\lceil \log_2 n \rceil \left(\alpha + \frac{S}{\beta}\right)$$
#
# The ring has more messages in a row, but the tree sends more bytes in a row. So the tree should be faster for short
# vectors and the ring for long ones. We test this on the slow link:


# %% jupyter={"source_hidden": true}
# Measure ring and tree on the slow link, sizes and ways in shuffled order.
def stopwatch(sizes, repeats):
    """Seconds of each all-reduce on this rank."""
    axis = make_mesh().world
    order = random.Random(0)
    todo = [(way, size) for way in WAYS for size in sizes]
    seconds = {each: [] for each in todo}
    for _ in range(repeats):
        for way, size in order.sample(todo, len(todo)):
            x = torch.ones(size // 4)
            dist.barrier()
            start = time.perf_counter()
            WAYS[way](x, axis)
            seconds[way, size].append(time.perf_counter() - start)
    return seconds


def slowest(result):
    """Way -> size -> median over the repeats of the slowest rank's seconds."""
    found = {way: {} for way in WAYS}
    for way, size in result[0]:
        times = [max(each) for each in zip(*(one[way, size] for one in result), strict=True)]
        found[way][size] = median(times)
    return found


# %%
SECONDS = {"ring": ring_seconds, "tree": tree_seconds}
on_slow_link = slowest(
    run(stopwatch, [16_000, 64_000, 400_000, S, 2_000_000], 3, n=RANKS, links=SLOW)
)
print(f"{'':10}{'ring, ms':^20}{'tree, ms':^20}")
print(f"{'bytes':>10}" + 2 * f"{'formula':>10}{'measured':>10}" + "   faster")
for size in on_slow_link["ring"]:
    line = f"{size:10,}"
    for way in WAYS:
        line += (
            f"{1e3 * SECONDS[way](size, RANKS, LINK):10.0f}{1e3 * on_slow_link[way][size]:10.0f}"
        )
    print(f"{line}   {min(WAYS, key=lambda way: on_slow_link[way][size])}")
print(
    f"\nyour predictions for {S:,} bytes: ring {predicted_ring_ms} ms, tree {predicted_tree_ms} ms"
)
print(f"crossing by formula {crossing(RANKS, LINK):,.0f} bytes, predicted {predicted_crossing}")

# %%
fit_plot(
    on_slow_link,
    {way: lambda size, way=way: SECONDS[way](size, RANKS, LINK) for way in WAYS},
    title="Ring overtakes tree",
    note="Emulated link of 20 ms + bytes / 12.5 MB/s, four ranks.",
)

# %% [markdown]
# The measured times are somewhat longer, because gloo needs time for each message. The curves cross between 64,000 and
# 400,000 bytes, as the formula says.
#
# ## Bus bandwidth, and a switch that adds
# How well is the link used? NVIDIA's `nccl-tests` divides S by the time and prints the **algorithm bandwidth**,
# `algbw`. But each rank of a ring sends 2(n-1)/n S. Multiplied by 2(n-1)/n, algbw becomes the **bus bandwidth**,
# `busbw`, which you may compare with the link. Here alpha is only 2 ms:


# %%
def all_reduce_seconds(size):
    mesh = make_mesh()
    x = torch.ones(size // 4)
    times = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        comm.all_reduce(x, mesh.world)
        times.append(time.perf_counter() - start)
    return times[-1]  # the first warms up


QUICK = Link(alpha=LINK.alpha / 10, beta=LINK.beta)
print(f"the link carries {QUICK.beta / 1e6:.1f} MB/s")
print(f"{'ranks':>5}{'bytes':>12}{'ms':>7}{'algbw, MB/s':>13}{'busbw, MB/s':>13}")
for size in (16_000, 4_000_000):
    for n in (2, 4, 8):
        seconds = max(run(all_reduce_seconds, size, n=n, links=Links(QUICK, QUICK)))
        algbw = size / seconds
        busbw = algbw * 2 * (n - 1) / n
        print(f"{n:5}{size:12,}{1e3 * seconds:7.0f}{algbw / 1e6:13.1f}{busbw / 1e6:13.1f}")

# %% [markdown]
# For the long vector, algbw halves with n, but busbw stays within a fifth of the link's 12.5 MB/s. For the short vector
# alpha takes most of the time, so neither figure describes the link.
#
# Can ranks send less than 2(n-1)/n S on average? Not if they do the additions, but a switch can add, too. NCCL uses
# this by default for large all-reduces inside an H100 node, as NVLink SHARP. In the reduce-scatter a GPU [sends S and
# receives S/n](https://github.com/NVIDIA/nccl/issues/1083), and in the all-gather the reverse. That is (n+1)/n S in
# each direction: on eight GPUs, 1.125 S instead of 1.75 S. A maintainer of NCCL expects [an algbw of about 275
# GB/s](https://github.com/NVIDIA/nccl-tests/issues/212) there:

# %%
n, algbw = 8, 275  # GB/s
print(f"busbw reported   {algbw * 2 * (n - 1) / n:.0f} GB/s")
print(
    f"sent by a GPU    {algbw * (n + 1) / n:.0f} GB/s; the link carries 450 each way, a ring about 370"
)

# %% [markdown]
# The reported busbw is more than the link can carry. It says only that a ring would need links of 481 GB/s to be as
# fast. In this course all formulas assume a ring.
#
# ## The same in PyTorch
# `batch_isend_irecv` starts a list of sends and receives at once. Here is the ring in raw PyTorch, compared with ours
# and with `dist.all_reduce`:


# %%
def in_pytorch(x_of_rank):
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    x = x_of_rank[rank]
    shards = list(x.tensor_split(n))
    for turn in range(2 * (n - 1)):
        out, into = (rank - turn - 1) % n, (rank - turn - 2) % n
        arrived = torch.empty_like(shards[into])
        sending = dist.P2POp(dist.isend, shards[out], (rank + 1) % n)
        receiving = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        shards[into] = shards[into] + arrived if turn < n - 1 else arrived
    total = x.clone()
    dist.all_reduce(total)  # in place
    dist.destroy_process_group()
    return torch.cat(shards), total


def with_comm(x_of_rank):
    axis = make_mesh().world
    return comm.ring_all_reduce(x_of_rank[axis.rank], axis)


torch.manual_seed(0)
x_of_rank = torch.randn(RANKS, 1_003)  # 1,003 numbers: the shards are uneven
raw = run(in_pytorch, x_of_rank, n=RANKS, init=False)
ours = run(with_comm, x_of_rank, n=RANKS)
for (ring, total), our_ring in zip(raw, ours, strict=True):
    assert torch.equal(ring, our_ring)
    assert torch.allclose(ring, total, rtol=1e-5, atol=1e-5)
off = max((ring - total).abs().max().item() for ring, total in raw)
print(f"raw ring and ours: equal to the last bit; all_reduce of gloo differs by {off:.1e} at most")

# %% [markdown]
# Gloo adds in another order, so its sums differ in the last bits.
#
# ## Break it and diagnose
# Of five all-reduces, one is correct (`"correct"`). The others have these faults:
#
# - **half-way**: only the ring's reduce-scatter runs, and each rank stores its sum back into x
# - **summed twice**: a finished sum is all-reduced again
# - **own order**: every rank collects all vectors and adds them up as they arrive
# - **own block**: in one half of the ring, one rank always sends its own shard
#
# Name the cause, the collective that is missing, superfluous or wrong (`"reduce_scatter"`, `"all_gather"`,
# `"all_reduce"`), and the rank (a number or `"all"`). The last columns show the shards of the result on ranks 0 to 3:
# `.` is right, `x` is wrong.

# %%
SEED = 2
diagnosis = {  # such as ("half-way", "all_gather", "all"), or ("correct", None, None)
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
    "half-way": ("all_gather", "all"),
    "summed twice": ("all_reduce", "all"),
    "own order": ("reduce_scatter", "all"),
    "own block": (["reduce_scatter", "all_gather"], range(RANKS)),
}
lab = Lab("02", SEED, FAULTS)


def ring_with_own_block(x, axis, half):
    own, n = list(x.tensor_split(axis.size)), axis.size
    shards = list(own)
    for adds in (True, False):
        faulty = half == ("reduce_scatter" if adds else "all_gather")
        for turn in range(n - 1):
            leaving = (axis.rank - turn - adds) % n
            arriving = (leaving - 1) % n
            like = shards[arriving]
            got = comm.exchange(shards[leaving], axis, axis.next, axis.previous, like=like)
            shards[arriving] = own[arriving] if faulty else got + like if adds else got
    return torch.cat(shards)


def all_reduced(lab_run):
    mesh = make_mesh()
    axis, x = mesh.world, x_of_rank[mesh.rank]
    if lab_run.has("half-way"):
        shards = list(x.tensor_split(axis.size))
        shards[axis.rank] = comm.ring_reduce_scatter(x, axis)
        return torch.cat(shards)
    if lab_run.has("own order"):
        return sum(block for _, block in comm.ring(x, axis))
    if lab_run.has("own block"):
        return ring_with_own_block(x, axis, lab_run.where if lab_run.rank == axis.rank else None)
    total = comm.ring_all_reduce(x, axis)
    return comm.ring_all_reduce(total, axis) if lab_run.has("summed twice") else total


def marks(result):
    pairs = zip(result.double().tensor_split(RANKS), exact.tensor_split(RANKS), strict=True)
    return "".join("." if torch.allclose(one, right, 1e-4, 1e-4) else "x" for one, right in pairs)


exact = x_of_rank.double().sum(0)
print(
    "    error, relative   length   ranks differ by   messages     bytes sent   shards on ranks 0 to 3"
)
for lab_run in lab:
    result = run(all_reduced, lab_run, n=RANKS)
    error = max(((one - exact).norm() / exact.norm()).item() for one in result)
    length = (result[0].double().norm() / exact.norm()).item()
    apart = max((one - result[0]).abs().max().item() for one in result)
    own = result.ledgers[0]
    print(
        f"{lab_run.letter}{error:18.1e}{length:9.3f}{apart:18.1e}{own.calls(op='send'):11}", end=""
    )
    print(f"{int(own.wire_bytes()):15,}   {' '.join(map(marks, result))}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **Rounding error, the same bits on all ranks**: the correct run.
# - **Exactly n times too long**: *summed twice*.
# - **Half the messages, shards wrong**: *half-way*.
# - **Rounding error, but ranks differ**: *own order*.
# - **All messages, shards wrong**: *own block*. If ranks agree, the reduce-scatter is wrong. The one right shard began
#   at the faulty rank, and shard k begins at rank k + 1. If ranks differ, the all-gather is wrong, and the faulty rank
#   has only its own shard right.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it, and both claims
# - **No ring for short vectors**, because of its 2(n-1) alphas.
# - **No tree of whole vectors for long ones.** Between nodes, NCCL sends chunks through two trees at once, which keeps
#   all links busy.
# - **No single ring over unequal links.** Reduce-scatter inside each node, all-reduce between nodes, and all-gather
#   inside. Then each GPU sends only its shard over the slow link.
#
# **Claim 1: only roughly, and only for long vectors on eight ranks or more.** From two ranks to very many, the bytes
# per rank double from S to almost 2 S, but beyond eight ranks they grow by at most a seventh. Each further rank also
# adds two messages in a row. With alpha = 10 microseconds and beta = 50 GB/s:

# %%
FAST = Link(alpha=10e-6, beta=50e9)
sizes = {"64 kB": 64_000, "16 MB": 16_000_000, "4 GB": 4_000_000_000}
print(f"{'ring, ms':>10}" + "".join(f"{name:>10}" for name in sizes) + f"{'tree, 64 kB':>14}")
for n in (2, 8, 32, 256, 2048):
    times = "".join(f"{1e3 * ring_seconds(size, n, FAST):10.2f}" for size in sizes.values())
    print(f"{n:4} ranks{times}{1e3 * tree_seconds(64_000, n, FAST):14.2f}")
print(f"your vote: {vote_1}")

# %% [markdown]
# For 64 kB nearly all the time is alpha. For 4 GB alpha is only a fifth, even on 2,048 ranks.
#
# **Claim 2: false.** A rank of a ring sends 2(n-1)/n times the payload of 620 GB. And 600 GB/s is the sum of both
# directions, so an A100 sends at most 300 GB/s:

# %%
payload, n, nvlink = 620e9, 8, 600e9
sent = 2 * (n - 1) / n * payload
print(f"the claim: {payload / nvlink:.1f} s")
print(
    f"sent {sent / 1e9:,.0f} GB at {nvlink / 2 / 1e9:.0f} GB/s: {sent / (nvlink / 2):.1f} s at best, alpha not counted"
)
print(f"your vote: {vote_2}")

# %% [markdown]
# **The table that grows.** How many messages wait for one another? We give each message 100 ms, its bytes no time, and
# divide the measured time by 100 ms. S is 400,000 bytes. All-to-all is delayed by formula, so its count tests nothing.

# %%
ALPHA = Link(alpha=0.100, beta=1e15)
SHARD = (RANKS - 1) / RANKS
LOG = (RANKS - 1).bit_length()
OPERATIONS = {  # messages one after another, bytes that the busiest rank sends, per S
    "broadcast, tree": (comm.tree_broadcast, LOG, LOG),
    "reduce, tree": (comm.tree_reduce, LOG, 1),
    "all_gather, ring": (comm.ring_all_gather, RANKS - 1, SHARD),
    "reduce_scatter, ring": (comm.ring_reduce_scatter, RANKS - 1, SHARD),
    "all_reduce, ring": (comm.ring_all_reduce, 2 * (RANKS - 1), 2 * SHARD),
    "all_reduce, tree": (comm.tree_all_reduce, 2 * LOG, LOG),
    "all_to_all": (comm.all_to_all, RANKS - 1, SHARD),
}


def counted(size):
    mesh = make_mesh()
    found = {}
    for name, (operation, *_) in OPERATIONS.items():
        x = torch.ones(size // 4)
        x = x.chunk(RANKS)[0] if "all_gather" in name else x
        comm.barrier(mesh.world)
        mesh.ledger.clear()
        with mesh.kernel_bytes() as kernel:
            start = time.perf_counter()
            operation(x, mesh.world)
            seconds = time.perf_counter() - start
        sent = None if kernel.by_axis is None else kernel.by_axis["world"]
        found[name] = seconds / ALPHA.alpha, mesh.ledger.wire_bytes(), sent
    return found


table = run(counted, 400_000, n=RANKS, links=Links(inside=ALPHA, between=ALPHA))
print(f"{'':22}{'one after another':^20}{'bytes per rank, at most':^23}")
print(f"{'':22}{'formula':>9}{'measured':>11}{'formula':>12}{'kernel':>11}")
for name, (_, messages, share) in OPERATIONS.items():
    waited, sent = (max(one[name][i] for one in table) for i in (0, 1))
    kernel = [one[name][2] for one in table]
    count = "no count" if None in kernel else f"{max(kernel):,}"
    print(f"{name:22}{messages:9}{waited:11.1f}{share * 400_000:12,.0f}{count:>11}")
    assert sent == share * 400_000
    assert None in kernel or sent <= max(kernel) <= 1.02 * sent

# %% [markdown]
# **Cheat-sheet.** These are the formulas with the numbers of a fast link:


# %%
from course_lib.ledger import wire


def cheat_sheet(n, link):
    levels = (n - 1).bit_length()
    print(f"{n} ranks, S bytes in all; a message: alpha {1e6 * link.alpha:.0f} us + bytes / beta")
    print(f"{'':22}{'sent by a rank, max':>21}{'messages one after another':>28}")
    for op, share, turns in (
        ("all_gather, ring", wire("all_gather", 1, n) / n, n - 1),
        ("reduce_scatter, ring", wire("reduce_scatter", n, n) / n, n - 1),
        ("all_reduce, ring", wire("all_reduce", n, n) / n, 2 * (n - 1)),
        ("all_reduce, tree", levels, 2 * levels),
    ):
        print(f"{op:22}{float(share):19.3f} S{turns:28}")
    print("\nall-reduce: 2(n-1) (alpha + S/n/beta) by a ring, 2 log2(n) (alpha + S/beta) by a tree")
    print(f"{'S, bytes':>12}{'ring, us':>14}{'tree, us':>14}")
    for size in (1e3, 1e6, 1e9):
        times = (way(size, n, link) for way in (ring_seconds, tree_seconds))
        print(f"{size:12,.0f}" + "".join(f"{1e6 * seconds:14,.0f}" for seconds in times))
    print(
        f"they cross at {crossing(n, link):,.0f} bytes; alpha beta is {link.alpha * link.beta:,.0f}"
    )
    print(
        f"bus bandwidth = S / time x {float(wire('all_reduce', n, n) / n):.3f}, what a rank of a ring sends"
    )


cheat_sheet(8, Link(alpha=10e-6, beta=50e9))

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/02_collectives.ipynb) take 60 minutes.

# %% [markdown] course={"ex": "02-1"}
# ## 02-1 A ring of three, by hand
# Three ranks all-reduce vectors of three numbers. A shard is one number of 4 bytes.
#
# | | shard 0 | shard 1 | shard 2 |
# |---|---|---|---|
# | rank 0 | 3 | 1 | 4 |
# | rank 1 | 1 | 5 | 9 |
# | rank 2 | 2 | 6 | 5 |
#
# Take the ring of the lesson. Each rank sends to the next rank, and rank 2 sends to rank 0. In turn 1 rank r sends
# shard r-1, so rank 0 sends shard 2. The receiver adds its own shard to it and stores the sum. In turn 2 each rank
# sends the sum that it made in turn 1. Turns 3 and 4 are the all-gather: each rank sends first the sum that it has
# completed itself, and then the one that it has received.
#
# Fill in the table with a pencil. Lists are in the order of the ranks unless the comment says otherwise.

# %% course={"ex": "02-1", "role": "answer"}
# BEGIN SOLUTION
trace = {
    "sent in turn 1": [4, 1, 6],
    "sums of turn 1": [7, 13, 3],
    "sums of turn 2": [6, 12, 18],
    "rank 0 before the all-gather": [6, 7, 4],
    "arrives at rank 0 in turns 3 and 4": [18, 12],
    "bytes that a rank sends": 16,
}
# STUB
# trace = {
#     "sent in turn 1": None,  # the numbers that ranks 0, 1 and 2 send: [.., .., ..]
#     "sums of turn 1": None,  # the sum that each rank makes with what has arrived
#     "sums of turn 2": None,  # the same, one turn later
#     "rank 0 before the all-gather": None,  # its shards 0, 1 and 2 after turn 2
#     "arrives at rank 0 in turns 3 and 4": None,  # two numbers
#     "bytes that a rank sends": None,  # in all four turns
# }
# END SOLUTION

# %% course={"ex": "02-1", "role": "check"}
from course_lib.grading import check

check("02-1", trace)

# %% [markdown] course={"ex": "02-2"}
# ## 02-2 Where ring and tree cross
# By the alpha-beta model, a ring all-reduce of S bytes over n ranks takes 2(n-1) (alpha + S/(n beta)) seconds. A tree
# takes 2 ceil(log2 n) (alpha + S/beta) seconds. The tree is faster for short vectors, and the ring for long ones.
#
# Write the function that returns the size S at which both take equally long, in bytes and not rounded. With n = 4,
# alpha = 10 ms and beta = 25 MB/s it is 200,000. For 2 and 3 ranks the ring has no more messages than the tree, so the
# function returns 0.

# %% course={"ex": "02-2", "role": "given"}
from math import ceil, log2

from course_lib.mesh import Link

link = Link(alpha=0.010, beta=25e6)  # link.alpha in seconds, link.beta in bytes per second
print(f"a tree of 5 ranks has {ceil(log2(5))} levels; crossing(4, link) should return 200,000")

# %% course={"ex": "02-2", "role": "answer"}
# solution: course_lib.comm.alpha_beta:crossing

# %% course={"ex": "02-2", "role": "check"}
from course_lib.grading import check

check("02-2", crossing)

# %% [markdown] course={"ex": "02-3"}
# ## 02-3 A broadcast by a tree
# Every rank of the axis needs the `x` of rank 0. If rank 0 sent it to one rank after another, n-1 messages would wait
# for one another. A tree is faster: once rank 1 has x, ranks 0 and 1 can both send, and after that four ranks can.
# Write it with `comm.send(x, axis, to=...)` and `comm.recv(x, axis, source=...)`, for any number of ranks, any shape
# and any dtype. A single rank sends nothing.
#
# The check tests three things: the results, the messages (n-1 in all, each with the full x), and how many of them are
# sent one after another (ceil(log2 n)).

# %% course={"ex": "02-3", "role": "given"}
from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis


# %% course={"ex": "02-3", "role": "answer"}
def tree_broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Return the ``x`` of rank 0 on every rank of ``axis``; on others x gives shape and dtype.

    axis.rank is this rank, axis.size the number of ranks. Do not write into x. Use comm.send and
    comm.recv; collectives, and comm.tree_broadcast itself, are refused.
    """
    # BEGIN SOLUTION
    step = 1  # so many ranks have x
    while step < axis.size:
        if axis.rank < step and axis.rank + step < axis.size:
            comm.send(x, axis, to=axis.rank + step)
        elif step <= axis.rank < 2 * step:
            x = comm.recv(x, axis, source=axis.rank - step)
        step *= 2
    return x
    # END SOLUTION


# %% [markdown] course={"ex": "02-3", "role": "answer"}
# The library's `comm.tree_broadcast` takes the long steps first, from n/2 down to 1. It sends different messages, but
# the same number of them.

# %% course={"ex": "02-3", "role": "check"}
from course_lib.grading import check

check("02-3", tree_broadcast)

# %% [markdown] course={"ex": "02-4"}
# ## 02-4 The ring all-reduce
# Build the ring of this lesson. x is flat and has any length and dtype. `x.tensor_split(axis.size)` splits it into
# shards, which may be uneven. If x is shorter than the number of ranks, some shards are empty. In n-1 turns ranks add,
# and in n-1 turns they copy. In each turn a rank sends one shard to the next rank and receives one from the previous
# rank. You may choose the shard that a rank begins with, and the direction.
#
# `comm.exchange(shard, axis, to, source, like=other)` sends `shard` to rank `to` and returns the message of rank
# `source`, a tensor like `other`. `axis.next` and `axis.previous` are the neighbors.
#
# The check tests the sum on every rank, the messages (2(n-1) from each rank, all to one neighbor, 2(n-1)/n S bytes),
# and the memory (at most 3 S alive at once). Do not change x, and do not sum by a collective of torch. A single rank
# returns x.

# %% course={"ex": "02-4", "role": "given"}
import torch
from torch import Tensor

from course_lib import comm
from course_lib.mesh import Axis


# %% course={"ex": "02-4", "role": "answer"}
def ring_all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of all ranks' ``x`` on every rank. Do not write into x.

    Use comm.exchange (or comm.send and comm.recv). The ring and tree functions of comm are
    refused, and no collective may be called.
    """
    # BEGIN SOLUTION
    n, rank = axis.size, axis.rank
    shards = list(x.tensor_split(n))
    for turn in range(2 * (n - 1)):
        leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
        got = comm.exchange(shards[leaving], axis, axis.next, axis.previous, like=shards[arriving])
        shards[arriving] = shards[arriving] + got if turn < n - 1 else got
    return torch.cat(shards)
    # END SOLUTION


# %% [markdown] course={"ex": "02-4", "role": "answer"}
# Here rank r begins with its own shard, so after n-1 turns it has the sum of shard r+1. Then it continues in the same
# way and sends the shard that it completed last. `comm.ring_reduce_scatter` begins one shard earlier, because a
# reduce-scatter must end with shard r on rank r.

# %% course={"ex": "02-4", "role": "check"}
from course_lib.grading import check

check("02-4", ring_all_reduce)

# %% [markdown] course={"ex": "02-5"}
# ## 02-5 All-to-all, in raw torch.distributed
# On every rank, x is contiguous and has n rows. Row r is for rank r, and in the result row s comes from rank s. Expert
# parallelism (lesson 10) sends tokens to their experts and back in this way.
#
# Use `dist.isend`, `dist.irecv`, `dist.P2POp` and `dist.batch_isend_irecv`, or blocking calls in an order that cannot
# hang. The default group is initialized. Do not use course_lib. `isend` does not copy, so do not change a tensor before
# its `wait()` has returned.
#
# The check tests the results, the messages (one from each rank to every other rank, (n-1)/n S bytes from each), and
# that you wait for each message. Do not change x. A single rank sends nothing.

# %% course={"ex": "02-5", "role": "given"}
import torch
import torch.distributed as dist
from torch import Tensor


# %% course={"ex": "02-5", "role": "answer"}
def all_to_all(x: Tensor) -> Tensor:
    """x [n, ...] -> [n, ...]: row s of the result on rank r is row r of the x of rank s.

    n is dist.get_world_size(). Do not write into x. Use messages only, no collective.
    """
    # BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    result = x.clone()  # its own row stays, the others are overwritten
    operations = []
    for other in range(n):
        if other != rank:
            operations.append(dist.P2POp(dist.isend, x[other], other))
            operations.append(dist.P2POp(dist.irecv, result[other], other))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return result
    # END SOLUTION


# %% course={"ex": "02-5", "role": "check"}
from course_lib.grading import check

check("02-5", all_to_all)

# %% [markdown]
# **Exit questions.** Answer, then unfold.
#
# **1.** A ring of 64 ranks all-reduces 14 GB of gradients over links of 50 GB/s. How long does it take at best?
#
# <details><summary>Answer</summary>
# 2 · 63/64 · 14 / 50 = 0.55 s.
# </details>
#
# **2.** An all-reduce of 16 kB takes as long as one of 1 kB. Would a faster link help? What would?
#
# <details><summary>Answer</summary>
# No, nearly all the time is alpha. A tree has fewer messages in a row, and a bucket of several vectors needs fewer
# all-reduces.
# </details>
#
# **3.** Eight A100s in one node all-reduce 1 GB in 8 ms. What are algbw and busbw, and what fraction of NVLink is used?
#
# <details><summary>Answer</summary>
# 125 GB/s, and 125 · 14/8 = 219 GB/s, which is 73 % of 300 GB/s.
# </details>
#
# **4.** A run hangs. Ranks 0, 1 and 3 are in all_reduce, rank 2 in recv from rank 3. Where do you look first?
#
# <details><summary>Answer</summary>
# At ranks 2 and 3: a send is missing, or a receive is superfluous.
# </details>
#
# **5.** A colleague all-gathers the whole vectors, and each rank adds them up. What is the cost at n = 8, and the risk?
#
# <details><summary>Answer</summary>
# A rank sends 7 S instead of 1.75 S. If ranks add in different orders, their results differ in the last bits, and
# replicas drift apart.
# </details>
#
# **Sources.**
# - [Alpha and beta](https://doi.org/10.1016/S0167-8191%2806%2980021-9); [the ring and its
#   bound](https://doi.org/10.1016/j.jpdc.2008.09.002); [two trees](https://doi.org/10.1016/j.parco.2009.09.001);
#   [choosing by size](https://doi.org/10.1177/1094342005051521).
# - [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): algbw and busbw.
#   [NVLink](https://www.nvidia.com/en-us/data-center/nvlink/).
