"""Interventions: a probe's samples, passed through the model with something changed in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from comgra_decl.errors import SpecError, did_you_mean, shown
from comgra_decl.records import INTERVENTION_PREFIX
from comgra_decl.spec.base import Bool, Int, Number, SpecModel
from comgra_decl.spec.keep import checked_target
from comgra_decl.spec.nodes import Selectors

NODE = "node"
"""The name of the axis of a sweep over the selected modules."""

KNOWN_PARTS = {"head": -1, "channel": 1, "position": 1, "token": 1, "feature": -1}
"""The dimension of each part that needs no `dim`."""

ATTENTION = "attention"
"""The role of attention patterns."""

PATTERN_PARTS = {"head": 1, "query": 2, "key": 3}
"""The dimension of each part of an attention pattern, which is [samples, heads, queries, keys]."""

OF_SEQUENCES = ("position", "token", "query", "key")
"""The parts that are positions of a sequence."""

KEY = "key"
"""The part of an attention pattern that contains all positions so far, also with a cache."""

_GRADIENTS = ("output_grad", "input_grad", "parameter_grad", "grad")

INTO = "into"
"""The name of the axis of a sweep over the receiving modules. Parts of their tensors have this
prefix and a dot, such as "into.head"."""

_RESERVED = (NODE, INTO, "step", "mean", "error", "sample")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else [value]


class PartSpec(SpecModel):
    """A dimension of a tensor whose parts are changed one by one, or only some of them."""

    dim: Int | None = None
    """The dimension, counted in the full tensor with its batch dimension; -1 is the last. null: the
    usual one, for the names head (-1), channel (1), position (1), token (1) and feature (-1)."""

    groups: Annotated[Int, Field(ge=1)] | None = None
    """Number of parts, each a group of neighbouring indices; all groups have the same size. null:
    each index is a part. For `head`, null means the number of heads that the module, or the
    module around it, has as its attribute `num_heads`, `n_heads`, `nhead`, `n_head` or
    `num_attention_heads`, or in its `config`."""

    only: list[Int] | None = None
    """The parts to change; negative numbers count from the end. null: all."""


def _as_part(value: Any) -> Any:
    if value is None:
        return {}
    if isinstance(value, (Mapping, SpecModel)):
        return value
    return {"only": _listed(value)}


def _checked_parts(parts: dict[str, PartSpec]) -> dict[str, PartSpec]:
    for name in parts:
        if name in _RESERVED or not name.isidentifier():
            raise ValueError(f"{name!r} cannot name a part; use a name such as head or position")
    return parts


Parts = Annotated[
    dict[str, Annotated[PartSpec, BeforeValidator(_as_part)]], AfterValidator(_checked_parts)
]


class CategoryDifference(SpecModel):
    """The mean over the samples of one category minus the mean over those of another.

    The values are those of the same tensor in the unchanged pass. A category is a label of the
    probe's samples.
    """

    difference: Annotated[list[Int | str], Field(min_length=2, max_length=2)]
    """The two categories: the first minus the second."""


class RecordedSpec(SpecModel):
    """A tensor in a record of another run, or of this run before it was resumed.

    Its values must have been stored. They are read once, before training.
    """

    run: Annotated[str, Field(min_length=1)]
    """The folder of the run; of a group, its newest run, except the one that is being recorded."""

    step: Int | None = None
    """The step; null: the last one."""

    type: Annotated[str, Field(min_length=1)] | None = None
    """The type of execution, such as `train` or `probe:eyes`; null: that of the intervention's own
    probe."""

    node: Annotated[str, Field(min_length=1)] | None = None
    """The node; null: the changed module."""

    role: Annotated[str, Field(min_length=1)] | None = None
    """The tensor of the node, as in `run.slots`; null: that of the changed tensor."""


class RecordedPatch(RecordedSpec):
    """The value of a tensor in a record, for each sample."""

    sample: Int | list[Int] | None = None
    """The number of the recorded sample whose value all samples receive, or a list with one for
    each sample. null: each sample receives that of the recorded sample with the same number."""


class RecordedMean(RecordedSpec):
    """The mean of a tensor over the recorded samples, or a difference of two means."""

    difference: Annotated[list[Int | str], Field(min_length=2, max_length=2)] | None = None
    """Two labels of recorded samples: the mean over those with the first minus the mean over those
    with the second. null: the mean over all samples."""


def _which_vector(value: Any) -> str:
    if isinstance(value, RecordedMean) or (isinstance(value, Mapping) and "run" in value):
        return "RecordedMean"
    if isinstance(value, (CategoryDifference, Mapping)):
        return "CategoryDifference"
    if isinstance(value, str):
        return "file"
    return "list" if isinstance(value, (list, tuple)) else "number"


Vector = Annotated[
    Annotated[Number, Tag("number")]
    | Annotated[list[Any], Tag("list")]
    | Annotated[str, Field(min_length=1), Tag("file")]
    | Annotated[CategoryDifference, Tag("CategoryDifference")]
    | Annotated[RecordedMean, Tag("RecordedMean")],
    Discriminator(_which_vector),
]
"""A number, a nested list of numbers, a .npy file, a difference of category means, or a mean of
another run."""


class NoiseChange(SpecModel):
    """Adds Gaussian noise, the same at every record and in every pass."""

    noise: Annotated[Number, Field(ge=0)]
    """Its standard deviation, as a multiple of the tensor's own in the unchanged pass."""

    seed: Annotated[Int, Field(ge=0)] = 0
    """The seed of the noise."""


