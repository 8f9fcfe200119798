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
# six of these tasks, each about one technique. You need lessons 02 to 09.
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
# - **Raw `torch.distributed`.** The functions of `course_lib` that communicate refuse to run, and so do the classes of
#   torch that would be the answer, such as `DistributedDataParallel`.
# - **The signature and the docstring** are all that you get. They state everything that the check expects.
# - **`group` is a process group that the course has made**, and in some launches it is not the world. In the group of the
#   global ranks 1 and 3, global rank 3 has group rank 1. `dist.get_rank(group)` and `dist.get_world_size(group)` count
#   inside the group, but `dist.send` and `dist.recv` expect a global rank. `dist.get_global_rank(group, r)`
#   returns the global rank of group rank r.
# - **One rank is a group too.** Your code must work there.
#
# ## How to work
# Copy the exercises with `course start 16b` and open them from `work/`. A check answers in a few seconds, and you may run
# it as often as you like. When 30 minutes are over, write down how many cases pass, then finish the kata.
# `course hint 16b 16b-1` gives the first of three hints, `course solution 16b 16b-1` a solution, and `course grade` the
# official grade.
#
# Repeat a kata after some days with `course start 16b --fresh`, until it takes you 20 minutes.
#
# ## What the check tests
# - **Results**: outputs, gradients and weights, compared with one process. The launches have one to four ranks, and in
#   one of them the group is only a part of the world. Do not expect n to divide a size, unless the docstring says so.
# - **Traffic**: operations, bytes, and the ranks to which you send.
# - **Waits**: each asynchronous call is waited for before its result is used and before its input is overwritten.
# - **Side effects**: inputs are not changed, unless the docstring asks for it.
# - **A second call**, with other values and other sizes, in the same processes.
#
# [The six exercises](../exercises/16b_katas.ipynb) are in a notebook of their own.

# %% course={"role": "given"}
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager

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
    Shards may differ by one element, but do not pad them: a rank sends 2(n-1)/n of the bytes of x.
    Besides x, tensors may take at most three times its bytes at any time. On one rank, return x or
    a copy.
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

# %% [markdown] course={"ex": "16b-2"}
# ## 16b-2 Data parallelism with buckets
# Average gradients over the ranks of a group, in buckets that leave while backward runs.


# %% course={"ex": "16b-2", "role": "answer"}
class BucketedDDP:
    """Average the gradients of ``parameters`` over the ranks of ``group``, bucket by bucket.

    ``parameters`` is a list of parameters of one dtype, in the order in which the model uses them.
    Fill the buckets from the last parameter to the first. A parameter that would make a bucket
    larger than ``bucket_bytes`` begins the next one, so a larger parameter is alone in its bucket.

    A step is: every backward but the last inside ``with ddp.accumulate():``, the last backward
    outside, then ``ddp.finish()``. Per step, each bucket is sent in one asynchronous all-reduce of
    its bytes, in the same order on every rank. A hook of the last backward sends a bucket as soon as
    it is full, if all buckets before it are sent; several at once if need be. Gradients may arrive
    in any order, in another one on each rank, and only finish waits.
    """

    def __init__(
        self, parameters: list[nn.Parameter], bucket_bytes: int, group: dist.ProcessGroup
    ) -> None:
        # BEGIN SOLUTION
        self.group, self.accumulating = group, False
        self.buckets, used = [[]], 0
        for p in reversed(parameters):
            if self.buckets[-1] and used + p.nbytes > bucket_bytes:
                self.buckets.append([])
                used = 0
            self.buckets[-1].append(p)
            used += p.nbytes
            p.register_post_accumulate_grad_hook(self._ready)
        self._begin()
        # END SOLUTION

    def accumulate(self):
        """Return a context manager: a backward inside it only adds to this rank's gradients."""
        # BEGIN SOLUTION
        return self._accumulating()
        # END SOLUTION

    def finish(self) -> None:
        """Wait, so that every ``p.grad`` is the average over the ranks; be ready for a next step.

        A parameter that this rank did not use counts as zeros, and gets the average of all ranks.
        """
        # BEGIN SOLUTION
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            flat /= dist.get_world_size(self.group)
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part.view_as(p)
        self._begin()

    def _begin(self):
        self.sent, self.missing = [], [set(bucket) for bucket in self.buckets]

    @contextmanager
    def _accumulating(self):
        self.accumulating = True
        yield
        self.accumulating = False

    def _ready(self, parameter):
        if self.accumulating:
            return
        for missing in self.missing:
            missing.discard(parameter)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self._send()

    def _send(self):
        bucket = self.buckets[len(self.sent)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads])
        self.sent.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))
        # END SOLUTION


# %% course={"ex": "16b-2", "role": "check"}
from course_lib.grading import check

