"""How long it takes from a model folder to the end of the first training step, beside reading the folder alone.

    python benchmarks/first_step.py 7b FOLDER --device-memory 8GiB --host-memory 118GiB

Saves random weights of the shape in FOLDER where it holds none. Then, each in a process of its own: reads the files
past the page cache as fast as the disk gives them; and imports, loads, wraps with AdamW and clipping, and trains two
steps, with compiled blocks. Prints both, and how long the first step takes to come without the disk's time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
Found = dict[str, Any]


def save(shape: str, folder: Path) -> None:
    """Random weights of a shape, one tensor in memory at a time."""
    import torch

    from headrace.cli.benchmark.shapes import QuickWeights, build, config_of
    from headrace.files.safetensors import ShardWriter
    from headrace.plan.shapes import shape_named

    known = shape_named(shape)
    if known is None:
        raise SystemExit(f"{shape} is no shape that `headrace bench` knows")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(known)))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, source = build(shape, torch.bfloat16, None, 1024, device), QuickWeights(device)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    with ShardWriter(folder, [(name, torch.bfloat16, sizes) for name, sizes in shapes.items()]) as writer:
        for name, sizes in shapes.items():
            weight = torch.empty(sizes, dtype=torch.bfloat16)
            source.read_into(name, weight)
            writer.add(name, weight)


def forget(folder: Path) -> None:
    """Leave nothing of the files in the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> Found:
    """Seconds in which the disk gives all bytes of the weights."""
    import torch

    from headrace.files.positional import PositionalFile

    began, nbytes = time.perf_counter(), 0
    out = torch.empty(64 << 20, dtype=torch.uint8)
    for path in sorted(folder.glob("*.safetensors")):
        file, size = PositionalFile.open(path), path.stat().st_size
        for start in range(0, size, out.nbytes):
            file.read(start, out[: min(out.nbytes, size - start)])
        file.close()
        nbytes += size
    return {"seconds": time.perf_counter() - began, "bytes": nbytes}


def train(folder: Path, rows: int, tokens: int, options: dict[str, Any]) -> Found:
    """Seconds to the end of each part, from the start of the process."""
    import psutil
    import torch

    import headrace
    from headrace.hardware.rates import settle

    began, marks = psutil.Process().create_time(), dict[str, float]()

    def mark(name: str) -> None:
        marks[name] = time.time() - began

    mark("imported")
    model = headrace.load_model(str(folder), dtype="bfloat16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    mark("built")
    model, optimizer = headrace.wrap(
        model, optimizer, max_grad_norm=1.0, compile=torch.cuda.is_available(), batch_shape=[rows, tokens], **options
    )
    mark("opened")
    session = headrace.session(model)
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens), device=session.device)
    losses = []
    for step in ("first step", "second step"):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        headrace.memory_report(model)
        settle(session.device)
        losses.append(float(loss.detach()))
        mark(step)
    return {"seconds": marks, "losses": losses}


def apart(words: list[str]) -> Found:
    """What this script prints last in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", default="8x1024", help="ROWSxTOKENS")
    parser.add_argument("--device-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--device")
    parser.add_argument("--part", choices=("read", "train"), help="only this, in this process")
    asked = parser.parse_args()
    rows, tokens = map(int, asked.work.split("x"))
    names = ("device_memory", "host_memory", "device")
    options = {name: getattr(asked, name) for name in names if getattr(asked, name)}
    if asked.part is None:
        if not any(asked.folder.glob("*.safetensors")):
            save(asked.shape, asked.folder)
        disk, run = (apart([*sys.argv[1:], "--part", part]) for part in ("read", "train"))
        first = run["seconds"]["first step"]
        print(f"disk alone: {disk['bytes'] / 1e9:.1f} GB in {disk['seconds']:.1f} s")
        print("since the start: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run["seconds"].items()))
        print(
            f"first step after {first:.1f} s, {first - disk['seconds']:.1f} s beside the disk's; losses {run['losses']}"
        )
        return
    forget(asked.folder)
    print(json.dumps(read(asked.folder) if asked.part == "read" else train(asked.folder, rows, tokens, options)))


if __name__ == "__main__":
    main()
