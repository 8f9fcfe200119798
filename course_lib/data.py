"""Byte tokens of a real text, and batches that do not depend on the number of ranks.

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
    """Return the shipped text as tokens, uint8, one dimension. It is cached: do not write to it."""
    return torch.frombuffer(
        bytearray(files("course_lib").joinpath("text", TEXT).read_bytes()), dtype=torch.uint8
    )


def encode(text: str) -> Tensor:
    """Return the UTF-8 bytes of ``text`` as tokens (S), int64."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens_S: Tensor) -> str:
    """Return the text of tokens (S). Invalid UTF-8 becomes the replacement character.

    Raises ValueError for a token above 255, which only a padded vocabulary has.
    """
    tokens = tokens_S.tolist()
    for token in tokens:
        if not 0 <= token <= 255:
            raise ValueError(
                f"expected byte tokens (0..255), got token {token}; if the vocabulary is padded, "
                "mask the logits of the padding before you choose a token"
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
    """Return this rank's rows of the batch of ``step``: tokens and targets (B, S), int64.

    ``batch_size`` counts the sequences of all ranks together. The whole batch depends only on
    (seed, step). Rank r of n takes rows r*b to (r+1)*b with b = batch_size / n, so that all ranks
    together read the same rows as one process. A target is the next token.

    With ``shortest``, each row has a random length from ``shortest`` to ``seq_len``, and targets
    after it are IGNORE_INDEX, so that ranks count different numbers of tokens.
    Raises ValueError if dp_size does not divide batch_size or a size is out of range.
    """
    _check_sizes(batch_size, seq_len, dp_rank, dp_size)
    if step < 0 or seed < 0:
        raise ValueError(f"expected step and seed of 0 or more, got step={step}, seed={seed}")
    if shortest is not None and not 1 <= shortest <= seq_len:
        raise ValueError(f"expected shortest from 1 to seq_len={seq_len}, got shortest={shortest}")
    text = corpus()
    # Seeded by a string, because torch's seed of 32 bits is too small for both numbers.
    generator = random.Random(f"seed {seed} step {step}")
    starts = [generator.randrange(len(text) - seq_len) for _ in range(batch_size)]
    lengths = [generator.randint(shortest or seq_len, seq_len) for _ in range(batch_size)]
    rows = batch_size // dp_size
    mine = slice(dp_rank * rows, (dp_rank + 1) * rows)
    windows = torch.stack([text[start : start + seq_len + 1] for start in starts[mine]]).long()
    targets_BS = ignore_after(windows[:, 1:], torch.tensor(lengths[mine]))
    return windows[:, :-1].contiguous(), targets_BS


def ignore_after(targets_BS: Tensor, lengths_B: Tensor) -> Tensor:
    """Return a copy of the targets with IGNORE_INDEX in row b from column ``lengths_B[b]`` on."""
    if lengths_B.shape != targets_BS.shape[:1]:
        raise ValueError(
            f"expected one length per row of targets of shape {tuple(targets_BS.shape)}, got "
            f"lengths of shape {tuple(lengths_B.shape)}"
        )
    columns_S = torch.arange(targets_BS.shape[1], device=targets_BS.device)
    return targets_BS.masked_fill(columns_S >= lengths_B[:, None], IGNORE_INDEX)


def _check_sizes(batch_size: int, seq_len: int, dp_rank: int, dp_size: int) -> None:
    if batch_size < 1 or dp_size < 1:
        raise ValueError(
            "expected batch_size and dp_size of 1 or more, got "
            f"batch_size={batch_size}, dp_size={dp_size}"
        )
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"expected dp_rank from 0 to {dp_size - 1}, got dp_rank={dp_rank}")
    if batch_size % dp_size:
        raise ValueError(
            f"expected dp={dp_size} to divide batch_size, which counts the sequences of all ranks, "
            f"got batch_size={batch_size}; choose a multiple of {dp_size}"
        )
    if not 1 <= seq_len < len(corpus()):
        raise ValueError(f"expected seq_len from 1 to {len(corpus()) - 1}, got seq_len={seq_len}")
