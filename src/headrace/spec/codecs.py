"""Codecs: storage formats of frozen weights, the parts that each keeps of a tensor, and where they lie in one buffer.

A codec prints as text and parses back (`codec_named`): its name, then `/` and the block where that is not the usual
one, then `+double` where the scales are compressed once more. Bits are those of a large weight.

| text | bits | what is stored |
|---|---|---|
| `int8` | 8.5 | int8 codes, an fp32 scale (the largest magnitude) for 64 weights in a row; `int8/256`: for 256 |
| `int8/row` | 8 | int8 codes, an fp32 scale for each row of the matrix (https://arxiv.org/abs/2208.07339) |
| `nf4` | 4.5 | 16 quantiles of the normal distribution, an fp32 scale for 64 (https://arxiv.org/abs/2305.14314) |
| `nf4+double` | 4.13 | its scales in 8 bits, an fp32 scale for 256 of these, an fp32 offset for the tensor |
| `fp8` | 8 | e4m3 codes, an fp32 scale for a tile of 128 x 128 weights (https://arxiv.org/abs/2412.19437) |
| `nvfp4` | 4.5 | e2m1 codes, an e4m3 scale for 16 weights along a row, an fp32 scale for the matrix |

The last two dimensions of a tensor are a matrix, those before them count matrices: a fused expert tensor is a stack of
matrices, and no block, tile or byte is shared by two of them. What is one row of numbers is a matrix of one row. `int8`
and `nf4` take their blocks from a matrix as one flat row, as bitsandbytes does. The last block or tile of a matrix may
be smaller than the others.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from functools import lru_cache

from headrace.base.errors import OptionError
from headrace.base.units import format_bytes
from headrace.spec.formats import itemsize

ALIGNMENT = 256
"""Bytes that every part of a packed tensor, and the packed tensor itself, is aligned to and padded to."""
NESTED_BLOCK = 256
"""Scales that share one scale where scales are compressed once more."""
ROW = 0
"""The block size of a codec whose blocks are the rows of the matrix."""

MULTIPLIED = ("fp8", "nvfp4")
"""Names of codecs that some GPUs multiply as they are stored."""

_TILE = 128
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_USUAL = {"int8": 64, "nf4": 64, "fp8": _TILE, "nvfp4": 16}
_ALLOWED = {"int8": (ROW, *_BLOCKS), "nf4": _BLOCKS, "fp8": (_TILE,), "nvfp4": (16,)}
_TEXT = re.compile(r"^(?P<name>[a-z0-9]+)(?:/(?P<block>row|[0-9]+))?(?P<double>\+double)?$")


@dataclass(frozen=True)
class Part:
    """One tensor of what a codec stores."""

    name: str
    """codes, scales, nested_scales, offset or tensor_scale."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class Packing:
    """Parts of one tensor in order, each at a byte offset of one flat buffer of `nbytes` bytes."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    nbytes: int
    """A multiple of ALIGNMENT, so that packed tensors can lie end to end; 0 for a tensor without elements."""


@dataclass(frozen=True)
class Codec:
    """A storage format for frozen weights. Raises OptionError for what the format does not have."""

    name: str
    block_size: int
    """Weights that share a scale; ROW: those of a row; `fp8`: the side of a square tile."""
    nested: bool = False
    """Whether the scales are compressed once more (double quantisation)."""

    def __post_init__(self) -> None:
        if self.name not in _USUAL:
            raise _unknown(self.name)
        allowed = _ALLOWED[self.name]
        if self.block_size not in allowed:
            known = ", ".join("row" if size == ROW else str(size) for size in allowed)
            raise OptionError(
                f"{self.name} has no blocks of {self.block_size}", f"It has: {known}", "Choose one of these"
            )
        if self.nested and self.name != "nf4":
            raise OptionError(
                f"The scales of {self.name} cannot be compressed once more",
                "Only nf4 has double quantisation",
                f"Use {self.name} without +double, or nf4+double",
            )

    def __str__(self) -> str:
        usual = self.block_size == _USUAL[self.name]
        block = "" if usual else "/row" if self.block_size == ROW else f"/{self.block_size}"
        return f"{self.name}{block}{'+double' if self.nested else ''}"

    def parts(self, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """What is stored of a tensor of `shape`, in the order of the buffer. Scales of nothing are nothing."""
        count, rows, columns = matrices(shape)
        size, any_weight = rows * columns, min(1, math.prod(shape))
        if self.name == "fp8":
            tiles = (count, -(-rows // _TILE), -(-columns // _TILE))
            return Part("codes", "float8_e4m3fn", (count, rows, columns)), Part("scales", "float32", tiles)
        if self.name == "nvfp4":
            return (
                Part("codes", "uint8", (count, rows, -(-columns // 2))),
                Part("scales", "float8_e4m3fn", (count, rows, -(-columns // self.block_size))),
                Part("tensor_scale", "float32", (count * any_weight,)),
            )
        if self.name == "int8" and self.block_size == ROW:
            lines = count * rows
            return Part("codes", "int8", (lines, columns)), Part("scales", "float32", (lines, min(1, columns)))
        blocks = -(-size // self.block_size)
        if self.name == "int8":
            return Part("codes", "int8", (count, size)), Part("scales", "float32", (count, blocks))
        codes = Part("codes", "uint8", (count, -(-size // 2)))
        if not self.nested:
            return codes, Part("scales", "float32", (count, blocks))
        return (
            codes,
            Part("scales", "uint8", (count, blocks)),
            Part("nested_scales", "float32", (-(-count * blocks // NESTED_BLOCK),)),
            Part("offset", "float32", (any_weight,)),
        )

    def layout(self, shape: tuple[int, ...]) -> Packing:
        """Where the parts of a tensor of `shape` lie in its flat buffer."""
        return _packing(self, tuple(shape))

    def offsets(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Bytes from the start of the buffer, one for each part."""
        return self.layout(shape).offsets

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the buffer of a tensor of `shape`, with all padding."""
        return self.layout(shape).nbytes

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Bits of one weight of a tensor of `shape`, with its share of scales and padding; 0 when there is none."""
        size = math.prod(shape)
        return 8 * self.nbytes(shape) / size if size else 0.0

    def describe(self, shape: tuple[int, ...]) -> str:
        """For people: "nf4+double: 4.13 bits per weight, 28.9 MiB"."""
        return f"{self}: {self.bits_per_weight(shape):.2f} bits per weight, {format_bytes(self.nbytes(shape))}"


