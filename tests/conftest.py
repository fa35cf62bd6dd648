"""What all tests share: tests in tests/gpu and tests marked `gpu` are skipped where there is no CUDA device."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests make their own models and tokenizers
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)  # whether an output is a terminal is what some tests are about
CACHE = tempfile.TemporaryDirectory(prefix="headrace-tests-")  # profiles of this machine stay as they are
os.environ["HEADRACE_CACHE_DIR"] = CACHE.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-families", action="store_true", help="tests/parity/test_zoo.py: all options for each class")
    parser.addoption("--device", default="cpu", help="tests/parity: where both sides compute, cpu or cuda")
    parser.addoption("--write-families", action="store_true", help="tests/parity/test_zoo.py: write FAMILIES.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu") or _folder(item) == "gpu"]
    if not on_gpu or _has_cuda():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def fast_collections() -> None:
    """Collections walk what tests of this file make, not the million objects of the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_goes_on() -> Iterator[None]:
    """Before 3.13 Python keeps the lock of all logging for ever where Ctrl-C comes just as it has taken it, and other
    threads that log wait for it: tests of interrupts leave none behind."""
    yield
    lock = getattr(logging, "_lock")  # noqa: B009
    while lock._is_owned():
        lock.release()


def _folder(item: pytest.Item) -> str:
    return Path(item.path).relative_to(Path(__file__).parent).parts[0]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
