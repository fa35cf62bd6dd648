"""linear_cross_entropy against torch's cross_entropy and an fp64 oracle, at odd sizes of tiles and chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.base.errors import DataError, OptionError
from headrace.loss.linear_cross_entropy import causal_lm_loss, linear_cross_entropy

HIDDEN = 48


def oracle(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    num_items: int | None = None,
    **options: Any,
) -> Tensor:
    """Ordinary logits and torch's cross_entropy, in the dtype of the inputs."""
    logits = functional.linear(hidden, weight, bias)
    if scale is not None:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if num_items is not None:
        return functional.cross_entropy(logits, labels, reduction="sum", **options) / num_items
    return functional.cross_entropy(logits, labels, **options)


def make(tokens: int, vocab: int, dtype: torch.dtype = torch.float32, shift: float = 0.0) -> dict[str, Tensor]:
    """Leaves that need a gradient, and labels with about a third ignored."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    leaves = {"hidden": draw(tokens, HIDDEN), "weight": draw(vocab, HIDDEN) * 0.3, "bias": draw(vocab) + shift}
    return {name: leaf.to(dtype).requires_grad_() for name, leaf in leaves.items()} | {"labels": labels}


def run(function: Any, inputs: dict[str, Tensor], dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
    """Loss, then the gradients of hidden, weight and bias, for a fixed uneven upstream gradient."""
    copies = {
        name: value.detach().to(dtype if dtype and value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }
    leaves = [value.requires_grad_() for name, value in copies.items() if inputs[name].requires_grad]
    loss = function(**copies, **options)
    upstream = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def assert_close(got: list[Tensor], want: list[Tensor], tolerance: float = 2e-6) -> None:
    assert len(got) == len(want)
    for name, a, b in zip(("loss", "hidden", "weight", "bias"), got, want, strict=False):
        assert a.shape == b.shape
        assert error(a, b) < tolerance, f"{name}: {error(a, b):.2e}"


@pytest.mark.parametrize("vocab", [257, 1003])
@pytest.mark.parametrize("tile_rows", [1, 7, 128, None])
@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
def test_every_tile_and_chunk_size_equals_torch(vocab: int, tile_rows: int | None, chunk_rows: int) -> None:
    if tile_rows == 1 and chunk_rows == 1 and vocab == 1003:
        pytest.skip("a thousand tiles of one row by one token: covered by vocabulary 257")
    inputs = make(13 if chunk_rows == 1 else 71, vocab)
    want = run(oracle, inputs, torch.float64)
    assert_close(run(linear_cross_entropy, inputs, tile_rows=tile_rows, chunk_rows=chunk_rows), want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("softcap", [None, 1.0, 30.0])
def test_every_option_equals_torch(
    softcap: float | None, scale: float | None, label_smoothing: float, reduction: str
) -> None:
    options = {"softcap": softcap, "scale": scale, "label_smoothing": label_smoothing, "reduction": reduction}
    inputs = make(37, 257)
    assert_close(
        run(linear_cross_entropy, inputs, tile_rows=100, chunk_rows=10, **options),
        run(oracle, inputs, torch.float64, **options),
    )


@pytest.mark.parametrize("vocab", [257, 1003])
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_soft_capped_logits_far_below_zero_meet_no_filler(vocab: int, softcap: float) -> None:
    """Report 29: a padded last tile would add exp(0) or exp(-cap) to a sum of tiny terms."""
    inputs = make(20, vocab, shift=-40.0)
    options = {"softcap": softcap}
    got = run(linear_cross_entropy, inputs, tile_rows=128, chunk_rows=7, **options)
    want = run(oracle, inputs, torch.float64, **options)
    # At a cap of 1 the tanh is saturated: 1 - tanh^2 has few correct bits in fp32, for torch as for us.
    plain = run(oracle, inputs, **options)
    for a, b, exact in zip(got, plain, want, strict=True):
        assert error(a, exact) < max(2e-6, 2 * error(b, exact))


@pytest.mark.parametrize("layout", ["last 3", "first 3", "across two chunks", "one"])
def test_rare_label_layouts_keep_their_gradient(layout: str) -> None:
    """Report 31: a long prefix of ignored labels, chunks of 64."""
    inputs = make(512, 257)
    kept = {
        "last 3": slice(509, 512),
        "first 3": slice(0, 3),
        "across two chunks": slice(60, 68),
        "one": slice(200, 201),
    }
    labels = torch.full((512,), -100)
    labels[kept[layout]] = torch.arange(512)[kept[layout]] % 257
    inputs["labels"] = labels
    got = run(linear_cross_entropy, inputs, tile_rows=128, chunk_rows=64)
    assert_close(got, run(oracle, inputs, torch.float64))
    assert got[1][kept[layout]].norm() > 0
    assert got[1].count_nonzero() == got[1][kept[layout]].count_nonzero()


@pytest.mark.parametrize("ignore_index", [0, -1, 5, 999])
def test_any_label_can_mean_ignore(ignore_index: int) -> None:
    inputs = make(40, 257)
    inputs["labels"][inputs["labels"] == -100] = ignore_index
    options = {"ignore_index": ignore_index}
    assert_close(
        run(linear_cross_entropy, inputs, tile_rows=64, **options), run(oracle, inputs, torch.float64, **options)
    )


def test_labels_of_all_tokens_and_three_dimensions() -> None:
    inputs = make(24, 257)
    inputs["labels"] = torch.arange(24)
    want = run(oracle, inputs, torch.float64, reduction="none")
    cube = inputs | {"hidden": inputs["hidden"].detach().view(2, 3, 4, HIDDEN).requires_grad_()}
    cube["labels"] = inputs["labels"].view(2, 3, 4).to(torch.int32)
    loss, *gradients = run(linear_cross_entropy, cube, reduction="none", tile_rows=50, chunk_rows=5)
    assert loss.shape == (2, 3, 4)
    assert gradients[0].shape == (2, 3, 4, HIDDEN)
    assert_close([loss.flatten(), gradients[0].flatten(0, 2), *gradients[1:]], want)


@pytest.mark.parametrize("num_items", [17, torch.tensor(17), torch.tensor(17.0)], ids=str)
def test_num_items_replaces_the_count(num_items: int | Tensor) -> None:
    inputs = make(40, 257)
    assert_close(
        run(linear_cross_entropy, inputs, num_items=num_items), run(oracle, inputs, torch.float64, num_items=17)
    )


def test_no_label_at_all() -> None:
    inputs = make(9, 257)
    inputs["labels"] = torch.full((9,), -100)
    for options, value in (({"reduction": "sum"}, 0.0), ({"num_items": 4}, 0.0), ({}, float("nan"))):
        loss, *gradients = run(linear_cross_entropy, inputs, **options)
        assert loss.item() == value or (loss.isnan() and value != value)
        assert all(gradient.count_nonzero() == 0 for gradient in gradients)
    assert linear_cross_entropy(torch.zeros(0, 4), torch.zeros(5, 4), torch.zeros(0).long(), reduction="sum") == 0


def test_masked_vocabulary_and_non_finite_logits() -> None:
    """A bias of -inf takes an id out, even if a whole tile is out; NaN is not hidden."""
    inputs = make(11, 257)
    inputs["labels"][inputs["labels"] < 64] = 100
    with torch.no_grad():
        inputs["bias"][:33] = -float("inf")
    assert_close(run(linear_cross_entropy, inputs, tile_rows=16), run(oracle, inputs, torch.float64))
    with torch.no_grad():
        inputs["bias"][200] = float("nan")
    assert linear_cross_entropy(**inputs).isnan()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bf16_loss_is_fp32_and_gradients_within_rounding(softcap: float | None) -> None:
    inputs = make(257, 1003, torch.bfloat16)
    got = run(linear_cross_entropy, inputs, softcap=softcap, tile_rows=128, chunk_rows=64)
    exact = run(oracle, inputs, torch.float64, softcap=softcap)
    assert got[0].dtype == torch.float32
    assert [gradient.dtype for gradient in got[1:]] == [torch.bfloat16] * 3
    assert abs(got[0].item() - exact[0].item()) < 1e-3

    def as_transformers(labels: Tensor, **leaves: Any) -> Tensor:
        logits = functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return functional.cross_entropy(logits.float(), labels)

    plain = run(as_transformers, inputs)
    assert abs(got[0] - plain[0]) < 1e-5
    for ours, theirs, want in zip(got[1:], plain[1:], exact[1:], strict=True):
        assert error(ours, want) < max(2**-8, 1.2 * error(theirs, want))


def test_autocast_computes_in_16_bits_and_returns_fp32_gradients() -> None:
    inputs = make(65, 257)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(linear_cross_entropy, inputs, tile_rows=64, chunk_rows=32)

    def as_transformers(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional.linear(hidden, weight, bias).float(), labels)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = run(as_transformers, inputs)
    assert all(tensor.dtype == torch.float32 for tensor in got)
    assert abs(got[0] - want[0]) < 1e-5
    assert_close(got[1:], want[1:], 2**-7)


@pytest.mark.parametrize("frozen", list(itertools.combinations(("hidden", "weight", "bias"), 2)), ids=str)
def test_frozen_inputs_cost_and_change_nothing(frozen: tuple[str, ...]) -> None:
    inputs = make(40, 257)
    full = dict(zip(("hidden", "weight", "bias"), run(linear_cross_entropy, inputs, tile_rows=64)[1:], strict=True))
    for name in frozen:
        inputs[name].requires_grad_(False)
    (got,) = run(linear_cross_entropy, inputs, tile_rows=64)[1:]
    assert torch.equal(got, full[({"hidden", "weight", "bias"} - set(frozen)).pop()])


def test_second_backward_and_upstream_gradient() -> None:
    inputs = make(40, 257)
    leaves = [inputs[name] for name in ("hidden", "weight", "bias")]
    loss = linear_cross_entropy(**inputs, tile_rows=64)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss * -3.0, leaves)
    for a, b in zip(once, again, strict=True):
        assert error(b, -3.0 * a) < 1e-6
    gradient = torch.autograd.grad(linear_cross_entropy(**inputs), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gradients_by_finite_differences() -> None:
    inputs = make(7, 19, torch.float64)
    labels = inputs.pop("labels")
    options: dict[str, Any] = {"softcap": 2.0, "scale": 0.5, "label_smoothing": 0.1, "tile_rows": 4, "chunk_rows": 3}
    function = lambda hidden, weight, bias: linear_cross_entropy(hidden, weight, labels, bias, **options)
    assert torch.autograd.gradcheck(function, tuple(inputs.values()), atol=1e-7)


class LargestTensor(TorchDispatchMode):
    """Most bytes of any one storage that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_tile(dtype: torch.dtype) -> None:
    inputs = make(512, 1003, dtype)
    inputs["bias"].requires_grad_(False)
    tile_rows, chunk_rows = 128, 64
    weight_bytes = 1003 * HIDDEN * dtype.itemsize
    with LargestTensor() as frozen:
        linear_cross_entropy(**{**inputs, "weight": inputs["weight"].detach()}, softcap=3.0, label_smoothing=0.1,
                             tile_rows=tile_rows, chunk_rows=chunk_rows).backward()  # fmt: skip
    states = 512 * HIDDEN * 4
    # The head's storage shows up through its views; it is the input, not an allocation.
    assert frozen.bytes <= max(states, tile_rows * chunk_rows * 4, weight_bytes)
    with LargestTensor() as trained:
        linear_cross_entropy(**inputs, tile_rows=tile_rows, chunk_rows=chunk_rows).backward()
    # No fp32 gradient of a bf16 head, and by far not 512 x 1003 logits.
    assert trained.bytes <= max(states, weight_bytes) < 512 * 1003 * dtype.itemsize
    with LargestTensor() as plain:
        oracle(**inputs)
    assert plain.bytes >= 512 * 1003 * dtype.itemsize


