"""Bytes of quantised bases: on each tier, over the link, and on the device as far as they fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headrace
from against_plain import adamw, assert_close, batch, hf_loss, llama, streamed, weights
from headrace.spec.model import BLOCK, TILE
from headrace.spec.placement import DEVICE
from quantised_models import decoded, every, frozen_base

IDS = batch(3, 9, 1, 257)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def base(layers: int, **changes: object) -> torch.nn.Module:
    model: torch.nn.Module = frozen_base(llama(layers, **changes))
    return model


def test_compressed_blocks_stay_near_as_far_as_they_fit() -> None:
    """In half of the device's budget, evenly among the others; the numbers do not change."""
    model = base(16, hidden_size=128, intermediate_size=344, num_key_value_heads=4)
    with streamed(model, quantize=every(), window=2) as (ours, _):
        stored = max(u.stored.nbytes for u in headrace.session(ours).spec.units if u.kind == BLOCK)
    found = []
    for budget in (25 * stored, 33 * stored):
        twin = decoded(model, "nf4")
        options = {"placement": "auto", "device_memory": budget, "window": 2, "quantize": every()}
        with streamed(model, adamw, **options) as (ours, driver):
            session = headrace.session(ours)
            blocks = [u.index for u in session.spec.units if u.kind == BLOCK]
            near = [number for number, unit in enumerate(blocks) if session.placement.weights[unit] == DEVICE]
            found.append(len(near))
            gaps = [b - a for a, b in itertools.pairwise(near)]
            assert max(gaps) - min(gaps) <= 1
            report = session.memory_report()
            assert sum(v for k, v in report["device"].items() if k not in ("peak", "budget")) <= 0.5 * budget + 4096
            assert report["host"]["weights"] == sum(
                -(-u.stored.nbytes // 4096) * 4096
                for u in session.spec.units if session.placement.home(u.index) == "host"
            )  # fmt: skip
            theirs = adamw(twin)
            for _ in range(2):
                for side, optimizer in ((ours, driver), (twin, theirs)):
                    hf_loss(side, IDS).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert_close(weights(ours), weights(twin))
    assert 0 < found[0] < found[1] < 16


@pytest.mark.parametrize("window", [1, 3])
def test_what_crosses_the_link_is_what_is_stored(window: int) -> None:
    """Each pass of a step brings each block's stored bytes once; what the forward left in its slots comes once."""
    with streamed(base(6), quantize=every(), window=window) as (model, driver):
        session = headrace.session(model)
        traffic = []
        for _ in range(3):
            hf_loss(model, IDS).backward()
            driver.step()
            driver.zero_grad()
            session.wait()
            link = session.memory_report()["link"]
            traffic.append((link["to_device"], link["to_host"]))
        units = session.spec.units
        streaming = [u for u in units if u.kind in (BLOCK, TILE) and u.index not in session.spec.matrices[0].tiles]
        left = [u.stored.nbytes for u in streaming][-window:]
        expected = 2 * sum(u.stored.nbytes for u in streaming) - sum(left)
        found = traffic[2][0] - traffic[1][0]
        compressed = [u for u in units if u.compressed]
        assert len(compressed) == 6 and all(u.stored.nbytes < 0.25 * u.weights.nbytes for u in compressed)
        assert found == expected
        assert traffic[2][1] == traffic[1][1] == 0  # gradients of norms stay where norms live: nothing is written back


@pytest.mark.parametrize("home", ["host", "disk", "device"])
def test_memory_holds_stored_bytes_once(home: str, tmp_path: Path) -> None:
    options = {"quantize": every(), "placement": {"weights": home}, "disk_dir": tmp_path, "window": 2}
    with streamed(base(6), **options) as (model, _):
        session = headrace.session(model)
        blocks = [u for u in session.spec.units if u.compressed]
        report, page = session.memory_report(), 4096
        stored = sum(-(-u.stored.nbytes // page) * page for u in session.spec.units if u.kind != "rest")
        decoded_place = -(-max(u.decoded.nbytes for u in blocks) // page) * page
        rest = next(u for u in session.spec.units if u.kind == "rest")
        beside = -(-rest.stored.nbytes // page) * page
        slot = -(-max(u.stored.nbytes for u in session.spec.units if u.kind != "rest") // page) * page
        device = report["device"]["weights"]
        if home == "device":
            assert device == stored + decoded_place + beside and report["host"]["weights"] in (0, beside)
        else:
            assert device == 2 * slot + decoded_place + beside
            assert report[home]["weights"] - stored in (0, beside)
        assert report["disk"]["state"] == 0 and report["host"]["stages"] == 0
