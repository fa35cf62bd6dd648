"""Linear layers that multiply their weights as a codec stores them (`products="stored"`), where the GPU has the cores.

The forward product is that of `headrace.kernels.stored`, whose activations are rounded to the codec's format. The
backward takes the weight as it is decoded, in the model's own format, as if the forward had: a gradient of what was
rounded away is none (straight through). So nothing of the input is kept for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError
from headrace.base.events import EventLog
from headrace.codec.packed import views
from headrace.kernels import stored
from headrace.spec.codecs import MULTIPLIED, codec_named
from headrace.spec.layout import Entry
from headrace.spec.precision import STORED


def _multiply(x: Tensor, weight: Tensor, packed: Tensor, codec: str) -> Tensor:
    """x (..., k) times the weight (n, k) that `packed` holds; `weight` is the same, decoded."""
    parts = views(codec_named(codec), tuple(weight.shape), packed)
    return stored.product(codec, x.reshape(-1, x.shape[-1]), parts).view(*x.shape[:-1], weight.shape[0])


@functools.cache
def operators() -> Any:
    """The operator stored_product, as torch knows it from now on. It is opaque to torch.compile."""
    library = torch.library
    library.define("headrace::stored_product", "(Tensor x, Tensor weight, Tensor packed, str codec) -> Tensor")
    library.impl("headrace::stored_product", ("cpu", "cuda"), _multiply)

    def shape(x: Tensor, weight: Tensor, packed: Tensor, codec: str) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    library.register_fake("headrace::stored_product", shape)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None, None

    library.register_autograd("headrace::stored_product", backward, setup_context=save)
    return torch.ops.headrace


class StoredLinear(nn.Linear):
    """A linear layer in the place of an ordinary one. While its weight is leased, `stored` is the weight's packed
    bytes, and `codec` says how they are."""

    stored: Tensor | None = None
    codec = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is None:
            return super().forward(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: Tensor = torch.ops.headrace.stored_product(x, self.weight, self.stored, self.codec)
        return result if self.bias is None else result + self.bias.to(result.dtype)


StoredLinear.__name__ = StoredLinear.__qualname__ = nn.Linear.__name__

Places = Sequence[tuple[StoredLinear, int]]
"""Layers of a block, and the position of each one's weight in the block's unit."""


@contextlib.contextmanager
def showing(
    places: Places, packed: Callable[[], Sequence[Tensor]], lease: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Inside `lease`, which points the unit's parameters at their decoded values, the layers in `places` multiply what
    is stored. `packed`: the unit's weights as they are stored."""
    with lease:
        try:
            views = packed() if places else ()
            for layer, index in places:
                layer.__dict__["stored"] = views[index]
            yield
        finally:
            for layer, _ in places:
                layer.__dict__.pop("stored", None)


def refuse_lacking(codecs: Iterable[str], device: torch.device) -> None:
    """Raise OptionError unless `device` multiplies weights in one of these codecs, and lacks nothing for the others."""
    names = sorted({codec_named(codec).name for codec in codecs})
    fitting = [name for name in names if name in MULTIPLIED]
    if not fitting:
        raise OptionError(
            f"products={STORED!r} multiplies weights in {' or '.join(MULTIPLIED)}",
            f"the frozen weights are stored {'in ' + ', '.join(names) if names else 'in their own format'}",
            "Give quantize='fp8' or 'nvfp4', as the GPU has cores for; or leave products out",
        )
    for name in fitting:
        reason = stored.lacking(name, device)
        if reason:
            raise OptionError(
                f"{device} cannot multiply weights in {name} as they are stored", reason,
                f"Leave products out: {name} is then only stored so, and decoded where it computes",
            )  # fmt: skip


def replace(
    block: nn.Module, entries: Sequence[Entry], names: Mapping[int, str], device: torch.device, left: Counter[str],
    undo: list[Callable[[], None]],
) -> list[tuple[StoredLinear, int]]:  # fmt: skip
    """Let the linear layers of a block whose weights the device multiplies as they are stored do so. `entries`: of its
    unit; `names`: of parameters, by id. `left` counts why weights in such codecs are decoded."""
    operators()
    chosen = {e.name: (i, e.codec) for i, e in enumerate(entries) if e.codec in MULTIPLIED}
    places = []
    for module in block.modules():
        for key, parameter in module._parameters.items():
            index, codec = chosen.pop(names.get(id(parameter), ""), (0, None))
            if codec is None:
                continue
            reason = _left(module, key, codec, device)
            if reason:
                left[reason] += 1
                continue
            layer: Any = module
            layer.__class__, layer.__dict__["codec"] = StoredLinear, codec
            undo.append(functools.partial(_ordinary, layer))
            places.append((layer, index))
    return places


def _left(module: Any, key: str, codec: str, device: torch.device) -> str:
    """Why a weight is decoded for its products."""
    if type(module) is not nn.Linear or key != "weight":
        return f"{type(module).__name__} is no plain linear layer"
    return stored.check(codec, device, module.out_features, module.in_features)


def _ordinary(layer: Any) -> None:
    layer.__class__ = nn.Linear
    layer.__dict__.pop("codec", None)


def tell(codecs: Counter[str], replaced: int, left: Counter[str], products: str, events: EventLog) -> None:
    """Say whether weights in a codec that some cores multiply are multiplied so, or only stored. `codecs`: how many
    weights have each; `replaced`: how many are multiplied as they are stored."""
    names = sorted(codecs.keys() & set(MULTIPLIED))
    if products == STORED:
        others = "".join(f"; {count} are decoded: {reason}" for reason, count in left.items())
        text = f"weights in {' and '.join(names)} multiply as they are stored, beside activations that are rounded to "
        text += f"the same format; gradients come from the decoded weights{others}"
        events.add("quantize", text, matrices=replaced, of=sum(codecs[name] for name in names))
        return
    for name in names:
        text = "only stored so, whatever the device could multiply: they are decoded to the model's own format, and "
        text += f'multiply in it (products="{STORED}" multiplies them as they are)'
        events.add("quantize", f"weights in {name} are {text}", matrices=codecs[name])
