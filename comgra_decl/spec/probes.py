"""Probes: the same samples, passed through a copy of the model at recorded steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from comgra_decl.records import PROBE_PREFIX
from comgra_decl.spec.base import Bool, Int, SpecModel
from comgra_decl.spec.budget import BudgetSpec
from comgra_decl.spec.images import ImageSpec
from comgra_decl.spec.keep import checked_target
from comgra_decl.spec.samples import SamplesSpec
from comgra_decl.spec.schedule import CadenceSpec

_NAME = re.compile(r"[^\W\d][\w-]*")


def checked_name(name: str) -> str:
    """Return `name` if it can name a probe or a picture.

    Raises: ValueError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name; use letters, digits, '_' and '-'")
    return name


def _limits_time_only(budget: BudgetSpec) -> BudgetSpec:
    if budget.disk is not None:
        raise ValueError("a probe has no disk budget; schedule.budget.disk limits the whole run")
    return budget


class ProbeCadenceSpec(CadenceSpec):
    """At which recorded training steps a probe runs; only recorded training steps are counted."""

    every: Annotated[Int, Field(ge=1)] | None = 10
    """After the first recorded steps, the probe runs at every n-th one; null for none."""

    budget: Annotated[BudgetSpec, AfterValidator(_limits_time_only)] = BudgetSpec()
    """The share of the training time that this probe may take, as in {time: "2%"}."""


class BatchFunction(SpecModel):
    """Gets the samples from a custom function; other keys are its keyword arguments.

    The function is called once, before the first recorded training step. It returns `(args, kwargs,
    labels)`: arguments for the model, with one entry per sample in the first dimension of each
    tensor, and one label per sample or None.
    """

    model_config = ConfigDict(extra="allow")

    target: Annotated[str, AfterValidator(checked_target)] = Field(alias="_target_")
    """The function: package.module.function."""


class BatchValues(SpecModel):
    """The samples themselves: arguments for the model by name, as nested lists of numbers."""

    model_config = ConfigDict(extra="allow")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.__pydantic_extra__ or {})


def _which(value: Any) -> str:
    function = isinstance(value, BatchFunction)
    function = function or (isinstance(value, Mapping) and "_target_" in value)
    return "BatchFunction" if function else "BatchValues"


class ShowSpec(SpecModel):
    """How the viewer shows a sample."""

    image: ImageSpec | None = None
    """The input is an image, [channels, height, width]."""


def _checked_npy(name: str) -> str:
    if not name.endswith(".npy"):
        raise ValueError(f"must be nested lists or the path of a .npy file, got {name!r}")
    return name


class ProbeSpec(SpecModel):
    """The same samples at every record, passed through a copy of the model.

    The copy has the parameters and buffers with which the step's forward pass began. It never
    affects the program. The type of execution of its records is `probe:NAME`.
    """

    samples: SamplesSpec = SamplesSpec()
    """Which samples in the first batch to keep. `count` must not exceed the run's
    `samples.count`. They are stored with the first record, and a resumed run goes on with them."""

    batch: (
        Annotated[
            Annotated[BatchFunction, Tag("BatchFunction")]
            | Annotated[BatchValues, Tag("BatchValues")],
            Discriminator(_which),
        ]
        | None
    ) = None
    """The samples, if they are not taken from the first batch: arguments for the model by name, as
    in {input_ids: [[1, 2, 3], [4, 5, 6]]}, or a function, as in {_target_: my_project.probe}."""

    labels: list[Int] | None = None
    """The class of each sample, if `batch` provides the samples."""

    foreign: list[Int | str] = []
    """Categories of samples that belong to none of the model's classes, such as images of another
    data set in `batch`, with `labels`. The picture `foreign_auroc` shows how well the model's
    confidence tells them apart from the others; `confusion` and `reliability` leave them out."""

    mode: Literal["eval", "train", "as_is"] = "eval"
    """`eval` and `train` set all modules of the copy to that mode; `as_is` leaves each module of
    the copy in the mode that it has in the program. Random numbers are the same at every record
    and in every pass of a picture or an intervention."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """The class of the model to copy, if a step trains several. null: the first one that is
    called."""

    values: Bool = True
    """Whether to store all tensors selected by `nodes` unchanged. Pictures are always stored."""

    schedule: ProbeCadenceSpec = ProbeCadenceSpec()
    """At which recorded steps the probe runs."""

    show: ShowSpec = ShowSpec()
    """How the viewer shows a sample."""

    mask: list[Any] | Annotated[str, AfterValidator(_checked_npy)] | None = None
    """Where attributions should lie: nested lists, or a .npy file, with 1 inside and 0 outside.
    [height, width] or [length] for all samples, or [samples, height, width] or [samples, length]. A
    rule reports pictures that lie outside."""


ProbeName = Annotated[str, AfterValidator(checked_name)]


def probe_type(name: str) -> str:
    """Return the type of execution of a probe's records."""
    return PROBE_PREFIX + name
