"""Model code that once lost gradients or values without a word: what blocks pass on, subclasses, views, buffers."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import Block, Toy, assert_close, batch, gradients, sgd, streamed, toy_loss
from headrace.base.errors import ModelError, OptionError, StepError


def model_of(*blocks: nn.Module, kind: type[Toy] = Toy, **options: Any) -> Toy:
    torch.manual_seed(0)
    model = kind(list(blocks) or None, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model


def check(model: nn.Module, ids: Tensor | None = None, steps: int = 2, **options: Any) -> list[str]:
    """Loss and gradients of a few steps are those of plain PyTorch. Returns the events."""
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = batch() if ids is None else ids
    with streamed(model, **options) as (ours, optimizer):
        for step in range(steps):
            losses = []
            for candidate in (plain, ours):
                torch.manual_seed(step)
                losses.append(toy_loss(candidate, ids))
                losses[-1].backward()
            torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-5, atol=1e-6)
            assert_close(gradients(ours), gradients(plain))
            for driver in (theirs, optimizer):
                driver.step()
                driver.zero_grad()
        return [str(event) for event in headrace.session(ours).events]


@dataclasses.dataclass
class Carried:
    x: Tensor
    visits: int = 0
    seen: list[Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Passing(Block):
    def __init__(self) -> None:
        super().__init__(20, 27)

    def forward(self, carried: Any) -> Any:
        if isinstance(carried, Carried):  # writes into what it was given, too
            carried.visits += 1
            carried.seen.append(carried.x * 0.5)
            return dataclasses.replace(carried, x=super().forward(carried.x))
        return type(carried)(super().forward(carried.x))


class PassingToy(Toy):
    carrier: Any = Carried

    def forward(self, ids: Tensor) -> Tensor:
        carried = first = self.carrier(self.embed(ids))
        for block in self.blocks:
            carried = block(carried)
        extra = sum(part.mean() for part in carried.seen) if isinstance(carried, Carried) else 0
        if isinstance(first, Carried):
            assert (first.visits, carried.visits, len(carried.seen)) == (1, 3, 3)
        logits: Tensor = self.head(self.norm(carried.x)) * (1 + extra)
        return logits


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("carrier", [Carried, Frozen])
def test_dataclasses_pass_between_blocks(carrier: Any, activations: str) -> None:
    model = model_of(*(Passing() for _ in range(3)), kind=PassingToy)
    model.carrier = carrier
    check(model, activations=activations)


def test_what_torch_max_returns_passes_between_blocks() -> None:
    class Best(Block):
        def forward(self, x: Any) -> Any:
            found = super().forward(x)
            return torch.max(torch.stack([found, found.neg()]), 0)

    class BestToy(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x).values
            logits: Tensor = self.head(self.norm(x))
            return logits

    check(model_of(*(Best(20, 27) for _ in range(3)), kind=BestToy))


def test_tensors_in_an_unknown_class_are_refused() -> None:
    model = model_of(*(Passing() for _ in range(3)), kind=PassingToy)
    model.carrier = Opaque
    with streamed(model) as (ours, _), pytest.raises(ModelError, match="inside a Opaque"):
        toy_loss(ours, batch())

    class Returning(Block):
        def forward(self, x: Tensor) -> Any:
            return Opaque(super().forward(x))

    class ReturningToy(Toy):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x).x
            return x

    model = model_of(*(Returning(20, 27) for _ in range(3)), kind=ReturningToy)
    model.embed.requires_grad_(False)
    with streamed(model) as (ours, _), pytest.raises(ModelError, match="inside a Opaque"):
        ours(batch())


class Masked(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (ids != 7).unsqueeze(-1)


class Scaled(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Dropped(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5, self.training)


class Chosen(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1 + 0 * random.random())


class Normed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / self.weight.norm()


class Counting(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(ids) * self.calls


class Fixed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[-1] > 0
        return torch.tanh(super().forward(ids)) * 1.5


@pytest.mark.parametrize("kind", [Masked, Scaled, Dropped, Chosen, Normed, Counting, Fixed])
def test_embedding_subclasses(kind: type[nn.Embedding]) -> None:
    """Those that do more than look rows up stay whole, and say so; the others stream."""
    model = model_of()
    values = model.embed.weight.detach().clone()
    model.embed = kind(37, 20)
    with torch.no_grad():
        model.embed.weight.copy_(values)
    events = check(model.train(), batch(vocabulary=9))
    assert any("embed stays on the device" in event for event in events) == (kind is not Fixed)


@pytest.mark.parametrize("name", ["head", "embed"])
def test_a_forward_replaced_on_the_instance_is_the_one_that_runs(name: str) -> None:
    model = model_of()
    module = model.get_submodule(name)

    class Half:  # bound to the module of its own copy
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __call__(self, x: Tensor) -> Tensor:
            return torch.tanh(type(self.module).forward(self.module, x)) * 0.5

    module.forward = Half(module)
    events = check(model)
    assert any(f"{name} stays on the device" in event for event in events)


def write_through(p: Any) -> list[Any]:
    """Every way to write a part of a weight, each into other elements (or over all of them)."""
    two, ones = torch.full_like(p, 2.0), torch.ones_like(p)
    return [
        lambda: p[0].zero_(),
        lambda: p[1].__setitem__(3, 5.0),
        lambda: p.view(-1)[-4:].fill_(7.0),
        lambda: p.t()[2].copy_(torch.arange(float(p.shape[0]))),
        lambda: nn.init.zeros_(p[2:4]),
        lambda: nn.init.constant_(tensor=p[4:5], val=9.0),
        lambda: nn.init.normal_(p.data[5:6], generator=torch.Generator().manual_seed(0)),
        lambda: p.chunk(2)[1].mul_(3.0),
        lambda: p.unbind(0)[6].add_(1.0),
        lambda: p.narrow(0, 7, 1).data.neg_(),
        lambda: torch.Tensor.view(p, -1)[:5].sub_(0.5),
        lambda: torch._foreach_mul_([p[0], p[1]], 0.5),
        lambda: torch.add(p[8], 1.0, out=p[9]),
        lambda: torch.mul(ones, 3.0, out=p.data),
        lambda: torch.mul(two, two, out=p),
        lambda: torch.mul(p, 2.0, out=two),
        lambda: nn.init.normal_(p, generator=torch.Generator().manual_seed(1)),
        lambda: p.detach()[3:5].div_(4.0),
        lambda: p.data.requires_grad_(False),
    ]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_writes_through_views_reach_the_weight(place: str, tmp_path: Any) -> None:
    plain = model_of()
    with streamed(plain, placement={"weights": place}, disk_dir=tmp_path) as (ours, _), torch.no_grad():
        for name in ("blocks.1.up.weight", "embed.weight", "head.weight"):
            theirs, mine = plain.get_parameter(name), ours.get_parameter(name)
            for number, (one, two) in enumerate(zip(write_through(theirs), write_through(mine), strict=True)):
                one(), two()
                assert torch.equal(mine, theirs), f"{name}, write {number}"
        for frozen in (plain.get_parameter("blocks.2.gain"), ours.get_parameter("blocks.2.gain")):
            frozen.requires_grad_(False)
            with torch.enable_grad():
                frozen[3:].mul_(2.0)
        assert torch.equal(ours.get_parameter("blocks.2.gain"), plain.get_parameter("blocks.2.gain"))
        assert torch.equal(ours(batch()), plain(batch()))


def test_what_was_read_from_a_gradient_is_read_only() -> None:
    plain = model_of()
    ids = batch()
    with streamed(plain) as (ours, _):
        toy_loss(plain, ids).backward()
        toy_loss(ours, ids).backward()
        for name in ("blocks.1.up.weight", "head.weight", "norm.weight"):
            held, value = ours.get_parameter(name).grad, plain.get_parameter(name).grad
            assert held is not None and value is not None
            writes: list[Any] = [
                lambda g: g.mul_(0), lambda g: g.data.mul_(0), lambda g: g.detach().zero_(), lambda g: g[0:].mul_(0),
                lambda g: g.view(-1)[0].fill_(1), lambda g: g.chunk(2)[0].add_(1), lambda g: g.__setitem__(0, 1.0),
                lambda g: torch.mul(g, 2, out=g), lambda g: torch._foreach_mul_([g], 0.0),
                lambda g: g.mT.data.neg_() if g.dim() == 2 else g.neg_(), lambda g: nn.init.zeros_(g),
                lambda g: g.float().clamp_(0, 0), lambda g: setattr(g, "data", g * 0),
                lambda g: setattr(g.data, "data", g * 0),
                lambda g: torch.nn.utils.clip_grad_value_(ours.parameters(), 1e-9),
            ]  # fmt: skip
            for number, write in enumerate(writes):
                with torch.no_grad(), pytest.raises(StepError, match="cannot be changed"):
                    write(held)
                torch.testing.assert_close(held.clone(), value, rtol=1e-4, atol=1e-6, msg=f"{name}, write {number}")
            total = torch.zeros_like(value)
            total.add_(held).add_(held.data[:])  # reading it into another tensor is no write
            own = held.data.clone().mul_(0.5)
            out = torch.mul(held, 2.0, out=torch.empty_like(value))
            for read in (total * 0.5, own * 2, out * 0.5, copy.deepcopy(held.data), held.detach().tolist()):
                torch.testing.assert_close(torch.as_tensor(read), value, rtol=1e-4, atol=1e-6)
                assert type(read) in (Tensor, list)


class Assigning(Block):
    """Gives its buffer a new tensor, `times` times in one forward."""

    def __init__(self, times: int) -> None:
        super().__init__(20, 27)
        self.times = times
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            self.count = self.count + 1
        return super().forward(x) * self.count


@pytest.mark.parametrize("times", [1, 2, 3])
def test_buffers_that_are_assigned_several_times_are_updated_once(times: int) -> None:
    plain = model_of(*(Assigning(times) for _ in range(3)))
    ids = batch()
    with streamed(plain) as (ours, _):
        for _ in range(2):
            toy_loss(plain, ids).backward()
            toy_loss(ours, ids).backward()
        assert_close(gradients(ours), gradients(plain))
        for name, buffer in plain.named_buffers():
            assert torch.equal(ours.get_buffer(name), buffer), name


class Balanced(Block):
    """Returns a loss of its own beside the hidden states: nearly the same whichever rows it is taken over."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(20, 27)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        mean = 1 + 1e-5 * torch.tanh(found.mean((0, 1)))
        return found, mean.mean().reshape(self.shape) if self.shape != (20,) else mean


