"""What makes a transformers Trainer train a streamed model: mixed in before the Trainer's class.

A whole accumulation window goes through `headrace.accumulate`: `training_step` keeps the micro-batches of a window and
runs them when the last one has come, so the Trainer goes on counting steps, tokens and epochs itself. The model is
wrapped when it is first needed, by `train` or by an evaluation, so adapters, tokens or heads may be added until then.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.base.errors import OptionError
from headrace.executor.window import accumulate
from headrace.integrations import trainer_checkpoint as checkpoint
from headrace.integrations.trainer_arguments import Setup, check_model, differences, read_late, set_up
from headrace.integrations.trainer_batches import batch_shape
from headrace.integrations.trainer_log import GradNorm, Meter, logits_as_tensors, tell_placement
from headrace.integrations.trainer_loss import StreamedLabelSmoother
from headrace.integrations.trainer_record import RunRecorder
from headrace.model.configured import text_config
from headrace.report.record import TRACES
from headrace.session.measuring import clip
from headrace.session.session import Session
from headrace.session.surviving import surviving
from headrace.session.wrap import wrap

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object


REPLACED = frozenset({
    "training_step", "_clip_grad_norm", "_get_grad_norm", "_move_model_to_device", "_wrap_model",
    "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model",
})  # fmt: skip
"""Methods of transformers' Trainer that do something else for a streamed model, and do not always call super()."""


