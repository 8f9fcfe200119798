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
#     lesson: '13'
# ---

# %% [markdown]
# # 13 Inference: one token after the other
#
# *40 minutes to read and run, 60 to build.* In training, a GPU is busy computing. When the same model answers requests,
# the GPU mostly waits for its own memory. This lesson serves a model on one GPU and finds what limits it. You need
# lesson 01, and for the last third lessons 05 and 07.
#
# Vote first: `"true"`, `"false"` or `"only if ..."`. A *decode step* gives one more token to each running request.
#
# 1. *A decode step for 32 requests takes hardly longer than a step for one.*
# 2. *An H100 computes three times as fast as an A100, so it decodes three times as fast.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## How fast can an H100 write?
# A forward of Llama 3 8B takes two operations per weight for each token. An H100 (SXM) does up to 989e12 operations per
# second in bfloat16. How many tokens per second can a single reader get?

# %%
import torch

from course_lib.model import build_model, tiny_config
from course_lib.tp import formulas
from course_lib.view.roofline import roofline

GPUS = {"H100": (989e12, 3.35e12), "A100": (312e12, 2.039e12)}  # data sheets: FLOP/s, bytes/s
PEAK, MEMORY = GPUS["H100"]
LLAMA_8B = tiny_config(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, max_seq_len=8192, vocab=128256,
    dtype=torch.bfloat16,
)  # fmt: skip
PARAMETERS = formulas.parameters_per_rank(LLAMA_8B, 1)
READ = PARAMETERS - LLAMA_8B.vocab * LLAMA_8B.hidden  # a token needs one row of the embedding

print(f"{PARAMETERS:,} parameters, of which a token uses {READ:,}")
print(f"by arithmetic: {PEAK / (2 * READ):,.0f} tokens per second")
print(f"by memory:     {MEMORY / (2 * READ):,.0f} tokens per second")
for name, (flops, memory) in GPUS.items():
    print(f"{name}: both limits are equal at {flops / memory:.0f} rows")

# %% [markdown]
# The second number is the limit. For each token the GPU reads all these weights from its memory, 2 bytes each, and
# multiplies them with one row of activations, the vector of that token. A few more rows cost hardly more time, because
# a weight that has been read is used for all of them. With R rows, a product does R operations per byte of weights, and
# the H100 reaches the bend of its roofline (lesson 01) at 295 rows:

# %%
roofline(
    {
        "decode: 1, 8 and 64 requests": {rows: rows * MEMORY for rows in (1, 8, 64)},
        "prefill: a prompt of 1,024": {1024: PEAK},
    },
    GPUS,
    title="Decode waits for memory, prefill for arithmetic",
    x="rows, which are FLOPs per byte of bfloat16 weights",
    note="Computed, not measured.",
)

# %% [markdown]
# ## Prefill and decode
# Decode with few requests is on the slope of the roofline, and a long prompt is on its flat part. The rows come from
# requests. Each has a prompt of S tokens and asks for m new ones:
#
# ```
#  prefill   the whole prompt in one forward    S rows        gives token 1
#  decode    token 1                            1 row         gives token 2
#            token 2                            1 row         gives token 3  ...
# ```
#
# In decode a request has one row per step, because token 3 needs token 2. More rows can only come from other requests.
# A *step* is one forward: the prefill of one request, or one decode step of all running requests.
#
# | symbol | meaning |
# |---|---|
# | S, m | tokens of the prompt, new tokens |
# | L, D, V | layers, hidden size, vocabulary |
# | G, K, b | key-value heads, features per head, bytes per element |
# | N, T | slots (each stores the cache of one request), positions per slot |
# | B, n | requests in a step, ranks |
# | p, g | stages of a pipeline, groups of requests in it |
# | W, c | seconds to read the weights, and the cache of one request |
#
# The next cell trains a small model with 4 layers, hidden size 64, 8 query heads and 4 key-value heads. It computes in
# float64, so that rounding cannot decide between two tokens. What do you predict for eight requests?

# %%
from course_lib import inference
from course_lib.data import batch, decode, encode

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
print(f"{len(REQUESTS)} requests, {sum(WANTED)} new tokens; loss {(total / count).item():.2f}")

