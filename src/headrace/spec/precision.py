"""The precision map: which frozen matrices are stored with which codec, and which keep their own format."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, fields

from headrace.base.errors import OptionError
from headrace.spec.codecs import codec_named

KEPT = "bf16"
"""In place of a codec: the weight keeps the format that it has, whichever that is."""
DECODED, STORED = "decoded", "stored"
"""What the option `products` may be: how weights in formats that some GPUs multiply are multiplied."""
SENSITIVE = ("*norm*", "*router*", "*.gate.weight", "*shared_expert_gate*", "*A_log*", "*dt_proj*", "*x_proj*")
"""Small matrices whose rounding costs more than their bytes: norms, routers, what steers the state of a Mamba."""


@dataclass(frozen=True)
class PrecisionMap:
    """What `quantize=` means weight by weight. Only frozen matrices of blocks are stored with a codec: weights of
    linear layers, and the three-dimensional ones of fused experts. Vectors, embeddings, the head, and what several
    modules share keep their own format. Patterns are compared with names as the model has them without adapters.

    `quantize="nf4"` stands for `PrecisionMap("nf4")`.
    """

    codec: str = "nf4"
    """For every matrix that nothing below excludes."""
    keep_first: int = 0
    """Blocks at the start of each stack that keep their own format. Slots on the device are as large as the largest
    block that streams, so that one such block makes all of them larger."""
    keep_last: int = 0
    """Blocks at the end of each stack that do."""
    overrides: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    """{name pattern: codec, or "bf16" for the weight's own format}, as in {"*.down_proj.weight": "int8"}. The last one
    that matches a weight decides, also over the three fields around this one."""
    sensitive: tuple[str, ...] = SENSITIVE
    """Patterns of names that keep their own format."""
    smallest: int = 4096
    """Matrices with fewer elements than this keep their own format."""

    def __post_init__(self) -> None:
        """Raises OptionError for a codec that is not known, or a number below 0."""
        pairs = self.overrides.items() if isinstance(self.overrides, Mapping) else self.overrides
        object.__setattr__(self, "codec", str(codec_named(self.codec)))
        object.__setattr__(self, "overrides", tuple((name, _checked(codec)) for name, codec in pairs))
        if self.keep_first < 0 or self.keep_last < 0:
            raise OptionError("keep_first and keep_last count blocks", f"got {self.keep_first} and {self.keep_last}",
                              "Use whole numbers of at least 0")  # fmt: skip

    def __str__(self) -> str:
        """The codec, and the fields that are not as usual."""
        usual = PrecisionMap(self.codec)
        changed = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(usual, f.name)}
        return ", ".join([self.codec, *(f"{name}={value}" for name, value in changed.items())])

    def codec_of(self, name: str, numel: int, position: int, blocks: int) -> str | None:
        """The codec (in its text form) of a frozen matrix in block `position` of a stack of `blocks`, or None."""
        edge = position < self.keep_first or position >= blocks - self.keep_last
        kept = edge or numel < self.smallest or any(fnmatch.fnmatch(name, pattern) for pattern in self.sensitive)
        chosen = KEPT if kept else self.codec
        for pattern, codec in self.pairs:
            if fnmatch.fnmatch(name, pattern):
                chosen = codec
        return None if chosen == KEPT else chosen

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The overrides, in order."""
        return tuple(self.overrides.items() if isinstance(self.overrides, Mapping) else self.overrides)


def _checked(codec: str) -> str:
    return codec if codec == KEPT else str(codec_named(codec))


def as_map(value: str | PrecisionMap) -> PrecisionMap:
    """What `quantize=` was given, as a map. Raises OptionError for a codec that is not known."""
    if isinstance(value, PrecisionMap):
        return value
    if not isinstance(value, str):
        raise OptionError("quantize names no codec", f"got {value!r}",
                          "Give a codec such as 'nf4', 'auto', or a headrace.PrecisionMap")  # fmt: skip
    return PrecisionMap(value)
