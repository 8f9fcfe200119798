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
#     lesson: '06b'
# ---

# %% [markdown]
# # 06b Vocabulary, dropout seeds and grouped queries
#
# *Untimed.* This deep dive belongs to [lesson 06](06_sequence_parallelism.ipynb) and takes about 15 minutes. It builds
# three details. A mistake in any of them raises no error, and the model still trains.
#
# ## A loss without gathered logits
# For 8,192 tokens and the 128,256 words of Llama 3, the logits take 4.2 GB in float32. Tensor parallelism therefore
# shards the vocabulary too. It is padded to a multiple of the number of ranks n, and each rank stores 1/n of the
# embedding and of the LM head.
#
# The embedding returns zeros for the words of other ranks, so the sum over the ranks gives x. The head computes on each
# rank the logits z of its own words. The loss of a token, with a sum over all words v, is
#
# $$\text{loss} = \log \sum_v e^{z_v - m} + m - z_\text{target} \qquad \text{with } m = \max_v z_v$$
#
# How many bytes does a rank send for the loss?

# %%
import torch
import torch.nn.functional as F

from course_lib import comm, sp, tp
from course_lib.data import batch
from course_lib.launch import run
from course_lib.ledger import wire
from course_lib.mesh import make_mesh
from course_lib.model import build_model, loss_sum, tiny_config
from course_lib.tp import formulas
from course_lib.view import show_source

RANKS, BATCH, SEQ = 4, 8, 64
TOKENS = BATCH * SEQ
WORDS = tiny_config(family="gpt", hidden=64, heads=8, kv_heads=8, ffn=256, vocab=258, layers=1)
tokens, targets = batch(0, seed=0, batch_size=BATCH, seq_len=SEQ)
torch.manual_seed(0)
x_BSD = torch.randn(BATCH, SEQ, WORDS.hidden)

predicted_loss = None  # bytes that a rank sends for the loss of 512 tokens and 258 words

# %% [markdown]
# We compute the loss on four ranks, and compare it with one process. 258 words need 2 words of padding:


# %%
def by_words():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(WORDS), mesh.tp)
    logits = model.head(x_BSD)
    mesh.ledger.clear()
    total, _ = model.cross_entropy(logits, targets)
    calls = [(record.op, record.payload) for record in mesh.ledger.select("tp")]
    padding = int(torch.isinf(logits[0, 0]).sum())
    return {"loss": total.item(), "logits": list(logits.shape), "padding": padding, "calls": calls}


result = run(by_words, n=RANKS)
logits = build_model(WORDS).head(x_BSD)
full, _ = loss_sum(logits, targets)
for rank, found in enumerate(result):
    assert abs(found["loss"] / full.item() - 1) < 1e-5
    print(f"rank {rank}: logits {found['logits']}, {found['padding']} of its words are padding")
print(f"calls: {result[0]['calls']}")
sent = result.ledgers[0].wire_bytes()
gathered = wire("all_gather", TOKENS * result[0]["logits"][-1] * 4, RANKS)
assert sent == formulas.loss_bytes(WORDS, TOKENS, RANKS)
print(
    f"sent {int(sent):,} bytes; you predicted {predicted_loss}; gathering logits {int(gathered):,}"
)

unmasked, _ = loss_sum(F.pad(logits, (0, 2)), targets)
print(f"loss per token {full / TOKENS:.4f}; if padding had the logit 0: {unmasked / TOKENS:.4f}")

# %% [markdown]
# A rank contributes one number per token to each of three all-reduces: the maximum m, the sum, and the target's logit, for
# which all other ranks contribute 0. Backward sends nothing, because each rank computes softmax minus one-hot for its own
# words. The last line shows why padding has minus infinity as its logit. With the logit 0, padding would have some
# probability.
#
# ## One seed, or one per rank?
# With tensor parallelism, all ranks have the same activations outside the regions, so all must drop the same elements.
# With sequence parallelism they have different rows, and equal masks would drop the same places of every shard. Inside a
# region, as in the dropout of attention weights, masks must differ too; our model has no dropout there.
#
# For sequence parallelism, `tp.RankDropout` draws a seed from the common random stream and combines it with the rank:

# %%
show_source(tp.RankDropout.forward)
DROPS = tiny_config(layers=1, dropout=0.3)
REGIONS = {"tensor": tp.REGION, "rows, kept": sp.REGION}


def dropped(way, skewed):
    axis = make_mesh(tp=2).tp
    block = tp.parallelize(build_model(DROPS), axis, REGIONS[way]).blocks[0]
    torch.manual_seed(4 + skewed * axis.rank)
    mask = block.dropout(torch.ones(24)) == 0
    return "".join("x" if one else "." for one in mask), f"{torch.rand(()).item():.4f}"


print()
for way, skewed in (("tensor", False), ("rows, kept", False), ("tensor", True)):
    masks = run(dropped, way, skewed, n=2)
    for rank, (mask, following) in enumerate(masks):
        name = f"{way}{', seeded by rank' * skewed}"
        print(f"{name:24} rank {rank}: {mask}  next of the common stream {following}")
    assert (masks[0][0] == masks[1][0]) == (way == "tensor" and not skewed)

# %% [markdown]
# In the second pair the masks differ, and the next number of the common stream is still equal. The third pair shows a
# common mistake, `manual_seed(seed + rank)` with tensor parallelism. The masks differ, so the ranks no longer have the
# same x.
#
# ## Fewer heads of keys and values than ranks
# With grouped queries, 8 query heads may share 2 heads of keys and values. On four ranks, each of these 2 heads is
# replicated on two ranks, its *KV replication group*. Each rank uses the head for its own queries only, so the gradients
# must be summed over the group:

# %%
GROUPED = tiny_config(layers=1, heads=8, kv_heads=2)


def shared_heads():
    mesh = make_mesh(tp=RANKS)
    model = tp.parallelize(build_model(GROUPED), mesh.tp)
    total, _ = model.loss_sum(tokens, targets)
    total.backward()
    k = model.blocks[0].attn.k.weight
    before = k.grad.clone()
    mesh.ledger.clear()
    tp.sum_shared_gradients(comm.held_gradients(model.parameters()))
    return {"group": comm.shard_spec(k).kv_group.ranks, "before": before, "after": k.grad}


reference = build_model(GROUPED)
reference.loss_sum(tokens, targets)[0].backward()
heads = reference.blocks[0].attn.k.weight.grad.chunk(2)
result = run(shared_heads, n=RANKS)
for rank, found in enumerate(result):
    right = heads[rank // 2]
    off = [((found[when] - right).norm() / right.norm()).item() for when in ("before", "after")]
    print(f"rank {rank}: k {list(right.shape)}, group {found['group']}; gradient off by", end="")
    print(f" {off[0]:.2f} before the sum, {off[1]:.0e} after")
    assert off[1] < 1e-3 < off[0]
sent = result.ledgers[0].wire_bytes()
print(f"{int(sent):,} bytes per rank")
assert sent == formulas.shared_head_bytes(GROUPED, RANKS)

# %% [markdown]
# Before the sum, every rank has a wrong gradient. Without it, the two copies of a head would drift apart.
#
# **Sources.** [Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053) shard the vocabulary and the loss. [Ainslie et al.
# 2023](https://arxiv.org/abs/2305.13245) introduce grouped queries.
