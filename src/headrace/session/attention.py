"""Which of torch's kernels computes attention in the blocks: a named one, or the fastest at the shape they have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.events import EventLog
from headrace.hardware.attention import DIFFERS, NAMES, Shape, attention_kernels, preferring
from headrace.session.subject import attention_of

AUTO = "auto"
CLOSE = 0.97
"""torch's own choice stays where it takes no longer than the best kernel's time over this."""

Forward = Callable[..., Any]


class Attention:
    """Chooses once, when the first block runs, and again when torch's deterministic mode changes.

    A kernel that cannot compute a call (with a mask, say, which flash attention does not take) leaves it to the next:
    the choice is an order. Blocks that do not call scaled_dot_product_attention compute as they do without.
    """

    def __init__(self, wish: str, model: nn.Module, device: torch.device, events: EventLog) -> None:
        """`wish`: "auto", or one of NAMES."""
        self._wish, self._device, self._events = wish, device, events
        self._config = getattr(model, "config", None)
        self._orders: dict[bool, tuple[str, ...]] = {}
        """The order by mode; empty: torch's own choice."""

    def around(self, forward: Forward) -> Forward:
        """A block's forward, under the choice."""

        @functools.wraps(forward)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            with self._context(args, kwargs):
                return forward(*args, **kwargs)

        return chosen

    def _context(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        mode = torch.are_deterministic_algorithms_enabled()
        if mode not in self._orders:
            hidden = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() == 3), None)
            shape = None if hidden is None else shape_of(self._config, hidden)
            self._orders[mode] = self._choose(shape, hidden, mode)
        order = self._orders[mode]
        return preferring(order) if order else contextlib.nullcontext()

    def _choose(self, shape: Shape | None, hidden: Tensor | None, repeatable: bool) -> tuple[str, ...]:
        if shape is None or hidden is None:
            known = "" if self._wish == AUTO else self._wish
            text = "the shape of the model's attention is not known: "
            self._events.add("attention", text + (f"{known} comes first" if known else "torch chooses its kernel"),
                             dimensions=None if hidden is None else hidden.dim())  # fmt: skip
            return _first(known) if known else ()
        kind = self._device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        seconds, left = attention_kernels(shape, dtype, self._device, repeatable)
        numbers = {name or "torch's choice": f"{1e3 * each:.3g} ms" for name, each in seconds.items()}
        mode = " under deterministic algorithms" if repeatable else ""
        at = f"attention of {shape}{mode}"
        own = seconds.pop("", float("inf"))
        if self._wish != AUTO:
            able = self._wish in seconds or (self._wish == "math" and left.get("math") == "another kernel runs")
            why = "" if able else f", which cannot: {left.get(self._wish)}; others compute then"
            self._events.add("attention", f"{at} by {self._wish}{why}", **numbers)
            return tuple(name for name in _first(self._wish) if left.get(name) != DIFFERS)
        if not seconds:
            self._events.add("attention", f"{at}: no kernel ran alone, torch chooses; {left}", tried=len(left))
            return ()
        best = min(seconds, key=lambda name: seconds[name])
        stays = own * CLOSE <= seconds[best] and not (repeatable and left)
        text = "torch's own choice is as fast as any" if stays else f"{best} is the fastest"
        self._events.add("attention", f"{at}: {text}", **numbers)
        ranked = sorted(seconds, key=lambda name: seconds[name])
        return () if stays else tuple(dict.fromkeys((*ranked, "math")))


def _first(name: str) -> tuple[str, ...]:
    return (name, *(other for other in NAMES if other != name))


def shape_of(config: Any, hidden: Tensor) -> Shape | None:
    """That of a transformers model's attention on hidden states (rows, tokens, features); None when it does not say."""
    found = attention_of(config, hidden.shape[-1])
    if found is None:
        return None
    return Shape(hidden.shape[0], found.heads, found.kv_heads, hidden.shape[1], found.head_dim)