# %%
predicted_rows = None  # rows through the model with a cache, as a share of those without
predicted_cache = None  # bytes of keys and values for 4 requests of up to 128 positions
predicted_steps = None  # steps for all requests in 4 slots, if slots are refilled at once

# %% [markdown]
# ## The KV cache
# Under a causal mask, a position never attends to a later one, so its keys and values stay the same when the text
# grows. If we store them, a new token costs one row instead of the whole text. We answer the requests without a cache,
# then with one. The `Scheduler` decides which take part in a step.

# %%
from course_lib.inference import Replica, Scheduler, serve
from course_lib.inference.cache import LayerCache
from course_lib.mesh import make_mesh
from course_lib.view import show_source


@torch.no_grad()
def recompute(request):
    """The whole text again for every token."""
    text = list(request.prompt)
    for _ in range(request.max_new_tokens):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(request.prompt) :]


REFERENCE = {request.number: recompute(request) for request in REQUESTS}
replica = Replica(model, make_mesh(), slots=4)
assert serve(replica, Scheduler(REQUESTS, slots=4)).tokens == REFERENCE

without = sum(len(r.prompt) + i for r in REQUESTS for i in range(r.max_new_tokens))
TOKENS, CHOSEN = inference.counts(REQUESTS)
print(f"the same tokens: {without:,} rows without a cache, {TOKENS} with it;", end=" ")
print(f"share {TOKENS / without:.2f}, your prediction {predicted_rows}\n")
show_source(LayerCache.__call__)

# %% [markdown]
# The tokens are the same, and only 9 % of the rows go through the model. A request needs S + m - 1 rows, because its
# last token is never fed back. The code stores the new keys and values, and each query attends to all positions up to
# its own.
#
# ## How many requests fit
# The cache stores a key and a value for each layer, slot, position and key-value head, so it takes 2 L N T G K b bytes.
# Does our cache take as much, and what would Llama 3 70B need with 64, 8 or 1 key-value heads?

# %%
measured, formula = replica.cache.nbytes, inference.cache_bytes(CONFIG, 4, CONFIG.max_seq_len)
assert measured == formula
print(f"measured {measured:,}, formula {formula:,}; your prediction {predicted_cache}")


def llama_70b(kv_heads=8):
    """The sizes of Llama 3 70B in bfloat16."""
    return tiny_config(
        layers=80, hidden=8192, heads=64, kv_heads=kv_heads, ffn=28672, max_seq_len=131072,
        vocab=128256, dtype=torch.bfloat16,
    )  # fmt: skip


print("\nLlama 3 70B, one request of 8,192 positions:")
for kv_heads in (64, 8, 1):
    size = inference.cache_bytes(llama_70b(kv_heads), 1, 8192)
    print(f"  {kv_heads:2} heads of keys and values: {size / 1e9:6.2f} GB")

# %% [markdown]
# The real model has 8 key-value heads, and 8 of its 64 query heads share each of them (grouped queries). The cache
# costs time as well, because a decode step reads the cache of every request. As long as reading is the limit, a step
# takes
#
# $$W + B\,c$$
#
# seconds. Here is Llama 3 8B on an H100 of 80 GB, without the launch of kernels and the arithmetic of attention:


# %%
def cache_of(positions):
    return inference.cache_bytes(LLAMA_8B, 1, positions)


def decode_step(requests, positions):
    """Seconds: the longer of reading weights and caches, and of the products."""
    reading = (2 * READ + requests * cache_of(positions)) / MEMORY
    return max(reading, 2 * READ * requests / PEAK)