class StreamedTraining(_Base):
    """Mixed in before a class derived from transformers.Trainer: `class Mine(StreamedTraining, SomeTrainer)`.

    `headrace`: options of headrace.wrap (memory limits, placement, rows, ...), but for those that TrainingArguments
    decide. Raises OptionError naming every argument that cannot be honoured, with the alternative.

    The micro-batches of a window take turns inside `compute_loss`, block by block. So dropout draws other masks than in
    the plain Trainer (not with one micro-batch), and a window that a callback ends half-way is dropped as a whole.
    Clipping belongs to the update: a callback that changes gradients in `on_pre_optimizer_step` does so before the norm
    is taken, not after the clipping.
    """

    _covered: frozenset[str] = frozenset()
    """Those of REPLACED that a derived class makes up for, where the Trainer it is mixed into overrides them."""

    def __init__(self, *positional: Any, headrace: Mapping[str, Any] | None = None, **named: Any) -> None:
        self._given = dict(headrace or {})
        self._own_optimizer = _gives_optimizer(super().__init__, positional, named)
        self._window: list[Any] = []
        self._meter: Meter | None = None
        model = named.get("model", positional[0] if positional else None)
        inner = getattr(model, "_orig_mod", None)
        self._was_compiled = inner is not None
        if self._was_compiled:  # a model that torch.compile returned
            positional = tuple(inner if given is model else given for given in positional)
            named = {name: inner if given is model else given for name, given in named.items()}
        super().__init__(*positional, **named)
        smoother: Any = self.label_smoother
        if smoother is not None:
            self.label_smoother = StreamedLabelSmoother(smoother, lambda: self.model)  # type: ignore[assignment]
        self.add_callback(RunRecorder())
        adopted = _session_of(self.model)
        if adopted is not None:
            self._adopt(adopted)

    # -- opening ------------------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The open session of the model; the model is wrapped if it is not yet."""
        found = _session_of(self._open())
        assert found is not None
        return found

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer knows its arguments and its model, and has used neither: the moment to refuse."""
        self._refuse_overrides()
        self._setup: Setup = set_up(self.args, self.model, self._given, self._own_optimizer)
        if self._was_compiled:
            text = "the model came compiled as a whole: its blocks are compiled one by one (compile=True) instead"
            self._setup.notes.append(("compile", text))
            self._setup.options["compile"] = True
        if self._setup.optim is not None:
            self.args.optim = self._setup.optim
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise OptionError(
                "accelerate's own configuration turns on FSDP or DeepSpeed",
                "one GPU streams the whole model",
                "Start with python, or take them out of accelerate's configuration",
            )

    def _refuse_overrides(self) -> None:
        """What a class after this one in the order of resolution does in these methods would never happen."""
        later = type(self).__mro__[type(self).__mro__.index(StreamedTraining) + 1 :]
        lost = []
        for name in REPLACED.difference(self._covered):
            owner = next((cls for cls in later if name in vars(cls)), object)
            if owner.__module__ not in ("builtins", "transformers.trainer"):
                lost.append(f"{owner.__name__}.{name}")
        if lost:
            raise OptionError(
                f"{', '.join(sorted(lost))} would never be called",
                f"{type(self).__name__} has StreamedTraining before it, which does that for a streamed model",
                "Override it in a class derived from HeadraceTrainer or StreamedTraining, and call super() there",
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        args.pop("dynamo_plugin", None)  # it would compile the whole model, around the blocks
        if not self._setup.autocast:
            args["mixed_precision"] = "no"
        return args

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Blocks go there one at a time."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Called before training and before an evaluation, when the optimizer is known."""
        begun, opens = time.perf_counter(), _session_of(self.model) is None
        opened = self._open()
        if opens and not training:  # an evaluation without training logs what preparing the model took
            self.model_preparation_time = round(time.perf_counter() - begun, 4)
        return opened

    def _open(self) -> nn.Module:
        """The model, wrapped."""
        model: Any = self.model
        session = _session_of(model)
        if session is not None:
            if self.optimizer not in (None, session.optimizer):
                raise OptionError(
                    "the Trainer has another optimizer than the model's session",
                    "the session updates the weights with the optimizer that it was opened with",
                    "Call headrace.unwrap(trainer.model) before the optimizer is replaced; the Trainer wraps it again",
                )
            return model  # type: ignore[no-any-return]
        if self.optimizer is None:
            self.create_optimizer()
        places = {"trace_dir": Path(str(self.args.output_dir)) / TRACES} if "trace" in self._setup.options else {}
        shape = self._batches()
        known = {} if shape is None else {"batch_shape": shape}
        wrapped, _ = wrap(model, self.optimizer, **{**places, **known, **self._setup.options, **read_late(self.args)})
        session = _session_of(model)
        assert session is not None
        for kind, text in self._setup.notes:
            session.events.add(kind, text, step=session.steps)
        if shape is not None:
            text = "the largest micro-batch, by arguments and rows: headrace={'batch_shape': ...} says another"
            session.events.add("batch", text, rows=shape[0], tokens=shape[1])
        self._begin(session)
        return wrapped

    def _batches(self) -> tuple[int, int] | None:
        """The option batch_shape, where arguments and rows say it and the user does not."""
        if "batch_shape" in self._setup.options:
            return None
        config: Any = getattr(self.model, "config", None)
        positions = getattr(text_config(config), "max_position_embeddings", None)
        return batch_shape(self.args, self.train_dataset, self.data_collator, positions)

    def _begin(self, session: Session) -> None:
        """Tell accelerate that all is prepared: it would copy the optimizer's whole state, and move the model."""
        optimizer: Any = self.optimizer
        optimizer._is_accelerate_prepared = True
        optimizer.step_was_skipped = False
        model: Any = session.model
        if getattr(model, "_is_accelerate_prepared", False):  # by an earlier Trainer, whose precision may be another
            self.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            model._is_accelerate_prepared = False
        self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # for autocast
        model._is_accelerate_prepared = True
        self._meter = Meter(session)
        tell_placement(session)

    def _note(self, kind: str, text: str) -> None:
        """An event, now or when there is a session."""
        session = _session_of(self.model)
        if session is None:
            self._setup.notes.append((kind, text))
        else:
            session.events.add(kind, text, step=session.steps)

    def _adopt(self, session: Session) -> None:
        """The model came wrapped: its session must do what the arguments say, and its optimizer must be given, for it
        decides rates and decay instead of the arguments."""
        faults = [f"headrace={{{name!r}: ...}} came too late" for name in self._given]
        faults += differences(session, self.args)
        if self.optimizer is not session.optimizer:
            faults.append("optimizers=(optimizer, None) with the optimizer that headrace.wrap returned is missing")
        if faults:
            raise OptionError(
                "; ".join(faults),
                "the model was wrapped before the Trainer was made",
                "Call headrace.unwrap(model) first: the Trainer wraps it; or wrap it with what the arguments say",
            )
        self._begin(session)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model for a new run: the session of the last one gives its memory back first."""
        old = _session_of(self.model)
        if old is not None:
            old.close()
        model: nn.Module = super().call_model_init(trial)
        check_model(self.args, model)
        return model

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        """See transformers.Trainer.train. `resume_from_checkpoint=True`: the newest complete checkpoint."""
        self._window.clear()
        if resume_from_checkpoint is True:
            resume_from_checkpoint, passed_over = checkpoint.newest(str(self.args.output_dir))
            for name in passed_over:
                self._note("checkpoint", f"{name} is incomplete and passed over")
        self._tell_callbacks()
        try:
            return super().train(resume_from_checkpoint, *others, **named)
        except BaseException:
            if self.neftune_noise_alpha is not None and hasattr(self, "neftune_hook_handle"):
                self.neftune_hook_handle.remove()  # else a second call of train() adds the noise twice
            raise

    def _tell_callbacks(self) -> None:
        """Which of the user's callbacks come between the Trainer's clipping, which is none here, and the update's."""
        if not self.args.max_grad_norm:
            return
        for callback in self.callback_handler.callbacks:
            method = type(callback).on_pre_optimizer_step
            if method.__module__.partition(".")[0] not in ("transformers", "headrace"):
                text = "comes before the clipping: it sees whole gradients, and what it changes is clipped"
                self._note("clipping", f"{type(callback).__name__}.on_pre_optimizer_step {text}")

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The next window begins: what a stopped one has left is dropped."""
        self._window.clear()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The window's loss when its last micro-batch has come, which is run with the others then; zero before."""
        self._window.append(inputs)
        if len(self._window) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        window, self._window = self._window, []
        clip(self.session, self.args.max_grad_norm or None)  # as the arguments are by now
        model.train()
        window = [self._prepare_inputs(inputs) for inputs in window]
        assert self._meter is not None
        self._meter.count(window, getattr(model, "main_input_name", "input_ids"))

        def loss_of(inputs: Any) -> Tensor:
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            scaled: Tensor = loss if self._is_scaled(num_items_in_batch) else loss / len(window)
            return scaled

        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            _empty_cache()

        def gradients() -> Tensor:
            loss = accumulate(loss_of, window)
            self.accelerator.backward(loss)
            return loss.detach()

        return surviving(self.session, gradients)

    def _is_scaled(self, num_items_in_batch: Any) -> bool:
        """Whether `compute_loss` has divided by the window's items, as transformers decides it."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(by_model or self.compute_loss_func is not None)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clipping is an option of the session, and exact."""
        return GradNorm.of(self.session)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """The norm before clipping: read when it is logged."""
        return GradNorm.of(self.session)

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        """Logits are computed only for those who asked for more than the loss."""
        loss, logits, labels = super().prediction_step(*given, **named)
        return loss, logits_as_tensors(logits, self.session.events), labels

    def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
        """Training logs also say what the step took."""
        if "loss" in logs and self._meter is not None:
            logs.update(self._meter.fields())
        super().log(logs, *others, **named)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(output_dir, self.session, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The exact state comes later, when all is prepared; other checkpoints give their weights now."""
        if not checkpoint.is_exact(resume_from_checkpoint):
            self._load_weights(resume_from_checkpoint, super()._load_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        if checkpoint_dir is not None and checkpoint.is_exact(checkpoint_dir):
            checkpoint.restore(checkpoint_dir, self.session, self.lr_scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint_dir)

    def _load_best_model(self) -> None:
        best = super()._load_best_model
        self._load_weights(str(self.state.best_model_checkpoint), lambda folder: best())

    def _load_weights(self, folder: str, otherwise: Callable[[str], None]) -> None:
        """The weights in a model folder, one tensor at a time; what is none of transformers' own goes the Trainer's
        way."""
        if not checkpoint.load_weights(self._open(), folder):
            otherwise(folder)


def _gives_optimizer(init: Callable[..., None], positional: tuple[Any, ...], named: dict[str, Any]) -> bool:
    bound = inspect.signature(init).bind_partial(*positional, **named).arguments
    given = {**bound.get("kwargs", {}), **bound}
    optimizer, _ = given.get("optimizers") or (None, None)
    return optimizer is not None or given.get("optimizer_cls_and_kwargs") is not None


def _session_of(model: Any) -> Session | None:
    found = getattr(model, "_headrace_session", None)
    return found if isinstance(found, Session) else None


def _empty_cache() -> None:
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache()
