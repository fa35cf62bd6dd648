"""Where the weights of a model come from before it is wrapped: checkpoint files, or the model's own initialisation.

A source fills one tensor at a time and keeps none, so the memory beside the tensor that is filled is at most one more.
The value of a weight is what an ordinary load would give: rounded to the parameter's dtype, whatever dtype is asked.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes
from headrace.model.conversion import ConversionPlan, Recipe, convert, pieces
from headrace.model.parked import WeightValue, is_parked, unpark
from headrace.model.quantised import as_stored
from headrace.spec.layout import Entry

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.files.safetensors import TensorReader
    from headrace.files.safetensors.header import TensorEntry


class WeightSource(Protocol):
    """Gives the initial value of every parameter and buffer of one model. Safe to call from several threads."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` (the weight's shape, any float dtype, any strides) with the weight called `name`.

        `name` is a name of the model as it was loaded; a tied weight answers to each of its names.
        """

    def read_packed_into(self, name: str, entry: Entry, out: Tensor) -> float | None:
        """Fill `out` (flat uint8, on the CPU) with the weight called `name` as the codec of `entry` stores it, and
        return what that has cost (relative L2); None, and nothing is written, where it has to be encoded."""


class SourceHome:
    """The home (see model/parked.py) of a parameter that still lies in its source, until it is changed."""

    device = torch.device("cpu")
    unopened = True
    """No session has taken the weight: nothing can train it yet."""

    def __init__(self, source: WeightSource, name: str, events: EventLog) -> None:
        self.source, self.name, self._events = source, name, events

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A fresh tensor with the value, in the parameter's shape and dtype; or what the codec makes of it that the
        parameter is marked with. Once it was changed: the parameter's own memory."""
        return as_stored(parameter, self.name, self.original(parameter)) if is_parked(parameter) else parameter.data

    def original(self, parameter: nn.Parameter) -> Tensor:
        """A fresh tensor with what the source holds."""
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.source.read_into(self.name, value)
        return value

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The parameter is an ordinary one from now on, in memory; of any shape, as after resize_token_embeddings.

        Raises ModelError for another dtype or device, which `model.to(...)` would bring all weights to at once."""
        value = value.plain() if isinstance(value, WeightValue) else value
        if not is_parked(parameter):  # through what `.data` gave before
            if value.shape == parameter.shape and value.data_ptr() != parameter.data_ptr():
                parameter.data.copy_(value)
            return
        if (value.dtype, value.device) != (parameter.dtype, self.device):
            raise ModelError(
                f"The weight {self.name} cannot become {value.dtype} on {value.device}",
                f"it is {parameter.dtype}, and still lies in the files that the model was loaded from",
                "Give dtype= to headrace.load_model, and device= to headrace.wrap: blocks go there one at a time",
            )
        if value.shape == parameter.shape and torch.equal(value, self.read(parameter)):  # as in model.to("cpu")
            return
        unpark(parameter)
        parameter.data = value
        text = f"weights that are changed before headrace.wrap, such as {self.name}, are in memory from then on"
        self._events.once("changed", "load", text, memory=format_bytes(value.nbytes))


class FolderSource:
    """Weights from safetensors files, converted as `plan` says; what the files lack comes from `initial`."""

    def __init__(
        self,
        model: nn.Module,
        reader: TensorReader,
        plan: ConversionPlan,
        shapes: Mapping[str, tuple[int, ...]],  # checkpoint tensor -> shape
        dtypes: Mapping[str, torch.dtype],  # model tensor -> dtype in the model
        aliases: Mapping[str, str],  # further name of a tied tensor -> the name that `plan` or `initial` knows
        initial: RandomSource | None,
        events: EventLog,
    ) -> None:
        self._model, self._reader, self._plan = model, reader, plan
        self._shapes, self._dtypes, self._aliases, self._initial = shapes, dtypes, aliases, initial
        self.events = events

    def read_into(self, name: str, out: Tensor) -> None:
        """See `WeightSource`. Raises FormatError when the files are damaged, ModelError for an unknown name."""
        name = self._aliases.get(name, name)
        recipe = self._plan.recipes.get(name)
        if recipe is None:
            if self._initial is None:
                raise ModelError(f"The checkpoint has no tensor for {name}", f"{len(self._plan.recipes)} are known",
                                 "Check that config.json and the safetensors files belong together")  # fmt: skip
            self._initial.read_into(name, out)
            return
        with torch.no_grad():
            dtype = self._dtypes[name]
            if out.dtype == dtype:
                self._fill(name, recipe, out)
            else:
                rounded = torch.empty(out.shape, dtype=dtype)
                self._fill(name, recipe, rounded)
                out.copy_(rounded)

    def read_packed_into(self, name: str, entry: Entry, out: Tensor) -> None:
        """See `WeightSource`: the files hold numbers."""

    def located(self, name: str) -> tuple[Path, TensorEntry] | None:
        """Where the files hold exactly the weight called `name`, in its dtype; None where it has to be made of them."""
        name = self._aliases.get(name, name)
        recipe = self._plan.recipes.get(name)
        if recipe is None or recipe.converter is not None:
            return None
        path, entry = self._reader.located(recipe.keys[0])
        return (path, entry) if entry.dtype == self._dtypes[name] else None

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model carries its values and needs no source: wrapping it would close the files of the original."""

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled model carries its values and needs no source

    def _fill(self, name: str, recipe: Recipe, out: Tensor) -> None:
        views = pieces(self._model, recipe, out, self._shapes)
        if views is not None:
            for key, view in views.items():
                self._reader.read_into(key, view)
            return
        inputs = sum(torch.Size(self._shapes[key]).numel() for key in recipe.keys) * out.element_size()
        self.events.once(
            f"convert {recipe.converter!r}",
            "load",
            f"{recipe.target} is converted in memory, not in place",
            extra_memory=format_bytes(2 * inputs),
        )
        out.copy_(convert(self._model, recipe, lambda key: self._fresh(key, out.dtype))[name])

    def _fresh(self, key: str, dtype: torch.dtype) -> Tensor:
        value = torch.empty(self._shapes[key], dtype=dtype)
        self._reader.read_into(key, value)
        return value


