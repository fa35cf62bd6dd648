"""Quantised bases in a session: which weights get a codec, whether the run needs one, and their way into the stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError, PlanError
from headrace.base.events import EventLog
from headrace.codec.entries import error_of
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
from headrace.session.options import Options
from headrace.session.values import Values
from headrace.spec.placement import DEVICE, Placement
from headrace.spec.precision import as_map

LADDER = ("int8", "nf4")
"""What "auto" tries, the most precise first."""

Planned = tuple[Anatomy, Placement]


def fitting(
    model: nn.Module, options: Options, plan: Callable[[Options, EventLog], Planned], events: EventLog
) -> tuple[Options, Anatomy, Placement]:
    """The options with the codec that is used, and what `plan` makes of them: (anatomy, placement).

    Under "auto" none is used when the run fits without; prefer="speed" takes the smallest as soon as frozen weights
    would have to stream.
    """
    asked = options.quantize
    if asked is None and any(WISH in vars(module) for module in model.modules()):
        asked = AUTO
    marked = any(codec_of(parameter) is not None for parameter in model.parameters())
    if asked != AUTO or marked:
        options = replace(options, quantize=None if asked == AUTO else asked)
        return options, *plan(options, events)
    why, least = "", LADDER[-1]
    for codec in (None, *LADDER):
        chosen, log = replace(options, quantize=codec), EventLog()
        try:
            _, placement = plan(chosen, log)
        except OptionError as error:  # nothing is frozen, and there is nothing to choose
            why = why or error.what
            break
        except PlanError as error:
            why = f"without a codec {error.what}" if codec is None else why
            continue
        streams = any(tier != DEVICE for tier in placement.weights)
        if options.prefer == "speed" and streams and codec != least:
            why = why or "weights have to stream, and fewer bytes stream faster"
            continue
        text = "auto: the run fits without a codec" if codec is None else f"auto: {codec}, since {why}"
        events.add("quantize", text)
        return chosen, *plan(chosen, events)
    events.add("quantize", f"auto: no codec helps: {why}")
    options = replace(options, quantize=None)
    return options, *plan(options, events)


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
        self.originals: dict[str, Tensor] = {}
        """Weights that were ordinary tensors, by name."""

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Make the parameter's value the weight called `name`."""
        ((_, _, entry),) = self._values.pieces(name)
        home = packed_home(parameter)
        if home is not None and home.entry.codec == entry.codec:
            self._values.write_packed(name, home.packed)
            error = home.error
        else:
            if is_parked(parameter) and self._source is not None:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._source.read_into(getattr(parameter, "_headrace_name", name), value)
            else:
                value = self.originals[name] = parameter.data
            self._values.write_weight(name, value)
            error = error_of(entry, value, self._values.read_packed(name))
        self._losses.add(entry, error)

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