class ScaleChange(SpecModel):
    """Multiplies the values."""

    scale: Number
    """The factor."""


class ClampChange(SpecModel):
    """Limits the values."""

    clamp: Annotated[list[Number | None], Field(min_length=2, max_length=2)]
    """The smallest and the largest value; null for no limit."""

    @model_validator(mode="after")
    def _limits_something(self) -> ClampChange:
        low, high = self.clamp
        if low is None and high is None:
            raise ValueError("clamp needs a smallest or a largest value")
        if low is not None and high is not None and low > high:
            raise ValueError(f"the smallest value, {low}, must not exceed the largest, {high}")
        return self


class AddChange(SpecModel):
    """Adds a steering vector, broadcast as numpy does, from the last dimension."""

    add: Vector
    """A number, a list, the path of a .npy file, {difference: [A, B]}, or a mean over recorded
    samples: {run: PATH, step: 400, difference: [A, B]}."""

    scale: Number = 1.0
    """The factor of what is added."""


def _checked_source(source: str) -> str:
    known = ("clean", "other")
    if source not in known and not source.endswith(".npy"):
        raise ValueError(
            f"{source!r} is not clean, other, the number of a sample, the path of a .npy file or "
            f"{{run: PATH, step: 400}}{did_you_mean(source, known)}"
        )
    return source


def _which_source(value: Any) -> str:
    if isinstance(value, (RecordedPatch, Mapping)):
        return "RecordedPatch"
    if isinstance(value, (list, tuple)):
        return "list"
    return "name" if isinstance(value, str) else "number"


class PatchChange(SpecModel):
    """Puts values of the unchanged pass, of a file, or of another run in place of the values."""

    patch: Annotated[
        Annotated[str, AfterValidator(_checked_source), Tag("name")]
        | Annotated[Int, Tag("number")]
        | Annotated[list[Int], Tag("list")]
        | Annotated[RecordedPatch, Tag("RecordedPatch")],
        Discriminator(_which_source),
    ]
    """`clean`: the sample's own value. `other`: that of the next sample; the last one receives that
    of the first. A number: that of this sample, for all samples. A list: for each sample, the
    sample whose value it receives. The path of a .npy file: an array of the tensor's shape, or one
    that can be broadcast to it. `{run: PATH, step: 400}`: the value in a record of another run."""


