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
# *50 minutes to read and run, 60 to build.* A **collective** is a call that all ranks of a group make together; every
# technique of this course is ordinary arithmetic with a few of them in between. You will build the most used one,
# all-reduce, in two ways from plain messages, and predict from two numbers which way is faster when. You need lesson
# 00 (`run`, ranks, the ledger).
#
# Vote first. Write `"true"`, `"false"` or `"only if ..."`; `None` means no vote.
#
# 1. *A ring all-reduce takes the same time however many ranks take part.*
# 2. *Eight GPUs all-reduce 620 GB over NVLink with 600 GB/s in about a second.* (From a study note for interviews.)

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# Each of four ranks holds a vector, and every rank needs the sum of all four. Ranks can only send messages to one
# another. Two plans:
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
# How much does a rank send in each plan, how many messages must wait for one another, and which plan is faster?

# %% [markdown]
# ## Predict
# The vector has 1,000,000 bytes. "That link" is a slow one, on which a laptop shows clearly what happens: a message
# costs 20 ms, and then its bytes are sent at 12.5 MB/s.

# %%
predicted_ring_bytes = None  # what a rank sends in the ring
predicted_tree_bytes = None  # what rank 0 sends in the tree
predicted_ring_ms = None  # the ring on that link
predicted_tree_ms = None  # the tree on that link
predicted_crossing = None  # from how many bytes on the ring is the faster one there
predicted_alpha = None  # what a short message costs between two ranks of this machine, microseconds

# %% [markdown]
# ## One message, live
# `mesh.world` is the axis of all ranks. `send` takes a tensor and a rank. `recv` takes a tensor *like* the one that
# will arrive, because a message is bytes only, without shape or dtype. Here rank 1 is busy for 100 ms before it asks
# for its message. What does rank 0 do meanwhile?

# %%
import random
import time
from statistics import median

import torch

from course_lib import comm, ledger
from course_lib.launch import RankError, run
from course_lib.mesh import Conditions, Link, Links, make_mesh
from course_lib.view import code_lines, fit_plot, show_source, timeline

RANKS = 4


def one_message():
    mesh = make_mesh()
    comm.barrier(mesh.world)  # fresh ranks do not start in the same moment
    start = time.perf_counter()
    if mesh.rank == 0:
        comm.send(torch.tensor([3.0]), mesh.world, to=1)
    else:
        time.sleep(0.1)
        print("got", comm.recv(torch.empty(1), mesh.world, source=0))
    return time.perf_counter() - start


stood = run(one_message, n=2)
print(f"rank 0 was back from send after {1e3 * stood[0]:.0f} ms")

# %% [markdown]
# It waits. This send **blocks** until the other side has asked, even for four bytes. (NCCL, the library that PyTorch
# uses on GPUs, may return earlier. Rely on neither.)

# %% [markdown]
# ## All send first
# The study notes have every rank do this with its neighbors:
#
# ```python
# dist.send(pp_tensor, dst=next_pp_rank, group=pp_group)
# dist.recv(pp_tensor, src=prev_pp_rank, group=pp_group)
# ```
#
# Here it is on a ring of four, in raw PyTorch.

# %%
import torch.distributed as dist


def as_noted():
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank))
    dist.send(x, dst=(rank + 1) % n)
    dist.recv(x, src=(rank - 1) % n)


try:
    run(as_noted, n=RANKS, timeout=3)
except RankError as error:
    print(error)

# %% [markdown]
# Read in the report *which rank waits where*. Every send waits for a receive, and every receive comes after a send.
# (On a line the last rank sends nothing. It receives at once and the others follow, one by one: no hang, but never
# two messages at a time.)
#
# These two lines have more faults. `recv` overwrites the tensor that was sent. `dst` and `src` are ranks of the
# world, even when a group is given. And for a send that does not block, the note writes `dist.send(...,
# async_op=True)`:

# %%
import inspect

print("send knows async_op:", "async_op" in inspect.signature(dist.send).parameters)
show_source(comm.exchange)

# %% [markdown]
# (The right call is `isend`.) `exchange` is the repair: it posts the send *and* the receive, then waits for both.
# Another repair: even ranks send first, odd ranks receive first.


