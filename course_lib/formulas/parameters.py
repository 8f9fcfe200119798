"""The sizes of a model that the formulas use, and the parameter counts that follow from them."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol


class Dtype(Protocol):
    """The size of a number format, such as that of a ``torch.dtype``."""

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


def parameter_sizes(config: Sizes, first: int = 0, end: int | None = None, n: int = 1) -> list[int]:
    """Return the elements of each parameter, in the order of ``parameters()``.

    Of the whole model, in which a tied embedding counts once; or of the slice with the blocks
    ``first``..``end - 1``, as :meth:`course_lib.model.Decoder.stage` makes it; or of one of ``n``
    tensor-parallel shards, with matrices and the padded vocabulary divided and the rest whole.
    """
    end = config.layers if end is None else end
    sizes = [] if first else embedding_sizes(config, n)
    sizes += (end - first) * _block(config, n)
    if end == config.layers:
        head = [] if config.tied and first == 0 else [padded_rows(config.vocab, n) * config.hidden]
        sizes += _norm(config) + head
    return sizes


def padded_rows(vocab: int, n: int) -> int:
    """Return the rows of the vocabulary on each of ``n`` ranks, padding included."""
    return -(-vocab // n)


def embedding_sizes(config: Sizes, n: int = 1, *, positions: bool | None = None) -> list[int]:
    """Return the elements of the embedding, and of learned ``positions`` (by default gpt's)."""
    learned = config.family == "gpt" if positions is None else positions
    rows = [padded_rows(config.vocab, n)] + [config.max_seq_len] * learned
    return [size * config.hidden for size in rows]


def _block(config: Sizes, n: int = 1) -> list[int]:
    norm = _norm(config)
    return [*norm, *_attention(config, n), *norm, *_mlp(config, n)]


def _attention(config: Sizes, n: int, bias: bool | None = None) -> list[int]:
    queries = config.heads * config.head_dim // n
    keys = max(config.kv_heads // n, 1) * config.head_dim
    shapes = [(config.hidden, size) for size in (queries, keys, keys)] + [(queries, config.hidden)]
    return _linears(config, shapes, bias)


def _mlp(config: Sizes, n: int, ffn: int | None = None, bias: bool | None = None) -> list[int]:
    inner = (config.ffn if ffn is None else ffn) // n
    ups = 2 if config.family == "llama" else 1
    return _linears(config, ups * [(config.hidden, inner)] + [(inner, config.hidden)], bias)


def _linears(config: Sizes, shapes: list[tuple[int, int]], bias: bool | None) -> list[int]:
    """Return the elements of weight and bias for each shape (features in, features out)."""
    biased = config.family == "gpt" if bias is None else bias
    return [size for shape in shapes for size in [shape[0] * shape[1], *[shape[1]] * biased]]


def _norm(config: Sizes) -> list[int]:
    return [config.hidden] * (2 if config.family == "gpt" else 1)


def attention_parameters(config: Sizes, n: int = 1, *, bias: bool | None = None) -> int:
    """Return the parameters of one attention, or of one of ``n`` tensor-parallel shards of it.

    The bias of o is replicated, and K and V have at least one head per rank. By default gpt has
    biases.
    """
    return sum(_attention(config, n, bias))


def mlp_parameters(
    config: Sizes, n: int = 1, *, ffn: int | None = None, bias: bool | None = None
) -> int:
    """Return the parameters of one MLP or expert, or of one of ``n`` tensor-parallel shards of it.

    The second bias is replicated. ``ffn`` is the inner size of an expert, by default the MLP's.
    """
    return sum(_mlp(config, n, ffn, bias))


def norm_parameters(config: Sizes) -> int:
    """Return the parameters of one norm; a model has two per block and one at the end."""
    return sum(_norm(config))


def block_parameter_count(config: Sizes) -> int:
    """Return the parameters of one block."""
    return sum(_block(config))


def parameter_count(config: Sizes) -> int:
    """Return the parameters of the whole model; a tied embedding counts once."""
    return sum(parameter_sizes(config))
