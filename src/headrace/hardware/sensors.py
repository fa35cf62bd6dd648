"""Temperatures and power: of the GPU through NVML, of memory modules and disks through hwmon, where they exist.

Each source is asked again only after a while, since NVML takes up to milliseconds and a disk is asked over its own bus.
Nothing here waits for work on the GPU, and nothing that is missing is an error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headrace.hardware.used import handle_of

SYS = Path("/sys")
GPU_SECONDS, HWMON_SECONDS = 1.0, 5.0
"""Shortest time between two readings."""
DRIVERS = {"nvme": "SSD", "drivetemp": "SSD", "jc42": "RAM", "spd5118": "RAM"}
"""Drivers of hwmon, and what they measure."""


class Sensors:
    """Those that a run on `device` is told of. `sys_root`: where sysfs is; `clock`: seconds."""

    def __init__(self, device: torch.device, sys_root: Path = SYS, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._clock = device, clock
        self._nvml, self._card = _opened(device)
        self._files = dict(_inputs(sys_root))
        self._due = {"gpu": 0.0, "hwmon": 0.0}

    def read(self) -> dict[str, Any]:
        """`gpu_celsius`, `gpu_watts` and `celsius` by sensor: what is known and was not read a moment ago."""
        found: dict[str, Any] = {}
        if self._card is not None and self._is_due("gpu", GPU_SECONDS):
            celsius, watts = self.gpu_celsius(), self._ask(lambda nvml, card: nvml.nvmlDeviceGetPowerUsage(card) / 1000)
            known = {"gpu_celsius": celsius, "gpu_watts": watts}
            found.update({name: value for name, value in known.items() if value is not None})
        if self._files and self._is_due("hwmon", HWMON_SECONDS):
            read = {name: value for name, file in self._files.items() if (value := _celsius(file)) is not None}
            found.update({"celsius": read} if read else {})
        return found

    def gpu_celsius(self) -> float | None:
        """The GPU's temperature at this moment; None where NVML does not say."""
        return self._ask(lambda nvml, card: float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)))

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = self._card = None

    def _is_due(self, source: str, seconds: float) -> bool:
        now = self._clock()
        due = now >= self._due[source]
        if due:
            self._due[source] = now + seconds
        return due

    def _ask(self, question: Callable[[Any, Any], float]) -> float | None:
        if self._card is None:
            return None
        try:
            return question(self._nvml, self._card)
        except self._nvml.NVMLError:
            return None


def _opened(device: torch.device) -> tuple[Any, Any]:
    """(pynvml, its handle of the card), or twice None."""
    if device.type != "cuda":
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None
    with contextlib.suppress(pynvml.NVMLError):
        return pynvml, handle_of(pynvml, device)
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return None, None


def _inputs(sys_root: Path) -> Iterator[tuple[str, Path]]:
    """(name, file of the temperature) of each sensor of memory modules and disks."""
    for folder in sorted((sys_root / "class" / "hwmon").glob("hwmon*")):
        kind = DRIVERS.get(_text(folder / "name"))
        for file in sorted(folder.glob("temp*_input")) if kind is not None else ():
            label = _text(file.with_name(file.name.replace("_input", "_label")))
            yield f"{kind} {folder.name.removeprefix('hwmon')}{f' {label}' if label else ''}", file


def _celsius(file: Path) -> float | None:
    """hwmon counts in thousandths of a degree."""
    try:
        return int(_text(file)) / 1000
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
