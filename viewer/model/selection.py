"""The current selection, and how it adapts when one choice changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from comgra_decl.records import AGGREGATES
from comgra_decl.viewer.model.fitting import GENERAL, fitting
from comgra_decl.viewer.model.runview import RunView, Slot, Steps


@dataclass(frozen=True, slots=True)
class Selection:
    """The current selection in a run.

    `type` is "" for all training steps. `batch` is an aggregate over the batch ("mean", "std",
    "abs_max") or a recorded sample's number ("0", "1", ...). `gradient` is the pass shown next to
    the forward pass. `step` is None if there are no records.

    `auto_statistic` and `auto_batch` are True if `statistic` and `batch` were chosen to fit the
    tensor, not by the user.
    """

    type: str = ""
    step: int | None = None
    node: str = ""
    role: str = ""
    iteration: int = 0
    gradient: str = "grad"
    batch: str = "mean"
    statistic: str = ""
    auto_statistic: bool = False
    auto_batch: bool = False

    @property
    def wide(self) -> Selection:
        """The selection for views of all tensors, with a statistic that suits every tensor."""
        return replace(
            self,
            statistic=GENERAL[0] if self.auto_statistic else self.statistic,
            batch=GENERAL[1] if self.auto_batch else self.batch,
        )

    @property
    def sample(self) -> int | None:
        """Number of the selected sample; None if an aggregate is selected."""
        return int(self.batch) if self.batch.isdecimal() else None

    @property
    def over(self) -> str:
        """Aggregate to use where individual samples cannot be shown."""
        return "mean" if self.batch.isdecimal() else self.batch


def resolve(view: RunView, wanted: Selection, remembered: Mapping[str, str]) -> Selection:
    """Return the selection nearest to `wanted` that exists in the run.

    Keeps existing values: the node, its role (else the role last used for that node, from
    `remembered`), the nearest iteration, the nearest recorded step, the statistic and the sample.
    A statistic or aggregate that is missing, or that was not chosen by the user, becomes the one
    that fits the tensor.
    """
    type_ = wanted.type if wanted.type in view.types() else ""
    node = wanted.node if wanted.node in set(view.nodes) else _first_node(view)
    role = _role(view, node, wanted.role, remembered.get(node, ""))
    iteration = nearest(np.array(view.iterations(node, role)), wanted.iteration) or 0
    found = replace(
        wanted,
        type=type_,
        step=nearest(view.steps(type_), wanted.step),
        node=node,
        role=role,
        iteration=iteration,
        gradient=_other_pass(view.other_passes(node, role, iteration), wanted.gradient),
    )
    return _fitted(view, found)


def _fitted(view: RunView, at: Selection) -> Selection:
    """Return the selection with a statistic and an aggregate or sample that the run contains."""
    slot = next((slot for slot in slots_of(view, at) if slot is not None), None)
    fit = fitting(view, slot)
    own_statistic = at.statistic in view.run.statistics and not at.auto_statistic
    own_batch = at.batch in _batches(view) and not at.auto_batch
    statistic = at.statistic if own_statistic else fit.statistic
    # "spread over the batch" fits the mean only, and a single sample needs the value itself
    batch = fit.batch if statistic == fit.statistic else "mean"
    return replace(
        at,
        statistic=statistic,
        batch=at.batch if own_batch else batch,
        auto_statistic=not own_statistic,
        auto_batch=not own_batch,
    )


def nearest(steps: Steps, wanted: int | None) -> int | None:
    """Return the recorded step nearest to `wanted` (the earlier in a tie); for None, the last."""
    if len(steps) == 0:
        return None
    if wanted is None:
        return int(steps[-1])
    right = min(int(np.searchsorted(steps, wanted)), len(steps) - 1)
    left = max(right - 1, 0)
    return int(min(steps[left], steps[right], key=lambda step: abs(int(step) - wanted)))


def previous(steps: Steps, step: int) -> int | None:
    """Return the previous recorded step, or None."""
    index = int(np.searchsorted(steps, step))
    return int(steps[index - 1]) if index > 0 else None


def slots_of(view: RunView, at: Selection) -> tuple[Slot | None, Slot | None]:
    """Return the selected tensor's slots: forward, and the selected gradient pass."""
    passes = view.passes(at.node, at.role, at.iteration)
    return passes.get("forward"), passes.get(at.gradient)


def _first_node(view: RunView) -> str:
    nodes = view.nodes
    computed = (node for node in nodes if view.kind(node) == "computed")
    return next(computed, nodes[0] if nodes else "")


def _role(view: RunView, node: str, wanted: str, remembered: str) -> str:
    roles = view.roles(node)
    for role in (wanted, remembered):
        if role in roles:
            return role
    return roles[0] if roles else ""


def _other_pass(passes: Sequence[str], wanted: str) -> str:
    return wanted if wanted in passes or not passes else passes[0]


def _batches(view: RunView) -> set[str]:
    """Return the aggregates and the recorded samples."""
    return {*AGGREGATES, *map(str, range(view.run.sample_count))}
