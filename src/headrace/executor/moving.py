"""What leaves the device where a step needs its place: logs of updates, then blocks. No number changes by a bit.

[Note: Moving] A move comes between passes, or inside a forward visit: what the program has ahead is given up, all that
is under way comes to its end (updates of the step before too), the regions are copied, and the pass goes on with
another program from its next visit, as after calls that left the expected order. Only the unit that computes stays.
Logs on the device go first: a guess that one holds is taken back, and its block is updated when it is known how.

Blocks come back between two steps, when some steps have left room for them. Each time that they had to leave again, so
many steps more have to: batches that are long now and then do not move blocks all the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

import torch

from headrace.base.errors import StoreError
from headrace.base.units import format_bytes
from headrace.executor.interrupts import uninterrupted
from headrace.executor.stream import Stream
from headrace.plan.moves import moves_out
from headrace.plan.summary import counted
from headrace.spec.model import BLOCK
from headrace.spec.placement import DEVICE, Placement
from headrace.store.moving import cost_of_move, cost_of_return, may_return, move, move_back

STEPS = 16
"""Steps that must have left room on the device before blocks come back to it, at first."""


@dataclass
class Moving:
    """Makes room on the device, and uses it again."""

    stream: Stream
    steps: int = field(default_factory=lambda: STEPS)
    """Steps that must leave room from now on before blocks come back."""
    _before: Placement | None = None
    """Where all was before anything had left."""
    _calm: int = 0
    """Steps since something left the device, or since it was last seen whether something may come back."""
    _came: bool = False
    """Something has come back since it left."""

    @property
    def away(self) -> bool:
        """Some blocks have left the device that may come back."""
        return bool(self._returning())

    def drop_logs(self, need: int | None, **numbers: object) -> int:
        """Give up as few logs on the device as free `need` bytes of it; all where they are not enough, or for None.
        Returns the bytes that were freed. `numbers`: for the event."""
        regions, before = self.stream.regions, self.stream.regions.placement
        fewer = [replace(before, device_logs=left) for left in reversed(range(before.device_logs))]
        if not fewer or (need is not None and need < 1):
            return 0
        freed = [cost_of_move(regions, way)[0] for way in fewer]
        most = len(fewer) - 1
        chosen = most if need is None else next((n for n, each in enumerate(freed) if each >= need), most)
        self._move(fewer[chosen])
        text = f"{chosen + 1} of {before.device_logs} logs on the device were given up: a step needs their place"
        self.stream.events.add("guesses", text, freed=format_bytes(freed[chosen]),
                               logs_left=len(regions.placement.log_places), **numbers)  # fmt: skip
        return freed[chosen]

    def most(self, stay: int | None = None) -> int:
        """Bytes that would be free if all blocks left the device that may. `stay`: the unit that computes just now."""
        return max((freed for _, freed, _ in self._ways(stay)), default=0)

    def free(self, need: int, why: str, stay: int | None = None, **numbers: object) -> int:
        """Let as few units leave the device as free `need` bytes of it. Returns the bytes that were freed: 0 where all
        of them are not enough, or host memory is not, and then nothing has moved. `why`, `numbers`: for the event."""
        regions = self.stream.regions
        way = next((way for way in self._ways(stay) if way[1] >= max(1, need)), None)
        if way is None:
            return 0
        after, freed, taken = way
        room, shared = regions.host_room, regions.device.type == "cpu"
        if room is not None and taken > room + shared * freed:
            text = f"blocks stay on the device although {why}: host_memory has no room for them"
            self.stream.events.add("moved", text, needed=format_bytes(taken), available=format_bytes(max(0, room)))
            return 0
        before = regions.placement
        self._before, self._calm = self._before or before, -1  # the step under way is none that leaves room
        if self._came:
            self.steps, self._came = 2 * self.steps, False
        self._move(after)
        units = regions.spec.units
        gone = counted(u for u in units if after.streams(u.index) and not before.streams(u.index))
        left = sum(not after.streams(u.index) for u in units)
        self.stream.events.add("moved", f"{gone} left the device for host memory: {why}", freed=format_bytes(freed),
                               host=format_bytes(taken), still_there=left, **numbers)  # fmt: skip
        return freed

    def step(self) -> bool:
        """A step has been made. Whether so many have been by now that blocks may come back; it is not asked again
        before as many have."""
        self._calm += 1
        if self._calm < self.steps or not self.away:
            return False
        self._calm = 0
        return True

    def come_back(self, room: int) -> bool:
        """Let as many blocks come back as `room` bytes of the device are enough for, while no gradients wait. Returns
        whether some have."""
        regions, returning = self.stream.regions, self._returning()
        spec, now = regions.spec, regions.placement
        assert self._before is not None
        back = _as_before(now, self._before, returning)
        others = [unit.index for unit in spec.units if unit.index not in returning]
        ways = [back, *moves_out(spec, back, others)]
        after = next((way for way in ways if cost_of_return(regions, way) <= room), now)
        came = [unit for unit in returning if not after.streams(unit)]
        if not came:
            return False
        taken = cost_of_return(regions, after)
        self._settle()
        try:
            with uninterrupted():
                move_back(regions, after)
        except (StoreError, torch.OutOfMemoryError) as error:
            self.steps *= 2
            text = "blocks stay in host memory: the device has no room for them after all"
            self.stream.events.add("moved", text, needed=format_bytes(taken), said=str(error).partition("\n")[0])
            return False
        self._came = True
        text = f"{counted(spec.units[u] for u in came)} came back to the device: the last steps have left room there"
        self.stream.events.add("moved", text,
                               taken=format_bytes(taken), room=format_bytes(room),
                               steps=self.steps, still_away=len(self._returning()))  # fmt: skip
        return True

    def _returning(self) -> list[int]:
        units = self.stream.spec.units
        return [unit for unit in may_return(self.stream.regions) if units[unit].kind == BLOCK]

    def _ways(self, stay: int | None) -> Iterator[tuple[Placement, int, int]]:
        """(placement, bytes of the device that it frees, bytes of host memory that it takes), least first."""
        regions = self.stream.regions
        if any(regions.movable(unit) for unit in regions.spec.units):
            for after in moves_out(regions.spec, regions.placement, () if stay is None else (stay,)):
                yield after, *cost_of_move(regions, after)

    def _settle(self) -> None:
        """Nothing is under way any more."""
        stream, device = self.stream, self.stream.device
        stream.interrupt()
        stream.executor.quiet()
        if device.type == "cuda":  # kernels of visits before this one may still read what goes
            torch.cuda.synchronize(device)

    def _move(self, after: Placement) -> None:
        stream = self.stream
        self._settle()
        if after.device_logs < stream.placement.device_logs:
            stream.actions.guesses.undo_distant()
        sparse = stream.actions.ledger.sparse
        with uninterrupted():  # half of them would be nowhere
            move(stream.regions, after)
            for unit in sparse:
                if after.state[unit] != DEVICE:
                    sparse[unit] = sparse[unit].cpu()


def _as_before(now: Placement, before: Placement, units: Collection[int]) -> Placement:
    """`now`, with these units where they were before."""

    def mixed(new: tuple[str, ...], old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(old[unit] if unit in units else tier for unit, tier in enumerate(new))

    updates = mixed(now.updates, before.updates) if now.updates and before.updates else now.updates
    return replace(
        now, weights=mixed(now.weights, before.weights), state=mixed(now.state, before.state), updates=updates
    )
