"""The outlook of each way to train a model on one machine: whether it fits, how long rows may be, how fast it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.base.units import format_bytes
from headrace.plan.choice import Choice, Wanted
from headrace.plan.memory import Peaks
from headrace.plan.modes import MODES, Mode
from headrace.plan.place import Budgets
from headrace.plan.search import BATCHES, Search
from headrace.plan.shapes import SHAPES, subject_of
from headrace.plan.subject import Subject, Work
from headrace.plan.typical import DISK_READ, DISK_WRITE
from headrace.spec.hardware import DiskRates, HardwareProfile
from headrace.spec.placement import DEVICE, DISK, HOST

DAY = 86400
CHECKPOINTS = 2
"""Checkpoints that `headrace train` keeps."""
CONTEXT = 131072
"""Tokens of the longest row that is looked for, where a model does not say its own."""
DEVICE_SHARE, HOST_SHARE = 0.95, 0.9
"""Of the memory that is free: what a run may take."""


@dataclass(frozen=True)
class Asked:
    """What is to be trained."""

    sequence: int = 1024
    rows: int | None = None
    """Of a micro-batch; None: the best."""
    micro_batches: int = 1
    compiled: bool = False


@dataclass(frozen=True)
class Outlook:
    """One way to train."""

    mode: Mode
    subject: Subject
    choice: Choice | None
    """The fastest that fits; None when nothing does."""
    lacks: Mapping[str, int]
    """Bytes by tier that the machine, or what may be used of it, needs more of; {} where it fits."""
    max_context: int
    clips: bool
    """False where only updates inside the backward fit, which know no norm."""

    @property
    def fits(self) -> bool:
        return self.choice is not None

    @property
    def shortfall(self) -> int:
        return sum(self.lacks.values())

    @property
    def tokens_per_day(self) -> float:
        return self.choice.tokens_per_second * DAY if self.choice else 0.0

    @property
    def saved_bytes(self) -> int:
        """Of its checkpoints, and the model that it leaves."""
        units = self.subject.spec.units
        trained = sum(unit.trained_bytes for unit in units)
        state = sum(unit.state_bytes for unit in units if unit.trained.entries)
        return CHECKPOINTS * (trained + state) + trained

    @property
    def disk_bytes(self) -> int:
        """Of all that, and of what the run itself keeps on the disk."""
        return self.saved_bytes + (self.choice.peaks.disk_bytes if self.choice else 0)

    @property
    def written_per_day(self) -> float:
        """Bytes that steps write to the disk."""
        if self.choice is None:
            return 0.0
        return self.choice.step.moved.get("write", 0) / self.choice.step.seconds * DAY


def budgets_of(profile: HardwareProfile, device: int | None = None, host: int | None = None) -> Budgets:
    """What a run may take on this machine, at most `device` and `host` bytes."""
    memory = profile.memory
    room = int(memory.host_available * HOST_SHARE)
    card = None if profile.shared else int(memory.device_free * DEVICE_SHARE)
    if device is not None:
        card = device if card is None else min(card, device)
    return Budgets(card, room if host is None else min(room, host), profile.disk.free if profile.disk else None,
                   profile.shared)  # fmt: skip


def outlook(mode: Mode, base: Subject, profile: HardwareProfile, budgets: Budgets, asked: Asked) -> Outlook:
    """Of one way to train `base`, a model with all weights trained."""
    subject = mode.subject(base)
    search = Search(subject, profile, budgets, Wanted(compiled=asked.compiled, extra_host=mode.extra(base)))
    ways = (True, False) if subject.trained > subject.spec.parameters // 2 else (True,)  # unclipped, they pass a ring
    limit = min(base.positions or CONTEXT, CONTEXT)
    for clips in ways:
        choice = _best(search, asked, clips)
        if choice is not None:
            longest = max(search.longest(limit, clips=clips), asked.sequence)
            return Outlook(mode, subject, _with_extra(choice, mode.extra(base)), {}, longest, clips)
    work = Work(asked.rows or 1, asked.sequence, asked.micro_batches)
    short = min((search.shortfall(replace(work, clips=each)) for each in ways), key=lambda lacks: sum(lacks.values()))
    longest = max(search.longest(limit, clips=each) for each in ways)
    return Outlook(mode, subject, None, _needed(short, profile, budgets), longest, True)


def _with_extra(choice: Choice, nbytes: int) -> Choice:
    """With the state in host memory that is no region of a unit."""
    if not nbytes:
        return choice
    found = choice.peaks
    return replace(choice, peaks=Peaks(found.device, {**found.host, "moments": nbytes}, found.disk))


def _needed(short: Mapping[str, int], profile: HardwareProfile, budgets: Budgets) -> dict[str, int]:
    """Bytes by tier of which a machine needs more to lack nothing: a run takes a share of its memory only."""
    memory, found = profile.memory, dict(short)
    shares = {HOST: (budgets.host, memory.host_available, HOST_SHARE)}
    if budgets.device is not None and not profile.shared:
        shares[DEVICE] = (budgets.device, memory.device_free, DEVICE_SHARE)
    for tier, (budget, free, share) in shares.items():
        if tier in short:  # a byte more, for what rounding takes
            found[tier] = max(short[tier], math.ceil((budget + short[tier]) / share) + 1 - free)
    return found


def outlooks(
    base: Subject, profile: HardwareProfile, budgets: Budgets, asked: Asked, modes: Sequence[Mode] = MODES
) -> list[Outlook]:
    """Of each way to train."""
    return [outlook(mode, base, profile, budgets, asked) for mode in modes]


def chosen(found: Sequence[Outlook]) -> Outlook | None:
    """The first that fits and that Headrace trains today: all weights before adapters, wide moments before narrow."""
    return next((each for each in found if each.fits and each.mode.ready), None)


def largest(
    base: Subject, profile: HardwareProfile, budgets: Budgets, asked: Asked, modes: Sequence[Mode] = MODES
) -> tuple[str, Mode] | None:
    """The largest shape below `base` that Headrace trains on this machine in some way, and the first such way."""
    smaller = [subject_of(name, shape) for name, shape in SHAPES.items() if shape.like]
    smaller = [model for model in smaller if model.spec.parameters < base.spec.parameters]
    work = Work(asked.rows or 1, asked.sequence, asked.micro_batches)
    for model in sorted(smaller, key=lambda model: -model.spec.parameters):
        for mode in modes:
            wanted = Wanted(compiled=asked.compiled, extra_host=mode.extra(model))
            if mode.ready and Search(mode.subject(model), profile, budgets, wanted).fits(work):
                return model.name, mode
    return None


@dataclass(frozen=True)
class Upgrade:
    """One thing more for the machine, and what it would change."""

    what: str
    outlook: Outlook
    gain: float
    """Times as fast; 0.0 where it makes the difference between fitting and not."""


USUAL_DISK = DiskRates("", "", DISK_READ, DISK_WRITE, DISK_READ, 2 * 10**12)
FASTER = 1.2
"""What an upgrade has to give to be named."""


def upgrades(
    mode: Mode, base: Subject, profile: HardwareProfile, asked: Asked, now: Outlook, device: int | None = None,
    host: int | None = None,
) -> Upgrade | None:  # fmt: skip
    """The cheapest that helps: a disk where none is used, then more RAM, then a larger and a faster disk, then a wider
    link, then a card with more memory. A run takes at most `device` and `host` bytes of it all the same."""
    memory, link = profile.memory, profile.link
    more = replace(memory, host_total=2 * memory.host_total, host_available=memory.host_available + memory.host_total)
    listed = [(f"twice the RAM ({2 * memory.host_total / 1e9:.0f} GB)", replace(profile, memory=more))]
    disk = profile.disk
    if disk is None:
        listed.insert(0, (f"a disk that it may use (reads {USUAL_DISK.read / 1e9:.3g} GB/s, "
                          f"{USUAL_DISK.free / 1e12:.3g} TB free)", profile.with_disk(USUAL_DISK)))  # fmt: skip
    else:
        large = replace(disk, free=2 * disk.free)
        listed.append((f"twice the room on the disk ({format_bytes(large.free)})", profile.with_disk(large)))
        fast = replace(disk, read=2 * disk.read, write=2 * disk.write, both=2 * disk.both)
        listed.append((f"a disk of twice the speed (reads {fast.read / 1e9:.3g} GB/s)", profile.with_disk(fast)))
    if not profile.shared:
        wide = replace(link, up=2 * link.up, down=2 * link.down, both=2 * link.both)
        listed.append(("twice the PCIe lanes, or the next generation", replace(profile, link=wide)))
        room = replace(
            memory, device_total=2 * memory.device_total, device_free=memory.device_free + memory.device_total
        )
        listed.append((f"a card with twice the memory ({2 * memory.device_total / 2**30:.0f} GiB)",
                       replace(profile, memory=room)))  # fmt: skip
    for what, better in listed:
        then = outlook(mode, base, better, budgets_of(better, device, host), asked)
        if then.choice is None:
            continue
        if now.choice is None:
            return Upgrade(what, then, 0.0)
        gain = then.choice.tokens_per_second / now.choice.tokens_per_second
        if gain >= FASTER:
            return Upgrade(what, then, gain)
    return None


def _best(search: Search, asked: Asked, clips: bool) -> Choice | None:
    if asked.rows is not None:
        return search.best(Work(asked.rows, asked.sequence, asked.micro_batches, clips=clips))
    return search.best_rows(asked.sequence, clips, BATCHES, asked.micro_batches)


def on_disk(found: Outlook) -> bool:
    """Weights or state of the chosen placement live on a disk."""
    return found.choice is not None and DISK in (*found.choice.placement.weights, *found.choice.placement.state)
