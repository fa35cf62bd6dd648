"""An adapter of peft merged into its base, one tensor at a time, and written as an ordinary model folder.

Two models are built without weights: one carries the adapter and computes merged layers, the other says what the files
of the result hold. A layer's weights are read when their turn comes, merged by peft itself, and let go.

[Note: Ties] An embedding and a head that are one weight stay one when the adapter changes both alike, or neither. Where
their merged values differ, each is stored, and the configuration says that they are not tied.

A packed base is decoded, tensor by tensor: its adapter was trained on what it decodes to. The result is an ordinary
folder, or a packed one where a codec is asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headrace.base.errors import ModelError
from headrace.base.events import EventLog
from headrace.base.extras import quiet_peft
from headrace.base.units import plural
from headrace.checkpoint.export import save_pretrained
from headrace.checkpoint.packed import save_quantised
from headrace.files.safetensors import TensorReader
from headrace.model.build import load_model
from headrace.model.parked import Home, WeightValue, is_parked, park, placeholder
from headrace.model.quantised import mark, unmark
from headrace.spec.precision import PrecisionMap, as_map

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def merge(
    base: str, adapter: Path, out: Path, dtype: torch.dtype | None, say: Callable[[str], None],
    max_shard_bytes: float = 5e9, codec: str | PrecisionMap | None = None,
) -> None:  # fmt: skip
    """Write the merged model to `out`. `dtype`: of the result; None: of the base's files, in which peft merges.
    `codec`: by which the merged matrices of the blocks are packed.

    Raises ModelError when the adapter is missing or of another base, OptionError for a codec that cannot be used;
    nothing is written then.
    """
    precision = None if codec is None else as_map(codec)
    if not (adapter / WEIGHTS).is_file():
        raise ModelError(f"{adapter} holds no adapter", f"{WEIGHTS} is missing", "Name a folder that peft has saved")
    values = _Merged(_adapted(base, adapter))
    _tell_base(base, adapter, say)
    result = load_model(base, dtype=dtype)
    for target, origin in _ties(result):
        if not torch.equal(values.read(target), values.read(origin)):
            _untie(result, target)
            say(f"{target} and {origin} were one weight; the adapter makes them differ: both are stored")
    if precision is None:
        save_pretrained(result, out, values.read, max_shard_bytes=max_shard_bytes)
    else:
        _save_packed(result, out, values, precision, max_shard_bytes)
    say(f"{plural(len(values.changed), 'layer')} merged")


def _tell_base(base: str, adapter: Path, say: Callable[[str], None]) -> None:
    """Say so when the adapter names another base: one of equal shapes would be merged as well as the right one."""
    told = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if told and told != base and Path(told).resolve() != Path(base).resolve():
        text = f"the adapter was trained on {told}, as it says, and is merged into {base}: "
        say(text + "right only where both hold the same weights")


def _save_packed(
    result: nn.Module, out: Path, values: _Merged, precision: PrecisionMap, max_shard_bytes: float
) -> None:
    for name, parameter in result.named_parameters():
        unmark(parameter)
        park(parameter, _Value(name, values), name)
    mark(result, precision, EventLog())
    save_quantised(result, out, max_shard_bytes)


class _Value:
    """The home of a weight of the result. See model.parked.Home."""

    device = torch.device("cpu")

    def __init__(self, name: str, values: _Merged) -> None:
        self._name, self._values = name, values

    def read(self, parameter: nn.Parameter) -> Tensor:
        return self._values.read(self._name).to(parameter.dtype)

    def write(self, parameter: nn.Parameter, value: Tensor) -> NoReturn:
        raise ModelError(f"{self._name} cannot be changed", "it is being merged", "Change the merged model")


class _Changed:
    """The home of a weight of the base that an adapter's file may hold too: its biases, say. See model.parked.Home."""

    def __init__(self, home: Home) -> None:
        self.device, self._home = home.device, home
        self._value: Tensor | None = None

    def read(self, parameter: nn.Parameter) -> Tensor:
        return self._home.read(parameter) if self._value is None else self._value.clone()

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        self._value = value.detach().to(parameter.dtype).clone()


