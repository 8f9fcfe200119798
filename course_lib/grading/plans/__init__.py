"""The plan arena."""
