"""Ways to train a model, each as the units that it makes of the model: all weights, or adapters on frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.plan.subject import Subject
from headrace.schedule.build import ROWS
from headrace.spec.layout import Entry, place
from headrace.spec.model import BLOCK, REST, ModelSpec, StateSpec, Unit
from headrace.spec.precision import PrecisionMap

RANK = 16
"""Of adapters."""
EXPERTS = ("gate", "router", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")
"""Last names of what belongs to experts; given one of these, peft adapts the stacks of all experts too."""
LOW_RANK = 128
"""Of the gradients' projections that a low-rank optimizer keeps moments of (https://arxiv.org/abs/2403.03507)."""


@dataclass(frozen=True)
class Mode:
    """One way to train."""

    name: str
    title: str
    ready: bool
    """Headrace trains so today; the others are planned, and told as such."""
    subject: Callable[[Subject], Subject]
    """From the model with all weights trained."""
    extra: Callable[[Subject], int] = lambda subject: 0
    """Bytes of state in host memory that are no region of a unit."""
    moments: str = "float32"
    adapters: bool = False
    packed: bool = False
    """On a base whose matrices are compressed."""


def full(subject: Subject, moments: str = "float32") -> Subject:
    """All weights, by AdamW with exact masters."""
    state = StateSpec(("exp_avg", "exp_avg_sq"), moments)
    units = tuple(replace(unit, state=state) for unit in subject.spec.units)
    return replace(subject, spec=replace(subject.spec, units=units)).on_windows()


def low_rank(subject: Subject) -> Subject:
    """All weights, with masters; what is kept of moments is counted by `low_rank_bytes`."""
    units = tuple(replace(unit, state=StateSpec(())) for unit in subject.spec.units)
    return replace(subject, spec=replace(subject.spec, units=units)).on_windows()


def low_rank_bytes(subject: Subject) -> int:
    """Moments and projections in fp32: of matrices at LOW_RANK, of all others as AdamW has them."""
    total = 0
    for _, _, entry in subject.spec.pieces():
        small, large = (min(entry.shape), max(entry.shape)) if len(entry.shape) == 2 else (0, 0)
        total += 4 * (LOW_RANK * (2 * large + small) if small > LOW_RANK else 2 * entry.numel)
    return total


def adapters(subject: Subject, codec: str | None = None) -> Subject:
    """LoRA on every matrix of the blocks, or on those of `lora_targets`, in fp32 on the device; all else is frozen,
    blocks with `codec`, if any."""
    targets = lora_targets(subject)
    precision = None if codec is None else PrecisionMap(codec)
    blocks, added, units = subject.blocks, list[Entry](), list[Unit]()
    for unit in subject.spec.units:
        entries = [replace(entry, trainable=False) for entry in unit.weights.entries]
        if unit.kind == BLOCK:
            position = blocks.index(unit)
            if precision is not None:
                entries = [_packed(entry, precision, position, len(blocks)) for entry in entries]
            for entry in entries:
                if len(entry.shape) == 2 and (targets is None or _layer(entry) in targets):
                    out, columns = entry.shape
                    added += [
                        Entry(f"{entry.name}.lora_A", (RANK, columns), "float32", True),
                        Entry(f"{entry.name}.lora_B", (out, RANK), "float32", True),
                    ]
        units.append(replace(unit, weights=place(entries), wide_grads=unit.kind == REST, in_files=unit.kind != REST))
    rest = next((unit for unit in units if unit.kind == REST), None)
    if rest is None:
        rest = Unit(len(units), "rest", REST, place([]), subject.spec.units[0].state, wide_grads=True)
        units.append(rest)
    units[rest.index] = replace(rest, weights=place([*rest.weights.entries, *added]), state_stays=True)
    visits = tuple(replace(visit, grad=False) if visit.kind == ROWS else visit for visit in subject.visits)
    return replace(subject, spec=ModelSpec(tuple(units), subject.spec.matrices), visits=visits)


def lora_targets(subject: Subject) -> tuple[str, ...] | None:
    """Last names of the layers that get adapters; None: all. Of blocks with stacks of experts those beside the experts:
    adapters of each expert would be many, and peft has them for some families only."""
    entries = [entry for unit in subject.blocks for entry in unit.weights.entries]
    if not any(len(entry.shape) == 3 for entry in entries):
        return None
    layers = [_layer(entry) for entry in entries if len(entry.shape) == 2 and entry.name.endswith(".weight")]
    return tuple(dict.fromkeys(name for name in layers if name not in EXPERTS))


def _layer(entry: Entry) -> str:
    """Last name of the layer that has the entry."""
    return entry.name.split(".")[-2]


def _packed(entry: Entry, precision: PrecisionMap, position: int, blocks: int) -> Entry:
    if len(entry.shape) not in (2, 3):
        return entry
    return replace(entry, codec=precision.codec_of(entry.name, entry.numel, position, blocks))


MODES = (
    Mode("full", "full, AdamW", True, full),
    Mode("full-bf16-moments", "full, bf16 moments", True, lambda s: full(s, "bfloat16"), moments="bfloat16"),
    Mode("full-8bit", "full, 8-bit moments", False, lambda s: full(s, "int8"), moments="int8"),
    Mode("low-rank", f"full, low-rank {LOW_RANK}", False, low_rank, low_rank_bytes),
    Mode("lora", f"LoRA r={RANK}, bf16 base", True, adapters, adapters=True),
    Mode("qlora", f"QLoRA r={RANK}, nf4 base", True, lambda s: adapters(s, "nf4"), adapters=True, packed=True),
)
