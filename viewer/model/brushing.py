"""What the user has brushed: several samples, steps or runs at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from comgra_decl.viewer.model.flags import MOST, Mark
from comgra_decl.viewer.model.runview import RunView


@dataclass(frozen=True, slots=True)
class Brush:
    """Brushed samples, steps and names of runs, ascending."""

    samples: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    runs: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, *, samples: Iterable[Any] = (), steps: Iterable[Any] = (), runs: Iterable[Any] = ()
    ) -> Brush:
        """Return a brush of these samples, steps and runs; leave out invalid entries."""
        return cls(
            tuple(sorted({int(n) for n in samples if _whole(n)})),
            tuple(sorted({int(n) for n in steps if _whole(n)})),
            tuple(sorted({str(name) for name in runs})),
        )


NOTHING = Brush()
"""The brush when nothing is brushed."""


def brushed_marks(view: RunView, type_: str, brush: Brush) -> list[Mark]:
    """Return a flag for each brushed step that was recorded; up to `MOST`, evenly spaced."""
    steps = view.steps(type_)
    found = np.flatnonzero(np.isin(steps, brush.steps))
    if len(found) > MOST:
        found = found[np.linspace(0, len(found) - 1, MOST).astype(int)]
    return [Mark(int(i), f"brushed: step {steps[i]}") for i in found]


def _whole(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and float(value).is_integer()
