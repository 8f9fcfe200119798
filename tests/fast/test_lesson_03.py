"""The table of 03-1 is what the library computes from the numbers in the exercise's text."""

from __future__ import annotations

from statistics import mean

import torch

from course_lib import comm, dp
from course_lib.grading import registry

# The numbers of the exercise's text.
ROWS = ((1, 2), (4,), (1, 1, 1))  # x of each rank
TENSORS = {"a": 400, "b": 2000, "c": 800, "d": 1200, "e": 600}  # bytes, in the model's order
LIMIT, RANKS = 2000, 4
HOOKS = "ecbda"  # the order in which gradients are complete
BY_HAND = registry.find("03-1")


def test_the_gradients_worked_by_hand():
    own, means = [], []
    for rows in ROWS:
        w = torch.ones((), requires_grad=True)
        total = sum((w * x) ** 2 for x in rows)
        own.append(torch.autograd.grad(total, w)[0].item())
        means.append(own[-1] / len(rows))
    assert BY_HAND.wanted["own"] == own
    assert BY_HAND.wanted["law"] == sum(own) / sum(map(len, ROWS))
    assert BY_HAND.wanted["mean of means"] == mean(means)
    assert BY_HAND.wanted["n times"] == sum(means)


def test_the_buckets_worked_by_hand():
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in TENSORS.items()}
    buckets = comm.by_dtype_and_size(list(tensors.values())[::-1], LIMIT)
    names = {id(tensor): name for name, tensor in tensors.items()}
    words = ["".join(names[id(tensor)] for tensor in bucket) for bucket in buckets]
    assert BY_HAND.wanted["buckets"] == " ".join(words)

    missing, leaves = [set(word) for word in words], []
    for name in HOOKS:
        for bucket in missing:
            bucket.discard(name)
        while len(leaves) < len(missing) and not missing[len(leaves)]:
            leaves.append(name)
    assert BY_HAND.wanted["leaves"] == " ".join(leaves)

    sent = dp.wire_bytes(sum(TENSORS.values()), RANKS)
    assert BY_HAND.wanted["bytes"] == BY_HAND.wanted["bytes, 4 micro-batches"] == sent
