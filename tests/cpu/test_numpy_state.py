"""NumPy's random state as recomputes take and restore it: also a normal number that was drawn in advance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from against_plain import Toy, batch, gradients, streamed, toy_loss
from headrace.model import numpy_state


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    before = np.random.get_state()
    yield
    np.random.set_state(before)
    numpy_state.user_code_ran()


def drawn() -> list[float]:
    return [*np.random.randn(3).tolist(), *np.random.rand(2).tolist()]


def test_the_same_object_until_something_is_drawn() -> None:
    np.random.seed(1)
    first = numpy_state.numpy_state()
    assert first.memory is not None and numpy_state.numpy_state() is first
    np.random.rand()
    assert numpy_state.numpy_state() is not first


@pytest.mark.parametrize("normals", [0, 1, 2, 623])
def test_restored_states_draw_the_same(normals: int) -> None:
    """An odd number of normals leaves one in advance, which the generator's memory does not show."""
    np.random.seed(2)
    np.random.randn(normals)
    state = numpy_state.numpy_state()
    want = drawn()
    state.restore()
    assert drawn() == want
    np.random.set_state(state.full)
    np.random.randn(1)  # with one in advance this changes nothing in the generator's memory
    state.restore()
    assert drawn() == want


def test_a_user_may_set_a_state_of_the_same_memory() -> None:
    np.random.seed(3)
    np.random.randn(1)
    ahead = np.random.get_state()
    np.random.randn(1)
    numpy_state.user_code_ran()
    without = numpy_state.numpy_state()
    np.random.set_state(ahead)
    numpy_state.user_code_ran()
    state = numpy_state.numpy_state()
    assert state is not without
    want = drawn()
    state.restore()
    assert drawn() == want
    without.restore()
    assert np.random.get_state()[3] == 0


def test_other_generators() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        with pytest.warns(RuntimeWarning):
            state = numpy_state.numpy_state()
        want = drawn()
        state.restore()
        assert drawn() == want
    finally:
        np.random.set_bit_generator(before)


class Noisy(nn.Module):
    """Draws an odd number of normals from NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(3)).float().sum()
        return x + torch.tanh(self.up(x)) * noise


def test_a_block_that_draws_from_numpy() -> None:
    torch.manual_seed(0)
    plain = Toy([Noisy() for _ in range(3)])
    with streamed(plain) as (ours, _):
        for step in range(3):
            ends = []
            for model in (plain, ours):
                model.zero_grad()
                np.random.seed(step)
                np.random.randn(step)
                toy_loss(model, batch()).backward()
                ends.append(drawn())
            assert ends[0] == ends[1]
            for name, gradient in gradients(plain).items():
                torch.testing.assert_close(gradients(ours)[name], gradient)
