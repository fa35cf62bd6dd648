"""The order of rows: each once an epoch, equal for equal seeds, and exact after restore."""

from __future__ import annotations

import pytest

from headrace.base.errors import CheckpointError
from headrace.data.sampler import Sampler
from headrace.data.table import shuffled


def test_each_epoch_is_a_new_order_of_all_rows() -> None:
    sampler = Sampler(11, 4, seed=5)
    epochs = [[sampler.next().tolist() for _ in range(sampler.steps_per_epoch)] for _ in range(3)]
    assert [[len(step) for step in epoch] for epoch in epochs] == [[4, 4, 3]] * 3
    orders = [[row for step in epoch for row in step] for epoch in epochs]
    assert all(sorted(order) == list(range(11)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sampler.epoch == 3.0


def test_seed_decides() -> None:
    assert Sampler(50, 50, 1).next().tolist() == Sampler(50, 50, 1).next().tolist()
    assert Sampler(50, 50, 1).next().tolist() != Sampler(50, 50, 2).next().tolist()


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4, 7])
def test_restore_goes_on_with_the_very_next_rows(done: int) -> None:
    """Also in the middle of an epoch, at its end, and beyond the first."""
    straight, first = Sampler(11, 4, 5), Sampler(11, 4, 5)
    for _ in range(done):
        straight.next(), first.next()
    resumed = Sampler(11, 4, 5)
    resumed.restore(first.state())
    for _ in range(7):
        assert resumed.next().tolist() == straight.next().tolist()


def test_restore_refuses_another_number_of_rows() -> None:
    with pytest.raises(CheckpointError, match="11 rows then, 12 now"):
        Sampler(12, 4, 5).restore(Sampler(11, 4, 5).state())


def test_order_is_pinned() -> None:
    """A resumed run must find the order of an older installation: these numbers may never change."""
    assert shuffled(8, 0, 0).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
