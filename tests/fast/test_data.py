"""Text and batches: the same for any number of ranks."""

from __future__ import annotations

import hashlib
from importlib.resources import files

import pytest
import torch

from course_lib.data import TEXT, batch, corpus, decode, encode, ignore_after
from course_lib.model import IGNORE_INDEX

SIZES = {"seed": 0, "batch_size": 8, "seq_len": 16}
GOLDEN = ["t be hid.\nNeither do men", ", with Isaac, and with J"]


def test_the_text_is_the_one_whose_provenance_is_told():
    folder = files("course_lib").joinpath("text")
    raw = folder.joinpath(TEXT).read_bytes()
    provenance = folder.joinpath("PROVENANCE.md").read_text()
    assert len(raw) >= 300_000
    assert raw.isascii()
    assert hashlib.sha256(raw).hexdigest() in provenance
    assert f"{len(raw):,} bytes" in provenance
    assert "public domain" in provenance
    assert bytes(corpus().tolist()) == raw


def test_encode_and_decode_are_inverse():
    text = "In the beginning — שלום\n"
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert len(tokens) == len(text.encode()) > len(text)
    assert decode(tokens) == text
    assert decode(encode("")) == ""
    assert decode(corpus()[:7]) == "GENESIS"


def test_decode_of_half_a_character_and_of_padding():
    assert decode(encode("é")[:1]) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(ValueError, match="got token 256"):
        decode(torch.tensor([65, 256]))


def test_targets_are_the_next_tokens_of_the_text():
    tokens, targets = batch(3, **SIZES)
    assert tokens.shape == targets.shape == (8, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    raw = bytes(corpus().tolist())
    for row in range(8):
        assert bytes([*tokens[row].tolist(), targets[row, -1].item()]) in raw


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("shortest", [None, 1])
def test_all_ranks_together_read_what_one_process_reads(dp_size, shortest):
    whole = batch(5, **SIZES, shortest=shortest)
    shares = [
        batch(5, **SIZES, shortest=shortest, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    for expected, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert {len(part) for part in parts} == {8 // dp_size}
        assert torch.equal(torch.cat(parts), expected)


def test_a_batch_follows_from_seed_and_step_alone():
    torch.manual_seed(1)
    first, _ = batch(2, **SIZES)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(batch(2, **SIZES)[0], first)
    assert torch.equal(torch.get_rng_state(), state)
    others = [batch(3, **SIZES), batch(2, **{**SIZES, "seed": 1})]
    # torch keeps 32 bits of a seed; ours must not
    others.append(batch(2, **{**SIZES, "seed": 2**32}))
    assert not any(torch.equal(tokens, first) for tokens, _ in others)


def test_batches_are_the_same_on_every_machine():
    tokens, _ = batch(0, seed=0, batch_size=2, seq_len=24)
    assert [decode(row) for row in tokens] == GOLDEN


def test_rows_of_uneven_length_count_different_numbers_of_tokens():
    tokens, targets = batch(1, **SIZES, shortest=4)
    full_tokens, full_targets = batch(1, **SIZES)
    counted = targets != IGNORE_INDEX
    lengths = counted.sum(1)
    assert torch.equal(tokens, full_tokens)
    assert torch.equal(targets[counted], full_targets[counted])
    assert torch.equal(counted, torch.arange(16) < lengths[:, None])
    assert 4 <= lengths.min() < lengths.max() <= 16
    halves = [
        (batch(1, **SIZES, shortest=4, dp_rank=rank, dp_size=2)[1] != IGNORE_INDEX).sum()
        for rank in range(2)
    ]
    assert halves[0] != halves[1]


def test_ignore_after_leaves_its_input_alone():
    targets = torch.arange(6).reshape(2, 3)
    cut = ignore_after(targets, torch.tensor([0, 2]))
    assert cut.tolist() == [[IGNORE_INDEX] * 3, [3, 4, IGNORE_INDEX]]
    assert targets.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="one length per row"):
        ignore_after(targets, torch.tensor([1, 2, 3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 3}, "dp=3 to divide batch_size, .* got batch_size=8"),
        ({"dp_size": 2, "dp_rank": 2}, "dp_rank from 0 to 1, got dp_rank=2"),
        ({"dp_rank": -1}, "got dp_rank=-1"),
        ({"dp_size": 0}, "dp_size=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seq_len": 10_000_000}, "seq_len=10000000"),
        ({"step": -1}, "step=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"shortest": 0}, "shortest=0"),
        ({"shortest": 17}, "shortest=17"),
    ],
)
def test_batch_refuses_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        batch(**{"step": 0, **SIZES, **changes})


def test_the_longest_sequence_is_the_whole_text():
    tokens, targets = batch(0, seed=0, batch_size=1, seq_len=len(corpus()) - 1)
    assert torch.equal(tokens[0], corpus()[:-1].long())
    assert targets[0, -1] == corpus()[-1]
