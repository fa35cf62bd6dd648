"""Predictions of an open session's bytes against those of the arenas that it has allocated, over runs of many kinds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from adapted import lora
from against_plain import adamw, batch, hf_loss, llama
from headrace.executor import stream
from headrace.plan.subject import Work
from headrace.session.expected import Expected, expected
from headrace.spec.hardware import Calibration
from headrace.spec.placement import KEEP, RECOMPUTE, SEND
from quantised_models import every
from recorded import H200

ROWS, TOKENS = 3, 32
RATES = replace(H200, calibration=Calibration())
KINDS: dict[str, dict[str, Any]] = {
    "full in RAM": {},
    "resident": {"placement": "device"},
    "on disk": {"placement": "disk"},
    "state on disk": {"placement": {"weights": "host", "state": "disk"}},
    "some blocks resident": {"placement": {"weights": {"*": "host", 1: "device"}, "state": {"*": "host", 1: "device"}}},
    "without clipping": {"max_grad_norm": None, "on_nonfinite": "stop"},
    "updates on both sides": {"update": "both", "moments": "bfloat16"},
    "guarded": {"guard_every": 1},
    "a window": {"micro_batches": 3, "activations": SEND},
    "separate backwards": {"micro_batches": 2, "accumulation": 2, "together": False},
    "inputs in RAM": {"activations": SEND, "dtype": torch.bfloat16},
    "some kept": {"activations": {"*": SEND, 0: RECOMPUTE, -1: KEEP}},
    "rows in parts": {"activations": SEND, "rows": 2, "window": 2},
    "autocast": {"activations": SEND, "autocast": "bfloat16"},
    "LoRA": {"lora": True, "activations": SEND, "dtype": torch.bfloat16},
    "LoRA on nf4": {"lora": True, "quantize": every("nf4"), "dtype": torch.bfloat16},
    "LoRA on int8, resident": {"lora": True, "quantize": every("int8"), "placement": "device"},
}


def ran(folder: Path, kind: dict[str, Any]) -> tuple[headrace.Session, Expected]:
    """Three steps, and what is expected of the session then."""
    options = {"max_grad_norm": 1e9, "accumulation": 1, "disk_dir": folder, "placement": "host", **kind}
    many, together = options.pop("micro_batches", 1), options.pop("together", True)
    model = llama(4, options.pop("dtype", torch.float32))
    model = lora(model) if options.pop("lora", False) else model
    if isinstance(tier := options["placement"], str):
        options["placement"] = {"weights": tier, "state": tier}
    model, optimizer = headrace.wrap(model, adamw(model), device="cpu", **options)
    for step in range(3):
        parts = [batch(ROWS, TOKENS, 3 * step + part) for part in range(many)]
        for window in [parts] if together else [[part] for part in parts]:
            headrace.accumulate(lambda ids: hf_loss(model, ids), window).backward()
        optimizer.step()
        optimizer.zero_grad()
    session = headrace.session(model)
    session.wait()
    return session, expected(session, Work(ROWS, TOKENS, many), RATES)


@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_those_that_were_allocated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    session, found = ran(tmp_path, KINDS[name])
    with session:
        regions, inputs = session._stream.regions, session._stream.inputs
        extra = [arena.nbytes for arenas in regions._extra.values() for arena in arenas]
        host = {part: size for part, size in found.peaks.host.items() if part != "process"}
        device = [found.peaks.device.get(part, 0) for part in ("weights", "state", "grads", "guard")]
        assert sum(host.values()) == pytest.approx(regions.host_arena.nbytes + sum(extra) + inputs.host_bytes, rel=0.03)
        assert sum(device) == pytest.approx(regions.device_bytes, rel=0.03)
        assert host.get("inputs", 0) == pytest.approx(inputs.host_bytes, rel=0.03)
        assert found.peaks.disk_bytes == pytest.approx(regions.disk.nbytes if regions.disk else 0, rel=0.03)
        assert found.work.at_once == KINDS[name].get("rows") and found.step.mean(8) > 0