class ProjectionChange(SpecModel):
    """Removes the component along a direction: x - (x·v / v·v) v."""

    project_off: Vector
    """The direction: a list, the path of a .npy file, {difference: [A, B]}, or a mean over recorded
    samples: {run: PATH, step: 400, difference: [A, B]}."""

    dim: Int = -1
    """The dimension along which the direction lies, counted in the full tensor with its batch
    dimension; -1 is the last. A direction with several dimensions belongs to the last ones of the
    tensor, as in broadcasting, and is averaged over all of them except this one."""

    @model_validator(mode="after")
    def _has_a_direction(self) -> ProjectionChange:
        if isinstance(self.project_off, float):
            raise ValueError("project_off: a number is not a direction; write a list")
        return self


class FunctionChange(SpecModel):
    """Calls a custom function; other keys are its keyword arguments.

    It receives a copy of the tensor and returns one of the same shape.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: package.module.function."""


_KINDS = {
    "_target_": "FunctionChange",
    "noise": "NoiseChange",
    "add": "AddChange",
    "scale": "ScaleChange",
    "clamp": "ClampChange",
    "patch": "PatchChange",
    "project_off": "ProjectionChange",
}


def _which_change(value: Any) -> str | None:
    if isinstance(value, str):
        return "name" if value in ("zero", "mean") else None
    if isinstance(value, SpecModel):
        return type(value).__name__
    given = value if isinstance(value, Mapping) else {}
    return next((kind for key, kind in _KINDS.items() if key in given), None)


Change = Annotated[
    Annotated[Literal["zero", "mean"], Tag("name")]
    | Annotated[NoiseChange, Tag("NoiseChange")]
    | Annotated[ScaleChange, Tag("ScaleChange")]
    | Annotated[ClampChange, Tag("ClampChange")]
    | Annotated[AddChange, Tag("AddChange")]
    | Annotated[PatchChange, Tag("PatchChange")]
    | Annotated[ProjectionChange, Tag("ProjectionChange")]
    | Annotated[FunctionChange, Tag("FunctionChange")],
    Discriminator(
        _which_change,
        custom_error_type="change",
        custom_error_message=(
            "unknown change; choose zero, mean, {noise: 1.0}, {scale: 0.5}, {clamp: [0, 1]}, "
            "{add: ...}, {patch: clean}, {patch: other}, {project_off: ...} or "
            "{_target_: package.module.function}"
        ),
    ),
]
"""What is done to the selected tensors."""


class PlaceSpec(SpecModel):
    """Tensors of modules, and parts of them."""

    select: Selectors = Field(min_length=1)
    """The modules: globs over module paths, or mappings, as in `nodes`. If nothing matches, the
    program ends before training."""

    exclude: Selectors = []
    """Modules to omit."""

    role: Annotated[str, Field(min_length=1)] = "output"
    """The tensor of each module, by its role: `output`, `output[1]`, `input`, `input.mask`, or a
    parameter, such as `weight`; `parameter` for all of its own, which do not include a weight that
    weight norm or another parametrization computes; or `attention`, the weights [samples, heads,
    queries, keys] of the attention that is computed inside it. If a module returns or receives
    several tensors, `output` and `input` are the first floating-point one. A tied parameter changes
    wherever it is used."""

    iteration: Annotated[Int, Field(ge=0)] | None = None
    """Which call of a module in a pass, counted from 0; null: all."""

    parts: Parts = {}
    """The parts to change, under names of your choice: `{head: [3], position: [0, 1]}`, or `{unit:
    {dim: 2, only: [7]}}`. Everything else stays as it is. If there are several, only the elements
    that belong to all of them are changed."""

    batch_dim: Annotated[Int, Field(ge=0)] = 0
    """The dimension of the samples in the tensor: 1 for [time, samples, features]. Parts,
    directions and functions have the tensor with this dimension first."""

    @property
    def of_parameters(self) -> bool:
        """Whether the role is that of a parameter rather than of an input or output."""
        return not self.role.startswith(("output", "input")) and self.role != ATTENTION

    @property
    def known_parts(self) -> Mapping[str, int]:
        """The dimension of each part that needs no `dim`."""
        return PATTERN_PARTS if self.role == ATTENTION else KNOWN_PARTS

    @model_validator(mode="after")
    def _is_no_gradient(self) -> Self:
        if self.role in _GRADIENTS or self.role.endswith(".grad"):
            raise ValueError(
                f"role: {self.role!r} is a gradient; name the tensor, such as output or weight, "
                "and add `pass: grad`"
            )
        return self

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if self.batch_dim and (self.of_parameters or self.role == ATTENTION):
            raise ValueError(f"batch_dim: does not apply to the role {self.role!r}")
        return self

    @model_validator(mode="after")
    def _selects_modules(self) -> Self:
        if any(selector.function for selector in (*self.select, *self.exclude)):
            raise ValueError("select: calls of functions cannot be changed; select modules")
        return self

    @model_validator(mode="after")
    def _divides_values(self) -> Self:
        known = self.known_parts
        for name, part in self.parts.items():
            if part.dim is None and name not in known:
                raise ValueError(
                    f"parts: {name!r} needs a `dim`; only {', '.join(known)} have a usual "
                    f"dimension{did_you_mean(name, known)}"
                )
            if part.dim == 0 and not self.of_parameters:
                raise ValueError(f"parts.{name}: dimension 0 is that of the samples")
        return self


