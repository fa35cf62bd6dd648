"""Where a session computes, and how much memory and disk it may use."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.files.space import disk_error
from headrace.hardware import limits
from headrace.plan.place import Budgets
from headrace.session.options import Headroom, Options


def device_of(options: Options) -> torch.device:
    """The device that the options name, or the GPU if there is one. Raises OptionError for one that is not there."""
    if options.device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise OptionError("device is unknown", f"got {options.device!r}", 'Use "cuda", "cuda:1" or "cpu"') from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError("device is not supported", f"got {options.device!r}", 'Use "cuda" or "cpu"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError("device is a GPU", "torch sees none", "Use device='cpu', or install a torch built for CUDA")
    if device.type == "cpu":
        return device
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise OptionError("device is beyond the GPUs", f"got {options.device!r}, torch sees {count}",
                          "Use one of " + ", ".join(f"cuda:{i}" for i in range(count)))  # fmt: skip
    return torch.device("cuda", index)


def budgets_of(options: Options, device: torch.device) -> Budgets:
    """Bytes that the options allow; without a word of theirs, what is free less the headroom."""
    headroom = Headroom.of(options.headroom)
    if options.device_memory is not None:
        device_bytes: int | None = parse_bytes(options.device_memory, "device_memory")
    else:
        device_bytes = headroom.left(limits.device_memory(device.index or 0).free) if device.type == "cuda" else None
    if options.host_memory is not None:
        host = parse_bytes(options.host_memory, "host_memory")
    else:
        host = headroom.left(limits.host_memory().available)
    disk = None
    if options.disk_dir is not None:
        folder = Path(options.disk_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            disk = limits.disk_free(folder)
        except OSError as error:
            raise disk_error(error, "use disk_dir", folder) from error
    return Budgets(device_bytes, host, disk, shared=device.type == "cpu")
