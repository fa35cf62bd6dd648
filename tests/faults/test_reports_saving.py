"""Public problem reports 68, 70 and 75: what is saved of a model whose head and embedding are tied or only said to be;
two models in one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import headrace
from against_plain import (
    adamw,
    assert_close,
    assert_equal,
    batch,
    hf_loss,
    llama,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.integrations.transformers import HeadraceTrainer
from side_by_side import side_by_side
from trainer_runs import trainer

IDS = batch(2, 9, 99, 257)
TIES = [(True, True), (True, False), (False, True), (False, False)]


def tied_or_not(configured: bool, shared: bool) -> Any:
    """`configured`: the configuration says tied. `shared`: head and embedding are one parameter."""
    model = llama(3, tie_word_embeddings=configured)
    embedding = model.model.embed_tokens.weight
    model.lm_head.weight = embedding if shared else nn.Parameter(embedding.detach().flip(0).clone())
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits + 0
    return found


def check_folder(folder: Path, shared: bool, reached: Tensor) -> Any:
    """Plain transformers and headrace.load_model give the same logits; one tensor only when storage was shared."""
    stored = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in stored) is not shared and "model.embed_tokens.weight" in stored
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is shared
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is shared
    assert torch.equal(logits(plain), reached)
    assert torch.equal(logits(headrace.load_model(folder)), reached)
    assert sum(tensor.nbytes for tensor in stored.values()) == sum(p.nbytes for p in plain.parameters())
    return plain


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("configured, shared", TIES)
def test_ties_are_those_of_the_storage(configured: bool, shared: bool, where: str, tmp_path: Path) -> None:
    """Report 68: the head was dropped, or replaced by the embedding, or stored twice. Three steps as in plain PyTorch,
    and a run that goes on from what was saved, too."""
    model = tied_or_not(configured, shared)
    options = {"placement": {"weights": where, "state": where}, "disk_dir": tmp_path / "spill"}
    with side_by_side(model, adamw, **options) as pair:
        for step in range(3):
            pair.step(lambda net, step=step: hf_loss(net, batch(2, 9, step, 257)))
        pair.same_state()
        assert len(pair.driver.state_dict()["state"]) == len(list(model.parameters())) == 29 + (not shared)
        reached = logits(pair.ours)
        pair.ours.save_pretrained(tmp_path / "saved")
        assert pair.ours.config.tie_word_embeddings is configured
        state = pair.ours.state_dict()
        tied = torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
        assert tied is shared
    again = check_folder(tmp_path / "saved", shared, reached)
    loaded = headrace.load_model(tmp_path / "saved").train()
    ours, driver = headrace.wrap(loaded, adamw(loaded), device="cpu", placement={"weights": "host", "state": "host"})
    theirs = adamw(again.train())
    with headrace.session(ours):
        for net, optimizer in ((again, theirs), (ours, driver)):
            hf_loss(net, IDS).backward()
            optimizer.step()
        assert_close(weights(ours), weights(again))


@pytest.mark.parametrize("configured, shared", TIES)
def test_a_trainer_resumes_what_is_tied_and_what_is_not(configured: bool, shared: bool, tmp_path: Path) -> None:
    """Report 68: a resume put the embedding in the head's place (a large jump of the loss). From the exact state, and
    from weights alone."""
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trainer(HeadraceTrainer, tied_or_not(configured, shared), tmp_path, **saving)
    whole.train()
    check_folder(tmp_path / "checkpoint-4", shared, logits(whole.model))
    resumed = trainer(HeadraceTrainer, tied_or_not(configured, shared), tmp_path, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed.model), weights(whole.model))
    alone = {**saving, "save_only_model": True, "max_steps": 3, "learning_rate": 0.0}
    weights_only = trainer(HeadraceTrainer, tied_or_not(configured, shared), tmp_path / "alone", **alone)
    folder = tmp_path / "alone" / "checkpoint-2"
    whole.save_model(str(folder))
    (folder / "trainer_state.json").write_text((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    weights_only.train(resume_from_checkpoint=str(folder))
    assert_equal(weights(weights_only.model), weights(whole.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_way_to_read_a_streamed_model_gives_all_of_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """Report 70: sums, state dicts and files of placeholders. Everything lives on the disk."""
    model = llama(3, dtype)
    model, optimizer = headrace.wrap(
        model, adamw(model), device="cpu", window=1, debug=True, disk_dir=tmp_path / "spill",
        placement={"weights": "disk", "state": "disk"},
    )  # fmt: skip
    with headrace.session(model):
        for step in range(2):
            hf_loss(model, batch(2, 9, step, 257)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = weights(model)
        model.save_pretrained(tmp_path / "saved")
        torch.save(model.state_dict(), tmp_path / "state.pt")
        sums = {name: parameter.double().sum() for name, parameter in model.named_parameters()}
        norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()])
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        part = weights(model.model.layers[1])
        other = llama(3, dtype)
        other.load_state_dict(model.state_dict())
    assert_equal(load_file(tmp_path / "saved" / "model.safetensors"), state)
    assert_equal(torch.load(tmp_path / "state.pt", weights_only=True), state)
    assert_equal(weights(other), state)
    assert_equal(part, {name.split(".", 3)[3]: t for name, t in state.items() if name.startswith("model.layers.1.")})
    assert all(torch.equal(total, state[name].double().sum()) for name, total in sums.items())
    plain = [state[name] for name, _ in other.named_parameters()]
    assert torch.equal(norm, torch.nn.utils.get_total_norm(plain))
    assert torch.equal(vector, torch.cat([tensor.reshape(-1) for tensor in plain]))
    size = (tmp_path / "saved" / "model.safetensors").stat().st_size
    assert size - 10_000 < sum(tensor.nbytes for tensor in state.values()) < size


def test_two_models_share_a_folder(tmp_path: Path) -> None:
    """Report 75: policy and reference model with the same disk_dir, one shape, different weights."""
    one, two = toy(), toy()
    with torch.no_grad():
        two.blocks[0].up.weight.add_(1)
    disk = {"weights": "disk", "state": "disk"}
    with (
        streamed(one, adamw, placement=disk, disk_dir=tmp_path) as (first, driver),
        streamed(two, adamw, placement=disk, disk_dir=tmp_path) as (second, _),
    ):
        before = weights(two)
        toy_loss(first, batch()).backward()
        driver.step()
        assert_equal(weights(second), before)
        assert not torch.equal(weights(first)["norm.weight"], weights(one)["norm.weight"])
