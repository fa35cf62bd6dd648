"""Machine limits read from made-up /proc and /sys, and from the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.hardware.limits import disk_free, file_system, give_back_heap, host_memory, peak_rss, reset_peak_rss

GIB = 1 << 30


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Machine:
    def __init__(self, root: Path, total: int = 64 * GIB, available: int = 50 * GIB) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.write(
            self.proc / "meminfo",
            f"MemTotal: {total // 1024} kB\nMemAvailable:  {available // 1024} kB\nSwapFree: 99 kB\n",
        )

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))

    def group(self, path: str, **files: object) -> None:
        for name, text in files.items():
            self.write(self.sys / "fs/cgroup" / path / name.replace("__", "."), f"{text}\n")

    def memory(self) -> tuple[int, int, int | None, int]:
        found = host_memory(self.proc, self.sys)
        return found.total, found.available, found.cgroup_limit, found.limit


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_cgroup(machine: Machine) -> None:
    assert machine.memory() == (64 * GIB, 50 * GIB, None, 64 * GIB)


def test_v2_takes_the_tightest_group_above(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/user/job\n")
    machine.group("user/job", memory__max="max", memory__current=1 * GIB)
    machine.group("user", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {2 * GIB}")
    machine.group("", memory__max=16 * GIB, memory__current=15 * GIB, memory__stat="inactive_file 0")
    assert machine.memory() == (64 * GIB, 1 * GIB, 8 * GIB, 8 * GIB)


def test_v2_in_a_container_whose_path_is_the_hosts(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/../../docker/abc\n")
    machine.group("", memory__max=4 * GIB, memory__high=3 * GIB, memory__current=1 * GIB)
    assert machine.memory() == (64 * GIB, 2 * GIB, 3 * GIB, 3 * GIB)


def test_v1_and_hybrid(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/x\n")
    machine.group("memory/docker/abc", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=1 * GIB)
    machine.group("memory/docker/abc", memory__stat=f"inactive_file 5\ntotal_inactive_file {GIB // 2}")
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    machine.group("unified/x", memory__max="max")
    assert machine.memory() == (64 * GIB, 3 * GIB // 2, 2 * GIB, 2 * GIB)


def test_a_limit_above_the_machine_is_none_and_an_overfull_group_has_nothing(machine: Machine) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/a\n")
    machine.group("a", memory__max=100 * GIB, memory__current=GIB)
    assert machine.memory() == (64 * GIB, 50 * GIB, None, 64 * GIB)
    machine.group("a", memory__max=GIB, memory__current=2 * GIB)
    assert machine.memory() == (64 * GIB, 0, GIB, GIB)


def test_this_machine(tmp_path: Path) -> None:
    found = host_memory()
    assert 0 < found.available <= found.limit <= found.total
    psutil = pytest.importorskip("psutil")
    assert found.total == psutil.virtual_memory().total
    assert host_memory(tmp_path, tmp_path).total == found.total  # without /proc psutil is asked


def test_disk_free_of_a_folder_to_come(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    assert abs(disk_free(tmp_path / "a" / "b") - stats.f_bavail * stats.f_frsize) < GIB


def test_file_system_of_the_longest_mount(tmp_path: Path) -> None:
    lines = [
        "1 0 0:1 / / rw - ext4 /dev/a rw",
        "2 1 0:2 / /mnt/my\\040disk rw shared:1 - xfs /dev/b rw",
        "3 1 0:3 / /mnt rw - tmpfs t rw",
    ]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "mountinfo").write_text("\n".join(lines))
    kinds = [file_system(path, tmp_path) for path in ("/home/x", "/mnt/my disk/x", "/mnt/my", "/mntx")]
    assert kinds == ["ext4", "xfs", "tmpfs", "ext4"]
    assert file_system("/x", tmp_path / "none") == ""


def test_the_peak_is_this_process_and_can_start_again(tmp_path: Path) -> None:
    ballast = bytearray(b"x") * (200 << 20)
    assert peak_rss() > 200 << 20
    code = "from headrace.hardware.limits import peak_rss; print(peak_rss())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert int(child.stdout) < 150 << 20  # getrusage would count the parent that forked it
    del ballast
    if reset_peak_rss():
        assert peak_rss() < psutil.Process().memory_info().rss + (64 << 20)
    assert peak_rss(tmp_path) > 0


def test_limits_do_not_import_torch() -> None:
    code = "import headrace.hardware.limits, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert child.stdout.split() == ["False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_free_blocks_between_used_ones_go_back() -> None:
    """64 MiB in blocks that the heap keeps, every other one freed and the last one not."""
    blocks = [bytearray(os.urandom(1)) * (100 << 10) for _ in range(640)]
    before = psutil.Process().memory_info().rss
    del blocks[:-1:2]
    give_back_heap()
    assert before - psutil.Process().memory_info().rss > 16 << 20
    assert len(blocks) == 320
