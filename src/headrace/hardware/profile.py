"""The profile of this machine: measured in under a minute, kept in a cache until device, driver or torch change.

What cannot be measured here is left out (no GPU: the device is the CPU; no folder: no disk). Each disk folder is
measured for itself, the rest once. Ctrl-C ends it between two measurements, and nothing is kept then.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from headrace.base.errors import FormatError, StoreError
from headrace.files.atomic import write_file
from headrace.hardware import limits, measure
from headrace.hardware.used import driver_version
from headrace.kernels.threads import available_threads
from headrace.spec.hardware import Calibration, HardwareProfile, MemoryRoom

Told = Callable[[str, int, int], None]
"""Told what is measured next, how many measurements are done, and how many there are."""
CACHE = "HEADRACE_CACHE_DIR"
CPU_BASE = 550 << 20
"""RAM of Python and torch where no GPU is driven."""
TOUCHED = 1 << 30
"""Bytes that are touched to see whether the machine's memory grows."""


def profile_hardware(
    device: str | torch.device | None = None, folder: str | os.PathLike[str] | None = None, refresh: bool = False,
    progress: Told | None = None,
) -> HardwareProfile:  # fmt: skip
    """What this machine does in a second, and what memory is free on it.

    `device`: "cuda", "cuda:1" or "cpu"; the GPU if there is one. `folder`: on the disk that a run would use; None
    measures none. Rates come from the cache when they are there, for this device, driver and torch, unless `refresh`;
    free memory is always read anew. Raises StoreError when the folder cannot be written.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path, alone = cache_path(chosen, folder), cache_path(chosen, None)
    known = None if refresh else _kept(path)
    if known is None:
        without = None if refresh or folder is None else _kept(alone)
        known = _measured(chosen, folder, progress or (lambda what, done, count: None), without)
        _keep(path, known)
        if without is None:
            _keep(alone, known.with_disk(None))
    return _with_room(known, chosen, folder)


def known_profile(device: torch.device, folder: str | os.PathLike[str] | None = None) -> HardwareProfile | None:
    """What `profile_hardware` has measured before; None where it has not. Nothing is measured now."""
    known = _kept(cache_path(device, folder))
    return None if known is None else _with_room(known, device, folder)


def cache_path(device: torch.device, folder: str | os.PathLike[str] | None) -> Path:
    """Where the profile of this device, driver, torch and disk folder is kept."""
    base = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "headrace")
    parts = (_name(device), driver_version(device), torch.__version__, platform.node(), available_threads(),
             "" if folder is None else os.path.realpath(folder))  # fmt: skip
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]
    return base / "profiles" / f"{re.sub(r'[^A-Za-z0-9]+', '-', _name(device)).strip('-').lower()}-{digest}.json"


def _keep(path: Path, found: HardwareProfile) -> None:
    with suppress(OSError, StoreError):  # a cache that cannot be written costs the next call a minute
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(found.to_json(), indent=1))


def _kept(path: Path) -> HardwareProfile | None:
    try:
        return HardwareProfile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, FormatError, TypeError):
        return None


def _measured(
    device: torch.device, folder: str | os.PathLike[str] | None, told: Told, known: HardwareProfile | None = None
) -> HardwareProfile:
    """`known`: the same without a disk, so that all profiles of a machine agree on the rest."""
    count = (folder is not None) + 4 * (known is None)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if known is None:
        told("link", 0, count)
        link = measure.link(device)
        told("updates", 1, count)
        updates = measure.updates(device)
        told("matrix products and attention", 2, count)
        compute = measure.compute(device)
        told("memory", 3, count)
        known = HardwareProfile(
            _name(device), device.type, link, updates, compute, MemoryRoom(0, 0, 0, 0, grows=memory_grows()), None,
            available_threads(), driver_version(device), torch.__version__, now, calibration_of(device),
        )  # fmt: skip
    if folder is None:
        return known
    told("disk", count - 1, count)
    return known.with_disk(measure.disk(folder))


def calibration_of(device: torch.device) -> Calibration:
    """The constants of predictions, which are not measured."""
    return Calibration() if device.type == "cuda" else Calibration(host_base_bytes=CPU_BASE)


def _with_room(
    profile: HardwareProfile, device: torch.device, folder: str | os.PathLike[str] | None
) -> HardwareProfile:
    """The profile with the memory and the disk space that are free now."""
    host = limits.host_memory()
    if device.type == "cuda":
        card = limits.device_memory(device.index or 0)
        room = MemoryRoom(card.total, card.free, host.total, host.available, host.cgroup_limit, profile.memory.grows)
    else:
        room = MemoryRoom(host.limit, host.available, host.total, host.available, host.cgroup_limit,
                          profile.memory.grows)  # fmt: skip
    disk = profile.disk
    if disk is not None and folder is not None:
        disk = replace(disk, free=limits.disk_free(folder))
    return replace(profile, memory=room, disk=disk)


def memory_grows(nbytes: int = TOUCHED) -> bool:
    """Whether the machine's total memory is larger once some of it was touched, as some virtual machines have it."""
    before = limits.host_memory()
    if before.available < 4 * nbytes:
        return False
    held = torch.empty(nbytes, dtype=torch.uint8)
    held[::4096] = 1
    return limits.host_memory().total > before.total + (16 << 20)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else limits.processor()
