"""What a Trainer's run keeps of itself: the record that `headrace report` shows, in the Trainer's output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from headrace.report.record import NAME, RunRecord, position_after
from headrace.session.samples import Samples
from headrace.session.session import Session


class RunRecorder(TrainerCallback):
    """Writes a line for each step, which waits for nothing; loss, norm and speed come when the Trainer logs them."""

    def __init__(self) -> None:
        self._record: RunRecord | None = None
        self._samples: Samples | None = None
        self._session: Session | None = None
        self._rate: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Go on after the step that the Trainer has resumed from, or begin."""
        session = getattr(objects.get("model"), "_headrace_session", None)
        if not isinstance(session, Session):
            return
        self._session, self._samples = session, Samples(session)
        path = Path(args.output_dir) / NAME
        try:
            self._record = RunRecord(path, position_after(path, state.global_step))
        except OSError as error:
            session.events.add("record", f"none is kept: {error}", step=state.global_step)
            return
        rows = args.train_batch_size * args.gradient_accumulation_steps
        self._record.begin(steps=state.max_steps, after_step=state.global_step, rows=rows, **self._samples.facts())
        self._record.events(state.global_step, session.events)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The rate that the step is made with; afterwards it is the next one's."""
        self._rate = objects["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._record is None or self._samples is None or self._session is None:
            return
        self._record.events(state.global_step, self._session.events)
        epoch = None if state.epoch is None else round(state.epoch, 6)
        self._record.write(step=state.global_step, epoch=epoch, lr=self._rate, **self._samples.take())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **objects: Any) -> None:
        if self._record is None or not logs:
            return
        told = {name: logs[name] for name in ("loss", "grad_norm", "tokens_per_second") if name in logs}
        if "loss" in told:
            self._record.write(step=state.global_step, **told)
        if "eval_loss" in logs:
            self._record.write(step=state.global_step, validation_loss=logs["eval_loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if self._record is not None and self._session is not None:
            self._record.events(state.global_step, self._session.events)
