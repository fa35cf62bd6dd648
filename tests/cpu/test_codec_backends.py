"""Packed weights on the CPU: numba has the bits of plain torch, at awkward shapes and for numbers at every edge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.codec.packed import decode, encode
from headrace.kernels import ops
from headrace.spec.codecs import Codec, codec_named

CODECS = ["int8", "int8/32", "int8/row", "nf4", "nf4/32", "nf4/4096", "nf4+double", "fp8", "nvfp4"]
SHAPES = [(1,), (7,), (0, 5), (5, 0), (1, 1), (7, 5), (3, 17), (33, 65), (130, 259), (129, 128), (3, 5, 7),
          (2, 129, 66), (2, 2, 3, 4)]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def packed_by(backend: str, codec: Codec, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setenv("HEADRACE_KERNELS", backend)
    assert ops.backend_name("cpu") == ("reference" if backend == "reference" else "numba"), ops.fallback_reason("cpu")
    packed = torch.full((codec.nbytes(tuple(weight.shape)),), 0xAA, dtype=torch.uint8)
    encode(codec, weight, packed)
    return packed


def decoded_by(backend: str, codec: Codec, packed: Tensor, like: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setenv("HEADRACE_KERNELS", backend)
    out = torch.full_like(like, math.nan)
    decode(codec, packed, out)
    return out


def assert_backends_agree(text: str, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_named(text)
    expected, packed = (packed_by(backend, codec, weight, monkeypatch) for backend in ("reference", "auto"))
    wrong = (packed != expected).nonzero().flatten().tolist()
    assert not wrong, f"{len(wrong)} bytes differ, first at {wrong[0]} of {codec.layout(tuple(weight.shape))}"
    for dtype in DTYPES:
        like = torch.empty(weight.shape, dtype=dtype)
        plain, fast = (decoded_by(backend, codec, expected, like, monkeypatch) for backend in ("reference", "auto"))
        assert not plain.isnan().any()
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(plain.view(bits), fast.view(bits)), f"decoded to {dtype}"


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree(text: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(math.prod(shape))
    assert_backends_agree(text, (torch.randn(shape) * 0.02).to(dtype), monkeypatch)


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("scale", [1e-41, 1e-37, 1e-30, 1e-6, 1.0, 1e30, 2e36])
def test_backends_agree_at_every_magnitude(text: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Denormals, blocks of zeros, a zero with a sign, one large weight among small ones; and no NaN comes of it."""
    torch.manual_seed(0)
    scale = min(scale, 1e35) if text == "nf4+double" else scale  # the sum of all scales must be finite
    weight = (torch.rand(70, 200) * 2 - 1) * scale
    weight[3], weight[4], weight[:, 130:] = 0.0, -0.0, weight[:, 130:] * 1e-3
    weight[11, 5] = scale
    assert_backends_agree(text, weight, monkeypatch)


@pytest.mark.parametrize("text", ["int8/row", "nf4", "fp8", "nvfp4"])
def test_every_half_and_every_tie_is_rounded_alike(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All finite fp16 numbers, and all numbers halfway between two codes of fp8 or nvfp4, when a scale is one."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    halves = patterns[patterns.isfinite()]
    assert_backends_agree(text, halves.view(-1, 62), monkeypatch)
    steps = torch.arange(-448 * 16, 448 * 16 + 1) / 16.0
    padded = torch.cat([steps, torch.full((-steps.numel() % 128,), 448.0)])
    assert_backends_agree(text, padded.view(-1, 128), monkeypatch)
    fine = torch.arange(-12 * 64, 12 * 64) / 128.0
    assert_backends_agree(text, torch.cat([fine.view(-1, 12), torch.full((128, 4), 6.0)], 1), monkeypatch)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(CODECS),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
)
def test_backends_agree_anywhere(text: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-4, 4, shape, generator=generator)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_backends_agree(text, weight.to(dtype), monkeypatch)


@pytest.mark.parametrize("text", CODECS)
def test_bytes_do_not_depend_on_the_number_of_threads(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 321, generator=torch.Generator().manual_seed(5))
    try:
        results = []
        for count in (1, 2):
            ops.set_threads(count)
            results.append(packed_by("auto", codec_named(text), weight, monkeypatch))
    finally:
        ops.set_threads(None)
    assert torch.equal(*results)
