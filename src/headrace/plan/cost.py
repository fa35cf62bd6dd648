"""What an op costs: its bytes, its seconds when it has the machine to itself, and what it shares with others meanwhile.

[Note: What is shared] The link has a rate for each direction and one for both; so has a disk. Host memory is drawn on
by updates on the host, by everything that crosses the link, and by the disk. How much it carries is what was measured
with updates and copies side by side; updates through the device draw on it more than their bytes say, by as much as
makes the two sides together as fast as they were measured. A GPU's arithmetic is one thing that compute and the updates
of resident state share, a CPU's cores another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from headrace.plan.simulate import Uses
from headrace.plan.simulate import Work as Taken
from headrace.plan.subject import Subject, Work, features_out, multiplied
from headrace.schedule.build import ROWS, previewed
from headrace.schedule.op import DEVICE_LOG, LOG, RESIDENT, Op, kind_of
from headrace.spec.footprint import passes_device, stage_bytes
from headrace.spec.formats import itemsize
from headrace.spec.hardware import HardwareProfile
from headrace.spec.model import BLOCK, REST, Unit
from headrace.spec.placement import DEVICE, Placement

READS, WRITES = 14, 12
"""Bytes of one update of a bf16 weight with fp32 moments, by which the rates of a profile count."""
SMALLEST = 1e-6
"""Seconds of an op that does next to nothing."""


class Costs:
    """The costs of the ops of one model, placement and work, on one machine."""

    def __init__(
        self, subject: Subject, placement: Placement, work: Work, profile: HardwareProfile, compiled: bool = True
    ) -> None:
        self.subject, self.placement, self.work, self.profile = subject, placement, work, profile
        self.compiled = compiled
        self._taken: dict[tuple[str, str, int, str, str], Taken] = {}
        self._beside: dict[int, list[tuple[float, float]]] = {}

    # -- what is shared ---------------------------------------------------------------------------------------------

    @cached_property
    def capacities(self) -> Mapping[str, float]:
        """Units a second, by what is shared."""
        link, disk = self.profile.link, self.profile.disk
        found = {"up": link.up, "down": link.down, "link": link.both, "gpu": 1.0, "cores": 1.0}
        if self.host_memory:
            found["memory"] = self.host_memory
        if disk is not None:
            found |= {"read": disk.read, "write": disk.write, "disk": max(disk.both, disk.read, disk.write)}
        return found

    @cached_property
    def host_memory(self) -> float:
        """Bytes a second that host memory carries; 0.0 where it was not measured."""
        updates = self.profile.updates
        if not updates.host_beside:
            return 0.0
        return max(updates.host_beside * (READS + WRITES) + updates.link_beside, updates.host * (READS + WRITES))

    @cached_property
    def drawn(self) -> float:
        """Bytes of host memory for each byte of an update through the device, see [Note: What is shared]."""
        updates = self.profile.updates
        if not (updates.together and updates.device and self.host_memory):
            return 1.0
        each = updates.together / 2 * (READS + WRITES)
        return max(1.0, (self.host_memory - each) / each)

    # -- ops --------------------------------------------------------------------------------------------------------

    def taken(self, op: Op) -> Taken:
        """What an op takes."""
        key = op.verb, op.region, op.unit, op.place, op.lane
        if key not in self._taken:
            self._taken[key] = self._of(op)
        return self._taken[key]

    def _of(self, op: Op) -> Taken:
        if op.verb in ("FORWARD", "BACKWARD"):
            return self._compute(op)
        if op.verb in ("LOAD", "SEND"):
            return self._copy(op)
        if op.verb in ("READ", "WRITE"):
            return self._disk(op)
        if op.verb == "UPDATE":
            return self._update(op)
        if op.verb == "ADD":
            return self._add(op)
        return Taken(SMALLEST)

    def nbytes(self, op: Op) -> int:
        """Bytes that it moves over the link or to and from the disk."""
        unit = self._unit(op)
        if op.verb in ("READ", "WRITE"):
            return stage_bytes(unit, self.placement) if op.region == "state" else unit.stored.nbytes
        if op.verb not in ("LOAD", "SEND"):
            return 0
        if op.region == "input":
            return self.hidden_bytes
        if op.region == "grads":
            return unit.sent.nbytes
        return unit.trained_bytes if kind_of(op.target) == RESIDENT else unit.stored.nbytes

    @property
    def row_gradient_bytes(self) -> int:
        """Gradients of an embedding's rows, in fp32; they come down with their ADD."""
        return self.work.tokens * self.subject.hidden * 4

    @cached_property
    def hidden_bytes(self) -> int:
        """Hidden states of the whole window."""
        return self.subject.hidden_bytes(self.work)

    def _unit(self, op: Op) -> Unit:
        return self.subject.spec.units[op.unit]

    def _copy(self, op: Op) -> Taken:
        size, link = self.nbytes(op), self.profile.link
        way, rate = ("up", link.up) if op.verb == "LOAD" else ("down", link.down)
        return Taken(size / rate + link.latency, ((way, rate), ("link", rate), ("memory", rate)))

    def _disk(self, op: Op) -> Taken:
        disk, size = self.profile.disk, self.nbytes(op)
        if disk is None:
            return Taken(SMALLEST)
        way, rate = ("read", disk.read) if op.verb == "READ" else ("write", disk.write)
        return Taken(size / rate + SMALLEST, ((way, rate), ("disk", rate), ("memory", rate)))

    def _update(self, op: Op) -> Taken:
        if op.region == "preview" or (op.region == "state" and kind_of(op.target) in (LOG, DEVICE_LOG)):
            return Taken(SMALLEST)  # a few numbers are noted, or a guess is confirmed
        unit, rates = self._unit(op), self.profile.updates
        count = sum(entry.numel for entry in unit.trained.entries)
        share = update_bytes(unit) / (READS + WRITES)
        if self.placement.state[op.unit] == DEVICE:
            rate = rates.resident or rates.host
            return Taken(count * share / rate + SMALLEST, (("cores", 1.0),) if self.profile.shared else (("gpu", 1.0),))
        if passes_device(unit, self.placement) and op.lane == "device" and rates.device:
            speed = rates.device
            up, down = speed * READS, speed * WRITES
            drawn: Uses = (("up", up), ("down", down), ("link", up + down), ("memory", (up + down) * self.drawn))
            return Taken(count * share / speed + SMALLEST, drawn)
        seconds = count * share / rates.host * (self.profile.calibration.guess if op.region == "guess" else 1.0)
        used: Uses = (("memory", rates.host * (READS + WRITES)),)
        return Taken(seconds + SMALLEST, (*used, ("cores", 1.0)) if self.profile.shared else used)

    def _add(self, op: Op) -> Taken:
        """Gradients join those in fp32: reads both, writes one. Those of an embedding's rows are few."""
        speed = self.profile.updates.host * (READS + WRITES)
        used: Uses = (("memory", speed),)
        if op.unit < 0:
            constants, size = self.profile.calibration, self.row_gradient_bytes
            copied = size / self.profile.link.down + self.profile.link.latency
            return Taken(copied + size / constants.rows_rate + constants.rows_seconds / 4, used)
        unit = self._unit(op)
        return Taken((unit.sent.nbytes + 2 * unit.grads.nbytes) / speed + SMALLEST, used)

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def _compute(self, op: Op) -> Taken:
        constants, uses = self.profile.calibration, self._arithmetic
        if op.unit < 0:
            return self._rows(op)
        unit, backward = self._unit(op), op.verb == "BACKWARD"
        again = backward and self._recomputed(unit)
        each = constants.visit_seconds if self.compiled else constants.visit_seconds_eager * (1 + again)
        each += constants.adapter_seconds * len(self._adapters(unit)) / 2 * (2 if again else 1)
        runs = self.work.slices if unit.kind == BLOCK else 1
        return Taken(self._visit_seconds(unit, backward), uses, issue=each * runs)

    @property
    def _arithmetic(self) -> Uses:
        return (("cores", 1.0),) if self.profile.shared else (("gpu", 1.0),)

    def _rows(self, op: Op) -> Taken:
        """An embedding gathers its rows on the host where it streams, and brings back gradients for them."""
        constants = self.profile.calibration
        if kind_of(op.source) == RESIDENT:
            moved = 3 if op.verb == "BACKWARD" else 2
            seconds = moved * self.hidden_bytes / self.profile.compute.memory
            if self.profile.shared and op.verb == "FORWARD":
                seconds = min(seconds, self.hidden_bytes / constants.rows_rate)
            return Taken(seconds + SMALLEST, self._arithmetic)
        gathered = constants.rows_seconds + self.hidden_bytes / constants.rows_rate
        if self.profile.shared:
            gathered -= constants.rows_seconds  # next to nothing, where no device must be waited for
        if op.verb == "BACKWARD":
            return Taken(3 * self.hidden_bytes / self.profile.compute.memory + SMALLEST, self._arithmetic)
        rate = self.profile.link.up
        copied = (("up", rate), ("link", rate), ("memory", rate))
        if self.profile.shared:
            return Taken(gathered + SMALLEST + self._previewing(self.profile.updates.host), self._arithmetic)
        seconds = self.hidden_bytes / rate + self._previewing(rate / READS)
        return Taken(seconds + SMALLEST, copied, issue=gathered, blocks=True)

    def _previewing(self, rate: float) -> float:
        """Seconds of the rows' own updates, see executor/previews. `rate`: of bf16 weights with fp32 moments."""
        unit = next((unit for unit in self.subject.spec.units if previewed(unit, self.placement)), None)
        if unit is None:
            return 0.0
        return self.work.tokens * self.subject.hidden * update_bytes(unit) / (READS + WRITES) / rate

    def _visit_seconds(self, unit: Unit, backward: bool) -> float:
        subject, profile, constants = self.subject, self.profile, self.profile.calibration
        tokens, rate = self.work.tokens, profile.matmul(subject.dtype)
        seconds = self.matmul_flops(unit, backward) * tokens / rate
        out = sum(features_out(entry, subject.active) for entry in unit.weights.entries)
        passes = constants.passes if self.compiled else constants.passes_eager
        if unit.kind == BLOCK and subject.attention is not None:
            flops = self.attention_flops()
            compute = profile.compute
            forward, then = flops / compute.attention_forward, 2.5 * flops / compute.attention_backward
            seconds += (then + forward * self._recomputed(unit)) if backward else forward
        if unit.kind == BLOCK:
            times = (1 + self._recomputed(unit) if backward else 1) * passes
            seconds += times * out * tokens * itemsize(subject.dtype) / profile.compute.memory
        else:
            seconds += 2 * out * tokens * 2 / profile.compute.memory  # the logits of a tile, written and read once
        moved = 1.5 * unit.decoded.nbytes  # packed bytes read, decoded ones written
        moved += constants.adapter_passes * self._adapter_bytes(unit, backward)
        if backward:  # each run's gradients are added up in fp32, and rounded once
            moved += sum(entry.numel for entry in unit.trained.entries) * (10 * self.work.slices + 6)
        return seconds / constants.efficiency + moved / profile.compute.memory + SMALLEST

    def _adapters(self, unit: Unit) -> list[tuple[float, float]]:
        """(features in, features out) of the narrow matrices that train beside a block's, in the rest."""
        if unit.index not in self._beside:
            rest = rest_of(self.subject)
            entries = self.subject.spec.units[rest].trained.entries if rest is not None and unit.kind == BLOCK else ()
            sides = [e.shape for e in entries if len(e.shape) == 2 and e.name.startswith(f"{unit.name}.")]
            self._beside[unit.index] = [(columns, 0.0) if columns > rows else (0.0, rows) for rows, columns in sides]
        return self._beside[unit.index]

    def _adapter_bytes(self, unit: Unit, backward: bool) -> float:
        """What adapters read and write, see model/lora: the forward an input and twice an output, the backward twice a
        gradient and inputs two times, and the input's gradient, which it adds to the layer's."""
        sides, each = self._adapters(unit), self.work.tokens * itemsize(self.subject.dtype)
        ins, outs = sum(side[0] for side in sides), sum(side[1] for side in sides)
        forward = ins + 2.0 * outs
        return each * (6.0 * ins + 2.0 * outs + forward * self._recomputed(unit) if backward else forward)

    def matmul_flops(self, unit: Unit, backward: bool) -> float:
        """For each token that meets a unit's weights: 2 FLOPs in the forward, 2 for each of the two gradients. What is
        compiled leaves the last product out of a block's recompute."""
        active = self.subject.active
        weights = [multiplied(entry, active) for entry in unit.weights.entries]
        if not backward:
            return 2.0 * sum(weights)
        trained = sum(multiplied(entry, active) for entry in unit.trained.entries)
        again = sum(weights) if self._recomputed(unit) else 0.0
        if unit.kind == BLOCK and again and self.compiled:
            again -= next((size for size in reversed(weights) if size), 0.0)
        return 2.0 * (sum(weights) + trained + again)

    def _recomputed(self, unit: Unit) -> bool:
        """Its forward runs again in the backward; a head's does always."""
        return not self.placement.keeps(unit.index)

    def attention_flops(self) -> float:
        """Of one block's forward, for the whole window."""
        attention, work = self.subject.attention, self.work
        if attention is None:
            return 0.0
        return work.micro_batches * attention.forward_flops(work.rows, work.sequence)

    def model_flops(self) -> float:
        """Of one step, without recompute; see cli/benchmark/arithmetic."""
        met = [visit.unit for visit in self.subject.visits if visit.kind != ROWS]
        active = self.subject.active
        weights = sum(multiplied(e, active) for unit in met for e in self.subject.spec.units[unit].weights.entries)
        blocks = sum(self.subject.spec.units[unit].kind == BLOCK for unit in met)
        return 6.0 * weights * self.work.tokens + 3.0 * blocks * self.attention_flops()


def update_bytes(unit: Unit) -> float:
    """Bytes that one update of the unit reads and writes, for each element: the gradient is only read."""
    layouts = [unit.trained, *(layout for _, layout in unit.parts.values())]
    count = len(unit.trained.entries)
    elements = sum(entry.numel for entry in unit.trained.entries)
    if not elements:
        return 0.0
    both = sum(layout.entries[i].numel * itemsize(layout.entries[i].dtype) for layout in layouts for i in range(count))
    read = sum(entry.numel * itemsize(entry.dtype) for entry in unit.grads.entries)
    return (2 * both + read) / elements


def rest_of(subject: Subject) -> int | None:
    """Index of the unit that stays on the device."""
    return next((unit.index for unit in subject.spec.units if unit.kind == REST), None)
