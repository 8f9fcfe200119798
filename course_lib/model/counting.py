"""Parameters of a decoder, counted from its sizes without building it."""

from __future__ import annotations

from course_lib.model.config import ModelConfig


def block_parameter_count(config: ModelConfig) -> int:
    """Parameters of one block, from shapes alone."""
    hidden, kv_features = config.hidden, config.kv_heads * config.head_dim
    attention = 2 * hidden * hidden + 2 * hidden * kv_features
    if config.family == "llama":
        return attention + 3 * hidden * config.ffn + 2 * hidden
    biases = 2 * hidden + 2 * kv_features + config.ffn + hidden
    return attention + 2 * hidden * config.ffn + biases + 2 * 2 * hidden


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, from shapes alone; a tied embedding counts once."""
    embeddings = config.vocab * config.hidden * (1 if config.tied else 2)
    final_norm = config.hidden
    if config.family == "gpt":
        embeddings += config.max_seq_len * config.hidden
        final_norm += config.hidden
    return embeddings + config.layers * block_parameter_count(config) + final_norm
