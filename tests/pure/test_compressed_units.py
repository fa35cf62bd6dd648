"""Units with codecs: how they are stored beside how they compute, the bytes that are planned, and their programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan.place import Budgets
from headrace.schedule import build
from headrace.spec.codecs import codec_named
from headrace.spec.footprint import footprint, round_up
from headrace.spec.hardware import LinkRates
from headrace.spec.layout import Entry, place
from headrace.spec.model import BLOCK, ModelSpec
from headrace.spec.placement import DEVICE, DISK, HOST
from made_specs import PAIRS, decided, made, placed, rates, visits

CODECS = (None, "int8", "int8/row", "nf4", "nf4+double", "fp8", "nvfp4")


@st.composite
def layouts(draw: st.DrawFn) -> list[Entry]:
    entries = []
    for number in range(draw(st.integers(1, 9))):
        trainable = draw(st.booleans())
        shape = tuple(draw(st.lists(st.integers(1, 40), min_size=2, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "bfloat16"] if trainable else ["float32", "bfloat16", "float16"]))
        codec = None if trainable else draw(st.sampled_from(CODECS))
        entries.append(Entry(f"w{number}", shape, dtype, trainable, draw(st.integers(0, 2)), None, codec))
    return entries


@given(layouts())
def test_stored_and_computing_layouts_have_one_order(entries: list[Entry]) -> None:
    layout = place(entries)
    stored = layout.stored()
    assert [e.name for e in stored.entries] == [e.name for e in layout.entries]
    end = 0
    for mine, entry, offset in zip(stored.entries, layout.entries, stored.offsets, strict=True):
        assert offset >= end
        if entry.codec is None:
            assert mine is entry
        else:
            assert mine.shape == (codec_named(entry.codec).nbytes(entry.shape),) and mine.dtype == "uint8"
            assert offset % 256 == 0 and not mine.trainable
        end = offset + mine.numel * {"float32": 4, "uint8": 1}.get(mine.dtype, 2)
    trained = len(layout.trainable().entries)
    assert stored.offsets[:trained] == layout.offsets[:trained]
    assert [e.name for e in layout.decoded().entries] == [e.name for e in layout.entries if e.codec]


def compressed(spec: ModelSpec, codec: str = "nf4") -> ModelSpec:
    """The same spec with the frozen matrices of its blocks stored with a codec."""
    units = []
    for unit in spec.units:
        entries = [
            replace(e, codec=codec if unit.kind == BLOCK and len(e.shape) > 1 and not e.trainable else None)
            for e in unit.weights.entries
        ]
        units.append(replace(unit, weights=place(entries)))
    return replace(spec, units=tuple(units))


def test_units_without_codecs_have_one_layout() -> None:
    for unit in made(frozen=(1, 2)).units:
        assert unit.stored is unit.weights and not unit.compressed and unit.decoded.nbytes == 0


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_visits_take_turns_at_the_place_for_decoded_weights(pair: tuple[str, str]) -> None:
    """Decoding is part of the visit that computes, and the only thing that a program of compressed units adds."""
    plain, placement = placed(made(frozen=(0, 2)), *pair, slots=2)
    packed = compressed(plain)
    assert sum(unit.compressed for unit in packed.units) == 2
    for passes in (build.forward, build.backward):
        one, other = (passes(spec, placement, visits(spec), (None, None)) for spec in (plain, packed))
        turns, owners = [], []
        for ours, theirs in zip(other.ops, one.ops, strict=True):
            gives = tuple(token for token in ours.gives if token != "decoded")
            if gives != ours.gives:
                assert packed.units[ours.unit].compressed and ours.lane == "compute" and ours.visit >= 0
                assert (turns[-1] in ours.after) if turns else ("decoded" in ours.before)
                turns.append(ours.index)
                owners.append(ours.unit)
            assert (ours.verb, ours.unit, ours.place, gives) == (theirs.verb, theirs.unit, theirs.place, theirs.gives)
            added = set(ours.after) - set(theirs.after) | set(ours.before) - set(theirs.before)
            assert added <= {"decoded", *turns}
        assert len(set(owners)) == 2


def test_bytes_are_those_that_are_stored_and_one_place_to_decode_into() -> None:
    spec = compressed(made(blocks=6, frozen=range(6)))
    blocks = [unit for unit in spec.units if unit.compressed]
    assert len(blocks) == 6
    stored = sum(round_up(unit.stored.nbytes) for unit in blocks)
    tiles = sum(round_up(unit.weights.nbytes) for unit in spec.units if unit.kind == "tile")
    slot = round_up(max(unit.stored.nbytes for unit in spec.units if unit.kind != "rest"))
    place_ = round_up(max(unit.decoded.nbytes for unit in blocks))
    rest = round_up(spec.units[-1].weights.nbytes)
    for weights in (HOST, DISK):
        need = footprint(spec, placed(spec, weights, weights, slots=2)[1])
        assert {HOST: need.host, DISK: need.disk}[weights]["weights"] == stored + tiles + (
            rest if weights == HOST else 0
        )
        assert need.device["weights"] == 2 * slot + place_ + rest


def test_what_is_frozen_on_the_device_has_no_second_home() -> None:
    spec = made(frozen=(0, 1, 2, 3, -1))
    chosen = decided(spec, Budgets(None, 1 << 40, None, False), {"weights": DEVICE, "state": HOST}).placement
    for unit in spec.units:
        assert chosen.home(unit.index) == (HOST if unit.trained.entries else DEVICE)
    need = footprint(spec, chosen)
    assert need.host["weights"] == sum(round_up(u.weights.nbytes) for u in spec.units if u.trained.entries)


def test_near_blocks_take_half_of_the_budget() -> None:
    """Where no batch is known; frozen ones have no home elsewhere then."""
    packed = compressed(made(blocks=40, frozen=range(40)))
    budgets = Budgets(40 * 4096, 1 << 40, None, False)
    slow = replace(rates(), link=LinkRates(1e6, 1e6, 1e6))
    chosen = decided(packed, budgets, slots=2, profile=slow).placement
    near = [u.index for u in packed.units if u.kind == BLOCK and chosen.weights[u.index] == DEVICE]
    assert 4 < len(near) < 40
    assert all(chosen.home(unit) == DEVICE for unit in near)
    need = footprint(packed, chosen).device_bytes
    assert 0.5 * 40 * 4096 - 2 * 4096 < need <= 0.5 * 40 * 4096
