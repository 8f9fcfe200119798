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
#     lesson: '05'
# ---

# %% [markdown]
# # 05 Tensor parallelism: one layer, sharded over ranks
#
# *50 minutes to read and run, 60 to build.* Until now every rank computed full layers. Here a single matrix is
# sharded: each rank multiplies with its shard, and one sum gives the full result. You derive the pair of operators
# behind it, count the bytes that a layer sends, see why its messages cannot hide, and break it. You need lessons 00
# and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Tensor parallelism over n ranks divides a rank's memory by n.*
# 2. *Tensor parallelism communicates often, but that can be overlapped with computation.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# An MLP is two matrices with a nonlinearity between: y = GELU(x A) B. Two ranks are to divide the work on the *same*
# rows x. Megatron's answer: A by columns, B by rows.
#
# ```
#                 A = [ A0 | A1 ]            B = [ B0 ]
#                                                [ B1 ]
#  rank 0   x --> x A0 --> GELU --> h0 --> h0 B0 --+
#                                                  +--> all-reduce --> y on both
#  rank 1   x --> x A1 --> GELU --> h1 --> h1 B1 --+
# ```
#
# h0 and h1 are different features. Neither rank needs the features of the other, because row k of B is only
# multiplied with feature k. So the ranks send nothing between the two matrices, and the results are partial sums.
# What must they send in backward?

# %% [markdown]
# ## Predict
# The model of this lesson is a GPT: LayerNorm, biases, an MLP with GELU. Its blocks run on four ranks. Fill in what you can.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 64, 4
CONFIG = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=SEQ)
X_BYTES = BATCH * SEQ * CONFIG.hidden * 4  # an activation x_BSD in float32

print(f"{CONFIG.layers} blocks, hidden {CONFIG.hidden}; x has {X_BYTES:,} bytes")

# %%
predicted_calls = None  # all-reduces of one block, forward and backward together
predicted_bytes = None  # bytes that a rank sends for all blocks in a step
predicted_saved = None  # activations that a rank saves of a block, as a fraction of one process's
predicted_hidden = None  # fraction of the communication that hides behind computation, 0 to 1
predicted_serving = None  # all-reduces of all blocks for one token served

# %% [markdown]
# ## A pair by hand
# Two ranks, x = [1, 2], no nonlinearity yet:
#
# $$A = \begin{pmatrix} 2 & -1 \\ 1 & 3 \end{pmatrix} \qquad B = \begin{pmatrix} 1 & 0 \\ 2 & 1 \end{pmatrix} \qquad xA = [4, 5] \qquad y = xAB = [14, 5]$$
#
# Rank 0 has column [2, 1] and row [1, 0]: its h is 4 and its partial sum of y is [4, 0]. Rank 1: 5, and [10, 5]. The
# sum is [14, 5].
#
# Backward from dy = [1, 1]. Every rank needs dy, and has it. Rank 0: dh = dy · [1, 0] = 1, and dx = 1 · [2, 1]. Rank
# 1: dh = 3, dx = 3 · [-1, 3]. But x went to *both*, so its gradient is the sum: [2, 1] + [-3, 9] = [-1, 10]. That is
# the second message. The gradients of A's columns and B's rows need none, because each rank computes its own in full.

# %%
import torch

from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh

A = torch.tensor([[2.0, -1.0], [1.0, 3.0]])
B = torch.tensor([[1.0, 0.0], [2.0, 1.0]])


def by_hand():
    axis = make_mesh(tp=2).tp
    column, row = A[:, [axis.rank]], B[[axis.rank]]
    x, dy = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]])
    h = x @ column
    y = comm.all_reduce(h @ row, axis)
    own_dx = dy @ row.T @ column.T
    dx = comm.all_reduce(own_dx, axis)
    values = {"h": h, "partial": h @ row, "y": y, "own dx": own_dx, "dx": dx}
    return {name: tensor.flatten().tolist() for name, tensor in values.items()}


for rank, values in enumerate(run(by_hand, n=2)):
    print(f"rank {rank}: {values}")

# %% [markdown]
# ## The pair of operators, f and g
# For autograd the two messages must be part of the graph. Each operator sends in one direction only:
#
# | | forward | backward | where |
# |---|---|---|---|
# | f, `comm.copy_to` | identity | all-reduce | x enters the region in which ranks divide the work |
# | g, `comm.reduce_from` | all-reduce | identity | partial sums leave it |
#
# g's backward sends nothing: y is the sum of the partial sums, so dy is the gradient of *each* of them. f is the
# transpose of g.

# %%
from course_lib.view import show_source

show_source(comm.copy_to, comm.reduce_from)


def by_autograd(enters):
    axis = make_mesh(tp=2).tp
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    entered = comm.copy_to(x, axis) if enters else x
    h = entered @ A[:, [axis.rank]]
    y = comm.reduce_from(h @ B[[axis.rank]], axis)
    y.sum().backward()
    return {"y": y.flatten().tolist(), "dx": x.grad.flatten().tolist()}


print()
for enters in (True, False):
    print(f"{'f and g:' if enters else 'g alone:':9}", *run(by_autograd, enters, n=2))

x = torch.tensor([[1.0, 2.0]], requires_grad=True)
(x @ A @ B).sum().backward()
assert run(by_autograd, True, n=2)[1]["dx"] == x.grad.flatten().tolist()

# %% [markdown]
# Look at `dx` of g alone: outputs are right, gradients are partial and differ from rank to rank. No error is raised.
#
# ## Why columns first
# The other order is also a correct pair for linear maps: A by rows, B by columns. Then x A is a sum over ranks, and
# GELU follows it:

# %%
import torch.nn.functional as F

a, b = torch.tensor([1.0, -2.0]), torch.tensor([-3.0, 4.0])
print("gelu(a) + gelu(b):", (F.gelu(a) + F.gelu(b)).tolist())
print("gelu(a + b):      ", F.gelu(a + b).tolist())

