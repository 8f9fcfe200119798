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
#     lesson: '12'
# ---

# %% [markdown]
# # 12 Three, four and five axes at once
#
# *60 minutes to read and run, 75 to build.* Every technique so far partitioned one thing. Here they meet in one
# model: 8 ranks under three axes, 16 under four and five, equal to one process. You see which groups a rank is in, in
# which order gradients are reduced, what each axis sends, and why tp is innermost. You need lessons 03 to 07 and 09;
# 10 for the experts.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Tensor parallelism sends more than data parallelism, and data parallelism more than a pipeline.*
# 2. *The number of GPUs is TP x PP x CP x EP x DP.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# A rank has one coordinate on each axis. Its group of an axis are the ranks that differ from it on that axis alone.
# Each axis partitions something else, and so sends something else:
#
# | axis | partitions | sends | how often |
# |---|---|---|---|
# | tp | every matrix | activations | 4 times per layer and micro-batch |
# | cp | the sequence | keys and values | every layer and micro-batch |
# | ep (inside dp and cp) | the experts | tokens | 4 times per layer and micro-batch |
# | pp | the layers | activations | twice per stage boundary and micro-batch |
# | dp | the batch | gradients | once per step |
#
# A weight is now on some ranks only, its gradient is partial in several ways at once, and some ranks hold copies.
# When is it fully reduced, and what is the norm of the full gradient?

# %% [markdown]
# ## Predict
# Eight ranks, tp=2, dp=2, pp=2, numbered in the order tp-dp-pp: tp varies fastest.

# %%
predicted_group = None  # the ranks with which rank 5 sums gradients, such as [4, 5]
predicted_axis = None  # the axis that sends most bytes in a step: "tp", "dp" or "pp"
predicted_norm = None  # the norm, as a multiple of the right one, if every rank counts all it holds
predicted_tokens = None  # tokens of a replica from which tp=4 sends more than dp=4; h = 64
predicted_speedup = None  # of tp on 4 ranks across slow links

# %% [markdown]
# ## The groups of a rank
# Sixteen ranks on two nodes, tp=2, dp=2, pp=4: a study note's layout. Its order is tp-dp-pp.

# %%
from course_lib.layout import drawing, make_layout
from course_lib.view.rank_grid import rank_grid

print(drawing(make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4), per_node=8))

# %%
rank_grid(
    make_layout(16, "tp-dp-pp", tp=2, dp=2, pp=4),
    "pp",
    title="The groups of pp cross nodes; those of tp and dp do not",
)

# %% [markdown]
# Look at rank 4: it is the second stage of rank 0's pipeline; the third is on the other node. (mp, tp x pp, is one
# full model.) Move the sliders (in Jupyter): which order makes dp cross instead? `dp and tp` shows which ranks hold
# one stage.

# %%
from course_lib.view.moved import picture_sliders


def layout_picture(groups_of, order, tp, pp, ranks):
    layout = make_layout(ranks, order, tp=tp, pp=pp)
    return rank_grid(layout, *groups_of.split(" and "), per_node=8)


picture_sliders(
    layout_picture,
    groups_of=["tp", "dp", "pp", "dp and tp", "tp and pp"],
    order=["tp-dp-pp", "tp-pp-dp", "dp-tp-pp", "pp-dp-tp"],
    tp=[2, 1, 4, 8],
    pp=[4, 1, 2, 8],
    ranks=[16, 32, 64],
)

# %% [markdown]
# Two notes number 64 and 512 ranks as tp-pp-dp. Both write the pipeline group as `[rank + i * 8 for i in range(4)]`.
# For which ranks is that right?

# %%
NOTES = {64: {"tp": 8, "pp": 4, "dp": 2}, 512: {"tp": 8, "pp": 8, "dp": 8}}

for world, sizes in NOTES.items():
    layout = make_layout(world, "tp-pp-dp", **sizes)
    group_of = {rank: ranks for ranks in layout.groups("pp") for rank in ranks}
    asked = {rank: [rank + i * 8 for i in range(sizes["pp"])] for rank in range(world)}
    right = [rank for rank in range(world) if asked[rank] == group_of[rank]]
    print(f"{world} ranks: the note's line is right for {len(right)} of them; rank 9 would ask for")
    print(f"    {asked[9]}, and is in {group_of[9]}")

# %% [markdown]
# Only for the first stage: a group starts at its first member. And all ranks must call `new_group` for all groups, in one
# order (lesson 11).
#
# The notes' third layout serves GPT-3 on 512 GPUs with TP=8 and PP=64, "8 nodes × 8 stages per node". Eight GPUs of a
# node are one tp group, so a node holds *one* stage:

# %%
from course_lib import pp

layout = make_layout(512, "tp-pp-dp", tp=8, pp=64, dp=1)
print("stages on node 0:", {layout.coordinates(rank)["pp"] for rank in range(8)})
layers = pp.partition(96, 64)
print(f"96 layers on 64 stages: {layers.count(2)} stages of 2 and {layers.count(1)} of 1")

# %% [markdown]
# The slowest stage has two layers, as with 48 stages: the last 128 GPUs gain nothing.
#
# ## One call
# `compose.parallelize` applies the techniques in a fixed order, each to the result of the previous ones:

# %%
from course_lib import compose
from course_lib.compose.build import build_stages
from course_lib.view import show_source

show_source(build_stages)

# %% [markdown]
# Groups are made on *all* ranks, so they come first, while every rank still has the full model: pp splits it after
# that. cp and recomputation wrap the existing layers.
#
# The model is tiny, and in float64, so rounding is 1e-15 and a forgotten sum is obvious. Rows have random lengths, so
# ranks count different numbers of tokens.

# %%
import torch

from course_lib import comm, ep, sp
from course_lib.compose import Experts, Plan
from course_lib.data import batch
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import build_model, tiny_config

SEQ, BATCH, STEPS, CLIP = 16, 8, 3, 0.5
CONFIG = tiny_config(
    layers=4, hidden=32, heads=4, kv_heads=4, ffn=96, max_seq_len=SEQ, tied=True,
    dtype=torch.float64,
)  # fmt: skip
EXPERTS = Experts(number=4, top_k=2, coefficient=0.05)
MESHES = {
    "3D": {"tp": 2, "dp": 2, "pp": 2},
    "4D": {"tp": 2, "cp": 2, "dp": 2, "pp": 2},
    "5D": {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2},
}
PLANS = {
    "3D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP),
    "4D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP, zero=1),
    "5D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP, experts=EXPERTS),
}


def fresh(plan):
    """The single-process model, the same in every process."""
    model = build_model(CONFIG, seed=3)
    if plan.experts:
        ep.add_experts(model, plan.experts.number, plan.experts.top_k, seed=4)
    return model


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def rows(step, rank=0, size=1):
    place = {"dp_rank": rank, "dp_size": size}
    return batch(step, seed=7, batch_size=BATCH, seq_len=SEQ, shortest=5, **place)


