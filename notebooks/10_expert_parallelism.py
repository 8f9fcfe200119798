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
#     lesson: '10'
# ---

# %% [markdown]
# # 10 Expert parallelism: tokens are sent to the weights
#
# *50 minutes to read and run, 70 to build.* A mixture of experts has many MLPs where a dense model has one, and sends
# each token through a few of them. The experts are sharded over ranks that hold different data, and tokens are sent
# to them and back. You route, count every byte sent, see which ranks wait, and find out over which ranks each
# gradient is summed. You need lessons 02 and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Two experts of eight for each token: the layer takes as long as two MLPs.*
# 2. *In data parallelism every gradient is averaged over all dp ranks, also the experts' gradients.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# An MLP holds about two thirds of a block's parameters, and uses all of them for every token. With E experts of which
# a token uses K (the router's top_k), parameters grow E times and arithmetic only K times. But E MLPs do not fit
# where one did.
#
# The ranks of data parallelism hold equal copies of all parameters. Let each store only E/n of the experts instead,
# and replicate the other parameters:
#
# ```
#           route          dispatch               experts             combine
#  rank 0   x --> router --+                +---> 0 1 -------+                +---> weight, add
#  rank 1   x --> router --+-- all-to-all --+---> 2 3 -------+-- all-to-all --+---> weight, add
#  rank 2   x --> router --+    (uneven)    +---> 4 5 -------+    (uneven)    +---> weight, add
#  rank 3   x --> router --+                +---> 6 7 -------+                +---> weight, add
# ```
#
# So the axis `ep` is *inside* dp and needs no extra ranks. ZeRO sends weights to the tokens; here tokens are sent to
# the weights. Which tokens has each parameter seen, then, when gradients are summed?

# %% [markdown]
# ## Predict
# Four ranks with 64 tokens each, two layers of 8 experts, top_k = 2. Fill in what you can.

# %%
import torch

from course_lib import ep
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 32, 4
EXPERTS, TOP_K, COEFFICIENT = 8, 2, 0.01
TOKENS = BATCH * SEQ // RANKS  # of a rank
CONFIG = tiny_config(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, max_seq_len=SEQ, dtype=torch.float64
)
ROW = CONFIG.hidden * 8  # bytes of a token's row in float64


def experts_model(**options):
    return ep.add_experts(build_model(CONFIG, seed=0), EXPERTS, TOP_K, seed=0, **options)


print(f"{TOP_K * TOKENS} pairs of a token and a choice on each rank; a row has {ROW} bytes")

# %%
predicted_elsewhere = None  # share of the pairs whose expert is on another rank, 4 ranks share 8
predicted_bytes = None  # bytes a rank sends for both layers in a step, if routing were even
predicted_busiest = None  # pairs of the busiest rank over the mean, before any training
predicted_dropped = None  # share of pairs dropped, where an expert has room for an even load only
predicted_factor = (
    None  # experts' gradients by (average over dp), divided by the right ones, ep = 4
)

# %% [markdown]
# (float64: in float32 a token with nearly equal logits may choose one expert on a rank and another one in one
# process.)
#
# ## A router by hand
# The router is a small linear layer, one logit for each expert. Softmax over *all* experts; the K largest are chosen, and
# their probabilities divided by their sum:

# %%
logits_TE = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 1.0], [2.0, 0.0, 2.5, 0.0]])
routes = ep.route(logits_TE, top_k=2)
for token, p in enumerate(logits_TE.softmax(-1)):
    chosen = zip(routes.experts_KT[:, token], routes.weights_KT[:, token], strict=True)
    said = ", ".join(f"{weight:.2f} of expert {expert}" for expert, weight in chosen)
    print(f"token {token}: p = {[round(each, 2) for each in p.tolist()]}  ->  {said}")
print("pairs by expert:", routes.chosen_E.tolist())

# %% [markdown]
# *Which* experts are chosen has no gradient; the weights have one, and through them the router learns. With top_k = 1
# the weight is p itself: p divided by p would always be 1, and the router would learn nothing.
#
# In one process the layer is a loop over experts. Letters after a name are its dimensions: T tokens of this rank, K
# experts per token (top_k), E experts, D elements of a token, P pairs, A rows that arrived.

# %%
from course_lib.view import code_lines, show_source

show_source(ep.route, ep.MoE.through_experts)

# %% [markdown]
# ## Dispatch and combine, by hand
# Four ranks, two tokens each; expert e is on rank e, top_k = 1. Token 31 is token 1 of rank 3. The expert adds 0.5.
# An all-to-all needs the rows for one rank side by side, so they are sorted first. No rank knows how many rows will
# arrive, so counts are sent before rows.

# %%
from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh

WANTS = [[2, 0], [2, 2], [0, 3], [2, 1]]  # the expert of each rank's tokens


def travel():
    axis = make_mesh(ep=RANKS).ep
    wants, tokens = torch.tensor(WANTS[axis.rank]), 10.0 * axis.rank + torch.arange(2)
    order = wants.argsort(stable=True)
    counts = wants.bincount(minlength=RANKS)
    table = comm.all_gather(counts[None], axis, control=True)  # [from, to]
    sends, receives = counts.tolist(), table[:, axis.rank].tolist()
    arrived = comm.all_to_all_v(tokens[order], axis, sends, receives)
    returned = comm.all_to_all_v(arrived + 0.5, axis, receives, sends)
    home = torch.empty_like(returned)
    home[order] = returned
    return sends, arrived.tolist(), returned.tolist(), home.tolist()


print(f"{'':8}{'sends':15}{'arrived':26}{'returned':15}home")
for rank, (sends, *rows) in enumerate(run(travel, n=RANKS)):
    arrived, returned, home = map(str, rows)
    print(f"rank {rank}  {sends!s:15}{arrived:26}{returned:15}{home}")

