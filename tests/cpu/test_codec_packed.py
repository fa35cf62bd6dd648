"""Packed weights: what comes back, how far it is from what was packed, and what is refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from headrace import ModelError, OptionError
from headrace.codec import entries
from headrace.codec.error import decoded_pieces, relative_error
from headrace.codec.packed import decode, encode, views
from headrace.spec.codecs import ALIGNMENT, codec_named
from headrace.spec.layout import Entry

pytestmark = pytest.mark.usefixtures("backend")
CODECS = ["int8", "int8/row", "nf4", "nf4+double", "nf4/512+double", "fp8", "nvfp4"]
# Relative L2 error of normal weights, from measurements at 512 x 512; the bound of the format with a little room.
ERRORS = {"int8": 0.0063, "int8/row": 0.0088, "nf4": 0.093, "nf4+double": 0.0935, "nf4/512+double": 0.106,
          "fp8": 0.0272, "nvfp4": 0.0965}  # fmt: skip


def pack(text: str, weight: Tensor) -> Tensor:
    packed = torch.full((codec_named(text).nbytes(tuple(weight.shape)),), 0xAA, dtype=torch.uint8)
    encode(codec_named(text), weight, packed, "layer.weight")
    return packed


def unpack(text: str, packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full(shape, math.nan, dtype=dtype)
    decode(codec_named(text), packed, out)
    return out


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("text", CODECS)
def test_the_error_is_that_of_the_format(text: str) -> None:
    """Report 55: also with scales in 8 bits, whose values are used and not their codes."""
    for weight in (normal(512, 512), 1e-3 * normal(96, 160), normal(33, 65).bfloat16()):
        error = relative_error(codec_named(text), weight, pack(text, weight))
        assert ERRORS[text] * 0.6 < error < ERRORS[text] * 1.05, tuple(weight.shape)


@pytest.mark.parametrize("text", CODECS)
def test_the_measured_error_is_that_of_the_decoded_weights(text: str) -> None:
    weight = normal(40, 70)
    packed = pack(text, weight)
    expected = ((unpack(text, packed, (40, 70)) - weight).double().norm() / weight.double().norm()).item()
    assert relative_error(codec_named(text), weight, packed) == pytest.approx(expected, rel=1e-6)
    assert relative_error(codec_named(text), torch.zeros(3, 4), pack(text, torch.zeros(3, 4))) == 0.0


@pytest.mark.parametrize("text", [*CODECS, "nf4/32", "int8/256"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_have_the_bits_of_the_whole(text: str, dtype: torch.dtype) -> None:
    """Cuts fall inside matrices, between them, and leave odd ends; the weight is as it was."""
    for shape in ((1,), (33, 65), (300, 257), (5, 30, 41), (3, 131, 129), (2, 0, 4), (129, 1)):
        weight = normal(*shape).to(dtype)
        before, packed = weight.clone(), pack(text, weight)
        whole = unpack(text, packed, shape, dtype)
        for at_once in (64, 1000, 1 << 18):
            pieces = list(decoded_pieces(codec_named(text), shape, dtype, packed, at_once))
            assert torch.equal(torch.cat([torch.empty(0, dtype=dtype), *pieces]), whole.flatten()), (shape, at_once)
        assert relative_error(codec_named(text), weight, packed) > 0 or weight.numel() < 200  # exact there
        assert torch.equal(weight, before)


@pytest.mark.parametrize("text", CODECS)
def test_zeros_stay_zeros(text: str) -> None:
    """A tensor of zeros, and blocks and tiles of zeros in another, are zeros again and not NaN."""
    assert torch.equal(unpack(text, pack(text, torch.zeros(130, 70)), (130, 70)), torch.zeros(130, 70))
    weight = normal(300, 256)
    weight[:128, :128], weight[200:] = 0.0, 0.0
    again = unpack(text, pack(text, weight), (300, 256))
    assert torch.equal(again[:128, :128], torch.zeros(128, 128)) and torch.equal(again[200:], torch.zeros(100, 256))
    assert (again[128:200] != 0).float().mean() > 0.7


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_no_number_is_refused_by_name(text: str, dtype: torch.dtype) -> None:
    for place in ((0, 0), (69, 40), (33, 7)):
        weight = normal(70, 41).to(dtype)
        weight[place], weight[5, 5], weight[68, 3] = math.nan, math.inf, -math.inf
        with pytest.raises(ModelError, match=r"layer\.weight cannot be stored .* 2 are infinite, 1 are NaN"):
            pack(text, weight)
        weight[5, 5] = weight[68, 3] = 1.0
        with pytest.raises(ModelError, match="0 are infinite, 1 are NaN"):
            pack(text, weight)


def test_what_would_decode_to_infinity_is_refused() -> None:
    weight = normal(8, 64)
    weight[3, 3] = -3e38
    for text in ("int8", "int8/row", "nf4+double"):
        with pytest.raises(ModelError, match="1 are too large"):
            pack(text, weight)
    for text in ("nf4", "fp8", "nvfp4"):
        assert unpack(text, pack(text, weight), (8, 64))[3, 3] == pytest.approx(-3e38, rel=1e-6)


@pytest.mark.parametrize("text", ["int8", "int8/row", "nf4", "fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 130, 66)])
def test_no_block_crosses_an_expert(text: str, shape: tuple[int, int, int]) -> None:
    """Report 44: each expert of a fused tensor is stored as the matrix that it is, at odd sizes too."""
    weight = normal(*shape) * torch.logspace(-3, 3, shape[0])[:, None, None]
    stack = views(codec_named(text), shape, pack(text, weight))
    again = unpack(text, pack(text, weight), shape)
    for e in range(shape[0]):
        alone = pack(text, weight[e])
        assert torch.equal(again[e], unpack(text, alone, shape[1:]))
        for name, part in views(codec_named(text), shape[1:], alone).items():
            mine = stack[name].view(torch.uint8).view(shape[0], -1)[e]
            assert torch.equal(mine, part.view(torch.uint8).flatten()), name


@pytest.mark.parametrize("text", CODECS)
def test_packed_bytes_survive_moves(text: str) -> None:
    """Report 56: all state is in the bytes; three round trips through other memory change nothing, padding is zeros."""
    weight = normal(37, 91)
    packed = pack(text, weight)
    expected = unpack(text, packed, (37, 91), torch.bfloat16)
    arena = torch.full((3 * packed.numel() + 512,), 0x55, dtype=torch.uint8)
    for step in range(3):
        place = arena[step * packed.numel() + 256 :][: packed.numel()].copy_(packed)
        assert torch.equal(unpack(text, place, (37, 91), torch.bfloat16), expected)
        packed = place.clone()
    assert torch.equal(packed, pack(text, weight.clone()))
    layout = codec_named(text).layout((37, 91))
    for part, offset, end in zip(layout.parts, layout.offsets, [*layout.offsets[1:], layout.nbytes], strict=True):
        assert not packed[offset + part.nbytes : end].any()


@pytest.mark.parametrize("text", CODECS)
def test_strided_weights_and_parameters_are_taken(text: str) -> None:
    weight = normal(30, 40)
    assert torch.equal(pack(text, weight.t()), pack(text, weight.t().contiguous()))
    assert torch.equal(pack(text, torch.nn.Parameter(weight)), pack(text, weight))


def test_fp8_is_what_transformers_writes() -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    settings = type("Config", (), {"weight_block_size": (128, 128), "scale_fmt": None})()
    quantize = fp8.Fp8Quantize(type("Quantizer", (), {"quantization_config": settings})())
    for weight in (normal(256, 384), 1e-3 * normal(128, 256).bfloat16(), normal(2, 256, 128)):
        theirs = quantize.convert({"layer.weight": weight})
        mine = views(codec_named("fp8"), tuple(weight.shape), pack("fp8", weight))
        codes, scales = theirs["layer.weight"], theirs["layer.weight_scale_inv"]
        assert torch.equal(mine["codes"].view(torch.uint8).flatten(), codes.view(torch.uint8).flatten())
        assert torch.equal(mine["scales"].flatten(), scales.flatten())


def test_nvfp4_takes_the_nearest_of_its_numbers() -> None:
    """And blocks, scales and the halves of bytes lie as torchao has them."""
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    weight = normal(9, 33)
    parts = views(codec_named("nvfp4"), (9, 33), pack("nvfp4", weight))
    assert parts["tensor_scale"].item() == (weight.abs().max() / torch.tensor(448.0 * 6.0)).item()
    for row, column in itertools.product(range(9), range(33)):
        total = parts["tensor_scale"] * parts["scales"][0, row, column // 16].float()
        byte = int(parts["codes"][0, row, column // 2])
        code = byte >> 4 if column % 2 else byte & 15
        scaled = weight[row, column] / total
        assert (code & 7) == int((scaled.abs() - steps).abs().argmin()) and bool(code & 8) == bool(scaled < 0)
    assert parts["scales"].view(torch.uint8).max() == 0x7E  # 448, where the largest weight is


def test_what_does_not_fit_is_refused() -> None:
    codec, weight = codec_named("nf4"), normal(8, 64)
    packed = pack("nf4", weight)
    for buffer in (packed[:-1], torch.cat([packed, packed]), packed.view(2, -1), packed.view(torch.int8), packed[::2]):
        with pytest.raises(OptionError, match="buffer"):
            decode(codec, buffer, weight)
    with pytest.raises(OptionError, match="does not hold"):
        decode(codec, packed, torch.empty(64, 64))
    with pytest.raises(OptionError, match="contiguous"):
        decode(codec, packed, torch.empty(64, 8).t())
    with pytest.raises(OptionError, match="float64"):
        decode(codec, packed, torch.empty(8, 64, dtype=torch.float64))
    with pytest.raises(OptionError, match="int32"):
        encode(codec, weight.int(), packed)
    odd = torch.empty(packed.numel() + 2, dtype=torch.uint8)[2:]
    with pytest.raises(OptionError, match="not aligned"):
        decode(codec, odd, weight)
    assert ALIGNMENT % 4 == 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_weights_of_a_block_are_decoded_together(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all that have a codec and a format in common; each weight as when it is decoded alone."""
    monkeypatch.setenv("HEADRACE_KERNELS", backend)
    shapes = [(7, 5), (33, 66), (3, 17, 6), (0, 4), (130, 259), (1,)]
    weights = []
    for number, (shape, codec) in enumerate(itertools.product(shapes, ["nf4+double", "int8/row", "fp8", "nvfp4"])):
        dtype = "float32" if number % 5 == 0 else "bfloat16"
        entry = Entry(f"weight {number}", shape, dtype, False, codec=codec)
        packed = entries.pack(entry, torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        weights.append((entry, packed, torch.full(shape, math.nan, dtype=getattr(torch, dtype))))
    calls = entries.unpacking(weights)
    assert len(calls) == 4 * 2
    for call in calls:
        call()
    for entry, packed, out in weights:
        assert torch.equal(out, entries.unpack(entry, packed)), entry
    assert entries.unpacking([]) == []
