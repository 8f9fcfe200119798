"""Flat buckets, without ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm
from course_lib.mesh import make_mesh


def test_flatten_copies_and_unflatten_does_not():
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0), torch.empty(0, 4)]
    flat = comm.flatten(tensors)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 7]
    pieces = comm.unflatten(flat, tensors)
    assert all(map(torch.equal, pieces, tensors))
    flat.zero_()
    assert tensors[1] == 7, "the caller's tensors are his"
    assert pieces[1] == 0, "pieces are views: nothing is copied back"


def test_a_flat_bucket_holds_one_dtype():
    with pytest.raises(ValueError, match=r"torch.float32.*torch.int64"):
        comm.flatten([torch.ones(1), torch.ones(1, dtype=torch.int64)])


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12),
    limit=st.integers(1, 100),
)
def test_buckets_hold_every_tensor_once_in_order(sizes, limit):
    dtypes = {True: torch.float64, False: torch.float32}
    tensors = [torch.zeros(size, dtype=dtypes[wide]) for size, wide in sizes]
    buckets = comm.by_dtype_and_size(tensors, limit)
    for dtype in dtypes.values():
        packed = [id(one) for bucket in buckets for one in bucket if one.dtype == dtype]
        assert packed == [id(one) for one in tensors if one.dtype == dtype]
    for bucket in buckets:
        assert len({one.dtype for one in bucket}) == 1
        assert sum(one.nbytes for one in bucket[:-1]) < limit, "closed by the one that fills it"
    open_at_the_end = [b for b in buckets if sum(one.nbytes for one in b) < limit]
    assert len(open_at_the_end) <= len({one.dtype for one in tensors})


def test_a_bucket_needs_a_size():
    with pytest.raises(ValueError, match="0 bytes"):
        comm.by_dtype_and_size([], 0)


def test_a_flat_gather_on_one_rank_copies_and_names_shapes_that_do_not_fit():
    axis, full = make_mesh().dp, torch.zeros(4)
    view = full[:2]
    assert comm.start_all_gather_flat(full, torch.arange(4.0), axis).wait() is full
    assert view.tolist() == [0, 1]
    for shape in [(2,), (4, 1)]:
        with pytest.raises(ValueError, match=r"dp of 1 ranks.*1 times the elements of the shard"):
            comm.start_all_gather_flat(full, torch.zeros(shape), axis)
