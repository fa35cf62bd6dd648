"""A GPU that runs out of memory in the middle of training: blocks leave it, and no bit changes.

Nothing bounds the batches beforehand here, and the allocator refuses what a long batch takes. How much that is has been
measured in a run without a limit, so that what is refused is known: limits lie half-way between what must fit and what
must not, hundreds of MiB from both, where torch's pages of 20 MiB do not matter. Needs a CUDA device.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from against_plain import adamw, assert_equal, weights
from headrace.session.surviving import surviving

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, SHORT, LONG = 16, 64, 1024
LENGTHS = (SHORT, SHORT, LONG, LONG, SHORT)
MARGIN = 100 << 20
"""Bytes that a limit is away, at least, from what must fit and what must not."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # where it only warns, attention adds in any order
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@functools.cache
def model() -> Any:
    """Blocks of 450 MiB with their state and gradients, whose MLP takes more than anything outside the blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=16, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).bfloat16()


class Run:
    """Some steps, with what they take of the device beside what the open session has there. `most`: bytes that they may
    take at most; None: no limit. `scratch`: bytes that long steps take before their forward."""

    def __init__(
        self, max_grad_norm: float | None, most: int | None = None, scratch: int = 0, lengths: tuple[int, ...] = LENGTHS
    ) -> None:
        plain = copy.deepcopy(model())
        options = {"device_memory": "8GiB", "check_memory": False, "compile": False, "max_grad_norm": max_grad_norm}
        ours, driver = headrace.wrap(plain, adamw(plain), device="cuda", **options)
        with headrace.session(ours) as session:
            gc.collect()
            torch.cuda.empty_cache()
            self._base, self._session = torch.cuda.memory_allocated(), session
            self.leaves = session._trial.moving.most()
            """Bytes of blocks that may leave the device."""
            self.blocks, self.outside, self.passes, self.updates = [list[int]() for _ in range(4)]
            """Most bytes of each step: until the last block's forward is over, from there until its backward begins, in
            forward and backward, and in the update."""
            self.early = list[int]()
            """Moves before the forward of each step was over."""
            if most is not None:  # now: the plan must not see a smaller device
                total = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + most) / total)
            ours.model.norm.register_forward_pre_hook(self._forward_over)
            for step, tokens in enumerate(lengths):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(0, 512, (ROWS, tokens), generator=generator).cuda()

                def gradients(ids: torch.Tensor = ids) -> torch.Tensor:
                    if scratch and ids.shape[1] == LONG:
                        torch.empty(scratch, dtype=torch.uint8, device="cuda")
                    loss = ours(input_ids=ids, labels=ids).loss
                    loss.backward()
                    return loss.detach()

                torch.cuda.reset_peak_memory_stats()
                surviving(session, gradients) if scratch else gradients()
                self.passes.append(max(self.blocks[-1], self._taken()))
                torch.cuda.reset_peak_memory_stats()
                driver.step()
                driver.zero_grad()
                session.wait()
                self.updates.append(self._taken())
            self.events = [event for event in session.events if event.kind in ("moved", "rows", "out of memory")]
            self.weights = weights(ours)

    def _forward_over(self, norm: Any, args: tuple[torch.Tensor, ...]) -> None:
        self.blocks.append(self._taken())
        torch.cuda.reset_peak_memory_stats()
        self.early.append(sum(event.kind == "moved" for event in self._session.events))
        args[0].register_hook(lambda grad: self.outside.append(self._taken()))

    def _taken(self) -> int:
        return torch.cuda.max_memory_allocated() - self._base


@functools.cache
def free(max_grad_norm: float | None) -> Run:
    Run(max_grad_norm, lengths=(SHORT,))  # libraries take their workspaces
    return Run(max_grad_norm)


@pytest.mark.parametrize(
    ("where", "max_grad_norm"), [("forward", None), ("backward", None), ("backward", 1.0), ("outside", 1.0)]
)
def test_a_batch_that_runs_out_of_memory_is_survived(where: str, max_grad_norm: float | None) -> None:
    """In a block's forward, which short batches and updates never need; in the backward of one, when all that came
    before it did fit; and outside the blocks, in a loop that repeats its steps."""
    whole = free(max_grad_norm)
    assert not whole.events
    fits = max(*whole.passes[:2], *whole.updates)
    forward, backward = min(whole.blocks[2:4]), min(whole.passes[2:4])
    before, needed = max(*whole.blocks, *whole.outside, fits), max(whole.passes)
    most, fails, scratch = {
        "forward": ((fits + forward) // 2, forward, 0),
        "backward": ((before + backward) // 2, backward, 0),
        "outside": (needed + MARGIN, needed + MARGIN + whole.leaves // 2, needed + MARGIN + whole.leaves // 2),
    }[where]
    least = {"forward": fits, "backward": before, "outside": needed}[where]
    numbers = (whole.blocks, whole.outside, whole.passes, whole.updates, whole.leaves)
    assert least + MARGIN <= most <= fails - MARGIN, numbers
    assert max(whole.outside) + MARGIN <= forward, numbers  # what is outside fits once the forward did
    assert max(needed, scratch) + MARGIN <= most + whole.leaves, numbers  # blocks are enough
    short = Run(max_grad_norm, most, scratch)
    assert {event.kind for event in short.events} == {"moved"}
    assert all("ran out of memory" in event.text for event in short.events)
    assert (short.early[2] > 0) == (where != "backward")
    assert_equal(short.weights, whole.weights)
