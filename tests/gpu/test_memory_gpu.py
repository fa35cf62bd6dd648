"""Page-locked host memory and device arenas on a CUDA device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from headrace.base.errors import StoreError
from headrace.hardware.limits import device_memory
from headrace.store import memory
from headrace.store.memory import DeviceArena, HostArena


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_exact_bytes_are_locked_and_returned() -> None:
    """Layers of 129.5 MB must not cost 256 MB each, nor anything after they are gone."""
    torch.zeros(1, device="cuda")
    nbytes = 129_500_001
    HostArena(nbytes, pin=True).close()
    start = resident()
    arenas = [HostArena(nbytes, pin=True) for _ in range(4)]
    assert all(arena.pinned and arena.take(nbytes).is_pinned() for arena in arenas)
    assert abs(resident() - start - 4 * nbytes) < 0.02 * 4 * nbytes + (8 << 20)
    arenas.clear()
    for _ in range(100):
        arena = HostArena(nbytes // 10, pin=True)
        assert arena.pinned
        arena.close()
    assert resident() - start < 16 << 20


def test_copies_from_a_view_are_asynchronous_and_right() -> None:
    host = HostArena(64 << 20, pin=True)
    view = host.take(32 << 20).random_(0, 256)
    device = DeviceArena(32 << 20, "cuda").take(32 << 20)
    torch.cuda._sleep(400_000_000)
    start = time.perf_counter()
    device.copy_(view, non_blocking=True)
    assert time.perf_counter() - start < 0.05
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), view)


def test_a_refused_lock_does_not_poison_later_calls() -> None:
    host = HostArena(1 << 20, pin=True)
    note = memory.page_lock(host.buffer.data_ptr(), 1 << 20)  # locking twice is refused
    assert "was refused (CUDA error" in note
    value = torch.ones(1000, device="cuda") * 2
    torch.cuda.synchronize()
    assert value.sum().item() == 2000


def test_a_device_arena_too_large_names_free_and_asked() -> None:
    total, free = device_memory(0)
    assert 0 < free <= total
    with pytest.raises(StoreError, match=f"asked {2 * total} bytes"):
        DeviceArena(2 * total, "cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3
