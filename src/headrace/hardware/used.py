"""What NVML says of a GPU: driver, clocks, and memory in use, with what torch does not know of (CUDA's, for one)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Clocks:
    """How fast a GPU runs, and what it draws."""

    sm: float
    """MHz of its multiprocessors."""
    sm_most: float
    watts: float
    watts_most: float
    """Its power limit: a GPU that reaches it lowers its clocks."""


def device_used(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes of device memory that (this process, the whole card) uses; None where NVML does not say.

    Inside a container NVML may not know this process by its number; the card's figure then is all there is.
    """
    card = _ask(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
    running = _ask(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    own = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
    return (int(own[0]) if own and own[0] else None), card


def clocks(device: torch.device) -> Clocks | None:
    """Those of this moment; None where NVML does not say."""
    return _ask(
        device,
        lambda nvml, handle: Clocks(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        ),
    )


def driver_version(device: torch.device) -> str:
    """Of the GPU's driver; "" on the CPU and where NVML does not say."""
    return str(_ask(device, lambda nvml, handle: nvml.nvmlSystemGetDriverVersion()) or "")


def _ask(device: torch.device, question: Callable[[Any, Any], Answer]) -> Answer | None:
    """The answer to `question(pynvml, its handle of the card)`; None where there is none."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError), contextlib.ExitStack() as stack:
        pynvml.nvmlInit()
        stack.callback(pynvml.nvmlShutdown)
        return question(pynvml, handle_of(pynvml, device))
    return None


def handle_of(pynvml: Any, device: torch.device) -> Any:
    """NVML's handle of a GPU, by its own identity: CUDA_VISIBLE_DEVICES gives it another number than NVML has."""
    properties = torch.cuda.get_device_properties(device)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
