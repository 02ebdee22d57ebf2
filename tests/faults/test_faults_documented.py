"""The page on faults, the planted faults and the tests say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planted import PLANTS

ROOT = Path(__file__).parents[2]
NUMBERS = (
    (1, 2, 4, 6, 8, 10, 11, 12, 14, 15, 17, 18, 20, 22, 24, 26, 28, 29, 30)
    + (32, 33, 34, 36, 37, 38, 40, 41, 43, 44, 45, 47, 48, 50, 52, 53, 54, 55, 57, 58, 60)
)  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.fault}-{plant.what.replace(' ', '-')}")
def test_a_planted_fault_fits_the_sources(plant):
    assert (ROOT / plant.file).read_text().count(plant.old) == 1, f"update {plant.fault} in tests/faults/planted_*.py"
    compile((ROOT / plant.file).read_text().replace(plant.old, plant.new), plant.file, "exec")


def test_the_page_maps_every_fault_to_tests_that_exist():
    page = (ROOT / "docs/faults.md").read_text()
    rows = dict(re.findall(r"^\| (A\d\d) \|(.*)\|$", page, re.MULTILINE))
    assert list(rows) == [f"A{number:02}" for number in NUMBERS]
    for name, row in rows.items():
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert tests or "waits for" in row, name
        for file, test in tests:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{name}: {file}::{test}"
        named = {f"{file}::{test}" for file, test in tests}
        for plant in PLANTS:
            if plant.fault == name:
                assert set(plant.tests) <= named, f"{name}: the page names the tests of the planted fault"
                assert plant.what in row, f"{name}: the page says what is planted"
