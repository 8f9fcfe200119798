"""Under tensor parallelism a number outside the vocabulary is an error, as in one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from course_lib import tp
from course_lib.launch import RankError
from course_lib.mesh import Axis, make_mesh
from course_lib.model import IGNORE_INDEX, ModelConfig, build_model
from course_lib.tp import layers

VOCAB = 258  # 4 ranks pad it to 260: 258 and 259 have rows
CONFIG = ModelConfig(
    layers=1, hidden=8, heads=4, kv_heads=4, ffn=8, max_seq_len=4, vocab=VOCAB, dtype=torch.float64
)


def loss_with(number, where):
    """The loss of one batch in which one token or target is ``number``; cut over all ranks."""
    mesh = make_mesh(tp=make_mesh().world.size)
    model = build_model(CONFIG)
    if mesh.tp.size > 1:
        tp.parallelize(model, mesh.tp)
    batch = {"token": torch.zeros(2, 4).long(), "target": torch.ones(2, 4).long()}
    batch[where][1, 2] = number
    return model.loss_sum(batch["token"], batch["target"])[0].detach()


@pytest.mark.parametrize("where", ["token", "target"])
@pytest.mark.parametrize("number", [VOCAB, VOCAB + 1, VOCAB + 2, 70_000, -1, -100_000])
def test_a_number_outside_is_an_error_on_every_rank_as_in_one_process(worlds, where, number):
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        loss_with(number, where)
    with pytest.raises(
        RankError, match=rf"IndexError: axis tp, rank \d: .* target {number} is"
    ) as told:
        worlds(4).run(loss_with, number, where)
    assert "257" in str(told.value), "the last word is said"


@pytest.mark.parametrize(
    ("number", "where"), [(0, "token"), (257, "token"), (257, "target"), (IGNORE_INDEX, "target")]
)
def test_what_one_process_takes_is_taken(worlds, number, where):
    want = loss_with(number, where)
    for got in worlds(4).run(loss_with, number, where):
        assert torch.allclose(got, want, rtol=1e-12)


def test_a_rank_that_would_not_look_has_a_number_instead(worlds):
    """What the refusal is for: without it the loss of a token that does not exist is finite."""

    def rank():
        with mock.patch("course_lib.tp.layers._refuse_outside"):
            return loss_with(70_000, "token")

    assert all(loss.isfinite() for loss in worlds(4).run(rank))


def test_on_a_gpu_the_device_is_not_waited_for():
    """A tensor that is on a GPU by name, and would not say on the CPU what is in it."""

    class OnGpu:
        is_cuda = True

        def any(self):
            return torch.tensor(True)

    with mock.patch.object(torch, "_assert_async") as told:
        layers._refuse_outside(OnGpu(), None, VOCAB, Axis("tp", 1, 4, (0, 1, 2, 3)))
    holds, why = told.call_args.args
    assert not holds
    assert why == "a token or target is outside 0..257"
    with pytest.raises(RuntimeError, match=r"outside 0\.\.257"):
        torch._assert_async(holds, why)
