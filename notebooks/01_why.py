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
#     lesson: '01'
# ---

# %% [markdown]
# # 01 Why: memory, compute and network
#
# *45 minutes to read and run, 60 to build.* No single GPU trains the large models of today. Which of its limits is
# hit first, and by how much? You count bytes, operations and messages of models from 7 to 405 billion parameters,
# from shapes alone, and check every formula on a small model that runs here. You need lesson 00.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *A model can be trained on a GPU if its weights fit into the GPU's memory.*
# 2. *n GPUs train n times as fast as one.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# A step of training needs three things of a machine, and each has its own limit:
#
# ```
#                     asks for                            is limited by
#   memory    bytes   weights, gradients, optimizer,      80 GB per GPU
#                     what backward needs
#   compute   FLOPs   about 6 for each parameter          989 TFLOP/s per GPU at best
#                     and token
#   network   bytes   whatever one GPU has and            450 GB/s inside a node,
#                     another one needs                   50 GB/s between nodes
# ```
#
# (The figures are an H100's: bfloat16, without sparsity.) One GPU has no network, and two limits. More GPUs move the
# first two limits and add the third. Every technique of this course is a choice of what to partition and what to send
# instead.

# %% [markdown]
# ## Predict
# Fill in what you can.

# %%
predicted_gb_7b = None  # GB that training 7B keeps between steps: weights, gradients, AdamW
predicted_gpus_405b = None  # GPUs of 80 GB that hold the same of 405B, evenly cut, nothing else
predicted_days_70b = None  # days of 70B on 15 trillion tokens on one GPU, at 40 % of its peak
predicted_speedup = None  # four ranks below: how many times as fast as one
predicted_cache_gb = None  # GB of keys and values of one sequence of 8,192 tokens, 70B

# %% [markdown]
# ## Three limits, live
# A step of 240 ms of computing is divided over n ranks. Then they sum a gradient of 4 MB, over a link that is slowed
# down to 100 MB/s, with 1 ms per message. The computing is *paced*: ranks sleep as long as it would take. How long
# does the step take?

# %%
import time

import torch

from course_lib import comm
from course_lib.comm.alpha_beta import ring_seconds
from course_lib.launch import run
from course_lib.mesh import Link, Links, make_mesh

LINK = Link(alpha=0.001, beta=100e6)
NETWORK = Links(inside=LINK, between=LINK)
GRADIENT, COMPUTE = 4_000_000, 0.240  # bytes, seconds


