"""The table of 03-1 is what the library computes from the numbers in the exercise's text."""

from __future__ import annotations

from statistics import mean

import torch

from course_lib import comm, dp
from course_lib.grading.lessons.lesson_03 import by_hand


def test_the_gradients_worked_by_hand():
    own, means = [], []
    for rows in by_hand.ROWS:
        w = torch.ones((), requires_grad=True)
        total = sum((w * x) ** 2 for x in rows)
        own.append(torch.autograd.grad(total, w)[0].item())
        means.append(own[-1] / len(rows))
    assert by_hand.WANTED["own"] == own
    assert by_hand.WANTED["law"] == sum(own) / sum(map(len, by_hand.ROWS))
    assert by_hand.WANTED["mean of means"] == mean(means)
    assert by_hand.WANTED["n times"] == sum(means)


def test_the_buckets_worked_by_hand():
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in by_hand.TENSORS.items()}
    buckets = comm.by_dtype_and_size(list(tensors.values())[::-1], by_hand.LIMIT)
    names = {id(tensor): name for name, tensor in tensors.items()}
    words = ["".join(names[id(tensor)] for tensor in bucket) for bucket in buckets]
    assert by_hand.WANTED["buckets"] == " ".join(words)

    missing, leaves = [set(word) for word in words], []
    for name in by_hand.HOOKS:
        for bucket in missing:
            bucket.discard(name)
        while len(leaves) < len(missing) and not missing[len(leaves)]:
            leaves.append(name)
    assert by_hand.WANTED["leaves"] == " ".join(leaves)

    sent = dp.wire_bytes(sum(by_hand.TENSORS.values()), by_hand.RANKS)
    assert by_hand.WANTED["bytes"] == by_hand.WANTED["bytes, 4 micro-batches"] == sent