# %% [markdown]
# A function that is not linear needs fully reduced features. By rows first, the all-reduce would come *before* GELU,
# on the F features between A and B instead of x's D (here F = 4 D), and every rank needs all of them. By columns,
# each feature is computed in full on one rank.
#
# ## Build it
# Each half is built from the `nn.Linear` of the single-process model, with the same weights. Note torch's layout: a
# linear stores its weight as (out, in), so "columns of A" are rows of that tensor. Names end in dims: x_BSD is batch,
# sequence, features. A lower-case letter divides: `W_FtD` is F/t by D on t ranks.

# %%
from course_lib import tp

show_source(tp.ColumnLinear.forward, tp.RowLinear.forward)

# %% [markdown]
# The column's bias is sharded with its features. The row's bias is replicated and added *after* the sum: before it, n
# ranks would add it n times.
#
# Does it equal the MLP of one process? Output, the gradient of x, and the gradients of all shards:

# %%
from course_lib.model.layers import MLP

torch.manual_seed(0)
reference_mlp = MLP(CONFIG)
x_BSD, dy_BSD = torch.randn(2, BATCH, SEQ, CONFIG.hidden)


def mlp_on_ranks():
    mesh = make_mesh(tp=RANKS)
    up = tp.ColumnLinear(reference_mlp.fc_in, mesh.tp, enter=comm.copy_to)
    down = tp.RowLinear(reference_mlp.fc_out, mesh.tp)
    x = x_BSD.clone().requires_grad_()
    y = down(F.gelu(up(x)))
    forward = mesh.ledger.calls()
    y.backward(dy_BSD)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "columns": up.weight.grad,
        "rows": down.weight.grad,
        "calls": (forward, mesh.ledger.calls() - forward),
    }


