"""The built-in rules by name, and the rules that a spec selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from comgra_decl.errors import SpecError, did_you_mean
from comgra_decl.rules.base import Rule
from comgra_decl.rules.expression import ExpressionError
from comgra_decl.rules.own import expression_rule, imported_rule, unimported_rule
from comgra_decl.spec.problems import explain

if TYPE_CHECKING:
    from comgra_decl.spec.rules import Rules

FAMILIES = (
    "precision",
    "gradients",
    "parameters",
    "values",
    "activations",
    "attention",
    "loss",
    "data",
    "structure",
    "resources",
)
"""The folders of the built-in rules, in the order of the documentation."""


@cache
def known() -> Mapping[str, type[Rule]]:
    """Return the classes of all built-in rules, by name."""
    found: dict[str, type[Rule]] = {}
    for family in FAMILIES:
        folder = import_module(f"{__package__}.{family}")
        for entry in walk_packages(folder.__path__, f"{folder.__name__}."):
            for thing in vars(import_module(entry.name)).values():
                if _is_rule(thing) and thing.__module__ == entry.name:
                    found[thing.name] = thing
    return found


def _is_rule(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Rule) and hasattr(thing, "name")


def statistic_of(rule: str) -> str | None:
    """Return the statistic that a rule measures; None unless it measures exactly one.

    Args:
        rule: name of the rule; None is returned for a rule that does not exist.
    """
    names: tuple[str, ...] = getattr(known().get(rule), "statistics", ())
    return names[0] if len(names) == 1 else None


def build(rules: Rules, *, trust: bool = False) -> list[Rule]:
    """Return new instances of the rules that a spec selects.

    Args:
        rules: "default" for all built-in rules, "off" for no rules, or a mapping that changes
            individual rules (to "off" or to other options) and adds the user's own rules.
        trust: whether to import the user's classes. The spec of a stored run may name any class. If
            False, such classes are replaced by rules that are reported as unchecked.

    Raises:
        SpecError: unknown rule, unknown option, or invalid expression.
    """
    built, found = _built(rules, trust=trust)
    if found:
        raise SpecError(found)
    return built


def problems(rules: Rules, *, trust: bool) -> list[str]:
    """Return the problems of the rules that a spec selects, one line per problem.

    Args:
        rules: as for `build`.
        trust: whether to import the user's classes, to check that they exist.
    """
    return _built(rules, trust=trust)[1]


def _built(rules: Rules, *, trust: bool) -> tuple[list[Rule], list[str]]:
    """Return the rules that could be created, and the problems of all others."""
    if rules == "off":
        return [], []
    entries: Mapping[str, Any] = {} if isinstance(rules, str) else rules
    problems: list[str] = []
    built: list[Rule] = []
    for name, kind in known().items():
        entry = entries.get(name, {})
        if entry != "off":
            _append(built, problems, kind, name, entry)
    for name, entry in entries.items():
        if name not in known():
            _append_own(built, problems, name, entry, trust=trust)
    return built, problems


def _append(
    built: list[Rule], problems: list[str], kind: type[Rule], name: str, entry: Mapping[str, Any]
) -> None:
    try:
        built.append(kind(kind.Parameters.model_validate(dict(entry))))
    except ValidationError as error:
        lines = explain(error, kind.Parameters, dict(entry))
        problems += [line.replace("comgra", f"comgra.rules.{name}", 1) for line in lines]
    except ExpressionError as error:
        problems.append(f"comgra.rules.{name}.when: {error}")


def _append_own(
    built: list[Rule], problems: list[str], name: str, entry: Any, *, trust: bool
) -> None:
    """Add a rule declared by the user: an expression or a class."""
    if isinstance(entry, Mapping) and "when" in entry:
        _append(built, problems, expression_rule(name, entry), name, entry)
    elif isinstance(entry, Mapping) and "_target_" in entry:
        path = str(entry["_target_"])
        if not trust:
            built.append(unimported_rule(name, path)())
            return
        kind = imported_rule(name, path)
        if isinstance(kind, str):
            problems.append(f"comgra.rules.{name}: {kind}")
        else:
            rest = {key: value for key, value in entry.items() if key != "_target_"}
            _append(built, problems, kind, name, rest)
    else:
        problems.append(
            f"comgra.rules.{name}: unknown rule{did_you_mean(name, known())}; a rule of your own "
            "has {when: '<expression>'} or {_target_: package.module.Class}"
        )
