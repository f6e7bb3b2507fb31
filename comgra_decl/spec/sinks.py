"""Other tools that receive what is recorded while the program trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from comgra_decl.errors import did_you_mean
from comgra_decl.records import AGGREGATES
from comgra_decl.spec.base import Bool, Int, SpecModel
from comgra_decl.spec.globs import compile_glob

SERIES = 200
"""The largest number of series that other tools receive unless more are requested."""

_PASSES = ("forward", "grad", "update", "no_grad")


def _checked_nodes(pattern: str) -> str:
    compile_glob(pattern)
    return pattern


def _checked_pass(name: str) -> str:
    head, colon, rest = name.partition(":")
    if head not in _PASSES or bool(colon) != bool(rest):
        raise ValueError(
            f"{name!r} is not a pass; write forward, grad, update or no_grad, or a pass of its own "
            f"name, such as grad:raw{did_you_mean(name, _PASSES)}"
        )
    return name


def _checked_folder(path: str) -> str:
    if "://" in path:
        raise ValueError(f"must be a folder on this machine, got {path!r}")
    return path


Name = Annotated[str, Field(min_length=1)]


class SinkOptions(SpecModel):
    """What a tool receives. Metrics, notes and findings are always sent."""

    nodes: Annotated[str, AfterValidator(_checked_nodes)] | None = None
    """Glob over nodes whose series are sent; null for all, an empty string for none."""

    passes: list[Annotated[str, AfterValidator(_checked_pass)]] = []
    """Passes that are sent, such as [forward, grad]; all by default."""

    statistics: list[str] = []
    """Statistics that are sent, such as [std, l2.abs_max]; by default mean, std and abs_max."""

    series: Annotated[Int, Field(ge=1)] = SERIES
    """The largest number of series. If more are selected, only metrics, notes and findings are
    sent, and a warning proposes a selection."""

    histograms: Bool = True
    """Whether to send the histograms of the selected tensors."""

    pictures: Bool = True
    """Whether to send the pictures of probes that show the selected nodes, and what the program
    shows (`comgra.image`, `figure` and `text`)."""

    def unknown_statistics(self, stored: Sequence[str]) -> list[str]:
        """Return a sentence for each selected statistic that is not recorded."""
        known = {*stored, *(f"{name}.{how}" for name in stored for how in AGGREGATES)}
        return [
            f"{name!r} is not one of the spec's stats, {', '.join(stored)}, each also with "
            f"{', '.join(f'.{how}' for how in AGGREGATES[1:])}{did_you_mean(name, stored)}"
            for name in self.statistics
            if name not in known
        ]


class ArtifactOptions(SinkOptions):
    """Options of tools that store files."""

    artifact: Bool = False
    """Whether to store a copy of the finished run in the tool. The end of the program waits up to
    ten minutes for it."""


class TensorBoardOptions(SinkOptions):
    """Options of TensorBoard."""

    folder: Annotated[Name, AfterValidator(_checked_folder)] | None = None
    """The log folder of this run, relative to the working directory at the start of tracing; by
    default, the folder `tensorboard` in the run's folder."""


class WandbOptions(ArtifactOptions):
    """Options of Weights & Biases. The run is a new one, even if the program has a W&B run."""

    project: Name | None = None
    """The project; by default, the run's group."""

    entity: Name | None = None
    """The user or team; by default, that of the login."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """`online`, `offline` or `disabled`; by default, as W&B is set up."""


class MlflowOptions(ArtifactOptions):
    """Options of MLflow. The program's active run is used, unless there is none or `uri` is set."""

    uri: Name | None = None
    """The tracking URI, such as `sqlite:///mlflow.db`; by default, as MLflow is set up."""

    experiment: Name | None = None
    """The experiment; by default, the run's group."""


class TrackioOptions(ArtifactOptions):
    """Options of trackio."""

    project: Name | None = None
    """The project; by default, the run's group."""


class SinkSpec(SpecModel):
    """A tool and its options; exactly one tool."""

    tensorboard: TensorBoardOptions | None = None
    """TensorBoard."""

    wandb: WandbOptions | None = None
    """Weights & Biases."""

    mlflow: MlflowOptions | None = None
    """MLflow."""

    trackio: TrackioOptions | None = None
    """trackio."""

    @model_validator(mode="after")
    def _one_tool(self) -> SinkSpec:
        if len(self._named) != 1:
            tools = ", ".join(type(self).model_fields)
            raise ValueError(f"each entry must name exactly one of {tools}")
        return self

    @property
    def _named(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return self._named[0]

    @property
    def options(self) -> SinkOptions:
        """Options of the tool."""
        found: SinkOptions = getattr(self, self.tool)
        return found


def _with_options(value: Any) -> Any:
    """Read `wandb` as `{wandb: {}}`, and `{wandb: null}` likewise."""
    names = [value] if isinstance(value, str) else [*value] if isinstance(value, Mapping) else []
    unknown = next((name for name in names if name not in SinkSpec.model_fields), None)
    if unknown is not None:
        known = [*SinkSpec.model_fields]
        raise ValueError(
            f"{unknown!r} is not a sink; valid sinks: {', '.join(known)}"
            f"{did_you_mean(unknown, known)}"
        )
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, Mapping):
        return {name: {} if options is None else options for name, options in value.items()}
    return value


def _without_none(value: Any) -> Any:
    """Drop the tools that a saved spec lists as null."""
    if isinstance(value, Mapping) and len(value) > 1:
        return {name: options for name, options in value.items() if options is not None}
    return value


def _each_once(sinks: list[SinkSpec]) -> list[SinkSpec]:
    tools = [sink.tool for sink in sinks]
    twice = next((tool for tool in tools if tools.count(tool) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice} twice; each tool receives a run once")
    return sinks


_Sink = Annotated[SinkSpec, BeforeValidator(_with_options), BeforeValidator(_without_none)]
Sinks = Annotated[list[_Sink], AfterValidator(_each_once)]
