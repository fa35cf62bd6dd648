"""Graphics cards by name: memory, bf16 rate, bandwidth, PCIe, from the makers' papers; and machines made of one.

The bf16 rates are those of dense products summed in fp32, which is how training multiplies. GeForce cards do so at half
their tensor cores' rate, twice that of their fp32 units; workstation cards at the full one, four times it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from headrace.base.errors import OptionError
from headrace.spec.hardware import ComputeRates, DiskRates, HardwareProfile, LinkRates, MemoryRoom, UpdateRates

GA102 = "NVIDIA Ampere GA102 GPU architecture paper"
ADA = "NVIDIA Ada GPU architecture paper"
BLACKWELL = "NVIDIA RTX Blackwell GPU architecture paper"
SHEET = "NVIDIA data sheet of the card"

LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
"""Bytes a second of one PCIe lane in each direction, by generation."""
REACHED = {"link": 0.86, "both": 1.69, "matmul": 0.72, "attention": 0.34, "attention backward": 0.29, "memory": 0.87}
"""What a run reaches of these rates, as measured on an H200 with PCIe 5 (matmul: 0.67 there, more on smaller cards):
both directions in one direction's rate."""
USED = 400 << 20
"""Device memory that a desktop takes."""
RAM_RATE = 60e9
"""Bytes a second that updates move in two channels of DDR5, unless told."""
SYSTEM = 2 << 30
"""RAM that the system keeps."""


@dataclass(frozen=True)
class Card:
    """One graphics card."""

    name: str
    gigabytes: int
    tflops: float
    """Dense bf16 products."""
    bandwidth: float
    """GB/s of its memory."""
    pcie: tuple[int, int]
    """Generation and lanes."""
    source: str


CARDS = tuple(
    Card(*row)
    for row in (
        ("RTX 3050 8GB", 8, 18.2, 224, (4, 8), GA102), ("RTX 3060 12GB", 12, 25.5, 360, (4, 16), GA102),
        ("RTX 3060 Ti", 8, 32.4, 448, (4, 16), GA102), ("RTX 3070", 8, 40.6, 448, (4, 16), GA102),
        ("RTX 3070 Ti", 8, 43.5, 608, (4, 16), GA102), ("RTX 3080 10GB", 10, 59.5, 760, (4, 16), GA102),
        ("RTX 3080 12GB", 12, 61.3, 912, (4, 16), GA102), ("RTX 3080 Ti", 12, 68.2, 912, (4, 16), GA102),
        ("RTX 3090", 24, 71.0, 936, (4, 16), GA102), ("RTX 3090 Ti", 24, 80.0, 1008, (4, 16), GA102),
        ("RTX 4060", 8, 30.2, 272, (4, 8), ADA), ("RTX 4060 Ti 8GB", 8, 44.1, 288, (4, 8), ADA),
        ("RTX 4060 Ti 16GB", 16, 44.1, 288, (4, 8), ADA), ("RTX 4070", 12, 58.3, 504, (4, 16), ADA),
        ("RTX 4070 Super", 12, 71.0, 504, (4, 16), ADA), ("RTX 4070 Ti", 12, 80.2, 504, (4, 16), ADA),
        ("RTX 4070 Ti Super", 16, 88.2, 672, (4, 16), ADA), ("RTX 4080", 16, 97.5, 717, (4, 16), ADA),
        ("RTX 4080 Super", 16, 104.4, 736, (4, 16), ADA), ("RTX 4090", 24, 165.2, 1008, (4, 16), ADA),
        ("RTX 5060", 8, 38.4, 448, (5, 8), BLACKWELL), ("RTX 5060 Ti 8GB", 8, 47.4, 448, (5, 8), BLACKWELL),
        ("RTX 5060 Ti 16GB", 16, 47.4, 448, (5, 8), BLACKWELL), ("RTX 5070", 12, 61.7, 672, (5, 16), BLACKWELL),
        ("RTX 5070 Ti", 16, 87.9, 896, (5, 16), BLACKWELL), ("RTX 5080", 16, 112.6, 960, (5, 16), BLACKWELL),
        ("RTX 5090", 32, 209.5, 1792, (5, 16), BLACKWELL),
        ("RTX A2000 12GB", 12, 31.9, 288, (4, 16), SHEET), ("RTX A4000", 16, 76.7, 448, (4, 16), SHEET),
        ("RTX A4500", 20, 94.6, 640, (4, 16), SHEET), ("RTX A5000", 24, 111.1, 768, (4, 16), SHEET),
        ("RTX A5500", 24, 136.4, 768, (4, 16), SHEET), ("RTX A6000", 48, 154.8, 768, (4, 16), SHEET),
        ("RTX 4000 Ada", 20, 106.9, 360, (4, 16), SHEET), ("RTX 4500 Ada", 24, 158.5, 432, (4, 16), SHEET),
        ("RTX 5000 Ada", 32, 261.1, 576, (4, 16), SHEET), ("RTX 6000 Ada", 48, 364.2, 960, (4, 16), SHEET),
        ("RTX PRO 4000 Blackwell", 24, 147.3, 672, (5, 16), SHEET),
        ("RTX PRO 4500 Blackwell", 32, 210.9, 896, (5, 16), SHEET),
        ("RTX PRO 5000 Blackwell", 48, 258.0, 1344, (5, 16), SHEET),
        ("RTX PRO 6000 Blackwell", 96, 503.8, 1792, (5, 16), SHEET),
        ("A10", 24, 125.0, 600, (4, 16), SHEET), ("A40", 48, 149.7, 696, (4, 16), SHEET),
        ("L4", 24, 121.0, 300, (4, 16), SHEET), ("L40S", 48, 362.0, 864, (4, 16), SHEET),
        ("A100 40GB", 40, 312.0, 1555, (4, 16), SHEET), ("A100 80GB", 80, 312.0, 1935, (4, 16), SHEET),
        ("H100 PCIe", 80, 756.0, 2000, (5, 16), SHEET), ("H100 SXM", 80, 989.0, 3350, (5, 16), SHEET),
        ("H200", 141, 989.0, 4800, (5, 16), SHEET),
    )
)  # fmt: skip


