"""The training loop: one window of micro-batches per optimizer step, evaluation, checkpoints, a clean stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import headrace
from headrace.base.errors import StoreError
from headrace.base.units import plural
from headrace.cli.assemble import Parts
from headrace.cli.checkpoints import Checkpoints, identity
from headrace.cli.cooling import Cooling
from headrace.cli.output import Lasting
from headrace.cli.progress import Display
from headrace.cli.random_state import random_state, restore_random_state
from headrace.cli.signals import Stop
from headrace.data.batch import IGNORED, micro_batches
from headrace.data.table import TokenTable
from headrace.hardware import limits
from headrace.report.record import RunRecord
from headrace.session.samples import Samples
from headrace.session.surviving import surviving


class Loop:
    """Trains `parts` to the end, or until a signal. `step`: optimizer steps done."""

    def __init__(self, parts: Parts, checkpoints: Checkpoints, stop: Stop, output: Lasting) -> None:
        self._config, self._parts, self._checkpoints, self._stop = parts.config, parts, checkpoints, stop
        self._output = output
        self._identity = identity(parts.config, parts.fingerprints)
        self._samples = Samples(parts.session)
        self._cooling = Cooling(parts.config.max_temperature, self._samples.sensors, parts.session.events, stop)
        device = parts.session.device
        narrow = parts.config.autocast is not None and limits.computes_bf16(device)  # else as wide as it is stored
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=narrow)
        self._saved: int | None = None
        self.log_position = 0
        self.step = 0

    def resume(self) -> bool:
        """Go on from the newest usable checkpoint; False when there is none."""
        state = self._checkpoints.restore(self._parts.session, self._identity)
        if state is None:
            return False
        parts = self._parts
        self.step, self.log_position = state["step"], state["log"]
        parts.sampler.restore(state["sampler"])
        parts.scheduler.load_state_dict(state["scheduler"])
        # By the schedule of this run: with more steps than then, the rate is not what it had fallen to at that end.
        schedule = parts.scheduler
        for group, highest, factor in zip(
            parts.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
        ):
            group["lr"] = highest * factor(schedule.last_epoch)
        restore_random_state(state["random"])
        self._saved = self.step
        return True

    def run(self, display: Display, log: RunRecord) -> bool:
        """Train; True when the run is complete, False when a signal stopped it (its state is then saved)."""
        config, parts = self._config, self._parts
        parts.model.train()
        facts = {"steps": parts.steps, "after_step": self.step, "rows": config.batch * config.accumulation}
        log.begin(**facts, **self._samples.facts())
        self.tell_events(log)
        if self.step == 0:
            self._evaluate_and_tell(display, log)
        if self.step < parts.steps and self._stop.number is None:
            display.busy("first step, which also gets the kernels ready")
        while self.step < parts.steps and self._stop.number is None and self._cooling.passed(self.step, display):
            self._train_step(display, log)
            last = self.step == parts.steps
            if config.eval_every and self.step % config.eval_every == 0 and not last:
                self._evaluate_and_tell(display, log)
            if config.save_every and (last or self.step % config.save_every == 0):
                self._save(display, log, must=False)
        if self.step < parts.steps:
            self._save(display, log, must=True)
            return False
        self._evaluate_and_tell(display, log)
        return True

    def tell_events(self, log: RunRecord) -> None:
        """Add to the record what has been decided since it was last told."""
        events = self._parts.session.events
        if self._output.lost is not None:
            events.once("output", "output", "nothing more can be shown: the record goes on", reason=self._output.lost)
        log.events(self.step, events)

    def _train_step(self, display: Display, log: RunRecord) -> None:
        parts = self._parts
        started = time.perf_counter()
        chosen = parts.sampler.next()
        labels = parts.train.labels(chosen)
        batches = micro_batches(parts.train, chosen, self._config.batch, parts.pad, parts.flat)
        loss = surviving(parts.session, lambda: self._gradients(batches, labels))
        rate = parts.optimizer.param_groups[0]["lr"]
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()
        self.step += 1

        value = float(loss.detach())
        # With "stop" the norm of a step is settled only when all its updates are: do not wait for them here.
        norm = parts.optimizer.last_grad_norm if self._config.on_nonfinite == "skip" else None
        tokens = int(parts.train.lengths[chosen].sum())
        seconds = time.perf_counter() - started
        taken = {**self._samples.take(), "seconds": round(seconds, 6)}
        self.tell_events(log)
        log.write(
            step=self.step, epoch=round(parts.sampler.epoch, 6), loss=value, lr=rate, grad_norm=norm, tokens=tokens,
            tokens_per_second=round(tokens / seconds, 1), **taken,
        )  # fmt: skip
        display.step(self.step, value, rate, tokens / seconds, taken["device_peak"])

    def _gradients(self, batches: Sequence[dict[str, Tensor]], labels: int) -> Tensor:
        """The loss of a step, whose gradients wait for their update."""
        loss = headrace.accumulate(lambda batch: self._loss(batch, labels), batches)
        loss.backward()
        return loss

    def _loss(self, batch: dict[str, Tensor], labels: int) -> Tensor:
        """A micro-batch's share of the step's loss: its mean, weighted by its part of all `labels`.

        The shares add up to the mean over the labels of all micro-batches, whatever their sizes, also for models
        that ignore a label count, and a router loss counts once in the step and not once per micro-batch.
        """
        own = int((batch["labels"][:, 1:] != IGNORED).sum())
        device = self._parts.session.device
        placed = {name: tensor.to(device) for name, tensor in batch.items()}
        with self._autocast():
            mean: Tensor = self._parts.model(**placed, **self._parts.call).loss
        return mean * (own / labels)

    def _evaluate_and_tell(self, display: Display, log: RunRecord) -> None:
        if self._parts.validation is None:
            return
        display.busy(f"evaluating {plural(len(self._parts.validation), 'row')}")
        loss = self.evaluate(self._parts.validation)
        if loss is not None:
            display.say(f"step {self.step}/{max(self.step, self._parts.steps)}  validation loss {loss:.4f}")
            log.write(step=self.step, validation_loss=loss)

    def evaluate(self, table: TokenTable) -> float | None:
        """Mean loss over the labels of all rows, by the path that training takes; None when a signal came.

        Only losses are kept: an output, and with it its logits, ends with its micro-batch.
        """
        parts = self._parts
        every: NDArray[np.int64] = np.arange(len(table), dtype=np.int64)
        order = every[np.argsort(-table.lengths, kind="stable")]
        together = self._config.batch * self._config.accumulation
        labels, total = table.labels(every), 0.0
        parts.model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(every), together):  # in windows, as training does: one load of the weights
                    if self._stop.number is not None:
                        return None
                    rows = order[start : start + together]
                    batches = micro_batches(table, rows, self._config.batch, parts.pad, parts.flat)
                    total += float(headrace.accumulate(lambda batch: self._loss(batch, labels), batches))
        finally:
            parts.model.train()
        return total

    def _save(self, display: Display, log: RunRecord, must: bool) -> None:
        """Write a checkpoint. A full disk ends the run only if there is no other way to keep its state (`must`)."""
        if self._saved == self.step:
            return
        parts = self._parts
        state: dict[str, Any] = {
            "step": self.step,
            "sampler": parts.sampler.state(),
            "scheduler": parts.scheduler.state_dict(),
            "random": random_state(),
            "log": log.position,
            "identity": self._identity,
        }
        try:
            path = self._checkpoints.save(self.step, parts.session, state)
        except StoreError as error:
            if must:
                raise
            display.say(f"no checkpoint at step {self.step}, training goes on: {error}")
            return
        self._saved = self.step
        display.say(f"saved {path}")
