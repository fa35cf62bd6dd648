"""`headrace sample`: plain generation from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpu.test_cli_world import headrace, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sample") / "model")


def test_greedy_sample_is_the_likeliest_token_each_time(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the cat")["input_ids"]
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    wanted = tokenizer.decode(ids[2:], skip_special_tokens=True)
    code, printed = headrace("sample", str(folder), "the cat", "--max-new-tokens", "5")
    assert (code, printed) == (0, wanted + "\n")


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
    plain = headrace("sample", str(folder), "the cat sat on", "--max-new-tokens", "5")
    assert headrace("sample", str(tmp_path / "chat"), "the cat", "--chat", "--max-new-tokens", "5") == plain


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_folder_without_a_model(tmp_path: Path, where: str) -> None:
    code, printed = headrace("sample", str(tmp_path / where), "x")
    assert code == 1
    assert "holds no model. config.json is missing" in printed
