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
# *45 minutes to read and run, 75 to build.* A model needs 1,975,296 bytes for weights, gradients and AdamW. The cluster
# has eight ranks in two nodes, and each rank has 600,000 bytes for them. We turn these numbers into a layout and run
# it, and do the same arithmetic for Llama 3 405B. You need lessons 03 to 07 and 09, and 10 for the experts.
#
# Vote first: `"true"`, `"false"` or `"only if ..."`.
#
# 1. *Tensor parallelism sends more than data parallelism, and data parallelism more than a pipeline.*
# 2. *The number of GPUs is TP x PP x CP x EP x DP.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The job
# The model computes in float64, so a forgotten sum stands out from rounding errors.

# %%
import torch

from course_lib.model import build_model, tiny_config

SEQ, BATCH, STEPS, CLIP = 16, 8, 3, 0.5
CONFIG = tiny_config(
    layers=4, hidden=32, heads=2, kv_heads=2, ffn=96, max_seq_len=SEQ, tied=True,
    dtype=torch.float64,
)  # fmt: skip
RANKS, PER_NODE, ROOM = 8, 4, 600_000

weights = sum(p.nbytes for p in build_model(CONFIG).parameters())
print(f"model:   {CONFIG.layers} layers, {CONFIG.heads} heads, hidden size {CONFIG.hidden}")
print(f"state:   {4 * weights:,} bytes: weights, gradients, two moments")
print(f"cluster: {RANKS} ranks, {PER_NODE} per node, with {ROOM:,} bytes each")
print(f"batch:   {BATCH} sequences of {SEQ} tokens")

# %% [markdown]
# Each rank belongs to one group per axis. All axes except dp communicate in every micro-batch:
#
# | axis | size | shards | sends |
# |---|---|---|---|
# | tp | t | every matrix | activations, 4 times per layer |
# | cp | c | the sequence | keys and values, per layer |
# | pp | p | the layers | activations, twice per stage boundary |
# | dp | d | the batch | gradients, once per step |
# | ep | e | the experts | tokens, 4 times per layer |
#
# A replica reads T tokens per step in m micro-batches. A stage has l layers, and h is the hidden size. Predict for our
# job on tp=2, dp=2, pp=2, where tp varies fastest:

# %%
predicted_group = None  # the ranks with which rank 5 sums gradients, such as [4, 5]
predicted_axis = None  # the axis that sends most bytes in a step: "tp", "dp" or "pp"
predicted_norm = None  # the norm, as a multiple of the right one, if every rank counts all it holds
predicted_tokens = None  # T from which tp=4 alone sends more than dp=4 alone; h = 64

# %% [markdown]
# ## From memory to sizes
# Memory decides what can run at all. We begin with TP, because it divides state and activations and has no bubble. Our
# model has two heads, so t is at most 2; for Llama 3, t = 8 fills a node. Then we add pipeline stages until the fullest
# one fits. The remaining factor is d, the number of replicas.

# %%
from course_lib import compose, sp
from course_lib.compose import Plan

LLAMA = tiny_config(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, max_seq_len=131072,
    dtype=torch.bfloat16,
)  # fmt: skip


def stage_elements(config, sizes):
    """Elements that a rank of each stage stores."""
    found = {}
    for part in compose.part_sizes(config, sizes, Plan(region=sp.REGION, micro_batches=16)):
        found[part.stage] = found.get(part.stage, 0) + sum(part.elements)
    return list(found.values())


def state(config, sizes, weight, gradient, optimizer, zero=False):
    """Bytes on the fullest rank, from the bytes per element; ZeRO-1 shards the optimizer."""
    shards = sizes["dp"] if zero else 1
    return max(stage_elements(config, sizes)) * (weight + gradient + optimizer / shards)


OURS, THEIRS = (8, 8, 16), (2, 4, 12)  # float64; bfloat16 with float32 gradients and AdamW
JOB, LLAMA_MESH = {"tp": 2, "pp": 2, "dp": 2}, {"tp": 8, "pp": 16, "dp": 128}
print(f"{'state of the fullest rank':28}{'ours, bytes':>14}{'Llama 3, GB':>14}")
for name, ours, theirs, zero in (
    ("one rank", {}, {}, False),
    ("tp", {"tp": 2}, {"tp": 8}, False),
    ("tp and pp", JOB, LLAMA_MESH, False),
    ("tp, pp, and ZeRO-1 over dp", JOB, LLAMA_MESH, True),
):
    small, large = state(CONFIG, ours, *OURS, zero), state(LLAMA, theirs, *THEIRS, zero)
    print(f"{name:28}{small:14,.0f}{large / 1e9:14,.0f}")
