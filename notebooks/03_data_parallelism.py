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
#     lesson: '03'
# ---

# %% [markdown]
# # 03 Data parallelism: one model, four copies, one gradient
#
# *50 minutes to read and run.* Four ranks train one model and end with the weights that one process
# would have. You will see what that costs in bytes, hide most of the cost behind the backward pass, and break it in
# four ways. You need lesson 00; of lesson 02 only that a ring all-reduce of S bytes over n ranks makes each send
# 2(n-1)/n S.
#
# Vote first. Write `"true"`, `"false"` or `"only if ..."`; `None` means no vote. The last section settles both.
#
# 1. *Data parallelism sends less than tensor parallelism, because it talks once a step and not in every layer.*
# 2. *Communication that overlaps with the backward pass costs no time.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# One process computes the gradient of the mean loss over a batch of 8 sequences. Four ranks are to do the same with
# two sequences each. Every rank has the whole model, so forward and backward need nobody else. What do the ranks
# have to tell each other, how often, and how much is it?
#
# ```
#     rows 0-1          rows 2-3          rows 4-5          rows 6-7       other rows
#        |                 |                 |                 |
#   [ weights w ]     [ weights w ]     [ weights w ]     [ weights w ]     the same weights
#        |                 |                 |                 |
#        g0                g1                g2                g3           other gradients
#        |                 |                 |                 |
#        +-----------------+--- all-reduce --+-----------------+
#        |                 |                 |                 |
#     g0+..+g3          g0+..+g3          g0+..+g3          g0+..+g3        the same gradient
#        |                 |                 |                 |
#   optimizer step    optimizer step    optimizer step    optimizer step    the same new weights
# ```
#
# Ranks that start equal and take equal steps stay equal. So the weights never travel: the gradients do.

# %% [markdown]
# ## Predict
# This is the model that you will train, and a batch of it. Fill in what you can.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 64, 8
CONFIG = tiny_config(max_seq_len=SEQ)

model = build_model(CONFIG)
parameters = list(model.parameters())
P = sum(p.numel() for p in parameters)
print(f"{P:,} parameters in {len(parameters)} tensors, 4 bytes each; {CONFIG.layers} blocks")

# %%
predicted_calls = None  # all-reduces a step, when each parameter tensor has its own
predicted_bytes = None  # bytes that a rank sends in a step
predicted_bytes_m4 = None  # the same, when the step is cut into 4 micro-batches
predicted_exposed = None  # share of the communication that overlap cannot hide, 0 to 1
predicted_error = (
    None  # relative error of the gradient when ranks with unequal token counts just average
)

# %% [markdown]
# ## One gradient, by hand
# Take a model with a single weight w = 1, and the loss (w x)² averaged over four rows x = 1, 2, 3, 4, one row a rank.
# The gradient of row x is 2 w x². One process gets (2 + 8 + 18 + 32) / 4 = 15.
#
# Each rank divides by the number of rows of *all* ranks, and then the gradients are *summed*. That is the one law of
# this lesson: **divide by the global count, then sum**. Averaging is the same thing only while all counts are equal.

# %%
import torch

from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh


def by_hand():
    mesh = make_mesh()
    w = torch.ones((), requires_grad=True)
    x = mesh.dp.rank + 1.0
    loss = (w * x) ** 2 / mesh.dp.size  # the global number of rows
    loss.backward()
    return {"own": w.grad.item(), "sum": comm.all_reduce(w.grad, mesh.dp).item()}


run(by_hand, n=RANKS)

# %% [markdown]
# ## Build it: one all-reduce for each parameter
# The library has three ways to the same sum. The first is a loop after backward.

# %%
import ast
import inspect
import textwrap

from course_lib import dp


def show(*objects):
    for one in objects:
        print(textwrap.dedent(inspect.getsource(one)))


show(dp.Naive.finish)

# %% [markdown]
# Everything else of a step is the same for all three ways. `loss_sum` returns the *summed* loss of a micro-batch and
# its number of tokens; `global_tokens` adds up the tokens of all ranks, which is one number on the network.

# %%
show(dp.global_tokens, dp.train_step)

# %% [markdown]
# ## From parameters to buckets
# A message of S bytes takes about alpha + S/beta seconds: alpha is a fixed cost, however short it is. A bucket copies many gradients into one flat tensor and
# sends that. The bytes stay the same, the number of messages falls. Buckets are filled from the *last* parameter to
# the first, because backward computes gradients in about that order.