class RandomSource:
    """Freshly initialised weights, drawn by the model's own `_init_weights`, one tensor at a time.

    Each value depends on the seed and its name only, not on the order of reading. `model` is a transformers model whose
    parameters are still on meta; a copy of it (no weights) stays here.
    """

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        dtypes: Mapping[str, torch.dtype],  # tensor of the model -> its dtype
        aliases: Mapping[str, str],  # further name of a tied tensor -> its first name
        events: EventLog,
    ) -> None:
        self._skeleton = copy.deepcopy(model)
        self._seed, self._dtypes, self._aliases = seed, dtypes, aliases
        self._lock = threading.Lock()
        self.events = events

    def read_into(self, name: str, out: Tensor) -> None:
        """See `WeightSource`. Raises ModelError when the model does not say how to initialise `name`."""
        name = self._aliases.get(name, name)
        if name not in self._dtypes:
            raise ModelError(f"The model has no tensor called {name}", f"{len(self._dtypes)} are known",
                             "Names are those of model.named_parameters() and named_buffers()")  # fmt: skip
        # Strides would change the order in which random numbers are used, and rounding belongs to the model's dtype.
        in_place = out.dtype == self._dtypes[name] and out.device.type == "cpu" and out.is_contiguous()
        value = out if in_place else torch.empty(out.shape, dtype=self._dtypes[name])
        self._initialise(name, value)
        if not in_place:
            out.copy_(value)

    def read_packed_into(self, name: str, entry: Entry, out: Tensor) -> None:
        """See `WeightSource`: `_init_weights` draws numbers."""

    def __deepcopy__(self, memo: Any) -> RandomSource:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()

    def _initialise(self, name: str, out: Tensor) -> None:
        from transformers import initialization

        seed = int.from_bytes(hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest(), "little")
        guarded = initialization.guard_torch_init_functions()
        with self._lock, torch.no_grad(), torch.random.fork_rng(devices=[]), guarded:
            torch.default_generator.manual_seed(seed)
            path, _, leaf = name.rpartition(".")
            owner = self._skeleton.get_submodule(path)
            if leaf in owner._buffers:
                self._initialise_buffer(path, owner, leaf, out)
            else:
                self._initialise_parameter(path, owner, leaf, out)

    def _initialise_buffer(self, path: str, owner: nn.Module, leaf: str, out: Tensor) -> None:
        """Buffers have their value since construction, unless `_init_weights` gives them another."""
        built = owner._buffers[leaf]
        assert built is not None
        owner._buffers[leaf] = out.copy_(built)
        try:
            self._init_upwards(path)
        finally:
            owner._buffers[leaf] = built

    def _initialise_parameter(self, path: str, owner: nn.Module, leaf: str, out: Tensor) -> None:
        kept = dict(owner._parameters)
        owner._parameters[leaf] = nn.Parameter(out, requires_grad=False)
        _mark(out)
        try:
            try:
                self._init_upwards(path)
            except (RuntimeError, NotImplementedError):
                # An initialisation that computes with its neighbours' values cannot have them on meta.
                for other, parameter in kept.items():
                    if other != leaf and parameter is not None:
                        owner._parameters[other] = nn.Parameter(torch.zeros_like(parameter, device="cpu"), False)
                self._init_upwards(path)
        finally:
            owner._parameters.update(kept)
        if _marked(out):
            raise ModelError(
                f"The model does not say how {path}.{leaf} starts",
                "its _init_weights leaves it untouched",
                "Load the model with weights, or add the tensor to its _init_weights",
            )

    def _init_upwards(self, path: str) -> None:
        """`_init_weights` of the module at `path` and of every one above it, as transformers does: inner ones first."""
        modules: list[Any] = [self._skeleton]
        for part in path.split(".") if path else []:
            modules.append(getattr(modules[-1], part))
        for depth in range(len(modules) - 1, -1, -1):
            initialiser = next(module for module in modules[depth::-1] if hasattr(module, "_init_weights"))
            initialiser._init_weights(modules[depth])


def _mark(out: Tensor) -> None:
    """Put NaN into the first and the last element, to see whether an initialisation reached them."""
    if out.is_floating_point() and out.numel():
        out[(0,) * out.dim()] = float("nan")
        out[(-1,) * out.dim()] = float("nan")


def _marked(out: Tensor) -> bool:
    if not out.is_floating_point() or not out.numel():
        return False
    return bool(out[(0,) * out.dim()].isnan() or out[(-1,) * out.dim()].isnan())
