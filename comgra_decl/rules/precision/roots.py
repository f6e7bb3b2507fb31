"""Roots whose derivative is infinite."""

from __future__ import annotations

import numpy as np

from comgra_decl.rules.api import Finding, Place, Rule, Scene, Window, calls_missing


class RootOfZero(Rule):
    """Roots of exactly zero, whose derivative is infinite."""

    name = "root_of_zero"
    severity = "error"
    certainty = 0.8
    definition = (
        "In the first records, `sqrt`, or `pow` with an exponent between 0 and 1, is applied to a "
        "tensor with a gradient, some elements of which are exactly 0, and some recorded gradient "
        "is not finite. The derivative of a root at 0 is infinite, so the backward pass yields "
        "infinity, or NaN if it is multiplied by 0, even where a mask hides the result."
    )
    source = (
        "d sqrt(x) / dx = 1 / (2 sqrt(x)). A common case is the distance between two identical "
        "samples. Our own definition."
    )
    advice = (
        "Add a small number before taking the root, (d2 + 1e-8).sqrt(), or use "
        "`torch.linalg.vector_norm` or `F.pairwise_distance`, whose gradient at 0 is finite."
    )

    _broken = -1

    def look(self, window: Window) -> None:
        """Look for the first gradient that is not finite."""
        at = np.flatnonzero(window.table.backward)
        if self._broken < 0 and len(at) and window.has("nonfinite"):
            bad = (window.read("nonfinite", at, "abs_max") > 0).any(1)
            if bad.any():
                self._broken = int(window.steps[np.argmax(bad)])

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such root."""
        found = scene.told("root of zero")
        if not found or self._broken < 0:
            return []
        fact = found[0]
        return [
            self.finding(
                scene,
                place=Place(str(fact.get("where") or "sqrt")),
                first_step=self._broken,
                message=f"{fact['where']} takes the root of a tensor of shape {fact['shape']}, of "
                f"which {fact['zeros']} elements are exactly 0. The derivative there is infinite, "
                "and gradients are not finite.",
                evidence={"zeros": fact["zeros"], "shape": str(fact["shape"])},
                also=len({each["where"] for each in found}) - 1,
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return calls_missing(scene)
