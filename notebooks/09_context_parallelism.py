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
# *50 minutes to read and run, 65 to build.* Train Llama 3 405B on one sequence of 131,072 tokens. In bfloat16 the
# input of a layer takes 4.3 GB. Even if we save only these inputs and recompute everything else in backward, the 126
# layers of the model need 541 GB. A smaller batch does not help, because there is only one sequence. So we shard the
# sequence itself: each rank runs the full model on some of the positions. You need lessons 02 and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *A sequence split into n shards gives every rank 1/n of the attention work.*
# 2. *Ulysses (all-to-all) sends less than a ring.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Sixteen blocks of scores
# Norms, projections and MLPs treat each position by itself. Causal attention does not, because a query needs the keys
# and values of all positions up to its own. The picture shows which scores four ranks compute for 64 positions:
#
# ```
#                            keys and values of rank
#                              0     1     2     3
#  queries of rank 0  ( 0..15) [\]
#                  1  (16..31) [#]   [\]                   [#] all 256 scores
#                  2  (32..47) [#]   [#]   [\]             [\] on and below the diagonal: 136
#                  3  (48..63) [#]   [#]   [#]   [\]
# ```
#
# How do all keys and values reach rank 3 without filling its memory? And which ranks wait, if rank 3 has so much more
# to compute than rank 0?
#
# | symbol | meaning |
# |---|---|
# | n | ranks that share a sequence |
# | S, s | positions of a sequence, positions per rank (S/n) |
# | H, G | heads of queries, heads of keys and values (fewer in grouped queries) |
# | `q_BsHK` | a tensor q of B sequences, s positions, H heads and K elements per head |
# | h | hidden size |
# | F, β | operations per second of a GPU, bytes per second of a link |
#
# Predict five values for four ranks, the first for the shards of the picture. A *ring* passes K and V from rank to
# rank, a *gather* collects them all at once, and *Ulysses* exchanges positions for heads. *Zig-zag* gives each rank two
# chunks: rank 0 has positions 0 to 7 and 56 to 63.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 4, 64, 4
CONFIG = tiny_config(layers=2, hidden=64, heads=8, kv_heads=2, max_seq_len=SEQ)
ROWS = SEQ // RANKS  # positions per rank
KV_BYTES = 2 * BATCH * SEQ * CONFIG.kv_heads * CONFIG.head_dim * 4  # of all ranks, one layer

print(f"{SEQ} positions on {RANKS} ranks; K and V of a layer have {KV_BYTES:,} bytes in all")

# %%
predicted_busiest = None  # the busiest rank's work, divided by the mean
predicted_forward = None  # bytes that a rank sends in one ring forward of one layer
predicted_step = None  # the same, forward and backward together
predicted_least = None  # the way that sends least here: "ring", "gather" or "ulysses"
predicted_targets = None  # of 64 targets, how many are lost if ranks shift their own zig-zag tokens

# %% [markdown]
# ## Half a softmax, by hand
# Can a query use some of its keys now and the others later? Take four keys with the values 8, 4, 3 and 0, whose scores
# have the exponentials 1, 1, 2 and 4. The output is (8 + 4 + 6 + 0) / 8 = 2.25. The first two keys alone have the sum
# 2 and give (8 + 4) / 2 = 6. The last two have the sum 6 and give 6 / 6 = 1.
#
# If we weight each output by its block's fraction of the total sum, we get 6 · 2/8 + 1 · 6/8 = 2.25 again. So the
# output and the sum of each block are enough. We store the logarithm of the sum, the *log-sum-exp* (lse), because
# exponentials overflow. The cell repeats the calculation:

# %%
import torch

from course_lib import comm, cp
from course_lib.cp import blockwise
from course_lib.launch import run
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


# %% [markdown]
# ## K and V go round a ring
# Blocks can be merged one by one, so a rank never needs all keys at once. In each turn it computes with one block of K
# and V, sends this block to the next rank, and receives another from the previous rank. Here each block is only the
# number of its rank:

# %%


def whose_block():
    axis = make_mesh(cp=RANKS).cp
    return [int(block) for _, block in comm.ring(torch.tensor([axis.rank]), axis)]


