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
# *40 minutes to read and run, 60 to build.* Your task is to train Llama 3 70B, and you have one H100. The GPU has 80 GB
# of memory, but the weights alone take 141 GB. If they did fit, could you train the model? And would 16,384 GPUs be
# 16,384 times as fast? We calculate the answers, and check the formulas on a small model. You need lesson 00.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *A model can be trained on a GPU if its weights fit into the GPU's memory.*
# 2. *n GPUs train n times as fast as one.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## One GPU and 70 billion parameters
# Three resources limit a training step:
#
# | resource | what a step uses it for | on an H100 |
# |---|---|---|
# | memory | weights, gradients, optimizer, activations | 80 GB |
# | compute | about 6 operations (FLOPs) per parameter and token | 989 TFLOP/s in bfloat16 |
# | network | results that other GPUs need | 450 GB/s inside a node, 50 GB/s between nodes, each way |
#
# More GPUs bring more memory and more compute, but they must exchange results over the network. So every technique in
# this course answers two questions: what do we split over the GPUs, and what must they then send to each other?
#
# | symbol | meaning |
# |---|---|
# | P, T | parameters of the model; tokens that it is trained on |
# | n, t | GPUs (ranks); tokens that one GPU computes in a step |
# | L, h | layers; hidden size |
# | G, K | heads of keys and values; elements per head |
# | F, S | inner features of the MLP; tokens in a sequence |
#
# Fill in what you expect:

# %%
predicted_gb_7b = None  # GB of weights, gradients and AdamW's tensors when a 7B model is trained
predicted_gpus_405b = None  # GPUs of 80 GB that these tensors of a 405B model fill, divided evenly
predicted_days_70b = None  # days of 70B on 15 trillion tokens on one GPU, at 40 % of its peak
predicted_cache_gb = None  # GB of keys and values of 8,192 tokens, 70B: 80 layers, 8 heads of 128
predicted_speedup = None  # four ranks share 240 ms of computing, then all-reduce 4 MB at 100 MB/s

# %% [markdown]
# ## The state: 16 bytes per parameter
# Mixed precision with AdamW stores each weight and its gradient in bfloat16, with 2 bytes each. The optimizer adds a
# master copy of the weight and two moments in float32, with 4 bytes each. That makes 16 bytes per parameter. We call
# them the **state**, although gradients exist only from backward to the optimizer's step. To check the number, the
# folded cell trains a small model for one step with gradients in bfloat16, in float32, and in both, and counts bytes.

# %% jupyter={"source_hidden": true}
# Train a small model in mixed precision for one step and count the bytes of its state.
import torch
import torch.nn.functional as F
from torch import nn

from course_lib.data import batch
from course_lib.model import build_model, parameter_count, tiny_config
from course_lib.recompute import saved_by_stage
from course_lib.trace import SavedActivations, state_bytes

BATCH, SEQ = 4, 64
SMALL = tiny_config(hidden=128, ffn=384, max_seq_len=SEQ, dtype=torch.bfloat16)


def mixed_step():
    """One step: the state by precision of the gradients, saved activations, number of tensors."""
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
print(f"{'':24}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'bytes per parameter':>21}")
for name, state in kept.items():
    line = f"{state.parameters:9,}{state.gradients:11,}{state.optimizer:11,}"
    print(f"{name:24}{line}{state.total / P:21.3f}")
each = [2 + 2 + 4 + 12, 2 + 4 + 12, 2 + 2 + 12]
for state, size in zip(kept.values(), each, strict=True):
    assert state.total == size * P + 4 * tensors  # AdamW counts its steps: 4 bytes per tensor

# %% [markdown]
# All three figures are in use: the ZeRO paper counts 16, and Megatron-LM's documentation lists 18 and 20. So ask how
# gradients are stored. In this lesson it is bfloat16.
#
# ## The same in PyTorch: a block without memory
# How large is the state of a real model? We need its number of parameters, which is a sum over shapes. PyTorch's *meta*
# device creates tensors that have a shape but no memory, so we can build a block of Llama 3 405B here:

# %%
from dataclasses import dataclass

from course_lib.model import ModelConfig, block_parameter_count


@dataclass(frozen=True)
class Published:
    """A model as its paper describes it: shapes, tokens that it was trained on, parameters."""

    config: ModelConfig
    tokens: float
    parameters: int


