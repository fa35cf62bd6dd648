"""Places in host memory for gradients that a backward is about to bring, where the plan had not foreseen them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.base.units import format_bytes
from headrace.schedule import build
from headrace.schedule.build import Visit
from headrace.spec.model import BLOCK

if TYPE_CHECKING:
    from headrace.executor.stream import Stream


def make_places(stream: Stream, visits: Sequence[Visit], early: bool) -> None:
    """Before the backward of these visits, which gives weights gradients. `early`: it updates them too. Raises
    PlanError where host_memory has no room."""
    if stream.placement.ring:
        _hold(stream, visits, early)
    _widen(stream, visits)


def _hold(stream: Stream, visits: Sequence[Visit], early: bool) -> None:
    """Gradients that no update of this pass uses at once need a place each."""
    units = [visit.unit for visit in visits if visit.kind == BLOCK and visit.grad]
    if early and len(units) == len(set(units)) and not stream.held.intersection(units):
        return
    size = stream.regions.hold()
    stream.events.add("hold", "gradients of a backward without updates: each block keeps its own from now; declare "
                      "accumulation as it is to save this", bytes=format_bytes(size))  # fmt: skip


def _widen(stream: Stream, visits: Sequence[Visit]) -> None:
    """Gradients are about to be added to 16-bit ones: from now on these units' sums are kept in fp32."""
    counts = Counter(unit for visit in visits if visit.grad for unit in build.contributes(stream.spec, visit))
    again = [unit for unit, count in counts.items() if count > 1 or unit in stream.held]
    narrow = [unit for unit in again if build.sums_narrow(stream.spec.units[unit])]
    if not narrow:
        return
    # Updates under way still read the gradients where they are now.
    stream.executor.wait(*(f"{token}:u{unit}" for unit in narrow for token in ("grads", "updated")))
    size = stream.regions.widen(narrow)
    stream.events.add("widen", "several gradients of a block add up before step(): they are summed in fp32 from now "
                      "on; headrace.accumulate needs none of it", bytes=format_bytes(size))  # fmt: skip
