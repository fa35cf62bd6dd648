"""Windows of micro-batches in lockstep: equal to plain accumulation, and safe whatever the user's function does."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import (
    Block,
    Toy,
    adamw,
    assert_close,
    assert_equal,
    batch,
    gradients,
    hf_loss,
    llama,
    sgd,
    streamed,
    toy,
    toy_loss,
    weights,
)
from headrace.base.errors import StepError
from headrace.executor.window import Window, accumulate


def ragged(count: int, vocabulary: int = 37) -> list[Tensor]:
    """Micro-batches of different rows and lengths."""
    return [batch(1 + n % 3, 4 + (3 * n) % 7, seed=n, vocabulary=vocabulary) for n in range(count)]


def plain_gradients(model: nn.Module, batches: list[Tensor], loss: Any = toy_loss) -> dict[str, Tensor]:
    reference = copy.deepcopy(model)
    for ids in batches:
        (loss(reference, ids) / len(batches)).backward()
    return gradients(reference)


@pytest.fixture
def threads() -> Iterator[None]:
    """No thread of a window survives it."""
    yield
    assert not [thread for thread in threading.enumerate() if "micro-batch" in thread.name]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_window_equals_plain_accumulation(count: int, overlap: bool, tied: bool) -> None:
    model, batches = toy(tied=tied), ragged(count)
    expected = plain_gradients(model, batches)
    with streamed(model, overlap=overlap, window=2) as (ours, optimizer):
        for _ in range(2):
            loss = accumulate(lambda ids: toy_loss(ours, ids) / count, batches)
            loss.backward()
            assert_close(gradients(ours), expected)
            optimizer.zero_grad()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("weights_on, state_on", [("host", "host"), ("disk", "disk"), ("device", "device")])
def test_several_steps_of_windows(tmp_path: Any, weights_on: str, state_on: str) -> None:
    model = llama(3, tie_word_embeddings=True)
    reference = copy.deepcopy(model)
    plain = adamw(reference, foreach=False)
    options: dict[str, Any] = {"placement": {"weights": weights_on, "state": state_on}, "disk_dir": tmp_path}
    with streamed(model, adamw, window=2, max_grad_norm=0.5, **options) as (ours, optimizer):
        for step in range(3):
            batches = [ids.roll(step) for ids in ragged(3, 257)]
            for ids in batches:
                (hf_loss(reference, ids) / 3).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step(), plain.zero_grad()
            loss = accumulate(lambda ids: hf_loss(ours, ids) / 3, batches)
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            assert optimizer.last_grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert_close(weights(ours), weights(reference))


@pytest.mark.usefixtures("threads")
def test_weights_pass_once_whatever_the_number_of_micro_batches() -> None:
    """The design's promise: accumulation in a window costs no traffic."""
    traffic = []
    for count in (1, 8):
        with streamed(toy(), window=1) as (ours, optimizer):
            for _ in range(2):
                accumulate(lambda ids: toy_loss(ours, ids), ragged(count)).backward()
                optimizer.step(), optimizer.zero_grad()
            headrace.session(ours).wait()
            traffic.append(headrace.memory_report(ours)["link"])
    assert traffic[0] == traffic[1] and traffic[0]["to_device"] > 0


@pytest.mark.usefixtures("threads")
def test_declared_accumulation_counts_micro_batches_of_a_window() -> None:
    model = toy()
    reference = copy.deepcopy(model)
    plain = sgd(reference)
    with streamed(model, accumulation=3, on_nonfinite="stop") as (ours, optimizer):
        for _ in range(2):
            for name, gradient in plain_gradients(reference, ragged(3)).items():
                reference.get_parameter(name).grad = gradient
            plain.step()
            accumulate(lambda ids: toy_loss(ours, ids) / 3, ragged(3)).backward()
            optimizer.step(), optimizer.zero_grad()
        assert_close(weights(ours), weights(reference))


class Boom(Exception):
    pass


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_in_one_micro_batch_ends_all_and_the_model_goes_on(number: int, when: str, overlap: bool) -> None:
    model, batches = toy(), ragged(4)
    expected = plain_gradients(model, batches)
    with streamed(model, overlap=overlap, window=2) as (ours, optimizer):

        def failing(pair: tuple[int, Tensor]) -> Tensor:
            own, ids = pair
            if own == number and when == "before":
                raise Boom
            if own == number and when == "inside":
                loss = toy_loss(ours, ids[:, :1].new_full((1, 3), 99))  # beyond the embedding
            loss = toy_loss(ours, ids)
            if own == number and when == "after":
                raise Boom
            return loss

        with pytest.raises(headrace.DataError if when == "inside" else Boom):
            accumulate(failing, list(enumerate(batches)))
        optimizer.zero_grad()
        accumulate(lambda ids: toy_loss(ours, ids) / 4, batches).backward()
        assert_close(gradients(ours), expected)


