"""HeadraceTrainer trains as transformers.Trainer does: the same losses, norms, rates and weights, in fp32."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from against_plain import assert_close, distance, llama, weights
from headrace.integrations.transformers import HeadraceTrainer
from trainer_runs import (
    MODELS,
    arguments,
    assert_same_logs,
    assert_same_run,
    both,
    close,
    collate,
    logged,
    rows,
    trainer,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.3, "learning_rate": 0.1},
    "no clipping": {"max_grad_norm": 0.0, "optim": "sgd", "lr_scheduler_type": "constant"},
    "smoothed labels": {"label_smoothing_factor": 0.1, "max_grad_norm": 0.3},
    "noise": {"neftune_noise_alpha": 5.0},
    "checkpointing": {"gradient_checkpointing": True},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "logging_first_step": True, "torch_empty_cache_steps": 1},
    "workers and lengths": {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1},
    "one micro-batch": {"gradient_accumulation_steps": 1, "max_steps": 12, "per_device_train_batch_size": 3},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_run_is_that_of_the_plain_trainer(variant: str, tmp_path: Path) -> None:
    """Micro-batches of unequal length, a shorter last window, past the first epoch."""
    ours, theirs = both(llama(3), tmp_path, **VARIANTS[variant])
    assert_same_run(ours, theirs)
    assert ours.session.steps == ours.state.global_step


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Tied weights and Conv1D; a router loss, which counts once per micro-batch in transformers."""
    ours, theirs = both(MODELS[family](), tmp_path, weight_decay=0.1, max_grad_norm=0.5)
    assert_same_run(ours, theirs)


def test_weights_cross_the_link_twice_per_step_whatever_the_window(tmp_path: Path) -> None:
    """No block stays on the device: each goes there once for the forward and once for the backward of a step."""
    loads = {}
    for window in (1, 5):
        made = trainer(HeadraceTrainer, llama(4), tmp_path, gradient_accumulation_steps=window, max_steps=3)
        made.train()
        loads[window] = logged(made, "link_bytes_to_device")
        spec, placement = made.session.spec, made.session.placement
        streamed = sum(u.weights.nbytes for u in spec.units if placement.weights[u.index] == "host")
        rest = sum(u.weights.nbytes for u in spec.units if u.kind == "rest")
        assert all(streamed < load <= 2 * streamed + rest + 4096 for load in loads[window]), (loads, streamed)
        close(made)
    assert loads[5] == pytest.approx(loads[1], rel=0.01)


def test_a_router_loss_is_in_the_loss(tmp_path: Path) -> None:
    """Without it the comparison of Mixtral would prove little."""
    with_it = trainer(HeadraceTrainer, MODELS["mixtral"](), tmp_path / "a", max_steps=1)
    without = trainer(HeadraceTrainer, MODELS["mixtral"](), tmp_path / "b", max_steps=1)
    without.model.router_aux_loss_coef = 0.0
    with_it.train()
    without.train()
    assert logged(with_it, "loss")[0] > logged(without, "loss")[0] + 0.5


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    """The groups are those of transformers: with a rate and no gradient to speak of, only matrices shrink."""
    made = trainer(HeadraceTrainer, MODELS["gpt2"](), tmp_path, weight_decay=0.5, max_steps=1)
    made.session
    decays = [group["weight_decay"] for group in made.optimizer.param_groups]
    assert decays == [0.5, 0.0]
    plain = {id(p) for p in made.optimizer.param_groups[1]["params"]}
    assert all((id(p) in plain) == (p.dim() == 1) for p in made.model.parameters())


def mean_of_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].float()
    loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum")
    return 2 * loss / num_items_in_batch