def one_step():
    mesh = make_mesh()
    gradient = torch.ones(GRADIENT // 4)
    comm.barrier(mesh.dp)
    start = time.perf_counter()
    with mesh.compute("F"):
        pass  # paced: a third of the computing
    with mesh.compute("B"):
        pass
    comm.all_reduce(gradient, mesh.dp)
    return time.perf_counter() - start


def paced(n):
    pace = {"F": COMPUTE / 3 / n, "B": COMPUTE * 2 / 3 / n}
    return max(run(one_step, n=n, pace=pace, links=NETWORK))


print(f"{'ranks':5}{'computing':>12}{'sending':>10}{'formula':>10}{'measured':>10}{'speed-up':>10}")
alone = paced(1)
for n in (1, 2, 4):
    sending = ring_seconds(GRADIENT, n, LINK)
    took = alone if n == 1 else paced(n)
    times = [COMPUTE / n, sending, COMPUTE / n + sending, took]
    print(
        f"{n:5}"
        + "".join(f"{1e3 * t:{w}.0f} ms" for t, w in zip(times, (9, 7, 7, 7), strict=True)),
        end="",
    )
    print(f"{alone / took:10.2f}")
print(f"your prediction for four ranks: {predicted_speedup}")

# %% [markdown]
# Computing shrinks with n. Sending does not. The sum is a *ring all-reduce*: shards go round the ranks, first to be
# added up, then to be copied (lesson 02 builds it). So a rank sends 2(n-1)/n times the gradient, more with every rank
# that joins. The speed-up has a ceiling, here 3: 240 ms over the 80 ms that twice the gradient takes on this link;
# the 1 ms per message lowers it.
#
# ## Memory: what stays between steps
# Training in mixed precision with AdamW stores 16 bytes per parameter: the weight in bfloat16 (2), its gradient (2),
# and in float32 a master copy of the weight and two moments (4 each). Count them on a model that is small enough to
# look at.

# %%
from torch import nn

from course_lib.data import batch
from course_lib.model import build_model, parameter_count, tiny_config
from course_lib.recompute import saved_by_block, saved_by_stage, saved_outside_blocks
from course_lib.trace import SavedActivations, state_bytes
from course_lib.view import show_source

BATCH, SEQ = 4, 64
SMALL = tiny_config(hidden=128, ffn=384, max_seq_len=SEQ, dtype=torch.bfloat16)


def mixed_step():
    """One step; what is kept, by name, each when it is kept."""
    model = build_model(SMALL)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    tokens, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
    with SavedActivations(model, tokens, targets) as saved:
        total, count = model.loss_sum(tokens, targets)
    (total / count).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    kept = {"gradients in both": state_bytes(model, optimizer)}
    for p in model.parameters():
        p.grad = None
    kept["gradients in float32"] = state_bytes(model, optimizer)
    for master, p in zip(masters, model.parameters(), strict=True):
        p.grad, master.grad = master.grad.to(p.dtype), None
    kept["gradients in bfloat16"] = state_bytes(model, optimizer)
    return kept, saved.peak, len(masters)


kept, activations, tensors = mixed_step()
P = parameter_count(SMALL)
print(f"{P:,} parameters in {tensors} tensors\n")
print(f"{'':24}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'bytes a parameter':>19}")
for name, state in kept.items():
    line = f"{state.parameters:9,}{state.gradients:11,}{state.optimizer:11,}"
    print(f"{name:24}{line}{state.total / P:19.3f}")
each = [2 + 2 + 4 + 12, 2 + 4 + 12, 2 + 2 + 12]
for state, size in zip(kept.values(), each, strict=True):
    assert state.total == size * P + 4 * tensors  # AdamW counts its steps, 4 bytes a tensor

# %% [markdown]
# To the byte: 16, 18 or 20, depending on the precision of the gradients. All three figures are in the literature, and
# none is a mistake (ZeRO has 16, Megatron-LM 18 and 20), so ask which one is meant. (Plain float32 training stores 4
# + 4 + 8: 16 as well.)
#
# ## The models
# The count of parameters is a sum over shapes, and so is all that follows. Five published models:


# %%
from dataclasses import dataclass

from course_lib.model import ModelConfig, block_parameter_count, counting

BF16 = {"dtype": torch.bfloat16}


@dataclass(frozen=True)
class Published:
    """A model as its paper has it: shapes, tokens that it was trained on, parameters."""

    config: ModelConfig
    tokens: float
    parameters: int


def llama(layers, hidden, heads, kv_heads, ffn, context, vocab):
    return ModelConfig("llama", layers, hidden, heads, kv_heads, ffn, context, vocab, **BF16)


GPT_3 = ModelConfig("gpt", 96, 12288, 96, 96, 4 * 12288, 2048, 50257, tied=True, **BF16)
MODELS = {
    "7B": Published(llama(32, 4096, 32, 32, 11008, 4096, 32000), 2e12, 6_738_415_616),
    "13B": Published(llama(40, 5120, 40, 40, 13824, 4096, 32000), 2e12, 13_015_864_320),
    "70B": Published(llama(80, 8192, 64, 8, 28672, 8192, 128256), 15e12, 70_553_706_496),
    "175B": Published(GPT_3, 300e9, 174_604_259_328),
    "405B": Published(llama(126, 16384, 128, 8, 53248, 8192, 128256), 15.6e12, 405_853_388_800),
}
show_source(counting._block)
print()
print(f"{'':6}{'layers':>7}{'hidden':>8}{'a block':>16}{'in all':>18}{'12 L h^2':>10}")
for name, model in MODELS.items():
    c, size = model.config, parameter_count(model.config)
    rough = 12 * c.layers * c.hidden**2 / size
    print(f"{name:6}{c.layers:7}{c.hidden:8,}{block_parameter_count(c):16,}{size:18,}{rough:10.2f}")
    assert size == model.parameters

# %% [markdown]
# 7B and 13B are Llama 2, 70B and 405B Llama 3, 175B is GPT-3. The rule of thumb 12 L h² (L layers, h hidden) is
# within a tenth. It counts GPT's block; in Llama 3, fewer heads of keys and values and a wider MLP nearly cancel.
#
# ## Memory: what a GPU would have to hold
# GB is 1e9 bytes, GiB is 2^30. Papers use both and call both GB. They are 7 % apart, which is the difference between a model
# that fits and one that does not.

# %%
GPU = 80e9  # bytes
print(f"{'GB':6}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'state':>9}", end="")
print(f"{'state, GiB':>13}{'GPUs of 80 GB':>16}")
for name, model in MODELS.items():
    size = model.parameters
    parts = [2 * size, 2 * size, 12 * size]
    state = sum(parts)
    line = "".join(f"{part / 1e9:{w},.0f}" for part, w in zip(parts, (9, 11, 11), strict=True))
    print(f"{name:6}{line}{state / 1e9:9,.0f}{state / 2**30:13,.0f}{-(-state // int(GPU)):16}")
print(f"\nyour predictions: 7B {predicted_gb_7b} GB, 405B {predicted_gpus_405b} GPUs")

# %% [markdown]
# No model from 7B on can be trained on one such GPU this way, although the weights of 7B and 13B fit easily. A study
# note's planner asks `model_size < gpu_memory`, but weights are an eighth of the state that must fit. Another note
# has "~90 GB" for 7.5B: it counts the two moments and forgets the master copy.
#
# ### Who may share it
# The ZeRO paper's table for 7.5B, computed anew: each of n ranks stores all of it, or 1/n of the optimizer state
# (stage 1), of the gradients too (stage 2), or of everything (stage 3). Lesson 04 builds it.

# %%
PRINTED = {  # ranks: stages 1, 2, 3 in GB, as table 1 of arXiv:1910.02054 prints them
    1: (120, 120, 120),
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
print("7.5 billion parameters, GB a rank\nranks   stage 1   stage 2   stage 3")
for n, printed in PRINTED.items():
    ours = [7.5 * (4 + 12 / n), 7.5 * (2 + 14 / n), 7.5 * 16 / n]
    print(f"{n:5}" + "".join(f"{gigabytes:10.2f}" for gigabytes in ours))
    assert all(abs(a - b) < 0.06 for a, b in zip(ours, printed, strict=True))

# %% [markdown]
# ## Memory: what backward needs
# Between forward and backward a model stores *saved activations*: the inputs of its matrices, norms and functions.
# They grow with tokens, not with parameters. The library's formula is a sum over the operations of a block; D hidden
# features, F in the MLP, H heads, G of keys and values with K elements each, S positions. The small model checks it:

# %%
from course_lib import recompute

show_source(recompute.saved_by_block)
formula = saved_by_stage(SMALL, BATCH, SEQ)
print(
    f"\nsmall model, {BATCH} sequences of {SEQ}: measured {activations:,} bytes, formula {formula:,}"
)
assert activations == formula

# %% [markdown]
# The same formula on the large ones, for a single sequence as long as the model was trained on. *Full recomputation*
# saves only the input of each block and runs its forward twice (lesson 06).

# %%
from course_lib.inference import Cache, cache_bytes

print(
    f"one sequence, GB{'tokens':>10}{'activations':>13}{'recomputed':>12}{'KV cache':>10}{'MB a token':>12}"
)
for name, model in MODELS.items():
    c = model.config
    tokens = c.max_seq_len
    whole = saved_by_stage(c, 1, tokens)
    outside = saved_outside_blocks(c, 1, tokens)
    inputs = 2 * c.layers * tokens * c.hidden + outside.total
    inputs += saved_by_block(c, 1, tokens).total
    cache = cache_bytes(c, 1, tokens)
    print(
        f"{name:16}{tokens:10,}{whole / 1e9:13.1f}{inputs / 1e9:12.1f}{cache / 1e9:10.2f}{whole / tokens / 1e6:12.1f}"
    )

small_cache = Cache(build_model(SMALL), 3)
assert small_cache.nbytes == cache_bytes(SMALL, 3, SEQ)
print(f"\nKV cache of the small model, 3 requests: {small_cache.nbytes:,} bytes, as by formula")
print(f"your prediction for 70B: {predicted_cache_gb} GB")

# %% [markdown]
# Look at 405B: the activations of one sequence need more memory than a GPU has, and no partition of the *state*
# helps. That is why there are lessons 05 to 09. (Recomputed: the inputs of all blocks, embedding and loss, and one
# block in full while its backward runs.)
#
# The last column but one is the KV cache of serving: in each of L layers and G heads a key and a value of K elements,
# 2 L G K per token. Llama 3 has 8 heads of keys and values instead of 64 or 128, which is why its cache is small.
#
# ## Compute: six operations
# A matrix of p parameters multiplies a token with p multiplications and p additions: 2p FLOPs. Backward does it twice, for
# the input's gradient and for the weights'. So a token costs 6 FLOPs for each parameter that is multiplied. PyTorch can
# count:

# %%
from torch.utils.flop_counter import FlopCounterMode


def counted(config):
    """FLOPs of matrix products in forward and backward, counted by PyTorch."""
    model = build_model(config)
    tokens, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
    with FlopCounterMode(display=False) as counter:
        model.loss_sum(tokens, targets)[0].backward()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return by_op, sum(flops for op, flops in by_op.items() if op.endswith((".mm", ".addmm")))


def multiplied(config):
    """Parameters of all matrices: no embedding table, no norms."""
    norms = (2 * config.layers + 1) * config.hidden
    return parameter_count(config) - config.vocab * config.hidden - norms


by_op, products = counted(SMALL)
print(by_op)
print(f"products {products:,}; 6 x {multiplied(SMALL):,} x {BATCH * SEQ} tokens = ", end="")
print(f"{6 * multiplied(SMALL) * BATCH * SEQ:,}")
assert products == 6 * multiplied(SMALL) * BATCH * SEQ

# %% [markdown]
# On the CPU the counter has no formula for the core of attention. By hand: every token meets S others in two products
# of h elements: 4 S h forward, twice that backward, 12 L S h in L layers, or half of that if what causality hides is
# not computed. Papers use both. Beside 6 P (P parameters) it is small until sequences are long.
#
# Two papers print the FLOPs of their runs. The rule 6 P T, for T tokens, gives them:

# %%
PEAK, MFU = 989e12, 0.40
for name, printed in (("175B", 3.14e23), ("405B", 3.8e25)):
    model = MODELS[name]
    ours = 6 * model.parameters * model.tokens
    print(f"{name}: 6 P T = {ours:.3g}, the paper prints {printed:.3g}")
    assert abs(ours / printed - 1) < 0.01

print(
    f"\n{'':6}{'tokens':>10}{'FLOPs':>10}{'attention':>11}{'days, 1 GPU':>13}{'years':>8}{'days, 16,384':>14}"
)
for name, model in MODELS.items():
    c = model.config
    flops = 6 * model.parameters * model.tokens
    attention = 12 * c.layers * c.max_seq_len * c.hidden / (6 * model.parameters)
    days = flops / (PEAK * MFU) / 86400
    print(f"{name:6}{model.tokens:10.1e}{flops:10.1e}{attention:11.0%}", end="")
    print(f"{days:13,.0f}{days / 365:8,.0f}{days / 16384:14.1f}")
print(f"\nyour prediction for 70B: {predicted_days_70b} days")

# %% [markdown]
# *MFU*, model FLOPs utilization, is 6 P T per second as a fraction of the peak (attention counts, recomputation does
# not; where recomputation counts, the fraction is called HFU). The Llama 3 paper reports 38 to 43 % on 8,192 to
# 16,384 GPUs, hence the 40 % above. On one GPU training would take years: compute forces the thousands of GPUs, and
# memory forces the partitions.
#
# ## Your machine's roof
# Why not 100 %? A product must also bring its matrices from memory. With few rows each byte read is used few times.
# FLOPs for each byte moved is a product's *arithmetic intensity*: left of the bend (the *ridge point*) memory is the
# limit, right of it arithmetic. Measured here: the slope from a large copy, the ceiling from the fastest product, the
# points from products of ever more rows.

# %%
import torch.nn.functional as F

from course_lib.view.roofline import roofline


def seconds_of(work, repeats=5):
    """The best of some runs: others only make it longer."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


SIDE = 4096
weights = torch.randn(SIDE, SIDE)  # 67 MB: more than most caches hold
source, target = torch.randn(16_000_000), torch.empty(16_000_000)
bandwidth = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))

points = {}
for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
    x = torch.randn(rows, SIDE)
    flops = 2 * rows * SIDE * SIDE
    moved = 4 * (SIDE * SIDE + 2 * rows * SIDE)
    points[flops / moved] = flops / seconds_of(lambda x=x: F.linear(x, weights))
peak = max(points.values())
print(f"peak {peak / 1e9:,.0f} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s: ", end="")
print(f"the bend is at {peak / bandwidth:.0f} FLOPs a byte")

# %%
roofline(
    {"products of 1 to 512 rows": points},
    {"this machine's roof": (peak, bandwidth)},
    title="Few rows wait for memory, many rows for arithmetic",
)

# %% [markdown]
# A roof is a bound, and kernels for a few rows do not reach it. (A point a little above the slope: a product mostly
# reads, the copy also writes.) Serving, token by token, has one row per request: it is on the left. Training has
# thousands of rows: it is on the right.
#
# ## Network: the same picture, a lower roof
# A link is a slower memory: alpha + S/beta seconds for S bytes (lesson 02 measures both). Take data parallelism: each GPU has
# the whole model, computes 6 P t FLOPs for its t tokens and sends 2(n-1)/n times its P gradients of 2 bytes. FLOPs for each
# byte sent are 1.5 t n/(n-1), and P has cancelled: *how many tokens a GPU has* decides, not how large the model is.

# %%
ROOFS = {  # bytes a second and GPU, one direction
    "inside a node": 450e9,  # NVLink: 900 GB/s is both directions together
    "between nodes": 50e9,  # one port of 400 Gb/s: bits
}


def least_tokens(bandwidth, n, flops=PEAK * MFU, width=2):
    """Tokens a GPU needs in a step to compute as long as it sends."""
    return (n - 1) / n * width * flops / (3 * bandwidth)


for n, (name, beta) in zip((8, 64), ROOFS.items(), strict=True):
    print(f"{n} GPUs {name}: {least_tokens(beta, n):,.0f} tokens a GPU and step, of any model")

# %%
roofline(
    {},
    {name: (PEAK * MFU, beta) for name, beta in ROOFS.items()},
    title="Data parallelism: left of the bend the network is the limit",
    x="FLOPs for each byte sent (1.5 times the tokens of a GPU)",
)

# %% [markdown]
# Left of the bend more GPUs do not help, and the batch cannot grow for ever. Llama 3 has 16 million tokens per step
# and 16,384 GPUs: 1,024 tokens for each, left of the bend between nodes. But where several GPUs share *one* replica
# (a copy of the model), each GPU sends only its shard of the gradients, and the tokens of the replica count: with 128
# replicas they are 131,072, far on the right.
#
# The bend is where sending takes as long as *all* computing. Only backward can hide gradients, 4 of the 6 FLOPs,
# which needs 1.5 times the tokens. (Where eight GPUs of a node are eight replicas, a sum in two levels, lesson 02,
# sends an eighth over each port.)
#
# Watch units: 400 Gb/s are 50 GB/s. "900 GB/s" counts both directions. A formula in *elements* (many papers) needs a
# factor of 2 in bfloat16.
#
# ## The table that the course fills in
# Eight GPUs, 70B, eight sequences of 8,192 tokens per step, one technique at a time, all from the library's formulas:
# data (DP), tensor (TP), sequence (SP), pipeline (PP), context (CP) and expert parallelism (EP). Each lesson adds its
# measured row.

# %%
from course_lib import compose, sp
from course_lib.compose import Plan

N, SEQUENCES = 8, 8
WAYS = {  # (sizes of axes, plan, lesson, what is cut)
    "DP": ({"dp": N}, Plan(), "03", "sequences"),
    "ZeRO-1": ({"dp": N}, Plan(zero=1), "04", "sequences, optimizer"),
    "ZeRO-2": ({"dp": N}, Plan(zero=2), "04", "sequences, optimizer, gradients"),
    "ZeRO-3": ({"dp": N}, Plan(zero=3), "04", "sequences, optimizer, gradients, weights"),
    "TP": ({"tp": N}, Plan(), "05", "matrices"),
    "TP + SP": ({"tp": N}, Plan(region=sp.REGION), "06", "matrices, positions outside"),
    "PP": ({"pp": N}, Plan(micro_batches=SEQUENCES), "07", "layers"),
    "CP": ({"cp": N}, Plan(), "09", "positions"),
}


def held(config, sizes, plan):
    """Parameters of the fullest rank before ZeRO."""
    by_stage = {}
    for part in compose.part_sizes(config, sizes, plan):
        by_stage[part.stage] = by_stage.get(part.stage, 0) + sum(part.elements)
    return max(by_stage.values())


def table(name):
    config = MODELS[name].config
    print(f"{name} on {N} GPUs, GB a rank; sent: average over ranks, one step")
    print(f"{'':9}{'weights':>8}{'gradients':>11}{'optimizer':>11}{'sent':>8}  lesson  cuts")
    for way, (sizes, plan, lesson, cuts) in WAYS.items():
        own = held(config, sizes, plan)
        parts = [
            size * own / (N if plan.zero >= stage else 1)
            for size, stage in ((2, 3), (2, 2), (12, 1))
        ]
        replicas = sizes.get("dp", 1)
        moved = compose.wire_bytes(config, sizes, plan, SEQUENCES // replicas, config.max_seq_len)
        sent = float(sum(moved.values())) / N
        row = "".join(f"{part / 1e9:{w}.1f}" for part, w in zip(parts, (8, 11, 11), strict=True))
        print(f"{way:9}{row}{sent / 1e9:8.1f}  {lesson:6}  {cuts}")
    print(f"{'EP':9}{'':38}  10      experts: lesson 10 gives the model some")


table("70B")

# %% [markdown]
# Two families: DP and CP partition the *data*, replicate the state and send gradients (CP sends keys and values too).
# TP and PP partition the *model* and its state, and send activations. ZeRO is the third: it partitions data and
# state, and sends weights. Bytes are not the only price: lessons 03 to 08 ask which messages can hide behind
# computing, and which ranks wait. (Bytes are for all eight sequences. ZeRO sends its sums of gradients in float32
# here, hence its larger figures.)
#
# ## Move it
# The static picture first; below it the same with sliders (in Jupyter). Find the smallest number of GPUs on which the
# evenly partitioned state of 70B fits, and see how long it would train there.

# %%
from course_lib.trace import StateBytes
from course_lib.view import memory_plot


def limits(model, gpus):
    """State on one GPU and on each of ``gpus``, with activations; time and network in the note."""
    size, config = MODELS[model].parameters, MODELS[model].config
    one = StateBytes(2 * size, 2 * size, 12 * size)
    share = StateBytes(*(-(-part // gpus) for part in (2 * size, 2 * size, 12 * size)))
    kept = saved_by_stage(config, 1, config.max_seq_len)
    days = 6 * size * MODELS[model].tokens / (gpus * PEAK * MFU) / 86400
    whole, cut = share.total + kept <= GPU, share.total <= GPU
    says = "all fits" if whole else f"the state {'fits' if cut else 'does not fit'}"
    says += "" if whole else ", the activations do not" if cut else ""
    wants = least_tokens(ROOFS["inside a node" if gpus <= 8 else "between nodes"], gpus)
    return memory_plot(
        {"whole state": one, f"1 of {gpus}": share},
        activations={f"1 of {gpus}": kept},
        title=f"{model} on {gpus:,} GPUs of 80 GB: {says}",
        note=f"State cut evenly, one sequence of {config.max_seq_len:,} tokens. {days:,.0f} days at "
        f"40 % of the peak. Sending gradients takes as long as computing at {wants:,.0f} tokens a GPU.",
    )


limits("70B", 64)

# %%
from course_lib.view.moved import picture_sliders

picture_sliders(
    limits,
    model=["70B", *(name for name in MODELS if name != "70B")],
    gpus=[64, 1, 2, 4, 8, 16, 32, 128, 256, 1024, 4096, 16384],
)

# %% [markdown]
# ## The same in PyTorch
# PyTorch's *meta* device has shapes and no memory. So a block of 405B can be built and counted here, in raw modules:

# %%
big = MODELS["405B"].config
kv = big.kv_heads * big.head_dim
with torch.device("meta"):
    block = nn.ModuleDict(
        {
            "q": nn.Linear(big.hidden, big.hidden, bias=False),
            "k": nn.Linear(big.hidden, kv, bias=False),
            "v": nn.Linear(big.hidden, kv, bias=False),
            "o": nn.Linear(big.hidden, big.hidden, bias=False),
            "gate": nn.Linear(big.hidden, big.ffn, bias=False),
            "up": nn.Linear(big.hidden, big.ffn, bias=False),
            "down": nn.Linear(big.ffn, big.hidden, bias=False),
            "attn_norm": nn.RMSNorm(big.hidden),
            "ffn_norm": nn.RMSNorm(big.hidden),
        }
    ).to(torch.bfloat16)
size = sum(p.numel() for p in block.parameters())
print(
    f"a block of 405B: {size:,} parameters, {sum(p.nbytes for p in block.parameters()) / 1e9:.2f} GB"
)
assert size == block_parameter_count(big)

# %% [markdown]
# ## Break it and diagnose
# A job that fitted yesterday runs out of memory today. Five jobs on four ranks follow. One is correct (its cause is
# `"correct"`), and in each of the others *one rank* stores too much:
#
# - **graph**: it keeps the validation losses, and with each the graph behind it
# - **copy**: it keeps a second copy of the weights, "the best so far"
# - **gradients**: it does not free the gradients after the step
# - **moments**: its AdamW has a third moment (`amsgrad`)
#
# The table shows bytes alive on each rank after each of three steps, by kind. Name for each job the cause and the
# rank. Another SEED draws other jobs.

# %%
SEED = 1
diagnosis = {  # such as ("copy", 2), or ("correct", None)
    "A": (None, None),
    "B": (None, None),
    "C": (None, None),
    "D": (None, None),
    "E": (None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
import copy

from course_lib.grading import Lab
from course_lib.trace import PeakLiveBytes

FAULTS = {"correct": (None,)} | {
    cause: (range(4),) for cause in ("graph", "copy", "gradients", "moments")
}
lab = Lab("01", SEED, FAULTS, fields=("cause", "rank"))


def job(lab_run):
    mesh = make_mesh()
    fault = lab_run.cause if lab_run.has(lab_run.cause, mesh.rank) else "correct"
    history, best, seen = [], {}, []
    batch(0, seed=0, batch_size=8, seq_len=32)  # the text is read once, before the meter runs
    with PeakLiveBytes() as live:
        model = build_model(tiny_config(max_seq_len=32))
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=fault == "moments")
        for step in range(3):
            share = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
            tokens, targets = batch(step, seed=0, batch_size=8, seq_len=32, **share)
            total, count = model.loss_sum(tokens, targets)
            (total / (count * mesh.dp.size)).backward()
            for p in model.parameters():
                p.grad = comm.all_reduce(p.grad, mesh.dp)
            optimizer.step()
            if fault != "gradients":
                optimizer.zero_grad()
            del total, count
            if fault == "graph":
                history.append(model.loss_sum(tokens, targets)[0])
            else:
                with torch.no_grad():
                    history.append(model.loss_sum(tokens, targets)[0].item())
            if fault == "copy":
                best["model"] = copy.deepcopy(model)
            del tokens, targets
            state = state_bytes(model, optimizer)
            seen.append((state, live.now - state.total))
    return seen


print("bytes after step 3, by kind; what is alive besides, after each of three steps")
print(f"{'':3}{'rank':5}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'other, by step':>36}")
for lab_run in lab:
    for rank, seen in enumerate(run(job, lab_run, n=4)):
        state, _ = seen[-1]
        other = "".join(f"{size:12,}" for _, size in seen)
        line = f"{state.parameters:10,}{state.gradients:11,}{state.optimizer:11,}"
        print(f"{lab_run.letter if rank == 0 else '':3}{rank:<5}{line}{other}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **gradients** appear in their own column only.
# - **moments**: the optimizer's column is half as large again: three elements per parameter instead of two.
# - **copy**: *other* is as large as the weights and stays constant.
# - **graph**: *other* grows with every step. `.item()` or `torch.no_grad()` repairs it.
#
# Memory that grows ends any job; constant memory decides whether the job starts. Print both by rank, because the
# fullest rank ends the job for all.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to
# - **It fits and you can wait.** One GPU has no network and no bubbles, and bugs are found there.
# - **A smaller state is enough.** Fine-tuning with frozen weights (adapters) stores 2 bytes for most parameters
#   instead of 16.
# - **Recompute first.** It costs a third more computing and no message.
# - **Too few tokens for more GPUs.** Left of the bend they wait for one another.
#
# ## The claims settled
# **Claim 1: false.** Weights are 2 of 16 bytes, and activations come on top. For *serving* it is true only if the cache fits
# too.
#
# **Claim 2: only if what they send hides behind what they compute.** Above, a fixed step over more ranks came nearer
# to a ceiling. With tokens per GPU kept above the bend it is nearly true, as long as the batch may grow.

# %%
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# ## The table that grows
# From here on every lesson ends with its row. The first is one process; its state and activations are those of the small
# model above.

# %%
state = kept["gradients in bfloat16"]
print(f"{'a rank, one step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}")
print(f"{'one process':18}{state.total:11,}{activations:13,}{0:12,}")

# %% [markdown]
# ## Cheat-sheet
# Everything computed from the library's formulas.


# %%
def cheat_sheet(name, gpus):
    model = MODELS[name]
    c, size = model.config, model.parameters
    flops = 6 * size * model.tokens
    print(
        f"{name}: L {c.layers}, h {c.hidden:,}, {size:,} parameters; {gpus:,} GPUs of 80 GB, 989 TFLOP/s"
    )
    print(
        f"  state        16 P                  {16 * size / 1e9:12,.0f} GB = {16 * size / 2**30:,.0f} GiB"
    )
    print(
        f"  activations  by shapes, 1 sequence {saved_by_stage(c, 1, c.max_seq_len) / 1e9:12,.1f} GB"
    )
    print(f"  KV cache     2 L G K b a token     {cache_bytes(c, 1, 1) / 1e3:12,.0f} kB")
    print(f"  compute      6 P T                 {flops:12.2g} FLOPs")
    print(f"  time         6 P T / (n peak MFU)  {flops / (gpus * PEAK * MFU) / 86400:12,.1f} days")
    print(
        f"  DP sends     2(n-1)/n P b          {4 * size * (gpus - 1) / gpus / 1e9:12,.0f} GB a step and GPU"
    )
    beta = ROOFS["inside a node" if gpus <= 8 else "between nodes"]
    print(f"  breaks even  (n-1)/n b F / 3 beta  {least_tokens(beta, gpus):12,.0f} tokens a GPU")


for name, gpus in (("7B", 8), ("70B", 256), ("405B", 16384)):
    cheat_sheet(name, gpus)

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/01_why.ipynb), each on its own: a model counted by hand (10 minutes), the tokens that
# a link needs (5), parameters from shapes (10); and on real ranks a step whose limit you find by measuring (20), and
# the fullest rank in raw PyTorch (15).

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "01-1"}
# ## 01-1 Count a model by hand
# Ten minutes, on paper; no code.
#
# **A small one**, of the llama kind: no biases, norms with one weight per feature, an MLP of three matrices;
# embedding and head are two tables. 2 layers, hidden 4, 2 heads, 1 head of keys and values, MLP 6, vocabulary 10.
#
# - `block`: parameters of one block (two norms)
# - `parameters`: of the whole model (one more norm at the end)
# - `state, bytes`: weights and gradients in 2 bytes, AdamW with a float32 master copy and two moments
# - `cache, bytes`: keys and values of one request of 100 tokens, in 2 bytes
#
# **A large one**: 36 billion parameters, trained on 960 billion tokens. A GPU has 80 GB and reaches 400 TFLOP/s of 6PT.
#
# - `state, GB` and `state, GiB`: the second may be typed as a fraction
# - `GPUs`: the smallest number that holds the state when it is partitioned evenly
# - `days, 1 GPU` and `days, 500 GPUs`
#
# **Its step** on 16 GPUs in data parallelism: each computes 4,000 tokens, then their gradients, in 2 bytes, are all-reduced by a
# ring. The link has 400 Gb/s in each direction, and no alpha. (Forget that the state would not fit.)
#
# - `sent, GB`: by one GPU
# - `sending, s` and `computing, s`
# - `binds`: `"compute"` or `"network"`

# %% course={"ex": "01-1", "role": "answer"}
# BEGIN SOLUTION
table = {
    "block": 128,
    "parameters": 340,
    "state, bytes": 5440,
    "cache, bytes": 1600,
    "state, GB": 576,
    "state, GiB": 576e9 / 2**30,
    "GPUs": 8,
    "days, 1 GPU": 6000,
    "days, 500 GPUs": 12,
    "sent, GB": 135,
    "sending, s": 2.7,
    "computing, s": 2.16,
    "binds": "network",
}
# STUB
# table = {
#     "block": None,
#     "parameters": None,
#     "state, bytes": None,
#     "cache, bytes": None,
#     "state, GB": None,
#     "state, GiB": None,  # such as 5e9 / 2**30
#     "GPUs": None,
#     "days, 1 GPU": None,
#     "days, 500 GPUs": None,
#     "sent, GB": None,
#     "sending, s": None,
#     "computing, s": None,
#     "binds": None,  # "compute" or "network"
# }
# END SOLUTION

# %% [markdown] course={"ex": "01-1", "role": "answer"}
# - A block: q and o 16 each, k and v 8 each (one head of 2 features), the MLP 3 times 24, norms 8. Two blocks, two tables of 40, a
#   norm of 4. 16 bytes for each of 340.
# - The cache: keys *and* values, 2 layers, 100 tokens, 1 head of 2 features, 2 bytes.
# - 6 · 36e9 · 960e9 = 2.07e23 FLOPs; 4e14 per second; 86,400 seconds per day.
# - 2 · 15/16 of 72 GB, at 50 GB/s. 6 · 36e9 · 4,000 FLOPs take 2.16 s: less.

# %% course={"ex": "01-1", "role": "check"}
from course_lib.grading import check

check("01-1", table)

# %% [markdown] course={"ex": "01-2"}
# ## 01-2 The tokens that a link wants
# Data parallelism over n GPUs: each computes `per_parameter` FLOPs for each parameter and token (6, or 8 with full
# recomputation) at a rate of `flops` per second. Then a ring sums the gradients, `width` bytes each, over a link of
# `gbits` Gb/s in each direction, without alpha. How many tokens must a GPU have in a step for computing to take as
# long as sending?


# %% course={"ex": "01-2", "role": "answer"}
def least_tokens(n, width, per_parameter, flops, gbits):
    """Tokens of one GPU (a float) for which computing and sending take equally long."""
    # BEGIN SOLUTION
    return 2 * (n - 1) / n * width / (gbits * 1e9 / 8) * flops / per_parameter
    # END SOLUTION


# %% course={"ex": "01-2", "role": "check"}
from course_lib.grading import check

check("01-2", least_tokens)

# %% [markdown] course={"ex": "01-3"}
# ## 01-3 Parameters from shapes
# Count the parameters of a decoder of the llama kind from its shapes. A block has two norms (one weight per
# feature), attention (q, k, v, o) and an MLP of three matrices (gate, up, down), none with a bias. `heads` query
# heads share `hidden` features evenly; keys and values have `kv_heads` heads of the same size. Before the blocks
# comes the embedding, after them one more norm and the head. With `tied`, embedding and head are one table.


# %% course={"ex": "01-3", "role": "answer"}
def count(layers, hidden, heads, kv_heads, ffn, vocab, tied):
    """Parameters of the whole model, a whole number."""
    # BEGIN SOLUTION
    kv_features = kv_heads * (hidden // heads)
    attention = 2 * hidden * hidden + 2 * hidden * kv_features
    block = attention + 3 * hidden * ffn + 2 * hidden
    tables = vocab * hidden * (1 if tied else 2)
    return layers * block + hidden + tables
    # END SOLUTION


# %% course={"ex": "01-3", "role": "check"}
from course_lib.grading import check

check("01-3", count)

# %% [markdown] course={"ex": "01-4"}
# ## 01-4 Which limit binds?
# On real ranks, `machine` is one rank's: `machine.compute()` is its computing, `machine.all_reduce(x)` sums x over the ranks, over
# a slow link. A step is the one, then the other with the gradient. Measure a step, and return a pair, on every rank:
#
# - the bytes that this rank sends for the gradient, by the ring's formula
# - `"compute"` or `"network"`: what takes longer, computing on the slowest rank or the all-reduce itself. All ranks must say
#   the same.
#
# `machine.now()` is the time in seconds. This clock runs only while a rank computes, sends or waits for others, so
# that it does not matter how busy your computer is. Note that ranks may compute for different times, and an
# all-reduce waits for the last rank. This wait is not time on the network.
#
# The check runs on groups of one to three ranks, with other times in each. In some cases one rank is late: any rank,
# not only rank 0. Gradients have several dtypes. The check also looks whether each rank computes first and then sums
# the gradient itself. Of use: `machine.barrier()` waits until all ranks are there; `comm.all_reduce_max(x, axis)` gives
# every rank the elementwise maximum over the ranks of a tensor x.


# %% course={"ex": "01-4", "role": "answer"}
def limit(machine, gradient, axis):
    """(bytes that this rank sends, "compute" or "network") of a step; ``axis`` has rank and size."""
    # BEGIN SOLUTION
    start = machine.now()
    machine.compute()
    computed = machine.now() - start
    machine.barrier()
    start = machine.now()
    machine.all_reduce(gradient)
    sent = machine.now() - start
    longest = comm.all_reduce_max(torch.tensor([computed, sent]), axis).tolist()
    n = axis.size
    return 2 * (n - 1) / n * gradient.nbytes, "compute" if longest[0] > longest[1] else "network"
    # END SOLUTION


# %% course={"ex": "01-4", "role": "check"}
from course_lib.grading import check

check("01-4", limit)

# %% [markdown] course={"ex": "01-5"}
# ## 01-5 The fullest rank, in raw PyTorch
# A job ends when its fullest rank runs out of memory. `tensors` is a list of all tensors that this rank stores:
# weights, some of them tied, views of larger tensors, several dtypes. Memory belongs to *storages*: count each
# storage once, and in full, however many tensors share it and however little of it they show.
#
# Return the number of the fullest rank and its bytes, on every rank. `torch.distributed` alone: `course_lib` refuses here. The
# default process group exists already.
#
# The check runs on one to four ranks and allows small messages only: sizes, no tensors. Sizes are exact, also of large
# storages.
#
# Of use: `t.untyped_storage()` has `.data_ptr()` and `.nbytes()`; `dist.all_gather(parts, x)` fills the list of tensors `parts`.


# %% course={"ex": "01-5", "role": "answer"}
def fullest(tensors):
    """Return (rank, bytes) of the rank that stores most, the same on all ranks: whole numbers."""
    # BEGIN SOLUTION
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    mine = torch.tensor(sum(storages.values()))
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    sizes = [int(part) for part in parts]
    return sizes.index(max(sizes)), max(sizes)
    # END SOLUTION


# %% course={"ex": "01-5", "role": "check"}
from course_lib.grading import check

check("01-5", fullest)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** A colleague needs 18 bytes per parameter, a paper 16, a blog 20. Which one is wrong?
#
# <details><summary>Answer</summary>
# Possibly none: gradients in float32 give 18, in both precisions at once 20, in bfloat16 alone 16.
# </details>
#
# **2.** 70B fits on 16 GPUs of 80 GB when its state is partitioned evenly. Why is it not trained on 16?
#
# <details><summary>Answer</summary>
# 1,129 of 1,280 GB are state. The remaining 9 GB per GPU must hold activations and all temporarily gathered tensors.
# And 15 trillion tokens would take some 32 years at 40 % of the peak.
# </details>
#
# **3.** The parameters double. What happens to the number of tokens that a GPU needs to hide its gradients?
#
# <details><summary>Answer</summary>
# Nothing: FLOPs and bytes both double. A faster GPU on the same link needs more tokens.
# </details>
#
# **4.** A study note gives the gradients of 175B on 25 GB/s as 350 / 25 = 14 s. What is missing?
#
# <details><summary>Answer</summary>
# The algorithm: a ring sends 2(n-1)/n times the bytes, almost 28 s. And the question how much of it hides.
# </details>
#
# **5.** The sequence is made four times as long. Which of weights, optimizer, activations, KV cache and FLOPs per
# token grow?
#
# <details><summary>Answer</summary>
# Weights and optimizer do not. Activations and cache of a sequence grow four times; of the FLOPs per token only those
# of attention grow.
# </details>
#
# ## Sources and what next
# - Rajbhandari et al. 2019, *ZeRO*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054): section 3, where memory goes.
# - Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198): activations by formula.
# - Narayanan et al. 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): FLOPs, and days on many GPUs.
# - Chowdhery et al. 2022, *PaLM*, [arXiv:2204.02311](https://arxiv.org/abs/2204.02311): MFU, and HFU beside it; Kaplan et al.
#   2020, [arXiv:2001.08361](https://arxiv.org/abs/2001.08361): 6 P T; Williams et al. 2009,
#   [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785): the roofline.
# - 18 and 20 bytes: Megatron-LM, [distributed
#   optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html). The GPU: NVIDIA,
#   [H100](https://www.nvidia.com/en-us/data-center/h100/), whose 1,979 TFLOP/s count sparsity: half is dense.
# - Shapes: Llama [arXiv:2302.13971](https://arxiv.org/abs/2302.13971) and Llama 2
#   [arXiv:2307.09288](https://arxiv.org/abs/2307.09288); GPT-3 [arXiv:2005.14165](https://arxiv.org/abs/2005.14165), tables 2.1
#   and D.1; Llama 3 [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), tables 3 and 4.
# - The library: `course_lib/model/counting.py`, `course_lib/recompute.py`, `course_lib/trace/memory.py`.
#
# Next: what is partitioned must be sent. Lesson 02 builds the messages.
