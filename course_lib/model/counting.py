"""Parameters of a decoder, counted from its sizes without building it."""

from __future__ import annotations

from course_lib.model.config import ModelConfig


def parameter_sizes(config: ModelConfig, first: int = 0, end: int | None = None) -> list[int]:
    """Elements of each parameter, in the order of ``parameters()``, from shapes alone.

    Of the whole model, in which a tied embedding counts once; or of the slice with the blocks
    ``first``..``end - 1``, as :meth:`course_lib.model.Decoder.stage` cuts it.
    """
    end = config.layers if end is None else end
    table = config.vocab * config.hidden
    sizes = [] if first else _embedding(config)
    sizes += (end - first) * _block(config)
    if end == config.layers:
        head = [] if config.tied and first == 0 else [table]
        sizes += _norm(config) + head
    return sizes


def _embedding(config: ModelConfig) -> list[int]:
    rows = [config.vocab] + [config.max_seq_len] * (config.family == "gpt")
    return [size * config.hidden for size in rows]


def _block(config: ModelConfig) -> list[int]:
    hidden, kv_features = config.hidden, config.kv_heads * config.head_dim
    ffn = [(hidden, config.ffn), (config.ffn, hidden)]
    if config.family == "llama":
        ffn.insert(0, (hidden, config.ffn))
    attention = [(hidden, hidden), (hidden, kv_features), (hidden, kv_features), (hidden, hidden)]
    return [
        *_norm(config),
        *(size for shape in attention for size in _linear(config, *shape)),
        *_norm(config),
        *(size for shape in ffn for size in _linear(config, *shape)),
    ]


def _linear(config: ModelConfig, features_in: int, features_out: int) -> list[int]:
    return [features_in * features_out] + [features_out] * (config.family == "gpt")


def _norm(config: ModelConfig) -> list[int]:
    return [config.hidden] * (2 if config.family == "gpt" else 1)


def block_parameter_count(config: ModelConfig) -> int:
    """Parameters of one block, from shapes alone."""
    return sum(_block(config))


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, from shapes alone; a tied embedding counts once."""
    return sum(parameter_sizes(config))
