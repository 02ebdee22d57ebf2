"""Long tests, run by `make soak`; the kit of the server's tests is used here too."""

import sys
from pathlib import Path

path = str(Path(__file__).parents[1] / "server")
if path not in sys.path:
    sys.path.insert(0, path)
