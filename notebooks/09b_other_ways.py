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
#     lesson: 09b
# ---

# %% [markdown]
# # 09b Gather, Ulysses, USP
#
# *Untimed.* Lesson 09 sends K and V round a ring. This deep dive shows three other ways to shard attention, with the
# symbols of lesson 09: n ranks share a sequence of S positions, with H heads of queries and G heads of K and V. The
# folded cell defines the three ways, their formulas, and attention in one process, with which we compare them.

# %% jupyter={"source_hidden": true}
# One attention on four ranks, in each way: its output and gradients, its bytes and what it saves.
from dataclasses import replace
from functools import partial

import torch

from course_lib import cp
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import causal_attention, tiny_config
from course_lib.trace import SavedActivations
from course_lib.view import show_source

RANKS, BATCH, SEQ = 4, 4, 64
CONFIG = tiny_config(layers=1, hidden=64, heads=8, kv_heads=2, max_seq_len=SEQ)
USP_LAYOUT = cp.nested(cp.ZIGZAG, 2)


def on_axis(way, axis):
    """(attention, layout) of a way on this rank's axis."""
    if way == "usp":
        heads, across = cp.split_axis(axis, 2)
        both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=across)
        return both, USP_LAYOUT
    return {
        "ring": (cp.ring_attention, cp.ZIGZAG),
        "gather": (cp.gather_attention, cp.ZIGZAG),
        "gather twice": (partial(cp.gather_attention, save_gathered=False), cp.ZIGZAG),
        "ulysses": (cp.ulysses_attention, cp.CONTIGUOUS),
    }[way]


def draw(config):
    """q, k, v and the gradient of the output, of full sequences."""
    generator = torch.Generator().manual_seed(0)
    heads = (config.heads, config.kv_heads, config.kv_heads, config.heads)
    return [torch.randn(BATCH, SEQ, h, config.head_dim, generator=generator) for h in heads]