# %%
def pass_on():
    axis = make_mesh().world
    return comm.exchange(torch.tensor(axis.rank), axis, axis.next, axis.previous).item()


run(pass_on, n=RANKS)

# %% [markdown]
# ## Six collectives, and who ends with what
# Broadcast copies, reduce adds, gather joins, scatter splits; *all* means that every rank gets the result. Each rank
# holds four numbers, its pieces. The digit names the piece, its place names the rank: 30 is the third piece of rank
# 1, and 1111 is the first piece summed over all four ranks. (To all-gather a rank brings its first piece only.)


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
# All-to-all is a transposition: rank r ends with piece r of every rank. The last line is worth remembering: an
# all-reduce is a reduce-scatter and an all-gather. Lessons 04 (ZeRO) and 06 (sequence parallelism) use them apart.

# %% [markdown]
# ## Build it: the ring
# The first half adds, the second copies. In each turn a rank sends one piece to the next rank and receives one from
# the previous: always the piece that it received, and perhaps added to, in the turn before. Rank r begins with piece
# r-1 (from 0), so that it ends the first half with the sum of piece r.

# %%
show_source(comm.ring_reduce_scatter, comm.ring_all_gather, comm.ring_all_reduce)

# %% [markdown]
# Watch it. The folded cell keeps every tensor that a rank receives; the table shows them turn by turn.

# %% jupyter={"source_hidden": true}
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
    return {"arrived": [piece.item() for piece in network.arrived], "total": total.tolist()}


trace = run(traced, n=RANKS)
print(f"{'arrives at':12}" + "".join(f"{f'rank {rank}':>8}" for rank in range(RANKS)))
for turn in range(2 * (RANKS - 1)):
    print(f"turn {turn + 1:<7}" + "".join(f"{one['arrived'][turn]:8}" for one in trace))
print("\nend, on every rank:", trace[0]["total"])
assert all(one["total"] == trace[0]["total"] for one in trace)

# %% [markdown]
# Follow the fourth piece down its diagonal. Rank 1 receives 4 and adds its 40. Rank 2 receives 44 and adds 400. Rank
# 3 receives 444, adds 4000 and owns 4444: after n-1 turns each rank owns the sum of one piece. In turns 4 to 6 the
# ranks send fully reduced pieces only.

# %% [markdown]
# ## Build it: the tree
# In each round the upper rank of a pair sends its sum to the lower one and is done. Then the same tree backwards.

# %%
show_source(comm.tree_reduce, comm.tree_broadcast)

# %% [markdown]
# ## Count and look
# Both plans on the slow link of the predictions. Ranks and messages are real; the library delays each message by 20
# ms plus its bytes at 12.5 MB/s.

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
        WAYS[way](x, mesh.world)


def receiving(result):
    """The receives of each rank in order, numbered."""
    for one in result.traces:
        waits = [span for span in one.spans if span.op == "recv"]
        yield from (replace(span, label=f"{turn}") for turn, span in enumerate(waits, 1))


runs = {way: run(once, way, n=RANKS, links=SLOW) for way in WAYS}
for way, result in runs.items():
    messages = [own.calls(op="send") for own in result.ledgers]
    sent = [int(own.wire_bytes()) for own in result.ledgers]
    print(f"{way}: messages sent by ranks 0 to 3: {messages}, bytes {sent}, in all {sum(sent):,}")
ring_formula = int(ledger.wire("all_reduce", S, RANKS))
print(f"\nring, a rank: formula 2(n-1)/n S = {ring_formula:,}, predicted {predicted_ring_bytes}")
tree_formula = (RANKS - 1).bit_length() * S
print(f"tree, rank 0: formula log2(n) S = {tree_formula:,}, predicted {predicted_tree_bytes}")

# %% [markdown]
# The total bytes are the same. The ring divides them evenly; in the tree ranks 0 and 2 send twice as much as the
# others. Now the time. A box is a rank that waits for a message and receives it, the number counts the messages of
# the rank.

# %%
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
# In the ring every rank receives in every turn. In the tree ranks 1 and 3 send their vectors at once and then wait
# for the sum, rank 3 through all four rounds. (Rank 1 gets it with rank 2: each pair has its own link.)

