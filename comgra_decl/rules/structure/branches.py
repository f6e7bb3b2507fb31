"""Branches that are added or joined and do not count."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Field,
    Fraction,
    Int,
    Mask,
    Measured,
    Patient,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    combined,
    per_run,
)


class BranchParameters(Patient):
    """What can be said of rules about branches."""

    patience: Count = 10
    """For so many records in a row it must be so."""

    ratio: Fraction = 1e-3
    """A branch of less than this share of the largest one does not count."""

    after: Annotated[Int, Field(ge=0)] = 10
    """So many first records are left alone: branches may begin at zero on purpose."""


class _Branches(SlotRule):
    """Compares tensors of one shape that the same tensor is computed from."""

    Parameters = BranchParameters
    statistics = ("l2",)
    lowest, evidence = True, "share of the largest branch"
    pass_, of_graph = "forward", True

    _groups: list[Slots] = per_run(list)

    def wants(self, table: SlotTable) -> Mask:
        """Returns the branches."""
        self._groups = self._joined(table)
        mask = np.zeros(len(table), np.bool_)
        for group in self._groups:
            mask[group] = True
        return mask

    def _joined(self, table: SlotTable) -> list[Slots]:
        groups = []
        for sources in combined(self.scene).values():
            keys = [table.infos[slot].key._replace(pass_=self.pass_) for slot in sources]
            slots = [table.by_key[key] for key in keys if key in table.by_key]
            if len(slots) > 1:
                groups.append(np.array(slots, np.int64))
        return groups

    def measure(self, window: Window, at: Slots) -> Measured:
        """Compares each branch with the largest that it is joined with."""
        if not self._groups:
            return np.zeros((len(window), len(at)), np.bool_), np.zeros((len(window), len(at)))
        size = window.read("l2", np.arange(len(window.table))).astype(np.float64)
        share = np.full(size.shape, np.nan)
        for group in self._groups:
            part = size[:, group]
            share[:, group] = np.fmin(share[:, group], part / np.fmax.reduce(part, 1)[:, None])
        late = window.first + np.arange(len(window)) >= self.parameters.after
        found = share[:, at]
        return (found < self.parameters.ratio) & late[:, None], found

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leaves out what only some iterations show: the first state of a loop is often zero."""
        return self.in_every_iteration(scene, fired)


class BranchIgnored(_Branches):
    """A branch that is so small beside the one it is added to that it does nothing."""

    name = "branch_ignored"
    certainty = 0.5
    definition = (
        "Of several tensors of one shape from which another of this shape is computed (a residual "
        "branch and what it is added to), one has an l2 norm below `ratio` times that of the "
        "largest, in every iteration within a step, for `patience` records, the first `after` left "
        "alone."
    )
    source = "comgra's plan (residual connections that are ignored)."
    advice = (
        "If it begins at zero on purpose, its learning rate may be too low; else normalise both, "
        "or scale the branch. If the skip is the small one, its path is blocked."
    )
    explained_by = (
        "nonfinite",
        "dead_units",
        "all_zero",
        "untrained_parameter",
        "activation_drift",
    )
    needs = "outputs of branches that meet, with `graph: true`"

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how small it is."""
        return (
            f"{scene.table.place(slot)} hardly counts: it is {self.streak.worst[slot]:.1e} times "
            "the size of what it is combined with."
        )


class GradientImbalance(_Branches):
    """A branch that gets next to no gradient beside another one."""

    name = "gradient_imbalance"
    certainty = 0.45
    definition = (
        "Of several tensors of one shape that are combined, one has a gradient below `ratio` times "
        "that of another (l2), in every iteration within a step, for `patience` records, the first "
        "`after` left alone."
    )
    source = "comgra and torchexplorer, whose users look for it by eye; own default."
    advice = "Rescale or normalise the branches; look for saturation or detach() in the small one."
    explained_by = ("nonfinite", "dead_units", "saturated", "vanishing_gradient", "branch_ignored")
    backwards, pass_ = True, "grad"
    needs = "gradients of branches that meet, {select: '**', capture: [output_grad]}, `graph: true`"

    def sentence(self, scene: Scene, slot: int) -> str:
        """Says how small it is."""
        return (
            f"{scene.table.place(slot)} gets {self.streak.worst[slot]:.1e} times the gradient of "
            "the branch it is combined with."
        )