class ReceiverSpec(PlaceSpec):
    """The tensors through which a change may reach the rest of the model."""

    role: Annotated[str, Field(min_length=1)] = "input"
    """The tensor of each module: `input`, `input.mask`, `output` or `output[1]`. If a module
    receives or returns several tensors, `input` and `output` are the first floating-point one."""

    @model_validator(mode="after")
    def _receives_values(self) -> Self:
        if self.of_parameters or self.role == ATTENTION:
            raise ValueError(
                f"role: must be an input or output of a receiver, such as input, got {self.role!r}"
            )
        return self


def _as_receiver(value: Any) -> Any:
    if value is None or isinstance(value, SpecModel):
        return value
    whole = isinstance(value, Mapping) and {*value} & {*ReceiverSpec.model_fields}
    return value if whole else {"select": value}


class ChangeSpec(PlaceSpec):
    """One change: which tensors, which parts of them, and what is done."""

    do: Change
    """`zero`; `mean`: the mean over the samples in the unchanged pass; `{noise: 1.0}`, `{scale:
    0.5}`, `{clamp: [0, 1]}`, `{add: ...}`, `{patch: ...}`, `{project_off: ...}`, or `{_target_:
    package.module.function}`."""

    pass_: Literal["forward", "grad"] = Field("forward", alias="pass")
    """Whether the tensor itself is changed, or its gradient (`grad`). Gradients are those of
    `measure`, as a mean over the samples; `clean`, `mean` and the like are then gradients, too."""

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are changed rather than the tensors themselves."""
        return self.pass_ == "grad"

    @model_validator(mode="after")
    def _has_a_gradient(self) -> Self:
        if self.of_gradients and self.role == ATTENTION:
            raise ValueError(
                "pass: the gradient of an attention pattern cannot be changed; change that of the "
                "module's output"
            )
        return self

    @model_validator(mode="after")
    def _has_a_direction_of_values(self) -> Self:
        along = self.do.dim if isinstance(self.do, ProjectionChange) else None
        if along == 0 and not self.of_parameters:
            raise ValueError("do.dim: dimension 0 is that of the samples")
        return self

    @model_validator(mode="after")
    def _fits_parameters(self) -> Self:
        do = self.do
        needs_samples = do == "mean" or isinstance(do, PatchChange)
        if isinstance(do, (AddChange, ProjectionChange)):
            vector = do.add if isinstance(do, AddChange) else do.project_off
            needs_samples = isinstance(vector, (CategoryDifference, RecordedMean))
        if self.of_parameters and needs_samples:
            name = do if isinstance(do, str) else next(iter(do.model_dump()))
            raise ValueError(
                f"do: {name} needs samples, which the role {self.role!r} does not have"
            )
        return self


class DifferenceMeasure(SpecModel):
    """The difference between the outputs (logits) for two classes."""

    difference: Annotated[list[Int | list[Int]], Field(min_length=2, max_length=2)]
    """The two classes; each is a number, or a list with one number per sample."""


class FunctionMeasure(SpecModel):
    """Calls a custom function; other keys are its keyword arguments.

    It receives a copy of the model's output and returns one number per sample.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: package.module.function."""


