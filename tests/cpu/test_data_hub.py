"""Hugging Face datasets: on disk, as parquet and arrow files, and on the hub. Nothing here touches a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import DataError
from headrace.data.broken import Broken
from headrace.data.rows import Pair, Text, read_rows
from headrace.data.sources import absolute, dataset_of, find_sources
from headrace.data.turns import Chat

CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def calling(name: str, **arguments: int) -> list[dict[str, Any]]:
    call = {"name": name, "arguments": arguments}
    return [CONVERSATION[0], {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    module.disable_progress_bars()
    return module


def read(place: Path | str) -> list[Any]:
    return [row for source in find_sources([place]) for row in read_rows(source)]


def test_a_folder_of_save_to_disk(datasets: Any, tmp_path: Path) -> None:
    """Its other columns are passed over, and the nulls by which a table fills up turns are no fields."""
    rows = [{"messages": CONVERSATION, "id": 1}, {"messages": calling("f", a=1)}, {"messages": calling("g", b=2)}]
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    first, *calls = read(folder)
    assert first == Chat(f"{folder}[0]", CONVERSATION, (1,))
    for row, wanted in zip(calls, (calling("f", a=1), calling("g", b=2)), strict=True):
        assert row.messages == [wanted[0], {**wanted[1], "content": ""}]


def test_splits_of_a_folder(datasets: Any, tmp_path: Path) -> None:
    made = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"all": made["test"]}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"a": made["train"], "b": made["test"]}).save_to_disk(tmp_path / "unclear")
    assert read(tmp_path / "both") == [Text(f"{tmp_path / 'both'}[0]", "train")]
    assert read(f"{tmp_path / 'both'}:test") == [Text(f"{tmp_path / 'both'}:test[0]", "test")]
    assert read(tmp_path / "one") == [Text(f"{tmp_path / 'one'}[0]", "test")]
    with pytest.raises(DataError, match=r"needs a split. its splits: a, b. Name one: .*unclear:a"):
        read(tmp_path / "unclear")
    with pytest.raises(DataError, match=r"has no valid. its splits: train, test"):
        read(f"{tmp_path / 'both'}:valid")
    made["train"].save_to_disk(tmp_path / "plain")
    with pytest.raises(DataError, match=r"has no splits. asked for train"):
        read(f"{tmp_path / 'plain'}:train")


def test_parquet_and_arrow_files_also_in_folders(datasets: Any, tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "p", "completion": "c", "text": None}, {"text": "t"}])
    (tmp_path / "files").mkdir()
    data.to_parquet(tmp_path / "files" / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.rename(tmp_path / "files" / "b.arrow")
    places = [str(tmp_path / "files" / name) for name in ("a.parquet", "b.arrow")]
    assert read(tmp_path / "files") == [
        row for place in places for row in (Pair(f"{place}[0]", "p", "c"), Text(f"{place}[1]", "t"))
    ]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is none")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read"):
        read(tmp_path / "bad.parquet")


def test_rows_and_columns_that_cannot_be_used(datasets: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", " "]}).save_to_disk(tmp_path / "rows")
    assert read(tmp_path / "rows")[1] == Broken(f"{tmp_path / 'rows'}[1]", '"text" is only white space')
    datasets.Dataset.from_dict({"body": ["a"]}).save_to_disk(tmp_path / "columns")
    with pytest.raises(DataError, match=r"no column that is read. columns: body; read are text, prompt"):
        read(tmp_path / "columns")


def test_hub_ids(datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str | None) -> Any:
        asked.append((name, config, split))
        rows = datasets.Dataset.from_dict({"text": ["x"]})
        return rows if split else datasets.DatasetDict({"train": rows})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    for place in ("owner/name", "owner/name:test", "owner/name:plain:train[:10%]", "owner/name-1.5:a-b"):
        assert read(place) == [Text(f"{place}[0]", "x")]
        assert absolute(place) == place
    assert asked == [
        ("owner/name", None, None), ("owner/name", None, "test"), ("owner/name", "plain", "train[:10%]"),
        ("owner/name-1.5", None, "a-b"),
    ]  # fmt: skip


def test_what_the_hub_refuses_says_that_there_is_no_such_path(datasets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach\n'owner/nothing' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"nothing cannot be read. no such path here; on the hub: ConnectionError"):
        read("owner/nothing")


@pytest.mark.parametrize("place", ["rows", "data/rows.jsonl", "data/a.parquet", "./owner/name", "a/b/c", "/owner/name"])
def test_a_misspelt_path_is_not_looked_for_on_the_hub(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dataset_of(place) is None
    with pytest.raises(DataError, match="does not exist"):
        find_sources([place])


def test_a_folder_is_never_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "a.txt").write_text("text")
    assert read("owner/name") == [Text("owner/name/a.txt:1", "text")]
    assert absolute("owner/name") == str(tmp_path / "owner" / "name")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"owner/name needs the package datasets.*pip install headrace\[data\]"):
        read("owner/name")


def test_the_package_is_imported_only_when_a_dataset_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}')
    program = (
        "import sys\nfrom headrace.data.rows import read_rows\nfrom headrace.data.sources import find_sources\n"
        "rows = [row for source in find_sources(sys.argv[1:]) for row in read_rows(source)]\n"
        "assert len(rows) == 1 and not {'datasets', 'pyarrow', 'torch', 'transformers'} & set(sys.modules)"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", program, tmp_path / "rows.jsonl"], env={"PYTHONPATH": source}, check=True)
