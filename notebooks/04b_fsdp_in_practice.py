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
#     lesson: '04b'
# ---

# %% [markdown]
# # 04b FSDP in practice
#
# *Untimed.* FSDP (fully sharded data parallelism) is PyTorch's ZeRO-3. Lesson 04 used it with four lines. In a real run
# you also decide what to wrap, when to free weights, in which precision to send, and across how many ranks to shard. We
# measure each decision with PyTorch's own `fully_shard` on four gloo ranks. You need lesson 04.
#
# FSDP has two generations. PyTorch's tutorial calls FSDP1 deprecated, so use FSDP2 in new code.
#
# | | FSDP1, `FullyShardedDataParallel` | FSDP2, `fully_shard` |
# |---|---|---|
# | a shard is | a slice of one flat parameter per unit, as in our `zero` | a slice of each tensor's first dimension (DTensor) |
# | units | `auto_wrap_policy=` | one call per module |
# | the module | is wrapped, so parameter names change | is changed in place and keeps its parameter names |
#
# The folded cell trains the model of lesson 04 for two steps with any of these settings. For the second step it counts
# the collective calls, computes the bytes that a rank sends for them in a ring, and measures the peak memory.

# %% jupyter={"source_hidden": true}
# Train with FSDP on four ranks: losses, calls, bytes by group, state and peak memory.
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from course_lib import dp, zero
from course_lib.data import batch
from course_lib.grading.wire import WireCalls
from course_lib.launch import World, run
from course_lib.mesh import make_mesh
from course_lib.model import build_model, tiny_config
from course_lib.trace import PeakLiveBytes, state_bytes

RANKS, BATCH, SEQ, STEPS = 4, 16, 4, 2
CONFIG = tiny_config(layers=6, hidden=128, kv_heads=8, ffn=384, max_seq_len=SEQ)
WORLD = World(RANKS)  # its ranks stay for all cells, and so do their imports
WEIGHTS = sum(p.nbytes for p in build_model(CONFIG).parameters())


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


def rows(step):
    share = {"dp_rank": dist.get_rank(), "dp_size": dist.get_world_size()}
    return batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, **share)


def train_step(net, optimizer, step, micro_batches=1, before_backward=None):
    optimizer.zero_grad()
    mean = torch.zeros(())
    for number, (tokens, targets) in enumerate(
        zip(*(part.chunk(micro_batches) for part in rows(step)), strict=True)
    ):
        if before_backward:
            before_backward(net, number == micro_batches - 1)
        logits = net(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten()) / micro_batches
        loss.backward()
        mean += loss.detach()
    optimizer.step()
    return mean


def measured(make, micro_batches=1, before_backward=None, shape=(RANKS,)):
    """Figures of the last step on this rank; ``make(model, devices)`` applies FSDP."""
    devices = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    peaks = []
    with PeakLiveBytes() as live:
        net = make(build_model(CONFIG, seed=0), devices)
        optimizer = adam(net.parameters())
        for step in range(STEPS):
            live.peak = live.now
            with WireCalls() as wire:
                mean = train_step(net, optimizer, step, micro_batches, before_backward)
            peaks.append(live.peak)
    sent = Counter()
    for call in wire.calls:
        sent[call.ranks] += float(call.wire(len(call.ranks)))
    dist.all_reduce(mean)
    optimizer.zero_grad()
    return {
        "loss": mean.item() / RANKS,
        "calls": len(wire.calls),
        "sent": sum(sent.values()),
        "sent by group": sent,
        "state": state_bytes(net, optimizer).total,
        "peak": peaks[-1],
    }


def all_measured(variants):
    return {name: measured(**options) for name, options in variants.items()}


def ours():
    """Zero3 of lesson 04, measured alike."""
    mesh, peaks = make_mesh(), []
    with PeakLiveBytes() as live:
        model = build_model(CONFIG, seed=0)
        z = zero.Zero3(model, list(model.blocks), mesh.dp, adam)
        for step in range(STEPS):
            live.peak = live.now
            mesh.ledger.clear()
            z.zero_grad()
            total = dp.train_step(model.loss_sum, [rows(step)], z, z)
            peaks.append(live.peak)
    sent = float(mesh.ledger.wire_bytes())
    return {
        "loss": total.item(),
        "calls": mesh.ledger.calls(),
        "sent": sent,
        "peak": peaks[-1],
    }


