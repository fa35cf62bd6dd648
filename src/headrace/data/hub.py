"""Rows of Hugging Face datasets: folders of `save_to_disk`, parquet and arrow files, datasets on the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import DataError
from headrace.data.sources import Source


def read_dataset(source: Source, fields: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """(row, where) of every row, with those of its columns that are in `fields`; nulls are left out.

    Raises DataError when the package datasets is missing, and when the source, its split or its columns are.
    """
    rows = _opened(source)
    columns = rows.column_names
    kept = [name for name in fields if name in (columns or ())]
    if columns is not None and not kept:
        raise DataError(
            f"the dataset {source} has no column that is read",
            f"columns: {', '.join(columns)}; read are {', '.join(fields)}",
            "Rename its columns, or write it as JSONL",
        )  # fmt: skip
    try:
        for index, row in enumerate(rows.select_columns(kept) if kept else rows):
            # A table gives each row the columns of all rows; null says that this one has none.
            given = {name: _without_nulls(value) for name, value in row.items() if value is not None}
            yield given, f"{source}[{index}]"
    except DataError:
        raise
    except Exception as error:  # a damaged file fails in the package's own ways
        raise _unreadable(source, error) from error


def _opened(source: Source) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"reading {source} needs the package datasets", f"it cannot be imported ({error})",
            "Install it: pip install headrace[data]",
        ) from error  # fmt: skip
    path = Path(source.place)
    try:
        if path.is_dir():
            return _part(source, datasets.load_from_disk(source.place))
        if path.exists():  # streamed: else the package would first copy the file into its cache
            kind = path.suffix.lower()[1:]
            return datasets.load_dataset(kind, data_files=[str(path)], split="train", streaming=True)
        return _part(source, datasets.load_dataset(source.place, source.config, split=source.split))
    except DataError:
        raise
    except Exception as error:  # every way in which files, a network or a format can fail
        raise _unreadable(source, error) from error


def _part(source: Source, loaded: Any) -> Any:
    """The split that was asked for; without one, the only split or "train"."""
    if not isinstance(loaded, dict):
        if source.split is not None and Path(source.place).exists():
            raise DataError(f"the dataset {source.place} has no splits", f"asked for {source.split}", "Leave it away")
        return loaded
    split = source.split or ("train" if "train" in loaded else next(iter(loaded)) if len(loaded) == 1 else None)
    if split is None or split not in loaded:
        raise DataError(
            f"the dataset {source} needs a split" if split is None else f"the dataset {source.place} has no {split}",
            f"its splits: {', '.join(loaded)}", f"Name one: {source.place}:{next(iter(loaded), 'train')}",
        )  # fmt: skip
    return loaded[split]


def _unreadable(source: Source, error: Exception) -> DataError:
    reason = " ".join(str(error).split())[:300]
    here = "" if Path(source.place).exists() else "no such path here; on the hub: "
    return DataError(
        f"the dataset {source} cannot be read", f"{here}{type(error).__name__}: {reason}",
        "Check its name (a path, or owner/name:split or owner/name:config:split on the hub) and the network",
    )  # fmt: skip


def _without_nulls(value: Any) -> Any:
    """Nested values without nulls: a table gives each turn the fields of all turns."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
