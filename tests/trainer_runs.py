"""Runs of transformers' Trainer and of HeadraceTrainer on the same tiny model, rows and arguments."""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import against_plain
import headrace
from against_plain import VOCABULARY, assert_close, llama, own_values, weights
from headrace.integrations.transformers import HeadraceTrainer, StreamedTraining

HOST: dict[str, Any] = {"placement": {"weights": "host", "state": "host"}, "window": 1, "debug": True}
"""Weights and state outside the device, one slot, freed memory reads NaN."""


def gpt2(**changes: Any) -> Any:
    """Without dropout, which draws other masks where micro-batches take turns."""
    return against_plain.gpt2(**{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, **changes})


def mixtral(**changes: Any) -> Any:
    values = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.5, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    return own_values(transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**values, **changes})))


MODELS = {"llama": lambda: llama(3), "gpt2": gpt2, "mixtral": mixtral}


def rows(count: int = 20, seed: int = 0, longest: int = 12) -> list[dict[str, Tensor]]:
    """Rows of 3 to `longest` tokens; the first tokens of some carry no label."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(3, longest + 1, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded on the right to the longest row of the batch."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(values: list[Tensor], fill: int) -> Tensor:
        return torch.stack([nn.functional.pad(value, (0, longest - len(value)), value=fill) for value in values])

    return {
        "input_ids": padded([row["input_ids"] for row in batch], 0),
        "attention_mask": padded([torch.ones_like(row["input_ids"]) for row in batch], 0),
        "labels": padded([row["labels"] for row in batch], -100),
    }


def word_tokenizer() -> Any:
    """Words w0, w1, ... and an end token that pads, too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<unknown>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unknown>")


def arguments(folder: Path, **changes: Any) -> Any:
    """TrainingArguments of a short run on the CPU: windows of 3 micro-batches, the last of an epoch shorter.

    adam_epsilon is large: a tiny one turns the rounding of a gradient near zero into a step of full size.
    """
    values = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 1e-2,
        "save_strategy": "no", "adam_epsilon": 1e-3, "log_level": "error",
    }  # fmt: skip
    return transformers.TrainingArguments(**{**values, **changes})


@functools.cache
def _freeze_what_is_imported() -> None:
    """accelerate collects garbage whenever a run begins: half a second, if it has to search all modules."""
    with tempfile.TemporaryDirectory() as folder:
        HeadraceTrainer(llama(1), arguments(Path(folder)))
    gc.collect()
    gc.freeze()


def trainer(
    cls: type, model: Any, folder: Path, options: dict[str, Any] | None = None, parts: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:  # fmt: skip
    """A Trainer of class `cls` for a copy of `model`. `options` go to wrap, `parts` to the Trainer, the rest to its
    arguments."""
    _freeze_what_is_imported()
    extra = {"headrace": {**HOST, **(options or {})}} if issubclass(cls, StreamedTraining) else {}
    given = {"train_dataset": rows(), "data_collator": collate, **(parts or {})}
    if model is not None:
        given["model"] = copy.deepcopy(model)
    made = cls(args=arguments(folder, **changes), **given, **extra)
    made.remove_callback(transformers.PrinterCallback)
    return made


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def assert_same_logs(ours: Any, theirs: Any, names: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")) -> None:
    """Within fp32 rounding, entry by entry."""
    for name in names:
        assert logged(theirs, name), name
        assert logged(ours, name) == pytest.approx(logged(theirs, name), rel=1e-5, abs=1e-7), name


def assert_same_run(ours: Any, theirs: Any) -> None:
    """The same losses, norms, rates and weights as the plain Trainer."""
    assert_same_logs(ours, theirs)
    assert ours.state.global_step == theirs.state.global_step
    assert_close(weights(ours.model), weights(theirs.model), 1e-6)


def both(model: Any, folder: Path, **given: Any) -> tuple[Any, Any]:
    """HeadraceTrainer and the plain Trainer after the same run."""
    options = given.pop("options", None)
    theirs = trainer(transformers.Trainer, model, folder / "plain", **given)
    theirs.train()
    ours = trainer(HeadraceTrainer, model, folder / "ours", options=options, **given)
    ours.train()
    return ours, theirs


def close(made: Any) -> None:
    headrace.session(made.model).close()