def card_named(text: str) -> Card:
    """The card that `text` names, with or without its memory: "RTX 3080 10GB", "rtx3060", "4090 24GB". Raises
    OptionError with the nearest names."""
    wanted, size = _plain(_SIZE.sub("", text)), _SIZE.search(text)
    alike = [card for card in CARDS if _plain(_SIZE.sub("", card.name)) in (wanted, f"rtx{wanted}")]
    found = [card for card in alike if size is None or card.gigabytes == int(size[1])]
    if len(found) == 1:
        return found[0]
    what = "is made with several sizes of memory" if found else "is no card that is known"
    bare = {card: _plain(_SIZE.sub("", card.name)) for card in CARDS}
    matches = difflib.get_close_matches(wanted, dict.fromkeys(bare.values()), 3, 0.5)
    near = alike or [card for name in matches for card in CARDS if bare[card] == name] or CARDS[:4]
    raise OptionError(f"the card {text!r} {what}",
                      f"nearest: {', '.join(card.name for card in near)}; {len(CARDS)} are known",
                      "Name one of these; headrace plan --cards lists all")  # fmt: skip


def machine(
    card: Card, ram: int, disk: DiskRates | None = None, pcie: tuple[int, int] | None = None,
    ram_rate: float = RAM_RATE, threads: int = 8,
) -> HardwareProfile:  # fmt: skip
    """The profile that such a machine is expected to have. `ram`: bytes; `pcie`: generation and lanes of the slot, when
    it has fewer than the card; `ram_rate`: bytes a second that updates read and write."""
    generation, lanes = card.pcie if pcie is None else (min(card.pcie[0], pcie[0]), min(card.pcie[1], pcie[1]))
    way = LANE[generation] * lanes * REACHED["link"]
    link = LinkRates(way, way, min(way * REACHED["both"], ram_rate), way / 4, way / 4)
    host = ram_rate / 26  # bytes of one update, see plan/cost
    beside = link.both / 2
    updates = UpdateRates(
        host, max(host * 0.1, (ram_rate - beside) / 26), beside,
        min(way / 14, link.both / 26) * 0.8, host, card.bandwidth * 1e9 * REACHED["memory"] / 26 * 0.75,
    )  # fmt: skip
    rate, total = card.tflops * 1e12, card.gigabytes << 30
    compute = ComputeRates(
        rate * REACHED["matmul"], rate * REACHED["matmul"] / 4, rate * REACHED["attention"],
        rate * REACHED["attention backward"], card.bandwidth * 1e9 * REACHED["memory"],
    )  # fmt: skip
    room = MemoryRoom(total, total - USED, ram, max(0, ram - SYSTEM))
    return HardwareProfile(card.name, "cuda", link, updates, compute, room, disk, threads)


_SIZE = re.compile(r"[ -]*\b(\d+) ?gi?b\b", re.IGNORECASE)
"""The memory in a card's name."""


def _plain(text: str) -> str:
    text = re.sub(r"nvidia|geforce|blackwell|generation", "", text.lower())
    return re.sub(r"[^a-z0-9]", "", text)
