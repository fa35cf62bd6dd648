"""Places for gradients that a backward is about to bring, where the plan had not foreseen them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from headrace.base.errors import StoreError
from headrace.base.units import format_bytes
from headrace.schedule import build
from headrace.schedule.build import Visit
from headrace.spec.footprint import Place
from headrace.spec.model import BLOCK, REST, Unit
from headrace.spec.placement import DEVICE

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


def sum_apart(stream: Stream, spares: Callable[[int], bool]) -> None:
    """From now on the sums of a visit are made apart from earlier ones of a unit whose state is on the device, if there
    is room. `spares`: whether the device has it for so many bytes that stay."""
    # Weak, for hooks of parameters reach the sink.
    stream.sink.beside = functools.partial(_beside, weakref.proxy(stream), weakref.WeakMethod(spares))


def _beside(stream: Stream, spares: Callable[[], Callable[[int], bool] | None], unit: Unit) -> Tensor | None:
    """Device memory for the sums of one visit of a unit whose state is there, flat uint8, beside those of earlier ones.
    None, from now on, where there is no room: then the bits of results are not those of other placements."""
    regions, nbytes = stream.regions, unit.grads.nbytes
    if regions.places["total"].numel() < nbytes:
        units = (u for u in regions.spec.units if u.kind != REST and regions.placement.state[u.index] == DEVICE)
        place = Place("total", max(u.grads.nbytes for u in units), DEVICE, "grads")
        try:
            fits = spares()
            if fits is not None and fits(place.nbytes):
                regions.grow(place)
        except StoreError:
            pass
        grown = regions.places["total"].numel() >= nbytes
        text = "several sums of a block's gradients add up before step(), and "
        text += ("each is made in memory of its own" if grown else "there is no room to make each by itself: results "
                 "may differ in their last digits from those of other placements")  # fmt: skip
        stream.events.add("sums", f"{text}; headrace.accumulate(fn, micro_batches) makes one sum of all",
                          bytes=format_bytes(place.nbytes))  # fmt: skip
        if not grown:
            stream.sink.beside = lambda unit: None
            return None
    return regions.places["total"][:nbytes]
