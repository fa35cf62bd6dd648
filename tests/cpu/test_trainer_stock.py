"""A stock Trainer with a wrapped model and HeadraceCallback, and with headrace.AdamW for a model that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from against_plain import assert_close, assert_equal, llama, weights
from headrace import OptimizerError, OptionError, StepError
from headrace.integrations.transformers import HeadraceCallback
from trainer_runs import HOST, assert_same_logs, assert_same_run, logged, rows, trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def wrapped(model: Any, callback: bool = True, max_grad_norm: float = 1.0, **options: Any) -> dict[str, Any]:
    """The parts of a stock Trainer for a wrapped model."""
    options["max_grad_norm"] = max_grad_norm
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)
    model, optimizer = headrace.wrap(model, optimizer, device="cpu", **{**HOST, **options})
    parts: dict[str, Any] = {"model": model, "optimizers": (optimizer, None), "eval_dataset": rows(7, seed=5)}
    return {**parts, "callbacks": [HeadraceCallback()]} if callback else parts


def test_a_wrapped_model_in_a_stock_trainer(tmp_path: Path) -> None:
    """The plain run's losses, norms and weights, with micro-batches that each have a backward of their own."""
    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "plain", max_grad_norm=0.5, max_steps=6,
                     parts={"eval_dataset": rows(7, seed=5)}, eval_strategy="steps", eval_steps=3)  # fmt: skip
    theirs.train()
    ours = trainer(transformers.Trainer, None, tmp_path / "ours", max_grad_norm=0.5, max_steps=6,
                   parts=wrapped(llama(3), max_grad_norm=0.5), eval_strategy="steps", eval_steps=3)  # fmt: skip
    ours.train()
    assert_same_run(ours, theirs)
    assert_same_logs(ours, theirs, ("eval_loss",))
    events = [str(event) for event in headrace.session(ours.model).events]
    assert any("HeadraceTrainer once per window" in event for event in events)
    assert all(name in ours.state.log_history[1] for name in ("device_peak_bytes", "link_bytes_to_host"))


def test_without_the_callback_clipping_is_not_lost(tmp_path: Path) -> None:
    """Report 6: the Trainer's own clipping of streamed gradients stops the run and says what to do."""
    made = trainer(transformers.Trainer, None, tmp_path, parts=wrapped(llama(2), callback=False))
    with pytest.raises(StepError, match=r"Clip with headrace\.wrap"):
        made.train()


def test_no_copy_of_the_optimizer_state_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate would read all state, move it to the device and load it again."""
    parts = wrapped(llama(3))
    made = trainer(transformers.Trainer, None, tmp_path, max_steps=2, parts=parts)

    def refuse(self: Any) -> Any:
        raise AssertionError("the state was read")

    monkeypatch.setattr(type(parts["optimizers"][0]), "state_dict", refuse)
    made.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stock_run_resumes_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """optimizer.pt holds the fp32 masters beside the moments."""
    runs = []
    for folder in (None, "checkpoint-4"):
        runs.append(trainer(transformers.Trainer, None, tmp_path, parts=wrapped(llama(3, dtype)), **SAVING))
        runs[-1].train(resume_from_checkpoint=folder and str(tmp_path / folder))
    whole, resumed = runs
    sessions = [headrace.session(made.model) for made in runs]
    for name, _ in whole.model.named_parameters():
        assert torch.equal(*(session.read_weight(name, master=True) for session in sessions)), name
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_bf16_in_a_stock_trainer(tmp_path: Path) -> None:
    """accelerate's autocast around a wrapped fp32 model."""
    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "plain", bf16=True, max_steps=4)
    theirs.train()
    parts = wrapped(llama(3), autocast="bfloat16")
    ours = trainer(transformers.Trainer, None, tmp_path / "ours", bf16=True, max_steps=4, parts=parts)
    ours.train()
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-3)


def test_what_cannot_work_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the model is not wrapped"):
        trainer(transformers.Trainer, llama(2), tmp_path, parts={"callbacks": [HeadraceCallback()]})
    parts = wrapped(llama(2))
    other = torch.optim.AdamW(parts["model"].parameters())
    with pytest.raises(OptionError, match=r"pass optimizers=\(optimizer, None\).*torch_compile=True"):
        trainer(transformers.Trainer, None, tmp_path, parts={**parts, "optimizers": (other, None)}, torch_compile=True)
    with pytest.raises(OptionError, match=r"wrap was told max_grad_norm=1.0, .*\(max_grad_norm=...\) say None"):
        trainer(transformers.Trainer, None, tmp_path, parts=wrapped(llama(2)), max_grad_norm=0.0)
    parts = wrapped(llama(2), max_grad_norm=None, accumulation=2, on_nonfinite="stop")
    with pytest.raises(OptionError, match=r"wrap was told accumulation=2, .* say 3"):
        trainer(transformers.Trainer, None, tmp_path, parts=parts, max_grad_norm=0.0)


def test_arguments_that_change_after_the_trainer_was_made_are_refused(tmp_path: Path) -> None:
    made = trainer(transformers.Trainer, None, tmp_path, parts=wrapped(llama(2)), max_steps=1)
    made.args.max_grad_norm = 0.5
    with pytest.raises(OptionError, match=r"max_grad_norm=1\.0, .* say 0\.5.*HeadraceTrainer, which follows them"):
        made.train()
    made.args.max_grad_norm = 1.0
    made.train()
    assert headrace.session(made.model).steps == 1


# -- headrace.AdamW -------------------------------------------------------------------------------------------------


