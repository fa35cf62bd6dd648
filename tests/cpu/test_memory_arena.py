"""Arenas on the host: exact bytes, alignment, and page-locking that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from alone import alone, growth
from headrace.base.errors import StoreError
from headrace.store import memory
from headrace.store.memory import Arena, DeviceArena, HostArena, poison


@pytest.mark.parametrize("make", [HostArena, lambda nbytes: DeviceArena(nbytes, "cpu")])
def test_views_follow_each_other_and_end_with_the_arena(make: Callable[[int], Arena]) -> None:
    arena = make(3 * 4096 + 10)
    first, second = arena.take(1), arena.take(4097)
    assert arena.used == 4096 + 4097 and first.dtype == torch.uint8
    assert second.data_ptr() - first.data_ptr() == 4096 and first.data_ptr() % 4096 == 0
    third = arena.take(3, align=1)
    assert third.data_ptr() == second.data_ptr() + 4097
    with pytest.raises(StoreError, match=f"asked 11 bytes at {3 * 4096}, it has {3 * 4096 + 10}"):
        arena.take(11)
    assert arena.take(10).numel() == 10 and arena.take(0, align=1).numel() == 0
    assert not any(view.any() for view in (first, second, third))
    first.fill_(7)
    second.view(torch.uint8)[-1] = 9
    assert arena.buffer[0] == 7 and arena.buffer[1] == 0 and arena.empty.shape == (0,)


@pytest.mark.parametrize("pin", [False, True])
def test_zero_bytes_work(pin: bool) -> None:
    arena = HostArena(0, pin)
    assert arena.take(0).shape == (0,) and not arena.pinned and arena.note == ""
    arena.close()


def test_views_outlive_the_arena() -> None:
    arena = HostArena(5 << 20)
    view = arena.take(100).fill_(3)
    arena.close()
    arena.close()
    del arena
    gc.collect()
    assert view.eq(3).all()
    with pytest.raises(StoreError):
        HostArena(10).take(11)


def _taken(fills: int) -> int:
    def work() -> None:
        arena = HostArena(300 << 20)
        for _ in range(fills):
            arena.buffer.fill_(1)
            arena.close()
            arena = HostArena(300 << 20)

    return growth(work)


def test_memory_is_taken_when_touched_and_returned_at_the_end() -> None:
    assert alone(_taken, 0) < 10 << 20
    assert 290 << 20 < alone(_taken, 3) < 320 << 20


def test_a_size_beyond_the_address_space_is_an_error() -> None:
    with pytest.raises(StoreError, match=f"asked {10**17} bytes"):
        HostArena(10**17)


class FakeRuntime:
    """A CUDA runtime that locks at most `limit` bytes, and rejects nothing as Windows and WSL do."""

    def __init__(self, limit: int) -> None:
        self.limit, self.locked = limit, {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes == 0 or sum(self.locked.values()) + nbytes > self.limit:
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.locked.pop(address, None) else 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime(limit=5 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_exactly_the_asked_bytes_are_locked_once(runtime: FakeRuntime) -> None:
    arena = HostArena(3_000_001, pin=True)
    assert arena.buffer.untyped_storage().data_ptr() == arena.buffer.data_ptr()  # is_pinned() asks about the storage
    assert arena.pinned and arena.note == "" and runtime.locked == {arena.buffer.data_ptr(): 3_000_001}
    arena.close()
    arena.close()
    assert runtime.locked == {} and not arena.pinned
    arena = HostArena(3_000_001, pin=True)
    del arena
    gc.collect()
    assert runtime.locked == {}


def test_a_refused_lock_leaves_memory_a_note_and_no_error(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = []
    monkeypatch.setattr(memory, "_clear_cuda_error", lambda: cleared.append(True))
    arena = HostArena(6 << 20, pin=True)
    assert not arena.pinned and cleared == [True]
    assert "page-locking 6.0 MiB of host memory was refused" in arena.note and "GPU" not in arena.note
    arena.take(6 << 20).fill_(1)
    arena.close()


def test_pinning_without_a_gpu_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arena = HostArena(10, pin=True)
    assert not arena.pinned and "no CUDA device" in arena.note


def test_poison_is_nan_in_every_float() -> None:
    view = HostArena(64).take(64)
    poison(view)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        assert view.view(dtype).float().isnan().all()
