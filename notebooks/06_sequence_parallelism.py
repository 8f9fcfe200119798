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
#     lesson: '06'
# ---

# %% [markdown]
# # 06 Sequence parallelism and recomputation
#
# *50 minutes to read and run, 65 to build.* Tensor parallelism left a floor: norms, residuals and the inputs of its
# regions are replicated on every rank. Here the positions outside the regions are sharded, in two variants with
# different prices. Then memory without messages: recomputation. And three details that break real runs: the
# vocabulary, dropout seeds, and fewer heads of keys and values than ranks. You need lesson 05.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Sequence parallelism reduces activation memory to 1/n, and sends no byte more than tensor parallelism.*
# 2. *Selective recomputation, which runs attention's core again in backward, saves most of the activations.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# A norm, a dropout and a residual sum treat every position by itself. So between two regions no rank needs all
# positions:
#
# ```
#  tensor    x whole -> norm -> |f: as it is     | columns, rows |g: all-reduce    | -> x whole
#  sequence  x rows  -> norm -> |all-gather rows | columns, rows |reduce-scatter   | -> x rows
# ```
#
# *Rows* are positions here: on the second line a rank has S/n of the S positions, `x_BScD` in names. Inside a region
# nothing changes: every rank has all positions and its shard of the features. What does it cost, and what does it
# save?

# %% [markdown]
# ## Predict
# The GPT of lesson 05, on four ranks. There its blocks sent 3,145,728 bytes per rank and step, and a rank saved 0.44
# of a block's activations. Fill in what you can.

# %%
import torch

from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 64, 6
CONFIG = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=SEQ)
X_BYTES = BATCH * SEQ * CONFIG.hidden * 4  # an activation x_BSD in float32

print(f"{CONFIG.layers} blocks, hidden {CONFIG.hidden}; x has {X_BYTES:,} bytes")

# %%
predicted_bytes = None  # that a rank sends for all blocks in a step
predicted_saved = None  # fraction of a block's activations that it keeps then
predicted_loss = None  # bytes a rank sends for the loss of 512 tokens, 258 words
predicted_selective = None  # share of a block's activations that selective recomputation spares

# %% [markdown]
# ## An all-reduce is two halves
# First, every rank gets the sum of some rows: reduce-scatter. Then every rank gets all rows: all-gather. A ring
# all-reduce is exactly this (lesson 02). So ranks can stop in the middle, work on rows, and continue later:

# %%
from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh


def in_two_halves():
    mesh = make_mesh(tp=RANKS)
    part = torch.arange(8.0) * 10**mesh.tp.rank
    at_once = comm.all_reduce(part, mesh.tp)
    bytes_at_once = int(mesh.ledger.wire_bytes())
    mesh.ledger.clear()
    rows = comm.reduce_scatter(part, mesh.tp, 0)
    joined = comm.all_gather(rows, mesh.tp, 0)
    assert torch.equal(joined, at_once)
    return {"rows": rows.tolist(), "bytes": (bytes_at_once, int(mesh.ledger.wire_bytes()))}


for rank, told in enumerate(run(in_two_halves, n=RANKS)):
    print(f"rank {rank}: {told}")

# %% [markdown]
# The bytes are equal, in one call or in two.
#
# ## The pair of operators
# | | forward | backward |
# |---|---|---|
# | enter | all-gather over S | reduce-scatter over S |
# | leave | reduce-scatter over S | all-gather over S |
#
# Why is the backward of this gather a reduce-scatter? Every rank uses *all* rows, each for its own features. So each
# rank has a partial gradient of every row, and a row's owner needs the sum: `comm.gather_from_sequence`. `comm.gather_from` has the
# same forward, but its backward takes the rank's own rows of its own gradient. That is right where all ranks do the
# same with x, and wrong here.

# %%
from course_lib import sp
from course_lib.view import show_source

show_source(sp.enter, sp.leave)
USES = 2.0, 3.0  # what each rank multiplies all rows by


def entered(gather):
    axis = make_mesh(tp=2).tp
    row = torch.tensor([[1.0 + axis.rank]], requires_grad=True)
    x = gather(row, axis, 0)
    (USES[axis.rank] * x).sum().backward()
    return {"x": x.flatten().tolist(), "dx": row.grad.item()}


print()
for gather in (comm.gather_from_sequence, comm.gather_from):
    print(f"comm.{gather.__name__:20}", *run(entered, gather, n=2))

# %% [markdown]
# Both rows were multiplied by 2 and by 3: their gradient is 5. The second line has a perfect forward, too.
#
# ## Two variants
# Column linears save their input for backward: they need it for the gradient of their weights. That input is the
# *full*, gathered x. There are two ways to continue:
#
# - `sp.REGION` saves it. The bytes are those of tensor parallelism, and two activations per block are replicated.
# - `sp.GATHER_AGAIN` saves this rank's rows and gathers once more in backward. Everything is divided by n, for a
#   third message in each region's backward. Korthikanti et al. describe this variant; they hide that message behind a
#   gradient's product.
#
# Bytes and memory of each, measured on the blocks alone. Read each line as one: you cannot combine one variant's
# traffic with the other's memory.

# %%
from fractions import Fraction

from course_lib import recompute, tp
from course_lib.recompute import saved_by_block
from course_lib.tp import formulas
from course_lib.trace import SavedActivations

WAYS = {"tensor": tp.REGION, "rows, kept": sp.REGION, "rows, again": sp.GATHER_AGAIN}
torch.manual_seed(0)
x_BSD, dy_BSD = torch.randn(2, BATCH, SEQ, CONFIG.hidden)


def by_blocks(config, x_BSD, dy_BSD, change=None):
    """(bytes sent, bytes kept) of all blocks, by way."""
    mesh, found = make_mesh(tp=make_mesh().world.size), {}
    for way, region in WAYS.items():
        model = tp.parallelize(build_model(config), mesh.tp, region)
        if change:
            change(model)
        x, dy = x_BSD.clone(), dy_BSD
        if way != "tensor":
            x, dy = (comm.own_shard(one, mesh.tp, 1) for one in (x_BSD, dy_BSD))
        y = x.requires_grad_() * 1
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            for block in model.blocks:
                y = block(y, torch.arange(x_BSD.shape[1]))
            kept = saved.now
            y.backward(dy)
        found[way] = mesh.ledger.wire_bytes(), kept
    return found


