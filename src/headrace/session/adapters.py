"""Adapters of peft on a streamed model: which there are, saving without the base, merging without placeholders."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from headrace.base.errors import StepError
from headrace.base.events import EventLog
from headrace.base.units import parse_bytes
from headrace.checkpoint.export import save_pretrained as export
from headrace.model.parked import WeightValue
from headrace.model.widened import own_dtype
from headrace.session.guard import attach

MERGING = ("merge_and_unload", "merge_adapter")
"""Methods of peft's tuners that write adapters into the base."""
KINDS_SHOWN = 16
"""Kinds of trained parameters that one event lists."""


def tell_trained(model: nn.Module, trained: Container[int], events: EventLog) -> None:
    """One event that names what trains beside what is frozen: adapters that found fewer places than meant show in it.
    `trained`: ids of parameters."""
    named = list(model.named_parameters())
    chosen = [(name, p) for name, p in named if id(p) in trained]
    if len(chosen) < len(named):
        kinds = together(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name, _ in chosen))
        shown = ", ".join(kinds[:KINDS_SHOWN])
        rest = f" and {len(kinds) - KINDS_SHOWN} more" if len(kinds) > KINDS_SHOWN else ""
        events.add("trained", f"{len(chosen)} of {len(named)} parameters train: {shown}{rest}",
                   elements=sum(p.numel() for _, p in chosen), of=sum(p.numel() for _, p in named))  # fmt: skip


