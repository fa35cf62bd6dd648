"""Full fine-tuning with transformers' Trainer, streamed; --compare runs the stock Trainer on the same rows first.

    python examples/trainer.py --model my-model --data rows.jsonl --device-memory 4GiB
    python examples/trainer.py --model small-model --data rows.jsonl --compare

rows.jsonl holds one {"text": ...} per line. --compare needs room for the whole model, its gradients and AdamW's state.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import headrace
from headrace.base.units import format_bytes
from headrace.integrations.transformers import HeadraceTrainer


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--data", required=True, type=Path, help='JSONL with {"text": ...} rows')
    parser.add_argument("--output", type=Path, default=Path("trained"), help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of an optimizer step")
    parser.add_argument("--length", type=int, default=512, help="most tokens of a row")
    parser.add_argument("--lr", type=float, default=1e-5, help="highest learning rate")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--device-memory", help="most device memory to use, such as 4GiB")
    parser.add_argument("--host-memory", help="most RAM to use")
    parser.add_argument("--disk-dir", help="folder for what fits in neither")
    parser.add_argument(
        "--compare", action="store_true", help="train with the stock Trainer, too, and print both losses"
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    return parser.parse_args()


def read_rows(path: Path, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """Token ids of each row, and as many labels: the model predicts every token but the first."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = tokenizer(json.loads(line)["text"], truncation=True, max_length=length)
        rows.append({**row, "labels": list(row["input_ids"])})
    return [row for row in rows if len(row["labels"]) > 1]


def train(cls: type[Trainer], model: Any, given: argparse.Namespace, tokenizer: Any, **own: Any) -> Trainer:
    """A run of `cls`: everything but the class, the model and `headrace=...` is the same."""
    arguments = TrainingArguments(
        output_dir=str(given.output),
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulation,
        learning_rate=given.lr,
        weight_decay=0.01,
        warmup_steps=max(1, given.steps // 10),
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        use_cpu=given.cpu,
        report_to=[],
    )
    trainer = cls(
        model=model,
        args=arguments,
        train_dataset=read_rows(given.data, tokenizer, given.length),
        data_collator=DataCollatorForSeq2Seq(tokenizer),  # pads labels by place, so an end token stays one
        **own,
    )
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    given = options()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    plain = None
    if given.compare:
        resident = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype)
        plain = losses(train(Trainer, resident, given, tokenizer))
        del resident
        gc.collect()

    model = headrace.load_model(given.model, dtype=given.dtype)  # reads no weights yet
    limits = {"device_memory": given.device_memory, "host_memory": given.host_memory, "disk_dir": given.disk_dir}
    trainer = train(HeadraceTrainer, model, given, tokenizer, headrace=limits)
    trainer.save_model()
    tokenizer.save_pretrained(given.output)

    if plain is not None:
        print("step  stock Trainer  HeadraceTrainer  difference")
        for step, (theirs, ours) in enumerate(zip(plain, losses(trainer), strict=True), 1):
            print(f"{step:4d}  {theirs:13.6f}  {ours:15.6f}  {abs(theirs - ours):10.1e}")
    report = headrace.memory_report(trainer.model)
    print(f"device peak {format_bytes(report['device']['peak'])}, host peak {format_bytes(report['host']['peak_rss'])}")
    print(f"the trained model is in {given.output}")


if __name__ == "__main__":
    transformers.logging.set_verbosity_warning()
    main()