# %%
BUCKET = 280_000  # bytes; a block of this small model has 197,120
show(dp.Bucketed)

for number, bucket in enumerate(comm.by_dtype_and_size(parameters[::-1], BUCKET)):
    print(f"bucket {number}: {len(bucket):2} tensors, {sum(p.nbytes for p in bucket):,} bytes")

# %% [markdown]
# ## From after to during
# When backward has finished the last block, the gradients of that block will not change any more. Why wait for the
# others? Autograd calls a hook when a parameter's gradient is complete. `_missing` is what each bucket still waits
# for; the parameter that completes a bucket sends it. `finish` waits for what is still on its way.
#
# Look at the `while` loop. Buckets leave in one fixed order on all ranks, even when a later one is full first. Two
# ranks that sent buckets in different orders would add the gradient of one layer to that of another.

# %%
show(dp.Overlapped._ready, dp.Overlapped.finish)

# %% [markdown]
# ## Measure: the same loss, the same bytes
# Train eight steps in one process and then on four ranks in each of the three ways. Three claims are checked: the
# losses are those of one process, the weights too, and a rank sends 2(n-1)/n times the bytes of the parameters.

# %%
from course_lib.data import batch
from course_lib.trace import SavedActivations, state_bytes

SYNCS = {
    "naive": lambda model, axis: dp.Naive(model.parameters(), axis),
    "bucketed": lambda model, axis: dp.Bucketed(model.parameters(), axis, BUCKET),
    "overlapped": lambda model, axis: dp.Overlapped(model.parameters(), axis, BUCKET),
}


def rows(step, mesh, shortest=None):
    share = {"dp_rank": mesh.dp.rank, "dp_size": mesh.dp.size}
    return batch(step, seed=0, batch_size=BATCH, seq_len=SEQ, shortest=shortest, **share)


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def report(model, optimizer, losses, saved):
    return {
        "losses": losses,
        "weights": flat(model.parameters()),
        "activations": saved.peak,
        "state": state_bytes(model, optimizer).total,
    }


def train(way, micro_batches=1):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dp.start_equal(model, mesh.dp)
    sync = SYNCS[way](model, mesh.dp)
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.ledger.clear()  # the ledger keeps the last step alone
        with SavedActivations(model) as saved:
            losses.append(dp.train_step(model.loss_sum, cut, sync, optimizer).item())
    return report(model, optimizer, losses, saved)


