"""`headrace quantize`: its flags. What they do is in `quantization`, which needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.exits import told


@dataclass(frozen=True)
class Request:
    """What is to be quantised, as asked; see the flags."""

    model: str
    out: Path
    codec: str
    keep_first: int
    keep_last: int
    overrides: tuple[str, ...]
    most_error: float | None
    bits: float | None
    report: bool
    text: Path | None
    sequence_length: int
    most_tokens: int
    device: str | None
    dtype: str | None


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of a model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new, or empty.")],
    codec: Annotated[
        str, typer.Option("--codec", help="int8, int8/row, nf4, nf4+double, fp8 or nvfp4; with its block as in "
                          "nf4/128.")
    ] = "nf4",
    keep_first: Annotated[
        int, typer.Option("--keep-first", min=0, help="Blocks at the start that keep their format.")
    ] = 0,
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, help="Blocks at the end that do.")] = 0,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="PATTERN=CODEC", help="Another codec, or bf16 for none, for weights whose "
                     "name matches; may be repeated, the last one that matches counts.", show_default=False),
    ] = None,
    most_error: Annotated[
        float | None, typer.Option("--most-error", metavar="X", help="Keep matrices whose relative error is larger, as "
                                   "0.09, in int8 or in their format.")
    ] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", metavar="N", help="Keep those that lose most in int8 or in their format, "
                                   "as far as the blocks' matrices take N bits a weight in all.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Print bytes and error of every weight.")] = False,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="Text on which the perplexity before and after is "
                                  "measured.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", min=8, help="Tokens of a row of that text.")
    ] = 1024,
    most_tokens: Annotated[
        int, typer.Option("--most-tokens", min=8, help="Tokens of that text that are used, from its start.")
    ] = 65536,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Where the perplexity is measured: cpu or cuda; a "
                                 "GPU if there is one.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Format of what is not quantised; the checkpoint's unless given.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:  # fmt: skip
    """Write a model with the matrices of its blocks compressed: headrace.load_model opens it without decoding, as the
    frozen base of adapters. One weight is in memory at a time.
    """
    with told(debug):
        from headrace.cli.quantization import run

        run(
            Request(
                model, out, codec, keep_first, keep_last, tuple(override or ()), most_error, bits,
                report, text, sequence_length,
                most_tokens, device, dtype,
            )
        )  # fmt: skip
