"""Which files make up the data: paths and folders in, a sorted list of readable files out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import DataError

ROW_SUFFIXES = (".jsonl", ".ndjson")
FOLDER_SUFFIXES = (".text", ".txt", ".md", ".py", *ROW_SUFFIXES)
# Read as text these would train on markup or on binary noise, so they are refused by name.
UNREAD_SUFFIXES = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".gz", ".bz2", ".xz", ".zst", ".zip")


@dataclass(frozen=True)
class Source:
    """One file. `rows`: JSONL (one row a line), else one text document. `found`: it was found in a folder."""

    path: Path
    rows: bool
    found: bool


def find_sources(paths: Sequence[str | Path]) -> list[Source]:
    """Files named by `paths`, in that order; folders are walked recursively, sorted, without hidden entries.

    A folder contributes files that end in .text, .txt, .md, .py, .jsonl or .ndjson; a file that is named
    itself may have any other ending and is then read as text. Raises DataError for a path that does not
    exist, a folder without such files, and formats that are not read (.json, .csv, .parquet, archives).
    """
    sources: list[Source] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = [Source(file, file.suffix.lower() in ROW_SUFFIXES, True) for file in _walk(path)]
            if not found:
                raise DataError(
                    f"the folder {path} holds no data", f"looked for files ending in {', '.join(FOLDER_SUFFIXES)}",
                    "Name another folder, or name the files themselves",
                )  # fmt: skip
            sources.extend(found)
            continue
        if not path.exists():
            raise DataError(f"the data path {path} does not exist", "", "Name a JSONL file, a text file or a folder")
        suffix = path.suffix.lower()
        if suffix in UNREAD_SUFFIXES:
            raise DataError(
                f"{path} is not in a format that is read", f"{suffix}; read are JSONL and plain text",
                'Write it as JSONL, one object a line with "text" or with "prompt" and "completion"',
            )  # fmt: skip
        sources.append(Source(path, suffix in ROW_SUFFIXES, False))
    return sources


def _walk(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        for file in sorted(files):
            if not file.startswith(".") and Path(file).suffix.lower() in FOLDER_SUFFIXES:
                yield Path(name) / file
