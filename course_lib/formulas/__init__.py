"""Closed forms from shapes alone: bytes sent and stored, and parameters. Nothing imports torch."""
