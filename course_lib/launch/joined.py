"""The engine for ranks that torchrun or srun has started already: join them."""

from __future__ import annotations


def joined_world():
    return None
