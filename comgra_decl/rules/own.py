"""The user's own rules, each an expression in the spec or a class."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from comgra_decl.rules.api import (
    Count,
    Field,
    Finding,
    Mask,
    Measured,
    Numbers,
    Patient,
    Rule,
    Scene,
    SlotInfo,
    SlotRule,
    Slots,
    SlotTable,
    Streak,
    Window,
    per_run,
)
from comgra_decl.rules.expression import Expression, ExpressionError, parse
from comgra_decl.spec.globs import matches
from comgra_decl.spec.nodes import Glob

_OF_WINDOW = ("step", "elements")


class OwnParameters(Patient):
    """Options of a rule that is an expression."""

    when: Annotated[str, Field(min_length=1)]
    """Condition, as an expression; see `docs/findings.md`."""

    patience: Count = 1

    node: Glob = "**"
    """The nodes to check; a glob."""

    role: str = "*"
    """The tensors of a node to check; a glob."""

    pass_: str = Field("forward", alias="pass")
    """The pass: `forward`, `grad`, `update` or another recorded one; a glob."""

    kind: str = "*"
    """The kind of tensor: input, parameter, buffer, computed, target or loss; a glob."""

    kpi: str | None = None
    """A metric such as `loss`, to check instead of tensors; `value` is then the metric's value."""

    message: str | None = None
    """Message if the expression is true."""

    advice: str = "This is your own rule. Its message describes the problem."
    """Advice about the problem."""


class _OwnRule(SlotRule):
    """An expression over the statistics of tensors."""

    Parameters = OwnParameters
    definition = "The expression in the spec is true."
    source = "The spec."
    advice = ""
    needs = "the tensors that its `node`, `role`, `pass` and `kind` select"

    _expression: Expression

    def reset(self) -> None:
        """Reset the rule and the memories of its expression."""
        super().reset()
        self._expression = parse(self.parameters.when)
        self.statistics = tuple(n for n in self._expression.names if n not in _OF_WINDOW)  # type: ignore[misc]

    def wants(self, table: SlotTable) -> Mask:
        """Return the slots selected by the entry."""
        return table.where(self._fits)

    def _fits(self, info: SlotInfo) -> bool:
        wanted, key = self.parameters, info.key
        return (
            matches(wanted.node, key.node)
            and fnmatchcase(key.role, wanted.role)
            and fnmatchcase(key.pass_, wanted.pass_)
            and fnmatchcase(info.kind, wanted.kind)
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Evaluate the expression."""

        def read(name: str, over_batch: str) -> NDArray[Any]:
            if name == "step":
                return np.broadcast_to(window.steps[:, None], (len(window), len(at)))
            if name == "elements":
                return window.elements(at)
            return window.read(name, at, over_batch).astype(np.float64)

        hit = _truth(self._expression, read, at, (len(window), len(at)))
        return hit, hit.astype(np.float64)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Return the message from the spec, or the expression."""
        text = self.parameters.message or f"`{self.parameters.when}` holds"
        return f"{scene.table.place(slot)}: {text}."

    def finding(self, scene: Scene, **facts: Any) -> Finding:
        """Return a finding with the advice from the spec."""
        return super().finding(scene, **{**facts, "advice": self.parameters.advice})


class _OwnNumberRule(Rule):
    """An expression over a metric."""

    Parameters = OwnParameters
    definition = _OwnRule.definition
    source = _OwnRule.source
    advice = ""

    _types: dict[str, int] = per_run(dict)
    _expression: Expression
    _streak: Streak

    def reset(self) -> None:
        """Reset the rule and the memories of its expression."""
        super().reset()
        self._expression = parse(self.parameters.when)
        unknown = [n for n in self._expression.names if n not in ("value", "step")]
        if unknown:
            raise ExpressionError(
                f"unknown name {unknown[0]!r} in a rule about a metric; use value and step"
            )
        self._streak = Streak(self.parameters.patience)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Process the next values."""
        if numbers.name != self.parameters.kpi:
            return
        at = np.array([self._types.setdefault(numbers.type, len(self._types))])
        known = {"value": numbers.values[:, None], "step": numbers.steps[:, None]}
        with np.errstate(all="ignore"):
            hit = _truth(self._expression, lambda name, _: known[name], at, (len(numbers.steps), 1))
        self._streak.look(
            numbers.steps,
            at,
            hit=hit,
            present=np.ones_like(hit),
            evidence=np.asarray(known["value"], np.float64),
        )

    def findings(self, scene: Scene) -> list[Finding]:
        """Return one finding if the expression was ever true."""
        fired = self._streak.fired
        if not len(fired):
            return []
        own = self.parameters
        lead = int(fired[self._streak.first[fired].argmin()])
        return [
            self.finding(
                scene,
                first_step=int(self._streak.first[lead]),
                after_step=self._streak.after_step(lead),
                last_step=int(self._streak.last[fired].max()),
                message=f"{own.kpi}: {own.message or f'`{own.when}` holds'}.",
                advice=own.advice,
                evidence={"value": float(self._streak.worst[fired[0]])},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Return the reason why the run could not be checked, or None."""
        kpi = self.parameters.kpi
        if self._types:
            return None
        return f"no metric {kpi!r} is logged; call comgra.kpi({kpi!r}, value)"


def expression_rule(name: str, entry: Mapping[str, Any]) -> type[Rule]:
    """Return a rule class for the user's expression."""
    base: type[Rule] = _OwnRule if entry.get("kpi") is None else _OwnNumberRule
    return type("OwnRule", (base,), {"name": name, "__doc__": f"The rule {name} of the spec."})


class _UnimportedRule(Rule):
    """Replaces a class that is named in a stored spec and was not imported."""

    definition = source = advice = ""
    path: ClassVar[str]

    def findings(self, scene: Scene) -> list[Finding]:
        """Return no findings."""
        return []

    def missing(self, scene: Scene) -> str | None:
        """Return a message that explains how to run the class."""
        return (
            f"its class {self.path!r} was not imported; if you trust the run, use comgra-decl "
            "diagnose --trust, or diagnose(run, trust=True)"
        )


def unimported_rule(name: str, path: str) -> type[Rule]:
    """Return a rule class that reports that the user's class was not imported."""
    return type("UnimportedRule", (_UnimportedRule,), {"name": name, "path": path})


def imported_rule(name: str, path: str) -> type[Rule] | str:
    """Return the user's class, or an error message about its path."""
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # noqa: BLE001  (the user's own code)
        return f"{path!r} cannot be imported: {type(error).__name__}: {error}"
    if not (isinstance(found, type) and issubclass(found, Rule)):
        return f"{path!r} is not a subclass of comgra_decl.rules.Rule"
    facts: dict[str, Any] = {"name": name, "__doc__": found.__doc__}
    for fact in ("definition", "source", "advice"):
        facts.setdefault(fact, getattr(found, fact, ""))
    return type(found.__name__, (found,), facts)


def _truth(
    expression: Expression, read: Any, at: Slots, shape: tuple[int, int]
) -> NDArray[np.bool_]:
    values = np.asarray(expression.term(read, at))
    held = values if values.dtype == np.bool_ else ~np.isnan(values) & (values != 0)
    return np.broadcast_to(held, shape)