# %% [markdown]
# ## Two numbers: alpha and beta
# How long does a message of S bytes take? The usual model has two parts:
#
# $$T(S) = \alpha + \frac{S}{\beta}$$
#
# **alpha** is what a message costs however short it is, in seconds; **beta** is how many bytes follow in a second. Do
# not look them up, measure them. Two ranks play ping-pong with messages from 64 bytes to 16 MB, 60 rounds through all
# sizes in shuffled order. The fastest of each size counts, because whatever else runs here can only delay a message.
# A line is fitted through these points.

# %%
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
print(f"your prediction of alpha: {predicted_alpha}")

# %%
fit_plot(
    {"one message between two ranks": one_way},
    {"one message between two ranks": lambda size: mine.alpha + size / mine.beta},
    title="alpha and beta of this machine",
)

# %% [markdown]
# On the left the line is flat: there a longer message is almost free. On the right it rises with the bytes. At the
# bend both parts are equal, at alpha times beta bytes:

# %%
bend = mine.alpha * mine.beta
print(f"the bend of this machine: {bend:,.0f} bytes")
print(f"1 message of {S:,} bytes: {1e3 * (mine.alpha + S / mine.beta):.2f} ms")
print(f"1,000 messages of {S // 1000:,}: {1e3 * 1000 * (mine.alpha + S / 1000 / mine.beta):.2f} ms")

# %% [markdown]
# The same bytes cost many times as much in messages far below the bend. So lesson 03 packs gradients into buckets.

# %% [markdown]
# ## Predict ring and tree
# Count messages that wait for one another, and the bytes in each:
#
# $$T_{ring} = 2(n-1)\left(\alpha + \frac{S}{n\,\beta}\right) \qquad
# T_{tree} = 2\lceil \log_2 n \rceil \left(\alpha + \frac{S}{\beta}\right)$$
#
# The ring has more alphas, the tree more S/beta: for short vectors the tree should win, for long ones the ring. Both
# on the slow link, with vectors of five sizes. (The folded cell is the stopwatch.)


# %% jupyter={"source_hidden": true}
def stopwatch(sizes, repeats):
    """Seconds of each all-reduce on this rank, sizes and ways in shuffled order."""
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
# The formula of the crossing is the second exercise. (For two or three ranks there is none: the ring is never
# slower.)
#
# Now without the slow link, with the alpha and beta that you measured:

# %%
here = slowest(run(stopwatch, [1_000, 64_000, S, 4_000_000], 12, n=RANKS))
print(f"{'bytes':>10}" + "".join(f"{way + ', ms: formula':>20}{'measured':>10}" for way in WAYS))
for size in here["ring"]:
    pairs = ((SECONDS[way](size, RANKS, mine), here[way][size]) for way in WAYS)
    print(f"{size:10,}" + "".join(f"{1e3 * said:20.2f}{1e3 * took:10.2f}" for said, took in pairs))

# %% [markdown]
# Here the model may be far off. Alpha and beta came from the best moments of *two* ranks, of which one sends at a
# time. Now four send at once. Where they share two cores a message waits until its receiver gets a core, and the
# ring, which needs all four in every turn, waits most. **alpha and beta belong to a situation.** Measure them with as
# many ranks, on the links and under the load that you mean. For this reason the course asks its questions about time
# on slow links and paced ranks.

# %% [markdown]
# ## Algorithm bandwidth and bus bandwidth
# A benchmark all-reduces S bytes in t seconds. S/t is the **algorithm bandwidth**, from which the duration follows.
# It says little about the link, because a rank has sent 2(n-1)/n S. Multiplied by that factor it is the **bus
# bandwidth**, which you may compare with the link. NVIDIA's `nccl-tests` prints both (`algbw`, `busbw`). Here for a
# link with a tenth of the alpha:


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
# Long vectors (the last three lines): algbw falls although nothing got worse, busbw stays near the link. Short
# vectors: both say nothing about it, because alpha is most of the time. Quote the time then.

# %% [markdown]
# ## Units that trap
# Behind a number with GB/s, ask: bits or bytes? One way or both? A port, a GPU or a node? A link or an algorithm?

