"""The entry point `headrace`: one sub-command per file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import __version__
from headrace.cli.bench import bench
from headrace.cli.config import FLAGS, RunConfig
from headrace.cli.exits import told
from headrace.cli.flags import with_config_flags
from headrace.cli.merge import merge
from headrace.cli.plan import plan
from headrace.cli.profile import profile
from headrace.cli.quantize import quantize
from headrace.cli.report import report
from headrace.cli.verify import verify

app = typer.Typer(
    name="headrace",
    help="Train language models that do not fit on the accelerator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _show_version(asked: bool) -> None:
    if asked:
        print(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train language models that do not fit on the accelerator."""
    if sys.platform == "linux":  # buffers of many sizes then share what is free; read when a GPU is used first
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _show_options(asked: bool) -> None:
    if asked:
        from headrace.cli.listing import listing

        print(listing())
        raise typer.Exit


_NO_FLAGS = ", ".join(name for name in RunConfig.model_fields if name not in FLAGS)


# What is no flag comes to us too: a misspelt one is one of the mistakes that are told together.
@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=f"Without a flag, in the --config file or by --set (--list says more): {_NO_FLAGS}.",
)
@with_config_flags
def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file with options; flags win over it.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any option, such as schedule=cosine; may be repeated."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option(
            "--list", callback=_show_options, is_eager=True, help="Show every option with type and default, and exit."
        ),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show curves, memory and temperatures in the terminal as the run goes on.")
    ] = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Train a model: fine-tune --model, or start from random weights with --config-model and --tokenizer.

    Every option can stand in the --config file or go as --set NAME=VALUE. Most have flags; the names of those without
    one are below, and --list explains all.
    """
    with told(debug):
        from headrace.cli.train import train as run

        run(config, flags, settings or [], context.args, watch)


@app.command()
def sample(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the model.")],
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws at a temperature above 0.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    debug: Debug = False,
) -> None:
    """Let a trained model go on from a prompt."""
    with told(debug):
        from headrace.cli.sample import sample as run

        run(folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chat=chat)


app.command()(verify)
app.command()(quantize)
app.command()(merge)
app.command()(bench)
app.command()(report)
app.command()(profile)
app.command()(plan)


def main() -> None:
    """Run the command line and exit with its code."""
    app(prog_name="headrace")  # also where it runs as a module


if __name__ == "__main__":
    main()
