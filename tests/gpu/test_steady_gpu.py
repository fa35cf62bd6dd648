"""Device memory of steps: taken once, independent of depth, and a few hidden states for each micro-batch of a window.

Where copies run beside the compute, a tensor is free again when its copy is over, so that what is allocated at a time
depends on the clock. Exact numbers are therefore taken inline, where the order is that of the program, and overlapped
runs are held to less than the weights of a block, with hidden states that all together are far smaller.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from against_plain import adamw, batch, hf_loss, llama, streamed
from headrace.executor import stream
from headrace.plan import updates
from headrace.spec.model import BLOCK
from headrace.store.memory import Arena

WARM_UP = 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "rows": {"rows": 1}, "kept activations": {"activations": "keep"},
    "updates on both sides": {"update": "both"}, "clipped": {"max_grad_norm": 1e-3, "update": "both"},
    "early updates": {"on_nonfinite": "stop"},
    "disk": {"placement": {"weights": "disk", "state": "disk"}}, "compiled": {"compile": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Updates pass the device in pieces, every block's may be guessed, and garbage is not collected inside."""
    monkeypatch.setattr(stream, "SMALLEST_STASH", 1)
    monkeypatch.setattr(updates, "PIECE", 100_000)
    monkeypatch.setattr(updates, "LOG_SHARE", 100.0)
    gc.collect()
    torch.cuda.empty_cache()
    gc.disable()
    yield
    gc.enable()


def steps_of(model: Any, optimizer: Any, micro_batches: int, rows: int, length: int) -> Callable[[], None]:
    """One step, always of the same batches, with its end."""
    parts = [batch(rows, length, seed=number, vocabulary=257).cuda() for number in range(micro_batches)]

    def step() -> None:
        headrace.accumulate(lambda part: hf_loss(model, part) / micro_batches, parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        headrace.session(model).wait()
        torch.cuda.synchronize()

    return step


def heavy(layers: int, dtype: torch.dtype = torch.float32) -> Any:
    """A block has 3.9 million weights, the hidden states of 2 rows of 16 tokens 16 thousand elements."""
    return llama(layers, dtype, hidden_size=512, intermediate_size=2048)


def taken() -> dict[str, Any]:
    """What torch has taken from the driver: memory of the device, and page-locked memory for itself."""
    stats = torch.cuda.memory_stats()
    found = {key: stats.get(key, 0) for key in ("segment.all.allocated", "reserved_bytes.all.current",
                                                "num_alloc_retries", "num_device_alloc", "num_ooms")}  # fmt: skip
    host = getattr(torch.cuda, "host_memory_stats", dict)()
    return {**found, "page-locked": host.get("num_host_alloc", 0)}


@pytest.mark.parametrize("overlap", [False, True], ids=["inline", "overlap"])
@pytest.mark.parametrize(("name", "micro_batches"), [("plain", 1), *((name, 3) for name in CASES)])
def test_steps_take_no_more_memory_than_the_first(
    name: str, micro_batches: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps after the warm-up: no arena, no page-locked memory, no more from the driver; and each asks torch's
    allocator as often as the one before."""
    made: list[int] = []
    begin = Arena.__init__
    monkeypatch.setattr(Arena, "__init__", lambda self, *rest: (made.append(1), begin(self, *rest))[1])
    options = {"device": "cuda", "overlap": overlap, "disk_dir": tmp_path, "debug": False, **CASES[name]}
    options["accumulation"] = micro_batches
    with streamed(heavy(4), adamw, **options) as (model, optimizer):
        step = steps_of(model, optimizer, micro_batches, 2, 16)
        for _ in range(WARM_UP):
            step()
        arenas, before, report = len(made), taken(), headrace.memory_report(model)
        calls, asked = [], torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(5):
            step()
            calls.append(torch.cuda.memory_stats()["allocation.all.allocated"] - asked)
            asked += calls[-1]
        after, later = taken(), headrace.memory_report(model)
    assert len(made) == arenas >= 2
    assert {key: later["host"][key] for key in later["host"] if key != "peak_rss"} == {
        key: report["host"][key] for key in report["host"] if key != "peak_rss"
    }
    assert calls == calls[:1] * 5
    if overlap:  # what a late copy holds may take one small segment, or several of another stream
        grown = after["reserved_bytes.all.current"] - before["reserved_bytes.all.current"]
        assert grown < 8 << 20 < 4 * 3_900_000
        before, after = ({key: found[key] for key in ("page-locked", "num_alloc_retries")} for found in (before, after))
    assert after == before


def peak(model: Any, micro_batches: int, batch_rows: int, length: int, **options: Any) -> tuple[int, int]:
    """(most bytes that a step after the warm-up allocates, bytes of a block's weights): without what was allocated
    before the session, and without the workspaces that cuBLAS keeps for each thread."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    base = torch.cuda.memory_allocated()
    given = {"device": "cuda", "debug": False, "check_memory": False, **options}
    with streamed(model, adamw, **given) as (ours, optimizer):
        step = steps_of(ours, optimizer, micro_batches, batch_rows, length)
        for _ in range(WARM_UP):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        most, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = now - torch.cuda.memory_allocated()
        blocks = [unit.weights.nbytes for unit in headrace.session(ours).spec.units if unit.kind == BLOCK]
    return most - base - workspaces, blocks[0]


@pytest.mark.parametrize("options", [{}, {"update": "both"}, {"max_grad_norm": 1e-3}, {"rows": 1}], ids=str)
def test_weights_gradients_and_state_of_more_blocks_take_no_device_memory(options: dict[str, Any]) -> None:
    """Overlapped: eight blocks more cost less than a quarter of the weights of one."""
    (few, block), (many, _) = (peak(heavy(layers), 1, 2, 16, **options) for layers in (4, 12))
    assert few > 2 * block  # the slots are there
    assert many - few < block // 4


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_hidden_states_of_more_blocks_take_no_device_memory(dtype: torch.dtype, micro_batches: int) -> None:
    """Inline: eight blocks more cost less than a quarter of one hidden state, which the host keeps for each."""
    tokens, hidden = 2 * 1024, 256
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "max_position_embeddings": 1024}
    few, many = (
        peak(llama(layers, dtype, **sizes), micro_batches, 2, 1024, overlap=False)[0] for layers in (4, 12)
    )  # fmt: skip
    state = micro_batches * tokens * hidden * dtype.itemsize
    assert few > 3 * state
    assert many - few < state // 4


BUFFERS = {torch.bfloat16: 6, torch.float32: 6}
"""Hidden states that a micro-batch adds to the peak, which is in the backward of the head: three input slots that fill
ahead, the gradient that adds up in fp32, what the final norm keeps (an fp32 copy beside input and output)."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_micro_batch_more_costs_a_few_hidden_states(dtype: torch.dtype) -> None:
    """Inline: a window of four against one of one; the difference is as much for each micro-batch. They are large
    beside the workspaces of cuBLAS, of which each micro-batch's thread has one until they meet at the first block."""
    rows, length, hidden = 8, 4096, 256
    tokens = rows * length
    sizes = {"hidden_size": hidden, "intermediate_size": 256, "max_position_embeddings": length}
    one, four = (peak(llama(4, dtype, **sizes), count, rows, length, overlap=False)[0] for count in (1, 4))
    grown = (four - one) / (3 * tokens * hidden * dtype.itemsize)
    assert 1 < grown < BUFFERS[dtype], f"{grown:.2f} hidden states for each micro-batch"
