"""The callback for people who keep a stock Trainer and give it a model and an optimizer that headrace.wrap returned."""

from __future__ import annotations

from typing import Any

from headrace.base.errors import OptionError
from headrace.base.units import plural
from headrace.integrations.trainer_arguments import differences, refused
from headrace.integrations.trainer_log import Meter
from headrace.integrations.trainer_record import RunRecorder
from headrace.session.session import Session


class HeadraceCallback(RunRecorder):
    """Checks that the Trainer can train a wrapped model, spares the optimizer's state a copy, and tells what steps
    take: in the Trainer's log, and in a record for `headrace report`.

    ```python
    model, optimizer = headrace.wrap(model, lr=1e-5, max_grad_norm=arguments.max_grad_norm)
    Trainer(model=model, args=arguments, optimizers=(optimizer, None), callbacks=[HeadraceCallback()], ...)
    ```

    Clipping is the session's: what `max_grad_norm` the arguments have (1.0 by default), wrap is told as well. Each
    micro-batch of an accumulation window loads the weights again; HeadraceTrainer loads them once per window.

    Callbacks log in their order, those of `report_to` first: `report_to="none"` and
    `callbacks=[HeadraceCallback(), TensorBoardCallback()]` bring the fields of a streamed step to TensorBoard.
    """

    def __init__(self) -> None:
        super().__init__()
        self._meter: Meter | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Refuse, by name, what cannot work. Raises OptionError."""
        session = getattr(objects.get("model"), "_headrace_session", None)
        faults = list(refused(args, {}))
        if not isinstance(session, Session):
            faults.append("the model is not wrapped: call headrace.wrap(model, ...) first, or use HeadraceTrainer")
        elif objects.get("optimizer") is not session.optimizer:
            faults.append("the Trainer has another optimizer: pass optimizers=(optimizer, None) from headrace.wrap")
        else:
            faults += differences(session, args)
        if args.torch_compile:
            faults.append("torch_compile=True compiles around the blocks: use headrace.wrap(..., compile=True) instead")
        if faults:
            numbers = f"{plural(len(faults), 'thing stands', 'things stand')} against a stock Trainer"
            raise OptionError("; ".join(faults), numbers, "Change them as said")
        assert isinstance(session, Session)
        # accelerate would read the whole optimizer state, move it to the device and load it again.
        session.optimizer._is_accelerate_prepared = True  # type: ignore[attr-defined]
        session.optimizer.step_was_skipped = False  # type: ignore[attr-defined]
        session.hide_gradients()  # the Trainer's own clipping then finds none
        if args.gradient_accumulation_steps > 1:
            text = "a stock Trainer loads the weights for each micro-batch, HeadraceTrainer once per window"
            session.events.add("accumulation", text, micro_batches=args.gradient_accumulation_steps)
        if args.report_to:
            text = "these log before HeadraceCallback adds its fields: pass their callbacks after it instead"
            session.events.add("log", text, report_to=", ".join(args.report_to))
        self._meter = Meter(session)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The arguments may have changed since the Trainer was made, and the session follows none of them."""
        session = getattr(objects.get("model"), "_headrace_session", None)
        faults = list(differences(session, args)) if isinstance(session, Session) else []
        if faults:
            numbers = f"{plural(len(faults), 'argument')} changed after the Trainer was made"
            raise OptionError("; ".join(faults), numbers, "Set them before, or use HeadraceTrainer, which follows them")
        super().on_train_begin(args, state, control, **objects)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **objects: Any) -> None:
        """Add the fields of a streamed step to training logs."""
        if logs is not None and "loss" in logs and self._meter is not None:
            fields = self._meter.fields()
            fields.pop("tokens_per_second")  # a callback sees no batch
            norm = objects["optimizer"].last_grad_norm
            for entry in (logs, state.log_history[-1]):
                entry.update(fields, grad_norm=0.0 if norm is None else norm)
        super().on_log(args, state, control, logs, **objects)
