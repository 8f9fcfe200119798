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
# *50 minutes to read and run, 60 to build.* Nothing is trained here. A model answers requests, and the next token
# replaces the gradient: which messages it waits for, which keys and values are stored for it, and that all ranks
# choose the same one. Every axis of the course returns with another price. You need lessons 03, 05 to 07 and 09; 10
# for the part on experts.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *If the model fits one GPU, eight replicas (DP8) have three times the throughput of one model sharded over eight
#    GPUs (TP8).*
# 2. *For serving, TP inside a node and PP across nodes minimizes latency.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# A request has a prompt of S tokens and asks for m new ones. Two kinds of work follow:
#
# ```
#  prefill   the whole prompt in one forward    S rows        gives token 1
#  decode    token 1                            1 row         gives token 2
#            token 2                            1 row         gives token 3  ...
# ```
#
# Decode is a chain: token 3 needs token 2. And one row uses every weight once, so a step reads the full model from
# memory to do very little arithmetic. What can many ranks do about that?
#
# ## Predict
# The model has 4 layers, hidden 64, 8 query heads, 4 heads of keys and values. It is trained for a moment, so that
# tokens are more than noise. Elements have 8 bytes (float64), so that no rounding decides between two tokens. Fill in
# what you can.

# %%
import torch

from course_lib import inference
from course_lib.data import batch, decode, encode
from course_lib.model import build_model, tiny_config

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
predicted_dp = None  # bytes that data parallel replicas send
predicted_calls = None  # collectives of one decode step under tensor parallelism
predicted_busy = None  # share of the time that a stage of four works, one group of requests
predicted_winner = None  # "dp4" or "tp4": more tokens a second with 8 requests at once
predicted_winner_64 = None  # and with 64

# %% [markdown]
# ## The KV cache
# Under a causal mask an earlier row never looks at a later one, so its keys and values do not change. Store them, and
# a new token costs one row. First without; then `serve`, with a `Scheduler` that records which requests wait and
# which slot each has:

# %%
from course_lib.inference import Replica, Scheduler, serve
from course_lib.mesh import make_mesh


@torch.no_grad()
def recompute(request):
    """The whole text again for every token."""
    text = list(request.prompt)
    for _ in range(request.max_new_tokens):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(request.prompt) :]


REFERENCE = {request.number: recompute(request) for request in REQUESTS}
replica = Replica(model, make_mesh(), slots=4)
served = serve(replica, Scheduler(REQUESTS, slots=4))
assert served.tokens == REFERENCE

without = sum(len(r.prompt) + i for r in REQUESTS for i in range(r.max_new_tokens))
TOKENS, CHOSEN = inference.counts(REQUESTS)
print(f"the same tokens: {without:,} rows without a cache, {TOKENS} with it;", end=" ")
print(f"share {TOKENS / without:.2f}, your prediction {predicted_rows}")
print(repr(PROMPTS[1] + decode(torch.tensor(REFERENCE[1]))))

# %% [markdown]
# A request's last token is never fed back: S + m - 1 rows. A cache layer replaces plain attention:

# %%
from course_lib.inference.cache import LayerCache
from course_lib.view import show_source

show_source(LayerCache.__call__)

# %% [markdown]
# Its bytes: keys and values, for each layer, slot (a request's place; N of them), position (T) and *key-value* head
# (G). Grouped queries share heads, and this is why models have them:

# %%
print(f"measured {replica.cache.nbytes:,}, formula", end=" ")
print(
    f"{inference.cache_bytes(CONFIG, 4, CONFIG.max_seq_len):,}; your prediction {predicted_cache}"
)
assert replica.cache.nbytes == inference.cache_bytes(CONFIG, 4, CONFIG.max_seq_len)


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
# The whole question of decode in one division: a step reads each weight once, 2 bytes, and does 2 operations with it
# for every request in the batch. An H100 (SXM) does 989e12 bfloat16 operations and reads 3.35e12 bytes per second
# (NVIDIA's data sheet). Below that many requests at once, arithmetic waits for memory:

# %%
print(f"reading and arithmetic take the same time at {989 / 3.35:.0f} requests at once")

