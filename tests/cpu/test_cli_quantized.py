"""`headrace train` on a quantised base: the section `quantize:`, beside `lora:` and without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpu.test_cli_world import arguments, headrace, log_of, save_data, save_model
from cpu.test_config import good, mistakes  # noqa: F401
from headrace.cli.config_file import read_config
from headrace.spec.precision import PrecisionMap
from quantised_models import round_trip

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")

LORA = {"r": 2, "targets": ["q_proj", "down_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "beside lora": {"quantize": "nf4", "lora": LORA},
    "a map beside lora": {
        "quantize": {"codec": "int8", "keep_first": 1, "overrides": {"*.down_proj.weight": "nf4+double",
                                                                   "*.1.self_attn.q_proj.weight": "bf16"}},
        "lora": LORA,
    },
    "alone": {"quantize": {"codec": "fp8", "keep_last": 1}},
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    model = save_model(folder / "model", hidden_size=96, intermediate_size=172, tie_word_embeddings=True)
    return model, save_data(folder / "data.jsonl")


def config(world: tuple[Path, Path], output: Path, sections: dict[str, Any], **changes: Any) -> list[str]:
    """A run of 6 steps, its sections in the file."""
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(sections))
    return [*arguments(*world, output, **changes), "--config", str(file)]


def results(folder: Path) -> dict[str, torch.Tensor]:
    name = "adapter_model" if (folder / "adapter_model.safetensors").exists() else "model"
    return load_file(folder / f"{name}.safetensors")


def codec_of(kind: str, name: str) -> str | None:
    """The codec of a weight of the three blocks under KINDS, by its name and not by the code under test."""
    if "proj" not in name:
        return None
    if kind == "beside lora":
        return "nf4"
    if kind == "alone":
        return None if ".layers.2." in name else "fp8"
    down = "nf4+double" if "down_proj" in name else None
    return down or (None if ".layers.0." in name or ".layers.1.self_attn.q_proj" in name else "int8")


def decoded(kind: str, model: Path, folder: Path) -> Path:
    """A model folder with what the codecs make of each weight."""
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, parameter in twin.named_parameters():
        codec = codec_of(kind, name)
        if codec is not None:
            parameter.data = round_trip(codec, parameter.data)
    twin.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["beside lora", "a map beside lora"])
def test_adapters_are_those_of_the_decoded_base(kind: str, world: tuple[Path, Path], tmp_path: Path) -> None:
    """Every adapter and every loss, bit for bit; the base's own files are as they were."""
    before = (world[0] / "model.safetensors").read_bytes()
    code, printed = headrace(*config(world, tmp_path / "ours", KINDS[kind], validation=world[1], lr=0.05))
    assert code == 0 and "frozen, and encoded when they are read" in printed, printed
    plain = decoded(kind, world[0], tmp_path / "decoded"), world[1]
    code, printed = headrace(*config(plain, tmp_path / "plain", {"lora": LORA}, validation=world[1], lr=0.05))
    assert code == 0, printed
    ours, theirs = results(tmp_path / "ours"), results(tmp_path / "plain")
    assert ours.keys() == theirs.keys() and all("lora_" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(value.any() for name, value in ours.items() if "lora_B" in name)
    losses, others = ([line.get("loss", line.get("validation_loss")) for line in log_of(tmp_path / run / "log.jsonl")]
                      for run in ("ours", "plain"))  # fmt: skip
    assert losses == others and losses[-1] < losses[0]
    assert (world[0] / "model.safetensors").read_bytes() == before


def test_without_lora_what_keeps_its_format_is_trained(world: tuple[Path, Path], tmp_path: Path) -> None:
    """The model that is written: frozen matrices as they are decoded, all else trained, as an ordinary folder."""
    code, printed = headrace(*config(world, tmp_path / "out", KINDS["alone"], lr=0.01))
    assert code == 0 and "model in" in printed, printed
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    before = AutoModelForCausalLM.from_pretrained(world[0], dtype=torch.float32).state_dict()
    assert after.keys() == before.keys()
    frozen = [name for name in before if codec_of("alone", name) is not None]
    assert len(frozen) == 14
    for name in before:
        if name in frozen:
            assert torch.equal(after[name], round_trip("fp8", before[name])), name
        else:
            assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_in_the_same_weights(kind: str, world: tuple[Path, Path], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lr": 0.05, "save_every": 3, "keep": 5}
    code, printed = headrace(*config(world, tmp_path / "whole", KINDS[kind], **changes))
    assert code == 0, printed
    headrace(*config(world, tmp_path / "parts", KINDS[kind], **changes))
    for path in [*(tmp_path / "parts").glob("adapter_*"), *(tmp_path / "parts").glob("model*")]:
        path.unlink()
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-6")
    size = sum(path.stat().st_size for path in (tmp_path / "parts" / "checkpoints").rglob("*") if path.is_file())
    code, printed = headrace(*config(world, tmp_path / "parts", KINDS[kind], **{**changes, "resume": True}))
    assert code == 0 and "3 of 6 steps are done" in printed, printed
    first, second = results(tmp_path / "whole"), results(tmp_path / "parts")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert kind == "alone" or size < (world[0] / "model.safetensors").stat().st_size / 2  # no base in it


def test_another_codec_is_another_run(world: tuple[Path, Path], tmp_path: Path) -> None:
    """Also where the configuration is the same and "auto" chooses otherwise."""

    def run(quantize: Any, **changes: Any) -> tuple[int, str]:
        given = {"save_every": 2, "steps": 2, "warmup": None, **changes}
        return headrace(*config(world, tmp_path / "out", {"quantize": quantize, "lora": LORA}, **given))

    assert run("nf4")[0] == 0
    code, printed = run("int8", resume=True)
    assert code == 1 and "was made by another run" in printed and "'codec': 'nf4'" in printed, printed
    shutil.rmtree(tmp_path / "out")
    code, printed = run("auto")
    assert code == 0 and "auto: the run fits without a codec" in printed
    placed = {"placement": "{weights: host, state: host}"}
    code, printed = run({"codec": "auto", "prefer": "speed"}, **placed)
    assert code == 2 and "holds a run already" in printed
    shutil.rmtree(tmp_path / "out")
    code, printed = run({"codec": "auto", "prefer": "speed"}, **placed)
    assert code == 0 and "auto: nf4, since weights have to stream" in printed, printed
    code, printed = run({"codec": "auto", "prefer": "speed"}, resume=True)
    assert code == 1 and "the codec of the base differs" in printed, printed


def test_bases_that_cannot_be_stored_so_are_told(world: tuple[Path, Path], tmp_path: Path) -> None:
    """As mistakes of the configuration, before data or weights are read."""
    code, printed = headrace("quantize", str(world[0]), str(tmp_path / "packed"), "--codec", "int8")
    assert code == 0
    packed = tmp_path / "packed", world[1]
    code, printed = headrace(*config(packed, tmp_path / "a", KINDS["beside lora"]))
    assert code == 2 and "is quantised already" in printed, printed
    code, printed = headrace(*config(packed, tmp_path / "a", {"lora": LORA}, steps=2, warmup=0))
    assert code == 0 and "21 matrices as int8" in printed, printed
    wrong = {"quantize": {"overrides": {"*.q_prj.weight": "int8", "*.x": "nf4"}}, "lora": LORA}
    code, printed = headrace(*config(world, tmp_path / "b", wrong))
    assert code == 2 and "'*.q_prj.weight'" in printed and "'*.x'" in printed and "q_proj" in printed, printed
    assert not (tmp_path / "b").exists()


def test_mistakes_of_the_section_are_told_with_their_lines(good: Path) -> None:  # noqa: F811
    text = "model: model\ndata: [a.txt]\noutput: out\n"
    good.write_text(text + "quantize:\n  codec: nf5\n  keep_frst: 1\n  keep_last: -1\n  overrides:\n    '*.a': int9\n"
                    "    '*.b': bf16\n  sensitive: [1]\n  prefer: sped\n  keep_first: true\n")  # fmt: skip
    found = mistakes(good)
    expected = [
        (5, "quantize.codec = 'nf5' is refused: 'nf5' is not a codec; known: int8"),
        (6, "quantize.keep_frst is not an option; nearest: keep_first"),
        (7, "quantize.keep_last = -1 is too small: at least 0"),
        (9, "quantize.overrides.*.a = 'int9' is refused"), (11, "quantize.sensitive = 1 is not text"),
        (12, "quantize.prefer = 'sped' is not one of quality, speed; nearest: speed"),
        (13, "quantize.keep_first = True is true, which this option does not take"),
    ]  # fmt: skip
    assert len(found) == len(expected), found
    for line, words in expected:
        assert any(problem.startswith(f"{good}:{line}: {words}") for problem in found), (words, found)
    for value, words in {
        "4": "quantize = 4 is not of the form nf4", "{overrides: [int8]}": "is not of the form {name: value}",
        "{codec: nf4/3}": "nf4 has no blocks of 3", "auto": 'quantize = "auto" needs frozen weights: add lora',
        "{prefer: speed}": 'quantize.prefer is for "auto", and the codec is nf4',
        "{codec: auto, keep_last: 1}\nlora: {}": 'quantize.codec = "auto" chooses one codec for all',
    }.items():  # fmt: skip
        good.write_text(f"{text}quantize: {value}\n")
        (problem,) = mistakes(good)
        assert problem.startswith(f"{good}:4: ") and words in problem, problem
    good.write_text("config_model: model\ntokenizer: model\ndata: [a.txt]\noutput: out\nquantize: nf4\n")
    assert "quantize needs a trained model" in mistakes(good)[0]


def test_flag_file_and_settings_meet(good: Path) -> None:  # noqa: F811
    """The flag and text in the section's place give its codec, and leave its other options alone."""
    text = good.read_text()

    def asked(section: str, flag: str | None, *settings: str) -> Any:
        good.write_text(text + section)
        found = read_config(good, {"quantize": flag}, settings)[0].quantize
        return None if found is None else found.asked()

    assert asked("", None) is None and asked("", "int8") == PrecisionMap("int8")
    assert asked("quantize: int8\n", None, "quantize.keep_first=1") == PrecisionMap("int8", 1)
    assert asked("quantize: {codec: int8, keep_last: 2}\n", "NF4+double") == PrecisionMap("nf4+double", 0, 2)
    assert asked("", "fp8", "quantize.keep_first=1", "quantize.sensitive=*.up*") == PrecisionMap(
        "fp8", 1, 0, (), ("*.up*",)
    )
    assert asked("quantize: auto\nlora: {}\n", None) == "auto"
    assert asked("quantize: int8\n", None, "quantize=null") is None
    assert asked("quantize: {overrides: {'*.up_proj.*': int8, '*.0.*': bf16}}\n", None) == PrecisionMap(
        "nf4", overrides=(("*.up_proj.*", "int8"), ("*.0.*", "bf16")))  # fmt: skip
    good.write_text(text)
    assert "--quantize gives this option too" in mistakes(good, {"quantize": "nf4"}, ("quantize=int8",))[0]
    assert mistakes(good, {"quantize": "nf"})[0].startswith("--quantize: quantize.codec = 'nf' is refused")


def test_attention_reaches_the_blocks(world: tuple[Path, Path], tmp_path: Path) -> None:
    code, printed = headrace(*arguments(*world, tmp_path / "out", steps=1, warmup=None, attention="math"))
    assert code == 0 and "attention" in printed and "math" in printed.split("attention: math")[1], printed
