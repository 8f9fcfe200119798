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
#     lesson: '14'
# ---

# %% [markdown]
# # 14 The decision: from model and cluster to a layout
#
# *45 minutes to read and run, 70 to build.* A study note answers "how do I split my model?" with a function of nine
# lines. If the weights fit on one GPU, it takes data parallelism. Otherwise it puts tensor parallelism inside nodes of
# eight and a pipeline across them. We ask it about 4, 12 and 20 GPUs. You need lessons 01, 03 to 07, 09 and 12.
#
# Vote first: `"true"`, `"false"` or `"only if ..."`.
#
# 1. *70B on 64 H100: 70B x 18 bytes / 64 = 20 GB of state per GPU, so TP=8 with FSDP is enough, without a pipeline.*
# 2. *180B on 128 H100: TP=8 in a node, PP=4 across nodes, and FSDP (ZeRO-2) with DP=4.*

# %%
vote_1 = None
vote_2 = None


# %%
def from_a_note(weights_gb, gpus, gpu_gb):
    if weights_gb < gpu_gb:
        return {"dp": gpus, "tp": 1, "pp": 1}
    nodes = gpus // 8
    if nodes == 1:
        return {"dp": 1, "tp": gpus, "pp": 1}
    return {"dp": 1, "tp": 8, "pp": nodes}


for gpus in (4, 12, 20, 64):
    sizes = from_a_note(140, gpus, 80)
    used = sizes["dp"] * sizes["tp"] * sizes["pp"]
    print(f"70B on {gpus:2} GPUs: {sizes}, which are {used} GPUs")

# %% [markdown]
# On 4 GPUs it asks for 8 and for no stage at all. On 12 GPUs it places a tensor group across two nodes, and on 20 GPUs it
# leaves four idle. It never asks for the batch, the sequence or the heads. You repair it in exercise 14-1.
#
# ## Five questions, in this order
# Each question removes options, so the next one is easier. Memory comes first because a layout that does not fit has no
# speed.
#
# | question | from | rule |
# |---|---|---|
# | 1. What must be in memory at the fullest moment? | model, sequence, micro-batch | 18 bytes per parameter, plus saved activations |
# | 2. Which layouts fit? | memory per GPU | divide heads, layers, batch and sequence; leave 8 % free |
# | 3. Which ranks form the groups? | node size | the axis that waits most goes inside the node |
# | 4. How long is a step? | FLOPs, bytes, bubble | computing + bubble + what communication is not hidden |
# | 5. What do we measure first? | the largest uncertain part | the part that would change the decision |
#
# The 18 bytes are 2 for a weight in bfloat16, 4 for its gradient and 12 for the optimizer. h is the hidden size, p the
# number of stages, and m the number of micro-batches of a replica in one step.
#
# What do you predict?

# %%
predicted_gb = None  # per GPU: 70B on 64 H100, tp=8, dp=8, ZeRO-1, sequences of 8,192 tokens
predicted_factor = None  # how much longer is a step of claim 2 than the same with ZeRO-1?
predicted_crosses = None  # 16 GPUs in two nodes, tp=2, dp=2, pp=4, tp fastest: axes that cross
predicted_speedup = None  # of a pipeline on 4 ranks with 8 micro-batches, by the common rule

# %% [markdown]
# ## What fits: 70B on 64 H100
# The planner computes memory, traffic, bubble and step time of a plan from the formulas of the lessons. `configure` fills
# in what we leave out: about 4 million tokens per step, and ZeRO-1. We try seven plans.

# %%
from course_lib.planner import configure, hardware, model
from course_lib.planner.estimate import estimate

H100 = hardware("h100")
HEAD = f"{'plan':30}{'state':>7}{'saved':>7}{'sum':>7}{'fits':>6}{'step':>8}{'tp':>7}{'dp':>7}{'bubble':>8}{'MFU':>7}"


def plan(name, gpus, generation=None, **degrees):
    one = model(name)
    return estimate(one, H100, configure(one, gpus, **degrees), generation=generation)


def line(label, e):
    held, parts = e.memory, e.parts
    dp = parts.get("dp", 0) + parts.get("dp_cp", 0)
    saved, total = held.activations / 1e9, held.total / 1e9
    return (
        f"{label:30}{total - saved:7.1f}{saved:7.1f}{total:7.1f}{'yes' if e.fits else 'no':>6}"
        f"{e.step_seconds:8.1f}{parts.get('tp', 0):7.1f}{dp:7.1f}{parts['bubble']:8.1f}{e.mfu:7.0%}"
    )