x = x_BSD.clone().requires_grad_()
y = reference_mlp(x)
y.backward(dy_BSD)
result = run(mlp_on_ranks, n=RANKS)
for one in result:
    torch.testing.assert_close(one["y"], y.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(one["dx"], x.grad, atol=1e-4, rtol=1e-4)
columns = torch.cat([one["columns"] for one in result], dim=0)
rows_of_b = torch.cat([one["rows"] for one in result], dim=1)
torch.testing.assert_close(columns, reference_mlp.fc_in.weight.grad, atol=1e-3, rtol=1e-4)
torch.testing.assert_close(rows_of_b, reference_mlp.fc_out.weight.grad, atol=1e-3, rtol=1e-4)
print("output and all gradients equal; calls forward, backward:", result[0]["calls"])
print("shards of rank 0:", [list(result[0][name].shape) for name in ("columns", "rows")])

# %% [markdown]
# ## Attention by heads
# Heads are independent until the output projection o. So q, k and v are sharded by columns, with full heads on each
# rank, softmax stays inside the rank, and o is sharded by rows: the same pair. The sharding of a model is a table,
# from module names to their parallel replacements:

# %%
BLOCKS = {key: entry for key, entry in tp.GPT.items() if key.startswith("blocks.")}
for key, entry in BLOCKS.items():
    print(f"{key:20} {entry.__name__}")
print()
show_source(tp.plan.enters, comm.Region.columns)

# %% [markdown]
# Attention and MLP call `columns` with the linears that read x. Under tensor parallelism x enters there by f, once for q,
# k and v together: the rank adds their three gradients of x and sends the sum once. A rank must hold full heads, so n
# must divide their number:

# %%
from course_lib.launch import RankError


def six_heads_on_four():
    config = tiny_config(family="gpt", hidden=96, heads=6, kv_heads=6, ffn=384)
    tp.parallelize(build_model(config), make_mesh(tp=4).tp)


try:
    run(six_heads_on_four, n=4)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## Measure: train with sharded blocks
# `BLOCKS` replicates embedding and LM head; lesson 06 shards the vocabulary. All ranks of a tensor-parallel group
# read the *same* rows: the batch is not divided. Four steps, in one process and on ranks:

# %%
from fractions import Fraction

from course_lib.data import batch
from course_lib.trace import SavedActivations, state_bytes


def train(n, steps=STEPS):
    mesh = make_mesh(tp=n)
    model = tp.parallelize(build_model(CONFIG, seed=0), mesh.tp, plan=BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        mesh.ledger.clear()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(tokens, targets)
            forward = mesh.ledger.calls()
            (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    specs = {name: comm.shard_spec(p) for name, p in model.named_parameters()}
    dims = {name: spec.dim if spec else None for name, spec in specs.items()}
    return {
        "losses": losses,
        "calls": (forward, mesh.ledger.calls() - forward),
        "weights": {name: (p.detach(), dims[name]) for name, p in model.named_parameters()},
        "state": state_bytes(model, optimizer),
        "activations": saved.peak,
    }


def full_weights(result):
    """Concatenate the shards of all ranks; replicated weights must be equal on all ranks."""
    weights = {}
    for name, (mine, dim) in result[0]["weights"].items():
        shards = [one["weights"][name][0] for one in result]
        assert dim is not None or all((shard - mine).abs().max() < 1e-4 for shard in shards), name
        weights[name] = mine if dim is None else torch.cat(shards, dim)
    return weights


def blocks_bytes(n):
    """8 L (n-1)/n B s h b: four all-reduces of x per layer, each of which sends 2(n-1)/n of it."""
    return 8 * CONFIG.layers * Fraction(n - 1, n) * X_BYTES


runs = {n: run(train, n, n=n) for n in (1, 2, 4)}
truth = full_weights(runs[1])
print(
    f"{'ranks':5}{'last loss':>11}{'calls':>10}{'bytes per rank':>16}{'formula':>12}{'weights off by':>16}"
)
for n, result in runs.items():
    own, one = result.ledgers[0], result[0]
    ours = full_weights(result)
    apart = max((ours[name] - weight).abs().max().item() for name, weight in truth.items())
    calls = "{} + {}".format(*one["calls"])
    sent = int(own.wire_bytes())
    print(
        f"{n:5}{one['losses'][-1]:11.4f}{calls:>10}{sent:16,}{int(blocks_bytes(n)):12,}{apart:16.1e}"
    )
    assert own.wire_bytes() == blocks_bytes(n)
    assert abs(one["losses"][-1] - runs[1][0]["losses"][-1]) < 1e-4
    assert apart < 1e-3
per_block = sum(runs[4][0]["calls"]) // CONFIG.layers
print(
    f"\n{per_block} all-reduces per block; your predictions: {predicted_calls} calls, {predicted_bytes} bytes"
)

# %% [markdown]
# Two forward and two backward in every layer. Norms and the row's biases are replicated, and no rank synchronizes
# their gradients: all ranks compute the same, because f has fully reduced dx before it reaches the norm.
#
# A study note gives TP's volume per layer as "4 × B × S × H". That is the *payload* in elements; a rank sends
# 2(n-1)/n times that.
#
# ## What is sharded and what is replicated
# Inside a region a rank saves its shard of the activations for backward. Outside, between g and the next f, every
# rank has all of x, and saves in full what norms and column linears need.

# %%
from course_lib.recompute import saved_by_block
from course_lib.tp import formulas


def saved_by_one_block(n):
    mesh = make_mesh(tp=n)
    model = tp.parallelize(build_model(CONFIG), mesh.tp, plan=BLOCKS)
    x = x_BSD.clone().requires_grad_()
    with SavedActivations(model) as saved:
        y = model.blocks[0](x * 1, torch.arange(SEQ))
        assert y.requires_grad
    return saved.peak


reference = saved_by_block(CONFIG, BATCH, SEQ)
print("one process, bytes of a block:")
print(
    f"  in full on every rank: norms and residuals {reference.outside:,}, inputs of columns {reference.entered:,}"
)
print(
    f"  divided by n:          inside {reference.inside:,}, keys and values {reference.keys_values:,}\n"
)
print(f"{'ranks':5}{'measured':>12}{'formula':>12}{'fraction':>10}")
for n in (1, 2, 4):
    measured = run(saved_by_one_block, n, n=n)[0]
    formula = formulas.saved_per_block(CONFIG, BATCH, SEQ, n)
    print(f"{n:5}{measured:12,}{formula:12,}{measured / reference.total:10.2f}")
    assert measured == formula
limit = (reference.outside + reference.entered) / reference.total
print(f"however many ranks: more than {limit:.2f}; your prediction for 4: {predicted_saved}")

# %%
from course_lib.view import memory_plot

memory_plot(
    {f"{n} rank" + "s" * (n > 1): result[0]["state"] for n, result in runs.items()},
    activations={f"{n} rank" + "s" * (n > 1): one[0]["activations"] for n, one in runs.items()},
    title="What a rank stores: weights are divided by n, activations only in part",
)

# %% [markdown]
# On four ranks the yellow bars (activations) are still half as tall. With more ranks they approach a floor: the
# activations that every rank stores in full. (Weights stay above a quarter, because the vocabulary is replicated
# here.) Lesson 06 shards this floor too.
#
# ## A first look: when does TP send more than DP?
# For a layer of hidden size h, DP all-reduces the gradients of about 12h² parameters, whatever the tokens; TP four times
# the activations of T tokens, whatever the parameters. Equal at 4 T h = 12 h²: T = 3h tokens in a replica. Lesson 12 derives
# it for whole meshes; here is one block, counted.

# %%
from course_lib import dp

LONG = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=256, layers=1)


def one_block(tokens, by_tensor):
    mesh = make_mesh(tp=RANKS) if by_tensor else make_mesh()
    model = build_model(LONG)
    if by_tensor:
        tp.parallelize(model, mesh.tp, plan=BLOCKS)
    y = model.blocks[0](
        torch.randn(1, tokens, LONG.hidden, requires_grad=True), torch.arange(tokens)
    )
    y.sum().backward()
    if not by_tensor:
        dp.Bucketed(model.blocks.parameters(), mesh.dp, 10**9).finish()


print(f"h = {LONG.hidden}, 3h = {3 * LONG.hidden}; bytes that a rank sends for one block")
print(f"{'tokens':>7}{'TP':>10}{'DP':>10}")
for tokens in (64, 128, 192, 256):
    sent = [run(one_block, tokens, kind, n=RANKS).ledgers[0].wire_bytes() for kind in (True, False)]
    print(f"{tokens:7}{int(sent[0]):10,}{int(sent[1]):10,}")

# %% [markdown]
# At 3h they are within a few percent; biases and norms are the rest. Above it TP sends more, in every layer. Large
# runs are there: 131,072 tokens per replica in Llama 3 405B, where 3h is 49,152.
#
# ## See it: messages that cannot hide
# A paced step through two blocks, first with the four ranks in one node, then in two nodes of two. Compute is slept to 10
# ms forward and 20 ms backward for each half of a block; the links are emulated. Look between the compute boxes.

# %%
from itertools import cycle

from course_lib.comm.operators import Region
from course_lib.mesh import Conditions, Link, Links
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

PACE = {"F": 0.010, "B": 0.020}
FAST, SLOW = Link(alpha=0.0001, beta=1e9), Link(alpha=0.0005, beta=25e6)
NODES = {
    "one node": Links(inside=FAST, between=SLOW, ranks_per_node=4),
    "two nodes": Links(inside=FAST, between=SLOW, ranks_per_node=2),
}
SHOWN = tiny_config(
    family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=SEQ, layers=2
)


def timed_region(mesh):
    """f and g, with a compute span from where x enters to where the partial sums leave, and back."""
    names, running = cycle(["attn", "mlp"]), []

    def begin(op, half):
        span = mesh.compute(op, label=half)
        span.__enter__()
        running.append((span, half))

    def end():
        span, half = running.pop()
        span.__exit__(None, None, None)
        return half

    def enter(x, axis):
        x = comm.copy_to(x, axis)
        x.register_hook(lambda gradient: end() and None)  # before f's all-reduce
        begin("F", next(names))
        return x

    def leave(partial, axis):
        half = end()
        y = comm.reduce_from(partial, axis)
        y.register_hook(lambda gradient: begin("B", half))
        return y

    return Region(enter, leave, tp.REGION.rows)


def paced_step():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(SHOWN), mesh.tp, timed_region(mesh), BLOCKS)
    for _ in range(2):  # the first step warms up
        comm.barrier(mesh.tp)
        mesh.trace.clear()
        y = x_BSD.clone().requires_grad_()
        for block in model.blocks:
            y = block(y, torch.arange(SEQ))
        y.backward(dy_BSD)


paced = {where: run(paced_step, n=RANKS, pace=PACE, links=links) for where, links in NODES.items()}


def paced_picture(where):
    title = f"Tensor parallelism, four ranks in {where}: every all-reduce is waited for"
    return timeline(paced[where].traces, title=title, conditions=Conditions(PACE, NODES[where]))


paced_picture("one node")

# %%
paced_picture("two nodes")

# %% [markdown]
# For a closer look open `tp.json`, which is in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "tp.json"
perfetto(paced["two nodes"].traces, path, title="tensor parallelism on two nodes")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# Most of the gray is waiting (the rest is norms and residuals, outside the boxes). g is between this half and the
# next: the norm needs the sum. In DP only the optimizer waits for a gradient, so the ranks send it while backward
# continues. The same slow link carries DP's buckets below, of four blocks (the best of three runs):

# %%
from course_lib.trace.blocks import MeasuredBlocks

BLOCK_PACE = {op: 2 * seconds for op, seconds in PACE.items()}  # attention and MLP


def data_parallel_step():
    mesh = make_mesh()
    model = build_model(CONFIG)
    sync = dp.Overlapped(model.blocks.parameters(), mesh.dp, 50_000)
    with MeasuredBlocks(model.blocks, mesh.trace, mesh.conditions.pace):
        for _ in range(2):
            comm.barrier(mesh.dp)
            mesh.trace.clear()
            y = x_BSD.clone().requires_grad_()
            for block in model.blocks:
                y = block(y, torch.arange(SEQ))
            y.backward(dy_BSD)
            sync.finish()


def expected(link):
    """Four all-reduces per block, each 2(n-1) alphas and 2(n-1)/n of x."""
    each = 2 * (RANKS - 1) * link.alpha + 2 * (RANKS - 1) / RANKS * X_BYTES / link.beta
    return 4 * SHOWN.layers * each


def measured(traces):
    return summarize(read(traces)[0])


slow = {"pace": BLOCK_PACE, "links": NODES["two nodes"]}
tries = [run(data_parallel_step, n=RANKS, **slow).traces for _ in range(3)]
best = min(tries, key=lambda traces: measured(traces).exposed)
print(f"{'ms':16}{'formula':>9}{'communication':>15}{'hidden':>8}{'fraction':>10}")
lines = {"TP, one node": FAST, "TP, two nodes": SLOW, "DP, two nodes": None}
exposed = {}
for name, link in lines.items():
    seen = measured(paced[name[4:]].traces if link else best)
    formula = f"{1e3 * expected(link):9.0f}" if link else f"{'':9}"
    hidden = seen.comm - seen.exposed
    exposed[name] = seen.exposed
    print(f"{name:16}{formula}{1e3 * seen.comm:15.0f}{1e3 * hidden:8.0f}{hidden / seen.comm:10.2f}")
print(f"your prediction: {predicted_hidden} of TP's hides")

# %% [markdown]
# The measured times are longer than the formula because gloo adds its own time and every rank waits for the slowest
# one. Look at `fraction`: TP hides none of its messages, and DP hides all messages that it sends before backward ends.
# So TP stays inside a node, where links are fast, and DP, which can wait, crosses nodes.
#
# ## Second step: split the product, and it can hide
# The all-reduce waits for the full product. Split x into blocks of rows, and the sum of one block can be sent while
# the next block is multiplied. The library does this where activations are sharded by rows between the regions
# (`sp.REGION`, lesson 06): there g is a reduce-scatter and f an all-gather, and both become rings between matrix
# products.

# %%
from course_lib import sp
from course_lib.tp.overlap import ring_scatter

show_source(ring_scatter)


def forward_only(plan):
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(CONFIG), mesh.tp, sp.REGION, plan)
    y = x_BSD.chunk(RANKS, 1)[mesh.tp.rank]
    for block in model.blocks:
        y = block(y, torch.arange(SEQ))
    return y.detach()


