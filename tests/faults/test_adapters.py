"""Adapters of peft on a streamed model: saved in peft's own format, with the trained values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headrace

peft = pytest.importorskip("peft")


def test_a_wrapped_peft_model_saves_its_adapter(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    model, optimizer = headrace.wrap(model, lr=1e-1, device="cpu", placement={"weights": "host", "state": "host"})
    ids = torch.randint(0, 257, (2, 9))
    with headrace.session(model):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            trained = model(input_ids=ids, labels=ids).loss.item()
        model.save_pretrained(tmp_path / "adapter")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert again(input_ids=ids, labels=ids).loss.item() == pytest.approx(trained, abs=1e-6)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_model.safetensors"}
