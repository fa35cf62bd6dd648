"""headrace.AdamW: an ordinary torch optimizer for a model that fits, with moments and exact masters in host memory.

The bf16 weight on the device is the upper half of the fp32 master; the signed remainder waits in host memory with the
moments (https://arxiv.org/abs/1711.05101). So a trained bf16 parameter takes 10 bytes of RAM and none of the device
beside its weight and gradient. An update brings weight and gradient to the host, one tensor at a time, and the weight
back. `headrace.wrap` takes torch.optim.AdamW and streams weights too; this class is for loops and Trainers without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import OptimizerError
from headrace.kernels import ops

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.Optimizer):
    """AdamW as in torch.optim, for bf16 and fp32 parameters on any device.

    `moments`: torch.float32, or torch.bfloat16 for half the memory. Raises OptimizerError for other dtypes.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, *, maximize: bool = False,
        moments: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        if moments not in (torch.float32, torch.bfloat16):
            raise OptimizerError("moments cannot have this dtype", f"got {moments}", "Use torch.float32 or bfloat16")
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            numbers = f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}"
            advice = "lr, eps and weight_decay are at least 0, betas lie in [0, 1)"
            raise OptimizerError("a hyper-parameter is out of range", numbers, advice)
        self.moments = moments
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = {str(p.dtype) for p in group["params"]} - {"torch.float32", "torch.bfloat16"}
        if wrong:
            self.param_groups.pop()
            raise OptimizerError("parameters cannot be trained in this dtype", f"got {', '.join(sorted(wrong))}",
                                 "Load the model in bfloat16 or float32")  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.grad is None or parameter.grad.is_sparse:
            raise OptimizerError("gradients are sparse", f"shape {tuple(parameter.shape)}", "Use dense embeddings")
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter, self.moments))
        state["step"] += 1
        weight, grad = _flat_on_host(parameter), _flat_on_host(parameter.grad)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        low = state["low"].view(-1) if "low" in state else None
        moments = (state[name].view(-1) for name in MOMENTS)
        ops.adamw_(
            weight, low, next(moments), next(moments), grad, lr=float(group["lr"]), beta1=beta1,
            beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], step=int(state["step"]),
            decoupled=True, maximize=group["maximize"],
        )  # fmt: skip
        if weight.data_ptr() != parameter.data_ptr():
            parameter.copy_(weight.view(parameter.shape))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, of torch.optim.AdamW or of a wrapped model's optimizer."""
        super().load_state_dict({**state_dict, "state": {}})  # which would cast moments to the weights' dtype
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(own, numbers, strict=True):
            saved = state_dict["state"].get(number)
            if saved:
                self.state[parameter] = self._adopted(parameter, saved)

    def _adopted(self, parameter: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        state = _new_state(parameter, self.moments)
        state["step"].fill_(float(saved["step"]))
        for name in (*MOMENTS, "low"):
            if name in state and name in saved:
                state[name].copy_(saved[name])
        if "low" in state and "master" in saved:
            weight = _flat_on_host(parameter)
            ops.split_master_(weight, state["low"].view(-1), saved["master"].to("cpu", torch.float32).reshape(-1))
            with torch.no_grad():
                parameter.copy_(weight.view(parameter.shape))
        return state


def _new_state(parameter: Tensor, moments: torch.dtype) -> dict[str, Tensor]:
    state = {"step": torch.zeros(())}
    state |= {name: torch.zeros(parameter.shape, dtype=moments) for name in MOMENTS}
    if parameter.dtype == torch.bfloat16:
        state["low"] = torch.zeros(parameter.shape, dtype=torch.int16)
    return state


def _flat_on_host(tensor: Tensor) -> Tensor:
    """The values in host memory, flat: the tensor's own memory where that is so already."""
    return tensor.detach().to("cpu").reshape(-1).contiguous()