def groups(model: Any, decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "weight_decay": decay},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_keeps_exact_masters(dtype: torch.dtype) -> None:
    """bf16 weights follow torch.optim.AdamW on fp32 masters given the same gradients; fp32 weights follow it as such.
    The rate changes, some gradients are missing at times."""
    model = llama(2, dtype)
    names = [name for name, _ in model.named_parameters()]
    reference = llama(2, dtype).float()
    theirs = torch.optim.AdamW(groups(reference, 0.3), lr=1e-2, betas=(0.8, 0.95))
    ours = headrace.AdamW(groups(model, 0.3), lr=1e-2, betas=(0.8, 0.95))
    generator = torch.Generator().manual_seed(3)
    for step in range(8):
        for number, name in enumerate(names):
            mine, other = model.get_parameter(name), reference.get_parameter(name)
            grad = torch.randn(mine.shape, generator=generator).to(dtype)
            missing = (number + step) % 5 == 0
            mine.grad, other.grad = (None, None) if missing else (grad, grad.float())
        for optimizer in (ours, theirs):
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    exact = {name: value for name, value in weights(reference).items() if name in names}
    assert_close(masters_of(model, ours), exact, 1e-6)
    for name, master in masters_of(model, ours).items():  # the weight is the master rounded to nearest, ties away
        bits = (master.view(torch.int32) + 0x8000) & -0x10000
        value = master if dtype == torch.float32 else bits.view(torch.float32).to(dtype)
        assert torch.equal(model.get_parameter(name), value), name
    moments = {name: ours.state[model.get_parameter(name)]["exp_avg_sq"] for name in names}
    assert_close(moments, {name: theirs.state[reference.get_parameter(name)]["exp_avg_sq"] for name in names}, 1e-6)
    assert {state["step"].item() for state in ours.state.values()} <= {6.0, 7.0, 8.0}


def masters_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    from headrace.kernels import ops

    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.dtype == torch.bfloat16:
            found[name] = torch.empty(parameter.shape)
            low = optimizer.state[parameter]["low"].view(-1)
            ops.join_master_(found[name].view(-1), parameter.detach().reshape(-1), low)
    return found


def test_adamw_in_a_stock_trainer(tmp_path: Path) -> None:
    """optimizers=(headrace.AdamW(...), None): the plain run, resumed from its checkpoint, too."""
    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "plain", weight_decay=0.1, max_steps=6)
    theirs.train()
    runs = []
    for folder in (None, "checkpoint-4"):
        model = llama(3)
        optimizer = headrace.AdamW(groups(model, 0.1), lr=1e-2, eps=1e-3)
        parts = {"model": model, "optimizers": (optimizer, None)}
        runs.append(trainer(transformers.Trainer, None, tmp_path / "ours", parts=parts, **SAVING))
        runs[-1].train(resume_from_checkpoint=folder and str(tmp_path / "ours" / folder))
    assert_same_run(runs[0], theirs)
    assert_equal(weights(runs[1].model), weights(runs[0].model))


def test_adamw_resumes_bf16_bit_for_bit(tmp_path: Path) -> None:
    """Remainders of the masters are in the checkpoint, in their own format."""
    runs = []
    for folder in (None, "checkpoint-2"):
        model = llama(3, torch.bfloat16)
        parts = {"model": model, "optimizers": (headrace.AdamW(model.parameters(), lr=1e-3), None)}
        runs.append(trainer(transformers.Trainer, None, tmp_path, parts=parts, **SAVING))
        runs[-1].train(resume_from_checkpoint=folder and str(tmp_path / folder))
    first, second = (masters_of(made.model, made.optimizer.optimizer) for made in runs)
    assert_equal(second, first)


def test_adamw_takes_over_other_states() -> None:
    """The state of torch.optim.AdamW, and of a wrapped model's optimizer with its exact masters."""
    model = llama(2, torch.bfloat16)
    streamed, optimizer = headrace.wrap(llama(2, torch.bfloat16), lr=1e-2, device="cpu")
    ids = rows(3)[0]["input_ids"][None]
    for _ in range(2):
        streamed(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = headrace.AdamW(model.parameters(), lr=1.0)
    ours.load_state_dict(optimizer.state_dict())
    session = headrace.session(streamed)
    assert_equal(masters_of(model, ours), {n: session.read_weight(n, master=True) for n, _ in model.named_parameters()})
    assert ours.param_groups[0]["lr"] == 1e-2
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    plain.step()
    other = headrace.AdamW(model.parameters())
    other.load_state_dict(plain.state_dict())
    for parameter in model.parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], plain.state[parameter]["exp_avg"].float())
        assert other.state[parameter]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    "options, told",
    [({"lr": -1.0}, "out of range"), ({"betas": (0.9, 1.0)}, "out of range"), ({"moments": torch.int8}, "dtype")],
)
def test_adamw_refuses_what_it_cannot_do(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptimizerError, match=told):
        headrace.AdamW(llama(1).parameters(), **options)
    with pytest.raises(OptimizerError, match="float16"):
        headrace.AdamW(llama(1).half().parameters())


def test_adamw_with_bf16_moments_and_odd_tensors() -> None:
    """A transposed parameter, a scalar and an empty one; moments in bf16 stay near those in fp32."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5).t(), torch.randn(()), torch.randn(0, 4), torch.randn(7)]
    ours = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    ours[0] = torch.nn.Parameter(tensors[0])  # keeps its strides
    theirs = [torch.nn.Parameter(tensor.clone().contiguous()) for tensor in tensors]
    optimizers = (headrace.AdamW(ours, moments=torch.bfloat16), torch.optim.AdamW(theirs))
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad = torch.randn(mine.shape)
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert not ours[0].is_contiguous()
