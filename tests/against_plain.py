"""Tiny models of the tests' own, streamed, and what plain PyTorch makes of the same model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import headrace

VOCABULARY = 257


def llama(layers: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Llama of odd sizes, every tensor with values of its own."""
    import transformers

    values = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "num_hidden_layers": layers,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**values, **changes}))
    return own_values(model).to(dtype).train()


def gpt2(layers: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A GPT-2 of odd sizes that drops out in every block; tied, every tensor with values of its own."""
    import transformers

    values = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": layers, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    return own_values(transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**values, **changes}))).to(dtype).train()


def own_values(model: Any) -> Any:
    """Norms of ones and biases of zeros would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


class Block(nn.Module):
    """A residual block: two matrices, a gain and a bias, with sizes that no kernel likes."""

    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.gain = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x * self.gain))))


class Toy(nn.Module):
    """Embedding, blocks, norm, head. `tied`: the head's weight is the embedding's."""

    def __init__(
        self, blocks: list[nn.Module] | None = None, width: int = 20, vocabulary: int = 37, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block(width, 27) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def toy(**options: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(**options)


def batch(rows: int = 3, length: int = 7, seed: int = 0, vocabulary: int = 37) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def toy_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def hf_loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def sgd(model: nn.Module, lr: float = 0.5, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def adamw(model: nn.Module, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    """eps is large: a tiny one turns the rounding of a gradient near zero into a step of full size."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-3, **options)


@contextmanager
def streamed(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] = sgd, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A streamed copy of `model` and its optimizer, with freed memory reading NaN; closed at the end. Unless options
    say otherwise, weights and state live on the host ("auto" would put all on a device without limit)."""
    own = copy.deepcopy(model)
    placement = options.pop("placement", {})
    if isinstance(placement, dict):
        placement = {"weights": "host", "state": "host", **placement}
    defaults = {"device": "cpu", "window": 1, "debug": True}
    wrapped, driver = headrace.wrap(own, optimizer(own), placement=placement, **{**defaults, **options})
    try:
        yield wrapped, driver
    finally:
        if getattr(wrapped, "_headrace_session", None) is not None:  # not unwrapped inside
            headrace.session(wrapped).close()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """fp32 gradients by name, on the CPU: of a plain model, or of a streamed one between backward and step."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if getattr(model, "_headrace_session", None) is None:
        return {name: (torch.zeros_like(p) if p.grad is None else p.grad).float().cpu().clone() for name, p in trained}
    session = headrace.session(model)
    return {name: session.gradient(name) for name, _ in trained}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def distance(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Relative L2 distance; `floor`: a norm below which it is not taken as relative."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float((ours - theirs).norm()) / max(float(theirs.norm()), floor, 1e-30)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Tensor by tensor within `tolerance` relative L2, with a floor of 1e-7 of the norm of all."""
    assert ours.keys() == theirs.keys()
    whole = sum(float(value.double().square().sum()) for value in theirs.values()) ** 0.5
    off = {
        name: distance(ours[name], theirs[name], 1e-2 * whole) for name in theirs if theirs[name].is_floating_point()
    }
    bad = {name: value for name, value in off.items() if not value <= tolerance}
    assert not bad, f"{len(bad)} of {len(off)} tensors differ: {dict(list(bad.items())[:5])}"
    for name, value in theirs.items():
        if not value.is_floating_point():
            assert torch.equal(ours[name], value), name


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    bad = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not bad, f"{len(bad)} of {len(theirs)} tensors differ: {bad[:5]}"


def trains_alike(
    model: nn.Module, device: str, loss: Callable[[nn.Module, Tensor], Tensor] = toy_loss, **options: Any
) -> list[Any]:
    """Three steps, gradients and weights each time. Returns the events."""
    plain = copy.deepcopy(model).to(device)
    optimizer = sgd(plain)
    with streamed(model, device=device, **options) as (ours, driver):
        for step in range(3):
            for side in (plain, ours):
                torch.manual_seed(step)
                loss(side, batch(seed=step).to(device)).backward()
            assert_close(gradients(ours), gradients(plain))
            optimizer.step(), driver.step()
            optimizer.zero_grad(), driver.zero_grad()
            assert_close(weights(ours), weights(plain))
        return list(headrace.session(ours).events)
