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
# *45 minutes to read and run, 65 to build.* Four ranks train one model and end with the weights that one process
# would have. You count what that costs, hide most of it behind the backward pass, and break it. You need lesson 00;
# of lesson 02 only this: in a ring all-reduce of S bytes each of n ranks sends 2(n-1)/n S.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`. The claims are settled at the end.
#
# 1. *Data parallelism sends less than tensor parallelism, because it communicates once per step and not in every
#    layer.*
# 2. *Communication that overlaps with the backward pass costs no time.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## The question
# One process computes the gradient of the mean loss over 8 sequences (*rows*); four ranks are to do the same with two
# each. Every rank has the full model, so forward and backward need no other rank. What must the ranks exchange, how
# often, and how much is it?
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
# Ranks that start equal and take equal steps stay equal. So the weights are never sent, only the gradients.

# %% [markdown]
# ## Predict
# The model that you will train, and its batch. Fill in what you can.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 64, 8
CONFIG = tiny_config(max_seq_len=SEQ)

model = build_model(CONFIG)
parameters = list(model.parameters())
P = sum(p.numel() for p in parameters)
print(f"{P:,} parameters in {len(parameters)} tensors, 4 bytes each; {CONFIG.layers} blocks")

# %%
predicted_calls = None  # all-reduces a step, one for each parameter tensor
predicted_bytes = None  # bytes that a rank sends in a step
predicted_bytes_m4 = None  # the same, when the step is cut into 4 micro-batches
predicted_exposed = None  # share of the communication that overlap cannot hide, 0 to 1
predicted_error = None  # relative error of the gradient when ranks with unequal tokens average

# %% [markdown]
# ## One gradient, by hand
# A model has one weight w = 1; its loss is (w x)², averaged over the rows x = 1, 2, 3, 4, one on each rank. The gradient
# of a row is 2 w x², so one process gets (2 + 8 + 18 + 32) / 4 = 15.
#
# Each rank divides by the number of rows of *all* ranks; then the gradients are *summed*. That is the one law of this
# lesson: **divide by the global count, then sum**. Averaging is the same only while all counts are equal.

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
# The library computes the same sum in three ways. The first is a loop after backward.

# %%
from course_lib import dp
from course_lib.view import show_source

show_source(dp.Naive.finish, dp._gradient)

# %% [markdown]
# The rest of a step is the same for all three. `loss_sum` gives the *summed* loss of a micro-batch and its tokens;
# `global_tokens` adds up those of all ranks. `control` keeps such scalars out of the counts below. `accumulate` comes
# later.

# %%
show_source(dp.global_tokens, dp.train_step)

# %% [markdown]
# ## From parameters to buckets
# A message of S bytes takes about alpha + S/beta seconds: a fixed cost, and one for the bytes. A bucket is one flat
# tensor with a copy of many gradients: the same bytes in fewer messages. Buckets are filled from the *last* parameter
# to the first, roughly in the order of backward. The tensor that fills a bucket closes it.

# %%
BUCKET = 280_000  # bytes; a block of this small model has 197,120
show_source(dp.Bucketed, dp._view_as_gradients)
print()
for number, bucket in enumerate(comm.by_dtype_and_size(parameters[::-1], BUCKET)):
    print(f"bucket {number}: {len(bucket):2} tensors, {sum(p.nbytes for p in bucket):,} bytes")

# %% [markdown]
# ## From after to during
# When backward has passed the last block, that block's gradients are final. Why wait for the others? Autograd calls a
# hook, here `_ready`, when a parameter's gradient is computed. `_missing` counts the gradients that each bucket still
# waits for.
#
# Look at the `while` loop. Buckets are sent in one order on all ranks, even when a later one is full first. Otherwise
# the gradient of one layer would be added to the gradient of another.

# %%
show_source(dp.Overlapped._ready, dp.Overlapped.finish)

