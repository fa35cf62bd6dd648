"""The hardware profile: what was measured of one machine, and the constants that predictions are calibrated with.

Rates are in bytes, FLOPs or weights a second, memory in bytes. A rate is 0.0 where the machine has no such thing: on
the CPU nothing passes the device to be updated. `str(profile)` is the table that people read, `to_json` and `from_json`
are what is kept in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from headrace.base.errors import FormatError
from headrace.base.units import format_bytes, plural

VERSION = 3
"""Of the format in files; profiles of another one are measured again."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class LinkRates:
    """Copies between host and device."""

    up: float
    """To the device, from page-locked memory."""
    down: float
    both: float
    """In both directions at the same time, in all."""
    pageable_up: float = 0.0
    pageable_down: float = 0.0
    latency: float = 10e-6
    """Seconds of the smallest copy."""


@dataclass(frozen=True)
class UpdateRates:
    """AdamW with exact masters and fp32 moments: 14 bytes read and 12 written for each bf16 weight."""

    host: float
    """In host memory, with nothing beside it."""
    host_beside: float = 0.0
    """The same while the link carries what it can in both directions."""
    link_beside: float = 0.0
    """Bytes over the link meanwhile."""
    device: float = 0.0
    """State in host memory passes the device in pieces."""
    together: float = 0.0
    """Host and device at the same time, in all."""
    resident: float = 0.0
    """State on the device."""


@dataclass(frozen=True)
class ComputeRates:
    """The device's arithmetic at the shapes of blocks."""

    bfloat16: float
    """Matrix products."""
    float32: float
    attention_forward: float
    """Causal attention in the format that blocks compute in; half of the square counts."""
    attention_backward: float
    memory: float
    """Bytes that elementwise work reads and writes."""


@dataclass(frozen=True)
class DiskRates:
    """One folder, past the page cache where the file system lets it."""

    folder: str
    file_system: str
    read: float
    write: float
    """Over a file that was written before, as training does."""
    both: float
    """Reading and writing at the same time, in all."""
    free: int
    direct: bool = True
    """The page cache was not in between."""


@dataclass(frozen=True)
class MemoryRoom:
    """What this process may use."""

    device_total: int
    device_free: int
    """The rest is in use, by other processes too."""
    host_total: int
    host_available: int
    cgroup_limit: int | None = None
    grows: bool = False
    """The machine's memory grew while some of it was touched: what is available is a floor."""


@dataclass(frozen=True)
class Calibration:
    """Constants of the predictions that no short measurement gives; fitted to the runs in benchmarks/."""

    context_bytes: int = 868_220_928
    """Device memory of the driver and of libraries, outside torch's allocator."""
    thread_bytes: int = 60 << 20
    """More of it for each micro-batch of a window: its thread gets handles of its own from CUDA's libraries."""
    host_base_bytes: int = 2_150_000_000
    """RAM of Python, torch and CUDA, outside the arenas."""
    host_rows: float = 0.0
    """Host copies of the window's hidden states, on their way from an embedding and back to it."""
    activations: float = 2.85
    """Elements that the recompute and backward of a compiled block hold, for each output feature of its matrices."""
    activations_eager: float = 4.3
    kept: float = 1.3
    """Elements that a compiled block keeps until its backward where it is not recomputed, for each output feature."""
    kept_eager: float = 2.45
    window_buffers: float = 6.0
    """Hidden states of the whole window that the outer forward and the graph hold at a time."""
    sliced_buffers: float = 5.0
    """More of them where a micro-batch passes a block some rows at a time."""
    input_buffers: int = 1
    """Input slots beside those of the placement."""
    logit_bytes: int = 8 << 25
    """Working memory of the loss for a tile of the head by some tokens."""
    passes: float = 1.0
    """Times that a compiled block's elementwise work reads or writes all that its matrices give out."""
    passes_eager: float = 6.5
    efficiency: float = 0.95
    """Of a step's matrix products, against the same measured alone."""
    visit_seconds: float = 0.8e-3
    """The caller's thread launches one compiled run of a block, forward or backward."""
    visit_seconds_eager: float = 2.0e-3
    adapter_passes: float = 1.5
    """Times that the products of adapters read or write what they are given and give out, against once each."""
    adapter_seconds: float = 0.3e-3
    """The caller's thread launches what one adapter adds to one run of its layer."""
    step_seconds: float = 5e-3
    """What the caller does once a step: its loop, the optimizer, the outer model."""
    rows_seconds: float = 10e-3
    """Finding the rows of an embedding that a step uses."""
    rows_rate: float = 15e9
    """Bytes of them gathered or added up a second, by the host."""
    guess: float = 1.2
    """Time of an update with a log from which it can be taken back, against one without."""


