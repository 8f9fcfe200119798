"""Closed forms from shapes alone: bytes sent and stored, saved activations, parameter counts.

Bytes are exact: an int, or a Fraction where a rank sends an average; nothing here imports torch.
Each technique exports its formulas under its own name: ``dp.wire_bytes`` is the function in
``formulas/dp.py``.
"""
