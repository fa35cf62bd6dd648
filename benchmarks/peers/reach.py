"""A probe: how close a plain overlapped loop gets to what the machine allows, on tied or untied Qwen shapes.

Weights, fp32 masters and moments live in host memory; each block's weights pass through one of three slots on the GPU,
its gradients through one of two. It is no trainer: no clipping, gradients in 16 bits also where they are summed, a loss
without edge cases, the embedding and the head resident. Headrace is exact and is to be faster.
"""

from __future__ import annotations

import queue
import threading
from importlib import import_module
from typing import Any

import numba
import numpy as np
import peer
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from headrace.kernels.threads import available_threads

SLOTS, CHUNK = 3, 4096


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    return types.uint32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def float_of(context: Any, value: Any) -> Any:
    return types.float32(types.uint32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@numba.njit(nogil=True, fastmath=True, parallel=True)
def adamw(high, low, first, second, gradient, lr, beta1, beta2, eps, decay):  # type: ignore[no-untyped-def]
    """In place; the fp32 master is the 16-bit weight `high` and its remainder `low`."""
    one = np.float32(1)
    for i in numba.prange(high.shape[0]):
        master = float_of((np.uint32(high[i]) << np.uint32(16)) + np.uint32(np.int32(low[i])))
        grad = float_of(np.uint32(gradient[i]) << np.uint32(16))
        m = beta1 * first[i] + (one - beta1) * grad
        v = beta2 * second[i] + (one - beta2) * grad * grad
        bits = bits_of(master * (one - lr * decay) - lr * m / (np.sqrt(v) + eps))
        first[i], second[i] = m, v
        high[i] = np.uint16((bits + np.uint32(0x8000)) >> np.uint32(16))
        low[i] = np.int16(bits & np.uint32(0xFFFF))


def registered(tensor: Tensor) -> Tensor:
    """The same memory, page-locked."""
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    assert code == 0, f"page-locking {tensor.nbytes} bytes was refused with CUDA error {code}"
    return tensor


class Host:
    """Weights, masters, moments and gradients of all units, and the thread that updates them in turn."""

    def __init__(self, sizes: list[int], lr: float, threads: int) -> None:
        total = sum(sizes)
        self.starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.weights = registered(torch.empty(total, dtype=torch.bfloat16))
        self.gradients = registered(torch.zeros(total, dtype=torch.bfloat16))
        state = torch.zeros(total, dtype=torch.int16), torch.zeros(total), torch.zeros(total)
        self._arrays = [self.weights.view(torch.uint16).numpy(), *(part.numpy() for part in state),
                        self.gradients.view(torch.uint16).numpy()]  # fmt: skip
        self._scalars = tuple(np.float32(value) for value in (lr, 0.9, 0.999, 1e-8, 0.01))
        self._threads = threads
        self.done = [threading.Event() for _ in sizes]
        for event in self.done:
            event.set()
        self._queue: queue.Queue[tuple[int, torch.cuda.Event]] = queue.Queue()
        adamw(*(array[:8] for array in self._arrays), *self._scalars)
        threading.Thread(target=self._work, daemon=True).start()

    def part(self, memory: Tensor, unit: int) -> Tensor:
        return memory[self.starts[unit] : self.starts[unit + 1]]

    def update(self, unit: int, arrived: torch.cuda.Event) -> None:
        self._queue.put((unit, arrived))

    def _work(self) -> None:
        numba.set_num_threads(min(self._threads, numba.config.NUMBA_NUM_THREADS))
        while True:
            unit, arrived = self._queue.get()
            arrived.synchronize()
            part = slice(self.starts[unit], self.starts[unit + 1])
            adamw(*(array[part] for array in self._arrays), *self._scalars)
            self.done[unit].set()


class Probe:
    """The loop. Units are the blocks in order, then the embedding, then the head unless it is the embedding."""

    def __init__(self, asked: Any) -> None:
        config = peer.configuration(asked)
        config._attn_implementation = "sdpa"
        kind = config.model_type
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        name = next(each for each in vars(module) if each.endswith("DecoderLayer"))
        self.block = getattr(module, name)(config, 0).to(asked.device, torch.bfloat16).train()
        rotary = getattr(module, name.replace("DecoderLayer", "RotaryEmbedding"))(config).to(asked.device)
        for label, parameter in self.block.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
            else:
                parameter.data.fill_(1.0 if "norm" in label else 0.0)
        self.parameters = list(self.block.parameters())
        self.run = torch.compile(self.block) if asked.compile else self.block
        self.layers, size = config.num_hidden_layers, sum(p.numel() for p in self.parameters)
        matrix = torch.randn(config.vocab_size, config.hidden_size, device=asked.device, dtype=torch.bfloat16) * 0.02
        self.matrices = [matrix] if config.tie_word_embeddings else [matrix, matrix.clone()]
        sizes = [size] * self.layers + [each.numel() for each in self.matrices]
        self.host = Host(sizes, asked.lr, asked.threads or max(1, available_threads() - 2))
        first = torch.cat([parameter.data.flatten() for parameter in self.parameters])
        for unit in range(self.layers):
            self.host.part(self.host.weights, unit).copy_(first)
        for number, each in enumerate(self.matrices):
            self.host.part(self.host.weights, self.layers + number).copy_(each.flatten())
        empty = lambda: torch.empty(size, device=asked.device, dtype=torch.bfloat16)
        self.slots, self.sums = [empty() for _ in range(SLOTS)], [empty() for _ in range(2)]
        self.ready, self.free = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(2))
        self.sent = [torch.cuda.Event() for _ in range(2)]
        self.holds: list[int | None] = [None] * SLOTS
        self.up, self.down = torch.cuda.Stream(), torch.cuda.Stream()
        self.compute = torch.cuda.current_stream()
        positions = torch.arange(asked.sequence, device=asked.device)[None]
        self.positions = rotary(torch.empty(1, device=asked.device, dtype=torch.bfloat16), positions)
        self.rows = asked.rows

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def load(self, unit: int) -> None:
        slot = unit % SLOTS
        if self.holds[slot] == unit:
            return
        self.host.done[unit].wait()
        self.up.wait_event(self.free[slot])
        with torch.cuda.stream(self.up):
            self.slots[slot].copy_(self.host.part(self.host.weights, unit), non_blocking=True)
            self.ready[slot].record(self.up)
        self.holds[slot] = unit

    def use(self, unit: int) -> None:
        self.compute.wait_event(self.ready[unit % SLOTS])
        for parameter, view in zip(self.parameters, self.views(self.slots[unit % SLOTS]), strict=True):
            parameter.data = view

    def send(self, unit: int, gradient: Tensor) -> torch.cuda.Event:
        """Gradients to the host, and the update after them."""
        computed = torch.cuda.Event()
        computed.record(self.compute)
        self.down.wait_event(computed)
        self.host.done[unit].clear()
        with torch.cuda.stream(self.down):
            self.host.part(self.host.gradients, unit).copy_(gradient, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self.down)
        gradient.record_stream(self.down)
        self.host.update(unit, arrived)
        return arrived

    def call(self, hidden: Tensor) -> Tensor:
        output = self.run(hidden, position_embeddings=self.positions, attention_mask=None)
        return output[0] if isinstance(output, tuple) else output

    def forward(self, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for unit in range(min(2, self.layers)):
            self.load(unit)
        with torch.no_grad():
            for unit in range(self.layers):
                self.use(unit)
                kept.append(hidden)
                hidden = torch.cat([self.call(part) for part in hidden.split(self.rows)])
                self.free[unit % SLOTS].record(self.compute)
                if unit + 2 < self.layers:
                    self.load(unit + 2)
        return hidden, kept

    def loss(self, hidden: Tensor, labels: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of the losses, gradient of `hidden` (N, H), gradient of the head)."""
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK):
            part, words = hidden[start : start + CHUNK], labels[start : start + CHUNK, None]
            logits = part @ head.T
            norm = torch.logsumexp(logits.float(), -1)
            total += (norm - logits.gather(1, words)[:, 0]).sum()
            odds = torch.exp(logits.float() - norm[:, None]).to(torch.bfloat16)
            odds.scatter_add_(1, words, torch.full_like(words, -1, dtype=torch.bfloat16))
            odds /= hidden.shape[0]
            grad_hidden[start : start + CHUNK] = odds @ head
            grad_head.addmm_(odds.T, part)
        return total, grad_hidden, grad_head

    def backward(self, grad: Tensor, kept: list[Tensor]) -> Tensor:
        for unit in range(self.layers - 1, -1, -1):
            self.load(unit)
            self.use(unit)
            if unit:
                self.load(unit - 1)
            place, parts = unit % 2, []
            self.compute.wait_event(self.sent[place])
            sums = self.views(self.sums[place])
            for number, (rows, upstream) in enumerate(
                zip(kept[unit].split(self.rows), grad.split(self.rows), strict=True)
            ):
                rows = rows.detach().requires_grad_()
                found = torch.autograd.grad(self.call(rows), [rows, *self.parameters], upstream)
                parts.append(found[0])
                (torch._foreach_add_ if number else torch._foreach_copy_)(sums, list(found[1:]))
            grad = torch.cat(parts)
            kept.pop()
            self.free[unit % SLOTS].record(self.compute)
            self.sent[place] = self.send(unit, self.sums[place])
        self.holds = [None] * SLOTS  # the updates made them stale
        return grad

    def step(self, batch: list[Tensor]) -> Tensor:
        ids = torch.cat(batch)
        for number, matrix in enumerate(self.matrices):
            self.host.done[self.layers + number].wait()
            matrix.copy_(self.host.part(self.host.weights, self.layers + number).view_as(matrix), non_blocking=True)
        hidden, kept = self.forward(torch.nn.functional.embedding(ids, self.matrices[0]))
        width = hidden.shape[-1]
        total, grad, grad_head = self.loss(hidden.view(-1, width), ids.roll(-1, 1).view(-1), self.matrices[-1])
        grad = self.backward(grad.view_as(hidden), kept)
        sums = [grad_head] if len(self.matrices) == 1 else [torch.zeros_like(self.matrices[0]), grad_head]
        sums[0].index_add_(0, ids.view(-1), grad.reshape(-1, width))
        for number, gradient in enumerate(sums):
            self.send(self.layers + number, gradient.view(-1))
        return total / ids.numel()

    def finish(self) -> None:
        for event in self.host.done:
            event.wait()


asked = peer.flags(__doc__ or "")
probe = Probe(asked)
torch.cuda.reset_peak_memory_stats()
vocabulary = probe.matrices[0].shape[0]
peer.measure(asked, vocabulary, probe.step, "a probe: inexact, never clips", probe.finish)
