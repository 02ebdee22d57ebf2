"""Errors of reading a model's files."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model's files are missing, damaged or of an unsupported kind; the message says which, and what helps."""
