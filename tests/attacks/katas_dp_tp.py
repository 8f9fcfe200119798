"""Answers to katas 16b-1 to 16b-3 that must be rejected or accepted."""

from __future__ import annotations

from attack import Attacks

ATTACKS: dict[str, Attacks] = {}
