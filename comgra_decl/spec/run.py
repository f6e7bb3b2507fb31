"""Where a run is stored and how much of it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from comgra_decl.spec.base import Bool, Int, Number, SpecModel

_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f]")
_LONGEST_NAME = 200
_BUCKET = re.compile(r"(s3|gs)://[^/]")


def _number_as_text(value: Any) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if number else value


def checked_folder_name(name: str) -> str:
    """Returns `name` if it can name a single folder everywhere.

    Raises:
        ValueError: it cannot; the message says why.
    """
    if not name.strip() or name != name.strip():
        raise ValueError(f"{name!r} must have a first and a last character other than space")
    if _FORBIDDEN.search(name):
        raise ValueError(f"{name!r} must be the name of one folder, without '/', '\\' or newlines")
    if name.startswith("."):
        raise ValueError(f"{name!r} must not start with a dot")
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is longer than {_LONGEST_NAME} bytes")
    return name


def _checked_root(root: str) -> str:
    if "\0" in root or ("://" in root and not _BUCKET.match(root)):
        raise ValueError(
            f"{root!r} is neither a folder nor s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
        )
    return root


FolderName = Annotated[str, AfterValidator(checked_folder_name), BeforeValidator(_number_as_text)]


RankNumber = Annotated[Int, Field(ge=0)]


class RunSpec(SpecModel):
    """The run's folder: `<root>/<group>/<name>`. It is never overwritten."""

    root: Annotated[str, Field(min_length=1), AfterValidator(_checked_root)] = "runs"
    """Folder of all groups; a relative one lies in the folder where the program was started. Or a
    place in a bucket, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`: see docs/store.md."""

    group: FolderName | None = None
    """Folder of the runs that are looked at together; null is the job's or script's name."""

    name: FolderName | None = None
    """The run's own folder; null is the time it started. A name that is taken gets a number."""

    ranks: Literal["all"] | RankNumber | Annotated[list[RankNumber], Field(min_length=1)] = "all"
    """Which processes of a distributed training are recorded, each in a database of its own:
    `all`, one rank, or a list such as `[0, 3]`."""

    resume: Bool | Annotated[str, Field(min_length=1)] = False
    """An existing run to go on with, after a crash or from a checkpoint: its folder or URL, or
    `true` for the newest run of the group (and a new one if there is none)."""

    resume_step: RankNumber | None = None
    """With `resume`: the number of the first step, which is how many the checkpoint had seen; null
    asks the optimizer, if it counts (Adam and its kin do), or goes on after the last step recorded.
    Steps from there on that the run already holds give way to the new ones."""

    def recorded(self, world_size: int) -> list[int]:
        """Returns the ranks that are recorded of so many, ascending."""
        if self.ranks == "all":
            return list(range(world_size))
        wanted = [self.ranks] if isinstance(self.ranks, int) else self.ranks
        return sorted({rank for rank in wanted if rank < world_size})


class HistogramSpec(SpecModel):
    """Histograms of all recorded tensors."""

    bins: Annotated[Int, Field(ge=2, le=4096)] = 64
    """Number of equal bins between the lowest and the highest of the finite elements counted."""

    elements: Annotated[Int, Field(ge=2)] = 4096
    """At most about so many elements, evenly spread over the tensor, are counted."""


class ValuesSpec(SpecModel):
    """Tensors kept as they are, for the nodes that ask for it with `values: true`."""

    max_elements: Annotated[Int, Field(ge=1)] = 1024
    """A tensor with more elements per sample keeps no values, which the run's report says."""


class KpisSpec(SpecModel):
    """Numbers of every step, also of those that are not recorded."""

    loss: Bool = True
    """Whether what `backward()` is called on is kept as "loss", "loss[1]", ... of every step;
    otherwise it is known of recorded steps only."""


class StoreSpec(SpecModel):
    """How records travel to the disk."""

    commit_interval: Annotated[Number, Field(ge=0, le=3600)] = 0.5
    """Seconds after which what was recorded is on disk; in a run older than a minute, 0.5 % of its
    age, at most ten, so that a long run has few files; in a bucket at least ten. 0: every record
    at once, always."""

    queue_mb: Annotated[Int, Field(ge=1)] = 64
    """Mebibytes that may wait to be written; the training waits when it is more."""