print()
found = {}
for name, plan in {"collectives": BLOCKS, "rings": tp.overlapped(BLOCKS)}.items():
    found[name] = result = run(forward_only, plan, n=RANKS)
    ops = [record.op for record in result.ledgers[0].select("tp")]
    counted = ", ".join(f"{ops.count(op)} {op}" for op in sorted(set(ops)))
    print(f"{name:12} {int(result.ledgers[0].wire_bytes()):,} bytes per rank: {counted}")
off = max((a - b).abs().max().item() for a, b in zip(*found.values(), strict=True))
assert off < 1e-4
print(f"outputs differ by {off:.0e}; plain TP forward sends {int(blocks_bytes(RANKS) / 2):,}")

# %% [markdown]
# The same bytes in smaller messages, each beside arithmetic. (`course bench tp` times it.) Even without a split, in
# backward f's all-reduce can run beside the *weight* gradients, for which no other operation waits. Megatron does so.
#
# ## Serving one token
# Without backward, two all-reduces per layer remain. With one token each is tiny:


# %%
def serve_one_token():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(CONFIG), mesh.tp, plan=BLOCKS)
    with torch.no_grad():
        model(torch.tensor([[72]]))


own = run(serve_one_token, n=RANKS).ledgers[0]
row = CONFIG.hidden * 4
each = own.wire_bytes() / own.calls()
print(f"{own.calls()} all-reduces of {row} bytes, 2 in each of {CONFIG.layers} layers;", end=" ")
print(f"a rank sends {int(own.wire_bytes()):,}; your prediction {predicted_serving}")
alphas, bytes_time = 2 * (RANKS - 1) * FAST.alpha, float(each) / FAST.beta
print(
    f"on the fast link each takes {1e3 * alphas:.2f} ms of alphas and {1e3 * bytes_time:.4f} ms of bytes"
)
assert own.calls() == 2 * CONFIG.layers

