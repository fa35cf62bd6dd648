"""Compiles the loops of `loops` when first needed and runs them, one call at a time in the whole process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.backends import BackendUnavailable, note_fallback
from headrace.kernels.numba import loops
from headrace.kernels.threads import running, threads

Array = np.ndarray[Any, np.dtype[Any]]

# Note [one parallel loop at a time]: Numba's workqueue layer, the only one where neither TBB nor OpenMP is installed,
# aborts the process when a second Python thread enters a parallel loop. Its other layers would let both in, at the
# cost of twice the threads. The lock `running` is held for the whole loop, which itself runs without the GIL.
_owner: int | None = None  # the process whose threads these are; None before the first loop
_dispatchers: dict[str, Any] = {}
_numba: Any = importlib.import_module("numba")  # untyped


def run(loop: Callable[..., None], *arguments: Any) -> None:
    """Run `loop` on arrays and scalars. Raises BackendUnavailable when Numba cannot run it; nothing ran then."""
    global _owner
    if _owner is None:
        _owner = os.getpid()
    elif _owner != os.getpid():  # the lock may be held by nobody here, and the OpenMP layer aborts such a child
        raise BackendUnavailable("this process is a fork of one that runs Numba, whose threads do not survive a fork")
    with running:
        # Numba keeps the number of threads per calling thread, and user code may have its own.
        torch_before = torch.get_num_threads()
        before = _numba.get_num_threads()
        _numba.set_num_threads(max(1, min(threads(), _numba.config.NUMBA_NUM_THREADS)))
        try:
            _call(loop, arguments)
        finally:
            _numba.set_num_threads(before)
            if torch.get_num_threads() != torch_before:
                # Numba's OpenMP layer sets the calling thread's count when it starts, and torch's sums depend on it.
                torch.set_num_threads(torch_before)


def run_sums(loop: Callable[..., None], *arguments: Array) -> Tensor:
    """Run a `loop` that leaves one partial sum per chunk; returns their total as a 0-dim tensor."""
    sums = np.zeros(-(-arguments[0].shape[0] // loops.CHUNK), np.float64)
    run(loop, *arguments, sums)
    return torch.tensor(sums.sum(), dtype=torch.float64)


def _call(loop: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # The loops raise nothing themselves: an exception comes from compiling or from the cache, before any element
    # was written. A cache may be damaged, full or read-only; then the loop is compiled for this process alone.
    name = loop.__name__
    try:
        if name not in _dispatchers:
            _dispatchers[name] = _compile(loop, cache=True)
        _dispatchers[name](*arguments)
    except Exception as cache_error:
        try:
            _dispatchers[name] = _compile(loop, cache=False)
            _dispatchers[name](*arguments)
            note_fallback("cpu", f"Numba compiles anew in every process: {cache_error}")
        except Exception as error:
            raise BackendUnavailable(f"Numba could not compile {name}: {type(error).__name__}: {error}") from error


def _compile(loop: Callable[..., None], cache: bool) -> Any:
    # error_model="numpy": a division that may raise would keep LLVM from vectorising the loop.
    options: dict[str, Any] = {"parallel": True, "nogil": True, "error_model": "numpy", "cache": cache}
    if loop.__name__.endswith("squares"):
        options["fastmath"] = {"reassoc"}
    return _numba.njit(**options)(loop)


def array(tensor: Tensor) -> Array:
    """The memory of a CPU tensor as an array; bf16 as uint16."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    values: Array = tensor.numpy()
    return values