SEVENTY = {
    "tp8 dp8, ZeRO-1": {"tp": 8},
    "tp8 dp8, ZeRO-2": {"tp": 8, "zero": 2},
    "tp8 dp8, ZeRO-3": {"tp": 8, "zero": 3},
    "tp8 pp2 dp4, ZeRO-1": {"tp": 8, "pp": 2},
    "tp4 pp8 dp2, ZeRO-1": {"tp": 4, "pp": 8},
    "dp64, ZeRO-3": {"zero": 3},
    "dp64, ZeRO-3, full recompute": {"zero": 3, "recompute": "full"},
}
plans = {label: plan("llama-3-70b", 64, **degrees) for label, degrees in SEVENTY.items()}
print(f"GB per GPU, seconds per step; {H100.capacity_bytes * 0.92 / 1e9:.1f} GB may be used")
print(HEAD)
for label, found in plans.items():
    print(line(label, found))
print(f"your prediction: {predicted_gb} GB")

# %% [markdown]
# The first plan needs 89 GB. ZeRO-1 shards the optimizer over the eight replicas, but every GPU still has 35 GB of
# gradients and 23 GB of saved activations. The 20 GB of claim 1 are true only if all 18 bytes are divided by 64, which
# is ZeRO-3 with tp=8, and even then the activations come on top. FSDP alone stores 24 GB of state, and 184 GB of
# activations, because nothing divides a micro-batch of one sequence.
#
# Now compare the steps. ZeRO-2 and two stages with ZeRO-1 differ by about two percent, which is less than the estimate can
# promise. ZeRO-3 gathers the weights in every micro-batch, and part of that is not hidden. tp=4 waits less for its
# all-reduces than tp=8, but it saves twice the activations, and only eight stages make room for them.
#
# Take tp=8, dp=8 with ZeRO-2 if you use FSDP, and tp=8, pp=2 if your framework has ZeRO-1. Then measure before
# you search further. Move the sliders to see what the other degrees need:

# %%
from course_lib.view.bars import stacked


def memory_picture(tp, pp, cp, zero, recompute, seq, gpus=64):
    e = plan("llama-3-70b", gpus, tp=tp, pp=pp, cp=cp, zero=zero, recompute=recompute, seq=seq)
    held = e.memory
    parts = {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": held.activations,
    }
    verdict = "fits" if e.fits else "does not fit"
    caption = (
        f"70B on {gpus} H100, dp={e.configuration.dp}: {held.total / 1e9:.1f} GB of "
        f"{0.92 * H100.capacity_bytes / 1e9:.1f} GB, {verdict}; {e.step_seconds:.0f} s per step, "
        f"MFU {e.mfu:.0%}"
    )
    limit = {"may be used": 0.92 * H100.capacity_bytes}
    bars = {"plan": parts, "an H100": limit}
    return stacked(
        bars, marks={}, where="per GPU", title="What a plan stores", caption=caption, width=8
    )


memory_picture(8, 1, 1, 1, "none", 8192)

# %%
from course_lib.view.moved import picture_sliders

picture_sliders(
    memory_picture,
    tp=[8, 4, 2, 1],
    pp=[1, 2, 4, 8],
    cp=[1, 2, 4, 8],
    zero=[1, 2, 3],
    recompute=["none", "selective", "full"],
    seq=[8192, 32768, 131072],
)

# %% [markdown]
# ## 180B on 128 H100
# Claim 2 has two more things to divide by: 128 GPUs, and four stages. We take Falcon 180B and compare ZeRO-2 with ZeRO-1.

# %%
FALCON = {
    "tp8 pp4 dp4, ZeRO-2": {"tp": 8, "pp": 4, "zero": 2},
    "tp8 pp4 dp4, ZeRO-1": {"tp": 8, "pp": 4},
    "tp8 pp8 dp2, ZeRO-1": {"tp": 8, "pp": 8},
    "tp8 dp16, ZeRO-3": {"tp": 8, "zero": 3},
}
falcon = {label: plan("falcon-180b", 128, **degrees) for label, degrees in FALCON.items()}
print(HEAD)
for label, found in falcon.items():
    print(line(label, found))
first, second = list(falcon.values())[:2]
print(f"{first.configuration.micro_batches} micro-batches per replica")
print(
    f"ZeRO-2 / ZeRO-1: {first.step_seconds / second.step_seconds:.1f}; you said {predicted_factor}"
)

# %% [markdown]
# The layout is right and the ZeRO stage is not. A replica computes 512 micro-batches per step, because a pipeline
# needs many. ZeRO-2 stores only a shard of the gradients, so it must reduce them after each micro-batch. The plan is
# then limited by the network. ZeRO-1 reduces once and needs 17 GB more, which are there. PyTorch's FSDP in a pipeline
# also reduces once, as lesson 12 showed, and then it stores gradients like ZeRO-1.
#
# The two-minute answers to both questions are in [the interview plan](../docs/interview.md), as one would speak them.
#
# ## 405B on 16,384 H100
# Llama 3's step has 16 million tokens. At 8,192 tokens per sequence these are 2,048 sequences, and at 131,072 they are 128.
# The paper drops one layer at both ends, because embedding and head take memory there too.

