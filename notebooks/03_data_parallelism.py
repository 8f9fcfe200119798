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
# *40 minutes to read and run, 65 to build.* Here is a bet. You move a run from 64 GPUs to 128. Does each GPU now send
# twice as much per step, half as much, or about the same? You will find out with four ranks that train one model and
# end with the weights of one process. You need lesson 00, and one fact of lesson 02: in a ring all-reduce of S bytes,
# each of n ranks sends 2(n-1)/n · S.
#
# Vote first: write `"true"`, `"false"` or `"only if ..."`.
#
# 1. *Data-parallel training computes the same gradient as one process does on the same batch.*
# 2. *Communication that overlaps with the backward pass costs no time.*

# %%
vote_1 = None
vote_2 = None

# %% [markdown]
# ## Four copies, one sum
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
# Each rank holds the full model and takes a quarter of the batch, so it can run forward and backward alone. The four
# gradients differ, because each comes from different sequences (*rows*). The ranks add them up, and each applies the
# same sum in its own optimizer step. Copies that start equal then stay equal, so no rank sends weights after the
# start.
#
# | symbol | meaning |
# |---|---|
# | n | ranks |
# | alpha, beta | a link's seconds per message, and bytes per second |
# | S, b | bytes of a message, of a bucket |
#
# The next cell builds the model. What do you predict? For the last two numbers, a guess is enough.

# %%
from course_lib.model import build_model, tiny_config

RANKS, BATCH, SEQ, STEPS = 4, 8, 64, 8
CONFIG = tiny_config(max_seq_len=SEQ)

model = build_model(CONFIG)
parameters = list(model.parameters())
P = sum(p.numel() for p in parameters)
print(f"{P:,} parameters in {len(parameters)} tensors, 4 bytes each; {CONFIG.layers} blocks")

# %%
predicted_growth = None  # bytes that a rank sends on 128 ranks, divided by the bytes on 64
predicted_calls = None  # all-reduces per step, one for each parameter tensor
predicted_bytes = None  # bytes that a rank sends per step
predicted_bytes_m4 = None  # the same, in a step of 4 micro-batches
predicted_exposed = None  # share of the communication that overlap cannot hide, 0 to 1
predicted_error = None  # relative error of the gradient when ranks with unequal tokens average

# %% [markdown]
# ## Divide by the global count, then sum
# Take a model with a single weight w = 1 and the loss (w x)², averaged over the rows x = 1, 2, 3, 4. The gradient of one
# row is 2 w x², so one process gets (2 + 8 + 18 + 32) / 4 = 15.
#
# Now give each of four ranks one row. If each divides by 4, the number of rows on *all* ranks, then the sum of the
# gradients is 15 again. This is the one law of this lesson: **divide by the global count, then sum**. Four ranks
# check it:

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
# ## From one call per parameter to buckets
# All ranks end with the sum of 15. For a model with many parameters, the simplest way is a loop after backward, with
# one call per gradient:

# %%
from course_lib import dp
from course_lib.view import show_source

show_source(dp.Naive.finish, dp._gradient)

# %% [markdown]
# `train_step` applies the law. It divides each loss by `tokens`, the number of tokens on all ranks, and
# `sync.finish()` sums the gradients. We come to `accumulate` later.

# %%
show_source(dp.train_step)

# %% [markdown]
# A message of S bytes takes about alpha + S/beta seconds, and for small tensors alpha dominates. We therefore copy
# many gradients into one flat tensor, a **bucket**, and send the same bytes in fewer messages. We fill buckets from
# the *last* parameter to the first, because backward computes the gradients roughly in this order. A bucket closes
# when it has `BUCKET` bytes or more:

# %%
BUCKET = 280_000  # bytes; a block of this small model has 197,120
buckets = comm.by_dtype_and_size(parameters[::-1], BUCKET)
for number, bucket in enumerate(buckets):
    print(f"bucket {number}: {len(bucket):2} tensors, {sum(p.nbytes for p in bucket):,} bytes")