# %% [markdown]
# A token's time on the network is set by the *number* of messages. A note counts 192 for GPT-3's 96 layers, which is
# right. TP still produces a token sooner, because every rank reads only its shard of the weights. Replicas (DP) send
# nothing but make no token faster.

# %% [markdown]
# ## The same in PyTorch
# `parallelize_module` turns the weights into DTensors, sharded like ours. By default x enters q, k and v three times;
# `PrepareModuleInput` makes it one entry.

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from course_lib.grading.wire import WireCalls  # counts below comm and DTensor alike


def in_pytorch(enters_once):
    dist.init_process_group("gloo")
    devices = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"attn.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    plan |= {
        "ffn.fc_in": ColwiseParallel(),
        "attn.o": RowwiseParallel(),
        "ffn.fc_out": RowwiseParallel(),
    }
    if enters_once:
        here, inside = Replicate(), Replicate()
        plan["attn"] = PrepareModuleInput(
            input_layouts=(here, None), desired_input_layouts=(inside, None)
        )
    model = build_model(CONFIG, seed=0)
    for block in model.blocks:
        parallelize_module(block, devices, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        with WireCalls() as counter:
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    parameters = dict(model.named_parameters())
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in parameters.items()
    }
    dist.destroy_process_group()
    sent = sum(call.wire(RANKS) for call in counter.calls)
    return weights, len(counter.calls), sent


ours = full_weights(runs[4])
for enters_once in (False, True):
    weights, calls, sent = run(in_pytorch, enters_once, n=RANKS, init=False)[0]
    apart = max((weights[name] - ours[name]).abs().max().item() for name in ours)
    assert apart < 1e-3
    name = "x enters once" if enters_once else "each linear by itself"
    print(f"DTensor, {name:22}{calls:3} calls, {int(sent):,} bytes; weights off by {apart:.0e}")
print(f"{'ours':31}{sum(runs[4][0]['calls']):3} calls, {int(blocks_bytes(4)):,} bytes")

# %% [markdown]
# ## Break it and diagnose
# One run is correct (its cause is `"correct"`), four are faulty:
#
# - **no sum**: a row linear's partial sums are not summed
# - **no f**: x enters the MLPs without f, so that backward does not sum dx
# - **bias**: row linears add their bias before the sum
# - **heads**: one rank took the query heads of its neighbor
#
# For each, name cause, collective (`"forward"` or `"backward"` if an all-reduce is missing there, else None) and rank
# (a number, or `"all"`; None if correct). "Off" is against one process; "apart" is between ranks; gradients are of a
# norm, in the first step. The last columns are sums over each rank's query weights. Another SEED draws other runs.

# %%
SEED = 1
diagnosis = {  # such as ("no sum", "forward", "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from dataclasses import replace

from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "no sum": ("forward", "all"),
    "no f": ("backward", "all"),
    "bias": (None, "all"),
    "heads": (None, range(RANKS)),
}
lab = Lab("05", SEED, FAULTS)


class BiasBeforeSum(tp.RowLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight, self.bias), self.axis)


def faulty_plan(lab_run, own_rank):
    plan = dict(BLOCKS)
    if lab_run.has("no sum"):
        del plan["blocks.*.attn.o"]
        for layer in range(CONFIG.layers):
            here = layer == lab_run.pick(range(CONFIG.layers))
            leave = tp.REGION.rows if here else comm.reduce_from
            plan[f"blocks.{layer}.attn.o"] = lambda linear, cut, leave=leave: tp.RowLinear(
                linear, cut.axis, leave
            )
    if lab_run.has("no f"):
        del plan["blocks.*.ffn"]
    if lab_run.has("bias"):
        plan["blocks.*.attn.o"] = lambda linear, cut: BiasBeforeSum(linear, cut.axis)
        plan["blocks.*.ffn.fc_out"] = plan["blocks.*.attn.o"]
    if lab_run.has("heads", own_rank):

        def from_the_neighbor(linear, cut):
            rank = (cut.axis.rank + 1) % cut.axis.size
            return tp.ColumnLinear(linear, replace(cut.axis, rank=rank))

        plan["blocks.*.attn.q"] = from_the_neighbor
    return plan


def trained(n, lab_run):
    mesh = make_mesh(tp=n)
    plan = faulty_plan(lab_run, mesh.rank)
    model = tp.parallelize(build_model(CONFIG, seed=0), mesh.tp, plan=plan)
    queries = model.blocks[0].attn.q.weight.sum().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms, calls = [], [], []
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        mesh.ledger.clear()
        total, count = model.loss_sum(tokens, targets)
        calls = [mesh.ledger.calls()]
        (total / count).backward()
        calls.append(mesh.ledger.calls() - calls[0])
        norms.append(model.blocks[0].ffn_norm.weight.grad.clone())
        losses.append((total / count).item())
        optimizer.step()
    return {"losses": losses, "norm": norms[0], "calls": calls, "queries": queries}


