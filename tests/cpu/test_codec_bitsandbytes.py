"""nf4 and int8/row have the bytes of bitsandbytes 0.50 on the CPU: against what it gave once, and live where it is."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.codec.packed import decode, encode, views
from headrace.kernels.code_tables import dynamic_values, nf4_values
from headrace.spec.codecs import codec_named

pytestmark = pytest.mark.usefixtures("backend")
NAMES = "nf4/32 nf4/32+double nf4 nf4+double nf4/4096 nf4/4096+double int8/row".split()
# Of bitsandbytes 0.50.0: the first 16 digits of SHA-256 over codes, scales, nested scales and offset, in this order.
STORED = {
    ((3, 35), "float32"): """
        4bfa23572ff81f4a 98f6c4cd7140763b db53b0eeca68f40d 5cbd8bbdcd87dc1c bfe51586ac87192e 390535fc020a0c6a
        02a05ad9f10a9245
    """,
    ((3, 35), "bfloat16"): """
        2fd5bead2735a3ec aca58585d5f2f8c3 f9d098d7f49bf6e4 d22d77b132c1c9d3 6c8d16b16c01e731 66849c267783577f
        75db842eaefdf05c
    """,
    ((3, 35), "float16"): """
        4bfa23572ff81f4a 98f6c4cd7140763b db53b0eeca68f40d 5cbd8bbdcd87dc1c bfe51586ac87192e 390535fc020a0c6a
        02a05ad9f10a9245
    """,
    ((96, 160), "float32"): """
        d025befd517dc62f 2477cf4778d82b0c db7d6efc07e62059 392ff0eeb1290ea8 b4cd200856d77db9 7ccaf261bd3e34eb
        f1fbebeff903100e
    """,
    ((96, 160), "bfloat16"): """
        048c169fd21505ee 016e602ca925061b aa35f643b8a29ce3 be8a28d5309a7cc2 23caf56db30bc83f f099dbe6380334cd
        f183a1257edfb9f6
    """,
    ((96, 160), "float16"): """
        d025befd517dc62f 2477cf4778d82b0c db7d6efc07e62059 392ff0eeb1290ea8 b4cd200856d77db9 7ccaf261bd3e34eb
        f1fbebeff903100e
    """,
    ((33, 65), "float32"): """
        67971b1e6eab85a2 33f9bb3afedbcd3d fd0d7eab2e8eaa94 08bd2a4cc01d315b a646d12a8df964dc c8a1042624391c33
        f628363a4a0f5ab8
    """,
    ((33, 65), "bfloat16"): """
        6a4fbad79fa0b493 7731c1efa25e6371 b6d11e727b8e3ee2 f32df56deec8bd2b d1c7a134312523ae ee4613bf4eafcbda
        a848e5deac4d2ec9
    """,
    ((33, 65), "float16"): """
        67971b1e6eab85a2 33f9bb3afedbcd3d fd0d7eab2e8eaa94 08bd2a4cc01d315b a646d12a8df964dc c8a1042624391c33
        f628363a4a0f5ab8
    """,
    ((200, 331), "float32"): """
        8441fb88a272ef90 7d7a9558fd086aa4 af8b0ae598f5ae7e fc77a27cf21ccc87 b25b52d74541b142 fe8a8c240a8b22e4
        a99042e4cfff8c40
    """,
    ((200, 331), "bfloat16"): """
        bee7bb4ebf4dcca4 50c6bae773a17732 1a95f55974addc1d 9bd8a208678d38ae b863db7750aac577 b765b6305666a595
        2b0a9b68fa82c319
    """,
    ((200, 331), "float16"): """
        8441fb88a272ef90 7d7a9558fd086aa4 af8b0ae598f5ae7e fc77a27cf21ccc87 b25b52d74541b142 fe8a8c240a8b22e4
        a99042e4cfff8c40
    """,
}  # fmt: skip


def made(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Numbers that need no generator, and whose sums are exact in any order: so is the mean of scales."""
    index = torch.arange(math.prod(shape))
    numbers = ((index * 7919) % 2003 - 1001).float() / 1024.0 * 2.0 ** -((index // 50) % 4).float()
    return numbers.view(shape).to(getattr(torch, dtype))


def stored_parts(text: str, weight: Tensor) -> dict[str, Tensor]:
    codec = codec_named(text)
    packed = torch.full((codec.nbytes(tuple(weight.shape)),), 0xAA, dtype=torch.uint8)
    encode(codec, weight, packed)
    return views(codec, tuple(weight.shape), packed)


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


@pytest.mark.parametrize("shape,dtype", STORED)
def test_bytes_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: str) -> None:
    """Blocks that do not divide a row, partial last blocks, an odd number of codes, scales in 8 bits."""
    found = [digest(list(stored_parts(name, made(shape, dtype)).values())) for name in NAMES]
    assert found == STORED[shape, dtype].split()


def test_bytes_of_one_matrix_are_those_of_bitsandbytes() -> None:
    """The same in full, for reading: 3 x 35 weights are 53 bytes of codes, the last half of a byte is a zero."""
    parts = stored_parts("nf4+double", made((3, 35), "float32"))
    assert bytes(parts["codes"].flatten().tolist()).hex() == (
        "0feeddcba9876543221100ffeedccba9765433211100feeddc998776655444330ffeeddcba9765433211100feeedcba98765554447"
    )
    assert parts["scales"].tolist() == [[255, 0]]
    assert parts["nested_scales"].tolist() == [float.fromhex("0x1.fb8p-3")]
    assert parts["offset"].tolist() == [float.fromhex("0x1.75ap-1")]


def test_experts_are_stored_as_bitsandbytes_stores_the_flat_tensor() -> None:
    """Report 44: where blocks divide an expert, a fused tensor has the bytes of the matrix of all its rows."""
    weight = made((3, 16, 32), "bfloat16")
    for name in ("nf4", "nf4+double", "int8/row", "int8"):
        stack, matrix = stored_parts(name, weight), stored_parts(name, weight.view(48, 32))
        assert all(torch.equal(stack[part].flatten(), matrix[part].flatten()) for part in stack)


def test_tables_have_the_known_ends() -> None:
    values, dynamic = nf4_values(torch.device("cpu")), dynamic_values(torch.device("cpu"))
    assert values[[0, 7, 15]].tolist() == [-1.0, 0.0, 1.0] and (values.diff() > 0).all()
    assert dynamic[[127, 255]].tolist() == [0.0, 1.0] and (dynamic.diff() > 0).all() and dynamic.numel() == 256
    assert torch.equal(-dynamic[:127].flip(0), dynamic[128:255])


@pytest.fixture
def bitsandbytes() -> Any:
    pytest.importorskip("bitsandbytes", minversion="0.50")
    import bitsandbytes.functional

    return bitsandbytes.functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["nf4", "nf4/32", "nf4/1024", "nf4+double", "nf4/128+double", "int8/row"])
