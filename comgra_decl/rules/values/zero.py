"""Outputs that are entirely zero."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import (
    Mask,
    Measured,
    Scene,
    SlotRule,
    Slots,
    SlotTable,
    Window,
    sources_of,
)


class AllZero(SlotRule):
    """Outputs that are entirely zero."""

    name = "all_zero"
    certainty = 0.6
    definition = (
        "For `patience` records in a row, the output of a module is exactly zero in all elements "
        "of all samples, in every iteration within a step. Further outputs of a module that depend "
        "on no parameter, such as an empty bias of positions, are ignored."
    )
    source = "SageMaker Debugger's check for tensors whose values are all zero."
    advice = (
        "Check the inputs. Common causes are a rectifier whose units are all dead, zero weights "
        "that are not trained, a mask that covers everything, and underflow in float16."
    )
    explained_by = ("dead_units", "untrained_parameter")
    of_state = True
    statistics = ("abs_max",)
    lowest, evidence = True, "largest magnitude"
    needs = "outputs, {select: '**', capture: [output]}"

    def wants(self, table: SlotTable) -> Mask:
        """Return outputs of modules."""
        return table.outputs & table.where(lambda i: bool(i.module_class))

    def measure(self, window: Window, at: Slots) -> Measured:
        """Return where the largest magnitude of a tensor is zero."""
        size = window.read("abs_max", at, "abs_max")
        return size == 0, np.asarray(size)

    def chosen(self, scene: Scene, fired: Slots) -> Slots:
        """Leave out tensors that are zero in some iterations only, and constants of the program."""
        fired, sources = self.in_every_iteration(scene, fired), sources_of(scene)
        infos = scene.table.infos
        constant = {info.id for info in infos if info.kind == "input"}
        for at in fired[np.argsort(scene.table.order[fired])].tolist() if sources else ():
            if infos[at].key.role != "output" and constant.issuperset(sources.get(at, ())):
                constant.add(at)
        return fired[~np.isin(fired, list(constant))]

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message for a slot."""
        return f"{scene.table.place(slot)} is exactly zero in all elements of all samples."
