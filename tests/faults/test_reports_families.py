"""Public problem reports 28, 29, 36 to 38, 42, 44 and 45: what a family's own forward does must not be lost."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import Block, Toy, assert_equal, batch, sgd, streamed, toy_loss, weights
from side_by_side import side_by_side

SHAPE: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 92, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64, "attn_implementation": "eager",
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def build(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """`kind`ForCausalLM ("Gemma2"), tiny, its norms and biases with values of their own."""
    import transformers

    config = {"Gemma3": "Gemma3TextConfig"}.get(kind, f"{kind}Config")
    made = getattr(transformers, config)(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(made, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.dtype))
    return model.train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def tokens(rows: int = 2, length: int = 9, seed: int = 0, vocabulary: int = 257) -> dict[str, Tensor]:
    ids = batch(rows, length, seed, vocabulary)
    return {"input_ids": ids, "labels": ids.clone()}


def logits(model: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs).logits + 0  # of a streamed model, too, a tensor
    return found


# -- soft-caps, scales and biases of the head -------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 4},
    "Cohere": {"logit_scale": 0.25},
    "GPTJ": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "Phi": {},
}


def cut_matrices(monkeypatch: pytest.MonkeyPatch, model: nn.Module, vocabulary: int, rows: int) -> None:
    """Let embedding and head stream in tiles of `rows` rows, and logits exist for three tokens at a time."""
    from headrace.executor import head
    from headrace.model import units

    real = units._bytes
    (stack,) = headrace.find_blocks(model)
    largest = sum(real(p, frozenset()) for p in stack.blocks[0].parameters())
    count = -(-vocabulary // rows)
    monkeypatch.setattr(
        units, "_bytes", lambda p, narrow: count * largest if p.shape[0] == vocabulary else real(p, narrow)
    )
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 3 * rows)


@pytest.mark.parametrize("rows", [1, 7, 61])
@pytest.mark.parametrize("kind", HEADS)
def test_caps_scales_and_biases_of_the_head(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 28: a chunked loss left them out. Tiles of the head with 1, 7 and all words."""
    model = build(kind, **{**HEADS[kind], "num_hidden_layers": 2, "vocab_size": 61})
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight *= 20  # logits beyond the cap
        if head.bias is not None:
            head.bias.normal_()
    assert (head.bias is not None) == (kind in ("GPTJ", "Phi"))
    cut_matrices(monkeypatch, model, 61, rows)
    with side_by_side(model) as pair:
        spec = headrace.session(pair.ours).spec
        assert {len(matrix.tiles) for matrix in spec.matrices} == {-(-61 // rows)}
        for step in range(2):
            pair.step(lambda net, step=step: net(**tokens(seed=step, vocabulary=61)).loss)
        assert not any("full logits" in str(event) for event in headrace.session(pair.ours).events)


@pytest.mark.parametrize("cap", [1.0, 30.0])
@pytest.mark.parametrize("vocabulary", [257, 1003])
def test_the_last_tile_has_no_words_that_do_not_exist(
    vocabulary: int, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 29: filler of -inf became finite in the soft-cap. Vocabularies that tiles of 128 do not divide, and logits
    so far below zero that any filler would win."""
    model = build("Gemma2", vocab_size=vocabulary, final_logit_softcapping=cap, tie_word_embeddings=False)
    ids = batch(1, 9, 0, vocabulary)
    with torch.no_grad():  # words that point the other way than the hidden states
        hidden = model.model(input_ids=ids).last_hidden_state.mean((0, 1))
        model.lm_head.weight.copy_(0.01 * cap * torch.randn(vocabulary, 48) - 1.7 * cap * hidden / hidden.norm() ** 2)
    assert logits(model, input_ids=ids).max() < -0.5 * cap
    cut_matrices(monkeypatch, model, vocabulary, 128)
    with side_by_side(model, functools.partial(sgd, lr=0.02)) as pair:
        assert len(headrace.session(pair.ours).spec.matrices[-1].tiles) == -(-vocabulary // 128)
        for _ in range(2):
            pair.step(lambda net: net(input_ids=ids, labels=ids).loss)


# -- what layers of one model do differently --------------------------------------------------------------------------

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gemma3": ("Gemma3", {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, True),
    "gemma3, sliding only": ("Gemma3", {"layer_types": [SLIDING] * 4}, False),
    "mistral": ("Mistral", {}, False),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, True),
}
"""Kind, changes, and whether any layer sees the whole history."""


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("name", WINDOWS)
def test_each_layer_keeps_its_window(name: str, rows: int | None) -> None:
    """Report 36: one mask for all layers. Windows of 4 tokens, rows of 16: through 4 sliding layers the last token
    hears of the twelve before it and of nothing else, unless one layer sees all."""
    kind, changes, sees_all = WINDOWS[name]
    attention = "eager" if kind == "GptOss" else "sdpa"
    model = build(kind, sliding_window=4, attn_implementation=attention, **changes)
    ids = batch(2, 16, 7, 257)
    with side_by_side(model, adamw, rows=rows) as pair:
        for step in range(2):
            pair.step(lambda net, step=step: net(**tokens(2, 16, step)).loss)
        last = logits(pair.ours, input_ids=ids)[:, 15]
        for place in (0, 2, 3, 15):
            changed = ids.clone()
            changed[:, place] = (ids[:, place] + 1) % 257
            hears = not torch.equal(logits(pair.ours, input_ids=changed)[:, 15], last)
            assert hears == (sees_all or place >= 3), place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["Gemma", "Gemma2", "Gemma3"])
def test_embeddings_are_scaled_once_and_in_their_own_precision(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Report 37: applied twice, or as fp32's root of 48. What reaches the first layer is equal to the bit, of a model
    that was built, and of one whose weights headrace.load_model left in their files."""
    model = build(kind, dtype)
    model.save_pretrained(tmp_path)
    scale = torch.tensor(48**0.5, dtype=dtype)
    assert (float(scale) == 6.9375) is (dtype == torch.bfloat16)
    for own in (copy.deepcopy(model), headrace.load_model(tmp_path, attn_implementation="eager").train()):
        ours, driver = headrace.wrap(own, sgd(own), device="cpu", placement={"weights": "host", "state": "host"})
        with headrace.session(ours):
            for step in range(2):
                assert torch.equal(first_input(ours, step), first_input(model, step))
                ids = tokens(seed=step)["input_ids"]
                assert torch.equal(first_input(ours, step), ours.model.embed_tokens.weight[ids] * scale)
                ours(**tokens(seed=step)).loss.backward()
                driver.step()
                driver.zero_grad()
                model.load_state_dict(ours.state_dict())
        model = build(kind, dtype)


def first_input(model: Any, seed: int) -> Tensor:
    """What reaches the first layer."""
    seen = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    model(**tokens(seed=seed))
    hook.remove()
    (found,) = seen
    return found.detach()


MOE = {"intermediate_size": 88, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
DEEPSEEK = {
    **MOE, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_nope_head_dim": 8, "head_dim": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
          "original_max_position_embeddings": 16}  # fmt: skip
BUFFERS = {"DeepseekV3": DEEPSEEK, "Gemma3": {}, "Llama": {"rope_parameters": LLAMA3}}


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_of_a_model_built_without_memory(kind: str, tmp_path: Path) -> None:
    """Report 38: rotary tables, embedding scales, router biases. Values and formats are those of from_pretrained in
    bf16, before and after training, and so are the logits."""
    import transformers

    built = build(kind, torch.bfloat16, **BUFFERS[kind])
    for name, buffer in built.named_buffers():
        if "bias" in name:  # of routers, kept in the checkpoint
            buffer.normal_()
    built.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    expected = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    assert {buffer.dtype for buffer in expected.values()} >= {torch.float32}
    own = headrace.load_model(tmp_path, attn_implementation="eager").train()
    ours, driver = headrace.wrap(own, sgd(own), device="cpu", window=1, debug=True, placement={"weights": "host"})
    with headrace.session(ours):
        assert torch.equal(logits(ours, **tokens()), logits(plain, **tokens()))
        for step in range(2):
            found = dict(ours.named_buffers())
            assert_equal(found, expected)
            assert all(found[name].dtype == buffer.dtype for name, buffer in expected.items())
            ours(**tokens(seed=step)).loss.backward()
            driver.step()
            driver.zero_grad()
        plain.load_state_dict(ours.state_dict())
        assert torch.equal(logits(ours, **tokens()), logits(plain, **tokens()))


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [48, 128])
def test_fused_experts_are_planned_with_their_real_bytes(width: int, tmp_path: Path) -> None:
    """Report 44: the largest part of the model escaped, and the plan did not fit. Every byte of 16-bit
    experts is in the plan (of quantised ones: test_reports_quantised.py)."""
    model = build("Qwen3Moe", torch.bfloat16, **MOE, hidden_size=width, num_experts=8)
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    assert experts > 0.5 * layers
    with streamed(model, adamw, placement={"weights": "disk", "state": "disk"}, disk_dir=tmp_path) as (ours, driver):
        ours(**tokens()).loss.backward()
        driver.step()
        report = headrace.memory_report(ours)
        units = headrace.session(ours).spec.units
        blocks = sum(unit.weights.nbytes for unit in units if unit.kind == "block")
        matrices = sum(p.nbytes for name, p in model.named_parameters() if "embed" in name or "lm_head" in name)
        assert layers <= blocks <= 1.02 * layers  # starts of tensors are aligned
        pages = 4096 * len(units)
        assert blocks + matrices <= report["disk"]["weights"] <= blocks + matrices + pages
        assert report["disk"]["allocated"] >= report["disk"]["weights"] + report["disk"]["state"]
        assert sum(path.stat().st_size for path in tmp_path.rglob("*")) >= report["disk"]["allocated"]


EXPERT_RUNS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"max_grad_norm": 0.05}, "rows": {"rows": 1},
    "early": {"accumulation": 1, "on_nonfinite": "stop"},
}  # fmt: skip


@pytest.mark.parametrize("run", EXPERT_RUNS)
def test_fused_experts_without_tokens(run: str) -> None:
    """Report 45: three tokens, eight experts. Their part of the fused gradient is zero: they decay, and their momentum
    carries on, as with torch's AdamW."""
    choice = {"num_local_experts": 8, "num_experts_per_tok": 1, "output_router_logits": True}
    model = build("Mixtral", **{**MOE, **choice}, num_hidden_layers=3)
    before = weights(model)
    with side_by_side(model, adamw, **EXPERT_RUNS[run]) as pair:
        for step in range(5):
            pair.step(lambda net, step=step: net(**tokens(1, 3, step % 2)).loss, look=run != "early")
        pair.same_state()
        state = pair.theirs.state[pair.plain.model.layers[0].mlp.experts.down_proj]["exp_avg_sq"]
        idle = [expert for expert in range(8) if not state[expert].any()]
        assert idle, "some expert had no token in any step"
        name = "model.layers.0.mlp.experts.down_proj"
        torch.testing.assert_close(weights(pair.ours)[name][idle], before[name][idle] * (1 - 1e-2 * 0.1) ** 5)


class Experts(nn.Module):
    """Eight experts, modules of their own; each token goes to one."""

    def __init__(self, width: int = 20) -> None:
        super().__init__()
        self.router = nn.Linear(width, 8, bias=False)
        self.experts = nn.ModuleList(Block(width, 11) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        share = self.router(flat).softmax(-1)
        chosen, result = share.argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            if len(mine):
                result = result.index_add(0, mine, expert(flat[mine]) * share[mine, number, None])
        return x + result.view_as(x)


@pytest.mark.parametrize("run", EXPERT_RUNS)
def test_separate_experts_without_tokens(run: str) -> None:
    """Report 45: an expert that is a module of its own has no gradient at all then, and stays as it is: no decay, no
    momentum, no count."""
    torch.manual_seed(0)
    model = Toy([Experts() for _ in range(3)])
    with side_by_side(model, adamw, **EXPERT_RUNS[run]) as pair:
        for step in range(5):
            pair.step(lambda net, step=step: toy_loss(net, batch(1, 3, step)), look=run != "early")
        pair.same_state()
        counts = {int(state["step"]) for state in pair.driver.state_dict()["state"].values()}
        assert len(counts) > 1, "experts were used unequally often"
        assert len(pair.theirs.state) < len(list(model.parameters())), "one was never used"
