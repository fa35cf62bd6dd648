"""Public problem report 46: vision-language models on rows without images, with images, and on both in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_close, assert_equal, batch, streamed, weights
from parity.reference import check_gradients, gradients
from side_by_side import side_by_side

TEXT: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 64, "intermediate_size": 92, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = 250


def qwen2_vl() -> Any:
    """Images come as patches of any number of pictures in one sequence."""
    import transformers

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config={**vision, "spatial_merge_size": 2},
        image_token_id=IMAGE, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253,
    )  # fmt: skip
    return _ready(transformers.Qwen2VLForConditionalGeneration(config))


def llava() -> Any:
    """A CLIP tower, all of whose layers but the last are used."""
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE,
    )  # fmt: skip
    return _ready(transformers.LlavaForConditionalGeneration(config))


def _ready(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape) + (parameter.dim() == 1))
    return model.train()


MODELS: dict[str, Callable[[], Any]] = {"qwen2-vl": qwen2_vl, "llava": llava}


def text(seed: int) -> dict[str, Tensor]:
    ids = batch(2, 9, seed, IMAGE)
    return {"input_ids": ids, "labels": ids.clone()}


def image(name: str, seed: int) -> dict[str, Tensor]:
    """Two rows with one picture each of 16 by 16 pixels in patches of 4."""
    generator = torch.Generator().manual_seed(seed)
    ids = batch(2, 24, seed, IMAGE)
    if name == "qwen2-vl":
        ids[:, 2], ids[:, 3:7], ids[:, 7] = 252, IMAGE, 253
        pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
        extra = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == IMAGE).int()}
    else:
        ids[:, 2:18] = IMAGE
        pixels, extra = torch.randn(2, 3, 16, 16, generator=generator), {}
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= IMAGE, -100), "pixel_values": pixels, **extra}


def example(name: str, kind: str, seed: int) -> dict[str, Tensor]:
    return text(seed) if kind == "text" else image(name, seed)


def of_tower(name: str) -> bool:
    return "visual" in name or "vision_tower" in name or "projector" in name


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("name", MODELS)
def test_text_and_images_in_turn(name: str, rows: int | None) -> None:
    """Full fine-tuning. A tower that a step did not use keeps weights, moments and counts, as in plain PyTorch."""
    with side_by_side(MODELS[name](), adamw, rows=rows, max_grad_norm=1.0) as pair:
        for step, kind in enumerate(("text", "image", "text", "image", "image")):
            before = weights(pair.ours)
            pair.step(lambda net, kind=kind, step=step: net(**example(name, kind, step)).loss)
            after = weights(pair.ours)
            moved = {key for key in after if of_tower(key) and not torch.equal(after[key], before[key])}
            assert bool(moved) == (kind == "image")
        pair.same_state()


@pytest.mark.parametrize("name", MODELS)
def test_text_alone_costs_the_tower_nothing(name: str) -> None:
    """No state for its tensors, no byte of them over the link: less than with images by twice the tower at least."""
    crossed = {}
    for kind in ("text", "image"):
        with streamed(MODELS[name](), adamw) as (ours, driver):
            session = headrace.session(ours)
            ours(**example(name, kind, 0)).loss.backward()  # the trial of the first batch is over
            driver.step()
            driver.zero_grad()
            before = headrace.memory_report(ours)["link"]["to_device"]
            ours(**example(name, kind, 1)).loss.backward()
            driver.step()
            session.wait()
            crossed[kind] = headrace.memory_report(ours)["link"]["to_device"] - before
            names = [key for key, _ in ours.named_parameters()]
            held = {names[number] for number in driver.state_dict()["state"]}
            assert any(map(of_tower, held)) == (kind == "image")
            tower = [u for u in session.spec.units if of_tower(u.name) and u.kind == "block" and "mlp.2" not in u.name]
            nbytes = sum(unit.weights.nbytes for unit in tower)
    used = nbytes * (2 / 3 if name == "llava" else 1)  # LLaVA leaves the last layer out
    assert crossed["image"] - crossed["text"] >= 2 * used > 0, (crossed, used)


@pytest.mark.parametrize("name", MODELS)
def test_a_window_of_text_and_images(name: str) -> None:
    """Micro-batches that meet at the language model's blocks, and of which one alone has a tower before them."""
    model = MODELS[name]()
    parts = [example(name, kind, seed) for seed, kind in enumerate(("text", "image", "text"))]
    with side_by_side(model, adamw) as pair:
        for _ in range(2):
            for part in parts:
                (pair.plain(**part).loss / 3).backward()
            headrace.accumulate(lambda part: pair.ours(**part).loss / 3, parts).backward()
            own = {key: p.grad for key, p in pair.plain.named_parameters() if p.grad is not None}
            check_gradients(gradients(pair.ours), own)
            for optimizer in (pair.theirs, pair.driver):
                optimizer.step()
                optimizer.zero_grad()
        assert_close(weights(pair.ours), weights(pair.plain))


@pytest.mark.parametrize("inputs_require_gradients", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_adapters_behind_a_frozen_tower(name: str, inputs_require_gradients: bool) -> None:
    """LoRA of the language model. The tower runs once and is not recomputed. Hooks that make embeddings need a
    gradient, as checkpointing wants them, change no number; the graph that they ask for costs a recompute here."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = r".*language_model.*\.(q_proj|up_proj)"
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(MODELS[name](), config)
    if inputs_require_gradients:
        model.enable_input_require_grads()
    assert not any(of_tower(key) for key, p in model.named_parameters() if p.requires_grad)
    with side_by_side(model, adamw) as pair:
        before = weights(pair.ours)
        tower = [module for key, module in pair.ours.named_modules() if key.endswith(("blocks.1.mlp", "layers.1.mlp"))]
        ran: list[int] = []
        (first, *_) = tower
        first.register_forward_hook(lambda *given: ran.append(1))
        for step, kind in enumerate(("text", "image", "text", "image")):
            ran.clear()
            pair.step(lambda net, kind=kind, step=step: net(**example(name, kind, step)).loss)
            assert len(ran) == (kind == "image") * (2 if inputs_require_gradients else 1)
        pair.same_state()
        after = weights(pair.ours)
        frozen = [key for key, p in pair.plain.named_parameters() if not p.requires_grad]
        assert_equal({key: after[key] for key in frozen}, {key: before[key] for key in frozen})