# %%
ENDS = (1, *[2] * 62, 1)  # layers of 64 virtual stages, four per rank
MEASURED = {"8k, 4 chunks": 400, "128k, cp16, 4 chunks": 380}
EIGHT_K, LONG = {"seq": 8192, "global_batch": 2048}, {"seq": 131072, "global_batch": 128}
LLAMA = {
    "8k, 1 chunk": EIGHT_K,
    "8k, 4 chunks": EIGHT_K | {"chunks": 4, "stage_layers": ENDS},
    "128k, without cp": LONG,
    "128k, cp16, 4 chunks": LONG | {"cp": 16, "chunks": 4, "stage_layers": ENDS},
}
print(HEAD)
llama = {}
for label, degrees in LLAMA.items():
    llama[label] = found = plan("llama-3-405b", 16384, "2024", tp=8, pp=16, **degrees)
    print(line(label, found))
for label, tflops in MEASURED.items():
    print(f"{label}: {llama[label].tflops_per_gpu:.0f} TFLOP/s per GPU; the paper has {tflops}")

# %% [markdown]
# At 8k each replica has 16 sequences for 16 stages, so with one chunk per rank the bubble is as long as the computing.
# Four chunks divide it by about four. At 128k there is one sequence per replica if dp=128, and 15 of 16 stages would wait.
# cp=16 turns 128 replicas into 8, and each replica has 16 micro-batches again. So CP is needed here for the batch as much
# as for memory.
#
# No row fits by our formulas. Interleaving stores more micro-batches than 1F1B, and the planner counts all
# activations at their full size. Llama 3's authors write that they free tensors early, which we do not model. A
# plan that is short by a few GB is a reason to measure the peak, not a reason to reject it.
#
# ## Sixteen GPUs by hand
# On paper, take two nodes of eight, with tp=2, dp=2, pp=4 and tp fastest. A step on tp changes the rank by 1, on dp by 2,
# and on pp by 4. Write down the groups of rank 0 and the axes that cross nodes before you run the cell.

# %%
from course_lib.layout import drawing, make_layout

print(drawing(make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4), per_node=8))
print(f"your prediction: {predicted_crosses}")

# %% [markdown]
# Only the groups of pp, such as [0, 4, 8, 12], have ranks in both nodes. Two of their three stage boundaries are still
# inside a node.
#
# ## Four rules of thumb
# Common speed-ups for N GPUs are 0.95 N for data parallelism, 0.85 N for tensor parallelism inside a node, less than 0.3 N
# across nodes, and N/(1 + (N-1)/M) for a pipeline with M micro-batches. By alpha-beta, the speed-up of the first three is
#
# $$\frac{N}{1 + N\,t_{\text{exposed}}/W}$$
#
# W is the time of one GPU for the whole step, and t is the communication of a rank that is not hidden. We run a toy step of W = 240 ms
# on four real ranks with emulated links. Computing is a sleep; all messages are real.

# %%
import time

import torch

from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import Link, Links, make_mesh

W, LAYERS = 0.24, 4
NODE, NETWORK = Link(alpha=0.0002, beta=200e6), Link(alpha=0.003, beta=10e6)
GRADIENT, ACTIVATION = torch.zeros(25_000), torch.zeros(12_500)  # 100 kB and 50 kB


def data_parallel(axis):
    time.sleep(W / axis.size)
    comm.all_reduce(GRADIENT, axis)


def tensor_parallel(axis):
    for _ in range(4 * LAYERS):  # two all-reduces forward and two backward per layer
        time.sleep(W / axis.size / (4 * LAYERS))
        comm.all_reduce(ACTIVATION, axis)


def pipelined(axis, m=8):
    for _ in range(m):  # every rank has 1/N of the layers
        if axis.rank > 0:
            comm.recv(ACTIVATION[:10], axis, axis.rank - 1)
        time.sleep(W / axis.size / m)
        if axis.rank < axis.size - 1:
            comm.send(ACTIVATION[:10], axis, axis.rank + 1)


def seconds_of(step):
    mesh = make_mesh()
    comm.barrier(mesh.world)
    start = time.perf_counter()
    step(mesh.dp)
    comm.barrier(mesh.world)
    return time.perf_counter() - start


# %%
from course_lib.comm.alpha_beta import ring_seconds

N = 4
CASES = {
    "dp, between nodes": (data_parallel, NETWORK, 0.95 * N, ring_seconds(100_000, N, NETWORK)),
    "tp, in a node": (tensor_parallel, NODE, 0.85 * N, 16 * ring_seconds(50_000, N, NODE)),
    "tp, across nodes": (tensor_parallel, NETWORK, 0.3 * N, 16 * ring_seconds(50_000, N, NETWORK)),
    "pp, 8 micro-batches": (pipelined, NODE, N / (1 + (N - 1) / 8), None),
}
print(f"{'speed-up on 4 ranks':22}{'rule':>7}{'alpha-beta':>12}{'run':>7}")
for name, (step, link, rule, sending) in CASES.items():
    took = max(run(seconds_of, step, n=N, links=Links(inside=link, between=link)))
    formula = rule if sending is None else N / (1 + N * sending / W)
    print(f"{name:22}{rule:7.2f}{formula:12.2f}{W / took:7.2f}")
print(f"your prediction for the pipeline: {predicted_speedup}")

# %% [markdown]
# Only the pipeline's rule is a formula: it is the bubble (p-1)/m of lesson 07, and it omits messages and unequal
# stages. The other three are one ratio of computing to sending, which somebody measured once. With half as many tokens per
# GPU, t stays the same for DP and W becomes half, so 0.95 no longer holds. For 70B with tp=8, the planner says:

# %%
for label, tp, tokens in (("in a node", 8, 2**22), ("across two nodes", 16, 2**22)):
    e = plan("llama-3-70b", 64, tp=tp, zero=3, micro_batch=1, recompute="full")
    share = e.parts["compute"] / (e.parts["compute"] + e.parts["tp"])
    print(f"tp={tp:2}, {label:17} {share:.2f} N")

# %% [markdown]
# ## Serving, experts, and two kinds of GPU
# The same five questions work for other jobs. For serving, the KV cache takes the place of optimizer and activations,
# and reading the weights takes the place of FLOPs. We plan GPT-J on 8 A100 and GPT-3 on 32.

# %%
from course_lib.planner.serve import serve

A100 = hardware("a100-80")
print(f"{'served':30}{'weights':>9}{'fits':>6}{'ms per token':>14}{'tokens/s':>10}")
for name, gpus, batch, degrees in (
    ("gpt-j-6b", 8, 8, {}),
    ("gpt-j-6b", 8, 64, {"tp": 8}),
    ("gpt-3-175b", 32, 8, {}),
    ("gpt-3-175b", 32, 8, {"tp": 8}),
    ("gpt-3-175b", 32, 32, {"tp": 32}),
):
    one = model(name)
    found = serve(one, A100, configure(one, gpus, **degrees), batch=batch, prompt=512, generate=128)
    label = f"{name}, tp{degrees.get('tp', 1)} dp{gpus // degrees.get('tp', 1)}"
    print(
        f"{label:30}{found.weights_bytes / 1e9:8.1f}G{'yes' if found.fits else 'no':>6}"
        f"{1e3 * found.tpot_seconds:14.1f}{found.tokens_per_second:10,.0f}"
    )

# %% [markdown]
# Each row has as many requests in all as the other rows of its model. Replicas give more tokens per second and shards give
# shorter waits, as long as the weights fit; with GPT-3 they do not fit on one GPU. tp=32 crosses nodes, and the latency of
# its all-reduces in every layer exceeds what it saves in reading.
#
# With experts, ask which GPUs store them. We train Mixtral 8x7B on 64 H100:

# %%
print(HEAD)
for label, degrees in {
    "tp8 dp8, ZeRO-1": {"tp": 8},
    "ep8 dp64, ZeRO-1": {"ep": 8},
    "ep8, full recompute": {"ep": 8, "recompute": "full"},
}.items():
    print(line(label, plan("mixtral-8x7b", 64, **degrees)))

# %% [markdown]
# TP shards experts as long as its matrices are large enough; here tp=8 alone leaves all eight experts on each node. ep=8
# stores one expert per GPU and layer, so only the activations are left, and recomputation removes them.
#
# In a mixed cluster, two stages run on A100 and two on H100. A pipeline is as fast as its slowest stage, so the layers must
# follow the speeds.

# %%
from course_lib.planner.pipeline import StageSeconds, pipeline

SLOWER = H100.peak["bf16"] / A100.peak["bf16"]
for layers in ((20, 20, 20, 20), (10, 10, 30, 30)):
    times = [n * (SLOWER if stage < 2 else 1) for stage, n in enumerate(layers)]
    stages = [StageSeconds(t, t, t) for t in times]
    found = pipeline("1f1b", 4, 16, stages)
    print(
        f"layers {layers}: {found.seconds:,.0f} units of time, of which {found.of_total:.0%} bubble"
    )

# %% [markdown]
# ## The same in PyTorch
# A plan is worth something when it runs. `emit` writes it for torchtitan, Megatron-LM, DeepSpeed, or as a page of FSDP2
# and DTensor:

# %%
from course_lib.planner.emit import emit

chosen = plans["tp8 dp8, ZeRO-2"]
written = emit("torchtitan", chosen.model, chosen.hardware, chosen.configuration)
print(written.text)

