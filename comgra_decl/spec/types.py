"""Types of execution: labels of steps, from what the model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from comgra_decl.spec.base import Bool, Int, Number, SpecModel


def _strictly_ascending(bins: list[float]) -> list[float]:
    if any(a >= b for a, b in pairwise(bins)):
        raise ValueError(f"{bins} must ascend")
    return bins


def _dotted(path: str) -> str:
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} must name a function as package.module.function")
    return path


class ByInput(SpecModel):
    """A label from one input of the model: the size of a dimension, or a value."""

    input: Annotated[Int, Field(ge=0)] | str = 0
    """The input: its position, its name, or a key of a mapping that is an input."""

    shape: Int | None = None
    """Label by the size of this dimension (or the length of something that is no tensor)."""

    value: Bool = False
    """Label by the value: a tensor of one element, a number, a text or a truth value. A tensor on a
    device is waited for at each step; one on the CPU costs nothing."""

    bins: (
        Annotated[list[Number], Field(min_length=1), AfterValidator(_strictly_ascending)] | None
    ) = None
    """Limits between labels: [16, 64] gives "<16", "16-64" and ">=64"; null for each value its
    own label."""

    names: list[Annotated[str, Field(min_length=1)]] | None = None
    """Labels instead of those, one more than there are limits."""

    @model_validator(mode="after")
    def _consistent(self) -> ByInput:
        if (self.shape is None) == (not self.value):
            raise ValueError(
                "a label comes from one of both: the size of a dimension (shape: 1) or the value "
                "(value: true)"
            )
        if self.names is not None and self.bins is None:
            raise ValueError("names are those of the labels between limits, and there are no bins")
        if self.names is not None and len(self.names) != len(self.bins or []) + 1:
            expected = len(self.bins or []) + 1
            raise ValueError(f"{len(self.names)} names for {expected} labels")
        return self


class ByFunction(SpecModel):
    """A label from a function of yours; further keys are keyword arguments for it.

    It is called as `function(module, args, kwargs, **further)` with the outermost module and what
    it is called with, before each step's first call, and returns a text or a list of texts: the
    type and further tags. It must not draw random numbers. If it fails, which is said once, the
    type is that of the mode.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(_dotted)] = Field(alias="_target_")
    """The function: package.module.function."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The further keyword arguments."""
        return dict(self.__pydantic_extra__ or {})


def _which(value: Any) -> str:
    function = isinstance(value, ByFunction) or (isinstance(value, Mapping) and "_target_" in value)
    return "ByFunction" if function else "ByInput"


class TypesSpec(SpecModel):
    """What the type of a step is; `comgra.tag` gives it further labels."""

    by: (
        Annotated[
            Annotated[ByInput, Tag("ByInput")] | Annotated[ByFunction, Tag("ByFunction")],
            Discriminator(_which),
        ]
        | None
    ) = None
    """Where the type comes from: an input or a function. null: the first tag of the step, otherwise
    its mode, train. Evaluation is always of type eval, whatever tags the program gives it."""
