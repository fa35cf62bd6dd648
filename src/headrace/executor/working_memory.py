"""Device memory that a step works with: how it is measured, and by arithmetic what is not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.executor.head import LOGITS_AT_ONCE
from headrace.spec.model import ModelSpec

LOGIT_BYTES = 14
"""Working memory of the loss for each logit of a tile by chunk in plain torch; leaner kernels take no more."""
WINDOW_BUFFERS = 6
"""Hidden states of the whole window that the outer forward and the graph hold at a time."""
UNSPLIT = 16 << 20
"""What torch's allocator gives beyond what is asked: a piece of more than 1 MiB is given whole where less than 1 MiB of
it would be left. No more than 16 tensors are alive at a time that were not measured."""


def beside(hidden: int) -> int:
    """What a step takes beside the largest of its parts, given the bytes of the window's hidden states."""
    return WINDOW_BUFFERS * hidden + UNSPLIT


def loss_bytes(spec: ModelSpec, hidden: int) -> int:
    """Working memory of a tile of the head by a chunk of the tokens, given the bytes of all hidden states."""
    heads = [(spec.units[tile], matrix) for matrix in spec.matrices for tile in matrix.tiles]
    most, widened = 0, 0
    for tile, matrix in heads:
        wide = tile.wide_compute and tile.weights != tile.wide_weights
        tokens = hidden // (matrix.columns * 4 if wide else matrix.row_bytes) + 1
        most = max(most, tile.parameters // matrix.columns * tokens)
        widened = max(widened, tile.wide_weights.nbytes if wide else 0)
    # The gradient of the hidden states adds up in fp32.
    return min(most if heads else LOGITS_AT_ONCE, LOGITS_AT_ONCE) * LOGIT_BYTES + 2 * hidden + widened


def measures(device: torch.device) -> bool:
    """Whether the device counts what is allocated on it."""
    return device.type == "cuda"


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device)


def cached(device: torch.device) -> int:
    """What torch holds of the device, in use or not."""
    return torch.cuda.memory_reserved(device)


def forget_peak(device: torch.device) -> None:
    """torch's measure of the device's peak begins anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device, run: Callable[[], object]) -> int:
    """Most bytes of device memory that are allocated while `run` runs."""
    forget_peak(device)
    run()
    return torch.cuda.max_memory_allocated(device)