# %% [markdown]
# Look at `returned` and `home` of rank 0: rows come back in the order in which they were sent, and must be put into
# their places. Look at `arrived`: rank 2 has four rows, rank 1 one. Nothing balances them.
#
# ## Build it
# The layer on ranks: dispatch, compute, combine. `comm.all_to_all_v` is the uneven all-to-all as an operator; its
# backward is the same all-to-all in the other direction.

# %%
show_source(ep.ExpertParallelMoE.through_experts, ep.ExpertParallelMoE.own_experts)
print()
show_source(ep.parallel.combine)

# %% [markdown]
# Rows arrive by rank, and within a rank by expert. `own_experts` gathers each expert's rows from all ranks, and
# returns the results in the order of arrival.
#
# ## Who sums what
# With ep = 2 on four ranks there are two groups, and each has all experts between its ranks. The ranks that hold the
# *same* experts form the axis `edp` (`mesh.dp_cp` is dp here: there is no cp):

# %%
from course_lib import dp


def groups():
    mesh = make_mesh(ep=2)
    model = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp)
    held = list(model.blocks[0].ffn.experts)
    return f"experts {held}  ep {mesh.ep.ranks}  edp {mesh.edp.ranks}  dp {mesh.dp_cp.ranks}"


for rank, told in enumerate(run(groups, n=RANKS)):
    print(f"rank {rank}: {told}")
print()
show_source(ep.ExpertSync.__init__)

# %% [markdown]
# | parameter | is held by | has seen the tokens of | gradient is summed over |
# |---|---|---|---|
# | attention, norms, embedding, **router**, shared expert | all ranks | this rank | dp |
# | an expert | the ranks of edp | all ranks of its ep group | edp |
#
# The last line is the trap. In backward the rows' gradients are sent to the expert's rank, which adds up the
# gradients of all ranks of its ep group. The sum over the ranks that hold the same expert is still missing. And
# nothing is divided: each rank has divided its loss by the tokens of *all* ranks (lesson 03).
#
# Now average instead, as DDP does: each rank takes the mean over its own tokens, and gradients are divided by the
# number of ranks in the sum.

# %%
from course_lib.data import batch


def rows(step, mesh):
    share = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
    return batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, **share)


def first_gradients(ep_size, averaged):
    mesh = make_mesh(ep=ep_size)
    model = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp)
    total, count = ep.loss_sum(model, COEFFICIENT)(*rows(0, mesh))
    (total / (count if averaged else count * mesh.dp.size)).backward()
    experts, others = ep.expert_parameters(model), ep.shared_parameters(model)
    for parameters, axis in ((experts, mesh.edp), (others, mesh.dp_cp)):
        held = comm.held_gradients(parameters)
        comm.sum_gradients(held, axis)
        for one in held:
            one.gradient.div_(axis.size if averaged else 1)
    return {name: p.grad for name, p in model.named_parameters()}


def factor(got, right, part):
    """The k for which ``got`` is closest to k times ``right``, over the parameters of a kind."""
    names = [name for name in got if part in name]
    dot = sum((got[name] * right[name]).sum() for name in names)
    return (dot / sum((right[name] ** 2).sum() for name in names)).item()


true_gradients = run(first_gradients, 1, False, n=1)[0]
print(f"{'times what is right':24}{'experts':>9}{'router':>9}{'attention':>11}")
for averaged in (False, True):
    for ep_size in (1, 2, 4):
        got = run(first_gradients, ep_size, averaged, n=RANKS)[RANKS - 1]
        shown = [factor(got, true_gradients, part) for part in ("experts", "router", "attn")]
        assert abs(shown[0] - (ep_size if averaged else 1)) < 1e-9
        name = f"{'averaged' if averaged else 'summed'}, ep = {ep_size}"
        print(f"{name:24}{shown[0]:9.2f}{shown[1]:9.2f}{shown[2]:11.2f}")
print(f"your prediction: {predicted_factor}")

# %% [markdown]
# Averaged, experts' gradients are ep times too large: their sum includes the tokens of all ranks, and is divided by
# the ranks of edp only. AdamW hides a constant factor; a clipped norm and SGD do not.
#
# ## Measure: train with experts apart
# Four steps in one process and on four ranks, with ep = 1 (plain data parallelism), 2 and 4. Losses and weights must
# be equal, and bytes must match the formulas.

# %%
from course_lib.trace import state_bytes


