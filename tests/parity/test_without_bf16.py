"""bf16 models on a device without bf16 arithmetic: stored in bf16, computed in fp32.

The reference is plain PyTorch: the same model in fp32, its fp32 masters rounded to bf16 before each forward where the
weight streams, and as they are where it stays on the device.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headrace
import tiny_checkpoints as tiny
from against_plain import Toy, adamw, assert_close, assert_equal, batch, gradients, hf_loss, llama, own_values, streamed
from headrace.hardware import limits
from parity.masters import rounded
from trainer_runs import gpt2

BF16 = torch.bfloat16
STEPS = 4


@pytest.fixture(autouse=True)
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for a card of 2018."""
    monkeypatch.setattr(limits, "computes_bf16", lambda device: False)


def gemma3() -> Any:
    """Two rotary tables, a scaled embedding, norms of 1 + weight, sliding layers."""
    return own_values(tiny.build("gemma3", vocab_size=257, sliding_window=4)).to(BF16).train()


def falcon() -> Any:
    """Biases, a tied head and attention by ALiBi, whose mask is made in the model's dtype."""
    config = transformers.FalconConfig(
        vocab_size=257, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, bias=True, alibi=True,
        new_decoder_architecture=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return own_values(transformers.FalconForCausalLM(config)).to(BF16).train()


MODELS = {
    "llama": lambda: llama(3, BF16), "tied": lambda: llama(3, BF16, tie_word_embeddings=True),
    "gpt2": lambda: gpt2().to(BF16), "gemma3": gemma3, "falcon": falcon,
}  # fmt: skip


class Upcast:
    """The reference."""

    def __init__(self, model: Any, streamed_names: set[str]) -> None:
        self.model = copy.deepcopy(model).float()
        self.streamed = streamed_names
        self.masters = {
            name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in self.model.named_parameters()
        }
        self.optimizer = torch.optim.AdamW([p for p in self.masters.values() if p.requires_grad], lr=1e-2, eps=1e-3)

    def take(self, masters: dict[str, Tensor]) -> None:
        """Go on from these masters: a master at the middle of two bf16 values falls to either side by a rounding."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.masters[name].copy_(masters[name])
                p.copy_(rounded(masters[name]).float() if name in self.streamed else masters[name])

    def backward(self, batches: list[Tensor]) -> float:
        self.model.zero_grad()
        losses = [hf_loss(self.model, ids) / len(batches) for ids in batches]
        for loss in losses:
            loss.backward()
        return sum(loss.item() for loss in losses)

    def step(self) -> dict[str, Tensor]:
        for name, p in self.model.named_parameters():
            self.masters[name].grad = None if p.grad is None else p.grad.clone()
        self.optimizer.step()
        return {name: master.detach() for name, master in self.masters.items()}


def streamed_names(model: Any) -> set[str]:
    return {entry.name for unit, _, entry in headrace.session(model).spec.pieces() if unit.kind != "rest"}


def masters(model: Any) -> dict[str, Tensor]:
    return {name: headrace.session(model).read_weight(name, master=True) for name, _ in model.named_parameters()}


def train(ours: Any, optimizer: Any, plain: Any, accumulation: int = 1) -> None:
    """A few steps beside the reference: losses, every gradient, every master."""
    reference = Upcast(plain, streamed_names(ours))
    for step in range(STEPS):
        batches = [batch(3, 9 - step % 3, seed=10 * step + part, vocabulary=257) for part in range(accumulation)]
        reference.take(masters(ours))
        loss = headrace.accumulate(lambda ids: hf_loss(ours, ids) / accumulation, batches)
        loss.backward()
        assert loss.item() == pytest.approx(reference.backward(batches), rel=1e-5)
        assert_close(gradients(ours), gradients(reference.model))
        optimizer.step()
        optimizer.zero_grad()
        assert_close(masters(ours), reference.step(), tolerance=1e-6)


WAYS: dict[str, dict[str, Any]] = {
    "host": {}, "rows": {"rows": 1}, "kept": {"activations": "keep"}, "guarded": {"guard_every": 1},
    "disk": {"placement": {"weights": "disk", "state": "disk"}},
    "device": {"placement": {"weights": "device", "state": "device"}},
    "beside": {"placement": {"weights": "device", "state": "host"}},
    "inputs": {"activations": "host"}, "inline": {"window": 3, "overlap": False},
    "early": {"accumulation": 1, "on_nonfinite": "stop", "window": 2}, "updates": {"update": "both", "window": 2},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_steps_are_those_of_fp32_with_rounded_weights(name: str, way: str, tmp_path: Path) -> None:
    plain, options = MODELS[name](), {**WAYS[way], "disk_dir": tmp_path}
    if way == "early":  # gradients are gone when the backward ends
        with streamed(plain, adamw, **options) as (ours, optimizer), streamed(plain, adamw) as (late, other):
            for step in range(STEPS):
                for model, driver in ((ours, optimizer), (late, other)):
                    hf_loss(model, batch(3, 9, seed=step, vocabulary=257)).backward()
                    driver.step()
                    driver.zero_grad()
            assert_equal(masters(ours), masters(late))
        return
    with streamed(plain, adamw, **options) as (ours, optimizer):
        train(ours, optimizer, plain)
        if way == "guarded":
            guard = headrace.session(ours).guard
            assert guard is not None and len(guard.checks) == STEPS
            assert all(check.level == "normal" and check.error < 1e-5 for check in guard.checks)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "falcon"])
def test_families(name: str) -> None:
    plain = MODELS[name]()
    with streamed(plain, adamw) as (ours, optimizer):
        train(ours, optimizer, plain)


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize("rows", [None, 2])
def test_windows_of_micro_batches(name: str, rows: int | None) -> None:
    plain = MODELS[name]()
    with streamed(plain, adamw, rows=rows) as (ours, optimizer):
        train(ours, optimizer, plain, accumulation=3)


@pytest.mark.parametrize("tied", [False, True])
def test_placements_agree_bit_for_bit(tied: bool, tmp_path: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for weights, state in (("host", "host"), ("device", "device"), ("device", "host"), ("disk", "disk")):
        placement = {"weights": weights, "state": state}
        model = llama(3, BF16, tie_word_embeddings=tied)
        with streamed(model, adamw, placement=placement, disk_dir=tmp_path) as (ours, optimizer):
            for step in range(STEPS):
                hf_loss(ours, batch(3, 9, seed=step, vocabulary=257)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(masters(ours))
    for other in found[1:]:
        assert_equal(other, found[0])


def test_what_is_stored_what_crosses_the_link_and_what_computes() -> None:
    """Weights in 2 bytes, gradients in 4, everything that computes in fp32, and an event that says so."""
    seen: dict[str, set[torch.dtype]] = {"inside": set(), "between": set()}

    def look(layer: nn.Module, args: Any, result: Any) -> None:
        seen["inside"].update(t.dtype for t in (*layer.parameters(), *layer.buffers()))
        seen["between"].update(t.dtype for t in (*args, result) if isinstance(t, Tensor))

    plain = llama(3, BF16)
    assert plain.model.rotary_emb.inv_freq.dtype == BF16
    with streamed(plain, adamw) as (ours, optimizer):
        session = headrace.session(ours)
        for layer in ours.model.layers:
            layer.register_forward_hook(look)
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        assert seen == {"inside": {torch.float32}, "between": {torch.float32}}
        assert ours.dtype == torch.float32 and {p.dtype for p in ours.parameters()} == {torch.float32}
        assert {b.dtype for b in ours.buffers()} == {torch.float32}
        block = next(unit for unit in session.spec.units if unit.kind == "block")
        numbers = sum(p.numel() for p in plain.model.layers[0].parameters())
        assert {entry.dtype for entry in block.weights.entries} == {"bfloat16"}
        assert numbers * 2 <= block.weights.nbytes < numbers * 2 + 8192 and set(block.parts) > {"low"}
        optimizer.step()
        session.wait()
        before = session.memory_report()["link"]
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        session._executor.wait(*(f"grads:u{unit.index}" for unit in session.spec.units))
        after = session.memory_report()["link"]
        moved = sum(p.numel() for part in (plain.model.layers, plain.lm_head) for p in part.parameters())
        up, down = (after[key] - before[key] for key in ("to_device", "to_host"))
        assert 2 * moved <= up <= 2 * 2 * moved * 1.02  # what ends the forward is still there for the backward
        assert 4 * moved <= down <= 4 * moved * 1.02
        told = [str(event) for event in session.events if event.kind == "precision"]
        assert len(told) == 1 and "does not compute in bf16" in told[0]


def test_evaluation_computes_with_the_same_weights() -> None:
    plain = llama(3, BF16)
    reference, ids = copy.deepcopy(plain).float().eval(), batch(3, 9, vocabulary=257)
    with streamed(plain, adamw) as (ours, _):
        ours.eval()
        with torch.no_grad():
            assert_close({"logits": ours(ids).logits}, {"logits": reference(ids).logits}, 1e-6)
            got, want = (m.generate(ids[:1], max_new_tokens=5, do_sample=False) for m in (ours, reference))
        assert torch.equal(got, want)


def test_a_model_comes_back_as_it_was() -> None:
    """unwrap: bf16 weights, the masters rounded; bf16 buffers and configurations."""
    plain = gemma3()
    plain.config.dtype = BF16
    buffers = {name: b.clone() for name, b in plain.named_buffers()}
    assert {b.dtype for b in buffers.values()} == {BF16}
    with streamed(plain, adamw) as (ours, optimizer):
        assert ours.config.dtype == torch.float32
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        optimizer.step()
        exact, names = masters(ours), streamed_names(ours)
        headrace.unwrap(ours)
        for name, p in ours.named_parameters():
            assert p.dtype == BF16
            assert torch.equal(p, rounded(exact[name]) if name in names else exact[name].to(BF16)), name
        assert_equal(dict(ours.named_buffers()), buffers)
        assert {b.dtype for b in ours.buffers()} == {BF16} and ours.config.dtype == BF16
        hf_loss(ours, batch(3, 9, vocabulary=257)).backward()
        ours.zero_grad()
        own, _ = headrace.wrap(ours, optimizer, device="cpu", placement={"weights": "host", "state": "host"})
        hf_loss(own, batch(3, 9, vocabulary=257)).backward()
        headrace.session(own).close()


def test_a_wrap_that_fails_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the weights are in the stores when it fails: of a model in memory, and of one that is not yet read."""
    from headrace.session import fill

    folder = tiny.save(tiny.build("llama", BF16), tmp_path / "model")
    for model in (tiny.reference(folder, "llama"), headrace.load_model(folder, dtype=BF16)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        count = [0]

        def failing(*given: Any, count: list[int] = count, own: Any = fill._hand_over) -> None:
            own(*given)
            count[0] += 1
            if count[0] == 9:
                raise OSError("no more")

        with monkeypatch.context() as patched:
            patched.setattr(fill, "_hand_over", failing)
            with pytest.raises(OSError, match="no more"):
                headrace.wrap(model, adamw(model), device="cpu", placement={"weights": "host", "state": "host"})
        assert count[0] == 9
        assert_equal(model.state_dict(), before)
        assert {p.dtype for p in model.parameters()} == {BF16}


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "mixtral"])
def test_models_that_are_not_read_yet(family: str, tmp_path: Path) -> None:
    """From the files straight into the stores; saved again, untrained, bit for bit, and trained as from memory."""
    folder = tiny.save(tiny.build(family, BF16), tmp_path / "model")
    plain = tiny.reference(folder, family)
    model = headrace.load_model(folder, dtype=BF16)
    model, optimizer = headrace.wrap(
        model, adamw(model), device="cpu", window=1, placement={"weights": "host", "state": "host"}, debug=True
    )
    with headrace.session(model):
        model.save_pretrained(tmp_path / "same")
        assert_equal(tiny.stored(tmp_path / "same"), tiny.stored(folder))
        assert (tmp_path / "same" / "config.json").read_text() == (folder / "config.json").read_text()
        reference = Upcast(plain, streamed_names(model))
        ids = batch(3, 9, vocabulary=99)
        model.eval()  # one of them drops out
        hf_loss(model, ids).backward()
        reference.backward([ids])
        assert_close(gradients(model), gradients(reference.model))
        optimizer.step()
        model.save_pretrained(tmp_path / "trained")
        assert {tensor.dtype for tensor in tiny.stored(tmp_path / "trained").values()} == {BF16}
        loaded = tiny.reference(tmp_path / "trained", family)
        exact, names = masters(model), streamed_names(model)
        for name, p in loaded.named_parameters():
            assert torch.equal(p, rounded(exact[name]) if name in names else exact[name].to(BF16)), name


