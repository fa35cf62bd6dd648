"""What this process may use: host memory under its cgroups, disk space, device memory; and its own peak.

Swap is never counted: training state that is swapped out comes back page by page. Address space limits (ulimit -v) are
ignored: CUDA reserves far more addresses than memory. Some virtual machines start small and grow while memory is
touched, so these numbers are a floor there, and options of the user come first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.files.space import free_bytes

if TYPE_CHECKING:
    import torch

PROC, SYS = Path("/proc"), Path("/sys")
_V1_LIMITS: tuple[str, ...] = ("memory.limit_in_bytes",)
_V2_LIMITS: tuple[str, ...] = (
    "memory.max",
    "memory.high",
)  # beyond memory.high a process is slowed down until it crawls


@dataclass(frozen=True)
class HostMemory:
    """Bytes of RAM."""

    total: int
    """RAM of the machine."""
    available: int
    """What this process may still allocate: free or reclaimable, in the machine and in each of its cgroups."""
    cgroup_limit: int | None
    """The smallest limit of its cgroups, or None."""
    limit: int
    """What this process could have at most: the smaller of `total` and `cgroup_limit`."""


class DeviceMemory(NamedTuple):
    """Bytes of memory on one device."""

    total: int
    free: int


def host_memory(proc: Path = PROC, sys_root: Path = SYS) -> HostMemory:
    """Read /proc/meminfo and all memory cgroups (v1 and v2) above this process."""
    total, available = _machine_memory(proc)
    limits: list[int] = []
    for limit, used in _cgroups(proc, sys_root):
        limits.append(limit)
        available = min(available, max(0, limit - used))
    cgroup_limit = min((limit for limit in limits if limit < total), default=None)
    return HostMemory(total, available, cgroup_limit, min(total, cgroup_limit or total))


def disk_free(folder: str | os.PathLike[str]) -> int:
    """Bytes that may still be written in `folder`, or in its nearest ancestor that exists. Quotas are not seen."""
    return free_bytes(folder)


def file_system(folder: str | os.PathLike[str], proc: Path = PROC) -> str:
    """Type of the file system that holds `folder`, such as "ext4", or "tmpfs", which is RAM; "" if unknown."""
    place = os.path.realpath(folder)
    best, kind = "", ""
    for line in _lines(proc / "self" / "mountinfo"):
        head, _, tail = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), head.split()[4])  # a blank is written \040
        if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
            best, kind = point, tail.split()[0]
    return kind


def give_back_heap() -> None:
    """Return to the system what the heap holds and nobody uses: where glibc allocates, it keeps freed blocks of up to
    32 MiB between those in use, after a model was read or encoded hundreds of MiB."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def peak_rss(proc: Path = PROC) -> int:
    """Largest resident memory of this process so far, in bytes.

    VmHWM, where it is known: `getrusage` starts with the size of the process that forked this one.
    """
    for line in _lines(proc / "self" / "status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_rss(proc: Path = PROC) -> bool:
    """Make `peak_rss` start again from now; False where the kernel does not allow it."""
    try:
        (proc / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def device_memory(index: int = 0) -> DeviceMemory:
    """Total and free memory of a CUDA device, as the driver reports them (other processes included), or what the share
    of it leaves that `torch.cuda.set_per_process_memory_fraction` allows."""
    import torch

    free, total = torch.cuda.mem_get_info(index)
    share = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return DeviceMemory(min(total, share), max(0, min(free, share - torch.cuda.memory_reserved(index))))


def processor(proc: Path = PROC) -> str:
    """Name of the CPU."""
    for line in _lines(proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def computes_bf16(device: torch.device) -> bool:
    """Whether `device` has bf16 arithmetic of its own. CPUs have it, if only slowly."""
    import torch

    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _machine_memory(proc: Path) -> tuple[int, int]:
    fields = {}
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    if "MemTotal" in fields and "MemAvailable" in fields:
        return fields["MemTotal"], fields["MemAvailable"]
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _cgroups(proc: Path, sys_root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each memory cgroup of this process that has a limit, from its own upwards."""
    base = sys_root / "fs" / "cgroup"
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names, usage, cache = base / "memory", _V1_LIMITS, "memory.usage_in_bytes", "total_inactive_file"
        elif number == "0" and not controllers:
            unified = base / "unified"
            root = unified if unified.is_dir() else base
            names, usage, cache = _V2_LIMITS, "memory.current", "inactive_file"
        else:
            continue
        # In a container the path may be the host's, which is not there: its root then is the container's own group.
        parts = [part for part in path.split("/") if part not in ("", "..", ".")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            limits = [value for name in names if (value := _number(group / name)) is not None]
            if limits:
                yield min(limits), max(0, (_number(group / usage) or 0) - _field(group / "memory.stat", cache))


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", for no file, and for the v1 way of saying no limit."""
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _field(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name]), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
