"""How fast this machine copies, multiplies and attends, measured with given tensors and at given shapes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(target, source) of copies, made in this order."""
SHORTEST = 0.05
"""Seconds that a measurement takes at least, by doing its work again and again."""
LEAST_BYTES = 1 << 26
"""Bytes that a rate of copies is measured with at least."""
ROUNDS = 3
"""Measurements, of which the quickest counts: others are slower by what else the machine did."""


def settle(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device, warm_up: int = 1) -> float:
    """Seconds that `run` takes, work on the device included: the quickest of several measurements."""
    for _ in range(warm_up):
        run()
    settle(device)
    best, times = float("inf"), 1
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(times):
            run()
        settle(device)
        taken = time.perf_counter() - start
        best = min(best, taken / times)
        times = max(1, min(1000, int(SHORTEST / max(best, 1e-6))))
    return best


def nbytes(pairs: Pairs) -> int:
    return sum(target.nbytes for target, _ in pairs)


def copy_rate(ways: Sequence[Pairs], device: torch.device) -> float:
    """Bytes a second in all while each of `ways` copies on a thread (and stream) of its own, all at the same time."""
    times = max(1, LEAST_BYTES // max(1, *map(nbytes, ways)))
    total = sum(map(nbytes, ways)) * times
    best = float("inf")
    with futures.ThreadPoolExecutor(len(ways)) as pool:
        for _ in range(ROUNDS):
            settle(device)
            start = time.perf_counter()
            for way in [pool.submit(_copy, list(pairs) * times, device) for pairs in ways]:
                way.result()
            best = min(best, time.perf_counter() - start)
    return total / best


def balanced(first: Pairs, second: Pairs) -> tuple[Pairs, Pairs]:
    """Both with about as many bytes as the larger: the other begins again."""
    if nbytes(first) < nbytes(second):
        return balanced(second, first)[::-1]
    return first, list(second) * max(1, round(nbytes(first) / max(nbytes(second), 1)))


@contextlib.contextmanager
def traffic(ways: Sequence[Pairs], device: torch.device) -> Iterator[Callable[[], int]]:
    """Each of `ways` copies again and again while inside; gives a function that says how many bytes were copied."""
    stop, copied = threading.Event(), [0] * len(ways)

    def work(number: int) -> None:
        while not stop.is_set():
            copied[number] += _copy(ways[number], device, stop)

    with futures.ThreadPoolExecutor(len(ways)) as pool:
        running = [pool.submit(work, number) for number, pairs in enumerate(ways) if pairs]
        try:
            yield lambda: sum(copied)
        finally:
            stop.set()
        for way in running:
            way.result()


def _copy(pairs: Pairs, device: torch.device, stop: threading.Event | None = None) -> int:
    """Copy, and wait for each copy where `stop` may end them early. Returns the bytes."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    done = 0
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            done += target.nbytes
            if stop is not None:
                if stream is not None:
                    stream.synchronize()
                if stop.is_set():
                    break
    if stream is not None:
        stream.synchronize()
    return done


def linear_seconds(
    rows: int, features_in: int, features_out: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of a linear layer's (forward, backward) on x (rows, features_in): one matmul, and two for dx and dw."""
    x = torch.randn(rows, features_in, device=device, dtype=dtype)
    weight = torch.randn(features_out, features_in, device=device, dtype=dtype)
    grad = torch.randn(rows, features_out, device=device, dtype=dtype)
    forward = seconds_of(lambda: x @ weight.t(), device)
    return forward, seconds_of(lambda: grad @ weight, device) + seconds_of(lambda: grad.t() @ x, device)


def attention_seconds(
    rows: int, heads: int, kv_heads: int, sequence: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of causal attention's (forward, backward): torch's own, on `rows` rows of `sequence` tokens."""

    def drawn(count: int) -> Tensor:
        return torch.randn(rows, count, sequence, head_dim, device=device, dtype=dtype, requires_grad=True)

    query, key, value = drawn(heads), drawn(kv_heads), drawn(kv_heads)
    grad = torch.randn(rows, heads, sequence, head_dim, device=device, dtype=dtype)

    def forward() -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)

    with torch.no_grad():
        alone = seconds_of(forward, device)
    both = seconds_of(lambda: torch.autograd.grad(forward(), (query, key, value), grad), device)
    return alone, max(both - alone, 0.0)