# %% [markdown]
# ## Measure: the same loss, the same bytes
# Eight steps in one process, then on four ranks in each of the three ways. Losses and weights must be equal, and the
# bytes must match the formula.

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
    dp.broadcast_parameters(model, mesh.dp)  # rank 0's weights for all
    sync = SYNCS[way](model, mesh.dp)
    losses = []
    for step in range(STEPS):
        tokens, targets = rows(step, mesh)
        cut = list(zip(tokens.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
        mesh.ledger.clear()  # the ledger keeps the last step alone
        with SavedActivations(model) as saved:  # counts the bytes kept for backward
            losses.append(dp.train_step(model.loss_sum, cut, sync, optimizer).item())
    return report(model, optimizer, losses, saved)


def one_process():
    """The single-process reference: a plain loop, whole batches, no ranks."""
    model = build_model(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step, seed=0, batch_size=BATCH, seq_len=SEQ)
        optimizer.zero_grad()
        with SavedActivations(model) as saved:
            total, count = model.loss_sum(tokens, targets)
            (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return report(model, optimizer, losses, saved)


reference = run(one_process, n=1)[0]
print("loss of one process:", *(f"{loss:.3f}" for loss in reference["losses"]))

# %%
runs = {way: run(train, way, n=RANKS) for way in SYNCS}
formula = dp.wire_bytes(4 * P, RANKS)


def apart(result):
    """Largest difference from one process: of any loss, of any weight, on any rank."""
    theirs = torch.tensor([rank["losses"] for rank in result])
    losses = (theirs - torch.tensor(reference["losses"])).abs().max().item()
    weights = max((rank["weights"] - reference["weights"]).abs().max().item() for rank in result)
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
# The remaining difference is rounding: sums are added in another order, and AdamW, which divides a gradient by its
# own size, amplifies it in the weights. The bytes per rank hardly grow with n:

# %%
for n in (2, 4, 8, 64, 1024):
    times = float(dp.wire_bytes(4 * P, n)) / (4 * P)
    print(f"{n:5} ranks: a rank sends {times:.3f} times the bytes of the parameters")

# %% [markdown]
# What grows with n is the number of alphas: a ring takes 2(n-1) turns. Tokens do not occur: a rank sends the same
# bytes for one row as for a thousand.

# %% [markdown]
# ## See the overlap
# This step is *paced*, as in lesson 00: sleep fills a block's forward up to 15 ms and its backward to 30 ms, and the
# link is slowed to 15 MB/s and 0.5 ms per message. The lower line of a rank is the network. Its short bars at both
# ends are the token count and the loss; before the last one the optimizer steps.

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


picture("bucketed", "Bucketed: every rank waits for the gradients")

# %%
picture("overlapped", "Overlapped: buckets are sent while backward continues")

# %% [markdown]
# For a closer look open `overlapped.json`, which is in your folder for temporary files, in
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
import tempfile
from pathlib import Path

from course_lib.view import perfetto

path = Path(tempfile.gettempdir()) / "overlapped.json"
perfetto(paced["overlapped"].traces, path, title="data parallelism, overlapped")
print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")

# %% [markdown]
# *Exposed* is the time in which ranks wait with nothing to compute. Bucket k of b bytes starts when it is full and
# the bucket before it has left the link:
#
# $$\text{end}_k = \max(\text{full}_k,\ \text{end}_{k-1}) + 2(n-1)\,\alpha + \frac{2(n-1)}{n}\,\frac{b_k}{\beta}$$
#
# A bucket is full when backward has passed the lowest block in it; for bucket 0 that is block 2.

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
print(f"\noverlap cannot hide {share:.2f} of it, by formula; your prediction: {predicted_exposed}")

# %% [markdown]
# The measured time is longer, because a collective begins when the last rank joins, and the naive way waits for that
# 39 times.
#
# Overlap leaves a tail: the last bucket is full only when backward ends. Smaller buckets shorten the tail and cost
# more alphas.

# %% [markdown]
# ## Accumulate without needless messages
# A batch that does not fit in memory is split into micro-batches, whose gradients are added up. A sum may be taken in
# any order, so send once, after the last. All other backwards run in `with sync.accumulate():`, torch's `no_sync`.

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
# Half the activations, the same bytes; only the last backward, now shorter, hides messages. Sending each time would
# also be wrong: the first sum is still in `.grad` at the second all-reduce, so the first micro-batch counts n times.
# (DDP divides by n each time, so there a forgotten `no_sync` costs only bytes.) `Bucketed` cannot see it;
# `Overlapped` refuses:

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
# Padding does not count. Below, a row has 1 to 64 tokens that count, so ranks hold different numbers of tokens. The
# mean of the ranks' means weighs every *rank* alike; one process weighs every *token* alike.

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
# No error message, only another gradient. DDP averages over ranks: with it, multiply your mean loss by
# n · (own tokens) / (tokens of all ranks).
#
# **Clip after the sum.** Then all ranks hold the same gradient, and compute the same norm without a message.


# %%
def clipped(after_sum, max_norm):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    tokens, targets = rows(0, mesh, shortest=1)
    (model.loss_sum(tokens, targets)[0] / dp.global_tokens([targets], mesh.dp)).backward()
    if not after_sum:
        sync.clip(max_norm)
    sync.finish()
    if after_sum:
        sync.clip(max_norm)
    return flat(p.grad for p in model.parameters()).norm().item()


limit = truth.norm().item() / 2
print(f"the limit, half the true norm: {limit:.4f}")
for after_sum in (True, False):
    norm = run(clipped, after_sum, limit, n=RANKS)[0]
    print(f"clipped {'after' if after_sum else 'before'} the sum: norm {norm:.4f}")

# %% [markdown]
# Before the sum most ranks' gradients are shorter than the limit, and stay as they are.
#
# ## Serving: no rank sends anything
# Now every copy answers its own requests. What does it send for one token?


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
# Nothing. Such replicas are servers behind a load balancer. They raise throughput, but no answer becomes faster, and
# no larger model fits.

# %% [markdown]
# ## The same in PyTorch
# With `init=False` ranks get only the variables that `torchrun` sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
# `DDP` broadcasts rank 0's weights, fills buckets by hooks and averages over ranks.

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
# One of six runs is correct (its cause is `"correct"`); two of the others end in a report.
#
# - **no sync**: no rank calls `finish`
# - **n times**: each rank divides by its *own* tokens, and then gradients are summed
# - **seeds**: one rank draws its weights from its own seed, and no rank broadcasts
# - **shapes**: one rank uses another bucket size
# - **skipped**: one rank finds no tokens in its rows and skips a step
#
# Run the folded cell. For each run name the cause, the collective that is missing or on which ranks disagree
# (`"all_reduce"`, `"broadcast"`, else None), and the rank (a number, `"all"`, or None if correct). A report names the
# rank that died, which may be a neighbor of the faulty rank: then set CHECKED = True and run both cells again.
# Another SEED draws other runs.

# %%
SEED = 3
CHECKED = False
diagnosis = {  # such as ("no sync", "all_reduce", "all"), or ("correct", None, None)
    "A": (None, None, None),
    "B": (None, None, None),
    "C": (None, None, None),
    "D": (None, None, None),
    "E": (None, None, None),
    "F": (None, None, None),
}

# %% jupyter={"source_hidden": true}
# The runs of the lab. Run this cell folded; open it after your answer.
from course_lib.grading import Lab

FAULTS = {
    "correct": (None, None),
    "no sync": ("all_reduce", "all"),
    "n times": (None, "all"),
    "seeds": ("broadcast", range(RANKS)),
    "shapes": ("all_reduce", range(RANKS)),
    "skipped": ("all_reduce", range(RANKS)),
}
lab = Lab("03", SEED, FAULTS)


def trained(lab_run):
    mesh = make_mesh()
    model = build_model(CONFIG, seed=1 if lab_run.has("seeds", mesh.rank) else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    limit = 2 * BUCKET if lab_run.has("shapes", mesh.rank) else BUCKET
    sync = dp.Bucketed(model.parameters(), mesh.dp, limit)
    losses, norms = [], []
    for step in range(STEPS):
        if lab_run.has("skipped", mesh.rank) and step == lab_run.pick(range(STEPS)):
            continue
        tokens, targets = rows(step, mesh)
        optimizer.zero_grad()
        total, count = model.loss_sum(tokens, targets)
        (total / (count if lab_run.has("n times") else count * mesh.dp.size)).backward()
        mesh.ledger.clear()
        if not lab_run.has("no sync"):
            sync.finish()
        norms.append(flat(p.grad for p in model.parameters()).norm().item())
        losses.append((total / count).item())
        optimizer.step()
    return {"losses": losses, "norm": norms[0], "sum": flat(model.parameters()).sum().item()}


model = build_model(CONFIG, seed=0)
total, count = model.loss_sum(*batch(0, seed=0, batch_size=BATCH, seq_len=SEQ))
(total / count).backward()
one_norm = flat(p.grad for p in model.parameters()).norm().item()
print(
    "    loss, first and last   bytes a rank   norms of the first gradient    sums of the last weights"
)
print(f"{'':43}one process has 1, by rank     by rank")
for lab_run in lab:
    try:
        result = run(trained, lab_run, n=RANKS, timeout=5, checked=CHECKED)
    except RankError as error:
        print(f"{lab_run.letter}   {error.exception or error}")
        continue
    first, last = (sum(one["losses"][step] for one in result) / RANKS for step in (0, -1))
    norms = "".join(f"{one['norm'] / one_norm:6.2f}" for one in result)
    sums = "".join(f"{one['sum']:9.2f}" for one in result)
    sent = int(result.ledgers[0].wire_bytes())
    print(f"{lab_run.letter}{first:12.3f}{last:9.3f}{sent:17,}    {norms}    {sums}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# The loss falls in every run that ends.
#
# - **No bytes, and all four sums differ**: *no sync*. Each rank trains a model of its own on a quarter of the data.
# - **One sum differs**: *seeds*, on that rank. The gradients match, but the weights differed from the start.
# - **Norm n times too large**: *n times*. AdamW hides it; SGD would take steps four times too long, and clipping
#   begins n times too early.
# - **A rank ended by a signal**: *shapes*. It received more bytes than it expected. Checked mode lists the size that
#   each rank was about to send: one differs.
# - **A deadline, three at `finish`, one had returned**: *skipped*. It makes one call less, and the others wait in the
#   last one.
#
# Three numbers are worth a log line in a real run: bytes sent, gradient norm, and a checksum of the weights, compared
# across ranks.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# Look again at the runs that are wrong; `lab.reveal()` shows the causes.
#
# A rank without tokens must still join every collective, with zeros.

# %% [markdown]
# ## When not to use it
# - **The model does not fit.** Every rank holds all weights, gradients and optimizer states: the state column below.
#   Lessons 04 to 10 partition the model.
# - **The batch is large enough.** More ranks make it larger. Goyal et al. kept ResNet-50's accuracy up to 8,192 images
#   by raising the learning rate with it; beyond, it fell. McCandlish et al. estimate where more rows buy little.
# - **Few tokens and a slow link.** The bytes stay the same, and backward becomes too short to hide them.
#
# ## The table that grows
# Every lesson adds its rows. State is the bytes of parameters, gradients and AdamW's moments and counters. Exposed is
# measured in the paced step. Code is the lines of the library behind each way, without comm.

# %%
from course_lib.view import code_lines

shared = (dp.GradientSync, dp.global_tokens, dp.train_step)
code = {
    "naive": code_lines(dp.Naive, *shared),
    "bucketed": code_lines(dp.Bucketed, *shared),
    "overlapped": code_lines(dp.Overlapped, dp.Bucketed, *shared),
}
heads = f"{'state':>11}{'activations':>13}{'bytes sent':>12}{'exposed':>10}{'code':>6}"
print(f"{'a rank, one step':20}{heads}")
print(f"{'one process':20}{reference['state']:11,}{reference['activations']:13,}{0:12,}{0:7} ms")
for way, result in runs.items():
    state, activations = result[0]["state"], result[0]["activations"]
    sent, wait = int(result.ledgers[0].wire_bytes()), 1e3 * exposed[way]
    print(f"{'dp ' + way:20}{state:11,}{activations:13,}{sent:12,}{wait:7.0f} ms{code[way]:6}")

# %% [markdown]
# ## The claims settled
# **Claim 1: only if a rank handles many tokens in a step.** A study note for interviews orders the traffic "tensor
# parallel > data parallel > pipeline". But data parallelism sends parameters, about 12 h² per layer (h: hidden size),
# and tensor parallelism sends activations: 4 all-reduces per layer (lesson 05), each of tokens × h elements. With
# equal n:
#
# $$12\,h^2 \text{ against } 4 \cdot \text{tokens} \cdot h \quad\Rightarrow\quad \text{equal at tokens} = 3h$$
#
# (Together, t ranks share the model and each has 1/t of the gradients: equal at 3h/t.) A second note takes GPT-3 and 32
# sequences of 2,048 tokens:

# %%
from course_lib.ledger import wire

layers, hidden, gpt3, n = 96, 12_288, 175_000_000_000, 8
tokens = 32 * 2048
data_parallel = wire("all_reduce", 2 * gpt3, n)  # 2 bytes a gradient
tensor_parallel = 4 * layers * wire("all_reduce", 2 * tokens * hidden, n)
crossing = tokens * data_parallel / tensor_parallel
sizes = [float(data_parallel) / 1e9, float(tensor_parallel) / 1e9]
print(f"{tokens:,} tokens a rank, {n} ranks, GB that a rank sends:")
print(f"data parallel {sizes[0]:,.1f}, tensor parallel {sizes[1]:,.1f}")
print(f"equal at {float(crossing):,.0f} tokens; 3h = {3 * hidden:,}; your vote: {vote_1}")

note = [2 * gpt3 / 1e9, 4 * layers * 2 * tokens * hidden / 1e9]
print(f"\nthe second note: {note[0]:,.0f} and {note[1]:,.0f} GB;", end=" ")
print(f"at 25 GB/s data parallel takes {note[0] / 25:.0f} s")
print(f"with what a rank sends: {sizes[0] / 25:.1f} s")

# %% [markdown]
# Its figures are the *payload*; a rank sends 2(n-1)/n times that. It also has tensor parallelism overlap: but there
# the next operation waits for the message, while for a gradient only the optimizer waits. And in the first note data
# parallelism communicates once per *epoch*: until then its ranks have the fault *no sync*.

# %%
without, with_it = (1e3 * exposed[way] for way in ("bucketed", "overlapped"))
print(f"exposed without overlap {without:.0f} ms, with it {with_it:.0f} ms; your vote: {vote_2}")

# %% [markdown]
# **Claim 2: false.** The last bucket is full when backward ends, and on a GPU a collective takes processors and
# memory bandwidth from the backward that hides it.

# %% [markdown]
# ## Cheat-sheet
# Computed from the library's formulas: gradients in 2 bytes, a ring, 25 GB/s.


# %%
def cheat_sheet(billions, hidden):
    print(
        "the law: divide by the tokens of all ranks, then sum; clip after the sum; send once a step"
    )
    print("hidden: the buckets that are full before backward ends; exposed: the tail\n")
    print(f"{billions} billion parameters, h = {hidden:,}")
    print(f"{'ranks':>7}{'sent a rank, GB':>17}{'seconds':>9}{'messages in turn, a bucket':>28}")
    for n in (1, 2, 8, 64, 1024):
        sent = float(dp.wire_bytes(2 * billions * 10**9, n))
        print(f"{n:7}{sent / 1e9:17.1f}{sent / 25e9:9.2f}{2 * (n - 1):28,}")
    print(f"\ntensor parallelism sends less below 3h = {3 * hidden:,} tokens a rank, more above")


cheat_sheet(billions=7, hidden=4096)

# %% [markdown]
# ## Your turn
# [Five exercises](../exercises/03_data_parallelism.ipynb), each on its own: a table by hand (10 minutes); and on real
# ranks the scale before the sum (5), one bucket (10), buckets that hooks send (20), and all of it in raw PyTorch
# (20).

# %% course={"role": "given"}
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from course_lib import comm

# %% [markdown] course={"ex": "03-1"}
# ## 03-1 Three gradients and three buckets, by hand
# Ten minutes, on paper; no code.
#
# **Gradients.** A model has one weight w = 1, the loss of a row x is (w x)², and its gradient 2 w x². Three ranks hold
#
# | rank | rows x |
# |---|---|
# | 0 | 1, 2 |
# | 1 | 4 |
# | 2 | 1, 1, 1 |
#
# - `own`: the gradient of each rank's *summed* loss, [rank 0, rank 1, rank 2]
# - `law`: every rank divides its summed loss by the rows of all ranks; the gradients are summed
# - `mean of means`: every rank divides by its own rows; the gradients are averaged over ranks
# - `n times`: every rank divides by its own rows; the gradients are summed
#
# **Buckets.** Another model, on four ranks, has five tensors. In the order of the model they are a (400 bytes),
# b (2,000), c (800), d (1,200) and e (600). Buckets are filled from the last tensor to the first, and the tensor that
# brings a bucket to 2,000 bytes or more closes it.
#
# - `buckets`: which tensors are in bucket 0, 1 and 2, in the order in which they are put in, such as `"ab c de"`
# - `leaves`: on one rank the hooks fire in the order e, c, b, d, a. After which tensor's hook is bucket 0 sent, and
#   after which bucket 1 and bucket 2? Such as `"a a e"`
# - `bytes`: the bytes that a rank sends in a step, by a ring
# - `bytes, 4 micro-batches`: the same when the step has four micro-batches and sends as it should

# %% course={"ex": "03-1", "role": "answer"}
# BEGIN SOLUTION
step = {
    "own": [10, 32, 6],
    "law": 8,
    "mean of means": 13,
    "n times": 39,
    "buckets": "edc b a",
    "leaves": "d d a",
    "bytes": 7500,
    "bytes, 4 micro-batches": 7500,
}
# STUB
# step = {
#     "own": None,  # three numbers, such as [1, 2, 3]
#     "law": None,
#     "mean of means": None,
#     "n times": None,
#     "buckets": None,  # three words in one text
#     "leaves": None,  # three letters in one text
#     "bytes": None,
#     "bytes, 4 micro-batches": None,
# }
# END SOLUTION

# %% [markdown] course={"ex": "03-1", "role": "answer"}
# - The six row gradients are 2, 8 | 32 | 2, 2, 2; their sum is 48, and 48 / 6 = 8.
# - The ranks' means are 5, 32 and 2: 39 in all, 13 on average. Rank 1, with one row of six, has a third of the say.
# - e + d are 1,800 bytes, so c still goes in. At b's hook bucket 1 is full, but bucket 0 lacks d: at d's hook both
#   are sent.
# - 5,000 bytes in all, and 2 · 3/4 of them are sent, once per step.

# %% course={"ex": "03-1", "role": "check"}
from course_lib.grading import check

check("03-1", step)

# %% [markdown] course={"ex": "03-2"}
# ## 03-2 The scale before the sum
# Four ranks hold 3, 9, 1 and 5 tokens. Each calls `backward()` on what your function returns; then the gradients are
# summed over the ranks, and nothing else is done to them. Write the one line that makes this sum the gradient of the
# mean loss over all 18 tokens.
#
# The check looks at the loss and the gradient of each rank, on groups of one to three ranks with other token counts.
# One of the counts may be 0. A rank may make one call, with one element.


# %% course={"ex": "03-2", "role": "answer"}
def local_loss(total, count, axis):
    """Return the loss on which this rank calls ``backward()``: its part of the mean.

    ``total`` is the summed loss of this rank's tokens, a scalar with a graph. ``count`` is the
    number of these tokens, an int64 scalar that you leave unchanged. ``axis`` has the ranks that
    train together.
    """
    # BEGIN SOLUTION
    return total / comm.all_reduce(count, axis)
    # END SOLUTION


# %% course={"ex": "03-2", "role": "check"}
from course_lib.grading import check

check("03-2", local_loss)

# %% [markdown] course={"ex": "03-3"}
# ## 03-3 One bucket, one all-reduce
# Backward is over, and every rank has its own gradients in `p.grad`. Sum those of one bucket over the ranks, in one
# call. The parameters have different shapes. A rank that did not use a parameter has None in its `grad`: that counts as
# zeros, and gets the sum of the others like any gradient.
#
# The check looks at the gradients on groups of one to three ranks, and at the call: one all-reduce of the bucket's
# bytes. `torch.cat`, `Tensor.split` and `Tensor.view_as` are of use; `comm.flatten`, `comm.unflatten` and
# `comm.start_all_reduce_flat` are what you write here, so they refuse.


# %% course={"ex": "03-3", "role": "answer"}
def sum_bucket(parameters, axis):
    """Leave in every ``p.grad`` of ``parameters`` the sum over the ranks of ``axis``.

    ``parameters`` is a list of float32 parameters. ``comm.all_reduce(x, axis)`` returns the sum
    and leaves ``x`` as it is. Returns nothing.
    """
    # BEGIN SOLUTION
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = comm.all_reduce(torch.cat([g.flatten() for g in gradients]), axis)
    pieces = total.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p)
    # END SOLUTION


# %% course={"ex": "03-3", "role": "check"}
from course_lib.grading import check

check("03-3", sum_bucket)

# %% [markdown] course={"ex": "03-4"}
# ## 03-4 Buckets that leave while backward runs
# The class below is data parallelism with overlap, but for its two methods that matter. Write `ready`, which autograd
# calls for each parameter, and `finish`. The rest is given and need not change.
#
# - Bucket 0 is sent first on every rank, then bucket 1, and so on, whatever the order in which the hooks fire: on
#   some ranks of the check a later bucket is full before an earlier one.
# - A bucket is sent as early as that allows, and never before all of its gradients are computed. `ready` waits for
#   nothing.
# - On one rank of the check no parameter of a bucket is used, so none of its hooks fires. The bucket is sent all the
#   same.
# - A backward inside `accumulate()` sends nothing and completes nothing.
# - After `finish` the next step can begin.
#
# The check looks at the gradients of three steps and at the weights after them, on groups of one to three ranks. It
# also looks at the calls: one all-reduce per bucket and step. When backward computes its last gradient and when it
# returns, every bucket that may leave must be sent, without a wait.


# %% course={"ex": "03-4", "role": "answer"}
class Overlapped:
    """Sums gradients over ``axis`` while backward runs, bucket by bucket.

    ``buckets`` are lists of float32 parameters, in the order in which they leave. A step: every backward
    but the last inside ``with sync.accumulate():``, the last one outside, then ``sync.finish()``.
    """

    def __init__(self, buckets, axis):
        self.buckets, self.axis = buckets, axis
        self.bucket_of = {p: k for k, bucket in enumerate(buckets) for p in bucket}
        self.accumulating = False
        self.begin_step()
        for p in self.bucket_of:
            p.register_post_accumulate_grad_hook(self.ready)

    def begin_step(self):
        """Nothing has left, and every bucket misses all of its gradients."""
        self.handles = []  # handles[k] is that of bucket k
        self.missing = [set(bucket) for bucket in self.buckets]

    @contextmanager
    def accumulate(self):
        """A backward in here only adds to this rank's own gradients."""
        self.accumulating = True
        yield
        self.accumulating = False

    def send_next(self):
        """The next bucket leaves, number len(self.handles); a gradient of None goes as zeros."""
        bucket = self.buckets[len(self.handles)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        self.handles.append(comm.start_all_reduce_flat(gradients, self.axis))

    def ready(self, parameter):
        """Autograd calls it when ``parameter.grad`` is complete for this backward.

        Sends the buckets that may leave now: none, one or several.
        """
        # BEGIN SOLUTION
        if self.accumulating:
            return
        self.missing[self.bucket_of[parameter]].discard(parameter)
        while len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]:
            self.send_next()
        # END SOLUTION

    def finish(self):
        """After the last backward: every ``p.grad`` becomes the sum over the ranks.

        ``handle.wait()`` gives the flat sum of a bucket, and ``comm.unflatten(flat, bucket)`` its
        pieces, in the shapes of the parameters.
        """
        # BEGIN SOLUTION
        while len(self.handles) < len(self.buckets):
            self.send_next()
        for bucket, handle in zip(self.buckets, self.handles, strict=True):
            for p, total in zip(bucket, comm.unflatten(handle.wait(), bucket), strict=True):
                p.grad = total
        self.begin_step()
        # END SOLUTION


# %% course={"ex": "03-4", "role": "check"}
from course_lib.grading import check

check("03-4", Overlapped)

# %% [markdown] course={"ex": "03-5"}
# ## 03-5 The same in raw PyTorch
# A data-parallel training loop with `torch.distributed` alone: `course_lib` and DDP refuse here. The default process
# group exists already. `dist.broadcast(p.data, 0)` and `dist.all_reduce(p.grad)` work in place.
#
# The check compares the weights after three steps of SGD, on every rank, with one process that starts from rank 0's
# weights, has the rows of all ranks, and clips its gradient to `max_norm`. The optimizer has its own learning rate,
# momentum and weight decay, so use it. In one step the last of three ranks has no rows. A rank sends the weights once,
# then the gradients and a row count in each step. How many calls you make for the gradients is up to you.


# %% course={"ex": "03-5", "role": "answer"}
def train(model, batches, optimizer, max_norm):
    """Train ``model`` in place, in data parallel over all ranks.

    ``model`` begins with other weights on every rank; ``model(x)`` has the shape of ``y``.
    ``batches`` has this rank's (x, y) of each step, x [rows, features] and y [rows]. Ranks have
    different numbers of rows. The loss of a step is the mean of (model(x) - y) ** 2 over the rows
    of all ranks. ``optimizer`` has the parameters of ``model``. Returns nothing.
    """
    # BEGIN SOLUTION
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    for x, y in batches:
        rows = torch.tensor(len(x))
        dist.all_reduce(rows)
        optimizer.zero_grad()
        (((model(x) - y) ** 2).sum() / rows).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    # END SOLUTION


# %% course={"ex": "03-5", "role": "check"}
from course_lib.grading import check

check("03-5", train)

# %% [markdown]
# ## Exit questions
# Answer each before you unfold it.
#
# **1.** 7 billion parameters, gradients in 2 bytes, 64 ranks. What does a rank send in a step?
#
# <details><summary>Answer</summary>
# 2 · 63/64 · 14 GB = 27.6 GB, for one sequence or a hundred.
# </details>
#
# **2.** You double the micro-batches of a step, each as large as before. What happens to the bytes per step and per
# token?
#
# <details><summary>Answer</summary>
# The bytes per step stay the same, and the bytes per token halve. The price is a larger batch.
# </details>
#
# **3.** Why must buckets be sent in the same order on all ranks, and why is each not simply sent when it is full?
#
# <details><summary>Answer</summary>
# Collectives are matched by order, not by name: the k-th call of one rank meets the k-th of the others. And hooks may
# fire in different orders, for example when a rank does not use a parameter.
# </details>
#
# **4.** The loss falls, ranks agree, bytes are right, but SGD diverges where one process did not. What do you look at?
#
# <details><summary>Answer</summary>
# Compare the gradient norm with that of one process on the same batch. A factor n means: divided by own tokens, then
# summed.
# </details>
#
# **5.** With overlap, 20 % of the step is still communication. Name three changes that keep the gradient as it is.
#
# <details><summary>Answer</summary>
# The same batch on fewer ranks, each with more rows; another bucket size; a faster link, or an all-reduce in two levels,
# inside the nodes and between them. A larger batch, or gradients in fewer bits, would change it.
# </details>
#
# ## Sources and what next
# - Li et al. 2020, *PyTorch Distributed*, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704): buckets, hooks,
#   `no_sync`, unused parameters. Section 3 is this lesson.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677): its
#   section 3 lists mistakes that you now know.
# - McCandlish et al. 2018, [arXiv:1812.06162](https://arxiv.org/abs/1812.06162): how large a batch is worth it.
# - Brown et al. 2020, [arXiv:2005.14165](https://arxiv.org/abs/2005.14165): GPT-3's sizes; Shoeybi et al. 2019,
#   [arXiv:1909.08053](https://arxiv.org/abs/1909.08053): the four all-reduces per layer.
#
# Next: four copies of AdamW's moments hold the same values. Lesson 04 (ZeRO) stores a quarter of them on each rank,
# and sends no more than you sent here.