class Gradients(transformers.TrainerCallback):
    """Keeps those of each step, and doubles one of the second."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        named = dict(objects["model"].named_parameters())
        self.seen.append({name: p.grad.clone() for name, p in named.items()})
        if state.global_step == 1:
            named["lm_head.weight"].grad = 2 * named["lm_head.weight"].grad


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_callbacks_see_and_change_gradients(clip: float, tmp_path: Path) -> None:
    """Where the plain Trainer has clipped, they come before the clipping, which is told."""
    seen, made = [], []
    for cls in (transformers.Trainer, HeadraceTrainer):
        callback = Gradients()
        each = trainer(cls, llama(2), tmp_path, parts={"callbacks": [callback]}, max_grad_norm=clip, max_steps=4)
        each.train()
        seen.append(callback.seen)
        made.append(each)
    theirs, ours = made
    told = [str(event) for event in ours.session.events if event.kind == "clipping"]
    if clip == 0.0:
        assert_same_logs(ours, theirs, ("loss", "learning_rate"))  # the norm is taken later, of what was changed
        assert_close(weights(ours.model), weights(theirs.model), 1e-6)
        assert not told
    else:
        text = "Gradients.on_pre_optimizer_step comes before the clipping"
        assert len(told) == 1 and text in told[0]
        scale = clip / (logged(theirs, "grad_norm")[0] + 1e-6)
        seen[1] = [{name: scale * grad for name, grad in seen[1][0].items()}]
    for step, gradients in enumerate(seen[1]):
        assert_close(gradients, seen[0][step], 1e-5)


def test_compute_loss_func(tmp_path: Path) -> None:
    """The user's function gets logits and the window's count of labels."""
    ours, theirs = both(llama(3), tmp_path, parts={"compute_loss_func": mean_of_logits})
    assert_same_run(ours, theirs)


class OwnLoss:
    """compute_loss of the user's own: a mean over the micro-batch, which the Trainer divides by the window."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **counts: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return (loss, outputs) if return_outputs else loss


def test_compute_loss_of_a_subclass(tmp_path: Path) -> None:
    """Report 26: a loss that ignores the window's count is divided by the number of micro-batches, once."""
    import transformers

    theirs = trainer(type("Plain", (OwnLoss, transformers.Trainer), {}), llama(3), tmp_path / "a")
    ours = trainer(type("Ours", (OwnLoss, HeadraceTrainer), {}), llama(3), tmp_path / "b")
    for made in (theirs, ours):
        made.model_accepts_loss_kwargs = False
        made.train()
    assert_same_run(ours, theirs)


def test_the_logged_loss_is_the_trained_one(tmp_path: Path) -> None:
    """Report 33: with a rate of zero the loss of a window is the mean over its labels, and so is the evaluation's."""
    data = rows(6)
    made = trainer(HeadraceTrainer, llama(3), tmp_path, learning_rate=0.0, max_steps=1, per_device_eval_batch_size=6,
                   parts={"train_dataset": data, "eval_dataset": data})  # fmt: skip
    made.train()
    model, total, count = llama(3), 0.0, 0
    with torch.no_grad():
        for row in data:
            labels = row["labels"][None]
            here = int((labels[:, 1:] != -100).sum())
            total += float(model(input_ids=row["input_ids"][None], labels=labels).loss) * here if here else 0.0
            count += here
    assert logged(made, "loss")[0] == pytest.approx(total / count, rel=1e-5)
    assert made.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_bf16_autocast(tmp_path: Path) -> None:
    """An fp32 model under bf16 autocast: no further from fp32 than the plain Trainer is; its weights stay fp32."""
    ours, theirs = both(llama(3), tmp_path, bf16=True, max_steps=4)
    exact = trainer(HeadraceTrainer, llama(3), tmp_path / "fp32", max_steps=4)
    exact.train()
    assert ours.session.options.autocast == "bfloat16"
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-3)
    mine, plain, full = weights(ours.model), weights(theirs.model), weights(exact.model)
    assert all(value.dtype == torch.float32 for value in mine.values())
    start = llama(3).state_dict()
    for name in full:
        moved = float((full[name] - start[name]).norm())
        assert float((mine[name] - full[name]).norm()) <= 2 * float((plain[name] - full[name]).norm()) + 1e-3 * moved
    with torch.no_grad():  # outside the Trainer, too, the model runs as it was trained
        logits = ours.model(input_ids=rows(1)[0]["input_ids"][None]).logits
    assert logits.dtype == torch.float32


