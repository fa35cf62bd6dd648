"""`headrace quantize`: the folder that it writes, opened again without decoding, and what it prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace as package
import tiny_checkpoints as tiny
from against_plain import adamw, assert_equal, batch, distance, hf_loss, weights
from cpu.test_cli_world import headrace, save_model
from cpu.test_load_memory import MIB, WIDE, LiveBytes
from headrace import FormatError, ModelError, OptionError, load_model
from headrace.checkpoint.packed import save_quantised
from headrace.model.quantised import codec_of
from quantised_models import decoded, every


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def written(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, codec: str = "nf4") -> tuple[Path, Any]:
    """(a quantised folder of a tiny model, the decoded model)."""
    model = tiny.build(family, dtype)
    twin = decoded(model, codec, all_of_them=True)
    source = tiny.save(model, folder / "source")
    loaded = load_model(source, quantize=every(codec))
    losses = save_quantised(loaded, folder / "packed", 40_000)
    assert len(losses.errors) > 4 and 0 < max(losses.errors.values()) < 0.2
    return folder / "packed", twin


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "mixtral", "qwen3-moe", "phi3"])
def test_a_folder_opens_again_with_the_same_bits(family: str, tmp_path: Path) -> None:
    """Every parameter and buffer, before wrapping, wrapped, and after."""
    folder, twin = written(family, tmp_path)
    model = load_model(folder)
    assert_equal(weights(model), weights(twin))
    assert not any(p.requires_grad for p in model.parameters() if codec_of(p))
    model, _ = package.wrap(model, adamw(model), device="cpu", placement={"weights": "host"}, window=2)
    with package.session(model) as session:
        assert sum(unit.compressed for unit in session.spec.units) == 2
        assert_equal(weights(model), weights(twin))
        hf_loss(model, batch(2, 7, 0, 99)).backward()
        package.unwrap(model)
    assert_equal(weights(model), weights(twin))


def test_a_packed_weight_may_be_changed_before_wrap(tmp_path: Path) -> None:
    """It is packed in memory from then on, and its file stays as it is; the others are read from theirs."""
    folder, twin = written("llama", tmp_path)
    model, name = load_model(folder), "model.layers.1.mlp.up_proj.weight"
    parameter = model.get_parameter(name)
    parameter.data[:2] = 0.0
    expected = {**weights(twin), name: parameter.detach().clone()}
    assert (expected[name][:2] == 0).all() and codec_of(parameter) == "nf4"
    assert distance(expected[name][2:], weights(twin)[name][2:]) < 0.02
    model, _ = package.wrap(model, adamw(model), device="cpu", placement={"weights": "host"}, window=2)
    with package.session(model):
        assert_equal(weights(model), expected)
    assert_equal(weights(load_model(folder)), weights(twin))


def test_opening_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed bytes go as they are from the files to where they stay; memory is the result and one packed weight."""
    source = tiny.save(tiny.build("mixtral", torch.bfloat16, **WIDE), tmp_path / "a", "10MB")
    save_quantised(load_model(source, quantize="nf4"), tmp_path / "b", 3_000_000)

    def refuse(*given: Any) -> None:
        raise AssertionError("decoded or encoded")

    with LiveBytes() as memory, monkeypatch.context() as patched:
        model = load_model(tmp_path / "b")
        for name in ("encode", "decoding"):
            patched.setattr(f"headrace.codec.entries.{name}", refuse)
        memory.reset()
        before = memory.live
        wrapped, _ = package.wrap(model, adamw(model), device="cpu", placement={"weights": "host"}, window=2)
        session = package.session(wrapped)
        regions = session._stream.regions
        result = regions.host_arena.nbytes + regions.device_arena.nbytes
        assert memory.peak - before <= result + 4 * MIB
    session.close()


def test_writing_holds_one_tensor(tmp_path: Path) -> None:
    """A fused tensor of 16 MiB and its packed bytes, but never its decoded value."""
    source = tiny.save(tiny.build("mixtral", **WIDE), tmp_path / "a", "10MB")
    with LiveBytes() as memory:
        model = load_model(source, quantize="nf4")
        memory.reset()
        before, packed = memory.live, 16 * MIB * 9 // 64
        save_quantised(model, tmp_path / "b", 3_000_000)
        assert 16 * MIB + packed <= memory.peak - before <= 16 * MIB + packed + 4 * MIB


def test_others_refuse_the_folder_by_name(tmp_path: Path) -> None:
    folder, _ = written("llama", tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OptionError, match=r"quantised already.*int8 was asked for.*Give the original"):
        load_model(folder, quantize="int8")
    model = load_model(tiny.save(tiny.build("llama"), tmp_path / "plain"))
    with pytest.raises(ModelError, match="the model is not quantised"):
        save_quantised(model, tmp_path / "again")


def rewritten(folder: Path, tensors: dict[str, Tensor]) -> None:
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "packed.safetensors")


