"""The sizes that a formula reads of a model, and the parameters that they make."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol


class Dtype(Protocol):
    """A number format, as far as sizes go; ``torch.dtype`` is one."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


@dataclass(frozen=True)
class Width:
    """A number format of ``itemsize`` bytes per element, without torch."""

    itemsize: int


FLOAT32 = Width(4)


def accumulation_itemsize(dtype: Dtype) -> int:
    """Return the bytes per element of sums and softmax in ``dtype``: those of float32 at least."""
    return max(dtype.itemsize, FLOAT32.itemsize)


class Sizes(Protocol):
    """What a formula reads of a decoder's config, a frozen dataclass such as ModelConfig."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # dataclasses.replace makes a shard's

    @property
    def family(self) -> str:
        """ "gpt" (LayerNorm, GELU, biases, positions) or "llama" (RMSNorm, SwiGLU, RoPE)."""

    @property
    def layers(self) -> int:
        """Blocks, L."""

    @property
    def hidden(self) -> int:
        """Features of a token, D."""

    @property
    def heads(self) -> int:
        """Query heads, H."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, G."""

    @property
    def head_dim(self) -> int:
        """Features of a head, K."""

    @property
    def ffn(self) -> int:
        """Inner features of the MLP, F."""

    @property
    def max_seq_len(self) -> int:
        """Rows of the learned positions (gpt)."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding, V."""

    @property
    def tied(self) -> bool:
        """Whether embedding and LM head are one parameter."""

    @property
    def dropout(self) -> float:
        """Fraction of elements dropped; 0 saves no masks."""

    @property
    def dtype(self) -> Dtype:
        """Number format of parameters and activations."""


def parameter_sizes(config: Sizes, first: int = 0, end: int | None = None) -> list[int]:
    """Return the elements of each parameter, in the order of ``parameters()``.

    Of the whole model, in which a tied embedding counts once; or of the slice with the blocks
    ``first``..``end - 1``, as :meth:`course_lib.model.Decoder.stage` makes it.
    """
    end = config.layers if end is None else end
    table = config.vocab * config.hidden
    sizes = [] if first else _embedding(config)
    sizes += (end - first) * _block(config)
    if end == config.layers:
        head = [] if config.tied and first == 0 else [table]
        sizes += _norm(config) + head
    return sizes


def _embedding(config: Sizes) -> list[int]:
    rows = [config.vocab] + [config.max_seq_len] * (config.family == "gpt")
    return [size * config.hidden for size in rows]


def _block(config: Sizes) -> list[int]:
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    ffn = [(hidden, config.ffn)] * (2 if config.family == "llama" else 1) + [(config.ffn, hidden)]
    return [
        *_norm(config),
        *(size for shape in attention for size in _linear(config, *shape)),
        *_norm(config),
        *(size for shape in ffn for size in _linear(config, *shape)),
    ]


def _linear(config: Sizes, features_in: int, features_out: int) -> list[int]:
    return [features_in * features_out] + [features_out] * (config.family == "gpt")


def _norm(config: Sizes) -> list[int]:
    return [config.hidden] * (2 if config.family == "gpt" else 1)


def attention_parameters(config: Sizes, n: int = 1) -> int:
    """Return the parameters of one attention, or of one of ``n`` tensor-parallel shards of it.

    Biases of o are replicated, and K and V have at least one head per rank.
    """
    hidden, queries = config.hidden, config.heads * config.head_dim
    keys_values = 2 * max(config.kv_heads // n, 1) * config.head_dim
    biases = queries // n + keys_values + hidden if config.family == "gpt" else 0
    return 2 * hidden * queries // n + hidden * keys_values + biases


def mlp_parameters(config: Sizes, n: int = 1) -> int:
    """Return the parameters of one MLP or expert, or of one of ``n`` tensor-parallel shards of it.

    The second bias is replicated.
    """
    if config.family == "llama":
        return 3 * config.hidden * config.ffn // n
    return 2 * config.hidden * config.ffn // n + config.ffn // n + config.hidden


def norm_parameters(config: Sizes) -> int:
    """Return the parameters of one norm; a model has two per block and one at the end."""
    return sum(_norm(config))


def block_parameter_count(config: Sizes) -> int:
    """Return the parameters of one block."""
    return sum(_block(config))


def parameter_count(config: Sizes) -> int:
    """Return the parameters of the whole model; a tied embedding counts once."""
    return sum(parameter_sizes(config))
