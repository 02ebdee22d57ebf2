"""Runs sglang_checks.py beside the real wheel of SGLang, in a process of its own; skipped without the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_site import SITE

HERE = Path(__file__).parent


@pytest.mark.skipif(not (SITE / "sglang").exists(), reason="run `python tests/plugin/sglang_site.py` (or `make peers`)")
def test_the_adapter_works_in_an_unmodified_sglang(tmp_path):
    info = tmp_path / "sglang_zoo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-zoo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lowlat.kernels]\nzoo = sglang_zoo:SPECS\n"
        "[sglang.srt.plugins]\nnvidia_megakernel = lowlat_plugin.hosts.sglang:register\n"
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE), str(SITE), os.environ.get("PYTHONPATH", "")]),
        "LOWLAT_SGLANG_SITE": str(SITE),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "sglang_checks.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "100%" in done.stdout
    assert done.stdout.count(".") > 40
