"""A long run needs no more memory, threads or files at its end than after its first steps."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

import headrace
from tiny_runs import adamw, tiny_llama, wrap

STEPS, SETTLED = 160, 60


def test_nothing_grows_step_by_step(tmp_path: Path) -> None:
    """Lengths that vary, evaluations, reads and saves in between: files, threads, tensors and memory stay level."""
    model = tiny_llama(torch.bfloat16, num_hidden_layers=2)
    model, optimizer = wrap(model, adamw(model), "disk", tmp_path, max_grad_norm=1.0)
    process, seen = psutil.Process(), []
    for step in range(STEPS):
        ids = torch.randint(0, 257, (2, 8 + step * 7 % 33))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            with torch.no_grad():
                model(input_ids=ids, labels=ids).loss.item()
            model.lm_head.weight.detach().sum()
        if step % 40 == 39:
            headrace.session(model).save(tmp_path / "saved")
            assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "swap"]
        if step in (SETTLED, STEPS - 1):
            headrace.session(model).wait()
            gc.collect()
            seen.append((process.num_fds(), threading.active_count(), _tensors(), process.memory_info().rss))
    (files, threads, tensors, rss), (last_files, last_threads, last_tensors, last_rss) = seen
    assert last_files <= files and last_threads <= threads
    assert last_tensors <= tensors + 5
    assert last_rss - rss < 24 << 20, f"{(last_rss - rss) / (STEPS - SETTLED)} bytes a step"
    swap = list((tmp_path / "swap").iterdir())
    assert len(swap) == 1 and os.path.getsize(swap[0]) == headrace.memory_report(model)["disk"]["allocated"]


def _tensors() -> int:
    return sum(_is_tensor(item) for item in gc.get_objects())


def _is_tensor(item: Any) -> bool:
    return issubclass(type(item), torch.Tensor)
