"""What stops an engine from starting."""


class SetupError(Exception):
    """The configuration cannot be served; the text says why and what to do."""
