"""Bytes that a training run takes on each tier: what a session allocates, and the working memory of its steps."""

from __future__ import annotations

from headrace.plan.subject import Subject, Work, features_out
from headrace.schedule.build import ROWS
from headrace.spec.footprint import Footprint, footprint, norm_bytes
from headrace.spec.formats import itemsize
from headrace.spec.hardware import HardwareProfile
from headrace.spec.model import BLOCK, TILE
from headrace.spec.placement import Placement

LOGIT_BYTES = 8
"""Working memory of the loss for each logit."""


class Peaks(Footprint):
    """Bytes by what they are for. The device's are those that the driver counts for the process."""


def peaks(
    subject: Subject, placement: Placement, work: Work, profile: HardwareProfile, compiled: bool = True,
    need: Footprint | None = None,
) -> Peaks:  # fmt: skip
    """What a run takes at most. Where the device is the CPU, all of it is host memory, and the device's part is told
    as the share of it that a device budget bounds. `need`: the footprint of the placement, where it is known already.
    """
    need, constants = need or footprint(subject.spec, placement), profile.calibration
    hidden = subject.hidden_bytes(work)
    device = {**need.device, "activations": activations(subject, work, profile, compiled)}
    visits = [visit.unit for visit in subject.visits if visit.kind == BLOCK]
    kept, sent = [unit for unit in visits if placement.keeps(unit)], [unit for unit in visits if placement.sends(unit)]
    if sent and sent[0] == visits[0] and not _embedding_trains(subject):
        sent.pop(0)  # only what needs a gradient is sent
    device["inputs"] = hidden * (len(visits) - len(kept) - len(sent))
    host = dict(need.host)
    if kept:
        device["kept"] = sum(graph_bytes(subject, unit, work, profile, compiled) for unit in kept)
    if sent:
        device["inputs"] += hidden * (placement.input_slots + constants.input_buffers)
        host["inputs"] = hidden * len(sent)
    host["process"] = constants.host_base_bytes
    if profile.shared:
        host["device"] = sum(device.values())
    else:
        threads = work.micro_batches if work.micro_batches > 1 else 0
        device["driver"] = constants.context_bytes + threads * constants.thread_bytes
        if subject.uses_rows and sent:
            host["rows"] = int(constants.host_rows * hidden)
    return Peaks(device, host, dict(need.disk))


def _embedding_trains(subject: Subject) -> bool:
    """The first block's input needs a gradient; so too where no embedding is known."""
    spec = subject.spec
    tiles = [spec.units[tile] for v in subject.visits if v.kind == ROWS for tile in spec.matrices[v.unit].tiles]
    return not tiles or any(tile.trained.entries for tile in tiles)


def graph_bytes(subject: Subject, unit: int, work: Work, profile: HardwareProfile, compiled: bool = True) -> int:
    """What a block keeps from its forward to its backward where it is not recomputed, for the whole window."""
    each = profile.calibration.kept if compiled else profile.calibration.kept_eager
    return int(each * _features(subject, unit) * work.tokens * itemsize(subject.dtype))


def activations(subject: Subject, work: Work, profile: HardwareProfile, compiled: bool = True) -> int:
    """Working memory of a step: a block of some rows, the loss of a tile or a norm outside the blocks, and hidden
    states of the window."""
    constants, size = profile.calibration, itemsize(subject.dtype)
    at_once = work.slice_rows * work.sequence
    each = constants.activations if compiled else constants.activations_eager
    widest = max((_features(subject, unit.index) for unit in subject.blocks), default=0.0)
    block = each * widest * at_once * size
    buffers = constants.window_buffers + (constants.sliced_buffers if work.slice_rows < work.rows else 0.0)
    norm = norm_bytes(work.rows * work.sequence * subject.hidden)
    outer = max(norm, _logit_bytes(subject, work, constants.logit_bytes))
    return int(max(block, outer) + buffers * subject.hidden_bytes(work))


def _logit_bytes(subject: Subject, work: Work, most: int) -> int:
    """The loss works on a tile of the head by some tokens at a time: `most` bytes, or what all tokens need."""
    tiles = [visit.unit for visit in subject.visits if visit.kind == TILE]
    widest = max((_features(subject, tile) for tile in tiles), default=0.0)
    return min(most, int(LOGIT_BYTES * widest * work.tokens)) if tiles else most


def _features(subject: Subject, unit: int) -> float:
    return sum(features_out(entry, subject.active) for entry in subject.spec.units[unit].weights.entries)
