"""Products with narrow matrices by Triton, at awkward sizes. Needs one CUDA GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from headrace.kernels import low_rank, ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = [(1, 33, 17), (7, 1, 300), (513, 129, 64), (2049, 4097, 130), (8192, 3584, 512)]
RANKS = [1, 8, 16, 20, 33, 128, 200]


@pytest.fixture(autouse=True)
def triton_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("HEADRACE_KERNELS", raising=False)
    assert ops.backend_name("cuda") == "triton", ops.fallback_reason("cuda")


def assert_near(found: Tensor, exact: Tensor, tolerance: float) -> None:
    """Relative L2 distance from the result in double precision."""
    assert found.shape == exact.shape
    assert float((found.double() - exact).norm()) <= tolerance * max(float(exact.norm()), 1e-30)


@pytest.mark.parametrize("r", RANKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(shape: tuple[int, int, int], r: int, dtype: torch.dtype) -> None:
    """As near to exact ones as fp32 is, whatever the strides of the narrow matrices, with the same bits each time."""
    m, k, n = shape
    torch.manual_seed(m + r)
    x, g = torch.randn(m, k, device="cuda").to(dtype), torch.randn(m, n + 3, device="cuda").to(dtype)[:, 1:-2]
    a, b, y = torch.randn(r, k, device="cuda"), torch.randn(n, r, device="cuda"), torch.randn(m, r, device="cuda")
    for _ in range(2):
        found = low_rank.narrow_product(x, a.t(), 0.3)
        assert torch.equal(found, low_rank.narrow_product(x, a.t(), 0.3))
        assert_near(found, 0.3 * (x.double() @ a.double().t()), 1e-5)
        assert_near(low_rank.narrow_product(g, b), g.double() @ b.double(), 1e-5)
    added = low_rank.add_narrow(g, y, b.t(), dtype, 0.7)
    exact = g.double() + 0.7 * (y.double() @ b.double().t())
    assert added.dtype == dtype
    assert_near(added, exact, 3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert_near(low_rank.add_narrow(None, y, a, torch.float32), y.double() @ a.double(), 1e-5)
    assert_near(low_rank.add_narrow(g, y, b.t(), torch.float32, 0.7), exact, 1e-5)
    z = torch.randn(m, r, device="cuda")
    for _ in range(3):  # compiled, launched, launched by addresses
        a_grad, b_grad = low_rank.adapter_grads(x, y, g, z, 0.9)
        assert_near(a_grad, z.double().t() @ x.double(), 1e-5)
        assert_near(b_grad, 0.9 * (g.double().t() @ y.double()), 1e-5)
        again = low_rank.adapter_grads(x, y, g, z, 0.9)
        assert torch.equal(a_grad, again[0]) and torch.equal(b_grad, again[1])
    for left, right in ((y, x), (x, y), (g, y)):
        found = low_rank.transposed_product(left, right, 0.9)
        assert torch.equal(found, low_rank.transposed_product(left, right, 0.9)) and found.is_contiguous()
        assert_near(found, 0.9 * (left.double().t() @ right.double()), 1e-5)
    assert not low_rank._unusable


def test_rows_in_more_dimensions_and_anywhere() -> None:
    """As the same rows in a matrix; also where they do not follow each other or begin at odd places."""
    torch.manual_seed(0)
    x = torch.randn(40, 3, 7, 96, device="cuda").bfloat16()[:, :, :, 5:-2].transpose(0, 2)
    a, base = torch.randn(16, 89, device="cuda"), torch.randn(7, 3, 40, 130, device="cuda").bfloat16()
    b, rows = torch.randn(130, 16, device="cuda"), x.reshape(-1, 89)
    y = low_rank.narrow_product(x, a.t(), 0.5)
    assert y.shape == (7, 3, 40, 16) and torch.equal(y.view(-1, 16), low_rank.narrow_product(rows, a.t(), 0.5))
    added = low_rank.add_narrow(base, y, b.t(), torch.bfloat16, 2.0)
    assert added.shape == base.shape
    assert_near(added, base.double() + 2 * (y.double() @ b.double().t()), 3e-3)
    narrow = torch.randn_like(y)
    found = low_rank.adapter_grads(x, y, base, narrow, 0.5)
    expected = low_rank.adapter_grads(rows, y.view(-1, 16), base.view(-1, 130), narrow.view(-1, 16), 0.5)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not low_rank._unusable


def test_launches_follow_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Triton takes addresses, as `Launch` hands them over."""
    from headrace.kernels.triton import launch

    monkeypatch.setattr(launch, "note_fallback", lambda device, reason: pytest.fail(reason))
    x, a = torch.zeros(2048, 512, device="cuda").bfloat16(), torch.ones(16, 512, device="cuda")
    for _ in range(3):
        low_rank.narrow_product(x, a.t())
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(1)
        y = low_rank.narrow_product(x, a.t())
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 512))


