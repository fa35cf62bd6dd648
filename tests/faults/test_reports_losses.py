"""Public problem reports 26, 31, 33, 88, 94 through the whole core: what is counted, printed, kept and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from against_plain import assert_close, batch, gradients, hf_loss, llama, streamed, toy, toy_loss
from alone import growth
from headrace.base.errors import DataError
from headrace.executor.taken import TakenHeadCall


def four_rows() -> Tensor:
    return batch(4, 8, vocabulary=257)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_loss_of_the_users_own_counts_as_it_says(count: int) -> None:
    """Report 26: a mean that ignores extra arguments, divided by who wrote the loop; nobody divides a second time."""
    model = llama(2)
    reference = copy.deepcopy(model)

    def own(net: Any, ids: Tensor, **ignored: Any) -> Tensor:
        logits = net(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 257), ids[:, 1:].reshape(-1))

    own(reference, four_rows(), num_items_in_batch=3).backward()
    with streamed(model) as (ours, optimizer):
        parts = list(four_rows().chunk(count))
        loss = headrace.accumulate(lambda ids: own(ours, ids) / count, parts)
        loss.backward()
        assert_close(gradients(ours), gradients(reference))
        optimizer.zero_grad()
        for ids in parts:
            (own(ours, ids) / count).backward()
        assert_close(gradients(ours), gradients(reference))


LAYOUTS = {
    "last three": slice(-3, None), "first three": slice(0, 4), "across the middle": slice(30, 35), "one": slice(17, 18),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_rare_label_layouts_reach_every_block(layout: str, tied: bool) -> None:
    """Report 31: the printed loss was plausible and the model never moved."""
    model = llama(2, tie_word_embeddings=tied)
    reference = copy.deepcopy(model)
    ids = batch(1, 64, vocabulary=257)
    labels = torch.full_like(ids, -100)
    labels[:, LAYOUTS[layout]] = ids[:, LAYOUTS[layout]]
    with streamed(model) as (ours, _):
        losses = []
        for net in (reference, ours):
            loss = net(input_ids=ids, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
        found = gradients(ours)
        assert_close(found, gradients(reference))
        assert all(found[f"model.layers.{n}.mlp.up_proj.weight"].abs().max() > 0 for n in range(2))


@pytest.mark.parametrize("window", [False, True], ids=["batch", "window"])
def test_a_window_without_any_label_is_refused_in_words(window: bool) -> None:
    """Report 31: nothing to learn from, where plain PyTorch has a loss of NaN. No weight changes, gradients that came
    before stay, and training goes on. Without gradients it is NaN as ever."""
    model = llama(2)
    reference = copy.deepcopy(model)
    ids = batch(2, 6, vocabulary=257)
    none = torch.full_like(ids, -100)
    with streamed(model) as (ours, optimizer):
        before = {name: value.clone() for name, value in ours.state_dict().items()}
        hf_loss(ours, ids).backward()
        hf_loss(reference, ids).backward()
        items = {"num_items_in_batch": 0} if window else {}
        parts = [ids] * (2 if window else 1)
        with pytest.raises(DataError, match=r"no token has a label\. all 12 labels are -100"):
            headrace.accumulate(lambda part: ours(input_ids=part, labels=none, **items).loss, parts)
        assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
        assert_close(gradients(ours), gradients(reference))
        with torch.no_grad():
            assert ours(input_ids=ids, labels=none).loss.isnan()
        optimizer.step()
        assert all(torch.isfinite(value).all() for value in ours.state_dict().values())


def test_micro_batches_without_labels_beside_others() -> None:
    """Report 31: with the number of labels of their window they add nothing to its loss."""
    model = llama(2)
    reference = copy.deepcopy(model)
    ids = batch(2, 6, vocabulary=257)
    window = [(ids, torch.full_like(ids, -100)), (ids.flip(1), ids.flip(1))]
    with streamed(model) as (ours, _):
        loss = headrace.accumulate(
            lambda pair: ours(input_ids=pair[0], labels=pair[1], num_items_in_batch=10).loss, window
        )
        loss.backward()
        plain = reference(input_ids=window[1][0], labels=window[1][1]).loss
        plain.backward()
        assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
        assert_close(gradients(ours), gradients(reference))


def test_the_loss_of_a_window_is_the_mean_over_its_labels() -> None:
    """Report 33: with accumulation, the printed value is the trained one, and evaluation of the same rows agrees."""
    model = llama(2)
    ids = [batch(1, length, seed=length, vocabulary=257) for length in (4, 9, 6, 12)]
    count = sum(part.numel() - 1 for part in ids)
    with torch.no_grad():
        rows = [hf_loss(model, part).item() for part in ids]
    expected = sum(value * (part.numel() - 1) for value, part in zip(rows, ids, strict=True)) / count
    with streamed(model) as (ours, _):
        loss = headrace.accumulate(lambda part: hf_loss(ours, part) * (part.numel() - 1) / count, ids)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        by_model = headrace.accumulate(
            lambda part: ours(input_ids=part, labels=part, num_items_in_batch=count).loss, ids
        )
        assert by_model.item() == pytest.approx(expected, rel=1e-5)
        with torch.no_grad():
            evaluated = [hf_loss(ours, part).item() for part in ids]
        assert evaluated == pytest.approx(rows, rel=1e-5)


def test_evaluation_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 88: training fitted, evaluation died of logits. 4096 tokens and 30k words: 480 MB of them in fp32."""
    model = llama(2, vocab_size=30_000, tie_word_embeddings=True, max_position_embeddings=512).eval()
    ids = batch(16, 256, vocabulary=30_000)

    def built(self: TakenHeadCall, hidden: Tensor) -> Tensor:
        raise AssertionError("logits were built")

    monkeypatch.setattr(TakenHeadCall, "_logits", built)
    with streamed(model, window=2) as (ours, _), torch.no_grad():
        ours(input_ids=ids[:1], labels=ids[:1])
        losses: list[Tensor] = []
        assert growth(lambda: losses.append(ours(input_ids=ids, labels=ids).loss)) < 240e6
        assert torch.isfinite(losses[0])
    monkeypatch.undo()
    with torch.no_grad():
        logits = model(input_ids=ids[:2]).logits
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:2, 1:].flatten())
        with streamed(model, window=2) as (ours, _):
            outputs = ours(input_ids=ids[:2], labels=ids[:2])
            assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)
            # Who looks at them gets them.
            torch.testing.assert_close(torch.as_tensor(outputs.logits + 0), logits)


