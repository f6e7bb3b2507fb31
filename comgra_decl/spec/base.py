"""What all models of the spec share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# YAML has its own numbers and truth values; silently reading `every: true` as 1 hides a mistake.
Int = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class SpecModel(BaseModel):
    """A part of the spec: unknown keys are errors, values do not change once read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