def test_a_bf16_model_stays_as_it_is(tmp_path: Path) -> None:
    """Weights and gradients in bf16, masters in fp32: closer to the fp32 run than the plain Trainer, which rounds
    every update."""
    ours, theirs = both(llama(3, torch.bfloat16), tmp_path, learning_rate=3e-4)
    exact = trainer(HeadraceTrainer, llama(3, torch.bfloat16).float(), tmp_path / "fp32", learning_rate=3e-4)
    exact.train()
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=5e-3)
    mine, plain, full = (weights(made.model) for made in (ours, theirs, exact))
    assert all(value.dtype == torch.bfloat16 for value in mine.values())
    names = [name for name, _ in ours.model.named_parameters()]
    off = max(distance(ours.session.read_weight(name, master=True), full[name]) for name in names)
    assert off < min(3e-3, max(distance(plain[name], full[name]) for name in names))


def test_early_updates(tmp_path: Path) -> None:
    """Without clipping, and told to stop at an infinite gradient, blocks are updated inside the backward."""
    ours, theirs = both(llama(3), tmp_path, max_grad_norm=0.0, options={"on_nonfinite": "stop"})
    assert ours.session.options.updates_at_once
    assert_same_run(ours, theirs)


def test_guessed_updates(tmp_path: Path) -> None:
    """The window is declared, so where nothing is clipped the last blocks are updated inside the backward, too."""
    ours, theirs = both(llama(4), tmp_path, max_grad_norm=1e6)
    assert_same_run(ours, theirs)
    told = [str(event) for event in ours.session.events if event.kind == "guesses"]
    assert len(told) == 1 and "updates of 1 of 4 blocks begin in the backward" in told[0]


def test_a_custom_module(tmp_path: Path) -> None:
    """A module that is none of transformers' own, whose loss is a mean that ignores the window."""
    from against_plain import Toy

    class WithLoss(Toy):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            logits = super().forward(input_ids)
            if labels is None:
                return (logits,)
            shifted = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), labels[:, 1:].reshape(-1))
            return (shifted, logits)

    def of_toy(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        made = collate(batch)
        return {"input_ids": made["input_ids"] % 37, "labels": made["labels"].remainder(37)}

    torch.manual_seed(0)
    ours, theirs = both(WithLoss(), tmp_path, parts={"data_collator": of_toy}, optim="sgd", learning_rate=0.1)
    assert_same_run(ours, theirs)


def test_dropout_with_one_micro_batch(tmp_path: Path) -> None:
    """The random numbers are drawn in the plain order when each step is one micro-batch."""
    noisy = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    model = MODELS["gpt2"](**noisy)  # type: ignore[call-arg]
    ours, theirs = both(model, tmp_path, gradient_accumulation_steps=1, max_steps=5)
    assert_same_run(ours, theirs)


def test_a_model_whose_weights_are_not_read_yet(tmp_path: Path) -> None:
    """headrace.load_model leaves the weights in their files until the Trainer needs them."""
    import transformers

    import headrace

    llama(3).save_pretrained(tmp_path / "model")
    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "plain")
    theirs.train()
    loaded = headrace.load_model(tmp_path / "model", dtype="float32")
    ours = trainer(HeadraceTrainer, loaded, tmp_path / "ours")
    ours.train()
    assert_same_run(ours, theirs)


def test_model_init(tmp_path: Path) -> None:
    """Each call of train() builds its model anew; the session of the one before is closed first."""
    import transformers

    given = {"parts": {"model_init": lambda: llama(3)}, "max_steps": 3}
    theirs = trainer(transformers.Trainer, None, tmp_path / "a", **given)
    ours = trainer(HeadraceTrainer, None, tmp_path / "b", **given)
    theirs.train()
    ours.train()
    first = ours.session
    ours.train()
    assert first.closed and not ours.session.closed
    assert_same_run(ours, theirs)