check("16b-2", BucketedDDP)

# %% [markdown] course={"ex": "16b-3"}
# ## 16b-3 Column and row
# Write the two linears of tensor parallelism, forward and backward. The check uses them as an MLP, with a GELU between
# them, in one step and in three steps of SGD.


# %% course={"ex": "16b-3", "role": "answer"}
def column_linear(x: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's features of ``F.linear(x, W, b)``, [..., F/n].

    x [..., D] is the same on all n ranks of ``group``. ``weight`` [F/n, D] and ``bias`` [F/n] are
    this rank's rows of W and b. In backward, the gradient of x is the whole one on every rank, and
    the gradients of weight and bias are those of this rank's rows. Communication: none in forward,
    one all-reduce as large as x in backward.
    """
    # BEGIN SOLUTION
    return F.linear(Enter.apply(x, group), weight, bias)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None

    # END SOLUTION


def row_linear(h: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``F.linear(H, W, b)``, [..., D], the same on all n ranks of ``group``.

    h [..., F/n] is this rank's features of H, and ``weight`` [D, F/n] its columns of W. ``bias``
    [D] is the whole b, the same on every rank. In backward, the gradients of h and weight are those
    of this rank's shards, and the gradient of bias is the whole one on every rank. The gradient
    that arrives is the same on every rank. Communication: one all-reduce as large as the result in
    forward, none in backward.
    """
    # BEGIN SOLUTION
    return Leave.apply(F.linear(h, weight), group) + bias


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

    # END SOLUTION


# %% course={"ex": "16b-3", "role": "check"}
from course_lib.grading import check

check("16b-3", column_linear, row_linear)

# %% [markdown] course={"ex": "16b-4"}
# ## 16b-4 The 1F1B loop
# One stage of a model per rank: forward and backward of all micro-batches in the order of 1F1B, with messages between
# neighbors.


# %% course={"ex": "16b-4", "role": "answer"}
def one_f_one_b(
    stage: nn.Module,
    micro_batches: list[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
) -> float:
    """Leave the gradients of the step in ``stage.parameters()``; return its loss on the last rank.

    stage          the module of this rank, which has stage r of the model; y = stage(x) has the
                   shape and dtype of x, so the gradient of x has them too
    micro_batches  m pairs (x, target), all of the same shape; rank 0 uses x, the last rank uses
                   target, and the others need only the shape and dtype of x
    loss           loss(y, target) is the loss of one micro-batch, a scalar tensor
    group          p ranks; m may be smaller than p

    The loss of the step is the mean over the m micro-batches; all ranks but the last return 0.0.
    Backward adds to what ``.grad`` holds. In the order of 1F1B, rank r begins with
    min(p - 1 - r, m) forwards, then does one forward and one backward in turn, and ends with the
    backwards that are left. So it stores the activations of p - r micro-batches at most. Backward
    takes the oldest micro-batch in flight. Each activation and each gradient is one message to a
    neighbor.
    """
    # BEGIN SOLUTION
    p, rank, m = dist.get_world_size(group), dist.get_rank(group), len(micro_batches)
    first, last = rank == 0, rank == p - 1
    in_flight, leaving, total = deque(), [], 0.0

    def send(x, to):
        x = x.detach().contiguous()
        leaving.append(dist.isend(x, dist.get_global_rank(group, to), group))

    def receive(source):
        x = torch.empty(micro_batches[0][0].shape, dtype=micro_batches[0][0].dtype)
        dist.recv(x, dist.get_global_rank(group, source), group)
        return x

    def forward(mb):
        nonlocal total
        x, target = micro_batches[mb]
        x = x if first else receive(rank - 1).requires_grad_()
        y = stage(x)
        if last:
            y = loss(y, target) / m
            total += y.item()
        else:
            send(y, rank + 1)
        in_flight.append((x, y))

    def backward():
        x, y = in_flight.popleft()
        y.backward(None if last else receive(rank + 1))
        if not first:
            send(x.grad, rank - 1)

    begin = min(p - 1 - rank, m)
    for mb in range(begin):
        forward(mb)
    for mb in range(begin, m):
        forward(mb)
        backward()
    for _ in range(begin):
        backward()
    for work in leaving:
        work.wait()
    return total
    # END SOLUTION


# %% course={"ex": "16b-4", "role": "check"}
from course_lib.grading import check

check("16b-4", one_f_one_b)

# %% [markdown] course={"ex": "16b-5"}
# ## 16b-5 A ZeRO-1 step
# AdamW on a flat parameter, whose moments are sharded over the ranks of a group.


# %% course={"ex": "16b-5", "role": "answer"}
def zero1_step(
    weights: Tensor, gradients: Tensor, state: dict, options: dict, group: dist.ProcessGroup
) -> Tensor:
    """Return the weights [P] after one step of AdamW, the same on every rank of ``group``.

    weights    [P], the same on every rank; P need not be a multiple of n, and may be smaller
    gradients  [P], of this rank; the step uses their sum over the ranks
    state      empty in the first step; store here what the next steps need
    options    lr, betas, eps and weight_decay, as torch.optim.AdamW takes them

    Rank r owns the r-th of n shards of the flat parameter, which is padded with zeros at its end.
    It updates this shard, and stores moments of this shard only. Step t, with gradient g:

        m = beta_1 m + (1 - beta_1) g        v = beta_2 v + (1 - beta_2) g^2
        w = (1 - lr weight_decay) w - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps)

    Send as many bytes as one all-reduce of the padded gradients. Do not write into weights and
    gradients, which need not be contiguous. No tensor in state may share memory with one that is
    larger than a shard.
    """
    # BEGIN SOLUTION
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    pad = -len(weights) % n
    shard = F.pad(weights, (0, pad)).chunk(n)[rank]
    gradient = torch.empty(len(shard), dtype=shard.dtype)
    dist.reduce_scatter(gradient, list(F.pad(gradients, (0, pad)).chunk(n)), group=group)
    if not state:
        state.update(m=torch.zeros_like(gradient), v=torch.zeros_like(gradient), t=0)
    beta_1, beta_2 = options["betas"]
    state["t"] += 1
    state["m"].lerp_(gradient, 1 - beta_1)
    state["v"].lerp_(gradient**2, 1 - beta_2)
    m = state["m"] / (1 - beta_1 ** state["t"])
    v = state["v"] / (1 - beta_2 ** state["t"])
    shard = (1 - options["lr"] * options["weight_decay"]) * shard
    shard = shard - options["lr"] * m / (v.sqrt() + options["eps"])
    gathered = [torch.empty_like(gradient) for _ in range(n)]
    dist.all_gather(gathered, shard, group=group)
    return torch.cat(gathered)[: len(weights)]
    # END SOLUTION


# %% course={"ex": "16b-5", "role": "check"}
from course_lib.grading import check

check("16b-5", zero1_step)

# %% [markdown] course={"ex": "16b-6"}
# ## 16b-6 Ring attention, forward
# Causal attention on a sequence that is sharded over the ranks of a group. K and V are sent around the ring.


# %% course={"ex": "16b-6", "role": "answer"}
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return causal attention of this rank's queries, [B, s, H, K], and its log-sum-exp, [B, s, H].

    q, k, v  [B, s, H, K]: B sequences, s positions of this rank, H heads of K features; they need
             not be contiguous
    lengths  s of each rank of ``group``: rank r has ``lengths[r]`` positions, those after the
             positions of rank r - 1

    A score is q . k / sqrt(K), and the log-sum-exp of a row is log(sum(exp(scores))) over the keys
    that the query sees. Scores may be so large that exp of them overflows.

    Send K and V around the ring, rank r to rank r + 1 and the last rank to rank 0, so that every
    block visits every rank: n - 1 turns, with messages only. K and V of a block may be one message
    or two. Do the matrix products on one block while the next block is in flight. Do not write into
    q, k and v.
    """
    # BEGIN SOLUTION
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    following = dist.get_global_rank(group, (rank + 1) % n)
    previous = dist.get_global_rank(group, (rank - 1) % n)
    block = torch.stack((k, v))
    largest = q.new_full(q.shape[:-1], -torch.inf)  # of the scores so far, [B, s, H]
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for turn in range(n):
        works = []
        if turn + 1 < n:
            shape = (2, len(q), lengths[(rank - turn - 1) % n], *q.shape[2:])
            arriving = q.new_empty(shape)
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, block, following, group),
                    dist.P2POp(dist.irecv, arriving, previous, group),
                ]
            )
        if turn <= rank:  # the block of rank - turn, which is not a later one
            scores = torch.einsum("bshk,bthk->bsht", q, block[0]) * q.shape[-1] ** -0.5
            if turn == 0:
                rows = torch.arange(q.shape[1])
                future = rows > rows[:, None]  # [s, t]
                scores = scores.masked_fill(future[:, None], -torch.inf)
            new = torch.maximum(largest, scores.amax(-1))
            weights, fade = (scores - new[..., None]).exp(), (largest - new).exp()
            total = total * fade + weights.sum(-1)
            out = out * fade[..., None] + torch.einsum("bsht,bthk->bshk", weights, block[1])
            largest = new
        for work in works:
            work.wait()
        if works:
            block = arriving
    return out / total[..., None], largest + total.log()
    # END SOLUTION


# %% course={"ex": "16b-6", "role": "check"}
from course_lib.grading import check

check("16b-6", ring_attention)