for rank, seen in enumerate(run(whose_block, n=RANKS)):
    print(f"rank {rank} has in turns 0 to {RANKS - 1} the blocks of ranks {seen}")

# %% [markdown]
# In turn t, rank r has the block of rank r - t (mod n). In forward it never stores more than three blocks: its own, the
# current one and the arriving one. In the library, `comm.ring` yields the blocks and `attend` merges them. `visible`
# gives the parts of a block that the queries may see:

# %%
show_source(cp.ring.RingAttention.forward, blockwise.attend)

# %% [markdown]
# ## Backward: each gradient follows its block
# Forward saves no scores. Backward recomputes the probabilities p of one block from k, the merged lse and q, which is
# already scaled:
#
# $$p = e^{qk^T - lse} \qquad dv = p^T dout \qquad ds = p \, (dout \, v^T - \textstyle\sum dout \cdot out) \qquad dq = ds \, k \qquad dk = ds^T q$$
#
# So K and V go round once more, and dq needs no communication. But dk and dv of a block are sums over all ranks that
# used it, and they must return to the owner of the block. They follow the block one turn later, and each rank adds its
# own term:
#
# ```
#  rank 2, turn         0       1       2              3
#  block                kv2     kv1     kv0            kv3
#  computes             dkv2    dkv1    dkv0           dkv3
#  adds from rank 1     -       -       dkv0           dkv3      and at the end dkv2
#  sends to rank 3      -       dkv1    dkv0           dkv3
# ```

# %%
show_source(cp.ring.RingAttention.backward)

# %% [markdown]
# We compare the results with one process, and count the bytes:

# %% jupyter={"source_hidden": true}
# Ring attention on four ranks: its output and gradients, and the bytes that each rank sends.
from functools import partial

from course_lib.model import causal_attention
from course_lib.trace import SavedActivations

NAMES = ("out", "dq", "dk", "dv")


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


def ring_on_ranks(config):
    mesh = make_mesh(cp=RANKS)
    mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
    *qkv, dout = (x[:, mine] for x in draw(config))
    qkv = [x.requires_grad_() for x in qkv]
    with mesh.kernel_bytes() as kernel:
        out = cp.ring_attention(*qkv, axis=mesh.cp, layout=cp.ZIGZAG)
        forward = mesh.ledger.wire_bytes()
        gradients = torch.autograd.grad(out, qkv, dout)
    return {
        "positions": mine,
        "found": [out.detach(), *gradients],
        "forward": int(forward),
        "sent": int(mesh.ledger.wire_bytes()),
        "kernel": None if kernel.by_axis is None else kernel.by_axis.get("cp", 0),
    }


# %%
ring = run(ring_on_ranks, CONFIG, n=RANKS)
full = reference(CONFIG)
apart = max(
    (found - whole[:, one["positions"]]).abs().max().item()
    for one in ring
    for found, whole in zip(one["found"], full, strict=True)
)
assert apart < 1e-4
print(f"out, dq, dk, dv differ from one process by {apart:.0e}\n")
forward, sent, kernel = (ring[0][key] for key in ("forward", "sent", "kernel"))
print(f"a rank sends forward {forward:,} bytes: {forward / KV_BYTES:.2f} of all K and V")
print(f"forward and backward {sent:,}: {sent / KV_BYTES:.2f}")
print(f"counted by the kernel, with gloo's headers: {f'{kernel:,}' if kernel else 'not here'}")
print(f"your predictions: {predicted_forward} and {predicted_step}")
assert forward == KV_BYTES * (RANKS - 1) // RANKS
assert sent == 3 * forward
assert kernel is None or sent <= kernel <= 1.05 * sent

