"""The numbers of one optimizer update, worked out once in double precision and shared by every backend."""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict


class AdamSettings(TypedDict):
    """What `adam_scalars` must be told."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class AdamOptions(AdamSettings, total=False):
    """What `adam_scalars` takes, as keywords."""

    grad_scale: float
    decoupled: bool
    maximize: bool


class AdamScalars(NamedTuple):
    """Scalars of one Adam or AdamW update; kernels round each to fp32."""

    grad_scale: float
    """Factor on the gradient; negative when maximizing."""
    l2: float
    """Share of the weight added to the gradient (Adam's weight decay, 0 for AdamW)."""
    decay: float
    """Factor on the weight (AdamW's weight decay, 1 for Adam)."""
    beta1: float
    beta2: float
    share1: float
    """1 - beta1."""
    share2: float
    """1 - beta2."""
    inverse_root: float
    """1 / sqrt(1 - beta2 ** step)."""
    eps: float
    step_size: float
    """lr / (1 - beta1 ** step)."""


class InverseScalars(NamedTuple):
    """One over some of AdamScalars, infinite for 0: what takes an update back."""

    beta1: float
    beta2: float
    decay: float


class SgdScalars(NamedTuple):
    """Scalars of one SGD update; kernels round each number to fp32."""

    grad_scale: float
    """Factor on the gradient; negative when maximizing."""
    l2: float
    """Share of the weight added to the gradient (weight decay)."""
    momentum: float
    share: float
    """1 - dampening; 1 in the first update."""
    lr: float
    nesterov: bool
    first: bool
    """The momentum buffer holds nothing yet and is only written."""


def adam_scalars(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    grad_scale: float = 1.0, decoupled: bool = True, maximize: bool = False,
) -> AdamScalars:  # fmt: skip
    """Bias corrections of update number `step` (1-based) and everything else that does not depend on the element."""
    lr, beta1, beta2, weight_decay = float(lr), float(beta1), float(beta2), float(weight_decay)
    return AdamScalars(
        grad_scale=float(-grad_scale if maximize else grad_scale),
        l2=0.0 if decoupled else weight_decay,
        decay=1.0 - lr * weight_decay if decoupled else 1.0,
        beta1=beta1,
        beta2=beta2,
        share1=1.0 - beta1,
        share2=1.0 - beta2,
        inverse_root=1.0 / math.sqrt(1.0 - beta2**step),
        eps=float(eps),
        step_size=lr / (1.0 - beta1**step),
    )


def inverse_scalars(scalars: AdamScalars) -> InverseScalars:
    """The factors that undo those of `scalars`, but for rounding."""
    return InverseScalars(*(1.0 / x if x else math.inf for x in (scalars.beta1, scalars.beta2, scalars.decay)))


def sgd_scalars(
    lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool, first: bool,
    grad_scale: float, maximize: bool,
) -> SgdScalars:  # fmt: skip
    """As torch.optim.SGD: the first update copies the gradient into the buffer, undampened."""
    return SgdScalars(
        grad_scale=float(-grad_scale if maximize else grad_scale),
        l2=float(weight_decay),
        momentum=float(momentum),
        share=1.0 if first else 1.0 - float(dampening),
        lr=float(lr),
        nesterov=bool(nesterov),
        first=bool(first),
    )