# %% [markdown]
# One process, for comparison. With experts the auxiliary loss depends on which tokens are in a micro-batch together,
# so micro-batch k of the reference holds the k-th of every replica.


# %%
def reference(plan, steps=range(STEPS), model=None, replicas=2):
    """(losses, norms) of one process that trains like ``plan``."""
    model = model or fresh(plan)
    optimizer = adam(model.parameters())
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        count = (rows(step)[1] != -100).sum()
        by_replica = [
            [x.tensor_split(plan.micro_batches) for x in rows(step, r, replicas)]
            for r in range(replicas)
        ]
        losses.append(0.0)
        for k in range(plan.micro_batches):
            tokens, targets = (torch.cat([one[i][k] for one in by_replica]) for i in (0, 1))
            total, _ = model.loss_sum(tokens, targets)
            if plan.experts:
                total = total + plan.experts.coefficient * ep.auxiliary_loss(model)
            (total / count).backward()
            losses[-1] += float(total.detach() / count)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms


def stored(trainer):
    """Bytes of this rank's weights and of its optimizer's state."""
    weights = sum(p.nbytes for stage in trainer.stages.values() for p in stage.parameters())
    inner = [getattr(o, "optimizer", o) for o in trainer.optimizers]  # ZeRO has one inside
    states = [state for o in inner for state in o.state.values()]
    return weights, sum(tensor.nbytes for state in states for tensor in state.values())


def groups_of(mesh):
    """This rank's ranks by axis."""
    axes = ("tp", "cp", "dp", "pp", "dp_cp", "ep", "edp")
    return {axis: getattr(mesh, axis).ranks for axis in axes}


def train(sizes, plan, path=None):
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(fresh(plan), mesh, plan, adam)
    done = []
    for step in range(STEPS):
        mesh.ledger.clear()  # the ledger keeps the last step alone
        done.append(trainer.step(*rows(step, mesh.dp.rank, mesh.dp.size)))
    if path:
        trainer.save(path)
    return {
        "losses": [float(step.loss) for step in done],
        "norms": [float(step.norm) for step in done],
        "stored": stored(trainer),
        "groups": groups_of(mesh),
    }


# %%
import math
import tempfile
from pathlib import Path

FOLDER = tempfile.TemporaryDirectory()
SAVED = str(Path(FOLDER.name) / "from_4D")


def ranks_of(sizes):
    return math.prod(size for axis, size in sizes.items() if axis != "ep")


runs, references = {}, {}
for name, sizes in MESHES.items():
    path = SAVED if name == "4D" else None
    runs[name] = run(train, sizes, PLANS[name], path, n=ranks_of(sizes), timeout=120)
    references[name] = run(reference, PLANS[name], n=1)[0]

print(f"{'':4}{'ranks':>6}{'last loss':>12}{'loss off':>11}{'norm off':>11}{'ranks agree':>13}")
for name, result in runs.items():
    (losses, norms), own = references[name], result[0]
    off = max(abs(a - b) for a, b in zip(own["losses"], losses, strict=True))
    norm_off = max(abs(a / b - 1) for a, b in zip(own["norms"], norms, strict=True))
    agree = all(one["losses"] == own["losses"] for one in result)
    print(f"{name:4}{len(result):6}{losses[-1]:12.6f}{off:11.0e}{norm_off:11.0e}{agree!s:>13}")
    assert off < 1e-10
    assert norm_off < 1e-10

# %% [markdown]
# Sixteen ranks, five axes, and the loss of one process to ten digits and more. `ranks agree` is exact: every rank has
# the same loss, so all ranks decide alike.
#
# ## In which order a gradient is reduced
# A gradient is fully reduced when every rank that used the weight has added its partial gradient:
#
# | what is missing | sum over | gradients of |
# |---|---|---|
# | other tokens | dp and cp; experts: edp | all |
# | other rows | tp, where rows are sharded (sequence parallelism) | replicated weights: norms |
# | other queries | KV replication group | key and value heads, if fewer than tp |
# | the other copy | first and last stage | a tied embedding |

# %%
from course_lib.compose.gradients import Gradients

show_source(
    Gradients.complete, Gradients.sum_tied, Gradients.norm, Gradients.counted, comm.grad_norm
)

# %% [markdown]
# All are *sums*: the loss was divided by the tokens of all ranks, so no axis averages. `edp` are the ranks with the
# same experts: dp x cp / ep of them. An expert's gradient already includes the tokens of all ep ranks, because they
# were sent to it.
#
# ## The norm: each element once
# Only then is there a norm. Some gradients of a rank are also on other ranks: each `ShardSpec` says on how many. Three
# ways to add up, in the first step of 3D:


# %%
def own_norm(held):
    """The norm of what this rank holds."""
    return torch.nn.utils.get_total_norm(one.gradient for one in held)


def three_norms(sizes, plan):
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(fresh(plan), mesh, plan, adam)
    right, found = trainer.gradients.norm, {}

    def noted(held):
        own = own_norm(held)
        found["own"] = float(own)
        found["all ranks"] = float(comm.all_reduce(own**2, mesh.world, control=True).sqrt())
        norm = right(held)
        found["each once"] = float(norm)
        return norm

    trainer.gradients.norm = noted
    trainer.step(*rows(0, mesh.dp.rank, mesh.dp.size))
    return found


norms = run(three_norms, MESHES["3D"], PLANS["3D"], n=8)
truth = references["3D"][1][0]
print(f"one process: {truth:.4f}")
print("each rank by itself:  ", " ".join(f"{one['own']:.4f}" for one in norms))
print(
    f"all ranks, all of it:  {norms[0]['all ranks']:.4f}, {norms[0]['all ranks'] / truth:.2f} times"
)
print(f"each element once:     {norms[0]['each once']:.4f}")
print(f"your prediction: {predicted_norm}")
assert abs(norms[0]["each once"] / truth - 1) < 1e-12

# %% [markdown]
# With its own norm each rank would clip by another factor, and replicated weights drift apart. Counting every copy
# gives every rank the *same* wrong norm: training continues, with a learning rate that depends on the mesh. Neither
# raises an error.
#
# ## What each axis sends: one table
# Calls and bytes are from the ledgers, all ranks together, last step; the formula is `compose.wire_bytes`, from shapes
# alone. dp_cp is dp x cp. `ms` puts the busiest rank's calls on emulated links, an alpha for each message and its bytes over
# beta. The ranks fill two nodes, and between these a link is 50 times slower in alpha, 20 times in bytes.

# %%
from course_lib.comm.instruments.links import STEPS as MESSAGES
from course_lib.ledger import summarize, wire_bytes_by_axis
from course_lib.mesh import Link, Links