def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, number: int) -> None:
        hf_loss(model, batch(3, 9, seed=number, vocabulary=257)).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = llama(3, BF16)
    with streamed(plain, adamw) as (ours, optimizer):
        for number in range(STEPS):
            if number == 2:
                headrace.session(ours).save(tmp_path / "state")
            step(ours, optimizer, number)
        whole = masters(ours)
    with streamed(plain, adamw, placement={"weights": "device"}) as (again, driver):
        with torch.no_grad():
            for p in again.parameters():
                p.add_(1.0)
        headrace.session(again).restore(tmp_path / "state")
        for number in range(2, STEPS):
            step(again, driver, number)
        assert_equal(masters(again), whole)


def test_adapters_on_a_bf16_base(tmp_path: Path) -> None:
    """The base is frozen and stored in bf16, adapters train; they are saved in the dtype that they had."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    plain = peft.get_peft_model(llama(3, BF16), config, autocast_adapter_dtype=False).to(BF16)
    with streamed(plain, adamw) as (ours, optimizer):
        train(ours, optimizer, plain)
        ours.save_pretrained(tmp_path)
        assert {tensor.dtype for tensor in tiny.stored(tmp_path).values()} == {BF16}


def test_a_model_of_ones_own_with_a_buffer_that_changes() -> None:
    """Mixed formats: fp32 parts stay fp32, bf16 ones become so; a running mean in bf16 is kept in fp32 meanwhile."""

    class Centred(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gain = nn.Linear(20, 20), nn.Parameter(torch.ones(20))
            self.register_buffer("mean", torch.zeros(20))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            return x + torch.tanh(self.linear(x - self.mean)) * self.gain

    torch.manual_seed(0)
    plain = Toy([Centred() for _ in range(3)]).to(BF16)
    plain.norm.float()
    reference = copy.deepcopy(plain).float()
    with streamed(plain) as (ours, _):
        for model in (ours, reference):
            logits = model(batch())
            nn.functional.cross_entropy(logits.flatten(0, 1), batch().flatten()).backward()
        assert_close(gradients(ours), gradients(reference))
        got = {name: b.clone() for name, b in ours.named_buffers()}
        assert_close(got, dict(reference.named_buffers()), 1e-6)
        headrace.unwrap(ours)
        assert {b.dtype for b in ours.buffers()} == {BF16} and ours.norm.weight.dtype == torch.float32
