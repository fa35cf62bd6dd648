"""Causal language models of the installed transformers, built tiny: configurations shrunk by names of fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parity.families import VOCAB, Batch, Family, logits_loss, token_batch
from parity.reference import Step

SIZES: dict[str, int] = {}
"""Fields by name, whatever the family; a configuration takes those it has."""

for _size, _names in {
    VOCAB: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: (
        "hidden_size n_embd d_model emb_dim embedding_size embedding_dim word_embed_proj_dim "
        "attention_hidden_size lru_width input_embedding_size output_embedding_size d_rnn "
        "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings "
        "max_target_positions max_source_positions"
    ),
    4: (
        "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers "
        "num_decoder_layers num_encoder_layers num_attention_heads n_head n_heads num_heads "
        "encoder_attention_heads decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts index_block_size "
        "sliding_window sliding_window_size window_size attention_window_size local_attention "
        "attention_chunk_size block_size mamba_chunk_size chunk_size time_step_rank mamba_dt_rank "
        "linear_num_value_heads linear_num_heads"
    ),
    2: (
        "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k zero_expert_num index_n_heads "
        "index_topk_blocks n_mamba_heads linear_num_key_heads altup_num_inputs num_kv_shared_layers eos_token_id"
    ),
    16: (
        "head_dim swa_head_dim kv_channels d_head dim_head attention_head_size q_lora_rank kv_lora_rank "
        "o_lora_rank qk_head_dim v_head_dim index_head_dim mamba_d_head mamba_head_dim mamba_headdim "
        "linear_head_dim router_hidden_size"
    ),
    96: (
        "intermediate_size ffn_dim dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
        "feed_forward_size n_inner intermediate_size_mlp shared_intermediate_size dense_intermediate_size "
        "mlp_dim"
    ),
    32: (
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size"
    ),
    1: (
        "n_group num_expert_group topk_group first_k_dense_replace num_dense_layers n_shared_experts n_groups "
        "bos_token_id decoder_start_token_id"
    ),
    8: (
        "qk_rope_head_dim qk_nope_head_dim rotary_dim prompt_length state_size mamba_d_state ssm_state_size "
        "mamba_n_heads mamba_num_heads linear_key_head_dim linear_value_head_dim laurel_rank "
        "hidden_size_per_layer_input adapter_rank gate_rank"
    ),
    3: "index_topk",
    128: "mamba_d_ssm",
    0: "pad_token_id",
}.items():  # fmt: skip
    SIZES.update(dict.fromkeys(_names.split(), _size))

MAY_BE_NONE = "num_key_value_heads head_dim num_experts_per_tok n_routed_experts num_experts num_local_experts".split()
"""Fields without a default whose None does not mean that there is no such part."""
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARED_KEYS = {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
}  # fmt: skip
TWEAKS: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1]},
    "BailingHybrid": {"layer_types": [LINEAR, FULL] * 2},
    "CohereCompass": {"layer_types": [SLIDING, FULL] * 2, "rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "CpmAnt": {"init_std": 0.05},
    "Dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "Dory": {"n_input_layers": 1, "n_output_layers": 1},
    "Dots1": {"n_shared_experts": 1},
    "Dots3Note": {"num_key_value_heads": 4},
    "GPTNeo": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3n": {
        **SHARED_KEYS, "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.5, *[0.0] * 5],
    },
    "Gemma4": {**SHARED_KEYS, "global_head_dim": 32},
    "Gemma4Unified": {**SHARED_KEYS, "global_head_dim": 32},
    "GraniteMoeHybrid": {"layer_types": ["mamba", "attention"] * 2},
    "Jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "KimiLinear": {"layer_types": [LINEAR, FULL] * 2},
    "Lfm2Moe": {"layer_types": ["conv", FULL] * 2},
    "Mamba2": {"head_dim": 16, "num_heads": 8},
    "Musicgen": {"num_codebooks": 1},
    "MusicgenMelody": {"num_codebooks": 1},
    "Qwen4Exp": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "Reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh"] * 2, "axial_pos_embds": False,
        "local_attn_chunk_length": 3, "lsh_attn_chunk_length": 3,
    },
    "RoCBert": {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 30, "shape_embed_dim": 16, "shape_vocab_size": 30,
    },
    "Xmod": {"default_language": "en_XX"},
    "Zamba": {"layers_block_type": [LINEAR, "hybrid"] * 2, "num_key_value_heads": 4, "attention_hidden_size": 128},
    "Zamba2": {
        "layers_block_type": [LINEAR, "hybrid"] * 2, "num_key_value_heads": 4, "attention_hidden_size": 128,
        "mamba_headdim": 64,
    },
    "Zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What names of fields do not say, by the family's name: layer patterns that need more layers than there are here, and
sizes that must agree."""
NOISE = {"Gemma4": 7.4e-6}
"""Families whose gradients move by nearly the tolerance when all weights are one bit off, and by how much at most: the
gate of a layer's own inputs is tiny, and a norm follows it. Measured in plain PyTorch, `train_plain` twice."""
RANDOM = ("Phimoe",)
"""Families whose blocks draw random numbers without any dropout: whole batches only, and no window."""
ROOT = Path(__file__).parents[2]
LARGEST = 20_000_000
"""Parameters that a model may have to count as tiny."""