print(f"ours: {JOB}, Llama 3: {LLAMA_MESH}")

# %% [markdown]
# Our job fits in the third row, and d = 8 / (2 · 2) = 2. For Llama 3 this row leaves 18 of an H100's 80 GB for
# activations, and ZeRO-1 leaves 59.
#
# A replica reads 4 sequences, one per micro-batch. So m = 4, and the bubble is (p-1)/(m+p-1) = 1/5 of the step.
#
# ## From sizes to ranks
# In the order tp-dp-pp, the rank with coordinates (tp, dp, pp) has the number tp + t (dp + d pp). A rank's group on an
# axis contains the ranks that differ from it on this axis alone. Below, mp is tp x pp, the ranks of one replica:

# %%
from course_lib.layout import drawing, make_layout
from course_lib.view.rank_grid import rank_grid

LAYOUT = make_layout(RANKS, "tp-dp-pp", **JOB)
print(drawing(LAYOUT, per_node=PER_NODE))

# %%
rank_grid(LAYOUT, "pp", per_node=PER_NODE, title="Only the groups of pp cross nodes")

# %% [markdown]
# Move the sliders: which order makes dp cross the nodes instead of pp?

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
# ## From a layout to a run
# Before any process starts, `compose.refusals` checks whether model, sizes and plan fit together:

# %%
import textwrap

from course_lib.compose import Experts

EXPERTS = Experts(number=4, top_k=2, coefficient=0.05)
ASKED = {
    "our job": (JOB, Plan(region=sp.REGION, micro_batches=4)),
    "4 ranks of tp": ({"tp": 4, "pp": 2}, Plan(micro_batches=4)),
    "ep=4 on dp x cp = 2": ({"dp": 2, "ep": 4}, Plan(experts=EXPERTS)),
    "ZeRO-2 in a pipeline": ({"dp": 2, "pp": 2}, Plan(zero=2, micro_batches=4)),
}
for name, (sizes, plan) in ASKED.items():
    print(name)
    for reason in compose.refusals(CONFIG, sizes, plan) or ["no objection"]:
        print(textwrap.fill(reason, 100, initial_indent="    - ", subsequent_indent="      "))

# %% [markdown]
# We return to ZeRO-2 below. `compose.parallelize` then applies the techniques in this order:

# %%
from course_lib.compose.build import build_stages
from course_lib.view import show_source

show_source(build_stages)

# %% [markdown]
# Experts and tp come first, because creating process groups takes all ranks, and at this point all have the same layers.
#
# We run three jobs. *3D* is ours. *4D* adds cp=2 and ZeRO-1, on 16 ranks. *5D* has four experts per MLP and ep=2 instead
# of ZeRO-1. ep adds no ranks, because it divides experts among the ranks of dp x cp.

# %% jupyter={"source_hidden": true}
# The three jobs, and one process that trains like them.
import math

from course_lib import comm, ep
from course_lib.data import batch
from course_lib.launch import run
from course_lib.mesh import make_mesh

