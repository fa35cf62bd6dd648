"""Codecs as frozen data: their text, their parts, and where these lie in one flat buffer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import OptionError
from headrace.spec.codecs import ALIGNMENT, NESTED_BLOCK, ROW, Codec, codec_named, matrices

TEXTS = ["int8", "int8/row", "int8/128", "nf4", "nf4/32", "nf4+double", "nf4/4096+double", "fp8", "nvfp4"]
SHAPES = st.lists(st.integers(0, 70), min_size=0, max_size=4).map(tuple)


@pytest.mark.parametrize("text", TEXTS)
def test_text_parses_back(text: str) -> None:
    assert str(codec_named(text)) == text
    assert codec_named(f"  {text.upper()} ") == codec_named(text)


def test_the_usual_block_may_be_written_out() -> None:
    assert codec_named("nf4/64+double") == codec_named("nf4+double") == Codec("nf4", 64, nested=True)
    assert codec_named("int8/row") == Codec("int8", ROW)
    assert [str(codec_named(text)) for text in ("fp8/128", "nvfp4/16", "int8/64")] == ["fp8", "nvfp4", "int8"]


@pytest.mark.parametrize(
    "text,told",
    [
        ("nf5", "Did you mean 'nf4'"),
        ("fp4", "Did you mean 'nvfp4'|Did you mean 'fp8'|Did you mean 'nf4'"),
        ("int4", "Did you mean 'int8'"),
        ("nf4+dobule", "Did you mean 'nf4\\+double'"),
        ("int8/rows", "Did you mean 'int8/row'"),
        ("bf16", "need no codec"),
        ("", "is not a codec"),
        ("nf4/63", "has no blocks of 63. It has: 32, 64"),
        ("nf4/row", "has no blocks of 0|has no blocks of row"),
        ("int8/0", "is not a codec"),
        ("fp8/64", "has no blocks of 64. It has: 128"),
        ("nvfp4/32", "has no blocks of 32. It has: 16"),
        ("int8+double", "Only nf4 has double quantisation"),
    ],
)
def test_what_no_codec_is_called_is_refused(text: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        codec_named(text)


@given(text=st.sampled_from(TEXTS), shape=SHAPES)
def test_parts_fill_one_buffer_in_order(text: str, shape: tuple[int, ...]) -> None:
    """Every part is aligned and begins where the one before it ends; nothing takes no bytes."""
    codec = codec_named(text)
    layout = codec.layout(shape)
    end = 0
    for part, offset in zip(layout.parts, layout.offsets, strict=True):
        assert offset % ALIGNMENT == 0 and end <= offset < end + ALIGNMENT
        end = offset + part.nbytes
    assert end <= layout.nbytes < end + ALIGNMENT and layout.nbytes % ALIGNMENT == 0
    assert (layout.nbytes == 0) == (math.prod(shape) == 0)
    assert (layout.nbytes, layout.offsets) == (codec.nbytes(shape), codec.offsets(shape))


@given(text=st.sampled_from(TEXTS), shape=SHAPES)
def test_matrices_of_a_stack_share_nothing(text: str, shape: tuple[int, ...]) -> None:
    """Codes and scales of a stack are those of each of its matrices, one after the other."""
    codec, (count, rows, columns) = codec_named(text), matrices(shape)
    assert count * rows * columns == math.prod(shape)
    one = {part.name: math.prod(part.shape) for part in codec.parts((rows, columns))}
    stack = {part.name: math.prod(part.shape) for part in codec.parts(shape)}
    for name in {"codes", "scales", "tensor_scale"} & set(one):
        assert stack[name] == count * one[name]
    if codec.nested:
        assert stack["nested_scales"] == -(-stack["scales"] // NESTED_BLOCK)


@pytest.mark.parametrize(
    "text,bits",
    [("int8", 8.5), ("nf4", 4.5), ("nf4+double", 4.127), ("fp8", 8.002), ("nvfp4", 4.5), ("nf4/4096", 4.008)],
)
def test_bits_per_weight(text: str, bits: float) -> None:
    codec = codec_named(text)
    assert codec.bits_per_weight((4096, 4096)) == pytest.approx(bits, abs=5e-4)
    assert f"{text}: {bits:.2f} bits per weight" in codec.describe((4096, 4096))
    assert codec.bits_per_weight((0, 5)) == 0.0


def test_a_tensor_in_numbers() -> None:
    """3 experts of 5 x 7 = 35 weights: 18 bytes of codes and one scale each; no byte and no scale is shared."""
    codec = codec_named("nf4/32+double")
    assert [(p.name, p.dtype, p.shape) for p in codec.parts((3, 5, 7))] == [
        ("codes", "uint8", (3, 18)), ("scales", "uint8", (3, 2)), ("nested_scales", "float32", (1,)),
        ("offset", "float32", (1,)),
    ]  # fmt: skip
    assert codec.offsets((3, 5, 7)) == (0, 256, 512, 768) and codec.nbytes((3, 5, 7)) == 1024
    assert [p.shape for p in codec_named("fp8").parts((2, 129, 300))] == [(2, 129, 300), (2, 2, 3)]
    assert [p.shape for p in codec_named("nvfp4").parts((9, 33))] == [(1, 9, 17), (1, 9, 3), (1,)]
    assert [p.shape for p in codec_named("int8/row").parts((2, 9, 33))] == [(18, 33), (18, 1)]
