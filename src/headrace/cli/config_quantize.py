"""The section `quantize:` of the configuration: how a frozen base is stored, in the fields of the precision map."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from headrace.base.errors import OptionError
from headrace.spec.codecs import codec_named
from headrace.spec.precision import KEPT, SENSITIVE, PrecisionMap

AUTO = "auto"
"""In place of a codec, or of a tier: wrap chooses one, if the run needs one."""


def _codec(text: str, *others: str) -> str:
    if text in others:
        return text
    try:
        return str(codec_named(text))
    except OptionError as error:
        raise ValueError(f"is refused: {error.what}; {error.numbers}; or {others[0]}. {error.advice}") from None


Blocks = Annotated[int, Field(ge=0)]
Stored = Annotated[str, AfterValidator(lambda text: _codec(text, KEPT))]


class Quantize(BaseModel):
    """How the frozen matrices of the blocks are stored."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    codec: Annotated[str, AfterValidator(lambda text: _codec(text, AUTO))] = "nf4"
    """int8, int8/row, nf4, nf4+double, fp8 or nvfp4, with its block as in nf4/128; "auto": none when the run fits
    without one, else int8, else nf4."""
    keep_first: Blocks = 0
    """Blocks at the start that keep their format."""
    keep_last: Blocks = 0
    """Blocks at the end that do."""
    overrides: dict[str, Stored] = {}
    """Other codecs by pattern of names, such as {"*.down_proj.weight": int8}; bf16: the weight's own format. The last
    one that matches a weight decides."""
    sensitive: tuple[str, ...] = SENSITIVE
    """Patterns of names that keep their format."""
    prefer: Literal["quality", "speed"] = "quality"
    """What "auto" prefers when weights must stream: the most precise codec that fits, or the smallest."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"is {str(value).lower()}, which this option does not take")
        return value

    @field_validator("sensitive", mode="before")
    @classmethod
    def _one_pattern_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def asked(self) -> str | PrecisionMap:
        """As `headrace.load_model` takes it."""
        if self.codec == AUTO:
            return AUTO
        pairs = tuple(self.overrides.items())
        return PrecisionMap(self.codec, self.keep_first, self.keep_last, pairs, self.sensitive)
