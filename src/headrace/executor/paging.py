"""Paging of activations: what autograd saves of a block waits in host memory from its forward to its backward.

[Note: Pages] All that autograd saves while one block runs is a page. Its tensors are copied out as they are saved, on a
stream of their own, and the device's memory is given up when the next block but one begins: by then the copies had a
whole block's time, and the compute stream waits for them, so that memory is reused in order and the peak is the same
however far the CPU runs ahead. When the backward reaches the first tensor of a page, the page before it is brought back
as well, beside the compute. Nothing waits on a thread, so nothing can deadlock.

Tensors that share bytes (a matrix and its transpose, one mask for all blocks) are copied once; each comes back with its
own shape, strides and alignment, so that kernels run as they would have.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError, StepError
from headrace.base.events import EventLog
from headrace.base.units import format_bytes, parse_bytes
from headrace.executor.inputs import version_mark
from headrace.executor.pages import Copy, Kept, Key, Page, Paged, extent_of
from headrace.executor.pool import HostPool, Place
from headrace.hardware import limits
from headrace.model.blocks import find_blocks
from headrace.model.handles import check_unwritten
from headrace.model.parked import is_parked

FREE_SHARE = 0.9
"""Share of the available host memory that is used at most when no `host_memory` is given."""


def offload_activations(
    model: nn.Module, *, blocks: Any = None, keep_last: int = 1, min_bytes: int | str = 1 << 16, pin: bool = True,
    host_memory: int | str | None = None,
) -> ActivationPaging:  # fmt: skip
    """Page the saved activations of a model's blocks to host memory. Weights and optimizer stay as they are.

    `paging = headrace.offload_activations(model)`, then `with paging:` around forwards (or a whole loop, or a Trainer's
    `train()`); gradients are plain training's, bit for bit. `blocks`: as for `headrace.wrap`. `keep_last`: blocks at
    the end whose activations stay on the device, since the backward begins with them. `min_bytes`: smaller tensors
    stay. `pin`: page-lock the host memory (on a GPU). `host_memory`: most bytes of it; what finds no room stays.

    The pool of host memory belongs to the returned object and is used again in every step. On the CPU activations move
    from memory to memory, which saves nothing. Raises OptionError, and StepError for a model that Headrace streams.
    """
    if getattr(model, "_headrace_session", None) is not None:
        raise StepError(
            "offload_activations was given a model that Headrace streams",
            "its session decides what becomes of activations: kept, recomputed, or from inputs in host memory",
            "Use headrace.wrap alone; activations='host' sends inputs there",
        )
    if any(is_parked(parameter) for parameter in model.parameters()):
        raise StepError(
            "offload_activations was given a model that is not in memory",
            "headrace.load_model leaves weights in their files, and only headrace.wrap trains them from there",
            "Load the model with from_pretrained, or wrap it with activations='host' instead",
        )
    found = [block for stack in find_blocks(model, blocks) for block in stack.blocks]
    if type(keep_last) is not int or not 0 <= keep_last < len(found):
        raise OptionError(
            f"keep_last={keep_last!r} leaves no block to page", f"the model has {len(found)} blocks",
            f"Use a whole number from 0 to {len(found) - 1}",
        )  # fmt: skip
    most = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    return ActivationPaging(found, keep_last, parse_bytes(min_bytes, "min_bytes"), pin, most)


class ActivationPaging:
    """See `offload_activations`. A context manager that may be entered again and again."""

    def __init__(
        self, blocks: list[nn.Module], keep_last: int, min_bytes: int, pin: bool, host_memory: int | None
    ) -> None:
        self.events = EventLog()
        """What was decided, and what fell back."""
        self.sent_bytes = 0
        """Bytes copied to the host so far."""
        self._blocks, self._min_bytes, self._host_memory = blocks, min_bytes, host_memory
        self._kept = {id(block) for block in blocks[len(blocks) - keep_last :]}
        self._kind, self._pin = "", pin
        self._pool = HostPool(False, self._room)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._handles: list[Any] = []
        self._page: Page | None = None
        """The page of the block under way."""
        self._leaving: list[Page] = []
        self._known: dict[Key, Copy] = {}
        """Copies of tensors that are on the device still, so that their addresses mean them and nothing else."""
        self._at: Callable[[], Page | None] = lambda: None
        """The page that the backward is at."""
        self._loaded: weakref.WeakSet[Copy] = weakref.WeakSet()
        self.events.add("offload", f"activations of {len(blocks) - keep_last} of {len(blocks)} blocks wait on the host",
                        blocks=len(blocks), keep_last=keep_last)  # fmt: skip

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the pool has."""
        return self._pool.nbytes

    def __enter__(self) -> ActivationPaging:
        if self._hooks is not None:
            raise StepError("activations are paged already", "this object was entered twice", "Enter it once")
        self._look_at_device()
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            text = "hooks for saved tensors are set already (a paging, save_on_cpu): inside, torch calls ours alone"
            self.events.once("outer", "offload", text, blocks=len(self._blocks))
        self._handles = [b.register_forward_pre_hook(_uncompiled(self._begin)) for b in dict.fromkeys(self._blocks)]
        self._handles.append(self._blocks[-1].register_forward_hook(_uncompiled(self._end)))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def _look_at_device(self) -> None:
        """The model may have been moved since."""
        kind = next((p.device.type for block in self._blocks for p in block.parameters()), "cpu")
        if kind != self._kind:
            self._kind, self._pool = kind, HostPool(self._pin and kind == "cuda", self._room)
            if kind != "cuda":
                self.events.once("cpu", "offload", f"the model is on the {kind}: pages move within the same memory",
                                 blocks=len(self._blocks))  # fmt: skip

    def __exit__(self, *exc: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__()
        self._hooks = None
        for handle in self._handles:
            handle.remove()
        self._page = None
        self._settle(0)

    # -- forward ----------------------------------------------------------------------------------------------------

    def _begin(self, block: nn.Module, *given: Any) -> None:
        """A block is about to run: what is saved from now on belongs to its page."""
        if _in_backward():
            return
        last = next(iter(self._leaving[::-1]), None)
        self._page = None
        self._settle(1)
        if id(block) in self._kept:
            return
        held = [*block.parameters(), *block.buffers()]
        previous: Callable[[], Page | None] = (lambda: None) if last is None else weakref.ref(last)
        self._page = Page(previous, {tensor.untyped_storage().data_ptr() for tensor in held})

    def _end(self, *given: Any) -> None:
        """The last block has run: what follows is needed first."""
        if not _in_backward():
            self._page = None
            self._settle(0)

    def _settle(self, count: int) -> None:
        """Give up the device memory of all pages but the last `count`; the compute waits for their copies."""
        for page in self._leaving[: len(self._leaving) - count]:
            for device, event in page.sent.items():
                torch.cuda.current_stream(device).wait_event(event)
            for key in page.leaving:
                if not any(key in other.leaving for other in self._leaving if other is not page):
                    self._known.pop(key, None)
            page.leaving.clear()
        del self._leaving[: len(self._leaving) - count]

    def _pack(self, tensor: Tensor) -> Kept | Paged:
        alias, page = tensor.detach(), self._page  # the tensor itself would hold its own graph: a cycle
        copy = self._copy_of(tensor, alias, page) if page is not None and not _in_backward() else None
        if copy is None or page is None:
            return Kept(alias, alias._version)
        return Paged(page, copy, alias.shape, alias.stride(), version_mark(tensor))

    def _copy_of(self, tensor: Tensor, alias: Tensor, page: Page) -> Copy | None:
        if not self._may_leave(tensor, page):
            return None
        extent = extent_of(alias.shape, alias.stride())
        gaps = extent > alias.numel()
        source = alias if gaps else alias.as_strided((extent,), (1,), alias.storage_offset())
        if source.numel() * source.itemsize < self._min_bytes:
            return None
        key = (alias.device, alias.data_ptr(), alias.dtype, source.shape, source.stride(), alias._version)
        copy = self._known.get(key)
        if copy is None:
            place = self._pool.take(source.numel() * source.itemsize)
            if place is None:
                text = "there is no room for more pages in host memory: the others stay on the device"
                self.events.once("full", "offload", text, host_memory=format_bytes(self.host_bytes))
                return None
            copy = self._known[key] = self._send(source, place, gaps)
        if key not in page.leaving:
            page.leaving[key] = alias
            page.copies.append(weakref.ref(copy))
            if page not in self._leaving[-1:]:
                self._leaving.append(page)
            self._mark_sent(page, alias.device)
        return copy

    def _may_leave(self, tensor: Tensor, page: Page) -> bool:
        """Activations, and nothing that is on the device anyway: weights, buffers, views of them, casts of weights."""
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == self._kind
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        root = tensor if tensor._base is None else tensor._base
        if isinstance(root, nn.Parameter) or tensor.untyped_storage().data_ptr() in page.resident:
            return False
        node = root.grad_fn
        if type(node).__name__ == "ToCopyBackward0" and node is not None:  # autocast's, which its cache may hold
            return not isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)
        return True

    def _send(self, source: Tensor, place: Place, gaps: bool) -> Copy:
        self.sent_bytes += place.memory.numel()
        if self._pool.note:
            self.events.once("pageable", "pageable", self._pool.note, bytes=format_bytes(self._pool.nbytes))
        side = self._side(source.device)
        if side is None:
            return Copy(source, place, gaps)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            return Copy(source, place, gaps)

    def _mark_sent(self, page: Page, device: torch.device) -> None:
        side = self._side(device)
        if side is not None:
            page.sent.setdefault(device, torch.cuda.Event()).record(side)

    def _side(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _room(self) -> int:
        if self._host_memory is not None:
            return self._host_memory - self._pool.nbytes
        return int(limits.host_memory().available * FREE_SHARE)

    # -- backward ---------------------------------------------------------------------------------------------------

    def _unpack(self, saved: Kept | Paged) -> Tensor:
        if isinstance(saved, Kept):
            check_unwritten(saved.tensor, saved.version, saved.tensor.shape)
            return saved.tensor
        check_unwritten(*saved.mark, saved.shape)
        copy = saved.copy
        if self._at() is not saved.page:
            self._arrive(saved.page)
        if copy.loaded is None:  # a page that the backward has left
            self._load([copy])
        copy.use()
        assert copy.loaded is not None
        return copy.loaded.as_strided(saved.shape, saved.stride)

    def _arrive(self, page: Page) -> None:
        """The backward has come to a page: it and the next one that it will need are brought, others are let go."""
        self._settle(0)
        self._at = weakref.ref(page)
        before = page.previous()
        near = page.alive()[::-1] + (before.alive()[::-1] if before is not None else [])
        for copy in list(self._loaded):
            if copy not in near:
                copy.drop()
                self._loaded.discard(copy)
        self._load([copy for copy in near if copy.loaded is None])

    def _load(self, copies: list[Copy]) -> None:
        for copy in copies:
            copy.allocate()
        for device in {copy.device for copy in copies}:
            side = self._side(device)
            if side is not None:  # what was computed so far may use the memory that they come to
                side.wait_stream(torch.cuda.current_stream(device))
            for copy in copies:
                if copy.device == device:
                    copy.load(side)
                    self._loaded.add(copy)


def _in_backward() -> bool:
    """A backward runs in this thread: a checkpoint recomputes in it, and what that saves is used at once."""
    return int(torch._C._current_graph_task_id()) != -1


def _uncompiled(action: Callable[..., None]) -> Callable[..., None]:
    """A hook that dynamo leaves alone."""

    @functools.wraps(action)
    def hook(module: nn.Module, *given: Any) -> None:
        action(module, *given)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook
