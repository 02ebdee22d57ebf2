"""Forms of one kernel between which only a timing decides: how they are named in results, and which of them won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.bench.stats import median_interval


def fields(name: str, workload: str) -> dict[str, Any]:
    """Arm and workload of a result's row for `ARM` or `ARM VARIANT`."""
    arm, _, variant = name.partition(" ")
    return {"arm": arm, "workload": f"{workload}, {variant}" if variant else workload}


def verdict(samples: Mapping[str, Sequence[float]], arm: str = "lowlat-nvidia") -> str:
    """A line that names the fastest of the forms of `arm`: the default must lie outside of its interval."""
    forms = {name: median_interval(times) for name, times in samples.items() if name.partition(" ")[0] == arm}
    if arm not in forms:
        return "   no winner: the default broke"
    default, best = forms[arm], min(forms, key=lambda name: forms[name].value)
    found = ", ".join(f"{name.partition(' ')[2] or 'default'} {form.value:.2f}" for name, form in forms.items())
    if best == arm or forms[best].high >= default.low:
        return f"   winner: the default ({found} us)"
    return f"   winner: {best.partition(' ')[2]}, {forms[best].value / default.value:.3f} of the default ({found} us)"