# %% [markdown]
# ## Break it and diagnose
# The plan is running and slower than predicted. What do you measure first? Split the step into the parts of the estimate,
# on every rank. Below, four ranks on two nodes have tp=2 inside the node and dp=2 across. Five runs, one as planned:
#
# - **order**: the axes are exchanged, so tp crosses the nodes
# - **link**: the network has a quarter of its bandwidth
# - **recompute**: every rank computes each forward twice
# - **slow**: one rank computes more slowly than the others
#
# Name the cause, the part in which it arises (`"tp"`, `"dp"` or `"compute"`), and the rank (a number or `"all"`).

# %%
SEED = 3
diagnosis = {  # such as ("link", "dp", "all"), or ("correct", None, None)
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
    "order": ("tp", "all"),
    "link": ("dp", "all"),
    "recompute": ("compute", "all"),
    "slow": ("compute", range(4)),
}
lab = Lab("14", SEED, FAULTS, fields=("cause", "part", "rank"))
IN_NODE, BETWEEN = Link(alpha=0.0002, beta=100e6), Link(alpha=0.002, beta=4e6)
SENT = {"tp": torch.zeros(25_000), "dp": torch.zeros(100_000)}  # 100 and 400 kB
MICRO_BATCHES, COMPUTING = 4, 0.06


def observed(lab_run):
    mesh = make_mesh("dp-tp-pp" if lab_run.has("order") else "tp-dp-pp", tp=2, dp=2)
    longer = 4 / 3 if lab_run.has("recompute") else 1.8 if lab_run.has("slow", mesh.rank) else 1
    spent = dict.fromkeys(("compute", "tp", "dp"), 0.0)

    def timed(part, call):
        start = time.perf_counter()
        call()
        spent[part] += 1e3 * (time.perf_counter() - start)

    for warm in (True, False):
        comm.barrier(mesh.world)
        spent.update(compute=0.0, tp=0.0, dp=0.0)
        for _ in range(1 if warm else MICRO_BATCHES):
            timed("compute", lambda: time.sleep(longer * COMPUTING))
            timed("tp", lambda: comm.all_reduce(SENT["tp"], mesh.tp))
        timed("dp", lambda: comm.all_reduce(SENT["dp"], mesh.dp))
    return spent


planned = {
    "compute": 1e3 * MICRO_BATCHES * COMPUTING,
    "tp": 1e3 * MICRO_BATCHES * ring_seconds(SENT["tp"].nbytes, 2, IN_NODE),
    "dp": 1e3 * ring_seconds(SENT["dp"].nbytes, 2, BETWEEN),
}
print("ms by rank " + "".join(f"{part:^28}" for part in planned))
print("planned    " + "".join(f"{ms:^28.0f}" for ms in planned.values()))
for lab_run in lab:
    slow = Link(BETWEEN.alpha, BETWEEN.beta / 4) if lab_run.has("link") else BETWEEN
    links = Links(inside=IN_NODE, between=slow, ranks_per_node=2)
    result = run(observed, lab_run, n=4, links=links)
    cells = (" ".join(f"{one[part]:5.0f}" for one in result) for part in planned)
    print(f"{lab_run.letter}          " + "".join(f"{cell:^28}" for cell in cells))

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **compute** is longer on all ranks: *recompute*. On one rank: *slow*; its neighbor in tp waits as long, and so does dp.
# - **tp** is longer on all ranks and **dp** shorter: *order*.
# - **dp** alone is longer, about four times: *link*.
#
# </details>

# %%
lab.grade(diagnosis)  # lab.reveal() shows the answers

# %% [markdown]
# ## When not to use a planner
# - **If the job fits on one GPU, or with dp alone.** Start it.
# - **If two plans differ by less than 10 %.** Run both for twenty steps.
# - **Against a measured peak.** Allocator and framework decide the last few GB.
#
# **Claim 1: only if** all 18 bytes are sharded by ZeRO-3 and activations leave room. TP=8 with ZeRO-2 fits too, with 35
# GB of state instead of 20.
#
# **Claim 2: only if** gradients are reduced once per step. With ZeRO-2 as the paper defines it, the network sets the pace.

# %%
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# **The table that grows.** What a GPU stores and how long a step takes, for the plans that we would propose:

# %%
print(HEAD)
for label, found in {
    "70B, tp8 dp8, ZeRO-2": plans["tp8 dp8, ZeRO-2"],
    "180B, tp8 pp4 dp4, ZeRO-1": falcon["tp8 pp4 dp4, ZeRO-1"],
    "405B, 8k": llama["8k, 4 chunks"],
    "405B, 128k": llama["128k, cp16, 4 chunks"],
}.items():
    print(line(label, found))

