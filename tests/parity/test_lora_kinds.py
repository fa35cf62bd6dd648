"""Every kind of adapter against peft on the resident model: fp32 past the first step, bf16 to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from adapted import blocks, lora, loss_of, plain_loss_of
from against_plain import adamw, assert_equal, batch, gpt2, gradients, hf_loss, llama, streamed, weights
from faults.test_reports_adapters import EXPERTS
from faults.test_reports_families import build
from side_by_side import side_by_side

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")

EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "rank-stabilised": {"use_rslora": True, "r": 8}, "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.3}, "dora and dropout": {"use_dora": True, "lora_dropout": 0.3},
    "bias": {"lora_bias": True}, "biases of the base": {"bias": "lora_only"},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7}, "alpha_pattern": {"v_proj": 3}},
    "pissa": {"init_lora_weights": "pissa", "target_modules": ["q_proj", "up_proj"]},
    "norms saved": {"modules_to_save": ["input_layernorm"]},
    "embedding saved": {"modules_to_save": ["embed_tokens"]}, "head saved": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]}, "head": {"target_modules": ["q_proj", "lm_head"]},
    "both, with magnitudes": {"target_modules": ["embed_tokens", "v_proj", "lm_head"], "use_dora": True},
    "tokens": {"trainable_token_indices": [3, 5, 7]}, "some layers": {"layers_to_transform": [1]},
}  # fmt: skip
MODELS: dict[str, Any] = {
    "experts": lambda dtype: lora(
        build("Qwen3Moe", **EXPERTS).to(dtype), target_modules=["q_proj"], target_parameters=EXPERT_PARAMETERS
    ),
    "experts only": lambda dtype: lora(
        build("Qwen3Moe", **EXPERTS).to(dtype), target_modules=[], target_parameters=EXPERT_PARAMETERS
    ),
    "transposed": lambda dtype: lora(
        gpt2(3, dtype), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.1
    ),
}


def adapted(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    if kind in MODELS:
        return MODELS[kind](dtype)
    return lora(llama(3, dtype, attention_bias=True), **KINDS[kind], **options)


def check_kind(model: nn.Module, kind: str, ours: Any) -> None:
    """Blocks have nothing of their own to train, and no adapter was left out."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("lora_" in name for name in names) or kind == "tokens"
    assert all(not unit.trained.entries for unit in blocks(ours))


@pytest.mark.parametrize("kind", [*KINDS, *MODELS])
def test_fp32(kind: str) -> None:
    with side_by_side(model := adapted(kind, torch.float32), adamw) as pair:
        check_kind(model, kind, pair.ours)
        before = weights(pair.ours)
        for step in range(3):
            pair.step(loss_of(step))
        pair.same_state()
        after = weights(pair.ours)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert {name for name, p in model.named_parameters() if p.requires_grad} == moved & dict(
            model.named_parameters()).keys()  # fmt: skip


@pytest.mark.parametrize(
    "kind,narrow", [(kind, False) for kind in (*KINDS, *MODELS)] + [(kind, True) for kind in KINDS]
)
def test_bf16(kind: str, narrow: bool) -> None:
    """Gradients of the resident model, to the bit; the base keeps its bits. Adapters in fp32, as peft makes them, or
    in bf16 (`narrow`)."""
    model = adapted(kind, torch.bfloat16, narrow=narrow)
    plain = copy.deepcopy(model)
    frozen = {name: value for name, value in weights(model).items()
              if name in {n for n, p in model.named_parameters() if not p.requires_grad}}  # fmt: skip
    with streamed(model, adamw) as (ours, driver):
        check_kind(model, kind, ours)
        for step in range(3):
            for net in (plain, ours):
                plain_loss_of(step)(net).backward()
            own = {n: p.grad.float() for n, p in plain.named_parameters() if p.grad is not None}
            found = gradients(ours)
            if kind in ("embedding saved", "head saved", "both, with magnitudes"):
                found = {n: value.to(plain.get_parameter(n).dtype).float() for n, value in found.items()}
            assert_equal({n: found[n] for n in own}, own)
            driver.step()
            driver.zero_grad()
            plain.load_state_dict(ours.state_dict())
            plain.zero_grad()
        after = weights(ours)
        assert_equal({name: after[name] for name in frozen}, frozen)


@pytest.mark.parametrize("kind", ["lora", "dora", "dropout"])
def test_under_autocast(kind: str) -> None:
    """An fp32 model whose adapters and base are cast at each use: gradients have the bits of plain autocast."""
    model = lora(llama(3), **KINDS[kind])
    plain = copy.deepcopy(model)
    with streamed(model, adamw, autocast="bfloat16") as (ours, driver):
        for step in range(2):
            for net in (plain, ours):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = plain_loss_of(step)(net)
                loss.backward()
            own = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
            assert_equal({n: gradients(ours)[n] for n in own}, own)
            driver.step()
            driver.zero_grad()
            plain.load_state_dict(ours.state_dict())
            plain.zero_grad()


def test_an_evaluation_between_steps() -> None:
    """Also with the adapters switched off, which shows the base."""
    with side_by_side(lora(llama(3)), adamw) as pair:
        for step in range(3):
            pair.step(loss_of(step))
            for net in (pair.plain, pair.ours):
                net.eval()
            with torch.no_grad():
                ids = batch(2, 8, 90 + step, 257)
                on = [hf_loss(net, ids).item() for net in (pair.plain, pair.ours)]
                off = []
                for net in (pair.plain, pair.ours):
                    with net.disable_adapter():
                        off.append(hf_loss(net, ids).item())
            assert on[1] == pytest.approx(on[0], rel=1e-5) and off[1] == pytest.approx(off[0], rel=1e-5)
            assert on[0] != off[0]
            for net in (pair.plain, pair.ours):
                net.train()
