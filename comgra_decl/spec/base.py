"""Base types of all models in the spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# YAML has typed numbers and booleans; silently reading `every: true` as 1 would hide a mistake.
Int = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]


class SpecModel(BaseModel):
    """A part of the spec; immutable, and rejects unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
