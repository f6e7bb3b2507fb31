"""Which samples in the batch are recorded individually."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from comgra_decl.spec.base import Int, SpecModel
from comgra_decl.spec.keep import checked_target


class CategoryInput(SpecModel):
    """Takes the categories from an input of the model: one integer for each sample."""

    input: Annotated[Int, Field(ge=0)] | str
    """The input, given by its position, by its name, or by its key if an input is a mapping."""


class CategoryFunction(SpecModel):
    """Takes the categories from a custom function; other keys are its keyword arguments.

    In recorded steps, it is called as `function(module, args, kwargs, output, **further)` after the
    outermost module has returned. It returns one label, a string or a number, for each sample, as a
    list, an array or a tensor. It must not draw random numbers. If it fails, the error is reported
    once, and the first samples in the batch are recorded.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: package.module.function."""


def _which(value: Any) -> str:
    if isinstance(value, str):
        return "literal[by]"
    function = isinstance(value, CategoryFunction)
    function = function or (isinstance(value, Mapping) and "_target_" in value)
    return "CategoryFunction" if function else "CategoryInput"


class SamplesSpec(SpecModel):
    """Which elements in the batch are recorded individually."""

    count: Annotated[Int, Field(ge=0, le=65536)] = 8
    """Number of samples; 0 records only aggregates over the batch.

    If a batch has more than 131,072 samples, they are taken from the first 4,096.
    """

    by: (
        Annotated[
            Annotated[Literal["target"], Tag("literal[by]")]
            | Annotated[CategoryInput, Tag("CategoryInput")]
            | Annotated[CategoryFunction, Tag("CategoryFunction")],
            Discriminator(_which),
        ]
        | None
    ) = None
    """How to determine the category of each sample. The same number of samples is recorded from
    each category, in batch order, and their labels are stored with them. null: record the first
    samples in the batch, without categories.

    `target`: the classes passed to the loss, one integer for each sample (as in `cross_entropy`).
    `{input: 1}`: an input of the model. `{_target_: package.module.function}`: a custom function.
    If a step has several batches, the categories come from the first one. `target` is not
    available in evaluations, because their records end before a loss is computed.
    """