# %% [markdown]
# ## Sending while backward still runs
# Three calls now replace 39. They can also start earlier, because autograd can call a hook as soon as the gradient of
# a parameter is complete. Here the hooks only record the order:

# %%
from course_lib.data import batch

place = {}  # parameter: how many gradients were complete before its own


def note(p):
    place[p] = len(place)


hooks = [p.register_post_accumulate_grad_hook(note) for p in parameters]
total, count = model.loss_sum(*batch(0, seed=0, batch_size=BATCH, seq_len=SEQ))
(total / count).backward()
for number, bucket in enumerate(buckets):
    full = 1 + max(place[p] for p in bucket)
    print(f"bucket {number} is full after {full} of {len(parameters)} gradients")
for hook in hooks:
    hook.remove()

# %% [markdown]
# Bucket 0 is full after 12 of the 39 gradients, and it can be sent while backward computes the rest. `dp.Overlapped`
# does this, and in exercise 03-4 you write it yourself. All ranks must send the buckets in one fixed order, even if a
# later bucket is full first. Collectives are matched by their order, so otherwise ranks could add the gradients of
# different layers.
#
# ## Same losses, same bytes
# The folded cell defines the training loop and runs eight steps in one process. The cell after it runs them on four
# ranks in three ways: one call per tensor, in buckets, and in buckets with overlap.

# %% jupyter={"source_hidden": true}
# Train in one process and on n ranks: losses, weights, calls, bytes and memory.
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
        mesh.ledger.clear()  # the ledger has the last step only
        with mesh.kernel_bytes() as kernel, SavedActivations(model) as saved:
            losses.append(dp.train_step(model.loss_sum, cut, sync, optimizer).item())
    counted = None if kernel.by_axis is None else kernel.by_axis["dp"]
    return report(model, optimizer, losses, saved) | {"kernel": counted}


def one_process():
    """The single-process reference: a plain loop, full batches, no ranks."""
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


def apart(result):
    """Largest difference from one process: of any loss, of any weight, on any rank."""
    theirs = torch.tensor([rank["losses"] for rank in result])
    losses = (theirs - torch.tensor(reference["losses"])).abs().max().item()
    weights = max((rank["weights"] - reference["weights"]).abs().max().item() for rank in result)
    return losses, weights


reference = run(one_process, n=1)[0]
print("loss of one process:", *(f"{loss:.3f}" for loss in reference["losses"]))

# %%
runs = {way: run(train, way, n=RANKS) for way in SYNCS}
formula = dp.wire_bytes(4 * P, RANKS)  # 2(n-1)/n times the bytes of the parameters

print(f"{'':10}{'':7}{'bytes per rank and step':^24}{'difference from one process':>30}")
print(f"{'':10}{'calls':>7}{'formula':>12}{'kernel':>12}{'loss':>15}{'weights':>15}")
for way, result in runs.items():
    own, kernel = result.ledgers[0], result[0]["kernel"]
    losses, weights = apart(result)
    counted = "no count" if kernel is None else f"{kernel:,}"
    print(f"{way:10}{own.calls():7}{int(formula):12,}{counted:>12}{losses:15.1e}{weights:15.1e}")
    assert own.wire_bytes() == formula
    assert kernel is None or formula < kernel < 1.1 * formula
    assert losses < 1e-5
    assert weights < 1e-4
print(f"you predicted {predicted_calls} calls and {predicted_bytes} bytes")

# %% [markdown]
# The losses and weights differ from one process by rounding only: the ranks add the same numbers in another order, and
# AdamW amplifies the difference. The kernel counts more bytes than the formula because gloo adds headers to each message,
# and the naive way sends the most messages. Now to the bet:

# %%
factors = {n: float(dp.wire_bytes(4 * P, n)) / (4 * P) for n in (2, 4, 64, 128, 1024)}
for n, factor in factors.items():
    print(f"{n:5} ranks: a rank sends {factor:.3f} times the bytes of the parameters")
print(f"128 ranks against 64: {factors[128] / factors[64]:.3f}; you predicted {predicted_growth}")