def class_names() -> list[str]:
    """The classes of transformers' mapping for causal language models, each once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return list(
        dict.fromkeys(name for entry in names.values() for name in ([entry] if isinstance(entry, str) else entry))
    )


def family_name(class_name: str) -> str:
    """ "Llama" for "LlamaForCausalLM"."""
    for end in (
        "ForCausalLM",
        "ForConditionalGeneration",
        "LMHeadModel",
        "ModelWithLMHead",
        "WithLMHeadModel",
        "Decoder",
    ):
        class_name = class_name.removesuffix(end)
    return class_name


def shrunk(default: Any) -> dict[str, Any]:
    """Arguments that make `default`, a configuration, tiny: its own fields, and those of the configurations in it."""
    changes: dict[str, Any] = {}
    for name, value in vars(default).items():
        if hasattr(value, "model_type"):
            changes[name] = shrunk(value)
        elif name == "output_router_logits":
            changes[name] = True
        elif name in SIZES and (type(value) in (int, float) or (value is None and name in MAY_BE_NONE)):
            changes[name] = SIZES[name]
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
    if "kv_lora_rank" in changes:  # latent attention: a key for each head, and rotary tables of the rotated part
        changes.update(num_key_value_heads=4, head_dim=SIZES["qk_rope_head_dim"])
    return changes


def _merged(changes: dict[str, Any], tweaks: dict[str, Any]) -> dict[str, Any]:
    for name, value in tweaks.items():
        inner = changes.get(name)
        changes[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return changes


class NotTiny(Exception):
    """The class cannot be built in a size for tests."""


def build(class_name: str) -> nn.Module:
    """A tiny model with random weights, always the same. Raises whatever its class raises, or NotTiny."""
    import transformers

    kind = getattr(transformers, class_name)
    changes = shrunk(kind.config_class())
    tweaks = TWEAKS.get(family_name(class_name), {})
    if class_name.endswith("ForConditionalGeneration"):
        tweaks = {"text_config": tweaks}
    config = kind.config_class(**_merged(changes, tweaks))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotTiny(f"{size:,} parameters")
    torch.manual_seed(3)
    model: nn.Module = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of ones and biases of zeros would hide mistakes
                scale = float(parameter.abs().mean()) or 1.0
                parameter.add_(0.1 * scale * torch.randn(parameter.shape))
            if name.endswith("q_norm.weight"):  # sharp attention would multiply the rounding of two right results
                parameter.mul_(0.3)
    return model.train()


def own_loss(model: nn.Module, batch: Batch, count: int | None = None) -> Tensor:
    """The model's loss, or one from its logits where it has none."""
    try:
        loss: Tensor | None = model(**batch).loss
    except TypeError as error:
        if "labels" not in str(error):
            raise
        loss = None
    except AttributeError:
        loss = None
    return logits_loss(model, batch, None) if loss is None else loss


ZOO = Family(lambda: nn.Module(), token_batch, own_loss)
LENGTHS = (Step("calls", ((3, 6),)), Step("window", ((2, 6), (1, 3))))
"""Two steps: one batch with padding, and a window of two micro-batches of different shapes."""
CALLS = (Step("calls", ((3, 6),)), Step("calls", ((2, 6), (1, 3))))


def steps(class_name: str) -> tuple[Step, ...]:
    return CALLS if family_name(class_name) in RANDOM else LENGTHS
