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
#     lesson: '14'
# ---

# %% [markdown]
# # 14 The decision: from model and cluster to a layout
#
# *45 minutes to read and run, 70 to build.*

# %% [markdown]
# ## Your turn, and five questions to leave with
# [Four exercises](../exercises/14_the_decision.ipynb) take 70 minutes.

# %% [markdown] course={"ex": "14-1"}
# ## 14-1 Repair a chooser
# The function below went round with a study note. It takes sizes from the weights alone, assumes nodes of eight, and
# has no answer for 4, 12 or 20 GPUs. Repair it: return the sizes of the axes of the fastest layout that fits, or `None`
# if no layout fits. Axes that you leave out have size 1.
#
# | rule | |
# |---|---|
# | GPUs | tp x pp x cp x dp = `gpus`; ep uses the ranks of dp x cp, so it divides dp x cp |
# | tp | divides the heads. Its groups are neighbors inside a node: tp divides `per_node`, unless all `gpus` are in one node |
# | pp, dp, ep | pp divides the layers, dp the batch (in sequences), ep the experts |
# | cp | 2 cp divides the tokens of a sequence, unless cp is 1 |
# | memory | `needed(model, layout)` is at most 92 % of `memory` bytes |
#
# The time of a step is `seconds(model, layout, per_node)`; your layout may be 10 % slower than the fastest one. The cell
# below has both formulas and the 20 clusters that are graded. For each, the check also draws two others, with another
# model, memory and batch. `model` is a dict: `dense` counts the parameters outside the experts, `expert` those of one
# expert in all layers.

# %% course={"ex": "14-1", "role": "given"}
FLOPS, NODE, NETWORK = 400e12, 200e9, 25e9  # of a GPU; bytes per second inside and between nodes


