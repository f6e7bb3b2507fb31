"""Count in-place writes to a trained parameter between the steps of its optimizer.

The version of a tensor counts its in-place writes. An optimizer adds the same number in each step,
so that whatever is added beyond it was written by the program, for example by `load_state_dict` or
`lerp_`. Nothing runs in steps that are not recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from comgra_decl.hooks.plans import TensorPlan
from comgra_decl.stats.support import version_of

_LEAST = 2  # counts of other writes: the first may prepare the training
_MOST_OPTIMIZERS = 64


@dataclass
class _Counted:
    """The versions of an optimizer's first parameter around its last recorded step."""

    parameter: weakref.ref[torch.Tensor]
    before: int
    after: int = -1
    steps: float | None = None  # of the optimizer, by then
    writes: int = 0
    times: int = 0


class OutsideWrites:
    """The writes to one parameter of each optimizer that are not its own."""

    def __init__(self) -> None:
        self._counted: dict[int, _Counted] = {}

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        stepping: Iterable[tuple[TensorPlan, torch.Tensor]],
    ) -> dict[str, Any] | None:
        """Count writes since the last recorded step; return a fact once they have recurred.

        Returns:
            The fact "written" of `records.TELLING`, at most once per optimizer.
        """
        stepped = ((plan, p) for plan, p in stepping if p.grad is not None and not p.is_inference())
        plan, parameter = next(stepped, (None, None))
        if plan is None or parameter is None:
            return None
        version = version_of(parameter)
        known = self._counted.get(id(optimizer))
        if known is None or known.parameter() is not parameter:
            if len(self._counted) >= _MOST_OPTIMIZERS:
                self._counted.clear()
            self._counted[id(optimizer)] = _Counted(weakref.ref(parameter), version)
            return None
        steps = _steps_of(optimizer, parameter)
        told = known.times >= _LEAST
        if known.after >= 0 and steps is not None and known.steps is not None:
            own = (steps - known.steps) * (known.after - known.before)
            others = round(version - known.after - own)
            known.writes += max(others, 0)
            known.times += others > 0
        known.before, known.after = version, -1
        if told or known.times < _LEAST:
            return None
        key = plan.slot.key
        return {"kind": "written", "node": key.node, "role": key.role, "count": known.writes}

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the version and the number of steps after a recorded step."""
        known = self._counted.get(id(optimizer))
        parameter = None if known is None else known.parameter()
        if known is not None and parameter is not None:
            known.after = version_of(parameter)
            known.steps = _steps_of(optimizer, parameter)


def _steps_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> float | None:
    """Return how often an optimizer has updated a parameter, if it counts that on the host."""
    steps = optimizer.state.get(parameter, {}).get("step")
    if isinstance(steps, torch.Tensor):
        return float(steps) if steps.is_cpu and steps.numel() == 1 else None
    return float(steps) if isinstance(steps, (int, float)) else None
