"""Counts as people read them."""

from __future__ import annotations

from headrace.base.units import plural
from headrace.data.counts import Counts


def test_one_is_no_plural() -> None:
    assert [plural(count, "row") for count in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [plural(count, "matrix", "matrices") for count in (1, 2)] == ["1 matrix", "2 matrices"]
    assert str(Counts(files=1, documents=1, kept=1)).startswith("1 file; 1 document; 1 row kept")
