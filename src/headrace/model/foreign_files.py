"""Checkpoints that other libraries have quantised: their codes and scales become the parts of a codec, bit for bit.

Read are bitsandbytes' nf4, with plain or compressed scales, and fp8 with an fp32 scale for each 128 x 128 weights, of
matrices that the model takes as the files have them. Everything else is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headrace.base.errors import FormatError, ModelError
from headrace.base.units import plural
from headrace.codec.packed import views
from headrace.kernels.code_tables import dynamic_values, nf4_values
from headrace.model.configured import text_config
from headrace.model.packed_files import METHOD, InFiles, PackedFolder
from headrace.model.quantised import entry_of, park_packed
from headrace.spec.codecs import NESTED_BLOCK, Part, codec_named
from headrace.spec.layout import Entry

if TYPE_CHECKING:
    from headrace.files.safetensors import TensorReader
    from headrace.files.safetensors.header import TensorEntry
    from headrace.model.conversion import ConversionPlan

STATE = ".quant_state.bitsandbytes__"
_NUMBERED = re.compile(r"\.\d+\.")
REMEDY = "Give a checkpoint in bfloat16, float16 or float32; quantize='nf4' or another codec compresses it here"


class Packed(Protocol):
    """The packed weights of a folder."""

    def open(self, folder: Path) -> TensorReader | None:
        """Its files, when they are not those of every folder."""

    def shapes(self, reader: TensorReader, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Checkpoint tensors and their shapes, without what belongs to packed weights only."""

    def take(self, plan: ConversionPlan) -> set[str]:
        """The model's names of the packed weights, which are no longer the plan's to read."""

    def attach(self, model: nn.Module, reader: TensorReader) -> None:
        """Park them at their files, frozen."""


def packed_source(config: Any, place: Any) -> Packed | None:
    """The packed weights of a folder, as its configuration names them; it names none from then on. None for an ordinary
    folder. Raises ModelError for what another library has quantised in a way that is not read here."""
    for part in (config, text_config(config)):
        found = getattr(part, "quantization_config", None)
        if found:
            told: dict[str, Any] = found if isinstance(found, dict) else vars(found)
            source = _source(told, place)
            del part.quantization_config
            return source
    return None


def refuse_unread(config: Any, place: Any) -> None:
    """Raise ModelError for a folder that another library has quantised in a way that is not read here."""
    for part in (config, text_config(config)):
        found = getattr(part, "quantization_config", None)
        if found:
            _source(found if isinstance(found, dict) else vars(found), place)


def _source(told: Mapping[str, Any], place: Any) -> Packed:
    method = told.get("quant_method", "an unknown method")
    if method == METHOD:
        return PackedFolder(told)
    if method == "bitsandbytes" and told.get("load_in_4bit") and told.get("bnb_4bit_quant_type", "nf4") == "nf4":
        return Foreign(_bitsandbytes)
    dynamic = told.get("activation_scheme", "dynamic") == "dynamic"
    if method == "fp8" and list(told.get("weight_block_size") or ()) == [128, 128] and dynamic:
        return Foreign(_fine_grained)
    raise ModelError(
        f"{place} holds a quantised model",
        f"quantization_config names {method}, and not its nf4 (bitsandbytes) or its tiles of 128 x 128 (fp8)", REMEDY,
    )  # fmt: skip


def refuse_other_forms(plan: ConversionPlan) -> None:
    """Raise FormatError where a block's weight is missing, and the files hold something else of its module: codes that
    the configuration does not name, or a layer that an adapter is around. It would be drawn at random."""
    held = {key[:place]: key for key in plan.unexpected for place, letter in enumerate(key) if letter == "."}
    missing = [name for name in sorted(plan.missing) if name.endswith(".weight") and _NUMBERED.search(name)]
    found = [(name, held[module]) for name in missing if (module := name.removesuffix(".weight")) in held]
    if found:
        name, key = found[0]
        raise FormatError(
            f"the checkpoint holds {name} in another form", f"as {key}; {len(found)} weights are so",
            f"{REMEDY}. Adapters are merged into their base, or saved by themselves",
        )  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """The tensors of one packed weight."""

    codec: str
    shape: tuple[int, ...]
    keys: Mapping[str, str]
    """Checkpoint tensor of each part of the codec."""
    offset: float = 0.0
    """The part that is a number."""


class PackedParts(InFiles):
    """The home of a parameter whose parts are tensors of a checkpoint."""

    error = 0.0

    def __init__(self, entry: Entry, parts: Parts, reader: TensorReader) -> None:
        self.entry, self._parts, self._reader = entry, parts, reader

    @property
    def packed(self) -> Tensor:  # type: ignore[override]
        codec = codec_named(self._parts.codec)
        out = torch.zeros(codec.nbytes(self.entry.shape), dtype=torch.uint8)
        for part, view in views(codec, self.entry.shape, out).items():
            if part not in self._parts.keys:
                view.fill_(self._parts.offset)
                continue
            value = self._reader.read(self._parts.keys[part])
            if part == "codes":  # bytes, whatever format the file calls them
                view, value = view.view(torch.uint8), value.view(torch.uint8)
            view.copy_(value.view(view.shape))
        return out