# %% [markdown]
# In forward a rank sends (n-1)/n of all K and V. Backward sends twice as much: K and V again, and their gradients. With
# bfloat16 it is three times as much, because our ring sums gradients in float32.
#
# ## Which rank has the most to do?
# With contiguous shards rank 3 has the most, and all ranks wait for it. **Zig-zag** splits the sequence into 2n chunks
# and gives each rank one from the front and one from the end:
#
# ```
#  chunk        0 1 2 3 4 5 6 7
#  contiguous   0 0 1 1 2 2 3 3      rank of each chunk
#  zig-zag      0 1 2 3 3 2 1 0
# ```
#
# The cell counts the scores (entries) that each rank computes:

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
# With contiguous shards the last rank computes 1.74 times the mean. For long sequences the factor is 2 - 1/n, so on
# many ranks it is almost 2.
#
# With zig-zag the work is equal in every turn. When a rank has another rank's block, it has two chunks of queries and
# two of keys, and exactly two of the four pairs are visible. Take rank 1:
#
# ```
#  keys of               lower rank 0    higher rank 3
#  chunk                   0   7           3   4
#  rank 1, queries 1      [#] [ ]         [ ] [ ]
#                  6      [#] [ ]         [#] [#]
# ```
#
# Both query chunks come after chunk 0 and before chunk 7, so each sees one key chunk of rank 0. Chunks 3 and 4 of
# rank 3 lie between the two query chunks, so only the late query chunk sees them. The chunks of any two ranks are
# nested like this.
#
# ## Can the messages hide?
# While a rank computes with one block, the next one is in flight. We measure both layouts on emulated links.
# Computation is *paced*: sleep pads it to 0.2 ms per score in forward and 0.4 ms in backward.

# %% jupyter={"source_hidden": true}
# Measure both layouts, paced, once the connections are warm.
from course_lib.mesh import Conditions, Link, Links
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

ENTRY = 2e-4  # seconds
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


def fastest(layout, tries=3):
    """The run with the shortest step: a busy machine delays messages."""
    found = [run(paced_ring, layout, n=RANKS, links=NETWORK) for _ in range(tries)]
    return min(found, key=lambda result: summarize(read(result.traces)[0]).makespan)


paced = {name: fastest(layout) for name, layout in LAYOUTS.items()}
step = {name: summarize(read(result.traces)[0]) for name, result in paced.items()}


def paced_picture(name, what):
    note = "Compute is paced by sleep to 0.2 ms forward and 0.4 ms backward for each score entry."
    return timeline(
        paced[name].traces,
        title=f"Ring attention, {name}: {what}",
        conditions=Conditions(links=NETWORK),
        note=note,
    )


# %%
paced_picture("contiguous", "all wait for rank 3, which has the most to do")

# %%
paced_picture("zig-zag", "equal work; K and V are sent meanwhile")

# %%
ratio = step["contiguous"].makespan / step["zig-zag"].makespan
print(f"measured: contiguous takes {ratio:.2f} times as long")
print(
    f"by entries of the busiest rank: {float(imbalance['contiguous'] / imbalance['zig-zag']):.2f}"
)

# %% [markdown]
# The lines below each rank show its messages. With zig-zag most of them overlap with computation. The last transfer is
# exposed in both layouts, because it returns gradients when nothing is left to compute. So the measured ratio is
# slightly below the ratio of entries.
#
# When does a block hide? Consider forward, without mask and grouped queries. A rank computes 4s²h operations on one
# block, and meanwhile receives the next one, which has 4sh bytes in bfloat16. The message hides if
#
# $$\frac{4 s^2 h}{F} \ge \frac{4 s h}{\beta} \qquad \text{or} \qquad s \ge \frac{F}{\beta}$$
#
# As in lesson 01, F is the peak and β the line rate. An H100 (989 TFLOP/s) with a link of 400 Gb/s needs 19,780
# positions. In Llama 3 405B, 16 query heads share each K/V head, so messages are 16 times smaller, and zig-zag halves
# the work. The limit becomes 19,780 · 2/16, about 2,470. In backward it is 1.2 times as high (2.5 times the operations,
# three times the bytes). Llama 3 had 8,192 positions per rank, so a ring would hide its messages.
#
# ## Training: positions, targets and the loss
# `cp.shard` shards tokens, targets and positions alike. RoPE needs the true positions, so a rank must not number its
# tokens from 0. The target of a token is the next token, which may be on another rank, so targets are made *before*
# sharding. How many would be lost otherwise?

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
# Each rank loses a target at the end of each chunk; the two chunks of rank 3 are neighbors, so it loses one.
#
# The loss is a mean over tokens, but our sequences end with padding, so fewer tokens of the last shards count.
# Therefore each rank divides the *sum* of its losses by the number of tokens on all ranks. Gradients are summed over
# `mesh.dp_cp`, because ranks have the same weights but different tokens.

