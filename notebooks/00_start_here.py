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
#     lesson: '00'
# ---

# %% [markdown]
# # 00 Start here: a function on four ranks
#
# *20 minutes to read and run, 10 to build.* A training run on many GPUs consists of many processes that send each other
# messages. Each process is called a **rank**. None of this needs a GPU, so you can start right here: four real ranks
# from one cell of this notebook. You will let them communicate, count the bytes that they send, and draw what each of
# them did and when.
#
# Run the cells from top to bottom (Shift+Enter). Every lesson begins with a vote. Write `"true"`, `"false"` or
# `"only if ..."`, or leave `None`. A later section settles both claims.
#
# 1. *One late rank makes all ranks late.*
# 2. *With twice as many ranks, each rank sends twice as much in an all-reduce.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Your machine
# `course doctor` in a terminal checks whether this machine is ready, and tells you how to fix each problem. This cell
# runs the same checks and prints only those that fail:

# %%
from course_lib import doctor

report = doctor.examine()
bad = [each for each in report.checks if each.status != "ok"]
print(f"{len(report.checks) - len(bad)} of {len(report.checks)} checks are ok")
for each in bad:
    print(f"{each.status}: {each.name} {each.value}; {each.fix}")

# %% [markdown]
# ## One function, four processes
# `run` sends the function below to four new processes and returns their results in the order of the ranks. Each line
# of output is prefixed with the rank that printed it. `make_mesh` tells a rank where it is: here all four ranks are on
# one axis, `dp`, which stands for data parallelism.

# %%
from course_lib.launch import run
from course_lib.mesh import make_mesh

greeting = "hello"  # the ranks get the variables of the notebook that the function uses


def hello():
    mesh = make_mesh()
    print(f"{greeting} from rank {mesh.dp.rank} of {mesh.dp.size}")
    return 10 * mesh.dp.rank


results = run(hello, n=4)
results

# %% [markdown]
# ## One collective
# Each rank holds a tensor of 1,024 elements, all equal to its rank plus 1. An *all-reduce* gives every rank the sum
# over all ranks. Before you run the next cells, predict two things. What will each rank hold? And how many bytes does
# each rank have to send if all ranks send equally many? An element takes 4 bytes.

# %%
predicted_value = None
predicted_bytes = None

# %%
import torch

from course_lib import comm


def add_up():
    mesh = make_mesh()
    x = torch.full((1024,), mesh.dp.rank + 1.0)
    total = comm.all_reduce(x, mesh.dp)
    return {"before": x[0].item(), "after": total[0].item()}


sums = run(add_up, n=4)
for rank, values in enumerate(sums):
    print(f"rank {rank}: {values}")

# %% [markdown]
# ## What went through the network
# Every rank now holds 1 + 2 + 3 + 4 = 10. How many bytes did this take? Every rank records its calls in a **ledger**.
# The *payload* of a call is the number of bytes in its tensor. The *wire* bytes are the bytes that the ranks send for
# the call, by formula. In a *ring*, a common algorithm for large tensors, an all-reduce of S bytes over n ranks makes
# each rank send 2(n-1)/n · S, here 1.5 times its 4,096 bytes. Lesson 02 derives this formula and compares it with the
# bytes that the kernel counts. The table adds up all four ranks; the line below it is for one rank.

# %%
from course_lib import ledger

print(ledger.table(sums.ledgers))

sent = sums.ledgers[0].wire_bytes("dp")
formula = ledger.wire("all_reduce", payload=4096, n=4)
print(f"\na rank sent {sent} bytes; formula {formula}; your prediction {predicted_bytes}")
print(f"every rank holds {sums[0]['after']:g}; your prediction {predicted_value}")

# %% [markdown]
# ## What happened when
# Now we run one step of data-parallel training. Each rank splits its batch into three *micro-batches* and computes
# forward (F) and backward (B) for each of them. Then one all-reduce adds 4 MB of gradients over the ranks. On a small
# machine four ranks would compete for the cores, so this run is *paced*: F and B are sleeps of 20 and 40 ms, and the
# network is slowed down to 100 MB/s. The processes, the messages and the waiting are real. Rank 3 begins 60 ms late.
# Look at which ranks wait for it.

# %%
import time

