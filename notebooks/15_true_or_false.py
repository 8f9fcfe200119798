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
#     lesson: '15'
# ---

# %% [markdown]
# # 15 True or false: 25 common claims on trial
#
# *45 minutes to read and run.* "DDP needs about 90 GB for a 7.5B model." "The volumes are ordered TP > DP > PP." You
# find such claims in study notes, blog posts and interview guides. Some are right, some are wrong, and many are right
# only under a condition that they leave out.
#
# This lesson is a game. You read a claim and vote on it. Then you run its check, a function that computes the quantity
# that the claim is about. At the end you get two scores: one for your votes, and one for all predictions that you typed
# in this course. You need lessons 00 to 08, 11, 12 and 14.
#
# Vote `"true"`, `"false"` or `"only if ..."` before you run the cell below the votes. There are three verdicts:
#
# | verdict | your vote | what the check computes |
# |---|---|---|
# | right | `"true"` | the value that the claim states |
# | wrong | `"false"` | another value |
# | conditional | `"only if ..."` | the claimed value under a condition, and another value otherwise |
#
# If you vote `"only if ..."`, write the condition in place of the dots, and compare it with the corrected statement. The
# words before a quotation belong to the claim.
#
# ## Memory: four claims
# 1. About Llama 3: "Adam's state for 405B takes 405B x 12 bytes = 4.86 TB."
# 2. About plain data parallelism: "DDP needs about 90 GB for a 7.5B model." It adds 15 GB of weights, 15 GB of gradients
#    and 60 GB of optimizer state.
# 3. About a 70B model on 64 H100, with TP=8 and ZeRO-2 or ZeRO-3: "70B parameters x 18 bytes / 64 GPUs are about 20 GB
#    per GPU."
# 4. About a 180B model on 128 GPUs with TP=8, PP=4 and DP=4: "180B x 2 bytes / 8 (TP) = 45 GB of weights per GPU."

# %%
vote_1 = None
vote_2 = None
vote_3 = None
vote_4 = None

# %%
from course_lib.interview import trial

trial.hear("memory", vote_1, vote_2, vote_3, vote_4)

# %% [markdown]
# Claim 1 counts 12 bytes of Adam's state per parameter, and claim 2 counts 60 / 7.5 = 8, so they cannot both be right.
# The ZeRO paper counts 12: a master copy of the weight and two moments, each in float32. The 8 bytes leave out the
# master copy, and a common table of ZeRO's stages repeats this mistake in every row. The next cell prints the right
# table for 64 GPUs, with 2 + 2 + 12 bytes per parameter (`recipe=16`), and the claimed sums in the last column:

# %%
from course_lib.planner.memory import state_bytes

COPIED = {0: 15 + 15 + 60, 1: 15 + 15 + 60 / 64, 2: 15 + 15 / 64 + 60 / 64, 3: 90 / 64}
print(
    f"{'7.5B, 64 GPUs, GB':18}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'sum':>7}{'claimed':>9}"
)
for stage, claimed in COPIED.items():
    held = state_bytes(7.5e9, zero=stage, shards=64, recipe=16)
    parts = (held.weights, held.gradients, held.optimizer, held.total)
    gb = [part / 1e9 for part in parts]
    name = f"ZeRO-{stage}" if stage else "DDP"
    print(f"{name:18}{gb[0]:9.1f}{gb[1]:11.1f}{gb[2]:11.1f}{gb[3]:7.1f}{claimed:9.1f}")

# %% [markdown]
# For stages 1 and 2 the claimed sums are nearly right, because each GPU has only 1/64 of the error. A wrong formula can
# look right for one set of numbers.
#
# ## Traffic: six claims
# 5. "TP has two all-reduces per layer."
# 6. About GPT-3 on 512 GPUs with TP=8, PP=8 and DP=8: "The gradient synchronization of DP takes on the order of a
#    second."
# 7. "The volumes are ordered TP > DP > PP."
# 8. "DP across nodes is inefficient."
# 9. About gradients and weights in the same number format: "ZeRO-1 does not change the volume of DP."
# 10. About a model of M bytes, a batch B, a sequence S and a hidden size H: "DP sends 2M, FSDP 3M, TP 4 x B x S x H per
#     layer."

