"""Files and folders that appear complete or not at all, under kills, full disks and quotas."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.errors import StoreError
from headrace.base.events import EventLog
from headrace.files import atomic, space
from headrace.files.atomic import replacing_file, replacing_folder, sweep_temporary, write_file

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
SLOW_WRITER = """
import os, signal, sys
from headrace.files.atomic import replacing_folder
stop = int(sys.argv[2])
with replacing_folder(sys.argv[1]) as folder:
    for number in range(9):
        if number == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / f"part{number}").write_text("new" * 1000)
if stop == 9:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_a_kill_at_any_point_leaves_old_or_new_and_no_growth(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.mkdir()
    (target / "part0").write_text("old")
    for stop in range(10):
        done = subprocess.run([sys.executable, "-c", SLOW_WRITER, str(target), str(stop)], check=False, env=ENVIRONMENT)
        assert done.returncode == -signal.SIGKILL
        if stop < 9:
            assert content(target) == {"part0": "old"}
        assert len(list(tmp_path.iterdir())) <= 2
    assert content(target) == {f"part{number}": "new" * 1000 for number in range(9)}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_leftovers_are_reported_and_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    dead = tmp_path / f"{atomic.TEMPORARY}99999-abc"
    dead.mkdir()
    (dead / "big").write_bytes(b"x" * 100_000)
    events = EventLog()
    with replacing_folder(tmp_path / "a", events=events) as first:
        (first / "f").write_text("a")
        assert sweep_temporary(tmp_path).paths == ()
        with replacing_folder(tmp_path / "b") as second:
            (second / "f").write_text("b")
        assert first.exists()
    assert [event.kind for event in events] == ["reclaimed"]
    assert next(iter(events)).numbers["bytes"] >= 100_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    for text in ("one", "two"):
        with replacing_folder(tmp_path / "out") as folder:
            (folder / text).write_text(text)
            (folder / "sub").mkdir()
            (folder / "sub" / "f").write_text(text)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sub", "two"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_content_replaced_by_a_killed_write_comes_back(tmp_path: Path) -> None:
    old = tmp_path / f"{atomic.REPLACED}deadbeef-my-run"
    old.mkdir()
    (old / "f").write_text("precious")
    events = EventLog()
    sweep_temporary(tmp_path, events)
    assert content(tmp_path / "my-run") == {"f": "precious"}
    assert [event.kind for event in events] == ["recovered"]
    shutil.copytree(tmp_path / "my-run", old)
    sweep_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["my-run"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_or_quota_keeps_the_old_content(tmp_path: Path, code: int) -> None:
    write_file(tmp_path / "file", "old")
    with replacing_folder(tmp_path / "folder") as folder:
        (folder / "f").write_text("old")

    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(StoreError, match=rf"errno {code}.*Free space"), replacing_file(tmp_path / "file") as temporary:
        half(temporary)
    with pytest.raises(StoreError, match=rf"errno {code}"), replacing_folder(tmp_path / "folder") as folder:
        half(folder / "f")
    assert (tmp_path / "file").read_text() == "old" and content(tmp_path / "folder") == {"f": "old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_full_disk_at_sync_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", "old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="disk is full"):
        write_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing_folder(tmp_path / "out"):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_first_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "free_bytes", lambda folder: 8_000_000)
    space.need_space(tmp_path, 8_000_000)
    with pytest.raises(StoreError, match=r"wanted 8000001 bytes.*8000000 bytes"):
        space.need_space(tmp_path, 8_000_001)
    with pytest.raises(StoreError, match="too small for out"), replacing_folder(tmp_path / "out", nbytes=10**9):
        raise AssertionError("must not start")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_of_eight_megabytes(tmp_path: Path) -> None:
    """The previous checkpoint of 3 MB survives one that does not fit, with and without an estimate."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with replacing_folder(tmp_path / "run", nbytes=3 << 20) as folder:
            (folder / "f").write_bytes(b"1" * (3 << 20))
        with pytest.raises(StoreError, match="too small"), replacing_folder(tmp_path / "run", nbytes=6 << 20):
            raise AssertionError("must not start")
        with pytest.raises(StoreError, match="disk is full"), replacing_folder(tmp_path / "run") as folder:
            (folder / "f").write_bytes(b"2" * (6 << 20))
        assert (tmp_path / "run" / "f").read_bytes() == b"1" * (3 << 20)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_linked_target_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with replacing_folder(tmp_path / "link") as folder:
        (folder / "f").write_text("new")
    assert (tmp_path / "link").is_symlink() and content(tmp_path / "real") == {"f": "new"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot write .*file/run"):
        write_file(tmp_path / "file" / "run", "x")