@pytest.mark.parametrize("label", [257, -1, -101, 100_000])
def test_a_label_beyond_the_vocabulary_is_named(label: int) -> None:
    """Report 94."""
    inputs = make(40, 257)
    inputs["labels"][[23, 31]] = label
    with pytest.raises(DataError, match=rf"label {label} at row 23 of 40, the head has 257 rows"):
        linear_cross_entropy(**inputs)


@pytest.mark.parametrize(("change", "message"), [
    ({"reduction": "max"}, "Unknown reduction"),
    ({"reduction": "sum", "num_items": 3}, "num_items needs a mean"),
    ({"softcap": 0.0}, "softcap must be positive"),
    ({"label_smoothing": 1.5}, "between 0 and 1"),
    ({"tile_rows": 0}, "tile_rows must be at least 1"),
    ({"chunk_rows": -2}, "chunk_rows must be at least 1"),
    ({"labels": torch.zeros(3).long()}, "Shapes do not fit"),
    ({"labels": torch.zeros(5)}, "labels must be integers"),
    ({"weight": torch.zeros(9, 3)}, "Shapes do not fit"),
    ({"bias": torch.zeros(8)}, "bias does not fit"),
    ({"weight": torch.zeros(9, 4, dtype=torch.bfloat16)}, "differ in dtype"),
])  # fmt: skip
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {"hidden": torch.zeros(5, 4), "weight": torch.zeros(9, 4), "labels": torch.zeros(5).long()}
    with pytest.raises(OptionError, match=message):
        linear_cross_entropy(**(inputs | change))


@pytest.mark.parametrize("num_items", [None, 11])
def test_causal_lm_loss_equals_transformers(num_items: int | None) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    inputs = make(2 * 9, 257)
    hidden, weight = inputs["hidden"].detach().view(2, 9, HIDDEN).requires_grad_(), inputs["weight"]
    labels = inputs["labels"].view(2, 9)
    ours = causal_lm_loss(hidden, weight, labels, num_items=num_items, tile_rows=100)
    theirs = loss_utils.ForCausalLMLoss(hidden @ weight.t(), labels, 257, num_items)
    assert_close(
        [ours, *torch.autograd.grad(ours, (hidden, weight))], [theirs, *torch.autograd.grad(theirs, (hidden, weight))]
    )
    rolled = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.equal(causal_lm_loss(hidden, weight, rolled, num_items=num_items, shift=False, tile_rows=100), ours)
