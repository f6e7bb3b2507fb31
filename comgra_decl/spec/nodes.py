"""Which modules are traced, and what of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.functions import (
    FUNCTION_CAPTURES,
    AttentionSpec,
    FunctionName,
    SplitSpec,
)
from comgra_decl.spec.globs import compile_glob, compile_name, compile_text

CaptureName = Literal[
    "output",
    "output_grad",
    "input",
    "input_grad",
    "parameter",
    "parameter_grad",
    "parameter_grad_raw",
    "update",
    "buffer",
    "optimizer_state",
]
"""What can be captured of a module."""


def _checked_glob(pattern: str) -> str:
    if not pattern:
        raise ValueError(
            "'' names no module; write '**' for all, or {class: ...} for the outermost"
        )
    compile_glob(pattern)
    return pattern


def _checked_path(pattern: str) -> str:
    compile_glob(pattern)
    return pattern


def _checked_name(pattern: str) -> str:
    compile_name(pattern)
    return pattern


def _checked_annotation(pattern: str) -> str:
    compile_text(pattern)
    return pattern


@lru_cache(maxsize=256)
def compile_regex(pattern: str) -> re.Pattern[str]:
    """Returns a compiled regular expression over whole module paths.

    Raises:
        ValueError: it cannot be compiled; the message says where and why.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(f"{pattern!r} is no regular expression: {error.msg}{where}") from None


def _checked_regex(pattern: str) -> str:
    if not pattern:
        raise ValueError("'' is no regular expression; write '.*' for every module path")
    compile_regex(pattern)
    return pattern


def _listed(value: Any) -> Any:
    """One thing where a list is expected is a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _as_selector(value: Any) -> Any:
    return value if isinstance(value, (Mapping, SpecModel)) else {"path": value}


Glob = Annotated[str, AfterValidator(_checked_glob)]
Path = Annotated[str, AfterValidator(_checked_path)]
ClassName = Annotated[str, AfterValidator(_checked_name)]
Regex = Annotated[str, AfterValidator(_checked_regex)]
AnnotationName = Annotated[str, AfterValidator(_checked_annotation)]
Globs = Annotated[list[Glob], BeforeValidator(_listed)]


_CALLS = ("function", "within")


class Selector(SpecModel):
    """Modules to which everything applies that is said here; of each list, one must fit."""

    path: Globs = []
    """Globs over module paths: `*` is one level, `**` any number. None means any path."""

    class_: Annotated[list[ClassName], BeforeValidator(_listed)] = Field([], alias="class")
    """Names of the module's class or of one it derives from; globs. None means any class."""

    regex: Annotated[list[Regex], BeforeValidator(_listed)] = []
    """Regular expressions that fit whole module paths, such as `blocks\\.[0-3]\\..*`."""

    annotation: Annotated[list[AnnotationName], BeforeValidator(_listed)] = []
    """Names given by `@comgra.node` or `comgra.node(tensor, name)`; globs."""

    function: Annotated[list[FunctionName], BeforeValidator(_listed)] = []
    """Functions whose calls are recorded, by dotted names: `torch.softmax`, `F.relu`, your own. A
    torch function and the tensor method of the same name are one. Selects calls, not modules."""

    within: Annotated[list[Path], BeforeValidator(_listed)] = []
    """Globs over module paths: only calls made inside such a module, which names the node; `""` is
    the outermost one. None means anywhere, under the innermost module that is running."""

    @model_validator(mode="after")
    def _means_calls_or_modules(self) -> Selector:
        if self.within and not self.function:
            raise ValueError("'within' says where a 'function' is called; there is no 'function'")
        others = [key for key in self.model_dump(exclude_defaults=True) if key not in _CALLS]
        if self.function and others:
            raise ValueError(f"a 'function' is looked for 'within' modules, not by {others[0]!r}")
        return self

    @model_validator(mode="after")
    def _says_something(self) -> Selector:
        if self.function:
            return self
        if not (self.path or self.class_ or self.regex or self.annotation):
            raise ValueError(
                "names no path, regex, class or annotation; write '**' for every module"
            )
        return self


Selectors = Annotated[
    list[Annotated[Selector, BeforeValidator(_as_selector)]], BeforeValidator(_listed)
]


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

    select: Selectors = Field(min_length=1)
    """A glob over module paths, a mapping (`{path: ..., class: ...}`, `{regex: ...}`,
    `{annotation: ...}`), or a list of these (any of them)."""

    capture: Annotated[list[CaptureName], BeforeValidator(_listed)] = Field(
        ["output", "output_grad"], min_length=1
    )
    """What to record of each selected module.

    `output`, `input`: the tensors it returns and is given. `output_grad`, `input_grad`: the
    gradients of the loss with respect to them, over all their uses. `parameter`: as the forward
    pass used it. `parameter_grad`: as the optimizer used it (accumulated, unscaled, clipped).
    `parameter_grad_raw`: as backward left it, and the share of each backward where there are
    several. `update`: what the optimizer added to the parameter. `buffer`: as the forward pass
    found it. `optimizer_state`: moments and the like, as the optimizer left them.
    """

    values: Bool = False
    """Whether the recorded samples are kept as they are, beside their statistics."""

    exclude: Selectors = []
    """What this entry leaves out: globs over module paths or mappings, as in `select`."""

    batch_dim: Annotated[int | Literal["auto"] | None, BeforeValidator(_checked_batch_dim)] = "auto"
    """The dimension of the batch; `auto` finds it from the data, null says that there is none."""

    split: SplitSpec | None = None
    """Takes what is captured apart into further roles, one per head, token or expert."""

    attention: AttentionSpec | None = None
    """Makes the weights of fused attention visible, where the selected modules call it."""

    @model_validator(mode="after")
    def _captures_what_calls_have(self) -> NodeSpec:
        wrong = [name for name in self.capture if name not in FUNCTION_CAPTURES]
        if wrong and all(selector.function for selector in self.select):
            there = ", ".join(FUNCTION_CAPTURES)
            raise ValueError(f"a call of a function has no {wrong[0]!r}; there is {there}")
        return self
