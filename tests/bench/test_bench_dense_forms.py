"""benchmarks/dense_step_arms.py --forms: which forms are timed, and what it says of their times. No GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lowlat_nvidia.dense import plan as plans

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dense_step_arms.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("dense_step_arms", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rows", [1, 8])
def test_forms_are_other_kernels_on_the_same_weights(script: ModuleType, rows: int) -> None:
    forms = script.FORMS_OF_ONE if rows == 1 else script.FORMS_OF_SEVERAL
    assert forms.keys() == plans.PRESETS.keys()
    for name, choices in forms.items():
        default = plans.DensePlan(plans.PRESETS[name]).kernel(rows)
        made = [dataclasses.replace(default, **options) for options in choices]
        assert all(plan.page_fragments == default.page_fragments for plan in made)
        assert all(plan.shared_bytes() <= plans.SHARED_LIMIT for plan in made)
        different = {tuple(plan.definitions().items()) for plan in (default, *made)}
        assert len(different) == len(made) + 1


def test_the_fastest_form_is_named_and_doubt_is_too(script: ModuleType) -> None:
    default, near, far = [100.0 + i % 3 for i in range(30)], [99.0 + i % 5 for i in range(30)], [90.0] * 30
    assert script.fastest({"lowlat-nvidia": default, "slow": [120.0] * 30}) == "the default, 101.0 us"
    assert script.fastest({"lowlat-nvidia": default, "form": far}).startswith("form: 90.0 us")
    assert "undecided" not in script.fastest({"lowlat-nvidia": default, "form": far})
    assert "undecided" in script.fastest({"lowlat-nvidia": [x + 0.5 for x in near], "form": near})