class _Merged:
    """Merged values of a model with adapters, by the names that its base has without them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        found = [name for name, part in model.named_modules() if _changes(part)]
        self.changed = [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]
        """Layers that the adapter changes."""

    def read(self, name: str) -> Tensor:
        """The value of the parameter called `name`."""
        path, _, leaf = name.rpartition(".")
        layer = next((layer for layer in self.changed if path == layer or path.startswith(f"{layer}.")), None)
        if layer is None:
            value = getattr(self._model.get_submodule(path), leaf).detach()
            return value.plain() if isinstance(value, WeightValue) else value
        with _merged(self._model.get_submodule(layer)) as inside:
            part: Any = inside.get_submodule(path[len(layer) + 1 :])
            merged: Tensor = getattr(part, leaf).detach()
            return merged


def _changes(part: nn.Module) -> bool:
    """A layer of peft's, which stands in the place of one of the base."""
    return any(hasattr(part, name) for name in ("base_layer", "modules_to_save", "token_adapter"))


@contextlib.contextmanager
def _merged(layer: Any) -> Iterator[nn.Module]:
    """What peft leaves in the place of a layer when it merges it; the layer's weights are in memory inside."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in layer.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and is_parked(parameter):
                places.append((part, name, parameter))
    try:
        for part, name, parameter in places:
            value = parameter._headrace_home.read(parameter)  # type: ignore[attr-defined]
            part._parameters[name] = nn.Parameter(value, requires_grad=False)
        with torch.no_grad():
            yield _unloaded(layer)
    finally:
        for part, name, parameter in places:
            part._parameters[name] = parameter
        for part in layer.modules():  # what it would take back is gone
            if getattr(part, "merged_adapters", None):
                part.merged_adapters.clear()


def _unloaded(layer: Any) -> nn.Module:
    """As in peft's `merge_and_unload`, but the layer stays in its model."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        merged: nn.Module = layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return merged
    layer.merge()
    plain: nn.Module = layer.get_base_layer()
    return plain


def _ties(model: Any) -> list[tuple[str, str]]:
    """(target, origin) of names that are one parameter."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs = dict(model.all_tied_weights_keys).items()
    return [(t, o) for t, o in pairs if t in parameters and parameters[t] is parameters.get(o)]


def _untie(model: nn.Module, target: str) -> None:
    """Give a name a parameter of its own, without memory: only its shape and format are looked at."""
    path, _, leaf = target.rpartition(".")
    owner = model.get_submodule(path)
    one = owner._parameters[leaf]
    assert one is not None
    owner._parameters[leaf] = nn.Parameter(placeholder(one.shape, one.dtype), requires_grad=False)


def _adapted(base: str, adapter: Path) -> nn.Module:
    """The base with its adapter, weights still in their files. Refuses an adapter with other tensors than fit it."""
    import peft

    plain = load_model(base)
    for parameter in plain.parameters():
        if is_parked(parameter):
            parameter._headrace_home = _Changed(parameter._headrace_home)
    # peft asks for state dicts to learn names: with the parameters themselves in them, nothing is read.
    plain.state_dict = lambda *given, **named: type(plain).state_dict(plain, *given, **{**named, "keep_vars": True})
    try:
        with quiet_peft():
            model = peft.PeftModel.from_pretrained(plain, adapter, torch_device="cpu")
    except (RuntimeError, ValueError) as error:
        raise _of_another_base(base, adapter, " ".join(str(error).split())[:300]) from error
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    wanted = {name: tuple(value.shape) for name, value in state.items()}
    with TensorReader(adapter / WEIGHTS) as reader:
        found = {name: reader.entries[name].shape for name in reader if name in wanted or "lora_" in name}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            reason = f"{name}: {found.get(name, 'missing')} in its file, {wanted.get(name, 'no such tensor')} here"
            raise _of_another_base(base, adapter, reason)
    merged: nn.Module = model.get_base_model()
    return merged


def _of_another_base(base: str, adapter: Path, reason: str) -> ModelError:
    return ModelError(f"the adapter in {adapter} does not fit {base}", reason, "Name the model that it was trained on")