def lost(folder: Path) -> None:
    tensors = tiny.stored(folder)
    del tensors[UP + ".packed"]
    rewritten(folder, tensors)


def cut(folder: Path) -> None:
    tensors = tiny.stored(folder)
    tensors[UP + ".packed"] = tensors[UP + ".packed"][:-256]
    rewritten(folder, tensors)


def gone(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()


def told(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Any, str]] = {
    "a weight is lost": (lost, f"do not hold {UP}.*no such tensor"),
    "a weight is cut": (cut, f"do not hold {UP}.*as nf4 it has"),
    "all files are lost": (gone, "packed.safetensors is missing"),
    "another version": (lambda folder: told(folder, version=2), "another version.*2"),
    "no manifest": (lambda folder: told(folder, weights=None), "cannot be read"),
    "no such weight": (lambda folder: told(folder, weights={"x.y": {"codec": "nf4", "error": 1}}), "no codec is named"),
    "no such codec": (lambda folder: told(folder, weights={UP: {"codec": "nf7", "error": 1}}), "'nf7' is not a codec"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folders_are_refused_before_anything_is_read(case: str, tmp_path: Path) -> None:
    folder, _ = written("llama", tmp_path)
    spoil, said = DAMAGES[case]
    spoil(folder)
    with pytest.raises((FormatError, OptionError), match=f"(?s){said}"):
        load_model(folder)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("quantize") / "model", hidden_size=64, intermediate_size=96)


def plain_perplexity(model: Any, text: str, tokenizer: Any, length: int) -> float:
    ids = torch.tensor(tokenizer(text)["input_ids"])
    total, count = 0.0, 0
    for row in ids.split(length):
        if row.numel() > 1:
            with torch.no_grad():
                total += model(input_ids=row[None], labels=row[None]).loss.item() * (row.numel() - 1)
            count += row.numel() - 1
    return math.exp(total / count)


def test_report_and_perplexity(source: Path, tmp_path: Path) -> None:
    """Bytes and error of each weight, and the perplexity that plain transformers has with both models."""
    text = "the cat sat on the mat and the dog sat on the cat " * 6
    (tmp_path / "text.txt").write_text(text)
    options = ("--codec", "int8", "--keep-first", "1", "--override", "*.o_proj.weight=bf16", "--report", "--text",
               str(tmp_path / "text.txt"), "--sequence-length", "32", "--device", "cpu")  # fmt: skip
    code, printed = headrace("quantize", str(source), str(tmp_path / "out"), *options)
    assert code == 0, printed
    rows = re.findall(r"^(model\.layers\.\S+) +int8 +([\d.]+ \w+) +([\d.]+ \w+) +(0\.\d{4})$", printed, re.MULTILINE)
    assert rows and not any("layers.0." in name or "o_proj" in name for name, *_ in rows)
    before, after = map(float, re.search(r"([\d.]+) before, ([\d.]+) after \(", printed.splitlines()[-1]).groups())
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    assert before == pytest.approx(plain_perplexity(model, text, tokenizer, 32), rel=1e-4)
    quantised = load_model(tmp_path / "out")
    model.load_state_dict({name: value.plain() if hasattr(value, "plain") else value
                           for name, value in quantised.state_dict().items()})  # fmt: skip
    assert after == pytest.approx(plain_perplexity(model, text, tokenizer, 32), rel=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the cat") == tokenizer("the cat")
    assert after != before


@pytest.mark.parametrize(("options", "said"), [
    (("--codec", "nf5"), "'nf5' is not a codec"),
    (("--override", "x"), "PATTERN=CODEC"),
    (("--override", "*.nothing=int8"), "match no matrix"),
    (("--text", "nowhere.txt"), "cannot be read"),
    (("--keep-first", "99"), "quantises nothing"),
])  # fmt: skip
def test_mistakes_are_told_and_nothing_is_written(
    options: tuple[str, ...], said: str, source: Path, tmp_path: Path
) -> None:
    code, printed = headrace("quantize", str(source), str(tmp_path / "out"), *options)
    assert code == 2 and said in printed.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_verify_compares_with_the_decoded_weights(source: Path, tmp_path: Path) -> None:
    """Weights that stand decoded in plain PyTorch; also with fewer layers than the folder packs."""
    assert headrace("quantize", str(source), str(tmp_path / "out"))[0] == 0
    for layers in ((), ("--layers", "2")):
        code, printed = headrace("verify", str(tmp_path / "out"), "--steps", "2", "--sequence-length", "16", "--device",
                                 "cpu", "--disk-dir", str(tmp_path / "disk"), *layers)  # fmt: skip
        assert code == 0, printed
        assert "placements host pass, disk pass" in printed.splitlines()[-1]


def test_a_folder_that_holds_something_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    code, printed = headrace("quantize", str(source), str(tmp_path / "out"))
    assert code == 2 and "not empty" in printed and [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
