"""These tests need an NVIDIA GPU (`make test-gpu`). They share the cases of the tests that need none."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("kernels", "models", "speculative"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
