"""Puts the wheel of sglang 0.5.23 and the few packages that its plugin modules import into build/peers.

    python tests/plugin/sglang_site.py

Nothing is installed into the environment that runs this, and none of SGLang's own dependencies are pulled in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("LOWLAT_SGLANG_SITE", ROOT / "build/peers/sglang-0.5.23"))
PACKAGES = ("sglang==0.5.23", "psutil", "orjson", "pybase64", "pillow", "triton==3.7.0")


def main() -> None:
    if not (SITE / "sglang").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(SITE), *PACKAGES]
        subprocess.run(command, check=True)
    print(SITE)


if __name__ == "__main__":
    main()
