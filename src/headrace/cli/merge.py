"""`headrace merge`: an adapter into its base, tensor by tensor, as an ordinary model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from headrace.base.errors import OptionError
from headrace.cli.exits import told


def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Folder or hub id of the model the adapter is for.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Folder of the adapter, as peft saves it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new, or empty.")],
    dtype: Annotated[
        Literal["bfloat16", "float32", "auto"],
        typer.Option("--dtype", help="Type of the merged weights; auto: that of BASE."),
    ] = "bfloat16",
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            help="Pack the matrices of the blocks once more: nf4, int8, fp8, ... (see headrace quantize).",
            show_default=False,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Merge an adapter into its base, packed or not: what plain transformers loads, in the memory of one layer."""
    with told(debug):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OptionError(f"{out} is no empty folder", "the merged model would be mixed with it", "Name another")
        console = Console(highlight=False)
        from headrace.cli.progress import waiting_on

        with waiting_on(console)("importing torch and transformers"):
            import torch

            from headrace.checkpoint.merge import merge as run
            from headrace.cli.adapters import peft_library
            from headrace.cli.tokenizers import load_tokenizer

            peft_library()

        def say(text: str) -> None:
            console.print(text, markup=False, soft_wrap=True)

        run(base, adapter, out, None if dtype == "auto" else getattr(torch, dtype), say, codec=codec)
        own = any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        load_tokenizer(str(adapter if own else base), "Save the tokenizer beside the adapter").save_pretrained(out)
        say(f"merged model in {out}")
