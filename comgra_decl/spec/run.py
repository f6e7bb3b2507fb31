"""Where a run is stored, and the limits on what it stores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.bins import Spacing
from comgra_decl.errors import did_you_mean, shown
from comgra_decl.spec.base import Bool, Int, Number, SpecModel

_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f]")
_LONGEST_NAME = 200
_BUCKET = re.compile(r"(s3|gs)://[^/]")


def _number_as_text(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if number else value


def checked_folder_name(name: str) -> str:
    """Return `name` if it is a valid name of a single folder on every system.

    Raises:
        ValueError: it is invalid; the message gives the reason.
    """
    if not name.strip() or name != name.strip():
        raise ValueError(f"{name!r} must not be empty, or start or end with a space")
    if _FORBIDDEN.search(name):
        raise ValueError(f"{name!r} must be the name of one folder, without '/', '\\' or newlines")
    if name.startswith("."):
        raise ValueError(f"{name!r} must not start with a dot")
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is longer than {_LONGEST_NAME} bytes")
    return name


def _checked_root(root: str) -> str:
    if "\0" in root or ("://" in root and not _BUCKET.match(root)):
        raise ValueError(f"{root!r} must be a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    return root


FolderName = Annotated[str, AfterValidator(checked_folder_name), BeforeValidator(_number_as_text)]


RankNumber = Annotated[Int, Field(ge=0)]
Dimension = Annotated[str, Field(min_length=1)]


def _distinct(names: list[str]) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice!r} twice")
    return names


class OnePerSpec(SpecModel):
    """Record one rank of each group of a device mesh."""

    one_per: Dimension | Annotated[list[Dimension], Field(min_length=1), AfterValidator(_distinct)]
    """Dimensions of the mesh. Of the ranks that differ only in their coordinates along these
    dimensions, the first one is recorded."""

    @property
    def names(self) -> list[str]:
        """The dimensions as a list."""
        return [self.one_per] if isinstance(self.one_per, str) else self.one_per


def _only_one_per(value: object) -> object:
    """Refuse a mapping with other keys in words that do not list all other forms."""
    if isinstance(value, Mapping) and {*value} != {"one_per"}:
        wrong = next((key for key in value if key != "one_per"), None)
        near = did_you_mean(wrong, ["one_per"])
        raise ValueError(f"a mapping must have the key 'one_per' alone, got {shown(wrong)}{near}")
    return value


class RunSpec(SpecModel):
    """The run's folder: `<root>/<group>/<name>`. It is never overwritten."""

    root: Annotated[str, Field(min_length=1), AfterValidator(_checked_root)] = "runs"
    """Folder that contains all groups, relative to the program's initial working directory, or a
    location in a bucket, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX` (see docs/store.md)."""

    group: FolderName | None = None
    """Name of the folder that contains the runs to be compared; null for the name of the job or
    script."""

    name: FolderName | None = None
    """Name of the run's own folder; null for the start time. If the folder exists, a number is
    appended."""

    ranks: Annotated[
        Literal["all", "first"]
        | RankNumber
        | Annotated[list[RankNumber], Field(min_length=1)]
        | OnePerSpec,
        BeforeValidator(_only_one_per),
    ] = "all"
    """Which processes of a distributed training job to record, each to its own database: `all`,
    `first`, one rank, a list such as `[0, 3]`, or one of each group of a device mesh, such as
    `{one_per: tp}` (see docs/ranks.md)."""

    mesh: Annotated[dict[Dimension, Annotated[Int, Field(ge=1)]], Field(min_length=1)] | None = None
    """Names and sizes of the dimensions of the device mesh, such as `{dp: 2, tp: 4}`, in the order
    of `torch.distributed.init_device_mesh`. If null, the mesh that the program creates is used from
    the first record on."""

    resume: Bool | Annotated[str, Field(min_length=1)] = False
    """An existing run to continue, after a crash or from a checkpoint: its folder or URL, or `true`
    for the newest run of the group (or a new one if there is none)."""

    resume_step: RankNumber | None = None
    """With `resume`: the number of the first step, which is the number of steps taken before the
    checkpoint. If null, the number is read from an optimizer that counts steps, as Adam and its
    variants do. With other optimizers, the first step gets the number after the last recorded one.
    New steps replace recorded steps with the same numbers."""

    @model_validator(mode="after")
    def _mesh_has_the_dimensions(self) -> RunSpec:
        if isinstance(self.ranks, OnePerSpec) and self.mesh is not None:
            for name in self.ranks.names:
                if name not in self.mesh:
                    hint = did_you_mean(name, self.mesh)
                    raise ValueError(
                        f"ranks: the mesh ({', '.join(self.mesh)}) has no dimension {name!r}{hint}"
                    )
        return self


class HistogramSpec(SpecModel):
    """Histograms of all recorded tensors."""

    bins: Annotated[Int, Field(ge=2, le=4096)] = 64
    """Number of bins between the smallest and the largest finite element counted."""

    spacing: Spacing = "signed_log"
    """`signed_log`: bins that are finer near zero, which resolve gradients even if a few are a
    hundred times larger than the others. `linear`: bins of equal width. Bins are of equal width in
    either case if both ends are whole numbers, or if all values are far from zero relative to their
    range."""

    elements: Annotated[Int, Field(ge=2)] = 4096
    """Approximate maximum number of elements to count. They are spread evenly over the tensor."""


class ValuesSpec(SpecModel):
    """Limits on the tensors whose values are kept; applies to nodes with `values: true`."""

    max_elements: Annotated[Int, Field(ge=1)] = 1024
    """Values of tensors with more elements per sample are not stored; the run's report lists these
    tensors."""


class KpisSpec(SpecModel):
    """Metrics that are stored for every step, including steps that are not recorded."""

    loss: Bool = True
    """Whether to store the losses of every step, rather than only those of recorded steps. The
    losses are the tensors on which `backward()` is called; they are named "loss", "loss[1]",
    ...."""

    automatic: Bool = True
    """Whether to store the learning rates, the gradient norm, the times spent on data, forward
    pass, backward pass and optimizer, and the memory use, without any code in the program. They are
    measured in recorded steps and in one step every two seconds; see `docs/around.md`."""


class StoreSpec(SpecModel):
    """How records are written to disk."""

    commit_interval: Annotated[Number, Field(ge=0, le=3600)] = 0.5
    """Minimum time between two commits, in seconds. After the first minute of a run, it grows to
    0.5% of the elapsed time, up to ten seconds, so that a long run has few files. In a bucket, it
    is at least ten seconds. With 0, every record is written immediately."""

    queue_mb: Annotated[Int, Field(ge=1)] = 64
    """Maximum amount of data waiting to be written, in mebibytes. If there is more, training
    waits."""