from course_lib.mesh import Conditions, Link, Links
from course_lib.view import timeline

slow = Link(alpha=1e-4, beta=100e6)  # 0.1 ms a message, 100 MB a second
network = Links(inside=slow, between=slow)
pace = {"F": 0.02, "B": 0.04}


def step():
    mesh = make_mesh()
    gradients = torch.ones(1_000_000)
    comm.barrier(mesh.world)  # fresh ranks do not start in the same moment
    mesh.trace.clear()
    time.sleep(0.06 if mesh.rank == 3 else 0)
    for mb in range(3):
        for op in ("F", "B"):
            with mesh.compute(op, mb=mb):
                pass  # a paced block takes its pace, whatever is done in it
    comm.all_reduce(gradients, mesh.dp)


paced = run(step, n=4, pace=pace, links=network)
timeline(paced.traces, conditions=Conditions(pace, network))

# %% [markdown]
# Ranks 0 to 2 enter the all-reduce early, but it can only finish once rank 3 has joined. The first part of their bars is
# waiting, and all four bars end at almost the same time.
#
# ## When a rank fails
# Sooner or later one rank fails while the others wait for it in a collective. `run` then names the failed rank and the
# line at which each other rank waits, and it stops all four. The notebook continues, as the second cell shows.

# %%
from course_lib.launch import RankError


def one_fails():
    mesh = make_mesh()
    if mesh.rank == 2:
        raise ValueError("rank 2 has bad data")
    comm.all_reduce(torch.ones(4), mesh.dp)


try:
    run(one_fails, n=4)
except RankError as error:
    print(error)

# %%
run(hello, n=2)  # and the next cell works

# %% [markdown]
# ## The axes of a rank
# So far all ranks were on one axis. A large training run has several:
#
# - on **tp** (tensor parallelism), the ranks of a group hold different shards of the same layers,
# - on **pp** (pipeline parallelism), they hold different layers,
# - on **dp** (data parallelism), they hold the same weights and read different data.
#
# The number of a rank determines its *coordinates*, one on each axis. A *group* of an axis consists of the ranks that
# differ only in their coordinate on that axis. Ranks communicate within a group.
#
# Which axis varies fastest is a choice, called the *order*. Here it is `tp-dp-pp`, with the fastest axis first, on two
# machines of eight GPUs. Which ranks are in the dp group of rank 5, with which it averages its gradients? And on which
# axis do groups cross from one machine to the other?

# %%
predicted_dp_group = None  # the ranks, as [5, ...]
predicted_axis = None  # "tp", "dp" or "pp"

# %%
from course_lib.layout import drawing, make_layout

layout = make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4)
print(drawing(layout, per_node=8))

dp_group = next(group for group in layout.groups("dp") if 5 in group)
crossing = [axis for axis in layout.order for group in layout.groups(axis)[:1] if group[-1] >= 8]
print(f"\nrank 5 averages with {dp_group}; your prediction {predicted_dp_group}")
print(f"groups that cross: {', '.join(crossing)}; your prediction {predicted_axis}")

