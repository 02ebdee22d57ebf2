"""benchmarks/general_step.py runs dry on a CPU, and what it writes is a result like any other."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowlat.bench.results import load

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "general_step.py"


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """What a script imports from its own folder."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def script():
    spec = importlib.util.spec_from_file_location("general_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dry_run_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWLAT_COMMIT", "0123456789")
    command = "--device cpu --dtype float32 --models tiny --batches 1,3 --contexts 64,96 --rounds 2 --steps 3"
    module, chosen = script(), {"one_row_attention": "used for one request"}
    build = module.Engine.__init__

    def built(engine, *given):
        build(engine, *given)
        assert not engine.chosen, "a CPU's start has nothing to choose"
        engine.chosen = chosen

    monkeypatch.setattr(module.Engine, "__init__", built)
    path = module.main(
        [*command.split(), "--arms", "torch-eager-graph", "--ceiling-gb", "0.01", "--results", str(tmp_path)]
    )
    result = load(path)
    assert list(tmp_path.iterdir()) == [path]
    assert result.simulated.weights
    seen = {(row.arm, row.metric, row.rows, row.context) for row in result.rows}
    arms = [("general", "step_us"), ("torch-eager-graph", "step_us"), ("read-floor", "step_us"), ("general", "ttft_ms")]
    assert seen == {(*arm, rows, context) for arm in arms for rows in (1, 3) for context in (64, 96)}
    steps = [row for row in result.rows if row.metric == "step_us" and row.arm != "read-floor"]
    assert all(row.samples == 2 * 2 * 3 and row.median > 0 for row in steps)
    assert all(row.details == (chosen if row.arm == "general" else {}) for row in steps)


@pytest.mark.slow
def test_a_case_compiled_alone_is_found_later(tmp_path):
    """By a process of its own, as the run that measures it."""
    command = [sys.executable, str(SCRIPT.with_name("plain_decoder.py")), "tiny", "3", "64", "float32", "cpu"]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert [text.split(": ")[1].strip() for text in said] == ["compiled", "found"]


def test_a_run_that_would_outlast_its_requests_is_refused(capsys):
    with pytest.raises(SystemExit):
        script().main(["--device", "cpu", "--rounds", "40"])
    assert "fewer --rounds or --steps" in capsys.readouterr().err