def reference(config):
    *qkv, dout = draw(config)
    qkv = [x.requires_grad_() for x in qkv]
    out = causal_attention(*qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def on_ranks(way, config):
    mesh = make_mesh(cp=RANKS)
    attention, layout = on_axis(way, mesh.cp)
    mine = cp.positions(SEQ, mesh.cp, layout)
    *qkv, dout = (x[:, mine] for x in draw(config))
    qkv = [x.requires_grad_() for x in qkv]
    with SavedActivations() as saved:
        out = attention(*qkv, axis=mesh.cp, layout=layout)
    gradients = torch.autograd.grad(out, qkv, dout)
    return {
        "positions": mine,
        "found": [out.detach(), *gradients],
        "saved": saved.peak,
        "sent": mesh.ledger.wire_bytes(),
    }


def sent_formula(way, config, n=RANKS, batch=BATCH, seq=SEQ):
    if way == "usp":
        return sum(cp.ulysses_ring_wire_bytes(config, batch, seq, 2, n // 2))
    return {
        "ring": cp.ring_wire_bytes,
        "gather": cp.gather_wire_bytes,
        "gather twice": partial(cp.gather_wire_bytes, save_gathered=False),
        "ulysses": cp.ulysses_wire_bytes,
    }[way](config, batch, seq, n)


def saved_formula(way, config, n=RANKS, batch=BATCH, seq=SEQ):
    if way == "usp":
        return cp.ulysses_ring_saved_bytes(config, batch, seq, 2, n // 2)
    return {
        "ring": cp.ring_saved_bytes,
        "gather": cp.gather_saved_bytes,
        "gather twice": partial(cp.gather_saved_bytes, save_gathered=False),
        "ulysses": cp.ulysses_saved_bytes,
    }[way](config, batch, seq, n)


# %% [markdown]
# ## Gather K and V
# Llama 3 makes one all-gather of K and V, and then each rank computes with the keys that its queries may see. Any mask
# is easy to apply, because all keys are on the rank. In backward a reduce-scatter sums dK and dV over the ranks and
# returns them to their owners. The price is memory: every rank saves K and V of all positions until backward. In the
# variant *gather twice* a rank saves only its own K and V, and gathers them all again in backward.
#
# In the code, `attend` is the function that the ring uses too. Only the source of the blocks differs:

# %%
show_source(cp.gather.GatherAttention.forward)

# %% [markdown]
# ## Ulysses: exchange positions for heads
# Heads are independent until the output projection. So an all-to-all gives each rank all positions of some heads, and
# after attention another one returns the output:
#
# ```
#            heads  0 1 2 3                      heads  0 1 2 3
#  positions of r0  [a a a a]   all-to-all   all           A B C D      rank r: all positions
#  positions of r1  [b b b b]  ----------->  positions     A B C D              of its heads
#  positions of r2  [c c c c]  <-----------                A B C D
#  positions of r3  [d d d d]   all-to-all                 A B C D
# ```
#
# Between the two, each rank runs ordinary causal attention on its heads. All ranks have equal work with contiguous
# shards, because every rank has all positions. If n does not divide G, the code repeats the heads of K and V before it
# sends them, so that every rank gets the same number:

# %%
show_source(cp.ulysses_attention)

# %% [markdown]
# ## USP: a ring of groups
# Ulysses cannot use more ranks than heads. USP (*unified sequence parallelism*) combines it with a ring. Neighboring
# ranks form a group and exchange positions for heads inside it. They should be neighbors because nothing is computed
# during this all-to-all, so it needs fast links. The groups form a ring with a zig-zag layout, and each group splits
# its two chunks among its ranks:

# %%
for rank in range(RANKS):
    group, place = divmod(rank, 2)
    chunks = USP_LAYOUT.chunks(rank, RANKS)
    print(f"rank {rank}: chunks {chunks} of 8; in group {group} it has half {place} of the heads")

# %% [markdown]
# Group 0 has the first and the last quarter of the sequence, and group 1 has the two in the middle. After its
# all-to-all, rank 0 has both quarters of group 0, with half of the heads.
#
# ## All of them, measured
# The next cell compares outputs and gradients with one process, and bytes and saved activations with formulas. It does
# so without grouped queries (8 heads of K and V) and with them (2 heads):

# %%
WAYS = ("ring", "gather twice", "gather", "ulysses", "usp")
for kv_heads in (8, 2):
    config = replace(CONFIG, kv_heads=kv_heads)
    full = reference(config)
    print(f"{kv_heads} heads of K and V")
    print(f"  {'':14}{'sent':>9}{'formula':>9}{'calls':>7}{'saved':>9}{'formula':>9}{'off by':>9}")
    for way in WAYS:
        result = run(on_ranks, way, config, n=RANKS)
        one, calls = result[0], result.ledgers[0].calls()
        off = max(
            (found - whole[:, each["positions"]]).abs().max().item()
            for each in result
            for found, whole in zip(each["found"], full, strict=True)
        )
        sent, saved = sent_formula(way, config), saved_formula(way, config)
        print(f"  {way:14}{int(one['sent']):9,}{int(sent):9,}{calls:7}", end="")
        print(f"{one['saved']:9,}{saved:9,}{off:9.0e}")
        assert one["sent"] == sent
        assert one["saved"] == saved
        assert off < 1e-4

# %% [markdown]
# All ways agree with one process, and all bytes agree with their formulas. *Gather* sends less than the ring and
# saves more. The ring needs the most calls, because it sends and receives one block at a time.
#
# ## Which way sends least?
# In the tables above, another way always sends less than the ring. But the gather saves n times as much of K and V, so
# this compares unlike things. In the next table a star marks the least among the ways that do not save all K and V. The
# gather that saves them is in the last column.
#
# The table shows bytes per rank for one layer and one step in bfloat16. The unit is the size of one tensor of S
# positions and all features. In the ring and the gathers, gradients of K and V are sent in float32, so they take twice
# the bytes of K and V. The first column is the number of query heads per head of K and V:

# %%
BF16 = tiny_config(
    layers=1, hidden=4096, heads=32, kv_heads=32, ffn=4096, max_seq_len=8192, dtype=torch.bfloat16
)
UNIT = 8192 * BF16.hidden * 2
EQUAL = ("ring", "gather twice", "ulysses")
print(f"{'H / G':>5}{'ranks':>7}" + "".join(f"{way:>14}" for way in (*EQUAL, "gather")))
least = {}
for shared in (1, 4, 8, 32):
    for n in (2, 4, 8, 16):
        config = replace(BF16, kv_heads=32 // shared)
        sent = {way: sent_formula(way, config, n, 1, 8192) / UNIT for way in (*EQUAL, "gather")}
        best = min(sent[way] for way in EQUAL)
        least[shared, n] = {way for way in EQUAL if sent[way] == best}
        cells = [f"{float(sent[way]):13.2f}{'*' if sent[way] == best else ' '}" for way in EQUAL]
        print(f"{shared:5}{n:7}" + "".join(cells) + f"{float(sent['gather']):13.2f}")
assert all(least[1, n] == {"ulysses"} for n in (2, 4, 8, 16))
assert least[8, 2] == least[8, 4] == least[32, 16] == {"ring", "gather twice"}
assert least[4, 4] == least[8, 8] == {"ulysses"}

# %% [markdown]
# Without grouped queries Ulysses sends least. If 4 or 8 query heads share a head of K and V, the ring sends least on few
# ranks and Ulysses on more. If all 32 share one head, the ring sends least in every row. *Gather twice* sends as much
# as a ring, and a gather that saves K and V sends a quarter less.
#
# Fewer bytes do not always mean less waiting. The ring can hide its messages behind computation. As written here, the
# all-gather and the all-to-all that precede attention must finish before it starts.
#
# **Sources.** Ulysses: [arXiv:2309.14509](https://arxiv.org/abs/2309.14509). USP:
# [arXiv:2405.07719](https://arxiv.org/abs/2405.07719).
