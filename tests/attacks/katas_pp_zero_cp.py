"""Answers to katas 16b-4 to 16b-6 that must be rejected or accepted."""

from __future__ import annotations

from attack import Attacks

ATTACKS: dict[str, Attacks] = {}