# %%
for said, means in {
    "port of 400 Gb/s (bits)": f"{400 / 8:.0f} GB/s each way",
    "node with 8 such ports": f"{8 * 400 / 8:.0f} GB/s a node, {400 / 8:.0f} a GPU",
    "A100, NVLink '600 GB/s'": f"12 links of 25 GB/s each way: {12 * 25} GB/s out, {12 * 25} in",
    "H100, NVLink '900 GB/s'": f"18 links of 25 GB/s each way: {18 * 25} GB/s out, {18 * 25} in",
    "InfiniBand '25 GB/s'": f"{25 * 8} Gb/s, one way",
}.items():
    print(f"{said:26}{means}")

# %% [markdown]
# The notes set NVLink's 600 (both ways) beside InfiniBand's 25 (one way): a factor of 24 where 12 is right. They mix
# volumes too: "data parallel 2M, tensor parallel 4BSH per layer". A rank *sends* 2M for one all-reduce of M; 4BSH is
# the *payload* of four all-reduces of BSH: batch, sequence, hidden. In one measure: 2M and 8BSH, each times (n-1)/n.

# %% [markdown]
# ## The same in PyTorch
# `batch_isend_irecv` posts a list of sends and receives at once; `exchange` calls it underneath. The ring in raw
# PyTorch, compared with ours and with `dist.all_reduce`:


# %%
def in_pytorch(x_of_rank):
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    x = x_of_rank[rank]
    pieces = list(x.tensor_split(n))
    for turn in range(2 * (n - 1)):
        out, into = (rank - turn - 1) % n, (rank - turn - 2) % n
        arrived = torch.empty_like(pieces[into])
        sending = dist.P2POp(dist.isend, pieces[out], (rank + 1) % n)
        receiving = dist.P2POp(dist.irecv, arrived, (rank - 1) % n)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        pieces[into] = pieces[into] + arrived if turn < n - 1 else arrived
    total = x.clone()
    dist.all_reduce(total)  # in place
    dist.destroy_process_group()
    return torch.cat(pieces), total


def with_comm(x_of_rank):
    axis = make_mesh().world
    return comm.ring_all_reduce(x_of_rank[axis.rank], axis)


torch.manual_seed(0)
x_of_rank = torch.randn(RANKS, 1_003)  # 1,003 numbers: the pieces are uneven
raw = run(in_pytorch, x_of_rank, n=RANKS, init=False)
ours = run(with_comm, x_of_rank, n=RANKS)
for (ring, total), our_ring in zip(raw, ours, strict=True):
    assert torch.equal(ring, our_ring)
    assert torch.allclose(ring, total, rtol=1e-5, atol=1e-5)
off = max((ring - total).abs().max().item() for ring, total in raw)
print(f"raw ring and ours: equal to the last bit; all_reduce of gloo differs by {off:.1e} at most")

# %% [markdown]
# ## Break it and diagnose
# Five all-reduces of the same vectors. One is correct (its cause is `"correct"`). The others:
#
# - **half-way**: only the reduce-scatter of the ring was written; its sum is stored back into x
# - **summed twice**: a finished sum is all-reduced again (a note writes `Y = AllReduce(Y1 + Y2)`, but no rank has Y1
#   + Y2: the all-reduce *is* that plus sign)
# - **own order**: every rank collects all vectors and adds them up as they arrive
# - **own block**: in one phase of the ring one rank sends on its own block, whatever arrives
#
# For each name the cause, the collective that is missing, one too many or wrong (`"reduce_scatter"`, `"all_gather"`,
# `"all_reduce"`), and the rank (a number or `"all"`). The last columns are the four pieces of the result on ranks 0
# to 3: `.` is right, `x` is wrong. Another SEED draws other runs.

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
    pieces = list(own)
    for adds in (True, False):
        faulty = half == ("reduce_scatter" if adds else "all_gather")
        for turn in range(n - 1):
            leaving = (axis.rank - turn - adds) % n
            arriving = (leaving - 1) % n
            like = pieces[arriving]
            got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=like)
            pieces[arriving] = own[arriving] if faulty else got + like if adds else got
    return torch.cat(pieces)


