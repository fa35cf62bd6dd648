"""`headrace bench`: its flags. What they do is in the folder `benchmark`, most of which needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.exits import told
from headrace.plan.shapes import SHAPES

NAMES = ", ".join(SHAPES)
USUAL_WORK = {"cuda": "8x1024", "cpu": "2x128"}
"""What is measured where no WORK is given, by kind of device: on a CPU a small shape then takes seconds a step."""


@dataclass(frozen=True)
class Request:
    """What is to be measured, as asked; see the flags."""

    model: str
    works: tuple[str, ...]
    """Empty: the usual one of the device."""
    max_grad_norm: str
    options: dict[str, Any]
    """Options of `headrace.wrap` by name, None where not given."""
    settings: tuple[str, ...]
    card: str | None
    """Memory of the card to behave like."""
    layers: int | None
    lora: int | None
    """Rank of the adapters that train beside a frozen base; None: all weights train."""
    dtype: str
    lr: float
    steps: int
    warm_up: int
    rates: bool
    profile: bool
    as_json: bool
    live: bool
    timeout: float | None
    trace: Path | None
    against: str
    peers: Path | None


def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"A shape ({NAMES}), "
                            "whose weights are random, a model folder, or a config.json.")
    ],
    work: Annotated[
        list[str] | None,
        typer.Option("--work", metavar="WORK", help="Tokens of a step, as ROWSxTOKENS or MICRO*ROWSxTOKENS, such as "
                     "16*8x1024 for 16 micro-batches of 8 rows of 1024 tokens; @NORM after it is its own clipping, as "
                     "8x1024@1e-3 or 8x1024@none. May be repeated: one session does all that clip, another those that "
                     f"do not. {USUAL_WORK['cuda']} on a GPU and {USUAL_WORK['cpu']} on a CPU unless given.",
                     show_default=False),
    ] = None,
    max_grad_norm: Annotated[
        str, typer.Option("--max-grad-norm", metavar="NORM", help="Clipping of each WORK that names none; none: no "
                          "clipping, so that updates run inside the backward. With clipping they hide behind the next "
                          "forward only, but for those that are guessed.")
    ] = "1.0",
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu or cuda; a GPU if there is one.")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="Most device memory to use.")
    ] = None,
    card: Annotated[
        str | None, typer.Option("--card", metavar="SIZE", help="Behave as on a card of this memory: what does not fit "
                                 "fails. 1 GiB of it is taken to be CUDA's own.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option("--host-memory", metavar="SIZE", help="Most RAM to use.")] = None,
    disk_dir: Annotated[
        Path | None, typer.Option("--disk-dir", metavar="FOLDER", help="Folder on a disk for what RAM does not hold.")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option("--placement", metavar="TIERS", help="auto, or a tier (device, host, disk) for weights and state, "
                     "or one for each, as host,disk. auto unless given.", show_default=False),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", min=1, help="Blocks on the device at once; 3 unless given.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help="Rows that run through a block at once; all of a micro-batch "
                                 "unless given.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the update on the host.")] = None,
    update: Annotated[
        str | None, typer.Option("--update", metavar="WHERE", help="auto, host, device or both: where weights are "
                                 "updated whose state is in RAM.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", metavar="WAY", help="auto, or what becomes of blocks' activations: "
                                 "keep them, recompute them, or recompute them from inputs that wait in RAM (host).")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile the blocks. On for a GPU unless given.",
                                  show_default=False)
    ] = None,
    quantize: Annotated[
        str | None, typer.Option("--quantize", metavar="CODEC", help="Store frozen weights so: nf4, nf4+double, int8, "
                     "fp8, ... Of random weights codes and scales are made, without encoding numbers.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other option of headrace.wrap; may be repeated."),
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Only the first N layers.")] = None,
    lora: Annotated[
        int | None, typer.Option("--lora", min=1, metavar="RANK", help="Train LoRA adapters of this rank on all linear "
                                 "layers of the blocks, and freeze the rest. Needs peft.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="bfloat16 or float32: type of the weights that compute.")
    ] = "bfloat16",
    lr: Annotated[float, typer.Option("--lr", min=0.0, help="Learning rate of AdamW.")] = 1e-5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured.")] = 8,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=1, help="Steps before them, of each WORK: in the third of a session that "
                          "clips the first updates are guessed.")
    ] = 3,
    rates: Annotated[
        bool, typer.Option("--rates/--no-rates", help="Measure each lane alone, for the roofline and the utilisation.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Where no profile of this machine is kept, measure it first, "
                           "for the predictions; else usual rates stand in.")
    ] = True,
    against: Annotated[
        str, typer.Option("--against", metavar="NAMES", help="Other systems to run on the same work, each in a process "
                          "of its own: any of torch, reach, deepspeed, fsdp2, trainstream, bitsandbytes, with commas; "
                          "qlora (bitsandbytes and peft) for --lora.")
    ] = "",
    peers: Annotated[
        Path | None, typer.Option("--peers", metavar="FOLDER", help="Their scripts; benchmarks/peers of the repository "
                                  "unless given.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write when each op of the measured steps ran, one "
                                  "track per lane, for ui.perfetto.dev; with several WORKs the file's name gets a "
                                  "number.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Print a JSON line for each step as it finishes.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, metavar="SECONDS", help="End in order by then, and report "
                                   "what there is.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:  # fmt: skip
    """Measure training steps: seconds, tokens, what each lane does, and how far that is from what the machine can do.

    Seconds per step are those of all steps that count and the wait for their last update, after the warm-up. The
    roofline is what the busiest lane would take at the rate that it has alone on this machine, measured in the same
    run. The floor counts too that updates which wait for the norm of all gradients hide behind the next forward only:
    no step is shorter than the backward's compute and the longer of the forward's compute and those updates. Beside
    what was measured stands what the simulator makes of the same placement and work, by the profile of this machine.

    Ctrl-C ends after the step in flight, and what was measured is reported. Exits with 0 when all was measured or the
    time was up, 1 when a WORK failed or nothing was measured, 2 for mistakes in the configuration.
    """
    options = {
        "device": device, "device_memory": device_memory, "host_memory": host_memory, "disk_dir": disk_dir,
        "placement": placement, "window": window, "rows": rows, "threads": threads, "update": update,
        "activations": activations, "compile": compiled, "quantize": quantize,
    }  # fmt: skip
    with told(debug):
        from headrace.cli.benchmark.run import run

        code = run(
            Request(
                model, tuple(work or ()), max_grad_norm, options, tuple(settings or ()), card, layers, lora,
                dtype, lr, steps, warm_up, rates, profile, as_json, live, timeout, trace, against, peers,
            )
        )  # fmt: skip
    if code:
        raise typer.Exit(code)
