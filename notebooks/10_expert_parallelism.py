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
# *40 minutes to read and run, 70 to build.* DeepSpeed and torchtitan once made the same mistake: with experts on ep
# ranks, their gradients were ep times too large ([DeepSpeed #5259](https://github.com/deepspeedai/DeepSpeed/pull/5259),
# [PyTorch #160285](https://github.com/pytorch/pytorch/issues/160285)). In torchtitan the loss curves did not show it.
# Here you send tokens to experts, count the bytes, and repeat this mistake. You need lessons 02 and 03.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *Two experts of eight for each token: the layer takes as long as two MLPs.*
# 2. *In data parallelism every gradient is averaged over all dp ranks, also the experts' gradients.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Many MLPs where there was one
# A *mixture of experts* has E MLPs where a dense model has one, and a router sends each token through K of them. The
# MLPs have E times as many parameters, but need only K times the arithmetic. E MLPs may not fit on one GPU. So each
# rank of data parallelism stores only E/n of the experts, and the tokens are sent to them:
#
# ```
#           route          dispatch               experts             combine
#  rank 0   x --> router --+                +---> 0 1 -------+                +---> weight, add
#  rank 1   x --> router --+-- all-to-all --+---> 2 3 -------+-- all-to-all --+---> weight, add
#  rank 2   x --> router --+    (uneven)    +---> 4 5 -------+    (uneven)    +---> weight, add
#  rank 3   x --> router --+                +---> 6 7 -------+                +---> weight, add
# ```
#
# The axis `ep` is thus a part of dp and needs no further ranks.
#
# | symbol | meaning |
# |---|---|
# | n | ranks that share the experts, the size of ep |
# | E, K | experts; experts per token, `top_k` |
# | T, D | tokens of a rank; elements of a token |
# | P, A | in names: pairs of a token and an expert; rows that arrived |
# | edp | the ranks that store the same experts |
#
# Predict for four ranks with 64 tokens each, two layers of eight experts, and K = 2:

# %%
import torch

from course_lib import ep
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 32, 4
EXPERTS, TOP_K, COEFFICIENT = 8, 2, 0.01
TOKENS = BATCH * SEQ // RANKS  # of a rank
# In float64, rounding does not change which experts a token chooses.
CONFIG = tiny_config(
    layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, max_seq_len=SEQ, dtype=torch.float64
)
ROW = CONFIG.hidden * 8  # bytes of a token's row in float64


def experts_model(**options):
    return ep.add_experts(build_model(CONFIG, seed=0), EXPERTS, TOP_K, seed=0, **options)


print(f"{TOP_K * TOKENS} pairs of a token and an expert on each rank; a row has {ROW} bytes")

# %%
predicted_elsewhere = None  # fraction of the pairs whose expert is on another rank
predicted_bytes = None  # bytes a rank sends for both layers in a step, if routing were even
predicted_busiest = None  # pairs of the busiest rank over the mean, before any training
predicted_dropped = None  # fraction of pairs dropped, if an expert takes an even load at most
predicted_factor = None  # experts' gradients averaged as in DDP, over the right ones, ep = 4

# %% [markdown]
# ## A router by hand
# The router is a small linear layer with one logit per expert. Softmax turns the logits into probabilities p. The K
# largest are chosen, and each is divided by their sum. These K *weights* multiply the outputs of the chosen experts:

# %%
logits_TE = torch.tensor([[2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 3.0, 1.0], [2.0, 0.0, 2.5, 0.0]])
routes = ep.route(logits_TE, top_k=2)
for token, p in enumerate(logits_TE.softmax(-1)):
    chosen = zip(routes.experts_KT[:, token], routes.weights_KT[:, token], strict=True)
    said = ", ".join(f"{weight:.2f} of expert {expert}" for expert, weight in chosen)
    print(f"token {token}: p = {[round(each, 2) for each in p.tolist()]}  ->  {said}")
print("pairs by expert:", routes.chosen_E.tolist())

