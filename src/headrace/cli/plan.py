"""`headrace plan`: its flags. What they do is in the folder `planning`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.config import RunConfig
from headrace.cli.exits import told
from headrace.plan.shapes import SHAPES

NAMES = ", ".join(SHAPES)


@dataclass(frozen=True)
class Request:
    """What is to be planned, as asked; see the flags."""

    model: str
    gpu: str | None
    ram: str | None
    disk: str | None
    pcie: str | None
    ram_rate: str | None
    disk_dir: Path | None
    device_memory: str | None
    host_memory: str | None
    sequence_length: int | None
    batch: int | None
    accumulation: int
    compiled: bool
    endurance: str
    why: bool
    as_json: bool
    plot: Path | None


def _list_cards(asked: bool) -> None:
    if asked:
        from headrace.cli.planning.told import cards_told

        print(cards_told())
        raise typer.Exit


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"A shape ({NAMES}), "
                            "a folder, a config.json, or a hub id whose configuration is in the local cache.")
    ],
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="CARD", help='Plan for another machine with this card, such as "RTX '
                                 '3080 10GB"; --ram says the rest. This machine unless given.')
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Its RAM, such as 64GB.")] = None,
    disk: Annotated[
        str | None, typer.Option("--disk", metavar="RATE", help="Its disk, as 7GB/s, or 7/5GB/s to read and to write, "
                                 "with free space as in 7GB/s,2TB (1 TB unless told). No disk unless given.")
    ] = None,
    pcie: Annotated[
        str | None, typer.Option("--pcie", metavar="SLOT", help="Its slot, as 4x16; as the card unless given.")
    ] = None,
    ram_rate: Annotated[
        str | None, typer.Option("--ram-rate", metavar="RATE", help="What its memory carries when weights are updated; "
                                 "60GB/s, as two channels of DDR5 do, unless given.")
    ] = None,
    disk_dir: Annotated[
        Path | None, typer.Option("--disk-dir", metavar="FOLDER", help="On this machine: a folder on the disk that the "
                                  "run may use.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="Most device memory to use.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option("--host-memory", metavar="SIZE", help="Most RAM to use.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=2, metavar="TOKENS", help="Tokens of a row; 1024 unless "
                                 "given, or the model's positions where those are fewer.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, metavar="ROWS", help="Rows in a micro-batch; the smallest that is "
                                 "nearly as fast as larger ones, unless given.")
    ] = None,
    accumulation: Annotated[
        int, typer.Option("--accumulation", min=1, help="Micro-batches in a step.")
    ] = 1,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Plan for blocks that torch.compile has made faster.")
    ] = RunConfig.model_fields["compile"].default,
    endurance: Annotated[
        str, typer.Option("--endurance", metavar="SIZE", help="Bytes that the disk is rated to be written with.")
    ] = "600TB",
    why: Annotated[
        bool, typer.Option("--why", help="Explain the one that is chosen, and the cheapest upgrade that would help; "
                           "on stderr beside --json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects, one for each way.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw memory and the lanes of one step, as SVG.")
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", callback=_list_cards, is_eager=True, help="List the cards that are known.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:  # fmt: skip
    """Say what can be trained, at which context and how fast, before anything is trained.

    One line for each way: all weights with AdamW, with narrower moments, adapters on a bf16 base and on one in four
    bits. Each fits, or by how much it does not. Times come from a simulation of the very programs that training runs.
    Exits with 0 when one of the ways that Headrace trains today fits, else with 1.
    """
    with told(debug):
        from headrace.cli.planning.run import run

        code = run(
            Request(
                model, gpu, ram, disk, pcie, ram_rate, disk_dir, device_memory, host_memory, sequence_length, batch,
                accumulation, compiled, endurance, why, as_json, plot,
            )
        )  # fmt: skip
    if code:
        raise typer.Exit(code)
