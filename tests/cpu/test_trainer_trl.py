"""trl's SFTTrainer with a streamed model: its data preparation, its losses and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from against_plain import VOCABULARY, assert_close, llama, weights
from headrace import OptionError
from trainer_runs import HOST, assert_same_logs, logged, mixtral, word_tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()


def texts(count: int = 14) -> Any:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 12, (), generator=generator))
        words = [f"w{n}" for n in torch.randint(2, VOCABULARY, (length,), generator=generator)]
        found.append({"prompt": " ".join(words[:2]), "completion": " " + " ".join(words[2:])})
    return datasets.Dataset.from_list(found)


def run(cls: type, model: Any, folder: Path, options: dict[str, Any] | None = None, **changes: Any) -> Any:
    from transformers import PrinterCallback

    values = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "logging_steps": 1, "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "learning_rate": 1e-2, "adam_epsilon": 1e-3, "gradient_checkpointing": False, "save_strategy": "no",
        "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    extra = {} if options is None else {"headrace": options}
    made = cls(model=model, args=trl.SFTConfig(**{**values, **changes}), train_dataset=texts(), eval_dataset=texts(5),
               processing_class=word_tokenizer(), **extra)  # fmt: skip
    made.remove_callback(PrinterCallback)
    made.train()
    return made


RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}), ("mixtral", {}), ("mixtral", {"router_aux_loss_coef": 0.2}),
    ("mixtral", {"router_aux_loss_coef": 0.0}), ("mixtral", {"label_smoothing_factor": 0.1}),
)  # fmt: skip


@pytest.mark.parametrize("family, changes", RUNS, ids=str)
@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated in `SFTTrainer`")
def test_supervised_fine_tuning(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Completions only, windows of three, evaluation in between; a router loss counts as trl counts it: by the
    arguments' coefficient, the mean over the window, and not beside smoothed labels. The device of the first two runs
    out of memory in the third step, after two micro-batches: what is logged of the step counts each once."""
    from headrace.integrations.trl import HeadraceSFTTrainer

    class Short(HeadraceSFTTrainer):
        computed = 0

        def compute_loss(self, model: Any, *given: Any, **named: Any) -> Any:
            found = super().compute_loss(model, *given, **named)
            self.computed += model.training
            if self.computed == 8 and not changes:
                self.computed += 100
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

    build = {"llama": lambda: llama(3), "mixtral": mixtral}[family]
    theirs = run(trl.SFTTrainer, build(), tmp_path / "plain", **changes)
    ours = run(Short, build(), tmp_path / "ours", HOST, **changes)
    assert sum(event.kind == "out of memory" for event in ours.session.events) == (not changes)
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "num_tokens", "eval_num_tokens")
    routed = ("aux_loss", "eval_aux_loss") if theirs.aux_loss_enabled else ()
    assert_same_logs(ours, theirs, names + routed)
    assert_close(weights(ours.model), weights(theirs.model), 1e-6)
    assert ours.session.steps == 4
    assert not any(event.kind == "logits" for event in ours.session.events)
    (told,) = [str(event) for event in ours.session.events if event.kind == "log"]
    assert told.startswith("[log] no entropy and no mean_token_accuracy: they need the probability of every token")
    weight_bytes = sum(unit.weights.nbytes for unit in ours.session.spec.units)
    assert logged(ours, "link_bytes_to_device")[0] <= 2.1 * weight_bytes  # the first step, before an evaluation


def test_what_needs_every_token_is_refused(tmp_path: Path) -> None:
    from headrace.integrations.trl import HeadraceSFTTrainer

    with pytest.raises(OptionError, match="loss_type='dft'"):
        run(HeadraceSFTTrainer, llama(2), tmp_path, HOST, loss_type="dft")
    with pytest.raises(OptionError, match="activation_offloading"):
        run(HeadraceSFTTrainer, llama(2), tmp_path, HOST, activation_offloading=True)
