"""How many CPUs this process may use, and how many of them the host kernels take."""

from __future__ import annotations

import os
import threading
from pathlib import Path

running = threading.RLock()
"""Held by the thread that runs a kernel on the CPU."""

_chosen: int | None = None
_allowed: int | None = None  # measured once: reading the control group at every kernel call would cost more than some


def available_threads() -> int:
    """CPUs this process may use: its affinity mask, cut to the CPU quota of its control group (at least 1).

    OMP_NUM_THREADS is not asked: container images set it to 1 for other reasons.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity masks on macOS and Windows
        allowed = os.cpu_count() or 1
    quota = control_group_cpus(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    # A fraction of a CPU is dropped: a thread too many is throttled and then all wait for it.
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def set_threads(count: int | None) -> int:
    """Let host kernels use `count` threads (None: `available_threads()`); returns the number kept (1 or more)."""
    global _allowed, _chosen
    _allowed = None
    _chosen = None if count is None else max(1, int(count))
    return threads()


def threads() -> int:
    """Threads that host kernels ask for; a backend may have a smaller pool."""
    global _allowed
    if _chosen is not None:
        return _chosen
    if _allowed is None:
        _allowed = available_threads()
    return _allowed


def control_group_cpus(membership: Path, mount: Path) -> float | None:
    """The smallest CPU quota on the way from this process's control group to the root; None when there is none.

    `membership` is /proc/self/cgroup, `mount` is /sys/fs/cgroup; versions 1 and 2 are read.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            for folder in _up_to_root(root, path):
                quotas.append(_quota_v2(folder) if controllers == "" else _quota_v1(folder))
    known = [quota for quota in quotas if quota is not None]
    return min(known) if known else None


def _up_to_root(root: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
