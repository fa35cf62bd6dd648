"""Memory in use on a GPU as NVML says it: what torch does not know of (CUDA's own, other libraries') counts there."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch


def device_used(device: torch.device) -> tuple[int | None, int | None]:
    """Bytes of device memory that (this process, the whole card) uses; None where NVML does not say.

    Inside a container NVML may not know this process by its number; the card's figure then is all there is.
    """
    if device.type != "cuda":
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    with contextlib.ExitStack() as stack:
        try:
            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
            handle = _handle(pynvml, device)
            card = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError:
            return None, None
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except pynvml.NVMLError:
            return None, card
        own = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
        return (int(own[0]) if own and own[0] else None), card


def _handle(pynvml: Any, device: torch.device) -> Any:
    """By the card's own identity: CUDA_VISIBLE_DEVICES gives it another number than NVML has."""
    properties = torch.cuda.get_device_properties(device)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
