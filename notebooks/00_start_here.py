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
# *15 minutes to read and run, 10 to build.* Training on many GPUs is done by many processes that send each other
# messages. Each process is a **rank**. Nothing about that needs a GPU: here you start four real ranks from a
# cell, let them talk, count the bytes they send, and look at what they did and when.
#
# Run the cells from top to bottom (Shift+Enter).

# %% [markdown]
# ## One function, four processes
# `run` sends the function below to four fresh processes and returns their results in the order of the ranks.
# What a rank prints stands behind its number. `make_mesh` tells a rank what it is: here the four ranks lie on
# one axis, `dp` (data parallel).

# %%
from course_lib.launch import run
from course_lib.mesh import make_mesh

greeting = "hello"  # a variable of the notebook travels along


def hello():
    mesh = make_mesh()
    print(f"{greeting} from rank {mesh.dp.rank} of {mesh.dp.size}")
    return 10 * mesh.dp.rank


results = run(hello, n=4)
results

# %% [markdown]
# ## One collective
# Each rank holds 1,024 numbers, all equal to its rank plus 1. An *all-reduce* gives every rank the sum over all
# ranks. Before you run the next cells: what will each rank hold, and how many bytes does each rank have to send,
# if all do the same share? A number takes 4 bytes. Write your prediction down; `None` means that you made none.

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
# Every rank keeps a **ledger**. *Payload* is what was handed to the call; *wire* is what the ranks send for it.
# A ring all-reduce of S bytes over n ranks makes each rank send 2(n-1)/n S: here 1.5 times its 4,096 bytes.
# The table adds up all four ranks.

# %%
from course_lib import ledger

print(ledger.table(sums.ledgers))

sent = sums.ledgers[0].wire_bytes("dp")
formula = ledger.wire("all_reduce", payload=4096, n=4)
print(f"\na rank sent {sent} bytes; formula {formula}; your prediction {predicted_bytes}")
print(f"every rank holds {sums[0]['after']:g}; your prediction {predicted_value}")

# %% [markdown]
# ## What happened when
# A step of training: forward (F) and backward (B) of three micro-batches, then one all-reduce of 4 MB of
# gradients. On a small machine four ranks would fight for the cores, so this run is *paced*: F and B are sleeps of
# 20 and 40 ms, and the network is slowed down to 100 MB/s. The processes, the messages and the waiting are real, and
# rank 3 begins 30 ms late: see who waits for whom.

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
    time.sleep(0.03 if mesh.rank == 3 else 0)
    for mb in range(3):
        for op in ("F", "B"):
            with mesh.compute(op, mb=mb):
                pass  # a paced block takes its pace, whatever is done in it
    comm.all_reduce(gradients, mesh.dp)


paced = run(step, n=4, pace=pace, links=network)
timeline(paced.traces, conditions=Conditions(pace, network))

# %% [markdown]
# ## When a rank fails
# Sooner or later one does, while the others wait for it in a collective. `run` then names the culprit and where
# the others stood, stops all four, and the notebook goes on.

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
# ## Where a rank stands
# So far the ranks lay on one axis. A large training run lays them on several: neighbours in **tp** (tensor
# parallelism) share every layer, those in **pp** (pipeline parallelism) hold different layers, those in **dp** hold
# the same part of the model and different data. A rank has one number, and from it follow its *coordinates*, one on
# each axis; the ranks that differ in one coordinate only are a *group*, and talk to each other.
#
# Which axis varies fastest is a choice, the *order*. Here it is `tp-dp-pp`, the fastest first, for two machines of
# eight GPUs. Before you run the cell: which ranks does rank 5 average its gradients with (its dp group), and which
# groups cross from one machine to the other?

# %%
from course_lib.layout import drawing, make_layout

print(drawing(make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4), per_node=8))

# %% [markdown]
# ## Your turn
# [The exercises](../exercises/00_start_here.ipynb) of this lesson take ten minutes and start no rank: you write the
# two functions behind that drawing. They are what every launcher of a large run computes first, and a mistake in
# them is silent: each rank then averages with the wrong ones, and the loss still goes down.

# %% [markdown] course={"ex": "00-1"}
# ## 00-1 From a rank to its coordinates
# Three runs, with the orders in which their ranks are numbered (the fastest axis first):
#
# | ranks | order | tp | dp | pp | |
# |---|---|---|---|---|---|
# | 16 | `tp-dp-pp` | 2 | 2 | 4 | rank 5 stands at tp 1, dp 0, pp 1 |
# | 64 | `tp-pp-dp` | 8 | 2 | 4 | rank 42 stands at tp 2, pp 1, dp 1 |
# | 512 | `tp-pp-dp` | 8 | 8 | 8 | rank 100 stands at tp 4, pp 4, dp 1 |
#
# On the fastest axis the coordinate is the rank modulo the axis' size; what is left of the rank after dividing by
# that size is split among the others in the same way, like hours, minutes and seconds. Work the three lines out by
# hand, then write the function for any order and any sizes.


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
# A study note on the run with 512 ranks (`tp-pp-dp`, 8 on each axis) has this line:
#
# ```python
# pp_group = [gpu_rank + i * TP_size for i in range(PP_size)]
# ```
#
# and shows that GPU 0 is in the group 0, 8, 16, ... 56, which is right. Try it for rank 8, which is in the same
# group. What does the line forget?
#
# Write the function that gives all groups of one axis, for any order and any sizes. Every rank stands in exactly one
# of them. In the run with 16 ranks (`tp-dp-pp`) the dp groups are [0, 2], [1, 3], [4, 6], [5, 7], and so on up to
# [13, 15].


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
# The note's line starts from `gpu_rank` and should start from the first rank of its group: `gpu_rank - pp_rank *
# TP_size`. For rank 8 it gives 8, 16, ... 64, and rank 64 belongs to another replica.

# %% course={"ex": "00-2", "role": "check"}
from course_lib.grading import check

check("00-2", groups)

# %% [markdown]
# ## What next
# `course groups --world 16 --tp 2 --dp 2 --pp 4 --order tp-dp-pp` in a terminal makes the drawing above for any
# sizes. `course tour` trains a small model on four ranks and holds it to one process. Lesson 02 builds the
# all-reduce that you just used out of send and receive; lesson 03 trains with it.