def kept_formula(config, way, sequences, seq_len, n):
    """Bytes that a rank keeps of one block."""
    if way == "tensor":
        return formulas.saved_per_block(config, sequences, seq_len, n)
    return sp.saved_per_block(config, sequences, seq_len, n, again=way == "rows, again")


MOVES = {"tensor": 8, "rows, kept": 8, "rows, again": 10}  # (n-1)/n x each, a layer

one_block = saved_by_block(CONFIG, BATCH, SEQ).total
print(
    f"{'':13}{'ranks':>5}{'sent':>12}{'formula':>12}{'kept a block':>14}{'formula':>10}{'share':>7}"
)
shares = {}
for n in (2, 4):
    for way, (sent, kept) in run(by_blocks, CONFIG, x_BSD, dy_BSD, n=n)[0].items():
        bytes_formula = MOVES[way] * CONFIG.layers * Fraction(n - 1, n) * X_BYTES
        memory_formula = kept_formula(CONFIG, way, BATCH, SEQ, n)
        kept //= CONFIG.layers
        shares[n, way] = kept / one_block
        print(f"{way:13}{n:5}{int(sent):12,}{int(bytes_formula):12,}", end="")
        print(f"{kept:14,}{memory_formula:10,}{kept / one_block:7.2f}")
        assert sent == bytes_formula
        assert kept == memory_formula
print(f"your predictions: {predicted_bytes} bytes, fraction {predicted_saved}")

# %% [markdown]
# Look at four ranks: *rows, kept* sends the same bytes and stores less; *rows, again* sends a quarter more and stores
# a quarter.
#
# A note says that SP brings activations "to 1/TP size", beside the sentence that an all-reduce becomes a
# reduce-scatter and an all-gather. Each is right, but for another variant.
#
# ## Korthikanti's formula, and ours
# They count bytes of a GPT layer in units of s·b·h (positions, sequences, hidden features), with 2-byte elements, an
# MLP of 4h features and t ranks:
#
# | | theirs, without attention's scores |
# |---|---|
# | one process | 34 |
# | tensor | 10 + 24/t |
# | sequence (again) | 34/t |
#
# The 10: inputs of two norms (4), of q, k, v (2) and of the MLP (2), two dropout masks (2). Their attention adds
# 5·a·s/h for the scores of a heads; ours is a fused kernel and stores only a log-sum-exp per row: one number, from
# which backward recomputes the row's weights. Now measure it with our layer in bfloat16:

# %%
s, b, h = 32, 2, 256
PAPER = tiny_config(
    family="gpt", hidden=h, heads=8, kv_heads=8, ffn=4 * h, max_seq_len=s, dropout=0.1,
    dtype=torch.bfloat16, layers=1,
)  # fmt: skip
x_paper = torch.randn(b, s, h, dtype=torch.bfloat16)


def theirs(way, t):
    return {"tensor": 10 + 24 / t, "rows, kept": 4 + 30 / t, "rows, again": 34 / t}[way]


print(f"{'bytes / sbh':13}{'ranks':>5}{'measured':>10}{'theirs':>8}{'more, by masks':>16}")
for n in (1, 2, 4):
    for way, (_, kept) in run(by_blocks, PAPER, x_paper, x_paper, n=n)[0].items():
        masks = 2 if way == "tensor" else 0
        print(f"{way:13}{n:5}{kept / (s * b * h):10.2f}{theirs(way, n):8.2f}{masks:16}")
        assert kept == kept_formula(PAPER, way, b, s, n)
        assert 0 <= kept / (s * b * h) - masks - theirs(way, n) < 0.25

# %% [markdown]
# With plain `nn.Dropout`, torch's CPU mask takes two bytes instead of one: 2 more. The rest are statistics of the
# norms and log-sum-exps. The line "rows, kept" is not in the paper: the same count with 4 replicated, 34/t + 4(1 -
# 1/t).
#
# ## Build it: one argument, and one sum
# The plan of lesson 05 takes another region. One thing is new: a norm's weight was used on this rank's rows only. So
# its gradient is *partial* and needs a sum over tp. The same holds for biases after a row linear and for learned
# positions.

# %%
show_source(sp.sum_gradients)

# %%
from course_lib.data import batch
from course_lib.trace import state_bytes


