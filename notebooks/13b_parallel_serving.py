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
#     lesson: 13b
# ---

# %% [markdown]
# # 13b Serving on many ranks
#
# *Untimed.* This deep dive belongs to [lesson 13](13_inference.ipynb) and takes about half an hour. It begins with two
# common claims:
#
# 1. *If the model fits one GPU, eight replicas (DP8) have three times the throughput of one model sharded over eight
#    GPUs (TP8). For GPT-J 6B, DP8 takes 50 ms per sample and serves 160 samples per second. TP8 takes 58 ms, of which
#    8 ms are communication, and serves 55.*
# 2. *For serving, TP inside a node and PP across nodes minimizes latency.*
#
# Do you believe them? To find out, we serve the eight requests of lesson 13 on four ranks, with its model of 4 layers.

# %%
vote_1 = None  # "true", "false" or "only if ..."
vote_2 = None
predicted_calls = None  # collectives of one decode step under tensor parallelism
predicted_busy = None  # share of the time that a stage of four works, one group of requests
predicted_winner = None  # "dp4" or "tp4": more tokens per second with 8 requests at once
predicted_winner_64 = None  # and with 64

# %% jupyter={"source_hidden": true}
# The model and the requests of lesson 13, and a server for each axis.
import torch

from course_lib import comm, inference, tp
from course_lib.data import batch, encode
from course_lib.inference import (
    ContextReplica,
    Replica,
    Scheduler,
    Stage,
    serve,
    serve_pipeline,
)
from course_lib.launch import run
from course_lib.mesh import make_mesh
from course_lib.model import build_model, tiny_config
from course_lib.trace import state_bytes