print(f"{'positions':9}{'GB each':>9}{'fit':>6}{'requests':>10}{'ms per step':>13}{'tokens/s':>10}")
for positions in (512, 8192):
    fit = int((80e9 - 2 * PARAMETERS) // cache_of(positions))
    for requests in (1, 32, fit):
        seconds, each = decode_step(requests, positions), cache_of(positions) / 1e9
        print(f"{positions:9,}{each:9.2f}{fit:6}{requests:10}", end="")
        print(f"{1e3 * seconds:13.1f}{requests / seconds:10,.0f}")

# %% [markdown]
# With 512 positions, 32 requests cost little more than one. With 8,192 positions, only 59 requests fit, and their
# caches take longer to read than the weights. In all six rows, reading takes longer than arithmetic.
#
# ## Continuous batching
# Requests end at different times. A static batch leaves their slots empty until its last request has ended, while
# continuous batching (Orca) gives a free slot to the next request at once. We run both on one rank. Sleep pads each
# step to 20 ms plus 1 ms per token:

# %%
from course_lib.inference import StaticScheduler
from course_lib.launch import run

PACE = {"F": 0.020, "token": 0.001}
WAYS = {
    "one at a time": (Scheduler, 1),
    "static, 4 slots": (StaticScheduler, 4),
    "continuous, 4 slots": (Scheduler, 4),
}


def on_one_rank(kind, slots):
    served = serve(replica := Replica(model, make_mesh(), slots), kind(REQUESTS, slots))
    return served.tokens, served.steps, served.throughput, served.latency, replica.cache.nbytes


def chart(kind, slots):
    """A line for each slot and a column for each step: the request that gets a token."""
    scheduler, lines = kind(REQUESTS, slots), [""] * slots
    while not scheduler.done:
        work = scheduler.next_work()
        taking = dict(zip(work.slots, work.requests, strict=True))
        lines = [line + str(taking.get(slot, ".")) for slot, line in enumerate(lines)]
        scheduler.record(work, [0] * len(work.slots))
    return lines


rows_of = {}
for name, (kind, slots) in WAYS.items():
    tokens, steps, speed, latency, cache = run(on_one_rank, kind, slots, n=1, pace=PACE)[0]
    assert tokens == REFERENCE
    rows_of[name] = steps, speed, 1e3 * latency, cache
    if slots > 1:
        print(f"{name}: {steps} steps, {speed:.0f} tokens per second")
        print("\n".join(f"  slot {slot}  {line}" for slot, line in enumerate(chart(kind, slots))))
print(f"you predicted {predicted_steps} steps for the second")

# %% [markdown]
# Each column is a step, and a digit is the request that gets a token. Continuous batching needs 34 steps instead of 50.
# In its chart most columns with a single digit are prefills. All running requests wait for them, because our scheduler
# gives each prefill a step of its own. Orca and vLLM can mix prefill and decode in one step.
#
# ## Sampling: the noise belongs to the request
# So far each token was the most likely one (greedy). A random draw can be a maximum too. With logits z, temperature τ
# and exponential noise e for each token, the argmax of z/τ - log e is distributed as softmax(z/τ). Our noise depends on
# seed, request and position alone, so the same logits give the same text in any batch and on any number of ranks.
#
# The cell draws from the 30 largest logits (top_k), and of these from the fewest with 95 % of the probability (top_p):

# %%
show_source(inference.sampling.gumbel)
SAMPLING = inference.Sampling(temperature=0.8, top_k=30, top_p=0.95, seed=2)


def sampled(slots):
    server = Replica(model, make_mesh(), slots, inference.chooser(model, SAMPLING))
    return serve(server, Scheduler(REQUESTS, slots)).tokens


drawn = sampled(slots=4)
assert drawn == sampled(slots=1) == sampled(slots=8)
print("\nin 1, 4 and 8 slots:", repr(PROMPTS[1] + decode(torch.tensor(drawn[1]))))

# %% [markdown]
# The text is the same in 1, 4 and 8 slots. On a GPU it may differ, because another batch size can change the rounding.
#
# ## On many ranks
#
# If one GPU is too small or too slow, we shard as in training, but without a backward pass. This is what each axis
# sends per token ([13b](13b_parallel_serving.ipynb) measures it):
#
# | axis | divides | sends |
# |---|---|---|
# | DP | requests | nothing |
# | TP | weights, heads of the cache (at least one per rank) | 2L + 1 all-reduces of D elements (one for the embedding), an all-gather of a pair |
# | PP | layers | D elements per stage boundary, the token to earlier stages |
# | CP | positions of the cache | an all-gather of partial results per layer |
#
# **Choosing a token under TP.** The LM head is sharded by the vocabulary, so a rank has V/n logits. Each rank sends a
# pair: its largest logit, and the number of that token in the full vocabulary. All ranks take the token of the best
# pair. If noise is added to the logits first, the same exchange draws a token.

# %%
from course_lib import comm

LOGITS = torch.tensor([[0.5, 3.0], [3.5, -2.0]])  # of ranks 0 and 1: four tokens


def choose_by_hand():
    axis = make_mesh(tp=2).tp
    best, token = LOGITS[axis.rank].max(0)
    pair = torch.stack((best, token + 2.0 * axis.rank))
    pairs = comm.all_gather(pair[None], axis)
    return pair.tolist(), int(pairs[pairs[:, 0].argmax(), 1])


for rank, (pair, token) in enumerate(run(choose_by_hand, n=2)):
    print(f"rank {rank} offers (logit, token) {pair} and takes token {token}")

# %% [markdown]
# Both ranks take token 2 with logit 3.5.
#
# **Groups in a pipeline.** A token passes all p stages before the next token of its request can start, so one group of
# requests keeps one stage busy at a time. In a tick, a stage computes one group. With g groups, each stage works in g
# of max(g, p) ticks, and in this time each request gets one token.
#
# **Attention over a sharded cache.** Rank r computes attention over its own positions, o(r), and the logarithm of its
# sum of exponentials, s(r). All ranks gather both. The result is
#
# $$\sum_r e^{\,s(r) - s}\; o(r), \qquad s = \log \sum_r e^{\,s(r)}$$
#
# ## The same in PyTorch
# Here is a greedy loop with `torch.distributed` alone. It shards the weights in place, and a hook adds the partial sums
# after `o` and `down`. Without a cache, it computes all rows again for each token.

# %%
import torch.distributed as dist
from torch import nn


def sum_over_ranks(module, args, y):
    dist.all_reduce(y)
    return y


def in_pytorch(request):
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()

    def keep(linear, dim):
        own = linear.weight.chunk(n, dim)[rank].contiguous()
        linear.weight = nn.Parameter(own, requires_grad=False)

    for block in model.blocks:
        for linear in (block.attn.q, block.attn.k, block.attn.v, block.ffn.gate, block.ffn.up):
            keep(linear, 0)
        for linear in (block.attn.o, block.ffn.down):
            keep(linear, 1)
            linear.register_forward_hook(sum_over_ranks)
    keep(model.head, 0)
    text = list(request.prompt)
    for _ in range(request.max_new_tokens):
        best, token = model(torch.tensor([text]))[0, -1].max(0)
        pair = torch.stack((best, (token + rank * CONFIG.vocab // n).to(best)))
        pairs = [torch.empty_like(pair) for _ in range(n)]
        dist.all_gather(pairs, pair)
        text.append(int(max(pairs, key=lambda one: one[0])[1]))
    dist.destroy_process_group()
    return text[len(request.prompt) :]


for number in (1, 4):
    raw = run(in_pytorch, REQUESTS[number], n=RANKS, init=False)
    assert all(tokens == REFERENCE[number] for tokens in raw)
    print(f"request {number}: {len(raw[0])} tokens on {RANKS} ranks, equal to one process")

# %% [markdown]
# ## Break it and diagnose
#
# Four ranks of TP draw tokens. One run is correct (its cause is `"correct"`), four are faulty:
#
# - **own dice**: the ranks gather all logits, and each draws with its own random state
# - **own noise**: each rank computes its noise from its own seed
# - **local names**: tokens are numbered within the rank's shard of the vocabulary
# - **lost rows**: one rank does not store the keys and values of decoded tokens
#
# For each run, name the cause, the collective (`"all_gather"` if its content is wrong, else None) and the rank (a
# number, or `"all"`; None if correct). "Agree" compares the ranks, "reference" compares with one process, and "choice"
# counts the bytes that a rank hands to the all-gather per token. The last column counts the rows that each rank stored
# in slot 0.

# %%
SEED = 1
diagnosis = {  # such as ("own dice", "all_gather", "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from dataclasses import replace

from course_lib import tp
from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "own dice": ("all_gather", "all"),
    "own noise": (None, "all"),
    "local names": ("all_gather", "all"),
    "lost rows": (None, range(RANKS)),
}
lab = Lab("13", SEED, FAULTS)
DRAWING = inference.Sampling(seed=3)
LONG = inference.make_requests([encode("And the ").tolist()] * 2, 20)


class LosesRows(Replica):
    def step(self, work):
        tokens = Replica.step(self, work)
        if not work.is_prefill:
            for layer in self.cache.layers:
                for kept in (layer.keys_NTGK, layer.values_NTGK):
                    kept[self.cache.slots_B1, self.cache.positions_BS] = 0
        return tokens


def faulty_chooser(fault, own, axis):
    torch.manual_seed(7 + axis.rank)

    def own_dice(logits_BVt, work):
        whole_BV = comm.all_gather(logits_BVt, axis, dim=1)
        return torch.multinomial(whole_BV.softmax(-1), 1)[:, 0]

    def local_names(logits_BVt, work):
        return inference.choose(logits_BVt, work, DRAWING, axis)

    if fault == "own noise":
        return inference.chooser(own, replace(DRAWING, seed=DRAWING.seed + axis.rank))
    found = {"own dice": own_dice, "local names": local_names}
    return found.get(fault) or inference.chooser(own, DRAWING)


def examined(lab_run):
    mesh = make_mesh(tp=RANKS)
    own = tp.parallelize(model, mesh.tp)
    kind = LosesRows if lab_run.has("lost rows", mesh.rank) else Replica
    server = kind(own, mesh, 2, faulty_chooser(lab_run.cause, own, mesh.tp))
    tokens = serve(server, Scheduler(LONG, 2)).tokens
    rows = int((server.cache.layers[0].values_NTGK[0].abs().amax((1, 2)) > 0).sum())
    given = sum(record.payload for record in mesh.ledger.select("tp", "all_gather"))
    return {"tokens": tokens, "rows": rows, "choice": given // sum(map(len, tokens.values()))}


reference = serve(
    Replica(model, make_mesh(), 2, inference.chooser(model, DRAWING)), Scheduler(LONG, 2)
).tokens
print(
    f"{'':3}{'choice':>6}{'agree':>7}{'reference':>11}{'largest token':>15}   rows in slot 0, by rank"
)
for lab_run in lab:
    result = run(examined, lab_run, n=RANKS)
    texts = [one["tokens"] for one in result]
    agree = "yes" if all(text == texts[0] for text in texts) else "no"
    same = "yes" if texts[0] == reference else "no"
    largest = max(token for text in texts for own in text.values() for token in own)
    rows = [one["rows"] for one in result]
    print(f"{lab_run.letter:3}{result[0]['choice']:6}{agree:>7}{same:>11}{largest:15}   {rows}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **The ranks disagree**: *own dice*. The large `choice` shows that all logits were sent.
# - **The largest token is below V/n = 64**: *local names*.
# - **Rows differ**: *lost rows*, on the rank with the fewest rows. All ranks choose together, so they still agree.
# - **Nothing but the text differs from one process**: *own noise*. Its distribution is still right.
#
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to batch
#
# - **Do not enlarge the batch** when a reader needs tokens quickly, because every request adds c to a step.
# - **Do not batch statically** unless all requests end together.
#
# **Claim 1: only if the caches are small beside the weights.** With 8,192 positions, a step for 32 requests takes three
# times as long as a step for one.
#
# **Claim 2: false.** Reading limits all decode steps in our table, and the H100 reads only 1.6 times as fast.
# Arithmetic becomes the limit only for hundreds of requests with short texts.

# %%
for positions in (512, 8192):
    ratio = decode_step(32, positions) / decode_step(1, positions)
    print(f"{positions:5,} positions: 32 requests take {ratio:.2f} times as long as one")
for at, what in enumerate(("arithmetic", "memory")):
    print(f"H100 to A100, {what}: {GPUS['H100'][at] / GPUS['A100'][at]:.2f}")
print(f"your votes: {vote_1}, {vote_2}")

# %% [markdown]
# **The table that grows.** Continuous batching has the highest throughput, but a token takes longer than in a static
# batch: more requests share a step, and prefills come in between.

# %%
print(f"{'':20}{'steps':>6}{'tokens/s':>10}{'ms per token':>14}{'cache, bytes':>14}")
for name, (steps, speed, latency, cache) in rows_of.items():
    print(f"{name:20}{steps:6}{speed:10.0f}{latency:14.0f}{cache:14,}")

# %% [markdown]
# **Cheat-sheet.** Llama 3 70B in bfloat16 with requests of 8,192 positions:


# %%
def cheat_sheet():
    config = llama_70b()
    print("a step takes W + B c; cache: 2 L N T G/tp K b; rows of a request: S + m - 1")
    print("memory is the limit below FLOP/s / (bytes/s) rows (bfloat16)")
    print("tp: 2L + 1 all-reduces of D and a pair; pp: g/max(g, p) busy; dp: nothing sent\n")
    print(
        f"{'tp':3}{'weights, GB':>13}{'cache, GB':>11}{'sent per token, MB':>20}{'requests in 80 GB':>19}"
    )
    for n in (2, 4, 8):
        held = 2 * formulas.parameters_per_rank(config, n)
        each = inference.cache_bytes(config, 1, 8192, tp=n)
        sent = float(inference.tp_wire_bytes(config, 1, 1, n)) / 1e6
        print(
            f"{n:3}{held / 1e9:13.1f}{each / 1e9:11.2f}{sent:20.2f}{(80 * 10**9 - held) // each:19}"
        )


cheat_sheet()

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/13_inference.ipynb) take 60 minutes.

# %% course={"role": "given"}
import torch
import torch.distributed as dist

from course_lib import comm

# %% [markdown] course={"ex": "13-1"}
# ## 13-1 A small server, by hand
# Ten minutes, on paper; no code. The model has 2 layers, hidden 32, 4 query heads of 8 features, 2 heads of keys and
# values, and 2 bytes per element.
#
# - `rows`: a prompt of 6 tokens, 4 new ones. Rows through the model [without a cache, with it]
# - `cache`: bytes of keys and values of 3 requests of 100 positions each
# - `cache a rank`: the same on each rank under TP over [2 ranks, 4 ranks]
# - `calls`: collectives of one decode step under TP, embedding and LM head sharded by the vocabulary
# - `bytes`: on two ranks, the bytes that each rank sends in these collectives for one request. The pair has two float32
# - `pairs`: two ranks of three tokens each have logits [1.5, 4.0, 0.0] and [2.0, 4.5, -1.0]. The pair that each rank
#   sends, [[logit, token] of rank 0, of rank 1], tokens numbered from 0 in the full vocabulary
# - `token`: which is chosen
# - `ticks`: a pipeline of 4 stages with [1, 4, 6] groups in flight: ticks from one token of a request to its next
# - `busy`: the fraction of ticks in which a stage works, for [1, 4, 6] groups
# - `tp8 ms`: one GPU takes 50 ms per step, all of it reading weights; TP8 adds 8 ms of messages. Milliseconds of a
#   TP8 step
# - `8 requests`: tokens per second with 8 requests at once, [DP8, TP8]; a step takes as long as above. Type fractions
#   as such
#
# [13b](../notebooks/13b_parallel_serving.ipynb) measures pipelines, DP and TP.

# %% course={"ex": "13-1", "role": "answer"}
# BEGIN SOLUTION
server = {
    "rows": [30, 9],
    "cache": 38400,
    "cache a rank": [19200, 19200],
    "calls": 6,
    "bytes": 328,
    "pairs": [[4.0, 1], [4.5, 4]],
    "token": 4,
    "ticks": [4, 4, 6],
    "busy": [1 / 4, 1, 1],
    "tp8 ms": 14.25,
    "8 requests": [160, 8000 / 14.25],
}
# STUB
# server = {
#     "rows": None,  # two numbers, such as [20, 5]
#     "cache": None,
#     "cache a rank": None,
#     "calls": None,
#     "bytes": None,
#     "pairs": None,  # two lists of two numbers
#     "token": None,
#     "ticks": None,  # three numbers
#     "busy": None,
#     "tp8 ms": None,
#     "8 requests": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "13-1", "role": "answer"}
# - Rows: 6 + 7 + 8 + 9, and 6 + 1 + 1 + 1. Cache: 2 · 2 layers · 3 · 100 · 2 heads · 8 · 2 bytes; a rank holds one head.
# - Calls: embedding, two in each of two layers, choice. Bytes: 5 all-reduces of 64, each 2(n-1)/n = 1 times, and 8.
# - 50/8 + 8 = 14.25 ms. DP8: 8 tokens in 50 ms; TP8: 8 in 14.25 ms.

# %% course={"ex": "13-1", "role": "check"}
from course_lib.grading import check

check("13-1", server)

# %% [markdown] course={"ex": "13-2"}
# ## 13-2 Requests that fit
# A GPU has `memory` bytes. It holds its shard of `weights` bytes (`tp` divides them) and the keys and values of as
# many requests as fit, with a KV capacity of `room` positions each, 2 bytes per element. A rank holds `kv_heads / tp`
# heads of keys and values, and one at least.
#
# Write the line that returns how many requests fit; 0 if not even the weights do.


# %% course={"ex": "13-2", "role": "answer"}
def fitting(memory, weights, layers, kv_heads, head_dim, room, tp):
    """Requests whose keys and values fit beside this rank's weights: a whole number."""
    # BEGIN SOLUTION
    return max(
        (memory - weights // tp) // (2 * layers * max(kv_heads // tp, 1) * head_dim * 2 * room), 0
    )
    # END SOLUTION


# %% course={"ex": "13-2", "role": "check"}
from course_lib.grading import check

check("13-2", fitting)

# %% [markdown] course={"ex": "13-3"}
# ## 13-3 The same token on every rank
# The vocabulary is sharded: this rank has the logits of `logits_BVt.shape[1]` neighboring tokens, the first of which
# is number `first` of the vocabulary; rank 0 has the lowest. Return the token of the largest logit of all ranks, for
# each request, the same on every rank. Of equal logits the lowest token wins. Ranks may have different numbers of tokens.
#
# The check looks at two and three ranks, at pairs of four ranks and at one, with equal and nearly equal logits in float32,
# float64 and bfloat16. The logits must not change, and a rank hands at most 16 bytes per request to the network.
# `comm.all_gather(x, axis)` joins along dim 0; `inference.choose` refuses.


# %% course={"ex": "13-3", "role": "answer"}
def greedy(logits_BVt, first, axis):
    """tokens_B, int64: the likeliest token of each request, the same on all ranks of ``axis``."""
    # BEGIN SOLUTION
    best_B, token_B = logits_BVt.max(1)
    best_nB = comm.all_gather(best_B[None], axis)
    token_nB = comm.all_gather((token_B + first)[None], axis)
    return token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0]
    # END SOLUTION


# %% course={"ex": "13-3", "role": "check"}
from course_lib.grading import check

check("13-3", greedy)

# %% [markdown] course={"ex": "13-4"}
# ## 13-4 A sharded cache
# One new token of each request attends to a cache with rows on all ranks, on some more than on others. Return
# attention on *all* rows, on every rank: softmax(q·k / √K) v, with H heads of K features. The order of rows does not
# matter, and nothing is masked. [13b](../notebooks/13b_parallel_serving.ipynb) serves with such a cache.
#
# The check looks at two and three ranks, at pairs of four ranks and at one, also with scores in the hundreds and far
# below zero (exp of 100 does not fit float32, and exp of -110 is 0). No input may be overwritten and no rows of the
# cache may be sent: a rank may hand H (K + 2) elements per request to the network. You may use `comm` and `dist`;
# `inference.context` refuses.


# %% course={"ex": "13-4", "role": "answer"}
def attend(q_BHK, k_BTHK, v_BTHK, axis):
    """y_BHK, the same on every rank, from this rank's T rows of keys and values.

    ``q_BHK`` (requests, heads, features) is the same on all ranks.
    """
    # BEGIN SOLUTION
    scores_BHT = torch.einsum("bhk,bthk->bht", q_BHK, k_BTHK) * q_BHK.shape[-1] ** -0.5
    lse_BH1 = scores_BHT.logsumexp(-1, keepdim=True)
    out_BHK = torch.einsum("bht,bthk->bhk", (scores_BHT - lse_BH1).exp(), v_BTHK)
    parts = comm.all_gather(torch.cat((out_BHK, lse_BH1), -1)[None], axis)
    return (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0)
    # END SOLUTION


# %% course={"ex": "13-4", "role": "check"}
from course_lib.grading import check

check("13-4", attend)

# %% [markdown] course={"ex": "13-5"}
# ## 13-5 A greedy loop in raw PyTorch
# A model without attention: x = embedding[token], y = x + relu(x upᵀ) downᵀ, logits = y headᵀ; the next token follows
# from the last one alone. The embedding is replicated; `up` has this rank's inner features, `down` the columns that
# belong to them, `head` this rank's tokens of the vocabulary (rank 0 the lowest, equally many each).
#
# Use `torch.distributed` alone: `course_lib` refuses; the default group exists. The check looks at the tokens on two,
# three and four ranks and on one. No input may be overwritten, and each new token takes one all-reduce of y, and at
# most 16 bytes per request beside it.


# %% course={"ex": "13-5", "role": "answer"}
def generate(tokens_B, embedding_VD, up_FtD, down_DFt, head_VtD, new):
    """(B, new), int64: what follows ``tokens_B``, the likeliest token each time, on all ranks."""
    # BEGIN SOLUTION
    n, rank, chosen = dist.get_world_size(), dist.get_rank(), []
    for _ in range(new):
        x_BD = embedding_VD[tokens_B]
        part_BD = (x_BD @ up_FtD.T).relu() @ down_DFt.T
        dist.all_reduce(part_BD)
        best_B, token_B = ((x_BD + part_BD) @ head_VtD.T).max(1)
        pair_B2 = torch.stack((best_B, (token_B + rank * len(head_VtD)).float()), 1)
        pairs = [torch.empty_like(pair_B2) for _ in range(n)]
        dist.all_gather(pairs, pair_B2)
        best_nB, token_nB = torch.stack(pairs).unbind(-1)
        tokens_B = token_nB.gather(0, best_nB.argmax(0, keepdim=True))[0].long()
        chosen.append(tokens_B)
    return torch.stack(chosen, 1)
    # END SOLUTION


# %% course={"ex": "13-5", "role": "check"}
from course_lib.grading import check

check("13-5", generate)

# %% [markdown]
# **Exit questions.**
#
# **1.** Why do 30 short requests decode in nearly the time of one, while 30 prefills take longer than one?
#
# <details><summary>Answer</summary>
# A decode step has one row per request and waits for the weights. A prefill of hundreds of rows is limited by
# arithmetic.
# </details>
#
# **2.** Beside the weights, 60 GB are free. A request reserves 2 GB of cache and uses half of it. How many fit, and how
# many if only used positions took memory?
#
# <details><summary>Answer</summary>
# 30 and 60. This is why vLLM allocates pages.
# </details>
#
# **3.** Two TP ranks draw from the same gathered logits, each with its own generator. What happens?
#
# <details><summary>Answer</summary>
# No error is raised, but the ranks add partial sums of different texts. If one rank draws the token that ends the
# request, the other waits forever.
# </details>
#
# **4.** Four stages, four groups, 10 ms per stage. What is the time per token of a request, and with a fifth group?
#
# <details><summary>Answer</summary>
# 40 ms and 50 ms. In both cases one group gets a token every 10 ms.
# </details>
#
# **5.** A new GPU has twice the arithmetic and the same memory bandwidth. What becomes faster?
#
# <details><summary>Answer</summary>
# Prefill of long prompts. Decode does not, as long as memory is its limit.
# </details>
#
# **Sources.** Next: [13b](13b_parallel_serving.ipynb).
# - Yu et al. 2022, *Orca*, continuous batching: [OSDI](https://www.usenix.org/conference/osdi22/presentation/yu).
# - Kwon et al. 2023, *vLLM*, a cache in pages: [arXiv:2309.06180](https://arxiv.org/abs/2309.06180).
# - Ainslie et al. 2023, grouped queries: [arXiv:2305.13245](https://arxiv.org/abs/2305.13245).