FAST, SLOW = Link(alpha=0.0001, beta=100e6), Link(alpha=0.005, beta=5e6)


def formula_of(name):
    return compose.wire_bytes(CONFIG, MESHES[name], PLANS[name], BATCH // MESHES[name]["dp"], SEQ)


def counted_calls(ledgers):
    calls = {}
    for line in summarize(ledgers):
        if not line.control and line.op != "recv":
            calls[line.axis] = calls.get(line.axis, 0) + line.calls
    return calls


def seconds_of(record, link):
    """A collective by its messages and bytes; a message costs the rank that receives it."""
    if record.op == "send":
        return 0.0
    moved = record.payload if record.op == "recv" else record.wire
    return MESSAGES[record.op](record.n) * link.alpha + float(moved) / link.beta


def ms_by_axis(ledgers, groups):
    """The busiest rank's ms on each axis, on two nodes."""
    links = Links(inside=FAST, between=SLOW, ranks_per_node=len(groups) // 2)
    worst = {}
    for ledger, own in zip(ledgers, groups, strict=True):
        found = {}
        for record in ledger.select():
            met = own[record.axis] if record.peer is None else (ledger.rank, record.peer)
            seconds = seconds_of(record, links.link(tuple(met)))
            found[record.axis] = found.get(record.axis, 0.0) + 1e3 * seconds
        worst |= {axis: max(ms, worst.get(axis, 0.0)) for axis, ms in found.items()}
    return worst


print(f"{'':4}{'axis':8}{'calls':>7}{'bytes':>12}{'formula':>12}{'ms':>7}")
for name, result in runs.items():
    sent, formula = wire_bytes_by_axis(result.ledgers), formula_of(name)
    ms = ms_by_axis(result.ledgers, [one["groups"] for one in result])
    for axis, calls in counted_calls(result.ledgers).items():
        wanted = float(formula.get(axis, 0))
        print(f"{name:4}{axis:8}{calls:7,}{float(sent[axis]):12,.0f}{wanted:12,.0f}{ms[axis]:7.0f}")
        assert axis == "ep" or sent[axis] == formula.get(axis, 0)
most = {name: max(formula_of(name), key=formula_of(name).get) for name in MESHES}
print(f"most bytes: {most}; your prediction for 3D: {predicted_axis}")

# %%
from course_lib.view import ledger_plot

ledger_plot(
    runs["4D"].ledgers,
    formula=formula_of("4D"),
    title="4D, 16 ranks, one step: with so few tokens gradients weigh most",
)

# %% [markdown]
# Exact on every axis but ep: there the formula assumes even routing, and the real routing is uneven. Look at 3D's dp
# and tp: almost equal bytes, in 16 calls and in 632. Each call costs its alphas, and ranks wait for each of tp's.
# Then look at `ms` of pp: few bytes, but here this axis crosses nodes.
#
# ## Why tp innermost
# The same step, the same bytes, eight ranks on two nodes of four. Only the order of the axes differs, so that another axis
# crosses:

# %%
import time

TWO_NODES = Links(inside=FAST, between=SLOW, ranks_per_node=4)
ORDERS = ("tp-dp-pp", "tp-pp-dp", "dp-pp-tp")


def timed_step(order, sizes, plan):
    mesh = make_mesh(order, **sizes)
    trainer = compose.parallelize(fresh(plan), mesh, plan, adam)
    for step in range(2):  # the first warms up
        comm.barrier(mesh.world)
        mesh.ledger.clear()
        start = time.perf_counter()
        trainer.step(*rows(step, mesh.dp.rank, mesh.dp.size))
    return {"seconds": time.perf_counter() - start, "groups": groups_of(mesh)}


print(f"{'order':10}{'tp':>8}{'dp':>8}{'pp':>8}{'sum':>8}{'measured':>10}   ms;  crosses")
for order in ORDERS:
    layout = make_layout(8, order, **MESHES["3D"])
    result = run(timed_step, order, MESHES["3D"], PLANS["3D"], n=8, links=TWO_NODES)
    ms = ms_by_axis(result.ledgers, [one["groups"] for one in result])
    took = 1e3 * max(one["seconds"] for one in result)
    cells = "".join(f"{value:8.0f}" for value in (ms["tp"], ms["dp"], ms["pp"], sum(ms.values())))
    crosses = [a for a in ms if any(TWO_NODES.crosses(tuple(g)) for g in layout.groups(a))]
    print(f"{order:10}{cells}{took:10.0f}        {', '.join(crosses)}")

# %% [markdown]
# The measured time includes arithmetic, bubble and gloo's own cost, much the same in all three. The last line adds
# tp's calls across the slow link. Between dp and pp the difference is small: pp sends little in many messages, dp
# much at once, which can hide behind backward. So tp is innermost, and either of the two outermost.
#
# The note's own reason is volume: "TP > DP > PP, the largest into the node". Is that always the order?
#
# ## Where TP sends more than DP
# One layer of 12h² parameters, b bytes each; a replica has T tokens in a step. As *alternatives*, n ranks for tp or n for dp:
#
# $$\underbrace{8\,\tfrac{n-1}{n}\,T h\,b}_{\text{TP: four all-reduces of } Th} \;=\; \underbrace{2\,\tfrac{n-1}{n}\,12h^2\,b}_{\text{DP: one of the gradients}} \quad\Rightarrow\quad T = 3h$$
#
# *Together*, t ranks of tp and d of dp: tp has sharded the gradients too, a rank has 12h²/t of them. Then
#
# $$8\,\tfrac{t-1}{t}\,T h \;=\; 2\,\tfrac{d-1}{d}\,\tfrac{12h^2}{t} \quad\Rightarrow\quad T = 3h\,\frac{d-1}{d\,(t-1)}$$
#
# Measured: a model of two layers minus a model of one is one layer.

# %%
from dataclasses import replace

from course_lib.launch import World

WIDE = tiny_config(
    family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, max_seq_len=384, layers=1
)  # fmt: skip
TOKENS = (48, 96, 192, 384)


def sent_by_model(layers, sizes):
    """Bytes of this rank by number of tokens and axis."""
    mesh = make_mesh(**sizes)
    config = replace(WIDE, layers=layers)
    trainer = compose.parallelize(build_model(config), mesh, Plan(), adam)
    found = {}
    for tokens in TOKENS:
        place = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
        mesh.ledger.clear()
        trainer.step(*batch(0, seed=0, batch_size=mesh.dp.size, seq_len=tokens, **place))
        for axis in ("tp", "dp"):
            found[tokens, axis] = mesh.ledger.wire_bytes(axis)
    return found


def one_layer(world, sizes):
    one, two = (world.run(sent_by_model, layers, sizes)[0] for layers in (1, 2))
    return {key: int(two[key] - one[key]) for key in two}


with World(4) as world:
    alone = {axis: one_layer(world, {axis: 4}) for axis in ("tp", "dp")}
    mesh_2x2 = one_layer(world, {"tp": 2, "dp": 2})

print(f"h = {WIDE.hidden}: 3h = {3 * WIDE.hidden} tokens; in the 2 x 2 mesh {3 * WIDE.hidden // 2}")
print(f"{'':8}{'as alternatives':^24}{'together, 2 x 2':^24}")
print(f"{'tokens':8}{'tp=4':>12}{'dp=4':>12}{'tp':>12}{'dp':>12}   bytes per rank, one layer")
for tokens in TOKENS:
    cells = [alone["tp"][tokens, "tp"], alone["dp"][tokens, "dp"]]
    cells += [mesh_2x2[tokens, "tp"], mesh_2x2[tokens, "dp"]]
    print(f"{tokens:<8}" + "".join(f"{cell:12,}" for cell in cells))
print(f"your prediction: {predicted_tokens}")

# %% [markdown]
# At 3h, and at half of it in the mesh, the columns meet within a few percent: biases and norms are the rest. So "TP >
# DP" is a fact about batches. Llama 3's 405B model has h = 16,384: a replica of its table 4 reads 131,072 tokens or
# more per step. There TP sends more.
#
# And PP? A rank sends 2Th elements, forward and back, once for all l layers of its stage, while TP sends for each
# layer: always less than TP. PP sends more than DP from 2Th = 24h²l/t on: T = 12hl/t tokens, or 12hl where sequence
# parallelism has sharded the activations too.
#
# ## Speed-up against N
# The same work on more ranks: 8 sequences of 128 tokens, 4 layers. DP and PP take 8 micro-batches of one; TP fills no
# pipeline, and takes two of four, so it sends less often. First the formulas: work / N, plus bubble, plus messages,
# none of them hidden.

# %%
from course_lib.comm.alpha_beta import ring_seconds
from course_lib.schedule import Costs, make, simulate

SPEED = tiny_config(
    family="gpt", layers=4, hidden=128, heads=8, kv_heads=8, ffn=512, max_seq_len=128
)  # fmt: skip
ROWS, F_MODEL, B_MODEL = 8, 0.096, 0.192  # sequences; seconds of the whole model for one
TP_MICRO = 2  # micro-batches of TP
TP_CALLS = 4 * SPEED.layers * TP_MICRO
INSIDE, ACROSS = Link(alpha=0.0001, beta=500e6), Link(alpha=0.0005, beta=25e6)
X_BYTES = 128 * SPEED.hidden * 4  # of one sequence
P_BYTES = sum(p.nbytes for p in build_model(SPEED).parameters())
ONE_PROCESS = ROWS * (F_MODEL + B_MODEL)


def step_seconds(way, n, link):
    work = ONE_PROCESS / n
    if n == 1:
        return work
    if way == "dp":
        return work + ring_seconds(P_BYTES, n, link)
    if way == "tp":
        return work + TP_CALLS * ring_seconds(X_BYTES * ROWS / TP_MICRO, n, link)
    costs = Costs.make(f=F_MODEL / n, b=B_MODEL / n, comm=link.alpha + X_BYTES / link.beta)
    return simulate(make("1f1b", n, ROWS), costs).makespan


WAYS = {  # name: axis, link, on how many ranks
    "DP, across nodes": ("dp", ACROSS, (1, 2, 4, 8)),
    "TP, inside a node": ("tp", INSIDE, (1, 2, 4, 8)),
    "TP, across nodes": ("tp", ACROSS, (1, 2, 4, 8)),
    "PP, across nodes": ("pp", ACROSS, (1, 2, 4)),
}
seconds = {
    name: {n: step_seconds(way, n, link) for n in counts}
    for name, (way, link, counts) in WAYS.items()
}

# %% [markdown]
# Now real ranks. Arithmetic is sleep, links are emulated; messages and waiting are real. TP's compute is slept
# between real all-reduces; DP and PP train.
#
# Processes that share two cores add a cost outside all formulas: gloo's own time per call. Where a step makes 32
# calls one after another, that is much. Measured with one sequence and no emulated link, it has its own column.


# %%
def slept_tp(sequences, micro):
    """Attention and MLP of each layer, forward and backward, an all-reduce after each."""
    mesh = make_mesh(tp=torch.distributed.get_world_size())
    x = torch.zeros(X_BYTES // 4 * sequences // micro)
    comm.all_reduce(x, mesh.tp)
    comm.barrier(mesh.tp)
    start = time.perf_counter()
    for _ in range(micro):
        for op in "FB":
            for _ in range(2 * SPEED.layers):
                with mesh.compute(op):
                    pass
                comm.all_reduce(x, mesh.tp)
    return time.perf_counter() - start


def trained(axis):
    n = torch.distributed.get_world_size()
    mesh = make_mesh(**{axis: n})
    plan = Plan(micro_batches=ROWS // n if axis == "dp" else ROWS)
    trainer = compose.parallelize(build_model(SPEED), mesh, plan, adam)
    place = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
    given = batch(0, seed=0, batch_size=ROWS, seq_len=128, **place)
    comm.barrier(mesh.world)
    start = time.perf_counter()
    trainer.step(*given)
    return time.perf_counter() - start


def slept_seconds(n, sequences, micro, links=None):
    """A step of TP; its arithmetic is slept, for as many sequences as a micro-batch has."""
    each = sequences / micro / (2 * SPEED.layers * n)
    pace = {"F": F_MODEL * each, "B": B_MODEL * each}
    return max(run(slept_tp, sequences, micro, n=n, pace=pace, links=links))


def measured_seconds(way, n, link):
    links = Links(inside=link, between=link)
    if way == "tp":
        return slept_seconds(n, ROWS, TP_MICRO, links)
    divided_by = 1 if way == "dp" else n
    pace = {"F": F_MODEL / divided_by, "B": B_MODEL / divided_by}
    return max(run(trained, way, n=n, pace=pace, links=links))


COUNTS = (2, 4)
ONE = F_MODEL + B_MODEL  # seconds of one sequence
own = {n: (slept_seconds(n, 1, 1) - ONE / n) / (4 * SPEED.layers) for n in COUNTS}
measured = {
    name: {n: ONE_PROCESS / measured_seconds(way, n, link) for n in COUNTS}
    for name, (way, link, _) in WAYS.items()
}
print("a call costs gloo", ", ".join(f"{1e3 * own[n]:.1f} ms on {n} ranks" for n in COUNTS), "here")
print(f"{'':18}" + "".join(f"{f'on {n} ranks':^30}" for n in COUNTS))
print(f"{'speed-up':18}" + f"{'formula':>9}{'and gloo':>10}{'measured':>10} " * 2)
for name, (way, *_) in WAYS.items():
    line = f"{name:18}"
    for n in COUNTS:
        took = seconds[name][n]
        gloo = f"{ONE_PROCESS / (took + TP_CALLS * own[n]):.2f}" if way == "tp" else "-"
        line += f"{ONE_PROCESS / took:9.2f}{gloo:>10}{measured[name][n]:10.2f} "
    print(line)
print(f"your prediction for TP across nodes on 4: {predicted_speedup}")

# %%
from course_lib.view.curves import curves

curves(
    {name: {n: ONE_PROCESS / took for n, took in by_n.items()} for name, by_n in seconds.items()},
    measured,
    across="ranks",
    up="times as fast as one rank",
    ideal="ideal",
    title="Speed-up across nodes: TP stays near 2, DP and PP go on",
    note=f"Not in the lines: {1e3 * own[4]:.1f} ms that a call costs gloo itself on 4 ranks here.",
)

# %% [markdown]
# Read TP's points against `and gloo`, roughly this machine's cost; DP and PP also run a real optimizer, which is in
# no line. Compare the lines: they are the cost on a cluster, where a call's own cost is microseconds. DP can use at
# most 8 ranks (sequences), PP 4 (layers), TP 8 (heads). Hence several axes: 8 sequences x 8 heads x 4 layers are 256
# ranks, where no single axis goes beyond 8.
#
# ## Which combinations are refused
# Not every choice works with every other. `compose.refusals` says why, before any process starts; `discouraged` lists
# plans that work and should not be used.

# %%
import textwrap

ASKED = {
    "ZeRO-2 in a pipeline": ({"dp": 2, "pp": 2}, Plan(zero=2, micro_batches=4)),
    "3 ranks of tp": ({"tp": 3}, Plan()),
    "experts, tp without rows": ({"tp": 2, "dp": 2, "ep": 2}, Plan(experts=EXPERTS)),
    "ep=4 on dp x cp = 2": ({"dp": 2, "ep": 4}, Plan(experts=EXPERTS)),
    "5 stages": ({"pp": 5}, Plan(micro_batches=10)),
    "ulysses, zig-zag": ({"cp": 2}, Plan(core=compose.ULYSSES)),
}
for name, (sizes, plan) in ASKED.items():
    print(name)
    for reason in compose.refusals(CONFIG, sizes, plan):
        print(textwrap.fill(reason, 100, initial_indent="    - ", subsequent_indent="      "))
print("works, and is discouraged: 2 micro-batches on pp=4")
for sentence in compose.discouraged(CONFIG, {"pp": 4}, Plan(micro_batches=2)):
    print(textwrap.fill(sentence, 100, initial_indent="    - ", subsequent_indent="      "))

# %% [markdown]
# Remember the first: it does not fail, it is expensive. A pipeline needs many micro-batches, and ZeRO-2 sends for
# each.
#
# ## From sixteen ranks to one process
# 4D saved a checkpoint after its last step. It contains full tensors by name, no ranks. One process reads it, and
# continues.


# %%
def goes_on(path):
    plan = replace(PLANS["4D"], zero=0)
    mesh = make_mesh()
    trainer = compose.parallelize(fresh(plan), mesh, plan, adam)
    trainer.load(path)
    return float(trainer.step(*rows(STEPS)).loss)


again = run(goes_on, SAVED, n=1)[0]
never_stopped = run(reference, PLANS["4D"], range(STEPS + 1), n=1)[0][0][-1]
print(f"saved by 16 ranks, loaded by 1: loss {again:.10f}")
print(f"one process all along:               {never_stopped:.10f}")
assert abs(again - never_stopped) < 1e-8
FOLDER.cleanup()

# %% [markdown]
# ## The same in PyTorch
# `init_device_mesh` names its dims from slowest to fastest, the reverse of our order. Groups and a sum over each must be
# equal to ours:

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def in_pytorch():
    devices = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    mesh = make_mesh("tp-dp-pp", tp=2, dp=2, pp=2)
    groups = {}
    for name in ("tp", "dp", "pp"):
        group, axis = devices.get_group(name), getattr(mesh, name)
        assert dist.get_process_group_ranks(group) == list(axis.ranks)
        assert devices.get_local_rank(name) == axis.rank
        x = torch.tensor([float(mesh.rank)])
        dist.all_reduce(x, group=group)
        assert torch.equal(x, comm.all_reduce(torch.tensor([float(mesh.rank)]), axis))
        groups[name] = list(axis.ranks)
    return groups


for rank, groups in enumerate(run(in_pytorch, n=8)):
    print(
        f"rank {rank}: {groups}; theirs are equal"
        + (f"; you said {predicted_group}" if rank == 5 else "")
    )

# %% [markdown]
# ## Break it and diagnose
# Five runs of 8 ranks, dp=4, pp=2, ep=2, with experts, a tied embedding and clipping. One is correct (its cause is
# `"correct"`), four are faulty:
#
# - **replicas**: the norm counts every rank's gradients, copies too
# - **own norm**: each rank clips by the norm of its own gradients
# - **experts**: one rank divides its experts' gradients by dp
# - **tied**: first and last stage do not exchange the embedding's gradient
#
# For each say the cause, the axis of the wrong or missing communication (`"world"`, `"edp"`, `"pp"`), and the rank (a
# number or `"all"`). Gradients are before clipping, against a correct rank at the same place. Another SEED draws
# other runs.

# %%
SEED = 2
diagnosis = {  # such as ("tied", "pp", "all"), or ("correct", None, None)
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
    "replicas": ("world", "all"),
    "own norm": ("world", "all"),
    "experts": ("edp", range(8)),
    "tied": ("pp", "all"),
}
lab = Lab("12", SEED, FAULTS, fields=("cause", "axis", "rank"))
LAB_MESH = {"dp": 4, "pp": 2, "ep": 2}
LAB_PLAN = Plan(micro_batches=2, max_norm=CLIP, experts=EXPERTS)


def kind_of(part):
    return "embedding" if part.stage is None else "experts" if part.axis.name == "edp" else "rest"


def add_fault(trainer, lab_run):
    gradients = trainer.gradients
    if lab_run.has("replicas"):
        world = trainer.mesh.world
        gradients.norm = lambda held: comm.all_reduce(
            own_norm(held) ** 2, world, control=True
        ).sqrt()
    if lab_run.has("own norm"):
        gradients.norm = own_norm
    if lab_run.has("tied"):
        gradients.sum_tied = lambda held: None
    if lab_run.has("experts", trainer.mesh.rank):
        for part in gradients.parts:
            if kind_of(part) == "experts":
                divide_after(part, trainer.mesh.dp.size)


def divide_after(part, by):
    finish = part.sync.finish

    def divided():
        finish()
        for one in part.held:
            one.gradient.div_(by)

    part.sync.finish = divided


def spread(trainer, kind, axis):
    """The largest difference between the weights of ``kind`` on the ranks of ``axis``."""
    parts = [part for part in trainer.gradients.parts if kind_of(part) == kind]
    flat = torch.cat([p.detach().flatten() for part in parts for p in part.parameters])
    return float((comm.all_reduce(flat, axis, control=True) / axis.size - flat).abs().max())


def observed(lab_run=None):
    mesh = make_mesh(**LAB_MESH)
    trainer = compose.parallelize(fresh(LAB_PLAN), mesh, LAB_PLAN, adam)
    if lab_run:
        add_fault(trainer, lab_run)
    norm, found = trainer.gradients.norm, {}

    def noted(held):
        if not found:
            for part in trainer.gradients.parts:
                found[kind_of(part)] = float(own_norm(part.held))
        return norm(held)

    trainer.gradients.norm = noted
    steps = [trainer.step(*rows(step, mesh.dp.rank, mesh.dp.size)) for step in range(3)]
    return {
        "losses": [float(step.loss) for step in steps],
        "norm": float(steps[0].norm),
        "gradients": found,
        "apart": {
            "replicas": spread(trainer, "rest", mesh.dp),
            "experts": spread(trainer, "experts", mesh.edp),
            "tied copies": spread(trainer, "embedding", mesh.pp),
        },
    }


with World(8, timeout=120) as world:
    correct = world.run(observed)
    observations = {lab_run.letter: world.run(observed, lab_run) for lab_run in lab}

for name, result in observations.items():
    off = [abs(result[0]["losses"][at] - correct[0]["losses"][at]) for at in (0, -1)]
    norms = [one["norm"] / other["norm"] for one, other in zip(result, correct, strict=True)]
    print(f"{name}  loss off: first {off[0]:.0e}, last {off[1]:.0e};", end="")
    print("  weights apart:", end="")
    for what in result[0]["apart"]:
        print(f" {what} {max(one['apart'][what] for one in result):.0e}", end="")
    print(f"\n   {'norm':10}" + "".join(f"{value:6.2f}" for value in norms) + "   by rank")
    for kind in ("rest", "experts", "embedding"):
        pairs = zip(result, correct, strict=True)
        ratios = [one["gradients"][kind] / other["gradients"][kind] for one, other in pairs]
        print(f"   {kind:10}" + "".join(f"{value:6.2f}" for value in ratios))

# %% [markdown]
# <details><summary>How to read it</summary>
#
# The first loss is right in all five: it is computed before any gradient.
#
# - **All gradients right, the norm too large and equal on all ranks**: *replicas*. Steps are clipped too
#   much.
# - **All gradients right, the norm differs by rank**: *own norm*. Replicated weights drift apart.
# - **Experts wrong on one rank**: *experts*. Its experts differ from their copies; the faulty rank's ratio is not 1.
# - **Embedding wrong on both stages, and the two copies apart**: *tied*. Each has only its own partial gradient.
#
# Two checks find all of it: the gradient norm of a single-process reference, and a checksum of every copy over its
# ranks.
# </details>

# %%
lab.grade(diagnosis)  # lab.reveal() shows what they have

# %% [markdown]
# ## When not to use it
# - **Fewer axes suffice.** Each adds mistakes that raise no error. On one node, if the model fits with ZeRO, use
#   ZeRO.
# - **tp beyond a node.** See the curve. First pp, then cp for long sequences.
# - **pp with few micro-batches.** dp x micro-batches is bounded by the batch: large dp leaves each pipeline few.
# - **cp for short sequences.** It divides the tokens of a rank like dp, and sends more.
# - **ZeRO-2 and ZeRO-3 in a pipeline.** Refused above.
#
# ## The table that grows
# A rank's weights and optimizer state (the fullest rank), bytes of all ranks in a step, lines of code that compose
# adds to the techniques.

# %%
from course_lib.compose import build, gradients, trainer
from course_lib.view import code_lines

code = code_lines(build.build_stages, gradients.Gradients, gradients.make_parts, trainer.Trainer)
one = sum(p.nbytes for p in fresh(PLANS["3D"]).parameters())
print(f"{'':14}{'weights':>11}{'optimizer':>11}{'bytes sent':>13}{'code':>6}")
print(f"{'one process':14}{one:11,}{2 * one:11,}{0:13}")
for name, result in runs.items():
    weights, state = (max(one["stored"][at] for one in result) for at in (0, 1))
    sent = float(sum(wire_bytes_by_axis(result.ledgers).values()))
    print(f"{f'{name}, {len(result)} ranks':14}{weights:11,}{state:11,}{sent:13,.0f}{code:6}")

# %% [markdown]
# (5D has four times the experts of one MLP; its one process would hold more than the first line says.)
#
# ## The claims settled
# **Claim 1: only if a replica's tokens lie between two thresholds.** TP passes DP at 3h (in a mesh 3h(d-1)/(d(t-1))),
# and PP passes DP at about 12hl/t: activations grow with tokens, gradients do not. tp is innermost in any case
# because its messages are many, and hardly any can hide (lesson 05).
#
# **Claim 2: false.** ep is inside dp x cp: the ranks of an ep group have different data. [Megatron Core's
# guide](https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/parallelism-guide.html) prints that
# product; with ep=2 it would ask 5D for 32 ranks, and it ran on:

# %%
print(f"5D ran on {len(runs['5D'])} ranks; your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# Llama 3's two layouts and a note's, bytes and times computed from the library's formulas: bfloat16, ZeRO-1, sums in
# float32. The links are an assumption: 450 GB/s inside a node of eight, 50 GB/s per GPU between nodes, one way,
# without alphas.


# %%
def cheat_sheet(name, config, sizes, sequences, seq_len, micro_batches):
    plan = Plan(region=sp.REGION, zero=1, micro_batches=micro_batches, core=compose.GATHER)
    world = ranks_of(sizes)
    replica = sequences // sizes["dp"]
    assert not compose.refusals(config, sizes, plan, sequences=replica, seq_len=seq_len)
    print(f"{name}: {world:,} GPUs, {sequences * seq_len / 2**20:.0f} M tokens per step")
    print(f"{'axis':>8}{'GB per GPU':>12}{'ms':>9}   link")
    sent = compose.wire_bytes(config, sizes, plan, replica, seq_len)
    for axis, total in sent.items():
        inside = axis.startswith("tp")
        own = float(total / world)
        beta = 450e9 if inside else 50e9
        print(f"{axis:>8}{own / 1e9:12.2f}{1e3 * own / beta:9.0f}   {'in' if inside else 'out'}")
    tokens = replica * seq_len
    equal = tokens * float(sent.get("dp", sent.get("dp_cp")) / sent["tp"])
    print(f"a replica reads {tokens:,} tokens; tp sends more than dp from about {equal:,.0f}\n")


LLAMA = tiny_config(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, max_seq_len=131072,
    dtype=torch.bfloat16,
)  # fmt: skip
GPT3 = tiny_config(
    family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200,
    max_seq_len=2048, dtype=torch.bfloat16,
)  # fmt: skip
cheat_sheet("Llama 3 405B", LLAMA, {"tp": 8, "pp": 16, "dp": 128}, 2048, 8192, 16)
cheat_sheet("Llama 3, long", LLAMA, {"tp": 8, "cp": 16, "pp": 16, "dp": 8}, 128, 131072, 16)
cheat_sheet("GPT-3, note's 512", GPT3, {"tp": 8, "pp": 8, "dp": 8}, 512, 2048, 64)

# %% [markdown]
# The last line of each takes TP's bytes as proportional to tokens. It is above the rule of thumb because gradients
# are sent in float32 here, activations in bfloat16; and cp=16 divides the tokens of a rank.
#
# A note leaves Llama 3's CP open ("CP = ?"): 1 at 8,192 tokens, 16 at 131,072, and dp falls from 128 to 8, so that
# the product stays. The other note guesses 5 ms per layer for TP and 50 ms for a pipeline's transfer; by its own
# links:

# %%
activation = 2048 * GPT3.hidden * 2  # one sequence in bfloat16
layer = 2 * ring_seconds(activation, 8, Link(0.0, 600e9))
print(f"TP, two all-reduces forward at 600 GB/s: {1e3 * layer:.2f} ms per layer")
print(f"PP, one activation at 25 GB/s: {1e3 * activation / 25e9:.1f} ms per micro-batch")

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/12_five_axes.ipynb), each on its own: a mesh by hand (10 minutes), which ranks hold a
# copy (5), bytes on each axis (15); and on real ranks the norm across axes (20), and fully reduced gradients in raw
# PyTorch (25).

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "12-1"}
# ## 12-1 A mesh by hand
# Ten minutes, on paper; no code. Sixteen ranks on two nodes of eight; order tp-dp-pp (tp fastest), tp=2, dp=4, pp=2.
#
# - `coordinates`: of rank 13, [tp, dp, pp]
# - `groups`: of rank 13, the ranks of its groups of [tp, dp, pp], such as [[0, 1], [0, 1, 2], [0, 4]]
# - `crosses`: the axes whose groups cross nodes, such as `"tp dp"`
# - `copies`: on how many ranks, this one included, is the fully reduced gradient of a matrix that tp shards, of a
#   norm's weight, and of the tied embedding (sharded by tp, used by both stages)? No ZeRO: a list of three
# - `copies, ZeRO-1`: the same, where dp's sum leaves a shard
# - `squared norm`: without ZeRO each of the 16 ranks has matrices' gradients whose squares add up to 3 and norms'
#   gradients whose squares add up to 4 (no embedding): the squared norm of the full model's gradient
# - `counted twice`: the same, if every rank adds all its gradients
# - `tokens`: h = 1024. From how many tokens of a replica does TP send more than DP: [as alternatives on 4 ranks, together in
#   this mesh]
# - `experts`: with ep=2 and 8 experts per layer: [ranks in all, experts on a rank, ranks over which an expert's
#   gradient is summed]

# %% course={"ex": "12-1", "role": "answer"}
# BEGIN SOLUTION
mesh = {
    "coordinates": [1, 2, 1],
    "groups": [[12, 13], [9, 11, 13, 15], [5, 13]],
    "crosses": "pp",
    "copies": [4, 8, 8],
    "copies, ZeRO-1": [1, 2, 2],
    "squared norm": 20,
    "counted twice": 112,
    "tokens": [3072, 2304],
    "experts": [16, 4, 2],
}
# STUB
# mesh = {
#     "coordinates": None,  # three numbers
#     "groups": None,  # three lists
#     "crosses": None,
#     "copies": None,  # three numbers
#     "copies, ZeRO-1": None,
#     "squared norm": None,
#     "counted twice": None,
#     "tokens": None,  # two numbers
#     "experts": None,  # three numbers
# }
# END SOLUTION

# %% [markdown] course={"ex": "12-1", "role": "answer"}
# - 13 = 1 + 2 · (2 + 4 · 1). A step on tp is 1 rank, on dp 2, on pp 8: that is a node.
# - A matrix is on the 4 ranks of dp; a norm on 4 · 2; the embedding's shard on 4, in two stages. ZeRO-1 removes the
#   4.
# - 16 · 3 / 4 + 16 · 4 / 8 = 12 + 8. All of it: 16 · 7.
# - 3h; and 3h · 3 / (4 · 1).
# - ep is inside dp: no extra ranks. 8 / 2 experts; dp / ep = 2 ranks hold the same ones.

# %% course={"ex": "12-1", "role": "check"}
from course_lib.grading import check

check("12-1", mesh)

# %% [markdown] course={"ex": "12-2"}
# ## 12-2 Which ranks hold a copy
# On how many ranks of the mesh, this one included, is this rank's shard of a fully reduced gradient? Its square
# counts one over that number in the norm. Write the missing line.
#
# - `cut`: tp shards the weight; otherwise it is replicated on all ranks of tp
# - `expert`: the weight belongs to an expert, so ep has divided the ranks that hold it
# - `ends`: it is a tied embedding that first and last stage both hold
# - `sharded`: ZeRO has left this rank a shard that no other rank of the same data axis has


# %% course={"ex": "12-2", "role": "answer"}
def holders(sizes, cut, expert, ends, sharded):
    """A whole number. ``sizes`` has tp, cp, dp and ep."""
    data = sizes["dp"] * sizes["cp"] // (sizes["ep"] if expert else 1)  # sum the same gradients
    # BEGIN SOLUTION
    return (1 if cut else sizes["tp"]) * (1 if sharded else data) * (2 if ends else 1)
    # END SOLUTION


# %% course={"ex": "12-2", "role": "check"}
from course_lib.grading import check

check("12-2", holders)

# %% [markdown] course={"ex": "12-3"}
# ## 12-3 Bytes on each axis
# Return the bytes that all ranks together send in a step, by axis. The model is `layers` layers of 12h² parameters
# and nothing else (no biases, norms, vocabulary); h is `hidden`. Elements have 4 bytes. A replica reads `tokens`
# tokens in a step, in any number of micro-batches. `sizes` has tp, dp and pp; pp divides the layers.
#
# - **tp**: four all-reduces per layer of all tokens' activations (h elements per token); a rank has layers / pp
#   layers
# - **dp**: one all-reduce of the rank's gradients
# - **pp**: activations forward and their gradients back over each of the pp - 1 stage boundaries; every rank of tp
#   sends them in full
#
# An all-reduce of S bytes over n ranks sends 2(n-1)/n S from each rank.


# %% course={"ex": "12-3", "role": "answer"}
def sent(layers, hidden, tokens, sizes):
    """{"tp": bytes, "dp": bytes, "pp": bytes} of all ranks together; 0 on an axis of size 1."""
    # BEGIN SOLUTION
    t, d, p = sizes["tp"], sizes["dp"], sizes["pp"]
    ranks, activations = t * d * p, 4 * tokens * hidden
    gradients = 4 * 12 * hidden**2 * layers / (t * p)
    return {
        "tp": ranks * 4 * (layers // p) * 2 * (t - 1) / t * activations,
        "dp": ranks * 2 * (d - 1) / d * gradients,
        "pp": t * d * (p - 1) * 2 * activations,
    }
    # END SOLUTION


# %% course={"ex": "12-3", "role": "check"}
from course_lib.grading import check

check("12-3", sent)

# %% [markdown] course={"ex": "12-4"}
# ## 12-4 Clip across two axes
# A rank of a tp x pp mesh holds fully reduced gradients of three kinds:
#
# - `"cut"`: its shard; every other rank has another shard
# - `"copied"`: a weight that tp replicates; the ranks of its tp group hold equal tensors, other stages have others
# - `"tied"`: the tied embedding's. Only ranks with coordinate 0 or pp.size - 1 on pp have this key. It is sharded
#   over tp, and both stages hold the same shard
#
# Write the clipping: the norm of the full model's gradient, in which every element counts once; then, where it is
# above `max_norm`, scale all gradients in place by max_norm / norm.
#
# The check looks at the norm on every rank of one to four, and at the gradients (unchanged where the norm is small).
# Only scalars may be sent.


# %% course={"ex": "12-4", "role": "answer"}
def clip(gradients, max_norm, tp, pp):
    """The norm before clipping, the same on all ranks; ``gradients`` {kind: tensor} are scaled.

    ``comm.all_reduce(x, axis)`` returns the sum over the ranks of an axis, x itself on one rank.
    """
    # BEGIN SOLUTION
    square = gradients["cut"].square().sum() + gradients["copied"].square().sum() / tp.size
    if "tied" in gradients:
        square = square + gradients["tied"].square().sum() / (2 if pp.size > 1 else 1)
    norm = comm.all_reduce(comm.all_reduce(square, tp), pp).sqrt()
    if norm > max_norm:
        for gradient in gradients.values():
            gradient.mul_(max_norm / norm)
    return norm
    # END SOLUTION


# %% course={"ex": "12-4", "role": "check"}
from course_lib.grading import check

check("12-4", clip)

# %% [markdown] course={"ex": "12-5"}
# ## 12-5 Fully reduced gradients in raw PyTorch
# After backward, on a mesh of tp, dp and pp, with `torch.distributed` alone; `course_lib` refuses here. Reduce the
# gradients of this rank fully, in place. `gradients` is a dict:
#
# - `"matrix"`: sharded over tp. The other ranks of dp have other tokens
# - `"norm"`: replicated; ranks of tp have other rows, ranks of dp other tokens
# - `"expert"`: of the experts on this rank. Here ep is all of dp: no other rank has them, and all tokens were sent to
#   them
# - `"tied"`: only on the first and the last stage: each has its own partial gradient of the embedding, from its own
#   tokens of dp
#
# `tp`, `dp` and `pp` are process groups, each made by `dist.new_group`, also those of one rank. The losses are divided already:
# gradients are summed. `dist.get_process_group_ranks(pp)` are the global ranks of the stages in order.
#
# The check looks at all gradients and all messages on one to four ranks.
#
# Of use: `dist.all_reduce(x, group=tp)`; `dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y,
# peer)])` returns works to wait for; peers are global ranks. x must not change before its work is done.


# %% course={"ex": "12-5", "role": "answer"}
def complete(gradients, tp, dp, pp):
    """Make every tensor of ``gradients`` the complete gradient, in place."""
    # BEGIN SOLUTION
    for name, gradient in gradients.items():
        if name != "expert":
            dist.all_reduce(gradient, group=dp)
    dist.all_reduce(gradients["norm"], group=tp)
    stages = dist.get_process_group_ranks(pp)
    if "tied" in gradients and len(stages) > 1:
        mine = gradients["tied"]
        other = stages[-1] if dist.get_rank() == stages[0] else stages[0]
        theirs = torch.empty_like(mine)
        both = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        mine += theirs
    # END SOLUTION


# %% course={"ex": "12-5", "role": "check"}
from course_lib.grading import check

check("12-5", complete)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** 256 GPUs in nodes of 8, tp=8, cp=2, pp=4. How many replicas? Which ranks sum the gradient of a matrix?
#
# <details><summary>Answer</summary>
# dp = 256 / 64 = 4. The 8 ranks of dp x cp with the same tp and pp: cp holds other tokens too, so its gradients are summed
# like dp's.
# </details>
#
# **2.** Loss curves of tp=1 and tp=4 agree without clipping and diverge with it. Where do you look?
#
# <details><summary>Answer</summary>
# The norm. Norm weights and other copies are counted tp times, or the sum over tp (or pp) is missing, so that ranks clip
# differently.
# </details>
#
# **3.** Why is an expert's gradient not averaged over dp, and what would training look like if it were?
#
# <details><summary>Answer</summary>
# Its tokens came from all ranks of ep, and the loss was divided by the tokens of all ranks. Divided again, experts learn at a
# fraction of the rate. Adam hides it: steps keep their size, only clipping and eps see it.
# </details>
#
# **4.** tp=8 fills a node. Why may pp or dp be next, and what decides?
#
# <details><summary>Answer</summary>
# Both can send while no rank waits. PP: bytes of activations per stage boundary and micro-batch, and the bubble; DP:
# gradients once, beside backward. Few tokens per replica favor pp, many favor dp; memory often decides first.
# </details>
#
# **5.** You have 4D, and must take ZeRO to save memory. Which stage, and why?
#
# <details><summary>Answer</summary>
# Stage 1: it sends as much as DP, once per step. Stages 2 and 3 send for every micro-batch, and a pipeline needs
# many.
# </details>
#
# ## Sources and what next
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, [arXiv:2104.04473](https://arxiv.org/abs/2104.04473): tp in
#   a node, pp across.
# - Llama team 2024, *The Llama 3 Herd of Models*, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783): section 3.3, table 4.
# - Micikevicius et al. 2017, [arXiv:1710.03740](https://arxiv.org/abs/1710.03740): the loss scale, which `Plan` has too.
# - The library: `course_lib/compose`; its order of sums is the docstring of `gradients.py`.
#
# Next: lesson 13 serves the model. There is no backward, and the order of the axes changes.
