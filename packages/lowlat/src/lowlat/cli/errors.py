"""What an error tells a user."""

from __future__ import annotations


def own_words(error: BaseException) -> str:
    """An error's text; of one about a file, which file and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