# %%
from course_lib import dp
from course_lib.data import batch


def backward_of(model, full, mesh, layout):
    """One forward and backward: this rank's sum of losses, its tokens that count, and those of all."""
    tokens, targets, positions = cp.shard(*full, mesh.cp, layout)
    count = dp.global_tokens([targets], mesh.dp_cp)
    total, own_count = model.cross_entropy(model(tokens, positions), targets)
    (total / count).backward()
    return total.detach(), own_count, count


# %% [markdown]
# We train in one process, with a ring, and in three other ways that the next section explains:

# %% jupyter={"source_hidden": true}
# Train in one process and in four ways: losses, weights, bytes and memory.
from course_lib.trace import state_bytes

WAYS = ("ring", "gather", "ulysses", "usp")


def on_axis(way, axis):
    """(attention, layout) of a way on this rank's axis."""
    if way == "usp":
        heads, across = cp.split_axis(axis, 2)
        both = partial(cp.ulysses_ring_attention, heads_axis=heads, ring_axis=across)
        return both, cp.nested(cp.ZIGZAG, 2)
    return {
        "ring": (cp.ring_attention, cp.ZIGZAG),
        "gather": (cp.gather_attention, cp.ZIGZAG),
        "ulysses": (cp.ulysses_attention, cp.CONTIGUOUS),
    }[way]


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
        optimizer.zero_grad()
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            total, own_count, count = backward_of(model, full, mesh, layout)
        sync.finish()
        optimizer.step()
        losses.append((comm.all_reduce(total, mesh.dp_cp, control=True) / count).item())
        own.append((total.item(), own_count.item()))
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


# %%
runs = {way: run(train, way, n=RANKS) for way in WAYS}
runs = {"one process": run(train, "one process", n=1)} | runs
truth = runs["one process"][0]
for way, result in runs.items():
    one = result[0]
    off = max(
        (one["weights"][name] - weight).abs().max().item()
        for name, weight in truth["weights"].items()
    )
    print(f"{way:12} last loss {one['losses'][-1]:.4f}, weights off by {off:.0e}")
    assert abs(one["losses"][-1] - truth["losses"][-1]) < 1e-4
    assert off < 1e-3

print("\nthe last step of contiguous shards:")
sums, counts = zip(*(one["own"][-1] for one in runs["ulysses"]), strict=True)
for rank, (total, count) in enumerate(zip(sums, counts, strict=True)):
    mean = f"{total / count:.4f}" if count else "none"
    print(f"  rank {rank}: {count:4} tokens that count, mean loss {mean}")
means = [total / count for total, count in zip(sums, counts, strict=True) if count]
print(
    f"mean over tokens {sum(sums) / sum(counts):.4f}, mean over ranks {sum(means) / len(means):.4f}"
)

# %% [markdown]
# All ways reach the loss and weights of one process. A mean over ranks would give the last rank's few tokens the
# largest weight.
#
# ## Three other ways
# Llama 3 *gathers* K and V before attention. *Ulysses* gives each rank all positions of some heads. *USP* uses Ulysses
# inside small groups, and a ring between them.
#
# | | ring | gather | Ulysses | USP |
# |---|---|---|---|---|
# | sends in forward | K, V block by block | K, V in one all-gather | q, k, v, out by all-to-all | both |
# | needs | shards long enough to hide messages | memory for all K and V | n that divides H | group size that divides H |
#
# Which one sends least per layer and step?

# %%
from dataclasses import replace


