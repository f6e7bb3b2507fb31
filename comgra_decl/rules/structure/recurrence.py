"""Recurrent cells that cannot learn through time."""

from __future__ import annotations

from typing import Annotated

from comgra_decl.rules.api import Field, Finding, Int, Place, Rule, RuleParameters, Scene, Structure

_CELLS = ("GRUCell", "LSTMCell", "RNNCell")


class CutParameters(RuleParameters):
    """Options of `cut_recurrence`."""

    least: Annotated[Int, Field(ge=3)] = 4
    """Smallest number of calls to a cell in a step."""


class CutRecurrence(Rule):
    """Recurrent cells whose state carries no gradient from one call to the next."""

    name = "cut_recurrence"
    severity = "error"
    certainty = 0.8
    definition = (
        "A recurrent cell (a module whose class is called ...Cell) is called at least `least` "
        "times in a step with gradients, and in the dependency graph, no path with a gradient "
        "leads from any call to a later one. There are two cases: there are paths without a "
        "gradient (the state is detached), or there are no paths at all (every call starts with a "
        "new state; reported only for GRUCell, LSTMCell and RNNCell). Gradients across optimizer "
        "steps are not expected."
    )
    source = (
        "Werbos, Backpropagation through time (1990). Truncation after a single step leaves only "
        "the current input to learn from. Our own definition."
    )
    advice = (
        "Keep the state attached within a sequence, and detach it only between sequences or "
        "chunks (truncated backpropagation through time)."
    )
    Parameters = CutParameters

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such cell."""
        if scene.structure is None:
            return []
        cells = {
            info.key.node: info.module_class
            for info in scene.table.infos
            if info.kind == "computed" and info.module_class.endswith("Cell")
        }
        for cell, kind in sorted(cells.items()):
            found = _links(scene.structure, cell)
            if found is None or found[0] < self.parameters.least or found[2]:
                continue
            calls, values, _ = found
            if not values and kind not in _CELLS:
                continue
            how = (
                "no gradient flows from one call to the previous one: its state is detached in "
                "every call"
                if values
                else "no call depends on an earlier one: its state is reset in every call"
            )
            return [
                self.finding(
                    scene,
                    place=Place(cell),
                    first_step=0,
                    message=f"{cell} is called {calls} times per step, but {how}. It cannot learn "
                    "anything that takes more than one time step.",
                    evidence={"calls": calls},
                )
            ]
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if scene.structure is not None else "no dependency graph; set `graph: true`"


def _links(structure: Structure, node: str) -> tuple[int, bool, bool] | None:
    """Return the number of calls, and whether any call leads to a later one with a gradient."""
    keys = structure.keys
    own = {
        i: key.iteration
        for i, key in enumerate(keys)
        if key.node == node and key.pass_ == "forward" and structure.kinds[i] == "computed"
    }
    if not own:
        return None
    sinks: dict[int, list[tuple[int, bool]]] = {}
    for a, b, gradient in structure.edges:
        sinks.setdefault(a, []).append((b, gradient))
    by_value = by_gradient = False
    for start, call in own.items():
        seen, waiting = {(start, True)}, [(start, True)]
        for at, flows in waiting:
            for sink, gradient in sinks.get(at, ()):
                then = (sink, flows and gradient)
                if own.get(sink, call) > call:
                    by_value = True
                    by_gradient = by_gradient or then[1]
                elif then not in seen:
                    seen.add(then)
                    waiting.append(then)
        if by_gradient:
            break
    return len({*own.values()}), by_value, by_gradient
