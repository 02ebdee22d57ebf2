"""One-line faults, each of a kind that another server had, and the tests that turn red when it is planted."""

from __future__ import annotations

from plant_kit import Plant
from planted_answers import ANSWERS
from planted_engine import ENGINE

PLANTS: tuple[Plant, ...] = ANSWERS + ENGINE