# %% [markdown]
# The answer is "about the same": each rank sends 0.8 % more, and the factor stays below 2. The number of tokens does
# not occur in the formula. What grows with n is the number of messages in sequence, 2(n-1), and each costs an alpha.
#
# ## What overlap hides
# The next step is *paced*, as in lesson 00: sleep pads the forward of each block to 15 ms and its backward to 30 ms, and
# an emulated link sends 15 MB/s with 0.5 ms per message. The lower line of each rank is the network.

# %% jupyter={"source_hidden": true}
# Run one paced step in each of the three ways.
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


def measured_exposed(traces):
    """Seconds per rank, without the two control messages of a step (token count and loss)."""
    spans, _ = read(traces)
    return summarize([span for span in spans if span.label != "control"]).exposed


def least_exposed(way, tries=3):
    """The best of several runs: a busy machine delays messages."""
    found = [run(one_step, way, n=RANKS, pace=PACE, links=NETWORK) for _ in range(tries)]
    return min(found, key=lambda result: measured_exposed(result.traces))


paced = {way: least_exposed(way) for way in SYNCS}


def picture(way, title):
    return timeline(paced[way].traces, title=title, conditions=Conditions(PACE, NETWORK))


picture("bucketed", "Bucketed: every rank waits for the gradients")

# %%
picture("overlapped", "Overlapped: buckets are sent while backward continues")

# %% [markdown]
# In the first picture, all buckets are sent after the last B box. In the second, two of the three start while
# backward still runs. Communication after the last B box is *exposed*: the ranks wait and have nothing to compute.
# (The unlabeled boxes at both ends are the token count and the loss.)
#
# We can compute this time. Bucket k starts when it is full and bucket k-1 has left the link, so after the start of
# backward it ends at
#
# $$\text{end}_k = \max(\text{full}_k,\ \text{end}_{k-1}) + 2(n-1)\,\text{alpha} + \frac{2(n-1)}{n}\,\frac{b_k}{\text{beta}}$$
#
# The exposed time lasts from the end of backward to the end of the last bucket:

# %% jupyter={"source_hidden": true}
# The exposed time by that formula, and as measured.
block_of = {p: index for index, block in enumerate(model.blocks) for p in block.parameters()}
block_of[model.embedding.token.weight] = 0  # right after block 0; norm and head come before block 3


def on_the_link(bucket):
    wire_bytes = dp.wire_bytes(sum(p.nbytes for p in bucket), RANKS)
    return 2 * (RANKS - 1) * LINK.alpha + float(wire_bytes) / LINK.beta


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


exposed = {way: measured_exposed(result.traces) for way, result in paced.items()}
print(f"{'exposed, ms':12}{'formula':>9}{'measured':>10}")
for way, seconds in exposed.items():
    print(f"{way:12}{1e3 * exposed_formula[way]:9.0f}{1e3 * seconds:10.0f}")
share = exposed_formula["overlapped"] / exposed_formula["bucketed"]
print(f"\noverlap cannot hide {share:.2f} of it, by formula; you predicted {predicted_exposed}")

# %% [markdown]
# The measured times are longer, because each collective waits for the slowest rank, and the naive way waits 39 times.
# Overlap leaves a tail, because the last bucket is full only when backward ends. Smaller buckets make the tail
# shorter, but each further bucket costs 2(n-1) alphas.
#
# ## Accumulate gradients, send once
# If the rows of a rank do not fit in memory, we split them into micro-batches and add up the gradients. Only the
# backward pass of the last micro-batch sends. The other backward passes run in a context, `sync.accumulate()`, that
# switches sending off; in DDP it is called `no_sync`. The folded cell compares this with sending after every micro-batch:

# %% jupyter={"source_hidden": true}
# Split the two rows of each rank into two micro-batches; send once, or each time.
CUTS = 2
accumulated = run(train, "overlapped", CUTS, n=RANKS)


def send_each_time():
    """What a sync after every micro-batch would send."""
    mesh = make_mesh()
    model = build_model(CONFIG, seed=0)
    sync = SYNCS["bucketed"](model, mesh.dp)
    for tokens, targets in zip(*(part.chunk(CUTS) for part in rows(0, mesh)), strict=True):
        model.loss_sum(tokens, targets)[0].backward()
        sync.finish()


