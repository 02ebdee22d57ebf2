"""Faults that other servers had; the kits of the server's and the engine's tests are used here too."""

import sys
from pathlib import Path

for folder in ("server", "engine", "models"):
    path = str(Path(__file__).parents[1] / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