def all_reduced(lab_run):
    mesh = make_mesh()
    axis, x = mesh.world, x_of_rank[mesh.rank]
    if lab_run.has("half-way"):
        pieces = list(x.tensor_split(axis.size))
        pieces[axis.rank] = comm.ring_reduce_scatter(x, axis)
        return torch.cat(pieces)
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
    "    error, relative   length   ranks differ by   messages   bytes a rank   pieces on ranks 0 to 3"
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
# - **An error of rounding, the same bits on all ranks**, 2(n-1) messages: the correct run.
# - **Exactly n times too long**: *summed twice*.
# - **Half the messages**: *half-way*.
# - **An error of rounding, but ranks differ**: *own order*. Copies that are not equal drift apart in training. In the ring
#   each sum is made on one rank and copied.
# - **All messages, pieces wrong**: *own block*. If ranks agree, sums went wrong, in the reduce-scatter: the one right piece
#   started at the culprit, and piece k starts at rank k + 1. If not, right sums were copied wrongly, in the
#   all-gather: the culprit has only its own piece.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# Look again at the runs that are wrong; `lab.reveal()` shows the causes.
#
# One more fault is silent where it happens. Rank 0 sends three elements to a rank that expects four:


# %%
def too_short():
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)
        return None
    buffer = torch.zeros(4)
    dist.recv(buffer, src=0)
    return buffer


print("received:", run(too_short, n=2)[1])


def with_our_send():
    axis = make_mesh().world
    if axis.rank == 0:
        return comm.send(torch.ones(3), axis, to=1)
    return comm.recv(torch.zeros(4), axis, source=0)


try:
    run(with_our_send, n=2, checked=True)
except RankError as error:
    print("\nthe same, checked:", "\n".join(str(error).splitlines()[:3]))

# %% [markdown]
# No error: the last element is the buffer's old content. `run(..., checked=True)` compares shape and dtype of every
# call on all sides before it is made. That takes time; use it when numbers look strange.

# %% [markdown]
# ## When not to use it
# - **No ring for short vectors or thousands of ranks**: 2(n-1) alphas. Libraries choose by size, as you would now.
# - **No tree of whole vectors for long ones.** Split into pieces that follow one another down the tree, a vector
#   needs few alphas *and* uses all links. Sanders et al. do it with two trees at once; so does NCCL.
# - **No single ring over unequal links.** Every turn waits for the slowest. Reduce-scatter inside each node,
#   all-reduce between the nodes, all-gather inside: then the slow links carry one shard only.
# - **Not your own, in earnest.** `dist.all_reduce` is compiled, and others have found its mistakes already.

# %% [markdown]
# ## The table that grows
# Four ranks, S = 400,000 bytes. *One after another* is measured with a stopwatch: on a link where a message costs 100
# ms and its bytes nothing, time / alpha counts the messages that waited for each other. The bytes are of the rank
# that sends most. (All-to-all is torch's own. For such calls the ledger and the slow link use the formulas; `course
# bench wire` checks them against counted bytes.)

# %%
ALPHA = Link(alpha=0.100, beta=1e15)
PIECE = (RANKS - 1) / RANKS
LOG = (RANKS - 1).bit_length()
OPERATIONS = {  # made of, messages one after another, bytes that the fullest rank sends, per S
    "broadcast, tree": (comm.tree_broadcast, LOG, LOG),
    "reduce, tree": (comm.tree_reduce, LOG, 1),
    "all_gather, ring": (comm.ring_all_gather, RANKS - 1, PIECE),
    "reduce_scatter, ring": (comm.ring_reduce_scatter, RANKS - 1, PIECE),
    "all_reduce, ring": (comm.ring_all_reduce, 2 * (RANKS - 1), 2 * PIECE),
    "all_reduce, tree": (comm.tree_all_reduce, 2 * LOG, LOG),
    "all_to_all": (comm.all_to_all, RANKS - 1, PIECE),
}
HALVES = {  # what these are made of counts as their code
    "all_reduce, ring": (comm.ring_reduce_scatter, comm.ring_all_gather),
    "all_reduce, tree": (comm.tree_reduce, comm.tree_broadcast),
}