def _which_measure(value: Any) -> str | None:
    if isinstance(value, SpecModel):
        return type(value).__name__
    if isinstance(value, Mapping):
        return "FunctionMeasure" if "_target_" in value else "DifferenceMeasure"
    return "name" if isinstance(value, str) else "class"


Measure = Annotated[
    Annotated[Literal["loss", "label", "top"], Tag("name")]
    | Annotated[Int, Field(ge=0), Tag("class")]
    | Annotated[DifferenceMeasure, Tag("DifferenceMeasure")]
    | Annotated[FunctionMeasure, Tag("FunctionMeasure")],
    Discriminator(_which_measure),
]
"""What an intervention changes in the end: one number per sample."""


class GradientMeasure(SpecModel):
    """The norm of a gradient: for an output or an input, that of each sample."""

    gradient: str
    """The module, by its path; "" is the model."""

    role: Annotated[str, Field(min_length=1)] = "output"
    """The tensor of the module: `output`, `input`, `output[1]`, or a parameter such as `weight`.
    A parameter has one gradient, and thus one norm, for all samples together."""

    of: Measure = "loss"
    """What the gradient is of, as a mean over the samples."""

    @property
    def of_parameters(self) -> bool:
        """Whether the role is that of a parameter rather than of an input or output."""
        return not self.role.startswith(("output", "input"))

    @model_validator(mode="after")
    def _names_a_tensor(self) -> Self:
        if self.role == ATTENTION or self.role in _GRADIENTS or self.role.endswith(".grad"):
            raise ValueError(f"role: must be an output, an input or a parameter, got {self.role!r}")
        return self


def _which_effect(value: Any) -> str | None:
    gradient = isinstance(value, Mapping) and "gradient" in value
    return "GradientMeasure" if gradient else _which_measure(value)


EffectMeasure = Annotated[
    Annotated[Literal["loss", "label", "top"], Tag("name")]
    | Annotated[Int, Field(ge=0), Tag("class")]
    | Annotated[DifferenceMeasure, Tag("DifferenceMeasure")]
    | Annotated[FunctionMeasure, Tag("FunctionMeasure")]
    | Annotated[GradientMeasure, Tag("GradientMeasure")],
    Discriminator(_which_effect),
]
"""A measure, or the norm of a gradient."""


@dataclass(frozen=True)
class Objective:
    """What gradients are of: the mean of a measure over the samples.

    Attributes:
        measure: the measure.
        position: the position that is measured, if a model returns several.
    """

    measure: Measure
    position: int