# %% [markdown]
# **Cheat-sheet.** The decision on one page:
#
# ```
# 1 memory    18 P / (tp pp) with 12 of the 18 / (dp cp); saved ~ 34 s h L / (tp cp) under 1F1B, full recompute 2 s h L
# 2 legal     tp | heads, tp | node; pp | layers; dp | batch; 2 cp | sequence; ep | experts, ep | dp cp
# 3 place     tp innermost, then cp, dp, pp; what waits most stays in the node
# 4 step      6 P T / (N peak efficiency) x (1 + (p-1)/m) + exposed tp, cp, ep + what dp cannot hide
# 5 measure   peak memory, compute per micro-batch, one all-reduce per axis: before anything else is tuned
# ```
#
# `course plan llama-3-70b --gpus 64 --hardware h100 --search` ranks all legal plans; `--explain` derives one.
#
# ## Your turn, and five questions to leave with
# [Four exercises](../exercises/14_the_decision.ipynb) take 70 minutes.

# %% [markdown] course={"ex": "14-1"}
# ## 14-1 Repair a chooser
# The function below went round with a study note. It takes sizes from the weights alone, assumes nodes of eight, and
# has no answer for 4, 12 or 20 GPUs. Repair it: return the sizes of the axes of the fastest layout that fits, or `None`
# if no layout fits. Axes that you leave out have size 1.
#
# | rule | |
# |---|---|
# | GPUs | tp x pp x cp x dp = `gpus`; ep uses the ranks of dp x cp, so it divides dp x cp |
# | tp | divides the heads. Its groups are neighbors inside a node: tp divides `per_node`, unless all `gpus` are in one node |
# | pp, dp, ep | pp divides the layers, dp the batch (in sequences), ep the experts |
# | cp | 2 cp divides the tokens of a sequence, unless cp is 1 |
# | memory | `needed(model, layout)` is at most 92 % of `memory` bytes |
#
# The time of a step is `seconds(model, layout, per_node)`; your layout may be 10 % slower than the fastest one. The cell
# below has both formulas and the 20 clusters that are graded. For each, the check also draws two others, with another
# model, memory and batch. `model` is a dict: `dense` counts the parameters outside the experts, `expert` those of one
# expert in all layers.

# %% course={"ex": "14-1", "role": "given"}
FLOPS, NODE, NETWORK = 400e12, 200e9, 25e9  # of a GPU; bytes per second inside and between nodes