def table(found, first=""):
    print(f"{first:32}{'last loss':>10}{'calls':>7}{'MB sent':>9}{'peak, MB':>10}")
    for name, one in found.items():
        print(f"{name:32}{one['loss']:10.4f}{one['calls']:7}", end="")
        print(f"{one['sent'] / 1e6:9.2f}{one['peak'] / 1e6:10.2f}")


# %% [markdown]
# ## What to wrap
# Each call of `fully_shard` makes a module a *unit*: its parameters are gathered and freed together. Call it for the
# inner modules first. The last call, for the model, makes the *root* unit from all remaining parameters. Which units
# are best: the whole model, each block, or each linear layer?


# %%
def per_model(model, devices, **options):
    return fully_shard(model, mesh=devices, **options)


def per_block(model, devices, **options):
    for block in model.blocks:
        fully_shard(block, mesh=devices, **options)
    return fully_shard(model, mesh=devices, **options)


def per_linear(model, devices, **options):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            fully_shard(module, mesh=devices, **options)
    return fully_shard(model, mesh=devices, **options)


def fsdp1(model, devices):
    policy = ModuleWrapPolicy({type(model.blocks[0])})
    cpu = torch.device("cpu")
    return FSDP1(model, device_mesh=devices, auto_wrap_policy=policy, device_id=cpu)


units = {"FSDP2, the model": per_model, "FSDP2, each block": per_block}
units |= {"FSDP2, each linear": per_linear, "FSDP1, each block": fsdp1}
found = WORLD.run(all_measured, {name: {"make": make} for name, make in units.items()})[0]
found["our Zero3, each block"] = WORLD.run(ours)[0]
table(found, "units")
assert len({round(one["loss"], 3) for one in found.values()}) == 1

# %% [markdown]
# All losses agree. If the whole model is one unit, all weights are gathered at once, and the peak is the highest. This
# unit is also the root, which FSDP2 does not reshard after forward, so it sends fewer bytes. With one unit per linear
# layer the peak is the lowest, but each of the 131 calls pays latency. A block is the usual unit, because its messages
# are large and only a few blocks are gathered at a time. Our `Zero3` makes one call fewer than FSDP2, because it does
# not reshard the last block after forward.
#
# ## When to free the weights
# With `reshard_after_forward=False` the weights of a unit stay gathered from forward to backward. With M micro-batches
# per step you can go further, as in the last row of lesson 04's table for Llama 3: store full weights and gradients
# until the last micro-batch. The three calls in `keep_until_last` do this. The first one is like DDP's `no_sync`.


# %%
def keep_until_last(net, last):
    net.set_requires_gradient_sync(last)  # accumulate gradients in full, reduce-scatter at the end
    net.set_reshard_after_backward(last)
    net.set_is_last_backward(last)


def not_resharded(model, devices):
    return per_block(model, devices, reshard_after_forward=False)


two = {"micro_batches": 2}
variants = {
    "reshard, M = 1": {"make": per_block},
    "keep until backward, M = 1": {"make": not_resharded},
    "reshard, M = 2": {"make": per_block, **two},
    "keep until backward, M = 2": {"make": not_resharded, **two},
    "keep for the step, M = 2": {
        "make": not_resharded,
        "before_backward": keep_until_last,
        **two,
    },
}
found = WORLD.run(all_measured, variants)[0]
table(found)
assert found["keep for the step, M = 2"]["sent"] == dp.wire_bytes(WEIGHTS, RANKS)

# %% [markdown]
# Weights that stay gathered until backward save one of two gathers, but a second micro-batch still doubles the bytes.
# The last row sends as much as plain data parallelism, whatever M is. In return its peak includes the weights and
# gradients of the whole model.
#
# ## Which precision to send
# The shards of a float32 model stay in float32 and serve as master weights. A `MixedPrecisionPolicy` gathers them in
# `param_dtype` and reduces gradients in `reduce_dtype`, by default the same type. Do not call `model.bfloat16()` before
# `fully_shard`: the shards would be bfloat16 too, and small updates would be lost. We compare each policy with a DP
# whose gradients have its `reduce_dtype`:

