"""Momentum and betas that are swapped or far too large."""

from __future__ import annotations

from typing import Any

from comgra_decl.rules.api import OPTIMIZERS, Finding, Fraction, Rule, RuleParameters, Scene, Window

_FEW = 50  # steps, in which a slow average cannot follow anyway


class MomentumParameters(RuleParameters):
    """Options of `unusual_momentum`."""

    most: Fraction = 0.98
    """Largest usual share of the previous step that is kept (momentum, or the first beta)."""


class UnusualMomentum(Rule):
    """Momentum and betas that are swapped or far too large."""

    name = "unusual_momentum"
    certainty = 0.75
    definition = (
        "An optimizer's `momentum`, or the first of its `betas`, is above `most`, so that steps "
        "follow an average over more than 50 steps. Or the first beta is larger than the second, "
        "as if they were swapped."
    )
    source = "Kingma and Ba, Adam (2015): beta1 = 0.9 and beta2 = 0.999. Our own limit."
    advice = "Use momentum 0.9, or betas=(0.9, 0.999)."
    Parameters = MomentumParameters

    _found: tuple[int, str, str] | None = None  # step, optimizer, and the setting
    _seen = False

    def look(self, window: Window) -> None:
        """Read the settings of optimizers."""
        for optimizers, first, _ in window.spans(OPTIMIZERS):
            for optimizer in optimizers:
                for group in optimizer.get("groups") or ():
                    setting = self._wrong(group) if isinstance(group, dict) else None
                    if setting and self._found is None:
                        name = str(optimizer.get("class"))
                        self._found = int(window.steps[first]), name, setting
                self._seen = True

    def _wrong(self, group: dict[str, Any]) -> str | None:
        betas, momentum = group.get("betas"), group.get("momentum")
        known = [b for b in betas or () if isinstance(b, (int, float))]
        if len(known) > 1 and (known[0] > known[1] or known[0] > self.parameters.most):
            return f"betas=({', '.join(f'{beta:g}' for beta in known)})"
        if isinstance(momentum, (int, float)) and momentum > self.parameters.most:
            return f"momentum={momentum:g}"
        return None

    def findings(self, scene: Scene) -> list[Finding]:
        """Return a finding about the first such setting."""
        if self._found is None or scene.last_step < _FEW:
            return []
        step, name, setting = self._found
        swapped = setting.startswith("betas")
        return [
            self.finding(
                scene,
                first_step=step,
                message=f"{name} has {setting}: steps follow an average over very many earlier "
                "gradients and overshoot." + (" The two values may be swapped." if swapped else ""),
                evidence={"setting": setting},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return why the rule could not check the run."""
        return None if self._seen else "no record contains the settings of an optimizer"
