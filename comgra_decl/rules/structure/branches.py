"""Branches that have no effect when they are combined."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np

from comgra_decl.rules.api import (
    Count,
    Factor,
    Field,
    Finding,
    First,
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
    sources_of,
)

_STARTS_SMALL = 10  # times `ratio`; a branch below this limit starts small on purpose


class BranchParameters(Patient):
    """Options of the rules about branches."""

    patience: Count = 10

    ratio: Fraction = 1e-3
    """Smallest allowed magnitude, relative to the largest branch."""

    drowned: Factor = 8.0
    """Largest allowed magnitude of a parameter that is added to data, relative to the data."""

    after: Annotated[Int, Field(ge=0)] = 10
    """Number of initial records to ignore, because branches may start at zero on purpose."""


class _Branches(SlotRule):
    """Compares tensors of the same shape that are combined into one tensor."""

    Parameters = BranchParameters
    of_state = True
    statistics = ("l2",)
    lowest, evidence = True, "share of the largest branch"
    pass_, of_graph = "forward", True

    _groups: list[Slots] = per_run(list)
    _first = per_run(First)

    def wants(self, table: SlotTable) -> Mask:
        """Return the tensors that are combined with others."""
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
        """Return the size of each branch relative to the largest one it is combined with."""
        if not self._groups:
            return np.zeros((len(window), len(at)), np.bool_), np.zeros((len(window), len(at)))
        size = window.read("l2", np.arange(len(window.table))).astype(np.float64)
        share = np.full(size.shape, np.nan)
        for group in self._groups:
            part = size[:, group]
            share[:, group] = np.fmin(share[:, group], part / np.fmax.reduce(part, 1)[:, None])
        late = window.first + np.arange(len(window)) >= self.parameters.after
        found = share[:, at]
        self._first.look(at, found)
        return (found < self.parameters.ratio) & late[:, None], found

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out branches that are small only in some iterations, such as initial states."""
        return self.in_every_iteration(scene, fired)


class BranchIgnored(_Branches):
    """A branch that is too small to have an effect when it is added."""

    name = "branch_ignored"
    certainty = 0.5
    of_state = True
    definition = (
        "Several tensors of the same shape are combined into another tensor of that shape, for "
        "example a residual branch and its skip connection. For `patience` records in a row, and "
        "in every iteration within a step, one of them has an l2 norm below `ratio` times the "
        "largest norm. The first `after` records are ignored. The finding is a hint if all such "
        f"branches start below {_STARTS_SMALL} times this limit, as with a gain that is "
        "initialized near zero. Alternatively, a parameter of shape [1, positions, features] "
        "enters the same module as a computed tensor of shape [batch, positions, features]. In "
        "all of the last `patience` records, its root mean square is more than `drowned` times "
        "that of the tensor."
    )
    source = "comgra's README, which announces a check for residual connections that are ignored."
    advice = (
        "If the branch starts at zero on purpose, its learning rate may be too low. Otherwise "
        "normalize both branches or rescale this one. If this is the skip connection, check what "
        "reduces its magnitude."
    )
    explained_by = (
        "nonfinite",
        "dead_units",
        "all_zero",
        "untrained_parameter",
        "activation_drift",
    )
    needs = "outputs of branches that are combined, with `graph: true`"

    _drowning: dict[int, int] = per_run(dict)  # recent records by parameter
    _drowned: dict[int, tuple[int, int, float]] = per_run(dict)  # first step, branch, ratio

    def look(self, window: Window) -> None:
        """Process the next training records."""
        super().look(window)
        for parameter, branches in self._added(window).items():
            at = np.array([parameter, *branches], np.int64)
            sizes = window.read("l2", at) / np.sqrt(window.elements(at))
            ratio = sizes[:, 0] / np.fmax.reduce(sizes[:, 1:], axis=1)
            largest = int(branches[int(np.nanargmax(np.nan_to_num(sizes[0, 1:])))])
            for step, value in zip(window.steps.tolist(), ratio.tolist(), strict=True):
                drowns = value > self.parameters.drowned
                self._drowning[parameter] = self._drowning.get(parameter, 0) + 1 if drowns else 0
                if drowns:
                    first, _, worst = self._drowned.get(parameter, (step, 0, 0.0))
                    self._drowned[parameter] = first, largest, max(worst, value)
                else:
                    self._drowned.pop(parameter, None)

    def _added(self, window: Window) -> dict[int, list[int]]:
        """Return parameters, with the computed tensors to which they may be added.

        These tensors have the same number of dimensions and the same last dimension as the
        parameter, and enter the same module, which does not own the parameter.
        """
        if not window.has("l2"):
            return {}
        infos = window.table.infos
        found: dict[int, list[int]] = {}
        for sink, sources in sources_of(self.scene).items():
            known = [infos[slot] for slot in dict.fromkeys(sources)]
            given = [i for i in known if i.kind == "computed" and i.batch_dim is not None]
            for info in known:
                outside = info.kind == "parameter" and info.key.node != infos[sink].key.node
                if outside and len(info.shape) == 3 and info.shape[0] == 1:
                    alike = [
                        i.id for i in given if (len(i.shape), i.shape[-1]) == (3, info.shape[-1])
                    ]
                    if alike:
                        found.setdefault(info.id, alike)
        return found

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about a branch, or about an input that a parameter outweighs."""
        found = super().findings(scene)
        if found and self.parameters.severity is None:
            fired = self.chosen(scene, self.streak.lasting)
            if (self._first.known(fired) < _STARTS_SMALL * self.parameters.ratio).all():
                found = [replace(found[0], severity="hint")]  # initialized near zero
        return found or self._drowned_inputs(scene)

    def _drowned_inputs(self, scene: Scene) -> list[Finding]:
        for parameter, (step, branch, ratio) in self._drowned.items():
            if self._drowning[parameter] >= min(self.parameters.patience, scene.records):
                place = scene.table.place(branch)
                return [
                    self.finding(
                        scene,
                        place=place,
                        first_step=step,
                        message=f"{place} has hardly any effect: {scene.table.place(parameter)}, "
                        "which is added to it and is the same for all samples, is up to "
                        f"{ratio:.0f} times as large.",
                        advice="Use smaller initial values for the parameter (0.02 is common for "
                        "positions), or scale up the tensor it is added to.",
                        evidence={"ratio": ratio},
                    )
                ]
        return []

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"{scene.table.place(slot)} has hardly any effect: its norm is "
            f"{self.streak.worst[slot]:.1e} times that of the largest branch it is combined with."
        )


class GradientImbalance(_Branches):
    """A branch whose gradient is much smaller than that of another branch."""

    name = "gradient_imbalance"
    certainty = 0.45
    of_state = True
    definition = (
        "Several tensors of the same shape are combined. For `patience` records in a row, and in "
        "every iteration within a step, the gradient of one of them has an l2 norm below `ratio` "
        "times the largest norm among the others. The first `after` records are ignored."
    )
    source = (
        "comgra and torchexplorer, in which users compare gradients visually. The default was "
        "chosen for this rule."
    )
    advice = (
        "Rescale or normalize the branches. Check the branch with the small gradient for "
        "saturation and detach()."
    )
    explained_by = ("nonfinite", "dead_units", "saturated", "vanishing_gradient", "branch_ignored")
    backwards, pass_ = True, "grad"
    needs = (
        "gradients of branches that are combined, {select: '**', capture: [output_grad]}, with "
        "`graph: true`"
    )

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return (
            f"The norm of {scene.table.place(slot)} is {self.streak.worst[slot]:.1e} times the "
            "norm of the largest gradient among the branches it is combined with."
        )
