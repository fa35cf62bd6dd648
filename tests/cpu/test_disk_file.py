"""The disk file of a session: exact bytes, short counts, refusals, and what killed runs leave."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.base.errors import StoreError
from headrace.base.events import EventLog
from headrace.files import leftovers, positional, space
from headrace.store.disk import DiskFile
from headrace.store.memory import HostArena

MIB = 1 << 20


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy()).hexdigest()


def noise(nbytes: int) -> torch.Tensor:
    """Random bytes at a page boundary, so that they may go past the page cache."""
    return HostArena(nbytes).take(nbytes).random_(0, 256)


def blank(nbytes: int) -> torch.Tensor:
    return HostArena(nbytes).take(nbytes)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_exact_bytes_of_awkward_sizes(tmp_path: Path, direct: bool, shift: int) -> None:
    sizes = (0, 1, 511, 4095, 4096, 4097, 1_000_003, 3 * positional.PIECE + 4097)
    with DiskFile.create(tmp_path, sum(sizes) + 4096 * len(sizes), direct=direct) as file:
        offset, written = shift, []
        for size in sizes:
            data = noise(size)
            file.write(offset, data)
            written.append((offset, size, digest(data)))
            offset = -(-(offset + size) // 4096) * 4096 + shift
        for start, size, expected in written:
            out = blank(size)
            file.read(start, out)
            assert digest(out) == expected, size
        assert file.bytes_read == file.bytes_written == sum(sizes)
        assert file.path.stat().st_size == file.nbytes


def test_unaligned_memory_and_offsets_share_a_file_with_aligned_ones(tmp_path: Path) -> None:
    """Direct and buffered transfers of neighbouring bytes must see each other."""
    size = 2 * MIB
    image = torch.zeros(size, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    with DiskFile.create(tmp_path, size) as file:
        for _ in range(60):
            start, length = (int(torch.randint(0, MIB, (1,), generator=generator)) for _ in range(2))
            if length % 2:
                start, length = start // 4096 * 4096, -(-length // 4096) * 4096
            data = noise(length + 2)[length % 3 :][:length].clone() if length % 3 else noise(length)
            file.write(start, data)
            image[start : start + length] = data
            out = blank(size)
            file.read(0, out)
            assert torch.equal(out, image)


@pytest.mark.parametrize("direct", [True, False])
def test_short_counts_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][: max(1, len(bufs[0]) * 2 // 3)]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(1, len(data) * 2 // 3)], at))
    data = noise(9 * MIB + 5)
    with DiskFile.create(tmp_path, data.nbytes, direct=direct) as file:
        file.write(0, data)
        out = blank(data.nbytes)
        file.read(0, out)
    assert torch.equal(out, data)


def failing(call: Callable[..., int], code: int, after: int = 0) -> Callable[..., int]:
    calls = iter(range(10**9))

    def fail(fd: int, data: object, offset: int) -> int:
        if next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return call(fd, data, offset)

    return fail


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_names_path_wanted_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pwrite = os.pwrite
    with DiskFile.create(tmp_path, MIB) as file:
        monkeypatch.setattr(os, "pwrite", failing(lambda fd, data, at: pwrite(fd, data[:1000], at), code, after=1))
        with pytest.raises(StoreError) as caught:
            file.write(0, torch.ones(5000, dtype=torch.uint8))
        for part in (str(file.path), "1000 of 5000 bytes", f"errno {code}"):
            assert part in str(caught.value)
        assert file.bytes_written == 0


def test_a_refused_read_falls_back_once_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_DIRECT that opens and then fails at the first transfer: same bytes, one event."""
    events = EventLog()
    data = noise(9 * MIB)
    with DiskFile.create(tmp_path, data.nbytes, events=events) as file:
        file.write(0, data)
        if not file.direct:
            pytest.skip("no O_DIRECT here")
        direct_fd, preadv = file._file._direct_fd, os.preadv
        refused: list[int] = []

        def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
            if fd == direct_fd:
                refused.append(offset)
                raise OSError(errno.EINVAL, "Invalid argument")
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", refuse)
        for _ in range(3):
            out = blank(data.nbytes)
            file.read(0, out)
            assert torch.equal(out, data)
        assert not file.direct and "Invalid argument" in file.fallback and file.fallback in file.note
        assert 1 <= len(refused) <= positional.THREADS
        assert [event.kind for event in events] == ["disk"]


def test_direct_transfers_really_are_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[int] = set()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: used.add(fd) or preadv(fd, bufs, at))
    with DiskFile.create(tmp_path, 9 * MIB) as file:
        if not file.direct:
            pytest.skip("no O_DIRECT here")
        file.read(0, blank(9 * MIB))
        assert used == {file._file._direct_fd}


