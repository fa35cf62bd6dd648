"""What runs on GPUs took, as benchmarks/ has it, and the profile of the machine they ran on; for tests of plans."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan.simulate import Speeds, Uses, fair
from headrace.plan.subject import Work
from headrace.spec.hardware import Calibration, ComputeRates, HardwareProfile, LinkRates, MemoryRoom, UpdateRates

GIB = 1 << 30
H200 = HardwareProfile(
    "NVIDIA H200", "cuda", LinkRates(54.5e9, 54.5e9, 92e9, 6e9, 6e9),
    UpdateRates(3743e6, 3010e6, 85e9, 3070e6, 5400e6, 123e9),
    ComputeRates(664e12, 50e12, 340e12, 285e12, 4.2e12),
    MemoryRoom(140 * GIB, 139 * GIB, 128 * GIB, 120 * GIB), None, 16, "", "2.11.0",
    calibration=Calibration(host_rows=3.0),  # an embedding's rows had whole copies in RAM then
)  # fmt: skip
"""Rates as `headrace bench` measured them on 2026-11-30; those of attention follow from compute alone, 473 TFLOP/s."""


@dataclass(frozen=True)
class Run:
    """One work of the 4 B shape, weights and state in host memory, after commit 457582d and before a36c3e9."""

    work: Work
    seconds: float
    device: float | None
    """GiB by the driver; None where the session before had left some."""
    host: float


RUNS = (
    Run(Work(8, 1024, clips=True), 1.302, 4.1, 58.2),
    Run(Work(8, 1024, clips=False), 1.153, None, 52.9),
    Run(Work(32, 1024, at_once=8, clips=True), 2.634, 5.9, 63.2),
    Run(Work(32, 1024, at_once=8, clips=True, guesses=True), 2.576, 5.8, 63.3),
    Run(Work(8, 1024, 16, clips=True), 8.389, 10.1, 81.3),
)


def copies_wait(capacities: dict[str, float]) -> Speeds:
    """Who gets what of the link until a36c3e9: a copy engine served the pieces of device updates until none was left,
    and copies of blocks waited."""
    plain = fair(capacities)

    def crosses(uses: Uses) -> bool:
        return any(name in ("up", "down") for name, _ in uses)

    def speeds(running: tuple[tuple[str, Uses], ...]) -> tuple[float, ...]:
        if not any(lane == "device" and crosses(uses) for lane, uses in running):
            return plain(running)
        kept = [i for i, (lane, uses) in enumerate(running) if lane == "device" or not crosses(uses)]
        found = [1e-9] * len(running)
        for index, speed in zip(kept, plain(tuple(running[i] for i in kept)), strict=True):
            found[index] = speed
        return tuple(found)

    return speeds