def test_a_second_call_of_train_goes_on(tmp_path: Path) -> None:
    """The optimizer keeps its moments, as in the plain Trainer."""
    import transformers

    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "a", max_steps=3)
    ours = trainer(HeadraceTrainer, llama(3), tmp_path / "b", max_steps=3)
    for made in (theirs, ours):
        made.train()
        made.train()
    assert_same_run(ours, theirs)
    assert ours.session.steps == 6


def test_the_users_own_optimizer_and_schedule(tmp_path: Path) -> None:
    """torch.optim.Adam, for which `optim` has no name, and a scheduler made before the model was wrapped."""
    import transformers

    runs = []
    for cls in (transformers.Trainer, HeadraceTrainer):
        model = llama(3)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        given = {"model": model, "optimizers": (optimizer, schedule)}
        runs.append(trainer(cls, None, tmp_path / cls.__name__, parts=given))
        runs[-1].train()
    assert_same_run(runs[1], runs[0])


def test_a_wrapped_model(tmp_path: Path) -> None:
    """A model that the user wrapped is taken with its optimizer, when the session does what the arguments say."""
    import transformers

    import headrace

    theirs = trainer(transformers.Trainer, llama(3), tmp_path / "a", max_grad_norm=0.5, weight_decay=0.01)
    theirs.train()
    model = llama(3)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.01 * matrix}
              for matrix in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    model, optimizer = headrace.wrap(model, optimizer, device="cpu", max_grad_norm=0.5, placement={"weights": "host"})
    given = arguments(tmp_path / "b", max_grad_norm=0.5)
    ours = HeadraceTrainer(model, given, train_dataset=rows(), data_collator=collate, optimizers=(optimizer, None))
    ours.train()
    assert_same_run(ours, theirs)
    assert ours.optimizer is optimizer


def test_log_fields(tmp_path: Path) -> None:
    """What a step took is logged beside its loss, in bytes since the line before and bytes at the peak."""
    made = trainer(HeadraceTrainer, llama(3), tmp_path, max_steps=2, options={"disk_dir": tmp_path / "disk",
                   "placement": {"weights": "disk", "state": "disk"}})  # fmt: skip
    made.train()
    report = made.session.memory_report()
    for name, total in (("link_bytes_to_device", report["link"]["to_device"]),
                        ("disk_bytes_written", report["disk"]["written"])):  # fmt: skip
        values = logged(made, name)
        assert len(values) == 2 and 0 < sum(values) <= total
    assert logged(made, "device_peak_bytes")[-1] == report["device"]["peak"]
    assert all(value > 1 << 20 for value in logged(made, "host_peak_bytes"))
    assert all(value > 0 for value in logged(made, "tokens_per_second"))


def test_where_weights_live_is_among_what_the_trainer_says(tmp_path: Path) -> None:
    """With log_level="info", once for each Trainer, through transformers' own logger."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    root, verbosity = logging.getLogger("transformers"), transformers.utils.logging.get_verbosity()
    root.addHandler(handler)
    try:
        made = trainer(HeadraceTrainer, llama(2), tmp_path, max_steps=2, log_level="info")
        made.train()
        made.evaluate(rows(2))
        shown = [text for text in said if text.startswith("[placement]")]
        assert shown == [str(event) for event in made.session.events if event.kind == "placement"]
        assert len(shown) == 1 and "2 blocks" in shown[0] and "host" in shown[0]
        said.clear()
        trainer(HeadraceTrainer, llama(2), tmp_path, max_steps=1, log_level="warning").train()
        assert not any("[placement]" in text for text in said)
    finally:
        root.removeHandler(handler)
        transformers.utils.logging.set_verbosity(verbosity)