def counted(size):
    mesh = make_mesh()
    found = {}
    for name, (operation, *_) in OPERATIONS.items():
        x = torch.ones(size // 4)
        x = x.chunk(RANKS)[0] if "all_gather" in name else x
        dist.barrier()
        mesh.ledger.clear()
        start = time.perf_counter()
        operation(x, mesh.world)
        seconds = time.perf_counter() - start
        found[name] = seconds / ALPHA.alpha, mesh.ledger.wire_bytes()
    return found


table = run(counted, 400_000, n=RANKS, links=Links(inside=ALPHA, between=ALPHA))
print(f"{'':22}{'one after another':^20}{'bytes a rank, at most':^23}{'code':>6}")
print(f"{'':22}{'formula':>9}{'measured':>11}{'formula':>12}{'counted':>11}")
for name, (operation, messages, share) in OPERATIONS.items():
    waited = max(one[name][0] for one in table)
    sent = max(one[name][1] for one in table)
    code = code_lines(operation, *HALVES.get(name, ())) if name != "all_to_all" else "torch"
    print(f"{name:22}{messages:9}{waited:11.1f}{share * 400_000:12,.0f}{int(sent):11,}{code:>6}")
    assert sent == share * 400_000

# %% [markdown]
# ## Cheat-sheet
# Computed from the library's formulas, for a fast link.


# %%
from course_lib.ledger import wire


def cheat_sheet(n, link):
    levels = (n - 1).bit_length()
    print(f"{n} ranks, S bytes in all; a message: alpha {1e6 * link.alpha:.0f} us + bytes / beta")
    print(f"{'':22}{'sent by a rank, of S':>21}{'messages one after another':>28}")
    for op, share, turns in (
        ("all_gather, ring", wire("all_gather", 1, n) / n, n - 1),
        ("reduce_scatter, ring", wire("reduce_scatter", n, n) / n, n - 1),
        ("all_reduce, ring", wire("all_reduce", n, n) / n, 2 * (n - 1)),
        ("all_reduce, tree", levels, 2 * levels),
    ):
        print(f"{op:22}{float(share):21.3f}{turns:28}")
    print("\nall-reduce: 2(n-1) (alpha + S/n/beta) by a ring, 2 log2(n) (alpha + S/beta) by a tree")
    print(f"{'S, bytes':>12}{'ring, us':>14}{'tree, us':>14}")
    for size in (1e3, 1e6, 1e9):
        times = (way(size, n, link) for way in (ring_seconds, tree_seconds))
        print(f"{size:12,.0f}" + "".join(f"{1e6 * seconds:14,.0f}" for seconds in times))
    print(
        f"they cross at {crossing(n, link):,.0f} bytes; alpha beta is {link.alpha * link.beta:,.0f}"
    )
    print(
        f"bus bandwidth = S / time x {float(wire('all_reduce', n, n) / n):.3f}: the bytes of a rank"
    )


cheat_sheet(8, Link(alpha=10e-6, beta=50e9))

# %% [markdown]
# ## Your turn
# [The exercises](../exercises/02_collectives.ipynb) go from a pencil to real ranks: a ring traced by hand (5
# minutes), the crossing (5), a broadcast by a tree (10), the ring all-reduce itself (25), all-to-all in raw
# `torch.distributed` (15).

# %% [markdown] course={"ex": "02-1"}
# ## 02-1 A ring of three, by hand
# Three ranks all-reduce three numbers each. A piece is one number of 4 bytes.
#
# | | piece 0 | piece 1 | piece 2 |
# |---|---|---|---|
# | rank 0 | 3 | 1 | 4 |
# | rank 1 | 1 | 5 | 9 |
# | rank 2 | 2 | 6 | 5 |
#
# The ring of the lesson: every message goes from rank r to rank r+1, and from rank 2 to rank 0. In turn 1 rank r
# sends piece r-1 (rank 0 sends piece 2). The receiver adds its own piece to it and stores the sum. In turn 2 a rank
# sends the sum that it made in turn 1. In turns 3 and 4, the all-gather, fully reduced pieces take the same way:
# first the one that the rank finished itself, then the one that it received.
#
# Take a pencil and fill in the table. Lists are in the order of the ranks, unless it says otherwise.

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
#     "rank 0 before the all-gather": None,  # its pieces 0, 1 and 2 after turn 2
#     "arrives at rank 0 in turns 3 and 4": None,  # two numbers
#     "bytes that a rank sends": None,  # in all four turns
# }
# END SOLUTION

# %% course={"ex": "02-1", "role": "check"}
from course_lib.grading import check

check("02-1", trace)

# %% [markdown] course={"ex": "02-2"}
# ## 02-2 Where ring and tree cross
# By the alpha-beta model a ring all-reduce of S bytes over n ranks takes 2(n-1) times (alpha + S/n / beta) seconds, a
# tree takes 2 ceil(log2 n) times (alpha + S / beta). For short vectors the tree is faster, for long ones the ring.
# Write the function that returns the size at which both take equally long, in bytes and not rounded. For 2 and 3 ranks
# the ring has no more messages than the tree, so the size is 0. With n = 4, alpha = 10 ms and beta = 25 MB/s it is
# 200,000.

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
# Every rank of the axis needs the `x` of rank 0. Rank 0 could send it to one rank after the other: n-1 messages
# in a row. A tree is faster: once rank 1 has x, ranks 0 and 1 can both send, then four ranks can. Write it with
# `comm.send(x, axis, to=...)` and `comm.recv(x, axis, source=...)`, for any number of ranks and any shape and dtype.
#
# The check looks at the results, at the messages (n-1 in all, each the full x), and at how many are sent one after
# another: ceil(log2 n). A single rank sends nothing.

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
# The library's `comm.tree_broadcast` takes the long steps first, from n/2 down to 1. The messages are others, their
# number is the same.

# %% course={"ex": "02-3", "role": "check"}
from course_lib.grading import check

check("02-3", tree_broadcast)

# %% [markdown] course={"ex": "02-4"}
# ## 02-4 The ring all-reduce
# The mechanism of this lesson. x is flat, of any length and dtype: `x.tensor_split(axis.size)` splits it into pieces,
# which may be uneven, and for few numbers some are empty. n-1 turns add, n-1 turns copy; in each turn a rank sends one
# piece to the next rank and receives one from the previous. Which piece begins is up to you, and so is the direction.
#
# `comm.exchange(piece, axis, to, source, like=other)` sends `piece` to rank `to` and returns what comes from rank
# `source`, a tensor like `other`; `axis.next` and `axis.previous` are the neighbors.
#
# The check looks at the sum on every rank, at the messages (2(n-1) from each rank, all to one neighbor, 2(n-1)/n S
# bytes), and at the memory: at most 3 S alive at once. x must not change. A single rank returns x. A sum by a
# collective of torch does not count.

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
    pieces = list(x.tensor_split(n))
    for turn in range(2 * (n - 1)):
        leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
        got = comm.exchange(pieces[leaving], axis, axis.next, axis.previous, like=pieces[arriving])
        pieces[arriving] = pieces[arriving] + got if turn < n - 1 else got
    return torch.cat(pieces)
    # END SOLUTION


# %% [markdown] course={"ex": "02-4", "role": "answer"}
# Rank r begins with its own piece here, so that after n-1 turns it owns the sum of piece r+1, and simply continues:
# it sends next the piece that it finished last. `comm.ring_reduce_scatter` begins one piece earlier, to end with
# piece r as a reduce-scatter must.

# %% course={"ex": "02-4", "role": "check"}
from course_lib.grading import check

check("02-4", ring_all_reduce)

# %% [markdown] course={"ex": "02-5"}
# ## 02-5 All-to-all, in raw torch.distributed
# x has n rows on every rank, and is contiguous. Row r is for rank r. In the result, row s comes from rank s. Expert
# parallelism will send tokens to their experts and back like this.
#
# Write it with `dist.isend`, `dist.irecv`, `dist.P2POp` and `dist.batch_isend_irecv` (or blocking calls in an order
# that cannot hang) on the default group, which is initialized. Nothing of course_lib. `isend` does not copy: leave a
# tensor alone until its `wait()`.
#
# The check looks at the results, at the messages (one from each rank to every other rank, (n-1)/n S bytes), and at a
# wait() for each. x must not change. A single rank sends nothing.

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
# ## The claims settled
# **Claim 1: only if the vector is so long that alpha does not matter.** A rank sends less than 2S, but every rank
# adds two messages to the chain. With round numbers for a fast network, 10 microseconds and 50 GB/s:

# %%
FAST = Link(alpha=10e-6, beta=50e9)
sizes = {"64 kB": 64_000, "16 MB": 16_000_000, "4 GB": 4_000_000_000}
print(f"{'ring, ms':>10}" + "".join(f"{name:>10}" for name in sizes) + f"{'tree, 64 kB':>14}")
for n in (4, 32, 256, 2048):
    times = "".join(f"{1e3 * ring_seconds(size, n, FAST):10.2f}" for size in sizes.values())
    print(f"{n:4} ranks{times}{1e3 * tree_seconds(64_000, n, FAST):14.2f}")
print(f"your vote: {vote_1}")

# %% [markdown]
# A short vector takes nothing but alphas. For a long one they are a fifth of the time at 2,048 ranks.
#
# **Claim 2: false.** 620 GB are the payload (the note counts 384 all-reduces of tensor parallelism in GPT-3; lesson
# 03 comes back to them). A rank of a ring sends 2(n-1)/n times that. And of the 600 GB/s, half are for receiving:

# %%
payload, n, nvlink = 620e9, 8, 600e9
sent = 2 * (n - 1) / n * payload
print(f"the note: {payload / nvlink:.1f} s")
print(
    f"sent {sent / 1e9:,.0f} GB at {nvlink / 2 / 1e9:.0f} GB/s: {sent / (nvlink / 2):.1f} s at best, alpha not counted"
)
print(f"your vote: {vote_2}")

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Gradients of a model with 7 billion parameters, 2 bytes each, 64 ranks, a ring over links of 50 GB/s each
# way. How long does the all-reduce take at best?
#
# <details><summary>Answer</summary>
# 2 · 63/64 · 14 GB / 50 GB/s = 0.55 s. The 126 alphas of some microseconds do not matter.
# </details>
#
# **2.** An all-reduce of 16 kB takes as long as one of 1 kB. Would a faster link help? What would?
#
# <details><summary>Answer</summary>
# No: that time is alpha. Fewer messages one after another (a tree) or fewer all-reduces (several vectors in one
# bucket) help.
# </details>
#
# **3.** `nccl-tests` all-reduces 1 GB over 8 A100 of one node in 8 ms. What are algbw and busbw, and what fraction of
# NVLink is that?
#
# <details><summary>Answer</summary>
# algbw 125 GB/s; busbw 125 · 14/8 = 219 GB/s; of the 300 GB/s that a GPU can send, 73 %. Measured against "600" it
# would look like 36 %.
# </details>
#
# **4.** A run hangs. The report: rank 0 in all_reduce, rank 1 in all_reduce, rank 2 in recv from rank 3, rank 3 in
# all_reduce. Which ranks do you look at first?
#
# <details><summary>Answer</summary>
# Ranks 2 and 3. Rank 2 waits for a message that rank 3 did not send before its all-reduce: either rank 3 forgot the
# send or rank 2 has one receive too many. Ranks 0 and 1 are only waiting for them.
# </details>
#
# **5.** A colleague replaces the all-reduce by an all-gather of the whole vectors and adds them up on every rank,
# "which saves a phase". What does it cost at n = 8, and what may go wrong?
#
# <details><summary>Answer</summary>
# A rank sends 7 S instead of 1.75 S and holds eight vectors. And if the ranks add in different orders, their results
# differ in the last bits: the replicas drift apart.
# </details>
#
# ## Sources and what next
# - Hockney 1994, *The communication challenge for MPP: Intel Paragon and Meiko CS-2*,
#   [doi:10.1016/S0167-8191(06)80021-9](https://doi.org/10.1016/S0167-8191%2806%2980021-9): a message in two numbers.
# - Thakur, Rabenseifner and Gropp 2005, *Optimization of Collective Communication Operations in MPICH*,
#   [doi:10.1177/1094342005051521](https://doi.org/10.1177/1094342005051521): for each collective several algorithms,
#   and from which size on each is used. Read it next.
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*,
#   [doi:10.1016/j.jpdc.2008.09.002](https://doi.org/10.1016/j.jpdc.2008.09.002): the ring, and why no all-reduce can
#   send less.
# - Sanders, Speck and Träff 2009, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*,
#   [doi:10.1016/j.parco.2009.09.001](https://doi.org/10.1016/j.parco.2009.09.001): a tree whose links are all busy.
# - NVIDIA, [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
#   algorithm and bus bandwidth, with the factor of every collective. The links of A100 and H100: [NVIDIA
#   NVLink](https://www.nvidia.com/en-us/data-center/nvlink/).
#
# Next: lesson 03 runs one all-reduce per backward pass and hides most of it.