def sent_formula(way, config, n=RANKS, batch=BATCH, seq=SEQ):
    if way == "usp":
        return sum(cp.ulysses_ring_wire_bytes(config, batch, seq, 2, n // 2))
    formula = {
        "ring": cp.ring_wire_bytes,
        "gather": cp.gather_wire_bytes,
        "ulysses": cp.ulysses_wire_bytes,
    }[way]
    return formula(config, batch, seq, n)


one_layer = {heads: replace(CONFIG, layers=1, kv_heads=heads) for heads in (2, 8)}
bytes_sent = {
    heads: {way: int(sent_formula(way, config)) for way in WAYS}
    for heads, config in one_layer.items()
}
print(f"{'bytes per rank':16}{'2 K and V heads':>17}{'8 K and V heads':>17}")
for way in WAYS:
    assert runs[way][0]["sent"] == sent_formula(way, CONFIG)
    print(f"{way:16}{bytes_sent[2][way]:17,}{bytes_sent[8][way]:17,}")
again = cp.gather_wire_bytes(one_layer[2], BATCH, SEQ, RANKS, save_gathered=False)
print(f"you predicted {predicted_least}\ngather again in backward: {int(again):,}")

# %% [markdown]
# With 8 heads of K and V Ulysses sends least, and with 2 the gather does. Grouped queries shrink K and V, but Ulysses
# also sends queries and outputs. The gather sends less than the ring because it saves K and V of all ranks until
# backward. If it gathers them again, it sends as much as the ring. [Deep dive 09b](09b_other_ways.ipynb) has the
# details.
#
# ## The same in PyTorch
# PyTorch's experimental `context_parallel` also uses zig-zag by default. In version 2.13 it has no kernel for CPUs, but
# a private function inside it accepts one:

# %%
from course_lib.bench.cp import torch_ring


def private_ring():
    mesh = make_mesh(cp=RANKS)
    mine = cp.positions(SEQ, mesh.cp, cp.ZIGZAG)
    return [x.detach() for x in torch_ring(mesh.cp, *(x[:, mine] for x in draw(CONFIG)))]


show_source(torch_ring)
print()
theirs = run(private_ring, n=RANKS)
for index, name in enumerate(NAMES):
    off = max(
        (one[index] - other["found"][index]).abs().max().item()
        for one, other in zip(theirs, ring, strict=True)
    )
    assert off < 1e-4
    print(f"torch's attention and ours, all ranks, {name:3}: differ by {off:.0e}")

# %% [markdown]
# ## Break it and diagnose
# One of five zig-zag rings is correct (its cause is `"correct"`), and four are faulty:
#
# - **positions**: every rank takes contiguous positions for its zig-zag data
# - **mean**: every rank divides by its own tokens, and gradients are averaged over ranks
# - **labels**: one rank makes its targets from its own tokens
# - **lost**: one rank drops the dK and dV that return to it
#
# Name the cause, where it shows (`"forward"` if the ranks' own losses are wrong, else `"backward"`) and the rank (a
# number, or `"all"`); both are None for the correct run. In the output, "off" is a relative error, and the last columns
# are norms before the sum over ranks.

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
# - **Own losses off on several ranks**: *positions*. Rank 0 can be right, because short sequences end before its late
#   chunk.
# - **One rank's own loss off**: *labels*. The ranks that attend to its keys are right, so its targets are wrong.
# - **Losses right, one rank's key gradient 0**: *lost*. A test of outputs does not find it.
# - **Losses right, gradient off, no rank at 0**: *mean*.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# Do not shard short sequences: below the limit that we computed, a ring cannot hide its messages. In decoding, one new
# query cannot hide a block either (lesson 13).
#
# **Claim 1: only if the layout balances it.** For a causal mask zig-zag does, and contiguous shards do not. With masks
# between documents, zig-zag is uneven too.
#
# **Claim 2: only if queries are not grouped, or ranks are many.** The bytes of Ulysses fall with n, and those of a ring
# do not.

# %%
print("busiest over mean:", ", ".join(f"{name} {float(v):.2f}" for name, v in imbalance.items()))
print(f"your vote: {vote_1}")
for heads, sent in bytes_sent.items():
    print(f"{heads} K and V heads: Ulysses / ring = {sent['ulysses'] / sent['ring']:.2f}", end="; ")
print(f"your vote: {vote_2}")

# %% [markdown]
# **The table that grows.**

# %%
print(f"{'per rank and step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}", end="")
print(f"{'exposed':>10} (paced attention)")
for way, result in runs.items():
    one = result[0]
    sent = int(one["sent"] + one["gradients"])
    wait = f"{1e3 * step['zig-zag'].exposed:7.0f} ms" if way == "ring" else ""
    print(f"{way:18}{one['state']:11,}{one['saved']:13,}{sent:12,}{wait}")

# %% [markdown]
# **Cheat-sheet.**


# %%
def cheat_sheet(n):
    seq = 131072
    config = tiny_config(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248,
        max_seq_len=seq, vocab=128256, dtype=torch.bfloat16,
    )  # fmt: skip
    saved = {
        "ring": cp.ring_saved_bytes(config, 1, seq, n),
        "gather": cp.gather_saved_bytes(config, 1, seq, n),
        "ulysses": cp.ulysses_saved_bytes(config, 1, seq, n),
        "usp": cp.ulysses_ring_saved_bytes(config, 1, seq, 2, n // 2),
    }
    print(f"Llama 3 405B in bfloat16, one sequence of {seq:,} tokens, without tensor parallelism")
    print(f"{n} ranks of context parallelism; USP in groups of 2")
    print(f"{'':10}{'sent per step, GB':>19}{'attention saves per layer, MB':>31}")
    for way in WAYS:
        sent = float(sent_formula(way, config, n, 1, seq)) / 1e9
        print(f"{way:10}{sent:19.1f}{saved[way] / 1e6:31.0f}")
    for name, layout in LAYOUTS.items():
        print(f"work, busiest over mean, {name}: {float(cp.imbalance(layout, seq, n)):.3f}")
    peak, link = 989e12, 400e9 / 8  # per second: operations of an H100, bytes of its link
    grouped = config.heads // config.kv_heads
    print(f"a ring hides from F/beta = {peak / link:,.0f} positions per rank", end="; ")
    print(f"here, with zig-zag, {2 * peak / link / grouped:,.0f} of {seq // n:,}")


cheat_sheet(16)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/09_context_parallelism.ipynb) take 65 minutes.

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
# [Deep dive 09b](../notebooks/09b_other_ways.ipynb) has a picture. `dist.all_to_all_single(received, pieces)` sends
# `pieces[r]` to rank r and fills `received[s]` with what rank s sent; both are contiguous, of equal shape, and split
# along dim 0. n divides H.
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
# **Exit questions.**
#
# **1.** Two blocks give a query the outputs 10 and 20, both with lse 5. What are the merged output and lse?
#
# <details><summary>Answer</summary>
# The sums are equal, so the output is 15 and the lse 5 + ln 2 = 5.69.
# </details>
#
# **2.** A long sequence is on 8 ranks, and all messages hide. By what factor does zig-zag shorten forward attention?
#
# <details><summary>Answer</summary>
# By 2 - 1/8 = 1.875, the busiest rank's work over the mean.
# </details>
#
# **3.** Sequence parallelism (lesson 06) shards positions too. What is the difference?
#
# <details><summary>Answer</summary>
# It uses the ranks of tensor parallelism, and in attention each of them has all positions of some heads.
# </details>
#
# **4.** The outputs of a ring are right, but the gradients of the key weights are not. Where do you look?
#
# <details><summary>Answer</summary>
# At dK and dV: does every rank add its term, and do they return to their owner?
# </details>
#
# **5.** 64 ranks, 32 query heads, nodes of 8. Which way do you choose?
#
# <details><summary>Answer</summary>
# USP: Ulysses inside each node, and a ring across nodes. 32 heads cannot be divided over 64 ranks.
# </details>
#
# **Sources.** Next: lesson 10.
# - Liu et al. 2023, *Ring Attention*: [arXiv:2310.01889](https://arxiv.org/abs/2310.01889).
# - Llama Team 2024, sections 3.3.1, 3.3.2 and table 4: [arXiv:2407.21783](https://arxiv.org/abs/2407.21783).
