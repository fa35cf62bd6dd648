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
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headrace.base.errors import FormatError
from headrace.model.quantised import PackedHome, entry_of, park_packed
from headrace.spec.codecs import codec_named
from headrace.spec.layout import Entry

if TYPE_CHECKING:
    from headrace.files.safetensors import TensorReader
    from headrace.files.safetensors.header import TensorEntry
    from headrace.model.conversion import ConversionPlan

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


class InFiles(PackedHome):
    """The home of a parameter whose packed bytes are read from files each time that they are asked for."""

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The packed bytes are in memory from now on. See PackedHome."""
        home = PackedHome(self.entry, self.packed, self.error)
        home.write(parameter, value)
        park_packed(parameter, home)


class PackedFile(InFiles):
    """Whose packed bytes lie in a file as they are stored here."""

    def __init__(self, entry: Entry, error: float, reader: TensorReader, key: str) -> None:
        self.entry, self.error = entry, error
        self._reader, self._key = reader, key

    @property
    def packed(self) -> Tensor:  # type: ignore[override]
        return self._reader.read(self._key)

    def located(self) -> tuple[Path, TensorEntry]:
        """Where the packed bytes lie."""
        return self._reader.located(self._key)


class PackedFolder:
    """The packed weights of a folder of this format."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        self._weights = _decoded(told)

    def open(self, folder: Path) -> TensorReader:
        """Its files. Raises FormatError when they are not there."""
        from headrace.files.safetensors import TensorReader

        index = folder / f"{STEM}.safetensors.index.json"
        return TensorReader(index if index.is_file() else folder / f"{STEM}.safetensors")

    def shapes(self, reader: TensorReader, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The tensors that are not packed. `wanted`: shapes of the model's tensors, of which those that the folder
        packs are kept in mind. Raises FormatError unless the files hold the bytes of all of them, and the
        configuration names all that they hold."""
        self._weights = {name: weight for name, weight in self._weights.items() if name in wanted}
        others = wanted.keys() - self._weights.keys()
        unnamed = [key for key in reader.entries if key.endswith(SUFFIX) and key.removesuffix(SUFFIX) in others]
        for name in [*self._weights, *(key.removesuffix(SUFFIX) for key in unnamed)]:
            codec = self._weights[name].codec if name in self._weights else None
            stored = reader.entries.get(name + SUFFIX)
            size = None if codec is None else codec_named(codec).nbytes(wanted[name])
            held = "no such tensor" if stored is None else f"{stored.dtype} of {list(stored.shape)}"
            if held != f"torch.uint8 of [{size}]":
                asked = "no codec is named for it" if codec is None else f"as {codec} it has {size} bytes"
                raise FormatError(f"the files do not hold {name} as the configuration says", f"{held}; {asked}",
                                  "Copy the folder again, or quantise the original model again")  # fmt: skip
        mine = {name + SUFFIX for name in self._weights}
        return {key: tuple(entry.shape) for key, entry in reader.entries.items() if key not in mine}

    def take(self, plan: ConversionPlan) -> set[str]:
        """The names of the packed weights."""
        return set(self._weights)

    def attach(self, model: nn.Module, reader: TensorReader) -> None:
        """Park them at their files, frozen."""
        for name, weight in self._weights.items():
            parameter = model.get_parameter(name)
            entry = entry_of(parameter, name, weight.codec)
            park_packed(parameter, PackedFile(entry, weight.error, reader, name + SUFFIX))
