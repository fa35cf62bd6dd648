"""Tiny models with frozen bases, and what a codec makes of them: what quantised sessions are compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from headrace.codec.packed import decode, encode
from headrace.spec.codecs import codec_named
from headrace.spec.precision import PrecisionMap

SMALLEST = 64
"""Matrices of these tiny models are all quantised, except the routers."""


def every(codec: str = "nf4", **changes: Any) -> PrecisionMap:
    """A map that spares no matrix for its size."""
    return PrecisionMap(codec, **{"smallest": SMALLEST, **changes})


def frozen_base(model: Any) -> Any:
    """Everything but the norms is frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    return model


def round_trip(text: str, value: Tensor) -> Tensor:
    """What the codec called `text` makes of a weight."""
    codec, out = codec_named(text), torch.empty_like(value)
    packed = torch.empty(codec.nbytes(tuple(value.shape)), dtype=torch.uint8)
    encode(codec, value, packed)
    decode(codec, packed, out)
    assert not torch.equal(out, value)
    return out


def expected(name: str, parameter: nn.Parameter) -> bool:
    """Whether a frozen weight of these models is quantised by `every`: by its name, not by the code under test."""
    inside = any(part in name for part in (".layers.", ".h.", "body.", "blocks."))
    return inside and parameter.dim() > 1 and ".gate.weight" not in name and "lora" not in name


def decoded(model: nn.Module, codec: str, all_of_them: bool = False) -> nn.Module:
    """A copy in which each frozen weight that is quantised (`all_of_them`: frozen or not) is what its codec makes of
    it, in its own dtype."""
    twin = copy.deepcopy(model)
    changed = 0
    for name, parameter in twin.named_parameters():
        if expected(name, parameter) and (all_of_them or not parameter.requires_grad):
            changed += 1
            parameter.data = round_trip(codec, parameter.data)
    assert changed
    return twin
