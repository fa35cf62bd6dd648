"""Frozen matrices that are stored with a codec: which of a model's can be, and parameters whose home is packed bytes.

A quantised parameter is parked (model/parked.py): it has its name, its shape and its dtype, whoever reads it gets the
decoded value, and whoever writes it has the value encoded again. So a quantised model runs as it is, slowly, and trains
adapters when it is wrapped.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError, OptionError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes, plural
from headrace.codec.entries import error_of, pack, unpack
from headrace.model.blocks import Stack, find_blocks
from headrace.model.parked import WeightValue, is_parked, park, placeholder
from headrace.model.resident import of_adapters
from headrace.spec.codecs import codec_named
from headrace.spec.formats import itemsize
from headrace.spec.layout import Entry
from headrace.spec.precision import PrecisionMap, as_map

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FOREIGN = {"Params4bit": "bitsandbytes", "Int8Params": "bitsandbytes", "QTensor": "quanto"}
"""Classes of weights that other libraries have quantised."""
CODEC = "_headrace_codec"
"""On a parameter: the codec that it is stored with, or will be."""
AUTO, WISH = "auto", "_headrace_quantize"
"""What `quantize=` may be in place of a codec, and where a model from `load_model` keeps that it was."""


@dataclass(frozen=True)
class Candidate:
    """A matrix in a block that a codec can store."""

    name: str
    parameter: nn.Parameter
    position: int
    """Of its block in its stack."""
    blocks: int
    """In that stack."""

    @property
    def base_name(self) -> str:
        """The name without what peft adds to it, which is what patterns of a precision map mean: a map made for a model
        holds when adapters have been put around it."""
        parts = self.name.removeprefix("base_model.model.").split(".")
        return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


@dataclass
class Losses:
    """What codecs have saved and what they have cost, weight by weight."""

    before: int = 0
    """Bytes of the weights as they were."""
    after: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    """Relative L2 distance of the decoded weight from what it was, by name."""
    weights: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Codec, bytes before and bytes after of each weight, by name."""

    def add(self, entry: Entry, error: float) -> None:
        assert entry.codec is not None
        before, after = entry.numel * itemsize(entry.dtype), codec_named(entry.codec).nbytes(entry.shape)
        self.before += before
        self.after += after
        self.errors[entry.name] = error
        self.weights[entry.name] = entry.codec, before, after

    def tell(self, events: EventLog) -> None:
        if self.errors:
            counts = Counter(codec for codec, _, _ in self.weights.values())
            what = ", ".join(f"{plural(count, 'matrix', 'matrices')} as {codec}" for codec, count in counts.items())
            worst = max(self.errors, key=lambda name: self.errors[name])
            events.add("quantize", f"frozen weights are stored compressed: {what}", before=format_bytes(self.before),
                       after=format_bytes(self.after), worst_error=f"{self.errors[worst]:.4f}", of=worst)  # fmt: skip


