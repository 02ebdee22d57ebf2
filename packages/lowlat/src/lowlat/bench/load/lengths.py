"""How long prompts and answers are: a distribution written as text, drawn with a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MOST_TOKENS = 100_000_000
MOST_SIGMA = 5.0
EXAMPLES = "1024, fixed:1024, uniform:100,2000, normal:1000,200, lognormal:800,0.6"


def parse_lengths(text: str) -> Callable[[random.Random], int]:
    """A sampler of lengths in tokens (at least 1) from `fixed:N`, `uniform:LOW,HIGH`, `normal:MEAN,SD`,
    `lognormal:MEDIAN,SIGMA` or a plain number.

    Raises ValueError naming what is wrong.
    """
    kind, _, rest = text.strip().partition(":")
    if not rest:
        kind, rest = "fixed", kind
    wanted = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}.get(kind)
    try:
        numbers = [float(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if wanted is None or len(numbers) != wanted or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(f"cannot read the lengths {text!r}; examples: {EXAMPLES}")
    first, second = numbers[0], numbers[-1]
    if first < 1 or (kind == "uniform" and second < first):
        raise ValueError(f"lengths {text!r} describe no tokens; examples: {EXAMPLES}")
    if max(numbers) > MOST_TOKENS or (kind == "lognormal" and second > MOST_SIGMA):
        raise ValueError(f"lengths {text!r}: at most {MOST_TOKENS} tokens and a SIGMA of {MOST_SIGMA:g}")
    draws: dict[str, Callable[[random.Random], float]] = {
        "fixed": lambda _: first,
        "uniform": lambda draw: draw.randint(int(first), int(second)),
        "normal": lambda draw: draw.gauss(first, second),
        "lognormal": lambda draw: draw.lognormvariate(math.log(first), second),
    }
    return lambda draw: min(MOST_TOKENS, max(1, round(draws[kind](draw))))
