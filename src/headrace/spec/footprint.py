"""Bytes of a placement, by tier and region: what is allocated when a session opens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.spec.formats import itemsize, undo_log_bytes
from headrace.spec.model import BLOCK, REST, ModelSpec, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, Placement

PAGE = 4096
ALIGNMENT = 256
"""Where tensors inside a place begin."""
ROW_PIECE = 16 << 20
"""Bytes of an embedding's rows that the link carries at a time: with fewer it would be slower."""
NORM_ELEMENTS = 1 << 22
"""Elements of hidden states that a norm outside the blocks works on at a time: more keep a GPU no busier."""
LOG_STAGES = 2
"""Places in host memory that logs on the device pass: one is written while the other is on its way."""
ROW_PIECES = 4
"""Places for them: two for weights on their way up, two for gradients on their way down."""


def round_up(nbytes: int, step: int = PAGE) -> int:
    return -(-nbytes // step) * step


def norm_bytes(elements: int) -> int:
    """Working memory of the backward of a norm outside the blocks, given all elements of its input: 30 bytes for each
    of a piece, in fp32 but for results in 16 bits. So much an RMS norm of Gemma 2 in bf16 takes on an H200; on a CPU
    those of all models take 26, in fp32 24. Layer norms take less."""
    return 30 * min(elements, NORM_ELEMENTS)


def decoded_bytes(spec: ModelSpec) -> int:
    """The one place on the device into which weights are decoded for as long as their unit computes."""
    return max((unit.decoded.nbytes for unit in spec.units), default=0)


def total_bytes(unit: Unit) -> int:
    """The fp32 gradient buffer that one unit in work needs on the device."""
    return sum(entry.padded * 4 for entry in unit.trained.entries)


def needs_total(unit: Unit) -> bool:
    """A 16-bit unit sums its contributions in a separate fp32 buffer; an fp32 unit sums where it is sent from."""
    return any(itemsize(entry.dtype) < 4 for entry in unit.sent.entries)


def stage_bytes(unit: Unit, placement: Placement) -> int:
    """An update stage: the trained weights when their home is the disk, then the state when it is there."""
    weights = round_up(unit.trained_bytes) if placement.home(unit.index) == DISK else 0
    return weights + (round_up(unit.state_bytes) if placement.state[unit.index] == DISK else 0)


def ring_bytes(spec: ModelSpec, placement: Placement) -> int:
    """One place of the ring that gradients of blocks pass through."""
    passing = [u for u in spec.units if placement.rings(u.index, u.passes_ring) and placement.state[u.index] != DEVICE]
    return max((unit.grads.nbytes for unit in passing), default=0)


def piece_bytes(spec: ModelSpec, placement: Placement) -> int:
    """One place on the device that units pass for their update."""
    if placement.device_cost is None:
        passing = [u for u in spec.units if passes_device(u, placement)]
    else:  # any may, once it lives in host memory
        passing = [u for u in spec.units if u.kind != REST and u.trained.entries]
    element = max((_element_bytes(unit) for unit in passing), default=0)
    return placement.piece * element + ALIGNMENT * (2 + max((len(unit.parts) for unit in passing), default=0))


def may_pass_device(unit: Unit, placement: Placement) -> bool:
    """Its update can run on the device while its state lives in host memory."""
    index = unit.index
    return unit.kind != REST and bool(unit.trained.entries) and placement.state[index] == HOST == placement.home(index)


def passes_device(unit: Unit, placement: Placement) -> bool:
    """Its update runs on the device while its state lives in host memory."""
    index = unit.index
    return bool(unit.trained.entries) and placement.state[index] == HOST and placement.updated_on(index) == DEVICE


def row_piece_bytes(spec: ModelSpec, placement: Placement) -> int:
    """One place for rows of an embedding on their way between host and device; 0 where they need none."""
    tiles = [tile for matrix in spec.matrices for tile in matrix.tiles]
    away = any(placement.weights[tile] != DEVICE or placement.state[tile] != DEVICE for tile in tiles)
    widest = max((4 * matrix.columns for matrix in spec.matrices), default=0)
    return max(ROW_PIECE, widest) if placement.staged and away else 0


def log_bytes(unit: Unit) -> int:
    """A log of the unit's update, from which it can be taken back (see kernels/update_log)."""
    return sum(undo_log_bytes(entry.padded) + ALIGNMENT for entry in unit.trained.entries)


def keeps_log(unit: Unit, placement: Placement) -> bool:
    """Its update may be made before the norm is known, and taken back."""
    index = unit.index
    return unit.kind == BLOCK and bool(unit.trained.entries) and placement.state[index] == HOST == placement.home(index)


def log_place_bytes(spec: ModelSpec, placement: Placement) -> int:
    """One place for a log."""
    return max((log_bytes(unit) for unit in spec.units if keeps_log(unit, placement)), default=0)


def _element_bytes(unit: Unit) -> int:
    """What the update of one element reads: weight, gradient and state."""
    layouts = [unit.trained, unit.grads, *(layout for _, layout in unit.parts.values())]
    return max(sum(itemsize(layout.entries[i].dtype) for layout in layouts) for i in range(len(unit.trained.entries)))


@dataclass(frozen=True)
class GuardBytes:
    """What the check of blocks' gradients needs: places for the largest block."""

    weights: int = 0
    """Its weights in fp32, on the device."""
    grads: int = 0
    """Its gradients in fp32, on the host."""
    stage: int = 0
    """Its weights as the disk has them, on the host."""


def guard_bytes(spec: ModelSpec, placement: Placement) -> GuardBytes:
    """All 0 unless the placement is guarded."""
    blocks = [unit for unit in spec.units if unit.kind == BLOCK and unit.trained.entries]
    if not placement.guarded or not blocks:
        return GuardBytes()
    on_disk = [unit.stored.nbytes for unit in blocks if placement.home(unit.index) == DISK]
    return GuardBytes(
        max(unit.wide_weights.nbytes for unit in blocks),
        max(unit.wide_trained.nbytes for unit in blocks),
        max(on_disk, default=0),
    )


@dataclass(frozen=True)
class Footprint:
    """Bytes by region on each tier. Working memory of a block and of the loss comes on top on the device."""

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())