# %% [markdown]
# So a decode step costs about W + B c: W to read the weights, whatever the batch, and a small c for each of B
# requests, mostly to read its cache. Remember this formula; the ranks below are paced by it.
#
# ## Data parallelism: nothing is sent
# One replica per rank; each serves every n-th request.

# %%
from course_lib import tp
from course_lib.inference import ContextReplica, Stage, serve_pipeline
from course_lib.launch import run
from course_lib.trace import state_bytes


def on_ranks(axes, slots=4, groups=1, sampling=None):
    """Answer the requests on the mesh of ``axes``."""
    mesh = make_mesh(**axes)
    own = inference.cut(model, mesh) if mesh.pp.size > 1 else model
    if mesh.tp.size > 1:
        tp.parallelize(own, mesh.tp)
    choose, mine = inference.chooser(own, sampling), inference.share(REQUESTS, mesh.dp)
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
    """The tokens of all ranks; who answered the same request must agree."""
    found = {}
    for one in result:
        for number, tokens in one["tokens"].items():
            assert found.setdefault(number, tokens) == tokens
    return found


runs = {"one process": run(on_ranks, {}, n=1), "dp on 4": run(on_ranks, {"dp": 4}, n=4)}
result = runs["dp on 4"]
assert together(result) == REFERENCE
for rank, one in enumerate(result):
    ledger = result.ledgers[rank]
    print(
        f"rank {rank}: requests {list(one['tokens'])}, {ledger.calls()} calls, {int(ledger.wire_bytes())} bytes"
    )
print(f"your prediction: {predicted_dp}")

# %% [markdown]
# No token comes sooner, and each rank holds all weights. (One note says that DP "does not exist" in inference,
# another that it is the first choice. Both mean this: replicas that send nothing to each other.)
#
# ## Tensor parallelism: two all-reduces per layer, and a choice
# The layers are lesson 05's, forward only. The LM head is new. It is sharded by the vocabulary (lesson 06), so a rank
# has the logits of V/n tokens. Gathering them would cost V elements per token. But the maximum of the ranks' maxima
# is the maximum, so two numbers per rank are enough.

# %%
from course_lib import comm


def choose_by_hand():
    axis = make_mesh(tp=2).tp
    logits = torch.tensor([[1.5, 4.0, 0.0], [2.0, 4.5, -1.0]])[axis.rank]
    best, token = logits.max(0)
    pair = torch.stack((best, token + 3.0 * axis.rank))
    pairs = comm.all_gather(pair[None], axis)
    return pair.tolist(), int(pairs[pairs[:, 0].argmax(), 1])


for rank, (pair, token) in enumerate(run(choose_by_hand, n=2)):
    print(f"rank {rank} offers (logit, token) {pair} and takes token {token}")

# %% [markdown]
# The library's choice does the same for a batch; look at its last lines:

# %%
show_source(inference.choose)

# %% [markdown]
# Now the full model, every byte of every request:

# %%
from course_lib.ledger import wire

