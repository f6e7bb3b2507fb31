"""Types of execution: labels of steps, derived from the model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from comgra_decl.spec.base import Bool, Int, Number, SpecModel


def _strictly_ascending(bins: list[float]) -> list[float]:
    if any(a >= b for a, b in pairwise(bins)):
        raise ValueError(f"{bins} must be strictly ascending")
    return bins


def _dotted(path: str) -> str:
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{path!r} must name a function as package.module.function")
    return path


class ByInput(SpecModel):
    """Derives the label from an input of the model: the size of a dimension, or a value."""

    input: Annotated[Int, Field(ge=0)] | str = 0
    """The input, given by its position, by its name, or by its key if an input is a mapping."""

    shape: Int | None = None
    """The dimension to use; its size is the label. If the input is not a tensor, its length is the
    label.
    """

    value: Bool = False
    """Whether to use the value as the label. It must be a tensor with one element, a number, a
    string or a boolean. If the tensor is on a device, every step waits for the device; if it is on
    the CPU, there is no wait."""

    bins: (
        Annotated[list[Number], Field(min_length=1), AfterValidator(_strictly_ascending)] | None
    ) = None
    """Boundaries between labels: [16, 64] results in "<16", "16-64" and ">=64"; with null, each
    value is a separate label.
    """

    names: list[Annotated[str, Field(min_length=1)]] | None = None
    """Labels of the bins. There is one more bin than there are boundaries."""

    @model_validator(mode="after")
    def _consistent(self) -> ByInput:
        if (self.shape is None) == (not self.value):
            raise ValueError(
                "a label needs exactly one source: the size of a dimension (shape: 1) or the value "
                "(value: true)"
            )
        if self.names is not None and self.bins is None:
            raise ValueError("names label the bins, but there are no bins")
        if self.names is not None and len(self.names) != len(self.bins or []) + 1:
            expected = len(self.bins or []) + 1
            raise ValueError(f"{len(self.names)} names for {expected} labels")
        return self


class ByFunction(SpecModel):
    """Derives the label from a custom function; other keys are passed to it as keyword arguments.

    It is called as `function(module, args, kwargs, **further)` before the first call in each step,
    with the outermost module and its arguments. It returns the type as a string, or a list of
    strings: the type, followed by tags. It must not draw random numbers. If it fails, the error is
    reported once, and the mode is used as the type.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(_dotted)] = Field(alias="_target_")
    """The function: package.module.function."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments that are passed to the function."""
        return dict(self.__pydantic_extra__ or {})


def _which(value: Any) -> str:
    function = isinstance(value, ByFunction) or (isinstance(value, Mapping) and "_target_" in value)
    return "ByFunction" if function else "ByInput"


class TypesSpec(SpecModel):
    """How to determine the type of a step; `comgra.tag` adds further labels."""

    by: (
        Annotated[
            Annotated[ByInput, Tag("ByInput")] | Annotated[ByFunction, Tag("ByFunction")],
            Discriminator(_which),
        ]
        | None
    ) = None
    """The source of the type: an input or a function. null: the first tag of the step, or train if
    it has no tags. Evaluations always have the type eval, regardless of tags."""
