"""Names of the first edition, and what they are called now.

Exercises, lessons and saved answers of the first edition use the names on the left. A package
answers to them through the ``__getattr__`` that :func:`aliases` returns, without a warning.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

RENAMED: Mapping[str, Mapping[str, str]] = {
    "course_lib.comm": {
        "copy": "copy_to",
        "reduce": "reduce_from",
        "shard": "scatter_to",
        "reshard": "reduce_scatter_to",
        "gather": "gather_from",
        "unshard": "gather_from_sequence",
        "swap": "all_to_all",
        "swap_rows": "all_to_all_v",
        "all_to_all_uneven": "all_to_all_v",
    },
    "course_lib.dp": {"start_equal": "broadcast_parameters"},
    "course_lib.inference": {
        "tensor_bytes": "tp_wire_bytes",
        "pipeline_bytes": "pp_wire_bytes",
        "prefill_bytes": "prefill_wire_bytes",
        "decode_bytes": "decode_wire_bytes",
        "moved_cache_bytes": "moved_cache_wire_bytes",
        "even_expert_bytes": "even_ep_wire_bytes",
        "sampling_bytes": "sampling_wire_bytes",
    },
}
PARAMETER_DIM = "tp_dim"  # the dim of a ShardSpec, as answers to 06-3 read it from a parameter


def aliases(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package`` that resolves its names of the first edition."""
    names = RENAMED[package]

    def resolve(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(package), names[name])

    return resolve
