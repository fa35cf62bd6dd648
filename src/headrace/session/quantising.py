"""Quantised bases in a session: which weights get a codec, whether the run needs one, and their way into the stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headrace.base.errors import OptionError, PlanError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.codec.entries import error_of, pack_into
from headrace.model.blocks import Stack
from headrace.model.parked import is_parked
from headrace.model.quantised import (
    AUTO,
    WISH,
    Losses,
    candidates,
    choose,
    codec_of,
    packed_home,
    refuse_foreign,
    refuse_marked,
)
from headrace.model.units import Anatomy
from headrace.plan.decide import Plan
from headrace.session.options import Options
from headrace.session.values import Values
from headrace.spec.codecs import codec_named
from headrace.spec.footprint import footprint
from headrace.spec.layout import Entry
from headrace.spec.placement import DEVICE
from headrace.spec.precision import as_map
from headrace.store.memory import Scratch

LADDER = ("int8", "nf4")
"""What "auto" tries, the most precise first."""

Planned = tuple[Anatomy, Plan]


def fitting(
    model: nn.Module, options: Options, plan: Callable[[Options, EventLog], Planned], events: EventLog
) -> tuple[Options, Anatomy, Plan]:
    """The options with the codec that is used, and what `plan` makes of them: (anatomy, plan).

    Under "auto" none is used when the run fits without; prefer="speed" takes the smallest as soon as frozen weights
    would have to stream.
    """
    asked = options.quantize
    if asked is None and any(WISH in vars(module) for module in model.modules()):
        asked = AUTO
    marked = any(codec_of(parameter) is not None for parameter in model.parameters())
    if asked != AUTO or marked:
        if options.prefer != "quality":
            events.add("quantize", f'prefer={options.prefer!r} changes nothing: it is for quantize="auto"',
                       marked=marked)  # fmt: skip
        options = replace(options, quantize=None if asked == AUTO else asked)
        return options, *plan(options, events)
    why, least = "", LADDER[-1]
    for codec in (None, *LADDER):
        chosen, log = replace(options, quantize=codec), EventLog()
        try:
            _, found = plan(chosen, log)
        except OptionError as error:  # nothing is frozen, and there is nothing to choose
            why = why or error.what
            break
        except PlanError as error:
            why = f"without a codec {error.what}" if codec is None else why
            continue
        streams = any(tier != DEVICE for tier in found.placement.weights)
        if options.prefer == "speed" and streams and codec != least:
            why = why or "weights have to stream, and fewer bytes stream faster"
            continue
        text = "auto: the run fits without a codec" if codec is None else f"auto: {codec}, since {why}"
        events.add("quantize", text, **_needs(found))
        return chosen, *plan(chosen, events)
    events.add("quantize", f"auto: no codec helps: {why}", tried=len(LADDER))
    options = replace(options, quantize=None)
    return options, *plan(options, events)


def _needs(found: Plan) -> dict[str, object]:
    """What a run without its batches takes, for an event."""
    need = footprint(found.choice.subject.spec, found.placement)
    return {"device": format_bytes(need.device_bytes), "host": format_bytes(need.host_bytes)}


def codecs_for(model: nn.Module, stacks: Sequence[Stack], options: Options, trained: Collection[int]) -> dict[int, str]:
    """The codec of each frozen weight that has one, by id of parameter. `trained`: ids of parameters.

    Raises OptionError when nothing frozen can be quantised, or when a quantised weight is to be trained.
    """
    refuse_foreign(model)
    if options.quantize is not None:
        refuse_marked(model)
        return choose(candidates(model, stacks), as_map(options.quantize), lambda p: id(p) not in trained)
    codecs = {}
    for name, parameter in model.named_parameters():
        codec = codec_of(parameter)
        if codec is not None and (id(parameter) in trained or parameter.requires_grad):
            raise OptionError(f"{name} is quantised as {codec} and cannot be trained",
                              "a trained weight keeps its precision",
                              "Freeze it and train adapters, or load the model without quantize")  # fmt: skip
        if codec is not None:
            codecs[id(parameter)] = codec
    return codecs


class Encoder:
    """Puts weights that have a codec into the stores, and remembers what they were until `wrap` has succeeded."""

    def __init__(self, values: Values, source: Any) -> None:
        self._values, self._source = values, source
        self._losses, self._left = Losses(), 0
        self._value, self._packed = Scratch(), Scratch()
        self.originals: dict[str, Tensor] = {}
        """Weights that were ordinary tensors, by name."""

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Make the parameter's value the weight called `name`."""
        ((_, _, entry),) = self._values.pieces(name)
        home = packed_home(parameter)
        if home is not None and home.entry.codec == entry.codec:
            self._values.write_packed(name, home.packed)
            error = home.error
        elif is_parked(parameter) and self._source is not None:
            label = getattr(parameter, "_headrace_name", name)
            error = self._put(name, entry, lambda packed: self._read(label, parameter, entry, packed))
        else:
            value = self.originals[name] = parameter.data
            error = self._put(name, entry, lambda packed: _encode(entry, value, packed))
        self._losses.add(entry, error)

    def _put(self, name: str, entry: Entry, fill: Callable[[Tensor], float]) -> float:
        """Let `fill` write the bytes of the weight where they stay, or into memory for one weight on their way there.
        Returns what it returns."""
        place = self._values.packed_place(name)
        packed = self._packed.first(codec_named(str(entry.codec)).nbytes(entry.shape)) if place is None else place
        error = fill(packed)
        if place is None:
            self._values.write_packed(name, packed)
        return error

    def _read(self, label: str, parameter: nn.Parameter, entry: Entry, packed: Tensor) -> float:
        error: float | None = self._source.read_packed_into(label, entry, packed)
        if error is not None:
            return error
        value = self._value.first(parameter.numel() * parameter.dtype.itemsize)
        value = value.view(parameter.dtype).view(parameter.shape)
        self._source.read_into(label, value)
        return _encode(entry, value, packed)

    def leave(self, name: str, parameter: nn.Parameter) -> None:
        """The weight stays where it is: in the model's own files."""
        home = packed_home(parameter)
        self._left += 1
        if home is not None:
            self._losses.add(home.entry, home.error)

    def tell(self, events: EventLog) -> None:
        if self._left:
            events.add("files", "frozen weights whose home is the disk are read from the model's own files, without a "
                       "copy; leave the files as they are while the session is open", weights=self._left)  # fmt: skip
        self._losses.tell(events)


def _encode(entry: Entry, value: Tensor, packed: Tensor) -> float:
    pack_into(entry, value, packed)
    return error_of(entry, value, packed)