# %%
vote_5 = None
vote_6 = None
vote_7 = None
vote_8 = None
vote_9 = None
vote_10 = None

# %%
trial.hear("traffic", vote_5, vote_6, vote_7, vote_8, vote_9, vote_10)

# %% [markdown]
# What does a check look like? `trial.show(8)` prints the check of claim 8, which returns three values:

# %%
trial.show(8)

# %% [markdown]
# Now claim 7. The bytes of TP and PP grow with the tokens of a step, and the bytes of DP do not, so the order depends on
# the number of micro-batches. The planner counts the bytes that a GPU sends per step, for Llama 3 70B with tp=8, pp=4,
# dp=4 and micro-batches of one sequence of 8,192 tokens:

# %%
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate

SEVENTY, H100 = model("llama-3-70b"), hardware("h100")
print(f"{'micro-batches':14}{'TP, GB':>9}{'DP, GB':>9}{'PP, GB':>9}   order")
for micro_batches in (1, 32, 256, 1024):
    degrees = {"tp": 8, "pp": 4, "dp": 4, "zero": 0, "seq": 8192}
    plan = configure(SEVENTY, 128, global_batch=4 * micro_batches, **degrees)
    sent = estimate(SEVENTY, H100, plan, simulated=False).communication
    gb = {axis.upper(): sent[axis].wire_bytes / 1e9 for axis in ("tp", "dp", "pp")}
    order = " > ".join(sorted(gb, key=gb.get, reverse=True))
    print(f"{micro_batches:<14}" + "".join(f"{each:9.1f}" for each in gb.values()) + f"   {order}")

# %% [markdown]
# With one micro-batch, TP sends less than twice as much as DP. With 1,024, PP sends more than DP. But the volume alone
# does not decide where an axis belongs. A rank waits only for *exposed* communication, the part that no computation
# hides. This is why the check of claim 8 compares seconds and not bytes.
#
# ## Pipelines: three claims
# 11. About GPT-3 on 512 GPUs: "The pipeline bubble of PP=64 is 15 %."
# 12. About a forward pass through four stages, where M now counts micro-batches: "PP's volume is
#     `3 * B/M * S * H * 2 bytes`."
# 13. About GPipe with P equal stages: "The bubble ratio is (P-1)/(M+P-1)."

# %%
vote_11 = None
vote_12 = None
vote_13 = None

# %%
trial.hear("pipelines", vote_11, vote_12, vote_13)

# %% [markdown]
# The formula of claim 13 also decides claim 11. The next cell applies it to 64 stages and four numbers of micro-batches:

# %%
from course_lib.schedule import predicted_bubble

for micro_batches in (64, 128, 357, 1024):
    print(
        f"64 stages, {micro_batches:5} micro-batches: bubble {predicted_bubble('gpipe', 64, micro_batches):.0%}"
    )

# %% [markdown]
# So the question for claim 11 is whether a replica has 357 micro-batches.
#
# ## Code: eight claims
# A line of code claims that it runs and does what its comment says. Except for claim 14, these lines are from programs
# for 64 GPUs with TP=8, PP=4 and DP=2.
#
# 14. About the ranks of 512 GPUs: "`gpu_rank = 0-511`"
# 15. About process groups: "`tp_group = dist.new_group(tp_ranks)`, and likewise for PP and DP: three calls on each rank."
# 16. About the next stage of a pipeline: "`dist.send(tensor, dst=next_pp_rank, group=pp_group)`"
# 17. About a send that overlaps: "`pp_handle = dist.send(pp_tensor, dst=next_stage, async_op=True)`"
# 18. Beside it: "`tp_handle = dist.all_reduce(tp_tensor, group=tp_group, async_op=True)`"
# 19. "`dist.send(pp_tensor, dst=next_stage)` communicates in the PP group."
# 20. "`async def concurrent_communication():` runs when it is called."
# 21. About wrapping a model with FSDP: "`auto_wrap_policy=transformer_auto_wrap_policy`"