def train(ep_size, shared=False):
    mesh = make_mesh(ep=ep_size)
    model = experts_model(shared=shared)
    if mesh.world.size > 1:  # alone: the loop over all experts
        ep.parallelize(model, mesh.ep, mesh.dp_cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = ep.ExpertSync(model, dp.Bucketed, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
    losses, loads = [], []
    for step in range(STEPS):
        mesh.ledger.clear()
        loss_sum = ep.loss_sum(model, COEFFICIENT)
        losses.append(dp.train_step(loss_sum, [rows(step, mesh)], sync, optimizer).item())
        loads.append([layer.load for layer in ep.moe_layers(model)])
    return {
        "losses": losses,
        "loads": loads,
        "sent": {axis: mesh.ledger.wire_bytes(axis) for axis in ("ep", "dp", "edp")},
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "state": state_bytes(model, optimizer).total,
    }


def formulas(ep_size, rank, loads):
    """Bytes that a rank sends on each axis: tokens by their counts, gradients by shapes."""
    experts, rest = ep.parameters_per_rank(CONFIG, EXPERTS, ep_size)
    tokens = sum(ep.wire_bytes(load, rank % ep_size, ROW) for load in loads)
    of_experts = dp.wire_bytes(8 * experts, RANKS // ep_size)
    of_rest = dp.wire_bytes(8 * rest, RANKS)
    if ep_size == 1:  # edp is dp itself
        return {"ep": tokens, "dp": of_rest + of_experts, "edp": 0}
    return {"ep": tokens, "dp": of_rest, "edp": of_experts}


alone = run(train, 1, n=1)[0]
runs = {ep_size: run(train, ep_size, n=RANKS) for ep_size in (1, 2, 4)}
print(f"{'':12}{'last loss':>10}{'weights off':>13}{'ep bytes':>11}{'edp':>11}{'dp':>11}   rank 0")
print(f"{'one process':12}{alone['losses'][-1]:10.4f}")
for ep_size, result in runs.items():
    apart = 0.0
    for rank, one in enumerate(result):
        assert one["sent"] == formulas(ep_size, rank, one["loads"][-1])
        assert max(abs(a - b) for a, b in zip(one["losses"], alone["losses"], strict=True)) < 1e-8
        for name, weight in one["weights"].items():
            apart = max(apart, (weight - alone["weights"][name]).abs().max().item())
    assert apart < 1e-7
    assert set().union(*(one["weights"] for one in result)) == set(alone["weights"])
    sent = [int(result[0]["sent"][axis]) for axis in ("ep", "edp", "dp")]
    columns = "".join(f"{each:11,}" for each in sent)
    print(f"{f'ep = {ep_size}':12}{result[0]['losses'][-1]:10.4f}{apart:13.0e}{columns}")
even = int(CONFIG.layers * ep.even_wire_bytes(TOKENS, TOP_K, ROW, RANKS))
print(
    f"\nif routing were even, ep = 4 would send {even:,} bytes; your prediction {predicted_bytes}"
)

# %% [markdown]
# Tokens are counted exactly: each pair with its expert on another rank costs four rows of D elements, there and back,
# forward and backward. A rank sends two of them for each of its own pairs that it sends, and two for each pair of
# other ranks that it computes. Its own tokens' choices are only half of its traffic:

# %%
# of the first layer in the first step: as the untrained router has it
load = runs[4][0]["loads"][0][0]
print(
    f"{'rank':>4}{'own pairs':>11}{'of them leave':>15}{'computes':>10}{'bytes of this layer':>21}"
)
for rank in range(RANKS):
    own, each = sum(load.kept[rank]), EXPERTS // RANKS
    leaving = own - sum(load.kept[rank][rank * each : (rank + 1) * each])
    sent = int(ep.wire_bytes(load, rank, ROW))
    print(f"{rank:4}{own:11}{leaving:15}{load.by_rank[rank]:10}{sent:21,}")
pairs = sum(load.by_expert)
crossing = sum(int(ep.wire_bytes(load, rank, ROW)) for rank in range(RANKS)) // (4 * ROW)
print(f"{crossing / pairs:.2f} of the pairs cross; your prediction {predicted_elsewhere}")
print(
    f"busiest rank over mean: {ep.imbalance(load.by_rank):.2f}; your prediction {predicted_busiest}"
)

# %% [markdown]
# ## See it: which experts are chosen
# The same layer as a picture. Each bar is an expert.

# %%
from course_lib.view.experts import load_plot

load_plot(load, title="An untrained router on real text: two of eight experts get 3 of 4 pairs")

# %% [markdown]
# All ranks wait in combine until the busiest rank has computed. So the layer takes as long as its busiest rank, and
# that rank needs the most memory too. Below experts are *paced*: a row takes 0.3 ms. Three layers with an even load,
# and three with a skewed one; messages and waiting are real.

# %%
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

PER_ROW = 0.0003


class PacedMoE(ep.ExpertParallelMoE):
    """Experts that take a fixed time for each row."""

    def own_experts(self, arrived_AD, blocks):
        count = len(arrived_AD)
        with self.ep.trace.span("F", at_least=PER_ROW * count, label=f"{count} rows"):
            return super().own_experts(arrived_AD, blocks)


def paced_layers(skew):
    mesh = make_mesh(ep=RANKS)
    layer = PacedMoE(experts_model().blocks[0].ffn, mesh.ep, mesh.dp_cp)
    token = torch.arange(TOKENS)
    x_TD = torch.zeros(TOKENS, CONFIG.hidden, dtype=CONFIG.dtype)
    x_TD[token, token % EXPERTS] = 2.0  # token t likes expert t, then t + 1
    x_TD[token, (token + 1) % EXPERTS] = 1.0
    x_TD[:, EXPERTS] = skew
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :EXPERTS] = torch.eye(EXPERTS)
        layer.router.weight[:, EXPERTS] = torch.linspace(1, 0, EXPERTS)  # expert 0 is popular
        layer(x_TD)  # warms up
        comm.barrier(mesh.ep)
        mesh.trace.clear()
        for _ in range(3):
            layer(x_TD)
    return layer.load


paced = {name: run(paced_layers, skew, n=RANKS) for name, skew in (("even", 0.0), ("skewed", 2.5))}
for name, result in paced.items():
    load, seen = result[0], summarize(read(result.traces)[0])
    print(f"{name:7} busiest over mean {ep.imbalance(load.by_rank):.2f};", end=" ")
    print(f"three layers in {1e3 * seen.makespan:.0f} ms; rows by rank {load.by_rank}")

# %%
timeline(
    paced["skewed"].traces,
    title="A skewed load: three ranks wait for rank 0 in every layer",
    note=f"Paced: {1e3 * PER_ROW:g} ms a row. all_gather and all_reduce carry counts.",
)

# %% [markdown]
# The same run for a trace viewer: open `experts_skewed.json`, which lies in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "experts_skewed.json"
perfetto(paced["skewed"].traces, path, title="experts, a skewed load")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# ## Keep them busy alike
# Two remedies. The **auxiliary loss** E Σ f_e p_e (f_e: fraction of the pairs that chose e; p_e: mean probability of
# e) is 1 for an even load and more for a skewed one. f has no gradient; p has, and is pushed down where f is large. f
# must be counted over the tokens of *all* ranks, so one small all-reduce of counts runs beside it.

# %%
show_source(ep.balance_loss)

SMALL = tiny_config(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, max_seq_len=SEQ)


def balanced(coefficient, steps=60):
    """Imbalance of the experts, layers averaged, and loss of the text alone, every 20 steps."""
    model = ep.add_experts(build_model(SMALL, seed=0), EXPERTS, TOP_K, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = {}
    for step in range(steps):
        total, count = model.loss_sum(*batch(step, seed=0, batch_size=BATCH, seq_len=SEQ))
        uneven = [ep.imbalance(layer.load.by_expert) for layer in ep.moe_layers(model)]
        loss = (total + coefficient * ep.auxiliary_loss(model)) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            found[step] = (sum(uneven) / len(uneven), (total / count).item())
    return found


print(f"\n{'busiest expert over mean (loss) in step':>40}")
for coefficient in (0.0, 0.01, 0.1):
    found = run(balanced, coefficient, n=1)[0]
    line = "   ".join(
        f"{step:2}: {uneven:.2f} ({loss:.2f})" for step, (uneven, loss) in found.items()
    )
    print(f"coefficient {coefficient:4}   {line}")

# %% [markdown]
# Here 0.01 halves the imbalance and leaves the loss unchanged; ten times as much gains nothing more, and increases
# the loss.
#
# The second remedy is a **capacity**. Of a rank's T tokens, an expert takes at most T K / E pairs (an even load) times
# the *capacity factor*, in the order of the tokens, first choices before second ones. The other pairs are dropped: the
# token passes by on the residual. Then no rank can be overloaded and shapes can be fixed; but whether a token is dropped depends
# on the other tokens of the batch. *Dropless* (no capacity) is exact, and needs the uneven all-to-all.
#
# Below the picture the same with sliders (in Jupyter). At skew 3, which factor drops nothing, and how much does the
# busiest rank then compute?


# %%
def routed(skew, capacity_factor, top_k):
    """Four ranks of 64 tokens with random logits; the lower its number, the more wanted an expert."""
    generator = torch.Generator().manual_seed(0)
    capacity = None
    if capacity_factor != "none":
        capacity = -int(-capacity_factor * top_k * TOKENS // EXPERTS)
    chosen, kept = [], []
    for _ in range(RANKS):
        logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        routes = ep.route(logits + skew * torch.linspace(1, 0, EXPERTS), top_k, capacity)
        served = routes.experts_KT[routes.experts_KT >= 0]
        chosen.append(tuple(routes.chosen_E.tolist()))
        kept.append(tuple(served.bincount(minlength=EXPERTS).tolist()))
    return ep.Load(tuple(chosen), tuple(kept))


def moved(skew, capacity_factor, top_k):
    load = routed(skew, capacity_factor, top_k)
    title = f"Skew {skew}, capacity factor {capacity_factor}, top_k {top_k}: "
    title += f"{load.dropped:.0%} dropped, busiest {ep.imbalance(load.by_rank):.1f} times the mean"
    return load_plot(load, title=title)


tight = routed(0, 1.0, TOP_K)
print(f"no skew, room for an even load: {tight.dropped:.3f} dropped; you: {predicted_dropped}")
moved(skew=2, capacity_factor=1.25, top_k=2)

# %%
from course_lib.view.moved import picture_sliders

picture_sliders(
    moved,
    skew=[2, 0, 1, 3, 4],
    capacity_factor=[1.25, "none", 0.5, 1.0, 1.5, 2.0, 4.0],
    top_k=[2, 1, 4],
)

# %% [markdown]
# <details><summary>What you should have seen</summary>
#
# Of the factors here only 4 drops nothing, and then rank 0 computes 2.5 times the mean. At 1.25 it is 1.8 times, and a third
# of the pairs is dropped.
# </details>
#
# ## A shared expert
# DeepSeek-V3's layers have one more expert that every token uses. It is a plain MLP: replicated, summed over dp, and
# no row of it is sent. It learns the features that all tokens need, so that the other experts may differ, and it
# could compute while rows are in flight.

# %%
with_shared = run(train, 4, True, n=RANKS)
without = run(train, 1, True, n=1)[0]
apart = max(abs(a - b) for a, b in zip(with_shared[0]["losses"], without["losses"], strict=True))
assert apart < 1e-8
own = [name for name in with_shared[0]["weights"] if "blocks.0.ffn.shared" in name]
counted = [one["sent"]["ep"] for one in with_shared]
for rank, one in enumerate(with_shared):
    tokens = sum(ep.wire_bytes(load, rank, ROW) for load in one["loads"][-1])
    assert counted[rank] == tokens
print(f"losses equal to {apart:.0e}; held whole by each rank: {own}")
print("bytes on ep are still those of the pairs:", [int(each) for each in counted])

# %% [markdown]
# ## The same in PyTorch
# torch has no expert-parallel layer, but it has the main collective: `dist.all_to_all_single` with the two lists of
# splits. Backward is the same call with the lists exchanged.

# %%
import torch.distributed as dist


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sends, receives):
        ctx.splits = sends, receives
        arrived = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(arrived, x.contiguous(), receives, sends)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        sends, receives = ctx.splits
        home = gradient.new_empty(sum(sends), gradient.shape[1])
        dist.all_to_all_single(home, gradient.contiguous(), sends, receives)
        return home, None, None


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    shape = (2, TOKENS, CONFIG.hidden)
    return torch.randn(shape, generator=generator, dtype=CONFIG.dtype)  # x and dy


def in_pytorch():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    moe, own = experts_model().blocks[0].ffn, EXPERTS // n
    mine = [moe.experts[str(number)] for number in range(rank * own, (rank + 1) * own)]
    x, dy = inputs(rank)
    x.requires_grad_()
    weights, chosen = moe.router(x).softmax(-1).topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)  # pairs token by token: pair p is of token p // K
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    sends, receives = (each.view(n, own).sum(1).tolist() for each in (counts, incoming))
    parts = list(AllToAll.apply(x[order // TOP_K], sends, receives).split(incoming.tolist()))
    for place, part in enumerate(parts):
        parts[place] = mine[place % own](part)
    returned = AllToAll.apply(torch.cat(parts), receives, sends)
    pairs = torch.empty_like(returned).index_copy(0, order, returned)
    y = (pairs.unflatten(0, (-1, TOP_K)) * weights[..., None]).sum(1)
    y.backward(dy)
    found = [y.detach(), x.grad, moe.router.weight.grad]
    found += [p.grad for expert in mine for p in expert.parameters()]
    dist.destroy_process_group()
    return found


def by_library():
    mesh = make_mesh(ep=RANKS)
    moe = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp).blocks[0].ffn
    x, dy = inputs(mesh.rank)
    x.requires_grad_()
    y = moe(x)
    y.backward(dy)
    found = [y.detach(), x.grad, moe.router.weight.grad]
    return found + [p.grad for expert in moe.experts.values() for p in expert.parameters()]


theirs, ours = run(in_pytorch, n=RANKS, init=False), run(by_library, n=RANKS)
apart = max(
    (a - b).abs().max().item()
    for one, other in zip(theirs, ours, strict=True)
    for a, b in zip(one, other, strict=True)
)
assert apart < 1e-11
print(f"outputs and gradients of x, router and experts differ by {apart:.0e} at most")

# %% [markdown]
# ## Break it and diagnose
# Four ranks, ep = 2. One run is correct (its cause is `"correct"`), four are faulty:
#
# - **divided**: experts' gradients are divided by dp after they were summed
# - **group**: experts' gradients are summed over the wrong group, the ep group
# - **router**: the router's gradient is not summed
# - **order**: on one rank results return in the wrong order, each to the next token
#
# For each name the cause, the axis of the right sum or all-to-all (`"ep"`, `"edp"` or `"dp"`) and the rank (a number,
# or `"all"`); None if correct. Loss is each rank's own, in the first step, off against one process with the same
# rows; `k` is rank 0's gradient as a multiple of the right one; copies are compared after one step. Another SEED
# draws other runs.

# %%
SEED = 3
diagnosis = {  # (cause, axis, rank), such as ("divided", "edp", "all")
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
    "10",
    SEED,
    {
        "correct": (None, None),
        "divided": ("edp", "all"),
        "group": ("edp", "all"),
        "router": ("dp", "all"),
        "order": ("ep", range(RANKS)),
    },
    fields=("cause", "axis", "rank"),
)


class FaultySync(ep.ExpertSync):
    fault = "correct"

    def finish(self):
        routers = [layer.router.weight for layer in ep.moe_layers(self.model)]
        own = [weight.grad.clone() for weight in routers]
        super().finish()
        if self.fault == "divided":
            for p in ep.expert_parameters(self.model):
                p.grad /= self.axis.size
        if self.fault == "router":
            for weight, gradient in zip(routers, own, strict=True):
                weight.grad = gradient


def rolled(through):
    return lambda x_TD, routes, load: through(x_TD, routes, load).roll(1, 0)


def trained(fault, faulty_rank):
    mesh = make_mesh(ep=2)
    model = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp)
    if fault == "order" and mesh.rank == faulty_rank:
        for layer in ep.moe_layers(model):
            layer.through_experts = rolled(layer.through_experts)
    edp = mesh.ep if fault == "group" else mesh.edp
    sync = FaultySync(model, dp.Bucketed, ep=mesh.ep, edp=edp, data=mesh.dp_cp)
    sync.fault = fault
    own_losses = []

    def loss_sum(tokens, targets):
        total, count = model.loss_sum(tokens, targets)
        own_losses.append((total / count).item())
        return total + COEFFICIENT * ep.auxiliary_loss(model), count

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dp.train_step(loss_sum, [rows(0, mesh)], sync, optimizer)
    reduced = [mesh.ledger.wire_bytes(axis, "all_reduce") for axis in ("ep", "edp", "dp")]
    return {
        "loss": own_losses[0],
        "reduced": [int(each) for each in reduced],
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
        "weights": {name: p.detach() for name, p in model.named_parameters()},
    }


def copies_apart(result, part):
    """How far the copies of the parameters of a kind are from each other."""
    first = {}
    for one in result:
        for name, weight in one["weights"].items():
            first.setdefault(name, weight)
    return max(
        (weight - first[name]).abs().max().item()
        for one in result
        for name, weight in one["weights"].items()
        if part in name
    )


reference = experts_model()
right_losses = []
for rank in range(RANKS):
    share = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=RANKS)
    with torch.no_grad():
        total, count = reference.loss_sum(*share)
    right_losses.append((total / count).item())

print(
    f"{'':3}{'loss off, by rank':^32}{'k of':>9}{'k of':>8}{'apart:':>9}{'':9}  all-reduced bytes"
)
heads = f"{'experts':>9}{'router':>8}{'experts':>9}{'router':>9}  "
print(f"{'':3}{'0':>8}{'1':>8}{'2':>8}{'3':>8}{heads}ep, edp, dp")
for lab_run in lab:
    result = run(trained, lab_run.cause, lab_run.rank, n=RANKS)
    off = [abs(each["loss"] - right) for each, right in zip(result, right_losses, strict=True)]
    k = [factor(result[0]["gradients"], true_gradients, part) for part in ("experts", "router")]
    apart = [copies_apart(result, part) for part in ("experts", "router")]
    print(f"{lab_run.letter:3}" + "".join(f"{each:8.0e}" for each in off), end="")
    print(f"{k[0]:9.2f}{k[1]:8.2f}{apart[0]:9.0e}{apart[1]:9.0e}  {result[0]['reduced']}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# Below 1e-10 is rounding.
#
# - **One rank's loss is off**, the others' are right: forward, and only there: *order*, on that rank. Counts, splits and bytes
#   are all as they should be. (Gradients are off too, a consequence.)
# - **Bytes on ep in place of edp, copies of experts apart**: *group*. Different experts' gradients were added up, and
#   gradients of the same expert never were. No error: their shapes agree.
# - **Experts' k is 1/4, copies agree**: *divided*. Nothing drifts, nothing fails, and AdamW hides it in the loss.
# - **Copies of the router apart**: *router*. From now on equal tokens go to different experts on different ranks.
#
# Two checks find them: gradients against a single-process reference (their factor, by kind of parameter), and a
# checksum of the weights that should be equal over dp, and over edp.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **All experts fit.** Replicate them: gradients are sent once per step and hide behind backward; tokens are sent
#   four times per layer, and the next computation waits for them.
# - **Slow links inside the ep group.** All-to-all loads every link at once. Keep ep inside a node, or route in two steps.
# - **Few tokens.** Every expert's product becomes thin: n K T / E rows from n ranks. A GPU needs hundreds.
# - **The load stays skewed.** Then n ranks work at the speed of one.
#
# ## The table that grows
# State and bytes per rank are from the training above; the busiest rank is from the last step, averaged over layers;
# code is the lines of the library behind the layer on ranks, without comm.

# %%
parallel = ep.parallel
code = code_lines(
    ep.ExpertParallelMoE, ep.parallelize, ep.ExpertSync, parallel.splits, parallel.sorted_by_expert,
    parallel.combine, ep.expert_parameters, ep.shared_parameters,
)  # fmt: skip
print(f"{'a rank':12}{'state':>11}{'bytes sent':>12}{'of it tokens':>14}{'busiest':>9}{'code':>6}")
print(f"{'one process':12}{alone['state']:11,}")
for ep_size, result in runs.items():
    one = result[0]
    sent = int(sum(one["sent"].values()))
    busiest = [ep.imbalance(load.by_rank) for load in one["loads"][-1]]
    mean = sum(busiest) / len(busiest)
    print(f"{f'ep = {ep_size}':12}{one['state']:11,}{sent:12,}{int(one['sent']['ep']):14,}", end="")
    print(f"{mean:9.2f}{code if ep_size == RANKS else '':>6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if the load is even.** The arithmetic of all ranks together equals two MLPs. But all ranks wait for
# the busiest rank, and for four all-to-alls.
#
# **Claim 2: false.** An expert's gradient is summed over edp, the ranks that hold it; its own ep group's tokens are in it
# already. And sums are not divided: averaged over edp, it is ep times too large.

# %%
times = {name: summarize(read(result.traces)[0]).makespan for name, result in paced.items()}
print(f"skewed took {times['skewed'] / times['even']:.2f} times as long; your vote: {vote_1}")
print(f"your vote on the second: {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# Mixtral 8x7B's sizes in bfloat16, 8 ranks of 4,096 tokens each; computed from the library's formulas.


# %%
def cheat_sheet(n=8, tokens=4096):
    config = tiny_config(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, max_seq_len=4096,
        dtype=torch.bfloat16,
    )  # fmt: skip
    row = 2 * config.hidden
    print(
        "router: all ranks, summed over dp      expert: E/n a rank, summed over edp, never divided"
    )
    print(
        "a layer: 2 all-to-alls forward, 2 backward; each pair whose expert is elsewhere: 4 rows\n"
    )
    print(
        f"{'ep':>3}{'experts, GB':>13}{'all else, GB':>14}{'tokens, GB':>12}{'gradients of experts, GB':>26}"
    )
    for ep_size in (1, 2, 4, 8):
        experts, rest = ep.parameters_per_rank(config, 8, ep_size)
        travels = config.layers * ep.even_wire_bytes(tokens, 2, row, ep_size)
        gradients = dp.wire_bytes(2 * experts, n // ep_size)
        print(f"{ep_size:3}{2 * experts / 1e9:13.1f}{2 * rest / 1e9:14.1f}", end="")
        print(f"{float(travels) / 1e9:12.1f}{float(gradients) / 1e9:26.1f}")
    print("\nkept in memory (weights alone), then sent by a rank in a step of one micro-batch")


cheat_sheet()

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/10_expert_parallelism.ipynb), each on its own: six tokens by hand (15 minutes), an
# expert's gradient in one line (5), which experts serve a token (10), dispatch and combine on real ranks (25), and
# the same in raw PyTorch (15).

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "10-1"}
# ## 10-1 Six tokens and four experts, by hand
# Fifteen minutes, on paper; no code. Two ranks with three tokens each, ep = 2: rank 0 holds experts 0 and 1, rank 1 holds 2 and
# 3. Each token has two experts, its first choice first:
#
# | | token 0 | token 1 | token 2 |
# |---|---|---|---|
# | rank 0 | 0, 2 | 0, 1 | 2, 0 |
# | rank 1 | 0, 3 | 1, 0 | 3, 2 |
#
# - `by expert`: the pairs that each of the four experts computes, without capacity
# - `imbalance`: pairs of the busiest rank over the mean of ranks
# - `splits`: the rows that each rank hands to the all-to-all, for [[rank 0 to 0, 0 to 1], [1 to 0, 1 to 1]]
# - `rows`: rank 0's rows in the order in which they are sent, as numbers of tokens: by expert, and within an expert
#   first choices before second ones, then by token
# - `bytes`: what each rank sends, forward and backward; a row has 8 float32 elements
# - `dropped`: pairs that each rank drops with capacity factor 1, rounded up
# - `balance`: E Σ f_e p_e of all six tokens, without capacity. The probabilities, added up over the six tokens, are [2.4, 1.2,
#   1.2, 1.2]; divide so that an even load gives 1
# - `summed with`: now dp = 8 and ep = 4. The ranks over which the gradients of rank 5's experts are summed, rank 5 included
# - `too large`: there, each rank divides its loss by its own tokens, and experts' gradients are averaged over edp. How many
#   times too large are they?

# %% course={"ex": "10-1", "role": "answer"}
# BEGIN SOLUTION
table = {
    "by expert": [5, 2, 3, 2],
    "imbalance": 7 / 6,
    "splits": [[4, 2], [3, 3]],
    "rows": [0, 1, 2, 1, 2, 0],
    "bytes": [320, 320],
    "dropped": [1, 0],
    "balance": 17 / 15,
    "summed with": [1, 5],
    "too large": 4,
}
# STUB
# table = {
#     "by expert": None,  # four numbers
#     "imbalance": None,  # a fraction, such as 5/4
#     "splits": None,  # two lists of two numbers
#     "rows": None,  # six numbers of tokens
#     "bytes": None,  # [rank 0, rank 1]
#     "dropped": None,  # [rank 0, rank 1]
#     "balance": None,  # a fraction
#     "summed with": None,  # a list of ranks
#     "too large": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "10-1", "role": "answer"}
# - Pairs by rank and expert: [3, 1, 2, 0] and [2, 1, 1, 2]. Ranks compute 7 and 5, the mean is 6.
# - Rank 0's rows: expert 0 is the first choice of tokens 0 and 1 and the second of 2; expert 1 the second of 1; expert 2 the
#   first of 2, the second of 0.
# - Rank 0 sends two pairs, rank 1 three: each rank sends 2 · (2 + 3) rows of 32 bytes.
# - The capacity is 6/4 rounded up: 2. Expert 0 has three pairs of rank 0. Each rank decides alone.
# - 4 · (5 · 2.4 + (2 + 3 + 2) · 1.2) / 12 / 6.
# - With ep = 4 the groups are 0 to 3 and 4 to 7; rank 1 has the same place as rank 5. An average over its two ranks divides by
#   2, where 8 is right.

# %% course={"ex": "10-1", "role": "check"}
from course_lib.grading import check

check("10-1", table)

# %% [markdown] course={"ex": "10-2"}
# ## 10-2 The gradient of an expert
# Backward is done, and this rank's expert has a gradient. The loss was divided by the tokens of all ranks. Write the one line
# that returns the gradient with which the optimizer steps.
#
# `ep` are the ranks that share all experts, `edp` those that hold the same ones, `data` all ranks with different tokens.
#
# The check looks at gradients on four ranks with ep = 2, 1 (and tp = 2) and 4, on six with ep = 2, and on one. The given
# gradient must not change, and a rank makes at most one all-reduce, and none where no sum is missing.


# %% course={"ex": "10-2", "role": "answer"}
def expert_gradient(gradient, ep, edp, data):
    """The gradient of an expert over the tokens of all ranks; ``gradient`` is what backward left
    here."""
    # BEGIN SOLUTION
    return comm.all_reduce(gradient, edp)
    # END SOLUTION


# %% course={"ex": "10-2", "role": "check"}
from course_lib.grading import check

check("10-2", expert_gradient)

# %% [markdown] course={"ex": "10-3"}
# ## 10-3 Which experts serve a token
# A router with capacity. From the logits of each token, a list of lists, make a list of dicts, one for each token, from the
# numbers of the experts that serve it to their weights:
#
# - Softmax over all experts. The `choices` largest are chosen.
# - With two choices or more the weights are divided by the sum of the chosen ones; with one choice the weight is the
#   probability.
# - An expert takes at most `room` pairs: first all first choices, in the order of tokens, then all second ones, and
#   so on. A pair beyond `room` is missing in the dict; the weights of the others do not change.
# - Logits may be as large as 800 or as small as -800. The given lists must not change.
#
# `route([[2.0, 1.0, 0.0], [3.0, 0.0, 1.0]], 2, 1)` gives `[{0: 0.731, 1: 0.269}, {2: 0.119}]` (rounded): the second
# token's first choice is expert 0, which is full.


# %% course={"ex": "10-3", "role": "answer"}
def route(logits, choices, room):
    """[{expert: weight, ...}, ...], one dict for each token."""
    # BEGIN SOLUTION
    p_TE = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    weights_TC, experts_TC = p_TE.topk(choices)
    if choices > 1:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    taken = [0] * p_TE.shape[1]
    served = [{} for _ in logits]
    for choice in range(choices):
        for token in range(len(logits)):
            expert = int(experts_TC[token, choice])
            if taken[expert] < room:
                taken[expert] += 1
                served[token][expert] = float(weights_TC[token, choice])
    return served
    # END SOLUTION


# %% course={"ex": "10-3", "role": "check"}
from course_lib.grading import check

check("10-3", route)

# %% [markdown] course={"ex": "10-4"}
# ## 10-4 There and back
# The layer on real ranks, without its router: dispatch, experts, combine. Rank r of n holds e = `len(experts)`
# experts, with the numbers r e to (r + 1) e. Ranks may hold different numbers of tokens, and an expert may be chosen
# by all tokens or by none. A weight may be 0 or negative; top_k may be 1.
#
# `comm.all_gather(x, axis)` joins tensors of all ranks, without gradient; `comm.all_to_all_v(x, axis, sends, receives)`
# is the uneven all-to-all with a gradient. `torch.empty_like(rows).index_copy(0, places, rows)` puts rows into
# places, for autograd too.
#
# The check looks at outputs and gradients of x, of the weights and of the experts, on two and three ranks, on pairs of
# four ranks and on one. Rows are sent by two all-to-alls forward and two backward, the rows of the pairs and no others.
# The library's layer and its parts refuse.


# %% course={"ex": "10-4", "role": "answer"}
def moe_layer(x_TD, experts_TC, weights_TC, experts, axis):
    """y_TD: for each token, the sum over its C choices of weight times expert(x).

    ``experts_TC`` (int64) are the numbers of the experts that each of this rank's T tokens chose,
    ``weights_TC`` their weights. ``experts`` is the list of this rank's modules, rows of D to rows
    of D.
    """
    # BEGIN SOLUTION
    n, own, choices = axis.size, len(experts), experts_TC.shape[1]
    wanted_P = experts_TC.flatten()  # pair p is a row of token p // C
    order_P = wanted_P.argsort(stable=True)
    counts_E = wanted_P.bincount(minlength=n * own)
    everyone = comm.all_gather(counts_E[None], axis).unflatten(1, (n, own))
    blocks = everyone[:, axis.rank]  # [from, own expert]
    sends, receives = counts_E.view(n, own).sum(1).tolist(), blocks.sum(1).tolist()
    arrived = comm.all_to_all_v(x_TD[order_P // choices], axis, sends, receives)
    parts = list(arrived.split(blocks.flatten().tolist()))
    for place, part in enumerate(parts):
        parts[place] = experts[place % own](part)
    returned = comm.all_to_all_v(torch.cat(parts), axis, receives, sends)
    rows_PD = torch.empty_like(returned).index_copy(0, order_P, returned)
    return (rows_PD.unflatten(0, (-1, choices)) * weights_TC[..., None]).sum(1)
    # END SOLUTION


# %% course={"ex": "10-4", "role": "check"}
from course_lib.grading import check

check("10-4", moe_layer)

# %% [markdown] course={"ex": "10-5"}
# ## 10-5 There and back in raw PyTorch
# Forward only, top_k = 1, one expert on each rank, with `torch.distributed`: `course_lib` refuses. The default group
# exists. `dist.all_to_all_single(output, input, output_splits, input_splits)` takes the splits as lists of Python
# numbers; without them it splits evenly.
#
# The check looks at outputs on two, three and four ranks and on one, also with an expert that no token chooses, a rank
# without tokens and rows of float64. No input may be overwritten, and rows are sent by two all-to-alls, each needed row
# and no other. You may send the counts in any way.


# %% course={"ex": "10-5", "role": "answer"}
def through_experts(x_TD, experts_T, expert):
    """y_TD: each row of ``x_TD`` after the expert that it wants.

    ``experts_T`` (int64) says which: expert e is on rank e. ``expert`` is this rank's, a function
    from rows of D to rows of D, as many.
    """
    # BEGIN SOLUTION
    order_T = experts_T.argsort(stable=True)
    sends_N = experts_T.bincount(minlength=dist.get_world_size())
    receives_N = torch.empty_like(sends_N)
    dist.all_to_all_single(receives_N, sends_N)
    sends, receives = sends_N.tolist(), receives_N.tolist()
    arrived = x_TD.new_empty(sum(receives), x_TD.shape[1])
    dist.all_to_all_single(arrived, x_TD[order_T], receives, sends)
    returned = torch.empty_like(x_TD)
    dist.all_to_all_single(returned, expert(arrived), sends, receives)
    y_TD = torch.empty_like(returned)
    y_TD[order_T] = returned
    return y_TD
    # END SOLUTION


# %% course={"ex": "10-5", "role": "check"}
from course_lib.grading import check

check("10-5", through_experts)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** dp = 64 and ep = 8. Over how many ranks is the gradient of an expert summed, over how many the router's?
#
# <details><summary>Answer</summary>
# Over the 8 ranks of edp (64/8) that hold it, and over all 64. Neither is divided when the loss was divided by all tokens.
# </details>
#
# **2.** 8 ranks, 4,096 tokens each, top_k = 2, hidden 4,096, 2 bytes. What does a rank send for one layer, if routing
# is even?
#
# <details><summary>Answer</summary>
# 4 · 7/8 · 4,096 · 2 pairs · 8,192 bytes = 235 MB.
# </details>
#
# **3.** Why must counts be sent before rows, and why is that costly on a GPU?
#
# <details><summary>Answer</summary>
# Each rank must allocate memory for the arriving rows and pass both lists of splits. They are Python numbers: the
# host waits for the router. Fixed capacity avoids it, and pays with padding or drops.
# </details>
#
# **4.** A token is dropped by its second expert. What is its output?
#
# <details><summary>Answer</summary>
# The first expert's result times its weight, which does not increase. If both experts drop it, only the residual is
# left.
# </details>
#
# **5.** Where does expert parallelism meet tensor parallelism, and what would you choose for an expert that fits on one GPU?
#
# <details><summary>Answer</summary>
# Both partition MLPs. TP shards each matrix and sends every token's activations to all ranks; EP keeps full experts,
# with larger products, and sends a token to at most K ranks. If it fits: EP.
# </details>
#
# ## Sources and what next
# - Shazeer et al. 2017, [arXiv:1701.06538](https://arxiv.org/abs/1701.06538): the sparsely gated layer.
# - Lepikhin et al. 2020, *GShard*, [arXiv:2006.16668](https://arxiv.org/abs/2006.16668): capacity, and experts over ranks.
# - Fedus et al. 2021, *Switch Transformer*, [arXiv:2101.03961](https://arxiv.org/abs/2101.03961): top_k = 1, the
#   auxiliary loss.
# - Gale et al. 2022, *MegaBlocks*, [arXiv:2211.15841](https://arxiv.org/abs/2211.15841): dropless.
# - Jiang et al. 2024, *Mixtral*, [arXiv:2401.04088](https://arxiv.org/abs/2401.04088): weights over the chosen
#   experts only.
# - DeepSeek-AI 2024, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437): a shared expert, and all-to-all hidden behind
#   compute.
# - Expert gradients ep times too large: [DeepSpeed #5259](https://github.com/deepspeedai/DeepSpeed/pull/5259); and with loss curves
#   that show nothing: [PyTorch #160285](https://github.com/pytorch/pytorch/issues/160285).
#
# Next: lesson 11, groups in anger. Several groups over the same ranks, and what happens when they are used in different
# orders.