@pytest.mark.parametrize("r", [1, 16, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_check_finds_them_right(r: int, dtype: torch.dtype) -> None:
    assert low_rank.check(torch.device("cuda", 0), 3584, 18944, r, dtype) == ""


def test_a_check_finds_them_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch then computes, and the reason is told."""
    from headrace.kernels.triton import low_rank as by_triton

    monkeypatch.setattr(low_rank, "_unusable", [])
    right = by_triton.transposed_product
    monkeypatch.setattr(by_triton, "transposed_product", lambda *given: right(*given).mul_(1.001))
    told = low_rank.check(torch.device("cuda", 0), 100, 200, 8, torch.bfloat16)
    assert "transposed_product of" in told and low_rank._unusable == [told]


def test_no_copy_of_a_wide_matrix_is_made() -> None:
    x, a = torch.randn(4096, 4096, device="cuda").bfloat16(), torch.randn(16, 4096, device="cuda")
    low_rank.narrow_product(x, a.t())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = low_rank.narrow_product(x, a.t())
    low_rank.transposed_product(y, x)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes / 4


@pytest.mark.parametrize("backend", ["", "inductor", "lower"])
def test_adapted_layers_follow_peft(backend: str) -> None:
    """Results and gradients of a layer in bf16 with an adapter in fp32, within the rounding of bf16."""
    peft = pytest.importorskip("peft")
    from headrace.base.events import EventLog
    from headrace.model.compiled import lower
    from headrace.model.lora import fuse

    torch.manual_seed(0)
    holder = torch.nn.Sequential(torch.nn.Linear(768, 1000)).cuda().bfloat16()
    config = peft.LoraConfig(r=16, target_modules=["0"], init_lora_weights=False)
    layer = peft.get_peft_model(holder, config).base_model.model[0]
    x, grad = torch.randn(4, 300, 768, device="cuda").bfloat16(), torch.randn(4, 300, 1000, device="cuda").bfloat16()
    sides = []
    for fused in (False, True):
        if fused:
            fuse([layer], torch.device("cuda", 0), EventLog(), [])
        own = x.clone().requires_grad_()
        call = layer
        if fused and backend:
            torch.compiler.reset()
            call = torch.compile(layer, fullgraph=True, backend=lower if backend == "lower" else backend)
        out = call(own)
        out.backward(grad)
        sides.append([out.detach(), own.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad])
        layer.zero_grad()
    for found, expected, tolerance in zip(sides[1], sides[0], (3e-3, 5e-3, 1e-5, 1e-5), strict=True):
        assert_near(found, expected.double(), tolerance)


def test_an_adapted_head_follows_peft() -> None:
    """A base in bf16, an adapter in fp32 on its head, tokens without labels: the loss, and gradients as near to exact
    ones as peft's on the resident model."""
    pytest.importorskip("peft")
    import headrace
    from adapted import lora
    from against_plain import adamw, batch, gradients, llama
    from headrace.executor.taken import TakenHeadCall

    model = lora(llama(2, torch.bfloat16, vocab_size=5003), target_modules=["q_proj", "lm_head"])
    exact, plain = copy.deepcopy(model).cuda().double(), copy.deepcopy(model).cuda()
    ids = batch(3, 40, 1, 5003).cuda()
    labels = ids.clone()
    labels[0, 3:17] = -100
    found = {}
    ours, driver = headrace.wrap(model, adamw(model), device="cuda", placement={"weights": "host"}, compile=False)
    with headrace.session(ours), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TakenHeadCall, "_logits", None)  # none are built
        for name, net in (("ours", ours), ("plain", plain), ("exact", exact)):
            loss = net(input_ids=ids, labels=labels).loss
            loss.backward()
            own = gradients(net) if name == "ours" else {n: p.grad for n, p in net.named_parameters()}
            found[name] = loss.item(), {n: g.double().cpu() for n, g in own.items() if g is not None}
        del driver
    assert found["ours"][0] == pytest.approx(found["plain"][0], rel=2e-3)
    for name, grad in found["exact"][1].items():
        distance = (found["plain"][1][name] - grad).norm()
        assert (found["ours"][1][name] - grad).norm() <= 1.3 * distance + 2e-3 * grad.norm(), name