# %%
vote_14 = None
vote_15 = None
vote_16 = None
vote_17 = None
vote_18 = None
vote_19 = None
vote_20 = None
vote_21 = None

# %% [markdown]
# Runs on real ranks decide most of these claims. Four ranks have the PP groups (0 2) and (1 3), and rank 0 sends 42 to
# rank 2, which is the next stage. The cell tries the lines of claims 16 to 18. It prints what rank 2 received, or the
# error:

# %%
import functools
import time

import torch
import torch.distributed as dist

from course_lib.launch import RankError, run

SENDS = {
    "dst=1": {"dst": 1},  # the coordinate in the group
    "dst=2": {"dst": 2},  # the global rank
    "group_dst=1": {"group_dst": 1},
    "dst=2, async_op=True": {"dst": 2, "async_op": True},
}


def one_line(name):
    dist.init_process_group("gloo")
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]  # all groups, on all ranks
    rank = dist.get_rank()
    group, x = groups[rank % 2], torch.tensor([42.0 if rank == 0 else 0.0])
    if name not in SENDS:
        dist.all_reduce(x, group=group, async_op=True).wait()
    elif rank == 0:
        dist.send(x, group=group, **SENDS[name])
    elif rank == 2:
        dist.recv(x, src=0, group=group)
    return x.item()


def report(name, fn, *args, n, pick=None, **options):
    try:
        result = run(fn, *args, n=n, init=False, **options)
        print(f"{name:24} {list(result) if pick is None else result[pick]}")
    except RankError as error:
        print(f"{name:24} {str(error.exception or error).partition(' <')[0]}")


for name in (*SENDS, "all_reduce, async_op=True"):
    report(name, one_line, name, n=4, pick=2)

# %% [markdown]
# `dst=1` is refused, because global rank 1 is not in the group of rank 0. The global rank is accepted, and so is the
# coordinate as `group_dst`. The fourth line is a TypeError, while `all_reduce` does take `async_op`.
#
# Claim 19 is more dangerous, because its mistake raises no error. Take an interleaved pipeline (lesson 08) on two ranks:
# rank 0 has stages 0 and 2, and rank 1 has stages 1 and 3. Rank 0 then sends rank 1 both activations of stage 0 and
# gradients of stage 2. In the next cell it sends an activation (1) and then a gradient (100), but rank 1 receives the
# gradient first. First each kind of message has its own group, then both use the default group:


# %%
def two_messages(separate):
    dist.init_process_group("gloo")
    forward, backward = [dist.new_group([0, 1]) if separate else None for _ in range(2)]
    activation, gradient = torch.zeros(1), torch.zeros(1)
    if dist.get_rank() == 0:
        pending = [
            dist.isend(torch.tensor([1.0]), 1, group=forward),
            dist.isend(torch.tensor([100.0]), 1, group=backward),
        ]
    else:
        pending = [
            dist.irecv(gradient, 0, group=backward),
            dist.irecv(activation, 0, group=forward),
        ]
    for message in pending:
        message.wait()
    return f"activation {activation.item():g}, gradient {gradient.item():g}"


for name, separate in {"own groups": True, "default group": False}.items():
    report(name, two_messages, separate, n=2, pick=1)

# %% [markdown]
# In one group, messages from one rank to another are matched by their order, so rank 1 took the activation for the
# gradient. A `tag` separates the messages too, but NCCL does not support tags.
#
# The next cell tries claims 15, 20 and 21. For claim 15, each of four ranks creates only its own group, (0 1) or (2 3),
# and ranks 1 and 2 are a second late. Rank r then contributes 10^r to a sum over its group, so the digits show which
# ranks took part:


# %%
def own_group_only():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    time.sleep(1 if rank in (1, 2) else 0)
    tp_group = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1])
    x = torch.tensor([10.0**rank])
    dist.all_reduce(x, group=tp_group)
    return x.item()