def codec_named(text: str) -> Codec:
    """The codec that `text` names ("nf4", "nf4/128+double", "int8/row").

    Raises OptionError, with the nearest name, for text that names none.
    """
    match = _TEXT.match(text.strip().lower())
    if match is None or match["name"] not in _USUAL:
        raise _unknown(text)
    block = match["block"]
    size = _USUAL[match["name"]] if block is None else ROW if block == "row" else int(block)
    if block == "0":  # the number that stands for rows is no size to ask for
        raise _unknown(text)
    return Codec(match["name"], size, match["double"] is not None)


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows of one, columns) of a tensor of `shape`; one row of numbers is a matrix of one row."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return math.prod(shape[:-2]), shape[-2], shape[-1]


@lru_cache(maxsize=4096)
def _packing(codec: Codec, shape: tuple[int, ...]) -> Packing:
    parts = codec.parts(shape)
    offsets, position = [], 0
    for part in parts:
        offsets.append(position)
        position += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return Packing(parts, tuple(offsets), position)


def _unknown(text: str) -> OptionError:
    near = difflib.get_close_matches(text.strip().lower(), [*_USUAL, "int8/row", "nf4+double"], n=1, cutoff=0.5)
    return OptionError(
        f"{text!r} is not a codec",
        f"known: {', '.join(_USUAL)}, with the block as in int8/row or nf4/128, and nf4+double",
        f"Did you mean {near[0]!r}?" if near else "Choose one of these; weights that keep their format need no codec",
    )
