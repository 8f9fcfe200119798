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
#     lesson: '16b'
# ---

# %% [markdown]
# # 16b Six katas: from a blank file
#
# *Untimed.* A kata is a small piece of code that you write again and again until you can write it without help. In an
# interview you get a blank file, half an hour, and a sentence such as "write data parallelism with buckets". Here are
# six of these tasks, one for each technique that interviewers ask for. You need lessons 02 to 09.
#
# | kata | you write | lesson |
# |---|---|---|
# | 16b-1 | a ring all-reduce | 02 |
# | 16b-2 | data parallelism with buckets | 03 |
# | 16b-3 | the column-parallel and the row-parallel linear | 05 |
# | 16b-4 | the 1F1B loop | 07 |
# | 16b-5 | a ZeRO-1 step | 04 |
# | 16b-6 | ring attention, forward | 09 |
#
# ## The rules
# - **30 minutes for each kata**, the whole function or class at once. Set a timer, and do not open the lesson.
# - **Raw `torch.distributed`.** The functions of `course_lib` that send refuse to run, and so do the classes of torch that
#   would be the answer, such as `DistributedDataParallel`.
# - **The signature and the docstring** are all that you get. They say exactly what is expected.
# - **`group` is a process group that the course has made**, and in some launches it is not the world. In the group of the
#   global ranks 1 and 3, global rank 3 has group rank 1. `dist.get_rank(group)` and `dist.get_world_size(group)` count
#   inside the group, but the peer of a message is a global rank: `dist.get_global_rank(group, r)` converts.
# - **One rank is a group too.** It sends nothing.
#
# ## How to work
# Copy the exercises with `course start 16b` and open them from `work/`. A check answers in a few seconds, and you may run
# it as often as you like. When 30 minutes are over, write down how many cases pass, then finish the kata. `course hint
# 16b 1` gives the first of three hints, `course solution 16b-1` a solution, and `course grade` the official grade.
#
# Repeat a kata after some days with `course start 16b --fresh`, until it takes you 20 minutes.
#
# ## What the check tests
# - **Results**: outputs, gradients and weights, compared with one process. Groups have one to four ranks, and one group is
#   only a part of the world. Sizes are odd, and n need not divide them unless the docstring says so.
# - **Traffic**: operations, bytes, and the ranks to which you send.
# - **Waits**: each asynchronous call is waited for before its result is used and before its input is overwritten.
# - **Side effects**: inputs are not changed, unless the docstring asks for it.
# - **A second call**, with other values and other sizes, in the same processes.
#
# [The six exercises](../exercises/16b_katas.ipynb) are in a notebook of their own.

# %% course={"role": "given"}
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# %% [markdown] course={"ex": "16b-1"}
# ## 16b-1 A ring all-reduce
# Sum a tensor over the ranks of a group with messages alone: a reduce-scatter around the ring, then an all-gather.


# %% course={"ex": "16b-1", "role": "answer"}
def ring_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``x`` over the ranks of ``group`` on each of them; do not write into x.

    x has any shape and any number of elements, also fewer than n, the number of ranks. It need not
    be contiguous. The result has its shape and dtype.

    Use messages only: n-1 turns of reduce-scatter, then n-1 turns of all-gather. In each turn a
    rank sends one of n shards to one neighbor in the ring and receives one from the other neighbor.
    So a rank sends 2(n-1)/n of the bytes of x. At most three times these bytes may be alive at once.
    """
    # BEGIN SOLUTION
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    following = dist.get_global_rank(group, (rank + 1) % n)
    previous = dist.get_global_rank(group, (rank - 1) % n)
    shards = list(x.contiguous().view(-1).tensor_split(n))
    for turn in range(2 * (n - 1)):
        leaving, arriving = (rank - turn) % n, (rank - turn - 1) % n
        got = torch.empty_like(shards[arriving])
        send = dist.P2POp(dist.isend, shards[leaving], following, group)
        receive = dist.P2POp(dist.irecv, got, previous, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        shards[arriving] = shards[arriving] + got if turn < n - 1 else got
    return torch.cat(shards).view_as(x)
    # END SOLUTION


# %% course={"ex": "16b-1", "role": "check"}
from course_lib.grading import check

check("16b-1", ring_all_reduce)

# %% [markdown]
# ---- 16b-2: Data parallelism with buckets

# %% [markdown]
# ---- 16b-3: Column and row

# %% [markdown]
# ---- 16b-4: The 1F1B loop

# %% [markdown]
# ---- 16b-5: A ZeRO-1 step

# %% [markdown]
# ---- 16b-6: Ring attention, forward
