"""Packing: several documents in a row that do not see each other, with the losses and gradients of single rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace
from against_plain import assert_close, gradients, streamed
from cpu.test_data_samples import word_tokenizer, write_jsonl
from headrace.base.errors import ModelError
from headrace.data import isolation
from headrace.data.batch import make_batch, micro_batches
from headrace.data.encode import Encoder
from headrace.data.isolation import packed_call, refuse_unless_apart, refuse_without_positions, wants_flat_rows
from headrace.data.pack import best_fit
from headrace.data.prepare import Shape, prepare
from headrace.data.table import TableWriter, TokenTable, shuffled

BEGIN, END = 1, 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def naive_best_fit(lengths: list[int], capacity: int, order: list[int]) -> list[list[int]]:
    """The same, written down as it is said; of rows that are equally full the newest is taken."""
    rows: list[list[int]] = []
    touched: list[int] = []
    for document in sorted(order, key=lambda document: -lengths[document]):
        left = {row: capacity - sum(lengths[member] for member in rows[row]) for row in range(len(rows))}
        fitting = [row for row in touched if left[row] >= lengths[document]]
        if fitting:
            row = min(reversed(fitting), key=lambda row: left[row])
            touched.remove(row)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        touched.append(row)
    return rows


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 15), st.integers(0, 3))
@settings(deadline=None, max_examples=150)
def test_best_fit(lengths: list[int], capacity: int, seed: int) -> None:
    order = shuffled(len(lengths), seed, 0)
    members, counts = best_fit(np.array(lengths, dtype=np.int32), capacity, order)
    rows = [part.tolist() for part in np.split(members, np.cumsum(counts)[:-1])]
    assert rows == naive_best_fit(lengths, capacity, order.tolist())
    assert sorted(members.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[member] for member in row) <= capacity for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // capacity) + 2 or max(lengths) > capacity / 4


def test_hundred_thousand_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.9, 100_000).clip(2, 2048).astype(np.int32)
    members, counts = best_fit(lengths, 2048, shuffled(len(lengths), 0, 0))
    assert len(members) == 100_000 and lengths.sum() / (len(counts) * 2048) > 0.999


def prepared(folder: Path, rows: list[Any], begin: bool = False, **shape: Any) -> tuple[TokenTable, Any, Encoder]:
    encoder = Encoder(word_tokenizer(begin), 64)
    path = write_jsonl(folder / "rows.jsonl", rows)
    return *prepare([path], encoder, Shape(**{"sequence_length": 12, "packing": True, **shape}), folder), encoder


def ids_of(text: str) -> list[int]:
    ids: list[int] = word_tokenizer()(text)["input_ids"]
    return ids


def documents_of(table: TokenTable) -> list[list[tuple[list[int], list[bool]]]]:
    return [[(ids.tolist(), trained.tolist()) for ids, trained in table.row(row)] for row in range(len(table))]


def test_rows_hold_whole_documents_each_with_its_own_begin_and_end(tmp_path: Path) -> None:
    rows = [
        {"text": "a b c"}, {"prompt": "d e", "completion": "f"}, {"text": "g " * 13}, {"text": "h i"},
        {"prompt": "j", "completion": "k l"},
    ]  # fmt: skip
    table, counts, _ = prepared(tmp_path, rows, begin=True)
    found = {tuple(ids): marks for row in documents_of(table) for ids, marks in row}
    expected = [
        ([BEGIN, *ids_of("a b c"), END], 1), ([BEGIN, *ids_of("d e f"), END], 3), ([BEGIN, *ids_of("g " * 11)], 1),
        ([BEGIN, *ids_of("g g"), END], 1), ([BEGIN, *ids_of("h i"), END], 1), ([BEGIN, *ids_of("j k l"), END], 2),
    ]  # fmt: skip
    assert found == {tuple(ids): [place >= first for place in range(len(ids))] for ids, first in expected}
    assert all(int(length) <= 12 for length in table.lengths) and table.apart
    assert (counts.documents, counts.pairs, counts.kept, counts.packed, len(table)) == (3, 2, 6, 4, 4)
    assert table.labels(range(4)) == counts.labels == sum(len(ids) - first for ids, first in expected)
    assert f"packed into 4 rows, {100 * table.tokens / 48:.1f} % full" in str(counts)


def test_long_pairs_follow_long_rows_and_long_documents_are_cut_into_pieces(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b " * 20}, {"text": "c " * 30}]
    table, counts, _ = prepared(tmp_path, rows, long_rows="drop")
    assert counts.dropped == 1 and sorted(table.lengths.tolist()) == [7, 12, 12]
    table, counts, _ = prepared(tmp_path, rows, long_rows="cut")
    assert counts.cut == 1 and sorted(table.lengths.tolist()) == [7, 12, 12, 12]


def test_seed_decides_and_the_fingerprint_tells(tmp_path: Path) -> None:
    rows = [{"text": f"{'a ' * (2 + place % 3)}{'bcdefgh'[place]}"} for place in range(7)]
    tables = [prepared(tmp_path, rows, seed=seed)[0] for seed in (0, 0, 1)]
    assert documents_of(tables[0]) == documents_of(tables[1]) != documents_of(tables[2])
    assert tables[0].fingerprint == tables[1].fingerprint != tables[2].fingerprint
    assert prepared(tmp_path, rows, packing=False)[0].fingerprint != tables[0].fingerprint


def test_batches_tell_documents_and_padding_apart_by_position(tmp_path: Path) -> None:
    """Padding counts as one more document; the end token stays trained where it doubles as padding."""
    writer = TableWriter(tmp_path)
    for ids, spans in (
        ([5, 6, 7, END], None),
        ([8, 9, END], ((1, 3),)),
        ([10, END], None),
        ([11] * 5, ((2, 3), (4, 5))),
    ):
        writer.add(ids, spans)
    table = writer.close((7, 0))
    batch = make_batch(table, [0, 1], END)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[11, 11, 11, 11, 11, 10, END], [5, 6, 7, END, 8, 9, END]]
    assert batch["labels"].tolist() == [[-100, -100, 11, -100, 11, -100, END], [-100, 6, 7, END, -100, 9, END]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    writer = TableWriter(tmp_path)
    writer.add([5, 6], None), writer.add([7, 8, 9], None), writer.add([5, 6, 7, 8], None)
    table = writer.close((6, 0))
    short = make_batch(table, [0, 1], END)
    assert short["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]][: len(table)]
    flat = make_batch(table, [0, 1], END, flat=True)
    assert flat["input_ids"].shape == (1, 9) and flat["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]


SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 3, "output_router_logits": True, "router_aux_loss_coef": 1.0}

KEEPS_APART: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, a window of 4": lambda: transformers.MistralConfig(**SIZES, sliding_window=4),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "gemma3, windows and none": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2, **NO_DROPOUT),
    "mixtral, router loss": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS),
}
LETS_SEE: dict[str, Any] = {
    "opt": lambda: transformers.OPTConfig(
        vocab_size=99, hidden_size=32, word_embed_proj_dim=32, ffn_dim=44, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "qwen3-next, linear attention": lambda: transformers.Qwen3NextConfig(
        **{**SIZES, "num_hidden_layers": 2}, head_dim=8, layer_types=["full_attention", "linear_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "jamba, state spaces": lambda: transformers.JambaConfig(
        **{**SIZES, "num_hidden_layers": 2}, attn_layer_period=2, attn_layer_offset=1, num_experts=2
    ),
}  # fmt: skip


def build(config: Any, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """A model in which every tensor, also norms and biases, has values of its own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape).to(dtype))
    return model.train()