class InterventionSpec(ChangeSpec):
    """A probe's samples, passed through the copy of the model with something changed in it.

    It never affects the program. Without `sweep`, each record contains all tensors that `nodes`
    select, as those of the probe do. Its type of execution is `intervention:NAME`.
    """

    of: Annotated[str, Field(min_length=1)]
    """The probe."""

    first: list[ChangeSpec] = []
    """Changes that are made before this one, in the order listed. With `sweep`, they are made in
    every pass, and effects are differences from the pass with these changes alone."""

    into: Annotated[ReceiverSpec, BeforeValidator(_as_receiver)] | None = None
    """Receivers: the change reaches the rest of the model only through these tensors, and only
    directly (path patching). Between them and the changed tensors, all other tensors that `select`
    and `into` mean keep the values that they have without the change, and so do the modules in
    `frozen`. Modules, such as `head`, or a mapping with `select` and `role`. null: the change
    reaches everything."""

    frozen: Selectors = []
    """With `into`: modules whose outputs also keep their values between the changed tensor and the
    receiver, such as `"blocks.*.mlp"`. It omits those that contain the changed tensor."""

    sweep: Annotated[list[str], BeforeValidator(_listed)] = []
    """Make the change in one place at a time, and store only its effects: `node` for one module at
    a time, and names of `parts`, such as `[node, head, position]`. With `into` also `into` for one
    receiving module at a time, and its parts, such as `into.head`. See `Run.effects`."""

    measure: EffectMeasure = "loss"
    """What the effects are measured by. `loss`: the cross-entropy with the sample's class or, if a
    model returns [samples, positions, classes], with the next token, as a mean over positions.
    `label`: the output for the sample's class. `top`: the output for the class that is highest in
    the unchanged pass. A number: the output for that class. `{difference: [5, 7]}`: the output for
    one class minus that for another. `{_target_: ...}`: a function of the model's output.
    `{gradient: "blocks.0", role: weight}`: the norm of a gradient. With `pass: grad`, the measure
    also says what the gradients are of."""

    position: Int = -1
    """If a model returns [samples, positions, classes], the position that is measured, except by
    `loss`."""

    estimate: Literal["gradient"] | None = None
    """With `sweep`: `gradient` estimates all effects at once, from one forward pass with gradients,
    instead of making each change (attribution patching)."""

    batch: Annotated[Int, Field(ge=1)] = 256
    """With `sweep`: the largest number of samples in a pass. In evaluation mode, one pass tries
    several places, each with its own copy of the samples."""

    every: Annotated[Int, Field(ge=1)] = 1
    """At every how many records of the probe the intervention is made, from the first one on."""

    values: Bool = True
    """Whether to store all tensors selected by `nodes` unchanged. Effects are always stored."""

    @model_validator(mode="after")
    def _sweeps_over_parts(self) -> Self:
        known = [NODE, *self.parts, *self.known_parts]
        if self.into is not None:
            parts = dict.fromkeys([*self.into.parts, *KNOWN_PARTS])
            known += [INTO, *(f"{INTO}.{name}" for name in parts)]
        for name in self.sweep:
            if name not in known:
                raise ValueError(
                    f"sweep: {name!r} is not one of {', '.join(dict.fromkeys(known))}"
                    f"{did_you_mean(name, known)}"
                )
        if len({*self.sweep}) < len(self.sweep):
            raise ValueError("sweep: must not name a part twice")
        if self.estimate is not None and not self.sweep:
            raise ValueError("estimate: needs `sweep`, such as `sweep: node`")
        if self.estimate is not None and self.of_parameters:
            raise ValueError("estimate: is not possible for parameters, which samples share")
        return self

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.into is None and self.frozen:
            raise ValueError("frozen: needs `into`, the receivers, such as `into: head`")
        places: list[PlaceSpec] = [self, *self.first, *([] if self.into is None else [self.into])]
        if self.into is not None and any(place.batch_dim for place in places):
            raise ValueError("into: paths need the samples in the first dimension, not batch_dim")
        if self.into is not None and self.role == ATTENTION:
            raise ValueError(
                "into: a path begins at an input or output of a module, not at an attention pattern"
            )
        if self.into is not None and self.of_parameters:
            raise ValueError(
                f"into: a path begins at an input or output of a module, but the role "
                f"{self.role!r} is that of a parameter"
            )
        if any(selector.function for selector in self.frozen):
            raise ValueError("frozen: calls of functions cannot keep their values; select modules")
        return self

    @model_validator(mode="after")
    def _shows_gradients(self) -> Self:
        if not self.needs_gradients:
            return self
        if self.estimate is not None:
            raise ValueError("estimate: is one of values, and not possible with gradients")
        if self.into is not None:
            raise ValueError("into: paths are those of values, and not possible with gradients")
        measured = isinstance(self.measure, GradientMeasure)
        if self.sweep and not measured and self._changes_gradients:
            raise ValueError(
                "measure: a change of gradients leaves the model's output as it is, so that a "
                "sweep must measure a gradient, such as {gradient: blocks.0, role: weight}"
            )
        return self

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward pass follows, because gradients are changed or measured."""
        return self._changes_gradients or isinstance(self.measure, GradientMeasure)

    @property
    def _changes_gradients(self) -> bool:
        changes: list[ChangeSpec] = [*self.first, self]
        return any(change.of_gradients for change in changes)

    @property
    def objective(self) -> Objective:
        """What the gradients are of, or what is measured."""
        measure = self.measure
        of = measure.of if isinstance(measure, GradientMeasure) else measure
        return Objective(of, self.position)

    @property
    def swept(self) -> list[str]:
        """The names of `parts` that are swept."""
        return [name for name in self.sweep if name not in (NODE, INTO) and "." not in name]

    @property
    def swept_of_receivers(self) -> list[str]:
        """The names of the receivers' parts that are swept."""
        prefix = f"{INTO}."
        return [name.removeprefix(prefix) for name in self.sweep if name.startswith(prefix)]

    @property
    def swept_parts(self) -> dict[str, PartSpec]:
        """All parts, including those that only `sweep` names."""
        return _with_swept(self.parts, self.swept)

    @property
    def swept_parts_of_receivers(self) -> dict[str, PartSpec]:
        """All parts of the receivers, including those that only `sweep` names."""
        return _with_swept({} if self.into is None else self.into.parts, self.swept_of_receivers)


