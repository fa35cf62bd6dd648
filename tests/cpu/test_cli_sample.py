"""`headrace sample`: plain generation from a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adapted import lora
from cpu.test_cli_world import headrace, save_model
from headrace.checkpoint.packed import save_quantised
from headrace.model.build import load_model
from quantised_models import decoded, every


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sample") / "model")


def test_greedy_sample_is_the_likeliest_token_each_time(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the cat")["input_ids"]
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    code, printed = headrace("sample", str(folder), "the cat", "--max-new-tokens", "5")
    *waits, shown = printed.splitlines()
    assert (code, shown) == (0, tokenizer.decode(ids, skip_special_tokens=True))
    assert shown.startswith("the cat ")
    assert waits[0].startswith("loading the model (")


def test_tokens_are_shown_as_they_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is printed before the first new token, and each word before the next one is made."""
    from transformers import TextStreamer

    shown: list[str] = []
    monkeypatch.setattr(TextStreamer, "on_finalized_text", lambda self, text, stream_end=False: shown.append(text))
    assert headrace("sample", str(folder), "the cat", "--max-new-tokens", "5")[0] == 0
    assert len(shown) > 4
    assert "".join(shown).split()[:2] == ["the", "cat"]


def test_seed_decides_at_a_temperature(folder: Path) -> None:
    def drawn(seed: int) -> str:
        return headrace("sample", str(folder), "the cat", "--temperature", "2", "--seed", str(seed))[1]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_chat_template(folder: Path, tmp_path: Path) -> None:
    code, printed = headrace("sample", str(folder), "the cat", "--chat")
    assert code == 1
    assert "no chat template" in printed
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }} sat on"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    plain = headrace("sample", str(folder), "the cat sat on", "--max-new-tokens", "5")[1].splitlines()[-1]
    chat = headrace("sample", str(tmp_path / "chat"), "the cat", "--chat", "--max-new-tokens", "5")[1].splitlines()[-1]
    assert f"the cat sat on {chat}" == plain, "the same answer, and nothing but the answer"


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("nowhere", "holds no model. there is no such folder"),
        (".", "holds no model. config.json is missing."),
        ("adapter", "is for is not there. adapter_config.json names ''"),
        ("stopped", "holds no model. config.json is missing, but there are checkpoints: the run was not finished"),
    ],
)
def test_folder_without_a_model(tmp_path: Path, where: str, text: str) -> None:
    (tmp_path / "stopped" / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    code, printed = headrace("sample", str(tmp_path / where), "x")
    assert code == 1
    assert text in printed
    assert "loading" not in printed


def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    """One text, as from every other command."""
    shutil.copytree(folder, tmp_path / "cut")
    (path,) = (tmp_path / "cut").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, printed = headrace("sample", str(tmp_path / "cut"), "x")
    assert code == 1
    assert printed.splitlines()[-1].startswith(f"error: {path} is shorter than its header says.")


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("adapter", [False, True])
def test_packed_weights_are_sampled_as_they_decode(folder: Path, tmp_path: Path, adapter: bool) -> None:
    """Also below an adapter, as a run on a packed base leaves it. The words are those of the decoded model."""
    save_quantised(load_model(folder, quantize=every("nf4")), tmp_path / "packed")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    decoded(plain, "nf4", all_of_them=True).save_pretrained(tmp_path / "decoded")
    if adapter:
        pytest.importorskip("peft")
        lora(plain).save_pretrained(tmp_path / "adapter")
    shown = []
    for name in ("packed", "decoded"):
        asked = tmp_path / name
        if adapter:
            asked = tmp_path / f"on {name}"
            shutil.copytree(tmp_path / "adapter", asked)
            told = json.loads((asked / "adapter_config.json").read_text())
            told["base_model_name_or_path"] = str(tmp_path / name)
            (asked / "adapter_config.json").write_text(json.dumps(told))
        shutil.copy(folder / "tokenizer.json", asked)
        code, printed = headrace("sample", str(asked), "the cat", "--temperature", "2", "--max-new-tokens", "9")
        assert code == 0, printed
        shown.append(printed.splitlines()[-1])
    assert shown[0] == shown[1]


def test_an_empty_prompt(folder: Path) -> None:
    code, printed = headrace("sample", str(folder), "")
    assert code == 1
    assert "the prompt is empty" in printed
