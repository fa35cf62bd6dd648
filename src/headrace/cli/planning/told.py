"""The plan as text: one table of ways to train, the commands, and why the chosen one is as it is."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.base.units import format_bytes, format_count
from headrace.cli.planning.flags import first_command, tiers_in_words
from headrace.plan.cards import CARDS
from headrace.plan.modes import Mode
from headrace.plan.outlook import CHECKPOINTS, DAY, Asked, Outlook, Upgrade
from headrace.plan.place import Budgets
from headrace.plan.subject import Subject
from headrace.plan.summary import summary
from headrace.spec.hardware import HardwareProfile
from headrace.spec.placement import DEVICE, DISK, HOST

LANES = {
    "compute": "compute", "host": "updates on the host", "device": "updates on the device", "h2d": "copies up",
    "d2h": "copies down", "read": "reading weights", "state": "reading state", "write": "writing to disk",
    "caller": "launching",
}  # fmt: skip
TIERS = {DEVICE: "device memory", HOST: "host memory", DISK: "disk"}
YEAR = 365


def table(
    base: Subject, profile: HardwareProfile, budgets: Budgets, asked: Asked, found: Sequence[Outlook], endurance: int,
    stored: str | None = None,
) -> str:  # fmt: skip
    """What is planned for, and one line for each way. `stored`: how its weights are compressed already, if they are."""
    room = f"{format_bytes(budgets.host)} of RAM"
    if budgets.device is not None:
        own = format_bytes(budgets.device)
        room = f"{room}, {own} of it to compute in" if profile.shared else f"{own} of its memory, {room}"
    flag = "--disk-dir" if profile.measured else "--disk"
    disk = f"no disk ({flag} names one)" if budgets.disk is None else f"{format_bytes(budgets.disk)} of disk"
    source = "measured" if profile.measured else "from data sheets"
    heads = ("way", "fits", "context", "rows", "s/step", "tokens/day", "bound by", "weights", "device", "RAM", "disk",
             "saved", "written/day", "endures")  # fmt: skip
    rows = [heads, *(_row(each, endurance, budgets.disk, not profile.shared) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        f"{base.name}, {format_count(base.spec.parameters)} parameters, on {profile.device} ({source}): {room}, "
        f"{disk}",
        f"rows of {asked.sequence} tokens" + (f", {asked.micro_batches} micro-batches a step" if asked.micro_batches > 1
                                              else "") + f"; blocks {_compiled(asked)}", "",
    ]  # fmt: skip
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", f"saved: {CHECKPOINTS} checkpoints of the exact state and the trained model, in the run's folder; "
              f"endures: a disk rated for {format_bytes(endurance)} of writes"]  # fmt: skip
    if not all(each.mode.ready for each in found):
        lines.append("(planned): not trained by Headrace yet; what it would take, to compare with")
    if stored is not None:
        lines.append(f"its weights are quantised already ({stored}): adapters are trained on them as they are; what "
                     "is told of nf4 stands for them")  # fmt: skip
    if profile.shared:
        lines.append("device: the part of the RAM that is computed in, which --device-memory bounds; RAM counts it too")
    return "\n".join(lines)


def _compiled(asked: Asked) -> str:
    """How blocks run, and how else they could."""
    return "compiled" if asked.compiled else "not compiled, as `headrace train` runs them unless told (--compile)"


def _row(each: Outlook, endurance: int, disk: int | None, gpu: bool) -> tuple[str, ...]:
    title = each.mode.title + ("" if each.mode.ready else " (planned)")
    choice = each.choice
    if choice is None:
        longest = f"{each.max_context:,}" if each.max_context else "-"
        unknown = ["-"] * 8
        return (title, f"{lacking(each)} short", longest, *unknown, format_bytes(each.saved_bytes), "-", "-")
    work = choice.work
    rows = str(work.rows) if work.slice_rows == work.rows else f"{work.rows} by {work.slice_rows}"
    written = each.written_per_day
    fits = "yes" if each.clips else "without clipping"
    if disk is not None and each.disk_bytes > disk:
        fits += ", no room for checkpoints"
    return (
        title, fits, f"{each.max_context:,}", rows,
        f"{choice.step.seconds:.2f}", f"{each.tokens_per_day / 1e6:,.1f} M", LANES[choice.step.limiting],
        tiers_in_words(each, gpu), format_bytes(choice.peaks.device_bytes), format_bytes(choice.peaks.host_bytes),
        format_bytes(choice.peaks.disk_bytes) if choice.peaks.disk_bytes else "-", format_bytes(each.saved_bytes),
        format_bytes(written) if written else "-", _endures(endurance, written),
    )  # fmt: skip


def lacking(each: Outlook) -> str:
    """What does not fit, as in "1.5 GiB of host memory and 2.0 GiB of disk"."""
    return " and ".join(f"{format_bytes(size)} of {TIERS[tier]}" for tier, size in each.lacks.items())


def _endures(endurance: int, written: float) -> str:
    """How long a disk is rated to bear what a run writes."""
    if not written:
        return "-"
    days = endurance / written
    return f"{days / YEAR:.1f} years" if days >= YEAR else f"{days:.0f} days"


def commands(found: Sequence[Outlook], flags: Sequence[str], model: str, packed: str) -> str:
    """How each way is run that Headrace trains today. `packed`: the model with its matrices in four bits."""
    lines = []
    for each, words in zip(found, flags, strict=True):
        if words:
            first = first_command(each, model, packed)
            lines += ["", f"{each.mode.title}:", *([f"  {first}"] if first else []), f"  headrace train {words}"]
    return "\n".join(lines or ["", "Nothing of this fits that Headrace trains today; --why tells what would help."])


def instead(smaller: tuple[str, Mode] | None, asked: Asked) -> str:
    """What fits where the model does not in any way."""
    if smaller is None:
        return f"No shape that is known fits in any way with rows of {asked.sequence} tokens."
    name, mode = smaller
    return f"The largest shape that fits instead is {name}: {mode.title}."


def why(shown: Outlook, profile: HardwareProfile, budgets: Budgets, better: Upgrade | None) -> str:
    """The chosen way with its numbers, and the cheapest upgrade."""
    lines = ["", f"Why {shown.mode.title}:"]
    choice = shown.choice
    if choice is None:
        lines.append(f"  it lacks least of what Headrace trains: {lacking(shown)}")
    else:
        step, peaks = choice.step, choice.peaks
        lines += [f"  {summary(choice.subject.spec, choice.placement)}", "  memory:"]
        tiers = (("device", peaks.device, budgets.device), ("RAM", peaks.host, budgets.host),
                 ("disk", peaks.disk, budgets.disk))  # fmt: skip
        for tier, parts, room in tiers:
            if sum(parts.values()):
                of = "" if room is None else f" of {format_bytes(room)}"
                told = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
                lines.append(f"    {tier}: {format_bytes(sum(parts.values()))}{of} ({told})")
        lines.append(f"  a step takes {step.seconds:.3g} s, of which lanes work:")
        for lane, seconds in sorted(step.busy.items(), key=lambda item: -item[1]):
            moved = f", {step.moved[lane] / 1e9:.3g} GB" if step.moved.get(lane) else ""
            lines.append(f"    {LANES[lane]}: {seconds:.3g} s, {seconds / step.seconds:.0%}{moved}")
        way = sorted(step.critical.items(), key=lambda item: -item[1])
        lines.append("  its end waits for " + ", ".join(f"{LANES[lane]} {seconds:.3g} s" for lane, seconds in way
                                                         if seconds >= 0.01 * step.seconds))  # fmt: skip
        lines.append(f"  {shown.tokens_per_day / DAY:,.0f} tokens a second")
    if better is None:
        lines.append("  no single upgrade would make it " + ("a fifth faster" if choice is not None else "fit"))
    elif better.outlook.choice is not None:
        then = better.outlook.choice
        gain = "then it fits" if not better.gain else f"{better.gain:.2f} times as fast"
        lines.append(f"  the cheapest upgrade that would help: {better.what}; {gain}, {then.step.seconds:.3g} s a step "
                     f"of {then.work.tokens} tokens, bound by {LANES[then.step.limiting]}")  # fmt: skip
    return "\n".join(lines)


def cards_told() -> str:
    """All cards, one a line."""
    lines = [f"{'card':<24}{'memory':>8}{'bf16':>14}{'bandwidth':>12}  {'PCIe':<6}source"]
    for card in CARDS:
        slot = f"{card.pcie[0]}x{card.pcie[1]}"
        lines.append(f"{card.name:<24}{card.gigabytes:>5} GB{card.tflops:>7.1f} TFLOP/s{card.bandwidth:>7.0f} GB/s  "
                     f"{slot:<6}{card.source}")  # fmt: skip
    return "\n".join(lines)