@dataclass(frozen=True)
class HardwareProfile:
    """One machine."""

    device: str
    """Name of the GPU, or of the processor where the device is the CPU."""
    kind: str
    """"cuda" or "cpu"."""
    link: LinkRates
    updates: UpdateRates
    compute: ComputeRates
    memory: MemoryRoom
    disk: DiskRates | None = None
    threads: int = 1
    """CPUs that this process may use."""
    driver: str = ""
    torch: str = ""
    measured: str = ""
    """When, as ISO 8601; "" where the numbers come from data sheets."""
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def shared(self) -> bool:
        """The device is the CPU: its memory is the host's, and its arithmetic takes the cores that update."""
        return self.kind == "cpu"

    def matmul(self, dtype: str) -> float:
        """FLOPs a second of matrix products."""
        return self.compute.float32 if dtype == "float32" else self.compute.bfloat16

    def with_disk(self, disk: DiskRates | None) -> HardwareProfile:
        return replace(self, disk=disk)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> HardwareProfile:
        """Raises FormatError for anything but what `to_json` of this version gives."""
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise FormatError("this is no hardware profile", f"version {found}, {VERSION} is read",
                              "Measure again: headrace profile --refresh")  # fmt: skip
        return _built(cls, {name: value for name, value in data.items() if name != "version"})

    def __str__(self) -> str:
        return "\n".join(f"{name:<28}{text}" for name, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """(what, how much), as tables show them."""
        link, updates, compute, memory = self.link, self.updates, self.compute, self.memory
        found = [
            ("device", f"{self.device} ({self.kind}, {plural(self.threads, 'CPU')}"
                       + "".join(f", {name} {text}" for name, text in (("driver", self.driver), ("torch", self.torch))
                                 if text) + ")"),
            ("link, page-locked", f"up {_gb(link.up)}, down {_gb(link.down)}, both ways {_gb(link.both)}"),
            ("link, pageable", f"up {_gb(link.pageable_up)}, down {_gb(link.pageable_down)}"),
        ]  # fmt: skip
        if self.disk is not None:
            disk = self.disk
            note = "" if disk.direct else ", through the page cache"
            found.append(("disk", f"read {_gb(disk.read)}, write {_gb(disk.write)}, both {_gb(disk.both)}, "
                          f"{format_bytes(disk.free)} free ({disk.file_system or 'file system unknown'}{note}; "
                          f"{disk.folder})"))  # fmt: skip
        beside = f", {_millions(updates.host_beside)} beside copies" if updates.host_beside else ""
        found.append(("update on the host", _millions(updates.host) + beside))
        if updates.device:
            found.append(("update through the device", f"{_millions(updates.device)}, "
                          f"{_millions(updates.together)} with the host"))  # fmt: skip
        if updates.resident:
            found.append(("update on the device", _millions(updates.resident)))
        limit = "" if memory.cgroup_limit is None else f", limit {format_bytes(memory.cgroup_limit)}"
        return [
            *found,
            ("matrix products", f"bf16 {_tera(compute.bfloat16)}, fp32 {_tera(compute.float32)}"),
            ("causal attention", f"forward {_tera(compute.attention_forward)}, "
                                 f"backward {_tera(compute.attention_backward)}"),
            ("device memory", f"{format_bytes(memory.device_free)} of {format_bytes(memory.device_total)} free, "
                              f"{_gb(compute.memory)}"),
            ("host memory", f"{format_bytes(memory.host_available)} of {format_bytes(memory.host_total)} "
                            f"available{limit}" + (", and grows when it is touched" if memory.grows else "")),
        ]  # fmt: skip


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate else "-"


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _millions(rate: float) -> str:
    return f"{rate / 1e6:,.0f} million weights/s" if rate else "-"


def _built(kind: type[Part], data: Mapping[str, Any]) -> Part:
    """A dataclass from what `asdict` made of it."""
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(data, Mapping) or set(data) != known:
        wrong = sorted(known.symmetric_difference(data)) if isinstance(data, Mapping) else [type(data).__name__]
        raise FormatError("this is no hardware profile", f"{kind.__name__}: {', '.join(map(str, wrong))}",
                          "Measure again: headrace profile --refresh")  # fmt: skip
    values = {}
    for name, value in data.items():
        hint = DiskRates if name == "disk" else hints[name]
        values[name] = _built(hint, value) if is_dataclass(hint) and value is not None else value
    return kind(**values)
