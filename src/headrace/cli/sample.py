"""`headrace sample`: plain transformers generation from a folder, as anybody else would load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.base.errors import ModelError, OptionError


def sample(folder: str, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, chat: bool) -> None:
    """Print what the model in `folder` says after `prompt`.

    Raises ModelError when the folder holds no model, OptionError for `chat` without a chat template.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"{folder} holds no model", "config.json is missing", "Give the output folder of a training run"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"{folder} holds no tokenizer", "tokenizer.json is missing", "Save it: tokenizer.save_pretrained(folder)"
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise ModelError(f"the model in {folder} cannot be loaded", " ".join(str(error).split())[:300]) from error
    if torch.cuda.is_available():
        model = model.to("cuda")
    if chat and not tokenizer.chat_template:
        raise OptionError("the tokenizer has no chat template", "", "Leave --chat away")
    text = prompt
    if chat:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # A rendered template holds its own special tokens; a second begin token would be one too many.
    inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise OptionError("the prompt is empty", "it has no token", "Give at least one word")
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    plain = {"temperature": None, "top_p": None, "top_k": None} | drawn  # else settings saved with the model mix in
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    with torch.inference_mode():
        ids = model.generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, pad_token_id=pad, **plain)
    print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
