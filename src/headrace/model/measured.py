"""Precision maps by measured error: the matrices that a codec costs most keep more bits, as far as a limit asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from headrace.base.errors import OptionError
from headrace.codec.entries import error_of, pack
from headrace.model.blocks import find_blocks
from headrace.model.parked import WeightValue
from headrace.model.quantised import Candidate, candidates, choose, entry_of, refuse_foreign, refuse_marked
from headrace.spec.codecs import codec_named
from headrace.spec.formats import itemsize
from headrace.spec.precision import KEPT, PrecisionMap, as_map

BETTER = "int8"
"""Between a codec of fewer bits and a weight's own format."""


@dataclass
class Rungs:
    """What a matrix can be stored as, from the fewest bits to its own format, and what it is stored as now."""

    name: str
    numel: int
    codecs: tuple[str, ...]
    nbytes: tuple[int, ...]
    errors: tuple[float, ...]
    """Relative L2 error of each; 0 of its own format."""
    free: bool = True
    """False: the map that was given names its codec, or keeps it."""
    at: int = 0

    @property
    def error(self) -> float:
        return self.errors[self.at]


def precision_by_error(
    model: Any, codec: str | PrecisionMap = "nf4", *, most_error: float | None = None, bits: float | None = None,
    blocks: Any = None,
) -> PrecisionMap:  # fmt: skip
    """A map that stores the matrices of the model's blocks with `codec`, and those that lose most by it as int8, or in
    their own format.

    Give one limit. `most_error`: of each matrix, |decoded - weight| / |weight|; it is stored in the fewest bits that
    keep it. `bits`: mean bits of a weight over all matrices of the blocks; the worst first, each goes up a rung (codec,
    int8, own format) as long as the mean stays within. `codec` may be a map: what its fields keep or name stays so.
    Equal weights give equal maps. Each matrix is read once, and encoded twice; one is in memory at a time.

    Raises OptionError for two limits or none, and for bits that `codec` alone exceeds.
    """
    given = {"most_error": most_error, "bits": bits}
    limits = {name: value for name, value in given.items() if value is not None}
    if len(limits) != 1 or not all(math.isfinite(value) and value > 0 for value in limits.values()):
        raise OptionError("a precision map by error needs one limit above 0",
                          f"got {', '.join(f'{n}={v}' for n, v in given.items())}",
                          "Give most_error, such as 0.09, or bits, such as 5")  # fmt: skip
    refuse_marked(model)
    refuse_foreign(model)
    precision = as_map(codec)
    found = list(candidates(model, find_blocks(model, blocks)))
    chosen = choose(found, precision, lambda parameter: True)
    rungs = [_measured(candidate, precision, chosen.get(id(candidate.parameter))) for candidate in found]
    if most_error is not None:
        for matrix in rungs:
            while matrix.free and matrix.error > most_error:
                matrix.at += 1
    else:
        assert bits is not None
        _spend(rungs, bits)
    raised = tuple((matrix.name, matrix.codecs[matrix.at]) for matrix in rungs if matrix.at)
    return replace(precision, overrides=(*precision.pairs, *raised))


def _spend(rungs: Sequence[Rungs], bits: float) -> None:
    """Raise matrices, the one with the largest error first, while all of them take at most `bits` a weight."""
    numel = sum(matrix.numel for matrix in rungs)
    room = bits * numel / 8 - sum(matrix.nbytes[0] for matrix in rungs)
    if room < 0:
        least = (bits * numel / 8 - room) * 8 / numel
        raise OptionError(f"the matrices of the blocks do not fit in {bits:g} bits a weight",
                          f"they take {least:.2f} as asked, before any is kept better",
                          "Allow more bits, or name a smaller codec")  # fmt: skip
    while True:
        raisable = [matrix for matrix in _raisable(rungs) if _cost(matrix) <= room]
        if not raisable:
            return
        worst = min(raisable, key=lambda matrix: (-matrix.error, matrix.name))
        room -= _cost(worst)
        worst.at += 1


def _raisable(rungs: Sequence[Rungs]) -> Iterator[Rungs]:
    return (matrix for matrix in rungs if matrix.free and matrix.at + 1 < len(matrix.codecs))


def _cost(matrix: Rungs) -> int:
    return matrix.nbytes[matrix.at + 1] - matrix.nbytes[matrix.at]


def _measured(candidate: Candidate, precision: PrecisionMap, chosen: str | None) -> Rungs:
    value = candidate.parameter.detach()
    numel, own = value.numel(), value.numel() * itemsize(str(value.dtype).removeprefix("torch."))
    if chosen is None:
        return Rungs(candidate.base_name, numel, (KEPT,), (own,), (0.0,), free=False)
    shape = tuple(value.shape)
    codecs = [chosen]
    free = not any(fnmatch(candidate.base_name, pattern) for pattern, _ in precision.pairs)
    if free and chosen != BETTER and codec_named(chosen).nbytes(shape) <= codec_named(BETTER).nbytes(shape):
        codecs.append(BETTER)
    plain = value.plain() if isinstance(value, WeightValue) else value
    errors = [_error(candidate, plain, codec) for codec in codecs]
    nbytes = [codec_named(codec).nbytes(shape) for codec in codecs]
    return Rungs(candidate.base_name, numel, (*codecs, KEPT), (*nbytes, own), (*errors, 0.0), free)


def _error(candidate: Candidate, value: Tensor, codec: str) -> float:
    entry = entry_of(candidate.parameter, candidate.name, codec)
    return error_of(entry, value, pack(entry, value))
