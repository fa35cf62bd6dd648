"""Tensors of a region: each lies where its layout says, as slicing the bytes one by one would give it."""

from __future__ import annotations

import torch

from headrace.spec.layout import Entry, Layout
from headrace.store.regions import DTYPES, typed

LAYOUT = Layout((
    Entry("a", (3, 5), "float32", True), Entry("b", (7,), "float32", True), Entry("c", (2, 1, 4), "bfloat16", True),
    Entry("d", (), "bfloat16", True), Entry("e", (0, 4), "bfloat16", True), Entry("f", (128,), "bfloat16", False),
    Entry("g", (130,), "int8", False),
))  # fmt: skip


def test_views_lie_where_the_layout_says() -> None:
    region = torch.arange(LAYOUT.nbytes + 512).to(torch.uint8)[512:]
    views = typed(region, LAYOUT)
    assert len(views) == len(LAYOUT.entries)
    for view, entry, offset in zip(views, LAYOUT.entries, LAYOUT.offsets, strict=True):
        dtype = DTYPES[entry.dtype]
        want = region[offset : offset + entry.numel * dtype.itemsize].view(dtype).view(entry.shape)
        assert (view.dtype, view.shape, view.stride()) == (want.dtype, want.shape, want.stride()), entry.name
        assert view.storage_offset() == want.storage_offset(), entry.name
        assert view.reshape(-1).view(torch.uint8).equal(want.reshape(-1).view(torch.uint8)), entry.name


def test_gaps_are_what_no_view_covers() -> None:
    region = torch.ones(LAYOUT.nbytes, dtype=torch.uint8)
    for view in typed(region, LAYOUT):
        view.zero_()
    covered = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    for first, last in LAYOUT.gaps:
        assert first < last and not covered[first:last].any()
        covered[first:last] = 1
    assert region.equal(covered)
    assert typed(region[:0], Layout(())) == []
