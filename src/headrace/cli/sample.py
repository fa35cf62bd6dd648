"""`headrace sample`: plain transformers generation from a folder, as anybody else would load it, shown as it comes.

What nobody else loads, packed weights, is decoded into memory first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.base.errors import ModelError, OptionError
from headrace.base.extras import quiet_peft
from headrace.base.units import format_bytes
from headrace.cli.adapters import CONFIG, is_adapter, peft_library
from headrace.cli.progress import waiting_on


def sample(folder: str, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, chat: bool) -> None:
    """Print `prompt` and what the model in `folder` says after it; with `chat` only the answer.

    Raises ModelError when the folder holds no model, FormatError when a file of it is damaged, OptionError for an empty
    prompt, and for `chat` without a chat template.
    """
    base = _base_of(Path(folder))
    _check_folder(Path(folder))
    places = [Path(folder), *([Path(base)] if base is not None else [])]
    size = sum(path.stat().st_size for place in places for path in place.glob("*.safetensors"))
    with waiting_on(Console(stderr=True, highlight=False))(f"loading the model ({format_bytes(size)})"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
        from transformers.utils import logging

        from headrace.files.safetensors.header import read_header

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        tokenizer = _loaded(AutoTokenizer, folder)
        inputs = _inputs(tokenizer, prompt, chat)
        for place in places:
            for path in place.glob("*.safetensors"):
                read_header(path)  # says of a damaged file what is wrong with it
        origin = folder if base is None else base
        packed = any(Path(origin).glob("packed*.safetensors"))
        model = _decoded(origin) if packed else _loaded(AutoModelForCausalLM, origin, dtype="auto")
        if base is not None:
            with quiet_peft():
                model = _loaded(peft_library().PeftModel, folder, model=model)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    plain = {"temperature": None, "top_p": None, "top_k": None} | drawn  # else settings saved with the model mix in
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    shown = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    with torch.inference_mode():
        model.generate(
            **inputs.to(model.device), max_new_tokens=max_new_tokens, pad_token_id=pad, streamer=shown, **plain
        )


def _base_of(folder: Path) -> str | None:
    """The model that an adapter in `folder` is for; None where it holds a model."""
    if not is_adapter(folder):
        return None
    base: str = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    if not base or (Path(base).is_absolute() and not Path(base).is_dir()):
        raise ModelError(
            f"the model that the adapter in {folder} is for is not there", f"{CONFIG} names {base!r}",
            f"Write its place into base_model_name_or_path of {folder / CONFIG}",
        )  # fmt: skip
    return base


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        found = "there is no such folder" if not folder.is_dir() else "config.json is missing"
        if any((folder / "checkpoints").glob("step-*")):
            found += ", but there are checkpoints: the run was not finished"
        raise ModelError(f"{folder} holds no model", found, "Give the output folder of a finished training run")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"{folder} holds no tokenizer", "tokenizer.json is missing", "Save it: tokenizer.save_pretrained(folder)"
        )


def _inputs(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """The prompt as tokens, a batch of one."""
    text = prompt
    if chat:
        if not tokenizer.chat_template:
            where = tokenizer.name_or_path
            raise OptionError("the tokenizer has no chat template", f"none is in {where}", "Leave --chat away")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # A rendered template holds its own special tokens; a second begin token would be one too many.
    inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt", return_token_type_ids=False)
    if not inputs["input_ids"].numel():
        raise OptionError("the prompt is empty", "it has no token", "Give at least one word")
    return inputs


def _loaded(kind: Any, folder: str, model: Any = None, **options: Any) -> Any:
    """What a class of transformers makes of a folder; peft's is given the `model` that its adapter is for."""
    try:
        return kind.from_pretrained(*(() if model is None else (model,)), folder, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded", " ".join(str(error).split())[:300],
            "Give the output folder of a finished training run",
        ) from error  # fmt: skip


def _decoded(folder: str) -> Any:
    """The model of a packed folder, its weights decoded: an ordinary model in memory."""
    from headrace.model.build import load_model
    from headrace.model.parked import unpark

    model = load_model(folder)
    for parameter in model.parameters():
        value = parameter.detach().plain()
        unpark(parameter)
        parameter.data = value
    model._headrace_source.close()
    return model
