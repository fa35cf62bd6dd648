"""Llama: the full product of windows, rows, recompute, placements, lanes, clipping and accumulation.

Every run makes four steps, one of each kind of accumulation: one batch, three backward calls, one window of
micro-batches of different shapes, one large batch that passes the blocks `rows` at a time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.executor import stream
from parity.cases import AXES, CLIP, PLACEMENTS, Case, case, pairwise, plain, streamed
from parity.reference import check, check_equal


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("activations", ["recompute", "keep", "mixed"])
@pytest.mark.parametrize("rows", AXES["rows"], ids=lambda rows: f"rows-{rows or 'all'}")
@pytest.mark.parametrize("window", AXES["window"], ids=lambda window: f"window-{window}")
def test_product(
    window: int, rows: int | None, activations: str, placement: tuple[str, str], device: str, tmp_path: Path
) -> None:
    """Inline equals plain PyTorch in every gradient; overlapped equals inline in every bit."""
    optimizer = "adamw" if (window + (rows or 0) + len(activations)) % 2 else "sgd"
    for clip in (None, CLIP):
        case = Case(window, rows, activations, *placement, False, clip, optimizer)
        inline = streamed("llama", case, tmp_path, device=device)
        check(inline, plain("llama", optimizer, clip, device=device))
        # No one reads gradients in between, so that updates really run beside the next forward.
        overlapped = streamed("llama", replace(case, overlap=True), tmp_path, look="last", device=device)
        check_equal(inline, overlapped)


TRAVELS = pairwise({name: AXES[name] for name in ("window", "rows", "placement")})


@pytest.mark.parametrize("choice", TRAVELS, ids=lambda choice: str(case(dict(choice))))
def test_inputs_that_wait_in_host_memory(
    choice: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending a block's input away and back changes no bit."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    inline = replace(case(dict(choice)), overlap=False, clip=CLIP, optimizer="adamw")
    there = streamed("llama", inline, tmp_path, device=device)
    check(there, plain("llama", "adamw", CLIP, device=device))
    for overlap in (False, True):
        sent = replace(inline, overlap=overlap, activations="host")
        away = streamed("llama", sent, tmp_path, look="last" if overlap else "always", device=device)
        check_equal(there, away)