def fsdp_modules(bind):
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    dist.init_process_group("gloo")
    policy = transformer_auto_wrap_policy
    if bind:
        policy = functools.partial(policy, transformer_layer_cls={nn.Linear})
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = FSDP(layers, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return sum(isinstance(module, FSDP) for module in model.modules())


ran = []


async def concurrent_communication():
    ran.append("all-reduce")


report("own group only", own_group_only, n=4, timeout=3)
report("wrap policy alone", fsdp_modules, False, n=2)
report("with its layer class", fsdp_modules, True, n=2)
coroutine = concurrent_communication()
print(f"{'async def, called':24} statements that ran: {len(ran)}")
coroutine.close()

# %% [markdown]
# The right sums are 11 on ranks 0 and 1, and 1100 on ranks 2 and 3. You get 1001 and 110, or a hang, because torch names
# a group by counting the calls, so both groups have the same name. Ranks 0 and 3 came first, found each other under that
# name, and summed across groups. Ranks 1 and 2 do the same if they arrive together. Otherwise the earlier one waits
# forever for a rank that has finished.
#
# FSDP calls the policy of claim 21 without a layer class, which is a TypeError. With the class, each rank has three FSDP
# modules: the model and its two layers. Now the verdicts:

# %%
trial.hear("code", vote_14, vote_15, vote_16, vote_17, vote_18, vote_19, vote_20, vote_21)

# %% [markdown]
# ## Decisions: four claims
# 22. "Some projects use TP and DP without PP, TP inside a machine and DP across machines, such as CodeGeeX."
# 23. About DP=4, TP=8, PP=2: "64 GPUs are 4 nodes of 8 GPUs."
# 24. About Llama 3 405B: "CP is nested inside TP, in the same node."
# 25. "The golden rule: TP inside a node, FSDP across nodes."

# %%
vote_22 = None
vote_23 = None
vote_24 = None
vote_25 = None

# %%
trial.hear("decisions", vote_22, vote_23, vote_24, vote_25)

# %% [markdown]
# Claim 23 is a slip, but it changes a plan: with tp=8, each of eight nodes has room for one stage only.
#
# ## Claims that contradict each other
# Some common claims contradict each other. At least one side is wrong or leaves something out. Claim 5 is part of
# such a pair. To decide it, the next cell counts the all-reduces of four layers on two ranks, in a forward pass and in a
# training step. Then it prints three pairs:

# %%
from course_lib import tp
from course_lib.data import batch
from course_lib.mesh import make_mesh
from course_lib.model import build_model, tiny_config

CONFIG = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=64)
BLOCKS = {key: entry for key, entry in tp.GPT.items() if key.startswith("blocks.")}


def all_reduces():
    mesh = make_mesh(tp=2)
    model = tp.parallelize(build_model(CONFIG), mesh.tp, plan=BLOCKS)
    total, count = model.loss_sum(*batch(0, seed=0, batch_size=2, seq_len=64))
    forward = mesh.ledger.calls("tp", "all_reduce")
    (total / count).backward()
    return forward, mesh.ledger.calls("tp", "all_reduce")


forward, step = run(all_reduces, n=2)[0]
print(
    f"{CONFIG.layers} layers: {forward / CONFIG.layers:g} per layer in forward, {step / CONFIG.layers:g} in a step\n"
)
for name in ("C01", "C02", "C04"):
    trial.contradiction(name)

# %% [markdown]
# In the first pair, one side counts a forward pass and the other a training step. In the second pair, neither side is
# what one of eight ranks sends. The third pair is behind claims 1 and 2.
#
# ## What you settled
# Compare the rows of the next table. If you missed mainly wrong claims, you trust numbers too easily. If you missed
# mainly conditional ones, ask for the sizes before you decide.

# %%
VOTES = (
    vote_1, vote_2, vote_3, vote_4, vote_5, vote_6, vote_7, vote_8, vote_9, vote_10, vote_11, vote_12, vote_13,
    vote_14, vote_15, vote_16, vote_17, vote_18, vote_19, vote_20, vote_21, vote_22, vote_23, vote_24, vote_25,
)  # fmt: skip
trial.tally(*VOTES)

