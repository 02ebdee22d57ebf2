"""Forms of one kernel between which only a timing decides: how they are named in results, and which of them won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.bench.stats import median_interval


def fields(name: str, workload: str) -> dict[str, Any]:
    """Arm and workload of a result's row for `ARM` or `ARM VARIANT`."""
    arm, _, variant = name.partition(" ")
    return {"arm": arm, "workload": f"{workload}, {variant}" if variant else workload}


def verdict(samples: Mapping[str, Sequence[float]], twin: str = "", arm: str = "lowlat-nvidia") -> str:
    """A line that names the fastest of the forms of `arm`, and what part of `twin` it takes, where that was measured.

    The default wins unless it and the fastest have intervals that do not meet.
    """
    forms = {name: median_interval(times) for name, times in samples.items() if name.partition(" ")[0] == arm}
    if arm not in forms:
        return "   no winner: the default broke"
    default, best = forms[arm], min(forms, key=lambda name: forms[name].value)
    found = ", ".join(f"{name.partition(' ')[2] or 'default'} {form.value:.2f}" for name, form in forms.items())
    won = arm if forms[best].high >= default.low else best
    words = "the default"
    if won != arm:
        words = f"{won.partition(' ')[2]}, {forms[won].value / default.value:.3f} of the default"
    if twin in samples:
        words += f", {forms[won].value / median_interval(samples[twin]).value:.3f} of {twin}"
    return f"   winner: {words} ({found} us)"