correct = next(lab_run for lab_run in lab if lab_run.has("correct"))
reference = run(trained, 1, correct, n=1)[0]
print(f"{'':11}{'loss off':^22}{'loss':>9}{'norm gradient':>20}   sums of query weights")
print(f"{'':3}{'calls':8}{'first':>11}{'last':>11}{'apart':>9}{'off':>10}{'apart':>10}   by rank")
for lab_run in lab:
    result = run(trained, RANKS, lab_run, n=RANKS)
    off = [abs(result[0]["losses"][at] - reference["losses"][at]) for at in (0, -1)]
    apart = max(abs(one["losses"][0] - result[0]["losses"][0]) for one in result)
    norm = result[0]["norm"]
    norm_off = ((norm - reference["norm"]).norm() / reference["norm"].norm()).item()
    norm_apart = max(((one["norm"] - norm).norm() / norm.norm()).item() for one in result)
    calls = "{} + {}".format(*result[0]["calls"])
    sums = " ".join(f"{one['queries']:6.2f}" for one in result)
    print(f"{lab_run.letter:3}{calls:8}{off[0]:11.0e}{off[1]:11.0e}{apart:9.0e}", end="")
    print(f"{norm_off:10.0e}{norm_apart:10.0e}   {sums}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# Below 1e-5 is rounding.
#
# - **A call missing forward**: *no sum*. Ranks diverge at once, in the very first loss.
# - **Calls missing backward**: *no f*. The first loss is right, so a test of outputs passes. Gradients before the region are
#   partial, and replicated weights drift apart.
# - **All calls there, first loss right, last loss off**: *bias*. Biases start at 0, and n times 0 is 0: only a trained
#   model, or a loaded checkpoint, shows it. The gradients are right too.
# - **First loss off, ranks agree, calls right**: the ranks sum wrong partial sums. Two ranks with the same sum of
#   query weights hold the same *heads*. The faulty rank's own heads appear on no rank.
#
# Two checks find most of it: a logit comparison with a single-process reference whose biases are *not* zero, and a
# checksum of replicated weights over the tp ranks.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# Look again at the runs that are wrong; `lab.reveal()` shows the causes. In *heads*, the ring of neighbors
# identifies the rank: it holds the same heads as the *next* rank.
#
# ## When not to use it
# - **Across slow links.** Four exposed messages per layer: see two nodes above.
# - **The layers are small.** Each rank's product shrinks with n, the message does not: matrices become too thin to keep a
#   GPU busy.
# - **The model fits.** With many tokens DP sends less, and hides it.
# - **More ranks than heads**, or sizes that n does not divide.
# - **Activations are the problem.** On four ranks more than half of a block's saved activations are replicated:
#   lesson 06.
#
# ## The table that grows
# State and activations are from the training above, bytes from one step, and exposed time from the two paced blocks.
# Code is the lines of the library for the blocks, without comm.

# %%
from course_lib.view import code_lines

code = code_lines(tp.ColumnLinear, tp.RowLinear, tp.parallelize, tp.plan.enters, comm.take_shard)
print(
    f"{'per rank and step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}{'exposed':>10}{'code':>6}"
)
for n, result in runs.items():
    one, sent = result[0], int(result.ledgers[0].wire_bytes())
    line = f"{one['state'].total:11,}{one['activations']:13,}{sent:12,}"
    wait = f"{1e3 * exposed['TP, one node']:7.0f} ms{code:6}" if n == 4 else ""
    print(f"{'one process' if n == 1 else f'tp on {n}':18}{line}{wait}")

# %% [markdown]
# ## The claims settled
# **Claim 1: false.** Matrices and the saved activations inside the regions are divided by n. Norms, residuals and the
# inputs of column linears are replicated, and so is the vocabulary here.
#
# **Claim 2: only if the product is split.** A note says of TP's traffic that it "can overlap". Without a split, an
# all-reduce separates two computations that depend on it, and the measurement shows that nothing hides. Split into
# blocks of rows, it can hide between the products; in backward a part of it can also hide beside weight gradients.

# %%
hidden = {name: run_.traces for name, run_ in paced.items()}
fractions = [
    1 - summarize(read(traces)[0]).exposed / summarize(read(traces)[0]).comm
    for traces in hidden.values()
]
print(
    f"a rank saves {runs[4][0]['activations'] / runs[1][0]['activations']:.2f} of the activations on 4 ranks; your vote: {vote_1}"
)
print(f"hidden of TP's communication: {max(fractions):.2f}; your vote: {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# GPT-3's size in bfloat16, one sequence of 2,048 tokens; everything computed from the library's formulas.


# %%
def cheat_sheet():
    config = tiny_config(
        family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152,
        max_seq_len=2048, vocab=50304, dtype=torch.bfloat16,
    )  # fmt: skip
    shape = config, 1, 2048
    print("f enter: identity | all-reduce      columns: W[F/n, D], bias[F/n]   q, k, v, fc_in")
    print("g leave: all-reduce | identity      rows:    W[D, F/n], bias[D]     o, fc_out")
    print("per layer: 2 all-reduces forward, 2 backward, of B s h elements; serving: 2 per token\n")
    print(
        f"{'ranks':5}{'parameters, GB':>16}{'saved per block, MB':>21}{'of one':>8}{'sent per step, GB':>19}"
    )
    one = formulas.saved_per_block(*shape, 1)
    for n in (1, 2, 4, 8):
        held = 2 * formulas.parameters_per_rank(config, n) / 1e9
        saved = formulas.saved_per_block(*shape, n)
        sent = float(formulas.wire_bytes(*shape, n)) / 1e9
        print(f"{n:5}{held:16.1f}{saved / 1e6:21.0f}{saved / one:8.2f}{sent:19.1f}")
    print(f"\nDP sends more below about 3h = {3 * config.hidden:,} tokens per replica, less above")


cheat_sheet()

# %% [markdown]
# (With a sharded vocabulary too: lesson 06.)
#
# ## Your turn
# [Five exercises](../exercises/05_tensor_parallelism.ipynb), each on its own: a pair on two ranks by hand (10 minutes); and
# on real ranks where the bias goes (5), the pair of operators (10), the MLP (20), and attention by heads in raw PyTorch
# (15).

# %% course={"role": "given"}
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib import comm

# %% [markdown] course={"ex": "05-1"}
# ## 05-1 One pair on two ranks, by hand
# Ten minutes, on paper; no code. y = ReLU(x A) B + c, where ReLU makes negative numbers 0:
#
# $$x = [1, 2] \qquad A = \begin{pmatrix} 1 & 2 & 3 & -1 \\ 1 & -2 & -1 & 2 \end{pmatrix} \qquad B = \begin{pmatrix} 1 & 2 \\ 5 & 1 \\ 2 & -1 \\ 1 & 0 \end{pmatrix} \qquad c = [1, 1]$$
#
# Rank 0 has the first two columns of A and the first two rows of B, rank 1 the others.
#
# - `inner`: the two numbers of x A on each rank, before ReLU: [[rank 0], [rank 1]]
# - `partial`: each rank's partial sum, without c
# - `y`: the right result, with c
# - `bias too early`: y if every rank adds c to its partial sum before the all-reduce
# - `rows first`: now shard A by rows instead: rank 0 has x = 1 and the first row, rank 1 x = 2 and the second. Each
#   takes ReLU of its own four numbers; these are added. What comes out, in place of ReLU(x A)?
# - `dx parts`: back to columns first. From dy = [1, 1], the gradient of x that each rank gets by itself
# - `dx`: the right gradient of x
# - `all-reduces`: of this pair, [forward, backward]
# - `bytes`: a GPT of 2 layers on 4 ranks; x has 10 tokens of 8 float32 elements. The bytes that a rank sends for its
#   blocks in a step

# %% course={"ex": "05-1", "role": "answer"}
# BEGIN SOLUTION
pair = {
    "inner": [[3, -2], [1, 3]],
    "partial": [[3, 6], [5, -1]],
    "y": [9, 6],
    "bias too early": [10, 7],
    "rows first": [3, 2, 3, 4],
    "dx parts": [[3, 3], [2, 1]],
    "dx": [5, 4],
    "all-reduces": [1, 1],
    "bytes": 3840,
}
# STUB
# pair = {
#     "inner": None,  # two lists of two numbers, such as [[1, 2], [3, 4]]
#     "partial": None,
#     "y": None,  # two numbers
#     "bias too early": None,
#     "rows first": None,  # four numbers
#     "dx parts": None,
#     "dx": None,
#     "all-reduces": None,
#     "bytes": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "05-1", "role": "answer"}
# - x A = [3, -2, 1, 3]; after ReLU [3, 0 | 1, 3]. Rank 0: 3 · [1, 2]. Rank 1: [2, -1] + 3 · [1, 0]. The sum is [8, 5].
# - Rows first: [1, 2, 3, -1] and [2, -4, -2, 4]; after ReLU [1, 2, 3, 0] and [2, 0, 0, 4]. Right would be [3, 0, 1, 3].
# - dy Bᵀ = [3, 6 | 1, 1]; ReLU stops the second. Rank 0: 3 · [1, 1]. Rank 1: [3, -1] + [-1, 2].
# - x has 320 bytes: 8 · 2 · 3/4 · 320.

# %% course={"ex": "05-1", "role": "check"}
from course_lib.grading import check

check("05-1", pair)

# %% [markdown] course={"ex": "05-2"}
# ## 05-2 Where the bias goes
# A row linear: every rank has some of the inner features h, the columns of the weight that belong to them, and the
# full bias. Write the one line that returns the full y = h Wᵀ + bias on every rank, such that autograd computes the
# right gradients of h, weight and bias on every rank.
#
# The check looks at outputs and these gradients on two and four ranks, at outputs on one rank, and at the one
# all-reduce. `comm.copy_to` and `comm.reduce_from` are yours to use.


# %% course={"ex": "05-2", "role": "answer"}
def row_linear(h_TFt, weight_DFt, bias_D, axis):
    """y_TD on every rank.

    ``h_TFt`` (tokens, F/n) are this rank's features, ``weight_DFt`` (D, F/n) its part of the
    weight, as nn.Linear keeps it; ``bias_D`` (D) is the same on all ranks.
    """
    # BEGIN SOLUTION
    return comm.reduce_from(F.linear(h_TFt, weight_DFt), axis) + bias_D
    # END SOLUTION


# %% course={"ex": "05-2", "role": "check"}
from course_lib.grading import check

check("05-2", row_linear)

# %% [markdown] course={"ex": "05-3"}
# ## 05-3 The pair of operators
# Write f and g as `torch.autograd.Function`s, to be called as `Copy.apply(x, axis)` and `Reduce.apply(x, axis)`.
#
# - f, `Copy`: forward passes x on, backward sums the gradient over the ranks.
# - g, `Reduce`: forward sums x over the ranks, backward passes the gradient on.
#
# The check looks at all four directions on two and four ranks, and at two of them on three and one. Neither x nor the
# gradient may be overwritten, and each operator makes one all-reduce, in the right direction. `comm.all_reduce(x,
# axis)` returns the sum and does not change x; `comm.copy_to` and `comm.reduce_from` refuse.


# %% course={"ex": "05-3", "role": "answer"}
class Copy(torch.autograd.Function):
    """f: a replicated x enters a region where every rank goes its own way."""

    @staticmethod
    def forward(ctx, x, axis):
        """Returns x; keeps in ``ctx`` what backward will need."""
        # BEGIN SOLUTION
        ctx.axis = axis
        return x.view_as(x)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """Returns the gradient of x, and None for axis."""
        # BEGIN SOLUTION
        return comm.all_reduce(gradient, ctx.axis), None
        # END SOLUTION


class Reduce(torch.autograd.Function):
    """g: partial sums leave that region as their sum."""

    @staticmethod
    def forward(ctx, x, axis):
        """Returns the sum of x over the ranks."""
        # BEGIN SOLUTION
        return comm.all_reduce(x, axis)
        # END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """Returns the gradient of x, and None for axis."""
        # BEGIN SOLUTION
        return gradient, None
        # END SOLUTION


# %% course={"ex": "05-3", "role": "check"}
from course_lib.grading import check

check("05-3", Copy, Reduce)

# %% [markdown] course={"ex": "05-4"}
# ## 05-4 The MLP on ranks
# A class built from the MLP of one process, with the same output on every rank. `mlp.fc_in` and `mlp.fc_out` are
# `nn.Linear`s with biases, (F, D) and (D, F); between them is `F.gelu`.
#
# Your module has four parameters and no others: `weight_in` (F/n, D), `bias_in` (F/n), `weight_out` (D, F/n) and `bias_out`
# (D). Rank 0 holds the first F/n inner features, and so on.
#
# Checked on two and four ranks: outputs, gradients of x and of the parameters, and weights after three steps of SGD.
# Checked on one rank: outputs. A rank must store no more than its shard and leave `mlp` unchanged, and make one
# all-reduce forward and one backward, each as large as x. `comm.copy_to` and `comm.reduce_from` are yours; the library's
# linears refuse.


# %% course={"ex": "05-4", "role": "answer"}
class ParallelMLP(nn.Module):
    """``fc_out(gelu(fc_in(x)))`` with the inner features divided over the ranks of ``axis``."""

    def __init__(self, mlp, axis):
        """``axis.rank`` of ``axis.size`` ranks takes its share of the weights of ``mlp``."""
        super().__init__()
        self.axis = axis
        # BEGIN SOLUTION
        n, rank = axis.size, axis.rank
        self.weight_in = nn.Parameter(mlp.fc_in.weight.detach().chunk(n, 0)[rank].clone())
        self.bias_in = nn.Parameter(mlp.fc_in.bias.detach().chunk(n, 0)[rank].clone())
        weight_out = mlp.fc_out.weight.detach().chunk(n, 1)[rank]
        self.weight_out = nn.Parameter(weight_out.clone(memory_format=torch.contiguous_format))
        self.bias_out = nn.Parameter(mlp.fc_out.bias.detach().clone())
        # END SOLUTION

    def forward(self, x_BSD):
        """x_BSD, the same on every rank, to y_BSD, the same on every rank."""
        # BEGIN SOLUTION
        x_BSD = comm.copy_to(x_BSD, self.axis)
        h_BSFt = F.gelu(F.linear(x_BSD, self.weight_in, self.bias_in))
        return comm.reduce_from(F.linear(h_BSFt, self.weight_out), self.axis) + self.bias_out
        # END SOLUTION


# %% course={"ex": "05-4", "role": "check"}
from course_lib.grading import check

check("05-4", ParallelMLP)

# %% [markdown] course={"ex": "05-5"}
# ## 05-5 Attention by heads in raw PyTorch
# One forward and backward of causal attention with `torch.distributed` alone: `course_lib` refuses. The default group
# exists; `dist.all_reduce(x)` works in place. You need no autograd function: compute the partial sum of y from this
# rank's heads, call `part.backward(dy)`, and all-reduce what must be summed.
#
# A head takes `head_dim` neighboring features; rank 0 computes the first heads, and so on; n divides their number.
# `F.scaled_dot_product_attention(q, k, v, is_causal=True)` expects (batch, heads, sequence, head_dim).
#
# The check looks at y, the gradient of x and the gradients of this rank's shards on two to four ranks, and at y on
# one. No input may be overwritten, and a rank makes two all-reduces, each as large as x.


# %% course={"ex": "05-5", "role": "answer"}
def attention_step(x_BSD, weights, head_dim, dy_BSD):
    """(y_BSD, dx_BSD, gradients) on every rank.

    ``weights`` has the whole q, k, v and o, (D, D) each as nn.Linear keeps them, without bias; they
    and ``x_BSD`` are equal on all ranks and want no gradient yet. ``dy_BSD`` is the gradient that
    comes back to y. ``gradients`` is a dict of the gradients of this rank's rows of q, k and v,
    (D/n, D), and columns of o, (D, D/n).
    """
    # BEGIN SOLUTION
    n, rank = dist.get_world_size(), dist.get_rank()
    own = {}
    for name, weight in weights.items():
        share = weight.chunk(n, 1 if name == "o" else 0)[rank]
        own[name] = share.detach().clone().requires_grad_()
    x = x_BSD.detach().clone().requires_grad_()
    q, k, v = (
        F.linear(x, own[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2) for name in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    part = F.linear(mixed, own["o"])
    part.backward(dy_BSD)  # g's backward: the gradient of the sum is that of every part
    y, dx = part.detach().clone(), x.grad
    dist.all_reduce(y)
    dist.all_reduce(dx)
    return y, dx, {name: weight.grad for name, weight in own.items()}
    # END SOLUTION


# %% course={"ex": "05-5", "role": "check"}
from course_lib.grading import check

check("05-5", attention_step)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Why is the first matrix sharded by columns?
#
# <details><summary>Answer</summary>
# Each feature is then computed in full on one rank, and GELU can be applied there. By rows it would need the sum
# first: one more all-reduce, on four times as many features.
# </details>
#
# **2.** 32 layers, hidden 4,096, 8 ranks, 8 × 2,048 tokens, 2 bytes per element. What does a rank send for its blocks
# in a step?
#
# <details><summary>Answer</summary>
# x has 134 MB. 8 · 32 · 7/8 · 134 MB = 30 GB, in 128 all-reduces. With full recomputation forward runs twice: 6
# all-reduces per layer instead of 4.
# </details>
#
# **3.** A layer's outputs match those of one process to the last digit, but training still fails. What is missing?
#
# <details><summary>Answer</summary>
# f: its forward is the identity, so outputs cannot show it. Compare the gradient of x, or of the norm before the region.
# </details>
#
# **4.** Why do norms need no gradient synchronization here, although they will under sequence parallelism (lesson
# 06)?
#
# <details><summary>Answer</summary>
# Here every rank runs each norm on all rows, with a fully reduced dx: equal gradients. There a rank has some rows
# only.
# </details>
#
# **5.** You serve a model on 8 GPUs of one node, batch 1. What does TP send for a token, and what decides its time?
#
# <details><summary>Answer</summary>
# Two all-reduces of one hidden vector per layer. The time is their number times latency; the bytes do not matter.
# </details>
#
# ## Sources and what next
# - Shoeybi et al. 2019, *Megatron-LM*, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053): section 3 is this lesson.
# - Narayanan et al. 2021, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): why TP stays inside a node, measured.
# - Korthikanti et al. 2022, [arXiv:2205.05198](https://arxiv.org/abs/2205.05198): which activations TP replicates.
# - Wang et al. 2023, [doi:10.1145/3567955.3567959](https://doi.org/10.1145/3567955.3567959): communication between
#   blocks of a product.
# - Pope et al. 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102): tensor parallelism for serving.
#
# Next: lesson 06 shards what is replicated here, the activations along the sequence and the vocabulary by words. It
# then looks at dropout and grouped queries.
