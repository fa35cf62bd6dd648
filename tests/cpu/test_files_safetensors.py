"""Own safetensors reader and writer against the safetensors package and against damaged files."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch

from alone import alone, growth
from headrace.base.errors import FormatError, StoreError
from headrace.files import positional
from headrace.files.safetensors import DTYPES, ShardWriter, TensorReader, TensorSpec, read_header
from headrace.files.safetensors.pieces import pieces

safetensors_torch = pytest.importorskip("safetensors.torch")


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(shape).add(0.5).to(dtype)
    return torch.randint(0, 100, shape).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and bytes(positional.tensor_bytes(a)) == bytes(positional.tensor_bytes(b))


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("limit", [10**9, 3000, 100])
def test_every_dtype_is_written_as_the_package_reads_it(tmp_path: Path, limit: int) -> None:
    names = {
        f"{name}.{shape}": random_tensor(dtype, shape)
        for name, dtype in DTYPES.items()
        for shape in ((), (3, 5, 7), (0, 4))
    }
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in names.items()]
    with ShardWriter(tmp_path, specs, limit) as writer:
        for name, tensor in names.items():
            writer.add(name, tensor)
    files = sorted(tmp_path.glob("*.safetensors"))
    loaded = {name: tensor for path in files for name, tensor in safetensors_torch.load_file(path).items()}
    assert loaded.keys() == names.keys()
    assert all(same(loaded[name], names[name]) for name in names)
    with TensorReader(tmp_path) as reader:
        assert all(same(reader.read(name), names[name]) for name in names)
        assert reader.metadata == {"format": "pt"}
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        fields = json.loads(index.read_text())
        assert fields["metadata"]["total_size"] == sum(tensor.nbytes for tensor in names.values())
        assert set(fields["weight_map"].values()) == {path.name for path in files}
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.rand(3, 257),
        "b": torch.randint(0, 9, (5,), dtype=torch.uint8),
        "c": torch.rand(7).bfloat16(),
    }
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"who": "me"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"who": "me"}
    with TensorReader(tmp_path / "x.safetensors") as reader:
        assert set(reader) == set(tensors) and len(reader) == 3 and "a" in reader and "z" not in reader
        assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())
        starts = [reader.entries[name].start for name in reader.in_file_order(["c", "b", "a"])]
        assert starts == sorted(starts)


DAMAGES = {
    "empty": (b"", "cut off", "0 bytes"),
    "seven bytes": (b"1234567", "cut off", "7 bytes"),
    "length beyond the file": (struct.pack("<Q", 50) + b"{}", "beyond the end", "50 bytes announced, 2 are there"),
    "length beyond the limit": (struct.pack("<Q", 2**63 + 5) + b"{}", "limit of the format", str(2**63 + 5)),
    "not JSON": (struct.pack("<Q", 4) + b"{'a}", "not JSON", "4 bytes"),
    "not UTF-8": (struct.pack("<Q", 4) + b'{"\xff"', "not JSON", "4 bytes"),
    "a list": (struct.pack("<Q", 2) + b"[]", "no table", "2 bytes"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON", "200000 bytes"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_header_is_named(tmp_path: Path, name: str) -> None:
    content, what, numbers = DAMAGES[name]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and what in str(caught.value) and numbers in str(caught.value)


BAD_ENTRIES = {
    "unknown dtype": ({"a": entry("F4")}, 8, "unknown dtype 'F4'"),
    "dtype is no text": ({"a": entry("F32") | {"dtype": ["F32"]}}, 8, "unknown dtype"),
    "shape and length disagree": ({"a": entry(shape=[3])}, 8, "takes 12 bytes, the header gives it 8"),
    "negative shape": ({"a": entry(shape=[-2])}, 8, "impossible shape"),
    "huge shape": ({"a": entry(shape=[2**40, 2**40])}, 8, "disagree"),
    "shape of texts": ({"a": entry(shape=["2"])}, 8, "impossible shape"),
    "offsets backwards": ({"a": entry(offsets=[8, 0])}, 8, "impossible shape or place"),
    "one offset": ({"a": entry(offsets=[8])}, 8, "impossible shape or place"),
    "missing field": ({"a": {"dtype": "F32"}}, 8, "needs dtype, shape and data_offsets"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "'b' overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "'b' leaves a hole"),
    "hole at the start": ({"a": entry(offsets=[4, 12])}, 12, "leaves a hole"),
    "file shorter": ({"a": entry()}, 7, "shorter than its header says"),
    "file longer": ({"a": entry()}, 9, "longer than its header says"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry()}, 8, "__metadata__"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_a_header_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    header, nbytes, message = BAD_ENTRIES[name]
    path = raw_file(tmp_path / "broken.safetensors", header, bytes(nbytes))
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    field = json.dumps(entry())
    path = raw_file(tmp_path / "x", f'{{"a": {field}, "a": {field}}}'.encode(), bytes(8))
    with pytest.raises(FormatError, match="names 'a' twice"):
        read_header(path)


def test_one_byte_less_is_noticed_in_any_file(tmp_path: Path) -> None:
    safetensors_torch.save_file({"a": torch.rand(100)}, tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    os.truncate(tmp_path / "model.safetensors", size - 1)
    with pytest.raises(FormatError, match=f"needs {size} bytes, the file has {size - 1}"):
        TensorReader(tmp_path)


def write_sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{i}.weight": torch.rand(10, 10) for i in range(5)}
    with ShardWriter(folder, [TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], 900) as writer:
        for name in reversed(tensors):
            writer.add(name, tensors[name])
    return tensors


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(fields))
    with pytest.raises(FormatError, match="not there: ghost"):
        TensorReader(tmp_path)
    del fields["weight_map"]["ghost"], fields["weight_map"]["layer.0.weight"]
    index.write_text(json.dumps(fields))
    with TensorReader(tmp_path) as reader:
        assert len(reader) == 4
        with pytest.raises(FormatError, match=r"no tensor layer\.0\.weight"):
            reader.read("layer.0.weight")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"missing.*1 of 3 shards: model-00002-of-00003"):
        TensorReader(tmp_path)
    index.write_text("[]")
    with pytest.raises(FormatError, match="no index of shards"):
        TensorReader(index)
    index.unlink()
    with pytest.raises(FormatError, match=r"has no model\.safetensors"):
        TensorReader(tmp_path)


def test_values_of_any_layout_and_float_dtype_arrive(tmp_path: Path) -> None:
    big = torch.rand(1201, 1031)  # 4.9 MB: several pieces
    safetensors_torch.save_file({"big": big, "ids": torch.arange(5)}, tmp_path / "model.safetensors")
    with TensorReader(tmp_path) as reader:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            out = torch.empty(big.shape, dtype=dtype)
            reader.read_into("big", out)
            assert torch.equal(out, big.to(dtype))
        transposed = torch.empty(1031, 1201).t()
        reader.read_into("big", transposed)
        assert torch.equal(transposed, big)
        parameter = torch.nn.Parameter(torch.zeros(1201, 1031, dtype=torch.bfloat16))
        reader.read_into("big", parameter)
        assert torch.equal(parameter.detach(), big.bfloat16())
        for name, out in (
            ("big", torch.empty(1031, 1201)),
            ("ids", torch.empty(5)),
            ("big", torch.empty(1201, 1031).int()),
        ):
            with pytest.raises(FormatError, match="does not fit"):
                reader.read_into(name, out)
    with pytest.raises(StoreError, match="closed"):
        reader.read("big")


def test_pieces_cover_a_tensor_in_order_and_none_is_small() -> None:
    for shape in ((7, 11, 13), (1001,), (3, 335), (1, 1, 1001), (101, 9)):
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        found = list(pieces(tensor, 40))
        assert torch.equal(torch.cat([part.reshape(-1) for _, part in found]), tensor.view(-1))
        assert all(int(part.reshape(-1)[0]) == start and 10 <= part.numel() <= 40 for start, part in found)


def test_many_threads_read_more_shards_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.files.safetensors.reader.MAX_OPEN", 1)
    tensors = write_sharded(tmp_path)
    wrong: list[str] = []
    before = len(os.listdir("/proc/self/fd"))

    def work(reader: TensorReader) -> None:
        for _ in range(20):
            wrong.extend(name for name, tensor in tensors.items() if not same(reader.read(name), tensor))

    with TensorReader(tmp_path) as reader:
        threads = [threading.Thread(target=work, args=(reader,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert not wrong and len(os.listdir("/proc/self/fd")) == before


def test_a_file_replaced_behind_the_reader_is_noticed(tmp_path: Path) -> None:
    safetensors_torch.save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path)
    safetensors_torch.save_file({"a": torch.ones(4)}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="changed after it was opened"):
        reader.read("a")


def test_saving_again_replaces_the_files_of_the_earlier_save(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_sharded(tmp_path)
    with ShardWriter(tmp_path, [("only", torch.float32, (2,))]) as writer:
        writer.add("only", torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    tensors = write_sharded(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    with TensorReader(tmp_path) as reader:
        assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_writer_that_gives_up_leaves_the_earlier_save(tmp_path: Path) -> None:
    tensors = write_sharded(tmp_path)
    before = sorted(tmp_path.iterdir())
    writer = ShardWriter(tmp_path, [("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    writer.add("a", torch.ones(2))
    with pytest.raises(StoreError, match="1 of 2 are missing: b"):
        writer.close()
    with pytest.raises(FormatError), ShardWriter(tmp_path, [("a", torch.float32, (2,))]) as writer:
        writer.add("a", torch.ones(3))
    with pytest.raises(StoreError, match="writer is closed"):
        writer.add("a", torch.ones(2))
    assert sorted(tmp_path.iterdir()) == before
    with TensorReader(tmp_path) as reader:
        assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_full_disk_while_writing_is_named_and_costs_nothing_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sharded(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(StoreError, match=r"disk is full \(errno 28\).*0 of \d+ bytes"),
        ShardWriter(tmp_path, [("a", torch.float32, (2,))]) as writer,
    ):
        writer.add("a", torch.ones(2))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_writer_refuses_what_was_not_declared(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, [("a", torch.bfloat16, (2, 3))]) as writer:
        with pytest.raises(StoreError, match="not declared"):
            writer.add("b", torch.ones(2))
        with pytest.raises(FormatError, match="another shape"):
            writer.add("a", torch.ones(3, 2))
        value = torch.rand(3, 2).t()
        writer.add("a", value)
        with pytest.raises(StoreError, match="given twice"):
            writer.add("a", torch.ones(2, 3))
    assert torch.equal(safetensors_torch.load_file(tmp_path / "model.safetensors")["a"], value.bfloat16())
    with pytest.raises(FormatError, match="declared twice"):
        ShardWriter(tmp_path, [("a", torch.int8, (2,))] * 2)
    with pytest.raises(FormatError, match="cannot store"):
        ShardWriter(tmp_path, [("a", torch.complex128, (2,))])


def _two_hundred_megabytes_pass(folder: Path) -> tuple[int, int, list[int]]:
    """Memory taken by writing, by reading; bytes of each read."""
    calls: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(len(buffers[0]))
        return preadv(fd, buffers, offset)

    def write(rows: torch.Tensor) -> None:
        with ShardWriter(folder, [("big", torch.float32, tuple(rows.shape))]) as writer:
            writer.add("big", rows)

    def read(out: torch.Tensor) -> None:
        with TensorReader(folder) as reader:
            reader.read_into("big", out)

    write(torch.rand(3, 5))  # what is imported and compiled once
    read(torch.zeros(3, 5, dtype=torch.bfloat16))
    rows = torch.rand(1, 5000).expand(10_000, 5000)  # 200 MB, of which 20 KB exist
    out = torch.zeros(10_000, 5000, dtype=torch.bfloat16)
    written = growth(lambda: write(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        took = growth(lambda: read(out))
    assert torch.equal(out[::999], rows[::999].bfloat16())
    return written, took, calls


def test_two_hundred_megabytes_pass_in_large_reads_and_little_memory(tmp_path: Path) -> None:
    written, read, calls = alone(_two_hundred_megabytes_pass, tmp_path)
    assert written < 64 << 20 and read < 64 << 20
    assert len(calls) < 100 and min(calls) >= 1 << 20


def test_a_model_folder_in_shared_memory_is_read(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    folder = Path("/dev/shm") / f"headrace-test-{os.getpid()}"
    try:
        tensors = write_sharded(folder)
        with TensorReader(folder) as reader:
            assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_transformers_loads_a_sharded_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    state = model.state_dict()
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()]
    with ShardWriter(tmp_path, specs, max_shard_bytes=100_000) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
