"""What the interventions on probes show: changes without any effect."""

from __future__ import annotations

from typing import Any

from comgra_decl.rules.api import INTERVENTION_CHECKS, Finding, Place, Rule, Scene

_LISTED = 4


class InterventionDidNothing(Rule):
    """An intervention that changes no value, or not the model's output."""

    name = "intervention_did_nothing"
    severity = "hint"
    certainty = 0.9
    definition = (
        "At the newest record of an intervention, every element of a changed tensor has kept its "
        "value, no receiver has received another value, or the model's output is the same to the "
        "last bit, and, if gradients are changed, so are those of all parameters and inputs; in a "
        "sweep, no place has an effect."
    )
    source = "Our own: two passes of the same samples through the same model are compared."
    advice = (
        "Check `select`, `role` and `parts`: is this tensor used by what follows? Of a module that "
        "returns several tensors, another one may be (`role: output[1]`). A ReLU that is never "
        "active or a patch with the same values has no effect, either. Only if the tensor is the "
        "right one, the model does not depend on it."
    )

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        if self._records(scene):
            return None
        return "it needs `interventions`; see `docs/interventions.md`"

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the interventions that did nothing."""
        idle = {name: r for name, r in self._records(scene).items() if r["nothing"] is not None}
        if not idle:
            return []
        (name, record), *others = idle.items()
        node, role = str(record.get("node", "input")), str(record.get("role", ""))
        message = f"At step {record['step']}, " + record["nothing"].format(
            f"the intervention {name!r}"
        )
        if others:
            named = ", ".join(repr(other) for other, _ in others[:_LISTED])
            more = ", ..." if len(others) > _LISTED else ""
            message += f". Neither did {named}{more} have an effect"
        return [
            self.finding(
                scene,
                place=Place(node, role if role.startswith("output") else "output"),
                first_step=min(int(each["since"]) for each in idle.values()),
                message=f"{message}.",
                evidence={"interventions": len(idle)},
            )
        ]

    def _records(self, scene: Scene) -> dict[str, dict[str, Any]]:
        found = scene.documents.get(INTERVENTION_CHECKS)
        return found if isinstance(found, dict) else {}