@dataclass
class Foreign:
    """The packed weights of another library's folder, as `find` finds them in the files."""

    find: Any
    """(reader) -> {checkpoint name of a weight: its Parts}, and the names of all tensors that belong to such only."""
    _found: dict[str, Parts] = field(default_factory=dict)
    _named: dict[str, Parts] = field(default_factory=dict)

    def open(self, folder: Path) -> TensorReader | None:
        return None

    def shapes(self, reader: TensorReader, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        self._found, beside = self.find(reader)
        if not self._found:
            raise FormatError("the files hold no weight that is packed as the configuration says",
                              f"{plural(len(reader.entries), 'tensor')}", "Download the model again")  # fmt: skip
        for key, parts in self._found.items():
            if key in wanted and parts.shape != wanted[key] and parts.shape == wanted[key][::-1]:
                shapes = f"the files hold {list(parts.shape)}, the model has {list(wanted[key])}"
                raise ModelError(f"{key} was turned before it was quantised", shapes, REMEDY)
        plain = {key: tuple(entry.shape) for key, entry in reader.entries.items() if key not in beside}
        return plain | {key: parts.shape for key, parts in self._found.items()}

    def take(self, plan: ConversionPlan) -> set[str]:
        for name, recipe in list(plan.recipes.items()):
            packed = [key for key in recipe.keys if key in self._found]
            if packed and recipe.converter is not None:
                raise ModelError(f"{name} is made of {len(recipe.keys)} tensors that are quantised one by one",
                                 f"the first is {recipe.keys[0]}", REMEDY)  # fmt: skip
            if packed:
                self._named[name] = self._found[packed[0]]
                del plan.recipes[name]
        return set(self._named)

    def attach(self, model: nn.Module, reader: TensorReader) -> None:
        for name, parts in self._named.items():
            parameter = model.get_parameter(name)
            park_packed(parameter, PackedParts(entry_of(parameter, name, parts.codec), parts, reader))


Found = tuple[dict[str, Parts], set[str]]


def _bitsandbytes(reader: TensorReader) -> Found:
    """weight: (N / 2, 1) uint8; .absmax, .quant_map, .nested_absmax, .nested_quant_map; and a state as JSON bytes."""
    found, beside = {}, set[str]()
    for key in [key for key in reader.entries if STATE in key]:
        weight = key.partition(STATE)[0]
        state = json.loads(bytes(reader.read(key).tolist()))
        shape, block = tuple(state["shape"]), int(state["blocksize"])
        nested = "nested_blocksize" in state
        tables = [("quant_map", nf4_values)] + [("nested_quant_map", dynamic_values)] * nested
        known = state["quant_type"] == "nf4" and (not nested or state["nested_blocksize"] == NESTED_BLOCK)
        for label, values in tables:
            known = known and torch.equal(_read(reader, weight, label).float(), values(torch.device("cpu")))
        if not known or len(shape) != 2:
            raise ModelError(
                f"{weight} is quantised in another way than nf4 is here", f"its state is {state}, or its table another",
                REMEDY,
            )  # fmt: skip
        codec = str(codec_named(f"nf4/{block}{'+double' * nested}"))
        keys = {"codes": weight, "scales": f"{weight}.absmax"}
        keys |= {"nested_scales": f"{weight}.nested_absmax"} if nested else {}
        found[weight] = _checked(reader, Parts(codec, shape, keys, float(state.get("nested_offset", 0.0))))
        beside |= {key, *keys.values(), *(f"{weight}.{label}" for label, _ in tables)}
    return found, beside


def _fine_grained(reader: TensorReader) -> Found:
    """weight: e4m3; weight_scale_inv: what each 128 x 128 of them are multiplied with."""
    found, beside = {}, set[str]()
    for key, entry in reader.entries.items():
        if entry.dtype == torch.float8_e4m3fn:
            keys = {"codes": key, "scales": f"{key}_scale_inv"}
            if keys["scales"] not in reader.entries:
                raise FormatError(f"{key} has no scales", f"{keys['scales']} is missing", "Download the model again")
            found[key] = _checked(reader, Parts("fp8", tuple(entry.shape), keys))
            beside.update(keys.values())
    return found, beside


def _read(reader: TensorReader, weight: str, label: str) -> Tensor:
    if f"{weight}.{label}" not in reader.entries:
        raise FormatError(f"{weight} has no {label}", "a tensor beside it is missing", "Download the model again")
    return reader.read(f"{weight}.{label}")


def _checked(reader: TensorReader, parts: Parts) -> Parts:
    """`parts`, which are there and as large as the codec's. Raises FormatError."""
    for part in codec_named(parts.codec).parts(parts.shape):
        if part.name in parts.keys:
            key, wanted = parts.keys[part.name], f"{part.dtype} of {list(part.shape)}"
            entry = reader.entries.get(key)
            if entry is None:
                raise FormatError(f"{parts.keys['codes']} lacks its {part.name}", f"there is no tensor {key}, {wanted}",
                                  "Download the model again")  # fmt: skip
            if not _fits(entry, part):
                raise FormatError(
                    f"{key} does not belong to a weight of {list(parts.shape)}",
                    f"{entry.dtype} of {list(entry.shape)}, wanted {wanted}", "Download the model again",
                )  # fmt: skip
    return parts


def _fits(entry: TensorEntry, part: Part) -> bool:
    """Whether a tensor of a file can be read as a part. bitsandbytes puts codes into tensors of any format that it is
    told (bnb_4bit_quant_storage), and scales may be narrower."""
    if part.name == "codes" and part.dtype == "uint8":
        return entry.nbytes == part.nbytes
    narrower = part.dtype == "float32" and entry.dtype in (torch.bfloat16, torch.float16)
    same = narrower or str(entry.dtype) == f"torch.{part.dtype}"
    return same and torch.Size(entry.shape).numel() == torch.Size(part.shape).numel()
