"""Finding stacks of blocks, and dividing a model into units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import headrace
import tiny_checkpoints
from against_plain import Block, Toy, assert_equal, batch, sgd, streamed, toy, toy_loss, trains_alike, weights
from headrace.base.errors import ModelError, OptionError
from headrace.base.events import EventLog
from headrace.model.blocks import find_blocks
from headrace.model.units import Anatomy, divide
from headrace.spec.model import BLOCK, REST, TILE, StateSpec


def names(model: nn.Module, blocks: Any = None) -> list[tuple[str, int]]:
    return [(stack.name, len(stack.blocks)) for stack in find_blocks(model, blocks)]


def stack(count: int, width: int = 20) -> nn.ModuleList:
    return nn.ModuleList(Block(width, 27) for _ in range(count))


@pytest.mark.parametrize(
    "family, expected",
    [
        ("llama", [("model.layers", 2)]), ("gpt2", [("transformer.h", 2)]), ("mixtral", [("model.layers", 2)]),
        ("qwen3-moe", [("model.layers", 2)]), ("gemma3", [("model.layers", 2)]),
        ("t5", [("encoder.block", 2), ("decoder.block", 2)]),
    ],
)  # fmt: skip
def test_stacks_of_known_families(family: str, expected: list[tuple[str, int]]) -> None:
    """Lists inside a block (experts, the parts of a T5 block) are none."""
    assert names(tiny_checkpoints.build(family)) == expected


def test_a_stack_may_mix_classes() -> None:
    model = toy(blocks=[Block(20, 27), nn.Linear(20, 20), Block(20, 5), nn.Linear(20, 20)])
    (found,) = find_blocks(model)
    assert str(found) == "blocks: 2 x Block, 2 x Linear"


def test_a_sequential_of_unlike_parts_is_no_stack_where_a_better_one_lies_below() -> None:
    model = nn.Sequential(nn.Embedding(9, 20), nn.Sequential(*stack(3)), nn.LayerNorm(20))
    assert names(model) == [("1", 3)]
    assert names(nn.Sequential(nn.Embedding(9, 20), *stack(3), nn.Linear(20, 9))) == [("", 5)]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == [("", 2)]


def test_a_list_of_one_counts_where_there_is_no_other() -> None:
    """A model of one layer, or one that calls its only layer again and again; streamed as any other."""
    alone = toy(blocks=[Block(20, 27)])
    assert names(alone) == [("blocks", 1)]
    alone.extra = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    assert names(alone) == [("blocks", 1)]  # the larger list has less than a hundredth of the model
    with streamed(alone) as (ours, _):
        assert toy_loss(ours, batch()) == toy_loss(alone, batch())
    alone.others = stack(3)
    assert names(alone) == [("others", 3)]


def test_small_stacks_count_where_there_is_no_large_one() -> None:
    assert names(Toy([Block(4, 3) for _ in range(3)], width=20, vocabulary=3700)) == [("blocks", 3)]


def test_repeated_modules_are_counted_as_often_as_they_stand() -> None:
    block = Block(20, 27)
    model = toy(blocks=[block, Block(20, 27), block])
    assert names(model) == [("blocks", 3)]
    assert find_blocks(model)[0].blocks[0] is block


def test_small_stacks_beside_large_ones_stay_resident() -> None:
    model = toy(blocks=[Block(20, 600) for _ in range(6)])
    model.extra = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
    assert names(model) == [("blocks", 6)]


class Stages(Toy):
    """Its blocks lie in a list of lists, of one block and of three, or in dicts."""

    def __init__(self, kind: str) -> None:
        super().__init__([])
        parts = [[Block(20, 27)], [Block(20, 27) for _ in range(3)]]
        named = [{f"part{number}": block for number, block in enumerate(part)} for part in parts]
        groups = [nn.ModuleList(part) for part in parts] if kind == "list" else [nn.ModuleDict(part) for part in named]
        self.blocks = nn.ModuleList(groups)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for group in self.blocks:
            for block in group.values() if isinstance(group, nn.ModuleDict) else group:
                x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_lists_in_a_list(kind: str) -> None:
    """Nobody calls the inner ones: their members are the blocks."""
    torch.manual_seed(0)
    model = Stages(kind)
    assert names(model) == names(model, "blocks") == [("blocks", 4)]
    trains_alike(model, "cpu")


def test_blocks_may_be_named_or_given() -> None:
    model = toy()
    model.other = nn.Module()
    model.other.parts = nn.Sequential(*stack(2))
    assert names(model, "other.parts") == [("other.parts", 2)]
    assert names(model, ["blocks", "other.parts"]) == [("blocks", 4), ("other.parts", 2)]
    assert names(model, model.blocks) == [("blocks", 4)]
    assert names(model, [model.blocks[1], model.blocks[3]]) == [("blocks", 2)]


@pytest.mark.parametrize(
    "blocks, said",
    [
        ("block", "blocks names 'block', which the model does not have. lists: blocks"),
        (["blocks", "nothing.here"], "blocks names 'nothing.here'"),
        ([], "blocks is empty"),
        ("norm", "blocks names 'norm', which is a LayerNorm"),
        ("embed", "blocks names 'embed', which is a Embedding"),
        ([nn.Linear(3, 3)], "blocks names a module outside the model"),
        (7, "blocks is neither names nor modules. got 7"),
        ([7], "blocks is neither names nor modules. got 7"),
    ],
)
def test_wrong_blocks_are_refused_in_words(blocks: Any, said: str) -> None:
    model = toy()
    with pytest.raises(OptionError) as caught:
        find_blocks(model, blocks)
    assert said in str(caught.value)
    with pytest.raises(OptionError):
        headrace.wrap(model, sgd(model), device="cpu", blocks=blocks)
    toy_loss(model, batch()).backward()  # still an ordinary model


def test_nothing_found_says_what_was_seen() -> None:
    model = nn.Module()
    model.activations = nn.Sequential(nn.ReLU(), nn.ReLU())
    model.one = nn.ModuleList([nn.ReLU()])
    with pytest.raises(ModelError, match=r"saw activations \(Sequential of 2\), one \(ModuleList of 1\)"):
        find_blocks(model)
    with pytest.raises(ModelError, match="holds no ModuleList and no Sequential"):
        find_blocks(nn.Linear(2, 2))


# -- units ----------------------------------------------------------------------------------------------------------


def divided(model: nn.Module, frozen: bool = False) -> Anatomy:
    groups = {} if frozen else {id(p): 0 for p in model.parameters() if p.requires_grad}
    state = StateSpec(("exp_avg", "exp_avg_sq"))
    return divide(model, find_blocks(model), groups, state, frozenset(), EventLog())


def kinds(anatomy: Anatomy) -> list[tuple[str, str]]:
    return [(unit.name, unit.kind) for unit in anatomy.spec.units]


def test_every_parameter_has_one_home() -> None:
    for model in (toy(), toy(tied=True), tiny_checkpoints.build("t5"), tiny_checkpoints.build("mixtral")):
        anatomy = divided(model)
        counted: dict[str, int] = {}
        for _, _, entry in anatomy.spec.pieces():
            counted[entry.name] = counted.get(entry.name, 0) + entry.numel
        assert counted == {name: p.numel() for name, p in model.named_parameters()}
        assert anatomy.spec.parameters == sum(p.numel() for p in model.parameters())


def test_embedding_and_head_come_in_tiles_no_larger_than_a_block() -> None:
    model = toy(vocabulary=301)
    anatomy = divided(model)
    block = max(unit.weights.nbytes for unit in anatomy.spec.units if unit.kind == BLOCK)
    for matrix in anatomy.spec.matrices:
        tiles = [anatomy.spec.units[tile] for tile in matrix.tiles]
        assert len(tiles) > 1 and all(tile.kind == TILE for tile in tiles)
        entries = [tile.weights.entries[0] for tile in tiles]
        assert [e.first_row for e in entries] == [sum(o.shape[0] for o in entries[:n]) for n in range(len(entries))]
        assert sum(entry.shape[0] for entry in entries) == matrix.rows == 301
        assert all(tile.weights.nbytes <= block for tile in tiles)


def test_tied_matrices_are_one() -> None:
    anatomy = divided(toy(tied=True))
    assert [matrix.name for matrix in anatomy.spec.matrices] == ["embed.weight"]
    assert anatomy.embeddings[0][0] == anatomy.heads[0][0] == 0


def test_a_weight_that_a_block_shares_with_others_is_resident() -> None:
    model = toy()
    model.blocks[1].gain = model.norm.weight
    model.blocks[3].up.weight = model.blocks[2].up.weight
    anatomy = divided(model)
    rest = anatomy.spec.units[-1]
    assert rest.kind == REST
    # Named as the model names them first.
    assert {e.name for e in rest.weights.entries} == {"blocks.1.gain", "blocks.2.up.weight", "norm.bias"}
    reference = weights(model)
    with streamed(model) as (ours, _):
        assert_equal(weights(ours), reference)


def test_an_embedding_used_by_other_code_or_of_a_special_kind_stays_resident() -> None:
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        model = Toy()
        model.embed = nn.Embedding(37, 20, **options)
        anatomy = divided(model)
        assert not anatomy.embeddings
        assert ("rest", REST) in kinds(anatomy)


def test_weights_in_no_group_are_stored_and_not_trained() -> None:
    anatomy = divided(toy(), frozen=True)
    assert not any(entry.trainable for _, _, entry in anatomy.spec.pieces())
    assert anatomy.spec.region_bytes("state") == anatomy.spec.region_bytes("grads") == 0


@pytest.mark.parametrize("dtype, said", [(torch.float16, "range is too small"), (torch.float64, "no update rule")])
def test_formats_that_cannot_be_trained_are_refused(dtype: torch.dtype, said: str) -> None:
    model = toy().to(dtype)
    with pytest.raises(ModelError, match=said) as caught:
        headrace.wrap(model, sgd(model), device="cpu")
    assert "embed.weight" in str(caught.value) and "bfloat16 or float32" in str(caught.value)
    model.requires_grad_(False)
    model.norm.float().requires_grad_(True)
    assert divided(model).spec.units[-1].kind == REST
