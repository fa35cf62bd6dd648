"""Measurements of a hardware profile: the link, updates on each side, matrix products and attention, a disk folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from headrace.base.errors import StoreError
from headrace.base.units import format_bytes
from headrace.files import leftovers
from headrace.files.positional import PositionalFile
from headrace.files.space import disk_error, free_bytes
from headrace.hardware import limits, rates
from headrace.hardware.rates import Pairs
from headrace.kernels import ops
from headrace.kernels.threads import threads
from headrace.spec.hardware import ComputeRates, DiskRates, LinkRates, UpdateRates

COPIED = 256 << 20
"""Bytes of one copy; pieces of 4 MiB and more reach the same rate."""
PIECE = 1 << 23
"""Elements that pass the device at a time, as in plan/updates."""
PLACES = 3
SUSTAINED = 1.0
"""Seconds of products before a GPU's rate is measured: its clock falls where they draw all the power it gets."""
ELEMENT = 14
"""Bytes of one weight with its remainder, moments and gradient."""
DISK_BYTES = 512 << 20
SMALLEST_FILE = 32 << 20


def link(device: torch.device, nbytes: int = COPIED) -> LinkRates:
    """Copies each way and both ways. Where the device is the CPU, copies within its memory."""
    cuda = device.type == "cuda"
    nbytes = _affordable(nbytes, 6)
    up, down = _pair(device, nbytes, cuda), _pair(device, nbytes, cuda)[::-1]
    ways: list[Pairs] = [[up], [down]]
    small = _pair(device, 4096, cuda)
    latency = rates.seconds_of(lambda: small[0].copy_(small[1], non_blocking=True), device)
    found = [rates.copy_rate([way], device) for way in ways]
    both = rates.copy_rate(ways, device)
    pageable = found
    if cuda:
        loose = torch.ones(nbytes, dtype=torch.uint8)
        pageable = [rates.copy_rate([[pair]], device) for pair in ((up[0], loose), (loose, down[1]))]
    return LinkRates(found[0], found[1], max(both, *found), pageable[0], pageable[1], latency)