MESHES = {
    "3D": JOB,
    "4D": {"tp": 2, "cp": 2, "dp": 2, "pp": 2},
    "5D": {"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2},
}
PLANS = {
    "3D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP),
    "4D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP, zero=1),
    "5D": Plan(region=sp.REGION, micro_batches=4, max_norm=CLIP, experts=EXPERTS),
}


def ranks_of(sizes):
    return math.prod(size for axis, size in sizes.items() if axis != "ep")


def fresh(plan):
    """The single-process model, the same in every process."""
    model = build_model(CONFIG, seed=3)
    if plan.experts:
        ep.add_experts(model, plan.experts.number, plan.experts.top_k, seed=4)
    return model


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def rows(step, rank=0, size=1):
    """A replica's sequences. Their lengths are random, so ranks count different tokens."""
    place = {"dp_rank": rank, "dp_size": size}
    return batch(step, seed=7, batch_size=BATCH, seq_len=SEQ, shortest=5, **place)


def reference(plan, steps=range(STEPS), model=None, replicas=2):
    """(losses, norms) of one process; its micro-batch k holds the k-th of every replica."""
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


# %%
def train(sizes, plan):
    mesh = make_mesh(**sizes)
    trainer = compose.parallelize(fresh(plan), mesh, plan, adam)
    done = []
    for step in range(STEPS):
        mesh.count_from_here()  # the ledger and the kernel count the last step alone
        done.append(trainer.step(*rows(step, mesh.dp.rank, mesh.dp.size)))
    return {
        "losses": [float(step.loss) for step in done],
        "norms": [float(step.norm) for step in done],
        "stored": stored(trainer),
        "groups": groups_of(mesh),
    }


runs, references = {}, {}
for name, sizes in MESHES.items():
    runs[name] = run(train, sizes, PLANS[name], n=ranks_of(sizes), timeout=120)
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
print("5D has other weights, and its loss includes the routers' auxiliary loss")

weights, moments = (max(one["stored"][at] for one in runs["3D"]) for at in (0, 1))
print(f"\n3D, fullest rank: weights {weights:,}, gradients as many, moments {moments:,} bytes")
print(f"together {2 * weights + moments:,} of {ROOM:,}")
assert abs((2 * weights + moments) / state(CONFIG, MESHES["3D"], *OURS) - 1) < 1e-3
assert 2 * weights + moments < ROOM

# %% [markdown]
# All three runs have the losses and norms of one process. The state is as planned, plus AdamW's step counters.
#
# ## When a gradient is fully reduced
# A gradient is fully reduced when every rank that used the weight has added its part:
#
# | missing | sum over | gradients of |
# |---|---|---|
# | other tokens | dp and cp; experts: edp | all |
# | other rows | tp, with sequence parallelism | norms, experts and other replicated weights |
# | other queries | KV replication group | replicated KV heads |
# | other copy | first and last stage | a tied embedding |
#
# All of these are sums, because the loss was divided by the tokens of all ranks. The edp group contains the d · c / e
# ranks with the same experts. An expert's gradient already includes the tokens of all ep ranks, because they were sent
# to it.
#
# Clipping needs the norm of the full gradient, in which each element counts once, although several ranks may store it.
# We compute the norm in three ways:


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
# If each rank clips by its own norm, replicated weights drift apart. If every copy counts, all ranks clip too much. Here
# the norm is √2 to 2 times too large, because matrices are on two ranks, and norms and the embedding on four.
# `grad_norm` divides each square by `copies`, the number of ranks that store it. Under ZeRO, the ranks of dp store
# different shards, which are not copies:

# %%
from course_lib.compose.gradients import Gradients

show_source(Gradients.complete, comm.grad_norm)

# %% [markdown]
# ## What each axis sends, and why tp is innermost
# We compare the formula, `compose.wire_bytes`, with the kernel's count over all ranks. `ms` is the busiest rank's time,
# computed for 100 MB/s inside a node and 5 MB/s between the two nodes.

# %% jupyter={"source_hidden": true}
# Calls and milliseconds by axis, from the ledgers.
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


# %%
print(f"{'':4}{'axis':8}{'calls':>7}{'formula':>12}{'kernel':>12}{'ms':>7}")
for name, result in runs.items():
    sent, formula = wire_bytes_by_axis(result.ledgers), formula_of(name)
    ms = ms_by_axis(result.ledgers, [one["groups"] for one in result])
    for axis, calls in counted_calls(result.ledgers).items():
        expected = float(formula.get(axis, 0))
        kernel = result.kernel_bytes and sum(map(sum, result.kernel_bytes[axis]))
        counted = "no count" if kernel is None else f"{kernel:,}"
        print(f"{name:4}{axis:8}{calls:7,}{expected:12,.0f}{counted:>12}{ms[axis]:7.0f}")
        assert axis == "ep" or sent[axis] == expected
        assert kernel is None or sent[axis] <= kernel <= 1.3 * sent[axis]
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
# The kernel's count includes gloo's headers and a few control messages. For ep the formula assumes even routing. 5D
# sends most over tp, because our tp replicates experts and sums their gradients. In 3D, dp and tp send almost the same
# number of bytes, but tp needs 632 calls instead of 16, and the ranks wait for each.
#
# Now we emulate these links and run the step in three orders. In each, another axis crosses the nodes:

# %%
import time

TWO_NODES = Links(inside=FAST, between=SLOW, ranks_per_node=PER_NODE)
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
    layout = make_layout(RANKS, order, **MESHES["3D"])
    result = run(timed_step, order, MESHES["3D"], PLANS["3D"], n=RANKS, links=TWO_NODES)
    ms = ms_by_axis(result.ledgers, [one["groups"] for one in result])
    took = 1e3 * max(one["seconds"] for one in result)
    cells = "".join(f"{value:8.0f}" for value in (ms["tp"], ms["dp"], ms["pp"], sum(ms.values())))
    crosses = [a for a in ms if any(TWO_NODES.crosses(tuple(g)) for g in layout.groups(a))]
    print(f"{order:10}{cells}{took:10.0f}        {', '.join(crosses)}")

# %% [markdown]
# The measured time includes arithmetic, the bubble and gloo's own cost. Only the order with tp across the slow link is
# far slower.
#
# A common estimate for GPT-3: *"TP: two all-reduces per layer, NVLink 600 GB/s, about 5 ms per layer. PP: one
# transfer per micro-batch, InfiniBand 25 GB/s, about 50 ms per batch."* We check the forward of 32 sequences of 2,048
# tokens with t = 8:

# %%
payload = 32 * 2048 * 12288 * 2  # bytes of one activation of GPT-3 in bfloat16
forward = 2 * payload  # two all-reduces per layer
ring = 2 * 7 / 8 * forward  # what a rank sends, n = 8
print(f"TP, payload over 600 GB/s:             {1e3 * forward / 600e9:5.1f} ms per layer")
print(f"TP, bytes sent over 600 GB/s:          {1e3 * ring / 600e9:5.1f} ms")
print(f"TP, bytes sent over 300 GB/s each way: {1e3 * ring / 300e9:5.1f} ms")
print(f"PP, payload over 25 GB/s:              {1e3 * payload / 25e9:5.1f} ms per batch")

# %% [markdown]
# The estimate for PP is not far off. For TP, it divides the payload by 600 GB/s. But a ring sends 2(t-1)/t times as
# much, and the A100's 600 GB/s count both directions, so the time is 3.5 times as long.
#
# ## Where TP sends more than DP
# Claim 1 often continues: *"Place what sends most inside a machine."* The placement is right. The order of volumes
# depends on the batch, because activations grow with the tokens and gradients do not.
#
# Take a layer of 12h² parameters. As *alternatives*, n ranks use TP or DP. In a *mesh* they use both, and TP divides
# the gradients by t:
#
# $$\text{alternatives: } 8\,\tfrac{n-1}{n}\,Th = 2\,\tfrac{n-1}{n}\,12h^2 \;\Rightarrow\; T = 3h \qquad \text{mesh: } 8\,\tfrac{t-1}{t}\,Th = 2\,\tfrac{d-1}{d}\,\tfrac{12h^2}{t} \;\Rightarrow\; T = 3h\,\tfrac{d-1}{d\,(t-1)}$$
#
# T is what one TP group reads, and both formulas assume elements of equal size. The second is 3h/t only if d = t. We
# measure one layer as the difference between models of two layers and one:

# %% jupyter={"source_hidden": true}
# The bytes of one layer, from the ledgers of two models.
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


# %%
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
# The columns are equal at the predicted tokens, up to biases and norms. For Llama 3 the two formulas differ widely:

# %%
h, t, d = LLAMA.hidden, 8, 128
LLAMA_PLAN = Plan(region=sp.REGION, zero=1, micro_batches=16)
mesh_tokens = 3 * h * (d - 1) / (d * (t - 1))
sent = compose.wire_bytes(LLAMA, LLAMA_MESH, LLAMA_PLAN, 16, 8192)
library = 16 * 8192 * float(sent["dp"] / sent["tp"])
print(f"alternatives of equal degree, 3h:          {3 * h:9,} tokens")
print(f"its mesh, tp=8 and dp=128:                 {mesh_tokens:9,.0f}")
print(f"bfloat16 weights, float32 gradients:       {mesh_tokens * (4 + 2) / (2 + 2):9,.0f}")
print(f"the same by the library, from all shapes:  {library:9,.0f}")
print(f"what a rank reads per step:                {16 * 8192:9,}")
pp_tokens = 12 * h * LLAMA.layers / 16 * (d - 1) / d
print(f"PP passes DP at 12hl, equal sizes:         {pp_tokens:9,.0f}")

# %% [markdown]
# T is 131,072, so TP sends far more than DP. Gradients in 32 bits raise the threshold by half. With sequence parallelism
# and without interleaving, a rank sends at most 2Th/t elements over pp, for all its l layers together. This is always
# less than TP sends, and less than DP sends up to about T = 12hl.
#
# ## ZeRO-2 and ZeRO-3 beside a pipeline
# DeepSpeed's pipeline engine says *"ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"*. The reason
# is cost. A pipeline needs many micro-batches, and ZeRO-2 and ZeRO-3 usually communicate in each of them.
# has the unsharded weights and gradients of a rank in a middle stage of Llama 3:

# %%
from course_lib import zero

elements, m = stage_elements(LLAMA, LLAMA_MESH)[1], 16
parameters = sum(stage_elements(LLAMA, {}))
step = 6 * parameters * 2**24 / (16384 * 400e12)  # 2**24 tokens; 400 TFLOP/s per GPU (table 4)
print(f"{'per GPU and step':44}{'GB sent':>9}{'s at 50 GB/s':>14}{'GB in full':>12}")
for name, stage, count, full in (
    ("ZeRO-1", 1, 1, 2 + 4),
    ("gather once, reduce once (as PyTorch)", 1, 1, 2 + 4),
    ("ZeRO-2: reduce per micro-batch", 2, m, 2),
    ("ZeRO-3: gather and reduce per micro-batch", 3, m, 0),
):
    wire = float(zero.wire_bytes(stage, [elements], d, dtype=LLAMA.dtype, micro_batches=count))
    line = f"{name:44}{wire / 1e9:9.0f}{wire / 50e9:14.1f}{full * elements / 1e9:12.1f}"
    print(line)
print(f"the step computes for about {step:.1f} s")

# %% [markdown]
# But Llama 3 shards optimizer states and gradients, and does not reshard weights after forward. torchtitan does the
# same by default, and PyTorch's pipelining then reduces gradients once, after the last micro-batch. During the step, a
# rank stores weights and gradients in full.
#
# Our `compose` refuses ZeRO-2 and ZeRO-3 beside pp. Its ZeRO-1 sends and stores as much during the step. You only miss
# the third row: 13 GB less for 4 s more communication.
#
# ## The same in PyTorch
# `init_device_mesh` names its dimensions from slowest to fastest, the reverse of our order. Its groups equal ours:

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
# Rank 5 sums gradients with rank 7.
#
# ## Break it and diagnose
# Five runs have dp=4, pp=2 and ep=2. One is `"correct"`, and four are faulty:
#
# - **replicas**: the norm counts every rank's gradients, copies too
# - **own norm**: each rank clips by the norm of its own gradients
# - **experts**: one rank divides its experts' gradients by dp
# - **tied**: first and last stage do not exchange the embedding's gradient
#
# Name the cause, the axis of the wrong sum (`"world"` for the norm, `"edp"`, `"pp"`), and the rank (a number or
# `"all"`). The output shows each rank's norm, and the norms of its gradients before clipping, divided by those of a
# correct run.

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
# - **Gradients right, the norm too large and equal on all ranks**: *replicas*.
# - **Gradients right, the norm differs by rank**: *own norm*.
# - **Experts wrong on one rank**: *experts*. They differ from their copies.
# - **Embedding wrong, and its two copies apart**: *tied*. Each stage has only its own gradient.
#
# </details>

# %%
lab.grade(diagnosis)  # lab.reveal() shows the answers

# %% [markdown]
# ## When not to use it
# - **If fewer axes suffice.** Each axis adds mistakes that raise no error.
# - **tp beyond a node.**
# - **pp with few micro-batches.** Its bubble is large.
# - **cp for short sequences.** It divides tokens like dp, and sends more.
#
# **Claim 1: only if T lies between two thresholds**, 3h(d-1)/(d(t-1)) and about 12hl at equal element sizes.
#
# **Claim 2: false.** ep uses the ranks of other axes. [Megatron Core's
# guide](https://github.com/NVIDIA/Megatron-LM/blob/157006d6d9bf4f55c0d4d7dacbd2b65e7bd84dc9/docs/user-guide/parallelism-guide.md)
# prints the product, which holds without experts. It also lists DeepSeek-V3 on 1,024 GPUs with TP=2, PP=16, EP=64. There
# dp x cp is 32, so ep also uses the ranks of tp:

# %%
print(f"TP x PP x EP of that row: {2 * 16 * 64:,}, more than its 1,024 GPUs")
print(f"the product for 5D: {math.prod(MESHES['5D'].values())}; it ran on {len(runs['5D'])} ranks")
print(f"your votes: 1 {vote_1}; 2 {vote_2}")

# %% [markdown]
# **The table that grows.** Weights and optimizer state are bytes of the fullest rank. Bytes sent are summed over all ranks.

# %%
one = sum(p.nbytes for p in fresh(PLANS["3D"]).parameters())
print(f"{'':14}{'weights':>11}{'optimizer':>11}{'bytes sent':>13}")
print(f"{'one process':14}{one:11,}{2 * one:11,}{0:13}")
for name, result in runs.items():
    weights, moments = (max(one["stored"][at] for one in result) for at in (0, 1))
    sent = float(sum(wire_bytes_by_axis(result.ledgers).values()))
    print(f"{f'{name}, {len(result)} ranks':14}{weights:11,}{moments:11,}{sent:13,.0f}")

# %% [markdown]
# **Cheat-sheet.** Llama 3's two layouts with ZeRO-1, if a GPU sends 450 GB/s inside a node and 50 GB/s between nodes,
# without overlap:


# %%
def cheat_sheet(name, sizes, sequences, seq_len, micro_batches):
    plan = Plan(region=sp.REGION, zero=1, micro_batches=micro_batches, core=compose.GATHER)
    world = ranks_of(sizes)
    replica = sequences // sizes["dp"]
    assert not compose.refusals(LLAMA, sizes, plan, sequences=replica, seq_len=seq_len)
    print(f"{name}: {world:,} GPUs, {sizes}, {sequences * seq_len / 2**20:.0f} M tokens per step")
    print(f"{'axis':>8}{'GB per GPU':>12}{'ms':>9}   link")
    for axis, total in compose.wire_bytes(LLAMA, sizes, plan, replica, seq_len).items():
        inside = axis.startswith("tp")
        own = float(total / world)
        beta = 450e9 if inside else 50e9
        print(f"{axis:>8}{own / 1e9:12.2f}{1e3 * own / beta:9.0f}   {'in' if inside else 'out'}")


print(
    "rank = tp + t (dp + d pp). Sum gradients, never average. Count each element once in the norm."
)
print("In a mesh, TP sends more than DP from T = 3h(d-1)/(d(t-1)), and PP from about 12hl.\n")
cheat_sheet("Llama 3 405B", LLAMA_MESH, 2048, 8192, 16)
cheat_sheet("Llama 3, long", {"tp": 8, "cp": 16, "pp": 16, "dp": 8}, 128, 131072, 16)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/12_five_axes.ipynb) take 75 minutes.

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "12-1"}
# ## 12-1 A mesh by hand
# This takes ten minutes on paper, without code. Sixteen ranks are on two nodes of eight. The order is tp-dp-pp (tp varies
# fastest), with tp=2, dp=4, pp=2.
#
# - `coordinates`: the coordinates of rank 13, [tp, dp, pp]
# - `groups`: the ranks in rank 13's groups of [tp, dp, pp], such as [[0, 1], [0, 1, 2], [0, 4]]
# - `crosses`: the axes whose groups cross nodes, such as `"tp dp"`
# - `copies`: without ZeRO, how many ranks, rank 13 included, store the same fully reduced gradient? Give a list of three:
#   for a matrix that tp shards, a norm's weight, and the tied embedding (sharded by tp, used by both stages)
# - `copies, ZeRO-1`: the same with ZeRO-1, where the sum over dp leaves a shard on each rank
# - `squared norm`: the squared norm of the full model's gradient, without ZeRO and without an embedding. On each of the
#   16 ranks, the squares of the matrices' gradients add up to 3, and the squares of the norms' gradients to 4
# - `counted twice`: the result if every rank adds the squares of all its gradients
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
# - 13 = 1 + 2 · (2 + 4 · 1). A step on tp changes the number by 1, on dp by 2, and on pp by 8, which is a node.
# - A matrix is on the 4 ranks of dp; a norm on 4 · 2; the embedding's shard on 4, in two stages. ZeRO-1 removes the
#   4.
# - 16 · 3 / 4 + 16 · 4 / 8 = 12 + 8. If every copy counts, the sum is 16 · 7.
# - 3h as alternatives, and 3h · 3 / (4 · 1) in the mesh.
# - ep uses ranks of dp and adds none. A rank has 8 / 2 experts, and dp / ep = 2 ranks hold the same ones.

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
# - `ends`: the weight is a tied embedding, which the first and the last stage both hold
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
# - **tp**: four all-reduces per layer, each of all tokens' activations (h elements per token). A rank has layers / pp
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
# - `"cut"`: a shard; every other rank has another shard
# - `"copied"`: a weight that tp replicates; the ranks of a tp group hold equal tensors, and each stage has its own weight
# - `"tied"`: the gradient of the tied embedding. Only ranks with coordinate 0 or pp.size - 1 on pp have this key. It is
#   sharded over tp, and both stages hold the same shard
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
# - `"norm"`: replicated over tp. The ranks of tp have different rows, and the ranks of dp different tokens
# - `"expert"`: a weight of the experts on this rank. Here ep is all of dp, so no other rank has these experts, and all
#   their tokens were sent to this rank
# - `"tied"`: on the first and the last stage only. Each has a partial gradient of the embedding, from its own tokens of
#   dp
#
# `tp`, `dp` and `pp` are process groups made by `dist.new_group`, also where a group has one rank. The losses are
# divided already, so gradients are summed. `dist.get_process_group_ranks(pp)` returns the global ranks of the stages in
# order.
#
# The check looks at all gradients and all messages on one to four ranks.
#
# You need `dist.all_reduce(x, group=tp)` and `dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer),
# dist.P2POp(dist.irecv, y, peer)])`. The second returns a list of works; call `wait()` on each. Peers are global ranks.
# Do not change x before its work is done.


