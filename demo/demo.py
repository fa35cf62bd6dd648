"""The demo: fine-tunes a real model from disk and compares losses and memory with plain PyTorch, all measured here.

Each part runs in a process of its own, so that its peak memory is its own. This one imports nothing heavy: a child
process starts with its parent's peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipe import FOLDER

HERE = Path(__file__).resolve().parent


def run(name: str, *arguments: str, capture: bool = False) -> str:
    """Run one part; what it prints goes to the terminal, or is returned when `capture` is set."""
    command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        raise SystemExit(f"demo: {name} failed (exit code {done.returncode})")
    return done.stdout or ""


def failures(streamed: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What does not hold of: equal losses, learning, less than half of the memory."""
    found = []
    for step, (ours, theirs) in enumerate(zip(streamed["losses"], plain["losses"], strict=False), 1):
        if abs(ours - theirs) > 1e-4:
            found.append(f"step {step}: streamed loss {ours:.6f}, plain PyTorch {theirs:.6f}")
    if not streamed["after"] <= streamed["before"] - 0.05:
        found.append("the validation loss fell by less than 0.05")
    if not streamed["peak_mib"] < plain["peak_mib"] / 2:
        found.append("streaming took half of the resident memory or more")
    return found


def main() -> None:
    run("prepare")
    print("demo: two steps of plain PyTorch, everything in RAM, for comparison", flush=True)
    plain = json.loads(run("plain", capture=True).splitlines()[-1])
    result = FOLDER / "streamed.json"
    result.unlink(missing_ok=True)
    run("streamed", str(result))
    streamed = json.loads(result.read_text())
    losses = (", ".join(f"{loss:.6f}" for loss in part["losses"][:2]) for part in (streamed, plain))
    print("demo: first losses: streamed {}; plain PyTorch {}".format(*losses))
    found = failures(streamed, plain)
    for line in found:
        print(f"demo: failed: {line}")
    print(
        f"demo: validation loss {streamed['before']:.4f} -> {streamed['after']:.4f},"
        f" peak RSS {streamed['peak_mib']:.0f} MiB,"
        f" resident training would need {plain['peak_mib']:.0f} MiB",
        flush=True,
    )
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
