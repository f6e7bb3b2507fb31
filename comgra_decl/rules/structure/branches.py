"""Branches that have no effect where they are combined."""

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
    """The options of the rules about branches."""

    patience: Count = 10

    ratio: Fraction = 1e-3
    """The smallest size allowed, relative to the largest branch."""

    after: Annotated[Int, Field(ge=0)] = 10
    """The number of first records to ignore, because branches may start at zero on purpose."""


class _Branches(SlotRule):
    """Compares tensors of the same shape from which one tensor is computed."""

    Parameters = BranchParameters
    of_state = True
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
        """Compares each branch with the largest one it is combined with."""
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
        """Leaves out branches that are small in some iterations only, such as initial states."""
        return self.in_every_iteration(scene, fired)


class BranchIgnored(_Branches):
    """A branch too small to have an effect where it is added."""

    name = "branch_ignored"
    certainty = 0.5
    definition = (
        "Several tensors of the same shape are combined into another one of this shape (a residual "
        "branch and what it is added to), and one of them has an l2 norm below `ratio` times that "
        "of the largest, in every iteration within a step, for `patience` records in a row. The "
        "first `after` records are ignored."
    )
    source = "comgra's README (planned: residual connections that are ignored)."
    advice = (
        "If it starts at zero on purpose, its learning rate may be too low. Otherwise normalize "
        "both branches, or scale this one. If the small one is the skip connection, its path is "
        "blocked."
    )
    explained_by = (
        "nonfinite",
        "dead_units",
        "all_zero",
        "untrained_parameter",
        "activation_drift",
    )
    needs = "outputs of branches that are combined, with `graph: true`"

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} has hardly any effect: it is {self.streak.worst[slot]:.1e} "
            "times the size of the largest branch it is combined with."
        )


class GradientImbalance(_Branches):
    """A branch that receives far less gradient than another one."""

    name = "gradient_imbalance"
    certainty = 0.45
    definition = (
        "Several tensors of the same shape are combined, and the gradient of one of them has an l2 "
        "norm below `ratio` times that of another, in every iteration within a step, for "
        "`patience` records in a row. The first `after` records are ignored."
    )
    source = "comgra and torchexplorer, whose users look for it by eye; own default."
    advice = "Rescale or normalize the branches; look for saturation or detach() in the small one."
    explained_by = ("nonfinite", "dead_units", "saturated", "vanishing_gradient", "branch_ignored")
    backwards, pass_ = True, "grad"
    needs = (
        "gradients of branches that are combined, {select: '**', capture: [output_grad]}, with "
        "`graph: true`"
    )

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns the message about a slot."""
        return (
            f"{scene.table.place(slot)} is {self.streak.worst[slot]:.1e} times the gradient of "
            "the largest branch it is combined with."
        )
