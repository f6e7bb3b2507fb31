"""Rules about values themselves, which have to be read: they look at some of the records."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from comgra_decl.rules.base import Patient, Scene, SlotRule
from comgra_decl.rules.memory import Slots
from comgra_decl.rules.window import Window
from comgra_decl.spec.base import Int


class SampledParameters(Patient):
    """What can be said of a rule that looks at some of the records."""

    every: Annotated[Int, Field(ge=1)] = 10
    """Every so many records are looked at, since their values have to be read."""

    patience: Annotated[Int, Field(ge=1)] = 3
    """For so many of these in a row it must be so."""


class SampledRule(SlotRule):
    """A rule about the values of the recorded samples, at every so many-th record."""

    Parameters = SampledParameters
    what: ClassVar[str]
    """What must be among the values that are recorded."""

    def __init__(self, parameters: Any = None) -> None:
        super().__init__(parameters)
        self._seen = False

    def look(self, window: Window) -> None:
        """Takes those of the next records whose turn it is."""
        number = window.first + np.arange(len(window))
        rows = np.flatnonzero(number % self.parameters.every == 0)
        if len(rows):
            self._take(window.only(rows, int(number[rows[0]])))

    def values(self, window: Window, row: int, slot: int) -> NDArray[np.float64] | None:
        """Returns the values [samples, ...] that a record holds of a slot and that are meant."""
        found = window.details.values(row, slot)
        if found is None or not len(found) or not self.is_meant(found):
            return None
        self._seen = True
        return np.asarray(found, np.float64)

    def is_meant(self, values: NDArray[Any]) -> bool:
        """Whether the rule is about values like these."""
        return True

    def measured(self, window: Window, at: Slots) -> list[tuple[int, int, NDArray[np.float64]]]:
        """Returns row, column and values of all that is recorded of the slots."""
        found = []
        for row, column in np.ndindex(len(window), len(at)):
            values = self.values(window, row, int(at[column]))
            if values is not None:
                found.append((row, column, values))
        return found

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        nothing = f"no {self.what} is recorded; add to `nodes`: {self.needs}"
        return super().missing(scene) or (None if self._seen else nothing)
