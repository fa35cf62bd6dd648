"""How much memory loading and saving take beside the tensor in hand: every byte that torch allocates is counted."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tiny_checkpoints as tiny
from headrace.checkpoint.export import save_pretrained
from headrace.model.build import load_model

MIB = 2**20
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_local_experts": 8, "num_key_value_heads": 4}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made and still alive; `peak` since `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def reset(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or storage._cdata in self._known | given:
                continue
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _tensors(item: Any) -> list[Tensor]:
    if isinstance(item, Tensor):
        return [item]
    if isinstance(item, (list, tuple)):
        return [tensor for part in item for tensor in _tensors(part)]
    return []


def test_the_counter_counts() -> None:
    with LiveBytes() as memory:
        first = torch.empty(MIB, dtype=torch.uint8)
        view = first[10:]
        second = first + 1
        assert memory.live == 2 * MIB
        del first, second
        assert memory.live == MIB
        del view
        assert memory.live == 0 and memory.peak == 2 * MIB


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_one_tensor_at_a_time(stored: torch.dtype, tmp_path: Path) -> None:
    """Building keeps no weight; filling a fused tensor of 16 MiB in float32 takes a small buffer beside it."""
    folder = tiny.save(tiny.build("mixtral", stored, **WIDE), tmp_path / "a", "10MB")
    with LiveBytes() as memory:
        model = load_model(folder, torch.float32)
        # Constructors allocate (and do not touch) one parameter at a time before it goes to meta.
        assert memory.peak < 17 * MIB and memory.live < MIB
        source = model._headrace_source
        largest = 0
        for name, parameter in model.named_parameters():
            memory.reset()
            before = memory.live
            out = torch.empty(parameter.shape, dtype=parameter.dtype)
            source.read_into(name, out)
            size = out.numel() * out.element_size()
            assert memory.peak - before <= size + 5 * MIB
            largest = max(largest, size)
            del out
        assert largest == 16 * MIB and memory.live < MIB


def test_saving_holds_one_tensor(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("mixtral", **WIDE), tmp_path / "a", "10MB")
    model = load_model(folder)
    with LiveBytes() as memory:
        save_pretrained(model, tmp_path / "b", lambda name: model.get_parameter(name).detach().plain())
        assert 16 * MIB <= memory.peak <= 16 * MIB + 5 * MIB
    before, after = tiny.stored(folder), tiny.stored(tmp_path / "b")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_random_weights_are_drawn_in_place(tmp_path: Path) -> None:
    tiny.config("mixtral", **WIDE).save_pretrained(tmp_path)
    with LiveBytes() as memory:
        model = load_model(tmp_path, torch.bfloat16, random_weights=True)
        for name, parameter in model.named_parameters():
            memory.reset()
            before = memory.live
            out = torch.empty(parameter.shape, dtype=parameter.dtype)
            model._headrace_source.read_into(name, out)
            assert memory.peak - before <= out.numel() * out.element_size() + MIB
            del out
