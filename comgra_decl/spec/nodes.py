"""Which modules to trace, and what to capture from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.spec.axes import AxisNames
from comgra_decl.spec.base import Bool, SpecModel
from comgra_decl.spec.functions import (
    FUNCTION_CAPTURES,
    AttentionSpec,
    FunctionName,
    SplitSpec,
)
from comgra_decl.spec.globs import compile_glob, compile_name, compile_text
from comgra_decl.spec.images import ImageSpec

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
"""What can be captured from a module."""


def _checked_glob(pattern: str) -> str:
    if not pattern:
        raise ValueError(
            "'' matches no module; write '**' for all, or {class: ...} for the outermost"
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
    """Compile a regular expression over whole module paths.

    Raises:
        ValueError: invalid regular expression; the message says where and why.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at character {error.pos + 1}"
        raise ValueError(f"invalid regular expression {pattern!r}: {error.msg}{where}") from None


def _checked_regex(pattern: str) -> str:
    if not pattern:
        raise ValueError("a regular expression must not be empty; '.*' matches every module")
    compile_regex(pattern)
    return pattern


def listed(value: Any) -> Any:
    """Wrap a single value in a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _as_selector(value: Any) -> Any:
    return value if isinstance(value, (Mapping, SpecModel)) else {"path": value}


Glob = Annotated[str, AfterValidator(_checked_glob)]
Path = Annotated[str, AfterValidator(_checked_path)]
ClassName = Annotated[str, AfterValidator(_checked_name)]
Regex = Annotated[str, AfterValidator(_checked_regex)]
AnnotationName = Annotated[str, AfterValidator(_checked_annotation)]
Globs = Annotated[list[Glob], BeforeValidator(listed)]


_CALLS = ("function", "within")


class Selector(SpecModel):
    """Selects modules that match every given key. A list matches if any of its patterns does."""

    path: Globs = []
    """Globs over module paths: `*` matches one level, `**` any number. Empty means any path."""

    class_: Annotated[list[ClassName], BeforeValidator(listed)] = Field([], alias="class")
    """Globs over the names of the module's class and its base classes. Empty means any class."""

    regex: Annotated[list[Regex], BeforeValidator(listed)] = []
    """Regular expressions that match whole module paths, such as `blocks\\.[0-3]\\..*`."""

    annotation: Annotated[list[AnnotationName], BeforeValidator(listed)] = []
    """Globs over the names given by `@comgra.node` or `comgra.node(tensor, name)`."""

    function: Annotated[list[FunctionName], BeforeValidator(listed)] = []
    """Dotted names of functions whose calls are recorded: `torch.softmax`, `F.relu`, or functions
    of your own. A torch function and the tensor method of the same name are treated as the same
    function. Selects calls, not modules."""

    within: Annotated[list[Path], BeforeValidator(listed)] = []
    """Globs over module paths. Only calls made inside a matching module are selected, and their
    nodes are named after that module; `""` is the outermost module. If empty, calls anywhere are
    selected, and their nodes are named after the innermost running module."""

    @model_validator(mode="after")
    def _means_calls_or_modules(self) -> Selector:
        if self.within and not self.function:
            raise ValueError("'within' requires 'function', which is missing")
        others = [key for key in self.model_dump(exclude_defaults=True) if key not in _CALLS]
        if self.function and others:
            raise ValueError(
                f"'function' cannot be combined with {others[0]!r}, only with 'within'"
            )
        return self

    @model_validator(mode="after")
    def _selects_something(self) -> Selector:
        if self.function:
            return self
        if not (self.path or self.class_ or self.regex or self.annotation):
            raise ValueError(
                "needs a path, regex, class or annotation; write '**' for every module"
            )
        return self


Selectors = Annotated[
    list[Annotated[Selector, BeforeValidator(_as_selector)]], BeforeValidator(listed)
]


def _checked_batch_dim(value: Any) -> Any:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if value is None or value == "auto" or integer:
        return value
    raise ValueError(f"{value!r} must be 'auto', a dimension such as 0, or null (no batch dim)")


class NodeSpec(SpecModel):
    """One entry of `nodes`. Later entries refine earlier ones.

    If several entries select the same module, their `capture` lists and `values` are combined.
    `batch_dim` comes from the last entry that sets it.
    """

    select: Selectors = Field(min_length=1)
    """A glob over module paths, a mapping (`{path: ..., class: ...}`, `{regex: ...}`, `{annotation:
    ...}`), or a list of these, any of which may match."""

    capture: Annotated[list[CaptureName], BeforeValidator(listed)] = Field(
        ["output", "output_grad"], min_length=1
    )
    """What to record for each selected module.

    `output`, `input`: the tensors that the module returns and receives. `output_grad`,
    `input_grad`: the gradients of the loss with respect to those tensors, summed over all their
    uses. `parameter`: the value used by the forward pass. `parameter_grad`: the gradient used by
    the optimizer (accumulated, unscaled, clipped). `parameter_grad_raw`: the gradient after the
    backward pass and, if there are several passes, the contribution of each. `update`: the
    change made by the optimizer. `buffer`: the value before the forward pass. `optimizer_state`:
    moments and other state after the optimizer step.
    """

    values: Bool = False
    """Whether to keep the values of the recorded samples, in addition to their statistics."""

    exclude: Selectors = []
    """Modules to omit from this entry: globs over module paths, or mappings as in `select`."""

    batch_dim: Annotated[int | Literal["auto"] | None, BeforeValidator(_checked_batch_dim)] = "auto"
    """The batch dimension; `auto` infers it from the data, null means there is none."""

    axes: Annotated[AxisNames, BeforeValidator(listed)] | None = None
    """Names of the dims of outputs and inputs, without the batch dim, such as `[head, query, key]`.
    They determine how the viewer draws the values. If this is null, or a tensor has a different
    number of dims, names are derived from the module class and the shape.
    """

    image: ImageSpec | None = None
    """Outputs and inputs with the dims [channels, height, width] are normalised images, which the
    viewer shows in their original colours: {mean: [0.485, 0.456, 0.406], std: [0.229, 0.224,
    0.225]}. The inputs of the model are shown as the last entry with this key says, whatever it
    selects.
    """

    split: SplitSpec | None = None
    """Splits captured tensors into additional roles, one per head, token or expert."""

    attention: AttentionSpec | None = None
    """Records the weights of fused attention, if the selected modules use it."""

    optional: Bool = False
    """Whether patterns may match nothing, and functions may never be called, without a warning. If
    no optional function at all is called, there is one warning.
    """

    @model_validator(mode="after")
    def _captures_what_calls_have(self) -> NodeSpec:
        wrong = [name for name in self.capture if name not in FUNCTION_CAPTURES]
        if wrong and all(selector.function for selector in self.select):
            there = ", ".join(FUNCTION_CAPTURES)
            raise ValueError(f"a function call has no {wrong[0]!r}; it has {there}")
        return self
