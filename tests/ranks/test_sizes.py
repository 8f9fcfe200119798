"""The world sizes that the README says were seen in each CI run."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from course_lib import comm
from course_lib.launch import run
from course_lib.mesh import make_mesh


def sum_and_groups():
    mesh = make_mesh(tp=1)
    total = comm.all_reduce(torch.tensor([2.0**mesh.rank]), mesh.dp)
    return total.item(), mesh.dp.ranks


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_every_rank_is_in_the_sum_once(n):
    results = run(sum_and_groups, n=n)
    assert list(results) == [(2.0**n - 1, tuple(range(n)))] * n
    sent = [ledger.wire_bytes("dp") for ledger in results.ledgers]
    assert sent == [Fraction(4 * 2 * (n - 1), n)] * n  # 4 bytes; 0 for one rank


def test_sixteen_ranks_on_three_axes():
    """The 16-GPU layout with real groups: each rank sums over its pp group."""

    def pipeline_sum():
        mesh = make_mesh("tp-dp-pp", tp=2, dp=2, pp=4)
        return comm.all_reduce(torch.tensor([mesh.rank]), mesh.pp).item()

    groups = {0: [0, 4, 8, 12], 1: [1, 5, 9, 13], 2: [2, 6, 10, 14], 3: [3, 7, 11, 15]}
    assert list(run(pipeline_sum, n=16)) == [sum(groups[rank % 4]) for rank in range(16)]
