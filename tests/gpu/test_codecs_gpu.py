"""Packed weights decoded by Triton: the bits of plain torch on the CPU, at awkward shapes. Needs one CUDA GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from headrace.codec.packed import decode, decoding, encode
from headrace.kernels import ops
from headrace.spec.codecs import codec_named

packing = pytest.importorskip("headrace.kernels.triton.packing", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CODECS = ["int8", "int8/32", "int8/row", "nf4", "nf4/32", "nf4/4096", "nf4+double", "nf4/128+double", "fp8", "nvfp4"]
SHAPES = [(1,), (7,), (0, 5), (5, 0), (1, 1), (7, 5), (3, 17), (33, 65), (130, 259), (129, 128), (3, 5, 7),
          (2, 129, 66), (5, 4100), (70_000, 3), (1000, 1037), (9, 256, 384)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def triton_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")


def packed_on_the_cpu(text: str, weight: Tensor) -> Tensor:
    packed = torch.empty(codec_named(text).nbytes(tuple(weight.shape)), dtype=torch.uint8)
    encode(codec_named(text), weight, packed)
    return packed


def plain(text: str, packed: Tensor, like: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setenv("HEADRACE_KERNELS", "reference")
        out = torch.full_like(like, math.nan, device="cpu")
        decode(codec_named(text), packed, out)
    return out


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    a, e = actual.cpu().view(bits), expected.view(bits)
    wrong = (a != e).flatten().nonzero().flatten()
    assert len(wrong) == 0, (
        f"{len(wrong)} of {e.numel()} differ, first at {wrong[0]}: "
        f"{actual.flatten()[wrong[0]]} {expected.flatten()[wrong[0]]}"
    )


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding(text: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(math.prod(shape))
    weight = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 3, shape, generator=generator)
    packed = packed_on_the_cpu(text, weight)
    out = torch.full(shape, math.nan, dtype=dtype, device="cuda")
    guard = torch.full((packed.numel() + 512,), 0xAA, dtype=torch.uint8, device="cuda")
    place = guard[256 : 256 + packed.numel()].copy_(packed)
    decode(codec_named(text), place, out)
    assert_same_bits(out, plain(text, packed, out, monkeypatch))
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[::-1], [(64, 256), (16, 2048), (3, 32, 160)], [(0, 5), (5, 0)]],
                         ids=["mixed", "reversed", "aligned", "empty"])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_a_block_are_decoded_in_one_launch(
    text: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed end to end in one region, decoded end to end into one place: each as alone, and nothing between them."""
    launched = []
    launch = packing.launch_rows
    monkeypatch.setattr(packing, "launch_rows", lambda *a, **k: (launched.append(a[1][0]), launch(*a, **k)))
    codec = codec_named(text)
    packed = [packed_on_the_cpu(text, torch.randn(shape, generator=torch.Generator().manual_seed(i)))
              for i, shape in enumerate(shapes)]  # fmt: skip
    region = torch.cat(packed).cuda()
    starts = [0, *itertools.accumulate(-(-math.prod(shape) * dtype.itemsize // 256) * 256 + 256 for shape in shapes)]
    place = torch.full((starts[-1],), 0xAA, dtype=torch.uint8, device="cuda")
    outs = [place[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for at, shape in zip(starts, shapes, strict=False)]  # fmt: skip
    bytes_ = region.split([each.numel() for each in packed])
    decode_all = decoding(codec, list(zip(bytes_, outs, strict=True)))
    for _ in range(2):
        place.fill_(0xAA)
        decode_all()
        for one, out in zip(packed, outs, strict=True):
            assert_same_bits(out, plain(text, one, out, monkeypatch))
    assert len(launched) == 2
    for out in outs:
        out.view(-1).view(torch.uint8).fill_(0xAA)
    assert (place == 0xAA).all()
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")


@pytest.mark.parametrize("text", ["fp8", "nvfp4", "nf4", "int8"])
def test_every_code(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes as codes: denormals, both zeros, the largest numbers, the NaN of fp8."""
    packed = packed_on_the_cpu(text, torch.ones(4, 256) * 0.37)
    codes = 4 * 256 if text in ("fp8", "int8") else 4 * 128
    packed[:codes] = torch.arange(codes, dtype=torch.int64).to(torch.uint8)
    like = torch.empty(4, 256, device="cuda")
    decode(codec_named(text), packed.cuda(), like)
    expected = plain(text, packed, like, monkeypatch)
    nan = expected.isnan()
    assert torch.equal(like.cpu().isnan(), nan)
    assert_same_bits(like.cpu()[~nan], expected[~nan])


@pytest.mark.parametrize("text", CODECS)
def test_packing_on_the_gpu_gives_the_same_bytes(text: str) -> None:
    """Plain torch packs there. The offset of compressed scales is a mean, whose last bit follows the device."""
    weight = torch.randn(130, 259, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = torch.empty(codec_named(text).nbytes((130, 259)), dtype=torch.uint8, device="cuda")
    encode(codec_named(text), weight.cuda(), packed)
    expected = packed_on_the_cpu(text, weight)
    if codec_named(text).nested:
        codes = codec_named(text).offsets((130, 259))[1]
        packed, expected = packed[:codes], expected[:codes]
    assert torch.equal(packed.cpu(), expected)


@pytest.mark.parametrize("text", CODECS)
def test_decoding_never_waits_and_allocates_nothing(text: str) -> None:
    """On a stream of its own, behind work that is not done: the call returns, and only `out` is in use."""
    weight = torch.randn(512, 1024)
    packed, out = packed_on_the_cpu(text, weight).cuda(), torch.empty(512, 1024, dtype=torch.bfloat16, device="cuda")
    decode(codec_named(text), packed, out)  # compiles, and brings the tables of codes to the device
    expected = out.clone()
    torch.cuda.synchronize()
    stream, before = torch.cuda.Stream(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
        out.zero_()
        decode(codec_named(text), packed, out)
        assert not stream.query(), "decode waited for the GPU"
    stream.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(out, expected)
