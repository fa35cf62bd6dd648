"""Weights as numbers of 8 and 4 bits in plain torch: fp8 (e4m3) by tiles, nvfp4 (e2m1) by 16 along a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.kernels.reference.gradients import PIECE
from headrace.kernels.reference.packing import int8_decode_, nf4_decode_, paired, unpaired

if TYPE_CHECKING:
    from headrace.kernels.packing import Together

TILE = 128
E4M3_MAX, E4M3_TINY = 448.0, 2.0**-6  # largest number, smallest normal one
E2M1_MAX = 6.0
SMALLEST_TENSOR_SCALE = 2.0**-100  # below it, products of the two scales would vanish
_TINIEST_TILE = E4M3_MAX / torch.finfo(torch.float32).max  # what a tile must reach for its inverse scale to be finite
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@torch.no_grad()
def fp8_encode_(codes: Tensor, scales: Tensor, weight: Tensor) -> None:
    """See `headrace.kernels.packing.fp8_encode_`."""
    for matrix, row in _bands(weight):
        x = _tiled(weight[matrix, row : row + TILE].float())
        narrow, found = _scaled_to_e4m3(x, x.abs().amax(dim=(0, 2)))
        # As bytes: not every torch copies fp8 between views.
        band = narrow.view(torch.uint8).flatten(1)[:, : weight.shape[2]]
        codes.view(torch.uint8)[matrix, row : row + TILE] = band
        scales[matrix, row // TILE] = found


def _scaled_to_e4m3(x: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of groups along the last dimension of x; `absmax`: their largest magnitudes."""
    inverse = torch.where(absmax > _TINIEST_TILE, absmax.reciprocal() * E4M3_MAX, 1.0)
    narrow = (x * inverse[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return narrow, torch.where(absmax.isfinite(), inverse.reciprocal(), absmax)


@torch.no_grad()
def fp8_decode_(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """See `headrace.kernels.packing.fp8_decode_`."""
    for matrix, row in _bands(out):
        x = _tiled(codes[matrix, row : row + TILE].float()) * scales[matrix, row // TILE][:, None]
        out[matrix, row : row + TILE] = x.flatten(1)[:, : out.shape[2]].to(out.dtype)


@torch.no_grad()
def fp8_rows_(codes: Tensor, scales: Tensor, x: Tensor) -> None:
    """Rows of activations (m, k) as fp8 is stored, in groups of TILE along a row: into the first m rows of `codes` and
    the first m columns of `scales` (k / TILE, at least m). See `headrace.kernels.stored`."""
    groups = x.float().view(x.shape[0], -1, TILE)
    narrow, found = _scaled_to_e4m3(groups, groups.abs().amax(2))
    codes.view(torch.uint8)[: x.shape[0]] = narrow.view(torch.uint8).flatten(1)
    scales[:, : x.shape[0]] = found.t()


@torch.no_grad()
def nvfp4_encode_(codes: Tensor, scales: Tensor, tensor_scale: Tensor, weight: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nvfp4_encode_`."""
    if weight.numel() == 0:
        return
    tall = max(1, PIECE // weight.shape[2])
    starts = range(0, weight.shape[1], tall)
    for m in range(weight.shape[0]):
        absmax = torch.stack([weight[m, row : row + tall].abs().amax().float() for row in starts]).amax()
        whole = absmax / (E4M3_MAX * E2M1_MAX)
        whole = torch.where(whole < SMALLEST_TENSOR_SCALE, 1.0, whole)
        tensor_scale[m] = whole
        for row in starts:
            x = _split_rows(weight[m, row : row + tall].float(), block_size)
            wanted = (x.abs().amax(dim=2) / E2M1_MAX) / whole
            scale = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
            x = x / (whole * scale.float()).unsqueeze(2)
            nibbles = _e2m1_codes(x).flatten(1)[:, : weight.shape[2]]
            codes[m, row : row + tall] = paired(nibbles, False, 0)
            scales.view(torch.uint8)[m, row : row + tall] = scale.view(torch.uint8)


@torch.no_grad()
def nvfp4_decode_(out: Tensor, codes: Tensor, scales: Tensor, tensor_scale: Tensor, block_size: int) -> None:
    """See `headrace.kernels.packing.nvfp4_decode_`."""
    if out.numel() == 0:
        return
    size = out.shape[2]
    values = torch.tensor([*_E2M1, *(-x for x in _E2M1)]).to(out.device, non_blocking=True)
    tall = max(1, PIECE // size)
    for m in range(out.shape[0]):
        for row in range(0, out.shape[1], tall):
            x = values[unpaired(codes[m, row : row + tall], size, False).int()]
            whole = tensor_scale[m] * scales[m, row : row + tall].float()
            x = _split_rows(x, block_size) * whole.unsqueeze(2)
            out[m, row : row + tall] = x.flatten(1)[:, :size].to(out.dtype)


def _e2m1_codes(x: Tensor) -> Tensor:
    """The nearest e2m1 codes, ties to the even one, beyond 6 the code of 6; a negative zero keeps its sign."""
    magnitude = x.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    for bound, even_above in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += magnitude >= bound if even_above else magnitude > bound
    return torch.bitwise_or(code, x.signbit().to(torch.uint8) << 3)


def _bands(x: Tensor) -> list[tuple[int, int]]:
    """(matrix, first row) of each band of TILE rows of (m, rows, columns) `x`."""
    return [(m, row) for m in range(x.shape[0]) for row in range(0, x.shape[1], TILE) if x.shape[2]]


def _tiled(band: Tensor) -> Tensor:
    """(rows, columns) as (rows, tiles, TILE), with zeros to the right."""
    return _split_rows(band, TILE)


def _split_rows(x: Tensor, width: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % width))
    return padded.view(x.shape[0], -1, width)


_DECODERS: dict[str, Callable[..., None]] = {
    "int8_decode_": int8_decode_,
    "nf4_decode_": nf4_decode_,
    "fp8_decode_": fp8_decode_,
    "nvfp4_decode_": nvfp4_decode_,
}


def decode_all_(together: Together) -> None:
    """See `headrace.kernels.packing.decoding`: one after the other."""
    for arguments in together.calls:
        _DECODERS[together.kernel](*arguments)
