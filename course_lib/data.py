"""Byte tokens of a real text, and batches that do not depend on how many ranks read them.

Letters in names: B sequences, S positions. A token is a byte, 0..255. See ``text/PROVENANCE.md``.
"""

from __future__ import annotations

import random
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from course_lib.model import IGNORE_INDEX

TEXT = "kjv.txt"


@cache
def corpus() -> Tensor:
    """The shipped text as tokens, uint8, one dimension. It is shared: do not write to it."""
    return torch.frombuffer(
        bytearray(files("course_lib").joinpath("text", TEXT).read_bytes()), dtype=torch.uint8
    )


def encode(text: str) -> Tensor:
    """The UTF-8 bytes of ``text`` as tokens (S), int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens_S: Tensor) -> str:
    """The text of tokens (S). Bytes that are no UTF-8 become the replacement character.

    Raises ValueError for a token above 255: a padded vocabulary has them, no text does.
    """
    tokens = tokens_S.tolist()
    for token in tokens:
        if not 0 <= token <= 255:
            raise ValueError(
                f"token {token} is no byte (0..255); if the vocabulary is padded, mask the logits "
                "of the padding before choosing a token"
            )
    return bytes(tokens).decode(errors="replace")


def batch(
    step: int,
    *,
    seed: int,
    batch_size: int,
    seq_len: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    shortest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch of ``step``: tokens (B, S) and targets (B, S), int64.

    ``batch_size`` counts the sequences of all ranks together. The whole batch follows from
    (seed, step) alone; rank r of n takes rows r*b to (r+1)*b, b = batch_size / n, so that all
    ranks together read exactly what one process would read. A target is the next token.

    With ``shortest`` each row has a random length from ``shortest`` to ``seq_len``, and targets
    past it are IGNORE_INDEX: ranks then count different numbers of tokens.
    Raises ValueError when the ranks cannot share the rows evenly or a size is out of range.
    """
    _check(step, seed, batch_size, seq_len, dp_rank, dp_size, shortest)
    text = corpus()
    # Seeded by a string: torch keeps 32 bits of a seed, too few for both numbers side by side
    generator = random.Random(f"seed {seed} step {step}")
    starts = [generator.randrange(len(text) - seq_len) for _ in range(batch_size)]
    lengths = [generator.randint(shortest or seq_len, seq_len) for _ in range(batch_size)]
    rows = batch_size // dp_size
    mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
    windows = torch.stack([text[start : start + seq_len + 1] for start in starts[mine]]).long()
    targets_BS = ignore_after(windows[:, 1:], torch.tensor(lengths[mine]))
    return windows[:, :-1].contiguous(), targets_BS


def ignore_after(targets_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """Targets with IGNORE_INDEX in row b from column ``lengths_B[b]`` on; a new tensor."""
    if lengths_B.shape != targets_BS.shape[:1]:
        raise ValueError(
            f"{tuple(lengths_B.shape)} lengths for targets of shape {tuple(targets_BS.shape)}: "
            "one length a row is wanted"
        )
    columns_S = torch.arange(targets_BS.shape[1], device=targets_BS.device)
    return targets_BS.masked_fill(columns_S >= lengths_B[:, None], IGNORE_INDEX)


def _check(
    step: int,
    seed: int,
    batch_size: int,
    seq_len: int,
    dp_rank: int,
    dp_size: int,
    shortest: int | None,
) -> None:
    if step < 0 or seed < 0:
        raise ValueError(f"step={step}, seed={seed}: both are counted from 0")
    if batch_size < 1 or dp_size < 1:
        raise ValueError(f"batch_size={batch_size}, dp_size={dp_size}: both must be 1 or more")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp rank {dp_rank}: there are {dp_size} ranks, 0..{dp_size - 1}")
    if batch_size % dp_size:
        raise ValueError(
            f"batch_size={batch_size} cannot be divided among dp={dp_size} ranks; batch_size "
            f"counts the sequences of all ranks: take a multiple of {dp_size}"
        )
    if not 1 <= seq_len < len(corpus()):
        raise ValueError(f"seq_len={seq_len}: 1..{len(corpus()) - 1} tokens are there to take")
    if shortest is not None and not 1 <= shortest <= seq_len:
        raise ValueError(f"shortest={shortest}: a length from 1 to seq_len={seq_len} is wanted")
