"""Memory that work takes, measured in a process of its own: no other test's, no holes, no rounding by the kernel."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import psutil
import pytest

from headrace.hardware.limits import peak_rss, reset_peak_rss

T = TypeVar("T")


def alone(function: Callable[..., T], *given: Any) -> T:
    """What `function`, of a module's top level, returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_count_what_is_used) as process:
        return process.submit(function, *given).result()


def growth(work: Callable[[], object]) -> int:
    """Bytes by which resident memory exceeds, at its peak during `work`, what it was before. Pages of files do not
    count: those are libraries', which the kernel takes back while they rest."""
    gc.collect()
    if not reset_peak_rss():
        pytest.skip("this kernel does not reset the peak")
    process = psutil.Process()
    before, files = peak_rss(), process.memory_info().shared
    work()
    return peak_rss() - before - max(0, process.memory_info().shared - files)


def _count_what_is_used() -> None:
    """glibc otherwise learns to keep temporaries of up to 32 MiB in its heap, between things that live, and the kernel
    may back what is touched by pages of 2 MiB."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    m_mmap_threshold, pr_set_thp_disable = -3, 41
    library.mallopt(m_mmap_threshold, 1 << 20)
    library.prctl(pr_set_thp_disable, 1, 0, 0, 0)