def _with_swept(parts: dict[str, PartSpec], swept: Iterable[str]) -> dict[str, PartSpec]:
    return {**parts, **{name: PartSpec() for name in swept if name not in parts}}


def changes_from(given: object) -> list[ChangeSpec]:
    """Return the changes of a call outside of training, which are one mapping or several.

    Raises:
        SpecError: they are invalid.
    """
    listed = [given] if isinstance(given, Mapping) else given
    if not isinstance(listed, (list, tuple)):
        example = '{"select": "blocks.3", "do": "zero"}'
        what = f"must be a mapping, or a list of several, got {shown(given)}"
        raise SpecError([f"changes: {what}; for example {example}"])
    try:
        found = TypeAdapter(list[ChangeSpec]).validate_python(listed)
    except ValidationError as error:
        raise SpecError([f"changes: {_problem(each)}" for each in error.errors()]) from None
    problems = [
        f"changes[{number}].pass: gradients are changed by interventions, not here"
        for number, each in enumerate(found)
        if each.of_gradients
    ]
    if problems:
        raise SpecError(problems)
    return found


def _problem(found: Any) -> str:
    """Return what pydantic found wrong in a change."""
    where, key = ".".join(map(str, found["loc"])), (found["loc"] or ("",))[-1]
    if found["type"] != "extra_forbidden":
        return f"{where}: {found['msg']}"
    known = [field.alias or name for name, field in ChangeSpec.model_fields.items()]
    return f"{where}: unknown key; valid keys: {', '.join(known)}{did_you_mean(key, known)}"


def needs_labels(do: Change) -> bool:
    """Return whether a change is a difference between the samples with two labels."""
    vector = do.add if isinstance(do, AddChange) else None
    vector = do.project_off if isinstance(do, ProjectionChange) else vector
    return isinstance(vector, CategoryDifference)


def intervention_type(name: str) -> str:
    """Return the type of execution of an intervention's records."""
    return INTERVENTION_PREFIX + name


class OfProbe(Protocol):
    """A declaration that belongs to a probe."""

    @property
    def of(self) -> str:
        """The probe."""


def different_objectives(declared: Mapping[str, InterventionSpec]) -> list[str]:
    """Return a sentence for each intervention whose gradients are of something else.

    The record of a probe contains the gradients without changes, which are of one measure.
    """
    found: dict[str, tuple[str, Objective]] = {}
    problems = []
    for name, each in declared.items():
        if each.needs_gradients:
            first, objective = found.setdefault(each.of, (name, each.objective))
            if each.objective != objective:
                problems.append(
                    f"interventions.{name}.measure: its gradients are of something else than those "
                    f"of {first!r}, and the records of the probe {each.of!r} contain only one kind "
                    "of gradient; declare another probe"
                )
    return problems


def unknown_probes(key: str, declared: Mapping[str, OfProbe], probes: Iterable[str]) -> list[str]:
    """Return a sentence for each declaration under a key whose probe does not exist."""
    known = [*probes]
    return [
        f"{key}.{name}.of: there is no probe {each.of!r} "
        f"({', '.join(known) or 'none is declared'}){did_you_mean(each.of, known)}"
        for name, each in declared.items()
        if each.of not in known
    ]
