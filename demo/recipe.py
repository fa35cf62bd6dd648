"""What the streamed and the plain run share: where things lie, the texts, the batches, the optimizer."""

from __future__ import annotations

import ast
import json
import platform
import random
import resource
import sys
import sysconfig
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / ".demo"
MODEL = FOLDER / "model"  # safetensors, tokenizer, chat template

STEPS, WARM_UP_STEPS = 16, 4
ROWS, TOKENS = 4, 128  # of one batch, of one row
HELD_OUT_ROWS = 32
LEARNING_RATE = 1e-4

# Token ids, {"train": rows, "held_out": rows}. The standard library differs between versions of Python.
TEXTS = FOLDER / f"texts-{STEPS * ROWS}-{HELD_OUT_ROWS}x{TOKENS}-python-{platform.python_version()}.json"

# Docstrings of these files of the standard library. The split is by file: nothing held out was seen in training.
TRAIN_FILES = """argparse ast bisect calendar configparser contextlib copy csv dataclasses datetime difflib doctest enum
    fractions functools heapq imaplib inspect ipaddress locale mailbox nntplib ntpath os pathlib pdb pickle platform
    posixpath pprint profile queue random shutil smtplib socket socketserver statistics string subprocess tarfile
    tempfile textwrap threading timeit tokenize trace traceback turtle types typing uuid warnings wave weakref
    zipfile""".split()
HELD_OUT_FILES = """asyncio/events asyncio/streams asyncio/tasks cmd ftplib gettext fileinput http/client
    logging/handlers optparse sched shelve xmlrpc/client""".split()


def docstrings(name: str) -> str:
    """The docstrings of a file of the standard library, each after the name that it describes ("" if not there)."""
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"
    if not path.exists():
        return ""
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 40:
                texts.append(f"{node.name}: {text}")
    return "\n\n".join(texts)


def rows_of(files: list[str], tokenizer: Any) -> list[list[int]]:
    """The files' docstrings as rows of TOKENS token ids, in an order that is the same on every run."""
    rows = []
    for name in files:
        ids = tokenizer(docstrings(name))["input_ids"]
        rows += [ids[start : start + TOKENS] for start in range(0, len(ids) - TOKENS + 1, TOKENS)]
    random.Random(0).shuffle(rows)
    return rows


def batches(part: str) -> list[Any]:
    """Token ids, (ROWS, TOKENS) each: one per training step, or all of the held-out rows."""
    import torch

    rows = json.loads(TEXTS.read_text())[part]
    count = STEPS * ROWS if part == "train" else HELD_OUT_ROWS
    return [torch.tensor(rows[start : start + ROWS]) for start in range(0, count, ROWS)]


def optimizer_and_schedule(model: Any) -> tuple[Any, Any]:
    """Full AdamW over every weight, with a linear warm-up."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    return optimizer, schedule


def peak_memory() -> float:
    """Peak resident memory of this process, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