class BalancedToy(Toy):
    def forward(self, ids: Tensor) -> Tensor:
        x, extra = self.embed(ids), 0
        for block in self.blocks:
            x, own = block(x)
            extra = extra + own.sum()
        logits: Tensor = self.head(self.norm(x)) * (1e5 * (extra - extra.detach()) + 1)
        return logits


@pytest.mark.parametrize("shape", [(), (1,), (20,)])
def test_outputs_that_rows_share_only_nearly_run_whole(shape: tuple[int, ...]) -> None:
    model = model_of(*(Balanced(shape) for _ in range(3)), kind=BalancedToy)
    events = check(model, rows=1)
    assert any("Balanced runs whole" in event for event in events)


def test_blocks_inside_each_other_are_refused() -> None:
    model = model_of()
    inner = [model.blocks[0], model.blocks[0].up, model.blocks[1]]
    for blocks in (inner, inner[::-1]):
        with pytest.raises(OptionError, match=r"blocks\.0\.up is part of blocks\.0"):
            headrace.wrap(model, sgd(model), device="cpu", blocks=blocks)
    check(model, blocks=None)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
@pytest.mark.parametrize("place", ["norm", "blocks.1"])
def test_frozen_weights_of_other_formats_are_refused(dtype: torch.dtype, place: str) -> None:
    model = model_of()
    model.get_submodule(place).odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    with pytest.raises(ModelError, match=f"{place}.odd is {str(dtype)[6:]}"):
        headrace.wrap(model, sgd(model), device="cpu")
