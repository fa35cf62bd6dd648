"""The machine that is planned for: this one, measured, or one described by its card, RAM, disk and slot."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from headrace.base.errors import OptionError
from headrace.base.units import parse_bytes
from headrace.cli.config_file import ConfigError
from headrace.plan.cards import RAM_RATE, card_named, machine
from headrace.spec.hardware import DiskRates, HardwareProfile

if TYPE_CHECKING:
    from headrace.cli.plan import Request

Value = TypeVar("Value")
DISK_SIZE = 10**12
"""Free bytes of a disk whose size is not told."""
LEAST_RAM = 1 << 20
"""Bytes below which a size has lost its unit."""
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_DISK = re.compile(rf"(?P<read>{_NUMBER})(?:/(?P<write>{_NUMBER}))?\s*GB/s(?:,(?P<size>.+))?", re.IGNORECASE)
_SLOT = re.compile(r"(?:gen)?\s*([345])(?:\.0)?\s*x\s*(1|2|4|8|16)", re.IGNORECASE)


def machine_of(request: Request, progress: Callable[[str, int, int], None]) -> HardwareProfile:
    """Measured, or as the flags describe it. Raises ConfigError with all mistakes in them, OptionError for a card that
    is not known."""
    problems: list[str] = []
    ram = _read(problems, "--ram", request.ram, _ram)
    rate = _read(problems, "--ram-rate", request.ram_rate, _rate)
    slot = _read(problems, "--pcie", request.pcie, _slot)
    disk = _read(problems, "--disk", request.disk, _disk)
    if request.gpu is None:
        for name, value in (("--ram", request.ram), ("--ram-rate", request.ram_rate), ("--pcie", request.pcie)):
            if value is not None:
                problems.append(f"{name} describes another machine: name its card with --gpu")
    else:
        if request.ram is None:
            problems.append("--gpu describes another machine: say how much memory it has, as in --ram 64GB")
        if request.disk_dir is not None and request.disk is None:
            problems.append("--gpu describes another machine: say how fast its disk is, as in --disk 7GB/s")
    if problems:
        raise ConfigError(problems)
    if request.gpu is not None:
        assert ram is not None
        return machine(card_named(request.gpu), ram, disk, slot, rate or RAM_RATE)
    from headrace.hardware.profile import profile_hardware

    found = profile_hardware(folder=request.disk_dir, progress=progress)
    return found if disk is None else found.with_disk(disk)


def _read(problems: list[str], name: str, text: str | None, parse: Callable[[str], Value]) -> Value | None:
    if text is None:
        return None
    try:
        return parse(text)
    except (OptionError, ValueError) as error:
        reason = error.advice if isinstance(error, OptionError) else str(error)
        problems.append(f"{name} = {text!r}: {reason}")
        return None


def _ram(text: str) -> int:
    size = parse_bytes(text, "--ram")
    if size < LEAST_RAM:
        raise ValueError(f"that is {size} bytes; use a unit, as in 64GB")
    return size


def _rate(text: str) -> float:
    match = re.fullmatch(rf"({_NUMBER})\s*GB/s", text.strip(), re.IGNORECASE)
    if match is None or not float(match[1]) > 0:
        raise ValueError("use GB/s, as in 60GB/s")
    return float(match[1]) * 1e9


def _slot(text: str) -> tuple[int, int]:
    match = _SLOT.fullmatch(text.strip())
    if match is None:
        raise ValueError("use generation and lanes, as in 4x16")
    return int(match[1]), int(match[2])


def _disk(text: str) -> DiskRates:
    match = _DISK.fullmatch(text.strip())
    if match is None or not (float(match["read"]) > 0 and float(match["write"] or 1) > 0):
        raise ValueError(
            "use its rate, as in 7GB/s, or 7/5GB/s to read and to write, with its free space as in 7GB/s,2TB"
        )
    read, write = float(match["read"]) * 1e9, float(match["write"] or match["read"]) * 1e9
    size = DISK_SIZE if match["size"] is None else parse_bytes(match["size"], "--disk")
    return DiskRates("DISK", "", read, write, max(read, write), size)
