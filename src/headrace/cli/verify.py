"""`headrace verify`: its flags. What they do is in `verification`, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.exits import told

DEFAULT_PLACEMENTS = ("host", "disk")


@dataclass(frozen=True)
class Request:
    """What is to be verified, as asked; see the flags."""

    model: str
    device: str | None
    device_memory: str | None
    host_memory: str | None
    disk_dir: Path | None
    placements: tuple[str, ...]
    window: int | None
    layers: int | None
    steps: int
    batch: int
    sequence_length: int
    dtype: str
    data: Path | None
    random_weights: bool
    seed: int
    tolerance: float | None
    top: int
    as_json: bool


def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of a model, or a config.json.")],
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="Most device memory that streaming may use, "
                                 "such as 2GiB.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Only the first N layers, so that the resident model fits.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")] = 3,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows of each step.")] = 2,
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=8, help="Tokens of the longest row.")] = 64,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, which shows every fault, or bfloat16, to within its rounding.")
    ] = "float32",
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", help="Text to train on; random token ids unless given.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights although the model has its own.")
    ] = False,
    placement: Annotated[
        list[str] | None,
        typer.Option("--placement", metavar="TIER", help="auto, device, host or disk, for weights and state; may be "
                     "repeated. Host and disk unless given.", show_default=False),
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option("--disk-dir", metavar="FOLDER", help="Folder on a disk; unless given, that for "
                                  "temporary files.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda; a GPU if there is one.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", metavar="SIZE", help="Most RAM that streaming may use.")
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Blocks on the device at once; unless given, 3 or as the "
                                 "budget allows.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of random weights, token ids and dropout.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", min=0.0, help="Largest relative error; 1e-5 in float32 and 0.05 in bfloat16 "
                     "unless given."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Worst gradients to show of each placement.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, all tensors included, as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:  # fmt: skip
    """Train a few steps streamed and resident, and compare: losses, every gradient, and where the bytes really live.

    Exits with 0 when all is right, 1 when anything is beyond the tolerance or on another tier than it should be, 2 for
    mistakes in the configuration.
    """
    with told(debug):
        from headrace.cli.verification import run

        passed = run(
            Request(
                model, device, device_memory, host_memory, disk_dir, tuple(placement or DEFAULT_PLACEMENTS), window,
                layers, steps, batch, sequence_length, dtype, data, random_weights, seed, tolerance, top, as_json,
            )
        )  # fmt: skip
    if not passed:
        raise typer.Exit(1)