def test_a_disk_dir_in_shared_memory_works(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    data = noise(MIB + 3)
    with DiskFile.create("/dev/shm", data.nbytes) as file:
        file.write(0, data)
        out = blank(data.nbytes)
        file.read(0, out)
        assert torch.equal(out, data)
    assert not file.path.exists()


def test_a_file_that_is_cut_while_open_is_an_error(tmp_path: Path) -> None:
    with DiskFile.create(tmp_path, 10_000) as file:
        os.truncate(file.path, 4000)
        with pytest.raises(StoreError, match="wanted 6000 bytes at offset 0, got 4000"):
            file.read(0, torch.empty(6000, dtype=torch.uint8))


def test_bounds_and_use_after_close_are_errors(tmp_path: Path) -> None:
    file = DiskFile.create(tmp_path, 100)
    for offset, nbytes in ((1, 100), (-1, 5), (100, 1)):
        with pytest.raises(StoreError, match="outside"):
            file.write(offset, torch.zeros(nbytes, dtype=torch.uint8))
        with pytest.raises(StoreError, match="outside"):
            file.read(offset, torch.zeros(nbytes, dtype=torch.uint8))
    file.close()
    file.close()
    with pytest.raises(StoreError, match="closed"):
        file.read(0, torch.zeros(1, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == []


def test_dropping_the_last_reference_removes_the_file(tmp_path: Path) -> None:
    file = DiskFile.create(tmp_path, 100)
    assert len(list(tmp_path.iterdir())) == 1 and open_files(tmp_path)
    del file
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and not open_files(tmp_path)


def open_files(folder: Path) -> list[str]:
    """Files in `folder`, removed ones too, that this process has open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if link.is_symlink()]  # the listing's own is closed by now
    return [name for name in names if name.startswith(str(folder))]


def test_two_files_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    with DiskFile.create(tmp_path, 5000) as first, DiskFile.create(tmp_path, 7000) as second:
        first.write(0, torch.full((5000,), 1, dtype=torch.uint8))
        second.write(0, torch.full((7000,), 2, dtype=torch.uint8))
        out = torch.empty(5000, dtype=torch.uint8)
        first.read(0, out)
        assert first.path != second.path and out.eq(1).all() and second.reclaimed == 0


def test_a_folder_too_small_or_not_writable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=f"wanted {10**18} bytes"):
        DiskFile.create(tmp_path / "new", 10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Cannot create a swap file in"):
        DiskFile.create(tmp_path / "file", 10)
    monkeypatch.setattr(space, "free_bytes", lambda folder: 99)
    with pytest.raises(StoreError, match="99 bytes"):
        DiskFile.create(tmp_path, 100)
    monkeypatch.setattr(leftovers.os, "open", failing(os.open, errno.EROFS))
    with pytest.raises(StoreError, match=r"Read-only file system.*Check that the folder"):
        DiskFile.create(tmp_path, 10)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_during_allocation_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, code))
    with pytest.raises(StoreError, match=f"errno {code}"):
        DiskFile.create(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []


def test_without_reservation_or_locks_it_works_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, errno.EOPNOTSUPP))
    monkeypatch.setattr(
        leftovers.fcntl, "flock", lambda fd, how: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks"))
    )
    with DiskFile.create(tmp_path, 5000) as file:
        assert file.path.stat().st_size == 5000
        assert "cannot reserve space" in file.note and "no file locks" in file.note
        with DiskFile.create(tmp_path, 10):
            assert file.path.exists()


CHILD = """
import os, signal, sys
import torch
from headrace.store.disk import DiskFile
file = DiskFile.create(sys.argv[1], 1 << 20)
file.write(0, torch.ones(1 << 20, dtype=torch.uint8))
print(file.reclaimed, file.path, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.readline()
"""


def start(folder: Path, then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(folder), then]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_killed_runs_do_not_pile_up_and_live_neighbours_stay(tmp_path: Path) -> None:
    neighbour = start(tmp_path, "wait")
    assert neighbour.stdout is not None and neighbour.stdin is not None and neighbour.stderr is not None
    live = Path(neighbour.stdout.readline().split()[1])
    reclaimed = []
    for _ in range(5):
        run = start(tmp_path, "die")
        out, _ = run.communicate(timeout=60)
        reclaimed.append(int(out.split()[0]))
        assert len(list(tmp_path.iterdir())) == 2 and live.exists()
    assert reclaimed[0] == 0 and all(nbytes >= 1 << 20 for nbytes in reclaimed[1:])
    events = EventLog()
    with DiskFile.create(tmp_path, 10, events=events) as file:
        assert file.reclaimed >= 1 << 20 and live.exists()
        assert "1 swap files of killed runs were removed" in file.note and len(events) >= 1
    neighbour.stdin.write("\n")
    neighbour.stdin.close()
    assert neighbour.wait(timeout=60) == 0 and neighbour.stderr.read() == ""  # its file goes at exit, without noise
    neighbour.stdout.close()
    neighbour.stderr.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("headrace-notes.txt", "other.swap", "headrace"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "headrace-link.swap").symlink_to(tmp_path / "other.swap")
    DiskFile.create(tmp_path, 10).close()
    assert len(list(tmp_path.iterdir())) == 4


def test_threads_write_and_read_side_by_side(tmp_path: Path) -> None:
    size = positional.PIECE * 2 + 777
    wrong: list[int] = []
    with DiskFile.create(tmp_path, 4 * size) as file:

        def work(number: int) -> None:
            for turn in range(3):
                data = torch.full((size,), number * 10 + turn, dtype=torch.uint8)
                file.write(number * size, data)
                out = torch.empty(size, dtype=torch.uint8)
                file.read(number * size, out)
                if not torch.equal(out, data):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and file.bytes_written == 12 * size