def llama(*shapes):
    return ModelConfig("llama", *shapes, dtype=torch.bfloat16)


GPT_3 = ModelConfig(
    "gpt", 96, 12288, 96, 96, 4 * 12288, 2048, 50257, tied=True, dtype=torch.bfloat16
)
MODELS = {  # layers, hidden, query heads, heads of keys and values, ffn, context, vocabulary
    "7B": Published(llama(32, 4096, 32, 32, 11008, 4096, 32000), 2e12, 6_738_415_616),
    "13B": Published(llama(40, 5120, 40, 40, 13824, 4096, 32000), 2e12, 13_015_864_320),
    "70B": Published(llama(80, 8192, 64, 8, 28672, 8192, 128256), 15e12, 70_553_706_496),
    "175B": Published(GPT_3, 300e9, 174_604_259_328),
    "405B": Published(llama(126, 16384, 128, 8, 53248, 8192, 128256), 15.6e12, 405_853_388_800),
}

big = MODELS["405B"].config
kv_features = big.kv_heads * big.head_dim
with torch.device("meta"):
    block = nn.ModuleDict(
        {
            "q": nn.Linear(big.hidden, big.hidden, bias=False),
            "k": nn.Linear(big.hidden, kv_features, bias=False),
            "v": nn.Linear(big.hidden, kv_features, bias=False),
            "o": nn.Linear(big.hidden, big.hidden, bias=False),
            "gate": nn.Linear(big.hidden, big.ffn, bias=False),
            "up": nn.Linear(big.hidden, big.ffn, bias=False),
            "down": nn.Linear(big.ffn, big.hidden, bias=False),
            "attn_norm": nn.RMSNorm(big.hidden),
            "ffn_norm": nn.RMSNorm(big.hidden),
        }
    ).to(torch.bfloat16)
size = sum(p.numel() for p in block.parameters())
print(f"a block of 405B: {size:,} parameters, {2 * size / 1e9:.2f} GB of weights")
assert size == block_parameter_count(big)

# %% [markdown]
# A Llama model has L such blocks, an embedding, a last norm and an LM head. Next come the states of Llama 2 (7B, 13B),
# Llama 3 (70B, 405B) and GPT-3 (175B). The last column divides the state over GPUs of 80 GB.

# %%
GPU = 80e9  # bytes
print(f"{'':6}{'layers':>7}{'hidden':>8}{'parameters':>17}", end="")
print(f"{'weights, GB':>13}{'state, GB':>11}{'state, GiB':>12}{'GPUs':>6}")
for name, model in MODELS.items():
    c, size = model.config, parameter_count(model.config)
    assert size == model.parameters
    print(f"{name:6}{c.layers:7}{c.hidden:8,}{size:17,}", end="")
    print(f"{2 * size / 1e9:13,.0f}{16 * size / 1e9:11,.0f}{16 * size / 2**30:12,.0f}", end="")
    print(f"{-(-16 * size // int(GPU)):6}")
print(f"\nyour predictions: 7B {predicted_gb_7b} GB, 405B {predicted_gpus_405b} GPUs")

# %% [markdown]
# The weights of 7B and 13B fit into 80 GB easily, but their states do not, because the weights are only an eighth of
# the state. Watch the unit: a GiB is 2^30 bytes, 7 % more than a GB.
#
# ## Memory inside a step: saved activations
# Forward saves the inputs of matrices, norms and nonlinearities, because backward needs them. These *saved activations*
# grow with the number of tokens. In eager PyTorch on a CPU, a Llama block in bfloat16 saves:
#
# | saved tensors | bytes per token |
# |---|---|
# | inputs and normalized inputs of two norms, in float32 | 16 h |
# | outputs of these norms | 4 h |
# | queries, and output of attention | 4 h |
# | keys and values | 4 G K |
# | gate, SiLU(gate), up, and their product | 8 F |
#
# The attention kernel saves no scores, and small tensors such as statistics are not listed. A *fused* SwiGLU kernel
# computes SiLU(gate) again in backward instead of saving it, which leaves 6 F. The folded cell measures both variants
# on the small model.


