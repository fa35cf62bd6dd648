"""Traces by CUDA events, rates of the lanes, and `headrace bench` on a GPU."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
import tiny_runs
from cpu.test_cli_world import headrace as run
from headrace.executor.trace import EVENT_LANES
from headrace.hardware.used import device_used
from headrace.report.lanes import read_bars
from headrace.session.measuring import lane_rates
from headrace.session.samples import Samples

CLOCKS = 2e-4
"""Seconds by which a time of the host's clock and one of an event may differ."""


def wide_llama(**options: Any) -> tuple[Any, Any]:
    """A bf16 model whose blocks take long enough to be seen: 5 million weights each."""
    model = tiny_runs.tiny_llama(torch.bfloat16, hidden_size=1024, intermediate_size=1024, num_hidden_layers=6)
    tiers = {"weights": "host", "state": "host"}
    return headrace.wrap(model, tiny_runs.adamw(model), device="cuda", placement=tiers, max_grad_norm=1.0, **options)


def train(model: Any, optimizer: Any, steps: int) -> torch.Tensor:
    ids = torch.randint(0, 257, (8, 256), generator=torch.Generator().manual_seed(3)).cuda()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("update", ["host", "both", "device"])
def test_events_say_when_each_op_ran(update: str) -> None:
    """Every op once, one at a time on each lane, none before what it waits for has ended, all within the wall's time;
    copies take as long as their bytes need."""
    model, optimizer = wide_llama(update=update)
    with headrace.session(model) as session:
        train(model, optimizer, 2)
        start = torch.cuda.Event(enable_timing=True)
        with session.record_trace() as trace:
            start.record()
            train(model, optimizer, 3)
            session.wait()
            torch.cuda.synchronize()
            end = torch.cuda.Event(enable_timing=True)
            end.record()
        spans = trace.spans()
        wall = start.elapsed_time(end) / 1e3
        wanted = Counter((number, op) for number, program in enumerate(trace.programs) for op in program.ops)
        assert Counter((span.pass_, span.op) for span in spans) == wanted
        for lane in {span.lane for span in spans}:
            own = [span for span in spans if span.lane == lane]
            assert all(first.end <= second.start + CLOCKS for first, second in pairwise(own)), lane
            assert sum(span.seconds for span in own) <= wall + CLOCKS * len(own), lane
        ends = {(span.pass_, span.op.index): span.end for span in spans}
        early = [span for span in spans for i in span.op.after if span.start < ends[span.pass_, i] - CLOCKS]
        assert early == []
        copies = [span for span in spans if span.op.verb == "LOAD" and span.nbytes > 1 << 22]
        assert copies and all(1e9 < span.nbytes / span.seconds < 1e12 for span in copies)
        assert {span.lane for span in spans if span.op.verb == "UPDATE"} <= {"host", "device"}
        assert {span.lane for span in spans} & set(EVENT_LANES) >= {"h2d", "d2h", "compute"}


def test_a_trace_makes_no_step_wait() -> None:
    """Tracing adds no wait for the device: torch's own detection sees no more of them with it than without."""
    import warnings

    model, optimizer = wide_llama()
    with headrace.session(model) as session:
        train(model, optimizer, 2)

        def waits() -> int:
            session.wait()
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    train(model, optimizer, 2)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            return sum("synchroniz" in str(warning.message) for warning in found)

        plain = waits()
        with session.record_trace() as trace:
            traced = waits()
        assert trace.spans() and traced <= plain


@pytest.mark.parametrize("update", ["host", "both", "device"])
def test_rates_of_the_lanes(update: str) -> None:
    """Plausible for any link and any memory, and training goes on with finite losses."""
    model, optimizer = wide_llama(update=update)
    with headrace.session(model) as session:
        train(model, optimizer, 2)
        found = lane_rates(session)
        assert found.up and found.down and found.both
        assert all(1e9 < rate < 1e12 for rate in (found.up, found.down, found.both))
        assert max(found.up, found.down) * 0.5 < found.both < (found.up + found.down) * 1.1
        assert bool(found.host) == (update != "device") and bool(found.device) == (update != "host")
        assert bool(found.updates) == (update == "both")
        if found.updates and found.host and found.device:  # which share the host's memory
            assert found.updates < 1.2 * (found.host + found.device)
        assert torch.isfinite(train(model, optimizer, 2)) and session.last_grad_norm is not None


def test_bench_on_a_gpu() -> None:
    """The whole command: compiled blocks, both kinds of clipping, device peaks, plain PyTorch beside it."""
    works = ("--work", "2x64", "--work", "2*2x64@none", "--against", "torch")
    code, printed = run("bench", "tiny", *works, "--placement", "host", "--steps", "3", "--json", "--no-profile")
    assert code == 0, printed
    report = json.loads(printed[printed.index("{\n") : printed.rindex("}\n") + 1])
    assert report["compile"] and report["machine"]["kind"] == "cuda"
    for work in report["works"]:
        peaks = work["peaks"]
        assert peaks["device"] >= peaks["device_reserved"] > 0
        assert 0 <= work["idle"] < 1 and work["utilisation"] > 0
        predicted = work["predicted"]
        assert predicted["device_bytes"]["measured"] == peaks["device"] and predicted["device_bytes"]["predicted"] > 0
        assert {"link up", "link down", "link both ways", "compute"} <= {bound["name"] for bound in work["roofline"]}
        assert {"h2d", "d2h", "compute", "host"} <= set(work["lanes"])
    assert [peer["system"] for peer in report["against"]] == ["torch", "torch"]
    assert all(peer["ratio"] > 0 and peer["device_peak"] > 0 for peer in report["against"])


def test_nvml_sees_what_torch_reserves() -> None:
    """The card's figure, or this process's own, holds at least what torch has reserved."""
    held = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    own, card = device_used(torch.device("cuda"))
    assert card is not None and card >= torch.cuda.memory_reserved() >= held.nbytes
    assert own is None or own >= torch.cuda.memory_reserved()


def test_the_option_trace_and_what_a_record_says(tmp_path: Path) -> None:
    """Files of the first two steps, whose compute does not overlap itself; samples of memory, heat and power."""
    model, optimizer = wide_llama(trace=2, trace_dir=tmp_path)
    session = headrace.session(model)
    samples = Samples(session)
    train(model, optimizer, 4)
    torch.cuda.synchronize()
    taken = samples.take()
    session.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.json", "step-00000002.json"]
    bars = read_bars(tmp_path / "step-00000002.json")
    compute = sorted((bar.start, bar.end) for bar in bars if bar.lane == "compute")
    assert len(compute) > 12 and all(first[1] <= second[0] + CLOCKS for first, second in pairwise(compute))
    assert {"h2d", "d2h", "compute"} <= {bar.lane for bar in bars}
    assert 0 < taken["device_bytes"] <= taken["device_peak"] and taken["link_up"] > 0 and taken["link_down"] > 0
    if samples.sensors.gpu_celsius() is not None:  # NVML tells of this GPU
        assert 10 < taken["gpu_celsius"] < 110 and taken["gpu_watts"] > 10