torch.set_num_threads(1)  # matrices so small: threads would wait for each other
RANKS = 4
CONFIG = tiny_config(dtype=torch.float64)
model = build_model(CONFIG, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    tokens, targets = batch(step, seed=0, batch_size=16, seq_len=64)
    optimizer.zero_grad()
    total, count = model.loss_sum(tokens, targets)
    (total / count).backward()
    optimizer.step()
model.requires_grad_(False).eval()

PROMPTS = (
    "In the beginning ",
    "And God said, ",
    "Behold",
    "the son of ",
    "And Moses ",
    "I",
    "O ",
    "King",
)
WANTED = (8, 24, 6, 12, 20, 5, 16, 9)
REQUESTS = inference.make_requests([encode(text).tolist() for text in PROMPTS], WANTED)
TOKENS, CHOSEN = inference.counts(REQUESTS)


def on_ranks(axes, slots=4, groups=1):
    """Answer the requests on the mesh of ``axes``."""
    mesh = make_mesh(**axes)
    own = inference.cut(model, mesh) if mesh.pp.size > 1 else model
    if mesh.tp.size > 1:
        tp.parallelize(own, mesh.tp)
    choose, mine = inference.chooser(own), inference.share(REQUESTS, mesh.dp)
    if mesh.pp.size > 1:
        server = Stage(own, mesh, slots, choose)
        served = serve_pipeline(server, Scheduler(mine, slots, groups=groups))
    else:
        kind = ContextReplica if mesh.cp.size > 1 else Replica
        server = kind(own, mesh, slots, choose)
        served = serve(server, Scheduler(mine, slots))
    return {
        "tokens": served.tokens,
        "steps": served.steps,
        "cache": server.cache.nbytes,
        "state": state_bytes(own).total,
    }


def together(result):
    """The tokens of all ranks, after a check that ranks with the same request agree."""
    found = {}
    for one in result:
        for number, tokens in one["tokens"].items():
            assert found.setdefault(number, tokens) == tokens
    return found


def llama_70b():
    """The sizes of Llama 3 70B in bfloat16."""
    return tiny_config(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, max_seq_len=131072,
        vocab=128256, dtype=torch.bfloat16,
    )  # fmt: skip


# %% [markdown]
# ## Replicas or shards
# In data parallelism each rank stores the whole model and answers its own requests, so replicas send nothing. In tensor
# parallelism all ranks work on every token, as in lesson 05, but forward only. We run both, and compare TP's bytes with
# the formula of lesson 13: 2L + 1 all-reduces per token and an all-gather of a pair.

# %%
runs = {"one process": run(on_ranks, {}, n=1), "dp on 4": run(on_ranks, {"dp": 4}, n=4)}
REFERENCE = together(runs["one process"])
assert together(runs["dp on 4"]) == REFERENCE
for rank, one in enumerate(runs["dp on 4"]):
    calls = runs["dp on 4"].ledgers[rank].calls()
    print(f"dp, rank {rank}: requests {list(one['tokens'])}, {calls} calls")

print(f"\n{'tp':5}{'calls per step':>16}{'bytes per rank':>16}{'formula':>11}{'cache':>10}")
for n in (2, 4):
    result = runs[f"tp on {n}"] = run(on_ranks, {"tp": n}, n=n)
    assert together(result) == REFERENCE
    own, one = result.ledgers[0], result[0]
    formula = inference.tp_wire_bytes(CONFIG, TOKENS, CHOSEN, n)
    assert own.wire_bytes() == formula
    assert one["cache"] == inference.cache_bytes(CONFIG, 4, CONFIG.max_seq_len, tp=n)
    calls = own.calls() // one["steps"]
    print(f"{n:<5}{calls:16}{int(own.wire_bytes()):16,}{int(formula):11,}{one['cache']:10,}")
assert calls == 2 * CONFIG.layers + 2
print("2 per layer, one for the embedding, one for the choice;", end=" ")
print(f"your prediction {predicted_calls}\n")

for n in (1, 4, 8, 16):
    size = inference.cache_bytes(llama_70b(), 1, 8192, tp=n)
    print(
        f"Llama 3 70B, tp {n:2}: {size / 1e9:.2f} GB of cache per rank, {n * size / 1e9:.2f} in all"
    )

# %% [markdown]
# DP sent nothing, and TP's bytes equal their formula. TP shards the cache by the key-value heads, so each rank stores
# at least one head. Llama 3 70B has 8 of them, so with TP16 each head is stored twice and the cache per rank stays the
# same.
#
# ## DP8 or TP8?
# Look at the numbers of the first claim. Its 58 ms are the 50 ms of one GPU plus 8 ms, as if each of eight GPUs still
# did all the work. TP divides the reading of weights and the arithmetic by 8. It does not divide the overhead of a
# step, such as the launch of kernels. How much of the 50 ms is overhead? The claim does not name the GPU, and it does
# not say how many tokens a sample has. We only know that GPT-J has 12.1 GB of weights in 16 bits. An H100 would read
# them at 3.35 TB/s. The table tries four splits of the 50 ms:

# %%
GPU, MESSAGES, READS = 50, 8, 2 * 6.05e9 / 3.35e12 * 1e3  # milliseconds
print(
    f"{'divides by 8':12}{'overhead':>10}{'DP8':>6}{'TP8':>8}   ms per step; eight requests per second"
)
for divides in (50, 8 * MESSAGES / 7, READS, 0):
    sharded = divides / 8 + (GPU - divides) + MESSAGES
    print(f"{divides:12.1f}{GPU - divides:10.1f}{GPU:6}{sharded:8.2f}", end="   ")
    print(f"DP8 {8e3 / GPU:.0f}, TP8 {8e3 / sharded:.0f}")
print(f"the claimed 55 per second at 58 ms are {55 * 0.058:.1f} samples at once")

# %% [markdown]
# The claimed 58 ms are right only if all 50 ms are overhead (last row). If a sample is a single decoded token, reading
# takes 3.6 ms, the rest is overhead, and 58 ms is nearly right. If all 50 ms are reading and arithmetic (first row),
# TP8 takes 14.25 ms and wins in latency and in throughput. The second row is the break-even point: TP8 wins if more
# than 9.1 of the 50 ms divide by 8. The claimed 55 samples per second follow from none of the rows. At 58 ms, one
# sample at a time gives 17 per second, and eight together give 138.
#
# When does the winner change? Let o be the overhead, W the time to read the weights, and c the time for each request,
# that is for its cache and its arithmetic. B requests are served on n ranks. We add these times, so this model does not
# let reading and arithmetic overlap. A step of DP takes o + W + (B/n) c, and a step of TP takes o + (W + B c)/n +
# messages(B). The overhead and the terms with c cancel:
#
# $$\text{TP is faster while}\quad \tfrac{n-1}{n}\, W > \text{messages}(B)$$
#
# Messages take longer with larger B, and W stays the same. The order therefore changes at one batch size at most, which
# is the same for latency and throughput. We compute it for four ranks with W = 320 ms, c = 16 ms and slow links. Then
# we measure both layouts at 8 and at 64 requests:

# %%
from course_lib.bench import inference as bench
from course_lib.mesh import Link, Links

INSIDE, BETWEEN = Link(alpha=0.001, beta=0.5e6), Link(alpha=0.004, beta=0.25e6)
DP4, TP4 = bench.Layout(dp=4), bench.Layout(tp=4)
SERVED = bench.config_for(2)


def by_formula(layout, size, per_node=RANKS):
    """(tokens per second, seconds from token to token)."""
    return bench.predicted(SERVED, layout, Links(INSIDE, BETWEEN, per_node), size)


crossing = next(size for size in range(4, 512, 4) if by_formula(DP4, size) > by_formula(TP4, size))
print(f"DP4 is ahead from {crossing} requests")
for size, said in ((8, predicted_winner), (64, predicted_winner_64)):
    speed = {layout.name: by_formula(layout, size)[0] for layout in (DP4, TP4)}
    shown = ", ".join(f"{name} {tokens:.0f} tokens per second" for name, tokens in speed.items())
    print(f"{size:2} requests: {shown}; ahead is {max(speed, key=speed.get)}, you said {said}")

# %% jupyter={"source_hidden": true}
# Measure layouts: compute padded by sleep, links emulated, messages and waiting real.
from functools import partial
from statistics import median
from time import perf_counter

from course_lib.launch import World
from course_lib.view import serving_plot


def small_call(n):
    """Seconds of a small all-reduce between n ranks, without any link."""
    axis, times = make_mesh(tp=n, dp=RANKS // n).tp, []
    for _ in range(30):
        start = perf_counter()
        comm.all_reduce(torch.ones(8, SERVED.hidden), axis)
        times.append(perf_counter() - start)
    return median(times)


def compare(layouts, batches, per_node=RANKS):
    links = Links(INSIDE, BETWEEN, per_node)
    with World(RANKS) as world:
        own = {n: 1e3 * max(world.run(small_call, n)) for n in sorted({x.tp for x in layouts})}
        measured = [
            (layout, bench.compare(world, layout, links, size, tokens=2))
            for layout in layouts
            for size in batches
        ]
    print(f"{'':50}{'ms from token to token':>29}")
    print(f"{'layout':9}{'requests':>9}{'bytes per token':>17}{'calls':>7}", end="")
    print(f"{'formula':>16}{'+ calls':>10}{'measured':>11}")
    for layout, row in measured:
        calls = 2 * SERVED.layers + 2 if layout.tp > 1 else 0
        assert row["bytes_per_token"] == row["bytes_per_token_formula"]
        print(f"{layout.name:9}{row['batch']:9}{row['bytes_per_token']:17,.0f}{calls:7}", end="")
        formula = row["latency_ms_formula"]
        print(f"{formula:16.0f}{formula + calls * own[layout.tp]:10.0f}{row['latency_ms']:11.0f}")
    return measured


# %%
points = {"dp4": {}, "tp4": {}}
for layout, row in compare((DP4, TP4), (8, 64)):
    pair = row["tokens_per_second"], row["latency_ms"] / 1e3
    points[layout.name][row["batch"]] = pair
serving_plot(
    points,
    {layout.name: partial(by_formula, layout) for layout in (DP4, TP4)},
    title="Few requests: shard the model. Many: replicate it",
    note="Compute padded by sleep, links emulated, waiting measured.",
)

# %% [markdown]
# The lines cross between 24 and 28 requests. TP's points are off its line because gloo itself needs time for every
# call. The column `+ calls` adds the time of ten small calls without a link. Here TP's measured times are between the
# formula and this column.
#
# ## A pipeline needs groups
# A token needs all p stages one after the other. One group of requests therefore keeps one stage busy at a time. With
# several groups, stage 1 works on one group while stage 0 works on the next. What does that do to throughput and
# latency? We run 1, 2, 4 and 6 groups of two requests. A stage takes 30 ms per group:

# %%
from course_lib.mesh import Conditions
from course_lib.view import timeline

PACE = {"F": 0.03}  # seconds of a stage's step, for any number of requests


def turns(groups):
    mesh = make_mesh(pp=RANKS)
    stage = Stage(inference.cut(model, mesh), mesh, 2 * groups)
    requests = inference.make_requests([[72]] * 2 * groups, 5)
    served = serve_pipeline(stage, Scheduler(requests, 2 * groups, groups=groups))
    return {"ticks": served.steps, "speed": served.throughput, "latency": served.latency}


in_turn = {groups: run(turns, groups, n=RANKS, pace=PACE) for groups in (1, 2, 4, 6)}
print(
    f"{'groups':6}{'requests':>10}{'busy, formula':>15}{'ticks':>7}{'tokens/s':>10}{'ms per token':>14}"
)
for groups, result in in_turn.items():
    one, busy = result[-1], float(inference.busy_share(groups, RANKS))
    print(f"{groups:6}{2 * groups:10}{busy:15.2f}{one['ticks']:7}{one['speed']:10.0f}", end="")
    print(f"{1e3 * one['latency']:14.0f}")
print(f"your prediction for one group: {predicted_busy}")

result = runs["pp on 4"] = run(on_ranks, {"pp": RANKS}, 4, 4, n=RANKS)
assert together(result) == REFERENCE
sent = sum(ledger.wire_bytes("pp") for ledger in result.ledgers)
assert sent == inference.pp_wire_bytes(CONFIG, TOKENS, CHOSEN, RANKS)
timeline(
    in_turn[4].traces,
    title="Four groups in flight: every stage works, and a token comes no sooner",
    conditions=Conditions(PACE),
)

# %% [markdown]
# In the picture, boxes with a number are decode steps of that group, and boxes without one are prefills. Four groups
# give more than three times the tokens per second of one group. The factor is below four because the pipeline has to
# fill and drain. No token comes sooner, as the last column of the table shows. With six groups on four stages, each
# group also waits until a stage is free.
#
# ## Two nodes
# The second claim puts PP across nodes. Four ranks now form two nodes of two, with a slower link between them. We
# compare TP over all four ranks, TP in a node with DP across, and TP in a node with PP across. A second cell asks
# whether GPT-3 needs more than one node:

# %%
two_nodes = compare((TP4, bench.Layout(dp=2, tp=2), bench.Layout(tp=2, pp=2)), (8,), per_node=2)

# %%
from course_lib.tp import formulas

gpt3 = tiny_config(
    family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, max_seq_len=2048,
    vocab=50304, tied=True, dtype=torch.bfloat16,
)  # fmt: skip
held = 2 * formulas.parameters_per_rank(gpt3, 8) / 1e9
print(f"GPT-3 in bfloat16, TP8: {held:.1f} GB per rank, so one node of 80-GB GPUs holds it")

# %% [markdown]
# TP across both nodes is the slowest, so the claim is right to keep TP inside a node. But a replica per node is faster
# than PP by the formula, because no token crosses the slow link. PP is for models whose weights and caches do not fit
# one node. GPT-3's weights do. On 512 GPUs, TP8 with PP64 would send each token over 63 stage boundaries, while 64
# replicas of TP8 send nothing to each other.
#
# ## Long prompts and experts
# Context parallelism computes a long prompt on all ranks with ring attention (lesson 09), and each rank stores the keys
# and values of its own positions. In decode, the ranks merge their partial results as in exercise 13-4. The alternative
# is to gather the cache. Which sends less? The same cell then serves a model whose experts are sharded over the
# replicas (lesson 10).

# %%
from course_lib import ep

result = runs["cp on 4"] = run(on_ranks, {"cp": RANKS}, n=RANKS)
assert together(result) == REFERENCE
prefill = sum(inference.prefill_wire_bytes(CONFIG, len(r.prompt), RANKS) for r in REQUESTS)
decoding = inference.decode_wire_bytes(CONFIG, CHOSEN - len(REQUESTS), RANKS)
own = result.ledgers[0].wire_bytes("cp")
assert own == prefill + decoding
print(f"a rank sent {int(own):,} bytes, formula {int(prefill):,} + {int(decoding):,}")
per_token = float(inference.decode_wire_bytes(llama_70b(), 1, 8)) / 1e6
moved = float(inference.moved_cache_wire_bytes(llama_70b(), 131072, 8)) / 1e6
print(f"Llama 3 70B on 8 ranks: merging sends {per_token:.1f} MB per token,", end=" ")
print(f"gathering 131,072 rows {moved:,.0f} MB\n")


def with_experts(n):
    mesh = make_mesh(dp=n, ep=n)
    sparse = ep.add_experts(model, experts=8, top_k=2, seed=1)
    ep.parallelize(sparse, mesh.ep, mesh.dp_cp)
    mine = inference.share(REQUESTS, mesh.dp)
    served = serve(Replica(sparse, mesh, slots=2), Scheduler(mine, slots=2))
    return {"tokens": served.tokens, "steps": served.steps}


alone, shared = run(with_experts, 1, n=1), run(with_experts, RANKS, n=RANKS)
assert together(shared) == together(alone)
for rank, one in enumerate(shared):
    new = sum(map(len, one["tokens"].values()))
    print(f"experts, rank {rank}: {new} tokens for its requests, {one['steps']} steps")
assert len({one["steps"] for one in shared}) == 1

# %% [markdown]
# The formula has two terms, for prefill and for decode. For Llama 3 70B, gathering the cache once sends as much as
# merging for 2,000 tokens, and then every rank must store all of it.
#
# The last four lines show replicas that share experts. They have different amounts of work but take the same number of
# steps, because an all-to-all waits for every rank. So no replica may stop before the last one has finished.
#
# ## Prefill and decode on separate GPUs
# While a GPU computes the prefill of a new request, all running requests wait. Disaggregated serving (DistServe,
# Splitwise) therefore gives prefill and decode separate GPUs. This has a cost: the KV cache of every request must be
# sent from one group of GPUs to the other. Here rank 0 does the prefill, and rank 1 decodes:


# %%
@torch.no_grad()
def disaggregated(request):
    """Rank 0 reads the prompt, rank 1 generates. Returns rank 1's tokens and rank 0's bytes."""
    mesh, slots = make_mesh(dp=2), 1
    server, scheduler = Replica(model, mesh, slots), Scheduler([request], slots)
    work, length = scheduler.next_work(), len(request.prompt)
    caches = [x for layer in server.cache.layers for x in (layer.keys_NTGK, layer.values_NTGK)]
    rows = torch.stack([x[0, :length] for x in caches])
    token = torch.zeros(1, dtype=torch.int64)
    if mesh.dp.rank == 0:
        token = server.step(work)
        rows = torch.stack([x[0, :length] for x in caches])
        comm.start_exchange(mesh.dp, [(rows, 1), (token, 1)], []).wait()
        return int(mesh.ledger.wire_bytes())
    rows, token = comm.start_exchange(mesh.dp, [], [(rows, 0), (token, 0)]).wait()
    for x, own in zip(caches, rows, strict=True):
        x[0, :length] = own
    scheduler.record(work, token.tolist())
    while not scheduler.done:
        work = scheduler.next_work()
        scheduler.record(work, server.step(work).tolist())
    return scheduler.tokens[request.number]


request = REQUESTS[1]
sent, tokens = run(disaggregated, request, n=2)
assert tokens == REFERENCE[1]
cache = inference.cache_bytes(CONFIG, 1, len(request.prompt))
print(f"the same {len(tokens)} tokens; sent {sent:,} bytes: cache {cache:,} and a token of 8")
assert sent == cache + 8

# %% [markdown]
# Rank 1 generated the same tokens from a cache that it did not compute. How long does a real cache take to send? We use
# a prompt of 8,192 tokens for Llama 3 70B on eight H100 GPUs. The prefill does two operations per weight and token. We
# assume 40 % of the peak and leave out attention.

# %%
GPUS, PROMPT, FLOPS, MEMORY = 8, 8192, 989e12, 3.35e12
parameters = formulas.parameters_per_rank(llama_70b(), 1) - 128256 * 8192  # without embedding
prefill = 2 * parameters * PROMPT / (GPUS * 0.40 * FLOPS)
step = 2 * parameters / (GPUS * MEMORY)
cache = inference.cache_bytes(llama_70b(), 1, PROMPT)
print(
    f"prefill {1e3 * prefill:.0f} ms; to read the weights, as a decode step must, {1e3 * step:.1f} ms"
)
print(f"so a prefill takes as long as {prefill / step:.0f} decode steps of a small batch")
print(f"cache to send: {cache / 1e9:.2f} GB")
for name, speed in {
    "one link of 100 Gb/s": 12.5e9,
    "one link of 400 Gb/s": 50e9,
    "eight links of 400 Gb/s": 400e9,
}.items():
    print(
        f"  {name:24}{1e3 * cache / speed:6.0f} ms, {cache / speed / prefill:5.1%} of the prefill"
    )

# %% [markdown]
# On GPUs that do both, every running request would wait 360 ms. In that time the GPUs could read their weights for 69
# decode steps. Chunked prefill spreads this wait over several steps. With separate GPUs only the new request waits, 7
# to 215 ms longer than its prefill, and less if each layer is sent as soon as it is computed. Whether this pays depends
# on the network.
#
# Disaggregation keeps the time per token steady. According to [vLLM's
# documentation](https://docs.vllm.ai/en/latest/features/disagg_prefill/) it does not improve throughput. DistServe
# reports a gain in goodput, which counts only requests that meet their latency limits. Both groups of GPUs store all
# weights, and one group may be idle when the mix of prompts and answers changes.
#
# ## The axes in one table
# **Claim 1: only if the messages of a step take longer than (n-1)/n of the time to read the weights.** This happens
# with large batches. How far DP is then ahead depends on the batch too, so no fixed factor such as three is right.
#
# **Claim 2: only if one node cannot hold the model and its caches.** Otherwise the transfers of PP only make a token
# slower.
#
# The table shows our eight requests. Under DP each replica has its own weights and slots, so the ranks together store
# four times as much as one process. TP and PP divide weights and cache; CP divides only the cache:

# %%
print(f"{'rank 0':14}{'weights':>12}{'cache':>11}{'sent by all':>13}{'steps or ticks':>16}")
for name, result in runs.items():
    one, sent = result[0], int(sum(ledger.wire_bytes() for ledger in result.ledgers))
    print(f"{name:14}{one['state']:12,}{one['cache']:11,}{sent:13,}{one['steps']:16}")
for size in (8, 64):
    ratio = by_formula(TP4, size)[0] / by_formula(DP4, size)[0]
    print(f"{size:2} requests: TP4 has {ratio:.2f} times DP4's throughput")
for layout in (bench.Layout(dp=2, tp=2), bench.Layout(tp=2, pp=2)):
    print(f"two nodes, {layout.name}: a token takes {1e3 * by_formula(layout, 8, 2)[1]:.0f} ms")
print(f"your votes: {vote_1}, {vote_2}")

# %% [markdown]
# **Sources.**
# - Pope et al. 2022, layouts for latency and for throughput: [arXiv:2211.05102](https://arxiv.org/abs/2211.05102).
# - Yang et al. 2024, context parallelism for inference: [arXiv:2411.01783](https://arxiv.org/abs/2411.01783).
# - Zhong et al. 2024, *DistServe*: [arXiv:2401.09670](https://arxiv.org/abs/2401.09670).
# - Patel et al. 2024, *Splitwise*: [arXiv:2311.18677](https://arxiv.org/abs/2311.18677).
# - `course bench inference` compares layouts of eight ranks at length.