print(f"{'':22}{'calls':>6}{'bytes sent':>14}{'saved activations':>19}   per rank")
for name, result in {"one backward": runs["overlapped"], "2 micro-batches": accumulated}.items():
    own = result.ledgers[0]
    print(f"{name:22}{own.calls():6}{int(own.wire_bytes()):14,}{result[0]['activations']:19,}")
own = run(send_each_time, n=RANKS).ledgers[0]
print(f"{'2, sent each time':22}{own.calls():6}{int(own.wire_bytes()):14,}")
assert apart(accumulated)[0] < 1e-5
print(f"\nany number of micro-batches sends {int(formula):,} bytes", end="; ")
print(f"you predicted {predicted_bytes_m4} for 4")

# %% [markdown]
# Two micro-batches need half the memory for activations and send the same bytes. Sending after each one sends twice
# as much, and here it is also wrong. The sum of the first micro-batch is still in `.grad` when the second all-reduce
# adds up all ranks, so the first micro-batch counts n times. DDP averages, so there a forgotten `no_sync` costs only
# time and bytes.

# %% [markdown]
# ## The mean is over tokens, not over ranks
# The loss ignores padding. In the next batch each row has 1 to 64 real tokens, so the ranks have different numbers of
# tokens. What happens if each rank takes the mean over its own tokens, and we average the ranks?

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
errors = {}
for rule in (EXACT, MEAN_OF_MEANS):
    result = run(uneven, rule, n=RANKS)
    errors[rule] = ((result[0][0] - truth).norm() / truth.norm()).item()
    print(f"{rule:26} relative error of the gradient {errors[rule]:.2g}")
print("tokens of each rank:", *(count for _, count in result), f"(one process: {tokens_in_all})")
print(f"you predicted {predicted_error}")

# %% [markdown]
# No error is raised, all ranks agree, and the gradient is off by 29 %. The mean of means gives every *rank* the same
# weight, but one process gives every *token* the same weight. DDP averages over ranks, so it makes this mistake unless
# you multiply your mean loss by n · (own tokens) / (tokens of all ranks).
#
# Clip gradients after the sum, too. Then all ranks have the same gradient and compute the same norm.
#
# ## The same in PyTorch
# `DistributedDataParallel` (DDP) broadcasts rank 0's weights, sends buckets from hooks, and averages over the ranks.
# Two more calls belong in the loop: `set_epoch` makes `DistributedSampler` shuffle anew, and `zero_grad` drops the
# old gradients.

# %%
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

batches = [batch(step, seed=0, batch_size=BATCH, seq_len=SEQ) for step in range(4)]
DATA = TensorDataset(*(torch.cat(part) for part in zip(*batches, strict=True)))  # 32 rows