def test_bytes_and_weights_are_those_of_an_installed_bitsandbytes(
    name: str, dtype: torch.dtype, bitsandbytes: Any
) -> None:
    codec = codec_named(name)
    for shape in ((1, 1), (33, 65), (96, 160), (300, 1000), (512, 1024)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)).mul_(0.02).to(dtype)
        weight[0] = 0.0
        parts = stored_parts(name, weight)
        if name == "int8/row":
            expected = list(bitsandbytes.int8_vectorwise_quant(weight)[:2])
            whole = bitsandbytes.int8_vectorwise_dequant(*expected).to(dtype)
        else:
            codes, state = bitsandbytes.quantize_4bit(
                weight, blocksize=codec.block_size, quant_type="nf4", compress_statistics=codec.nested
            )
            expected = [codes, state.absmax]
            expected += [state.state2.absmax, state.offset.view(1)] if codec.nested else []
            whole = bitsandbytes.dequantize_4bit(codes, state)
        for (part, mine), theirs in zip(parts.items(), expected, strict=True):
            assert torch.equal(mine.flatten(), theirs.flatten()), f"{part} of {shape}"
        if name == "int8/row" or shape[1] % codec.block_size == 0:  # elsewhere its CPU kernel takes scales by row
            packed = torch.empty(codec.nbytes(shape), dtype=torch.uint8)
            encode(codec, weight, packed)
            out = torch.empty_like(weight)
            decode(codec, packed, out)
            assert torch.equal(out, whole), f"weights of {shape}"
