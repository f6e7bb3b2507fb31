"""Rules of the user's: an expression in the spec, or a class of theirs."""

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
    """What a rule of the user's consists of."""

    when: Annotated[str, Field(min_length=1)]
    """The expression that must hold; see `docs/findings.md`."""

    patience: Count = 1
    """For so many records in a row it must hold."""

    node: Glob = "**"
    """Glob over nodes."""

    role: str = "*"
    """Which tensors of a node; a glob."""

    pass_: str = Field("forward", alias="pass")
    """`forward`, `grad`, `update` or another pass that is recorded; a glob."""

    kind: str = "*"
    """Kind of tensor: input, parameter, buffer, computed, target or loss; a glob."""

    kpi: str | None = None
    """Name of a number of each step, `loss` for one; the rule is then about this and not about
    tensors, and `value` is the number."""

    message: str | None = None
    """What to say when it holds."""

    advice: str = "You have written this rule yourself."
    """What to do about it."""


class _OwnRule(SlotRule):
    """An expression over the statistics of tensors."""

    Parameters = OwnParameters
    definition = "The expression in the spec holds."
    source = "The spec."
    advice = ""
    needs = "the tensors that its `node`, `role`, `pass` and `kind` name"

    _expression: Expression

    def reset(self) -> None:
        """Forgets the run, and what the expression remembers of it."""
        super().reset()
        self._expression = parse(self.parameters.when)
        self.statistics = tuple(n for n in self._expression.names if n not in _OF_WINDOW)  # type: ignore[misc]

    def wants(self, table: SlotTable) -> Mask:
        """Returns which slots the entry names."""
        return table.where(self._fits)

    def _fits(self, info: SlotInfo) -> bool:
        said, key = self.parameters, info.key
        return (
            matches(said.node, key.node)
            and fnmatchcase(key.role, said.role)
            and fnmatchcase(key.pass_, said.pass_)
            and fnmatchcase(info.kind, said.kind)
        )

    def measure(self, window: Window, at: Slots) -> Measured:
        """Works out the expression."""

        def read(name: str, over_batch: str) -> NDArray[Any]:
            if name == "step":
                return np.broadcast_to(window.steps[:, None], (len(window), len(at)))
            if name == "elements":
                return window.elements(at)
            return window.read(name, at, over_batch).astype(np.float64)

        hit = _truth(self._expression, read, at, (len(window), len(at)))
        return hit, hit.astype(np.float64)

    def sentence(self, scene: Scene, slot: int) -> str:
        """Returns what the spec says, or the expression."""
        text = self.parameters.message or f"`{self.parameters.when}` holds"
        return f"{scene.table.place(slot)}: {text}."

    def finding(self, scene: Scene, **facts: Any) -> Finding:
        """Returns a finding with the advice of the spec."""
        return super().finding(scene, **{**facts, "advice": self.parameters.advice})


class _OwnNumberRule(Rule):
    """An expression over a number that is said of each step."""

    Parameters = OwnParameters
    definition = _OwnRule.definition
    source = _OwnRule.source
    advice = ""

    _types: dict[str, int] = per_run(dict)
    _expression: Expression
    _streak: Streak

    def reset(self) -> None:
        """Forgets the run, and what the expression remembers of it."""
        super().reset()
        self._expression = parse(self.parameters.when)
        unknown = [n for n in self._expression.names if n not in ("value", "step")]
        if unknown:
            raise ExpressionError(f"{unknown[0]!r} is not known of a KPI; there is value and step")
        self._streak = Streak(self.parameters.patience)

    def look_at_numbers(self, numbers: Numbers) -> None:
        """Takes the next numbers."""
        if numbers.name != self.parameters.kpi:
            return
        at = np.array([self._types.setdefault(numbers.type, len(self._types))])
        known = {"value": numbers.values[:, None], "step": numbers.steps[:, None]}
        with np.errstate(all="ignore"):
            hit = _truth(self._expression, lambda name, _: known[name], at, (len(numbers.steps), 1))
        there = np.ones_like(hit)
        self._streak.look(
            numbers.steps,
            at,
            hit=hit,
            present=there,
            evidence=np.asarray(known["value"], np.float64),
        )

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns one finding if it ever held."""
        fired = self._streak.fired
        if not len(fired):
            return []
        said = self.parameters
        return [
            self.finding(
                scene,
                first_step=int(self._streak.first[fired].min()),
                last_step=int(self._streak.last[fired].max()),
                message=f"{said.kpi}: {said.message or f'`{said.when}` holds'}.",
                advice=said.advice,
                evidence={"value": float(self._streak.worst[fired[0]])},
            )
        ]

    def missing(self, scene: Scene) -> str | None:
        """Returns why it could not look."""
        kpi = self.parameters.kpi
        return None if self._types else f"nobody said {kpi!r}; say comgra.kpi({kpi!r}, value)"


def expression_rule(name: str, entry: Mapping[str, Any]) -> type[Rule]:
    """Returns a class for an expression of the user's."""
    base: type[Rule] = _OwnRule if entry.get("kpi") is None else _OwnNumberRule
    return type("OwnRule", (base,), {"name": name, "__doc__": f"The rule {name} of the spec."})


class _UnimportedRule(Rule):
    """Stands in the place of a class that a stored spec names and nobody has asked to run."""

    definition = source = advice = ""
    path: ClassVar[str]

    def findings(self, scene: Scene) -> list[Finding]:
        """Returns nothing."""
        return []

    def missing(self, scene: Scene) -> str | None:
        """Returns how to have it checked."""
        return (
            f"its class {self.path!r} is named by the run and was not imported; if you trust the "
            "run: comgra-decl diagnose --trust, or diagnose(run, trust=True)"
        )


def unimported_rule(name: str, path: str) -> type[Rule]:
    """Returns a class that says of one of the user's that it was not imported."""
    return type("UnimportedRule", (_UnimportedRule,), {"name": name, "path": path})


def imported_rule(name: str, path: str) -> type[Rule] | str:
    """Returns a class of the user's, or what is wrong with its path."""
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # noqa: BLE001  (the user's own code)
        return f"{path!r} cannot be imported: {type(error).__name__}: {error}"
    if not (isinstance(found, type) and issubclass(found, Rule)):
        return f"{path!r} is no class that derives from comgra_decl.rules.Rule"
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