def in_pytorch(set_epoch=True):
    dist.init_process_group("gloo")  # from the variables that torchrun sets
    sampler = DistributedSampler(DATA, shuffle=True, seed=0)
    loader = DataLoader(DATA, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    model = DDP(build_model(CONFIG, seed=dist.get_rank()))  # DDP broadcasts rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first_rows = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)  # otherwise every epoch has the order of the first
        first_rows.append(list(sampler)[:4])
        for tokens, targets in loader:
            optimizer.zero_grad()  # otherwise the gradients of all steps add up
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()  # DDP's hooks send here
            optimizer.step()
    dist.destroy_process_group()
    return flat(model.parameters()), first_rows


four, one = (run(in_pytorch, n=n, init=False) for n in (RANKS, 1))
difference = max((weights - one[0][0]).abs().max().item() for weights, _ in four)
assert difference < 1e-4
print(f"DDP on {RANKS} ranks and on one: weights differ by {difference:.1e} at most")
print("rows that rank 0 reads first, in epochs 0 and 1:", *four[0][1])
print("without set_epoch:", *run(in_pytorch, False, n=RANKS, init=False)[0][1])

# %% [markdown]
# On one rank and on four, DDP ends with the same weights up to rounding, because here all rows are equally long.
# Without `set_epoch` both epochs have the same order, and without the sampler every rank would read all rows.
#
# ## Break it and diagnose
# One of six runs is `"correct"`, and each of the others has one fault:
#
# - **no sync**: no rank calls `finish`
# - **n times**: each rank divides by its *own* tokens, and then the gradients are summed
# - **seeds**: one rank draws its weights from its own seed, and no rank broadcasts
# - **shapes**: one rank uses another bucket size
# - **skipped**: one rank finds no tokens in its rows and skips a step
#
# For each run, enter the cause, the collective that is missing or on which ranks disagree (`"all_reduce"`,
# `"broadcast"` or None), and the faulty rank (a number, `"all"`, or None if correct). An error report names the rank
# that died, which may be a neighbor of the faulty rank. Then set CHECKED = True and run both cells again.

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
from course_lib.launch import RankError

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
print(f"{'':15}{'bytes':>11}  {'norm of first gradient':^24} {'sum of last weights':^32}")
print(f"{'':4}{'loss':^11}{'per rank':>11}  {'divided by one process':^24} {'by rank':^32}")
for lab_run in lab:
    try:
        result = run(trained, lab_run, n=RANKS, timeout=5, checked=CHECKED)
    except RankError as error:
        print(f"{lab_run.letter}   {error.exception or error}")
        continue
    first, last = (sum(one["losses"][step] for one in result) / RANKS for step in (0, -1))
    norms = "".join(f"{one['norm'] / one_norm:6.2f}" for one in result)
    sums = "".join(f"{one['sum']:8.2f}" for one in result)
    sent = int(result.ledgers[0].wire_bytes())
    print(f"{lab_run.letter}{first:7.3f}{last:7.3f}{sent:11,}  {norms} {sums}")

# %% [markdown]
# <details><summary>How to read it</summary>
#
# - **No bytes, and all four sums differ**: *no sync*.
# - **One sum differs**: *seeds*, on that rank.
# - **Norm n times too large**: *n times*. AdamW hides this; SGD would take steps that are four times too long.
# - **A rank ended by a signal**: *shapes*. Checked mode lists the size that each rank was about to send.
# - **A deadline, one rank has returned**: *skipped*. A rank without tokens must still join every collective, with zeros.
# </details>

# %%
lab.grade(diagnosis)

# %% [markdown]
# ## When not to use it
# - **When the model does not fit.** Each rank stores all weights, gradients and optimizer states.
# - **When a larger batch no longer helps.** More ranks usually mean a larger batch. Beyond 8,192 images, ResNet-50 lost
#   accuracy (Goyal et al.).
# - **With few tokens per rank and a slow link.** Backward is then too short to hide the bytes.
#
# **Claim 1: only if** each rank divides by the tokens of all ranks, or all counts are equal. The model must also
# treat rows independently, which batch normalization does not.
#
# **Claim 2: false.** The last bucket is full only when backward ends. On a GPU, a collective also uses processors and
# memory bandwidth that the backward pass needs.

# %%
print(f"mean of means: off by {errors[MEAN_OF_MEANS]:.0%}; your vote: {vote_1}")
without, with_it = (1e3 * exposed[way] for way in ("bucketed", "overlapped"))
print(f"exposed without overlap {without:.0f} ms, with it {with_it:.0f} ms; your vote: {vote_2}")

# %% [markdown]
# **The table that grows.** State is parameters, gradients and AdamW's moments, in bytes.

# %%
print(f"{'per rank and step':18}{'state':>11}{'activations':>13}{'bytes sent':>12}{'exposed':>10}")
print(f"{'one process':18}{reference['state']:11,}{reference['activations']:13,}{0:12,}{0:7} ms")
for way, result in runs.items():
    state, activations = result[0]["state"], result[0]["activations"]
    sent, wait = int(result.ledgers[0].wire_bytes()), 1e3 * exposed[way]
    print(f"{'dp ' + way:18}{state:11,}{activations:13,}{sent:12,}{wait:7.0f} ms")

# %% [markdown]
# **Cheat-sheet.** A model of 7 billion parameters, gradients of 2 bytes, and a ring over links of 25 GB/s.


# %%
def cheat_sheet(billions):
    print("the law: divide by the tokens of all ranks, then sum; clip after the sum")
    print("per step: one all-reduce of all gradients, after the last micro-batch")
    print("hidden: the buckets that are full before backward ends; exposed: the tail\n")
    print(
        f"{'ranks':>7}{'GB sent per rank':>18}{'seconds':>9}{'messages in sequence per bucket':>33}"
    )
    for n in (1, 2, 8, 64, 1024):
        sent = float(dp.wire_bytes(2 * billions * 10**9, n))
        print(f"{n:7}{sent / 1e9:18.1f}{sent / 25e9:9.2f}{2 * (n - 1):33,}")


cheat_sheet(billions=7)

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Five exercises](../exercises/03_data_parallelism.ipynb) take 65 minutes.

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
# - `bytes, 4 micro-batches`: the same when the step has four micro-batches and sends once

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
# - The ranks' means are 5, 32 and 2: 39 in all, 13 on average. Rank 1 has one row of six but a third of the weight.
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
# bytes. `torch.cat`, `Tensor.split` and `Tensor.view_as` are useful. You write what `comm.flatten`,
# `comm.unflatten` and `comm.start_all_reduce_flat` do, so these refuse to run.


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
# The class below is data parallelism with overlap, but two of its methods are missing. Write `ready`, which autograd
# calls for each parameter, and `finish`. You need not change the rest.
#
# - Bucket 0 is sent first on every rank, then bucket 1, and so on, whatever the order in which the hooks fire: on
#   some ranks of the check a later bucket is full before an earlier one.
# - A bucket is sent as early as that allows, and never before all of its gradients are computed. `ready` waits for
#   nothing.
# - On one rank of the check no parameter of a bucket is used, so none of its hooks fires. The bucket is sent all the
#   same.
# - A backward inside `accumulate()` sends nothing, and its gradients do not count as complete.
# - After `finish` the next step can begin.
#
# The check looks at the gradients of three steps and at the weights after them, on groups of one to three ranks. It
# also looks at the calls: one all-reduce per bucket and step. Two moments are checked: when backward has computed its
# last gradient, and when it returns. At both, every bucket that may be sent must have been sent, and you must not
# have waited for any.


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
# **Exit questions.** Answer, then unfold.
#
# **1.** 7 billion parameters, gradients of 2 bytes, a ring of 64 ranks. What does a rank send per step?
#
# <details><summary>Answer</summary>
# 2 · 63/64 · 14 GB = 27.6 GB, for one sequence or a hundred.
# </details>
#
# **2.** You double the micro-batches per step. What happens to the bytes per step and per token?
#
# <details><summary>Answer</summary>
# The bytes per step stay the same, so the bytes per token halve.
# </details>
#
# **3.** Why does a rank not send each bucket as soon as it is full?
#
# <details><summary>Answer</summary>
# Hooks may run in different orders on different ranks. Collectives are matched by order, so ranks would then add
# different buckets.
# </details>
#
# **4.** The ranks agree and the bytes are right, but SGD diverges where one process did not. What do you check?
#
# <details><summary>Answer</summary>
# The gradient norm, against one process. If it is n times too large, each rank divided by its own tokens.
# </details>
#
# **5.** 20 % of the step is exposed communication. Name three changes that leave the gradient as it is.
#
# <details><summary>Answer</summary>
# The same batch on fewer ranks, another bucket size, a faster link.
# </details>
#
# **Sources.** Next: lesson 04 (ZeRO).
# - Li et al. 2020, *PyTorch Distributed*, [arXiv:2006.15704](https://arxiv.org/abs/2006.15704): section 3 describes
#   buckets and hooks.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, [arXiv:1706.02677](https://arxiv.org/abs/1706.02677).
# - PyTorch, [DistributedSampler](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler).