# %% [markdown]
# In the drawing, a node is a machine. An `mp` group joins the axes tp and pp, so it holds one copy of the model. The axis
# `cp` belongs to lesson 09. Here only pp, the slowest axis, crosses machines. Links inside a machine are usually much
# faster than links between machines. That is why tp, which communicates in every layer, is nearly always the fastest
# axis, and why pp and dp, which communicate less often, are placed across machines.
#
# ## The same in PyTorch
# The library adds little to PyTorch. With `run(..., init=False)` a rank does what a training script does after
# `torchrun`, PyTorch's launcher, has started it. The backend `gloo` sends messages between processes on CPUs. Two
# things differ from our library. `dist.all_reduce` *writes into* its tensor, while `comm.all_reduce` returns a new one.
# And a device mesh names the *slowest* axis first. The cell checks that sums and groups are the same as ours:

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def in_pytorch():
    dist.init_process_group("gloo")
    x = torch.full((1024,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {axis: dist.get_process_group_ranks(grid[axis].get_group()) for axis in ("tp", "dp")}
    dist.destroy_process_group()
    return x[0].item(), groups


ours = make_layout(4, "tp-dp", tp=2, dp=2)
for rank, (value, groups) in enumerate(run(in_pytorch, n=4, init=False)):
    assert value == sums[rank]["after"]
    for axis, group in groups.items():
        assert group == next(own for own in ours.groups(axis) if rank in own)
    print(f"rank {rank}: sum {value:g}, groups {groups}: as ours")

# %% [markdown]
# ## Your turn
# [The exercises](../exercises/00_start_here.ipynb) of this lesson take ten minutes and start no rank. You write the two
# functions behind that drawing: from a rank to its coordinates, and from coordinates to groups. Every large training
# run computes both at its start, and a mistake in them is silent: ranks average gradients with the wrong ranks, and the
# loss may still fall.
#
# This is how the exercises work, here and in every lesson:
#
# - `course start 00` in a terminal copies the lesson and its exercises to `work/`, where they are yours.
# - Write your code into the answer cell, run it, and run the check below it. The check says how many cases passed and
#   explains the first mistake. It draws new numbers each time.
# - `hint("00-1")` in a cell, after `from course_lib.grading import hint, progress`, gives the next of three hints.
#   `progress()` shows how far you are. In a terminal these are `course hint 00 1` and `course list`.
# - `course solution 00 1` shows the solution after your first attempt. `course grade` with the name of your file gives
#   the official grade, which runs your answers in a fresh kernel.

# %% [markdown] course={"ex": "00-1"}
# ## 00-1 From a rank to its coordinates
# Three runs, with the orders in which their ranks are numbered (the fastest axis first):
#
# | ranks | order | tp | dp | pp | |
# |---|---|---|---|---|---|
# | 16 | `tp-dp-pp` | 2 | 2 | 4 | rank 5 has tp 1, dp 0, pp 1 |
# | 64 | `tp-pp-dp` | 8 | 2 | 4 | rank 42 has tp 2, pp 1, dp 1 |
# | 512 | `tp-pp-dp` | 8 | 8 | 8 | rank 100 has tp 4, pp 4, dp 1 |
#
# On the fastest axis the coordinate is the rank modulo the axis' size. The quotient is split among the other axes in
# the same way, like hours, minutes and seconds. Work out the three lines by hand, then write the function for any
# order and any sizes.


# %% course={"ex": "00-1", "role": "answer"}
def coordinates(rank: int, sizes: dict[str, int], order: str) -> dict[str, int]:
    """Coordinate of a rank on every axis of ``sizes``.

    coordinates(5, {"tp": 2, "dp": 2, "pp": 4}, "tp-dp-pp") is {"tp": 1, "dp": 0, "pp": 1};
    ``order`` names the axes, the fastest first.
    """
    # BEGIN SOLUTION
    where = {}
    for axis in order.split("-"):
        rank, where[axis] = divmod(rank, sizes[axis])
    return where
    # END SOLUTION


# %% course={"ex": "00-1", "role": "check"}
from course_lib.grading import check

check("00-1", coordinates)

# %% [markdown] course={"ex": "00-2"}
# ## 00-2 From coordinates to groups
# For the run with 512 ranks (`tp-pp-dp`, 8 on each axis), this line is often written:
#
# ```python
# pp_group = [gpu_rank + i * TP_size for i in range(PP_size)]
# ```
#
# For GPU 0 it gives the group 0, 8, 16, ... 56, which is right. Try it for rank 8, which is in the same group. What does
# the line forget?
#
# Write the function that gives all groups of one axis, for any order and any sizes. Every rank is in exactly one of
# them. In the run with 16 ranks (`tp-dp-pp`) the dp groups are [0, 2], [1, 3], [4, 6], [5, 7], and so on up to [13,
# 15].


# %% course={"ex": "00-2", "role": "answer"}
def groups(axis: str, sizes: dict[str, int], order: str) -> list[list[int]]:
    """All groups of ``axis``: the ranks that differ in this coordinate only, ascending.

    groups("tp", {"tp": 2, "dp": 2, "pp": 1}, "tp-dp-pp") is [[0, 1], [2, 3]].
    """
    # BEGIN SOLUTION
    names = order.split("-")
    world, stride = 1, 1
    for name in names:
        world *= sizes[name]
    for name in names[: names.index(axis)]:
        stride *= sizes[name]  # how far apart two neighbours on the axis are
    firsts = [rank for rank in range(world) if rank // stride % sizes[axis] == 0]
    return [[first + stride * i for i in range(sizes[axis])] for first in firsts]
    # END SOLUTION


# %% [markdown] course={"ex": "00-2", "role": "answer"}
# The line starts from `gpu_rank` and should start from the first rank of its group: `gpu_rank - pp_rank *
# TP_size`. For rank 8 it gives 8, 16, ... 64, and rank 64 belongs to another replica.

# %% course={"ex": "00-2", "role": "check"}
from course_lib.grading import check

check("00-2", groups)

# %% [markdown]
# ## The claims settled
# **Claim 1: only if they meet in a collective.** Look at the step with the late rank again, in numbers:

# %%
begin = min(span.start for trace in paced.traces for span in trace.spans)


def ends(op):
    """When each rank's last ``op`` ended, in ms since the first rank began."""
    last = [max(span.end for span in trace.spans if span.op == op) for trace in paced.traces]
    return [round(1000 * (end - begin)) for end in last]


print(f"own work done after     {ends('B')} ms")
print(f"all-reduce done after   {ends('all_reduce')} ms; your vote: {vote_1}")

# %% [markdown]
# The compute of ranks 0 to 2 was not late. But an all-reduce finishes only after every rank has joined, so all four
# ranks end together. Training has a collective in every step, so the slowest rank sets the speed of all ranks.
#
# **Claim 2: false.** We repeat the all-reduce on two, four and eight ranks:

# %%
for n in (2, 4, 8):
    sent = float(run(add_up, n=n).ledgers[0].wire_bytes("dp"))
    print(f"{n} ranks: a rank sends {sent:.0f} bytes, {sent / 4096:.2f} times what it holds")
print(f"your vote: {vote_2}")

# %% [markdown]
# The factor 2(n-1)/n grows towards 2 and never reaches it. But the number of messages that a rank sends one after the
# other in a ring does grow with n.
#
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Eight ranks all-reduce a tensor of 1 GB (1e9 bytes) in a ring. How much does each rank send?
#
# <details><summary>Answer</summary>
#
# 2 · 7/8 · 1 GB = 1.75 GB.
#
# </details>
#
# **2.** Three ranks call `all_reduce`, the fourth returns early because it has no data left. What happens?
#
# <details><summary>Answer</summary>
#
# The three wait until a timeout or forever. Every rank of the group must call a collective, or none of them.
#
# </details>
#
# **3.** In the table of the ledger, payload was 16,384 bytes and wire 24,576. Which ranks do these bytes belong to,
# and which of the two depends on the algorithm?
#
# <details><summary>Answer</summary>
#
# Both are sums over all four ranks: 4 · 4,096 bytes of tensors and 4 · 6,144 bytes sent. The wire bytes depend on the
# algorithm: another algorithm than the ring may send a different number.
#
# </details>
#
# **4.** 64 ranks, order `tp-pp-dp`, tp 8, pp 4, dp 2, machines of eight GPUs. Rank 42: its coordinates? Does its pp
# group stay inside a machine?
#
# <details><summary>Answer</summary>
#
# 42 = 2 + 8 · (1 + 4 · 1): tp 2, pp 1, dp 1. The pp group is 34, 42, 50, 58: one rank on each of four machines.
#
# </details>
#
# **5.** Why was the timeline paced, and what in it is real?
#
# <details><summary>Answer</summary>
#
# Four ranks that compute on fewer cores slow each other down, and the picture would show that. Sleeping ranks do not
# compete. The processes, the messages, their order and the waiting are real.
#
# </details>
#
# ## Sources and what next
# - Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, Journal of
#   Parallel and Distributed Computing 69(2): where 2(n-1)/n comes from, and why ranks that do the additions
#   themselves cannot send less on average. If a switch does the additions, they send less (lesson 02).
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): which axis to put where, section 3.
# - [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html): the calls of the raw cell above.
#
# `course groups --world 16 --tp 2 --dp 2 --pp 4 --order tp-dp-pp` in a terminal makes the drawing for any sizes.
# `course tour` trains a small model on four ranks and compares it with one process. Lesson 02 builds the all-reduce
# that you just used from send and receive, and lesson 03 trains with it.