def one_process():
    """The twin that everything is compared with: a plain loop, whole batches, no ranks."""
    model = build_model(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        with SavedActivations(model) as saved:  # counts the bytes kept for backward
            total, count = model.loss_sum(tokens, targets)
            (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return report(model, optimizer, losses, saved)


serial = run(one_process, n=1)[0]
print("loss of one process:", *(f"{loss:.3f}" for loss in serial["losses"]))

# %%
runs = {way: run(train, way, n=RANKS) for way in SYNCS}
formula = dp.wire_bytes(4 * P, RANKS)


def apart(result):
    """Largest difference from one process: of any loss, of any weight, on any rank."""
    theirs = torch.tensor([rank["losses"] for rank in result])
    losses = (theirs - torch.tensor(serial["losses"])).abs().max().item()
    weights = max((rank["weights"] - serial["weights"]).abs().max().item() for rank in result)
    return losses, weights


heads = f"{'calls':>7}{'bytes a rank':>14}{'formula':>12}{'loss off by':>14}{'weights off by':>16}"
print(f"{'':12}{heads}")
for way, result in runs.items():
    own = result.ledgers[0]
    losses, weights = apart(result)
    sent = int(own.wire_bytes())
    print(f"{way:12}{own.calls():7}{sent:14,}{int(formula):12,}{losses:14.1e}{weights:16.1e}")
    assert own.wire_bytes() == formula
    assert losses < 1e-5
    assert weights < 1e-4
print(f"\nyour prediction: {predicted_calls} calls, {predicted_bytes} bytes")

# %% [markdown]
# The differences that remain are float32 rounding: four partial sums are added in another order than one long sum, and
# AdamW, which divides a gradient by its own size, makes more of them in the weights.
#
# The formula has a pleasant property. Per rank it hardly grows with n.

# %%
for n in (2, 4, 8, 64, 1024):
    times = float(dp.wire_bytes(4 * P, n)) / (4 * P)
    print(f"{n:5} ranks: a rank sends {times:.3f} times the bytes of the parameters")

# %% [markdown]
# The ring does grow: 2(n-1) messages follow each other, so the time for alphas grows with n. And tokens do not occur
# in the formula: a rank sends the same for one row as for a thousand.

# %% [markdown]
# ## See the overlap
# Four ranks on two cores fight for the cores, and that would hide what we look for. So this step is *paced*: every
# block's forward takes 15 ms and its backward 30 ms, filled up by sleep. The link is slowed to 15 MB/s and 0.5 ms a
# message. Ranks, groups, hooks and waiting are real. The lower line of each rank is the network.

# %%
from course_lib.mesh import Conditions, Link, Links
from course_lib.trace.blocks import MeasuredBlocks
from course_lib.view import timeline
from course_lib.view.summary import read, summarize

PACE = {"F": 0.015, "B": 0.030}
LINK = Link(alpha=0.0005, beta=15e6)
NETWORK = Links(inside=LINK, between=LINK)


def one_step(way):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = SYNCS[way](model, mesh.dp)
    with MeasuredBlocks(model.blocks, mesh.trace, mesh.conditions.pace):
        for step in range(2):  # the first step warms up; the second stays in the trace
            comm.barrier(mesh.dp)
            mesh.trace.clear()
            dp.train_step(model.loss_sum, [rows(step, mesh)], sync, optimizer)


paced = {way: run(one_step, way, n=RANKS, pace=PACE, links=NETWORK) for way in SYNCS}


def picture(way, title):
    return timeline(paced[way].traces, title=title, conditions=Conditions(PACE, NETWORK))


picture("bucketed", "Bucketed: everybody waits for the gradients")

# %%
picture("overlapped", "Overlapped: buckets travel while backward goes on")

# %% [markdown]
# Both send the same bytes over the same link. Can you say beforehand how much stays *exposed*, that is, how long the
# ranks wait with nothing to compute? Bucket k of b bytes starts when it is full and the one before it has left the link:
#
# $$\text{end}_k = \max(\text{full}_k,\ \text{end}_{k-1}) + 2(n-1)\,\alpha + \frac{2(n-1)}{n}\,\frac{b_k}{\beta}$$
#
# The next cell computes it for our buckets. A bucket is full when backward has passed the lowest block in it.

# %%
block_of = {p: index for index, block in enumerate(model.blocks) for p in block.parameters()}
block_of[model.embedding.token.weight] = 0  # right after block 0; norm and head come before block 3


def on_the_link(bucket):
    wire_bytes = dp.wire_bytes(sum(p.nbytes for p in bucket), RANKS)
    return 2 * (RANKS - 1) * LINK.alpha + float(wire_bytes) / LINK.beta


buckets = comm.by_dtype_and_size(parameters[::-1], BUCKET)
end = 0.0  # seconds since backward began
for bucket in buckets:
    lowest = min(block_of.get(p, CONFIG.layers) for p in bucket)
    full = PACE["B"] * (CONFIG.layers - lowest)
    end = max(full, end) + on_the_link(bucket)
exposed_formula = {
    "naive": sum(on_the_link([p]) for p in parameters),
    "bucketed": sum(map(on_the_link, buckets)),
    "overlapped": end - PACE["B"] * CONFIG.layers,
}


def measured_exposed(traces):
    """Seconds a rank, without the two control messages of a step (token count and loss)."""
    spans, _ = read(traces)
    return summarize([span for span in spans if span.label != "control"]).exposed


exposed = {way: measured_exposed(result.traces) for way, result in paced.items()}
print(f"{'exposed, ms':12}{'formula':>9}{'measured':>10}")
for way, seconds in exposed.items():
    print(f"{way:12}{1e3 * exposed_formula[way]:9.0f}{1e3 * seconds:10.0f}")
share = exposed_formula["overlapped"] / exposed_formula["bucketed"]
print(
    f"\nshare that overlap cannot hide, by formula: {share:.2f}; your prediction: {predicted_exposed}"
)

# %% [markdown]
# Measured is longer: a collective begins when the last rank joins, and on a busy machine they do not arrive together.
# The naive way suffers most. It pays alpha 39 times instead of 3, and 39 times it waits for the slowest.
#
# What overlap leaves cannot be hidden: the last bucket is full when backward ends, and nothing of this step is left
# to compute beside it. Smaller buckets make that tail shorter and cost more alphas: bucket size is a knob.

# %% [markdown]
# ## Accumulate without needless messages
# A batch that does not fit in memory is cut into micro-batches, and their gradients are added up before the
# optimizer steps. The sum over micro-batches and the sum over ranks may be taken in any order. So send once, after the
# last: all backwards but one stand inside `with sync.accumulate():`, which torch calls `no_sync`.

# %%
CUTS = 2  # a rank has two rows: two micro-batches of one
accumulated = run(train, "overlapped", CUTS, n=RANKS)


def send_each_time():
    """What a sync after every micro-batch would send."""
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    for tokens, targets in zip(*(part.chunk(CUTS) for part in rows(0, mesh)), strict=True):
        model.loss_sum(tokens, targets)[0].backward()
        sync.finish()


print(f"{'':22}{'calls':>6}{'bytes a rank':>14}{'saved activations':>19}")
for name, result in {"one backward": runs["overlapped"], "2 micro-batches": accumulated}.items():
    own = result.ledgers[0]
    print(f"{name:22}{own.calls():6}{int(own.wire_bytes()):14,}{result[0]['activations']:19,}")
own = run(send_each_time, n=RANKS).ledgers[0]
print(f"{'2, sent each time':22}{own.calls():6}{int(own.wire_bytes()):14,}")
print(f"\nloss off by {apart(accumulated)[0]:.1e} with 2 micro-batches")
print(f"any number of them sends {int(formula):,}; your prediction for 4: {predicted_bytes_m4}")

# %% [markdown]
# Half the activations, the same bytes. (Only the last backward has messages to hide, and it got shorter.) And `send_each_time` is not only dear, it is wrong: the first sum is still in
# `.grad` when the second all-reduce comes, so the first micro-batch is counted n times. (DDP divides by n each time,
# so a forgotten `no_sync` there costs only bytes.) The library refuses it:

# %%
from course_lib.launch import RankError


def forgotten():
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["overlapped"](model, mesh.dp)
    tokens, targets = rows(0, mesh)
    model.loss_sum(tokens, targets)[0].backward()
    model.loss_sum(tokens, targets)[0].backward()
    sync.finish()


try:
    run(forgotten, n=RANKS)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## The mean is over tokens, not over ranks
# Texts have different lengths, and padding counts for nothing. Below, each row has 1 to 64 tokens that count, so the
# ranks hold different numbers of them. The mean of the ranks' means gives every *rank* the same weight; one process
# gives every *token* the same weight.

# %%
EXACT, MEAN_OF_MEANS = "sum / global tokens", "mean of the ranks' means"


def uneven(rule):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    tokens, targets = rows(0, mesh, shortest=1)
    total, count = model.loss_sum(tokens, targets)
    divisor = dp.global_tokens([targets], mesh.dp) if rule == EXACT else count * mesh.dp.size
    (total / divisor).backward()
    sync.finish()
    return flat(p.grad for p in model.parameters()), count.item()


truth, tokens_in_all = run(uneven, EXACT, n=1)[0]
for rule in (EXACT, MEAN_OF_MEANS):
    result = run(uneven, rule, n=RANKS)
    error = (result[0][0] - truth).norm() / truth.norm()
    print(f"{rule:26} relative error of the gradient {error:.2g}")
print("tokens of each rank:", *(count for _, count in result), f"(one process: {tokens_in_all})")
print(f"your prediction: {predicted_error}")

# %% [markdown]
# No error message, only another gradient, in every step. DDP averages over ranks, so with it you multiply your mean
# loss by n · (own tokens) / (tokens of all ranks) before backward.
#
# **Clip after the sum.** The norm of a sum is not the sum of norms. After `finish` all ranks hold the same gradient,
# so that they compute the same norm without a message. Here is what comes out when each rank clips its own part to
# half the true norm first:


# %%
def clipped(after_sum, max_norm):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    tokens, targets = rows(0, mesh, shortest=1)
    (model.loss_sum(tokens, targets)[0] / dp.global_tokens([targets], mesh.dp)).backward()
    if not after_sum:
        dp.clip_gradients(model.parameters(), max_norm)
    sync.finish()
    if after_sum:
        dp.clip_gradients(model.parameters(), max_norm)
    return flat(p.grad for p in model.parameters()).norm().item()


limit = truth.norm().item() / 2
print(f"the limit: {limit:.4f}")
for after_sum in (True, False):
    norm = run(clipped, after_sum, limit, n=RANKS)[0]
    print(f"clipped {'after' if after_sum else 'before'} the sum: norm {norm:.4f}")

# %% [markdown]
# ## Serving: nothing travels
# With the training over, let every copy answer requests of its own. What does a rank send for one token?


# %%
def serve_one_token():
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    prompts, _ = rows(0, mesh)
    with torch.no_grad():
        return model(prompts)[:, -1].argmax(-1).tolist()


served = run(serve_one_token, n=RANKS)
print("calls of each rank:", [len(own.records) for own in served.ledgers])

# %% [markdown]
# Zero. Replicas that serve are servers that happen to run the same program; a load balancer stands in front of them.
# They raise throughput. They do not make one answer faster, nor a model fit that did not. (Servers that share the
# experts of a mixture-of-experts model do talk; that is expert parallelism.)

# %% [markdown]
# ## The same in PyTorch
# `init=False` gives the ranks what `torchrun` would give them (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and
# nothing else. The rest is what you would write in a script. `DDP` broadcasts the weights of rank 0, fills buckets
# by hooks and averages over ranks.

# %%
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def in_pytorch():
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    model = DDP(build_model(CONFIG, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, targets = batch(
            step, seed=0, batch_size=BATCH, seq_len=SEQ, dp_rank=rank, dp_size=n
        )
        optimizer.zero_grad()
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()  # DDP's hooks send here
        optimizer.step()
    dist.destroy_process_group()
    return flat(model.parameters())


theirs = run(in_pytorch, n=RANKS, init=False)
ours = [result["weights"] for result in runs["overlapped"]]
difference = (torch.stack(list(theirs)) - torch.stack(ours)).abs().max().item()
assert difference < 1e-4
print(f"after {STEPS} steps of AdamW, weights differ from ours by {difference:.1e} at most")

# %% [markdown]
# ## Break it and diagnose
# Of the four runs below three are ill and one is healthy. The illnesses:
#
# - **no sync**: somebody forgot to call `finish`;
# - **n times**: each rank divides by its *own* tokens, and then the gradients are summed;
# - **seeds**: each rank draws its own initial weights, and nobody broadcasts.
#
# The code is folded. Run it, look at the table and say which is which. The gradient is that of the first step, the
# weights are those after the last.

# %%
diagnosis = {"A": None, "B": None, "C": None, "D": None}  # "healthy", "no sync", "n times", "seeds"

# %% jupyter={"source_hidden": true}
# The patients. Run this cell folded; open it after your answer.
PATIENTS = {"A": "n times", "B": "seeds", "C": "healthy", "D": "no sync"}


def patient(illness):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=mesh.dp.rank if illness == "seeds" else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = SYNCS["bucketed"](model, mesh.dp)
    losses, gradients = [], []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        optimizer.zero_grad()
        total, count = model.loss_sum(tokens, targets)
        (total / (count if illness == "n times" else count * mesh.dp.size)).backward()
        mesh.ledger.clear()
        if illness != "no sync":
            sync.finish()
        gradients.append(flat(p.grad for p in model.parameters()))
        losses.append((total / count).item())
        optimizer.step()
    return {"losses": losses, "gradient": gradients[0], "weights": flat(model.parameters())}


def spread(result, what):
    """Largest difference between any rank and rank 0."""
    return max((one[what] - result[0][what]).abs().max().item() for one in result)


print(f"{'':28}{'bytes':>11}{'norm of':>11}{'largest difference of ranks':>30}")
print(
    f"{'':4}{'loss, first and last':>22}{'a rank':>13}{'gradient':>11}{'gradients':>18}{'weights':>12}"
)
ill = {name: run(patient, illness, n=RANKS) for name, illness in PATIENTS.items()}
for name, result in ill.items():
    first, last = (sum(one["losses"][step] for one in result) / RANKS for step in (0, -1))
    sent, norm = int(result.ledgers[0].wire_bytes()), result[0]["gradient"].norm()
    print(f"{name:4}{first:13.3f}{last:9.3f}{sent:13,}{norm:11.3f}", end="")
    print(f"{spread(result, 'gradient'):18.1e}{spread(result, 'weights'):12.1e}")

# %% [markdown]
# <details><summary>Which is which</summary>
#
# The loss tells you nothing: it falls in all four.
#
# - **D has no sync.** Its ledger is empty. Each rank trains a model of its own on a quarter of the data.
# - **B has different seeds.** Its ledger is right and its gradients agree; its weights never did. The gradient of
#   four different models is summed and applied to each.
# - **A has gradients n times too large.** Ledger and replicas are in order, only the norm is 4 times that of C. AdamW
#   hides it, because it divides the gradient by its own size; SGD would take steps four times too long, and clipping
#   would clip in almost every step.
#
# So three numbers are worth a log line in a real run: bytes sent, gradient norm, and a checksum of the weights
# compared across ranks now and then.
# </details>

# %%
right = sum(diagnosis[name] == illness for name, illness in PATIENTS.items())
print(f"{right} of {len(PATIENTS)} right; you gave {diagnosis}")

# %% [markdown]
# The fourth illness stops the run. Suppose that rank 2 finds no tokens in its rows and skips the step.


# %%
def skips_a_step():
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    tokens, targets = rows(0, mesh)
    if mesh.dp.rank == 2:  # "nothing to do for me"
        return
    model.loss_sum(tokens, targets)[0].backward()
    sync.finish()


try:
    run(skips_a_step, n=RANKS, timeout=5)
except RankError as error:
    print(error)

# %% [markdown]
# A rank without tokens must still join every collective, with zeros.

# %% [markdown]
# ## When not to use it
# - **The model does not fit.** Every rank holds all weights, gradients and optimizer states: the table below shows that
#   n ranks save none of it. Lessons 04 to 10 cut the model.
# - **The batch is large enough.** More ranks with the same rows each make the batch larger. Goyal et al. raised the
#   learning rate in step with it and kept ResNet-50's accuracy up to 8,192 images; beyond, it fell. McCandlish et al.
#   estimate, from the noise of the gradient, the batch above which more rows buy little.
# - **Few tokens and a slow link.** A rank sends the same whether it has computed much or little. With fewer tokens a
#   rank, the backward pass gets too short to hide it.
#
# ## The table that grows
# Every lesson adds its rows. State is parameters, gradients and AdamW's two moments with its step counters, in bytes.
# Code is what this lesson showed of the library, without comm underneath.


# %%
def statements(*objects):
    """Lines of code without comments and docstrings."""
    lines = 0
    for one in objects:
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:] or [ast.Pass()]
        lines += len(ast.unparse(tree).splitlines())
    return lines


shared = (dp.GradientSync, dp.global_tokens, dp.train_step)
code = {
    "naive": statements(dp.Naive, *shared),
    "bucketed": statements(dp.Bucketed, *shared),
    "overlapped": statements(dp.Overlapped, dp.Bucketed, *shared),
}
print(
    f"{'a rank, one step':20}{'state':>11}{'activations':>13}{'bytes sent':>12}{'exposed':>10}{'code':>6}"
)
print(f"{'one process':20}{serial['state']:11,}{serial['activations']:13,}{0:12,}{0:7} ms")
for way, result in runs.items():
    state, activations = result[0]["state"], result[0]["activations"]
    sent, wait = int(result.ledgers[0].wire_bytes()), 1e3 * exposed[way]
    print(f"{'dp ' + way:20}{state:11,}{activations:13,}{sent:12,}{wait:7.0f} ms{code[way]:6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if a rank handles many tokens in a step.** A study note for interviews gives the order "tensor
# parallel > data parallel > pipeline" as a fact. But the one side counts parameters and the other counts tokens. A
# layer has about 12 h² parameters (h is the hidden size); tensor parallelism makes 4 all-reduces a layer (2 forward,
# 2 backward), each of tokens × h numbers. With equal n the ring factors cancel, and so do layers and bytes a number:
#
# $$12\,h^2 \text{ against } 4 \cdot \text{tokens} \cdot h \quad\Rightarrow\quad \text{equal at tokens} = 3h$$
#
# Where t tensor-parallel ranks share the model, each holds 1/t of the gradients, and the crossing falls to 3h/t. A
# second note works it out for GPT-3 and 32 sequences of 2,048 tokens, with the whole model on every data-parallel rank:

# %%
from course_lib.ledger import wire

layers, hidden, gpt3, n = 96, 12_288, 175_000_000_000, 8
tokens = 32 * 2048
data_parallel = wire("all_reduce", 2 * gpt3, n)  # 2 bytes a gradient
tensor_parallel = 4 * layers * wire("all_reduce", 2 * tokens * hidden, n)
crossing = tokens * data_parallel / tensor_parallel
print(f"{tokens:,} tokens a rank, {n} ranks, GB that a rank sends:")
print(
    f"data parallel {float(data_parallel) / 1e9:,.1f}, tensor parallel {float(tensor_parallel) / 1e9:,.1f}"
)
print(f"equal at {float(crossing):,.0f} tokens; 3h = {3 * hidden:,}; your vote: {vote_1}")

note = [2 * gpt3 / 1e9, 4 * layers * 2 * tokens * hidden / 1e9]
print(
    f"\nthe second note: {note[0]:,.0f} and {note[1]:,.0f} GB, and {note[0] / 25:.0f} s for data parallel at 25 GB/s"
)
print(f"with what a rank sends: {float(data_parallel) / 25e9:.1f} s")

# %% [markdown]
# The second note's figures are the *payload*; what a rank of a ring sends is 2(n-1)/n times that. It counts it as an
# advantage of tensor parallelism that its messages can be overlapped. But there the next operation of the layer waits
# for them, while nobody waits for a gradient before the optimizer does: you saw it in the second picture. That serving
# sends nothing is right: you counted it. And the first note has data parallelism talk at the end of every *epoch*; such
# ranks would be patient D for a whole epoch.

# %%
without, with_it = (1e3 * exposed[way] for way in ("bucketed", "overlapped"))
print(f"exposed without overlap {without:.0f} ms, with it {with_it:.0f} ms; your vote: {vote_2}")

# %% [markdown]
# **Claim 2: false.** The last bucket is full when backward ends. And on a GPU the collective itself takes some of the processors and of
# the memory bandwidth from the backward that it hides behind.
#
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** A model of 7 billion parameters, gradients in 2 bytes, 64 ranks. What does a rank send in a step?
#
# <details><summary>Answer</summary>
# 2 · 63/64 · 14 GB = 27.6 GB. Whether it handles one sequence or a hundred.
# </details>
#
# **2.** You double the micro-batches of a step at the same micro-batch size. What happens to the bytes a step, and to
# the bytes a token?
#
# <details><summary>Answer</summary>
# A step sends the same, a token half: accumulation is a way to pay less for communication, with a larger batch as
# the price.
# </details>
#
# **3.** Why must buckets leave in the same order on all ranks, and why does the library not simply send each when full?
#
# <details><summary>Answer</summary>
# Collectives are matched by order, not by name: the k-th call of one rank meets the k-th of the others. Hooks may
# fire in different orders on different ranks, for example when one of them does not use a parameter.
# </details>
#
# **4.** The loss falls, all ranks agree, the bytes are right, but a run with SGD diverges where one process did not.
# What do you look at first?
#
# <details><summary>Answer</summary>
# The gradient norm against that of one process on the same batch. A factor of n means: divided by own tokens, summed.
# </details>
#
# **5.** With overlap the step is still 20 % communication. Name three changes that keep the gradient as it is.
#
# <details><summary>Answer</summary>
# More micro-batches a step (a larger batch, or fewer ranks); another bucket size; a faster link between the ranks of
# one data-parallel group, or an all-reduce in two levels, inside the nodes and between them. Sending the gradients in
# fewer bits would change them.
# </details>
#
# ## Sources and what next
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*,
#   [arXiv:2006.15704](https://arxiv.org/abs/2006.15704): buckets, hooks, `no_sync`, unused parameters. Section 3 is
#   this lesson.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677): what a
#   large batch does to training; its section 3 lists mistakes that you now know.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*,
#   [arXiv:1812.06162](https://arxiv.org/abs/1812.06162): how large a batch is worth it.
# - Brown et al. 2020, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165), for the sizes of GPT-3; Shoeybi et al.
#   2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053), for the four all-reduces a layer.
#
# Next: the state column of the table is the same for one process and for four ranks. Four copies of AdamW's moments
# hold the same numbers. Lesson 04 (ZeRO) keeps one quarter of them on each rank, and sends no more than you sent here.
