"""Arms of `lowlat bench step`: different ways to compute the same decode step."""
