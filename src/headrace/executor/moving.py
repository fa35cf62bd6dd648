"""What leaves the device where a step needs its place: logs of updates, then blocks. No number changes by a bit.

[Note: Moving] A move comes between passes, or inside a forward visit: what the program has ahead is given up, all that
is under way comes to its end (updates of the step before too), the regions are copied, and the pass goes on with
another program from its next visit, as after calls that left the expected order. Only the unit that computes stays.
Logs on the device go first: a guess that one holds is taken back, and its block is updated when it is known how.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from headrace.base.units import format_bytes
from headrace.executor.interrupts import uninterrupted
from headrace.executor.stream import Stream
from headrace.plan.moves import moves_out
from headrace.plan.summary import counted
from headrace.spec.placement import DEVICE, Placement
from headrace.store.moving import cost_of_move, move


@dataclass
class Moving:
    """Makes room on the device."""

    stream: Stream

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
        self._move(after)
        units = regions.spec.units
        gone = counted(u for u in units if after.streams(u.index) and not before.streams(u.index))
        left = sum(not after.streams(u.index) for u in units)
        self.stream.events.add("moved", f"{gone} left the device for host memory: {why}", freed=format_bytes(freed),
                               host=format_bytes(taken), still_there=left, **numbers)  # fmt: skip
        return freed

    def _ways(self, stay: int | None) -> Iterator[tuple[Placement, int, int]]:
        """(placement, bytes of the device that it frees, bytes of host memory that it takes), least first."""
        regions = self.stream.regions
        if any(regions.movable(unit) for unit in regions.spec.units):
            for after in moves_out(regions.spec, regions.placement, () if stay is None else (stay,)):
                yield after, *cost_of_move(regions, after)

    def _move(self, after: Placement) -> None:
        stream, device = self.stream, self.stream.device
        stream.interrupt()
        stream.executor.quiet()
        if device.type == "cuda":  # kernels of visits before this one may still read what goes
            torch.cuda.synchronize(device)
        if after.device_logs < stream.placement.device_logs:
            stream.actions.guesses.undo_distant()
        sparse = stream.actions.ledger.sparse
        with uninterrupted():  # half of them would be nowhere
            move(stream.regions, after)
            for unit in sparse:
                if after.state[unit] != DEVICE:
                    sparse[unit] = sparse[unit].cpu()
