"""How fast torch's attention kernels are at one shape, each alone: those that run it, and that repeat their bits."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.base.units import plural
from headrace.hardware.rates import settle

NAMES = ("cudnn", "flash", "efficient", "math")
_MEMBERS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


LARGEST = 64 << 20
"""Bytes of the queries that are drawn to measure with: more rows than these take say nothing else."""
TIMES = 5
DIFFERS = "its gradients differ from run to run"
"""Why a kernel is left out under deterministic algorithms, also one that was asked for by name."""


@dataclass(frozen=True)
class Shape:
    """Causal attention of some rows of tokens."""

    rows: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int

    def __str__(self) -> str:
        rows, heads = plural(self.rows, "row"), plural(self.heads, "head")
        return f"{rows} of {plural(self.tokens, 'token')}, {heads} of {self.head_dim}"


@contextlib.contextmanager
def preferring(names: tuple[str, ...]) -> Iterator[None]:
    """Inside, scaled_dot_product_attention takes the first of these kernels that can compute what it is given."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([getattr(SDPBackend, _MEMBERS[name]) for name in names], set_priority=True):
        yield


def attention_kernels(
    shape: Shape, dtype: torch.dtype, device: torch.device, repeatable: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds of forward and backward by kernel, why others are left out); "" names torch's own choice.

    `repeatable`: only kernels whose gradients have the same bits each time. The plain one is measured where no other
    runs: it takes the memory of all products of tokens. Of many rows some are measured, and the seconds are theirs.
    """
    row = shape.heads * shape.tokens * shape.head_dim * dtype.itemsize
    rows = max(1, min(shape.rows, LARGEST // row))

    def drawn(heads: int) -> Tensor:
        size = (rows, heads, shape.tokens, shape.head_dim)
        return torch.randn(size, generator=draw, device=device, dtype=dtype).requires_grad_()

    draw = torch.Generator(device).manual_seed(0)
    inputs = (drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads))
    grad = torch.randn(inputs[0].shape, generator=draw, device=device, dtype=dtype)
    grouped = shape.heads != shape.kv_heads

    def both() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)
        return torch.autograd.grad(out, inputs, grad)

    with _unwarned():
        seconds, left = _measured(both, device, repeatable)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds, left


def _measured(
    both: Callable[[], tuple[Tensor, ...]], device: torch.device, repeatable: bool
) -> tuple[dict[str, float], dict[str, str]]:
    seconds: dict[str, float] = {}
    left: dict[str, str] = {}
    for name in NAMES:
        if name == "math" and seconds:
            left[name] = "another kernel runs"
            continue
        try:
            with preferring((name,)):
                if repeatable and not _repeats(both):
                    left[name] = DIFFERS
                    continue
                seconds[name] = _seconds(both, device)
        except RuntimeError as error:  # it cannot, or there is no memory for it
            left[name] = " ".join(str(error).split()[:12])
    if seconds:
        seconds[""] = _seconds(both, device)
    return seconds, left


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """torch warns of kernels that cannot compute what they are given, and of gradients that differ from run to run; the
    measurement says both. Only what is warned of from here is silent, so that other threads are heard."""
    with warnings.catch_warnings():
        for module in (__name__, "torch.autograd"):
            warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(module))
        yield


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The quickest of some runs, one at a time: what several under way hold of the device's memory is never free."""
    run()
    best = float("inf")
    for _ in range(TIMES):
        settle(device)
        start = time.perf_counter()
        run()
        settle(device)
        best = min(best, time.perf_counter() - start)
    return best


def _repeats(run: Callable[[], tuple[Tensor, ...]]) -> bool:
    first = run()
    return all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(), strict=True))
