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


def parameter_sizes(
    config: Sizes, first: int = 0, end: int | None = None, *, tp: int = 1
) -> list[int]:
    """Return the elements of each parameter, in the order of ``parameters()``.

    Of the whole model, in which a tied embedding counts once; or of the slice with the blocks
    ``first``..``end - 1``, as :meth:`course_lib.model.Decoder.stage` makes it. With ``tp``, the
    elements on one rank of tensor parallelism: it divides matrices and the padded vocabulary.
    """
    end = config.layers if end is None else end
    sizes = [] if first else embedding_sizes(config, tp)
    sizes += (end - first) * _block(config, tp)
    if end == config.layers:
        head = [] if config.tied and first == 0 else [padded_rows(config.vocab, tp) * config.hidden]
        sizes += _norm(config) + head
    return sizes


def padded_rows(vocab: int, n: int) -> int:
    """Return the rows of the vocabulary on each of ``n`` ranks, padding included."""
    return -(-vocab // n)


def embedding_sizes(config: Sizes, tp: int = 1, *, positions: bool | None = None) -> list[int]:
    """Return the elements of the embedding and of learned positions (by default gpt has them)."""
    learned = config.family == "gpt" if positions is None else positions
    rows = [padded_rows(config.vocab, tp)] + [config.max_seq_len] * learned
    return [size * config.hidden for size in rows]


def _block(config: Sizes, tp: int) -> list[int]:
    norm = _norm(config)
    return [*norm, *attention_sizes(config, tp), *norm, *mlp_sizes(config, tp)]


def attention_sizes(config: Sizes, tp: int = 1, *, bias: bool | None = None) -> list[int]:
    """Return the elements of the four linears of attention on a rank; by default gpt has biases.

    Ranks share a key and value head where there are fewer heads than ranks.
    """
    queries = config.heads * config.head_dim // tp
    keys = max(config.kv_heads // tp, 1) * config.head_dim
    shapes = [(config.hidden, n) for n in (queries, keys, keys)] + [(queries, config.hidden)]
    return _linears(config, shapes, bias)


def mlp_sizes(
    config: Sizes, tp: int = 1, *, ffn: int | None = None, bias: bool | None = None
) -> list[int]:
    """Return the elements of the linears of an MLP, or of an expert of ``ffn`` inner features."""
    inner = (config.ffn if ffn is None else ffn) // tp
    gates = 2 if config.family == "llama" else 1
    return _linears(config, gates * [(config.hidden, inner)] + [(inner, config.hidden)], bias)


def _linears(config: Sizes, shapes: list[tuple[int, int]], bias: bool | None) -> list[int]:
    """Return weight and bias of each; an output bias is whole on each rank, as its features are."""
    biased = config.family == "gpt" if bias is None else bias
    return [size for n, m in shapes for size in [n * m] + [m] * biased]


def _norm(config: Sizes) -> list[int]:
    return [config.hidden] * (2 if config.family == "gpt" else 1)


def attention_parameters(config: Sizes, n: int = 1) -> int:
    """Return the parameters of one attention, or of one of ``n`` tensor-parallel shards of it."""
    return sum(attention_sizes(config, n))


def mlp_parameters(config: Sizes, n: int = 1) -> int:
    """Return the parameters of one MLP or expert, or of one of ``n`` tensor-parallel shards."""
    return sum(mlp_sizes(config, n))


def norm_parameters(config: Sizes) -> int:
    """Return the parameters of one norm; a model has two per block and one at the end."""
    return sum(_norm(config))


def block_parameter_count(config: Sizes) -> int:
    """Return the parameters of one block."""
    return sum(_block(config, 1))


def parameter_count(config: Sizes) -> int:
    """Return the parameters of the whole model; a tied embedding counts once."""
    return sum(parameter_sizes(config))