def train(n, way, sums=True):
    mesh = make_mesh(tp=n)
    model = tp.parallelize(build_model(CONFIG, seed=0), mesh.tp, WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(tokens, targets)
            (total / count).backward()
        if way != "tensor" and sums:
            sp.sum_gradients(comm.held_gradients(model.parameters()), mesh.tp)
        optimizer.step()
        losses.append((total / count).item())
        norms.append(model.blocks[0].ffn_norm.weight.detach().clone())
    state = state_bytes(model, optimizer)
    return {"losses": losses, "norms": norms, "state": state, "activations": saved.peak}


def step_bytes(way, n, forwards=1):
    """All that a rank sends in a step: activations, loss, and what is not cut."""
    shape = CONFIG, BATCH, SEQ, n
    if way == "tensor":
        return formulas.wire_bytes(*shape, forwards=forwards)
    rows = sp.wire_bytes(*shape, again=way == "rows, again", forwards=forwards)
    return rows + formulas.loss_bytes(CONFIG, BATCH * SEQ, n)


one_process = run(train, 1, "tensor", n=1)[0]
runs = {way: run(train, RANKS, way, n=RANKS) for way in WAYS}
print(
    f"{'':13}{'last loss':>10}{'bytes a rank':>14}{'formula':>12}{'activations':>13}{'norms apart':>13}"
)
print(f"{'one process':13}{one_process['losses'][-1]:10.5f}{'':26}{one_process['activations']:13,}")
for way, result in runs.items():
    one, sent = result[0], result.ledgers[0].wire_bytes()
    apart = max((each["norms"][-1] - one["norms"][-1]).abs().max().item() for each in result)
    print(
        f"{way:13}{one['losses'][-1]:10.5f}{int(sent):14,}{int(step_bytes(way, RANKS)):12,}", end=""
    )
    print(f"{one['activations']:13,}{apart:13.0e}")
    assert sent == step_bytes(way, RANKS)
    assert abs(one["losses"][-1] - one_process["losses"][-1]) < 1e-3
    assert apart < 1e-4

# %%
from course_lib.view import memory_plot

bars = {"one process": one_process} | {way: result[0] for way, result in runs.items()}
memory_plot(
    {name: one["state"] for name, one in bars.items()},
    activations={name: one["activations"] for name, one in bars.items()},
    title="Four ranks: shared rows cut the activations that tensor parallelism left whole",
)

# %% [markdown]
# Weights are the same in the lower three bars. The yellow bars are the subject of this lesson. In the table, sharded
# rows send a little more than the blocks alone: the sum of the small gradients and, with GATHER_AGAIN, one more
# gather at the head.
#
# ## Forget the sum
# The classic mistake of sequence parallelism raises no error. Look at both columns:

# %%
forgot = run(train, RANKS, "rows, kept", False, n=RANKS)
print(f"{'step':4}{'loss, with the sum':>20}{'without':>10}{'norms apart without':>21}")
for step in range(STEPS):
    first = forgot[0]["norms"][step]
    apart = max((one["norms"][step] - first).abs().max().item() for one in forgot)
    with_sum, without = runs["rows, kept"][0]["losses"][step], forgot[0]["losses"][step]
    print(f"{step:4}{with_sum:20.5f}{without:10.5f}{apart:21.1e}")
assert apart > 1e-3
assert forgot[0]["losses"][-1] < forgot[0]["losses"][0]

# %% [markdown]
# The loss still falls. But "the" norm is now four different ones, each trained on a quarter of the positions. A
# checkpoint saves one of them. A checksum of replicated weights over tp, after one step, finds it.
#
# ## Recomputation: memory for arithmetic
# Another way to store less: save only the input of a function, and run the function again in backward. *Full*: each
# block saves only its input. *Selective*: only attention's core, softmax(q kᵀ) v, runs again; it saves q, k and v.

# %%
show_source(recompute._Recomputed, recompute.full, recompute.selective)

# %% [markdown]
# One trap is in the source: dropout. The second forward must draw the same masks, so the random state is saved and
# restored.
#
# Measured in one process, for torch's fused attention and for one that stores its scores (as in 2022):

# %%
from course_lib.model import causal_attention


def plain_attention(q_BSHK, k_BSHK, v_BSHK):
    z_BHST = torch.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) / q_BSHK.shape[-1] ** 0.5
    future_ST = torch.ones(z_BHST.shape[-2:], dtype=torch.bool).triu(1)
    weights_BHST = z_BHST.masked_fill(future_ST, -torch.inf).softmax(-1)
    return torch.einsum("bhst,bthk->bshk", weights_BHST, v_BSHK)


HOW = {"nothing": None, "selective": recompute.selective, "full": recompute.full}


def recomputed(how, core):
    """(kept after forward, the most during backward, gradient of x) of all blocks."""
    model = build_model(CONFIG)
    for block in model.blocks:
        block.attn.core = core
    if HOW[how]:
        HOW[how](model)
    leaf, positions = x_BSD.clone().requires_grad_(), torch.arange(SEQ)
    y = leaf * 1
    with SavedActivations(model) as saved:
        for block in model.blocks:
            y = block(y, positions)
        kept = saved.now
        y.backward(dy_BSD)
    return kept, saved.peak, leaf.grad


found = {}
print(f"{'again in backward':19}{'attention':>10}{'kept':>12}{'of all':>8}{'most, backward':>16}")
for attention, core in {"fused": causal_attention, "scores": plain_attention}.items():
    for how in HOW:
        kept, peak, dx = found[how, attention] = recomputed(how, core)
        share = kept / found["nothing", attention][0]
        print(f"{how:19}{attention:>10}{kept:12,}{share:8.2f}{peak:16,}")
        assert torch.equal(dx, found["nothing", attention][2]), "not one bit differs"

log_sum_exp = BATCH * SEQ * CONFIG.heads * 4
assert found["nothing", "fused"][0] == CONFIG.layers * one_block
assert found["selective", "fused"][0] == CONFIG.layers * (one_block - log_sum_exp)
assert found["full", "fused"][0] == CONFIG.layers * X_BYTES + 8 * SEQ  # and the positions
spared = log_sum_exp / one_block
print(f"\nselective spares {spared:.2f} of a fused block; your prediction: {predicted_selective}")

# %% [markdown]
# Selective recomputation is for attention that stores scores, a·s² elements per sequence: long sequences, many heads.
# A fused kernel recomputes inside and never stores them, so nothing is left to save.
#
# The price in arithmetic, from counting matrix products alone, without the saving of a causal kernel: a layer's forward has
# 24 b s h² + 4 b s² h operations, backward twice that. Full adds a forward: 1/3. Selective adds the 4 b s² h:


# %%
def more_arithmetic(s, h):
    return 4 * s * s * h / (3 * (24 * s * h * h + 4 * s * s * h))


def scores_share(a, s, h):
    """What Korthikanti's formula gives the scores, of all that a layer keeps."""
    return 5 * a * s / h / (34 + 5 * a * s / h)


for name, (a, s_, h_) in {"this model": (8, SEQ, 64), "GPT-3": (96, 2048, 12288)}.items():
    print(f"{name:11} selective: {more_arithmetic(s_, h_):.1%} more arithmetic", end="")
    print(f", {scores_share(a, s_, h_):.0%} less memory where scores are kept")
print(f"Korthikanti, table 5, 175B: {52.8 / 51.4 - 1:.1%} more arithmetic (52.8 % against 51.4 %)")

# %% [markdown]
# 54 % is the paper's count for this shape: 2-byte elements, dropout on the scores. Ours above, 4 bytes and no
# dropout, saved 33 %.
#
# The last line is their HFU over their MFU (lesson 01). It is three times our count: s/6h, the cost of attention's
# products in forward *and* backward. Only their forward runs twice.
#
# On ranks there is a second price. A recomputed forward sends its messages again: the region's forward messages are
# inside the block, and none are inside the core.