def needed(model, layout):
    """Bytes on the fullest GPU: 18 per parameter with ZeRO-1, and saved activations under 1F1B."""
    tp, pp, cp, dp, ep = (layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp", "ep"))
    dense = model["dense"] / (tp * pp)
    experts = model["experts"] * model["expert"] / (tp * pp * ep)
    state = 6 * (dense + experts) + 12 * (dense + experts * ep) / (dp * cp)
    one = 34 * model["seq"] * model["hidden"] * model["layers"] / (tp * cp * pp)
    return state + min(pp, model["batch"] / dp) * one


def seconds(model, layout, per_node):
    """Seconds of a step in which only dp overlaps, with backward."""
    tp, pp, cp, dp, ep = (layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp", "ep"))
    tokens = model["batch"] * model["seq"] / (dp * cp)  # that a GPU of this replica reads
    active = model["dense"] + model["top_k"] * model["expert"]
    work = 6 * tokens * (active + model["layers"] * model["seq"] * model["hidden"]) / (tp * pp)
    computing = work / FLOPS
    one = 2 * tokens * model["hidden"]  # bytes of an activation of these tokens
    layers, data = model["layers"] / pp, dp * cp
    routed = NODE if tp * ep <= per_node else NETWORK
    summed = NODE if tp * data <= per_node else NETWORK
    own = (model["dense"] + model["experts"] * model["expert"] / ep) / (tp * pp)
    return (
        computing * (1 + (pp - 1) * dp / model["batch"])
        + layers * one * 8 * (tp - 1) / tp / NODE
        + layers * one * 6 * (cp - 1) / tp / NETWORK
        + layers * one * 4 * model["top_k"] * (ep - 1) / ep / tp / routed
        + (2 * one / tp / NETWORK if pp > 1 else 0)
        + max(0, 6 * (data - 1) / data * own / summed - computing * 2 / 3)
    )


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


COLUMNS = (
    "dense", "layers", "heads", "hidden", "seq", "batch", "experts", "expert", "top_k",
)  # fmt: skip
MODELS = {
    name: dict(zip(COLUMNS, (*row, 0, 0, 0)[:9], strict=True))
    for name, row in {
        "GPT-2 XL": (1_560_000_000, 48, 25, 1600, 1024, 960),
        "GPT-J": (6_050_000_000, 28, 16, 4096, 2048, 480),
        "7B": (6_740_000_000, 32, 32, 4096, 4096, 480),
        "13B": (13_000_000_000, 40, 40, 5120, 4096, 480),
        "33B": (32_500_000_000, 60, 52, 6656, 2048, 960),
        "70B": (70_600_000_000, 80, 64, 8192, 8192, 480),
        "175B": (175_000_000_000, 96, 96, 12288, 2048, 1536),
        "180B": (180_000_000_000, 80, 232, 14848, 2048, 1536),
        "8B, 128k": (8_030_000_000, 32, 32, 4096, 131072, 32),
        "70B, 128k": (70_600_000_000, 80, 64, 8192, 131072, 32),
        "8 experts": (1_600_000_000, 32, 32, 4096, 4096, 960, 8, 5_640_000_000, 2),
        "64 experts": (1_300_000_000, 27, 16, 2048, 4096, 1920, 64, 230_000_000, 1),
    }.items()
}
CLUSTERS = (  # model, GPUs, GPUs per node, GB per GPU
    ("GPT-2 XL", 4, 8, 16), ("7B", 4, 4, 80), ("13B", 4, 8, 80),
    ("GPT-2 XL", 12, 4, 16), ("7B", 12, 8, 40), ("13B", 12, 6, 80),
    ("7B", 20, 8, 40), ("13B", 20, 4, 40), ("13B", 20, 10, 16),
    ("GPT-J", 8, 8, 16), ("33B", 64, 8, 40), ("70B", 32, 8, 80), ("70B", 64, 8, 80),
    ("70B", 64, 4, 80), ("175B", 8, 8, 80), ("180B", 128, 8, 80),
    ("8B, 128k", 32, 8, 80), ("70B, 128k", 128, 8, 141),
    ("8 experts", 32, 8, 80), ("64 experts", 16, 8, 24),
)  # fmt: skip


# %% course={"ex": "14-1", "role": "answer"}
def choose(model, gpus, per_node, memory):
    """{"tp": 4, "pp": 2, "dp": 8}, also with cp and ep, or None if nothing fits."""
    # BEGIN SOLUTION
    best, least = None, float("inf")
    for tp in divisors(gpus):
        inside = per_node % tp == 0 or gpus <= per_node
        if model["heads"] % tp or not inside:
            continue
        for pp in divisors(gpus // tp):
            if model["layers"] % pp:
                continue
            for cp in divisors(gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                if model["batch"] % dp or (cp > 1 and model["seq"] % (2 * cp)):
                    continue
                for ep in divisors(dp * cp):
                    layout = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep}
                    if (model["experts"] or 1) % ep or needed(model, layout) > 0.92 * memory:
                        continue
                    took = seconds(model, layout, per_node)
                    if took < least:
                        best, least = layout, took
    return best
    # STUB
    # if 2 * (model["dense"] + model["experts"] * model["expert"]) < memory:
    #     return {"dp": gpus, "tp": 1, "pp": 1}  # the model fits on one GPU: data parallelism
    # per_node = 8
    # nodes = gpus // per_node
    # if nodes == 1:
    #     return {"dp": 1, "tp": gpus, "pp": 1}  # one node: tensor parallelism
    # return {"dp": 1, "tp": per_node, "pp": nodes}  # tp inside the nodes, pp across them
    # END SOLUTION


# %% course={"ex": "14-1", "role": "check"}
from course_lib.grading import check

check("14-1", choose)

# %% [markdown] course={"ex": "14-2"}
# ## 14-2 The peak of a step
# ZeRO-3 trains a model of several units, such as a layer each. `units` lists (weights, saved): the bytes of a unit's
# weights before sharding, and those of the activations that it saves for backward. Return the most bytes that a rank
# has in memory at one time, while any unit computes.
#
# - `shards` bytes, for weights, gradients and optimizer states, are in memory all the time.
# - Forward computes unit 0, 1, ... While unit k computes, its unsharded weights and the saved activations of
#   units 0 to k are in memory.
# - Backward computes the last unit first. While unit k computes, its unsharded weights, its unsharded gradient (as many
#   bytes as its weights), and the saved activations of units 0 to k are in memory. Then the gradient is
#   reduce-scattered, and weights, gradient and saved activations of unit k are freed.
# - With `reshard`, the unsharded weights are freed after each forward and gathered again in backward. Without it, they
#   stay from forward until the unit's own backward.
# - With `prefetch`, the weights of the unit that computes next in the same pass are gathered while unit k computes. In
#   backward without `reshard` there is nothing to gather, and backward's first unit is not gathered in forward.


# %% course={"ex": "14-2", "role": "answer"}
def peak(shards, units, prefetch, reshard):
    """Bytes at the fullest moment of forward and backward."""
    # BEGIN SOLUTION
    most = 0
    for k, (weights, _) in enumerate(units):
        live = shards + sum(saved for _, saved in units[: k + 1])
        live += weights if reshard else sum(weights for weights, _ in units[: k + 1])
        ahead = units[k + 1][0] if prefetch and k + 1 < len(units) else 0
        behind = units[k - 1][0] if prefetch and reshard and k > 0 else 0
        most = max(most, live + ahead, live + weights + behind)
    return most
    # STUB
    # return shards + sum(2 * weights + saved for weights, saved in units)  # the sum, not the peak
    # END SOLUTION


# %% course={"ex": "14-2", "role": "check"}
from course_lib.grading import check

check("14-2", peak)

# %% [markdown] course={"ex": "14-3"}
# ## 14-3 Axes on nodes
# Return the order of the axes, the fastest first, in which the fewest GB cross nodes. `sizes` has the size of each axis,
# `sent` the GB that a GPU sends over it in a step. Rank r is on node r // `per_node`. If at least one group of an axis
# has ranks in two nodes, count all GB of this axis, otherwise none. Sizes need not be powers of two, and a node may
# be smaller than an axis. Several orders may be right.


# %% course={"ex": "14-3", "role": "answer"}
def place(sizes, sent, per_node):
    """A list such as ["tp", "dp", "pp"]."""
    # BEGIN SOLUTION
    from itertools import permutations
    from math import prod

    world = prod(sizes.values())

    def crossing(order):
        total, stride = 0, 1
        for axis in order:
            block = stride * sizes[axis]
            nodes = {}
            for rank in range(world):
                group = rank // block, rank % stride
                nodes.setdefault(group, set()).add(rank // per_node)
            if any(len(found) > 1 for found in nodes.values()):
                total += sent[axis]
            stride = block
        return total

    return list(min(permutations(sizes), key=crossing))
    # STUB
    # return list(sizes)
    # END SOLUTION


# %% course={"ex": "14-3", "role": "check"}
from course_lib.grading import check

check("14-3", place)

# %% [markdown] course={"ex": "14-4"}
# ## 14-4 What helps most
# `parts` splits a step into seconds: `forward`, `backward`, `recompute`, `bubble`, and what is exposed of `tp`, `cp`, `pp`
# and `dp`. You may make one change. Return its name and the seconds of the new step: the change with the shortest step,
# or `"none"` if no change makes the step shorter.
#
# | change | effect |
# |---|---|
# | `"network"` | twice the bandwidth between nodes halves each axis whose entry in `links` is `"network"` |
# | `"no recompute"` | removes `recompute`. The bubble shrinks with forward + backward + recompute, in proportion. This needs `saved` GB of memory; `free` GB are there, and otherwise the change is impossible |
# | `"chunks"` | two chunks per rank halve the bubble and double `pp` |
# | `"overlap"` | dp runs at the same time as `backward`; what is longer than backward stays exposed |


# %% course={"ex": "14-4", "role": "answer"}
def helps(parts, links, saved, free):
    """(change, seconds of the new step)"""
    # BEGIN SOLUTION
    step = sum(parts.values())
    computing = parts["forward"] + parts["backward"] + parts["recompute"]
    found = {
        "none": step,
        "network": step - sum(parts[axis] for axis in links if links[axis] == "network") / 2,
        "chunks": step - parts["bubble"] / 2 + parts["pp"],
        "overlap": step - min(parts["dp"], parts["backward"]),
    }
    if saved <= free:
        found["no recompute"] = step - parts["recompute"] * (1 + parts["bubble"] / computing)
    best = min(found, key=found.get)
    return best, found[best]
    # END SOLUTION


# %% course={"ex": "14-4", "role": "check"}
from course_lib.grading import check

check("14-4", helps)

# %% [markdown]
# **Exit questions.** Answer, then unfold.
#
# **1.** A model of 13B is trained in bfloat16 on 8 GPUs of 80 GB with dp=8 and ZeRO-1. How much state has a GPU?
#
# <details><summary>Answer</summary>
# 13 · (2 + 4 + 12 / 8) = 98 GB, so it does not fit. ZeRO-2 needs 13 · (2 + 16 / 8) = 52 GB.
# </details>
#
# **2.** Why is the sum of all allocations of a step not its memory?
#
# <details><summary>Answer</summary>
# They are not alive together. The peak is usually early in backward, with all saved activations and the first gradients.
# </details>
#
# **3.** Why does ZeRO-2 not suit a pipeline of 512 micro-batches?
#
# <details><summary>Answer</summary>
# It reduces gradients in each micro-batch: 512 times the bytes of ZeRO-1.
# </details>
#
# **4.** The sequence grows from 8k to 128k at equal tokens per step. What breaks first?
#
# <details><summary>Answer</summary>
# The batch: 16 times fewer sequences leave replicas and stages without micro-batches. Then activations.
# </details>
#
# **5.** Your step is 30 % longer than the plan. What do you look at?
#
# <details><summary>Answer</summary>
# Compute per micro-batch on every rank, then one all-reduce per axis. Only then the schedule.
# </details>
#
# **Sources.**
# - [Llama team 2024](https://arxiv.org/abs/2407.21783), section 3.3 and table 4
# - [Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), ZeRO; [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), activations
# - [The planner held to published runs](../docs/planner.md)
