"""Which places a placement needs beside the homes of units: slots, stages, rings, and how large each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.spec.footprint import (
    LOG_STAGES,
    ROW_PIECES,
    decoded_bytes,
    guard_bytes,
    log_place_bytes,
    needs_total,
    passes_device,
    piece_bytes,
    ring_bytes,
    row_piece_bytes,
    stage_bytes,
    total_bytes,
)
from headrace.spec.model import REST, ModelSpec
from headrace.spec.placement import DEVICE, DISK, HOST, Placement


@dataclass(frozen=True)
class Place:
    """One place. `region`: what its bytes count as."""

    name: str
    nbytes: int
    tier: str
    region: str


def places_of(spec: ModelSpec, placement: Placement) -> Iterator[Place]:
    """All of them, see Regions.places. Where units move, they may grow, or come to be."""
    streaming = [unit for unit in spec.units if placement.streams(unit.index)]
    sending = [u for u in spec.units if u.trained.entries and placement.state[u.index] != DEVICE and u.kind != REST]
    slot = max((unit.stored.nbytes for unit in streaming), default=0)
    send = max((unit.sent.nbytes for unit in sending), default=0)
    total = max((total_bytes(unit) for unit in sending if needs_total(unit)), default=0)
    stage = max((stage_bytes(unit, placement) for unit in spec.units), default=0)
    staged = placement.staged and any(placement.home(unit.index) == DISK for unit in streaming)
    guard = guard_bytes(spec, placement)
    passing = any(passes_device(unit, placement) for unit in spec.units)
    piece = row_piece_bytes(spec, placement)
    for kind, nbytes, count, tier, region in (
        ("s", slot, placement.slots, DEVICE, "weights"),
        ("decoded", decoded_bytes(spec), 1, DEVICE, "weights"),
        ("g", send, placement.grad_slots, DEVICE, "grads"),
        ("total", total, 1, DEVICE, "grads"),
        ("d", piece_bytes(spec, placement) if passing else 0, placement.pieces if passing else 0, DEVICE, "state"),
        ("h", slot if staged else 0, placement.slots, HOST, "stages"),
        ("a", send, placement.grad_slots, HOST, "stages"),
        ("l", log_place_bytes(spec, placement), placement.logs, HOST, "logs"),
        ("v", log_place_bytes(spec, placement), placement.device_logs, DEVICE, "logs"),
        ("w", log_place_bytes(spec, placement), LOG_STAGES if placement.device_logs else 0, HOST, "stages"),
        ("q", ring_bytes(spec, placement), placement.ring, HOST, "grads"),
        ("u", stage, placement.update_slots, HOST, "stages"),
        ("e", piece, ROW_PIECES if piece else 0, HOST, "stages"),
        ("check weights", guard.weights, 1, DEVICE, "guard"),
        ("check grads", guard.grads, 1, HOST, "guard"),
        ("check stage", guard.stage, 1, HOST, "guard"),
    ):
        for number in range(count):
            yield Place(f"{kind}{number}" if len(kind) == 1 else kind, nbytes, tier, region)
