"""Layouts, units and footprints: bytes that add up, views that meet no neighbour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spec.footprint import PAGE, footprint, needs_total, round_up, stage_bytes
from headrace.spec.formats import ITEMSIZE, itemsize
from headrace.spec.layout import PAD_ELEMENTS, Entry, Layout, place
from headrace.spec.model import BLOCK, REST, TILE, ModelSpec, StateSpec, Unit
from headrace.spec.placement import DEVICE, DISK, HOST, Placement
from made_specs import PAIRS, made, placed

ENTRIES = st.lists(
    st.builds(
        Entry,
        st.text("abc", min_size=1, max_size=4),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.sampled_from(["float32", "bfloat16", "float16", "int64", "bool"]),
        st.booleans(),
        st.integers(0, 2),
    ),
    max_size=8,
)


@given(ENTRIES)
def test_tensors_of_a_layout_are_aligned_and_never_overlap(entries: list[Entry]) -> None:
    layout = place(entries)
    end = 0
    for entry, offset in zip(layout.entries, layout.offsets, strict=True):
        assert offset % itemsize(entry.dtype) == 0
        assert offset >= end
        assert entry.padded % PAD_ELEMENTS == 0 and 0 <= entry.padded - entry.numel < PAD_ELEMENTS
        end = offset + entry.padded * itemsize(entry.dtype)
    assert layout.nbytes == end
    assert sorted(layout.entries, key=repr) == sorted(entries, key=repr)


@given(ENTRIES)
def test_trained_entries_come_first_at_the_same_offsets(entries: list[Entry]) -> None:
    layout = place(entries)
    trained = layout.trainable()
    assert trained.entries == layout.entries[: len(trained.entries)]
    assert trained.offsets == layout.offsets[: len(trained.offsets)]
    assert all(entry.trainable for entry in trained.entries)
    assert trained.nbytes <= layout.nbytes


@given(ENTRIES)
def test_neighbours_in_one_region_are_neighbours_in_all(entries: list[Entry]) -> None:
    """Report 22: the index of one grouping must never be used with another. Here all regions share one."""
    trained = place(entries).trainable()
    moments = trained.recast(lambda e: "float32")
    assert [e.key for e in moments.entries] == [e.key for e in trained.entries]
    assert [e.padded for e in moments.entries] == [e.padded for e in trained.entries]
    elements = 0
    for offset, entry in zip(moments.offsets, moments.entries, strict=True):
        assert offset == 4 * elements
        elements += entry.padded


MOMENTS = st.sampled_from([(), ("momentum_buffer",), ("exp_avg", "exp_avg_sq")])


@given(ENTRIES, MOMENTS, st.sampled_from(["float32", "bfloat16"]))
def test_parts_of_the_state_follow_each_other_without_overlap(
    entries: list[Entry], moments: tuple[str, ...], dtype: str
) -> None:
    entries = [e for e in entries if e.dtype in ("float32", "bfloat16")]
    unit = Unit(0, "block", BLOCK, place(entries), StateSpec(moments, dtype))
    end = 0
    for offset, layout in unit.parts.values():
        assert offset >= end and offset % 256 == 0
        end = offset + layout.nbytes
    assert unit.state_bytes == end
    narrow = any(entry.dtype == "bfloat16" for entry in unit.trained.entries)
    assert list(unit.parts) == (["low"] if narrow else []) + list(moments)


def test_bytes_of_one_unit_by_hand() -> None:
    matrix = Entry("w", (10, 20), "bfloat16", True)
    gain = Entry("g", (20,), "float32", True)
    frozen = Entry("f", (7,), "float32", False)
    unit = Unit(0, "block", BLOCK, place([frozen, matrix, gain]), StateSpec(("exp_avg", "exp_avg_sq")))
    assert [entry.name for entry in unit.weights.entries] == ["g", "w", "f"]
    assert unit.weights.offsets == (0, 512, 1024) and unit.weights.nbytes == 1536
    assert unit.trained_bytes == 1024
    assert unit.grads.nbytes == 1024
    assert Unit(0, "block", BLOCK, unit.weights, unit.state, wide_grads=True).grads.nbytes == 128 * 4 + 256 * 4
    # The remainder: one byte for each element of an fp32 weight (never used), two for bf16; 256 bytes apart.
    assert {name: offset for name, (offset, _) in unit.parts.items()} == {"low": 0, "exp_avg": 768, "exp_avg_sq": 2304}
    assert unit.state_bytes == 2304 + 384 * 4
    assert unit.parameters == 227


def test_frozen_units_cost_their_storage_and_nothing_else() -> None:
    spec, placement = placed(made(frozen=(0, 1, 2, 3, -1), rest=False))
    need = footprint(spec, placement)
    assert need.host["state"] == need.host["grads"] == need.device["grads"] == 0
    assert need.host["weights"] == sum(round_up(unit.weights.nbytes) for unit in spec.units)


@pytest.mark.parametrize("weights, state", PAIRS)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_the_device_holds_nothing_that_grows_with_depth(weights: str, state: str, slots: int) -> None:
    few, many = (placed(made(blocks, dtype="float32"), weights, state, slots) for blocks in (4, 5))
    grow = footprint(*many).device_bytes - footprint(*few).device_bytes
    if weights != DEVICE:
        # Blocks grow by one row each; only slots, gradient slots and the fp32 buffer follow the largest.
        assert grow <= (slots + 3) * PAGE
    else:
        assert grow > 0


def test_slots_hold_the_largest_streaming_unit() -> None:
    """Report 41: slots sized from the first block, or by a fixed option, are too small for others."""
    small = [Entry("a", (4, 4), "float32", True)]
    huge = [Entry("b", (4096, 16), "float32", True)]
    units = [Unit(n, f"b{n}", BLOCK, place(e), StateSpec(())) for n, e in enumerate((small, huge, small))]
    need = footprint(*placed(ModelSpec(tuple(units)), slots=2))
    assert need.device["weights"] == 2 * round_up(units[1].weights.nbytes)


def test_update_stages_hold_weights_and_state_of_the_largest_unit() -> None:
    spec, placement = placed(made(), DISK, DISK)
    sizes = [stage_bytes(unit, placement) for unit in spec.units]
    assert sizes == [(round_up(u.trained_bytes) if u.kind != REST else 0) + round_up(u.state_bytes) for u in spec.units]
    rest = placed(made(), HOST, HOST)[1]
    assert all(stage_bytes(unit, rest) == 0 for unit in spec.units)


def test_a_sum_of_contributions_needs_a_buffer_only_where_weights_are_narrow() -> None:
    assert any(needs_total(unit) for unit in made().units)
    assert not any(needs_total(unit) for unit in made(dtype="float32").units)


def test_home_of_device_weights_follows_their_state() -> None:
    for weights, state, home in [
        (DEVICE, DEVICE, DEVICE), (DEVICE, HOST, HOST), (DEVICE, DISK, HOST), (HOST, DISK, HOST), (DISK, HOST, DISK),
    ]:  # fmt: skip
        assert Placement((weights,), (state,), 1, False).home(0) == home


def test_sizes_of_formats() -> None:
    assert {name: itemsize(name) for name in ("bfloat16", "float32", "bool", "int64")} == {
        "bfloat16": 2, "float32": 4, "bool": 1, "int64": 8,
    }  # fmt: skip
    assert all(size in (1, 2, 4, 8) for size in ITEMSIZE.values())


def test_pieces_name_every_tensor_once() -> None:
    spec = made(tied=True, tiles=3)
    keys = [entry.key for _, _, entry in spec.pieces()]
    assert len(keys) == len(set(keys))
    assert [unit.kind for unit in spec.streaming] == [TILE] * 3 + [BLOCK] * 4
    assert spec.parameters == sum(entry.numel for _, _, entry in spec.pieces())
    assert Layout(()).nbytes == 0
    assert HOST in placed(spec)[1].weights
