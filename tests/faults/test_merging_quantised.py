"""Adapters on a base that is stored compressed: what would write them into it, and lose them to its rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from adapted import lora
from against_plain import adamw, assert_close, assert_equal, batch, llama, streamed, weights
from headrace import StepError
from quantised_models import every

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
IDS = batch(2, 7, 3, 257)

WAYS: dict[str, Callable[[Any], Any]] = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "safely": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter": lambda model: model.merge_adapter(),
    "the tuner": lambda model: model.base_model.merge_adapter(),
    "one layer": lambda model: model.base_model.model.model.layers[1].mlp.down_proj.merge(),
}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=IDS).logits + 0
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_merge_into_compressed_weights_is_refused(way: str, home: str, tmp_path: Path) -> None:
    """Before anything is written: the model goes on as it was."""
    model = lora(llama(2), target_modules=["q_proj", "down_proj"])
    options = {"quantize": every("nf4"), "placement": {"weights": home}, "disk_dir": tmp_path}
    with streamed(model, adamw, **options) as (ours, _):
        before, reached = weights(ours), logits(ours)
        with pytest.raises(StepError, match=r"4 adapted layers have such weights, as .* in nf4(.|\n)*headrace merge"):
            WAYS[way](ours)
        assert_equal(weights(ours), before)
        assert torch.equal(logits(ours), reached)
        ours.save_pretrained(tmp_path / "adapter")  # what the refusal advises
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_merging_after_unwrap_keeps_the_adapter() -> None:
    """The decoded weights are ordinary ones, and so is what peft does with them."""
    model = lora(llama(2), target_modules=["q_proj", "down_proj"])
    with streamed(model, adamw, quantize=every("nf4")) as (ours, _):
        ours.eval()
        reached = logits(ours)
        merged = headrace.unwrap(ours).merge_and_unload()
        assert_close({"logits": logits(merged)}, {"logits": reached})


def test_adapters_on_what_is_not_compressed_merge_in_place() -> None:
    """As on the head of a base whose blocks are."""
    model = lora(llama(2), target_modules=["lm_head"])
    with streamed(model, adamw, quantize=every("nf4")) as (ours, _):
        ours.eval()
        reached = logits(ours)
        assert_close({"logits": logits(ours.merge_and_unload())}, {"logits": reached})


def test_without_a_session_a_write_says_that_it_was_encoded_again(caplog: pytest.LogCaptureFixture) -> None:
    model = headrace.quantize_model(llama(2), every("nf4"))
    name = "model.layers.1.mlp.up_proj.weight"
    value = 0.02 * torch.randn(model.get_parameter(name).shape)
    with caplog.at_level(logging.WARNING, "headrace"), torch.no_grad():
        model.get_parameter(name).copy_(value)
    assert name in caplog.text and "encoded again" in caplog.text
