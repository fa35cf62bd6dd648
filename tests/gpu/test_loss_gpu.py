"""The tiled loss on a CUDA device: fp32 and bf16 against fp64, determinism, memory, no synchronisation per tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headrace.loss.linear_cross_entropy import linear_cross_entropy
from headrace.loss.tiled import HeadSpec, backward_tile, finish, forward_tile, open_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, bias (leaves) and labels with some ignored."""
    torch.manual_seed(0)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[::5] = -100
    shapes = ((tokens, hidden), (vocab, hidden), (vocab,))
    leaves = [(torch.randn(shape, device="cuda") * 0.1).to(dtype).requires_grad_() for shape in shapes]
    return leaves[0], leaves[1], leaves[2], labels


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-9)]
)
def test_loss_and_gradients_equal_fp64(dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
    hidden, weight, bias, labels = make(301, 64, 1003, dtype)
    loss = linear_cross_entropy(hidden, weight, labels, bias, softcap=softcap, tile_rows=128, chunk_rows=70)
    upstream = 256.0 if dtype == torch.float16 else 1.0  # stands for a GradScaler
    gradients = torch.autograd.grad(loss * upstream, (hidden, weight, bias))
    exact = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    logits = functional.linear(*exact)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    want = functional.cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - want.item()) < (1e-6 if dtype == torch.float32 else 1e-3)
    for got, expected in zip(gradients, torch.autograd.grad(want * upstream, exact), strict=True):
        assert got.dtype == dtype
        assert error(got, expected) < tolerance * (2 if softcap and dtype != torch.float32 else 1)


def test_two_deterministic_runs_agree_bit_for_bit() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        hidden, weight, bias, labels = make(1000, 64, 1003, torch.bfloat16)
        runs = []
        for _ in range(2):
            loss = linear_cross_entropy(
                hidden, weight, labels, bias, label_smoothing=0.1, softcap=3.0, tile_rows=100, chunk_rows=99
            )
            runs.append([loss, *torch.autograd.grad(loss, (hidden, weight, bias))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_tile_waits_for_the_device() -> None:
    hidden, weight, bias, labels = make(300, 64, 1003, torch.bfloat16)
    spec = HeadSpec(1003, softcap=3.0, scale=0.5, label_smoothing=0.1)
    rows = open_rows(hidden, labels, spec)
    grads = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in (hidden, weight, bias)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start in range(0, 1003, 128):
            forward_tile(rows, hidden, weight[start : start + 128], bias[start : start + 128], start, 64)
        losses = finish(rows)
        for start in range(0, 1003, 128):
            part = slice(start, start + 128)
            backward_tile(rows, hidden, weight[part], bias[part], start, torch.ones_like(losses), grads[0],
                          grads[1][part], grads[2][part], 64)  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(grad.isfinite().all() and grad.count_nonzero() > 0 for grad in grads)


def test_memory_is_a_tile_not_the_logits() -> None:
    """8192 tokens x 128 000 ids are 4.2 GB of fp32 logits."""
    hidden, weight, bias, labels = make(8192, 1024, 128_000, torch.bfloat16)
    linear_cross_entropy(hidden[:64], weight, labels[:64], bias).backward()  # cuBLAS workspace
    hidden.grad = weight.grad = bias.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, bias)
    assert torch.cuda.memory_allocated() - before < 2**20
    loss.backward()
    extra = torch.cuda.max_memory_allocated() - before
    gradients = weight.nbytes + hidden.nbytes + bias.nbytes
    assert extra < gradients + 448 * 2**20, f"{extra / 2**20:.0f} MiB"
    reference = torch.cuda.max_memory_allocated()
    functional.cross_entropy(functional.linear(hidden, weight, bias).float(), labels).backward()
    assert torch.cuda.max_memory_allocated() > 3 * reference