# %% [markdown]
# The choice has no gradient. The weights have one, and through them the router learns. With K = 1 the weight is p
# itself, because p / p would always be 1. In one process, the layer is a loop over the experts:

# %%
from course_lib.view import show_source

show_source(ep.MoE.through_experts)

# %% [markdown]
# ## Dispatch and combine
# Now a row must reach the rank of its expert and come back. In a small example, each of four
# ranks has two tokens and one expert, and every token chooses one expert. A token is one number: 31 is token 1 of rank
# 3. Each expert adds 0.5 to a token, so that we see which tokens went through one. Each rank sorts its rows, because
# an all-to-all needs the rows for one rank next to each other. No rank knows how many rows will arrive, so counts are
# sent first:

# %%
from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh

WANTS = [[2, 0], [2, 2], [0, 3], [2, 1]]  # the expert of each rank's tokens


def there_and_back():
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
for rank, (sends, *rows) in enumerate(run(there_and_back, n=RANKS)):
    arrived, returned, home = map(str, rows)
    print(f"rank {rank}  {sends!s:15}{arrived:26}{returned:15}{home}")

# %% [markdown]
# Compare `returned` and `home` on rank 0. Rows come back in the order in which they were sent, so each rank must
# restore its own order.
#
# The library's layer does the same, and its backward runs the same all-to-alls in the other direction:

# %%
show_source(ep.ExpertParallelMoE.through_experts)

# %% [markdown]
# ## Which gradients are summed over which ranks
# With ep = 2, four ranks form two groups, and each group has all experts. The ranks that store the *same* experts form
# the axis `edp`:

# %%
from course_lib import dp


def groups():
    mesh = make_mesh(ep=2)
    model = ep.parallelize(experts_model(), mesh.ep, mesh.dp_cp)
    held = list(model.blocks[0].ffn.experts)
    return f"experts {held}  ep {mesh.ep.ranks}  edp {mesh.edp.ranks}  dp {mesh.dp_cp.ranks}"


for rank, told in enumerate(run(groups, n=RANKS)):
    print(f"rank {rank}: {told}")

# %% [markdown]
# | parameter | is stored by | has seen the tokens of | gradient is summed over |
# |---|---|---|---|
# | attention, norms, embedding, **router** | all ranks | this rank | dp |
# | an expert | the ranks of edp | all ranks of its ep group | edp |
#
# The last row is the trap. An expert receives the gradients of all rows that it computed, so the gradient of its weights already sums over
# the tokens of its ep group. Only the sum over edp is missing. Nothing is divided, because each rank has
# divided its loss by the tokens of *all* ranks.
#
# The folded cell also averages, as DDP does: each rank takes the mean over its own tokens, and each sum is divided by
# the size of its axis.

# %% jupyter={"source_hidden": true}
# First gradients, summed and averaged, as multiples of those of one process.
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
# The last two lines show the mistake of the two libraries. The gradient of an expert contains the tokens of all dp
# ranks, but the average divides it by the size of edp, so it is ep times too large. AdamW hides a constant factor. SGD
# and a clipped gradient norm do not.
#
# ## Training on four ranks: every row counted
# The folded cell trains four steps, in one process and on four ranks with ep = 1 (plain data parallelism), 2 and 4. It
# asserts that losses and weights are equal, and that the recorded calls and the Linux kernel agree with the formulas:

# %% jupyter={"source_hidden": true}
# Train with experts on 1, 2 and 4 ranks; compare losses, weights and bytes.
from course_lib.trace import state_bytes