@pytest.mark.parametrize("token", [37, 1000, -1])
@pytest.mark.parametrize("in_window", [True, False])
def test_token_ids_beyond_the_embedding_are_named(token: int, in_window: bool) -> None:
    """Report 94: a pad token was added without resizing; on a GPU that is an illegal access somewhere later."""
    ids = batch(3, 7)
    ids[1, 4] = token
    with streamed(toy()) as (ours, optimizer):
        with pytest.raises(DataError) as caught:
            headrace.accumulate(lambda part: toy_loss(ours, part), [batch(), ids]) if in_window else toy_loss(ours, ids)
        text = str(caught.value)
        assert text.startswith(f"token id {token} is beyond the embedding. row 1, position 4; embed.weight has 37 rows")
        optimizer.zero_grad()
        toy_loss(ours, batch()).backward()


@pytest.mark.parametrize("label", [257, 300, -1, -101])
def test_labels_beyond_the_vocabulary_are_named(label: int) -> None:
    """Report 94: labels that are neither a word nor -100."""
    ids = batch(2, 7, vocabulary=257)
    labels = ids.clone()
    labels[1, 4] = label
    with streamed(llama(2)) as (ours, _):
        with pytest.raises(DataError, match=rf"(^|\D){label}(\D|$)"):
            ours(input_ids=ids, labels=labels).loss.backward()
        hf_loss(ours, ids).backward()
