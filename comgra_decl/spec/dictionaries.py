"""Dictionaries: sparse autoencoders and transcoders whose features are read in a probe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.keep import checked_target
from comgra_decl.spec.nodes import Selectors


class DictionaryFunction(SpecModel):
    """Gets a dictionary from a custom function; other keys are its keyword arguments.

    The function is called once, at the first record. It returns an object with the methods
    `encode`, which returns the features of a tensor, and `decode`, which returns the tensor that
    features describe.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: package.module.function."""


class DictionaryPlace(SpecModel):
    """Where a dictionary belongs, and what happens if its features are changed."""

    select: Selectors = Field(min_length=1)
    """The module whose output the features describe: a glob over module paths, or a mapping, as in
    `nodes`. It must select a single module."""

    role: Annotated[str, Field(min_length=1)] = "output"
    """Which output, such as `output[1]`; `output` is the first floating-point one."""

    reads: Literal["output", "input"] = "output"
    """What is encoded: the output itself, as by a sparse autoencoder, or the module's first
    floating-point input, as by a transcoder."""

    keep_error: Bool = True
    """What the module returns if features are changed. true: its own output plus the difference
    that the change makes in what is decoded, so that the part of the output that the features do
    not describe stays as it is. false: what is decoded from the changed features."""


class DictionarySpec(DictionaryPlace):
    """A sparse autoencoder or transcoder, whose features become a module of the probe's copy.

    Its path is that of the selected module, a dot, and the name of the dictionary. Interventions
    may select it.
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    load: DictionaryFunction
    """The function that returns the dictionary: {_target_: package.module.function}."""
