"""What configurations of transformers tell of attention: of every kind, with layers that differ, latent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.model.configured import told
from headrace.plan.subject import Attention
from headrace.session.subject import attention_of
from parity import zoo

LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8}


def configurations() -> list[Any]:
    found = []
    for kind in transformers.CONFIG_MAPPING.values():
        try:
            found.append(kind())
        except Exception:  # some need arguments, or other packages
            continue
    return found


def test_every_configuration_is_read() -> None:
    found = configurations()
    assert len(found) > 300
    known = [attention_of(config) for config in found]
    assert sum(each is not None for each in known) > 200
    assert all(each is None or (each.heads >= 1 and each.head_dim >= 1) for each in known)


def test_layers_that_differ_are_told_by_most_of_them() -> None:
    config = transformers.Gemma4TextConfig(num_hidden_layers=6, num_attention_heads=8)
    kinds = [config.per_layer_config[index].head_dim for index in range(6)]
    assert len(set(kinds)) == 2
    assert told(config, "head_dim") == max(kinds, key=kinds.count)
    assert told(config, "nothing_of_this_name") is None
    attention = attention_of(config)
    assert attention is not None and attention.head_dim == told(config, "head_dim")


def test_heads_of_latent_attention() -> None:
    """`head_dim` is that of the rotated part: 16 features of queries and keys, 8 of values."""
    config = transformers.DeepseekV3Config(num_attention_heads=4, num_key_value_heads=4, **LATENT)
    assert attention_of(config) == Attention(4, 4, 12)


@pytest.mark.parametrize("class_name", ["Gemma4ForCausalLM", "DeepseekV3ForCausalLM"])
def test_they_train_with_everything_chosen(class_name: str) -> None:
    model = zoo.build(class_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = headrace.wrap(model, optimizer, device="cpu", placement="auto", attention="auto")
    with headrace.session(wrapped):
        ids = torch.randint(0, 30, (2, 8))
        for _ in range(2):
            loss = wrapped(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            assert torch.isfinite(loss)
