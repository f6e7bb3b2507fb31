"""Which modules are traced, and what of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.globs import compile_glob, compile_name

CaptureName = Literal["output", "output_grad", "parameter", "parameter_grad"]
"""What can be captured of a module."""


def _checked_glob(pattern: str) -> str:
    compile_glob(pattern)
    return pattern


def _checked_name(pattern: str) -> str:
    compile_name(pattern)
    return pattern


def _listed(value: Any) -> Any:
    """One thing where a list is expected is a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _as_selector(value: Any) -> Any:
    return value if isinstance(value, (Mapping, SpecModel)) else {"path": value}


Glob = Annotated[str, AfterValidator(_checked_glob)]
ClassName = Annotated[str, AfterValidator(_checked_name)]
Globs = Annotated[list[Glob], BeforeValidator(_listed)]


class Selector(SpecModel):
    """Modules that are at one of the paths and are one of the classes."""

    path: Globs = []
    """Globs over module paths: `*` is one level, `**` any number. None means any path."""

    class_: Annotated[list[ClassName], BeforeValidator(_listed)] = Field([], alias="class")
    """Names of the module's class or of one it derives from; globs. None means any class."""

    @model_validator(mode="after")
    def _says_something(self) -> Selector:
        if not self.path and not self.class_:
            raise ValueError("names neither a path nor a class; write '**' for every module")
        return self


def _checked_batch_dim(value: Any) -> Any:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "auto" or integer:
        return value
    raise ValueError(f"{value!r} is not 'auto', a dimension such as 0, or null for no batch")


class NodeSpec(SpecModel):
    """One entry of `nodes`. Later entries refine earlier ones.

    What entries capture of the same module adds up, `values` too; `batch_dim` is that of the last
    entry in which it is not `auto`.
    """

    select: Annotated[
        list[Annotated[Selector, BeforeValidator(_as_selector)]], BeforeValidator(_listed)
    ] = Field(min_length=1)
    """A glob over module paths, `{path: ..., class: ...}`, or a list of these (any of them)."""

    capture: Annotated[list[CaptureName], BeforeValidator(_listed)] = Field(
        ["output", "output_grad"], min_length=1
    )
    """What to record of each selected module."""

    values: Bool = False
    """Whether the recorded samples are kept as they are, beside their statistics."""

    exclude: Globs = []
    """Globs over module paths that this entry leaves out."""

    batch_dim: Annotated[int | Literal["auto"] | None, BeforeValidator(_checked_batch_dim)] = "auto"
    """The dimension of the batch; `auto` finds it from the data, null says that there is none."""