# %%
print(f"{'bytes a rank, blocks':22}{'none':>12}{'selective':>12}{'full':>12}")
sent = {how: run(by_blocks, CONFIG, x_BSD, dy_BSD, HOW[how], n=RANKS)[0] for how in HOW}
for way in WAYS:
    line = [int(sent[how][way][0]) for how in HOW]
    print(f"{way:22}" + "".join(f"{one:12,}" for one in line))
    assert line[0] == line[1]
    assert line[2] > line[0]
assert sent["full"]["tensor"][0] == 12 * CONFIG.layers * Fraction(RANKS - 1, RANKS) * X_BYTES

# %% [markdown]
# Tensor parallelism then has 6 all-reduces per layer instead of 4.
#
# ## The vocabulary
# For V words and T tokens, embedding and LM head have V·h elements each, often the largest matrices; logits have T·V
# elements, often more than any activation. So the vocabulary is sharded: rank r has the V'/n rows from r·V'/n on; V'
# is V padded to a multiple of n. The embedding gives zeros for words of other ranks, and the sum over ranks (or a
# reduce-scatter) gives x. The loss, in which z are a token's logits and m is their maximum, must not gather them:
#
# $$\text{loss} = \log \sum_v e^{z_v - m} + m - z_\text{target}$$
#
# The maximum m, the sum and the target's logit: three all-reduces of *one number per token*. Backward, softmax -
# onehot, needs none: each rank has its own columns.

# %%
show_source(tp.layers._VocabCrossEntropy)

# %%
from course_lib.ledger import wire
from course_lib.model import loss_sum

WORDS = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, vocab=258, layers=1)
_, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
TOKENS = BATCH * SEQ


def by_words():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(WORDS), mesh.tp)
    logits = model.head(x_BSD)
    mesh.ledger.clear()
    total, _ = model.cross_entropy(logits, targets)
    calls = [(record.op, record.payload) for record in mesh.ledger.select("tp")]
    padding = int(torch.isinf(logits[0, 0]).sum())
    return {"loss": total.item(), "logits": list(logits.shape), "padding": padding, "calls": calls}


result = run(by_words, n=RANKS)
whole, _ = loss_sum(build_model(WORDS).head(x_BSD), targets)
for rank, told in enumerate(result):
    assert abs(told["loss"] / whole.item() - 1) < 1e-5
    print(f"rank {rank}: logits {told['logits']}, {told['padding']} of its words are padding")
print(f"calls: {result[0]['calls']}")
sent = result.ledgers[0].wire_bytes()
gathered = wire("all_gather", TOKENS * result[0]["logits"][-1] * 4, RANKS)
print(
    f"sent {int(sent):,} bytes; your prediction {predicted_loss}; gathering logits {int(gathered):,}"
)
assert sent == formulas.loss_bytes(WORDS, TOKENS, RANKS)

# %% [markdown]
# Padding has minus infinity as logit. With 0 there would be two more words with some probability. This is the trap of
# padded vocabularies: the loss is off by little.
#
# ## Dropout seeds
# Where ranks hold the *same* values, they must drop the same elements: one seed. Where they hold *different* values,
# equal masks would drop the same places of every shard: other seeds. With tensor parallelism, outside the regions is
# the first case, inside (dropout in attention) the second. With sharded rows, outside is the second case, too:
# `tp.RankDropout`.

# %%
show_source(tp.RankDropout.forward)
DROPS = tiny_config(layers=1, dropout=0.3)


def dropped(way, skewed):
    axis = make_mesh(tp=2).tp
    block = tp.parallelize(build_model(DROPS), axis, WAYS[way]).blocks[0]
    torch.manual_seed(4 + skewed * axis.rank)
    mask = block.dropout(torch.ones(24)) == 0
    return "".join("x" if one else "." for one in mask), f"{torch.rand(()).item():.4f}"


print()
for way, skewed in (("tensor", False), ("rows, kept", False), ("tensor", True)):
    masks = run(dropped, way, skewed, n=2)
    for rank, (mask, following) in enumerate(masks):
        name = f"{way}{', seeded by rank' * skewed}"
        print(f"{name:24} rank {rank}: {mask}  next of the common stream {following}")
    assert (masks[0][0] == masks[1][0]) == (way == "tensor" and not skewed)

# %% [markdown]
# Second pair: other masks, and the common stream stays common, so that later draws from it are equal. Third pair: the
# usual accident, `manual_seed(seed + rank)`. There x, which must be equal on all ranks, is no longer the same.
#
# ## Fewer heads of keys and values than ranks
# Grouped queries: 8 query heads use 2 heads of keys and values. On four ranks each head is replicated on two ranks,
# which use it for *their* queries. These two ranks are its KV replication group. Their weights are equal and their
# gradients partial: one more sum, over the KV replication group only.

# %%
GROUPED = tiny_config(layers=1, heads=8, kv_heads=2)
tokens, _ = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)


def shared_heads():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(GROUPED), mesh.tp)
    total, _ = model.loss_sum(tokens, targets)
    total.backward()
    k = model.blocks[0].attn.k.weight
    before = k.grad.clone()
    mesh.ledger.clear()
    tp.sum_shared_gradients(comm.held_gradients(model.parameters()))
    return {"group": comm.shard_spec(k).kv_group.ranks, "before": before, "after": k.grad}