def together(names: Iterable[str]) -> list[str]:
    """Dotted names with those that differ in one part written as one: `a.q.w` and `a.k.w` as `a.{q,k}.w`."""
    rows: list[tuple[tuple[str, ...], ...]] = [tuple((part,) for part in name.split(".")) for name in names]
    for place in range(max(map(len, rows), default=0) - 1, -1, -1):
        alike: dict[tuple[Any, ...], tuple[str, ...]] = {}
        for row in rows:
            others = (row[:place], row[place + 1 :], len(row) > place)
            alike[others] = alike.get(others, ()) + (row[place] if len(row) > place else ())
        rows = [(*head, parts, *tail) if parts else head for (head, tail, _), parts in alike.items()]
    return [".".join(parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}" for parts in row) for row in rows]


def copy_in_use(module: Any) -> Any:
    """A module, or of one that peft has copied (`modules_to_save`) the copy that is called."""
    copies = getattr(module, "modules_to_save", None)
    active = getattr(module, "active_adapters", [])
    return copies[active[0]] if copies is not None and len(active) == 1 and active[0] in copies else module


def guard_adapters(
    model: Any, codecs: Mapping[str, str], events: EventLog, undo: list[Callable[[], None]]
) -> None:  # fmt: skip
    """For a model with adapters: let `save_pretrained` read them alone, and refuse merges that go wrong in memory.
    `codecs`: those of weights, by name."""
    if not hasattr(model, "peft_config"):
        return
    if hasattr(model, "save_pretrained"):
        attach(model, "save_pretrained", _saver(model), undo)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base is not model and hasattr(base, "save_pretrained"):
        attach(base, "save_pretrained", _saver_of_merged(base, model), undo)
    shared = dict(_on_shared_weights(model))
    if shared:
        places = "; ".join(f"{name} and {', '.join(others)}" for name, others in shared.items())
        events.add("adapters", f"one weight, an adapter on one of its uses: {places}. It trains and is saved as it is, "
                   "but merging would change all uses: untie the weight in the base before you merge",
                   weights=len(shared))  # fmt: skip
        _attach_all(model.modules(), functools.partial(_refuse_merge, places), undo)
    packed = dict(_on_packed_weights(model, codecs))
    if packed:
        refuse = functools.partial(_refuse_rounding, packed)
        _attach_all(model.modules(), refuse, undo)
        for name in packed:
            attach(model.get_submodule(name), "merge", refuse, undo)


def _attach_all(modules: Iterable[nn.Module], refuse: Callable[..., NoReturn], undo: list[Callable[[], None]]) -> None:
    for module in modules:
        for name in MERGING:
            if hasattr(type(module), name):
                attach(module, name, refuse, undo)


def _on_packed_weights(model: nn.Module, codecs: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Adapted layers with a weight that is stored with a codec: their names, and the codec."""
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(module, "merge"):
            found = [codecs[weight] for part, _ in base.named_parameters()
                     if (weight := f"{name}.base_layer.{part}") in codecs]  # fmt: skip
            yield from ((name, codec) for codec in found[:1])


def _on_shared_weights(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Adapted layers whose weight other modules use too: their names, and those of the others."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append(name)
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        weight = getattr(base, "_parameters", {}).get("weight")
        if weight is not None and hasattr(module, "merge") and not hasattr(module, "trainable_tokens_delta"):
            others = [other for other in holders[id(weight)] if other != f"{name}.base_layer"]
            if others:
                yield name, others


def _refuse_merge(places: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise StepError(
        "merging would write an adapter into a weight that other modules use too", places,
        "Save the adapter. Then load the base with tie_word_embeddings=False, copy the embedding's weight into the "
        "head, load the adapter and merge it there",
    )  # fmt: skip


def _refuse_rounding(packed: Mapping[str, str], *args: Any, **kwargs: Any) -> NoReturn:
    name, codec = next(iter(packed.items()))
    raise StepError(
        "merging would round the adapter away: the weights it is added to are stored compressed, and unmerging would "
        "not bring them back", f"{len(packed)} adapted layers have such weights, as {name} in {codec}",
        "Save the adapter and merge it into the base's own files with `headrace merge BASE ADAPTER OUT`, or call "
        "headrace.unwrap(model), which decodes the weights, and merge then",
    )  # fmt: skip


def _saver(model: Any) -> Callable[..., Any]:
    original = model.save_pretrained

    @functools.wraps(original)
    def save_pretrained(*given: Any, **named: Any) -> Any:
        """As peft does, but only what it will write is read from the stores."""
        if named.get("state_dict") is None:
            bound = inspect.signature(original).bind(*given, **named).arguments
            chosen = bound.get("selected_adapters") or list(model.peft_config)
            named["state_dict"] = _values(model, chosen, bound.get("save_embedding_layers", "auto"))
        return original(*given, **named)

    return save_pretrained


def _saver_of_merged(base: Any, model: Any) -> Callable[..., Any]:
    """For the model that `merge_and_unload` returns: the base, from whose modules the adapters are gone then."""
    original = base.save_pretrained

    @functools.wraps(original)
    def save_pretrained(save_directory: Any, *given: Any, **named: Any) -> Any:
        """Stream the base to a folder, block by block; by transformers' own way where that is asked for more."""
        session, unmerged = model._headrace_session, any(hasattr(module, "base_layer") for module in base.modules())
        if unmerged or given or named.keys() - {"max_shard_size"}:
            why = "its adapters are not merged" if unmerged else "it was given more than a folder and max_shard_size"
            session.events.add("save", f"save_pretrained of the base reads all weights into memory at once: {why}",
                               parameters=sum(p.numel() for p in base.parameters()))  # fmt: skip
            return original(save_directory, *given, **named)
        session.wait()
        export(base, save_directory, lambda name: _read(base.get_parameter(name)),
               max_shard_bytes=parse_bytes(named.get("max_shard_size", "5GB")))  # fmt: skip
        return None

    return save_pretrained


def _values(model: Any, adapters: list[str], save_embedding_layers: Any) -> dict[str, Tensor]:
    """The entries of the state dict that peft saves for `adapters`, each read once."""
    from peft import get_peft_model_state_dict

    model._headrace_session.wait()
    entries: dict[str, Tensor] = model.state_dict(keep_vars=True)  # the parameters themselves: nothing is read
    found: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says it when it saves
        for name in adapters:
            options = {"adapter_name": name, "save_embedding_layers": save_embedding_layers}
            found += get_peft_model_state_dict(model, entries, **options).values()
    wanted = {id(tensor) for tensor in found}
    if not wanted <= {id(tensor) for tensor in entries.values()}:  # a kind of adapter that computes what it saves
        whole: dict[str, Tensor] = model.state_dict()
        return whole
    read = {id(tensor): _read(tensor) for tensor in found}
    return {key: read[id(tensor)] for key, tensor in entries.items() if id(tensor) in wanted}


def _read(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return (value.plain() if isinstance(value, WeightValue) else value).to(own_dtype(tensor))
