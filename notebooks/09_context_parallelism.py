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
#     lesson: '09'
# ---

# %% [markdown]
# # 09 Context parallelism: one sequence on many ranks
#
# *60 minutes to read and run, 65 to build.* One sequence of 128,000 tokens can fill a GPU with its activations, and
# no smaller batch helps. Here its positions are sharded over ranks. Every layer treats positions one by one, except
# attention: there a query needs keys that other ranks hold. You merge partial softmaxes by hand, send K and V round a
# ring, balance its work, and compare three ways by their bytes. You need lessons 02, 03 and 05.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *A sequence split into n shards gives every rank 1/n of the attention work.*
# 2. *Ulysses (all-to-all) sends less than a ring.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# ```
#  rank 0   positions  0..15    q0 k0 v0     all layers but attention: nothing to send
#  rank 1   positions 16..31    q1 k1 v1
#  rank 2   positions 32..47    q2 k2 v2     attention: q2 needs k0 v0, k1 v1 and its own
#  rank 3   positions 48..63    q3 k3 v3
# ```
#
# Every rank holds the full model. How do q2 and k0 meet?

# %% [markdown]
# ## Predict
# Eight query heads share two heads of keys and values (grouped query). Fill in what you can, the rest when its section comes.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 4, 64, 4
CONFIG = tiny_config(layers=2, hidden=64, heads=8, kv_heads=2, max_seq_len=SEQ)
ROWS = SEQ // RANKS  # positions per rank
KV_BYTES = 2 * BATCH * SEQ * CONFIG.kv_heads * CONFIG.head_dim * 4  # of all ranks, one layer

print(f"{SEQ} positions on {RANKS} ranks; K and V of a layer have {KV_BYTES:,} bytes in all")

# %%
predicted_busiest = None  # causal, contiguous: the busiest rank's work, divided by the mean
predicted_forward = None  # bytes that a rank sends in one ring forward of one layer
predicted_step = None  # the same, forward and backward together
predicted_least = None  # who sends least here: "ring", "gather" or "ulysses"?
predicted_targets = None  # of 64 targets, how many are lost if ranks shift their own zig-zag tokens

# %% [markdown]
# ## Half a softmax, by hand
# One query, four keys. The exponentials of its scores are 1, 1, 2, 4 and the values 8, 4, 3, 0, so the output is
# (8 + 4 + 6 + 0) / 8 = 2.25. Now two ranks have two keys each:
#
# - the first: sum of exponentials 2, output (8 + 4) / 2 = 6
# - the second: sum 6, output (6 + 0) / 6 = 1
#
# Each output is an average with its own sum below. So each is weighted by its sum: 6 · 2/8 + 1 · 6/8 = 2.25. A block
# returns its output and the *logarithm* of its sum, the log-sum-exp (lse); scores are never needed again.

# %%
import torch

from course_lib import comm, cp
from course_lib.cp import blockwise
from course_lib.launch import RankError, run
from course_lib.mesh import make_mesh
from course_lib.view import show_source

scores = torch.tensor([1.0, 1.0, 2.0, 4.0]).log()
values = torch.tensor([[8.0], [4.0], [3.0], [0.0]])


def partial_attention(scores, values):
    lse = scores.logsumexp(0)
    return (scores - lse).exp() @ values, lse


out, lse = partial_attention(scores[:2], values[:2])
block_out, block_lse = partial_attention(scores[2:], values[2:])
print(f"first block:  out {out.item():.2f}, sum {lse.exp().item():.2f}")
print(f"second block: out {block_out.item():.2f}, sum {block_lse.exp().item():.2f}")
blockwise.merge(out, lse, block_out, block_lse)  # in place
print(f"merged:       out {out.item():.2f}, sum {lse.exp().item():.2f}")
torch.testing.assert_close((out, lse), partial_attention(scores, values))

large = scores + 1000
print(
    f"\nscores + 1000: sum {large.exp().sum().item()}, log-sum-exp {large.logsumexp(0).item():.3f}"
)
print()
show_source(blockwise.merge)

# %% [markdown]
# `sigmoid(block_lse - lse)` is the second weight, from a difference: nothing overflows. A row without any key so far
# has lse = -inf. Blocks may arrive in any order.
#
# ## A ring
# In each turn a rank computes with its current block, sends this block to the next rank and receives another.

# %%


def whose_block():
    axis = make_mesh(cp=RANKS).cp
    return [int(block) for _, block in comm.ring(torch.tensor([axis.rank]), axis)]


for rank, seen in enumerate(run(whose_block, n=RANKS)):
    print(f"rank {rank} has in turns 0 to {RANKS - 1} the blocks of ranks {seen}")
print()
show_source(comm.ring)

# %% [markdown]
# In turn t rank r has the block of rank r - t (mod n). A rank stores at most its own block, the current block and the
# arriving one: memory does not grow with n.
#
# The attention on top of it. `visible` says which queries see which keys of a block; hidden scores are never
# computed. Letters after a name are its dimensions: B sequences, s positions of this rank (S of all), H heads of
# queries, G of keys and values, K elements per head.

# %%
show_source(blockwise.attend, cp.ring.RingAttention.forward)

# %% [markdown]
# ## Backward: a gradient follows its block
# Backward of one block needs the final out and lse of the row, and nothing from other blocks:
#
# $$p = e^{qk^T - lse} \qquad dv = p^T dout \qquad ds = p \, (dout \, v^T - \textstyle\sum dout \cdot out) \qquad dq = ds \, k \qquad dk = ds^T q$$
#
# (p are probabilities, ds is the gradient of the scores; q comes scaled.) So K and V go round the ring once more. dq
# stays. A block's dk and dv are sums over all ranks that used it, and must return to the block's rank. They are sent
# one turn behind the block, and each rank adds its partial sum.
#
# ```
#  rank 2, turn     0          1            2              3
#  block in hand    kv2        kv1          kv0            kv3
#  its term of      dkv2       dkv1         dkv0           dkv3
#  adds what came   (stays)    -            dkv0 from 1    dkv3 from 1     then dkv2 comes home from 1
# ```

