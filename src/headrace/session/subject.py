"""What is planned for: the model of a session, as it is divided into units, and what this machine does in a second."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headrace.base.events import EventLog
from headrace.hardware import limits
from headrace.hardware.profile import known_profile
from headrace.kernels.threads import available_threads
from headrace.model.configured import text_config, told
from headrace.model.units import Anatomy
from headrace.plan.place import Budgets
from headrace.plan.subject import Attention, Subject
from headrace.plan.typical import typical
from headrace.schedule.build import ROWS, Visit
from headrace.session.options import Options
from headrace.spec.hardware import HardwareProfile, MemoryRoom
from headrace.spec.model import BLOCK, TILE, ModelSpec


def subject_of(model: nn.Module, anatomy: Anatomy, spec: ModelSpec | None = None) -> Subject:
    """The model as it is divided and stored. What its configuration does not tell is read from its weights."""
    spec = spec or anatomy.spec
    whole: Any = getattr(model, "config", None)
    config = text_config(whole)
    return Subject(
        type(model).__name__, spec, tuple(predicted(anatomy)), _hidden(config, spec), attention_of(config),
        active_of(config), _dtype(spec), getattr(config, "max_position_embeddings", None),
        "float32" if torch.float32 in _embedded(anatomy) else None,
    )  # fmt: skip


def _embedded(anatomy: Anatomy) -> set[torch.dtype]:
    """What embeddings give, which is what the blocks pass on."""
    return {anatomy.parameters[anatomy.spec.matrices[matrix].name].dtype for matrix, _ in anatomy.embeddings}


def predicted(anatomy: Anatomy) -> list[Visit]:
    """What a first forward is expected to visit: embeddings, blocks in the order of the stacks, the head's tiles."""
    visits = [Visit(matrix, ROWS) for matrix, _ in anatomy.embeddings]
    visits += [Visit(unit, BLOCK) for unit in anatomy.order]
    visits += [Visit(tile, TILE) for matrix, _ in anatomy.heads for tile in anatomy.spec.matrices[matrix].tiles]
    return visits


def attention_of(config: Any, hidden: int | None = None) -> Attention | None:
    """Causal attention on states of `hidden` features; None where the configuration does not tell its heads. Where keys
    and values differ in size: their mean, as both products take as long."""
    config = text_config(config)
    heads, hidden = told(config, "num_attention_heads"), hidden or told(config, "hidden_size")
    if not isinstance(heads, int) or heads < 1 or not isinstance(hidden, int):
        return None
    head_dim = told(config, "head_dim") or hidden // heads
    if told(config, "kv_lora_rank"):  # latent attention: `head_dim` is that of the rotated part alone
        parts = [told(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        head_dim = sum(part or 0 for part in parts) // 2 or head_dim
    return Attention(heads, told(config, "num_key_value_heads") or heads, head_dim)


def active_of(config: Any) -> float:
    """Share of the experts that a token meets."""
    chosen = told(config, "num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = told(config, name)
        if isinstance(count, int) and isinstance(chosen, int) and count > 0:
            return min(1.0, chosen / count)
    return 1.0


def _hidden(config: Any, spec: ModelSpec) -> int:
    """Features between blocks: those that most matrices of the blocks take or give."""
    size = told(config, "hidden_size")
    if isinstance(size, int):
        return size
    sides = Counter(side for unit in spec.units if unit.kind == BLOCK for entry in unit.weights.entries
                    if len(entry.shape) == 2 for side in entry.shape)  # fmt: skip
    return max(sides, key=lambda side: (sides[side], -side), default=1)


def _dtype(spec: ModelSpec) -> str:
    """In which blocks compute: what most of their weights have, or fp32 where they are widened."""
    sizes: Counter[str] = Counter()
    for unit in spec.units:
        for entry in unit.weights.entries if unit.kind == BLOCK else ():
            sizes["float32" if unit.wide_compute else entry.dtype] += entry.numel
    return "float32" if max(sizes, key=lambda name: sizes[name], default="") == "float32" else "bfloat16"


def rates_of(options: Options, device: torch.device, budgets: Budgets, events: EventLog) -> HardwareProfile:
    """What this machine does in a second: as `headrace profile` has measured it, else what is usual; an event says
    which. What Python, torch and the driver take is not counted: budgets are for what comes beside them."""
    folder = None if options.disk_dir is None else str(options.disk_dir)
    found = known_profile(device, folder)
    usual = _usual(device, folder, budgets)
    if found is None and folder is not None:
        found = known_profile(device, None)
    text = "as `headrace profile` has measured this machine"
    if found is None:
        found, text = usual, "usual ones: `headrace profile` has not measured this machine, which takes a minute"
    elif found.disk is None:
        found, text = found.with_disk(usual.disk), text + (", of a usual disk" if folder else "")
    assert found.disk is not None
    events.add("rates", text, of=found.device, measured=found.measured or "never", link=_rate(found.link.up),
               updates=f"{found.updates.host / 1e9:.3g} billion weights/s",
               matmul=f"{found.compute.bfloat16 / 1e12:.3g} TFLOP/s", disk=_rate(found.disk.read))  # fmt: skip
    return replace(found, calibration=replace(found.calibration, context_bytes=0, host_base_bytes=0))


def _usual(device: torch.device, folder: str | None, budgets: Budgets) -> HardwareProfile:
    host = limits.host_memory()
    card = limits.device_memory(device.index or 0) if device.type == "cuda" else limits.DeviceMemory(0, 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else limits.processor()
    room = MemoryRoom(card.total, card.free, host.total, host.available, host.cgroup_limit)
    return typical(name, device.type, room, available_threads(), folder or "", budgets.disk or 0)


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"
