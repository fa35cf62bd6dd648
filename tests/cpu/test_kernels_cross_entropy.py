"""What the kernels of the tiled cross-entropy refuse, and how many tokens they take at a time where torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.base.errors import OptionError
from headrace.kernels import ops
from headrace.loss.tiled import rows_at_once

PLAIN: dict[str, Any] = {"scale": None, "softcap": None, "upcast_first": False}


@pytest.mark.parametrize(("change", "message"), [
    ({"logits": torch.zeros(3, 10)[:, :5]}, "`logits`.*strides"),
    ({"logits": torch.zeros(15)}, "`logits`.*contiguous floating-point matrix"),
    ({"logits": torch.zeros(3, 5, dtype=torch.int32)}, "`logits`.*int32"),
    ({"logits": torch.zeros(3, 5, dtype=torch.float64)}, "`log_sum_exp`.*float32.*wanted: one contiguous float64"),
    ({"labels": torch.zeros(3, dtype=torch.int32)}, "`labels`.*int32.*int64"),
    ({"labels": torch.zeros(4, dtype=torch.int64)}, "`labels`.*3 rows"),
    ({"log_sum_exp": torch.zeros(3, dtype=torch.bfloat16)}, "`log_sum_exp`.*bfloat16.*float32"),
    ({"row_grad": torch.ones(()).expand(3)}, "`row_grad`.*strides"),
    ({"row_grad": torch.zeros(3, device="meta")}, "`row_grad`.*device meta"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"logits": torch.zeros(3, 5), "labels": torch.zeros(3, dtype=torch.int64), "start": 0,
                 "log_sum_exp": torch.zeros(3), "row_grad": torch.zeros(3)}  # fmt: skip
    ops.logit_gradient_(**arguments, vocab=5, label_smoothing=0.0, **PLAIN)
    with pytest.raises(OptionError, match=message):
        ops.logit_gradient_(**(arguments | change), vocab=5, label_smoothing=0.0, **PLAIN)


def test_running_sums_must_have_one_number_per_row() -> None:
    maximum, sums, logit = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    logits, labels = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(OptionError, match="`logit_sum`"):
        ops.fold_logits_(maximum, sums, logit, torch.zeros(2), logits, labels, 0, **PLAIN)
    assert sums.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plain_torch_takes_as_many_tokens_as_logits_allow(dtype: torch.dtype) -> None:
    hidden = torch.empty(1, 64, dtype=dtype)
    assert ops.logit_bytes(hidden.device, dtype) == 8
    assert rows_at_once(1 << 25, 37_984, hidden) == (1 << 25) // 37_984
    assert rows_at_once(100, 1000, hidden) == 1