# %% jupyter={"source_hidden": true}
# Measure the saved activations of the small model, with SwiGLU in eager operations and fused.
class FusedSwiGLU(torch.autograd.Function):
    """silu(gate) * up, which saves gate and up alone."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


def fused_forward(mlp):
    return lambda x: mlp.down(FusedSwiGLU.apply(mlp.gate(x), mlp.up(x)))


def measured_when_fused():
    model = build_model(SMALL)
    for block in model.blocks:
        block.ffn.forward = fused_forward(block.ffn)
    tokens, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
    with SavedActivations(model, tokens, targets) as saved:
        model.loss_sum(tokens, targets)
    return saved.peak


def saved_when_fused(config, sequences, seq_len):
    """Bytes by formula: one tensor of F elements of 2 bytes less per token and block."""
    less = 2 * config.layers * sequences * seq_len * config.ffn
    return saved_by_stage(config, sequences, seq_len) - less


eager, fused = saved_by_stage(SMALL, BATCH, SEQ), saved_when_fused(SMALL, BATCH, SEQ)
print(f"small model, {BATCH} sequences of {SEQ} tokens; bytes saved for backward")
print(f"eager SwiGLU: measured {activations:,} bytes, formula {eager:,}")
print(f"fused SwiGLU: measured {measured_when_fused():,} bytes, formula {fused:,}")
assert (activations, measured_when_fused()) == (eager, fused)

# %% [markdown]
# The formula is exact, so we apply it to the large models, for one training sequence. The last column is memory for
# serving: to generate text, a model stores the keys and values of all past tokens. This *KV cache* has 2 L G K elements
# per token.

# %%
from course_lib.inference import cache_bytes

print(f"{'one sequence, GB':18}{'tokens':>7}{'eager':>9}{'fused SwiGLU':>14}{'KV cache':>10}")
for name, model in MODELS.items():
    c, tokens = model.config, model.config.max_seq_len
    whole, fused = saved_by_stage(c, 1, tokens), saved_when_fused(c, 1, tokens)
    with_fused = f"{fused / 1e9:.1f}" if c.family == "llama" else "-"
    print(f"{name:18}{tokens:7,}{whole / 1e9:9.1f}{with_fused:>14}", end="")
    print(f"{cache_bytes(c, 1, tokens) / 1e9:10.2f}")
c = MODELS["70B"].config
gpt_block = 34 * c.max_seq_len * c.hidden * c.layers
print(f"\n34 h bytes per token and block, with the sizes of 70B: {gpt_block / 1e9:.0f} GB")
print(f"your prediction of the cache of 70B: {predicted_cache_gb} GB")

# %% [markdown]
# The activations of one sequence of 70B need more memory than a GPU has. Dividing the *state* does not help, so we must
# recompute or split activations, too (lessons 05, 06 and 09).
#
# The well-known formula 34sbh, 34 h bytes per token and block, gives only 183 GB. It describes a GPT block: GELU, an
# MLP of 4 h features, dropout masks, and norms that save their inputs in 2 bytes.
#
# ## Compute: six operations per parameter and token
# A matrix of p parameters needs p multiplications and p additions per token, so 2 p FLOPs. Backward takes twice as
# many, because it computes the gradients of the input and of the weights. So each parameter of a matrix costs 6 FLOPs
# per token. An embedding costs none: it is only looked up. PyTorch's counter of matrix products agrees:

# %%
from torch.utils.flop_counter import FlopCounterMode

model = build_model(SMALL)
tokens, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
with FlopCounterMode(display=False) as counter:
    model.loss_sum(tokens, targets)[0].backward()
by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
norms = (2 * SMALL.layers + 1) * SMALL.hidden
multiplied = parameter_count(SMALL) - SMALL.vocab * SMALL.hidden - norms
formula = 6 * multiplied * BATCH * SEQ
print(f"counted {by_op['aten.mm']:,}; 6 x {multiplied:,} x {BATCH * SEQ} tokens = {formula:,}")
assert by_op["aten.mm"] == formula

# %% [markdown]
# Attention's two products, with keys and with values, add 12 L S h FLOPs per token, of which a causal kernel skips
# half. Beside 6 P they are small until sequences are long, so the common rule for a full run is 6 P T.
#
# GPUs do not reach their peak. *Model FLOPs utilization* (MFU) is the FLOPs that the model needs, as a fraction of the
# FLOPs that the GPUs could do in the same time. The Llama 3 paper reports 38 to 43 %, and we assume 40 %. We
# compare 6 P T with two papers, and then compute days:

# %%
PEAK, MFU = 989e12, 0.40
for name, printed in (("175B", 3.14e23), ("405B", 3.8e25)):
    ours = 6 * MODELS[name].parameters * MODELS[name].tokens
    print(f"{name}: 6 P T = {ours:.3g}, the paper prints {printed:.3g}")
    assert abs(ours / printed - 1) < 0.01

print(f"\n{'':6}{'tokens':>9}{'6 P T':>9}{'attention':>11}", end="")
print(f"{'days, 1 GPU':>13}{'years':>7}{'days, 16,384 GPUs':>19}")
for name, model in MODELS.items():
    c = model.config
    flops = 6 * model.parameters * model.tokens
    attention = 12 * c.layers * c.max_seq_len * c.hidden / (6 * model.parameters)
    days = flops / (PEAK * MFU) / 86400
    print(f"{name:6}{model.tokens:9.1e}{flops:9.1e}{attention:11.0%}", end="")
    print(f"{days:13,.0f}{days / 365:7,.0f}{days / 16384:19.1f}")
print(f"\nyour prediction for 70B: {predicted_days_70b} days")

# %% [markdown]
# One GPU would train 70B for 509 years, even if it had the memory. So memory forces us to split the model, and compute
# forces us to use thousands of GPUs. The days leave out attention, shown as a fraction of 6 P.
#
# ## Network: the third limit
# We divide 240 ms of computing over n ranks, which then all-reduce their gradients of 4 MB. In a ring (lesson 02) each
# rank sends 2(n-1)/n times the gradients, in 2(n-1) messages. Computing is a sleep here, and the all-reduce is delayed
# to the time of a ring at 100 MB/s with 1 ms per message.

# %%
import time

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
    for half in ("F", "B"):
        with mesh.compute(half):
            pass  # paced
    comm.all_reduce(gradient, mesh.dp)
    return time.perf_counter() - start


def paced(n):
    pace = {"F": COMPUTE / 3 / n, "B": COMPUTE * 2 / 3 / n}
    return max(run(one_step, n=n, pace=pace, links=NETWORK))


print(f"{'ranks, ms':9}{'computing':>11}{'sending':>9}{'sum':>6}{'measured':>10}{'speed-up':>10}")
took = {n: paced(n) for n in (1, 2, 4)}
for n, seconds in took.items():
    sending = ring_seconds(GRADIENT, n, LINK)
    print(f"{n:9}{1e3 * COMPUTE / n:11.0f}{1e3 * sending:9.0f}", end="")
    print(f"{1e3 * (COMPUTE / n + sending):6.0f}{1e3 * seconds:10.0f}{took[1] / seconds:10.2f}")
print(f"your prediction for four ranks: {predicted_speedup}")

# %% [markdown]
# Computing becomes shorter with n, but sending becomes longer. By the formula, nine ranks reach the best speed-up, 2.1.
# The measured steps are longer, because real processes also need time to start each message.
#
# Real runs send during backward (lesson 03), which hides sending only if backward takes longer. So when does
# computing take as long as sending? In data parallelism each GPU has the whole model and computes t tokens:
#
# $$\frac{6 P t}{\text{peak}} = \frac{2(n-1)}{n} \cdot \frac{2 P}{\text{link}} \qquad\Rightarrow\qquad
# t = \frac{n-1}{n} \cdot \frac{2\,\text{peak}}{3\,\text{link}}$$
#
# P cancels: the tokens per GPU decide, not the size of the model.
#
# For such comparisons this course uses peak FLOP/s and the line rate in one direction. Real rates are lower. Of an
# H100's 450 GB/s, NCCL's ring reaches [about 370](https://github.com/NVIDIA/nccl-tests/issues/212). Do not compare the
# line rate with 40 % of the peak, because MFU already contains the waiting for the network.

# %%
from course_lib.view.roofline import roofline

ROOFS = {  # bytes per second and GPU, in one direction
    "inside a node": 450e9,  # NVLink's 900 GB/s are both directions together
    "between nodes": 50e9,  # one port of 400 Gb/s: these are bits
}


def least_tokens(beta, n, flops=PEAK, width=2):
    """Tokens per GPU and step for which computing and sending gradients take equally long."""
    return (n - 1) / n * width * flops / (3 * beta)


for n, (name, beta) in zip((8, 64), ROOFS.items(), strict=True):
    print(f"{n} GPUs {name}: {least_tokens(beta, n):,.0f} tokens per GPU and step, of any model")
roofline(
    {},
    {name: (PEAK, beta) for name, beta in ROOFS.items()},
    title="Data parallelism: left of the bend the network is the limit",
    x="FLOPs per byte sent: 1.5 n/(n-1) times the tokens per GPU",
)

# %% [markdown]
# Left of its bend, a GPU computes only as fast as it can send, even if all sending overlaps with computing. On 16,384
# GPUs, Llama 3 405B has 1,024 tokens per GPU and step, which seems far left of the bend between nodes. But 128 GPUs
# share one copy of the model. Each sends only a 128th of the gradients, while the group computes 131,072 tokens, ten
# times as many as at the bend.
#
# ## All three at once
# The bars show the whole state, and an n-th of it with the activations of one sequence. Move the sliders. On how many
# GPUs does the state of 70B fit, and how long does training take?

# %% jupyter={"source_hidden": true}
from course_lib.trace import StateBytes
from course_lib.view import memory_plot


def limits(model, gpus):
    """State on one GPU and on each of ``gpus``, with activations; time and network in the note."""
    size, config = MODELS[model].parameters, MODELS[model].config
    one = StateBytes(2 * size, 2 * size, 12 * size)
    share = StateBytes(*(-(-part // gpus) for part in (2 * size, 2 * size, 12 * size)))
    kept = saved_by_stage(config, 1, config.max_seq_len)
    days = 6 * size * MODELS[model].tokens / (gpus * PEAK * MFU) / 86400
    whole, split = share.total + kept <= GPU, share.total <= GPU
    says = "all fits" if whole else f"the state {'fits' if split else 'does not fit'}"
    says += ", the activations do not" if split and not whole else ""
    tokens = least_tokens(ROOFS["inside a node" if gpus <= 8 else "between nodes"], gpus)
    return memory_plot(
        {"whole state": one, f"1 of {gpus}": share},
        activations={f"1 of {gpus}": kept},
        title=f"{model} on {gpus:,} GPUs of 80 GB: {says}",
        note=f"State divided evenly, one sequence of {config.max_seq_len:,} tokens. {days:,.0f} days "
        f"at 40 % of the peak. Sending gradients takes as long as computing at {tokens:,.0f} tokens "
        "per GPU.",
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
# The state of 70B fits on 16 GPUs. Its activations never fit, because they are not divided here.
#
# ## Break it and diagnose
# Of these five jobs on four ranks, one is correct (`"correct"`). In each of the others, *one rank* stores too much:
#
# - **graph**: a list of validation losses, each with its autograd graph
# - **copy**: a second copy of the weights, the best so far
# - **gradients**: gradients that are not freed after the step
# - **moments**: a third tensor per weight in AdamW (`amsgrad`)
#
# The table shows the bytes alive on each rank. Name the cause and the rank of each job.

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


print("bytes after step 3, by kind; other: everything else alive, after each of three steps")
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
# - **moments**: the optimizer's column is larger by half.
# - **copy**: *other* is as large as the weights and stays constant.
# - **graph**: *other* grows with every step. `.item()` or `torch.no_grad()` repairs it.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to parallelize, and both claims
# - **The model fits and you can wait.** One GPU never waits for another.
# - **Recomputation is enough.** Full recomputation costs a third more computing, but no message.
# - **The state can be smaller.** Fine-tuning with adapters stores 2 bytes instead of 16 for each frozen parameter.
#
# **Claim 1: false.** The weights are only 2 of 16 bytes, and activations need memory as well.
#
# **Claim 2: only if each GPU keeps enough tokens.** If the batch grows with n, backward can hide the sending, and the
# speed-up can stay close to n. If it does not, sending soon takes longer than computing.

# %%
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# **The table that grows.** Most lessons add rows to this table. The first is our small model on one process.

# %%
state = kept["gradients in bfloat16"]
print(f"{'per rank and step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}")
print(f"{'one process':18}{state.total:11,}{activations:13,}{0:12,}")

# %% [markdown]
# **Cheat-sheet.** Activations are those of the eager block. The last two lines assume data parallelism over all n
# GPUs.


# %%
def cheat_sheet(name, gpus):
    model = MODELS[name]
    c, size = model.config, model.parameters
    days = 6 * size * model.tokens / (gpus * PEAK * MFU) / 86400
    beta = ROOFS["inside a node" if gpus <= 8 else "between nodes"]
    sent = 2 * (gpus - 1) / gpus * 2 * size
    activations = saved_by_stage(c, 1, c.max_seq_len)
    print(f"{name}: L {c.layers}, h {c.hidden:,}, P {size:,}; n = {gpus:,} GPUs, peak 989 TFLOP/s")
    for what, formula, value in (
        ("state", "16 P", f"{16 * size / 1e9:,.0f} GB = {16 * size / 2**30:,.0f} GiB"),
        ("activations", "1 sequence", f"{activations / 1e9:,.1f} GB"),
        ("KV cache", "4 L G K", f"{cache_bytes(c, 1, 1) / 1e3:,.0f} kB per token"),
        ("compute", "6 P T", f"{6 * size * model.tokens:.2g} FLOPs"),
        ("time", "6 P T / (n peak MFU)", f"{days:,.1f} days"),
        ("DP sends", "2(n-1)/n 2 P", f"{sent / 1e9:,.0f} GB per GPU and step"),
        (
            "equal at",
            "(n-1)/n 2 peak / (3 link)",
            f"{least_tokens(beta, gpus):,.0f} tokens per GPU",
        ),
    ):
        print(f"  {what:13}{formula:27}{value}")


for name, gpus in (("7B", 8), ("70B", 256), ("405B", 16384)):
    cheat_sheet(name, gpus)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/01_why.ipynb) take 60 minutes.

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "01-1"}
# ## 01-1 Count a model by hand
# This takes ten minutes on paper and needs no code.
#
# **A small model** of the Llama family has no biases, norms with one weight per feature, and an MLP of three matrices.
# Its embedding and its LM head are two separate matrices. It has 2 layers, hidden size 4, 2 query heads, 1 head of keys
# and values, 6 inner features of the MLP, and a vocabulary of 10.
#
# - `block`: the parameters of one block, which has two norms
# - `parameters`: the parameters of the whole model, which has one more norm at the end
# - `state, bytes`: weights and gradients with 2 bytes each, and AdamW's float32 master copy and two moments
# - `cache, bytes`: the keys and values of one request of 100 tokens, with 2 bytes per element
#
# **A large model** has 36 billion parameters and is trained on 960 billion tokens. A GPU has 80 GB and computes 6 P T
# at 400 TFLOP/s.
#
# - `state, GB` and `state, GiB`: you may type the second as a fraction
# - `GPUs`: the smallest number of GPUs that holds the state when it is divided evenly
# - `days, 1 GPU` and `days, 500 GPUs`: how long training takes
#
# **One step of the large model** runs on 16 GPUs in data parallelism. Each GPU computes 4,000 tokens, and then a ring
# all-reduces the gradients, 2 bytes each. The link carries 400 Gb/s in each direction. Messages have no other cost, and
# you may ignore that the state does not fit.
#
# - `sent, GB`: how much each GPU sends
# - `sending, s` and `computing, s`: how long each takes
# - `binds`: which takes longer, `"compute"` or `"network"`

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
# - In a block, q and o have 16 parameters each, k and v 8 each (one head of 2 features), the MLP has 3 · 24, and the
#   norms have 8: 128 in all. Two blocks, two matrices of 40 and a norm of 4 make 340, with 16 bytes each.
# - The cache stores keys *and* values: 2 · 2 layers · 100 tokens · 2 features · 2 bytes.
# - Training needs 6 · 36e9 · 960e9 = 2.07e23 FLOPs. At 4e14 FLOPs per second and 86,400 seconds per day, this takes
#   6,000 days.
# - Each GPU sends 2 · 15/16 · 72 GB at 50 GB/s, which takes 2.7 s. Computing 6 · 36e9 · 4,000 FLOPs takes only 2.16 s.

# %% course={"ex": "01-1", "role": "check"}
from course_lib.grading import check

check("01-1", table)

# %% [markdown] course={"ex": "01-2"}
# ## 01-2 Enough tokens for a link
# In data parallelism over n GPUs, each GPU computes `per_parameter` FLOPs per parameter and token (6, or 8 with full
# recomputation), at `flops` FLOPs per second. Then a ring all-reduces the gradients, `width` bytes each, over a link of
# `gbits` Gb/s in each direction. Messages have no other cost. For how many tokens per GPU does computing take as long
# as sending?


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
# Count the parameters of a decoder of the Llama family from its shapes. A block has two norms (one weight per feature),
# attention (q, k, v, o) and an MLP of three matrices (gate, up, down). None of them has a bias. The `heads` query heads
# divide the `hidden` features evenly, and keys and values have `kv_heads` heads of the same size. The embedding comes
# before the blocks. One more norm and the LM head follow them. With `tied`, embedding and head are one matrix.


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
# This exercise runs on real ranks, and each rank gets its own `machine`. `machine.compute()` computes, and
# `machine.all_reduce(x)` sums x over the ranks on a slow link. A step computes and then all-reduces the gradient.
# Measure one step, and return a pair on every rank:
#
# - the bytes that this rank sends for the gradient, by the formula of the ring
# - which takes longer: `"compute"` for computing on the slowest rank, or `"network"` for the all-reduce itself. All
#   ranks must return the same word.
#
# `machine.now()` is the time in seconds. This clock runs only while a rank computes, sends or waits for others, so it
# does not matter how busy your computer is. Ranks may compute for different times, and an all-reduce waits for the last
# rank. This wait is not time on the network.
#
# The check runs groups of one to three ranks with different times. In some cases one rank is late, and it may be any
# rank. The dtype of the gradient also differs. The check tests that each rank first computes and then sums the gradient
# itself.
#
# Two functions help. `machine.barrier()` waits until all ranks have called it. `comm.all_reduce_max(x, axis)` gives
# every rank the elementwise maximum of x over the ranks.


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
# A job fails when its fullest rank runs out of memory. `tensors` is a list of all tensors that this rank stores:
# weights, some of them tied, and views of larger tensors, in several dtypes. Memory belongs to *storages*. Count each
# storage once and in full, however many tensors share it and however small a part of it they show.
#
# Return the number of the fullest rank and its bytes, on every rank. Use `torch.distributed` alone: `course_lib`
# refuses to run here. The default process group exists already.
#
# The check runs one to four ranks. It allows small messages only, so send sizes and no tensors. Sizes must be exact,
# even for large storages.
#
# Useful calls: `t.untyped_storage()` has `.data_ptr()` and `.nbytes()`, and `dist.all_gather(parts, x)` fills the list
# of tensors `parts`.


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
# **Exit questions.** Answer, then unfold.
#
# **1.** A colleague needs 18 bytes per parameter, a paper 16, a blog 20. Which one is wrong?
#
# <details><summary>Answer</summary>
# Possibly none. Gradients take 2 bytes in bfloat16, 4 in float32, and 6 in both.
# </details>
#
# **2.** The state of 70B fits on 16 GPUs. Why not train it on 16?
#
# <details><summary>Answer</summary>
# Only 9 GB per GPU remain for activations, and training would take 32 years.
# </details>
#
# **3.** The model becomes twice as large. Does a GPU need more tokens to reach the bend?
#
# <details><summary>Answer</summary>
# No, because FLOPs and bytes both double.
# </details>
#
# **4.** 350 GB of gradients take 14 s on a link of 25 GB/s. What does this estimate of an all-reduce miss?
#
# <details><summary>Answer</summary>
# In a ring of many GPUs, each sends almost twice the gradients, so it takes almost 28 s.
# </details>
#
# **5.** The sequence becomes four times as long. Which of state, activations, KV cache and FLOPs per token grow?
#
# <details><summary>Answer</summary>
# Activations and cache become four times as large. The FLOPs per token grow too, but only in attention.
# </details>
#
# **Sources.**
# - [16 bytes](https://arxiv.org/abs/1910.02054), [18 and
#   20](https://docs.nvidia.com/megatron-core/developer-guide/latest/distrib_optimizer.html),
#   [34sbh](https://arxiv.org/abs/2205.05198), [6 P T](https://arxiv.org/abs/2001.08361),
#   [MFU](https://arxiv.org/abs/2204.02311), [H100](https://www.nvidia.com/en-us/data-center/h100/) (989 is dense).
# - Shapes and tokens: [Llama 2](https://arxiv.org/abs/2307.09288), table 1; [GPT-3](https://arxiv.org/abs/2005.14165),
#   tables 2.1 and D.1; [Llama 3](https://arxiv.org/abs/2407.21783), tables 3 and 4.
