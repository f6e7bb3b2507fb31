"""Other tools that receive what is recorded while the program trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from comgra_decl.spec.base import Bool, Int, SpecModel


class SinkOptions(SpecModel):
    """What a tool receives. Metrics, notes and findings are always sent."""

    nodes: str | None = None
    """Glob over nodes whose series are sent; null for all, an empty string for none."""

    passes: list[str] = []
    """Passes that are sent, such as [forward, grad]; all by default."""

    statistics: list[str] = []
    """Statistics that are sent, such as [std, l2.abs_max]; by default mean, std and abs_max."""

    series: Annotated[Int, Field(ge=1)] = 200
    """The largest number of series. If more are selected, only metrics, notes and findings are
    sent, and a warning proposes a selection."""

    histograms: Bool = True
    """Whether to send the histograms of the selected tensors."""


class TensorBoardOptions(SinkOptions):
    """Options of TensorBoard."""

    folder: str | None = None
    """The log folder of this run; by default, the folder `tensorboard` in the run's folder."""


class WandbOptions(SinkOptions):
    """Options of Weights & Biases. The run is a new one, even if the program has a W&B run."""

    project: str | None = None
    """The project; by default, the run's group."""

    entity: str | None = None
    """The user or team; by default, that of the login."""

    mode: str | None = None
    """`online`, `offline` or `disabled`; by default, as W&B is set up."""


class MlflowOptions(SinkOptions):
    """Options of MLflow. The program's active run is used, unless there is none or `uri` is set."""

    uri: str | None = None
    """The tracking URI, such as `sqlite:///mlflow.db`; by default, as MLflow is set up."""

    experiment: str | None = None
    """The experiment; by default, the run's group."""


class TrackioOptions(SinkOptions):
    """Options of trackio."""

    project: str | None = None
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


Sinks = list[Annotated[SinkSpec, BeforeValidator(_with_options), BeforeValidator(_without_none)]]
