"""A placement in words: how many blocks and tiles of the embedding and head live on which tier."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.base.units import plural
from headrace.spec.model import BLOCK, REST, TILE, ModelSpec, Unit
from headrace.spec.placement import TIERS, Placement


def summary(spec: ModelSpec, placement: Placement) -> str:
    """As in "weights: 30 blocks and 8 tiles on host, rest on device; optimizer state: ... on disk; 3 weight slots"."""
    trained = [unit for unit in spec.units if unit.trained.entries]
    slots = plural(placement.slots, "weight slot")
    return (
        f"weights: {_by_tier(spec.units, placement.weights)}; "
        f"optimizer state: {_by_tier(trained, placement.state) or 'none'}; {slots}"
    )


def counted(units: Iterable[Unit]) -> str:
    """What units these are, as in "30 blocks, 8 tiles and rest"."""
    kinds = [unit.kind for unit in units]
    parts = [plural(kinds.count(kind), kind) for kind in (BLOCK, TILE) if kind in kinds] + [REST] * (REST in kinds)
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def _by_tier(units: Iterable[Unit], tiers: tuple[str, ...]) -> str:
    told = {tier: counted(unit for unit in units if tiers[unit.index] == tier) for tier in reversed(TIERS)}
    return ", ".join(f"{what} on {tier}" for tier, what in told.items() if what)
