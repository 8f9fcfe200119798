"""Activations that autograd saves for backward on one process, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.formulas.parameters import Sizes, accumulation_itemsize


@dataclass(frozen=True)
class SavedByBlock:
    """Bytes that autograd saves for one block, by where tensor parallelism has the tensors.

    ``outside``: inputs of the two norms, and their normalized inputs and statistics.
    ``masks``: masks of the two dropouts, which are outside the regions too.
    ``entered``: the inputs of the column linears, the outputs of the two norms.
    ``inside``: queries, the output of attention, log-sum-exp, inner features of the MLP.
    ``keys_values``: keys and values. ``rope_cache``: cosines and sines of RoPE.

    On one process a block saves the sum. n ranks of tensor parallelism divide ``inside`` and
    ``keys_values``; sequence parallelism divides ``outside`` too, and ``entered`` where it gathers
    again. Korthikanti et al. count 34 sbh + 5 a s^2 b bytes for a GPT block of 2-byte numbers with
    F = 4 D. Their 34: 4 norms' inputs, 2 + 2 entered, 6 q k v, 2 output of attention, 16 inner
    features, 2 masks of one byte. Ours with the same sizes has 36 (torch's CPU masks take two
    bytes) and no s^2: the attention kernel saves one log-sum-exp per row instead of the scores.

    Each number is a storage, counted once: q, k and v have one input, and the output of attention
    is the input of o. A residual sum saves nothing itself; it is the next norm's input. SiLU and
    its product save gate, silu(gate), up and the input of down; GELU its input and output. A linear
    saves its input, never its output.
    """

    outside: int
    masks: int
    entered: int
    inside: int
    keys_values: int
    rope_cache: int

    @property
    def total(self) -> int:
        """On one process."""
        outside = self.outside + self.masks + self.entered
        return outside + self.inside + self.keys_values + self.rope_cache


def saved_by_block(config: Sizes, sequences: int, seq_len: int) -> SavedByBlock:
    """Return the bytes saved for one block, from shapes alone; norms and RoPE as torch saves them.

    For each token, with numbers of b bytes, and w = 4 at least where torch computes in float32:

        llama   w (4 D + 2 + H) + b (4 D + 2 D G/H + 4 F),   and 2 S K w of RoPE cache
        gpt     w H + b (6 D + 4 + 2 D G/H + 2 F)

    and 2 b D of masks where there is dropout.
    """
    rows, width = sequences * seq_len, config.dtype.itemsize
    wide = accumulation_itemsize(config.dtype)  # of statistics and rotations
    x_bytes, head_bytes = rows * config.hidden * width, rows * config.head_dim * width
    llama = config.family == "llama"
    return SavedByBlock(
        outside=2 * _saved_by_norm(config, rows),
        masks=2 * x_bytes if config.dropout else 0,
        entered=2 * x_bytes,
        inside=config.heads * (2 * head_bytes + rows * wide)
        + (4 if llama else 2) * rows * config.ffn * width,
        keys_values=2 * config.kv_heads * head_bytes,
        rope_cache=4 * seq_len * config.head_dim // 2 * wide if llama else 0,
    )


def _saved_by_norm(config: Sizes, rows: int) -> int:
    """RMSNorm saves its input, the normalized input and 1/rms; LayerNorm input, mean, 1/std."""
    width = config.dtype.itemsize
    if config.family == "llama":
        return rows * accumulation_itemsize(config.dtype) * (2 * config.hidden + 1)
    return rows * width * (config.hidden + 2)


@dataclass(frozen=True)
class SavedOutsideBlocks:
    """Bytes that autograd saves for embedding, final norm and LM head.

    ``positions``: numbers of the rows that the embedding looked up (gpt). ``mask``: its dropout's.
    ``norm``: what the final norm saves. ``entered``: the head's input.
    ``log_probabilities``: of every token and word, in float32 at least, and one scalar more.

    Tokens and targets are saved too, 8 bytes each (:data:`ID_BYTES`): not a copy, but the batch
    itself, which micro-batches share: any slice of it keeps the whole batch alive.
    """

    positions: int
    mask: int
    norm: int
    entered: int
    log_probabilities: int

    @property
    def embedding(self) -> int:
        """On the stage with the embedding."""
        return self.positions + self.mask

    @property
    def head(self) -> int:
        """On the stage with final norm, LM head and loss."""
        return self.norm + self.entered + self.log_probabilities

    @property
    def total(self) -> int:
        """On one process."""
        return self.embedding + self.head


ID_BYTES = 8


def saved_outside_blocks(config: Sizes, sequences: int, seq_len: int) -> SavedOutsideBlocks:
    """Return the bytes saved for embedding, final norm, head and loss of one process.

    For each token, b and w as in :func:`saved_by_block`: llama w (2 D + 1 + V) + b D,
    gpt w V + b (2 D + 2), and 8 S bytes of positions.
    """
    rows, width = sequences * seq_len, config.dtype.itemsize
    x_bytes = rows * config.hidden * width
    return SavedOutsideBlocks(
        positions=seq_len * ID_BYTES if config.family == "gpt" else 0,
        mask=x_bytes if config.dropout else 0,
        norm=_saved_by_norm(config, rows),
        entered=x_bytes,
        log_probabilities=(rows * config.vocab + 1) * accumulation_itemsize(config.dtype),
    )


def saved_by_stage(
    config: Sizes, sequences: int, seq_len: int, first: int = 0, end: int | None = None
) -> int:
    """Return the bytes that one forward saves of the model or of its slice ``first``..``end - 1``.

    Tokens and targets are not counted: :class:`SavedOutsideBlocks` says why.
    """
    end = config.layers if end is None else end
    outside = saved_outside_blocks(config, sequences, seq_len)
    blocks = (end - first) * saved_by_block(config, sequences, seq_len).total
    return blocks + (first == 0) * outside.embedding + (end == config.layers) * outside.head
