"""Who lives where: the tier of each unit's weights and state, the slots, and when updates run."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
KEEP, SEND, RECOMPUTE = "keep", "host", "recompute"
ACTIVATIONS = (KEEP, RECOMPUTE, SEND)
"""What a block's backward begins with, what takes most device memory first: the graph of its forward, or its input,
from which it is recomputed, and which waits on the device or in host memory."""


@dataclass(frozen=True)
class Placement:
    """Tiers by unit index, and the counts of places that programs are built for."""

    weights: tuple[str, ...]
    state: tuple[str, ...]
    slots: int
    """Weight slots on the device."""
    staged: bool
    """Disk weights stop in page-locked host memory on their way to the device (a CUDA device), or go straight to it."""
    activations: tuple[str, ...] = ()
    """One of ACTIVATIONS for each block, by unit index. Empty: all are recomputed from inputs on the device."""
    grad_slots: int = 2
    update_slots: int = 3
    input_slots: int = 2
    updates: tuple[str, ...] = ()
    """Where units are updated whose state is in host memory, by unit index: "host", or "device", which their weights,
    gradients and state pass in pieces. Empty: all on the host."""
    device_cost: float | None = None
    """Time of an update that passes the device, relative to one on the host at the same time, by which step() shares
    what is left to it between both sides. None: each unit has its own side, see `updates`."""
    piece: int = 0
    """Elements of a unit that are on the device at a time for an update there; `pieces` of them pass at once."""
    pieces: int = 3
    logs: int = 0
    """Logs in host memory of updates that are made before the norm of all gradients is known."""
    device_logs: int = 0
    """More of them, in device memory."""
    guess_from: int = 0
    """Blocks whose gradients come first and are not guessed, where logs do not suffice for all: the next forward needs
    them last, and hides their updates."""
    ring: int = 0
    """Host places that the gradients of blocks pass through, when every block is updated at once. 0: each has one."""
    late: frozenset[int] = frozenset()
    """Units that step() updates where the backward updates the others, though their gradients come first: the next
    forward needs them last, and hides their updates. Their gradients have places of their own and pass no ring."""
    guarded: bool = False
    """Blocks' gradients are checked by fp32 copies now and then: for one block at a time there are places for them."""

    def home(self, unit: int) -> str:
        """The tier that holds the weights an update writes; device copies beside it are refreshed from there."""
        if self.weights[unit] == DEVICE:
            return self.state[unit] if self.state[unit] == DEVICE else HOST
        return self.weights[unit]

    def updated_on(self, unit: int) -> str:
        """The tier that computes a unit's update: "device" or "host"."""
        if self.state[unit] == DEVICE:
            return DEVICE
        return self.updates[unit] if self.updates else HOST

    @property
    def log_places(self) -> list[str]:
        """Names of all places for logs."""
        return [f"l{number}" for number in range(self.logs)] + [f"v{number}" for number in range(self.device_logs)]

    def rings(self, unit: int, passes: bool) -> bool:
        """The unit's gradients pass the ring. `passes`: they can, see Unit.passes_ring."""
        return bool(self.ring) and passes and unit not in self.late

    def keeps(self, unit: int) -> bool:
        """The graph of a block's forward stays until its backward."""
        return bool(self.activations) and self.activations[unit] == KEEP

    def sends(self, unit: int) -> bool:
        """A block's input waits in host memory for its backward."""
        return bool(self.activations) and self.activations[unit] == SEND

    @property
    def resident(self) -> bool:
        """All weights and all state live on the device."""
        return all(tier == DEVICE for tier in (*self.weights, *self.state))

    def streams(self, unit: int) -> bool:
        return self.weights[unit] != DEVICE

    def __str__(self) -> str:
        def count(tiers: tuple[str, ...]) -> str:
            return ", ".join(f"{tiers.count(tier)} on {tier}" for tier in TIERS if tier in tiers)

        return f"weights: {count(self.weights)}; state: {count(self.state)}; {self.slots} slots"
