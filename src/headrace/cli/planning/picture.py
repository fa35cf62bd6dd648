"""The plan as a picture: memory per tier, and the lanes of one step; an SVG file without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from headrace.base.units import format_bytes
from headrace.cli.planning.told import lacking
from headrace.plan.choice import Choice
from headrace.plan.outlook import Outlook
from headrace.plan.place import Budgets
from headrace.schedule.op import LANES, VERBS
from headrace.spec.hardware import HardwareProfile

WIDTH, LEFT, ROW, BAR = 960, 110, 30, 20
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#bab0ac",
           "#d37295", "#2f5d8a", "#8cd17d", "#a0522d", "#5b5ea6", "#c7b42e", "#499894")  # fmt: skip
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.note{fill:#666}.room{fill:none;stroke:#888;stroke-dasharray:4 3}"
    ".ground{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}.note{fill:#999}.ground{fill:#1b1b1b}}"
)
SHORTEST = 0.4
"""Pixels below which a span is not drawn."""


def picture(
    name: str, profile: HardwareProfile, budgets: Budgets, shown: Outlook | None, found: Sequence[Outlook]
) -> str:
    """`shown`: the way whose memory and step are drawn; None when nothing fits: then what is lacking."""
    parts: list[str] = []
    if shown is None or shown.choice is None:
        title, height = f"{name} on {profile.device}: nothing fits", 70 + ROW * len(found)
        for number, each in enumerate(found):
            parts.append(_text(20, 70 + ROW * number, f"{each.mode.title}: {lacking(each)} short"))
    else:
        title = f"{name} on {profile.device}: {shown.mode.title}, {shown.choice.step.seconds:.3g} s a step"
        memory, below = _memory(shown.choice, budgets, 70)
        lanes, height = _lanes(shown.choice, below + 20)
        parts = [*memory, *lanes]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    body = [f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>', _text(20, 30, title), *parts]  # fmt: skip
    return "\n".join([head, *body, "</svg>", ""])


def _memory(choice: Choice, budgets: Budgets, top: int) -> tuple[list[str], int]:
    """Bars of each tier, what they are made of, and the room that there is."""
    tiers = [("device", choice.peaks.device, budgets.device), ("RAM", choice.peaks.host, budgets.host),
             ("disk", choice.peaks.disk, None)]  # fmt: skip
    names = list(dict.fromkeys(part for _, parts, _ in tiers for part, size in parts.items() if size))
    colours = {part: COLOURS[number % len(COLOURS)] for number, part in enumerate(names)}
    out, y = [_text(20, top, "memory", "note")], top + 12
    for tier, parts, room in tiers:
        total = sum(parts.values())
        if not total:
            continue
        scale = (WIDTH - LEFT - 150) / max(total, room or 0)
        out.append(_text(20, y + 15, tier))
        x = float(LEFT)
        for part, size in parts.items():
            if size:
                out.append(_rect(x, y, size * scale, colours[part], f"{part}: {format_bytes(size)}"))
                x += size * scale
        if room:
            out.append(f'<rect class="room" x="{LEFT}" y="{y}" width="{room * scale:.1f}" height="{BAR}"/>')
        of = f" of {format_bytes(room)}" if room else ""
        out.append(_text(WIDTH - 145, y + 15, f"{format_bytes(total)}{of}"))
        y += ROW
    x = LEFT
    for part in names:
        width = 30 + 8 * len(part)
        if x + width > WIDTH:
            x, y = LEFT, y + ROW
        out += [_rect(x, y, 12, colours[part], part, 12), _text(x + 17, y + 11, part, "note")]
        x += width
    return out, y + ROW


def _lanes(choice: Choice, top: int) -> tuple[list[str], int]:
    """What each lane does from the end of one step to the end of the next."""
    step = choice.step
    scale = (WIDTH - LEFT - 20) / step.seconds
    out = [_text(20, top, f"one step, {step.seconds:.3g} s from end to end", "note")]
    rows = [lane for lane in LANES if step.busy.get(lane)]
    for number, lane in enumerate(rows):
        y = top + 12 + ROW * number
        out.append(_text(20, y + 15, lane))
        for ran in step.timeline.ops:
            start, end = max(ran.start, step.since), min(ran.end, step.since + step.seconds)
            if ran.lane != lane or ran.op is None or (end - start) * scale < SHORTEST:
                continue
            colour = COLOURS[VERBS.index(ran.op.verb) % len(COLOURS)]
            what = f"{ran.op.verb} u{ran.op.unit}, {(ran.end - ran.start) * 1e3:.3g} ms"
            out.append(_rect(LEFT + (start - step.since) * scale, y, (end - start) * scale, colour, what))
    return out, top + 24 + ROW * len(rows)


def _rect(x: float, y: float, width: float, colour: str, told: str, height: int = BAR) -> str:
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, SHORTEST):.1f}" height="{height}" fill="{colour}">'
            f"<title>{escape(told)}</title></rect>")  # fmt: skip


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}"{f" class={kind!r}" if kind else ""}>{escape(text)}</text>'