# %%
BF16, FP32 = torch.bfloat16, torch.float32


def with_policy(**dtypes):
    def make(model, devices):
        return per_block(model, devices, mp_policy=MixedPrecisionPolicy(**dtypes))

    return make


variants = {
    "all float32": {"make": per_block},
    "bfloat16": {"make": with_policy(param_dtype=BF16)},
    "bfloat16, reduced in float32": {"make": with_policy(param_dtype=BF16, reduce_dtype=FP32)},
}
found = WORLD.run(all_measured, variants)[0]
table(found, "param_dtype, reduce_dtype")
for name, width in zip(variants, (4, 2, 4), strict=True):
    plain = float(dp.wire_bytes(WEIGHTS, RANKS)) * width / 4
    print(f"{name:32}{found[name]['sent'] / plain:.2f} of DP with gradients of {width} bytes")

# %% [markdown]
# The first two factors are 1.48 instead of 1.5, because the root is gathered once. Llama 3 reduces in float32, which
# protects the sum over many ranks from rounding. The factor then drops to 0.99. For each parameter, stage 3 now has two
# gathers of 2 bytes and a reduce-scatter of 4 bytes. DP has as much: an all-reduce in float32 is a reduce-scatter and a
# gather of 4 bytes each. Both bfloat16 losses differ a little, because forward now computes in bfloat16.
#
# ## HSDP: shard inside a node, replicate across nodes
# A gather over thousands of ranks takes many steps and crosses slow links. Hybrid sharding (HSDP) shards inside each
# group of ranks, usually a node, and replicates the shards across groups. A device mesh with two dimensions selects it.
# Here ranks 0 and 1 are one node, and ranks 2 and 3 are another:

# %%
variants = {
    "FSDP, 4 ranks": {"make": per_block},
    "HSDP, 2 x 2": {"make": per_block, "shape": (2, 2)},
}
found = WORLD.run(all_measured, variants)[0]
for name, one in found.items():
    groups = {group: f"{sent / 1e6:.2f} MB" for group, sent in one["sent by group"].items()}
    print(f"{name}: state {one['state'] / 1e6:.2f} MB, rank 0 sends in group {groups}")
assert found["HSDP, 2 x 2"]["sent by group"][0, 2] == dp.wire_bytes(WEIGHTS // 2, 2)

# %% [markdown]
# All gathers and reduce-scatters stay inside the node, in group (0, 1). Only the all-reduce of a gradient shard, in
# group (0, 2), crosses to the other node. The price is twice the state, because a shard is half of the model instead of
# a quarter.
#
# ## A checkpoint for any number of ranks
# With distributed checkpoints (DCP), each rank writes its shards, and no rank ever gathers the model. On loading, each
# rank reads what its own shards need. So four ranks can save, and two can continue:

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def two_more_steps(path, saves):
    n = dist.get_world_size()
    model = per_block(build_model(CONFIG, seed=0 if saves else 1), init_device_mesh("cpu", (n,)))
    optimizer = adam(model.parameters())
    if saves:
        for step in range(2):
            train_step(model, optimizer, step)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if saves:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    losses = torch.stack([train_step(model, optimizer, step) for step in (2, 3)])
    dist.all_reduce(losses)
    return (losses / n).tolist()


with tempfile.TemporaryDirectory() as folder:
    went_on = WORLD.run(two_more_steps, folder, True)[0]
    loaded = run(two_more_steps, folder, False, n=2)[0]
WORLD.close()
print("4 ranks, never stopped:", *(f"{loss:.4f}" for loss in went_on))
print("loaded by 2 ranks:     ", *(f"{loss:.4f}" for loss in loaded))
assert max(abs(a - b) for a, b in zip(went_on, loaded, strict=True)) < 1e-4

# %% [markdown]
# The two ranks continue with the same losses as the four that never stopped. They built their model from another seed,
# so all their weights come from the checkpoint.
#
# **Sources.**
# - [Getting started with FSDP2](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html), with a guide for
#   the migration from FSDP1.
# - [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), the reference.
# - Zhao et al. 2023, *PyTorch FSDP*: [arXiv:2304.11277](https://arxiv.org/abs/2304.11277), section 3.2 on hybrid
#   sharding.
# - Llama 3: [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.