def candidates(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[Candidate]:
    """Weights of linear layers in blocks, and stacks of matrices (fused experts) in modules of other kinds; nothing
    that an adapter holds, which keeps its precision also while it is frozen beside another one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = {id(parameter) for _, _, parameter in of_adapters(model)}
    for stack in stacks:
        for position, block in enumerate(stack.blocks):
            for module in block.modules():
                for parameter in module._parameters.values():
                    if parameter is not None and id(parameter) not in seen and _is_matrix(module, parameter):
                        seen.add(id(parameter))
                        yield Candidate(names[id(parameter)], parameter, position, len(stack.blocks))


def _is_matrix(module: nn.Module, parameter: nn.Parameter) -> bool:
    if parameter.dtype not in FLOATS or isinstance(module, nn.modules.conv._ConvNd):
        return False
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # transformers' transposed linear layer
    return parameter.dim() == 3 or (parameter.dim() == 2 and linear)


def choose(
    found: Iterable[Candidate], precision: PrecisionMap, frozen: Callable[[nn.Parameter], bool]
) -> dict[int, str]:
    """The codec of each frozen matrix that `precision` quantises, by id of parameter.

    Raises OptionError when there is none, or when an override names no matrix that has a choice.
    """
    found = list(found)
    names = [candidate.base_name for candidate in found]
    stray = [f"{pattern!r}: {text!r}" for pattern, text in precision.pairs if not fnmatch.filter(names, pattern)]
    if stray:
        raise OptionError(
            f"of the precision map's overrides, {' and '.join(stray)} match no matrix of a block",
            f"{len(names)} have a choice, such as {names[0] if names else 'none'}",
            "Give a pattern of such names. Embeddings, heads, vectors and what several modules share keep their "
            "own format",
        )
    free = [candidate for candidate in found if frozen(candidate.parameter)]
    if not free:
        raise OptionError(
            "there is nothing frozen to quantise",
            f"all {len(found)} matrices of the blocks are trained, and a trained weight keeps its precision",
            "Add LoRA adapters with peft, or freeze the base with requires_grad_(False) and train the rest",
        )
    codecs = {
        id(c.parameter): codec
        for c in free
        if (codec := precision.codec_of(c.base_name, c.parameter.numel(), c.position, c.blocks)) is not None
    }
    if not codecs:
        raise OptionError(
            "the precision map quantises nothing", f"it keeps all {len(free)} frozen matrices: {precision}",
            "Let it keep fewer, or leave quantize out",
        )  # fmt: skip
    return codecs


def codec_of(parameter: nn.Parameter) -> str | None:
    """The codec that a parameter was marked with, or is packed with already."""
    codec: str | None = getattr(parameter, CODEC, None)
    return codec


def unmark(parameter: nn.Parameter) -> None:
    """The parameter is an ordinary one again, with its decoded value."""
    parameter.__dict__.pop(CODEC, None)


def refuse_foreign(model: nn.Module) -> None:
    """Raise ModelError for weights that another library has quantised: their numbers are codes."""
    for name, parameter in model.named_parameters():
        kinds = {kind.__name__ for kind in type(parameter).__mro__} & FOREIGN.keys()
        if kinds:
            raise ModelError(
                f"the weight {name} is quantised already, by {FOREIGN[kinds.pop()]}",
                f"it is a {type(parameter).__name__} of {parameter.dtype}",
                "Load the model in bfloat16 and give quantize='nf4' or another codec to headrace",
            )


class PackedHome:
    """The home (model/parked.py) of a parameter that lies in memory as its codec packs it."""

    device = torch.device("cpu")

    def __init__(self, entry: Entry, packed: Tensor, error: float) -> None:
        self.entry, self.packed, self.error = entry, packed, error

    def read(self, parameter: nn.Parameter) -> Tensor:
        return unpack(self.entry, self.packed).to(parameter.dtype)

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        if value.shape != self.entry.shape:
            raise ModelError(f"{self.entry.name} was given another shape",
                             f"{tuple(value.shape)}, not {self.entry.shape}",
                             "Resize the model before quantising it")  # fmt: skip
        if value.dtype != parameter.dtype:  # `model.to(torch.bfloat16)` and the like
            if value.dtype not in FLOATS:
                raise ModelError(f"{self.entry.name} was given another format", f"{value.dtype}",
                                 "Use float32, bfloat16 or float16")  # fmt: skip
            self.entry = replace(self.entry, dtype=str(value.dtype).removeprefix("torch."))
            park(parameter, self, self.entry.name, value.dtype)
        self.packed = pack(self.entry, value)
        self.error = error_of(self.entry, value, self.packed)
        text = f"a value was written to {self.entry.name}, which is stored as {self.entry.codec}: it was encoded again"
        EventLog(verbose=True).add("quantize", text, error=f"{self.error:.4f}")

    def twin(self) -> nn.Parameter:
        """A copy of the parameter, packed too."""
        entry = self.entry
        parameter = nn.Parameter(placeholder(entry.shape, getattr(torch, entry.dtype)), requires_grad=False)
        park_packed(parameter, PackedHome(entry, self.packed.clone(), self.error))
        return parameter


def park_packed(parameter: nn.Parameter, home: PackedHome) -> None:
    """Let the parameter, frozen, live in `home`."""
    parameter.requires_grad_(False)
    park(parameter, home, home.entry.name)
    setattr(parameter, CODEC, home.entry.codec)


def entry_of(parameter: nn.Parameter, name: str, codec: str) -> Entry:
    """The parameter as an entry that `codec` stores."""
    return Entry(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), False, codec=codec)


def as_stored(parameter: nn.Parameter, name: str, value: Tensor) -> Tensor:
    """`value`, or what the codec that the parameter is marked with makes of it."""
    codec = codec_of(parameter)
    if codec is None:
        return value
    entry = entry_of(parameter, name, codec)
    return unpack(entry, pack(entry, value))


def quantize_model(model: Any, codec: str | PrecisionMap, blocks: Any = None, block_size: int | None = None) -> Any:
    """Store the matrices of the model's blocks with `codec`, in place, and freeze them: the same model, which reads its
    weights decoded, and which `headrace.wrap` streams as they are stored.

    `codec`: "int8", "int8/row", "nf4", "nf4+double", "fp8", "nvfp4", or a `PrecisionMap` that chooses weight by weight;
    `block_size`: weights that share a scale, where the codec lets choose; `blocks`: as `wrap` takes it. Weights that
    require gradients are quantised and frozen too: add adapters afterwards. One weight is in memory twice at a time.
    For a model of `load_model` its argument `quantize` does the same without reading anything twice.

    Raises OptionError for an unknown codec, a map that quantises nothing, and a model that is quantised already;
    ModelError for weights that another library has quantised or that are not finite: the weights before are quantised
    then.
    """
    precision = as_map(codec)
    if block_size is not None:
        sized = str(replace(codec_named(precision.codec), block_size=block_size))
        precision = replace(precision, codec=sized)
    if getattr(model, "_headrace_session", None) is not None:
        raise ModelError("a wrapped model cannot be quantised", "its weights lie in the stores of its session",
                         "Quantise it before headrace.wrap, or give wrap the option quantize")  # fmt: skip
    refuse_marked(model)
    refuse_foreign(model)
    found = list(candidates(model, find_blocks(model, blocks)))
    codecs = choose(found, precision, lambda parameter: True)
    losses = Losses()
    for candidate in found:
        chosen = codecs.get(id(candidate.parameter))
        if chosen is not None:
            value = candidate.parameter.detach()
            value = value.plain() if isinstance(value, WeightValue) else value
            entry = entry_of(candidate.parameter, candidate.name, chosen)
            packed = pack(entry, value)
            home = PackedHome(entry, packed, error_of(entry, value, packed))
            park_packed(candidate.parameter, home)
            losses.add(entry, home.error)
    losses.tell(EventLog())
    return model


def mark(model: nn.Module, precision: PrecisionMap, events: EventLog) -> None:
    """Mark and freeze the matrices of a model whose weights lie in files, to be encoded when they are read."""
    found = list(candidates(model, find_blocks(model)))
    codecs = choose(found, precision, lambda parameter: True)
    for candidate in found:
        if id(candidate.parameter) in codecs:
            candidate.parameter.requires_grad_(False)
            setattr(candidate.parameter, CODEC, codecs[id(candidate.parameter)])
    matrices = plural(len(found), "matrix", "matrices")
    text = f"{len(codecs)} of {matrices} of the blocks are frozen, and encoded when they are read"
    events.add("quantize", text, by=str(precision))


def refuse_marked(model: nn.Module) -> None:
    """Raise OptionError for a model that is quantised already."""
    marked = [name for name, parameter in model.named_parameters() if codec_of(parameter) is not None]
    if marked:
        codec = codec_of(model.get_parameter(marked[0]))
        raise OptionError(
            "the model is quantised already", f"of its weights {len(marked)}, such as {marked[0]} as {codec}",
            "Leave quantize out, or load the model again without it",
        )  # fmt: skip


def packed_home(parameter: nn.Parameter) -> PackedHome | None:
    """Where the packed bytes of a parameter are; None for others."""
    home = parameter._headrace_home if is_parked(parameter) else None  # type: ignore[attr-defined]
    return home if isinstance(home, PackedHome) else None