print(
    f"{'ranks':5}{'calls a step':>14}{'bytes a rank':>14}{'formula':>10}{'choice':>9}{'gathered':>10}{'cache':>9}"
)
for n in (2, 4):
    result = runs[f"tp on {n}"] = run(on_ranks, {"tp": n}, n=n)
    assert together(result) == REFERENCE
    own, one = result.ledgers[0], result[0]
    formula = inference.tp_wire_bytes(CONFIG, TOKENS, CHOSEN, n)
    assert own.wire_bytes() == formula
    assert one["cache"] == inference.cache_bytes(CONFIG, 4, CONFIG.max_seq_len, tp=n)
    calls = own.calls() // one["steps"]
    choice = int(inference.sampling_wire_bytes(CONFIG, CHOSEN, n))
    gathered = int(wire("all_gather", CHOSEN * CONFIG.vocab // n * 8, n))
    sent = f"{int(own.wire_bytes()):14,}{int(formula):10,}"
    print(f"{n:5}{calls:14}{sent}{choice:9,}{gathered:10,}{one['cache']:9,}")
assert calls == 2 * CONFIG.layers + 2
print(f"2 a layer, one for the embedding, one for the choice; your prediction {predicted_calls}")

# %% [markdown]
# `gathered` is the cost of the choice if ranks sent all logits; real vocabularies are 500 times as large as ours. The
# cache is sharded with the heads, down to one head per rank. Beyond that, ranks hold copies:

# %%
for n in (1, 4, 8, 16):
    size = inference.cache_bytes(llama_70b(), 1, 8192, tp=n)
    print(
        f"Llama 3 70B, 8 heads, {n:2} ranks: {size / 1e9:.2f} GB a rank, {n * size / 1e9:.2f} in all"
    )

# %% [markdown]
# A note gives TP's volume per sample as 192 × B × S × H × 2 bytes. That is the payload of a *prefill*, where S is the
# prompt; for a decoded token S is 1. And "TP can be overlapped" was settled in lesson 05.
#
# ## Pipelines: groups take turns
# A token needs all p stages one after the other, and the next token needs this one. One group of requests keeps one
# stage of p busy. With g groups in flight, min(g, p) stages are busy: stage 1 works on group 1 while stage 0 works on
# group 2, micro-batches of requests. In a *tick* each stage runs one group once.

# %%
from course_lib.mesh import Conditions
from course_lib.view import timeline

PACE = {"F": 0.03}  # seconds of a stage's step, whatever it holds


def turns(groups):
    mesh = make_mesh(pp=RANKS)
    stage = Stage(inference.cut(model, mesh), mesh, 2 * groups)
    requests = inference.make_requests([[72]] * 2 * groups, 5)
    served = serve_pipeline(stage, Scheduler(requests, 2 * groups, groups=groups))
    return {"ticks": served.steps, "tokens a second": served.throughput, "latency": served.latency}


in_turn = {groups: run(turns, groups, n=RANKS, pace=PACE) for groups in (1, 2, 4, 6)}
print(
    f"{'groups':6}{'requests':>10}{'busy, formula':>15}{'ticks':>7}{'tokens/s':>10}{'ms a token':>12}"
)
for groups, result in in_turn.items():
    one, busy = result[-1], float(inference.busy_share(groups, RANKS))
    speed, latency = one["tokens a second"], 1e3 * one["latency"]
    print(f"{groups:6}{2 * groups:10}{busy:15.2f}{one['ticks']:7}{speed:10.0f}{latency:12.0f}")
print(f"your prediction for one group: {predicted_busy}")


def turns_picture(groups, title):
    return timeline(in_turn[groups].traces, title=title, conditions=Conditions(PACE))


turns_picture(1, "One group of requests: one stage of four works at a time")

# %%
turns_picture(4, "Four groups in flight: every stage works, and a token comes no sooner")

# %% [markdown]
# The same run for a trace viewer: open `four_groups.json`, in your folder for temporary files, with
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "four_groups.json"
perfetto(in_turn[4].traces, path, title="Four groups in flight")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# (A box without a number is the prefill of a request; numbers are groups.) Look at `ms a token`: it does not fall.
# Four groups give more than three times the tokens because there are four times the requests (and a pipeline to fill
# and drain); six are more than there are stages, and each waits longer. Splitting the *same* requests into more
# groups gains little where a step takes W for any number of requests.
#
# The ranks send a hidden vector to each next stage, p-1 in all, and the token back to all earlier stages:

# %%
result = runs["pp on 4"] = run(on_ranks, {"pp": RANKS}, 4, 4, n=RANKS)
assert together(result) == REFERENCE
sent = sum(ledger.wire_bytes("pp") for ledger in result.ledgers)
formula = inference.pp_wire_bytes(CONFIG, TOKENS, CHOSEN, RANKS)
print(f"all ranks together {int(sent):,} bytes, formula {int(formula):,}")
assert sent == formula

# %% [markdown]
# (A note says "each layer: 1 transfer" and counts 3 for 96 layers on 4 stages. The 3 is right: one for each stage
# boundary.)
#
# ## Context parallelism: a long prompt
# A prompt of 100,000 tokens is a prefill that one rank computes for a long time, and a cache that it may not hold.
# All ranks read it, each its chunks, with ring attention (lesson 09), and each stores its own rows. In decode every
# rank attends to its own rows, and the partial results are merged by their log-sum-exp:

# %%
from course_lib.inference import context

show_source(context.join_parts)
result = runs["cp on 4"] = run(on_ranks, {"cp": RANKS}, n=RANKS)
assert together(result) == REFERENCE
prefill = sum(inference.prefill_wire_bytes(CONFIG, len(r.prompt), RANKS) for r in REQUESTS)
decoding = inference.decode_wire_bytes(CONFIG, CHOSEN - len(REQUESTS), RANKS)
own = result.ledgers[0].wire_bytes("cp")
assert own == prefill + decoding
print(f"\na rank sent {int(own):,} bytes, formula {int(prefill):,} + {int(decoding):,};", end=" ")
print(f"cache {result[0]['cache']:,}, one process {runs['one process'][0]['cache']:,}")
per_token = float(inference.decode_wire_bytes(llama_70b(), 1, 8)) / 1e6
moved = float(inference.moved_cache_wire_bytes(llama_70b(), 131072, 8)) / 1e6
print(f"Llama 3 70B on 8 ranks: {per_token:.1f} MB a token; gathering 131,072 rows {moved:,.0f} MB")

# %% [markdown]
# The query is sent to the cache, not the cache to the query. Exercise 13-4 builds this.
#
# ## Expert parallelism: no rank may leave early
# Replicas that share experts (lesson 10) must all take every step: an all-to-all waits for every rank, also for a
# replica without requests.

# %%
from course_lib import ep


def with_experts(n):
    mesh = make_mesh(dp=n, ep=n)
    sparse = ep.add_experts(model, experts=8, top_k=2, seed=1)
    ep.parallelize(sparse, mesh.ep, mesh.dp_cp)
    mine = inference.share(REQUESTS, mesh.dp)
    served = serve(Replica(sparse, mesh, slots=2), Scheduler(mine, slots=2))
    rows = inference.counts(mine)[0]
    even = inference.even_ep_wire_bytes(CONFIG, rows, 2, n)
    return {"tokens": served.tokens, "steps": served.steps, "even": int(even)}


alone, shared = run(with_experts, 1, n=1), run(with_experts, RANKS, n=RANKS)
assert together(shared) == together(alone)
for rank, one in enumerate(shared):
    sent = int(shared.ledgers[rank].wire_bytes("ep"))
    print(
        f"rank {rank}: {one['steps']} steps, sent {sent:,} bytes; by even routing {one['even']:,}"
    )
assert len({one["steps"] for one in shared}) == 1

# %% [markdown]
# ## Sampling: one draw for all ranks
# Greedy decoding is a maximum. Sampling can also be written as a maximum: with logits z, temperature T and, for each
# token, noise e from an exponential distribution, the argmax of z/T - log e is distributed as softmax(z/T). The noise
# follows from (seed, request, position) alone, so every rank has the same, for any number of ranks and any batching:

# %%
show_source(inference.sampling.gumbel)
SAMPLING = inference.Sampling(temperature=0.8, top_k=30, top_p=0.95, seed=2)
drawn = {}
for n in (1, 2, 4):
    result = run(on_ranks, {"tp": n}, 4, 1, SAMPLING, n=n)
    drawn[n] = together(result)
    assert n == 1 or result.ledgers[0].wire_bytes() == inference.tp_wire_bytes(
        CONFIG, TOKENS, CHOSEN, n, SAMPLING
    )
assert drawn[1] == drawn[2] == drawn[4]
print()
print("on 1, 2 and 4 ranks:", repr(PROMPTS[1] + decode(torch.tensor(drawn[4][1]))))

# %% [markdown]
# The lab below shows what happens if each rank draws for itself.
#
# ## Continuous batching
# Requests end at different times. A static batch keeps their slots empty until the last request ends. Continuous
# batching (Orca) starts the next request at once. The scheduler needs no model to show it: each column is a step,
# each line a slot. A digit is the request that gets a token; a step with one digit alone is (mostly) a prefill.

# %%
from course_lib.bench import inference as bench
from course_lib.inference import StaticScheduler


def chart(kind, slots=4):
    requests = inference.make_requests([[0]] * len(bench.MIXED), bench.MIXED)
    scheduler, lines = kind(requests, slots), [""] * slots
    while not scheduler.done:
        work = scheduler.next_work()
        taking = dict(zip(work.slots, work.requests, strict=True))
        lines = [line + str(taking.get(slot, ".")) for slot, line in enumerate(lines)]
        scheduler.record(work, [0] * len(work.slots))
    return lines


for name, kind in (("static", StaticScheduler), ("continuous", Scheduler)):
    lines = chart(kind)
    steps, speed = run(bench.serve_mixed, kind, 4, n=1, pace={"F": 0.02, "token": 0.001})[0]
    assert steps == len(lines[0])
    print(f"{name}: {steps} steps, {speed:.0f} tokens a second on a paced rank")
    print("\n".join(f"  slot {slot}  {line}" for slot, line in enumerate(lines)))

# %% [markdown]
# Fewer steps for the same tokens. (Real servers split prefills into chunks, so that decodes can continue.)
#
# ## DP8 against TP8
# A note gives for GPT-J 6B on 8 GPUs: DP8 50 ms per sample and 160 samples per second, TP8 58 ms and 55. Look at 58:
# it is the 50 ms of *one* GPU plus 8 ms of messages. Each TP rank reads an eighth of the weights and does an eighth
# of the arithmetic, so the 50 must be divided:

# %%
GPU, MESSAGES = 50, 8  # milliseconds, the note's
cut = GPU / 8 + MESSAGES
print(f"TP8: {GPU} / 8 + {MESSAGES} = {cut} ms a token, not {GPU + MESSAGES}")
print(
    f"the note's 55 a second times 58 ms: {55 * 0.058:.1f} requests at once, which fits neither 1 nor 8"
)
print(f"{'requests':8}{'DP8 a second':>14}{'TP8 a second':>14}   (W alone, messages fixed)")
for requests in (1, 8):
    print(f"{requests:8}{1e3 * requests / GPU:14.0f}{1e3 * requests / cut:14.0f}")

# %% [markdown]
# With the note's own numbers TP8 wins on *both* counts, as long as a step costs W. When do replicas win? With B
# requests in all on n ranks, a step of DP takes W + (B/n) c, a step of TP (W + B c)/n + messages(B). The term with c
# is the same, and cancels:
#
# $$\text{TP is faster while}\quad \tfrac{n-1}{n}\, W > \text{messages}(B)$$
#
# Messages grow with B, W does not. So there is one batch at which the order flips, for latency and throughput alike.
# By formula, for four paced ranks with W = 320 ms, c = 16 ms and slow links:

# %%
from course_lib.mesh import Link, Links

INSIDE, BETWEEN = Link(alpha=0.001, beta=0.5e6), Link(alpha=0.004, beta=0.25e6)
DP4, TP4 = bench.Layout(dp=4), bench.Layout(tp=4)
SERVED = bench.config_for(2)


def by_formula(layout, size, per_node=RANKS):
    """(tokens a second, seconds from token to token)."""
    return bench.predicted(SERVED, layout, Links(INSIDE, BETWEEN, per_node), size)


crossing = next(size for size in range(4, 512, 4) if by_formula(DP4, size) > by_formula(TP4, size))
print(f"DP4 is ahead from {crossing} requests")
for size, said in ((8, predicted_winner), (64, predicted_winner_64)):
    speed = {layout.name: by_formula(layout, size)[0] for layout in (DP4, TP4)}
    shown = ", ".join(f"{name} {tokens:.0f} tokens a second" for name, tokens in speed.items())
    print(f"{size:2} requests: {shown}; ahead is {max(speed, key=speed.get)}, you said {said}")

# %% [markdown]
# Now measured: compute times and links are emulated, messages and waiting are real. The formula does not include
# gloo's own time per call, with several processes per core. So that is measured too, call after call, and `+ calls`
# adds it for each of a token's calls.

# %%
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
    for n, each in own.items():
        if n > 1:
            print(f"{n} ranks: {each:.1f} ms for a small all-reduce, without any link")
    print(f"{'':48}{'ms from token to token':>29}")
    print(f"{'layout':9}{'requests':>9}{'bytes a token':>15}{'calls':>7}", end="")
    print(f"{'formula':>16}{'+ calls':>10}{'measured':>11}")
    for layout, row in measured:
        calls = 2 * SERVED.layers + 2 if layout.tp > 1 else 0
        assert row["bytes_per_token"] == row["bytes_per_token_formula"]
        print(f"{layout.name:9}{row['batch']:9}{row['bytes_per_token']:15,.0f}{calls:7}", end="")
        formula = row["latency_ms_formula"]
        print(f"{formula:16.0f}{formula + calls * own[layout.tp]:10.0f}{row['latency_ms']:11.0f}")
    return measured


one_node = compare((DP4, TP4), (8, 64))
points = {"dp4": {}, "tp4": {}}
for layout, row in one_node:
    pair = row["tokens_per_second"], row["latency_ms"] / 1e3
    points[layout.name][row["batch"]] = pair
serving_plot(
    points,
    {layout.name: partial(by_formula, layout) for layout in (DP4, TP4)},
    title="Few requests: cut the model. Many: copy it",
    note="Arithmetic paced, links emulated, waiting measured.",
)

# %% [markdown]
# Look where the lines cross. TP's points show less throughput than its line, and more latency, by the cost of its
# calls here. A busy machine moves the points, but not the bytes, the calls and the crossing of the lines. (These
# links are slow on purpose; with faster ones the crossing is at larger batches. TP has two more advantages: weights
# stored once leave memory for more requests, and with fewer requests than replicas some replicas are idle.)
#
# ## A model that one node cannot serve
# The same ranks as two nodes of two, with a slower link between. TP across both; TP in a node and DP across; TP in a node and
# PP across. This is the note's "TP8+DP4 against TP32", scaled.

# %%
two_nodes = compare((TP4, bench.Layout(dp=2, tp=2), bench.Layout(tp=2, pp=2)), (8,), per_node=2)

# %% [markdown]
# TP over the slow link loses by formula and by measurement. TP+PP stores each weight once and TP+DP twice, and by the
# formula TP+PP is not faster: PP is for models that do not fit, not for latency. So the note's "TP=8, PP=64, DP=1" on
# 512 GPUs needs another look:

# %%
from course_lib.tp import formulas

gpt3 = tiny_config(
    family="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, max_seq_len=2048,
    vocab=50304, tied=True, dtype=torch.bfloat16,
)  # fmt: skip
held = 2 * formulas.parameters_per_rank(gpt3, 8) / 1e9
print(
    f"GPT-3 in bfloat16, TP8: {held:.1f} GB a rank: 8 GPUs of 80 GB hold it, 512 hold 64 replicas"
)
print(
    f"PP64: {gpt3.layers} layers / 64 = {gpt3.layers / 64}: does not divide; a token crosses 63 boundaries"
)

# %% [markdown]
# ## The same in PyTorch
# A raw greedy loop. The modules are those of the single-process model, with weights sharded in place; after o and
# down a hook sums.

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
    assert all(tokens == runs["tp on 4"][0]["tokens"][number] for tokens in raw)
    print(f"request {number}: {len(raw[0])} tokens on {RANKS} ranks, equal to ours")

# %% [markdown]
# There is no cache, so it computes every row again. The bytes per row are the same, except for the embedding, which
# is replicated here.
#
# ## Break it and diagnose
# Four ranks of TP draw tokens. One run is correct (its cause is `"correct"`), four are faulty:
#
# - **own dice**: all logits are gathered, and each rank draws with its own random state
# - **own noise**: a rank's noise follows from its own seed; then pairs, as always
# - **local names**: tokens are numbered within the rank's shard of the vocabulary
# - **lost rows**: one rank does not store the keys and values of decoded tokens
#
# For each, name the cause, the collective (`"all_gather"` if its content is wrong, else None) and the rank (a number,
# or `"all"`; None if correct). "agree" is between ranks, "reference" against one process with the same seed; "choice"
# are the bytes that a rank hands to the all-gather for one token. Another SEED draws other runs.

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
# - **Ranks do not agree**: *own dice*. They attend to different pasts from then on; no error is raised, but the text
#   is nonsense. (With a token that ends a request, some ranks would leave the loop and the others wait for ever.) The
#   large `choice` shows that all logits were sent.
# - **The largest token is below V/n**: *local names*. The comparison of the pairs is right, but the token number is
#   wrong.
# - **Rows differ**: *lost rows*, on the rank with the fewest. Ranks agree, because they make one choice together; a
#   test of agreement does not find it.
# - **All looks right, but the text differs from that of one process**: *own noise*. The distribution is right; but
#   another number of ranks gives another text, and no two runs can be compared.
#
# `lab.reveal()` shows the causes.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **DP**: the model does not fit; a token must come sooner than one GPU reads the weights; fewer requests than replicas.
# - **TP**: across slow links; batches so large that its messages outweigh (n-1)/n of W; more ranks than key-value
#   heads, where the cache is replicated.
# - **PP**: for latency, ever; or with fewer groups of requests than stages.
# - **CP**: short prompts. **EP**: few requests, so that most experts get none and all ranks wait.
# - **A large batch**: when the cache fills the memory.
#
# ## The table that grows
# Weights and cache of rank 0 for the eight requests above (under DP each replica has its own slots); bytes of all
# ranks together; steps of the loop (ticks in a pipeline); lines of the library for that axis alone, without comm.

# %%
from course_lib.inference.context import ContextCache, ContextLayer
from course_lib.inference.pipeline import Iterations
from course_lib.inference.sampling import threshold
from course_lib.view import code_lines

CODE = {
    "one process": (serve, Replica, Scheduler, inference.Cache, LayerCache),
    "dp on 4": (inference.share,),
    "tp on 4": (inference.chooser, inference.choose, threshold),
    "pp on 4": (serve_pipeline, Stage, Iterations, inference.cut),
    "cp on 4": (ContextReplica, ContextCache, ContextLayer, context.join_parts),
}
print(f"{'rank 0':14}{'weights':>12}{'cache':>10}{'sent by all':>13}{'steps':>7}{'code':>6}")
for name, result in runs.items():
    one, lines = result[0], code_lines(*CODE.get(name, ()))
    sent = int(sum(ledger.wire_bytes() for ledger in result.ledgers))
    counted = f"{lines:6}" if lines else ""
    print(f"{name:14}{one['state']:12,}{one['cache']:10,}{sent:13,}{one['steps']:7}{counted}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if the batch is large.** The note's 58 ms do not divide one GPU's 50 ms. Divided, TP8 is faster in
# both while 7/8 of the time to read the weights exceeds the time of its messages; beyond that DP8 is.
#
# **Claim 2: false.** TP shortens a token's way, PP does not: a token passes every stage and p-1 P2P transfers. PP
# across nodes is for models that one node cannot hold.

# %%
for size in (8, 64):
    ratio = by_formula(TP4, size)[0] / by_formula(DP4, size)[0]
    print(f"{size:2} requests: TP4 has {ratio:.2f} times DP4's throughput")
for layout in (bench.Layout(dp=2, tp=2), bench.Layout(tp=2, pp=2)):
    print(f"two nodes, {layout.name}: a token takes {1e3 * by_formula(layout, 8, 2)[1]:.0f} ms")
print(f"your votes: {vote_1}, {vote_2}")

# %% [markdown]
# ## Cheat-sheet
# Llama 3 70B in bfloat16, a request of 8,192 positions; everything computed from the library's formulas.


# %%
def cheat_sheet():
    config = llama_70b()
    print("a step takes W + B c; cache: 2 L N T G/tp K b; rows of a request: S + m - 1")
    print(
        "dp: 0 bytes | tp: 2L + 1 all-reduces of D and a pair | pp: p-1 transfers, g/max(g, p) busy"
    )
    print("cp: L all-gathers of H (K + 1) a token | ep: all replicas take every step\n")
    print(
        f"{'tp':3}{'weights, GB':>13}{'cache, GB':>11}{'sent a token, MB':>18}{'requests in 80 GB':>19}"
    )
    for n in (2, 4, 8):
        held = 2 * formulas.parameters_per_rank(config, n)
        each = inference.cache_bytes(config, 1, 8192, tp=n)
        sent = float(inference.tp_wire_bytes(config, 1, 1, n)) / 1e6
        print(
            f"{n:3}{held / 1e9:13.1f}{each / 1e9:11.2f}{sent:18.2f}{(80 * 10**9 - held) // each:19}"
        )
    hops = float(inference.pp_wire_bytes(config, 1, 1, 8)) / 1e6
    print(f"\npp 8: {hops:.2f} MB per token in all; prefill of 8,192 over cp 8:", end=" ")
    print(f"{float(inference.prefill_wire_bytes(config, 8192, 8)) / 1e9:.2f} GB a rank")


cheat_sheet()

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/13_inference.ipynb), each on its own: a small server by hand (10 minutes), how many
# requests fit (5); and on real ranks the same token on every rank (10), a sharded cache (20), and a greedy loop in
# raw PyTorch (15).

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
# - `bytes`: the bytes that a rank of two sends in them for one request. The choice is a pair of two float32
# - `pairs`: two ranks of three tokens each have logits [1.5, 4.0, 0.0] and [2.0, 4.5, -1.0]. The pair that each rank
#   sends, [[logit, token] of rank 0, of rank 1], tokens numbered from 0 in the full vocabulary
# - `token`: which is chosen
# - `ticks`: a pipeline of 4 stages with [1, 4, 6] groups in flight: ticks from one token of a request to its next
# - `busy`: the fraction of ticks in which a stage works, for [1, 4, 6] groups
# - `tp8 ms`: one GPU takes 50 ms per step, all of it reading weights; TP8 adds 8 ms of messages. Milliseconds of a
#   TP8 step
# - `8 requests`: tokens per second with 8 requests at once, [DP8, TP8]; a step takes as long as above. Type fractions
#   as such

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
# matter, and nothing is masked.
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
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** Why does a batch of 30 decode in nearly the time of one request, and a prefill of 30 prompts not?
#
# <details><summary>Answer</summary>
# A decode step reads all weights for one row per request: W, whatever the batch. A prefill has hundreds of rows per
# request, and its time is arithmetic.
# </details>
#
# **2.** A model has 8 key-value heads. What does TP16 do to its cache?
#
# <details><summary>Answer</summary>
# Each rank holds one head, and each head is on two ranks. All ranks together hold twice the cache, and a rank holds
# no less than under TP8.
# </details>
#
# **3.** Two TP ranks draw from the same gathered logits, with their own generators. What happens?
#
# <details><summary>Answer</summary>
# No error. They take different tokens, store different pasts, and sum partial results of different texts. Where a
# token ends the request, one rank leaves and the other waits for ever.
# </details>
#
# **4.** Four stages, four groups, a stage's step 10 ms. How long from token to token, and what does a fifth group change?
#
# <details><summary>Answer</summary>
# 40 ms, one group's token every 10 ms. A fifth: 50 ms from token to token, and still one group's token every 10 ms.
# </details>
#
# **5.** Why may a data parallel replica stop when it is done, and an expert parallel one not?
#
# <details><summary>Answer</summary>
# Replicas share nothing. With shared experts, the other replicas send tokens to this rank's experts in every
# all-to-all.
# </details>
#
# ## Sources and what next
# - Pope et al. 2022, [arXiv:2211.05102](https://arxiv.org/abs/2211.05102): layouts for latency and for throughput, with costs.
# - Yu et al. 2022, *Orca* (OSDI): continuous batching.
# - Kwon et al. 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180): a cache in pages (vLLM).
# - Ainslie et al. 2023, [arXiv:2305.13245](https://arxiv.org/abs/2305.13245): grouped queries.
# - Yang et al. 2024, [arXiv:2411.01783](https://arxiv.org/abs/2411.01783): context parallelism for inference.
#
# This is the last lesson. `course bench inference` runs the comparison longer; `course tour` has every technique of the course
# beside its formula.
