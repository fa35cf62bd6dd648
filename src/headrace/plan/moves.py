"""Which units leave the device first where a step needs more of it than was left: fewer and fewer live there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from headrace.spec.model import BLOCK, TILE, ModelSpec
from headrace.spec.placement import DEVICE, DISK, HOST, Placement


def moves_out(spec: ModelSpec, placement: Placement, stay: Collection[int] = ()) -> Iterator[Placement]:
    """The placement with one unit more in host memory each time, weights and state, until only the rest and the units
    of `stay` live on the device. Blocks go first, evenly spread among those that remain, so that their copies hide
    behind these; then tiles. State that lives on the disk remains there."""
    near = [unit for unit in spec.units if placement.weights[unit.index] == DEVICE and unit.index not in stay]
    blocks = [unit.index for unit in near if unit.kind == BLOCK]
    tiles = [unit.index for unit in near if unit.kind == TILE]
    for count in range(1, len(blocks) + 1):
        yield _out(placement, {blocks[number * len(blocks) // count] for number in range(count)})
    for count in range(1, len(tiles) + 1):
        yield _out(placement, {*blocks, *tiles[-count:]})


def _out(placement: Placement, units: Collection[int]) -> Placement:
    weights = [HOST if unit in units else tier for unit, tier in enumerate(placement.weights)]
    state = [HOST if unit in units and tier != DISK else tier for unit, tier in enumerate(placement.state)]
    updates = [HOST if unit in units and placement.state[unit] == DEVICE else side
               for unit, side in enumerate(placement.updates)]  # fmt: skip
    return replace(placement, weights=tuple(weights), state=tuple(state), updates=tuple(updates))