reference = build_model(GROUPED)
reference.loss_sum(tokens, targets)[0].backward()
heads = reference.blocks[0].attn.k.weight.grad.chunk(2)
result = run(shared_heads, n=RANKS)
for rank, told in enumerate(result):
    right = heads[rank // 2]
    off = [((told[when] - right).norm() / right.norm()).item() for when in ("before", "after")]
    print(f"rank {rank}: k {list(right.shape)}, shared by {told['group']}; gradient off by", end="")
    print(f" {off[0]:.2f} before the sum, {off[1]:.0e} after")
    assert off[1] < 1e-3 < off[0]
sent = result.ledgers[0].wire_bytes()
print(f"{int(sent):,} bytes per rank on the axis of the group")
assert sent == formulas.shared_head_bytes(GROUPED, RANKS)

# %% [markdown]
# Without it, the weights of a KV replication group drift apart. Splitting a head in two does not help: its scores
# would be partial sums, and softmax needs the sums, an all-reduce of s² elements per head.
#
# ## The same in PyTorch
# DTensor has `SequenceParallel` for the norms; the linears declare the layout of x outside, `Shard(1)`. It leaves the
# norms' gradients as *partial* DTensors: you must still request the sum. One block with the same weights:

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from course_lib.grading.wire import WireCalls  # counts below comm and DTensor alike

LLAMA = tiny_config(layers=1, kv_heads=8)


def in_pytorch():
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    rows, inside = Shard(1), Replicate()
    plan = {name: SequenceParallel(use_local_output=True) for name in ("attn_norm", "ffn_norm")}
    plan |= {
        "attn": PrepareModuleInput(
            input_layouts=(rows, None), desired_input_layouts=(inside, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(inside,)),
    }
    columns = ("attn.q", "attn.k", "attn.v", "ffn.gate", "ffn.up")
    plan |= {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel(output_layouts=rows) for name in ("attn.o", "ffn.down")}
    block = build_model(LLAMA, seed=0).blocks[0]
    parallelize_module(block, init_device_mesh("cpu", (n,)), plan)
    x = x_BSD.chunk(n, 1)[rank].clone().requires_grad_()
    with WireCalls() as counter:
        y = block(x, torch.arange(SEQ))
        y.backward(dy_BSD.chunk(n, 1)[rank].contiguous())
    sent = sum(call.wire(n) for call in counter.calls)
    partial = [
        name
        for name, p in block.named_parameters()
        if isinstance(p.grad, DTensor) and any(one.is_partial() for one in p.grad.placements)
    ]
    gradients = {name: p.grad.full_tensor() for name, p in block.named_parameters()}
    dist.destroy_process_group()
    return {"y": y.detach(), "dx": x.grad, "sent": sent, "partial": partial, "gradients": gradients}


reference = build_model(LLAMA, seed=0).blocks[0]
x = x_BSD.clone().requires_grad_()
y = reference(x, torch.arange(SEQ))
y.backward(dy_BSD)
theirs_by_rank = run(in_pytorch, n=RANKS, init=False)
for rank, one in enumerate(theirs_by_rank):
    for name, right in (("y", y.detach()), ("dx", x.grad)):
        torch.testing.assert_close(one[name], right.chunk(RANKS, 1)[rank], atol=1e-4, rtol=1e-4)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(one["gradients"][name], p.grad, atol=1e-3, rtol=1e-3)
ours = run(by_blocks, LLAMA, x_BSD, dy_BSD, n=RANKS)[0]["rows, kept"][0]
print(f"one block, bytes a rank: DTensor {int(theirs_by_rank[0]['sent']):,}, ours {int(ours):,}")
print("left as partial sums:", theirs_by_rank[0]["partial"])

# %% [markdown]
# Recomputation is `torch.utils.checkpoint`; ask for `use_reentrant=False`.

# %%
from functools import partial

from torch.utils.checkpoint import checkpoint


def one_batch(change):
    model = build_model(tiny_config(dropout=0.2))
    change(model)
    torch.manual_seed(5)
    model.loss_sum(tokens, targets)[0].backward()
    return [p.grad for p in model.parameters()]


def by_torch(model):
    for block in model.blocks:
        block.run = partial(checkpoint, use_reentrant=False)


pairs = zip(one_batch(recompute.full), one_batch(by_torch), strict=True)
assert all(torch.equal(mine, its) for mine, its in pairs)
print("gradients with dropout: equal to the last bit")

# %% [markdown]
# ## Break it and diagnose
# A model with 258 words, 8 query heads and 2 of keys and values, its rows sharded over four ranks. One run is correct
# (its cause is `"correct"`), four are faulty:
#
# - **norms**: the gradients of norms are not summed over tp
# - **gather**: x enters by a gather whose backward takes own rows instead of summing
# - **heads**: the gradients of replicated heads are not summed
# - **padding**: the padding of the vocabulary is not masked
#
# For each, name the cause, the collective that is missing (`"all_reduce"`, `"reduce_scatter"` or None) and rank (a
# number where only one rank is faulty, `"all"`, or None if correct). "Off" is against one process; "apart" is between
# ranks with the same weights; "finite" counts logits by rank that are not minus infinity. Another SEED draws other
# runs.

# %%
SEED = 1
diagnosis = {  # such as ("norms", "all_reduce", "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.comm.operators import Region
from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "norms": ("all_reduce", "all"),
    "gather": ("reduce_scatter", "all"),
    "heads": ("all_reduce", "all"),
    "padding": (None, RANKS - 1),
}
lab = Lab("06", SEED, FAULTS)
LAB_CONFIG = tiny_config(layers=2, heads=8, kv_heads=2, vocab=258)


class Unmasked(tp.VocabHead):
    def forward(self, x):
        return self.region.columns(x, [self.product], self.axis)[0]


def trained(n, fault):
    mesh = make_mesh(tp=n)
    plan, region = dict(tp.LLAMA), sp.REGION
    if fault == "gather":
        region = Region(lambda x, axis: comm.gather_from(x, axis, 1), sp.leave, sp.own_rows)
    if fault == "padding":
        plan["head"] = lambda linear, cut: Unmasked(linear, cut.axis, cut.region)
    model = tp.parallelize(build_model(LAB_CONFIG, seed=0), mesh.tp, region, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, found = [], {}
    for step in range(4):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        mesh.ledger.clear()
        logits = model(tokens)
        total, count = model.cross_entropy(logits, targets)
        (total / count).backward()
        held = comm.held_gradients(model.parameters())
        if fault != "heads":
            tp.sum_shared_gradients(held)
        if fault != "norms":
            sp.sum_gradients(held, mesh.tp)
        found = found or {
            "norm": model.blocks[0].ffn_norm.weight.grad.clone(),
            "k": model.blocks[0].attn.k.weight.grad.clone(),
        }
        optimizer.step()
        losses.append((total / count).item())
    ops = ("all_gather", "reduce_scatter", "all_reduce")
    calls = [mesh.ledger.calls(None, op) for op in ops]
    finite = int(torch.isfinite(logits[0, 0]).sum())
    return found | {"losses": losses, "calls": calls, "finite": finite}


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


reference = run(trained, 1, "correct", n=1)[0]
print(f"{'':3}{'calls':^27}{'loss off':^18}{'norm gradient':^19}{'k gradient':>11}")
print(f"{'':3}{'gather':>7}{'scatter':>9}{'reduce':>8}{'first':>12}{'last':>9}", end="")
print(f"{'off':>9}{'apart':>9}{'apart':>11}   finite")
for lab_run in lab:
    result = run(trained, RANKS, lab_run.cause, n=RANKS)
    first = result[0]
    off = [abs(first["losses"][at] - reference["losses"][at]) for at in (0, -1)]
    norm_off = relative(first["norm"], reference["norm"])
    norm_apart = max(relative(one["norm"], first["norm"]) for one in result)
    k_apart = max(relative(result[rank + 1]["k"], result[rank]["k"]) for rank in (0, 2))
    gathers, scatters, reduces = first["calls"]
    finite = " ".join(str(one["finite"]) for one in result)
    print(
        f"{lab_run.letter:3}{gathers:7}{scatters:9}{reduces:8}{off[0]:12.0e}{off[1]:9.0e}", end=""
    )
    print(f"{norm_off:9.0e}{norm_apart:9.0e}{k_apart:11.0e}   {finite}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# Below 1e-5 is rounding.
#
# - **First loss off**: only *padding* touches the forward. One rank has two words too many.
# - **Scatters missing**: *gather*. All ranks agree on a wrong gradient, because the norms' partial gradients are
#   wrong.
# - **One reduce missing, norms apart**: *norms*. Each rank has the gradient of its rows.
# - **One reduce missing, keys apart**: *heads*. The norms' gradients are right.
#
# Two checks find them: gradients against one process (not outputs: three of four are right there), and a checksum
# over ranks of all replicated tensors.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **Without tensor parallelism.** It shards the activations that TP replicates, over the same ranks. Beyond them,
#   for long sequences, there is context parallelism (lesson 09), which shards attention by positions too.
# - **Sequences that n does not divide**, such as one token in serving: use plain TP there.
# - **Full recomputation where memory suffices**: a third more arithmetic, and half more of TP's messages. Use sharded
#   rows first, then selective recomputation if scores are stored, and full recomputation for as few blocks as
#   possible.
#
# ## The table that grows
# Activations and bytes are from the training above; code is the lines of the library added to lesson 05's. There is
# no column of exposed time: as in lesson 05, each message separates two computations of which one needs the other.

# %%
from course_lib.view import code_lines

rows_code = code_lines(sp.enter, sp.leave, sp.own_rows, sp.sum_gradients)
again_code = code_lines(sp._Again, sp._EnterAgain, sp._GatheringLinear, sp.GatherAgain)
code = {"tensor": 0, "rows, kept": rows_code, "rows, again": rows_code + again_code}
print(f"{'a rank, one step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}{'code':>6}")
print(f"{'one process':18}{one_process['state'].total:11,}{one_process['activations']:13,}{0:12}")
for way, result in runs.items():
    one, sent = result[0], int(result.ledgers[0].wire_bytes())
    print(f"{way:18}{one['state'].total:11,}{one['activations']:13,}{sent:12,}{code[way]:6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: false.** Either the bytes are tensor parallelism's and the inputs of the regions are replicated, or all
# is divided by n and the blocks send 1.25 times as much.
#
# **Claim 2: only if attention stores its scores, and the sequence is long.** Scores were a third of a block's saved
# activations here, and are 70 % of them at GPT-3's size by the paper's count. A fused kernel stores none, and
# selective recomputation saves a log-sum-exp per row.

# %%
kept_by_way = {way: round(shares[4, way], 2) for way in WAYS}
print(f"shares kept on 4 ranks: {kept_by_way}; your vote: {vote_1}")
print(f"selective spares {spared:.2f} of a fused block; your vote: {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# GPT-3's size in bfloat16, eight ranks, one sequence of 2,048 tokens; everything computed from the library's formulas.


# %%
def cheat_sheet(n=8):
    config = tiny_config(
        family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152,
        max_seq_len=2048, vocab=50304, dtype=torch.bfloat16,
    )  # fmt: skip
    shape = config, 1, 2048
    print("enter: all-gather | reduce-scatter      leave: reduce-scatter | all-gather")
    print("then one all-reduce of gradients of norms, biases after a sum, positions\n")
    print(f"{'':13}{'kept a block, MB':>18}{'of one':>8}{'sent a step, GB':>17}{'with full':>11}")
    one = saved_by_block(*shape).total
    for way in WAYS:
        kept = kept_formula(config, way, *shape[1:], n)
        sent = []
        for forwards in (1, 2):
            if way == "tensor":
                sent.append(formulas.wire_bytes(*shape, n, forwards=forwards))
                continue
            again = way == "rows, again"
            rows = sp.wire_bytes(*shape, n, again=again, forwards=forwards)
            sent.append(rows + formulas.loss_bytes(config, 2048, n))
        gigabytes = [float(each) / 1e9 for each in sent]
        print(
            f"{way:13}{kept / 1e6:18.0f}{kept / one:8.2f}{gigabytes[0]:17.1f}{gigabytes[1]:11.1f}"
        )
    x_bytes = 2048 * config.hidden * 2
    print(
        f"\nfull recomputation keeps {x_bytes / 1e6:.0f} MB a block, {x_bytes / n / 1e6:.1f} of rows"
    )
    logits = wire("all_gather", 2048 * tp.layers.padded_rows(config.vocab, n) * 4, n)
    loss = formulas.loss_bytes(config, 2048, n)
    print(
        f"loss: {float(loss) / 1e6:.2f} MB; gathering float32 logits {float(logits) / 1e6:.0f} MB"
    )


cheat_sheet()

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/06_sequence_parallelism.ipynb), each on its own: rows, bytes and words by hand (15 minutes);
# and on real ranks how rows enter a region (5), the sum that norms need (10), a loss that never gathers logits (20), and a
# region between rows in raw PyTorch (15).

# %% course={"role": "given"}
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib import comm

# %% [markdown] course={"ex": "06-1"}
# ## 06-1 Rows, bytes and words, by hand
# Fifteen minutes, on paper; no code.
#
# Two ranks, four positions of one feature; rank 0 has the first two rows outside the regions.
#
# - `rows`: rank 0's partial sum that leaves a region is [1, 2, 3, 4], rank 1's [10, 20, 30, 40]. The rows that each
#   rank has then: [[rank 0], [rank 1]]
# - `dx`: in backward, rank 0 has the gradient [1, 1, 2, 2] of the region's input, rank 1 [3, 3, 4, 4]. The gradient
#   that each rank has after the backward of enter: [[rank 0], [rank 1]]
# - `norm parts`: y = w · u comes before that enter, where w is one weight of a norm and u = [1, 2, 1, -2] its input,
#   by position. The gradient of w that each rank has by itself, two numbers
# - `norm`: the gradient that w needs
#
# A layer on four ranks, forward and backward; x has 1,000 bytes.
#
# - `bytes`: the bytes that a rank sends: [tensor parallelism, sharded rows kept, sharded rows gathered again]
# - `full`: with tensor parallelism and full recomputation
# - `kept`: Korthikanti's GPT layer without scores, eight ranks, in units of s·b·h: [tensor, rows kept, rows again]
#
# Four words on two ranks. A token's e^(z - m) are 1 and 1/2 on rank 0, 1/4 and 1/4 on rank 1; its target is the third word.
#
# - `dz`: the gradient of its loss by its logits: [[rank 0], [rank 1]]
#
# Eight query heads, two heads of keys and values, four ranks.
#
# - `heads`: the number, from 0, of the key and value head on each rank

# %% course={"ex": "06-1", "role": "answer"}
# BEGIN SOLUTION
rows = {
    "rows": [[11, 22], [33, 44]],
    "dx": [[4, 4], [6, 6]],
    "norm parts": [12, -6],
    "norm": 6,
    "bytes": [6000, 6000, 7500],
    "full": 9000,
    "kept": [13, 7.75, 4.25],
    "dz": [[0.5, 0.25], [-0.875, 0.125]],
    "heads": [0, 0, 1, 1],
}
# STUB
# rows = {
#     "rows": None,  # two lists of two numbers, such as [[1, 2], [3, 4]]
#     "dx": None,
#     "norm parts": None,  # two numbers
#     "norm": None,
#     "bytes": None,  # three numbers
#     "full": None,
#     "kept": None,  # three numbers
#     "dz": None,
#     "heads": None,  # four numbers
# }
# END SOLUTION

# %% [markdown] course={"ex": "06-1", "role": "answer"}
# - Norm: rank 0 has 4 · 1 + 4 · 2, rank 1 6 · 1 - 6 · 2.
# - An all-reduce sends 1,500, a gather or a scatter 750: 4 all-reduces; 4 gathers and 4 scatters; 6 gathers and 4 scatters.
#   With full recomputation 6 all-reduces.
# - 10 + 24/8; 4 + 30/8; 34/8.
# - The sum is 2: softmax is 1/2, 1/4 | 1/8, 1/8; the target's has 1 less.

# %% course={"ex": "06-1", "role": "check"}
from course_lib.grading import check

check("06-1", rows)

# %% [markdown] course={"ex": "06-2"}
# ## 06-2 Rows enter a region
# A column linear whose input is sharded by rows. Write the one line that returns y of all positions on this rank's
# features, such that autograd computes the right gradients of the rows and of the weight.
#
# The check looks at outputs and gradients on one to three ranks and on two pairs of ranks at once, and at one
# all-gather forward and one reduce-scatter backward. You may use the operators of `comm`; `sp.enter` refuses.


# %% course={"ex": "06-2", "role": "answer"}
def column_on_rows(x_BScD, weight_FtD, axis):
    """y (B, S, F/n) of all positions.

    ``x_BScD`` (B, S/n, D) are this rank's rows, ``weight_FtD`` (F/n, D) its part of the weight.
    """
    # BEGIN SOLUTION
    return F.linear(comm.gather_from_sequence(x_BScD, axis, 1), weight_FtD)
    # END SOLUTION


# %% course={"ex": "06-2", "role": "check"}
from course_lib.grading import check

check("06-2", column_on_rows)

# %% [markdown] course={"ex": "06-3"}
# ## 06-3 The sum that norms need
# After backward with sharded rows, replicated parameters have the gradient of this rank's rows only. Reduce their
# `.grad` fully. `comm.shard_spec(p)` says how the ranks of the axis shard a parameter, or returns None if it is
# replicated. The gradient of a parameter with a spec is fully reduced already, also where its dim is None (experts).
#
# The check looks at the gradients of both kinds on one to three ranks and on two pairs of ranks at once, and at one
# all-reduce for all of them. Gradients may be non-contiguous.
# `comm.all_reduce(x, axis)` returns the sum; `comm.sum_gradients` and `sp.sum_gradients` refuse.


# %% course={"ex": "06-3", "role": "answer"}
def sum_partial(parameters, axis):
    """Sums the ``.grad`` of what is not cut over ``axis``; returns nothing.

    ``parameters`` is a list; each has a ``.grad``, and ``comm.shard_spec`` knows what is cut.
    """
    # BEGIN SOLUTION
    whole = [p for p in parameters if comm.shard_spec(p) is None]
    flat = torch.cat([p.grad.flatten() for p in whole])
    total = comm.all_reduce(flat, axis)
    for p, part in zip(whole, total.split([p.numel() for p in whole]), strict=True):
        p.grad = part.view_as(p)
    # END SOLUTION


# %% course={"ex": "06-3", "role": "check"}
from course_lib.grading import check

check("06-3", sum_partial)

# %% [markdown] course={"ex": "06-4"}
# ## 06-4 A loss that never gathers logits
# Cross-entropy of T tokens as a `torch.autograd.Function`, called as `VocabLoss.apply(z_TVt, targets_T, axis)`. Rank
# r has the logits of words r·w to r·w + w - 1, where w is the width of its `z_TVt`; the last rank's may be padding,
# minus infinity. Targets are word ids, all of them on every rank, never padding.
#
# Forward returns the loss of each token, (T,), on every rank. Backward receives a gradient for each of them, and runs
# once.
#
# The check looks at losses and the gradient of each rank's logits on one to three ranks and on two pairs of ranks at
# once. Logits may be several hundred above or below 0, so that their exponential is infinite or 0. Forward may send
# three numbers per token, in all-reduces, backward nothing. You may use `comm.all_reduce` and `comm.all_reduce_max`;
# `tp.loss_sum` refuses.


# %% course={"ex": "06-4", "role": "answer"}
class VocabLoss(torch.autograd.Function):
    """Losses (T,) from this rank's logits (T, V'/n)."""

    @staticmethod
    def forward(ctx, z_TVt, targets_T, axis):
        """Returns the losses; keeps in ``ctx`` what backward will need."""
        # BEGIN SOLUTION
        words = z_TVt.shape[1]
        top_T = comm.all_reduce_max(z_TVt.amax(1), axis)
        exp_TVt = (z_TVt - top_T[:, None]).exp()
        sum_T = comm.all_reduce(exp_TVt.sum(1), axis)
        local_T = targets_T - axis.rank * words
        mine_T = (local_T >= 0) & (local_T < words)
        rows_T = local_T.masked_fill(~mine_T, 0)
        own_T = z_TVt.gather(1, rows_T[:, None])[:, 0].masked_fill(~mine_T, 0.0)
        target_T = comm.all_reduce(own_T, axis)
        ctx.save_for_backward(exp_TVt / sum_T[:, None], rows_T, mine_T)
        return sum_T.log() + top_T - target_T
        # END SOLUTION

    @staticmethod
    def backward(ctx, dloss_T):
        """Returns the gradient of the logits, and None for targets and axis."""
        # BEGIN SOLUTION
        softmax_TVt, rows_T, mine_T = ctx.saved_tensors
        dz_TVt = softmax_TVt.clone()
        dz_TVt.scatter_add_(1, rows_T[:, None], -mine_T[:, None].to(dz_TVt.dtype))
        return dz_TVt * dloss_T[:, None], None, None
        # END SOLUTION


# %% course={"ex": "06-4", "role": "check"}
from course_lib.grading import check

check("06-4", VocabLoss)

# %% [markdown] course={"ex": "06-5"}
# ## 06-5 A region between rows in raw PyTorch
# One forward and backward of y = relu(x Aᵀ) Bᵀ with `torch.distributed` alone: `course_lib` refuses. The default
# group exists. Outside, the T tokens are sharded (rank 0 has the first T/n rows of x, y and their gradients); inside,
# the features are sharded. `dist.all_gather(parts, rows)` fills a list of n tensors, `dist.reduce_scatter(rows,
# parts)` takes one. You need no autograd function: `torch.autograd.grad` gives the gradients of this rank's partial
# sum.
#
# The check looks at the four results on one to four ranks. No input may be overwritten, and a rank sends no more than
# two gathers of rows and two reduce-scatters: save x for backward.


# %% course={"ex": "06-5", "role": "answer"}
def region_step(x_TcD, weight_in, weight_out, dy_TcD):
    """(y, dx, gradient of weight_in, gradient of weight_out) of this rank.

    ``x_TcD`` and ``dy_TcD`` (T/n, D) are its rows, y and dx have the same shape. ``weight_in``
    (F/n, D) and ``weight_out`` (D, F/n) are its features of A and B.
    """
    # BEGIN SOLUTION
    n = dist.get_world_size()

    def gather(rows):
        parts = [torch.empty_like(rows) for _ in range(n)]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    def scatter(part):
        rows = torch.empty(len(part) // n, part.shape[1])
        dist.reduce_scatter(rows, list(part.contiguous().chunk(n)))
        return rows

    whole = gather(x_TcD).requires_grad_()
    a, b = (weight.clone().requires_grad_() for weight in (weight_in, weight_out))
    part = F.relu(whole @ a.mT) @ b.mT
    y = scatter(part.detach())
    dx_part, d_in, d_out = torch.autograd.grad(part, [whole, a, b], gather(dy_TcD))
    return y, scatter(dx_part), d_in, d_out
    # END SOLUTION


# %% course={"ex": "06-5", "role": "check"}
from course_lib.grading import check

check("06-5", region_step)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Why may a norm work on rows, and attention may not?
#
# <details><summary>Answer</summary>
# A norm treats each position by itself. Attention at one position reads the keys and values of all earlier positions.
# </details>
#
# **2.** Somebody quotes "the bytes of tensor parallelism, and 34/t". What do you answer?
#
# <details><summary>Answer</summary>
# Those are two variants. With the bytes of tensor parallelism the inputs of the regions are replicated: 34/t + 4(1 -
# 1/t). With 34/t x is gathered again in backward: 1.25 times the bytes.
# </details>
#
# **3.** Outputs are right, the loss falls, and a reloaded checkpoint continues a little worse. What do you look at?
#
# <details><summary>Answer</summary>
# Checksums of replicated weights over tp: norms and biases after row linears. If their gradients are not summed,
# ranks drift apart, and the checkpoint has one rank's weights.
# </details>
#
# **4.** Your attention is fused. Does selective recomputation help?
#
# <details><summary>Answer</summary>
# It saves a log-sum-exp per row. The kernel recomputes by itself. For more memory: full recomputation of some blocks.
# </details>
#
# **5.** 8 ranks, 8,192 tokens, 128,000 words. What does a rank send for the loss, and what if logits were gathered?
#
# <details><summary>Answer</summary>
# Three all-reduces of 8,192 float32: 3 · 2 · 7/8 · 32,768 = 172,032 bytes. Gathered in float32: 7 · 8,192 · 16,000 · 4 = 3.7
# GB.
# </details>
#
# ## Sources and what next
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*,
#   [arXiv:2205.05198](https://arxiv.org/abs/2205.05198): sections 4 and 5 are this lesson.
# - Chen et al. 2016, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174): recomputation.
# - Shoeybi et al. 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053): the vocabulary and its loss.
# - Dao et al. 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): attention that stores no scores.
# - Ainslie et al. 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245): grouped queries.
#
# Next: lesson 07 splits the model between its layers.
