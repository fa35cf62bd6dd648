"""Tiny models of the families that people train most, and of those whose forward does something of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parity.families import HIDDEN, VOCAB, Batch, Family, causal_lm, causal_loss, fresh, made, token_batch

PATCHES = 16
"""Patches of an image: four by four, merged two by two into four tokens."""
IMAGE, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS: dict[str, Any] = {
    "intermediate_size": 96, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1,
    "num_hidden_layers": 3,
}  # fmt: skip


def gemma3n() -> nn.Module:
    """Per-layer inputs, hidden states with a dimension before the batch, keys and values of the last layers shared."""
    shape = {
        "num_hidden_layers": 6, "head_dim": 16, "intermediate_size": [96] * 6, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8, "layer_types": [SLIDING, FULL] * 3, "activation_sparsity_pattern": [0.5, *[0.0] * 5],
        "sliding_window": 4, "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "attn_implementation": "eager",
    }  # fmt: skip
    model = made("Gemma3nForCausalLM", "Gemma3nTextConfig", **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):  # attention so sharp multiplies the rounding of two right results
                parameter.mul_(0.3)
    return model


def t5() -> nn.Module:
    """Two stacks; a position bias that the first layer of each makes for the others; a shared embedding."""
    return made(
        "T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=HIDDEN, d_kv=16, d_ff=96, num_layers=3,
        num_decoder_layers=4, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=16, initializer_factor=0.2,
    )  # fmt: skip


def qwen2_vl() -> nn.Module:
    text = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return made(
        "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", text_config=text, vision_config=vision,
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=VOCAB - 4,
    )  # fmt: skip


def vit() -> nn.Module:
    return made(
        "ViTForImageClassification", "ViTConfig", hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=96, image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def masked_lm(kind: str, **fields: Any) -> nn.Module:
    shape = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return made(f"{kind}ForMaskedLM", f"{kind}Config", **{**shape, **fields})


def text_and_image_batch(rows: int, length: int, seed: int) -> Batch:
    """The first row holds an image, the others only text."""
    batch = token_batch(rows, length + 6, seed)
    ids = batch["input_ids"] % (VOCAB - 4)
    ids[0, :6] = torch.tensor([START, *[IMAGE] * 4, END])
    types = (ids == IMAGE).int()
    pixels = torch.randn(PATCHES, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    labels = batch["labels"].clone()
    labels[0, :6] = -100
    return {**batch, "input_ids": ids, "labels": labels, "pixel_values": pixels, "mm_token_type_ids": types,
            "image_grid_thw": torch.tensor([[1, 4, 4]])}  # fmt: skip


def picture_batch(rows: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (rows,), generator=generator)}  # fmt: skip


def pair_batch(rows: int, length: int, seed: int) -> Batch:
    """Source and target of different lengths."""
    batch = token_batch(rows, length, seed)
    return {**batch, "labels": token_batch(rows, length + 2, seed + 50)["labels"]}


def mean_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    """The model's own loss, which knows no label count: a mean, or a part of a sum of means."""
    loss: Tensor = model(**batch).loss
    return loss


def causal(kind: str, **changes: Any) -> Family:
    return Family(lambda: causal_lm(kind, **changes), token_batch, causal_loss)


NAMED: dict[str, Family] = {
    "qwen2": causal("Qwen2", tie_word_embeddings=True),
    "gemma3": Family(
        lambda: made_causal(
            "Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16, sliding_window=3, layer_types=[SLIDING, FULL] * 2
        ),
        token_batch, causal_loss,
    ),
    "gemma3n": Family(gemma3n, token_batch, causal_loss),
    "phi3": causal("Phi3", resid_pdrop=0.0, original_max_position_embeddings=64),
    "gpt-neox": causal("GPTNeoX", use_parallel_residual=False),
    "olmo2": causal("Olmo2"),
    "smollm3": causal("SmolLM3", no_rope_layers=[1, 0, 1, 0]),
    "falcon": causal("Falcon", new_decoder_architecture=False, multi_query=True),
    "falcon-alibi": causal("Falcon", alibi=True, new_decoder_architecture=True, num_kv_heads=2),
    "bloom": Family(
        lambda: made("BloomForCausalLM", "BloomConfig", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=4, n_head=4),
        token_batch, causal_loss,
    ),
    "opt": Family(
        lambda: made_causal("OPTForCausalLM", "OPTConfig", ffn_dim=96, word_embed_proj_dim=32, dropout=0.0),
        token_batch, causal_loss,
    ),
    "mixtral": causal("Mixtral", num_local_experts=5, **EXPERTS),
    "qwen3-moe": causal("Qwen3Moe", num_experts=5, moe_intermediate_size=24, head_dim=16, **EXPERTS),
    "qwen3-next": causal(
        "Qwen3Next", num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=24, head_dim=16,
        linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        **{**EXPERTS, "num_hidden_layers": 4},
    ),
    "jamba": causal(
        "Jamba", num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=8, use_mamba_kernels=False, **{**EXPERTS, "num_hidden_layers": 4},
    ),
    "t5": Family(t5, pair_batch, mean_loss),
    "qwen2-vl": Family(qwen2_vl, text_and_image_batch, causal_loss),
    "vit": Family(vit, picture_batch, mean_loss),
    "albert": Family(
        lambda: masked_lm("Albert", embedding_size=32, num_hidden_groups=1), token_batch, mean_loss
    ),
    "deberta": Family(
        lambda: masked_lm(
            "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="none"
        ),
        token_batch, mean_loss,
    ),
}  # fmt: skip


def made_causal(model: str, config: str, **fields: Any) -> nn.Module:
    shape = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
    }  # fmt: skip
    return made(model, config, **{**shape, **fields})


def build(name: str) -> nn.Module:
    """A fresh copy of the family's model."""
    return fresh(NAMED[name].make)
