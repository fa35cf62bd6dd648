"""Bytes that a training run takes on each tier: what a session allocates, and the working memory of its steps."""

from __future__ import annotations

from headrace.plan.subject import Subject, Work, features_out
from headrace.spec.footprint import Footprint, footprint
from headrace.spec.formats import itemsize
from headrace.spec.hardware import HardwareProfile
from headrace.spec.model import BLOCK
from headrace.spec.placement import Placement


class Peaks(Footprint):
    """Bytes by what they are for. The device's are those that the driver counts for the process."""


def peaks(
    subject: Subject, placement: Placement, work: Work, profile: HardwareProfile, compiled: bool = True,
    recompute: bool = True, need: Footprint | None = None,
) -> Peaks:  # fmt: skip
    """What a run takes at most. Where the device is the CPU, all of it is host memory, and the device's part is told
    as the share of it that a device budget bounds. `need`: the footprint of the placement, where it is known already.
    """
    need, constants = need or footprint(subject.spec, placement), profile.calibration
    size = itemsize(subject.dtype)
    hidden = work.tokens * subject.hidden * size
    device = {**need.device, "activations": activations(subject, work, profile, compiled, recompute)}
    waiting = hidden * sum(visit.kind == BLOCK for visit in subject.visits)
    host = dict(need.host)
    if placement.offload:
        device["inputs"] = hidden * (placement.input_slots + constants.input_buffers)
        host["inputs"] = waiting
    else:
        device["inputs"] = waiting
    host["process"] = constants.host_base_bytes
    if profile.shared:
        host["device"] = sum(device.values())
    else:
        device["driver"] = constants.context_bytes
        if subject.uses_rows and placement.offload:
            host["rows"] = int(constants.host_rows * hidden)
    return Peaks(device, host, dict(need.disk))


def activations(
    subject: Subject, work: Work, profile: HardwareProfile, compiled: bool = True, recompute: bool = True
) -> int:
    """Working memory of a step: a block of some rows, or the loss of a tile, and hidden states of the window."""
    constants, size = profile.calibration, itemsize(subject.dtype)
    at_once = work.slice_rows * work.sequence
    each = constants.activations if compiled else constants.activations_eager
    widest = max((_features(subject, unit.index) for unit in subject.blocks), default=0.0)
    block = each * widest * at_once * size
    if not recompute:  # the graphs of all blocks are alive at once
        block += sum(_features(subject, unit.index) for unit in subject.blocks) * work.tokens * size
    sliced = work.slice_rows < work.rows
    hidden = work.tokens * subject.hidden * size
    buffers = constants.window_buffers + (constants.sliced_buffers if sliced else 0.0)
    return int(max(block, constants.logit_bytes) + buffers * hidden)


def _features(subject: Subject, unit: int) -> float:
    return sum(features_out(entry, subject.active) for entry in subject.spec.units[unit].weights.entries)
