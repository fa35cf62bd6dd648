"""Rates of a machine that nobody has measured: those of its card's data sheet, or of a usual processor."""

from __future__ import annotations

import difflib
from dataclasses import replace

from headrace.base.errors import OptionError
from headrace.plan.cards import CARDS, Card, card_named, machine
from headrace.spec.hardware import ComputeRates, DiskRates, HardwareProfile, LinkRates, MemoryRoom, UpdateRates

DISK_READ, DISK_WRITE = 2e9, 1.5e9
"""Bytes a second of a usual SSD."""
CORE_FLOPS, CORE_UPDATES = 30e9, 0.9e9
"""Of one CPU: fp32 FLOPs of matrix products, and weights updated, until the memory is what limits them."""
RAM_UPDATES, RAM_COPIES = 4e9, 20e9
"""Weights updated, and bytes copied, at the rate of the memory."""


def typical(
    name: str, kind: str, memory: MemoryRoom, threads: int, folder: str = "", disk_free: int = 0
) -> HardwareProfile:
    """The profile that this machine is expected to have. `name`: of the GPU as torch tells it, or of the processor;
    `kind`: "cuda" or "cpu"; `memory`: what is free; `folder`: on the disk, with `disk_free` bytes."""
    disk = DiskRates(folder, "", DISK_READ, DISK_WRITE, DISK_READ, disk_free, direct=False)
    if kind == "cuda":
        card = card_like(name, memory.device_total)
        return replace(machine(card, memory.host_total, disk, threads=threads), device=name, memory=memory)
    copies = min(RAM_COPIES, threads * RAM_COPIES / 4)
    updates, flops = min(RAM_UPDATES, threads * CORE_UPDATES), threads * CORE_FLOPS
    return HardwareProfile(
        name, "cpu", LinkRates(copies, copies, copies), UpdateRates(updates),
        ComputeRates(flops, flops, flops / 2, flops / 2, copies), memory, disk, threads,
    )  # fmt: skip


def card_like(name: str, nbytes: int) -> Card:
    """The card of this name and memory, or the slowest of those whose memory is nearest."""
    gigabytes = nbytes / 2**30
    try:
        return card_named(name)
    except OptionError:
        words = name.lower().replace("nvidia", "").replace("geforce", "").split()
        alike = [card for card in CARDS if card.name.lower().split()[: len(words)] == words]
        near = difflib.get_close_matches(" ".join(words), [card.name.lower() for card in CARDS], 1, 0.8)
        alike = alike or [card for card in CARDS if card.name.lower() in near] or list(CARDS)
        return min(alike, key=lambda card: (abs(card.gigabytes - gigabytes), card.tflops))
