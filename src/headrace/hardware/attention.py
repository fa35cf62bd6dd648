"""How fast torch's attention kernels are at one shape, each alone: those that run it, and that repeat their bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.hardware.rates import seconds_of

NAMES = ("cudnn", "flash", "efficient", "math")
_MEMBERS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


@dataclass(frozen=True)
class Shape:
    """Causal attention of some rows of tokens."""

    rows: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.tokens} tokens, {self.heads} heads of {self.head_dim}"


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
    runs: it takes the memory of all products of tokens.
    """

    def drawn(heads: int) -> Tensor:
        size = (shape.rows, heads, shape.tokens, shape.head_dim)
        return torch.randn(size, generator=draw, device=device, dtype=dtype).requires_grad_()

    draw = torch.Generator(device).manual_seed(0)
    inputs = (drawn(shape.heads), drawn(shape.kv_heads), drawn(shape.kv_heads))
    grad = torch.randn(inputs[0].shape, generator=draw, device=device, dtype=dtype)
    grouped = shape.heads != shape.kv_heads

    def both() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=grouped)
        return torch.autograd.grad(out, inputs, grad)

    seconds: dict[str, float] = {}
    left: dict[str, str] = {}
    for name in NAMES:
        if name == "math" and seconds:
            left[name] = "another kernel runs"
            continue
        try:
            with preferring((name,)):
                if repeatable and not _repeats(both):
                    left[name] = "its gradients differ from run to run"
                    continue
                seconds[name] = seconds_of(both, device)
        except RuntimeError as error:  # it cannot, or there is no memory for it
            left[name] = " ".join(str(error).split()[:12])
    if seconds:
        seconds[""] = seconds_of(both, device)
    return seconds, left


def _repeats(run: Callable[[], tuple[Tensor, ...]]) -> bool:
    first = run()
    return all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(), strict=True))
