"""The server that a load goes to, as it presents itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from lowlat.bench.results import ARMS, known_arm

if TYPE_CHECKING:
    from lowlat.bench.load.client import Client


class Target(msgspec.Struct, frozen=True):
    """Model and arm names as results hold them, the longest prompt + answer, and whether drafts pass by force."""

    model: str
    arm: str
    max_context: int | None
    simulated_acceptance: bool = False


async def find_target(client: Client, model: str | None, arm: str | None) -> Target:
    """Model name, arm name and context limit. Raises ValueError where they cannot be found out, and ConnectionError."""
    listed = await client.models()
    chosen = next((card for card in listed if model in (None, card.id)), None)
    if chosen is None:
        raise ValueError(f"the server has no model {model!r}: it lists {', '.join(card.id for card in listed)}")
    owner = str(chosen.owned_by)
    simulated = False
    if owner == "lowlat":
        info = await client.info()
        simulated = bool(info.get("simulated_acceptance"))
        kernels = str(info.get("kernels") or "").partition("/")[0]
        owner = kernels if kernels in ARMS else f"plugin:{kernels}" if kernels else "general"
    if not known_arm(arm or owner):
        names = ", ".join(sorted(ARMS))
        said = f"results know no arm {arm!r}" if arm else f"the server calls itself {owner!r}"
        raise ValueError(f"{said}: name it with --arm ({names} or plugin:NAME)")
    limit = chosen.max_model_len
    longest = limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None
    return Target(chosen.id, arm or owner, longest, simulated)