# %% course={"ex": "12-5", "role": "answer"}
def complete(gradients, tp, dp, pp):
    """Reduce every tensor of ``gradients`` fully, in place."""
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
# **Exit questions.** Answer, then unfold.
#
# **1.** On 256 GPUs with tp=8, cp=2, pp=4, what is dp, and which ranks sum a matrix's gradient?
#
# <details><summary>Answer</summary>
# dp = 256 / 64 = 4. The 8 ranks of dp x cp, because ranks of cp have other tokens too.
# </details>
#
# **2.** Losses of tp=1 and tp=4 agree only without clipping. Why?
#
# <details><summary>Answer</summary>
# The norm counts replicated weights tp times, or lacks a sum over tp.
# </details>
#
# **3.** Why is an expert's gradient not divided by dp?
#
# <details><summary>Answer</summary>
# The loss was already divided by the tokens of all ranks.
# </details>
#
# **4.** tp=8 fills a node. Should pp or dp come next?
#
# <details><summary>Answer</summary>
# pp if memory is short. Otherwise dp, which has no bubble.
# </details>
#
# **5.** A pipeline runs out of memory. Which ZeRO stage do you try first?
#
# <details><summary>Answer</summary>
# Stage 1, which sends no more than DP.
# </details>
#
# **Sources.** Next: lesson 13.
# - [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), tp in a node and pp across
# - [Llama team 2024](https://arxiv.org/abs/2407.21783), section 3.3.2 and table 4
# - [torchtitan](https://github.com/pytorch/torchtitan/blob/018740b7aae7846d24954539244c78215dbd181f/torchtitan/models/llama3/infra/parallelize.py),
#   resharding beside a pipeline