def needed(model, layout):
    """Bytes on the fullest GPU: 18 per parameter with ZeRO-1, and saved activations under 1F1B."""
    tp, pp, cp, dp, ep = (layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp", "ep"))
    dense = model["dense"] / (tp * pp)
    experts = model["experts"] * model["expert"] / (tp * pp * ep)
    state = 6 * (dense + experts) + 12 * (dense + experts * ep) / (dp * cp)
    one = 34 * model["seq"] * model["hidden"] * model["layers"] / (tp * cp * pp)
    return state + min(pp, model["batch"] / dp) * one


def seconds(model, layout, per_node):
    """Seconds of a step in which only dp overlaps, with backward."""
    tp, pp, cp, dp, ep = (layout.get(axis, 1) for axis in ("tp", "pp", "cp", "dp", "ep"))
    tokens = model["batch"] * model["seq"] / (dp * cp)  # that a GPU of this replica reads
    active = model["dense"] + model["top_k"] * model["expert"]
    work = 6 * tokens * (active + model["layers"] * model["seq"] * model["hidden"]) / (tp * pp)
    computing = work / FLOPS
    one = 2 * tokens * model["hidden"]  # bytes of an activation of these tokens
    layers, data = model["layers"] / pp, dp * cp
    routed = NODE if tp * ep <= per_node else NETWORK
    summed = NODE if tp * data <= per_node else NETWORK
    own = (model["dense"] + model["experts"] * model["expert"] / ep) / (tp * pp)
    return (
        computing * (1 + (pp - 1) * dp / model["batch"])
        + layers * one * 8 * (tp - 1) / tp / NODE
        + layers * one * 6 * (cp - 1) / tp / NETWORK
        + layers * one * 4 * model["top_k"] * (ep - 1) / ep / tp / routed
        + (2 * one / tp / NETWORK if pp > 1 else 0)
        + max(0, 6 * (data - 1) / data * own / summed - computing * 2 / 3)
    )


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


COLUMNS = (
    "dense", "layers", "heads", "hidden", "seq", "batch", "experts", "expert", "top_k",
)  # fmt: skip
MODELS = {
    name: dict(zip(COLUMNS, (*row, 0, 0, 0)[:9], strict=True))
    for name, row in {
        "GPT-2 XL": (1_560_000_000, 48, 25, 1600, 1024, 960),
        "GPT-J": (6_050_000_000, 28, 16, 4096, 2048, 480),
        "7B": (6_740_000_000, 32, 32, 4096, 4096, 480),
        "13B": (13_000_000_000, 40, 40, 5120, 4096, 480),
        "33B": (32_500_000_000, 60, 52, 6656, 2048, 960),
        "70B": (70_600_000_000, 80, 64, 8192, 8192, 480),
        "175B": (175_000_000_000, 96, 96, 12288, 2048, 1536),
        "180B": (180_000_000_000, 80, 232, 14848, 2048, 1536),
        "8B, 128k": (8_030_000_000, 32, 32, 4096, 131072, 32),
        "70B, 128k": (70_600_000_000, 80, 64, 8192, 131072, 32),
        "8 experts": (1_600_000_000, 32, 32, 4096, 4096, 960, 8, 5_640_000_000, 2),
        "64 experts": (1_300_000_000, 27, 16, 2048, 4096, 1920, 64, 230_000_000, 1),
    }.items()
}
CLUSTERS = (  # model, GPUs, GPUs per node, GB per GPU
    ("GPT-2 XL", 4, 8, 16), ("7B", 4, 4, 80), ("13B", 4, 8, 80),
    ("GPT-2 XL", 12, 4, 16), ("7B", 12, 8, 40), ("13B", 12, 6, 80),
    ("7B", 20, 8, 40), ("13B", 20, 4, 40), ("13B", 20, 10, 16),
    ("GPT-J", 8, 8, 16), ("33B", 64, 8, 40), ("70B", 32, 8, 80), ("70B", 64, 8, 80),
    ("70B", 64, 4, 80), ("175B", 8, 8, 80), ("180B", 128, 8, 80),
    ("8B, 128k", 32, 8, 80), ("70B, 128k", 128, 8, 141),
    ("8 experts", 32, 8, 80), ("64 experts", 16, 8, 24),
)  # fmt: skip


# %% course={"ex": "14-1", "role": "answer"}
def choose(model, gpus, per_node, memory):
    """{"tp": 4, "pp": 2, "dp": 8}, also with cp and ep, or None if nothing fits."""
    # BEGIN SOLUTION
    best, least = None, float("inf")
    for tp in divisors(gpus):
        inside = per_node % tp == 0 or gpus <= per_node
        if model["heads"] % tp or not inside:
            continue
        for pp in divisors(gpus // tp):
            if model["layers"] % pp:
                continue
            for cp in divisors(gpus // (tp * pp)):
                dp = gpus // (tp * pp * cp)
                if model["batch"] % dp or (cp > 1 and model["seq"] % (2 * cp)):
                    continue
                for ep in divisors(dp * cp):
                    layout = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep}
                    if (model["experts"] or 1) % ep or needed(model, layout) > 0.92 * memory:
                        continue
                    took = seconds(model, layout, per_node)
                    if took < least:
                        best, least = layout, took
    return best
    # STUB
    # if 2 * (model["dense"] + model["experts"] * model["expert"]) < memory:
    #     return {"dp": gpus, "tp": 1, "pp": 1}  # the model fits on one GPU: data parallelism
    # per_node = 8
    # nodes = gpus // per_node
    # if nodes == 1:
    #     return {"dp": 1, "tp": gpus, "pp": 1}  # one node: tensor parallelism
    # return {"dp": 1, "tp": per_node, "pp": nodes}  # tp inside the nodes, pp across them
    # END SOLUTION


# %% course={"ex": "14-1", "role": "check"}
from course_lib.grading import check

check("14-1", choose)

# %% [markdown] course={"ex": "14-2"}
# ## 14-2 The peak of a step
# ZeRO-3 trains a model of several units, such as a layer each. `units` lists (weights, saved): the bytes of a unit's
# weights before sharding, and those of the activations that it saves for backward. Return the most bytes that a rank
# has in memory at one time, while any unit computes.
#
# - `shards` bytes, for weights, gradients and optimizer states, are in memory all the time.
# - Forward computes unit 0, 1, ... While unit k computes, its unsharded weights and the saved activations of
#   units 0 to k are in memory.
# - Backward computes the last unit first. While unit k computes, its unsharded weights, its unsharded gradient (as many
#   bytes as its weights), and the saved activations of units 0 to k are in memory. Then the gradient is
#   reduce-scattered, and weights, gradient and saved activations of unit k are freed.
# - With `reshard`, the unsharded weights are freed after each forward and gathered again in backward. Without it, they
#   stay from forward until the unit's own backward.
# - With `prefetch`, the weights of the unit that computes next in the same pass are gathered while unit k computes. In
#   backward without `reshard` there is nothing to gather, and backward's first unit is not gathered in forward.


# %% course={"ex": "14-2", "role": "answer"}
def peak(shards, units, prefetch, reshard):
    """Bytes at the fullest moment of forward and backward."""
    # BEGIN SOLUTION
    most = 0
    for k, (weights, _) in enumerate(units):
        live = shards + sum(saved for _, saved in units[: k + 1])
        live += weights if reshard else sum(weights for weights, _ in units[: k + 1])
        ahead = units[k + 1][0] if prefetch and k + 1 < len(units) else 0
        behind = units[k - 1][0] if prefetch and reshard and k > 0 else 0
        most = max(most, live + ahead, live + weights + behind)
    return most
    # STUB
    # return shards + sum(2 * weights + saved for weights, saved in units)  # the sum, not the peak
    # END SOLUTION


# %% course={"ex": "14-2", "role": "check"}
from course_lib.grading import check

check("14-2", peak)

# %% [markdown] course={"ex": "14-3"}
# ## 14-3 Axes on nodes
# Return the order of the axes, the fastest first, in which the fewest GB cross nodes. `sizes` has the size of each axis,
# `sent` the GB that a GPU sends over it in a step. Rank r is on node r // `per_node`. If at least one group of an axis
# has ranks in two nodes, count all GB of this axis, otherwise none. Sizes need not be powers of two, and a node may
# be smaller than an axis. Several orders may be right.


# %% course={"ex": "14-3", "role": "answer"}
def place(sizes, sent, per_node):
    """A list such as ["tp", "dp", "pp"]."""
    # BEGIN SOLUTION
    from itertools import permutations
    from math import prod

    world = prod(sizes.values())

    def crossing(order):
        total, stride = 0, 1
        for axis in order:
            block = stride * sizes[axis]
            nodes = {}
            for rank in range(world):
                group = rank // block, rank % stride
                nodes.setdefault(group, set()).add(rank // per_node)
            if any(len(found) > 1 for found in nodes.values()):
                total += sent[axis]
            stride = block
        return total

    return list(min(permutations(sizes), key=crossing))
    # STUB
    # return list(sizes)
    # END SOLUTION


# %% course={"ex": "14-3", "role": "check"}
from course_lib.grading import check

check("14-3", place)

# %% [markdown] course={"ex": "14-4"}
# ## 14-4 What helps most
# `parts` splits a step into seconds: `forward`, `backward`, `recompute`, `bubble`, and what is exposed of `tp`, `cp`, `pp`
# and `dp`. You may make one change. Return its name and the seconds of the new step: the change with the shortest step,
# or `"none"` if no change makes the step shorter.
#
# | change | effect |
# |---|---|
# | `"network"` | twice the bandwidth between nodes halves each axis whose entry in `links` is `"network"` |
# | `"no recompute"` | removes `recompute`. The bubble shrinks with forward + backward + recompute, in proportion. This needs `saved` GB of memory; `free` GB are there, and otherwise the change is impossible |
# | `"chunks"` | two chunks per rank halve the bubble and double `pp` |
# | `"overlap"` | dp runs at the same time as `backward`; what is longer than backward stays exposed |


# %% course={"ex": "14-4", "role": "answer"}
def helps(parts, links, saved, free):
    """(change, seconds of the new step)"""
    # BEGIN SOLUTION
    step = sum(parts.values())
    computing = parts["forward"] + parts["backward"] + parts["recompute"]
    found = {
        "none": step,
        "network": step - sum(parts[axis] for axis in links if links[axis] == "network") / 2,
        "chunks": step - parts["bubble"] / 2 + parts["pp"],
        "overlap": step - min(parts["dp"], parts["backward"]),
    }
    if saved <= free:
        found["no recompute"] = step - parts["recompute"] * (1 + parts["bubble"] / computing)
    best = min(found, key=found.get)
    return best, found[best]
    # END SOLUTION


# %% course={"ex": "14-4", "role": "check"}
from course_lib.grading import check

check("14-4", helps)