def train(ep_size):
    mesh = make_mesh(ep=ep_size)
    model = experts_model()
    if mesh.world.size > 1:  # one process runs the loop over all experts
        ep.parallelize(model, mesh.ep, mesh.dp_cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = ep.ExpertSync(model, dp.Bucketed, ep=mesh.ep, edp=mesh.edp, data=mesh.dp_cp)
    losses, loads = [], []
    for step in range(STEPS):
        mesh.ledger.clear()
        loss_sum = ep.loss_sum(model, COEFFICIENT)
        with mesh.kernel_bytes() as kernel:
            losses.append(dp.train_step(loss_sum, [rows(step, mesh)], sync, optimizer).item())
        loads.append([layer.load for layer in ep.moe_layers(model)])
    return {
        "losses": losses,
        "loads": loads,
        "sent": {axis: mesh.ledger.wire_bytes(axis) for axis in ("ep", "dp", "edp")},
        "kernel": None if kernel.by_axis is None else kernel.by_axis.get("ep", 0),
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
print(
    f"{'rank 0':12}{'last loss':>10}{'weights off':>13}{'edp bytes':>11}{'dp':>11}{'ep':>10}{'kernel, ep':>12}"
)
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
    edp, data, sent = (int(result[0]["sent"][axis]) for axis in ("edp", "dp", "ep"))
    kernel = result[0]["kernel"]
    assert kernel is None or sent <= kernel <= 1.05 * sent
    counted = "no count" if kernel is None else f"{kernel:,}"
    print(f"{f'ep = {ep_size}':12}{result[0]['losses'][-1]:10.4f}{apart:13.0e}", end="")
    print(f"{edp:11,}{data:11,}{sent:10,}{counted:>12}")
even = int(CONFIG.layers * ep.even_wire_bytes(TOKENS, TOP_K, ROW, RANKS))
print(
    f"\nif routing were even, ep = 4 would send {even:,} bytes; your prediction {predicted_bytes}"
)

# %% [markdown]
# With a larger ep, a rank sends fewer gradients and more tokens. The kernel also sees message headers and the counts
# that are sent first.
#
# Each pair whose expert is on another rank costs four rows: there and back, in forward and in backward. A rank sends
# two of them for each of its own pairs that leave, and two for each pair of another rank that it computes:

# %%
load = runs[4][0]["loads"][0][0]  # of the first layer, before any training
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
# Rank 3 sends the most, because it computes the most pairs. Two experts are too popular:

# %%
from course_lib.view.experts import load_plot

load_plot(load, title="An untrained router on real text: two of eight experts get 3 of 4 pairs")

# %% [markdown]
# > **Box: FP8 for two of the four rows.** DeepSeek-V3 dispatches rows in FP8, with one scale per 128 elements, and
# > combines results in bfloat16 ([arXiv:2412.19437](https://arxiv.org/abs/2412.19437), section 3.3.3). In backward,
# > the gradients sent to the experts are FP8 too. With rows of 7,168 elements, this saves a quarter of the bytes:

# %%
row = torch.randn(7168 // 128, 128, generator=torch.Generator().manual_seed(0))
scales = row.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
quantized = (row / scales).to(torch.float8_e4m3fn)
error = (quantized.float() * scales - row).norm() / row.norm()
fp8, bf16 = quantized.nbytes + scales.nbytes, 2 * row.numel()
print(f"a row: {bf16:,} bytes in bfloat16, {fp8:,} in FP8 with scales, off by {error:.1%}")
print(f"a pair: {4 * bf16:,} bytes in bfloat16, {2 * fp8 + 2 * bf16:,} with FP8", end=" ")
print(f"({(2 * fp8 + 2 * bf16) / (4 * bf16):.2f})")

# %% [markdown]
# ## All ranks wait for the busiest one
# No rank can finish combine before the busiest rank has computed its rows, so the layer takes as long as on its busiest
# rank. The folded cell runs three layers with an even load and three with a skewed one, at 0.3 ms per row:

# %% jupyter={"source_hidden": true}
# Three layers with experts of 0.3 ms per row; messages and waiting are real.
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
    x_TD[token, token % EXPERTS] = 2.0  # token t chooses expert t, then t + 1
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
    paced_load, seen = result[0], summarize(read(result.traces)[0])
    print(f"{name:7} busiest over mean {ep.imbalance(paced_load.by_rank):.2f};", end=" ")
    print(f"three layers in {1e3 * seen.makespan:.0f} ms; rows by rank {paced_load.by_rank}")
timeline(
    paced["skewed"].traces,
    title="A skewed load: three ranks wait for rank 0 in every layer",
    note=f"Paced: {1e3 * PER_ROW:g} ms per row. all_gather and all_reduce carry counts.",
)

# %% [markdown]
# The skewed layers take about twice as long, not 2.5 times, because messages take as long as before.
#
# ## Balancing the load: a loss, a bias, a capacity
# **Auxiliary loss.** Add E Σ f_e p_e to the loss, times a small coefficient. Here f_e is the fraction of all pairs that
# chose expert e, and p_e its mean probability. The term is 1 for an even load, and larger if popular experts also have
# a large p. Only p has a gradient, which pushes it down where f is large. f counts the tokens of *all* ranks, so each
# forward all-reduces the counts.
#
# **Bias.** An auxiliary loss adds its own gradient to that of the text. DeepSeek-V3 keeps only a very small one, and
# adds to the scores a bias that affects the choice but not the weights. After each step, the bias of each overloaded
# expert decreases by a fixed amount, and the others increase:

# %%
from course_lib.ep.moe import Routes

SPEED = 0.01  # the change of a bias per step


def route_with_bias(logits_TE, bias_E):
    p_TE = logits_TE.softmax(-1)
    experts_TK = (p_TE + bias_E).topk(TOP_K).indices  # the bias takes part in the choice,
    weights_TK = p_TE.gather(1, experts_TK)  # but not in the weights
    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    chosen_E = experts_TK.flatten().bincount(minlength=EXPERTS)
    return Routes(experts_TK.t().contiguous(), weights_TK.t(), chosen_E, p_TE.sum(0))


def update(bias_E, counts):
    counts_E = torch.tensor(counts, dtype=torch.float32)
    bias_E += SPEED * (counts_E.mean() - counts_E).sign()


# %% jupyter={"source_hidden": true}
# Train 60 steps in one process with an auxiliary loss or a bias.
SMALL = tiny_config(layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, max_seq_len=SEQ)


def balanced(coefficient, biased, steps=60):
    """Imbalance of the experts, layers averaged, and loss of the text alone, every 20 steps."""
    model = ep.add_experts(build_model(SMALL, seed=0), EXPERTS, TOP_K, seed=0)
    layers = ep.moe_layers(model)
    biases = [torch.zeros(EXPERTS) for _ in layers]
    for layer, bias_E in zip(layers, biases, strict=True):
        if biased:
            layer.route = lambda x_TD, layer=layer, bias_E=bias_E: route_with_bias(
                layer.router(x_TD), bias_E
            )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = {}
    for step in range(steps):
        total, count = model.loss_sum(*batch(step, seed=0, batch_size=BATCH, seq_len=SEQ))
        uneven = [ep.imbalance(layer.load.by_expert) for layer in layers]
        loss = (total + coefficient * ep.auxiliary_loss(model)) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer, bias_E in zip(layers, biases, strict=True):
            update(bias_E, layer.load.by_expert)
        if step % 20 == 0 or step == steps - 1:
            found[step] = (sum(uneven) / len(uneven), (total / count).item())
    return found


print(f"{'busiest expert over mean (loss) in step':>50}")
for coefficient, biased in ((0.0, False), (0.01, False), (0.1, False), (0.0, True)):
    found = run(balanced, coefficient, biased, n=1)[0]
    line = "   ".join(
        f"{step:2}: {uneven:.2f} ({loss:.2f})" for step, (uneven, loss) in found.items()
    )
    print(f"{'bias' if biased else f'auxiliary loss, {coefficient}':21} {line}")

# %% [markdown]
# The auxiliary loss with 0.01 halves the imbalance, and the loss of the text does not increase. With 0.1 it does. The
# bias is almost as good as 0.01 here.
#
# **Capacity.** An expert takes at most T K / E pairs of a rank's tokens, times a capacity factor, first choices first.
# Other pairs are dropped. A token that loses all its pairs passes only through the residual connection. Capacity bounds
# the load, but whether a token is dropped depends on the other tokens. A layer without capacity is *dropless*.


# %%
def routed(skew, capacity_factor):
    """Four ranks of 64 tokens with random logits; the lower its number, the more popular an expert."""
    generator = torch.Generator().manual_seed(0)
    capacity = capacity_factor and -int(-capacity_factor * TOP_K * TOKENS // EXPERTS)
    chosen, kept = [], []
    for _ in range(RANKS):
        logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        routes = ep.route(logits + skew * torch.linspace(1, 0, EXPERTS), TOP_K, capacity)
        served = routes.experts_KT[routes.experts_KT >= 0]
        chosen.append(tuple(routes.chosen_E.tolist()))
        kept.append(tuple(served.bincount(minlength=EXPERTS).tolist()))
    return ep.Load(tuple(chosen), tuple(kept))


for skew, capacity_factor in ((0, 1.0), (2, 1.0), (2, 1.25), (2, 2.0), (2, None)):
    one = routed(skew, capacity_factor)
    print(f"skew {skew}, capacity factor {capacity_factor}: {one.dropped:.3f} dropped,", end=" ")
    print(f"busiest rank over mean {ep.imbalance(one.by_rank):.2f}")
print(f"your prediction for the first line: {predicted_dropped} dropped")

# %% [markdown]
# Even without skew, a capacity factor of 1 drops pairs, because random choices are uneven. With skew, a larger factor
# drops fewer pairs, but the load is less even.
#
# ## The same in PyTorch
# `dist.all_to_all_single` takes the two lists of splits, and backward is the same call with the lists exchanged:

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


# %% jupyter={"source_hidden": true}
# The layer in raw PyTorch, compared with the library's. Exercise 10-5 asks for a part of it.
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
# Five runs on four ranks with ep = 2. One is `"correct"`, four are faulty:
#
# - **divided**: the gradients of experts are divided by dp after the sum
# - **group**: the gradients of experts are summed over ep
# - **router**: the gradient of the router is not summed
# - **order**: on one rank, each result goes to the next token
#
# For each run, name the cause, the axis of the right sum or all-to-all (`"ep"`, `"edp"` or `"dp"`), and the rank (a
# number or `"all"`). Both are None if correct. "Off" compares with one process, `k` is rank 0's gradient as a multiple
# of the right one, and "apart" compares copies after one step.

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
# Differences below 1e-10 are rounding.
#
# - **One rank's loss is off**: *order*, on that rank. All counts and bytes are right.
# - **Bytes on ep instead of edp, copies of experts apart**: *group*. Gradients of different experts were added up, and
#   no error is raised, because their shapes agree.
# - **k of experts is 1/4, copies agree**: *divided*.
# - **Copies of the router apart**: *router*.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it, and both claims settled
# - **All experts fit, and a rank has many tokens per step.** Replicate them: gradients are sent once per step and hide
#   behind backward, but tokens are sent four times per layer, and the next computation waits for them.
# - **Slow links inside the ep group.** Keep ep inside a node, or limit the nodes per token, as DeepSeek-V3 does.
# - **Few tokens.** An expert multiplies n K T / E rows. Below 295, an H100 (989 TFLOP/s in bfloat16, 3.35 TB/s) reads
#   the weights longer than it computes.
#
# **Claim 1: only if the load is even** and communication is free. All ranks wait for the busiest one, and for the
# all-to-alls.
#
# **Claim 2: false.** The gradient of an expert is summed over edp, because the tokens of its ep group are in it
# already. Where each rank's loss is a mean, divide by the size of dp.

# %%
times = {name: summarize(read(result.traces)[0]).makespan for name, result in paced.items()}
print(f"skewed took {times['skewed'] / times['even']:.2f} times as long; your vote: {vote_1}")
print(f"your vote on the second: {vote_2}")

# %% [markdown]
# **The table that grows.** Per rank, in the last step of the training above. A larger ep stores less:

# %%
print(f"{'per rank':12}{'state':>11}{'bytes sent':>12}{'of it tokens':>14}{'busiest':>9}")
print(f"{'one process':12}{alone['state']:11,}")
for ep_size, result in runs.items():
    one = result[0]
    sent = int(sum(one["sent"].values()))
    busiest = [ep.imbalance(load.by_rank) for load in one["loads"][-1]]
    mean = sum(busiest) / len(busiest)
    print(
        f"{f'ep = {ep_size}':12}{one['state']:11,}{sent:12,}{int(one['sent']['ep']):14,}{mean:9.2f}"
    )

# %% [markdown]
# **Cheat-sheet.** Mixtral 8x7B's sizes in bfloat16, on 8 ranks of 4,096 tokens, if routing is even:


# %%
def cheat_sheet(n=8, tokens=4096):
    config = tiny_config(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, max_seq_len=4096,
        dtype=torch.bfloat16,
    )  # fmt: skip
    print("router: on all ranks, summed over dp")
    print("expert: E/n on each rank, summed over edp; losses are divided by all ranks' tokens")
    print("a layer: 2 all-to-alls forward, 2 backward; 4 rows per pair with an expert elsewhere\n")
    print(f"{'':3}{'weights stored, GB':>27}{'sent per step and rank, GB':>40}")
    print(f"{'ep':>3}{'experts':>13}{'all else':>14}{'tokens':>14}{'gradients of experts':>26}")
    for ep_size in (1, 2, 4, 8):
        experts, rest = ep.parameters_per_rank(config, 8, ep_size)
        rows = config.layers * ep.even_wire_bytes(tokens, 2, 2 * config.hidden, ep_size)
        gradients = dp.wire_bytes(2 * experts, n // ep_size)
        print(f"{ep_size:3}{2 * experts / 1e9:13.1f}{2 * rest / 1e9:14.1f}", end="")
        print(f"{float(rows) / 1e9:14.1f}{float(gradients) / 1e9:26.1f}")


cheat_sheet()

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/10_expert_parallelism.ipynb) take 70 minutes.

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "10-1"}
# ## 10-1 Six tokens and four experts, by hand
# Fifteen minutes, on paper; no code. Two ranks with three tokens each, ep = 2: rank 0 holds experts 0 and 1, and rank 1
# holds experts 2 and 3. Each token has two experts, its first choice first:
#
# | | token 0 | token 1 | token 2 |
# |---|---|---|---|
# | rank 0 | 0, 2 | 0, 1 | 2, 0 |
# | rank 1 | 0, 3 | 1, 0 | 3, 2 |
#
# - `by expert`: the pairs that each of the four experts computes, without capacity
# - `imbalance`: the pairs of the busiest rank, divided by the mean over all ranks
# - `splits`: the rows that each rank hands to the all-to-all, for [[rank 0 to 0, 0 to 1], [1 to 0, 1 to 1]]
# - `rows`: rank 0's rows in the order in which they are sent, as numbers of tokens: by expert, and within an expert
#   first choices before second ones, then by token
# - `bytes`: what each rank sends, forward and backward; a row has 8 float32 elements
# - `dropped`: pairs that each rank drops with capacity factor 1, rounded up
# - `balance`: E Σ f_e p_e over all six tokens, without capacity. The probabilities, added up over the six tokens, are
#   [2.4, 1.2, 1.2, 1.2]; divide so that an even load gives 1
# - `summed with`: now dp = 8 and ep = 4. Over which ranks are the gradients of rank 5's experts summed? Include rank 5
# - `too large`: in the same layout, each rank divides its loss by its own tokens, and the gradients of experts are
#   averaged over edp. By what factor are they too large?

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
# - Pairs by rank and expert: [3, 1, 2, 0] and [2, 1, 1, 2]. Rank 0 computes 7 pairs and rank 1 computes 5; the mean is
#   6.
# - Rank 0's rows: expert 0 is the first choice of tokens 0 and 1 and the second of 2; expert 1 the second of 1; expert
#   2 the first of 2, the second of 0.
# - Rank 0 sends two pairs, rank 1 three: each rank sends 2 · (2 + 3) rows of 32 bytes.
# - The capacity is 6/4 rounded up: 2. Expert 0 has three pairs of rank 0. Each rank decides alone.
# - 4 · (5 · 2.4 + (2 + 3 + 2) · 1.2) / 12 / 6.
# - With ep = 4 the groups are 0 to 3 and 4 to 7; rank 1 stores the same experts as rank 5. An average over the two
#   ranks divides by 2, where 8 is right.

# %% course={"ex": "10-1", "role": "check"}
from course_lib.grading import check

check("10-1", table)

# %% [markdown] course={"ex": "10-2"}
# ## 10-2 The gradient of an expert
# Backward is done, and this rank's expert has a gradient. The loss was divided by the tokens of all ranks. Write the
# one line that returns the gradient with which the optimizer steps.
#
# `ep` is the axis of the ranks that share all experts, `edp` the axis of the ranks that hold the same experts, and
# `data` the axis of all ranks with different tokens.
#
# The check looks at gradients on four ranks with ep = 2, 1 (and tp = 2) and 4, on six with ep = 2, and on one. The
# given gradient must not change. A rank calls at most one all-reduce, and none where no sum is missing.


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
# A router with capacity. `logits` has one list per token. Return one dict per token: its keys are the numbers of the
# experts that serve the token, its values their weights.
#
# - Softmax over all experts. The `choices` largest are chosen.
# - With two choices or more the weights are divided by the sum of the chosen ones; with one choice the weight is the
#   probability.
# - An expert takes at most `room` pairs: first all first choices, in the order of tokens, then all second ones, and
#   so on. The dict has no entry for a pair beyond `room`; the weights of the others do not change.
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
# is the uneven all-to-all with a gradient. `torch.empty_like(rows).index_copy(0, places, rows)` puts rows into places
# and has a gradient.
#
# The check looks at outputs and gradients of x, of the weights and of the experts, on two and three ranks, on pairs of
# four ranks and on one. It expects two all-to-alls in forward and two in backward, which send the rows of the pairs and
# no others. The library's layer and its parts raise an error here.


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
# Write the forward for top_k = 1 and one expert on each rank, with `torch.distributed` alone: `course_lib` raises an
# error here. The default group exists. `dist.all_to_all_single(output, input, output_splits, input_splits)` takes the
# splits as lists of Python numbers; without them it splits evenly.
#
# The check looks at outputs on one to four ranks. In some cases no token chooses an expert, a rank has no tokens, or
# rows are float64. No input may be overwritten. Two all-to-alls send each needed row and no other. You may send the
# counts in any way.


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
# **Exit questions.** Answer, then unfold.
#
# **1.** dp = 64 and ep = 8. Over how many ranks are the gradients of an expert and of the router summed?
#
# <details><summary>Answer</summary>
# Over the 8 ranks of edp (64/8), and over all 64.
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
# Each rank must allocate memory for the arriving rows. So the host must wait until the GPU has sent the counts.
# </details>
#
# **4.** A token is dropped by its second expert. What is its output?
#
# <details><summary>Answer</summary>
# The first expert's result times its unchanged weight.
# </details>
#
# **5.** An expert fits on one GPU. Why EP and not TP?
#
# <details><summary>Answer</summary>
# EP keeps full matrices and sends a token to at most K ranks. TP needs every token on all ranks.
# </details>
#
# **Sources.** Next: lesson 11, several groups over ranks.
# - Lepikhin et al. 2020, *GShard*, capacity: [arXiv:2006.16668](https://arxiv.org/abs/2006.16668).
# - Fedus et al. 2021, the auxiliary loss: [arXiv:2101.03961](https://arxiv.org/abs/2101.03961).
# - Gale et al. 2022, dropless: [arXiv:2211.15841](https://arxiv.org/abs/2211.15841).
# - Wang et al. 2024, the bias: [arXiv:2408.15664](https://arxiv.org/abs/2408.15664).
# - Jiang et al. 2024, *Mixtral*: [arXiv:2401.04088](https://arxiv.org/abs/2401.04088).
