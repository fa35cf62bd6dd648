"""Quantised model folders: weights that lie in safetensors files as their codecs pack them; no load decodes them.

[Note: The format] A folder as transformers writes it, with three differences. The files are called packed.safetensors
(or packed-00001-of-00009.safetensors with their index): transformers only warns of quantisations that it does not know,
and would draw the weights that it misses. config.json says what is packed:

    {"quant_method": "headrace", "version": 1,
     "weights": {"model.layers.0.mlp.up_proj.weight": {"codec": "nf4", "error": 0.0917}, ...}}

And each of these weights is one uint8 tensor NAME.packed: the parts of its codec at the offsets that
`headrace.spec.codecs` gives for the weight's shape. Every tensor has the name that it has in the model. `error` is the
relative L2 distance of the decoded weight from what it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from headrace.base.errors import FormatError, ModelError
from headrace.model.quantised import PackedHome, entry_of, park_packed
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry

if TYPE_CHECKING:
    from headrace.files.safetensors import TensorReader
    from headrace.files.safetensors.header import TensorEntry

METHOD, VERSION, SUFFIX, STEM = "headrace", 1, ".packed", "packed"


@dataclass(frozen=True)
class PackedWeight:
    """What the configuration says of one packed weight."""

    codec: str
    error: float


def manifest(weights: Mapping[str, PackedWeight]) -> dict[str, Any]:
    """`quantization_config` of a folder with these packed weights."""
    told = {name: {"codec": weight.codec, "error": round(weight.error, 6)} for name, weight in weights.items()}
    return {"quant_method": METHOD, "version": VERSION, "weights": told}


def refuse_foreign_folder(config: Any, place: Any) -> None:
    """Raise ModelError for a folder that another library has quantised: its tensors are codes and scales."""
    for part in (config, config.get_text_config()):
        told = _told(part)
        if told and told.get("quant_method") != METHOD:
            raise ModelError(
                f"{place} holds a quantised model",
                f"quantization_config names {told.get('quant_method', 'an unknown method')}",
                "Give a checkpoint in bfloat16, float16 or float32; quantize='nf4' or another codec compresses it here",
            )  # fmt: skip


def packed_weights(config: Any) -> dict[str, PackedWeight]:
    """The packed weights that a configuration names; it names none from then on. Raises FormatError for what cannot be
    read."""
    told = _told(config)
    if not told:
        return {}
    del config.quantization_config
    return _decoded(told)


def _told(config: Any) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None) or {}
    return found if isinstance(found, dict) else vars(found)


def _decoded(told: Mapping[str, Any]) -> dict[str, PackedWeight]:
    try:
        if told["version"] != VERSION:
            raise FormatError(
                "the folder was quantised by another version of Headrace",
                f"its format is {told['version']}, this version reads {VERSION}", "Quantise the original model again",
            )  # fmt: skip
        weights = {n: PackedWeight(str(w["codec"]), float(w["error"])) for n, w in told["weights"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        text = "the quantization_config of the folder cannot be read"
        raise FormatError(text, f"{error!r:.120}", "Quantise the original model again") from error
    for weight in weights.values():
        codec_named(weight.codec)
    return weights


class PackedFile(PackedHome):
    """The home of a parameter whose packed bytes lie in a file: read each time that they are asked for."""

    def __init__(self, entry: Entry, error: float, reader: TensorReader, key: str) -> None:
        self.entry, self.error = entry, error
        self._reader, self._key = reader, key

    @property
    def packed(self) -> Tensor:  # type: ignore[override]
        return self._reader.read(self._key)

    def located(self) -> tuple[Path, TensorEntry]:
        """Where the packed bytes lie."""
        return self._reader.located(self._key)

    def write(self, parameter: nn.Parameter, value: Tensor) -> NoReturn:
        raise ModelError(
            f"The weight {self.entry.name} cannot be changed yet",
            "it still lies in the checkpoint files that the model was loaded from",
            "Call headrace.wrap(model) before changing weights",
        )


def checked(
    weights: Mapping[str, PackedWeight], reader: TensorReader, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, PackedWeight]:
    """Those of the packed weights that the model has. `shapes`: of its tensors, by name. Raises FormatError unless the
    files hold the bytes of all of them, and the manifest names all that they hold."""
    found = {name: weight for name, weight in weights.items() if name in shapes}
    unnamed = [key for key in reader.entries if key.removesuffix(SUFFIX) in shapes.keys() - found.keys() - {key}]
    for name in [*found, *(key.removesuffix(SUFFIX) for key in unnamed)]:
        stored = reader.entries.get(name + SUFFIX)
        size = codec_named(found[name].codec).nbytes(shapes[name]) if name in found else None
        held = "no such tensor" if stored is None else f"{stored.dtype} of {list(stored.shape)}"
        if held != f"torch.uint8 of [{size}]":
            wanted = f"as {found[name].codec} it has {size} bytes" if name in found else "no codec is named for it"
            raise FormatError(f"the files do not hold {name} as the configuration says", f"{held}; {wanted}",
                              "Copy the folder again, or quantise the original model again")  # fmt: skip
    return found


def open_packed(folder: Path) -> TensorReader:
    """The files of a quantised folder. Raises FormatError when they are not there."""
    from headrace.files.safetensors import TensorReader

    index = folder / f"{STEM}.safetensors.index.json"
    return TensorReader(index if index.is_file() else folder / f"{STEM}.safetensors")


def attach_packed(model: nn.Module, weights: Mapping[str, PackedWeight], reader: TensorReader) -> None:
    """Park the packed weights of a model at their files, frozen."""
    for name, weight in weights.items():
        parameter = model.get_parameter(name)
        park_packed(parameter, PackedFile(entry_of(parameter, name, weight.codec), weight.error, reader, name + SUFFIX))
