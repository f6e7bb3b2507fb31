"""Networks that are another one in evaluation."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.rules.base import Patient, Scene, SlotRule
from comgra_decl.rules.memory import Bools, Previous, Slots
from comgra_decl.rules.paths import beyond_targets
from comgra_decl.rules.table import Mask, SlotTable
from comgra_decl.rules.window import Window
from comgra_decl.spec.base import Int, Number


class EvaluationParameters(Patient):
    """What can be said of `evaluation_gap`."""

    patience: Annotated[Int, Field(ge=1)] = 2
    """For so many recorded evaluations in a row it must be so."""

    factor: Annotated[Number, Field(gt=1)] = 3.0
    """A spread that differs by this factor is another one."""


class EvaluationGap(SlotRule):
    """Activations that are others in evaluation than in training."""

    name = "evaluation_gap"
    certainty = 0.6
    definition = (
        "In evaluation the standard deviation of a tensor is `factor` times that of the last "
        "recorded training step, or 1 / `factor` of it, for `patience` recorded evaluations."
    )
    source = "TheDeepChecker compares activations of both modes (similarity below 0.75)."
    advice = (
        "BatchNorm is the usual reason: its running statistics lag behind (raise the momentum, "
        "train longer, or recompute them). Else the preparation of data differs between both."
    )
    explained_by = ("nonfinite", "loss_diverges", "large_update")
    Parameters = EvaluationParameters
    statistics = ("std",)
    evidence = "factor"
    needs = "outputs, and evaluations (`schedule.eval`)"

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._train = Previous()

    def wants(self, table: SlotTable) -> Mask:
        """Returns outputs and inputs."""
        return table.outputs | table.where(lambda i: i.kind == "input" and "float" in i.dtype)

    def look(self, window: Window) -> None:
        """Remembers the training's spread."""
        at = self.columns(window.table)
        if window.has("std") and len(at):
            self._train.look(at, window.read("std", at).astype(np.float64))

    def look_at_evaluation(self, window: Window) -> None:
        """Compares with it."""
        self._take(window)

    def measure(self, window: Window, at: Slots) -> tuple[Bools, NDArray[Any]]:
        """Divides one by the other."""
        spread = window.read("std", at).astype(np.float64)
        train = self._train.known(at)
        ratio = np.where((spread > 0) & (train > 0), spread / train, np.nan)
        factor = np.maximum(ratio, 1 / ratio)
        return factor > self.parameters.factor, factor

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out losses."""
        return fired[~np.isin(fired, list(beyond_targets(scene)))]

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        if scene.evaluations < self.patience:
            return (
                f"it takes {self.patience} recorded evaluations; there are {scene.evaluations} "
                "(`model.eval()` and `schedule.eval`)"
            )
        return super().missing(scene)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says by how much."""
        return (
            f"{scene.table.place(slot)} is another one in evaluation: its spread differs from the "
            f"training's by a factor of {self.streak.worst[slot]:.3g}."
        )