def _pair(device: torch.device, nbytes: int, pinned: bool) -> tuple[Tensor, Tensor]:
    """(memory of the device, host memory)."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return torch.ones(nbytes, dtype=torch.uint8, device=device), host


def updates(device: torch.device, elements: int | None = None) -> UpdateRates:
    """AdamW on the host, beside copies, through the device, on both sides, and on the device."""
    cuda = device.type == "cuda"
    wanted = elements or (1 << 26 if cuda else 1 << 24)
    count = max(1 << 16, min(wanted, limits.host_memory().available // (4 * ELEMENT)))
    host = _parts(count, torch.device("cpu"), cuda)
    with _threads(cuda):

        def on_host() -> None:
            _update(host)

        alone = count / rates.seconds_of(on_host, torch.device("cpu"))
        ways: list[Pairs] = [[_pair(device, COPIED if cuda else 1 << 24, cuda)],
                             [_pair(device, COPIED if cuda else 1 << 24, cuda)[::-1]]]  # fmt: skip
        with rates.traffic(ways, device) as copied:
            start, before = time.perf_counter(), copied()
            beside = count / rates.seconds_of(on_host, torch.device("cpu"), warm_up=0)
            moved = (copied() - before) / (time.perf_counter() - start)
        if not cuda:
            return UpdateRates(alone, beside, moved)
        return UpdateRates(alone, beside, moved, *_through(device, host, count, alone))


def _through(device: torch.device, host: dict[str, Tensor], count: int, alone: float) -> tuple[float, float, float]:
    """Weights a second (through the device, on both sides at once, with state on the device)."""
    second = _parts(count, torch.device("cpu"), True)
    there = _parts(min(count, 1 << 25), device, False)
    resident = there["weight"].numel() / rates.seconds_of(lambda: _update(there), device)
    places = [_parts(min(PIECE, count), device, False) for _ in range(PLACES)]
    streams = [torch.cuda.Stream(device) for _ in range(3)]

    def pass_pieces() -> None:
        ends: list[torch.cuda.Event | None] = [None] * PLACES
        for number, start in enumerate(range(0, count, PIECE)):
            _pass_piece({n: t[start : start + PIECE] for n, t in second.items()}, places[number % PLACES], streams,
                        ends, number % PLACES)  # fmt: skip
        for end in ends:
            if end is not None:
                end.synchronize()

    through = count / rates.seconds_of(pass_pieces, device)
    share = max(1, int(count * min(1.0, alone / through)))
    part = {name: tensor[:share] for name, tensor in host.items()}
    with futures.ThreadPoolExecutor(1) as lane:

        def both() -> None:
            other = lane.submit(_update, part)
            pass_pieces()
            other.result()

        together = (count + share) / rates.seconds_of(both, device)
    return through, together, resident


def _pass_piece(
    home: dict[str, Tensor], place: dict[str, Tensor], streams: list[torch.cuda.Stream],
    ends: list[torch.cuda.Event | None], number: int,
) -> None:  # fmt: skip
    """Up, through the kernel, down, each on its stream."""
    up, kernel, down = streams
    size = home["weight"].numel()
    there = {name: tensor[:size] for name, tensor in place.items()}
    if (end := ends[number]) is not None:
        up.wait_event(end)
    with torch.cuda.stream(up):
        for name, tensor in home.items():
            there[name].copy_(tensor, non_blocking=True)
    kernel.wait_event(up.record_event())
    with torch.cuda.stream(kernel):
        _update(there)
    down.wait_event(kernel.record_event())
    with torch.cuda.stream(down):
        for name, tensor in home.items():
            if name != "grad":
                tensor.copy_(there[name], non_blocking=True)
    ends[number] = down.record_event(torch.cuda.Event(blocking=True))


def _parts(count: int, device: torch.device, pinned: bool) -> dict[str, Tensor]:
    """What an update reads and writes: ordinary numbers, as training has them."""

    def made(dtype: torch.dtype, value: float) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device, pin_memory=pinned)

    return {
        "weight": made(torch.bfloat16, 0.02), "low": made(torch.int16, 3), "exp_avg": made(torch.float32, 1e-3),
        "exp_avg_sq": made(torch.float32, 1e-5), "grad": made(torch.bfloat16, 0.01),
    }  # fmt: skip


def _update(parts: dict[str, Tensor]) -> None:
    ops.adamw_(
        parts["weight"], parts["low"], parts["exp_avg"], parts["exp_avg_sq"], parts["grad"],
        lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1,
    )  # fmt: skip


@contextmanager
def _threads(cuda: bool) -> Iterator[None]:
    """As many as a session takes."""
    before = threads()
    ops.set_threads(max(1, ops.available_threads() - (2 if cuda else 0)))
    try:
        yield
    finally:
        ops.set_threads(before)


def compute(device: torch.device) -> ComputeRates:
    """Matrix products and causal attention at the shapes of blocks, and elementwise work."""
    cuda = device.type == "cuda"
    tokens, columns, out = (8192, 4096, 12288) if cuda else (256, 1024, 2048)

    def matmul(dtype: torch.dtype) -> float:
        end = time.perf_counter() + (SUSTAINED if cuda else 0.0)
        forward, backward = rates.linear_seconds(tokens, columns, out, dtype, device)
        while time.perf_counter() < end:
            forward, backward = rates.linear_seconds(tokens, columns, out, dtype, device)
        return 6.0 * tokens * columns * out / (forward + backward)

    narrow = torch.bfloat16 if limits.computes_bf16(device) else torch.float32
    rows, heads, kv_heads, sequence, head_dim = (8, 32, 8, 1024, 128) if cuda else (1, 8, 4, 512, 64)
    forward, backward = rates.attention_seconds(
        rows, heads, kv_heads, sequence, head_dim, narrow if cuda else torch.float32, device
    )
    flops = 2.0 * rows * heads * head_dim * sequence * sequence
    size = 1 << 28 if cuda else 1 << 22
    plain = torch.bfloat16 if cuda else torch.float32  # a CPU's bf16 sums are slow by their conversions
    a, b = torch.ones(size, device=device, dtype=plain), torch.ones(size, device=device, dtype=plain)
    seconds = rates.seconds_of(lambda: a.add_(b), device)
    return ComputeRates(
        matmul(narrow), matmul(torch.float32), flops / forward, 2.5 * flops / max(backward, forward),
        3 * a.nbytes / seconds,
    )  # fmt: skip


def disk(folder: str | os.PathLike[str], nbytes: int = DISK_BYTES) -> DiskRates:
    """Read and write a file there, which is gone afterwards. Raises StoreError when it cannot be written, or has no
    room."""
    place = Path(folder).absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
        free = free_bytes(place)
        size = min(nbytes, free // 4 // SMALLEST_FILE * SMALLEST_FILE)
        if size < SMALLEST_FILE:
            raise StoreError(
                f"{place} is too full to be measured",
                f"{format_bytes(free)} are free, {format_bytes(4 * SMALLEST_FILE)} are needed",
                "Name a folder on a larger disk",
            )
        path, fd, _ = leftovers.create(place, "headrace-", ".swap")
    except OSError as error:
        raise disk_error(error, "write in", place) from error
    file = PositionalFile(path, fd, direct=True, drop=True)
    try:
        return _disk_rates(place, file, size, free)
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _disk_rates(place: Path, file: PositionalFile, size: int, free: int) -> DiskRates:
    first, second = _aligned(size), _aligned(size)
    half = size // 2

    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        file.sync()
        return time.perf_counter() - start

    file.write(0, first)  # blocks that were never written are slower
    file.sync()
    write = size / timed(lambda: file.write(0, first))
    read = size / timed(lambda: file.read(0, second))
    with futures.ThreadPoolExecutor(2) as pool:

        def at_once() -> None:
            ways = [pool.submit(file.write, 0, first[:half]), pool.submit(file.read, half, second[half:])]
            for way in ways:
                way.result()

        both = 2 * half / timed(at_once)
    return DiskRates(str(place), limits.file_system(place), read, write, both, free, file.direct)


def _aligned(nbytes: int, to: int = 4096) -> Tensor:
    """Memory that may go past the page cache."""
    buffer = torch.ones(nbytes + to, dtype=torch.uint8)
    start = -buffer.data_ptr() % to
    return buffer[start : start + nbytes]


def _affordable(nbytes: int, times: int) -> int:
    return max(1 << 20, min(nbytes, limits.host_memory().available // (2 * times)))