# %%
show_source(cp.ring.RingAttention.backward)

# %% [markdown]
# Does it equal the attention of one process? Output and all three gradients, on every rank's own positions.

# %%
from dataclasses import replace
from functools import partial

from course_lib.model import causal_attention
from course_lib.trace import SavedActivations

NAMES = ("out", "dq", "dk", "dv")


def on_axis(way, axis):
    """(attention, layout) of a way on this rank's axis."""
    if way == "ulysses x ring":
        heads, ring = cp.split_axis(axis, 2)
        both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=ring)
        return both, cp.nested(cp.ZIGZAG, 2)
    return {
        "ring": (cp.ring_attention, cp.ZIGZAG),
        "gather": (cp.gather_attention, cp.ZIGZAG),
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
    peak, forward = saved.peak, mesh.ledger.wire_bytes()
    gradients = torch.autograd.grad(out, qkv, dout)
    return {
        "positions": mine,
        "found": [out.detach(), *gradients],
        "saved": peak,
        "forward": int(forward),
        "sent": mesh.ledger.wire_bytes(),
    }


def apart(result, config):
    """The largest difference to one process, over ranks, output and gradients."""
    return max(
        (found - full[:, one["positions"]]).abs().max().item()
        for one in result
        for found, full in zip(one["found"], reference(config), strict=True)
    )


ring = run(on_ranks, "ring", CONFIG, n=RANKS)
assert apart(ring, CONFIG) < 1e-4
print(f"out, dq, dk, dv differ from one process by {apart(ring, CONFIG):.0e}\n")
forward, sent = ring[0]["forward"], ring[0]["sent"]
print(f"a rank sends forward {forward:,} bytes: {forward / KV_BYTES:.2f} of all K and V")
print(f"forward and backward {int(sent):,}: {float(sent / KV_BYTES):.2f}")
print(f"your predictions: {predicted_forward} and {predicted_step}")
assert forward == KV_BYTES * (RANKS - 1) // RANKS
assert sent == 3 * forward

# %% [markdown]
# (n-1)/n forward; in backward as much for K and V and as much for their gradients. In bfloat16 gradients are sent in
# float32, and that third counts double.
#
# ## How much each rank computes
# A query at position p has p + 1 keys. With neighboring positions on each rank, as a study note draws it, the first
# rank has little to do and the last one nearly twice the mean. **Zig-zag** makes 2n chunks and gives each rank an
# early and a late one.
#
# ```
#  contiguous   0 0 1 1 2 2 3 3
#  zig-zag      0 1 2 3 3 2 1 0      rank of the chunk
# ```
#
# We count score entries (pairs of a query and a key) in the run, as passed to the kernel, by turn.

# %%
from fractions import Fraction

from course_lib.cp.blockwise import FLASH_CPU, Kernel

LAYOUTS = {"contiguous": cp.CONTIGUOUS, "zig-zag": cp.ZIGZAG}


def entries(q, k, causal):
    rows, keys = q.shape[1], k.shape[1]
    return rows * (rows + 1) // 2 if causal else rows * keys


def counted(layout):
    mesh, seen = make_mesh(cp=RANKS), []

    def forward(q, k, v, causal):
        seen.append(entries(q, k, causal))
        return FLASH_CPU.forward(q, k, v, causal)

    mine = cp.positions(SEQ, mesh.cp, layout)
    qkv = [x[:, mine] for x in draw(CONFIG)[:3]]
    cp.ring_attention(*qkv, mesh.cp, layout, Kernel(forward, FLASH_CPU.backward))
    return seen


imbalance = {}
for name, layout in LAYOUTS.items():
    by_rank = run(counted, layout, n=RANKS)
    work = [sum(seen) for seen in by_rank]
    imbalance[name] = Fraction(max(work) * RANKS, sum(work))
    assert work == cp.pairs(layout, SEQ, RANKS)
    assert imbalance[name] == cp.imbalance(layout, SEQ, RANKS)
    print(f"{name}: busiest over mean {float(imbalance[name]):.3f}")
    for rank, seen in enumerate(by_rank):
        print(f"  rank {rank}: {sum(seen):4} entries, by block {seen}")
print(f"your prediction: {predicted_busiest}")

# %% [markdown]
# Contiguous gives 2 - (s+1)/(S+1): nearly 2 on many ranks. Zig-zag is exactly 1, and in every turn: of another rank's
# block each rank sees one half: either its late queries see all keys, or all its queries see the early keys. Only its
# own block needs a mask.
#
# ## See it
# The same ring forward and backward, *paced*: every entry takes 0.1 ms forward and 0.2 ms backward, and links are emulated.

# %%
from course_lib.mesh import Conditions, Link, Links
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

ENTRY = 1e-4  # seconds
LINK = Link(alpha=0.0005, beta=1.5e6)
NETWORK = Links(inside=LINK, between=LINK)


def paced_ring(layout):
    mesh = make_mesh(cp=RANKS)

    def forward(q, k, v, causal):
        with mesh.trace.span("F", at_least=ENTRY * entries(q, k, causal)):
            return FLASH_CPU.forward(q, k, v, causal)

    def backward(dout, q, k, v, out, lse, causal):
        with mesh.trace.span("B", at_least=2 * ENTRY * entries(q, k, causal)):
            return FLASH_CPU.backward(dout, q, k, v, out, lse, causal)

    mine = cp.positions(SEQ, mesh.cp, layout)
    *qkv, dout = (x[:, mine] for x in draw(CONFIG))
    qkv = [x.requires_grad_() for x in qkv]
    for _ in range(2):  # the first step warms up
        comm.barrier(mesh.cp)
        mesh.trace.clear()
        out = cp.ring_attention(*qkv, mesh.cp, layout, Kernel(forward, backward))
        torch.autograd.grad(out, qkv, dout)


paced = {name: run(paced_ring, layout, n=RANKS, links=NETWORK) for name, layout in LAYOUTS.items()}
step = {name: summarize(read(result.traces)[0]) for name, result in paced.items()}


def paced_picture(name, what):
    note = "Compute is paced by sleep to 0.1 ms forward and 0.2 ms backward for each score entry."
    return timeline(
        paced[name].traces,
        title=f"Ring attention, {name}: {what}",
        conditions=Conditions(links=NETWORK),
        note=note,
    )


paced_picture("contiguous", "all wait for rank 3, which has most to do")

# %%
paced_picture("zig-zag", "equal work, and K and V are sent meanwhile")

# %%
ratio = step["contiguous"].makespan / step["zig-zag"].makespan
print(f"measured: contiguous takes {ratio:.2f} times as long")
print(
    f"by entries of the busiest rank: {float(imbalance['contiguous'] / imbalance['zig-zag']):.2f}"
)

# %% [markdown]
# Zig-zag gains less than its entries promise, because its last P2P transfer is exposed: it returns gradients, and no
# computing is left to hide it.
#
# Look at the lower line of each rank: all other transfers are hidden under compute. A block is sent while the
# previous one is computed, so it is hidden as soon as computing takes longer than sending. For blocks of c positions,
# without mask, in 2 bytes: 4c²h operations against 4ch bytes, hence c ≥ F/B, where F is operations and B bytes per
# second (no forward, no backward). Both grow, but work grows faster: *long* sequences hide rings.
#
# The same run for a trace viewer: open `ring_zigzag.json`, which lies in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "ring_zigzag.json"
perfetto(paced["zig-zag"].traces, path, title="ring attention, zig-zag")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# ## Move it
# A simulation of a forward: a full block of 16 × 16 entries takes 10 ms, a P2P transfer of the ring `transfer_ms`. Below
# the picture the same with sliders (in Jupyter). From which `transfer_ms` on does the link show, in either layout? What do
# more ranks change?

# %%
from course_lib.cp.layout import visible
from course_lib.schedule import Span


def ring_steps(ranks, layout, transfer_ms):
    chosen, rows, transfer = LAYOUTS[layout], 16, transfer_ms / 1e3
    spans, begun, done = [], {}, {}
    for turn in range(ranks):
        for rank in range(ranks):
            whose, start = (rank - turn) % ranks, 0.0
            if turn:  # a transfer begins when both sides have begun the turn before
                posted = max(begun[rank, turn - 1], begun[(rank - 1) % ranks, turn - 1])
                if transfer:
                    spans.append(Span(rank, "recv", posted, posted + transfer, axis="cp"))
                start = max(done[rank, turn - 1], posted + transfer)
            tile = visible(chosen, ranks, rank, whose, rows)
            took = 0.010 * (tile.pairs if tile else 0) / rows**2
            begun[rank, turn], done[rank, turn] = start, start + took
            if took:
                spans.append(Span(rank, "F", start, start + took, label=f"k{whose}"))
    return timeline(
        spans,
        title=f"Ring forward on {ranks} ranks, {layout}, a transfer takes {transfer_ms} ms",
        kind="simulated",
        note="kN: the block of rank N.",
    )


ring_steps(ranks=4, layout="zig-zag", transfer_ms=4)

# %%
from course_lib.view.moved import picture_sliders

picture_sliders(
    ring_steps,
    ranks=[4, 2, 3, 6, 8],
    layout=["zig-zag", "contiguous"],
    transfer_ms=[4, 0, 1, 2, 6, 8, 12],
)

# %% [markdown]
# <details><summary>What you should have seen</summary>
#
# Zig-zag: up to 4 ms nothing changes, from 6 on every turn waits for the link, since it has half a block to compute,
# 5 ms. Contiguous: only the first turn waits until a transfer takes more than 10 ms, but it is slower at any
# `transfer_ms`. With more ranks its time approaches twice that of zig-zag.
# </details>
#
# ## Second way: gather K and V
# Llama 3 uses no ring: one all-gather of K and V, then attention on the visible keys; in backward a reduce-scatter
# returns dK and dV. Grouped queries make K and V small, and any mask (of documents, say) is easy when all keys are
# there. The price is memory: K and V of all ranks.

# %%
show_source(cp.gather.GatherAttention.forward)

# %% [markdown]
# ## Third way: Ulysses
# Heads are independent until the output projection. So exchange positions for heads:
#
# ```
#            heads  0 1 2 3                      heads  0 1 2 3
#  positions of r0  [a a a a]   all-to-all   all           A B C D      rank r: all positions
#  positions of r1  [b b b b]  ----------->  positions     A B C D              of its heads
#  positions of r2  [c c c c]  <-----------                A B C D
#  positions of r3  [d d d d]   all-to-all                 A B C D
# ```
#
# In between runs the attention of *one process*, and work is balanced without zig-zag. It needs n to divide the query
# heads; where n does not divide the key heads, the ranks send copies of them.

# %%
show_source(cp.ulysses_attention)

# %% [markdown]
# ## USP: Ulysses x ring
# For more ranks than heads, combine both. This is called USP or two-dimensional context parallelism: neighboring
# ranks exchange heads (all-to-all needs the fast links), and a ring of such groups sends K and V of these heads on.
# The layout is the ring's, sharded once more.

# %%
usp = cp.nested(cp.ZIGZAG, 2)
for rank in range(RANKS):
    group, place = divmod(rank, 2)
    chunks = usp.chunks(rank, RANKS)
    print(f"rank {rank}: chunks {chunks} of 8; in group {group} it has half {place} of the heads")

# %% [markdown]
# ## Measure all four
# Values are compared with one process, bytes and saved activations with the formulas, for 8 and for 2 heads of K and
# V.

# %%
WAYS = ("ring", "gather", "ulysses", "ulysses x ring")


def sent_formula(way, config, n=RANKS, batch=BATCH, seq=SEQ):
    if way == "ulysses x ring":
        return sum(cp.ulysses_ring_wire_bytes(config, batch, seq, 2, n // 2))
    formula = {
        "ring": cp.ring_wire_bytes,
        "gather": cp.gather_wire_bytes,
        "ulysses": cp.ulysses_wire_bytes,
    }[way]
    return formula(config, batch, seq, n)


def saved_formula(way, config, n=RANKS, batch=BATCH, seq=SEQ):
    if way == "ulysses x ring":
        return cp.ulysses_ring_saved_bytes(config, batch, seq, 2, n // 2)
    formula = {
        "ring": cp.ring_saved_bytes,
        "gather": cp.gather_saved_bytes,
        "ulysses": cp.ulysses_saved_bytes,
    }[way]
    return formula(config, batch, seq, n)


measured = {}
for kv_heads in (8, 2):
    config = replace(CONFIG, kv_heads=kv_heads, layers=1)
    print(f"{kv_heads} heads of K and V")
    print(f"  {'':16}{'sent':>9}{'formula':>9}{'calls':>7}{'saved':>9}{'formula':>9}{'off by':>9}")
    for way in WAYS:
        result = measured[kv_heads, way] = run(on_ranks, way, config, n=RANKS)
        one, calls = result[0], result.ledgers[0].calls()
        off = apart(result, config)
        print(
            f"  {way:16}{int(one['sent']):9,}{int(sent_formula(way, config)):9,}{calls:7}", end=""
        )
        print(f"{one['saved']:9,}{saved_formula(way, config):9,}{off:9.0e}")
        assert one["sent"] == sent_formula(way, config)
        assert one["saved"] == saved_formula(way, config)
        assert off < 1e-4
print(f"your prediction of the way that sends least with 2: {predicted_least}")

# %% [markdown]
# The ranking flips. A ring and a gather send only K and V, which grouped queries shrink. Ulysses also sends queries
# and outputs, which grouped queries do not shrink. But each of its tensors belongs to one rank, 1/n of the full size.
# In units of B S h elements of 2 bytes, per layer, forward and backward (`*` sends least):

# %%
BF16 = tiny_config(
    layers=1, hidden=4096, heads=32, kv_heads=32, ffn=4096, max_seq_len=8192, dtype=torch.bfloat16
)
UNIT = 8192 * BF16.hidden * 2
print(f"{'query heads':12}{'':7}" + "".join(f"{way:>11}" for way in WAYS[:3]))
print(f"{'for one of K':12}{'ranks':>7}")
least = {}
for shared in (1, 4, 8, 32):
    for n in (2, 4, 8, 16):
        config = replace(BF16, kv_heads=32 // shared)
        sent = {way: float(sent_formula(way, config, n, 1, 8192)) / UNIT for way in WAYS[:3]}
        best = least[shared, n] = min(sent, key=sent.get)
        cells = [f"{size:10.2f}{'*' if way == best else ' '}" for way, size in sent.items()]
        print(f"{shared:12}{n:7}" + "".join(cells))
assert {least[1, n] for n in (2, 4, 8, 16)} == {"ulysses"}
assert least[8, 2] == least[8, 4] == "gather"

# %% [markdown]
# Without grouping Ulysses always sends least. With grouping the gather does, up to a number of ranks that grows with
# the group. (In the run above Ulysses sent its 2 heads of K and V in copies to 4 ranks, and gradients were as wide as
# values: there the gather won.) The ring never sends least. Its advantages are memory that does not grow with n, and
# messages that hide.
#
# ## What follows the layout
# A layout shards three things, and `cp.shard` shards all at once: tokens, targets, and the positions by which RoPE
# rotates q and k. Targets are made *before* sharding, because the next token after a chunk is on another rank.

# %%
lost = 0
for rank, one in enumerate(ring):
    mine = one["positions"]
    jumps = (mine[1:] != mine[:-1] + 1).sum().item()
    lost += jumps + 1  # at each jump a wrong target, at the end none
    print(f"rank {rank}: positions {mine.tolist()}")
print(
    f"\nshifted on the rank, {lost} of {SEQ} targets are wrong or missing; you said {predicted_targets}"
)

# %% [markdown]
# A model called without positions counts 0, 1, 2 on every rank. The loss would still fall, so the library checks:

# %%
from course_lib.data import batch


def without_positions():
    mesh = make_mesh(cp=RANKS)
    model = cp.parallelize(build_model(CONFIG), cp.ring_attention, mesh.cp, cp.ZIGZAG)
    tokens, _ = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
    model(tokens[:, cp.positions(SEQ, mesh.cp, cp.ZIGZAG)])


try:
    run(without_positions, n=RANKS)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## The loss is a mean over tokens, not over ranks
# Ranks hold different numbers of tokens that count: padding is at the end of a sequence. So every rank divides its
# *sum* by the number of tokens of all ranks, and gradients are summed over `mesh.dp_cp`: like data-parallel ranks, cp
# ranks have seen other tokens.
#
# Training in one process and in four ways, with sequences of 8 to 64 tokens:

# %%
from course_lib import dp
from course_lib.trace import state_bytes


def train(way, steps=STEPS):
    n = 1 if way == "one process" else RANKS
    mesh = make_mesh(cp=n)
    model, layout = build_model(CONFIG, seed=0), cp.CONTIGUOUS
    if n > 1:
        attention, layout = on_axis(way, mesh.cp)
        cp.parallelize(model, attention, mesh.cp, layout)
    sync = dp.Bucketed(model.parameters(), mesh.dp_cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, own = [], []
    for step in range(steps):
        full = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, shortest=8)
        tokens, targets, positions = cp.shard(*full, mesh.cp, layout)
        count = dp.global_tokens([targets], mesh.dp_cp)
        optimizer.zero_grad()
        mesh.ledger.clear()
        with SavedActivations(model, tokens, targets) as saved:
            total, mine = model.cross_entropy(model(tokens, positions), targets)
            (total / count).backward()
        sync.finish()
        optimizer.step()
        losses.append((comm.all_reduce(total.detach(), mesh.dp_cp, control=True) / count).item())
        own.append((total.item(), mine.item()))
    gradients = mesh.ledger.wire_bytes(mesh.dp_cp.name)
    return {
        "losses": losses,
        "own": own,
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "sent": mesh.ledger.wire_bytes() - gradients,
        "gradients": gradients,
        "saved": saved.peak,
        "state": state_bytes(model, optimizer).total,
    }


runs = {"one process": run(train, "one process", n=1)}
runs |= {way: run(train, way, n=RANKS) for way in WAYS}
truth = runs["one process"][0]
print(
    f"{'':16}{'last loss':>10}{'weights off':>13}{'sent by attention':>19}{'formula':>10}{'gradients':>11}"
)
for way, result in runs.items():
    one = result[0]
    off = max(
        (one["weights"][name] - weight).abs().max().item()
        for name, weight in truth["weights"].items()
    )
    formula = 0 if way == "one process" else sent_formula(way, CONFIG)
    print(f"{way:16}{one['losses'][-1]:10.4f}{off:13.0e}{int(one['sent']):19,}", end="")
    print(f"{int(formula):10,}{int(one['gradients']):11,}")
    assert one["sent"] == formula
    assert abs(one["losses"][-1] - truth["losses"][-1]) < 1e-4
    assert off < 1e-3

# %%
print("the last step of the contiguous layout:")
sums, counts = zip(*(one["own"][-1] for one in runs["ulysses"]), strict=True)
for rank, (total, count) in enumerate(zip(sums, counts, strict=True)):
    mean = f"{total / count:.4f}" if count else "none"
    print(f"  rank {rank}: {count:4} tokens that count, mean loss {mean}")
means = [total / count for total, count in zip(sums, counts, strict=True) if count]
print(
    f"mean over tokens {sum(sums) / sum(counts):.4f}, mean over ranks {sum(means) / len(means):.4f}"
)

# %% [markdown]
# A mean over ranks gives the last rank's few tokens the largest weight.
#
# ## What a rank stores
# In each way the saved activations of a layer are divided by n, except for the gather's K and V. A ring saves as much
# as one process saves for a sequence n times shorter.

# %%
from course_lib.view import memory_plot

memory_plot(
    {way: state_bytes(list(result[0]["weights"].values())) for way, result in runs.items()},
    activations={way: result[0]["saved"] for way, result in runs.items()},
    title="Weights are replicated, activations are divided by four",
)

# %% [markdown]
# ## The same in PyTorch
# A ring in twenty raw lines, forward only, contiguous: all messages of a turn go into one `batch_isend_irecv`. The kernel
# is torch's, behind `FLASH_CPU`, and gives the log-sum-exp too.

# %%
import torch.distributed as dist


def raw_ring():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    q, k, v = (x.chunk(n, 1)[rank] for x in draw(CONFIG)[:3])
    block, found = torch.stack((k, v)), []
    for turn in range(n):
        works, arriving = [], torch.empty_like(block)
        if turn + 1 < n:
            leaves = dist.P2POp(dist.isend, block, (rank + 1) % n)
            arrives = dist.P2POp(dist.irecv, arriving, (rank - 1) % n)
            works = dist.batch_isend_irecv([leaves, arrives])
        if turn <= rank:
            found.append(FLASH_CPU.forward(q, block[0], block[1], turn == 0))
        for work in works:
            work.wait()
        block = arriving
    outs, lses = (torch.stack(each) for each in zip(*found, strict=True))
    dist.destroy_process_group()
    return (outs * lses.softmax(0)[..., None]).sum(0)


output = torch.cat(list(run(raw_ring, n=RANKS, init=False)), 1)
off = (output - reference(CONFIG)[0]).abs().max().item()
assert off < 1e-4
print(f"raw ring: output differs from one process by {off:.0e}")

# %% [markdown]
# torch's own ring, still private, in the same layout, forward and backward, beside ours:

# %%
from course_lib.bench.cp import torch_ring

show_source(torch_ring)


def private_ring():
    mesh = make_mesh(cp=RANKS)
    mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
    return [x.detach() for x in torch_ring(mesh.cp, *(x[:, mine] for x in draw(CONFIG)))]


print()
for name, theirs, ours in zip(
    NAMES,
    run(private_ring, n=RANKS)[1],
    run(on_ranks, "ring", CONFIG, n=RANKS)[1]["found"],
    strict=True,
):
    off = (theirs - ours).abs().max().item()
    assert off < 1e-4
    print(f"torch's ring and ours, rank 1, {name:3}: differ by {off:.0e}")

# %% [markdown]
# ## Break it and diagnose
# Zig-zag rings. One run is correct (its cause is `"correct"`), four are faulty:
#
# - **positions**: every rank takes contiguous positions for its zig-zag data
# - **mean**: every rank divides by its own tokens, and gradients are averaged over ranks
# - **labels**: one rank makes its targets from its own tokens
# - **lost**: one rank drops the dK and dV that return to it
#
# For each, name the cause, where it shows (`"forward"` if the ranks' own losses are already wrong, else `"backward"`;
# None if correct) and the rank (a number, or `"all"`). "Own loss off" is each rank's summed loss against the correct
# run's; the last columns are the norms of each rank's own gradient of the key weights, before any sum; "key grad off"
# compares the sum. Another SEED draws other runs.

# %%
SEED = 3
diagnosis = {  # (cause, where, rank), such as ("mean", "backward", "all")
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.grading import Lab

lab = Lab(
    "09",
    SEED,
    {
        "correct": (None, None),
        "positions": ("forward", "all"),
        "mean": ("backward", "all"),
        "labels": ("forward", range(RANKS - 1)),  # the last rank has no gap between its chunks
        "lost": ("backward", range(RANKS)),
    },
    fields=("cause", "where", "rank"),
)


def ring_core(q, k, v, axis, lost):
    if lost:  # no gradient reaches K and V
        k, v = k.detach(), v.detach()
    return cp.ring_attention(q, k, v, axis, cp.ZIGZAG)


def trained(fault, faulty_rank):
    mesh = make_mesh(cp=RANKS)
    faulty = faulty_rank in ("all", mesh.rank)
    model = build_model(CONFIG, seed=0)
    for block in model.blocks:  # by hand: cp.parallelize would look at the positions
        block.attn.core = partial(ring_core, axis=mesh.cp, lost=faulty and fault == "lost")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        full = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, shortest=40)
        tokens, targets, positions = cp.shard(*full, mesh.cp, cp.ZIGZAG)
        if fault == "positions":
            positions = cp.positions(SEQ, mesh.cp, cp.CONTIGUOUS)
        if fault == "labels" and faulty:
            ignored = targets == -100
            targets = tokens.roll(-1, 1).masked_fill(ignored, -100)
        count = dp.global_tokens([targets], mesh.dp_cp)
        optimizer.zero_grad()
        total, mine = model.cross_entropy(model(tokens, positions), targets)
        divisor = mine.clamp(min=1) * RANKS if fault == "mean" else count
        (total / divisor).backward()
        for p in model.parameters():  # without a gradient of K and V after "lost"
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if step == 0:
            first, keys = total.item(), model.blocks[-1].attn.k.weight.grad.norm().item()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, mesh.dp_cp)
        if step == 0:
            gradient = model.blocks[-1].attn.k.weight.grad.clone()
        optimizer.step()
        summed = comm.all_reduce(total.detach(), mesh.dp_cp, control=True)
        losses.append((summed / count).item())
    return {"first": first, "keys": keys, "gradient": gradient, "losses": losses}


correct = run(trained, "correct", None, n=RANKS)
print(f"{'':3}{'loss':>16}{'key grad':>10}  {'own loss off,':24}own key gradient,")
print(f"{'':3}{'first':>8}{'last':>8}{'off':>10}  {'by rank':24}by rank")
for lab_run in lab:
    result = run(trained, lab_run.cause, lab_run.rank, n=RANKS)
    right = correct[0]["gradient"]
    off = ((result[0]["gradient"] - right).norm() / right.norm()).item()
    losses = [
        abs(one["first"] / other["first"] - 1) for one, other in zip(result, correct, strict=True)
    ]
    shown = " ".join(f"{loss:5.0e}" if loss else f"{0:5}" for loss in losses)
    norms = " ".join(f"{one['keys']:6.4f}" for one in result)
    first, last = result[0]["losses"][0], result[0]["losses"][-1]
    print(f"{lab_run.letter:3}{first:8.4f}{last:8.4f}{off:10.0e}  {shown:24}{norms}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# The loss falls in all five.
#
# - **Own losses off on many ranks**: the model's inputs are wrong everywhere: *positions*. RoPE rotated keys and
#   queries by wrong distances. (Rank 0 is right: its early chunk has positions 0 to 7 either way, and the sequences
#   of this step end before its late one.)
# - **One rank's own loss off**: its targets are wrong, because its neighbors, which attend to its keys, are right:
#   *labels*.
# - **Losses right, one rank's key gradient is 0**: the returned gradients were dropped: *lost*. A check of outputs
#   never finds it.
# - **Losses right, gradients off, and no rank has 0**: the weights of the ranks are wrong: *mean*.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **Sequences are short.** Below c = F/B positions per rank a ring is exposed; data parallelism divides the batch
#   and sends nothing in forward.
# - **Weights are the problem.** Every rank holds all of them.
# - **Ulysses, few heads.** n must divide them, and tensor parallelism has sharded them already.
# - **Gather, no grouped queries.** K and V of the full sequence are then as large as the activations that you shard.
# - **Decoding.** A study note says that CP relieves the KV cache, but training has none. In serving a ring is for the
#   prompt: one new token has no block of queries that could hide K and V, so the query is sent to them (lesson 13).
#
# ## The table that grows
# Bytes of one step of the training above; exposed is from the paced attention; code is the lines of the library,
# without comm.

# %%
from course_lib.view import code_lines

blocks = (blockwise.attend, blockwise.attend_backward, blockwise.merge, visible)
code = {
    "ring": code_lines(cp.ring.RingAttention, cp.ring_attention, *blocks),
    "gather": code_lines(cp.gather.GatherAttention, cp.gather_attention, *blocks),
    "ulysses": code_lines(cp.ulysses_attention),
    "ulysses x ring": code_lines(
        cp.ulysses_ring_attention, cp.ulysses_attention, cp.ring.RingAttention, *blocks
    ),
}
print(
    f"{'per rank and step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}{'exposed':>10}{'code':>6}"
)
for way, result in runs.items():
    one = result[0]
    sent = int(one["sent"] + one["gradients"])
    wait = f"{1e3 * step['zig-zag'].exposed:7.0f} ms" if way == "ring" else f"{'':10}"
    lines = f"{code[way]:6}" if way in code else ""
    print(f"{way:18}{one['state']:11,}{one['saved']:13,}{sent:12,}{wait}{lines}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if the layout balances it.** In the order of a study note the last rank has nearly twice the mean,
# and all ranks wait for it. (Nor does each card compute "the complete attention", as the note says: only its own
# queries' rows.)
#
# **Claim 2: only if queries are not grouped, or ranks are many.** Ulysses' bytes fall with n, a ring's do not.
# Grouped queries shrink all messages of a ring, but only K and V of Ulysses.

# %%
print(
    f"busiest over mean: {', '.join(f'{k} {float(v):.2f}' for k, v in imbalance.items())}; your vote: {vote_1}"
)
print(
    f"8 query heads for one of K, 2 ranks: {least[8, 2]}; none grouped: {least[1, 2]}; your vote: {vote_2}"
)

# %% [markdown]
# ## Cheat-sheet
# A model of the size of Llama 3 405B, one sequence of 131,072 tokens in bfloat16; everything computed from the library's formulas.


# %%
def cheat_sheet(n):
    seq = 131072
    config = tiny_config(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248,
        max_seq_len=seq, vocab=128256, dtype=torch.bfloat16,
    )  # fmt: skip
    print(f"{n} ranks of context parallelism, no tensor parallelism beside it")
    print(f"{'':16}{'sent per step, GB':>19}{'attention saves per layer, MB':>31}   sent")
    words = {
        "ring": "K, V n-1 turns; again, with dK, dV behind",
        "gather": "all-gather of K, V; reduce-scatter of dK, dV",
        "ulysses": "all-to-all of q, k, v and out; the same back",
        "ulysses x ring": "USP, groups of 2",
    }
    for way, messages in words.items():
        sent = float(sent_formula(way, config, n, 1, seq)) / 1e9
        saved = saved_formula(way, config, n, 1, seq) / 1e6
        print(f"{way:16}{sent:19.1f}{saved:31.0f}   {messages}")
    for name, layout in LAYOUTS.items():
        print(f"work, busiest over mean, {name}: {float(cp.imbalance(layout, seq, n)):.3f}")
    hidden = 989e12 / 50e9
    print(
        f"a ring hides from c = F/B = {hidden:,.0f} positions per rank (an H100's 989 TFLOP/s, 50 GB/s of network)"
    )


cheat_sheet(16)

# %% [markdown]
# (c = F/B is without grouping and mask: 16 query heads for one of K make it 16 times smaller, zig-zag's halves twice as
# large.)
#
# ## Your turn
# [Five exercises](../exercises/09_context_parallelism.ipynb), each on its own: positions, entries and bytes by hand (10
# minutes), the positions of zig-zag (5), a merge (10); and on real ranks the ring's forward (25) and Ulysses' all-to-all
# in raw PyTorch (15).

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm
from course_lib.cp.blockwise import (
    merge as merge_into,
)  # in place: (out, lse, block_out, block_lse)

# %% [markdown] course={"ex": "09-1"}
# ## 09-1 Positions, entries, bytes, by hand
# Ten minutes, on paper; no code. A sequence of 16 positions is sharded over four ranks, and attention is causal: the
# query at position p has p + 1 score entries. Each rank sends its blocks to the next rank; zig-zag has 8 chunks.
#
# - `contiguous`, `zig-zag`: the positions that rank 1 holds in each layout
# - `entries, contiguous`, `entries, zig-zag`: score entries that rank 0, 1, 2 and 3 compute, hidden ones not counted
# - `imbalance`: contiguous, the busiest rank's entries over the mean
# - `blocks`: the rank whose block rank 1 has in turns 0, 1, 2 and 3
# - `by turn, contiguous`, `by turn, zig-zag`: how many entries rank 1 computes in each of these turns
# - `merged`: one query. On a first block its exponentials sum up to 6 and its output is 2; on a second they sum up to 2, and its
#   output is 6. The output on both together
# - `bytes`: K and V of one rank have 100 bytes, together. The bytes that a rank sends: [forward, backward]. Gradients
#   have as many bytes per element, and the partial sum of the block's own rank stays there

# %% course={"ex": "09-1", "role": "answer"}
# BEGIN SOLUTION
table = {
    "contiguous": [4, 5, 6, 7],
    "zig-zag": [2, 3, 12, 13],
    "entries, contiguous": [10, 26, 42, 58],
    "entries, zig-zag": [34, 34, 34, 34],
    "imbalance": 58 / 34,
    "blocks": [1, 0, 3, 2],
    "by turn, contiguous": [10, 16, 0, 0],
    "by turn, zig-zag": [10, 8, 8, 8],
    "merged": 3,
    "bytes": [300, 600],
}
# STUB
# table = {
#     "contiguous": None,  # positions, such as [0, 1, 2, 3]
#     "zig-zag": None,
#     "entries, contiguous": None,  # four numbers
#     "entries, zig-zag": None,
#     "imbalance": None,  # a fraction, such as 5/3
#     "blocks": None,  # four numbers of ranks
#     "by turn, contiguous": None,
#     "by turn, zig-zag": None,
#     "merged": None,
#     "bytes": None,  # two numbers
# }
# END SOLUTION

# %% [markdown] course={"ex": "09-1", "role": "answer"}
# - Rank r, contiguous: 4 queries from position 4r on: 16r + 10 entries. Zig-zag, rank 1: 3 + 4 + 13 + 14.
# - Mean 136 / 4 = 34.
# - Turns: its own triangle of 4 rows, 10. Contiguous: all 16 of rank 0's block, nothing of ranks 3 and 2. Zig-zag: of rank 0's
#   block all four queries see the early chunk; of the blocks of ranks 3 and 2 the late two queries see all four keys.
# - Merged: (6 · 2 + 2 · 6) / 8.
# - Three turns of 100 bytes; in backward the same again, and as much for dK and dV.

# %% course={"ex": "09-1", "role": "check"}
from course_lib.grading import check

check("09-1", table)

# %% [markdown] course={"ex": "09-2"}
# ## 09-2 The positions of zig-zag
# A sequence is split into 2n chunks of `chunk` positions. Rank r holds the r-th chunk from the front and the r-th
# from the end. Write the line that returns its positions, in ascending order: a list, a range or a tensor.


# %% course={"ex": "09-2", "role": "answer"}
def positions(rank, n, chunk):
    """The positions that ``rank`` of ``n`` ranks holds; ``positions(0, 2, 2)`` is [0, 1, 6, 7]."""
    # BEGIN SOLUTION
    late = 2 * n - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]
    # END SOLUTION


# %% course={"ex": "09-2", "role": "check"}
from course_lib.grading import check

check("09-2", positions)

# %% [markdown] course={"ex": "09-3"}
# ## 09-3 Merge two partial attentions
# The same queries have attended to two blocks of keys. Of each block you have the output and the log-sum-exp of the scores.
# Return both for the two blocks together.
#
# Rows may see no key of the first block: then `out_1` is 0 and `lse_1` is -inf. lse may be several hundred, above or
# below 0, and exp of it is infinite or 0 in float32.


# %% course={"ex": "09-3", "role": "answer"}
def merge(out_1, lse_1, out_2, lse_2):
    """(out, lse) of both blocks: out [rows, features], lse [rows]; the arguments have these shapes."""
    # BEGIN SOLUTION
    weight = torch.sigmoid(lse_2 - lse_1)[:, None]
    return out_1 + weight * (out_2 - out_1), torch.logaddexp(lse_1, lse_2)
    # END SOLUTION


# %% course={"ex": "09-3", "role": "check"}
from course_lib.grading import check

check("09-3", merge)

# %% [markdown] course={"ex": "09-4"}
# ## 09-4 Ring attention, forward
# Contiguous layout: rank r holds the r-th shard of the positions. K and V are sent round the ring, to `axis.next`;
# while you work on one block the next one is in flight.
#
# - `attend(q, k, v, causal)` returns `(block_out, block_lse)` of your queries on one block. `causal=True` hides later
#   keys, row by row, as a rank's own block needs it.
# - `merge_into(out, lse, block_out, block_lse)` adds a block to `out` and `lse`, in place. Begin with zeros and with -inf.
# - `comm.start_exchange(axis, [(x, axis.next)], [(like, axis.previous)])` starts a message each way; its `.wait()` gives the list
#   of what has arrived. `x` must not be written meanwhile.
#
# Blocks of later ranks are sent on, not attended to. Checked on one to three ranks, and on two pairs of ranks at once:
# outputs, bytes and peers, how often you attend, and that the exchange of the next block has then started without a
# wait. No input may be overwritten. `cp.ring_attention` and `comm.ring` refuse; forward only.


# %% course={"ex": "09-4", "role": "answer"}
def ring_attention(q_BsHK, k_BsGK, v_BsGK, axis, attend):
    """Causal attention (B, s, H, K) of this rank's queries on the keys of all ranks up to it.

    lse is (B, s, H): ``q_BsHK.new_full(q_BsHK.shape[:-1], float("-inf"))``.
    """
    # BEGIN SOLUTION
    out = torch.zeros_like(q_BsHK)
    lse = q_BsHK.new_full(q_BsHK.shape[:-1], float("-inf"))
    block = torch.stack((k_BsGK, v_BsGK))  # one message for both
    for turn in range(axis.size):
        in_flight = None
        if turn + 1 < axis.size:
            in_flight = comm.start_exchange(axis, [(block, axis.next)], [(block, axis.previous)])
        if turn <= axis.rank:  # the block of rank - turn, which is not below 0
            merge_into(out, lse, *attend(q_BsHK, block[0], block[1], turn == 0))
        if in_flight is not None:
            block = in_flight.wait()[0]
    return out
    # END SOLUTION


# %% course={"ex": "09-4", "role": "check"}
from course_lib.grading import check

check("09-4", ring_attention)

# %% [markdown] course={"ex": "09-5"}
# ## 09-5 Ulysses' all-to-all, there and back, in raw PyTorch
# With `torch.distributed` alone; `course_lib` refuses. The default group exists.
#
# - `to_heads`: from some positions of all heads, x [B, s, H, K], to all positions of some heads, [B, n·s, H/n, K].
#   Rank r gets the r-th of n shards of neighboring heads; positions are in the order of the ranks.
# - `to_rows`: the way back, from [B, S, h, K] to [B, S/n, n·h, K].
#
# `dist.all_to_all_single(received, pieces)` sends `pieces[r]` to rank r and fills `received[s]` with what rank s
# sent; both are contiguous, of equal shape, and split along dim 0. n divides H.
#
# Checked on one to four ranks: both ways; that causal attention between them gives the output of one process and,
# back through the same two functions, its gradients; that x is not overwritten; and that each way is one all-to-all
# of x.


# %% course={"ex": "09-5", "role": "answer"}
def to_heads(x_BsHK):
    """[B, s, H, K] of this rank's positions to [B, n*s, H/n, K] of this rank's heads."""
    # BEGIN SOLUTION
    pieces = torch.stack(x_BsHK.chunk(dist.get_world_size(), 2))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 1)
    # END SOLUTION


def to_rows(x_BShK):
    """[B, S, h, K] of this rank's heads to [B, S/n, n*h, K] of this rank's positions."""
    # BEGIN SOLUTION
    pieces = torch.stack(x_BShK.chunk(dist.get_world_size(), 1))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), 2)
    # END SOLUTION


# %% course={"ex": "09-5", "role": "check"}
from course_lib.grading import check

check("09-5", to_heads, to_rows)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Two blocks give a query outputs 10 and 20 with lse 5 and 5. What is the merged output, and the merged lse?
#
# <details><summary>Answer</summary>
# Equal sums, so 15; lse 5 + ln 2 = 5.69.
# </details>
#
# **2.** Causal, contiguous, 8 ranks and a long sequence. By what factor does zig-zag shorten the step of attention?
#
# <details><summary>Answer</summary>
# The busiest rank has 2 - 1/8 = 1.875 times the mean, and all ranks wait for it. With zig-zag every rank has the
# mean: 1.875.
# </details>
#
# **3.** Sequence parallelism (lesson 06) shards positions too. What is the difference?
#
# <details><summary>Answer</summary>
# It shards them over the ranks of tensor parallelism, between the regions; inside, every rank has all positions of
# some heads. Context parallelism is an axis of its own: its ranks hold the full weights and only their positions, in
# attention too.
# </details>
#
# **4.** Outputs of a ring match those of one process up to rounding; gradients of the key weights do not. Where do
# you look?
#
# <details><summary>Answer</summary>
# At dK and dV: do they return, is every rank's partial sum added, and are they added in float32? dq stays on its
# rank.
# </details>
#
# **5.** 64 ranks, 32 query heads, 8 of K and V, nodes of 8. Which way do you take?
#
# <details><summary>Answer</summary>
# Ulysses alone cannot: 32 heads cannot be divided over 64 ranks. Use Ulysses inside a node, 8 neighbors with 4 query
# heads and one of K and V each, and a ring of 8 nodes, whose messages hide. Or a gather, if memory allows K and V of
# the full sequence.
# </details>
#
# ## Sources and what next
# - Milakov and Gimelshein 2018, [arXiv:1805.02867](https://arxiv.org/abs/1805.02867): online softmax.
# - Liu et al. 2023, *Ring Attention*, [arXiv:2310.01889](https://arxiv.org/abs/2310.01889): the ring, and c ≥ F/B.
# - Brandon et al. 2023, *Striped Attention*, [arXiv:2311.09431](https://arxiv.org/abs/2311.09431): the imbalance, and another layout.
# - Jacobs et al. 2023, *DeepSpeed-Ulysses*, [arXiv:2309.14509](https://arxiv.org/abs/2309.14509); Fang and Zhao 2024,
#   [arXiv:2405.07719](https://arxiv.org/abs/2405.07719): with a ring.
# - Llama Team 2024, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2: the all-gather, and 2n
#   chunks, two per rank.
#
# Next: lesson 10 splits a layer into experts and sends tokens to them.