class Exploding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.armed = inner, False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and x.shape[1] == 7:
            raise Boom
        result: Tensor = self.inner(x)
        return result


@pytest.mark.usefixtures("threads")
def test_an_exception_inside_a_joint_visit() -> None:
    model = toy(blocks=[Block(20, 27), Exploding(Block(20, 27)), Block(20, 27)])
    batches = ragged(4)
    expected = plain_gradients(model, batches)
    assert any(ids.shape[1] == 7 for ids in batches)
    with streamed(model, window=2) as (ours, _):
        ours.blocks[1].armed = True
        with pytest.raises(Boom):
            accumulate(lambda ids: toy_loss(ours, ids), batches)
        ours.blocks[1].armed = False
        accumulate(lambda ids: toy_loss(ours, ids) / 4, batches).backward()
        assert_close(gradients(ours), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("result", [None, 1.5, "loss"])
def test_a_function_that_returns_no_tensor_is_told_so(count: int, result: object) -> None:
    def wrong(ids: Tensor) -> Any:
        toy_loss(ours, ids)
        return result

    with streamed(toy()) as (ours, _):
        with pytest.raises(StepError, match="fn returned no tensor"):
            accumulate(wrong, ragged(count))
        accumulate(lambda ids: toy_loss(ours, ids), ragged(2)).backward()


class Skipping(Toy):
    """Short micro-batches leave block 1 out; very short ones run block 2 twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number != 1 or ids.shape[1] > 5:
                x = block(x)
            if number == 2 and ids.shape[1] < 5:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [1, 3])
def test_micro_batches_that_go_different_ways(window: int) -> None:
    torch.manual_seed(0)
    model, batches = Skipping(), ragged(5)
    assert {ids.shape[1] > 5 for ids in batches} == {True, False} and min(ids.shape[1] for ids in batches) < 5
    expected = plain_gradients(model, batches)
    with streamed(model, window=window) as (ours, optimizer):
        for _ in range(2):
            accumulate(lambda ids: toy_loss(ours, ids) / 5, batches).backward()
            assert_close(gradients(ours), expected)
            optimizer.zero_grad()


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 3])
def test_threads_have_the_callers_surroundings(count: int) -> None:
    """Grad mode, autocast and context variables are thread-local in torch and Python."""
    seen: list[tuple[Any, ...]] = []

    def look(_: Tensor) -> Tensor:
        seen.append(
            (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), VARIABLE.get(),
             torch.is_autocast_cache_enabled())
        )  # fmt: skip
        VARIABLE.set("changed inside")
        return torch.zeros((), requires_grad=True)

    token = VARIABLE.set("mine")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        accumulate(look, ragged(count))
    with torch.no_grad():
        accumulate(look, ragged(count))
    assert seen[0] == (True, True, torch.bfloat16, "mine", False)
    assert seen[count][:2] == (False, False)
    if count > 1:
        assert len(set(seen[:count])) == 1 and VARIABLE.get() == "mine"
    VARIABLE.reset(token)


@pytest.mark.usefixtures("threads")
def test_a_window_under_autocast_equals_plain() -> None:
    model, batches = toy(), ragged(3)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [toy_loss(reference, ids) / 3 for ids in batches]
    sum(losses[1:], losses[0]).backward()
    with streamed(model) as (ours, _):
        with torch.autocast("cpu", torch.bfloat16):
            loss = accumulate(lambda ids: toy_loss(ours, ids) / 3, batches)
        loss.backward()
        assert loss.item() == pytest.approx(sum(losses[1:], losses[0]).item(), rel=1e-6)
        assert_close(gradients(ours), gradients(reference), 2e-2)  # bf16 gradients, summed in another order


@pytest.mark.usefixtures("threads")
def test_a_window_without_gradients_evaluates() -> None:
    model, batches = toy(), ragged(3)
    with torch.no_grad():
        expected = sum(float(toy_loss(model, ids)) for ids in batches)
        with streamed(model) as (ours, _):
            assert float(accumulate(lambda ids: toy_loss(ours, ids), batches)) == pytest.approx(expected, rel=1e-5)
            assert not headrace.session(ours)._stream.held


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("outer", [1, 2])
def test_windows_do_not_nest(outer: int) -> None:
    with streamed(toy()) as (ours, _):

        def nested(ids: Tensor) -> Tensor:
            return accumulate(lambda part: toy_loss(ours, part), [ids, ids])

        with pytest.raises(StepError, match="inside accumulate"):
            accumulate(nested, ragged(outer))
        accumulate(lambda ids: toy_loss(ours, ids), ragged(2)).backward()


@pytest.mark.usefixtures("threads")
def test_micro_batches_come_from_anything_that_can_be_iterated() -> None:
    model = toy()
    expected = plain_gradients(model, ragged(3))
    with streamed(model) as (ours, _):
        accumulate(lambda ids: toy_loss(ours, ids) / 3, (ids for ids in ragged(3))).backward()
        assert_close(gradients(ours), expected)
    with pytest.raises(StepError, match="no micro-batch"):
        accumulate(lambda ids: ids.sum(), [])


@pytest.mark.usefixtures("threads")
def test_the_order_of_random_numbers() -> None:
    """Code outside of blocks runs micro-batch by micro-batch up to each block, and blocks for all in turn: so masks are
    others than in a plain loop, but the same in each run, and the backward's are those of the forward."""
    order: list[tuple[str, int]] = []

    class Noting(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.inner = name, Block(20, 27, dropout=0.3)

        def forward(self, x: Tensor) -> Tensor:
            order.append((self.name, x.shape[1]))
            result: Tensor = self.inner(x)
            return result

        def __deepcopy__(self, memo: Any) -> Noting:
            twin = Noting(self.name)
            twin.load_state_dict(self.state_dict())
            return twin

    torch.manual_seed(0)
    model = Toy([Noting("a"), Noting("b")])
    batches = [batch(2, length) for length in (5, 6, 7)]
    found = []
    for _ in range(2):
        order.clear()
        with streamed(model, window=2) as (ours, _):
            torch.manual_seed(3)
            loss = accumulate(lambda ids: toy_loss(ours, ids), batches)
            assert order == [("a", 5), ("a", 6), ("a", 7), ("b", 5), ("b", 6), ("b", 7)]
            loss.backward()
            assert order[6:] == [("b", 5), ("b", 6), ("b", 7), ("a", 5), ("a", 6), ("a", 7)]
            found.append({**gradients(ours), "loss": loss.detach(), "next": torch.rand(2)})
    assert_equal(found[0], found[1])

    # The same order by hand, in plain PyTorch.
    reference = copy.deepcopy(model)
    torch.manual_seed(3)
    hidden = [reference.embed(ids) for ids in batches]
    for block in reference.blocks:
        hidden = [block(x) for x in hidden]
    losses = []
    for ids, x in zip(batches, hidden, strict=True):
        logits = reference.head(reference.norm(x))
        losses.append(nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), ids[:, 1:].reshape(-1)))
    sum(losses[1:], losses[0]).backward()
    assert_close({k: v for k, v in found[0].items() if k not in ("loss", "next")}, gradients(reference))


def test_one_micro_batch_at_a_time_runs() -> None:
    """The baton: never two threads in the user's code at once."""
    running, most, visits = [0], [0], Counter[int]()

    def body(number: int) -> Tensor:
        for place in range(5):
            running[0] += 1
            most[0] = max(most[0], running[0])
            running[0] -= 1
            visits[place] += 1
            window.meet(number, place, number, lambda items: items)
        return torch.zeros(())

    window = Window(body, range(4))
    assert len(window.run()) == 4
    assert most[0] == 1 and set(visits.values()) == {4}


def test_micro_batches_of_different_lengths_of_way_meet_where_they_can() -> None:
    met: list[list[int]] = []

    def joint(items: list[int]) -> list[int]:
        met.append(sorted(items))
        return items

    def body(number: int) -> Tensor:
        for place in range(number + 1):
            assert window.meet(number, place, number, joint) == number
        return torch.tensor(float(number))

    window = Window(body, range(3))
    assert [float(loss) for loss in window.run()] == [0, 1, 2]
    assert met == [[0, 1, 2], [1, 2], [2]]
