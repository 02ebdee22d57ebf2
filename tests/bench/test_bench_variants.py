"""Forms of one kernel: which won, as benchmarks/variants.py says it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "variants.py"
spec = importlib.util.spec_from_file_location("variants", SCRIPT)
assert spec is not None
assert spec.loader is not None
variants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(variants)


def times(middle: float) -> list[float]:
    return [middle + step / 100 for step in range(-20, 21)]


def test_a_form_wins_only_where_intervals_do_not_meet():
    samples = {"lowlat-nvidia": times(10), "lowlat-nvidia ahead": times(8), "general": times(16)}
    assert variants.verdict(samples, "general") == (
        "   winner: ahead, 0.800 of the default, 0.500 of general (default 10.00, ahead 8.00 us)"
    )
    samples["lowlat-nvidia ahead"] = times(9.99)
    assert variants.verdict(samples) == "   winner: the default (default 10.00, ahead 9.99 us)"


def test_without_a_default_nothing_wins():
    assert "the default broke" in variants.verdict({"lowlat-nvidia ahead": times(8)})


def test_a_form_is_told_by_its_workload():
    assert variants.fields("lowlat-nvidia", "region") == {"arm": "lowlat-nvidia", "workload": "region"}
    assert variants.fields("general ahead", "region") == {"arm": "general", "workload": "region, ahead"}