def footprint(spec: ModelSpec, placement: Placement) -> Footprint:
    """What `placement` allocates for `spec`."""
    device = {"weights": 0, "state": 0, "grads": 0}
    host = {"weights": 0, "state": 0, "grads": 0, "stages": 0}
    disk = {"weights": 0, "state": 0}
    tiers = {DEVICE: device, HOST: host, DISK: disk}
    for unit in spec.units:
        home, state = placement.home(unit.index), placement.state[unit.index]
        if not (home == DISK and unit.in_files):
            tiers[home]["weights"] += round_up(unit.stored.nbytes)
        if placement.weights[unit.index] == DEVICE and home != DEVICE:
            device["weights"] += round_up(unit.stored.nbytes)
        if unit.trained.entries:
            tiers[state]["state"] += round_up(unit.state_bytes)
            if state == DEVICE:
                device["grads"] += round_up(total_bytes(unit))  # summed there, in fp32
            elif not placement.rings(unit.index, unit.passes_ring):
                host["grads"] += round_up(unit.grads.nbytes)
            if unit.kind == REST and state != DEVICE:
                device["grads"] += round_up(unit.grads.nbytes)
                host["stages"] += round_up(unit.trained_bytes)
    for place in places_of(spec, placement):
        if place.nbytes:
            tiers[place.tier][place.region] = tiers[place.tier].get(place.region, 0) + round_up(place.nbytes)
    return Footprint(device, host, disk)


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
    log = log_place_bytes(spec, placement) if placement.log_places else 0
    for kind, nbytes, count, tier, region in (
        ("s", slot, placement.slots, DEVICE, "weights"),
        ("decoded", decoded_bytes(spec), 1, DEVICE, "weights"),
        ("g", send, placement.grad_slots, DEVICE, "grads"),
        ("total", total, 1, DEVICE, "grads"),
        ("d", piece_bytes(spec, placement) if passing else 0, placement.pieces if passing else 0, DEVICE, "state"),
        ("h", slot if staged else 0, placement.slots, HOST, "stages"),
        ("a", send, placement.grad_slots, HOST, "stages"),
        ("l", log, placement.logs, HOST, "logs"),
        ("v", log, placement.device_logs, DEVICE, "logs"),
        ("w", log, LOG_STAGES if placement.device_logs else 0, HOST, "stages"),
        ("q", ring_bytes(spec, placement) if placement.ring else 0, placement.ring, HOST, "grads"),
        ("u", stage, placement.update_slots, HOST, "stages"),
        ("e", piece, ROW_PIECES if piece else 0, HOST, "stages"),
        ("check weights", guard.weights, 1, DEVICE, "guard"),
        ("check grads", guard.grads, 1, HOST, "guard"),
        ("check stage", guard.stage, 1, HOST, "guard"),
    ):
        for number in range(count):
            yield Place(f"{kind}{number}" if len(kind) == 1 else kind, nbytes, tier, region)
