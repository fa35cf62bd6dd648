"""The profile of this machine: what is measured, what is kept, and when it is measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headrace
from headrace.base.errors import StoreError
from headrace.hardware import limits, measure, profile, rates
from headrace.spec.hardware import ComputeRates, DiskRates, HardwareProfile, LinkRates, UpdateRates

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of its own, and measurements that only tell that they were made."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    made: list[str] = []

    def noted(name: str, value: object) -> object:
        def take(*given: object) -> object:
            made.append(name)
            return value

        return take

    monkeypatch.setattr(measure, "link", noted("link", LinkRates(1e9, 2e9, 3e9)))
    monkeypatch.setattr(measure, "updates", noted("updates", UpdateRates(1e9)))
    monkeypatch.setattr(measure, "compute", noted("compute", ComputeRates(1e12, 2e11, 3e11, 4e11, 5e10)))
    monkeypatch.setattr(measure, "disk", noted("disk", DiskRates("/d", "ext4", 1e9, 1e9, 1e9, 5)))
    monkeypatch.setattr(profile, "memory_grows", lambda: False)
    return made


def test_a_profile_is_measured_once_and_its_memory_is_read_anew(
    cache: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    first = headrace.profile_hardware("cpu", tmp_path, progress=lambda *each: told.append(each))
    assert cache == ["link", "updates", "compute", "disk"]
    assert [each[0] for each in told] == ["link", "updates", "matrix products and attention", "memory", "disk"]
    assert {count for _, _, count in told} == {5}
    assert first.kind == "cpu" and first.torch == torch.__version__ and first.measured
    assert first.memory.host_available > 0 and first.disk is not None and first.disk.free == limits.disk_free(tmp_path)
    room = limits.HostMemory(100, 50, 80, 80)
    monkeypatch.setattr(limits, "host_memory", lambda: room)
    again = headrace.profile_hardware("cpu", tmp_path)
    assert cache == ["link", "updates", "compute", "disk"], "nothing was measured again"
    assert (again.memory.host_available, again.memory.cgroup_limit, again.memory.device_total) == (50, 80, 80)
    assert again.updates == first.updates
    headrace.profile_hardware("cpu", tmp_path, refresh=True)
    assert len(cache) == 8
    assert headrace.profile_hardware("cpu").disk is None
    told.clear()
    other = headrace.profile_hardware("cpu", tmp_path / "other", progress=lambda *each: told.append(each))
    assert cache[8:] == ["disk"] and told == [("disk", 0, 1)], "all folders share what is measured of the rest"
    assert other.link == first.link and profile.known_profile(CPU, tmp_path / "other") is not None


def test_another_torch_or_a_damaged_file_is_measured_again(cache: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    headrace.profile_hardware("cpu")
    (path,) = profile.cache_path(CPU, None).parent.iterdir()
    assert HardwareProfile.from_json(json.loads(path.read_text())).link.up == 1e9
    for broken in ("", "{}", "[1", '{"version": 1}', json.dumps({**json.loads(path.read_text()), "version": 0})):
        path.write_text(broken)
        before = len(cache)
        headrace.profile_hardware("cpu")
        assert len(cache) == before + 3, broken
    monkeypatch.setattr(torch, "__version__", "9.9")
    headrace.profile_hardware("cpu")
    assert len(list(path.parent.iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    cache: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    assert headrace.profile_hardware("cpu").link.down == 2e9


def test_ctrl_c_keeps_nothing(cache: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(device: torch.device) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "compute", stopped)
    with pytest.raises(KeyboardInterrupt):
        headrace.profile_hardware("cpu")
    assert not profile.cache_path(CPU, None).exists()


def test_a_disk_is_measured_in_its_folder_and_nothing_stays(tmp_path: Path) -> None:
    found = measure.disk(tmp_path / "new", nbytes=measure.SMALLEST_FILE)
    assert found.read > 1e6 and found.write > 1e6 and found.both > 1e6
    assert found.folder == str(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_full_disk_and_no_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        measure.disk(tmp_path / "file" / "in")
    monkeypatch.setattr(measure, "free_bytes", lambda place: measure.SMALLEST_FILE)
    with pytest.raises(StoreError, match="too full to be measured"):
        measure.disk(tmp_path)


def test_rates_are_of_the_order_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real measurements, short ones: every rate is there, and updates leave the thread count as it was."""
    from headrace.kernels import threads

    monkeypatch.setattr(rates, "SHORTEST", 0.0)
    monkeypatch.setattr(rates, "ROUNDS", 1)
    before = threads.threads()
    link = measure.link(CPU, 1 << 20)
    assert link.both >= max(link.up, link.down) > 1e7 and 0 < link.latency < 0.1
    updates = measure.updates(CPU, 1 << 16)
    assert updates.host > 1e5 and updates.host_beside > 1e5 and updates.device == 0.0
    assert threads.threads() == before
