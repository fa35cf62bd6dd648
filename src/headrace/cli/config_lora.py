"""The section `lora:` of the configuration: adapters that are trained in place of the model, with peft."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

ALL = "all-linear"
"""All linear layers but the output head."""


class Lora(BaseModel):
    """Adapters beside a frozen model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    r: Annotated[int, Field(ge=1)] = 16
    """Rank: columns of each adapter's narrow matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What an adapter adds is multiplied by alpha / r; with rslora by alpha / sqrt(r)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which elements of an adapter's input are dropped."""
    targets: tuple[str, ...] = (ALL,)
    """Last names of the layers that get adapters, such as [q_proj, v_proj]; "all-linear": all but the output head."""
    parameters: tuple[str, ...] = ()
    """Last names of weights that are no layers and get adapters too: experts in one tensor, as in
    [mlp.experts.gate_up_proj]."""
    rslora: bool = False
    """Scale with the root of the rank (https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train the magnitude of each column as well (https://arxiv.org/abs/2402.09353)."""
    modules_to_save: tuple[str, ...] = ()
    """Last names of modules that are trained whole beside the adapters, and saved with them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the adapters; with bfloat16 exact float32 masters are kept beside them."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and info.field_name not in ("rslora", "dora"):
            raise ValueError(f"is {str(value).lower()}, which this option does not take")
        return value

    @field_validator("targets", "parameters", "modules_to_save", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("targets")
    @classmethod
    def _all_or_some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if ALL in value and len(value) > 1:
            raise ValueError(f"names layers beside {ALL}: give one of the two")
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _short_names(cls, value: Any) -> Any:
        return {"bf16": "bfloat16", "fp32": "float32"}.get(value, value) if isinstance(value, str) else value