def tables(folder: Path) -> tuple[TokenTable, TokenTable]:
    """The same documents packed into rows of 23 tokens, and in rows of their own."""
    writers = TableWriter(folder), TableWriter(folder)
    generator = np.random.default_rng(0)
    for length in (3, 9, 17, 5, 2, 11, 7, 8, 4):
        ids = generator.integers(3, 99, length).tolist()
        spans = None if length % 2 else ((length // 2, length),)
        for writer in writers:
            writer.add(ids, spans)
    return writers[0].close((23, 0)), writers[1].close()


def plain_loss(model: Any, table: TokenTable, flat: bool = False) -> Tensor:
    """One batch of all rows, through transformers alone."""
    batch = make_batch(table, range(len(table)), 0, flat and table.apart)
    placed = {name: tensor.to(model.device) for name, tensor in batch.items()}
    loss: Tensor = model(**placed, **(packed_call(model) if table.apart else {})).loss
    return loss


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", KEEPS_APART)
def test_losses_and_gradients_are_those_of_single_rows(name: str, attention: str, tmp_path: Path) -> None:
    """Plain transformers on packed rows against the same on padded ones; documents are longer than the windows."""
    packed, single = tables(tmp_path)
    assert len(packed) == 3 and packed.labels(range(3)) == single.labels(range(9))
    found = []
    for table in (packed, single):
        model = build(KEEPS_APART[name](), attention=attention)
        loss = plain_loss(model, table, wants_flat_rows(model))
        loss.backward()
        found.append((loss.item(), gradients(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert_close(found[0][1], found[1][1])


def test_a_router_loss_wants_rows_without_padding(tmp_path: Path) -> None:
    """Without a mask, padding would count as tokens that the router distributes."""
    packed, single = tables(tmp_path)
    model = build(KEEPS_APART["mixtral, router loss"]()).eval()
    with torch.no_grad():
        wanted, right, wrong = plain_loss(model, single), plain_loss(model, packed, True), plain_loss(model, packed)
    assert (
        wants_flat_rows(model)
        and torch.allclose(right, wanted, rtol=1e-6)
        and not torch.allclose(wrong, wanted, rtol=1e-5)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [None, 1], ids=["whole", "one row at a time"])
@pytest.mark.parametrize("name", KEEPS_APART)
def test_streamed_packed_rows_against_plain_single_rows(
    name: str, rows: int | None, device: str, tmp_path: Path
) -> None:
    """In one window of two micro-batches, past the first step."""
    packed, single = tables(tmp_path)
    plain = build(KEEPS_APART[name]())
    flat = wants_flat_rows(plain)
    router = hasattr(plain.config, "num_local_experts")
    parts = [np.arange(3)] if router else [np.array([0, 1]), np.array([2])]  # a router loss is no sum over batches
    labels = packed.labels(range(3))
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"rows": rows, "optimizer": sgd, "device": device}
    with streamed(plain, **options) as (model, optimizer):
        driver = sgd(plain.to(device))

        def share(batch: dict[str, Tensor]) -> Tensor:
            mean: Tensor = model(
                **{name: tensor.to(device) for name, tensor in batch.items()}, **packed_call(model)
            ).loss
            return mean * (int((batch["labels"] != -100).sum()) / labels)

        for _ in range(3):
            batches = [batch for part in parts for batch in micro_batches(packed, part, 2 + router, 0, flat)]
            loss = headrace.accumulate(share, batches)
            loss.backward()
            expected = plain_loss(plain, single)
            expected.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
            theirs = {name: gradient.cpu() for name, gradient in gradients(plain).items()}
            assert_close(gradients(model), theirs, 1e-5 if device == "cpu" else 1e-4)
            for step in (optimizer, driver):
                step.step()
                step.zero_grad()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", KEEPS_APART)
def test_models_that_keep_documents_apart_are_told(name: str, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    """The model is left as it was: its mode, its gradients, the random stream."""
    packed, _ = tables(tmp_path)
    with streamed(build(KEEPS_APART[name](), dtype), device=device) as (model, _):
        model.lm_head.eval()
        refuse_without_positions(model, 23)
        before = torch.get_rng_state()
        numbers = refuse_unless_apart(model, packed, torch.device(device), wants_flat_rows(model))
        assert (numbers["leak"] == 0 or device == "cuda") and 4 * numbers["apart"] < numbers["joined"]
        assert torch.equal(before, torch.get_rng_state())
        assert model.training and not model.lm_head.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LETS_SEE)
def test_models_whose_documents_see_each_other_are_refused(
    name: str, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    packed, _ = tables(tmp_path)
    with streamed(build(LETS_SEE[name](), dtype), device=device) as (model, _):
        refuse_without_positions(model, 23)
        with pytest.raises(ModelError, match=r"cannot keep packed documents apart.*leak [1-9].*Set packing=false"):
            refuse_unless_apart(model, packed, torch.device(device), False)


def test_a_cache_hides_the_borders_and_the_test_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers makes no mask of packed rows where it fills a cache, as a model does unless it is told not to."""
    packed, _ = tables(tmp_path)
    monkeypatch.setattr(isolation, "packed_call", lambda model: {})
    with streamed(build(KEEPS_APART["llama"]())) as (model, _), pytest.raises(ModelError, match="keep packed"):
        refuse_unless_apart(model, packed, torch.device("cpu"), False)


def test_positions_that_count_on_are_refused(tmp_path: Path) -> None:
    """A model may keep what documents say apart and still count their positions on."""
    packed, _ = tables(tmp_path)
    model = build(KEEPS_APART["gpt2"]())
    positions = model.transformer.wpe
    whole = positions.forward
    positions.forward = lambda ids: whole(torch.arange(ids.shape[1]).expand_as(ids))
    with streamed(model) as (wrapped, _), pytest.raises(ModelError, match=r"leak 0\.0e\+00"):
        refuse_unless_apart(wrapped, packed, torch.device("cpu"), False)


def test_what_needs_no_run_to_be_seen() -> None:
    bloom = build(transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(ModelError, match=r"BloomForCausalLM cannot keep .* apart\. it takes no position_ids"):
        refuse_without_positions(bloom, 23)
    chunked = build(KEEPS_APART["llama"]())
    chunked.config.attention_chunk_size = 16
    refuse_without_positions(chunked, 16)
    with pytest.raises(ModelError, match="cut every 16 tokens of a row"):
        refuse_without_positions(chunked, 23)
    chunked.config._attn_implementation = "flash_attention_2"
    assert wants_flat_rows(chunked)
