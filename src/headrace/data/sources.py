"""Which sources make up the data: paths, folders and hub ids in, a list of readable sources out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.base.errors import DataError

Kind = Literal["text", "rows", "table", "dataset"]

KINDS: dict[str, Kind] = {
    ".text": "text", ".txt": "text", ".md": "text", ".py": "text", ".jsonl": "rows", ".ndjson": "rows",
    ".csv": "table", ".tsv": "table", ".parquet": "dataset", ".arrow": "dataset",
}  # fmt: skip
FOLDER_SUFFIXES = tuple(suffix for suffix in KINDS if KINDS[suffix] != "table")
# Read as text these would train on markup or on binary noise, so they are refused by name.
UNREAD_SUFFIXES = (".json", ".feather", ".gz", ".bz2", ".xz", ".zst", ".zip")

_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+)(?=:))?(?::([\w.+\[\]%:-]+))?")


@dataclass(frozen=True)
class Source:
    """One source. `place`: file, folder of `save_to_disk`, or hub id; `found`: it was found in a folder.

    Kinds: one text document; JSONL rows; a table with a header line; a dataset, read by the package datasets, of
    which `config` and `split` are taken.
    """

    place: str
    kind: Kind
    found: bool = False
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return ":".join(part for part in (self.place, self.config, self.split) if part)


def find_sources(paths: Sequence[str | Path], passed_over: Counter[str] | None = None) -> list[Source]:
    """Sources named by `paths`, in that order; folders are walked recursively, sorted, without hidden entries.
    `passed_over` counts their other files by ending.

    A folder contributes files that end in .text, .txt, .md, .py, .jsonl, .ndjson, .parquet or .arrow; a file that
    is named itself may also be .csv or .tsv, and with any other ending it is read as text. A folder written by
    `save_to_disk` and a hub id "owner/name" are datasets, with ":split" or ":config:split" behind them if need be.
    Raises DataError for a path that does not exist, a folder without such files, and formats that are not read.
    """
    sources: list[Source] = []
    for given in map(str, paths):
        path, dataset = Path(given), dataset_of(given)
        if dataset is not None:
            sources.append(dataset)
            continue
        if path.is_dir():
            files = [(file, file.suffix.lower()) for file in _walk(path)]
            found = [Source(str(file), KINDS[end], found=True) for file, end in files if end in FOLDER_SUFFIXES]
            others = Counter(end for _, end in files if end not in FOLDER_SUFFIXES)
            if passed_over is not None:
                passed_over.update(others)
            if not found:
                there = f"; it holds {by_ending(others)}" if others else ""
                raise DataError(
                    f"the folder {path} holds no data",
                    f"looked for files ending in {', '.join(FOLDER_SUFFIXES)}{there}",
                    "Name another folder, or name the files themselves",
                )  # fmt: skip
            sources.extend(found)
            continue
        if not path.exists():
            raise DataError(
                f"the data path {path} does not exist", f"looked for in {Path.cwd()}",
                "Name a JSONL file, a text file, a folder, or a dataset on the hub as owner/name:split",
            )  # fmt: skip
        suffix = path.suffix.lower()
        if suffix in UNREAD_SUFFIXES:
            raise DataError(
                f"{path} is not in a format that is read", f"{suffix}; read are {', '.join(KINDS)}",
                'Write it as JSONL, one object a line with "text", "messages", or "prompt" and "completion"',
            )  # fmt: skip
        sources.append(Source(given, KINDS.get(suffix, "text")))
    return sources


def by_ending(files: Counter[str]) -> str:
    """Such as "2 .csv, 1 .png, 1 without an ending"."""
    return ", ".join(f"{count} {ending or 'without an ending'}" for ending, count in files.most_common())


def dataset_of(place: str) -> Source | None:
    """The dataset that `place` names: a folder of `save_to_disk` or a hub id; None when it names neither.

    What exists is never a hub id, nor is what ends like a file of data: a misspelt path is not looked for on the hub.
    """
    folder, _, split = place.rpartition(":")
    if _is_saved(Path(place)):
        return Source(place, "dataset")
    if folder and _is_saved(Path(folder)):
        return Source(folder, "dataset", split=split)
    match = _HUB_ID.fullmatch(place)
    if match is None or place.startswith(".") or Path(match.group(1)).exists():
        return None
    if Path(match.group(1)).suffix.lower() in (*KINDS, *UNREAD_SUFFIXES):
        return None
    return Source(match.group(1), "dataset", config=match.group(2), split=match.group(3))


def absolute(place: str) -> str:
    """The same place from any folder: paths made absolute, hub ids as they are."""
    dataset = dataset_of(place)
    if dataset is not None and not Path(dataset.place).exists():
        return place
    return str(Path(place).expanduser().absolute())


def _is_saved(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def _walk(folder: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(folder):
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        for file in sorted(files):
            if not file.startswith("."):
                yield Path(name) / file