# %% [markdown]
# ## How good are your numbers?
# Each lesson asked you for predictions. The next cell reads those that you typed in your copies in `work/`, and compares
# each with the true value. It reads files, so save this notebook first.

# %%
from course_lib.interview.calibration import score

print(score())

# %% [markdown]
# Aim for a factor 2 everywhere, and for 10 % where a formula gives the number. The column `median` shows whether you
# typically guess too low or too high. The ratio of a guess to the true value often reveals the mistake behind it, as in
# these common first guesses:

# %%
from course_lib.interview.calibration import Guess
from course_lib.interview.predictions import truths

FIRST_GUESSES = {
    ("01", "gb_7b"): (2 * 7, "weights only"),
    ("02", "ring_bytes"): (1_000_000, "the payload, not what a rank sends"),
    ("03", "growth"): (128 / 64, "bytes grow with the ranks"),
    ("04", "stage_2_m4"): (1, "gradients reduced once per step"),
    ("07", "bubble_of_total"): (3 / 8, "a share of ideal time"),
    ("07", "peak_1f1b"): (8, "the peak of GPipe"),
    ("11", "new_groups"): (3, "only the groups of a rank itself"),
}
print(f"{'lesson, prediction':24}{'guess':>11}{'true':>13}{'guess/true':>12}   mistake")
for (lesson, name), (given, mistake) in FIRST_GUESSES.items():
    guess = Guess(lesson, name, given, truths()[lesson][name])
    print(f"{lesson} {name:21}{given:11,.4g}{guess.true:13,.4g}{guess.ratio:12.2f}   {mistake}")

# %% [markdown]
# ## Before you believe a number
# **Cheat-sheet.** Each wrong or conditional claim of this lesson fails one of these questions:
#
# | question | claims that fail it |
# |---|---|
# | Which bytes: weights alone, or also gradients, master weights and moments? | 2 |
# | What is divided by what? Name the axis, and the stage of ZeRO. | 3, 4 |
# | Forward, or a training step? A micro-batch, or a step? | 5, 12 |
# | Payload, or bytes that a rank sends? | 10 |
# | At how many tokens, micro-batches and GPUs? | 7, 8, 11, 25 |
# | A share of what: of the total time, or of the ideal time? | 13 |
# | Which ranks make this call, and in which group? | 15, 16, 19 |
# | Has the line ever been run? | 14, 17, 20, 21 |
# | Does it fit the nodes? | 23, 24 |
#
# [A page](../docs/claims.md) has all common claims that we checked, with the values and the verdict of each.
#
# **Exit questions.** Answer, then unfold.
#
# **1.** A colleague says that ZeRO-2 sends as much as DDP. Which condition do you ask for?
#
# <details><summary>Answer</summary>
# One micro-batch per step. With several, ZeRO-2 reduces the gradients of each.
# </details>
#
# **2.** A plan claims 20 GB per GPU for 70B with TP=8 on 64 GPUs. What do you compute first?
#
# <details><summary>Answer</summary>
# Which tensors are divided by 8 and which by 64. With ZeRO-2 the weights alone are 70 x 2 / 8 = 17.5 GB.
# </details>
#
# **3.** When does PP send more than DP?
#
# <details><summary>Answer</summary>
# When a step has many micro-batches. PP sends activations for each, and DP sends its gradients once.
# </details>
#
# **4.** An interleaved pipeline on two ranks sends activations and gradients with `dist.isend` and no group. It works.
# Why is it fragile?
#
# <details><summary>Answer</summary>
# Messages from one rank to another are matched by their order. After a change of the schedule, a rank may receive in
# another order and take an activation for a gradient.
# </details>
#
# **5.** Two sources disagree by a factor 2 about an all-reduce. How can both be right?
#
# <details><summary>Answer</summary>
# One states the payload, the other the bytes that a rank sends, on many ranks almost twice the payload.
# </details>
#
# **Sources.**
# - Rajbhandari et al. 2020, *ZeRO*, figure 1, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054).
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.2, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783).
# - Shoeybi et al. 2019, *Megatron-LM*, section 3, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053).
# - PyTorch, [`torch.distributed.send`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.send).
